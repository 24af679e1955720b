/* functions/linear_backward.c: the state of a linear layer's tape node, and its backward pass: dx, dW and the bias
 * gradient, with the exchanges between ranks. This file must not depend on the module tree, nor on how y was
 * computed. */

typedef struct te__linear_state {
    bool quantize_grad; /* false: the gradient of y stays in high precision */
    bool fp8_grad;      /* the gradient of x is quantized */
    int quantize_x;     /* usage (TE_ROWWISE, TE_COLUMNWISE) of the quantized copy that the backward pass makes of
                         * saved[0]; 0: it uses saved[0] as it is */
    int quantize_w;     /* usage of the quantized copy that the backward pass makes of saved[1], the weight; 0: it uses
                         * saved[1] as it is */
    te_epilogue act_epilogue; /* 0: dx[0] is the gradient of x; otherwise dx[0] is the gradient of saved[2], the input
                               * of the activation whose result is x */
    te_dtype act_bias_dtype;
    bool fuse_wgrad, overwrite_main_grad;
    bool split_dgrad, split_wgrad;
    te__parallel parallel;
    te__scaling *delays; /* a reference, or NULL */
    te__quant_call quant;
    int gemm;
    int ndim;
    int64_t shape[TE_MAX_DIMS]; /* shape of x on this rank */
    te_dtype x_dtype, weight_dtype, bias_dtype;
    int group;
} te__linear_state;

/* The state and the saved tensors of the node of a product. The tensors are references. */
typedef struct te__linear_made {
    te__linear_state state;
    te_tensor *saved[3];
} te__linear_made;

static void te__linear_release(te_ctx *te, void *state) {
    (void)te;
    te__quant_call_drop(&((te__linear_state *)state)->quant);
    te__scaling_release(((te__linear_state *)state)->delays);
}

/* Quantizes x by `spec`. Returns x itself if `spec` keeps high precision. */
static te_tensor *te__quantize_operand(te_tensor *x, const te__quant_spec *spec) {
    return spec->cls->form == TE__FORM_PLAIN ? x : te__quantize(x, spec);
}

/* Returns the te__quant_spec for one operand of the product. If the operand is gathered before the product, all ranks
 * use one common scale for it. */
static te__quant_spec te__product_spec(const te__quant_call *q, const te__parallel *p, bool backward, int gemm,
                                       int slot, int usage) {
    te__quant_spec spec = te__slot_spec(q, backward, gemm, slot, usage);
    bool gathered =
        backward ? te__gathers(p, TE_PARALLEL_ROW) : slot == TE__SLOT_INPUT && te__gathers(p, TE_PARALLEL_COLUMN);
    if (gathered && spec.cls->form == TE__FORM_CODES && !spec.row_scaled) spec.group = p->group;
    return spec;
}

/* The operands and options of the product dW = dy^T x. If the product is deferred to te_backward_dw, this struct holds
 * references. */
typedef struct te__wgrad {
    te_tensor *dy, *x; /* in the form in which the product reads them */
    te__var *weight;
    te_dtype dtype; /* format of the gradient [rows, columns] */
    int64_t rows, columns;
    bool fused, overwrite, split;
    uint64_t saved_at; /* te->writes when dy and x were saved */
} te__wgrad;

/* Computes dW into *dw. If `fused` is set and the weight has a main_grad, dW is added to main_grad instead, or
 * overwrites main_grad if `overwrite` is set. */
static te_result te__wgrad_product(te_ctx *te, const te__wgrad *g, te_tensor **dw) {
    te_tensor *main_grad = g->fused ? g->weight->main_grad : NULL;
    te_op_gemm_args gemm = TE_ZERO;
    gemm.d = main_grad ? main_grad : te__empty_2d(te, g->dtype, g->rows, g->columns);
    gemm.accumulate = main_grad && !g->overwrite;
    gemm.split_accumulator = g->split;
    *dw = main_grad ? NULL : gemm.d;
    return gemm.d ? te__product(te, g->dy, true, g->x, false, &gemm) : te_error_code(te);
}

static void te__wgrad_release(te_ctx *te, void *state) {
    te__wgrad *g = (te__wgrad *)state;
    te_tensor_release(g->dy);
    te_tensor_release(g->x);
    te__var_release(te, g->weight);
}
static te_result te__wgrad_run(te_ctx *te, void *state) {
    const te__wgrad *g = (const te__wgrad *)state;
    te_tensor *dw;
    te_result result;
    if (te__written_since(g->x, g->saved_at) || te__written_since(g->dy, g->saved_at))
        return te__fail(te, TE_ERR_STATE,
                        "te_backward_dw: the %s of a linear layer was written after te_backward, and the weight's "
                        "gradient needs it; call te_backward_dw first",
                        te__written_since(g->x, g->saved_at) ? "input" : "output's gradient");
    result = te__wgrad_product(te, g, &dw);
    return result == TE_OK && dw ? te__var_add_grad(te, g->weight, dw) : result;
}

/* Returns dy in the form that the products dy W and dy^T x need: quantized if the products are quantized, and gathered
 * if each rank has only a shard of dy. If needs[2] is true, sets *db to the bias gradient. As in TransformerEngine, the
 * bias gradient is computed from the unquantized dy. If dy is already quantized, dequantizes it for this.
 * If the rows of all ranks come piece by piece, begins that: the result is pieces->whole, and te__row_pieces_product
 * computes dy W. */
static te_tensor *te__linear_grad_output(te_ctx *te, const te__linear_state *s, te_tensor *dy, te_tensor **db,
                                         const bool *needs, te__row_pieces *pieces) {
    const te__parallel *p = &s->parallel;
    const bool gathers = te__gathers(p, TE_PARALLEL_ROW), dgrad = needs[0] || needs[3], used = dgrad || needs[1];
    const int usage = (dgrad ? TE_ROWWISE : 0) | (needs[1] ? TE_COLUMNWISE : 0);
    te_tensor *dyq = dy, *shard = NULL;
    te__quant_spec spec;
    const bool quantizes = s->quantize_grad && !dy->quantized && used; /* a quantized dy comes from the activation that
                                                                        * follows */
    if (quantizes) {
        spec = te__product_spec(&s->quant, p, true, s->gemm, TE__SLOT_GRAD_OUTPUT, usage);
        if (needs[2] && spec.cls->facts & TE__TENSOR_SCALED) {
            *db = spec.bias_grad = te__empty_1d(te, s->bias_dtype, te__cols(dy));
            if (!*db && gathers) te__refuse(p->group, TE__ALL_GATHER, te_error_code(te));
            if (!*db) return NULL;
        }
    }
    if (gathers && used)
        dyq = te__rows_gathered(p, dy, quantizes ? &spec : NULL, usage, dgrad ? pieces : NULL, needs[1], &shard);
    else if (quantizes) dyq = te__quantize_operand(dy, &spec);
    if (quantizes && dyq && (shard || !gathers))
        te__inspect(s->quant.scaling, s->gemm, TE_TENSOR_GRAD_OUTPUT, dy, shard ? shard : dyq);
    if (needs[2] && dy->quantized && !(dy = te__quant_value(dy, dy->dtype))) return NULL;
    if (dyq && needs[2] && !*db) *db = te__bias_grad(dy, s->bias_dtype);
    return needs[2] && !*db ? NULL : dyq;
}

/* Returns x quantized by `spec`. `dtype` is the nominal dtype of the result: the format that dequantizing gives. */
static te_tensor *te__quantize_as(te_tensor *x, te_dtype dtype, const te__quant_spec *spec) {
    te_tensor *y = te__quant_empty(x->te, dtype, x->ndim, x->shape, spec, spec->usage, false);
    return y && te__quant_fill(y, x, spec, spec->usage, NULL) == TE_OK ? y : NULL;
}
/* Returns the format of a product's result that `spec` will quantize. With delayed scaling this is f32, so that the
 * result is rounded only once, to FP8. With other recipes it is `dtype`, as in TransformerEngine. */
static te_dtype te__result_dtype(const te__quant_spec *spec, te_dtype dtype) {
    return spec->cls->facts & TE__SCALE_GIVEN ? TE_F32 : dtype;
}

/* Begins to bring the saved input x into the form that the product dy^T x needs: quantized if the product is quantized,
 * and gathered if each rank has only a shard of x. te__arrival_end returns it. */
static te_result te__linear_input_begin(const te__linear_state *s, te_tensor *x, te__arrival *a, bool beside) {
    te_group *group = s->parallel.group;
    te__quant_spec spec;
    int usage = TE_ROWWISE;
    if (s->quantize_x)
        spec = te__product_spec(&s->quant, &s->parallel, false, s->gemm, TE__SLOT_INPUT, s->quantize_x);
    if (!te__gathers(&s->parallel, TE_PARALLEL_COLUMN)) {
        memset(a, 0, sizeof(*a));
        a->y = s->quantize_x ? te__quantize_operand(x, &spec) : x;
        return a->y ? TE_OK : te_error_code(x->te);
    }
    if (s->quantize_x) return te__arrival_begin(a, group, x, &spec, spec.usage, beside, NULL);
    if (x->quantized && (x->quantized->col.data ||
                         (s->quantize_grad && x->quantized->cls->facts & TE__TENSOR_SCALED)))
        usage = TE_COLUMNWISE;
    return te__arrival_begin(a, group, x, NULL, usage, beside, NULL);
}

/* Returns what a node saves of a weight, for the product dy W. `w` is the weight, or its quantized copy, of which the
 * product reads copy `keep`. The memory of a sharded weight is released between forward and backward. So the node saves
 * the weight itself, and sets *again to `keep` if it must be quantized again then. A quantized copy with a given scale
 * is saved, because the scale is another one by then. */
static te_tensor *te__weight_to_save(te_tensor *weight, te_tensor *w, const te__quant_call *quant, int keep,
                                     int *again) {
    const te__quantized *q = w->quantized;
    if (!q || (weight->moves && w == weight)) return w;
    if (weight->moves && !weight->quantized && q->cls->form == TE__FORM_CODES && !(q->cls->facts & TE__SCALE_GIVEN) &&
        !te__asks_factory(&quant->recipe)) {
        *again = keep;
        return weight;
    }
    return te__copy_of(w, keep)->data ? te__quant_keep(w, keep) : w;
}
/* Returns a weight that te__weight_to_save has returned, in the form that the product dy W needs. */
static te_tensor *te__saved_weight(te_tensor *saved, const te__quant_call *quant, int gemm, int again) {
    te__quant_spec spec;
    if (!again || !saved || saved->quantized) return saved;
    spec = te__slot_spec(quant, false, gemm, TE__SLOT_WEIGHT, again);
    return te__quantize_operand(saved, &spec);
}

/* Ends a failed backward pass and informs the ranks that wait in the next exchange. Returns the error. `gathered`: this
 * rank has the whole gradient of y. */
static te_result te__linear_gives_up(te_ctx *te, const te__linear_state *s, const bool *needs, bool gathered) {
    const te__parallel *p = &s->parallel;
    te_result result = te_error_code(te);
    if (!gathered && te__gathers(p, TE_PARALLEL_ROW)) return te__refuse(p->group, TE__ALL_GATHER, result);
    if (te__shares(p, TE_PARALLEL_COLUMN) && (needs[0] || needs[3]))
        return te__refuse(p->group, p->sequence ? TE__REDUCE_SCATTER : TE__ALL_REDUCE, result);
    return te__gathers(p, TE_PARALLEL_COLUMN) && needs[1] ? te__refuse(p->group, TE__ALL_GATHER, result) : result;
}

/* Computes dx = dy W. Sums it over the ranks, beside later work if `sum` is not NULL. The caller may have set dx[0] to
 * the tensor that it is written to. */
static te_result te__linear_dgrad(te_ctx *te, const te__linear_state *s, te_tensor *const *saved, te_tensor *dyq,
                                  te__row_pieces *pieces, te_dtype dtype, te_tensor **dx, const bool *needs,
                                  te__flight *sum) {
    const te__parallel *p = &s->parallel;
    te_op_gemm_args gemm = TE_ZERO;
    int64_t shape[TE_MAX_DIMS];
    te_tensor *w;
    te_result result;
    memcpy(shape, s->shape, sizeof(shape));
    if (te__gathers(p, TE_PARALLEL_COLUMN)) shape[0] *= p->size;
    gemm.split_accumulator = s->split_dgrad;
    if (te__shares(p, TE_PARALLEL_COLUMN) && !dx[0] && !s->act_epilogue &&
        te__scatters_in_pieces(p, TE__UB_OVERLAP_RS_DGRAD, dyq, shape[0])) {
        w = te__saved_weight(saved[1], &s->quant, s->gemm, s->quantize_w);
        return w ? te__product_scattered(p, dyq, w, false, &gemm, dtype, s->ndim, shape, &dx[0])
                 : te__refuse(p->group, TE__ALL_TO_ALL, te_error_code(te));
    }
    gemm.d = dx[0] ? dx[0] : te_tensor_empty(te, dtype, s->ndim, shape);
    if (s->act_epilogue) { /* the same kernel multiplies by the derivative at saved[2] */
        gemm.epilogue = s->act_epilogue;
        gemm.aux = saved[2];
        if (needs[3]) dx[3] = gemm.bias_gradient = te__empty_1d(te, s->act_bias_dtype, s->shape[s->ndim - 1]);
    }
    dx[0] = gemm.d;
    w = te__saved_weight(saved[1], &s->quant, s->gemm, s->quantize_w);
    result = !w || !gemm.d || (s->act_epilogue && needs[3] && !dx[3]) ? te_error_code(te)
             : pieces->size ? te__row_pieces_product(pieces, w, false, &gemm)
                            : te__product(te, dyq, false, w, false, &gemm);
    /* each rank has computed dx from its own columns of dy only, so sum over the ranks */
    return te__shares(p, TE_PARALLEL_COLUMN) ? te__reduce_parts(p, &dx[0], result, sum) : result;
}
/* Computes dW = dy^T x, or defers this to te_backward_dw. */
static te_result te__linear_wgrad(te_ctx *te, const te__linear_state *s, te_tensor *dyq, te_tensor *x, te_tensor **dx) {
    te__wgrad g;
    g.dy = dyq;
    g.x = x;
    if (!g.dy || !g.x) return te_error_code(te);
    g.weight = te->playing->inputs[1 + s->group];
    g.dtype = s->weight_dtype;
    g.rows = te__cols(dyq);
    g.columns = s->shape[s->ndim - 1];
    g.fused = s->fuse_wgrad;
    g.overwrite = s->overwrite_main_grad;
    g.split = s->split_wgrad;
    g.saved_at = te->writes;
    /* compute the gradient now if deferring to te_backward_dw is off, the module was destroyed, or the weight is
     * not a leaf of the tape */
    if (!s->delays || !s->delays->module || !g.weight->leaf) return te__wgrad_product(te, &g, &dx[1]);
    te_tensor_retain(g.dy);
    te_tensor_retain(g.x);
    te__note_saved(g.dy);
    te__note_saved(g.x);
    g.weight->refs++;
    return te__defer(te, s->delays, te__wgrad_run, te__wgrad_release, &g, sizeof(g));
}
/* The exchanges that run beside the products of a backward pass. */
typedef struct te__linear_flights {
    te__row_pieces pieces; /* rows of dy */
    te__arrival input; /* the saved input */
    te__flight sum;    /* of dx */
} te__linear_flights;

/* The products dx = dy W and dW = dy^T x. */
static te_result te__linear_products(te_ctx *te, const te__linear_state *s, te_tensor *const *saved, te_tensor *dyq,
                                     te__linear_flights *f, te_tensor **dx, const bool *needs) {
    const te__parallel *p = &s->parallel;
    const bool dgrad = needs[0] || needs[3], wgrad = needs[1],
               input_first = dgrad && wgrad && p->beside & TE__UB_BULK_DGRAD && te__gathers(p, TE_PARALLEL_COLUMN),
               sum_beside = dgrad && wgrad && p->beside & TE__UB_BULK_WGRAD && te__shares(p, TE_PARALLEL_COLUMN);
    te__quant_spec grad_spec = TE_ZERO; /* how dx is quantized */
    bool quantizes = false;
    te_result result = TE_OK;
    if (s->fp8_grad) {
        grad_spec = te__slot_spec(&s->quant, true, s->gemm, TE__SLOT_GRAD_INPUT, TE_ROWWISE | TE_COLUMNWISE);
        quantizes = dgrad && grad_spec.cls->form != TE__FORM_PLAIN;
    }
    if (input_first) result = te__linear_input_begin(s, saved[0], &f->input, true);
    if (dgrad && result == TE_OK)
        result = te__linear_dgrad(te, s, saved, dyq, &f->pieces,
                                  quantizes ? te__result_dtype(&grad_spec, s->x_dtype) : s->x_dtype, dx, needs,
                                  sum_beside ? &f->sum : NULL);
    if (quantizes && result == TE_OK && !sum_beside) {
        dx[0] = te__quantize_as(dx[0], s->x_dtype, &grad_spec);
        if (!dx[0]) return te_error_code(te);
    }
    if (wgrad && result == TE_OK) {
        if (!input_first) result = te__linear_input_begin(s, saved[0], &f->input, false);
        if (result == TE_OK && f->pieces.size) dyq = te__row_pieces_whole(&f->pieces);
        if (result == TE_OK) result = te__linear_wgrad(te, s, dyq, te__arrival_end(&f->input), dx);
    }
    if (sum_beside && result == TE_OK) result = te__flight_land(&f->sum);
    if (sum_beside && quantizes && result == TE_OK) {
        dx[0] = te__quantize_as(dx[0], s->x_dtype, &grad_spec);
        if (!dx[0]) return te_error_code(te);
    }
    return result;
}

/* The caller may set dx[0] to the tensor that the gradient of x is written to. */
static te_result te__linear_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *grad,
                                     te_tensor **dx, const bool *needs) {
    const te__linear_state *s = (const te__linear_state *)state;
    te_tensor *dy = grad[0]->quantized ? grad[0] : te_tensor_contiguous(grad[0]), *dyq;
    te__linear_flights flights;
    te_result result;
    memset(&flights, 0, sizeof(flights));
    if (!dy) return te__linear_gives_up(te, s, needs, !(needs[0] || needs[1] || needs[3]));
    dyq = te__linear_grad_output(te, s, dy, &dx[2], needs, &flights.pieces);
    result = dyq ? te__linear_products(te, s, saved, dyq, &flights, dx, needs)
                 : te__linear_gives_up(te, s, needs, true);
    te__row_pieces_drop(&flights.pieces);
    te__arrival_drop(&flights.input);
    te__flight_drop(&flights.sum);
    return result;
}
