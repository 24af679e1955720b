/* core/rooms.c: the rooms of a context. A room (te__room) is a part of the library outside of core/ that keeps its own
 * state in each context. The functions below return the state of a room, or call a function of every room at an event
 * such as the end of a backward pass. This file must not depend on which rooms exist. */

/* Returns the state that a room keeps in this context. `slot` identifies the room in the table of open.c. */
static void *te__slot_of(const te_ctx *te, const te__slot *slot) {
    int i;
    for (i = 0; i < te->num_rooms && te->rooms[i]->slot != slot; i++) {}
    return te->state[i];
}

/* Calls `capture` of each te__room before a capture begins or ends. Stops at the first error. */
static te_result te__ask_capture(te_ctx *te, bool begins) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < te->num_rooms && result == TE_OK; i++)
        if (te->rooms[i]->capture) result = te->rooms[i]->capture(te, begins);
    return result;
}
/* Called where a training step may begin. Calls `step_begins` of each te__room, and stops at the first error. */
static te_result te__ask_step(te_ctx *te) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < te->num_rooms && result == TE_OK; i++)
        if (te->rooms[i]->step_begins) result = te->rooms[i]->step_begins(te);
    return result;
}
/* Calls `step_undone` of each te__room, to undo a training step that has failed. Stops at the first error. */
static te_result te__undo_step(te_ctx *te) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < te->num_rooms && result == TE_OK; i++)
        if (te->rooms[i]->step_undone) result = te->rooms[i]->step_undone(te);
    return result;
}
/* Tells each te__room that a function takes x as an input. Does nothing outside of the first call of a checkpointed
 * function. x may be NULL. */
static void te__tell_read(te_ctx *te, te_tensor *x) {
    int i;
    for (i = 0; te->tape.hidden_no_grad && i < te->num_rooms; i++)
        if (te->rooms[i]->reads) te->rooms[i]->reads(te, x);
}
static void te__tell_backward_begins(te_ctx *te, const te__segment *s, te_tensor *const *y, int count) {
    int i;
    for (i = 0; !te->tape.quiet && i < te->num_rooms; i++)
        if (te->rooms[i]->backward_begins) te->rooms[i]->backward_begins(te, s, y, count);
}
static void te__tell_backward_done(te_ctx *te) {
    int i;
    for (i = 0; i < te->num_rooms; i++)
        if (te->rooms[i]->backward_done) te->rooms[i]->backward_done(te);
}
/* Calls `backward_ends` of each te__room. Returns `result`, or an error of one of these functions. */
static te_result te__tell_backward_ends(te_ctx *te, const te_module *m, te_result result) {
    int i;
    for (i = 0; !te->tape.quiet && i < te->num_rooms; i++)
        if (te->rooms[i]->backward_ends) result = te->rooms[i]->backward_ends(te, m, result);
    return result;
}
/* Calls `node_begins` or `node_ends` of each te__room. Stops at the first error. */
static te_result te__tell_node(te_ctx *te, te__node *node, bool begins) {
    te_result result = TE_OK;
    int i;
    for (i = 0; te->tape.watched && !te->tape.quiet && i < te->num_rooms && result == TE_OK; i++) {
        te_result (*tell)(te_ctx *, te__node *) = begins ? te->rooms[i]->node_begins : te->rooms[i]->node_ends;
        if (tell) result = tell(te, node);
    }
    return result;
}

/* Called when the host has waited for the device, with the result of the wait. Returns it, or an error of te->waiters.
 * */
static te_result te__tell_waited(te_ctx *te, te_result result) {
    te__waiter *w;
    for (w = te->waiters; w && result == TE_OK; w = w->next) result = w->waited(w->user);
    return result;
}

/* ---- the report ---- */

TE_PRINTF(2, 3) static void te__say(te__report_text *t, const char *format, ...) {
    va_list args;
    int n;
    va_start(args, format);
    n = vsnprintf(t->used < t->size ? t->buffer + t->used : NULL, t->used < t->size ? t->size - t->used : 0, format,
                  args);
    va_end(args);
    if (n > 0) t->used += (size_t)n;
}
