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

/* Makes x, which is zero, a matrix whose memory will be memory->data. Returns its bytes. */
static int64_t te__gemm_temporary(te_ctx *te, te_tensor *x, te__buffer *memory, te_dtype dtype, int64_t rows,
                                  int64_t columns) {
    const int64_t bytes = te__div_up(rows * columns * te_dtype_bits(dtype), 8);
    x->te = memory->te = te;
    x->refs = memory->refs = 1;
    x->buffer = memory;
    x->dtype = dtype;
    x->ndim = 2;
    x->shape[0] = rows;
    x->shape[1] = x->stride[0] = columns;
    x->stride[1] = 1;
    memory->bytes = (size_t)bytes;
    return bytes;
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
    c->bytes[0] = te__gemm_temporary(te, &c->codes, &c->memory[0], a->quantize_a, a->m,
                                     te__round_up(a->k, a->quantize_a == TE_F4E2M1 ? 32 : 16));
    c->bytes[1] = te__gemm_temporary(te, &c->scale, &c->memory[1],
                                     s == TE_SCALING_MXFP8   ? TE_F8E8M0
                                     : s == TE_SCALING_NVFP4 ? TE_F8E4M3
                                                             : TE_F32,
                                     tensor ? 1 : te__gemm_scale_rows(s, false, a->m, a->k),
                                     tensor ? 1 : te__gemm_scale_ld(s, false, a->m, a->k));
    c->bytes[2] = te__gemm_temporary(te, &c->amax, &c->memory[2], TE_F32, 1, 1);
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
