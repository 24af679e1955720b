/* test_joint.c: te_op_joint_gemm beside its parts by calls of their own: each step after the products, formats and recipes, one row to sixteen. */
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
                                         {"NVFP4", TE_QUANT_NVFP4, TE_F4E2M1, TE_SCALING_NVFP4, TE_SCALING_NVFP4}};
typedef enum step { NOTHING, ACTIVATION, RESIDUAL } step;

/* The row-wise codes of w; `fp8`: their format, if it is not NVFP4. */
static void weight_of(te_ctx *te, const joint_case *c, te_dtype fp8, te_tensor *w, te_joint_product *p) {
    te_quantizer_desc desc = {0};
    te_tensor *codes = NULL, *scales = NULL;
    desc.kind = c->kind;
    desc.dtype = c->kind == TE_QUANT_NVFP4 ? TE_F4E2M1 : fp8;
    desc.usage = TE_ROWWISE;
    if (c->kind == TE_QUANT_BLOCK) desc.block.block_scaling_dim = c->of_weight == TE_SCALING_BLOCK_2D ? 2 : 1;
    te_quantizer *q = te_quantizer_create(te, &desc);
    te_tensor *y = q ? te_quantize(q, w) : NULL;
    if (y) {
        te_quantized_view(y, TE_ROWWISE, &codes, &scales);
        p->b = codes, p->scale_b = scales, p->amax_b = te_quantized_amax(y, TE_ROWWISE);
    }
    te_quantizer_destroy(q);
}
/* Computes the products of the call by te_op_gemm, to d, and the step after them from the call's own D, to y. */
static void by_calls(te_ctx *te, const te_op_joint_gemm_args *a, te_tensor *d[3], te_tensor *y) {
    for (int i = 0; i < a->count; i++) {
        te_op_gemm_args g = {0};
        const te_joint_product *p = &a->product[i];
        g.a = a->a, g.b = p->b, g.d = d[i], g.bias = p->bias, g.scale_b = p->scale_b, g.amax_b = p->amax_b;
        g.m = a->m, g.n = p->n, g.k = a->k;
        g.b_transposed = true;
        g.scaling_a = a->scaling_a, g.scaling_b = a->scaling_b;
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

static void check_joint(te_ctx *te, const joint_case *c, step s, te_dtype in, int count, int64_t m, const int64_t *widths, int64_t k, bool one_launch) {
    te_op_joint_gemm_args a = {0};
    te_explanation e;
    te_tensor *d[3] = {NULL}, *y = NULL;
    const te_dtype out = c->kind ? in : c->dtype;
    te_scope_begin(te);
    test_case("%s, step %d, %s, %d products, m=%lld n=%lld k=%lld", c->name, (int)s, te_dtype_name(out), count, (long long)m, (long long)widths[0], (long long)k);
    a.a = test_tensor(te, out, SHAPE(m, k), test_normal(m * k, (uint64_t)(m + k)));
    a.count = count;
    a.m = m, a.k = k;
    a.scaling_a = c->scaling, a.scaling_b = c->of_weight;
    if (c->kind) a.quantize_a = c->dtype, a.quantize_power_of_two = c->kind == TE_QUANT_BLOCK;
    te_tensor *halves = s == ACTIVATION ? test_guarded(te, out, SHAPE(2, m, widths[0])) : NULL;
    for (int i = 0; i < count; i++) {
        te_joint_product *p = &a.product[i];
        p->n = s == ACTIVATION ? widths[0] : widths[i];
        te_tensor *w = test_tensor(te, out, SHAPE(p->n, k), test_normal(p->n * k, (uint64_t)(7 + i)));
        if (c->kind) weight_of(te, c, TE_F8E4M3, w, p);
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
    if (one_launch) CHECK_MSG(e.launches == 1 && strstr(e.kernels, "JOINT="), "%d launches: %s", e.launches, e.kernels);
    te_op_joint_gemm(te, &a);
    by_calls(te, &a, d, y);
    REQUIRE_OK(te);
    for (int i = 0; i < count; i++) {
        te_tensor *of_joint = halves ? te_tensor_narrow(halves, 0, i, 1) : a.product[i].d;
        if (te_ctx_is_cuda(te)) /* warps share k in another way: sums up to 4 sqrt(k), of k terms, round by 2^-24 of that; then D rounds once on each side */
            CHECK_CLOSE("D", test_read(of_joint), test_read(d[i]), te_tensor_numel(d[i]), out == TE_F32 ? 0x1p-20 : 0x1p-7, 4 * sqrt((double)k) * 0x1p-24 * sqrt((double)k));
        else
            CHECK_BYTES("D", test_read_bytes(of_joint), test_read_bytes(d[i]), te_tensor_bytes(d[i]));
    }
    if (s) CHECK_BYTES("y", test_read_bytes(a.y), test_read_bytes(y), te_tensor_bytes(y));
    te_scope_end(te);
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
                                m <= 4 && j->dtype != TE_F32 && whole && w != 1);
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
            check_joint(te, &joint_cases[c], (step)s, TE_BF16, s == NOTHING ? 3 : s == ACTIVATION ? 2 : 1, 1, widths, 1024, joint_cases[c].dtype != TE_F32);
            check_joint(te, &joint_cases[c], (step)s, TE_BF16, s == NOTHING ? 3 : s == ACTIVATION ? 2 : 1, 2, wide, 512, false);
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
    CHECK_ERROR(te, TE_ERR_SHAPE, "A is [2, 32]");
    CHECK_OK(te);
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
                if (mixed_b) weight_of(te, &joint_cases[3], other ? TE_F8E5M2 : TE_F8E4M3, w, p);
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

/* k is too long for gemv_k beside so few lines of B: each of three products quantizes A, decodes both operands and
 * splits k, and has workspaces for all of that. */
TE_TEST_DEVICES(joint_gemm_with_most_workspaces) {
    static const int64_t widths[3] = {32, 32, 48};
    for (int c = COUNT(joint_cases) - 2; c < COUNT(joint_cases); c++) /* MXFP8, NVFP4 */
        check_joint(te, &joint_cases[c], NOTHING, TE_BF16, 3, 4, widths, 16640, false);
}
