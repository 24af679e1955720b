/* functions/state.c: the room's state in a context: tensors and objects that a module hands to the functions that it
 * runs next. This file must not depend on what they compute. */

typedef struct te__functions_state {
    te_tensor *place; /* memory for one output: the next output with the dtype and the number of bytes of `place` is
                       * stored here; NULL: every output gets new memory */
    te__shared_input *shared; /* the input that several products of a module have, or NULL */
    struct te__joint *joint; /* products that can wait for each other are noted here; NULL: products run at once */
    struct te__late_norm *late; /* set by a module for the norm that it runs next: the norm may note itself there and
                                 * not run, and then sets this to NULL */
    struct te__late_norm *normed; /* set by a module for the child that it runs next: how the child's input is to be
                                   * computed (te__take_norm) */
    te_tensor *residual; /* set by a module for the child that it runs next: the child may add this to its output, and
                          * then sets it to NULL (te__take_residual) */
    bool whole_rows;  /* true: a model runs its modules without sequence parallelism: each rank has all rows */
    bool input_sums;  /* true: column-parallel products leave the sum of their input's gradient over the ranks to a node
                       * before them (te__input_sum_begin) */
    bool any_rows;    /* true: onnx/export.c records a graph for any number of rows, so an output's offset in its
                       * buffer must not depend on the number of rows */
} te__functions_state;
static const te__slot te__functions_slot = {sizeof(te__functions_state)};
static te__functions_state *te__functions_of(const te_ctx *te) {
    return (te__functions_state *)te__slot_of(te, &te__functions_slot);
}
static const te__room te__functions_room = TE__ROOM(&te__functions_slot, NULL, NULL);

/* Marks x as the input of the products that follow, until te__share_end. Returns what was marked before. */
static te__shared_input *te__share_begin(te__shared_input *s, te_tensor *x) {
    te__shared_input *outer = te__functions_of(x->te)->shared;
    memset(s, 0, sizeof(*s));
    s->x = x;
    te__functions_of(x->te)->shared = s;
    return outer;
}
static void te__share_end(te__shared_input *s, te__shared_input *outer) {
    te__functions_of(s->x->te)->shared = outer;
    te_tensor_release(s->codes);
}
