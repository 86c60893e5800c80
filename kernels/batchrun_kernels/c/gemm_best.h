/* The largest of x W^T in every row, and its place: a product of which nothing else is written to memory. */

/* A row's largest outputs so far, lane by lane, their places, and where a NaN was. */
struct NAME(lead) {
    VECTOR value;
    INTS place, is_nan;
};

/* The outputs of a cell take part; leads [m]. */
static void NAME(lead_cell)(const struct product *a, const struct cell *cell, const float *next,
                            struct NAME(lead) *leads)
{
    const INTS lanes = LANE_NUMBERS;
    const long full = (cell->to - cell->from) * WIDTH, column = cell->from * WIDTH;
    const long first = group_row(a->m, a->groups, cell->low), rows = group_row(a->m, a->groups, cell->high) - first;
    float c[rows * full];
    NAME(gemm_groups)(a, cell, 0, a->k, next, c, full);
    for (long r = 0; r < rows; r++) {
        struct NAME(lead) lead = leads[first + r];
        for (long j = 0; j < full; j += LANES) {
            const VECTOR output = *(const VECTOR *)(c + r * full + j);
            const INTS place = lanes + (int)(column + j), counts = place < (int)a->n;
            const INTS is_larger = (output > lead.value) & counts;
            lead.value = NAME(choose)(is_larger, output, lead.value);
            lead.place = (place & is_larger) | (lead.place & ~is_larger);
            lead.is_nan |= (output != output) & counts;
        }
        leads[first + r] = lead;
    }
}

/* value, place [m]; of several that are largest the first place, and NaN where any output is. Leads [threads][m]. */
static void NAME(gemm_best)(const float *x, const float *packed, float *value, int64_t *place, long m, long n, long k,
                            struct NAME(lead) *leads)
{
    const struct product a = {x, packed, 0, 0, m, n, k, (m + ROWS - 1) / ROWS};
    const struct grid grid = grid_of(m, n, ROWS, BLOCK_FLOATS / k, PANELS);
    const long threads = omp_get_max_threads(), least = least_cells(&grid, m * n * k);
    for (long i = 0; i < threads * m; i++)
        leads[i] = (struct NAME(lead)){.value = (VECTOR){0} - INFINITY};
#pragma omp parallel for schedule(monotonic : guided, least) if (m * n * k > SMALL_WORK)
    for (long i = 0; i < grid.cells; i++) {
        const struct cell cell = cell_of(&grid, i);
        NAME(lead_cell)(&a, &cell, cell.to < grid.panels ? packed + cell.to * k * WIDTH : 0,
                        leads + omp_get_thread_num() * m);
    }
    for (long row = 0; row < m; row++) {
        value[row] = -INFINITY;
        place[row] = 0;
        for (long i = row; i < threads * m; i += m)
            for (int lane = 0; lane < LANES; lane++) {
                const float output = leads[i].is_nan[lane] ? NAN : leads[i].value[lane];
                const int at = leads[i].place[lane];
                if (!(output <= value[row]) || (output == value[row] && at < place[row])) {
                    value[row] = output;
                    place[row] = at;
                }
                if (output != output)
                    goto done;
            }
    done:;
    }
}
