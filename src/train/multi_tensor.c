/* train/multi_tensor.c: norms and scaling of many tensors, and of all gradients of a module tree. This file may use raw
 * operations (te_op_...). It must not depend on optimizers. */

TE_API te_result te_multi_tensor_scale(te_ctx *te, te_tensor *const *in, te_tensor *const *out, int num_tensors,
                                       float scale, te_tensor *found_inf) {
    te_op_multi_scale_args args = TE_ZERO;
    if (!te) return TE_ERR_STATE;
    args.in = (const te_tensor *const *)in;
    args.out = out;
    args.num_tensors = num_tensors;
    args.scale = scale;
    args.found_inf = found_inf;
    return te_op_multi_scale(te, &args);
}

TE_API te_tensor *te_multi_tensor_unscale_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                                 const te_tensor *inv_scale, te_tensor **per_tensor) {
    te_op_l2norm_args args = TE_ZERO;
    if (per_tensor) *per_tensor = NULL;
    if (!te) return NULL;
    if (num_tensors < 0)
        return te__no_tensor(te, TE_ERR_INVALID, "%s: num_tensors is %d",
                             inv_scale ? "te_multi_tensor_unscale_l2norm" : "te_multi_tensor_l2norm", num_tensors);
    args.tensors = (const te_tensor *const *)tensors;
    args.num_tensors = num_tensors;
    args.inv_scale = inv_scale;
    args.norm = te__empty_1d(te, TE_F32, 1);
    if (per_tensor) args.per_tensor = te__empty_1d(te, TE_F32, num_tensors);
    if (!args.norm || (per_tensor && !args.per_tensor) || te_op_l2norm(te, &args) != TE_OK) return NULL;
    if (per_tensor) *per_tensor = args.per_tensor;
    return args.norm;
}
TE_API te_tensor *te_multi_tensor_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                         te_tensor **per_tensor) {
    return te_multi_tensor_unscale_l2norm(te, tensors, num_tensors, NULL, per_tensor);
}

/* The gradients of a module tree, each listed once. */
typedef struct te__grad_list {
    te_ctx *te;
    te_tensor **grads;
    te__spread *spread, *kinds; /* what other ranks have: [num] of grads; [num_kinds] of all parameters */
    int num, cap, cap_spread, num_kinds, cap_kinds;
    bool spreads;
} te__grad_list;
static bool te__grad_list_add(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__grad_list *l = (te__grad_list *)user;
    te_tensor *grad;
    int i;
    (void)m;
    if (kind != TE_ENTRY_PARAMETER) return true;
    if (x->shard && te_tensor_grad(x) && !l->te->warming)
        return te__not_ok(l->te, TE_ERR_STATE,
                          "te_clip_grad_norm: parameter %s is sharded, and its gradient was not exchanged: "
                          "requires_gradient_sync of unit \"%s\" was false in the last backward pass",
                          path, x->shard->set->name);
    if (x->shard) grad = x->var ? x->var->shard_grad : NULL;
    else if (te__main_or_grad(x, &grad) != TE_OK) return false;
    if (x->requires_grad || grad) { /* ranks have the same parameters, but not the same ones have gradients */
        if (!te__grow(l->te, (void **)&l->kinds, &l->cap_kinds, l->num_kinds, sizeof(te__spread))) return false;
        l->kinds[l->num_kinds] = te__spread_of(x, x->shard);
        if (!te__spread_seen(l->kinds, l->num_kinds)) l->num_kinds++;
        l->spreads = l->spreads || x->shard || x->split;
    }
    for (i = 0; i < l->num; i++)
        if (l->grads[i] == grad) return true;
    if (!grad) return true;
    if (!te__grow(l->te, (void **)&l->grads, &l->cap, l->num, sizeof(te_tensor *))) return false;
    if (!te__grow(l->te, (void **)&l->spread, &l->cap_spread, l->num, sizeof(te__spread))) return false;
    l->spread[l->num] = te__spread_of(x, x->shard);
    l->grads[l->num++] = grad;
    return true;
}
TE_API te_tensor *te_clip_grad_norm(te_module *m, float max_norm) {
    te__grad_list l = TE_ZERO;
    te_op_l2norm_args norm = TE_ZERO;
    te_op_multi_scale_args scale = TE_ZERO;
    te_result result;
    if (!m) return NULL;
    l.te = te_module_ctx(m);
    if (l.te->error_code != TE_OK) return NULL;
    if (!(max_norm > 0.0f))
        return te__no_tensor(l.te, TE_ERR_INVALID, "te_clip_grad_norm: max_norm is %g; a number above 0 is needed",
                             (double)max_norm);
    te__frame_begin(l.te);
    result = te_module_visit_tensors(m, te__grad_list_add, &l) ? TE_OK : te_error_code(l.te);
    norm.norm = te__empty_1d(l.te, TE_F32, 1);
    norm.clip = te__empty_1d(l.te, TE_F32, 1);
    if (!norm.norm || !norm.clip) result = te_error_code(l.te);
    norm.tensors = (const te_tensor *const *)l.grads;
    norm.num_tensors = l.num;
    norm.max_norm = max_norm;
    if (l.spreads) result = te__spread_l2norm(l.te, &norm, l.spread, l.kinds, l.num_kinds, result);
    else if (result == TE_OK) result = te_op_l2norm(l.te, &norm);
    scale.in = (const te_tensor *const *)l.grads;
    scale.out = l.grads;
    scale.num_tensors = l.num;
    scale.scale = 1.0f;
    scale.scale_device = norm.clip;
    if (result == TE_OK) result = te_op_multi_scale(l.te, &scale);
    te__free(l.te, l.grads);
    te__free(l.te, l.spread);
    te__free(l.te, l.kinds);
    return te__frame_return(l.te, result == TE_OK ? norm.norm : NULL);
}
