/* tests/quant/test_kinds.c: a kind of quantizer is one row in a file of its own: no other part of src/ names an enumerator of te_quant_kind, or a row. A kind of recipe is a row of quant/recipe.c; no other part names an enumerator of te_recipe_kind. */
#include "../te_test.h"

/* The text of a file of the repository, or NULL. */
static const char *part_text(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "src/%s", name);
    return (const char *)test_read_file(path, NULL);
}

static bool starts(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

/* Does this part have business with single kinds? Enumerators: their own files, and the message that lists them. Rows: those, the table, and the recipes. */
static bool may_name(const char *part, bool row) {
    return starts(part, "quant/kind_") || !strcmp(part, "quant/kinds.c") || (row && !strcmp(part, "quant/recipe.c"));
}

/* Kinds of recipes: their rows, and the table of Automodel's names. */
static bool may_name_recipe(const char *part) { return !strcmp(part, "quant/recipe.c") || !strcmp(part, "model/backend.c"); }

/* Every part that te_parts.h includes, but for the public half. */
static bool next_part(const char **at, char part[128]) {
    while ((*at = strstr(*at, "\n#include \"")) != NULL) {
        *at += strlen("\n#include \"");
        if (sscanf(*at, "%127[^\"]", part) == 1 && !starts(part, "api/")) return true;
    }
    return false;
}

TE_TEST(kinds_are_named_by_their_own_files_alone) {
    const char *parts = part_text("te_parts.h"), *at;
    char part[128], rows[32][64];
    int num_rows = 0, num_parts = 0, enumerators = 0, recipes = 0;
    if (!parts) SKIP("not run from the repository");
    for (at = parts; next_part(&at, part);) {
        const char *text = part_text(part), *key = "static const te__quant_class te__quant_";
        for (const char *p = text; p && (p = strstr(p, key)) != NULL; p += strlen(key)) {
            CHECK(num_rows < COUNT(rows) && starts(part, "quant/kind_"));
            if (num_rows < COUNT(rows) && sscanf(p + strlen("static const te__quant_class "), "%63[a-z0-9_]", rows[num_rows]) == 1) num_rows++;
        }
    }
    CHECK_EQ_INT(num_rows, TE_QUANT_CUSTOM); /* the last kind; NONE has no row */
    for (at = parts; next_part(&at, part);) {
        const char *text = part_text(part);
        test_case("%s", part);
        CHECK(text != NULL);
        if (!text) continue;
        num_parts++;
        for (const char *p = text; (p = strstr(p, "TE_QUANT_")) != NULL; p++) {
            char name[64] = "";
            sscanf(p, "%63[A-Z0-9_]", name);
            if (!strcmp(name, "TE_QUANT_NONE")) continue; /* the absence of a kind */
            test_case("%s: %s", part, name);
            CHECK(may_name(part, false));
            enumerators++;
        }
        for (const char *p = text; (p = strstr(p, "TE_RECIPE_")) != NULL; p++) {
            char name[64] = "";
            sscanf(p, "%63[A-Z0-9_]", name);
            if (!strcmp(name, "TE_RECIPE_NONE")) continue;
            test_case("%s: %s", part, name);
            CHECK(may_name_recipe(part));
            recipes++;
        }
        for (int i = 0; i < num_rows; i++)
            for (const char *p = text; (p = strstr(p, rows[i])) != NULL; p++) {
                char next = p[strlen(rows[i])];
                if (next == '_' || (next >= 'a' && next <= 'z')) continue; /* a longer name */
                test_case("%s: %s", part, rows[i]);
                CHECK(may_name(part, true));
            }
    }
    CHECK(num_parts > 100 && enumerators >= TE_QUANT_CUSTOM && recipes >= TE_RECIPE_KIND_COUNT - 1);
}

/* A field of a desc that other kinds alone read is refused by its name, and by the kind that it meets. */
TE_TEST(kinds_refuse_the_fields_of_others) {
    static const te_custom_quantizer own = {0};
    static const te_quantizer_desc inner = {.kind = TE_QUANT_CURRENT};
    static const struct {
        te_quantizer_desc d; /* one field, whose readers are: */
        unsigned readers;
        const char *name;
    } fields[] = {
#define OF(KIND) (1u << TE_QUANT_##KIND)
        {{.amax_epsilon = 1}, OF(CURRENT) | OF(BLOCK), "amax_epsilon"},
        {{.optimize_for_gemm = true}, OF(MXFP8) | OF(NVFP4), "optimize_for_gemm"},
        {{.quantization_2d = TE_ON}, OF(MXFP8) | OF(NVFP4), "quantization_2d"},
        {{.current.power_of_two_scales = true}, OF(CURRENT), "current.power_of_two_scales"},
        {{.block.block_scaling_dim = 1}, OF(BLOCK), "block.block_scaling_dim"},
        {{.block.fp32_scales = true}, OF(BLOCK), "block.fp32_scales"},
        {{.nvfp4.rht = TE_ON}, OF(NVFP4), "nvfp4.rht"},
        {{.nvfp4.no_random_sign_mask = true}, OF(NVFP4), "nvfp4.no_random_sign_mask"},
        {{.nvfp4.stochastic_rounding = TE_ON}, OF(NVFP4), "nvfp4.stochastic_rounding"},
        {{.nvfp4.row_scaled = true}, OF(NVFP4), "nvfp4.row_scaled"},
        {{.nvfp4.four_over_six = TE_4OVER6_MSE}, OF(NVFP4), "nvfp4.four_over_six"},
        {{.nvfp4.e4m3_max_256 = true}, OF(NVFP4), "nvfp4.e4m3_max_256"},
        {{.hybrid.rowwise_quantizer = &inner}, OF(HYBRID), "hybrid.rowwise_quantizer"},
        {{.hybrid.columnwise_quantizer = &inner}, OF(HYBRID), "hybrid.columnwise_quantizer"},
        {{.custom = &own}, OF(CUSTOM), "custom"},
#undef OF
    };
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(fields); i++)
        for (int kind = TE_QUANT_DELAYED; kind <= TE_QUANT_CUSTOM; kind++) {
            te_quantizer_desc d = fields[i].d;
            bool reads = fields[i].readers >> kind & 1;
            d.kind = (te_quant_kind)kind;
            test_case("%s, kind %d", fields[i].name, kind);
            if (reads && (kind == TE_QUANT_HYBRID || kind == TE_QUANT_CUSTOM)) continue; /* need more than the one field */
            te_quantizer *q = te_quantizer_create(te, &d);
            CHECK((q != NULL) == reads);
            if (!reads) {
                char text[64];
                snprintf(text, sizeof text, "%s is set", fields[i].name);
                CHECK_ERROR(te, TE_ERR_INVALID, text);
            }
            te_quantizer_destroy(q);
        }
}

/* The tensors among them. */
TE_TEST(kinds_refuse_the_tensors_of_others) {
    te_ctx *te = test_context("cpu");
    te_tensor *one = te_tensor_full(te, TE_F32, SHAPE(1), 1);
    te_quantizer_desc scale = {.kind = TE_QUANT_CURRENT, .delayed.scale = one}, amax = {.kind = TE_QUANT_BLOCK, .delayed.amax = one};
    CHECK(!te_quantizer_create(te, &scale));
    CHECK_ERROR(te, TE_ERR_INVALID, "delayed.scale is set, which a quantizer of the kind current does not read");
    CHECK(!te_quantizer_create(te, &amax));
    CHECK_ERROR(te, TE_ERR_INVALID, "delayed.amax is set, which a quantizer of the kind block does not read");
}
