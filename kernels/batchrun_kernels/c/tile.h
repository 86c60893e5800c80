/* The one inner loop of all kernels that multiply: up to ROWS rows times one or two vectors of columns, in registers.
 *
 * Included once for every instruction set and type of the columns: NAME(x) gives the pair's own name to x, VECTOR is
 * LANES floats, COLUMN the columns' type, NAME(wide) reads LANES of it as floats. Every output is one chain of
 * multiply-adds over k, in the order of k, whatever the number of rows beside it: results do not depend on the batch,
 * nor on which of the instruction sets with fused multiply-adds computes them.
 */

/* acc[r][v] += a[r * lda + k] * b[k * ldb + v * apart ... + LANES) for k in 0 ... n.
 *
 * `rows` and `vectors` are constants where it is called. `lines` cache lines are prefetched every four steps of k, from
 * `next` on up to `end`; where that is none, the columns' own, `NEAR` steps ahead.
 */
#define NEAR 32
INLINE void NAME(accumulate)(VECTOR acc[ROWS][2], const int rows, const int vectors, const float *a, long lda,
                             const COLUMN *b, long apart, long ldb, long n, const float *next, const float *end,
                             long lines)
{
    long k = 0;
    /* A pointer to every third row, so that few registers address all of them. */
    const float *third[4] = {a, a + 3 * lda, a + 6 * lda, a + 9 * lda};
    for (; k + 4 <= n; k += 4) {
        if (next < end) {
            for (long line = 0; line < lines; line++)
                __builtin_prefetch(next + 16 * line, 0, 2);
            next += 16 * lines;
        }
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++) {
            const COLUMN *column = b + (k + step) * ldb;
            if (!lines) {
                __builtin_prefetch(column + NEAR * ldb);
                if (vectors > 1)
                    __builtin_prefetch(column + NEAR * ldb + apart);
            }
            VECTOR low = NAME(wide)(column);
            VECTOR high = vectors > 1 ? NAME(wide)(column + apart) : low;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                float one = third[r / 3][r % 3 * lda + k + step];
                acc[r][0] += one * low;
                if (vectors > 1)
                    acc[r][1] += one * high;
            }
        }
    }
    for (; k < n; k++) {
        const COLUMN *column = b + k * ldb;
        VECTOR low = NAME(wide)(column);
        VECTOR high = vectors > 1 ? NAME(wide)(column + apart) : low;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float one = a[r * lda + k];
            acc[r][0] += one * low;
            if (vectors > 1)
                acc[r][1] += one * high;
        }
    }
}

INLINE void NAME(load)(VECTOR acc[ROWS][2], const int rows, const int vectors, const float *c, long ldc)
{
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            acc[r][v] = *(const VECTOR *)(c + r * ldc + LANES * v);
}

INLINE void NAME(store)(VECTOR acc[ROWS][2], const int rows, const int vectors, float *c, long ldc)
{
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(VECTOR *)(c + r * ldc + LANES * v) = acc[r][v];
}
#undef NEAR
