/* Decoding with a KV cache: by calls, and by launches of one captured step. */
#include "../faults/purse.h"

enum { DEC_V = 29, DEC_D = 32, DEC_P = 5, DEC_ROOM = 14 }; /* vocabulary, hidden size, ids of the prompt, positions of a cache */

static const bool dec_slides[3] = {true, false, true};
static const float dec_factors[16] = {1, 1.5f, 2, 4, 1, 1.5f, 2, 4, 2.5f, 4, 3, 5, 2.5f, 4, 3, 5};
static te_causal_lm_desc dec_desc(int kind, te_dtype dtype) {
    te_causal_lm_desc d = {.vocab_size = DEC_V, .hidden_size = DEC_D, .intermediate_size = 48, .num_hidden_layers = 3, .num_attention_heads = 4, .num_key_value_heads = 2,
                           .params_dtype = dtype, .init.std = 0.3f};
    if (kind == 1) d.sliding_window = 3, d.sliding_layers = dec_slides, d.attn_logit_softcapping = 20, d.final_logit_softcapping = 30, d.head_dim = 16, d.feedforward_norms = true; /* as Gemma 2 */
    if (kind == 2) d.num_local_experts = 4, d.num_experts_per_tok = 2, d.qk_norm = true, d.tie_word_embeddings = true; /* as Qwen3-MoE */
    if (kind == 3) d.rotary.scaling = (te_rope_scaling){.type = TE_ROPE_LONGROPE, .factor = 2, .original_max_position_embeddings = 4, .short_factor = dec_factors, .long_factor = dec_factors + 8}; /* the prompt is beyond already */
    return d;
}
static const char *const dec_kinds[] = {"plain", "windows and caps", "experts", "longrope"};

/* A model, its cache, and the tensors that stay where they are: the newest ids, and the logits after them. */
typedef struct decoder {
    te_module *m;
    te_kv_cache *cache;
    te_tensor *id, *logits;
    int64_t batch;
} decoder;
static decoder dec_open(te_ctx *te, te_module *m, int64_t batch, te_dtype kept) {
    decoder d = {m, te_kv_cache_create_with(m, &(te_kv_cache_desc){.batch = batch, .max_length = DEC_ROOM, .dtype = kept}), te_tensor_zeros(te, TE_I32, SHAPE(batch, 1)), te_tensor_zeros(te, te_tensor_dtype(te_module_parameter(te_module_find(m, "model.embed_tokens"), "weight")), SHAPE(batch, 1, DEC_V)), batch};
    return d;
}
static void dec_close(decoder *d) {
    te_kv_cache_destroy(d->cache);
    te_module_destroy(d->m);
}
static void dec_step(decoder *d, te_tensor *ids) {
    te_ctx *te = te_module_ctx(d->m);
    te_scope_begin(te);
    te_forward_args args = {.input = ids, .kv_cache = d->cache, .logits_to_keep = 1};
    te_tensor *y = te_forward_with(d->m, &args);
    if (y) te_tensor_copy(d->logits, y);
    if (y) te_tensor_copy(d->id, te_argmax(y));
    te_scope_end(te);
}
static te_tensor *dec_prompt(te_ctx *te, int64_t batch) {
    int32_t ids[16 * DEC_P];
    for (int i = 0; i < batch * DEC_P; i++) ids[i] = (i * i * 7 + 3) % DEC_V;
    return te_tensor_from_host(te, TE_I32, SHAPE(batch, DEC_P), ids);
}
/* The logits and the ids that each step makes: the prompt, then one after another. From step `captured` on they are launches. */
enum { DEC_N = DEC_ROOM - DEC_P + 1 };
static te_graph *dec_run(decoder *d, int captured, float *logits[DEC_N], int32_t ids[DEC_N][2]) {
    te_ctx *te = te_module_ctx(d->m);
    te_graph *graph = NULL;
    for (int i = 0; i < DEC_N; i++) {
        if (i == 0) dec_step(d, dec_prompt(te, d->batch));
        else if (i < captured) dec_step(d, d->id);
        else {
            if (!graph) {
                CHECK_EQ_INT(te_graph_begin(te), TE_OK);
                dec_step(d, d->id);
                graph = te_graph_end(te);
                CHECK_EQ_INT(te_kv_cache_length(d->cache), DEC_P + i - 1); /* nothing has run */
            }
            CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
        }
        CHECK_OK(te);
        CHECK_EQ_INT(te_kv_cache_length(d->cache), DEC_P + i);
        logits[i] = test_read(d->logits);
        te_tensor_to_host(d->id, ids[i]);
    }
    return graph;
}

TE_TEST_DEVICES(decode_in_a_graph) {
    for (int n = 0; n < 4 * 2 * 2 * 2; n += test_every_odd(1)) { /* 3: all kinds, in turns with the rest */
        const int kind = n % 4;
        const te_dtype dtype = n / 4 % 2 ? TE_BF16 : TE_F32;
        const int64_t batch = 1 + n / 8 % 2;
        const bool codes = n / 16; /* a cache in E4M3 */
        const size_t bytes = (size_t)batch * DEC_V * sizeof(float);
        float *calls[DEC_N], *launches[DEC_N];
        int32_t call_ids[DEC_N][2] = {{0}}, launch_ids[DEC_N][2] = {{0}}, all[2][DEC_ROOM + 1];
        test_case("%s, %s, batch %d%s", dec_kinds[kind], te_dtype_name(dtype), (int)batch, codes ? ", cache in e4m3" : "");
        te_causal_lm_desc desc = dec_desc(kind, dtype);
        te_seed(te, 5);
        decoder d = dec_open(te, te_causal_lm_create(te, &desc), batch, codes ? TE_F8E4M3 : TE_DTYPE_NONE);
        REQUIRE_OK(te);
        te_no_grad_begin(te);
        te_graph_destroy(dec_run(&d, DEC_N, calls, call_ids));
        /* without a cache: each time all ids; of codes with an empty cache, since what it keeps is another matter than what a key was */
        te_kv_cache *empty = codes ? te_kv_cache_create_with(d.m, &(te_kv_cache_desc){.batch = 1, .max_length = DEC_ROOM + 1, .dtype = TE_F8E4M3}) : NULL;
        for (int64_t b = 0; b < batch; b++) {
            for (int i = 0; i < DEC_P; i++) all[b][i] = (int32_t)(((b * DEC_P + i) * (b * DEC_P + i) * 7 + 3) % DEC_V);
            for (int i = 0; i < DEC_N; i++) all[b][DEC_P + i] = call_ids[i][b];
        }
        for (int i = 0; i < DEC_N; i++)
            for (int64_t b = 0; b < batch; b++) {
                te_forward_args args = {.input = te_tensor_from_host(te, TE_I32, SHAPE(1, DEC_P + i), all[b]), .kv_cache = empty};
                if (codes) te_kv_cache_truncate(empty, 0);
                te_tensor *y = te_forward_with(d.m, &args);
                const float *want = test_read(te_tensor_narrow(y, 1, DEC_P + i - 1, 1));
                /* f32 sums of some 50 numbers; on CUDA products of f32 have 10 bits of mantissa (TF32); bf16: 8 bits, some thirty roundings. Where such a difference makes a key or a value
                 * get a neighbouring code, that is 1/8 away: differences of 2^-9 do so with 1 of 50, and are 6 times as large then */
                CHECK_ERROR_BELOW("without a cache", calls[i] + b * DEC_V, want, DEC_V, (dtype == TE_BF16 ? 5e-2 : te_ctx_is_cuda(te) ? 1e-2 : 1e-5) * (codes ? 6 : 1));
            }
        te_kv_cache_destroy(empty);
        te_kv_cache_truncate(d.cache, 0);
        te_graph *graph = dec_run(&d, 2, launches, launch_ids);
        for (int i = 0; i < DEC_N; i++) CHECK_BYTES("logits", launches[i], calls[i], bytes);
        CHECK_BYTES("ids", launch_ids, call_ids, sizeof call_ids);
        /* the cache is full: nothing runs */
        CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "the graph adds 1 positions to a kv_cache that has 14, and room for 14");
        CHECK_EQ_INT(te_kv_cache_length(d.cache), DEC_ROOM);
        CHECK_BYTES("logits of a refused launch", test_read(d.logits), calls[DEC_N - 1], bytes);
        /* back to a place behind the prompt, by a call and by launches in turn */
        CHECK_EQ_INT(te_kv_cache_truncate(d.cache, DEC_P + 1), TE_OK);
        te_tensor_copy_from_host(d.id, call_ids[1]);
        for (int i = 2; i < DEC_N; i++) {
            if (i % 3 == 0) dec_step(&d, d.id);
            else te_graph_launch(graph);
            CHECK_BYTES("logits after a step back", test_read(d.logits), calls[i], bytes);
        }
        CHECK_EQ_INT(te_kv_cache_length(d.cache), DEC_ROOM);
        te_no_grad_end(te);
        CHECK_OK(te);
        te_graph_destroy(graph);
        dec_close(&d);
    }
}

/* Two new ids in one forward, two forwards in one capture, and a capture that begins with an empty cache. */
TE_TEST_DEVICES(decode_several_ids_in_a_graph) {
    te_causal_lm_desc desc = dec_desc(1, TE_F32);
    te_seed(te, 5);
    decoder d = dec_open(te, te_causal_lm_create(te, &desc), 1, TE_DTYPE_NONE);
    te_tensor *pair = te_tensor_from_host(te, TE_I32, SHAPE(1, 2), (const int32_t[]){4, 9});
    float *want[2];
    te_no_grad_begin(te);
    for (int run = 0; run < 2; run++) {
        te_graph *graph = NULL;
        te_kv_cache_truncate(d.cache, 0);
        for (int i = 0; i < 3; i++) { /* 3 ids each time: 9 of 14 */
            if (run && i == 0) {
                te_graph_begin(te);
                dec_step(&d, pair);
                dec_step(&d, d.id);
                graph = te_graph_end(te);
            }
            if (run) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            else dec_step(&d, pair), dec_step(&d, d.id);
            CHECK_EQ_INT(te_kv_cache_length(d.cache), 3 * (i + 1));
        }
        want[run] = test_read(d.logits);
        te_graph_destroy(graph);
    }
    /* f32 sums of some 50 numbers; TF32. The first pair goes through another kernel: in a capture its keys come from the cache */
    CHECK_ERROR_BELOW("launches", want[1], want[0], DEC_V, te_ctx_is_cuda(te) ? 1e-2 : 1e-5);
    te_no_grad_end(te);
    CHECK_OK(te);
    dec_close(&d);
}

static te_result dec_attention(te_module *m, te_forward_args *args) {
    te_result result;
    te_module_set_forward(m, NULL);
    args->outputs.out = te_forward_with(m, args);
    result = te_error_code(te_module_ctx(m));
    te_module_set_forward(m, dec_attention);
    return result;
}
/* A layer that is called alone, by no model that begins the step, caches all of its keys and values. */
TE_TEST_DEVICES(decode_of_one_layer_with_codes) {
    const te_causal_lm_desc desc = dec_desc(0, TE_F32);
    te_seed(te, 5);
    te_module *m = te_causal_lm_create(te, &desc);
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(2, DEC_P, DEC_D), test_normal(2 * DEC_P * DEC_D, 3));
    float *y[2];
    te_no_grad_begin(te);
    for (int i = 0; i < 2; i++) {
        te_kv_cache *cache = te_kv_cache_create_with(m, &(te_kv_cache_desc){.batch = 2, .max_length = DEC_ROOM, .dtype = i ? TE_F8E4M3 : TE_DTYPE_NONE});
        te_forward_args args = {.input = x, .kv_cache = cache};
        y[i] = test_read(te_forward_with(te_module_find(m, "model.layers.0.self_attn"), &args));
        REQUIRE_OK(te);
        te_kv_cache_destroy(cache);
    }
    te_no_grad_end(te);
    /* codes of keys and values are off by 2.6e-2 in the mean */
    CHECK_ERROR_BELOW("one layer", y[1], y[0], 2 * DEC_P * DEC_D, 5e-2);
    te_module_destroy(m);
}

/* The cache has the same codes whether the ids came all at once or in steps of several. */
TE_TEST_DEVICES(decode_in_steps_with_codes) {
    te_causal_lm_desc desc = dec_desc(0, TE_F32);
    int32_t ids[12];
    float *want = NULL;
    for (int i = 0; i < 12; i++) ids[i] = (i * i * 7 + 3) % DEC_V;
    te_seed(te, 5);
    decoder d = dec_open(te, te_causal_lm_create(te, &desc), 1, TE_F8E4M3);
    REQUIRE_OK(te);
    te_no_grad_begin(te);
    for (int step = 12; step >= 2; step -= step == 12 ? 8 : 1) { /* 12, 4, 3, 2 */
        te_kv_cache_truncate(d.cache, 0);
        for (int i = 0; i < 12; i += step) dec_step(&d, te_tensor_from_host(te, TE_I32, SHAPE(1, step), ids + i));
        REQUIRE_OK(te);
        float *got = test_read(d.logits);
        /* f32 sums in another order. On CUDA products of f32 are TF32, good for 2^-11: a key or a value in a hundred gets a neighbouring code, which is 1/8 away */
        if (want) CHECK_ERROR_BELOW("logits", got, want, DEC_V, te_ctx_is_cuda(te) ? 5e-2 : 1e-4);
        want = got;
    }
    te_no_grad_end(te);
    dec_close(&d);
}

TE_TEST_DEVICES(decode_refusals) {
    te_causal_lm_desc desc = dec_desc(3, TE_F32);
    desc.rotary.scaling.original_max_position_embeddings = 7;
    decoder d = dec_open(te, te_causal_lm_create(te, &desc), 1, TE_DTYPE_NONE);
    te_graph *graph;
    te_no_grad_begin(te);
    dec_step(&d, dec_prompt(te, 1));
    dec_step(&d, d.id);
    REQUIRE_OK(te);
    te_graph_begin(te);
    CHECK_EQ_INT(te_kv_cache_truncate(d.cache, 0), TE_ERR_STATE);
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_kv_cache_truncate between te_graph_begin and te_graph_end");
    te_graph_begin(te);
    CHECK(te_kv_cache_create(d.m, 1, 4) == NULL);
    te_graph_end(te);
    CHECK_ERROR(te, TE_ERR_STATE, "te_kv_cache_create between te_graph_begin and te_graph_end");
    te_graph_begin(te);
    te_forward_args part = {.input = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, DEC_D)), .kv_cache = d.cache};
    CHECK(te_forward_with(te_module_find(d.m, "model.layers.0"), &part) == NULL);
    te_graph_end(te);
    CHECK_ERROR(te, TE_ERR_STATE, "a call with kv_cache of a part of a model");
    te_module_set_forward(te_module_find(d.m, "model.layers.1.self_attn.sdpa"), dec_attention);
    te_kv_cache_truncate(d.cache, DEC_P);
    dec_step(&d, d.id); /* a call goes on */
    CHECK_OK(te);
    te_graph_begin(te);
    dec_step(&d, d.id);
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "or of one with another sdpa");
    te_module_set_forward(te_module_find(d.m, "model.layers.1.self_attn.sdpa"), NULL);
    CHECK_EQ_INT(te_kv_cache_length(d.cache), DEC_P + 1);
    CHECK(te_kv_cache_create_with(d.m, &(te_kv_cache_desc){.batch = 1, .max_length = 4, .dtype = TE_F16}) == NULL);
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_kv_cache_create_with: dtype is f16, and the model is f32");
    CHECK(te_kv_cache_create_with(d.m, &(te_kv_cache_desc){.batch = 0, .max_length = 4}) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "0 sequences of 4");
    /* the capture of the seventh position rotates by the short list: the eighth is another matter */
    te_graph_begin(te);
    dec_step(&d, d.id);
    graph = te_graph_end(te);
    CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
    CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "kv_cache has 7 positions, and the graph was captured with 6");
    te_graph_destroy(graph);
    te_kv_cache_truncate(d.cache, 2);
    te_graph_begin(te);
    dec_step(&d, d.id);
    te_kv_cache_destroy(d.cache);
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "destroying a KV cache that a step has extended");
    d.cache = te_kv_cache_create(d.m, 1, DEC_ROOM);
    dec_step(&d, d.id);
    te_graph_begin(te);
    dec_step(&d, d.id);
    graph = te_graph_end(te);
    CHECK_OK(te);
    te_kv_cache_destroy(d.cache);
    CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_graph_launch: its KV cache was destroyed");
    te_graph_destroy(graph);
    te_no_grad_end(te);
    te_module_destroy(d.m);
}

/* A warm-up compiles a step, and leaves the cache's numbers as they are: what follows is right. */
TE_TEST_DEVICES(decode_after_a_warmup) {
    te_causal_lm_desc desc = dec_desc(0, TE_F32);
    te_seed(te, 5);
    decoder d = dec_open(te, te_causal_lm_create(te, &desc), 1, TE_DTYPE_NONE);
    float *want[2];
    te_no_grad_begin(te);
    for (int run = 0; run < 2; run++) {
        if (run) {
            te_warmup_begin(te);
            te_kv_cache_truncate(d.cache, 0);
            dec_step(&d, dec_prompt(te, 1));
            dec_step(&d, d.id);
            te_warmup_end(te);
        }
        te_kv_cache_truncate(d.cache, 0);
        dec_step(&d, dec_prompt(te, 1));
        dec_step(&d, d.id);
        dec_step(&d, d.id);
        want[run] = test_read(d.logits);
    }
    CHECK_BYTES("logits", want[1], want[0], DEC_V * sizeof(float));
    te_no_grad_end(te);
    CHECK_OK(te);
    dec_close(&d);
}

/* ---- products that wait for each other ---- */

/* A Linear's forward by a function of its own: nobody may then put off its product. */
static te_result dec_alone(te_module *m, te_forward_args *args) { return te_module_get_class(m)->forward(m, args); }
static bool dec_set_alone(void *user, te_module *m) {
    if (!strcmp(te_module_get_class(m)->name, "Linear")) te_module_set_forward(m, *(bool *)user ? dec_alone : NULL);
    return true;
}
typedef struct dec_counts {
    int joint, gemm, add, copies, rope, act, norm;
} dec_counts;
static void dec_count(te_ctx *te, const te_trace *event, void *user) {
    dec_counts *n = (dec_counts *)user;
    (void)te;
    if (event->phase != TE_TRACE_BEFORE) return;
    n->joint += event->op == TE_OP_JOINT_GEMM;
    n->gemm += event->op == TE_OP_GEMM;
    n->add += event->op == TE_OP_AXPBY;
    n->copies += event->op == TE_OP_COPY_TO_KV_CACHE;
    n->rope += event->op == TE_OP_ROPE || event->op == TE_OP_QKV_ROPE;
    n->act += event->op == TE_OP_ACT_FWD;
    n->norm += event->op == TE_OP_RMSNORM_FWD;
}
/* The logits of three steps behind the prompt, with weights stored by `recipe` (NULL: plain), by calls and by launches: products together and apart are
 * the same bits, and a layer of those together takes one operation for each of q with k and v, the norm before them and the rotation into the cache, o, gate with up
 * and the norm before them, down. A quantized lm_head is one more of them. */
TE_TEST_DEVICES(decode_together_and_apart) {
    const te_recipe recipes[] = {te_recipe_current_scaling(), te_recipe_block_scaling(), te_recipe_mxfp8(), te_recipe_nvfp4()};
    for (int n = 0; n < 2 * 2 * 5 + 2; n += test_every_odd(1)) { /* 3: a recipe with both batches, or with and without biases */
        const int64_t batch = 1 + n % 2;
        const bool bias = n / 2 % 2, codes = n >= 2 * 2 * 5;
        const te_recipe *recipe = n / 4 && !codes ? &recipes[n / 4 - 1] : NULL;
        const te_autocast_desc cast = {.recipe = recipe, .disabled = !recipe};
        float *logits[2][3];
        test_case("%s, batch %d%s%s", recipe ? te_recipe_name(recipe->kind) : "bf16", (int)batch, bias ? ", biases" : "", codes ? ", cache of codes" : "");
        te_causal_lm_desc desc = dec_desc(0, TE_BF16);
        desc.qkv_bias = desc.mlp_bias = bias;
        desc.quantized_lm_head = recipe && !bias;
        desc.hidden_size = 128, desc.intermediate_size = 256; /* groups of 32 and blocks of 128 are whole */
        te_seed(te, 5);
        te_no_grad_begin(te);
        if (recipe) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = recipe});
        te_module *m = te_causal_lm_create(te, &desc);
        if (recipe) te_quantized_model_init_end(te);
        decoder d = dec_open(te, m, batch, codes ? TE_F8E4M3 : TE_DTYPE_NONE);
        REQUIRE_OK(te);
        for (int run = 0; run < 2; run++) {
            bool alone = run == 1;
            dec_counts count = {0};
            te_graph *graph = NULL;
            te_module_visit(d.m, dec_set_alone, &alone);
            te_kv_cache_truncate(d.cache, 0);
            for (int i = 0; i < 4; i++) {
                if (i == 2) te_set_trace(te, dec_count, &count);
                if (i == 3) te_graph_begin(te);
                te_autocast_begin(te, &cast);
                dec_step(&d, i ? d.id : dec_prompt(te, batch));
                te_autocast_end(te);
                te_set_trace(te, NULL, NULL);
                if (i == 3) graph = te_graph_end(te), te_graph_launch(graph);
                REQUIRE_OK(te);
                if (i) logits[run][i - 1] = test_read(d.logits);
            }
            te_graph_destroy(graph);
            CHECK_EQ_INT(count.rope, run ? 6 : 0);
            CHECK_EQ_INT(count.copies, run ? 3 : 0);
            CHECK_EQ_INT(count.joint, run ? 0 : 3 * 4 + desc.quantized_lm_head);
            CHECK_EQ_INT(count.gemm, run ? 3 * 7 + 1 : !desc.quantized_lm_head);
            CHECK_EQ_INT(count.add, run ? 3 * 2 : 0);
            CHECK_EQ_INT(count.act, run ? 3 : 0);
            CHECK_EQ_INT(count.norm, run ? 3 * 2 + 1 : 1);
        }
        for (int i = 0; i < 3; i++)
            CHECK_BYTES("logits", logits[0][i], logits[1][i], (size_t)batch * DEC_V * sizeof(float));
        te_no_grad_end(te);
        CHECK_OK(te);
        dec_close(&d);
    }
}

/* A batch whose rows are more numbers than a product quantizes by itself: then a call of its own quantizes what the norm makes, which has to have run. The
 * same where each tensor is inspected. A norm with a forward of its own never waits, and gives the same bits. */
static bool dec_set_norms_alone(void *user, te_module *m) {
    if (!strcmp(te_module_get_class(m)->name, "RMSNorm")) te_module_set_forward(m, *(bool *)user ? dec_alone : NULL);
    return true;
}
TE_TEST_DEVICES(decode_of_many_numbers) {
    const te_recipe recipes[] = {te_recipe_current_scaling(), te_recipe_block_scaling(), te_recipe_mxfp8(), te_recipe_nvfp4(), te_recipe_delayed_scaling()};
    for (int n = 0; n < 2 * COUNT(recipes); n += test_every_odd(2)) { /* 5: either batch once */
        const int64_t batch = n % 2 ? 2 : 16;
        const te_autocast_desc cast = {.recipe = &recipes[n / 2]};
        float *logits[2];
        test_case("%s, batch %d", te_recipe_name(recipes[n / 2].kind), (int)batch);
        te_causal_lm_desc desc = dec_desc(0, TE_BF16);
        desc.hidden_size = 1024, desc.intermediate_size = 256, desc.num_hidden_layers = 1;
        te_seed(te, 5);
        te_no_grad_begin(te);
        decoder d = dec_open(te, te_causal_lm_create(te, &desc), batch, TE_DTYPE_NONE);
        REQUIRE_OK(te);
        if (batch == 2) te_quant_inspect(te, true);
        for (int run = 0; run < 2; run++) {
            bool alone = run == 1;
            te_module_visit(d.m, dec_set_norms_alone, &alone);
            te_kv_cache_truncate(d.cache, 0);
            for (int i = 0; i < 2; i++) {
                te_autocast_begin(te, &cast);
                dec_step(&d, i ? d.id : dec_prompt(te, batch));
                te_autocast_end(te);
            }
            REQUIRE_OK(te);
            logits[run] = test_read(d.logits);
        }
        CHECK_BYTES("logits", logits[0], logits[1], (size_t)batch * DEC_V * sizeof(float));
        te_quant_inspect(te, false);
        te_no_grad_end(te);
        CHECK_OK(te);
        dec_close(&d);
    }
}

/* Linears that add their bias behind the product, since they are row-parallel, of one rank: that product cannot wait
 * for others. In the places of gate, up, o and down. */
static void dec_replace(te_module *parent, const char *name, int64_t in, int64_t out) {
    te_ctx *te = te_module_ctx(parent);
    const te_linear_desc desc = {.in_features = in, .out_features = out, .gemm.params_dtype = TE_BF16,
                                 .parallel.parallel_mode = TE_PARALLEL_ROW};
    te_module *m = te_linear_create(te, &desc);
    if (m) te_tensor_copy(te_module_parameter(m, "bias"), te_tensor_normal(te, TE_BF16, SHAPE(out), 0, 1));
    te_module_destroy(te_module_find(parent, name));
    te_module_add_child(parent, name, m);
}
TE_TEST_DEVICES(decode_of_row_parallel_linears) {
    enum { WIDE = 48 };
    float *logits[2][3];
    te_seed(te, 6);
    te_no_grad_begin(te);
    te_causal_lm_desc desc = dec_desc(0, TE_BF16);
    te_module *m = te_causal_lm_create(te, &desc);
    te_module *layer = te_module_find(m, "model.layers.1");
    /* gate waits and up does not, so the norm runs between them */
    dec_replace(te_module_find(m, "model.layers.0.mlp"), "up_proj", DEC_D, WIDE);
    dec_replace(te_module_find(layer, "self_attn"), "o_proj", DEC_D, DEC_D);
    dec_replace(te_module_find(layer, "mlp"), "gate_proj", DEC_D, WIDE);
    dec_replace(te_module_find(layer, "mlp"), "up_proj", DEC_D, WIDE);
    dec_replace(te_module_find(layer, "mlp"), "down_proj", WIDE, DEC_D);
    decoder d = dec_open(te, m, 1, TE_DTYPE_NONE);
    REQUIRE_OK(te);
    for (int run = 0; run < 2; run++) {
        bool alone = run == 1;
        te_module_visit(d.m, dec_set_alone, &alone);
        te_kv_cache_truncate(d.cache, 0);
        for (int i = 0; i < 3; i++) dec_step(&d, i ? d.id : dec_prompt(te, 1)), logits[run][i] = test_read(d.logits);
        REQUIRE_OK(te);
    }
    for (int i = 0; i < 3; i++) CHECK_BYTES("logits", logits[0][i], logits[1][i], DEC_V * sizeof(float));
    te_no_grad_end(te);
    CHECK_OK(te);
    dec_close(&d);
}

/* Every request for memory in turn is refused in a step: an error, and nothing of the step is left in the context. A
 * product by itself runs at once then, and the step that is repeated has the bits of one that was never refused. */
TE_TEST(decode_step_runs_out_of_memory) {
    enum { ROWS = 2 };
    purse *host = new_purse();
    te_ctx_desc memory = purse_desc(host, NULL);
    te_ctx *te = test_context_with(&memory);
    const te_recipe recipe = te_recipe_current_scaling();
    for (int stored = 0; stored < 2; stored++) {
        bool whole = false;
        int failed = 0;
        te_scope_begin(te);
        te_causal_lm_desc desc = dec_desc(0, TE_BF16);
        const te_autocast_desc cast = {.recipe = stored ? &recipe : NULL, .disabled = !stored};
        desc.num_hidden_layers = 1;
        te_seed(te, 5);
        te_no_grad_begin(te);
        if (stored) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
        te_module *m = te_causal_lm_create(te, &desc);
        if (stored) te_quantized_model_init_end(te);
        decoder d = dec_open(te, m, ROWS, TE_DTYPE_NONE);
        te_tensor *x = test_tensor(te, TE_BF16, SHAPE(ROWS, DEC_D), test_normal(ROWS * DEC_D, 1)),
                  *w = test_tensor(te, TE_BF16, SHAPE(DEC_D, DEC_D), test_normal(DEC_D * DEC_D, 2)),
                  *first = te_tensor_zeros(te, TE_I32, SHAPE(ROWS, 1));
        const float *product = test_read(te_linear(x, w, NULL)), *expected = NULL;
        dec_step(&d, dec_prompt(te, ROWS));
        te_tensor_copy(first, d.id);
        REQUIRE_OK(te);
        for (int64_t n = 0; !whole; n += n ? test_every_of(7, 3) : 1) {
            test_case("%s, request %lld", stored ? "FP8" : "bf16", (long long)n);
            for (int again = 0; again < 2; again++) {
                te_kv_cache_truncate(d.cache, DEC_P);
                REQUIRE_OK(te);
                host->calls = host->refused = 0;
                host->fail_at = again ? 0 : n;
                host->stays_out = true; /* else the pool gives back what it keeps, and asks once more */
                te_autocast_begin(te, &cast);
                dec_step(&d, first);
                te_autocast_end(te);
                host->fail_at = 0;
                if (again) break;
                whole = n && host->refused == 0;
                failed += !te_ok(te);
                if (!te_ok(te)) CHECK_EQ_INT(te_error_code(te), TE_ERR_OUT_OF_MEMORY);
                te_clear_error(te);
                te_scope_begin(te);
                CHECK_BYTES("product", test_read(te_linear(x, w, NULL)), product, ROWS * DEC_D * sizeof(float));
                te_scope_end(te);
            }
            REQUIRE_OK(te);
            const float *logits = test_read(d.logits);
            if (!expected) expected = logits;
            CHECK_BYTES("logits", logits, expected, ROWS * DEC_V * sizeof(float));
            REQUIRE(n < 100000);
        }
        CHECK_MSG(failed > 5, "%d steps failed", failed);
        te_no_grad_end(te);
        CHECK_OK(te);
        dec_close(&d);
        te_scope_end(te);
    }
}

/* One Linear of each layer has a forward of its own: its product runs at once, and so do those that would have waited
 * for it. The bits are those of a step where none has one. */
static bool dec_set_one_alone(void *user, te_module *m) {
    const char *name = *(const char **)user, *cls = te_module_get_class(m)->name;
    if (!strcmp(cls, "Linear") || !strcmp(cls, "RMSNorm"))
        te_module_set_forward(m, !strcmp(te_module_name(m), name) ? dec_alone : NULL);
    return true;
}
TE_TEST_DEVICES(decode_with_one_apart) {
    static const struct {
        const char *name;
        int joint, gemm, norm; /* of a layer */
    } parts[] = {{"none", 4, 0, 0},      {"q_proj", 3, 3, 1},    {"k_proj", 3, 3, 1},
                 {"v_proj", 3, 3, 1},    {"o_proj", 3, 1, 0},    {"gate_proj", 3, 2, 1},
                 {"up_proj", 3, 2, 1},   {"down_proj", 3, 1, 0}, {"input_layernorm", 4, 0, 1},
                 {"post_attention_layernorm", 4, 0, 1}};
    enum { LAYERS = 3, BATCH = 2 };
    const float *expected = NULL;
    te_seed(te, 5);
    te_no_grad_begin(te);
    te_causal_lm_desc desc = dec_desc(0, TE_BF16);
    decoder d = dec_open(te, te_causal_lm_create(te, &desc), BATCH, TE_DTYPE_NONE);
    REQUIRE_OK(te);
    for (int i = 0; i < COUNT(parts); i++) {
        dec_counts count = {0};
        test_case("%s", parts[i].name);
        te_module_visit(d.m, dec_set_one_alone, (void *)&parts[i].name);
        te_kv_cache_truncate(d.cache, 0);
        dec_step(&d, dec_prompt(te, BATCH));
        te_set_trace(te, dec_count, &count);
        dec_step(&d, d.id);
        te_set_trace(te, NULL, NULL);
        REQUIRE_OK(te);
        const float *logits = test_read(d.logits);
        if (!expected) expected = logits;
        CHECK_BYTES("logits", logits, expected, BATCH * DEC_V * sizeof(float));
        CHECK_EQ_INT(count.joint, LAYERS * parts[i].joint);
        CHECK_EQ_INT(count.gemm, LAYERS * parts[i].gemm + 1);
        CHECK_EQ_INT(count.norm, LAYERS * parts[i].norm + 1);
    }
    te_no_grad_end(te);
    dec_close(&d);
}
