/* modules/forward.c: a module runs: its path for messages, a frame for its temporaries, its checkpoint. Knows the module
 * tree; must not know what any class computes. */

TE_API te_module_forward_fn te_module_set_forward(te_module *m, te_module_forward_fn forward) {
    te_module_forward_fn old = m ? m->own_forward : NULL;
    if (m) m->own_forward = forward;
    return old;
}

/* The outputs as a list, for code that treats all of them alike. */
enum { TE__OUTPUTS = 7 };
static void te__outputs_list(const te_outputs *y, te_tensor *list[TE__OUTPUTS]) {
    list[0] = y->out;
    list[1] = y->bias;
    list[2] = y->ln_out;
    list[3] = y->max_logit;
    list[4] = y->m_splits;
    list[5] = y->topk_indices;
    list[6] = y->aux_loss;
}
static te_outputs te__outputs_of(te_tensor *const list[TE__OUTPUTS]) {
    te_outputs y;
    y.out = list[0];
    y.bias = list[1];
    y.ln_out = list[2];
    y.max_logit = list[3];
    y.m_splits = list[4];
    y.topk_indices = list[5];
    y.aux_loss = list[6];
    return y;
}

/* Does m read fp8_output and fp8_grad, if the call sets them? */
static bool te__codes_ok(const te_module *m, const te_forward_args *args) {
    bool output = args->fp8_output && !m->has_fp8_output, grad = args->fp8_grad && !m->has_fp8_grad;
    if (!output && !grad) return true;
    te__fail(m->te, TE_ERR_UNSUPPORTED,
             "%s: %s: this module's %s stays in high precision; Linear and LayerNormLinear quantize both, if told: "
             "leave it false",
             m->cls->name, output ? "fp8_output" : "fp8_grad", output ? "output" : "input's gradient");
    return false;
}

/* Runs `forward`, or if it is NULL the module's own. The frame releases the temporaries of a forward; the tape retains
 * those that the backward pass reads. */
static te_result te__module_run_as(te_module *m, te_forward_args *args,
                                   te_result (*forward)(te_module *m, te_forward_args *args, void *user), void *user) {
    te_ctx *te = m->te;
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
    result = te__returned(te,
                          forward          ? forward(m, args, user)
                          : m->own_forward ? m->own_forward(m, args)
                                           : m->cls->forward(m, args),
                          m->cls->name, NULL);
    if (result == TE_OK && !args->outputs.out) {
        /* an error was recorded before and the class did not look at it, or the class is wrong */
        if (te->error_code == TE_OK)
            te__fail(te, TE_ERR_STATE, "%s: forward returned TE_OK without an output", m->cls->name);
        result = te->error_code;
    }
    /* shows if the class recorded no error of its own */
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

/* A module's call as a checkpointed function. Its inputs are the tensors that the call gives, in the order of
 * te__call_tensor. */
enum { TE__FORWARD_TENSORS = 27 + TE_SCORE_MOD_AUX };
typedef struct te__module_call {
    te_module *m;
    te_forward_args args;
    te_rotary_desc rotary, rotary_key; /* where those of args point, if the call has them */
    te_score_mod score_mod;            /* likewise */
    bool of_class;          /* te_module_set_forward's function is running already: run the class's */
    int num_outputs;        /* of the last run */
    bool made[TE__OUTPUTS]; /* the outputs that it made */
} te__module_call;
static te_tensor **te__call_tensor(te__module_call *c, int i) {
    te_attention_call *a = &c->args.attention;
    te_tensor **list[TE__FORWARD_TENSORS];
    if (i >= TE__FORWARD_TENSORS - TE_SCORE_MOD_AUX)
        return &c->score_mod.aux[i - (TE__FORWARD_TENSORS - TE_SCORE_MOD_AUX)];
    list[0] = &c->args.input;
    list[1] = &c->args.encoder_output;
    list[2] = &c->args.key;
    list[3] = &c->args.value;
    list[4] = &c->rotary.start_positions;
    list[5] = &c->rotary_key.start_positions;
    list[6] = &c->args.m_splits_tensor;
    list[7] = &a->attention_mask;
    list[8] = &a->attention_mask_q;
    list[9] = &a->cu_seqlens_q;
    list[10] = &a->cu_seqlens_kv;
    list[11] = &a->cu_seqlens_q_padded;
    list[12] = &a->cu_seqlens_kv_padded;
    list[13] = &a->core_attention_bias;
    list[14] = &a->alibi_slopes;
    list[15] = &a->qkv_layer;
    list[16] = &a->kv_layer;
    list[17] = &c->args.cross.enc_dec_attn_mask;
    list[18] = &c->args.cross.enc_dec_attn_mask_q;
    list[19] = &c->rotary.cu_seqlens;
    list[20] = &c->rotary_key.cu_seqlens;
    list[21] = &c->rotary.positions;
    list[22] = &c->rotary_key.positions;
    list[23] = &c->args.topk_weights;
    list[24] = &c->args.topk_indices;
    list[25] = &c->rotary.freqs;
    list[26] = &c->rotary_key.freqs;
    return list[i];
}

static te_result te__class_forward(te_module *m, te_forward_args *args, void *user) {
    (void)user;
    return m->cls->forward(m, args);
}
static te_result te__module_call_run(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs,
                                     te_tensor **outputs, int num_outputs) {
    static const char *const names[TE__OUTPUTS] = {"out",      "bias",         "ln_out",  "max_logit",
                                                   "m_splits", "topk_indices", "aux_loss"};
    te__module_call *c = (te__module_call *)user, call = *c;
    te_tensor *made[TE__OUTPUTS];
    te_result result;
    int i, at = 0;
    (void)num_inputs;
    for (i = 0; i < TE__FORWARD_TENSORS; i++)
        if (*te__call_tensor(&call, i)) *te__call_tensor(&call, i) = inputs[at++];
    if (c->args.rotary) call.args.rotary = &call.rotary;
    if (c->args.rotary_key) call.args.rotary_key = &call.rotary_key;
    if (c->args.attention.score_mod) call.args.attention.score_mod = &call.score_mod;
    if (num_outputs) call.args.padded_m_splits = NULL; /* written in the forward pass; by the backward pass the caller's
                                                        * memory may be gone */
    result = te__module_run_as(c->m, &call.args, c->of_class ? te__class_forward : NULL, NULL);
    if (result != TE_OK) return result;
    te__outputs_list(&call.args.outputs, made);
    for (i = 0, c->num_outputs = 0; i < TE__OUTPUTS; i++) {
        if (num_outputs && (made[i] != NULL) != c->made[i])
            return te__fail(te, TE_ERR_STATE,
                            "te_module_set_checkpoint: run again for the backward pass, \"%s\" made %s; in the forward "
                            "pass it did%s. It must do the same each time",
                            c->m->name, names[i], c->made[i] ? "" : " not");
        c->made[i] = made[i] != NULL;
        if (made[i]) outputs[c->num_outputs++] = made[i];
    }
    return TE_OK;
}

static te_result te__module_run_checkpointed(te_module *m, te_forward_args *args, bool of_class) {
    te__module_call call = TE_ZERO;
    te_checkpoint_desc d = TE_ZERO;
    te_tensor *in[TE__FORWARD_TENSORS], *out[TE__OUTPUTS], *list[TE__OUTPUTS];
    te_result result;
    int i, at = 0;
    call.m = m;
    call.of_class = of_class;
    call.args = *args;
    if (args->rotary) call.rotary = *args->rotary;
    if (args->rotary_key) call.rotary_key = *args->rotary_key;
    if (args->attention.score_mod) call.score_mod = *args->attention.score_mod;
    for (i = 0; i < TE__FORWARD_TENSORS; i++)
        if (*te__call_tensor(&call, i)) in[d.num_inputs++] = *te__call_tensor(&call, i);
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

/* Can this call be its graphs'? Elsewhere the module runs as usual. */
static bool te__runs_graphs(const te_module *m) {
    const te_ctx *te = m->te;
    return m->graphed && !m->evaluating && te_grad_enabled(te) && !te->capture && !te->warming && !te__quant_of(te)->replaying &&
           !te__quant_of(te)->recording;
}

TE_API te_tensor *te_forward_with(te_module *m, te_forward_args *args) {
    te__rng_state random;
    te_ctx *te;
    te_result result;
    te_tensor *first = args ? args->input : NULL;
    bool entered, shape;
    if (m && m->takes_packed && args && !first) first = args->attention.qkv_layer;
    if (args) memset(&args->outputs, 0, sizeof(args->outputs)); /* not those of an earlier call */
    te = m ? m->te : first ? first->te : NULL;
    if (!m || !first) { /* after an error, a consequence */
        te__fail(te, TE_ERR_STATE, "te_forward_with: %s is NULL", !m ? "the module" : args ? "the input" : "args");
        return NULL;
    }
    random = te__rng_now(te);
    if (!te__same_ctx(first, te, m->name) || te__device_enter(te, &entered) != TE_OK) return NULL;
    shape = te__is_unallocated(first);
    if (te__runs_graphs(m) && !shape)
        result = te__tree_whole(m) == TE_OK ? m->run_graphs(m, args) : TE_ERR_STATE;
    else
        result = m->checkpoint && te_grad_enabled(te) && !shape ? te__module_run_checkpointed(m, args, false)
                                                                : te__module_run(m, args);
    te__device_leave(te, entered);
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
/* A class's forward ends with this: y becomes its output `out`. */
static te_result te__output(te_module *m, te_forward_args *args, te_tensor *y) {
    if (!y) return te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
    args->outputs.out = y;
    return TE_OK;
}

/* ---- weight gradients that were left for later ---- */

TE_API te_result te_backward_dw(te_module *m) {
    te_ctx *te;
    te_result result;
    bool entered;
    int fresh;
    if (!m) return TE_ERR_STATE;
    te = m->te;
    if (te->error_code != TE_OK) return te->error_code;
    result = te__device_enter(te, &entered);
    if (result != TE_OK) return result;
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
