/* functions/attention.c: differentiable functions for rotary embedding, packed projections and attention. This file
 * must not depend on modules. */

/* ---- rope ---- */

#define TE__TURN (2 * 3.14159265358979323846)

/* Returns the factor by which YaRN multiplies cosine and sine if the context is stretched by `factor`. */
static double te__rope_mscale(double factor, double mscale) {
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}
/* Returns the (fractional) index of the channel pair that makes `turns` full turns within `original` positions. */
static double te__rope_pair(double turns, double base, int dim, double original) {
    return dim * log(original / (turns * TE__TURN)) / (2 * log(base));
}

static te_result te__rope_check_scaling(te_ctx *te, const te_rope_scaling *s, int dim) {
    const double original = (double)s->original_max_position_embeddings;
    int i;
    if ((int)s->type < 0 || s->type > TE_ROPE_LONGROPE)
        return te__fail(te, TE_ERR_INVALID, "rope: scaling.type is %d; te_rope_type has 0 to %d", (int)s->type,
                        (int)TE_ROPE_LONGROPE);
    if (s->type != TE_ROPE_LONGROPE && !(s->factor > 0.0f))
        return te__fail(te, TE_ERR_INVALID, "rope: scaling.factor is %g, with type %d; it must be positive",
                        (double)s->factor, (int)s->type);
    if (s->type != TE_ROPE_LINEAR && original <= 0)
        return te__fail(te, TE_ERR_INVALID,
                        "rope: scaling.original_max_position_embeddings is %lld, with type %d; it must be positive",
                        (long long)s->original_max_position_embeddings, (int)s->type);
    if (s->type == TE_ROPE_LLAMA3 && !(s->low_freq_factor > 0.0f && s->high_freq_factor > s->low_freq_factor))
        return te__fail(te, TE_ERR_INVALID,
                        "rope: scaling.low_freq_factor is %g and high_freq_factor %g; the first must be positive, and "
                        "the second larger",
                        (double)s->low_freq_factor, (double)s->high_freq_factor);
    if (s->type == TE_ROPE_DYNAMIC && dim < 4)
        return te__fail(te, TE_ERR_INVALID,
                        "rope: %d channels are to be rotated, with TE_ROPE_DYNAMIC; its base grows by a power of dim / "
                        "(dim - 2), so at least 4 are needed",
                        dim);
    if (s->type == TE_ROPE_YARN &&
        !(s->beta_fast >= 0.0f && s->beta_slow >= 0.0f &&
          (s->beta_fast > 0.0f ? s->beta_fast : 32.0f) > (s->beta_slow > 0.0f ? s->beta_slow : 1.0f)))
        return te__fail(
            te, TE_ERR_INVALID,
            "rope: scaling.beta_fast is %g and beta_slow %g (0 => 32 and 1); the first must be the larger one",
            (double)s->beta_fast, (double)s->beta_slow);
    if (s->type != TE_ROPE_LONGROPE) return TE_OK;
    if (!s->short_factor || !s->long_factor)
        return te__fail(te, TE_ERR_INVALID,
                        "rope: scaling.%s is NULL; TE_ROPE_LONGROPE divides frequencies by [dim / 2] factors",
                        s->short_factor ? "long_factor" : "short_factor");
    for (i = 0; i < dim / 2; i++)
        if (!(s->short_factor[i] > 0.0f && s->long_factor[i] > 0.0f))
            return te__fail(te, TE_ERR_INVALID,
                            "rope: scaling.short_factor[%d] is %g and long_factor[%d] %g; they must be positive", i,
                            (double)s->short_factor[i], i, (double)s->long_factor[i]);
    return TE_OK;
}

TE_API te_result te_rope_frequencies(te_ctx *te, const te_rope_scaling *scaling, float base, int dim, int64_t length,
                                     float *inv_freq, float *attention_factor) {
    te_rope_scaling s = TE_ZERO;
    double theta = base != 0.0f ? (double)base : 10000.0, attention = 1.0, factor, original, low = 0, high = 0;
    te__floats floats;
    int i;
    if (!te) return TE_ERR_STATE;
    if (!inv_freq)
        return te__fail(te, TE_ERR_INVALID,
                        "te_rope_frequencies: inv_freq is NULL; room for %d numbers, half of dim, is needed", dim / 2);
    if (scaling) s = *scaling;
    factor = (double)s.factor, original = (double)s.original_max_position_embeddings;
    if (s.type != TE_ROPE_DEFAULT && te__rope_check_scaling(te, &s, dim) != TE_OK) return te_error_code(te);
    floats = te__floats_begin();
    if (s.type == TE_ROPE_DYNAMIC && (double)length > original)
        theta *= pow(factor * (double)length / original - (factor - 1.0), dim / (dim - 2.0));
    if (s.type == TE_ROPE_YARN) {
        low = te__rope_pair(s.beta_fast > 0.0f ? (double)s.beta_fast : 32.0, theta, dim, original);
        high = te__rope_pair(s.beta_slow > 0.0f ? (double)s.beta_slow : 1.0, theta, dim, original);
        low = fmax(s.no_truncate ? low : floor(low), 0.0);
        high = fmin(s.no_truncate ? high : ceil(high), dim - 1.0);
        if (high <= low) high = low + 0.001; /* as in the transformers library: avoids a division by zero */
        attention = s.mscale != 0.0f && s.mscale_all_dim != 0.0f
                        ? te__rope_mscale(factor, (double)s.mscale) / te__rope_mscale(factor, (double)s.mscale_all_dim)
                        : te__rope_mscale(factor, 1.0);
    }
    if (s.type == TE_ROPE_LONGROPE && factor > 1.0) attention = sqrt(1.0 + log(factor) / log(original));
    if ((s.type == TE_ROPE_YARN || s.type == TE_ROPE_LONGROPE) && s.attention_factor != 0.0f)
        attention = (double)s.attention_factor;
    for (i = 0; i < dim / 2; i++) {
        /* `turns`: how often pair i turns within the original context. `kept`: the weight of the unscaled frequency f.
         * The scaled frequency (f divided by `factor`) has the weight 1 - kept. */
        double f = pow(theta, -2.0 * i / dim), turns = original * f / (TE__TURN), kept = 0.0;
        if (s.type == TE_ROPE_LLAMA3)
            kept = fmin(
                fmax((turns - (double)s.low_freq_factor) / (double)(s.high_freq_factor - s.low_freq_factor), 0.0), 1.0);
        if (s.type == TE_ROPE_YARN) kept = 1.0 - fmin(fmax((i - low) / (high - low), 0.0), 1.0);
        if (s.type == TE_ROPE_LINEAR || s.type == TE_ROPE_LLAMA3 || s.type == TE_ROPE_YARN)
            f = (1.0 - kept) * f / factor + kept * f;
        if (s.type == TE_ROPE_LONGROPE) f /= (double)((double)length > original ? s.long_factor : s.short_factor)[i];
        inv_freq[i] = (float)f;
    }
    *attention_factor = (float)attention;
    te__floats_end(&floats);
    return TE_OK;
}

/* The state of a rotation's tape node. A node allocates only the used part of inv_freq (te__rope_state_size). */
typedef struct te__rope_state {
    te_op_rope_args args;
    float inv_freq[TE__ROPE_MAX_HALF];
} te__rope_state;

/* Sets up the angles from the caller's own table of frequencies. Fails if another field asks for computed
 * frequencies. */
static te_result te__rope_freqs_of(te_ctx *te, const te_rotary_desc *d, te_rope_angles *a) {
    if (d->base != 0.0f || d->rotary_percent != 0.0f || d->seq_len_interpolation_factor != 0.0f ||
        d->scaling.type != TE_ROPE_DEFAULT)
        return te__fail(te, TE_ERR_INVALID,
                        "rope: freqs are given, with base %g, rotary_percent %g, seq_len_interpolation_factor %g and "
                        "scaling.type %d, which make angles in their place; leave them 0",
                        (double)d->base, (double)d->rotary_percent, (double)d->seq_len_interpolation_factor,
                        (int)d->scaling.type);
    a->attention_factor = d->attention_factor;
    a->freqs = te_tensor_contiguous(te_tensor_cast(te_tensor_detach(d->freqs), TE_F32));
    return a->freqs ? TE_OK : te_error_code(te);
}
/* Sets up *a for heads of head_dim channels and sequences of `length` tokens. Scaled frequencies go to `inv_freq`,
 * which *a then points to. */
static te_result te__rope_angles_of(te_ctx *te, const te_rotary_desc *d, int64_t head_dim, int64_t length,
                                    te_rope_angles *a, float *inv_freq) {
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
        return te__fail(te, TE_ERR_INVALID,
                        "rope: attention_factor is %g, and freqs is NULL; it goes with a table, and "
                        "scaling.attention_factor with frequencies: leave it 0",
                        (double)d->attention_factor);
    a->base = d->base;
    /* The limit of 2^24 keeps the conversion to float exact. te_op_rope allows a rotary_dim of at most
     * 2 * TE__ROPE_MAX_HALF anyway. */
    a->rotary_dim = (int)((float)te__min(head_dim, 1 << 24) * percent);
    if (a->rotary_dim == 0) return TE_OK;
    /* If both fields are set, scales positions as TransformerEngine's RotaryPositionEmbedding does. */
    if (d->seq_len_interpolation_factor > 0.0f && d->pretrained_max_position_embeddings > 0) {
        float limit = (float)d->pretrained_max_position_embeddings * d->seq_len_interpolation_factor;
        a->position_scale = (float)length > limit
                                ? te__floats_divide((float)d->pretrained_max_position_embeddings, (float)length)
                                : te__floats_divide(1.0, d->seq_len_interpolation_factor);
    }
    /* te_op_rope rejects a rotary_dim that is odd or above 2 * TE__ROPE_MAX_HALF */
    if (d->scaling.type == TE_ROPE_DEFAULT || a->rotary_dim > 2 * TE__ROPE_MAX_HALF || a->rotary_dim % 2 != 0)
        return TE_OK;
    a->inv_freq = inv_freq;
    return te_rope_frequencies(te, &d->scaling, d->base, a->rotary_dim,
                               d->max_seqlen > 0 ? length : length + te__min(d->position_offset, TE__ROPE_MAX_OFFSET),
                               inv_freq, &a->attention_factor);
}
static bool te__rope_is_none(const te_rope_angles *a) { return a->rotary_dim == 0 && !a->freqs; }
/* Returns the size in bytes of a node's state. `before` is the offset of the last member, the array of frequencies. A
 * node without frequencies of its own ends there. */
static size_t te__rope_state_size(const te_rope_angles *a, size_t before) {
    return before + (a->inv_freq ? (size_t)(a->rotary_dim / 2) * sizeof(float) : 0);
}

static te_tensor *te__rope_apply(te_tensor *x, te_op_rope_args args) {
    args.x = x;
    args.y = te__empty_like(x, x->dtype);
    return args.y ? te__checked(args.y, te_op_rope(x->te, &args)) : NULL;
}
static te_result te__rope_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                   te_tensor **dx, const bool *needs) {
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
    char text[TE__SHAPE_TEXT];
    if (!x || !te__need_float(x, "te_apply_rotary_pos_emb")) return NULL;
    if (!desc) desc = &zero;
    if (x->ndim != (format == TE_THD ? 3 : 4))
        return te__no_tensor(x->te, TE_ERR_SHAPE, "te_apply_rotary_pos_emb: the input is %s; %s is needed",
                             te__shape_text(x, text),
                             format == TE_THD ? "[tokens, h, d]" : "[s, b, h, d] or [b, s, h, d]");
    x = te_tensor_contiguous(x);
    if (!x || te__rope_angles_of(x->te, desc, x->shape[x->ndim - 1], x->shape[format == TE_BSHD ? 1 : 0],
                                 &s.args.angles, s.inv_freq) != TE_OK)
        return NULL;
    s.args.format = format;
    s.args.no_rope = te__rope_is_none(&s.args.angles);
    s.args.cu_seqlens = desc->cu_seqlens;
    te_tensor *saved[4] = {desc->start_positions, desc->positions, (te_tensor *)s.args.angles.freqs, desc->cu_seqlens};
    return te__record("rope", te__rope_apply(x, s.args), te__rope_backward, &s,
                      te__rope_state_size(&s.args.angles, offsetof(te__rope_state, inv_freq)), &x, 1, saved, 4);
}

/* ---- a packed projection ---- */

/* Describes a tensor that packs queries, keys and values: `heads` + 2 * `groups` heads. If `keys` is true, there are no
 * queries. */
typedef struct te__packing {
    int heads, groups;
    int64_t head_dim;
    bool interleaved; /* true: group after group, each (queries.., key, value) or (key, value); false: all queries, then
                       * all keys, then all values */
    bool keys;
} te__packing;

/* Returns true if the queries have two different strides: one between the heads of a group, another between groups. */
static bool te__packing_spreads(const te__packing *p) { return p->interleaved && !p->keys && p->heads != p->groups; }
static int64_t te__packing_width(const te__packing *p) {
    return ((p->keys ? 0 : (int64_t)p->heads) + 2 * (int64_t)p->groups) * p->head_dim;
}

/* Makes views of the queries (unless p->keys), keys and values in x. The views have no history on the tape. Returns
 * false on failure.
 * If te__packing_spreads is true, no single stride fits the H heads of the queries. Then each of the G groups of a
 * sequence counts as a sequence of its own. So the queries are [s, b * G, H / G, d], and keys and values are
 * [s, b * G, 1, d]. This needs the layout sbhd. */
static bool te__packed_views(const te__packing *p, te_tensor *x, te_qkv_format format, te_tensor *part[3]) {
    const int leading = format == TE_THD ? 1 : 2, in_group = p->heads / p->groups;
    const int64_t d = p->head_dim, width = te__packing_width(p), of_group = p->keys ? 2 : in_group + 2;
    const bool spreads = te__packing_spreads(p);
    int i;
    for (i = p->keys ? 1 : 0; i < 3; i++) {
        te_tensor *y = part[i] = te__alias(x);
        int64_t first = p->interleaved ? (i ? of_group - 3 + i : 0)
                        : i            ? (p->keys ? 0 : p->heads) + (int64_t)(i - 1) * p->groups
                                       : 0;
        if (!y) return false;
        y->ndim = leading + 2;
        y->stride[leading - 1] = width;
        if (leading == 2) y->stride[0] = width * x->shape[1];
        y->shape[leading] = i ? p->groups : p->heads;
        y->stride[leading] = p->interleaved ? of_group * d : d;
        y->shape[leading + 1] = d;
        y->stride[leading + 1] = 1;
        y->offset += first * d * te__dtype_size(x->dtype);
        if (!spreads) continue;
        y->shape[1] = x->shape[1] * p->groups;
        y->stride[1] = of_group * d;
        y->shape[leading] = i ? 1 : in_group;
        if (i == 0) y->stride[leading] = d;
    }
    return true;
}

typedef struct te__qkv_state { /* laid out as te__rope_state */
    te_op_qkv_rope_args args;
    float inv_freq[TE__ROPE_MAX_HALF];
} te__qkv_state;

/* Sets up the arguments of te_op_qkv_rope for x, except q, k and v. For the layout thd `rotary` must be NULL. Returns
 * false on failure. */
static bool te__qkv_open(te_tensor *x, const te__packing *p, te_qkv_format format, const te_rotary_desc *rotary,
                         te__qkv_state *s) {
    te_op_qkv_rope_args *a = &s->args;
    int64_t shape[3];
    memset(s, 0, offsetof(te__qkv_state, inv_freq));
    shape[0] = x->shape[0];
    shape[1] = format == TE_THD ? 1 : x->shape[1];
    shape[2] = te__packing_width(p);
    a->qkv = te__alias_as(x, 0, x->dtype, 3, shape);
    a->format = format == TE_THD ? TE_SBHD : format;
    a->num_heads = p->heads;
    a->num_groups = p->groups;
    a->head_dim = (int)p->head_dim;
    a->interleaved_groups = p->interleaved;
    if (rotary && te__rope_angles_of(x->te, rotary, p->head_dim, x->shape[format == TE_BSHD ? 1 : 0], &a->angles,
                                     s->inv_freq) != TE_OK)
        return false;
    a->no_rope = !rotary || te__rope_is_none(&a->angles);
    return a->qkv != NULL;
}
/* Records a tape node with the input x and the outputs `out`. */
static te_result te__qkv_record(const char *name, te_tensor *x, const te_rotary_desc *rotary, te__qkv_state *s,
                                te_backward_fn backward, te_tensor **out, int count) {
    te_tensor *saved[3] = {rotary ? rotary->start_positions : NULL, rotary ? rotary->positions : NULL,
                           (te_tensor *)s->args.angles.freqs};
    return te__record_outputs(name, out, count, backward, s,
                              te__rope_state_size(&s->args.angles, offsetof(te__qkv_state, inv_freq)), NULL, &x, 1,
                              saved, 3);
}
/* Returns the arguments of the backward pass, except q, k, v and `rotated`. `qkv` receives the gradient. */
static te_op_qkv_rope_bwd_args te__qkv_back(const te__qkv_state *s, te_tensor *const *saved, te_tensor *qkv) {
    const te_op_qkv_rope_args *f = &s->args;
    te_op_qkv_rope_bwd_args args = TE_ZERO;
    args.qkv = qkv;
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
    return args;
}

static te_result te__split_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                    te_tensor **dx, const bool *needs) {
    const te__qkv_state *s = (const te__qkv_state *)state;
    const te_op_qkv_rope_args *f = &s->args;
    te_op_qkv_rope_bwd_args args;
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
    dx[0] = te_tensor_empty(te, like->dtype, 3, shape);
    if (!dx[0]) return te_error_code(te);
    args = te__qkv_back(s, saved, dx[0]);
    args.q = g[0];
    args.k = g[1];
    args.v = g[2];
    return te_op_qkv_rope_bwd(te, &args);
}

/* The rows of a cache that keys and values of new tokens are written to (te_op_qkv_rope). */
typedef struct te__cache_rows {
    te_tensor *k, *v, *k_factors, *v_factors; /* factors: of a cache in E4M3, or NULL */
    const te_tensor *cu_seqlens, *positions, *page_table;
} te__cache_rows;

/* Prepares the split of a contiguous packed projection: *state, and new tensors out[0] for q [s, b, H, d], out[1] for k
 * and out[2] for v [s, b, G, d]. If `rows` is not NULL, k and v go there, and out[1] and out[2] have only their
 * shapes. */
static bool te__split_open(te_tensor *qkv, const te__packing *p, te_qkv_format format, const te_rotary_desc *rotary,
                           const te__cache_rows *rows, te__qkv_state *state, te_tensor *out[3]) {
    te_op_qkv_rope_args *a = &state->args;
    int64_t shape[4];
    int i;
    if (!te__qkv_open(qkv, p, format, rotary, state)) return false;
    shape[0] = qkv->shape[0];
    shape[1] = qkv->shape[1];
    shape[3] = p->head_dim;
    for (i = 0; i < 3; i++) {
        shape[2] = i == 0 ? p->heads : p->groups;
        out[i] = te_tensor_empty(qkv->te, qkv->dtype, 4, shape);
        if (!out[i]) return false;
        out[i]->in_cache = rows && i;
    }
    a->q = out[0];
    a->k = rows ? NULL : out[1];
    a->v = rows ? NULL : out[2];
    if (rows) {
        a->k_cache = rows->k;
        a->v_cache = rows->v;
        a->k_factors = rows->k_factors;
        a->v_factors = rows->v_factors;
        a->cu_seqlens = rows->cu_seqlens;
        a->cache_positions = rows->positions;
        a->page_table = rows->page_table;
    }
    return true;
}
/* Copies a packed projection to new tensors, as te__split_open describes. In the layout thd, [tokens] replaces [s,
 * b]. */
static bool te__split_qkv(te_tensor *qkv, const te__packing *p, te_qkv_format format, const te_rotary_desc *rotary,
                          const te__cache_rows *rows, te_tensor *out[3]) {
    te__qkv_state state;
    int64_t shape[4];
    int i;
    qkv = te_tensor_contiguous(qkv);
    if (!qkv) return false;
    shape[0] = qkv->shape[0];
    shape[1] = format == TE_THD ? 1 : qkv->shape[1];
    shape[2] = te__packing_width(p);
    qkv = te_tensor_view(qkv, 3, shape);
    if (!qkv || !te__split_open(qkv, p, format == TE_THD ? TE_SBHD : format, rotary, rows, &state, out) ||
        te_op_qkv_rope(qkv->te, &state.args) != TE_OK ||
        te__qkv_record("split_qkv", qkv, rotary, &state, te__split_backward, out, 3) != TE_OK)
        return false;
    for (i = 0; i < 3 && format == TE_THD; i++) {
        shape[1] = i == 0 ? p->heads : p->groups;
        shape[2] = p->head_dim;
        out[i] = te_tensor_view(out[i], 3, shape);
        if (!out[i]) return false;
    }
    return true;
}

/* Applies the inverse rotation to the gradient. Works in place if no other tensor shares the memory of the gradient. */
static te_result te__rotate_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                     te_tensor **dx, const bool *needs) {
    const te__qkv_state *s = (const te__qkv_state *)state;
    te_tensor *g = te_tensor_contiguous(dy[0]), *from;
    te_op_qkv_rope_bwd_args args;
    int64_t shape[3];
    (void)needs;
    if (!g) return te_error_code(te);
    shape[0] = g->shape[0];
    shape[1] = g->shape[1];
    shape[2] = (int64_t)(s->args.num_heads + 2 * s->args.num_groups) * s->args.head_dim;
    dx[0] = g != dy[0] || te__tensor_is_alone(g) ? g : te__empty_like(g, g->dtype);
    from = te__alias_as(g, 0, g->dtype, 3, shape);
    if (!dx[0] || !from) return te_error_code(te);
    args = te__qkv_back(s, saved, dx[0] == g ? from : te__alias_as(dx[0], 0, g->dtype, 3, shape));
    args.rotated = from;
    return args.qkv ? te_op_qkv_rope_bwd(te, &args) : te_error_code(te);
}
/* Returns the packed projection x with rotated queries and keys. If `own` is true, x may be rotated in place: the tape
 * node that made x does not need x. */
static te_tensor *te__rotate_qkv(te_tensor *x, const te__packing *p, te_qkv_format format, const te_rotary_desc *rotary,
                                 bool own) {
    te__qkv_state state;
    te_tensor *y;
    x = te_tensor_contiguous(x);
    if (!x) return NULL;
    own = own && te__tensor_is_alone(x);
    if (!te__qkv_open(x, p, format, rotary, &state)) return NULL;
    y = own ? te__alias(x) : te__empty_like(x, x->dtype);
    if (!y) return NULL;
    state.args.rotated = own ? (te_tensor *)state.args.qkv : te__alias_as(y, 0, y->dtype, 3, state.args.qkv->shape);
    if (!state.args.rotated || te_op_qkv_rope(x->te, &state.args) != TE_OK) return NULL;
    return te__qkv_record("rotate_qkv", x, rotary, &state, te__rotate_backward, &y, 1) == TE_OK ? y : NULL;
}

/* ---- attention ---- */

/* The fields of a te_attn_rule: T(field) for a tensor, O(field) for any other field. */
#define TE__RULE_FIELDS(T, O)                                                                                        \
    O(mask) O(window) O(softmax_scale) O(dropout_p) O(softcap) O(bottom_right_diagonal) O(kv_bshd) T(attention_mask) \
    T(cu_seqlens_q) T(cu_seqlens_kv) T(cu_seqlens_q_padded) T(cu_seqlens_kv_padded) O(max_seqlen_q) O(max_seqlen_kv) \
    O(core_attention_bias_type) T(core_attention_bias) T(alibi_slopes) O(softmax_type) T(softmax_offset)             \
    T(page_table) T(k_factors) T(v_factors) T(block_mask) O(score_mod)
#define TE__OF_ARGS(field, how) +1
enum { TE__ATTENTION_TENSORS = TE_SCORE_MOD_AUX TE__RULE_FIELDS(TE__COUNTED, TE__UNCOUNTED) };
TE__STATIC_ASSERT((int)TE__ATTENTION_TENSORS == 0 TE__ARGS_ATTN_RULE(TE__OF_ARGS) TE__ARGS_ATTN_CACHE(TE__OF_ARGS),
                  "ops/args.c lacks a tensor of te_attn_rule, or has one more");
#undef TE__OF_ARGS
enum {
    TE__ATTENTION_SAVED = 6 + TE__ATTENTION_TENSORS, /* number of tensors that an attention node saves */
    TE__ATTENTION_INPUTS = 5
};
/* Copies the tensors of x to `list`, or from `list` to x if `back` is true. */
static void te__attention_tensors(te_attn_rule *x, te_tensor **list, bool back) {
    te_tensor **field[TE__ATTENTION_TENSORS];
    int i, n = 0;
#define TE__TYPE te_attn_rule
    TE__WHOLE(TE__RULE_FIELDS)
#undef TE__TYPE
#define TE__AT(member) field[n++] = &x->member;
    TE__RULE_FIELDS(TE__AT, TE__UNCOUNTED)
#undef TE__AT
    for (i = 0; i < TE_SCORE_MOD_AUX; i++) field[n++] = &x->score_mod.aux[i];
    for (i = 0; i < TE__ATTENTION_TENSORS; i++) {
        if (back)
            *field[i] = list[i];
        else
            list[i] = *field[i];
    }
}

/* Returns the size in bytes of a node's copies of the user's expressions. All copies are in one block of memory. The
 * block starts at m->score_mod. If m->score_mod is NULL, the block starts at m->mask_mod. */
static size_t te__score_mod_bytes(const te_score_mod *m) {
    return (m->score_mod ? strlen(m->score_mod) + 1 : 0) + (m->score_mod_bprop ? strlen(m->score_mod_bprop) + 1 : 0) +
           (m->mask_mod ? strlen(m->mask_mod) + 1 : 0);
}
static bool te__score_mod_keep(te_ctx *te, te_score_mod *m) {
    const size_t bytes = te__score_mod_bytes(m);
    const char **text[3] = {&m->score_mod, &m->score_mod_bprop, &m->mask_mod};
    char *at = bytes ? (char *)te__alloc(te, bytes) : NULL;
    int i;
    if (!at) return bytes == 0;
    for (i = 0; i < 3; i++) {
        const size_t n = *text[i] ? strlen(*text[i]) + 1 : 0;
        if (n) *text[i] = (const char *)memcpy(at, *text[i], n);
        at += n;
    }
    return true;
}
static void te__score_mod_drop(te_ctx *te, te_score_mod *m) {
    te__free(te, (void *)(m->score_mod ? m->score_mod : m->mask_mod));
}

typedef struct te__attention_state {
    te_op_attn_fwd_args args; /* the tensors in these arguments are not used: the saved tensors of the node replace
                               * them */
    te__packing packing;      /* layout of q, k and v in one tensor; heads == 0: separate tensors */
} te__attention_state;

static void te__attention_release(te_ctx *te, void *state) {
    te__score_mod_drop(te, &((te__attention_state *)state)->args.rule.score_mod);
}

/* Allocates gradients for q, k and v: made[i] is like saved[i]. saved[i] is NULL if the values of q, k or v are part of
 * a packed tensor in another entry of `saved`. Then made[i] is NULL, too. made[i] is also NULL if its allocation
 * failed. */
static void te__attention_apart(te_tensor *const *saved, te_tensor **made) {
    int i;
    for (i = 0; i < 3; i++) made[i] = saved[i] ? te__empty_like(saved[i], saved[i]->dtype) : NULL;
}
/* Returns the arguments of f's backward pass, except d_o. `saved` comes from te__attention_save. The caller must check
 * the gradients with te__attention_made. */
static te_op_attn_bwd_args te__attention_gradients(const te_op_attn_fwd_args *f, te_tensor *const *saved,
                                                   te_tensor *const made[3], te_tensor **dx, const bool *needs) {
    te_op_attn_bwd_args args = TE_ZERO;
    args.q = saved[0];
    args.k = saved[1];
    args.v = saved[2];
    args.o = saved[3];
    args.lse = saved[4];
    args.dq = made[0];
    args.dk = made[1];
    args.dv = made[2];
    args.format = f->format;
    args.rule = f->rule;
    args.seed = f->seed;
    args.offset = f->offset;
    args.rng = saved[5];
    te__attention_tensors(&args.rule, (te_tensor **)saved + 6, true);
    if (needs[3])
        args.dbias = dx[3] = te__empty_like(args.rule.core_attention_bias, args.rule.core_attention_bias->dtype);
    if (needs[4]) args.dsoftmax_offset = dx[4] = te__empty_like(args.rule.softmax_offset, TE_F32);
    return args;
}
static bool te__attention_made(const te_op_attn_bwd_args *a, const bool *needs) {
    return a->dq && a->dk && a->dv && (!needs[3] || a->dbias) && (!needs[4] || a->dsoftmax_offset);
}

/* Computes the gradients of q, k and v. If q, k and v (or k and v) are in one tensor, their gradients are in one tensor
 * with the same layout. */
static te_result te__attention_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                        te_tensor **dx, const bool *needs) {
    const te__attention_state *s = (const te__attention_state *)state;
    const te__packing *p = &s->packing;
    te_tensor *list[TE__ATTENTION_SAVED], *made[3], *d_o = te_tensor_contiguous(dy[0]);
    te_op_attn_bwd_args args;
    memcpy(list, saved, sizeof(list));
    te__attention_apart(saved, dx);
    memcpy(made, dx, sizeof(made));
    if (d_o && p->heads) {
        const te_tensor *o = saved[3];
        d_o = te__alias_as(d_o, 0, d_o->dtype, o->ndim, o->shape);
        if (!dx[p->keys] || !te__packed_views(p, saved[p->keys], s->args.format, list) ||
            !te__packed_views(p, dx[p->keys], s->args.format, made))
            return te_error_code(te);
    }
    args = te__attention_gradients(&s->args, list, made, dx, needs);
    args.d_o = d_o;
    return d_o && te__attention_made(&args, needs) ? te_op_attn_bwd(te, &args) : te_error_code(te);
}

/* Sets up the forward pass of `desc` and allocates its outputs. Draws random bits for dropout; te__rng_back undoes the
 * draw. Returns false on failure. */
static bool te__attention_open(te_tensor *const parts[3], const te_attn_desc *desc, te_op_attn_fwd_args *args) {
    te_tensor *q = parts[0], *k = parts[1], *v = parts[2];
    te_ctx *te = q->te;
    te__draw draw = TE_ZERO;
    int64_t shape[4];
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT], c[TE__SHAPE_TEXT];
    bool packed, packed_kv;
    if (!te__operand(q, k, false, "te_attention") || !te__operand(q, v, false, "te_attention") ||
        !te__need_float(q, "te_attention"))
        return false;
    packed = desc->format == TE_THD;
    packed_kv = packed && !desc->rule.kv_bshd && !desc->rule.page_table;
    if (q->ndim != (packed ? 3 : 4) || k->ndim != (packed_kv ? 3 : 4) || v->ndim != (packed_kv ? 3 : 4))
        return te__not_ok(
            te, TE_ERR_SHAPE,
            "te_attention: q is %s, k %s, v %s; [s, b, heads, d] or [b, s, heads, d] each, or with TE_THD "
            "[tokens, heads, d]",
            te__shape_text(q, a), te__shape_text(k, b), te__shape_text(v, c));
    memcpy(shape, q->shape, sizeof(shape));
    shape[q->ndim - 1] = v->shape[v->ndim - 1];
    int64_t lse[3] = {packed ? 1 : q->shape[desc->format == TE_BSHD ? 0 : 1], q->shape[q->ndim - 2],
                      q->shape[desc->format == TE_BSHD ? 1 : 0]};
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

/* Fills the lists of a node from a forward pass.
 * `saved` gets what the backward pass reads, beginning with q, k, v and o.
 * `in` gets the tensors that may have gradients.
 * `args` gets copies of the user's expressions, which te__attention_release frees. */
static bool te__attention_save(te_op_attn_fwd_args *args, te_tensor *const parts[3], te_tensor **in,
                               te_tensor **saved) {
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
    if (wanted && args->rule.k_factors)
        return te__not_ok(parts[0]->te, TE_ERR_UNSUPPORTED,
                          "te_attention: k is %s, with rule.k_factors, and gradients are recorded; a cache's codes are "
                          "for inference and have no gradients: open te_no_grad_begin first",
                          te_dtype_name(args->k->dtype));
    if (wanted && te__score_mod_check_gradient(parts[0]->te, "te_attention", &args->rule.score_mod) != TE_OK)
        return false;
    return te__score_mod_keep(parts[0]->te, &args->rule.score_mod);
}

/* Runs te_attention.
 * - p is NULL: `parts` has q, k and v.
 * - p->keys is false: parts[0] is q, k and v packed in one tensor. The function makes the three views.
 * - p->keys is true: parts[0] is q, and parts[1] is k and v packed in one tensor. The function makes the two views.
 * If te__packing_spreads(p), each group of heads counts as a sequence. So desc->rule must treat all sequences and heads
 * alike. */
static te_tensor *te__attention_run(te_tensor *parts[3], const te__packing *p, const te_attn_desc *desc) {
    const te__packing apart = TE_ZERO;
    te__attention_state state;
    te_op_attn_fwd_args *args = &state.args;
    te_tensor *from[3], *in[TE__ATTENTION_INPUTS], *saved[TE__ATTENTION_SAVED], *o = NULL;
    te_ctx *te = parts[p ? p->keys : 0]->te;
    const te__rng_state before = te__rng_now(te);
    int64_t shape[4];
    te__frame_begin(te);
    memcpy(from, parts, sizeof(from));
    state.packing = p ? *p : apart;
    if (p) from[2] = from[p->keys + 1] = NULL;
    if ((!p || te__packed_views(p, from[p->keys], desc->format, parts)) &&
        te__attention_open(parts, desc, args) && te_op_attn_fwd(te, args) == TE_OK)
        o = args->o;
    if (o && p) {
        memcpy(shape, from[0]->shape, sizeof(shape));
        shape[o->ndim - 2] = p->heads;
        shape[o->ndim - 1] = p->head_dim;
        o = te__alias_as(o, 0, o->dtype, o->ndim, shape);
    }
    if (o && te__attention_save(args, from, in, saved)) {
        if (p) memcpy(saved, from, sizeof(from));
        o = te__record_owning("attention", o, te__attention_backward, &state, sizeof(state), te__attention_release, in,
                              TE__ATTENTION_INPUTS, saved, TE__ATTENTION_SAVED);
    } else
        o = NULL;
    if (!o) te__rng_back(te, before);
    return te__frame_return(te, o);
}

TE_API te_tensor *te_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attn_desc *desc) {
    const te_attn_desc zero = TE_ZERO;
    te_tensor *parts[3] = {q, k, v};
    return q ? te__attention_run(parts, NULL, desc ? desc : &zero) : NULL;
}
