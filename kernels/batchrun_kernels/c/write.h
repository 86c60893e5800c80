/* Keys, turned where there are angles, and values into their slots. */

static void NAME(write)(const struct written *a)
{
#pragma omp parallel for if (a->tokens * a->kv_heads * a->key_dim > SMALL_ROWS)
    for (long token = 0; token < a->tokens; token++) {
        long block = a->slots[token] / a->block_size, offset = a->slots[token] % a->block_size;
        for (long head = 0; head < a->kv_heads; head++) {
            long at = block * a->kv_heads + head;
            const float *key = a->key + token * a->key_token + head * a->key_head;
            const float *value = a->value + token * a->value_token + head * a->value_head;
            COLUMN *keys = (COLUMN *)a->keys + at * a->key_dim * a->block_size + offset;
            COLUMN *values = (COLUMN *)a->values + (at * a->block_size + offset) * a->value_dim;
            float turned[a->key_dim];
            if (a->turned) {
                turn_head(key, a->cos + token * a->turned, a->sin + token * a->turned, turned, a->key_dim, a->turned);
                key = turned;
            }
            for (long d = 0; d < a->key_dim; d++)
                keys[d * a->block_size] = NAME(narrow)(key[d]);
            for (long d = 0; d < a->value_dim; d++)
                values[d] = NAME(narrow)(value[d]);
        }
    }
}
