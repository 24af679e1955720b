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
    te_thread_hub *hubs[2][2]; /* of exchanges, of rings */
    te_dtype dtype;
    te_qkv_format format;
    bool causal, cross, padded, tail;
    int groups;
    int64_t d_v;
    te_window window;
    int64_t bias[2]; /* of its sizes, batch and queries: 0 => none, 1, or more: all */
    te_softmax_type softmax;
    bool checkpoint;
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
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.num_gqa_groups = c->groups, .attention.kv_channels = D, .attention.qkv_format = c->format,
                                       .attention.window = c->window, .attention.softmax_type = c->softmax, .attention.return_max_logit = true,
                                       .attention.checkpoint_core_attention = c->checkpoint, .attention.bottom_right_diagonal = TE_OFF};
    d.attention.attn_mask_type = c->format == TE_THD ? c->causal ? TE_MASK_PADDING_CAUSAL : TE_MASK_PADDING : c->causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    if (groups) d.parallel.cp_group = groups[0], d.parallel.cp_p2p_group = groups[1], d.parallel.cp_comm_type = c->is.comm;
    if (c->cross) d.attention.attention_type = TE_ATTENTION_CROSS;
    te_module *m = te_dot_product_attention_create(s->te, &d);
    if (c->softmax == TE_SOFTMAX_LEARNABLE) te_tensor_copy(te_module_parameter(m, "softmax_offset"), numbers(s->te, TE_F32, SHAPE(HEADS), 9));
    return m;
}

static void compare(rank_state *s, const shared_case *c, te_group *const groups[2], int rank) {
    te_ctx *te = s->te;
    const bool packed = c->format == TE_THD, cross_packed = packed && c->cross;
    const int ranks = c->is.ranks, seq = c->format == TE_BSHD ? 1 : 0, last = packed ? 2 : 3;
    const int64_t tail = c->tail ? TAIL : 0, t_q = packed ? TOTAL + tail : LENGTH, t_kv = packed ? TOTAL + tail : c->cross ? 2 * LENGTH : LENGTH;
    int64_t row[2][2 * LENGTH + TOTAL + TAIL], count[2], whole_q[1] = {LENGTH}, whole_kv[1] = {t_kv};
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
        te_attention_call *a = &call[i].attention;
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
                n++;
                c.groups = n % 2 ? HEADS : HEADS / 2;
                c.d_v = n % 3 == 0 ? 2 * D : D;
                c.dtype = n % 4 == 3 ? TE_BF16 : TE_F32;
                c.tolerance = tolerance(s->te, c.dtype);
                if (format == TE_THD) c.padded = n % 2 == 0, c.tail = n % 3 == 1;
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
        for (int j = 0; j < 2; j++) te_thread_hub_destroy(c.hubs[i][j]);
}

TE_TEST_DEVICES(context_parallel_equals_one_rank) {
    for (int k = 0; k < COUNT(kinds); k++) run_kind(te, &kinds[k], all_cases);
}
