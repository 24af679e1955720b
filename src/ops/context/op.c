/* ops/context/op.c: the checks and kernel arguments for sequences that are split among ranks. This file must not depend
 * on the backend or on process groups. */

static te_result te__context_want_ranks(te_ctx *te, const char *op, int ranks, int64_t rows) {
    if (ranks < 1 || ranks > 1 << 20)
        return te__fail(te, TE_ERR_INVALID, "%s: ranks is %d; 1 to 2^20 are possible", op, ranks);
    if (rows > INT32_MAX)
        return te__fail(te, TE_ERR_UNSUPPORTED, "%s: %lld rows; at most 2^31 - 1 are possible", op, (long long)rows);
    if (rows % (2 * ranks))
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: %lld rows and %d ranks, each with two chunks of a sequence; the rows must be a multiple "
                        "of %d: pad each sequence",
                        op, (long long)rows, ranks, 2 * ranks);
    return TE_OK;
}

static te_result te__check_context_rows(te_ctx *te, te_op_context_rows_args *a) {
    const char *const op = "context_rows";
    const int64_t rows = te__numel(a->map);
    te_result r;
    if (!a->sequences) a->sequences = 1;
    if (!a->share) a->share = 1;
    if (a->sequences < 1 || a->share < 1)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: sequences is %lld and share %d; numbers from 1 on are possible, or 0 for 1", op,
                        (long long)a->sequences, a->share);
    r = te__context_want_ranks(te, op, a->ranks, rows);
    if (r != TE_OK) return r;
    if (!a->cu_seqlens && rows > 0 && (a->sequences > rows || rows % (a->sequences * 2 * a->ranks)))
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: %lld rows of %lld sequences, and %d ranks, each with two chunks of a sequence; the length "
                        "of a sequence must be a multiple of %d: pad it",
                        op, (long long)rows, (long long)a->sequences, a->ranks, 2 * a->ranks);
    if (a->cu_seqlens && te__numel(a->cu_seqlens) < 2)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: cu_seqlens has %lld elements; b + 1 are needed, for one sequence or more", op,
                        (long long)te__numel(a->cu_seqlens));
    return TE_OK;
}

static te_result te__check_context_lengths(te_ctx *te, te_op_context_lengths_args *a) {
    const char *const op = "context_lengths";
    const int64_t n = te__numel(a->cu_seqlens);
    te_result r = te__context_want_ranks(te, op, a->ranks, 0);
    if (!a->cu_seqlens_padded) a->cu_seqlens_padded = a->cu_seqlens;
    if (r == TE_OK && n < 1) r = te__fail(te, TE_ERR_SHAPE, "%s: cu_seqlens is empty; b + 1 elements are needed", op);
    if (r == TE_OK) r = te__want_numel(te, op, "cu_seqlens_padded", a->cu_seqlens_padded, n);
    if (r == TE_OK) r = te__want_numel(te, op, "lengths", a->lengths, n);
    if (r == TE_OK) r = te__want_numel(te, op, "starts", a->starts, n);
    if (r != TE_OK) return r;
    if ((int)a->chunks < 0 || (int)a->chunks > (int)TE_CHUNKS_UP_TO)
        return te__fail(te, TE_ERR_INVALID, "%s: chunks is %d; see te_context_chunks", op, (int)a->chunks);
    if (a->rank < 0 || (a->chunks == TE_CHUNKS_UP_TO ? a->rank > 2 * a->ranks : a->rank >= a->ranks))
        return te__fail(te, TE_ERR_INVALID, "%s: rank is %d of %d ranks; 0 to %d are possible", op, a->rank, a->ranks,
                        a->chunks == TE_CHUNKS_UP_TO ? 2 * a->ranks : a->ranks - 1);
    return TE_OK;
}

static te_result te__check_context_merge(te_ctx *te, te_op_context_merge_args *a) {
    const char *const op = "context_merge";
    const bool packed = a->format == TE_THD;
    const int ndim = packed ? 3 : 4, seq = a->format == TE_BSHD ? 1 : 0;
    char text[TE__SHAPE_TEXT];
    int64_t lse[3];
    te_result r;
    if ((int)a->format < (int)TE_SBHD || (int)a->format > (int)TE_THD)
        return te__fail(te, TE_ERR_INVALID, "%s: format is %d; TE_SBHD (0), TE_BSHD (1) and TE_THD (2) are possible",
                        op, (int)a->format);
    if (a->o->ndim != ndim)
        return te__fail(te, TE_ERR_SHAPE, "%s: o is %s; %s is needed", op, te__shape_text(a->o, text),
                        packed ? "[tokens, heads, d]" : "[s, b, heads, d] or [b, s, heads, d]");
    r = te__want_same(te, op, "x", a->x, "o", a->o);
    if (r == TE_OK) r = te__want_channels(te, op, "x", a->x);
    if (r == TE_OK) r = te__want_channels(te, op, "o", a->o);
    if (r == TE_OK && a->o->shape[ndim - 1] > 1 << 20)
        r = te__fail(te, TE_ERR_UNSUPPORTED, "%s: o is %s; at most 2^20 channels of a head are possible", op,
                     te__shape_text(a->o, text));
    lse[0] = packed ? 1 : a->o->shape[1 - seq];
    lse[1] = a->o->shape[ndim - 2];
    lse[2] = a->o->shape[seq];
    if (r == TE_OK && a->lse && (a->lse->ndim != 3 || memcmp(a->lse->shape, lse, sizeof(lse)) != 0))
        r = te__fail(te, TE_ERR_SHAPE, "%s: lse is %s; [%lld, %lld, %lld] is needed", op, te__shape_text(a->lse, text),
                     (long long)lse[0], (long long)lse[1], (long long)lse[2]);
    if (r == TE_OK) r = te__want_numel(te, op, "x_lse", a->x_lse, lse[0] * lse[1] * lse[2]);
    if (r == TE_OK) r = te__want_numel(te, op, "max_logit", a->max_logit, lse[1]);
    return r == TE_OK ? te__want_numel(te, op, "x_max_logit", a->x_max_logit, lse[1]) : r;
}

/* ---- the description ---- */

static te__context_rows_kargs te__context_rows_problem(const te_op_context_rows_args *a) {
    te__context_rows_kargs k = TE_ZERO;
    k.cu = te__int_data(a->cu_seqlens);
    k.map = te__int_data(a->map);
    k.rows = te__numel(a->map);
    k.sequences = a->cu_seqlens ? te__numel(a->cu_seqlens) - 1 : a->sequences;
    k.share = a->share;
    k.ranks = a->ranks;
    k.inverse = a->inverse;
    return k;
}

static te__context_lengths_kargs te__context_lengths_problem(const te_op_context_lengths_args *a) {
    te__context_lengths_kargs k = TE_ZERO;
    k.cu = te__int_data(a->cu_seqlens);
    k.padded = te__int_data(a->cu_seqlens_padded);
    k.out = te__int_data(a->lengths);
    k.starts = te__int_data(a->starts);
    k.sequences = te__numel(a->cu_seqlens) - 1;
    k.ranks = a->ranks;
    k.rank = a->rank;
    k.chunks = (int)a->chunks;
    return k;
}

static te__context_merge_kargs te__context_merge_problem(const te_op_context_merge_args *a) {
    te__context_merge_kargs k = TE_ZERO;
    const int seq = a->format == TE_BSHD ? 1 : 0, head = a->o->ndim - 2;
    int i, from[3];
    from[0] = a->format == TE_THD ? -1 : 1 - seq;
    from[1] = seq;
    from[2] = head;
    for (i = 0; i < 3; i++) {
        k.size[i] = from[i] < 0 ? 1 : a->o->shape[from[i]];
        k.x_stride[i] = from[i] < 0 ? 0 : a->x->stride[from[i]];
        k.o_stride[i] = from[i] < 0 ? 0 : a->o->stride[from[i]];
    }
    if (a->lse) {
        k.lse_stride[0] = a->lse->stride[0];
        k.lse_stride[1] = a->lse->stride[2];
        k.lse_stride[2] = a->lse->stride[1];
    }
    k.x = te__data(a->x);
    k.o = te__data(a->o);
    k.x_lse = te__f32_data(a->x_lse);
    k.lse = te__f32_data(a->lse);
    k.x_max = te__f32_data(a->x_max_logit);
    k.largest = te__f32_data(a->max_logit);
    k.d = (int)a->o->shape[head + 1];
    k.x_dt = (int)a->x->dtype;
    k.o_dt = (int)a->o->dtype;
    return k;
}
