/* onnx/quant.c: translates quantization, and GEMMs whose operands are codes, into nodes of an ONNX graph. This file
 * must not depend on recipes.
 *
 * Codes with one scale per tensor become QuantizeLinear and DequantizeLinear, because runtimes look for these two
 * operators. The scale is a constant if it is known at the export: under delayed scaling, and for a parameter under
 * current scaling. The graph's value for a tensor of codes is always the decoded numbers, so GEMMs multiply plain
 * numbers.
 *
 * The opset of the ONNX file (TE__ONNX_OPSET) cannot express scales of blocks. A parameter quantized in blocks is
 * stored as its decoded codes. Other tensors that te.h quantizes in blocks stay unquantized. */

/* ---- codes with one scale per tensor ---- */

static int te__onnx_zero_code(te__onnx *g, te_dtype codes) {
    return te__onnx_numbers(g, te__onnx_type(codes), 0, NULL, "", 1);
}
static int te__onnx_decoded(te__onnx *g, int codes, int scale_inv, te_dtype dtype) {
    return te__onnx_3(g, "DequantizeLinear", codes, scale_inv, te__onnx_zero_code(g, dtype));
}
/* Returns x rounded to codes and decoded again. */
static int te__onnx_through_codes(te__onnx *g, int x, int scale_inv, te_dtype dtype) {
    return te__onnx_decoded(g, te__onnx_3(g, "QuantizeLinear", x, scale_inv, te__onnx_zero_code(g, dtype)), scale_inv,
                            dtype);
}
/* Returns 1 / scale for a tensor that holds the scale. */
static int te__onnx_inverse(te__onnx *g, const te_tensor *scale, const te_tensor *scale2) {
    float v;
    if (!te__onnx_constant_of(g, scale, scale2)) {
        int x = te__onnx_2(g, "Reshape", te__onnx_read(g, scale, scale2), te__onnx_i64s(g, 0, NULL));
        return te__onnx_2(g, "Div", te__onnx_f32(g, 1.0f), x);
    }
    if (te__onnx_host(g, scale, &v, 1) != TE_OK) return TE__ONNX_FAILED;
    return te__onnx_f32(g, te__floats_divide(1.0f, v));
}

/* Returns the largest power of two that is not above x. The computed logarithm may be off by one, so comparisons
 * correct the result. */
static int te__onnx_power_of_two(te__onnx *g, int x) {
    int two = te__onnx_f32(g, 2.0f), half = te__onnx_f32(g, 0.5f);
    int v =
        te__onnx_2(g, "Pow", two,
                   te__onnx_1(g, "Floor", te__onnx_2(g, "Div", te__onnx_1(g, "Log", x), te__onnx_f32(g, 0.69314718f))));
    v = te__onnx_3(g, "Where", te__onnx_2(g, "Greater", v, x), te__onnx_2(g, "Mul", v, half), v);
    return te__onnx_3(g, "Where", te__onnx_2(g, "LessOrEqual", te__onnx_2(g, "Mul", v, two), x),
                      te__onnx_2(g, "Mul", v, two), v);
}
/* Returns the scale for `amax`, a scalar of the graph, by the formula of te_op_scale_from_amax. */
static int te__onnx_scale_of(te__onnx *g, int amax, float fp8_max, float epsilon, bool power_of_two) {
    int v = epsilon > 0.0f ? te__onnx_2(g, "Max", amax, te__onnx_f32(g, epsilon)) : amax, one = te__onnx_f32(g, 1.0f),
        scale;
    int none = te__onnx_2(g, "Equal", v, te__onnx_f32(g, 0.0f));
    scale = te__onnx_2(g, "Div", te__onnx_f32(g, fp8_max), te__onnx_3(g, "Where", none, one, v));
    if (power_of_two) scale = te__onnx_power_of_two(g, scale);
    return te__onnx_3(g, "Where", none, one, te__onnx_2(g, "Min", scale, te__onnx_f32(g, FLT_MAX)));
}
static int te__onnx_amax_of(te__onnx *g, int x) { return te__onnx_reduce_all(g, "ReduceMax", te__onnx_1(g, "Abs", x)); }
static int te__onnx_vector(te__onnx *g, int number) {
    int64_t one = 1;
    return te__onnx_2(g, "Reshape", number, te__onnx_i64s(g, 1, &one));
}

/* Reshapes `value`, which has the shape of `from`, to the shape of `codes`, [M, ld]. Columns that `value` does not have
 * become 0. */
static int te__onnx_rows(te__onnx *g, int value, const te__onnx_pair *from, const te_tensor *codes,
                         const te_tensor *codes2) {
    te__onnx_pair to = te__onnx_pair_of(codes, codes2);
    te__onnx_size shape[TE_MAX_DIMS];
    int64_t pad[2 * TE_MAX_DIMS];
    int n = codes->ndim, i;
    bool alike = n == from->first.ndim;
    memset(pad, 0, sizeof(pad));
    te__onnx_dims(&to, shape);
    shape[n - 1] = te__onnx_dim(from, -1);
    for (i = 0; alike && i < n; i++) alike = te__onnx_same(shape[i], te__onnx_dim(from, i));
    if (!alike) value = te__onnx_reshape(g, value, n, shape);
    pad[2 * n - 1] = te__cols(codes) - shape[n - 1].first;
    return pad[2 * n - 1] > 0 ? te__onnx_2(g, "Pad", value, te__onnx_i64s(g, 2 * n, pad)) : value;
}

/* Stores `value` as the result y of a call. If y is FP8, first rounds `value` to codes with `scale`. `from` has the
 * shape of `value`. */
static void te__onnx_store_result(te__onnx *g, int value, const te__onnx_pair *from, const te_tensor *y,
                                  const te_tensor *y2, const te_tensor *scale, const te_tensor *scale2) {
    if (y && te__is_fp8(y->dtype)) {
        value = te__onnx_through_codes(g, value, te__onnx_inverse(g, scale, scale2), y->dtype);
        value = te__onnx_rows(g, value, from, y, y2);
    }
    te__onnx_store(g, y, y2, value);
}

/* ---- groups of rows ---- */

/* Returns a column with one number for each row i of a matrix: numbers[groups[i]], or 1 if groups[i] is -1. `numbers`
 * has the shape [n]. */
static int te__onnx_of_rows(te__onnx *g, int numbers, int groups, int64_t n) {
    int none = te__onnx_2(g, "Less", groups, te__onnx_i64(g, 0));
    numbers = te__onnx_concat2(g, 0, numbers, te__onnx_vector(g, te__onnx_f32(g, 1.0f)));
    return te__onnx_unsqueeze(
        g, te__onnx_2(g, "Gather", numbers, te__onnx_3(g, "Where", none, te__onnx_i64(g, n), groups)), -1);
}
/* Returns the amax of each of the n groups of rows of the matrix x, as [n]. */
static int te__onnx_amax_of_groups(te__onnx *g, int x, int groups, int64_t n) {
    int of_rows = te__onnx_reduce(g, "ReduceMax", te__onnx_1(g, "Abs", x), -1);
    int mine = te__onnx_2(g, "Equal", te__onnx_unsqueeze(g, groups, -1), te__onnx_range(g, te__onnx_fixed(n)));
    of_rows = te__onnx_3(g, "Where", mine, of_rows, te__onnx_f32(g, 0.0f));
    return te__onnx_reduce_away(g, "ReduceMax", of_rows, 0);
}
/* Returns v rounded to codes and decoded again. Each group of rows has its own scale. */
static int te__onnx_through_codes_of_groups(te__onnx *g, int v, const te_op_fp8_quantize_args *a,
                                            const te_op_fp8_quantize_args *b, te_dtype codes) {
    int64_t n = te__numel(a->scale);
    int scale;
    if (te__onnx_constant_of(g, a->scale, b->scale)) {
        float *known = (float *)te__alloc(g->te, (size_t)n * sizeof(float));
        te_tensor *flat = te_tensor_contiguous((te_tensor *)a->scale);
        if (!known || !flat || te__onnx_host(g, flat, known, (int)n) != TE_OK)
            return te__free(g->te, known), TE__ONNX_FAILED;
        scale = te__onnx_numbers(g, TE__ONNX_FLOAT, 1, &n, known, (size_t)n * sizeof(float));
        te__free(g->te, known);
    } else scale = TE__ONNX_READ(scale);
    scale = te__onnx_of_rows(g, scale, TE__ONNX_READ(groups), n);
    v = te__onnx_through_codes(g, te__onnx_2(g, "Mul", v, scale), te__onnx_f32(g, 1.0f), codes);
    return te__onnx_2(g, "Mul", v, te__onnx_2(g, "Div", te__onnx_f32(g, 1.0f), scale));
}

static void te__onnx_amax(te__onnx *g, const te_op_amax_args *a, const te_op_amax_args *b) {
    int v = TE__ONNX_FAILED;
    if (!a->keep && !a->noop)
        v = a->groups ? te__onnx_amax_of_groups(g, TE__ONNX_READ(x), TE__ONNX_READ(groups), te__numel(a->amax))
                      : te__onnx_vector(g, te__onnx_amax_of(g, TE__ONNX_READ(x)));
    TE__ONNX_STORE(amax, v);
}
static void te__onnx_scale_from_amax(te__onnx *g, const te_op_scale_from_amax_args *a,
                                     const te_op_scale_from_amax_args *b) {
    int v = te__onnx_scale_of(g, TE__ONNX_READ(amax), a->fp8_max, a->epsilon, a->power_of_two);
    TE__ONNX_STORE(scale, v);
    TE__ONNX_STORE(scale_inv, te__onnx_2(g, "Div", te__onnx_f32(g, 1.0f), v));
}

/* Returns the amax for a cast under current scaling, as a scalar. This is x_amax if the operation that made x computed
 * it. Otherwise the amax is computed from x. */
static int te__onnx_cast_amax(te__onnx *g, const te_op_fp8_quantize_args *a, const te_op_fp8_quantize_args *b, int x) {
    te_tensor left, left2;
    te__onnx_pair amax;
    int i;
    if (!a->x_amax) return te__onnx_amax_of(g, x);
    left = *a->x_amax;
    left2 = *b->x_amax;
    left.shape[0] = left2.shape[0] = 1; /* The tensor x_amax has two elements. The first is the amax. The second is
                                         * a counter, which the graph does not need. */
    amax = te__onnx_pair_of(&left, &left2);
    i = te__onnx_last(g, &amax, g->num_writes);
    if (i < 0 || g->writes[i].value < 0) return te__onnx_amax_of(g, x);
    return te__onnx_2(g, "Reshape", te__onnx_read_as(g, &amax, &left, &left2), te__onnx_i64s(g, 0, NULL));
}
static void te__onnx_fp8_quantize(te__onnx *g, const te_op_fp8_quantize_args *a, const te_op_fp8_quantize_args *b) {
    te_dtype codes = a->row ? a->row->dtype : a->col->dtype;
    te__onnx_pair from = TE__ONNX_PAIR(x);
    int v = TE__ONNX_READ(x), amax = a->current ? te__onnx_cast_amax(g, a, b, v) : TE__ONNX_FAILED,
        scale_inv = TE__ONNX_FAILED;
    float known;
    TE__ONNX_UNKNOWN(col);
    TE__ONNX_UNKNOWN(amax);
    TE__ONNX_UNKNOWN(x_amax);
    TE__ONNX_UNKNOWN(dbias);
    if (a->groups) {
        v = te__onnx_through_codes_of_groups(g, v, a, b, codes);
    } else {
        if (!a->current) scale_inv = te__onnx_inverse(g, a->scale, b->scale);
        else if (a->scale_inv && te__onnx_constant_of(g, a->x, b->x))
            scale_inv = te__onnx_host(g, a->scale_inv, &known, 1) == TE_OK ? te__onnx_f32(g, known) : TE__ONNX_FAILED;
        else
            scale_inv = te__onnx_2(g, "Div", te__onnx_f32(g, 1.0f),
                                   te__onnx_scale_of(g, amax, te_dtype_max(codes), a->epsilon, a->power_of_two));
        v = te__onnx_through_codes(g, v, scale_inv, codes);
    }
    if (a->row) TE__ONNX_STORE(row, te__onnx_rows(g, v, &from, a->row, b->row));
    TE__ONNX_STORE(scale_inv, a->groups ? TE__ONNX_FAILED : te__onnx_vector(g, scale_inv));
}

/* ---- codes with one scale per block ---- */

/* A weight that has been decoded for the file already. It is used again if another layer shares the weight. */
typedef struct te__onnx_plain {
    te_tensor x; /* shape and memory of the weight, or of the codes in which it is stored; not retained */
    te_scaling scaling;
    bool e4m3_max_256;
    const char *path; /* name of the weight; not owned: it is the path of the weight's te__onnx_write, or a static
                       * string if the weight is a constant */
    int item;
} te__onnx_plain;
static void te__onnx_plain_free(te__onnx *g) {
    te__free(g->te, g->plain);
}

/* One copy of a quantized tensor in the first run. */
typedef struct te__onnx_codes {
    const te_tensor *q, *scale, *amax;
    te_scaling scaling;
    bool swizzled, e4m3_max_256;
} te__onnx_codes;
static te__onnx_codes te__onnx_codes_of(te_scaling scaling, const te_tensor *q, const te_tensor *scale,
                                        const te_tensor *amax, bool swizzled, bool e4m3_max_256) {
    te__onnx_codes c;
    c.q = q;
    c.scale = scale;
    c.amax = amax;
    c.scaling = scaling;
    c.swizzled = swizzled;
    c.e4m3_max_256 = e4m3_max_256;
    return c;
}

/* Decodes codes that have one scale for each block. The result becomes a weight [rows, columns] of the ONNX file. x is
 * the weight that was quantized, or its stored codes. */
static int te__onnx_decode_blocks(te__onnx *g, const te__onnx_codes *c, const te_tensor *x, int64_t rows,
                                  int64_t columns, const char *path) {
    te_ctx *te = g->te;
    te_result result = TE_ERR_UNSUPPORTED;
    te_tensor *out;
    te__onnx_plain *p;
    char name[640];
    int i, same_name = 0;
    te__onnx_pair from = te__onnx_pair_of(x, x), seen;
    if (!path) path = "constant";
    for (i = 0; i < g->num_plain; i++) {
        p = &g->plain[i];
        seen = te__onnx_pair_of(&p->x, &p->x);
        if (p->x.buffer == x->buffer && te__onnx_same_place(&seen, &from) && p->scaling == c->scaling &&
            p->e4m3_max_256 == c->e4m3_max_256)
            return p->item;
        same_name += p->path && strcmp(p->path, path) == 0;
    }
    int64_t shape[2] = {rows, columns};
    /* An FP8 code times a power of two (MXFP8) is exact in bfloat16. Other scales are no powers of two and need f32. */
    out = te_tensor_empty(te, c->scaling == TE_SCALING_MXFP8 ? TE_BF16 : TE_F32, 2, shape);
    if (!out) return TE__ONNX_FAILED;
    if (c->scaling == TE_SCALING_MXFP8) {
        te_op_mxfp8_dequantize_args args = TE_ZERO;
        args.q = c->q;
        args.scale = c->scale;
        args.y = out;
        args.swizzled = c->swizzled;
        result = te_op_mxfp8_dequantize(te, &args);
    } else if (c->scaling == TE_SCALING_NVFP4) {
        te_op_nvfp4_dequantize_args args = TE_ZERO;
        args.q = c->q;
        args.scale = c->scale;
        args.amax = c->amax;
        args.y = out;
        args.swizzled = c->swizzled;
        args.e4m3_max_256 = c->e4m3_max_256;
        result = te_op_nvfp4_dequantize(te, &args);
    } else {
        te_op_block_dequantize_args args = TE_ZERO;
        args.q = c->q;
        args.scale_inv = c->scale;
        args.y = out;
        args.two_dimensional = c->scaling == TE_SCALING_BLOCK_2D;
        result = te_op_block_dequantize(te, &args);
    }
    /* A parameter may have several decoded weights, for different parts of the parameter or for different recipes. They
     * need different names. */
    if (same_name) snprintf(name, sizeof(name), "%s.decoded_%d", path, same_name + 1);
    else snprintf(name, sizeof(name), "%s.decoded", path);
    if (result != TE_OK || !te__grow(te, (void **)&g->plain, &g->cap_plain, g->num_plain, sizeof(te__onnx_plain)))
        return TE__ONNX_FAILED;
    i = te__onnx_weight(g, name, out);
    if (i < 0) return i;
    p = &g->plain[g->num_plain++];
    p->x = *x;
    p->scaling = c->scaling;
    p->e4m3_max_256 = c->e4m3_max_256;
    p->path = path;
    p->item = i;
    return i;
}

/* Stores the result of a call that quantized x in blocks. If x is a parameter or a constant, stores the decoded codes.
 * Otherwise stores x itself, unquantized. */
static void te__onnx_blocks(te__onnx *g, te__onnx_codes c, const te_tensor *x, const te_tensor *x2,
                            const te_tensor *row2) {
    const te__onnx_write *w = te__onnx_constant_of(g, x, x2);
    te__onnx_pair from = te__onnx_pair_of(x, x2);
    te__onnx_size shape[TE_MAX_DIMS];
    int v, decoded;
    if (!c.q) return;
    v = te__onnx_read(g, x, x2);
    if (w && v >= 0) {
        decoded = te__onnx_decode_blocks(g, &c, x, te__rows(x), te__cols(x), w->path);
        if (decoded >= 0) v = c.scaling == TE_SCALING_MXFP8 ? te__onnx_cast(g, decoded, TE__ONNX_FLOAT) : decoded;
        te__onnx_dims(&from, shape);
        if (x->ndim != 2) v = te__onnx_reshape(g, v, x->ndim, shape);
    }
    te__onnx_store(g, c.q, row2, te__onnx_rows(g, v, &from, c.q, row2));
}
static te_scaling te__onnx_scaling(bool two_dimensional) {
    return two_dimensional ? TE_SCALING_BLOCK_2D : TE_SCALING_BLOCK_1D;
}
static void te__onnx_block_quantize(te__onnx *g, const te_op_block_quantize_args *a,
                                    const te_op_block_quantize_args *b) {
    TE__ONNX_UNKNOWN(col);
    te__onnx_blocks(
        g, te__onnx_codes_of(te__onnx_scaling(a->two_dimensional), a->row, a->row_scale_inv, NULL, false, false), a->x,
        b->x, b->row);
}
static void te__onnx_mxfp8_quantize(te__onnx *g, const te_op_mxfp8_quantize_args *a,
                                    const te_op_mxfp8_quantize_args *b) {
    TE__ONNX_UNKNOWN(col);
    te__onnx_blocks(g, te__onnx_codes_of(TE_SCALING_MXFP8, a->row, a->row_scale, NULL, a->swizzled, false), a->x, b->x,
                    b->row);
}
static void te__onnx_nvfp4_quantize(te__onnx *g, const te_op_nvfp4_quantize_args *a,
                                    const te_op_nvfp4_quantize_args *b) {
    TE__ONNX_UNKNOWN(col);
    te__onnx_blocks(
        g, te__onnx_codes_of(TE_SCALING_NVFP4, a->row, a->row_scale, a->amax_row, a->swizzled, a->e4m3_max_256), a->x,
        b->x, b->row);
}

/* Prepares the operand c.q of a GEMM. A parameter or constant that is stored as codes becomes its decoded numbers. */
static bool te__onnx_operand(te__onnx *g, te__onnx_codes c, const te_tensor *q2, int64_t lines, int64_t k) {
    te__onnx_pair x = te__onnx_pair_of(c.q, q2);
    int i = te__onnx_last(g, &x, g->num_writes), v;
    te_dtype codes = c.q->dtype;
    float scale = 1.0f;
    if (te__is_float(codes)) return true;
    if (i < 0)
        return te__onnx_refuse(
                   g, "it reads codes %s that no operation of this forward has made, and that are no parameter",
                   te_dtype_name(codes)) >= 0;
    if (g->writes[i].wide || g->writes[i].by) return true;
    if (c.scaling == TE_SCALING_TENSOR) {
        if (c.scale && te__onnx_host(g, c.scale, &scale, 1) != TE_OK) return false;
        v = te__onnx_decoded(g, g->writes[i].value, te__onnx_f32(g, scale), codes);
    } else {
        v = te__onnx_decode_blocks(g, &c, c.q, lines, k, g->writes[i].path);
        if (v >= 0 && c.scaling == TE_SCALING_MXFP8) v = te__onnx_cast(g, v, TE__ONNX_FLOAT);
        if (v >= 0 && te__cols(c.q) != k) {
            int64_t pad[4] = {0};
            pad[3] = te__cols(c.q) - k;
            v = te__onnx_2(g, "Pad", v, te__onnx_i64s(g, 4, pad));
        }
    }
    g->writes[i].value = v;
    g->writes[i].wide = true;
    return te_error_code(g->te) == TE_OK;
}

/* Decodes the codes c.q, removes the padding of their rows, and stores the numbers in y. */
static void te__onnx_numbers_of(te__onnx *g, te__onnx_codes c, const te_tensor *q2, const te_tensor *y,
                                const te_tensor *y2) {
    te__onnx_pair out = te__onnx_pair_of(y, y2);
    te__onnx_size shape[TE_MAX_DIMS];
    int v;
    if (!te__onnx_operand(g, c, q2, te__rows(y), te__cols(y))) return;
    v = te__onnx_read(g, c.q, q2);
    te__onnx_dims(&out, shape);
    if (te__cols(c.q) != te__cols(y)) v = te__onnx_cut(g, v, -1, 0, te__cols(y), 1);
    if (!te__same_shape(c.q, y)) v = te__onnx_reshape(g, v, y->ndim, shape);
    te__onnx_store(g, y, y2, v);
}
static void te__onnx_fp8_dequantize(te__onnx *g, const te_op_fp8_dequantize_args *a,
                                    const te_op_fp8_dequantize_args *b) {
    te__onnx_numbers_of(g, te__onnx_codes_of(TE_SCALING_TENSOR, a->q, a->scale_inv, NULL, false, false), b->q, a->y,
                        b->y);
}
static void te__onnx_block_dequantize(te__onnx *g, const te_op_block_dequantize_args *a,
                                      const te_op_block_dequantize_args *b) {
    te__onnx_numbers_of(g,
                        te__onnx_codes_of(te__onnx_scaling(a->two_dimensional), a->q, a->scale_inv, NULL, false, false),
                        b->q, a->y, b->y);
}
static void te__onnx_mxfp8_dequantize(te__onnx *g, const te_op_mxfp8_dequantize_args *a,
                                      const te_op_mxfp8_dequantize_args *b) {
    te__onnx_numbers_of(g, te__onnx_codes_of(TE_SCALING_MXFP8, a->q, a->scale, NULL, a->swizzled, false), b->q, a->y,
                        b->y);
}
static void te__onnx_nvfp4_dequantize(te__onnx *g, const te_op_nvfp4_dequantize_args *a,
                                      const te_op_nvfp4_dequantize_args *b) {
    te__onnx_numbers_of(g, te__onnx_codes_of(TE_SCALING_NVFP4, a->q, a->scale, a->amax, a->swizzled, a->e4m3_max_256),
                        b->q, a->y, b->y);
}

/* ---- GEMMs ---- */

/* Returns x as a matrix of the given numbers of rows and columns. x may have more rows, columns or dimensions. */
static te__onnx_pair te__onnx_matrix(const te_tensor *x, const te_tensor *x2, te__onnx_size rows,
                                     te__onnx_size columns) {
    te__onnx_pair p = te__onnx_pair_of(x, x2);
    te__onnx_size ld;
    te__onnx_size shape[2] = {rows, columns};
    ld.first = te__gemm_ld(x);
    ld.second = te__gemm_ld(x2);
    return te__onnx_as(&p, 2, shape, ld);
}
/* Checks that x is contiguous, and that its own shape has exactly the given numbers of rows and columns. */
static bool te__onnx_is_matrix(const te_tensor *x, const te_tensor *x2, te__onnx_size rows, te__onnx_size columns) {
    return te__is_contiguous(x) && te__is_contiguous(x2) && te__rows(x) == rows.first && te__rows(x2) == rows.second &&
           te__onnx_is(columns, te__cols(x));
}
static int te__onnx_read_matrix(te__onnx *g, const te_tensor *x, const te_tensor *x2, te__onnx_size rows,
                                te__onnx_size columns, bool turned) {
    te__onnx_pair p = turned ? te__onnx_matrix(x, x2, columns, rows) : te__onnx_matrix(x, x2, rows, columns);
    int order[2] = {1, 0}, v = te__onnx_read_as(g, &p, x, x2);
    return turned ? te__onnx_transpose(g, v, 2, order) : v;
}
static int te__onnx_sigmoid_of(te__onnx *g, int x, float factor) {
    return te__onnx_1(g, "Sigmoid", te__onnx_2(g, "Mul", x, te__onnx_f32(g, factor)));
}
/* Returns GELU, computed by the tanh approximation. The constants are those of te__act_one. */
static int te__onnx_gelu(te__onnx *g, int x) {
    int v = te__onnx_2(g, "Add", te__onnx_2(g, "Mul", te__onnx_2(g, "Mul", x, x), te__onnx_f32(g, 0.03567741f)),
                       te__onnx_f32(g, 0.79788456f));
    return te__onnx_2(g, "Mul", x, te__onnx_sigmoid_of(g, te__onnx_2(g, "Mul", x, v), 2.0f));
}
static void te__onnx_gemm(te__onnx *g, const te_op_gemm_args *a, const te_op_gemm_args *b) {
    te__onnx_size m, n, k, shape[TE_MAX_DIMS];
    te__onnx_pair d = TE__ONNX_PAIR(d), in = TE__ONNX_PAIR(a);
    int v, w, i;
    bool whole, alike;
    m.first = a->m, m.second = b->m;
    n.first = a->n, n.second = b->n;
    k.first = a->k, k.second = b->k;
    if (a->quantize_a) {
        te__onnx_refuse(g, "a product that quantizes an operand; te_op_..._quantize it first");
        return;
    }
    if (a->epilogue == TE_EPILOGUE_DGELU || a->bias_gradient) {
        te__onnx_refuse(g, "a product of a backward pass");
        return;
    }
    if (!te__onnx_operand(
            g, te__onnx_codes_of(a->scaling_a, a->a, a->scale_a, a->amax_a, a->swizzled_scales, a->e4m3_max_256_a),
            b->a, a->m, a->k) ||
        !te__onnx_operand(
            g, te__onnx_codes_of(a->scaling_b, a->b, a->scale_b, a->amax_b, a->swizzled_scales, a->e4m3_max_256_b),
            b->b, a->n, a->k))
        return;
    whole = !a->a_transposed && te__onnx_is_matrix(a->a, b->a, m, k);
    v = whole ? TE__ONNX_READ(a) : te__onnx_read_matrix(g, a->a, b->a, m, k, a->a_transposed);
    w = te__onnx_read_matrix(g, a->b, b->b, k, n, a->b_transposed);
    v = te__onnx_2(g, "MatMul", v, w);
    if (a->bias) {
        te__onnx_pair bias = TE__ONNX_PAIR(bias);
        bias = te__onnx_as(&bias, 1, &n, n);
        v = te__onnx_2(g, "Add", v, te__onnx_read_as(g, &bias, a->bias, b->bias));
    }
    /* to the shape of D */
    alike = whole && te__onnx_is_matrix(a->d, b->d, m, n) && a->d->ndim == a->a->ndim;
    for (i = 0; alike && i + 1 < a->d->ndim; i++) alike = te__onnx_same(te__onnx_dim(&d, i), te__onnx_dim(&in, i));
    if (!te__onnx_is_matrix(a->d, b->d, m, n)) d = te__onnx_matrix(a->d, b->d, m, n);
    te__onnx_dims(&d, shape);
    if (!alike && (whole || d.first.ndim != 2)) v = te__onnx_reshape(g, v, d.first.ndim, shape);
    if (a->epilogue == TE_EPILOGUE_GELU) {
        TE__ONNX_UNKNOWN(aux);
        v = te__onnx_gelu(g, v);
    }
    if (a->accumulate) v = te__onnx_2(g, "Add", v, te__onnx_read_as(g, &d, a->d, b->d));
    te__onnx_store_as(g, &d, v);
}

/* Returns true if one operation filled `sizes` with one value. The grouped GEMM is then a batched GEMM, and the number
 * of groups may vary. */
static bool te__onnx_is_batch(const te__onnx *g, const te_op_grouped_gemm_args *a, const te_op_grouped_gemm_args *b) {
    te__onnx_pair sizes;
    const te__onnx_write *w;
    int i;
    if (a->offsets || !a->sizes || !b->sizes) return false;
    sizes = TE__ONNX_PAIR(sizes);
    i = te__onnx_last(g, &sizes, g->num_writes);
    w = i < 0 ? NULL : &g->writes[i];
    return w && w->filled.first > 0 && w->filled.first * a->groups == a->m && w->filled.second * b->groups == b->m &&
           te__data(&w->x.first) == te__data(a->sizes) && te__numel(&w->x.first) == te__numel(a->sizes);
}
/* Translates a grouped GEMM: for each group, multiplies a slice of the rows by the group's weight. Rows after the last
 * group become 0. */
static void te__onnx_grouped_gemm(te__onnx *g, const te_op_grouped_gemm_args *a, const te_op_grouped_gemm_args *b) {
    enum { MOST = 1024 };
    const bool batch = te__onnx_is_batch(g, a, b);
    int part[MOST + 1], ends = TE__ONNX_FAILED, rows, rest, weights, biases = TE__ONNX_FAILED, i, order[2] = {1, 0},
                        turned[3] = {0, 2, 1};
    te__onnx_pair d = TE__ONNX_PAIR(d), bp = TE__ONNX_PAIR(b);
    te__onnx_size m, n, k, ld, groups;
    int64_t pads[2] = {1, 0};
    m.first = a->m, m.second = b->m;
    n.first = a->n, n.second = b->n;
    k.first = a->k, k.second = b->k;
    groups.first = a->groups, groups.second = b->groups;
    if (!batch && a->groups != b->groups)
        te__onnx_refuse(g,
                        "%lld groups, and %lld at larger inputs, whose sizes are not all alike; a graph has a product "
                        "for each group",
                        (long long)a->groups, (long long)b->groups);
    else if (a->along_k || a->a_transposed || a->accumulate || a->epilogue != TE_EPILOGUE_NONE ||
             (!batch && a->groups > MOST))
        te__onnx_refuse(g, "%lld groups, %s; a graph has forward products of at most %d groups", (long long)a->groups,
                        a->along_k || a->a_transposed ? "along k"
                        : a->accumulate               ? "added to what is there"
                                                      : "with an epilogue or without",
                        (int)MOST);
    else if (!te__is_float(a->b->dtype) && te__onnx_constant_of(g, a->b, b->b))
        te__onnx_refuse(g, "the weights of groups are stored as codes, %s; te_dequantize them first",
                        te_dtype_name(a->b->dtype));
    if (te_error_code(g->te) != TE_OK) return;
    if (a->offsets) ends = TE__ONNX_READ(offsets);
    else if (!batch) /* 0, followed by the running sums of `sizes` */
        ends = te__onnx_2(g, "Pad", te__onnx_2(g, "CumSum", TE__ONNX_READ(sizes), te__onnx_i64(g, 0)),
                          te__onnx_i64s(g, 2, pads));
    rows = te__onnx_read_matrix(g, a->a, b->a, m, k, false);
    te__onnx_size shape[3] = {groups, a->b_transposed ? n : k, a->b_transposed ? k : n};
    ld.first = te__gemm_ld(a->b);
    ld.second = te__gemm_ld(b->b);
    bp = te__onnx_as(&bp, 3, shape, ld);
    weights = te__onnx_read_as(g, &bp, a->b, b->b);
    if (a->bias) {
        te__onnx_pair p = TE__ONNX_PAIR(bias);
        shape[1] = n;
        p = te__onnx_as(&p, 2, shape, n);
        biases = te__onnx_read_as(g, &p, a->bias, b->bias);
    }
    if (!te__onnx_is_matrix(a->d, b->d, m, n)) d = te__onnx_matrix(a->d, b->d, m, n);
    if (batch) {
        te__onnx_size out[TE_MAX_DIMS];
        shape[1].first = m.first / groups.first, shape[1].second = m.second / groups.second;
        shape[2] = k;
        i = te__onnx_2(g, "MatMul", te__onnx_reshape(g, rows, 3, shape),
                       a->b_transposed ? te__onnx_transpose(g, weights, 3, turned) : weights);
        if (a->bias) i = te__onnx_2(g, "Add", i, te__onnx_unsqueeze(g, biases, 1));
        te__onnx_dims(&d, out);
        te__onnx_store_as(g, &d, te__onnx_reshape(g, i, d.first.ndim, out));
        return;
    }
    for (i = 0; i < a->groups; i++) {
        int w = te__onnx_squeeze(g, te__onnx_cut(g, weights, 0, i, i + 1, 1), 0);
        part[i] = te__onnx_slice(g, rows, 0, te__onnx_cut(g, ends, 0, i, i + 1, 1),
                                 te__onnx_cut(g, ends, 0, i + 1, i + 2, 1), 1);
        part[i] = te__onnx_2(g, "MatMul", part[i], a->b_transposed ? te__onnx_transpose(g, w, 2, order) : w);
        if (a->bias) part[i] = te__onnx_2(g, "Add", part[i], te__onnx_cut(g, biases, 0, i, i + 1, 1));
    }
    rest = te__onnx_2(g, "Sub", te__onnx_size_of(g, m), te__onnx_cut(g, ends, 0, a->groups, a->groups + 1, 1));
    /* rows of f32 zeros after the last group */
    part[a->groups] = te__onnx_1(g, "ConstantOfShape", te__onnx_concat2(g, 0, rest, te__onnx_size_of(g, n)));
    i = te__onnx_concat(g, 0, (int)a->groups + 1, part);
    if (d.first.ndim != 2) {
        te__onnx_size out[TE_MAX_DIMS];
        te__onnx_dims(&d, out);
        i = te__onnx_reshape(g, i, d.first.ndim, out);
    }
    te__onnx_store_as(g, &d, i);
}
