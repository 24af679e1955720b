/* tests/faults/test_memory.c: memory runs out: a device that is full, and host memory that fails at every single request of a program in
 * turn. Whatever happens, the first error says it, nothing is lost or crashes, and the context goes on afterwards. */
#include "model.h"
#include "purse.h"

/* ---- the device is full --------------------------------------------------------------------------------------- */

enum { MiB = 1 << 20 };

TE_TEST(full_device) {
    purse *device = new_purse();
    te_ctx_desc desc = purse_desc(NULL, device);
    device->limit = 8 * MiB;
    te_ctx *te = test_context_with(&desc);
    te_tensor *kept = te_tensor_full(te, TE_F32, SHAPE(3 * MiB / 4), 1.5), *also = te_tensor_full(te, TE_F32, SHAPE(2 * MiB / 4), 2.5);
    size_t held = te_memory_get_stats(te).allocated;
    CHECK_EQ_INT(held, 5 * MiB);
    CHECK(!te_tensor_zeros(te, TE_F32, SHAPE(4 * MiB / 4)));
    CHECK_STR(te_error(te), "cpu: out of memory: 4.0 MiB asked for, ");
    CHECK_STR(te_error(te), ", 5.0 MiB held by live tensors of this context. ");
    CHECK_STR(te_error(te), "te_scope_begin/te_scope_end around each step");
    CHECK_STR(te_error(te), " it is not known how much is free,"); /* by an allocator of the program's own */
    CHECK_EQ_INT(te_memory_get_stats(te).allocated, held);
    /* with the error pending */
    CHECK(!te_tensor_zeros(te, TE_F32, SHAPE(100 * MiB)));
    CHECK(te_backward(te_sum_all(te_tensor_set_requires_grad(also, true))) != TE_OK);
    CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "4.0 MiB asked for");
    /* what was there is there, and what fits is served */
    CHECK(test_read(kept)[0] == 1.5f && test_read(kept)[3 * MiB / 4 - 1] == 1.5f && test_read(also)[2 * MiB / 4 - 1] == 2.5f);
    CHECK(test_read(te_add(also, also))[7] == 5);
    CHECK_OK(te);
}

/* The pool gives its free blocks back before a request is refused. */
TE_TEST(full_device_with_a_full_pool) {
    purse *device = new_purse();
    te_ctx_desc desc = purse_desc(NULL, device);
    device->limit = 8 * MiB;
    te_ctx *te = test_context_with(&desc);
    te_scope_begin(te);
    for (int i = 0; i < 6; i++) te_tensor_zeros(te, TE_U8, SHAPE(MiB));
    te_scope_end(te);
    CHECK_EQ_INT(device->held, 6 * MiB);
    CHECK(te_tensor_zeros(te, TE_U8, SHAPE(8 * MiB)) != NULL);
    CHECK_OK(te);
    CHECK_EQ_INT(device->held, 8 * MiB);
    CHECK_EQ_INT(te_memory_get_stats(te).reserved, 8 * MiB);
}

/* A model that does not fit into memory trains once there is room. */
TE_TEST(full_device_while_training) {
    purse *device = new_purse();
    te_ctx_desc desc = purse_desc(NULL, device);
    te_ctx *te = test_context_with(&desc), *roomy = test_context("cpu");
    model m = model_create(te, TE_RECIPE_CURRENT, true), same = model_create(roomy, TE_RECIPE_CURRENT, true);
    REQUIRE_OK(te);
    size_t before = device->held;
    uint64_t hash = test_hash(m.gpt);
    double want = model_step(roomy, &same), got = 0;
    int refusals = 0;
    for (size_t room = 0; refusals >= 0 && room < 10 * MiB; room += 5000) {
        test_case("room for %zu bytes", room);
        te_memory_trim(te);
        device->limit = before + room;
        got = model_step(te, &m);
        if (te_ok(te)) break;
        refusals++;
        CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, " bytes asked for, it is not known");
        te_optimizer_zero_grad(m.adam);
        CHECK_EQ_INT(te_optimizer_steps(m.adam), 0);
        CHECK(test_hash(m.gpt) == hash);
        CHECK_EQ_INT(te_memory_get_stats(te).allocated, before);
    }
    CHECK_MSG(refusals >= 3, "only %d refusals", refusals);
    CHECK_OK(te);
    CHECK(got == want && test_hash(m.gpt) == test_hash(same.gpt));
    model_destroy(&m);
    model_destroy(&same);
}

/* ---- every request for host memory is refused in turn ---------------------------------------------------------- */

static purse *starved;
static int starved_at;

/* Requests count from here, and not from the making of the context. */
static void starve_from_here(void) { starved->fail_at = starved->calls + starved_at; }

/* Runs `work` with request number n refused, in a context of its own, for every n until no request is left; builds that sample take every
 * sixteenth or 37th n (te_test.h). Returns how many requests there were. later: work says from where on (starve_from_here). */
typedef void (*work_fn)(te_ctx *te, void *arg);
static int starve(work_fn work, void *arg, int threads, bool later) {
    enum { MOST = 20000 };
    const int every = threads > 1 ? 1 : test_every_of(37, 8);
    for (int n = 1; n <= MOST; n += every) {
        purse p = {0};
        te_ctx_desc desc = purse_desc(&p, NULL);
        starved = &p;
        starved_at = n;
        test_case("request %d is refused", n);
        desc.cpu_threads = threads;
        p.fail_at = later ? 0 : n;
        te_ctx *te = te_ctx_create(&desc);
        CHECK(te || n == 1);
        if (te) {
            work(te, arg);
            CHECK_OK(te);
        }
        te_ctx_destroy(te);
        must_be_empty(&p);
        CHECK_EQ_INT(strlen(test_log_text()), 0); /* it warns of tensors that are still retained */
        if (!p.refused) return n - 1;
    }
    test_fail(__FILE__, __LINE__, "%d requests and no end", MOST);
    return MOST;
}
/* After work that may have failed: it did so for one reason alone, and in words. */
static bool failed(te_ctx *te) {
    if (te_ok(te)) return false;
    CHECK_MSG(strstr(te_error(te), "out of host memory") || strstr(te_error(te), "cpu: out of memory: "), "%s", te_error(te));
    CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "");
    return true;
}

typedef struct training {
    te_recipe_kind recipe;
    bool plain;
    uint64_t hash; /* after two steps in which nothing failed; 0: not known */
} training;

/* A model is made and takes two steps. Each part that fails is done again, and in the end all is as if nothing had happened. */
static void train(te_ctx *te, void *arg) {
    training *t = (training *)arg;
    model m;
    for (int tries = 0;; tries++) {
        te_seed(te, 5);
        m = model_create(te, t->recipe, t->plain);
        if (te_ok(te)) break;
        model_step(te, &m); /* with whatever was made */
        CHECK(failed(te));
        model_destroy(&m);
        REQUIRE(tries == 0);
    }
    for (int tries = 0; te_optimizer_steps(m.adam) < 2; tries++) {
        te_rng_set(te, 5, 100 + 10 * (uint64_t)te_optimizer_steps(m.adam));
        double loss = model_step(te, &m);
        if (!failed(te)) CHECK_MSG(loss > 0 && loss < 50, "the loss is %g", loss);
        te_optimizer_zero_grad(m.adam);
        REQUIRE(tries < 3);
    }
    uint64_t hash = test_hash(m.gpt);
    CHECK(t->hash == 0 || hash == t->hash);
    t->hash = hash;
    model_destroy(&m);
}

TE_TEST(starved_training) {
    for (int recipe = TE_RECIPE_NONE; recipe <= TE_RECIPE_CURRENT; recipe++) {
        training t = {(te_recipe_kind)recipe, recipe != TE_RECIPE_NONE, 0};
        te_ctx *te = test_context("cpu");
        train(te, &t);
        int requests = starve(train, &t, 1, false);
        CHECK_MSG(requests > 500, "only %d requests", requests);
    }
}

/* Worker threads are a luxury. */
static void fill_and_add(te_ctx *te, void *arg) {
    (void)arg;
    te_scope_begin(te);
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(100000), 3);
    double sum = te_tensor_item(te_sum_all(te_add(x, x)));
    te_scope_end(te);
    if (!failed(te)) CHECK(sum == 600000);
}
TE_TEST(starved_threads) { starve(fill_and_add, NULL, 3, false); }

/* ---- what a training step does not call ---- */

static te_result double_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)state, (void)saved, (void)needs;
    dx[0] = te_scale(dy[0], 2);
    return te_error_code(te);
}
static te_tensor *doubled(te_tensor *x) {
    te_tensor *y = te_scale(te_tensor_detach(x), 2);
    te_node_desc node = {0};
    node.name = "doubled";
    node.inputs = node.saved = &x;
    node.num_inputs = node.num_saved = 1;
    node.outputs = &y;
    node.num_outputs = 1;
    node.backward = double_backward;
    return te_record(te_tensor_ctx(x), &node) == TE_OK ? y : NULL;
}

static void call_functions(te_ctx *te) {
    float host[2 * 3 * 4 * 2];
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(2, 3, 8), 0, 1), true);
    te_tensor *weight = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(8), 1), true);
    te_tensor *bias = te_tensor_set_requires_grad(te_tensor_uniform(te, TE_F32, SHAPE(8), -1, 1), true);
    te_tensor_set_name(x, "x");
    te_tensor *y = te_layernorm(te_tensor_contiguous(te_tensor_transpose(x, 0, 1)), weight, bias, 0, true);
    y = te_rmsnorm(te_activate(te_tensor_cast(te_tensor_cast(y, TE_BF16), TE_F32), TE_SRELU, NULL), weight, 0, false);
    y = te_bias_dropout_add(te_dropout(doubled(y), 0.5f), bias, y, 0.25f);
    te_tensor *heads = te_tensor_view(y, SHAPE(3, 2, 2, 4));
    te_rotary_desc rotary = {0};
    te_attn_desc attention = {0};
    attention.rule.dropout_p = 0.1f;
    te_tensor *q = te_apply_rotary_pos_emb(heads, &rotary, TE_SBHD);
    y = te_tensor_view(te_attention(q, te_tensor_narrow(q, 2, 0, 1), te_tensor_narrow(heads, 2, 1, 1), &attention), SHAPE(3, 2, 8));
    te_quantizer_desc kind = {0};
    for (int i = 0; i < 2; i++) {
        kind.kind = i ? TE_QUANT_DELAYED : TE_QUANT_CURRENT;
        te_quantizer *quantizer = te_quantizer_create(te, &kind);
        te_tensor *quantized = te_quantize(quantizer, y);
        te_tensor_to_f32(quantized, host);
        y = te_dequantize(quantized, TE_F32);
        te_quantizer_destroy(quantizer);
    }
    te_tensor_to_f32(te_tensor_transpose(y, 0, 2), host);
    te_tensor *loss = te_add(te_mse_loss(y, te_tensor_contiguous(te_tensor_transpose(x, 0, 1))), te_scale(te_mean_all(y), 3));
    te_tensor_set_main_grad(weight, te_tensor_zeros(te, TE_F32, SHAPE(8)));
    te_backward(loss);
    te_memory_trim(te);
}
static void call_functions_again(te_ctx *te, void *arg) {
    (void)arg;
    for (bool again = true; again;) {
        te_scope_begin(te);
        call_functions(te);
        te_scope_end(te);
        CHECK(te_grad_enabled(te));
        CHECK_EQ_INT(te_memory_get_stats(te).allocated, 0);
        again = failed(te);
    }
}
TE_TEST(starved_functions) { starve(call_functions_again, NULL, 1, false); }

/* A mixture of experts, its groups one by one and all at once. */
static void call_experts(te_ctx *te) {
    enum { TOKENS = 6, EXPERTS = 3, WIDTH = 8 };
    const uint8_t host_mask[TOKENS * EXPERTS] = {1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0};
    const int64_t splits[EXPERTS] = {3, 3, 2}, order[EXPERTS] = {2, 0, 1};
    te_recipe recipe = te_recipe_current_scaling();
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(TOKENS, WIDTH), 0, 1), true);
    te_tensor *mask = te_tensor_from_host(te, TE_U8, SHAPE(TOKENS, EXPERTS), host_mask), *sizes = te_tensor_from_host(te, TE_I64, SHAPE(EXPERTS), splits), *balance, *map, *moved;
    te_grouped_linear_desc d = {.num_gemms = EXPERTS, .in_features = WIDTH, .out_features = WIDTH, .gemm.params_dtype = TE_F32};
    te_fp8_padding_desc align = {.num_gemms = EXPERTS};
    te_module *m[4] = {te_grouped_linear_create(te, &d), NULL, te_fp8_padding_create(te, &align), te_fp8_unpadding_create(te, &align)};
    d.gemm.delay_wgrad_compute = true;
    m[1] = te_grouped_linear_create(te, &d);
    te_tensor *probs = te_fused_topk_with_score_function(te_tensor_narrow(x, 1, 0, EXPERTS), &(te_fused_topk_desc){.topk = 2}, NULL);
    te_tensor *y = te_moe_permute_with_probs(x, probs, mask, 8, &moved, &map);
    te_forward_args args[4] = {{.m_splits = splits}, {.m_splits_tensor = sizes}, {.m_splits = splits}, {.m_splits = splits}};
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    for (int i = 0; i < 4; i++) {
        args[i].input = y;
        y = te_forward_with(m[i], &args[i]);
    }
    te_autocast_end(te);
    balance = te_fused_moe_aux_loss(probs, sizes, &(te_fused_moe_aux_loss_desc){.total_num_tokens = TOKENS, .num_experts = EXPERTS, .topk = 2, .coeff = 1});
    y = te_moe_unpermute(te_moe_sort_chunks_by_index(y, sizes, te_tensor_from_host(te, TE_I64, SHAPE(EXPERTS), order)), map, &(te_moe_unpermute_desc){.merging_probs = probs});
    te_backward(te_add(te_add(te_sum_all(y), te_sum_all(moved)), balance));
    te_backward_dw(m[1]);
    for (int i = 0; i < 4; i++) te_module_destroy(m[i]);
}
/* Mixtures of NeMo Automodel: a gate with its loss and bias and shared experts, and GroupedLinears. */
static void call_mixture(te_ctx *te, bool linears) {
    te_moe_config c = {.n_routed_experts = 2, .n_activated_experts = 1, .n_shared_experts = !linears, .dim = 4, .moe_inter_dim = 2, .dtype = TE_F32, .score_func = TE_GATE_SIGMOID_WITH_BIAS,
                       .expert_bias = true, .gate_bias_update_factor = linears ? 0 : 0.5f, .aux_loss_coeff = linears ? 0 : 0.5f};
    te_module *m = te_moe_create(te, &c, &(te_moe_backend){.experts = linears ? TE_EXPERTS_TE : TE_EXPERTS_TORCH_MM, .dispatcher = linears ? TE_DISPATCHER_DEEPEP : TE_DISPATCHER_TORCH, .world_size = 2});
    te_tensor *y = te_forward(m, te_tensor_normal(te, TE_F32, SHAPE(3, 4), 0, 1));
    te_backward(te_sum_all(y));
    if (!linears) te_gate_update_bias(te_module_find(m, "gate"), NULL);
    if (linears) te_experts_set(m, TE_EXPERTS_DOWN_PROJS, te_experts_get(m, TE_EXPERTS_DOWN_PROJS));
    te_module_destroy(m);
}
static void call_experts_again(te_ctx *te, void *arg) {
    (void)arg;
    for (bool again = true; again;) {
        te_scope_begin(te);
        call_experts(te);
        te_scope_end(te);
        CHECK(te_grad_enabled(te));
        CHECK_EQ_INT(te_memory_get_stats(te).allocated, 0);
        again = failed(te);
    }
}
TE_TEST(starved_experts) { starve(call_experts_again, NULL, 1, false); }
static void call_mixture_again(te_ctx *te, void *arg) {
    for (bool again = true; again;) {
        te_scope_begin(te);
        call_mixture(te, *(const bool *)arg);
        te_scope_end(te);
        CHECK(te_grad_enabled(te));
        CHECK_EQ_INT(te_memory_get_stats(te).allocated, 0);
        again = failed(te);
    }
}
TE_TEST(starved_mixtures) {
    for (int i = 0; i < 2; i++) {
        bool linears = i;
        starve(call_mixture_again, &linears, 1, false);
    }
}

/* Attention with lengths from a mask, a packed tensor and a learnable offset, recorded; and two steps of decoding with a cache in pages, in the second of
 * which one sequence has ended. */
static void call_attention(te_ctx *te) {
    enum { TOKENS = 5, SEQUENCES = 2, HEADS = 2, CHANNELS = 4, WIDTH = HEADS * CHANNELS };
    const uint8_t host_mask[SEQUENCES * TOKENS] = {0, 0, 0, 1, 1, 0, 0, 0, 0, 0};
    const int64_t ids[SEQUENCES] = {8, 3}, lens[SEQUENCES] = {TOKENS, 2};
    te_multihead_attention_desc d = {.hidden_size = WIDTH, .attention.num_attention_heads = HEADS, .attention.softmax_type = TE_SOFTMAX_LEARNABLE, .attention.return_max_logit = true,
                                     .attention.attn_mask_type = TE_MASK_PADDING_CAUSAL, .attention.qk_norm_type = TE_QK_NORM_L2, .gemm.params_dtype = TE_F32};
    te_inference_params_desc room = {.max_batch_size = 2, .max_sequence_length = 8, .num_heads_kv = HEADS, .head_dim_k = CHANNELS, .dtype = TE_F32, .is_paged = true, .page_size = 4};
    te_rotary_desc rotary = {0};
    te_module *m = te_multihead_attention_create(te, &d);
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(TOKENS, SEQUENCES, WIDTH), 0, 1), true);
    te_forward_args args = {.input = x, .rotary = &rotary, .attention.attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(SEQUENCES, 1, 1, TOKENS), host_mask)};
    te_backward(te_sum_all(te_forward_with(m, &args)));
    te_module_destroy(m);
    d.attention.softmax_type = TE_SOFTMAX_VANILLA;
    m = te_multihead_attention_create(te, &d);
    te_inference_params *cache = te_inference_params_create(te, &room);
    te_no_grad_begin(te);
    args.attention.attention_mask = NULL;
    args.attention.inference_params = cache;
    for (int i = 0; i < 2; i++) {
        te_result began = te_inference_params_pre_step(cache, ids + i, lens + i, SEQUENCES - i);
        CHECK(began == TE_OK || !te_ok(te) || !cache);
        args.input = te_tensor_narrow(x, 1, 0, SEQUENCES - i);
        te_forward_with(m, &args);
        CHECK(!te_ok(te) || te_inference_params_seqlen(cache, 3) == 2 * (i + 1));
    }
    te_no_grad_end(te);
    te_inference_params_destroy(cache);
    te_module_destroy(m);
}
static void call_attention_again(te_ctx *te, void *arg) {
    (void)arg;
    for (bool again = true; again;) {
        te_scope_begin(te);
        call_attention(te);
        te_scope_end(te);
        CHECK(te_grad_enabled(te));
        CHECK_EQ_INT(te_memory_get_stats(te).allocated, 0);
        again = failed(te);
    }
}
TE_TEST(starved_attention) {
    int requests = starve(call_attention_again, NULL, 1, false);
    CHECK_MSG(requests > 60, "only %d requests", requests);
}

/* ---- files ---------------------------------------------------------------------------------------------------- */

typedef struct checkpoint {
    const char *path;
    uint8_t *bytes; /* what it holds */
    size_t size;
    uint64_t hash;  /* of the model in it */
} checkpoint;

/* A load that fails has changed nothing, and succeeds the next time. */
static void load(te_ctx *te, void *arg) {
    const checkpoint *c = (const checkpoint *)arg;
    char text[16];
    model m = model_create(te, TE_RECIPE_DELAYED, true);
    uint64_t before = test_hash(m.gpt);
    starve_from_here();
    for (bool again = true; again;) {
        bool loaded = te_model_load(te, c->path, m.gpt, m.adam) == TE_OK;
        CHECK(loaded == te_ok(te));
        CHECK(test_hash(m.gpt) == (loaded ? c->hash : before));
        CHECK_EQ_INT(te_optimizer_steps(m.adam), loaded ? 2 : 0);
        if (te_model_metadata(te, c->path, "step", text, sizeof text) == TE_OK) CHECK_STR(text, "2");
        te_scope_begin(te);
        te_safetensors *f = te_safetensors_open(te, c->path);
        te_tensor *x = te_safetensors_read(f, "embedding.weight"), *turned = te_tensor_zeros(te, TE_BF16, SHAPE(WIDTH, VOCABULARY));
        te_safetensors_read_into(f, "embedding.weight", te_tensor_transpose(turned, 0, 1));
        float one = (float)te_tensor_item(te_tensor_narrow(te_tensor_view(x, SHAPE(-1)), 0, 1, 1));
        float same = (float)te_tensor_item(te_tensor_narrow(te_tensor_view(turned, SHAPE(-1)), 0, VOCABULARY, 1));
        if (te_ok(te)) CHECK(one == same);
        te_safetensors_close(f);
        te_scope_end(te);
        again = failed(te);
        if (!loaded) continue;
        before = c->hash;
    }
    model_destroy(&m);
}
static void save(te_ctx *te, void *arg) {
    const checkpoint *c = (const checkpoint *)arg;
    te_metadata metadata = {"step", "2"};
    model m = model_create(te, TE_RECIPE_DELAYED, true);
    te_model_load(te, c->path, m.gpt, m.adam);
    starve_from_here();
    for (bool again = true; again;) {
        size_t size;
        bool saved = te_model_save(te, c->path, m.gpt, m.adam, &metadata, 1) == TE_OK;
        const uint8_t *bytes = test_read_file(c->path, &size);
        CHECK(saved == te_ok(te));
        CHECK(size == c->size && memcmp(bytes, c->bytes, size) == 0);
        again = failed(te);
    }
    model_destroy(&m);
}

TE_TEST(starved_checkpoints) {
    te_ctx *te = test_context("cpu");
    te_metadata metadata = {"step", "2"};
    checkpoint c = {0};
    c.path = test_path("model.safetensors");
    model m = model_create(te, TE_RECIPE_DELAYED, true);
    model_step(te, &m);
    model_step(te, &m);
    c.hash = test_hash(m.gpt);
    CHECK_EQ_INT(te_model_save(te, c.path, m.gpt, m.adam, &metadata, 1), TE_OK);
    c.bytes = test_read_file(c.path, &c.size);
    REQUIRE(c.size > 1000);
    starve(load, &c, 1, true);
    starve(save, &c, 1, true);
    model_destroy(&m);
}

/* A plan of more launches than it has room for asks for memory: for them, and for their arguments. */
TE_TEST(starved_plans) {
    enum { NUM = 129 };
    purse *host = new_purse();
    te_ctx_desc desc = purse_desc(host, NULL);
    te_ctx *te = test_context_with(&desc);
    te_tensor *x = te_tensor_describe(te, TE_F32, SHAPE(16));
    te_adam_tensor t[NUM];
    te_op_adam_args a = {.tensors = t, .num_tensors = NUM, .step = 1};
    te_explanation e;
    memset(t, 0, sizeof t);
    for (int i = 0; i < NUM; i++) t[i] = (te_adam_tensor){.grad = x, .param = x, .m = x, .v = x, .own_numbers = true, .numbers.lr = (float)i};
    for (int n = 1;; n++) {
        test_case("request %d", n);
        host->refused = 0, host->fail_at = host->calls + n;
        te_result result = te_explain(te, TE_OP_ADAM, &a, "sm_90", &e);
        host->fail_at = 0;
        if (!host->refused) {
            CHECK(result == TE_OK && e.launches == NUM && n > 100);
            break;
        }
        CHECK_EQ_INT(result, TE_ERR_OUT_OF_MEMORY);
        CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "out of host memory");
    }
}
