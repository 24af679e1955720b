/* core/outside.c: reports ids that are out of range. On the CPU the call itself fails. On a GPU, kernels count such
 * ids, and the next call that waits for the GPU fails.
 *
 * The counts are in pinned host memory. The host reads them only after it has waited for the context's stream
 * anyway. */

#define TE__OUTSIDE_LIST(X)                                                                        \
    X(embedding_fwd, "ids", "the rows of the table")                                               \
    X(embedding_bwd, "ids", "the rows of the table")                                               \
    X(embedding_from_end, "ids", "the rows of the table; as many negative ids count from its end") \
    X(cross_entropy_fwd, "target", "the vocabulary, and ignore_index")                             \
    X(cross_entropy_merge, "target", "the vocabulary, and ignore_index")                           \
    X(cross_entropy_bwd, "target", "the vocabulary, and ignore_index")                             \
    X(moe_router_bwd, "topk_indices", "the experts")                                               \
    X(moe_chunk_map, "sorted_index", "the chunks")

enum {
#define TE__OUTSIDE_ENUM(op, ids, range) TE__OUTSIDE_##op,
    TE__OUTSIDE_LIST(TE__OUTSIDE_ENUM)
#undef TE__OUTSIDE_ENUM
    TE__OUTSIDE_COUNT
};

/* Sets the error for an id out of range. `which` is a TE__OUTSIDE_ constant. If `seen` is true, kernels of
 * earlier calls have found first->count such ids, and `first` is one of them. Otherwise this call has found `first`. */
static te_result te__outside_fail(te_ctx *te, int which, const te__outside *first, bool seen) {
    static const char *const names[TE__OUTSIDE_COUNT][3] = {
#define TE__OUTSIDE_NAMES(op, ids, range) {#op, ids, range},
        TE__OUTSIDE_LIST(TE__OUTSIDE_NAMES)
#undef TE__OUTSIDE_NAMES
    };
    const char *op = names[which][0], *ids = names[which][1], *range = names[which][2];
    if (!seen)
        return te__fail(te, TE_ERR_INVALID, "%s: %s[%lld] is %lld; 0 to %lld are possible: %s", op, ids,
                        (long long)first->place, (long long)first->id, (long long)first->bound - 1, range);
    return te__fail(te, TE_ERR_INVALID,
                    "%s: %llu of the %s of earlier calls were out of range, and counted as zeros; one of them: "
                    "%s[%lld] is %lld; 0 to %lld are possible: %s "
                    "(TE_DEBUG_SYNC=1 tells in the call itself, with the module)",
                    op, first->count, ids, ids, (long long)first->place, (long long)first->id,
                    (long long)first->bound - 1, range);
}

/* Reports the first error in the array `all`, and clears the array. The caller must have waited for the context's
 * stream. */
static te_result te__outside_tell(te_ctx *te, te__outside *all) {
    te__outside first;
    int i;
    for (i = 0; i < TE__OUTSIDE_COUNT; i++) {
        if (!((volatile te__outside *)all)[i].count) continue;
        first = all[i];
        memset(all, 0, TE__OUTSIDE_COUNT * sizeof(*all));
        return te__outside_fail(te, i, &first, true);
    }
    return TE_OK;
}

/* Returns the counter `which` (a TE__OUTSIDE_ constant) for the plan's kernels, or a dummy address if nothing will
 * run. */
static te__outside *te__plan_outside(const te__plan *p, int which) {
    return p->explain || !p->outside ? (te__outside *)(uintptr_t)256 : (te__outside *)p->outside + which;
}
