/* Parameter groups: every parameter is stepped as by an optimizer that has its group's numbers for all, by calls, in graphs and through a file. */
#include "../te_test.h"

static void destroy_module(void *m) { te_module_destroy((te_module *)m); }
static void destroy_optimizer(void *opt) { te_optimizer_destroy((te_optimizer *)opt); }

static te_result no_forward(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = args->input;
    return TE_OK;
}
static const te_module_class some_class = {"Some", 0, no_forward, NULL, NULL};
/* Parameters, in the order of registration; their groups in `descs` below. */
enum { PARAMS = 6 };
static const char *const paths[PARAMS] = {"first.weight", "first.bias", "second.weight", "second.bias", "norm", "head.weight"};
static te_module *make(te_ctx *te, te_dtype dtype) {
    te_module *m = te_module_create(te, &some_class, "model"), *at[4] = {NULL, NULL, m, NULL};
    static const char *const names[] = {"first", "second", NULL, "head"};
    for (int i = 0; i < 4; i++)
        if (names[i]) at[i] = te_module_create(te, &some_class, names[i]), te_module_add_child(m, names[i], at[i]);
    for (int i = 0; i < PARAMS; i++) {
        const char *name = strrchr(paths[i], '.') ? strrchr(paths[i], '.') + 1 : paths[i];
        te_tensor *x = strcmp(name, "weight") == 0 ? test_tensor(te, dtype, SHAPE(5, 9), test_normal(45, 10 + (uint64_t)i)) : test_tensor(te, dtype, SHAPE(45), test_normal(45, 10 + (uint64_t)i));
        te_module_add_parameter(i < 2 ? at[0] : i < 4 ? at[1] : i == 4 ? m : at[3], name, x);
    }
    test_on_end(destroy_module, m);
    return m;
}
static te_tensor *parameter(te_module *m, int i) {
    const char *dot = strchr(paths[i], '.');
    char child[32];
    if (!dot) return te_module_parameter(m, paths[i]);
    snprintf(child, sizeof child, "%.*s", (int)(dot - paths[i]), paths[i]);
    return te_module_parameter(te_module_find(m, child), dot + 1);
}
/* Gradients that no parameter has a say in. */
static void step(te_module *m, te_optimizer *opt, int index) {
    te_ctx *te = te_module_ctx(m);
    te_scope_begin(te);
    for (int i = 0; i < PARAMS; i++) {
        te_tensor *p = parameter(m, i);
        if (i == 3 && index % 2) continue; /* takes no part */
        te_backward_from(te_scale(p, 1), te_tensor_full(te, te_tensor_dtype(p), te_tensor_ndim(p), te_tensor_shape(p), 0.25 * (i + 1) - 0.5 * (index % 3)));
    }
    te_optimizer_step(opt);
    te_scope_end(te);
}

/* Groups by pattern; a parameter that two of them name is the first one's. */
static const te_param_group patterns[] = {{.pattern = "*.bias", .no_weight_decay = true, .lr = 0.02f},
                                          {.pattern = "second.*", .lr = 0.003f, .weight_decay = 0.3f},
                                          {.pattern = "n?rm", .no_weight_decay = true}};
static const int group_of[PARAMS] = {-1, 0, 1, 0, 2, -1};
static const te_param_group with_betas[] = {{.pattern = "*bias", .beta1 = 0.5f, .beta2 = 0.9f, .eps = 1e-4f}, {.pattern = "s*t", .beta1 = 0.7f}, {.pattern = "norm*", .lr = 0.1f}};

typedef struct kind {
    const char *name;
    te_dtype dtype, moment;
    bool sgd, betas, decay_matrices_only, remainders;
} kind;
static const kind kinds[] = {{.name = "adam", .dtype = TE_F32},
                             {.name = "adam, betas", .dtype = TE_BF16, .betas = true},
                             {.name = "adam, matrices decay", .dtype = TE_F32, .decay_matrices_only = true},
                             {.name = "adam, moments of 16 bits", .dtype = TE_BF16, .moment = TE_F16, .betas = true},
                             {.name = "adam, remainders", .dtype = TE_BF16, .remainders = true},
                             {.name = "sgd", .dtype = TE_F16, .sgd = true, .decay_matrices_only = true}};
/* group -2: with all groups; else all parameters have the numbers of that group. */
static te_optimizer *make_opt(te_module *m, const kind *k, int group) {
    const te_param_group *all = k->betas ? with_betas : patterns, *g = group >= 0 ? &all[group] : &(te_param_group){0};
    const float decay = g->no_weight_decay ? 0 : g->weight_decay > 0 ? g->weight_decay : 0.1f, lr = g->lr > 0 ? g->lr : 0.01f;
    te_fused_adam_desc adam = {.lr = lr, .weight_decay = decay, .beta1 = g->beta1, .beta2 = g->beta2, .eps = g->eps, .exp_avg_dtype = k->moment, .exp_avg_sq_dtype = k->moment,
                               .decay_matrices_only = k->decay_matrices_only, .store_param_remainders = k->remainders};
    te_fused_sgd_desc sgd = {.lr = lr, .weight_decay = decay, .momentum = 0.9f, .decay_matrices_only = k->decay_matrices_only};
    if (group == -2) adam.groups = sgd.groups = all, adam.num_groups = sgd.num_groups = 3;
    te_optimizer *opt = k->sgd ? te_fused_sgd_create(te_module_ctx(m), m, &sgd) : te_fused_adam_create(te_module_ctx(m), m, &adam);
    CHECK_OK(te_module_ctx(m));
    if (opt) test_on_end(destroy_optimizer, opt);
    return opt;
}
static float *values(te_tensor *x) {
    float *out = test_floats(te_tensor_numel(x));
    te_tensor_to_f32(x, out);
    return out;
}
static void check_groups(te_module *m, te_module *const *one) {
    REQUIRE_OK(te_module_ctx(m));
    for (int i = 0; i < PARAMS; i++) CHECK_BYTES(paths[i], values(parameter(m, i)), values(parameter(one[group_of[i] + 1], i)), 45 * sizeof(float));
}

TE_TEST_DEVICES(groups_have_their_own_numbers) {
    const char *path = test_path("groups.safetensors");
    for (int k = 0; k < COUNT(kinds); k++) {
        te_module *one[4], *m = make(te, kinds[k].dtype), *other = make(te, kinds[k].dtype);
        te_optimizer *of_one[4], *opt = make_opt(m, &kinds[k], -2), *after = make_opt(other, &kinds[k], -2);
        test_case("%s", kinds[k].name);
        for (int g = 0; g < 4; g++) one[g] = make(te, kinds[k].dtype), of_one[g] = make_opt(one[g], &kinds[k], g - 1);
        CHECK_EQ_INT(te_optimizer_num_groups(opt), 3);
        for (int i = 0; i < 3; i++) {
            step(m, opt, i);
            for (int g = 0; g < 4; g++) step(one[g], of_one[g], i);
        }
        check_groups(m, one);
        te_optimizer_set_group_lr(opt, 1, 0.05f), te_optimizer_set_lr(of_one[2], 0.05f);
        te_optimizer_set_lr(opt, 0.04f); /* of the desc's own, and of a group that follows it */
        for (int g = 0; g < 4; g++)
            if (te_optimizer_lr(of_one[g]) == 0.01f) te_optimizer_set_lr(of_one[g], 0.04f);
        CHECK(te_optimizer_group_lr(opt, 1) == 0.05f && te_optimizer_group_lr(opt, -1) == 0.04f);
        CHECK_EQ_INT(te_model_save(te, path, m, opt, NULL, 0), TE_OK);
        CHECK_EQ_INT(te_model_load(te, path, other, after), TE_OK);
        step(m, opt, 3), step(other, after, 3);
        for (int g = 0; g < 4; g++) step(one[g], of_one[g], 3);
        check_groups(m, one);
        check_groups(other, one);
        te_graph_begin(te);
        step(m, opt, 4), step(m, opt, 6);
        te_graph *graph = te_graph_end(te);
        REQUIRE_OK(te);
        for (int i = 0; i < 2; i++) {
            te_optimizer_set_group_lr(opt, 0, 0.2f / (float)(i + 1));
            for (int g = 0; g < 4; g++) {
                if (group_of[1] + 1 == g) te_optimizer_set_lr(of_one[g], 0.2f / (float)(i + 1));
                step(one[g], of_one[g], 4), step(one[g], of_one[g], 6);
            }
            CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            check_groups(m, one);
        }
        te_graph_destroy(graph);
    }
}

/* The very parameters in place of a pattern. */
TE_TEST(groups_by_list) {
    te_ctx *te = test_context("cpu");
    te_module *m = make(te, TE_F32), *other = make(te, TE_F32);
    te_tensor *list[2] = {parameter(m, 1), parameter(m, 5)};
    const te_param_group by_list = {.params = list, .num_params = 2, .lr = 0.5f}, by_pattern[] = {{.pattern = "first.bias", .lr = 0.5f}, {.pattern = "head*", .lr = 0.5f}};
    te_optimizer *a = te_fused_adam_create(te, m, &(te_fused_adam_desc){.groups = &by_list, .num_groups = 1}),
                 *b = te_fused_adam_create(te, other, &(te_fused_adam_desc){.groups = by_pattern, .num_groups = 2});
    test_on_end(destroy_optimizer, a);
    test_on_end(destroy_optimizer, b);
    for (int i = 0; i < 3; i++) step(m, a, i), step(other, b, i);
    REQUIRE_OK(te);
    for (int i = 0; i < PARAMS; i++) CHECK_BYTES(paths[i], values(parameter(m, i)), values(parameter(other, i)), 45 * sizeof(float));
}

TE_TEST(groups_refused) {
    te_ctx *te = test_context("cpu");
    te_module *m = make(te, TE_F32);
    te_tensor *foreign[1] = {te_tensor_zeros(te, TE_F32, SHAPE(3))};
    const te_param_group bad[] = {{.lr = 1}, {.pattern = "*", .params = foreign, .num_params = 1}, {.pattern = "wieght"}, {.params = foreign, .num_params = 1}, {.pattern = "*", .lr = -1},
                                  {.pattern = "*", .weight_decay = 1, .no_weight_decay = true}, {.pattern = "*", .beta2 = 1}, {.params = foreign}};
    static const char *const words[] = {"groups[0] has pattern NULL and no params", "groups[0] has pattern \"*\" and params of 1", "groups[0] (\"wieght\") has no parameter;",
                                        "groups[0].params[0] is none of its parameters", "groups[0].lr is -1", "weight_decay 1 and no_weight_decay", "groups[0].beta2 is 1", "and params of 0"};
    for (int i = 0; i < COUNT(bad); i++) {
        CHECK(!te_fused_adam_create(te, m, &(te_fused_adam_desc){.groups = &bad[i], .num_groups = 1}));
        CHECK_ERROR(te, TE_ERR_INVALID, words[i]);
    }
    const te_param_group twice[] = {{.pattern = "*bias"}, {.pattern = "first.bias"}}, betas = {.pattern = "*", .beta1 = 0.5f};
    CHECK(!te_fused_adam_create(te, m, &(te_fused_adam_desc){.groups = twice, .num_groups = 2}));
    CHECK_ERROR(te, TE_ERR_INVALID, "groups[1] (\"first.bias\") has no parameter of its own");
    CHECK(!te_fused_sgd_create(te, m, &(te_fused_sgd_desc){.lr = 1, .groups = &betas, .num_groups = 1}));
    CHECK_ERROR(te, TE_ERR_INVALID, "beta1 0.5, beta2 0, eps 0, which Adam alone reads");
    CHECK(!te_fused_adam_create(te, m, &(te_fused_adam_desc){.num_groups = 65}));
    CHECK_ERROR(te, TE_ERR_INVALID, "groups is NULL and num_groups 65; 0 to 64");
    te_optimizer *opt = te_fused_adam_create(te, m, NULL);
    test_on_end(destroy_optimizer, opt);
    te_optimizer_set_group_lr(opt, 0, 1);
    CHECK_ERROR(te, TE_ERR_INVALID, "group 0 of 0");
    CHECK(te_optimizer_group_lr(opt, -1) == 1e-3f && te_optimizer_num_groups(NULL) == 0);
}
