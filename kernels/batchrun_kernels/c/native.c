/* The kernels that Python calls through ctypes: each compiled for AVX2 with FMA and portably, chosen at run time.
 *
 * Plain C with gcc's vector types; knows neither Python nor torch. Threads are OpenMP's: loaded after torch, the
 * library shares torch's own pool, whose libgomp.so.1 is found by its name.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

/* Counts up whenever a function's arguments change, so that an old library is never called with new ones. */
#define VERSION 2

/* Multiply-adds that are not worth waking a thread for. */
#define SMALL_WORK (1L << 16)

/* Elements of a row-wise kernel that are not worth waking a thread for. */
#define SMALL_ROWS (1L << 14)

typedef float float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int int8 __attribute__((vector_size(32), aligned(4), may_alias));

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

/* Attention's arguments, as native_attention.py fills them in. */
struct attend {
    const float *q;         /* [tokens][heads][key_dim] */
    const float *keys;      /* [blocks][kv_heads][key_dim][block_size], 16 floats readable behind it */
    const float *values;    /* [blocks][kv_heads][block_size][value_dim], value_dim a multiple of 8 */
    const float *sinks;     /* [heads] or null */
    float *out;             /* [tokens][heads][value_dim] */
    const int32_t *q_lens;  /* [items] */
    const int32_t *kv_lens; /* [items] */
    const int32_t *table;   /* [items][table_width] */
    long items, table_width, heads, kv_heads, key_dim, value_dim, block_size;
    long window;            /* 0: none */
    float scale, softcap;   /* softcap 0: none */
};

/* Up to 16 neighbouring positions of a block; `next`: the keys 64 positions on, null behind the end. */
struct run {
    const float *keys, *values, *next;
    long length;
};

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAME(x) x##_avx2
#include "tile.h"
#include "gemm.h"
#include "exp.h"
#include "elementwise.h"
#include "attention.h"
#include "ceiling.h"
#undef NAME
#pragma GCC pop_options
#define HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#endif

#define NAME(x) x##_portable
#include "tile.h"
#include "gemm.h"
#include "exp.h"
#include "elementwise.h"
#include "attention.h"
#include "ceiling.h"
#undef NAME

static int portable_only;

#if defined(__x86_64__)
#define CALL(function, ...) (use_avx2() ? function##_avx2(__VA_ARGS__) : function##_portable(__VA_ARGS__))
static int use_avx2(void) { return !portable_only && HAS_AVX2; }
const char *batchrun_instructions(void) { return use_avx2() ? "avx2" : "portable"; }
#else
#define CALL(function, ...) function##_portable(__VA_ARGS__)
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

void batchrun_rms_norm(const float *x, float *residual, const float *weight, float eps, float *y, long m, long n)
{
    CALL(rms_norm, x, residual, weight, eps, y, m, n);
}

void batchrun_glu(const float *gate_up, float *y, long m, long n, int is_gelu)
{
    CALL(glu, gate_up, y, m, n, is_gelu);
}

void batchrun_rope(const float *x, long token_stride, long head_stride, const float *cos, const float *sin, float *y,
                   long tokens, long heads, long dim)
{
    CALL(rope, x, token_stride, head_stride, cos, sin, y, tokens, heads, dim);
}

void batchrun_attend(const struct attend *arguments)
{
    CALL(attend, arguments);
}

/* key [tokens][kv_heads][key_dim] and value [tokens][kv_heads][value_dim], given by the strides of tokens and heads, go
 * to their slots of a pool that lies as `attend` reads it. */
void batchrun_write(const float *key, long key_token, long key_head, const float *value, long value_token,
                    long value_head, const int64_t *slots, float *keys, float *values, long tokens, long kv_heads,
                    long key_dim, long value_dim, long block_size)
{
#pragma omp parallel for if (tokens * kv_heads * key_dim > SMALL_ROWS)
    for (long token = 0; token < tokens; token++) {
        long block = slots[token] / block_size, offset = slots[token] % block_size;
        for (long head = 0; head < kv_heads; head++) {
            long at = block * kv_heads + head;
            float *to = keys + at * key_dim * block_size + offset;
            const float *from = key + token * key_token + head * key_head;
            for (long d = 0; d < key_dim; d++)
                to[d * block_size] = from[d];
            memcpy(values + (at * block_size + offset) * value_dim, value + token * value_token + head * value_head,
                   value_dim * sizeof(float));
        }
    }
}

/* The two return their sum, so that it is computed. */
float batchrun_read(const float *x, long n)
{
    return CALL(read, x, n);
}

float batchrun_multiply_add(long n)
{
    return CALL(multiply_add, n);
}
