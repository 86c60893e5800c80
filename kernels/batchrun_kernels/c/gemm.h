/* y = x W^T + bias in float32, the weights packed once as panels of 16 outputs: [ceil(n / 16)][k][16]. */

/* A piece of a panel's k that fits the second-level cache beside the rows. */
#define K_PIECE 1536

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

static void NAME(gemm_tile)(int rows, const float *a, long lda, const float *b, long k, float *c, long ldc, int first,
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

/* One panel's outputs for rows `row ... row + rows`, over all of k in pieces. A last panel of fewer than 16 columns
 * is computed beside y: a row of y is no wider than n. */
static void NAME(gemm_block)(const float *x, long row, int rows, long k, const float *panel, float *y, long n,
                             long column, const float *bias, const float *next, long lines)
{
    long width = n - column < WIDTH ? n - column : WIDTH;
    float aside[MAX_ROWS * WIDTH];
    float *c = width < WIDTH ? aside : y + row * n + column;
    long ldc = width < WIDTH ? WIDTH : n;
    for (long start = 0; start < k; start += K_PIECE) {
        long piece = k - start < K_PIECE ? k - start : K_PIECE;
        NAME(gemm_tile)(rows, x + row * k + start, k, panel + start * WIDTH, piece, c, ldc, start == 0,
                        next ? next + start * WIDTH / 4 * lines : 0, lines);
    }
    if (!bias && width == WIDTH)
        return;
    for (int r = 0; r < rows; r++) {
        float *out = y + (row + r) * n + column;
        for (long j = 0; j < width; j++)
            out[j] = bias ? c[r * ldc + j] + bias[column + j] : c[r * ldc + j];
    }
}

/* x [m][k], packed [ceil(n / 16)][k][16] with zeros behind column n, bias [n] or null, y [m][n]. */
static void NAME(gemm)(const float *x, const float *packed, const float *bias, float *y, long m, long n, long k)
{
    long panels = (n + WIDTH - 1) / WIDTH;
    long groups = (m + MAX_ROWS - 1) / MAX_ROWS;
    /* The next panel is fetched while the rows pass over this one: all of it in as few passes as there are. */
    long lines = groups == 1 ? 4 : groups < 4 ? 2 : 1;
    long passes = 4 / lines;
#pragma omp parallel if (m * n * k > SMALL_WORK)
    {
        long threads = omp_get_num_threads(), own = omp_get_thread_num();
        long begin = panels * own / threads, end = panels * (own + 1) / threads;
        for (long p = begin; p < end; p++) {
            const float *panel = packed + p * k * WIDTH;
            for (long g = 0; g < groups; g++) {
                long row = m * g / groups;
                const float *next = p + 1 < end && g < passes ? panel + k * WIDTH + g * (k / 4) * lines * WIDTH : 0;
                NAME(gemm_block)(x, row, (int)(m * (g + 1) / groups - row), k, panel, y, n, p * WIDTH, bias, next,
                                 lines);
            }
        }
    }
}
