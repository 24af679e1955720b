/* nn/capped.c: x that becomes cap * tanh(x / cap), and attention whose scores do (Gemma 2): differentiable functions like those of nn/functions.c. */

/* ---- capped numbers ---- */

static te_tensor *te__softcap(te_tensor *x, te_tensor *dy, float cap) {
    te_op_softcap_args args = TE_ZERO;
    args.x = x;
    args.dy = dy;
    args.y = te__empty_like(x, x->dtype);
    args.cap = cap;
    return args.y ? te__checked(args.y, te_op_softcap(x->te, &args)) : NULL;
}
static te_result te__softcap_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    te_tensor *g = te_tensor_contiguous(dy[0]);
    (void)needs;
    dx[0] = g ? te__softcap(saved[0], g, *(const float *)state) : NULL;
    return dx[0] ? TE_OK : te_error_code(te);
}
TE_API te_tensor *te_softcap(te_tensor *x, float cap) {
    if (!x || !te__need_float(x, "te_softcap")) return NULL;
    x = te_tensor_contiguous(x);
    return x ? te__record("softcap", te__softcap(x, NULL, cap), te__softcap_backward, &cap, sizeof(cap), &x, 1, &x, 1) : NULL;
}

/* ---- attention whose scores are capped ----
 *
 * Head by head, some queries at a time, against the keys that any of these sees: te_op_attn_fwd has no cap. The backward pass computes the scores again. */

enum { TE__CAPPED_ROWS = 512 }; /* queries whose scores are in memory together: as many rows, however long the sequence */

typedef struct te__capped_state {
    float scale, cap;
    int64_t left, right, diagonal; /* query i sees keys i + diagonal - left to i + diagonal + right; -1: no bound on that side */
} te__capped_state;

typedef struct te__capped_block {
    int64_t first, rows; /* queries */
    int64_t key, keys;   /* all that they see */
    te_window window;    /* of the block's queries in the block's keys, under no mask */
} te__capped_block;

/* Moves *b to the next block of queries, or if it is zero to the first; false if there is none. Queries in no block see no key. */
static bool te__capped_next(const te__capped_state *s, int64_t s_q, int64_t s_kv, te__capped_block *b) {
    int64_t at;
    b->first += b->rows;
    if (s->right >= 0) b->first = te__max(b->first, -(s->diagonal + s->right));
    b->rows = te__min(TE__CAPPED_ROWS, s_q - b->first);
    at = b->first + s->diagonal;
    b->key = s->left < 0 ? 0 : te__max(0, at - s->left);
    b->keys = (s->right < 0 ? s_kv : te__min(s_kv, at + b->rows + s->right)) - b->key;
    b->window.on = true;
    b->window.left = s->left < 0 ? -1 : s->left - (at - b->key);
    b->window.right = s->right < 0 ? -1 : s->right + (at - b->key);
    return b->rows > 0 && b->keys > 0;
}

/* d = op(a) op(b), or added to it. */
static te_result te__head_product(te_tensor *a, bool a_transposed, te_tensor *b, bool b_transposed, te_tensor *d, bool accumulate) {
    te_op_gemm_args g = TE_ZERO;
    if (!a || !b || !d) return TE_ERR_STATE;
    g.a = a;
    g.b = b;
    g.d = d;
    g.m = d->shape[0];
    g.n = d->shape[1];
    g.k = a->shape[a_transposed ? 0 : 1];
    g.a_transposed = a_transposed;
    g.b_transposed = b_transposed;
    g.accumulate = accumulate;
    return te_op_gemm(d->te, &g);
}

/* Rows first .. first + n - 1 of head i of x. */
static te_tensor *te__head_rows(const te_tensor *x, int64_t i, int64_t first, int64_t n) {
    const int64_t cols = x->shape[3];
    return te__alias_2d(x, (i * x->shape[2] + first) * cols * te__dtype_size(x->dtype), x->dtype, n, cols);
}
/* Room for a block's matrix of scores in x, which has room for any block's. */
static te_tensor *te__capped_scores_of(const te_tensor *x, const te__capped_block *b) { return te__alias_2d(x, 0, x->dtype, b->rows, b->keys); }
static te_tensor *te__capped_room(te_ctx *te, te_dtype dtype, int64_t s_q, int64_t s_kv) { return te__empty_2d(te, dtype, te__min(TE__CAPPED_ROWS, s_q), s_kv); }

static te_result te__capped_softmax(const te__capped_state *s, const te__capped_block *b, te_tensor *x, te_tensor *y) {
    te_op_capped_softmax_fwd_args a = TE_ZERO;
    a.x = x;
    a.y = y;
    a.scale = s->scale;
    a.cap = s->cap;
    a.mask = TE_MASK_NONE;
    a.window = b->window;
    return te_op_capped_softmax_fwd(x->te, &a);
}

/* The gradients of a block of head h: sums over blocks and over the heads of a group are in f32, and are rounded once. */
static te_result te__capped_block_backward(const te__capped_state *s, const te__capped_block *b, int64_t h, int64_t group, te_tensor *const *saved, te_tensor *d_o, te_tensor *const *room,
                                           te_tensor *const *dx) {
    te_tensor *q = te__head_rows(saved[0], h, b->first, b->rows), *k = te__head_rows(saved[1], group, b->key, b->keys), *v = te__head_rows(saved[2], group, b->key, b->keys);
    te_tensor *scores = te__capped_scores_of(room[0], b), *dp = te__capped_scores_of(room[1], b), *p = te__capped_scores_of(room[2], b);
    te_op_capped_softmax_bwd_args back = TE_ZERO;
    te_result result;
    d_o = te__head_rows(d_o, h, b->first, b->rows);
    result = te__head_product(q, false, k, true, scores, false);
    if (result == TE_OK) result = te__capped_softmax(s, b, scores, p);
    if (result == TE_OK) result = te__head_product(p, true, d_o, false, te__head_rows(dx[2], group, b->key, b->keys), true);
    if (result == TE_OK) result = te__head_product(d_o, false, v, true, dp, false);
    back.x = scores;
    back.dy = dp;
    back.dx = p;
    back.scale = s->scale;
    back.cap = s->cap;
    back.mask = TE_MASK_NONE;
    back.window = b->window;
    if (result == TE_OK) result = te_op_capped_softmax_bwd(q->te, &back);
    if (result == TE_OK) result = te__head_product(p, false, k, false, te__head_rows(dx[0], h, b->first, b->rows), false);
    return result == TE_OK ? te__head_product(p, true, q, false, te__head_rows(dx[1], group, b->key, b->keys), true) : result;
}
static te_result te__capped_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te__capped_state *s = (const te__capped_state *)state;
    te_tensor *q = saved[0], *k = saved[1], *v = saved[2], *d_o = te_tensor_contiguous(dy[0]), *room[3], *made[3];
    const int64_t heads = q->shape[0] * q->shape[1], per_group = q->shape[1] / k->shape[1], s_q = q->shape[2], s_kv = k->shape[2];
    te_result result;
    int64_t h;
    (void)needs;
    room[0] = te__capped_room(te, TE_F32, s_q, s_kv);
    room[1] = te__capped_room(te, TE_F32, s_q, s_kv);
    room[2] = te__capped_room(te, q->dtype, s_q, s_kv);
    made[0] = te_tensor_zeros(te, q->dtype, 4, q->shape);
    made[1] = te_tensor_zeros(te, TE_F32, 4, k->shape);
    made[2] = te_tensor_zeros(te, TE_F32, 4, v->shape);
    result = room[0] && room[1] && room[2] && made[0] && made[1] && made[2] && d_o ? TE_OK : te_error_code(te);
    for (h = 0; h < heads && result == TE_OK; h++) {
        te__capped_block b = TE_ZERO;
        while (result == TE_OK && te__capped_next(s, s_q, s_kv, &b)) result = te__capped_block_backward(s, &b, h, h / per_group, saved, d_o, room, made);
    }
    if (result != TE_OK) return result;
    dx[0] = made[0];
    dx[1] = te_tensor_cast(made[1], k->dtype);
    dx[2] = te_tensor_cast(made[2], v->dtype);
    return dx[1] && dx[2] ? TE_OK : te_error_code(te);
}

/* q [b, H, s_q, d], k and v [b, G, s_kv, d] -> [b, H, s_q, dv]. */
static te_tensor *te__capped_heads(te_tensor *q, te_tensor *k, te_tensor *v, const te__capped_state *s) {
    te_ctx *te = q->te;
    const int64_t heads = q->shape[0] * q->shape[1], per_group = q->shape[1] / k->shape[1], shape[4] = {q->shape[0], q->shape[1], q->shape[2], v->shape[3]};
    te_tensor *scores, *p, *o, *in[3];
    te_result result;
    int64_t h;
    in[0] = q;
    in[1] = k;
    in[2] = v;
    te__frame_begin(te);
    scores = te__capped_room(te, TE_F32, q->shape[2], k->shape[2]);
    p = te__capped_room(te, q->dtype, q->shape[2], k->shape[2]);
    o = te_tensor_zeros(te, q->dtype, 4, shape);
    result = scores && p && o ? TE_OK : te_error_code(te);
    for (h = 0; h < heads && result == TE_OK; h++) {
        te__capped_block b = TE_ZERO;
        while (result == TE_OK && te__capped_next(s, q->shape[2], k->shape[2], &b)) {
            te_tensor *x = te__capped_scores_of(scores, &b), *y = te__capped_scores_of(p, &b);
            result = te__head_product(te__head_rows(q, h, b.first, b.rows), false, te__head_rows(k, h / per_group, b.key, b.keys), true, x, false);
            if (result == TE_OK) result = te__capped_softmax(s, &b, x, y);
            if (result == TE_OK) result = te__head_product(y, false, te__head_rows(v, h / per_group, b.key, b.keys), false, te__head_rows(o, h, b.first, b.rows), false);
        }
    }
    if (result != TE_OK) o = NULL;
    return te__frame_return(te, te__record("capped_attention", o, te__capped_backward, s, sizeof(*s), in, 3, in, 3));
}

/* [s, b, n, d] or [b, s, n, d] to [b, n, s, d], or back. */
static te_tensor *te__heads_first(te_tensor *x, te_qkv_format format) {
    if (format == TE_SBHD) x = te_tensor_transpose(x, 0, 1);
    return te_tensor_contiguous(te_tensor_transpose(x, 1, 2));
}
static te_tensor *te__heads_back(te_tensor *x, te_qkv_format format) {
    x = te_tensor_transpose(x, 1, 2);
    return te_tensor_contiguous(format == TE_SBHD ? te_tensor_transpose(x, 0, 1) : x);
}

/* The keys that each query sees: as te_attention has them, whose diagonal ends at the last key but under TE_MASK_CAUSAL. */
static void te__capped_bounds(te__capped_state *state, const te_attention_desc *desc, int64_t s_q, int64_t s_kv) {
    const bool causal = desc->rule.mask != TE_MASK_NONE, top_left = causal && desc->rule.mask != TE_MASK_CAUSAL_BOTTOM_RIGHT;
    const int64_t all = s_q + s_kv; /* more than this is no bound, and cannot overflow */
    state->left = desc->rule.window.on && desc->rule.window.left >= 0 ? te__min(desc->rule.window.left, all) : -1;
    state->right = causal ? 0 : desc->rule.window.on && desc->rule.window.right >= 0 ? te__min(desc->rule.window.right, all) : -1;
    state->diagonal = top_left ? 0 : s_kv - s_q;
}
static te_result te__capped_mask_ok(te_ctx *te, const te_attention_desc *desc) {
    if ((int)desc->rule.mask < 0 || desc->rule.mask > TE_MASK_CAUSAL_BOTTOM_RIGHT)
        return te__fail(te, TE_ERR_UNSUPPORTED, "attention: mask %d with softcap; TE_MASK_NONE (%d), TE_MASK_CAUSAL (%d) and TE_MASK_CAUSAL_BOTTOM_RIGHT (%d) are possible", (int)desc->rule.mask,
                        (int)TE_MASK_NONE, (int)TE_MASK_CAUSAL, (int)TE_MASK_CAUSAL_BOTTOM_RIGHT);
    if (desc->rule.window.on && (desc->rule.window.left < -1 || desc->rule.window.right < -1))
        return te__fail(te, TE_ERR_INVALID, "attention: window is %lld, %lld; -1 (no bound) and numbers from 0 on are possible", (long long)desc->rule.window.left, (long long)desc->rule.window.right);
    return TE_OK;
}

/* te_attention with scores x that become cap * tanh(x / cap). */
static te_tensor *te__capped_attention(te_tensor *q, te_tensor *k, te_tensor *v, float cap, const te_attention_desc *desc) {
    te__capped_state state = TE_ZERO;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT], c[TE__SHAPE_TEXT];
    bool fits = q->ndim == 4 && k->ndim == 4 && v->ndim == 4;
    const int s = desc->format == TE_BSHD ? 1 : 0;
    if (!te__operand(q, k, false, "attention") || !te__operand(q, v, false, "attention") || !te__need_float(q, "attention") || te__capped_mask_ok(q->te, desc) != TE_OK) return NULL;
    fits = fits && k->shape[2] > 0 && q->shape[3] > 0 && q->shape[2] % k->shape[2] == 0 && k->shape[2] == v->shape[2] && q->shape[3] == k->shape[3] && k->shape[s] == v->shape[s] &&
           q->shape[1 - s] == k->shape[1 - s] && k->shape[1 - s] == v->shape[1 - s] && q->dtype == k->dtype && k->dtype == v->dtype;
    if (!fits) {
        te__fail(q->te, TE_ERR_SHAPE, "attention: q is %s, k %s, v %s; [s, b, heads, d] or [b, s, heads, d] each, of one format, and the heads of k and v divide q's",
                 te__shape_text(q, a), te__shape_text(k, b), te__shape_text(v, c));
        return NULL;
    }
    state.cap = cap;
    state.scale = desc->rule.softmax_scale != 0.0f ? desc->rule.softmax_scale : te__floats_divide(1.0, sqrt((double)q->shape[3]));
    te__capped_bounds(&state, desc, q->shape[s], k->shape[s]);
    q = te__heads_first(q, desc->format);
    k = te__heads_first(k, desc->format);
    v = te__heads_first(v, desc->format);
    if (!q || !k || !v) return NULL;
    return te__heads_back(te__capped_heads(q, k, v, &state), desc->format);
}
