/* tests/faults/test_quant.c: what quantizers, recipes and quantized products refuse: the rule and the way out are named, no tensor has changed,
 * and every later call is safe. Raw operations on scaled operands; recipes and modules; quantizers of one's own that fail halfway; NULL;
 * NaN and infinity; no memory in the middle. */
#include "purse.h"
#include "refused.h"

#include <float.h>

/* ---- tensors that must not change -------------------------------------------------------------------------------- */

enum { KEPT = 96 };
typedef struct kept {
    const te_tensor *x;
    int which, part; /* of a quantized tensor: the copy, and 0 codes, 1 scales, 2 amax; which 0: plain */
    size_t bytes;
    void *content;
} kept;
static kept keeping[KEPT];
static int num_kept;

static const te_tensor *kept_part(const kept *k) {
    te_tensor *data = NULL, *scale = NULL;
    if (!k->which) return k->x;
    if (k->part == 2) return te_quantized_amax(k->x, k->which);
    te_quantized_view(k->x, k->which, &data, &scale);
    return k->part ? scale : data;
}
static void forget(void) { num_kept = 0; }
static void keep_part(const te_tensor *x, int which, int part) {
    kept k = {0};
    k.x = x;
    k.which = which;
    k.part = part;
    const te_tensor *y = kept_part(&k);
    if (!y) return;
    if (num_kept == KEPT) {
        test_fail(__FILE__, __LINE__, "too many tensors to watch");
        return;
    }
    k.bytes = te_tensor_bytes(y);
    k.content = test_read_bytes(y);
    keeping[num_kept++] = k;
}
/* x, plain or quantized, must stay as it is from here on. */
static void keep(const te_tensor *x) {
    if (!x) return;
    if (!te_tensor_is_quantized(x)) {
        keep_part(x, 0, 0);
        return;
    }
    for (int which = TE_ROWWISE; which <= TE_COLUMNWISE; which++)
        for (int part = 0; part < 3; part++)
            if (te_quantized_usage(x) & which) keep_part(x, which, part);
}
static bool unchanged_at(int line) {
    bool same = true;
    for (int i = 0; i < num_kept; i++) {
        const te_tensor *y = kept_part(&keeping[i]);
        if (!y || te_tensor_bytes(y) != keeping[i].bytes || memcmp(test_read_bytes(y), keeping[i].content, keeping[i].bytes) != 0) {
            test_fail(__FILE__, line, "a failed call changed tensor %d (copy %d, part %d)", i, keeping[i].which, keeping[i].part);
            same = false;
        }
    }
    return same;
}
#define UNCHANGED() unchanged_at(__LINE__)
#define REFUSED_KEPT(call, code, a, b, c) \
    do {                                  \
        REFUSED(call, code, a, b, c);     \
        UNCHANGED();                      \
    } while (0)
#define REFUSES_KEPT(call, code, a, b, c) \
    do {                                  \
        REFUSES(call, code, a, b, c);     \
        UNCHANGED();                      \
    } while (0)

/* ---- kinds ------------------------------------------------------------------------------------------------------- */

enum { KINDS = 9, RECIPES = 5 };
static const char *const kind_names[KINDS] = {"delayed", "current", "block 1-D", "block 2-D", "mxfp8", "nvfp4", "nvfp4 2-D", "nvfp4 rht", "hybrid"};
static te_quantizer_desc hybrid_row, hybrid_col;
static te_quantizer_desc kind_of(int i) {
    static const te_quant_kind kind[KINDS] = {TE_QUANT_DELAYED, TE_QUANT_CURRENT, TE_QUANT_BLOCK, TE_QUANT_BLOCK, TE_QUANT_MXFP8, TE_QUANT_NVFP4, TE_QUANT_NVFP4, TE_QUANT_NVFP4, TE_QUANT_HYBRID};
    te_quantizer_desc d = {0};
    d.kind = kind[i];
    if (i == 2) d.block.block_scaling_dim = 1;
    d.quantization_2d = i == 6 ? TE_ON : TE_DEFAULT;
    d.nvfp4.rht = i == 7 ? TE_ON : TE_DEFAULT;
    if (i == 8) {
        memset(&hybrid_row, 0, sizeof hybrid_row);
        hybrid_col = hybrid_row;
        hybrid_row.kind = TE_QUANT_NVFP4;
        hybrid_col.kind = TE_QUANT_BLOCK;
        d.hybrid.rowwise_quantizer = &hybrid_row;
        d.hybrid.columnwise_quantizer = &hybrid_col;
    }
    return d;
}
static te_recipe recipe_of(int kind) {
    switch (kind) {
    case TE_RECIPE_DELAYED: return te_recipe_delayed_scaling();
    case TE_RECIPE_CURRENT: return te_recipe_current_scaling();
    case TE_RECIPE_BLOCK: return te_recipe_block_scaling();
    case TE_RECIPE_MXFP8: return te_recipe_mxfp8();
    default: return te_recipe_nvfp4();
    }
}
static te_tensor *quantized(te_ctx *te, te_quantizer_desc d, te_tensor *x) {
    te_quantizer *q = te_quantizer_create(te, &d);
    te_tensor *y = te_quantize(q, x);
    te_quantizer_destroy(q);
    return y;
}
static te_tensor *normal(te_ctx *te, int64_t m, int64_t n, uint64_t seed) { return test_tensor(te, TE_F32, SHAPE(m, n), test_normal(m * n, seed)); }

static te_module *linear_of(te_ctx *te, const char *name) {
    te_linear_desc d = {0};
    d.in_features = 32;
    d.out_features = 16;
    d.gemm.params_dtype = TE_F32;
    d.name = name;
    return te_linear_create(te, &d);
}
/* ---- raw products ------------------------------------------------------------------------------------------------ */

typedef struct operand {
    te_tensor *data, *scale, *amax;
    te_scaling scaling;
} operand;
static operand operand_of(te_ctx *te, te_quantizer_desc d, te_tensor *x) {
    operand o = {0};
    te_tensor *y = quantized(te, d, x);
    te_quantized_view(y, TE_ROWWISE, &o.data, &o.scale);
    o.amax = te_quantized_amax(y, TE_ROWWISE);
    o.scaling = d.kind == TE_QUANT_BLOCK ? d.block.block_scaling_dim == 1 ? TE_SCALING_BLOCK_1D : TE_SCALING_BLOCK_2D : d.kind == TE_QUANT_MXFP8 ? TE_SCALING_MXFP8
                : d.kind == TE_QUANT_NVFP4 ? TE_SCALING_NVFP4 : TE_SCALING_TENSOR;
    keep(o.data);
    keep(o.scale);
    if (o.amax) keep(o.amax);
    return o;
}
enum { GEMM_M = 24, GEMM_N = 40, GEMM_K = 160 };
static te_op_gemm_args gemm_of(const operand *a, const operand *b, te_tensor *d) {
    te_op_gemm_args g = {0};
    g.a = a->data;
    g.b = b->data;
    g.d = d;
    g.m = GEMM_M;
    g.n = GEMM_N;
    g.k = GEMM_K;
    g.b_transposed = true;
    g.scale_a = a->scale;
    g.scale_b = b->scale;
    g.scaling_a = a->scaling;
    g.scaling_b = b->scaling;
    g.amax_a = a->amax;
    g.amax_b = b->amax;
    return g;
}

TE_TEST_DEVICES(raw_products_of_operands_that_do_not_meet) {
    static const char *const names[] = {"TENSOR", "BLOCK_1D", "BLOCK_2D", "MXFP8", "NVFP4"};
    model bystander = new_bystander(te);
    te_tensor *x = normal(te, GEMM_M, GEMM_K, 1), *w = normal(te, GEMM_N, GEMM_K, 2), *d = test_guarded_with(te, TE_F32, SHAPE(GEMM_M, GEMM_N), test_normal(GEMM_M * GEMM_N, 3));
    operand a[5], b[5];
    forget();
    for (int i = 0; i < 5; i++) { /* current, both blocks, MXFP8, NVFP4 */
        a[i] = operand_of(te, kind_of(i + 1), x);
        b[i] = operand_of(te, kind_of(i + 1), w);
    }
    keep(d);
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 5; j++) {
            te_op_gemm_args g = gemm_of(&a[i], &b[j], d);
            char left[64], right[64];
            snprintf(left, sizeof left, "A is scaled by %s", names[i]);
            snprintf(right, sizeof right, "B by %s", names[j]);
            if (i == 2 && j == 2)
                REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_INVALID, "gemm: A and B both have 128 x 128 blocks (BLOCK_2D)", "one of them must have 1 x 128 blocks",
                             "two_dimensional = false");
            else if (i != j && !(i + j == 3 && i && j))
                REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_INVALID, left, right, "quantize both by one recipe");
        }
    te_quantizer_desc e5m2 = kind_of(1);
    e5m2.dtype = TE_F8E5M2;
    operand five = operand_of(te, e5m2, x), fives = operand_of(te, e5m2, w);
    te_op_gemm_args g = gemm_of(&five, &fives, d);
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_DTYPE, "gemm: A and B are both e5m2; one of them must be e4m3", NULL, NULL);
    e5m2.kind = TE_QUANT_MXFP8;
    five = operand_of(te, e5m2, x);
    fives = operand_of(te, e5m2, w);
    g = gemm_of(&five, &fives, d);
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_DTYPE, "gemm: A and B are both e5m2; one of them must be e4m3", NULL, NULL);
    /* codes without what they mean, or with what belongs to others */
    g = gemm_of(&a[3], &b[3], d);
    g.scale_b = NULL;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_STATE, "gemm: scale_b is NULL; a tensor is needed there", NULL, NULL);
    g.scale_b = b[1].scale;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_DTYPE, "gemm: scale_b is f32; the scales of MXFP8 are e8m0", NULL, NULL);
    g.scale_b = te_tensor_zeros(te, TE_F8E8M0, SHAPE(128, 4));
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_SHAPE, "gemm: scale_b is [128, 4]", "40 lines of 160 values are [128, 8]", NULL);
    g = gemm_of(&a[4], &b[4], d);
    g.amax_a = NULL;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_STATE, "gemm: amax_a is NULL; a tensor is needed there", NULL, NULL);
    g.amax_a = te_tensor_zeros(te, TE_F32, SHAPE(7));
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_SHAPE, "gemm: amax_a is [7]; 24 elements are needed", NULL, NULL);
    g = gemm_of(&a[1], &b[1], d);
    g.amax_a = a[4].amax;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_INVALID, "gemm: amax_a, amax_b and e4m3_max_256 belong to NVFP4, and the operands are scaled by BLOCK_1D", NULL, NULL);
    g = gemm_of(&a[1], &b[1], d);
    g.swizzled_scales = true;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_INVALID, "gemm: swizzled_scales belongs to MXFP8 and NVFP4, and the operands are scaled by BLOCK_1D", NULL, NULL);
    g = gemm_of(&a[4], &a[3], d);
    g.scaling_b = TE_SCALING_NVFP4;
    g.amax_b = a[4].amax;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_SHAPE, "gemm: B is [24, 160]", "[40, 160] or more", NULL);
    g.b = b[3].data;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_DTYPE, "gemm: A is e2m1 and B e4m3; NVFP4 scales belong to e2m1 codes, of both", NULL, NULL);
    /* a transformed copy is contracted over its padded length: the scales of an untransformed one are too few */
    te_tensor *tall = normal(te, 100, 40, 4), *data, *scale, *y = quantized(te, kind_of(7), tall), *z = quantized(te, kind_of(5), tall);
    te_quantized_view(y, TE_COLUMNWISE, &data, &scale);
    operand turned = {data, scale, te_quantized_amax(y, TE_COLUMNWISE), TE_SCALING_NVFP4};
    te_quantized_view(z, TE_COLUMNWISE, &data, &scale);
    operand straight = {data, scale, te_quantized_amax(z, TE_COLUMNWISE), TE_SCALING_NVFP4};
    te_tensor *square = test_guarded_with(te, TE_F32, SHAPE(40, 40), test_normal(1600, 5));
    keep(square);
    g = gemm_of(&turned, &straight, square);
    g.m = g.n = 40;
    g.k = 144;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_SHAPE, "gemm: A is [40, 128]", "[40, 144] or more", NULL);
    g.a = y;
    REFUSES_KEPT(te_op_gemm(te, &g), TE_ERR_DTYPE, "gemm: a is a quantized tensor; te_dequantize it, or pass the data of one copy", NULL, NULL);
    forget();
    release_bystander(te, &bystander);
}

/* Copies that no kernel reads together are decoded, not misread: the product of a module is that of the values. */
TE_TEST_DEVICES(products_of_copies_that_lie_differently) {
    static const struct {
        const char *name;
        te_quantizer_desc x, w;
    } row[] = {
        {"swizzled x unswizzled", {.kind = TE_QUANT_MXFP8, .optimize_for_gemm = true}, {.kind = TE_QUANT_MXFP8}},
        {"nvfp4 swizzled x unswizzled", {.kind = TE_QUANT_NVFP4, .optimize_for_gemm = true}, {.kind = TE_QUANT_NVFP4}},
        {"mxfp8 x nvfp4", {.kind = TE_QUANT_MXFP8}, {.kind = TE_QUANT_NVFP4}},
        {"transformed x untransformed", {.kind = TE_QUANT_NVFP4, .nvfp4.rht = TE_ON}, {.kind = TE_QUANT_NVFP4, .quantization_2d = TE_ON}},
        {"block x current", {.kind = TE_QUANT_BLOCK, .block.block_scaling_dim = 1}, {.kind = TE_QUANT_CURRENT}},
    };
    for (int i = 0; i < COUNT(row); i++) {
        test_case("%s", row[i].name);
        te_scope_begin(te);
        te_tensor *x = normal(te, 20, 32, 1), *w = normal(te, 16, 32, 2), *xq = quantized(te, row[i].x, x), *wq = quantized(te, row[i].w, w);
        te_module *m = linear_of(te, "head");
        te_module_add_parameter(m, "weight", wq);
        te_recipe mx = te_recipe_mxfp8();
        (void)mx;
        float *want = test_read(te_linear(te_dequantize(xq, TE_F32), te_dequantize(wq, TE_F32), NULL));
        CHECK_TENSOR(te_forward(m, xq), want, 1e-6, 1e-6); /* outside of autocast both are decoded */
        CHECK_OK(te);
        te_module_destroy(m);
        te_scope_end(te);
    }
}

/* ---- raw operations: every tensor of every call, once with everything that can be wrong with it --------------------- */

typedef struct field {
    const char *name;
    void *slot;    /* where the args keep it */
    bool optional; /* NULL is no error */
    int sizes;     /* 1: others are measured by it, another shape is their error; 2: any shape will do */
} field;
static te_tensor *field_get(const field *f) {
    te_tensor *x;
    memcpy(&x, f->slot, sizeof x);
    return x;
}
static void field_set(const field *f, te_tensor *x) { memcpy(f->slot, &x, sizeof x); }

typedef te_result (*raw_call)(te_ctx *te, const void *args);
static void wrong_fields(te_ctx *te, te_ctx *other, const char *op, raw_call call, const void *args, field *fields, int n) {
    char name[64];
    forget();
    for (int i = 0; i < n; i++)
        if (field_get(&fields[i])) keep(field_get(&fields[i]));
    for (int i = 0; i < n; i++) {
        te_tensor *good = field_get(&fields[i]);
        if (!good) continue;
        const int64_t *shape = te_tensor_shape(good);
        int ndim = te_tensor_ndim(good);
        te_quantizer_desc current = {0};
        current.kind = TE_QUANT_CURRENT;
        for (int wrong = 0; wrong < 5; wrong++) {
            const char *word = NULL;
            te_tensor *bad = NULL;
            te_scope_begin(te);
            te_scope_begin(other);
            if (wrong == 0 && fields[i].optional) wrong = 1;
            if (wrong == 3 && fields[i].sizes == 2) wrong = 4;
            if (wrong == 0) word = "NULL";
            if (wrong == 1) bad = te_tensor_zeros(other, te_tensor_dtype(good), ndim, shape), word = "belongs to another context";
            if (wrong == 2) bad = te_tensor_zeros(te, TE_I32, ndim, shape), word = "is i32";
            if (wrong == 3) bad = te_tensor_zeros(te, te_tensor_dtype(good), SHAPE(7, 3, 2)), word = "[7, 3, 2]";
            if (wrong == 4) bad = quantized(te, current, te_tensor_zeros(te, TE_F32, ndim, shape)), word = "is a quantized tensor";
            test_case("%s: %s: %s", op, fields[i].name, word);
            field_set(&fields[i], bad);
            te_result result = call(te, args);
            field_set(&fields[i], good);
            te_scope_end(other);
            te_scope_end(te);
            CHECK(result != TE_OK);
            CHECK_EQ_INT(te_error_code(te), result);
            snprintf(name, sizeof name, "%s: ", op);
            CHECK_STR(te_error(te), name);
            if (!(wrong == 3 && fields[i].sizes == 1)) {
                snprintf(name, sizeof name, "%s ", fields[i].name);
                CHECK_STR(te_error(te), name);
                CHECK_STR(te_error(te), word);
                if (wrong == 3) { /* and what would be right */
                    const char *rest = strstr(te_error(te), word);
                    CHECK_MSG(rest && strpbrk(rest + strlen(word), "0123456789"), "only one value is named: %s", te_error(te));
                }
            }
            te_clear_error(te);
            UNCHANGED();
            CHECK_OK(other);
        }
    }
    test_case("%s: nothing wrong", op);
    forget();
    CHECK_EQ_INT(call(te, args), TE_OK);
    CHECK_OK(te);
}
#define WRONG_FIELDS(op, args, ...)                                                              \
    do {                                                                                         \
        field fields__[] = {__VA_ARGS__};                                                        \
        wrong_fields(te, other, #op, call_##op, &args, fields__, COUNT(fields__));               \
    } while (0)
#define CALL(op) \
    static te_result call_##op(te_ctx *te, const void *args) { return te_op_##op(te, (const te_op_##op##_args *)args); }
CALL(block_quantize)
CALL(block_dequantize)
CALL(mxfp8_quantize)
CALL(mxfp8_dequantize)
CALL(nvfp4_amax)
CALL(nvfp4_quantize)
CALL(nvfp4_dequantize)
CALL(shard_amax)
CALL(shard_scales)
CALL(shard_cast)
CALL(quant_error)

#define Z(dtype, ...) te_tensor_zeros(te, dtype, SHAPE(__VA_ARGS__))
TE_TEST_DEVICES(raw_operations_name_the_tensor_that_is_wrong) {
    te_ctx *other = test_context(te_ctx_is_cuda(te) ? "cuda:0" : "cpu");
    enum { M = 20, N = 40 };
    te_tensor *x = normal(te, M, N, 1), *noop = Z(TE_F32, 1), *y = Z(TE_F32, M, N);
    { /* block */
        te_op_block_quantize_args q = {0};
        q.x = x;
        q.row = Z(TE_F8E4M3, M, 48);
        q.row_scale_inv = Z(TE_F32, 1, 20);
        q.col = Z(TE_F8E4M3, N, 32);
        q.col_scale_inv = Z(TE_F32, 1, 40);
        q.noop = noop;
        WRONG_FIELDS(block_quantize, q, {"x", &q.x, false, 1}, {"row", &q.row, true, 0}, {"row_scale_inv", &q.row_scale_inv, false, 0}, {"col", &q.col, true, 0},
                     {"col_scale_inv", &q.col_scale_inv, false, 0}, {"noop", &q.noop, true, 0});
        te_op_block_dequantize_args d = {0};
        d.q = q.row;
        d.scale_inv = q.row_scale_inv;
        d.y = y;
        WRONG_FIELDS(block_dequantize, d, {"q", &d.q, false, 0}, {"scale_inv", &d.scale_inv, false, 0}, {"y", &d.y, false, 1});
    }
    { /* MXFP8 */
        te_op_mxfp8_quantize_args q = {0};
        q.x = x;
        q.row = Z(TE_F8E4M3, M, 48);
        q.row_scale = Z(TE_F8E8M0, 128, 4);
        q.col = Z(TE_F8E4M3, M, 48);
        q.col_scale = Z(TE_F8E8M0, 4, 128);
        q.noop = noop;
        WRONG_FIELDS(mxfp8_quantize, q, {"x", &q.x, false, 1}, {"row", &q.row, true, 0}, {"row_scale", &q.row_scale, false, 0}, {"col", &q.col, true, 0},
                     {"col_scale", &q.col_scale, false, 0}, {"noop", &q.noop, true, 0});
        te_op_mxfp8_dequantize_args d = {0};
        d.q = q.row;
        d.scale = q.row_scale;
        d.y = y;
        WRONG_FIELDS(mxfp8_dequantize, d, {"q", &d.q, false, 0}, {"scale", &d.scale, false, 0}, {"y", &d.y, false, 1});
    }
    { /* NVFP4 */
        te_op_nvfp4_amax_args a = {0};
        a.x = x;
        a.amax_row = Z(TE_F32, 1);
        a.amax_col = Z(TE_F32, 1);
        a.rht = true;
        a.noop = noop;
        WRONG_FIELDS(nvfp4_amax, a, {"x", &a.x, false, 2}, {"amax_row", &a.amax_row, true, 0}, {"amax_col", &a.amax_col, true, 0}, {"noop", &a.noop, true, 0});
        te_op_nvfp4_quantize_args q = {0};
        q.x = x;
        q.row = Z(TE_F4E2M1, M, 64);
        q.row_scale = Z(TE_F8E4M3, 128, 4);
        q.col = Z(TE_F4E2M1, N, 32);
        q.col_scale = Z(TE_F8E4M3, 128, 4);
        q.amax_row = a.amax_row;
        q.amax_col = a.amax_col;
        q.rht = true;
        q.noop = noop;
        WRONG_FIELDS(nvfp4_quantize, q, {"x", &q.x, false, 1}, {"row", &q.row, true, 0}, {"row_scale", &q.row_scale, false, 0}, {"col", &q.col, true, 0},
                     {"col_scale", &q.col_scale, false, 0}, {"amax_row", &q.amax_row, false, 0}, {"amax_col", &q.amax_col, true, 0}, {"noop", &q.noop, true, 0});
        te_op_nvfp4_dequantize_args d = {0};
        d.q = q.row;
        d.scale = q.row_scale;
        d.amax = a.amax_row;
        d.y = y;
        WRONG_FIELDS(nvfp4_dequantize, d, {"q", &d.q, false, 0}, {"scale", &d.scale, false, 0}, {"amax", &d.amax, false, 0}, {"y", &d.y, false, 1});
        d.rht = true;
        CHECK_EQ_INT(te_op_nvfp4_dequantize(te, &d), TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "rht belongs to the column-wise copy");
    }
    { /* slices of a matrix [M, N]: elements 30 .. 129 */
        te_tensor *slice = normal(te, 1, 100, 2);
        te_op_shard_amax_args a = {0};
        a.x = slice;
        a.amax = Z(TE_F32, 2, 3);
        a.rows = M;
        a.columns = N;
        a.start = 30;
        a.tile_rows = a.tile_columns = 16;
        WRONG_FIELDS(shard_amax, a, {"x", &a.x, false, 2}, {"amax", &a.amax, false, 0});
        keep(a.amax);
        a.start = M * N - 99;
        CHECK_EQ_INT(te_op_shard_amax(te, &a), TE_ERR_SHAPE);
        CHECK_ERROR(te, TE_ERR_SHAPE, "100 elements from 701 on do not lie in [20, 40]");
        UNCHANGED();
        te_op_shard_scales_args s = {0};
        s.scaling = TE_SCALING_NVFP4;
        s.amax = a.amax;
        s.amax_tensor = Z(TE_F32, 1);
        s.row_scale = Z(TE_F8E4M3, 128, 4);
        s.col_scale = Z(TE_F8E4M3, 128, 4);
        s.rows = M;
        s.columns = N;
        WRONG_FIELDS(shard_scales, s, {"amax", &s.amax, false, 0}, {"amax_tensor", &s.amax_tensor, false, 0}, {"row_scale", &s.row_scale, true, 0},
                     {"col_scale", &s.col_scale, true, 0});
        te_op_shard_cast_args c = {0};
        c.x = slice;
        c.dst = Z(TE_F4E2M1, M, 64);
        c.scaling = TE_SCALING_NVFP4;
        c.scale = s.row_scale;
        c.amax_tensor = s.amax_tensor;
        c.rows = M;
        c.columns = N;
        c.start = 30;
        WRONG_FIELDS(shard_cast, c, {"x", &c.x, false, 2}, {"dst", &c.dst, false, 0}, {"scale", &c.scale, false, 0}, {"amax_tensor", &c.amax_tensor, false, 0});
    }
    { /* stats */
        te_op_quant_error_args e = {0};
        e.x = x;
        e.y = y;
        e.limit = Z(TE_F32, M, N);
        e.counts = Z(TE_I64, 6);
        e.sums = Z(TE_F32, 5);
        WRONG_FIELDS(quant_error, e, {"x", &e.x, false, 1}, {"y", &e.y, false, 0}, {"limit", &e.limit, true, 0}, {"counts", &e.counts, false, 0},
                     {"sums", &e.sums, false, 0});
    }
}

/* ---- recipes ------------------------------------------------------------------------------------------------------ */

static te_result begin_with(te_ctx *te, const te_recipe *r) {
    te_autocast_desc cast = {0};
    cast.recipe = r;
    return te_autocast_begin(te, &cast);
}
static te_result init_with(te_ctx *te, const te_recipe *r) {
    te_quantized_model_init_desc d = {0};
    d.recipe = r;
    return te_quantized_model_init_begin(te, &d);
}
TE_TEST_DEVICES(recipes_that_cannot_be) {
    model bystander = new_bystander(te);
    forget();
    for (int kind = TE_RECIPE_DELAYED; kind <= TE_RECIPE_NVFP4; kind++)
        for (int mha = 0; mha < 2; mha++) {
            te_recipe r = recipe_of(kind);
            (mha ? &r.fp8_mha : &r.fp8_dpa)[0] = true;
            const char *name = te_recipe_name(r.kind);
            if (kind == TE_RECIPE_BLOCK || kind == TE_RECIPE_NVFP4) {
                const char *why = kind == TE_RECIPE_BLOCK ? "attention takes no block scales" : "attention takes no FP4 operands";
                REFUSES(begin_with(te, &r), TE_ERR_INVALID, mha ? "fp8_dpa 0 and fp8_mha 1" : "fp8_dpa 1 and fp8_mha 0", why, "leave both off, or use a per-tensor recipe");
                REFUSES(init_with(te, &r), TE_ERR_INVALID, name, why, NULL);
            }
            r = recipe_of(kind);
            r.format = TE_FORMAT_E5M2;
            REFUSES(begin_with(te, &r), TE_ERR_INVALID, name, "a product of E5M2 with E5M2 does not exist: use TE_FORMAT_HYBRID", NULL);
            REFUSES(init_with(te, &r), TE_ERR_INVALID, name, "use TE_FORMAT_HYBRID", NULL);
        }
    static const int dims[][3] = {{2, 2, 1}, {1, 2, 2}, {2, 1, 2}, {2, 2, 2}, {2, 0, 0}, {0, 0, 2}};
    for (int i = 0; i < COUNT(dims); i++) {
        te_recipe r = te_recipe_block_scaling();
        r.block.x_block_scaling_dim = dims[i][0];
        r.block.w_block_scaling_dim = dims[i][1];
        r.block.grad_block_scaling_dim = dims[i][2];
        REFUSES(begin_with(te, &r), TE_ERR_INVALID, "two operands with 128 x 128 blocks do not meet in one product", "at most one of the three may be 2", NULL);
    }
    te_recipe r = te_recipe_block_scaling();
    r.block.x_block_scaling_dim = 3;
    REFUSES(begin_with(te, &r), TE_ERR_INVALID, "dimensions 3 (x), 2 (w), 1 (grad); 1 (1 x 128) and 2 (128 x 128) are possible", NULL, NULL);
    r = te_recipe_delayed_scaling();
    r.backward_override = TE_BACKWARD_DEQUANTIZED;
    REFUSES(begin_with(te, &r), TE_ERR_INVALID, "recipe delayed: backward_override", "use another recipe, or none of it", NULL);
    r = te_recipe_custom(NULL, NULL);
    REFUSES(begin_with(te, &r), TE_ERR_INVALID, "the factory is NULL (te_recipe_custom)", NULL, NULL);
    CHECK(!te_autocast_enabled(te));
    REFUSES(te_autocast_end(te), TE_ERR_STATE, "te_autocast_end without te_autocast_begin", NULL, NULL);
    REFUSES(te_quantized_model_init_end(te), TE_ERR_STATE, "te_quantized_model_init_end without te_quantized_model_init_begin", NULL, NULL);
    int open = 0;
    r = te_recipe_mxfp8();
    while (open < 1000 && init_with(te, &r) == TE_OK) open++;
    refused_at(__LINE__, te, &bystander, TE_ERR_STATE, "te_quantized_model_init_begin: ", "is a te_quantized_model_init_end missing?", NULL);
    while (open-- > 0) CHECK_EQ_INT(te_quantized_model_init_end(te), TE_OK);
    release_bystander(te, &bystander);
}

/* Made under recipe A, run under B: the error names both, and the weight stays; under A and outside it goes on. */
TE_TEST_DEVICES(weights_of_another_recipe) {
    static const char *const kinds[] = {"", "delayed", "current", "block", "MXFP8", "NVFP4"};
    model bystander = new_bystander(te);
    te_tensor *x = normal(te, 8, 32, 1);
    for (int a = TE_RECIPE_DELAYED; a <= TE_RECIPE_NVFP4; a++) {
        te_recipe ra = recipe_of(a);
        CHECK_EQ_INT(init_with(te, &ra), TE_OK);
        te_module *m = linear_of(te, "head");
        te_quantized_model_init_end(te);
        REQUIRE_OK(te);
        forget();
        keep(te_module_parameter(m, "weight"));
        keep(te_module_parameter(m, "bias"));
        for (int b = TE_RECIPE_DELAYED; b <= TE_RECIPE_NVFP4; b++) {
            te_recipe rb = recipe_of(b);
            char made[80], asked[80];
            snprintf(made, sizeof made, "head: linear: the weight was quantized by a %s quantizer", kinds[a]);
            snprintf(asked, sizeof asked, "the recipe in force asks for %s;", kinds[b]);
            if (a != b) REFUSED_KEPT(test_forward(m, &rb, x), TE_ERR_STATE, made, asked, "te_quantized_model_init_begin, or outside of autocast");
        }
        CHECK(test_forward(m, &ra, x) != NULL);
        CHECK(te_forward(m, x) != NULL);
        CHECK_OK(te);
        te_module_destroy(m);
    }
    /* blocks that do not meet are named by the product */
    te_recipe wide = te_recipe_block_scaling(), narrow = wide;
    narrow.block.w_block_scaling_dim = 1;
    narrow.block.x_block_scaling_dim = 2;
    init_with(te, &wide);
    te_module *m = linear_of(te, "head");
    te_quantized_model_init_end(te);
    forget();
    keep(te_module_parameter(m, "weight"));
    REFUSED_KEPT(test_forward(m, &narrow, x), TE_ERR_INVALID, "head: ", "128 x 128 blocks", "1 x 128 blocks");
    te_module_destroy(m);
    forget();
    release_bystander(te, &bystander);
}

/* ---- custom recipes ------------------------------------------------------------------------------------------------- */

/* The answers of a factory, by slot: input, weight, gradient. */
typedef struct answers {
    te_quantizer_desc slot[3];
    te_result result;
    int calls;
} answers;
static te_result answer(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    answers *a = (answers *)user;
    a->calls++;
    *desc = a->slot[role->tensor_type == TE_TENSOR_INPUT ? 0 : role->tensor_type == TE_TENSOR_WEIGHT ? 1 : 2];
    return a->result;
}
static answers three(te_quant_kind kind, te_dtype x, te_dtype w, te_dtype g) {
    answers a = {0};
    for (int i = 0; i < 3; i++) a.slot[i].kind = kind;
    a.slot[0].dtype = x;
    a.slot[1].dtype = w;
    a.slot[2].dtype = g;
    return a;
}
/* A step of y = m(x): forward and backward under the recipe. */
static te_result step_under(te_ctx *te, const te_recipe *r, te_module *m, te_tensor *x) {
    te_tensor *y = test_forward(m, r, x);
    if (!y) return te_error_code(te);
    return te_backward_from(y, test_tensor(te, TE_F32, te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 9)));
}

TE_TEST_DEVICES(custom_recipes_that_cannot_be) {
    model bystander = new_bystander(te);
    te_tensor *x = te_tensor_set_requires_grad(normal(te, 8, 32, 1), true);
    answers a = three(TE_QUANT_CURRENT, TE_F8E5M2, TE_F8E5M2, TE_F8E4M3), b = three(TE_QUANT_MXFP8, TE_F8E5M2, TE_F8E4M3, TE_F8E5M2), c = three(TE_QUANT_BLOCK, TE_F8E4M3, TE_F8E4M3, TE_F8E4M3), d = c,
            e = three((te_quant_kind)77, TE_DTYPE_NONE, TE_DTYPE_NONE, TE_DTYPE_NONE), f = three(TE_QUANT_NVFP4, TE_F8E4M3, TE_DTYPE_NONE, TE_DTYPE_NONE), g = a,
            h = three(TE_QUANT_DELAYED, TE_F8E4M3, TE_F8E4M3, TE_F8E4M3);
    g.result = TE_ERR_IO;
    d.slot[0].block.block_scaling_dim = 1; /* 2-D weights and gradients: their product is that of dgrad */
    struct {
        answers *a;
        te_result code;
        const char *text, *more;
        bool backward;
    } row[] = {
        {&a, TE_ERR_DTYPE, "head: ", "gemm: A and B are both e5m2; one of them must be e4m3", false},
        {&b, TE_ERR_DTYPE, "gemm: A and B are both e5m2", "one of them must be e4m3", true},
        {&c, TE_ERR_INVALID, "head: ", "128 x 128 blocks (BLOCK_2D); one of them must have 1 x 128 blocks", false},
        {&d, TE_ERR_INVALID, "128 x 128 blocks (BLOCK_2D)", "one of them must have 1 x 128 blocks", true},
        {&e, TE_ERR_INVALID, "head: ", "recipe custom: kind 77", false},
        {&f, TE_ERR_DTYPE, "head: ", "recipe custom: dtype e4m3; the codes of NVFP4 are e2m1", false},
        {&g, TE_ERR_IO, "head: ", "recipe custom: the factory returned TE_ERR_IO", false},
        {&h, TE_ERR_DTYPE, "head: ", "a delayed slot in e4m3; the scales of this direction are updated for the recipe's format, e5m2", false},
    };
    answers good = three(TE_QUANT_CURRENT, TE_F8E4M3, TE_F8E4M3, TE_F8E5M2);
    te_recipe fine = te_recipe_custom(answer, &good);
    for (int i = 0; i < COUNT(row); i++)
        for (int before = 0; before < 2; before++) { /* a module that met another recipe before */
            te_scope_begin(te);
            te_recipe r = te_recipe_custom(answer, row[i].a);
            te_module *m = linear_of(te, "head");
            if (before) CHECK(test_forward(m, &fine, x) != NULL);
            forget();
            keep(x);
            keep(te_module_parameter(m, "weight"));
            keep(te_module_parameter(m, "bias"));
            if (row[i].backward) {
                te_tensor *y = test_forward(m, &r, x);
                CHECK_OK(te);
                REFUSES_KEPT(te_backward_from(y, te_tensor_full(te, TE_F32, SHAPE(8, 16), 1)), row[i].code, row[i].text, row[i].more, NULL);
            } else
                REFUSED_KEPT(test_forward(m, &r, x), row[i].code, row[i].text, row[i].more, NULL);
            test_case("row %d, met a recipe before: %d", i, before);
            te_tensor_zero_grad(x);
            te_tensor_zero_grad(te_module_parameter(m, "weight"));
            CHECK_EQ_INT(step_under(te, &fine, m, x), TE_OK);
            CHECK(te_tensor_grad(x) && te_tensor_grad(te_module_parameter(m, "weight")));
            te_tensor_zero_grad(x);
            te_module_destroy(m);
            CHECK_OK(te);
            te_scope_end(te);
        }
    forget();
    release_bystander(te, &bystander);
}

/* The module meets a recipe that fails, between a forward and its backward pass. */
TE_TEST_DEVICES(custom_recipe_that_fails_before_the_backward) {
    model bystander = new_bystander(te);
    te_tensor *x = te_tensor_set_requires_grad(normal(te, 8, 32, 1), true);
    te_module *m = linear_of(te, "head");
    answers good = three(TE_QUANT_CURRENT, TE_F8E4M3, TE_F8E4M3, TE_F8E5M2), bad = three((te_quant_kind)77, TE_DTYPE_NONE, TE_DTYPE_NONE, TE_DTYPE_NONE);
    te_recipe fine = te_recipe_custom(answer, &good), broken = te_recipe_custom(answer, &bad);
    te_tensor *y = test_forward(m, &fine, x);
    te_backward_from(y, te_tensor_full(te, TE_F32, SHAPE(8, 16), 1));
    REQUIRE_OK(te);
    float *want = test_read(te_tensor_grad(x));
    te_tensor_zero_grad(x);
    y = test_forward(m, &fine, x);
    REFUSED(test_forward(m, &broken, x), TE_ERR_INVALID, "head: ", "recipe custom: kind 77", NULL);
    CHECK_EQ_INT(te_backward_from(y, te_tensor_full(te, TE_F32, SHAPE(8, 16), 1)), TE_OK);
    CHECK_TENSOR(te_tensor_grad(x), want, 0, 0);
    te_module_destroy(m);
    release_bystander(te, &bystander);
}

/* The tape keeps what the backward pass needs of a module: its scales, and the answers of its recipe. */
TE_TEST_DEVICES(modules_that_go_before_the_backward) {
    model bystander = new_bystander(te);
    te_tensor *x = te_tensor_set_requires_grad(normal(te, 8, 32, 1), true);
    answers good = three(TE_QUANT_CURRENT, TE_F8E4M3, TE_F8E4M3, TE_F8E5M2);
    for (int kind = TE_RECIPE_NONE; kind <= TE_RECIPE_CUSTOM; kind++) {
        te_recipe r = kind == TE_RECIPE_CUSTOM ? te_recipe_custom(answer, &good) : recipe_of(kind);
        float *want = NULL;
        for (int gone = 0; gone < 2; gone++) {
            te_seed(te, 9); /* the same weights */
            te_module *m = linear_of(te, "head");
            te_tensor *y = kind ? test_forward(m, &r, x) : te_forward(m, x);
            REQUIRE_OK(te);
            if (gone) te_module_destroy(m);
            CHECK_EQ_INT(te_backward_from(y, te_tensor_full(te, TE_F32, SHAPE(8, 16), 1)), TE_OK);
            if (gone) CHECK_TENSOR(te_tensor_grad(x), want, 0, 0);
            else {
                want = test_read(te_tensor_grad(x));
                te_module_destroy(m);
            }
            te_tensor_zero_grad(x);
        }
    }
    CHECK_OK(te);
    release_bystander(te, &bystander);
}

/* ---- quantizers of one's own ---------------------------------------------------------------------------------------- */

enum { FAIL_CODE, FAIL_NO_DATA, FAIL_FOREIGN, FAIL_WAYS };
typedef struct mine {
    te_ctx *te, *other;
    int calls, fail_at, how; /* call number fail_at fails, from 1 */
    bool dequantize_fails;
} mine;
static te_result mine_quantize(void *user, te_tensor *x, int which, te_tensor **data, te_tensor **scale) {
    mine *m = (mine *)user;
    (void)which;
    bool fails = ++m->calls == m->fail_at;
    *scale = te_tensor_full(m->te, TE_F32, SHAPE(1), 0.25);
    if (fails && m->how == FAIL_NO_DATA) return TE_OK;
    *data = te_tensor_cast(te_scale(te_tensor_detach(x), 4), TE_F16);
    if (fails && m->how == FAIL_FOREIGN) {
        *data = te_tensor_zeros(m->other, TE_F16, te_tensor_ndim(x), te_tensor_shape(x));
        return TE_OK;
    }
    return fails ? TE_ERR_UNSUPPORTED : *data && *scale ? TE_OK : TE_ERR_OUT_OF_MEMORY;
}
static te_tensor *mine_dequantize(void *user, te_tensor *data, te_tensor *scale, int which, int ndim, const int64_t *shape, te_dtype dtype) {
    mine *m = (mine *)user;
    (void)scale, (void)which;
    if (m->dequantize_fails) return NULL;
    return te_tensor_cast(te_scale(te_tensor_cast(te_tensor_view(data, ndim, shape), TE_F32), 0.25f), dtype);
}

TE_TEST_DEVICES(own_quantizers_that_fail_halfway) {
    static const te_result codes[FAIL_WAYS] = {TE_ERR_UNSUPPORTED, TE_ERR_STATE, TE_ERR_INVALID};
    static const char *const words[FAIL_WAYS] = {"returned TE_ERR_UNSUPPORTED", "returned no data", "returned a tensor of another context"};
    model bystander = new_bystander(te);
    te_ctx *other = test_context("cpu");
    mine state = {te, other, 0, 0, 0, false};
    te_custom_quantizer custom = {"mine", &state, mine_quantize, mine_dequantize, NULL};
    te_quantizer_desc own = {0};
    own.kind = TE_QUANT_CUSTOM;
    own.custom = &custom;
    te_tensor *x = te_tensor_set_requires_grad(normal(te, 8, 32, 1), true), *next = normal(te, 8, 32, 2);
    te_quantizer *q = te_quantizer_create(te, &own);
    te_tensor *dst = te_quantize(q, x);
    REQUIRE_OK(te);
    for (int how = 0; how < FAIL_WAYS; how++)
        for (int at = 1; at <= 2; at++) { /* alone */
            state.how = how;
            state.fail_at = at;
            forget();
            keep(dst);
            keep(next);
            state.calls = 0;
            REFUSED_KEPT(te_quantize(q, next), codes[how], "custom quantizer \"mine\": its quantize function ", words[how], at == 1 ? "row-wise copy; nothing was changed" : "column-wise copy; nothing was changed");
            state.calls = 0;
            REFUSES_KEPT(te_quantize_into(q, next, dst, NULL), codes[how], "custom quantizer \"mine\"", words[how], "nothing was changed");
        }
    /* in a module: input, weight, gradient, each by rows and by columns */
    answers all = {0};
    for (int i = 0; i < 3; i++) all.slot[i] = own;
    te_recipe r = te_recipe_custom(answer, &all);
    te_module *m = linear_of(te, "head");
    te_tensor *weight = te_module_parameter(m, "weight");
    state.fail_at = 0;
    CHECK_EQ_INT(step_under(te, &r, m, x), TE_OK);
    float *dx = test_read(te_tensor_grad(x)), *dw = test_read(te_tensor_grad(weight));
    int refusals = 0;
    for (int how = 0; how < FAIL_WAYS; how++)
        for (int at = 1;; at++) {
            te_scope_begin(te);
            te_tensor_zero_grad(x);
            te_tensor_zero_grad(weight);
            te_tensor_zero_grad(te_module_parameter(m, "bias"));
            forget();
            keep(x);
            keep(weight);
            keep(te_module_parameter(m, "bias"));
            state.calls = 0;
            state.fail_at = at;
            state.how = how;
            te_result result = step_under(te, &r, m, x);
            test_case("in a module, way %d, call %d", how, at);
            if (result == TE_OK) {
                CHECK_MSG(at == 7, "%d calls", at - 1);
                CHECK_TENSOR(te_tensor_grad(x), dx, 0, 0);
                CHECK_TENSOR(te_tensor_grad(weight), dw, 0, 0);
                te_scope_end(te);
                break;
            }
            refusals++;
            CHECK_EQ_INT(result, codes[how]);
            refused_at(__LINE__, te, &bystander, codes[how], "custom quantizer \"mine\"", words[how], at <= 4 ? "head: " : NULL);
            UNCHANGED();
            CHECK(at > 4 || !te_tensor_grad(weight));
            te_scope_end(te);
        }
    CHECK_EQ_INT(refusals, 6 * FAIL_WAYS);
    state.fail_at = 0;
    state.dequantize_fails = true;
    REFUSED(test_forward(m, &r, x), TE_ERR_STATE, "head: ", "custom quantizer \"mine\": its dequantize function returned NULL", NULL);
    forget();
    keep(dst);
    REFUSED_KEPT(te_dequantize(dst, TE_F32), TE_ERR_STATE, "its dequantize function returned NULL", NULL, NULL);
    state.dequantize_fails = false;
    forget();
    te_module_destroy(m);
    te_quantizer_destroy(q);
    CHECK_OK(other);
    release_bystander(te, &bystander);
}

/* ---- quantized tensors ---------------------------------------------------------------------------------------------- */

TE_TEST_DEVICES(quantizing_into_what_does_not_fit) {
    model bystander = new_bystander(te);
    te_ctx *other = test_context(te_ctx_is_cuda(te) ? "cuda:0" : "cpu");
    te_tensor *x = normal(te, 8, 32, 1);
    for (int i = 0; i < KINDS; i++) {
        te_tensor *dst = quantized(te, kind_of(i), x);
        forget();
        keep(dst);
        keep(x);
        for (int j = 0; j < KINDS; j++) {
            te_quantizer_desc d = kind_of(j);
            te_quantizer *q = te_quantizer_create(te, &d);
            if (i != j && i + j != 1) /* delayed and current lie alike */
                REFUSES_KEPT(te_quantize_into(q, x, dst, NULL), TE_ERR_INVALID, "te_quantize_into: the destination (", ") was made by a quantizer that differs from this one (",
                             "te_quantizer_make_empty");
            if (i == j) {
                REFUSES_KEPT(te_quantize_into(q, normal(te, 32, 8, 3), dst, NULL), TE_ERR_SHAPE, "[32, 8] and the destination [8, 32]", NULL, NULL);
                REFUSES_KEPT(te_quantize_into(q, te_tensor_zeros(other, TE_F32, SHAPE(8, 32)), dst, NULL), TE_ERR_INVALID, "another context", NULL, NULL);
                REFUSES_KEPT(te_quantize_into(q, dst, dst, NULL), TE_ERR_DTYPE, "the input is quantized, nominally f32", NULL, NULL);
                REFUSES_KEPT(te_quantize_into(q, Z(TE_I32, 8, 32), dst, NULL), TE_ERR_DTYPE, "the input is i32; f32, f16 or bf16 is needed", NULL, NULL);
                REFUSES_KEPT(te_quantize_into(q, x, x, NULL), TE_ERR_INVALID, "the destination is plain f32; te_quantizer_make_empty makes one", NULL, NULL);
                REFUSES_KEPT(te_quantize_into(q, x, dst, Z(TE_F32, 3)), TE_ERR_INVALID, "noop_flag is an f32 [1]", NULL, NULL);
                if (i != 8) REFUSES_KEPT(te_quantize_into(q, x, dst, te_tensor_zeros(other, TE_F32, SHAPE(1))), TE_ERR_INVALID, "another context", NULL, NULL);
                if (i != 8) CHECK_EQ_INT(te_quantize_into(q, normal(te, 8, 32, 7), dst, te_tensor_full(te, TE_F32, SHAPE(1), 1)), TE_OK);
                UNCHANGED();
                CHECK_EQ_INT(te_quantize_into(q, x, dst, NULL), TE_OK);
            }
            te_quantizer_destroy(q);
        }
        forget();
    }
    CHECK_OK(other);
    release_bystander(te, &bystander);
}

TE_TEST_DEVICES(copies_and_memory_that_cannot_be) {
    model bystander = new_bystander(te);
    te_tensor *x = normal(te, 8, 32, 1);
    for (int i = 0; i < KINDS; i++) {
        bool agrees = i <= 1 || i == 3 || i == 6;
        te_quantizer_desc d = kind_of(i);
        d.usage = TE_COLUMNWISE;
        te_tensor *both = quantized(te, kind_of(i), x), *column = quantized(te, d, x), *row;
        d.usage = TE_ROWWISE;
        row = quantized(te, d, x);
        forget();
        keep(both);
        keep(column);
        keep(row);
        keep(x);
        REFUSES_KEPT(te_tensor_update_usage(column, TE_ROWWISE), TE_ERR_STATE, "a row-wise copy cannot be made from a column-wise one; quantize with TE_ROWWISE", NULL, NULL);
        REFUSES_KEPT(te_tensor_update_usage(column, TE_ROWWISE | TE_COLUMNWISE), TE_ERR_STATE, "a row-wise copy cannot be made", NULL, NULL);
        if (!agrees) REFUSES_KEPT(te_tensor_update_usage(row, TE_COLUMNWISE), TE_ERR_STATE, "a column-wise copy cannot be made from", "quantize with TE_ROWWISE | TE_COLUMNWISE", NULL);
        REFUSES_KEPT(te_tensor_update_usage(both, 4), TE_ERR_INVALID, "te_tensor_update_usage: 4; TE_ROWWISE (1), TE_COLUMNWISE (2) or both (3)", NULL, NULL);
        REFUSES_KEPT(te_tensor_update_usage(both, 0), TE_ERR_INVALID, "te_tensor_update_usage: 0;", NULL, NULL);
        REFUSES_KEPT(te_tensor_update_usage(x, 1), TE_ERR_STATE, "the tensor is plain f32", NULL, NULL);
        te_tensor *data = NULL, *scale = NULL;
        REFUSES_KEPT(te_quantized_view(column, TE_ROWWISE, &data, &scale), TE_ERR_STATE, "the row-wise copy was not made (see te_quantizer_set_usage)", NULL, NULL);
        CHECK(!data && !scale);
        REFUSED_KEPT(te_quantized_amax(row, TE_COLUMNWISE), TE_ERR_STATE, "the column-wise copy was not made", NULL, NULL);
        /* memory of its own */
        te_quantized_view(both, TE_ROWWISE, &data, NULL);
        int64_t bytes = (int64_t)te_tensor_bytes(data);
        te_tensor *few = te_tensor_full(te, TE_U8, SHAPE(bytes - 1), 7), *enough = te_tensor_full(te, TE_U8, SHAPE(bytes), 7), *wide = te_tensor_full(te, TE_U8, SHAPE(bytes, 2), 7);
        char need[64];
        keep(few);
        keep(enough);
        keep(wide);
        if (i == 4) {
            REFUSES_KEPT(te_replace_raw_data(both, enough), TE_ERR_UNSUPPORTED, "MXFP8; its row-wise codes do not give the column-wise ones: keep both where they are", NULL, NULL);
        } else {
            snprintf(need, sizeof need, "at least %lld bytes", (long long)bytes);
            REFUSES_KEPT(te_replace_raw_data(both, few), TE_ERR_INVALID, "te_replace_raw_data: the new memory is u8", need, "contiguous, is needed");
            REFUSES_KEPT(te_replace_raw_data(both, te_tensor_narrow(wide, 1, 0, 1)), TE_ERR_INVALID, "not contiguous", need, NULL);
            REFUSES_KEPT(te_replace_raw_data(both, Z(TE_F32, bytes)), TE_ERR_INVALID, "the new memory is f32", need, NULL);
            REFUSES_KEPT(te_replace_raw_data(both, row), TE_ERR_INVALID, "te_replace_raw_data: the new memory is ", need, NULL);
            REFUSES_KEPT(te_replace_raw_data(column, enough), TE_ERR_STATE, "no row-wise copy of a built-in kind", NULL, NULL);
        }
        REFUSES_KEPT(te_replace_raw_data(x, enough), TE_ERR_INVALID, "the tensor is plain f32; a quantized one is needed", NULL, NULL);
        uint8_t host[4];
        REFUSES_KEPT(te_quantized_init_value(both, host), TE_ERR_STATE, "te_quantized_init_value: the tensor has none; set preserve_high_precision_init_val", NULL, NULL);
        /* shapes that no tensor has */
        te_quantizer *q = te_quantizer_create(te, &d);
        REFUSED_KEPT(te_quantizer_make_empty(q, TE_F32, SHAPE(3, -1)), TE_ERR_SHAPE, "-1", NULL, NULL);
        REFUSED_KEPT(te_quantizer_make_empty(q, TE_I32, SHAPE(3, 1)), TE_ERR_DTYPE, "nominal dtype i32; f32, f16 and bf16 are possible", NULL, NULL);
        CHECK(!te_quantizer_make_empty(q, TE_F32, SHAPE(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)));
        refused_at(__LINE__, te, &bystander, TE_ERR_SHAPE, "12", NULL, NULL);
        CHECK(!te_quantizer_make_empty(q, TE_F32, SHAPE((int64_t)1 << 40, (int64_t)1 << 40)));
        refused_at(__LINE__, te, &bystander, TE_ERR_SHAPE, "1099511627776", NULL, NULL);
        REFUSES_KEPT(te_quantizer_set_usage(q, 0), TE_ERR_INVALID, "te_quantizer_set_usage: 0;", NULL, NULL);
        te_quantizer_destroy(q);
        forget();
    }
    release_bystander(te, &bystander);
}

/* ---- master weights ------------------------------------------------------------------------------------------------ */

TE_TEST_DEVICES(master_weights_that_do_not_fit) {
    model bystander = new_bystander(te);
    te_ctx *other = test_context(te_ctx_is_cuda(te) ? "cuda:0" : "cpu");
    te_quantizer_desc fine = kind_of(3), flat = kind_of(2), mx = kind_of(4), fours = kind_of(5);
    te_quantizer *q = te_quantizer_create(te, &fine), *q1 = te_quantizer_create(te, &flat), *qm = te_quantizer_create(te, &mx), *q4 = te_quantizer_create(te, &fours);
    te_tensor *x = normal(te, 8, 32, 1), *cube = test_tensor(te, TE_F32, SHAPE(2, 4, 32), test_normal(256, 1));
    te_tensor *good = te_quantize(q, x), *lines = te_quantize(q1, x), *micro = te_quantize(qm, x), *four = te_quantize(q4, x), *deep = te_quantize(q, cube), *master = normal(te, 1, 100, 2);
    te_tensor *weights[2] = {good, good}, *masters[2] = {master, master}, *shards[2], *columns[2];
    int64_t starts[2] = {0, 0};
    te_master_weights w = {0};
    forget();
    keep(good);
    keep(lines);
    keep(micro);
    keep(four);
    keep(deep);
    keep(x);
    w.model_weights = weights;
    w.master_weights = masters;
    w.start_offsets = starts;
    w.count = 2;
    starts[1] = 157;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_SHAPE, "slice 1 begins at 157 and has 100 elements; the weight has 256", NULL, NULL);
    starts[1] = -1;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_SHAPE, "slice 1 begins at -1 and has 100 elements; the weight has 256", NULL, NULL);
    starts[1] = INT64_MAX;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_SHAPE, "slice 1 begins at 9223372036854775807", "the weight has 256", NULL);
    starts[1] = 0;
    weights[1] = x;
    REFUSES_KEPT(te_cast_master_weights_to_fp8(te, &w), TE_ERR_INVALID, "weight 1: it is plain; a quantized weight is needed", NULL, NULL);
    weights[1] = NULL;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_INVALID, "weight 1: it is NULL", NULL, NULL);
    weights[1] = lines;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_INVALID, "weight 1: 1 x 128 blocks; weights need 128 x 128 (block_scaling_dim 2)", NULL, NULL);
    weights[1] = four;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_INVALID, "weight 1: NVFP4 with 1 x 16 blocks", "slices need plain 16 x 16 blocks", NULL);
    weights[1] = deep;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_SHAPE, "weight 1 is [2, 4, 32]; a matrix is needed", NULL, NULL);
    weights[1] = good;
    masters[1] = te_tensor_cast(master, TE_BF16);
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_DTYPE, "master 1 is bf16 [1, 100]; a contiguous f32 tensor of this context is needed", NULL, NULL);
    masters[1] = te_tensor_zeros(other, TE_F32, SHAPE(5));
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_DTYPE, "master 1 is f32 [5]", "of this context", NULL);
    masters[1] = te_tensor_transpose(x, 0, 1);
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_DTYPE, "master 1 is f32 [32, 8]; a contiguous f32", NULL, NULL);
    masters[1] = master;
    w.shard_weights = shards;
    shards[0] = Z(TE_U8, 100);
    shards[1] = Z(TE_U8, 99);
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_INVALID, "weight 1: the shard is u8 of 99 bytes", "at least 100 is needed", NULL);
    shards[1] = NULL;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_INVALID, "weight 1: the shard is NULL", NULL, NULL);
    weights[1] = micro;
    shards[1] = Z(TE_U8, 100);
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_INVALID, "weight 1: the shard is NULL", NULL, NULL); /* its column-wise codes */
    w.shard_columnwise = columns;
    columns[0] = NULL;
    columns[1] = Z(TE_F32, 3);
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_INVALID, "weight 1: the shard is f32 of 12 bytes", NULL, NULL);
    w.shard_weights = w.shard_columnwise = NULL;
    weights[1] = good;
    for (int missing = 0; missing < 3; missing++) {
        te_master_weights v = w;
        if (missing == 0) v.model_weights = NULL;
        if (missing == 1) v.master_weights = NULL;
        if (missing == 2) v.start_offsets = NULL;
        REFUSES_KEPT(te_quantize_master_weights(te, &v), TE_ERR_INVALID, "2 weights; three lists of as many entries are needed", NULL, NULL);
    }
    w.count = -1;
    REFUSES_KEPT(te_quantize_master_weights(te, &w), TE_ERR_INVALID, "-1 weights", NULL, NULL);
    weights[1] = NULL;
    REFUSES_KEPT(te_post_all_gather_processing(te, weights, 2), TE_ERR_INVALID, "weight 1 is NULL or of another context", NULL, NULL);
    REFUSES_KEPT(te_post_all_gather_processing(te, NULL, 2), TE_ERR_INVALID, "2 weights without a list", NULL, NULL);
    REFUSES_KEPT(te_post_all_gather_processing(te, weights, -2), TE_ERR_INVALID, "-2 weights", NULL, NULL);
    forget();
    w.count = 0;
    CHECK_EQ_INT(te_quantize_master_weights(te, &w), TE_OK);
    w.count = 1;
    CHECK_EQ_INT(te_quantize_master_weights(te, &w), TE_OK);
    CHECK_EQ_INT(te_post_all_gather_processing(te, weights, 1), TE_OK);
    te_quantizer_destroy(q);
    te_quantizer_destroy(q1);
    te_quantizer_destroy(qm);
    te_quantizer_destroy(q4);
    CHECK_OK(other);
    release_bystander(te, &bystander);
}

/* ---- NULL ---------------------------------------------------------------------------------------------------------- */

static bool visit_nothing(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    (void)user, (void)role, (void)stats;
    return true;
}
TE_TEST_DEVICES(null_everywhere) {
    model bystander = new_bystander(te);
    te_quantizer_desc d = kind_of(1);
    te_quantizer *q = te_quantizer_create(te, &d);
    te_tensor *x = normal(te, 8, 32, 1), *y = te_quantize(q, x), *data, *scale;
    forget();
    keep(x);
    keep(y);
    CHECK(!te_quantizer_create(NULL, &d) && !te_quantizer_create(te, NULL) && !te_quantizer_create(NULL, NULL));
    te_quantizer_destroy(NULL);
    CHECK(te_quantizer_set_usage(NULL, 1) != TE_OK && te_quantizer_get_usage(NULL) == 0);
    CHECK(!te_quantize(NULL, x) && !te_quantize(q, NULL) && !te_quantize(NULL, NULL));
    CHECK(te_quantize_into(NULL, x, y, NULL) != TE_OK && te_quantize_into(q, NULL, y, NULL) != TE_OK && te_quantize_into(q, x, NULL, NULL) != TE_OK);
    CHECK(!te_quantizer_make_empty(NULL, TE_F32, SHAPE(2)) && !te_quantizer_make_empty(q, TE_F32, 2, NULL));
    te_clear_error(te);
    CHECK(te_quantizer_calibrate(NULL, x) != TE_OK && te_quantizer_calibrate(q, NULL) != TE_OK);
    CHECK(!te_quantizer_is_quantizable(NULL, x) && !te_quantizer_is_quantizable(q, NULL) && !te_quantizer_is_requantization_safe(NULL));
    CHECK(!te_dequantize(NULL, TE_F32) && te_tensor_update_usage(NULL, 1) != TE_OK);
    CHECK(te_quantized_view(NULL, TE_ROWWISE, &data, &scale) != TE_OK && !data && !scale);
    CHECK_EQ_INT(te_quantized_view(y, TE_ROWWISE, NULL, NULL), TE_OK);
    CHECK(!te_quantized_amax(NULL, TE_ROWWISE) && te_quantized_kind(NULL) == TE_QUANT_NONE && te_quantized_usage(NULL) == 0 && !te_is_custom(NULL));
    CHECK(te_autocast_begin(NULL, NULL) != TE_OK && te_autocast_end(NULL) != TE_OK && !te_autocast_enabled(NULL));
    CHECK(te_quant_inspect(NULL, true) != TE_OK && te_quant_stats_visit(NULL, visit_nothing, NULL) != TE_OK && te_quant_stats_visit(te, NULL, NULL) != TE_OK);
    te_clear_error(te);
    CHECK(te_quantized_model_init_begin(NULL, NULL) != TE_OK && te_quantized_model_init_end(NULL) != TE_OK);
    CHECK(te_quantized_init_value(NULL, &d) != TE_OK);
    te_quantized_clear_init_value(NULL);
    te_quantized_clear_init_value(x);
    te_quantized_clear_init_value(y);
    CHECK(te_replace_raw_data(NULL, x) != TE_OK && te_replace_raw_data(y, NULL) != TE_OK);
    te_master_weights w = {0};
    CHECK(te_quantize_master_weights(NULL, &w) != TE_OK && te_quantize_master_weights(te, NULL) != TE_OK && te_cast_master_weights_to_fp8(NULL, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_quantize_master_weights: desc is NULL");
    CHECK(te_post_all_gather_processing(NULL, &y, 1) != TE_OK);
    CHECK(strlen(te_recipe_name((te_recipe_kind)-1)) > 0 && strlen(te_recipe_name((te_recipe_kind)99)) > 0);
    /* defaults: NULL is delayed scaling */
    CHECK_EQ_INT(te_autocast_begin(te, NULL), TE_OK);
    CHECK_EQ_INT(te_autocast_end(te), TE_OK);
    CHECK_EQ_INT(te_quantized_model_init_begin(te, NULL), TE_OK);
    CHECK_EQ_INT(te_quantized_model_init_end(te), TE_OK);
    CHECK_OK(te);
    /* groups */
    te_thread_hub *hub = te_thread_hub_create(1);
    te_group_desc none = {0};
    CHECK(!te_group_create(NULL, &none) && !te_group_create(te, NULL));
    te_clear_error(te);
    CHECK(!te_group_create(te, &none));
    CHECK(!te_ok(te));
    te_clear_error(te);
    te_group_destroy(NULL);
    CHECK(te_group_rank(NULL) == 0 && te_group_size(NULL) == 1 && !te_thread_hub_create(0) && !te_thread_hub_create(-1));
    te_thread_hub_destroy(NULL);
    CHECK(!te_thread_group_create(NULL, hub, 0));
    CHECK(!te_thread_group_create(te, NULL, 0));
    te_clear_error(te);
    CHECK(!te_thread_group_create(te, hub, 1));
    CHECK(!te_ok(te));
    te_clear_error(te);
    te_group *group = te_thread_group_create(te, hub, 0);
    for (int i = 0; i < 2; i++) { /* no group: the identity */
        te_group *g = i ? group : NULL;
        CHECK(te_all_reduce(g, NULL, TE_REDUCE_MAX) == TE_ERR_STATE && te_all_gather(g, NULL, x) == TE_ERR_STATE && te_all_gather(g, x, NULL) == TE_ERR_STATE);
        CHECK(te_reduce_scatter(g, NULL, x) == TE_ERR_STATE && te_reduce_scatter(g, x, NULL) == TE_ERR_STATE && te_broadcast(g, NULL, 0) == TE_ERR_STATE);
        te_clear_error(te);
        CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_MAX), TE_OK);
        CHECK_EQ_INT(te_barrier(g), TE_OK);
    }
    CHECK_OK(te);
    UNCHANGED();
    te_group_destroy(group);
    te_thread_hub_destroy(hub);
    te_quantizer_destroy(q);
    forget();
    release_bystander(te, &bystander);
}

/* ---- NaN and infinity ---------------------------------------------------------------------------------------------- */

/* The row-wise codes of x on the host; that of element (m, n). */
typedef struct codes {
    const uint8_t *bytes;
    int64_t ld;
    bool fp4;
} codes;
static codes codes_of(const te_tensor *x, te_tensor **scale) {
    codes c = {0};
    te_tensor *data;
    te_quantized_view(x, TE_ROWWISE, &data, scale);
    c.fp4 = te_tensor_dtype(data) == TE_F4E2M1;
    c.bytes = (const uint8_t *)test_read_bytes(data);
    c.ld = te_tensor_shape(data)[1] / (c.fp4 ? 2 : 1);
    return c;
}
static int code_at(codes c, int64_t m, int64_t n) { return c.fp4 ? c.bytes[m * c.ld + n / 2] >> (n % 2 ? 4 : 0) & 15 : c.bytes[m * c.ld + n]; }

TE_TEST_DEVICES(nan_and_infinity_of_every_kind) {
    enum { M = 40, N = 72, AT_M = 21, AT_N = 37 };
    for (int i = 0; i < 7; i++)
        for (int five = 0; five < 2; five++) {
            te_quantizer_desc d = kind_of(i);
            bool fp4 = d.kind == TE_QUANT_NVFP4;
            if (five && fp4) continue;
            if (five) d.dtype = TE_F8E5M2;
            float *v = test_normal(M * N, 5), *hole = test_copy(v, M * N), *whole = test_copy(v, M * N);
            hole[AT_M * N + AT_N] = 0;
            te_tensor *zero = quantized(te, d, test_tensor(te, TE_F32, SHAPE(M, N), hole)), *s, *t;
            codes a, b = codes_of(zero, &t);
            /* NaN enters no amax: all is as if a 0 stood there, but for its own code */
            for (int sign = 0; sign < 2; sign++) {
                test_case("%s%s, %s", kind_names[i], five ? " e5m2" : "", sign ? "-NaN" : "NaN");
                hole[AT_M * N + AT_N] = sign ? -NAN : NAN;
                te_tensor *y = quantized(te, d, test_tensor(te, TE_F32, SHAPE(M, N), hole));
                a = codes_of(y, &s);
                CHECK_BYTES("scales", test_read_bytes(s), test_read_bytes(t), te_tensor_bytes(t));
                if (fp4) CHECK_TENSOR(te_quantized_amax(y, TE_ROWWISE), test_read(te_quantized_amax(zero, TE_ROWWISE)), 0, 0);
                int code = code_at(a, AT_M, AT_N);
                CHECK_MSG(fp4 ? (code & 7) == 7 : five ? (code & 0x7F) > 0x7C : (code & 0x7F) == 0x7F, "code %02x", code);
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < N; n++)
                        if (m != AT_M || n != AT_N) CHECK(code_at(a, m, n) == code_at(b, m, n));
                const float *back = test_read(te_dequantize(y, TE_F32));
                CHECK(fp4 ? fabsf(back[AT_M * N + AT_N]) < INFINITY : isnan(back[AT_M * N + AT_N]));
                CHECK(!isnan(back[0]) && !isnan(back[M * N - 1]));
            }
            /* infinity saturates, with its sign; blocks that it is not in do not see it */
            b = codes_of(quantized(te, d, test_tensor(te, TE_F32, SHAPE(M, N), whole)), &t);
            for (int sign = 0; sign < 2; sign++) {
                test_case("%s%s, %sinf", kind_names[i], five ? " e5m2" : "", sign ? "-" : "");
                whole[AT_M * N + AT_N] = sign ? -INFINITY : INFINITY;
                te_tensor *y = quantized(te, d, test_tensor(te, TE_F32, SHAPE(M, N), whole));
                a = codes_of(y, &s);
                int most = fp4 ? 7 : five ? 0x7B : 0x7E;
                CHECK_EQ_INT(code_at(a, AT_M, AT_N), most | (sign ? fp4 ? 8 : 0x80 : 0));
                if (d.kind == TE_QUANT_MXFP8)
                    for (int n = 0; n < N; n++) CHECK(n / 32 == AT_N / 32 || code_at(a, AT_M, n) == code_at(b, AT_M, n));
                if (i == 2) /* 1 x 128: the row alone */
                    for (int n = 0; n < N; n++) CHECK(code_at(a, AT_M - 1, n) == code_at(b, AT_M - 1, n));
                if (i <= 1) CHECK(test_read(s)[0] == 1); /* no scale is made of it */
                if (!fp4) CHECK(!isnan(test_read(te_dequantize(y, TE_F32))[0]));
            }
            /* nothing else in it */
            for (int bad = 0; bad < 3; bad++) {
                for (int k = 0; k < M * N; k++) whole[k] = bad == 0 ? NAN : bad == 1 ? INFINITY : -0.0f;
                test_case("%s%s, all %s", kind_names[i], five ? " e5m2" : "", bad == 0 ? "NaN" : bad == 1 ? "inf" : "-0");
                te_tensor *y = quantized(te, d, test_tensor(te, TE_F32, SHAPE(M, N), whole));
                a = codes_of(y, &s);
                int code = code_at(a, 3, 3);
                if (bad == 0) CHECK_MSG(fp4 ? (code & 7) == 7 : (code & 0x7F) > 0x7C, "code %02x", code);
                if (bad == 1) CHECK_EQ_INT(code, fp4 ? 7 : five ? 0x7B : 0x7E);
                if (bad == 2) CHECK_MSG((code & (fp4 ? 7 : 0x7F)) == 0, "code %02x", code);
                if (bad == 2) CHECK(test_read(te_dequantize(y, TE_F32))[M * N - 1] == 0);
                CHECK_EQ_INT(te_tensor_update_usage(y, TE_COLUMNWISE), TE_OK);
                test_read(te_dequantize(y, TE_F32));
            }
            CHECK_OK(te);
        }
}

/* A model that meets NaN and infinity goes on under every recipe, and nothing that it keeps is harmed. */
TE_TEST_DEVICES(nan_and_infinity_in_a_step) {
    for (int kind = TE_RECIPE_DELAYED; kind <= TE_RECIPE_NVFP4; kind++)
        for (int bad = 0; bad < 2; bad++) {
            test_case("recipe %s, %s", te_recipe_name((te_recipe_kind)kind), bad ? "infinity" : "NaN");
            te_scope_begin(te);
            te_recipe r = recipe_of(kind);
            te_module *m = linear_of(te, "head");
            te_tensor *weight = te_module_parameter(m, "weight");
            float *v = test_normal(8 * 32, 1);
            te_tensor *good = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(8, 32), v), true);
            v[40] = bad ? INFINITY : NAN;
            forget();
            keep(weight);
            CHECK_EQ_INT(step_under(te, &r, m, te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(8, 32), v), true)), TE_OK);
            UNCHANGED();
            te_tensor_zero_grad(weight);
            for (int step = 0; step < 2; step++) CHECK_EQ_INT(step_under(te, &r, m, good), TE_OK);
            const float *g = test_read(te_tensor_grad(weight));
            double sum = 0;
            for (int i = 0; i < 16 * 32; i++) sum += fabs((double)g[i]);
            CHECK_MSG(sum > 0 && sum < 1e6, "the gradients add up to %g", sum);
            if (kind == TE_RECIPE_DELAYED) {
                const float *scale = test_read(te_module_parameter(m, "fp8_scale_fwd"));
                CHECK_MSG(scale[0] > 0 && scale[0] < INFINITY, "the scale is %g", (double)scale[0]);
            }
            te_module_destroy(m);
            CHECK_OK(te);
            te_scope_end(te);
        }
    forget();
}

/* ---- no memory in the middle ----------------------------------------------------------------------------------------- */

typedef struct hungry {
    te_quantizer *q;
    te_tensor *x, *dst, *first; /* dst = first, quantized */
    te_recipe recipe;
    te_module *module;
} hungry;
typedef te_result (*hungry_fn)(te_ctx *te, hungry *h);

static te_result hungry_quantize(te_ctx *te, hungry *h) { return te_quantize(h->q, h->x) ? TE_OK : te_error_code(te); }
static te_result hungry_into(te_ctx *te, hungry *h) {
    (void)te;
    return te_quantize_into(h->q, h->x, h->dst, NULL);
}
static te_result hungry_dequantize(te_ctx *te, hungry *h) { return te_dequantize(h->dst, TE_F32) ? TE_OK : te_error_code(te); }
static te_result hungry_step(te_ctx *te, hungry *h) {
    te_tensor *y = test_forward(h->module, &h->recipe, h->x);
    return y ? te_backward_from(y, y) : te_error_code(te);
}

/* Refuses every request of `work` in turn: each time it fails in words, leaves nothing behind and changes nothing; then it succeeds. */
static void refuse_in_turn(te_ctx *te, purse *p, hungry_fn work, hungry *h, int least, const char *what) {
    enum { MOST = 3000 };
    for (int n = 1; n <= MOST; n += test_every_odd(2)) {
        test_case("%s: request %d is refused", what, n);
        te_memory_trim(te);
        size_t before = te_memory_get_stats(te).allocated;
        int64_t refused = p->refused;
        te_scope_begin(te);
        te_rng_set(te, 3, 100);
        p->fail_at = p->calls + n;
        te_result result = work(te, h);
        p->fail_at = 0;
        CHECK_EQ_INT(te_error_code(te), result);
        te_clear_error(te);
        te_scope_end(te);
        if (p->refused == refused) {
            CHECK_EQ_INT(result, TE_OK);
            CHECK_MSG(n > least, "only %d requests", n - 1);
            return;
        }
        if (result != TE_OK) {
            CHECK_EQ_INT(result, TE_ERR_OUT_OF_MEMORY);
            UNCHANGED();
            CHECK_EQ_INT(te_memory_get_stats(te).allocated, before);
        } else if (h->first) { /* it did without */
            CHECK_EQ_INT(te_quantize_into(h->q, h->first, h->dst, NULL), TE_OK);
            UNCHANGED();
        }
    }
    test_fail(__FILE__, __LINE__, "%s: %d requests and no end", what, MOST);
}

static te_ctx *context_with(purse *p) {
    te_ctx_desc desc = purse_desc(p, NULL);
    return test_context_with(&desc);
}

TE_TEST(no_memory_for_a_quantizer) {
    purse *p = new_purse();
    te_ctx *te = context_with(p);
    te_custom_quantizer custom = {"mine", NULL, mine_quantize, mine_dequantize, NULL};
    mine state = {te, te, 0, 0, 0, false};
    custom.user = &state;
    for (int i = 0; i <= KINDS; i++)
        for (int strided = 0; strided < 2; strided++) {
            hungry h = {0};
            te_quantizer_desc d = kind_of(i < KINDS ? i : 0);
            if (i == KINDS) d.kind = TE_QUANT_CUSTOM, d.custom = &custom;
            te_scope_begin(te);
            h.q = te_quantizer_create(te, &d);
            h.first = normal(te, 40, 24, 1);
            h.dst = te_quantize(h.q, h.first);
            h.x = strided ? te_tensor_transpose(normal(te, 24, 40, 2), 0, 1) : normal(te, 40, 24, 2);
            REQUIRE_OK(te);
            const char *name = i < KINDS ? kind_names[i] : "custom";
            forget();
            keep(h.x);
            keep(h.dst);
            refuse_in_turn(te, p, hungry_quantize, &h, 2, name);
            UNCHANGED();
            refuse_in_turn(te, p, hungry_dequantize, &h, 1, name);
            UNCHANGED();
            refuse_in_turn(te, p, hungry_into, &h, -1, name);
            te_tensor *want = te_quantize(h.q, h.x);
            for (int which = TE_ROWWISE; which <= TE_COLUMNWISE; which++) {
                te_tensor *a, *b;
                te_quantized_view(h.dst, which, &a, NULL);
                te_quantized_view(want, which, &b, NULL);
                CHECK_BYTES("quantized into", test_read_bytes(a), test_read_bytes(b), te_tensor_bytes(b));
            }
            te_quantizer_destroy(h.q);
            te_scope_end(te);
        }
    forget();
    CHECK_OK(te);
}

TE_TEST(no_memory_in_a_step) {
    purse *p = new_purse();
    te_ctx *te = context_with(p);
    answers mixed = {0};
    mixed.slot[0] = kind_of(4);
    mixed.slot[1] = kind_of(8);
    mixed.slot[2].kind = TE_QUANT_DELAYED;
    for (int kind = TE_RECIPE_DELAYED; kind <= TE_RECIPE_CUSTOM; kind++)
        for (int primary = 0; primary < 2; primary++) {
            hungry h = {0};
            h.recipe = kind == TE_RECIPE_CUSTOM ? te_recipe_custom(answer, &mixed) : recipe_of(kind);
            te_scope_begin(te);
            if (primary) init_with(te, &h.recipe);
            te_layernorm_mlp_desc d = {0};
            d.hidden_size = d.ffn_hidden_size = 16;
            d.gemm.params_dtype = TE_F32;
            h.module = te_layernorm_mlp_create(te, &d);
            if (primary) te_quantized_model_init_end(te);
            h.x = normal(te, 6, 16, 1);
            REQUIRE_OK(te);
            te_scope_begin(te); /* the module's slots and scales are made by the first step: under a starved one of its own */
            forget();
            static const char *const weights[] = {"layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"};
            for (int i = 0; i < COUNT(weights); i++) {
                te_tensor *w = te_module_parameter(h.module, weights[i]);
                REQUIRE(w != NULL);
                te_tensor_set_requires_grad(w, false);
                keep(w);
            }
            te_tensor_set_requires_grad(h.x, true);
            te_tensor_set_requires_grad(te_module_parameter(h.module, "fc1_weight"), !primary);
            test_case("recipe %d primary %d", kind, primary);
            hungry_step(te, &h); /* what a module keeps from its first step on, and gradients: there from here */
            REQUIRE_OK(te);
            UNCHANGED();
            refuse_in_turn(te, p, hungry_step, &h, 40, te_recipe_name((te_recipe_kind)kind));
            CHECK_OK(te);
            te_scope_end(te);
            te_module_destroy(h.module);
            te_scope_end(te);
        }
    forget();
    CHECK_OK(te);
}

/* The first step of a module, refused at every request: its slots and scales are made whole or not at all. */
TE_TEST(no_memory_in_a_first_step) {
    purse *p = new_purse();
    te_ctx *te = context_with(p);
    answers mixed = {0};
    mixed.slot[0] = kind_of(4);
    mixed.slot[1] = kind_of(8);
    mixed.slot[2].kind = TE_QUANT_DELAYED;
    for (int kind = TE_RECIPE_DELAYED; kind <= TE_RECIPE_CUSTOM; kind++)
        for (int n = 1;; n += test_every_odd(2)) {
            test_case("recipe %s: request %d is refused", te_recipe_name((te_recipe_kind)kind), n);
            hungry h = {0};
            h.recipe = kind == TE_RECIPE_CUSTOM ? te_recipe_custom(answer, &mixed) : recipe_of(kind);
            te_scope_begin(te);
            te_rng_set(te, 3, 100);
            h.module = linear_of(te, "head");
            h.x = te_tensor_set_requires_grad(normal(te, 6, 32, 1), true);
            forget();
            keep(te_module_parameter(h.module, "weight"));
            keep(te_module_parameter(h.module, "bias"));
            te_rng_set(te, 4, 100);
            int64_t refused = p->refused;
            p->fail_at = p->calls + n;
            te_result result = hungry_step(te, &h);
            p->fail_at = 0;
            bool last = p->refused == refused;
            CHECK_EQ_INT(te_error_code(te), result);
            CHECK(!last || result == TE_OK);
            if (result != TE_OK) CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "out of ");
            UNCHANGED();
            CHECK_EQ_INT(hungry_step(te, &h), TE_OK); /* and now it can */
            UNCHANGED();
            CHECK_OK(te);
            te_module_destroy(h.module);
            te_scope_end(te);
            if (last) {
                CHECK_MSG(n > 30, "only %d requests", n - 1);
                break;
            }
            if (n > 3000) {
                test_fail(__FILE__, __LINE__, "no end");
                break;
            }
        }
    forget();
}
