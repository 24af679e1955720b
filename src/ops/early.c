/* ops/early.c: reads of a captured graph's kernels before te_follow, that is, while the kernels ahead still run
 * (device/base.cuh). This file must not depend on what operations compute.
 *
 * A launch of a graph begins when all earlier work of the stream has ended. So a kernel may read, before te_follow,
 * whatever no operation of the capture has written so far: no kernel ahead writes it. Kernels behind write it only when
 * this one has ended, since each waits in te_follow. It does not matter how many kernels are in between.
 * te__is_settled asks this, and says no where te.h does not see all writes:
 *
 * - outside of a capture, where the operations ahead are not known;
 * - of memory that te.h did not allocate (te_tensor_wrap): another tensor may be of the same memory;
 * - of memory of the graph itself, which may have been that of another tensor before.
 *
 * A cache of keys and values is written in each step, by one operation, which writes new rows alone. te__note_rows
 * remembers it, and te__settled_rows asks: has this operation alone written the cache in the capture, and are its rows
 * those that attention reads? Then row start[b] of sequence b and those behind it may be written while attention
 * begins, and rows before it are not. With pages, rows before start[b] of one sequence must not be new rows of another:
 * te__buffer.apart says so. A cache that anything else has written in the capture (a copy, another order of its
 * sequences, a second step) is read after te_follow. */

/* Returns true if x, or nothing, can be read before te_follow. */
static bool te__is_settled(const te__plan *p, const te_tensor *x) {
    const te_graph *g = p->te->capture;
    const te__buffer *b = x ? x->buffer : NULL;
    return !x || (g && !p->explain && b && b->capacity > 0 && te__is_outside(b) && b->written != g->id);
}

static te__rows_at te__rows_at_of(const te_tensor *x) {
    te__rows_at at = TE_ZERO;
    if (!x) return at;
    at.buffer = x->buffer;
    at.data = te__data(x);
    if (x->ndim < 3) return at; /* a list, or a page table */
    at.page = x->stride[0];
    at.row = x->stride[1];
    at.head = x->stride[2];
    return at;
}
static bool te__rows_same(const te__rows_at *x, const te__rows_at *y) {
    return x->buffer == y->buffer && x->data == y->data && x->page == y->page && x->row == y->row && x->head == y->head;
}

/* The tensors of an operation that writes rows to a cache, or reads them: k and v are [pages, page_size, heads, d],
 * factors (or NULL) [pages, page_size, heads]. table is [sequences, pages_of_each], or NULL. start is i32 [sequences];
 * a reader has none. */
typedef struct te__cache_use {
    const te_tensor *k, *v, *k_factors, *v_factors, *start, *table;
    int64_t sequences;
} te__cache_use;
static te__row_write te__row_write_of(const te__cache_use *u) {
    te__row_write w = TE_ZERO;
    w.k = te__rows_at_of(u->k);
    w.v = te__rows_at_of(u->v);
    w.k_factors = te__rows_at_of(u->k_factors);
    w.v_factors = te__rows_at_of(u->v_factors);
    w.start = te__rows_at_of(u->start);
    w.table = te__rows_at_of(u->table);
    w.page_size = u->table ? u->k->shape[1] : 0;
    w.pages_of_each = u->table ? u->table->shape[1] : 0;
    w.sequences = u->sequences;
    return w;
}
/* Notes that an operation of the capture writes rows to a cache. The note is kept only if `start` is settled: the
 * capture holds its memory then, so that a later operation can look at it. */
static void te__note_rows(const te__plan *p, const te__cache_use *u) {
    const te__row_write none = TE_ZERO;
    if (p->te->capture && !p->explain)
        p->te->capture->rows = u->start && te__is_settled(p, u->start) ? te__row_write_of(u) : none;
}

/* Returns true if the capture has written x, or nothing, only once. */
static bool te__written_once(const te__plan *p, const te_tensor *x) {
    const te__buffer *b = x ? x->buffer : NULL;
    return !x || (b && b->capacity > 0 && te__is_outside(b) && b->written == p->te->capture->id && b->times == 1);
}
/* Returns true if the rows of a cache can be read before te_follow: of sequence b those before row (*start)[b], or all
 * of them if *start is NULL. */
static bool te__settled_rows(const te__plan *p, const te__cache_use *u, const int **start) {
    const te_graph *g = p->te->capture;
    te__row_write mine;
    *start = NULL;
    if (!te__is_settled(p, u->table)) return false;
    if (te__is_settled(p, u->k) && te__is_settled(p, u->v) && te__is_settled(p, u->k_factors) &&
        te__is_settled(p, u->v_factors))
        return true;
    if (!g || p->explain || u->k->ndim != 4 || (u->table && !u->table->buffer->apart)) return false;
    mine = te__row_write_of(u);
    if (!g->rows.start.buffer || g->rows.start.buffer->written == g->id) return false;
    if (!te__rows_same(&mine.k, &g->rows.k) || !te__rows_same(&mine.v, &g->rows.v) ||
        !te__rows_same(&mine.k_factors, &g->rows.k_factors) || !te__rows_same(&mine.v_factors, &g->rows.v_factors) ||
        !te__rows_same(&mine.table, &g->rows.table) || mine.page_size != g->rows.page_size ||
        mine.pages_of_each != g->rows.pages_of_each || mine.sequences > g->rows.sequences)
        return false;
    if (!te__written_once(p, u->k) || !te__written_once(p, u->v) || !te__written_once(p, u->k_factors) ||
        !te__written_once(p, u->v_factors))
        return false;
    *start = (const int *)g->rows.start.data;
    return true;
}
