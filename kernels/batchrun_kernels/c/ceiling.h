/* What this processor can do at most, for the benchmark: the rates that kernels are held against. */

/* The sum of x[n]: reads n floats from memory and does next to nothing with them. */
static float NAME(read)(const float *x, long n)
{
    float sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (long start = 0; start < n / 4096; start++) {
        const float *from = x + start * 4096;
        float8 acc[4] = {0};
        for (long i = 0; i < 4096; i += 32)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++)
                acc[v] += *(const float8 *)(from + i + 8 * v);
        acc[0] += acc[1] + acc[2] + acc[3];
        sum += acc[0][0];
    }
    return sum;
}

/* On every thread 192 n operations, as multiply-adds of 12 independent vectors. */
static float NAME(multiply_add)(long n)
{
    float sum = 0;
#pragma omp parallel reduction(+ : sum)
    {
        VECTOR acc[12], zero = {0};
        /* Unequal, or the compiler would see that one chain is enough. */
        for (int v = 0; v < 12; v++)
            acc[v] = zero + (float)v;
        for (long i = 0; i < n * 8 / LANES; i++)
#pragma GCC unroll 12
            for (int v = 0; v < 12; v++)
                acc[v] = acc[v] * 0.5f + 1.0f;
        for (int v = 0; v < 12; v++)
            sum += acc[v][0];
    }
    return sum;
}
