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

/* The floats that `batchrun_layer` needs for its intermediate results. */
long batchrun_layer_scratch(const struct layer *l, long m)
{
    const long width = l->out.n, rounded = batchrun_rounded_size(m, max_of(max_of(width, l->down.k), l->out.k));
    return m * (3 * width + l->qkv.n + l->heads * (2 * l->key_dim + l->value_dim) + l->gate_up.n + l->down.k) +
           rounded + 16 * 16;
}

void batchrun_layer(const struct layer *l, const struct pass *p)
{
    const long m = p->tokens, width = l->out.n, num_turned = (l->heads + l->kv_heads) * l->key_dim;
    float *rest = p->scratch, *normed = take(&rest, m * width), *states = take(&rest, m * l->qkv.n);
    float *q = take(&rest, m * l->heads * l->key_dim), *attended = take(&rest, m * l->heads * l->value_dim);
    float *added = take(&rest, m * width);
    float *hidden = p->y, *gates = take(&rest, m * l->gate_up.n), *gated = take(&rest, m * l->down.k);

    batchrun_rms_norm(p->x, 0, l->norm.weight, l->norm.eps, normed, m, width);
    multiply(&l->qkv, normed, states, m, rest);
    struct heads queries = {states, l->qkv.n}, keys = {states + l->heads * l->key_dim, l->qkv.n};
    queries = normalised(&l->q_norm, queries, m, l->heads, l->key_dim, rest);
    batchrun_rope(queries.x, queries.stride, l->key_dim, p->cos, p->sin, q, m, l->heads, l->key_dim, p->turned);
    keys = normalised(&l->k_norm, keys, m, l->kv_heads, l->key_dim, rest);
    const struct written written = {
        .key = keys.x, .value = states + num_turned, .cos = p->cos, .sin = p->sin, .slots = p->slots,
        .sources = p->sources, .targets = p->targets, .keys = p->keys, .values = p->values,
        .key_token = keys.stride, .key_head = l->key_dim, .value_token = l->qkv.n, .value_head = l->value_dim,
        .tokens = m, .turned = p->turned, .copies = p->copies, .kv_heads = l->kv_heads, .key_dim = l->key_dim,
        .value_dim = l->value_dim, .block_size = p->block_size};
    batchrun_write(&written, p->half);
    const struct attend attend = {
        .q = q, .keys = p->keys, .values = p->values, .sinks = l->sinks, .out = attended, .q_lens = p->q_lens,
        .kv_lens = p->kv_lens, .table = p->table, .q_token = l->heads * l->key_dim, .items = p->items,
        .table_width = p->table_width, .heads = l->heads, .kv_heads = l->kv_heads, .key_dim = l->key_dim,
        .value_dim = l->value_dim, .block_size = p->block_size, .window = l->window, .scale = l->scale,
        .softcap = l->softcap};
    batchrun_attend(&attend, p->half);

    multiply(&l->out, attended, hidden, m, rest);
    if (l->after_attention.weight)
        batchrun_rms_norm(hidden, 0, l->after_attention.weight, l->after_attention.eps, hidden, m, width);
    batchrun_rms_norm(p->x, hidden, l->before_mlp.weight, l->before_mlp.eps, normed, m, width);
    multiply(&l->gate_up, normed, gates, m, rest);
    batchrun_glu(gates, gated, m, l->down.k, l->is_gelu);
    multiply(&l->down, gated, added, m, rest);
    if (l->after_mlp.weight)
        batchrun_rms_norm(added, 0, l->after_mlp.weight, l->after_mlp.eps, added, m, width);
    batchrun_add(added, hidden, m * width);
}
