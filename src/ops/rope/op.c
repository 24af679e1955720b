/* ops/rope/op.c: checks the arguments of the rotary embeddings, and writes te__rope_kargs for both backends. This file
 * must not depend on the backend. */

/* The limit of |position_offset|. It keeps the sum of the offset, a token's index and a start position inside 64
 * bits. */
#define TE__ROPE_MAX_OFFSET ((int64_t)1 << 53)
/* The largest number of context-parallel ranks. It keeps 2 * cp_size, the number of chunks, well inside an
 * int. */
#define TE__ROPE_MAX_RANKS (1 << 20)

/* Checks a table of angles for b sequences. Sets rotary_dim to the width of the table. */
static te_result te__rope_check_freqs(te_ctx *te, const char *op, te_rope_angles *a, int64_t b) {
    const te_tensor *f = a->freqs;
    char text[TE__SHAPE_TEXT];
    if (f->ndim != 4 || (f->shape[1] != 1 && f->shape[1] != b) || f->shape[2] != 1 ||
        (a->rotary_dim && a->rotary_dim != f->shape[3]))
        return te__fail(te, TE_ERR_SHAPE,
                        a->rotary_dim ? "%s: freqs is %s; [positions, 1 or %lld, 1, %d] is needed"
                                      : "%s: freqs is %s; [positions, 1 or %lld, 1, rotary_dim] is needed",
                        op, te__shape_text(f, text), (long long)b, a->rotary_dim);
    if (a->base != 0.0f || a->inv_freq || (a->position_scale != 0.0f && a->position_scale != 1.0f))
        return te__fail(te, TE_ERR_INVALID,
                        "%s: freqs is given, with base %g, inv_freq %s and position_scale %g, which make angles in its "
                        "place; leave them 0",
                        op, (double)a->base, a->inv_freq ? "given" : "NULL", (double)a->position_scale);
    a->rotary_dim = (int)te__min(f->shape[3], INT_MAX);
    return TE_OK;
}
/* Checks the angles, and fills in defaults. The b sequences have s tokens each, or s tokens together if `packed` is
 * true. Heads have d channels. */
static te_result te__rope_check_angles(te_ctx *te, const char *op, te_rope_angles *a, bool packed, int64_t s, int64_t b,
                                       int64_t d) {
    const int64_t positions = a->positions ? te__numel(a->positions) : 0;
    te_result r = a->freqs ? te__rope_check_freqs(te, op, a, b) : TE_OK;
    if (r != TE_OK) return r;
    if (a->base == 0.0f && !a->freqs) a->base = 10000.0f;
    if (a->position_scale == 0.0f) a->position_scale = 1.0f;
    if (a->attention_factor == 0.0f) a->attention_factor = 1.0f;
    if (a->rotary_dim == 0 && !a->freqs) a->rotary_dim = (int)te__min(d, INT_MAX);
    if (a->cp_size == 0) a->cp_size = 1;
    if (!a->freqs && !(a->base > 0.0f))
        return te__fail(te, TE_ERR_INVALID, "%s: base is %g; it must be positive", op, (double)a->base);
    if (a->rotary_dim < 0 || a->rotary_dim > d || a->rotary_dim % 2 != 0)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: %d of %lld channels are to be rotated; an even number of those that there are is possible",
                        op, a->rotary_dim, (long long)d);
    if (a->rotary_dim > 2 * TE__ROPE_MAX_HALF)
        return te__fail(te, TE_ERR_UNSUPPORTED, "%s: %d channels are to be rotated; at most %d are possible", op,
                        a->rotary_dim, 2 * TE__ROPE_MAX_HALF);
    if (a->position_offset > TE__ROPE_MAX_OFFSET || a->position_offset < -TE__ROPE_MAX_OFFSET)
        return te__fail(te, TE_ERR_INVALID, "%s: position_offset is %lld; 2^53 at most is possible, either way", op,
                        (long long)a->position_offset);
    if (a->cp_size > TE__ROPE_MAX_RANKS)
        return te__fail(te, TE_ERR_UNSUPPORTED, "%s: cp_size is %d; at most %d ranks are possible", op, a->cp_size,
                        TE__ROPE_MAX_RANKS);
    if (a->cp_size < 1 || a->cp_rank < 0 || a->cp_rank >= a->cp_size)
        return te__fail(te, TE_ERR_INVALID, "%s: cp_rank is %d and cp_size %d; ranks are 0 to cp_size - 1", op,
                        a->cp_rank, a->cp_size);
    if (a->cp_size > 1 && a->positions)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: positions are given, and cp_size is %d; with positions a rank needs no cp_size: leave it 0", op,
            a->cp_size);
    if (a->cp_size > 1 && !packed && s % 2 != 0)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: the sequence has %lld tokens and cp_size is %d; a rank has two chunks of the same length, "
                        "so an even number is needed",
                        op, (long long)s, a->cp_size);
    if (a->positions && positions != s && (packed || positions != s * b))
        return te__fail(
            te, TE_ERR_SHAPE,
            packed ? "%s: positions has %lld elements; one for each of %lld tokens is needed"
                   : "%s: positions has %lld elements; [%lld], or as many for each of %lld sequences, is needed",
            op, (long long)positions, (long long)s, (long long)b);
    if (a->freqs && !packed && !a->positions && !a->start_positions && a->freqs->shape[3] > 0 && s * b > 0 &&
        (a->position_offset < 0 || a->position_offset + s * a->cp_size > a->freqs->shape[0]))
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: freqs has %lld rows, and the positions are %lld to %lld; a row for each is needed", op,
                        (long long)a->freqs->shape[0], (long long)a->position_offset,
                        (long long)(a->position_offset + s * a->cp_size - 1));
    return te__want_numel(te, op, "start_positions", a->start_positions, b);
}

static te_result te__rope_want_heads(te_ctx *te, const char *name, const te_tensor *x, bool packed) {
    char text[TE__SHAPE_TEXT];
    if (!packed) return te__want_heads(te, "rope", name, x);
    if (x->ndim != 3)
        return te__fail(te, TE_ERR_SHAPE, "rope: %s is %s; [tokens, heads, d] is needed with TE_THD", name,
                        te__shape_text(x, text));
    return te__want_channels(te, "rope", name, x);
}
static te_result te__check_rope(te_ctx *te, te_op_rope_args *a) {
    const bool packed = a->format == TE_THD;
    te_result r = te__rope_want_heads(te, "x", a->x, packed);
    if (r == TE_OK) r = te__rope_want_heads(te, "y", a->y, packed);
    if (r == TE_OK) r = te__want_same(te, "rope", "x", a->x, "y", a->y);
    if (r == TE_OK && a->no_rope) return packed ? TE_OK : te__want_format(te, "rope", a->format);
    if (r == TE_OK && packed != (a->cu_seqlens != NULL))
        r = te__fail(te, TE_ERR_INVALID,
                     "rope: format is %d and cu_seqlens %s; sequences in one tensor (TE_THD, 2) have their starts "
                     "there, and other formats none",
                     (int)a->format, a->cu_seqlens ? "given" : "NULL");
    if (r == TE_OK && packed && te__numel(a->cu_seqlens) < 2 && te__numel(a->x) > 0)
        r = te__fail(
            te, TE_ERR_SHAPE,
            "rope: cu_seqlens has %lld elements; [b + 1] is needed, and x has %lld tokens of at least one sequence",
            (long long)te__numel(a->cu_seqlens), (long long)a->x->shape[0]);
    if (r == TE_OK && !packed) r = te__want_format(te, "rope", a->format);
    if (r != TE_OK) return r;
    return te__rope_check_angles(te, "rope", &a->angles, packed, a->x->shape[a->format == TE_BSHD ? 1 : 0],
                                 packed ? te__numel(a->cu_seqlens) - 1 : a->x->shape[a->format == TE_BSHD ? 0 : 1],
                                 a->x->shape[a->x->ndim - 1]);
}

/* Returns the arguments of the backward pass in the struct of the forward pass. The two structs differ only in
 * `const`. */
static te_op_qkv_rope_args te__qkv_rope_forward_of(const te_op_qkv_rope_bwd_args *a) {
    te_op_qkv_rope_args f = TE_ZERO;
    f.qkv = a->qkv;
    f.q = (te_tensor *)a->q;
    f.k = (te_tensor *)a->k;
    f.v = (te_tensor *)a->v;
    f.rotated = (te_tensor *)a->rotated;
    f.format = a->format;
    f.num_heads = a->num_heads;
    f.num_groups = a->num_groups;
    f.head_dim = a->head_dim;
    f.interleaved_groups = a->interleaved_groups;
    f.no_rope = a->no_rope;
    f.angles = a->angles;
    return f;
}

/* Checks a->rotated, or q, k and v if a->rotated is NULL. Sets `shape` to the shape of v. With a->rotated, sets only
 * shape[0] and shape[1], from a->qkv. */
static te_result te__qkv_rope_check_parts(te_ctx *te, const char *op, const te_op_qkv_rope_args *a, int64_t shape[4]) {
    const te_tensor *part[3];
    static const char *const names[3] = {"q", "k", "v"};
    char text[TE__SHAPE_TEXT], want[TE__SHAPE_TEXT];
    int i;
    te_result r = TE_OK;
    part[0] = a->q;
    part[1] = a->k;
    part[2] = a->v;
    for (i = 0; i < 3; i++) {
        if (a->k_cache && i > 0) {
            if (part[i])
                return te__fail(te, TE_ERR_INVALID, "%s: %s and k_cache are given; leave one of them NULL", op,
                                names[i]);
        } else if (!a->rotated) r = te__want_heads(te, op, names[i], part[i]);
        else if (part[i])
            r = te__fail(
                te, TE_ERR_INVALID,
                "%s: %s and rotated are given; rotated stands in the place of q, k and v: leave one of them NULL", op,
                names[i]);
        if (r != TE_OK) return r;
    }
    if (a->num_heads < 1 || a->num_groups < 1 || a->num_heads % a->num_groups != 0 || a->head_dim < 1)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: %d heads in %d groups, of size %d; the groups must divide the heads, and the size be positive", op,
            a->num_heads, a->num_groups, a->head_dim);
    if (a->rotated) {
        if (a->qkv->ndim != 3)
            return te__fail(te, TE_ERR_SHAPE, "%s: qkv is %s; [s, b, (H + 2G) * d] is needed with rotated", op,
                            te__shape_text(a->qkv, text));
        memcpy(shape, a->qkv->shape, 2 * sizeof(int64_t));
        return te__want_same(te, op, "rotated", a->rotated, "qkv", a->qkv);
    }
    memcpy(shape, a->q->shape, 4 * sizeof(int64_t));
    shape[3] = a->head_dim;
    for (i = 0; i < (a->k_cache ? 1 : 3); i++) {
        shape[2] = i == 0 ? a->num_heads : a->num_groups;
        if (memcmp(shape, part[i]->shape, 4 * sizeof(int64_t)) != 0)
            return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; with %d heads in %d groups it must be %s", op, names[i],
                            te__shape_text(part[i], text), a->num_heads, a->num_groups, te__dims_text(4, shape, want));
    }
    return TE_OK;
}
/* Checks the caches that have the place of k and v, for b sequences. */
static te_result te__qkv_rope_check_caches(te_ctx *te, const char *op, const te_op_qkv_rope_args *a, int64_t b) {
    char x[TE__SHAPE_TEXT], y[TE__SHAPE_TEXT];
    const te_tensor *const cache[2] = {a->k_cache, a->v_cache};
    te_result r = TE_OK;
    int i;
    if (!a->k_cache && !a->v_cache && !a->cu_seqlens && !a->cache_positions && !a->page_table && !a->k_factors &&
        !a->v_factors)
        return TE_OK;
    if (!a->k_cache || !a->v_cache || !a->cu_seqlens || !a->cache_positions || a->rotated)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: k_cache, v_cache, cu_seqlens and cache_positions belong together, and to no `rotated`; "
                        "give all four or none",
                        op);
    for (i = 0; i < 2 && r == TE_OK; i++) {
        r = te__want_heads(te, op, i ? "v_cache" : "k_cache", cache[i]);
        if (r == TE_OK && cache[i]->dtype != a->k_cache->dtype)
            r = te__fail(te, TE_ERR_DTYPE, "%s: k_cache is %s and v_cache is %s; both have one format", op,
                         te_dtype_name(a->k_cache->dtype), te_dtype_name(cache[i]->dtype));
        if (r == TE_OK && (cache[i]->shape[2] != a->num_groups || cache[i]->shape[3] != a->head_dim ||
                           (cache[i]->dtype != a->qkv->dtype && cache[i]->dtype != TE_F8E4M3) ||
                           cache[i]->shape[0] != a->k_cache->shape[0] ||
                           cache[i]->shape[1] != a->k_cache->shape[1]))
            r = te__fail(te, TE_ERR_SHAPE,
                         "%s: k_cache is %s and v_cache %s in %s; [pages, page_size, %d, %d] in %s or e4m3 is needed",
                         op, te__shape_text(a->k_cache, x), te__shape_text(a->v_cache, y),
                         te_dtype_name(cache[i]->dtype), a->num_groups, a->head_dim, te_dtype_name(a->qkv->dtype));
        if (r == TE_OK)
            r = te__want_factors(te, op, i ? "v_cache" : "k_cache", cache[i], i ? "v_factors" : "k_factors",
                                 i ? a->v_factors : a->k_factors);
    }
    if (r == TE_OK) r = te__want_numel(te, op, "cu_seqlens", a->cu_seqlens, b + 1);
    if (r == TE_OK) r = te__want_numel(te, op, "cache_positions", a->cache_positions, b);
    if (r == TE_OK && a->page_table && (a->page_table->ndim != 2 || a->page_table->shape[0] != b))
        r = te__fail(te, TE_ERR_SHAPE, "%s: page_table is %s; [%lld, pages of each sequence] is needed", op,
                     te__shape_text(a->page_table, x), (long long)b);
    if (r == TE_OK && !a->page_table && a->k_cache->shape[0] < b)
        r = te__fail(te, TE_ERR_SHAPE, "%s: k_cache is %s; without page_table its first size is at least %lld", op,
                     te__shape_text(a->k_cache, x), (long long)b);
    return r;
}
static te_result te__qkv_rope_check(te_ctx *te, const char *op, te_op_qkv_rope_args *a) {
    int64_t shape[4];
    const int seq = a->format == TE_BSHD ? 1 : 0;
    te_result r = te__qkv_rope_check_parts(te, op, a, shape);
    if (r == TE_OK)
        r = te__want_matrix(te, op, "qkv", a->qkv, shape[0] * shape[1],
                            ((int64_t)a->num_heads + 2 * (int64_t)a->num_groups) * a->head_dim,
                            a->rotated ? "rotated" : "q", a->rotated ? a->rotated : a->q);
    if (r == TE_OK) r = te__want_format(te, op, a->format);
    if (r == TE_OK) r = te__qkv_rope_check_caches(te, op, a, shape[1 - seq]);
    return r == TE_OK && !a->no_rope
               ? te__rope_check_angles(te, op, &a->angles, false, shape[seq], shape[1 - seq], a->head_dim)
               : r;
}

static te_result te__check_qkv_rope(te_ctx *te, te_op_qkv_rope_args *a) {
    return te__qkv_rope_check(te, "qkv_rope", a);
}

static te_result te__check_qkv_rope_bwd(te_ctx *te, te_op_qkv_rope_bwd_args *a) {
    te_op_qkv_rope_args f = te__qkv_rope_forward_of(a);
    te_result r = te__qkv_rope_check(te, "qkv_rope_bwd", &f);
    if (r != TE_OK) return r;
    a->angles = f.angles;
    return TE_OK;
}

/* ---- the description ---- */

static te__rope_view te__rope_view_of(const te_tensor *x, te_qkv_format format) {
    te__rope_view v = TE_ZERO;
    v.p = te__data(x);
    v.s = x->stride[format == TE_BSHD ? 1 : 0];
    v.b = format == TE_THD ? 0 : x->stride[format == TE_BSHD ? 0 : 1];
    v.h = x->stride[x->ndim - 2];
    v.dt = (int)x->dtype;
    return v;
}

/* Returns a view of the factors [pages, page_size, heads] of a cache's rows. */
static te__rope_view te__rope_factors_of(const te_tensor *x) {
    te__rope_view v = TE_ZERO;
    v.p = te__data(x);
    v.s = x->stride[0];
    v.b = x->stride[1];
    v.h = x->stride[2];
    v.dt = (int)x->dtype;
    return v;
}

/* Copies the sizes of `x` and the angles `a` into `k`. `x` is a tensor of heads or a packed projection. If `a` is NULL,
 * nothing is rotated. */
static void te__rope_describe(te__rope_kargs *k, const te_tensor *x, te_qkv_format format, const te_rope_angles *a) {
    int i;
    k->batch_first = format == TE_BSHD;
    k->seq = (int)x->shape[k->batch_first ? 1 : 0];
    k->batch = format == TE_THD ? 1 : (int)x->shape[k->batch_first ? 0 : 1];
    k->heads = (int)x->shape[x->ndim - 2];
    k->d = (int)x->shape[x->ndim - 1];
    k->cp_size = 1;
    if (!a) return;
    k->half = a->rotary_dim / 2;
    k->interleaved = a->interleaved;
    k->position_scale = a->position_scale;
    k->attention_factor = a->attention_factor;
    k->offset = a->position_offset;
    k->start = te__int_data(a->start_positions);
    k->positions = te__data(a->positions);
    if (a->positions) k->positions_dt = (int)a->positions->dtype;
    if (a->freqs && k->half) {
        k->freqs = te__f32_data(a->freqs);
        k->freqs_rows = a->freqs->shape[0];
        k->freqs_step = a->freqs->shape[1] > 1 ? 2 * k->half : 0;
        k->freqs_row = a->freqs->shape[1] * 2 * k->half;
        k->has_freqs = 1;
    }
    k->positions_step = a->positions && te__numel(a->positions) > k->seq ? k->seq : 0;
    k->cp_size = a->cp_size;
    k->cp_rank = a->cp_rank;
    for (i = 0; i < k->half && !a->freqs; i++)
        k->inv_freq[i] = a->inv_freq ? a->inv_freq[i] : (float)pow((double)a->base, -2.0 * i / a->rotary_dim);
}

static void te__rope_problem(te__rope_kargs *k, const te_op_rope_args *a) {
    memset(k, 0, sizeof(*k));
    te__rope_describe(k, a->x, a->format, a->no_rope ? NULL : &a->angles);
    if (a->cu_seqlens && !a->no_rope) {
        k->cu = te__int_data(a->cu_seqlens);
        k->sequences = (int)te__numel(a->cu_seqlens) - 1;
    }
    k->packed = te__rope_view_of(a->x, a->format);
    k->q = te__rope_view_of(a->y, a->format);
    k->direction = a->backward ? -1.0f : 1.0f;
}

/* Returns a view of the packed projection x. The sizes come from k. */
static te__rope_view te__rope_packed_view(const te__rope_kargs *k, const te_tensor *x) {
    te__rope_view v = TE_ZERO;
    v.p = te__data(x);
    v.dt = (int)x->dtype;
    v.h = k->d;
    v.b = v.s = ((int64_t)k->heads + 2 * (int64_t)k->groups) * k->d;
    if (k->batch_first)
        v.b *= k->seq;
    else
        v.s *= k->batch;
    return v;
}
static void te__qkv_rope_problem(te__rope_kargs *k, const te_op_qkv_rope_args *a, bool backward) {
    memset(k, 0, sizeof(*k));
    te__rope_describe(k, a->rotated ? a->qkv : a->q, a->format, a->no_rope ? NULL : &a->angles);
    k->heads = a->num_heads;
    k->d = a->head_dim;
    k->groups = a->num_groups;
    k->grouped = a->interleaved_groups;
    k->packed = te__rope_packed_view(k, a->qkv);
    if (a->rotated) {
        k->q = te__rope_packed_view(k, a->rotated);
        k->whole = te__data(a->rotated) == te__data(a->qkv) && te__data(a->qkv) ? TE__ROPE_IN_PLACE : 1;
    } else if (a->k_cache) {
        k->q = te__rope_view_of(a->q, a->format);
        k->k = te__rope_view_of(a->k_cache, TE_SBHD); /* pages, rows */
        k->v = te__rope_view_of(a->v_cache, TE_SBHD);
        k->cached = 1;
        if (a->k_factors) {
            k->coded = 1;
            k->k_factors = te__rope_factors_of(a->k_factors);
            k->v_factors = te__rope_factors_of(a->v_factors);
        }
        k->pages = (int)a->k_cache->shape[0];
        k->page_size = (int)a->k_cache->shape[1];
        k->pages_of_each = a->page_table ? (int)a->page_table->shape[1] : 1;
        k->cache_cu = te__int_data(a->cu_seqlens);
        k->cache_start = te__int_data(a->cache_positions);
        k->cache_table = te__int_data(a->page_table);
    } else {
        k->q = te__rope_view_of(a->q, a->format);
        k->k = te__rope_view_of(a->k, a->format);
        k->v = te__rope_view_of(a->v, a->format);
    }
    k->gather = backward;
    k->direction = backward ? -1.0f : 1.0f;
}
