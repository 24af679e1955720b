/* functions/elements.c: differentiable functions, each with its backward function above it. This file must not depend
 * on modules. */

/* ---- plumbing ---- */

/* Records a node. Entries of `inputs` and `saved` may be NULL. */
static te_result te__record_outputs(const char *name, te_tensor *const *outputs, int num_outputs,
                                    te_backward_fn backward, const void *state, size_t state_size,
                                    void (*release)(te_ctx *te, void *state), te_tensor *const *inputs, int num_inputs,
                                    te_tensor *const *saved, int num_saved) {
    te_node_desc node = TE_ZERO;
    node.name = name;
    node.inputs = inputs;
    node.num_inputs = num_inputs;
    node.outputs = outputs;
    node.num_outputs = num_outputs;
    node.saved = saved;
    node.num_saved = num_saved;
    node.state = state;
    node.state_size = state_size;
    node.backward = backward;
    node.release = release;
    return te__record_always(outputs[0]->te, &node, false);
}
/* Records a node with one output and returns this output, or NULL on failure. */
static te_tensor *te__record_owning(const char *name, te_tensor *y, te_backward_fn backward, const void *state,
                                    size_t state_size, void (*release)(te_ctx *te, void *state),
                                    te_tensor *const *inputs, int num_inputs, te_tensor *const *saved, int num_saved) {
    return te__record_outputs(name, &y, 1, backward, state, state_size, release, inputs, num_inputs, saved,
                              num_saved) == TE_OK
               ? y
               : NULL;
}
/* Records a tape node whose state needs no release function. Returns NULL if y is NULL. */
static te_tensor *te__record(const char *name, te_tensor *y, te_backward_fn backward, const void *state,
                             size_t state_size, te_tensor *const *inputs, int num_inputs, te_tensor *const *saved,
                             int num_saved) {
    return y && te__record_outputs(name, &y, 1, backward, state, state_size, NULL, inputs, num_inputs, saved,
                                   num_saved) == TE_OK
               ? y
               : NULL;
}

/* Checks that the operand `with` belongs to x's context. If `with` is NULL, returns `optional` and records no error. A
 * required operand is NULL only if an earlier call has failed, and that call has recorded the error. */
static bool te__operand(const te_tensor *x, const te_tensor *with, bool optional, const char *function) {
    if (!with) return optional;
    return te__same_ctx(with, x->te, function);
}

/* Checks that p has one entry for each column of x. Accepts NULL. */
static bool te__fits_columns(const te_tensor *x, const te_tensor *p, const char *name, const char *what) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!p || te__numel(p) == te__cols(x)) return true;
    return te__not_ok(x->te, TE_ERR_SHAPE, "%s: the input is %s and the %s %s; it needs the input's last size", name,
                      te__shape_text(x, a), what, te__shape_text(p, b));
}

/* Returns x as a matrix, recorded on the tape. Returns NULL if x is NULL. */
static te_tensor *te__view_2d(te_tensor *x, int64_t rows, int64_t cols) {
    const int64_t shape[2] = {rows, cols};
    return x ? te_tensor_view(x, 2, shape) : NULL;
}
static te_tensor *te__zeros_2d(te_ctx *te, te_dtype dtype, int64_t rows, int64_t cols) {
    const int64_t shape[2] = {rows, cols};
    return te_tensor_zeros(te, dtype, 2, shape);
}
/* Returns a copy of x in the format `dtype`, without history on the tape. Returns NULL if x is NULL. */
static te_tensor *te__copied(const te_tensor *x, te_dtype dtype) {
    te_tensor *y = x ? te__empty_like(x, dtype) : NULL;
    return y ? te__checked(y, te_tensor_copy(y, x)) : NULL;
}
/* The format and shape of a tensor. A backward pass allocates a gradient from a te__like, so the tensor need not be
 * saved. */
typedef struct te__like {
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS];
} te__like;
static te__like te__like_of(const te_tensor *x) {
    te__like like;
    like.dtype = x->dtype;
    like.ndim = x->ndim;
    memcpy(like.shape, x->shape, sizeof(like.shape));
    return like;
}
static te_tensor *te__empty_of(te_ctx *te, const te__like *x) {
    return te_tensor_empty(te, x->dtype, x->ndim, x->shape);
}

/* Returns the gradient, in the format `dtype`, of a parameter [N] that was broadcast over the rows of dy. */
static te_tensor *te__bias_grad(te_tensor *dy, te_dtype dtype) {
    te_op_column_sum_args args = TE_ZERO;
    te_tensor *db = te__empty_1d(dy->te, dtype, te__cols(dy));
    if (!db) return NULL;
    args.x = dy;
    args.out = db;
    return te_op_column_sum(dy->te, &args) == TE_OK ? db : NULL;
}

/* ---- add, scale ---- */

/* Writes alpha * x + beta * y to `out`. y may be NULL. */
static te_result te__axpby_into(te_tensor *out, const te_tensor *x, const te_tensor *y, float alpha, float beta) {
    te_op_axpby_args args = TE_ZERO;
    args.x = x;
    args.y = y;
    args.out = out;
    args.alpha = alpha;
    args.beta = beta;
    return te_op_axpby(out->te, &args);
}
static te_tensor *te__axpby(const te_tensor *x, const te_tensor *y, float alpha, float beta) {
    te_tensor *out = te__empty_like(x, x->dtype);
    return out ? te__checked(out, te__axpby_into(out, x, y, alpha, beta)) : NULL;
}

static te_result te__add_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                  te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)saved, (void)needs;
    dx[0] = dx[1] = dy[0];
    return TE_OK;
}
TE_API te_tensor *te_add(te_tensor *x, te_tensor *y) {
    te_tensor *in[2], *out;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!x || !te__operand(x, y, false, "te_add") || !te__need_float(x, "te_add")) return NULL;
    if (!te__same_shape(x, y) || x->dtype != y->dtype)
        return te__no_tensor(x->te, te__same_shape(x, y) ? TE_ERR_DTYPE : TE_ERR_SHAPE,
                             "te_add: %s %s and %s %s; both must be alike", te_dtype_name(x->dtype),
                             te__shape_text(x, a), te_dtype_name(y->dtype), te__shape_text(y, b));
    in[0] = te_tensor_contiguous(x);
    in[1] = te_tensor_contiguous(y);
    if (!in[0] || !in[1]) return NULL;
    out = te__axpby(in[0], in[1], 1.0f, 1.0f);
    return te__record("add", out, te__add_backward, NULL, 0, in, 2, NULL, 0);
}

static te_result te__scale_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                    te_tensor **dx, const bool *needs) {
    (void)saved, (void)needs;
    dx[0] = te__axpby(dy[0], NULL, *(const float *)state, 0.0f);
    return dx[0] ? TE_OK : te_error_code(te);
}
TE_API te_tensor *te_scale(te_tensor *x, float factor) {
    if (!x || !te__need_float(x, "te_scale")) return NULL;
    x = te_tensor_contiguous(x);
    return x ? te__record("scale", te__axpby(x, NULL, factor, 0.0f), te__scale_backward, &factor, sizeof(factor), &x, 1,
                          NULL, 0)
             : NULL;
}

/* ---- products ---- */

/* Writes x * y to `out`, rounded to the format of `out`. y has the shape of x, or one number for each row of x. */
static te_tensor *te__mul_into(te_tensor *out, te_tensor *x, te_tensor *y) {
    te_op_mul_args args = TE_ZERO;
    args.x = x;
    args.y = y;
    args.out = out;
    return out ? te__checked(out, te_op_mul(x->te, &args)) : NULL;
}
static te_result te__mul_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                  te_tensor **dx, const bool *needs) {
    te_tensor *x = saved[0], *y = saved[1], *g = te_tensor_contiguous(dy[0]);
    (void)state;
    if (!g) return te_error_code(te);
    if (needs[0]) dx[0] = te__mul_into(te__empty_like(x, x->dtype), g, y);
    if (needs[1] && te__same_shape(x, y)) {
        dx[1] = te__mul_into(te__empty_like(y, y->dtype), g, x);
    } else if (needs[1]) {
        te_op_row_dot_args args = TE_ZERO;
        args.x = g;
        args.y = x;
        args.out = te__empty_like(y, y->dtype);
        if (args.out && te_op_row_dot(te, &args) == TE_OK) dx[1] = args.out;
    }
    return (needs[0] && !dx[0]) || (needs[1] && !dx[1]) ? te_error_code(te) : TE_OK;
}
/* Returns true if y has one number for each row of x: x's shape without the last size, or with a last size of 1. */
static bool te__is_per_row(const te_tensor *x, const te_tensor *y) {
    int i, leading = x->ndim - 1;
    if (leading < 0 || (y->ndim != leading && !(y->ndim == x->ndim && y->shape[leading] == 1))) return false;
    for (i = 0; i < leading && x->shape[i] == y->shape[i]; i++) {}
    return i == leading;
}
TE_API te_tensor *te_mul(te_tensor *x, te_tensor *y) {
    te_tensor *in[2];
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!x || !te__operand(x, y, false, "te_mul") || !te__need_float(x, "te_mul") || !te__need_float(y, "te_mul"))
        return NULL;
    if (!te__same_shape(x, y) && !te__is_per_row(x, y))
        return te__no_tensor(
            x->te, TE_ERR_SHAPE,
            "te_mul: %s and %s; the second has the first one's shape, or one number for each of its rows: its "
            "leading sizes, with or "
            "without a last one of 1",
            te__shape_text(x, a), te__shape_text(y, b));
    in[0] = te_tensor_contiguous(x);
    in[1] = te_tensor_contiguous(y);
    if (!in[0] || !in[1]) return NULL;
    return te__record("mul", te__mul_into(te__empty_like(in[0], x->dtype), in[0], in[1]), te__mul_backward, NULL, 0, in,
                      2, in, 2);
}

/* ---- sums ---- */

typedef struct te__sum_state {
    te__like x;
    float scale;
} te__sum_state;
static te_result te__sum_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                  te_tensor **dx, const bool *needs) {
    const te__sum_state *s = (const te__sum_state *)state;
    te_op_axpby_args args = TE_ZERO;
    te_tensor *ones = te_tensor_full(te, s->x.dtype, s->x.ndim, s->x.shape, 1.0);
    (void)saved, (void)needs;
    if (!ones) return te_error_code(te);
    args.x = args.out = ones;
    args.alpha = s->scale;
    args.alpha_device = dy[0];
    dx[0] = ones;
    return te_op_axpby(te, &args);
}
static te_tensor *te__sum(te_tensor *x, float scale, const char *name) {
    te__sum_state state = TE_ZERO;
    te_op_sum_args args = TE_ZERO;
    te_tensor *y;
    if (!te__need_float(x, name)) return NULL;
    x = te_tensor_contiguous(x);
    y = x ? te__empty_1d(x->te, TE_F32, 1) : NULL;
    if (!y) return NULL;
    args.x = x;
    args.out = y;
    args.scale = scale;
    y = te__checked(y, te_op_sum(x->te, &args));
    state.x = te__like_of(x);
    state.scale = scale;
    return te__record(name, y, te__sum_backward, &state, sizeof(state), &x, 1, NULL, 0);
}
TE_API te_tensor *te_sum_all(te_tensor *x) { return x ? te__sum(x, 1.0f, "te_sum_all") : NULL; }
TE_API te_tensor *te_mean_all(te_tensor *x) {
    if (!x) return NULL;
    if (te__numel(x) == 0) return te__no_tensor(x->te, TE_ERR_SHAPE, "te_mean_all: the tensor is empty");
    return te__sum(x, te__floats_divide(1.0, (double)te__numel(x)), "te_mean_all");
}

/* ---- concatenation ---- */

typedef struct te__concat_state {
    int dim;
    int64_t size[1]; /* one entry for each input, then -1 */
} te__concat_state;
static size_t te__concat_bytes(int n) { return sizeof(te__concat_state) + (size_t)n * sizeof(int64_t); }

static te_result te__concat_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                     te_tensor **dx, const bool *needs) {
    const te__concat_state *s = (const te__concat_state *)state;
    int64_t at = 0;
    int i;
    (void)saved;
    for (i = 0; at < dy[0]->shape[s->dim]; at += s->size[i++]) {
        if (!needs[i]) continue;
        dx[i] = te_tensor_contiguous(te_tensor_narrow(dy[0], s->dim, at, s->size[i]));
        if (!dx[i]) return te_error_code(te);
    }
    for (; s->size[i] == 0; i++) { /* empty inputs at the end of the list */
        if (needs[i]) dx[i] = te_tensor_narrow(dy[0], s->dim, at, 0);
        if (needs[i] && !dx[i]) return te_error_code(te);
    }
    return TE_OK;
}

static te_result te__concat_fits(const te_tensor *x, const te_tensor *y, int dim) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    bool same = x->ndim == y->ndim;
    int i;
    for (i = 0; same && i < x->ndim; i++) same = i == dim || x->shape[i] == y->shape[i];
    if (same && x->dtype == y->dtype) return TE_OK;
    return te__fail(x->te, same ? TE_ERR_DTYPE : TE_ERR_SHAPE,
                    "te_concat: %s %s and %s %s along dimension %d; formats and all other sizes must be alike",
                    te_dtype_name(x->dtype), te__shape_text(x, a), te_dtype_name(y->dtype), te__shape_text(y, b), dim);
}

static te_tensor *te__concat_copy(te_tensor *const *x, int n, te__concat_state *s) {
    te_tensor *y;
    int64_t shape[TE_MAX_DIMS], at = 0;
    int i;
    memcpy(shape, x[0]->shape, sizeof(shape));
    for (i = 0; i < n; i++) at += s->size[i] = x[i]->shape[s->dim];
    shape[s->dim] = at;
    y = te_tensor_empty(x[0]->te, x[0]->dtype, x[0]->ndim, shape);
    for (i = 0, at = 0; i < n && y; at += s->size[i++])
        if (s->size[i] > 0) y = te__checked(y, te_tensor_copy(te_tensor_narrow(y, s->dim, at, s->size[i]), x[i]));
    return y;
}

TE_API te_tensor *te_concat(te_tensor *const *x, int n, int dim) {
    te__concat_state *s;
    te_tensor *y = NULL;
    te_ctx *te;
    int i;
    for (i = 0; x && i < n && !x[i]; i++) {}
    if (!x || i >= n) return NULL; /* no tensor, so no context that could record an error */
    te = x[i]->te;
    for (i = 0; i < n; i++) {
        /* if an input is NULL because of an earlier error, te__fail keeps that error */
        if (!x[i]) te__fail(te, TE_ERR_STATE, "te_concat: tensor %d of %d is NULL", i + 1, n);
        if (!x[i] || !te__operand(x[0], x[i], false, "te_concat") || !te__need_float(x[i], "te_concat")) return NULL;
    }
    if (dim < 0) dim += x[0]->ndim;
    if (dim < 0 || dim >= x[0]->ndim)
        return te__no_tensor(te, TE_ERR_INVALID, "te_concat: dimension %d of tensors that have %d",
                             dim < 0 ? dim - x[0]->ndim : dim, x[0]->ndim);
    for (i = 1; i < n; i++)
        if (te__concat_fits(x[0], x[i], dim) != TE_OK) return NULL;
    s = (te__concat_state *)te__alloc_zero(te, te__concat_bytes(n));
    if (!s) return NULL;
    s->dim = dim;
    s->size[n] = -1; /* ends the list for the backward pass */
    te__frame_begin(te);
    y = te__concat_copy(x, n, s);
    y = te__frame_return(te, te__record("concat", y, te__concat_backward, s, te__concat_bytes(n), x, n, NULL, 0));
    te__free(te, s);
    return y;
}

/* ---- norms ---- */

static te_result te__norm_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                   te_tensor **dx, const bool *needs) {
    const te_norm_options *o = (const te_norm_options *)state;
    const bool rms = o->normalization == TE_RMSNORM;
    te_norm_bwd_args args = TE_ZERO;
    te_tensor *so_far;
    te_result result;
    args.dy = te_tensor_contiguous(dy[0]);
    args.x = saved[0];
    args.gamma = saved[1];
    args.mean = saved[2];
    args.rstd = saved[3];
    args.norm = *o;
    args.add = so_far = needs[0] ? te__grad_so_far(te, 0, saved[0]) : NULL; /* the gradient of the residual branch */
    args.rounded = true;
    args.dx = so_far ? te__grad_sum_place(so_far) : te__empty_like(saved[0], saved[0]->dtype);
    args.dgamma = dx[1] = te__empty_like(saved[1], saved[1]->dtype);
    if (!rms && needs[2]) args.dbeta = dx[2] = te__empty_like(saved[1], saved[1]->dtype);
    if (!args.dy || !args.dx || !dx[1]) return te_error_code(te);
    result = rms ? te_op_rmsnorm_bwd(te, &args) : te_op_layernorm_bwd(te, &args);
    if (so_far && result == TE_OK) te__grad_sum_done(te, 0, args.dx);
    if (!so_far) dx[0] = args.dx;
    return result;
}

/* Returns the normalized rows, quantized if `spec` is given. As in TransformerEngine, delayed scaling quantizes the
 * unrounded f32 result. Other recipes first round to x's format. For `rounded` see te_op_rmsnorm_fwd. */
static te_tensor *te__norm(te_tensor *x, te_tensor *gamma, te_tensor *beta, const te_norm_options *o, bool rounded,
                           const te__quant_spec *spec) {
    const bool rms = o->normalization == TE_RMSNORM;
    const char *name = rms ? "te_rmsnorm" : "te_layernorm";
    te_norm_fwd_args args = TE_ZERO;
    te__quant_out out = TE_ZERO;
    te_tensor *y;
    te_ctx *te;
    te_result result;
    if (!x || !te__operand(x, gamma, false, name) || !te__operand(x, beta, true, name) || !te__need_float(x, name))
        return NULL;
    if (!te__fits_columns(x, gamma, name, "weight") || !te__fits_columns(x, beta, name, "bias")) return NULL;
    te = x->te;
    x = te_tensor_contiguous(x);
    te__frame_begin(te);
    if (x) out = te__quant_out_open(te, x->dtype, x->ndim, x->shape, spec);
    y = out.y;
    if (!y) return te__frame_return(te, NULL);
    args.x = x;
    args.gamma = gamma;
    args.beta = beta;
    args.y = out.data;
    args.mean = rms ? NULL : te__empty_1d(te, TE_F32, te__rows(x));
    args.rstd = te__empty_1d(te, TE_F32, te__rows(x));
    args.norm = *o;
    args.rounded = rounded;
    args.y_col = out.col;
    args.scale = out.scale;
    args.scale_inv = out.scale_inv;
    args.amax = out.amax;
    result = !args.rstd ? te_error_code(te) : rms ? te_op_rmsnorm_fwd(te, &args) : te_op_layernorm_fwd(te, &args);
    result = te__quant_out_close(&out, spec, result);
    if (result == TE_OK) {
        te_tensor *in[3] = {x, gamma, beta}, *saved[4] = {x, gamma, args.mean, args.rstd};
        y = te__record(name, y, te__norm_backward, o, sizeof(*o), in, 3, saved, 4);
    }
    return te__frame_return(te, result == TE_OK ? y : NULL);
}
static te_tensor *te__norm_with(te_tensor *x, te_tensor *weight, te_tensor *bias, te_normalization normalization,
                                float eps, bool zero_centered_gamma) {
    te_norm_options o;
    o.normalization = normalization;
    o.eps = eps;
    o.zero_centered_gamma = zero_centered_gamma;
    return te__norm(x, weight, bias, &o, false, NULL);
}
TE_API te_tensor *te_layernorm(te_tensor *x, te_tensor *weight, te_tensor *bias, float eps, bool zero_centered_gamma) {
    return te__norm_with(x, weight, bias, TE_LAYERNORM, eps, zero_centered_gamma);
}
TE_API te_tensor *te_rmsnorm(te_tensor *x, te_tensor *weight, float eps, bool zero_centered_gamma) {
    return te__norm_with(x, weight, NULL, TE_RMSNORM, eps, zero_centered_gamma);
}

static te_result te__l2_normalization_backward(te_ctx *te, const void *state, te_tensor *const *saved,
                                               te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    te_op_l2normalize_bwd_args args = TE_ZERO;
    (void)state, (void)needs;
    args.dy = te_tensor_contiguous(dy[0]);
    args.x = saved[0];
    args.rnorm = saved[1];
    args.dx = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    return args.dy && dx[0] ? te_op_l2normalize_bwd(te, &args) : te_error_code(te);
}
TE_API te_tensor *te_l2_normalization(te_tensor *x, float eps) {
    te_op_l2normalize_fwd_args args = TE_ZERO;
    te_tensor *saved[2], *y;
    if (!x || !te__need_float(x, "te_l2_normalization")) return NULL;
    x = te_tensor_contiguous(x);
    y = x ? te__empty_like(x, x->dtype) : NULL;
    if (!y) return NULL;
    te__frame_begin(x->te);
    args.x = saved[0] = x;
    args.y = y;
    args.rnorm = saved[1] = te__empty_1d(x->te, TE_F32, te__rows(x));
    args.eps = eps;
    y = args.rnorm ? te__checked(y, te_op_l2normalize_fwd(x->te, &args)) : NULL;
    return te__frame_return(x->te,
                            te__record("l2_normalization", y, te__l2_normalization_backward, NULL, 0, &x, 1, saved, 2));
}

/* ---- dropout ---- */

typedef struct te__dropout_state {
    float p;
    int64_t run;
    uint64_t seed, offset; /* if saved[0] is not NULL, it is a random state: its seed replaces `seed`, and its offset
                            * is added to `offset` */
    te_dtype bias_dtype;
} te__dropout_state;

static te_result te__dropout_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                      te_tensor **dx, const bool *needs) {
    const te__dropout_state *s = (const te__dropout_state *)state;
    te_tensor *g = te_tensor_contiguous(dy[0]), *kept = g;
    if (!g) return te_error_code(te);
    if (s->p > 0.0f && (needs[0] || needs[1])) {
        te_op_dropout_add_bwd_args args = TE_ZERO;
        args.dy = g;
        args.dx = kept = te__empty_like(g, g->dtype);
        args.p = s->p;
        args.run = s->run;
        args.seed = s->seed;
        args.offset = s->offset;
        args.rng = saved[0];
        if (!kept || te_op_dropout_add_bwd(te, &args) != TE_OK) return te_error_code(te);
    }
    dx[0] = kept;
    dx[2] = g;
    if (needs[1]) dx[1] = te__bias_grad(kept, s->bias_dtype);
    return needs[1] && !dx[1] ? te_error_code(te) : TE_OK;
}

/* Returns dropout(x + bias) + residual. `run` is the number of consecutive elements that are kept or dropped
 * together. */
static te_tensor *te__bias_dropout_add(te_tensor *x, te_tensor *bias, te_tensor *residual, float p, int64_t run) {
    te_op_dropout_add_fwd_args args = TE_ZERO;
    te__dropout_state state;
    te__rng_state before;
    te__draw draw = TE_ZERO;
    te_tensor *y;
    te_ctx *te;
    if (!x || !te__operand(x, bias, true, "te_bias_dropout_add") ||
        !te__operand(x, residual, true, "te_bias_dropout_add") || !te__need_float(x, "te_bias_dropout_add"))
        return NULL;
    if (!te__fits_columns(x, bias, "te_bias_dropout_add", "bias")) return NULL;
    if (!bias && !residual && p == 0.0f) return x;
    te = x->te;
    x = te_tensor_contiguous(x);
    residual = te_tensor_contiguous(residual);
    y = x ? te__empty_like(x, x->dtype) : NULL;
    if (!y) return NULL;
    state.p = args.p = p;
    state.run = args.run = run;
    before = te__rng_now(te);
    if (p > 0.0f) draw = te__rng_draw(te, 1);
    state.seed = draw.seed;
    state.offset = draw.offset;
    state.bias_dtype = bias ? bias->dtype : TE_DTYPE_NONE;
    args.x = x;
    args.bias = bias;
    args.residual = residual;
    args.y = y;
    args.seed = state.seed;
    args.offset = state.offset;
    args.rng = draw.rng;
    y = te__checked(y, te_op_dropout_add_fwd(te, &args));
    te_tensor *in[3] = {x, bias, residual};
    y = te__record("bias_dropout_add", y, te__dropout_backward, &state, sizeof(state), in, 3, &draw.rng, 1);
    if (!y) te__rng_back(te, before);
    return y;
}
TE_API te_tensor *te_bias_dropout_add(te_tensor *x, te_tensor *bias, te_tensor *residual, float p) {
    return te__bias_dropout_add(x, bias, residual, p, 1);
}
TE_API te_tensor *te_dropout(te_tensor *x, float p) { return te_bias_dropout_add(x, NULL, NULL, p); }
TE_API te_tensor *te_drop_path(te_tensor *x, te_tensor *residual, float p) {
    int64_t paths = x && x->ndim ? x->shape[0] : 1;
    return te__bias_dropout_add(x, NULL, residual, p, x && paths ? te__max(te__numel(x) / paths, 1) : 1);
}

/* ---- embedding ---- */

typedef struct te__embedding_state {
    int64_t rows, vocab_size, vocab_start;
    bool from_end;
} te__embedding_state;

static te_result te__embedding_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                        te_tensor **dx, const bool *needs) {
    const te__embedding_state *s = (const te__embedding_state *)state;
    te_op_embedding_bwd_args args = TE_ZERO;
    (void)needs;
    args.ids = saved[0];
    args.dy = te_tensor_contiguous(dy[0]);
    args.dtable = dx[0] = te__empty_2d(te, dy[0]->dtype, s->rows, te__cols(dy[0]));
    args.vocab_size = s->vocab_size;
    args.vocab_start = s->vocab_start;
    args.from_end = s->from_end;
    return args.dy && dx[0] ? te_op_embedding_bwd(te, &args) : te_error_code(te);
}
static te_tensor *te__embedding(te_tensor *table, te_tensor *ids, int64_t vocab_size, int64_t vocab_start,
                                bool from_end, const char *who) {
    te_op_embedding_fwd_args args = TE_ZERO;
    te__embedding_state state = TE_ZERO;
    te_tensor *y;
    int64_t shape[TE_MAX_DIMS];
    char text[TE__SHAPE_TEXT], more[TE__SHAPE_TEXT];
    if (!table || !te__operand(table, ids, false, who)) return NULL;
    if (table->ndim != 2 || ids->ndim + 1 > TE_MAX_DIMS)
        return te__no_tensor(
            table->te, TE_ERR_SHAPE,
            "%s: the table is %s and the ids %s; [vocabulary, width] and at most %d dimensions are needed", who,
            te__shape_text(table, text), te__shape_text(ids, more), TE_MAX_DIMS - 1);
    ids = te_tensor_contiguous(ids);
    if (!ids) return NULL;
    memcpy(shape, ids->shape, sizeof(shape));
    shape[ids->ndim] = table->shape[1];
    y = te_tensor_empty(table->te, table->dtype, ids->ndim + 1, shape);
    if (!y) return NULL;
    args.ids = ids;
    args.table = table;
    args.y = y;
    args.vocab_size = state.vocab_size = vocab_size;
    args.vocab_start = state.vocab_start = vocab_start;
    args.from_end = state.from_end = from_end;
    state.rows = table->shape[0];
    y = te__checked(y, te_op_embedding_fwd(table->te, &args));
    return te__record("embedding", y, te__embedding_backward, &state, sizeof(state), &table, 1, &ids, 1);
}
TE_API te_tensor *te_embedding_lookup(te_tensor *table, te_tensor *ids) {
    return te__embedding(table, ids, 0, 0, false, "te_embedding_lookup");
}
TE_API te_tensor *te_vocab_parallel_embedding_lookup(te_tensor *table, te_tensor *ids, int64_t vocab_size,
                                                     int64_t vocab_start) {
    return te__embedding(table, ids, vocab_size, vocab_start, false, "te_vocab_parallel_embedding_lookup");
}

/* ---- indices ---- */

TE_API te_tensor *te_argmax(te_tensor *x) {
    te_op_argmax_args args = TE_ZERO;
    const int64_t one = 1;
    if (!x || !te__need_float(x, "te_argmax")) return NULL;
    x = te_tensor_contiguous(x);
    if (!x) return NULL;
    args.x = x;
    args.out = te_tensor_empty(x->te, TE_I32, te__max(x->ndim - 1, 1), x->ndim > 1 ? x->shape : &one);
    return args.out ? te__checked(args.out, te_op_argmax(x->te, &args)) : NULL;
}

/* ---- losses ---- */

typedef struct te__loss_state {
    te_op_cross_entropy_fwd_args args; /* the tensors in here are not read */
    bool reduce, inplace;
} te__loss_state;

static te_result te__cross_entropy_backward(te_ctx *te, const void *state, te_tensor *const *saved,
                                            te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te__loss_state *s = (const te__loss_state *)state;
    te_op_cross_entropy_bwd_args args = TE_ZERO;
    (void)needs;
    args.logits = saved[0];
    args.target = saved[1];
    args.lse = saved[2];
    args.count = s->reduce ? saved[3] : NULL;
    args.dloss = te_tensor_contiguous(dy[0]);
    args.label_smoothing = s->args.label_smoothing;
    args.ignore_index = s->args.ignore_index;
    args.vocab_size = s->args.vocab_size;
    args.vocab_start = s->args.vocab_start;
    args.dlogits = dx[0] = s->inplace ? te__alias(saved[0]) : te__empty_like(saved[0], saved[0]->dtype);
    return args.dloss && dx[0] ? te_op_cross_entropy_bwd(te, &args) : te_error_code(te);
}

/* Computes the loss and the LSE of each row. If ranks share the columns, every rank merges the same list of all partial
 * results. */
static te_result te__cross_entropy_rows(te_group *group, te_op_cross_entropy_fwd_args *args, te_tensor *rows,
                                        te_tensor *lse) {
    te_ctx *te = rows->te;
    te_op_cross_entropy_merge_args merge = TE_ZERO;
    te_tensor *all;
    te_result result;
    if (te__group_size(group) == 1) {
        args->loss = rows;
        args->lse = lse;
        return te_op_cross_entropy_fwd(te, args);
    }
    args->parts = te__empty_1d(te, TE_F32, 3 * te__numel(rows));
    merge.parts = all = te__empty_1d(te, TE_F32, 3 * te__numel(rows) * te__group_size(group));
    merge.target = args->target;
    merge.loss = rows;
    merge.lse = lse;
    merge.label_smoothing = args->label_smoothing;
    merge.ignore_index = args->ignore_index;
    merge.vocab_size = args->vocab_size;
    result = args->parts && all ? te_op_cross_entropy_fwd(te, args) : te_error_code(te);
    result = result == TE_OK ? te__all_gather(group, args->parts, all) : te__refuse(group, TE__ALL_GATHER, result);
    return result == TE_OK ? te_op_cross_entropy_merge(te, &merge) : result;
}

TE_API te_tensor *te_cross_entropy(te_tensor *logits, te_tensor *target, const te_cross_entropy_desc *desc) {
    te_cross_entropy_desc zero = TE_ZERO;
    te__loss_state state = TE_ZERO;
    te_op_cross_entropy_fwd_args *args = &state.args;
    te_tensor *rows, *lse, *loss;
    te_group *group;
    te_ctx *te;
    te_result result;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!logits || !te__operand(logits, target, false, "te_cross_entropy") ||
        !te__need_float(logits, "te_cross_entropy"))
        return NULL;
    if (!desc) desc = &zero;
    group = desc->dist_process_group;
    te = logits->te;
    if (te__group_allowed(te, group, "te_cross_entropy", "dist_process_group") != TE_OK) return NULL;
    if (te__numel(target) != te__rows(logits))
        return te__no_tensor(
            te, TE_ERR_SHAPE,
            "te_cross_entropy: the logits are %s and the target is %s; one id for each row of logits is needed",
            te__shape_text(logits, a), te__shape_text(target, b));
    logits = te_tensor_contiguous(logits);
    target = te_tensor_contiguous(target);
    if (!logits || !target) return NULL;
    state.reduce = !desc->no_reduce_loss;
    state.inplace = desc->inplace_backward;
    te__frame_begin(te);
    args->logits = logits;
    args->target = target;
    rows = te__empty_1d(te, TE_F32, te__rows(logits));
    lse = te__empty_1d(te, TE_F32, te__rows(logits));
    args->count = te__empty_1d(te, TE_F32, 1);
    args->label_smoothing = desc->label_smoothing;
    args->ignore_index = desc->has_ignore_index ? desc->ignore_index : -100;
    args->vocab_size = te__cols(logits) * te__group_size(group);
    args->vocab_start = te__cols(logits) * te__group_rank(group);
    loss = state.reduce ? te__empty_1d(te, TE_F32, 1) : rows;
    result = rows && lse && args->count && loss ? te__cross_entropy_rows(group, args, rows, lse) : te_error_code(te);
    if (result == TE_OK && state.reduce) { /* mean: sum / max(count, 1) */
        te_op_sum_args sum = TE_ZERO;
        te_op_axpby_args divide = TE_ZERO;
        sum.x = rows;
        sum.out = loss;
        result = te_op_sum(te, &sum);
        divide.x = divide.out = loss;
        divide.alpha = 1.0f;
        divide.divide_device = args->count;
        if (result == TE_OK) result = te_op_axpby(te, &divide);
    }
    if (result == TE_OK) {
        te_tensor *saved[4] = {logits, target, lse, args->count};
        loss =
            te__record("cross_entropy", loss, te__cross_entropy_backward, &state, sizeof(state), &logits, 1, saved, 4);
    }
    return te__frame_return(te, result == TE_OK ? loss : NULL);
}

static te_result te__mse_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                  te_tensor **dx, const bool *needs) {
    te_op_mse_bwd_args args = TE_ZERO;
    (void)state;
    args.x = saved[0];
    args.target = saved[1];
    args.dloss = dy[0];
    args.dx = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    if (!dx[0] || te_op_mse_bwd(te, &args) != TE_OK) return te_error_code(te);
    if (needs[1]) dx[1] = te_tensor_cast(te__axpby(dx[0], NULL, -1.0f, 0.0f), saved[1]->dtype);
    return needs[1] && !dx[1] ? te_error_code(te) : TE_OK;
}
TE_API te_tensor *te_mse_loss(te_tensor *x, te_tensor *target) {
    te_op_mse_fwd_args args = TE_ZERO;
    te_tensor *in[2], *y;
    if (!x || !te__operand(x, target, false, "te_mse_loss") || !te__need_float(x, "te_mse_loss")) return NULL;
    in[0] = te_tensor_contiguous(x);
    in[1] = te_tensor_contiguous(target);
    y = in[0] && in[1] ? te__empty_1d(x->te, TE_F32, 1) : NULL;
    if (!y) return NULL;
    args.x = in[0];
    args.target = in[1];
    args.loss = y;
    return te__record("mse_loss", te__checked(y, te_op_mse_fwd(x->te, &args)), te__mse_backward, NULL, 0, in, 2, in, 2);
}
