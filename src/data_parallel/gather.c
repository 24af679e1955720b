/* data_parallel/gather.c: when the parameters of a sharded unit are gathered and released around forwards, and which
 * unit is gathered ahead. This file must not depend on gradients, or on what a module computes. */

/* ---- gathering ahead ---- */

/* Returns whether a unit that was gathered ahead has not been needed yet. */
static bool te__units_are_ahead(const te__sharding_state *s) {
    const te__dp_unit *u = s->units;
    while (u && !(u->set && u->set->coming)) u = u->next;
    return u != NULL;
}
/* Gathers the parameters of u, and begins to gather those of the unit that was next the last time: on a second stream,
 * beside the work of u. All ranks run the same modules in the same order, so they remember the same next unit. */
static te_result te__unit_gather(te__dp_unit *u, te__ahead_way way) {
    te__sharding_state *s = te__sharding_of(u->module->te);
    te__dp_unit *next;
    te_result result = te__shards_gather(u->set);
    if (result != TE_OK) return result;
    if (s->gathered[way] && s->gathered[way] != u) s->gathered[way]->ahead[way] = u;
    s->gathered[way] = u;
    next = u->ahead[way];
    if (!next || next->desc.no_prefetch || te__units_are_ahead(s)) return TE_OK;
    return te__shards_ask(next->set);
}
/* Ends a forward, or a backward pass: drops what was gathered for nothing. After a failure, which all ranks hear of,
 * forgets what they have learned, since not all have come as far. */
static void te__units_ahead_end(te_ctx *te, te_result result) {
    te__sharding_state *s = te__sharding_of(te);
    te__dp_unit *u;
    int way;
    for (way = 0; way < TE__AHEAD_WAYS; way++) {
        if (s->gathered[way]) s->gathered[way]->ahead[way] = NULL;
        s->gathered[way] = NULL;
        for (u = s->units; u && result != TE_OK; u = u->next) u->ahead[way] = NULL;
    }
    for (u = s->units; u; u = u->next)
        if (u->set) te__shards_forget(u->set);
}

/* ---- around forwards ---- */

/* Returns the unit that m belongs to, if its parameters are sharded; or NULL. */
static te__dp_unit *te__unit_around(const te_module *m) {
    te__dp_unit *u = te__unit_above(m);
    return u && u->set && u->set->of_parameters ? u : NULL;
}
/* Returns whether te_backward runs the forward of u's module, or of a module in it, again. The parameters are needed
 * right after it. */
static bool te__unit_is_replayed(const te__dp_unit *u) {
    const te_module *m = te__checkpoint_module(u->module->te->playing);
    while (m && m != u->module) m = m->parent;
    return u->module->te->tape.replays > 0 && m;
}
static te_result te__unit_enter(te_module *m) {
    te__sharding_state *s = te__sharding_of(m->te);
    te__dp_unit *u = te__unit_around(m);
    te_result result = TE_OK;
    s->running++;
    if (u && u->set->depth == 0)
        result = te__unit_gather(u, m->te->tape.plays > 0 ? TE__AHEAD_AGAIN : TE__AHEAD_FORWARD);
    if (u && result == TE_OK) u->set->depth++;
    if (result == TE_OK) return TE_OK;
    te__shards_scatter(u->set); /* what was gathered ahead has failed */
    if (--s->running == 0 && m->te->tape.plays == 0) te__units_ahead_end(m->te, result);
    return result;
}
/* Releases the unit's parameters after its outermost forward. */
static te_result te__unit_leave(te_module *m, te_result result) {
    te__dp_unit *u = te__unit_around(m);
    te__sharding_state *s = te__sharding_of(m->te);
    te_result scattered;
    if (--s->running == 0 && m->te->tape.plays == 0) te__units_ahead_end(m->te, result);
    if (!u || --u->set->depth > 0) return result;
    if (result == TE_OK && (te__unit_is_replayed(u) || (u->desc.no_reshard_after_forward && te_grad_enabled(m->te))))
        return TE_OK;
    scattered = te__shards_scatter(u->set);
    return result == TE_OK ? scattered : result;
}
static const te__around te__units_around = {te__unit_enter, te__unit_leave};
