/* modules/forward.c: runs a module, including its activation checkpointing. This file must not depend on what any class
 * computes. */

TE_API te_module_forward_fn te_module_set_forward(te_module *m, te_module_forward_fn forward) {
    te_module_forward_fn old = m ? m->own_forward : NULL;
    if (m) m->own_forward = forward;
    return old;
}

/* The fields of te_outputs, as X(field, name in ONNX files, passes). If `passes` is 0, only the last child of a
 * Sequential may return this output. */
#define TE__OUTPUT_LIST(X)                                                                                           \
    X(out, "out", 1)                                                                                                 \
    X(bias, "output_bias", 0)                                                                                        \
    X(ln_out, "ln_out", 0)                                                                                           \
    X(max_logit, "max_logit", 0)                                                                                     \
    X(m_splits, "m_splits", 0)                                                                                       \
    X(topk_indices, "topk_indices", 1)                                                                               \
    X(aux_loss, "aux_loss", 1)
#define TE__OUTPUT_COUNT(field, onnx, passes) +1
enum { TE__OUTPUTS = 0 TE__OUTPUT_LIST(TE__OUTPUT_COUNT) };
TE__STATIC_ASSERT(sizeof(te_outputs) == TE__OUTPUTS * sizeof(te_tensor *), "te_outputs has a field without a row");
#define TE__OUTPUT_NAME(field, onnx, passes) #field,
static const char *const te__output_names[TE__OUTPUTS] = {TE__OUTPUT_LIST(TE__OUTPUT_NAME)};

static void te__outputs_list(const te_outputs *y, te_tensor *list[TE__OUTPUTS]) {
    int n = 0;
#define TE__OUTPUT_TO(field, onnx, passes) list[n++] = y->field;
    TE__OUTPUT_LIST(TE__OUTPUT_TO)
#undef TE__OUTPUT_TO
}
static te_outputs te__outputs_of(te_tensor *const list[TE__OUTPUTS]) {
    te_outputs y;
    int n = 0;
#define TE__OUTPUT_FROM(field, onnx, passes) y.field = list[n++];
    TE__OUTPUT_LIST(TE__OUTPUT_FROM)
#undef TE__OUTPUT_FROM
    return y;
}

/* Checks fp8_output and fp8_grad of a call. If one is set, m must support it. */
static bool te__codes_ok(const te_module *m, const te_forward_args *args) {
    bool output = args->fp8_output && !m->has_fp8_output, grad = args->fp8_grad && !m->has_fp8_grad;
    if (!output && !grad) return true;
    return te__not_ok(
        m->te, TE_ERR_UNSUPPORTED,
        "%s: %s: this module's %s stays in high precision; Linear and LayerNormLinear quantize both, if told: "
        "leave it false",
        m->cls->name, output ? "fp8_output" : "fp8_grad", output ? "output" : "input's gradient");
}

/* Runs `forward` or, if it is NULL, the module's own function. Releases the temporaries at the end, except those that
 * the tape retains. */
static te_result te__module_run_as(te_module *m, te_forward_args *args,
                                   te_result (*forward)(te_module *m, te_forward_args *args, void *user), void *user) {
    te_ctx *te = m->te;
    const te__around *around = te__modules_of(te)->around;
    char before[sizeof(te->module_path)];
    te_tensor *made[TE__OUTPUTS];
    te_result result;
    te__path *path;
    if (te__tree_whole(m) != TE_OK) return TE_ERR_STATE;
    if (m->built_in && !m->own_forward && !te__codes_ok(m, args)) return TE_ERR_UNSUPPORTED;
    if ((int)args->is_first_microbatch < 0 || args->is_first_microbatch > TE_MICROBATCH_LATER)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: is_first_microbatch is %d; TE_MICROBATCH_NONE to TE_MICROBATCH_LATER (0 to %d) are possible",
            m->cls->name, (int)args->is_first_microbatch, (int)TE_MICROBATCH_LATER);
    memcpy(before, te->module_path, sizeof(before));
    te_module_path(m, te->module_path, sizeof(te->module_path));
    path = te->path;
    te->path = NULL;
    memset(&args->outputs, 0, sizeof(args->outputs));
    te__frame_begin(te);
    result = around ? around->enter(m) : TE_OK;
    if (result == TE_OK) {
        result = te__returned(te,
                              forward          ? forward(m, args, user)
                              : m->own_forward ? m->own_forward(m, args)
                                               : m->cls->forward(m, args),
                              m->cls->name, NULL);
        if (around) result = around->leave(m, result);
    }
    if (result == TE_OK && !args->outputs.out) {
        /* either the class ignored an earlier error, or it returned TE_OK without an output */
        if (te->error_code == TE_OK)
            te__fail(te, TE_ERR_STATE, "%s: forward returned TE_OK without an output", m->cls->name);
        result = te->error_code;
    }
    /* if the class has recorded an error itself, te__fail keeps that error */
    if (result != TE_OK) te__fail(te, result, "%s: forward returned %s", m->cls->name, te_result_name(result));
    te__outputs_list(&args->outputs, made);
    te__frame_end(te, made, result == TE_OK ? TE__OUTPUTS : 0);
    memcpy(te->module_path, before, sizeof(before));
    te__path_release(te, te->path);
    te->path = path;
    return result;
}
static te_result te__module_run(te_module *m, te_forward_args *args) { return te__module_run_as(m, args, NULL, NULL); }

/* ---- checkpoints ---- */

/* Each list names all fields of one struct, in the order of the struct: T(field) for a tensor, O(field) for any other
 * field. If a list lacks a field, te__call_tensors does not compile. */
#define TE__FORWARD_FIELDS(T, O)                                                                                     \
    T(input) T(encoder_output) T(key) T(value) O(rotary) O(rotary_key) O(attention) O(cross) O(m_splits)             \
    T(m_splits_tensor) T(topk_weights) T(topk_indices) O(padded_m_splits) O(fp8_output) O(fp8_grad)                  \
    O(is_first_microbatch) O(kv_cache) O(logits_to_keep) O(user) O(outputs)
#define TE__ATTENTION_FIELDS(T, O)                                                                                   \
    O(attn_mask_type) O(window) O(bottom_right_diagonal) T(attention_mask) T(attention_mask_q) T(cu_seqlens_q)       \
    T(cu_seqlens_kv) T(cu_seqlens_q_padded) T(cu_seqlens_kv_padded) O(max_seqlen_q) O(max_seqlen_kv)                 \
    O(pad_between_seqs) O(core_attention_bias_type) T(core_attention_bias) T(alibi_slopes)                           \
    O(checkpoint_core_attention) O(inference_params) T(k_factors) T(v_factors) O(score_mod) T(qkv_layer) T(kv_layer) \
    O(qkv_interleave_dim)
#define TE__CROSS_FIELDS(T, O)                                                                                       \
    T(enc_dec_attn_mask) T(enc_dec_attn_mask_q) O(enc_dec_attn_mask_type) O(enc_dec_window)                          \
    O(enc_dec_bottom_right_diagonal)
#define TE__ROTARY_FIELDS(T, O)                                                                                      \
    O(base) O(rotary_percent) O(interleaved) O(seq_len_interpolation_factor) O(pretrained_max_position_embeddings)   \
    O(scaling) O(position_offset) T(start_positions) T(positions) T(freqs) O(attention_factor) O(cp_size) O(cp_rank) \
    T(cu_seqlens) O(max_seqlen)
TE__STATIC_ASSERT(TE_SCORE_MOD_AUX == 4, "te__call_names and ops/args.c name four tensors of a score_mod");

/* A module call that runs as a checkpointed function. The inputs of the function are the tensors of the call, in the
 * order of te__call_tensors. */
typedef struct te__module_call {
    te_module *m;
    te_forward_args args;
    te_rotary_desc rotary, rotary_key; /* args.rotary and args.rotary_key point here if the call has them */
    te_score_mod score_mod;            /* args.attention.score_mod points here if the call has one */
    bool of_class;          /* true: run the function of the class, because the function of te_module_set_forward is
                             * already running */
    int num_outputs;        /* outputs of the last run */
    bool made[TE__OUTPUTS]; /* which outputs the last run made */
} te__module_call;

enum {
    TE__FORWARD_TENSORS = TE_SCORE_MOD_AUX TE__FORWARD_FIELDS(TE__COUNTED, TE__UNCOUNTED)
        TE__ATTENTION_FIELDS(TE__COUNTED, TE__UNCOUNTED) TE__CROSS_FIELDS(TE__COUNTED, TE__UNCOUNTED)
            TE__ROTARY_FIELDS(TE__COUNTED, TE__UNCOUNTED) TE__ROTARY_FIELDS(TE__COUNTED, TE__UNCOUNTED)
};
#define TE__NAME(field) #field,
#define TE__NAME_OF_KEY(field) #field "_key",
static const char *const te__call_names[TE__FORWARD_TENSORS] = {
    TE__FORWARD_FIELDS(TE__NAME, TE__UNCOUNTED) TE__ATTENTION_FIELDS(TE__NAME, TE__UNCOUNTED)
        TE__CROSS_FIELDS(TE__NAME, TE__UNCOUNTED) TE__ROTARY_FIELDS(TE__NAME, TE__UNCOUNTED)
            TE__ROTARY_FIELDS(TE__NAME_OF_KEY, TE__UNCOUNTED) "score_mod.aux[0]",
    "score_mod.aux[1]", "score_mod.aux[2]", "score_mod.aux[3]"};
#undef TE__NAME
#undef TE__NAME_OF_KEY

/* Lists the addresses of the tensor fields of a call. A field may hold NULL. */
static void te__call_tensors(te__module_call *c, te_tensor **list[TE__FORWARD_TENSORS]) {
    int n = 0, i;
#define TE__TYPE te_forward_args
    TE__WHOLE(TE__FORWARD_FIELDS)
#undef TE__TYPE
#define TE__TYPE te_attn_call
    TE__WHOLE(TE__ATTENTION_FIELDS)
#undef TE__TYPE
#define TE__TYPE te_cross_attention_call
    TE__WHOLE(TE__CROSS_FIELDS)
#undef TE__TYPE
#define TE__TYPE te_rotary_desc
    TE__WHOLE(TE__ROTARY_FIELDS)
#undef TE__TYPE
#define TE__AT(field) list[n++] = &c->args.field;
    TE__FORWARD_FIELDS(TE__AT, TE__UNCOUNTED)
#undef TE__AT
#define TE__AT(field) list[n++] = &c->args.attention.field;
    TE__ATTENTION_FIELDS(TE__AT, TE__UNCOUNTED)
#undef TE__AT
#define TE__AT(field) list[n++] = &c->args.cross.field;
    TE__CROSS_FIELDS(TE__AT, TE__UNCOUNTED)
#undef TE__AT
#define TE__AT(field) list[n++] = &c->rotary.field;
    TE__ROTARY_FIELDS(TE__AT, TE__UNCOUNTED)
#undef TE__AT
#define TE__AT(field) list[n++] = &c->rotary_key.field;
    TE__ROTARY_FIELDS(TE__AT, TE__UNCOUNTED)
#undef TE__AT
    for (i = 0; i < TE_SCORE_MOD_AUX; i++) list[n++] = &c->score_mod.aux[i];
}

/* Copies a call and the structs that its args point to. te__call_point then makes the copied args point to the
 * copies. */
static void te__call_take(te__module_call *c, const te_forward_args *args) {
    c->args = *args;
    if (args->rotary) c->rotary = *args->rotary;
    if (args->rotary_key) c->rotary_key = *args->rotary_key;
    if (args->attention.score_mod) c->score_mod = *args->attention.score_mod;
}
static void te__call_point(te__module_call *c) {
    if (c->args.rotary) c->args.rotary = &c->rotary;
    if (c->args.rotary_key) c->args.rotary_key = &c->rotary_key;
    if (c->args.attention.score_mod) c->args.attention.score_mod = &c->score_mod;
}

static te_result te__class_forward(te_module *m, te_forward_args *args, void *user) {
    (void)user;
    return m->cls->forward(m, args);
}
static te_result te__module_call_run(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs,
                                     te_tensor **outputs, int num_outputs) {
    te__module_call *c = (te__module_call *)user, call = *c;
    te_tensor *made[TE__OUTPUTS], **of_call[TE__FORWARD_TENSORS];
    te_result result;
    int i, at = 0;
    (void)num_inputs;
    te__call_tensors(&call, of_call);
    for (i = 0; i < TE__FORWARD_TENSORS; i++)
        if (*of_call[i]) *of_call[i] = inputs[at++];
    te__call_point(&call);
    if (num_outputs) call.args.padded_m_splits = NULL; /* num_outputs is not 0 if this run repeats the forward pass
                                                        * during the backward pass. Then the memory of the caller's
                                                        * padded_m_splits may be gone. */
    result = te__module_run_as(c->m, &call.args, c->of_class ? te__class_forward : NULL, NULL);
    if (result != TE_OK) return result;
    te__outputs_list(&call.args.outputs, made);
    for (i = 0, c->num_outputs = 0; i < TE__OUTPUTS; i++) {
        if (num_outputs && (made[i] != NULL) != c->made[i])
            return te__fail(te, TE_ERR_STATE,
                            "te_module_set_checkpoint: run again for the backward pass, \"%s\" made %s; in the forward "
                            "pass it did%s. It must do the same each time",
                            c->m->name, te__output_names[i], c->made[i] ? "" : " not");
        c->made[i] = made[i] != NULL;
        if (made[i]) outputs[c->num_outputs++] = made[i];
    }
    return TE_OK;
}

static te_result te__module_run_checkpointed(te_module *m, te_forward_args *args, bool of_class) {
    te__module_call call = TE_ZERO;
    te_checkpoint_desc d = TE_ZERO;
    te_tensor *in[TE__FORWARD_TENSORS], **of_call[TE__FORWARD_TENSORS], *out[TE__OUTPUTS], *list[TE__OUTPUTS];
    te_result result;
    int i, at = 0;
    call.m = m;
    call.of_class = of_class;
    te__call_take(&call, args);
    te__call_tensors(&call, of_call);
    for (i = 0; i < TE__FORWARD_TENSORS; i++)
        if (*of_call[i]) in[d.num_inputs++] = *of_call[i];
    d.fn = te__module_call_run;
    d.user = &call;
    d.user_size = sizeof(call);
    d.inputs = in;
    d.outputs = out;
    memset(&args->outputs, 0, sizeof(args->outputs));
    result = te__checkpoint_run(m->te, &d, m, &call.num_outputs);
    if (result != TE_OK) return result;
    for (i = 0; i < TE__OUTPUTS; i++) list[i] = call.made[i] ? out[at++] : NULL;
    args->outputs = te__outputs_of(list);
    return TE_OK;
}

TE_API void te_module_set_checkpoint(te_module *m, bool on) {
    if (m) m->checkpoint = on;
}

/* Returns true if this call can launch the module's graphs. Otherwise the module runs without them. */
static bool te__runs_graphs(const te_module *m) {
    const te_ctx *te = m->te;
    return m->graphed && !m->evaluating && te_grad_enabled(te) && !te->capture && !te->warming &&
           !te__quant_of(te)->replaying && !te__quant_of(te)->recording;
}

/* Ends a te_forward_with. After a failure of an outermost one, other ranks may wait for its collectives. */
static void te__forward_ends(te_module *m, te_result result) {
    const te__modules_state *modules = te__modules_of(m->te);
    if (modules->called && modules->calls == 0 && m->te->tape.plays == 0) modules->called(m, result);
}

TE_API te_tensor *te_forward_with(te_module *m, te_forward_args *args) {
    te__rng_state random;
    te_ctx *te;
    te_result result;
    te_tensor *first = args ? args->input : NULL;
    bool entered, shape;
    te__modules_state *modules;
    if (m && m->takes_packed && args && !first) first = args->attention.qkv_layer;
    if (args) memset(&args->outputs, 0, sizeof(args->outputs)); /* clears the outputs of an earlier call */
    te = m ? m->te : first ? first->te : NULL;
    if (!m || !first) { /* NULL follows from an error that is recorded already */
        te__no_tensor(te, TE_ERR_STATE, "te_forward_with: %s is NULL",
                      !m     ? "the module"
                      : args ? "the input"
                             : "args");
        if (m) te__forward_ends(m, te_error_code(te));
        return NULL;
    }
    modules = te__modules_of(te);
    random = te__rng_now(te);
    if (!te__same_ctx(first, te, m->name) || te__device_enter(te, &entered) != TE_OK) {
        te__forward_ends(m, te_error_code(te));
        return NULL;
    }
    if (modules->calls++ == 0) te->root = te__root_of(m);
    shape = te__is_unallocated(first);
    if (te__runs_graphs(m) && !shape)
        result = te__tree_whole(m) == TE_OK ? m->run_graphs(m, args) : TE_ERR_STATE;
    else
        result = m->checkpoint && te_grad_enabled(te) && !shape ? te__module_run_checkpointed(m, args, false)
                                                                : te__module_run(m, args);
    te__device_leave(te, entered);
    if (--modules->calls == 0) te->root = NULL;
    te__forward_ends(m, result);
    if (result == TE_OK) return args->outputs.out;
    memset(&args->outputs, 0, sizeof(args->outputs));
    te__step_fails(te);
    te__rng_back(te, random);
    return NULL;
}
TE_API te_tensor *te_forward(te_module *m, te_tensor *x) {
    te_forward_args args = TE_ZERO;
    args.input = x;
    return te_forward_with(m, &args);
}
/* Ends the forward function of a class. Stores y as the output `out`, or returns the error if y is NULL. */
static te_result te__output(te_module *m, te_forward_args *args, te_tensor *y) {
    if (!y) return te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
    args->outputs.out = y;
    return TE_OK;
}

/* ---- deferred weight gradients ---- */

TE_API te_result te_backward_dw(te_module *m) {
    te_ctx *te;
    te_result result;
    bool entered;
    int fresh;
    if (!m) return TE_ERR_STATE;
    te = m->te;
    result = te->error_code != TE_OK ? te->error_code : te__device_enter(te, &entered);
    if (result != TE_OK) return te__tell_backward_ends(te, m, result);
    fresh = te->tape.num_fresh;
    te->tape.no_grad++;
    result = te__deferred_take(te, te__scaling_below, m, true);
    if (result == TE_OK) result = te->error_code;
    result = te__leaves_own(te, fresh, result);
    te->tape.no_grad--;
    result = te__tell_backward_ends(te, m, result);
    te__device_leave(te, entered);
    return result;
}
