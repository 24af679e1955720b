/* train/checkpoint_ranks.c: the ranks that write a checkpoint together, and what each of them writes. This file must
 * not depend on files.
 *
 * Ranks share a model in several ways at once: slices of units over one group, parts of matrices over another, experts
 * over a third. All ranks that these groups connect write one set of files. The groups are the lines of a grid: a
 * rank's numbers in all of them say which rank it is, and ranks with equal numbers in the groups of a parameter have
 * the same of it, so the first of them writes it. */

enum { TE__MAX_CKPT_GROUPS = 16 };

typedef struct te__ckpt_member {
    uint64_t place; /* the rank's numbers in the groups, the first group's varying fastest */
    uint64_t nonce; /* a number of its own in each save */
    uint64_t file;  /* hash of the name of the file that it saves to */
} te__ckpt_member;

/* The groups whose ranks share a model or the states of an optimizer, each listed once. The list is not allocated, so
 * that a rank without memory can still tell the others. */
typedef struct te__ckpt_groups {
    te_ctx *te;
    te_group *list[TE__MAX_CKPT_GROUPS];
    int n;
    te__ckpt_member *member; /* saving: all ranks, by `place` */
    int num_members, own;    /* own: this rank's index */
} te__ckpt_groups;

static void te__ckpt_groups_close(te__ckpt_groups *g) { te__free(g->te, g->member); }
static bool te__ckpt_add_group(te__ckpt_groups *g, te_group *group) {
    int i;
    if (te__group_size(group) == 1) return true;
    for (i = 0; i < g->n; i++)
        if (g->list[i] == group) return true;
    if (g->n == TE__MAX_CKPT_GROUPS)
        return te__not_ok(g->te, TE_ERR_UNSUPPORTED,
                          "te_model_save and te_model_load: the units and parameters have more than %d groups",
                          (int)TE__MAX_CKPT_GROUPS);
    g->list[g->n++] = group;
    return true;
}
static bool te__ckpt_meet_group(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__ckpt_groups *g = (te__ckpt_groups *)user;
    (void)m, (void)path, (void)kind;
    return te__ckpt_add_group(g, te__shard_group(x->shard)) && te__ckpt_add_group(g, x->split ? x->split->group : NULL);
}
/* Finds the ranks that make a call together. They hear of a failure even if it comes before a slice is listed. */
static te_result te__ckpt_find_groups(te__ckpt_groups *g, te_ctx *te, te_module *m, const te_optimizer *opt) {
    bool fine = true;
    int i;
    memset(g, 0, sizeof(*g));
    g->te = te;
    if (m && te_module_ctx(m) == te) fine = te_module_visit_tensors(m, te__ckpt_meet_group, g);
    for (i = 0; opt && opt->te == te && i < opt->num_params && fine; i++)
        fine = te__ckpt_meet_group(g, NULL, NULL, opt->params[i].param, TE_ENTRY_PARAMETER) &&
               te__ckpt_add_group(g, te__shard_group(opt->params[i].shard));
    for (i = 0; i < g->n; i++) te__group_tells_again(g->list[i]);
    return fine ? TE_OK : te_error_code(te);
}

/* Tells the ranks whether this one has failed. Returns an error if any has. Needs no memory: of several groups, a rank
 * that failed here would have told some already that it has not. */
static te_result te__ckpt_agree(te_group *group, te_ctx *te, te_result result) {
    if (te__group_size(group) == 1) return result;
    if (result == TE_OK) result = te->device->synchronize(te);
    return result == TE_OK ? te__barrier(group) : te__refuse(group, TE__BETWEEN, result);
}
/* Does the same with the ranks of several groups. A rank that fails between two exchanges comes here at once. Those
 * that wait for it in an exchange of any group hear of it, and tell the ranks of their own groups; those that have
 * agreed with it before, and do not know yet, hear of it in what they do next. */
static te_result te__ckpt_agree_all(const te__ckpt_groups *g, te_result result) {
    int i;
    for (i = 0; i < g->n; i++) result = te__ckpt_agree(g->list[i], g->te, result);
    for (i = 0; i < g->n && result != TE_OK; i++) te__refuse(g->list[i], TE__BETWEEN, result);
    return result;
}

/* ---- all ranks of a save ---- */

static int te__ckpt_by_member(const void *a, const void *b) {
    const te__ckpt_member *x = (const te__ckpt_member *)a, *y = (const te__ckpt_member *)b;
    if (x->place != y->place) return x->place < y->place ? -1 : 1;
    return x->nonce < y->nonce ? -1 : x->nonce > y->nonce;
}
/* Gathers n bytes of each rank to `each`, host memory. */
static te_result te__ckpt_gather_bytes(te_group *group, te_ctx *te, const void *bytes, int64_t n, void *each,
                                       te_result result) {
    te_tensor *own = NULL, *all = NULL;
    te__frame_begin(te);
    if (result == TE_OK) own = te_tensor_from_host(te, TE_U8, 1, &n, bytes);
    if (result == TE_OK && own) all = te__empty_1d(te, TE_U8, n * te__group_size(group));
    if (result == TE_OK && !all) result = te_error_code(te);
    result = result == TE_OK ? te__all_gather(group, own, all) : te__refuse(group, TE__ALL_GATHER, result);
    if (result == TE_OK) result = te_tensor_to_host(all, each);
    te__frame_end(te, NULL, 0);
    return result;
}
/* Adds the members that the other ranks of a group know. */
static te_result te__ckpt_meet_members(te__ckpt_groups *g, te_group *group, te_result result) {
    const int size = te__group_size(group);
    const int64_t n = g->num_members, bytes = n * (int64_t)sizeof(te__ckpt_member);
    te__ckpt_member *all = (te__ckpt_member *)te__alloc(g->te, (size_t)size * (size_t)te__max(bytes, 8));
    int64_t *counts = (int64_t *)(void *)all;
    int i, kept = 0;
    if (result == TE_OK && !all) result = TE_ERR_OUT_OF_MEMORY;
    result = te__ckpt_gather_bytes(group, g->te, &n, sizeof(n), counts, result);
    for (i = 0; i < size && result == TE_OK; i++)
        if (counts[i] != n)
            result = te__fail(g->te, TE_ERR_UNSUPPORTED,
                              "te_model_save: the groups of the units and parameters are no grid of ranks: rank %d of "
                              "%d saves together with %lld ranks, and this one with %lld; use groups of te_dist_init",
                              i, size, (long long)counts[i], (long long)n);
    result = te__ckpt_gather_bytes(group, g->te, g->member, bytes, all, result);
    if (result != TE_OK) {
        te__free(g->te, all);
        return result;
    }
    te__free(g->te, g->member);
    g->member = all;
    qsort(all, (size_t)size * (size_t)n, sizeof(*all), te__ckpt_by_member);
    for (i = 0; i < size * (int)n; i++)
        if (kept == 0 || te__ckpt_by_member(&all[kept - 1], &all[i]) != 0) all[kept++] = all[i];
    g->num_members = kept;
    return TE_OK;
}
/* Returns the number of ranks of the groups before group k together: the step of `place` from one rank of group k to
 * the next. */
static uint64_t te__ckpt_step_of(const te__ckpt_groups *g, int k) {
    uint64_t step = 1;
    int i;
    for (i = 0; i < k; i++) step *= (uint64_t)te__group_size(g->list[i]);
    return step;
}
/* Finds all ranks that save together, of which each gives the name of its file. All of them must call it. */
static te_result te__ckpt_find_members(te__ckpt_groups *g, const char *path, te_result result) {
    const double now = te__time_now();
    te__ckpt_member own = TE_ZERO;
    double ranks = 1.0;
    int i;
    const char *name = result == TE_OK ? path + te__path_name_at(path) : "";
    own.nonce = te__hash64(&now, sizeof(now), (uint64_t)te__process_id() + (uint64_t)(uintptr_t)g);
    own.file = te__hash64(name, strlen(name), 0);
    for (i = 0; i < g->n; i++) {
        own.place += te__ckpt_step_of(g, i) * (uint64_t)te__group_rank(g->list[i]);
        ranks *= te__group_size(g->list[i]);
    }
    if (result == TE_OK && ranks > 1e18)
        result = te__fail(g->te, TE_ERR_UNSUPPORTED, "te_model_save: %d groups of %g ranks in all are too many", g->n,
                          ranks);
    g->member = (te__ckpt_member *)te__alloc(g->te, sizeof(own));
    if (g->member) g->member[0] = own;
    else if (result == TE_OK) result = TE_ERR_OUT_OF_MEMORY;
    g->num_members = 1;
    for (i = 0; i < g->n; i++) result = te__ckpt_meet_members(g, g->list[i], result);
    for (i = 0; i < g->num_members && result == TE_OK; i++) {
        const te__ckpt_member *m = &g->member[i];
        if (m->nonce == own.nonce && m->place == own.place) g->own = i;
        if (i == 0 ? m->place != 0 : m->place == m[-1].place)
            return te__fail(g->te, TE_ERR_UNSUPPORTED,
                            "te_model_save: the groups of the units and parameters are no grid of ranks: %s; use "
                            "groups of te_dist_init",
                            i ? "two ranks have the same numbers in all groups" : "no rank is the first of each group");
        if (m->file != g->member[0].file)
            return te__fail(g->te, TE_ERR_INVALID,
                            "te_model_save: %d ranks write one set of files, and rank %d of them gives another name "
                            "than rank 0; this one gives \"%s\"",
                            g->num_members, i, name);
    }
    return result;
}
/* Returns whether rank m has the same number as this one in `group`. */
static bool te__ckpt_same_place(const te__ckpt_groups *g, const te__ckpt_member *m, const te_group *group) {
    int k;
    for (k = 0; k < g->n; k++)
        if (g->list[k] == group)
            return m->place / te__ckpt_step_of(g, k) % (uint64_t)te__group_size(group) ==
                   (uint64_t)te__group_rank(group);
    return true;
}
/* Returns whether this rank writes what it has of a parameter of which the ranks of groups a and b (may be NULL) have
 * slices and parts: whether it is the first of those that have the same. */
static bool te__ckpt_writes(const te__ckpt_groups *g, const te_group *a, const te_group *b) {
    int i;
    for (i = 0; i < g->own; i++)
        if (te__ckpt_same_place(g, &g->member[i], a) && te__ckpt_same_place(g, &g->member[i], b)) return false;
    return true;
}
