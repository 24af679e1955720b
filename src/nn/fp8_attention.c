/* nn/fp8_attention.c: the attention core under a recipe with fp8_dpa. Tensors are rounded to FP8 codes at the same
 * points as in TransformerEngine (S is the softmax). With a per-tensor recipe both passes take the codes themselves.
 * With MXFP8 the GEMMs run in high precision on the decoded numbers. This file must not depend on the module tree.
 *
 * The table has the tensors that are quantized. A per-tensor recipe has six scales, and tensors in parentheses share
 * one. An MXFP8 recipe has blocks of 32 numbers along dimension d (channels) or s (tokens).
 *
 *              forward                                   backward
 *   per-tensor (q, k, v), S, o                           dO, dP, (dq, dk, dv)
 *   MXFP8      along d: q, k, o; along s: v              along d: dO, dq, dk; along s: dv
 *
 * Delayed scaling has one amax history for each of the six scales. S and dP are never whole in memory, so their amaxes
 * cannot be measured first. Under current scaling S and dP therefore use delayed scaling with the latest amax, as in
 * TransformerEngine. The forward pass rounds each row of S by a scale of its own (te_attn_fp8), since the kernel does
 * not know a row's sum before its end. It records the amax of S, and the backward pass rounds S by the delayed scale.
 * The backward pass records the amax of dP. Hopper's kernel for codes leaves S and, for dk, dP unrounded.
 * The quantizer factory of a custom recipe is called for each of the six scales. If it returns an
 * MXFP8 quantizer for q, k and v, the MXFP8 line applies.
 *
 * The gradient of the softmax needs D, the sum of S * dP over each row (ops/attn/cpu.c). D is computed from the
 * unrounded S, because the backward pass ignores that S was rounded. Hopper's kernel for codes computes D as the sum of
 * o * dO over channels. It needs o before its rounding, so the node of a per-tensor recipe saves it. */

/* Indices of the tensors of attention in the scaling state, as in TransformerEngine. The state has
 * room for the tensors of three GEMMs, and attention uses six of its entries. */
enum {
    TE__ATTENTION_GEMMS = 3,
    TE__SLOT_QKV = 0 * TE__SLOTS_FORWARD + TE__SLOT_OUTPUT,
    TE__SLOT_O = 1 * TE__SLOTS_FORWARD + TE__SLOT_INPUT,
    TE__SLOT_S = 2 * TE__SLOTS_FORWARD + TE__SLOT_OUTPUT,
    TE__SLOT_DQKV = 0 * TE__SLOTS_BACKWARD + TE__SLOT_GRAD_OUTPUT,
    TE__SLOT_DO = 1 * TE__SLOTS_BACKWARD + TE__SLOT_GRAD_INPUT,
    TE__SLOT_DP = 2 * TE__SLOTS_BACKWARD + TE__SLOT_GRAD_INPUT
};

/* Returns the quantizer that the factory of a custom recipe gave for slot i. */
static const te__quant_spec *te__attention_answer(const te__quant_call *q, bool backward, int i) {
    const int step = backward ? TE__SLOTS_BACKWARD : TE__SLOTS_FORWARD;
    return &te__custom_slots_of(q->scaling, &q->recipe)
                ->slot[i / step * TE__CUSTOM_SLOTS + (backward ? (int)TE_TENSOR_GRAD_OUTPUT : 0) + i % step]
                .spec;
}
static bool te__attention_by_blocks(const te__quant_call *q) {
    return te__asks_factory(&q->recipe)
               ? (te__attention_answer(q, false, TE__SLOT_QKV)->cls->facts & TE__BLOCKS_IN_ATTENTION) != 0
               : te__recipe_has(&q->recipe, TE__BLOCKS_IN_ATTENTION);
}
/* Checks that the quantizers from the factory of a custom recipe fit together:
 * - If q, k and v use MXFP8, all other tensors except S and dP must, too.
 * - Otherwise all quantizers must be per-tensor, and S and dP need delayed ones.
 * - The quantizers of all tensors except S and dP must have the same group for the reduction of their amaxes. */
static te_result te__attention_answers_fit(te_module *m, const te__quant_call *q) {
    static const struct {
        const char *name;
        bool backward, inner;
        int slot;
    } slots[] = {
        {"q, k and v", false, false, TE__SLOT_QKV},      {"o", false, false, TE__SLOT_O},
        {"the softmax", false, true, TE__SLOT_S},        {"the gradients of q, k and v", true, false, TE__SLOT_DQKV},
        {"the gradient of o", true, false, TE__SLOT_DO}, {"the gradient of the softmax", true, true, TE__SLOT_DP}};
    const te_group *group = te__attention_answer(q, false, TE__SLOT_QKV)->group;
    int i;
    for (i = 0; i < (int)TE__COUNT(slots); i++) {
        const te__quant_spec *spec = te__attention_answer(q, slots[i].backward, slots[i].slot);
        const int wanted = te__attention_by_blocks(q) ? TE__BLOCKS_IN_ATTENTION
                           : slots[i].inner           ? TE__SCALE_GIVEN
                                                      : TE__TENSOR_SCALED;
        const bool fits = (te__attention_by_blocks(q) && slots[i].inner) || (spec->cls->facts & wanted) != 0;
        if (fits && !slots[i].inner && spec->group != group)
            return te__fail(m->te, TE_ERR_UNSUPPORTED,
                            "DotProductAttention: fp8_dpa, and the factory of recipe custom gives %s another "
                            "amax_group than q, k and v; give all of them one",
                            slots[i].name);
        if (!fits)
            return te__fail(m->te, TE_ERR_UNSUPPORTED,
                            "DotProductAttention: fp8_dpa, and the factory of recipe custom gives %s the kind %s; q, "
                            "k, v, o and their gradients take delayed or current, "
                            "or all MXFP8, and the softmax and its gradient delayed, but with MXFP8; leave fp8_dpa and "
                            "fp8_mha off, or te_module_set_recipe(core, NULL, true)",
                            slots[i].name, spec->cls->name);
    }
    return TE_OK;
}

/* Returns true if the recipe is per-tensor current scaling. S and dP then use te__attention_inner_recipe. */
static bool te__attention_measures(const te_recipe *r) {
    return te__recipe_has(r, TE__TENSOR_SCALED) && !te__recipe_has(r, TE__SCALE_GIVEN);
}
/* Returns the recipe of S and dP. */
static te_recipe te__attention_inner_recipe(const te_recipe *r) {
    te_recipe inner = te_recipe_delayed_scaling();
    if (te__recipe_has(r, TE__SCALE_GIVEN)) return *r;
    inner.format = r->format;
    inner.delayed.amax_history_len = 1;
    inner.delayed.amax_algo = TE_AMAX_MOST_RECENT;
    return inner;
}

/* Returns the te__quant_spec of tensor i (TE__SLOT_QKV, ...). `r` is the recipe of that tensor: S and dP may have one
 * of their own. */
static te__quant_spec te__attention_spec(const te__quant_call *q, const te_recipe *r, bool backward, int i, int usage) {
    te__slots *slots = backward ? &q->scaling->backward : q->forward;
    const int step = backward ? TE__SLOTS_BACKWARD : TE__SLOTS_FORWARD;
    te__quant_spec spec;
    if (te__asks_factory(&q->recipe)) return te__slot_spec(q, backward, i / step, i % step, usage);
    spec = te__recipe_spec(r, backward, TE__SLOT_INPUT, q->group);
    spec.usage = usage;
    if (!(spec.cls->facts & TE__SCALE_GIVEN)) return spec;
    spec.scale = slots->slot_scale[i];
    spec.amax = slots->slot_amax[i];
    slots->pending = true;
    slots->recipe = *r;
    slots->group = q->group;
    memcpy(slots->also, q->also, sizeof(slots->also));
    return spec;
}

/* Returns the group over which the amaxes of current scaling are reduced, or NULL if there is none. */
static te_group *te__attention_meets(const te__quant_call *q) {
    if (te__asks_factory(&q->recipe)) return te__attention_answer(q, false, TE__SLOT_QKV)->group;
    return te__attention_measures(&q->recipe) ? q->group : NULL;
}

/* Under current scaling, computes one scale for the n tensors x (at most 3). It is that of all ranks of spec->group and
 * of `also`. *spec becomes a quantizer by that scale, whose usage the caller sets. */
static te_result te__attention_one_scale(te_tensor *const *x, int n, const te_recipe *r, bool backward,
                                         te_group *const also[2], te__quant_spec *spec) {
    te_group *const groups[3] = {spec->group, also[0], also[1]};
    const te_recipe given = te__attention_inner_recipe(r);
    const te_dtype dtype = spec->dtype;
    te_ctx *te = x[0]->te;
    te_tensor *each = te__empty_1d(te, TE_F32, 3), *all = te__empty_1d(te, TE_F32, 1);
    te_op_amax_args amax = TE_ZERO;
    te_tensor *scale = te__empty_1d(te, TE_F32, 1);
    te_result result = each && all && scale ? TE_OK : te_error_code(te);
    int i;
    for (i = 0; i <= n && result == TE_OK; i++) {
        amax.x = i < n ? x[i] : te__alias_1d(each, 0, TE_F32, n);
        amax.amax = i < n ? te__slot_view(each, i) : all;
        result = amax.x && amax.amax ? te_op_amax(te, &amax) : te_error_code(te);
    }
    result = te__amax_over(groups, all, result);
    if (result == TE_OK) result = te__scale_of_amax(spec, all, scale, NULL);
    *spec = te__recipe_spec(&given, backward, TE__SLOT_INPUT, NULL);
    spec->dtype = dtype;
    spec->scale = scale;
    return result;
}

/* Transposes [s, b, n, d] or [b, s, n, d] to [b, n, s, d]; te__heads_back is the inverse. */
static te_tensor *te__heads_first(te_tensor *x, te_qkv_format format) {
    if (format == TE_SBHD) x = te_tensor_transpose(x, 0, 1);
    return te_tensor_contiguous(te_tensor_transpose(x, 1, 2));
}
static te_tensor *te__heads_back(te_tensor *x, te_qkv_format format) {
    x = te_tensor_transpose(x, 1, 2);
    return te_tensor_contiguous(format == TE_SBHD ? te_tensor_transpose(x, 0, 1) : x);
}

/* Quantizes q, k and v, or their gradients. With MXFP8, v is first transposed to [b, h, s, d]. On failure, ranks that
 * wait for an amax get an error. q, k and v have one scale on all ranks that exchange them (call->also). */
static te_result te__attention_quantize(te_tensor *const x[3], te_qkv_format kv, const te__quant_call *call,
                                        bool backward, te_tensor *y[3]) {
    te__quant_spec spec =
        te__attention_spec(call, &call->recipe, backward, backward ? TE__SLOT_DQKV : TE__SLOT_QKV, TE_ROWWISE);
    bool blocks = te__attention_by_blocks(call),
         current = (spec.cls->facts & TE__TENSOR_SCALED) && !(spec.cls->facts & TE__SCALE_GIVEN);
    te_group *const alone[2] = {NULL, NULL};
    te_tensor *flat[3];
    int i;
    for (i = 0; i < 3; i++) {
        flat[i] = te_tensor_detach(x[i]);
        if (blocks && i == 2) flat[i] = te__heads_first(flat[i], kv);
        flat[i] = te_tensor_contiguous(flat[i]);
        if (!flat[i]) return te__refuse(te__attention_meets(call), TE__ALL_REDUCE, te_error_code(x[0]->te));
    }
    if (current && te__attention_one_scale(flat, 3, &call->recipe, backward, backward ? alone : call->also, &spec) !=
                       TE_OK)
        return te_error_code(x[0]->te);
    for (i = 0; i < 3; i++) {
        spec.usage = blocks && i == 2 ? TE_COLUMNWISE : TE_ROWWISE;
        y[i] = te__quantize(flat[i], &spec);
        /* In a forward pass the other ranks would wait for this rank's amax of the output o, so te__refuse informs
         * them. */
        if (!y[i])
            return backward ? te_error_code(x[0]->te)
                            : te__refuse(te__attention_meets(call), TE__ALL_REDUCE, te_error_code(x[0]->te));
    }
    return TE_OK;
}
/* Decodes the codes of te__attention_quantize. Each result has the format of the tensor that was quantized. */
static te_result te__attention_decode(te_tensor *const y[3], te_qkv_format kv, bool blocks, te_tensor *x[3]) {
    int i;
    for (i = 0; i < 3; i++) {
        x[i] = te__quant_value(y[i], y[i]->dtype);
        if (blocks && i == 2) x[i] = te__heads_back(x[i], kv);
        if (!x[i]) return te_error_code(y[i]->te);
    }
    return TE_OK;
}

/* Returns the FP8 codes of y, which has a scale for the whole tensor. Rows of codes are padded to 16 bytes. */
static te_tensor *te__attention_codes_of(te_tensor *y) {
    const int last = y->ndim - 1;
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, y->shape, sizeof(shape));
    shape[last] = te__cols(y->quantized->row.data);
    return te_tensor_narrow(te_tensor_view(y->quantized->row.data, y->ndim, shape), last, 0, y->shape[last]);
}
/* Makes the FP8 codes x of q, k and v from per-tensor codes of te__attention_quantize, and sets their factors. */
static te_result te__attention_codes(te_tensor *const y[3], te_tensor *x[3], te_attn_fp8 *fp8) {
    int i;
    for (i = 0; i < 3; i++) x[i] = te__attention_codes_of(y[i]);
    fp8->q_scale_inv = y[0]->quantized->row.scale;
    fp8->k_scale_inv = y[1]->quantized->row.scale;
    fp8->v_scale_inv = y[2]->quantized->row.scale;
    return x[0] && x[1] && x[2] ? TE_OK : te_error_code(y[0]->te);
}

/* Views [.., H, d] as [.., H d]. */
static te_tensor *te__heads_joined(te_tensor *x) {
    int64_t shape[4];
    if (!x) return NULL;
    memcpy(shape, x->shape, sizeof(shape));
    shape[x->ndim - 2] *= shape[x->ndim - 1];
    return te_tensor_view(x, x->ndim - 1, shape);
}
/* Views x as [.., heads, d], with `leading` dimensions before `heads`. */
static te_tensor *te__as_heads(te_tensor *x, int leading, int64_t heads, int64_t d) {
    int64_t shape[TE_MAX_DIMS];
    x = te_tensor_contiguous(x);
    if (!x) return NULL;
    memcpy(shape, x->shape, sizeof(shape));
    shape[leading] = heads;
    shape[leading + 1] = d;
    return te_tensor_view(x, leading + 2, shape);
}

typedef struct te__fp8_attention {
    te_op_attn_fwd_args args; /* the tensors in `args` are not used: the node's saved tensors replace them */
    te__quant_call quant;
    te_dtype s_dtype; /* format of the codes of S */
} te__fp8_attention;

static void te__fp8_attention_release(te_ctx *te, void *state) {
    te__score_mod_drop(te, &((te__fp8_attention *)state)->args.rule.score_mod);
    te__quant_call_drop(&((te__fp8_attention *)state)->quant);
}

static te_result te__fp8_attention_backward(te_ctx *te, const void *state, te_tensor *const *saved,
                                            te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te__fp8_attention *s = (const te__fp8_attention *)state;
    const te_recipe *recipe = &s->quant.recipe, inner = te__attention_inner_recipe(recipe);
    const te_qkv_format kv = te__attn_kv_format(&s->args);
    const bool blocks = te__attention_by_blocks(&s->quant);
    const int last = saved[0]->ndim - 1;
    const int64_t heads = saved[0]->shape[last - 1], d_v = saved[2]->shape[last];
    te_tensor *list[TE__ATTENTION_SAVED], *gradient = te_tensor_contiguous(dy[0]), *codes[3];
    te__quant_spec spec = te__attention_spec(&s->quant, recipe, true, TE__SLOT_DO, TE_ROWWISE);
    te_attn_fp8 codes_of = TE_ZERO;
    te_op_attn_bwd_args args;
    te_result result;
    memcpy(list, saved, sizeof(list));
    result = blocks ? te__attention_decode(saved, kv, blocks, list) : te__attention_codes(saved, list, &codes_of);
    if (gradient && !blocks) gradient = te__as_heads(gradient, last - 1, heads, d_v);
    if (result == TE_OK && !gradient) result = te_error_code(te);
    if (result != TE_OK) return te__refuse(te__attention_meets(&s->quant), TE__ALL_REDUCE, result);
    te__attention_apart(blocks ? list : saved, dx);
    args = te__attention_gradients(&s->args, list, dx, dx, needs);
    args.fp8 = codes_of;
    gradient = te__quantize(gradient, &spec);
    if (!gradient) return te_error_code(te);
    args.d_o = blocks ? te__as_heads(te__quant_value(gradient, gradient->dtype), last - 1, heads, d_v)
                      : te__attention_codes_of(gradient);
    if (!blocks) {
        args.fp8.do_scale_inv = gradient->quantized->row.scale;
        spec = te__attention_spec(&s->quant, &inner, true, TE__SLOT_DP, TE_ROWWISE);
        args.fp8.s_dtype = s->s_dtype;
        args.fp8.s_scale = saved[TE__ATTENTION_SAVED];
        args.fp8.dp_dtype = spec.dtype;
        args.fp8.dp_scale = spec.scale;
        args.fp8.dp_amax = spec.amax;
    }
    result = args.d_o && te__attention_made(&args, needs) ? te_op_attn_bwd(te, &args) : te_error_code(te);
    result = result == TE_OK ? te__attention_quantize(dx, kv, &s->quant, true, codes)
                             : te__refuse(te__attention_meets(&s->quant), TE__ALL_REDUCE, result);
    return result == TE_OK ? te__attention_decode(codes, kv, blocks, dx) : result;
}

/* Checks that MXFP8 can quantize the tensors. Refuses packed sequences (thd) and keys in the pages of a cache. */
static te_result te__attention_blocks_fit(const te_op_attn_fwd_args *a) {
    const te_tensor *q = a->q, *k = a->k, *v = a->v;
    char x[TE__SHAPE_TEXT], y[TE__SHAPE_TEXT], z[TE__SHAPE_TEXT];
    if (a->format != TE_THD && !a->rule.page_table && q->shape[te__attn_seq_dim(a->format)] % 128 == 0 &&
        k->shape[te__attn_seq_dim(te__attn_kv_format(a))] % 128 == 0 && q->shape[3] % 32 == 0 && v->shape[3] % 32 == 0)
        return TE_OK;
    return te__fail(
        q->te, TE_ERR_SHAPE,
        "DotProductAttention: q is %s, k %s, v %s%s, with fp8_dpa of recipe mxfp8: sequences that are multiples "
        "of 128 and heads that are multiples of 32, "
        "neither packed nor in pages, are needed; give the module another recipe (te_module_set_recipe)",
        te__shape_text(q, x), te__shape_text(k, y), te__shape_text(v, z),
        a->format == TE_THD  ? " (TE_THD)"
        : a->rule.page_table ? " (pages)"
                             : "");
}

/* Returns softmax(q k^T) v as [.., H dv]. If `fp8_output` is true, the result is quantized for the GEMM that reads
 * it. The recipe must have fp8_dpa. */
static te_tensor *te__fp8_attention_run(te_tensor *const parts[3], const te_attn_desc *desc,
                                        const te__quant_call *call, bool fp8_output) {
    te_ctx *te = parts[0]->te;
    const te_recipe inner = te__attention_inner_recipe(&call->recipe);
    const bool blocks = te__attention_by_blocks(call);
    const te__rng_state before = te__rng_now(te);
    te__fp8_attention state = TE_ZERO;
    te_tensor *codes[3], *values[3], *in[TE__ATTENTION_INPUTS], *saved[TE__ATTENTION_SAVED + 1], *y = NULL;
    te_op_attn_fwd_args *args = &state.args;
    te__quant_spec spec;
    bool ready;
    /* The caller asks for a quantized result by `fp8_output`. If the quantizer factory of a custom recipe chose MXFP8
     * for q, k and v, the result is decoded nevertheless. */
    fp8_output = fp8_output && !(blocks && te__asks_factory(&call->recipe));
    te__frame_begin(te);
    ready = te__attention_open(parts, desc, args) && (!blocks || te__attention_blocks_fit(args) == TE_OK);
    if (ready && args->rule.page_table) {
        te__fail(te, TE_ERR_UNSUPPORTED,
                 "attention: fp8_dpa, and the keys lie in a cache's pages: one scale would be that of rows of other "
                 "sequences, too; te_module_set_recipe(core, NULL, true) "
                 "keeps this core in high precision");
        ready = false;
    }
    if (!ready) te__refuse(te__attention_meets(call), TE__ALL_REDUCE, te_error_code(te));
    if (!ready || te__attention_quantize(parts, te__attn_kv_format(args), call, false, codes) != TE_OK) {
        te__rng_back(te, before);
        return te__frame_return(te, NULL);
    }
    ready = (blocks ? te__attention_decode(codes, te__attn_kv_format(args), blocks, values)
                    : te__attention_codes(codes, values, &args->fp8)) == TE_OK;
    args->q = ready ? values[0] : NULL;
    args->k = ready ? values[1] : NULL;
    args->v = ready ? values[2] : NULL;
    saved[TE__ATTENTION_SAVED] = NULL;
    if (ready && !blocks) {
        spec = te__attention_spec(call, &inner, false, TE__SLOT_S, TE_ROWWISE);
        /* The backward pass needs this scale of S, but the end of the autocast region updates it. So a copy is
         * saved. */
        saved[TE__ATTENTION_SAVED] = te__copied(spec.scale, TE_F32);
        ready = saved[TE__ATTENTION_SAVED] != NULL;
        args->fp8.s_dtype = state.s_dtype = spec.dtype;
        args->fp8.s_amax = spec.amax;
    }
    if (ready && te_op_attn_fwd(te, args) == TE_OK) {
        spec = te__attention_spec(call, &call->recipe, false, TE__SLOT_O,
                                  TE_ROWWISE | (fp8_output && te__grad_will_be(te) ? TE_COLUMNWISE : 0));
        y = te__heads_joined(te_tensor_detach(args->o));
        y = y ? te__quantize(y, &spec) : NULL;
        if (y && !fp8_output) y = te__quant_value(y, y->dtype);
    } else
        te__refuse(te__attention_meets(call), TE__ALL_REDUCE, te_error_code(te));
    if (y && !te__attention_save(args, parts, in, saved)) y = NULL;
    if (y) {
        memcpy(saved, codes, sizeof(codes));
        memset(&args->fp8, 0, sizeof(args->fp8));
        state.quant = te__quant_call_keep(call);
        y = te__record_owning("fp8_attention", y, te__fp8_attention_backward, &state, sizeof(state),
                              te__fp8_attention_release, in, TE__ATTENTION_INPUTS, saved, TE__ATTENTION_SAVED + 1);
    }
    if (!y) te__rng_back(te, before);
    return te__frame_return(te, y);
}
