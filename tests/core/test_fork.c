/* tests/core/test_fork.c: contexts in a process that was forked off behind them. */
#define _GNU_SOURCE
#include "../te_test.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* Runs fn in a child, which has 20 seconds; what it prints comes out here. 0 if the child said that all was well. */
static int in_a_child(int (*fn)(te_ctx *te), te_ctx *te) {
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        alarm(20);
        int line = fn(te);
        fflush(stdout);
        _exit(line ? 1 : 0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    if (WIFSIGNALED(status)) test_fail(__FILE__, __LINE__, "the child was ended by signal %d%s", WTERMSIG(status), WTERMSIG(status) == SIGALRM ? ": it hung" : "");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
/* In a child, where test_fail of the parent's would be lost. */
#define EXPECT(cond)                                                                                                  \
    do {                                                                                                              \
        if (!(cond)) return printf("  %s:%d, in the child: %s  (%s)\n", __FILE__, __LINE__, #cond, te_error(te)), 1;    \
    } while (0)
#define EXPECT_FORKED(call)                                                                                            \
    do {                                                                                                              \
        call;                                                                                                         \
        EXPECT(te_error_code(te) == TE_ERR_STATE && strstr(te_error(te), "create contexts after fork"));               \
        te_clear_error(te);                                                                                           \
    } while (0)

static struct {
    te_module *m;
    te_optimizer *adam;
    te_graph *graph;
    te_tensor *x, *y, *loss;
    te_group *group;
    te_thread_hub *hub;
    const char *path, *saved;
} family;

static int use_all(te_ctx *te) {
    float host[4];
    char made[64], used[64];
    snprintf(made, sizeof made, "created in process %lld", (long long)getppid());
    snprintf(used, sizeof used, "used in process %lld", (long long)getpid());
    EXPECT(!te_add(family.x, family.x));
    EXPECT(strstr(te_error(te), made) && strstr(te_error(te), used));
    te_clear_error(te);
    EXPECT_FORKED(te_scale(family.x, 2));
    EXPECT_FORKED(te_forward(family.m, family.x));
    EXPECT_FORKED(te_backward(family.loss));
    EXPECT_FORKED(te_optimizer_step(family.adam));
    EXPECT_FORKED(te_graph_launch(family.graph));
    EXPECT_FORKED(te_synchronize(te));
    EXPECT_FORKED(te_tensor_item(family.loss));
    EXPECT_FORKED(te_tensor_to_host(family.loss, host));
    EXPECT_FORKED(te_tensor_copy_from_host(family.loss, host));
    EXPECT_FORKED(te_tensor_zeros(te, TE_F32, SHAPE(4)));
    EXPECT_FORKED(te_tensor_full(te, TE_F32, SHAPE(1 << 20), 1));
    EXPECT_FORKED(te_linear_create(te, &(te_linear_desc){.in_features = 4, .out_features = 4}));
    EXPECT_FORKED(te_graph_begin(te));
    EXPECT_FORKED(te_all_reduce(family.group, family.loss, TE_REDUCE_SUM));
    EXPECT_FORKED(te_barrier(family.group));
    EXPECT_FORKED(te_model_save(te, family.path, family.m, family.adam, NULL, 0));
    EXPECT_FORKED(te_model_load(te, family.saved, family.m, family.adam));
    char report[4096];
    te_report(te, report, sizeof report);
    return 0;
}
static int destroy_all(te_ctx *te) {
    te_graph_destroy(family.graph);
    te_optimizer_destroy(family.adam);
    te_module_destroy(family.m);
    te_tensor_release(family.x);
    te_tensor_release(family.y);
    te_tensor_release(family.loss);
    te_group_destroy(family.group);
    te_ctx_destroy(te);
    te_thread_hub_destroy(family.hub);
    return 0;
}
static int destroy_the_context(te_ctx *te) { return te_ctx_destroy(te), 0; }
static int own_context(te_ctx *te) {
    te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 4, .log = test__log});
    EXPECT(te_ok(te));
    te_scope_begin(te);
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(1 << 20), 1);
    EXPECT(te_tensor_item(te_sum_all(te_add(x, x))) == 2 << 20);
    te_scope_end(te);
    te_ctx_destroy(te);
    return 0;
}
static int own_gpu(te_ctx *te) {
    te = te_ctx_create(&(te_ctx_desc){.device = "cuda:0", .log = test__log});
    EXPECT(te_error_code(te) == TE_ERR_STATE && strstr(te_error(te), "the driver was opened before this process was forked off"));
    te_ctx_destroy(te);
    return 0;
}
static te_tensor *family_step(void) {
    te_tensor *loss = te_mean_all(te_forward(family.m, family.x));
    te_backward(loss);
    te_optimizer_step(family.adam);
    return loss;
}
static void found_a_family(te_ctx *te) {
    memset(&family, 0, sizeof family);
    family.hub = te_thread_hub_create(2); /* nobody else joins: a collective that is let through waits for ever */
    family.group = te_thread_group_create(te, family.hub, 0);
    family.path = test_path("never");
    family.saved = test_path("saved");
    family.m = te_linear_create(te, &(te_linear_desc){.in_features = 64, .out_features = 64, .gemm.params_dtype = TE_F32});
    family.adam = te_fused_adam_create(te, family.m, NULL);
    family.x = te_tensor_retain(te_tensor_full(te, TE_F32, SHAPE(2048, 64), 1));
    family_step();
    te_graph_begin(te);
    family_step();
    family.graph = te_graph_end(te);
    te_graph_launch(family.graph);
    family.y = te_tensor_retain(te_forward(family.m, family.x));
    family.loss = te_tensor_retain(te_mean_all(family.y));
    te_model_save(te, family.saved, family.m, family.adam, NULL, 0);
}
static void in_children(const char *device) {
    te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = device, .cpu_threads = 4, .log = test__log});
    te_scope_begin(te);
    found_a_family(te);
    CHECK_OK(te);
    CHECK_EQ_INT(in_a_child(use_all, te), 0);
    CHECK(access(family.path, F_OK) != 0);
    CHECK_EQ_INT(in_a_child(destroy_all, te), 0);
    CHECK_EQ_INT(in_a_child(destroy_the_context, te), 0);
    /* ThreadSanitizer ends a process that starts threads after it was forked from one that had them. */
    if (test_every(2) == 1) CHECK_EQ_INT(in_a_child(own_context, te), 0);
    if (te_ctx_is_cuda(te)) CHECK_EQ_INT(in_a_child(own_gpu, te), 0);
    /* the parent has not noticed */
    CHECK(isfinite(te_tensor_item(family_step())) && te_graph_launch(family.graph) == TE_OK);
    CHECK_OK(te);
    destroy_all(te);
}
TE_TEST(a_context_of_before_a_fork_gives_an_error) { in_children("cpu"); }
TE_TEST(a_context_of_before_a_fork_gives_an_error_on_a_gpu) {
    if (test_no_gpu()) SKIP(test_no_gpu());
    in_children("cuda:0");
}
