/* functions/activations.c: activations as differentiable functions, with a plain, quantized or row-scaled result. This
 * file must not depend on modules. */

/* The backward pass computes the codes, the amax and the column sums of dx. Each of the three comes either from the f32
 * gradient or from the rounded gradient. The rounded gradient is the f32 gradient, rounded to the dtype of x. */
typedef enum te__act_rounding {
    TE__ACT_ROUNDED,       /* codes, amax and column sums come from the rounded gradient */
    TE__ACT_UNROUNDED_AMAX, /* codes and column sums come from the rounded gradient, the amax from the f32 gradient */
    TE__ACT_UNROUNDED      /* codes, amax and column sums come from the f32 gradient */
} te__act_rounding;

/* Extra results of an activation's backward pass: the gradient of a bias (column sums of dx), and the quantized dx. */
typedef struct te__act_grad {
    te_tensor *bias; /* the bias that is already added to x; NULL: the bias gradient is not computed */
    const te__quant_call *quant; /* NULL: dx stays plain */
    te__act_rounding rounding;
    int gemm, usage;
} te__act_grad;

typedef struct te__act_state {
    te_activation activation;
    te_activation_params params;
    te_dtype bias_dtype;
    te__quant_call quant;
    te__act_rounding rounding;
    int gemm, usage;
} te__act_state;

static void te__act_release(te_ctx *te, void *state) {
    (void)te;
    te__quant_call_drop(&((te__act_state *)state)->quant);
}

static te_result te__act_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                  te_tensor **dx, const bool *needs) {
    const te__act_state *s = (const te__act_state *)state;
    te_tensor *x = saved[0];
    te_op_act_bwd_args args = TE_ZERO;
    te__quant_out out;
    te__quant_spec spec;
    te_result result;
    args.dy = te_tensor_contiguous(dy[0]);
    args.x = x;
    args.activation = s->activation;
    args.activation_params = s->params;
    args.rounded = s->params.glu_interleave_size == 0 && s->rounding != TE__ACT_UNROUNDED;
    args.unrounded_amax = s->rounding == TE__ACT_UNROUNDED_AMAX;
    if (needs[1]) args.dbias = dx[1] = te__empty_1d(te, s->bias_dtype, te__cols(x));
    if (!args.dy || (needs[1] && !dx[1])) return te_error_code(te);
    if (s->quant.scaling) spec = te__slot_spec(&s->quant, true, s->gemm, TE__SLOT_GRAD_OUTPUT, s->usage);
    out = te__quant_out_open(te, x->dtype, x->ndim, x->shape, s->quant.scaling ? &spec : NULL);
    if (!out.y) return te_error_code(te);
    dx[0] = out.y;
    args.dx = out.data;
    args.col = out.col;
    args.scale = out.scale;
    args.scale_inv = out.scale_inv;
    args.amax = out.amax;
    result = te__quant_out_close(&out, &spec, te_op_act_bwd(te, &args));
    if (result != TE_OK || !s->quant.scaling || !te__quant_of(te)->inspecting) return result;
    /* The program inspects quantized tensors, but the kernel wrote only codes. A second te_op_act_bwd computes
     * the unquantized dx. */
    if (!out.plain) {
        te_op_act_bwd_args again = TE_ZERO;
        again.dy = args.dy;
        again.x = x;
        again.activation = s->activation;
        again.activation_params = s->params;
        again.dx = out.plain = te__empty_like(x, x->dtype);
        result = out.plain ? te_op_act_bwd(te, &again) : te_error_code(te);
    }
    if (result == TE_OK) te__inspect(s->quant.scaling, s->gemm, TE_TENSOR_GRAD_OUTPUT, out.plain, out.y);
    return result;
}

/* Checks that `activation` can be applied to the rows of x. Sets an error if it cannot. */
static bool te__activation_fits(const te_tensor *x, te_activation activation, const char *function) {
    char text[TE__SHAPE_TEXT];
    if (x->ndim >= 1 && !(te_activation_is_gated(activation) && te__cols(x) % 2)) return true;
    return te__not_ok(x->te, TE_ERR_SHAPE, "%s: the input is %s; a gated activation needs an even last size", function,
                      te__shape_text(x, text));
}

/* Returns the activation of x, quantized like te__norm if `spec` is given. But as in TransformerEngine, current scaling
 * and NVFP4 take the amax of the unrounded f32 result. `spec`, `params` and `grad` may be NULL. */
static te_tensor *te__activate(te_tensor *x, te_activation activation, const te_activation_params *params,
                               const te__quant_spec *spec, const te__act_grad *grad) {
    te_op_act_fwd_args args = TE_ZERO;
    te__act_state state = TE_ZERO;
    te__quant_out out;
    te_ctx *te;
    te_result result;
    int64_t shape[TE_MAX_DIMS];
    if (!x || !te__need_float(x, "te_activate") || !te__activation_fits(x, activation, "te_activate")) return NULL;
    te = x->te;
    x = te_tensor_contiguous(x);
    if (!x) return NULL;
    memcpy(shape, x->shape, sizeof(shape));
    if (te_activation_is_gated(activation)) shape[x->ndim - 1] /= 2;
    te__frame_begin(te);
    out = te__quant_out_open(te, x->dtype, x->ndim, shape, spec);
    if (!out.y) return te__frame_return(te, NULL);
    args.x = x;
    args.y = out.data;
    args.activation = activation;
    if (params) state.params = args.activation_params = *params;
    args.col = out.col;
    args.scale = out.scale;
    args.scale_inv = out.scale_inv;
    args.amax = out.amax;
    result = te__quant_out_close(&out, spec, te_op_act_fwd(te, &args));
    state.activation = activation;
    if (grad) {
        state.bias_dtype = grad->bias ? grad->bias->dtype : TE_DTYPE_NONE;
        state.rounding = grad->rounding;
        state.gemm = grad->gemm;
        state.usage = grad->usage;
    }
    if (result != TE_OK) return te__frame_return(te, NULL);
    if (grad && grad->quant) state.quant = te__quant_call_keep(grad->quant);
    te_tensor *in[2] = {x, grad ? grad->bias : NULL};
    return te__frame_return(te, te__record_owning("activate", out.y, te__act_backward, &state, sizeof(state),
                                                  te__act_release, in, 2, &x, 1));
}
TE_API te_tensor *te_activate(te_tensor *x, te_activation activation, const te_activation_params *params) {
    return te__activate(x, activation, params, NULL, NULL);
}

/* ---- two operands in one block of memory ---- */

/* Allocates two adjacent tensors [rows, n] as the input [1, 2 * rows * n] of a gated activation. Returns NULL, without
 * an error, if the second one would not be 16-byte aligned. */
static te_tensor *te__halves_empty(te_ctx *te, te_dtype dtype, int64_t rows, int64_t n) {
    return n < 1 || rows * n * te__dtype_size(dtype) % 16 ? NULL : te__empty_2d(te, dtype, 1, 2 * rows * n);
}
/* Returns half h (0 or 1) of `halves` as a tensor of this shape. */
static te_tensor *te__half(const te_tensor *halves, int h, int ndim, const int64_t *shape) {
    return te__alias_as(halves, (int64_t)h * (int64_t)(te_tensor_bytes(halves) / 2), halves->dtype, ndim, shape);
}
/* Checks that x is exactly half h of `halves`. */
static bool te__is_half(const te_tensor *x, const te_tensor *halves, int h) {
    return x && x->buffer == halves->buffer &&
           x->offset == halves->offset + (int64_t)h * (int64_t)(te_tensor_bytes(halves) / 2) &&
           te_tensor_bytes(x) == te_tensor_bytes(halves) / 2 && x->dtype == halves->dtype && te__is_contiguous(x);
}

static te_result te__halves_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                     te_tensor **dx, const bool *needs) {
    te_op_act_bwd_args args = TE_ZERO;
    te_tensor *g = te_tensor_contiguous(dy[0]);
    int h;
    (void)needs;
    args.dy = g ? te__alias_2d(g, 0, g->dtype, 1, saved[0]->shape[1] / 2) : NULL;
    args.x = saved[0];
    args.dx = te__empty_like(saved[0], saved[0]->dtype);
    args.activation = *(const te_activation *)state;
    for (h = 0; h < 2; h++) dx[h] = args.dx ? te__half(args.dx, h, dy[0]->ndim, dy[0]->shape) : NULL;
    return args.dy && dx[0] && dx[1] ? te_op_act_bwd(te, &args) : te_error_code(te);
}
/* Returns the gated activation of the operands a and b, which are the two halves of `halves`. */
static te_tensor *te__activate_halves(te_tensor *halves, te_tensor *a, te_tensor *b, te_activation activation) {
    te_op_act_fwd_args args = TE_ZERO;
    te_tensor *in[2] = {a, b}, *y = te__empty_like(a, a->dtype);
    args.x = halves;
    args.y = y ? te__alias_2d(y, 0, y->dtype, 1, halves->shape[1] / 2) : NULL;
    args.activation = activation;
    y = args.y ? te__checked(y, te_op_act_fwd(a->te, &args)) : NULL;
    return te__record("activate", y, te__halves_backward, &activation, sizeof(activation), in, 2, &halves, 1);
}

/* ---- times one factor for each row ---- */

/* `state` has the arguments of the forward pass. The tensors in these arguments are not read. */
static te_result te__scaled_act_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                         te_tensor **dx, const bool *needs) {
    const te_op_scaled_act_fwd_args *f = (const te_op_scaled_act_fwd_args *)state;
    te_op_scaled_act_bwd_args args = TE_ZERO;
    args.dy = te_tensor_contiguous(dy[0]);
    args.x = saved[0];
    args.act_scales = saved[1];
    args.dx = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    if (needs[1]) args.dact_scales = dx[1] = te__empty_like(saved[1], saved[1]->dtype);
    args.activation = f->activation;
    args.activation_params = f->activation_params;
    return args.dy && dx[0] && (!needs[1] || dx[1]) ? te_op_scaled_act_bwd(te, &args) : te_error_code(te);
}

TE_API te_tensor *te_scaled_activate(te_tensor *x, te_tensor *permuted_probs, te_activation activation,
                                     const te_activation_params *params) {
    te_op_scaled_act_fwd_args args = TE_ZERO;
    te_tensor *in[2], *y;
    int64_t shape[TE_MAX_DIMS];
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    const char *who = "te_scaled_activate";
    if (!x || !te__operand(x, permuted_probs, false, who) || !te__need_float(x, who) ||
        !te__need_float(permuted_probs, who))
        return NULL;
    if (!te__activation_fits(x, activation, who)) return NULL;
    if (te__numel(permuted_probs) != te__rows(x))
        return te__no_tensor(
            x->te, TE_ERR_SHAPE,
            "%s: the input is %s and the probabilities are %s; one for each of its %lld rows is needed", who,
            te__shape_text(x, a), te__shape_text(permuted_probs, b), (long long)te__rows(x));
    te__frame_begin(x->te);
    in[0] = te_tensor_contiguous(x);
    in[1] = te_tensor_contiguous(te_tensor_cast(permuted_probs, x->dtype));
    memcpy(shape, x->shape, sizeof(shape));
    if (te_activation_is_gated(activation)) shape[x->ndim - 1] /= 2;
    y = in[0] && in[1] ? te_tensor_empty(x->te, x->dtype, x->ndim, shape) : NULL;
    if (!y) return te__frame_return(x->te, NULL);
    args.activation = activation;
    if (params) args.activation_params = *params;
    args.x = in[0];
    args.act_scales = in[1];
    args.y = y;
    y = te__checked(y, te_op_scaled_act_fwd(x->te, &args));
    return te__frame_return(
        x->te, te__record("scaled_activate", y, te__scaled_act_backward, &args, sizeof(args), in, 2, in, 2));
}
