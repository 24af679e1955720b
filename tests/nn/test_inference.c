/* Caches of keys and values: layers that decode step by step, sequences of different lengths that begin and end while others go on, in all formats, plain and in pages, against whole
 * sequences at once; a cache that is full; refusals. */
#include "../dist/ranks.h"

enum { H = 4, G = 2, D = 8, WIDE = 32, LAYERS = 2, MOST = 24, SEQUENCES = 5, STEPS = 9 };

typedef struct setup {
    te_qkv_format format;
    te_dtype dtype;
    int64_t page_size, pages; /* 0: plain */
    te_qk_norm norm;
    te_window window;
    te_softmax_type softmax;
    bool learned_bias, decoder;
    int64_t channels; /* of a head; 0: D */
    bool codes;       /* the cache is in E4M3 */
} setup;

/* Sequences' tokens, and the steps in which they come: the new tokens of each, 0 for a sequence that is not there. Sequence 1 ends after step 3, 3 begins in 4, 4 when 0 has
 * ended. */
static const int64_t length[SEQUENCES] = {12, 6, 17, 9, 5};
static const int64_t steps[STEPS][SEQUENCES] = {{5, 3, 0, 0, 0}, {1, 1, 7, 0, 0}, {1, 1, 1, 0, 0}, {1, 1, 1, 0, 0}, {3, 0, 1, 4, 0},
                                                {1, 0, 4, 1, 0}, {0, 0, 1, 1, 2}, {0, 0, 1, 2, 1}, {0, 0, 1, 1, 2}};

static te_module *make_layers(te_ctx *te, const setup *c) {
    te_module *layers[LAYERS];
    te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = WIDE, .attention.num_attention_heads = H, .attention.num_gqa_groups = G, .norm.normalization = TE_RMSNORM,
                                   .gemm.init.std = 0.2f, .output_layer_init.std = 0.2f};
    d.gemm.params_dtype = c->dtype;
    d.attention.qkv_format = c->format;
    d.attention.qk_norm_type = c->norm;
    d.attention.window = c->window;
    d.attention.softmax_type = c->softmax;
    d.attention.kv_channels = c->channels;
    d.layer_type = c->decoder ? TE_LAYER_DECODER : TE_LAYER_ENCODER;
    te_seed(te, 21);
    for (int i = 0; i < LAYERS; i++) layers[i] = te_transformer_layer_create(te, &d);
    return te_sequential_create(te, layers, LAYERS);
}
static te_inference_params *make_cache(te_ctx *te, const setup *c) {
    te_inference_params_desc d = {.max_batch_size = 3, .max_sequence_length = MOST, .num_heads_kv = G, .head_dim_k = c->channels ? c->channels : D, .dtype = c->codes ? TE_F8E4M3 : c->dtype};
    d.is_paged = c->page_size > 0;
    d.page_size = c->page_size;
    d.total_num_pages = c->pages;
    return te_inference_params_create(te, &d);
}
static const float *tokens_of(int sequence) { return test_normal(length[sequence] * WIDE, 30 + (uint64_t)sequence); }
/* The keys of cross attention: one row for each of `n` sequences, all alike. */
static te_tensor *encoded(te_ctx *te, const setup *c, int64_t n) {
    float *x = test_floats(n * 3 * WIDE), *one = test_normal(3 * WIDE, 8);
    for (int64_t i = 0; i < 3; i++)
        for (int64_t b = 0; b < n; b++) memcpy(x + (c->format == TE_BSHD ? b * 3 + i : i * n + b) * WIDE, one + i * WIDE, WIDE * sizeof(float));
    return test_tensor(te, c->dtype, SHAPE(c->format == TE_BSHD ? n : 3, c->format == TE_BSHD ? 3 : n, WIDE), x);
}

/* A sequence at once, without a cache or, if that has codes, as the first step of one. */
static float *whole(te_ctx *te, te_module *m, const setup *c, int sequence, const te_rotary_desc *rotary) {
    const int64_t n = length[sequence];
    te_tensor *x = c->format == TE_THD ? test_tensor(te, c->dtype, SHAPE(n, WIDE), tokens_of(sequence))
                                       : test_tensor(te, c->dtype, SHAPE(c->format == TE_BSHD ? 1 : n, c->format == TE_BSHD ? n : 1, WIDE), tokens_of(sequence));
    te_forward_args args = {.input = x, .rotary = rotary};
    if (c->decoder) args.encoder_output = encoded(te, c, 1);
    if (c->codes) {
        te_inference_params *cache = make_cache(te, c);
        te_inference_params_pre_step(cache, (const int64_t[]){1}, &n, 1);
        args.attention.inference_params = cache;
        float *y = test_read(te_forward_with(m, &args));
        te_inference_params_destroy(cache);
        return y;
    }
    if (c->format == TE_THD) args.attention.attn_mask_type = TE_MASK_PADDING_CAUSAL, args.attention.cu_seqlens_q = test_i32(te, SHAPE(2), (const int64_t[]){0, n});
    return test_read(te_forward_with(m, &args));
}

/* Where token `i` of the step's sequence number `b` lies among the rows of x. */
static int64_t row_of(const setup *c, int64_t b, int64_t i, int64_t n, int64_t longest, const int64_t *start) {
    return c->format == TE_THD ? start[b] + i : c->format == TE_BSHD ? b * longest + i : i * n + b;
}
/* One step: the sequences with new tokens; each one's outputs go behind those that out[sequence] has. Padding holds NaN, which must reach no token. */
static void run_step(te_ctx *te, te_module *m, const setup *c, te_inference_params *cache, const int64_t *step, const te_rotary_desc *rotary, int64_t *done, float **out) {
    int64_t ids[SEQUENCES], lens[SEQUENCES], start[SEQUENCES + 1] = {0}, n = 0, longest = 0;
    for (int s = SEQUENCES - 1; s >= 0; s--) { /* in no order of their numbers */
        if (!step[s]) continue;
        ids[n] = s, lens[n] = step[s], start[n + 1] = start[n] + step[s];
        if (longest < step[s]) longest = step[s];
        n++;
    }
    const int64_t rows = c->format == TE_THD ? start[n] : n * longest;
    float *x = test_floats(rows * WIDE);
    for (int64_t i = 0; i < rows * WIDE; i++) x[i] = NAN;
    for (int64_t b = 0; b < n; b++)
        for (int64_t i = 0; i < lens[b]; i++) memcpy(x + row_of(c, b, i, n, longest, start) * WIDE, tokens_of((int)ids[b]) + (done[ids[b]] + i) * WIDE, WIDE * sizeof(float));
    te_inference_params_pre_step(cache, ids, lens, n);
    te_tensor *in = c->format == TE_THD ? test_tensor(te, c->dtype, SHAPE(rows, WIDE), x)
                                        : test_tensor(te, c->dtype, SHAPE(c->format == TE_BSHD ? n : longest, c->format == TE_BSHD ? longest : n, WIDE), x);
    te_forward_args args = {.input = in, .rotary = rotary, .attention.inference_params = cache};
    if (c->decoder) args.encoder_output = encoded(te, c, n);
    float *y = test_read(te_forward_with(m, &args));
    for (int64_t b = 0; b < n; b++)
        for (int64_t i = 0; i < lens[b]; i++) memcpy(out[ids[b]] + done[ids[b]]++ * WIDE, y + row_of(c, b, i, n, longest, start) * WIDE, WIDE * sizeof(float));
}
static void check_setup(te_ctx *te, const setup *c) {
    const te_rotary_desc rotary = {.base = 50, .seq_len_interpolation_factor = 1.5f, .pretrained_max_position_embeddings = 8, .max_seqlen = MOST}; /* squeezed alike in all steps */
    /* f32: sums over channels may be cut elsewhere in a product of more rows; bf16: a rounding that turns the other way moves an element by 2^-8 of it, and each of two layers has a few
     * behind each other; on CUDA products of f32 are TF32, good for 2^-11 each */
    /* codes: where such a difference makes a key or a value get a neighbouring code, that is 1/8 away; of f32 on the CPU none does */
    const double near = (c->dtype != TE_F32 ? 6e-2 : te_ctx_is_cuda(te) ? 1e-2 : 2e-5) * (c->codes && (c->dtype != TE_F32 || te_ctx_is_cuda(te)) ? 4 : 1);
    float *out[SEQUENCES];
    int64_t done[SEQUENCES] = {0};
    te_module *m = make_layers(te, c);
    te_inference_params *cache = make_cache(te, c);
    REQUIRE_OK(te);
    for (int s = 0; s < SEQUENCES; s++) out[s] = test_floats(length[s] * WIDE);
    te_no_grad_begin(te);
    for (int i = 0; i < STEPS; i++) run_step(te, m, c, cache, steps[i], &rotary, done, out);
    REQUIRE_OK(te);
    for (int s = 0; s < SEQUENCES; s++) {
        CHECK_EQ_INT(done[s], length[s]);
        CHECK(te_inference_params_seqlen(cache, s) == (steps[STEPS - 1][s] ? done[s] : 0));
        CHECK_CLOSE("tokens", out[s], whole(te, m, c, s, &rotary), done[s] * WIDE, near, near);
    }
    te_no_grad_end(te);
    CHECK_EQ_INT(te_inference_params_num_sequences(cache), 3);
    te_module_destroy(m);
    te_inference_params_destroy(cache);
    CHECK_OK(te);
}
TE_TEST_DEVICES(inference_equals_the_whole) {
    static const int64_t page_sizes[] = {0, 4, 1, 24};
    for (int format = TE_SBHD; format <= TE_THD; format++)
        for (int p = 0; p < COUNT(page_sizes); p++)
            for (int dtype = 0; dtype < 2; dtype++) {
                if ((8 * (format - TE_SBHD) + 2 * p + dtype) % test_every_odd(1)) continue;
                const setup c = {.format = (te_qkv_format)format, .dtype = dtype ? TE_BF16 : TE_F32, .page_size = page_sizes[p]};
                test_case("format %d, pages of %lld, %s", format, (long long)page_sizes[p], te_dtype_name(c.dtype));
                te_scope_begin(te);
                check_setup(te, &c);
                te_scope_end(te);
            }
}
TE_TEST_DEVICES(inference_with_other_options) {
    const setup list[] = {{.format = TE_BSHD, .dtype = TE_F32, .norm = TE_QK_NORM_RMSNORM, .page_size = 8},
                          {.format = TE_THD, .dtype = TE_F32, .norm = TE_QK_NORM_L2, .page_size = 4, .pages = 11},
                          {.format = TE_SBHD, .dtype = TE_F32, .window = {true, 3, 0}},
                          {.format = TE_BSHD, .dtype = TE_F32, .softmax = TE_SOFTMAX_OFF_BY_ONE, .window = {true, 5, 0}, .page_size = 2},
                          {.format = TE_SBHD, .dtype = TE_F32, .decoder = true, .page_size = 8},
                          {.format = TE_BSHD, .dtype = TE_F16, .decoder = true},
                          {.format = TE_BSHD, .dtype = TE_F32, .channels = 320, .page_size = 8}, /* which attention goes through in chunks */
                          {.format = TE_THD, .dtype = TE_F32, .channels = 516},
                          {.format = TE_BSHD, .dtype = TE_F32, .codes = true},
                          {.format = TE_SBHD, .dtype = TE_F32, .codes = true, .page_size = 4, .norm = TE_QK_NORM_RMSNORM},
                          {.format = TE_THD, .dtype = TE_F32, .codes = true, .page_size = 8, .channels = 48},
                          {.format = TE_SBHD, .dtype = TE_BF16, .codes = true, .page_size = 8, .channels = 64},
                          {.format = TE_BSHD, .dtype = TE_F16, .codes = true, .channels = 32, .window = {true, 3, 0}}};
    for (int i = 0; i < COUNT(list); i++) {
        test_case("setup %d", i);
        te_scope_begin(te);
        check_setup(te, &list[i]);
        te_scope_end(te);
    }
}

/* A step that is refused changes nothing: the sequences that stay go on as if it had not been tried. */
TE_TEST_DEVICES(inference_full_cache_loses_nothing) {
    const setup c = {.format = TE_BSHD, .dtype = TE_F32, .page_size = 4, .pages = 6};
    const te_rotary_desc rotary = {.base = 50};
    const double near = te_ctx_is_cuda(te) ? 1e-2 : 2e-5; /* as above */
    float *out[SEQUENCES];
    int64_t done[SEQUENCES] = {0};
    te_module *m = make_layers(te, &c);
    te_inference_params *cache = make_cache(te, &c);
    REQUIRE_OK(te);
    for (int s = 0; s < SEQUENCES; s++) out[s] = test_floats(length[s] * WIDE);
    te_no_grad_begin(te);
    CHECK_EQ_INT(te_inference_params_free_pages(cache), 6);
    run_step(te, m, &c, cache, (const int64_t[]){8, 3, 7, 0, 0}, &rotary, done, out); /* 2 + 1 + 2 pages */
    REQUIRE_OK(te);
    CHECK_EQ_INT(te_inference_params_free_pages(cache), 1);
    CHECK(te_inference_params_pre_step(cache, (const int64_t[]){0, 1, 2}, (const int64_t[]){1, 1, 2}, 3) == TE_ERR_STATE); /* 1 + 0 + 1 */
    CHECK_ERROR(te, TE_ERR_STATE, "the 3 sequences need 2 more pages of 4 tokens, and 1 are free (total_num_pages 6)");
    CHECK(te_inference_params_pre_step(cache, (const int64_t[]){0, 1, 2, 3}, (const int64_t[]){1, 1, 1, 1}, 4) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "4 sequences, and the cache has room for 3 (max_batch_size)");
    CHECK(te_inference_params_pre_step(cache, (const int64_t[]){0, 1}, (const int64_t[]){1, 22}, 2) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "sequence 1 would have 25 tokens (3 and 22 new ones), and the cache has room for 24 of each");
    CHECK(te_inference_params_pre_step(cache, (const int64_t[]){0, 0}, (const int64_t[]){1, 1}, 2) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "sequence 0 is twice in the list of 2");
    CHECK(te_inference_params_pre_step(cache, (const int64_t[]){9, 9}, (const int64_t[]){1, 1}, 2) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "sequence 9 is twice");
    CHECK(te_inference_params_pre_step(cache, (const int64_t[]){0}, (const int64_t[]){0}, 1) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "sequence 0 has 0 new tokens; 1 to 24 (max_ctx_len) are possible");
    CHECK_EQ_INT(te_inference_params_num_sequences(cache), 3);
    CHECK_EQ_INT(te_inference_params_seqlen(cache, 2), 7);
    run_step(te, m, &c, cache, (const int64_t[]){1, 0, 2, 0, 0}, &rotary, done, out); /* 1 gives its page back */
    CHECK_EQ_INT(te_inference_params_free_pages(cache), 0);
    run_step(te, m, &c, cache, (const int64_t[]){3, 0, 3, 0, 0}, &rotary, done, out);
    REQUIRE_OK(te);
    for (int s = 0; s < 3; s += 2) CHECK_CLOSE("tokens", out[s], whole(te, m, &c, s, &rotary), done[s] * WIDE, near, near);
    te_inference_params_reset(cache);
    CHECK_EQ_INT(te_inference_params_free_pages(cache), 6);
    memset(done, 0, sizeof done);
    run_step(te, m, &c, cache, (const int64_t[]){0, 0, 0, 9, 0}, &rotary, done, out);
    REQUIRE_OK(te);
    CHECK_CLOSE("tokens", out[3], whole(te, m, &c, 3, &rotary), done[3] * WIDE, near, near);
    te_no_grad_end(te);
    te_module_destroy(m);
    te_inference_params_destroy(cache);
}

/* One captured step of decoding serves all later ones: their numbers come from the cache. */
TE_TEST_DEVICES(inference_in_a_graph) {
    for (int n = 0; n < 4; n++) {
        const bool paged = n % 2, codes = n / 2;
        const setup c = {.format = TE_SBHD, .dtype = codes ? TE_BF16 : TE_F32, .page_size = paged ? codes ? 8 : 4 : 0, .codes = codes};
        const te_rotary_desc rotary = {.base = 50};
        enum { TAIL = 5 };
        float *want[TAIL], *first = test_normal(7 * 2 * WIDE, 3), *next = test_normal(TAIL * 2 * WIDE, 4);
        test_case("%s%s", paged ? "in pages" : "plain", codes ? " in e4m3" : "");
        te_module *m = make_layers(te, &c);
        REQUIRE_OK(te);
        te_no_grad_begin(te);
        for (int graphed = 0; graphed < 2; graphed++) {
            te_inference_params *cache = make_cache(te, &c);
            te_tensor *x = te_tensor_empty(te, c.dtype, SHAPE(1, 2, WIDE)), *y = NULL;
            te_graph *graph = NULL;
            te_forward_args args = {.input = test_tensor(te, c.dtype, SHAPE(7, 2, WIDE), first), .rotary = &rotary, .attention.inference_params = cache};
            te_inference_params_allocate_memory(cache, m);
            te_inference_params_pre_step(cache, (const int64_t[]){3, 4}, (const int64_t[]){7, 5}, 2);
            te_forward_with(m, &args);
            args.input = x;
            for (int i = 0; i < TAIL; i++) {
                te_tensor_copy(x, test_tensor(te, TE_F32, SHAPE(1, 2, WIDE), next + i * 2 * WIDE));
                te_inference_params_pre_step(cache, (const int64_t[]){3, 4}, (const int64_t[]){1, 1}, 2);
                REQUIRE_OK(te);
                if (!graphed || i == 0) y = te_forward_with(m, &args);
                else if (i == 1) {
                    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
                    y = te_tensor_retain(te_forward_with(m, &args));
                    graph = te_graph_end(te);
                }
                if (graph) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
                REQUIRE_OK(te);
                if (graphed) CHECK_BYTES("step", test_read(y), want[i], 2 * WIDE * sizeof(float));
                else want[i] = test_read(y);
            }
            if (graph) { /* one sequence has ended: its place is there, and changes nothing for the other */
                te_forward_args one = {.input = test_tensor(te, c.dtype, SHAPE(1, 1, WIDE), next), .rotary = &rotary, .attention.inference_params = cache};
                const double near = codes ? 6e-2 : te_ctx_is_cuda(te) ? 1e-2 : 2e-5; /* a product of one row may be summed up otherwise; TF32 on CUDA; bf16 */
                te_tensor_copy(x, test_tensor(te, TE_F32, SHAPE(1, 2, WIDE), next));
                te_inference_params_pre_step(cache, (const int64_t[]){3}, (const int64_t[]){1}, 1);
                CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
                CHECK_CLOSE("the other sequence", test_read(te_forward_with(m, &one)), test_read(y), WIDE, near, near);
            }
            if (graph) te_tensor_release(y);
            te_graph_destroy(graph);
            te_inference_params_destroy(cache);
        }
        te_no_grad_end(te);
        te_module_destroy(m);
        CHECK_OK(te);
    }
}

/* The cores by themselves: heads of values that are larger, and attention of the program's own, which adds to the cache itself. */
typedef struct own_attention {
    te_inference_params *cache;
    int calls;
} own_attention;
static te_result attend(te_module *m, te_forward_args *args) {
    own_attention *own = (own_attention *)args->user;
    te_inference_step step;
    te_attn_desc a = {.format = TE_SBHD};
    te_result result = te_inference_params_step(own->cache, m, args->key, args->value, TE_SBHD, &step);
    if (result != TE_OK) return result;
    own->calls++;
    a.rule = step.rule;
    a.rule.mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
    te_tensor *y = te_attention(args->input, step.k, step.v, &a);
    if (!y) return te_error_code(te_module_ctx(m));
    const int64_t *s = te_tensor_shape(y);
    args->outputs.out = te_tensor_view(y, 3, (const int64_t[]){s[0], s[1], s[2] * s[3]});
    return TE_OK;
}
TE_TEST_DEVICES(inference_of_the_cores) {
    enum { DV = 12, TOKENS = 9 };
    te_inference_params_desc room = {.max_batch_size = 1, .max_sequence_length = TOKENS, .num_heads_kv = G, .head_dim_k = D, .head_dim_v = DV, .dtype = TE_F32, .max_ctx_len = 4};
    te_dot_product_attention_desc d = {.attention.num_attention_heads = H, .attention.num_gqa_groups = G, .attention.kv_channels = D};
    te_module *m = te_dot_product_attention_create(te, &d);
    te_inference_params *cache = te_inference_params_create(te, &room);
    te_tensor *part[3];
    for (int i = 0; i < 3; i++) {
        const int64_t heads = i ? G : H, channels = i == 2 ? DV : D;
        part[i] = test_tensor(te, TE_F32, SHAPE(TOKENS, 1, heads, channels), test_normal(TOKENS * heads * channels, 1 + (uint64_t)i));
    }
    REQUIRE_OK(te);
    te_no_grad_begin(te);
    float *want = test_read(te_attention(part[0], part[1], part[2], NULL)), got[TOKENS * H * DV];
    for (int64_t at = 0, n = 4; at < TOKENS; at += n, n = at == 4 ? 3 : 2) { /* 4, 3 and 2 tokens */
        te_inference_params_pre_step(cache, (const int64_t[]){-7}, &n, 1);
        CHECK(test_read(te_inference_params_get_seqlens_pre_step(cache))[0] == (float)at);
        te_forward_args args = {.input = te_tensor_narrow(part[0], 0, at, n), .key = te_tensor_narrow(part[1], 0, at, n), .value = te_tensor_narrow(part[2], 0, at, n)};
        args.attention.inference_params = cache;
        memcpy(got + at * H * DV, test_read(te_forward_with(m, &args)), (size_t)(n * H * DV) * sizeof(float));
        REQUIRE_OK(te);
    }
    CHECK_CLOSE("out", got, want, TOKENS * H * DV, 1e-5, 1e-6); /* one softmax in f32, its keys in other tiles */
    te_inference_params_destroy(cache);
    te_module_destroy(m);

    te_multihead_attention_desc a = {.hidden_size = WIDE, .attention.num_attention_heads = H, .attention.num_gqa_groups = G, .gemm.params_dtype = TE_F32};
    const te_rotary_desc rotary = {.base = 50};
    float *x = test_normal(TOKENS * WIDE, 5), *out[2];
    m = te_multihead_attention_create(te, &a);
    room.head_dim_v = 0;
    for (int run = 0; run < 2; run++) { /* the module's core, and one of the program's */
        own_attention own = {te_inference_params_create(te, &room), 0};
        out[run] = test_floats(TOKENS * WIDE);
        if (run) te_module_set_forward(te_module_find(m, "core_attention"), attend);
        for (int64_t at = 0, n = 3; at < TOKENS; at += n) {
            te_forward_args args = {.input = test_tensor(te, TE_F32, SHAPE(n, 1, WIDE), x + at * WIDE), .rotary = &rotary, .user = &own};
            te_inference_params_pre_step(own.cache, (const int64_t[]){1}, &n, 1);
            args.attention.inference_params = own.cache;
            memcpy(out[run] + at * WIDE, test_read(te_forward_with(m, &args)), (size_t)(n * WIDE) * sizeof(float));
            REQUIRE_OK(te);
        }
        CHECK_EQ_INT(own.calls, run ? 3 : 0);
        te_inference_params_destroy(own.cache);
    }
    CHECK_BYTES("out", out[1], out[0], TOKENS * WIDE * sizeof(float));
    te_no_grad_end(te);
    te_module_destroy(m);
}

/* A layer's pages in one piece: the keys and values that went in, in their order. */
TE_TEST_DEVICES(inference_convert_paged_to_nonpaged) {
    for (int dtype = TE_F32; dtype <= TE_BF16; dtype++) {
        te_inference_params_desc room = {.max_batch_size = 2, .max_sequence_length = 8, .num_heads_kv = G, .head_dim_k = D, .head_dim_v = 3, .dtype = (te_dtype)dtype, .is_paged = true, .page_size = 2};
        te_dot_product_attention_desc d = {.attention.num_attention_heads = G, .attention.kv_channels = D};
        te_module *m = te_dot_product_attention_create(te, &d);
        te_inference_params *cache = te_inference_params_create(te, &room);
        float *kept[2] = {test_floats(2 * 8 * G * D), test_floats(2 * 8 * G * 3)};
        const int64_t lens[2] = {3, 2};
        te_inference_step step;
        te_tensor *whole[2];
        for (int i = 0; i < 2; i++) { /* pages of both take turns */
            te_tensor *new[2];
            te_inference_params_pre_step(cache, (const int64_t[]){5, 6}, lens, 2);
            for (int p = 0; p < 2; p++) {
                const int64_t channels = p ? 3 : D, row = G * channels;
                float *x = test_rounded((te_dtype)dtype, test_normal(2 * 3 * row, (uint64_t)(7 + 2 * i + p)), 2 * 3 * row);
                new[p] = test_tensor(te, (te_dtype)dtype, SHAPE(2, 3, G, channels), x);
                for (int b = 0; b < 2; b++)
                    for (int64_t t = 0; t < lens[b]; t++) memcpy(kept[p] + (b * 8 + i * lens[b] + t) * row, x + (b * 3 + t) * row, (size_t)row * sizeof(float));
            }
            te_no_grad_begin(te);
            te_inference_params_step(cache, m, new[0], new[1], TE_BSHD, &step);
            te_no_grad_end(te);
        }
        te_inference_params_convert_paged_to_nonpaged(cache, m, &whole[0], &whole[1]);
        REQUIRE_OK(te);
        for (int p = 0; p < 2; p++) {
            const int64_t row = G * (p ? 3 : D);
            float *got = test_read(whole[p]);
            CHECK_EQ_INT(te_tensor_shape(whole[p])[1], 8);
            for (int b = 0; b < 2; b++) CHECK_BYTES(p ? "v" : "k", got + b * 8 * row, kept[p] + b * 8 * row, (size_t)(2 * lens[b] * row) * sizeof(float));
        }
        CHECK(te_inference_params_convert_paged_to_nonpaged(cache, m, &whole[0], NULL) == TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "v is NULL");
        te_module_destroy(m);
        te_inference_params_destroy(cache);
    }
}

/* Ranks that share the heads have caches of their own ones. */
static void decode_shared(rank_state *s) {
    te_ctx *te = s->te;
    const te_rotary_desc rotary = {.base = 50};
    float *got[2];
    te_no_grad_begin(te);
    for (int run = 0; run < 2; run++) { /* the whole, and with the others */
        te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = WIDE, .attention.num_attention_heads = H, .attention.num_gqa_groups = 4, .gemm.params_dtype = TE_F32};
        te_inference_params_desc room = {.max_batch_size = 2, .max_sequence_length = 8, .num_heads_kv = run ? 4 / s->size : 4, .head_dim_k = D, .dtype = TE_F32, .is_paged = true, .page_size = 2};
        if (run) d.parallel.tp_group = s->group, d.parallel.set_parallel_mode = true;
        te_seed(te, 4);
        te_module *m = te_transformer_layer_create(te, &d);
        te_inference_params *cache = te_inference_params_create(te, &room);
        got[run] = (float *)malloc(4 * 2 * WIDE * sizeof(float));
        for (int step = 0; step < 3; step++) { /* two tokens, then one by one */
            const int64_t n = step ? 1 : 2, ids[2] = {5, 6}, lens[2] = {n, n};
            float x[2 * 2 * WIDE];
            for (int i = 0; i < n * 2 * WIDE; i++) x[i] = (float)((i * 29 + step * 13) % 64 - 32) / 32;
            te_inference_params_pre_step(cache, ids, lens, 2);
            te_forward_args args = {.input = te_tensor_from_host(te, TE_F32, SHAPE(n, 2, WIDE), x), .rotary = &rotary, .attention.inference_params = cache};
            te_tensor *y = te_forward_with(m, &args);
            if (y) te_tensor_to_f32(y, got[run] + (step ? step + 1 : 0) * 2 * WIDE);
        }
        EXPECT(s, te_ok(te));
        te_inference_params_destroy(cache);
        te_module_destroy(m);
    }
    for (int i = 0; i < 4 * 2 * WIDE; i++) EXPECT(s, fabs((double)got[0][i] - (double)got[1][i]) <= 1e-5 * (1 + fabs((double)got[0][i]))); /* f32 sums in the order of ranks */
    free(got[0]), free(got[1]);
    te_no_grad_end(te);
}
TE_TEST(inference_on_ranks) {
    for (int size = 2; size <= 4; size *= 2) run_ranks(size, decode_shared, NULL);
}

TE_TEST(inference_refusals) {
    te_ctx *te = test_context("cpu");
    static const struct {
        te_inference_params_desc d;
        te_result code;
        const char *says;
    } descs[] = {{{.max_batch_size = 0, .max_sequence_length = 8, .num_heads_kv = 1, .head_dim_k = 4}, TE_ERR_INVALID, "max_batch_size 0, max_sequence_length 8"},
                 {{.max_batch_size = 1 << 20, .max_sequence_length = 1 << 20, .num_heads_kv = 1, .head_dim_k = 4}, TE_ERR_INVALID, "the product of the first two at most 2^26"},
                 {{.max_batch_size = 2, .max_sequence_length = 8, .num_heads_kv = 1, .head_dim_k = 4, .dtype = TE_I32}, TE_ERR_DTYPE, "dtype i32; f32, f16, bf16 and e4m3 are possible"},
                 {{.max_batch_size = 2, .max_sequence_length = 8, .num_heads_kv = 1, .head_dim_k = 1032, .dtype = TE_F8E4M3}, TE_ERR_UNSUPPORTED, "head_dim_k 1032 and head_dim_v 1032; at most 1024"},
                 {{.max_batch_size = 2, .max_sequence_length = 8, .num_heads_kv = 1, .head_dim_k = 4, .page_size = 4}, TE_ERR_INVALID, "page_size 4 and total_num_pages 0 without is_paged"},
                 {{.max_batch_size = 2, .max_sequence_length = 8, .num_heads_kv = 1, .head_dim_k = 4, .is_paged = true, .page_size = 3}, TE_ERR_INVALID, "page_size 3, max_sequence_length 8"}};
    for (int i = 0; i < COUNT(descs); i++) {
        CHECK(!te_inference_params_create(te, &descs[i].d));
        CHECK_ERROR(te, descs[i].code, descs[i].says);
    }
    CHECK(!te_inference_params_create(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "desc is NULL");

    const setup c = {.format = TE_BSHD, .dtype = TE_F32};
    te_inference_params *cache = make_cache(te, &c);
    te_module *m = make_layers(te, &c);
    te_forward_args args = {.input = te_tensor_zeros(te, TE_F32, SHAPE(2, 3, WIDE)), .attention.inference_params = cache};
    REQUIRE_OK(te);
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_STATE, "a call with inference_params cannot be recorded; open te_no_grad_begin first");
    te_no_grad_begin(te);
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_STATE, "inference_params has no sequences");
    te_inference_params_pre_step(cache, (const int64_t[]){1, 2, 3}, (const int64_t[]){1, 3, 2}, 3);
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "k is [2, 3, 2, 8]; the step has 3 sequences, of at most 3 new tokens and 6 in all");
    args.input = te_tensor_zeros(te, TE_F32, SHAPE(3, 2, WIDE));
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "k is [3, 2, 2, 8]; the step has 3 sequences, of at most 3 new tokens");
    args.input = te_tensor_zeros(te, TE_F32, SHAPE(3, 3, WIDE));
    args.attention.attn_mask_type = TE_MASK_ARBITRARY;
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "inference_params with attn_mask_type 7");
    args.attention.attn_mask_type = TE_MASK_DEFAULT;
    args.rotary = &(te_rotary_desc){.start_positions = te_tensor_zeros(te, TE_I32, SHAPE(3))};
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "rotary->start_positions with inference_params");
    args.rotary = NULL;
    CHECK(te_forward_with(m, &args) != NULL);
    CHECK_OK(te);
    te_module_destroy(m);
    te_inference_params_destroy(cache);

    /* a cache in E4M3 and a recipe with attention in FP8, and what it has no copy of */
    const setup coded = {.format = TE_BSHD, .dtype = TE_BF16, .codes = true};
    te_recipe recipe = te_recipe_current_scaling();
    recipe.fp8_dpa = true;
    cache = make_cache(te, &coded);
    m = make_layers(te, &coded);
    args = (te_forward_args){.input = te_tensor_zeros(te, TE_BF16, SHAPE(1, 2, WIDE)), .attention.inference_params = cache};
    te_inference_params_pre_step(cache, (const int64_t[]){1}, (const int64_t[]){2}, 1);
    REQUIRE_OK(te);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    CHECK(!te_forward_with(m, &args));
    te_autocast_end(te);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "keys are e4m3 codes of a cache, whose rows have factors, and the recipe has fp8_dpa");
    te_tensor *whole_k, *whole_v;
    te_inference_params_convert_paged_to_nonpaged(cache, m, &whole_k, &whole_v);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "the cache is e4m3, whose rows have factors");
    te_module_destroy(m);
    te_inference_params_destroy(cache);

    te_inference_params_desc wrong = {.max_batch_size = 3, .max_sequence_length = 8, .num_heads_kv = 3, .head_dim_k = D, .dtype = TE_F32, .max_ctx_len = 2};
    te_multihead_attention_desc a = {.hidden_size = WIDE, .attention.num_attention_heads = H, .attention.num_gqa_groups = G, .gemm.params_dtype = TE_F32};
    te_ctx *other = test_context("cpu");
    cache = te_inference_params_create(te, &wrong);
    m = te_multihead_attention_create(te, &a);
    args = (te_forward_args){.input = te_tensor_zeros(te, TE_F32, SHAPE(3, 1, WIDE)), .attention.inference_params = cache};
    te_inference_params_pre_step(cache, (const int64_t[]){1}, (const int64_t[]){3}, 1);
    CHECK_ERROR(te, TE_ERR_INVALID, "sequence 1 has 3 new tokens; 1 to 2 (max_ctx_len) are possible");
    te_inference_params_pre_step(cache, (const int64_t[]){1}, (const int64_t[]){2}, 1);
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "k is f32 [3, 1, 2, 8]; the cache has 3 heads of 8 channels in f32");
    te_module_destroy(m);
    a.attention.attention_type = TE_ATTENTION_CROSS;
    m = te_multihead_attention_create(te, &a);
    args.encoder_output = args.input;
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "inference_params with cross attention");
    te_no_grad_end(te);
    te_module_destroy(m);
    te_inference_params_destroy(cache);
    cache = make_cache(other, &c);
    te_no_grad_begin(te);
    m = make_layers(te, &c);
    args = (te_forward_args){.input = te_tensor_zeros(te, TE_F32, SHAPE(3, 1, WIDE)), .attention.inference_params = cache};
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "inference_params is of another context");
    te_no_grad_end(te);
    te_module_destroy(m);
    te_inference_params_destroy(cache);
}
