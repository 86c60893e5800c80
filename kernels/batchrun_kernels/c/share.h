/* How the threads of a product share out its work: cells of a block of rows and the panels multiplied with it at once. */

#define WIDTH 16
/* Rows that a block has at most. */
#define BLOCK_ROWS 168
/* The part of k that a block of rows is taken through before the next; outputs wait in y meanwhile. */
#define K_PIECE 1536
/* Floats of x in a block: half of the second-level cache, which has 512 KiB, and 1 MiB beside AVX-512. */
#define BLOCK_FLOATS (8192 * LANES)
/* Panels that are multiplied at once, in two vectors of every row. */
#define PANELS (2 * LANES / WIDTH)
/* Multiply-adds of a thread that are shared out evenly. */
#define EVEN_WORK (1L << 25)

/* Cells block by block. Rows are taken in groups, which share registers, and groups in blocks whose part of x stays in
 * the second-level cache while the panels pass over it. */
struct grid {
    long groups, blocks, panels, at_once, columns, cells;
};

/* The groups `low ... high` of a block, and the panels `from ... to` that are multiplied with them. */
struct cell {
    long low, high, from, to;
};

/* Of m rows by n outputs, with at most `fitting` rows in a block, `rows` in a group and `at_once` panels in a cell. */
static struct grid grid_of(long m, long n, long rows, long fitting, long at_once)
{
    struct grid g = {.groups = (m + rows - 1) / rows, .panels = (n + WIDTH - 1) / WIDTH, .at_once = at_once};
    long most = (fitting < BLOCK_ROWS ? fitting : BLOCK_ROWS) / rows;
    most = most > 0 ? most : 1;
    g.blocks = (g.groups + most - 1) / most;
    g.columns = (g.panels + at_once - 1) / at_once;
    g.cells = g.blocks * g.columns;
    return g;
}

static struct cell cell_of(const struct grid *g, long i)
{
    const long block = i / g->columns, from = i % g->columns * g->at_once, to = from + g->at_once;
    return (struct cell){g->groups * block / g->blocks, g->groups * (block + 1) / g->blocks, from,
                         to < g->panels ? to : g->panels};
}

/* Cells that a thread takes at once at the end of `work` multiply-adds: one, so that who is slower for a moment takes
 * fewer; its even share of what is done before that pays. */
static long least_cells(const struct grid *g, long work)
{
    const long threads = omp_get_max_threads();
    return work < threads * EVEN_WORK ? (g->cells + threads - 1) / threads : 1;
}

/* The first row of a group of m rows: their sizes differ by one at most. */
static long group_row(long m, long groups, long group)
{
    return m * group / groups;
}
