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
    const long pairs = (w->k + 1) / 2;
    float *scales = take(&scratch, m);
    int16_t *rounded = (int16_t *)scratch;
    batchrun_round_rows(x, rounded, scales, m, w->k, pairs, w->most);
    batchrun_gemm_int8(rounded, scales, w->panels, w->scales, w->bias, y, m, w->n, pairs);
}

/* Turns m tokens' heads, each normalised before where there is a norm: x given by its stride, y contiguous. */
static void turn(const struct norm *norm, const struct pass *p, const float *x, long stride, float *y, long heads,
                 long dim, float *scratch)
{
    if (norm->weight) {
        for (long token = 0; token < p->tokens; token++)
            memcpy(scratch + token * heads * dim, x + token * stride, heads * dim * sizeof(float));
        batchrun_rms_norm(scratch, 0, norm->weight, norm->eps, scratch, p->tokens * heads, dim);
        x = scratch;
        stride = heads * dim;
    }
    batchrun_rope(x, stride, dim, p->cos, p->sin, y, p->tokens, heads, dim, p->turned);
}

/* The floats that `batchrun_layer` needs for its intermediate results. */
long batchrun_layer_scratch(const struct layer *l, long m)
{
    const long width = l->out.n, rounded = m + m * (max_of(max_of(width, l->down.k), l->out.k) + 1) / 2;
    return m * (3 * width + l->qkv.n + (l->heads + l->kv_heads) * l->key_dim * 2 + l->heads * l->value_dim +
                l->gate_up.n + l->down.k) +
           rounded + 16 * 16;
}

void batchrun_layer(const struct layer *l, const struct pass *p)
{
    const long m = p->tokens, width = l->out.n, num_turned = (l->heads + l->kv_heads) * l->key_dim;
    float *rest = p->scratch, *normed = take(&rest, m * width), *states = take(&rest, m * l->qkv.n);
    float *q = take(&rest, m * l->heads * l->key_dim), *k = take(&rest, m * l->kv_heads * l->key_dim);
    float *attended = take(&rest, m * l->heads * l->value_dim), *added = take(&rest, m * width);
    float *hidden = p->y, *gates = take(&rest, m * l->gate_up.n), *gated = take(&rest, m * l->down.k);

    batchrun_rms_norm(p->x, 0, l->norm.weight, l->norm.eps, normed, m, width);
    multiply(&l->qkv, normed, states, m, rest);
    turn(&l->q_norm, p, states, l->qkv.n, q, l->heads, l->key_dim, rest);
    turn(&l->k_norm, p, states + l->heads * l->key_dim, l->qkv.n, k, l->kv_heads, l->key_dim, rest);
    const struct written written = {
        .key = k, .value = states + num_turned, .slots = p->slots, .keys = p->keys, .values = p->values,
        .key_token = l->kv_heads * l->key_dim, .key_head = l->key_dim, .value_token = l->qkv.n,
        .value_head = l->value_dim, .tokens = m, .kv_heads = l->kv_heads, .key_dim = l->key_dim,
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
