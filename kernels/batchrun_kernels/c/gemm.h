/* y = x W^T + bias in float32, the weights packed once as panels of 16 outputs: [ceil(n / 16)][k][16].
 *
 * Threads share out cells of a block of rows and two panels, so that a product of few panels and many rows keeps all
 * of them busy.
 */

/* c[rows][16 * panels] (+)= a[rows][k] times the same piece b[k][16] of panels that begin `apart` floats from each
 * other; `first` starts from zero instead of from c. */
INLINE void NAME(gemm_rows)(const int rows, const int vectors, const float *a, long lda, const float *b, long apart,
                            long k, float *c, long ldc, int first, const float *next, const float *end, long lines)
{
    VECTOR acc[ROWS][2] = {0};
    if (!first)
        NAME(load)(acc, rows, vectors, c, ldc);
    NAME(accumulate)(acc, rows, vectors, a, lda, b, apart, WIDTH, k, next, end, lines);
    NAME(store)(acc, rows, vectors, c, ldc);
}

NOINLINE void NAME(gemm_pair)(int rows, const float *a, long lda, const float *b, long apart, long k, float *c,
                              long ldc, int first, const float *next, const float *end, long lines)
{
    FOR_ROWS(gemm_rows, rows, 2, a, lda, b, apart, k, c, ldc, first, next, end, lines)
}

NOINLINE void NAME(gemm_single)(int rows, const float *a, long lda, const float *b, long k, float *c, long ldc,
                                int first, const float *next, const float *end, long lines)
{
    FOR_ROWS(gemm_rows, rows, 1, a, lda, b, 0, k, c, ldc, first, next, end, lines)
}

/* The outputs of a cell, carried on over `piece` steps of k from `start`; c [rows of the cell][ldc]. `next` is prefetched
 * where there are groups to compute meanwhile: what the following cell will take from the panels. */
static void NAME(gemm_groups)(const struct product *a, const struct cell *cell, long start, long piece,
                              const float *next, float *c, long ldc)
{
    const long groups = cell->high - cell->low, panels = cell->to - cell->from, ahead = piece * panels;
    const float *panel = a->packed + (cell->from * a->k + start) * WIDTH;
    const long first = group_row(a->m, a->groups, cell->low);
    /* Every group takes its share of `next`, evenly: memory is read as long as there is something to compute. A single
     * group is done before memory is, and reads shortly ahead instead. */
    const long lines = groups > 1 ? (4 * panels + groups - 1) / groups : 0;
    for (long g = 0; g < groups; g++) {
        const long row = group_row(a->m, a->groups, cell->low + g);
        const int num = (int)(group_row(a->m, a->groups, cell->low + g + 1) - row);
        const float *x = a->x + row * a->k + start;
        const float *from = next && lines ? next + ahead * g / groups * WIDTH : 0;
        const float *to = next && lines ? next + ahead * (g + 1) / groups * WIDTH : 0;
        if (panels * WIDTH > LANES)
            NAME(gemm_pair)(num, x, a->k, panel, panels > 1 ? a->k * WIDTH : LANES, piece, c + (row - first) * ldc, ldc,
                            start == 0, from, to, lines);
        else
            NAME(gemm_single)(num, x, a->k, panel, piece, c + (row - first) * ldc, ldc, start == 0, from, to, lines);
    }
}

/* A cell of y, carried on. A last panel of fewer than 16 columns is computed beside y: a row of y is no wider than n. */
static void NAME(gemm_cell)(const struct product *a, const struct cell *cell, long start, long piece, const float *next)
{
    const long full = (cell->to - cell->from) * WIDTH, column = cell->from * WIDTH;
    const long first = group_row(a->m, a->groups, cell->low), rows = group_row(a->m, a->groups, cell->high) - first;
    const long width = a->n - column < full ? a->n - column : full;
    float *y = a->y + first * a->n + column, aside[width < full ? rows * full : 1];
    float *c = width < full ? aside : y;
    const long ldc = width < full ? full : a->n;
    if (width < full && start)
        for (long r = 0; r < rows; r++)
            memcpy(aside + r * full, y + r * a->n, width * sizeof(float));
    NAME(gemm_groups)(a, cell, start, piece, next, c, ldc);
    const float *bias = start + piece == a->k ? a->bias : 0;
    if (!bias && width == full)
        return;
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < width; j++)
            y[r * a->n + j] = bias ? c[r * ldc + j] + bias[column + j] : c[r * ldc + j];
}

static void NAME(gemm)(const float *x, const float *packed, const float *bias, float *y, long m, long n, long k)
{
    const struct product a = {x, packed, bias, y, m, n, k, (m + ROWS - 1) / ROWS};
    const long deep = k < K_PIECE ? k : K_PIECE;
    const struct grid grid = grid_of(m, n, ROWS, BLOCK_FLOATS / deep, PANELS);
    for (long start = 0; start < k; start += deep) {
        const long piece = k - start < deep ? k - start : deep, least = least_cells(&grid, m * n * piece);
#pragma omp parallel for schedule(guided, least) if (m * n * piece > SMALL_WORK)
        for (long i = 0; i < grid.cells; i++) {
            const struct cell cell = cell_of(&grid, i);
            NAME(gemm_cell)(&a, &cell, start, piece, cell.to < grid.panels ? packed + (cell.to * k + start) * WIDTH : 0);
        }
    }
}
