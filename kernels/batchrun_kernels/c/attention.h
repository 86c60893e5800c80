/* Attention over the block table, by online softmax over tiles of 64 positions.
 *
 * Keys [blocks][kv_heads][key_dim][block_size], so that 16 positions' scores are one product of the shared inner
 * loop; values [blocks][kv_heads][block_size][value_dim]. Tiles begin at multiples of 64 in the sequence whoever asks:
 * a row's bits depend neither on the rows beside it, nor on how its prompt was cut into chunks, nor on who reads tiles
 * with it.
 */

/* Cache lines to fetch every four positions: 16 columns of each. */
#define KV_LINES ((long)sizeof(COLUMN))

/* The scores of a tile's positions: c[rows][positions] = q[rows][key_dim] keys[key_dim][positions]. With `fetches`
 * the values of the same positions are prefetched. */
INLINE void NAME(scores_of)(const int rows, const struct run *run, int runs, const float *q, const struct attend *a,
                            float *c, int fetches)
{
    for (int i = 0; i < runs; c += run[i++].length) {
        const COLUMN *keys = run[i].keys, *values = run[i].values;
        const float *next = fetches ? (const float *)values : 0;
        const float *end = fetches ? (const float *)(values + run[i].length * a->value_dim) : 0;
        VECTOR acc[ROWS][2] = {0};
        if (WIDTH == LANES && run[i].length == LANES && i + 1 < runs) {
            /* Two runs at once, each the other vector; the values of one are fetched in either half. */
            const long half = a->key_dim / 2, apart = (const COLUMN *)run[++i].keys - keys;
            NAME(accumulate)(acc, rows, 2, q, a->key_dim, keys, apart, a->block_size, half, next, end, 2 * KV_LINES);
            next = fetches ? (const float *)run[i].values : 0;
            end = fetches ? (const float *)((const COLUMN *)run[i].values + run[i].length * a->value_dim) : 0;
            NAME(accumulate)(acc, rows, 2, q + half, a->key_dim, keys + half * a->block_size, apart, a->block_size,
                             a->key_dim - half, next, end, 2 * KV_LINES);
            NAME(store)(acc, rows, 2, c, SCORE_STRIDE);
            c += LANES;
        } else if (run[i].length > LANES) {
            NAME(accumulate)(acc, rows, 2, q, a->key_dim, keys, LANES, a->block_size, a->key_dim, next, end, KV_LINES);
            NAME(store)(acc, rows, 2, c, SCORE_STRIDE);
        } else {
            NAME(accumulate)(acc, rows, 1, q, a->key_dim, keys, 0, a->block_size, a->key_dim, next, end, KV_LINES);
            NAME(store)(acc, rows, 1, c, SCORE_STRIDE);
        }
    }
}

NOINLINE void NAME(scores)(int rows, const struct run *run, int runs, const float *q, const struct attend *a, float *c,
                           int fetches)
{
    FOR_ROWS(scores_of, rows, run, runs, q, a, c, fetches)
}

/* out[rows][column ... column + LANES * vectors] += the weights of a tile's positions times their values. */
INLINE void NAME(weighted)(const int rows, const int vectors, const struct run *run, int runs, const float *weights,
                           long value_dim, long column, float *out, int fetches)
{
    VECTOR acc[ROWS][2];
    NAME(load)(acc, rows, vectors, out + column, value_dim);
    for (int i = 0; i < runs; i++) {
        /* The keys of the next tile come while the values of this one are read: a part with every pair of vectors. */
        const COLUMN *values = run[i].values, *ahead = run[i].next;
        const int has_next = fetches && ahead;
        const float *next = has_next ? (const float *)(ahead + column * run[i].length) : 0;
        const float *end = has_next ? (const float *)(ahead + (column + vectors * LANES) * run[i].length) : 0;
        NAME(accumulate)(acc, rows, vectors, weights, SCORE_STRIDE, values + column, LANES, value_dim, run[i].length,
                         next, end, KV_LINES * LANES / 8);
        weights += run[i].length;
    }
    NAME(store)(acc, rows, vectors, out + column, value_dim);
}

INLINE void NAME(weigh_rows)(const int rows, const struct run *run, int runs, const float *weights, long value_dim,
                             float *out, int fetches)
{
    long column = 0;
    for (; column + 2 * LANES <= value_dim; column += 2 * LANES)
        NAME(weighted)(rows, 2, run, runs, weights, value_dim, column, out, fetches);
    if (column < value_dim)
        NAME(weighted)(rows, 1, run, runs, weights, value_dim, column, out, fetches);
}

NOINLINE void NAME(weigh)(int rows, const struct run *run, int runs, const float *weights, long value_dim, float *out,
                          int fetches)
{
    FOR_ROWS(weigh_rows, rows, run, runs, weights, value_dim, out, fetches)
}

/* The positions `from ... to` as runs of at most 16 in one block; how many there are. */
static int NAME(runs_of)(const struct attend *a, const int32_t *table, long head, long from, long to, long end,
                         struct run *run)
{
    const COLUMN *keys = a->keys, *values = a->values;
    int runs = 0;
    long block = from / a->block_size, offset = from % a->block_size;
    for (long p = from; p < to; p += run[runs++].length) {
        long ahead = (p + TILE) / a->block_size, at = table[block] * a->kv_heads + head;
        long length = a->block_size - offset < WIDTH ? a->block_size - offset : WIDTH;
        run[runs].length = to - p < length ? to - p : length;
        run[runs].keys = keys + at * a->key_dim * a->block_size + offset;
        run[runs].values = values + (at * a->block_size + offset) * a->value_dim;
        run[runs].next = p + TILE < end ? keys + (table[ahead] * a->kv_heads + head) * a->key_dim * a->block_size : 0;
        offset += run[runs].length;
        if (offset == a->block_size) {
            offset = 0;
            block++;
        }
    }
    return runs;
}

/* A row's scores of a tile, of which [low, high) are seen: capped, -inf where not seen, and their largest. */
INLINE float NAME(masked)(float *scores, long width, long low, long high, float softcap)
{
    const INTS lanes = LANE_NUMBERS;
    const VECTOR zero = {0};
    VECTOR largest = zero - INFINITY;
    for (long t = 0; t < width; t += LANES) {
        VECTOR s = *(VECTOR *)(scores + t);
        INTS at = lanes + (int)t;
        if (softcap > 0)
            s = softcap - softcap * 2 / (NAME(exp)(s * (2 / softcap)) + 1.0f);
        s = NAME(choose)((at >= (int)low) & (at < (int)high), s, zero - INFINITY);
        *(VECTOR *)(scores + t) = s;
        largest = NAME(larger)(s, largest);
    }
    return NAME(largest_lane)(largest);
}

/* The same where there is nothing to do but to find the largest of a whole tile. */
INLINE float NAME(largest_of)(const float *scores)
{
    VECTOR largest = *(const VECTOR *)scores;
    for (long t = LANES; t < TILE; t += LANES) {
        VECTOR s = *(const VECTOR *)(scores + t);
        largest = NAME(larger)(s, largest);
    }
    return NAME(largest_lane)(largest);
}

/* How far scores may lie above `most` before that is raised: what was summed so far is rarely rescaled then, and the
 * sums stay far from the largest float. */
#define MOST_ABOVE 8

/* One row's scores [low, high) of a tile become weights, the others zero; `most` and `sum` are carried on, and the
 * result is what the row's output so far must be multiplied by. */
static float NAME(softmax)(float *scores, long width, long low, long high, float softcap, float *most, float *sum)
{
    const VECTOR zero = {0};
    int is_whole = low == 0 && high >= TILE && width == TILE;
    float here = is_whole && softcap == 0 ? NAME(largest_of)(scores) : NAME(masked)(scores, width, low, high, softcap);
    float now = here > *most + MOST_ABOVE ? here : *most;
    float kept = now > *most ? NAME(exp_of_small)(zero + (*most - now))[0] : 1;
    VECTOR total = zero;
    for (long t = 0; t < width; t += LANES) {
        VECTOR s = *(VECTOR *)(scores + t), weight = NAME(exp_of_small)(s - now);
        if (!is_whole)
            weight = NAME(choose)(s == -INFINITY, zero, weight);
        *(VECTOR *)(scores + t) = weight;
        total += weight;
    }
    *most = now;
    *sum = *sum * kept + NAME(sum_of_lanes)(total);
    return kept;
}

/* What rows of queries carry from tile to tile, and the last position that each sees. */
struct NAME(carried) {
    float *q, *scores, *out, *most, *sum; /* [rows][key_dim], [rows][SCORE_STRIDE], [rows][value_dim], [rows], [rows] */
    const long *position;                 /* [rows] */
};

/* Takes the rows `first ... first + rows` through the tiles from position `from` up to `end`. */
static void NAME(attend_tiles)(const struct attend *a, const struct NAME(carried) *c, long first, int rows,
                               const int32_t *table, long head, long from, long end)
{
    float *q = c->q + first * a->key_dim, *scores = c->scores + first * SCORE_STRIDE;
    float *out = c->out + first * a->value_dim;
    struct run run[TILE];
    const int groups = (rows + ROWS - 1) / ROWS;
    for (; from < end; from += TILE) {
        long to = from + TILE < end ? from + TILE : end;
        int runs = NAME(runs_of)(a, table, head, from, to, end, run);
        for (int g = 0; g < groups; g++) {
            int r = rows * g / groups, num = rows * (g + 1) / groups - r;
            NAME(scores)(num, run, runs, q + r * a->key_dim, a, scores + r * SCORE_STRIDE, g == 0);
        }
        for (int r = 0; r < rows; r++) {
            const long seen = c->position[first + r] + 1, hidden = seen - a->window;
            const long low = a->window > 0 && hidden > from ? hidden - from : 0;
            float kept = NAME(softmax)(scores + r * SCORE_STRIDE, to - from, low, seen - from, a->softcap,
                                       c->most + first + r, c->sum + first + r);
            if (kept != 1)
                for (long d = 0; d < a->value_dim; d += LANES)
                    *(VECTOR *)(out + r * a->value_dim + d) *= kept;
        }
        for (int g = 0; g < groups; g++) {
            int r = rows * g / groups, num = rows * (g + 1) / groups - r;
            NAME(weigh)(num, run, runs, scores + r * SCORE_STRIDE, a->value_dim, out + r * a->value_dim, g == 0);
        }
    }
}

/* Rows `first ... first + rows` of a team and kv head; row r is query r / group, head r % group of the group. */
static void NAME(attend_rows)(const struct attend *a, const struct team *team, long head, long first, int rows)
{
    const long group = a->heads / a->kv_heads, last = team->item + team->items;
    float q[rows * a->key_dim], scores[rows * SCORE_STRIDE], out[rows * a->value_dim], most[rows], sum[rows];
    long position[rows];
    const struct NAME(carried) carried = {q, scores, out, most, sum, position};
    for (int r = 0; r < rows; r++) {
        long query = team->query + (first + r) / group, at = head * group + (first + r) % group;
        const float *from = a->q + query * a->q_token + at * a->key_dim;
        for (long d = 0; d < a->key_dim; d++)
            q[r * a->key_dim + d] = from[d] * a->scale;
        most[r] = -INFINITY;
        sum[r] = 0;
    }
    memset(out, 0, sizeof out);
    for (long item = team->item, r = 0, behind = -first; item < last; item++) {
        behind += a->q_lens[item] * group;
        for (; r < rows && r < behind; r++)
            position[r] = a->kv_lens[item] - 1 - (behind - 1 - r) / group;
    }
    const long shared = team->items > 1 ? team->shared : 0;
    NAME(attend_tiles)(a, &carried, 0, rows, a->table + team->item * a->table_width, head, 0, shared);
    for (long item = team->item, r = 0; item < last; item++) {
        const long own = team->items > 1 ? a->q_lens[item] * group : rows, seen = position[r] - a->window + 1;
        const long from = a->window > 0 && seen > 0 ? seen / TILE * TILE : shared;
        NAME(attend_tiles)(a, &carried, r, (int)own, a->table + item * a->table_width, head, from,
                           position[r + own - 1] + 1);
        r += own;
    }
    for (int r = 0; r < rows; r++) {
        long query = team->query + (first + r) / group, at = head * group + (first + r) % group;
        float factor = 1;
        if (a->sinks) {
            float sink = a->sinks[at], now = sink > most[r] ? sink : most[r];
            factor = expf(most[r] - now);
            sum[r] = sum[r] * factor + expf(sink - now);
        }
        float *to = a->out + (query * a->heads + at) * a->value_dim;
        for (long d = 0; d < a->value_dim; d++)
            to[d] = out[r * a->value_dim + d] * (factor / sum[r]);
    }
}

static void NAME(attend)(const struct attend *a)
{
    const long group = a->heads / a->kv_heads;
    struct team teams[a->items + 1];
    const long num = teams_of(a, teams), units = teams[num].units;
    long positions = 0;
    for (long i = 0; i < a->items; i++)
        positions += (long)a->q_lens[i] * a->kv_lens[i];
#pragma omp parallel for schedule(dynamic) if (positions * a->heads * a->key_dim > SMALL_WORK)
    for (long unit = 0; unit < units; unit++) {
        long low = 0, high = num;
        while (high - low > 1) {
            long middle = (low + high) / 2;
            if (teams[middle].units <= unit)
                low = middle;
            else
                high = middle;
        }
        const struct team *team = teams + low;
        long piece = (unit - team->units) / a->kv_heads, head = (unit - team->units) % a->kv_heads, rows = 0;
        for (long item = team->item; item < team->item + team->items; item++)
            rows += a->q_lens[item] * group;
        long left = rows - piece * TILE_ROWS;
        NAME(attend_rows)(a, team, head, piece * TILE_ROWS, (int)(left < TILE_ROWS ? left : TILE_ROWS));
    }
}
