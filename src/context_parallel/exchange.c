/* context_parallel/exchange.c: divides the tokens of a sequence among ranks, and exchanges heads, keys and values
 * (TransformerEngine: context parallelism). This file must not depend on attention.
 *
 * A sequence has 2 n chunks of equal length. Rank r of n has the chunks r and 2 n - 1 - r, in this order. So all ranks
 * have equal work under a causal mask. There are two exchanges:
 *
 *     heads    The ranks exchange heads for tokens (a2a). Each rank then has all tokens of its `heads` group, but
 *              only some of the heads.
 *     ring     Each rank passes keys and values to the next rank (p2p). With all_gather, each rank gathers all keys
 *              and values at once.
 *
 * With both exchanges, heads are exchanged first. Each rank then has all tokens of its `heads` group. These tokens are
 * the chunks r and 2 n - 1 - r, where n is the size of `ring` and r is the rank in `ring`.
 *
 * A rank that fails still takes part in every exchange, without a tensor, so that no other rank waits for it. */

typedef struct te__context {
    te_group *heads, *ring; /* borrowed. A group that is NULL or has one rank exchanges nothing */
    bool gathers;           /* true: each rank gathers all keys and values at once; false: it passes them to the next
                             * rank */
    bool met;               /* the ranks have compared their calls */
} te__context;

static te__context te__context_of(te_group *cp, te_group *p2p, te_cp_comm comm) {
    te__context c = TE_ZERO;
    if (comm == TE_CP_A2A || comm == TE_CP_A2A_P2P) c.heads = cp;
    else c.ring = cp;
    if (comm == TE_CP_A2A_P2P) c.ring = p2p;
    c.gathers = comm == TE_CP_ALL_GATHER;
    return c;
}
static int te__context_size(const te__context *c) { return te__group_size(c->heads) * te__group_size(c->ring); }
static int te__context_rank(const te__context *c) {
    return te__group_size(c->heads) * te__group_rank(c->ring) + te__group_rank(c->heads);
}

/* ---- tokens in the order of sequences ---- */

/* A permutation between rank order (all rows of rank 0, then of rank 1 ...) and sequence order (all rows of sequence 0,
 * then of sequence 1 ...). */
typedef struct te__context_order {
    int ranks, share; /* The `ranks` ranks together have 1 / `share` of each sequence, so the offsets in `cu` are
                       * divided by `share` */
    bool inverse;     /* true: from the order of the sequences to the order of the ranks; false: the reverse */
    te_tensor *map;   /* the last result of te__context_map, kept for the next call with the same `cu` */
    const te_tensor *cu;
} te__context_order;

static te__context_order te__context_order_of(int ranks, int share, bool inverse) {
    te__context_order order = TE_ZERO;
    order.ranks = ranks;
    order.share = share;
    order.inverse = inverse;
    return order;
}
/* Returns a permutation as i32 [rows]: entry i is the new index of row i. `rows` counts the rows of all ranks. `cu` has
 * the sequences' first rows. If `cu` is NULL, all sequences have equal length. NULL after an error. */
static te_tensor *te__context_map(te_ctx *te, te__context_order *order, int64_t rows, int64_t sequences,
                                  te_tensor *cu) {
    te_op_context_rows_args a = TE_ZERO;
    if (order->map && order->cu == cu && te__numel(order->map) == rows) return order->map;
    a.cu_seqlens = cu;
    a.sequences = sequences;
    a.map = te__empty_1d(te, TE_I32, rows);
    a.ranks = order->ranks;
    a.share = order->share;
    a.inverse = order->inverse;
    order->cu = cu;
    return order->map = a.map ? te__checked(a.map, te_op_context_rows(te, &a)) : NULL;
}
/* Calls te__context_map for a tensor x of layout `format`, which has 1 / `part` of the rows of all ranks. */
static te_tensor *te__context_map_of(te__context_order *order, const te_tensor *x, te_qkv_format format, int part,
                                     te_tensor *cu) {
    const int64_t sequences = format == TE_BSHD ? x->shape[0] : 1,
                  rows = sequences * x->shape[format == TE_BSHD ? 1 : 0];
    return te__context_map(x->te, order, rows * part, sequences, cu);
}
/* Permutes the rows of x: row i becomes row map[i]. The result has the given shape. */
static te_tensor *te__context_moved(te_tensor *x, te_tensor *map, int ndim, const int64_t *shape) {
    te_op_moe_permute_args a = TE_ZERO;
    int64_t rows, cols;
    te_tensor *y;
    if (!x || !map) return NULL;
    y = te_tensor_empty(x->te, x->dtype, ndim, shape);
    rows = te__numel(map);
    cols = rows ? te__numel(x) / rows : 0;
    if (!y || te__numel(x) == 0) return y;
    a.x = te__alias_2d(x, 0, x->dtype, rows, cols);
    a.y = te__alias_2d(y, 0, y->dtype, rows, cols);
    a.row_id_map = map;
    a.topk = 1;
    return te__checked(y, a.x && a.y ? te_op_moe_permute(x->te, &a) : te_error_code(x->te));
}

/* ---- heads for tokens ---- */

/* Does an all-to-all of each in[i] into out[i]. If `result`, this rank's result so far, is a failure, the other ranks
 * fail too. */
static te_result te__context_exchange(te_group *group, te_tensor *const *in, te_tensor *const *out, int n,
                                      te_result result) {
    int i;
    for (i = 0; i < n && result == TE_OK; i++)
        if (!in[i] || !out[i]) result = te_error_code(group->te);
    if (result != TE_OK) return te__refuse(group, TE__ALL_TO_ALL, result);
    for (i = 0; i < n && result == TE_OK; i++) result = te_all_to_all(group, in[i], NULL, out[i], NULL);
    return result;
}
/* Views x as [a, b, n], and returns it transposed to [b, a, n] and contiguous. */
static te_tensor *te__context_turned(te_tensor *x, int64_t a, int64_t b, int64_t numel) {
    int64_t shape[3] = {a, b, numel / te__max(1, a * b)};
    return te_tensor_contiguous(te_tensor_transpose(te_tensor_view(x, 3, shape), 0, 1));
}
/* Exchanges heads for tokens: x[i] [tokens of this rank, H, d] becomes [tokens of c->heads, H / ranks, d]. If `back` is
 * true, does the reverse. cu[i] has each sequence's first token, counting padding. */
static te_result te__context_heads(const te__context *c, te_tensor **x, te_tensor *const *cu, int n,
                                   te_qkv_format format, bool back, te_result result) {
    const int ranks = te__group_size(c->heads), seq = format == TE_BSHD ? 1 : 0;
    te__context_order order = te__context_order_of(ranks, te__group_size(c->ring), back);
    te_tensor *packed[3] = {NULL, NULL, NULL}, *got[3] = {NULL, NULL, NULL};
    int64_t shape[TE_MAX_DIMS];
    int i;
    if (ranks < 2) return result;
    for (i = 0; i < n && result == TE_OK; i++) {
        const int64_t numel = te__numel(x[i]), parts[2] = {ranks, numel / ranks},
                      one = x[i]->shape[x[i]->ndim - 2] * x[i]->shape[x[i]->ndim - 1];
        packed[i] = back ? te__context_moved(x[i], te__context_map_of(&order, x[i], format, 1, cu[i]), 2, parts)
                         : te__context_turned(x[i], numel / te__max(1, one), ranks, numel);
        got[i] = packed[i] ? te__empty_like(packed[i], packed[i]->dtype) : NULL;
    }
    result = te__context_exchange(c->heads, packed, got, n, result);
    for (i = 0; i < n && result == TE_OK; i++) {
        const int64_t numel = te__numel(x[i]), one = x[i]->shape[x[i]->ndim - 2] * x[i]->shape[x[i]->ndim - 1];
        const int ndim = x[i]->ndim;
        memcpy(shape, x[i]->shape, sizeof(shape));
        if (back) {
            shape[seq] /= ranks;
            shape[ndim - 2] *= ranks;
            x[i] =
                te_tensor_view(te__context_turned(got[i], ranks, numel / te__max(1, ranks * one), numel), ndim, shape);
        } else {
            shape[seq] *= ranks;
            shape[ndim - 2] /= ranks;
            x[i] = te__context_moved(got[i], te__context_map_of(&order, x[i], format, ranks, cu[i]), ndim, shape);
        }
        if (!x[i]) result = te_error_code(c->heads->te);
    }
    return result;
}

/* ---- the ring ---- */

/* Begins to send the n tensors `out` to the next rank, and to receive `in` from the previous one, beside what the
 * context queues until the flight lands (dist/flight.c). The caller keeps the tensors until then. */
static te_result te__context_pass(te__flight *f, te_group *group, te_tensor *const *out, te_tensor *const *in, int n,
                                  te_result result) {
    const int size = te__group_size(group), rank = te__group_rank(group);
    return te__flight_pass(f, group, out, (rank + 1) % size, in, (rank + size - 1) % size, n, result);
}
/* Returns a failure on all ranks if `result` is a failure on any rank. Without group->refuse, ranks cannot tell each
 * other of failures; in this case returns `result`. A group that passes all tensors at once (NCCL) ends for all ranks
 * when one refuses, so that nobody has to wait for the others here. */
static te_result te__context_agree(te_group *group, te_result result) {
    if (te__is_alone(group) || !group->refuse) return result;
    if (group->pass) return result == TE_OK ? result : te__refuse(group, TE__PASS, result);
    return result == TE_OK ? te_barrier(group) : te__refuse(group, TE__BARRIER, result);
}
