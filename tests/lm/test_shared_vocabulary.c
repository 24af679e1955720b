/* test_shared_vocabulary.c: ranks that share a vocabulary, and the tokens between products: an embedding and a head by
 * themselves, what ranks of a language model hold and send, decoding, folders, and models that differ. test_ranks.c
 * trains such models beside one rank. */
#define _POSIX_C_SOURCE 200809L
#include "../dist/ranks.h"
#include "folder.h"

enum { SV_WORDS = 24, SV_WIDTH = 16, SV_LAYERS = 2, SV_LENGTH = 8 };

/* Compares with what one rank computes. f32 sums in another order: 1e-5 of numbers of about 1. On a GPU gradients are
 * rounded to TF32 between products, 2^-11 of a factor. */
static void sv_same(rank_state *s, const char *what, te_tensor *got, te_tensor *want) {
    char text[160];
    float a[1024], b[1024];
    const int64_t n = te_tensor_numel(want);
    double worst = n == te_tensor_numel(got) && n <= 1024 ? 0 : 1e9;
    if (worst == 0 && te_tensor_to_f32(got, a) == TE_OK && te_tensor_to_f32(want, b) == TE_OK)
        for (int i = 0; i < n; i++) worst = fmax(worst, fabs((double)a[i] - (double)b[i]) / (1 + fabs((double)b[i])));
    snprintf(text, sizeof text, "%s differs by %g", what, worst);
    if (!(worst < (te_ctx_is_cuda(s->te) ? 4e-3 : 1e-5))) wrong(s, text);
}
static te_tensor *sv_rows(te_tensor *x, int64_t rank, int64_t size) {
    const int64_t own = te_tensor_shape(x)[0] / size;
    return te_tensor_contiguous(te_tensor_narrow(x, 0, rank * own, own));
}
static void sv_refused(rank_state *s, const void *got, te_result code, const char *words) {
    char text[256];
    snprintf(text, sizeof text, "no \"%s\"", words);
    if (got || te_error_code(s->te) != code || !strstr(te_error(s->te), words)) wrong(s, text);
    te_clear_error(s->te);
}

/* ---- an embedding, and the head that reads its table ---- */

static void table_rank(rank_state *s) {
    te_ctx *te = s->te;
    int32_t ids[SV_LENGTH], targets[SV_LENGTH];
    for (int i = 0; i < SV_LENGTH; i++) ids[i] = i * 7 % SV_WORDS, targets[i] = i * 5 % SV_WORDS;
    te_tensor *id = te_tensor_from_host(te, TE_I32, SHAPE(SV_LENGTH), ids),
              *target = te_tensor_from_host(te, TE_I32, SHAPE(SV_LENGTH), targets);
    for (int way = 0; way < 4; way++) {
        const bool sequence = way & 1, parts = way & 2;
        te_embedding_desc d = {.num_embeddings = SV_WORDS, .embedding_dim = SV_WIDTH, .params_dtype = TE_F32};
        te_scope_begin(te);
        te_seed(te, 3);
        te_module *whole = te_embedding_create(te, &d);
        d.parallel.tp_group = s->group;
        d.parallel.sequence_parallel = sequence;
        te_seed(te, 3);
        te_module *m = te_embedding_create(te, &d);
        te_tensor *table[2] = {te_module_parameter(whole, "weight"), te_module_parameter(m, "weight")};
        sv_same(s, "the table", table[1], sv_rows(table[0], s->rank, s->size));
        te_tensor *x = te_forward(whole, id), *y = te_forward(m, id);
        sv_same(s, "what the ids look up", y, sequence ? sv_rows(x, s->rank, s->size) : x);
        /* numbers of another size, which both gradients depend on */
        te_tensor *logits[2] = {te_linear(te_scale(x, 30), table[0], NULL),
                                te_parallel_lm_logits(te_scale(y, 30), table[1],
                                                      &(te_parallel_lm_logits_desc){.tp_group = s->group,
                                                                                    .sequence_parallel = sequence,
                                                                                    .parallel_output = parts})};
        EXPECT(s, te_tensor_shape(logits[1])[1] == (parts ? SV_WORDS / s->size : SV_WORDS));
        if (!parts) sv_same(s, "the logits", logits[1], logits[0]);
        te_tensor *loss[2] = {te_cross_entropy(logits[0], target, NULL),
                              te_cross_entropy(logits[1], target,
                                               &(te_cross_entropy_desc){.dist_process_group = parts ? s->group : NULL})};
        sv_same(s, "the loss", loss[1], loss[0]);
        EXPECT(s, te_backward(loss[0]) == TE_OK && te_backward(loss[1]) == TE_OK);
        sv_same(s, "the table's gradient", te_tensor_grad(table[1]), sv_rows(te_tensor_grad(table[0]), s->rank, s->size));
        te_module_destroy(m);
        te_module_destroy(whole);
        te_scope_end(te);
    }
    te_embedding_desc late = {.num_embeddings = SV_WORDS, .embedding_dim = SV_WIDTH, .parallel.tp_size = s->size};
    te_module *m = te_embedding_create(te, &late); /* whose group comes later */
    sv_refused(s, te_forward(m, id), TE_ERR_STATE, "ranks share its work (tp_size) and it has no group");
    EXPECT(s, te_set_tensor_parallel_group(m, s->group) == TE_OK && te_forward(m, id));
    te_module_destroy(m);
    te_embedding_desc d = {.num_embeddings = SV_WORDS + 1, .embedding_dim = SV_WIDTH, .parallel.tp_group = s->group};
    sv_refused(s, te_embedding_create(te, &d), TE_ERR_INVALID, "num_embeddings is 25 and tp_size");
    sv_refused(s, te_parallel_lm_logits(id, id, &(te_parallel_lm_logits_desc){.tp_group = s->group}), TE_ERR_DTYPE, "te_parallel_lm_logits");
    sv_refused(s, te_parallel_lm_logits(te_tensor_zeros(te, TE_F32, SHAPE(1, 2)), te_tensor_zeros(te, TE_F32, SHAPE(2, 2)), NULL), TE_ERR_INVALID, "te_parallel_lm_logits");
}
TE_TEST_DEVICES(shared_table_looks_up_and_multiplies) {
    for (int size = 2; size <= 4; size += 2) {
        test_case("%d ranks", size);
        run_ranks_on(te_ctx_device(te), false, size, table_rank, NULL);
    }
}

/* ---- a language model ---- */

typedef struct sv_case {
    bool tied, joined; /* joined: a folder of phi3, with one tensor for q, k and v, and one for gate and up */
    float softcap;
    te_lm_parallel_options parallel;
    const char *from, *to; /* folders */
} sv_case;
static te_causal_lm_desc sv_desc(const sv_case *c, te_group *group) {
    return (te_causal_lm_desc){.vocab_size = SV_WORDS,
                               .hidden_size = SV_WIDTH,
                               .intermediate_size = 2 * SV_WIDTH,
                               .num_hidden_layers = SV_LAYERS,
                               .num_attention_heads = 4,
                               .tie_word_embeddings = c->tied,
                               .final_logit_softcapping = c->softcap,
                               .params_dtype = TE_F32,
                               .init.std = 0.3f,
                               .tp_group = group,
                               .parallel = c->parallel};
}
static te_module *sv_make(rank_state *s, const sv_case *c, te_group *group) {
    const te_causal_lm_desc d = sv_desc(c, group);
    te_seed(s->te, 8);
    te_module *m = te_causal_lm_create(s->te, &d);
    EXPECT(s, m);
    return m;
}
static te_tensor *sv_ids(te_ctx *te, int64_t batch, int64_t length) {
    int32_t ids[4 * SV_LENGTH];
    for (int i = 0; i < batch * length; i++) ids[i] = (i * i * 3 + i) % SV_WORDS;
    return te_tensor_from_host(te, TE_I32, SHAPE(batch, length), ids);
}

/* A rank has and sends parts of tables, logits and hidden states, and no logits while it trains. */
static void parts_rank(rank_state *s) {
    enum { BATCH = 3, TOKENS = BATCH * SV_LENGTH };
    const int64_t n = s->size, others = n - 1, row = SV_WIDTH * 4;
    for (int way = 0; way < 4; way++) {
        sv_case c = {.tied = way & 1, .parallel = {.sequence_parallel = way & 2, .parallel_output = true}};
        te_module *m = sv_make(s, &c, s->group), *whole = sv_make(s, &c, NULL);
        EXPECT(s, te_causal_lm_logits_group(m) == s->group && !te_causal_lm_logits_group(whole) && !te_causal_lm_logits_group(NULL));
        EXPECT(s, !te_causal_lm_logits_group(te_module_find(m, "model")));
        EXPECT(s, te_tensor_shape(te_module_parameter(te_module_find(m, "model.embed_tokens"), "weight"))[0] == SV_WORDS / n);
        if (!c.tied) EXPECT(s, te_tensor_shape(te_module_parameter(te_module_find(m, "lm_head"), "weight"))[0] == SV_WORDS / n);
        EXPECT(s, te_tensor_sequence_parallel(te_module_parameter(te_module_find(m, "model.norm"), "weight")) == c.parallel.sequence_parallel);
        for (int pass = 0; pass < 2; pass++) { /* in the first one ranks compare */
            te_scope_begin(s->te);
            te_tensor *ids = sv_ids(s->te, BATCH, SV_LENGTH);
            te_group_reset_stats(s->group);
            te_tensor *y = te_forward(m, ids);
            EXPECT(s, te_tensor_shape(y)[0] == BATCH && te_tensor_shape(y)[1] == SV_LENGTH && te_tensor_shape(y)[2] == SV_WORDS / n);
            te_tensor *loss = te_cross_entropy(y, ids, &(te_cross_entropy_desc){.dist_process_group = te_causal_lm_logits_group(m)});
            const te_group_stats sent = te_group_get_stats(s->group);
            /* Tokens are gathered for five projections of each layer and for the head. The loss exchanges three numbers a token. */
            const int64_t gathered = c.parallel.sequence_parallel ? (5 * SV_LAYERS + 1) * TOKENS / n * row : 0;
            if (pass) EXPECT(s, sent.all_gather.bytes == (uint64_t)(others * (gathered + 3 * TOKENS * 4)));
            EXPECT(s, sent.all_reduce.calls == (c.parallel.sequence_parallel ? 0 : 1 + 2 * SV_LAYERS));
            EXPECT(s, sent.reduce_scatter.calls == (c.parallel.sequence_parallel ? 1 + 2 * SV_LAYERS : 0));
            EXPECT(s, te_backward(loss) == TE_OK);
            const te_group_stats both = te_group_get_stats(s->group);
            /* api/dist.h, of two bytes: 38 or 16 of a layer, 10 or 8 of embedding and head, 12 of the loss */
            const int64_t units = c.parallel.sequence_parallel ? 38 * SV_LAYERS + 10 : 16 * SV_LAYERS + 8;
            if (pass) EXPECT(s, both.all_reduce.bytes + both.all_gather.bytes + both.reduce_scatter.bytes == (uint64_t)(units / 2 * others * TOKENS * row / n + 12 * others * TOKENS));
            te_module_zero_grad(m);
            te_scope_end(s->te);
        }
        te_scope_begin(s->te);
        te_no_grad_begin(s->te);
        te_tensor *ids = sv_ids(s->te, BATCH, SV_LENGTH), *hidden = te_forward(te_module_find(m, "model"), ids),
                  *all = te_forward(te_module_find(whole, "model"), ids);
        all = te_tensor_view(all, 2, (int64_t[]){TOKENS, SV_WIDTH});
        sv_same(s, "hidden states", te_tensor_view(hidden, 2, (int64_t[]){-1, SV_WIDTH}), c.parallel.sequence_parallel ? sv_rows(all, s->rank, n) : all);
        te_forward_args last = {.input = ids, .logits_to_keep = 2}, want = last;
        te_tensor *own = te_forward_with(m, &last), *kept = te_forward_with(whole, &want);
        EXPECT(s, te_tensor_shape(own)[1] == 2);
        sv_same(s, "the last logits", te_tensor_contiguous(te_tensor_transpose(own, 0, 2)),
                sv_rows(te_tensor_contiguous(te_tensor_transpose(kept, 0, 2)), s->rank, n));
        te_no_grad_end(s->te);
        te_scope_end(s->te);
        te_module_destroy(m);
        te_module_destroy(whole);
    }
}
TE_TEST(shared_vocabulary_parts_and_bytes) {
    for (int size = 2; size <= 4; size += 2) {
        test_case("%d ranks", size);
        run_ranks(size, parts_rank, NULL);
    }
}

/* Ids that follow on five others, of three sequences: those of one rank. */
static void decode_rank(rank_state *s) {
    const sv_case *c = (const sv_case *)s->arg;
    te_module *m[2] = {sv_make(s, c, s->group), sv_make(s, c, NULL)};
    int32_t ids[2][5][3];
    te_no_grad_begin(s->te);
    for (int k = 0; k < 2; k++) {
        te_kv_cache *cache = te_kv_cache_create(m[k], 3, 16);
        te_tensor *next = sv_ids(s->te, 3, 5);
        for (int i = 0; i < 5; i++) {
            te_forward_args args = {.input = next, .kv_cache = cache, .logits_to_keep = 1};
            te_tensor *logits = te_forward_with(m[k], &args);
            EXPECT(s, te_tensor_shape(logits)[2] == SV_WORDS);
            next = te_argmax(logits);
            te_tensor_to_host(next, ids[k][i]);
        }
        te_kv_cache_destroy(cache);
    }
    te_no_grad_end(s->te);
    EXPECT(s, !memcmp(ids[0], ids[1], sizeof ids[0]));
    te_module_destroy(m[0]);
    te_module_destroy(m[1]);
}
TE_TEST(shared_vocabulary_decodes) {
    static const sv_case cases[] = {{.tied = true},
                                    {.softcap = 5, .parallel = {.sequence_parallel = true, .parallel_output = true}},
                                    {.tied = true, .parallel = {.sequence_parallel = true}},
                                    {.parallel = {.vocab_parallel = TE_OFF, .sequence_parallel = true}}};
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("case %d", i);
        run_ranks(i % 2 ? 4 : 2, decode_rank, &cases[i]);
    }
}

/* A rank without memory, anywhere in a forward or backward pass: the others hear of it from this rank, and wait for
 * nothing. */
typedef struct starved {
    sv_case c;
    int phase;
    int64_t request;
    int *reached;
} starved;
static void starved_rank(rank_state *s) {
    const starved *f = (const starved *)s->arg;
    te_module *m = sv_make(s, &f->c, s->group);
    te_tensor *ids = sv_ids(s->te, 2, SV_LENGTH), *loss = NULL;
    te_result result = TE_OK;
    EXPECT(s, te_barrier(s->group) == TE_OK);
    te_memory_trim(s->te);
    for (int phase = 0; phase < 2 && result == TE_OK; phase++) {
        s->fail_at = s->rank == 1 && phase == f->phase ? s->requests + f->request : 0;
        if (phase == 0) {
            loss = te_cross_entropy(te_forward(m, ids), ids, &(te_cross_entropy_desc){.dist_process_group = te_causal_lm_logits_group(m)});
            result = te_error_code(s->te);
        } else result = te_backward(loss);
        if (s->rank == 1 && s->fail_at) *f->reached = s->requests >= s->fail_at;
        s->fail_at = 0;
    }
    s->failed = result != TE_OK;
    if (s->failed && s->rank == 0) EXPECT(s, strstr(te_error(s->te), "rank 1"));
    te_clear_error(s->te);
    te_module_destroy(m);
}
TE_TEST(shared_vocabulary_of_a_rank_that_starves) {
    for (int way = 0; way < 2; way++)
        for (int phase = 0; phase < 2; phase++) {
            int reached = 1, failures = 0;
            starved f = {.c = {.tied = !way, .parallel = {.sequence_parallel = way, .parallel_output = way}}, .phase = phase, .reached = &reached};
            for (f.request = 1; reached; f.request += 10 * test_every_odd(1)) {
                test_case("way %d, phase %d, request %lld", way, phase, (long long)f.request);
                rank_state *s = run_ranks(2, starved_rank, &f);
                CHECK(s[1].failed || !s[0].failed);
                failures += s[1].failed;
            }
            CHECK_MSG(failures > 2, "%d failures", failures);
        }
}

/* A rank fails before a part of a layer whose projections each gather tokens. The others hear so in the first of these, and
 * come to no other: the next exchange is one of all ranks. */
static te_result fails_here(te_module *m, te_forward_args *args) {
    te_tensor *none = te_tensor_zeros(te_module_ctx(m), TE_F32, SHAPE(3));
    args->outputs.out = te_add(args->input, none); /* whose sizes differ */
    return te_error_code(te_module_ctx(m));
}
static void fails_rank(rank_state *s) {
    static const char *const places[] = {"model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm"};
    const sv_case c = {.parallel = {.sequence_parallel = true}};
    te_module *m = sv_make(s, &c, s->group);
    te_tensor *ids = sv_ids(s->te, 2, SV_LENGTH);
    for (int met = 0; met < 2; met++) /* before the ranks have compared projections, and behind that */
        for (int i = 0; i < COUNT(places); i++) {
            te_module *norm = te_module_find(m, places[i]);
            if (s->rank == 1) te_module_set_forward(norm, fails_here);
            EXPECT(s, !te_forward(m, ids) && strstr(te_error(s->te), "te_add"));
            te_clear_error(s->te);
            te_module_set_forward(norm, NULL);
            EXPECT(s, te_barrier(s->group) == TE_OK);
            if (met || i) EXPECT(s, te_forward(m, ids));
        }
    te_module_destroy(m);
}
TE_TEST(shared_tokens_of_a_rank_that_fails) { run_ranks(2, fails_rank, NULL); }

#ifndef TE_NO_LORA
/* Adapters of modules that are whole on each rank, and have its own tokens alone: summed over the ranks, as
 * te_tensor_sequence_parallel says, their gradients are those of one rank. */
typedef struct sv_adapters {
    te_tensor *list[64];
    int n;
} sv_adapters;
static bool sv_adapter(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    sv_adapters *a = (sv_adapters *)user;
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER && te_tensor_requires_grad(x)) a->list[a->n++] = x;
    return true;
}
static void adapters_rank(rank_state *s) {
    static const char *const names[] = {"lm_head", "embed_tokens", "*.gate", "*.experts"};
    const bool dora = *(const bool *)s->arg; /* of a Linear */
    const te_lora_desc lora = {.dim = 4, .alpha = 4, .use_dora = dora, .target_modules = names, .num_target_modules = dora ? 1 : COUNT(names)};
    const sv_case c = {.parallel = {.vocab_parallel = TE_OFF, .sequence_parallel = true}};
    sv_adapters a[2] = {{.n = 0}, {.n = 0}};
    te_module *m[2];
    for (int k = 0; k < 2; k++) { /* by itself, and with the other ranks */
        te_causal_lm_desc d = sv_desc(&c, k ? s->group : NULL);
        d.num_local_experts = 4;
        d.num_experts_per_tok = 2;
        int given = 0;
        te_seed(s->te, 8);
        m[k] = te_causal_lm_create(s->te, &d);
        EXPECT(s, te_lora_apply(m[k], &lora, &given) == TE_OK && given == (dora ? 1 : 2 + 2 * SV_LAYERS));
        te_module_visit_tensors(m[k], sv_adapter, &a[k]);
        te_seed(s->te, 9);
        for (int i = 0; i < a[k].n; i++) te_tensor_copy(a[k].list[i], te_tensor_normal(s->te, TE_F32, te_tensor_ndim(a[k].list[i]), te_tensor_shape(a[k].list[i]), 0, 0.3f));
        te_tensor *ids = sv_ids(s->te, 2, SV_LENGTH);
        EXPECT(s, te_backward(te_cross_entropy(te_forward(m[k], ids), ids, NULL)) == TE_OK);
    }
    EXPECT(s, a[0].n == a[1].n && a[0].n == (dora ? 3 : 4 + 6 * SV_LAYERS));
    for (int i = 0; i < a[1].n && te_ok(s->te); i++) {
        EXPECT(s, te_tensor_sequence_parallel(a[1].list[i]) && !te_tensor_sequence_parallel(a[0].list[i]));
        if (te_tensor_sequence_parallel(a[1].list[i])) te_all_reduce(s->group, te_tensor_grad(a[1].list[i]), TE_REDUCE_SUM);
        sv_same(s, "an adapter's gradient", te_tensor_grad(a[1].list[i]), te_tensor_grad(a[0].list[i]));
    }
    for (int k = 0; k < 2; k++) te_module_destroy(m[k]);
}
TE_TEST(shared_tokens_and_adapters) {
    for (int dora = 0; dora < 2; dora++) {
        const bool arg = dora;
        test_case("dora %d", dora);
        run_ranks(2, adapters_rank, &arg);
    }
}
#endif

/* ---- folders ---- */

static void sv_config(const char *folder, const sv_case *c) {
    char text[1024];
    snprintf(text, sizeof text,
             "{\"model_type\": \"%s\", \"vocab_size\": %d, \"hidden_size\": %d, \"intermediate_size\": %d, "
             "\"num_hidden_layers\": %d, \"num_attention_heads\": 4, \"num_key_value_heads\": 4, \"head_dim\": 4, "
             "\"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"tie_word_embeddings\": %s, "
             "\"max_position_embeddings\": 64}",
             c->joined ? "phi3" : "llama", SV_WORDS, SV_WIDTH, 2 * SV_WIDTH, SV_LAYERS, c->tied ? "true" : "false");
    spit_text(in_folder(folder, "config.json"), text);
}
typedef struct sv_list {
    te_safetensors_item items[64];
    char names[64][96];
    int n;
} sv_list;
static bool sv_put(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    sv_list *l = (sv_list *)user;
    (void)m, (void)kind;
    snprintf(l->names[l->n], sizeof l->names[0], "%s", path);
    l->items[l->n] = (te_safetensors_item){l->names[l->n], x};
    l->n++;
    return true;
}
/* Joins the items whose names end with one of `names`, neighbours, to one by the name `to`. */
static void sv_join(sv_list *l, const char *const *names, int n, const char *to) {
    for (int i = 0; i < l->n; i++) {
        char *end = strstr(l->names[i], names[0]);
        te_tensor *parts[3];
        if (!end) continue;
        for (int k = 0; k < n; k++) {
            CHECK(strstr(l->names[i + k], names[k]));
            parts[k] = (te_tensor *)l->items[i + k].tensor;
        }
        l->items[i].tensor = te_concat(parts, n, 0);
        snprintf(end, 48, "%s", to);
        for (int k = i + 1; k + n - 1 < l->n; k++) {
            l->items[k].tensor = l->items[k + n - 1].tensor;
            memcpy(l->names[k], l->names[k + n - 1], sizeof l->names[k]);
        }
        l->n -= n - 1;
    }
}
static void sv_folder(const char *folder, const sv_case *c) {
    te_ctx *te = test_context("cpu");
    sv_list *l = (sv_list *)test_alloc(sizeof *l);
    const te_causal_lm_desc d = sv_desc(c, NULL);
    te_seed(te, 8);
    te_module *m = te_causal_lm_create(te, &d);
    REQUIRE(m && mkdir(test_path(folder), 0700) == 0);
    sv_config(folder, c);
    l->n = 0;
    te_scope_begin(te);
    te_no_grad_begin(te);
    te_module_visit_tensors(m, sv_put, l);
    if (c->joined) sv_join(l, (const char *const[]){"q_proj.", "k_proj.", "v_proj."}, 3, "qkv_proj.weight"), sv_join(l, (const char *const[]){"gate_proj.", "up_proj."}, 2, "gate_up_proj.weight");
    CHECK_EQ_INT(te_safetensors_write(te, in_folder(folder, "model.safetensors"), l->items, l->n, NULL, 0), TE_OK);
    te_no_grad_end(te);
    te_scope_end(te);
    te_module_destroy(m);
}
static void folder_rank(rank_state *s) {
    const sv_case *c = (const sv_case *)s->arg;
    te_dist dist;
    EXPECT(s, te_dist_init(s->te, &(te_dist_desc){.tp = s->size, .world = s->group}, &dist) == TE_OK);
    te_module *whole = te_hf_open(s->te, c->from, NULL);
    te_memory_trim(s->te);
    const size_t before = te_memory_get_stats(s->te).allocated;
    te_memory_reset_peak(s->te);
    te_module *m = te_hf_open(s->te, c->from, &(te_hf_desc){.dist = &dist, .parallel = c->parallel});
    const size_t opened = te_memory_get_stats(s->te).peak_allocated - before, now = te_memory_get_stats(s->te).allocated - before;
    EXPECT(s, whole && m);
    if (m && whole) {
        /* beside the parts that stay, one whole tensor of those whose columns are divided, and its part; the pool's
         * blocks are of 512 bytes. A whole table, 24 rows of 64 bytes, is as large, and is not read */
        EXPECT(s, opened <= now + 2 * SV_WIDTH * SV_WIDTH * 4 + 2 * SV_WIDTH * SV_WIDTH * 4 / (size_t)s->size + 1024);
        te_no_grad_begin(s->te);
        te_tensor *ids = sv_ids(s->te, 2, SV_LENGTH), *y = te_forward(m, ids);
        sv_same(s, "the logits of a folder", y, te_forward(whole, ids));
        te_no_grad_end(s->te);
        EXPECT(s, te_hf_save(m, c->to) == TE_OK);
        te_module *again = te_hf_open(s->te, c->to, NULL); /* on one rank, with the same bits */
        sv_list a = {.n = 0}, b = {.n = 0};
        EXPECT(s, again && te_module_visit_tensors(again, sv_put, &a) && te_module_visit_tensors(whole, sv_put, &b) && a.n == b.n);
        for (int i = 0; i < a.n && again; i++) {
            float x[1024], z[1024];
            const size_t n = (size_t)te_tensor_numel(b.items[i].tensor);
            EXPECT(s, n <= 1024 && te_tensor_to_f32((te_tensor *)a.items[i].tensor, x) == TE_OK && te_tensor_to_f32((te_tensor *)b.items[i].tensor, z) == TE_OK);
            EXPECT(s, !memcmp(x, z, n * sizeof *x));
        }
        te_module_destroy(again);
    }
    te_module_destroy(m);
    te_module_destroy(whole);
    te_dist_finish(&dist);
}
TE_TEST(shared_vocabulary_in_folders) {
    static const sv_case cases[] = {{.parallel = {.sequence_parallel = true}}, {.tied = true}, {.parallel = {.vocab_parallel = TE_OFF}}, {.joined = true}};
    for (int i = 0; i < COUNT(cases); i++) {
        char from[16], to[16];
        sv_case c = cases[i];
        snprintf(from, sizeof from, "from%d", i);
        snprintf(to, sizeof to, "to%d", i);
        sv_folder(from, &c);
        c.from = test_path(from), c.to = test_path(to);
        test_case("case %d", i);
        run_ranks(i % 2 ? 4 : 2, folder_rank, &c);
    }
}

/* ---- refusals ---- */

static void refusal_rank(rank_state *s) {
    sv_case c = {.tied = false};
    te_causal_lm_desc d = sv_desc(&c, s->group);
    d.vocab_size = 25;
    d.parallel.vocab_parallel = TE_ON;
    sv_refused(s, te_causal_lm_create(s->te, &d), TE_ERR_INVALID, "tp_group has 2 ranks, and vocab_size is 25");
    d.parallel.vocab_parallel = (te_switch)3;
    sv_refused(s, te_causal_lm_create(s->te, &d), TE_ERR_INVALID, "parallel.vocab_parallel is 3");
    d.parallel.vocab_parallel = TE_DEFAULT; /* whole tables, then */
    d.parallel.sequence_parallel = d.parallel.parallel_output = true;
    te_module *m = te_causal_lm_create(s->te, &d);
    EXPECT(s, m && !te_causal_lm_logits_group(m) && te_tensor_shape(te_module_parameter(te_module_find(m, "lm_head"), "weight"))[0] == 25);
    EXPECT(s, te_tensor_sequence_parallel(te_module_parameter(te_module_find(m, "lm_head"), "weight")));
    sv_refused(s, te_forward(m, sv_ids(s->te, 2, 7)), TE_ERR_SHAPE, "the ids are [2, 7], and 2 ranks share the tokens");
    te_module_destroy(m);
    /* ranks whose models differ: the first call names both */
    c.parallel.parallel_output = s->rank == 1;
    m = sv_make(s, &c, s->group);
    te_tensor *y = te_forward(m, sv_ids(s->te, 1, SV_LENGTH));
    EXPECT(s, strstr(te_error(s->te), "parallel_output false") && strstr(te_error(s->te), "parallel_output true"));
    sv_refused(s, y, TE_ERR_STATE, "its ranks are about to do different things");
    te_module_destroy(m);
    c.parallel = (te_lm_parallel_options){.ub_overlap_ag = s->rank == 1, .sequence_parallel = true};
    m = sv_make(s, &c, s->group);
    sv_refused(s, te_forward(m, sv_ids(s->te, 1, SV_LENGTH)), TE_ERR_STATE, "options ub_ 1 ");
    te_module_destroy(m);
    c.parallel = (te_lm_parallel_options){.vocab_parallel = s->rank == 1 ? TE_ON : TE_OFF};
    m = sv_make(s, &c, s->group);
    sv_refused(s, te_forward(m, sv_ids(s->te, 1, SV_LENGTH)), TE_ERR_STATE, "vocab_parallel off");
    te_module_destroy(m);
#ifndef TE_NO_LORA
    c.parallel = (te_lm_parallel_options){.vocab_parallel = TE_ON};
    m = sv_make(s, &c, s->group);
    static const char *const names[] = {"embed_tokens"};
    const te_result result = te_lora_apply(m, &(te_lora_desc){.dim = 2, .target_modules = names, .num_target_modules = 1}, NULL);
    sv_refused(s, result == TE_OK ? m : NULL, TE_ERR_UNSUPPORTED, "an Embedding whose rows 2 ranks share");
    te_module_destroy(m);
#endif
}
TE_TEST(shared_vocabulary_refusals) { run_ranks(2, refusal_rank, NULL); }
