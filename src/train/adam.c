/* train/adam.c: the options of FusedAdam, and the one multi-tensor operation of a step. This file must not depend on
 * files on disk. */

static te_result te__adam_run(te_optimizer *opt, const te__opt_step *step) {
    const te_fused_adam_desc *d = &opt->desc.adam;
    te_adam_tensor *list = (te_adam_tensor *)opt->list;
    te_op_adam_args args = TE_ZERO;
    int i;
    for (i = 0; i < step->count; i++) {
        const te__opt_param *p = &opt->params[opt->order[i]];
        const te__opt_group *g = &opt->groups[p->group];
        te_adam_tensor *x = &list[i];
        const te__opt_state *master = te__opt_entry_master(p);
        x->grad = opt->grads[i];
        x->param = te__opt_entry_param(p);
        x->m = p->state[TE__OPT_FIRST].x;
        x->m_scale = p->state[TE__OPT_FIRST].scale;
        x->v = p->state[TE__OPT_SECOND].x;
        x->v_scale = p->state[TE__OPT_SECOND].scale;
        x->master = master->x;
        x->master_scale = master->scale;
        x->own_numbers = p->group > 0;
        x->place = p->group;
        x->numbers.lr = te__group_lr(opt, p->group);
        x->numbers.beta1 = g->beta1;
        x->numbers.beta2 = g->beta2;
        x->numbers.eps = g->eps;
        x->numbers.weight_decay = g->weight_decay;
    }
    args.tensors = list;
    args.num_tensors = step->count;
    args.num_undecayed = step->num_undecayed;
    args.lr = opt->options.lr;
    args.beta1 = d->beta1;
    args.beta2 = d->beta2;
    args.eps = d->eps;
    args.weight_decay = d->weight_decay;
    args.step = opt->steps + 1;
    args.no_adam_w_mode = d->no_adam_w_mode;
    args.no_bias_correction = d->no_bias_correction;
    args.grad_scale = step->grad_scale;
    args.found_inf = step->found_inf;
    args.lr_device = step->lr;
    args.bias_correction = step->numbers;
    return te_op_adam(opt->te, &args);
}
static const te__opt_class te__adam_class = {
    "te_fused_adam_create", {"exp_avg", "exp_avg_sq", "master_param"}, te__adam_run, true, NULL, true};

/* Checks the format of a state; TE_DTYPE_NONE means f32. */
static bool te__adam_format_ok(te_ctx *te, const char *name, te_dtype dtype, bool moment) {
    if (dtype == TE_DTYPE_NONE || dtype == TE_F32 || dtype == TE_F16 ||
        (moment && (dtype == TE_BF16 || dtype == TE_F8E4M3)))
        return true;
    return te__not_ok(te, TE_ERR_INVALID, "te_fused_adam_create: %s is %s; %s is possible", name, te_dtype_name(dtype),
                      moment ? "f32, f16, bf16 or e4m3" : "f32 or f16");
}
static bool te__adam_desc_ok(te_ctx *te, const te_fused_adam_desc *d) {
    const char *create = te__adam_class.create;
    if (!te__opt_in_range(te, create, "lr", d->lr, FLT_MAX) || !te__opt_in_range(te, create, "beta1", d->beta1, 1.0f) ||
        !te__opt_in_range(te, create, "beta2", d->beta2, 1.0f) ||
        !te__opt_in_range(te, create, "eps", d->eps, FLT_MAX) ||
        !te__opt_in_range(te, create, "weight_decay", d->weight_decay, FLT_MAX) ||
        !te__opt_in_range(te, create, "max_grad_norm", d->max_grad_norm, FLT_MAX) ||
        !te__adam_format_ok(te, "master_weight_dtype", d->master_weight_dtype, false) ||
        !te__adam_format_ok(te, "exp_avg_dtype", d->exp_avg_dtype, true) ||
        !te__adam_format_ok(te, "exp_avg_sq_dtype", d->exp_avg_sq_dtype, true))
        return false;
    if (d->amsgrad)
        te__fail(te, TE_ERR_UNSUPPORTED, "%s: amsgrad is set; FusedAdam does not have the AMSGrad variant", create);
    return !d->amsgrad;
}

TE_API te_optimizer *te_fused_adam_create(te_ctx *te, te_module *m, const te_fused_adam_desc *desc) {
    te_fused_adam_desc d = TE_ZERO;
    te__opt_options options = TE_ZERO;
    te__opt_groups groups = TE_ZERO;
    te_optimizer *opt;
    if (!te || !m) return NULL;
    if (desc) d = *desc;
    if (!te__adam_desc_ok(te, &d)) return NULL;
    if (d.lr == 0.0f) d.lr = 1e-3f;
    if (d.beta1 == 0.0f) d.beta1 = 0.9f;
    if (d.beta2 == 0.0f) d.beta2 = 0.999f;
    if (d.eps == 0.0f) d.eps = 1e-8f;
    options.lr = d.lr;
    options.max_grad_norm = d.max_grad_norm;
    options.no_master_weights = d.no_master_weights;
    options.decay_matrices_only = d.decay_matrices_only;
    options.no_bias_correction = d.no_bias_correction;
    options.use_decoupled_grad = d.use_decoupled_grad;
    options.store_param_remainders = d.store_param_remainders;
    options.zero_grads = d.no_set_grad_none;
    options.dtype[TE__OPT_FIRST] = d.exp_avg_dtype ? d.exp_avg_dtype : TE_F32;
    options.dtype[TE__OPT_SECOND] = d.exp_avg_sq_dtype ? d.exp_avg_sq_dtype : TE_F32;
    options.dtype[TE__OPT_MASTER] = d.master_weight_dtype ? d.master_weight_dtype : TE_F32;
    opt = te__opt_create(te, m, &te__adam_class, &options, sizeof(te_adam_tensor));
    if (!opt) return NULL;
    opt->desc.adam = d;
    groups.groups = d.groups;
    groups.num_groups = d.num_groups;
    groups.usual.beta1 = d.beta1;
    groups.usual.beta2 = d.beta2;
    groups.usual.eps = d.eps;
    groups.usual.weight_decay = d.weight_decay;
    return te__opt_fill(opt, m, &groups, false);
}
