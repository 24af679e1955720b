/* nn/forward.c: a module runs: its path for messages, a frame for its temporaries, its checkpoint. Knows the module tree; must not know what any
 * class computes. */

TE_API te_module_forward_fn te_module_set_forward(te_module *m, te_module_forward_fn forward) {
    te_module_forward_fn old = m ? m->own_forward : NULL;
    if (m) m->own_forward = forward;
    return old;
}

/* Temporaries of a forward go when it returns: what the backward needs is kept by the tape. */
static te_result te__module_run(te_module *m, te_forward_args *args) {
    te_ctx *te = m->te;
    char before[sizeof(te->module_path)];
    te_result result;
    te__path *path;
    memcpy(before, te->module_path, sizeof(before));
    te_module_path(m, te->module_path, sizeof(te->module_path));
    path = te->path;
    te->path = NULL;
    args->num_outputs = 0;
    memset(args->outputs, 0, sizeof(args->outputs));
    te__frame_begin(te);
    result = m->own_forward ? m->own_forward(m, args) : m->cls->forward(m, args);
    if (result == TE_OK && (args->num_outputs < 1 || !args->outputs[0])) {
        /* the class said OK and made nothing: an error is recorded already, or this is the class's own mistake */
        if (te->error_code == TE_OK) te__fail(te, TE_ERR_STATE, "%s: forward returned TE_OK without an output", m->cls->name);
        result = te->error_code;
    }
    if (result != TE_OK) te__fail(te, result, "%s: forward returned %s", m->cls->name, te_result_name(result)); /* if it has not said more */
    te__frame_end(te, args->outputs, result == TE_OK ? args->num_outputs : 0);
    memcpy(te->module_path, before, sizeof(before));
    te__path_release(te, te->path);
    te->path = path;
    return result;
}

/* ---- checkpoints ---- */

/* A module's call as a checkpointed function. Its inputs are the tensors of the call that are there, in this order. */
enum { TE__FORWARD_TENSORS = 5 };
typedef struct te__module_call {
    te_module *m;
    te_forward_args args;
    te_rotary_desc rotary; /* where args.rotary points, if the call has one */
    int num_outputs;       /* of the last run */
} te__module_call;
static te_tensor **te__call_tensor(te__module_call *c, int i) {
    te_tensor **list[TE__FORWARD_TENSORS];
    list[0] = &c->args.input;
    list[1] = &c->args.encoder_output;
    list[2] = &c->args.key;
    list[3] = &c->args.value;
    list[4] = &c->rotary.start_positions;
    return list[i];
}

static te_result te__module_call_run(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs, te_tensor **outputs, int num_outputs) {
    te__module_call *c = (te__module_call *)user, call = *c;
    te_result result;
    int i, at = 0;
    (void)num_inputs;
    for (i = 0; i < TE__FORWARD_TENSORS; i++)
        if (*te__call_tensor(&call, i)) *te__call_tensor(&call, i) = inputs[at++];
    if (c->args.rotary) call.args.rotary = &call.rotary;
    result = te__module_run(c->m, &call.args);
    if (result != TE_OK) return result;
    if (num_outputs && call.args.num_outputs != num_outputs)
        return te__fail(te, TE_ERR_STATE, "te_module_set_checkpoint: run again for the backward pass, \"%s\" made %d outputs; in the forward pass it was %d. It must do the same each "
                                          "time", c->m->name, call.args.num_outputs, num_outputs);
    c->num_outputs = call.args.num_outputs;
    for (i = 0; i < c->num_outputs; i++) outputs[i] = call.args.outputs[i];
    return TE_OK;
}

static te_result te__module_run_checkpointed(te_module *m, te_forward_args *args) {
    te__module_call call = TE_ZERO;
    te_checkpoint_desc d = TE_ZERO;
    te_tensor *in[TE__FORWARD_TENSORS];
    te_result result;
    int i;
    call.m = m;
    call.args = *args;
    if (args->rotary) call.rotary = *args->rotary;
    for (i = 0; i < TE__FORWARD_TENSORS; i++)
        if (*te__call_tensor(&call, i)) in[d.num_inputs++] = *te__call_tensor(&call, i);
    d.fn = te__module_call_run;
    d.user = &call;
    d.user_size = sizeof(call);
    d.inputs = in;
    d.outputs = args->outputs;
    args->num_outputs = 0;
    memset(args->outputs, 0, sizeof(args->outputs));
    result = te__checkpoint_run(m->te, &d, m, &call.num_outputs);
    if (result == TE_OK) args->num_outputs = call.num_outputs;
    return result;
}

TE_API void te_module_set_checkpoint(te_module *m, bool on) {
    if (m) m->checkpoint = on;
}

TE_API te_tensor *te_forward_with(te_module *m, te_forward_args *args) {
    te__rng_state random;
    te_ctx *te;
    te_result result;
    bool entered;
    if (!m || !args || !args->input) return NULL;
    te = m->te;
    random = te__rng_now(te);
    if (!te__same_ctx(args->input, te, m->name) || te__device_enter(te, &entered) != TE_OK) return NULL;
    result = m->checkpoint && te_grad_enabled(te) ? te__module_run_checkpointed(m, args) : te__module_run(m, args);
    te__device_leave(te, entered);
    if (result == TE_OK) return args->outputs[0];
    memset(args->outputs, 0, sizeof(args->outputs));
    args->num_outputs = 0;
    te__step_fails(te);
    te__rng_back(te, random);
    return NULL;
}
TE_API te_tensor *te_forward(te_module *m, te_tensor *x) {
    te_forward_args args = TE_ZERO;
    args.input = x;
    return te_forward_with(m, &args);
}
/* What a class's forward calls at its end. */
static te_result te__output(te_module *m, te_forward_args *args, te_tensor *y) {
    if (!y) return te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
    if (args->num_outputs == TE_MAX_OUTPUTS) return te__fail(m->te, TE_ERR_INVALID, "more than %d outputs", TE_MAX_OUTPUTS);
    args->outputs[args->num_outputs++] = y;
    return TE_OK;
}
