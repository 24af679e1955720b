/* context_parallel/batch.c: pads batches, divides them among ranks that share sequences, and joins them again. This
 * file must not depend on attention. */

/* ---- this rank's part of a batch, and the whole batch ---- */

/* Returns the index of the dimension that counts tokens; -1 after an error. */
static int te__batch_dim(const te_tensor *x, const te_cp_batch *b, const char *who) {
    const int dim = b->format == TE_BSHD || (b->format == TE_THD && x->ndim > 1 && x->shape[0] == 1) ? 1 : 0;
    char text[TE__SHAPE_TEXT];
    if ((int)b->format < 0 || b->format > TE_THD) {
        te__fail(x->te, TE_ERR_INVALID, "%s: format is %d; TE_SBHD (0) to TE_THD (2) are possible", who,
                 (int)b->format);
        return -1;
    }
    if (!te__same_ctx(x, x->te, who) || te__need_memory(x, who) != TE_OK) return -1;
    if (x->ndim <= dim || x->quantized) {
        te__fail(x->te, TE_ERR_SHAPE,
                 "%s: the batch is %s%s, with format %d; a plain tensor with tokens along dimension %d is needed", who,
                 te__shape_text(x, text), x->quantized ? ", quantized" : "", (int)b->format, dim);
        return -1;
    }
    if (b->format == TE_THD && !b->cu_seqlens_padded) {
        te__fail(x->te, TE_ERR_INVALID,
                 "%s: cu_seqlens_padded is NULL with TE_THD (%d); each sequence is divided, so their starts are needed",
                 who, (int)TE_THD);
        return -1;
    }
    return dim;
}
/* Returns the map that reorders the rows of the whole batch. If `part` is 1, x is the whole batch, and the map leads
 * from sequence order (all rows of sequence 0 first) to rank order (all rows of rank 0 first). Otherwise x is one of
 * `part` equal shards of the batch, and the map leads from rank order to sequence order. */
static te_tensor *te__batch_map(const te_tensor *x, const te_cp_batch *b, int dim, int ranks, int part) {
    te__context_order order = te__context_order_of(ranks, 1, part == 1);
    const int64_t sequences = dim == 1 ? x->shape[0] : 1;
    return te__context_map(x->te, &order, sequences * x->shape[dim] * part, sequences,
                           b->format == TE_THD ? b->cu_seqlens_padded : NULL);
}
/* Returns a copy of x, so that the larger tensor that contains x can be released. */
static te_tensor *te__batch_copy(te_tensor *x) {
    te_tensor *y = x ? te__empty_like(x, x->dtype) : NULL;
    return y ? te__checked(y, te_tensor_copy(y, x)) : NULL;
}

TE_API te_tensor *te_get_batch_on_this_cp_rank(te_tensor *x, const te_cp_batch *batch) {
    const char *const who = "te_get_batch_on_this_cp_rank";
    te_tensor *all;
    te__context c;
    int64_t shape[TE_MAX_DIMS], split[2];
    int dim;
    if (!x || !te__has_desc(x->te, batch, who)) return NULL;
    dim = te__batch_dim(x, batch, who);
    if (dim < 0) return NULL;
    c = te__context_of(batch->cp_group, batch->cp_p2p_group, TE_CP_A2A_P2P);
    split[0] = te__context_size(&c);
    split[1] = te__numel(x) / split[0];
    memcpy(shape, x->shape, sizeof(shape));
    shape[dim] /= split[0];
    te__frame_begin(x->te);
    all = te_tensor_contiguous(te_tensor_detach(x));
    if (all && split[0] > 1) {
        all = te__context_moved(all, te__batch_map(x, batch, dim, (int)split[0], 1), 2, split);
        all = te_tensor_view(te_tensor_narrow(all, 0, te__context_rank(&c), 1), x->ndim, shape);
    }
    return te__frame_return(x->te, te__batch_copy(all));
}

/* Returns the tensors x of all ranks, one behind the other. NULL on all ranks if x is NULL on one of them. */
static te_tensor *te__batch_gathered(te_group *group, te_tensor *x) {
    return te__group_size(group) > 1 ? te__gather(group, x) : x;
}

TE_API te_tensor *te_gather_batch_of_cp_ranks(te_tensor *x, const te_cp_batch *batch) {
    const char *const who = "te_gather_batch_of_cp_ranks";
    te_ctx *te = x                              ? x->te
                 : batch && batch->cp_group     ? batch->cp_group->te
                 : batch && batch->cp_p2p_group ? batch->cp_p2p_group->te
                                                : NULL;
    te_tensor *all, *map;
    te__context c;
    int64_t shape[TE_MAX_DIMS];
    int dim, ranks;
    if (!te || !te__has_desc(te, batch, who)) return NULL;
    if (!x && te_error_code(te) == TE_OK)
        te__fail(te, TE_ERR_INVALID, "%s: x is NULL; give this rank's part of the batch", who);
    c = te__context_of(batch->cp_group, batch->cp_p2p_group, TE_CP_A2A_P2P);
    ranks = te__context_size(&c);
    dim = x ? te__batch_dim(x, batch, who) : -1;
    te__frame_begin(te);
    all = dim < 0 ? NULL : te_tensor_contiguous(te_tensor_detach(x));
    all = te__batch_gathered(c.heads, all);
    all = te__batch_gathered(c.ring, all);
    if (all && ranks > 1) {
        memcpy(shape, x->shape, sizeof(shape));
        shape[dim] *= ranks;
        map = te__batch_map(x, batch, dim, ranks, ranks);
        all = te__context_moved(all, map, x->ndim, shape);
    } else
        all = te__batch_copy(all);
    return te__frame_return(te, all);
}

TE_API te_tensor *te_thd_get_partitioned_indices(te_tensor *cu_seqlens, int64_t total_tokens, int cp_size,
                                                 int cp_rank) {
    const char *const who = "te_thd_get_partitioned_indices";
    te__context_order order = te__context_order_of(cp_size, 1, false);
    te_tensor *map;
    te_ctx *te;
    if (!cu_seqlens) return NULL;
    te = cu_seqlens->te;
    if (cp_size < 1 || cp_rank < 0 || cp_rank >= cp_size || total_tokens < 0 || total_tokens % (2 * (int64_t)cp_size))
        return te__no_tensor(
            te, TE_ERR_INVALID,
            "%s: rank %d of %d, and %lld tokens; ranks are 0 to cp_size - 1, and 2 * cp_size divides the tokens", who,
            cp_rank, cp_size, (long long)total_tokens);
    te__frame_begin(te);
    map = te__context_map(te, &order, total_tokens, 1, cu_seqlens);
    return te__frame_return(
        te, te__batch_copy(te_tensor_narrow(map, 0, total_tokens / cp_size * cp_rank, total_tokens / cp_size)));
}

/* ---- padding ---- */

/* Returns cu_seqlens as *n + 1 numbers in host memory; the caller frees them. *n becomes the number of sequences.
 * Checks that the sequences have at most `tokens` tokens in total. NULL after an error. */
static int32_t *te__batch_starts(te_tensor *cu, int64_t tokens, int64_t factor, const char *who, int64_t *n) {
    te_ctx *te = cu->te;
    int32_t *host;
    int64_t b;
    size_t bytes;
    char text[TE__SHAPE_TEXT];
    if (te__need_memory(cu, who) != TE_OK) return NULL;
    *n = te__numel(cu) - 1;
    if (cu->dtype != TE_I32 || cu->ndim != 1 || *n < 0) {
        te__fail(te, TE_ERR_SHAPE, "%s: cu_seqlens is %s %s; i32 [b + 1] is needed", who, te_dtype_name(cu->dtype),
                 te__shape_text(cu, text));
        return NULL;
    }
    if (factor < 1 || factor > INT32_MAX) {
        te__fail(te, TE_ERR_INVALID, "%s: divisibility_factor is %lld; 1 to 2^31 - 1 are possible: 2 * cp_size", who,
                 (long long)factor);
        return NULL;
    }
    bytes = (size_t)(*n + 1) * sizeof(int32_t);
    host = (int32_t *)te__alloc(te, bytes);
    if (host && te_tensor_to_host(cu, host) != TE_OK) {
        te__free(te, host);
        return NULL;
    }
    for (b = 0; host && b <= *n; b++)
        if (host[b] < (b ? host[b - 1] : 0) || host[b] > tokens) {
            te__fail(
                te, TE_ERR_INVALID,
                "%s: cu_seqlens[%lld] is %d, behind %d and of %lld tokens; starts do not descend, nor pass the end",
                who, (long long)b, host[b], b ? host[b - 1] : 0, (long long)tokens);
            te__free(te, host);
            return NULL;
        }
    return host;
}
static int64_t te__batch_padded(const int32_t *starts, int64_t b, int64_t factor) {
    return te__div_up(starts[b + 1] - starts[b], factor) * factor;
}

/* Stores a number into an array of i32 or i64 in host memory. */
static void te__batch_put(void *host, te_dtype dtype, int64_t i, int64_t value) {
    if (dtype == TE_I64) ((int64_t *)host)[i] = value;
    else ((int32_t *)host)[i] = (int32_t)value;
}

/* Allocates host memory for n numbers of `dtype` and sets *bytes to its size. NULL after an error. */
static void *te__batch_host(te_ctx *te, int64_t n, te_dtype dtype, size_t *bytes) {
    const uint64_t wanted = (uint64_t)n * (uint64_t)te__dtype_size(dtype) + 1;
    *bytes = (size_t)wanted;
    if (wanted <= (uint64_t)PTRDIFF_MAX) return te__alloc(te, *bytes);
    te__fail(te, TE_ERR_OUT_OF_MEMORY,
             "%lld numbers of %s are more than addresses of %d bits reach; give fewer sequences at a time",
             (long long)n, te_dtype_name(dtype), (int)(8 * sizeof(void *)));
    return NULL;
}
/* Checks that the number of tokens, with padding, fits into 32 bits, as the starts of sequences must. */
static te_result te__batch_fits(te_ctx *te, int64_t total, int64_t factor, const char *who) {
    if (total <= INT32_MAX) return TE_OK;
    return te__fail(
        te, TE_ERR_UNSUPPORTED,
        "%s: %lld tokens with their padding, by a divisibility_factor of %lld; at most 2^31 - 1 are possible", who,
        (long long)total, (long long)factor);
}

/* Returns a tensor [total] with the sequences of x, each padded at its end with `pad` to a multiple of `factor`. */
static te_tensor *te__batch_pad(te_tensor *x, const int32_t *starts, int64_t n, int64_t factor, int64_t total,
                                int64_t pad) {
    te_ctx *te = x->te;
    const size_t each = (size_t)te__dtype_size(x->dtype);
    size_t from_bytes, to_bytes;
    char *from = (char *)te__batch_host(te, te__numel(x), x->dtype, &from_bytes),
         *to = (char *)te__batch_host(te, total, x->dtype, &to_bytes);
    te_tensor *y = NULL;
    int64_t b, i, at = 0;
    if (from && to && te_tensor_to_host(x, from) == TE_OK) {
        for (b = 0; b < n; b++) {
            const int64_t length = starts[b + 1] - starts[b], padded = te__batch_padded(starts, b, factor);
            memcpy(to + (size_t)at * each, from + (size_t)starts[b] * each, (size_t)length * each);
            for (i = length; i < padded; i++) te__batch_put(to, x->dtype, at + i, pad);
            at += padded;
        }
        y = te_tensor_from_host(te, x->dtype, 1, &total, to);
    }
    te__free(te, from);
    te__free(te, to);
    return y;
}

static bool te__batch_ids_ok(const te_tensor *x, const char *name, int64_t tokens, const char *who) {
    char text[TE__SHAPE_TEXT];
    if (te__need_memory(x, who) != TE_OK) return false;
    if (te__is_index(x->dtype) && te__numel(x) == tokens && (x->ndim == 1 || (x->ndim == 2 && x->shape[0] == 1)))
        return true;
    return te__not_ok(x->te, te__is_index(x->dtype) ? TE_ERR_SHAPE : TE_ERR_DTYPE,
                      "%s: %s is %s %s; i32 or i64 [%lld] or [1, %lld] is needed", who, name, te_dtype_name(x->dtype),
                      te__shape_text(x, text), (long long)tokens, (long long)tokens);
}

TE_API te_result te_pad_thd_sequences_for_cp(te_tensor *input_ids, te_tensor *labels, te_tensor *cu_seqlens,
                                             int64_t divisibility_factor, int64_t padding_token_id,
                                             int64_t padding_label_id, te_padded_sequences *out) {
    const char *const who = "te_pad_thd_sequences_for_cp";
    te_tensor *made[3] = {NULL, NULL, NULL};
    int32_t *starts, *padded;
    int64_t n, b, total = 0;
    size_t bytes;
    bool complete;
    te_ctx *te;
    if (!input_ids || !cu_seqlens) return TE_ERR_STATE;
    te = input_ids->te;
    if (!out) return te__fail(te, TE_ERR_INVALID, "%s: out is NULL; it gets the padded tensors", who);
    memset(out, 0, sizeof(*out));
    if (!te__same_ctx(cu_seqlens, te, who) || (labels && !te__same_ctx(labels, te, who))) return te_error_code(te);
    if (!te__batch_ids_ok(input_ids, "input_ids", te__numel(input_ids), who) ||
        (labels && !te__batch_ids_ok(labels, "labels", te__numel(input_ids), who)))
        return te_error_code(te);
    starts = te__batch_starts(cu_seqlens, te__numel(input_ids), divisibility_factor, who, &n);
    if (!starts) return te_error_code(te);
    bytes = (size_t)(n + 1) * sizeof(int32_t);
    padded = (int32_t *)te__alloc(te, bytes);
    for (b = 0; padded && b <= n; b++) {
        padded[b] = (int32_t)total;
        if (b < n) total += te__batch_padded(starts, b, divisibility_factor);
        if (total > INT32_MAX) break;
    }
    te__frame_begin(te);
    if (padded && te__batch_fits(te, total, divisibility_factor, who) == TE_OK) {
        made[0] = te_tensor_from_host(te, TE_I32, 1, cu_seqlens->shape, padded);
        made[1] = te__batch_pad(input_ids, starts, n, divisibility_factor, total, padding_token_id);
        if (labels) made[2] = te__batch_pad(labels, starts, n, divisibility_factor, total, padding_label_id);
    }
    complete = made[0] && made[1] && (made[2] || !labels);
    te__frame_end(te, made, complete ? 3 : 0);
    te__free(te, padded);
    te__free(te, starts);
    if (!complete) return te_error_code(te);
    out->cu_seqlens_padded = made[0];
    out->input_ids = made[1];
    out->labels = made[2];
    return TE_OK;
}

TE_API te_tensor *te_generate_positional_ids_for_cp(te_tensor *cu_seqlens, int64_t divisibility_factor,
                                                    te_dtype dtype) {
    const char *const who = "te_generate_positional_ids_for_cp";
    int64_t n, b, i, at = 0, total = 0;
    int32_t *starts;
    void *host;
    te_tensor *y = NULL;
    te_ctx *te;
    size_t bytes = 0;
    if (!cu_seqlens) return NULL;
    te = cu_seqlens->te;
    if (!dtype) dtype = TE_I64;
    if (!te__is_index(dtype))
        return te__no_tensor(te, TE_ERR_DTYPE, "%s: dtype is %s; i32 and i64 are possible", who, te_dtype_name(dtype));
    starts = te__batch_starts(cu_seqlens, INT32_MAX, divisibility_factor, who, &n);
    if (!starts) return NULL;
    for (b = 0; b < n; b++) total += te__batch_padded(starts, b, divisibility_factor);
    host =
        te__batch_fits(te, total, divisibility_factor, who) == TE_OK ? te__batch_host(te, total, dtype, &bytes) : NULL;
    for (b = 0; host && b < n; b++)
        for (i = te__batch_padded(starts, b, divisibility_factor); i > 0; i--, at++)
            te__batch_put(host, dtype, at, te__batch_padded(starts, b, divisibility_factor) - i);
    if (host) y = te_tensor_from_host(te, dtype, 1, &total, host);
    te__free(te, host);
    te__free(te, starts);
    return y;
}
