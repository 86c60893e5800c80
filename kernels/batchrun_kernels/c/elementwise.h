/* What a model does between its matrix products; every row by itself. */

/* sum[row] += x[row]; x, sum [n]. */
INLINE void NAME(add)(const float *x, float *sum, long n)
{
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        *(VECTOR *)(sum + i) += *(const VECTOR *)(x + i);
    for (; i < n; i++)
        sum[i] += x[i];
}

/* The same with all threads. */
static void NAME(add_all)(const float *x, float *sum, long n)
{
    const long pieces = n > SMALL_ROWS ? omp_get_max_threads() : 1;
#pragma omp parallel for if (pieces > 1)
    for (long piece = 0; piece < pieces; piece++) {
        const long begin = n * piece / pieces;
        NAME(add)(x + begin, sum + begin, n * (piece + 1) / pieces - begin);
    }
}

/* y[row] = x[row] / sqrt(mean of squares + eps) * weight; x, y [m][n]. With `sum` [m][n], x is added to it before, and
 * it is what is normalised. y may be what is normalised. */
static void NAME(rms_norm)(const float *x, float *sum, const float *weight, float eps, float *y, long m, long n)
{
#pragma omp parallel for if (m * n > SMALL_ROWS)
    for (long row = 0; row < m; row++) {
        const float *from = sum ? sum + row * n : x + row * n;
        if (sum)
            NAME(add)(x + row * n, sum + row * n, n);
        VECTOR squares = {0};
        float rest = 0;
        long i = 0;
        for (; i + LANES <= n; i += LANES) {
            VECTOR some = *(const VECTOR *)(from + i);
            squares += some * some;
        }
        for (; i < n; i++)
            rest += from[i] * from[i];
        float scale = 1 / sqrtf((rest + NAME(sum_of_lanes)(squares)) / n + eps);
        float *to = y + row * n;
        for (i = 0; i + LANES <= n; i += LANES)
            *(VECTOR *)(to + i) = *(const VECTOR *)(from + i) * scale * *(const VECTOR *)(weight + i);
        for (; i < n; i++)
            to[i] = from[i] * scale * weight[i];
    }
}

/* act(gate) * up: silu(g) is g / (1 + exp(-g)), and gelu by tanh is g / (1 + exp(-2z)) with z what is in its tanh. */
INLINE VECTOR NAME(gated)(VECTOR gate, VECTOR up, int is_gelu)
{
    VECTOR z = gate;
    if (is_gelu)
        z = gate * (gate * gate * 0.044715f + 1.0f) * 1.5957691216f;
    return gate / (NAME(exp)(-z) + 1.0f) * up;
}

/* gate_up [m][2n], a row's gates before its ups; y [m][n]. */
static void NAME(glu)(const float *gate_up, float *y, long m, long n, int is_gelu)
{
#pragma omp parallel for if (m * n > SMALL_ROWS)
    for (long row = 0; row < m; row++) {
        const float *gate = gate_up + row * 2 * n, *up = gate + n;
        float *to = y + row * n;
        long i = 0;
        for (; i + LANES <= n; i += LANES)
            *(VECTOR *)(to + i) = NAME(gated)(*(const VECTOR *)(gate + i), *(const VECTOR *)(up + i), is_gelu);
        if (i < n) {
            VECTOR last_gate = {0}, last_up = {0}, last;
            memcpy(&last_gate, gate + i, (n - i) * sizeof(float));
            memcpy(&last_up, up + i, (n - i) * sizeof(float));
            last = NAME(gated)(last_gate, last_up, is_gelu);
            memcpy(to + i, &last, (n - i) * sizeof(float));
        }
    }
}

/* Turns every head: x [tokens][heads][dim] by its strides, y the same contiguous, cos and sin [tokens][turned]. */
static void NAME(rope)(const float *x, long token_stride, long head_stride, const float *cos, const float *sin,
                       float *y, long tokens, long heads, long dim, long turned)
{
#pragma omp parallel for if (tokens * heads * dim > SMALL_ROWS)
    for (long token = 0; token < tokens; token++)
        for (long head = 0; head < heads; head++)
            turn_head(x + token * token_stride + head * head_stride, cos + token * turned, sin + token * turned,
                      y + (token * heads + head) * dim, dim, turned);
}
