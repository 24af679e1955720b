/* ops/attn/op.c: the defaults and checks of the attention operations, and the kernel arguments that both backends start
 * from. This file must not depend on which backend runs. */

static bool te__attn_pads(te_attn_mask mask) {
    return (int)mask >= (int)TE_MASK_PADDING && (int)mask <= (int)TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
}
static bool te__attn_is_causal(te_attn_mask mask) {
    return mask != TE_MASK_NONE && mask != TE_MASK_PADDING && mask != TE_MASK_ARBITRARY;
}

/* ---- defaults ---- */

static te_attn_mask te__attn_mask_of(const te_attn_rule *x) {
    return x->mask == TE_MASK_DEFAULT ? TE_MASK_CAUSAL : x->mask;
}
/* Returns the factor of the scores for heads of d channels: `given`, or 1 / sqrt(d) if `given` is 0. */
static float te__attn_scale(float given, int64_t d) {
    return given != 0.0f ? given : te__floats_divide(1.0, sqrt((double)d));
}
/* Fills in the defaults of a rule that has been checked. d is the head size of q. */
static void te__attn_resolve(te_attn_rule *x, int64_t d) {
    x->mask = te__attn_mask_of(x);
    if (x->mask == TE_MASK_CAUSAL || x->mask == TE_MASK_PADDING_CAUSAL)
        x->bottom_right_diagonal = TE_OFF;
    else if (te__attn_is_causal(x->mask) || x->bottom_right_diagonal == TE_DEFAULT)
        x->bottom_right_diagonal = TE_ON;
    if (!x->window.on) x->window.left = x->window.right = -1;
    x->softmax_scale = te__attn_scale(x->softmax_scale, d);
}

/* ---- sizes ---- */

/* Returns the layout of k and v. A paged cache [pages, page_size, G, d] is TE_BSHD: a page is a sequence. */
static te_qkv_format te__attn_kv_format(const te_op_attn_fwd_args *a) {
    return a->rule.kv_bshd || a->rule.page_table ? TE_BSHD : a->format;
}
static int te__attn_seq_dim(te_qkv_format format) { return format == TE_BSHD ? 1 : 0; }

/* The sizes of a problem. They can be read only after the tensors' numbers of dimensions have been checked. */
typedef struct te__attn_sizes {
    int64_t b, heads, groups, d, d_v;
    int64_t s_q, s_kv;             /* of the longest sequence */
    int64_t rows_q, rows_kv;       /* sizes of the sequence dimensions of q and of k */
    int64_t kv_b;                  /* sequences, or pages, of k */
    bool packed_q, packed_kv, paged;
} te__attn_sizes;

static te__attn_sizes te__attn_sizes_of(const te_op_attn_fwd_args *a) {
    const te_qkv_format kv = te__attn_kv_format(a);
    const te_attn_rule *x = &a->rule;
    te__attn_sizes s = TE_ZERO;
    s.packed_q = a->format == TE_THD;
    s.packed_kv = kv == TE_THD;
    s.paged = x->page_table != NULL;
    s.rows_q = a->q->shape[te__attn_seq_dim(a->format)];
    s.rows_kv = a->k->shape[te__attn_seq_dim(kv)];
    s.b = s.packed_q ? te__numel(x->cu_seqlens_q) - 1 : a->q->shape[1 - te__attn_seq_dim(a->format)];
    s.kv_b = s.packed_kv ? s.b : a->k->shape[1 - te__attn_seq_dim(kv)];
    s.s_q = s.packed_q && x->max_seqlen_q ? x->max_seqlen_q : s.rows_q;
    s.s_kv = s.paged                           ? (s.kv_b ? x->page_table->shape[1] * s.rows_kv : 0)
             : s.packed_kv && x->max_seqlen_kv ? x->max_seqlen_kv
                                               : s.rows_kv;
    s.heads = a->q->shape[a->q->ndim - 2];
    s.groups = a->k->shape[a->k->ndim - 2];
    s.d = a->q->shape[a->q->ndim - 1];
    s.d_v = a->v->shape[a->v->ndim - 1];
    return s;
}

/* ---- checks ---- */

static te_result te__attn_want_heads(te_ctx *te, const char *op, const char *name, const te_tensor *x,
                                     te_qkv_format format) {
    char text[TE__SHAPE_TEXT];
    if (format != TE_THD) return te__want_heads(te, op, name, x);
    if (x->ndim != 3)
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; [tokens, heads, d] is needed with TE_THD", op, name,
                        te__shape_text(x, text));
    return te__want_channels(te, op, name, x);
}

/* Checks that x is [s, b, heads, d] in the layout of `format`. `like` names the tensors that determine these sizes. */
static te_result te__attn_want_shape(te_ctx *te, const char *op, const char *name, const te_tensor *x,
                                     te_qkv_format format, int64_t s, int64_t b, int64_t heads, int64_t d,
                                     const char *like) {
    char text[TE__SHAPE_TEXT], want[TE__SHAPE_TEXT];
    const int at = te__attn_seq_dim(format), ndim = format == TE_THD ? 3 : 4;
    int64_t shape[4];
    te_result r = te__attn_want_heads(te, op, name, x, format);
    if (r != TE_OK) return r;
    shape[1 - at] = b;
    shape[at] = s;
    shape[ndim - 2] = heads;
    shape[ndim - 1] = d;
    if (memcmp(shape, x->shape, (size_t)ndim * sizeof(int64_t)) == 0) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; with %s it must be %s", op, name, te__shape_text(x, text), like,
                    te__dims_text(ndim, shape, want));
}

/* Checks that x is given if `wanted` is true, and is NULL otherwise. The message names `with`, the option that needs
 * x. */
static te_result te__attn_want_with(te_ctx *te, const char *op, const char *name, const te_tensor *x, bool wanted,
                                    const char *with) {
    if (!x == !wanted) return TE_OK;
    return x ? te__fail(te, TE_ERR_INVALID, "%s: rule.%s belongs to %s, which is not what was asked for; leave it NULL",
                        op, name, with)
             : te__fail(te, TE_ERR_STATE, "%s: rule.%s is NULL; %s needs it", op, name, with);
}

/* Checks that x has four dimensions, each of size 1 or as in [b, heads, s_q, s_kv]. `whole`: the last dimension
 * must be s_kv. */
static te_result te__attn_want_table(te_ctx *te, const char *op, const char *name, const te_tensor *x,
                                     const te__attn_sizes *s, bool whole) {
    char text[TE__SHAPE_TEXT];
    int64_t full[4];
    bool fits = x->ndim == 4;
    int i;
    full[0] = s->b;
    full[1] = s->heads;
    full[2] = s->s_q;
    full[3] = s->s_kv;
    for (i = 0; fits && i < 4; i++) fits = x->shape[i] == full[i] || (x->shape[i] == 1 && !(whole && i == 3));
    if (fits) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: rule.%s is %s; [%lld or 1, %lld or 1, %lld or 1, %lld%s] is needed", op,
                    name, te__shape_text(x, text), (long long)full[0], (long long)full[1], (long long)full[2],
                    (long long)full[3], whole ? "" : " or 1");
}

/* Checks the shape of the block mask x: one te_attn_block for TE_ATTN_BLOCK_SIZE queries by TE_ATTN_BLOCK_SIZE keys. */
static te_result te__attn_want_blocks(te_ctx *te, const char *op, const te_tensor *x, const te__attn_sizes *s) {
    const int64_t rows = te__div_up(s->s_q, TE_ATTN_BLOCK_SIZE), columns = te__div_up(s->s_kv, TE_ATTN_BLOCK_SIZE);
    char text[TE__SHAPE_TEXT];
    if (x->ndim == 4 && (x->shape[0] == s->b || x->shape[0] == 1) && (x->shape[1] == s->heads || x->shape[1] == 1) &&
        x->shape[2] == rows && x->shape[3] == columns)
        return TE_OK;
    return te__fail(
        te, TE_ERR_SHAPE,
        "%s: rule.block_mask is %s; [%lld or 1, %lld or 1, %lld, %lld] is needed, a byte for each %d queries and keys",
        op, te__shape_text(x, text), (long long)s->b, (long long)s->heads, (long long)rows, (long long)columns,
        TE_ATTN_BLOCK_SIZE);
}

/* Checks the options that decide which tensors must be given. The sizes of the problem are not known yet. */
static te_result te__attn_check_options(te_ctx *te, const char *op, const te_op_attn_fwd_args *a) {
    static const char padding[] = "a padding mask";
    const te_attn_rule *x = &a->rule;
    const te_attn_mask mask = te__attn_mask_of(x);
    bool pads;
    te_result r = TE_OK;
    char text[TE__SHAPE_TEXT];
    if ((int)mask < (int)TE_MASK_NONE || (int)mask > (int)TE_MASK_ARBITRARY)
        return te__fail(te, TE_ERR_INVALID, "%s: mask is %d; see te_attn_mask", op, (int)mask);
    if ((int)a->format < (int)TE_SBHD || (int)a->format > (int)TE_THD)
        return te__fail(te, TE_ERR_INVALID, "%s: format is %d; TE_SBHD (0), TE_BSHD (1) and TE_THD (2) are possible",
                        op, (int)a->format);
    pads = te__attn_pads(mask);
    if (a->format == TE_THD && !pads)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: mask is %d with TE_THD; packed sequences need a padding mask (%d to %d)", op, (int)mask,
                        (int)TE_MASK_PADDING, (int)TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT);
    r = te__attn_want_with(te, op, "cu_seqlens_q", x->cu_seqlens_q, pads, padding);
    if (r == TE_OK) r = te__attn_want_with(te, op, "cu_seqlens_kv", x->cu_seqlens_kv, pads, padding);
    if (r == TE_OK && x->cu_seqlens_q_padded)
        r = te__attn_want_with(te, op, "cu_seqlens_q_padded", x->cu_seqlens_q_padded, a->format == TE_THD, "TE_THD");
    if (r == TE_OK && x->cu_seqlens_kv_padded)
        r = te__attn_want_with(te, op, "cu_seqlens_kv_padded", x->cu_seqlens_kv_padded, te__attn_kv_format(a) == TE_THD,
                               "packed keys");
    if (r == TE_OK)
        r = te__attn_want_with(te, op, "attention_mask", x->attention_mask, mask == TE_MASK_ARBITRARY,
                               "TE_MASK_ARBITRARY");
    if (r == TE_OK && x->page_table) r = te__attn_want_with(te, op, "page_table", x->page_table, pads, padding);
    if (r != TE_OK) return r;
    if ((int)x->bottom_right_diagonal < (int)TE_DEFAULT || (int)x->bottom_right_diagonal > (int)TE_OFF)
        return te__fail(te, TE_ERR_INVALID, "%s: rule.bottom_right_diagonal is %d; see te_switch", op,
                        (int)x->bottom_right_diagonal);
    if ((int)x->core_attention_bias_type < (int)TE_ATTN_BIAS_NONE ||
        (int)x->core_attention_bias_type > (int)TE_ATTN_BIAS_ALIBI)
        return te__fail(te, TE_ERR_INVALID, "%s: rule.core_attention_bias_type is %d; see te_attn_bias", op,
                        (int)x->core_attention_bias_type);
    if ((int)x->softmax_type < (int)TE_SOFTMAX_VANILLA || (int)x->softmax_type > (int)TE_SOFTMAX_LEARNABLE)
        return te__fail(te, TE_ERR_INVALID, "%s: rule.softmax_type is %d; see te_softmax_type", op,
                        (int)x->softmax_type);
    r = te__attn_want_with(te, op, "core_attention_bias", x->core_attention_bias,
                           x->core_attention_bias_type == TE_ATTN_BIAS_PRE_SCALE ||
                               x->core_attention_bias_type == TE_ATTN_BIAS_POST_SCALE,
                           "TE_ATTN_BIAS_PRE_SCALE or TE_ATTN_BIAS_POST_SCALE");
    if (r == TE_OK && x->alibi_slopes)
        r = te__attn_want_with(te, op, "alibi_slopes", x->alibi_slopes,
                               x->core_attention_bias_type == TE_ATTN_BIAS_ALIBI, "TE_ATTN_BIAS_ALIBI");
    if (r == TE_OK)
        r = te__attn_want_with(te, op, "softmax_offset", x->softmax_offset, x->softmax_type == TE_SOFTMAX_LEARNABLE,
                               "TE_SOFTMAX_LEARNABLE");
    if (r != TE_OK) return r;
    if (x->max_seqlen_q < 0 || x->max_seqlen_q > 1 << 28 || x->max_seqlen_kv < 0 || x->max_seqlen_kv > 1 << 28)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: rule.max_seqlen_q is %lld and max_seqlen_kv is %lld; 0 to 2^28 are possible", op,
                        (long long)x->max_seqlen_q, (long long)x->max_seqlen_kv);
    r = te__score_mod_check(te, op, &x->score_mod);
    if (r != TE_OK) return r;
    if (x->cu_seqlens_q && te__numel(x->cu_seqlens_q) < 1)
        return te__fail(te, TE_ERR_SHAPE, "%s: rule.cu_seqlens_q is %s; [b + 1] is needed", op,
                        te__shape_text(x->cu_seqlens_q, text));
    if (x->page_table && x->page_table->ndim != 2)
        return te__fail(te, TE_ERR_SHAPE, "%s: rule.page_table is %s; [b, pages of each sequence] is needed", op,
                        te__shape_text(x->page_table, text));
    return TE_OK;
}

/* Checks the shapes of the rule's tensors. */
static te_result te__attn_check_shapes(te_ctx *te, const char *op, const te_op_attn_fwd_args *a,
                                       const te__attn_sizes *s) {
    const te_attn_rule *x = &a->rule;
    char text[TE__SHAPE_TEXT];
    te_result r = te__want_numel(te, op, "rule.cu_seqlens_q", x->cu_seqlens_q, s->b + 1);
    if (r == TE_OK) r = te__want_numel(te, op, "rule.cu_seqlens_kv", x->cu_seqlens_kv, s->b + 1);
    if (r == TE_OK) r = te__want_numel(te, op, "rule.cu_seqlens_q_padded", x->cu_seqlens_q_padded, s->b + 1);
    if (r == TE_OK) r = te__want_numel(te, op, "rule.cu_seqlens_kv_padded", x->cu_seqlens_kv_padded, s->b + 1);
    if (r == TE_OK && x->attention_mask) r = te__attn_want_table(te, op, "attention_mask", x->attention_mask, s, false);
    if (r == TE_OK && x->core_attention_bias)
        r = te__attn_want_table(te, op, "core_attention_bias", x->core_attention_bias, s, true);
    if (r == TE_OK && x->block_mask) r = te__attn_want_blocks(te, op, x->block_mask, s);
    if (r == TE_OK) r = te__want_numel(te, op, "rule.softmax_offset", x->softmax_offset, s->heads);
    if (r == TE_OK) r = te__want_numel(te, op, "max_logit", a->max_logit, s->heads);
    if (r != TE_OK) return r;
    if (x->alibi_slopes && te__numel(x->alibi_slopes) != s->heads && te__numel(x->alibi_slopes) != s->b * s->heads)
        return te__fail(te, TE_ERR_SHAPE, "%s: rule.alibi_slopes is %s; [%lld] or [%lld, %lld] is needed", op,
                        te__shape_text(x->alibi_slopes, text), (long long)s->heads, (long long)s->b,
                        (long long)s->heads);
    if (x->page_table && x->page_table->shape[0] != s->b)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: rule.page_table is %s and q has %lld sequences; a row for each is needed", op,
                        te__shape_text(x->page_table, text), (long long)s->b);
    if (s->s_kv > 1 << 28)
        return te__fail(te, TE_ERR_UNSUPPORTED, "%s: rule.page_table has room for %lld keys; at most 2^28 are possible",
                        op, (long long)s->s_kv);
    return TE_OK;
}

/* Checks k and v of a cache of E4M3 codes, of which `codes` says that k or v has them, and q has not. */
static te_result te__attn_check_cache(te_ctx *te, const char *op, const te_op_attn_fwd_args *a, bool codes) {
    const te_attn_fp8 *f = &a->fp8;
    te_result r;
    if (codes && (a->k->dtype != TE_F8E4M3 || a->v->dtype != TE_F8E4M3))
        return te__fail(te, TE_ERR_DTYPE,
                        "%s: q is %s, k is %s and v is %s; all three are FP8 codes, or none of them, or k and v are "
                        "e4m3, with rule.k_factors and rule.v_factors",
                        op, te_dtype_name(a->q->dtype), te_dtype_name(a->k->dtype), te_dtype_name(a->v->dtype));
    r = te__want_factors(te, op, "k", a->k, "rule.k_factors", a->rule.k_factors);
    if (r == TE_OK) r = te__want_factors(te, op, "v", a->v, "rule.v_factors", a->rule.v_factors);
    if (r == TE_OK && codes &&
        (f->s_dtype || f->dp_dtype || f->s_scale || f->dp_scale || f->s_amax || f->dp_amax || f->q_scale_inv ||
         f->k_scale_inv || f->v_scale_inv))
        r = te__fail(te, TE_ERR_INVALID,
                     "%s: q is %s and k is %s, and a field of fp8 is given; a cache of codes is read in high "
                     "precision: leave fp8 zero",
                     op, te_dtype_name(a->q->dtype), te_dtype_name(a->k->dtype));
    return r;
}
/* Checks that q, k and v are all FP8 codes with a factor each, or that none of them is and no factor is given, or that
 * k and v alone are those of a cache. */
static te_result te__attn_check_codes(te_ctx *te, const char *op, const te_op_attn_fwd_args *a) {
    static const char names[] = "qkv";
    const te_tensor *x[3], *inv[3];
    const bool codes = te__is_fp8(a->q->dtype);
    te_result r = TE_OK;
    int i;
    if (!codes) {
        const bool cache = te__is_fp8(a->k->dtype) || te__is_fp8(a->v->dtype);
        if (cache || a->rule.k_factors || a->rule.v_factors) return te__attn_check_cache(te, op, a, cache);
    } else if (a->rule.k_factors || a->rule.v_factors)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: q is %s and rule.%s is given; the factors of rows belong to a cache, whose q is in high "
                        "precision: leave it NULL",
                        op, te_dtype_name(a->q->dtype), a->rule.k_factors ? "k_factors" : "v_factors");
    x[0] = a->q, x[1] = a->k, x[2] = a->v;
    inv[0] = a->fp8.q_scale_inv, inv[1] = a->fp8.k_scale_inv, inv[2] = a->fp8.v_scale_inv;
    for (i = 1; i < 3; i++)
        if (te__is_fp8(x[i]->dtype) != codes)
            return te__fail(te, TE_ERR_DTYPE,
                            "%s: q is %s and %c is %s; either all of q, k and v are FP8 codes, or none of them", op,
                            te_dtype_name(a->q->dtype), names[i], te_dtype_name(x[i]->dtype));
    for (i = 0; i < 3 && r == TE_OK; i++) {
        char name[32];
        if (!inv[i] == codes)
            return codes ? te__fail(te, TE_ERR_STATE,
                                    "%s: %c is %s and fp8.%c_scale_inv is NULL; codes need the factor that makes them "
                                    "numbers, f32 [1]",
                                    op, names[i], te_dtype_name(x[i]->dtype), names[i])
                         : te__fail(te, TE_ERR_INVALID,
                                    "%s: %c is %s and fp8.%c_scale_inv is given, which belongs to FP8 codes; leave it "
                                    "NULL",
                                    op, names[i], te_dtype_name(x[i]->dtype), names[i]);
        snprintf(name, sizeof(name), "fp8.%c_scale_inv", names[i]);
        r = te__want_numel(te, op, name, inv[i], 1);
    }
    return r;
}
/* Checks that d_o is FP8 codes with a factor if q, k and v are codes, and neither otherwise. */
static te_result te__attn_check_gradient_codes(te_ctx *te, const char *op, const te_op_attn_bwd_args *a) {
    const bool codes = te__is_fp8(a->q->dtype);
    if (te__is_fp8(a->d_o->dtype) != codes)
        return te__fail(te, TE_ERR_DTYPE,
                        "%s: q is %s and d_o is %s; either all of q, k, v and d_o are FP8 codes, or none of them", op,
                        te_dtype_name(a->q->dtype), te_dtype_name(a->d_o->dtype));
    if (!a->fp8.do_scale_inv == codes)
        return codes ? te__fail(te, TE_ERR_STATE,
                                "%s: d_o is %s and fp8.do_scale_inv is NULL; codes need the factor that makes them "
                                "numbers, f32 [1]",
                                op, te_dtype_name(a->d_o->dtype))
                     : te__fail(te, TE_ERR_INVALID,
                                "%s: d_o is %s and fp8.do_scale_inv is given, which belongs to FP8 codes; leave it "
                                "NULL",
                                op, te_dtype_name(a->d_o->dtype));
    return te__want_numel(te, op, "fp8.do_scale_inv", a->fp8.do_scale_inv, 1);
}
static te_result te__attn_check_fp8(te_ctx *te, const char *op, const te_attn_fp8 *f) {
    te_result r;
    if ((f->s_dtype && !te__is_fp8(f->s_dtype)) || (f->dp_dtype && !te__is_fp8(f->dp_dtype)))
        return te__fail(te, TE_ERR_DTYPE,
                        "%s: fp8.s_dtype is %s and fp8.dp_dtype is %s; e4m3, e5m2 and none (0) are possible", op,
                        te_dtype_name(f->s_dtype), te_dtype_name(f->dp_dtype));
    r = te__want_numel(te, op, "fp8.s_scale", f->s_scale, 1);
    if (r == TE_OK) r = te__want_numel(te, op, "fp8.s_amax", f->s_amax, 1);
    if (r == TE_OK) r = te__want_numel(te, op, "fp8.dp_scale", f->dp_scale, 1);
    return r == TE_OK ? te__want_numel(te, op, "fp8.dp_amax", f->dp_amax, 1) : r;
}

/* Checks the cumulative lengths [b + 1] of the sequences. `at` is without padding, and `padded` is with padding. Either
 * is NULL if it is not given. `at` must not descend. Every sequence must end within `rows`. With `packed` and `padded`,
 * every sequence must end before the next sequence begins. */
static te_result te__attn_check_starts(te_ctx *te, const char *op, const char *name, const int32_t *at,
                                       const int32_t *padded, int64_t b, bool packed, int64_t rows) {
    const int32_t *start = padded ? padded : at;
    int64_t i;
    for (i = 0; at && i < b; i++) {
        const int64_t length = (int64_t)at[i + 1] - at[i], first = packed ? start[i] : 0;
        if (length < 0)
            return te__fail(te, TE_ERR_INVALID, "%s: rule.%s[%lld] is %d and [%lld] is %d; starts must not descend", op,
                            name, (long long)i, (int)at[i], (long long)i + 1, (int)at[i + 1]);
        if (first < 0 || first + length > rows)
            return te__fail(te, TE_ERR_INVALID, "%s: by rule.%s%s, sequence %lld has rows %lld to %lld; there are %lld",
                            op, name, packed && padded ? "_padded" : "", (long long)i, (long long)first,
                            (long long)(first + length) - 1, (long long)rows);
        if (packed && padded && first + length > start[i + 1])
            return te__fail(te, TE_ERR_INVALID,
                            "%s: rule.%s has %lld rows for sequence %lld, and rule.%s_padded has %d for it", op, name,
                            (long long)length, (long long)i, name, (int)(start[i + 1] - start[i]));
    }
    return TE_OK;
}
/* Returns the tensors of a rule that say where rows are. */
enum { TE__ATTN_PLACES = 5 };
static void te__attn_places(const te_attn_rule *x, const te_tensor *places[TE__ATTN_PLACES]) {
    places[0] = x->cu_seqlens_q, places[1] = x->cu_seqlens_q_padded, places[2] = x->cu_seqlens_kv,
    places[3] = x->cu_seqlens_kv_padded, places[4] = x->page_table;
}
/* Checks the numbers in the tensors of te__attn_places. `at` has these numbers in host memory; NULL: not given. */
static te_result te__attn_check_places(te_ctx *te, const char *op, const te_op_attn_fwd_args *a,
                                       const int32_t *const at[TE__ATTN_PLACES]) {
    const te__attn_sizes s = te__attn_sizes_of(a);
    const int64_t pages = at[4] ? a->rule.page_table->shape[1] : 0;
    te_result r = te__attn_check_starts(te, op, "cu_seqlens_q", at[0], at[1], s.b, s.packed_q, s.rows_q);
    int64_t b, i;
    if (r == TE_OK)
        r = te__attn_check_starts(te, op, "cu_seqlens_kv", at[2], at[3], s.b, s.packed_kv,
                                  s.packed_kv ? s.rows_kv : s.s_kv);
    for (b = 0; r == TE_OK && at[4] && b < s.b; b++) {
        const int64_t used = at[2] ? te__div_up((int64_t)at[2][b + 1] - at[2][b], s.rows_kv) : pages;
        for (i = 0; i < used; i++)
            if (at[4][b * pages + i] < 0 || at[4][b * pages + i] >= s.kv_b)
                return te__fail(te, TE_ERR_INVALID,
                                "%s: rule.page_table[%lld][%lld] is %d; the cache has pages 0 to %lld", op,
                                (long long)b, (long long)i, (int)at[4][b * pages + i], (long long)s.kv_b - 1);
    }
    return r;
}
/* Checks the numbers in the tensors of te__attn_places if these tensors are in host memory. */
static te_result te__attn_check_lengths(te_ctx *te, const char *op, const te_op_attn_fwd_args *a) {
    const te_tensor *places[TE__ATTN_PLACES];
    const int32_t *at[TE__ATTN_PLACES];
    int i;
    te__attn_places(&a->rule, places);
    for (i = 0; i < TE__ATTN_PLACES; i++) at[i] = (const int32_t *)te__data(places[i]);
    return te__attn_check_places(te, op, a, at);
}
/* In debug mode, copies the numbers in the tensors of te__attn_places from the GPU, and checks them. Without this check
 * the kernels limit the numbers to rows that exist. */
static te_result te__attn_check_on_device(te_ctx *te, const char *op, const te_op_attn_fwd_args *a) {
    const te_tensor *places[TE__ATTN_PLACES];
    int32_t *at[TE__ATTN_PLACES] = {NULL, NULL, NULL, NULL, NULL};
    te_result r = TE_OK;
    int i;
    if (!te->debug_sync || te->capture || !te_ctx_is_cuda(te)) return TE_OK;
    te__attn_places(&a->rule, places);
    for (i = 0; r == TE_OK && i < TE__ATTN_PLACES; i++) {
        if (!places[i] || !places[i]->buffer) continue;
        at[i] = (int32_t *)te__alloc(te, te__max(4, te_tensor_bytes(places[i])));
        r = at[i] ? te->device->download(te, at[i], te__data(places[i]), te_tensor_bytes(places[i]))
                  : TE_ERR_OUT_OF_MEMORY;
    }
    if (r == TE_OK) r = te__attn_check_places(te, op, a, (const int32_t *const *)at);
    for (i = 0; i < TE__ATTN_PLACES; i++)
        if (at[i]) te__free(te, at[i]);
    return r;
}

/* Checks the arguments of the forward or the backward pass, and fills in the defaults of their rule. */
static te_result te__attn_check(te_ctx *te, const char *op, te_op_attn_fwd_args *a) {
    char qt[TE__SHAPE_TEXT], kt[TE__SHAPE_TEXT];
    te__attn_sizes s;
    te_qkv_format kv;
    te_result r = te__attn_check_options(te, op, a);
    if (r != TE_OK) return r;
    kv = te__attn_kv_format(a);
    r = te__attn_want_heads(te, op, "q", a->q, a->format);
    if (r == TE_OK) r = te__attn_want_heads(te, op, "k", a->k, kv);
    if (r == TE_OK) r = te__attn_want_heads(te, op, "v", a->v, kv);
    if (r != TE_OK) return r;
    s = te__attn_sizes_of(a);
    if ((!s.paged && s.kv_b != s.b) || a->k->shape[a->k->ndim - 1] != s.d)
        return te__fail(te, TE_ERR_SHAPE, "%s: q is %s and k is %s; batch and head size must be equal", op,
                        te__shape_text(a->q, qt), te__shape_text(a->k, kt));
    if (s.groups == 0 ? s.heads != 0 : s.heads % s.groups != 0)
        return te__fail(te, TE_ERR_SHAPE, "%s: q has %lld heads and k has %lld; the second must divide the first", op,
                        (long long)s.heads, (long long)s.groups);
    r = te__attn_want_shape(te, op, "v", a->v, kv, s.rows_kv, s.kv_b, s.groups, s.d_v, "k");
    if (r == TE_OK) r = te__attn_want_shape(te, op, "o", a->o, a->format, s.rows_q, s.b, s.heads, s.d_v, "q and v");
    if (r != TE_OK) return r;
    if (s.d < 1 || s.d > TE__ATTN_MAX_D || s.d_v < 1 || s.d_v > TE__ATTN_MAX_D)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "%s: the head sizes are %lld (q and k) and %lld (v); 1 to %d are possible", op, (long long)s.d,
                        (long long)s.d_v, TE__ATTN_MAX_D);
    r = te__want_numel(te, op, "lse", a->lse, s.packed_q ? s.heads * s.rows_q : s.b * s.heads * s.s_q);
    if (r == TE_OK) r = te__want_rng(te, op, a->rng);
    if (r == TE_OK) r = te__attn_check_shapes(te, op, a, &s);
    if (r == TE_OK) r = te__attn_check_fp8(te, op, &a->fp8);
    if (r == TE_OK) r = te__attn_check_codes(te, op, a);
    if (r != TE_OK) return r;
    if (a->rule.window.on && (a->rule.window.left < -1 || a->rule.window.right < -1))
        return te__fail(te, TE_ERR_INVALID,
                        "%s: the window is %lld, %lld; each is a number of keys, or -1 for no bound", op,
                        (long long)a->rule.window.left, (long long)a->rule.window.right);
    if (!(a->rule.dropout_p >= 0.0f && a->rule.dropout_p <= 1.0f))
        return te__fail(te, TE_ERR_INVALID, "%s: dropout_p is %g; it is a probability, 0 to 1", op,
                        (double)a->rule.dropout_p);
    if (!(a->rule.softcap >= 0.0f && a->rule.softcap <= FLT_MAX))
        return te__fail(te, TE_ERR_INVALID, "%s: softcap is %g; it is positive, or 0 for none", op,
                        (double)a->rule.softcap);
    if (a->rule.softcap > 0.0f && a->rule.core_attention_bias_type == TE_ATTN_BIAS_PRE_SCALE)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "%s: softcap %g with TE_ATTN_BIAS_PRE_SCALE, which is added to what is capped; give the bias "
                        "as TE_ATTN_BIAS_POST_SCALE, which is added to capped scores",
                        op, (double)a->rule.softcap);
    te__attn_resolve(&a->rule, s.d);
    return te__attn_check_on_device(te, op, a);
}

static te_result te__check_attn_fwd(te_ctx *te, te_op_attn_fwd_args *a) {
    return te__attn_check(te, "attn_fwd", a);
}

/* Returns the arguments of the forward pass whose gradients the backward pass `a` computes. */
static te_op_attn_fwd_args te__attn_forward_of(const te_op_attn_bwd_args *a) {
    te_op_attn_fwd_args f = TE_ZERO;
    f.q = a->q;
    f.k = a->k;
    f.v = a->v;
    f.o = (te_tensor *)(a->o ? a->o : a->d_o); /* o and d_o have one shape */
    f.lse = (te_tensor *)a->lse;
    f.format = a->format;
    f.rule = a->rule;
    f.seed = a->seed;
    f.offset = a->offset;
    f.rng = a->rng;
    f.fp8 = a->fp8;
    return f;
}

static te_result te__check_attn_bwd(te_ctx *te, te_op_attn_bwd_args *a) {
    const char *op = "attn_bwd";
    te_op_attn_fwd_args f = te__attn_forward_of(a);
    const bool codes = te__is_fp8(a->k->dtype) || te__is_fp8(a->v->dtype);
    te__attn_sizes s;
    te_qkv_format kv;
    te_result r;
    if (a->rule.k_factors || a->rule.v_factors || (codes && !te__is_fp8(a->q->dtype)))
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "%s: q is %s, k is %s and v is %s%s; a cache's codes, whose rows have factors, are for "
                        "inference and have no gradients: pass numbers, or codes of q, k, v and d_o with the factors "
                        "of fp8",
                        op, te_dtype_name(a->q->dtype), te_dtype_name(a->k->dtype), te_dtype_name(a->v->dtype),
                        a->rule.k_factors   ? ", and rule.k_factors is given"
                        : a->rule.v_factors ? ", and rule.v_factors is given"
                                            : "");
    r = te__attn_check(te, op, &f);
    if (r != TE_OK) return r;
    if (a->fp8.part_of_keys && !a->o)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: fp8.part_of_keys is true and o is NULL; the softmax's gradient needs the output of all "
                        "keys: give o",
                        op);
    a->rule = f.rule;
    r = te__score_mod_check_gradient(te, op, &a->rule.score_mod);
    if (r != TE_OK) return r;
    if (a->rule.page_table)
        return te__fail(
            te, TE_ERR_UNSUPPORTED,
            "%s: keys in pages (rule.page_table) are for inference and have no gradients; pass contiguous k and v", op);
    s = te__attn_sizes_of(&f);
    kv = te__attn_kv_format(&f);
    r = te__attn_want_shape(te, op, "d_o", a->d_o, a->format, s.rows_q, s.b, s.heads, s.d_v, "q and v");
    if (r == TE_OK) r = te__attn_check_gradient_codes(te, op, a);
    if (r == TE_OK) r = te__attn_want_shape(te, op, "dq", a->dq, a->format, s.rows_q, s.b, s.heads, s.d, "q");
    if (r == TE_OK) r = te__attn_want_shape(te, op, "dk", a->dk, kv, s.rows_kv, s.kv_b, s.groups, s.d, "k");
    if (r == TE_OK) r = te__attn_want_shape(te, op, "dv", a->dv, kv, s.rows_kv, s.kv_b, s.groups, s.d_v, "v");
    if (r == TE_OK && a->dbias && !a->rule.core_attention_bias)
        r = te__fail(te, TE_ERR_INVALID,
                     "%s: dbias is given and rule.core_attention_bias is NULL; there is no bias to have a gradient",
                     op);
    if (r == TE_OK && a->dbias)
        r = te__want_same(te, op, "dbias", a->dbias, "rule.core_attention_bias", a->rule.core_attention_bias);
    if (r == TE_OK && a->dsoftmax_offset && !a->rule.softmax_offset)
        r = te__fail(
            te, TE_ERR_INVALID,
            "%s: dsoftmax_offset is given and rule.softmax_offset is NULL; there is no offset to have a gradient", op);
    return r == TE_OK ? te__want_numel(te, op, "dsoftmax_offset", a->dsoftmax_offset, s.heads) : r;
}

/* ---- the problem ---- */

static te__attn_view te__attn_view_of(const te_tensor *x, te_qkv_format format) {
    te__attn_view v = TE_ZERO;
    v.p = te__data(x);
    v.s = x->stride[te__attn_seq_dim(format)];
    v.b = format == TE_THD ? 0 : x->stride[1 - te__attn_seq_dim(format)];
    v.h = x->stride[x->ndim - 2];
    v.dt = (int)x->dtype;
    return v;
}

/* Returns a view of the factors of k's or v's rows. dt is 0 without them. */
static te__attn_view te__attn_factors_of(const te_tensor *x, te_qkv_format format) {
    te__attn_view v = TE_ZERO;
    if (!x) return v;
    v.p = te__data(x);
    v.s = x->stride[te__attn_seq_dim(format)];
    v.b = format == TE_THD ? 0 : x->stride[1 - te__attn_seq_dim(format)];
    v.h = x->stride[x->ndim - 1];
    v.dt = (int)x->dtype;
    return v;
}

static te__attn_table te__attn_table_of(const te_tensor *x) {
    te__attn_table t = TE_ZERO;
    if (!x) return t;
    t.p = te__data(x);
    t.b = x->shape[0] == 1 ? 0 : x->stride[0];
    t.h = x->shape[1] == 1 ? 0 : x->stride[1];
    t.i = x->shape[2] == 1 ? 0 : x->stride[2];
    t.j = x->shape[3] == 1 ? 0 : x->stride[3];
    t.dt = (int)x->dtype;
    return t;
}

/* Returns dropout's probability p as the kernels use it: a multiple of 2^-16 if p is below 1/64, otherwise a multiple
 * of 1/4096. Multiples of 1/4096 save a quarter of the random bits (te__attn_threshold). */
static float te__attn_used_p(float p) {
    const float steps = p < 1.0f / 64.0f ? 65536.0f : 4096.0f;
    return p < 1.0f ? fminf(rintf(p * steps), steps - 1.0f) / steps : 1.0f;
}
/* Copies a rule to the kernels' arguments. te__attn_resolve must have completed the rule. */
static void te__attn_told(te__attn_kargs *k, const te_attn_rule *in, const te__attn_sizes *s) {
    const int64_t beyond = s->s_q + s->s_kv + 1;
    te__attn_extra *x = &k->x;
    int i;
    x->causal = te__attn_is_causal(in->mask);
    x->bottom_right = in->bottom_right_diagonal == TE_ON;
    x->left = (int)te__min(in->window.left, beyond);
    x->right = (int)te__min(in->window.right, beyond);
    te__attn_diagonals(x->left, x->right, x->causal, x->bottom_right ? k->s_kv - k->s_q : 0, k->s_q, k->s_kv, &k->lo,
                       &k->hi);
    k->scale = in->softmax_scale;
    k->scale2 = (float)(in->softmax_scale * 1.4426950408889634);
    k->dropout_p = te__attn_used_p(in->dropout_p);
    k->keep_scale = k->dropout_p < 1.0f ? 1.0f / (1.0f - k->dropout_p) : 0.0f;
    x->cu_q = te__int_data(in->cu_seqlens_q);
    x->cu_kv = te__int_data(in->cu_seqlens_kv);
    x->at_q = te__int_data(in->cu_seqlens_q_padded);
    x->at_kv = te__int_data(in->cu_seqlens_kv_padded);
    if (s->paged) {
        x->pages = te__int_data(in->page_table);
        x->page_size = (int)s->rows_kv;
        x->num_pages = (int)s->kv_b;
        x->pages_of_each = (int)in->page_table->shape[1];
    }
    x->bias = te__attn_table_of(in->core_attention_bias);
    x->mask = te__attn_table_of(in->attention_mask);
    x->blocks = te__attn_table_of(in->block_mask);
    x->bias_scale = in->core_attention_bias_type == TE_ATTN_BIAS_PRE_SCALE ? in->softmax_scale : 1.0f;
    /* A cap of 1e18 or more is left out. It would change only scores above 1e14, for which the softmax gives all weight
     * to one key anyway. */
    x->softcap = in->softcap < 1e18f ? in->softcap : 0.0f;
    /* softcap_in must be finite, because it may be multiplied by a product that is 0 */
    x->softcap_in =
        x->softcap > 0.0f ? (float)fmax(-1e30, fmin((double)in->softmax_scale / (double)x->softcap, 1e30)) : 0.0f;
    x->softcap2 = (float)((double)x->softcap * 1.4426950408889634);
    x->alibi = in->core_attention_bias_type == TE_ATTN_BIAS_ALIBI;
    x->slopes = te__f32_data(in->alibi_slopes);
    x->slopes_b = in->alibi_slopes && te__numel(in->alibi_slopes) != s->heads ? (int)s->heads : 0;
    x->softmax = (int)in->softmax_type;
    x->sink = te__f32_data(in->softmax_offset);
    for (i = 0; i < TE_SCORE_MOD_AUX; i++) {
        x->aux_n[i] = in->score_mod.aux[i] ? te__numel(in->score_mod.aux[i]) : 0;
        /* Kernels load element 0 for an index outside of the tensor. So `aux` must be valid even without elements. */
        x->aux[i] = x->aux_n[i] ? te__data(in->score_mod.aux[i]) : k->q.p;
    }
    x->on = te__has_score_mod(&in->score_mod) || x->softcap > 0.0f || te__attn_pads(in->mask) || in->attention_mask ||
            in->block_mask || in->core_attention_bias_type != TE_ATTN_BIAS_NONE ||
            in->softmax_type != TE_SOFTMAX_VANILLA;
}
static void te__attn_told_fp8(te__attn_extra *x, const te_attn_fp8 *in, bool backward) {
    x->s_dt = (int)in->s_dtype;
    x->dp_dt = (int)in->dp_dtype;
    x->s_scale = te__f32_data(in->s_scale);
    x->dp_scale = te__f32_data(in->dp_scale);
    x->s_amax = backward ? NULL : te__f32_data(in->s_amax); /* only the forward pass raises this amax */
    x->dp_amax = te__f32_data(in->dp_amax);
    x->q_inv = te__f32_data(in->q_scale_inv);
    x->k_inv = te__f32_data(in->k_scale_inv);
    x->v_inv = te__f32_data(in->v_scale_inv);
    x->do_inv = backward ? te__f32_data(in->do_scale_inv) : NULL;
    x->by_row = x->s_dt && !in->s_scale;
    x->sums_delta = (x->s_dt || x->dp_dt) && !in->part_of_keys;
    x->codes = in->q_scale_inv != NULL;
    x->on = x->on || x->s_dt || x->dp_dt || x->codes;
}

/* Returns the kernels' arguments for an operation whose args have been checked. lse2 and delta stay NULL: the backend
 * allocates them. `back` is NULL in the forward pass. */
static te__attn_kargs te__attn_problem_of(const te_op_attn_fwd_args *a, const te_op_attn_bwd_args *back) {
    const te__attn_sizes s = te__attn_sizes_of(a);
    const te_qkv_format kv = te__attn_kv_format(a);
    te__attn_kargs k = TE_ZERO;
    te__attn_extra *x = &k.x;
    k.q = te__attn_view_of(a->q, a->format);
    k.k = te__attn_view_of(a->k, kv);
    k.v = te__attn_view_of(a->v, kv);
    k.o = te__attn_view_of(a->o, a->format);
    k.lse = te__f32_data(a->lse);
    k.batch = (int)s.b;
    k.heads = (int)s.heads;
    k.groups = (int)s.groups;
    k.s_q = (int)s.s_q;
    k.s_kv = (int)s.s_kv;
    k.s_pad = (int)te__round_up(s.s_q, TE__ATTN_PAD);
    k.d = (int)s.d;
    k.d_v = (int)s.d_v;
    k.seed = a->seed;
    k.offset = a->offset;
    k.rng = te__data(a->rng);
    x->packed_q = s.packed_q;
    x->packed_kv = s.packed_kv;
    x->t_q = (int)s.rows_q;
    x->t_kv = (int)s.rows_kv;
    te__attn_told(&k, &a->rule, &s);
    te__attn_told_fp8(x, &a->fp8, back != NULL);
    x->k_factors = te__attn_factors_of(a->rule.k_factors, kv);
    x->v_factors = te__attn_factors_of(a->rule.v_factors, kv);
    x->on = x->on || x->k_factors.dt;
    x->max_logit = te__f32_data(a->max_logit);
    x->on = x->on || a->max_logit;
    if (!back) return k;
    if (!back->o) k.o.p = NULL;
    k.d_o = te__attn_view_of(back->d_o, a->format);
    k.dq = te__attn_view_of(back->dq, a->format);
    k.dk = te__attn_view_of(back->dk, kv);
    k.dv = te__attn_view_of(back->dv, kv);
    if (back->dbias) {
        x->dbias = te__attn_table_of(back->dbias);
        x->dbias_b = (int)back->dbias->shape[0];
        x->dbias_h = (int)back->dbias->shape[1];
        x->dbias_i = (int)back->dbias->shape[2];
    }
    x->dsink = te__f32_data(back->dsoftmax_offset);
    return k;
}
static te__attn_kargs te__attn_problem(const te_op_attn_fwd_args *a) { return te__attn_problem_of(a, NULL); }
static te__attn_kargs te__attn_problem_bwd(const te_op_attn_bwd_args *a) {
    const te_op_attn_fwd_args f = te__attn_forward_of(a);
    return te__attn_problem_of(&f, a);
}
