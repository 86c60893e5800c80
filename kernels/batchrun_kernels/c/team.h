/* How the items of attention are shared out: those of few rows that read the same blocks first are a team, which reads
 * them once. Others are teams of their own. */

/* Rows of a team or of a piece of one item. */
#define TILE_ROWS 48

/* Items `item ... item + items`, whose first `shared` positions are the same whole tiles and seen by all their
 * queries; the first of these is `query`. `units` counts the pieces of work of the teams before. */
struct team {
    long item, items, query, shared, units;
};

/* The positions before the first query of an item. */
static long start_of(const struct attend *a, long item)
{
    return a->kv_lens[item] - a->q_lens[item];
}

/* The positions that two items share, as whole tiles. */
static long shared_by(const struct attend *a, long item, long other)
{
    const int32_t *table = a->table + item * a->table_width, *beside = a->table + other * a->table_width;
    const long one = start_of(a, item), two = start_of(a, other), blocks = (one < two ? one : two) / a->block_size;
    long same = 0;
    while (same < blocks && table[same] == beside[same])
        same++;
    return same * a->block_size / TILE * TILE;
}

/* The largest team that begins with an item: the next one joins as long as that saves reading, rows fit, and there are
 * teams for every thread. */
static struct team team_of(const struct attend *a, long item, long most)
{
    const long group = a->heads / a->kv_heads;
    struct team team = {.item = item, .items = 1, .shared = a->kv_lens[item]};
    for (long next = item + 1, rows = a->q_lens[item] * group; next < a->items && team.items < most; next++) {
        rows += a->q_lens[next] * group;
        /* A window moves with its row, and has passed what is shared soon. */
        const long common = rows > TILE_ROWS || a->window ? 0 : shared_by(a, next - 1, next);
        const long shared = common < team.shared ? common : team.shared;
        if (team.items * shared <= (team.items - 1) * team.shared)
            break;
        team.items++;
        team.shared = shared;
    }
    return team;
}

/* All teams, at most as many as items, and one behind them that counts the units of all; how many. */
static long teams_of(const struct attend *a, struct team *teams)
{
    const long group = a->heads / a->kv_heads, threads = omp_get_max_threads();
    const long most = a->items * a->kv_heads / (2 * threads);
    long num = 0, query = 0, units = 0;
    for (long item = 0; item < a->items; num++) {
        teams[num] = team_of(a, item, most);
        teams[num].query = query;
        teams[num].units = units;
        const long rows = a->q_lens[item] * group, pieces = (rows + TILE_ROWS - 1) / TILE_ROWS;
        units += (teams[num].items > 1 ? 1 : pieces) * a->kv_heads;
        for (const long end = item + teams[num].items; item < end; item++)
            query += a->q_lens[item];
    }
    teams[num].units = units;
    return num;
}
