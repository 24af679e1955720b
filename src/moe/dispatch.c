/* moe/dispatch.c: two dispatchers, which send tokens to the ranks of their experts and the results back. One gathers
 * all tokens, the other exchanges rows. This file must not depend on what experts compute.
 *
 * The second one waits: how many rows travel between two ranks is known to the device, and the host must know it to
 * queue their exchange. The first one needs to know the number of tokens of each rank alone. If that has a bound
 * (te_set_max_dispatch_tokens), neither waits: all gather. An exchange that had room for every possible choice would
 * send as many bytes, since all tokens of a rank may choose one rank's experts. */

/* State of one dispatch. Each token is copied for each of its experts. `map` has the row of each copy after sorting by
 * expert. */
typedef struct te__dispatch {
    te_group *group;
    int ranks, local;    /* ranks that share the experts; experts on each rank */
    te_tensor *map;      /* row_id_map of te_op_moe_permute: an index map, or a mask map if topk is 0 */
    int64_t topk, tokens; /* experts chosen for each token; tokens of this rank */
    int64_t chosen;      /* experts chosen for each token, with a mask map as well */
    int64_t rows;        /* with a mask map: tokens that are sorted, of all ranks */
    int64_t copies;      /* upper bound of the number of copies of tokens (one for each chosen expert); only with a mask
                          * map */
    te_dtype dtype;      /* format of the tokens */
    te_tensor *weights;  /* router weights, f32; the shape is [tokens to sort, topk] with an index map, and
                          * [tokens, experts] with a mask map */
    int64_t bound;       /* no rank has more tokens; 0: that is not known, and the host waits */
    int64_t longest;     /* `bound`, or the largest number of tokens of any rank; each rank has this many rows in the
                          * gathered tensor */
    int64_t *send, *recv; /* for the exchange: numbers of rows sent to each rank and received from each rank */
    int64_t *chunks;     /* [ranks, local]: number of rows received from each rank for each local expert */
    te_tensor *chunk_sizes, *back_sizes, *back_order; /* All three are on the device. A chunk has the rows from one
                                                       * rank for one local expert.
                                                       * chunk_sizes: sizes of the chunks, ordered by rank.
                                                       * back_sizes: the same sizes, ordered by expert.
                                                       * back_order: permutation that restores the order by rank */
    int64_t *host;       /* one allocation for `send`, `recv`, `chunks` and rows.host */
    size_t bytes;        /* size of `host` */
} te__dispatch;

static int64_t te__count_all(const int64_t *x, int n) {
    int64_t sum = 0;
    int i;
    for (i = 0; i < n; i++) sum += x[i];
    return sum;
}

/* ---- ranks gather all tokens ---- */

/* The tape nodes gather_tokens and sum_tokens have a te__dispatch as their state. Their backward functions read only
 * its fields `group`, `tokens` and `longest`. */

/* Appends rows of `fill` to x [tokens, N]. Returns the result [longest, N]. Does not record on the tape. */
static te_tensor *te__padded_tokens(te_tensor *x, int64_t longest, double fill) {
    te_tensor *y = x ? te__empty_2d(x->te, x->dtype, longest, te__cols(x)) : NULL;
    return y && te_tensor_fill(y, fill) == TE_OK && te_tensor_copy(te__rows_of(y, 0, te__rows(x)), x) == TE_OK ? y
                                                                                                               : NULL;
}
/* Sums x [ranks * d->longest, N] over the ranks and returns the rows of this rank's tokens. If this rank has failed, x
 * is NULL, and all ranks get an error. */
static te_tensor *te__summed_tokens(const te__dispatch *d, te_tensor *x) {
    te_tensor *y = x ? te__empty_2d(x->te, x->dtype, d->longest, te__cols(x)) : NULL;
    if (!y) {
        te__refuse(d->group, TE__REDUCE_SCATTER, te_error_code(d->group->te));
        return NULL;
    }
    return te__reduce_scatter(d->group, x, y) == TE_OK ? te__rows_of(y, 0, d->tokens) : NULL;
}
static te_result te__gather_tokens_backward(te_ctx *te, const void *state, te_tensor *const *saved,
                                            te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)saved, (void)needs;
    dx[0] = te__summed_tokens((const te__dispatch *)state, te_tensor_contiguous(dy[0]));
    return dx[0] ? TE_OK : te_error_code(te);
}
/* Gathers the tokens x [T, N] of all ranks into [ranks * d->longest, N]. Row r * d->longest is the first row of rank r.
 * After an error all ranks get NULL. */
static te_tensor *te__gather_tokens(const te__dispatch *d, te_tensor *x) {
    te_tensor *y = te__gather(d->group, te__padded_tokens(x, d->longest, 0.0));
    if (!y) return NULL;
    y = te__record("gather_tokens", y, te__gather_tokens_backward, d, sizeof(*d), &x, 1, NULL, 0);
    if (!y) te__refuse(d->group, TE__ALL_GATHER, te_error_code(d->group->te)); /* others wait in the next gather */
    return y;
}
static te_result te__sum_tokens_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                         te_tensor **dx, const bool *needs) {
    const te__dispatch *d = (const te__dispatch *)state;
    (void)saved, (void)needs;
    dx[0] = te_tensor_cast(te__gather(d->group, te__padded_tokens(te_tensor_contiguous(dy[0]), d->longest, 0.0)),
                           TE_F32);
    return dx[0] ? TE_OK : te_error_code(te);
}
/* Sums y [ranks * d->longest, N], f32, over the ranks and returns the rows of this rank's tokens, in `dtype`: the
 * format in which their gradients travel. If this rank has failed, y is NULL, and all ranks get an error. */
static te_tensor *te__sum_tokens(const te__dispatch *d, te_tensor *y, te_dtype dtype) {
    te_tensor *own = te_tensor_cast(te__summed_tokens(d, y), dtype);
    return te__record("sum_tokens", own, te__sum_tokens_backward, d, sizeof(*d), &y, 1, NULL, 0);
}
/* Sets d->longest. Waits for the device, unless there is a bound. */
static te_result te__longest_tokens(te__dispatch *d, te_ctx *te) {
    int64_t one = 1;
    te_tensor *x;
    te_result result;
    d->longest = d->bound;
    if (d->bound) return TE_OK;
    x = te_tensor_from_host(te, TE_I64, 1, &one, &d->tokens);
    result = te__all_reduce(d->group, x, TE_REDUCE_MAX);
    if (result != TE_OK) return result;
    result = te_tensor_to_host(x, &d->longest);
    return result == TE_OK ? result : te__refuse(d->group, TE__ALL_GATHER, result);
}

/* ---- sorting by expert ---- */

/* Sorts copies of x's tokens by expert id and returns the first `rows` of them; *probs receives their router weights.
 * Sets d->map. */
static te_tensor *te__sort_copies(te__dispatch *d, te_tensor *x, te_tensor *ids, int64_t rows, te_tensor **probs) {
    d->map = te__moe_index_map(ids, rows);
    return d->map ? te__permute("dispatch", x, d->map, d->topk, NULL, d->weights, probs, rows) : NULL;
}
/* Returns the expert id of each sorted row, i32 [rows]. `ids` has the unsorted expert ids, [T, K]. */
static te_tensor *te__sorted_ids(const te__dispatch *d, te_tensor *ids, int64_t rows) {
    te_ctx *te = ids->te;
    te_op_moe_permute_args args = TE_ZERO;
    /* moved as f32, which holds expert ids exactly */
    te_tensor *floats = te__copied(ids, TE_F32), *sorted = te__empty_1d(te, TE_F32, rows);
    args.x = te__empty_2d(te, TE_F32, te__rows(ids), 0);
    args.y = te__empty_2d(te, TE_F32, rows, 0);
    args.row_id_map = d->map;
    args.topk = d->topk;
    args.probs = floats;
    args.permuted_probs = sorted;
    return floats && sorted && args.x && args.y && te_op_moe_permute(te, &args) == TE_OK ? te__copied(sorted, TE_I32)
                                                                                         : NULL;
}
/* Sums the copies of each token in f32 and rounds once. If `weighted` is true, each copy is first multiplied by its
 * router weight. */
static te_tensor *te__sum_copies(const te__dispatch *d, te_tensor *rows, bool weighted) {
    te_moe_unpermute_desc desc = TE_ZERO;
    te__unpermute_state state = TE_ZERO;
    te_op_moe_unpermute_args args = TE_ZERO;
    te_tensor *saved[4] = {d->map, NULL, NULL, NULL};
    if (!rows) return NULL;
    desc.merging_probs = d->weights;
    desc.map_type = d->topk ? TE_MAP_INDEX : TE_MAP_MASK;
    if (weighted) return te_moe_unpermute(rows, d->map, &desc);
    state.topk = args.topk = d->topk;
    state.rows = te__rows(rows);
    state.dtype = rows->dtype;
    args.x = rows;
    args.row_id_map = d->map;
    args.y = te__empty_2d(rows->te, rows->dtype, d->topk ? te__numel(d->map) / d->topk : d->rows, te__cols(rows));
    if (!args.y) return NULL;
    return te__record("combine", te__checked(args.y, te_op_moe_unpermute(rows->te, &args)), te__unpermute_backward,
                      &state, sizeof(state), &rows, 1, saved, 4);
}

/* Allocates the arrays r->host, d->send, d->recv and d->chunks in host memory, as one block. */
static te_result te__dispatch_lists(te_ctx *te, te__dispatch *d, te__expert_rows *r) {
    int64_t all = (int64_t)d->ranks * d->local;
    d->bytes = (size_t)(d->local + 2 * d->ranks + all) * sizeof(int64_t);
    d->host = (int64_t *)te__alloc_zero(te, d->bytes);
    if (!d->host) return TE_ERR_OUT_OF_MEMORY;
    r->host = d->host;
    d->send = d->host + d->local;
    d->recv = d->send + d->ranks;
    d->chunks = d->recv + d->ranks;
    return TE_OK;
}

/* Returns the expert of each row, i32 [sum of sizes]. `sizes` has the number of rows of each of the n experts, on the
 * host. */
static te_tensor *te__ids_of_sizes(te_ctx *te, const int64_t *sizes, int n) {
    int64_t rows = te__count_all(sizes, n), at = 0, i;
    size_t bytes = (size_t)(rows + 1) * sizeof(int32_t);
    int32_t *host = (int32_t *)te__alloc(te, bytes);
    te_tensor *y;
    int e;
    if (!host) return NULL;
    for (e = 0; e < n; e++)
        for (i = 0; i < sizes[e]; i++) host[at++] = e;
    y = te_tensor_from_host(te, TE_I32, 1, &rows, host);
    te__free(te, host);
    return y;
}

/* Returns the columns of this rank's experts in x [T, experts of all ranks]. */
static te_tensor *te__own_columns(const te__dispatch *d, te_tensor *x) {
    return te_tensor_contiguous(te_tensor_narrow(x, 1, (int64_t)te__group_rank(d->group) * d->local, d->local));
}
/* Gathers tokens, weights and choices of all ranks. Keeps the columns of this rank's experts. */
static te_result te__gather_map(te__dispatch *d, te_tensor **x, te_tensor **choice) {
    te_result result = te__longest_tokens(d, d->group->te);
    if (result != TE_OK) return result;
    *x = te__gather_tokens(d, *x);
    d->weights = *x ? te__gather_tokens(d, d->weights) : NULL;
    *choice = d->weights ? te__gather(d->group, te__padded_tokens(*choice, d->longest, 0.0)) : NULL;
    if (!*choice) return te_error_code(d->group->te);
    d->rows = d->ranks * d->longest;
    d->copies = d->rows * te__min(d->chosen, d->local);
    d->weights = te__own_columns(d, d->weights);
    *choice = te__own_columns(d, *choice);
    return d->weights && *choice ? TE_OK : te__refuse(d->group, TE__ALL_REDUCE, te_error_code(d->group->te));
}
/* Fills *r with the rows of this rank's experts. `choice` is the routing map u8 [tokens, experts of all ranks]. Fills
 * r->probs only if `weighted` is true. */
static te_result te__mapped_rows(te__dispatch *d, te_tensor *x, te_tensor *choice, bool weighted, te__expert_rows *r) {
    te_result result = d->ranks > 1 ? te__gather_map(d, &x, &choice) : TE_OK;
    if (result != TE_OK) return result;
    if (d->copies > INT32_MAX) {
        result = te__fail(
            x->te, TE_ERR_SHAPE,
            "experts: %lld copies of %lld tokens, one for each expert of each; at most 2^31 are possible",
            (long long)d->copies, (long long)d->rows);
        return d->ranks > 1 ? te__refuse(d->group, TE__ALL_REDUCE, result) : result;
    }
    r->sizes = te__empty_1d(x->te, TE_I64, d->local);
    d->map = r->sizes ? te__moe_mask_map(choice, r->sizes) : NULL;
    r->x = d->map ? te__permute("dispatch", x, d->map, 0, NULL, weighted ? d->weights : NULL, &r->probs, d->copies)
                  : NULL;
    if (r->x) return TE_OK;
    return d->ranks > 1 ? te__refuse(d->group, TE__ALL_REDUCE, te_error_code(x->te)) : te_error_code(x->te);
}
/* Fills *r from the tokens of all ranks, for the dispatcher "torch". If `on_host` is true, waits for the device and
 * fills r->host. Otherwise r->x may have unused rows at the end. */
static te_result te__gathered_rows(te__dispatch *d, te_tensor *x, te_tensor *indices, te_tensor *padding, bool on_host,
                                   bool ids, te__expert_rows *r) {
    te_ctx *te = x->te;
    te_tensor *local, *sizes;
    int64_t rows;
    te_result result = te__dispatch_lists(te, d, r);
    /* padding tokens have id -1 from here on */
    local = result == TE_OK ? te__local_ids(indices, padding, 0, (int64_t)d->ranks * d->local, TE_I64, &sizes) : NULL;
    if (d->ranks > 1) {
        if (!local) return te__refuse(d->group, TE__ALL_REDUCE, te_error_code(te));
        result = te__longest_tokens(d, te);
        if (result != TE_OK) return result;
        x = te__gather_tokens(d, x);
        d->weights = x ? te__gather_tokens(d, d->weights) : NULL;
        local = d->weights ? te__gather(d->group, te__padded_tokens(local, d->longest, -1.0)) : NULL;
        if (!local) return te_error_code(te);
        local = te__local_ids(local, NULL, (int64_t)te__group_rank(d->group) * d->local, d->local, TE_I64, &sizes);
    }
    if (!on_host) r->host = NULL;
    if (local && (!on_host || te_tensor_to_host(sizes, r->host) == TE_OK)) {
        r->sizes = sizes;
        rows = on_host ? te__count_all(r->host, d->local) : te__numel(local);
        r->x = te__sort_copies(d, x, local, rows, &r->probs);
        if (r->x && ids) r->ids = on_host ? te__ids_of_sizes(te, r->host, d->local) : te__sorted_ids(d, local, rows);
    }
    if (r->x && (!ids || r->ids)) return TE_OK;
    return te__refuse(d->group, TE__ALL_REDUCE,
                      te_error_code(te)); /* others wait in the all-reduce */
}
/* Sums the copies of each token in y, the experts' output, into [T, dim]. If this rank has failed, y is NULL; the rank
 * still joins the collective. */
static te_tensor *te__gathered_back(const te__dispatch *d, te_tensor *y, bool weighted) {
    te_dtype dtype = y ? y->dtype : TE_F32;
    if (d->ranks == 1) return te__sum_copies(d, y, weighted);
    return te__sum_tokens(d, te__sum_copies(d, te_tensor_cast(y, TE_F32), weighted), dtype);
}

/* ---- ranks exchange rows ---- */

typedef struct te__exchange_state {
    te_group *group;
    int ranks;
    int64_t cols;
    te_dtype dtype;
    bool probs;
} te__exchange_state; /* followed in memory by int64_t send[ranks], recv[ranks] */
static int64_t *te__exchange_counts(const te__exchange_state *s) {
    return (int64_t *)(void *)((char *)(uintptr_t)s + sizeof(te__exchange_state));
}

/* Sends send[r] rows of x to each rank r and receives recv[r] rows. If this rank has failed, x is NULL, and all ranks
 * get an error. */
static te_tensor *te__exchange_plain(te_group *group, te_tensor *x, te_dtype dtype, int64_t cols, const int64_t *send,
                                     const int64_t *recv) {
    te_tensor *y = x ? te__empty_2d(group->te, dtype, te__count_all(recv, te__group_size(group)), cols) : NULL;
    if (!y) {
        te__refuse(group, TE__ALL_TO_ALL, te_error_code(group->te));
        return NULL;
    }
    return te__checked(y, te__lines_exchanged(group, x, send, y, recv));
}
/* Returns the gradient g as a matrix, or zeros if g is NULL: each rank must take part in each exchange. */
static te_tensor *te__given_or_zeros(te_ctx *te, te_tensor *g, te_dtype dtype, int64_t rows, int64_t cols) {
    g = g ? te_tensor_contiguous(g) : te__zeros_2d(te, dtype, rows, cols);
    return g ? te__alias_2d(g, 0, dtype, rows, cols) : NULL;
}
static te_result te__exchange_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                       te_tensor **dx, const bool *needs) {
    const te__exchange_state *s = (const te__exchange_state *)state;
    const int64_t *send = te__exchange_counts(s), *recv = send + s->ranks;
    int64_t received = te__count_all(recv, s->ranks);
    (void)saved, (void)needs;
    dx[0] = te__exchange_plain(s->group, te__given_or_zeros(te, dy[0], s->dtype, received, s->cols), s->dtype, s->cols,
                               recv, send);
    if (!dx[0] || !s->probs) return dx[0] ? TE_OK : te_error_code(te);
    dx[1] = te__exchange_plain(s->group, te__given_or_zeros(te, dy[1], TE_F32, received, 1), TE_F32, 1, recv, send);
    if (dx[1]) dx[1] = te__alias_1d(dx[1], 0, TE_F32, te__numel(dx[1]));
    return dx[1] ? TE_OK : te_error_code(te);
}
/* Exchanges the rows x [S, N] and, if given, their router weights `probs` f32 [S]. Records this on the tape. *got gets
 * the received weights. */
static te_tensor *te__exchange(const te__dispatch *d, te_tensor *x, te_dtype dtype, int64_t cols, te_tensor *probs,
                               const int64_t *send, const int64_t *recv, te_tensor **got) {
    te_ctx *te = d->group->te;
    const size_t bytes = sizeof(te__exchange_state) + 2 * (size_t)d->ranks * sizeof(int64_t);
    te__exchange_state *s = x ? (te__exchange_state *)te__alloc_zero(te, bytes) : NULL;
    te_tensor *in[2] = {x, probs}, *y = te__exchange_plain(d->group, s ? x : NULL, dtype, cols, send, recv), *p = NULL;
    bool recorded = false, met;
    if (y && probs)
        p = te__exchange_plain(d->group, te__alias_2d(probs, 0, TE_F32, te__numel(probs), 1), TE_F32, 1, send, recv);
    met = p != NULL;
    if (p) p = te__alias_1d(p, 0, TE_F32, te__numel(p));
    if (s && y && (p || !probs)) {
        s->group = d->group;
        s->ranks = d->ranks;
        s->cols = cols;
        s->dtype = dtype;
        s->probs = probs != NULL;
        memcpy(te__exchange_counts(s), send, (size_t)d->ranks * sizeof(int64_t));
        memcpy(te__exchange_counts(s) + d->ranks, recv, (size_t)d->ranks * sizeof(int64_t));
        recorded = te__record_two("exchange", y, p, te__exchange_backward, s, bytes, in, probs ? 2 : 1, NULL, 0);
    }
    /* This rank failed after both exchanges, so it skips the next one. te__refuse informs the ranks that wait there. */
    if (met && !recorded) te__refuse(d->group, TE__ALL_TO_ALL, te_error_code(te));
    te__free(te, s);
    if (got) *got = recorded ? p : NULL;
    return recorded ? y : NULL;
}

/* Sets d->send, d->recv, d->chunks and d->chunk_sizes. `counts` i64 [E] has the number of rows that this rank sends to
 * each expert. Waits for the device. */
static te_result te__exchange_sizes(te__dispatch *d, te_tensor *counts) {
    const int experts = d->ranks * d->local;
    te_tensor *recv = counts ? te__empty_like(counts, TE_I64) : NULL;
    te_result result = recv ? te_tensor_to_host(counts, d->chunks) : te_error_code(d->group->te);
    int r, e;
    if (result != TE_OK) return te__refuse(d->group, TE__ALL_TO_ALL, result);
    for (e = 0; e < experts; e++) d->send[e / d->local] += d->chunks[e];
    result = te__lines_exchanged(d->group, counts, NULL, recv, NULL);
    if (result != TE_OK) return result;
    result = te_tensor_to_host(recv, d->chunks);
    if (result != TE_OK) return te__refuse(d->group, TE__ALL_TO_ALL, result);
    for (r = 0; r < d->ranks; r++) d->recv[r] = te__count_all(d->chunks + r * d->local, d->local);
    d->chunk_sizes = recv;
    return TE_OK;
}
/* Returns the permutation that sorts the received chunks by expert. Sets d->back_order to the inverse, and
 * d->back_sizes to the sorted sizes. Adds the number of rows of local expert e to r->host[e]. Before the sort, chunk
 * k * d->local + e is from rank k for local expert e. */
static te_tensor *te__exchange_order(te__dispatch *d, te__expert_rows *r) {
    te_ctx *te = d->group->te;
    const int experts = d->ranks * d->local;
    int64_t shape = experts, *sizes = (int64_t *)te__alloc(te, 3 * (size_t)experts * sizeof(int64_t)), *there, *back;
    te_tensor *order = NULL;
    int k, e;
    if (!sizes) return NULL;
    there = sizes + experts;
    back = there + experts;
    for (e = 0; e < d->local; e++)
        for (k = 0; k < d->ranks; k++) {
            there[e * d->ranks + k] = k * d->local + e;
            back[k * d->local + e] = e * d->ranks + k;
            sizes[e * d->ranks + k] = d->chunks[k * d->local + e];
            r->host[e] += d->chunks[k * d->local + e];
        }
    d->back_sizes = te_tensor_from_host(te, TE_I64, 1, &shape, sizes);
    d->back_order = te_tensor_from_host(te, TE_I64, 1, &shape, back);
    order = te_tensor_from_host(te, TE_I64, 1, &shape, there);
    te__free(te, sizes);
    return d->back_sizes && d->back_order ? order : NULL;
}
/* Exchanges rows among the ranks, and fills *r with the rows that this rank's experts get. The dispatchers "deepep",
 * "uccl_ep" and "hybridep" use this function. */
static te_result te__exchanged_rows(te__dispatch *d, te_tensor *x, te_tensor *indices, te_tensor *padding, bool ids,
                                    te__expert_rows *r) {
    te_ctx *te = x->te;
    te_tensor *sizes = NULL, *local, *sent, *probs = NULL, *order;
    te_result result = te__dispatch_lists(te, d, r);
    local = result == TE_OK ? te__local_ids(indices, padding, 0, (int64_t)d->ranks * d->local, TE_I64, &sizes) : NULL;
    result = te__exchange_sizes(d, local ? sizes : NULL);
    if (result != TE_OK) return result;
    sent = te__sort_copies(d, x, local, te__count_all(d->send, d->ranks), &probs);
    sent = te__exchange(d, sent, x->dtype, te__cols(x), probs, d->send, d->recv, &probs);
    if (!sent) return te_error_code(te);
    order = te__exchange_order(d, r);
    if (order) r->x = te_moe_sort_chunks_by_index_with_probs(sent, probs, d->chunk_sizes, order, &r->probs);
    r->sizes = r->x ? te__moe_splits(te, NULL, r->host, d->local, 1, NULL) : NULL;
    if (r->sizes && ids) r->ids = te__ids_of_sizes(te, r->host, d->local);
    return r->sizes && (!ids || r->ids) ? TE_OK : te__refuse(d->group, TE__ALL_TO_ALL, te_error_code(te));
}
/* Sums the copies of each token in y, the experts' output, into [T, cols]. If this rank has failed, y is NULL; the rank
 * still joins the exchange. */
static te_tensor *te__exchanged_back(const te__dispatch *d, te_tensor *y, te_dtype dtype, int64_t cols) {
    y = te_moe_sort_chunks_by_index(y, d->back_sizes, d->back_order);
    return te__sum_copies(d, te__exchange(d, y, dtype, cols, NULL, d->recv, d->send, NULL), false);
}
