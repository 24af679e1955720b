/* ops/kv/op.c: checks the arguments of the operations on sequence lengths, KV caches and causal masks. This file must
 * not depend on the backend. */

static te_result te__check_cu_seqlens(te_ctx *te, te_op_cu_seqlens_args *a) {
    char text[TE__SHAPE_TEXT];
    if (a->mask->ndim < 1 || te__numel(a->mask) > INT32_MAX)
        return te__fail(te, TE_ERR_SHAPE, "cu_seqlens: mask is %s; [b, .., s] of at most 2^31 - 1 elements is needed",
                        te__shape_text(a->mask, text));
    return te__want_numel(te, "cu_seqlens", "cu_seqlens", a->cu_seqlens, a->mask->shape[0] + 1);
}

/* Checks that x can be copied into `cache`: both have the same heads and channels, and the cache has four
 * dimensions. */
static te_result te__kv_want_side(te_ctx *te, const char *name, const te_tensor *x, const char *cache_name,
                                  const te_tensor *cache, te_qkv_format format) {
    const char *const op = "copy_to_kv_cache";
    const bool packed = format == TE_THD;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    te_result r;
    if (x->ndim != (packed ? 3 : 4))
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; %s is needed", op, name, te__shape_text(x, a),
                        packed ? "[tokens, heads, d]" : "[s, b, heads, d] or [b, s, heads, d]");
    r = te__want_channels(te, op, name, x);
    if (r == TE_OK) r = te__want_heads(te, op, cache_name, cache);
    if (r == TE_OK && cache->shape[2] * cache->shape[3] > 1 << 28)
        r = te__fail(te, TE_ERR_UNSUPPORTED, "%s: %s is %s; at most 2^28 channels of all heads are possible", op,
                     cache_name, te__shape_text(cache, b));
    if (r == TE_OK && (x->shape[x->ndim - 2] != cache->shape[2] || x->shape[x->ndim - 1] != cache->shape[3]))
        r = te__fail(te, TE_ERR_SHAPE,
                     "%s: %s is %s and %s is %s; their last two sizes, heads and channels, must be equal", op, name,
                     te__shape_text(x, a), cache_name, te__shape_text(cache, b));
    return r;
}

static te_result te__check_copy_to_kv_cache(te_ctx *te, te_op_copy_to_kv_cache_args *a) {
    const char *const op = "copy_to_kv_cache";
    const int dims = a->format == TE_THD ? 1 : 2;
    const int64_t b = te__numel(a->cu_seqlens) - 1;
    char x[TE__SHAPE_TEXT], y[TE__SHAPE_TEXT];
    te_result r;
    if ((int)a->format < (int)TE_SBHD || (int)a->format > (int)TE_THD)
        return te__fail(te, TE_ERR_INVALID, "%s: format is %d; TE_SBHD (0), TE_BSHD (1) and TE_THD (2) are possible",
                        op, (int)a->format);
    r = te__kv_want_side(te, "k", a->k, "k_cache", a->k_cache, a->format);
    if (r == TE_OK) r = te__kv_want_side(te, "v", a->v, "v_cache", a->v_cache, a->format);
    if (r != TE_OK) return r;
    if (memcmp(a->k->shape, a->v->shape, (size_t)(dims + 1) * sizeof(int64_t)) != 0)
        return te__fail(te, TE_ERR_SHAPE, "%s: k is %s and v is %s; all but the head sizes must be equal", op,
                        te__shape_text(a->k, x), te__shape_text(a->v, y));
    if (memcmp(a->k_cache->shape, a->v_cache->shape, 3 * sizeof(int64_t)) != 0)
        return te__fail(te, TE_ERR_SHAPE, "%s: k_cache is %s and v_cache is %s; all but the head sizes must be equal",
                        op, te__shape_text(a->k_cache, x), te__shape_text(a->v_cache, y));
    r = te__want_factors(te, op, "k_cache", a->k_cache, "k_factors", a->k_factors);
    if (r == TE_OK) r = te__want_factors(te, op, "v_cache", a->v_cache, "v_factors", a->v_factors);
    if (r != TE_OK) return r;
    if (b < 0)
        return te__fail(te, TE_ERR_SHAPE, "%s: cu_seqlens is %s; [b + 1] is needed", op,
                        te__shape_text(a->cu_seqlens, x));
    if (dims == 2 && a->k->shape[a->format == TE_BSHD ? 0 : 1] != b)
        return te__fail(
            te, TE_ERR_SHAPE,
            "%s: k is %s and cu_seqlens has %lld sequences; it has one more number than there are sequences in k", op,
            te__shape_text(a->k, x), (long long)b);
    r = te__want_numel(te, op, "start_positions", a->start_positions, b);
    if (r == TE_OK && a->page_table && (a->page_table->ndim != 2 || a->page_table->shape[0] != b))
        r = te__fail(te, TE_ERR_SHAPE, "%s: page_table is %s; [%lld, pages of each sequence] is needed", op,
                     te__shape_text(a->page_table, x), (long long)b);
    if (r == TE_OK && !a->page_table && a->k_cache->shape[0] < b)
        r = te__fail(te, TE_ERR_SHAPE,
                     "%s: k_cache is %s; without page_table the first size is at least that of the sequences, %lld", op,
                     te__shape_text(a->k_cache, x), (long long)b);
    return r;
}

static te_result te__check_advance_kv_cache(te_ctx *te, te_op_advance_kv_cache_args *a) {
    const char *const op = "advance_kv_cache";
    const int64_t b = te__numel(a->start_positions);
    te_result r = te__want_numel(te, op, "cu_seqlens_q", a->cu_seqlens_q, b + 1);
    if (r == TE_OK) r = te__want_numel(te, op, "cu_seqlens_kv", a->cu_seqlens_kv, b + 1);
    if (r == TE_OK && (a->added < 0 || a->step < 0 || a->added > INT32_MAX || a->step > INT32_MAX / te__max(b, 1)))
        r = te__fail(te, TE_ERR_INVALID,
                     "%s: added is %lld and step %lld, of %lld sequences; 0 or more, and less than 2^31 tokens "
                     "in all, are possible",
                     op, (long long)a->added, (long long)a->step, (long long)b);
    return r;
}

static te_result te__check_detect_causal_mask(te_ctx *te, te_op_detect_causal_mask_args *a) {
    char text[TE__SHAPE_TEXT];
    if (a->mask->ndim != 4 || a->mask->shape[2] != a->mask->shape[3] || te__numel(a->mask) == 0)
        return te__fail(te, TE_ERR_SHAPE, "detect_causal_mask: mask is %s; [b, H, s, s] with no size of 0 is needed",
                        te__shape_text(a->mask, text));
    if (a->window.on && a->window.right > 0)
        return te__fail(te, TE_ERR_INVALID,
                        "detect_causal_mask: window is %lld, %lld; a causal one ends at the row's own key: (left, 0)",
                        (long long)a->window.left, (long long)a->window.right);
    return TE_OK;
}

/* ---- the description ---- */

static te__cu_seqlens_kargs te__cu_seqlens_problem(const te_op_cu_seqlens_args *args) {
    te__cu_seqlens_kargs k = TE_ZERO;
    k.mask = te__u8_data(args->mask);
    k.cu = te__int_data(args->cu_seqlens);
    k.sequences = args->mask->shape[0];
    k.length = k.sequences ? te__numel(args->mask) / k.sequences : 0;
    return k;
}

static te__kv_advance_kargs te__kv_advance_problem(const te_op_advance_kv_cache_args *args) {
    te__kv_advance_kargs k = TE_ZERO;
    k.start = te__int_data(args->start_positions);
    k.cu_q = te__int_data(args->cu_seqlens_q);
    k.cu_kv = te__int_data(args->cu_seqlens_kv);
    k.sequences = te__numel(args->start_positions);
    k.added = (int)args->added;
    k.step = (int)args->step;
    return k;
}

static te__kv_side te__kv_side_of(const te_tensor *x, te_tensor *cache, te_tensor *factors, te_qkv_format format) {
    te__kv_side s = TE_ZERO;
    s.x = te__data(x);
    s.cache = te__data(cache);
    s.x_s = x->stride[format == TE_BSHD ? 1 : 0];
    s.x_b = format == TE_THD ? 0 : x->stride[format == TE_BSHD ? 0 : 1];
    s.x_h = x->stride[x->ndim - 2];
    s.page = cache->stride[0];
    s.row = cache->stride[1];
    s.head = cache->stride[2];
    if (factors) {
        s.factors = te__data(factors);
        s.factor_page = factors->stride[0];
        s.factor_row = factors->stride[1];
        s.factor_head = factors->stride[2];
    }
    s.d = (int)cache->shape[3];
    s.x_dt = (int)x->dtype;
    s.cache_dt = (int)cache->dtype;
    return s;
}

static te__kv_copy_kargs te__kv_copy_problem(const te_op_copy_to_kv_cache_args *a) {
    te__kv_copy_kargs k = TE_ZERO;
    k.side[0] = te__kv_side_of(a->k, a->k_cache, a->k_factors, a->format);
    k.side[1] = te__kv_side_of(a->v, a->v_cache, a->v_factors, a->format);
    k.cu = te__int_data(a->cu_seqlens);
    k.start = te__int_data(a->start_positions);
    k.table = te__int_data(a->page_table);
    k.sequences = (int)te__numel(a->cu_seqlens) - 1;
    k.heads = (int)a->k_cache->shape[2];
    k.packed = a->format == TE_THD;
    k.batch_first = a->format == TE_BSHD;
    k.rows_of_each = k.packed ? 0 : a->k->shape[k.batch_first ? 1 : 0];
    k.tokens = k.packed ? a->k->shape[0] : k.rows_of_each * k.sequences;
    if (k.sequences == 0) k.tokens = 0;
    k.pages = (int)a->k_cache->shape[0];
    k.page_size = (int)a->k_cache->shape[1];
    k.pages_of_each = a->page_table ? (int)a->page_table->shape[1] : 1;
    if (k.page_size == 0) k.tokens = 0;
    return k;
}

static te__causal_mask_kargs te__causal_mask_problem(const te_op_detect_causal_mask_args *args) {
    const te_tensor *x = args->mask;
    te__causal_mask_kargs k = TE_ZERO;
    k.mask = te__data(x);
    k.causal = te__int_data(args->causal);
    k.s = x->shape[3];
    k.heads = x->stride[1] ? x->shape[1] : 1; /* an expanded mask (stride 0) repeats its heads */
    k.stride_b = x->stride[0];
    k.stride_h = x->stride[1];
    k.stride_i = x->stride[2];
    k.stride_j = x->stride[3];
    k.left = args->window.on && args->window.left >= 0 && args->window.left < k.s ? args->window.left : k.s - 1;
    k.dt = (int)x->dtype;
    k.strict = args->strict;
    k.rows = (k.stride_b ? x->shape[0] : 1) * (args->strict ? k.heads * k.s : 2);
    return k;
}
