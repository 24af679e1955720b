/* Formats of whole models: casts and what stays in f32, f32 for a while, frozen parts, logits. U and A number the cases of Automodel's contract. */
#include "../faults/purse.h"

static te_result pass_on(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = args->input;
    return TE_OK;
}
static const te_module_class node_class = {"Node", 0, pass_on, NULL, NULL};
static void close_module(void *m) { te_module_destroy((te_module *)m); }

static te_module *ends(te_module *m) {
    test_on_end(close_module, m);
    return m;
}
static te_module *root_of(te_ctx *te) { return ends(te_module_create(te, &node_class, "model")); }
static te_module *child_of(te_module *m, const char *name) { return te_module_add_child(m, name, te_module_create(te_module_ctx(m), &node_class, name)); }
static const float four[4] = {1.001f, -2.003f, 0.3333f, 17.125f}; /* no bf16 number among the first three */
static te_tensor *parameter_in(te_module *m, const char *name, te_dtype dtype) { return te_module_add_parameter(m, name, test_tensor(te_module_ctx(m), dtype, SHAPE(2, 2), four)); }
static te_tensor *buffer_in(te_module *m, const char *name, te_dtype dtype) { return te_module_add_buffer(m, name, test_tensor(te_module_ctx(m), dtype, SHAPE(4), four)); }
/* linear.weight, norm.weight, head.weight */
static te_module *small_model(te_ctx *te, te_dtype dtype) {
    static const char *const names[] = {"linear", "norm", "head"};
    te_module *m = root_of(te);
    for (int i = 0; i < 3; i++) parameter_in(child_of(m, names[i]), "weight", dtype);
    return m;
}
static te_tensor *at(te_module *m, const char *path) {
    const char *dot = strrchr(path, '.');
    char owner[128];
    snprintf(owner, sizeof owner, "%.*s", dot ? (int)(dot - path) : 0, path);
    return te_module_parameter(te_module_find(m, owner), dot ? dot + 1 : path);
}
static te_dtype dtype_at(te_module *m, const char *path) { return te_tensor_dtype(at(m, path)); }
static bool holds(te_tensor *x, te_dtype dtype) { /* `four`, with every bit */
    return te_tensor_dtype(x) == dtype && memcmp(test_read(x), test_rounded(dtype, four, 4), sizeof four) == 0;
}
static te_result cast_to(te_module *m, te_dtype dtype) { return te_cast_model_to_dtype(m, &(te_cast_model_desc){.dtype = dtype}); }
#define WORDS(...) (const char *[]){__VA_ARGS__}, COUNT(((const char *[]){__VA_ARGS__}))
static void keep(te_module *m, bool strict, const char *word) { CHECK(te_module_set_keep_in_fp32(m, &word, 1, strict) == TE_OK); }

/* ---- words ---- */

TE_TEST_DEVICES(formats_words) { /* U: the two attributes, in order, each word once */
    te_module *m = root_of(te), *below = child_of(m, "below");
    const char *got[8];
    CHECK(te_module_get_fp32_keywords(m, got, 8) == 0 && te_module_get_strict_fp32_keywords(m, NULL, 0) == 0);
    CHECK(te_module_set_keep_in_fp32(m, WORDS("norm", "head", "norm", "gate"), false) == TE_OK);
    CHECK(te_module_set_keep_in_fp32(m, WORDS("router", "head", "router"), true) == TE_OK);
    CHECK_EQ_INT(te_module_get_strict_fp32_keywords(m, got, 8), 2);
    CHECK(strcmp(got[0], "router") == 0 && strcmp(got[1], "head") == 0);
    CHECK_EQ_INT(te_module_get_fp32_keywords(m, got, 8), 4);
    CHECK(strcmp(got[0], "router") == 0 && strcmp(got[1], "head") == 0 && strcmp(got[2], "norm") == 0 && strcmp(got[3], "gate") == 0);
    got[1] = "mine";
    CHECK(te_module_get_fp32_keywords(m, got, 1) == 4 && strcmp(got[1], "mine") == 0);
    keep(below, true, "deep"); /* of the module that is asked alone */
    CHECK(te_module_get_fp32_keywords(m, NULL, 0) == 4 && te_module_get_fp32_keywords(below, got, 8) == 1);
    te_module_set_keep_in_fp32(m, NULL, 0, true);
    CHECK(te_module_get_strict_fp32_keywords(m, got, 8) == 0 && te_module_get_fp32_keywords(m, got, 8) == 3);
    te_module_set_attribute(m, "_keep_in_fp32_modules", (void *)"norm", NULL); /* somebody else's value: no list of words */
    CHECK(te_module_get_fp32_keywords(m, got, 8) == 0);
    te_module_set_keep_in_fp32(m, (const char *[]){"a", NULL}, 2, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "2 words for model, and one of them is NULL");
    te_module_set_keep_in_fp32(m, NULL, 1, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "the list is NULL");
    CHECK(te_module_set_keep_in_fp32(NULL, NULL, 0, false) == TE_ERR_STATE && te_module_get_fp32_keywords(NULL, got, 8) == 0);
}
TE_TEST_DEVICES(formats_sharded_parameters) { /* U: one is enough; buffers do not count */
    te_module *m = small_model(te, TE_F32);
    te_tensor_set_sharded(buffer_in(m, "buffer", TE_F32), true);
    CHECK(!te_has_dtensor_params(m) && !te_has_dtensor_params(NULL));
    te_tensor_set_sharded(at(m, "head.weight"), true);
    CHECK(te_has_dtensor_params(m) && !te_has_dtensor_params(te_module_find(m, "norm")));
}

/* ---- casts ---- */

TE_TEST_DEVICES(formats_cast_all) { /* U: bf16 by default, f16; f32 and back; integers stay; a second cast does nothing */
    te_module *m = small_model(te, TE_F32), *norm = te_module_find(m, "norm");
    te_tensor *ids = te_module_add_buffer(m, "ids", test_i32(te, SHAPE(2), (int64_t[]){3, 70000})), *buffer = buffer_in(norm, "inv_freq", TE_F32), *weight = at(m, "linear.weight");
    te_module_set_buffer_persistent(norm, "inv_freq", false);
    te_tensor_set_sharded(buffer, true);
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_OK);
    CHECK(holds(weight, TE_BF16) && holds(at(m, "norm.weight"), TE_BF16) && holds(at(m, "head.weight"), TE_BF16) && holds(buffer, TE_BF16));
    CHECK(at(m, "linear.weight") == weight && at(m, "norm.inv_freq") == buffer && te_tensor_requires_grad(weight) && te_tensor_is_sharded(buffer));
    CHECK(te_tensor_dtype(ids) == TE_I32 && te_tensor_item(te_tensor_narrow(ids, 0, 1, 1)) == 70000);
    const void *memory = te_tensor_data(weight);
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_OK && te_tensor_data(weight) == memory);
    CHECK(cast_to(m, TE_F32) == TE_OK && te_tensor_dtype(weight) == TE_F32);
    CHECK_BYTES("widened", test_read(weight), test_rounded(TE_BF16, four, 4), sizeof four);
    te_module *half = small_model(te, TE_F32);
    CHECK(cast_to(half, TE_F16) == TE_OK && holds(at(half, "head.weight"), TE_F16) && holds(at(half, "norm.weight"), TE_F16));
    CHECK_OK(te);
    cast_to(m, TE_F8E4M3);
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_cast_model_to_dtype: dtype is e4m3; f32, f16 and bf16 are possible");
    cast_to(m, TE_I32);
    CHECK_ERROR(te, TE_ERR_DTYPE, "dtype is i32");
    te_cast_model_to_dtype(m, &(te_cast_model_desc){.num_skip_modules = 1});
    CHECK_ERROR(te, TE_ERR_INVALID, "1 words for model, and the list is NULL");
    CHECK(te_tensor_dtype(weight) == TE_F32 && te_cast_model_to_dtype(NULL, NULL) == TE_ERR_STATE);
}
TE_TEST_DEVICES(formats_keep) { /* U: words, strict and not, for parameters and buffers */
    te_module *m = small_model(te, TE_F32);
    keep(m, false, "norm");
    keep(te_module_find(m, "linear"), true, "weight"); /* words of another module than the one that is cast */
    CHECK(cast_to(m, TE_BF16) == TE_OK && dtype_at(m, "norm.weight") == TE_F32 && dtype_at(m, "linear.weight") == TE_BF16 && dtype_at(m, "head.weight") == TE_BF16);
    m = small_model(te, TE_F32);
    keep(m, true, "head");
    keep(m, false, "norm");
    CHECK(cast_to(m, TE_F16) == TE_OK && dtype_at(m, "head.weight") == TE_F32 && dtype_at(m, "norm.weight") == TE_F32 && dtype_at(m, "linear.weight") == TE_F16);

    m = root_of(te); /* values: every bit, where a round trip would lose some */
    parameter_in(child_of(m, "mixer"), "scale", TE_F32);
    buffer_in(te_module_find(m, "mixer"), "e_score_correction_bias", TE_F32);
    parameter_in(te_module_find(m, "mixer"), "layernorm", TE_BF16);
    parameter_in(te_module_find(m, "mixer"), "weight", TE_F32);
    te_module_set_keep_in_fp32(m, WORDS("mixer.scale", "score", "norm"), true);
    CHECK(cast_to(m, TE_BF16) == TE_OK && holds(at(m, "mixer.scale"), TE_F32) && holds(at(m, "mixer.e_score_correction_bias"), TE_F32) && holds(at(m, "mixer.weight"), TE_BF16));
    CHECK(memcmp(four, test_rounded(TE_BF16, four, 4), sizeof four) != 0);
    CHECK(dtype_at(m, "mixer.layernorm") == TE_F32); /* "norm" is part of it; its values were bf16 */
    CHECK_BYTES("layernorm", test_read(at(m, "mixer.layernorm")), test_rounded(TE_BF16, four, 4), sizeof four);

    static const char *const rope[] = {"rotary_emb", "inv_freq", "freqs_cis"};
    for (int with = 0; with < 2; with++) { /* tables of rotary embeddings */
        m = root_of(te);
        te_module *attention = child_of(m, "attention");
        buffer_in(child_of(attention, "rotary_emb"), "cos", TE_F32), buffer_in(attention, "inv_freq", TE_F32), buffer_in(m, "freqs_cis", TE_F32);
        if (with) te_module_set_keep_in_fp32(m, rope, 3, false);
        CHECK(cast_to(m, TE_BF16) == TE_OK);
        const te_dtype want = with ? TE_F32 : TE_BF16;
        CHECK(holds(at(m, "attention.rotary_emb.cos"), want) && holds(at(m, "attention.inv_freq"), want) && holds(at(m, "freqs_cis"), want));
    }
    CHECK_OK(te);
}
static int times_logged(const char *words) {
    int n = 0;
    for (const char *p = test_log_text(); (p = strstr(p, words)) != NULL; p++) n++;
    return n;
}
TE_TEST_DEVICES(formats_keep_in_sharded_models) { /* U: words that are not strict keep buffers alone, with one warning */
    te_module *m = small_model(te, TE_F32);
    te_tensor *bias = buffer_in(te_module_find(m, "norm"), "e_score_bias", TE_F32);
    te_tensor_set_sharded(at(m, "linear.weight"), true);
    keep(m, true, "head");
    CHECK(cast_to(m, TE_BF16) == TE_OK && times_logged("sharded parameters") == 0);
    CHECK(dtype_at(m, "head.weight") == TE_F32 && dtype_at(m, "norm.weight") == TE_BF16 && te_tensor_dtype(bias) == TE_BF16);
    m = small_model(te, TE_F32);
    bias = buffer_in(te_module_find(m, "norm"), "e_score_bias", TE_F32);
    te_tensor_set_sharded(at(m, "linear.weight"), true);
    te_module_set_keep_in_fp32(m, WORDS("norm", "linear"), false);
    CHECK(cast_to(m, TE_BF16) == TE_OK);
    CHECK_EQ_INT(times_logged("model has sharded parameters, which ranks cast alike: \"norm\" and other words"), 1);
    CHECK(holds(bias, TE_F32) && holds(at(m, "norm.weight"), TE_BF16) && holds(at(m, "linear.weight"), TE_BF16) && te_tensor_is_sharded(at(m, "linear.weight")));
}
TE_TEST_DEVICES(formats_skip) { /* U: children of a name, at the root and below, still there; own: a word keeps what is skipped, too */
    static const char *const names[] = {"_fp32_params"};
    const te_cast_model_desc desc = {.dtype = TE_BF16, .skip_modules = names, .num_skip_modules = 1};
    te_module *m = small_model(te, TE_F32), *skipped = child_of(m, "_fp32_params"), *nested = child_of(child_of(te_module_find(m, "linear"), "_fp32_params"), "deeper");
    parameter_in(skipped, "a", TE_F32), parameter_in(nested, "b", TE_F32), buffer_in(nested, "c", TE_F32), parameter_in(nested, "d_norm", TE_F16);
    keep(m, false, "norm");
    CHECK(te_cast_model_to_dtype(m, &desc) == TE_OK);
    CHECK(te_module_find(m, "_fp32_params") == skipped && te_module_find(m, "linear._fp32_params.deeper") == nested);
    CHECK(dtype_at(m, "_fp32_params.a") == TE_F32 && te_tensor_dtype(te_module_parameter(nested, "b")) == TE_F32 && te_tensor_dtype(te_module_parameter(nested, "c")) == TE_F32);
    CHECK(te_tensor_dtype(te_module_parameter(nested, "d_norm")) == TE_F32 && dtype_at(m, "linear.weight") == TE_BF16 && dtype_at(m, "head.weight") == TE_BF16);
    CHECK(cast_to(m, TE_BF16) == TE_OK && dtype_at(m, "_fp32_params.a") == TE_BF16 && te_tensor_dtype(te_module_parameter(nested, "b")) == TE_BF16);
    te_module *own_name = root_of(te); /* the root itself is no child */
    parameter_in(own_name, "a", TE_F32);
    CHECK(te_cast_model_to_dtype(own_name, &(te_cast_model_desc){.skip_modules = (const char *[]){"model"}, .num_skip_modules = 1}) == TE_OK && dtype_at(own_name, "a") == TE_BF16);
}
TE_TEST_DEVICES(formats_round_trip_with_aliases) { /* A3 */
    te_module *m = root_of(te), *a = child_of(m, "a"), *b = child_of(m, "b"), *c = child_of(child_of(a, "inner"), "norm");
    te_tensor *shared = parameter_in(a, "tied", TE_BF16), *table = buffer_in(a, "table", TE_BF16), *norm = parameter_in(c, "weight", TE_BF16), *plain = parameter_in(b, "weight", TE_BF16);
    te_module_add_parameter(b, "norm_tied", shared); /* a parameter goes by its first path: a.tied */
    te_module_add_buffer(b, "norm_table", table);    /* a buffer is kept under any */
    keep(m, false, "norm");
    CHECK(cast_to(m, TE_F32) == TE_OK);
    CHECK(at(m, "a.tied") == shared && at(m, "b.norm_tied") == shared && at(m, "a.table") == table && at(m, "b.norm_table") == table && at(m, "a.inner.norm.weight") == norm);
    CHECK(te_tensor_dtype(shared) == TE_F32 && te_tensor_dtype(table) == TE_F32 && te_tensor_dtype(norm) == TE_F32 && te_tensor_dtype(plain) == TE_F32);
    CHECK(cast_to(m, TE_BF16) == TE_OK);
    CHECK(holds(shared, TE_BF16) && holds(plain, TE_BF16) && te_tensor_dtype(table) == TE_F32 && te_tensor_dtype(norm) == TE_F32);
    CHECK_BYTES("norm", test_read(norm), test_rounded(TE_BF16, four, 4), sizeof four);
    CHECK_BYTES("table", test_read(table), test_rounded(TE_BF16, four, 4), sizeof four);
    CHECK(at(m, "b.norm_tied") == shared && at(m, "b.norm_table") == table && te_module_num_children(m) == 2);
    CHECK_OK(te);
}
/* Views of one block: neighbours stay neighbours, overlaps stay one value, strides stay. */
TE_TEST_DEVICES(formats_keep_memory_together) {
    te_module *m = root_of(te);
    te_tensor *whole = test_tensor(te, TE_F32, SHAPE(7, 4), test_normal(28, 3));
    te_tensor *first = te_module_add_parameter(m, "first", te_tensor_detach(te_tensor_narrow(whole, 0, 0, 2))), *second = te_module_add_parameter(m, "second", te_tensor_detach(te_tensor_narrow(whole, 0, 2, 3)));
    te_tensor *over = te_module_add_buffer(m, "over", te_tensor_detach(te_tensor_narrow(whole, 0, 1, 2))), *turned = te_module_add_buffer(m, "turned", te_tensor_detach(te_tensor_transpose(first, 0, 1)));
    te_tensor *far_off = te_module_add_buffer(m, "last", te_tensor_detach(te_tensor_narrow(whole, 0, 6, 1)));
    CHECK(cast_to(m, TE_BF16) == TE_OK);
    CHECK((const char *)te_tensor_data(second) == (const char *)te_tensor_data(first) + 2 * 4 * 2 && te_tensor_data(far_off) != (void *)((char *)te_tensor_data(first) + 6 * 4 * 2));
    CHECK((const char *)te_tensor_data(over) == (const char *)te_tensor_data(first) + 4 * 2 && te_tensor_data(turned) == te_tensor_data(first));
    CHECK_TENSOR(second, test_rounded(TE_BF16, test_normal(28, 3), 28) + 8, 0, 0);
    CHECK_TENSOR(far_off, test_rounded(TE_BF16, test_normal(28, 3), 28) + 24, 0, 0);
    CHECK(test_read(turned)[1] == test_read(first)[4] && te_tensor_dtype(whole) == TE_F32);
    te_tensor_fill(first, 9);
    CHECK(test_read(over)[0] == 9 && test_read(over)[4] != 9 && test_read(turned)[7] == 9);
    CHECK_OK(te);
}

/* ---- snapshots ---- */

TE_TEST_DEVICES(formats_snapshots) {
    te_module *m = small_model(te, TE_F32);
    te_tensor *norm = at(m, "norm.weight"), *table = buffer_in(te_module_find(m, "norm"), "table", TE_F32);
    te_module_add_parameter(te_module_find(m, "head"), "norm_again", norm);
    te_module_add_buffer(te_module_find(m, "head"), "table_again", table);
    te_module_add_buffer(te_module_find(m, "norm"), "table_ids", test_i32(te, SHAPE(1), (int64_t[]){1}));
    te_fp32_snapshots *s = te_snapshot_fp32_tensors(m, WORDS("norm"), WORDS("table"));
    const char *path;
    te_entry_kind kind;
    CHECK_EQ_INT(te_fp32_snapshots_count(s), 3); /* a parameter once, a buffer under each path, no integers */
    CHECK(te_fp32_snapshots_at(s, 0, &path, &kind) && strcmp(path, "norm.weight") == 0 && kind == TE_ENTRY_PARAMETER);
    CHECK(te_fp32_snapshots_at(s, 1, &path, &kind) && strcmp(path, "norm.table") == 0 && kind == TE_ENTRY_BUFFER);
    CHECK(holds(te_fp32_snapshots_at(s, 2, &path, NULL), TE_F32) && strcmp(path, "head.table_again") == 0);
    CHECK(!te_fp32_snapshots_at(s, 3, &path, &kind) && te_fp32_snapshots_count(NULL) == 0);
    CHECK(cast_to(m, TE_BF16) == TE_OK && holds(norm, TE_BF16));
    CHECK(te_restore_fp32_tensor_snapshots(m, s, NULL) == TE_OK && holds(norm, TE_F32) && holds(table, TE_BF16) && at(m, "norm.weight") == norm);
    CHECK(te_restore_fp32_tensor_snapshots(m, NULL, s) == TE_OK && holds(table, TE_F32) && holds(at(m, "linear.weight"), TE_BF16));
    te_tensor_fill(norm, 5);
    CHECK(te_restore_fp32_tensor_snapshots(m, s, s) == TE_OK && holds(norm, TE_F32)); /* in f32 already: the values alone */
    CHECK(te_restore_fp32_tensor_snapshots(te_module_find(m, "linear"), s, s) == TE_OK); /* unknown paths are passed over */
    CHECK(te_module_num_parameters(te_module_find(m, "linear")) == 4);
    CHECK_OK(te);
    te_module_add_buffer(te_module_find(m, "norm"), "table", te_tensor_full(te, TE_BF16, SHAPE(2), 1));
    te_restore_fp32_tensor_snapshots(m, s, s);
    CHECK_ERROR(te, TE_ERR_SHAPE, "\"norm.table\" is [2] in the model and was [4]");
    te_fp32_snapshots_destroy(s);
    te_fp32_snapshots_destroy(NULL);
    CHECK(!te_snapshot_fp32_tensors(NULL, NULL, 0, NULL, 0) && te_restore_fp32_tensor_snapshots(NULL, NULL, NULL) == TE_ERR_STATE);
    s = te_snapshot_fp32_tensors(m, NULL, 0, NULL, 0);
    CHECK(te_fp32_snapshots_count(s) == 0 && te_restore_fp32_tensor_snapshots(m, s, s) == TE_OK);
    te_fp32_snapshots_destroy(s);
}
TE_TEST_DEVICES(formats_snapshots_and_wrappers) { /* U: a buffer of a wrapped leaf comes back on the leaf, by both names; the wrapper gets none */
    te_module *wrapped = root_of(te), *leaf = child_of(child_of(child_of(wrapped, "layer"), "_checkpoint_wrapped_module"), "router");
    buffer_in(leaf, "bias", TE_F32);
    te_module *bare = root_of(te), *bare_leaf = child_of(child_of(bare, "layer"), "router");
    te_tensor *bias = buffer_in(bare_leaf, "bias", TE_F32), *own = te_module_parameter(leaf, "bias");
    te_fp32_snapshots *s = te_snapshot_fp32_tensors(wrapped, NULL, 0, WORDS("bias"));
    CHECK(cast_to(wrapped, TE_BF16) == TE_OK && cast_to(bare, TE_BF16) == TE_OK);
    CHECK(te_restore_fp32_tensor_snapshots(wrapped, NULL, s) == TE_OK && holds(own, TE_F32) && te_module_parameter(leaf, "bias") == own);
    CHECK(te_restore_fp32_tensor_snapshots(bare, NULL, s) == TE_OK && holds(bias, TE_F32));
    CHECK(!te_module_parameter(te_module_find(wrapped, "layer"), "bias") && !te_module_parameter(te_module_find(wrapped, "layer._checkpoint_wrapped_module"), "bias"));
    te_fp32_snapshots_destroy(s);
    te_module *other = root_of(te); /* a parameter of that name is no buffer */
    te_tensor *p = parameter_in(child_of(child_of(other, "layer"), "router"), "bias", TE_BF16);
    s = te_snapshot_fp32_tensors(wrapped, NULL, 0, WORDS("bias"));
    CHECK(te_restore_fp32_tensor_snapshots(other, NULL, s) == TE_OK && te_tensor_dtype(p) == TE_BF16);
    te_fp32_snapshots_destroy(s);
    CHECK_OK(te);
}
TE_TEST_DEVICES(formats_restore_words) { /* U */
    te_module *m = small_model(te, TE_BF16);
    te_tensor *buffer = buffer_in(te_module_find(m, "norm"), "bias", TE_BF16), *other = buffer_in(te_module_find(m, "head"), "bias", TE_BF16);
    te_tensor *ids = te_module_add_buffer(te_module_find(m, "norm"), "ids", test_i32(te, SHAPE(1), (int64_t[]){1}));
    CHECK(te_restore_fp32_modules(m, NULL, 0) == TE_OK && te_restore_fp32_buffers(m, NULL, 0) == TE_OK && dtype_at(m, "norm.weight") == TE_BF16 && te_tensor_dtype(buffer) == TE_BF16);
    CHECK(te_restore_fp32_buffers(m, WORDS("norm")) == TE_OK);
    CHECK(te_tensor_dtype(buffer) == TE_F32 && dtype_at(m, "norm.weight") == TE_BF16 && te_tensor_dtype(other) == TE_BF16 && te_tensor_dtype(ids) == TE_I32);
    CHECK(te_restore_fp32_modules(m, WORDS("norm")) == TE_OK);
    CHECK(dtype_at(m, "norm.weight") == TE_F32 && dtype_at(m, "linear.weight") == TE_BF16 && dtype_at(m, "head.weight") == TE_BF16 && te_tensor_dtype(other) == TE_BF16 && te_tensor_dtype(ids) == TE_I32);
    CHECK_BYTES("values", test_read(at(m, "norm.weight")), test_rounded(TE_BF16, four, 4), sizeof four);
    CHECK_OK(te);
    CHECK(te_restore_fp32_modules(NULL, NULL, 0) == TE_ERR_STATE && te_restore_fp32_buffers(NULL, NULL, 0) == TE_ERR_STATE);
}

/* ---- f32 for a while ---- */

TE_TEST_DEVICES(formats_scope) { /* own: in f32 inside, back after it, with what words keep, and what an error does (A12) */
    te_module *m = small_model(te, TE_BF16);
    te_tensor *linear = at(m, "linear.weight"), *norm = at(m, "norm.weight");
    te_fp32_scope *scope = te_fp32_scope_open(m, NULL);
    CHECK(scope && te_tensor_dtype(linear) == TE_F32 && te_tensor_dtype(norm) == TE_F32);
    CHECK(te_fp32_scope_close(scope) == TE_OK && holds(linear, TE_BF16) && at(m, "linear.weight") == linear);

    keep(m, false, "norm"); /* exactly what was sampled inside */
    scope = te_fp32_scope_open(m, NULL);
    te_tensor_fill(norm, 0.1f), te_tensor_fill(linear, 0.1f);
    te_module_add_parameter(te_module_find(m, "head"), "late", te_tensor_full(te, TE_F32, SHAPE(1), 0.1f));
    CHECK(te_fp32_scope_close(scope) == TE_OK && te_tensor_dtype(norm) == TE_F32 && test_read(norm)[3] == 0.1f && test_read(linear)[0] == test_rounded(TE_BF16, (float[]){0.1f}, 1)[0]);
    CHECK(dtype_at(m, "head.late") == TE_BF16);

    scope = te_fp32_scope_open(m, NULL); /* the body fails: its error stays, the model is back */
    te_tensor_view(linear, SHAPE(3));
    CHECK(te_error_code(te) != TE_OK && te_tensor_dtype(linear) == TE_F32);
    CHECK(te_fp32_scope_close(scope) == TE_OK && te_tensor_dtype(linear) == TE_BF16);
    CHECK_ERROR(te, TE_ERR_SHAPE, "te_tensor_view");

    scope = te_fp32_scope_open(m, &(te_fp32_scope_desc){.restore_dtype = TE_F16});
    CHECK(te_fp32_scope_close(scope) == TE_OK && te_tensor_dtype(linear) == TE_F16 && te_tensor_dtype(norm) == TE_F32);
    CHECK(!te_fp32_scope_open(m, &(te_fp32_scope_desc){.restore_dtype = TE_U8}));
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_fp32_scope_open: restore_dtype is u8");
    CHECK(!te_fp32_scope_open(NULL, NULL) && te_fp32_scope_close(NULL) == TE_OK);

    for (int first = 0; first < 2; first++) { /* the first parameter is one that is kept: upstream's default makes the model f32 */
        m = root_of(te);
        parameter_in(child_of(m, "norm"), "weight", TE_F32);
        te_tensor *x = parameter_in(child_of(m, "linear"), "weight", TE_BF16), *y = parameter_in(te_module_find(m, "linear"), "gate", TE_F16);
        keep(m, true, "norm");
        scope = te_fp32_scope_open(m, &(te_fp32_scope_desc){.restore_first_parameter = first});
        CHECK(te_fp32_scope_close(scope) == TE_OK && te_tensor_dtype(x) == (first ? TE_F32 : TE_BF16) && te_tensor_dtype(y) == (first ? TE_F32 : TE_F16));
    }
    te_module *empty = root_of(te);
    CHECK(te_fp32_scope_close(te_fp32_scope_open(empty, &(te_fp32_scope_desc){.restore_first_parameter = true})) == TE_OK);

    m = small_model(te, TE_BF16); /* sharded: strict ones stay, others are rounded, with a warning */
    te_tensor_set_sharded(at(m, "linear.weight"), true);
    keep(m, true, "head"), keep(m, false, "norm");
    scope = te_fp32_scope_open(m, NULL);
    te_tensor_fill(at(m, "head.weight"), 0.1f), te_tensor_fill(at(m, "norm.weight"), 0.1f);
    CHECK(te_fp32_scope_close(scope) == TE_OK && dtype_at(m, "head.weight") == TE_F32 && test_read(at(m, "head.weight"))[0] == 0.1f && dtype_at(m, "norm.weight") == TE_BF16);
    CHECK_EQ_INT(times_logged("te_fp32_scope_close: model has sharded parameters"), 1);
    CHECK_OK(te);
}
TE_TEST_DEVICES(formats_scope_rounds_once) { /* own: N(0, 0.02) drawn inside is the f32 draw, rounded */
    te_linear_desc d = {.in_features = 32, .out_features = 24, .gemm.no_bias = true, .gemm.init.std = 0.02f, .gemm.params_dtype = TE_F32};
    te_seed(te, 11);
    te_module *wide = ends(te_linear_create(te, &d));
    d.gemm.params_dtype = TE_BF16;
    te_module *m = ends(te_linear_create(te, &d));
    te_fp32_scope *scope = te_fp32_scope_open(m, NULL);
    te_seed(te, 11);
    CHECK(te_module_reset_parameters(m) == TE_OK && te_fp32_scope_close(scope) == TE_OK && dtype_at(m, "weight") == TE_BF16);
    CHECK_BYTES("weight", test_read(at(m, "weight")), test_rounded(TE_BF16, test_read(at(wide, "weight")), 32 * 24), 32 * 24 * sizeof(float));
    CHECK_OK(te);
}

/* ---- frozen parts ---- */

static te_result cast_frozen(te_module *m, bool any) { return te_cast_frozen_modules_to_compute_dtype(m, &(te_cast_frozen_desc){.compute_dtype = TE_BF16, .any_frozen_base = any}); }
static te_tensor *frozen_in(te_module *m, const char *name, te_dtype dtype) { return te_tensor_set_requires_grad(parameter_in(m, name, dtype), false); }
/* A frozen tower (proj, norm, a buffer, a child with a buffer alone) beside a language model that is trained. */
static te_module *tower_model(te_ctx *te) {
    te_module *m = root_of(te), *vision = child_of(m, "vision"), *language = child_of(m, "language");
    frozen_in(child_of(vision, "proj"), "weight", TE_F32), frozen_in(child_of(vision, "norm"), "weight", TE_F32), buffer_in(vision, "pos", TE_F32), buffer_in(child_of(vision, "rope"), "freqs", TE_F32);
    parameter_in(language, "weight", TE_F32), buffer_in(language, "table", TE_F32);
    te_module_add_buffer(vision, "ids", test_i32(te, SHAPE(1), (int64_t[]){7}));
    return m;
}
TE_TEST_DEVICES(formats_frozen) { /* U, and own: buffers of children without parameters, integers, sharded parameters */
    te_module *m = tower_model(te);
    te_tensor *proj = at(m, "vision.proj.weight");
    CHECK(te_cast_frozen_modules_to_compute_dtype(m, NULL) == TE_OK && te_cast_frozen_modules_to_compute_dtype(m, &(te_cast_frozen_desc){.any_frozen_base = true}) == TE_OK);
    CHECK(te_tensor_dtype(proj) == TE_F32);
    CHECK(cast_frozen(m, false) == TE_OK && at(m, "vision.proj.weight") == proj && !te_tensor_requires_grad(proj));
    CHECK(holds(proj, TE_BF16) && holds(at(m, "vision.norm.weight"), TE_BF16) && holds(at(m, "vision.pos"), TE_BF16) && holds(at(m, "vision.rope.freqs"), TE_BF16));
    CHECK(holds(at(m, "language.weight"), TE_F32) && holds(at(m, "language.table"), TE_F32) && dtype_at(m, "vision.ids") == TE_I32);
    const void *memory = te_tensor_data(proj);
    CHECK(cast_frozen(m, false) == TE_OK && te_tensor_data(proj) == memory);

    m = tower_model(te);
    keep(m, false, "norm");
    te_tensor_set_sharded(at(m, "vision.proj.weight"), true); /* words count all the same */
    CHECK(cast_frozen(m, false) == TE_OK && dtype_at(m, "vision.norm.weight") == TE_F32 && dtype_at(m, "vision.proj.weight") == TE_F32 && dtype_at(m, "vision.pos") == TE_BF16);
    m = tower_model(te);
    te_tensor_set_sharded(at(m, "vision.proj.weight"), true);
    CHECK(cast_frozen(m, false) == TE_OK && dtype_at(m, "vision.proj.weight") == TE_F32 && dtype_at(m, "vision.norm.weight") == TE_BF16 && dtype_at(m, "vision.pos") == TE_BF16);
    m = small_model(te, TE_F32); /* nothing frozen */
    CHECK(cast_frozen(m, false) == TE_OK && dtype_at(m, "linear.weight") == TE_F32);

    m = root_of(te); /* a frozen linear layer with a trainable adapter is one whole, at the root as well */
    frozen_in(m, "weight", TE_F32), te_module_add_parameter(m, "bias", test_tensor(te, TE_F32, SHAPE(4), four)), parameter_in(child_of(m, "lora_a"), "weight", TE_F32), buffer_in(te_module_find(m, "lora_a"), "mask", TE_F32);
    te_tensor_set_requires_grad(at(m, "bias"), false);
    CHECK(cast_frozen(m, false) == TE_OK && dtype_at(m, "weight") == TE_BF16 && dtype_at(m, "bias") == TE_BF16 && dtype_at(m, "lora_a.weight") == TE_BF16 && dtype_at(m, "lora_a.mask") == TE_BF16);
    CHECK(te_tensor_requires_grad(at(m, "lora_a.weight")));

    for (int any = 0; any < 2; any++) { /* a frozen scalar of the root: upstream casts what is trained */
        m = small_model(te, TE_F32);
        te_tensor *scalar = te_tensor_set_requires_grad(te_module_add_parameter(m, "scale", te_tensor_full(te, TE_F32, SHAPE(1), 2)), false);
        buffer_in(m, "table", TE_F32);
        CHECK(cast_frozen(m, any) == TE_OK && te_tensor_dtype(scalar) == TE_BF16);
        CHECK(dtype_at(m, "linear.weight") == (any ? TE_BF16 : TE_F32) && dtype_at(m, "table") == (any ? TE_BF16 : TE_F32));
    }
    CHECK_OK(te);
    te_cast_frozen_modules_to_compute_dtype(m, &(te_cast_frozen_desc){.compute_dtype = TE_I64});
    CHECK_ERROR(te, TE_ERR_DTYPE, "compute_dtype is i64");
    CHECK(te_cast_frozen_modules_to_compute_dtype(NULL, NULL) == TE_ERR_STATE);
}

/* ---- logits ---- */

enum { H = 8, V = 16 };
/* Quarters from -2 to 2: products of them are exact in every format that a kernel multiplies in, and sums of 8 in any order. */
static const float *quarters(int64_t n, uint64_t seed) {
    const int64_t *v = test_integers(n, seed, -8, 9);
    float *x = test_floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = 0.25f * (float)v[i];
    return x;
}
static te_module *head_of(te_ctx *te, te_dtype dtype) {
    te_module *m = ends(te_linear_create(te, &(te_linear_desc){.in_features = H, .out_features = V, .gemm.no_bias = true, .gemm.params_dtype = dtype}));
    te_tensor_copy(te_module_parameter(m, "weight"), test_tensor(te, dtype, SHAPE(V, H), quarters(V * H, 2)));
    return m;
}
static te_tensor *hidden_of(te_ctx *te, te_dtype dtype, int64_t b, int64_t s) {
    return b ? test_tensor(te, dtype, SHAPE(b, s, H), quarters(b * s * H, 1)) : test_tensor(te, dtype, SHAPE(s, H), quarters(s * H, 1));
}
static bool sized(const te_tensor *x, int ndim, const int64_t *shape) { return x && te_tensor_ndim(x) == ndim && memcmp(te_tensor_shape(x), shape, (size_t)ndim * sizeof(int64_t)) == 0; }
static bool same(te_tensor *x, te_tensor *y) {
    return x && y && te_tensor_dtype(x) == te_tensor_dtype(y) && te_tensor_numel(x) == te_tensor_numel(y) && memcmp(test_read(x), test_read(y), (size_t)te_tensor_numel(x) * sizeof(float)) == 0;
}
static te_tensor *logits(te_module *head, te_tensor *hidden, te_lm_head_options o) { return te_compute_lm_head_logits(head, hidden, &o).logits; }

TE_TEST_DEVICES(formats_logits) { /* U */
    te_module *head = head_of(te, TE_F32);
    te_tensor *x = hidden_of(te, TE_F32, 2, 5), *flat = hidden_of(te, TE_F32, 0, 7), *y;
    te_tensor *every_other = test_tensor(te, TE_I64, SHAPE(3), (float[]){0, 2, 4}), *odd = test_tensor(te, TE_I32, SHAPE(3), (float[]){1, 3, 5});
    CHECK(logits(NULL, x, (te_lm_head_options){.fp32_lm_head = true, .logits_to_keep = 2}) == x && te_compute_lm_head_logits(NULL, x, NULL).logits == x);
    CHECK(same(y = logits(head, x, (te_lm_head_options){0}), te_forward(head, x)) && sized(y, SHAPE(2, 5, V)));
    CHECK(same(y = logits(head, flat, (te_lm_head_options){0}), te_forward(head, flat)) && sized(y, SHAPE(7, V)));
    CHECK(sized(y = logits(head, x, (te_lm_head_options){.logits_to_keep = 2}), SHAPE(2, 2, V)) && same(y, te_forward(head, te_tensor_contiguous(te_tensor_narrow(x, 1, 3, 2)))));
    CHECK(sized(y = logits(head, flat, (te_lm_head_options){.logits_to_keep = 3}), SHAPE(3, V)) && same(y, te_forward(head, te_tensor_narrow(flat, 0, 4, 3))));
    CHECK(sized(logits(head, flat, (te_lm_head_options){.logits_to_keep = 70}), SHAPE(7, V)));
    y = logits(head, x, (te_lm_head_options){.positions = every_other});
    CHECK(sized(y, SHAPE(2, 3, V)));
    for (int b = 0; b < 2; b++)
        for (int i = 0; i < 3; i++)
            CHECK_CLOSE("position", test_read(y) + (b * 3 + i) * V, test_read(te_forward(head, x)) + (b * 5 + 2 * i) * V, V, 0, 0);
    CHECK(sized(logits(head, hidden_of(te, TE_F32, 1, 6), (te_lm_head_options){.positions = odd}), SHAPE(1, 3, V)));
    y = logits(head, flat, (te_lm_head_options){.positions = odd});
    CHECK(sized(y, SHAPE(3, V)));
    te_tensor *inner = te_tensor_narrow(hidden_of(te, TE_F32, 2, 7), 1, 1, 5); /* strided */
    CHECK(same(logits(head, inner, (te_lm_head_options){.positions = every_other}), logits(head, te_tensor_contiguous(inner), (te_lm_head_options){.positions = every_other})));
    CHECK_CLOSE("position 5", test_read(y) + 2 * V, test_read(te_forward(head, flat)) + 5 * V, V, 0, 0);
    /* Negative positions count from the end; positions may be empty, repeated, or out of order. */
    static const struct {
        int64_t n, at[5], from_begin[5];
    } picks[] = {{3, {-1, -5, 2}, {4, 0, 2}}, {5, {-2, 3, -2, 4, 0}, {3, 3, 3, 4, 0}}, {1, {-5}, {0}}, {0, {0}, {0}}};
    for (int i = 0; i < COUNT(picks); i++)
        for (int wide = 0; wide < 2; wide++) {
            te_tensor *from_end = wide ? te_tensor_from_host(te, TE_I64, SHAPE(picks[i].n), picks[i].at) : test_i32(te, SHAPE(picks[i].n), picks[i].at);
            te_tensor *begin = wide ? te_tensor_from_host(te, TE_I64, SHAPE(picks[i].n), picks[i].from_begin) : test_i32(te, SHAPE(picks[i].n), picks[i].from_begin), *five = te_tensor_narrow(flat, 0, 1, 5);
            CHECK(same(y = logits(head, x, (te_lm_head_options){.positions = from_end}), logits(head, x, (te_lm_head_options){.positions = begin})) && sized(y, SHAPE(2, picks[i].n, V)));
            for (int b = 0; b < 2; b++)
                for (int k = 0; k < picks[i].n; k++) CHECK_CLOSE("position", test_read(y) + (b * picks[i].n + k) * V, test_read(te_forward(head, x)) + (b * 5 + picks[i].from_begin[k]) * V, V, 0, 0);
            CHECK(same(y = logits(head, five, (te_lm_head_options){.positions = from_end}), logits(head, five, (te_lm_head_options){.positions = begin})) && sized(y, SHAPE(picks[i].n, V)));
        }
    CHECK(sized(logits(head, flat, (te_lm_head_options){.is_thd = true}), SHAPE(1, 7, V)) && sized(logits(head, flat, (te_lm_head_options){.is_thd = true, .logits_to_keep = 2}), SHAPE(1, 2, V)));
    CHECK(sized(logits(head, x, (te_lm_head_options){.is_thd = true}), SHAPE(2, 5, V)) && sized(logits(NULL, flat, (te_lm_head_options){.is_thd = true}), SHAPE(1, 7, H)));

    te_lm_head_result r = te_compute_lm_head_logits(head, x, NULL);
    CHECK(r.logits && !r.hidden_states);
    r = te_compute_lm_head_logits(head, x, &(te_lm_head_options){.output_hidden_states = true, .logits_to_keep = 1});
    CHECK(sized(r.logits, SHAPE(2, 1, V)) && r.hidden_states == x);
    r = te_compute_lm_head_logits(head, flat, &(te_lm_head_options){.output_hidden_states = true, .logits_to_keep = 1, .is_thd = true});
    CHECK(sized(r.logits, SHAPE(1, 1, V)) && sized(r.hidden_states, SHAPE(1, 7, H)) && same(r.hidden_states, flat));
    CHECK_OK(te);

    /* Negative numbers: an error, or Python's meaning. */
    CHECK(!logits(head, x, (te_lm_head_options){.logits_to_keep = -2}));
    CHECK_ERROR(te, TE_ERR_INVALID, "logits_to_keep is -2; a number of last positions, or 0 for all, is needed (negative_skips: all but the first 2)");
    CHECK(!logits(head, x, (te_lm_head_options){.logits_to_keep = INT64_MIN}));
    CHECK_ERROR(te, TE_ERR_INVALID, "all but the first 9223372036854775808");
    CHECK(sized(logits(head, x, (te_lm_head_options){.logits_to_keep = INT64_MIN, .negative_skips = true}), SHAPE(2, 0, V)));
    CHECK(sized(y = logits(head, x, (te_lm_head_options){.logits_to_keep = -2, .negative_skips = true}), SHAPE(2, 3, V)) && same(y, te_forward(head, te_tensor_contiguous(te_tensor_narrow(x, 1, 2, 3)))));
    CHECK(sized(logits(head, flat, (te_lm_head_options){.logits_to_keep = -70, .negative_skips = true}), SHAPE(0, V)));
    CHECK_OK(te);
    CHECK(!logits(head, x, (te_lm_head_options){.logits_to_keep = 2, .positions = odd}));
    CHECK_ERROR(te, TE_ERR_INVALID, "positions are i32 [3] beside logits_to_keep 2");
    CHECK(!logits(head, te_tensor_view(x, SHAPE(80)), (te_lm_head_options){0}));
    CHECK_ERROR(te, TE_ERR_SHAPE, "hidden is f32 [80]");
    CHECK(!logits(head, NULL, (te_lm_head_options){0}));
    CHECK_ERROR(te, TE_ERR_INVALID, "hidden is NULL");
    CHECK(!te_compute_lm_head_logits(NULL, NULL, NULL).logits);
}
/* Positions that are not there: the call's error on the CPU, on a GPU that of the next call that waits. */
TE_TEST_DEVICES(formats_logits_of_positions_outside) {
    static const int64_t wrong[] = {5, -6, INT32_MAX, INT32_MIN};
    te_module *head = head_of(te, TE_F32);
    for (int i = 0; i < COUNT(wrong); i++)
        for (int b = 0; b < 3; b++) {
            const int64_t at[] = {4, -5, wrong[i], 0};
            te_tensor *x = hidden_of(te, TE_F32, b, 5), *positions = b ? te_tensor_from_host(te, TE_I64, SHAPE(4), at) : test_i32(te, SHAPE(4), at), *y;
            char text[120];
            y = logits(head, x, (te_lm_head_options){.positions = positions});
            if (te_ctx_is_cuda(te)) {
                CHECK(y && te_synchronize(te) == TE_ERR_INVALID);
                snprintf(text, sizeof text, "ids[2] is %lld; 0 to 4 are possible: the rows of the table; as many negative ids count from its end", (long long)wrong[i]);
            } else {
                CHECK(!y);
                snprintf(text, sizeof text, "te_compute_lm_head_logits: positions[2] is %lld, and hidden has 5: 0 to 4 are possible, or -5 to -1, from the end", (long long)wrong[i]);
            }
            CHECK_ERROR(te, TE_ERR_INVALID, text);
        }
    te_tensor *none = hidden_of(te, TE_F32, 2, 0);
    CHECK(sized(logits(head, none, (te_lm_head_options){.positions = test_i32(te, SHAPE(0), NULL)}), SHAPE(2, 0, V)));
    CHECK_OK(te);
}
static te_dtype seen_dtype;
static te_result note_input(te_module *self, te_forward_args *args) {
    (void)self;
    seen_dtype = te_tensor_dtype(args->input);
    args->outputs.out = args->input;
    return TE_OK;
}
TE_TEST_DEVICES(formats_logits_and_formats) { /* U: an f32 head under bf16 states, a bf16 head under f32 ones, a head with a policy */
    te_module *wide = head_of(te, TE_F32), *narrow = head_of(te, TE_BF16);
    te_tensor *x = hidden_of(te, TE_BF16, 2, 5), *flat = hidden_of(te, TE_BF16, 0, 7), *f32 = hidden_of(te, TE_F32, 2, 5), *y;
    CHECK(same(y = logits(wide, x, (te_lm_head_options){.fp32_lm_head = true}), te_tensor_cast(te_forward(wide, te_tensor_cast(x, TE_F32)), TE_BF16)) && te_tensor_dtype(y) == TE_BF16);
    CHECK(same(logits(wide, flat, (te_lm_head_options){.fp32_lm_head = true, .logits_to_keep = 3}), te_tensor_cast(te_forward(wide, te_tensor_cast(te_tensor_narrow(flat, 0, 4, 3), TE_F32)), TE_BF16)));
    CHECK(sized(y = logits(narrow, f32, (te_lm_head_options){.logits_to_keep = 2}), SHAPE(2, 2, V)) && te_tensor_dtype(y) == TE_BF16);
    CHECK(te_tensor_dtype(logits(wide, x, (te_lm_head_options){0})) == TE_F32); /* as the head yields it */
    te_module *policy = root_of(te);
    parameter_in(policy, "weight", TE_F32);
    te_module_set_forward(policy, note_input);
    CHECK(te_module_param_dtype(policy) == TE_DTYPE_NONE && te_module_param_dtype(NULL) == TE_DTYPE_NONE);
    logits(policy, x, (te_lm_head_options){0});
    CHECK(seen_dtype == TE_F32);
    CHECK(te_module_set_param_dtype(policy, TE_BF16) == TE_OK && te_module_param_dtype(policy) == TE_BF16);
    logits(policy, f32, (te_lm_head_options){0});
    CHECK(seen_dtype == TE_BF16 && dtype_at(policy, "weight") == TE_F32);
    CHECK(te_module_set_param_dtype(policy, TE_DTYPE_NONE) == TE_OK && te_module_param_dtype(policy) == TE_DTYPE_NONE);
    te_module *bare = root_of(te);
    te_module_set_forward(bare, note_input);
    logits(bare, x, (te_lm_head_options){0});
    CHECK(seen_dtype == TE_BF16);
    CHECK_OK(te);
    te_module_set_param_dtype(policy, TE_I32);
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_module_set_param_dtype: dtype is i32");
    /* The gradient reaches the states through casts and choices of positions. */
    te_tensor_set_requires_grad(f32, true);
    te_tensor *picked = test_tensor(te, TE_I64, SHAPE(2), (float[]){-1, 1});
    y = logits(narrow, f32, (te_lm_head_options){.positions = picked});
    CHECK(te_backward_from(y, te_tensor_full(te, TE_BF16, SHAPE(2, 2, V), 1)) == TE_OK);
    const float *g = test_read(te_tensor_grad(f32));
    for (int s = 0; s < 5; s++) CHECK((g[s * H] != 0) == (s == 1 || s == 4));
    CHECK_OK(te);
}

/* Two heads of the same values in f32 and bf16: weight [V, H], bias [V] or none. */
static te_module *wide_head(te_ctx *te, bool bias, te_dtype dtype, bool delay) {
    te_module *m = ends(te_linear_create(te, &(te_linear_desc){.in_features = 2 * H, .out_features = V, .gemm = {.no_bias = !bias, .params_dtype = dtype, .delay_wgrad_compute = delay}}));
    te_tensor_copy(te_module_parameter(m, "weight"), test_tensor(te, TE_F32, SHAPE(V, 2 * H), test_normal(V * 2 * H, 2)));
    if (bias) te_tensor_copy(te_module_parameter(m, "bias"), test_tensor(te, TE_F32, SHAPE(V), test_normal(V, 3)));
    return m;
}
static te_module *seen_module;
static te_result note_weight(te_module *self, te_forward_args *args) {
    seen_dtype = te_tensor_dtype(te_module_parameter(self, "weight"));
    if (seen_module) te_module_add_parameter(self, "bias", te_tensor_full(self ? te_module_ctx(self) : NULL, TE_F32, SHAPE(V), 2)); /* a forward that changes its module */
    args->outputs.out = te_linear(args->input, te_module_parameter(self, "weight"), NULL);
    return te_error_code(te_module_ctx(self));
}
/* A head in f32 that computes in bf16 is one in bf16, but for the format of its gradients. */
TE_TEST_DEVICES(formats_logits_in_mixed_precision) {
    const te_recipe current = te_recipe_current_scaling();
    const te_autocast_desc quantizes = {.recipe = &current};
    for (int way = 0; way < 16; way++) {
        const bool bias = way & 1, checkpoint = way & 2, fp8 = way & 4, delay = way & 8;
        te_module *master = wide_head(te, bias, TE_F32, delay), *low = wide_head(te, bias, TE_BF16, false);
        te_tensor *weight = te_module_parameter(master, "weight"), *dy = test_tensor(te, TE_BF16, SHAPE(16, V), test_normal(16 * V, 5)), *x[2], *y[2];
        test_case("bias %d, checkpoint %d, fp8 %d, delayed %d", bias, checkpoint, fp8, delay);
        CHECK(te_module_set_param_dtype(master, TE_BF16) == TE_OK);
        te_module_set_checkpoint(master, checkpoint);
        for (int i = 0; i < 2; i++) {
            x[i] = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(16, 2 * H), test_normal(16 * 2 * H, 4)), true);
            if (fp8) te_autocast_begin(te, &quantizes);
            y[i] = logits(i ? low : master, x[i], (te_lm_head_options){0});
            if (fp8) te_autocast_end(te);
            REQUIRE_OK(te);
            CHECK(te_backward_from(y[i], dy) == TE_OK);
        }
        CHECK(same(y[0], y[1]) && te_tensor_dtype(y[0]) == TE_BF16 && same(te_tensor_grad(x[0]), te_tensor_grad(x[1])));
        CHECK(te_module_parameter(master, "weight") == weight && te_tensor_dtype(weight) == TE_F32);
        for (int i = 0; i <= bias; i++) {
            te_tensor *g = te_tensor_grad(te_module_parameter(master, i ? "bias" : "weight")), *of_low = te_tensor_grad(te_module_parameter(low, i ? "bias" : "weight"));
            REQUIRE(g && of_low);
            CHECK(te_tensor_dtype(g) == TE_F32);
            CHECK_BYTES("gradient", test_read(g), test_read(of_low), (size_t)te_tensor_numel(g) * sizeof(float));
        }
        CHECK(same(logits(master, x[0], (te_lm_head_options){.fp32_lm_head = true}), te_forward(master, x[0]))); /* in f32 */
    }
    te_module *m = wide_head(te, true, TE_F32, false), *embedding = root_of(te);
    te_tensor *x = hidden_of(te, TE_BF16, 0, 32), *weight = te_module_parameter(m, "weight"), *bias = te_module_parameter(m, "bias");
    x = te_tensor_view(x, SHAPE(16, 2 * H));
    te_module_add_parameter(embedding, "weight", weight);
    te_module_set_param_dtype(m, TE_BF16);
    te_module_set_forward(m, note_weight);
    seen_dtype = TE_DTYPE_NONE;
    CHECK(logits(m, x, (te_lm_head_options){0}) && seen_dtype == TE_BF16);
    CHECK(te_module_parameter(m, "weight") == weight && te_module_parameter(embedding, "weight") == weight && te_module_parameter(m, "bias") == bias && te_tensor_dtype(weight) == TE_F32);
    seen_module = m;
    CHECK(logits(m, x, (te_lm_head_options){0}) && te_module_parameter(m, "weight") == weight && te_module_parameter(m, "bias") != bias && test_read(te_module_parameter(m, "bias"))[0] == 2);
    seen_module = NULL;
    te_module_set_forward(m, NULL);
    CHECK(!logits(m, hidden_of(te, TE_BF16, 2, 5), (te_lm_head_options){0})); /* it fails: the parameters are there again */
    CHECK_ERROR(te, TE_ERR_SHAPE, "the input's last size");
    CHECK(te_module_parameter(m, "weight") == weight && te_tensor_dtype(weight) == TE_F32);
    /* modules below the head, one parameter of two of them */
    te_module *inner = te_linear_create(te, &(te_linear_desc){.in_features = 2 * H, .out_features = 2 * H, .gemm = {.no_bias = true, .params_dtype = TE_F32}});
    te_module *last = te_linear_create(te, &(te_linear_desc){.in_features = 2 * H, .out_features = 2 * H, .gemm = {.no_bias = true, .params_dtype = TE_F32}});
    te_module_add_parameter(last, "weight", te_module_parameter(inner, "weight"));
    te_module *outer = ends(te_sequential_create(te, (te_module *[]){inner, last}, 2));
    te_module_set_param_dtype(outer, TE_BF16);
    te_tensor *shared = te_module_parameter(inner, "weight"), *low = te_tensor_cast(te_tensor_detach(shared), TE_BF16);
    te_tensor *y = logits(outer, x, (te_lm_head_options){0});
    CHECK(same(y, te_linear(te_linear(x, low, NULL), low, NULL)) && te_module_parameter(last, "weight") == shared && te_module_parameter(inner, "weight") == shared);
    CHECK_OK(te);
}
static te_result in_quarters(void *user, te_tensor *x) { /* no bits that one of the formats would lose */
    (void)user;
    return te_tensor_copy(x, test_tensor(te_tensor_ctx(x), TE_F32, te_tensor_ndim(x), te_tensor_shape(x), quarters(te_tensor_numel(x), 2)));
}
/* A weight that is stored quantized keeps its codes: the same product as by a head whose nominal format is bf16 from the beginning. */
TE_TEST_DEVICES(formats_logits_of_quantized_weights) {
    const te_recipe current = te_recipe_current_scaling();
    te_module *head[2];
    te_tensor *x[2], *y[2], *dy = test_tensor(te, TE_BF16, SHAPE(16, V), test_normal(16 * V, 5));
    for (int quantizes = 0; quantizes < 2; quantizes++) { /* under the recipe, or decoded */
        test_case("quantizes %d", quantizes);
        for (int i = 0; i < 2; i++) {
            te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &current});
            head[i] = ends(te_linear_create(te, &(te_linear_desc){.in_features = 2 * H, .out_features = V,
                                                                  .gemm = {.no_bias = true, .params_dtype = i ? TE_BF16 : TE_F32, .init.init_method = in_quarters}}));
            te_quantized_model_init_end(te);
            x[i] = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(16, 2 * H), test_normal(16 * 2 * H, 4)), true);
        }
        te_tensor *weight = te_module_parameter(head[0], "weight");
        CHECK(te_tensor_is_quantized(weight) && te_tensor_dtype(weight) == TE_F32 && te_module_set_param_dtype(head[0], TE_BF16) == TE_OK);
        for (int i = 0; i < 2; i++) {
            if (quantizes) te_autocast_begin(te, &(te_autocast_desc){.recipe = &current});
            y[i] = logits(head[i], x[i], (te_lm_head_options){0});
            if (quantizes) te_autocast_end(te);
            REQUIRE_OK(te);
            CHECK(te_backward_from(y[i], dy) == TE_OK);
        }
        te_tensor *g = te_tensor_grad(weight), *of_low = te_tensor_grad(te_module_parameter(head[1], "weight"));
        REQUIRE(g && of_low);
        CHECK(same(y[0], y[1]) && same(te_tensor_grad(x[0]), te_tensor_grad(x[1])) && te_tensor_dtype(g) == TE_F32 && te_tensor_dtype(weight) == TE_F32);
        CHECK_BYTES("gradient", test_read(g), test_read(of_low), V * 2 * H * sizeof(float));
        CHECK(te_module_parameter(head[0], "weight") == weight);
    }
    CHECK_OK(te);
}
