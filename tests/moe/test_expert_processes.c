/* Experts that processes share, against threads: over the stand-in of NCCL on the CPU, and over NCCL itself on one GPU,
 * by calls and in graphs whose launches route other numbers of tokens. test_experts.c has what ranks compute. */
#define _GNU_SOURCE
#include "../dist/ways.h"

enum { DIM = 64, EXPERTS = 8, TOPK = 2, VOCABULARY = 40 };

/* A case is a word. Its first letter is the dispatcher, torch or deepep, or "l": a language model. Then "n": the number
 * of tokens has a bound; "e": GroupedExpertsTE; "q": in FP8. */
typedef struct shared_step {
    te_module *m;
    te_tensor *x, *y;
    te_recipe recipe;
    bool fp8, is_lm;
} shared_step;
static void open_step(rank_state *s, shared_step *c, const char *word) {
    te_moe_config config = {.n_routed_experts = EXPERTS, .n_activated_experts = TOPK, .dim = DIM, .moe_inter_dim = DIM,
                            .norm_topk_prob = true, .init_std = 0.2f};
    te_moe_backend backend = {.ep_group = s->group, .experts = TE_EXPERTS_TORCH_MM,
                              .dispatcher = *word == 't' ? TE_DISPATCHER_TORCH : TE_DISPATCHER_DEEPEP};
    const int64_t tokens = 8 + 8 * s->rank;
    memset(c, 0, sizeof *c);
    c->is_lm = *word == 'l';
    if (strchr(word, 'e')) backend.experts = TE_EXPERTS_TE;
    c->fp8 = strchr(word, 'q') != NULL;
    c->recipe = te_recipe_current_scaling();
    te_seed(s->te, 5 + (uint64_t)s->rank);
    if (c->is_lm) {
        const te_causal_lm_desc d = {.vocab_size = VOCABULARY, .hidden_size = DIM, .intermediate_size = DIM,
                                     .num_hidden_layers = 2, .num_attention_heads = 4, .num_local_experts = EXPERTS,
                                     .num_experts_per_tok = TOPK, .ep_group = s->group};
        c->m = te_causal_lm_create(s->te, &d);
        c->x = te_tensor_zeros(s->te, TE_I32, SHAPE(1, tokens));
    } else {
        c->m = te_moe_create(s->te, &config, &backend);
        c->x = te_tensor_set_requires_grad(te_tensor_zeros(s->te, TE_BF16, SHAPE(tokens, DIM)), true);
    }
    if (strchr(word, 'n')) EXPECT(s, te_set_max_dispatch_tokens(c->m, 8 * s->size + 4) == TE_OK);
}
static void fill_step(rank_state *s, void *step, int turn) {
    shared_step *c = (shared_step *)step;
    const int64_t n = te_tensor_numel(c->x);
    te_no_grad_begin(s->te);
    if (c->is_lm) {
        int32_t id[8 + 8 * MAX_RANKS];
        for (int64_t i = 0; i < n; i++) id[i] = (int32_t)((i * i * 7 + 13 * turn + 5 * s->rank + i) % VOCABULARY);
        te_tensor_copy_from_host(c->x, id);
    } else { /* each turn leans to other experts */
        te_seed(s->te, (uint64_t)(100 * turn + s->rank));
        te_tensor_copy(c->x, te_tensor_normal(s->te, TE_BF16, SHAPE(n / DIM, DIM), turn - 1, 1));
    }
    te_no_grad_end(s->te);
}
static void run_step(rank_state *s, void *step) {
    shared_step *c = (shared_step *)step;
    te_module_zero_grad(c->m);
    if (!c->is_lm) te_tensor_zero_grad(c->x);
    if (c->fp8) te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &c->recipe});
    c->y = te_forward(c->m, c->x);
    if (c->fp8) te_autocast_end(s->te);
    EXPECT(s, c->y && te_backward(te_mean_all(te_activate(c->y, TE_GELU, NULL))) == TE_OK);
}
static bool leave_gradient(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER && te_tensor_grad(x)) leave((rank_state *)user, te_tensor_grad(x));
    return true;
}
static void keep_step(rank_state *s, void *step) {
    shared_step *c = (shared_step *)step;
    leave(s, c->y);
    if (!c->is_lm) leave(s, te_tensor_grad(c->x));
    te_module_visit_tensors(c->m, leave_gradient, s);
}
static void walk(rank_state *s) {
    static const repeated step = {fill_step, run_step, keep_step, NULL};
    const char *list = (const char *)s->arg;
    char word[16];
    for (int n; sscanf(list, "%15s%n", word, &n) == 1 && !s->wrong; list += n) {
        shared_step c;
        te_scope_begin(s->te);
        open_step(s, &c, word);
        repeat(s, &step, &c, *word != 'd' || strchr(word, 'n')); /* deepep waits without a bound */
        if (s->wrong) snprintf(s->what + strlen(s->what), sizeof s->what - strlen(s->what), " (%s)", word);
        te_module_destroy(c.m);
        te_scope_end(s->te);
    }
}
static void process_walks(process_rank *p) { run_in_process(p, walk); }

/* Rows move as they are, and the stand-in adds in the order of the ranks. */
TE_TEST(experts_over_processes) {
    prepare_processes();
    equal_ways("cpu", 2, "experts", walk, test_samples() ? "d den l" : "t tn d dn den denq l ln");
    if (!test_samples()) equal_ways("cpu", 4, "experts", walk, "dn d tn denq");
}
/* deepep sends rows, and a rank adds them up in an order of its own. torch sums the parts of all ranks, of which two
 * are not 0 (TOPK): they have one order. */
static void experts_over_four(const char *device) {
    equal_ways(device, 4, "experts", walk, "t tn d dn den denq ln");
}
TE_TEST(experts_over_four_in_another_order) {
    if (test_samples()) SKIP("experts_over_processes has these cases");
    prepare_processes();
    test_setenv("TE_NCCL_STAND_IN_ORDER", "ring");
    experts_over_four("cpu");
}
/* Over two ranks there is one order of sums. */
TE_TEST(gpu_experts_over_processes) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_ways("cuda:0", 2, "experts", walk, "t tn d dn den denq l ln");
}
TE_TEST(gpu_experts_over_four) { /* they take turns on the GPU, so that their collectives are slow */
    const char *why = no_nccl();
    if (why) SKIP(why);
    experts_over_four("cuda:0");
}

static const process_part expert_parts[] = {{"experts", process_walks}};
__attribute__((constructor)) static void become_one_of_the_experts(void) {
    become_a_rank(expert_parts, COUNT(expert_parts));
}
