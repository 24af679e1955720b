/* moe/gate.c: the two gates of a mixture of experts. The class Gate has an auxiliary loss and a load-balancing bias.
 * The class FakeBalancedGate has neither. This file must not depend on experts. */

typedef struct te__moe_state {
    float moe_aux_loss_scale;          /* set by te_set_moe_aux_loss_scale; 0 means 1 */
    bool told_mxfp8, told_mxfp8_plain; /* already logged: experts use MXFP8, experts cannot use MXFP8 */
} te__moe_state;
static const te__slot te__moe_slot = {sizeof(te__moe_state)};
static te__moe_state *te__moe_of(const te_ctx *te) {
    return (te__moe_state *)te__slot_of(te, &te__moe_slot);
}
static const te__room te__moe_room = TE__ROOM(&te__moe_slot, NULL, NULL);

static int64_t te__expert_dim(const te_moe_config *c) { return c->moe_latent_size ? c->moe_latent_size : c->dim; }

/* Checks that `backend`, which chooses the kernels of experts, is not NULL. The error names the function `who`. */
static bool te__has_moe_backend(te_ctx *te, const te_moe_backend *backend, const char *who) {
    if (backend) return true;
    return te__not_ok(
        te, TE_ERR_INVALID,
        "%s: backend is NULL; a zeroed te_moe_backend has the defaults, and te_moe_backend_of makes one of a "
        "te_backend_config",
        who);
}
/* Checks `given` and copies it to *c, with the defaults filled in. Each create function in moe/ calls this first. */
static bool te__moe_config_ok(te_ctx *te, const char *who, const te_moe_config *given, te_moe_config *c) {
    if (!te || !te__has_desc(te, given, who)) return false;
    *c = *given;
    if (!c->n_expert_groups) c->n_expert_groups = 1;
    if (!c->n_limited_groups) c->n_limited_groups = 1;
    if (c->route_scale == 0.0f) c->route_scale = 1.0f;
    if (c->init_std == 0.0f) c->init_std = 0.02f;
    if (!c->dtype) c->dtype = TE_BF16;
    if (c->n_routed_experts < 1 || c->n_routed_experts > TE_MOE_MAX_EXPERTS || c->n_activated_experts < 1 ||
        c->n_activated_experts > c->n_routed_experts)
        te__fail(te, TE_ERR_INVALID,
                 "%s: n_activated_experts is %d of n_routed_experts %d; 1 to %d experts, and at least 1 and at most "
                 "all of them for a token, are possible",
                 who, c->n_activated_experts, c->n_routed_experts, TE_MOE_MAX_EXPERTS);
    else if ((int)c->score_func < 0 || c->score_func > TE_GATE_SQRTSOFTPLUS || (int)c->expert_activation < 0 ||
             c->expert_activation >= TE_EXPERT_ACTIVATION_COUNT)
        te__fail(te, TE_ERR_INVALID, "%s: score_func %d and expert_activation %d; 0 to %d and 0 to %d are possible",
                 who, (int)c->score_func, (int)c->expert_activation, (int)TE_GATE_SQRTSOFTPLUS,
                 TE_EXPERT_ACTIVATION_COUNT - 1);
    else if (c->enable_routing_replay)
        te__fail(te, TE_ERR_UNSUPPORTED, "%s: enable_routing_replay is not implemented yet; leave it false", who);
    else if (!(c->swiglu_limit >= 0.0f) || !(c->activation_limit >= 0.0f))
        te__fail(te, TE_ERR_INVALID,
                 "%s: swiglu_limit is %g and activation_limit %g; positive numbers are needed, or 0: none, and 7", who,
                 (double)c->swiglu_limit, (double)c->activation_limit);
    else if (c->moe_latent_size < 0 || c->n_shared_experts < 0 || c->shared_expert_inter_dim < 0)
        te__fail(
            te, TE_ERR_INVALID,
            "%s: moe_latent_size is %lld, n_shared_experts %d and shared_expert_inter_dim %lld; none can be negative",
            who, (long long)c->moe_latent_size, c->n_shared_experts, (long long)c->shared_expert_inter_dim);
    else
        return te__layer_desc_ok(te, who, c->dim, c->moe_inter_dim, c->dtype);
    return false;
}

/* Returns x [.., size] as a view [T, size], recorded on the tape. On failure, records an error and returns NULL. */
static te_tensor *te__moe_matrix(te_module *m, te_tensor *x, int64_t size) {
    char text[TE__SHAPE_TEXT];
    if (!te__need_float(x, m->cls->name)) return NULL;
    if (x->ndim < 1 || te__cols(x) != size)
        return te__no_tensor(m->te, TE_ERR_SHAPE, "%s: the input is %s; [.., %lld] is needed", m->cls->name,
                             te__shape_text(x, text), (long long)size);
    x = te_tensor_contiguous(x);
    return x && x->ndim != 2 ? te__view_2d(x, te__rows(x), size) : x;
}
/* Sets *padding to the padding mask of the call, u8 [T], or to NULL if the call has none. On failure, returns false. */
static bool te__moe_padding(te_module *m, const te_forward_args *args, int64_t tokens, te_tensor **padding) {
    te_tensor *x = args->attention.attention_mask;
    char text[TE__SHAPE_TEXT];
    *padding = NULL;
    if (!x) return true;
    if (!te__same_ctx(x, m->te, m->cls->name)) return false;
    if (x->dtype != TE_U8 || te__numel(x) != tokens)
        return te__not_ok(m->te, TE_ERR_SHAPE,
                          "%s: attention_mask is %s %s; the padding of %lld tokens is needed, u8, one number for each",
                          m->cls->name, te_dtype_name(x->dtype), te__shape_text(x, text), (long long)tokens);
    *padding = te_tensor_contiguous(x);
    return *padding != NULL;
}

/* ---- the choice ---- */

typedef struct te__gate_module {
    te_moe_config config;
    te_init init;
    te_dtype precision;
    bool maps; /* true: router weights and routing map (u8) are [T, E]; false: router weights and expert numbers are [T,
                * K] */
    te_group *cp_group;
    te_tensor *load;       /* f32 [E]: number of tokens counted for each expert since the last bias update */
    uint64_t load_cleared; /* version of `load` after it was last cleared; `load` is 0 while it has this version */
    float *master;         /* [E]: e_score_correction_bias in f32 if its buffer has another dtype; NULL before the first
                            * update */
    uint64_t master_of;    /* version of the bias buffer right after the last update wrote the rounded `master` to it */
} te__gate_module;

/* Returns the router arguments of a gate. `bias` is the tensor e_score_correction_bias, or NULL. */
static te_op_moe_router_fwd_args te__gate_router(const te_moe_config *c, te_tensor *bias) {
    te_op_moe_router_fwd_args y = TE_ZERO;
    bool sigmoid = c->score_func == TE_GATE_SIGMOID || c->score_func == TE_GATE_SIGMOID_WITH_BIAS;
    y.score_function = sigmoid                                 ? TE_SCORE_SIGMOID
                       : c->score_func == TE_GATE_SQRTSOFTPLUS ? TE_SCORE_SQRTSOFTPLUS
                                                               : TE_SCORE_SOFTMAX;
    y.use_pre_softmax =
        c->score_func == TE_GATE_SOFTMAX_WITH_BIAS || (c->score_func == TE_GATE_SOFTMAX && c->softmax_before_topk);
    y.expert_bias = c->score_func != TE_GATE_SOFTMAX ? bias : NULL;
    y.bias_in_probs =
        y.expert_bias && c->score_func == TE_GATE_SIGMOID && c->router_weight_uses_score_correction_bias;
    y.norm_topk_prob = c->norm_topk_prob ? TE_ON : TE_OFF;
    y.scaling_factor = c->route_scale;
    y.topk = c->n_activated_experts;
    if (c->n_expert_groups > 1 && c->score_func != TE_GATE_SOFTMAX && c->score_func != TE_GATE_SQRTSOFTPLUS) {
        y.num_groups = c->n_expert_groups;
        y.group_topk = c->n_limited_groups;
        y.group_best = c->score_func == TE_GATE_SIGMOID && !bias ? 1 : 2;
        y.zero_other_groups = c->rules_of_automodel && c->score_func != TE_GATE_SIGMOID_WITH_BIAS;
    }
    return y;
}
/* Chooses experts. Returns the router weights in `dtype`. Sets *indices to i32 [T, K] or, if s->maps is true, to a
 * routing map u8 [T, E]. */
static te_tensor *te__gate_choose(const te__gate_module *s, te_tensor *logits, te_op_moe_router_fwd_args router,
                                  te_dtype dtype, te_tensor **indices) {
    te_tensor *y = te__empty_2d(logits->te, dtype, te__rows(logits), s->maps ? te__cols(logits) : router.topk);
    *indices =
        s->maps ? te__empty_like(logits, TE_U8) : te__empty_2d(logits->te, TE_I32, te__rows(logits), router.topk);
    if (!y || !*indices) return NULL;
    if (s->maps) {
        router.probs = y;
        router.routing_map = *indices;
    } else {
        router.topk_probs = y;
        router.topk_indices = *indices;
    }
    return te__run_router("gate", logits, &router);
}

/* ---- load and auxiliary loss ---- */

/* Converts the expert ids in `indices` to local ids, i32: the expert id minus `first`. Experts of other ranks and
 * padding get -1. Sets *sizes to the number of ids of each local expert, [count] in `dtype`. */
static te_tensor *te__local_ids(te_tensor *indices, te_tensor *padding, int64_t first, int64_t count, te_dtype dtype,
                                te_tensor **sizes) {
    te_op_moe_local_ids_args args = TE_ZERO;
    args.experts = indices;
    args.dropped = padding;
    args.first = first;
    args.count = count;
    args.local = te__empty_like(indices, TE_I32);
    args.tokens_per_expert = *sizes = te__empty_1d(indices->te, dtype, count);
    return args.local && *sizes && te_op_moe_local_ids(indices->te, &args) == TE_OK ? args.local : NULL;
}
/* Counts the tokens that each expert gets: f32 [E]. */
static te_tensor *te__gate_count(const te__gate_module *s, te_tensor *indices, te_tensor *padding) {
    const int64_t experts = s->config.n_routed_experts;
    te_tensor *counts = NULL;
    if (s->maps) {
        counts = te__empty_1d(indices->te, TE_I32, experts);
        return counts && te__moe_mask_map(indices, counts) ? te__copied(counts, TE_F32) : NULL;
    }
    return te__local_ids(indices, padding, 0, experts, TE_I32, &counts) ? te__copied(counts, TE_F32) : NULL;
}

/* Returns the sum of x over the ranks. The backward pass returns the gradient of the sum as the gradient of x. */
static te_tensor *te__sum_of_ranks(te_group *group, te_tensor *x) {
    te_tensor *y = te__summed(group, x);
    return y ? te__record_same("sum_of_ranks", x, y) : NULL;
}

/* Returns the auxiliary loss that api/experts.h defines. Its factor 1 / N^2 needs the number of tokens N, which only
 * the device knows. So instead the loads are divided by N twice, on the device. Sets *met once the collectives have
 * begun. */
static te_tensor *te__gate_aux_loss(const te__gate_module *s, te_tensor *logits, te_op_moe_router_fwd_args all,
                                    te_tensor *load, te_tensor *padding, bool *met) {
    te_ctx *te = logits->te;
    const te_moe_config *c = &s->config;
    te_fused_moe_aux_loss_desc d = TE_ZERO;
    te_op_axpby_args divide = TE_ZERO;
    te_op_sum_args sum = TE_ZERO;
    te_tensor *scores, *keep, *tokens, *ones;
    bool cp = te__group_size(s->cp_group) > 1;
    int i;
    all.all_scores = true;
    if (!all.bias_in_probs) all.expert_bias = NULL;
    all.num_groups = all.group_topk = all.group_best = 0;
    all.zero_other_groups = false;
    all.scaling_factor = 1.0f;
    if (c->n_activated_experts == 1) all.norm_topk_prob = TE_OFF;
    all.probs = te__empty_2d(te, TE_F32, te__rows(logits), te__cols(logits));
    scores = all.probs ? te__run_router("gate", logits, &all) : NULL;
    ones = te__empty_1d(te, TE_F32, te__rows(logits));
    tokens = te__empty_1d(te, TE_F32, 1);
    if (!scores || !ones || !tokens || te_tensor_fill(ones, 1.0) != TE_OK) return NULL;
    keep = ones;
    if (padding) {
        te_tensor *marks = te__copied(te__alias_1d(padding, 0, TE_U8, te__numel(padding)), TE_F32);
        if (!marks) return NULL;
        keep = te__axpby(ones, marks, 1.0f, -1.0f);
        scores = te__scale_rows(scores, keep);
    }
    sum.x = keep;
    sum.out = tokens;
    if (!scores || !keep || te_op_sum(te, &sum) != TE_OK) return NULL;
    load = te__axpby(load, NULL, 1.0f, 0.0f); /* a copy, because it is overwritten below */
    *met = cp;
    if (cp && (te__all_reduce(s->cp_group, tokens, TE_REDUCE_SUM) != TE_OK ||
               te__all_reduce(s->cp_group, load, TE_REDUCE_SUM) != TE_OK))
        return NULL;
    divide.x = divide.out = load;
    divide.alpha = 1.0f;
    divide.divide_device = tokens;
    for (i = 0; i < 2; i++)
        if (!load || te_op_axpby(te, &divide) != TE_OK) scores = NULL;
    d.total_num_tokens = 1;
    d.num_experts = c->n_routed_experts;
    d.topk = c->n_activated_experts;
    d.coeff = 1.0f;
    scores = scores ? te_fused_moe_aux_loss(scores, load, &d) : NULL;
    return cp ? te__sum_of_ranks(s->cp_group, scores) : scores;
}

/* Backward function of te__attach_loss. The gradient of the router weights stays unchanged. The gradient of the loss is
 * moe_aux_loss_scale. */
static te_result te__attach_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                     te_tensor **dx, const bool *needs) {
    int64_t one = 1;
    (void)state, (void)saved;
    dx[0] = dy[0];
    if (needs[1])
        dx[1] = te_tensor_full(te, TE_F32, 1, &one,
                               te__moe_of(te)->moe_aux_loss_scale != 0.0f ? (double)te__moe_of(te)->moe_aux_loss_scale
                                                                          : 1.0);
    return needs[1] && !dx[1] ? te_error_code(te) : TE_OK;
}
static te_tensor *te__attach_loss(te_tensor *weights, te_tensor *loss) {
    te_tensor *in[2] = {weights, loss},
              *y = te__alias_2d(weights, 0, weights->dtype, te__rows(weights), te__cols(weights));
    return loss ? te__record("aux_loss", y, te__attach_backward, NULL, 0, in, 2, NULL, 0) : NULL;
}
TE_API te_result te_set_moe_aux_loss_scale(te_ctx *te, float scale) {
    if (!te) return TE_ERR_STATE;
    if (!(fabsf(scale) <= 3.4e38f))
        return te__fail(te, TE_ERR_INVALID, "te_set_moe_aux_loss_scale: the scale is %g; a number is needed",
                        (double)scale);
    te__moe_of(te)->moe_aux_loss_scale = scale;
    return TE_OK;
}

/* ---- Gate ---- */

static bool te__gate_has_loss(const te_module *m) {
    return ((const te__gate_module *)m->state)->config.aux_loss_coeff > 0.0f && te_module_is_training(m);
}
/* Tells the other ranks of cp_group that a call of gate m fails before its collectives, so that they do not wait.
 * Returns `result`. */
static te_result te__gate_misses(te_module *m, te_result result) {
    return te__gate_has_loss(m) ? te__refuse(((const te__gate_module *)m->state)->cp_group, TE__ALL_REDUCE, result)
                                : result;
}
/* A function that returns `logits` plus a term, for instance the output of LoRA adapters for x. */
typedef te_tensor *(*te__gate_add_fn)(te_module *m, const te_forward_args *args, te_tensor *x, te_tensor *logits);
static te_result te__gate_route(te_module *m, te_forward_args *args, te__gate_add_fn add, bool *met) {
    te__gate_module *s = (te__gate_module *)m->state;
    te_ctx *te = m->te;
    const te_moe_config *c = &s->config;
    te_tensor *x = te__moe_matrix(m, args->input, c->dim), *weight = te_module_parameter(m, "weight"),
              *row = te_module_parameter(m, "bias");
    te_tensor *bias = te_module_parameter(m, "e_score_correction_bias"), *logits, *weights, *indices = NULL, *padding,
              *load = NULL;
    const te_op_moe_router_fwd_args router = te__gate_router(c, bias);
    bool counts = c->gate_bias_update_factor > 0.0f && te_module_is_training(m), aux = te__gate_has_loss(m);
    te_dtype precision;
    if (!x || te__need_memory(weight, "Gate") != TE_OK || !te__moe_padding(m, args, te__rows(x), &padding))
        return te_error_code(te);
    precision = s->precision ? s->precision : x->dtype;
    logits = te_linear(te_tensor_cast(x, precision), te_tensor_cast(weight, precision), te_tensor_cast(row, precision));
    if (logits && add) logits = add(m, args, x, logits);
    if (!logits) return te_error_code(te);
    weights = te__gate_choose(s, logits, router, c->router_weights_fp32 ? TE_F32 : x->dtype, &indices);
    if (!weights) return te_error_code(te);
    if (counts || aux) load = te__gate_count(s, indices, padding);
    if ((counts || aux) && !load) return te_error_code(te);
    if (counts && !te__quant_of(te)->replaying && !te->warming && /* not again in a checkpoint's recomputation */
        te__axpby_into(s->load, load, s->load, 1.0f, 1.0f) != TE_OK)
        return te_error_code(te);
    if (aux) {
        args->outputs.aux_loss = te__gate_aux_loss(s, logits, router, load, padding, met);
        if (!args->outputs.aux_loss) return te_error_code(te);
        weights = te__attach_loss(weights, te_scale(args->outputs.aux_loss, c->aux_loss_coeff));
    }
    args->outputs.topk_indices = indices;
    return te__output(m, args, weights);
}
static te_result te__gate_run(te_module *m, te_forward_args *args, te__gate_add_fn add) {
    bool met = false;
    te_result result = te__gate_route(m, args, add, &met);
    return result == TE_OK || met ? result : te__gate_misses(m, result);
}
static te_result te__gate_forward(te_module *m, te_forward_args *args) { return te__gate_run(m, args, NULL); }
static te_result te__gate_reset(te_module *m) {
    te__gate_module *s = (te__gate_module *)m->state;
    te_tensor *row = te_module_parameter(m, "bias"), *bias = te_module_parameter(m, "e_score_correction_bias");
    te_result result = te__init_weight(m, te_module_parameter(m, "weight"), &s->init, TE_PARALLEL_NONE, NULL);
    if (result == TE_OK && row) result = te_tensor_fill(row, 0.0);
    if (result == TE_OK && bias) result = te_tensor_fill(bias, 0.0);
    te__free(m->te, s->master);
    s->master = NULL;
    return result;
}
static void te__gate_destroy(te_module *m) {
    te__gate_module *s = (te__gate_module *)m->state;
    te_tensor_release(s->load);
    te__free(m->te, s->master);
}
static const te_module_class te__gate_class = {"Gate", sizeof(te__gate_module), te__gate_forward, te__gate_destroy,
                                               te__gate_reset};

/* Creates a Gate; `c` has passed te__moe_config_ok. */
static te_module *te__gate_create(te_ctx *te, const te_moe_config *c, const te_init *init, bool maps,
                                  te_dtype precision, te_group *cp_group) {
    const int64_t experts = c->n_routed_experts;
    te_module *m = te__module_named(te, &te__gate_class, c->name, "gate");
    te__gate_module *s;
    if (!m) return NULL;
    s = (te__gate_module *)m->state;
    s->config = *c;
    s->config.name = NULL;
    s->init = *init;
    s->maps = maps;
    s->precision = precision;
    s->cp_group = cp_group;
    te__module_shares(m, cp_group);
    te__params_on(m, c->device);
    te__add_weight(m, "weight", c->dtype, experts, c->dim);
    if (c->router_bias) te__add_weight(m, "bias", c->dtype, experts, 0);
    te_module_set_requires_grad(m, !c->no_train_gate);
    te__frame_begin(te);
    if (c->gate_bias_update_factor > 0.0f || c->force_e_score_correction_bias)
        te_module_add_buffer(m, "e_score_correction_bias", te_tensor_zeros(te, TE_F32, 1, &experts));
    if (c->gate_bias_update_factor > 0.0f) {
        s->load = te_tensor_retain(te_tensor_zeros(te, TE_F32, 1, &experts));
        s->load_cleared = te_tensor_version(s->load);
    }
    te__frame_end(te, NULL, 0);
    return te__module_built(m);
}
TE_API te_module *te_gate_create(te_ctx *te, const te_moe_config *config, te_dtype gate_precision, te_group *cp_group) {
    te_moe_config c;
    te_init init = TE_ZERO;
    if (!te__moe_config_ok(te, "te_gate_create", config, &c)) return NULL;
    if (gate_precision && !te__is_float(gate_precision))
        return te__no_module(
            te, TE_ERR_DTYPE,
            "te_gate_create: gate_precision is %s; f32, f16 and bf16 are possible, or 0: the tokens' format",
            te_dtype_name(gate_precision));
    if (c.gate_bias_update_factor > 0.0f && c.no_train_gate)
        return te__no_module(
            te, TE_ERR_INVALID,
            "te_gate_create: gate_bias_update_factor is %g and no_train_gate is set; only the bias of a gate that "
            "is trained is updated: leave one of them 0",
            (double)c.gate_bias_update_factor);
    init.std = c.init_std;
    return te__gate_create(te, &c, &init, false, gate_precision, cp_group);
}

TE_API te_tensor *te_gate_expert_load(te_module *m) {
    te__gate_module *s = m && m->cls == &te__gate_class ? (te__gate_module *)m->state : NULL;
    return s && s->load && te_tensor_version(s->load) != s->load_cleared ? s->load : NULL;
}

/* Moves `bias`, the e_score_correction_bias, by gate_bias_update_factor: up if the expert's load is below the mean,
 * down if above. `host` [E] is scratch memory. */
static te_result te__gate_balance(te_module *m, te_tensor *bias, float *host, float *load) {
    te__gate_module *s = (te__gate_module *)m->state;
    const int n = s->config.n_routed_experts;
    te_tensor *made;
    int64_t shape = n;
    double mean = 0.0;
    te_result result = TE_OK;
    int e;
    if (bias->dtype != TE_F32 && s->master && s->master_of == te_tensor_version(bias))
        memcpy(host, s->master, (size_t)n * sizeof(float));
    else
        result = te_tensor_to_f32(bias, host); /* Here the buffer is f32, or this is the first update, or the program
                                                * has changed the buffer. */
    if (result == TE_OK && bias->dtype != TE_F32 && !s->master) {
        s->master = (float *)te__alloc_zero(m->te, (size_t)n * sizeof(float));
        if (!s->master) return TE_ERR_OUT_OF_MEMORY;
    }
    if (result != TE_OK) return result;
    for (e = 0; e < n; e++) mean += (double)load[e];
    mean /= n;
    for (e = 0; e < n; e++)
        host[e] += s->config.gate_bias_update_factor * ((double)load[e] < mean   ? 1.0f
                                                        : (double)load[e] > mean ? -1.0f
                                                                                 : 0.0f);
    made = te_tensor_from_f32(m->te, TE_F32, 1, &shape, host);
    result = made ? te_tensor_copy(bias, made) : te_error_code(m->te);
    if (result != TE_OK || !s->master) return result;
    memcpy(s->master, host, (size_t)n * sizeof(float));
    s->master_of = te_tensor_version(bias);
    return TE_OK;
}
TE_API te_result te_gate_update_bias(te_module *m, te_group *group) {
    te__gate_module *s = m && m->cls == &te__gate_class ? (te__gate_module *)m->state : NULL;
    te_tensor *bias, *load;
    te_ctx *te;
    float *host;
    size_t bytes;
    te_result result;
    if (!m) return TE_ERR_STATE;
    te = m->te;
    if (!s)
        return m->cls && strcmp(m->cls->name, "FakeBalancedGate") == 0
                   ? TE_OK
                   : te__fail(te, TE_ERR_INVALID, "te_gate_update_bias: \"%s\" is no Gate", m->name);
    bias = te_module_parameter(m, "e_score_correction_bias");
    result = TE_OK;
    if (!s->load || !bias)
        result = te__fail(te, TE_ERR_INVALID,
                          "te_gate_update_bias: gate_bias_update_factor is 0, so nothing updates the bias; a gate with "
                          "a positive one is needed");
    else if (!te_module_is_training(m))
        result = te__fail(te, TE_ERR_STATE,
                          "te_gate_update_bias: the gate is in evaluation; te_module_train(m, true) before it");
    else if (!te_gate_expert_load(m))
        result = te__fail(te, TE_ERR_STATE,
                          "te_gate_update_bias: no tokens have been counted since the last update; a forward pass in "
                          "training comes before it");
    bytes = 2 * (size_t)s->config.n_routed_experts * sizeof(float);
    host = result == TE_OK ? (float *)te__alloc(te, bytes) : NULL;
    if (!host) return te__refuse(group, TE__ALL_REDUCE, te_error_code(te));
    te__frame_begin(te);
    load = te__summed(group, s->load);
    result = load ? te_tensor_to_f32(load, host + s->config.n_routed_experts) : te_error_code(te);
    if (result == TE_OK) result = te__gate_balance(m, bias, host, host + s->config.n_routed_experts);
    if (result == TE_OK) result = te_tensor_fill(s->load, 0.0);
    if (result == TE_OK) s->load_cleared = te_tensor_version(s->load);
    te__frame_end(te, NULL, 0);
    te__free(te, host);
    return result;
}

/* ---- FakeBalancedGate ---- */

typedef struct te__fake_gate {
    te_moe_config config;
    int skip;
    float noise;
    te_tensor *indices, *weights; /* cached result of the last call without noise; used again if size and dtype match */
} te__fake_gate;

/* A stream of random 32-bit words from Philox. */
typedef struct te__draws {
    uint64_t seed, count;
    uint32_t word[4];
} te__draws;
static uint32_t te__draw_word(te__draws *d) {
    if (d->count % 4 == 0) te__philox(d->seed, 0, d->count / 4, d->word);
    return d->word[d->count++ % 4];
}

/* Fills `weights` and `indices`, both [tokens, K]. Without noise, the experts are chosen round robin, and all weights
 * are 1 / K. With noise, experts and weights depend on random numbers drawn from `seed`. */
static te_result te__fake_choice(const te__fake_gate *s, uint64_t seed, int64_t tokens, float *weights,
                                 int32_t *indices) {
    const int topk = s->config.n_activated_experts, experts = s->config.n_routed_experts - s->skip;
    float key[TE_MOE_MAX_EXPERTS], bias[TE_MOE_MAX_EXPERTS], pair[2];
    uint8_t taken[TE_MOE_MAX_EXPERTS];
    te__draws d = TE_ZERO;
    int64_t i, t;
    int e, k;
    if (s->noise <= 0.0f) {
        for (i = 0; i < tokens * topk; i++) {
            weights[i] = 1.0f / (float)topk;
            indices[i] = (int32_t)(i % experts) + s->skip;
        }
        return TE_OK;
    }
    d.seed = seed;
    for (t = 0; t < tokens; t++) {
        float sum = 0.0f, *w = weights + t * topk;
        for (k = 0; k < topk; k++) {
            w[k] = te__uniform01(te__draw_word(&d));
            sum += w[k];
        }
        for (k = 0; k < topk; k++)
            w[k] = (1.0f - s->noise) / (float)topk + s->noise * (sum > 0.0f ? w[k] / sum : 1.0f / (float)topk);
    }
    for (e = 0; e < experts; e++) {
        uint32_t first = te__draw_word(&d), second = te__draw_word(&d);
        te__normal2(first, second, pair);
        bias[e] = pair[0] * 0.1f * s->noise;
    }
    for (t = 0; t < tokens; t++) {
        for (e = 0; e < experts; e++) key[e] = te__uniform01(te__draw_word(&d)) + bias[e];
        te__choose(key, experts, topk, taken, indices + t * topk);
        for (k = 0; k < topk; k++) indices[t * topk + k] += s->skip;
    }
    return TE_OK;
}
/* Sets *seed to a number computed from the first four elements of x. Waits for the device. */
static te_result te__fake_seed(te_tensor *x, uint64_t *seed) {
    float host[4] = {0.0f, 0.0f, 0.0f, 0.0f}, sum;
    int64_t n = te__min(4, te__numel(x));
    te_result result = n ? te_tensor_to_f32(te__alias_1d(x, 0, x->dtype, n), host) : TE_OK;
    sum = (host[0] + host[1] + host[2] + host[3]) * 1e6f;
    *seed = fabsf(sum) < 9e18f ? (uint64_t)(int64_t)sum & 0x7fffffff : 0; /* 0 for NaN, too */
    return result;
}
static te_result te__fake_gate_forward(te_module *m, te_forward_args *args) {
    te__fake_gate *s = (te__fake_gate *)m->state;
    te_ctx *te = m->te;
    te_tensor *x = te__moe_matrix(m, args->input, s->config.dim);
    int64_t tokens = x ? te__rows(x) : 0;
    size_t bytes = (size_t)(tokens * s->config.n_activated_experts + 1) * 4;
    uint64_t seed = 0;
    te_result result = x ? TE_OK : te_error_code(te);
    if (result == TE_OK && s->noise > 0.0f) result = te__fake_seed(x, &seed);
    if (result != TE_OK) return result;
    if (!s->indices || s->noise > 0.0f || te__rows(s->indices) != tokens || s->weights->dtype != x->dtype) {
        float *weights = (float *)te__alloc(te, bytes);
        int32_t *indices = (int32_t *)te__alloc(te, bytes);
        te_tensor *made[2] = {NULL, NULL};
        int64_t shape[2] = {tokens, s->config.n_activated_experts};
        if (weights && indices && te__fake_choice(s, seed, tokens, weights, indices) == TE_OK) {
            made[0] = te_tensor_from_f32(te, x->dtype, 2, shape, weights);
            made[1] = te_tensor_from_host(te, TE_I32, 2, shape, indices);
        }
        te__free(te, weights);
        te__free(te, indices);
        if (!made[0] || !made[1]) return te_error_code(te);
        args->outputs.topk_indices = made[1];
        if (s->noise <= 0.0f && !te->capture) { /* memory of a captured graph must not be cached */
            te_tensor_release(s->weights);
            te_tensor_release(s->indices);
            s->weights = te_tensor_retain(made[0]);
            s->indices = te_tensor_retain(made[1]);
        }
        return te__output(m, args, made[0]);
    }
    args->outputs.topk_indices = te__alias_2d(s->indices, 0, TE_I32, tokens, te__cols(s->indices));
    return te__output(m, args,
                      args->outputs.topk_indices ? te__alias_2d(s->weights, 0, x->dtype, tokens, te__cols(s->weights))
                                                 : NULL);
}
static void te__fake_gate_destroy(te_module *m) {
    te__fake_gate *s = (te__fake_gate *)m->state;
    te_tensor_release(s->weights);
    te_tensor_release(s->indices);
}
static const te_module_class te__fake_gate_class = {"FakeBalancedGate", sizeof(te__fake_gate), te__fake_gate_forward,
                                                    te__fake_gate_destroy, NULL};

TE_API te_module *te_fake_balanced_gate_create(te_ctx *te, const te_moe_config *config, int skip_first_n_experts,
                                               float noise) {
    te_moe_config c;
    te_module *m;
    te__fake_gate *s;
    if (!te__moe_config_ok(te, "te_fake_balanced_gate_create", config, &c)) return NULL;
    if (skip_first_n_experts < 0 || skip_first_n_experts >= c.n_routed_experts ||
        !(noise >= 0.0f && noise <= FLT_MAX))
        return te__no_module(
            te, TE_ERR_INVALID,
            "te_fake_balanced_gate_create: skip_first_n_experts is %d of %d, and noise %g; 0 to %d, and a noise "
            "that is finite and not negative, are needed",
            skip_first_n_experts, c.n_routed_experts, (double)noise, c.n_routed_experts - 1);
    if (noise > 0.0f && c.n_activated_experts > c.n_routed_experts - skip_first_n_experts)
        return te__no_module(
            te, TE_ERR_INVALID,
            "te_fake_balanced_gate_create: with noise, %d different experts of %d are chosen for a token; a "
            "smaller skip_first_n_experts is needed",
            c.n_activated_experts, c.n_routed_experts - skip_first_n_experts);
    m = te__module_named(te, &te__fake_gate_class, c.name, "gate");
    if (!m) return NULL;
    s = (te__fake_gate *)m->state;
    s->config = c;
    s->config.name = NULL;
    s->skip = skip_first_n_experts;
    s->noise = noise;
    return te__module_built(m);
}
