/* A whole decoder layer: the kernels one after another, with their intermediate results in one piece of memory.
 *
 * h = x + after_attention(out(attention(qkv(norm(x))))), y = h + after_mlp(down(glu(gate_up(before_mlp(h))))).
 */

/* Memory for a layer's intermediate results, taken piece by piece in multiples of a cache line. */
static float *take(float **scratch, long n)
{
    float *taken = *scratch;
    *scratch += (n + 15) / 16 * 16;
    return taken;
}

static long max_of(long a, long b)
{
    return a > b ? a : b;
}

/* y[m][n] = x[m][k] W^T + bias; rows of x are rounded into `scratch` where the weight is of 8 bits. */
static void multiply(const struct weight *w, const float *x, float *y, long m, float *scratch)
{
    if (!w->scales) {
        batchrun_gemm(x, w->panels, w->bias, y, m, w->n, w->k);
        return;
    }
    batchrun_gemm_int8(x, w->panels, w->scales, w->bias, y, m, w->n, w->k, scratch);
}

/* y[m][n] = act(gates) * ups of x[m][k], which are written to `gates` [m][2n] only where that is not one product. */
static void multiply_glu(const struct layer *l, const float *x, float *gates, float *y, long m, float *scratch)
{
    const struct weight *w = &l->gate_up;
    const long n = l->down.k;
    if (!w->scales && !w->bias && n % WIDTH == 0 && w->k <= K_PIECE) {
        batchrun_gemm_glu(x, w->panels, y, m, n, w->k, l->is_gelu);
        return;
    }
    multiply(w, x, gates, m, scratch);
    batchrun_glu(gates, y, m, n, l->is_gelu);
}

/* Heads [tokens][heads][dim], tokens `stride` apart. */
struct heads {
    const float *x;
    long stride;
};

/* The same, each head normalised into `scratch` where there is a norm. */
static struct heads normalised(const struct norm *norm, struct heads of, long tokens, long heads, long dim,
                               float *scratch)
{
    if (!norm->weight)
        return of;
    for (long token = 0; token < tokens; token++)
        memcpy(scratch + token * heads * dim, of.x + token * of.stride, heads * dim * sizeof(float));
    batchrun_rms_norm(scratch, 0, norm->weight, norm->eps, scratch, tokens * heads, dim);
    return (struct heads){scratch, heads * dim};
}

/* The outputs `from ... from + n` of a weight; `from` is a multiple of 16. */
static struct weight outputs_of(const struct weight *w, long from, long n)
{
    const long output = w->scales ? groups_of(w->k) * GROUP : w->k * (long)sizeof(float);
    return (struct weight){(const char *)w->panels + from * output, w->scales ? w->scales + from : 0,
                           w->bias ? w->bias + from : 0, n, w->k};
}

/* The keys of all tokens, turned, and their values into their slots; states [tokens][stride] are keys and values. */
static void write_states(const struct layer *l, const struct pass *p, const float *states, long stride, float *scratch)
{
    const struct heads keys =
        normalised(&l->k_norm, (struct heads){states, stride}, p->tokens, l->kv_heads, l->key_dim, scratch);
    const struct written written = {
        .key = keys.x, .value = states + l->kv_heads * l->key_dim, .cos = p->cos, .sin = p->sin, .slots = p->slots,
        .sources = p->sources, .targets = p->targets, .keys = p->keys, .values = p->values,
        .key_token = keys.stride, .key_head = l->key_dim, .value_token = stride, .value_head = l->value_dim,
        .tokens = p->tokens, .turned = p->turned, .copies = p->copies, .kv_heads = l->kv_heads,
        .key_dim = l->key_dim, .value_dim = l->value_dim, .block_size = p->block_size};
    batchrun_write(&written, p->half);
}

/* Those tokens of a pass whose result is wanted. */
struct rows {
    const float *x, *states, *cos, *sin; /* [num][width], [num][stride] of queries first, [num][turned] */
    long num, stride;
};

/* What the layer makes of rows, whose keys and values are in their slots; y [num][width]. */
static void finish(const struct layer *l, const struct pass *p, const struct rows *rows, float *y, float *rest)
{
    const long m = rows->num, width = l->out.n;
    float *q = take(&rest, m * l->heads * l->key_dim), *attended = take(&rest, m * l->heads * l->value_dim);
    float *normed = take(&rest, m * width), *added = take(&rest, m * width);
    float *gates = take(&rest, m * l->gate_up.n), *gated = take(&rest, m * l->down.k);

    const struct heads queries =
        normalised(&l->q_norm, (struct heads){rows->states, rows->stride}, m, l->heads, l->key_dim, rest);
    batchrun_rope(queries.x, queries.stride, l->key_dim, rows->cos, rows->sin, q, m, l->heads, l->key_dim, p->turned);
    const struct attend attend = {
        .q = q, .keys = p->keys, .values = p->values, .sinks = l->sinks, .out = attended, .q_lens = p->q_lens,
        .kv_lens = p->kv_lens, .table = p->table, .q_token = l->heads * l->key_dim, .items = p->items,
        .table_width = p->table_width, .heads = l->heads, .kv_heads = l->kv_heads, .key_dim = l->key_dim,
        .value_dim = l->value_dim, .block_size = p->block_size, .window = l->window, .scale = l->scale,
        .softcap = l->softcap};
    batchrun_attend(&attend, p->half);

    multiply(&l->out, attended, y, m, rest);
    if (l->after_attention.weight)
        batchrun_rms_norm(y, 0, l->after_attention.weight, l->after_attention.eps, y, m, width);
    batchrun_rms_norm(rows->x, y, l->before_mlp.weight, l->before_mlp.eps, normed, m, width);
    multiply_glu(l, normed, gates, gated, m, rest);
    multiply(&l->down, gated, added, m, rest);
    if (l->after_mlp.weight)
        batchrun_rms_norm(added, 0, l->after_mlp.weight, l->after_mlp.eps, added, m, width);
    batchrun_add(added, y, m * width);
}

/* The wanted rows of x [tokens][n], one after another; to [num_wanted][n] may be x. */
static void gather(const struct pass *p, const float *x, float *to, long n)
{
    for (long r = 0; r < p->num_wanted; r++)
        memmove(to + r * n, x + p->wanted[r] * n, n * sizeof(float));
}

/* The reverse in place, in y [tokens][n]; rows that are not wanted become zero. */
static void scatter(const struct pass *p, float *y, long n)
{
    long r = p->num_wanted;
    for (long token = p->tokens - 1; token >= 0; token--)
        if (r && p->wanted[r - 1] == token)
            memmove(y + token * n, y + --r * n, n * sizeof(float));
        else
            memset(y + token * n, 0, n * sizeof(float));
}

/* The floats that `batchrun_layer` needs for its intermediate results of m tokens, with angles of up to key_dim. */
long batchrun_layer_scratch(const struct layer *l, long m)
{
    const long width = l->out.n, rounded = batchrun_rounded_size(m, max_of(max_of(width, l->down.k), l->out.k));
    return m * (4 * width + l->qkv.n + l->heads * (2 * l->key_dim + l->value_dim) + 2 * l->key_dim + l->gate_up.n +
                l->down.k) + rounded + 16 * 16;
}

void batchrun_layer(const struct layer *l, const struct pass *p)
{
    const long width = l->out.n, queries = l->heads * l->key_dim;
    float *rest = p->scratch, *normed = take(&rest, p->tokens * width), *states = take(&rest, p->tokens * l->qkv.n);
    batchrun_rms_norm(p->x, 0, l->norm.weight, l->norm.eps, normed, p->tokens, width);
    if (p->num_wanted == p->tokens) {
        multiply(&l->qkv, normed, states, p->tokens, rest);
        write_states(l, p, states + queries, l->qkv.n, rest);
        finish(l, p, &(struct rows){p->x, states, p->cos, p->sin, p->tokens, l->qkv.n}, p->y, rest);
        return;
    }
    const struct weight q = outputs_of(&l->qkv, 0, queries), kv = outputs_of(&l->qkv, queries, l->qkv.n - queries);
    multiply(&kv, normed, states, p->tokens, rest);
    write_states(l, p, states, kv.n, rest);
    if (p->num_wanted) {
        const long m = p->num_wanted;
        float *x = take(&rest, m * width), *cos = take(&rest, m * p->turned), *sin = take(&rest, m * p->turned);
        gather(p, p->x, x, width);
        gather(p, normed, normed, width);
        gather(p, p->cos, cos, p->turned);
        gather(p, p->sin, sin, p->turned);
        multiply(&q, normed, states, m, rest);
        finish(l, p, &(struct rows){x, states, cos, sin, m, queries}, p->y, rest);
    }
    scatter(p, p->y, width);
}
