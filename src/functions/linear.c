/* functions/linear.c: the linear layer y = x W^T + b, in high precision or quantized: the forward pass, with the
 * exchanges between ranks. This file must not depend on the module tree. */

/* The quantized copy of the weight of one product. A module keeps it between microbatches. */
typedef struct te__weight_cache {
    te_tensor *copy;    /* retained, or NULL */
    te__buffer *buffer; /* the weight's buffer when the copy was made; retained, so that no new buffer can have the same
                         * address */
    uint64_t version;   /* the version of `buffer` when the copy was made */
    int64_t offset;     /* the offset of the weight in `buffer`; needed because many weights may be views of one
                         * buffer */
    uint64_t capture;   /* the id of the graph capture in which the copy was made; 0: not made in a capture */
    te_recipe recipe;
} te__weight_cache;

static void te__weight_cache_close(te__weight_cache *c) {
    te_tensor_release(c->copy);
    te__buffer_release(c->buffer);
    c->copy = NULL;
    c->buffer = NULL;
}

/* The operands and options of one linear product. With all options zero it is plain and in high precision. */
typedef struct te__linear_call {
    te_tensor *x, *weight, *bias; /* x [.., K] plain or quantized, weight [N, K], bias [N] or NULL */
    const te__quant_call *quant;  /* NULL: high precision, even inside an autocast region */
    int gemm;                     /* index of the product in quant->scaling */
    te__parallel parallel;        /* the ranks that share the product; in mode TE_PARALLEL_ROW `bias` must be NULL */
    unsigned *met;                /* a bit mask in the module: bit `gemm` is set after the ranks have compared the
                                   * operands (te__linear_meets); NULL: no comparison */
    te__weight_cache *cache;      /* the cache of the quantized weight; must not be NULL if `quant` is given */
    te_microbatch microbatch;
    bool fuse_wgrad;
    te__scaling *delays;      /* NULL: te_backward computes the weight's gradient; otherwise te_backward_dw computes it
                               * later */
    bool save_original_input; /* true: the original x is saved, and the backward pass quantizes it again */
    bool fp8_output, fp8_grad; /* These two take effect if `quant` is enabled. fp8_output: te__linear_quantized
                                * quantizes y. fp8_grad: the backward pass quantizes the gradient of x. */
    bool bias_grad_elsewhere; /* true: an activation follows this product, and the tape node of the activation computes
                               * the gradient of the bias */
    bool record_alone;        /* true: only records the tape node and does not run the product, because nobody reads
                               * y */
    te_tensor *act_of, *act_bias; /* NULL unless x is the high-precision result of an activation without a tape
                                   * node. act_of: the input of that activation. act_bias: the bias that act_of
                                   * includes, or NULL */
    te_epilogue act_epilogue;     /* epilogue that multiplies by the activation's derivative */
    int group;                      /* index of `weight` among the weights of the tape node; the weight is the node's
                                     * input number 1 + `group` */
    te_tensor *out;                 /* tensor that y is written to; NULL: a new tensor */
    te_dtype y_dtype;               /* format of y; 0: the format of x */
    struct te__linear_made *made;   /* NULL: te__linear records the node; otherwise the state and saved tensors are
                                     * stored here, and the caller records the node */
} te__linear_call;

/* Returns a weight that is stored quantized. Fails if the weight was quantized for another recipe than the current
 * one. */
static te_tensor *te__primary_weight(te_tensor *weight, const te__quant_spec *spec) {
    te_quantizer *q = weight->quantized->quantizer;
    if (weight->quantized->cls != spec->cls)
        return te__no_tensor(
            weight->te, TE_ERR_STATE,
            "linear: the weight was quantized by a %s quantizer and the recipe in force asks for %s; run it under "
            "the recipe given to "
            "te_quantized_model_init_begin, or outside of autocast",
            weight->quantized->cls->name, spec->cls->name);
    /* from now on the module's own amax history scales this weight */
    if (q && spec->cls->facts & TE__SCALE_GIVEN && q->spec.scale != spec->scale &&
        !te__quant_of(weight->te)->replaying) {
        if (q->refs > 1) { /* other tensors share the quantizer and keep its scale */
            te_quantizer *own = (te_quantizer *)te__alloc_zero(weight->te, sizeof(te_quantizer));
            if (!own) return NULL;
            own->te = weight->te;
            own->refs = 1;
            own->spec = q->spec;
            q->refs--;
            weight->quantized->quantizer = q = own;
        } else
            te__spec_close(&q->spec);
        q->spec.scale = te_tensor_retain(spec->scale);
        q->spec.amax = te_tensor_retain(spec->amax);
    }
    if (!(spec->usage & TE_COLUMNWISE) || weight->quantized->col.data) return weight;
    if (!te__column_follows(weight))
        return te__no_tensor(
            weight->te, TE_ERR_STATE,
            "linear: the backward pass reads the weight's column-wise copy, and the weight has a row-wise %s copy "
            "alone, from which the other cannot be made; create the model outside of te_no_grad_begin, where a weight "
            "gets both",
            weight->quantized->cls->name);
    return te__quant_add_columnwise(weight) == TE_OK ? weight : NULL;
}

/* Returns the quantized weight: the weight itself, a valid cached copy (only for TE_MICROBATCH_LATER), or a new
 * copy. */
static te_tensor *te__quantized_weight(const te__linear_call *c, int usage) {
    te_tensor *weight = c->weight, *w;
    te__weight_cache *cache = c->cache;
    te__quant_spec spec;
    uint64_t capture = weight->te->capture ? weight->te->capture->id : 0;
    if (c->microbatch == TE_MICROBATCH_LATER && !weight->quantized && (cache->copy ? cache->capture : 0) != capture)
        return te__no_tensor(
            weight->te, TE_ERR_STATE,
            "linear: is_first_microbatch is LATER %s a graph, and the kept weight is from %s; FIRST and its LATER "
            "belong to one capture",
            capture ? "inside" : "outside of", capture ? "outside" : "inside");
    if (c->microbatch == TE_MICROBATCH_LATER && cache->copy && !weight->quantized && cache->buffer == weight->buffer &&
        cache->offset == weight->offset && cache->version == te__buffer_version(weight->buffer) &&
        te__recipe_same(&cache->recipe, &c->quant->recipe) &&
        (cache->copy->quantized->col.data || !(usage & TE_COLUMNWISE)))
        return cache->copy;
    spec = te__slot_spec(c->quant, false, c->gemm, TE__SLOT_WEIGHT, usage);
    if (weight->quantized) return te__primary_weight(weight, &spec);
    w = te__quantize_operand(weight, &spec);
    if (w && w != weight) te__inspect(c->quant->scaling, c->gemm, TE_TENSOR_WEIGHT, weight, w);
    if (w && w != weight && c->microbatch != TE_MICROBATCH_NONE && !weight->te->warming && !weight->moves) {
        te__weight_cache_close(cache);
        cache->copy = te_tensor_retain(w);
        cache->buffer = weight->buffer;
        cache->buffer->refs++;
        cache->version = te__buffer_version(weight->buffer);
        cache->offset = weight->offset;
        cache->capture = capture;
        cache->recipe = c->quant->recipe;
    }
    return w;
}

/* Calibrates delayed scaling: measures the amaxes of operands that stay in high precision. Later quantized calls
 * compute their scales from these amaxes. */
static te_result te__calibrate(const te__linear_call *c) {
    te_result result = TE_OK;
    int slot;
    for (slot = TE__SLOT_INPUT; slot <= TE__SLOT_WEIGHT && result == TE_OK; slot++) {
        te__quant_spec spec = te__slot_spec(c->quant, false, c->gemm, slot, TE_ROWWISE);
        const te_tensor *x = slot == TE__SLOT_INPUT ? c->x : c->weight;
        if (x->buffer && spec.amax) result = te__amax_into(x, spec.amax);
    }
    return result;
}

/* Checks that the operands fit together. */
static te_result te__linear_fits(const te__linear_call *c) {
    const te_tensor *x = c->x, *weight = c->weight, *bias = c->bias;
    const te__quant_call *quant = c->quant;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    te_ctx *te;
    if (!x || !te__operand(x, weight, false, "te_linear") || !te__operand(x, bias, true, "te_linear"))
        return TE_ERR_STATE;
    if (!x->quantized && !te__need_float(x, "linear")) return TE_ERR_STATE;
    te = x->te;
    if (weight->ndim != 2 || x->ndim < 1 || te__cols(x) != weight->shape[1])
        return te__fail(
            te, TE_ERR_SHAPE,
            "linear: the input is %s and the weight %s [out, in]; the input's last size must be the weight's in",
            te__shape_text(x, a), te__shape_text(weight, b));
    if (c->parallel.size > 1 && x->ndim < 2)
        return te__fail(te, TE_ERR_SHAPE,
                        "linear: the input is %s, and %d ranks share the product; rows [.., in] are needed",
                        te__shape_text(x, a), c->parallel.size);
    if (bias && (bias->ndim != 1 || bias->shape[0] != weight->shape[0]))
        return te__fail(te, TE_ERR_SHAPE, "linear: the bias is %s and the weight %s; a bias of [out] is needed",
                        te__shape_text(bias, a), te__shape_text(weight, b));
    if (x->dtype != weight->dtype)
        return te__fail(
            te, TE_ERR_DTYPE,
            "linear: the input is %s and the weight %s; te_tensor_cast the input, or create the module with "
            "params_dtype %s",
            te_dtype_name(x->dtype), te_dtype_name(weight->dtype), te_dtype_name(x->dtype));
    if (quant && quant->enabled && x->quantized) {
        /* true: the column-wise copy of x is made after the codes are gathered */
        bool turned = te__gathers(&c->parallel, TE_PARALLEL_COLUMN) && x->quantized->cls->facts & TE__TENSOR_SCALED;
        if (!x->quantized->row.data ||
            (te__wants_grad(weight) && !quant->recipe.backward_override && !x->quantized->col.data && !turned))
            return te__fail(te, TE_ERR_STATE,
                            "linear: the quantized input has no %s copy, which the %s needs (te_quantizer_set_usage)",
                            x->quantized->row.data ? "column-wise" : "row-wise",
                            x->quantized->row.data ? "weight's gradient" : "product");
    }
    return TE_OK;
}

/* Returns the quantized input of the forward product, gathered from all ranks, or coming piece by piece
 * (te__rows_gathered). Sets *kept to this rank's input for the backward pass. *kept is not quantized if s->quantize_x
 * is set. */
static te_tensor *te__linear_input(const te__linear_call *c, te_tensor *x, int keep, te__linear_state *s,
                                   te_tensor **kept, te__row_pieces *pieces) {
    const te__quant_call *quant = c->quant;
    bool gathers = te__gathers(&c->parallel, TE_PARALLEL_COLUMN), saves = te__wants_grad(c->weight);
    bool again = c->save_original_input && quant->recipe.backward_override != TE_BACKWARD_HIGH_PRECISION;
    te__quant_spec spec;
    te_tensor *xq, *shard = NULL;
    *kept = x;
    if (te__joint_reads(x) != TE_OK) return NULL;
    if (x->quantized)
        return gathers ? te__rows_gathered(&c->parallel, x, NULL, TE_ROWWISE, pieces, false, NULL) : x;
    spec = te__product_spec(quant, &c->parallel, false, c->gemm, TE__SLOT_INPUT,
                            TE_ROWWISE | (saves && !again ? keep : 0));
    if (c->save_original_input && (spec.cls->facts & TE__SCALE_GIVEN || spec.stochastic))
        return te__no_tensor(
            x->te, TE_ERR_INVALID,
            "linear: save_original_input, and the input's quantizer is %s: quantized again, the input would not "
            "be the same; leave "
            "the option off, or use another recipe",
            spec.stochastic ? "stochastic" : spec.cls->name);
    /* Ranks that gather x before quantizing have no quantized copy of their own x. So the backward pass quantizes x
     * again. */
    if (gathers && !te__codes_gather(&spec, x)) again = true;
    if (again && saves && spec.cls->form != TE__FORM_PLAIN &&
        quant->recipe.backward_override != TE_BACKWARD_HIGH_PRECISION)
        s->quantize_x = keep;
    if (!gathers) {
        xq = spec.cls->form == TE__FORM_PLAIN ? x : te__quantize_shared(te__functions_of(x->te)->shared, x, &spec);
        if (!again) *kept = xq;
    } else {
        /* the copy that the backward pass reads is this rank's alone */
        if (!te__codes_gather(&spec, x)) spec.usage = TE_ROWWISE;
        xq = te__rows_gathered(&c->parallel, x, &spec, TE_ROWWISE, pieces, false, &shard);
        if (shard && !again) *kept = shard;
        if (xq && shard) te__inspect(quant->scaling, c->gemm, TE_TENSOR_INPUT, x, shard);
    }
    if (!gathers && xq && xq != x) te__inspect(quant->scaling, c->gemm, TE_TENSOR_INPUT, x, xq);
    return xq;
}

/* Returns whether the product itself may quantize x: x is so small that no other product could use the codes, and
 * nobody keeps, inspects or records the quantized input. Sets *spec. */
static bool te__linear_input_waits(const te__linear_call *c, const te_tensor *x, te__quant_spec *spec) {
    const te_ctx *te = x->te;
    if (x->quantized || te__rows(x) > TE__GEMM_QUANTIZE_ROWS || te__numel(x) > TE__GEMM_QUANTIZE_NUMBERS ||
        te->tape.no_grad == te->tape.hidden_no_grad || c->save_original_input || c->record_alone ||
        te__gathers(&c->parallel, TE_PARALLEL_COLUMN) || te__quant_of(te)->inspecting || te__functions_of(te)->any_rows)
        return false;
    *spec = te__product_spec(c->quant, &c->parallel, false, c->gemm, TE__SLOT_INPUT, TE_ROWWISE);
    return true;
}

/* Ends a forward pass that fails before its first exchange. If the other ranks wait in an exchange, informs them. */
static void te__linear_misses(const te__parallel *p, te_result result) {
    if (te__gathers(p, TE_PARALLEL_COLUMN)) te__refuse(p->group, TE__ALL_GATHER, result);
    else if (te__shares(p, TE_PARALLEL_ROW))
        te__refuse(p->group, p->sequence ? TE__REDUCE_SCATTER : TE__ALL_REDUCE, result);
}

/* Compares the operands of all ranks before the first call (in debug mode, before each call). `result` is this rank's
 * result so far. If any rank has failed, all ranks return an error. */
static te_result te__linear_meets(const te__linear_call *c, te_result result) {
    const te__parallel *p = &c->parallel;
    char what[384] = "", overlap[32] = "", x[TE__SHAPE_TEXT], w[TE__SHAPE_TEXT], recipe[TE__RECIPE_TEXT];
    if (p->size <= 1 || !c->met || !te__group_compares(p->group, *c->met >> c->gemm & 1)) {
        if (result != TE_OK) te__linear_misses(p, result);
        return result;
    }
    if (p->beside) snprintf(overlap, sizeof(overlap), " options ub_ %x", (unsigned)p->beside);
    if (result == TE_OK)
        snprintf(what, sizeof(what), "product %d by %s%s%s of input %s %s and weight %s %s, %s", c->gemm,
                 p->mode == TE_PARALLEL_ROW      ? "row"
                 : p->mode == TE_PARALLEL_COLUMN ? "column"
                                                 : "none",
                 p->sequence ? ", sequence parallel," : "", overlap, te__shape_text(c->x, x),
                 te_dtype_name(c->x->dtype),
                 te__shape_text(c->weight, w), te_dtype_name(c->weight->dtype),
                 te__recipe_told(c->quant && c->quant->enabled ? &c->quant->recipe : NULL, recipe));
    result = te__group_compare(p->group, what, result);
    if (result == TE_OK) *c->met |= 1u << c->gemm;
    return result;
}

/* Records the tape node of a product. The node accepts a quantized gradient of y. Such a gradient comes from an
 * activation that reads y, or from a product with fp8_grad that reads y. */
static te_tensor *te__linear_record(te_tensor *y, te__linear_state *state, te_tensor *const *in,
                                    te_tensor *const *saved) {
    te_node_desc node = TE_ZERO;
    node.name = "linear";
    node.inputs = in;
    node.num_inputs = 4;
    node.outputs = &y;
    node.num_outputs = 1;
    node.saved = saved;
    node.num_saved = 3;
    node.state = state;
    node.state_size = sizeof(*state);
    node.backward = te__linear_backward;
    node.release = te__linear_release;
    return te__record_quantized(y->te, &node) == TE_OK ? y : NULL;
}

/* Returns a tensor for an output. Uses the memory of te__functions_state.place if `place` has the output's dtype and
 * number of bytes. A strided place must have the output's shape as well. */
static te_tensor *te__output_place(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) {
    te_tensor *place = te__functions_of(te)->place;
    if (place && place->dtype == dtype && !te__is_contiguous(place) && place->ndim == ndim &&
        memcmp(place->shape, shape, (size_t)ndim * sizeof(*shape)) == 0) {
        te__functions_of(te)->place = NULL;
        return te__alias(place);
    }
    if (!place || !te__is_contiguous(place) || place->dtype != dtype ||
        te__shape_bytes(dtype, ndim, shape) != te_tensor_bytes(place))
        return te_tensor_empty(te, dtype, ndim, shape);
    te__functions_of(te)->place = NULL;
    return te__alias_as(place, 0, dtype, ndim, shape);
}

/* ---- products that wait for each other (functions/joint.c) ---- */

/* Returns whether the product x w^T of `c` may wait for others: it is not recorded, all of it is on this rank, no bias
 * is added behind it (te__linear_biased does so in row-parallel mode, even with one rank), and its operands live on
 * after the call, which a sharded weight need not. `quantizes`: the product quantizes x. */
static bool te__linear_may_wait(const te__linear_call *c, const te_tensor *x, const te_tensor *w, bool quantizes) {
    const te_ctx *te = x->te;
    return te__functions_of(te)->joint && te->tape.no_grad != te->tape.hidden_no_grad && c->parallel.size <= 1 &&
           c->parallel.mode != TE_PARALLEL_ROW && !c->fp8_output && !c->out && x == c->x && w == c->weight &&
           !w->moves && !(c->bias && c->bias->moves) &&
           !x->quantized && (quantizes || !w->quantized);
}
/* Notes the product x w^T for te__joint_run, if it can be one of those. `quantizes`: *g has all of it already. */
static bool te__linear_joins(const te_tensor *x, const te_tensor *w, bool quantizes, const te_op_gemm_args *g) {
    te_op_gemm_args plain = *g;
    if (!quantizes) {
        plain.a = x;
        plain.b = w;
        plain.b_transposed = true;
        plain.m = te__rows(x);
        plain.k = te__cols(x);
        plain.n = te__rows(w);
    }
    return te__joint_takes(te__functions_of(x->te)->joint, &plain);
}

/* Returns y = x W^T + b. If ranks share the product, returns this rank's part, as `c->parallel` describes. */
static te_tensor *te__linear(const te__linear_call *c) {
    te__linear_state state = TE_ZERO;
    te_op_gemm_args gemm = TE_ZERO;
    te_tensor *x = c->x, *weight = c->weight, *bias = c->bias, *w = weight;
    te_tensor *saved[3], *y, *xq, *kept;
    const te__quant_call *quant = c->quant;
    const te__parallel *p = &c->parallel;
    const te_recipe *recipe;
    te_ctx *te;
    te__quant_spec spec = TE_ZERO;
    te__row_pieces pieces = TE_ZERO;
    bool quantized, block, waits = false; /* waits: the product quantizes x */
    bool scatters;
    int keep = TE_COLUMNWISE;
    int64_t shape[TE_MAX_DIMS];
    te_result result = te__linear_meets(c, te__linear_fits(c) == TE_OK ? TE_OK : TE_ERR_STATE);
    if (result != TE_OK) return NULL;
    te = x->te;
    quantized = quant && quant->enabled;
    recipe = quantized ? &quant->recipe : NULL;
    te__frame_begin(te);
    if (!x->quantized) x = te_tensor_contiguous(x);
    if (x && (p->size > 1 || (quant && quant->calibrating)) && te__joint_reads(x) != TE_OK) x = NULL;
    if (!x) {
        te__linear_misses(p, te_error_code(te));
        return te__frame_return(te, NULL);
    }
    te_tensor *in[4] = {c->act_of ? c->act_of : x, weight, c->bias_grad_elsewhere ? NULL : bias,
                        c->act_of ? c->act_bias : NULL};
    kept = x;
    if (quantized) {
        /* the copy that the backward pass reads */
        keep = recipe->backward_override == TE_BACKWARD_DEQUANTIZED ? TE_ROWWISE : TE_COLUMNWISE;
        waits = te__linear_input_waits(c, x, &spec);
        xq = waits ? x : te__linear_input(c, x, keep, &state, &kept, &pieces);
        w = te__quantized_weight(c, TE_ROWWISE | (te__wants_grad(x) ? keep : 0));
        if (waits && !(w && w->quantized && te__product_quantizes(x, &spec, te__copy_of(w, TE_ROWWISE)))) {
            waits = false;
            xq = te__linear_input(c, x, keep, &state, &kept, &pieces);
        }
        block = te__recipe_class_of(recipe)->facts & TE__SPLITS_ALWAYS;
        gemm.split_accumulator = block || te__switch(recipe->split_fprop, false);
        state.split_dgrad = block || te__switch(recipe->split_dgrad, true);
        state.split_wgrad = block || te__switch(recipe->split_wgrad, true);
        state.quantize_grad = recipe->backward_override == TE_BACKWARD_QUANTIZED;
    } else {
        if (quant && quant->calibrating && te__keeps_scales(quant->scaling, &quant->recipe) &&
            te__calibrate(c) != TE_OK) {
            te__linear_misses(p, te_error_code(te));
            return te__frame_return(te, NULL);
        }
        kept = te__plain(x);
        w = te__plain(weight);
        xq = te__gathers(p, TE_PARALLEL_COLUMN)
                 ? te__rows_gathered(p, kept, NULL, TE_ROWWISE, &pieces, false, NULL)
                 : kept;
    }
    result = xq && w ? TE_OK : te_error_code(te);
    memcpy(shape, xq ? xq->shape : x->shape, sizeof(shape));
    shape[x->ndim - 1] = weight->shape[0];
    if (c->record_alone && te__gathers(p, TE_PARALLEL_ROW)) shape[0] /= p->size;
    scatters = result == TE_OK && !waits && !c->record_alone && !c->out && te__shares(p, TE_PARALLEL_ROW) &&
               te__scatters_in_pieces(p, TE__UB_OVERLAP_RS, xq, shape[0]);
    y = gemm.d = result != TE_OK || scatters ? NULL
                 : c->out                    ? c->out
                                             : te__output_place(te, c->y_dtype ? c->y_dtype : x->dtype, x->ndim, shape);
    gemm.bias = bias;
    if (result == TE_OK && !y && !scatters) result = te_error_code(te);
    if (waits) te__product_quantizing(x, &spec, w, &gemm);
    if (scatters)
        result = te__product_scattered(p, xq, w, true, &gemm, c->y_dtype ? c->y_dtype : x->dtype, x->ndim, shape, &y);
    else if (result == TE_OK && !c->record_alone &&
             !(te__linear_may_wait(c, xq, w, waits) && te__linear_joins(xq, w, waits, &gemm))) {
        result = te__joint_reads(xq);
        if (result == TE_OK)
            result = waits         ? te_op_gemm(te, &gemm)
                     : pieces.size ? te__row_pieces_product(&pieces, w, true, &gemm)
                                   : te__product(te, xq, false, w, true, &gemm);
    }
    te__row_pieces_drop(&pieces);
    /* each rank has computed y from its own columns of x only, so sum over the ranks */
    if (te__shares(p, TE_PARALLEL_ROW) && !c->record_alone && !scatters)
        result = te__reduce_parts(p, &y, result, NULL);
    if (result != TE_OK) return te__frame_return(te, NULL);
    /* the backward pass reads the unquantized operands */
    if (quantized && recipe->backward_override == TE_BACKWARD_HIGH_PRECISION) {
        kept = te__plain(x);
        w = te__plain(weight);
        if (!kept || !w) return te__frame_return(te, NULL);
    }
    saved[0] = te__wants_grad(weight) ? kept : NULL;
    /* drops the copy that only the forward product needed */
    if (saved[0] && saved[0]->quantized)
        saved[0] = te__quant_keep(kept, te__copy_of(kept, keep)->data ? keep : TE_ROWWISE);
    saved[1] = te__wants_grad(in[0]) || te__wants_grad(in[3]) ? w : NULL;
    if (saved[1]) saved[1] = te__weight_to_save(weight, w, quant, keep, &state.quantize_w);
    if (saved[1] && weight->var && weight->var->leaf) saved[1]->is_weight = true;
    saved[2] = saved[1] ? c->act_of : NULL;
    state.act_epilogue = c->act_of ? c->act_epilogue : TE_EPILOGUE_NONE;
    state.act_bias_dtype = in[3] ? in[3]->dtype : TE_DTYPE_NONE;
    state.fuse_wgrad = c->fuse_wgrad;
    state.parallel = *p;
    state.delays = c->delays;
    if (state.delays) state.delays->refs++;
    state.overwrite_main_grad = c->microbatch == TE_MICROBATCH_FIRST;
    state.gemm = c->gemm;
    state.ndim = x->ndim;
    memcpy(state.shape, x->shape, sizeof(state.shape));
    state.x_dtype = x->dtype;
    state.weight_dtype = weight->dtype;
    state.bias_dtype = bias ? bias->dtype : TE_DTYPE_NONE;
    state.fp8_grad = c->fp8_grad && state.quantize_grad;
    if (state.quantize_grad || state.quantize_x || state.quantize_w) state.quant = te__quant_call_keep(quant);
    state.group = c->group;
    if (c->made) {
        int i;
        c->made->state = state;
        for (i = 0; i < 3; i++) c->made->saved[i] = te_tensor_retain(saved[i]);
        return te__frame_return(te, y);
    }
    return te__frame_return(te, te__linear_record(y, &state, in, saved));
}

TE_API te_tensor *te_linear(te_tensor *x, te_tensor *weight, te_tensor *bias) {
    te__linear_call call = TE_ZERO;
    if (x && !te__need_float(x, "te_linear")) return NULL;
    call.x = x;
    call.weight = weight;
    call.bias = bias;
    return te__linear(&call);
}

/* Returns the logits x table^T. `p`: ranks have rows of the table each, in mode TE_PARALLEL_COLUMN; `join`: each gets
 * the logits of all of them. `met`: as te__linear_call.met. */
static te_tensor *te__lm_logits(te_tensor *x, te_tensor *table, const te__parallel *p, bool join, unsigned *met) {
    te__linear_call call = TE_ZERO;
    call.x = x;
    call.weight = table;
    call.parallel = *p;
    call.met = met;
    x = te__linear(&call);
    return join && p->size > 1 ? te__join_parts(p->group, x, true) : x;
}
TE_API te_tensor *te_parallel_lm_logits(te_tensor *x, te_tensor *table, const te_parallel_lm_logits_desc *desc) {
    te__parallel p = TE_ZERO;
    if (!x || !te__has_desc(x->te, desc, "te_parallel_lm_logits") ||
        !te__operand(x, table, false, "te_parallel_lm_logits") || !te__need_float(x, "te_parallel_lm_logits") ||
        te__group_allowed(x->te, desc->tp_group, "te_parallel_lm_logits", "tp_group") != TE_OK)
        return NULL;
    p.group = desc->tp_group;
    p.size = te__group_size(p.group);
    p.mode = TE_PARALLEL_COLUMN;
    p.sequence = desc->sequence_parallel && p.size > 1;
    return te__lm_logits(x, table, &p, !desc->parallel_output, NULL);
}
