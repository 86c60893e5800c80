/* y = x W^T + bias with weights of 8 bits, packed as panels of 16 outputs: [ceil(n / 16)][pairs][16][2].
 *
 * Every row of x is rounded to integers of 16 bits, as large as keeps the sums of all k products within 32 bits. So
 * sums are exact: a row's bits depend neither on the rows beside it nor on the threads.
 */

/* Half a second-level cache of 512 KiB, for a block's part of x. */
#define BLOCK_BYTES 262144

INLINE short16 NAME(widened)(const int8_t *from)
{
#ifdef INTRINSICS
    return (short16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(*(const byte16 *)from, short16);
#endif
}

/* The sums of neighbouring products. */
INLINE int8 NAME(pair_sums)(short16 a, short16 b)
{
#ifdef INTRINSICS
    return (int8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    int8 sums;
    for (int lane = 0; lane < 8; lane++)
        sums[lane] = a[2 * lane] * b[2 * lane] + a[2 * lane + 1] * b[2 * lane + 1];
    return sums;
#endif
}

/* acc[rows][16] += two numbers of each row times two of each of a panel's outputs. */
INLINE void NAME(int8_step)(int8 acc[MAX_ROWS][2], const int rows, const int16_t *x, long stride, const int8_t *panel)
{
    const short16 low = NAME(widened)(panel), high = NAME(widened)(panel + WIDTH);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        int pair;
        memcpy(&pair, x + r * stride, sizeof pair);
        const short16 both = (short16)((int8){0} + pair);
        acc[r][0] += NAME(pair_sums)(low, both);
        acc[r][1] += NAME(pair_sums)(high, both);
    }
}

/* acc[rows][16] = x[rows][2 * pairs] times a panel; as much from `ahead` on is prefetched. */
INLINE void NAME(int8_accumulate)(int8 acc[MAX_ROWS][2], const int rows, const int16_t *x, const int8_t *panel,
                                  long pairs, const int8_t *ahead)
{
    const long stride = 2 * pairs;
    for (long p = 0; p < pairs; p++, x += 2, panel += 2 * WIDTH, ahead += 2 * WIDTH) {
        __builtin_prefetch(ahead, 0, 2);
        NAME(int8_step)(acc, rows, x, stride, panel);
    }
}

INLINE void NAME(int8_rows)(const int rows, const struct product_int8 *a, long row, long p, const int8_t *ahead)
{
    int8 acc[MAX_ROWS][2] = {0};
    const long column = p * WIDTH, width = a->n - column < WIDTH ? a->n - column : WIDTH;
    NAME(int8_accumulate)(acc, rows, a->x + row * 2 * a->pairs, a->packed + p * a->pairs * 2 * WIDTH, a->pairs, ahead);
    const float *scales = a->scales + column;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        float y[WIDTH], *to = width < WIDTH ? y : a->y + (row + r) * a->n + column;
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
            *(float8 *)(to + 8 * v) = __builtin_convertvector(acc[r][v], float8) * a->x_scales[row + r] *
                                      *(const float8 *)(scales + 8 * v);
        if (width < WIDTH)
            memcpy(a->y + (row + r) * a->n + column, y, width * sizeof(float));
        if (a->bias)
            for (long j = 0; j < width; j++)
                a->y[(row + r) * a->n + column + j] += a->bias[column + j];
    }
}

NOINLINE void NAME(int8_tile)(int rows, const struct product_int8 *a, long row, long p, const int8_t *ahead)
{
    switch (rows) {
    case 1: NAME(int8_rows)(1, a, row, p, ahead); break;
    case 2: NAME(int8_rows)(2, a, row, p, ahead); break;
    case 3: NAME(int8_rows)(3, a, row, p, ahead); break;
    case 4: NAME(int8_rows)(4, a, row, p, ahead); break;
    case 5: NAME(int8_rows)(5, a, row, p, ahead); break;
    default: NAME(int8_rows)(6, a, row, p, ahead); break;
    }
}

static void NAME(gemm_int8)(const struct product_int8 *a)
{
#pragma omp parallel if (a->m * a->n * a->pairs > SMALL_WORK)
    {
        struct share share = share_of(a->m, a->n, BLOCK_BYTES / (4 * a->pairs));
        struct part part;
        while (next_part(&share, &part))
            for (long p = part.from; p < part.to; p++)
                for (long g = part.low; g < part.high; g++) {
                    const long row = group_row(a->m, share.groups, g);
                    const long following = g == part.low && p + 1 < part.to ? p + 1 : p;
                    NAME(int8_tile)((int)(group_row(a->m, share.groups, g + 1) - row), a, row, p,
                                    a->packed + following * a->pairs * 2 * WIDTH);
                }
    }
}

/* x[m][k] as integers of at most `most`: rounded [m][2 * pairs], zero behind k, times scales [m]. The scale of a row
 * that is not finite is NaN. */
static void NAME(round_rows)(const float *x, int16_t *rounded, float *scales, long m, long k, long pairs, float most)
{
#pragma omp parallel for if (m * k > SMALL_ROWS)
    for (long row = 0; row < m; row++) {
        const float *from = x + row * k;
        int16_t *to = rounded + row * 2 * pairs;
        const float8 zero = {0}, magic = zero + 12582912.0f;
        float8 largest = zero, flaw = zero;
        float most_here = 0, flaws = 0;
        long i = 0;
        for (; i + 8 <= k; i += 8) {
            float8 some = *(const float8 *)(from + i);
            largest = NAME(larger)((float8)((int8)some & 0x7fffffff), largest);
            flaw += some * 0.0f;
        }
        for (int lane = 0; lane < 8; lane++) {
            most_here = largest[lane] > most_here ? largest[lane] : most_here;
            flaws += flaw[lane];
        }
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
        for (i = 0; i + 8 <= k; i += 8) {
            float8 some = *(const float8 *)(from + i) * factor + magic;
            *(short8 *)(to + i) = __builtin_convertvector((int8)some - (int8)magic, short8);
        }
        for (; i < k; i++)
            to[i] = (int16_t)lrintf(from[i] * factor);
        if (2 * pairs > k)
            to[k] = 0;
    }
}
