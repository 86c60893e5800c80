/* The kernels that Python calls through ctypes: each compiled for AVX2 with FMA and portably, chosen at run time.
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
#define VERSION 4

/* Multiply-adds that are not worth waking a thread for. */
#define SMALL_WORK (1L << 16)

/* Elements of a row-wise kernel that are not worth waking a thread for. */
#define SMALL_ROWS (1L << 14)

#define INLINE static inline __attribute__((always_inline))
/* For a loop that needs all registers: what stands around it would take some. */
#define NOINLINE static __attribute__((noinline))

typedef float float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t half8 __attribute__((vector_size(16), aligned(2), may_alias));
typedef int int8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int16_t short16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef int16_t short8 __attribute__((vector_size(16), aligned(2), may_alias));
typedef int8_t byte16 __attribute__((vector_size(16), aligned(1), may_alias));

#include "share.h"

/* Positions that attention takes at once, the stride of their scores with room for the last 16, and rows of a piece. */
#define TILE 64
#define SCORE_STRIDE 80
#define TILE_ROWS 48

/* A matrix product's arguments and the number of groups that its rows are taken in. */
struct product {
    const float *x;      /* [m][k] */
    const float *packed; /* [ceil(n / 16)][k][16], zeros behind column n */
    const float *bias;   /* [n] or null */
    float *y;            /* [m][n] */
    long m, n, k, groups;
};

/* The same with weights of 8 bits and rows of x rounded to 16. */
struct product_int8 {
    const int16_t *x;      /* [m][2 * pairs] */
    const float *x_scales; /* [m] */
    const int8_t *packed;  /* [ceil(n / 16)][pairs][16][2], zeros behind column n */
    const float *scales;   /* [16 * ceil(n / 16)] */
    const float *bias;     /* [n] or null */
    float *y;              /* [m][n] */
    long m, n, pairs;
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

/* Up to 16 neighbouring positions of a block; `next`: the keys 64 positions on, null behind the end. */
struct run {
    const void *keys, *values, *next;
    long length;
};

/* Keys and values [tokens][kv_heads][key_dim or value_dim], given by the strides of tokens and heads, and their slots
 * in a pool that lies as `attend` reads it. */
struct written {
    const float *key, *value;
    const int64_t *slots; /* [tokens] */
    void *keys, *values;
    long key_token, key_head, value_token, value_head;
    long tokens, kv_heads, key_dim, value_dim, block_size;
};

/* A packed weight [n][k]: of float32, or of 8 bits where it has scales. */
struct weight {
    const void *panels;
    const float *scales, *bias; /* each may be null */
    long n, k;
    float most; /* the largest integer of a rounded row */
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
    float *y;               /* [tokens][width], not x */
    const float *cos, *sin; /* [tokens][turned] */
    const int64_t *slots;   /* [tokens] */
    void *keys, *values;    /* the layer's pool, as `attend` reads it */
    const int32_t *q_lens, *kv_lens, *table;
    float *scratch; /* batchrun_layer_scratch floats */
    long tokens, turned, items, table_width, block_size;
    int half; /* keys and values are float16 */
};

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define INTRINSICS
#define NAME(x) x##_avx2
#include "float32.h"
#include "tile.h"
#include "gemm.h"
#include "exp.h"
#include "gemm_int8.h"
#include "elementwise.h"
#include "attention.h"
#include "write.h"
#include "ceiling.h"
#undef NAME
#undef COLUMN
#define NAME(x) x##_half_avx2
#include "float16.h"
#include "tile.h"
#include "exp.h"
#include "attention.h"
#include "write.h"
#undef NAME
#undef COLUMN
#undef INTRINSICS
#pragma GCC pop_options
#define HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
#endif

#define NAME(x) x##_portable
#include "float32.h"
#include "tile.h"
#include "gemm.h"
#include "exp.h"
#include "gemm_int8.h"
#include "elementwise.h"
#include "attention.h"
#include "write.h"
#include "ceiling.h"
#undef NAME
#undef COLUMN
#define NAME(x) x##_half_portable
#include "float16.h"
#include "tile.h"
#include "exp.h"
#include "attention.h"
#include "write.h"
#undef NAME
#undef COLUMN

static int portable_only;

#if defined(__x86_64__)
#define CALL(function, ...) (use_avx2() ? function##_avx2(__VA_ARGS__) : function##_portable(__VA_ARGS__))
#define CALL_HALF(function, ...)                                                                                      \
    (use_avx2() ? function##_half_avx2(__VA_ARGS__) : function##_half_portable(__VA_ARGS__))
static int use_avx2(void) { return !portable_only && HAS_AVX2; }
const char *batchrun_instructions(void) { return use_avx2() ? "avx2" : "portable"; }
#else
#define CALL(function, ...) function##_portable(__VA_ARGS__)
#define CALL_HALF(function, ...) function##_half_portable(__VA_ARGS__)
const char *batchrun_instructions(void) { return "portable"; }
#endif

int batchrun_version(void) { return VERSION; }

/* 1: from now on what every processor has, 0: the best again. */
void batchrun_portable(int only) { portable_only = only; }

int batchrun_threads(void) { return omp_get_max_threads(); }

void batchrun_gemm(const float *x, const float *packed, const float *bias, float *y, long m, long n, long k)
{
    CALL(gemm, x, packed, bias, y, m, n, k);
}

void batchrun_round_rows(const float *x, int16_t *rounded, float *scales, long m, long k, long pairs, float most)
{
    CALL(round_rows, x, rounded, scales, m, k, pairs, most);
}

void batchrun_gemm_int8(const int16_t *x, const float *x_scales, const int8_t *packed, const float *scales,
                        const float *bias, float *y, long m, long n, long pairs)
{
    const struct product_int8 a = {x, x_scales, packed, scales, bias, y, m, n, pairs};
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

void batchrun_rope(const float *x, long token_stride, long head_stride, const float *cos, const float *sin, float *y,
                   long tokens, long heads, long dim, long turned)
{
    CALL(rope, x, token_stride, head_stride, cos, sin, y, tokens, heads, dim, turned);
}

/* `half`: keys and values are float16, else float32. */
void batchrun_attend(const struct attend *arguments, int half)
{
    if (half)
        CALL_HALF(attend, arguments);
    else
        CALL(attend, arguments);
}

void batchrun_write(const struct written *arguments, int half)
{
    if (half)
        CALL_HALF(write, arguments);
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
