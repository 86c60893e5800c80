/* The kernels that Python calls through ctypes: each compiled for AVX-512 with VNNI, for AVX2 with FMA and portably, chosen
 * at run time.
 *
 * Plain C with gcc's vector types; knows neither Python nor torch. Threads are OpenMP's: loaded after torch, the
 * library shares torch's own pool, whose libgomp.so.1 is found by its name.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Counts up whenever a function's arguments change, so that an old library is never called with new ones. */
#define VERSION 8

/* Multiply-adds that are not worth waking a thread for. */
#define SMALL_WORK (1L << 16)

/* Elements of a row-wise kernel that are not worth waking a thread for. */
#define SMALL_ROWS (1L << 14)

/* Keys, each written to a cache line of its own, that are not. */
#define SMALL_WRITE (1L << 11)

#define INLINE static inline __attribute__((always_inline))
/* For a loop that needs all registers: what stands around it would take some. */
#define NOINLINE static __attribute__((noinline))

typedef float float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t half8 __attribute__((vector_size(16), aligned(2), may_alias));
typedef int int8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int16_t short16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef int16_t short8 __attribute__((vector_size(16), aligned(2), may_alias));

/* The same with 16 lanes. */
typedef float float_x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int int_x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int8_t byte_x16 __attribute__((vector_size(16), aligned(1), may_alias));

/* Calls the function with `rows` as a constant: of a set of instructions that has registers for 6, 8 or 12 rows. */
#define CASE(function, rows, ...)                                                                                     \
    case rows: NAME(function)(rows, __VA_ARGS__); break;
#define SIX_CASES(function, ...)                                                                                      \
    CASE(function, 1, __VA_ARGS__) CASE(function, 2, __VA_ARGS__) CASE(function, 3, __VA_ARGS__)                      \
    CASE(function, 4, __VA_ARGS__) CASE(function, 5, __VA_ARGS__) CASE(function, 6, __VA_ARGS__)
#define FOR_6(function, rows, ...)                                                                                    \
    switch (rows) { SIX_CASES(function, __VA_ARGS__) }
#define FOR_8(function, rows, ...)                                                                                    \
    switch (rows) {                                                                                                   \
        SIX_CASES(function, __VA_ARGS__) CASE(function, 7, __VA_ARGS__) CASE(function, 8, __VA_ARGS__)                \
    }
#define FOR_12(function, rows, ...)                                                                                   \
    switch (rows) {                                                                                                   \
        SIX_CASES(function, __VA_ARGS__)                                                                              \
        CASE(function, 7, __VA_ARGS__) CASE(function, 8, __VA_ARGS__) CASE(function, 9, __VA_ARGS__)                  \
        CASE(function, 10, __VA_ARGS__) CASE(function, 11, __VA_ARGS__) CASE(function, 12, __VA_ARGS__)               \
    }

#include "share.h"
#include "turn.h"

/* Positions that attention takes at once, and the stride of their scores with room for the last 16. */
#define TILE 64
#define SCORE_STRIDE 80

/* A matrix product's arguments and the number of groups that its rows are taken in. */
struct product {
    const float *x;      /* [m][k] */
    const float *packed; /* [ceil(n / 16)][k][16], zeros behind column n */
    const float *bias;   /* [n] or null */
    float *y;            /* [m][n] */
    long m, n, k, groups;
};

/* Numbers of a row that are rounded to 8 bits by one scale. */
#define GROUP 32

static long groups_of(long k)
{
    return (k + GROUP - 1) / GROUP;
}

/* A product with weights of 8 bits and rows rounded to as many. */
struct product_int8 {
    const void *x;         /* [m][groups] as gemm_int8.h has them */
    const uint8_t *packed; /* [ceil(n / 16)][groups * GROUP / 4][16][4], 128 is zero and behind column n */
    const float *scales;   /* [16 * ceil(n / 16)] */
    const float *bias;     /* [n] or null */
    float *y;              /* [m][n] */
    long m, n, groups;
};

/* Attention's arguments, as native_attention.py fills them in. */
struct attend {
    const float *q;         /* [tokens][heads][key_dim], tokens `q_token` apart */
    const void *keys;       /* [blocks][kv_heads][key_dim][block_size], 16 more readable behind it */
    const void *values;     /* [blocks][kv_heads][block_size][value_dim], value_dim a multiple of 8 */
    const float *sinks;     /* [heads] or null */
    float *out;             /* [tokens][heads][value_dim] */
    const int32_t *q_lens;  /* [items] */
    const int32_t *kv_lens; /* [items] */
    const int32_t *table;   /* [items][table_width] */
    long q_token, items, table_width, heads, kv_heads, key_dim, value_dim, block_size;
    long window;            /* 0: none */
    float scale, softcap;   /* softcap 0: none */
};

#include "team.h"

/* Up to 16 neighbouring positions of a block; `next`: the keys 64 positions on, null behind the end. */
struct run {
    const void *keys, *values, *next;
    long length;
};

/* Keys and values [tokens][kv_heads][key_dim or value_dim], given by the strides of tokens and heads, the angles that
 * the keys are still to be turned by, and their slots in a pool that lies as `attend` reads it; then the slots to copy,
 * none of which is a source and a target. */
struct written {
    const float *key, *value;
    const float *cos, *sin; /* [tokens][turned]; `turned` 0: none */
    const int64_t *slots;   /* [tokens] */
    const int64_t *sources, *targets; /* [copies] */
    void *keys, *values;
    long key_token, key_head, value_token, value_head;
    long tokens, turned, copies, kv_heads, key_dim, value_dim, block_size;
};

/* A packed weight [n][k]: of float32, or of 8 bits where it has scales. */
struct weight {
    const void *panels;
    const float *scales, *bias; /* each may be null */
    long n, k;
};

/* RMSNorm; without a weight there is none. */
struct norm {
    const float *weight;
    float eps;
};

/* A decoder layer, as native_layer.py fills it in; `qkv` gives queries, keys and values, `gate_up` gates before ups. */
struct layer {
    struct norm norm, q_norm, k_norm, after_attention, before_mlp, after_mlp;
    struct weight qkv, out, gate_up, down;
    const float *sinks; /* [heads] or null */
    long heads, kv_heads, key_dim, value_dim, window;
    float scale, softcap;
    int is_gelu;
};

/* A step's pass through one layer. */
struct pass {
    const float *x;         /* [tokens][width] */
    float *y;               /* [tokens][width], not x; zero where it is not wanted */
    const float *cos, *sin; /* [tokens][turned] */
    const int64_t *slots;   /* [tokens] */
    const int64_t *wanted;  /* [num_wanted] tokens, ascending: the queries of the items; not read where all are */
    const int64_t *sources, *targets; /* [copies] */
    void *keys, *values;    /* the layer's pool, as `attend` reads it */
    const int32_t *q_lens, *kv_lens, *table;
    float *scratch; /* batchrun_layer_scratch floats */
    long tokens, num_wanted, turned, copies, items, table_width, block_size;
    int half; /* keys and values are float16 */
};

#define JOINED(x, y) x##_##y
#define JOIN(x, y) JOINED(x, y)

#if defined(__x86_64__)
#define INTRINSICS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define SET avx512
#define VECTOR float_x16
#define INTS int_x16
#define ROUNDED int8_t
#define NARROW byte_x16
#define LANES 16
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define ROWS 12
#define FOR_ROWS FOR_12
#define INT8_ROWS 8
#define FOR_INT8_ROWS FOR_8
#include "kernels.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define SET avx2
#define VECTOR float8
#define INTS int8
#define ROUNDED int16_t
#define NARROW short8
#define LANES 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#define ROWS 6
#define FOR_ROWS FOR_6
#define INT8_ROWS 6
#define FOR_INT8_ROWS FOR_6
#include "kernels.h"
#pragma GCC pop_options
#undef INTRINSICS
#endif

#define SET portable
#define VECTOR float8
#define INTS int8
#define ROUNDED int16_t
#define NARROW short8
#define LANES 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#define ROWS 6
#define FOR_ROWS FOR_6
#define INT8_ROWS 6
#define FOR_INT8_ROWS FOR_6
#include "kernels.h"

enum instructions { PORTABLE, AVX2, AVX512 };

static enum instructions most = AVX512;

#if defined(__x86_64__)
#define HAS(name) __builtin_cpu_supports(name)
static enum instructions chosen(void)
{
    if (most >= AVX512 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl") && HAS("avx512vnni"))
        return AVX512;
    return most >= AVX2 && HAS("avx2") && HAS("fma") && HAS("f16c") ? AVX2 : PORTABLE;
}
#define CALL_OF(set, function, ...)                                                                                   \
    (set == AVX512 ? function##_avx512(__VA_ARGS__)                                                                   \
                   : set == AVX2 ? function##_avx2(__VA_ARGS__) : function##_portable(__VA_ARGS__))
#else
static enum instructions chosen(void) { return PORTABLE; }
#define CALL_OF(set, function, ...) function##_portable(__VA_ARGS__)
#endif
#define CALL(function, ...) CALL_OF(chosen(), function, __VA_ARGS__)

int batchrun_version(void) { return VERSION; }

/* From now on no better instructions than these. */
void batchrun_at_most(int instructions) { most = (enum instructions)instructions; }

/* Those in use. */
int batchrun_instructions(void) { return chosen(); }

int batchrun_threads(void) { return omp_get_max_threads(); }

void batchrun_gemm(const float *x, const float *packed, const float *bias, float *y, long m, long n, long k)
{
    CALL(gemm, x, packed, bias, y, m, n, k);
}

/* The floats that `batchrun_gemm_best` needs for m rows. */
long batchrun_best_scratch(long m)
{
    return omp_get_max_threads() * m * 3 * 16;
}

/* Of each row of x W^T the largest output and its place, the first of several; NaN where there is one. */
void batchrun_gemm_best(const float *x, const float *packed, float *value, int64_t *place, long m, long n, long k,
                        void *scratch)
{
    CALL(gemm_best, x, packed, value, place, m, n, k, scratch);
}

/* The floats that m rounded rows of k numbers take. */
long batchrun_rounded_size(long m, long k)
{
    return m * groups_of(k) * (GROUP / 2 + 2);
}

/* `rounded`: batchrun_rounded_size floats. */
void batchrun_gemm_int8(const float *x, const uint8_t *packed, const float *scales, const float *bias, float *y, long m,
                        long n, long k, float *rounded)
{
    const struct product_int8 a = {rounded, packed, scales, bias, y, m, n, groups_of(k)};
    CALL(round_rows, x, rounded, m, k);
    CALL(gemm_int8, &a);
}

void batchrun_rms_norm(const float *x, float *sum, const float *weight, float eps, float *y, long m, long n)
{
    CALL(rms_norm, x, sum, weight, eps, y, m, n);
}

void batchrun_glu(const float *gate_up, float *y, long m, long n, int is_gelu)
{
    CALL(glu, gate_up, y, m, n, is_gelu);
}

/* packed: n gates and as many ups, n a multiple of 16 and k at most K_PIECE. */
void batchrun_gemm_glu(const float *x, const float *packed, float *y, long m, long n, long k, int is_gelu)
{
    CALL(gemm_glu, x, packed, y, m, n, k, is_gelu);
}

void batchrun_rope(const float *x, long token_stride, long head_stride, const float *cos, const float *sin, float *y,
                   long tokens, long heads, long dim, long turned)
{
    CALL(rope, x, token_stride, head_stride, cos, sin, y, tokens, heads, dim, turned);
}

/* `half`: keys and values are float16, else float32. */
void batchrun_attend(const struct attend *arguments, int half)
{
    /* Where values are taken by sixteen, there must be no eight left. */
    const enum instructions set = arguments->value_dim % 16 && chosen() == AVX512 ? AVX2 : chosen();
    if (half)
        CALL_OF(set, attend_half, arguments);
    else
        CALL_OF(set, attend, arguments);
}

void batchrun_write(const struct written *arguments, int half)
{
    if (half)
        CALL(write_half, arguments);
    else
        CALL(write, arguments);
}

/* sum[n] += x[n]. */
void batchrun_add(const float *x, float *sum, long n)
{
    CALL(add_all, x, sum, n);
}

#include "layer.h"

/* The two return their sum, so that it is computed. */
float batchrun_read(const float *x, long n)
{
    return CALL(read, x, n);
}

float batchrun_multiply_add(long n)
{
    return CALL(multiply_add, n);
}
