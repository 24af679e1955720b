/* moe/experts.c: computations on rows that are sorted by expert: GEMMs, biases multiplied by router weights, and
 * activations. This file must not depend on how rows were routed. */

/* The implementation of the GEMMs of all experts. */
typedef enum te__expert_way {
    TE__EXPERTS_LOOP,    /* one GEMM for each expert, with the group sizes on the host */
    TE__EXPERTS_GROUPED, /* one grouped GEMM for all experts, with the group sizes on the device */
    TE__EXPERTS_MXFP8    /* as TE__EXPERTS_GROUPED, but operands are first quantized to MXFP8 and decoded */
} te__expert_way;

/* Rows of tokens, sorted by expert. Rows after those of the last expert are 0. */
typedef struct te__expert_rows {
    te_tensor *x;     /* [R, dim] */
    te_tensor *probs; /* f32 [R]: the router weight of each row */
    te_tensor *sizes; /* i64 [E]: rows of each expert, on the device */
    int64_t *host;    /* [E]: number of rows of each expert, on the host; NULL if it is not known there */
    te_tensor *ids;   /* i32 [R]: the expert of each row, -1 for rows after those of the last expert; NULL if there are
                       * no biases */
} te__expert_rows;

/* ---- GEMMs ---- */

typedef struct te__expert_mm {
    te__expert_way way;
    int n;
    int64_t rows, in, out;
    te_dtype bias_dtype;
} te__expert_mm; /* with TE__EXPERTS_LOOP, int64_t sizes[n] follows this struct in memory */
static int64_t *te__mm_sizes(const te__expert_mm *s) {
    return (int64_t *)(void *)((char *)(uintptr_t)s + sizeof(te__expert_mm));
}

/* Returns x with the rounding of MXFP8: quantizes it along `which` (TE_ROWWISE or TE_COLUMNWISE) and decodes it. */
static te_tensor *te__through_mxfp8(te_tensor *x, int which) {
    const te_recipe recipe = te_recipe_mxfp8();
    te__quant_spec spec = te__recipe_spec(&recipe, false, TE__SLOT_INPUT, NULL);
    te_tensor *y;
    spec.usage = which;
    y = te__quantize(x, &spec);
    return y ? te__copy_dequantize(y, which, x->dtype) : NULL;
}

/* Computes d = op(a) op(b) + bias for one group. */
static te_result te__mm_group(te_ctx *te, te_tensor *a, bool a_transposed, te_tensor *b, bool b_transposed,
                              te_tensor *bias, te_tensor *d) {
    te_op_gemm_args g = TE_ZERO;
    g.d = d;
    g.bias = bias;
    return a && b && d ? te__product(te, a, a_transposed, b, b_transposed, &g) : te_error_code(te);
}

/* Computes d = a w[g] + bias[g] for the rows of each group g. w[g] is [k, n] or, if `transposed`, [n, k]. The caller
 * has zeroed d. */
static te_result te__mm_rows(te_ctx *te, const te__expert_mm *s, te_tensor *a, te_tensor *w, bool transposed,
                             te_tensor *bias, te_tensor *sizes, te_tensor *d) {
    int64_t size = te__cols(a) * te__cols(d) * te__dtype_size(w->dtype), at = 0;
    te_result result = TE_OK;
    int i;
    if (s->way != TE__EXPERTS_LOOP) {
        te_op_grouped_gemm_args g;
        te__grouped_gemm_of(&g, sizes, s->n, d, s->rows, te__cols(d), te__cols(a), false);
        g.a = a;
        g.b = w;
        g.b_transposed = transposed;
        g.bias = bias;
        return te_op_grouped_gemm(te, &g);
    }
    for (i = 0; i < s->n && result == TE_OK; i++) {
        const int64_t rows = te__mm_sizes(s)[i], k = te__cols(a), n = te__cols(d);
        if (!rows) continue;
        te__frame_begin(te);
        result = te__mm_group(te, te__rows_of(a, at, rows), false,
                              te__alias_2d(w, i * size, w->dtype, transposed ? n : k, transposed ? k : n), transposed,
                              bias ? te__alias_1d(bias, i * n * te__dtype_size(bias->dtype), bias->dtype, n) : NULL,
                              te__rows_of(d, at, rows));
        te__frame_end(te, NULL, 0);
        at += rows;
    }
    return result;
}
/* Computes the weight gradient d[g] = x^T dy over the rows of each group g. d is [n * in, out]. Empty groups give 0. */
static te_result te__mm_weights(te_ctx *te, const te__expert_mm *s, te_tensor *x, te_tensor *dy, te_tensor *sizes,
                                te_tensor *d) {
    int64_t at = 0;
    te_result result;
    int i;
    if (s->way != TE__EXPERTS_LOOP) {
        te_op_grouped_gemm_args g;
        te__grouped_gemm_of(&g, sizes, s->n, d, s->in, s->out, s->rows, false);
        return te__grouped_k_product(te, x, dy, &g);
    }
    result = te_tensor_fill(d, 0.0);
    for (i = 0; i < s->n && result == TE_OK; i++) {
        const int64_t rows = te__mm_sizes(s)[i];
        if (!rows) continue;
        te__frame_begin(te);
        result = te__mm_group(te, te__rows_of(x, at, rows), true, te__rows_of(dy, at, rows), false, NULL,
                              te__rows_of(d, i * s->in, s->in));
        te__frame_end(te, NULL, 0);
        at += rows;
    }
    return result;
}

/* saved[] has x, w [n * in, out] and sizes. dx[] gets the gradients of x, w and bias. */
static te_result te__expert_mm_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                        te_tensor **dx, const bool *needs) {
    const te__expert_mm *s = (const te__expert_mm *)state;
    te_tensor *g = te_tensor_contiguous(dy[0]);
    te_result result = g ? TE_OK : te_error_code(te);
    if (result == TE_OK && needs[0]) {
        bool mxfp8 = s->way == TE__EXPERTS_MXFP8;
        te_tensor *a = mxfp8 ? te__through_mxfp8(g, TE_ROWWISE) : g,
                  *w = mxfp8 ? te__through_mxfp8(saved[1], TE_ROWWISE) : saved[1];
        dx[0] = te__zeros_2d(te, g->dtype, s->rows, s->in);
        result = a && w && dx[0] ? te__mm_rows(te, s, a, w, true, NULL, saved[2], dx[0]) : te_error_code(te);
    }
    if (result == TE_OK && needs[1]) {
        const int64_t shape[3] = {s->n, s->in, s->out};
        dx[1] = te_tensor_empty(te, g->dtype, 3, shape);
        result =
            dx[1] ? te__mm_weights(te, s, saved[0], g, saved[2], te__alias_2d(dx[1], 0, g->dtype, s->n * s->in, s->out))
                  : te_error_code(te);
    }
    if (result == TE_OK && needs[2]) {
        te_op_grouped_column_sum_args sum = TE_ZERO;
        dx[2] = te__empty_2d(te, s->bias_dtype, s->n, s->out);
        sum.x = g;
        sum.sizes = saved[2];
        sum.out = dx[2];
        result = dx[2] ? te_op_grouped_column_sum(te, &sum) : te_error_code(te);
    }
    return result;
}
/* Returns x[i] w[g] + bias[g] for each row i of x [R, in], as [R, out]; g is the group of row i. w is [n, in, out],
 * bias [n, out] or NULL. Differentiable. */
static te_tensor *te__expert_product(const te__expert_rows *r, te__expert_way way, te_tensor *x, te_tensor *w,
                                     te_tensor *bias) {
    te_ctx *te = x->te;
    const int n = (int)w->shape[0];
    const size_t bytes = sizeof(te__expert_mm) + (size_t)n * sizeof(int64_t);
    te__expert_mm *s = (te__expert_mm *)te__alloc_zero(te, bytes);
    te_tensor *flat, *y, *a, *b;
    if (!s) return NULL;
    s->way = way;
    s->n = n;
    s->rows = te__rows(x);
    s->in = w->shape[1];
    s->out = w->shape[2];
    s->bias_dtype = x->dtype;
    if (way == TE__EXPERTS_LOOP) memcpy(te__mm_sizes(s), r->host, (size_t)n * sizeof(int64_t));
    w = te_tensor_cast(w, x->dtype);
    bias = te_tensor_cast(bias, x->dtype);
    flat = w ? te__alias_2d(w, 0, w->dtype, n * s->in, s->out) : NULL;
    y = te__zeros_2d(te, x->dtype, s->rows, s->out);
    a = way == TE__EXPERTS_MXFP8 ? te__through_mxfp8(x, TE_ROWWISE) : x;
    b = way == TE__EXPERTS_MXFP8 && flat ? te__through_mxfp8(flat, TE_COLUMNWISE) : flat;
    te_tensor *in[3] = {x, w, bias}, *saved[3] = {x, flat, r->sizes};
    if (y && a && b && te__mm_rows(te, s, a, b, false, bias, r->sizes, y) == TE_OK)
        y = te__record("experts", y, te__expert_mm_backward, s, bytes, in, 3, saved, 3);
    else
        y = NULL;
    te__free(te, s);
    return y;
}

/* ---- biases scaled by router weights ---- */

/* saved: bias, ids, probs, sizes; inputs: y, bias, probs. */
static te_result te__weighted_bias_backward(te_ctx *te, const void *state, te_tensor *const *saved,
                                            te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    te_tensor *g = te_tensor_contiguous(dy[0]), *factors = te__alias_2d(saved[2], 0, TE_F32, te__numel(saved[2]), 1);
    te_result result = g && factors ? TE_OK : te_error_code(te);
    (void)state;
    dx[0] = dy[0];
    if (result == TE_OK && needs[1]) { /* the bias gradient of an expert is the sum of probs[i] dy[i] over the expert's
                                        * rows i */
        te_op_moe_unpermute_args scale = TE_ZERO;
        te_op_grouped_column_sum_args sum = TE_ZERO;
        scale.x = g;
        scale.row_id_map = te__identity_map(te, te__rows(g));
        scale.merging_probs = factors;
        scale.topk = 1;
        sum.x = scale.y = te__empty_like(g, TE_F32);
        sum.sizes = saved[3];
        sum.out = dx[1] = te__empty_like(saved[0], saved[0]->dtype);
        if (!scale.row_id_map || !scale.y || !dx[1]) return te_error_code(te);
        result = te_op_moe_unpermute(te, &scale);
        if (result == TE_OK) result = te_op_grouped_column_sum(te, &sum);
    }
    if (result == TE_OK && needs[2]) {
        te_op_moe_unpermute_bwd_args dot = TE_ZERO;
        dot.dy = g;
        dot.x = saved[0];
        dot.row_id_map = saved[1];
        dot.merging_probs = factors;
        dot.topk = 1;
        dx[2] = te__empty_like(saved[2], TE_F32);
        dot.dprobs = dx[2] ? te__alias_2d(dx[2], 0, TE_F32, te__numel(dx[2]), 1) : NULL;
        result = dot.dprobs ? te_op_moe_unpermute_bwd(te, &dot) : te_error_code(te);
    }
    return result;
}
/* Returns a tensor whose row i is y[i] + r->probs[i] * bias[expert of row i]. The unpermute kernel gathers the
 * biases. */
static te_tensor *te__weighted_bias(const te__expert_rows *r, te_tensor *y, te_tensor *bias) {
    te_op_moe_unpermute_args rows = TE_ZERO;
    te_tensor *z;
    bias = te_tensor_cast(bias, y->dtype);
    rows.x = bias;
    rows.row_id_map = r->ids;
    rows.merging_probs = te__alias_2d(r->probs, 0, TE_F32, te__numel(r->probs), 1);
    rows.topk = 1;
    rows.y = te__empty_like(y, TE_F32);
    if (!bias || !rows.merging_probs || !rows.y || te_op_moe_unpermute(y->te, &rows) != TE_OK) return NULL;
    z = te__axpby(y, rows.y, 1.0f, 1.0f);
    te_tensor *in[3] = {y, bias, r->probs}, *saved[4] = {bias, r->ids, r->probs, r->sizes};
    return te__record("expert_bias", z, te__weighted_bias_backward, NULL, 0, in, 3, saved, 4);
}

/* ---- the activation ---- */

/* The properties of one te_expert_activation: the activation function, and the config fields that it reads. */
typedef struct te__expert_activation_row {
    te_activation activation;
    bool reads_limit;  /* limit and alpha are activation_limit and activation_alpha */
    bool reads_swiglu; /* a swiglu_limit above 0 clamps the activation */
    bool alternate;    /* columns of gate and up alternate; otherwise gate and up are two halves */
    bool shared;       /* shared experts may use this activation */
} te__expert_activation_row;
/* Indexed by te_expert_activation. */
static const te__expert_activation_row te__expert_activations[] = {
    {TE_SWIGLU, false, true, false, true},         {TE_CLAMPED_SWIGLU, true, false, false, false},
    {TE_CLAMPED_SWIGLU, true, false, true, false}, {TE_GEGLU, false, false, false, false},
    {TE_SRELU, false, false, false, true}};
TE__STATIC_ASSERT(sizeof(te__expert_activations) / sizeof(te__expert_activations[0]) == TE_EXPERT_ACTIVATION_COUNT,
                  "an activation of experts has no row");

static bool te__expert_is_gated(te_expert_activation a) {
    return te_activation_is_gated(te__expert_activations[a].activation);
}
/* Returns the activation function of experts and sets its parameters in *params. *params must be zero before the
 * call. */
static te_activation te__expert_function(te_expert_activation activation, const te_moe_config *c,
                                         te_activation_params *params) {
    const te__expert_activation_row *row = &te__expert_activations[activation];
    const bool clamped = row->reads_swiglu && c->swiglu_limit > 0.0f;
    if (row->reads_limit) {
        params->limit = c->activation_limit;
        params->alpha = c->activation_alpha;
    } else if (clamped) {
        params->limit = c->swiglu_limit;
        params->alpha = 1.0f;
        params->no_glu_linear_offset = true;
    }
    if (row->alternate) params->glu_interleave_size = 1;
    return clamped ? TE_CLAMPED_SWIGLU : row->activation;
}

/* Returns TE__EXPERTS_MXFP8 if both dimensions of an expert's weights are multiples of 32. Otherwise returns
 * TE__EXPERTS_GROUPED, because one MXFP8 block could then contain weights of two experts. */
static te__expert_way te__mxfp8_way(te_ctx *te, const te_moe_config *c) {
    if (te__expert_dim(c) % 32 == 0 && c->moe_inter_dim % 32 == 0) {
        if (!te__moe_of(te)->told_mxfp8)
            te__log(te, TE_LOG_INFO, "experts torch_mm_mxfp8: products of experts are made of MXFP8 values");
        te__moe_of(te)->told_mxfp8 = true;
        return TE__EXPERTS_MXFP8;
    }
    if (!te__moe_of(te)->told_mxfp8_plain)
        te__warn(te,
                 "experts torch_mm_mxfp8: sizes %lld and %lld are no multiples of 32, so products of experts stay in "
                 "high precision",
                 (long long)te__expert_dim(c), (long long)c->moe_inter_dim);
    te__moe_of(te)->told_mxfp8_plain = true;
    return TE__EXPERTS_GROUPED;
}
