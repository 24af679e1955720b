/* modules/recompute.c: activation checkpointing. One node records a whole function, and te_backward runs the function
 * again with recording. This file must not depend on what the function computes. */

typedef struct te__checkpoint_state {
    te_checkpoint_fn fn;
    void *user;
    size_t user_size; /* size in bytes of the node's copy of `user`; 0 if there is no copy and `user` belongs to the
                       * caller */
    te_module *module; /* held, or NULL */
    te__snapshot *snapshot;
    te_group *group; /* if not NULL, each rank of the group saves only its part of the first input, in saved[0] */
    te__like whole;  /* the whole first input */
    int num_inputs, num_outputs; /* if the function is a module, num_outputs is 0 until the first run sets it */
    te__like output[TE_MAX_CHECKPOINT_OUTPUTS];
} te__checkpoint_state;

static void te__checkpoint_release(te_ctx *te, void *state) {
    te__checkpoint_state *s = (te__checkpoint_state *)state;
    if (s->user_size) te__free(te, s->user);
    te__snapshot_free(te, s->snapshot);
    te__module_unhold(s->module);
}

/* The number of open regions of each kind. */
typedef struct te__regions {
    int scopes, no_grad, grad_regions, autocast;
} te__regions;
static te__regions te__regions_now(const te_ctx *te) {
    te__regions r;
    r.scopes = te->num_scopes;
    r.no_grad = te->tape.no_grad;
    r.grad_regions = te->tape.num_grad_regions;
    r.autocast = te__quant_of(te)->num_autocast;
    return r;
}
/* Restores the numbers of open regions to those in *r. Returns the name of a kind of region that differed, or NULL.
 * Tensors of a scope that ended too early stay lost. */
static const char *te__regions_back(te_ctx *te, const te__regions *r) {
    const char *what = te->num_scopes != r->scopes       ? "te_scope"
                       : te__quant_of(te)->num_autocast != r->autocast ? "te_autocast"
                       : te->tape.num_grad_regions != r->grad_regions || te->tape.no_grad != r->no_grad
                           ? "te_no_grad or te_enable_grad"
                           : NULL;
    while (te->num_scopes > r->scopes) te__frame_end(te, NULL, 0);
    while (te->num_scopes < r->scopes) te__frame_begin(te);
    te__quant_of(te)->num_autocast = r->autocast;
    te->tape.num_grad_regions = r->grad_regions;
    te->tape.no_grad = r->no_grad;
    return what;
}

/* Runs the function. Fails if an output is missing, or if the function begins and ends regions (such as te_scope)
 * unequally often. */
static te_result te__checkpoint_call(te_ctx *te, const te__checkpoint_state *s, te_tensor *const *inputs,
                                     te_tensor **outputs) {
    const te__regions regions = te__regions_now(te);
    const char *left;
    te_result result;
    int i;
    for (i = 0; i < s->num_outputs; i++) outputs[i] = NULL;
    result = te__returned(te, s->fn(te, s->user, inputs, s->num_inputs, outputs, s->num_outputs),
                          "te_checkpoint: the function", NULL);
    if (result == TE_OK) result = te->error_code;
    left = te__regions_back(te, &regions);
    if (left && result == TE_OK)
        result = te__fail(te, TE_ERR_STATE, "te_checkpoint: the function begins and ends regions of %s unequally often",
                          left);
    for (i = 0; i < s->num_outputs && result == TE_OK; i++)
        if (!outputs[i])
            result = te__fail(te, TE_ERR_STATE, "te_checkpoint: the function returned TE_OK without output %d of %d",
                              i + 1, s->num_outputs);
    /* if the function has recorded an error itself, te__fail keeps that error */
    if (result != TE_OK) te__fail(te, result, "te_checkpoint: the function returned %s", te_result_name(result));
    return result;
}

/* Checks that the outputs of the function's second run, in the backward pass, have the same dtypes and shapes as those
 * of its first run. */
static te_result te__checkpoint_same(te_ctx *te, const te__checkpoint_state *s, te_tensor *const *outputs) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int i;
    for (i = 0; i < s->num_outputs; i++) {
        const te__like *first = &s->output[i];
        if (outputs[i]->dtype != first->dtype || outputs[i]->ndim != first->ndim ||
            memcmp(outputs[i]->shape, first->shape, (size_t)first->ndim * sizeof(int64_t)) != 0)
            return te__fail(te, TE_ERR_STATE,
                            "te_checkpoint: run again for the backward pass, the function made %s %s of output %d; in "
                            "the forward pass it was %s %s. It must do "
                            "the same each time",
                            te_dtype_name(outputs[i]->dtype), te__shape_text(outputs[i], a), i + 1,
                            te_dtype_name(first->dtype), te__dims_text(first->ndim, first->shape, b));
    }
    return TE_OK;
}

/* Runs the function again on copies of the inputs, then runs the backward pass. If an input already has a gradient, the
 * copy of this input holds the gradient during the backward pass. So gradients are summed in the same order as without
 * a checkpoint. */
static te_result te__checkpoint_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                         te_tensor **dx, const bool *needs) {
    const te__checkpoint_state *s = (const te__checkpoint_state *)state;
    te__var *const *vars = te->playing->inputs;
    te_tensor *in[TE_MAX_CHECKPOINT_INPUTS], *out[TE_MAX_CHECKPOINT_OUTPUTS], *grad[TE_MAX_CHECKPOINT_OUTPUTS];
    bool moved[TE_MAX_CHECKPOINT_INPUTS] = {false};
    te__replay replay = TE_ZERO;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < s->num_inputs && result == TE_OK; i++) {
        in[i] = i == 0 && s->group ? te_tensor_view(te__gather(s->group, saved[0]), s->whole.ndim, s->whole.shape)
                                   : te_tensor_detach(saved[i]);
        if (saved[i] && !in[i]) result = te_error_code(te);
        if (in[i]) in[i]->requires_grad = false;
        if (!in[i] || !needs[i]) continue;
        te_tensor_set_requires_grad(in[i], true);
        if (!in[i]->var) result = TE_ERR_OUT_OF_MEMORY;
    }
    if (result == TE_OK) result = te__snapshot_replay(te, s->snapshot, &replay);
    if (result != TE_OK) return result;
    result = te__checkpoint_call(te, s, in, out);
    te__snapshot_replayed(te, s->snapshot, &replay);
    if (result == TE_OK) result = te__checkpoint_same(te, s, out);
    if (result != TE_OK) return result;
    for (i = 0; i < s->num_outputs; i++) grad[i] = out[i]->requires_grad && out[i]->var ? dy[i] : NULL;
    for (i = 0; i < s->num_inputs; i++)
        if (needs[i] && vars[i]->grad && !vars[i]->played && vars[i]->grad->buffer &&
            !(vars[i]->leaf && te__is_outside(vars[i]->grad->buffer))) {
            in[i]->var->grad = vars[i]->grad;
            vars[i]->grad = NULL;
            moved[i] = true;
        }
    result = te__backward_all(te, te->tape.segment, out, grad, s->num_outputs);
    for (i = 0; i < s->num_inputs; i++)
        if (moved[i] && !vars[i]->grad) { /* The gradient is moved back here and not returned in dx, because te_backward
                                           * drops gradients in dx on failure. */
            vars[i]->grad = in[i]->var->grad;
            in[i]->var->grad = NULL;
        } else if (needs[i] && result == TE_OK)
            dx[i] = in[i]->var->grad;
    return result;
}

/* Returns the snapshot that `node` restores before it runs its function again, or NULL if `node` is not a
 * checkpoint. */
static const te__snapshot *te__checkpoint_snapshot(const te__node *node) {
    return node->backward == te__checkpoint_backward ? ((const te__checkpoint_state *)node->state)->snapshot : NULL;
}

/* Returns the module whose forward the checkpoint `node` runs again, or NULL. */
static const te_module *te__checkpoint_module(const te__node *node) {
    return node && node->backward == te__checkpoint_backward ? ((const te__checkpoint_state *)node->state)->module
                                                             : NULL;
}

/* Copies this rank's part of x to a new tensor, so that x can be freed. */
static te_tensor *te__checkpoint_part(te_tensor *x, te_group *group) {
    int64_t n = te__numel(x), own = n / te__group_size(group);
    te_tensor *flat = te_tensor_view(te_tensor_contiguous(te_tensor_detach(x)), 1, &n),
              *part = flat ? te__empty_1d(x->te, x->dtype, own) : NULL;
    return part ? te__checked(part, te_tensor_copy(part, te_tensor_narrow(flat, 0, te__group_rank(group) * own, own)))
                : NULL;
}

/* Returns true if output i was created in the innermost scope and no earlier output is the same tensor. */
static bool te__checkpoint_made(const te_ctx *te, te_tensor *const *outputs, int i) {
    const int first = te->scopes[te__min(te->num_scopes, TE__MAX_SCOPES) - 1].first_tensor;
    int k;
    for (k = 0; k < i; k++)
        if (outputs[k] == outputs[i]) return false; /* the gradient of a tensor that is returned twice would be counted
                                                     * twice */
    for (k = te->num_live - 1; k >= first && te->live[k] != outputs[i]; k--) {}
    return k >= first;
}

/* Runs d->fn without recording, then records one node. If d->fn runs the forward of a module, `m` is this module, and
 * d->fn sets *num_outputs. */
static te_result te__checkpoint_run(te_ctx *te, const te_checkpoint_desc *d, te_module *m, const int *num_outputs) {
    te__checkpoint_state s = TE_ZERO;
    te_node_desc node = TE_ZERO;
    te_tensor *in[TE_MAX_CHECKPOINT_INPUTS], *saved[TE_MAX_CHECKPOINT_INPUTS];
    te_result result;
    int i;
    s.fn = d->fn;
    s.user = d->user;
    s.num_inputs = d->num_inputs;
    s.num_outputs = d->num_outputs;
    /* without gradients no backward pass runs it again */
    if (!te_grad_enabled(te)) return te__checkpoint_call(te, &s, d->inputs, d->outputs);
    te__frame_begin(te);
    s.snapshot = te__snapshot_begin(te, m);
    result = s.snapshot ? te__checkpoint_call(te, &s, d->inputs, d->outputs) : TE_ERR_OUT_OF_MEMORY;
    if (s.snapshot) te__snapshot_end(te, s.snapshot);
    if (m) s.num_outputs = *num_outputs;
    for (i = 0; i < s.num_outputs && result == TE_OK; i++) {
        te_tensor *y = d->outputs[i];
        /* if y is an input or a parameter, the output is a detached alias of y */
        if (y->var || !te__checkpoint_made(te, d->outputs, i)) d->outputs[i] = y = te_tensor_detach(y);
        if (!y) {
            result = te_error_code(te);
            break;
        }
        s.output[i] = te__like_of(y);
    }
    te__frame_end(te, d->outputs, result == TE_OK ? s.num_outputs : 0);
    if (result == TE_OK && d->user_size) { /* copies `user` as the first run has left it */
        s.user = te__alloc(te, d->user_size);
        if (s.user) memcpy(s.user, d->user, s.user_size = d->user_size);
        if (!s.user) result = TE_ERR_OUT_OF_MEMORY;
    }
    s.module = te__module_hold(m);
    if (result != TE_OK) {
        te__checkpoint_release(te, &s);
        return result;
    }
    for (i = 0; i < s.num_inputs; i++) in[i] = saved[i] = d->inputs[i];
    te__frame_begin(te);
    if (d->distribute_saved_activations && te__group_size(d->tp_group) > 1) {
        s.group = d->tp_group;
        s.whole = te__like_of(in[0]);
        saved[0] = te__checkpoint_part(in[0], s.group);
        if (!saved[0]) result = te_error_code(te);
    }
    node.name = "checkpoint";
    node.inputs = in;
    node.saved = saved;
    node.num_inputs = node.num_saved = s.num_inputs;
    node.outputs = d->outputs;
    node.num_outputs = s.num_outputs;
    node.state = &s;
    node.state_size = sizeof(s);
    node.backward = te__checkpoint_backward;
    node.release = te__checkpoint_release;
    if (result == TE_OK)
        result = te__record_always(te, &node, true);
    else
        te__checkpoint_release(te, &s);
    te__frame_end(te, NULL, 0);
    return result;
}

TE_API te_result te_checkpoint(te_ctx *te, const te_checkpoint_desc *d) {
    te_result result;
    int i;
    if (te_error_code(te) != TE_OK) return te_error_code(te);
    if (!d || !d->fn) return te__fail(te, TE_ERR_INVALID, "te_checkpoint: %s", d ? "fn is NULL" : "desc is NULL");
    if (d->num_inputs < 0 || d->num_inputs > TE_MAX_CHECKPOINT_INPUTS || (d->num_inputs && !d->inputs) ||
        d->num_outputs < 1 || d->num_outputs > TE_MAX_CHECKPOINT_OUTPUTS || !d->outputs)
        return te__fail(te, TE_ERR_INVALID,
                        "te_checkpoint: %d inputs and %d outputs; 0 to %d and 1 to %d are possible, each with its list",
                        d->num_inputs, d->num_outputs, TE_MAX_CHECKPOINT_INPUTS, TE_MAX_CHECKPOINT_OUTPUTS);
    if (d->user_size && !d->user)
        return te__fail(te, TE_ERR_INVALID, "te_checkpoint: user_size is %llu and user NULL",
                        (unsigned long long)d->user_size);
    for (i = 0; i < d->num_inputs; i++) {
        if (!d->inputs[i])
            return te__fail(te, TE_ERR_STATE, "te_checkpoint: input %d of %d is NULL", i + 1, d->num_inputs);
        if (!te__same_ctx(d->inputs[i], te, "te_checkpoint")) return TE_ERR_INVALID;
    }
    if (d->distribute_saved_activations) {
        const te_tensor *x = d->num_inputs ? d->inputs[0] : NULL;
        char text[TE__SHAPE_TEXT];
        if (!d->tp_group || !x || x->quantized || te__numel(x) % te__group_size(d->tp_group))
            return te__fail(te, TE_ERR_INVALID,
                            "te_checkpoint: distribute_saved_activations with tp_group %s of %d ranks and a first "
                            "input %s%s; a group is needed, and a plain tensor "
                            "whose elements its ranks divide",
                            d->tp_group ? "given," : "NULL,", te__group_size(d->tp_group),
                            x ? te__shape_text(x, text) : "that is not there", x && x->quantized ? ", quantized" : "");
        result = te__group_allowed(te, d->tp_group, "te_checkpoint", "tp_group");
        if (result != TE_OK) return result;
    }
    result = te__checkpoint_run(te, d, NULL, NULL);
    if (result != TE_OK)
        for (i = 0; i < d->num_outputs; i++) d->outputs[i] = NULL;
    return result;
}
