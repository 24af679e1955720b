/* tests/nn/test_traffic.c: the formulas of "Costs of a layout" (api/dist.h) against the counters of groups and the
 * memory of contexts, and its table against the formulas. data_parallel/test_traffic.c has those of api/sharding.h. */
#include "../dist/ranks.h"

/* ---- the formulas ---- */

/* Bytes that a rank sends for one layer, forward and backward, in bf16. `more`: of the forward pass alone, which a layer adds that runs again. */
static double tensor_bytes(double n, double tokens, double h, bool more) { return (more ? 8 : 16) * (n - 1) / n * tokens * h; }
static double sequence_bytes(double n, double tokens, double h, bool fp8, bool more) {
    return (fp8 ? more ? 6 : 14 : more ? 8 : 20) * (n - 1) / n * tokens * h;
}
static double projections_bytes(double n, double tokens, double h, bool more) { return (more ? 14 : 38) * (n - 1) / n * tokens * h; }
static double ring_bytes(double n, double tokens, double g, bool more) {
    return (more ? 4 * (n - 1) / n : 8 * (n - 1) / n + 8) * tokens * g;
}
static double gathered_bytes(double n, double tokens, double g, bool more) { return (more ? 4 : 12) * (n - 1) / n * tokens * g; }
static double heads_bytes(double n, double tokens, double q, double g, bool more) {
    return (more ? 4 : 8) * (n - 1) / n * tokens / n * (q + g);
}
static double sent_bytes(double n, double tokens, double h, double experts, double chosen, bool more) {
    return (n - 1) / n * (chosen * tokens * (more ? 4 * h + 4 : 8 * h + 8) + 8 * experts);
}
static double listed_bytes(double n, double tokens, double h, double chosen, bool bound, bool more) {
    return (n - 1) * tokens * (more ? 6 * h + 8 * chosen : 10 * h + 12 * chosen) + (bound ? 0 : 16 * (n - 1) / n);
}
static double mapped_bytes(double n, double tokens, double h, double experts, bool bound, bool more) {
    return (n - 1) * tokens * (more ? 6 * h + 5 * experts : 10 * h + 9 * experts) + (bound ? 0 : 16 * (n - 1) / n);
}
/* Of a CausalLM's embedding and output, in sequence parallel. */
static double ends_bytes(double n, double tokens, double h) { return 10 * (n - 1) / n * tokens * h; }
/* Bytes of a step for `elements` in shards over n ranks (TE_SHARD_PARAMETERS, one microbatch, bf16), and of memory:
 * parameters, gradients, f32 masters and two moments. */
static double exchange_bytes(double n, double elements) { return (n - 1) / n * 6 * elements; }
static double state_bytes(double n, double elements) { return 16 * elements / n; }

/* ---- layers, counted ---- */

enum { TOKENS = 64, WIDTH = 64, INNER = 128, HEADS = 8, KEYS = 4, CHOSEN = 2, EXPERTS = 8, MOST = TOKENS + 6 };
typedef enum form { TENSOR, SEQUENCE, PROJECTIONS, RING, GATHERED, A2A, SENT, LISTED, LISTED_BOUND, SENT_BOUND, MAPPED, MAPPED_BOUND, NUM_FORMS } form;
static const char *const form_names[] = {"tensor", "sequence", "sequence of a model", "p2p", "all_gather", "a2a", "experts sent", "experts gathered",
                                         "experts gathered, bound", "experts sent, bound", "experts of a model", "experts of a model, bound"};
typedef struct cost_case {
    form form;
    bool fp8, again; /* again: the layer runs again in the backward pass */
} cost_case;

static bool is_model(form f) { return f == PROJECTIONS || f == MAPPED || f == MAPPED_BOUND; }
static bool is_bound(form f) { return f == LISTED_BOUND || f == SENT_BOUND || f == MAPPED_BOUND; }

static te_module *make_model(rank_state *s, form f) {
    te_causal_lm_desc d = {.vocab_size = 32,
                           .hidden_size = WIDTH,
                           .intermediate_size = INNER,
                           .num_hidden_layers = 1,
                           .num_attention_heads = HEADS,
                           .num_key_value_heads = KEYS};
    if (f == PROJECTIONS) {
        d.tp_group = s->group;
        d.parallel.sequence_parallel = d.parallel.parallel_output = true;
    } else {
        d.num_local_experts = EXPERTS;
        d.num_experts_per_tok = CHOSEN;
        d.ep_group = s->group;
    }
    return te_causal_lm_create(s->te, &d);
}
static te_module *make_module(rank_state *s, form f) {
    te_transformer_layer_desc layer = {.hidden_size = WIDTH,
                                       .ffn_hidden_size = INNER,
                                       .attention.num_attention_heads = HEADS,
                                       .attention.num_gqa_groups = KEYS,
                                       .attention.attn_mask_type = TE_MASK_CAUSAL,
                                       .norm.normalization = TE_RMSNORM,
                                       .activation = TE_SWIGLU,
                                       .gemm.no_bias = true};
    const te_moe_config moe = {.n_routed_experts = EXPERTS,
                               .n_activated_experts = CHOSEN,
                               .dim = WIDTH,
                               .moe_inter_dim = INNER,
                               .dtype = TE_BF16};
    if (is_model(f)) return make_model(s, f);
    if (f >= SENT) { /* of exchanged rows the formula says what experts with equally many tokens get; what is gathered needs a gate with gradients */
        const te_moe_backend backend = {.experts = TE_EXPERTS_TORCH_MM,
                                        .dispatcher = f == SENT || f == SENT_BOUND ? TE_DISPATCHER_DEEPEP : TE_DISPATCHER_TORCH,
                                        .fake_balanced_gate = f == SENT,
                                        .ep_group = s->group};
        return te_moe_create(s->te, &moe, &backend);
    }
    if (f == TENSOR || f == SEQUENCE) {
        layer.parallel.tp_group = s->group;
        layer.parallel.set_parallel_mode = true;
        layer.parallel.sequence_parallel = f == SEQUENCE;
    } else {
        layer.parallel.cp_group = s->group;
        layer.parallel.cp_comm_type = f == RING ? TE_CP_P2P : f == GATHERED ? TE_CP_ALL_GATHER : TE_CP_A2A;
    }
    return te_transformer_layer_create(s->te, &layer);
}
static te_tensor *input_of(rank_state *s, form f) {
    const int64_t tokens = f == TENSOR || f == PROJECTIONS || f >= SENT ? TOKENS : TOKENS / s->size;
    if (!is_model(f)) return te_tensor_set_requires_grad(te_tensor_normal(s->te, TE_BF16, SHAPE(tokens, 1, WIDTH), 0, 1), true);
    return te_tensor_zeros(s->te, TE_I32, SHAPE(1, tokens));
}
static double layer_bytes(const cost_case *c, double n, bool more) {
    const double q = WIDTH, g = WIDTH / HEADS * KEYS;
    switch (c->form) {
    case TENSOR: return tensor_bytes(n, TOKENS, WIDTH, more);
    case SEQUENCE: return sequence_bytes(n, TOKENS, WIDTH, c->fp8, more);
    case PROJECTIONS: return projections_bytes(n, TOKENS, WIDTH, more) + (more ? 0 : ends_bytes(n, TOKENS, WIDTH));
    case RING: return ring_bytes(n, TOKENS, g, more);
    case GATHERED: return gathered_bytes(n, TOKENS, g, more);
    case A2A: return heads_bytes(n, TOKENS, q, g, more);
    case SENT: return sent_bytes(n, TOKENS, WIDTH, EXPERTS, CHOSEN, more);
    case MAPPED:
    case MAPPED_BOUND: return mapped_bytes(n, is_bound(c->form) ? MOST : TOKENS, WIDTH, EXPERTS, is_bound(c->form), more);
    default: return listed_bytes(n, is_bound(c->form) ? MOST : TOKENS, WIDTH, CHOSEN, is_bound(c->form), more);
    }
}
static void cost_rank(rank_state *s) {
    const cost_case *c = (const cost_case *)s->arg;
    const te_recipe recipe = te_recipe_current_scaling();
    te_seed(s->te, 5);
    te_module *m = make_module(s, c->form);
    if (is_bound(c->form)) EXPECT(s, te_set_max_dispatch_tokens(m, MOST) == TE_OK);
    if (c->again) te_module_set_checkpoint(is_model(c->form) ? te_module_find(m, "model.layers.0") : m, true);
    /* ranks compare their modules in the first pass; a position is rotated in none, which changes no exchange */
    for (int pass = 0; pass < 2; pass++) {
        te_scope_begin(s->te);
        te_group_reset_stats(s->group);
        te_autocast_begin(s->te, &(te_autocast_desc){.recipe = c->fp8 ? &recipe : NULL, .disabled = !c->fp8});
        te_tensor *y = te_forward(m, input_of(s, c->form));
        te_autocast_end(s->te);
        EXPECT(s, te_backward_from(y, te_tensor_full(s->te, TE_BF16, te_tensor_ndim(y), te_tensor_shape(y), 1)) == TE_OK);
        te_module_zero_grad(m);
        te_scope_end(s->te);
    }
    const te_group_stats sent = te_group_get_stats(s->group);
    const double got = (double)(sent.all_reduce.bytes + sent.all_gather.bytes + sent.reduce_scatter.bytes + sent.all_to_all.bytes + sent.send.bytes),
                 want = layer_bytes(c, s->size, false) + (c->again ? layer_bytes(c, s->size, true) : 0);
    /* under FP8 the amaxes of what is gathered: 4 bytes of each, at most 8 for each of six gathers, and of two that run again */
    if (!(got >= want && got <= want + (c->fp8 ? c->again ? 64 : 48 : 1))) {
        char text[96];
        snprintf(text, sizeof text, "%.0f bytes were sent, and not %.1f", got, want);
        wrong(s, text);
    }
    te_module_destroy(m);
}
TE_TEST(traffic_of_layers) {
    int i = 0;
    for (int f = 0; f < NUM_FORMS; f++)
        for (int fp8 = 0; fp8 <= (f == SEQUENCE); fp8++)
            for (int again = 0; again < 2; again++)
                for (int n = 2; n <= 4; n *= 2) {
                    if (i++ % test_every_odd(2)) continue;
                    const cost_case c = {(form)f, fp8 != 0, again != 0};
                    test_case("%s, %d ranks%s%s", form_names[f], n, fp8 ? ", fp8" : "", again ? ", run again" : "");
                    run_ranks(n, cost_rank, &c);
                }
}

/* ---- memory ---- */

/* A module adds to a context its rank's part of the matrices, and all of its norms, in bf16. */
static void memory_rank(rank_state *s) {
    const bool experts = *(const bool *)s->arg;
    const double n = s->size, matrices = experts ? 3.0 * EXPERTS * WIDTH * INNER : (double)WIDTH * (WIDTH + 2 * WIDTH / HEADS * KEYS) + WIDTH * WIDTH + 3 * WIDTH * INNER;
    const double whole = experts ? 0 : 2 * WIDTH, want = 2 * (matrices / n + whole);
    const size_t before = te_memory_get_stats(s->te).allocated;
    te_module *m = make_module(s, experts ? SENT : TENSOR);
    const double got = (double)(te_memory_get_stats(s->te).allocated - before);
    /* the pool rounds a buffer up by an eighth at the most, and small ones to 512 bytes */
    EXPECT(s, got >= want && got <= 9.0 / 8 * want + 8 * 512);
    te_module_destroy(m);
}
TE_TEST(memory_of_layers) {
    static const bool experts[] = {false, true};
    for (int i = 0; i < 2; i++)
        for (int n = 2; n <= 4; n *= 2) {
            test_case("%s, %d ranks", i ? "experts" : "tensor", n);
            run_ranks(n, memory_rank, &experts[i]);
        }
}

/* ---- the table ---- */

typedef struct model_size {
    const char *name;
    double vocabulary, h, inner, q, g, layers, experts, chosen; /* experts: 0 for an MLP */
} model_size;
static const model_size llama = {"Llama 70 G", 128256, 8192, 28672, 8192, 1024, 80, 0, 0},
                        mixtral = {"Mixtral 47 G", 32000, 4096, 14336, 4096, 1024, 32, 8, 2};
typedef struct job {
    const model_size *model;
    int tp, cp, ep, dp;
    const char *text;
} job;
static const job jobs[] = {{&llama, 1, 1, 1, 8, "8     dp 8"},
                           {&llama, 8, 1, 1, 1, "8     tp 8"},
                           {&llama, 1, 1, 1, 64, "64    dp 64"},
                           {&llama, 8, 1, 1, 8, "64    tp 8, dp 8"},
                           {&llama, 1, 1, 1, 1024, "1024  dp 1024"},
                           {&llama, 8, 1, 1, 128, "1024  tp 8, dp 128"},
                           {&llama, 8, 4, 1, 32, "1024  tp 8, cp 4, dp 32"},
                           {&mixtral, 1, 1, 8, 1, "8     ep 8"},
                           {&mixtral, 1, 1, 8, 8, "64    ep 8, dp 8"},
                           {&mixtral, 1, 1, 8, 128, "1024  ep 8, dp 128"}};

static void row_of(const job *j, char text[128]) {
    enum { BATCH = 8192 };
    const model_size *z = j->model;
    const double attention = z->h * (z->q + 2 * z->g) + z->q * z->h, mlp = 3 * z->h * z->inner,
                 norms = 2 * z->h + z->experts * z->h, ends = 2 * z->vocabulary * z->h + z->h;
    const double dense = z->layers * ((attention + (z->experts > 0 ? 0 : mlp)) / j->tp + norms) + ends,
                 experts = z->layers * z->experts * mlp / j->ep;
    const double data = j->cp * j->ep * j->dp, of_experts = j->cp * j->dp;
    /* ranks that share a layer have parts of its heads, and of its tokens by sequence_parallel */
    const double layer = (j->tp > 1 ? sequence_bytes(j->tp, (double)BATCH / j->cp, z->h, false, false) : 0) +
                         (j->cp > 1 ? ring_bytes(j->cp, BATCH, z->g / j->tp, false) : 0) +
                         (j->ep > 1 ? sent_bytes(j->ep, BATCH, z->h, z->experts, z->chosen, false) : 0);
    snprintf(text, 128, "%-14s%-24s%11.1f%10.1f%10.1f", z->name, j->text,
             (exchange_bytes(data, dense) + exchange_bytes(of_experts, experts)) * 1e-9, z->layers * layer * 1e-9,
             (state_bytes(data, dense) + state_bytes(of_experts, experts)) * 1e-9);
}
TE_TEST(table_of_layouts) {
    const char *const path = "src/api/dist.h";
    size_t bytes = 0;
    char *page = (char *)test_read_file(path, &bytes);
    REQUIRE(page);
    for (int i = 0; i < COUNT(jobs); i++) {
        char row[128];
        row_of(&jobs[i], row);
        CHECK_MSG(strstr(page, row), "%s lacks the row \"%s\"", path, row);
    }
}
