/* data_parallel/tell.c: a rank whose forward, backward pass or step fails tells the ranks that may wait for it. It may
 * fail anywhere: between two collectives, in a node of the program's own, out of memory. One rule for all modules. This
 * file must not depend on what a module computes, or on how a group tells its ranks (te__refuse).
 *
 * Told are the ranks of the groups that the call's models use, and of no others: groups of units, of the modules'
 * options, of earlier collectives in these modules; and groups whose collectives the program has called itself, outside
 * of modules, since its last backward pass. */

/* Tells the ranks of a group, unless it is gone. */
static void te__tell_group(te_ctx *te, te_group *group, te_result code) {
    const te__closable *c = group ? te->closables : NULL;
    while (c && c->owner != (void *)group) c = c->next;
    if (c) te__refuse(group, TE__BETWEEN, code);
}
static void te__tell_list(te_ctx *te, te_group *const *list, int n, te_result code) {
    int i;
    for (i = 0; i < n; i++) te__tell_group(te, list[i], code);
}
static bool te__tell_module(void *user, te_module *m) {
    const te_result code = *(const te_result *)user;
    const te__dp_unit *u = te__unit_of(m);
    te__tell_group(m->te, m->parallel.group, code);
    te__tell_list(m->te, m->shares, TE__MAX_SHARES, code);
    if (u) te__tell_group(m->te, u->desc.group, code);
    return true;
}
/* Tells the ranks of all groups that the model of m uses, and those of the program's own collectives. */
static void te__tell_model(te_ctx *te, const te_module *m, te_result code) {
    if (m) te_module_visit((te_module *)te__root_of(m), te__tell_module, &code);
    te__tell_list(te, te->used, TE__MAX_USED, code);
    te__tell_list(te, te->loose, TE__MAX_USED, code);
}

/* Ends an outermost forward: notes which groups the model uses, or tells them of its failure. */
static void te__forward_called(te_module *m, te_result result) {
    te_ctx *te = m->te;
    te_module *root = (te_module *)te__root_of(m);
    int i;
    for (i = TE__MAX_USED - 1; i >= 0 && te->shared; i--)
        if (te->used[i]) te__module_shares(root, te->used[i]);
    if (result != TE_OK && te->shared) te__tell_model(te, m, result);
    memset(te->used, 0, sizeof(te->used));
}
static void te__sharding_open(te_ctx *te) { te__modules_of(te)->called = te__forward_called; }

/* ---- backward passes ---- */

/* Notes that a backward pass plays nodes of a model. A pass of more models tells those that it has room for. */
static void te__pass_meets(te__sharding_state *s, const void *root) {
    int i;
    for (i = 0; i < s->num_roots && s->roots[i] != root; i++) {}
    if (!root || i < s->num_roots || i == TE__MAX_ROOTS) return;
    s->roots[s->num_roots++] = root;
}
/* Ends a pass. m: the module of a te_backward_dw, or NULL. */
static te_result te__pass_ends(te_ctx *te, const te_module *m, te_result result) {
    te__sharding_state *s = te__sharding_of(te);
    const te__closable *c;
    int i;
    if (result != TE_OK && te->shared) {
        te__tell_model(te, m, result);
        for (c = te->closables; c; c = c->next) /* a model may be gone */
            for (i = 0; i < s->num_roots; i++)
                if (c->owner == s->roots[i]) te__tell_model(te, (const te_module *)c->owner, result);
    }
    s->num_roots = 0;
    memset(te->used, 0, sizeof(te->used));
    memset(te->loose, 0, sizeof(te->loose));
    return result;
}
