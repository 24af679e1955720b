/* test_attention_backends.c: the four backends against each other and against a formula in f64, forward and backward; masks and windows by their rows; block masks; refusals. */
#include "../te_test.h"

static const te_attn_backend backends[] = {TE_ATTN_TE, TE_ATTN_SDPA, TE_ATTN_FLEX, TE_ATTN_EAGER};

typedef struct shape {
    int64_t b, s_q, s_kv, heads, groups, d, d_v;
} shape;

static te_module *make(te_ctx *te, te_attn_backend backend, const shape *s, float scale) {
    te_attn_module_desc d = {.num_attention_heads = (int)s->heads, .num_gqa_groups = (int)s->groups, .num_qk_channels = s->d, .num_v_channels = s->d_v, .softmax_scale = scale};
    return te_initialize_attn_module(te, backend, &d);
}
static te_attn_inputs inputs_of(te_ctx *te, te_dtype dtype, const shape *s) {
    const int64_t nq = s->b * s->s_q * s->heads * s->d, nk = s->b * s->s_kv * s->groups * s->d, nv = s->b * s->s_kv * s->groups * s->d_v;
    te_attn_inputs in = {.q = test_tensor(te, dtype, SHAPE(s->b, s->s_q, s->heads, s->d), test_rounded(dtype, test_normal(nq, 1), nq)),
                         .k = test_tensor(te, dtype, SHAPE(s->b, s->s_kv, s->groups, s->d), test_rounded(dtype, test_normal(nk, 2), nk)),
                         .v = test_tensor(te, dtype, SHAPE(s->b, s->s_kv, s->groups, s->d_v), test_rounded(dtype, test_normal(nv, 3), nv))};
    return in;
}

/* softmax(scale q k^T + added, over the keys that `keep` names) v with a logit `sinks` in the denominator, in f64: o [b, s_q, H, d_v]. */
static float *formula(const shape *s, float scale, const float *q, const float *k, const float *v, const uint8_t *keep, const float *added, const float *sinks) {
    float *o = test_floats(s->b * s->s_q * s->heads * s->d_v);
    double *p = test_doubles(s->s_kv + 1);
    for (int64_t b = 0; b < s->b; b++)
        for (int64_t i = 0; i < s->s_q; i++)
            for (int64_t h = 0; h < s->heads; h++) {
                const int64_t g = h / (s->heads / s->groups), at = (b * s->s_q + i) * s->heads + h;
                double sum = sinks ? exp((double)sinks[h]) : 0;
                for (int64_t j = 0; j < s->s_kv; j++) {
                    double x = 0;
                    for (int64_t c = 0; c < s->d; c++) x += (double)q[at * s->d + c] * (double)k[((b * s->s_kv + j) * s->groups + g) * s->d + c];
                    x = x * (double)scale + (added ? (double)added[i * s->s_kv + j] : 0);
                    p[j] = keep && !keep[(b * s->s_q + i) * s->s_kv + j] ? 0 : exp(x);
                    sum += p[j];
                }
                for (int64_t c = 0; c < s->d_v; c++) {
                    double y = 0;
                    for (int64_t j = 0; j < s->s_kv; j++) y += p[j] > 0 ? p[j] / sum * (double)v[((b * s->s_kv + j) * s->groups + g) * s->d_v + c] : 0;
                    o[at * s->d_v + c] = (float)y;
                }
            }
    return o;
}
/* 1 where a causal query, i + offset, sees a key: `keys` keys with its own (-1: all before it), of the first `lengths` ones. */
static uint8_t *kept(const shape *s, int64_t keys, int64_t offset, const int64_t *lengths) {
    uint8_t *keep = test_alloc((size_t)(s->b * s->s_q * s->s_kv) + 1);
    for (int64_t b = 0; b < s->b; b++)
        for (int64_t i = 0; i < s->s_q; i++)
            for (int64_t j = 0; j < s->s_kv; j++)
                keep[(b * s->s_q + i) * s->s_kv + j] = j <= i + offset && (keys < 0 || j > i + offset - keys) && (!lengths || j < lengths[b]);
    return keep;
}
/* Padding u8 [b, s]: 1 for the first tokens. */
static te_tensor *padding(te_ctx *te, int64_t b, int64_t s, const int64_t *lengths) {
    uint8_t *x = test_alloc((size_t)(b * s) + 1);
    for (int64_t i = 0; i < b * s; i++) x[i] = i % s < lengths[i / s];
    return te_tensor_from_host(te, TE_U8, SHAPE(b, s), x);
}

/* Runs one backend and its backward pass with weights; *out: o, dq, dk, dv. */
static void run(te_module *m, const te_attn_inputs *in, float *out[4]) {
    te_attn_inputs x = *in;
    te_ctx *te = te_module_ctx(m);
    te_tensor *leaf[3] = {te_tensor_detach(in->q), te_tensor_detach(in->k), te_tensor_detach(in->v)}, *y;
    for (int i = 0; i < 3; i++) te_tensor_set_requires_grad(leaf[i], true);
    x.q = leaf[0], x.k = leaf[1], x.v = leaf[2];
    y = te_attn_forward(m, &x);
    REQUIRE_OK(te);
    REQUIRE(y != NULL);
    te_backward_from(y, test_tensor(te, te_tensor_dtype(y), te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 77)));
    REQUIRE_OK(te);
    out[0] = test_copy(test_read(y), te_tensor_numel(y));
    for (int i = 0; i < 3; i++) out[1 + i] = test_copy(test_read(te_tensor_grad(leaf[i])), te_tensor_numel(leaf[i]));
}

/* Windows, padding and plain causal attention: all backends agree with the formula, and with each other in their gradients. */
TE_TEST_DEVICES(backends_agree) {
    static const shape shapes[] = {{2, 10, 10, 8, 4, 64, 64}, {1, 33, 33, 4, 2, 16, 12}, {2, 140, 140, 2, 1, 24, 24}, {1, 5, 5, 3, 3, 7, 9}};
    static const int64_t lengths[] = {7, 4};
    static const te_dtype formats[] = {TE_F32, TE_BF16};
    for (int t = 0; t < COUNT(shapes) * 6; t += test_every_odd(2)) {
        const shape *s = &shapes[t / 6];
        const te_dtype dtype = formats[t % 2];
        const int kind = t / 2 % 3; /* plain, window, padding */
        const float scale = 0.2f;
        te_attn_inputs in = inputs_of(te, dtype, s);
        float *first[4] = {NULL, NULL, NULL, NULL}, *want;
        int64_t real[2] = {s->s_kv, s->s_kv};
        if (kind == 1) in.window = (te_window){true, 3, 0};
        for (int b = 0; kind == 2 && b < 2; b++) real[b] = lengths[b] < s->s_kv ? lengths[b] : s->s_kv;
        if (kind == 2) in.attention_mask = padding(te, s->b, s->s_kv, real);
        want = formula(s, scale, test_read(in.q), test_read(in.k), test_read(in.v), kept(s, kind == 1 ? 4 : -1, 0, kind == 2 ? real : NULL), NULL, NULL);
        for (int n = 0; n < COUNT(backends); n++) {
            te_module *m = make(te, backends[n], s, scale);
            float *got[4];
            const int64_t per_row = s->heads * s->d_v;
            test_case("shape %d, %s, kind %d, backend %d", t / 6, te_dtype_name(dtype), kind, (int)backends[n]);
            CHECK(te_attn_backend_of(m) == backends[n]);
            te_scope_begin(te);
            run(m, &in, got);
            if (kind == 2) /* rows of padding: te leaves 0 there, the others attend */
                for (int64_t b = 0; b < s->b; b++)
                    for (int64_t e = (b * s->s_q + real[b]) * per_row; e < (b + 1) * s->s_q * per_row; e++) got[0][e] = want[e];
            /* bf16: probabilities and outputs are rounded to 8 bits; f32 on the GPU: eager's products are of TF32 */
            test_close(__FILE__, __LINE__, "o", got[0], want, s->b * s->s_q * per_row, dtype == TE_BF16 ? 1.6e-2 : 1e-4, dtype == TE_BF16 ? 1.6e-2 : te_ctx_is_cuda(te) ? 5e-3 : 1e-5);
            for (int i = 1; i < 4 && kind != 2; i++) {
                const int64_t count = i == 1 ? te_tensor_numel(in.q) : i == 2 ? te_tensor_numel(in.k) : te_tensor_numel(in.v);
                if (n) test_close(__FILE__, __LINE__, i == 1 ? "dq" : i == 2 ? "dk" : "dv", got[i], first[i], count, dtype == TE_BF16 ? 3e-2 : 1e-4, dtype == TE_BF16 ? 6e-2 : te_ctx_is_cuda(te) ? 1e-2 : 2e-5);
                else first[i] = got[i];
            }
            te_scope_end(te);
            te_module_destroy(m);
        }
    }
}

/* Fewer queries than keys: sdpa's and eager's windows end at the last key, their plain causal mask begins at the first, as torch has it. */
TE_TEST_DEVICES(backends_with_more_keys) {
    static const shape s = {1, 4, 9, 2, 2, 8, 8};
    te_attn_inputs in = inputs_of(te, TE_F32, &s);
    for (int n = 0; n < 4; n++) {
        te_module *m = make(te, n % 2 ? TE_ATTN_EAGER : TE_ATTN_SDPA, &s, 0.3f);
        const float *want = formula(&s, 0.3f, test_read(in.q), test_read(in.k), test_read(in.v), kept(&s, n < 2 ? -1 : 3, n < 2 ? 0 : 5, NULL), NULL, NULL);
        in.window = (te_window){n >= 2, 2, 0};
        test_case("backend %d, window %d", (int)te_attn_backend_of(m), in.window.on);
        CHECK_TENSOR(te_attn_forward(m, &in), want, 1e-4, te_ctx_is_cuda(te) ? 5e-3 : 1e-5);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* Rows of a mask of elements, 1 where a query sees a key. */
static void check_rows(te_tensor *masked, const char *want) {
    const float *got = masked ? test_read(masked) : NULL;
    REQUIRE(masked && te_tensor_numel(masked) == (int64_t)strlen(want));
    for (int64_t i = 0; want[i]; i++) CHECK_MSG(got[i] == (want[i] == '0'), "element %lld is %g; the rows are %s", (long long)i, (double)got[i], want);
}

TE_TEST_DEVICES(preprocess_vectors) {
    static const shape four = {1, 4, 4, 2, 1, 8, 8}, five = {1, 5, 5, 2, 1, 8, 8};
    static const uint8_t hole[] = {1, 1, 0, 1}, ones[] = {1, 1, 1, 1};
    static const float additive[16] = {0, -1, 2, -3};
    te_module *sdpa = make(te, TE_ATTN_SDPA, &four, 0), *dpa = make(te, TE_ATTN_TE, &four, 0), *flex = make(te, TE_ATTN_FLEX, &four, 0);
    te_attn_module_desc up = {.num_attention_heads = 2, .num_gqa_groups = 1, .num_qk_channels = 8, .upstream_windows = true};
    te_module *upstream = te_initialize_attn_module(te, TE_ATTN_SDPA, &up);
    te_attn_inputs in = inputs_of(te, TE_F32, &four);
    te_attn_args a;
    te_tensor *y;
    /* padding T T F T */
    in.attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(1, 4), hole);
    te_preprocess_args_for_attn(sdpa, &in, &a);
    REQUIRE_OK(te);
    CHECK(!a.is_causal && !a.added && te_tensor_shape(a.q)[1] == 2 && te_tensor_shape(a.q)[2] == 4);
    check_rows(a.masked, "1000110011001101");
    te_preprocess_args_for_attn(dpa, &in, &a);
    REQUIRE_OK(te);
    CHECK(a.call.attn_mask_type == TE_MASK_PADDING_CAUSAL && te_tensor_ndim(a.call.attention_mask) == 4);
    check_rows(a.call.attention_mask, "1101");
    /* nothing is padded */
    in.attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(1, 4), ones);
    te_preprocess_args_for_attn(sdpa, &in, &a);
    CHECK(a.is_causal && !a.masked);
    /* an additive mask of four dimensions goes through as it is */
    in.attention_mask = test_tensor(te, TE_F32, SHAPE(1, 1, 4, 4), additive);
    te_preprocess_args_for_attn(sdpa, &in, &a);
    REQUIRE_OK(te);
    CHECK(!a.is_causal && !a.masked);
    CHECK_BYTES("added", test_read(a.added), additive, sizeof(additive));
    /* windows: upstream's (3, 0) sees 3 keys, which is (2, 0) here */
    in = inputs_of(te, TE_F32, &five);
    in.window = (te_window){true, 3, 0};
    te_preprocess_args_for_attn(upstream, &in, &a);
    check_rows(a.masked, "1000011000111000111000111");
    in.window.left = 2;
    te_preprocess_args_for_attn(sdpa, &in, &a);
    check_rows(a.masked, "1000011000111000111000111");
    CHECK(a.window_keys == 3);
    te_preprocess_args_for_attn(flex, &in, &a);
    CHECK(a.window_keys == 3 && a.is_causal && !a.masked);
    /* te: no window is (-1, 0), others are handed on */
    in.window.on = false;
    te_preprocess_args_for_attn(dpa, &in, &a);
    CHECK(a.call.window.on && a.call.window.left == -1 && a.call.window.right == 0 && !a.call.attn_mask_type);
    in.window = (te_window){true, 512, 0};
    te_preprocess_args_for_attn(dpa, &in, &a);
    CHECK(a.call.window.left == 512 && a.call.window.right == 0 && a.q == in.q);
    /* the round trip of shapes */
    in.window.on = false;
    te_preprocess_args_for_attn(sdpa, &in, &a);
    y = te_attn_compute(sdpa, &a);
    REQUIRE_OK(te);
    CHECK(te_tensor_shape(y)[1] == 2 && te_tensor_shape(y)[2] == 5);
    y = te_postprocess_output_for_attn(sdpa, y);
    REQUIRE(y != NULL);
    CHECK(te_tensor_shape(y)[1] == 5 && te_tensor_shape(y)[2] == 2);
    y = te_attn_forward(dpa, &in);
    REQUIRE(y != NULL);
    CHECK(te_tensor_ndim(y) == 4 && te_tensor_shape(y)[2] == 2 && te_tensor_shape(y)[3] == 8);
    te_module_destroy(sdpa);
    te_module_destroy(dpa);
    te_module_destroy(flex);
    te_module_destroy(upstream);
    CHECK_OK(te);
}

/* Masks of elements, boolean and additive, with grouped heads. */
TE_TEST_DEVICES(whole_masks) {
    static const shape s = {2, 6, 7, 4, 2, 8, 8};
    te_attn_inputs in = inputs_of(te, TE_F32, &s);
    uint8_t *keep = test_alloc(84);
    float *added = test_normal(42, 9);
    for (int i = 0; i < 84; i++) keep[i] = i * 7 % 5 != 0;
    for (int n = 0; n < 6; n++) {
        const te_attn_backend backend = n % 3 == 0 ? TE_ATTN_TE : n % 3 == 1 ? TE_ATTN_SDPA : TE_ATTN_EAGER;
        te_module *m = make(te, backend, &s, 0.4f);
        const bool boolean = n < 3;
        test_case("backend %d, %s", (int)backend, boolean ? "boolean" : "additive");
        in.attention_mask = boolean ? te_tensor_from_host(te, TE_U8, SHAPE(2, 1, 6, 7), keep) : test_tensor(te, TE_F32, SHAPE(1, 1, 6, 7), added);
        CHECK_TENSOR(te_attn_forward(m, &in), formula(&s, 0.4f, test_read(in.q), test_read(in.k), test_read(in.v), boolean ? keep : NULL, boolean ? NULL : added, NULL), 1e-4,
                     te_ctx_is_cuda(te) ? 5e-3 : 1e-5);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* Models mask by the smallest number of a format. A row that is masked whole, of padding, then sees all keys alike, or none: it is no NaN, which the next layer would spread. */
TE_TEST_DEVICES(masks_of_smallest_numbers) {
    static const shape s = {1, 3, 3, 1, 1, 4, 4};
    static const te_attn_backend some[] = {TE_ATTN_TE, TE_ATTN_SDPA, TE_ATTN_EAGER};
    const float least = -3.3895314e38f, mask[9] = {least, least, least, 0, 0, least, 0, 0, 0}, added[9] = {0, 0, 0, 0, 0, -INFINITY, 0, 0, 0}; /* bf16's */
    te_attn_inputs in = inputs_of(te, TE_F32, &s);
    float *want = formula(&s, 0.25f, test_read(in.q), test_read(in.k), test_read(in.v), NULL, added, NULL), *v = test_read(in.v);
    in.attention_mask = test_tensor(te, TE_F32, SHAPE(1, 1, 3, 3), mask);
    for (int i = 0; i < COUNT(some); i++) {
        te_module *m = make(te, some[i], &s, 0.25f);
        test_case("backend %d", (int)some[i]);
        /* kernels of attention have scores in units of log2, where this one is below f32's range */
        for (int c = 0; c < 4; c++) want[c] = te_ctx_is_cuda(te) && some[i] != TE_ATTN_EAGER ? 0 : (v[c] + v[4 + c] + v[8 + c]) / 3;
        CHECK_TENSOR(te_attn_forward(m, &in), want, 1e-4, te_ctx_is_cuda(te) ? 5e-3 : 1e-5);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

TE_TEST_DEVICES(packed_sequences) {
    static const int32_t starts[] = {0, 3, 8, 12};
    te_attn_module_desc d = {.num_attention_heads = 4, .num_gqa_groups = 2, .num_qk_channels = 16, .qkv_format = TE_THD};
    te_module *m = te_initialize_attn_module(te, TE_ATTN_TE, &d);
    te_tensor *cu = te_tensor_from_host(te, TE_I32, SHAPE(4), starts), *y;
    static const shape all = {1, 12, 12, 4, 2, 16, 16};
    te_attn_inputs flat = inputs_of(te, TE_F32, &all), in = {.cu_seqlens = cu, .cu_seqlens_padded = cu, .max_seqlen = 5};
    te_attn_args a;
    uint8_t *keep = kept(&all, -1, 0, NULL);
    for (int i = 0; i < 12; i++)
        for (int j = 0; j < 12; j++) keep[i * 12 + j] &= (i < 3 ? 0 : i < 8 ? 1 : 2) == (j < 3 ? 0 : j < 8 ? 1 : 2);
    in.q = te_tensor_view(flat.q, 3, (const int64_t[]){12, 4, 16});
    in.k = te_tensor_view(flat.k, 3, (const int64_t[]){12, 2, 16});
    in.v = te_tensor_view(flat.v, 3, (const int64_t[]){12, 2, 16});
    te_preprocess_args_for_attn(m, &in, &a);
    REQUIRE_OK(te);
    CHECK(a.call.cu_seqlens_q == cu && a.call.cu_seqlens_kv == cu && a.call.cu_seqlens_kv_padded == cu && a.call.pad_between_seqs == TE_ON && a.call.max_seqlen_kv == 5);
    y = te_attn_forward(m, &in);
    REQUIRE_OK(te);
    CHECK(te_tensor_ndim(y) == 3);
    CHECK_TENSOR(y, formula(&all, 0.25f, test_read(flat.q), test_read(flat.k), test_read(flat.v), keep, NULL, NULL), 1e-4, 1e-5);
    in = (te_attn_inputs){.q = in.q, .k = in.k, .v = in.v, .cu_seqlens_q = cu, .cu_seqlens_kv = cu, .max_seqlen_q = 5};
    te_preprocess_args_for_attn(m, &in, &a);
    CHECK(a.call.cu_seqlens_q == cu && a.call.cu_seqlens_kv == cu && !a.call.pad_between_seqs && a.call.max_seqlen_q == 5 && !a.call.max_seqlen_kv);
    in.cu_seqlens_kv = NULL;
    CHECK(te_preprocess_args_for_attn(m, &in, &a) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "cu_seqlens_kv is NULL; give cu_seqlens, or cu_seqlens_q and cu_seqlens_kv");
    te_module_destroy(m);
}

/* Flex with sinks: the formula, and te with the same numbers as softmax_offset, with their gradients; and the count of block masks. */
TE_TEST_DEVICES(flex_sinks_and_masks) {
    static const shape s = {2, 40, 40, 4, 2, 16, 12};
    te_attn_module_desc d = {.num_attention_heads = 4, .num_gqa_groups = 2, .num_qk_channels = 16, .num_v_channels = 12, .softmax_scale = 0.2f, .softmax_type = TE_SOFTMAX_LEARNABLE};
    te_module *flex = make(te, TE_ATTN_FLEX, &s, 0.2f), *dpa = te_initialize_attn_module(te, TE_ATTN_TE, &d), *other;
    te_tensor *sinks = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(4), test_normal(4, 5)), true), *offset = te_module_parameter(dpa, "softmax_offset"), *y, *w;
    static const shape again = {1, 40, 40, 4, 2, 16, 12};
    CHECK(te_flex_block_mask_count(te) == 0);
    for (int t = 0; t < 4; t++) {
        te_attn_inputs in = inputs_of(te, t % 2 ? TE_BF16 : TE_F32, &s);
        const double tol = t % 2 ? 1e-2 : te_ctx_is_cuda(te) ? 1e-4 : 1e-5; /* upstream's for bf16 */
        in.window = (te_window){true, t < 2 ? 7 : 15, 0};
        in.sink_weights = sinks;
        test_case("window %lld, %s", (long long)in.window.left, te_dtype_name(te_tensor_dtype(in.q)));
        te_tensor_zero_grad(sinks);
        te_tensor_zero_grad(offset);
        y = te_attn_forward(flex, &in);
        REQUIRE_OK(te);
        CHECK_TENSOR(y, formula(&s, 0.2f, test_read(in.q), test_read(in.k), test_read(in.v), kept(&s, t < 2 ? 8 : 16, 0, NULL), NULL, test_read(sinks)), tol, tol);
        w = test_tensor(te, te_tensor_dtype(y), te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 77));
        te_backward_from(y, w);
        in.sink_weights = NULL;
        te_tensor_copy(offset, sinks);
        te_backward_from(te_attn_forward(dpa, &in), w);
        REQUIRE_OK(te);
        CHECK_TENSOR(te_tensor_grad(sinks), test_read(te_tensor_grad(offset)), 1e-4, 1e-4);
        CHECK(te_flex_block_mask_count(te) == (t < 2 ? 1 : 2));
    }
    other = make(te, TE_ATTN_FLEX, &again, 0.2f);
    for (int t = 0; t < 2; t++) { /* another batch size is another entry, and a second call is none */
        te_attn_inputs in = inputs_of(te, TE_F32, &again);
        in.window = (te_window){true, 7, 0};
        te_attn_forward(other, &in);
        CHECK(te_flex_block_mask_count(te) == 3);
    }
    CHECK(te_flex_block_mask(te, 8, 1, 4, 40, 40) == te_flex_block_mask(te, 8, 1, 4, 40, 40));
    te_module_destroy(flex);
    te_module_destroy(dpa);
    te_module_destroy(other);
    CHECK_OK(te);
}

/* Upstream's quirk: with sinks the scale is 1 / sqrt(d). */
/* A window of more keys than any sequence has, whatever its number is. */
TE_TEST_DEVICES(windows_of_all_keys) {
    static const shape s = {1, 5, 9, 2, 2, 8, 8};
    static const te_attn_backend backends[] = {TE_ATTN_FLEX, TE_ATTN_SDPA, TE_ATTN_EAGER};
    for (int k = 0; k < COUNT(backends); k++) {
        te_module *m = make(te, backends[k], &s, 0.3f);
        te_attn_inputs in = inputs_of(te, TE_F32, &s);
        in.window = (te_window){true, 100, 0};
        float *want = test_copy(test_read(te_attn_forward(m, &in)), s.b * s.s_q * s.heads * s.d_v);
        for (int64_t left = INT64_MAX - 1; left > 0; left = left == INT64_MAX ? 0 : INT64_MAX) {
            test_case("backend %d, window %lld", (int)backends[k], (long long)left);
            in.window = (te_window){true, left, 0};
            te_tensor *y = te_attn_forward(m, &in);
            REQUIRE_OK(te);
            CHECK_TENSOR(y, want, 0, 0);
        }
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

TE_TEST_DEVICES(flex_upstream_sink_scale) {
    static const shape s = {1, 9, 9, 2, 2, 16, 16};
    te_attn_module_desc d = {.num_attention_heads = 2, .num_qk_channels = 16, .softmax_scale = 0.7f, .upstream_sink_scale = true};
    te_module *m = te_initialize_attn_module(te, TE_ATTN_FLEX, &d);
    te_attn_inputs in = inputs_of(te, TE_F32, &s);
    const float *sinks = test_normal(2, 5);
    CHECK_TENSOR(te_attn_forward(m, &in), formula(&s, 0.7f, test_read(in.q), test_read(in.k), test_read(in.v), kept(&s, -1, 0, NULL), NULL, NULL), 1e-4, 1e-5);
    in.sink_weights = test_tensor(te, TE_F32, SHAPE(2), sinks);
    CHECK_TENSOR(te_attn_forward(m, &in), formula(&s, 0.25f, test_read(in.q), test_read(in.k), test_read(in.v), kept(&s, -1, 0, NULL), NULL, sinks), 1e-4, 1e-5);
    te_module_destroy(m);
    CHECK_OK(te);
}

/* ---- block masks ---- */

TE_TEST(block_masks_by_hand) {
    te_ctx *te = test_context("cpu");
    te_block_mask_desc d = {.s_q = 300, .s_kv = 300};
    static const uint8_t causal[] = {1, 0, 0, 2, 1, 0, 2, 2, 1}, window[] = {1, 0, 0, 1, 1, 0, 0, 1, 1}, all[] = {2, 2, 2};
    uint8_t got[9];
    te_tensor_to_host(te_create_block_mask(te, &d), got);
    CHECK_BYTES("causal", got, causal, 9);
    d.window = (te_window){true, 100, 0};
    te_tensor_to_host(te_create_block_mask(te, &d), got);
    CHECK_BYTES("window", got, window, 9);
    d = (te_block_mask_desc){.s_q = 5, .s_kv = 300, .mask = TE_MASK_NONE};
    te_tensor_to_host(te_create_block_mask(te, &d), got);
    CHECK_BYTES("all", got, all, 3);
    CHECK_OK(te);
    d.mask = TE_MASK_PADDING;
    CHECK(!te_create_block_mask(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_create_block_mask: mask 4");
    d.s_q = -1;
    CHECK(!te_create_block_mask(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "s_q -1");
    CHECK(!te_flex_block_mask(te, 0, 1, 1, 4, 4));
    CHECK_ERROR(te, TE_ERR_INVALID, "window_keys is 0");
    test_case("no queries");
    CHECK_EQ_INT(te_tensor_numel(te_create_block_mask(te, &(te_block_mask_desc){.batch = 1 << 20, .heads = 1 << 20, .s_kv = 5})), 0);
    CHECK_OK(te);
}

static bool same_document(void *user, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx) {
    (void)b, (void)h;
    ++*(int64_t *)user;
    return q_idx / 150 == kv_idx / 150;
}

/* Documents as a mask_mod on the CPU: blocks that hold nothing of them are not asked about, and nothing else changes; forward and backward, lse and the gradient of a bias, too. */
TE_TEST(block_mask_skips) {
    te_ctx *te = test_context_threads("cpu", 1); /* the function counts its calls */
    int64_t calls = 0, before, with;
    te_block_mask_desc d = {.s_q = 450, .s_kv = 450, .mask_fn = same_document, .user = &calls};
    te_tensor *blocks = te_create_block_mask(te, &d), *bias = te_tensor_normal(te, TE_F32, SHAPE(1, 1, 450, 450), 0, 1);
    float *first[5] = {NULL, NULL, NULL, NULL, NULL};
    static const uint8_t want[] = {1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1};
    uint8_t got[16];
    te_tensor_to_host(blocks, got);
    CHECK_BYTES("blocks", got, want, 16);
    for (int t = 0; t < 2; t++) {
        te_tensor *x[4] = {test_tensor(te, TE_F32, SHAPE(1, 450, 2, 8), test_normal(7200, 1)), test_tensor(te, TE_F32, SHAPE(1, 450, 1, 8), test_normal(3600, 2)),
                           test_tensor(te, TE_F32, SHAPE(1, 450, 1, 8), test_normal(3600, 3)), te_tensor_detach(bias)}, *y;
        te_attn_desc a = {.format = TE_BSHD, .rule = {.score_mod = {.mask_fn = same_document, .user = &calls, .additive = true}, .block_mask = t ? blocks : NULL,
                                                             .core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE}};
        for (int i = 0; i < 4; i++) te_tensor_set_requires_grad(x[i], true);
        a.rule.core_attention_bias = x[3];
        before = calls;
        y = te_attention(x[0], x[1], x[2], &a);
        REQUIRE_OK(te);
        te_backward_from(y, test_tensor(te, TE_F32, SHAPE(1, 450, 2, 8), test_normal(7200, 77)));
        REQUIRE_OK(te);
        if (t == 0) with = calls - before;
        else CHECK_MSG(calls - before < with, "%lld calls of the mask with a block mask, %lld without", (long long)(calls - before), (long long)with);
        for (int i = 0; i < 5; i++) {
            te_tensor *g = i == 4 ? y : te_tensor_grad(x[i]);
            if (t == 0) first[i] = test_copy(test_read(g), te_tensor_numel(g));
            else CHECK_TENSOR(g, first[i], 1e-6, 1e-6); /* runs of sums in f32 begin elsewhere */
        }
    }
}

/* Empty blocks are unseen whatever the masks say, and full ones of a mask_mod are not asked about: block masks that contradict the masks show which of them counts. */
TE_TEST_DEVICES(block_mask_counts) {
    static const uint8_t blocks[] = {1, 1, 0, 1};
    static const shape s = {1, 200, 200, 2, 1, 16, 16};
    static const te_dtype formats[] = {TE_F32, TE_BF16};
    for (int t = 0; t < 4; t++) {
        te_attn_inputs in = inputs_of(te, formats[t % 2], &s);
        te_attn_desc a = {.format = TE_BSHD, .rule.mask = t < 2 ? TE_MASK_CAUSAL : TE_MASK_NONE, .rule.softmax_scale = 0.25f, .rule.block_mask = te_tensor_from_host(te, TE_U8, SHAPE(1, 1, 2, 2), blocks)};
        const double tol = formats[t % 2] == TE_BF16 ? 1.6e-2 : 2e-5; /* probabilities and outputs are rounded to 8 bits */
        uint8_t *keep = test_alloc(200 * 200);
        float *parts[4];
        te_tensor *y;
        for (int i = 0; i < 200; i++)
            for (int j = 0; j < 200; j++) keep[i * 200 + j] = (t >= 2 || j <= i) && !(i >= 128 && j < 128);
        test_case("mask %d %s", (int)a.rule.mask, te_dtype_name(formats[t % 2]));
        (void)parts;
        te_tensor_set_requires_grad(in.k, true);
        y = te_attention(in.q, in.k, in.v, &a);
        REQUIRE_OK(te);
        CHECK_TENSOR(y, formula(&s, 0.25f, test_read(in.q), test_read(in.k), test_read(in.v), keep, NULL, NULL), tol, tol);
        if (t < 2) continue; /* the gradient: queries of the second block do not reach keys of the first */
        te_backward_from(te_tensor_narrow(y, 1, 128, 72), te_tensor_full(te, formats[t % 2], SHAPE(1, 72, 2, 16), 1));
        REQUIRE_OK(te);
        for (int64_t i = 0; i < 128 * 16; i++) CHECK(test_read(te_tensor_grad(in.k))[i] == 0);
    }
}

/* ---- what the backends run ---- */

typedef struct counts {
    int attention, products, softmaxes, blocks, masks;
} counts;
static void count_op(te_ctx *te, const te_trace *e, void *user) {
    counts *c = user;
    (void)te;
    if (e->phase != TE_TRACE_BEFORE) return;
    if (e->op == TE_OP_GROUPED_GEMM) c->products++;
    if (e->op == TE_OP_SOFTMAX_FWD) c->softmaxes++;
    if (e->op != TE_OP_ATTN_FWD) return;
    c->attention++;
    c->blocks += ((const te_op_attn_fwd_args *)e->args)->rule.block_mask != NULL;
    c->masks += ((const te_op_attn_fwd_args *)e->args)->rule.attention_mask != NULL;
}
TE_TEST_DEVICES(backends_run_their_own_operations) {
    static const shape s = {1, 6, 6, 2, 2, 8, 8};
    static const counts want[] = {{1, 0, 0, 0, 0}, {1, 0, 0, 0, 1}, {1, 0, 0, 1, 0}, {0, 2, 1, 0, 0}};
    te_attn_inputs in = inputs_of(te, TE_F32, &s);
    in.window = (te_window){true, 2, 0};
    for (int n = 0; n < COUNT(backends); n++) {
        te_module *m = make(te, backends[n], &s, 0);
        counts got = {0, 0, 0, 0, 0};
        te_set_trace(te, count_op, &got);
        te_attn_forward(m, &in);
        te_set_trace(te, NULL, NULL);
        test_case("backend %d", (int)backends[n]);
        CHECK_BYTES("operations", &got, &want[n], sizeof(got));
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* A call makes the masks, which a graph then finds. */
TE_TEST_DEVICES(backends_in_a_graph) {
    static const shape s = {1, 6, 6, 2, 2, 8, 8};
    te_attn_inputs in = inputs_of(te, TE_F32, &s);
    in.window = (te_window){true, 2, 0};
    for (int n = 0; n < COUNT(backends); n++) {
        te_module *m = make(te, backends[n], &s, 0);
        const float *want = test_copy(test_read(te_attn_forward(m, &in)), 96);
        te_graph *graph;
        te_tensor *y;
        test_case("backend %d", (int)backends[n]);
        te_graph_begin(te);
        y = te_attn_forward(m, &in);
        graph = te_graph_end(te);
        REQUIRE_OK(te);
        te_graph_launch(graph);
        CHECK_BYTES("o", test_read(y), want, 96 * sizeof(float));
        te_graph_destroy(graph);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* te_forward_with takes the three as it takes DotProductAttention: its masks, and heads joined. */
TE_TEST_DEVICES(backends_as_modules) {
    static const shape s = {2, 6, 6, 2, 1, 8, 8};
    static const uint8_t masked[] = {0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1};
    te_attn_inputs in = inputs_of(te, TE_F32, &s);
    float *first = NULL;
    for (int n = 0; n < COUNT(backends); n++) {
        te_module *m = make(te, backends[n], &s, 0);
        te_forward_args args = {.input = in.q, .key = in.k, .value = in.v,
                                .attention = {.attn_mask_type = TE_MASK_PADDING_CAUSAL, .attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(2, 1, 1, 6), masked)}};
        te_tensor *y = te_forward_with(m, &args);
        float *got;
        test_case("backend %d", (int)backends[n]);
        REQUIRE_OK(te);
        CHECK(te_tensor_ndim(y) == 3 && te_tensor_shape(y)[2] == 16);
        got = test_copy(test_read(y), te_tensor_numel(y));
        for (int i = 0; i < 32; i++) got[64 + i] = 0; /* rows of padding: te leaves 0 there */
        for (int i = 0; i < 16; i++) got[176 + i] = 0;
        if (first) test_close(__FILE__, __LINE__, "o", got, first, te_tensor_numel(y), 1e-4, te_ctx_is_cuda(te) ? 5e-3 : 1e-5);
        else first = got;
        if (n) {
            args.attention.alibi_slopes = in.q;
            CHECK(!te_forward_with(m, &args));
            CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "an option of the call (attn_mask_type 5) is te's alone");
            args.attention.alibi_slopes = NULL, args.attention.pad_between_seqs = TE_ON;
            CHECK(!te_forward_with(m, &args));
            CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "attention: pad_between_seqs: an option of the call");
            args.attention.pad_between_seqs = TE_DEFAULT, args.attention.cu_seqlens_q_padded = in.q;
            CHECK(!te_forward_with(m, &args));
            CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "packed sequences are te's alone");
        }
        te_module_destroy(m);
    }
}

/* Every implementation of the core runs again in the backward pass if the call says so: the same bits, dropout's too. */
TE_TEST_DEVICES(backends_checkpoint_their_core) {
    static const shape s = {2, 6, 6, 2, 1, 8, 8};
    for (int n = 0; n <= COUNT(backends); n++) {
        te_attn_module_desc d = {.num_attention_heads = 2, .num_gqa_groups = 1, .num_qk_channels = 8, .dropout_p = n < 2 ? 0.3f : 0};
        te_module *m = n < COUNT(backends) ? te_initialize_attn_module(te, backends[n], &d) : te_sdpa_create(te, &(te_sdpa_desc){.format = TE_BSHD, .rule.dropout_p = 0.3f});
        float *out[2][4];
        test_case("implementation %d", n);
        for (int again = 0; again < 2; again++) {
            te_attn_inputs in = inputs_of(te, TE_F32, &s);
            te_forward_args args = {.input = te_tensor_set_requires_grad(in.q, true), .key = te_tensor_set_requires_grad(in.k, true), .value = te_tensor_set_requires_grad(in.v, true), .attention.checkpoint_core_attention = again};
            te_seed(te, 3);
            te_tensor *y = te_forward_with(m, &args), *x[4] = {y, in.q, in.k, in.v};
            REQUIRE_OK(te);
            te_backward_from(y, test_tensor(te, TE_F32, te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 77)));
            REQUIRE_OK(te);
            for (int i = 0; i < 4; i++) out[again][i] = test_copy(test_read(i ? te_tensor_grad(x[i]) : y), te_tensor_numel(x[i]));
            for (int i = 0; again && i < 4; i++) CHECK_BYTES(i ? "gradient" : "o", out[1][i], out[0][i], (size_t)te_tensor_numel(x[i]) * sizeof(float));
        }
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

TE_TEST(attention_backend_refusals) {
    te_ctx *te = test_context("cpu");
    static const shape s = {1, 4, 4, 2, 2, 8, 8};
    te_attn_module_desc d = {.num_attention_heads = 2, .num_qk_channels = 8};
    te_attn_inputs in = inputs_of(te, TE_F32, &s);
    te_attn_args a;
    te_module *m;
    CHECK(!te_initialize_attn_module(te, TE_ATTN_TILELANG, &d));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "Unsupported attention implementation: tilelang (5)");
    CHECK(!te_initialize_attn_module(te, TE_ATTN_CUDNN, &d));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "Unsupported attention implementation: cudnn (6)");
    CHECK(!te_initialize_attn_module(te, (te_attn_backend)99, &d));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "Unsupported attention implementation: unknown (99)");
    CHECK(!te_initialize_attn_module(te, TE_ATTN_MAGI, &d));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "Unsupported attention implementation: magi (7)");
    d.num_v_channels = 4;
    CHECK(!te_initialize_attn_module(te, TE_ATTN_MAGI, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "magi with 8 channels of q and k and 4 of v");
    d.num_v_channels = d.num_qk_channels = 192;
    CHECK(!te_initialize_attn_module(te, TE_ATTN_MAGI, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "one head size, up to 128");
    d.num_v_channels = 0, d.num_qk_channels = 8, d.softmax_type = TE_SOFTMAX_LEARNABLE;
    CHECK(!te_initialize_attn_module(te, TE_ATTN_SDPA, &d));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "softmax_type 2");
    d.softmax_type = TE_SOFTMAX_VANILLA, d.qkv_format = (te_qkv_format)9;
    CHECK(!te_initialize_attn_module(te, TE_ATTN_EAGER, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_attn_module: attn_mask_type 2, qkv_format 9");
    d.qkv_format = TE_BSHD, d.dropout_p = 0.1f;
    CHECK(!te_initialize_attn_module(te, TE_ATTN_FLEX, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "dropout_p 0.1 with flex");
    d.dropout_p = 0, d.num_gqa_groups = 3;
    CHECK(!te_initialize_attn_module(te, TE_ATTN_TE, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "2 heads in 3 groups");
    d.num_gqa_groups = 2;
    m = te_initialize_attn_module(te, TE_ATTN_DEFAULT, &d);
    CHECK(te_attn_backend_of(m) == TE_ATTN_SDPA && strcmp(te_module_name(m), "attn_module") == 0);
    in.cu_seqlens = te_tensor_zeros(te, TE_I32, SHAPE(2));
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "sdpa attention: cu_seqlens or max_seqlen is given");
    in.cu_seqlens = NULL, in.sink_weights = te_tensor_zeros(te, TE_F32, SHAPE(2));
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "sink_weights are flex's");
    in.sink_weights = NULL, in.attention_mask = te_tensor_zeros(te, TE_U8, SHAPE(1, 3));
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_SHAPE, "attention_mask is [1, 3], q [1, 4, 2, 8] and k [1, 4, 2, 8]; padding [1, 4]");
    in.attention_mask = te_tensor_zeros(te, TE_F32, SHAPE(1, 4));
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_DTYPE, "attention_mask is f32 [1, 4]");
    in.attention_mask = te_tensor_zeros(te, TE_U8, SHAPE(1, 1, 4, 4)), in.window = (te_window){true, 2, 0};
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_INVALID, "window (2, 0) beside an attention_mask of four dimensions");
    in.attention_mask = NULL, in.is_causal = TE_OFF;
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_INVALID, "window (2, 0) without a causal mask");
    in.q = te_tensor_zeros(te, TE_F32, SHAPE(1, 4, 3, 8));
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_SHAPE, "q is [1, 4, 3, 8]");
    in.q = NULL;
    CHECK(te_preprocess_args_for_attn(m, &in, &a) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "q is NULL");
    in = inputs_of(te, TE_F32, &s);
    te_forward_args call = {.input = in.q, .key = in.k, .value = in.v, .attention.attention_mask = te_tensor_zeros(te, TE_U8, SHAPE(4))};
    CHECK(!te_forward_with(m, &call));
    CHECK_ERROR(te, TE_ERR_SHAPE, "attention_mask is [4], q [1, 4, 2, 8]");
    te_module_destroy(m);
    m = te_initialize_attn_module(te, TE_ATTN_TE, &d);
    in.window = (te_window){true, 2, 0}, in.is_causal = TE_OFF;
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_INVALID, "te attention: window (2, 0) without a causal mask");
    te_module_destroy(m);
    m = te_linear_create(te, &(te_linear_desc){.in_features = 2, .out_features = 2});
    CHECK(te_attn_backend_of(m) == TE_ATTN_DEFAULT && te_attn_backend_of(NULL) == TE_ATTN_DEFAULT);
    in = inputs_of(te, TE_F32, &s);
    CHECK(!te_attn_forward(m, &in));
    CHECK_ERROR(te, TE_ERR_INVALID, "the module is a Linear; one of te_initialize_attn_module is needed");
    te_module_destroy(m);
}
