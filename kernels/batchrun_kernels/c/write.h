/* Where a slot's keys (key_dim of them, block_size apart) and values (value_dim) of a head lie. */
struct NAME(slot) {
    COLUMN *keys, *values;
};

INLINE struct NAME(slot) NAME(slot_of)(const struct written *a, long slot, long head)
{
    const long at = slot / a->block_size * a->kv_heads + head, offset = slot % a->block_size;
    return (struct NAME(slot)){(COLUMN *)a->keys + at * a->key_dim * a->block_size + offset,
                               (COLUMN *)a->values + (at * a->block_size + offset) * a->value_dim};
}

/* Keys, turned where there are angles, and values into their slots; then slots are copied. */
static void NAME(write)(const struct written *a)
{
#pragma omp parallel for if (a->tokens * a->kv_heads * a->key_dim > SMALL_WRITE)
    for (long token = 0; token < a->tokens; token++)
        for (long head = 0; head < a->kv_heads; head++) {
            const struct NAME(slot) to = NAME(slot_of)(a, a->slots[token], head);
            const float *key = a->key + token * a->key_token + head * a->key_head;
            const float *value = a->value + token * a->value_token + head * a->value_head;
            float turned[a->key_dim];
            if (a->turned) {
                turn_head(key, a->cos + token * a->turned, a->sin + token * a->turned, turned, a->key_dim, a->turned);
                key = turned;
            }
            for (long d = 0; d < a->key_dim; d++)
                to.keys[d * a->block_size] = NAME(narrow)(key[d]);
            for (long d = 0; d < a->value_dim; d++)
                to.values[d] = NAME(narrow)(value[d]);
        }
    for (long copy = 0; copy < a->copies; copy++)
        for (long head = 0; head < a->kv_heads; head++) {
            const struct NAME(slot) from = NAME(slot_of)(a, a->sources[copy], head);
            const struct NAME(slot) to = NAME(slot_of)(a, a->targets[copy], head);
            for (long d = 0; d < a->key_dim; d++)
                to.keys[d * a->block_size] = from.keys[d * a->block_size];
            memcpy(to.values, from.values, a->value_dim * sizeof(COLUMN));
        }
}
