/* tests/modules/test_tree.c: the tree of modules: how deep it may be, all walks of the deepest one, and walks that name nothing. */
#include "../te_test.h"

static te_result link_forward(te_module *self, te_forward_args *args) {
    args->outputs.out = te_forward(te_module_child(self, 0), args->input);
    return te_error_code(te_module_ctx(self));
}

static const te_module_class link_class = {"Link", 0, link_forward, NULL, NULL};
static bool count_module(void *user, te_module *m) { return (void)m, ++*(int *)user, true; }
static bool longest_path(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)x, (void)kind;
    if (strlen(path) > *(size_t *)user) *(size_t *)user = strlen(path);
    return true;
}
TE_TEST(deep_trees_are_refused) {
    te_ctx *te = test_context("cpu");
    te_module *root = te_module_create(te, &link_class, "root"), *deepest = root;
    int made = 1, visited = 0;
    for (; made < 20000; made++) {
        te_module *next = te_module_create(te, &link_class, "a");
        if (!te_module_add_child(deepest, "a", next)) {
            te_module_destroy(next);
            break;
        }
        deepest = next;
    }
    CHECK_EQ_INT(made, TE_MAX_MODULE_DEPTH);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_module_add_child: a has 1 level, and a is at level 256; a tree has at most 256 (TE_MAX_MODULE_DEPTH)");
    /* all walks of the deepest tree that there may be */
    te_module_add_parameter(deepest, "w", te_tensor_zeros(te, TE_F32, SHAPE(2)));
    char path[1024], *text = (char *)test_alloc(1 << 20);
    size_t longest = 0;
    CHECK_EQ_INT(strlen(te_module_path(deepest, path, sizeof path)), 2 * (TE_MAX_MODULE_DEPTH - 1) - 1);
    CHECK(te_module_find(root, path) == deepest);
    CHECK(te_module_visit(root, count_module, &visited));
    CHECK_EQ_INT(visited, TE_MAX_MODULE_DEPTH);
    CHECK(te_module_visit_tensors(root, longest_path, &longest));
    CHECK_EQ_INT(longest, 2 * (TE_MAX_MODULE_DEPTH - 1) + 1);
    CHECK_EQ_INT(te_module_num_parameters(root), 2);
    te_module_set_requires_grad(root, false);
    te_module_train(root, false);
    CHECK(!te_module_is_training(deepest));
    CHECK(te_module_print(root, text, 1 << 20) > 256 * 256);
    /* from below: the sum counts, and a place that is free again can be taken again */
    te_module *upper = te_module_create(te, &link_class, "upper");
    CHECK(!te_module_add_child(upper, "root", root));
    CHECK_ERROR(te, TE_ERR_INVALID, "root has 256 levels, and upper is at level 1;");
    te_module_destroy(deepest);
    CHECK(te_module_add_child(upper, "root", root) == root);
    CHECK_OK(te);
    te_module_destroy(upper);
}

TE_TEST(null_names_and_visitors) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 2, .out_features = 2});
    CHECK(!te_module_parameter(m, NULL) && !te_module_parameter(NULL, NULL));
    CHECK_OK(te);
    CHECK(!te_module_visit(m, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_module_visit: the function to call is NULL");
    CHECK(!te_module_visit_tensors(m, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_module_visit_tensors: the function to call is NULL");
    CHECK(te_module_visit(NULL, NULL, NULL) && te_module_visit_tensors(NULL, NULL, NULL));
    te_module_destroy(m);
}
