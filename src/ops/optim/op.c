/* ops/optim/op.c: checks the arguments of operations on lists of tensors, such as Adam. This file must not depend on
 * the backend. */

/* Checks that x has as many elements as `with`. Both are tensors of entry i of the list. x may be NULL. */
static te_result te__optim_check_like(te_ctx *te, const char *op, const char *name, int i, const te_tensor *x,
                                      const char *with_name, const te_tensor *with) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!x || te__numel(x) == te__numel(with)) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s[%d] is %s and %s[%d] is %s; their sizes must be equal", op, name, i,
                    te__shape_text(x, a), with_name, i, te__shape_text(with, b));
}

/* Checks the scale of x, a state of list entry i. The scale must exist exactly if the format of x needs one. */
static te_result te__optim_check_scale(te_ctx *te, const char *name, int i, const te_tensor *x,
                                       const te_tensor *scale) {
    char text[TE__SHAPE_TEXT];
    bool scaled = x && (x->dtype == TE_F16 || x->dtype == TE_F8E4M3);
    if (!scaled && !scale) return TE_OK;
    if (!scaled)
        return te__fail(te, TE_ERR_INVALID,
                        "adam: %s_scale[%d] is given and %s[%d] is %s; a scale belongs to f16 and e4m3 alone", name, i,
                        name, i, x ? te_dtype_name(x->dtype) : "NULL");
    if (!scale)
        return te__fail(te, TE_ERR_STATE, "adam: %s[%d] is %s and %s_scale[%d] is NULL; f32 [1] is needed there", name,
                        i, te_dtype_name(x->dtype), name, i);
    if (te__numel(scale) == 1) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "adam: %s_scale[%d] is %s; 1 element is needed", name, i,
                    te__shape_text(scale, text));
}
/* Checks the master of entry i. A master of dtype u8 has two bytes for each element: the lower 16 bits of the f32
 * value. */
static te_result te__adam_check_master(te_ctx *te, int i, const te_adam_tensor *t) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!t->master || t->master->dtype != TE_U8)
        return te__optim_check_like(te, "adam", "master", i, t->master, "param", t->param);
    if (t->param->dtype != TE_BF16)
        return te__fail(te, TE_ERR_DTYPE, "adam: master[%d] is u8, remainders, and param[%d] is %s; bf16 is needed", i,
                        i, te_dtype_name(t->param->dtype));
    if (te__numel(t->master) != 2 * te__numel(t->param))
        return te__fail(te, TE_ERR_SHAPE,
                        "adam: master[%d] is u8 %s and param[%d] is %s; two bytes for each element are needed", i,
                        te__shape_text(t->master, a), i, te__shape_text(t->param, b));
    if ((uintptr_t)te__data(t->master) % 2)
        return te__fail(te, TE_ERR_INVALID, "adam: master[%d] begins at an odd address; remainders have two bytes each",
                        i);
    return TE_OK;
}

/* te__adam_numbers_of and te__sgd_numbers_of return the hyperparameters of tensor i. A tensor uses its own
 * hyperparameters if own_numbers is set. Otherwise it uses those in `a`. */
static te_adam_numbers te__adam_numbers_of(const te_op_adam_args *a, int i) {
    te_adam_numbers n;
    if (a->tensors[i].own_numbers) return a->tensors[i].numbers;
    n.lr = a->lr;
    n.beta1 = a->beta1;
    n.beta2 = a->beta2;
    n.eps = a->eps;
    n.weight_decay = a->weight_decay;
    return n;
}
static te_sgd_numbers te__sgd_numbers_of(const te_op_sgd_args *a, int i) {
    te_sgd_numbers n;
    if (a->tensors[i].own_numbers) return a->tensors[i].numbers;
    n.lr = a->lr;
    n.weight_decay = a->weight_decay;
    return n;
}
/* Checks that `place`, the index of an entry in device tables such as lr_device, is not negative. Raises *most to
 * `place` if `place` is larger. */
static te_result te__optim_check_places(te_ctx *te, const char *op, int place, int entry, int64_t *most) {
    if (place < 0)
        return te__fail(te, TE_ERR_INVALID, "%s: the place of entry %d is %d; the first one is 0", op, entry, place);
    *most = te__max(*most, place);
    return TE_OK;
}
static te_result te__adam_check_numbers(te_ctx *te, const te_adam_numbers *n) {
    if (n->beta1 >= 0.0f && n->beta1 < 1.0f && n->beta2 >= 0.0f && n->beta2 < 1.0f && n->eps >= 0.0f) return TE_OK;
    return te__fail(te, TE_ERR_INVALID, "adam: beta1 %g, beta2 %g, eps %g; 0 <= beta < 1 and eps >= 0 are needed",
                    (double)n->beta1, (double)n->beta2, (double)n->eps);
}

/* Checks that the table x has at least `places` * `each` elements. x may be NULL. */
static te_result te__optim_want_places(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t places,
                                       int each) {
    if (!x || te__numel(x) >= places * each) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s has %lld elements; the largest place is %lld, so %lld or more are needed",
                    op, name, (long long)te__numel(x), (long long)places - 1, (long long)places * each);
}

static te_result te__check_adam(te_ctx *te, te_op_adam_args *a) {
    te_result result = TE_OK;
    te_adam_numbers usual;
    int64_t places = 0;
    int i;
    for (i = 0; i < a->num_tensors && result == TE_OK; i++) {
        const te_adam_tensor *t = &a->tensors[i];
        result = te__optim_check_like(te, "adam", "grad", i, t->grad, "param", t->param);
        if (result == TE_OK) result = te__optim_check_like(te, "adam", "m", i, t->m, "param", t->param);
        if (result == TE_OK) result = te__optim_check_like(te, "adam", "v", i, t->v, "param", t->param);
        if (result == TE_OK) result = te__adam_check_master(te, i, t);
        if (result == TE_OK) result = te__optim_check_scale(te, "m", i, t->m, t->m_scale);
        if (result == TE_OK) result = te__optim_check_scale(te, "v", i, t->v, t->v_scale);
        if (result == TE_OK) result = te__optim_check_scale(te, "master", i, t->master, t->master_scale);
        if (result == TE_OK) result = te__optim_check_places(te, "adam", t->place, i, &places);
        if (result == TE_OK && t->own_numbers) result = te__adam_check_numbers(te, &t->numbers);
    }
    if (result == TE_OK) result = te__optim_want_places(te, "adam", "lr_device", a->lr_device, places + 1, 1);
    if (result == TE_OK)
        result = te__optim_want_places(te, "adam", "bias_correction", a->bias_correction, places + 1, 2);
    usual.lr = a->lr;
    usual.beta1 = a->beta1;
    usual.beta2 = a->beta2;
    usual.eps = a->eps;
    usual.weight_decay = a->weight_decay;
    if (result == TE_OK) result = te__adam_check_numbers(te, &usual);
    if (result != TE_OK) return result;
    if (a->num_undecayed < 0 || a->num_undecayed > a->num_tensors)
        return te__fail(te, TE_ERR_INVALID, "adam: num_undecayed is %d of %d tensors", a->num_undecayed,
                        a->num_tensors);
    if (a->step < 1 && !a->bias_correction)
        return te__fail(te, TE_ERR_INVALID, "adam: step is %lld; the first one is 1", (long long)a->step);
    return TE_OK;
}
/* Returns true if a state of the entry is not in f32. */
static bool te__adam_has_formats(const te_adam_tensor *t) {
    return t->m->dtype != TE_F32 || t->v->dtype != TE_F32 || (t->master && t->master->dtype != TE_F32);
}
static bool te__adam_has_scales(const te_adam_tensor *t) { return t->m_scale || t->v_scale || t->master_scale; }
/* Returns 1 / (1 - beta^step). The host computes this number once, for both backends. */
static float te__adam_unbias(bool no_bias_correction, float beta, int64_t step) {
    return no_bias_correction ? 1.0f : (float)(1.0 / (1.0 - pow((double)beta, (double)step)));
}

static te_result te__check_store_state(te_ctx *te, te_op_store_state_args *a) {
    return te__want_numel(te, "store_state", "state", a->state, te__numel(a->x));
}

static te_result te__check_sgd(te_ctx *te, te_op_sgd_args *a) {
    te_result result = TE_OK;
    int64_t places = 0;
    int i;
    for (i = 0; i < a->num_tensors && result == TE_OK; i++) {
        const te_sgd_tensor *t = &a->tensors[i];
        result = te__optim_check_like(te, "sgd", "grad", i, t->grad, "param", t->param);
        if (result == TE_OK) result = te__optim_check_like(te, "sgd", "momentum", i, t->momentum, "param", t->param);
        if (result == TE_OK) result = te__optim_check_like(te, "sgd", "master", i, t->master, "param", t->param);
        if (result == TE_OK) result = te__optim_check_places(te, "sgd", t->place, i, &places);
        if (result == TE_OK && a->momentum != 0.0f && !t->momentum)
            result =
                te__fail(te, TE_ERR_STATE, "sgd: momentum is %g and momentum[%d] is NULL; a tensor is needed there",
                         (double)a->momentum, i);
    }
    if (result == TE_OK) result = te__optim_want_places(te, "sgd", "lr_device", a->lr_device, places + 1, 1);
    if (result != TE_OK) return result;
    if (!(a->momentum >= 0.0f) || (a->nesterov && (a->momentum == 0.0f || a->dampening != 0.0f)))
        return te__fail(te, TE_ERR_INVALID,
                        "sgd: momentum %g, dampening %g, nesterov %d; momentum >= 0 is needed, and for nesterov "
                        "momentum > 0 and dampening 0",
                        (double)a->momentum, (double)a->dampening, a->nesterov);
    if (a->num_undecayed < 0 || a->num_undecayed > a->num_tensors)
        return te__fail(te, TE_ERR_INVALID, "sgd: num_undecayed is %d of %d tensors", a->num_undecayed, a->num_tensors);
    return TE_OK;
}

static te_result te__check_l2norm(te_ctx *te, te_op_l2norm_args *a) {
    te_result result = te__want_numel(te, "l2norm", "per_tensor", a->per_tensor, a->num_tensors);
    if (result == TE_OK && a->clip && !(a->max_norm > 0.0f))
        result = te__fail(te, TE_ERR_INVALID, "l2norm: clip is asked for with max_norm %g", (double)a->max_norm);
    return result;
}

static te_result te__check_multi_scale(te_ctx *te, te_op_multi_scale_args *a) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < a->num_tensors && result == TE_OK; i++)
        result = te__optim_check_like(te, "multi_scale", "out", i, a->out[i], "in", a->in[i]);
    return result;
}

static te_result te__check_step_numbers(te_ctx *te, te_op_step_numbers_args *a) {
    te_result result = TE_OK;
    char text[TE__SHAPE_TEXT];
    if (a->betas && te__numel(a->betas) % 2)
        return te__fail(te, TE_ERR_SHAPE, "step_numbers: betas are %s; pairs are needed",
                        te__shape_text(a->betas, text));
    if (a->betas)
        result = te__want_numel(te, "step_numbers", "bias_correction", a->bias_correction, te__numel(a->betas));
    if (result == TE_OK && !a->step_device && a->step < 1)
        result = te__fail(te, TE_ERR_INVALID, "step_numbers: step is %lld; the first one is 1", (long long)a->step);
    return result;
}
static te_result te__check_update_scale(te_ctx *te, te_op_update_scale_args *a) {
    if (a->growth_factor > 0.0f && a->backoff_factor > 0.0f && a->growth_interval > 0) return TE_OK;
    return te__fail(te, TE_ERR_INVALID,
                    "update_scale: growth_factor %g, backoff_factor %g, growth_interval %d; numbers above 0 are needed",
                    (double)a->growth_factor, (double)a->backoff_factor, a->growth_interval);
}
