/* ops/gemm/quantize.c: a product whose operand A is quantized by the call, as two calls: one that quantizes A, and a
 * product of codes. CUDA has one launch for most products of few rows (gemv_k). This file must not depend on the
 * backend. */

/* The product of codes, and the tensors for them. Their memory is memory[i].data, of bytes[i]. */
typedef struct te__gemm_codes {
    te_op_gemm_args product;
    te_tensor codes, scale, amax;
    te__buffer memory[3];
    int64_t bytes[3];
} te__gemm_codes;

static void te__gemm_codes_tensor(te_ctx *te, te__gemm_codes *c, int i, te_tensor *x, te_dtype dtype, int64_t rows,
                                  int64_t columns) {
    x->te = c->memory[i].te = te;
    x->refs = c->memory[i].refs = 1;
    x->buffer = &c->memory[i];
    x->dtype = dtype;
    x->ndim = 2;
    x->shape[0] = rows;
    x->shape[1] = x->stride[0] = columns;
    x->stride[1] = 1;
    c->bytes[i] = te__div_up(rows * columns * te_dtype_bits(dtype), 8);
    c->memory[i].bytes = (size_t)c->bytes[i];
}
static void te__gemm_codes_init(te__gemm_codes *c, te_ctx *te, const te_op_gemm_args *a) {
    const te_scaling s = a->scaling_a;
    const bool tensor = s == TE_SCALING_TENSOR;
    te_op_gemm_args *g = &c->product;
    memset(c, 0, sizeof(*c));
    *g = *a;
    g->quantize_a = TE_DTYPE_NONE;
    g->quantize_scale = NULL;
    g->quantize_amax = NULL;
    te__gemm_codes_tensor(te, c, 0, &c->codes, a->quantize_a, a->m,
                          te__round_up(a->k, a->quantize_a == TE_F4E2M1 ? 32 : 16));
    te__gemm_codes_tensor(te, c, 1, &c->scale,
                          s == TE_SCALING_MXFP8   ? TE_F8E8M0
                          : s == TE_SCALING_NVFP4 ? TE_F8E4M3
                                                  : TE_F32,
                          tensor ? 1 : te__gemm_scale_rows(s, false, a->m, a->k),
                          tensor ? 1 : te__gemm_scale_ld(s, false, a->m, a->k));
    te__gemm_codes_tensor(te, c, 2, &c->amax, TE_F32, 1, 1);
    g->a = &c->codes;
    g->scale_a = &c->scale;
    if (s == TE_SCALING_NVFP4) g->amax_a = &c->amax;
}

static te_op_fp8_quantize_args te__gemm_quantize_tensor(const te_op_gemm_args *a, te__gemm_codes *c) {
    te_op_fp8_quantize_args q = TE_ZERO;
    q.x = a->a;
    q.row = &c->codes;
    q.scale_inv = &c->scale;
    q.scale = a->quantize_scale;
    q.amax = a->quantize_amax;
    q.current = !a->quantize_scale;
    q.epsilon = a->quantize_epsilon;
    q.power_of_two = a->quantize_power_of_two;
    return q;
}
static te_op_block_quantize_args te__gemm_quantize_block(const te_op_gemm_args *a, te__gemm_codes *c) {
    te_op_block_quantize_args q = TE_ZERO;
    q.x = a->a;
    q.row = &c->codes;
    q.row_scale_inv = &c->scale;
    q.fp32_scales = !a->quantize_power_of_two;
    q.epsilon = a->quantize_epsilon;
    return q;
}
static te_op_mxfp8_quantize_args te__gemm_quantize_mxfp8(const te_op_gemm_args *a, te__gemm_codes *c) {
    te_op_mxfp8_quantize_args q = TE_ZERO;
    q.x = a->a;
    q.row = &c->codes;
    q.row_scale = &c->scale;
    q.swizzled = a->swizzled_scales;
    return q;
}
static te_op_nvfp4_quantize_args te__gemm_quantize_nvfp4(const te_op_gemm_args *a, te__gemm_codes *c) {
    te_op_nvfp4_quantize_args q = TE_ZERO;
    q.x = a->a;
    q.row = &c->codes;
    q.row_scale = &c->scale;
    q.amax_row = &c->amax;
    q.measure = true;
    q.e4m3_max_256 = a->e4m3_max_256_a;
    q.swizzled = a->swizzled_scales;
    return q;
}
/* Calls te__PREFIX_..._quantize with the context or plan `to`, by the scaling of A. Sets `result`. */
#define TE__GEMM_QUANTIZE(result, prefix, to, a, c)                                 \
    do {                                                                            \
        if ((a)->scaling_a == TE_SCALING_TENSOR) {                                  \
            te_op_fp8_quantize_args te__q = te__gemm_quantize_tensor(a, c);         \
            result = prefix##fp8_quantize(to, &te__q);                              \
        } else if ((a)->scaling_a == TE_SCALING_MXFP8) {                            \
            te_op_mxfp8_quantize_args te__q = te__gemm_quantize_mxfp8(a, c);        \
            result = prefix##mxfp8_quantize(to, &te__q);                            \
        } else if ((a)->scaling_a == TE_SCALING_NVFP4) {                            \
            te_op_nvfp4_quantize_args te__q = te__gemm_quantize_nvfp4(a, c);        \
            result = prefix##nvfp4_quantize(to, &te__q);                            \
        } else {                                                                    \
            te_op_block_quantize_args te__q = te__gemm_quantize_block(a, c);        \
            result = prefix##block_quantize(to, &te__q);                            \
        }                                                                           \
    } while (0)
