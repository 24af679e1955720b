/* tests/core/test_context.c: a context goes, and all that it made with it; numbers of the environment. */
#include "../faults/purse.h"

/* ---- a context goes, and all with it ---- */

static int mine_destroyed, children_then;
static te_result mine_forward(te_module *self, te_forward_args *args) {
    args->outputs.out = te_forward(te_module_child(self, 0), args->input);
    return te_error_code(te_module_ctx(self));
}
static void mine_destroy(te_module *self) {
    mine_destroyed++;
    children_then = te_module_num_children(self);
    if (children_then) te_tensor_release(*(te_tensor **)te_module_state(self));
}
static const te_module_class mine = {"Mine", sizeof(te_tensor *), mine_forward, mine_destroy, NULL};

static void count_one(void *user) { ++*(int *)user; }
static te_result none_all_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) { return (void)user, (void)te, (void)x, (void)op, TE_OK; }
static te_result none_all_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) { return (void)user, (void)te, (void)x, (void)out, TE_OK; }
static te_result none_broadcast(void *user, te_ctx *te, te_tensor *x, int root) { return (void)user, (void)te, (void)x, (void)root, TE_OK; }
static te_result none_barrier(void *user) { return (void)user, TE_OK; }

/* Bit by bit: what is released before the context goes. */
enum { FREE_MODULE = 1, FREE_ADAM = 2, FREE_TENSORS = 4, FREE_QUANTIZER = 8, FREE_GROUP = 16, FREE_FILE = 32, FREE_GRAPH = 64, ALL_WAYS = 128 };

static void fill_and_destroy(int freed) {
    purse *host = new_purse(), *device = new_purse();
    int group_gone = 0, wrap_gone = 0;
    static float foreign[8];
    const char *path = test_path("file");
    te_ctx_desc desc = {.device = "cpu", .cpu_threads = 2, .host_allocator = allocator_of(host), .device_allocator = allocator_of(device), .log = test__log};
    te_ctx *te = te_ctx_create(&desc);
    REQUIRE_OK(te);
    mine_destroyed = 0;
    te_module *m = te_module_create(te, &mine, "mine");
    te_module *linear = te_module_add_child(m, "linear", te_linear_create(te, &(te_linear_desc){.in_features = 32, .out_features = 32}));
    *(te_tensor **)te_module_state(m) = te_tensor_retain(te_tensor_zeros(te, TE_F32, SHAPE(3)));
    te_tensor *main_grad = te_tensor_zeros(te, TE_F32, SHAPE(32, 32));
    te_tensor_set_main_grad(te_module_parameter(linear, "weight"), main_grad);
    te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.max_grad_norm = 1});
    te_recipe recipe = te_recipe_delayed_scaling();
    te_graph *graph = NULL;
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(32, 32), 1), *kept[6] = {NULL};
    for (int i = 0; i < 3; i++) { /* the last time into a graph */
        te_scope_begin(te);
        if (i == 2) te_graph_begin(te);
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        te_tensor *y = te_forward(m, x);
        te_autocast_end(te);
        te_backward(te_mean_all(y));
        te_optimizer_step(adam);
        if (i == 1) kept[0] = te_tensor_retain(y);
        if (i == 2) kept[1] = te_tensor_retain(y), graph = te_graph_end(te);
        te_scope_end(te);
    }
    CHECK(graph && te_graph_launch(graph) == TE_OK);
    te_quantizer *q = te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_DELAYED});
    te_scope_begin(te);
    kept[2] = te_tensor_retain(te_quantize(q, x));
    kept[3] = te_tensor_set_name(te_tensor_retain(te_tensor_wrap(te, TE_F32, SHAPE(8), foreign, count_one, &wrap_gone)), "foreign");
    kept[4] = te_tensor_retain(te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4), 1), true));
    kept[5] = te_tensor_retain(te_scale(kept[4], 2)); /* its node is on the tape */
    te_backward_from(kept[4], te_tensor_full(te, TE_F32, SHAPE(4), 1));
    te_scope_end(te);
    te_scale(kept[4], 3); /* an open end */
    te_group *group = te_group_create(te, &(te_group_desc){.size = 2, .user = &group_gone, .all_reduce = none_all_reduce, .all_gather = none_all_gather,
                                          .reduce_scatter = none_all_gather, .broadcast = none_broadcast, .barrier = none_barrier, .destroy = count_one});
    CHECK(te_model_save(te, path, m, adam, NULL, 0) == TE_OK);
    te_safetensors *file = te_safetensors_open(te, path);
    CHECK_OK(te);
    CHECK(file && group && q && adam && kept[1] && kept[5]);
    te_scope_begin(te); /* left open */
    if (freed & FREE_GRAPH) te_graph_destroy(graph);
    if (freed & FREE_ADAM) te_optimizer_destroy(adam);
    if (freed & FREE_MODULE) te_module_destroy(m);
    for (int i = 0; i < 6 && freed & FREE_TENSORS; i++) te_tensor_release(kept[i]);
    if (freed & FREE_QUANTIZER) te_quantizer_destroy(q);
    if (freed & FREE_GROUP) te_group_destroy(group);
    if (freed & FREE_FILE) te_safetensors_close(file);
    te_ctx_destroy(te);
    CHECK_EQ_INT(device->blocks, 0);
    CHECK_EQ_INT(host->blocks, freed & FREE_GRAPH ? 0 : 1); /* a graph's handle alone stays, to be destroyed */
    if (!(freed & FREE_GRAPH)) te_graph_destroy(graph);
    CHECK_EQ_INT(host->blocks, 0);
    CHECK_EQ_INT(host->held, 0);
    CHECK_EQ_INT(group_gone, 1);
    CHECK_EQ_INT(wrap_gone, 1);
    CHECK_EQ_INT(mine_destroyed, 1);
    CHECK_EQ_INT(children_then, 1);
}
TE_TEST(a_destroyed_context_takes_all_with_it) {
    for (int freed = 0; freed < ALL_WAYS; freed += test_every_odd(4)) {
        test_case("released before: %d", freed);
        fill_and_destroy(freed);
    }
}
TE_TEST(a_destroyed_context_says_what_was_left) {
    fill_and_destroy(ALL_WAYS - 1);
    CHECK(!test_log_text()[0]);
    fill_and_destroy(ALL_WAYS - 1 - FREE_FILE);
    CHECK_STR(test_log_text(), "te_ctx_destroy: 1 open file is still there; the context destroys all of them, and they must be neither used nor destroyed any more");
    fill_and_destroy(ALL_WAYS - 1 - FREE_TENSORS);
    CHECK_STR(test_log_text(), " tensors are still retained; the context releases them, and they must be neither used nor released any more");
    fill_and_destroy(ALL_WAYS - 1 - FREE_MODULE - FREE_ADAM);
    CHECK_STR(test_log_text(), "te_ctx_destroy: 2 modules are still there;");
}

/* ---- the environment ---- */

static int warnings(const char *variable) {
    int n = 0;
    for (const char *at = test_log_text(); (at = strstr(at, variable)) != NULL; at++) n++;
    return n;
}
TE_TEST(environment_numbers_are_checked) {
    static const struct {
        const char *name, *value, *warning; /* NULL: none */
    } all[] = {{"TE_THREADS", "abc", "TE_THREADS is \"abc\"; a whole number from 1 to 64 is possible"},
               {"TE_THREADS", "2x", "TE_THREADS is \"2x\""},
               {"TE_THREADS", "-3", "TE_THREADS is \"-3\""},
               {"TE_THREADS", "0", "TE_THREADS is \"0\""},
               {"TE_THREADS", "65", "TE_THREADS is \"65\""},
               {"TE_THREADS", "99999999999999999999", "TE_THREADS is \"9999"},
               {"TE_THREADS", "2", NULL},
               {"TE_THREADS", "", NULL},
               {"TE_LOG", "info", "TE_LOG is \"info\"; a whole number from 1 to 4 is possible"},
               {"TE_LOG", "33", "TE_LOG is \"33\""},
               {"TE_LOG", "0", "TE_LOG is \"0\""},
               {"TE_LOG", "2", NULL},
               {"TE_DEBUG_SYNC", "yes", "TE_DEBUG_SYNC is \"yes\"; a whole number from 0 to 1 is possible"},
               {"TE_DEBUG_SYNC", "0", NULL},
               {"TE_DEBUG_SYNC", "1", NULL}};
    for (int i = 0; i < COUNT(all); i++) {
        test_case("%s=%s", all[i].name, all[i].value);
        int before = warnings(all[i].name);
        test_setenv(all[i].name, all[i].value);
        te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .log = test__log});
        CHECK_OK(te);
        CHECK_EQ_INT(warnings(all[i].name) - before, all[i].warning ? 1 : 0);
        if (all[i].warning) CHECK_STR(test_log_text(), all[i].warning);
        te_ctx_destroy(te);
        test_setenv(all[i].name, NULL);
    }
    /* what the desc says counts, and nobody asks the environment */
    test_setenv("TE_THREADS", "abc");
    int before = warnings("TE_THREADS");
    te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 1, .log = test__log});
    CHECK_EQ_INT(warnings("TE_THREADS"), before);
    te_ctx_destroy(te);
    /* a device that is not there stays an error, which says whose word it was */
    test_setenv("TE_DEVICE", "gpu");
    te = te_ctx_create(&(te_ctx_desc){.cpu_threads = 1, .log = test__log});
    CHECK_ERROR(te, TE_ERR_INVALID, "TE_DEVICE is \"gpu\", which is neither \"cpu\" nor \"cuda:N\"");
    te_ctx_destroy(te);
}
