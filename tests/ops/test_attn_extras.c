/* test_attn_extras.c: te_attn_rule: every pair of choices of mask, window, layout, bias, softmax, heads, sizes, format, dropout and soft cap against the formula in
 * float64, forward and backward; the gradients of that formula against differences; caches and pages; the same bits again; refusals. */
#include "../te_test.h"
#include "attn_formula.h"

static const int64_t size_choices[5][4] = {{17, 21, 16, 16}, {40, 33, 8, 24}, {70, 132, 64, 64}, {20, 20, 33, 7}, {36, 64, 128, 128}}; /* s_q, s_kv, d, d_v */
static xcase make_case(const int *option) { return make_sized_case(option, size_choices[option[SIZES]]); }
static xcase small_case(te_attn_mask mask, int layout, int bias, int softmax, int dtype, int sizes) {
    int option[OPTIONS] = {0};
    option[MASK] = mask - TE_MASK_NONE;
    option[LAYOUT] = layout;
    option[BIAS] = bias;
    option[SOFTMAX] = softmax;
    option[DTYPE] = dtype;
    option[GROUPED] = 1;
    option[SIZES] = sizes;
    return make_case(option);
}

/* The n-th of a series of cases, in which every pair of choices of any two options comes up. */
static void nth_options(int n, int option[OPTIONS]) {
    uint64_t state = (uint64_t)n * 0x9E3779B97F4A7C15ull + 12345;
    for (int i = 0; i < OPTIONS; i++) {
        state ^= state >> 30, state *= 0xBF58476D1CE4E5B9ull;
        state ^= state >> 27, state *= 0x94D049BB133111EBull;
        state ^= state >> 31;
        option[i] = (int)(state >> 33) % choices[i];
    }
    if (n % 3 == 0) option[MASK] = 3 + n / 3 % 3, option[LAYOUT] = LAYOUT_THD + n / 9 % 2; /* layouts that few masks have */
}
enum { CASES = 420, SHARES = 6 };
static void check_share(te_ctx *te, int share) {
    for (int n = share; n < CASES; n += SHARES * test_every_odd(5)) {
        int option[OPTIONS];
        nth_options(n, option);
        xcase c = make_case(option);
        check_case(te, &c);
    }
}
TE_TEST_DEVICES(attn_extras_0) { check_share(te, 0); }
TE_TEST_DEVICES(attn_extras_1) { check_share(te, 1); }
TE_TEST_DEVICES(attn_extras_2) { check_share(te, 2); }
TE_TEST_DEVICES(attn_extras_3) { check_share(te, 3); }
TE_TEST_DEVICES(attn_extras_4) { check_share(te, 4); }
TE_TEST_DEVICES(attn_extras_5) { check_share(te, 5); }

/* Packed layouts exist under padding masks alone, soft caps without a bias before the scale; all other pairs are among the cases. */
TE_TEST(attn_extras_has_all_pairs) {
    for (int x = 0; x < OPTIONS; x++)
        for (int y = 0; y < x; y++)
            for (int i = 0; i < choices[x]; i++)
                for (int j = 0; j < choices[y]; j++) {
                    bool found = (x == LAYOUT && y == MASK && i >= LAYOUT_THD && !(j >= 3 && j <= 5)) || (x == SOFTCAP && y == BIAS && i && j == BIAS_PRE);
                    for (int n = 0; n < CASES && !found; n++) {
                        int option[OPTIONS];
                        nth_options(n, option);
                        xcase c = make_case(option);
                        found = c.option[x] == i && c.option[y] == j;
                    }
                    CHECK_MSG(found, "choice %d of option %d with choice %d of option %d", i, x, j, y);
                }
}

/* FP8 attention: S and dP are rounded to codes: with every other option, and by scales under which numbers saturate and become 0. */
TE_TEST_DEVICES(attn_extras_fp8) {
    static const float scales[3] = {448, 16, 4000};
    for (int n = 0; n < CASES; n += 5 * test_every_odd(5)) {
        int option[OPTIONS];
        nth_options(n, option);
        xcase c = make_case(option);
        c.s_dtype = n % 2 ? TE_F8E5M2 : TE_F8E4M3;
        c.dp_dtype = n % 4 < 2 ? TE_F8E5M2 : TE_F8E4M3;
        c.s_scale = scales[n % 3];
        c.dp_scale = 10 * scales[n / 3 % 3];
        c.by_row = n / 5 % 2;
        check_case(te, &c);
    }
}

/* Heads that kernels go through in chunks of 256 channels, with every other option; with FP8 attention, whose first pass over the keys leaves a sum for the others; and from a cache and its pages. */
TE_TEST_DEVICES(attn_extras_wide) {
    static const int64_t wide[][2] = {{300, 300}, {512, 257}, {40, 600}, {1024, 1024}, {516, 16}};
    for (int n = 0; n < CASES; n += 7 * test_every_odd(6)) {
        int option[OPTIONS];
        nth_options(n, option);
        option[SIZES] %= 2;
        xcase c = make_case(option);
        c.d = wide[n % 5][0], c.d_v = wide[n % 5][1];
        c.scale = (float)((option[DROPOUT] == 2 ? 1.5 : 1) / sqrt((double)c.d));
        if (n % 2) {
            c.s_dtype = n % 4 == 1 ? TE_F8E5M2 : TE_F8E4M3, c.dp_dtype = n % 3 ? TE_F8E5M2 : TE_F8E4M3;
            c.s_scale = 448, c.dp_scale = 4480, c.by_row = n % 2;
        }
        check_case(te, &c);
    }
    for (int paged = 0; paged < 2; paged++) {
        xcase c = small_case(TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, LAYOUT_BSHD, BIAS_NONE, TE_SOFTMAX_VANILLA, paged, 0);
        c.kv_format = TE_BSHD;
        c.d = 520, c.d_v = 300;
        c.scale = 0.05f;
        if (paged) c.page_size = 8, c.s_kv = (c.s_kv + 7) / 8 * 8;
        check_case(te, &c);
    }
}

/* Heads above 128 channels with every other option. */
TE_TEST_DEVICES(attn_extras_above_128) {
    static const int64_t sizes[][2] = {{256, 256}, {192, 128}, {192, 192}, {136, 200}};
    for (int n = 0; n < CASES; n += 5 * (test_every_of(29, 6) | 1)) {
        int option[OPTIONS];
        nth_options(n, option);
        option[DTYPE] = 1 + n % 2;
        option[SIZES] = n % 4 == 1 ? 0 : 2;
        xcase c = make_case(option);
        c.d = sizes[n / 20 % 4][0], c.d_v = sizes[n / 20 % 4][1];
        c.scale = (float)((option[DROPOUT] == 2 ? 1.5 : 1) / sqrt((double)c.d));
        check_case(te, &c);
    }
}

static double loss_of(const xcase *c, const xdata *in) {
    xsums sum;
    double loss = 0;
    xdata out = reference(c, in, &sum);
    (void)out;
    for (int64_t b = 0; b < c->b; b++)
        for (int64_t h = 0; h < c->heads; h++)
            for (int64_t i = 0; i < c->length_q[b]; i++)
                for (int64_t x = 0; x < c->d_v; x++) loss += sum.x[O][place(c, O, b, h, i) + x] * in->x[DO][place(c, O, b, h, i) + x];
    return loss;
}
/* Every element of `values` moved by a step: the loss sum(o * d_o) moves as `got` says. NaN, which is padding, stays. */
static void check_moves(const xcase *c, const xdata *in, const char *name, float *values, const float *got, int64_t n) {
    for (int64_t i = 0; i < n; i += 1 + n / (40 / test_every_sanitized(2))) {
        const float start = values[i], up = start + 1.0f / 512, down = start - 1.0f / 512;
        if (isnan(start)) continue;
        values[i] = up;
        double rise = loss_of(c, in);
        values[i] = down;
        rise = (rise - loss_of(c, in)) / ((double)up - (double)down);
        values[i] = start;
        /* the error of a central difference is of the order of the step squared */
        CHECK_MSG(fabs(rise - (double)got[i]) <= 1e-4 * (1 + fabs(rise)), "%s[%lld] is %.6g, not %.6g", name, (long long)i, (double)got[i], rise);
    }
}
TE_TEST_DEVICES(attn_extras_finite_differences) {
    const xcase cases[] = {small_case(TE_MASK_ARBITRARY, LAYOUT_SBHD, BIAS_FULL, TE_SOFTMAX_LEARNABLE, 0, 0),
                           small_case(TE_MASK_PADDING, LAYOUT_THD_PADDED, BIAS_KEYS, TE_SOFTMAX_LEARNABLE, 0, 0),
                           small_case(TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, LAYOUT_BSHD, BIAS_PRE, TE_SOFTMAX_OFF_BY_ONE, 0, 3)};
    for (int k = 0; k < COUNT(cases); k++) {
        const xcase *c = &cases[k];
        name_case(c);
        xdata in = make_data(c), got = run(te, c, &in);
        check_moves(c, &in, "dq", in.x[Q], got.x[DQ], count(c, Q));
        check_moves(c, &in, "dk", in.x[K], got.x[DK], count(c, K));
        check_moves(c, &in, "dv", in.x[V], got.x[DV], count(c, V));
        check_moves(c, &in, "dbias", in.bias, got.dbias, bias_count(c));
        if (in.offset) check_moves(c, &in, "dsoftmax_offset", in.offset, got.doffset, c->heads);
    }
}

/* A cache with more rows than are used, in another layout than the queries; and the same in pages. */
TE_TEST_DEVICES(attn_extras_caches) {
    static const int64_t pages[] = {0, 8, 5, 32};
    int n = 0;
    for (int dtype = 0; dtype < 3; dtype++)
        for (int layout = LAYOUT_SBHD; layout <= LAYOUT_THD_PADDED; layout++)
            for (int k = 0; k < COUNT(pages); k++) {
                if (n++ % test_every_odd(6)) continue;
                xcase c = small_case(k % 2 ? TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT : TE_MASK_PADDING, layout, k == 3 ? BIAS_ALIBI : BIAS_NONE,
                                     TE_SOFTMAX_VANILLA, dtype, k < 2 ? 2 : 4);
                c.kv_format = TE_BSHD;
                c.page_size = pages[k];
                if (c.page_size) c.s_kv = (c.s_kv + c.page_size - 1) / c.page_size * c.page_size;
                if (c.padded) {
                    c.padded = false;
                    for (int64_t b = 0; b < c.b; b++) c.at_q[b + 1] = c.at_q[b] + c.length_q[b];
                }
                check_case(te, &c);
            }
}

/* The same bits again; on the CPU whatever the number of threads. */
TE_TEST_DEVICES(attn_extras_same_bits) {
    for (int dtype = 0; dtype < 3; dtype++) {
        xcase c = small_case(TE_MASK_PADDING_CAUSAL, LAYOUT_THD, dtype ? BIAS_KEYS : BIAS_HEADS, TE_SOFTMAX_LEARNABLE, dtype, 2);
        te_ctx_desc desc;
        memset(&desc, 0, sizeof desc);
        name_case(&c);
        desc.device = te_ctx_device(te);
        desc.cpu_threads = 5;
        te_ctx *other = test_context_with(&desc);
        if (!other) return;
        xdata in = make_data(&c), a = run(te, &c, &in), b = run(other, &c, &in);
        CHECK_BYTES("lse", a.lse, b.lse, (size_t)lse_count(&c) * 4);
        CHECK_BYTES("max_logit", a.max_logit, b.max_logit, (size_t)c.heads * 4);
        CHECK_BYTES("dbias", a.dbias, b.dbias, (size_t)bias_count(&c) * 4);
        CHECK_BYTES("dsoftmax_offset", a.doffset, b.doffset, (size_t)c.heads * 4);
        for (int part = O; part < PARTS; part++) CHECK_BYTES(part == O ? "o" : "gradient", a.x[part], b.x[part], (size_t)count(&c, part) * 4);
    }
}

/* te_attention: the tape gives all five gradients, and those are the operation's. */
TE_TEST_DEVICES(attn_extras_on_the_tape) {
    const xcase cases[] = {small_case(TE_MASK_PADDING_CAUSAL, LAYOUT_THD_PADDED, BIAS_HEADS, TE_SOFTMAX_LEARNABLE, 0, 2),
                           small_case(TE_MASK_ARBITRARY, LAYOUT_BSHD, BIAS_KEYS, TE_SOFTMAX_LEARNABLE, 2, 1)};
    for (int k = 0; k < COUNT(cases); k++) {
        const xcase *c = &cases[k];
        te_attn_desc desc;
        name_case(c);
        xdata in = make_data(c), want = run(te, c, &in);
        xtensors t = make_tensors(te, c, &in);
        te_tensor *inputs[5] = {t.x[Q], t.x[K], t.x[V], t.f.rule.core_attention_bias, t.f.rule.softmax_offset};
        memset(&desc, 0, sizeof desc);
        desc.format = c->format;
        desc.rule = t.f.rule;
        desc.max_logit = t.max_logit;
        for (int i = 0; i < 5; i++) te_tensor_set_requires_grad(inputs[i], true);
        te_tensor *o = te_attention(t.x[Q], t.x[K], t.x[V], &desc);
        te_backward_from(o, t.x[DO]);
        REQUIRE_OK(te);
        CHECK_BYTES("o", test_read(o), want.x[O], (size_t)count(c, O) * 4);
        CHECK_BYTES("max_logit", test_read(t.max_logit), want.max_logit, (size_t)c->heads * 4);
        for (int i = 0; i < 3; i++) CHECK_BYTES("gradient of q, k or v", test_read(te_tensor_grad(inputs[i])), want.x[DQ + i], (size_t)count(c, DQ + i) * 4);
        CHECK_BYTES("dbias", test_read(te_tensor_grad(inputs[3])), want.dbias, (size_t)bias_count(c) * 4);
        CHECK_BYTES("dsoftmax_offset", test_read(te_tensor_grad(inputs[4])), want.doffset, (size_t)c->heads * 4);
    }
}

/* A call that goes wrong in one field. */
TE_TEST_DEVICES(attn_extras_refuses) {
    const xcase packed = small_case(TE_MASK_PADDING_CAUSAL, LAYOUT_THD_PADDED, BIAS_HEADS, TE_SOFTMAX_LEARNABLE, 0, 0);
    const xcase plain = small_case(TE_MASK_ARBITRARY, LAYOUT_SBHD, BIAS_SLOPES, TE_SOFTMAX_VANILLA, 0, 0);
    xdata in = make_data(&packed), in2 = make_data(&plain);
    xtensors p = make_tensors(te, &packed, &in), q = make_tensors(te, &plain, &in2);
    te_tensor *four = test_i32(te, SHAPE(4), packed.at_q), *five = test_i32(te, SHAPE(5), (const int64_t[]){0, 1, 2, 3, 4});
    te_op_attn_fwd_args f;
    te_op_attn_bwd_args g;
    REQUIRE_OK(te);

    f = p.f, f.rule.mask = TE_MASK_CAUSAL, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "mask is 2 with TE_THD; packed sequences need a padding mask (4 to 6)");
    f = p.f, f.rule.cu_seqlens_kv = NULL, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "rule.cu_seqlens_kv is NULL; a padding mask needs it");
    f = p.f, f.rule.cu_seqlens_kv = five, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rule.cu_seqlens_kv is [5]; 4 elements are needed");
    f = p.f, f.rule.cu_seqlens_q = te_tensor_zeros(te, TE_F32, SHAPE(4)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "rule.cu_seqlens_q is f32");
    f = p.f, f.rule.cu_seqlens_q = te_tensor_zeros(te, TE_I32, SHAPE(0)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[b + 1] is needed");
    f = p.f, f.q = q.x[Q], te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[tokens, heads, d] is needed with TE_THD");
    f = p.f, f.rule.max_seqlen_q = -1, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.max_seqlen_q is -1 and max_seqlen_kv is 21");
    f = p.f, f.rule.core_attention_bias = NULL, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "rule.core_attention_bias is NULL; TE_ATTN_BIAS_PRE_SCALE or TE_ATTN_BIAS_POST_SCALE needs it");
    f = p.f, f.rule.core_attention_bias = te_tensor_zeros(te, TE_F32, SHAPE(1, 4, 17, 20)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rule.core_attention_bias is [1, 4, 17, 20]; [3 or 1, 4 or 1, 17 or 1, 21] is needed");
    f = p.f, f.rule.softmax_offset = te_tensor_zeros(te, TE_F32, SHAPE(3)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rule.softmax_offset is [3]; 4 elements are needed");
    f = p.f, f.rule.softmax_type = TE_SOFTMAX_VANILLA, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.softmax_offset belongs to TE_SOFTMAX_LEARNABLE");
    f = p.f, f.max_logit = te_tensor_zeros(te, TE_F32, SHAPE(5)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "max_logit is [5]; 4 elements are needed");
    f = q.f, f.rule.attention_mask = NULL, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "rule.attention_mask is NULL; TE_MASK_ARBITRARY needs it");
    f = q.f, f.rule.attention_mask = te_tensor_zeros(te, TE_U8, SHAPE(2, 3, 17, 21)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rule.attention_mask is [2, 3, 17, 21]; [2 or 1, 4 or 1, 17 or 1, 21 or 1] is needed");
    f = q.f, f.rule.mask = TE_MASK_NONE, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.attention_mask belongs to TE_MASK_ARBITRARY");
    f = q.f, f.rule.cu_seqlens_q = four, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.cu_seqlens_q belongs to a padding mask");
    f = q.f, f.rule.alibi_slopes = te_tensor_zeros(te, TE_F32, SHAPE(3)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rule.alibi_slopes is [3]; [4] or [2, 4] is needed");
    f = q.f, f.rule.core_attention_bias_type = (te_attn_bias)9, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "core_attention_bias_type is 9");
    f = q.f, f.rule.softmax_type = (te_softmax_type)9, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "softmax_type is 9");
    f = q.f, f.rule.bottom_right_diagonal = (te_switch)9, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "bottom_right_diagonal is 9");
    f = q.f, f.format = (te_qkv_format)9, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "format is 9");
    f = q.f, f.rule.page_table = five, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.page_table belongs to a padding mask");
    f = p.f, f.rule.page_table = five, f.rule.cu_seqlens_kv_padded = NULL, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rule.page_table is [5]; [b, pages of each sequence] is needed");
    f = p.f, f.rule.kv_bshd = true, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.cu_seqlens_kv_padded belongs to packed keys");
    f = q.f, f.fp8.s_dtype = TE_BF16, f.fp8.s_scale = one_number(te, 1), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "fp8.s_dtype is bf16");
    g = q.g, g.fp8.s_dtype = TE_F8E4M3, te_op_attn_bwd(te, &g);
    CHECK_ERROR(te, TE_ERR_STATE, "fp8.s_scale");
    g = q.g, g.fp8.dp_dtype = TE_F8E5M2, g.fp8.dp_scale = te_tensor_zeros(te, TE_F32, SHAPE(2)), te_op_attn_bwd(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "fp8.dp_scale is [2]");
    g = q.g, g.o = NULL, te_op_attn_bwd(te, &g);
    CHECK_ERROR(te, TE_ERR_STATE, "o is NULL");
    g = q.g, g.dbias = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 1, 21)), te_op_attn_bwd(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.core_attention_bias is NULL; there is no bias to have a gradient");
    g = q.g, g.dsoftmax_offset = te_tensor_zeros(te, TE_F32, SHAPE(4)), te_op_attn_bwd(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.softmax_offset is NULL; there is no offset to have a gradient");
    g = p.g, g.dbias = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 1, 21)), te_op_attn_bwd(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "dbias is [1, 1, 1, 21]");

    xcase paged = small_case(TE_MASK_PADDING, LAYOUT_SBHD, BIAS_NONE, TE_SOFTMAX_VANILLA, 0, 4);
    paged.kv_format = TE_BSHD;
    paged.page_size = 8;
    xdata in3 = make_data(&paged);
    xtensors t = make_tensors(te, &paged, &in3);
    te_op_attn_bwd(te, &t.g);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "keys in pages (rule.page_table) are for inference and have no gradients");
    f = t.f, f.rule.page_table = te_tensor_zeros(te, TE_I32, SHAPE(2, 8)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rule.page_table is [2, 8] and q has 3 sequences");
}

/* Starts that make no sense: the CPU says so; a GPU, which would have to wait for them, stays inside its memory. */
TE_TEST_DEVICES(attn_extras_wrong_starts) {
    static const int64_t wrong[][4] = {{0, 17, 9, 17}, {0, 17, 17, 900}, {-5, 3, 4, 5}, {0, INT32_MAX, INT32_MIN, 5}};
    static const char *const says[] = {"rule.cu_seqlens_q[1] is 17 and [2] is 9; starts must not descend",
                                       "by rule.cu_seqlens_q, sequence 2 has rows 17 to 899; there are 27",
                                       "by rule.cu_seqlens_q, sequence 0 has rows -5 to 2; there are 27", "sequence 0 has rows 0 to 2147483646; there are 27"};
    const xcase c = small_case(TE_MASK_PADDING, LAYOUT_THD, BIAS_NONE, TE_SOFTMAX_VANILLA, 0, 0);
    xdata in = make_data(&c);
    for (int k = 0; k < COUNT(wrong); k++) {
        xtensors t = make_tensors(te, &c, &in);
        t.f.rule.cu_seqlens_q = t.g.rule.cu_seqlens_q = test_i32(te, SHAPE(4), wrong[k]);
        te_op_attn_fwd(te, &t.f);
        if (te_ctx_is_cuda(te)) {
            te_op_attn_bwd(te, &t.g);
            te_synchronize(te); /* the guard bands are looked at when the test ends */
            CHECK_OK(te);
        } else {
            CHECK_ERROR(te, TE_ERR_INVALID, says[k]);
            te_op_attn_bwd(te, &t.g);
            CHECK_ERROR(te, TE_ERR_INVALID, says[k]);
        }
    }
    xtensors t = make_tensors(te, &c, &in);
    t.f.rule.cu_seqlens_q_padded = test_i32(te, SHAPE(4), (const int64_t[]){0, 10, 20, 27});
    te_op_attn_fwd(te, &t.f);
    if (te_ctx_is_cuda(te))
        CHECK_OK(te);
    else
        CHECK_ERROR(te, TE_ERR_INVALID, "rule.cu_seqlens_q has 17 rows for sequence 0, and rule.cu_seqlens_q_padded has 10 for it");
}

/* A GPU's numbers are looked at in the debug mode, and nothing is launched then; the CPU's always. */
TE_TEST_DEVICES(attn_extras_places_in_debug_mode) {
    te_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.device = te_ctx_device(te);
    test_setenv("TE_DEBUG_SYNC", "1");
    te_ctx *debug = test_context_with(&desc);
    test_setenv("TE_DEBUG_SYNC", NULL);
    if (!debug) return;
    const xcase packed = small_case(TE_MASK_PADDING, LAYOUT_THD, BIAS_NONE, TE_SOFTMAX_VANILLA, 2, 2);
    xdata in = make_data(&packed);
    xtensors t = make_tensors(debug, &packed, &in);
    te_op_attn_fwd(debug, &t.f);
    te_op_attn_bwd(debug, &t.g);
    CHECK_OK(debug);
    t.f.rule.cu_seqlens_q = t.g.rule.cu_seqlens_q = test_i32(debug, SHAPE(4), (const int64_t[]){0, 70, 9, 109});
    te_op_attn_fwd(debug, &t.f);
    CHECK_ERROR(debug, TE_ERR_INVALID, "attn_fwd: rule.cu_seqlens_q[1] is 70 and [2] is 9; starts must not descend");
    te_op_attn_bwd(debug, &t.g);
    CHECK_ERROR(debug, TE_ERR_INVALID, "attn_bwd: rule.cu_seqlens_q[1] is 70 and [2] is 9; starts must not descend");
    xcase paged = small_case(TE_MASK_PADDING, LAYOUT_BSHD, BIAS_NONE, TE_SOFTMAX_VANILLA, 2, 2);
    paged.kv_format = TE_BSHD;
    paged.page_size = 4;
    in = make_data(&paged);
    t = make_tensors(debug, &paged, &in);
    te_op_attn_fwd(debug, &t.f);
    CHECK_OK(debug);
    const int64_t pages = te_tensor_shape(t.f.rule.page_table)[1], all = te_tensor_shape(t.f.k)[0];
    int64_t *ids = test_integers(3 * pages, 5, 0, all);
    ids[pages + 1] = all + 7;
    t.f.rule.page_table = test_i32(debug, SHAPE(3, pages), ids);
    te_op_attn_fwd(debug, &t.f);
    CHECK_ERROR(debug, TE_ERR_INVALID, "attn_fwd: rule.page_table[1][1] is 106; the cache has pages 0 to 98");
}

/* No sequences, and sequences of no rows. */
TE_TEST_DEVICES(attn_extras_empty) {
    const xcase c = small_case(TE_MASK_PADDING, LAYOUT_THD, BIAS_NONE, TE_SOFTMAX_OFF_BY_ONE, 0, 0);
    static const int64_t none[4] = {0, 0, 0, 0};
    xdata in = make_data(&c);
    for (int64_t b = 0; b <= 3; b += 3) {
        xtensors t = make_tensors(te, &c, &in);
        t.f.rule.cu_seqlens_q = t.f.rule.cu_seqlens_kv = t.g.rule.cu_seqlens_q = t.g.rule.cu_seqlens_kv = test_i32(te, SHAPE(b + 1), none);
        te_op_attn_fwd(te, &t.f);
        te_op_attn_bwd(te, &t.g);
        CHECK_OK(te);
        float *o = test_read(t.x[O]), *dk = test_read(t.x[DK]), *lse = test_read(t.lse), *top = test_read(t.max_logit);
        for (int64_t i = 0; i < count(&c, O); i++) CHECK(o[i] == 0);
        for (int64_t i = 0; i < count(&c, DK); i++) CHECK(dk[i] == 0);
        for (int64_t i = 0; i < lse_count(&c); i++) CHECK(lse[i] == -INFINITY);
        for (int64_t h = 0; h < c.heads; h++) CHECK(top[h] == -INFINITY);
    }
}

static te_tensor *described(const te_tensor *x) { return x ? te_tensor_describe(te_tensor_ctx(x), te_tensor_dtype(x), te_tensor_ndim(x), te_tensor_shape(x)) : NULL; }

/* Which kernels a plan names, without a GPU; the same for tensors that have no memory. */
TE_TEST(attn_extras_plans) {
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int dtype = 0; dtype < 3; dtype++)
        for (int sizes = 2; sizes < 5; sizes++) {
            const xcase c = small_case(TE_MASK_PADDING_CAUSAL, LAYOUT_THD, BIAS_KEYS, TE_SOFTMAX_LEARNABLE, dtype, sizes);
            const bool fast = dtype != 0 && sizes != 3;
            te_explanation e;
            name_case(&c);
            xdata in = make_data(&c);
            xtensors t = make_tensors(te, &c, &in);
            for (int pass = 0; pass < 2; pass++) {
                CHECK(te_explain(te, TE_OP_ATTN_FWD, &t.f, "sm_90", &e) == TE_OK && e.supported && e.deterministic);
                CHECK_STR(e.kernels, fast ? "attn/attn_fwd_hopper" : "attn/attn_fwd");
                CHECK_MSG(!strstr(e.kernels, "_hopper") == !fast, "%s", e.kernels);
                CHECK_STR(e.kernels, "attn/attn_clear");
                CHECK_STR(e.why, fast ? "TMA and wgmma" : "and not tensor cores: ");
                CHECK_EQ_INT(e.launches, 2);
                CHECK(te_explain(te, TE_OP_ATTN_BWD, &t.g, "sm_80", &e) == TE_OK && e.supported && e.deterministic);
                CHECK_STR(e.kernels, fast ? "attn/attn_bwd_dkv_mma" : "attn/attn_bwd_dkv");
                CHECK_STR(e.kernels, "attn/attn_bwd_bias");
                CHECK_STR(e.kernels, "attn/attn_bwd_sink");
                CHECK_EQ_INT(e.launches, 6);
                /* two floats for each row of each head, and less than two tiles for each sequence: nothing grows as s * s does */
                CHECK(e.workspace <= 8 * (size_t)(c.heads * (c.at_q[c.b] + 4 * 140)));
                t.f.max_logit = described(t.f.max_logit);
                t.f.rule.core_attention_bias = t.g.rule.core_attention_bias = described(t.f.rule.core_attention_bias);
                t.f.rule.cu_seqlens_q = t.g.rule.cu_seqlens_q = described(t.f.rule.cu_seqlens_q);
                t.g.dbias = described(t.g.dbias);
                t.g.dsoftmax_offset = described(t.g.dsoftmax_offset);
            }
        }
}
