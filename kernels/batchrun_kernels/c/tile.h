/* The one inner loop of all kernels that multiply: up to 6 rows times 8 or 16 columns, held in registers.
 *
 * Included once for every instruction set and type of the columns: NAME(x) gives the pair's own name to x, COLUMN is
 * the type, NAME(wide) reads eight of it as floats. Every output is one chain of multiply-adds over k, in the order of k,
 * whatever the number of rows beside it: results do not depend on the batch.
 */

/* acc[r][v] += a[r * lda + k] * b[k * ldb + 8v ... 8v + 8) for k in 0 ... n.
 *
 * `rows` and `vectors` are constants where it is called. `next`, when not null, is prefetched: `lines` (1, 2 or 4)
 * cache lines every four steps of k.
 */
INLINE void NAME(accumulate)(float8 acc[MAX_ROWS][2], const int rows, const int vectors, const float *a, long lda,
                             const COLUMN *b, long ldb, long n, const float *next, long lines)
{
    long k = 0;
    for (; k + 4 <= n; k += 4) {
        if (next) {
            __builtin_prefetch(next, 0, 2);
            if (lines > 1)
                __builtin_prefetch(next + 16, 0, 2);
            if (lines > 2) {
                __builtin_prefetch(next + 32, 0, 2);
                __builtin_prefetch(next + 48, 0, 2);
            }
            next += 16 * lines;
        }
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++) {
            const COLUMN *column = b + (k + step) * ldb;
            float8 low = NAME(wide)(column);
            float8 high = vectors > 1 ? NAME(wide)(column + 8) : low;
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                float one = a[r * lda + k + step];
                acc[r][0] += one * low;
                if (vectors > 1)
                    acc[r][1] += one * high;
            }
        }
    }
    for (; k < n; k++) {
        const COLUMN *column = b + k * ldb;
        float8 low = NAME(wide)(column);
        float8 high = vectors > 1 ? NAME(wide)(column + 8) : low;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            float one = a[r * lda + k];
            acc[r][0] += one * low;
            if (vectors > 1)
                acc[r][1] += one * high;
        }
    }
}

INLINE void NAME(load)(float8 acc[MAX_ROWS][2], const int rows, const int vectors, const float *c, long ldc)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            acc[r][v] = *(const float8 *)(c + r * ldc + 8 * v);
}

INLINE void NAME(store)(float8 acc[MAX_ROWS][2], const int rows, const int vectors, float *c, long ldc)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(float8 *)(c + r * ldc + 8 * v) = acc[r][v];
}
