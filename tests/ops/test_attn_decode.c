/* ops/test_attn_decode.c: attention of few queries over many keys (a decoding step): caches, pages, windows and the other options of a rule, beside the CPU's reference in f32; and that a sequence
 * has the same bits in every batch, in caches of every size, and in pages. */
#include "../te_test.h"

enum { MOST = 5 };
typedef struct decode_case {
    int64_t heads, groups, d, d_v, s_q, room; /* room: rows of the cache for each sequence */
    int b, lengths[MOST];
    te_dtype dtype;
    te_attn_rule rule; /* without its tensors */
    bool paged, sinks, bias, short_q; /* short_q: the last sequence has one query less than s_q */
    int page; /* 0: 16 */
    bool codes; /* the cache is in E4M3 */
} decode_case;
typedef struct decode_result {
    float *o, *lse;
} decode_result;

/* Values of sequence `id`, the same wherever it stands. */
static void fill(float *to, int64_t n, int id, int part) { memcpy(to, test_normal(n, (uint64_t)(7 + 10 * id + part)), (size_t)n * sizeof *to); }

/* A cache in E4M3 of the rows of x, [pages, rows, heads, d], and its factors. */
static te_tensor *coded(te_ctx *te, te_tensor *x, te_tensor **factors) {
    const int64_t *shape = te_tensor_shape(x);
    int32_t *cu = (int32_t *)test_alloc((size_t)(shape[0] + 1) * sizeof *cu);
    te_tensor *codes = te_tensor_empty(te, TE_F8E4M3, 4, shape);
    *factors = te_tensor_empty(te, TE_F8E8M0, 3, shape);
    for (int64_t i = 0; i <= shape[0]; i++) cu[i] = (int32_t)(i * shape[1]);
    te_op_copy_to_kv_cache_args a = {.k = x, .v = x, .k_cache = codes, .v_cache = codes, .k_factors = *factors, .v_factors = *factors, .format = TE_BSHD};
    a.v_cache = te_tensor_empty(te, TE_F8E4M3, 4, shape), a.v_factors = te_tensor_empty(te, TE_F8E8M0, 3, shape);
    a.cu_seqlens = te_tensor_from_host(te, TE_I32, SHAPE(shape[0] + 1), cu);
    a.start_positions = te_tensor_zeros(te, TE_I32, SHAPE(shape[0]));
    te_op_copy_to_kv_cache(te, &a);
    return codes;
}

/* Attends from sequences ids[0 .. c->b - 1], whose values and lengths go by their id. Rows of the cache behind a sequence's end are NaN. */
static decode_result decode(te_ctx *te, const decode_case *c, const int *ids, te_dtype dtype, bool paged) {
    const int64_t b = c->b, PAGE = c->page ? c->page : 16, row_k = c->groups * c->d, row_v = c->groups * c->d_v, pages_of_each = c->room / PAGE;
    float *q = test_floats(b * c->s_q * c->heads * c->d), *k = test_floats(b * c->room * row_k), *v = test_floats(b * c->room * row_v);
    int32_t cu_q[MOST + 1] = {0}, cu_kv[MOST + 1] = {0}, *table = (int32_t *)test_alloc((size_t)(b * pages_of_each + 1) * sizeof *table);
    float *bias = test_floats(b * c->heads * c->s_q * c->room);
    te_op_attn_fwd_args a = {.format = TE_BSHD, .rule = c->rule};
    decode_result r;
    for (int64_t i = 0; i < b * c->room * row_k; i++) k[i] = NAN;
    for (int64_t i = 0; i < b * c->room * row_v; i++) v[i] = NAN;
    for (int i = 0; i < c->b; i++) {
        const int64_t n = c->lengths[ids[i]];
        float *keys = test_floats(n * row_k), *values = test_floats(n * row_v);
        cu_q[i + 1] = cu_q[i] + (int32_t)(c->s_q - (c->short_q && i == c->b - 1)), cu_kv[i + 1] = cu_kv[i] + (int32_t)n;
        fill(q + i * c->s_q * c->heads * c->d, c->s_q * c->heads * c->d, ids[i], 0);
        fill(keys, n * row_k, ids[i], 1), fill(values, n * row_v, ids[i], 2);
        for (int64_t j = 0; c->codes && j < n * row_k; j++) keys[j] *= ldexpf(1, -(int)(j / row_k % 3)); /* rows of different sizes, up to 8 times as large */
        for (int64_t j = 0; c->codes && j < n * row_v; j++) values[j] *= ldexpf(1, (int)(j / row_v % 7) - 3);
        if (c->bias) fill(bias + i * c->heads * c->s_q * c->room, c->heads * c->s_q * c->room, ids[i], 3);
        for (int64_t j = 0; j < n; j++) {
            int64_t row = i * c->room + j;
            if (paged) row = (i + b * (pages_of_each - 1 - j / PAGE)) * PAGE + j % PAGE; /* pages of all sequences in turns, backwards */
            memcpy(k + row * row_k, keys + j * row_k, (size_t)row_k * sizeof *k);
            memcpy(v + row * row_v, values + j * row_v, (size_t)row_v * sizeof *v);
        }
        for (int64_t p = 0; p < pages_of_each; p++) table[i * pages_of_each + p] = (int32_t)(i + b * (pages_of_each - 1 - p));
    }
    te_scope_begin(te);
    /* bf16 or f16 values that f32 has, too */
    te_tensor *x = test_tensor(te, c->dtype, SHAPE(b, c->s_q, c->heads, c->d), q);
    a.q = te_tensor_cast(x, dtype);
    te_tensor *of_k = paged ? test_tensor(te, c->dtype, SHAPE(b * pages_of_each, PAGE, c->groups, c->d), k) : test_tensor(te, c->dtype, SHAPE(b, c->room, c->groups, c->d), k);
    te_tensor *of_v = paged ? test_tensor(te, c->dtype, SHAPE(b * pages_of_each, PAGE, c->groups, c->d_v), v) : test_tensor(te, c->dtype, SHAPE(b, c->room, c->groups, c->d_v), v);
    a.k = c->codes ? coded(te, of_k, &a.rule.k_factors) : te_tensor_cast(of_k, dtype);
    a.v = c->codes ? coded(te, of_v, &a.rule.v_factors) : te_tensor_cast(of_v, dtype);
    a.o = te_tensor_empty(te, dtype, SHAPE(b, c->s_q, c->heads, c->d_v));
    a.lse = te_tensor_empty(te, TE_F32, SHAPE(b, c->heads, c->s_q));
    a.rule.cu_seqlens_q = te_tensor_from_host(te, TE_I32, SHAPE(b + 1), cu_q);
    a.rule.cu_seqlens_kv = te_tensor_from_host(te, TE_I32, SHAPE(b + 1), cu_kv);
    if (paged) a.rule.page_table = te_tensor_from_host(te, TE_I32, SHAPE(b, pages_of_each), table);
    if (c->bias) a.rule.core_attention_bias = test_tensor(te, TE_F32, SHAPE(b, c->heads, c->s_q, c->room), bias);
    if (c->sinks) a.rule.softmax_offset = test_tensor(te, TE_F32, SHAPE(c->heads), test_normal(c->heads, 3));
    te_op_attn_fwd(te, &a);
    r.o = test_read(a.o), r.lse = test_read(a.lse);
    te_scope_end(te);
    return r;
}

static const int in_order[MOST] = {0, 1, 2, 3, 4};
static void check_decode(te_ctx *te, te_ctx *cpu, decode_case c) {
    const int64_t rows = c.heads * c.s_q;
    if (!c.d_v) c.d_v = c.d;
    if (!c.rule.mask) c.rule.mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
    test_case("%s heads %d/%d d %d, %d queries %d room %d%s", te_dtype_name(c.dtype), (int)c.heads, (int)c.groups, (int)c.d, (int)c.d_v, (int)c.s_q, (int)c.room, c.paged ? " paged" : c.codes ? " e4m3" : "");
    const int64_t n = c.b * c.heads * c.s_q * c.d_v;
    decode_result got = decode(te, &c, in_order, c.dtype, c.paged), again = decode(te, &c, in_order, c.dtype, c.paged), want = decode(cpu, &c, in_order, TE_F32, c.paged);
    REQUIRE_OK(te);
    REQUIRE_OK(cpu);
    /* o is a mean of values of size 1, rounded to the format, as is P before: two roundings of 2^-9 for bf16, 2^-12 for f16 */
    const double step = (c.dtype == TE_BF16 ? 1.0 / 512 : 1.0 / 4096) * (c.codes ? 8 : 1); /* values up to 8 times as large */
    CHECK_CLOSE("o", got.o, want.o, n, 2 * step, 2 * step);
    CHECK_CLOSE("lse", got.lse, want.lse, c.b * rows, 1e-5, 2e-5); /* sums in f32, ex2.approx within 2 ulp */
    CHECK(memcmp(got.o, again.o, (size_t)n * 4) == 0 && memcmp(got.lse, again.lse, (size_t)(c.b * rows) * 4) == 0);
    if (c.bias || c.short_q) return; /* a bias has rows of the cache's length */
    if (c.s_q * (c.heads / c.groups) > 16) return; /* kernels of many queries */
    const int64_t PAGE = c.page ? c.page : 16;
    /* alone, in a larger cache, and in pages or not */
    const int64_t each = c.heads * c.s_q * c.d_v;
    for (int i = 0; i < c.b; i++) {
        decode_case one = c;
        one.b = 1, one.room = (c.room + PAGE - 1) / PAGE * PAGE + i * 5 * PAGE;
        decode_result alone = decode(te, &one, in_order + i, c.dtype, i % 2 == 0);
        CHECK_MSG(memcmp(alone.o, got.o + i * each, (size_t)each * 4) == 0, "sequence %d of %d keys alone", i, c.lengths[i]);
        CHECK(memcmp(alone.lse, got.lse + i * rows, (size_t)rows * 4) == 0);
    }
    REQUIRE_OK(te);
}

TE_TEST_DEVICES(attn_decode) {
    te_ctx *cpu = te_ctx_is_cuda(te) ? test_context("cpu") : te;
    /* every head size that the kernel is compiled for, and sizes below them; groups of 1 to 16 heads; sequences of no key to many chunks */
    const decode_case cases[] = {
        {.dtype = TE_BF16, .heads = 8, .groups = 2, .d = 128, .s_q = 1, .room = 2048, .b = 5, .lengths = {1, 63, 1999, 64, 2048}},
        {.dtype = TE_BF16, .heads = 8, .groups = 2, .d = 128, .s_q = 1, .room = 2048, .b = 5, .lengths = {5, 2048, 700, 65, 1}, .paged = true},
        {.dtype = TE_F16, .heads = 4, .groups = 4, .d = 64, .s_q = 3, .room = 1000, .b = 3, .lengths = {3, 1000, 517}},
        {.dtype = TE_BF16, .heads = 16, .groups = 1, .d = 40, .s_q = 1, .room = 20000, .b = 2, .lengths = {20000, 17001}},
        {.dtype = TE_BF16, .heads = 6, .groups = 3, .d = 96, .s_q = 5, .room = 300, .b = 2, .lengths = {300, 29}},
        {.dtype = TE_BF16, .heads = 2, .groups = 1, .d = 256, .s_q = 2, .room = 900, .b = 2, .lengths = {900, 333}},
        {.dtype = TE_F16, .heads = 3, .groups = 3, .d = 192, .d_v = 128, .s_q = 16, .room = 500, .b = 2, .lengths = {500, 100}},
        {.dtype = TE_BF16, .heads = 2, .groups = 2, .d = 16, .d_v = 24, .s_q = 1, .room = 200, .b = 2, .lengths = {200, 3}},
        {.dtype = TE_BF16, .heads = 8, .groups = 2, .d = 128, .s_q = 2, .room = 1500, .b = 2, .lengths = {1500, 80}, .rule = {.window = {true, 100, 0}}},
        {.dtype = TE_BF16, .heads = 8, .groups = 2, .d = 64, .s_q = 1, .room = 600, .b = 2, .lengths = {600, 90}, .rule = {.softcap = 5}},
        {.dtype = TE_BF16, .heads = 8, .groups = 2, .d = 64, .s_q = 1, .room = 600, .b = 2, .lengths = {600, 90}, .rule = {.core_attention_bias_type = TE_ATTN_BIAS_ALIBI}},
        {.dtype = TE_BF16, .heads = 8, .groups = 2, .d = 64, .s_q = 2, .room = 608, .b = 2, .lengths = {600, 90}, .rule = {.softmax_type = TE_SOFTMAX_LEARNABLE}, .sinks = true, .paged = true},
        {.dtype = TE_BF16, .heads = 4, .groups = 2, .d = 64, .s_q = 2, .room = 304, .b = 2, .lengths = {304, 90}, .rule = {.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE}, .bias = true},
        {.dtype = TE_BF16, .heads = 4, .groups = 2, .d = 64, .s_q = 2, .room = 304, .b = 2, .lengths = {304, 90}, .rule = {.mask = TE_MASK_PADDING}},
        {.dtype = TE_BF16, .heads = 8, .groups = 2, .d = 128, .s_q = 2, .room = 1536, .b = 3, .lengths = {1530, 0, 80}, .rule = {.window = {true, 101, 0}}, .paged = true, .page = 48},
        {.dtype = TE_BF16, .heads = 8, .groups = 4, .d = 64, .s_q = 3, .room = 400, .b = 2, .lengths = {400, 77}, .short_q = true},
        {.dtype = TE_BF16, .heads = 4, .groups = 4, .d = 64, .s_q = 1, .room = 333, .b = 2, .lengths = {333, 90}, .paged = true, .page = 333},
        /* caches in E4M3: every head size, 8 and 16 rows of queries, all that a rule may say, and heads that are no multiple of 16 or of 8 channels */
        {.codes = true, .dtype = TE_BF16, .heads = 8, .groups = 2, .d = 128, .s_q = 1, .room = 2048, .b = 5, .lengths = {1, 63, 1999, 64, 2048}},
        {.codes = true, .dtype = TE_BF16, .heads = 8, .groups = 2, .d = 128, .s_q = 3, .room = 2048, .b = 5, .lengths = {5, 2048, 700, 65, 3}, .paged = true},
        {.codes = true, .dtype = TE_F16, .heads = 8, .groups = 2, .d = 128, .s_q = 2, .room = 1000, .b = 3, .lengths = {3, 1000, 517}},
        {.codes = true, .dtype = TE_BF16, .heads = 16, .groups = 1, .d = 48, .s_q = 1, .room = 6000, .b = 2, .lengths = {6000, 5001}},
        {.codes = true, .dtype = TE_BF16, .heads = 6, .groups = 3, .d = 96, .s_q = 5, .room = 300, .b = 2, .lengths = {300, 29}},
        {.codes = true, .dtype = TE_BF16, .heads = 2, .groups = 1, .d = 256, .s_q = 2, .room = 900, .b = 2, .lengths = {900, 333}},
        {.codes = true, .dtype = TE_BF16, .heads = 3, .groups = 3, .d = 192, .d_v = 128, .s_q = 16, .room = 512, .b = 2, .lengths = {500, 100}, .paged = true},
        {.codes = true, .dtype = TE_BF16, .heads = 2, .groups = 2, .d = 16, .d_v = 32, .s_q = 1, .room = 200, .b = 2, .lengths = {200, 3}},
        {.codes = true, .dtype = TE_BF16, .heads = 8, .groups = 2, .d = 64, .s_q = 2, .room = 608, .b = 2, .lengths = {600, 90}, .rule = {.softcap = 5, .window = {true, 101, 0}, .softmax_type = TE_SOFTMAX_LEARNABLE}, .sinks = true, .paged = true},
        {.codes = true, .dtype = TE_BF16, .heads = 8, .groups = 2, .d = 64, .s_q = 1, .room = 600, .b = 2, .lengths = {600, 90}, .rule = {.core_attention_bias_type = TE_ATTN_BIAS_ALIBI}},
        {.codes = true, .dtype = TE_BF16, .heads = 8, .groups = 2, .d = 64, .s_q = 3, .room = 300, .b = 2, .lengths = {300, 90}, .rule = {.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE}, .bias = true},
        {.codes = true, .dtype = TE_BF16, .heads = 4, .groups = 2, .d = 40, .s_q = 1, .room = 300, .b = 2, .lengths = {300, 90}},
        {.codes = true, .dtype = TE_BF16, .heads = 4, .groups = 2, .d = 20, .s_q = 1, .room = 300, .b = 2, .lengths = {300, 90}},
        {.codes = true, .dtype = TE_BF16, .heads = 8, .groups = 2, .d = 128, .s_q = 70, .room = 720, .b = 3, .lengths = {720, 80, 301}},
        {.codes = true, .dtype = TE_F16, .heads = 4, .groups = 2, .d = 64, .s_q = 40, .room = 640, .b = 2, .lengths = {640, 40}, .paged = true, .page = 20},
        {.codes = true, .dtype = TE_F32, .heads = 4, .groups = 2, .d = 64, .s_q = 2, .room = 320, .b = 2, .lengths = {300, 40}, .paged = true},
    };
    /* The CPU has one way for all lengths: fewer keys show it, and there every third case to builds that are about something else than arithmetic. */
    for (int i = 0; i < COUNT(cases); i += te == cpu ? test_every_odd(1) : 1) {
        decode_case c = cases[i];
        const int part = te != cpu || c.room < 1000 ? 1 : c.room < 6000 ? 4 : 16;
        c.room /= part;
        for (int k = 0; k < c.b; k++)
            if (c.lengths[k] > 256) c.lengths[k] /= part;
        check_decode(te, cpu, c);
    }
    /* More sequences than the counters of a launch: 130 copies of one, with 8 heads of keys each. Alone, its chunks are blocks of a cluster. */
    {
        enum { B = 130, S = 500, G = 8, D = 32 };
        float *before = NULL;
        te_tensor *q = te_tensor_normal(te, TE_BF16, SHAPE(1, 1, G, D), 0, 1), *k = te_tensor_normal(te, TE_BF16, SHAPE(1, S, G, D), 0, 1);
        te_tensor *qs = te_tensor_empty(te, TE_BF16, SHAPE(B, 1, G, D)), *ks = te_tensor_empty(te, TE_BF16, SHAPE(B, S, G, D)), *o = te_tensor_empty(te, TE_BF16, SHAPE(B, 1, G, D));
        for (int i = 0; i < B; i++) te_tensor_copy(te_tensor_narrow(qs, 0, i, 1), q), te_tensor_copy(te_tensor_narrow(ks, 0, i, 1), k);
        te_tensor *lse = te_tensor_empty(te, TE_F32, SHAPE(B, G, 1)), *of_one[2] = {te_tensor_empty(te, TE_BF16, SHAPE(1, 1, G, D)), te_tensor_empty(te, TE_F32, SHAPE(1, G, 1))};
        te_op_attn_fwd_args a = {.q = qs, .k = ks, .v = ks, .o = o, .lse = lse, .format = TE_BSHD, .rule = {.mask = TE_MASK_NONE}};
        te_op_attn_fwd_args one = {.q = q, .k = k, .v = k, .o = of_one[0], .lse = of_one[1], .format = TE_BSHD, .rule = {.mask = TE_MASK_NONE}};
        te_op_attn_fwd(te, &one);
        for (int turn = 0; turn < 2; turn++) { /* the second one finds the counters as the first one left them */
            te_op_attn_fwd(te, &a);
            float *all = test_read(o);
            REQUIRE_OK(te);
            for (int i = 1; i < B; i++) CHECK(memcmp(all, all + (int64_t)i * G * D, sizeof(float) * G * D) == 0);
            CHECK_BYTES("o of one sequence", test_read(of_one[0]), all, sizeof(float) * G * D);
            CHECK_BYTES("lse of one sequence", test_read(of_one[1]), test_read(lse), sizeof(float) * G);
            CHECK(all[0] != 0 && (turn == 0 || memcmp(all, before, sizeof(float) * B * G * D) == 0));
            before = all;
        }
    }
}

/* A captured step: rotation into the cache, then attention, layer after layer, so that attention may begin while the rotation still writes the newest rows. The outputs have the bits of the same calls
 * with a wait behind each. Before a launch the newest rows get other numbers, which a row that is read too early would bring into the outputs. */
TE_TEST_DEVICES(attn_decode_captured) {
    enum { LAYERS = 6, B = 2, H = 8, G = 2, D = 64, PAGE = 16, ROOM = 320 };
    static const int32_t old[][B] = {{299, 15}, {0, 64}, {143, 16}}; /* rows before the step, at the ends of tiles and beside them */
    te_no_grad_begin(te);
    for (int n = 0; n < COUNT(old) * 4; n += test_every_odd(2)) { /* 5: each step once; codes and pages in turns */
        const bool codes = n % 2, paged = n / 2 % 2;
        const int step = 1 + n / 4; /* new tokens of each sequence */
        const int32_t *before = old[n / 4];
        const int64_t pages = paged ? B * ROOM / PAGE : B, rows = paged ? PAGE : ROOM, each = (int64_t)B * step * H * D;
        int64_t table[B * ROOM / PAGE];
        te_tensor *k[LAYERS], *v[LAYERS], *kf[LAYERS], *vf[LAYERS], *o[LAYERS], *qkv[2][LAYERS];
        test_case("%d new rows, %d and %d old ones%s%s", step, before[0], before[1], codes ? ", e4m3" : "", paged ? ", in pages" : "");
        te_scope_begin(te);
        for (int i = 0; i < B * ROOM / PAGE; i++) table[i] = (i * 7) % (B * ROOM / PAGE); /* each page once: 7 and 40 have no common factor */
        te_tensor *q = te_tensor_empty(te, TE_BF16, SHAPE(B, step, H, D)), *pages_of = paged ? test_i32(te, SHAPE(B, ROOM / PAGE), table) : NULL;
        te_tensor *cu_q = test_i32(te, SHAPE(B + 1), (const int64_t[]){0, step, 2 * step}), *start = test_i32(te, SHAPE(B), (const int64_t[]){before[0], before[1]});
        te_tensor *cu_kv = test_i32(te, SHAPE(B + 1), (const int64_t[]){0, before[0] + step, before[0] + before[1] + 2 * step});
        for (int i = 0; i < LAYERS; i++) {
            k[i] = te_tensor_normal(te, TE_BF16, SHAPE(pages, rows, G, D), 0, 1), v[i] = te_tensor_normal(te, TE_BF16, SHAPE(pages, rows, G, D), 0, 1);
            if (codes) k[i] = coded(te, k[i], &kf[i]), v[i] = coded(te, v[i], &vf[i]);
            else kf[i] = vf[i] = NULL;
            o[i] = te_tensor_empty(te, TE_BF16, SHAPE(B, step, H, D));
            for (int j = 0; j < 2; j++) qkv[j][i] = te_tensor_normal(te, TE_BF16, SHAPE(B, step, (H + 2 * G) * D), 0, j ? 8 : 1);
        }
        te_graph *graph = NULL;
        float *want[LAYERS];
        for (int turn = 0; turn < 4; turn++) { /* 0: by calls; 1: the capture; 2 and 3: launches */
            for (int other = turn == 1 ? 0 : 1; other >= 0; other--) {
                if (turn == 1) te_graph_begin(te);
                if (turn >= 2 && !other) {
                    te_graph_launch(graph);
                    continue;
                }
                for (int i = 0; i < LAYERS; i++) {
                    te_op_qkv_rope_args r = {.qkv = qkv[other][i], .q = q, .k_cache = k[i], .v_cache = v[i], .k_factors = kf[i], .v_factors = vf[i], .cu_seqlens = cu_q, .cache_positions = start, .page_table = pages_of};
                    r.format = TE_BSHD, r.num_heads = H, r.num_groups = G, r.head_dim = D, r.angles.start_positions = start;
                    te_op_qkv_rope(te, &r);
                    te_op_attn_fwd_args a = {.q = q, .k = k[i], .v = v[i], .o = o[i], .format = TE_BSHD, .rule = {.mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, .cu_seqlens_q = cu_q, .cu_seqlens_kv = cu_kv, .page_table = pages_of, .k_factors = kf[i], .v_factors = vf[i]}};
                    if (turn != 1) te_synchronize(te);
                    te_op_attn_fwd(te, &a);
                    if (turn == 0 && !other) want[i] = test_read(o[i]);
                }
                if (turn == 1) graph = te_graph_end(te);
            }
            REQUIRE_OK(te);
            for (int i = 0; turn >= 2 && i < LAYERS; i++) CHECK_MSG(memcmp(test_read(o[i]), want[i], (size_t)each * sizeof(float)) == 0, "layer %d, launch %d", i, turn - 1);
        }
        te_graph_destroy(graph);
        te_scope_end(te);
    }
    te_no_grad_end(te);
    REQUIRE_OK(te);
}

TE_TEST(attn_cache_refusals) {
    te_ctx *te = test_context("cpu");
    if (!te) return;
    te_tensor *q = te_tensor_zeros(te, TE_BF16, SHAPE(1, 2, 4, 16)), *o = te_tensor_zeros(te, TE_BF16, SHAPE(1, 2, 4, 16)), *k = te_tensor_zeros(te, TE_F8E4M3, SHAPE(1, 9, 2, 16)), *one = te_tensor_full(te, TE_F32, SHAPE(1), 1);
    te_tensor *numbers = te_tensor_zeros(te, TE_BF16, SHAPE(1, 9, 2, 16)), *factors = te_tensor_zeros(te, TE_F8E8M0, SHAPE(1, 9, 2));
    const te_op_attn_fwd_args good = {.q = q, .k = k, .v = k, .o = o, .format = TE_BSHD, .rule = {.mask = TE_MASK_NONE, .k_factors = factors, .v_factors = factors}};
    te_op_attn_fwd_args a = good;
    CHECK_EQ_INT(te_op_attn_fwd(te, &a), TE_OK);
#define REFUSED(code, says)      \
    te_op_attn_fwd(te, &a);      \
    CHECK_ERROR(te, code, says); \
    a = good
    a.v = numbers;
    REFUSED(TE_ERR_DTYPE, "q is bf16, k is e4m3 and v is bf16");
    a.k = te_tensor_zeros(te, TE_F8E5M2, SHAPE(1, 9, 2, 16));
    REFUSED(TE_ERR_DTYPE, "k is e5m2 and v is e4m3");
    a.rule.v_factors = NULL;
    REFUSED(TE_ERR_STATE, "v is e4m3 and rule.v_factors is NULL");
    a.k = a.v = numbers;
    REFUSED(TE_ERR_INVALID, "k is bf16 and rule.k_factors is given");
    a.rule.k_factors = te_tensor_zeros(te, TE_F8E8M0, SHAPE(1, 8, 2));
    REFUSED(TE_ERR_SHAPE, "k is [1, 9, 2, 16] and rule.k_factors is [1, 8, 2]");
    a.rule.k_factors = te_tensor_zeros(te, TE_F32, SHAPE(1, 9, 2));
    REFUSED(TE_ERR_DTYPE, "rule.k_factors");
    a.fp8.s_dtype = TE_F8E4M3;
    REFUSED(TE_ERR_INVALID, "q is bf16 and k is e4m3, and a field of fp8 is given");
    a.q = te_tensor_zeros(te, TE_F8E4M3, SHAPE(1, 2, 4, 16)), a.fp8.q_scale_inv = a.fp8.k_scale_inv = a.fp8.v_scale_inv = one;
    REFUSED(TE_ERR_INVALID, "q is e4m3 and rule.k_factors is given");
    CHECK_EQ_INT(te_op_attn_fwd(te, &a), TE_OK);
#undef REFUSED
}

/* A cache's codes have no gradients: neither of the operation nor of a recorded call. */
TE_TEST(attn_cache_has_no_gradients) {
    te_ctx *te = test_context("cpu");
    if (!te) return;
    te_tensor *q = te_tensor_zeros(te, TE_BF16, SHAPE(1, 2, 4, 16)), *numbers = te_tensor_zeros(te, TE_BF16, SHAPE(1, 9, 2, 16)), *k = te_tensor_zeros(te, TE_F8E4M3, SHAPE(1, 9, 2, 16)), *factors = te_tensor_zeros(te, TE_F8E8M0, SHAPE(1, 9, 2));
    const te_op_attn_bwd_args good = {.q = q, .k = k, .v = k, .o = q, .d_o = q, .lse = te_tensor_zeros(te, TE_F32, SHAPE(1, 4, 2)), .dq = te_tensor_zeros(te, TE_BF16, SHAPE(1, 2, 4, 16)), .dk = te_tensor_zeros(te, TE_BF16, SHAPE(1, 9, 2, 16)), .dv = te_tensor_zeros(te, TE_BF16, SHAPE(1, 9, 2, 16)), .format = TE_BSHD, .rule = {.mask = TE_MASK_NONE, .k_factors = factors, .v_factors = factors}};
    te_op_attn_bwd_args a = good;
    te_op_attn_bwd(te, &a);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "q is bf16, k is e4m3 and v is e4m3, and rule.k_factors is given");
    a = good, a.rule.k_factors = a.rule.v_factors = NULL;
    te_op_attn_bwd(te, &a);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "q is bf16, k is e4m3 and v is e4m3; a cache's codes");
    a = good, a.k = a.v = numbers;
    te_op_attn_bwd(te, &a);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "k is bf16 and v is bf16, and rule.k_factors is given");
    a.rule.k_factors = a.rule.v_factors = NULL;
    CHECK_EQ_INT(te_op_attn_bwd(te, &a), TE_OK);

    const te_attn_desc desc = {.format = TE_BSHD, .rule = {.mask = TE_MASK_NONE, .k_factors = factors, .v_factors = factors}};
    CHECK(te_attention(q, k, k, &desc) != NULL);
    te_tensor *leaf = te_tensor_set_requires_grad(te_tensor_full(te, TE_BF16, SHAPE(1, 2, 4, 16), 1), true);
    CHECK(te_attention(leaf, k, k, &desc) == NULL);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "k is e4m3, with rule.k_factors, and gradients are recorded");
    te_no_grad_begin(te);
    CHECK(te_attention(leaf, k, k, &desc) != NULL);
    te_no_grad_end(te);
    REQUIRE_OK(te);
}

/* The factor 255 of E8M0 is NaN, of a row of keys and of values. Beyond the end of a sequence nothing reads it. With 2 and with 40 queries, for which CUDA has different kernels; of f32 q the general one runs. */
TE_TEST_DEVICES(attn_cache_nan_factors) {
    enum { LENGTH = 70, ROOM = 80, G = 2, D = 64, BAD = 33 };
    for (int n = 0; n < 2 * 2 * 3; n++) {
        const te_dtype dtype = n % 2 ? TE_F32 : TE_BF16;
        const int s_q = n / 2 % 2 ? 40 : 2, which = n / 4; /* 0: keys, 1: values, 2: both, but beyond the end */
        test_case("%s, %d queries, NaN of %s", te_dtype_name(dtype), s_q, which == 0 ? "keys" : which == 1 ? "values" : "both beyond the end");
        float *of_rows[2];
        for (int i = 0; i < 2; i++) {
            of_rows[i] = test_floats(ROOM * G);
            for (int j = 0; j < ROOM * G; j++) of_rows[i][j] = which == 2 ? (j / G >= LENGTH ? NAN : 1) : i == which && j == BAD * G ? NAN : 1; /* of head 0 */
        }
        te_tensor *k = test_tensor(te, TE_F8E4M3, SHAPE(1, ROOM, G, D), test_normal(ROOM * G * D, 1));
        te_tensor *o = test_guarded(te, dtype, SHAPE(1, s_q, 4, D));
        te_op_attn_fwd_args a = {.q = te_tensor_cast(test_tensor(te, TE_F32, SHAPE(1, s_q, 4, D), test_normal(s_q * 4 * D, 2)), dtype), .k = k, .v = k, .o = o, .format = TE_BSHD, .rule = {.mask = TE_MASK_PADDING}};
        a.rule.k_factors = test_tensor(te, TE_F8E8M0, SHAPE(1, ROOM, G), of_rows[0]);
        a.rule.v_factors = test_tensor(te, TE_F8E8M0, SHAPE(1, ROOM, G), of_rows[1]);
        a.rule.cu_seqlens_q = test_i32(te, SHAPE(2), (const int64_t[]){0, s_q});
        a.rule.cu_seqlens_kv = test_i32(te, SHAPE(2), (const int64_t[]){0, LENGTH});
        te_op_attn_fwd(te, &a);
        REQUIRE_OK(te);
        const float *y = test_read(o);
        for (int i = 0; i < s_q * 4 * D; i++)
            if (isnan(y[i]) != (which < 2 && i / D % 4 < 2)) {
                CHECK_MSG(false, "query %d, head %d: %g", i / (4 * D), i / D % 4, y[i]);
                break;
            }
    }
}

TE_TEST(attn_decode_plans) {
    static const char *const devices[] = {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120"};
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int i = 0; i < COUNT(devices); i++)
        for (int rows = 1; rows <= 5; rows += 4) { /* 4 heads share keys, so that five queries are too many rows */
            te_explanation e;
            te_op_attn_fwd_args a = {.format = TE_BSHD, .rule = {.mask = TE_MASK_CAUSAL_BOTTOM_RIGHT}};
            for (int d = 64; d <= 128; d += 64) {
                a.q = te_tensor_describe(te, TE_BF16, SHAPE(2, rows, 32, d)), a.k = a.v = te_tensor_describe(te, TE_BF16, SHAPE(2, 8192, 8, d));
                a.o = te_tensor_describe(te, TE_BF16, SHAPE(2, rows, 32, d)), a.lse = te_tensor_describe(te, TE_F32, SHAPE(2, 32, rows));
                REQUIRE_OK(te);
                CHECK(te_explain(te, TE_OP_ATTN_FWD, &a, devices[i], &e) == TE_OK && e.supported && e.deterministic);
                CHECK_MSG(!strstr(e.kernels, "attn/attn_decode") == (rows == 5), "%s, %d rows: %s", devices[i], rows, e.kernels);
                if (rows == 1) CHECK_STR(e.why, "few queries: keys split over blocks");
                if (rows == 1) CHECK_EQ_INT(e.launches, 1);
                a.k = a.v = te_tensor_describe(te, TE_F8E4M3, SHAPE(2, 8192, 8, d)), a.rule.k_factors = a.rule.v_factors = te_tensor_describe(te, TE_F8E8M0, SHAPE(2, 8192, 8));
                CHECK(te_explain(te, TE_OP_ATTN_FWD, &a, devices[i], &e) == TE_OK && e.supported && e.deterministic);
                CHECK_MSG(!strstr(e.kernels, "attn/attn_decode") == (rows == 5) && !strstr(e.kernels, "attn/attn_cache_numbers") == (rows == 1), "%s, %d rows: %s", devices[i], rows, e.kernels);
                a.rule.k_factors = a.rule.v_factors = NULL;
            }
        }
    CHECK_OK(te);
}
