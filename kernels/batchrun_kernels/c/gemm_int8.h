/* y = x W^T + bias with weights of 8 bits, packed as panels of 16 outputs: [ceil(n / 16)][pairs][16][2].
 *
 * Every row of x is rounded to integers of 16 bits, as large as keeps the sums of all k products within 32 bits. So
 * sums are exact: a row's bits depend neither on the rows beside it nor on the threads.
 */

/* As many bytes of x in a block. */
#define BLOCK_BYTES (4 * 8192 * LANES)

/* Panels that are multiplied at once, in two vectors of every row. */
#define PANELS (2 * LANES / WIDTH)

/* 2 * LANES numbers of 8 bits. */
INLINE SHORTS NAME(widened)(const int8_t *from)
{
#if defined(INTRINSICS) && LANES == 16
    return (SHORTS)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from));
#elif defined(INTRINSICS)
    return (SHORTS)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(*(const byte16 *)from, SHORTS);
#endif
}

/* `sums` and the products of a's and b's neighbouring pairs. */
INLINE INTS NAME(add_pairs)(INTS sums, SHORTS a, SHORTS b)
{
#if defined(INTRINSICS) && LANES == 16
    return (INTS)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(INTRINSICS)
    return sums + (INTS)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    for (int lane = 0; lane < LANES; lane++)
        sums[lane] += a[2 * lane] * b[2 * lane] + a[2 * lane + 1] * b[2 * lane + 1];
    return sums;
#endif
}

/* acc[rows][vectors] of LANES outputs += x[rows][2 * pairs] times their weights, vectors `apart` numbers from each
 * other; as many as one vector's are prefetched from `ahead` on. */
INLINE void NAME(int8_accumulate)(INTS acc[ROWS][2], const int rows, const int vectors, const int16_t *x,
                                  const int8_t *panel, long apart, long pairs, const int8_t *ahead)
{
    const long stride = 2 * pairs;
    for (long p = 0; p < pairs; p++, x += 2, panel += 2 * WIDTH, ahead += 2 * WIDTH) {
        __builtin_prefetch(ahead, 0, 2);
        const SHORTS low = NAME(widened)(panel), high = vectors > 1 ? NAME(widened)(panel + apart) : low;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int pair;
            memcpy(&pair, x + r * stride, sizeof pair);
            const SHORTS both = (SHORTS)((INTS){0} + pair);
            acc[r][0] = NAME(add_pairs)(acc[r][0], low, both);
            if (vectors > 1)
                acc[r][1] = NAME(add_pairs)(acc[r][1], high, both);
        }
    }
}

INLINE void NAME(int8_rows)(const int rows, const int vectors, const struct product_int8 *a, long row, long p,
                            const int8_t *ahead)
{
    INTS acc[ROWS][2] = {0};
    const long column = p * WIDTH, full = vectors * LANES, width = a->n - column < full ? a->n - column : full;
    const long apart = PANELS > 1 ? a->pairs * 2 * WIDTH : 2 * LANES;
    NAME(int8_accumulate)(acc, rows, vectors, a->x + row * 2 * a->pairs, a->packed + p * a->pairs * 2 * WIDTH, apart,
                          a->pairs, ahead);
    const float *scales = a->scales + column;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        float y[2 * LANES], *to = width < full ? y : a->y + (row + r) * a->n + column;
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(VECTOR *)(to + LANES * v) = __builtin_convertvector(acc[r][v], VECTOR) * a->x_scales[row + r] *
                                          *(const VECTOR *)(scales + LANES * v);
        if (width < full)
            memcpy(a->y + (row + r) * a->n + column, y, width * sizeof(float));
        if (a->bias)
            for (long j = 0; j < width; j++)
                a->y[(row + r) * a->n + column + j] += a->bias[column + j];
    }
}

NOINLINE void NAME(int8_pair)(int rows, const struct product_int8 *a, long row, long p, const int8_t *ahead)
{
    FOR_ROWS(int8_rows, rows, 2, a, row, p, ahead)
}

NOINLINE void NAME(int8_single)(int rows, const struct product_int8 *a, long row, long p, const int8_t *ahead)
{
    FOR_ROWS(int8_rows, rows, 1, a, row, p, ahead)
}

static void NAME(gemm_int8)(const struct product_int8 *a)
{
    const struct grid grid = grid_of(a->m, a->n, ROWS, BLOCK_BYTES / (4 * a->pairs), PANELS);
    const long least = least_cells(&grid, a->m * a->n * a->pairs);
#pragma omp parallel for schedule(guided, least) if (a->m * a->n * a->pairs > SMALL_WORK)
    for (long i = 0; i < grid.cells; i++) {
        const struct cell cell = cell_of(&grid, i);
        const long panels = cell.to - cell.from;
        for (long g = cell.low; g < cell.high; g++) {
            const long row = group_row(a->m, grid.groups, g);
            const int rows = (int)(group_row(a->m, grid.groups, g + 1) - row);
            const long turn = g - cell.low, following = turn < panels ? cell.to + turn : grid.panels;
            const int8_t *ahead = a->packed + (following < grid.panels ? following : cell.from) * a->pairs * 2 * WIDTH;
            if (panels * WIDTH > LANES)
                NAME(int8_pair)(rows, a, row, cell.from, ahead);
            else
                NAME(int8_single)(rows, a, row, cell.from, ahead);
        }
    }
}
#undef PANELS
#undef BLOCK_BYTES

/* x[m][k] as integers of at most `most`: rounded [m][2 * pairs], zero behind k, times scales [m]. The scale of a row
 * that is not finite is NaN. */
static void NAME(round_rows)(const float *x, int16_t *rounded, float *scales, long m, long k, long pairs, float most)
{
#pragma omp parallel for if (m * k > SMALL_ROWS)
    for (long row = 0; row < m; row++) {
        const float *from = x + row * k;
        int16_t *to = rounded + row * 2 * pairs;
        const VECTOR zero = {0}, magic = zero + 12582912.0f;
        VECTOR largest = zero, flaw = zero;
        long i = 0;
        for (; i + LANES <= k; i += LANES) {
            VECTOR some = *(const VECTOR *)(from + i);
            largest = NAME(larger)((VECTOR)((INTS)some & 0x7fffffff), largest);
            flaw += some * 0.0f;
        }
        float most_here = NAME(largest_lane)(largest), flaws = NAME(sum_of_lanes)(flaw);
        for (; i < k; i++) {
            most_here = fabsf(from[i]) > most_here ? fabsf(from[i]) : most_here;
            flaws += from[i] * 0.0f;
        }
        scales[row] = most_here / most + flaws;
        if (flaws != 0 || most_here == 0) {
            memset(to, 0, 2 * pairs * sizeof *to);
            continue;
        }
        const float factor = most / most_here;
        for (i = 0; i + LANES <= k; i += LANES) {
            VECTOR some = *(const VECTOR *)(from + i) * factor + magic;
            *(NARROW *)(to + i) = __builtin_convertvector((INTS)some - (INTS)magic, NARROW);
        }
        for (; i < k; i++)
            to[i] = (int16_t)lrintf(from[i] * factor);
        if (2 * pairs > k)
            to[k] = 0;
    }
}
