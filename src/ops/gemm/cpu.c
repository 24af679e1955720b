/* ops/gemm/cpu.c: D = epilogue(scale_a scale_b op(A) op(B) + bias) + D on the CPU, the reference for every kind of
 * scaling. This file must not depend on CUDA.
 *
 * Both operands are decoded once into f32 panels, six rows of A or 32 columns of B, in the order in which the
 * micro-kernel reads them. It sums 256 values of k in ascending order, and these sums are added in ascending order. So
 * the bits do not depend on the number of threads, nor on the position of an element in a tile.
 *
 * MXFP8 and NVFP4 values are multiplied by their scale when they are decoded; f32 holds the product exactly. Block
 * scales can be any f32 numbers. As in the tensor-core kernels, they multiply the sum over their 128 values of k. */

enum {
    TE__GEMM_MR = 6, /* rows of a panel of A; 6 x 32 sums fill 12 of the 32 registers of AVX-512 */
    TE__GEMM_NR = 32,
    TE__GEMM_MC = 96, /* rows of D in one task of 96 x 128 elements: 48 KB of stack for sums; 96 KB of A and 128 KB of B
                       * in the L2 cache */
    TE__GEMM_NC = 128,
    TE__GEMM_KC = 256,      /* values of k that are summed at a time: 32 KB of L1 cache for a panel of B */
    TE__GEMM_KB = 128,      /* number of values of k with the same block scale */
    TE__GEMM_CHUNK = 64,    /* values of k that are decoded at a time */
    TE__GEMM_PACKED = 1 << 24 /* the most elements of an operand that are decoded at a time (64 MB) */
};

/* ---- six rows by 32 columns -------------------------------------------------------------------------------------
 * The micro-kernel computes c[i][j] += sum_p a[p][i] b[p][j]. The six rows are written out. In a loop over the
 * rows, some compilers would keep the sums in memory instead of registers. */

#if defined(__GNUC__)
#define TE__GEMM_INLINE static inline __attribute__((always_inline))
#define TE__GEMM_FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define TE__GEMM_INLINE static inline
#define TE__GEMM_FMA(a, b, c) fmaf(a, b, c)
#endif

/* Returns a * b + c. `fma`: the machine has the instruction. Without the instruction, fmaf would be a slow function. */
TE__GEMM_INLINE float te__gemm_add(bool fma, float a, float b, float c) {
    return fma ? TE__GEMM_FMA(a, b, c) : c + a * b;
}
TE__GEMM_INLINE void te__gemm_micro(bool fma, int64_t k, const float *a, const float *b, float *c) {
    float sum[TE__GEMM_MR][TE__GEMM_NR];
    int64_t p;
    int i, j;
    memset(sum, 0, sizeof(sum));
    for (p = 0; p < k; p++, a += TE__GEMM_MR, b += TE__GEMM_NR)
        for (j = 0; j < TE__GEMM_NR; j++) {
            sum[0][j] = te__gemm_add(fma, a[0], b[j], sum[0][j]);
            sum[1][j] = te__gemm_add(fma, a[1], b[j], sum[1][j]);
            sum[2][j] = te__gemm_add(fma, a[2], b[j], sum[2][j]);
            sum[3][j] = te__gemm_add(fma, a[3], b[j], sum[3][j]);
            sum[4][j] = te__gemm_add(fma, a[4], b[j], sum[4][j]);
            sum[5][j] = te__gemm_add(fma, a[5], b[j], sum[5][j]);
        }
    for (i = 0; i < TE__GEMM_MR; i++)
        for (j = 0; j < TE__GEMM_NR; j++) c[i * TE__GEMM_NC + j] += sum[i][j];
}

typedef void (*te__gemm_micro_fn)(int64_t k, const float *a, const float *b, float *c);

#if defined(__FMA__) || defined(__aarch64__) || defined(__ARM_FEATURE_FMA)
#define TE__GEMM_HAS_FMA true
#else
#define TE__GEMM_HAS_FMA false
#endif
static void te__gemm_micro_built(int64_t k, const float *a, const float *b, float *c) {
    te__gemm_micro(TE__GEMM_HAS_FMA, k, a, b, c);
}

/* If this file is compiled for x86-64 without AVX-512, the program chooses at run time the fastest micro-kernel that
 * the processor supports. */
#if defined(__GNUC__) && defined(__x86_64__) && !defined(__AVX512F__)
__attribute__((target("avx2,fma"))) static void te__gemm_micro_avx2(int64_t k, const float *a, const float *b,
                                                                    float *c) {
    te__gemm_micro(true, k, a, b, c);
}
__attribute__((target("avx512f,avx512vl,avx2,fma"))) static void te__gemm_micro_avx512(int64_t k, const float *a,
                                                                                       const float *b, float *c) {
    te__gemm_micro(true, k, a, b, c);
}
static te__gemm_micro_fn te__gemm_micro_best(void) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) return te__gemm_micro_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return te__gemm_micro_avx2;
    return te__gemm_micro_built;
}
#else
static te__gemm_micro_fn te__gemm_micro_best(void) { return te__gemm_micro_built; }
#endif

/* ---- operands into panels ---------------------------------------------------------------------------------------- */

/* One operand. A line of it is a row of op(A) or a column of op(B). There are `size` lines, each with k elements. */
typedef struct te__gemm_operand {
    const void *data;
    te_dtype dtype;
    int64_t ld, size, k;
    bool k_major;      /* neighbours along k are neighbours in memory */
    int width;         /* of a panel */
    int64_t task;      /* number of lines in one tile of D; a task decodes this many */
    int64_t block;     /* number of lines that are decoded at a time: a multiple of `task`, with at most TE__GEMM_PACKED
                        * elements if possible */
    float fp8[256];    /* value of each fp8 code */
    te_scaling scaling;
    const void *scale; /* the scales of MXFP8, NVFP4 or block scaling; NULL for other operands */
    int64_t scale_ld;
    bool swizzled;
    int64_t begin, end; /* lines begin .. end - 1 are decoded now; begin is a multiple of `task` */
    float *packed;     /* panels of [k][width], zeros beyond the end */
} te__gemm_operand;

static void te__gemm_operand_init(te__gemm_operand *x, const te_tensor *t, bool k_major, int64_t size, int64_t k,
                                  int width, const te_tensor *scale, te_scaling scaling, bool swizzled) {
    int c;
    x->data = te__data(t);
    x->dtype = t->dtype;
    x->ld = te__gemm_ld(t);
    x->size = size;
    x->k = k;
    x->k_major = k_major;
    x->width = width;
    x->task = width == TE__GEMM_MR ? TE__GEMM_MC : TE__GEMM_NC;
    x->block = te__min(te__max(TE__GEMM_PACKED / te__max(k, 1) / x->task, 1) * x->task, te__round_up(size, x->task));
    if (te__is_fp8(t->dtype))
        for (c = 0; c < 256; c++)
            x->fp8[c] = t->dtype == TE_F8E4M3 ? te__e4m3_to_f32((uint8_t)c) : te__e5m2_to_f32((uint8_t)c);
    x->scaling = scaling;
    x->scale = scaling == TE_SCALING_TENSOR ? NULL : te__data(scale);
    x->scale_ld = x->scale ? te__cols(scale) : 0; /* If the operand is one group's part of a tensor, this is still
                                                   * the leading dimension of the whole tensor's scales. */
    x->swizzled = swizzled;
}

/* Returns the MXFP8 or NVFP4 scale of group `group` in line `line`. A line is a row of op(A) or a column of op(B). */
static float te__gemm_group_scale(const te__gemm_operand *x, int64_t line, int64_t group) {
    int64_t ld = x->swizzled ? te__gemm_scale_ld(x->scaling, false, x->size, x->k) : x->scale_ld;
    uint8_t code = ((const uint8_t *)x->scale)[te__group_scale_at(x->swizzled, !x->k_major, ld, line, group)];
    return x->scaling == TE_SCALING_MXFP8 ? te__e8m0_to_f32(code) : te__e4m3_to_f32(code);
}

/* Copies into `out` the block scales of the n lines from `line` on. `block` is the number of the block of k. */
static void te__gemm_block_scales(const te__gemm_operand *x, int64_t line, int64_t n, int64_t block, float *out) {
    const float *scale = (const float *)x->scale;
    int64_t i;
    for (i = 0; i < n; i++)
        out[i] = x->scaling == TE_SCALING_BLOCK_2D ? scale[(line + i) / TE__GEMM_KB * x->scale_ld + block]
                                                   : scale[block * x->scale_ld + line + i];
}

/* Decodes n elements of row `row` of the stored matrix, from element `at` on. Applies the scales of MXFP8 and NVFP4. */
static void te__gemm_decode(const te__gemm_operand *x, int64_t row, int64_t at, int64_t n, float *out) {
    int64_t i;
    int group = x->scaling == TE_SCALING_NVFP4 ? 4 : 5; /* log2 of the group's size */
    float scale = 1.0f;
    if (te__is_fp8(x->dtype)) {
        const uint8_t *codes = (const uint8_t *)x->data + row * x->ld + at;
        for (i = 0; i < n; i++) out[i] = x->fp8[codes[i]];
    } else {
        te__load_row(x->data, x->dtype, row * x->ld + at, n, out); /* 4-bit codes too, since `at` and ld are even */
    }
    if (x->scaling != TE_SCALING_MXFP8 && x->scaling != TE_SCALING_NVFP4) return;
    for (i = 0; i < n; i++) {
        if (!x->k_major)
            scale = te__gemm_group_scale(x, at + i, row >> group);
        else if (i == 0 || (at + i) >> group != (at + i - 1) >> group)
            scale = te__gemm_group_scale(x, row, (at + i) >> group);
        out[i] *= scale;
    }
}

/* Packs one panel of a K-major operand. Decodes `rows` lines in chunks of TE__GEMM_CHUNK values of k, and transposes
 * each chunk. */
static void te__gemm_pack_rows(const te__gemm_operand *x, int64_t row, int64_t rows, float *out) {
    float part[TE__GEMM_NR][TE__GEMM_CHUNK];
    int64_t p, n, i, w = x->width, r;
    memset(part, 0, sizeof(part));
    for (p = 0; p < x->k; p += n, out += n * w) {
        n = te__min(x->k - p, TE__GEMM_CHUNK);
        for (r = 0; r < rows; r++) te__gemm_decode(x, row + r, p, n, part[r]);
        for (i = 0; i < n; i++)
            for (r = 0; r < w; r++) out[i * w + r] = part[r][i];
    }
}

/* Packs several panels of an operand that is not K-major. A row in memory has elements of many lines for one k. */
static void te__gemm_pack_columns(const te__gemm_operand *x, int64_t row, int64_t rows, float *out) {
    float line[TE__GEMM_NC];
    int64_t p, at, w = x->width;
    memset(line, 0, sizeof(line));
    for (p = 0; p < x->k; p++) {
        te__gemm_decode(x, p, row, rows, line);
        for (at = 0; at < rows; at += w) memcpy(out + at * x->k + p * w, line + at, (size_t)w * sizeof(float));
    }
}

/* Packs the lines of tasks begin .. end - 1. */
static void te__gemm_pack(void *user, int64_t begin, int64_t end) {
    const te__gemm_operand *x = (const te__gemm_operand *)user;
    for (; begin < end; begin++) {
        int64_t first = x->begin + begin * x->task, last = te__min(first + x->task, x->end);
        if (!x->k_major) {
            te__gemm_pack_columns(x, first, last - first, x->packed + (first - x->begin) * x->k);
            continue;
        }
        for (; first < last; first += x->width)
            te__gemm_pack_rows(x, first, te__min(last - first, x->width), x->packed + (first - x->begin) * x->k);
    }
}

static void te__gemm_pack_block(te_ctx *te, te__gemm_operand *x, int64_t begin) {
    x->begin = begin;
    x->end = te__min(begin + x->block, x->size);
    te__parallel_for(te, te__div_up(x->end - x->begin, x->task), 1, te__gemm_pack, x);
}

/* ---- tiles of D -------------------------------------------------------------------------------------------------- */

typedef struct te__gemm_job {
    const te_op_gemm_args *args;
    te__gemm_operand a, b;
    int64_t ldd, ldaux;
    float scale, factor_a, factor_b;
    const float *amax_a, *amax_b; /* amaxes of each row of A and each column of B, or NULL; the scale of row i is
                                   * amax_a[i] * factor_a */
    te__gemm_micro_fn micro;
} te__gemm_job;

/* GELU and its derivative in the tanh form, computed as in TransformerEngine. */
static float te__gemm_gelu(float x) { return x * (0.5f + 0.5f * tanhf(x * (0.79788456f + 0.03567741f * x * x))); }
static float te__gemm_dgelu(float x) {
    float t = tanhf(0.79788456f * x * (1.0f + 0.044715f * x * x));
    return 0.5f * x * ((1.0f - t * t) * (0.79788456f + 0.1070322243f * x * x)) + 0.5f * (1.0f + t);
}

/* Computes n elements of row `row` of D, from column `col` on, from their `sums`. */
static void te__gemm_finish(const te__gemm_job *job, int64_t row, int64_t col, int64_t n, const float *sums,
                            const float *bias) {
    const te_op_gemm_args *g = job->args;
    float v[TE__GEMM_NC], other[TE__GEMM_NC], of_row = job->amax_a ? job->amax_a[row] * job->factor_a : 1.0f;
    int64_t i;
    for (i = 0; i < n; i++) v[i] = sums[i] * of_row;
    for (i = 0; i < n && job->amax_b; i++) v[i] *= job->amax_b[col + i] * job->factor_b;
    for (i = 0; i < n; i++) v[i] = job->scale * v[i] + bias[i];
    if (g->epilogue == TE_EPILOGUE_GELU) {
        if (g->aux) te__store_row(te__data(g->aux), g->aux->dtype, row * job->ldaux + col, n, v);
        for (i = 0; i < n; i++) v[i] = te__gemm_gelu(v[i]);
    } else if (g->epilogue == TE_EPILOGUE_DGELU) {
        te__load_row(te__data(g->aux), g->aux->dtype, row * job->ldaux + col, n, other);
        for (i = 0; i < n; i++) v[i] *= te__gemm_dgelu(other[i]);
    }
    if (g->accumulate) {
        te__load_row(te__data(g->d), g->d->dtype, row * job->ldd + col, n, other);
        for (i = 0; i < n; i++) v[i] += other[i];
    }
    te__store_row(te__data(g->d), g->d->dtype, row * job->ldd + col, n, v);
}

/* Computes the product of a tile's rows of A and columns of B over k = p .. p + n - 1. These values of k lie in one
 * block, so each row and each column has one scale. Multiplies the product by the scales and adds it to `sums` [rows,
 * cols]. `pa` and `pb` are the tile's panels of A and B. */
static void te__gemm_scaled_slab(const te__gemm_job *job, const float *pa, const float *pb, int64_t row, int64_t rows,
                                 int64_t col, int64_t cols, int64_t p, int64_t n,
                                 float sums[TE__GEMM_MC][TE__GEMM_NC]) {
    float part[TE__GEMM_MR][TE__GEMM_NC], scale_a[TE__GEMM_MC], scale_b[TE__GEMM_NC];
    int64_t i, j, r, c, k = job->a.k;
    te__gemm_block_scales(&job->a, row, rows, p / TE__GEMM_KB, scale_a);
    te__gemm_block_scales(&job->b, col, cols, p / TE__GEMM_KB, scale_b);
    for (i = 0; i < rows; i += TE__GEMM_MR) {
        memset(part, 0, sizeof(part));
        for (j = 0; j < cols; j += TE__GEMM_NR)
            job->micro(n, pa + i * k + p * TE__GEMM_MR, pb + j * k + p * TE__GEMM_NR, &part[0][j]);
        for (r = 0; r < te__min(TE__GEMM_MR, rows - i); r++)
            for (c = 0; c < cols; c++) sums[i + r][c] += part[r][c] * scale_a[i + r] * scale_b[c];
    }
}

static void te__gemm_tile(const te__gemm_job *job, int64_t row, int64_t col) {
    const te__gemm_operand *a = &job->a, *b = &job->b;
    bool blocks = te__gemm_is_block(a->scaling);
    float sums[TE__GEMM_MC][TE__GEMM_NC] = TE_ZERO, bias[TE__GEMM_NC] = TE_ZERO;
    int64_t rows = te__min(a->end - row, TE__GEMM_MC), cols = te__min(b->end - col, TE__GEMM_NC), k = a->k, p, n, i, j;
    const float *pa = a->packed + (row - a->begin) * k, *pb = b->packed + (col - b->begin) * k;
    for (p = 0; p < k; p += n) {
        n = te__min(k - p, blocks ? TE__GEMM_KB : TE__GEMM_KC);
        if (blocks) te__gemm_scaled_slab(job, pa, pb, row, rows, col, cols, p, n, sums);
        for (j = 0; j < cols && !blocks; j += TE__GEMM_NR)
            for (i = 0; i < rows; i += TE__GEMM_MR)
                job->micro(n, pa + i * k + p * TE__GEMM_MR, pb + j * k + p * TE__GEMM_NR, &sums[i][j]);
    }
    if (job->args->bias) te__load_row(te__data(job->args->bias), job->args->bias->dtype, col, cols, bias);
    for (i = 0; i < rows; i++) te__gemm_finish(job, row + i, col, cols, sums[i], bias);
}

/* Computes tiles `begin` to `end` - 1 of the decoded rows and columns. Consecutive tiles share columns of B. */
static void te__gemm_tiles(void *user, int64_t begin, int64_t end) {
    const te__gemm_job *job = (const te__gemm_job *)user;
    int64_t down = te__div_up(job->a.end - job->a.begin, TE__GEMM_MC);
    for (; begin < end; begin++)
        te__gemm_tile(job, job->a.begin + begin % down * TE__GEMM_MC, job->b.begin + begin / down * TE__GEMM_NC);
}

/* Multiplies job->scale by the operand's scale and returns NULL. If each line has its own amax, returns the amaxes
 * instead, and sets *factor: scale = amax * *factor. */
static const float *te__gemm_job_scale(te__gemm_job *job, const te_tensor *scale, const te_tensor *amax, float *factor,
                                       bool e4m3_max_256) {
    if (job->args->scaling_a == TE_SCALING_TENSOR && scale) job->scale *= *(const float *)te__data(scale);
    if (job->args->scaling_a != TE_SCALING_NVFP4) return NULL;
    *factor = te__gemm_nvfp4_factor(e4m3_max_256);
    if (te__numel(amax) > 1) return (const float *)te__data(amax);
    job->scale *= *(const float *)te__data(amax) * *factor;
    return NULL;
}

static te_result te__cpu_gemm_bias_gradient(te_ctx *te, const te_op_gemm_args *g) {
    te_op_column_sum_args sum = te__gemm_column_sum(g);
    return g->bias_gradient ? te__cpu_column_sum(te, &sum) : TE_OK;
}

static te_result te__cpu_gemm_codes(te_ctx *te, const te_op_gemm_args *g) {
    te__gemm_job job = TE_ZERO;
    int64_t i, j, size;
    size_t bytes;
    if (g->m == 0 || g->n == 0) return te__cpu_gemm_bias_gradient(te, g);
    job.args = g;
    job.ldd = te__gemm_ld(g->d);
    job.ldaux = g->aux ? te__gemm_ld(g->aux) : 0;
    job.scale = 1.0f;
    job.amax_a = te__gemm_job_scale(&job, g->scale_a, g->amax_a, &job.factor_a, g->e4m3_max_256_a);
    job.amax_b = te__gemm_job_scale(&job, g->scale_b, g->amax_b, &job.factor_b, g->e4m3_max_256_b);
    job.micro = te__gemm_micro_best();
    te__gemm_operand_init(&job.a, g->a, !g->a_transposed, g->m, g->k, TE__GEMM_MR, g->scale_a, g->scaling_a,
                          g->swizzled_scales);
    te__gemm_operand_init(&job.b, g->b, g->b_transposed, g->n, g->k, TE__GEMM_NR, g->scale_b, g->scaling_b,
                          g->swizzled_scales);
    size = (job.a.block + job.b.block) * g->k;
    /* on 32 bits: refuses a size that would wrap around */
    bytes = (uint64_t)size <= SIZE_MAX / sizeof(float) ? (size_t)size * sizeof(float) : SIZE_MAX;
    job.a.packed = (float *)te__alloc(te, bytes);
    if (!job.a.packed) return TE_ERR_OUT_OF_MEMORY;
    job.b.packed = job.a.packed + job.a.block * g->k;
    for (j = 0; j < g->n; j += job.b.block) {
        te__gemm_pack_block(te, &job.b, j);
        for (i = 0; i < g->m; i += job.a.block) {
            /* if all of A fits, it is decoded only once */
            if (job.a.block < g->m || j == 0) te__gemm_pack_block(te, &job.a, i);
            te__parallel_for(
                te, te__div_up(job.a.end - job.a.begin, TE__GEMM_MC) * te__div_up(job.b.end - job.b.begin, TE__GEMM_NC),
                1, te__gemm_tiles, &job);
        }
    }
    te__free(te, job.a.packed);
    return te__cpu_gemm_bias_gradient(te, g);
}

/* Quantizes A into memory of its own, and multiplies the codes. */
static te_result te__cpu_gemm_quantized(te_ctx *te, const te_op_gemm_args *g) {
    te__gemm_codes c;
    te_result result = TE_OK;
    int i;
    te__gemm_codes_init(&c, te, g);
    for (i = 0; i < 3; i++) {
        c.memory[i].data = te__alloc(te, (size_t)te__max(c.bytes[i], 1));
        if (!c.memory[i].data) result = TE_ERR_OUT_OF_MEMORY;
    }
    if (result == TE_OK) TE__GEMM_QUANTIZE(result, te__cpu_, te, g, &c);
    if (result == TE_OK) result = te__cpu_gemm_codes(te, &c.product);
    for (i = 0; i < 3; i++)
        if (c.memory[i].data) te__free(te, c.memory[i].data);
    return result;
}
static te_result te__cpu_gemm(te_ctx *te, const te_op_gemm_args *g) {
    return g->quantize_a && g->m > 0 && g->n > 0 ? te__cpu_gemm_quantized(te, g) : te__cpu_gemm_codes(te, g);
}
