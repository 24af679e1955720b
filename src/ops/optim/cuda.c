/* ops/optim/cuda.c: plans of the multi-tensor operations. A list of tensors may need several launches, since a
 * kernel's table of tensors has a fixed size. This file must not depend on what the kernels compute. */

/* Kernel arguments may have 4,096 bytes on every architecture. */
typedef char te__optim_kargs_fit[sizeof(te__adam_kargs) <= 4000 && sizeof(te__adam_states_kargs) <= 4000 &&
                                         sizeof(te__sgd_kargs) <= 4000 && sizeof(te__l2norm_kargs) <= 4000 &&
                                         sizeof(te__multi_scale_kargs) <= 4000
                                     ? 1
                                     : -1];

/* Returns true if tensor i needs a new launch. All tensors of a launch have the same numbers (learning rate, betas,
 * eps, weight decay) and the same `place`. */
static bool te__adam_turns(const te_op_adam_args *a, int i) {
    const te_adam_tensor *t = &a->tensors[i], *before = t - 1;
    if (i == 0) return false;
    if (i == a->num_tensors - a->num_undecayed || t->own_numbers != before->own_numbers || t->place != before->place)
        return true;
    return t->own_numbers && memcmp(&t->numbers, &before->numbers, sizeof(t->numbers)) != 0;
}
static void te__adam_fill_numbers(te__adam_numbers *k, const te_op_adam_args *a, int i) {
    te_adam_numbers n = te__adam_numbers_of(a, i);
    const float *lr = te__f32_data(a->lr_device), *unbias = te__f32_data(a->bias_correction);
    k->grad_scale = te__f32_data(a->grad_scale);
    k->found_inf = te__f32_data(a->found_inf);
    k->lr_device = lr ? lr + a->tensors[i].place : NULL;
    k->lr = n.lr;
    k->beta1 = n.beta1;
    k->beta2 = n.beta2;
    k->eps = n.eps;
    k->weight_decay = i < a->num_tensors - a->num_undecayed ? n.weight_decay : 0.0f;
    k->unbias = unbias ? unbias + 2 * a->tensors[i].place : NULL;
    k->unbias1 = te__adam_unbias(unbias || a->no_bias_correction, n.beta1, a->step);
    k->unbias2 = te__adam_unbias(unbias || a->no_bias_correction, n.beta2, a->step);
    k->l2_mode = a->no_adam_w_mode;
}

/* Plans the entries whose states are all in f32. */
static void te__cuda_plan_adam_f32(te__plan *p, const te_op_adam_args *a) {
    te__launch *l = NULL;
    te__adam_kargs *k = NULL;
    int64_t chunks = 0;
    int i;
    for (i = 0; i < a->num_tensors; i++) {
        const te_adam_tensor *t = &a->tensors[i];
        int64_t n = te__numel(t->param), more = te__div_up(n, TE__ADAM_CHUNK);
        int at;
        if (te__adam_turns(a, i)) k = NULL;
        if (n == 0 || te__adam_has_formats(t)) continue;
        if (!k || k->tensors == TE__ADAM_MAX || chunks + more > INT32_MAX) {
            l = te__plan_launch(p, "optim", "adam");
            k = TE__KARGS(p, l, te__adam_kargs);
            chunks = 0;
            te__adam_fill_numbers(&k->numbers, a, i);
        }
        at = k->tensors++;
        k->grad[at] = te__data(t->grad);
        k->param[at] = te__data(t->param);
        k->m[at] = te__f32_data(t->m);
        k->v[at] = te__f32_data(t->v);
        k->master[at] = te__f32_data(t->master);
        k->n[at] = n;
        k->first[at] = (unsigned)chunks;
        k->grad_dt[at] = (unsigned char)t->grad->dtype;
        k->param_dt[at] = (unsigned char)t->param->dtype;
        k->vector[at] = te__is_aligned(t->grad, 4 * (uintptr_t)te__dtype_size(t->grad->dtype)) &&
                        te__is_aligned(t->param, 4 * (uintptr_t)te__dtype_size(t->param->dtype)) &&
                        te__is_aligned(t->m, 16) && te__is_aligned(t->v, 16) && te__is_aligned(t->master, 16);
        chunks += more;
        te__launch_blocks(l, chunks, 256);
    }
}

/* Plans the kernels for the tensors of *k: adam_amax, adam_scales and adam_states if a state has a scale, else
 * adam_states alone. */
static void te__adam_states_launch(te__plan *p, const te__adam_states_kargs *k, int64_t chunks, bool scales) {
    static const char *const kernel[3] = {"adam_amax", "adam_scales", "adam_states"};
    int i;
    for (i = scales ? 0 : 2; k->tensors > 0 && i < 3; i++) {
        te__plan_with(p, "optim", kernel[i], i == 1 ? k->tensors : chunks, 256, k, sizeof(*k));
    }
}
static void te__cuda_plan_adam_states(te__plan *p, const te_op_adam_args *a) {
    te__adam_states_kargs k;
    int64_t chunks = 0, all = 0;
    int i, s, at, entries = 0;
    bool scales = false;
    float *amax = NULL, *factor = NULL;
    for (i = 0; i < a->num_tensors; i++)
        if (te__adam_has_scales(&a->tensors[i])) scales = true;
    for (i = 0; i < a->num_tensors && scales; i++) {
        if (!te__adam_has_formats(&a->tensors[i])) continue;
        all += te__div_up(te__numel(a->tensors[i].param), TE__ADAM_STATES_CHUNK);
        entries++;
    }
    if (scales && all > 0) { /* every launch has its own part of these */
        amax = te__plan_floats(p, all * TE__STATES);
        factor = te__plan_floats(p, (int64_t)entries * 2 * TE__STATES);
        if (p->result != TE_OK) return;
    }
    memset(&k, 0, sizeof(k));
    for (i = 0; i <= a->num_tensors; i++) {
        const te_adam_tensor *t = i < a->num_tensors ? &a->tensors[i] : NULL;
        int64_t n = t ? te__numel(t->param) : 0, more = te__div_up(n, TE__ADAM_STATES_CHUNK);
        if (!t || te__adam_turns(a, i) || k.tensors == TE__ADAM_STATES_MAX || chunks + more > INT32_MAX) {
            te__adam_states_launch(p, &k, chunks, scales);
            if (amax) {
                amax += chunks * TE__STATES;
                factor += k.tensors * 2 * TE__STATES;
            }
            k.tensors = 0;
            chunks = 0;
        }
        if (n == 0 || !te__adam_has_formats(t)) continue;
        te__adam_fill_numbers(&k.numbers, a, i);
        k.amax = amax;
        k.factor = factor;
        at = k.tensors++;
        k.grad[at] = te__data(t->grad);
        k.param[at] = te__data(t->param);
        k.grad_dt[at] = (unsigned char)t->grad->dtype;
        k.param_dt[at] = (unsigned char)t->param->dtype;
        k.n[at] = n;
        k.first[at] = (unsigned)chunks;
        for (s = 0; s < TE__STATES; s++) {
            const te_tensor *x = s == TE__STATE_M ? t->m : s == TE__STATE_V ? t->v : t->master;
            k.state[s][at] = te__data(x);
            k.state_dt[s][at] = (unsigned char)(te__dtype_of(x));
            k.scale[s][at] = te__f32_data(s == TE__STATE_M   ? t->m_scale
                                               : s == TE__STATE_V ? t->v_scale
                                                                  : t->master_scale);
        }
        chunks += more;
    }
}
static te_result te__cuda_plan_adam(te__plan *p, const te_op_adam_args *a) {
    te__cuda_plan_adam_f32(p, a);
    te__cuda_plan_adam_states(p, a);
    te__plan_why(p, "states in f32: 70 tensors a launch, 1,024 elements a block, four a thread; others: 44 tensors, "
                    "4,096 elements");
    return p->result;
}

static te_result te__cuda_plan_store_state(te__plan *p, const te_op_store_state_args *a) {
    te__launch *l = te__plan_launch(p, "optim", "store_state"); /* also if x is empty: the scale is written */
    te__store_state_kargs *k = TE__KARGS(p, l, te__store_state_kargs);
    k->x = te__data(a->x);
    k->amax = te__f32_data(a->amax);
    k->state = te__data(a->state);
    k->scale = te__f32_data(a->scale);
    k->n = te__numel(a->x);
    k->x_dt = a->x->dtype;
    k->state_dt = a->state->dtype;
    te__launch_blocks(l, te__max(1, te__div_up(k->n, 4096)), 256);
    return te__plan_why(p, "4,096 elements a block");
}

static bool te__sgd_turns(const te_op_sgd_args *a, int i) {
    const te_sgd_tensor *t = &a->tensors[i], *before = t - 1;
    if (i == 0) return false;
    if (i == a->num_tensors - a->num_undecayed || t->own_numbers != before->own_numbers || t->place != before->place)
        return true;
    return t->own_numbers && memcmp(&t->numbers, &before->numbers, sizeof(t->numbers)) != 0;
}
static te_result te__cuda_plan_sgd(te__plan *p, const te_op_sgd_args *a) {
    te__launch *l = NULL;
    te__sgd_kargs *k = NULL;
    int64_t chunks = 0;
    int i;
    for (i = 0; i < a->num_tensors; i++) {
        const te_sgd_tensor *t = &a->tensors[i];
        int64_t n = te__numel(t->param), more = te__div_up(n, TE__SGD_CHUNK);
        int at;
        if (te__sgd_turns(a, i)) k = NULL;
        if (n == 0) continue;
        if (!k || k->tensors == TE__SGD_MAX || chunks + more > INT32_MAX) {
            l = te__plan_launch(p, "optim", "sgd");
            k = TE__KARGS(p, l, te__sgd_kargs);
            chunks = 0;
            k->grad_scale = te__f32_data(a->grad_scale);
            k->found_inf = te__f32_data(a->found_inf);
            k->lr_device = a->lr_device ? te__f32_data(a->lr_device) + t->place : NULL;
            k->lr = te__sgd_numbers_of(a, i).lr;
            k->momentum_factor = a->momentum;
            k->dampening = a->dampening;
            k->weight_decay = i < a->num_tensors - a->num_undecayed ? te__sgd_numbers_of(a, i).weight_decay : 0.0f;
            k->nesterov = a->nesterov;
            k->wd_after_momentum = a->wd_after_momentum;
        }
        at = k->tensors++;
        k->grad[at] = te__data(t->grad);
        k->param[at] = te__data(t->param);
        k->momentum[at] = te__data(t->momentum);
        k->master[at] = te__f32_data(t->master);
        k->n[at] = n;
        k->begin[at] = (unsigned)chunks;
        k->grad_dt[at] = (unsigned char)t->grad->dtype;
        k->param_dt[at] = (unsigned char)t->param->dtype;
        k->momentum_dt[at] = (unsigned char)(te__dtype_of(t->momentum));
        k->first[at] = t->first;
        chunks += more;
        te__launch_blocks(l, chunks, 256);
    }
    return te__plan_why(p, "64 tensors a launch, 4,096 elements a block");
}

static te_result te__cuda_plan_step_numbers(te__plan *p, const te_op_step_numbers_args *a) {
    te__launch *l = te__plan_launch(p, "optim", "step_numbers");
    te__step_numbers_kargs *k = TE__KARGS(p, l, te__step_numbers_kargs);
    k->found_inf = te__f32_data(a->found_inf);
    k->skipped = te__f32_data(a->skipped);
    k->step_device = te__f32_data(a->step_device);
    k->betas = te__f32_data(a->betas);
    k->bias_correction = te__f32_data(a->bias_correction);
    k->step = (double)a->step;
    k->places = a->betas ? (int)(te__numel(a->betas) / 2) : 0;
    k->count = a->count;
    k->no_bias_correction = a->no_bias_correction;
    te__launch_blocks(l, 1, 256);
    return te__plan_why(p, "one block");
}
static te_result te__cuda_plan_update_scale(te__plan *p, const te_op_update_scale_args *a) {
    te__launch *l = te__plan_launch(p, "optim", "update_scale");
    te__update_scale_kargs *k = TE__KARGS(p, l, te__update_scale_kargs);
    k->scale = te__f32_data(a->scale);
    k->inv_scale = te__f32_data(a->inv_scale);
    k->growth_tracker = te__f32_data(a->growth_tracker);
    k->found_inf = te__f32_data(a->found_inf);
    k->growth_factor = a->growth_factor;
    k->backoff_factor = a->backoff_factor;
    k->growth_interval = (float)a->growth_interval;
    te__launch_blocks(l, 1, 1);
    return te__plan_why(p, "one thread");
}

static te_result te__cuda_plan_l2norm(te__plan *p, const te_op_l2norm_args *a) {
    te__l2norm_final_kargs total = TE_ZERO;
    te__launch *l = NULL;
    te__l2norm_kargs *k = NULL;
    int64_t all = 0, chunks = 0;
    float *partial;
    unsigned *first_chunk;
    int i;
    /* An empty tensor has one chunk too, because the block of a tensor's first chunk also records where the tensor
     * begins. */
    for (i = 0; i < a->num_tensors; i++) all += te__max(1, te__div_up(te__numel(a->tensors[i]), TE__NORM_CHUNK));
    partial = te__plan_floats(p, te__max(1, all));
    first_chunk = (unsigned *)te__plan_workspace(p, ((int64_t)a->num_tensors + 1) * 4);
    total.tensor_sum = te__plan_floats(p, te__max(1, a->num_tensors));
    for (i = 0; i < a->num_tensors; i++) {
        const te_tensor *x = a->tensors[i];
        int64_t more = te__max(1, te__div_up(te__numel(x), TE__NORM_CHUNK));
        int at;
        if (!k || k->tensors == TE__NORM_MAX) {
            unsigned chunk = k ? k->chunk + (unsigned)chunks : 0;
            l = te__plan_launch(p, "optim", "l2norm_partial");
            k = TE__KARGS(p, l, te__l2norm_kargs);
            chunks = 0;
            k->inv_scale = te__f32_data(a->inv_scale);
            k->partial = partial;
            k->first_chunk = first_chunk;
            k->chunk = chunk;
            k->tensor = (unsigned)i;
        }
        at = k->tensors++;
        k->x[at] = te__data(x);
        k->n[at] = te__numel(x);
        k->first[at] = (unsigned)chunks;
        k->dt[at] = (unsigned char)x->dtype;
        k->vector[at] = te__is_aligned(x, 16);
        k->last = i == a->num_tensors - 1;
        chunks += more;
        te__launch_blocks(l, chunks, 256);
    }
    total.partial = partial;
    total.first_chunk = first_chunk;
    total.norm = te__f32_data(a->norm);
    total.per_tensor = te__f32_data(a->per_tensor);
    total.clip = te__f32_data(a->clip);
    total.found_inf = te__f32_data(a->found_inf);
    total.tensors = a->num_tensors;
    total.max_norm = a->max_norm;
    if (a->num_tensors > 0) {
        te__plan_with(p, "optim", "l2norm_tensor", a->num_tensors, 256, &total, sizeof(total));
    }
    /* also if the list is empty: its norm is 0 */
    te__plan_with(p, "optim", "l2norm_final", 1, 1024, &total, sizeof(total));
    return te__plan_why(p, "sums of 65,536 elements, then of tensors, then of all, each in its order");
}

static te_result te__cuda_plan_multi_scale(te__plan *p, const te_op_multi_scale_args *a) {
    te__launch *l = NULL;
    te__multi_scale_kargs *k = NULL;
    int64_t chunks = 0;
    int i;
    for (i = 0; i < a->num_tensors; i++) {
        int64_t n = te__numel(a->in[i]), more = te__div_up(n, TE__SCALE_CHUNK);
        int at;
        if (n == 0) continue;
        if (!k || k->tensors == TE__SCALE_MAX || chunks + more > INT32_MAX) {
            l = te__plan_launch(p, "optim", "multi_scale");
            k = TE__KARGS(p, l, te__multi_scale_kargs);
            chunks = 0;
            k->scale_device = te__f32_data(a->scale_device);
            k->found_inf = te__f32_data(a->found_inf);
            k->scale = a->scale;
        }
        at = k->tensors++;
        k->in[at] = te__data(a->in[i]);
        k->out[at] = te__data(a->out[i]);
        k->n[at] = n;
        k->first[at] = (unsigned)chunks;
        k->in_dt[at] = (unsigned char)a->in[i]->dtype;
        k->out_dt[at] = (unsigned char)a->out[i]->dtype;
        k->vector[at] = te__is_aligned(a->in[i], 16) && te__is_aligned(a->out[i], 16);
        chunks += more;
        te__launch_blocks(l, chunks, 256);
    }
    return te__plan_why(p, "120 tensors a launch, 8,192 elements a block");
}
