/* y = act(x G^T) * (x U^T) in float32: a product with a weight whose outputs are n gates before n ups, n a multiple of
 * 16, and what the kernel of glu makes of it, to the bit; neither gates nor ups are written to memory.
 */

/* y[rows][LANES] of a vector of gates and one of ups, whose panels begin `apart` floats from each other. */
INLINE void NAME(gemm_glu_rows_of)(const int rows, const float *a, long lda, const float *gates, long apart, long k,
                                   float *y, long ldy, int is_gelu, const float *next, const float *end, long lines)
{
    VECTOR acc[ROWS][2] = {0};
    NAME(accumulate)(acc, rows, 2, a, lda, gates, apart, WIDTH, k, next, end, lines);
    for (int r = 0; r < rows; r++)
        acc[r][0] = NAME(gated)(acc[r][0], acc[r][1], is_gelu);
    NAME(store)(acc, rows, 1, y, ldy);
}

NOINLINE void NAME(gemm_glu_rows)(int rows, const float *a, long lda, const float *gates, long apart, long k, float *y,
                                  long ldy, int is_gelu, const float *next, const float *end, long lines)
{
    FOR_ROWS(gemm_glu_rows_of, rows, a, lda, gates, apart, k, y, ldy, is_gelu, next, end, lines)
}

/* A cell of one panel of gates and the same of ups. The following cell's are prefetched: the gates by the first groups,
 * the ups by the others, each its share. A single group reads shortly ahead instead. */
static void NAME(gemm_glu_cell)(const struct product *a, const struct cell *cell, int is_gelu, int is_last)
{
    const long panel = a->k * WIDTH, apart = a->n * a->k, groups = cell->high - cell->low, first = (groups + 1) / 2;
    const float *gates = a->packed + cell->from * panel, *next = is_last || groups == 1 ? 0 : gates + panel;
    for (long i = 0; i < groups; i++) {
        const long row = group_row(a->m, a->groups, cell->low + i);
        const int num = (int)(group_row(a->m, a->groups, cell->low + i + 1) - row);
        const long at = i < first ? i : i - first, of = i < first ? first : groups - first;
        const float *from = next ? (i < first ? next : next + apart) : 0;
        for (long column = 0; column < WIDTH; column += LANES)
            NAME(gemm_glu_rows)(num, a->x + row * a->k, a->k, gates + column, apart, a->k,
                                a->y + row * a->n + cell->from * WIDTH + column, a->n, is_gelu,
                                from ? from + a->k * at / of * WIDTH : 0, from ? from + a->k * (at + 1) / of * WIDTH : 0,
                                next ? (4 + of - 1) / of : 0);
    }
}

/* x [m][k], y [m][n]; k is at most K_PIECE. */
static void NAME(gemm_glu)(const float *x, const float *packed, float *y, long m, long n, long k, int is_gelu)
{
    const struct product a = {x, packed, 0, y, m, n, k, (m + ROWS - 1) / ROWS};
    const struct grid grid = grid_of(m, n, ROWS, BLOCK_FLOATS / k, 1);
    const long work = 2 * m * n * k, least = least_cells(&grid, work);
#pragma omp parallel for schedule(guided, least) if (work > SMALL_WORK)
    for (long i = 0; i < grid.cells; i++) {
        const struct cell cell = cell_of(&grid, i);
        NAME(gemm_glu_cell)(&a, &cell, is_gelu, cell.to == grid.panels);
    }
}
