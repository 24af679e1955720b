/* onnx/ops.c: translates elementwise operations, norms, activations and softmax into nodes of an ONNX graph. This file
 * must not depend on modules.
 *
 * An emitter translates the calls of one operation. te_onnx_export records one run of the module at the caller's sizes,
 * and one at larger sizes. The emitter gets the args that a call had in the first run (a) and in the second run (b).
 * The emitter's nodes compute in f32. The results are rounded to their dtypes when they are stored. After an error no
 * more nodes are made. */

/* ---- copies and sums ---- */

static void te__onnx_copy(te__onnx *g, const te_op_copy_args *a, const te_op_copy_args *b) {
    const te_dtype from = a->src->dtype, to = a->dst->dtype;
    int v = TE__ONNX_READ(src);
    if (te__is_integer(from) && te__is_float(to)) v = te__onnx_cast(g, v, TE__ONNX_FLOAT);
    if (te__is_float(from) && to == TE_I64) v = te__onnx_cast(g, v, TE__ONNX_INT64);
    /* The call copies codes as bytes, but the graph has only the decoded values. */
    if (from != to && !te__is_float(from) && !te__is_integer(from)) v = TE__ONNX_FAILED;
    TE__ONNX_STORE(dst, v);
}
static void te__onnx_fill(te__onnx *g, const te_op_fill_args *a, const te_op_fill_args *b) {
    const bool is_float = te__is_float(a->dst->dtype);
    te__onnx_pair dst = TE__ONNX_PAIR(dst);
    te__onnx_size shape[TE_MAX_DIMS], number;
    te__onnx_write *w;
    int v;
    if (is_float && a->value != b->value)
        te__onnx_refuse(g, "it writes %g, and %g at larger inputs; a number that varies is a whole one, a size",
                        a->value, b->value);
    number.first = (int64_t)a->value;
    number.second = (int64_t)b->value;
    v = is_float                        ? te__onnx_f32(g, (float)a->value)
        : number.first == number.second ? te__onnx_i64(g, number.first)
                                        : te__onnx_size_of(g, number);
    te__onnx_dims(&dst, shape);
    w = TE__ONNX_STORE(dst, te__onnx_2(g, "Expand", v, te__onnx_shape(g, a->dst->ndim, shape, false)));
    if (w && !is_float) w->filled = number;
}
static void te__onnx_axpby(te__onnx *g, const te_op_axpby_args *a, const te_op_axpby_args *b) {
    int v = TE__ONNX_READ(x), alpha = te__onnx_f32(g, a->alpha);
    if (a->alpha_device) alpha = te__onnx_2(g, "Mul", alpha, TE__ONNX_READ(alpha_device));
    if (a->divide_device)
        alpha = te__onnx_2(g, "Div", alpha, te__onnx_2(g, "Max", TE__ONNX_READ(divide_device), te__onnx_f32(g, 1.0f)));
    if (a->alpha != 1.0f || a->alpha_device || a->divide_device) v = te__onnx_2(g, "Mul", v, alpha);
    if (a->y) {
        int w = TE__ONNX_READ(y);
        v = te__onnx_2(g, "Add", v, a->beta == 1.0f ? w : te__onnx_2(g, "Mul", w, te__onnx_f32(g, a->beta)));
    }
    TE__ONNX_STORE(out, v);
}
/* Reshapes `numbers` to the shape of a tensor (`of`), but with a last dimension of 1. `numbers` has one number for each
 * row of the tensor. */
static int te__onnx_per_row(te__onnx *g, int numbers, const te__onnx_pair *of) {
    te__onnx_size shape[TE_MAX_DIMS];
    te__onnx_dims(of, shape);
    shape[of->first.ndim - 1] = te__onnx_fixed(1);
    return te__onnx_reshape(g, numbers, of->first.ndim, shape);
}
static void te__onnx_mul(te__onnx *g, const te_op_mul_args *a, const te_op_mul_args *b) {
    te__onnx_pair from = TE__ONNX_PAIR(x);
    int v = TE__ONNX_READ(x), w = TE__ONNX_READ(y);
    TE__ONNX_STORE(
        out, te__onnx_2(g, "Mul", v, te__mul_by_rows(a) || te__mul_by_rows(b) ? te__onnx_per_row(g, w, &from) : w));
}
static void te__onnx_sum(te__onnx *g, const te_op_sum_args *a, const te_op_sum_args *b) {
    int v = te__onnx_2(g, "Mul", te__onnx_reduce_all(g, "ReduceSum", TE__ONNX_READ(x)), te__onnx_f32(g, a->scale));
    TE__ONNX_STORE(out, te__onnx_vector(g, v));
}
/* Ids outside of this rank's rows of the table give zeros: another rank may have their rows. Unlike te.h, a graph
 * cannot refuse ids. */
static void te__onnx_embedding_fwd(te__onnx *g, const te_op_embedding_fwd_args *a, const te_op_embedding_fwd_args *b) {
    int ids = TE__ONNX_READ(ids), zero = te__onnx_i64(g, 0), inside, rows;
    if (a->from_end)
        ids = te__onnx_3(g, "Where", te__onnx_2(g, "Less", ids, zero),
                         te__onnx_2(g, "Add", ids, te__onnx_i64(g, a->vocab_size)), ids);
    if (a->vocab_start) ids = te__onnx_2(g, "Sub", ids, te__onnx_i64(g, a->vocab_start));
    inside = te__onnx_2(g, "And", te__onnx_2(g, "GreaterOrEqual", ids, zero),
                        te__onnx_2(g, "Less", ids, te__onnx_i64(g, a->table->shape[0])));
    rows = te__onnx_2(g, "Gather", TE__ONNX_READ(table), te__onnx_3(g, "Where", inside, ids, zero));
    TE__ONNX_STORE(y, te__onnx_3(g, "Where", te__onnx_unsqueeze(g, inside, -1), rows, te__onnx_f32(g, 0.0f)));
}
static void te__onnx_refuse_dropout(te__onnx *g, float p) {
    te__onnx_refuse(
        g, "it drops elements with probability %g; te_module_train(module, false) makes the module one of inference",
        (double)p);
}
static void te__onnx_dropout_add_fwd(te__onnx *g, const te_op_dropout_add_fwd_args *a,
                                     const te_op_dropout_add_fwd_args *b) {
    int v = TE__ONNX_READ(x);
    if (a->p > 0.0f) te__onnx_refuse_dropout(g, a->p);
    if (a->bias) v = te__onnx_2(g, "Add", v, TE__ONNX_READ(bias));
    if (a->residual) v = te__onnx_2(g, "Add", v, TE__ONNX_READ(residual));
    TE__ONNX_STORE(y, v);
}

/* ---- norms ---- */

static void te__onnx_layernorm_fwd(te__onnx *g, const te_norm_fwd_args *a, const te_norm_fwd_args *b) {
    te__onnx_pair from = TE__ONNX_PAIR(x);
    te__text t = te__onnx_attributes(g);
    int in[3], n = 2;
    TE__ONNX_UNKNOWN(mean);
    TE__ONNX_UNKNOWN(rstd);
    TE__ONNX_UNKNOWN(amax);
    TE__ONNX_UNKNOWN(y_amax);
    in[0] = TE__ONNX_READ(x);
    in[1] = TE__ONNX_READ(gamma);
    if (a->norm.zero_centered_gamma) in[1] = te__onnx_2(g, "Add", in[1], te__onnx_f32(g, 1.0f));
    if (a->beta) in[n++] = TE__ONNX_READ(beta);
    te__onnx_attr_int(&t, "axis", -1);
    te__onnx_attr_float(&t, "epsilon", a->norm.eps);
    n = te__onnx_node(g, "LayerNormalization", &t, n, in);
    te__onnx_store_result(g, n, &from, a->y, b->y, a->scale, b->scale);
}
/* Returns x / sqrt(r + eps). r is the mean or the sum of the squares of a row, as the operator `reduce` says. */
static int te__onnx_by_squares(te__onnx *g, int x, const char *reduce, float eps) {
    int squares = te__onnx_reduce(g, reduce, te__onnx_2(g, "Mul", x, x), -1);
    return te__onnx_2(g, "Div", x, te__onnx_1(g, "Sqrt", te__onnx_2(g, "Add", squares, te__onnx_f32(g, eps))));
}
static void te__onnx_rmsnorm_fwd(te__onnx *g, const te_norm_fwd_args *a, const te_norm_fwd_args *b) {
    te__onnx_pair from = TE__ONNX_PAIR(x);
    int gamma = TE__ONNX_READ(gamma), v = te__onnx_by_squares(g, TE__ONNX_READ(x), "ReduceMean", a->norm.eps);
    TE__ONNX_UNKNOWN(rstd);
    TE__ONNX_UNKNOWN(amax);
    TE__ONNX_UNKNOWN(y_amax);
    if (a->norm.zero_centered_gamma) gamma = te__onnx_2(g, "Add", gamma, te__onnx_f32(g, 1.0f));
    if (a->rounded) v = te__onnx_cast(g, te__onnx_cast(g, v, te__onnx_type(a->x->dtype)), TE__ONNX_FLOAT);
    v = te__onnx_2(g, "Mul", v, gamma);
    te__onnx_store_result(g, v, &from, a->y, b->y, a->scale, b->scale);
}
static void te__onnx_l2normalize_fwd(te__onnx *g, const te_op_l2normalize_fwd_args *a,
                                     const te_op_l2normalize_fwd_args *b) {
    TE__ONNX_UNKNOWN(rnorm);
    int v = te__onnx_by_squares(g, TE__ONNX_READ(x), "ReduceSum", a->eps);
    TE__ONNX_STORE(y, v);
}

/* ---- activations ---- */

/* There is one function for each nonlinearity of ops/act/list.h. te__onnx_act_one has the list of them. */
/* Returns max(x, 0), by a Max and not a Relu: onnxruntime removes a Relu in front of QuantizeLinear, which is right
 * only for unsigned codes. */
static int te__onnx_relu(te__onnx *g, int x) { return te__onnx_2(g, "Max", x, te__onnx_f32(g, 0.0f)); }
static int te__onnx_srelu(te__onnx *g, int x) {
    int v = te__onnx_relu(g, x);
    return te__onnx_2(g, "Mul", v, v);
}
static int te__onnx_sigmoid(te__onnx *g, int x) { return te__onnx_1(g, "Sigmoid", x); }
static int te__onnx_silu(te__onnx *g, int x) { return te__onnx_2(g, "Mul", x, te__onnx_sigmoid(g, x)); }
static int te__onnx_qgelu(te__onnx *g, int x) {
    return te__onnx_2(g, "Mul", x, te__onnx_sigmoid_of(g, x, 1.702f));
}
/* Applies the nonlinearity of `act` to x. x is the whole input, or the first half of a gated input. */
static int te__onnx_act_one(te__onnx *g, te_activation act, int x) {
#define TE__ONNX_F(f, s, value, slope, name, also) te__onnx_##f,
    static int (*const emit[TE__F_COUNT])(te__onnx *, int) = {TE__NONLINEARITIES(TE__ONNX_F)};
#undef TE__ONNX_F
    return emit[te__activation_row_of(act)->f](g, x);
}
static int te__onnx_clip(te__onnx *g, int x, float limit) {
    return te__onnx_3(g, "Clip", x, te__onnx_f32(g, -limit), te__onnx_f32(g, limit));
}

/* Splits a gated input into its two halves of n columns. If `block` is not 0, the halves alternate in blocks of `block`
 * columns. */
static void te__onnx_halves(te__onnx *g, int x, int64_t n, int64_t block, int half[2]) {
    int h, blocks = x;
    if (block == 0 || block == n) {
        for (h = 0; h < 2; h++) half[h] = te__onnx_cut(g, x, -1, h * n, (h + 1) * n, 1);
        return;
    }
    /* x becomes [-1, blocks, 2, block]. te__onnx_activated restores the leading dimensions. */
    int64_t shape[4] = {-1, n / block, 2, block};
    int64_t joined[2] = {-1, n};
    blocks = te__onnx_2(g, "Reshape", x, te__onnx_i64s(g, 4, shape));
    for (h = 0; h < 2; h++)
        half[h] = te__onnx_2(g, "Reshape", te__onnx_cut(g, blocks, 2, h, h + 1, 1), te__onnx_i64s(g, 2, joined));
}
/* Returns the result of a gated activation: the activated first half times the second half. */
static int te__onnx_gate(te__onnx *g, te_activation act, const te_activation_params *p, int half[2]) {
    int c;
    switch (te__activation_row_of(act)->form) {
    case TE__ACT_PLAIN: break;
    case TE__ACT_GATED: return te__onnx_2(g, "Mul", te__onnx_act_one(g, act, half[0]), half[1]);
    case TE__ACT_CLAMPED:
        c = te__onnx_2(g, "Min", half[0], te__onnx_f32(g, p->limit));
        c = te__onnx_2(g, "Mul", c, te__onnx_sigmoid_of(g, c, p->alpha));
        half[1] = te__onnx_clip(g, half[1], p->limit);
        if (!p->no_glu_linear_offset) half[1] = te__onnx_2(g, "Add", half[1], te__onnx_f32(g, 1.0f));
        return te__onnx_2(g, "Mul", c, half[1]);
    }
    return TE__ONNX_FAILED;
}
/* Applies an activation to the value v, and returns the result. On entry *from has the shape of v. On return it has the
 * shape of the result. */
static int te__onnx_activated(te__onnx *g, int v, te__onnx_pair *from, te_activation act,
                              const te_activation_params *p) {
    const int last = from->first.ndim - 1;
    const int64_t block = p->glu_interleave_size;
    te__onnx_size shape[TE_MAX_DIMS];
    int half[2];
    int64_t n;
    if (!te_activation_is_gated(act)) return te__onnx_act_one(g, act, v);
    n = from->first.shape[last] / 2;
    te__onnx_halves(g, v, n, block, half);
    v = te__onnx_gate(g, act, p, half);
    from->first.shape[last] = from->second.shape[last] = n;
    te__onnx_dims(from, shape);
    return block && block != n ? te__onnx_reshape(g, v, from->first.ndim, shape) : v;
}
static void te__onnx_act_fwd(te__onnx *g, const te_op_act_fwd_args *a, const te_op_act_fwd_args *b) {
    te__onnx_pair from = TE__ONNX_PAIR(x);
    int v = te__onnx_activated(g, TE__ONNX_READ(x), &from, a->activation, &a->activation_params);
    /* amax of the f32 result, for the cast that follows */
    TE__ONNX_STORE(amax, a->scale ? TE__ONNX_FAILED : te__onnx_vector(g, te__onnx_amax_of(g, v)));
    TE__ONNX_UNKNOWN(col);
    te__onnx_store_result(g, v, &from, a->y, b->y, a->scale, b->scale);
}
static void te__onnx_scaled_act_fwd(te__onnx *g, const te_op_scaled_act_fwd_args *a,
                                    const te_op_scaled_act_fwd_args *b) {
    te__onnx_pair from = TE__ONNX_PAIR(x);
    int v = te__onnx_activated(g, TE__ONNX_READ(x), &from, a->activation, &a->activation_params);
    TE__ONNX_STORE(y, te__onnx_2(g, "Mul", v, te__onnx_per_row(g, TE__ONNX_READ(act_scales), &from)));
}

/* ---- softmax ---- */

/* The sizes and the masks of attention scores. With a padding mask each sequence has its own lengths. */
typedef struct te__onnx_scores {
    te__onnx_size s_q, s_kv;
    bool padded;
    int len_q, len_kv; /* if `padded`: items with the lengths of the sequences, 64-bit [b, 1, 1, 1] */
    te_attn_mask mask;
    te_window window;
    te_switch bottom_right_diagonal;
} te__onnx_scores;
enum { TE__ONNX_ALL = -2 }; /* used instead of the item of a mask: every key is visible */

/* Returns the matrix j - i, 64-bit [s_q, s_kv]. i is the index of the query, j that of the key. */
static int te__onnx_distance(te__onnx *g, const te__onnx_scores *s) {
    return te__onnx_2(g, "Sub", te__onnx_range(g, s->s_kv), te__onnx_unsqueeze(g, te__onnx_range(g, s->s_q), 1));
}
static bool te__onnx_is_top_left(te_attn_mask mask) { return mask == TE_MASK_CAUSAL || mask == TE_MASK_PADDING_CAUSAL; }
static bool te__onnx_is_bottom_right(te_attn_mask mask) {
    return mask == TE_MASK_CAUSAL_BOTTOM_RIGHT || mask == TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
}
/* Windows and ALiBi count distances from a diagonal. Returns true if this diagonal ends in the lower right corner of
 * the scores. */
static bool te__onnx_corner(const te__onnx_scores *s) {
    return te__onnx_is_bottom_right(s->mask) || (!te__onnx_is_top_left(s->mask) && s->bottom_right_diagonal != TE_OFF);
}
/* Returns `plus` + j - i, where query i and key j are on the diagonal. If `bottom_right` is true, the diagonal ends in
 * the lower right corner of the scores, otherwise it starts in the upper left corner. */
static int te__onnx_diagonal(te__onnx *g, const te__onnx_scores *s, bool bottom_right, int64_t plus) {
    int v = te__onnx_i64(g, plus);
    if (!bottom_right || (!s->padded && te__onnx_same(s->s_q, s->s_kv)) || (s->padded && s->len_q == s->len_kv))
        return v;
    return te__onnx_2(g, "Add",
                      s->padded ? te__onnx_2(g, "Sub", s->len_kv, s->len_q)
                                : te__onnx_2(g, "Sub", te__onnx_scalar(g, s->s_kv), te__onnx_scalar(g, s->s_q)),
                      v);
}
/* Returns the mask that is true where both masks are true. Each mask may be TE__ONNX_ALL. */
static int te__onnx_both(te__onnx *g, int x, int y) {
    return x == TE__ONNX_ALL ? y : y == TE__ONNX_ALL ? x : te__onnx_2(g, "And", x, y);
}

/* Returns the mask of the visible keys: bool [s_q, s_kv] or [b, 1, s_q, s_kv], or TE__ONNX_ALL. Uses the causal mask,
 * the window and the lengths. */
static int te__onnx_visible(te__onnx *g, const te__onnx_scores *s) {
    const bool top_left = te__onnx_is_top_left(s->mask), bottom_right = te__onnx_is_bottom_right(s->mask),
               corner = te__onnx_corner(s);
    int v = TE__ONNX_ALL;
    if (top_left || bottom_right)
        v = te__onnx_2(g, "LessOrEqual", te__onnx_distance(g, s), te__onnx_diagonal(g, s, bottom_right, 0));
    if (s->window.on && s->window.right >= 0)
        v = te__onnx_both(
            g, v,
            te__onnx_2(g, "LessOrEqual", te__onnx_distance(g, s), te__onnx_diagonal(g, s, corner, s->window.right)));
    if (s->window.on && s->window.left >= 0)
        v = te__onnx_both(
            g, v,
            te__onnx_2(g, "GreaterOrEqual", te__onnx_distance(g, s), te__onnx_diagonal(g, s, corner, -s->window.left)));
    if (s->padded) {
        v = te__onnx_both(g, v, te__onnx_2(g, "Less", te__onnx_range(g, s->s_kv), s->len_kv));
        v = te__onnx_both(g, v, te__onnx_2(g, "Less", te__onnx_unsqueeze(g, te__onnx_range(g, s->s_q), 1), s->len_q));
    }
    return v;
}
/* Returns the softmax of the visible scores over the last dimension. All other results are 0, also in a row without
 * visible scores. */
static int te__onnx_softmax_of(te__onnx *g, int scores, int visible) {
    te__text t = te__onnx_attributes(g);
    int v = visible == TE__ONNX_ALL ? scores : te__onnx_3(g, "Where", visible, scores, te__onnx_f32(g, -3e38f));
    te__onnx_attr_int(&t, "axis", -1);
    v = te__onnx_node(g, "Softmax", &t, 1, &v);
    return visible == TE__ONNX_ALL ? v : te__onnx_3(g, "Where", visible, v, te__onnx_f32(g, 0.0f));
}
static int te__onnx_scaled(te__onnx *g, int x, float scale) {
    return scale == 1.0f ? x : te__onnx_2(g, "Mul", x, te__onnx_f32(g, scale));
}
static int te__onnx_capped(te__onnx *g, int x, float cap) {
    return te__onnx_scaled(g, te__onnx_1(g, "Tanh", te__onnx_2(g, "Div", x, te__onnx_f32(g, cap))), cap);
}

static void te__onnx_softmax_fwd(te__onnx *g, const te_op_softmax_fwd_args *a, const te_op_softmax_fwd_args *b) {
    te__onnx_pair in = TE__ONNX_PAIR(x);
    te__onnx_scores s = TE_ZERO;
    int v = te__onnx_scaled(g, TE__ONNX_READ(x), a->scale), visible = TE__ONNX_ALL;
    if (a->causal) {
        s.s_q = te__onnx_dim(&in, -2);
        s.s_kv = te__onnx_dim(&in, -1);
        s.mask = TE_MASK_CAUSAL_BOTTOM_RIGHT;
        visible = te__onnx_visible(g, &s);
    }
    if (a->mask) { /* A masked score becomes -10000. If the largest visible score of a row is -10000, the whole row
                    * becomes 0. */
        int masked = te__onnx_f32(g, TE__SOFTMAX_MASKED),
            mask = te__onnx_2(g, "Equal", TE__ONNX_READ(mask), te__onnx_i64(g, 0)), seen;
        v = te__onnx_3(g, "Where", mask, v, masked);
        seen = visible == TE__ONNX_ALL ? v : te__onnx_3(g, "Where", visible, v, te__onnx_f32(g, -3e38f));
        seen = te__onnx_1(g, "Not", te__onnx_2(g, "Equal", te__onnx_reduce(g, "ReduceMax", seen, -1), masked));
        visible = te__onnx_both(g, visible, seen);
    }
    TE__ONNX_STORE(y, te__onnx_softmax_of(g, v, visible));
}
static void te__onnx_softcap(te__onnx *g, const te_op_softcap_args *a, const te_op_softcap_args *b) {
    if (a->dy) te__onnx_refuse(g, "it is that of a backward pass");
    TE__ONNX_STORE(y, te__onnx_capped(g, TE__ONNX_READ(x), a->cap));
}
