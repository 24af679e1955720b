/* ops/record.c: which fields of each operation's arguments are tensors; what a capture does with them: hold their memory, and on the CPU keep
 * the call. Knows every args struct; must not know what operations compute.
 *
 * A capture outlives the tensors that it was given: a kept call has copies of them, of its own, and of every list. */

/* T(field): a tensor, or NULL. L(field, n): a list of n pointers to tensors. An operation without a line does not compile; a field that is
 * missing fails tests/nn/test_graph.c. */
#define TE__ARGS_copy(T, L) T(src) T(dst)
#define TE__ARGS_fill(T, L) T(dst)
#define TE__ARGS_random(T, L) T(dst) T(rng)
#define TE__ARGS_axpby(T, L) T(x) T(y) T(out) T(alpha_device) T(divide_device)
#define TE__ARGS_sum(T, L) T(x) T(out)
#define TE__ARGS_column_sum(T, L) T(x) T(out)
#define TE__ARGS_embedding_fwd(T, L) T(ids) T(table) T(y)
#define TE__ARGS_embedding_bwd(T, L) T(ids) T(dy) T(dtable)
#define TE__ARGS_amax(T, L) T(x) T(amax) T(noop)
#define TE__ARGS_scale_from_amax(T, L) T(amax) T(scale) T(scale_inv)
#define TE__ARGS_delayed_update(T, L) L(amax_history, a->count) L(scale, a->count) T(reduced)
#define TE__ARGS_fp8_quantize(T, L) T(x) T(row) T(col) T(scale) T(scale_inv) T(amax) T(noop) T(x_amax) T(dbias)
#define TE__ARGS_fp8_dequantize(T, L) T(q) T(scale_inv) T(y)
#define TE__ARGS_transpose(T, L) T(src) T(dst)
#define TE__ARGS_delayed_gather(T, L) L(amax_history, a->count) T(amaxes)
#define TE__ARGS_block_quantize(T, L) T(x) T(row) T(row_scale_inv) T(col) T(col_scale_inv) T(noop)
#define TE__ARGS_block_dequantize(T, L) T(q) T(scale_inv) T(y)
#define TE__ARGS_mxfp8_quantize(T, L) T(x) T(row) T(row_scale) T(col) T(col_scale) T(noop)
#define TE__ARGS_mxfp8_dequantize(T, L) T(q) T(scale) T(y)
#define TE__ARGS_shard_amax(T, L) T(x) T(amax)
#define TE__ARGS_shard_scales(T, L) T(amax) T(amax_col) T(amax_tensor) T(row_scale) T(col_scale) T(multiplier)
#define TE__ARGS_shard_cast(T, L) T(x) T(dst) T(scale) T(amax_tensor) T(amax) T(multiplier)
#define TE__ARGS_quant_error(T, L) T(x) T(y) T(limit) T(counts) T(sums)
#define TE__ARGS_nvfp4_amax(T, L) T(x) T(amax_row) T(amax_col) T(noop)
#define TE__ARGS_nvfp4_quantize(T, L) T(x) T(row) T(row_scale) T(col) T(col_scale) T(amax_row) T(amax_col) T(rng) T(noop)
#define TE__ARGS_nvfp4_dequantize(T, L) T(q) T(scale) T(amax) T(y)
#define TE__ARGS_gemm(T, L) T(a) T(b) T(d) T(scale_a) T(scale_b) T(bias) T(aux) T(bias_gradient) T(amax_a) T(amax_b)
#define TE__ARGS_grouped_gemm(T, L) T(a) T(b) T(d) T(sizes) T(offsets) T(scale_a) T(scale_b) T(bias) T(aux)
#define TE__ARGS_layernorm_fwd(T, L) T(x) T(gamma) T(beta) T(y) T(mean) T(rstd) T(scale) T(scale_inv) T(amax) T(y_amax) T(y_col)
#define TE__ARGS_layernorm_bwd(T, L) T(dy) T(x) T(gamma) T(mean) T(rstd) T(add) T(dx) T(dgamma) T(dbeta)
#define TE__ARGS_rmsnorm_fwd(T, L) TE__ARGS_layernorm_fwd(T, L)
#define TE__ARGS_rmsnorm_bwd(T, L) TE__ARGS_layernorm_bwd(T, L)
#define TE__ARGS_act_fwd(T, L) T(x) T(y) T(scale) T(scale_inv) T(amax) T(col)
#define TE__ARGS_act_bwd(T, L) T(dy) T(x) T(dx) T(scale) T(scale_inv) T(amax) T(col) T(dbias)
#define TE__ARGS_rope(T, L) T(x) T(y) T(start_positions)
#define TE__ARGS_qkv_rope(T, L) T(qkv) T(q) T(k) T(v) T(start_positions)
#define TE__ARGS_qkv_rope_bwd(T, L) T(qkv) T(q) T(k) T(v) T(start_positions)
#define TE__ARGS_attn_fwd(T, L) T(q) T(k) T(v) T(o) T(lse) T(rng)
#define TE__ARGS_attn_bwd(T, L) T(q) T(k) T(v) T(o) T(lse) T(d_o) T(dq) T(dk) T(dv) T(rng)
#define TE__ARGS_dropout_add_fwd(T, L) T(x) T(bias) T(residual) T(y) T(rng)
#define TE__ARGS_dropout_add_bwd(T, L) T(dy) T(dx) T(rng)
#define TE__ARGS_cross_entropy_fwd(T, L) T(logits) T(target) T(loss) T(lse) T(count)
#define TE__ARGS_cross_entropy_bwd(T, L) T(logits) T(target) T(lse) T(dloss) T(count) T(dlogits)
#define TE__ARGS_mse_fwd(T, L) T(x) T(target) T(loss)
#define TE__ARGS_mse_bwd(T, L) T(x) T(target) T(dloss) T(dx)
#define TE__ARGS_adam(T, L) L(tensors, 5 * a->num_tensors) T(grad_scale) T(found_inf) T(lr_device) T(bias_correction)
#define TE__ARGS_l2norm(T, L) L(tensors, a->num_tensors) T(norm) T(per_tensor) T(clip)
#define TE__ARGS_multi_scale(T, L) L(in, a->num_tensors) L(out, a->num_tensors) T(scale_device) T(found_inf)

typedef char te__adam_tensor_is_five_pointers[sizeof(te_adam_tensor) == 5 * sizeof(te_tensor *) ? 1 : -1];

/* Every args struct fits. */
typedef union te__any_args {
    uint64_t align[2];
#define TE__OP_MEMBER(lower, UPPER, family) te_##lower##_args lower;
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
typedef void (*te__arg_fn)(te__arg_walk *w, void *slot);

static te_tensor *te__arg_tensor(const void *slot) {
    te_tensor *x;
    memcpy(&x, slot, sizeof(x));
    return x;
}
static void te__arg_hold(te__arg_walk *w, void *slot) {
    te_tensor *x = te__arg_tensor(slot);
    if (x && w->result == TE_OK) w->result = te__capture_hold(w->g, x->buffer);
}

/* Neither described tensors nor quantized ones, which all checks refuse. */
static void te__arg_memory(te__arg_walk *w, void *slot) {
    const te_tensor *x = te__arg_tensor(slot);
    if (x && !x->buffer && !w->without_memory) w->without_memory = x;
}

static void *te__arg_room(te__arg_walk *w, size_t bytes) {
    void *p = w->memory ? w->memory + w->used : NULL;
    w->used += (bytes + 15) / 16 * 16;
    return p;
}
/* A tensor as an operation sees it: shape and memory. */
static void te__arg_keep(te__arg_walk *w, void *slot) {
    te_tensor *x = te__arg_tensor(slot), *copy;
    te__buffer *buffer;
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
static void te__arg_one(te__arg_walk *w, const char *field, void *slot, te__arg_fn visit) {
    if (!w->without_memory) w->field = field;
    visit(w, slot);
}
static void te__arg_list(te__arg_walk *w, const char *field, void *list, int64_t n, te__arg_fn visit, bool keep) {
    unsigned char *first;
    int64_t i;
    memcpy(&first, list, sizeof(first));
    if (keep && n > 0) {
        unsigned char *copy = (unsigned char *)te__arg_room(w, (size_t)n * sizeof(te_tensor *));
        if (copy) {
            memcpy(copy, first, (size_t)n * sizeof(te_tensor *));
            memcpy(list, &copy, sizeof(copy));
            first = copy;
        }
    }
    for (i = 0; i < n; i++) te__arg_one(w, field, first + (size_t)i * sizeof(te_tensor *), visit);
}

#define TE__ARG_T(name) te__arg_one(w, #name, (void *)&a->name, visit);
#define TE__ARG_L(name, n) te__arg_list(w, #name, (void *)&a->name, (n), visit, keep);
#define TE__ARG_WALK(lower, UPPER, family)                                                             \
    static void te__walk_##lower(te__arg_walk *w, void *args, te__arg_fn visit, bool keep) {           \
        te_##lower##_args *a = (te_##lower##_args *)args;                                              \
        (void)keep;                                                                                    \
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
