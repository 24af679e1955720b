/* train/states.c: the states that an optimizer keeps for a parameter, and the master copies of parameters. This file
 * may call raw operations (te_op_...). It must not depend on the kind of optimizer, or on when a step is made. */

typedef struct te__train_state {
    te_fused_adam_methods fused_adam; /* set by te_fused_adam_set_methods; a NULL function stands for te.h's own one */
} te__train_state;
static const te__slot te__train_slot = {sizeof(te__train_state)};
static te__train_state *te__train_of(const te_ctx *te) {
    return (te__train_state *)te__slot_of(te, &te__train_slot);
}
static const te__room te__train_room = TE__ROOM(&te__train_slot, NULL, NULL);

/* One state of a parameter. f32 and bf16 states hold the values. f16 and e4m3 states hold the values divided by
 * `scale`, f32 [1]. A u8 state [elements, 2] holds remainders: the 16 bits of each f32 master that the bf16 parameter
 * lacks. */
typedef struct te__opt_state {
    te_tensor *x, *scale; /* retained; NULL: the state has none */
    te_tensor *unit;      /* f32 [1] with the value 1, or NULL; te_optimizer_state reports it as the scale of a 16-bit
                           * state without `scale` */
} te__opt_state;
enum { TE__OPT_FIRST, TE__OPT_SECOND, TE__OPT_MASTER, TE__OPT_STATES };

typedef struct te__opt_param {
    char *path;       /* from the module for which the optimizer was made */
    te_tensor *param; /* retained */
    te__shard *shard; /* how ranks shared the parameter when its states were made (a reference), or NULL. With it,
                       * states and gradients are those of this rank's slice */
    te_dtype dtype;   /* format of the parameter when its states were made */
    te__opt_state state[TE__OPT_STATES];
    uint64_t version; /* what te__value_version returned when the master was last made equal to the parameter */
    bool behind;      /* the master does not have the value of the parameter yet; the next step or graph launch
                       * copies the value */
    bool listed;      /* takes part in the current step */
    bool untouched;   /* when the current step began, the version of the parameter was still `version` */
    bool started;     /* has taken part in a step */
    int group;        /* index of the parameter group whose hyperparameters apply */
    te_tensor *stepped; /* only for quantized parameters: the f32 tensor that the step writes instead of the parameter
                         * (borrowed) */
    te_tensor *value;   /* only for quantized parameters: the tensor that the step quantizes into new codes
                         * (borrowed) */
} te__opt_param;

/* One step of an optimizer: the number of parameters in it, and the values that it reads on the device. */
typedef struct te__opt_step {
    int count, num_undecayed;
    const te_tensor *lr, *numbers; /* learning rates f32 [groups] and bias corrections [groups, 2], or NULL */
    const te_tensor *number;       /* f32 [1]: number of the step, skipped steps counted; or NULL */
    const te_tensor *grad_scale, *found_inf; /* f32 [1], or NULL. grad_scale is the factor of all gradients. A found_inf
                                              * of 1 skips the step */
} te__opt_step;

/* The tensors of a step under loss scaling. */
typedef struct te__opt_scaling {
    const te_tensor *inv_scale; /* f32 [1]; NULL: gradients are already unscaled and checked for overflows */
    te_tensor *any_inf;         /* f32 [1]: not 0 once a step has an overflow */
} te__opt_scaling;

/* One kind of optimizer. */
typedef struct te__opt_class {
    const char *create; /* name of the function that makes one, for messages */
    const char *state[TE__OPT_STATES]; /* names of the states; NULL: no such state */
    te_result (*run)(te_optimizer *opt, const te__opt_step *step);
    bool has_betas; /* the optimizer has beta1 and beta2; their bias correction 1 / (1 - beta^step) changes from step to
                     * step */
    /* checks whether a capture may contain a step of this parameter; NULL: always allowed */
    te_result (*may_capture)(te_optimizer *opt, const te__opt_param *p);
    bool has_methods; /* the context's te_fused_adam_methods make the states */
} te__opt_class;

/* The options that all optimizers have. */
typedef struct te__opt_options {
    float lr, max_grad_norm;
    bool no_master_weights, decay_matrices_only, use_decoupled_grad, store_param_remainders, zero_grads;
    bool no_bias_correction;
    te_dtype dtype[TE__OPT_STATES]; /* formats of the states; TE_DTYPE_NONE: f32 if the parameter has a master, else the
                                     * dtype of the parameter */
} te__opt_options;

/* The hyperparameters of a parameter group. Group 0 has the values of the optimizer's desc. */
typedef struct te__opt_group {
    float lr; /* learning rate of the group if own_lr is true; otherwise options.lr applies */
    bool own_lr;
    float beta1, beta2, eps, weight_decay;
} te__opt_group;

/* The values that loss scaling keeps for an optimizer. */
typedef struct te__opt_skips {
    te_tensor *found, *skipped; /* f32 [1] each. found: 1 if the last step had an overflow, else 0. skipped: how many
                                 * earlier steps had one */
    te_tensor *betas;           /* f32 [groups, 2]: beta1 and beta2 of each group; NULL if the optimizer has no betas */
    bool pending;               /* the step that set `found` is complete, but `found` is not yet added to `skipped` */
    bool unscaled;              /* te_grad_scaler_unscale has already set `found` for the next step */
    const te_graph *unscaled_in; /* the capture during which te_grad_scaler_unscale was called, or NULL */
} te__opt_skips;

struct te_optimizer {
    te_ctx *te;
    const te__opt_class *cls;
    te__opt_options options; /* lr is the current one */
    te__opt_group *groups;   /* [num_groups] */
    int num_groups;
    te__opt_skips skips;
    union {
        te_fused_adam_desc adam;
        te_fused_sgd_desc sgd;
    } desc; /* defaults filled in */
    te__opt_param *params;
    int num_params, cap_params;
    void *list;      /* the tensor list of the multi-tensor operation: [num_params] entries of entry_size bytes; each
                      * step fills it again */
    size_t entry_size;
    int *order;      /* [num_params]: the indices of the parameters that take part in a step */
    const te_tensor **grads; /* [num_params], in the order of `order` */
    te__spread *spread;      /* [2 num_params], in the order of `order`: what other ranks have; te__opt_kinds */
    bool spreads;            /* ranks have slices or parts of a parameter */
    bool sharded;            /* a parameter is sharded */
    bool told;               /* the ranks of sharded parameters know already that this step has failed */
    te_tensor *norm, *clip;  /* f32 [1] each: the norm of the gradients, and the clipping factor; NULL without
                              * clipping */
    te_tensor *started;      /* u8 [num_params]: a copy of the flags `started` of all parameters, for saving and
                              * loading; NULL if no step depends on these flags */
    uint8_t *flags;          /* [num_params]: the flags of `started` on the host, for saving and loading; or NULL */
    int64_t steps;
    bool keep_grad, clipped; /* clipped: norm holds a value */
};

/* ---- states ---- */

static bool te__opt_is_scaled(te_dtype dtype) { return dtype == TE_F16 || dtype == TE_F8E4M3; }

/* Allocates the tensors of a state of the parameter `like`. The elements are zero if `zeros` is true, else
 * uninitialised. */
static bool te__opt_state_make(te__opt_state *s, te_dtype dtype, bool scaled, bool zeros, const te_tensor *like) {
    const int64_t one[1] = {1}, pairs[2] = {like->shard ? like->shard->length : te__numel(like), 2};
    int64_t own[TE_MAX_DIMS];
    const int own_ndim = te__own_shape(like, own), ndim = dtype == TE_U8 ? 2 : own_ndim;
    const int64_t *shape = dtype == TE_U8 ? pairs : own;
    s->x = te_tensor_retain(zeros ? te_tensor_zeros(like->te, dtype, ndim, shape)
                                  : te_tensor_empty(like->te, dtype, ndim, shape));
    if (scaled) s->scale = te_tensor_retain(te_tensor_full(like->te, TE_F32, 1, one, 1.0));
    return s->x && (!scaled || s->scale);
}
static void te__opt_state_close(te__opt_state *s) {
    te_tensor_release(s->x);
    te_tensor_release(s->scale);
    te_tensor_release(s->unit);
    memset(s, 0, sizeof(*s));
}
static bool te__opt_is_remainders(const te__opt_state *s) { return s->x && s->x->dtype == TE_U8; }

/* Returns true if the parameter was written after its value was last copied to the master. */
static bool te__opt_is_stale(const te__opt_param *p) { return p->version != te__value_version(p->param); }

/* Writes x * scale, a number on the device, to `out`. */
static te_result te__times_into(te_tensor *out, const te_tensor *x, const te_tensor *scale) {
    te_op_axpby_args args = TE_ZERO;
    args.x = x;
    args.alpha = 1.0f;
    args.alpha_device = scale;
    args.out = out;
    return te_op_axpby(x->te, &args);
}

/* Stores `value` in the state. `value` may have any float format. If the state has a scale, computes a new one. */
static te_result te__opt_store(te__opt_state *s, const te_tensor *value) {
    te_op_amax_args most = TE_ZERO;
    te_op_store_state_args store = TE_ZERO;
    te_result result;
    if (!s->scale) return te_tensor_copy(s->x, value);
    store.x = most.x = value;
    store.amax = most.amax = te__empty_1d(value->te, TE_F32, 1);
    store.state = s->x;
    store.scale = s->scale;
    if (!most.amax) return te_error_code(value->te);
    result = te_op_amax(value->te, &most);
    return result == TE_OK ? te_op_store_state(value->te, &store) : result;
}
/* Writes the values of the state to the f32 tensor `out`, multiplied by the state's scale if it has one. */
static te_result te__opt_unscale(const te__opt_state *s, te_tensor *out) {
    te_op_fp8_dequantize_args decode = TE_ZERO;
    if (!s->scale) return te_tensor_copy(out, s->x);
    if (s->x->dtype == TE_F8E4M3) {
        decode.q = s->x;
        decode.scale_inv = s->scale;
        decode.y = out;
        return te_op_fp8_dequantize(out->te, &decode);
    }
    return te__times_into(out, s->x, s->scale);
}

/* Joins the bf16 parameter `upper` and the remainders in `s` into the f32 tensor `master`. If `split` is true, splits
 * `master` into `upper` and `s` instead. */
static te_result te__opt_remainders(te_tensor *upper, te__opt_state *s, te_tensor *master, bool split) {
    const size_t n = (size_t)te__numel(upper), bytes = 2 * n * sizeof(float) + 1;
    float *whole = (float *)te__alloc(upper->te, bytes);
    uint16_t *param = (uint16_t *)(whole + n), *remainder = param + n;
    te_result result = whole ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    size_t i;
    if (result == TE_OK && split) result = te_tensor_to_host(master, whole);
    if (result == TE_OK && !split) result = te_tensor_to_host(upper, param);
    if (result == TE_OK && !split) result = te_tensor_to_host(s->x, remainder);
    for (i = 0; i < n && result == TE_OK; i++) {
        if (split) te__split_master(whole[i], &param[i], &remainder[i]);
        else whole[i] = te__join_master(param[i], remainder[i]);
    }
    if (result == TE_OK && !split) result = te_tensor_copy_from_host(master, whole);
    if (result == TE_OK && split) result = te_tensor_copy_from_host(upper, param);
    if (result == TE_OK && split) result = te_tensor_copy_from_host(s->x, remainder);
    te__free(upper->te, whole);
    return result;
}

/* ---- masters ---- */

/* Returns this rank's part of the value of a parameter that is stored quantized, f32. If its unit keeps slices alone,
 * all ranks must call it. */
static te_tensor *te__opt_decoded(te_tensor *x) {
    te__shard_set *set = x->shard ? x->shard->set : NULL;
    const bool gathers = set && !te__shards_are_whole(set);
    te_tensor *whole = !gathers || te__shards_gather(set) == TE_OK ? te__quant_value(x, TE_F32) : NULL;
    if (gathers && set->whole) te__shards_drop(set); /* after an error too, so that all ranks gather it again */
    return whole && x->shard ? te__shard_of_whole(x->shard, whole) : whole;
}
/* Copies the value of a parameter to its master. Called when the optimizer is made, and after other code has written
 * the parameter. */
static te_result te__opt_take_master(te__opt_param *p) {
    te_ctx *te = p->param->te;
    te_tensor *value = NULL;
    te_result result;
    te__frame_begin(te);
    if (!p->param->quantized) value = te__own_value(p->param);
    else if (te__primary_has_start(p->param)) { /* take the value from before quantization */
        const char *start = (const char *)p->param->quantized->init_value;
        value = te__own_empty(p->param, p->param->dtype);
        if (p->shard) start += p->shard->start * te__dtype_size(p->param->dtype);
        if (value && te_tensor_copy_from_host(value, start) != TE_OK) value = NULL;
    } else
        value = te__opt_decoded(p->param);
    if (!value) result = te_error_code(te);
    else if (te__opt_is_remainders(&p->state[TE__OPT_MASTER])) result = te_tensor_fill(p->state[TE__OPT_MASTER].x, 0.0);
    else result = te__opt_store(&p->state[TE__OPT_MASTER], value);
    te__frame_end(te, NULL, 0);
    if (result == TE_OK) {
        p->version = te__value_version(p->param);
        p->behind = false;
    }
    return result;
}

/* Returns true if te.h's own operations quantize this parameter. These operations read te__opt_param.value and keep no
 * reference to it. So the `value` tensors of several parameters can share memory. */
static bool te__opt_shares_value(const te_tensor *param) {
    te__quant_form form = param->quantized->cls->form;
    return form == TE__FORM_CODES || form == TE__FORM_PLAIN;
}

/* Sets `stepped` and `value` of each quantized parameter in the step. The step writes `stepped` (f32), rounds it into
 * `value`, and quantizes `value`. Parameters may share the memory of `value`, and use it one after another. This
 * function is called before a master changes. So if memory runs out here, all masters and parameters are unchanged. */
static te_result te__opt_prepare_values(te_optimizer *opt, bool may_skip) {
    te_ctx *te = opt->te;
    te_tensor *room = NULL;
    int64_t most = -1;
    int i;
    for (i = 0; i < opt->num_params; i++) {
        const te_tensor *x = opt->params[i].param;
        if (opt->params[i].listed && x->quantized && !x->shard && x->dtype != TE_F32 && te__opt_shares_value(x))
            most = te__max(most, (int64_t)te_tensor_bytes(x));
    }
    if (most >= 0 && !(room = te__empty_1d(te, TE_U8, most))) return te_error_code(te);
    for (i = 0; i < opt->num_params; i++) {
        te__opt_param *p = &opt->params[i];
        if (!p->listed || !p->param->quantized) continue;
        if (p->shard) { /* te__opt_publish quantizes the slice */
            p->stepped = p->value = p->state[TE__OPT_MASTER].x;
            continue;
        }
        p->stepped = p->state[TE__OPT_MASTER].scale ? te__empty_like(p->param, TE_F32) : p->state[TE__OPT_MASTER].x;
        if (p->param->dtype == TE_F32)
            p->value = p->stepped;
        else if (!te__opt_shares_value(p->param))
            p->value = te__empty_like(p->param, p->param->dtype);
        else if ((p->value = te__tensor_shell(te, p->param->dtype, p->param->ndim, p->param->shape)) != NULL) {
            p->value->buffer = room->buffer;
            if (room->buffer) room->buffer->refs++;
        }
        if (!p->stepped || !p->value) return te_error_code(te);
        /* a skipped step leaves this value unchanged */
        if (may_skip && p->state[TE__OPT_MASTER].scale &&
            te__opt_unscale(&p->state[TE__OPT_MASTER], p->stepped) != TE_OK)
            return te_error_code(te);
    }
    return TE_OK;
}
/* Rounds the new masters to the nominal dtype, and quantizes them. If found_inf (f32 [1] or NULL) holds 1, the codes
 * stay unchanged. */
static te_result te__opt_requantize(te_optimizer *opt, const te_tensor *found_inf) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < opt->num_params && result == TE_OK; i++) {
        te__opt_param *p = &opt->params[i];
        if (!p->listed || !p->param->quantized || p->shard) continue;
        te__frame_begin(opt->te);
        if (p->value != p->stepped) result = te_tensor_copy(p->value, p->stepped);
        if (result == TE_OK) result = te__primary_assign(p->param, p->value, found_inf);
        te__frame_end(opt->te, NULL, 0);
    }
    return result;
}
/* te__opt_entry_param returns the tensor that the optimizer's operation updates for parameter p. te__opt_entry_master
 * returns the state that holds the master of this tensor. If the tensor has no master, the state's `x` is NULL. */
static te_tensor *te__opt_entry_param(const te__opt_param *p) {
    return p->param->quantized ? p->stepped : te__own_value(p->param);
}
static const te__opt_state *te__opt_entry_master(const te__opt_param *p) {
    static const te__opt_state none = TE_ZERO;
    return p->param->quantized && !p->state[TE__OPT_MASTER].scale ? &none : &p->state[TE__OPT_MASTER];
}
