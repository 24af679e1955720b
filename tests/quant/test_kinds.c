/* tests/quant/test_kinds.c: a kind of quantizer is one row in a file of its own: no other part of src/ names an enumerator of te_quant_kind, or a row. */
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
    int num_rows = 0, num_parts = 0, enumerators = 0;
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
        for (int i = 0; i < num_rows; i++)
            for (const char *p = text; (p = strstr(p, rows[i])) != NULL; p++) {
                char next = p[strlen(rows[i])];
                if (next == '_' || (next >= 'a' && next <= 'z')) continue; /* a longer name */
                test_case("%s: %s", part, rows[i]);
                CHECK(may_name(part, true));
            }
    }
    CHECK(num_parts > 100 && enumerators >= TE_QUANT_CUSTOM);
}

/* A field of a desc that another kind reads changes nothing: such quantizers fit each other's tensors. */
TE_TEST_DEVICES(kinds_ignore_the_fields_of_others) {
    static const te_quant_kind kinds[] = {TE_QUANT_DELAYED, TE_QUANT_CURRENT, TE_QUANT_BLOCK};
    for (int i = 0; i < COUNT(kinds); i++) {
        te_quantizer_desc plain = {.kind = kinds[i]}, other = plain;
        other.with_2d_quantization = other.no_random_sign_mask = other.e4m3_max_256 = other.with_rht = other.row_scaled = other.optimize_for_gemm = true;
        other.four_over_six = TE_4OVER6_MSE;
        te_quantizer *p = te_quantizer_create(te, &plain), *q = te_quantizer_create(te, &other);
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(130, 40), test_normal(130 * 40, 1)), *y = te_quantize(p, x), *z = te_quantize(q, x);
        test_case("kind %d", (int)kinds[i]);
        REQUIRE_OK(te);
        CHECK_BYTES("value", test_read(te_dequantize(y, TE_F32)), test_read(te_dequantize(z, TE_F32)), 130 * 40 * sizeof(float));
        CHECK_EQ_INT(te_quantize_into(q, x, y, NULL), TE_OK);
        te_quantizer_destroy(p);
        te_quantizer_destroy(q);
    }
}
