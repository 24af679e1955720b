/* nn/linear.c: y = x W^T + b in high precision or quantized, with its three products: the function that every GEMM module calls. Knows
 * quantizers and the scaling state; must not know the module tree. */

/* What a module keeps for each of its GEMMs. */
typedef struct te__gemm_slot {
    te__scaling *scaling;
    int gemm;                /* index within the scaling state */
    te_tensor *weight_cache; /* quantized copy kept between microbatches (retained), or NULL */
    te__buffer *cache_buffer; /* of the weight when the copy was made (retained: else another could come to its address), and its version */
    uint64_t cache_version;
    te_recipe cache_recipe;
    te_microbatch microbatch;
    bool fuse_wgrad;
} te__gemm_slot;

static void te__gemm_slot_close(te__gemm_slot *g) {
    te_tensor_release(g->weight_cache);
    te__buffer_release(g->cache_buffer);
    g->weight_cache = NULL;
    g->cache_buffer = NULL;
}

typedef struct te__linear_state {
    bool quantized, fuse_wgrad, overwrite_main_grad;
    bool split_dgrad, split_wgrad;
    te__scaling *scaling;
    int gemm;
    te_recipe recipe;
    int ndim;
    int64_t shape[TE_MAX_DIMS]; /* of x */
    te_dtype x_dtype, weight_dtype, bias_dtype;
} te__linear_state;

/* `given`: 0 the default, 1 yes, 2 no. */
static bool te__split(int given, bool by_default) { return given == 0 ? by_default : given == 1; }

static te_result te__linear_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *grad, te_tensor **dx, const bool *needs) {
    const te__linear_state *s = (const te__linear_state *)state;
    te_tensor *x = saved[0], *w = saved[1], *weight = saved[2], *dy = te_tensor_contiguous(grad[0]), *dyq = NULL;
    te_gemm_args gemm = TE_ZERO;
    int64_t m, n, k = s->shape[s->ndim - 1];
    te_result result = TE_OK;
    if (!dy) return te_error_code(te);
    m = te__rows(dy);
    n = te__cols(dy);
    if (needs[2]) { /* from the gradient before it is quantized, as TransformerEngine does */
        dx[2] = te__bias_grad(dy, s->bias_dtype);
        if (!dx[2]) return te_error_code(te);
    }
    if (!needs[0] && !needs[1]) return TE_OK;
    if (s->quantized) {
        te__quant_spec spec = te__slot_spec(s->scaling, &s->recipe, true, s->gemm, TE__SLOT_GRAD_OUTPUT, (needs[0] ? TE_ROWWISE : 0) | (needs[1] ? TE_COLUMNWISE : 0));
        dyq = te__quantize(dy, &spec);
        if (!dyq) return te_error_code(te);
    }
    if (needs[0]) { /* dx = dy W */
        dx[0] = te_tensor_empty(te, s->x_dtype, s->ndim, s->shape);
        gemm.d = dx[0];
        gemm.m = m;
        gemm.n = k;
        gemm.k = n;
        gemm.split_accumulator = s->split_dgrad;
        if (s->quantized) {
            gemm.a = dyq->quantized->row.data;
            gemm.b = w->quantized->col.data;
            gemm.b_transposed = true;
            gemm.scale_a = dyq->quantized->row.scale_inv;
            gemm.scale_b = w->quantized->col.scale_inv;
        } else {
            gemm.a = dy;
            gemm.b = w;
        }
        result = dx[0] ? te_gemm(te, &gemm) : te_error_code(te);
    }
    if (needs[1] && result == TE_OK) { /* dW = dy^T x */
        te_tensor *main_grad = s->fuse_wgrad ? te_tensor_main_grad(weight) : NULL;
        te_gemm_args wgrad = TE_ZERO;
        wgrad.d = main_grad ? main_grad : te__empty_2d(te, s->weight_dtype, n, k);
        wgrad.m = n;
        wgrad.n = k;
        wgrad.k = m;
        wgrad.accumulate = main_grad && !s->overwrite_main_grad;
        wgrad.split_accumulator = s->split_wgrad;
        if (s->quantized) {
            wgrad.a = dyq->quantized->col.data;
            wgrad.b = x->quantized->col.data;
            wgrad.b_transposed = true;
            wgrad.scale_a = dyq->quantized->col.scale_inv;
            wgrad.scale_b = x->quantized->col.scale_inv;
        } else {
            wgrad.a = dy;
            wgrad.a_transposed = true;
            wgrad.b = x;
        }
        result = wgrad.d ? te_gemm(te, &wgrad) : te_error_code(te);
        if (!main_grad) dx[1] = wgrad.d;
    }
    return result;
}

/* The weight's quantized copy: made anew, or the cached one while it is allowed and not stale. */
static te_tensor *te__quantized_weight(te_tensor *weight, te__gemm_slot *g, const te_recipe *r, int usage) {
    bool fresh = g->weight_cache && g->cache_buffer == weight->buffer && g->cache_version == weight->buffer->version &&
                 memcmp(&g->cache_recipe, r, sizeof(*r)) == 0 && (g->weight_cache->quantized->col.data || !(usage & TE_COLUMNWISE));
    te__quant_spec spec;
    te_tensor *w;
    if (g->microbatch == TE_MICROBATCH_LATER && fresh) return g->weight_cache;
    spec = te__slot_spec(g->scaling, r, false, g->gemm, TE__SLOT_WEIGHT, usage);
    w = te__quantize(weight, &spec);
    if (w && g->microbatch != TE_MICROBATCH_NONE && !weight->te->warming) {
        te__gemm_slot_close(g);
        g->weight_cache = te_tensor_retain(w);
        g->cache_buffer = weight->buffer;
        g->cache_buffer->refs++;
        g->cache_version = weight->buffer->version;
        g->cache_recipe = *r;
    }
    return w;
}

/* x [.., K] plain or quantized, weight [N, K], bias [N] or NULL; g NULL => high precision whatever the autocast. */
static te_tensor *te__linear(te_tensor *x, te_tensor *weight, te_tensor *bias, te__gemm_slot *g) {
    te__linear_state state = TE_ZERO;
    te_gemm_args gemm = TE_ZERO;
    te_tensor *in[3], *saved[3], *y, *w = weight;
    const te__autocast *cast;
    te_ctx *te;
    int64_t shape[TE_MAX_DIMS];
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!x || !te__operand(x, weight, false, "te_linear") || !te__operand(x, bias, true, "te_linear")) return NULL;
    if (!x->quantized && !te__need_float(x, "linear")) return NULL;
    te = x->te;
    if (weight->ndim != 2 || x->ndim < 1 || te__cols(x) != weight->shape[1]) {
        te__fail(te, TE_ERR_SHAPE, "linear: the input is %s and the weight %s [out, in]; the input's last size must be the weight's in",
                 te__shape_text(x, a), te__shape_text(weight, b));
        return NULL;
    }
    if (bias && (bias->ndim != 1 || bias->shape[0] != weight->shape[0])) {
        te__fail(te, TE_ERR_SHAPE, "linear: the bias is %s and the weight %s; a bias of [out] is needed", te__shape_text(bias, a), te__shape_text(weight, b));
        return NULL;
    }
    if (x->dtype != weight->dtype) {
        te__fail(te, TE_ERR_DTYPE, "linear: the input is %s and the weight %s; te_tensor_cast the input, or create the module with params_dtype %s",
                 te_dtype_name(x->dtype), te_dtype_name(weight->dtype), te_dtype_name(x->dtype));
        return NULL;
    }
    if (x->quantized && (!x->quantized->row.data || (te__wants_grad(weight) && !x->quantized->col.data))) {
        te__fail(te, TE_ERR_STATE, "linear: the quantized input has no %s copy, which the %s needs (te_quantizer_set_usage)",
                 x->quantized->row.data ? "column-wise" : "row-wise", x->quantized->row.data ? "weight's gradient" : "product");
        return NULL;
    }
    cast = g ? te__autocast_now(te) : NULL;
    state.quantized = x->quantized || (cast && cast->enabled);
    te__frame_begin(te);
    if (!x->quantized) x = te_tensor_contiguous(x);
    memcpy(shape, x ? x->shape : weight->shape, sizeof(shape));
    if (x) shape[x->ndim - 1] = weight->shape[0];
    y = x ? te_tensor_empty(te, x->dtype, x->ndim, shape) : NULL;
    if (!y) return te__frame_return(te, NULL);
    in[0] = x;
    in[1] = weight;
    in[2] = bias;
    gemm.d = y;
    gemm.m = te__rows(x);
    gemm.n = weight->shape[0];
    gemm.k = weight->shape[1];
    gemm.b_transposed = true;
    gemm.bias = bias;
    saved[0] = te__wants_grad(weight) ? x : NULL;
    if (state.quantized) {
        te_tensor *xq = x;
        state.recipe = cast ? cast->recipe : g->scaling->recipe;
        if (!x->quantized) {
            te__quant_spec spec = te__slot_spec(g->scaling, &state.recipe, false, g->gemm, TE__SLOT_INPUT, TE_ROWWISE | (te__wants_grad(weight) ? TE_COLUMNWISE : 0));
            xq = te__quantize(x, &spec);
        }
        w = te__quantized_weight(weight, g, &state.recipe, TE_ROWWISE | (te__wants_grad(x) ? TE_COLUMNWISE : 0));
        if (!xq || !w) return te__frame_return(te, NULL);
        gemm.a = xq->quantized->row.data;
        gemm.b = w->quantized->row.data;
        gemm.scale_a = xq->quantized->row.scale_inv;
        gemm.scale_b = w->quantized->row.scale_inv;
        gemm.split_accumulator = te__split(state.recipe.split_fprop, false);
        state.split_dgrad = te__split(state.recipe.split_dgrad, true);
        state.split_wgrad = te__split(state.recipe.split_wgrad, true);
        if (saved[0]) saved[0] = te__quant_keep(xq, TE_COLUMNWISE); /* the row-wise copy has done its work */
        state.scaling = g->scaling;
        state.gemm = g->gemm;
    } else {
        if (cast && cast->calibrating && cast->recipe.kind == TE_RECIPE_DELAYED) { /* amaxes alone, for scales to be used later */
            te_amax_args amax = TE_ZERO;
            te__quant_spec spec = te__slot_spec(g->scaling, &cast->recipe, false, g->gemm, TE__SLOT_INPUT, TE_ROWWISE);
            amax.x = x;
            amax.amax = spec.amax;
            if (te_amax(te, &amax) == TE_OK) {
                spec = te__slot_spec(g->scaling, &cast->recipe, false, g->gemm, TE__SLOT_WEIGHT, TE_ROWWISE);
                amax.x = weight;
                amax.amax = spec.amax;
                te_amax(te, &amax);
            }
        }
        gemm.a = x;
        gemm.b = weight;
    }
    if (te_gemm(te, &gemm) != TE_OK) return te__frame_return(te, NULL);
    state.fuse_wgrad = g && g->fuse_wgrad;
    state.overwrite_main_grad = g && g->microbatch == TE_MICROBATCH_FIRST;
    state.ndim = x->ndim;
    memcpy(state.shape, x->shape, sizeof(state.shape));
    state.x_dtype = x->dtype;
    state.weight_dtype = weight->dtype;
    state.bias_dtype = bias ? bias->dtype : TE_DTYPE_NONE;
    saved[1] = te__wants_grad(x) ? w : NULL;
    saved[2] = weight;
    return te__frame_return(te, te__record("linear", y, te__linear_backward, &state, sizeof(state), in, 3, saved, 3));
}

TE_API te_tensor *te_matmul(te_tensor *x, te_tensor *weight, te_tensor *bias) {
    if (x && !te__need_float(x, "te_matmul")) return NULL;
    return te__linear(x, weight, bias, NULL);
}
