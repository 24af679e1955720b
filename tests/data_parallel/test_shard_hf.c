/* test_shard_hf.c: folders of Hugging Face transformers that ranks with sharded units open and save together: the same
 * values as one rank's, in little memory; beside ranks that share the model in other ways; and ranks that fail. */
#include "shards.h"

#include "../lm/folder.h"
#include "lost.h"
#include <dirent.h>
#include <unistd.h>

enum { HF_D = 64, HF_FF = 96, HF_V = 50, HF_HEADS = 4, HF_KV = 2, HF_LAYERS = 3, HF_EXPERTS = 3, HF_FE = 32 };

typedef enum hf_kind { HF_LLAMA, HF_PHI3, HF_QWEN_EACH, HF_QWEN_STACKED, HF_KINDS } hf_kind;
static const char *const hf_names[HF_KINDS] = {"llama", "phi3", "qwen3_moe", "qwen3_moe, stacked"};

typedef struct hf_writing {
    te_ctx *te;
    te_safetensors_item items[256];
    char names[256][96];
    int n;
} hf_writing;
static void hf_put(hf_writing *w, const char *name, int ndim, const int64_t *shape) {
    snprintf(w->names[w->n], sizeof w->names[0], "%s", name);
    w->items[w->n].name = w->names[w->n];
    w->items[w->n].tensor = te_tensor_normal(w->te, TE_BF16, ndim, shape, 0, 0.2f);
    w->n++;
}
static void hf_put_in(hf_writing *w, int layer, const char *name, int64_t a, int64_t b, int64_t c) {
    const int64_t shape[3] = {a, b, c};
    char full[96];
    snprintf(full, sizeof full, "model.layers.%d.%s", layer, name);
    hf_put(w, full, c ? 3 : b ? 2 : 1, shape);
}
/* Writes a folder of a small model in two files with an index. */
static void hf_make(hf_kind kind, const char *folder) {
    te_ctx *te = test_context("cpu");
    hf_writing *w = (hf_writing *)test_alloc(sizeof *w);
    const int64_t head = HF_D / HF_HEADS, q = HF_HEADS * head, kv = HF_KV * head;
    const bool experts = kind >= HF_QWEN_EACH;
    static char text[8192];
    te_scope_begin(te);
    te_seed(te, 77);
    w->te = te;
    w->n = 0;
    REQUIRE(mkdir(test_path(folder), 0700) == 0);
    hf_put(w, "model.embed_tokens.weight", 2, (int64_t[]){HF_V, HF_D});
    hf_put(w, "model.norm.weight", 1, (int64_t[]){HF_D});
    hf_put(w, "lm_head.weight", 2, (int64_t[]){HF_V, HF_D});
    for (int i = 0; i < HF_LAYERS; i++) {
        hf_put_in(w, i, "input_layernorm.weight", HF_D, 0, 0);
        hf_put_in(w, i, "post_attention_layernorm.weight", HF_D, 0, 0);
        if (kind == HF_PHI3) {
            hf_put_in(w, i, "self_attn.qkv_proj.weight", q + 2 * kv, HF_D, 0);
            hf_put_in(w, i, "mlp.gate_up_proj.weight", 2 * HF_FF, HF_D, 0);
        } else {
            hf_put_in(w, i, "self_attn.q_proj.weight", q, HF_D, 0);
            hf_put_in(w, i, "self_attn.k_proj.weight", kv, HF_D, 0);
            hf_put_in(w, i, "self_attn.v_proj.weight", kv, HF_D, 0);
        }
        hf_put_in(w, i, "self_attn.o_proj.weight", HF_D, q, 0);
        if (experts) {
            hf_put_in(w, i, "self_attn.q_norm.weight", head, 0, 0);
            hf_put_in(w, i, "self_attn.k_norm.weight", head, 0, 0);
            hf_put_in(w, i, "mlp.gate.weight", HF_EXPERTS, HF_D, 0);
        }
        if (kind == HF_QWEN_STACKED) {
            hf_put_in(w, i, "mlp.experts.gate_up_proj", HF_EXPERTS, 2 * HF_FE, HF_D);
            hf_put_in(w, i, "mlp.experts.down_proj", HF_EXPERTS, HF_D, HF_FE);
        }
        for (int e = 0; e < HF_EXPERTS && kind == HF_QWEN_EACH; e++) {
            char name[64];
            snprintf(name, sizeof name, "mlp.experts.%d.gate_proj.weight", e);
            hf_put_in(w, i, name, HF_FE, HF_D, 0);
            snprintf(name, sizeof name, "mlp.experts.%d.up_proj.weight", e);
            hf_put_in(w, i, name, HF_FE, HF_D, 0);
            snprintf(name, sizeof name, "mlp.experts.%d.down_proj.weight", e);
            hf_put_in(w, i, name, HF_D, HF_FE, 0);
        }
        if (kind == HF_LLAMA) {
            hf_put_in(w, i, "mlp.gate_proj.weight", HF_FF, HF_D, 0);
            hf_put_in(w, i, "mlp.up_proj.weight", HF_FF, HF_D, 0);
        }
        if (!experts) hf_put_in(w, i, "mlp.down_proj.weight", HF_D, HF_FF, 0);
    }
    int used = snprintf(text, sizeof text, "{\"weight_map\": {"), half = w->n / 2;
    for (int i = 0; i < w->n; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s\"%s\": \"part-%d.safetensors\"", i ? ", " : "",
                         w->items[i].name, i >= half);
    snprintf(text + used, sizeof text - (size_t)used, "}}");
    te_safetensors_write(te, in_folder(folder, "part-0.safetensors"), w->items, half, NULL, 0);
    te_safetensors_write(te, in_folder(folder, "part-1.safetensors"), w->items + half, w->n - half, NULL, 0);
    spit_text(in_folder(folder, "model.safetensors.index.json"), text);
    snprintf(text, sizeof text,
             "{\"model_type\": \"%s\", \"vocab_size\": %d, \"hidden_size\": %d, \"intermediate_size\": %d, "
             "\"num_hidden_layers\": %d, \"num_attention_heads\": %d, \"num_key_value_heads\": %d, \"head_dim\": %d, "
             "\"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0%s, "
             "\"tie_word_embeddings\": false, \"max_position_embeddings\": 64}",
             kind == HF_LLAMA ? "llama" : kind == HF_PHI3 ? "phi3" : "qwen3_moe", HF_V, HF_D, HF_FF, HF_LAYERS,
             HF_HEADS, HF_KV, (int)head,
             experts ? ", \"num_experts\": 3, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 32, "
                       "\"norm_topk_prob\": true, \"mlp_only_layers\": []"
                     : "");
    spit_text(in_folder(folder, "config.json"), text);
    spit_text(in_folder(folder, "tokenizer.json"), "{}");
    REQUIRE_OK(te);
    te_scope_end(te);
}

typedef struct hf_case {
    const number_case *num; /* `stored`: the projections are stored quantized; dtype: of the parameters */
    te_shard shard;
    const char *from, *to, *wrong; /* folders */
    int64_t request;               /* which request of memory of rank 1 fails, in which call; 0: none */
    int call;
    int *reached;
} hf_case;
static te_module *hf_open(rank_state *s, const hf_case *c, const char *folder, bool units) {
    te_recipe recipe = c->num->recipe();
    const te_data_parallel_desc d = {.group = s->group, .shard = c->shard};
    te_seed(s->te, 9);
    if (c->num->stored) te_quantized_model_init_begin(s->te, &(te_quantized_model_init_desc){.recipe = &recipe});
    te_module *m =
        te_hf_open(s->te, folder, &(te_hf_desc){.params_dtype = c->num->dtype, .quantized_lm_head = c->num->stored,
                                                .units = units ? &d : NULL});
    if (c->num->stored) te_quantized_model_init_end(s->te);
    return m;
}
static void hf_rank(rank_state *s) {
    const hf_case *c = (const hf_case *)s->arg;
    te_module *m, *whole = hf_open(s, c, c->from, false), *again;
    te_fsdp_slice slice;
    EXPECT(s, whole);
    te_memory_trim(s->te);
    const size_t before = te_memory_get_stats(s->te).allocated;
    te_memory_reset_peak(s->te);
    m = hf_open(s, c, c->from, true);
    EXPECT(s, m);
    if (!whole || !m) return;
    const size_t opened = te_memory_get_stats(s->te).peak_allocated - before;
    EXPECT(s, te_fsdp_get_slice(te_module_parameter(te_module_find(m, "model.norm"), "weight"), &slice) ==
                  (c->shard > TE_SHARD_NONE));
    expect_same(s, m, whole, 0);
    /* all ranks save; files of others are read */
    te_memory_trim(s->te);
    te_memory_reset_peak(s->te);
    const size_t kept = te_memory_get_stats(s->te).allocated;
    if (c->shard == TE_SHARD_PARAMETERS || s->rank == 0) EXPECT(s, te_hf_save(m, c->to) == TE_OK);
    const size_t saved = te_memory_get_stats(s->te).peak_allocated - kept;
    EXPECT(s, te_barrier(s->group) == TE_OK);
    again = hf_open(s, c, c->to, s->size == 2);
    EXPECT(s, again);
    if (!c->num->stored) { /* codes that are decoded and quantized again may be others */
        expect_same(s, again, whole, 0);
        te_module_destroy(again);
        again = hf_open(s, c, c->to, true);
        EXPECT(s, again);
        expect_same(s, again, whole, 0);
    }
    if (c->shard == TE_SHARD_PARAMETERS && !c->num->stored) {
        const size_t size = (size_t)te_dtype_bits(c->num->dtype) / 8,
                     layer = size * (2 * HF_D * HF_D + 2 * HF_D * HF_D / 2 + 3 * HF_D * HF_FF),
                     rest = size * 2 * HF_V * HF_D, all = HF_LAYERS * layer + rest;
        /* The slices and the largest unit; and, beside a unit, the slices of its largest tensor, or one that is joined of
         * two of these. A quarter: norms, routers and blocks of the pool. */
        EXPECT(s, opened <= (all / (size_t)s->size + layer) * 5 / 4);
        EXPECT(s, saved <= (layer + size * 2 * HF_D * HF_FF) * 5 / 4);
    }
    te_module_destroy(again);
    te_module_destroy(m);
    te_module_destroy(whole);
}
static int weights_in(const char *folder) {
    int n = 0;
    DIR *dir = opendir(folder);
    for (struct dirent *e = dir ? readdir(dir) : NULL; e; e = readdir(dir))
        n += strncmp(e->d_name, "model", 5) == 0 && strstr(e->d_name, ".safetensors") && !strstr(e->d_name, ".json");
    if (dir) closedir(dir);
    return n;
}
TE_TEST(shard_folders_open_and_save) {
    static const number_case f32 = {"f32", TE_F32, no_recipe, false, false};
    const number_case *formats[] = {&numbers[1], &f32, &numbers[6], &numbers[8]};
    for (int kind = 0; kind < HF_KINDS; kind++) {
        char from[32];
        snprintf(from, sizeof from, "from%d", kind);
        hf_make((hf_kind)kind, from);
        for (int i = 0; i < COUNT(formats); i++)
            for (int size = 1; size <= 4; size++)
                for (int shard = size == 2 ? TE_SHARD_NONE : TE_SHARD_PARAMETERS; shard <= TE_SHARD_PARAMETERS; shard++) {
                    char to[64];
                    if ((i > 1 || size == 3) && kind == HF_QWEN_EACH) continue; /* as stacked */
                    if ((kind + i + size + (int)shard) % test_every_odd(1)) continue;
                    snprintf(to, sizeof to, "to%d.%d", kind, i); /* of the layout before it nothing stays */
                    const hf_case c = {.num = formats[i],
                                       .shard = (te_shard)shard,
                                       .from = test_path(from),
                                       .to = test_path(to)};
                    test_case("%s, %s, %d ranks, shard %d", hf_names[kind], c.num->name, size, shard);
                    run_ranks(size, hf_rank, &c);
                    /* one file for each rank, an index, and no model.safetensors beside it */
                    const bool set = shard == TE_SHARD_PARAMETERS && size > 1;
                    struct stat st;
                    char name[64];
                    CHECK((stat(in_folder(to, "model.safetensors.index.json"), &st) == 0) == set);
                    CHECK((stat(in_folder(to, "model.safetensors"), &st) == 0) == !set);
                    snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", size, size);
                    CHECK((stat(in_folder(to, name), &st) == 0) == set);
                    CHECK_EQ_INT(weights_in(test_path(to)), set ? size : 1);
                    CHECK(stat(in_folder(to, "config.json"), &st) == 0 && stat(in_folder(to, "tokenizer.json"), &st) == 0);
                }
    }
}

/* ---- with ranks that share the model in other ways ---- */

typedef struct hf_layout {
    int tp, cp, ep, size;
    te_shard shard;
    hf_kind kind;
    const char *from, *to, *gathered; /* folders; gathered: of a save after te_fsdp_unshard */
    int64_t request;                  /* which request of memory of rank 1 fails in te_hf_save; 0: none */
    bool opens;                       /* .. or in te_hf_open */
    int *reached;
} hf_layout;
static bool hf_share(rank_state *s, const hf_layout *c, te_dist *dist) {
    const bool fine = te_dist_init(s->te, &(te_dist_desc){.tp = c->tp, .cp = c->cp, .ep = c->ep, .world = s->group},
                                   dist) == TE_OK;
    EXPECT(s, fine);
    return fine;
}
static te_tensor *hf_logits(rank_state *s, te_module *m) {
    const int32_t ids[8] = {3, 1, 4, 1, 5, 9, 2, 6};
    te_no_grad_begin(s->te);
    te_tensor *y = te_forward(m, te_tensor_from_host(s->te, TE_I32, SHAPE(1, 8), ids));
    te_no_grad_end(s->te);
    return y;
}
static void hf_layout_rank(rank_state *s) {
    const hf_layout *c = (const hf_layout *)s->arg;
    te_dist dist;
    if (!hf_share(s, c, &dist)) return;
    const te_data_parallel_desc d = {.group = dist.data, .shard = c->shard};
    te_module *m = te_hf_open(s->te, c->from, &(te_hf_desc){.dist = &dist, .units = &d}),
              *whole = m ? te_hf_open(s->te, c->from, &(te_hf_desc){.dist = &dist}) : NULL, *again;
    if (!m || !whole) wrong(s, "no model");
    else {
        te_fsdp_slice slice;
        EXPECT(s, te_fsdp_get_slice(te_module_parameter(te_module_find(m, "model.norm"), "weight"), &slice));
        expect_same(s, m, whole, 0);
        te_tensor *a = hf_logits(s, m), *b = hf_logits(s, whole);
        EXPECT(s, a && b && same_values(a, b, 0));
        te_memory_trim(s->te);
        te_memory_reset_peak(s->te);
        const size_t kept = te_memory_get_stats(s->te).allocated;
        EXPECT(s, te_hf_save(m, c->to) == TE_OK);
        /* One tensor of the files, bf16: what it is gathered in, the whole of each of its parameters, and these joined;
         * and a unit that is gathered, and what it is gathered in. A quarter: norms, routers and blocks of the pool. */
        const size_t widest = 2 * (c->kind == HF_QWEN_STACKED ? HF_EXPERTS * 2 * HF_FE * HF_D : 2 * HF_FF * HF_D),
                     unit = c->shard == TE_SHARD_PARAMETERS
                                ? 2 * 2 * (3 * HF_D * HF_D + 3 * HF_D * (c->kind >= HF_QWEN_EACH ? HF_EXPERTS * HF_FE : HF_FF)) : 0;
        EXPECT(s, te_memory_get_stats(s->te).peak_allocated - kept <= (3 * widest + unit) * 5 / 4);
        EXPECT(s, te_fsdp_unshard(m) == TE_OK && te_hf_save(m, c->gathered) == TE_OK);
        for (int i = 0; i < 2; i++) {
            again = te_hf_open(s->te, i ? c->gathered : c->to, &(te_hf_desc){.dist = &dist});
            EXPECT(s, again);
            if (again) expect_same(s, again, whole, 0);
            te_module_destroy(again);
        }
    }
    te_module_destroy(m);
    te_module_destroy(whole);
    te_dist_finish(&dist);
}
TE_TEST(shard_folders_in_layouts) {
    static const hf_layout cases[] = {
        {.tp = 2, .size = 4, .shard = TE_SHARD_PARAMETERS, .kind = HF_PHI3},
        {.tp = 2, .size = 4, .shard = TE_SHARD_PARAMETERS, .kind = HF_LLAMA},
        {.tp = 2, .size = 4, .shard = TE_SHARD_OPTIMIZER, .kind = HF_PHI3},
        {.cp = 2, .size = 4, .shard = TE_SHARD_PARAMETERS, .kind = HF_PHI3},
        {.size = 2, .shard = TE_SHARD_PARAMETERS, .kind = HF_QWEN_EACH},
        {.ep = 3, .size = 3, .shard = TE_SHARD_PARAMETERS, .kind = HF_QWEN_EACH},
        {.ep = 3, .size = 6, .shard = TE_SHARD_PARAMETERS, .kind = HF_QWEN_STACKED},
        {.ep = 3, .tp = 2, .size = 6, .shard = TE_SHARD_PARAMETERS, .kind = HF_QWEN_EACH},
        {.ep = 3, .size = 3, .shard = TE_SHARD_OPTIMIZER, .kind = HF_QWEN_STACKED}};
    for (int i = 0; i < COUNT(cases); i++) {
        char from[32], to[32], gathered[32];
        struct stat st;
        hf_layout c = cases[i];
        snprintf(from, sizeof from, "from%d", i);
        snprintf(to, sizeof to, "to%d", i);
        snprintf(gathered, sizeof gathered, "gathered%d", i);
        hf_make(c.kind, from);
        c.from = test_path(from), c.to = test_path(to), c.gathered = test_path(gathered);
        test_case("%s, tp %d, cp %d, ep %d, shard %d", hf_names[c.kind], c.tp, c.cp, c.ep, (int)c.shard);
        run_ranks(c.size, hf_layout_rank, &c);
        CHECK((stat(in_folder(to, "model.safetensors.index.json"), &st) == 0) == (c.shard == TE_SHARD_PARAMETERS));
        CHECK_EQ_INT(weights_in(test_path(to)), c.shard == TE_SHARD_PARAMETERS ? c.size : 1);
        CHECK(stat(in_folder(gathered, "model.safetensors"), &st) == 0);
        CHECK(stat(in_folder(gathered, "model.safetensors.index.json"), &st) != 0);
    }
}

/* ---- one save after another ---- */

static void copy_file(const char *from, const char *to) {
    char buffer[4096];
    FILE *a = fopen(from, "rb"), *b = fopen(to, "wb");
    size_t n;
    CHECK(a && b);
    while (a && b && (n = fread(buffer, 1, sizeof buffer, a)) > 0) CHECK(fwrite(buffer, 1, n, b) == n);
    if (a) fclose(a);
    if (b) fclose(b);
}
/* Writes the norm of a model whose weight is `value`. */
static void hf_value_rank(rank_state *s) {
    const hf_case *c = (const hf_case *)s->arg;
    te_module *m = hf_open(s, c, c->from, true);
    EXPECT(s, m && te_fsdp_unshard(m) == TE_OK);
    EXPECT(s, te_tensor_fill(te_module_parameter(te_module_find(m, "model.norm"), "weight"), (double)c->request) == TE_OK);
    EXPECT(s, te_fsdp_reshard(m) == TE_OK && te_hf_save(m, c->to) == TE_OK);
    te_module_destroy(m);
}
static float hf_value_in(const char *folder) {
    te_ctx *te = test_context("cpu");
    te_scope_begin(te);
    te_module *m = te_hf_open(te, folder, NULL);
    const float value = m ? (float)te_tensor_item(te_tensor_narrow(te_module_parameter(te_module_find(m, "model.norm"), "weight"), 0, 0, 1)) : NAN;
    CHECK(m);
    te_module_destroy(m);
    te_scope_end(te);
    return value;
}
/* No save writes over a file that an index names: a save that was killed between two of its files leaves the set of
 * before, and the next one removes what it has left. */
TE_TEST(shard_folders_name_one_set) {
    static const char *const names[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                        "model.1-00001-of-00002.safetensors", "model.1-00002-of-00002.safetensors",
                                        "model.2-00001-of-00002.safetensors", "model.2-00002-of-00002.safetensors",
                                        "model.safetensors.index.json"};
    struct stat st;
    hf_make(HF_LLAMA, "from");
    hf_case c = {.num = &numbers[1], .shard = TE_SHARD_PARAMETERS, .from = test_path("from"), .to = test_path("to")};
    for (c.request = 1; c.request <= 3; c.request++) {
        run_ranks(2, hf_value_rank, &c);
        CHECK(hf_value_in(c.to) == (float)c.request);
        CHECK_EQ_INT(weights_in(c.to), 2);
        CHECK(stat(in_folder("to", names[c.request == 2 ? 2 : 0]), &st) == 0);
        if (c.request > 1) continue;
        REQUIRE(mkdir(test_path("first"), 0700) == 0);
        for (int i = 0; i < 7; i += i == 1 ? 5 : 1) copy_file(in_folder("to", names[i]), in_folder("first", names[i]));
    }
    /* a fourth save, which ends when its files are there, and the index is not */
    run_ranks(2, hf_value_rank, &c);
    for (int i = 0; i < 7; i += i == 1 ? 5 : 1) copy_file(in_folder("first", names[i]), in_folder("to", names[i]));
    CHECK_EQ_INT(weights_in(c.to), 4);
    CHECK(hf_value_in(c.to) == 1);
    c.request = 5;
    run_ranks(2, hf_value_rank, &c);
    CHECK(hf_value_in(c.to) == 5 && stat(in_folder("to", names[4]), &st) == 0);
    CHECK_EQ_INT(weights_in(c.to), 2);
}

static void hf_lost_rank(rank_state *s) {
    const hf_case *c = (const hf_case *)s->arg;
    lost_group g = {.last = (int)c->request};
    te_group *group = lost(s, &g);
    const te_data_parallel_desc d = {.group = group, .shard = TE_SHARD_PARAMETERS};
    te_module *m = te_hf_open(s->te, c->from, &(te_hf_desc){.units = &d});
    EXPECT(s, m);
    g.counts = true;
    const te_result result = te_hf_save(m, c->to);
    if (s->rank == 1) *c->reached = g.barriers >= g.last;
    EXPECT(s, s->rank != 1 || (result != TE_OK) == (g.barriers >= g.last));
    te_clear_error(s->te);
    te_module_destroy(m);
    te_group_destroy(group);
}
/* Rank 1 loses the others at a barrier, and cannot know whether the index names its file already. */
TE_TEST(shard_folders_of_ranks_that_lose_each_other) {
    int reached = 1;
    hf_make(HF_LLAMA, "from");
    hf_case c = {.num = &numbers[1], .shard = TE_SHARD_PARAMETERS, .from = test_path("from"), .to = test_path("to"), .reached = &reached};
    c.request = 1;
    run_ranks(2, hf_value_rank, &c);
    for (; reached; c.request++) {
        test_case("barrier %d", (int)c.request);
        run_ranks(2, hf_lost_rank, &c);
        CHECK(!isnan(hf_value_in(c.to)));
    }
    CHECK_MSG(c.request > 4, "%d barriers", (int)c.request - 2);
    CHECK_EQ_INT(weights_in(c.to), 2);
}

static void hf_no_index_rank(rank_state *s) {
    const hf_case *c = (const hf_case *)s->arg;
    te_module *m = hf_open(s, c, c->from, true);
    EXPECT(s, m && te_hf_save(m, c->to) != TE_OK);
    te_clear_error(s->te);
    te_module_destroy(m);
}
/* Files that no index names go: at once if the index cannot be written, else with the next save. */
TE_TEST(shard_folders_drop_what_no_index_names) {
    static const char *const left[] = {"model-00002-of-00002.safetensors.00000001.7.1.tmp", "model.safetensors.00000001.7.1.tmp"};
    hf_make(HF_LLAMA, "from");
    hf_case c = {.num = &numbers[1], .shard = TE_SHARD_PARAMETERS, .from = test_path("from"), .to = test_path("to"), .request = 1};
    REQUIRE(mkdir(c.to, 0700) == 0 && mkdir(in_folder("to", "model.safetensors.index.json"), 0700) == 0);
    run_ranks(2, hf_no_index_rank, &c);
    CHECK_EQ_INT(weights_in(c.to), 0);
    REQUIRE(rmdir(in_folder("to", "model.safetensors.index.json")) == 0);
    for (int i = 0; i < COUNT(left); i++) leave_temporary(in_folder("to", left[i]));
    spit_text(in_folder("to", "model-00001-of-00002.safetensors"), "of no index"); /* so that the next save has other names */
    run_ranks(2, hf_value_rank, &c);
    CHECK_EQ_INT(weights_in(c.to), 2);
    CHECK(hf_value_in(c.to) == 1);
}

/* A rank without memory while ranks of a layer, of experts or of units gather tensors: all fail, and their groups go
 * on. */
static void hf_layout_fail_rank(rank_state *s) {
    const hf_layout *c = (const hf_layout *)s->arg;
    te_dist dist;
    if (!hf_share(s, c, &dist)) return;
    const te_data_parallel_desc d = {.group = dist.data, .shard = c->shard};
    const te_hf_desc desc = {.dist = &dist, .units = c->shard ? &d : NULL};
    te_module *m = c->opens ? NULL : te_hf_open(s->te, c->from, &desc);
    EXPECT(s, m || c->opens);
    s->fail_at = s->rank == 1 ? s->requests + c->request : 0;
    if (c->opens) m = te_hf_open(s->te, c->from, &desc);
    s->failed = c->opens ? !m : te_hf_save(m, c->to) != TE_OK;
    if (s->rank == 1) *c->reached = s->requests >= s->fail_at;
    s->fail_at = 0;
    if (s->failed && s->rank == 0) EXPECT(s, strstr(te_error(s->te), "failed"));
    te_clear_error(s->te);
    if (!m) m = te_hf_open(s->te, c->from, &desc);
    EXPECT(s, m && te_hf_save(m, c->to) == TE_OK);
    te_module_destroy(m);
    te_dist_finish(&dist);
}
TE_TEST(shard_folders_of_parts_fail_together) {
    static const hf_layout cases[] = {{.tp = 2, .size = 2, .kind = HF_PHI3},
                                      {.ep = 3, .size = 3, .kind = HF_QWEN_EACH},
                                      {.tp = 2, .size = 4, .shard = TE_SHARD_PARAMETERS, .kind = HF_PHI3},
                                      {.ep = 3, .size = 6, .shard = TE_SHARD_PARAMETERS, .kind = HF_QWEN_EACH},
                                      {.tp = 2, .size = 4, .shard = TE_SHARD_PARAMETERS, .kind = HF_PHI3, .opens = true},
                                      {.ep = 3, .size = 6, .shard = TE_SHARD_PARAMETERS, .kind = HF_QWEN_EACH, .opens = true}};
    static const int strides[] = {3, 7, 151, 121, 401, 601};
    for (int i = 0; i < COUNT(cases); i++) {
        char from[16];
        hf_layout c = cases[i];
        int reached = 1, failures = 0;
        snprintf(from, sizeof from, "from%d", i);
        hf_make(c.kind, from);
        c.to = test_path("to");
        c.from = test_path(from);
        c.reached = &reached;
        for (c.request = 1; reached; c.request += strides[i] * test_every_odd(1)) {
            test_case("%s, tp %d, ep %d, shard %d, request %lld", c.opens ? "open" : "save", c.tp, c.ep, (int)c.shard, (long long)c.request);
            rank_state *s = run_ranks(c.size, hf_layout_fail_rank, &c);
            for (int k = 0; k < c.size; k++) CHECK(s[k].failed == s[1].failed);
            failures += s[1].failed;
        }
        CHECK_MSG(failures > (i < 2 && !test_samples() ? 3 : 0), "%d failures", failures);
    }
}

/* ---- ranks that fail ---- */

static void hf_fail_rank(rank_state *s) {
    const hf_case *c = (const hf_case *)s->arg;
    te_result result = TE_OK;
    s->fail_at = s->rank == 1 && c->call == 0 && c->request ? s->requests + c->request : 0;
    te_module *m = hf_open(s, c, s->rank == 1 && c->wrong ? c->wrong : c->from, true);
    if (s->rank == 1 && s->fail_at) *c->reached = s->requests >= s->fail_at;
    s->fail_at = 0;
    if (!m) result = te_error_code(s->te);
    if (m && c->call == 1) {
        s->fail_at = s->rank == 1 ? s->requests + c->request : 0;
        result = te_hf_save(m, c->to);
        if (s->rank == 1) *c->reached = s->requests >= s->fail_at;
        s->fail_at = 0;
    }
    s->failed = result != TE_OK;
    if (s->failed && s->rank == 0) EXPECT(s, strstr(te_error(s->te), "rank 1 failed"));
    te_clear_error(s->te);
    EXPECT(s, te_barrier(s->group) == TE_OK);
    te_module_destroy(m);
    /* The folder that was there before is whole. */
    m = hf_open(s, c, c->call ? c->to : c->from, true);
    EXPECT(s, m);
    te_module_destroy(m);
}
TE_TEST(shard_folders_fail_together) {
    hf_make(HF_PHI3, "from");
    hf_case c = {.num = &numbers[6], .shard = TE_SHARD_PARAMETERS, .from = test_path("from"), .to = test_path("from")};
    int reached = 1;
    c.reached = &reached;
    c.wrong = test_path("nowhere");
    test_case("another folder");
    rank_state *s = run_ranks(2, hf_fail_rank, &c);
    CHECK(s[0].failed && s[1].failed);
    c.wrong = NULL;
    for (c.call = 0; c.call < 2; c.call++) {
        int failures = 0;
        reached = 1;
        for (c.request = 1; reached; c.request += test_every_odd(c.call ? 7 : 41)) {
            test_case("call %d, request %lld", c.call, (long long)c.request);
            s = run_ranks(2, hf_fail_rank, &c);
            CHECK(s[0].failed == s[1].failed);
            failures += s[1].failed;
        }
        CHECK_MSG(failures > (test_samples() ? 1 : 5), "%d failures", failures);
    }
}
