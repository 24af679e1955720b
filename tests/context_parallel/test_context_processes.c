/* Attention over sequences that processes share, against threads: over the stand-in of NCCL on the CPU, and over NCCL
 * itself on one GPU, by calls and in graphs. test_context_parallel.c has what ranks compute. */
#define _GNU_SOURCE
#include "../dist/ways.h"

enum { HEADS = 8, GROUPS = 4, D = 64, BATCH = 2 };

/* A case is a word. Its first letter is the exchange: p2p, gather, a2a, or both ("x": a2a over two ranks, a ring over
 * the others); then "c" is causal, "b" bf16, and FP8 attention "d" delayed, "u" current. */
static te_cp_comm comm_of(const char *word) {
    return *word == 'p' ? TE_CP_P2P : *word == 'g' ? TE_CP_ALL_GATHER : *word == 'a' ? TE_CP_A2A : TE_CP_A2A_P2P;
}

typedef struct shared_call {
    te_module *core;
    te_group *groups[2];
    te_tensor *x[3], *dy, *y, *scales[4];
    te_recipe recipe;
    bool fp8;
} shared_call;
static void open_call(rank_state *s, shared_call *c, const char *word, int64_t tokens) {
    const te_dtype dtype = strchr(word, 'b') ? TE_BF16 : TE_F32;
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.num_gqa_groups = GROUPS,
                                       .attention.kv_channels = D};
    memset(c, 0, sizeof *c);
    d.attention.attn_mask_type = strchr(word, 'c') ? TE_MASK_CAUSAL : TE_MASK_NONE;
    d.parallel.cp_comm_type = comm_of(word);
    d.parallel.cp_group = s->group;
    if (d.parallel.cp_comm_type == TE_CP_A2A_P2P) {
        d.parallel.cp_group = c->groups[0] = te_group_split(s->group, s->rank / 2, s->rank);
        d.parallel.cp_p2p_group = c->groups[1] = te_group_split(s->group, s->rank % 2, s->rank);
    }
    c->core = te_dot_product_attention_create(s->te, &d);
    c->fp8 = strchr(word, 'd') || strchr(word, 'u');
    c->recipe = strchr(word, 'd') ? te_recipe_delayed_scaling() : te_recipe_current_scaling();
    c->recipe.fp8_dpa = true;
    for (int i = 0; i < 3; i++)
        c->x[i] = te_tensor_set_requires_grad(
            te_tensor_empty(s->te, dtype, SHAPE(tokens, BATCH, i ? GROUPS : HEADS, D)), true);
    c->dy = te_tensor_empty(s->te, dtype, SHAPE(tokens, BATCH, HEADS * D));
}
static void close_call(shared_call *c) {
    te_module_destroy(c->core);
    for (int i = 0; i < 2; i++) te_group_destroy(c->groups[i]);
}
static void fill_call(rank_state *s, void *step, int turn) {
    shared_call *c = (shared_call *)step;
    te_tensor *all[4] = {c->x[0], c->x[1], c->x[2], c->dy};
    te_no_grad_begin(s->te);
    for (int i = 0; i < 4; i++) {
        te_seed(s->te, (uint64_t)(100 * turn + 10 * s->rank + i));
        te_tensor_copy(all[i], te_tensor_normal(s->te, te_tensor_dtype(all[i]), te_tensor_ndim(all[i]),
                                                te_tensor_shape(all[i]), 0, 1));
    }
    te_no_grad_end(s->te);
}
static void run_call(rank_state *s, void *step) {
    shared_call *c = (shared_call *)step;
    for (int i = 0; i < 3; i++) te_tensor_zero_grad(c->x[i]);
    if (c->fp8) te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &c->recipe});
    c->y = te_forward_with(c->core, &(te_forward_args){.input = c->x[0], .key = c->x[1], .value = c->x[2]});
    if (c->fp8) te_autocast_end(s->te);
    EXPECT(s, c->y && te_backward_from(c->y, c->dy) == TE_OK);
}
static void keep_call(rank_state *s, void *step) {
    shared_call *c = (shared_call *)step;
    leave(s, c->y);
    for (int i = 0; i < 3; i++) leave(s, te_tensor_grad(c->x[i]));
}
/* Copies the scales and histories, which each call changes; `back`: as they were. */
static void copy_scales(rank_state *s, shared_call *c, bool back) {
    static const char *const names[] = {"fp8_scale_fwd", "fp8_amax_history_fwd", "fp8_scale_bwd",
                                        "fp8_amax_history_bwd"};
    te_no_grad_begin(s->te);
    for (int i = 0; i < 4 && c->fp8; i++) {
        te_tensor *x = te_module_parameter(c->core, names[i]);
        if (!back) c->scales[i] = te_tensor_empty(s->te, TE_F32, te_tensor_ndim(x), te_tensor_shape(x));
        te_tensor_copy(back ? x : c->scales[i], back ? c->scales[i] : x);
    }
    te_no_grad_end(s->te);
}
static void rewind_scales(rank_state *s, void *step) { copy_scales(s, (shared_call *)step, true); }

static void walk(rank_state *s) {
    static const repeated step = {fill_call, run_call, keep_call, rewind_scales};
    const char *list = (const char *)s->arg;
    char word[16];
    for (int n; sscanf(list, "%15s%n", word, &n) == 1 && !s->wrong; list += n) {
        shared_call c;
        te_scope_begin(s->te);
        open_call(s, &c, word, te_ctx_is_cuda(s->te) ? 64 : 8);
        te_scope_begin(s->te); /* the first call makes scales, and compares what the ranks are about to do */
        fill_call(s, &c, TURNS);
        run_call(s, &c);
        te_scope_end(s->te);
        copy_scales(s, &c, false);
        repeat(s, &step, &c, true);
        if (s->wrong) snprintf(s->what + strlen(s->what), sizeof s->what - strlen(s->what), " (%s)", word);
        close_call(&c);
        te_scope_end(s->te);
    }
}
static void process_walks(process_rank *p) { run_in_process(p, walk); }

/* Keys and values move as they are, and the stand-in adds in the order of the ranks, so that the bits are equal. It
 * computes when it is called: that the host waits for nobody is shown by the graphs on a GPU alone. */
TE_TEST(context_over_processes) {
    prepare_processes();
    equal_ways("cpu", 2, "context", walk, "p pcdb gu acub");
    if (!test_samples()) equal_ways("cpu", 4, "context", walk, "pcu xd gcu ab");
}
/* Rings of four, heads over four, and rings of two between pairs that share heads: a rank adds what it gets in an order
 * of its own, and scales are maxima. */
static void moved_over_four(const char *device, const char *list) { equal_ways(device, 4, "context", walk, list); }
/* Gathered keys and values: NCCL adds the four ranks' parts of dK and dV in an order of its own. In f32 these differ by
 * a few times 2^-24 of a term. Four numbers of bf16 have an exact sum in f32 as a rule; else it may be rounded to a
 * neighbour, 2^-9 of a few elements. Nothing is computed from either. */
static void gathered_over_four(const char *device, const char *f32, const char *bf16) {
    near_ways(device, 4, "context", walk, f32, 1e-6);
    near_ways(device, 4, "context", walk, bf16, 1e-4);
}
TE_TEST(context_over_four_in_another_order) {
    if (test_samples()) SKIP("context_over_processes has these cases");
    prepare_processes();
    test_setenv("TE_NCCL_STAND_IN_ORDER", "ring");
    moved_over_four("cpu", "p pcub ad x xcub xdb");
    gathered_over_four("cpu", "g gc", "gb gcub gdb");
}
/* Over two ranks there is one order of sums; in graphs, the ring's exchanges run on a second stream. */
TE_TEST(gpu_context_over_processes) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_ways("cuda:0", 2, "context", walk, "pb pcb gcb acb xcb pcdb pub gcub acdb aub");
}
TE_TEST(gpu_context_over_four) { /* they take turns on the GPU, so that their collectives are slow */
    const char *why = no_nccl();
    if (why) SKIP(why);
    moved_over_four("cuda:0", "pb pcub acb adb xb xcub xdb");
    gathered_over_four("cuda:0", "g gc", "gb gcub gdb");
}

/* A rank whose call fails behind the first one, when ranks no longer compare: the exchange of the others ends with its
 * error, though nobody waits for the others at the end of a call. */
static void one_fails(process_rank *p) {
    rank_state s = {.te = p->te, .group = p->group, .rank = p->rank, .size = p->size};
    shared_call c;
    open_call(&s, &c, p->arg, 8);
    for (int turn = 0; turn < 2; turn++) {
        te_scope_begin(p->te);
        fill_call(&s, &c, turn);
        te_forward_args call = {.input = c.x[0], .key = c.x[1], .value = c.x[2]};
        if (turn && p->rank == 1) call.value = te_tensor_narrow(c.x[2], 0, 0, 6);
        te_tensor *y = te_forward_with(c.core, &call);
        if (y) te_synchronize(p->te);
        if (turn) fprintf(p->out, "%s", te_error(p->te));
        else if (!y) fprintf(p->out, "at once: %s", te_error(p->te));
        te_scope_end(p->te);
    }
    te_clear_error(p->te);
    close_call(&c);
}
TE_TEST(context_of_a_process_that_fails) {
    static const char *const kinds[] = {"p", "g", "a"};
    prepare_processes();
    for (int i = 0; i < COUNT(kinds) - (test_samples() ? 2 : 0); i++) {
        test_case("%s", kinds[i]);
        test_setenv("TE_TEST_ARG", kinds[i]);
        run_processes("one_fails", 3 - (i == 2));
        for (int k = 0; k < 3 - (i == 2); k++) {
            const char *said = (const char *)processes[k].said;
            CHECK_STR(said, k == 1 ? "value is [6, 2, 4, 64], and key has 8 tokens of 4 heads" : "rank 1 (process ");
            CHECK_STR(said, "value is [6, 2, 4, 64]");
            /* a rank that is behind may hear of it in its first call */
            if (k == 1) CHECK_MSG(strncmp(said, "at once", 7), "rank 1 said: %s", said);
        }
    }
}

static const process_part context_parts[] = {{"context", process_walks}, {"one_fails", one_fails}};
__attribute__((constructor)) static void become_one_of_the_context(void) {
    become_a_rank(context_parts, COUNT(context_parts));
}
