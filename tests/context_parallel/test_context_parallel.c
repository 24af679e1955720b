/* Attention over sequences that ranks share: 2 and 4 ranks against one. Each rank computes the whole as well, and compares the rows that are its own; which rows these are is written down
 * again here, in rows_of. */
#include "../dist/ranks.h"

enum { HEADS = 8, D = 8, BATCH = 2, LENGTH = 32, SEQUENCES = 3, TOTAL = 56, TAIL = 8 };

/* The groups of a case: of all ranks (cp), or of an exchange and a ring. */
typedef struct kind_of_ranks {
    const char *name;
    te_cp_comm comm;
    int ranks, exchange; /* exchange: of TE_CP_A2A_P2P */
} kind_of_ranks;
static const kind_of_ranks kinds[] = {{"p2p", TE_CP_P2P, 2, 0},       {"all_gather", TE_CP_ALL_GATHER, 2, 0}, {"a2a", TE_CP_A2A, 2, 0},           {"p2p", TE_CP_P2P, 4, 0},
                                      {"all_gather", TE_CP_ALL_GATHER, 4, 0}, {"a2a", TE_CP_A2A, 4, 0},       {"a2a+p2p", TE_CP_A2A_P2P, 4, 2}, {"a2a+p2p", TE_CP_A2A_P2P, 2, 2},
                                      {"a2a+p2p", TE_CP_A2A_P2P, 2, 1}};

typedef struct shared_case {
    kind_of_ranks is;
    te_thread_hub *hubs[2][4]; /* of exchanges, of rings */
    te_dtype dtype;
    te_qkv_format format;
    bool causal, cross, padded, tail;
    int groups;
    int64_t d_v;
    te_window window;
    int64_t bias[2]; /* of its sizes, batch and queries: 0 => none, 1, or more: all */
    te_softmax_type softmax;
    int64_t length; /* of sequences that are not packed */
    bool checkpoint, late; /* late: the groups come after the module was made */
    int64_t d; /* channels of a head of q and k; 0 => D */
    double tolerance;
} shared_case;

/* ---- the layout ---- */

/* The rows of rank `rank` of `ranks` among those of a dimension that `n` sequences of these lengths fill, and `tail` behind them. Returns how many they are. */
static int64_t rows_of(int rank, int ranks, int n, const int64_t *lengths, int64_t tail, int64_t *rows) {
    int64_t start = 0, count = 0;
    for (int b = 0; b < n; b++) {
        const int64_t chunk = lengths[b] / (2 * ranks);
        for (int64_t i = 0; i < chunk; i++) rows[count++] = start + rank * chunk + i;
        for (int64_t i = 0; i < chunk; i++) rows[count++] = start + (2 * ranks - 1 - rank) * chunk + i;
        start += lengths[b];
    }
    for (int64_t i = 0; i < tail / ranks; i++) rows[count++] = start + rank * (tail / ranks) + i;
    return count;
}
static te_tensor *some_rows(te_tensor *x, int dim, const int64_t *rows, int64_t n) {
    int64_t shape[8];
    for (int i = 0; i < te_tensor_ndim(x); i++) shape[i] = te_tensor_shape(x)[i];
    shape[dim] = n;
    te_tensor *y = te_tensor_empty(te_tensor_ctx(x), te_tensor_dtype(x), te_tensor_ndim(x), shape);
    for (int64_t i = 0; i < n; i++) te_tensor_copy(te_tensor_narrow(y, dim, i, 1), te_tensor_narrow(te_tensor_detach(x), dim, rows[i], 1));
    return y;
}

/* ---- comparing ---- */

static double distance(te_tensor *got, te_tensor *want) {
    const int64_t n = te_tensor_numel(want);
    double difference = 0, size = 0;
    if (!got || te_tensor_numel(got) != n) return INFINITY;
    float *a = (float *)malloc((size_t)(2 * n + 1) * sizeof(float)), *b = a + n;
    te_tensor_to_f32(got, a);
    te_tensor_to_f32(want, b);
    for (int64_t i = 0; i < n; i++) {
        difference += a[i] == b[i] ? 0 : ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    free(a);
    return difference == 0 ? 0 : size > 0 && difference == difference ? sqrt(difference / size) : INFINITY;
}
static void same(rank_state *s, const shared_case *c, const char *what, te_tensor *got, te_tensor *want) {
    char text[512];
    double d = want ? distance(got, want) : got ? INFINITY : 0;
    if (d <= c->tolerance) return;
    snprintf(text, sizeof text, "%s, %d ranks, format %d, %s, %s: %s is %g off", c->is.name, c->is.ranks, (int)c->format, te_dtype_name(c->dtype), c->causal ? "causal" : "no mask", what, d);
    wrong(s, text);
}

/* ---- one call ---- */

static const int64_t padded_q[SEQUENCES] = {16, 8, 32}, true_q[SEQUENCES] = {13, 8, 18}, padded_kv[SEQUENCES] = {8, 24, 24}, true_kv[SEQUENCES] = {5, 24, 23};

static te_tensor *starts(te_ctx *te, const int64_t *lengths) {
    int64_t cu[SEQUENCES + 1] = {0};
    for (int b = 0; b < SEQUENCES; b++) cu[b + 1] = cu[b] + lengths[b];
    return test_i32(te, SHAPE(SEQUENCES + 1), cu);
}
static te_tensor *numbers(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, uint64_t seed) {
    te_seed(te, seed);
    return te_tensor_normal(te, dtype, ndim, shape, 0, 1);
}
static te_tensor *leaf(te_tensor *x) { return te_tensor_set_requires_grad(te_tensor_contiguous(te_tensor_detach(x)), true); }

/* The groups of this rank, by the case: cp_group and cp_p2p_group. */
static void join(rank_state *s, const shared_case *c, te_group *groups[2], int *rank) {
    groups[0] = groups[1] = NULL;
    *rank = s->rank;
    if (c->is.comm != TE_CP_A2A_P2P) {
        groups[0] = s->group;
        return;
    }
    const int a = c->is.exchange, exchange = s->rank % a, ring = s->rank / a;
    groups[0] = te_thread_group_create(s->te, c->hubs[0][ring], exchange);
    groups[1] = te_thread_group_create(s->te, c->hubs[1][exchange], ring);
    EXPECT(s, groups[0] && groups[1]);
}

static te_module *core(rank_state *s, const shared_case *c, te_group *const groups[2]) {
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.num_gqa_groups = c->groups, .attention.kv_channels = c->d ? (int)c->d : D, .attention.qkv_format = c->format,
                                       .attention.window = c->window, .attention.softmax_type = c->softmax, .attention.return_max_logit = true,
                                       .attention.checkpoint_core_attention = c->checkpoint, .attention.bottom_right_diagonal = TE_OFF};
    d.attention.attn_mask_type = c->format == TE_THD ? c->causal ? TE_MASK_PADDING_CAUSAL : TE_MASK_PADDING : c->causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    if (groups && !c->late) d.parallel.cp_group = groups[0], d.parallel.cp_p2p_group = groups[1], d.parallel.cp_comm_type = c->is.comm;
    if (c->cross) d.attention.attention_type = TE_ATTENTION_CROSS;
    te_module *m = te_dot_product_attention_create(s->te, &d);
    if (groups && c->late) EXPECT(s, te_set_context_parallel_group(m, groups[0], groups[1], c->is.comm) == TE_OK);
    if (c->softmax == TE_SOFTMAX_LEARNABLE) te_tensor_copy(te_module_parameter(m, "softmax_offset"), numbers(s->te, TE_F32, SHAPE(HEADS), 9));
    return m;
}

static void compare(rank_state *s, const shared_case *c, te_group *const groups[2], int rank) {
    te_ctx *te = s->te;
    const bool packed = c->format == TE_THD, cross_packed = packed && c->cross;
    const int ranks = c->is.ranks, seq = c->format == TE_BSHD ? 1 : 0, last = packed ? 2 : 3;
    const int64_t tail = c->tail ? TAIL : 0, t_q = packed ? TOTAL + tail : c->length, t_kv = packed ? TOTAL + tail : c->cross ? 2 * c->length : c->length;
    int64_t row[2][2 * LENGTH + TOTAL + TAIL], count[2], whole_q[1] = {t_q}, whole_kv[1] = {t_kv};
    te_tensor *x[4], *mine[4], *bias = NULL, *mine_bias = NULL;
    te_scope_begin(te);
    count[0] = packed ? rows_of(rank, ranks, SEQUENCES, padded_q, tail, row[0]) : rows_of(rank, ranks, 1, whole_q, 0, row[0]);
    count[1] = packed ? rows_of(rank, ranks, SEQUENCES, cross_packed ? padded_kv : padded_q, tail, row[1]) : rows_of(rank, ranks, 1, whole_kv, 0, row[1]);
    for (int i = 0; i < 4; i++) { /* query, key, value, the gradient of the output */
        const int64_t tokens = i == 1 || i == 2 ? t_kv : t_q, heads = i == 1 || i == 2 ? c->groups : HEADS, d = i < 2 ? D : c->d_v;
        int64_t shape[4] = {tokens, BATCH, heads, d};
        if (seq) shape[0] = BATCH, shape[1] = tokens;
        if (packed) shape[1] = heads, shape[2] = d;
        x[i] = leaf(numbers(te, c->dtype, last + 1, shape, 20 + (uint64_t)i));
        mine[i] = leaf(some_rows(x[i], seq, row[i == 1 || i == 2], count[i == 1 || i == 2]));
    }
    te_forward_args call[2] = {{.input = x[0], .key = x[1], .value = x[2]}, {.input = mine[0], .key = mine[1], .value = mine[2]}};
    for (int i = 0; packed && i < 2; i++) {
        te_attn_call *a = &call[i].attention;
        a->cu_seqlens_q = starts(te, c->padded ? true_q : padded_q);
        a->cu_seqlens_kv = starts(te, cross_packed ? c->padded ? true_kv : padded_kv : c->padded ? true_q : padded_q);
        if (c->padded) a->cu_seqlens_q_padded = starts(te, padded_q), a->cu_seqlens_kv_padded = starts(te, cross_packed ? padded_kv : padded_q);
        a->max_seqlen_q = a->max_seqlen_kv = c->cross || c->tail ? 0 : c->padded ? 18 : 32;
    }
    if (c->bias[0]) {
        bias = leaf(numbers(te, c->dtype, SHAPE(c->bias[0] > 1 ? BATCH : 1, c->bias[0] > 1 ? HEADS : 1, c->bias[1] > 1 ? t_q : 1, t_kv), 40));
        mine_bias = leaf(c->bias[1] > 1 ? some_rows(bias, 2, row[0], count[0]) : bias);
        for (int i = 0; i < 2; i++) call[i].attention.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE, call[i].attention.core_attention_bias = i ? mine_bias : bias;
    }
    te_module *m[2] = {core(s, c, NULL), core(s, c, groups)};
    te_tensor *dy = x[3], *mine_dy = mine[3];
    for (int i = 0; i < 2; i++) {
        te_tensor *y = te_forward_with(m[i], &call[i]), *grad = i ? mine_dy : dy;
        int64_t shape[3];
        EXPECT(s, y != NULL);
        if (!y) break;
        for (int j = 0; j < te_tensor_ndim(y); j++) shape[j] = te_tensor_shape(y)[j];
        EXPECT(s, te_backward_from(y, te_tensor_view(te_tensor_detach(grad), te_tensor_ndim(y), shape)) == TE_OK);
    }
    if (te_ok(te)) {
        te_no_grad_begin(te);
        same(s, c, "the output", call[1].outputs.out, some_rows(call[0].outputs.out, seq, row[0], count[0]));
        same(s, c, "max_logit", call[1].outputs.max_logit, call[0].outputs.max_logit);
        static const char *const names[] = {"the query's gradient", "the key's gradient", "the value's gradient"};
        for (int i = 0; i < 3; i++) same(s, c, names[i], te_tensor_grad(mine[i]), some_rows(te_tensor_grad(x[i]), seq, row[i > 0], count[i > 0]));
        if (bias && c->bias[1] > 1) same(s, c, "the bias's gradient", te_tensor_grad(mine_bias), some_rows(te_tensor_grad(bias), 2, row[0], count[0]));
        else if (bias) { /* rows of all ranks have one */
            te_all_reduce(s->group, te_tensor_grad(mine_bias), TE_REDUCE_SUM);
            same(s, c, "the bias's gradient", te_tensor_grad(mine_bias), te_tensor_grad(bias));
        }
        if (c->softmax == TE_SOFTMAX_LEARNABLE) {
            te_tensor *got = te_tensor_grad(te_module_parameter(m[1], "softmax_offset"));
            te_all_reduce(s->group, got, TE_REDUCE_SUM);
            same(s, c, "the gradient of softmax_offset", got, te_tensor_grad(te_module_parameter(m[0], "softmax_offset")));
        }
        te_no_grad_end(te);
    }
    te_module_destroy(m[0]);
    te_module_destroy(m[1]);
    te_scope_end(te);
}

/* ---- all that a kind takes ---- */

/* In f32 sums are in another order, and exponentials are divided by other maxima: a few times 2^-24 of each term, of up to 64 keys. On a GPU the products of f32 are in TF32, whose rounding
 * is 2^-11 of a factor, and the scores of a longer row are rounded elsewhere. In bf16 each part of an output or gradient is rounded to 2^-9 before the parts are added up. */
static double tolerance(te_ctx *te, te_dtype dtype) { return dtype == TE_BF16 ? 1e-2 : te_ctx_is_cuda(te) ? 4e-3 : 2e-6; }

static void all_cases(rank_state *s) {
    const shared_case *base = (const shared_case *)s->arg;
    te_group *groups[2];
    int rank, n = 0;
    join(s, base, groups, &rank);
    const te_cp_comm comm = base->is.comm;
    for (int format = TE_SBHD; format <= TE_THD; format++)
        for (int causal = 0; causal < 2; causal++)
            for (int option = 0; option < 6 && !s->wrong; option++) {
                shared_case c = *base;
                c.format = (te_qkv_format)format;
                c.causal = causal != 0;
                c.length = LENGTH;
                if (n++ % test_every_odd(3)) continue;
                c.groups = n % 2 ? HEADS : HEADS / 2;
                c.d_v = n % 3 == 0 ? 2 * D : D;
                c.dtype = n % 4 == 3 ? TE_BF16 : TE_F32;
                c.tolerance = tolerance(s->te, c.dtype);
                if (format == TE_THD) c.padded = n % 2 == 0, c.tail = n % 3 == 1;
                c.late = n % 5 < 2;
                if (option == 1) c.checkpoint = true;
                if (option == 2) {
                    if (causal) continue;
                    c.cross = true;
                }
                if (option == 3) {
                    if (comm != TE_CP_ALL_GATHER && comm != TE_CP_A2A) continue;
                    if (comm == TE_CP_ALL_GATHER && format == TE_THD && !causal) continue;
                    c.window.on = true, c.window.left = 5, c.window.right = causal ? 0 : 3;
                }
                if (option == 4) {
                    if (comm != TE_CP_P2P || format == TE_THD) continue;
                    c.bias[0] = 1 + causal, c.bias[1] = 1 + (format == TE_SBHD || causal);
                }
                if (option == 5) {
                    if (comm != TE_CP_A2A) continue;
                    c.softmax = causal ? TE_SOFTMAX_LEARNABLE : TE_SOFTMAX_OFF_BY_ONE;
                }
                compare(s, &c, groups, rank);
            }
    if (comm == TE_CP_A2A_P2P)
        for (int i = 0; i < 2; i++) te_group_destroy(groups[i]);
}

static void run_kind(te_ctx *te, const kind_of_ranks *kind, void (*fn)(rank_state *s)) {
    shared_case c = {.is = *kind};
    const int exchange = kind->exchange ? kind->exchange : 1, rings = kind->ranks / exchange;
    test_case("%s, %d ranks", kind->name, kind->ranks);
    for (int i = 0; kind->exchange && i < 2; i++)
        for (int j = 0; j < (i ? exchange : rings); j++) c.hubs[i][j] = te_thread_hub_create(i ? rings : exchange);
    run_ranks_on(te_ctx_is_cuda(te) ? "cuda:0" : "cpu", false, kind->ranks, fn, &c);
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) te_thread_hub_destroy(c.hubs[i][j]);
}

TE_TEST_DEVICES(context_parallel_equals_one_rank) {
    for (int k = 0; k < COUNT(kinds); k++) run_kind(te, &kinds[k], all_cases);
}

/* A ring of an odd number of ranks, and sequences without a token: every kind. */
static void three_ranks(rank_state *s) {
    shared_case c = *(const shared_case *)s->arg;
    te_group *const groups[2] = {s->group, NULL};
    c.groups = HEADS, c.d_v = D, c.dtype = TE_F32;
    c.tolerance = tolerance(s->te, c.dtype);
    for (c.length = 0; c.length <= 24; c.length += 12)
        for (int format = TE_SBHD; format <= TE_BSHD; format++)
            for (int causal = 0; causal < 2; causal++) {
                c.format = (te_qkv_format)format;
                c.causal = causal != 0;
                if (c.is.comm != TE_CP_A2A || c.length == 0) compare(s, &c, groups, s->rank);
                if (c.is.comm != TE_CP_ALL_GATHER) continue;
                shared_case wide = c; /* windows whose ends no sum with a position holds */
                wide.window.on = true, wide.window.left = causal ? INT64_MAX : 5, wide.window.right = causal ? 0 : INT64_MAX;
                compare(s, &wide, groups, s->rank);
            }
}
TE_TEST_DEVICES(context_parallel_of_three_ranks_and_of_nothing) {
    static const kind_of_ranks three[] = {{"p2p", TE_CP_P2P, 3, 0}, {"all_gather", TE_CP_ALL_GATHER, 3, 0}, {"a2a", TE_CP_A2A, 2, 0}};
    for (int k = 0; k < COUNT(three); k++) run_kind(te, &three[k], three_ranks);
}

/* Each rank has two rows of two chunks. */
static void eight_ranks(rank_state *s) {
    shared_case c = *(const shared_case *)s->arg;
    te_group *groups[2];
    int rank;
    join(s, &c, groups, &rank);
    c.groups = HEADS, c.d_v = D, c.length = LENGTH;
    for (int way = 0; way < 4; way += test_every_odd(1)) {
        c.format = way & 1 ? TE_BSHD : TE_SBHD;
        c.causal = (way & 1) == way >> 1;
        c.dtype = way == 3 ? TE_BF16 : TE_F32;
        c.tolerance = tolerance(s->te, c.dtype);
        c.late = way & 1;
        compare(s, &c, groups, rank);
    }
    for (int i = 0; i < 2 && c.is.exchange; i++) te_group_destroy(groups[i]);
}
TE_TEST(context_parallel_of_eight_ranks) {
    static const kind_of_ranks eight[] = {{"p2p", TE_CP_P2P, 8, 0}, {"all_gather", TE_CP_ALL_GATHER, 8, 0}, {"a2a", TE_CP_A2A, 8, 0}, {"a2a+p2p", TE_CP_A2A_P2P, 8, 2}, {"a2a+p2p", TE_CP_A2A_P2P, 8, 4}};
    for (int k = 0; k < COUNT(eight); k += test_every_sanitized(1)) run_kind(test_context("cpu"), &eight[k], eight_ranks);
}

/* ---- in FP8 ---- */

typedef struct fp8_case {
    shared_case shared;
    te_recipe recipe;
    bool equal; /* to one rank, bit for bit */
} fp8_case;

/* The core of a rank against that of all tokens under the same recipe, and both against high precision, over two steps: in the second one delayed scales are those that the first has seen. */
static void compare_fp8(rank_state *s, const fp8_case *f, te_group *const groups[2], int rank) {
    const shared_case *c = &f->shared;
    te_ctx *te = s->te;
    const bool packed = c->format == TE_THD;
    const int ranks = c->is.ranks, seq = c->format == TE_BSHD ? 1 : 0, last = packed ? 2 : 3;
    const int64_t tokens = packed ? TOTAL : c->length, whole[1] = {tokens};
    int64_t row[256];
    const int64_t count = packed ? rows_of(rank, ranks, SEQUENCES, padded_q, 0, row) : rows_of(rank, ranks, 1, whole, 0, row);
    te_scope_begin(te);
    te_module *m[3] = {core(s, c, NULL), core(s, c, NULL), core(s, c, groups)}; /* high precision, one rank, this rank */
    for (int step = 0; step < (f->recipe.kind == TE_RECIPE_MXFP8 ? 1 : 2) && !s->wrong; step++) {
        te_tensor *x[3][4], *y[3];
        te_scope_begin(te);
        for (int i = 0; i < 4; i++) {
            const int64_t heads = i == 1 || i == 2 ? c->groups : HEADS;
            int64_t shape[4] = {tokens, 1, heads, c->d};
            if (seq) shape[0] = 1, shape[1] = tokens;
            if (packed) shape[1] = heads, shape[2] = c->d;
            te_seed(te, 20 + (uint64_t)(8 * step + i));
            te_tensor *all = te_tensor_normal(te, c->dtype, last + 1, shape, 0, 1 - 0.25f * (float)step); /* larger numbers would be cut off by the scales of the first step */
            x[0][i] = leaf(all), x[1][i] = leaf(all), x[2][i] = leaf(some_rows(all, seq, row, count));
        }
        for (int k = 0; k < 3; k++) {
            te_forward_args call = {.input = x[k][0], .key = x[k][1], .value = x[k][2]};
            int64_t shape[3];
            if (packed) {
                call.attention.cu_seqlens_q = starts(te, c->padded ? true_q : padded_q);
                if (c->padded) call.attention.cu_seqlens_q_padded = starts(te, padded_q);
            }
            if (k) te_autocast_begin(te, &(te_autocast_desc){.recipe = &f->recipe});
            y[k] = te_forward_with(m[k], &call);
            if (k) te_autocast_end(te);
            EXPECT(s, y[k] != NULL);
            if (!y[k]) break;
            for (int j = 0; j < te_tensor_ndim(y[k]); j++) shape[j] = te_tensor_shape(y[k])[j];
            EXPECT(s, te_backward_from(y[k], te_tensor_view(te_tensor_detach(x[k][3]), te_tensor_ndim(y[k]), shape)) == TE_OK);
        }
        te_no_grad_begin(te);
        for (int i = 0; i < 4 && te_ok(te); i++) {
            static const char *const names[] = {"the query's gradient in FP8", "the key's gradient in FP8", "the value's gradient in FP8", "the output in FP8"};
            te_tensor *got = i == 3 ? y[2] : te_tensor_grad(x[2][i]), *want = some_rows(i == 3 ? y[1] : te_tensor_grad(x[1][i]), seq, row, count),
                      *exact = some_rows(i == 3 ? y[0] : te_tensor_grad(x[0][i]), seq, row, count);
            shared_case t = *c;
            /* Numbers that are rounded by two scales are 1.4 times as far apart as rounding moves each: e4m3 by 0.026 in the mean, e5m2 by 0.053. Pieces round each row of the softmax, and with
             * current scaling a rank rounds o, or dO and then dQ, dK and dV, by other scales than one rank: 0.037, and in gradients 0.075 twice and more where terms cancel. */
            t.tolerance = f->equal ? 0 : i == 3 ? 0.06 : f->recipe.kind == TE_RECIPE_CURRENT ? 0.2 : 0.12;
            same(s, &t, names[i], got, want);
            /* As near to high precision as one rank is: by 16 tokens and more of each rank, so that the two errors, of some thousand numbers, differ by chance, by up to a fifth. */
            t.tolerance = 1.3 * distance(want, exact) + 1e-3;
            same(s, &t, i == 3 ? "the error of the output in FP8" : "the error of a gradient in FP8", got, exact);
        }
        if (f->recipe.kind == TE_RECIPE_DELAYED && !s->wrong) { /* the scales of what travels, by TransformerEngine's numbers */
            float scale[2][2][16];
            for (int k = 0; k < 2; k++) {
                te_tensor_to_f32(te_module_parameter(m[1 + k], "fp8_scale_fwd"), scale[k][0]);
                te_tensor_to_f32(te_module_parameter(m[1 + k], "fp8_scale_bwd"), scale[k][1]);
            }
            EXPECT(s, scale[0][0][2] == scale[1][0][2] && scale[0][0][2] != 1); /* q, k, v */
            EXPECT(s, scale[0][1][3] == scale[1][1][3] && scale[0][1][3] != 1); /* the gradient of o */
        }
        te_no_grad_end(te);
        te_scope_end(te);
    }
    for (int k = 0; k < 3; k++) te_module_destroy(m[k]);
    te_scope_end(te);
}
static void fp8_cases(rank_state *s) {
    fp8_case f = {.shared = *(const shared_case *)s->arg};
    const te_cp_comm comm = f.shared.is.comm;
    const bool whole_heads = comm == TE_CP_A2A || (comm == TE_CP_A2A_P2P && f.shared.is.exchange == f.shared.is.ranks);
    te_group *groups[2];
    int rank, n = 0;
    join(s, &f.shared, groups, &rank);
    for (int recipe = 0; recipe < 3; recipe++)
        for (int format = TE_SBHD; format <= TE_THD; format++)
            for (int causal = 0; causal < 2; causal++) {
                shared_case *c = &f.shared;
                const bool blocks = recipe == 2;
                if (s->wrong || !te_ok(s->te)) continue;
                if (blocks && (causal || format != TE_BSHD || comm != TE_CP_P2P || c->is.ranks > 2)) continue; /* 128 tokens of each rank; one kind, since each rounds its tokens before it exchanges them */
                if (!blocks && (recipe + format + causal + (int)comm + c->is.ranks / 2) % 2) continue; /* each half of the kinds has its half */
                if (n++ % test_every_odd(1)) continue;
                f.recipe = recipe == 0 ? te_recipe_delayed_scaling() : recipe == 1 ? te_recipe_current_scaling() : te_recipe_mxfp8();
                f.recipe.fp8_dpa = n % 2 == 0, f.recipe.fp8_mha = n % 2 != 0;
                if (recipe == 0) f.recipe.delayed.no_reduce_amax = n % 3 == 0; /* says nothing of what must be equal */
                c->format = (te_qkv_format)format, c->causal = causal != 0;
                c->padded = n % 2 == 0;
                c->length = blocks ? 128 * c->is.ranks : LENGTH;
                c->groups = n % 2 ? HEADS : HEADS / 2;
                c->d = c->d_v = blocks ? 32 : 16;
                c->dtype = n % 3 == 1 ? TE_BF16 : TE_F32;
                f.equal = whole_heads && recipe != 1;
                compare_fp8(s, &f, groups, rank);
            }
    if (comm == TE_CP_A2A_P2P)
        for (int i = 0; i < 2; i++) te_group_destroy(groups[i]);
}
TE_TEST_DEVICES(context_parallel_in_fp8) {
    for (int k = 0; k < COUNT(kinds); k++)
        if (kinds[k].exchange == 0 || kinds[k].ranks == 4) run_kind(te, &kinds[k], fp8_cases);
}

/* The module around a core: its products take codes of the core (fp8_mha), and one scale of all ranks' tokens, since amaxes are reduced over them. */
static void layer_in_fp8(rank_state *s) {
    const shared_case *c = (const shared_case *)s->arg;
    te_ctx *te = s->te;
    te_group *groups[2];
    int rank;
    int64_t row[LENGTH], whole[1] = {LENGTH};
    join(s, c, groups, &rank);
    const int64_t count = rows_of(rank, c->is.ranks, 1, whole, 0, row);
    te_multihead_attention_desc d = {.hidden_size = 64, .gemm.params_dtype = TE_F32, .attention.num_attention_heads = 4, .input_layernorm = true};
    for (int i = 0; i < 2; i++) {
        te_recipe recipe = i ? te_recipe_current_scaling() : te_recipe_delayed_scaling();
        te_module *m[2];
        recipe.fp8_mha = true;
        te_scope_begin(te);
        for (int k = 0; k < 2; k++) te_seed(te, 6), m[k] = te_multihead_attention_create(te, &d);
        EXPECT(s, te_set_context_parallel_group(m[1], groups[0], groups[1], c->is.comm) == TE_OK);
        for (int step = 0; step < 2 && te_ok(te); step++) {
            te_tensor *all = numbers(te, TE_F32, 3, (const int64_t[]){LENGTH, 1, 64}, 3 + (uint64_t)step), *x[2] = {leaf(all), leaf(some_rows(all, 0, row, count))}, *y[2];
            for (int k = 0; k < 2; k++) {
                te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .amax_group = k ? s->group : NULL});
                y[k] = te_forward(m[k], x[k]);
                te_autocast_end(te);
                EXPECT(s, y[k] && te_backward(te_scale(te_sum_all(te_mul(y[k], y[k])), 1e-2f)) == TE_OK);
                if (!y[k]) return;
            }
            shared_case t = *c; /* as in compare_fp8; a product more, and gradients of it */
            te_no_grad_begin(te);
            t.tolerance = 0.08;
            same(s, &t, "the output of a module in FP8", y[1], some_rows(y[0], 0, row, count));
            t.tolerance = 0.25;
            same(s, &t, "the input's gradient of a module in FP8", te_tensor_grad(x[1]), some_rows(te_tensor_grad(x[0]), 0, row, count));
            te_no_grad_end(te);
        }
        for (int k = 0; k < 2; k++) te_module_destroy(m[k]);
        te_scope_end(te);
    }
    if (c->is.comm == TE_CP_A2A_P2P)
        for (int i = 0; i < 2; i++) te_group_destroy(groups[i]);
}
TE_TEST_DEVICES(context_parallel_hands_codes_on) {
    for (int k = 0; k < COUNT(kinds); k++)
        if (kinds[k].exchange == 0 || kinds[k].ranks == 4) run_kind(te, &kinds[k], layer_in_fp8);
}

/* ---- modules around it ---- */

/* Three steps of a layer, or of its attention alone, with rotated heads, whose ranks add up the gradients of the parameters, against those of one rank. */
enum { HIDDEN = 32, STEPS = 3 };
static te_module *layer(te_ctx *te, const shared_case *c, bool thd) {
    te_transformer_layer_desc d = {.hidden_size = HIDDEN, .ffn_hidden_size = HIDDEN, .gemm.params_dtype = TE_F32, .attention.num_attention_heads = 4, .attention.num_gqa_groups = 2,
                                   .attention.qkv_format = c->format, .attention.qk_norm_type = TE_QK_NORM_RMSNORM, .norm.normalization = TE_RMSNORM, .activation = TE_SWIGLU};
    te_multihead_attention_desc a = {.hidden_size = HIDDEN, .gemm = d.gemm, .norm = d.norm, .attention = d.attention, .input_layernorm = true};
    te_seed(te, 5);
    if (c->format == TE_BSHD) return te_multihead_attention_create(te, &a);
    if (thd) d.attention.attn_mask_type = TE_MASK_PADDING_CAUSAL;
    return te_transformer_layer_create(te, &d);
}
static te_tensor *twin(te_module *m, const char *path) {
    char copy[256], *dot;
    snprintf(copy, sizeof copy, "%s", path);
    dot = strrchr(copy, '.');
    *dot = 0;
    return te_module_parameter(te_module_find(m, copy), dot + 1);
}
typedef struct visit {
    rank_state *s;
    const shared_case *c;
    te_module *whole;
    bool gradients;
} visit;
static bool compare_one(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    visit *v = (visit *)user;
    te_tensor *want = kind == TE_ENTRY_PARAMETER ? twin(v->whole, path) : NULL;
    (void)m;
    if (!want) return true;
    te_no_grad_begin(v->s->te);
    if (v->gradients) {
        te_all_reduce(v->s->group, te_tensor_grad(x), TE_REDUCE_SUM);
        same(v->s, v->c, path, te_tensor_grad(x), te_tensor_grad(want));
    } else
        same(v->s, v->c, path, x, want);
    te_no_grad_end(v->s->te);
    return true;
}
static void train(rank_state *s, const shared_case *c, te_group *const groups[2], int rank) {
    te_ctx *te = s->te;
    const bool thd = c->format == TE_THD;
    const int seq = c->format == TE_BSHD ? 1 : 0;
    const int64_t tokens = thd ? TOTAL : LENGTH, whole_length[1] = {LENGTH};
    int64_t row[TOTAL];
    const int64_t count = thd ? rows_of(rank, c->is.ranks, SEQUENCES, padded_q, 0, row) : rows_of(rank, c->is.ranks, 1, whole_length, 0, row);
    te_fused_adam_desc adam = {.lr = 0.2f, .eps = 100.0f}; /* the step is nearly proportional to the gradient, so that noise is not blown up */
    te_rotary_desc rotary = {.seq_len_interpolation_factor = 2, .pretrained_max_position_embeddings = 8}; /* which looks at the length of whole sequences */
    te_scope_begin(te);
    te_module *m[2] = {layer(te, c, thd), layer(te, c, thd)};
    EXPECT(s, te_ok(te) && te_set_context_parallel_group(m[1], groups[0], groups[1], c->is.comm) == TE_OK);
    te_optimizer *opt[2] = {te_fused_adam_create(te, m[0], &adam), te_fused_adam_create(te, m[1], &adam)};
    for (int step = 0; step < STEPS && te_ok(te) && !s->wrong; step++) {
        te_scope_begin(te);
        int64_t shape[3] = {tokens, BATCH, HIDDEN};
        if (seq) shape[0] = BATCH, shape[1] = tokens;
        if (thd) shape[1] = HIDDEN;
        te_tensor *x = leaf(numbers(te, TE_F32, thd ? 2 : 3, shape, 50 + (uint64_t)step)), *dy = numbers(te, TE_F32, thd ? 2 : 3, shape, 60), *mine = leaf(some_rows(x, seq, row, count));
        for (int i = 0; i < 2; i++) {
            te_forward_args call = {.input = i ? mine : x, .rotary = &rotary};
            if (thd) call.attention.cu_seqlens_q = starts(te, padded_q), call.attention.max_seqlen_q = 32;
            te_tensor *y = te_forward_with(m[i], &call);
            EXPECT(s, y && te_backward_from(y, i ? some_rows(dy, seq, row, count) : dy) == TE_OK);
        }
        if (!te_ok(te)) break;
        te_no_grad_begin(te);
        same(s, c, "the input's gradient", te_tensor_grad(mine), some_rows(te_tensor_grad(x), seq, row, count));
        te_no_grad_end(te);
        visit v = {s, c, m[0], true};
        te_module_visit_tensors(m[1], compare_one, &v);
        te_optimizer_step(opt[0]);
        te_optimizer_step(opt[1]);
        v.gradients = false;
        te_module_visit_tensors(m[1], compare_one, &v);
        te_scope_end(te);
    }
    for (int i = 0; i < 2; i++) te_optimizer_destroy(opt[i]), te_module_destroy(m[i]);
    te_scope_end(te);
}
static void train_formats(rank_state *s) {
    shared_case c = *(const shared_case *)s->arg;
    te_group *groups[2];
    int rank;
    join(s, &c, groups, &rank);
    c.causal = true;
    c.tolerance = te_ctx_is_cuda(s->te) ? 1e-2 : 1e-5; /* as above, through seven products and two norms */
    for (int format = TE_SBHD; format <= TE_THD; format++) {
        c.format = (te_qkv_format)format;
        train(s, &c, groups, rank);
    }
    if (c.is.comm == TE_CP_A2A_P2P)
        for (int i = 0; i < 2; i++) te_group_destroy(groups[i]);
}
TE_TEST_DEVICES(context_parallel_trains_a_layer) {
    for (int k = 0; k < 3; k++) run_kind(te, &kinds[k], train_formats);
    run_kind(te, &kinds[7], train_formats);
}

/* ---- dropout ---- */

/* The backward pass has the bits of the forward pass: with v = 1, and dO = 1, both sides add up the same kept probabilities. Ranks that are seeded alike drop different elements. */
static void drops(rank_state *s) {
    const shared_case *c = (const shared_case *)s->arg;
    te_ctx *te = s->te;
    te_group *groups[2];
    int rank;
    join(s, c, groups, &rank);
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.kv_channels = D, .attention.attn_mask_type = TE_MASK_NONE, .attention.attention_dropout = 0.5f,
                                       .parallel.cp_group = groups[0], .parallel.cp_p2p_group = groups[1], .parallel.cp_comm_type = c->is.comm};
    te_module *m = te_dot_product_attention_create(te, &d);
    te_tensor *q = te_tensor_zeros(te, TE_F32, SHAPE(LENGTH, 1, HEADS, D)), *one = te_tensor_full(te, TE_F32, SHAPE(LENGTH, 1, HEADS, D), 1), *v = leaf(one);
    float *y = (float *)malloc(LENGTH * HEADS * D * sizeof(float)), *dv = (float *)malloc(LENGTH * HEADS * D * sizeof(float));
    te_seed(te, 7);
    te_tensor *out = te_forward_with(m, &(te_forward_args){.input = q, .key = q, .value = v});
    EXPECT(s, out && te_backward_from(out, te_tensor_view(one, SHAPE(LENGTH, 1, HEADS * D))) == TE_OK);
    te_tensor *sums = te_tensor_zeros(te, TE_F32, SHAPE(2));
    double kept = 0, given = 0;
    te_tensor_to_f32(out, y);
    te_tensor_to_f32(te_tensor_grad(v), dv);
    for (int i = 0; i < LENGTH * HEADS * D; i++) kept += y[i], given += dv[i];
    const float both[2] = {(float)kept, (float)given};
    te_tensor_copy_from_host(sums, both);
    te_no_grad_begin(te);
    te_all_reduce(s->group, sums, TE_REDUCE_SUM);
    te_no_grad_end(te);
    float all[2];
    te_tensor_to_f32(sums, all);
    EXPECT(s, fabs(all[0] - all[1]) < 1e-4 * fabs(all[0])); /* the same terms in another order */
    /* means of LENGTH * ranks * HEADS rows of elements that are 2 or 0: within five standard deviations, and not without any */
    const double rows = (double)LENGTH * c->is.ranks * HEADS, mean = all[0] / (rows * D), spread = 1 / sqrt(rows * LENGTH * c->is.ranks);
    EXPECT(s, fabs(mean - 1) < 5 * spread && mean != 1);
    s->left[s->num_left] = y, s->bytes[s->num_left++] = LENGTH * HEADS * D * sizeof(float);
    free(dv);
    te_module_destroy(m);
    if (c->is.comm == TE_CP_A2A_P2P)
        for (int i = 0; i < 2; i++) te_group_destroy(groups[i]);
}
TE_TEST(context_parallel_drops_the_same_elements_back) {
    for (int k = 0; k < COUNT(kinds); k++) {
        shared_case c = {.is = kinds[k]};
        if (c.is.comm == TE_CP_A2A_P2P) continue;
        test_case("%s, %d ranks", c.is.name, c.is.ranks);
        rank_state *all = run_ranks(c.is.ranks, drops, &c);
        CHECK(memcmp(all[0].left[0], all[1].left[0], all[0].bytes[0]) != 0);
    }
}

/* ---- batches ---- */

/* Test vectors of TransformerEngine's test_cp_utils.py: sequences that are shorter than the factor, and longer ones. */
TE_TEST_DEVICES(context_parallel_pads_sequences) {
    static const int64_t ids[] = {1, 1, 1, 2, 2, 3, 3, 3, 3}, labels[] = {-100, -100, -100, -100, -100, -100, -100, 13, -100}, cu[] = {0, 3, 5, 9};
    static const float want_ids[] = {1, 1, 1, 777, 777, 777, 777, 777, 2, 2, 777, 777, 777, 777, 777, 777, 3, 3, 3, 3, 777, 777, 777, 777};
    static const float want_labels[] = {-100, -100, -100, -200, -200, -200, -200, -200, -100, -100, -200, -200, -200, -200, -200, -200, -100, -100, 13, -100, -200, -200, -200, -200};
    static const float want_cu[] = {0, 8, 16, 24}, want_positions[] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
    te_padded_sequences out;
    te_tensor *starts = test_i32(te, SHAPE(4), cu);
    for (int flat = 0; flat < 2; flat++) {
        te_tensor *x = te_tensor_from_host(te, TE_I64, SHAPE(1, 9), ids), *y = te_tensor_from_host(te, TE_I64, SHAPE(1, 9), labels);
        if (flat) x = test_i32(te, SHAPE(9), ids);
        CHECK(te_pad_thd_sequences_for_cp(x, y, starts, 8, 777, -200, &out) == TE_OK);
        REQUIRE_OK(te);
        CHECK(te_tensor_dtype(out.input_ids) == (flat ? TE_I32 : TE_I64) && te_tensor_ndim(out.labels) == 1 && te_tensor_numel(out.labels) == 24);
        CHECK_TENSOR(out.input_ids, want_ids, 0, 0);
        CHECK_TENSOR(out.labels, want_labels, 0, 0);
        CHECK_TENSOR(out.cu_seqlens_padded, want_cu, 0, 0);
        te_tensor *positions = te_generate_positional_ids_for_cp(starts, 8, flat ? TE_I32 : TE_DTYPE_NONE);
        CHECK(positions && te_tensor_dtype(positions) == (flat ? TE_I32 : TE_I64));
        CHECK_TENSOR(positions, want_positions, 0, 0);
    }
    static const int64_t mixed[] = {0, 2, 9, 13, 23};
    static const float want_mixed[] = {0, 6, 18, 24, 36};
    CHECK(te_pad_thd_sequences_for_cp(te_tensor_zeros(te, TE_I64, SHAPE(23)), NULL, test_i32(te, SHAPE(5), mixed), 6, 999, -300, &out) == TE_OK);
    CHECK(!out.labels && te_tensor_numel(out.input_ids) == 36);
    CHECK_TENSOR(out.cu_seqlens_padded, want_mixed, 0, 0);
    CHECK(te_pad_thd_sequences_for_cp(te_tensor_zeros(te, TE_I32, SHAPE(0)), NULL, test_i32(te, SHAPE(1), cu), 4, 0, -100, &out) == TE_OK && te_tensor_numel(out.input_ids) == 0);
    /* what cannot be */
    CHECK(te_pad_thd_sequences_for_cp(te_tensor_zeros(te, TE_I64, SHAPE(8)), NULL, starts, 8, 0, -100, &out) == TE_ERR_INVALID && !out.input_ids);
    CHECK_ERROR(te, TE_ERR_INVALID, "cu_seqlens[3] is 9, behind 5 and of 8 tokens");
    CHECK(te_pad_thd_sequences_for_cp(te_tensor_zeros(te, TE_I64, SHAPE(9)), te_tensor_zeros(te, TE_I64, SHAPE(8)), starts, 8, 0, -100, &out) == TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "labels is i64 [8]; i32 or i64 [9] or [1, 9] is needed");
    CHECK(te_pad_thd_sequences_for_cp(te_tensor_zeros(te, TE_F32, SHAPE(9)), NULL, starts, 8, 0, -100, &out) == TE_ERR_DTYPE);
    CHECK_ERROR(te, TE_ERR_DTYPE, "input_ids is f32 [9]");
    CHECK(te_pad_thd_sequences_for_cp(te_tensor_zeros(te, TE_I64, SHAPE(9)), NULL, starts, 0, 0, -100, &out) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "divisibility_factor is 0");
    for (int bits = 31; bits < 63; bits++) { /* factors whose multiples no size can hold */
        const int64_t factor = bits == 62 ? INT64_MAX : (int64_t)1 << bits;
        CHECK(te_pad_thd_sequences_for_cp(te_tensor_zeros(te, TE_I64, SHAPE(9)), NULL, starts, factor, 0, -100, &out) == TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "1 to 2^31 - 1 are possible");
        CHECK(!te_generate_positional_ids_for_cp(starts, factor, TE_I64));
        CHECK_ERROR(te, TE_ERR_INVALID, "1 to 2^31 - 1 are possible");
    }
    CHECK(te_pad_thd_sequences_for_cp(te_tensor_zeros(te, TE_I64, SHAPE(9)), NULL, starts, INT32_MAX, 0, -100, &out) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "4294967294 tokens with their padding");
    CHECK(!te_generate_positional_ids_for_cp(starts, INT32_MAX, TE_I32));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "6442450941 tokens with their padding");
    CHECK(!te_generate_positional_ids_for_cp(starts, 8, TE_F32));
    CHECK_ERROR(te, TE_ERR_DTYPE, "dtype is f32; i32 and i64 are possible");
    CHECK(!te_generate_positional_ids_for_cp(te_tensor_zeros(te, TE_I64, SHAPE(3)), 8, TE_I64));
    CHECK_ERROR(te, TE_ERR_SHAPE, "cu_seqlens is i64 [3]; i32 [b + 1] is needed");
}

/* Batches of every format and order of dimensions, there and back. */
static void divide(rank_state *s) {
    const shared_case *c = (const shared_case *)s->arg;
    te_ctx *te = s->te;
    static const te_dtype formats[] = {TE_I64, TE_BF16, TE_U8};
    const int64_t sizes[][4] = {{LENGTH, BATCH, 3, 1}, {BATCH, LENGTH, 3, 2}, {TOTAL + TAIL, 3, 1, 1}, {1, TOTAL + TAIL, 1, 1}, {BATCH, LENGTH, 1, 1}, {LENGTH, 1, 1, 1}};
    const te_qkv_format lies[] = {TE_SBHD, TE_BSHD, TE_THD, TE_THD, TE_BSHD, TE_SBHD};
    const int ndim[] = {4, 4, 2, 2, 2, 1}, dim[] = {0, 1, 0, 1, 1, 0};
    te_group *groups[2];
    int rank;
    join(s, c, groups, &rank);
    for (int i = 0; i < COUNT(sizes); i++)
        for (int k = 0; k < COUNT(formats); k++) {
            const int64_t whole_length[1] = {LENGTH};
            const bool packed = lies[i] == TE_THD;
            int64_t row[TOTAL + TAIL], n = 1, count = packed ? rows_of(rank, c->is.ranks, SEQUENCES, padded_q, TAIL, row) : rows_of(rank, c->is.ranks, 1, whole_length, 0, row);
            for (int d = 0; d < ndim[i]; d++) n *= sizes[i][d];
            float *values = (float *)malloc((size_t)n * sizeof(float));
            for (int64_t j = 0; j < n; j++) values[j] = (float)(j * 7 % 251);
            te_tensor *all = te_tensor_from_f32(te, TE_F32, ndim[i], sizes[i], values), *x = te_tensor_empty(te, formats[k], ndim[i], sizes[i]);
            te_tensor_copy(x, all);
            free(values);
            te_cp_batch batch = {.cp_group = groups[0], .cp_p2p_group = groups[1], .format = lies[i], .cu_seqlens_padded = packed ? starts(te, padded_q) : NULL};
            te_tensor *mine = te_get_batch_on_this_cp_rank(x, &batch), *back = mine ? te_gather_batch_of_cp_ranks(mine, &batch) : NULL;
            EXPECT(s, mine && te_tensor_dtype(mine) == formats[k] && distance(mine, some_rows(x, dim[i], row, count)) == 0);
            EXPECT(s, back && te_tensor_ndim(back) == ndim[i] && distance(back, x) == 0);
            if (packed && k == 0 && mine && te_ok(te)) {
                te_tensor *indices = te_thd_get_partitioned_indices(batch.cu_seqlens_padded, TOTAL + TAIL, c->is.ranks, rank);
                float got[TOTAL + TAIL];
                EXPECT(s, indices && te_tensor_numel(indices) == count && te_tensor_to_f32(indices, got) == TE_OK);
                for (int64_t j = 0; j < count && te_ok(te); j++) EXPECT(s, got[j] == (float)row[j]);
            }
        }
    if (c->is.comm == TE_CP_A2A_P2P)
        for (int i = 0; i < 2; i++) te_group_destroy(groups[i]);
}
TE_TEST_DEVICES(context_parallel_divides_batches) {
    run_kind(te, &kinds[0], divide);
    run_kind(te, &kinds[6], divide);
    te_tensor *x = te_tensor_zeros(te, TE_I64, SHAPE(6)), *alone;
    alone = te_get_batch_on_this_cp_rank(x, &(te_cp_batch){.format = TE_SBHD});
    CHECK(alone && alone != x && te_tensor_numel(alone) == 6);
    CHECK(!te_get_batch_on_this_cp_rank(x, &(te_cp_batch){.format = TE_THD}));
    CHECK_ERROR(te, TE_ERR_INVALID, "cu_seqlens_padded is NULL with TE_THD");
    CHECK(!te_get_batch_on_this_cp_rank(x, &(te_cp_batch){.format = TE_BSHD}));
    CHECK_ERROR(te, TE_ERR_SHAPE, "the batch is [6], with format 1");
    CHECK(!te_get_batch_on_this_cp_rank(x, &(te_cp_batch){.format = (te_qkv_format)7}));
    CHECK_ERROR(te, TE_ERR_INVALID, "format is 7");
    CHECK(!te_get_batch_on_this_cp_rank(x, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "desc is NULL");
    CHECK(!te_thd_get_partitioned_indices(test_i32(te, SHAPE(2), (const int64_t[]){0, 6}), 6, 2, 0));
    CHECK_ERROR(te, TE_ERR_INVALID, "rank 0 of 2, and 6 tokens");
}

/* ---- refusals ---- */

static void refused(rank_state *s, te_result code, const char *words) {
    char text[1024];
    if (te_error_code(s->te) != code || !strstr(te_error(s->te), words)) {
        snprintf(text, sizeof text, "%s: %.400s: not \"%s\"", te_result_name(te_error_code(s->te)), te_error(s->te), words);
        wrong(s, text);
    }
    te_clear_error(s->te);
}
static void refuse_call(rank_state *s, const te_dot_product_attention_desc *d, te_forward_args *call, te_result code, const char *words) {
    te_module *m = te_dot_product_attention_create(s->te, d);
    EXPECT(s, m && !te_forward_with(m, call));
    refused(s, code, words);
    te_module_destroy(m);
}
static te_result refusing_factory(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    (void)user, (void)role;
    desc->kind = TE_QUANT_CURRENT;
    return TE_OK;
}
static void refusals(rank_state *s) {
    te_ctx *te = s->te, *other = te_ctx_create(&(te_ctx_desc){.log = no_log});
    te_dot_product_attention_desc good = {.attention.num_attention_heads = 4, .attention.kv_channels = 8, .parallel.cp_group = s->group}, d = good;
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 4, 8)), *odd = te_tensor_zeros(te, TE_F32, SHAPE(3, 2, 4, 8)), *longer = te_tensor_zeros(te, TE_F32, SHAPE(8, 2, 4, 8));
    te_forward_args call = {.input = x, .key = x, .value = x};
    /* groups */
    d.parallel.cp_comm_type = (te_cp_comm)4;
    EXPECT(s, !te_dot_product_attention_create(te, &d));
    refused(s, TE_ERR_INVALID, "cp_comm_type 4; TE_CP_P2P (0) to TE_CP_A2A_P2P (3) are possible");
    d.parallel.cp_comm_type = TE_CP_A2A_P2P;
    EXPECT(s, !te_dot_product_attention_create(te, &d));
    refused(s, TE_ERR_INVALID, "cp_comm_type TE_CP_A2A_P2P, cp_group given and cp_p2p_group NULL");
    d.parallel.cp_comm_type = TE_CP_A2A, d.parallel.cp_p2p_group = s->group;
    EXPECT(s, !te_dot_product_attention_create(te, &d));
    refused(s, TE_ERR_INVALID, "cp_comm_type TE_CP_A2A, cp_group given and cp_p2p_group given");
    te_module *m = te_dot_product_attention_create(other, &(te_dot_product_attention_desc){.attention.num_attention_heads = 4, .attention.kv_channels = 8});
    EXPECT(s, te_set_context_parallel_group(m, s->group, NULL, TE_CP_P2P) == TE_ERR_INVALID && strstr(te_error(other), "cp_group is of another context"));
    te_ctx_destroy(other);
    EXPECT(s, te_set_context_parallel_group(NULL, s->group, NULL, TE_CP_P2P) == TE_ERR_STATE);
    /* masks, windows, biases, offsets, sizes: what each kind takes */
    d = good, d.attention.attn_mask_type = TE_MASK_CAUSAL_BOTTOM_RIGHT;
    refuse_call(s, &d, &call, TE_ERR_UNSUPPORTED, "attn_mask_type 3 with qkv_format 0, and cp_group with 2 ranks");
    d = good, d.attention.window.on = true, d.attention.window.left = 2;
    refuse_call(s, &d, &call, TE_ERR_UNSUPPORTED, "window (2, 0) with cp_comm_type TE_CP_P2P over 2 ranks");
    d = good, d.attention.softmax_type = TE_SOFTMAX_OFF_BY_ONE;
    refuse_call(s, &d, &call, TE_ERR_UNSUPPORTED, "softmax_type 1 with cp_comm_type TE_CP_P2P over 2 ranks");
    call.attention.core_attention_bias_type = TE_ATTN_BIAS_ALIBI;
    refuse_call(s, &good, &call, TE_ERR_UNSUPPORTED, "core_attention_bias_type 3 with qkv_format 0 and cp_comm_type TE_CP_P2P");
    call.attention.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE, call.attention.core_attention_bias = te_tensor_zeros(te, TE_F32, SHAPE(1, 4, 4, 4));
    refuse_call(s, &good, &call, TE_ERR_SHAPE, "core_attention_bias is [1, 4, 4, 4]; of 4 queries of this rank and 8 keys of all 2");
    d = good, d.parallel.cp_comm_type = TE_CP_ALL_GATHER;
    refuse_call(s, &d, &call, TE_ERR_UNSUPPORTED, "core_attention_bias_type 2 with qkv_format 0 and cp_comm_type TE_CP_ALL_GATHER");
    memset(&call.attention, 0, sizeof call.attention);
    call.attention.score_mod = &(te_score_mod){.additive = true};
    refuse_call(s, &good, &call, TE_ERR_UNSUPPORTED, "score_mod, and cp_group with 2 ranks");
    call.attention.score_mod = NULL;
    call.input = call.key = call.value = odd;
    refuse_call(s, &good, &call, TE_ERR_SHAPE, "3 queries and 3 keys of each sequence, and cp_group 2 ranks");
    call.input = x, call.key = call.value = longer;
    refuse_call(s, &good, &call, TE_ERR_UNSUPPORTED, "4 queries and 8 keys, with attn_mask_type 2");
    call.key = x, call.value = longer;
    refuse_call(s, &good, &call, TE_ERR_SHAPE, "value is [8, 2, 4, 8], and key has 4 tokens of 4 heads");
    call.value = x;
    d = good, d.parallel.cp_comm_type = TE_CP_A2A, d.attention.num_gqa_groups = 1;
    call.key = call.value = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 1, 8));
    refuse_call(s, &d, &call, TE_ERR_SHAPE, "4 heads in 1 groups with cp_comm_type TE_CP_A2A over 2 ranks");
    call.key = call.value = x;
    te_recipe own = te_recipe_custom(refusing_factory, NULL), r = te_recipe_mxfp8();
    own.fp8_dpa = r.fp8_dpa = true;
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &r});
    refuse_call(s, &good, &call, TE_ERR_SHAPE, "with fp8_dpa of recipe mxfp8: sequences that are multiples of 128");
    te_autocast_end(te);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &own});
    refuse_call(s, &good, &call, TE_ERR_UNSUPPORTED, "fp8_dpa or fp8_mha of recipe custom, and cp_group with 2 ranks");
    te_autocast_end(te);
    te_no_grad_begin(te);
    te_inference_params *cache = te_inference_params_create(te, &(te_inference_params_desc){.max_batch_size = 2, .max_sequence_length = 8, .num_heads_kv = 4, .head_dim_k = 8, .dtype = TE_F32});
    call.attention.inference_params = cache;
    m = te_dot_product_attention_create(te, &good);
    EXPECT(s, !te_forward_with(m, &call));
    te_clear_error(te); /* the cache says first that it has not begun a step */
    te_module_destroy(m);
    te_inference_params_destroy(cache);
    te_no_grad_end(te);
    call.attention.inference_params = NULL;
    /* packed */
    d = good, d.attention.qkv_format = TE_THD, d.attention.attn_mask_type = TE_MASK_PADDING_CAUSAL;
    te_tensor *packed = te_tensor_zeros(te, TE_F32, SHAPE(8, 4, 8));
    te_forward_args thd = {.input = packed, .key = packed, .value = packed, .attention.cu_seqlens_q = test_i32(te, SHAPE(3), (const int64_t[]){0, 6, 16})};
    refuse_call(s, &d, &thd, TE_ERR_INVALID, "cu_seqlens_padded[1] is 6");
    d.parallel.cp_comm_type = TE_CP_ALL_GATHER;
    refuse_call(s, &d, &thd, TE_ERR_INVALID, "cu_seqlens[1] is 6");
    d.attention.attn_mask_type = TE_MASK_PADDING, d.attention.window.on = true, d.attention.window.left = d.attention.window.right = 2;
    refuse_call(s, &d, &thd, TE_ERR_UNSUPPORTED, "window (2, 2) with attn_mask_type 4, qkv_format TE_THD and TE_CP_ALL_GATHER");
    d.attention.attn_mask_type = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, d.attention.window.right = 0;
    refuse_call(s, &d, &thd, TE_ERR_UNSUPPORTED, "attn_mask_type 6 with qkv_format 2, and cp_group with 2 ranks");
    /* a rotation that says otherwise */
    te_multihead_attention_desc a = {.hidden_size = 32, .attention.num_attention_heads = 4, .parallel.cp_group = s->group};
    m = te_multihead_attention_create(te, &a);
    EXPECT(s, !te_forward_with(m, &(te_forward_args){.input = te_tensor_zeros(te, TE_BF16, SHAPE(4, 2, 32)), .rotary = &(te_rotary_desc){.cp_size = 4}}));
    refused(s, TE_ERR_INVALID, "rotary->cp_rank is 0 of cp_size 4, and its core is rank");
    te_module_destroy(m);
}
TE_TEST(context_parallel_refusals) { run_ranks(2, refusals, NULL); }

/* One rank alone refuses: all hear of it, in every kind, and the next call of all goes well. */
static void one_refuses(rank_state *s) {
    const shared_case *c = (const shared_case *)s->arg;
    te_ctx *te = s->te;
    te_group *groups[2];
    int rank;
    join(s, c, groups, &rank);
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.kv_channels = D, .attention.return_max_logit = true, .parallel.cp_group = groups[0],
                                       .parallel.cp_p2p_group = groups[1], .parallel.cp_comm_type = c->is.comm};
    te_module *m = te_dot_product_attention_create(te, &d);
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(4, 1, HEADS, D), 1), *odd = te_tensor_zeros(te, TE_F32, SHAPE(3, 1, HEADS, D));
    for (int round = 0; round < 4; round++) {
        te_tensor *own = round % 2 == 0 && rank == c->is.ranks - 1 ? odd : x, *y = te_forward_with(m, &(te_forward_args){.input = own, .key = own, .value = own});
        EXPECT(s, round % 2 ? y && te_ok(te) : !y && strstr(te_error(te), "3 queries and 3 keys"));
        te_clear_error(te);
    }
    te_module_destroy(m);
    if (c->is.comm == TE_CP_A2A_P2P)
        for (int i = 0; i < 2; i++) te_group_destroy(groups[i]);
}
TE_TEST(context_parallel_refusal_of_one_rank_is_heard) {
    te_ctx *te = test_context("cpu");
    for (int k = 0; k < COUNT(kinds) - 2; k++) run_kind(te, &kinds[k], one_refuses);
}

/* Ranks whose recipes differ would exchange other tensors: they compare them first. The last round is alike. */
static void recipes_differ(rank_state *s) {
    te_ctx *te = s->te;
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.kv_channels = D, .parallel.cp_group = s->group};
    te_module *m = te_dot_product_attention_create(te, &d);
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(4, 1, HEADS, D), 1);
    for (int round = 0; round < 3; round++) { /* another recipe, another option, alike */
        te_recipe recipe = round || s->rank ? te_recipe_current_scaling() : te_recipe_delayed_scaling();
        recipe.fp8_dpa = true;
        recipe.current.power_of_two_scales = round == 1 && s->rank;
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        te_tensor *y = te_forward_with(m, &(te_forward_args){.input = x, .key = x, .value = x});
        te_autocast_end(te);
        EXPECT(s, round == 2 ? y && te_ok(te) : !y && strstr(te_error(te), round ? "Rank 0: core_attention: attention" : "recipe delayed (") && strstr(te_error(te), "recipe current ("));
        te_clear_error(te);
    }
    te_module_destroy(m);
}
TE_TEST(context_parallel_recipes_differ) { run_ranks(2, recipes_differ, NULL); }

/* A rank whose part of a batch did not come about. */
static void one_has_no_part(rank_state *s) {
    const shared_case *c = (const shared_case *)s->arg;
    te_group *groups[2];
    int rank;
    join(s, c, groups, &rank);
    te_cp_batch batch = {.cp_group = groups[0], .cp_p2p_group = groups[1]};
    te_tensor *x = te_tensor_zeros(s->te, TE_I32, SHAPE(4));
    for (int round = 0; round < 4; round++) {
        te_tensor *y = te_gather_batch_of_cp_ranks(round % 2 == 0 && rank == c->is.ranks - 1 ? NULL : x, &batch);
        EXPECT(s, round % 2 ? y && te_ok(s->te) : !y && strstr(te_error(s->te), "x is NULL"));
        te_clear_error(s->te);
    }
    if (c->is.comm == TE_CP_A2A_P2P)
        for (int i = 0; i < 2; i++) te_group_destroy(groups[i]);
}
TE_TEST(context_parallel_part_of_a_batch_is_missing) {
    te_ctx *te = test_context("cpu");
    run_kind(te, &kinds[0], one_has_no_part);
    run_kind(te, &kinds[6], one_has_no_part);
    CHECK(!te_gather_batch_of_cp_ranks(NULL, NULL) && !te_gather_batch_of_cp_ranks(NULL, &(te_cp_batch){0}));
}

/* ---- want of memory ---- */

/* One rank runs out of memory on its way through a step: nobody waits for it for ever, and where both ranks have heard of it the next step goes well. */
typedef struct starving {
    te_cp_comm comm;
    te_qkv_format format;
    int request;
    bool fp8;
} starving;
static te_result starve_once(rank_state *s, te_module *m, const starving *arg, float *first) {
    te_ctx *te = s->te;
    te_scope_begin(te);
    te_tensor *x = leaf(arg->format == TE_THD ? te_tensor_full(te, TE_BF16, SHAPE(8, 4, 8), 1) : te_tensor_full(te, TE_BF16, SHAPE(4, 2, 4, 8), 1));
    te_forward_args call = {.input = x, .key = x, .value = x};
    if (arg->format == TE_THD) call.attention.cu_seqlens_q = test_i32(te, SHAPE(3), (const int64_t[]){0, 4, 16});
    te_recipe recipe = te_recipe_current_scaling();
    recipe.fp8_dpa = true;
    if (arg->fp8) te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    te_tensor *y = te_forward_with(m, &call);
    if (arg->fp8) te_autocast_end(te);
    te_result r = y ? te_backward(te_sum_all(y)) : te_error_code(te);
    if (y && r == TE_OK && first) r = te_tensor_to_f32(te_tensor_narrow(te_tensor_view(te_tensor_grad(x), SHAPE(te_tensor_numel(x))), 0, 0, 1), first);
    te_scope_end(te);
    return r;
}
static void starve_step(rank_state *s) {
    const starving *arg = (const starving *)s->arg;
    te_ctx *te = s->te;
    te_dot_product_attention_desc d = {.attention.num_attention_heads = 4, .attention.kv_channels = 8, .attention.qkv_format = arg->format, .attention.return_max_logit = true,
                                       .parallel.cp_group = s->group, .parallel.cp_comm_type = arg->comm};
    float first = 0, again = 0;
    if (arg->format == TE_THD) d.attention.attn_mask_type = TE_MASK_PADDING_CAUSAL;
    te_module *m = te_dot_product_attention_create(te, &d);
    EXPECT(s, m && starve_once(s, m, arg, &first) == TE_OK);
    EXPECT(s, te_ok(te) && te_barrier(s->group) == TE_OK);
    te_memory_trim(te);
    if (s->rank == 1) s->fail_at = s->requests + arg->request;
    s->failed = starve_once(s, m, arg, NULL) != TE_OK;
    s->fail_at = 0;
    if (strstr(te_error(te), "rank 1 failed")) s->left[s->num_left++] = NULL; /* told by the rank itself, and not by its end */
    te_clear_error(te);
    if (te_barrier(s->group) == TE_OK) EXPECT(s, starve_once(s, m, arg, &again) == TE_OK && (again == first || arg->fp8)); /* a step that went well on one rank has moved its scales */
    te_clear_error(te);
    te_module_destroy(m);
}
TE_TEST(context_parallel_with_a_rank_that_starves) {
    for (int k = 0; k < 9; k++) {
        const int step = (k < 6 ? 3 : 7) * test_every_of(11, 3);
        int failures = 0, told = 0;
        for (int n = 1 + k % 3; n < 400; n += step) {
            starving arg = {(te_cp_comm)(k % 3), k < 3 || k > 5 ? TE_BSHD : TE_THD, n, k > 5};
            rank_state *all = run_ranks(2, starve_step, &arg);
            test_case("kind %d, format %d, request %d", (int)arg.comm, (int)arg.format, n);
            failures += all[1].failed;
            told += all[0].num_left;
            if (!all[1].failed && n > 250) break;
        }
        CHECK_MSG(failures > 60 / step && told * (step > 7 ? 4 : 2) > failures, "%d failures, of which the rank itself told %d", failures, told);
    }
}
