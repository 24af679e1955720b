/* train/sgd.c: the options of FusedSGD, and the one multi-tensor operation of a step. This file must not depend on
 * files on disk. */

/* Returns true if first steps differ from later ones. In a first step the momentum becomes the gradient itself, without
 * the factor 1 - dampening. */
static bool te__sgd_first_counts(const te_fused_sgd_desc *d) { return d->momentum > 0.0f && d->dampening != 0.0f; }

static te_result te__sgd_run(te_optimizer *opt, const te__opt_step *step) {
    const te_fused_sgd_desc *d = &opt->desc.sgd;
    te_sgd_tensor *list = (te_sgd_tensor *)opt->list;
    te_op_sgd_args args = TE_ZERO;
    int i;
    for (i = 0; i < step->count; i++) {
        const te__opt_param *p = &opt->params[opt->order[i]];
        te_sgd_tensor *x = &list[i];
        x->grad = opt->grads[i];
        x->param = te__opt_entry_param(p);
        x->momentum = p->state[TE__OPT_FIRST].x;
        x->master = te__opt_entry_master(p)->x;
        x->first = te__sgd_first_counts(d) && !p->started;
        x->own_numbers = p->group > 0;
        x->place = p->group;
        x->numbers.lr = te__group_lr(opt, p->group);
        x->numbers.weight_decay = opt->groups[p->group].weight_decay;
    }
    args.tensors = list;
    args.num_tensors = step->count;
    args.num_undecayed = step->num_undecayed;
    args.lr = opt->options.lr;
    args.momentum = d->momentum;
    args.dampening = d->dampening;
    args.weight_decay = d->weight_decay;
    args.nesterov = d->nesterov;
    args.wd_after_momentum = d->wd_after_momentum;
    args.grad_scale = step->grad_scale;
    args.found_inf = step->found_inf;
    args.lr_device = step->lr;
    return te_op_sgd(opt->te, &args);
}
static te_result te__sgd_may_capture(te_optimizer *opt, const te__opt_param *p) {
    if (p->started || !te__sgd_first_counts(&opt->desc.sgd)) return TE_OK;
    return te__refuse_capture(
        opt->te, "the first te_optimizer_step of an optimizer with dampening, which differs from all later ones",
        "make it before te_graph_begin");
}
static const te__opt_class te__sgd_class = {
    "te_fused_sgd_create", {"momentum_buffer", NULL, "master_param"}, te__sgd_run, false, te__sgd_may_capture, false};
/* without momentum */
static const te__opt_class te__sgd_plain_class = {
    "te_fused_sgd_create", {NULL, NULL, "master_param"}, te__sgd_run, false, te__sgd_may_capture, false};

static te_result te__sgd_desc_ok(te_ctx *te, const te_fused_sgd_desc *d) {
    const char *create = te__sgd_class.create;
    if (d->lr == 0.0f) return te__fail(te, TE_ERR_INVALID, "%s: lr is 0; it has no default", create);
    if (!te__opt_in_range(te, create, "lr", d->lr, FLT_MAX) ||
        !te__opt_in_range(te, create, "momentum", d->momentum, FLT_MAX) ||
        !te__opt_in_range(te, create, "dampening", d->dampening, FLT_MAX) ||
        !te__opt_in_range(te, create, "weight_decay", d->weight_decay, FLT_MAX) ||
        !te__opt_in_range(te, create, "max_grad_norm", d->max_grad_norm, FLT_MAX))
        return te_error_code(te);
    if (!d->nesterov || (d->momentum > 0.0f && d->dampening == 0.0f)) return TE_OK;
    return te__fail(te, TE_ERR_INVALID,
                    "%s: nesterov with momentum %g and dampening %g; a momentum above 0 and no dampening are needed",
                    create, (double)d->momentum, (double)d->dampening);
}

TE_API te_optimizer *te_fused_sgd_create(te_ctx *te, te_module *m, const te_fused_sgd_desc *desc) {
    te_fused_sgd_desc d = TE_ZERO;
    te__opt_options options = TE_ZERO;
    te__opt_groups groups = TE_ZERO;
    te_optimizer *opt;
    if (!te || !m || !te__has_desc(te, desc, te__sgd_class.create)) return NULL;
    d = *desc;
    if (te__sgd_desc_ok(te, &d) != TE_OK) return NULL;
    options.lr = d.lr;
    options.max_grad_norm = d.max_grad_norm;
    options.no_master_weights = d.no_master_weights;
    options.decay_matrices_only = d.decay_matrices_only;
    options.zero_grads = d.no_set_grad_none;
    opt = te__opt_create(te, m, d.momentum > 0.0f ? &te__sgd_class : &te__sgd_plain_class, &options,
                         sizeof(te_sgd_tensor));
    if (!opt) return NULL;
    opt->desc.sgd = d;
    groups.groups = d.groups;
    groups.num_groups = d.num_groups;
    groups.usual.weight_decay = d.weight_decay;
    return te__opt_fill(opt, m, &groups, te__sgd_first_counts(&d));
}
