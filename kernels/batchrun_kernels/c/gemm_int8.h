/* y = x W^T + bias with weights of 8 bits, packed as panels of 16 outputs: [ceil(n / 16)][k / 4][16][4], each 128 more
 * than it is, so that it has no sign.
 *
 * Every GROUP numbers of a row of x are rounded to 8 bits by a scale of their own. The sum of a group's products is an
 * exact integer, whoever adds it up; an output is one chain of multiply-adds of its groups' sums and scales, in the order
 * of k. So a row's bits depend neither on the rows beside it, nor on the threads, nor on which of the sets of instructions
 * with fused multiply-adds computes them.
 */

/* A rounded group, in words of 32 bits that are multiplied at once: four numbers of 8 bits, or two of 16. */
struct NAME(group) {
    ROUNDED x[GROUP];
    float scale;
    int correction; /* takes back what is added to the weights */
};

/* As many bytes of x in a block. */
#define BLOCK_BYTES (4 * 8192 * LANES)
/* Words that four numbers of x take, and as many parts of the weights that they are multiplied with. */
#define PARTS ((int)sizeof(ROUNDED))
/* Bytes of a panel that a group is multiplied with. */
#define GROUP_BYTES (GROUP * WIDTH)

/* A part of the weights of LANES outputs, as the instruction wants them. */
INLINE INTS NAME(weights)(const uint8_t *from, int part)
{
#if defined(INTRINSICS) && LANES == 16
    (void)part; /* there is one */
    return *(const INTS *)from;
#elif defined(INTRINSICS)
    const __m256i order = part ? _mm256_set1_epi32((int)0x80038002) : _mm256_set1_epi32((int)0x80018000);
    const __m256i lanes = _mm256_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    return (INTS)_mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)from), _mm256_add_epi8(order, lanes));
#else
    short16 wide;
    for (int i = 0; i < 2 * LANES; i++)
        wide[i] = from[i / 2 * 4 + 2 * part + i % 2];
    return (INTS)wide;
#endif
}

/* `sums` and, in every lane, the products of a part of the weights and a word of x. */
INLINE INTS NAME(add_products)(INTS sums, INTS weights, INTS word)
{
#if defined(INTRINSICS) && LANES == 16
    return (INTS)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)word);
#elif defined(INTRINSICS)
    return sums + (INTS)_mm256_madd_epi16((__m256i)weights, (__m256i)word);
#else
    const short16 a = (short16)weights, b = (short16)word;
    for (int lane = 0; lane < LANES; lane++)
        sums[lane] += a[2 * lane] * b[2 * lane] + a[2 * lane + 1] * b[2 * lane + 1];
    return sums;
#endif
}

/* acc[rows][vectors] of LANES outputs += x[rows][groups] times their weights, vectors `apart` bytes from each other.
 * With every group `lines` cache lines are prefetched, from `next` on; where that is none, the weights' own, one group
 * ahead. */
INLINE void NAME(int8_accumulate)(VECTOR acc[INT8_ROWS][2], const int rows, const int vectors,
                                  const struct NAME(group) *x, const uint8_t *panel, long apart, long groups,
                                  const uint8_t *next, long lines)
{
    /* A pointer to every third row, so that few registers address all of them. */
    const struct NAME(group) *third[3] = {x, x + 3 * groups, x + 6 * groups};
    for (long g = 0; g < groups; g++, third[0]++, third[1]++, third[2]++, panel += GROUP_BYTES) {
        INTS sums[INT8_ROWS][2];
        for (long line = 0; line < lines; line++, next += 64)
            __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            sums[r][0] = sums[r][1] = (INTS){0} + third[r / 3][r % 3 * groups].correction;
#pragma GCC unroll 16
        for (int step = 0; step < GROUP / 4; step++) {
            const uint8_t *from = panel + step * 4 * WIDTH;
            if (!lines) {
                __builtin_prefetch(from + GROUP_BYTES);
                if (vectors > 1)
                    __builtin_prefetch(from + GROUP_BYTES + apart);
            }
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                const INTS low = NAME(weights)(from, part), high = vectors > 1 ? NAME(weights)(from + apart, part) : low;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const int *words = (const int *)third[r / 3][r % 3 * groups].x;
                    const INTS word = (INTS){0} + words[step * PARTS + part];
                    sums[r][0] = NAME(add_products)(sums[r][0], low, word);
                    if (vectors > 1)
                        sums[r][1] = NAME(add_products)(sums[r][1], high, word);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const float scale = third[r / 3][r % 3 * groups].scale;
            acc[r][0] += __builtin_convertvector(sums[r][0], VECTOR) * scale;
            if (vectors > 1)
                acc[r][1] += __builtin_convertvector(sums[r][1], VECTOR) * scale;
        }
    }
}

INLINE void NAME(int8_rows)(const int rows, const int vectors, const struct product_int8 *a, long row, long p,
                            const uint8_t *next, long lines)
{
    VECTOR acc[INT8_ROWS][2] = {0};
    const long column = p * WIDTH, full = vectors * LANES, width = a->n - column < full ? a->n - column : full;
    const long panel_bytes = a->groups * GROUP_BYTES, apart = PANELS > 1 ? panel_bytes : 4 * LANES;
    NAME(int8_accumulate)(acc, rows, vectors, (const struct NAME(group) *)a->x + row * a->groups,
                          a->packed + p * panel_bytes, apart, a->groups, next, lines);
    const float *scales = a->scales + column;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        float y[2 * LANES], *to = width < full ? y : a->y + (row + r) * a->n + column;
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(VECTOR *)(to + LANES * v) = acc[r][v] * *(const VECTOR *)(scales + LANES * v);
        if (width < full)
            memcpy(a->y + (row + r) * a->n + column, y, width * sizeof(float));
        if (a->bias)
            for (long j = 0; j < width; j++)
                a->y[(row + r) * a->n + column + j] += a->bias[column + j];
    }
}

NOINLINE void NAME(int8_pair)(int rows, const struct product_int8 *a, long row, long p, const uint8_t *next, long lines)
{
    FOR_INT8_ROWS(int8_rows, rows, 2, a, row, p, next, lines)
}

NOINLINE void NAME(int8_single)(int rows, const struct product_int8 *a, long row, long p, const uint8_t *next,
                                long lines)
{
    FOR_INT8_ROWS(int8_rows, rows, 1, a, row, p, next, lines)
}

static void NAME(gemm_int8)(const struct product_int8 *a)
{
    const long row_bytes = a->groups * (long)sizeof(struct NAME(group)), panel_bytes = a->groups * GROUP_BYTES;
    /* An instruction multiplies four times as many numbers as of float. */
    const long work = a->m * a->n * a->groups * GROUP / 4;
    const struct grid grid = grid_of(a->m, a->n, INT8_ROWS, BLOCK_BYTES / row_bytes, PANELS);
    const long least = least_cells(&grid, work);
#pragma omp parallel for schedule(guided, least) if (work > SMALL_WORK)
    for (long i = 0; i < grid.cells; i++) {
        const struct cell cell = cell_of(&grid, i);
        const long panels = cell.to - cell.from, groups = cell.high - cell.low;
        /* Every group of rows takes its share of the following panels; a single one is done before memory is. */
        const long ahead = panels * a->groups, all = GROUP_BYTES / 64 * panels;
        const long lines = groups > 1 && cell.to < grid.panels ? (all + groups - 1) / groups : 0;
        for (long g = cell.low; g < cell.high; g++) {
            const long row = group_row(a->m, grid.groups, g), share = ahead * (g - cell.low) / groups;
            const int rows = (int)(group_row(a->m, grid.groups, g + 1) - row);
            const uint8_t *next = a->packed + cell.to * panel_bytes + share * GROUP_BYTES;
            if (panels * WIDTH > LANES)
                NAME(int8_pair)(rows, a, row, cell.from, next, lines);
            else
                NAME(int8_single)(rows, a, row, cell.from, next, lines);
        }
    }
}
#undef BLOCK_BYTES
#undef PARTS
#undef GROUP_BYTES
