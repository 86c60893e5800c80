/* y = x W^T + bias in float32, the weights packed once as panels of 16 outputs: [ceil(n / 16)][k][16].
 *
 * Threads share out the pairs of a block of rows and a panel, so that a product of few panels and many rows keeps all
 * of them busy.
 */

/* The part of k that a block of rows is taken through before the next; outputs wait in y meanwhile. */
#define K_PIECE 1536
/* Floats of x in a block, a half of a second-level cache of 512 KiB. */
#define BLOCK_FLOATS 65536

/* c[rows][16] (+)= a[rows][k] times the panel piece b[k][16]; `first` starts from zero instead of from c. */
INLINE void NAME(gemm_rows)(const int rows, const float *a, long lda, const float *b, long k, float *c, long ldc,
                            int first, const float *next, long lines)
{
    float8 acc[MAX_ROWS][2] = {0};
    if (!first)
        NAME(load)(acc, rows, 2, c, ldc);
    NAME(accumulate)(acc, rows, 2, a, lda, b, WIDTH, k, next, lines);
    NAME(store)(acc, rows, 2, c, ldc);
}

NOINLINE void NAME(gemm_tile)(int rows, const float *a, long lda, const float *b, long k, float *c, long ldc, int first,
                              const float *next, long lines)
{
    switch (rows) {
    case 1: NAME(gemm_rows)(1, a, lda, b, k, c, ldc, first, next, lines); break;
    case 2: NAME(gemm_rows)(2, a, lda, b, k, c, ldc, first, next, lines); break;
    case 3: NAME(gemm_rows)(3, a, lda, b, k, c, ldc, first, next, lines); break;
    case 4: NAME(gemm_rows)(4, a, lda, b, k, c, ldc, first, next, lines); break;
    case 5: NAME(gemm_rows)(5, a, lda, b, k, c, ldc, first, next, lines); break;
    default: NAME(gemm_rows)(6, a, lda, b, k, c, ldc, first, next, lines); break;
    }
}

/* Panel `p`'s outputs for the groups `low ... high`, carried on over `piece` steps of k from `start`. A last panel of
 * fewer than 16 columns is computed beside y: a row of y is no wider than n. `next` is prefetched: what the
 * following call will take from the panels. */
static void NAME(gemm_panel)(const struct product *a, long low, long high, long p, long start, long piece,
                             const float *next)
{
    const float *panel = a->packed + (p * a->k + start) * WIDTH;
    const long first = group_row(a->m, a->groups, low), rows = group_row(a->m, a->groups, high) - first, column = p * WIDTH;
    const long width = a->n - column < WIDTH ? a->n - column : WIDTH;
    float *y = a->y + first * a->n + column, aside[width < WIDTH ? rows * WIDTH : 1];
    float *c = width < WIDTH ? aside : y;
    const long ldc = width < WIDTH ? WIDTH : a->n;
    if (width < WIDTH && start)
        for (long r = 0; r < rows; r++)
            memcpy(aside + r * WIDTH, y + r * a->n, width * sizeof(float));
    /* All of `next` in as few groups as there are. */
    const long lines = high - low == 1 ? 4 : high - low < 4 ? 2 : 1;
    for (long g = low; g < high; g++) {
        long row = group_row(a->m, a->groups, g), turn = g - low;
        NAME(gemm_tile)((int)(group_row(a->m, a->groups, g + 1) - row), a->x + row * a->k + start, a->k, panel, piece,
                        c + (row - first) * ldc, ldc, start == 0,
                        next && turn < 4 / lines ? next + turn * (piece / 4) * lines * WIDTH : 0, lines);
    }
    const float *bias = start + piece == a->k ? a->bias : 0;
    if (!bias && width == WIDTH)
        return;
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < width; j++)
            y[r * a->n + j] = bias ? c[r * ldc + j] + bias[column + j] : c[r * ldc + j];
}

static void NAME(gemm)(const float *x, const float *packed, const float *bias, float *y, long m, long n, long k)
{
    const struct product a = {x, packed, bias, y, m, n, k, (m + MAX_ROWS - 1) / MAX_ROWS};
    const long deep = k < K_PIECE ? k : K_PIECE;
#pragma omp parallel if (m * n * k > SMALL_WORK)
    {
        struct share share = share_of(m, n, BLOCK_FLOATS / deep);
        struct part part;
        while (next_part(&share, &part))
            for (long start = 0; start < k; start += deep) {
                const long piece = k - start < deep ? k - start : deep;
                for (long p = part.from; p < part.to; p++)
                    NAME(gemm_panel)(&a, part.low, part.high, p, start, piece,
                                     p + 1 < part.to ? packed + ((p + 1) * k + start) * WIDTH : 0);
            }
    }
}
