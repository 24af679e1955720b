/* train/adam.c: FusedAdam: states for every parameter of a module tree, one multi-tensor operation a step. Knows the module tree and raw
 * operations; must not know files. */

typedef struct te__adam_param {
    char *path;       /* from the module that the optimizer was made for */
    te_tensor *param; /* these four are retained */
    te_tensor *m, *v; /* f32 */
    te_tensor *master; /* f32, or NULL */
    uint64_t version; /* te__param_version of the value that `master` stands for */
    bool behind;      /* but `master` lacks that value: a capture could not copy it, the next launch does */
    bool listed;      /* takes part in the step under way */
    bool untouched;   /* the parameter's version was still `version` when that step began */
    te_tensor *value; /* quantized: the tensor that its codes are made of in that step (borrowed) */
} te__adam_param;

struct te_optimizer {
    te_ctx *te;
    te_fused_adam_desc desc; /* defaults filled in; lr is the one in force */
    te__adam_param *params;
    int num_params, cap_params;
    te_adam_tensor *list;   /* [num_params], filled anew at each step */
    const te_tensor **grads; /* [num_params] */
    te_tensor *norm, *clip; /* f32 [1], NULL without clipping */
    int64_t steps;
    bool keep_grad, clipped; /* clipped: norm holds a value */
};

/* ---- making one ---- */

/* A parameter may sit in the tree twice (tied weights); it is stepped once. */
static bool te__adam_has(const te_optimizer *opt, const te_tensor *param) {
    int i;
    for (i = 0; i < opt->num_params; i++)
        if (opt->params[i].param == param) return true;
    return false;
}

/* Copies the parameter's value to its master: when the optimizer is made, and after a write from outside. */
static te_result te__adam_take_master(te__adam_param *p) {
    te_ctx *te = p->param->te;
    te_tensor *value = p->param;
    te_result result;
    te__frame_begin(te);
    if (p->param->quantized && te__primary_has_start(p->param)) { /* the value from before quantization */
        value = te__empty_like(p->param, p->param->dtype);
        if (value && te_tensor_copy_from_host(value, p->param->quantized->init_value) != TE_OK) value = NULL;
    } else if (p->param->quantized)
        value = te__quant_value(p->param, TE_F32);
    result = value ? te_tensor_copy(p->master, value) : te_error_code(te);
    te__frame_end(te, NULL, 0);
    if (result == TE_OK) {
        p->version = te__param_version(p->param);
        p->behind = false;
    }
    return result;
}

/* Operations alone quantize these kinds, and keep no reference to the tensor that they read. */
static bool te__adam_shares_value(const te_tensor *param) {
    te__quant_form form = param->quantized->cls->form;
    return form == TE__FORM_CODES || form == TE__FORM_PLAIN;
}

/* Allocates the tensors into which the masters of quantized parameters are rounded before they are quantized. It runs before the masters change, so that
 * the step changes all or nothing. Parameters whose kinds keep no reference share one block. */
static te_result te__adam_prepare_values(te_optimizer *opt) {
    te_ctx *te = opt->te;
    te_tensor *room = NULL;
    int64_t most = 0;
    int i;
    for (i = 0; i < opt->num_params; i++) {
        const te_tensor *x = opt->params[i].param;
        if (opt->params[i].listed && x->quantized && x->dtype != TE_F32 && te__adam_shares_value(x)) most = te__max(most, (int64_t)te_tensor_bytes(x));
    }
    if (most > 0 && !(room = te__empty_1d(te, TE_U8, most))) return te_error_code(te);
    for (i = 0; i < opt->num_params; i++) {
        te__adam_param *p = &opt->params[i];
        if (!p->listed || !p->param->quantized) continue;
        if (p->param->dtype == TE_F32)
            p->value = p->master;
        else if (!te__adam_shares_value(p->param))
            p->value = te__empty_like(p->param, p->param->dtype);
        else if ((p->value = te__tensor_shell(te, p->param->dtype, p->param->ndim, p->param->shape)) != NULL) {
            p->value->buffer = room->buffer;
            if (room->buffer) room->buffer->refs++;
        }
        if (!p->value) return te_error_code(te);
    }
    return TE_OK;
}
/* After the step of the masters: each is rounded to the nominal dtype, as a plain parameter would be, and quantized. */
static te_result te__adam_requantize(te_optimizer *opt) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < opt->num_params && result == TE_OK; i++) {
        te__adam_param *p = &opt->params[i];
        if (!p->listed || !p->param->quantized) continue;
        te__frame_begin(opt->te);
        if (p->value != p->master) result = te_tensor_copy(p->value, p->master);
        if (result == TE_OK) result = te__primary_assign(p->param, p->value);
        te__frame_end(opt->te, NULL, 0);
    }
    return result;
}

static bool te__adam_add(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_optimizer *opt = (te_optimizer *)user;
    te_ctx *te = opt->te;
    te__adam_param *p;
    (void)m;
    if (kind != TE_ENTRY_PARAMETER || !x->requires_grad || te__adam_has(opt, x)) return true;
    if (x->quantized ? !x->quantized->quantizer : !x->buffer || !te__is_contiguous(x)) {
        te__fail(te, TE_ERR_INVALID, "te_fused_adam_create: parameter %s is %s; a plain contiguous tensor, or a quantized one that has its quantizer, is needed", path,
                 x->quantized ? "quantized and has none" : x->buffer ? "strided" : "without memory");
        return false;
    }
    if (x->quantized && opt->desc.no_master_weights) {
        te__fail(te, TE_ERR_INVALID, "te_fused_adam_create: parameter %s is stored quantized, and no_master_weights is set; quantized weights need masters", path);
        return false;
    }
    if (!te__grow(te, (void **)&opt->params, &opt->cap_params, opt->num_params, sizeof(te__adam_param))) return false;
    p = &opt->params[opt->num_params++];
    memset(p, 0, sizeof(*p));
    p->path = te__copy_string(te, path);
    p->param = te_tensor_retain(x);
    p->m = te_tensor_retain(te_tensor_zeros(te, TE_F32, x->ndim, x->shape));
    p->v = te_tensor_retain(te_tensor_zeros(te, TE_F32, x->ndim, x->shape));
    if (!p->path || !p->m || !p->v) return false;
    if ((x->dtype == TE_F32 && !x->quantized) || opt->desc.no_master_weights) return true;
    p->master = te_tensor_retain(te__empty_like(x, TE_F32));
    return p->master && te__adam_take_master(p) == TE_OK;
}

/* Refuses values out of range; NaN is in no range. */
static bool te__adam_in_range(te_ctx *te, const char *name, float value, float below) {
    if (value >= 0.0f && value < below) return true;
    te__fail(te, TE_ERR_INVALID, "te_fused_adam_create: %s is %g; 0 (the default) or more, and less than %g, is possible", name, (double)value,
             (double)below);
    return false;
}
static bool te__adam_desc_ok(te_ctx *te, const te_fused_adam_desc *d) {
    return te__adam_in_range(te, "lr", d->lr, FLT_MAX) && te__adam_in_range(te, "beta1", d->beta1, 1.0f) &&
           te__adam_in_range(te, "beta2", d->beta2, 1.0f) && te__adam_in_range(te, "eps", d->eps, FLT_MAX) &&
           te__adam_in_range(te, "weight_decay", d->weight_decay, FLT_MAX) &&
           te__adam_in_range(te, "max_grad_norm", d->max_grad_norm, FLT_MAX);
}

TE_API void te_optimizer_destroy(te_optimizer *opt) {
    te_ctx *te;
    int i;
    if (!opt) return;
    te = opt->te;
    te->num_optimizers--;
    te__graphs_forget(te, opt, "its optimizer was destroyed");
    for (i = 0; i < opt->num_params; i++) {
        te__adam_param *p = &opt->params[i];
        te__free_string(te, p->path);
        te_tensor_release(p->param);
        te_tensor_release(p->m);
        te_tensor_release(p->v);
        te_tensor_release(p->master);
    }
    te_tensor_release(opt->norm);
    te_tensor_release(opt->clip);
    te__free(te, opt->list, (size_t)opt->num_params * sizeof(te_adam_tensor));
    te__free(te, (void *)opt->grads, (size_t)opt->num_params * sizeof(te_tensor *));
    te__free(te, opt->params, (size_t)opt->cap_params * sizeof(te__adam_param));
    te__free(te, opt, sizeof(*opt));
}

TE_API te_optimizer *te_fused_adam_create(te_ctx *te, te_module *m, const te_fused_adam_desc *desc) {
    te_fused_adam_desc zero = TE_ZERO;
    te_optimizer *opt;
    bool ok;
    if (!te || !m) return NULL;
    if (!desc) desc = &zero;
    if (te_module_ctx(m) != te) {
        te__fail(te, TE_ERR_INVALID, "te_fused_adam_create: module %s belongs to another context", te_module_name(m));
        return NULL;
    }
    if (!te__adam_desc_ok(te, desc)) return NULL;
    if (te->capture) {
        te__refuse_capture(te, "te_fused_adam_create", "make it before te_graph_begin");
        return NULL;
    }
    opt = (te_optimizer *)te__alloc_zero(te, sizeof(te_optimizer));
    if (!opt) return NULL;
    opt->te = te;
    te->num_optimizers++;
    opt->desc = *desc;
    if (opt->desc.lr == 0.0f) opt->desc.lr = 1e-3f;
    if (opt->desc.beta1 == 0.0f) opt->desc.beta1 = 0.9f;
    if (opt->desc.beta2 == 0.0f) opt->desc.beta2 = 0.999f;
    if (opt->desc.eps == 0.0f) opt->desc.eps = 1e-8f;
    te__frame_begin(te);
    ok = te_module_visit_tensors(m, te__adam_add, opt);
    if (ok && opt->desc.max_grad_norm > 0.0f) {
        opt->norm = te_tensor_retain(te__empty_1d(te, TE_F32, 1));
        opt->clip = te_tensor_retain(te__empty_1d(te, TE_F32, 1));
        ok = opt->norm && opt->clip;
    }
    if (ok) {
        opt->list = (te_adam_tensor *)te__alloc_zero(te, (size_t)opt->num_params * sizeof(te_adam_tensor));
        opt->grads = (const te_tensor **)te__alloc_zero(te, (size_t)opt->num_params * sizeof(te_tensor *));
        ok = opt->list && opt->grads;
    }
    te__frame_end(te, NULL, 0);
    if (ok) return opt;
    te_optimizer_destroy(opt);
    return NULL;
}

/* ---- stepping ---- */

/* A main gradient is where weight-gradient GEMMs add; what came in by the tape (other uses of the same weight) is moved there. NULL: the
 * parameter took no part in this step. */
static te_result te__adam_grad(te_tensor *param, te_tensor **grad) {
    te_tensor *main_grad = te_tensor_main_grad(param);
    te_op_axpby_args add = TE_ZERO;
    te_result result;
    *grad = te_tensor_grad(param);
    if (!main_grad) return TE_OK;
    if (*grad) {
        add.x = add.out = main_grad;
        add.y = *grad;
        add.alpha = add.beta = 1.0f;
        result = te_op_axpby(param->te, &add);
        if (result != TE_OK) return result;
        if (!param->te->warming) te_tensor_zero_grad(param);
    }
    *grad = main_grad;
    return TE_OK;
}

static void te__adam_forget(te_tensor *param) {
    te_tensor_zero_grad(param);
    if (te_tensor_main_grad(param)) te_tensor_fill(te_tensor_main_grad(param), 0.0);
}

TE_API void te_optimizer_zero_grad(te_optimizer *opt) {
    int i;
    if (!opt) return;
    for (i = 0; i < opt->num_params; i++) te__adam_forget(opt->params[i].param);
}

/* Has the capture under way written the parameter? Then each launch writes it, and each captured step must copy it to the master. */
static bool te__adam_written_inside(const te_tensor *param) {
    const te__buffer *b = te__param_buffer(param);
    return b && b->written == b->te->capture->id;
}

/* Appends parameters to the `n` that are listed: all, or those of two dimensions and more (`matrices`), or the others. */
static te_result te__adam_collect(te_optimizer *opt, bool matrices, bool all, int *n) {
    int i;
    for (i = 0; i < opt->num_params; i++) {
        te__adam_param *p = &opt->params[i];
        te_tensor *grad;
        te_result result;
        bool stale;
        if (!all && (p->param->ndim >= 2) != matrices) continue;
        result = te__adam_grad(p->param, &grad);
        if (result != TE_OK) return result;
        if (!grad) continue;
        if (opt->te->capture && grad != te_tensor_main_grad(p->param) && grad->buffer && !grad->buffer->arena)
            return te__refuse_capture(opt->te, "te_optimizer_step with a gradient from before, which will be elsewhere next time",
                                      "forget gradients before te_graph_begin and capture te_backward too, or use te_tensor_set_main_grad");
        stale = p->version != te__param_version(p->param);
        if (p->master && (stale || p->behind) && !opt->te->warming) {
            if (opt->te->capture && !(stale && te__adam_written_inside(p->param)))
                p->behind = true;
            else
                result = te__adam_take_master(p);
            if (result != TE_OK) return result;
        }
        p->listed = true;
        opt->grads[*n] = grad;
        opt->list[*n].grad = grad;
        opt->list[*n].param = p->param->quantized ? p->master : p->param; /* te__adam_requantize writes a quantized parameter */
        opt->list[*n].m = p->m;
        opt->list[*n].v = p->v;
        opt->list[*n].master = p->param->quantized ? NULL : p->master;
        ++*n;
    }
    return TE_OK;
}

/* A graph's record of the steps that it holds. */
enum { TE__ADAM_WORDS = 2 /* of the graph's state: lr, the two bias corrections */ };
typedef struct te__adam_steps {
    int steps;
    short word[(int)TE__GRAPH_WORDS / (int)TE__ADAM_WORDS]; /* of each step */
    bool clipped; /* before the capture */
} te__adam_steps;
/* Behind it: whether each parameter takes part. */
static bool *te__adam_listed(te__adam_steps *s) { return (bool *)(s + 1); }

static te_result te__adam_before(te_graph *g, void *owner, void *data) {
    te_optimizer *opt = (te_optimizer *)owner;
    te__adam_steps *s = (te__adam_steps *)data;
    const bool *listed = te__adam_listed(s);
    te_result result = TE_OK;
    int i;
    for (i = 0; i < opt->num_params && result == TE_OK; i++) {
        te__adam_param *p = &opt->params[i];
        p->untouched = p->version == te__param_version(p->param);
        if (p->master && listed[i] && (p->behind || !p->untouched)) result = te__adam_take_master(p);
    }
    for (i = 0; i < s->steps; i++) {
        float numbers[2 * TE__ADAM_WORDS] = TE_ZERO;
        numbers[0] = opt->desc.lr;
        numbers[1] = te__adam_unbias(opt->desc.no_bias_correction, opt->desc.beta1, opt->steps + 1 + i);
        numbers[2] = te__adam_unbias(opt->desc.no_bias_correction, opt->desc.beta2, opt->steps + 1 + i);
        memcpy(&g->word[s->word[i]], numbers, sizeof(numbers));
    }
    return result;
}
static void te__adam_after(te_graph *g, void *owner, void *data) {
    te_optimizer *opt = (te_optimizer *)owner;
    te__adam_steps *s = (te__adam_steps *)data;
    const bool *listed = te__adam_listed(s);
    int i;
    (void)g;
    for (i = 0; i < opt->num_params; i++)
        if (listed[i] || opt->params[i].untouched) opt->params[i].version = te__param_version(opt->params[i].param);
    opt->steps += s->steps;
    opt->clipped = opt->clip != NULL;
}
static void te__adam_captured(te_graph *g, void *owner, void *data) {
    te_optimizer *opt = (te_optimizer *)owner;
    te__adam_steps *s = (te__adam_steps *)data;
    (void)g;
    opt->steps -= s->steps;
    opt->clipped = s->clipped;
}

/* In a capture: the part that this optimizer has in the graph, with room for one more step; its numbers as tensors. */
static te_result te__adam_capture(te_optimizer *opt, te__adam_steps **steps, te_tensor **lr, te_tensor **unbias) {
    te_graph *g = opt->te->capture;
    te__graph_part *part = te__graph_find_part(g, opt);
    int word = te__graph_take_words(g, TE__ADAM_WORDS);
    if (word < 0) return te_error_code(opt->te);
    if (!part) {
        part = te__graph_add_part(g, opt, sizeof(te__adam_steps) + (size_t)opt->num_params * sizeof(bool));
        if (!part) return TE_ERR_OUT_OF_MEMORY;
        part->before = te__adam_before;
        part->after = te__adam_after;
        part->captured = te__adam_captured;
        ((te__adam_steps *)part->data)->clipped = opt->clipped;
    }
    *steps = (te__adam_steps *)part->data;
    (*steps)->word[(*steps)->steps] = (short)word;
    *lr = te__graph_view(g, TE_F32, 8 * word, 1);
    *unbias = te__graph_view(g, TE_F32, 8 * word + 4, 2);
    return *lr && *unbias ? TE_OK : te_error_code(opt->te);
}

static te_result te__adam_run(te_optimizer *opt, int count, int num_undecayed, const te_tensor *lr, const te_tensor *unbias) {
    te_op_adam_args args = TE_ZERO;
    if (count == 0) return TE_OK;
    args.tensors = opt->list;
    args.num_tensors = count;
    args.num_undecayed = num_undecayed;
    args.lr = opt->desc.lr;
    args.beta1 = opt->desc.beta1;
    args.beta2 = opt->desc.beta2;
    args.eps = opt->desc.eps;
    args.weight_decay = opt->desc.weight_decay;
    args.step = opt->steps + 1;
    args.no_adam_w_mode = opt->desc.no_adam_w_mode;
    args.no_bias_correction = opt->desc.no_bias_correction;
    args.grad_scale = opt->clip;
    args.lr_device = lr;
    args.bias_correction = unbias;
    return te_op_adam(opt->te, &args);
}

static te_result te__adam_step(te_optimizer *opt) {
    te_ctx *te = opt->te;
    te__adam_steps *captured = NULL;
    te_tensor *lr = NULL, *unbias = NULL;
    te_result result;
    bool split;
    int i, n = 0, decayed;
    split = opt->desc.decay_matrices_only && opt->desc.weight_decay > 0.0f;
    for (i = 0; i < opt->num_params; i++) {
        opt->params[i].listed = false;
        opt->params[i].untouched = opt->params[i].version == te__param_version(opt->params[i].param);
    }
    result = te__adam_collect(opt, true, !split, &n);
    decayed = n;
    if (split && result == TE_OK) result = te__adam_collect(opt, false, false, &n);
    if (opt->clip && n > 0 && result == TE_OK) {
        te_op_l2norm_args norm = TE_ZERO;
        norm.tensors = opt->grads;
        norm.num_tensors = n;
        norm.norm = opt->norm;
        norm.clip = opt->clip;
        norm.max_norm = opt->desc.max_grad_norm;
        result = te_op_l2norm(te, &norm);
    }
    if (te->capture && result == TE_OK) result = te__adam_capture(opt, &captured, &lr, &unbias);
    if (result == TE_OK) result = te__adam_prepare_values(opt); /* the last allocation: no step is left half done for want of memory */
    if (result == TE_OK) result = te__adam_run(opt, n, n - decayed, lr, unbias);
    if (result == TE_OK) result = te__adam_requantize(opt);
    /* Also a step that failed gives parameters a new version; it has written master and parameter alike, or neither. A parameter that took no part
     * may lie in one memory with others that did. */
    for (i = 0; i < opt->num_params; i++)
        if ((opt->params[i].listed && !te->warming) || opt->params[i].untouched) opt->params[i].version = te__param_version(opt->params[i].param);
    if (te->warming || result != TE_OK) return result; /* a warm-up leaves counts and gradients as they were */
    if (captured) {
        captured->steps++;
        for (i = 0; i < opt->num_params; i++) te__adam_listed(captured)[i] = te__adam_listed(captured)[i] || opt->params[i].listed;
    }
    opt->steps++;
    opt->clipped = opt->clip && n > 0;
    if (!opt->keep_grad) te_optimizer_zero_grad(opt);
    return TE_OK;
}
TE_API te_result te_optimizer_step(te_optimizer *opt) {
    te__rng_state before;
    te_ctx *te;
    te_result result;
    bool entered;
    if (!opt) return TE_ERR_STATE;
    te = opt->te;
    before = te__rng_now(te);
    if (te__num_deferred(te) > 0)
        te__warn(te, "te_optimizer_step: %d weight gradients wait for te_backward_dw (delay_wgrad_compute): this step goes without them", te__num_deferred(te));
    result = te->error_code == TE_OK ? te__device_enter(te, &entered) : te->error_code;
    if (result == TE_OK) {
        te__frame_begin(te);
        result = te__adam_step(opt);
        te__frame_end(te, NULL, 0);
        te__device_leave(te, entered);
    }
    if (result == TE_OK) {
        te__step_ends(te);
    } else {
        te__step_fails(te);
        te__rng_back(te, before);
    }
    return result;
}

/* ---- looking and setting ---- */

TE_API void te_optimizer_keep_grad(te_optimizer *opt, bool keep) {
    if (opt) opt->keep_grad = keep;
}
TE_API void te_optimizer_set_lr(te_optimizer *opt, float lr) {
    if (opt) opt->desc.lr = lr;
}
TE_API float te_optimizer_lr(const te_optimizer *opt) { return opt ? opt->desc.lr : 0.0f; }
TE_API int64_t te_optimizer_steps(const te_optimizer *opt) { return opt ? opt->steps : 0; }
TE_API te_tensor *te_optimizer_grad_norm(const te_optimizer *opt) { return opt && opt->clipped ? opt->norm : NULL; }

/* The states, by the names that they have in a file. Return false to stop. */
typedef bool (*te__state_visit_fn)(void *user, const char *name, te_tensor *tensor);
static bool te__optimizer_visit(te_optimizer *opt, te__state_visit_fn visit, void *user) {
    static const char *const suffix[3] = {"exp_avg", "exp_avg_sq", "master"};
    char name[640];
    int i, k;
    for (i = 0; opt && i < opt->num_params; i++) {
        te_tensor *state[3];
        state[0] = opt->params[i].m;
        state[1] = opt->params[i].v;
        state[2] = opt->params[i].master;
        for (k = 0; k < 3; k++) {
            snprintf(name, sizeof(name), "optimizer/%s.%s", opt->params[i].path, suffix[k]);
            if (state[k] && !visit(user, name, state[k])) return false;
        }
    }
    return true;
}
/* Called after a checkpoint was loaded: its masters have the values of its parameters. */
static void te__optimizer_restored(te_optimizer *opt, int64_t steps, float lr) {
    int i;
    opt->steps = steps;
    opt->desc.lr = lr;
    for (i = 0; i < opt->num_params; i++) {
        te__adam_param *p = &opt->params[i];
        p->version = te__param_version(p->param);
        p->behind = false;
    }
}
