/* train/scaler.c: loss scaling that adapts to the range of the gradients, as in torch.amp.GradScaler. This file must
 * not depend on the arithmetic of any optimizer. */

struct te_grad_scaler {
    te_ctx *te;
    te_grad_scaler_desc desc; /* defaults filled in */
    te_tensor *scale, *inv_scale, *growth_tracker; /* f32 [1] */
    te_tensor *any_inf; /* f32 [1]: number of steps with an overflow since the last te_grad_scaler_update */
};

static te_result te__scaler_desc_ok(te_ctx *te, const te_grad_scaler_desc *d) {
    if (d->init_scale > 0.0f && d->init_scale <= FLT_MAX && d->growth_factor > 1.0f && d->growth_factor <= FLT_MAX &&
        d->backoff_factor > 0.0f && d->backoff_factor < 1.0f && d->growth_interval > 0)
        return TE_OK;
    return te__fail(
        te, TE_ERR_INVALID,
        "te_grad_scaler_create: init_scale %g, growth_factor %g, backoff_factor %g, growth_interval %d; a scale "
        "above 0, a growth above 1, a backoff between 0 and 1 and "
        "an interval of at least 1 are needed, or 0 for the defaults",
        (double)d->init_scale, (double)d->growth_factor, (double)d->backoff_factor, d->growth_interval);
}

TE_API void te_grad_scaler_destroy(te_grad_scaler *s) {
    if (!s || te__refuse_hook(s->te, "te_grad_scaler_destroy") != TE_OK) return;
    te_tensor_release(s->scale);
    te_tensor_release(s->inv_scale);
    te_tensor_release(s->growth_tracker);
    te_tensor_release(s->any_inf);
    te__free(s->te, s);
}
TE_API te_grad_scaler *te_grad_scaler_create(te_ctx *te, const te_grad_scaler_desc *desc) {
    te_grad_scaler_desc d = TE_ZERO;
    te_grad_scaler *s;
    const int64_t one = 1;
    if (!te) return NULL;
    if (desc) d = *desc;
    if (d.init_scale == 0.0f) d.init_scale = 65536.0f;
    if (d.growth_factor == 0.0f) d.growth_factor = 2.0f;
    if (d.backoff_factor == 0.0f) d.backoff_factor = 0.5f;
    if (d.growth_interval == 0) d.growth_interval = 2000;
    if (te__scaler_desc_ok(te, &d) != TE_OK) return NULL;
    if (te->capture) {
        te__refuse_capture(te, "te_grad_scaler_create", "make it before te_graph_begin");
        return NULL;
    }
    s = (te_grad_scaler *)te__alloc_zero(te, sizeof(te_grad_scaler));
    if (!s) return NULL;
    s->te = te;
    s->desc = d;
    te__frame_begin(te);
    s->scale = te_tensor_retain(te_tensor_full(te, TE_F32, 1, &one, (double)d.init_scale));
    s->inv_scale = te_tensor_retain(te_tensor_full(te, TE_F32, 1, &one, 1.0 / (double)d.init_scale));
    s->growth_tracker = te_tensor_retain(te_tensor_zeros(te, TE_F32, 1, &one));
    s->any_inf = te_tensor_retain(te_tensor_zeros(te, TE_F32, 1, &one));
    te__frame_end(te, NULL, 0);
    if (s->scale && s->inv_scale && s->growth_tracker && s->any_inf) return s;
    te_grad_scaler_destroy(s);
    return NULL;
}

/* Returns x * scale. In the forward pass x is the loss. In the backward pass x is the gradient of the scaled loss. */
static te_tensor *te__times(const te_tensor *x, const te_tensor *scale) {
    te_tensor *y = te__empty_like(x, x->dtype);
    return y ? te__checked(y, te__times_into(y, x, scale)) : NULL;
}
static te_result te__scaled_loss_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                          te_tensor **dx, const bool *needs) {
    te_tensor *g = te_tensor_contiguous(dy[0]);
    (void)state, (void)needs;
    dx[0] = g ? te__times(g, saved[0]) : NULL;
    return dx[0] ? TE_OK : te_error_code(te);
}
TE_API te_tensor *te_grad_scaler_scale(te_grad_scaler *s, te_tensor *loss) {
    if (!s || !loss || !te__same_ctx(loss, s->te, "te_grad_scaler_scale") ||
        !te__need_float(loss, "te_grad_scaler_scale"))
        return NULL;
    if (s->desc.disabled) return loss;
    loss = te_tensor_contiguous(loss);
    return loss ? te__record("scaled_loss", te__times(loss, s->scale), te__scaled_loss_backward, NULL, 0, &loss, 1,
                             &s->scale, 1)
                : NULL;
}

/* Checks that s and opt belong to the same context, and that the context has no error. */
static te_result te__scaler_ready(const te_grad_scaler *s, const te_optimizer *opt, const char *function) {
    if (!s || !opt) return TE_ERR_STATE;
    if (s->te->error_code != TE_OK) return s->te->error_code;
    if (s->te == opt->te) return TE_OK;
    return te__fail(s->te, TE_ERR_INVALID, "%s: the optimizer belongs to another context (%s) than the scaler (%s)",
                    function, opt->te->device_name, s->te->device_name);
}

static te_result te__scaler_unscale(te_grad_scaler *s, te_optimizer *opt) {
    te_op_multi_scale_args args = TE_ZERO;
    te_result result = te__skips_open(opt);
    int n = 0, i;
    if (result == TE_OK) result = te__skips_count(opt, NULL, false);
    for (i = 0; i < opt->num_params && result == TE_OK; i++) {
        te_tensor *grad;
        result = te__opt_grad(opt, &opt->params[i], &grad);
        if (result != TE_OK || !grad) continue;
        if (grad->dtype == TE_F16)
            return te__fail(s->te, TE_ERR_DTYPE,
                            "te_grad_scaler_unscale: the gradient of %s is f16, in which it may vanish without the "
                            "scale; te_grad_scaler_step unscales inside of the step: "
                            "leave this call out, or train parameters in f32",
                            opt->params[i].path);
        opt->grads[n++] = grad;
    }
    args.in = opt->grads;
    args.out = (te_tensor *const *)opt->grads;
    args.num_tensors = n;
    args.scale = 1.0f;
    args.scale_device = s->inv_scale;
    args.found_inf = opt->skips.found;
    if (result == TE_OK) result = te_op_multi_scale(s->te, &args);
    return opt->spreads ? te__spread_max(opt->skips.found, te__opt_kinds(opt), opt->num_params, result) : result;
}
TE_API te_result te_grad_scaler_unscale(te_grad_scaler *s, te_optimizer *opt) {
    te_result result = te__scaler_ready(s, opt, "te_grad_scaler_unscale");
    bool entered;
    if (result != TE_OK || s->desc.disabled) return result;
    if (opt->skips.unscaled)
        return te__fail(s->te, TE_ERR_STATE,
                        "te_grad_scaler_unscale: this optimizer's gradients are unscaled already; call it once between "
                        "te_backward and te_grad_scaler_step");
    result = te__device_enter(s->te, &entered);
    if (result != TE_OK) return result;
    te__frame_begin(s->te);
    result = te__scaler_unscale(s, opt);
    te__frame_end(s->te, NULL, 0);
    te__device_leave(s->te, entered);
    opt->skips.unscaled = result == TE_OK;
    opt->skips.unscaled_in = s->te->capture;
    return result;
}
TE_API te_result te_grad_scaler_step(te_grad_scaler *s, te_optimizer *opt) {
    te_result result = te__scaler_ready(s, opt, "te_grad_scaler_step");
    te__opt_scaling scaling;
    if (result != TE_OK) return result;
    scaling.inv_scale = opt->skips.unscaled ? NULL : s->inv_scale;
    scaling.any_inf = s->any_inf;
    return te__opt_step_with(opt, s->desc.disabled ? NULL : &scaling);
}
TE_API te_result te_grad_scaler_update(te_grad_scaler *s) {
    te_op_update_scale_args args = TE_ZERO;
    if (!s) return TE_ERR_STATE;
    /* Nothing is updated after an error, because the program repeats the step and this call. */
    if (s->desc.disabled || s->te->error_code != TE_OK) return s->te->error_code;
    args.scale = s->scale;
    args.inv_scale = s->inv_scale;
    args.growth_tracker = s->growth_tracker;
    args.found_inf = s->any_inf;
    args.growth_factor = s->desc.growth_factor;
    args.backoff_factor = s->desc.backoff_factor;
    args.growth_interval = s->desc.growth_interval;
    return te_op_update_scale(s->te, &args);
}

TE_API te_tensor *te_grad_scaler_get_scale(const te_grad_scaler *s) { return s ? s->scale : NULL; }
TE_API te_grad_scaler_state te_grad_scaler_get_state(const te_grad_scaler *s) {
    te_grad_scaler_state state = TE_ZERO;
    float tracker = 0.0f;
    if (!s || te_tensor_to_host(s->scale, &state.scale) != TE_OK ||
        te_tensor_to_host(s->growth_tracker, &tracker) != TE_OK)
        return state;
    state.growth_tracker = (int)tracker;
    return state;
}
TE_API te_result te_grad_scaler_set_state(te_grad_scaler *s, te_grad_scaler_state state) {
    te_result result;
    if (!s) return TE_ERR_STATE;
    if (!(state.scale > 0.0f && state.scale <= FLT_MAX) || state.growth_tracker < 0)
        return te__fail(s->te, TE_ERR_INVALID,
                        "te_grad_scaler_set_state: scale %g and growth_tracker %d; a scale above 0 and a tracker of at "
                        "least 0 are needed",
                        (double)state.scale, state.growth_tracker);
    result = te_tensor_fill(s->scale, (double)state.scale);
    if (result == TE_OK) result = te_tensor_fill(s->inv_scale, 1.0 / (double)state.scale);
    if (result == TE_OK) result = te_tensor_fill(s->growth_tracker, (double)state.growth_tracker);
    return result;
}
