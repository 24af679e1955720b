/* context_parallel/attention.c: attention over sequences that ranks share. This file must not depend on modules, or on
 * how tensors are quantized: q, k, v and the gradient of o may be FP8 codes with the factors of args.fp8, which travel
 * as codes. All ranks then have the same factors.
 *
 * A piece is the attention of some queries of this rank to some keys. te_op_context_merge merges the pieces' outputs in
 * f32. The backward pass of a piece needs only the merged output and LSE. */

/* ---- pieces ---- */

/* The state of one call of te_attention. It is recorded for te_backward. */
typedef struct te__context_attention {
    te_op_attn_fwd_args args; /* te__context_gradients replaces its tensors by the saved ones */
    te__context context;
    te_dtype dtype; /* of the output and of the gradients */
    bool causal, packed;
    int seq; /* index of the dimension of tokens */
} te__context_attention;

/* One piece of attention: queries of this rank with keys of rank `owner` of the ring, or with gathered keys. */
typedef struct te__context_piece {
    te_context_chunks q, kv;
    int owner, up_to;           /* up_to: if kv is TE_CHUNKS_UP_TO, the piece has this many chunks of keys, from the
                                 * first chunk on; 0: all chunks */
    int64_t first_key, num_keys; /* the range of gathered keys in a sequence (not used if packed) */
    te_attn_mask mask;
    te_window window;
    bool top_left; /* the diagonal of the window begins in the top left corner */
} te__context_piece;

static int te__context_pieces(const te__context_attention *s) {
    if (!s->context.gathers) return te__group_size(s->context.ring);
    return s->causal || s->args.rule.window.on ? 2 : 1;
}

/* Returns piece number `i`. `length` is the length of a sequence of gathered keys; packed sequences do not use it. */
static te__context_piece te__context_piece_of(const te__context_attention *s, int i, int64_t length) {
    const int ranks = te__group_size(s->context.ring), rank = te__group_rank(s->context.ring);
    const te_attn_mask none = s->packed ? TE_MASK_PADDING : TE_MASK_NONE;
    te__context_piece p = TE_ZERO;
    p.mask = none;
    if (!s->context.gathers) {
        p.owner = (rank + ranks - i) % ranks;
        if (s->causal && p.owner == rank) p.mask = s->args.rule.mask;
        if (s->causal && p.owner < rank) p.kv = TE_CHUNKS_FIRST;
        if (s->causal && p.owner > rank) p.q = TE_CHUNKS_SECOND;
        return p;
    }
    p.kv = TE_CHUNKS_UP_TO;
    p.num_keys = length;
    if (te__context_pieces(s) == 1) return p;
    p.q = i ? TE_CHUNKS_SECOND : TE_CHUNKS_FIRST;
    p.up_to = 1 + (i ? 2 * ranks - 1 - rank : rank);
    p.window = s->args.rule.window;
    if (s->packed || !p.window.on) {
        p.mask = s->packed ? TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT : TE_MASK_CAUSAL_BOTTOM_RIGHT;
        p.num_keys = length / (2 * ranks) * p.up_to;
    } else { /* Cuts off the keys outside of the window. The bounds shift, since the diagonal now begins at first_key */
        const int64_t chunk = length / (2 * ranks), at = chunk * (p.up_to - 1);
        p.window.left = te__min(p.window.left, length); /* A window may have any size. The sums below must not
                                                         * overflow */
        p.window.right = te__min(p.window.right, length);
        p.first_key = te__max(0, at - p.window.left);
        p.num_keys = te__min(length, at + chunk + p.window.right) - p.first_key;
        p.window.left += p.first_key - at;
        p.window.right += at - p.first_key;
        p.top_left = true;
    }
    return p;
}

/* Returns the part of x that `chunks` selects along `dim`: the first half, the second half, or all of x. Returns NULL
 * if x is NULL. */
static te_tensor *te__context_part(te_tensor *x, int dim, te_context_chunks chunks) {
    const int64_t half = x ? x->shape[dim] / 2 : 0;
    return !x || (chunks != TE_CHUNKS_FIRST && chunks != TE_CHUNKS_SECOND)
               ? x
               : te_tensor_narrow(x, dim, chunks == TE_CHUNKS_SECOND ? half : 0, half);
}
static te_tensor *te__context_queries(const te__context_attention *s, const te__context_piece *p, te_tensor *x) {
    return s->packed ? x : te__context_part(x, s->seq, p->q);
}
static te_tensor *te__context_keys(const te__context_attention *s, const te__context_piece *p, te_tensor *x) {
    if (s->packed || !x) return x;
    return s->context.gathers ? te_tensor_narrow(x, s->seq, p->first_key, p->num_keys)
                              : te__context_part(x, s->seq, p->kv);
}
/* Returns the LSE [b, H, s] of the piece's queries. */
static te_tensor *te__context_sums(const te__context_attention *s, const te__context_piece *p, te_tensor *lse) {
    return s->packed ? lse : te__context_part(lse, 2, p->q);
}

/* Computes which packed rows of rank `rank` belong to a piece. *cu becomes the running sums of the sequences' lengths
 * in the piece. *padded becomes the sequences' first rows in the piece. */
static te_result te__context_lengths(const te__context_attention *s, int rank, te_context_chunks chunks, te_tensor **cu,
                                     te_tensor **padded) {
    te_op_context_lengths_args a = TE_ZERO;
    te_ctx *te = (*cu)->te;
    a.cu_seqlens = *cu;
    a.cu_seqlens_padded = *padded;
    a.lengths = te__empty_like(*cu, TE_I32);
    a.starts = te__empty_like(*cu, TE_I32);
    a.ranks = te__group_size(s->context.ring);
    a.rank = rank;
    a.chunks = chunks;
    *cu = a.lengths;
    *padded = a.starts;
    return a.lengths && a.starts ? te_op_context_lengths(te, &a) : te_error_code(te);
}
/* Returns an upper bound of the lengths that te__context_lengths computes. `longest` is the length of the longest whole
 * sequence. If there is padding between sequences (`padded` is not NULL), the bound is `longest`. */
static int64_t te__context_longest(const te__context_attention *s, te_context_chunks chunks, int64_t longest,
                                   const te_tensor *padded) {
    const int64_t chunk = te__div_up(longest, 2 * te__group_size(s->context.ring));
    return padded || chunks == TE_CHUNKS_UP_TO ? longest : chunks == TE_CHUNKS_BOTH ? 2 * chunk : chunk;
}

/* `bias` has a column for each key of a whole sequence. Returns a view of `bias`. The rows of the view are the queries
 * of piece p. The columns of the view are the keys of chunk i (0 or 1) of rank p->owner. */
static te_tensor *te__context_columns(const te__context_attention *s, const te__context_piece *p, te_tensor *bias,
                                      int i) {
    const int ranks = te__group_size(s->context.ring);
    const int64_t chunk = bias->shape[3] / (2 * ranks);
    if (bias->shape[2] > 1) bias = te__context_part(bias, 2, p->q);
    return te_tensor_narrow(bias, 3, (i ? 2 * ranks - 1 - p->owner : p->owner) * chunk, chunk);
}
/* Copies the piece's part of `bias` to the tensor `part`. If `back` is true, copies the tensor `part` into `bias`
 * instead. */
static te_result te__context_bias(const te__context_attention *s, const te__context_piece *p, te_tensor *bias,
                                  te_tensor *part, bool back) {
    const int n = p->kv == TE_CHUNKS_FIRST ? 1 : 2;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < n && result == TE_OK; i++) {
        te_tensor *of_whole = te__context_columns(s, p, bias, i),
                  *of_part = te_tensor_narrow(part, 3, i * (part->shape[3] / n), part->shape[3] / n);
        if (!of_whole || !of_part) return te_error_code(bias->te);
        result = back ? te_tensor_copy(of_whole, of_part) : te_tensor_copy(of_part, of_whole);
    }
    return result;
}
static te_tensor *te__context_bias_part(const te__context_attention *s, const te__context_piece *p, te_tensor *bias) {
    te_tensor *like = te__context_columns(s, p, bias, 0), *part;
    int64_t shape[4];
    if (!like) return NULL;
    memcpy(shape, like->shape, sizeof(shape));
    if (p->kv != TE_CHUNKS_FIRST) shape[3] *= 2;
    part = te_tensor_empty(bias->te, bias->dtype, 4, shape);
    return part ? te__checked(part, te__context_bias(s, p, bias, part, false)) : NULL;
}

/* Fills in the args of the forward pass of piece number `i`, except the outputs. k and v are those of rank p->owner, or
 * gathered ones. */
static te_result te__context_open(const te__context_attention *s, const te__context_piece *p, int i, te_tensor *q,
                                  te_tensor *k, te_tensor *v, te_op_attn_fwd_args *a) {
    te_attn_rule *x = &a->rule;
    te_result result = TE_OK;
    te_tensor *padded_q, *padded_kv;
    *a = s->args;
    a->q = te__context_queries(s, p, q);
    a->k = te__context_keys(s, p, k);
    a->v = te__context_keys(s, p, v);
    x->mask = p->mask;
    x->window = p->window;
    a->offset += (uint64_t)i;
    if (p->top_left) x->bottom_right_diagonal = TE_OFF;
    padded_q = x->cu_seqlens_q_padded;
    padded_kv = x->cu_seqlens_kv_padded;
    if (s->packed) {
        x->max_seqlen_q = te__context_longest(s, p->q, x->max_seqlen_q, padded_q);
        x->max_seqlen_kv = te__context_longest(s, p->kv, x->max_seqlen_kv, padded_kv);
        result =
            te__context_lengths(s, te__group_rank(s->context.ring), p->q, &x->cu_seqlens_q, &x->cu_seqlens_q_padded);
        if (result == TE_OK && (p->kv != TE_CHUNKS_UP_TO || p->up_to))
            result = te__context_lengths(s, p->kv == TE_CHUNKS_UP_TO ? p->up_to : p->owner, p->kv, &x->cu_seqlens_kv,
                                         &x->cu_seqlens_kv_padded);
    }
    if (result == TE_OK && x->core_attention_bias) {
        x->core_attention_bias = te__context_bias_part(s, p, x->core_attention_bias);
        if (!x->core_attention_bias) result = te_error_code(q->te);
    }
    return result == TE_OK && a->q && a->k && a->v ? TE_OK : te_error_code(q->te);
}

static te_result te__context_join(te_qkv_format format, te_tensor *x, te_tensor *x_lse, te_tensor *x_max, te_tensor *o,
                                  te_tensor *lse, te_tensor *max_logit) {
    te_op_context_merge_args a = TE_ZERO;
    if (!x || !o) return te_error_code(x ? x->te : o->te);
    a.format = format;
    a.x = x;
    a.x_lse = x_lse;
    a.x_max_logit = x_max;
    a.o = o;
    a.lse = lse;
    a.max_logit = max_logit;
    return te_op_context_merge(x->te, &a);
}

/* Computes piece number `i` and merges it into o (f32), lse and max_logit (unless that is NULL). */
static te_result te__context_attend(const te__context_attention *s, int i, te_tensor *q, te_tensor *k, te_tensor *v,
                                    te_tensor *o, te_tensor *lse, te_tensor *max_logit) {
    te__context_piece p = te__context_piece_of(s, i, k->shape[s->seq]);
    te_op_attn_fwd_args a;
    te_tensor *sums = te__context_sums(s, &p, lse), *out = te__context_queries(s, &p, o);
    te_result result = te__context_open(s, &p, i, q, k, v, &a);
    if (result != TE_OK || !sums || !out) return te_error_code(q->te);
    a.o = te__empty_like(out, s->dtype);
    a.lse = te__empty_like(sums, TE_F32);
    a.max_logit = max_logit ? te__empty_like(max_logit, TE_F32) : NULL;
    if (!a.o || !a.lse || (max_logit && !a.max_logit)) return te_error_code(q->te);
    result = te_op_attn_fwd(q->te, &a);
    return result == TE_OK ? te__context_join(s->args.format, a.o, a.lse, a.max_logit, out, sums, max_logit) : result;
}

/* Tensors of this rank's queries. Each piece's backward pass reads q, o, lse and d_o, and adds to dq and dbias. */
typedef struct te__context_grads {
    te_tensor *q, *o, *lse, *d_o, *dq, *dbias; /* dq is f32; dbias is NULL if it is not wanted */
} te__context_grads;

/* Computes the gradients of piece number `i` and adds them to g->dq, dk and dv, which are f32, and to g->dbias. dk and
 * dv may come with the flight f, which lands behind the product. */
static te_result te__context_differentiate(const te__context_attention *s, int i, const te__context_grads *g,
                                           te_tensor *k, te_tensor *v, te_tensor *dk, te_tensor *dv, te__flight *f) {
    te__context_piece p = te__context_piece_of(s, i, k->shape[s->seq]);
    te_op_attn_fwd_args fwd;
    te_op_attn_bwd_args a = TE_ZERO;
    te_tensor *part[6];
    te_result result = te__context_open(s, &p, i, g->q, k, v, &fwd), landed;
    if (result != TE_OK) return result;
    a.q = fwd.q;
    a.k = fwd.k;
    a.v = fwd.v;
    a.o = te__context_queries(s, &p, g->o);
    a.d_o = te__context_queries(s, &p, g->d_o);
    a.lse = te_tensor_contiguous(te__context_sums(s, &p, g->lse));
    a.dq = part[0] = te__empty_like(fwd.q, s->dtype);
    a.dk = part[1] = te__empty_like(fwd.k, s->dtype);
    a.dv = part[2] = te__empty_like(fwd.v, s->dtype);
    part[3] = te__context_queries(s, &p, g->dq);
    part[4] = te__context_keys(s, &p, dk);
    part[5] = te__context_keys(s, &p, dv);
    a.format = fwd.format;
    a.rule = fwd.rule;
    a.fp8 = fwd.fp8;
    a.fp8.part_of_keys = a.fp8.s_dtype != TE_DTYPE_NONE;
    a.seed = fwd.seed;
    a.offset = fwd.offset;
    a.rng = fwd.rng;
    if (g->dbias) a.dbias = te__empty_like(fwd.rule.core_attention_bias, g->dbias->dtype);
    if (!a.o || !a.d_o || !a.lse || !a.dq || !a.dk || !a.dv || (g->dbias && !a.dbias)) return te_error_code(g->q->te);
    result = te_op_attn_bwd(g->q->te, &a);
    landed = te__flight_land(f);
    if (result == TE_OK) result = landed;
    for (i = 0; i < 3 && result == TE_OK; i++)
        result = te__context_join(s->args.format, part[i], NULL, NULL, part[3 + i], NULL, NULL);
    if (result == TE_OK && g->dbias) result = te__context_bias(s, &p, g->dbias, a.dbias, true);
    return result;
}

/* ---- all pieces ---- */

/* Gathers the keys and values of the ring, with rows in the order of the tokens in the sequences. */
static te_result te__context_gather(const te__context_attention *s, te_tensor *const own[2], te_tensor *whole[2],
                                    te_result result) {
    te_group *ring = s->context.ring;
    te__context_order order = te__context_order_of(te__group_size(ring), 1, false);
    te_tensor *got[2] = {NULL, NULL};
    te_tensor *cu = s->args.rule.cu_seqlens_kv_padded ? s->args.rule.cu_seqlens_kv_padded : s->args.rule.cu_seqlens_kv;
    int64_t shape[TE_MAX_DIMS];
    int i;
    for (i = 0; i < 2 && result == TE_OK; i++) {
        te__whole_shape(ring, own[i], shape);
        got[i] = te_tensor_empty(own[i]->te, own[i]->dtype, own[i]->ndim, shape);
        if (!got[i]) result = te_error_code(own[i]->te);
    }
    if (result != TE_OK) return te__refuse(ring, TE__ALL_GATHER, result);
    for (i = 0; i < 2 && result == TE_OK; i++) result = te__all_gather(ring, own[i], got[i]);
    for (i = 0; i < 2 && result == TE_OK; i++) {
        memcpy(shape, own[i]->shape, sizeof(shape));
        shape[s->seq] *= te__group_size(ring);
        whole[i] = te__context_moved(got[i], te__context_map_of(&order, own[i], s->args.format, order.ranks, cu),
                                     own[i]->ndim, shape);
        if (!whole[i]) result = te_error_code(own[i]->te);
    }
    return result;
}
/* Sums the gradients `whole` over the ranks. dx[i] becomes this rank's part of the sum, in s->dtype. */
static te_result te__context_scatter(const te__context_attention *s, te_tensor *const own[2], te_tensor *const whole[2],
                                     te_tensor *dx[2], te_result result) {
    te_group *ring = s->context.ring;
    te__context_order order = te__context_order_of(te__group_size(ring), 1, true);
    te_tensor *cu = s->args.rule.cu_seqlens_kv_padded ? s->args.rule.cu_seqlens_kv_padded : s->args.rule.cu_seqlens_kv,
              *parts[2] = {NULL, NULL};
    int64_t shape[TE_MAX_DIMS];
    int i;
    for (i = 0; i < 2 && result == TE_OK; i++) {
        te__whole_shape(ring, own[i], shape);
        parts[i] =
            te__context_moved(te_tensor_cast(whole[i], s->dtype),
                              te__context_map_of(&order, own[i], s->args.format, order.ranks, cu), own[i]->ndim, shape);
        dx[i] = te__empty_like(own[i], s->dtype);
        if (!parts[i] || !dx[i]) result = te_error_code(ring->te);
    }
    if (result != TE_OK) return te__refuse(ring, TE__REDUCE_SCATTER, result);
    for (i = 0; i < 2 && result == TE_OK; i++) result = te__reduce_scatter(ring, parts[i], dx[i]);
    return result;
}

/* Makes pair[i] with the shape of like[i] and the given dtype (0: that of like[i]). If `zero` is true, fills pair[i]
 * with 0. pair[i] is NULL if memory runs out. */
static void te__context_pair(te_tensor *const like[2], te_dtype dtype, bool zero, te_tensor *pair[2]) {
    int i;
    for (i = 0; i < 2; i++)
        pair[i] = !like[i] ? NULL
                  : zero   ? te_tensor_zeros(like[i]->te, dtype, like[i]->ndim, like[i]->shape)
                           : te__empty_like(like[i], dtype ? dtype : like[i]->dtype);
}

/* Computes the attention of q to the keys of the ring. On entry every element of o (f32) must be 0, and every element
 * of lse and max_logit must be -inf. max_logit may be NULL. */
static te_result te__context_ring_forward(const te__context_attention *s, te_tensor *q, te_tensor *const kv[2],
                                          te_tensor *o, te_tensor *lse, te_tensor *max_logit, te_result result) {
    te_group *ring = s->context.ring;
    const int ranks = te__group_size(ring), n = te__context_pieces(s);
    te_tensor *whole[2] = {NULL, NULL}, *spare[2][2] = {{NULL, NULL}, {NULL, NULL}}, *const *now = kv;
    te__flight next = TE_ZERO; /* the keys and values of the next piece */
    te_result landed;
    int i;
    if (s->context.gathers) {
        result = te__context_gather(s, kv, whole, result);
        now = whole;
    }
    for (i = 0; !s->context.gathers && i < te__min(2, ranks - 1) && result == TE_OK; i++) {
        te__context_pair(kv, (te_dtype)0, false, spare[i]);
        if (!spare[i][0] || !spare[i][1]) result = te_error_code(ring->te);
    }
    for (i = 0; i < (s->context.gathers ? n : ranks); i++) {
        const bool passes = !s->context.gathers && i + 1 < ranks;
        if (passes) result = te__context_pass(&next, ring, now, spare[i % 2], 2, result);
        te__frame_begin(ring->te);
        if (result == TE_OK) result = te__context_attend(s, i, q, now[0], now[1], o, lse, max_logit);
        te__frame_end(ring->te, NULL, 0);
        landed = te__flight_land(&next);
        if (result == TE_OK) result = landed;
        if (passes) now = spare[i % 2];
    }
    return te__context_agree(ring, result);
}

/* Computes the gradients of all pieces. The gradients of keys and values travel around the ring, and end at the rank
 * that owns the keys. Beside a product, the next keys and values travel, and the sum that its result is added to. */
static te_result te__context_ring_backward(const te__context_attention *s, const te__context_grads *g,
                                           te_tensor *const kv[2], te_tensor *dx[2], te_result result) {
    te_group *ring = s->context.ring;
    const int ranks = te__group_size(ring), n = te__context_pieces(s);
    te_tensor *whole[2] = {NULL, NULL}, *spare[2][2] = {{NULL, NULL}, {NULL, NULL}},
              *sum[2][2] = {{NULL, NULL}, {NULL, NULL}}, *const *now = kv;
    te__flight next = TE_ZERO;
    te_result landed;
    int i;
    if (s->context.gathers) {
        result = te__context_gather(s, kv, whole, result);
        te__context_pair(whole, TE_F32, true, sum[0]);
        for (i = 0; i < n && result == TE_OK; i++) {
            te__frame_begin(ring->te);
            result = sum[0][0] && sum[0][1]
                         ? te__context_differentiate(s, i, g, whole[0], whole[1], sum[0][0], sum[0][1], &next)
                         : te_error_code(ring->te);
            te__frame_end(ring->te, NULL, 0);
        }
        return te__context_scatter(s, kv, sum[0], dx, result);
    }
    for (i = 0; i < 2 && result == TE_OK; i++) {
        if (i + 1 < ranks) te__context_pair(kv, (te_dtype)0, false, spare[i]);
        te__context_pair(kv, TE_F32, i == 0, sum[i]);
        if ((i + 1 < ranks && (!spare[i][0] || !spare[i][1])) || !sum[i][0] || !sum[i][1])
            result = te_error_code(ring->te);
    }
    for (i = 0; i < ranks; i++) {
        te_tensor *const *last = sum[(i + 1) % 2], *const *here = sum[i % 2], *const *then = spare[i % 2],
                  *out[4] = {now[0], now[1], last[0], last[1]}, *in[4] = {then[0], then[1], here[0], here[1]};
        const int from = i + 1 < ranks ? 0 : 2, to = i > 0 ? 4 : 2;
        result = te__context_pass(&next, ring, out + from, in + from, to - from, result);
        te__frame_begin(ring->te);
        if (result == TE_OK) result = te__context_differentiate(s, i, g, now[0], now[1], here[0], here[1], &next);
        te__frame_end(ring->te, NULL, 0);
        landed = te__flight_land(&next);
        if (result == TE_OK) result = landed;
        now = then;
    }
    result = te__context_pass(&next, ring, sum[(ranks + 1) % 2], sum[ranks % 2], 2, result);
    landed = te__flight_land(&next);
    if (result == TE_OK) result = landed;
    for (i = 0; i < 2 && result == TE_OK; i++) {
        dx[i] = te_tensor_cast(sum[ranks % 2][i], s->dtype);
        if (!dx[i]) result = te_error_code(ring->te);
    }
    return te__context_agree(ring, result);
}

/* ---- the function ---- */

enum { TE__CONTEXT_INPUTS = TE__ATTENTION_INPUTS, TE__CONTEXT_SAVED = TE__ATTENTION_SAVED };

/* Sets cu[0..2] to the first rows of the sequences in q, k and v, or to NULL if the sequences are not packed. */
static void te__context_starts(const te_attn_rule *x, te_tensor *cu[3]) {
    cu[0] = x->cu_seqlens_q_padded ? x->cu_seqlens_q_padded : x->cu_seqlens_q;
    cu[1] = cu[2] = x->cu_seqlens_kv_padded ? x->cu_seqlens_kv_padded : x->cu_seqlens_kv;
}

/* Computes the gradients of this rank's q, k and v, of a bias and of softmax_offset. `saved`: the tensors of
 * te__context_save. d_o: the gradient of the output, [.., H, dv]. All ranks make the call; `result`: this rank's result
 * so far. */
static te_result te__context_gradients(te__context_attention *s, te_tensor *const *saved, te_tensor *d_o,
                                       te_tensor **dx, const bool *needs, te_result result) {
    const te__context *c = &s->context;
    te_ctx *te = c->heads ? c->heads->te : c->ring->te;
    te__context_grads g = TE_ZERO;
    te_tensor *cu[3], *d[3] = {NULL, NULL, NULL};
    const int64_t heads = saved[0]->shape[saved[0]->ndim - 2];
    int i;
    te__attention_tensors(&s->args.rule, (te_tensor **)saved + 6, true);
    s->args.rng = saved[5];
    te__context_starts(&s->args.rule, cu);
    result = te__context_heads(c, &d_o, cu, 1, s->args.format, false, result);
    if (te__group_size(c->ring) > 1) {
        g.q = saved[0];
        g.o = saved[3];
        g.lse = saved[4];
        g.d_o = d_o;
        g.dq = te_tensor_zeros(te, TE_F32, saved[0]->ndim, saved[0]->shape);
        if (needs[3]) {
            const te_tensor *bias = s->args.rule.core_attention_bias;
            g.dbias = dx[3] = te_tensor_zeros(te, bias->dtype, 4, bias->shape);
        }
        if (result == TE_OK && (!g.dq || (needs[3] && !g.dbias))) result = te_error_code(te);
        result = te__context_ring_backward(s, &g, saved + 1, d + 1, result);
        d[0] = result == TE_OK ? te_tensor_cast(g.dq, s->dtype) : NULL;
        if (result == TE_OK && !d[0]) result = te_error_code(te);
    } else if (result == TE_OK) {
        te_tensor *all[TE__CONTEXT_INPUTS] = {NULL, NULL, NULL, NULL, NULL};
        te_op_attn_bwd_args a;
        for (i = 0; i < 3; i++) all[i] = te__empty_like(saved[i], s->dtype);
        a = te__attention_gradients(&s->args, saved, all, all, needs);
        a.d_o = d_o;
        a.fp8 = s->args.fp8;
        result = te__attention_made(&a, needs) ? te_op_attn_bwd(te, &a) : te_error_code(te);
        memcpy(d, all, sizeof(d));
        if (needs[4] && result == TE_OK) { /* dx[4] is the gradient of softmax_offset. This rank fills in the elements
                                            * of its own heads. The other elements stay 0, since other ranks compute
                                            * them */
            dx[4] = te__empty_1d(te, TE_F32, heads * te__group_size(c->heads));
            result = dx[4] ? te_tensor_fill(dx[4], 0.0) : te_error_code(te);
            if (result == TE_OK)
                result = te_tensor_copy(te_tensor_narrow(dx[4], 0, heads * te__group_rank(c->heads), heads), all[4]);
        }
    }
    result = te__context_heads(c, d, cu, 3, s->args.format, true, result);
    memcpy(dx, d, sizeof(d));
    return result;
}
static te_result te__context_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                      te_tensor **dx, const bool *needs) {
    te__context_attention s = *(const te__context_attention *)state;
    te_tensor *d_o = te_tensor_contiguous(dy[0]);
    return te__context_gradients(&s, saved, d_o, dx, needs, d_o ? TE_OK : te_error_code(te));
}

/* Computes the forward pass. parts[0..2] are q, k and v of this rank's tokens, and become the tensors for the backward
 * pass. *o becomes the output of this rank's tokens. If `result` is a failure, only tells the other ranks. */
static te_result te__context_forward(te__context_attention *s, te_tensor *parts[3], te_tensor *max_logit, te_tensor **o,
                                     te_result result) {
    const te__context *c = &s->context;
    te_op_attn_fwd_args *a = &s->args;
    te_ctx *te = c->heads ? c->heads->te : c->ring->te;
    const bool ring = te__group_size(c->ring) > 1;
    te_tensor *cu[3], *own_max = max_logit, *sum = NULL;
    int64_t shape[TE_MAX_DIMS], lse[3];
    te__context_starts(&a->rule, cu);
    result = te__context_heads(c, parts, cu, 3, a->format, false, result);
    if (result == TE_OK) {
        const te_tensor *q = parts[0];
        const int64_t heads = q->shape[q->ndim - 2];
        memcpy(shape, q->shape, sizeof(shape));
        shape[q->ndim - 1] = parts[2]->shape[parts[2]->ndim - 1];
        lse[0] = s->packed ? 1 : q->shape[1 - s->seq];
        lse[1] = heads;
        lse[2] = q->shape[s->seq];
        a->o = te_tensor_empty(te, s->dtype, q->ndim, shape);
        a->lse = te_tensor_empty(te, TE_F32, 3, lse);
        if (max_logit && te__group_size(c->heads) > 1) own_max = te__empty_1d(te, TE_F32, heads);
        if (a->rule.softmax_offset)
            a->rule.softmax_offset =
                te_tensor_narrow(te_tensor_detach(a->rule.softmax_offset), 0, heads * te__group_rank(c->heads), heads);
        if (ring) sum = te_tensor_zeros(te, TE_F32, q->ndim, shape);
        if (!a->o || !a->lse || (max_logit && !own_max) || (ring && !sum)) result = te_error_code(te);
    }
    if (ring) {
        if (result == TE_OK) result = te_tensor_fill(a->lse, -INFINITY);
        if (result == TE_OK && own_max) result = te_tensor_fill(own_max, -INFINITY);
        result = te__context_ring_forward(s, parts[0], parts + 1, sum, a->lse, own_max, result);
        if (result == TE_OK && own_max) result = te__all_reduce(c->ring, own_max, TE_REDUCE_MAX);
        if (result == TE_OK) result = te_tensor_copy(a->o, sum);
    } else if (result == TE_OK) {
        a->q = parts[0];
        a->k = parts[1];
        a->v = parts[2];
        a->max_logit = own_max;
        result = te_op_attn_fwd(te, a);
    }
    *o = a->o;
    if (result == TE_OK && own_max != max_logit) {
        result = te__all_gather(c->heads, own_max, max_logit);
        if (result != TE_OK) return result; /* if te__all_gather fails, it fails on all ranks, so no rank waits in
                                             * the next exchange */
    }
    return te__context_heads(c, o, cu, 1, a->format, true, result);
}

/* Compares the calls of all ranks before the first exchange. If one rank fails, all ranks fail. `recipe` quantizes q, k
 * and v; NULL: none does. `result` is this rank's result so far. *compared becomes true if the calls were compared. */
static te_result te__context_meets(te__context *c, te_tensor *const q_k_v[3], const te_attn_desc *d,
                                   const te_recipe *recipe, te_result result, bool *compared) {
    te_group *const groups[2] = {c->heads, c->ring};
    char what[384] = "", q[TE__SHAPE_TEXT], k[TE__SHAPE_TEXT], v[TE__SHAPE_TEXT], text[TE__RECIPE_TEXT];
    int i;
    *compared = false;
    if (result == TE_OK)
        snprintf(what, sizeof(what),
                 "attention of q %s, k %s, v %s %s, format %d, attn_mask_type %d, window_size %lld, %lld, "
                 "softmax_scale %g, dropout %g, %s%s%s%s%s",
                 te__shape_text(q_k_v[0], q), te__shape_text(q_k_v[1], k), te__shape_text(q_k_v[2], v),
                 te_dtype_name(q_k_v[0]->dtype), (int)d->format, (int)d->rule.mask,
                 (long long)(d->rule.window.on ? d->rule.window.left : -1),
                 (long long)(d->rule.window.on ? d->rule.window.right : -1), (double)d->rule.softmax_scale,
                 (double)d->rule.dropout_p, d->rule.cu_seqlens_q ? "cu_seqlens, " : "",
                 d->rule.core_attention_bias ? "a bias, " : "", recipe ? te__recipe_told(recipe, text) : "",
                 recipe ? " in FP8, " : "", c->gathers ? "keys gathered" : "keys exchanged");
    for (i = 0; i < 2; i++) { /* if the comparison fails in groups[0], the ranks of groups[1] are told */
        if (!te__group_compares(groups[i], c->met)) continue;
        result = te__group_compare(groups[i], what, result);
        *compared = true;
    }
    if (*compared && result == TE_OK) c->met = true;
    return result;
}

/* Begins a call: sets up *s, and parts[0..2] as q, k and v without gradients. Draws random bits for dropout;
 * te__rng_back undoes the draw. */
static te_result te__context_begin(te__context_attention *s, const te__context *c, te_tensor *const q_k_v[3],
                                   const te_attn_desc *desc, te_tensor *parts[3], te_result result) {
    te_ctx *te = c->heads ? c->heads->te : c->ring->te;
    te_op_attn_fwd_args *a = &s->args;
    int i;
    s->context = *c;
    s->dtype = q_k_v[0] ? q_k_v[0]->dtype : TE_F32;
    s->causal = te__attn_is_causal(desc->rule.mask);
    s->packed = desc->format == TE_THD;
    s->seq = te__attn_seq_dim(desc->format);
    a->format = desc->format;
    a->rule = desc->rule;
    if (a->rule.window.left < 0) a->rule.window.on = false; /* The window {left, right} is {-1, -1}, or {-1, 0} with a
                                                             * causal mask. It hides no key that the mask does not
                                                             * hide. */
    if (result == TE_OK && a->rule.core_attention_bias) {
        a->rule.core_attention_bias = te_tensor_detach(a->rule.core_attention_bias);
        if (!a->rule.core_attention_bias) result = te_error_code(te);
    }
    for (i = 0; i < 3 && result == TE_OK; i++) {
        parts[i] = te_tensor_contiguous(te_tensor_detach(q_k_v[i]));
        if (!parts[i]) result = te_error_code(te);
    }
    if (result == TE_OK && a->rule.dropout_p > 0.0f) { /* each rank has its own offsets, so that ranks drop different
                                                        * elements */
        const uint64_t pieces = (uint64_t)te__context_pieces(s);
        te__draw draw = te__rng_draw(te, pieces * (uint64_t)te__context_size(c));
        a->seed = draw.seed;
        a->offset = draw.offset + pieces * (uint64_t)te__context_rank(c);
        a->rng = draw.rng;
    }
    return result;
}
/* Fills the lists of a node from a call: the tensors that may have gradients, and those that the backward pass reads.
 * `parts`: from te__context_forward. */
static void te__context_save(te__context_attention *s, te_tensor *const q_k_v[3], const te_attn_desc *desc,
                             te_tensor *const parts[3], te_tensor **in, te_tensor **saved) {
    te_op_attn_fwd_args *a = &s->args;
    int i;
    for (i = 0; i < 3; i++) {
        in[i] = q_k_v[i];
        saved[i] = parts[i];
    }
    in[3] = desc->rule.core_attention_bias;
    in[4] = desc->rule.softmax_offset;
    saved[3] = a->o;
    saved[4] = a->lse;
    saved[5] = (te_tensor *)a->rng;
    a->max_logit = NULL;
    te__attention_tensors(&a->rule, saved + 6, false);
}

/* Computes te_attention of this rank's tokens q, k, v to the keys of all ranks of *c. All ranks must call this
 * function.
 * cu_seqlens and max_seqlen are those of whole sequences. A bias has this rank's rows and a column for each key, in
 * sequence order.
 * `result` is this rank's result so far; the other ranks learn of a failure.
 * max_logit is the maximum over all ranks. The gradient of softmax_offset covers this rank's heads only. */
static te_tensor *te__context_attention_run(te_tensor *const q_k_v[3], const te_attn_desc *desc, te__context *c,
                                            te_result result) {
    te_ctx *te = c->heads ? c->heads->te : c->ring->te;
    const te__rng_state before = te__rng_now(te);
    te__context_attention s = TE_ZERO;
    te_tensor *parts[3] = {NULL, NULL, NULL}, *in[TE__CONTEXT_INPUTS], *saved[TE__CONTEXT_SAVED], *o = NULL;
    bool compared;
    result = te__context_meets(c, q_k_v, desc, NULL, result, &compared);
    if (result != TE_OK && compared) return NULL;
    te__frame_begin(te);
    result = te__context_begin(&s, c, q_k_v, desc, parts, result);
    result = te__context_forward(&s, parts, desc->max_logit, &o, result);
    if (result == TE_OK) {
        te__context_save(&s, q_k_v, desc, parts, in, saved);
        o = te__record("context_attention", o, te__context_backward, &s, sizeof(s), in, TE__CONTEXT_INPUTS, saved,
                       TE__CONTEXT_SAVED);
    } else
        o = NULL;
    if (!o) te__rng_back(te, before);
    return te__frame_return(te, o);
}
