/* nn/attention.c: rotary embedding, splitting a packed projection, attention: differentiable functions like those of nn/functions.c. */

/* ---- rope ---- */

#define TE__TURN (2 * 3.14159265358979323846)

/* The factor of cosine and sine that YaRN derives from how far it stretches. */
static double te__rope_mscale(double factor, double mscale) { return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0; }
/* The number, fractional, of the pair of `dim` channels that turns `turns` times within `original` positions. */
static double te__rope_pair(double turns, double base, int dim, double original) { return dim * log(original / (turns * TE__TURN)) / (2 * log(base)); }

static te_result te__rope_check_scaling(te_ctx *te, const te_rope_scaling *s, int dim) {
    const double original = (double)s->original_max_position_embeddings;
    int i;
    if ((int)s->type < 0 || s->type > TE_ROPE_LONGROPE)
        return te__fail(te, TE_ERR_INVALID, "rope: scaling.type is %d; te_rope_type has 0 to %d", (int)s->type, (int)TE_ROPE_LONGROPE);
    if (s->type != TE_ROPE_LONGROPE && !(s->factor > 0.0f))
        return te__fail(te, TE_ERR_INVALID, "rope: scaling.factor is %g, with type %d; it must be positive", (double)s->factor, (int)s->type);
    if (s->type != TE_ROPE_LINEAR && original <= 0)
        return te__fail(te, TE_ERR_INVALID, "rope: scaling.original_max_position_embeddings is %lld, with type %d; it must be positive", (long long)s->original_max_position_embeddings, (int)s->type);
    if (s->type == TE_ROPE_LLAMA3 && !(s->low_freq_factor > 0.0f && s->high_freq_factor > s->low_freq_factor))
        return te__fail(te, TE_ERR_INVALID, "rope: scaling.low_freq_factor is %g and high_freq_factor %g; the first must be positive, and the second larger", (double)s->low_freq_factor,
                        (double)s->high_freq_factor);
    if (s->type == TE_ROPE_DYNAMIC && dim < 4)
        return te__fail(te, TE_ERR_INVALID, "rope: %d channels are to be rotated, with TE_ROPE_DYNAMIC; its base grows by a power of dim / (dim - 2), so at least 4 are needed", dim);
    if (s->type == TE_ROPE_YARN && !(s->beta_fast >= 0.0f && s->beta_slow >= 0.0f && (s->beta_fast > 0.0f ? s->beta_fast : 32.0f) > (s->beta_slow > 0.0f ? s->beta_slow : 1.0f)))
        return te__fail(te, TE_ERR_INVALID, "rope: scaling.beta_fast is %g and beta_slow %g (0 => 32 and 1); the first must be the larger one", (double)s->beta_fast, (double)s->beta_slow);
    if (s->type != TE_ROPE_LONGROPE) return TE_OK;
    if (!s->short_factor || !s->long_factor)
        return te__fail(te, TE_ERR_INVALID, "rope: scaling.%s is NULL; TE_ROPE_LONGROPE divides frequencies by [dim / 2] factors", s->short_factor ? "long_factor" : "short_factor");
    for (i = 0; i < dim / 2; i++)
        if (!(s->short_factor[i] > 0.0f && s->long_factor[i] > 0.0f))
            return te__fail(te, TE_ERR_INVALID, "rope: scaling.short_factor[%d] is %g and long_factor[%d] %g; they must be positive", i, (double)s->short_factor[i], i, (double)s->long_factor[i]);
    return TE_OK;
}

TE_API te_result te_rope_frequencies(te_ctx *te, const te_rope_scaling *scaling, float base, int dim, int64_t length, float *inv_freq, float *attention_factor) {
    te_rope_scaling s = TE_ZERO;
    double theta = base != 0.0f ? (double)base : 10000.0, attention = 1.0, factor, original, low = 0, high = 0;
    te__floats floats;
    int i;
    if (!te) return TE_ERR_STATE;
    if (!inv_freq) return te__fail(te, TE_ERR_INVALID, "te_rope_frequencies: inv_freq is NULL; room for %d numbers, half of dim, is needed", dim / 2);
    if (scaling) s = *scaling;
    factor = (double)s.factor, original = (double)s.original_max_position_embeddings;
    if (s.type != TE_ROPE_DEFAULT && te__rope_check_scaling(te, &s, dim) != TE_OK) return te_error_code(te);
    floats = te__floats_begin();
    if (s.type == TE_ROPE_DYNAMIC && (double)length > original) theta *= pow(factor * (double)length / original - (factor - 1.0), dim / (dim - 2.0));
    if (s.type == TE_ROPE_YARN) {
        low = te__rope_pair(s.beta_fast > 0.0f ? (double)s.beta_fast : 32.0, theta, dim, original);
        high = te__rope_pair(s.beta_slow > 0.0f ? (double)s.beta_slow : 1.0, theta, dim, original);
        low = fmax(s.no_truncate ? low : floor(low), 0.0);
        high = fmin(s.no_truncate ? high : ceil(high), dim - 1.0);
        if (high <= low) high = low + 0.001; /* as transformers: no division by zero */
        attention = s.mscale != 0.0f && s.mscale_all_dim != 0.0f ? te__rope_mscale(factor, (double)s.mscale) / te__rope_mscale(factor, (double)s.mscale_all_dim) : te__rope_mscale(factor, 1.0);
    }
    if (s.type == TE_ROPE_LONGROPE && factor > 1.0) attention = sqrt(1.0 + log(factor) / log(original));
    if ((s.type == TE_ROPE_YARN || s.type == TE_ROPE_LONGROPE) && s.attention_factor != 0.0f) attention = (double)s.attention_factor;
    for (i = 0; i < dim / 2; i++) {
        double f = pow(theta, -2.0 * i / dim), turns = original * f / (TE__TURN), kept = 0.0; /* within the original context; the share of f beside f / factor */
        if (s.type == TE_ROPE_LLAMA3) kept = fmin(fmax((turns - (double)s.low_freq_factor) / (double)(s.high_freq_factor - s.low_freq_factor), 0.0), 1.0);
        if (s.type == TE_ROPE_YARN) kept = 1.0 - fmin(fmax((i - low) / (high - low), 0.0), 1.0);
        if (s.type == TE_ROPE_LINEAR || s.type == TE_ROPE_LLAMA3 || s.type == TE_ROPE_YARN) f = (1.0 - kept) * f / factor + kept * f;
        if (s.type == TE_ROPE_LONGROPE) f /= (double)((double)length > original ? s.long_factor : s.short_factor)[i];
        inv_freq[i] = (float)f;
    }
    *attention_factor = (float)attention;
    te__floats_end(&floats);
    return TE_OK;
}

/* The state of a rotation's node: its args, and the frequencies to which they point. A node stores only those that are used (te__rope_state_size). */
typedef struct te__rope_state {
    te_op_rope_args args;
    float inv_freq[TE__ROPE_MAX_HALF];
} te__rope_state;

/* The caller's own table in place of all that would make one. */
static te_result te__rope_freqs_of(te_ctx *te, const te_rotary_desc *d, te_rope_angles *a) {
    if (d->base != 0.0f || d->rotary_percent != 0.0f || d->seq_len_interpolation_factor != 0.0f || d->scaling.type != TE_ROPE_DEFAULT)
        return te__fail(te, TE_ERR_INVALID, "rope: freqs are given, with base %g, rotary_percent %g, seq_len_interpolation_factor %g and scaling.type %d, which make angles in their place; leave them 0",
                        (double)d->base, (double)d->rotary_percent, (double)d->seq_len_interpolation_factor, (int)d->scaling.type);
    a->attention_factor = d->attention_factor;
    a->freqs = te_tensor_contiguous(te_tensor_cast(te_tensor_detach(d->freqs), TE_F32));
    return a->freqs ? TE_OK : te_error_code(te);
}
/* Angles of heads of head_dim channels in sequences of `length` tokens. inv_freq: where scaled frequencies go; angles point there. A rotary_dim of 0 without freqs rotates no channel. */
static te_result te__rope_angles_of(te_ctx *te, const te_rotary_desc *d, int64_t head_dim, int64_t length, te_rope_angles *a, float *inv_freq) {
    float percent = d->rotary_percent > 0.0f && d->rotary_percent < 1.0f ? d->rotary_percent : 1.0f;
    if (d->max_seqlen > 0) length = d->max_seqlen;
    else if (d->cp_size > 1) length *= d->cp_size;
    a->interleaved = d->interleaved;
    a->position_offset = d->position_offset;
    a->start_positions = d->start_positions;
    a->positions = d->positions;
    a->cp_size = d->cp_size;
    a->cp_rank = d->cp_rank;
    if (d->freqs) return te__rope_freqs_of(te, d, a);
    if (d->attention_factor != 0.0f)
        return te__fail(te, TE_ERR_INVALID, "rope: attention_factor is %g, and freqs is NULL; it goes with a table, and scaling.attention_factor with frequencies: leave it 0", (double)d->attention_factor);
    a->base = d->base;
    a->rotary_dim = (int)((float)te__min(head_dim, 1 << 24) * percent); /* exact in a float; te_op_rope refuses sizes far below 2^24 */
    if (a->rotary_dim == 0) return TE_OK;
    /* Positions are interpolated when both fields are set: sequences beyond the stretched range are squeezed into it, others are divided
     * by the factor (TransformerEngine, RotaryPositionEmbedding). */
    if (d->seq_len_interpolation_factor > 0.0f && d->pretrained_max_position_embeddings > 0) {
        float limit = (float)d->pretrained_max_position_embeddings * d->seq_len_interpolation_factor;
        a->position_scale = (float)length > limit ? te__floats_divide((float)d->pretrained_max_position_embeddings, (float)length)
                                                     : te__floats_divide(1.0, d->seq_len_interpolation_factor);
    }
    if (d->scaling.type == TE_ROPE_DEFAULT || a->rotary_dim > 2 * TE__ROPE_MAX_HALF || a->rotary_dim % 2 != 0) return TE_OK; /* te_op_rope refuses such sizes */
    a->inv_freq = inv_freq;
    return te_rope_frequencies(te, &d->scaling, d->base, a->rotary_dim, d->max_seqlen > 0 ? length : length + te__min(d->position_offset, TE__ROPE_MAX_OFFSET), inv_freq, &a->attention_factor);
}
static bool te__rope_is_none(const te_rope_angles *a) { return a->rotary_dim == 0 && !a->freqs; }
/* Bytes of a state that ends with frequencies of these angles. */
static size_t te__rope_state_size(const te_rope_angles *a, size_t before) { return before + (a->inv_freq ? (size_t)(a->rotary_dim / 2) * sizeof(float) : 0); }

static te_tensor *te__rope_apply(te_tensor *x, te_op_rope_args args) {
    args.x = x;
    args.y = te__empty_like(x, x->dtype);
    return args.y ? te__checked(args.y, te_op_rope(x->te, &args)) : NULL;
}
static te_result te__rope_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te__rope_state *s = (const te__rope_state *)state;
    te_op_rope_args args = s->args;
    te_tensor *g = te_tensor_contiguous(dy[0]);
    (void)needs;
    if (args.angles.inv_freq) args.angles.inv_freq = s->inv_freq;
    args.angles.start_positions = saved[0];
    args.angles.positions = saved[1];
    args.angles.freqs = saved[2];
    args.cu_seqlens = saved[3];
    args.backward = true;
    dx[0] = g ? te__rope_apply(g, args) : NULL;
    return dx[0] ? TE_OK : te_error_code(te);
}
TE_API te_tensor *te_apply_rotary_pos_emb(te_tensor *x, const te_rotary_desc *desc, te_qkv_format format) {
    te_rotary_desc zero = TE_ZERO;
    te__rope_state s = TE_ZERO;
    te_tensor *saved[4];
    char text[TE__SHAPE_TEXT];
    if (!x || !te__need_float(x, "te_apply_rotary_pos_emb")) return NULL;
    if (!desc) desc = &zero;
    if (x->ndim != (format == TE_THD ? 3 : 4)) {
        te__fail(x->te, TE_ERR_SHAPE, "te_apply_rotary_pos_emb: the input is %s; %s is needed", te__shape_text(x, text),
                 format == TE_THD ? "[tokens, h, d]" : "[s, b, h, d] or [b, s, h, d]");
        return NULL;
    }
    x = te_tensor_contiguous(x);
    if (!x || te__rope_angles_of(x->te, desc, x->shape[x->ndim - 1], x->shape[format == TE_BSHD ? 1 : 0], &s.args.angles, s.inv_freq) != TE_OK) return NULL;
    s.args.format = format;
    s.args.no_rope = te__rope_is_none(&s.args.angles);
    saved[0] = desc->start_positions;
    saved[1] = desc->positions;
    saved[2] = (te_tensor *)s.args.angles.freqs;
    s.args.cu_seqlens = saved[3] = desc->cu_seqlens;
    return te__record("rope", te__rope_apply(x, s.args), te__rope_backward, &s, te__rope_state_size(&s.args.angles, offsetof(te__rope_state, inv_freq)), &x, 1, saved, 4);
}

/* ---- a packed projection to q, k and v, rotated ---- */

typedef struct te__qkv_state { /* as te__rope_state */
    te_op_qkv_rope_args args;
    float inv_freq[TE__ROPE_MAX_HALF];
} te__qkv_state;

static te_result te__qkv_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te__qkv_state *s = (const te__qkv_state *)state;
    const te_op_qkv_rope_args *f = &s->args;
    te_op_qkv_rope_bwd_args args = TE_ZERO;
    te_tensor *g[3];
    const te_tensor *like = dy[0] ? dy[0] : dy[1] ? dy[1] : dy[2];
    int64_t shape[4];
    int i;
    (void)needs;
    memcpy(shape, like->shape, sizeof(shape));
    for (i = 0; i < 3; i++) {
        shape[2] = i == 0 ? f->num_heads : f->num_groups;
        g[i] = dy[i] ? te_tensor_contiguous(dy[i]) : te_tensor_zeros(te, like->dtype, 4, shape);
        if (!g[i]) return te_error_code(te);
    }
    shape[2] = (int64_t)(f->num_heads + 2 * f->num_groups) * f->head_dim;
    args.qkv = dx[0] = te_tensor_empty(te, like->dtype, 3, shape);
    if (!dx[0]) return te_error_code(te);
    args.q = g[0];
    args.k = g[1];
    args.v = g[2];
    args.format = f->format;
    args.num_heads = f->num_heads;
    args.num_groups = f->num_groups;
    args.head_dim = f->head_dim;
    args.interleaved_groups = f->interleaved_groups;
    args.no_rope = f->no_rope;
    args.angles = f->angles;
    if (args.angles.inv_freq) args.angles.inv_freq = s->inv_freq;
    args.angles.start_positions = saved[0];
    args.angles.positions = saved[1];
    args.angles.freqs = saved[2];
    return te_op_qkv_rope_bwd(te, &args);
}

/* qkv [s, b, (H + 2G) d] to out[0] = q [s, b, H, d], out[1] = k, out[2] = v [s, b, G, d]. False on failure. */
static bool te__split_qkv(te_tensor *qkv, int heads, int groups, int64_t head_dim, bool interleaved, te_qkv_format format, const te_rotary_desc *rotary,
                          te_tensor *out[3]) {
    te__qkv_state state = TE_ZERO;
    te_op_qkv_rope_args args = TE_ZERO;
    te_node_desc node = TE_ZERO;
    te_tensor *saved[3];
    int64_t shape[4];
    int i;
    qkv = te_tensor_contiguous(qkv);
    if (!qkv) return false;
    shape[0] = qkv->shape[0];
    shape[1] = qkv->shape[1];
    shape[3] = head_dim;
    for (i = 0; i < 3; i++) {
        shape[2] = i == 0 ? heads : groups;
        out[i] = te_tensor_empty(qkv->te, qkv->dtype, 4, shape);
        if (!out[i]) return false;
    }
    args.qkv = qkv;
    args.q = out[0];
    args.k = out[1];
    args.v = out[2];
    args.format = format;
    args.num_heads = heads;
    args.num_groups = groups;
    args.head_dim = (int)head_dim;
    args.interleaved_groups = interleaved;
    if (rotary && te__rope_angles_of(qkv->te, rotary, head_dim, qkv->shape[format == TE_BSHD ? 1 : 0], &args.angles, state.inv_freq) != TE_OK) return false;
    args.no_rope = !rotary || te__rope_is_none(&args.angles);
    if (te_op_qkv_rope(qkv->te, &args) != TE_OK) return false;
    saved[0] = rotary ? rotary->start_positions : NULL;
    saved[1] = rotary ? rotary->positions : NULL;
    saved[2] = (te_tensor *)args.angles.freqs;
    state.args = args;
    node.name = "split_qkv";
    node.inputs = &qkv;
    node.num_inputs = 1;
    node.outputs = out;
    node.num_outputs = 3;
    node.saved = saved;
    node.num_saved = 3;
    node.state = &state;
    node.state_size = te__rope_state_size(&args.angles, offsetof(te__qkv_state, inv_freq));
    node.backward = te__qkv_backward;
    return te_record(qkv->te, &node) == TE_OK;
}

/* ---- attention ---- */

/* The tensors of a rule, for a node to save: forth, and back. */
enum { TE__ATTENTION_TENSORS = 10 + TE_SCORE_MOD_AUX };
static void te__attention_tensors(te_attn_rule *x, te_tensor **list, bool back) {
    te_tensor **field[TE__ATTENTION_TENSORS];
    int i;
    field[0] = &x->attention_mask;
    field[1] = &x->cu_seqlens_q;
    field[2] = &x->cu_seqlens_kv;
    field[3] = &x->cu_seqlens_q_padded;
    field[4] = &x->cu_seqlens_kv_padded;
    field[5] = &x->core_attention_bias;
    field[6] = &x->alibi_slopes;
    field[7] = &x->softmax_offset;
    field[8] = &x->page_table;
    field[9] = &x->block_mask;
    for (i = 0; i < TE_SCORE_MOD_AUX; i++) field[10 + i] = &x->score_mod.aux[i];
    for (i = 0; i < TE__ATTENTION_TENSORS; i++) {
        if (back)
            *field[i] = list[i];
        else
            list[i] = *field[i];
    }
}

/* A node's own copies of the user's expressions, in one piece of memory. It begins with score_mod or, without one, with mask_mod: a derivative alone has been refused. */
static size_t te__score_mod_bytes(const te_score_mod *m) {
    return (m->score_mod ? strlen(m->score_mod) + 1 : 0) + (m->score_mod_bprop ? strlen(m->score_mod_bprop) + 1 : 0) + (m->mask_mod ? strlen(m->mask_mod) + 1 : 0);
}
static bool te__score_mod_keep(te_ctx *te, te_score_mod *m) {
    const size_t bytes = te__score_mod_bytes(m);
    const char **text[3];
    char *at = bytes ? (char *)te__alloc(te, bytes) : NULL;
    int i;
    if (!at) return bytes == 0;
    text[0] = &m->score_mod;
    text[1] = &m->score_mod_bprop;
    text[2] = &m->mask_mod;
    for (i = 0; i < 3; i++) {
        const size_t n = *text[i] ? strlen(*text[i]) + 1 : 0;
        if (n) *text[i] = (const char *)memcpy(at, *text[i], n);
        at += n;
    }
    return true;
}
static void te__score_mod_drop(te_ctx *te, te_score_mod *m) { te__free(te, (void *)(m->score_mod ? m->score_mod : m->mask_mod), te__score_mod_bytes(m)); }
static void te__attention_release(te_ctx *te, void *state) { te__score_mod_drop(te, &((te_op_attn_fwd_args *)state)->rule.score_mod); }

/* The backward pass of `f` without its d_o, from what te__attention_save saved. Makes the gradients; check them by te__attention_made. */
static te_op_attn_bwd_args te__attention_gradients(const te_op_attn_fwd_args *f, te_tensor *const *saved, te_tensor **dx, const bool *needs) {
    te_op_attn_bwd_args args = TE_ZERO;
    args.q = saved[0];
    args.k = saved[1];
    args.v = saved[2];
    args.o = saved[3];
    args.lse = saved[4];
    args.dq = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    args.dk = dx[1] = te__empty_like(saved[1], saved[1]->dtype);
    args.dv = dx[2] = te__empty_like(saved[2], saved[2]->dtype);
    args.format = f->format;
    args.rule = f->rule;
    args.seed = f->seed;
    args.offset = f->offset;
    args.rng = saved[5];
    te__attention_tensors(&args.rule, (te_tensor **)saved + 6, true);
    if (needs[3]) args.dbias = dx[3] = te__empty_like(args.rule.core_attention_bias, args.rule.core_attention_bias->dtype);
    if (needs[4]) args.dsoftmax_offset = dx[4] = te__empty_like(args.rule.softmax_offset, TE_F32);
    return args;
}
static bool te__attention_made(te_tensor *const *dx, const bool *needs) { return dx[0] && dx[1] && dx[2] && (!needs[3] || dx[3]) && (!needs[4] || dx[4]); }

static te_result te__attention_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    te_op_attn_bwd_args args = te__attention_gradients((const te_op_attn_fwd_args *)state, saved, dx, needs);
    args.d_o = te_tensor_contiguous(dy[0]);
    return args.d_o && te__attention_made(dx, needs) ? te_op_attn_bwd(te, &args) : te_error_code(te);
}

/* The forward pass of `desc`, with its outputs, and with random bits if it needs some; te__rng_back undoes the draw. False with the error recorded. */
static bool te__attention_open(te_tensor *q, te_tensor *k, te_tensor *v, const te_attention_desc *desc, te_op_attn_fwd_args *args) {
    te_ctx *te = q->te;
    te__draw draw = TE_ZERO;
    int64_t shape[4], lse[3];
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT], c[TE__SHAPE_TEXT];
    bool packed, packed_kv;
    if (!te__operand(q, k, false, "te_attention") || !te__operand(q, v, false, "te_attention") || !te__need_float(q, "te_attention")) return false;
    packed = desc->format == TE_THD;
    packed_kv = packed && !desc->rule.kv_bshd && !desc->rule.page_table;
    if (q->ndim != (packed ? 3 : 4) || k->ndim != (packed_kv ? 3 : 4) || v->ndim != (packed_kv ? 3 : 4)) {
        te__fail(te, TE_ERR_SHAPE, "te_attention: q is %s, k %s, v %s; [s, b, heads, d] or [b, s, heads, d] each, or with TE_THD [tokens, heads, d]",
                 te__shape_text(q, a), te__shape_text(k, b), te__shape_text(v, c));
        return false;
    }
    memcpy(shape, q->shape, sizeof(shape));
    shape[q->ndim - 1] = v->shape[v->ndim - 1];
    lse[0] = packed ? 1 : q->shape[desc->format == TE_BSHD ? 0 : 1];
    lse[1] = q->shape[q->ndim - 2];
    lse[2] = q->shape[desc->format == TE_BSHD ? 1 : 0];
    memset(args, 0, sizeof(*args));
    args->q = q;
    args->k = k;
    args->v = v;
    args->o = te_tensor_empty(te, q->dtype, q->ndim, shape);
    args->lse = te_tensor_empty(te, TE_F32, 3, lse);
    args->format = desc->format;
    args->rule = desc->rule;
    args->max_logit = desc->max_logit;
    if (desc->rule.dropout_p > 0.0f) draw = te__rng_draw(te, 1);
    args->seed = draw.seed;
    args->offset = draw.offset;
    args->rng = draw.rng;
    return args->o && args->lse;
}

/* Fills a node's lists from a forward pass: `saved` gets the tensors that the backward pass reads (q, k, v, o first, in this order), and `in` those that may have gradients.
 * args gets copies of the user's expressions, which te__attention_release frees. */
enum { TE__ATTENTION_SAVED = 6 + TE__ATTENTION_TENSORS, TE__ATTENTION_INPUTS = 5 };
static bool te__attention_save(te_op_attn_fwd_args *args, te_tensor *const parts[3], te_tensor **in, te_tensor **saved) {
    te_ctx *te = parts[0]->te;
    bool wanted = false;
    int i;
    for (i = 0; i < 3; i++) in[i] = parts[i];
    in[3] = args->rule.core_attention_bias;
    in[4] = args->rule.softmax_offset;
    saved[0] = (te_tensor *)args->q;
    saved[1] = (te_tensor *)args->k;
    saved[2] = (te_tensor *)args->v;
    saved[3] = args->o;
    saved[4] = args->lse;
    saved[5] = (te_tensor *)args->rng;
    te__attention_tensors(&args->rule, saved + 6, false);
    for (i = 0; i < TE__ATTENTION_INPUTS; i++) wanted = wanted || (in[i] && te__wants_grad(in[i]));
    if (wanted && te__score_mod_check_gradient(te, "te_attention", &args->rule.score_mod) != TE_OK) return false;
    return te__score_mod_keep(te, &args->rule.score_mod);
}

TE_API te_tensor *te_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attention_desc *desc) {
    te_attention_desc zero = TE_ZERO;
    te_op_attn_fwd_args args;
    te__rng_state before;
    te_tensor *parts[3], *in[TE__ATTENTION_INPUTS], *saved[TE__ATTENTION_SAVED], *o = NULL;
    te_ctx *te;
    if (!q) return NULL;
    te = q->te;
    parts[0] = q;
    parts[1] = k;
    parts[2] = v;
    before = te__rng_now(te);
    te__frame_begin(te);
    if (te__attention_open(q, k, v, desc ? desc : &zero, &args) && te_op_attn_fwd(te, &args) == TE_OK) {
        if (te__attention_save(&args, parts, in, saved))
            o = te__record_owning("attention", args.o, te__attention_backward, &args, sizeof(args), te__attention_release, in, TE__ATTENTION_INPUTS, saved, TE__ATTENTION_SAVED);
    }
    if (!o) te__rng_back(te, before);
    return te__frame_return(te, o);
}
