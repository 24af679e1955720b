/* test_gemm.c: matrix products: every format, layout and scaling against float64, tails, padding, epilogues, split k, empty sizes, all fp8
 * codes, the same bits from any number of threads, which kernel is chosen, and complaints. */
#include "../te_test.h"

typedef struct gemm_case {
    int64_t m, n, k;
    te_dtype a, b, d, bias; /* bias: TE_DTYPE_NONE for none */
    bool a_transposed, b_transposed, accumulate, split_accumulator, scaled;
    te_epilogue epilogue;
    bool bias_gradient;
    int64_t pad; /* columns beyond the matrix in A, B, D and aux: NaN in A and B, untouched in the others */
    int64_t shift; /* of them, how many of A's and B's, without scales of their own, lie in front */
    te_scaling scaling_a, scaling_b;
    bool swizzled, rows_scaled, max_256_a, max_256_b;
    double magnitude; /* of the scales of A; those of B are its inverse; 0 => 1 */
} gemm_case;

static void name_case(const gemm_case *c) {
    static const char *const scalings[] = {"", ".1d", ".2d", ".mx", ".nv"};
    test_case("m=%lld n=%lld k=%lld %s%s%s x %s%s%s -> %s bias=%s%s%s%s%s%s epilogue=%d pad=%lld shift=%lld magnitude=%g", (long long)c->m, (long long)c->n, (long long)c->k,
              te_dtype_name(c->a), scalings[c->scaling_a], c->a_transposed ? "^T" : "", te_dtype_name(c->b), scalings[c->scaling_b],
              c->b_transposed ? "^T" : "", te_dtype_name(c->d), te_dtype_name(c->bias), c->accumulate ? " accumulate" : "",
              c->split_accumulator ? " split" : "", c->scaled ? " scaled" : "", c->swizzled ? " swizzled" : "", c->rows_scaled ? " rows" : "",
              (int)c->epilogue, (long long)c->pad, (long long)c->shift, c->magnitude);
}

/* rows x cols values in rows of cols + pad; `fill` in between. */
static float *padded(const float *x, int64_t rows, int64_t cols, int64_t pad, float fill) {
    float *y = test_floats(rows * (cols + pad) + 1);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols + pad; j++) y[i * (cols + pad) + j] = j < cols ? x[i * cols + j] : fill;
    return y;
}

/* ---- operands ----------------------------------------------------------------------------------------------------------
 * Lines (rows of op(A), columns of op(B)) of k values: as tensors, and what they mean in float64. */

typedef struct operand {
    te_tensor *codes, *scale, *amax;
    double *values; /* [lines, k] */
} operand;

static te_tensor *amaxes(te_ctx *te, int64_t n, uint64_t seed, double magnitude, float **out) {
    *out = test_uniform(n, seed, 0.5f, 9.0f);
    for (int64_t i = 0; i < n; i++) (*out)[i] = (float)((*out)[i] * magnitude);
    return test_tensor(te, TE_F32, SHAPE(n), *out);
}

/* Any float format or fp8, without scales of its own. along_k: neighbours along k are neighbours in memory. */
static operand plain_operand(te_ctx *te, te_dtype dtype, int64_t lines, int64_t k, bool along_k, int64_t pad, int64_t shift, uint64_t seed) {
    operand x = {NULL, NULL, NULL, test_doubles(lines * k + 1)};
    int64_t rows = along_k ? lines : k, cols = along_k ? k : lines, size = rows * (cols + pad);
    float *v = test_rounded(dtype, test_normal(rows * cols, seed), rows * cols), *wide = padded(v, rows, cols, pad, NAN);
    if (shift && size) {
        memmove(wide + shift, wide, (size_t)(size - shift) * sizeof(float));
        for (int64_t i = 0; i < shift; i++) wide[i] = NAN;
    }
    x.codes = test_tensor(te, dtype, SHAPE(rows, cols + pad), wide);
    if (shift) x.codes = te_tensor_narrow(x.codes, 1, shift, cols);
    for (int64_t i = 0; i < lines; i++)
        for (int64_t p = 0; p < k; p++) x.values[i * k + p] = (double)v[along_k ? i * k + p : p * lines + i];
    return x;
}

static int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* The value of a code, by the definition of its format. */
static double code_value(te_dtype dtype, int code) {
    int mantissa = dtype == TE_F4E2M1 ? 1 : dtype == TE_F8E4M3 ? 3 : 2, bias = dtype == TE_F4E2M1 ? 1 : dtype == TE_F8E4M3 ? 7 : 15;
    int sign = dtype == TE_F4E2M1 ? 8 : 128, e = (code & (sign - 1)) >> mantissa, f = code & ((1 << mantissa) - 1);
    double x = e ? ldexp(f + (1 << mantissa), e - bias - mantissa) : ldexp(f, 1 - bias - mantissa);
    return code & sign ? -x : x;
}

/* Where te_op_mxfp8_quantize says that the scale of group `group` of line `line` lies. */
static int64_t scale_at(bool swizzled, bool along_k, int64_t lines, int64_t groups, int64_t line, int64_t group) {
    int64_t t = up(groups, 4);
    if (swizzled) return (line / 128 * (t / 4) + group / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + group % 4;
    return along_k ? line * t + group : group * up(lines, 128) + line;
}

/* Random codes and scales, and what they mean: values of about `magnitude`. All that no value needs is NaN: padding of codes and of scales. */
static operand scaled_operand(te_ctx *te, const gemm_case *c, te_scaling scaling, te_dtype dtype, int64_t lines, int64_t k, bool along_k, bool max_256,
                              double magnitude, uint64_t seed) {
    operand x = {NULL, NULL, NULL, test_doubles(lines * k + 1)};
    bool fp4 = dtype == TE_F4E2M1, blocks = scaling == TE_SCALING_BLOCK_1D || scaling == TE_SCALING_BLOCK_2D;
    int64_t rows = along_k ? lines : k, cols = along_k ? k : lines, ld = cols + c->pad, bytes = fp4 ? (ld + 1) / 2 : ld;
    int64_t size = blocks ? 128 : fp4 ? 16 : 32, groups = (k + size - 1) / size, scale_rows, scale_cols;
    uint8_t *codes = (uint8_t *)test_alloc((size_t)(rows * bytes + 1)), *small;
    float *normal = test_normal(rows * cols, seed), *factors, *amax = NULL;
    const uint8_t *rounded = NULL;
    int64_t *digits = fp4 ? test_integers(rows * cols + 1, seed, 0, 16) : NULL;
    for (int64_t i = 0; i < rows * cols; i++) normal[i] *= 64;
    if (!fp4) magnitude /= 64;
    if (!fp4) rounded = (const uint8_t *)test_read_bytes(te_tensor_from_f32(te, dtype, SHAPE(rows, cols), normal));
    memset(codes, 0x7f, (size_t)(rows * bytes));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            int code = fp4 ? (int)digits[i * cols + j] : rounded[i * cols + j];
            uint8_t *to = &codes[i * bytes + (fp4 ? j / 2 : j)];
            *to = (uint8_t)(!fp4 ? code : j % 2 ? (*to & 0x0f) | code << 4 : (*to & 0xf0) | code);
            x.values[along_k ? i * k + j : j * k + i] = code_value(dtype, code);
        }
    x.codes = te_tensor_from_host(te, dtype, SHAPE(rows, ld), codes);

    scale_rows = scaling == TE_SCALING_BLOCK_1D ? groups : scaling == TE_SCALING_BLOCK_2D ? (lines + 127) / 128 : along_k ? up(lines, 128) : up(groups, 4);
    scale_cols = scaling == TE_SCALING_BLOCK_1D ? up(lines, 4) : along_k ? up(groups, 4) : up(lines, 128);
    factors = test_floats(scale_rows * scale_cols + 1);
    small = (uint8_t *)test_alloc((size_t)(scale_rows * scale_cols + 1));
    memset(small, scaling == TE_SCALING_MXFP8 ? 0xff : 0x7f, (size_t)(scale_rows * scale_cols));
    for (int64_t i = 0; i < scale_rows * scale_cols; i++) factors[i] = NAN;
    if (scaling == TE_SCALING_NVFP4) x.amax = amaxes(te, c->rows_scaled ? lines : 1, seed + 50, magnitude, &amax);
    const float *random = test_uniform(lines * groups + 1, seed + 100, 0.3f, 1.7f);
    for (int64_t i = 0; i < lines; i++)
        for (int64_t g = 0; g < groups; g++) {
            double scale;
            if (blocks) {
                bool tall = scaling == TE_SCALING_BLOCK_2D;
                float f = (float)(magnitude * random[tall ? i / 128 * groups + g : i * groups + g]);
                factors[tall ? i / 128 * up(groups, 4) + g : g * up(lines, 4) + i] = f;
                scale = (double)f;
            } else if (scaling == TE_SCALING_MXFP8) {
                int e = (int)(127 + log2(magnitude) + 8 * (random[i * groups + g] - 1));
                small[scale_at(c->swizzled, along_k, lines, groups, i, g)] = (uint8_t)e;
                scale = ldexp(1, e - 127);
            } else {
                int code = 32 + (int)(80 * (random[i * groups + g] - 0.3f) / 1.4f);
                small[scale_at(c->swizzled, along_k, lines, groups, i, g)] = (uint8_t)code;
                scale = code_value(TE_F8E4M3, code) * (double)amax[c->rows_scaled ? i : 0] / (6.0 * (max_256 ? 256 : 448));
            }
            for (int64_t p = g * size; p < k && p < (g + 1) * size; p++) x.values[i * k + p] *= scale;
        }
    if (blocks)
        x.scale = test_tensor(te, TE_F32, SHAPE(scale_rows, scale_cols), factors);
    else
        x.scale = te_tensor_from_host(te, fp4 ? TE_F8E4M3 : TE_F8E8M0, SHAPE(scale_rows, scale_cols), small);
    return x;
}

/* ---- one product ----------------------------------------------------------------------------------------------------- */

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x))); }
static double dgelu(double x) {
    double t = tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x));
    return 0.5 * x * (1.0 - t * t) * 0.7978845608 * (1.0 + 3 * 0.044715 * x * x) + 0.5 * (1.0 + t);
}

/* The error of rounding to D, relative to the result: half a unit in the last place, and a little for the f32 before it. */
static double output_error(te_dtype d) { return d == TE_F32 ? 1e-6 : d == TE_BF16 ? 4.1e-3 : 5.2e-4; }
/* The error of the sums, relative to sum |a b|: rounding of f32 additions; on the GPU TF32 operands (each off by 2^-11 at most, so products
 * by 2^-10; in a short sum they need not cancel) and the 14 bits or so that Hopper's fp8 tensor cores keep between additions. */
static double sum_error(const gemm_case *c, bool cuda) {
    if (c->scaling_a == TE_SCALING_MXFP8 || c->scaling_a == TE_SCALING_NVFP4) return 3e-6; /* bf16 operands, exact */
    if (cuda && c->scaling_a != TE_SCALING_TENSOR) return 3e-4; /* sums of 128 k are promoted always */
    if (cuda && c->a == TE_F32) return 1e-3;
    if (cuda && (c->a == TE_F8E4M3 || c->a == TE_F8E5M2)) return c->split_accumulator ? 3e-4 : 1e-3;
    return 3e-6;
}

/* got [m, ld] against want [m, n], each element within its own bound. */
static void compare(const char *name, const float *got, int64_t ld, const double *want, const double *bound, int64_t m, int64_t n) {
    int64_t bad = 0, worst = 0;
    for (int64_t i = 0; i < m * n; i++) {
        double error = fabs((double)got[i / n * ld + i % n] - want[i]);
        if (error <= bound[i]) continue;
        if (!bad++) worst = i;
    }
    CHECK_MSG(bad == 0, "%s: %lld of %lld elements are off; first at (%lld, %lld): %g, not %g within %g", name, (long long)bad, (long long)(m * n),
              (long long)(worst / (n ? n : 1)), (long long)(worst % (n ? n : 1)), bad ? (double)got[worst / n * ld + worst % n] : 0.0,
              bad ? want[worst] : 0.0, bad ? bound[worst] : 0.0);
}

static void check_padding(const char *name, const float *got, const float *before, int64_t m, int64_t n, int64_t pad) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = n; j < n + pad; j++)
            if (got[i * (n + pad) + j] != before[i * (n + pad) + j]) {
                test_fail(__FILE__, __LINE__, "%s: padding at (%lld, %lld) was written", name, (long long)i, (long long)j);
                return;
            }
}

static void run_case(te_ctx *te, const gemm_case *c) {
    bool cuda = te_ctx_is_cuda(te);
    int64_t m = c->m, n = c->n, k = c->k, pad = c->pad;
    double magnitude = c->magnitude > 0 ? c->magnitude : 1;
    float *bias = test_rounded(c->bias ? c->bias : TE_F32, test_normal(n, 3), n);
    float *old = test_rounded(c->d, test_normal(m * n, 4), m * n), *aux = test_rounded(c->d, test_normal(m * n, 5), m * n);
    float scale_a = 0.37f, scale_b = 1.7f;
    double scale = c->scaled ? (double)(scale_a * scale_b) : 1.0, rounding = output_error(c->d), summing = sum_error(c, cuda);
    float *d_before = padded(old, m, n, pad, 7.0f), *aux_before = padded(aux, m, n, pad, 7.0f);
    te_op_gemm_args g = {0};
    name_case(c);
    operand a = c->scaling_a ? scaled_operand(te, c, c->scaling_a, c->a, m, k, !c->a_transposed, c->max_256_a, magnitude, 1)
                             : plain_operand(te, c->a, m, k, !c->a_transposed, pad, c->shift, 1);
    operand b = c->scaling_b ? scaled_operand(te, c, c->scaling_b, c->b, n, k, c->b_transposed, c->max_256_b, 1 / magnitude, 2)
                             : plain_operand(te, c->b, n, k, c->b_transposed, pad, c->shift, 2);
    g.a = a.codes, g.scale_a = a.scale, g.amax_a = a.amax;
    g.b = b.codes, g.scale_b = b.scale, g.amax_b = b.amax;
    g.scaling_a = c->scaling_a, g.scaling_b = c->scaling_b;
    g.swizzled_scales = c->swizzled, g.e4m3_max_256_a = c->max_256_a, g.e4m3_max_256_b = c->max_256_b;
    g.d = test_guarded_with(te, c->d, SHAPE(m, n + pad), d_before);
    if (c->bias) g.bias = test_tensor(te, c->bias, SHAPE(n), bias);
    if (c->epilogue) g.aux = test_guarded_with(te, c->d, SHAPE(m, n + pad), aux_before);
    if (c->scaled) {
        g.scale_a = test_tensor(te, TE_F32, SHAPE(1), &scale_a);
        g.scale_b = test_tensor(te, TE_F32, SHAPE(1), &scale_b);
    }
    g.m = m, g.n = n, g.k = k;
    g.a_transposed = c->a_transposed, g.b_transposed = c->b_transposed, g.accumulate = c->accumulate, g.split_accumulator = c->split_accumulator;
    g.epilogue = c->epilogue;
    if (c->bias_gradient) g.bias_gradient = test_guarded(te, c->bias ? c->bias : TE_F32, SHAPE(n));
    REQUIRE_OK(te);
    te_op_gemm(te, &g);
    REQUIRE_OK(te);

    double *want = test_doubles(m * n + n + 1), *bound = test_doubles(m * n + n + 1);
    double *pre = test_doubles(m * n + 1), *pre_bound = test_doubles(m * n + 1);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0, v;
            for (int64_t p = 0; p < k; p++) {
                double term = a.values[i * k + p] * b.values[j * k + p];
                sum += term;
                size += fabs(term);
            }
            v = scale * sum + (c->bias ? (double)bias[j] : 0.0);
            size = scale * size * summing;
            pre[i * n + j] = v;
            pre_bound[i * n + j] = fabs(v) * rounding + size + 1e-6;
            if (c->epilogue == TE_EPILOGUE_GELU) {
                v = gelu(v);
                size *= 1.2; /* the largest slope of GELU is 1.13 */
            } else if (c->epilogue == TE_EPILOGUE_DGELU) {
                v *= dgelu((double)aux[i * n + j]);
                size *= 1.2;
            }
            if (c->accumulate) v += (double)old[i * n + j];
            want[i * n + j] = v;
            bound[i * n + j] = (fabs(v) + (c->accumulate ? fabs((double)old[i * n + j]) : 0)) * rounding + size + 2e-6;
        }
    compare("D", test_read(g.d), n + pad, want, bound, m, n);
    check_padding("D", test_read(g.d), d_before, m, n, pad);
    if (c->epilogue == TE_EPILOGUE_GELU) compare("aux", test_read(g.aux), n + pad, pre, pre_bound, m, n);
    if (c->epilogue) check_padding("aux", test_read(g.aux), aux_before, m, n, pad);
    if (c->bias_gradient) { /* of what D holds, whatever it should hold; f32 sums in any order, and the gradient's own rounding */
        const float *d = test_read(g.d);
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < m; i++) sum += (double)d[i * n + j], size += fabs((double)d[i * n + j]);
            want[j] = sum;
            bound[j] = fabs(sum) * output_error(te_tensor_dtype(g.bias_gradient)) + size * 3e-6 + 1e-6;
        }
        compare("bias gradient", test_read(g.bias_gradient), n, want, bound, 1, n);
    }
}

static const te_dtype formats[][2] = {{TE_F32, TE_F32},         {TE_F16, TE_F16},         {TE_BF16, TE_BF16},
                                      {TE_F8E4M3, TE_F8E4M3}, {TE_F8E5M2, TE_F8E4M3}, {TE_F8E4M3, TE_F8E5M2}};
static const te_dtype outputs[] = {TE_F32, TE_BF16, TE_F16};

/* One case of each format and layout for each shape; the other choices go round. */
TE_TEST_DEVICES(gemm_formats) {
    static const int64_t shapes[][4] = {{1, 1, 1, 0}, {16, 16, 16, 0}, {17, 33, 129, 1}, {96, 128, 64, 16}, {100, 136, 264, 8}, {131, 257, 72, 0}, {3, 300, 40, 5}};
    int turn = 0;
    for (int s = 0; s < COUNT(shapes); s++)
        for (int f = 0; f < COUNT(formats); f++)
            for (int layout = 0; layout < 4; layout++) {
                gemm_case c = {0};
                c.m = shapes[s][0], c.n = shapes[s][1], c.k = shapes[s][2], c.pad = shapes[s][3];
                c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[turn % 3];
                c.a_transposed = layout & 1, c.b_transposed = !(layout & 2);
                if (f >= 3 && layout) continue; /* fp8 operands run along k */
                c.bias = turn % 2 ? outputs[turn / 2 % 3] : TE_DTYPE_NONE;
                c.accumulate = turn % 5 == 1;
                c.split_accumulator = turn % 2;
                c.scaled = turn % 3 == 0;
                if (turn++ % test_every_odd(3) == 0) run_case(te, &c);
            }
}

TE_TEST_DEVICES(gemm_epilogues) {
    for (int e = TE_EPILOGUE_NONE; e <= TE_EPILOGUE_DGELU; e++)
        for (int d = 0; d < COUNT(outputs); d++)
            for (int turn = 0; turn < 4; turn++) {
                gemm_case c = {0};
                c.m = 70, c.n = turn & 1 ? 83 : 136, c.k = 96, c.pad = turn & 1 ? 0 : 8;
                c.a = c.b = turn & 1 ? TE_BF16 : TE_F8E4M3;
                c.d = outputs[d];
                c.b_transposed = true;
                c.bias = turn & 2 ? outputs[(d + turn) % 3] : TE_DTYPE_NONE;
                c.accumulate = turn >= 2;
                c.scaled = true;
                c.epilogue = (te_epilogue)e;
                run_case(te, &c);
            }
}

TE_TEST_DEVICES(gemm_bias_gradient) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {70, 136, 96}, {129, 264, 200}, {300, 1000, 64}, {64, 64, 0}, {0, 9, 8}};
    gemm_case tall = {0}; /* more sums of rows than one block of column_sum adds up */
    tall.m = 16401, tall.n = 16, tall.k = 16;
    tall.a = tall.b = tall.d = TE_BF16;
    tall.epilogue = TE_EPILOGUE_DGELU;
    tall.bias_gradient = true;
    run_case(te, &tall);
    for (int s = 0; s < COUNT(shapes); s++)
        for (int f = 0; f < COUNT(formats); f++) {
            gemm_case c = {0};
            if ((s * COUNT(formats) + f) % test_every_of(5, 2)) continue;
            c.m = shapes[s][0], c.n = shapes[s][1], c.k = shapes[s][2];
            c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[(s + f) % 3];
            c.b_transposed = te_dtype_bits(c.a) == 8 || (s + f) % 2;
            c.epilogue = (te_epilogue)((s + f) % 3);
            c.bias = f % 2 ? TE_BF16 : TE_DTYPE_NONE;
            c.bias_gradient = true;
            run_case(te, &c);
        }
}

/* A few lines by many, either way round: each length of k around what a warp, a lane and a word take, whatever rows start at. */
TE_TEST_DEVICES(gemm_few) {
    static const int64_t many[] = {1, 15, 16, 37, 200}, lengths[] = {1, 7, 8, 63, 64, 128, 129, 500, 1030, 2048, 2056};
    gemm_case wide;
    int turn = 0;
    for (int few = 1; few <= 16; few += 1 + few / 8)
        for (int i = 0; i < COUNT(many); i++)
            for (int k = 0; k < COUNT(lengths); k++, turn++) {
                gemm_case c = {0};
                int f = 1 + (turn + few) % 5;
                if (turn % (test_every_of(29, 8) | 1)) continue; /* 29 and 17 share no factor with 2, 3, 5, 7, 11 and 13, in which all of it goes round */
                c.m = turn & 1 ? few : many[i], c.n = turn & 1 ? many[i] : few, c.k = lengths[k];
                c.pad = turn % 7 < 3 ? 0 : turn % 7 < 5 ? 5 : 16;
                c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[turn / 2 % 3];
                c.b_transposed = true;
                c.bias = turn / 3 & 1 ? outputs[turn % 3] : TE_DTYPE_NONE;
                c.bias_gradient = turn % 13 == 0 && !c.pad;
                c.accumulate = turn % 4 == 3 && !c.bias_gradient;
                c.epilogue = (te_epilogue)(turn / 5 % 3);
                c.scaled = turn % 3 == 0;
                c.split_accumulator = true;
                run_case(te, &c);
            }
    memset(&wide, 0, sizeof wide);
    wide.m = 3, wide.k = 264;
    wide.a = wide.b = wide.d = TE_BF16;
    wide.b_transposed = true;
    for (wide.n = 9000; wide.n <= 14000; wide.n += 5000 * test_every_sanitized(1)) run_case(te, &wide); /* the second one is gemm_hopper's */
}

/* Products with one short dimension and an MN-major long operand (gemv_mn), either operand short: ends within what a lane and a block take, each length of k around a warp's
 * turns and of splits, rows that start anywhere. Lengths are 13, so that each meets all choices, which go round in 2, 3, 5 and 7. The CPU has one way for
 * all products, and takes every eleventh, or with a sanitizer every 31st. */
TE_TEST_DEVICES(gemm_few_down) {
    static const int64_t many[] = {64, 65, 91, 200, 333}, lengths[] = {1, 2, 15, 16, 17, 63, 64, 129, 257, 500, 1030, 2056, 4100};
    int turn = 0, every = te_ctx_is_cuda(te) ? 1 : test_samples() ? 31 : 11;
    for (int few = 1; few <= 8; few++)
        for (int i = 0; i < COUNT(many); i++)
            for (int k = 0; k < COUNT(lengths); k++, turn++) {
                gemm_case c = {0};
                if (turn % every) continue;
                c.m = turn & 1 ? few : many[i], c.n = turn & 1 ? many[i] : few, c.k = lengths[k];
                c.pad = turn % 7 < 2 ? 0 : turn % 7;
                c.shift = turn / 5 % (c.pad + 1);
                c.a = formats[1 + turn / 3 % 2][0], c.b = c.a, c.d = outputs[turn / 2 % 3];
                c.a_transposed = turn & 1 ? turn / 7 & 1 : 1;
                c.b_transposed = turn & 1 ? 0 : turn / 7 & 1;
                c.bias = turn / 3 & 1 ? outputs[turn % 3] : TE_DTYPE_NONE;
                c.bias_gradient = turn % 11 == 0 && !c.pad;
                c.accumulate = turn / 2 % 4 == 3 && !c.bias_gradient;
                c.epilogue = (te_epilogue)(turn / 5 % 3);
                c.scaled = turn % 3 == 0;
                run_case(te, &c);
            }
    for (turn = 0; turn < 12; turn++) { /* so many that a GPU's lanes take eight lines each */
        static const int64_t ends[] = {100, 128, 150, 256, 300};
        gemm_case wide = {0};
        if (turn % (every == 1 ? 1 : 11)) continue;
        wide.m = turn & 1 ? 8603 : 3, wide.n = turn & 1 ? 3 : 8600, wide.k = ends[turn % 5];
        wide.pad = turn % 3 ? 0 : 5, wide.shift = wide.pad ? turn / 3 : 0;
        wide.a = wide.b = turn / 2 & 1 ? TE_F16 : TE_BF16, wide.d = TE_BF16;
        wide.a_transposed = turn & 1;
        run_case(te, &wide);
    }
}

/* Small D and long k: what a GPU splits over blocks. */
TE_TEST_DEVICES(gemm_long_k) {
    for (int f = 0; f < COUNT(formats); f++) {
        gemm_case c = {0};
        c.m = 20 + f, c.n = 24, c.k = 4096 + 40 * f, c.pad = f & 1 ? 0 : 16;
        c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[f % 3];
        c.a_transposed = f < 3 && f != 1;
        c.b_transposed = f >= 3;
        c.bias = f & 1 ? TE_F32 : TE_DTYPE_NONE;
        c.accumulate = true;
        c.split_accumulator = true;
        run_case(te, &c);
    }
}

/* More tiles than a GPU has multiprocessors. */
TE_TEST_DEVICES(gemm_many_tiles) {
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's schedule; the CPU has none");
    for (int f = 0; f < 4; f++) {
        gemm_case c = {0};
        c.m = 1400, c.n = 1304, c.k = 200, c.pad = 8;
        c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[f % 3];
        c.b_transposed = f != 2;
        c.a_transposed = f == 2;
        run_case(te, &c);
    }
}

/* Rows of D that start or end within 16 bytes, where TMA cannot store them, with every part of the epilogue. */
TE_TEST_DEVICES(gemm_unaligned_rows) {
    static const int64_t shapes[][4] = {{512, 641, 96, 0}, {1024, 65, 64, 0}, {1000, 323, 72, 1}, {510, 127, 128, 3}, {504, 200, 80, 2}, {257, 260, 64, 0}, {2048, 1301, 40, 0}, {300, 75, 200, 5}};
    const int turns = te_ctx_is_cuda(te) ? 5 * COUNT(shapes) : test_samples() ? 5 : COUNT(shapes); /* five have each format once */
    for (int turn = 0; turn < turns; turn++) {
        gemm_case c = {0};
        int s = turn % COUNT(shapes), f = 1 + turn % 5;
        c.m = shapes[s][0], c.n = shapes[s][1], c.k = shapes[s][2], c.pad = shapes[s][3];
        c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[turn / 2 % 3];
        c.b_transposed = true;
        c.bias = turn / 3 % 2 ? outputs[turn % 3] : TE_DTYPE_NONE;
        c.accumulate = turn % 4 == 1;
        c.bias_gradient = turn % 7 == 3 && !c.pad && !c.accumulate;
        c.split_accumulator = turn / 5 % 2;
        c.scaled = turn % 3 == 0;
        run_case(te, &c);
    }
}

TE_TEST_DEVICES(gemm_empty) {
    static const int64_t shapes[][3] = {{0, 5, 3}, {5, 0, 3}, {5, 7, 0}, {0, 0, 0}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int turn = 0; turn < 4; turn++) {
            gemm_case c = {0};
            c.m = shapes[s][0], c.n = shapes[s][1], c.k = shapes[s][2];
            c.a = c.b = c.d = TE_BF16;
            c.bias = turn & 1 ? TE_BF16 : TE_DTYPE_NONE;
            c.accumulate = turn >= 2;
            c.b_transposed = turn & 1;
            run_case(te, &c);
        }
}

/* Row i of A is code i and zeros, B is the identity: D has the value of every code, NaN and infinity included, in all formats of D. */
TE_TEST_DEVICES(gemm_fp8_codes) {
    static const te_dtype kinds[] = {TE_F8E4M3, TE_F8E5M2};
    for (int f = 0; f < 2; f++)
        for (int turn = 0; turn < 4; turn++) {
            const int n = turn < 2 ? 16 : 40; /* a few lines, and more: zeros behind the identity */
            uint8_t *codes = (uint8_t *)test_alloc(256 * 16);
            float *identity = test_floats(n * 16), *want = test_floats(256 * n), value[256];
            te_op_gemm_args g = {0};
            test_case("%s n=%d split=%d", te_dtype_name(kinds[f]), n, turn % 2);
            for (int i = 0; i < 256; i++) codes[16 * i + i % 16] = (uint8_t)i;
            for (int i = 0; i < 16; i++) identity[17 * i] = 1.0f;
            te_tensor *a = te_tensor_from_host(te, kinds[f], SHAPE(256, 16), codes);
            const float *decoded = test_read(a);
            for (int i = 0; i < 256; i++) value[i] = decoded[16 * i + i % 16];
            for (int i = 0; i < 256; i++) /* 0 times NaN or infinity is NaN: it fills the row but for its own place */
                for (int j = 0; j < n; j++) want[n * i + j] = j == i % 16 ? value[i] : isfinite(value[i]) ? 0.0f : NAN;
            g.a = a;
            g.b = test_tensor(te, TE_F8E4M3, SHAPE(n, 16), identity);
            g.d = test_guarded(te, TE_F32, SHAPE(256, n));
            g.m = 256, g.n = n, g.k = 16;
            g.b_transposed = true;
            g.split_accumulator = turn % 2;
            te_op_gemm(te, &g);
            CHECK_OK(te);
            CHECK_CLOSE("D", test_read(g.d), want, 256 * n, 0, 0);
        }
}

/* Views that are matrices with contiguous rows: a range of columns, merged leading dimensions. */
TE_TEST_DEVICES(gemm_views) {
    enum { B = 3, S = 5, H = 24, N = 10 };
    float *x = test_rounded(TE_BF16, test_normal(B * S * 3 * H, 1), B * S * 3 * H), *w = test_rounded(TE_BF16, test_normal(N * H, 2), N * H);
    double want[B * S * N], bound[B * S * N];
    te_op_gemm_args g = {0};
    g.a = te_tensor_narrow(test_tensor(te, TE_BF16, SHAPE(B, S, 3 * H), x), 2, H, H);
    g.b = test_tensor(te, TE_BF16, SHAPE(N, H), w);
    te_tensor *whole = test_guarded_with(te, TE_F32, SHAPE(B, S, 2 * N), test_normal(B * S * 2 * N, 3));
    float *before = test_read(whole);
    g.d = te_tensor_narrow(whole, 2, N, N);
    g.m = B * S, g.n = N, g.k = H;
    g.b_transposed = true;
    REQUIRE_OK(te);
    te_op_gemm(te, &g);
    REQUIRE_OK(te);
    for (int i = 0; i < B * S; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0, size = 0;
            for (int p = 0; p < H; p++) {
                double term = (double)x[i * 3 * H + H + p] * (double)w[j * H + p];
                sum += term;
                size += fabs(term);
            }
            want[i * N + j] = sum;
            bound[i * N + j] = 1e-6 * size + 1e-6;
        }
    compare("D", test_read(whole) + N, 2 * N, want, bound, B * S, N);
    for (int i = 0; i < B * S; i++) CHECK_BYTES("left of D", test_read(whole) + i * 2 * N, before + i * 2 * N, N * sizeof(float));
}

/* D that begins at any element, in rows of any length: nothing beside it is written, and its bits are those of an aligned one, GELU's but for the last. aux begins elsewhere. */
TE_TEST_DEVICES(gemm_d_anywhere) {
    static const int64_t sizes[][2] = {{300, 301}, {70, 129}, {129, 19}, {129, 7}, {65, 264}, {16, 1}};
    int turn = 0;
    for (int i = 0; i < COUNT(sizes); i++)
        for (int shift = 1; shift < 9; shift += 3)
            for (int f = 0; f < 3; f++) {
                if (turn++ % test_every_odd(3)) continue;
                const int64_t m = sizes[i][0], n = sizes[i][1], k = 96, ld = n + shift + i % 3;
                te_dtype dtype = f == 0 ? TE_BF16 : f == 1 ? TE_F16 : TE_F32;
                te_tensor *whole = test_guarded_with(te, dtype, SHAPE(m, ld), test_normal(m * ld, 3)), *plain = test_guarded_with(te, dtype, SHAPE(m, up(n, 64)), test_normal(m * up(n, 64), 5));
                te_tensor *aux = test_guarded_with(te, dtype, SHAPE(m, ld + 1), test_normal(m * (ld + 1), 6)), *plain_aux = test_guarded_with(te, dtype, SHAPE(m, n), test_normal(m * n, 7));
                float *before = test_read(whole), *plain_before = test_read(plain), *aux_before = test_read(aux);
                te_op_gemm_args g = {0};
                g.a = test_tensor(te, TE_BF16, SHAPE(m, k), test_normal(m * k, 1));
                g.b = test_tensor(te, TE_BF16, SHAPE(n, k), test_normal(n * k, 2));
                g.bias = i % 2 ? test_tensor(te, dtype, SHAPE(n), test_normal(n, 4)) : NULL;
                g.m = m, g.n = n, g.k = k;
                g.b_transposed = true;
                g.epilogue = (i + shift / 3) % 2 ? TE_EPILOGUE_GELU : TE_EPILOGUE_NONE;
                test_case("%lld x %lld, from element %d on, rows of %lld, %s, epilogue %d", (long long)m, (long long)n, shift, (long long)ld, te_dtype_name(dtype), (int)g.epilogue);
                g.d = te_tensor_narrow(plain, 1, 0, n);
                g.aux = g.epilogue ? plain_aux : NULL;
                te_op_gemm(te, &g);
                g.d = te_tensor_narrow(whole, 1, shift, n);
                g.aux = g.epilogue ? te_tensor_narrow(aux, 1, shift - 1, n) : NULL;
                te_op_gemm(te, &g);
                REQUIRE_OK(te);
                float *got = test_read(whole), *want = test_read(plain), *got_aux = test_read(aux), *want_aux = test_read(plain_aux);
                for (int64_t r = 0; r < m && g.aux; r++) {
                    CHECK_BYTES("left of aux", got_aux + r * (ld + 1), aux_before + r * (ld + 1), (size_t)(shift - 1) * sizeof(float));
                    CHECK_BYTES("aux", got_aux + r * (ld + 1) + shift - 1, want_aux + r * n, (size_t)n * sizeof(float));
                    CHECK_BYTES("right of aux", got_aux + r * (ld + 1) + shift - 1 + n, aux_before + r * (ld + 1) + shift - 1 + n, (size_t)(ld + 2 - shift - n) * sizeof(float));
                }
                for (int64_t r = 0; r < m; r++) {
                    CHECK_BYTES("left of D", got + r * ld, before + r * ld, (size_t)shift * sizeof(float));
                    if (g.epilogue == TE_EPILOGUE_NONE) CHECK_BYTES("D", got + r * ld + shift, want + r * up(n, 64), (size_t)n * sizeof(float));
                    /* one rounding of D's format: TMA's epilogue has one reciprocal for two exponentials, which differs in the last bits of f32 */
                    else CHECK_CLOSE("D", got + r * ld + shift, want + r * up(n, 64), n, dtype == TE_BF16 ? 1.0 / 128 : dtype == TE_F16 ? 1.0 / 1024 : 1e-5, 1e-6);
                    CHECK_BYTES("right of D", got + r * ld + shift + n, before + r * ld + shift + n, (size_t)(ld - shift - n) * sizeof(float));
                    CHECK_BYTES("right of the aligned one", want + r * up(n, 64) + n, plain_before + r * up(n, 64) + n, (size_t)(up(n, 64) - n) * sizeof(float));
                }
            }
}

/* Rows of D and aux at multiples of 64 bytes that end anywhere: TMA would write on to the next multiple of 16. */
TE_TEST_DEVICES(gemm_d_beside) {
    static const int64_t widths[] = {18, 20, 150, 301};
    int turn = 0;
    for (int w = 0; w < COUNT(widths); w++)
        for (int e = TE_EPILOGUE_NONE; e <= TE_EPILOGUE_DGELU; e++)
            for (int d = 0; d < COUNT(outputs); d++, turn++) {
                gemm_case c = {0};
                if (turn % test_every_odd(5)) continue;
                c.m = turn & 1 ? 70 : 140, c.n = widths[w], c.k = c.n + (turn % 5 ? 128 : 2496), c.pad = up(c.n, 32) - c.n;
                c.a = c.b = turn & 1 ? TE_BF16 : TE_F8E4M3;
                c.d = outputs[d];
                c.b_transposed = true;
                c.bias = turn & 2 ? outputs[(d + turn) % 3] : TE_DTYPE_NONE;
                c.accumulate = turn % 3 == turn / 9 % 3;
                c.split_accumulator = turn & 4;
                c.epilogue = (te_epilogue)e;
                run_case(te, &c);
            }
}

/* Rows that start in the middle of a sector of the GPU's L2 cache are read by tiles in clusters, which may be others than those of rows that do not; the
 * bits are the same. */
TE_TEST_DEVICES(gemm_off_sectors) {
    enum { M = 3000, N = 2960, K = 1096 };
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's tiles; the CPU has none");
    te_tensor *d[2];
    te_op_gemm_args g = {0};
    g.m = M, g.n = N, g.k = K;
    g.b_transposed = true;
    te_tensor *a = te_tensor_normal(te, TE_BF16, 2, (const int64_t[]){M, K + 8}, 0, 1), *b = te_tensor_normal(te, TE_BF16, 2, (const int64_t[]){N, K + 8}, 0, 1);
    for (int i = 0; i < 2; i++) {
        g.a = te_tensor_narrow(a, 1, 0, K), g.b = te_tensor_narrow(b, 1, 0, K);
        if (i) g.a = te_tensor_contiguous((te_tensor *)g.a), g.b = te_tensor_contiguous((te_tensor *)g.b);
        g.d = d[i] = te_tensor_zeros(te, TE_BF16, SHAPE(M, N));
        te_op_gemm(te, &g);
    }
    REQUIRE_OK(te);
    CHECK_BYTES("D", test_read(d[1]), test_read(d[0]), (size_t)M * N * sizeof(float));
}

/* Neither a second run nor the number of threads changes a bit. */
TE_TEST_DEVICES(gemm_same_bits) {
    enum { M = 205, N = 139, K = 1500 };
    float *a = test_normal(M * K, 1), *b = test_normal(K * N, 2);
    void *first = NULL;
    for (int run = 0; run < 4; run++) {
        te_ctx *own = test_context_threads(te_ctx_device(te), run ? 2 * run - 1 : 1);
        te_op_gemm_args g = {0};
        REQUIRE(own);
        g.a = test_tensor(own, TE_BF16, SHAPE(M, K), a);
        g.b = test_tensor(own, TE_BF16, SHAPE(K, N), b);
        g.d = test_guarded(own, TE_F32, SHAPE(M, N));
        g.m = M, g.n = N, g.k = K;
        te_op_gemm(own, &g);
        REQUIRE_OK(own);
        void *bytes = test_read_bytes(g.d);
        if (first)
            CHECK_BYTES("D", bytes, first, M * N * sizeof(float));
        else
            first = bytes;
    }
}

/* ---- scalings ---------------------------------------------------------------------------------------------------------- */

static const te_scaling scalings[][2] = {{TE_SCALING_BLOCK_1D, TE_SCALING_BLOCK_1D}, {TE_SCALING_BLOCK_1D, TE_SCALING_BLOCK_2D},
                                         {TE_SCALING_BLOCK_2D, TE_SCALING_BLOCK_1D}, {TE_SCALING_MXFP8, TE_SCALING_MXFP8},
                                         {TE_SCALING_NVFP4, TE_SCALING_NVFP4}};

/* Formats and flags go round with `turn`. */
static gemm_case scaled_case(int64_t m, int64_t n, int64_t k, int scaling, int turn) {
    gemm_case c = {0};
    c.m = m, c.n = n, c.k = k;
    c.scaling_a = scalings[scaling][0], c.scaling_b = scalings[scaling][1];
    c.a = c.scaling_a == TE_SCALING_NVFP4 ? TE_F4E2M1 : turn % 3 == 1 ? TE_F8E5M2 : TE_F8E4M3;
    c.b = c.scaling_a == TE_SCALING_NVFP4 ? TE_F4E2M1 : turn % 3 == 2 ? TE_F8E5M2 : TE_F8E4M3;
    c.d = outputs[turn % 3];
    c.b_transposed = true;
    c.swizzled = c.scaling_a >= TE_SCALING_MXFP8 && turn % 2;
    if (c.scaling_a == TE_SCALING_NVFP4) {
        c.rows_scaled = turn % 4 >= 2;
        c.max_256_a = turn % 5 == 1;
        c.max_256_b = turn % 5 == 2;
    }
    c.split_accumulator = turn & 1;
    return c;
}

/* Every legal pair at every shape; MXFP8 in its four layouts. */
TE_TEST_DEVICES(gemm_scalings) {
    static const int64_t shapes[][4] = {{1, 1, 1, 0}, {3, 5, 7, 0}, {127, 129, 130, 0}, {128, 128, 128, 0}, {200, 72, 300, 4}, {33, 260, 528, 16}};
    int turn = 0;
    for (int s = 0; s < COUNT(shapes); s++)
        for (int f = 0; f < COUNT(scalings); f++)
            for (int layout = 0; layout < (scalings[f][0] == TE_SCALING_MXFP8 ? 4 : 1); layout++, turn++) {
                if (turn % test_every_odd(2)) continue;
                gemm_case c = scaled_case(shapes[s][0], shapes[s][1], shapes[s][2], f, turn);
                c.pad = shapes[s][3];
                c.a_transposed = layout & 1, c.b_transposed = !(layout & 2);
                c.bias = turn % 2 ? outputs[turn / 2 % 3] : TE_DTYPE_NONE;
                c.accumulate = turn % 4 == 1;
                c.magnitude = turn % 3 == 0 ? 1e-20 : turn % 3 == 1 ? 1 : 1e18;
                run_case(te, &c);
            }
}

TE_TEST_DEVICES(gemm_scaled_few) {
    static const int64_t many[] = {9, 150}, lengths[] = {1, 127, 128, 129, 272, 520, 2080, 2300};
    int turn = 0;
    for (int f = 0; f < COUNT(scalings); f++)
        for (int few = 1; few <= 16; few += 2 + few % 3)
            for (int i = 0; i < COUNT(many); i++)
                for (int k = 0; k < COUNT(lengths); k++, turn++) {
                    gemm_case c = (turn / 8 + turn) & 1 ? scaled_case(few, many[i], lengths[k], f, turn) : scaled_case(many[i], few, lengths[k], f, turn);
                    if (turn % test_every_odd(8)) continue;
                    c.a_transposed = false, c.b_transposed = true;
                    c.pad = turn % 5 == 2 ? 6 : turn % 5 == 4 ? 32 : 0;
                    c.swizzled = c.scaling_a >= TE_SCALING_MXFP8 && turn / 3 & 1;
                    run_case(te, &c);
                }
    for (turn = 0; turn < 12; turn += test_every_odd(2)) { /* an MN-major long operand, which of the codes MXFP8's alone may have */
        int64_t k = lengths[turn % COUNT(lengths)], few = 1 + turn % 8;
        gemm_case c = turn & 1 ? scaled_case(few, 150, k, 3, turn) : scaled_case(150, few, k, 3, turn);
        c.a_transposed = !(turn & 1), c.b_transposed = false;
        c.pad = turn % 3 ? 0 : 6;
        run_case(te, &c);
    }
}

/* MXFP8 and NVFP4 of up to 32 rows: MXFP8 of more than four, whose lanes exchange halves of their pieces; one product of eight lines up to four; the short operand in registers and, of very
 * many lines, in shared memory; the end of k within each of the four groups of a turn of MXFP8. A short run of what gemm_scaled_few has among other scalings. */
TE_TEST_DEVICES(gemm_scaled_rows) {
    static const int64_t rows[] = {4, 5, 8, 9, 16, 17, 24, 32, 33}, lengths[] = {1040, 1088, 1111, 1135};
    for (int nvfp4 = 0; nvfp4 < 2; nvfp4++)
        for (int i = 0; i < COUNT(rows); i++)
            for (int j = 0; j < 4 + (te_ctx_is_cuda(te) && rows[i] <= 16); j++) {
                gemm_case c = {0};
                c.m = rows[i], c.n = j == 4 ? 22001 : 37, c.k = j == 4 ? 80 : lengths[j];
                c.a = c.b = nvfp4 ? TE_F4E2M1 : TE_F8E4M3, c.d = TE_F32;
                c.scaling_a = c.scaling_b = nvfp4 ? TE_SCALING_NVFP4 : TE_SCALING_MXFP8;
                c.b_transposed = true;
                c.swizzled = j % 2;
                c.pad = up(c.k, 32) - c.k; /* rows start at multiples of 16 bytes */
                run_case(te, &c);
            }
}

TE_TEST_DEVICES(gemm_scaled_epilogues) {
    int turn = 0;
    for (int f = 0; f < COUNT(scalings); f++)
        for (int e = TE_EPILOGUE_NONE; e <= TE_EPILOGUE_DGELU; e++)
            for (int k = 96; k <= 256; k += 160, turn++) {
                if (turn % test_every_odd(3)) continue;
                gemm_case c = scaled_case(70, turn & 1 ? 83 : 136, k, f, turn);
                c.pad = turn & 1 ? 0 : 8;
                c.bias = turn & 2 ? outputs[turn % 3] : TE_DTYPE_NONE;
                c.accumulate = turn & 1;
                c.epilogue = (te_epilogue)e;
                run_case(te, &c);
            }
}

/* Small D and long k, more tiles than multiprocessors: what a GPU does differently. */
TE_TEST_DEVICES(gemm_scaled_long_k) {
    for (int f = 0; f < COUNT(scalings); f++) {
        gemm_case c = scaled_case(20 + f, 24, 2500 + 44 * f, f, f + 1);
        c.pad = f & 1 ? 0 : 4;
        c.bias = f & 1 ? TE_F32 : TE_DTYPE_NONE;
        c.accumulate = true;
        run_case(te, &c);
    }
}
TE_TEST_DEVICES(gemm_scaled_many_tiles) {
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's schedule; the CPU has none");
    for (int f = 0; f < COUNT(scalings); f++) {
        gemm_case c = scaled_case(1400, 1296, 144, f, f);
        c.pad = 16;
        run_case(te, &c);
    }
}

/* k of 0: D is the bias. Empty D: nothing. */
TE_TEST_DEVICES(gemm_scaled_empty) {
    for (int f = 0; f < COUNT(scalings); f++)
        for (int turn = 0; turn < 3; turn++) {
            gemm_case c = scaled_case(turn == 1 ? 0 : 5, turn == 2 ? 0 : 7, turn ? 9 : 0, f, turn);
            c.bias = TE_BF16;
            c.accumulate = f & 1;
            run_case(te, &c);
        }
}

/* Every code times every kind of scale, NaN and infinity included: row i of A is code i and zeros, B is the identity. Products of codes and
 * powers of two are exact to the last bit of bf16's subnormal numbers, 2^-133, which the GPU's operands have. */
TE_TEST_DEVICES(gemm_scaled_codes) {
    static const te_dtype kinds[] = {TE_F8E4M3, TE_F8E5M2, TE_F4E2M1};
    static const uint8_t exponents[] = {0, 1, 12, 100, 127, 140, 231, 255}, block_codes[] = {0, 1, 7, 8, 56, 120, 126, 127};
    for (int f = 0; f < 3; f++)
        for (int s = 0; s < 8; s++) {
            bool fp4 = kinds[f] == TE_F4E2M1;
            int rows = fp4 ? 32 : 256, k = 32;
            uint8_t *codes = (uint8_t *)test_alloc(256 * 32), *unit = (uint8_t *)test_alloc(32 * 32), *scale = (uint8_t *)test_alloc(256 * 4);
            uint8_t *unit_scale = (uint8_t *)test_alloc(128 * 4);
            float *want = (float *)test_alloc(256 * 32 * sizeof(float)), one = fp4 ? 2688.0f : 1.0f;
            te_op_gemm_args g = {0};
            test_case("%s, scale %d", te_dtype_name(kinds[f]), fp4 ? block_codes[s] : exponents[s]);
            memset(scale, fp4 ? block_codes[s] : exponents[s], 256 * 4);
            memset(unit_scale, fp4 ? 56 : 127, 128 * 4); /* 1 */
            for (int i = 0; i < rows; i++) {
                double code = code_value(kinds[f], fp4 ? i % 16 : i), factor = fp4 ? code_value(TE_F8E4M3, block_codes[s]) : ldexp(1, exponents[s] - 127);
                if (!fp4 && ((kinds[f] == TE_F8E4M3 && (i & 127) == 127) || (kinds[f] == TE_F8E5M2 && (i & 127) > 124))) code = NAN;
                if (kinds[f] == TE_F8E5M2 && (i & 127) == 124) code = i & 128 ? -INFINITY : INFINITY;
                if (fp4 ? block_codes[s] == 127 : exponents[s] == 255) factor = NAN;
                codes[fp4 ? i * 16 + i / 2 : i * 32 + i % 32] = (uint8_t)(!fp4 ? i : i % 2 ? i << 4 : i % 16);
                double value = code * factor;
                if (!fp4) value = isfinite(value) ? rint(value * 0x1p133) * 0x1p-133 : value;
                bool spread = !isfinite(code) || !isfinite(factor); /* 0 times NaN or infinity is NaN: it fills the row */
                for (int j = 0; j < 32; j++) want[i * 32 + j] = j == i % 32 ? (float)value : spread ? NAN : 0;
            }
            for (int i = 0; i < 32; i++) {
                if (fp4) unit[i * 16 + i / 2] = (uint8_t)(i % 2 ? 0x20 : 0x02);
                else unit[i * 32 + i] = 0x38;
            }
            te_tensor *d = test_guarded(te, TE_F32, SHAPE(rows, 32));
            g.b = te_tensor_from_host(te, fp4 ? TE_F4E2M1 : TE_F8E4M3, SHAPE(32, k), unit);
            g.scale_b = te_tensor_from_host(te, fp4 ? TE_F8E4M3 : TE_F8E8M0, SHAPE(128, 4), unit_scale);
            g.scaling_a = g.scaling_b = fp4 ? TE_SCALING_NVFP4 : TE_SCALING_MXFP8;
            if (fp4) g.amax_a = g.amax_b = te_tensor_full(te, TE_F32, SHAPE(1), (double)one);
            g.n = 32, g.k = k;
            g.b_transposed = true;
            for (int few = 0; few < 2; few++) { /* a few lines at a time, and all at once */
                g.m = few ? 16 : rows;
                g.scale_a = te_tensor_from_host(te, fp4 ? TE_F8E4M3 : TE_F8E8M0, SHAPE(up(g.m, 128), 4), scale); /* all alike */
                te_tensor_fill(d, 7);
                for (int first = 0; first < rows; first += (int)g.m) {
                    g.a = te_tensor_from_host(te, kinds[f], SHAPE(g.m, k), codes + first * (fp4 ? 16 : 32)), g.d = te_tensor_narrow(d, 0, first, g.m);
                    te_op_gemm(te, &g);
                }
                REQUIRE_OK(te);
                CHECK_CLOSE("D", test_read(d), want, rows * 32, 2.4e-7, 0x1p-134); /* the factors' roundings; f32 has what bf16 has not */
            }
        }
}

/* ---- plans ------------------------------------------------------------------------------------------------------------- */

static te_explanation plan_of(te_ctx *te, int scaling, int64_t k, const char *device) {
    te_scaling sa = scalings[scaling][0], sb = scalings[scaling][1];
    te_dtype codes = sa == TE_SCALING_NVFP4 ? TE_F4E2M1 : TE_F8E4M3, scales = sa == TE_SCALING_NVFP4 ? TE_F8E4M3 : sa == TE_SCALING_MXFP8 ? TE_F8E8M0 : TE_F32;
    int64_t blocks = (k + 127) / 128, groups = up((k + (codes == TE_F4E2M1 ? 15 : 31)) / (codes == TE_F4E2M1 ? 16 : 32), 4);
    te_explanation e;
    te_op_gemm_args g = {0};
    g.a = te_tensor_describe(te, codes, SHAPE(512, k));
    g.b = te_tensor_describe(te, codes, SHAPE(1024, k));
    g.d = te_tensor_describe(te, TE_BF16, SHAPE(512, 1024));
    g.m = 512, g.n = 1024, g.k = k;
    g.b_transposed = true;
    g.scaling_a = sa, g.scaling_b = sb;
    if (scaling < 3) {
        g.scale_a = sa == TE_SCALING_BLOCK_1D ? te_tensor_describe(te, scales, SHAPE(blocks, 512)) : te_tensor_describe(te, scales, SHAPE(4, up(blocks, 4)));
        g.scale_b = sb == TE_SCALING_BLOCK_1D ? te_tensor_describe(te, scales, SHAPE(blocks, 1024)) : te_tensor_describe(te, scales, SHAPE(8, up(blocks, 4)));
    } else {
        g.scale_a = te_tensor_describe(te, scales, SHAPE(512, groups));
        g.scale_b = te_tensor_describe(te, scales, SHAPE(1024, groups));
    }
    if (sa == TE_SCALING_NVFP4) g.amax_a = g.amax_b = te_tensor_describe(te, TE_F32, SHAPE(1));
    test_case("%s scaling %d k=%lld", device, scaling, (long long)k);
    CHECK(te_explain(te, TE_OP_GEMM, &g, device, &e) == TE_OK && e.supported && e.deterministic);
    CHECK_OK(te);
    return e;
}

/* Which kernels each scaling gets on which GPU, without one. */
TE_TEST(gemm_plans) {
    static const char *const devices[] = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"};
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int d = 0; d < COUNT(devices); d++)
        for (int f = 0; f < COUNT(scalings); f++) {
            te_explanation e = plan_of(te, f, 2048, devices[d]), odd = plan_of(te, f, 2047, devices[d]);
            bool hopper = !strcmp(devices[d], "sm_90"), cores = hopper || !strcmp(devices[d], "sm_89") || !strcmp(devices[d], "sm_120");
            CHECK_STR(e.kernels, hopper ? "gemm/gemm_hopper" : "gemm/gemm_mma");
            CHECK_STR(odd.kernels, !hopper ? "gemm/gemm_mma" : f < 3 ? "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper" : "gemm/gemm_hopper"); /* rows of decoded copies are aligned */
            CHECK(e.native == (f < 3 && cores));
            if (f < 3) {
                CHECK_STR(e.why, "128 k");
                CHECK(!strstr(e.kernels, "prepare"));
            } else {
                CHECK_STR(e.kernels, "gemm/gemm_prepare.DECODED=1");
                CHECK_STR(e.why, f == 3 ? "MXFP8 decoded" : "NVFP4 decoded");
                CHECK(e.workspace >= 2 * (512 + 1024) * 2048);
            }
        }
}

typedef struct plan_case {
    int64_t m, n, k;
    const char *kernels, *why;
} plan_case;

/* The first kernels of the plan are these; the last of them may have options. */
static bool begins_with(const char *plan, const char *kernels) {
    size_t n = strlen(kernels);
    return !strncmp(plan, kernels, n) && (plan[n] == '.' || plan[n] == ' ' || !plan[n]);
}
/* down: A lies k x m, B k x n; else both run along k. */
static void check_plan(te_ctx *te, const plan_case *c, bool down) {
    te_explanation e;
    te_op_gemm_args g = {0};
    g.m = c->m, g.n = c->n, g.k = c->k;
    g.a = down ? te_tensor_describe(te, TE_BF16, SHAPE(g.k, g.m)) : te_tensor_describe(te, TE_BF16, SHAPE(g.m, g.k));
    g.b = down ? te_tensor_describe(te, TE_BF16, SHAPE(g.k, g.n)) : te_tensor_describe(te, TE_BF16, SHAPE(g.n, g.k));
    g.d = te_tensor_describe(te, TE_BF16, SHAPE(g.m, g.n));
    g.a_transposed = down, g.b_transposed = !down;
    test_case("%lld x %lld x %lld%s", (long long)g.m, (long long)g.n, (long long)g.k, down ? ", k down" : "");
    CHECK(te_explain(te, TE_OP_GEMM, &g, "sm_90", &e) == TE_OK && e.supported && e.deterministic);
    CHECK(begins_with(e.kernels, c->kernels));
    CHECK_STR(e.why, c->why);
    CHECK(te_explain(te, TE_OP_GEMM, &g, "sm_80", &e) == TE_OK && e.supported);
    bool gemv = strstr(c->kernels, "gemv") || (down && (c->m <= 8 || c->n <= 8) && c->m + c->n > 64);
    CHECK(begins_with(e.kernels, !gemv ? "gemm/gemm_mma" : strstr(c->kernels, "gemv") ? c->kernels : "gemm/gemv_mn"));
}

/* Rows that start anywhere, copied first; and GEMVs. */
TE_TEST(gemm_plans_of_unaligned) {
    static const plan_case along[] = {{512, 1024, 2048, "gemm/gemm_hopper", "TMA and wgmma"},
                                      {8192, 50257, 768, "gemm/gemm_hopper", "TMA and wgmma, by rows of D"},
                                      {1, 4095, 4097, "gemm/gemv_k", "GEMV"},
                                      {4097, 8, 4095, "gemm/gemv_k", "GEMV"},
                                      {16, 4096, 4096, "gemm/gemv_k", "GEMV"},
                                      {9, 4095, 4097, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"},
                                      {17, 33, 65, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"},
                                      {64, 512, 95, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"},
                                      {63, 2111, 7167, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"},
                                      {127, 129, 255, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"},
                                      {300, 521, 1101, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"},
                                      {4095, 4097, 4095, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"},
                                      {8192, 6144, 4104, "gemm/gemm_hopper", "TMA and wgmma"}, /* rows start within a sector of 32 bytes */
                                      {64, 16384, 16392, "gemm/gemm_hopper", "TMA and wgmma"}};
    static const plan_case down[] = {{1, 4095, 4097, "gemm/gemv_mn", "GEMV"},
                                     {4097, 1, 4095, "gemm/gemv_mn", "GEMV"},
                                     {8, 28672, 4096, "gemm/gemv_mn", "GEMV"},
                                     {1, 1000, 16000, "gemm/gemv_mn.PIECE=4,Y_T=0,A_DT=3,B_DT=3,SHORT_A=1,ALIGNED=1,WARPS=16 gemm/gemm_reduce", "GEMV"},
                                     {1, 64, 4096, "gemm/gemv_mn", "GEMV"},
                                     {1, 63, 4096, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"},
                                     {1, 40000, 1024, "gemm/gemm_hopper", "TMA and wgmma"}, /* very many */
                                     {1, 40001, 1024, "gemm/gemv_mn", "GEMV"},
                                     {40000, 1, 1024, "gemm/gemv_mn", "GEMV"},
                                     {9, 4095, 4097, "gemm/gemm_prepare.DECODED=0 gemm/gemm_hopper", "copied; then"}};
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int i = 0; i < COUNT(along); i++) check_plan(te, &along[i], false);
    for (int i = 0; i < COUNT(down); i++) check_plan(te, &down[i], true);
}

TE_TEST_DEVICES(gemm_complaints) {
    te_tensor *a = te_tensor_zeros(te, TE_BF16, SHAPE(4, 6)), *b = te_tensor_zeros(te, TE_BF16, SHAPE(5, 6)), *d = te_tensor_zeros(te, TE_BF16, SHAPE(4, 5));
    te_tensor *e4m3 = te_tensor_zeros(te, TE_F8E4M3, SHAPE(8, 16)), *e5m2 = te_tensor_zeros(te, TE_F8E5M2, SHAPE(8, 16));
    te_op_gemm_args good, g;
    memset(&good, 0, sizeof good);
    good.a = a, good.b = b, good.d = d;
    good.m = 4, good.n = 5, good.k = 6;
    good.b_transposed = true;
    te_op_gemm(te, &good);
    CHECK_OK(te);

    g = good, g.a = NULL;
    CHECK(te_op_gemm(te, &g) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "gemm: a is NULL");
    g = good, g.k = 7;
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "A is [4, 6]; [m, k] makes it [4, 7] or more");
    g = good, g.b_transposed = false;
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "B is [5, 6]; [k, n] makes it [6, 5] or more");
    g = good, g.m = -1;
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "cannot be negative");
    g = good, g.b = te_tensor_zeros(te, TE_F16, SHAPE(5, 6));
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "A is bf16 and B f16");
    g = good, g.d = te_tensor_zeros(te, TE_U8, SHAPE(4, 5));
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "gemm: d is u8; f32, f16 or bf16 is needed");
    g = good, g.a = e5m2, g.b = e5m2;
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "both e5m2");
    g = good, g.a = e4m3, g.b = e4m3, g.b_transposed = false;
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "contiguous along k");
    g = good, g.bias = te_tensor_zeros(te, TE_BF16, SHAPE(4));
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "bias is [4]");
    g = good, g.epilogue = TE_EPILOGUE_DGELU;
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_STATE, "aux is NULL");
    g = good, g.epilogue = TE_EPILOGUE_GELU, g.aux = te_tensor_zeros(te, TE_F32, SHAPE(4, 5));
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "aux is f32 and D bf16");
    g = good, g.aux = d;
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "there is none");
    g = good, g.a = te_tensor_transpose(te_tensor_zeros(te, TE_BF16, SHAPE(6, 4)), 0, 1);
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "strided");
    g = good, g.scale_a = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scale_a");
}

static void scaled_complaint(te_ctx *te, te_op_gemm_args g, te_result code, const char *text) {
    te_op_gemm(te, &g);
    CHECK_ERROR(te, code, text);
}

TE_TEST_DEVICES(gemm_scaling_complaints) {
    te_tensor *e4m3 = te_tensor_zeros(te, TE_F8E4M3, SHAPE(8, 144)), *e5m2 = te_tensor_zeros(te, TE_F8E5M2, SHAPE(8, 144));
    te_tensor *e2m1 = te_tensor_zeros(te, TE_F4E2M1, SHAPE(8, 144)), *bf16 = te_tensor_zeros(te, TE_BF16, SHAPE(8, 144));
    te_tensor *one_d = te_tensor_zeros(te, TE_F32, SHAPE(2, 8)), *two_d = te_tensor_zeros(te, TE_F32, SHAPE(1, 4));
    te_tensor *e8m0 = te_tensor_zeros(te, TE_F8E8M0, SHAPE(128, 8)), *nv = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 12));
    te_tensor *amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_gemm_args block, mx, fp4, g;
    memset(&block, 0, sizeof block);
    block.a = block.b = e4m3;
    block.d = te_tensor_zeros(te, TE_F32, SHAPE(8, 8));
    block.m = block.n = 8, block.k = 144;
    block.b_transposed = true;
    mx = fp4 = block;
    block.scaling_a = TE_SCALING_BLOCK_1D, block.scaling_b = TE_SCALING_BLOCK_2D;
    block.scale_a = one_d, block.scale_b = two_d;
    mx.scaling_a = mx.scaling_b = TE_SCALING_MXFP8;
    mx.scale_a = mx.scale_b = e8m0;
    fp4.a = fp4.b = e2m1;
    fp4.scaling_a = fp4.scaling_b = TE_SCALING_NVFP4;
    fp4.scale_a = fp4.scale_b = nv;
    fp4.amax_a = fp4.amax_b = amax;
    te_op_gemm(te, &block), te_op_gemm(te, &mx), te_op_gemm(te, &fp4);
    CHECK_OK(te);

    g = block, g.scaling_a = TE_SCALING_BLOCK_2D, g.scale_a = two_d;
    scaled_complaint(te, g, TE_ERR_INVALID, "one of them must have 1 x 128 blocks");
    g = block, g.scaling_a = TE_SCALING_MXFP8;
    scaled_complaint(te, g, TE_ERR_INVALID, "A is scaled by MXFP8 and B by BLOCK_2D");
    g = mx, g.scaling_b = TE_SCALING_TENSOR;
    scaled_complaint(te, g, TE_ERR_INVALID, "A is scaled by MXFP8 and B by TENSOR");
    g = mx, g.scaling_a = (te_scaling)9;
    scaled_complaint(te, g, TE_ERR_INVALID, "scaling_a is 9");
    g = mx, g.a = g.b = e5m2;
    scaled_complaint(te, g, TE_ERR_DTYPE, "both e5m2");
    g = block, g.a = bf16;
    scaled_complaint(te, g, TE_ERR_DTYPE, "A is bf16 and B e4m3; BLOCK_1D scales belong to fp8 codes");
    g = fp4, g.a = e4m3;
    scaled_complaint(te, g, TE_ERR_DTYPE, "NVFP4 scales belong to e2m1 codes");
    g = fp4, g.scaling_a = g.scaling_b = TE_SCALING_TENSOR, g.amax_a = g.amax_b = g.scale_a = g.scale_b = NULL;
    scaled_complaint(te, g, TE_ERR_DTYPE, "pass their scales and amaxes");
    g = block, g.scale_a = NULL;
    scaled_complaint(te, g, TE_ERR_STATE, "scale_a is NULL");
    g = block, g.scale_b = one_d;
    scaled_complaint(te, g, TE_ERR_SHAPE, "scale_b is [2, 8]; the BLOCK_2D scales of 8 lines of 144 values are [1, 4]");
    g = mx, g.scale_a = nv;
    scaled_complaint(te, g, TE_ERR_DTYPE, "scale_a is e4m3; the scales of MXFP8 are e8m0");
    g = mx, g.m = 144, g.k = 8, g.a_transposed = true, g.scale_a = g.scale_b = te_tensor_zeros(te, TE_F8E8M0, SHAPE(128, 4)),
    g.d = te_tensor_zeros(te, TE_F32, SHAPE(144, 8));
    scaled_complaint(te, g, TE_ERR_SHAPE, "scale_a is [128, 4]; the MXFP8 scales of 144 lines of 8 values are [4, 256]");
    g = block, g.swizzled_scales = true;
    scaled_complaint(te, g, TE_ERR_INVALID, "swizzled_scales belongs to MXFP8 and NVFP4");
    g = mx, g.amax_a = amax;
    scaled_complaint(te, g, TE_ERR_INVALID, "belong to NVFP4");
    g = fp4, g.amax_b = NULL;
    scaled_complaint(te, g, TE_ERR_STATE, "amax_b is NULL");
    g = fp4, g.amax_a = te_tensor_zeros(te, TE_F32, SHAPE(7));
    scaled_complaint(te, g, TE_ERR_SHAPE, "amax_a is [7]");
    g = fp4, g.k = 8, g.n = 8, g.b_transposed = false, g.scale_a = g.scale_b = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4));
    scaled_complaint(te, g, TE_ERR_INVALID, "fp4 operands must be contiguous along k");
    g = block, g.k = 8, g.b_transposed = false;
    scaled_complaint(te, g, TE_ERR_INVALID, "fp8 operands must be contiguous along k");
}
