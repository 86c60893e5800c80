/* How the threads of a product share out its work: pairs of a block of rows and a panel of outputs. */

#define WIDTH 16
/* Rows that a block has at most. */
#define BLOCK_ROWS 168

/* A thread's pairs `begin ... end`, block by block. Rows are taken in groups, which share registers, and groups in
 * blocks whose part of x stays in the second-level cache while the panels pass over it. */
struct share {
    long groups, blocks, panels, begin, end;
};

/* The groups `low ... high` of a block, and the panels `from ... to` that are multiplied with them. */
struct part {
    long low, high, from, to;
};

/* The calling thread's share of m rows by n outputs, with at most `fitting` rows in a block and `rows` in a group. */
static struct share share_of(long m, long n, long rows, long fitting)
{
    struct share s = {.groups = (m + rows - 1) / rows, .panels = (n + WIDTH - 1) / WIDTH};
    long most = (fitting < BLOCK_ROWS ? fitting : BLOCK_ROWS) / rows;
    most = most > 0 ? most : 1;
    s.blocks = (s.groups + most - 1) / most;
    s.begin = s.blocks * s.panels * omp_get_thread_num() / omp_get_num_threads();
    s.end = s.blocks * s.panels * (omp_get_thread_num() + 1) / omp_get_num_threads();
    return s;
}

/* Takes the next block's part from the share; 0: there is none. */
static int next_part(struct share *s, struct part *p)
{
    if (s->begin >= s->end)
        return 0;
    const long block = s->begin / s->panels, behind = (block + 1) * s->panels;
    p->low = s->groups * block / s->blocks;
    p->high = s->groups * (block + 1) / s->blocks;
    p->from = s->begin - block * s->panels;
    p->to = (s->end < behind ? s->end : behind) - block * s->panels;
    s->begin = block * s->panels + p->to;
    return 1;
}

/* The first row of a group of m rows: their sizes differ by one at most. */
static long group_row(long m, long groups, long group)
{
    return m * group / groups;
}
