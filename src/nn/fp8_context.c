/* nn/fp8_context.c: attention in FP8 over sequences that ranks share (context parallelism). The points at which tensors
 * are rounded are those of nn/fp8_attention.c. This file must not depend on the module tree.
 *
 * With a per-tensor recipe, q, k, v and the gradient of o travel as codes: half of the bytes of 16 bits. So they have
 * one scale on all ranks that exchange them. Under current scaling, the amax of q, k and v is that of the ranks of both
 * groups, the amax of dO that of the ranks that exchange heads. Under delayed scaling, the amaxes of all six tensors
 * are reduced over both groups when the scales are updated (te__quant_call.also), whatever the recipe's amax_group: the
 * scales are equal from the beginning. o travels before its rounding, and so do the gradients of q, k and v, whose
 * pieces are added up in f32: each rank rounds the sums of its own tokens.
 * With MXFP8, blocks do not cross chunks, so each rank rounds its own tokens, and the decoded numbers travel. */

typedef struct te__fp8_context {
    te__context_attention attention;
    te__quant_call quant;
    te_dtype s_dtype; /* format of the codes of S */
} te__fp8_context;
enum {
    TE__FP8_CONTEXT_S = TE__CONTEXT_SAVED, /* the scale of S */
    TE__FP8_CONTEXT_FACTOR,                /* the factor of the codes of q, k and v */
    TE__FP8_CONTEXT_SAVED
};

static void te__fp8_context_release(te_ctx *te, void *state) {
    (void)te;
    te__quant_call_drop(&((te__fp8_context *)state)->quant);
}

static void te__fp8_context_factors(te_attn_fp8 *fp8, te_tensor *factor) {
    fp8->q_scale_inv = fp8->k_scale_inv = fp8->v_scale_inv = factor;
}

/* Quantizes the gradient of o, and returns what the exchange of heads takes: codes, or with MXFP8 decoded numbers. */
static te_tensor *te__fp8_context_gradient(const te__fp8_context *s, te_tensor *dy, int leading, int64_t heads,
                                           int64_t d, te_attn_fp8 *fp8) {
    const te_recipe *recipe = &s->quant.recipe;
    const bool blocks = te__attention_by_blocks(&s->quant);
    te_group *const exchanged[2] = {s->attention.context.heads, NULL};
    te__quant_spec spec = te__attention_spec(&s->quant, recipe, true, TE__SLOT_DO, TE_ROWWISE);
    te_tensor *x = te_tensor_contiguous(dy);
    if (x && !blocks) x = te__as_heads(x, leading, heads, d);
    if (!x) return NULL;
    if (te__attention_measures(recipe) && te__group_size(exchanged[0]) > 1 &&
        te__attention_one_scale(&x, 1, recipe, true, exchanged, &spec) != TE_OK)
        return NULL;
    spec.usage = TE_ROWWISE;
    x = te__quantize(x, &spec);
    if (!x) return NULL;
    if (blocks) return te__as_heads(te__quant_value(x, x->dtype), leading, heads, d);
    fp8->do_scale_inv = x->quantized->row.scale;
    return te_tensor_contiguous(te__attention_codes_of(x));
}

static te_result te__fp8_context_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                          te_tensor **dx, const bool *needs) {
    const te__fp8_context *s = (const te__fp8_context *)state;
    const te_recipe *recipe = &s->quant.recipe, inner = te__attention_inner_recipe(recipe);
    const bool blocks = te__attention_by_blocks(&s->quant);
    const int last = saved[0]->ndim - 1;
    te__context_attention attention = s->attention;
    te_attn_fp8 *fp8 = &attention.args.fp8;
    te_tensor *d_o, *codes[3];
    te__quant_spec spec;
    te_result result;
    d_o = te__fp8_context_gradient(s, dy[0], last - 1,
                                   saved[0]->shape[last - 1] * te__group_size(attention.context.heads),
                                   saved[2]->shape[last], fp8);
    result = d_o ? TE_OK : te__refuse(te__attention_meets(&s->quant), TE__ALL_REDUCE, te_error_code(te));
    if (!blocks) {
        te__fp8_context_factors(fp8, saved[TE__FP8_CONTEXT_FACTOR]);
        spec = te__attention_spec(&s->quant, &inner, true, TE__SLOT_DP, TE_ROWWISE);
        fp8->s_dtype = s->s_dtype;
        fp8->s_scale = saved[TE__FP8_CONTEXT_S];
        fp8->dp_dtype = spec.dtype;
        fp8->dp_scale = spec.scale;
        fp8->dp_amax = spec.amax;
    }
    result = te__context_gradients(&attention, saved, d_o, dx, needs, result);
    result = result == TE_OK ? te__attention_quantize(dx, attention.args.format, &s->quant, true, codes)
                             : te__refuse(te__attention_meets(&s->quant), TE__ALL_REDUCE, result);
    return result == TE_OK ? te__attention_decode(codes, attention.args.format, blocks, dx) : result;
}

/* Quantizes q, k and v, and returns in `parts` what travels. *factor: of codes, else NULL. */
static te_result te__fp8_context_parts(te__context_attention *s, const te__quant_call *call, te_tensor *parts[3],
                                       te_tensor **factor) {
    const bool blocks = te__attention_by_blocks(call);
    te_op_attn_fwd_args *a = &s->args;
    te_tensor *codes[3];
    te_result result = TE_OK;
    int i;
    if (blocks) {
        te_op_attn_fwd_args sizes = *a;
        sizes.q = parts[0];
        sizes.k = parts[1];
        sizes.v = parts[2];
        result = te__attention_blocks_fit(&sizes);
    }
    if (result == TE_OK) result = te__attention_quantize(parts, a->format, call, false, codes);
    if (result != TE_OK) return result;
    if (blocks) return te__attention_decode(codes, a->format, true, parts);
    result = te__attention_codes(codes, parts, &a->fp8);
    *factor = codes[0]->quantized->row.scale;
    for (i = 0; i < 3 && result == TE_OK; i++) {
        parts[i] = te_tensor_contiguous(parts[i]);
        if (!parts[i]) result = te_error_code(codes[i]->te);
    }
    return result;
}

/* Does in FP8 what te__context_attention_run does. Returns [.., H dv]; if `fp8_output` is true, quantized for the GEMM
 * that reads it. */
static te_tensor *te__fp8_context_run(te_tensor *const q_k_v[3], const te_attn_desc *desc, te__context *c,
                                      const te__quant_call *call, bool fp8_output, te_result result) {
    te_ctx *te = c->heads ? c->heads->te : c->ring->te;
    const te_recipe inner = te__attention_inner_recipe(&call->recipe);
    const bool blocks = result == TE_OK && te__attention_by_blocks(call);
    const te__rng_state before = te__rng_now(te);
    te__fp8_context state = TE_ZERO;
    te__context_attention *s = &state.attention;
    te_tensor *parts[3] = {NULL, NULL, NULL}, *factor = NULL, *s_scale = NULL, *in[TE__CONTEXT_INPUTS],
              *saved[TE__FP8_CONTEXT_SAVED], *o = NULL, *y = NULL;
    te__quant_spec spec;
    bool compared;
    result = te__context_meets(c, q_k_v, desc, &call->recipe, result, &compared);
    if (result != TE_OK && compared) {
        te__refuse(te__attention_meets(call), TE__ALL_REDUCE, result);
        return NULL;
    }
    te__frame_begin(te);
    result = te__context_begin(s, c, q_k_v, desc, parts, result);
    if (result == TE_OK) result = te__fp8_context_parts(s, call, parts, &factor);
    if (result == TE_OK && !blocks) {
        spec = te__attention_spec(call, &inner, false, TE__SLOT_S, TE_ROWWISE);
        s_scale = te__copied(spec.scale, TE_F32); /* the end of the autocast region updates spec.scale */
        s->args.fp8.s_dtype = state.s_dtype = spec.dtype;
        s->args.fp8.s_amax = spec.amax;
        if (!s_scale) result = te_error_code(te);
    }
    if (result != TE_OK) te__refuse(te__attention_meets(call), TE__ALL_REDUCE, result);
    result = te__context_forward(s, parts, desc->max_logit, &o, result);
    if (result == TE_OK) {
        spec = te__attention_spec(call, &call->recipe, false, TE__SLOT_O,
                                  TE_ROWWISE | (fp8_output && te__grad_will_be(te) ? TE_COLUMNWISE : 0));
        y = te__heads_joined(te_tensor_detach(o));
        y = y ? te__quantize(y, &spec) : NULL;
        if (y && !fp8_output) y = te__quant_value(y, y->dtype);
    } else
        te__refuse(te__attention_meets(call), TE__ALL_REDUCE, result);
    if (y) {
        te__context_save(s, q_k_v, desc, parts, in, saved);
        saved[TE__FP8_CONTEXT_S] = s_scale;
        saved[TE__FP8_CONTEXT_FACTOR] = factor;
        memset(&s->args.fp8, 0, sizeof(s->args.fp8));
        state.quant = te__quant_call_keep(call);
        y = te__record_owning("fp8_context_attention", y, te__fp8_context_backward, &state, sizeof(state),
                              te__fp8_context_release, in, TE__CONTEXT_INPUTS, saved, TE__FP8_CONTEXT_SAVED);
    }
    if (!y) te__rng_back(te, before);
    return te__frame_return(te, y);
}
