/* ops/record.c: which fields of each operation's arguments are tensors, and which of them it writes: what counts the writes, and what a capture does
 * with them: hold their memory, and on the CPU keep the call. Knows every args struct; must not know what operations compute.
 *
 * A capture outlives the tensors that it was given: a kept call has copies of them, of its own, and of every list. */

/* How an operation uses a tensor. TE__INOUT: what stands there counts for what is written. */
typedef enum te__arg_use { TE__IN, TE__OUT, TE__INOUT } te__arg_use;

/* T(field, use): a tensor, or NULL. L(field, n, use): a list of n pointers to tensors; its use may ask for i, the place in the list. This is the one
 * place that says so: the front door counts writes by it (te__run), a capture holds and copies by it. An operation without a line does not compile; a
 * field that is missing fails tests/nn/test_graph.c, a use that is wrong tests/mend/test_bytes_inside.c. */
#define TE__ARGS_copy(T, L) T(src, TE__IN) T(dst, TE__OUT)
#define TE__ARGS_fill(T, L) T(dst, TE__OUT)
#define TE__ARGS_random(T, L) T(dst, TE__OUT) T(rng, TE__IN)
#define TE__ARGS_axpby(T, L) T(x, TE__IN) T(y, TE__IN) T(out, TE__OUT) T(alpha_device, TE__IN) T(divide_device, TE__IN)
#define TE__ARGS_sum(T, L) T(x, TE__IN) T(out, TE__OUT)
#define TE__ARGS_column_sum(T, L) T(x, TE__IN) T(out, TE__SUM)
#define TE__ARGS_embedding_fwd(T, L) T(ids, TE__IN) T(table, TE__IN) T(y, TE__OUT)
#define TE__ARGS_embedding_bwd(T, L) T(ids, TE__IN) T(dy, TE__IN) T(dtable, TE__SUM)
#define TE__ARGS_amax(T, L) T(x, TE__IN) T(amax, TE__KEPT) T(noop, TE__IN)
#define TE__ARGS_scale_from_amax(T, L) T(amax, TE__IN) T(scale, TE__OUT) T(scale_inv, TE__OUT)
#define TE__ARGS_delayed_update(T, L) L(amax_history, a->count, TE__INOUT) L(scale, a->count, TE__INOUT) T(reduced, TE__IN)
#define TE__ARGS_fp8_quantize(T, L)                                                                                                            \
    T(x, TE__IN) T(row, TE__OUT) T(col, TE__OUT) T(scale, TE__IN) T(scale_inv, TE__OUT) T(amax, a->current ? TE__OUT : TE__INOUT) T(noop, TE__IN) \
        T(x_amax, TE__INOUT) T(dbias, TE__OUT)
#define TE__ARGS_fp8_dequantize(T, L) T(q, TE__IN) T(scale_inv, TE__IN) T(y, TE__OUT)
#define TE__ARGS_transpose(T, L) T(src, TE__IN) T(dst, TE__OUT)
#define TE__ARGS_delayed_gather(T, L) L(amax_history, a->count, TE__IN) T(amaxes, TE__OUT)
#define TE__ARGS_block_quantize(T, L) T(x, TE__IN) T(row, TE__OUT) T(row_scale_inv, TE__OUT) T(col, TE__OUT) T(col_scale_inv, TE__OUT) T(noop, TE__IN)
#define TE__ARGS_block_dequantize(T, L) T(q, TE__IN) T(scale_inv, TE__IN) T(y, TE__OUT)
#define TE__ARGS_mxfp8_quantize(T, L) T(x, TE__IN) T(row, TE__OUT) T(row_scale, TE__OUT) T(col, TE__OUT) T(col_scale, TE__OUT) T(noop, TE__IN)
#define TE__ARGS_mxfp8_dequantize(T, L) T(q, TE__IN) T(scale, TE__IN) T(y, TE__OUT)
#define TE__ARGS_shard_amax(T, L) T(x, TE__IN) T(amax, TE__OUT)
#define TE__ARGS_shard_scales(T, L) \
    T(amax, TE__IN) T(amax_col, TE__IN) T(amax_tensor, TE__IN) T(row_scale, TE__OUT) T(col_scale, TE__OUT) T(multiplier, TE__OUT)
#define TE__ARGS_shard_cast(T, L) T(x, TE__IN) T(dst, TE__INOUT) T(scale, TE__IN) T(amax_tensor, TE__IN) T(amax, TE__INOUT) T(multiplier, TE__IN)
#define TE__ARGS_quant_error(T, L) T(x, TE__IN) T(y, TE__IN) T(limit, TE__IN) T(counts, TE__OUT) T(sums, TE__OUT)
#define TE__ARGS_nvfp4_amax(T, L) T(x, TE__IN) T(amax_row, TE__KEPT) T(amax_col, TE__KEPT) T(noop, TE__IN)
#define TE__ARGS_nvfp4_quantize(T, L)                                                                                                 \
    T(x, TE__IN) T(row, TE__OUT) T(row_scale, TE__OUT) T(col, TE__OUT) T(col_scale, TE__OUT) T(amax_row, a->measure ? TE__OUT : TE__IN) \
        T(amax_col, a->measure ? TE__OUT : TE__IN) T(rng, TE__IN) T(noop, TE__IN)
#define TE__ARGS_nvfp4_dequantize(T, L) T(q, TE__IN) T(scale, TE__IN) T(amax, TE__IN) T(y, TE__OUT)
#define TE__ARGS_gemm(T, L)                                                                                                                     \
    T(a, TE__IN) T(b, TE__IN) T(d, TE__SUM) T(scale_a, TE__IN) T(scale_b, TE__IN) T(bias, TE__IN) T(aux, TE__AUX) T(bias_gradient, TE__OUT) \
        T(amax_a, TE__IN) T(amax_b, TE__IN)
#define TE__ARGS_grouped_gemm(T, L)                                                                                                                \
    T(a, TE__IN) T(b, TE__IN) T(d, TE__SUM) T(sizes, TE__IN) T(offsets, TE__IN) T(scale_a, TE__IN) T(scale_b, TE__IN) T(bias, TE__IN) T(aux, TE__AUX)
#define TE__ARGS_layernorm_fwd(T, L)                                                                                                             \
    T(x, TE__IN) T(gamma, TE__IN) T(beta, TE__IN) T(y, TE__OUT) T(mean, TE__OUT) T(rstd, TE__OUT) T(scale, TE__IN) T(scale_inv, TE__OUT)           \
        T(amax, TE__INOUT) T(y_amax, TE__OUT) T(y_col, TE__OUT)
#define TE__ARGS_layernorm_bwd(T, L)                                                                                                     \
    T(dy, TE__IN) T(x, TE__IN) T(gamma, TE__IN) T(mean, TE__IN) T(rstd, TE__IN) T(add, TE__IN) T(dx, TE__OUT) T(dgamma, TE__SUM) T(dbeta, TE__SUM)
#define TE__ARGS_rmsnorm_fwd(T, L) TE__ARGS_layernorm_fwd(T, L)
#define TE__ARGS_rmsnorm_bwd(T, L) TE__ARGS_layernorm_bwd(T, L)
#define TE__ARGS_act_fwd(T, L) T(x, TE__IN) T(y, TE__OUT) T(scale, TE__IN) T(scale_inv, TE__OUT) T(amax, TE__INOUT) T(col, TE__OUT)
#define TE__ARGS_act_bwd(T, L) \
    T(dy, TE__IN) T(x, TE__IN) T(dx, TE__OUT) T(scale, TE__IN) T(scale_inv, TE__OUT) T(amax, TE__INOUT) T(col, TE__OUT) T(dbias, TE__SUM)
#define TE__ARGS_rope(T, L) T(x, TE__IN) T(y, TE__OUT) T(start_positions, TE__IN)
#define TE__ARGS_qkv_rope(T, L) T(qkv, TE__IN) T(q, TE__OUT) T(k, TE__OUT) T(v, TE__OUT) T(start_positions, TE__IN)
#define TE__ARGS_qkv_rope_bwd(T, L) T(qkv, TE__OUT) T(q, TE__IN) T(k, TE__IN) T(v, TE__IN) T(start_positions, TE__IN)
#define TE__ARGS_attn_fwd(T, L) T(q, TE__IN) T(k, TE__IN) T(v, TE__IN) T(o, TE__OUT) T(lse, TE__OUT) T(rng, TE__IN)
#define TE__ARGS_attn_bwd(T, L)                                                                                                              \
    T(q, TE__IN) T(k, TE__IN) T(v, TE__IN) T(o, TE__IN) T(lse, TE__IN) T(d_o, TE__IN) T(dq, TE__OUT) T(dk, TE__OUT) T(dv, TE__OUT) T(rng, TE__IN)
#define TE__ARGS_dropout_add_fwd(T, L) T(x, TE__IN) T(bias, TE__IN) T(residual, TE__IN) T(y, TE__OUT) T(rng, TE__IN)
#define TE__ARGS_dropout_add_bwd(T, L) T(dy, TE__IN) T(dx, TE__OUT) T(rng, TE__IN)
#define TE__ARGS_cross_entropy_fwd(T, L) T(logits, TE__IN) T(target, TE__IN) T(loss, TE__OUT) T(lse, TE__OUT) T(count, TE__OUT)
#define TE__ARGS_cross_entropy_bwd(T, L) T(logits, TE__IN) T(target, TE__IN) T(lse, TE__IN) T(dloss, TE__IN) T(count, TE__IN) T(dlogits, TE__OUT)
#define TE__ARGS_mse_fwd(T, L) T(x, TE__IN) T(target, TE__IN) T(loss, TE__OUT)
#define TE__ARGS_mse_bwd(T, L) T(x, TE__IN) T(target, TE__IN) T(dloss, TE__IN) T(dx, TE__OUT)
#define TE__ARGS_adam(T, L)                                                                                                               \
    L(tensors, 5 * a->num_tensors, i % 5 ? TE__INOUT : TE__IN) T(grad_scale, TE__IN) T(found_inf, TE__IN) T(lr_device, TE__IN) T(bias_correction, TE__IN)
#define TE__ARGS_l2norm(T, L) L(tensors, a->num_tensors, TE__IN) T(norm, TE__OUT) T(per_tensor, TE__OUT) T(clip, TE__OUT)
#define TE__ARGS_multi_scale(T, L) L(in, a->num_tensors, TE__IN) L(out, a->num_tensors, TE__OUT) T(scale_device, TE__IN) T(found_inf, TE__INOUT)

/* Uses that hang on a field of the args. */
#define TE__SUM (a->accumulate ? TE__INOUT : TE__OUT)
#define TE__KEPT (a->keep ? TE__INOUT : TE__OUT)
#define TE__AUX (a->epilogue == TE_EPILOGUE_GELU ? TE__OUT : TE__IN)

typedef char te__adam_tensor_is_five_pointers[sizeof(te_adam_tensor) == 5 * sizeof(te_tensor *) ? 1 : -1];

/* Every args struct fits. */
typedef union te__any_args {
    uint64_t align[2];
#define TE__OP_MEMBER(lower, UPPER, family) te_op_##lower##_args lower;
    TE_OP_LIST(TE__OP_MEMBER)
#undef TE__OP_MEMBER
} te__any_args;

/* What is done with each pointer. `slot` and `list` are addresses of fields; their types differ in const alone, so they are read by memcpy. */
typedef struct te__arg_walk {
    te_graph *g;
    te_result result;
    unsigned char *memory; /* of a kept call; NULL: only counts */
    size_t used;
    const te_tensor *without_memory; /* the first one, and the field it is in */
    const char *field;
} te__arg_walk;
typedef void (*te__arg_fn)(te__arg_walk *w, void *slot, te__arg_use use);

static te_tensor *te__arg_tensor(const void *slot) {
    te_tensor *x;
    memcpy(&x, slot, sizeof(x));
    return x;
}
static void te__arg_hold(te__arg_walk *w, void *slot, te__arg_use use) {
    te_tensor *x = te__arg_tensor(slot);
    (void)use;
    if (x && w->result == TE_OK) w->result = te__capture_hold(w->g, x->buffer);
}

static void te__arg_touch(te__arg_walk *w, void *slot, te__arg_use use) {
    (void)w;
    if (use != TE__IN) te__touch(te__arg_tensor(slot));
}

/* Neither described tensors nor quantized ones, which all checks refuse. */
static void te__arg_memory(te__arg_walk *w, void *slot, te__arg_use use) {
    const te_tensor *x = te__arg_tensor(slot);
    (void)use;
    if (x && !x->buffer && !w->without_memory) w->without_memory = x;
}

static void *te__arg_room(te__arg_walk *w, size_t bytes) {
    void *p = w->memory ? w->memory + w->used : NULL;
    w->used += (bytes + 15) / 16 * 16;
    return p;
}
/* A tensor as an operation sees it: shape and memory. */
static void te__arg_keep(te__arg_walk *w, void *slot, te__arg_use use) {
    te_tensor *x = te__arg_tensor(slot), *copy;
    te__buffer *buffer;
    (void)use;
    if (!x) return;
    copy = (te_tensor *)te__arg_room(w, sizeof(te_tensor));
    buffer = (te__buffer *)te__arg_room(w, sizeof(te__buffer));
    if (!copy) return;
    *copy = *x;
    copy->var = NULL;
    copy->name = NULL;
    if (x->buffer) {
        *buffer = *x->buffer;
        copy->buffer = buffer;
    }
    memcpy(slot, &copy, sizeof(copy));
}
static void te__arg_one(te__arg_walk *w, const char *field, void *slot, te__arg_use use, te__arg_fn visit) {
    if (!w->without_memory) w->field = field;
    visit(w, slot, use);
}
/* The first pointer of a list, which is copied where the call is kept. */
static unsigned char *te__arg_list(te__arg_walk *w, void *list, int64_t n, bool keep) {
    unsigned char *first, *copy;
    memcpy(&first, list, sizeof(first));
    if (!keep || n <= 0) return first;
    copy = (unsigned char *)te__arg_room(w, (size_t)n * sizeof(te_tensor *));
    if (!copy) return first;
    memcpy(copy, first, (size_t)n * sizeof(te_tensor *));
    memcpy(list, &copy, sizeof(copy));
    return copy;
}

#define TE__ARG_T(name, use) te__arg_one(w, #name, (void *)&a->name, (use), visit);
#define TE__ARG_L(name, n, use)                            \
    first = te__arg_list(w, (void *)&a->name, (n), keep); \
    for (i = 0; i < (n); i++) te__arg_one(w, #name, first + (size_t)i * sizeof(te_tensor *), (use), visit);
#define TE__ARG_WALK(lower, UPPER, family)                                                             \
    static void te__walk_##lower(te__arg_walk *w, void *args, te__arg_fn visit, bool keep) {           \
        te_op_##lower##_args *a = (te_op_##lower##_args *)args;                                              \
        unsigned char *first = NULL;                                                                   \
        int64_t i = 0;                                                                                 \
        (void)keep, (void)first, (void)i;                                                              \
        TE__ARGS_##lower(TE__ARG_T, TE__ARG_L)                                                         \
    }
TE_OP_LIST(TE__ARG_WALK)
#undef TE__ARG_WALK

static void te__walk_args(te__arg_walk *w, te_op op, void *args, te__arg_fn visit, bool keep) {
    static void (*const walks[TE_OP_COUNT])(te__arg_walk *, void *, te__arg_fn, bool) = {NULL,
#define TE__ARG_ROW(lower, UPPER, family) te__walk_##lower,
        TE_OP_LIST(TE__ARG_ROW)
#undef TE__ARG_ROW
    };
    walks[op](w, args, visit, keep);
}

/* The memory that a call names stays as long as the graph under way. */
static te_result te__capture_args(te_graph *g, te_op op, void *args) {
    te__arg_walk w = TE_ZERO;
    w.g = g;
    te__walk_args(&w, op, args, te__arg_hold, false);
    return w.result;
}

/* All that the call writes, and nothing else, counts as written. */
static void te__touch_args(te_op op, void *args) {
    te__arg_walk w = TE_ZERO;
    te__walk_args(&w, op, args, te__arg_touch, false);
}

/* ---- the CPU's calls ---- */

typedef struct te__call {
    te_op op; /* TE_OP_NONE: `bytes` at `clear` become 0 */
    void *clear;
    size_t bytes;
    void *args; /* `args_bytes` with what they name behind them */
    size_t args_bytes;
} te__call;

static te__call *te__call_add(te_ctx *te) {
    te_graph *g = te->capture;
    if (!te__grow(te, (void **)&g->records, &g->cap_records, g->num_records, sizeof(te__call))) return NULL;
    memset(&g->records[g->num_records], 0, sizeof(te__call));
    return &g->records[g->num_records];
}
static te_result te__record_clear(te_ctx *te, void *dst, size_t bytes) {
    te__call *r = te__call_add(te);
    if (!r) return TE_ERR_OUT_OF_MEMORY;
    r->clear = dst;
    r->bytes = bytes;
    te->capture->num_records++;
    return TE_OK;
}
static te_result te__record_call(te_ctx *te, te_op op, const void *args, size_t args_size) {
    te__call *r = te__call_add(te);
    te__arg_walk w = TE_ZERO;
    te__any_args count;
    if (!r) return TE_ERR_OUT_OF_MEMORY;
    memcpy(&count, args, args_size);
    te__arg_room(&w, args_size);
    te__walk_args(&w, op, &count, te__arg_keep, true);
    r->args_bytes = w.used;
    r->args = te__alloc(te, r->args_bytes);
    if (!r->args) return TE_ERR_OUT_OF_MEMORY;
    memset(&w, 0, sizeof(w));
    w.memory = (unsigned char *)r->args;
    te__arg_room(&w, args_size);
    memcpy(r->args, args, args_size);
    te__walk_args(&w, op, r->args, te__arg_keep, true);
    r->op = op;
    te->capture->num_records++;
    return TE_OK;
}
static void te__records_free(te_ctx *te, te_graph *g) {
    int i;
    for (i = 0; i < g->num_records; i++) te__free(te, g->records[i].args, g->records[i].args_bytes);
    te__free(te, g->records, (size_t)g->cap_records * sizeof(te__call));
    g->records = NULL;
    g->num_records = g->cap_records = 0;
}
