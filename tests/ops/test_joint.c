/* test_joint.c: te_op_joint_gemm beside its parts by calls of their own: norms before the products, each step after them, formats and recipes, one row to sixteen. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

typedef struct joint_case {
    const char *name;
    te_quant_kind kind; /* 0: operands of one float format */
    te_dtype dtype;     /* of A's codes, or of both operands */
    te_scaling scaling, of_weight;
} joint_case;
static const joint_case joint_cases[] = {{"bf16", (te_quant_kind)0, TE_BF16, TE_SCALING_TENSOR, TE_SCALING_TENSOR},
                                         {"f16", (te_quant_kind)0, TE_F16, TE_SCALING_TENSOR, TE_SCALING_TENSOR},
                                         {"f32", (te_quant_kind)0, TE_F32, TE_SCALING_TENSOR, TE_SCALING_TENSOR},
                                         {"current", TE_QUANT_CURRENT, TE_F8E4M3, TE_SCALING_TENSOR, TE_SCALING_TENSOR},
                                         {"blocks", TE_QUANT_BLOCK, TE_F8E4M3, TE_SCALING_BLOCK_1D, TE_SCALING_BLOCK_2D},
                                         {"MXFP8", TE_QUANT_MXFP8, TE_F8E4M3, TE_SCALING_MXFP8, TE_SCALING_MXFP8},
                                         {"NVFP4", TE_QUANT_NVFP4, TE_F4E2M1, TE_SCALING_NVFP4, TE_SCALING_NVFP4},
                                         {"blocks of rows", TE_QUANT_BLOCK, TE_F8E4M3, TE_SCALING_BLOCK_1D, TE_SCALING_BLOCK_1D}};
/* Whether one kernel takes products in this format together. */
static bool joins(const joint_case *c) { return c->dtype != TE_F32 && c->of_weight != TE_SCALING_BLOCK_1D; }
typedef enum step { NOTHING, ACTIVATION, RESIDUAL } step;

/* The row-wise codes of w; `fp8`: their format, if it is not NVFP4; `swizzled`: the layout of their scales. */
static void weight_of(te_ctx *te, const joint_case *c, te_dtype fp8, bool swizzled, te_tensor *w, te_joint_product *p) {
    te_quantizer_desc desc = {0};
    te_tensor *codes = NULL, *scales = NULL;
    desc.kind = c->kind;
    desc.dtype = c->kind == TE_QUANT_NVFP4 ? TE_F4E2M1 : fp8;
    desc.usage = TE_ROWWISE;
    desc.optimize_for_gemm = swizzled;
    if (c->kind == TE_QUANT_BLOCK) desc.block.block_scaling_dim = c->of_weight == TE_SCALING_BLOCK_2D ? 2 : 1;
    te_quantizer *q = te_quantizer_create(te, &desc);
    te_tensor *y = q ? te_quantize(q, w) : NULL;
    if (y) {
        te_quantized_view(y, TE_ROWWISE, &codes, &scales);
        p->b = codes, p->scale_b = scales, p->amax_b = te_quantized_amax(y, TE_ROWWISE);
    }
    te_quantizer_destroy(q);
}
/* A as the products read it. */
static const te_tensor *joint_rows(te_ctx *te, const te_op_joint_gemm_args *a) {
    if (!a->norm.normalization) return a->a;
    te_norm_fwd_args n = {.x = a->a, .gamma = a->norm_weight, .beta = a->norm_bias, .norm = a->norm, .rounded = a->norm_rounded};
    n.y = te_tensor_zeros(te, te_tensor_dtype(a->a), SHAPE(a->m, a->k));
    if (a->norm.normalization == TE_RMSNORM) te_op_rmsnorm_fwd(te, &n);
    else te_op_layernorm_fwd(te, &n);
    return n.y;
}
/* Computes the products of the call by te_op_gemm, to d, and the step after them from the call's own D, to y. */
static void by_calls(te_ctx *te, const te_op_joint_gemm_args *a, te_tensor *d[3], te_tensor *y) {
    const te_tensor *rows = joint_rows(te, a);
    for (int i = 0; i < a->count; i++) {
        te_op_gemm_args g = {0};
        const te_joint_product *p = &a->product[i];
        g.a = rows, g.b = p->b, g.d = d[i], g.bias = p->bias, g.scale_b = p->scale_b, g.amax_b = p->amax_b;
        g.m = a->m, g.n = p->n, g.k = a->k;
        g.b_transposed = true;
        g.scaling_a = a->scaling_a, g.scaling_b = a->scaling_b;
        g.swizzled_scales = a->swizzled_scales;
        g.quantize_a = a->quantize_a, g.quantize_power_of_two = a->quantize_power_of_two;
        te_op_gemm(te, &g);
    }
    if (a->activation) {
        te_tensor *pair[2] = {te_tensor_view(te_tensor_narrow(a->product[0].d, 0, 0, 1), SHAPE(a->m, a->product[0].n)),
                              te_tensor_view(te_tensor_narrow(a->product[0].d, 0, 1, 1), SHAPE(a->m, a->product[0].n))};
        te_op_act_fwd_args act = {0};
        act.x = te_concat(pair, 2, 1);
        act.y = y;
        act.activation = a->activation;
        te_op_act_fwd(te, &act);
    }
    if (a->residual) te_tensor_copy(y, te_add((te_tensor *)a->residual, a->product[0].d));
}

/* The norm of A's rows: none; RMSNorm as te.h has it; as transformers has it, and with 1 + weight; LayerNorm with and without a bias. */
typedef enum before { ROWS, RMS, RMS_ROUNDED, LAYER, LAYER_BIASED, BEFORE } before;
static void norm_of(te_ctx *te, before b, te_dtype weight, te_op_joint_gemm_args *a) {
    const te_dtype dtype = weight ? weight : te_tensor_dtype(a->a);
    if (b == ROWS) return;
    a->norm.normalization = b >= LAYER ? TE_LAYERNORM : TE_RMSNORM;
    a->norm.eps = 1e-3f;
    a->norm.zero_centered_gamma = b == RMS_ROUNDED || b == LAYER_BIASED;
    a->norm_rounded = b == RMS_ROUNDED;
    a->norm_weight = test_tensor(te, dtype, SHAPE(a->k), test_normal(a->k, 21));
    a->norm_bias = b == LAYER_BIASED ? test_tensor(te, dtype, SHAPE(a->k), test_normal(a->k, 22)) : NULL;
}
/* D of the call beside D of te_op_gemm. On CUDA the warps of a joint product share k in another way: sums up to 4 sqrt(k), of k terms, round by 2^-24 of that; then D rounds once on each side. */
static void check_d(te_ctx *te, te_tensor *d, te_tensor *want, int64_t k) {
    if (te_ctx_is_cuda(te))
        CHECK_CLOSE("D", test_read(d), test_read(want), te_tensor_numel(want), te_tensor_dtype(want) == TE_F32 ? 0x1p-20 : 0x1p-7, 4 * sqrt((double)k) * 0x1p-24 * sqrt((double)k));
    else
        CHECK_BYTES("D", test_read_bytes(d), test_read_bytes(want), te_tensor_bytes(want));
}
/* The call has the bits of a call whose A a norm has made before. Its other tensors are written once more. */
static void check_norm_apart(te_ctx *te, const te_op_joint_gemm_args *a, te_tensor **out, int count) {
    te_op_joint_gemm_args apart = *a;
    const void *before[8];
    if (!a->norm.normalization) return;
    for (int i = 0; i < count; i++) before[i] = test_read_bytes(out[i]);
    apart.a = joint_rows(te, a);
    apart.norm = (te_norm_options){.normalization = TE_NORM_DEFAULT};
    apart.norm_weight = apart.norm_bias = NULL;
    apart.norm_rounded = false;
    te_op_joint_gemm(te, &apart);
    REQUIRE_OK(te);
    for (int i = 0; i < count; i++) CHECK_BYTES("beside a norm apart", before[i], test_read_bytes(out[i]), te_tensor_bytes(out[i]));
}
static void check_normed(te_ctx *te, const joint_case *c, before b, te_dtype weight, step s, te_dtype in, int count, int64_t m, const int64_t *widths, int64_t k, bool one_launch) {
    te_op_joint_gemm_args a = {0};
    te_explanation e;
    te_tensor *d[3] = {NULL}, *y = NULL;
    const te_dtype out = c->kind ? in : c->dtype;
    te_scope_begin(te);
    test_case("%s, norm %d, step %d, %s, %d products, m=%lld n=%lld k=%lld", c->name, (int)b, (int)s, te_dtype_name(out), count, (long long)m, (long long)widths[0], (long long)k);
    a.a = test_tensor(te, out, SHAPE(m, k), test_normal(m * k, (uint64_t)(m + k)));
    a.count = count;
    a.m = m, a.k = k;
    norm_of(te, b, weight, &a);
    a.scaling_a = c->scaling, a.scaling_b = c->of_weight;
    if (c->kind) a.quantize_a = c->dtype, a.quantize_power_of_two = c->kind == TE_QUANT_BLOCK;
    te_tensor *halves = s == ACTIVATION ? test_guarded(te, out, SHAPE(2, m, widths[0])) : NULL;
    for (int i = 0; i < count; i++) {
        te_joint_product *p = &a.product[i];
        p->n = s == ACTIVATION ? widths[0] : widths[i];
        te_tensor *w = test_tensor(te, out, SHAPE(p->n, k), test_normal(p->n * k, (uint64_t)(7 + i)));
        if (c->kind) weight_of(te, c, TE_F8E4M3, false, w, p);
        else p->b = w;
        p->bias = (m + i) % 3 == 0 ? test_tensor(te, TE_BF16, SHAPE(p->n), test_normal(p->n, 9)) : NULL;
        p->d = halves ? (i ? NULL : halves) : test_guarded(te, out, SHAPE(m, p->n));
        d[i] = test_guarded(te, out, SHAPE(m, p->n));
    }
    a.activation = s == ACTIVATION ? (m % 2 ? TE_SWIGLU : TE_GEGLU) : TE_ACTIVATION_DEFAULT;
    a.residual = s == RESIDUAL ? test_tensor(te, out, SHAPE(m, widths[0]), test_normal(m * widths[0], 11)) : NULL;
    if (s) a.y = test_guarded(te, out, SHAPE(m, widths[0])), y = test_guarded(te, out, SHAPE(m, widths[0]));
    REQUIRE_OK(te);
    REQUIRE(te_explain(te, TE_OP_JOINT_GEMM, &a, "sm_90", &e) == TE_OK);
    if (one_launch) CHECK_MSG(e.launches == 1 + (b != ROWS && out == TE_F32) && strstr(e.kernels, "JOINT="), "%d launches: %s", e.launches, e.kernels);
    te_op_joint_gemm(te, &a);
    by_calls(te, &a, d, y);
    REQUIRE_OK(te);
    te_tensor *written[4];
    int n = 0;
    for (int i = 0; i < count; i++) {
        written[n++] = halves ? te_tensor_narrow(halves, 0, i, 1) : a.product[i].d;
        check_d(te, written[i], d[i], k);
    }
    if (s) CHECK_BYTES("y", test_read_bytes(a.y), test_read_bytes(y), te_tensor_bytes(y));
    if (s) written[n++] = a.y;
    check_norm_apart(te, &a, written, n);
    te_scope_end(te);
}

static void check_joint(te_ctx *te, const joint_case *c, step s, te_dtype in, int count, int64_t m, const int64_t *widths, int64_t k, bool one_launch) {
    check_normed(te, c, ROWS, TE_DTYPE_NONE, s, in, count, m, widths, k, one_launch);
}

static void joint_all(te_ctx *te, int first) {
    /* 2048, 512: heads of a small model; 33, 150: tiles that are not whole; 264, 2304: k that is no whole number of turns, or several for each warp */
    static const int64_t widths[][3] = {{64, 16, 16}, {33, 150, 17}, {2048, 512, 512}}, lengths[] = {128, 264, 2304};
    int turn = 0;
    for (int c = first; c < COUNT(joint_cases); c += 2)
        for (int s = NOTHING; s <= RESIDUAL; s++)
            for (int64_t m = 1; m <= 16; m += 1 + m / 3)
                for (int w = 0; w < COUNT(widths); w++, turn++) {
                    const int64_t k = lengths[(turn / 3 + (int)m + w) % 3];
                    const joint_case *j = &joint_cases[c];
                    if (!te_ctx_is_cuda(te) && (turn % 3 || w == 2)) continue; /* the CPU has one way */
                    const bool whole = k % (j->kind == TE_QUANT_NVFP4 ? 256 : j->kind ? 128 : 64) == 0; /* turns of the kernel */
                    check_joint(te, j, (step)s, turn % 4 ? TE_BF16 : TE_F32, s == NOTHING ? 2 + turn % 2 : s == ACTIVATION ? 2 : 1, m, widths[w], k,
                                m <= 4 && joins(j) && whole && w != 1);
                }
}
TE_TEST_DEVICES(joint_gemm_0) { joint_all(te, 0); }
TE_TEST_DEVICES(joint_gemm_1) { joint_all(te, 1); }

/* More tiles than blocks are resident: gate and up of a model, and products of which the first alone fills the GPU. */
TE_TEST_DEVICES(joint_gemm_of_many_tiles) {
    static const int64_t widths[3] = {8192, 6000, 24}, wide[3] = {13008, 13008, 13008};
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's schedule; the CPU has none");
    for (int c = 0; c < COUNT(joint_cases); c++)
        for (int s = NOTHING; s <= RESIDUAL; s++) {
            check_joint(te, &joint_cases[c], (step)s, TE_BF16, s == NOTHING ? 3 : s == ACTIVATION ? 2 : 1, 1, widths, 256, joins(&joint_cases[c]));
            check_joint(te, &joint_cases[c], (step)s, TE_BF16, s == NOTHING ? 3 : s == ACTIVATION ? 2 : 1, 2, wide, 128, false);
        }
}

/* One product of so many lines that single warps would have several tiles: an lm_head, whose last tile is not whole. Tiles of one, two and four warps. */
TE_TEST_DEVICES(joint_gemm_of_a_head) {
    static const int64_t lines[3] = {40008}, lengths[] = {256, 640, 1024, 4096};
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's schedule; the CPU has none");
    for (int c = 0; c < COUNT(joint_cases); c++)
        for (int k = 0; k < COUNT(lengths); k++) {
            const joint_case *j = &joint_cases[c];
            const bool scaled = j->kind == TE_QUANT_BLOCK || j->kind == TE_QUANT_MXFP8 || j->kind == TE_QUANT_NVFP4;
            const bool whole = lengths[k] % (j->kind == TE_QUANT_NVFP4 ? 256 : 128) == 0;
            if (lengths[k] == 4096 && j->kind != TE_QUANT_MXFP8) continue; /* four warps, 0.2 s of numbers a case */
            check_joint(te, j, NOTHING, TE_BF16, 1, k == 0 ? 3 : 1, lines, lengths[k], scaled && whole && joins(j)); /* gemm_hopper takes so many lines of other formats */
        }
}
/* The warps that share a tile, on paper: few tiles on 132 multiprocessors, and many; one row of NVFP4. */
TE_TEST(joint_warps_of_a_tile) {
    static const struct {
        int64_t tiles, turns;
        int warps;
        bool nvfp4_row, gated;
    } cases[] = {{132, 64, 16, 0, 0}, {132, 8, 8, 0, 0}, {133, 64, 8, 0, 0}, {512, 16, 4, 0, 0}, {2112, 32, 1, 0, 1}, {24, 1, 1, 0, 0}, {24, 3, 2, 0, 0},
                 {2113, 1, 1, 0, 0}, {2113, 2, 2, 0, 0}, {2113, 3, 2, 0, 0}, {2501, 5, 2, 0, 0}, {2501, 8, 2, 0, 0}, {8016, 16, 2, 0, 0}, {8016, 31, 2, 0, 0}, {8016, 32, 4, 0, 0}, {8016, 64, 8, 0, 0},
                 {8016, 128, 16, 0, 0}, {8016, 1000, 16, 0, 0},
                 {128, 32, 8, 1, 0}, {128, 8, 8, 1, 0}, {192, 8, 8, 1, 0}, {384, 16, 4, 1, 0}, {896, 16, 2, 1, 0}, {896, 16, 4, 1, 1}, {896, 16, 2, 0, 1}, {512, 8, 4, 1, 1}, {2112, 1, 1, 1, 1}, {2112, 3, 2, 1, 1},
                 {100, 16, 8, 1, 1}, {8016, 16, 2, 1, 0}};
    te__plan p = TE_ZERO;
    p.num_sms = 132;
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("%d tiles of %d turns", (int)cases[i].tiles, (int)cases[i].turns);
        CHECK_EQ_INT(te__gemv_joint_warps(&p, cases[i].tiles, cases[i].turns, cases[i].nvfp4_row, cases[i].gated), cases[i].warps);
    }
}

/* A norm before the products: rows in one warp of the norm's kernel and in several, whole and not; rows of more values than a thread holds at once; weights of A's format and of f32. */
TE_TEST_DEVICES(joint_gemm_of_normed_rows) {
    static const int64_t widths[3] = {64, 16, 32}, lengths[] = {128, 264, 1280, 2304, 4096, 5120};
    int turn = 0;
    for (int c = 0; c < COUNT(joint_cases); c++)
        for (int b = RMS; b < BEFORE; b++)
            for (int l = 0; l < COUNT(lengths); l++, turn++) {
                const joint_case *j = &joint_cases[c];
                const step s = (step)(turn % 3);
                const int64_t k = lengths[l], m = 1 + turn * 5 % 16;
                if (!te_ctx_is_cuda(te) && turn % (test_samples() ? 13 : 5)) continue; /* the CPU has one way; strides that go through all lengths and steps */
                const bool whole = k % (j->kind == TE_QUANT_NVFP4 ? 256 : j->kind ? 128 : 64) == 0; /* turns of the kernel */
                check_normed(te, j, (before)b, turn % 5 ? TE_DTYPE_NONE : TE_F32, s, turn % 4 ? TE_BF16 : TE_F32, s == NOTHING ? 2 + turn % 2 : s == ACTIVATION ? 2 : 1, m, widths, k, m <= 2 && k <= 4096 && joins(j) && whole);
                check_normed(te, j, (before)b, TE_DTYPE_NONE, s, TE_BF16, s == NOTHING ? 3 : s == ACTIVATION ? 2 : 1, 1, widths, k, joins(j) && whole);
            }
    if (!te_ctx_is_cuda(te) && test_samples()) return;
    check_normed(te, &joint_cases[0], RMS, TE_DTYPE_NONE, NOTHING, TE_BF16, 1, 1, widths, 16384, true);
    check_normed(te, &joint_cases[0], LAYER, TE_DTYPE_NONE, NOTHING, TE_BF16, 1, 2, widths, 20480, false);
}
/* LayerNorm of rows whose mean is far larger than their deviation: sums of squares lose digits, so it sums again. */
TE_TEST_DEVICES(joint_gemm_of_rows_far_from_zero) {
    enum { N = 32, K = 2048, M = 3 };
    te_op_joint_gemm_args a = {0};
    float *x = test_normal(M * K, 3);
    for (int i = 0; i < 2 * K; i++) x[i] = 1000 + 8 * x[i]; /* bf16 keeps multiples of 4 there; the third row is around 0 */
    a.a = test_tensor(te, TE_BF16, SHAPE(M, K), x);
    a.count = 1, a.m = M, a.k = K;
    norm_of(te, LAYER_BIASED, TE_DTYPE_NONE, &a);
    a.product[0].b = test_tensor(te, TE_BF16, SHAPE(N, K), test_normal(N * K, 4));
    a.product[0].d = test_guarded(te, TE_BF16, SHAPE(M, N));
    a.product[0].n = N;
    te_tensor *d[3] = {test_guarded(te, TE_BF16, SHAPE(M, N))};
    te_op_joint_gemm(te, &a);
    by_calls(te, &a, d, NULL);
    REQUIRE_OK(te);
    check_d(te, a.product[0].d, d[0], K);
    check_norm_apart(te, &a, &a.product[0].d, 1);
}

/* Scales in tiles of 128 x 4; a NaN among A's numbers, which NVFP4 gives the code of infinity; a scale of B that is NaN, which makes one column of D NaN. */
TE_TEST_DEVICES(joint_gemm_of_swizzled_scales_and_nan) {
    enum { N = 150, K = 768, LINE = 70 };
    for (int c = 0; c < COUNT(joint_cases); c++)
        for (int64_t m = 1; m <= 3; m += 2) {
            const joint_case *j = &joint_cases[c];
            te_op_joint_gemm_args a = {0};
            if (j->scaling != TE_SCALING_MXFP8 && j->scaling != TE_SCALING_NVFP4) continue;
            te_scope_begin(te);
            test_case("%s, m=%lld", j->name, (long long)m);
            float *x = test_normal(m * K, 3);
            if (j->scaling == TE_SCALING_NVFP4) x[K / 2 + 5] = NAN;
            a.a = test_tensor(te, TE_BF16, SHAPE(m, K), x);
            a.count = 1, a.m = m, a.k = K;
            a.scaling_a = j->scaling, a.scaling_b = j->of_weight, a.quantize_a = j->dtype, a.swizzled_scales = true;
            te_joint_product *p = &a.product[0];
            p->n = N;
            weight_of(te, j, TE_F8E4M3, true, test_tensor(te, TE_BF16, SHAPE(N, K), test_normal(N * K, 4)), p);
            REQUIRE_OK(te);
            te_tensor *scales = (te_tensor *)p->scale_b;
            uint8_t *bytes = (uint8_t *)test_read_bytes(scales);
            bytes[LINE % 32 * 16 + LINE / 32 * 4] = j->scaling == TE_SCALING_NVFP4 ? 0x7f : 0xff; /* the line's first scale, in the first tile */
            te_tensor_copy_from_host(scales, bytes);
            p->d = test_guarded(te, TE_BF16, SHAPE(m, N));
            te_tensor *d[3] = {test_guarded(te, TE_BF16, SHAPE(m, N))};
            te_explanation e;
            REQUIRE(te_explain(te, TE_OP_JOINT_GEMM, &a, "sm_90", &e) == TE_OK);
            CHECK_MSG(strstr(e.kernels, "JOINT=") && strstr(e.kernels, "SWIZZLED=1") && !strstr(e.kernels, "ONE=1") == (m > 1), "%s", e.kernels);
            te_op_joint_gemm(te, &a);
            by_calls(te, &a, d, NULL);
            REQUIRE_OK(te);
            float *got = test_read(p->d), *want = test_read(d[0]);
            for (int64_t i = 0; i < m * N; i++) {
                CHECK_MSG(isnan(got[i]) == (i % N == LINE) && isnan(want[i]) == (i % N == LINE), "%lld: %g, by te_op_gemm %g", (long long)i, got[i], want[i]);
                if (i % N == LINE) got[i] = want[i] = 0;
            }
            CHECK_CLOSE("D", got, want, m * N, 0x1p-7, 4 * sqrt((double)K) * 0x1p-24 * sqrt((double)K)); /* as check_d */
            te_scope_end(te);
        }
}

/* One row of NVFP4 by the identity, so that D has the values of A's codes. Its scale is 1 where the largest value is 6 * 448: then the second block's values are their codes' units, each but 6 and 5.9 in the
 * middle between two codes, and the third block's scale is the smallest, and so much too small that its values are above 7 units. Behind them are blocks of all sizes, with a block of zeros among them. */
TE_TEST_DEVICES(joint_gemm_of_rare_blocks) {
    enum { N = 768, TURNS = 7 };
    static const struct {
        const char *name;
        int64_t k; /* 3, 21 and 33 turns: one, two and three for each warp */
        te_dtype dtype;
        float largest;
        int special; /* 1: two negative NaN; 2: infinities, with which D has signs and zeros alone */
    } rows[TURNS] = {{"", 768, TE_BF16, 2688, 0}, {"", 5376, TE_BF16, 2688, 0}, {"", 8448, TE_F32, 2688, 0}, {"NaN", 768, TE_F16, 2688, 1}, {"infinities", 768, TE_BF16, 2688, 2},
                     {"large", 768, TE_BF16, 3e38f, 0}, {"small", 768, TE_BF16, 1e-38f, 0}};
    static const float middles[16] = {6, 5, 3.5f, 2.5f, 1.75f, 1.25f, 0.75f, 0.25f, -5.9f, -5, -3.5f, -2.5f, -1.75f, -1.25f, -0.75f, -0.25f};
    const joint_case *j = NULL;
    for (int c = 0; c < COUNT(joint_cases); c++)
        if (joint_cases[c].scaling == TE_SCALING_NVFP4) j = &joint_cases[c];
    REQUIRE(j);
    for (int turn = 0; turn < TURNS; turn++) {
        const int64_t k = rows[turn].k;
        const float unit = rows[turn].largest / 2688;
        float *x = test_normal(k, 3), *some = (float *)test_alloc(sizeof(float) * (size_t)(N * k));
        te_op_joint_gemm_args a = {0};
        te_explanation e;
        test_case("%s k=%d %s", te_dtype_name(rows[turn].dtype), (int)k, rows[turn].name);
        te_scope_begin(te);
        for (int i = 0; i < k; i++) {
            const int block = i / 16;
            x[i] *= block == 20 ? 0 : 100 * unit * powf(0.7f, (float)(block % 48));
            if (block == 1) x[i] = middles[i % 16] * unit;
            if (block == 2) x[i] = (i % 2 ? 8.7f : -7.5f) * 0x1p-9f * unit;
        }
        x[0] = rows[turn].largest;
        if (rows[turn].special == 1) x[5] = x[70] = -NAN;
        if (rows[turn].special == 2) x[70] = INFINITY, x[90] = -INFINITY;
        for (int i = 0; i < N; i++) some[i * k + i * (k / N)] = 1; /* an element of each few, and each if k is N */
        a.a = test_tensor(te, rows[turn].dtype, SHAPE(1, k), x);
        a.count = 1, a.m = 1, a.k = k;
        a.scaling_a = j->scaling, a.scaling_b = j->of_weight, a.quantize_a = j->dtype;
        te_joint_product *p = &a.product[0];
        p->n = N;
        weight_of(te, j, TE_F8E4M3, false, test_tensor(te, TE_BF16, SHAPE(N, k), some), p);
        p->d = test_guarded(te, TE_F32, SHAPE(1, N));
        te_tensor *d[3] = {test_guarded(te, TE_F32, SHAPE(1, N))};
        REQUIRE(te_explain(te, TE_OP_JOINT_GEMM, &a, "sm_90", &e) == TE_OK);
        CHECK_MSG(strstr(e.kernels, "JOINT=") && strstr(e.kernels, "ONE=1"), "%s", e.kernels);
        te_op_joint_gemm(te, &a);
        by_calls(te, &a, d, NULL);
        REQUIRE_OK(te);
        const float *got = test_read(p->d);
        /* one product of exact numbers for each element, and two factors */
        CHECK_CLOSE("D", got, test_read(d[0]), N, 0x1p-22, 0);
        if (turn == 0) { /* 6 4 4 2 2 1 1 0, and the same below 0: middles become the even code */
            static const float codes[16] = {6, 4, 4, 2, 2, 1, 1, 0, -6, -4, -4, -2, -2, -1, -1, 0};
            for (int i = 0; i < 16; i++) CHECK_MSG(got[16 + i] == codes[i], "%g is %g", middles[i], got[16 + i]);
            for (int i = 0; i < 16; i++) CHECK_MSG(got[32 + i] == (i % 2 ? 6 : -6) * 0x1p-9f, "%d: %g", i, got[32 + i]);
        }
        te_scope_end(te);
    }
}

TE_TEST_DEVICES(joint_gemm_complaints) {
    te_op_joint_gemm_args good = {0}, a;
    te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(2, 32)), *other = te_tensor_zeros(te, TE_F32, SHAPE(2, 16));
    good.a = x, good.m = 2, good.k = 32, good.count = 2;
    for (int i = 0; i < 2; i++) {
        good.product[i].b = te_tensor_zeros(te, TE_BF16, SHAPE(16, 32));
        good.product[i].d = te_tensor_zeros(te, TE_BF16, SHAPE(2, 16));
        good.product[i].n = 16;
    }
    CHECK_EQ_INT(te_op_joint_gemm(te, &good), TE_OK);
    a = good, a.m = 1, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "a is [2, 32]; [1, 32]");
    a = good, a.count = 4, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "count is 4; 1 to 3");
    a = good, a.count = 1, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "product[1] is given, and count is 1");
    a = good, a.y = te_tensor_zeros(te, TE_BF16, SHAPE(2, 16)), te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "neither activation nor residual");
    a.residual = te_tensor_zeros(te, TE_BF16, SHAPE(2, 16)), te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "count is 2; with residual it is 1");
    a.activation = TE_SWIGLU, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "product[0].d has both products then");
    a.product[1].d = NULL, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "leave one of them 0");
    a.residual = NULL, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "product[0].d is [2, 16]; a contiguous [4, 16]");
    a.product[0].d = te_tensor_zeros(te, TE_BF16, SHAPE(2, 2, 16)), a.activation = TE_GELU, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "a gated one without parameters");
    a.activation = TE_SWIGLU, a.y = other, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "y is f32 and product[0].d bf16");
    a.y = te_tensor_zeros(te, TE_BF16, SHAPE(2, 16)), a.product[1].n = 8, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "product[0].n is 16 and product[1].n 8");
    a.product[1].n = 16;
    CHECK_EQ_INT(te_op_joint_gemm(te, &a), TE_OK);
    a = good, a.k = 33, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "a is [2, 32]; [2, 33]");
    a = good, a.norm_weight = te_tensor_zeros(te, TE_BF16, SHAPE(32)), a.norm.normalization = (te_normalization)3, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "norm.normalization is 3; TE_LAYERNORM (1), TE_RMSNORM (2), and 0 for no norm");
    a = good, a.norm_weight = te_tensor_zeros(te, TE_BF16, SHAPE(32)), te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "norm_weight is given, and norm.normalization is 0");
    a.norm.normalization = TE_RMSNORM;
    CHECK_EQ_INT(te_op_joint_gemm(te, &a), TE_OK);
    a.norm_bias = a.norm_weight, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "TE_RMSNORM, which has no norm_bias; leave it NULL");
    a.norm.normalization = TE_LAYERNORM;
    CHECK_EQ_INT(te_op_joint_gemm(te, &a), TE_OK);
    a.norm_rounded = true, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "TE_LAYERNORM, which has no norm_rounded");
    a.norm_rounded = false, a.norm.eps = -1, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "joint_gemm: eps is -1");
    a.norm.eps = 0, a.norm_bias = te_tensor_zeros(te, TE_BF16, SHAPE(31)), te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "norm_bias is [31]; 32 elements are needed");
    a.norm_bias = NULL, a.norm_weight = NULL, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "norm_weight is NULL");
    CHECK_OK(te);
}

/* Queries, keys and values that are rotated into the rows of a cache: the products, and the bits that te_op_qkv_rope has of them. */
typedef struct into_case {
    const char *name;
    int64_t s, b;
    int heads, groups, d, rotary;
    bool sbhd, paged, interleaved, none, table, codes;
    int joint; /* of joint_cases */
    before norm;
    int64_t k;
    te_dtype dtype;
    bool one_launch;
} into_case;
static const into_case into_cases[] = {
    {.name = "one token", .s = 1, .b = 1, .heads = 8, .groups = 2, .d = 64, .k = 256, .norm = RMS, .one_launch = true},
    {.name = "heads of 128", .s = 1, .b = 3, .heads = 4, .groups = 4, .d = 128, .paged = true, .k = 192, .one_launch = true},
    {.name = "half of the channels", .s = 2, .b = 2, .heads = 4, .groups = 1, .d = 96, .rotary = 48, .k = 128, .norm = LAYER, .one_launch = true},
    {.name = "some channels", .s = 2, .b = 2, .heads = 4, .groups = 2, .d = 64, .rotary = 32, .sbhd = true, .paged = true, .k = 128, .dtype = TE_F16, .one_launch = true},
    {.name = "no rotation", .s = 1, .b = 2, .heads = 4, .groups = 2, .d = 64, .none = true, .k = 256, .one_launch = true},
    {.name = "by a table", .s = 2, .b = 2, .heads = 4, .groups = 2, .d = 64, .table = true, .k = 256, .one_launch = true},
    {.name = "current scaling", .s = 1, .b = 2, .heads = 4, .groups = 2, .d = 64, .joint = 3, .norm = RMS_ROUNDED, .k = 256, .one_launch = true},
    {.name = "blocks", .s = 1, .b = 1, .heads = 8, .groups = 2, .d = 64, .joint = 4, .k = 256, .one_launch = true},
    {.name = "blocks, heads of 256", .s = 1, .b = 1, .heads = 4, .groups = 2, .d = 256, .joint = 4, .k = 256},
    {.name = "MXFP8", .s = 4, .b = 4, .heads = 8, .groups = 2, .d = 32, .joint = 5, .paged = true, .k = 256, .one_launch = true},
    {.name = "MXFP8, one token", .s = 1, .b = 1, .heads = 16, .groups = 8, .d = 64, .joint = 5, .k = 512, .one_launch = true},
    {.name = "NVFP4", .s = 1, .b = 1, .heads = 16, .groups = 8, .d = 64, .joint = 6, .norm = RMS, .k = 512, .one_launch = true},
    {.name = "NVFP4, 16 rotated channels", .s = 1, .b = 1, .heads = 16, .groups = 8, .d = 64, .rotary = 16, .joint = 6, .k = 4096, .one_launch = true},
    {.name = "NVFP4, more tiles than groups of warps", .s = 1, .b = 1, .heads = 264, .groups = 8, .d = 128, .joint = 6, .k = 256, .one_launch = true},
    {.name = "neighbouring channels", .s = 1, .b = 2, .heads = 4, .groups = 2, .d = 64, .interleaved = true, .k = 256},
    {.name = "a cache of codes", .s = 1, .b = 2, .heads = 4, .groups = 2, .d = 64, .codes = true, .k = 256, .norm = RMS},
    {.name = "heads of 24", .s = 2, .b = 2, .heads = 4, .groups = 2, .d = 24, .k = 128},
    {.name = "12 rotated channels", .s = 1, .b = 2, .heads = 4, .groups = 2, .d = 32, .rotary = 12, .k = 128},
    {.name = "f32", .s = 1, .b = 2, .heads = 4, .groups = 2, .d = 64, .joint = 2, .k = 128},
    {.name = "many tokens", .s = 9, .b = 3, .heads = 4, .groups = 2, .d = 64, .k = 128},
};
static void check_into(te_ctx *te, const into_case *c) {
    enum { PAGES = 3 }; /* of a sequence */
    const joint_case *j = &joint_cases[c->joint];
    const te_dtype dtype = j->kind ? TE_BF16 : c->dtype ? c->dtype : j->dtype, kept = c->codes ? TE_F8E4M3 : dtype;
    const int64_t m = c->s * c->b, pages = c->paged ? PAGES * c->b : c->b, size = c->paged ? 4 : 12, groups = c->groups, d = c->d, width = (c->heads + 2 * groups) * d;
    int32_t cu[8] = {0}, starts[8], table[8 * PAGES];
    te_op_joint_gemm_args a = {0};
    te_op_qkv_rope_args apart;
    te_explanation e;
    test_case("%s", c->name);
    te_scope_begin(te);
    for (int i = 0; i < c->b; i++) {
        cu[i + 1] = cu[i] + (int32_t)(i % 2 && c->s > 1 ? c->s - 1 : c->s); /* a sequence with fewer tokens than rows */
        starts[i] = 3 + (i == 2 ? 20 : i); /* the third has no place left */
        for (int k = 0; k < PAGES; k++) table[PAGES * i + k] = (int32_t)(PAGES * ((i + 1) % c->b) + PAGES - 1 - k);
    }
    a.a = test_tensor(te, dtype, SHAPE(m, c->k), test_normal(m * c->k, 1));
    a.count = 3, a.m = m, a.k = c->k;
    a.scaling_a = j->scaling, a.scaling_b = j->of_weight;
    if (j->kind && m <= 16) a.quantize_a = j->dtype, a.quantize_power_of_two = j->kind == TE_QUANT_BLOCK;
    norm_of(te, c->norm, TE_DTYPE_NONE, &a);
    te_tensor *packed[2] = {test_guarded(te, dtype, SHAPE(m, width)), test_guarded(te, dtype, SHAPE(m, width))}, *parts[3];
    for (int64_t i = 0, from = 0; i < 3; from += a.product[i++].n) {
        te_joint_product *p = &a.product[i];
        p->n = (i ? groups : c->heads) * d;
        te_tensor *w = test_tensor(te, dtype, SHAPE(p->n, c->k), test_normal(p->n * c->k, (uint64_t)(7 + i)));
        if (j->kind) weight_of(te, j, TE_F8E4M3, false, w, p);
        else p->b = w;
        p->bias = i ? NULL : test_tensor(te, TE_BF16, SHAPE(p->n), test_normal(p->n, 9));
        p->d = i ? NULL : packed[0];
        parts[i] = te_tensor_narrow(packed[1], 1, from, p->n);
    }
    a.rope.format = c->sbhd ? TE_SBHD : TE_BSHD;
    a.rope.num_heads = c->heads, a.rope.num_groups = c->groups, a.rope.head_dim = c->d;
    a.rope.no_rope = c->none;
    a.rope.angles.rotary_dim = c->rotary;
    a.rope.angles.interleaved = c->interleaved;
    a.rope.angles.attention_factor = c->rotary ? 1.25f : 0;
    a.rope.angles.start_positions = te_tensor_from_host(te, TE_I32, SHAPE(c->b), starts);
    if (c->table) a.rope.angles.freqs = test_tensor(te, TE_F32, SHAPE(40, c->b, 1, d), test_normal(40 * c->b * d, 5));
    a.rope.cu_seqlens = te_tensor_from_host(te, TE_I32, SHAPE(c->b + 1), cu);
    a.rope.cache_positions = a.rope.angles.start_positions;
    a.rope.page_table = c->paged ? te_tensor_from_host(te, TE_I32, SHAPE(c->b, PAGES), table) : NULL;
    apart = a.rope;
    te_tensor *q[2], *cache[4], *factors[4];
    const float *old = test_normal(pages * size * groups * d, 2);
    for (int i = 0; i < 2; i++) q[i] = test_guarded(te, dtype, SHAPE(c->sbhd ? c->s : c->b, c->sbhd ? c->b : c->s, c->heads, d));
    for (int i = 0; i < 4; i++) cache[i] = test_guarded_with(te, kept, SHAPE(pages, size, groups, d), old);
    for (int i = 0; i < 4; i++) factors[i] = c->codes ? test_guarded_with(te, TE_F8E8M0, SHAPE(pages, size, groups), old) : NULL;
    a.rope.q = q[0], a.rope.k_cache = cache[0], a.rope.v_cache = cache[1], a.rope.k_factors = factors[0], a.rope.v_factors = factors[1];
    apart.q = q[1], apart.k_cache = cache[2], apart.v_cache = cache[3], apart.k_factors = factors[2], apart.v_factors = factors[3];
    apart.qkv = packed[0];
    REQUIRE_OK(te);
    REQUIRE(te_explain(te, TE_OP_JOINT_GEMM, &a, "sm_90", &e) == TE_OK);
    if (c->one_launch) CHECK_MSG(e.launches == 1 && strstr(e.kernels, "ROPE=1"), "%d launches: %s", e.launches, e.kernels);
    else CHECK_MSG(e.launches > 1 && !strstr(e.kernels, "ROPE="), "%d launches: %s", e.launches, e.kernels);
    te_op_joint_gemm(te, &a);
    by_calls(te, &a, parts, NULL);
    te_op_qkv_rope(te, &apart);
    REQUIRE_OK(te);
    check_d(te, packed[0], packed[1], c->k);
    CHECK_BYTES("q", test_read_bytes(q[0]), test_read_bytes(q[1]), te_tensor_bytes(q[1]));
    for (int i = 0; i < 2; i++) CHECK_BYTES(i ? "v_cache" : "k_cache", test_read_bytes(cache[i]), test_read_bytes(cache[2 + i]), te_tensor_bytes(cache[i]));
    for (int i = 0; c->codes && i < 2; i++) CHECK_BYTES(i ? "v_factors" : "k_factors", test_read_bytes(factors[i]), test_read_bytes(factors[2 + i]), te_tensor_bytes(factors[i]));
    te_tensor *out[] = {packed[0], q[0], cache[0], cache[1]};
    check_norm_apart(te, &a, out, COUNT(out));
    te_scope_end(te);
}
TE_TEST_DEVICES(joint_gemm_into_cache) {
    for (int i = 0; i < COUNT(into_cases); i++) check_into(te, &into_cases[i]);
}
TE_TEST_DEVICES(joint_gemm_into_cache_complaints) {
    enum { M = 2, K = 32, D = 16 };
    te_op_joint_gemm_args good = {0}, a;
    te_tensor *packed = te_tensor_zeros(te, TE_BF16, SHAPE(M, 4 * D)), *number = te_tensor_zeros(te, TE_I32, SHAPE(M));
    good.a = te_tensor_zeros(te, TE_BF16, SHAPE(M, K)), good.count = 3, good.m = M, good.k = K;
    for (int i = 0; i < 3; i++) {
        good.product[i].n = i ? D : 2 * D;
        good.product[i].b = te_tensor_zeros(te, TE_BF16, SHAPE(good.product[i].n, K));
        good.product[i].d = i ? NULL : packed;
    }
    good.rope.q = te_tensor_zeros(te, TE_BF16, SHAPE(M, 1, 2, D));
    good.rope.k_cache = te_tensor_zeros(te, TE_BF16, SHAPE(M, 4, 1, D)), good.rope.v_cache = te_tensor_zeros(te, TE_BF16, SHAPE(M, 4, 1, D));
    good.rope.cu_seqlens = te_tensor_from_host(te, TE_I32, SHAPE(M + 1), (const int32_t[]){0, 1, 2}), good.rope.cache_positions = number;
    good.rope.format = TE_BSHD, good.rope.num_heads = 2, good.rope.num_groups = 1, good.rope.head_dim = D;
    a = good;
    CHECK_EQ_INT(te_op_joint_gemm(te, &a), TE_OK);
    a = good, a.rope.q = NULL, a.product[0].d = te_tensor_narrow(packed, 1, 0, 2 * D), a.product[1].d = te_tensor_narrow(packed, 1, 2 * D, D), a.product[2].d = te_tensor_narrow(packed, 1, 3 * D, D), te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "rope.k_cache is given, and rope.q NULL");
    a = good, a.count = 2, a.product[2].b = NULL, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "rope.q is given, with count 2, activation 0 and residual NULL");
    a = good, a.rope.qkv = packed, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "rope.qkv is given; with rope.q");
    a = good, a.rope.interleaved_groups = true, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "rope.interleaved_groups is true");
    a = good, a.rope.k_cache = NULL, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "rope.k_cache is NULL");
    a = good, a.rope.num_groups = 2, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "product[1].n is 16, and rope has 2 heads of 16");
    a = good, a.product[2].d = te_tensor_zeros(te, TE_BF16, SHAPE(M, D)), te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "rope.q and product[2].d are given; product[0].d has all three");
    a = good, a.product[0].d = te_tensor_zeros(te, TE_BF16, SHAPE(M, 2 * D)), te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "product[0].d is [2, 32]; with rope.q, a contiguous [2, 64]");
    a = good, a.rope.cu_seqlens = NULL, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "qkv_rope: k_cache, v_cache, cu_seqlens and cache_positions belong together");
    a = good, a.rope.angles.rotary_dim = 3, te_op_joint_gemm(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "3 of 16 channels are to be rotated");
    CHECK_OK(te);
}
/* A graph's calls come later than the memory that their frequencies were read from. */
TE_TEST_DEVICES(joint_gemm_in_a_graph_keeps_its_frequencies) {
    enum { K = 64, D = 16 };
    te_op_joint_gemm_args a = {0};
    float freq[D / 2], *q[2];
    te_tensor *packed = te_tensor_zeros(te, TE_BF16, SHAPE(1, 3 * D));
    a.a = test_tensor(te, TE_BF16, SHAPE(1, K), test_normal(K, 1)), a.count = 3, a.m = 1, a.k = K;
    for (int i = 0; i < 3; i++) {
        a.product[i].n = D;
        a.product[i].b = test_tensor(te, TE_BF16, SHAPE(D, K), test_normal(D * K, (uint64_t)(2 + i)));
        a.product[i].d = i ? NULL : packed;
    }
    a.rope = (te_op_qkv_rope_args){.q = te_tensor_zeros(te, TE_BF16, SHAPE(1, 1, 1, D)), .k_cache = te_tensor_zeros(te, TE_BF16, SHAPE(1, 4, 1, D)),
                                   .v_cache = te_tensor_zeros(te, TE_BF16, SHAPE(1, 4, 1, D)), .num_heads = 1, .num_groups = 1, .head_dim = D, .angles.position_offset = 5};
    a.rope.cu_seqlens = te_tensor_from_host(te, TE_I32, SHAPE(2), (const int32_t[]){0, 1}), a.rope.cache_positions = te_tensor_zeros(te, TE_I32, SHAPE(1));
    for (int run = 0; run < 2; run++) {
        te_graph *g = NULL;
        for (int i = 0; i < COUNT(freq); i++) freq[i] = 1.0f / (float)(1 + i);
        a.rope.angles.inv_freq = freq;
        if (run) REQUIRE(te_graph_begin(te) == TE_OK);
        te_op_joint_gemm(te, &a);
        if (run) {
            g = te_graph_end(te);
            REQUIRE(g != NULL);
            for (int i = 0; i < COUNT(freq); i++) freq[i] = 77;
            te_tensor_fill(a.rope.q, 0);
            CHECK_EQ_INT(te_graph_launch(g), TE_OK);
        }
        REQUIRE_OK(te);
        q[run] = test_read(a.rope.q);
        te_graph_destroy(g);
    }
    CHECK_BYTES("by a graph", q[1], q[0], D * sizeof(float));
}

/* Products whose B or D are of different formats are no parts of one launch, which reads and writes one of each. D may
 * be a part of wider rows. */
TE_TEST_DEVICES(joint_gemm_of_mixed_formats) {
    enum { M = 3, N = 48, K = 256 };
    for (int mixed_b = 0; mixed_b < 2; mixed_b++)
        for (int count = 2; count <= 3; count++) {
            te_op_joint_gemm_args a = {0};
            te_explanation e;
            test_case("%s, %d products", mixed_b ? "e4m3 and e5m2" : "bf16 and f32", count);
            a.a = test_tensor(te, TE_BF16, SHAPE(M, K), test_normal(M * K, 1));
            a.count = count;
            a.m = M, a.k = K;
            if (mixed_b) a.quantize_a = TE_F8E4M3;
            te_tensor *d[3], *wide = test_guarded(te, TE_BF16, SHAPE(M, 3 * N));
            for (int i = 0; i < count; i++) {
                const bool other = i + 1 == count;
                te_joint_product *p = &a.product[i];
                te_tensor *w = test_tensor(te, TE_BF16, SHAPE(N, K), test_normal(N * K, (uint64_t)(2 + i)));
                p->n = N;
                if (mixed_b) weight_of(te, &joint_cases[3], other ? TE_F8E5M2 : TE_F8E4M3, false, w, p);
                else p->b = w;
                p->d = other && !mixed_b ? test_guarded(te, TE_F32, SHAPE(M, N)) : te_tensor_narrow(wide, 1, i * N, N);
                d[i] = test_guarded(te, other && !mixed_b ? TE_F32 : TE_BF16, SHAPE(M, N));
            }
            REQUIRE_OK(te);
            REQUIRE(te_explain(te, TE_OP_JOINT_GEMM, &a, "sm_90", &e) == TE_OK);
            CHECK_MSG(e.launches == count && !strstr(e.kernels, "JOINT="), "%d launches: %s", e.launches, e.kernels);
            te_op_joint_gemm(te, &a);
            by_calls(te, &a, d, NULL);
            REQUIRE_OK(te);
            for (int i = 0; i < count; i++)
                CHECK_BYTES("D", test_read_bytes(te_tensor_contiguous(a.product[i].d)), test_read_bytes(d[i]),
                            te_tensor_bytes(d[i]));
        }
}

/* k is too long for gemv_k beside so few lines of B: each of three products quantizes A, which a norm makes,
 * decodes both operands and splits k, and has workspaces for all of that. */
TE_TEST_DEVICES(joint_gemm_with_most_workspaces) {
    static const int64_t widths[3] = {32, 32, 48};
    for (int c = COUNT(joint_cases) - 2; c < COUNT(joint_cases); c++) /* MXFP8, NVFP4 */
        check_normed(te, &joint_cases[c], RMS, TE_DTYPE_NONE, NOTHING, TE_BF16, 3, 4, widths, 16640, false);
}

/* ---- launches of a decoding step ---- */

/* Begins a plan for a GPU of 132 multiprocessors, on paper. */
static void joint_plan_begin(te__plan *p, te_ctx *te) {
    te__plan_begin(p, te);
    p->explain = p->hopper = p->edits_maps = true;
    p->sm = 90;
    p->num_sms = 132;
}
/* The shared memory of a block, where a step after products of one row of k values decides on the launch: a sum, a gate, or none. On paper. */
static int64_t joint_room(te_ctx *te, te_dtype dt, int64_t k, int64_t n, bool sum, bool gated) {
    static uint64_t storage[32]; /* nobody reads it */
    char *data = (char *)storage + (64 - (uintptr_t)storage % 64) % 64;
    te_op_gemm_args a[2] = {TE_ZERO, TE_ZERO};
    te__gemm_joint joint = TE_ZERO;
    te__plan p;
    int64_t shared = 0;
    for (int i = 0; i < 2; i++) {
        a[i].a = te_tensor_wrap(te, dt, SHAPE(1, k), data, NULL, NULL);
        a[i].b = te_tensor_wrap(te, dt, SHAPE(n, k), data, NULL, NULL);
        a[i].d = te_tensor_wrap(te, dt, SHAPE(1, n), data, NULL, NULL);
        a[i].m = 1, a[i].n = n, a[i].k = k;
        a[i].b_transposed = true;
    }
    joint.count = gated ? 2 : 1;
    joint.activation = gated ? TE_SWIGLU : (te_activation)0;
    joint.residual = sum ? te_tensor_wrap(te, dt, SHAPE(1, n), data, NULL, NULL) : NULL;
    joint.y = te_tensor_wrap(te, dt, SHAPE(1, n), data, NULL, NULL);
    joint_plan_begin(&p, te);
    CHECK(te__gemm_plan_joint(&p, a, joint));
    CHECK(p.num_launches == 1 && !strcmp(p.launch[0].kernel, "gemv_joint") && p.launch[0].overlaps);
    if (p.num_launches) shared = p.launch[0].shared_bytes;
    CHECK(p.num_launches && p.launch[0].grid[0] == 132);
    te__plan_end(&p);
    return shared;
}
/* The turns of B on their way in q, k and v of one row of NVFP4, `lines` of q and as many of k and v together. On paper. */
static int64_t joint_depth(te_ctx *te, int64_t k, int64_t lines, bool rotated) {
    static uint64_t storage[32]; /* nobody reads it */
    char *data = (char *)storage + (64 - (uintptr_t)storage % 64) % 64;
    te_op_gemm_args a[2] = {TE_ZERO, TE_ZERO};
    te__gemm_joint joint = TE_ZERO;
    te__rope_kargs rope = TE_ZERO;
    te__plan p;
    int64_t depth = 0;
    for (int i = 0; i < 2; i++) {
        a[i].a = te_tensor_wrap(te, TE_BF16, SHAPE(1, k), data, NULL, NULL);
        a[i].b = te_tensor_wrap(te, TE_F4E2M1, SHAPE(lines, k), data, NULL, NULL);
        a[i].scale_b = te_tensor_wrap(te, TE_F8E4M3, SHAPE(lines, k / 16), data, NULL, NULL);
        a[i].amax_b = te_tensor_wrap(te, TE_F32, SHAPE(1), data, NULL, NULL);
        a[i].d = te_tensor_wrap(te, TE_BF16, SHAPE(1, lines), data, NULL, NULL);
        a[i].m = 1, a[i].n = lines, a[i].k = k;
        a[i].b_transposed = true;
        a[i].scaling_a = a[i].scaling_b = TE_SCALING_NVFP4, a[i].quantize_a = TE_F4E2M1;
    }
    joint.count = 2;
    joint.rope = rotated ? &rope : NULL;
    joint.rope_bytes = rotated ? sizeof(rope) : 0;
    joint_plan_begin(&p, te);
    CHECK(te__gemm_plan_joint(&p, a, joint));
    for (int i = 0; p.num_launches && i < p.launch[0].num_options; i++)
        if (!strcmp(p.launch[0].option[i].name, "DEPTH")) depth = p.launch[0].option[i].value;
    te__plan_end(&p);
    return depth;
}
/* The rotation that gemv_joint keeps for NVFP4 takes no turn's place in models of 1.5 to 32 G parameters. */
TE_TEST(joint_rotation_leaves_room_for_turns) {
    static const int64_t sizes[][2] = {{2048, 3072}, {4096, 6144}, {4096, 12288}, {5120, 7168}, {5120, 10240}, {5120, 15360}};
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int i = 0; i < COUNT(sizes); i++) {
        test_case("hidden %d, %d lines", (int)sizes[i][0], (int)sizes[i][1]);
        CHECK_EQ_INT(joint_depth(te, sizes[i][0], sizes[i][1] / 2, true), 2);
        CHECK_EQ_INT(joint_depth(te, sizes[i][0], sizes[i][1] / 2, false), 2);
    }
    CHECK_OK(te);
}
/* A multiprocessor has room for one block of a sum, never for two, and beside it for one block of what follows. A block takes 1024 bytes more than it asks for. */
TE_TEST(joint_launches_are_wide_and_narrow) {
    static const int64_t sizes[][2] = {{2048, 8192}, {4096, 12288}, {512, 1536}, {64, 64}};
    const int64_t all = 228 * 1024, each = 1024;
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int i = 0; i < COUNT(sizes); i++) {
        const int64_t hidden = sizes[i][0], inner = sizes[i][1];
        const int64_t narrow[] = {joint_room(te, TE_BF16, hidden, hidden + hidden / 2, false, false), joint_room(te, TE_BF16, hidden, inner, false, true)};
        const int64_t wide[] = {joint_room(te, TE_BF16, hidden, hidden, true, false), joint_room(te, TE_BF16, inner, hidden, true, false)};
        test_case("hidden %d", (int)hidden);
        for (int w = 0; w < 2; w++)
            for (int n = 0; n < 2; n++) {
                CHECK(2 * (wide[w] + each) > all);
                CHECK(wide[w] + each + narrow[n] + each <= all);
            }
    }
    CHECK_OK(te);
}
