/* test_lora_match.c: patterns of module names: what matches is what Python's re says of the expression that NeMo Automodel's module_matcher makes of a name (the table was written by
 * that function), what is refused, and that long patterns end. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

static bool match_one(te_ctx *te, const char *name, const char *path, bool expression) {
    te__pattern p = TE_ZERO;
    bool found = false;
    bool fine = expression ? te__pattern_open(&p, te, "test", name, name) : te__pattern_open_name(&p, te, "test", name);
    CHECK_MSG(fine, "\"%s\" cannot be read: %s", name, te_error(te));
    if (fine) found = te__pattern_matches(&p, path);
    te__pattern_close(&p);
    return found;
}

TE_TEST(lora_match_as_automodel) {
    static const char q[] = "model.layers.10.self_attn.q_proj", v[] = "model.layers.1.self_attn.v_proj", up[] = "model.layers.1.mlp.up_proj";
    static const struct {
        const char *name, *path;
        bool match;
    } cases[] = {
        {"*_proj", q, true}, {"*_proj", "lm_head", false}, {"*.layers.0.*.linear_qkv", "decoder.layers.0.self_attention.linear_qkv", true},
        {"*.layers.0.*.linear_qkv", "decoder.layers.1.self_attention.linear_qkv", false}, {"*.*.*", "a.b.c", true}, {"*.b.*", "a.b", true}, {"*.b.*", "a.c", false},
        {"*[qv]_proj", q, true}, {"*[qv]_proj", v, true}, {"*[qv]_proj", up, false}, {"*.(q|v)_proj", q, true}, {"*.(q|v)_proj", up, false}, {"*.(q|v)_proj", "q_proj", false},
        {"*[^qk]_proj", v, true}, {"*[^qk]_proj", q, false}, {".*layers.1[0-9].*", q, true}, {".*layers.1[0-9].*", v, false}, {"*layers.1.*", q, true}, {"*layers.1*", q, true},
        /* ^ and $ bind more than |: all but the last alternative are beginnings, all but the first are not anchored at all, and re.match begins at the beginning */
        {"model|v_proj", q, true}, {"lm|v_proj", v, false}, {"lm|*v_proj", v, true}, {"(lm|*v)_proj", v, true}, {"*q_proj|v", "v", true}, {"*q_proj|v", "vx", false}, {"v|*q_proj", "vx", true},
        /* a star is .*, behind whatever; ? and + are operators */
        {"u?p", "p", true}, {"u?p", "up", true}, {"u?p", "uup", false}, {"u+p", "uuup", true}, {"u+p", "p", false}, {"u+?p", "uup", true}, {"u*p", "uxyzp", true}, {"u*p", "p", false},
        {"(ab)+", "ababab", true}, {"(ab)+", "aba", false}, {"(a|b)?c", "bc", true}, {"((a|b)+|)x", "x", true}, {"(a?)+b", "aab", true}, {"()*x", "x", true}, {"**", "anything", true},
        {"a.c", "a.c", true}, {"a.c", "abc", true}, {"a\\.c", "abc", false}, {"a\\.c", "a.c", true}, {"[]x]", "]", true}, {"[a-]", "-", true}, {"[*]", "*", true}, {"[*]", "(", true}, {"", "", true},
        {"^a$", "a", true}, {"a^b", "a^b", false}, {".", "\xc3\xa9", true}, {"..", "\xc3\xa9", false}, {"[\xc3\xa0-\xc3\xaf]", "\xc3\xa9", true}, {"[^a]", "\xc3\xa9", true}, {"a", "a\n", true}, {"a*", "a\n", true},
        {"a.", "a\n", false}};
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("\"%s\", \"%s\"", cases[i].name, cases[i].path);
        CHECK(match_one(te, cases[i].name, cases[i].path, false) == cases[i].match);
    }
    CHECK(match_one(te, "(.*\\.)?(q_proj)$", q, true) && !match_one(te, "(.*\\.)?(_proj)$", q, true) && match_one(te, "(.*\\.)?(layers\\.[0-9]*\\..*)$", q, true));
    CHECK_OK(te);
}

TE_TEST(lora_match_refuses) {
    static const struct {
        const char *name, *says;
    } cases[] = {{"a{2}", "has a count (\"{\")"},          {"(?:a)", "has an extension (\"(?\")"},      {"\\d", "has an escape (\"\\d\")"},       {"a\\w", "has an escape (\"\\w\")"},
                 {"a++", "operator behind an operator"},    {"+a", "operator with nothing in front"},    {"(|+)", "operator with nothing in front"}, {"^?", "operator with nothing in front"},
                 {"(a", "a group without its end"},         {"a)", "the end of a group that has not"},   {"[a", "a class without its end"},        {"[]", "a class without its end"},
                 {"[z-a]", "from a later character"},       {"[\\w]", "has an escape (\"\\w\")"},         {"[a-\\s]", "has an escape (\"\\s\")"},    {"\\.*", "the end of a group that has not"}};
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 8, .name = "a"});
    char deep[600];
    const char *name = deep;
    for (int i = 0; i < COUNT(cases); i++) {
        const char *one[] = {cases[i].name};
        test_case("\"%s\"", one[0]);
        CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.target_modules = one, .num_target_modules = 1}, NULL), TE_ERR_UNSUPPORTED);
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, cases[i].says);
    }
    memset(deep, '(', 70);
    strcpy(deep + 70, "a");
    CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.exclude_modules = &name, .num_exclude_modules = 1}, NULL), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "more than 64 groups");
    memset(deep, 'a', 513);
    deep[513] = 0;
    CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .modules_to_save = &name, .num_modules_to_save = 1}, NULL), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "has 513 bytes; at most 512");
    CHECK_EQ_INT(te_module_num_children(m), 0);
    te_module_destroy(m);
}

/* Expressions that a matcher which goes back would not finish: a?^n a^n, (a+)+ ..., stars behind stars. */
TE_TEST(lora_match_takes_linear_time) {
    te_ctx *te = test_context("cpu");
    char name[520] = "", path[520] = "";
    for (int i = 0; i < 160; i++) strcat(name, "a?");
    for (int i = 0; i < 160; i++) strcat(name, "a"), strcat(path, "a");
    CHECK(match_one(te, name, path, false));
    path[159] = 0;
    CHECK(!match_one(te, name, path, false));
    CHECK(!match_one(te, "((a+)+)+b", path, false) && !match_one(te, "(a|a)+b", path, false) && !match_one(te, "((a?)+)+b", path, false));
    for (int i = 0; i < 256; i++) name[2 * i] = '*', name[2 * i + 1] = 'a';
    name[512] = 0;
    CHECK(!match_one(te, name, path, false));
    memset(path, 'a', 511);
    path[511] = 0;
    CHECK(match_one(te, name, path, false));
    CHECK_OK(te);
}

/* The names of a tree: patterns pass over what cannot have adapters; a plain name is the end of a path, too. */
static int match_count(te_module *m, const char *name) {
    int n = -1;
    te_lora_apply(m, &(te_lora_desc){.target_modules = &name, .num_target_modules = 1}, &n);
    if (n > 0) te_lora_remove(m);
    return n;
}
TE_TEST(lora_match_chooses_modules) {
    te_ctx *te = test_context("cpu");
    te_causal_lm_desc d = {.vocab_size = 8, .hidden_size = 16, .intermediate_size = 16, .num_hidden_layers = 2, .num_attention_heads = 2};
    te_module *m = te_causal_lm_create(te, &d);
    CHECK_EQ_INT(match_count(m, "*[qv]_proj"), 4);
    CHECK_EQ_INT(match_count(m, "*.(q|v)_proj"), 4);
    CHECK_EQ_INT(match_count(m, "*layers.1.(self_attn|mlp).(q|k|up)_proj"), 3);
    CHECK_EQ_INT(match_count(m, "lm_head|*.(k)_proj"), 3);
    CHECK_EQ_INT(match_count(m, "*"), 15);          /* not the embedding */
    CHECK_EQ_INT(match_count(m, "embed_tokens"), 1); /* but by its name */
    CHECK_EQ_INT(match_count(m, "self_attn.q_proj"), 2);
    CHECK_OK(te);
    CHECK_EQ_INT(match_count(m, "[qv]_proj"), 0); /* from the beginning of a path */
    CHECK_ERROR(te, TE_ERR_INVALID, "is one of [qv]_proj");
    te_module_destroy(m);
}
