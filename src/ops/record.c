/* ops/record.c: records an operation in a capture. The capture holds the memory of the tensors. On the CPU the capture
 * also stores the call. This file must not depend on what operations compute.
 *
 * A capture outlives the arguments of a call. So a stored call has copies of the tensors, the tensor lists, and the
 * frequencies of a rotary embedding. */

/* Lets the graph g hold the memory of all tensors of a call until g is destroyed. */
static te_result te__capture_args(te_graph *g, const te__args *l) {
    const te__arg *p;
    te_result result = TE_OK;
    int64_t i;
    for (p = l->arg; p < l->arg + l->n; p++)
        for (i = 0; i < te__arg_count(p) && result == TE_OK; i++) {
            const te_tensor *x = te__arg_tensor(p, i);
            if (x) result = te__capture_hold(g, x->buffer);
        }
    return result;
}

/* ---- stored calls, for the CPU ---- */

/* Takes the next `bytes` bytes of `memory`, rounded up to a multiple of 16. If `memory` is NULL, only counts them in
 * *used and returns NULL. */
static void *te__call_room(unsigned char *memory, size_t *used, size_t bytes) {
    void *p = memory ? memory + *used : NULL;
    *used += (bytes + 15) / 16 * 16;
    return p;
}
/* Copies the tensor lists of a call into `memory`, and points the fields of `args` to the copies. */
static void te__keep_lists(te_op op, void *args, unsigned char *memory, size_t *used) {
    te__args l;
    const void *kept = NULL;
    int k;
    te__args_of(&l, op, args, false);
    for (k = 0; k < l.n; k++) {
        const te__arg *p = &l.arg[k];
        size_t bytes = (size_t)te__arg_count(p) * p->stride;
        void *from, *to;
        if (!p->list || p->list == kept || te__arg_count(p) <= 0) continue;
        kept = p->list; /* several arguments may be members of one list */
        to = te__call_room(memory, used, bytes);
        if (!to) continue;
        memcpy(&from, p->list, sizeof(from));
        memcpy(to, from, bytes);
        memcpy(p->list, &to, sizeof(to));
    }
}
/* Returns the angles in the arguments of a rotary operation, or NULL if there are none. */
static te_rope_angles *te__angles_of(te_op op, void *args) {
    te_op_qkv_rope_args *f = (te_op_qkv_rope_args *)args;
    te_op_qkv_rope_bwd_args *b = (te_op_qkv_rope_bwd_args *)args;
    if (op == TE_OP_JOINT_GEMM) {
        f = &((te_op_joint_gemm_args *)args)->rope;
        return f->q && !f->no_rope ? &f->angles : NULL;
    }
    if (op == TE_OP_ROPE) return &((te_op_rope_args *)args)->angles;
    if (op == TE_OP_QKV_ROPE) return f->no_rope ? NULL : &f->angles;
    return op == TE_OP_QKV_ROPE_BWD && !b->no_rope ? &b->angles : NULL;
}
/* Copies the frequencies of a call's angles, since the caller may free them when the call returns. */
static void te__keep_frequencies(te_op op, void *args, unsigned char *memory, size_t *used) {
    te_rope_angles *x = te__angles_of(op, args);
    size_t bytes = x && x->inv_freq ? (size_t)(x->rotary_dim / 2) * sizeof(float) : 0;
    void *to = bytes ? te__call_room(memory, used, bytes) : NULL;
    if (to) x->inv_freq = (const float *)memcpy(to, x->inv_freq, bytes);
}
/* Copies a tensor: the handle, not the elements. */
static te_tensor *te__keep_tensor(const te_tensor *x, unsigned char *memory, size_t *used) {
    te_tensor *copy = (te_tensor *)te__call_room(memory, used, sizeof(te_tensor));
    te__buffer *buffer = (te__buffer *)te__call_room(memory, used, sizeof(te__buffer));
    if (!copy) return NULL;
    *copy = *x;
    *buffer = *x->buffer;
    copy->buffer = buffer;
    copy->var = NULL;
    copy->name = NULL;
    return copy;
}
/* Copies the tensors of a call. */
static void te__keep_tensors(te_op op, void *args, unsigned char *memory, size_t *used) {
    te__args l;
    int64_t i;
    int k;
    te__args_of(&l, op, args, false);
    for (k = 0; k < l.n; k++)
        for (i = 0; i < te__arg_count(&l.arg[k]); i++) {
            const te_tensor *x = te__arg_tensor(&l.arg[k], i), *copy = x ? te__keep_tensor(x, memory, used) : NULL;
            if (!copy) continue;
            memcpy(te__arg_slot(&l.arg[k], i), &copy, sizeof(copy));
        }
}
static te_result te__record_call(te_ctx *te, const te__op_info *info, const void *args) {
    te__call *r = te__call_add(te);
    const te_op op = info->op;
    const size_t args_size = info->args_size;
    te__any_args count;
    size_t used = 0;
    if (!r) return TE_ERR_OUT_OF_MEMORY;
    memcpy(&count, args, args_size);
    te__call_room(NULL, &used, args_size);
    te__keep_lists(op, &count, NULL, &used);
    te__keep_tensors(op, &count, NULL, &used);
    te__keep_frequencies(op, &count, NULL, &used);
    r->args_bytes = used;
    r->args = te__alloc(te, r->args_bytes);
    if (!r->args) return TE_ERR_OUT_OF_MEMORY;
    used = 0;
    memcpy(te__call_room((unsigned char *)r->args, &used, args_size), args, args_size);
    te__keep_lists(op, r->args, (unsigned char *)r->args, &used);
    te__keep_tensors(op, r->args, (unsigned char *)r->args, &used);
    te__keep_frequencies(op, r->args, (unsigned char *)r->args, &used);
    r->op = info;
    te->capture->num_records++;
    return TE_OK;
}
