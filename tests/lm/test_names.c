/* test_names.c: every kind of rule, both ways, on a tree of its own; and that each row of the table of families says what it can. */
#define TE_IMPLEMENTATION
#include "te_parts.h"

#include "../te_test.h"

static te_result names_forward(te_module *m, te_forward_args *args) {
    args->outputs.out = args->input;
    return te_error_code(m->te);
}
static const te_module_class names_class = {"Names", 0, names_forward, NULL, NULL};

TE_TEST(lm_names_match) {
    static const struct {
        const char *pattern, *name, *text; /* text NULL: it does not match */
        int number;
    } cases[] = {{"@", "a.b", "a.b", 0},
                 {"@", "", NULL, 0},
                 {"@.w", "a.b.w", "a.b", 0},
                 {"@.w", ".w", NULL, 0},
                 {"@.w", "a.w.w", "a.w", 0},
                 {"@.w", "a.wx", NULL, 0},
                 {"model.@", "model.x", "x", 0},
                 {"model.@", "model.", NULL, 0},
                 {"@.e.*.w", "l.0.e.12.w", "l.0", 12},
                 {"@.e.*.w", "e.1.e.0.w", "e.1", 0},
                 {"@.e.*.w", "l.e.01.w", NULL, 0},
                 {"@.e.*.w", "l.e..w", NULL, 0},
                 {"@.e.*.w", "l.e.-1.w", NULL, 0},
                 {"@.e.*.w", "l.e.99999999999999999999.w", NULL, 0},
                 {"plain", "plain", "", 0},
                 {"plain", "plai", NULL, 0}};
    for (int i = 0; i < COUNT(cases); i++) {
        const char *from = "";
        size_t length = 0;
        int64_t number = 0;
        test_case("%s of %s", cases[i].pattern, cases[i].name);
        bool found = te__lm_matches(cases[i].pattern, cases[i].name, &from, &length, &number);
        CHECK_EQ_INT(found, cases[i].text != NULL);
        if (!found) continue;
        CHECK(length == strlen(cases[i].text) && memcmp(from, cases[i].text, length) == 0);
        CHECK_EQ_INT(number, cases[i].number);
        char name[TE__LM_NAME], text[64];
        snprintf(text, sizeof text, "%.*s", (int)length, from);
        CHECK(te__lm_expand(cases[i].pattern, text, number, name) && strcmp(name, cases[i].name) == 0);
    }
    char longest[TE__LM_NAME + 8], name[TE__LM_NAME];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    CHECK(!te__lm_expand("@", longest, 0, name) && !te__lm_expand("a@.w", longest, 0, name));
}

/* A layer "l" with matrices a [2, 3], b [1, 3], and e.0 to e.1 with u and v [2, 3] each, and stack [2, 4, 3]. */
static te_module *names_tree(te_ctx *te) {
    te_module *root = te_module_create(te, &names_class, "root"), *l = te_module_add_child(root, "l", te_module_create(te, &names_class, "l"));
    te_module *e = te_module_add_child(l, "e", te_module_create(te, &names_class, "e"));
    te_module_add_parameter(l, "a", te_tensor_zeros(te, TE_F32, SHAPE(2, 3)));
    te_module_add_parameter(l, "b", te_tensor_zeros(te, TE_F32, SHAPE(1, 3)));
    te_module_add_parameter(l, "stack", te_tensor_zeros(te, TE_F32, SHAPE(2, 4, 3)));
    for (int i = 0; i < 2; i++) {
        te_module *x = te_module_add_child(e, i ? "1" : "0", te_module_create(te, &names_class, i ? "1" : "0"));
        te_module_add_parameter(x, "u", te_tensor_zeros(te, TE_F32, SHAPE(2, 3)));
        te_module_add_parameter(x, "v", te_tensor_zeros(te, TE_F32, SHAPE(2, 3)));
    }
    return root;
}
/* The numbers of the file's tensors, 1, 2, 3 ... from tensor to tensor, and those that the parameters get. */
typedef struct names_case {
    const char *what;
    te__lm_rule rules[2];
    const char *first, *files[4]; /* the parameter that leads to the group, and the names that its file has */
    int num_files, ndim, shape[3]; /* of each of the file's tensors */
    const char *parameters[4];
    float values[4][24]; /* of the parameters, 0 ends the list */
} names_case;
static const names_case names_cases[] = {
    {"rename", {{{"@.x"}, {"@.a"}, false}, TE__LM_OTHERS}, "l.a", {"l.x"}, 1, 2, {2, 3}, {"l.a"}, {{1, 2, 3, 4, 5, 6}}},
    {"rename, transposed", {{{"@.x"}, {"@.a"}, true}, TE__LM_OTHERS}, "l.a", {"l.x"}, 1, 2, {3, 2}, {"l.a"}, {{1, 3, 5, 2, 4, 6}}},
    {"rename by number", {{{"@.x.*.u"}, {"@.e.*.u"}, false}, TE__LM_OTHERS}, "l.e.1.u", {"l.x.1.u"}, 1, 2, {2, 3}, {"l.e.1.u"}, {{1, 2, 3, 4, 5, 6}}},
    {"split", {{{"@.ab"}, {"@.a", "@.b"}, false}, TE__LM_OTHERS}, "l.a", {"l.ab"}, 1, 2, {3, 3}, {"l.a", "l.b"}, {{1, 2, 3, 4, 5, 6}, {7, 8, 9}}},
    {"split, transposed", {{{"@.ab"}, {"@.a", "@.b"}, true}, TE__LM_OTHERS}, "l.a", {"l.ab"}, 1, 2, {3, 3}, {"l.a", "l.b"}, {{1, 4, 7, 2, 5, 8}, {3, 6, 9}}},
    {"join", {{{"@.a1", "@.a2"}, {"@.a"}, false}, TE__LM_OTHERS}, "l.a", {"l.a1", "l.a2"}, 2, 2, {1, 3}, {"l.a"}, {{1, 2, 3, 4, 5, 6}}},
    {"join, transposed", {{{"@.a1", "@.a2"}, {"@.a"}, true}, TE__LM_OTHERS}, "l.a", {"l.a1", "l.a2"}, 2, 2, {3, 1}, {"l.a"}, {{1, 2, 3, 4, 5, 6}}},
    {"unstack", {{{"@.us"}, {"@.e.*.u"}, false}, TE__LM_OTHERS}, "l.e.0.u", {"l.us"}, 1, 3, {2, 2, 3}, {"l.e.0.u", "l.e.1.u"}, {{1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 11, 12}}},
    {"unstack and split", {{{"@.all"}, {"@.e.*.u", "@.e.*.v"}, false}, TE__LM_OTHERS}, "l.e.0.u", {"l.all"}, 1, 3, {2, 4, 3}, {"l.e.0.u", "l.e.0.v", "l.e.1.u", "l.e.1.v"},
     {{1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 11, 12}, {13, 14, 15, 16, 17, 18}, {19, 20, 21, 22, 23, 24}}},
    {"unstack and split, transposed", {{{"@.all"}, {"@.e.*.u", "@.e.*.v"}, true}, TE__LM_OTHERS}, "l.e.0.u", {"l.all"}, 1, 3, {2, 3, 4}, {"l.e.0.u", "l.e.0.v", "l.e.1.u", "l.e.1.v"},
     {{1, 5, 9, 2, 6, 10}, {3, 7, 11, 4, 8, 12}, {13, 17, 21, 14, 18, 22}, {15, 19, 23, 16, 20, 24}}},
    {"stack and join", {{{"@.x.*.u", "@.x.*.v"}, {"@.stack"}, false}, TE__LM_OTHERS}, "l.stack", {"l.x.0.u", "l.x.0.v", "l.x.1.u", "l.x.1.v"}, 4, 2, {2, 3}, {"l.stack"},
     {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24}}},
    {"stack, transposed", {{{"@.x.*"}, {"@.stack"}, true}, TE__LM_OTHERS}, "l.stack", {"l.x.0", "l.x.1"}, 2, 2, {3, 4}, {"l.stack"},
     {{1, 5, 9, 2, 6, 10, 3, 7, 11, 4, 8, 12, 13, 17, 21, 14, 18, 22, 15, 19, 23, 16, 20, 24}}},
};
TE_TEST(lm_names_both_ways) {
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(names_cases); i++) {
        const names_case *c = &names_cases[i];
        te_module *m = names_tree(te);
        te__lm_group g;
        te_tensor *parts[4] = {NULL}, *back[4] = {NULL};
        int64_t shape[TE_MAX_DIMS], want[3];
        float next = 1;
        test_case("%s", c->what);
        te_no_grad_begin(te);
        CHECK_EQ_INT(te__lm_group_of(c->rules, m, c->first, &g), 0);
        CHECK(te__lm_is_complete(&g, m));
        CHECK_EQ_INT(g.count[TE__LM_FILE], c->num_files);
        CHECK_EQ_INT(te__lm_file_shape(&g, m, shape), c->ndim);
        for (int k = 0; k < c->ndim; k++) CHECK_EQ_INT(shape[k], want[k] = c->shape[k]);
        for (int f = 0; f < c->num_files; f++) {
            char name[TE__LM_NAME];
            float values[24];
            CHECK(te__lm_member(&g, TE__LM_FILE, f, name));
            CHECK_STR(name, c->files[f]);
            for (int k = 0; k < 24; k++) values[k] = next + (float)k;
            parts[f] = te_tensor_from_f32(te, TE_F32, c->ndim, want, values);
            next += (float)te_tensor_numel(parts[f]);
            back[f] = parts[f]; /* take_in replaces them */
        }
        CHECK_EQ_INT(te__lm_take_in(&g, m, parts), TE_OK);
        for (int p = 0; p < 4 && c->parameters[p]; p++) {
            te_tensor *x = te__lm_parameter(m, c->parameters[p]);
            test_case("%s: %s", c->what, c->parameters[p]);
            CHECK_BYTES("values", test_read(x), c->values[p], 4 * (size_t)te_tensor_numel(x));
            if (p > 0) CHECK(te__lm_group_of(c->rules, m, c->parameters[p], &g) > 0);
        }
        CHECK_EQ_INT(te__lm_group_of(c->rules, m, c->first, &g), 0);
        CHECK_EQ_INT(te__lm_put_out(&g, m, parts), TE_OK);
        for (int f = 0; f < c->num_files && parts[f]; f++) {
            CHECK(parts[f]->ndim == c->ndim && memcmp(parts[f]->shape, want, sizeof(int64_t) * (size_t)c->ndim) == 0);
            CHECK_BYTES("the file's", test_read(parts[f]), test_copy(test_read(back[f]), te_tensor_numel(back[f])), 4 * (size_t)te_tensor_numel(back[f]));
        }
        te_no_grad_end(te);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* Every row's texts are read, its layouts end, and the row of its text is there. */
TE_TEST(lm_rows) {
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(te__lm_families); i++) {
        const te__lm_family *f = &te__lm_families[i];
        te__lm_config c;
        test_case("%s", f->model_type);
        CHECK(te__lm_family_of(f->model_type) == f); /* no two of one name */
        CHECK(te__lm_parse(&c, te, "a file", "{}", 0, 2) && te__lm_resolve(&c, f, NULL));
        CHECK(c.rms_norm_eps > 0 && c.rope_theta > 0 && c.hidden_act);
        te__lm_config_close(&c);
        CHECK(f->layouts[0] != NULL);
        for (int l = 0; l < TE__LM_LAYOUTS && f->layouts[l]; l++) {
            int n = 0;
            while (n < 16 && strcmp(f->layouts[l][n].file[0], "@") != 0) n++;
            CHECK(n < 16 && !strcmp(f->layouts[l][n].model[0], "@"));
        }
        CHECK(!f->inner || (te__lm_family_of(f->inner->type) && !te__lm_family_of(f->inner->type)->inner));
        /* A key that no table has would be skipped. */
        for (int t = 0; t < 2; t++)
            for (const char *at = t ? f->always : f->reads; (at = strchr(at, '"')) != NULL; at++) {
                const char *end = strchr(at + 1, '"');
                bool known = end[1] != ':'; /* a value */
                for (int k = 0; k < 3 && !known; k++)
                    for (int n = 0; n < te__lm_tables[k].n && !known; n++)
                        known = strlen(te__lm_tables[k].keys[n].name) == (size_t)(end - at - 1) && !strncmp(te__lm_tables[k].keys[n].name, at + 1, (size_t)(end - at - 1));
                CHECK_MSG(known, "%.40s", at);
                at = end;
            }
        CHECK_OK(te);
    }
}
