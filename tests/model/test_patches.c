/* Patches: which are applied, undone and skipped, and the states that the slot of FusedAdam makes. U and O number the cases of Automodel's contract. */
#include "../te_test.h"

static te_result pass(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = args->input;
    return TE_OK;
}
static const te_module_class box_class = {"Box", 0, pass, NULL, NULL};
static void end_module(void *m) { te_module_destroy((te_module *)m); }
static void end_optimizer(void *opt) { te_optimizer_destroy((te_optimizer *)opt); }

static te_module *box(te_ctx *te) {
    te_module *m = te_module_create(te, &box_class, "box");
    test_on_end(end_module, m);
    return m;
}
static te_optimizer *adam_of(te_ctx *te, te_module *m, const te_fused_adam_desc *desc) {
    te_optimizer *opt = te_fused_adam_create(te, m, desc);
    test_on_end(end_optimizer, opt);
    return opt;
}
/* A box with one parameter "p" of ones. */
static te_module *box_of(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) {
    te_module *m = box(te);
    te_module_add_parameter(m, "p", te_tensor_full(te, dtype, ndim, shape, 1));
    return m;
}
/* [rows, cols] stored quantized by `recipe`. */
static te_module *quantized_box(te_ctx *te, te_recipe recipe, int64_t rows, int64_t cols) {
    te_module *m;
    te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    m = te_linear_create(te, &(te_linear_desc){.in_features = cols, .out_features = rows, .gemm.no_bias = true});
    te_quantized_model_init_end(te);
    test_on_end(end_module, m);
    return m;
}

/* ---- a patch that counts ---- */

typedef struct counted {
    int applied, undone, looked;
    bool absent, needless;
    te_result result;
    int *order; /* of the last one applied or undone */
    int number;
} counted;
static bool counted_found(te_ctx *te, void *user) {
    (void)te;
    ((counted *)user)->looked++;
    return !((counted *)user)->absent;
}
static bool counted_needed(te_ctx *te, void *user) {
    (void)te;
    return !((counted *)user)->needless;
}
static te_result counted_apply(te_ctx *te, void *user) {
    counted *c = (counted *)user;
    (void)te;
    if (c->result != TE_OK) return c->result;
    c->applied++;
    if (c->order) *c->order = 10 * *c->order + c->number;
    return TE_OK;
}
static te_result counted_undo(te_ctx *te, void *user) {
    counted *c = (counted *)user;
    (void)te;
    if (c->result != TE_OK) return c->result;
    c->undone++;
    if (c->order) *c->order = 10 * *c->order + c->number;
    return TE_OK;
}
static te_result patch_nothing(te_ctx *te, void *user) {
    (void)te, (void)user;
    return TE_OK;
}
static te_patch counted_patch(const char *name, const char *fixed_in, counted *user) {
    return (te_patch){.name = name, .fixed_in = fixed_in, .found = counted_found, .needed = counted_needed, .apply = counted_apply, .undo = counted_undo, .user = user};
}
/* Contexts that log everything, as the lines are part of the contract: what the last one has said. */
static char said[8192];
static void note_line(void *user, te_log_level level, const char *message) {
    size_t used = strlen(said);
    (void)user;
    snprintf(said + used, sizeof said - used, "%d %s\n", (int)level, message);
}
static int lines_with(const char *words) {
    int n = 0;
    for (const char *at = said; (at = strstr(at, words)) != NULL; at++) n++;
    return n;
}
static te_ctx *talking(void) {
    said[0] = 0;
    return te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 1, .log = note_line, .log_level = TE_LOG_DEBUG});
}

TE_TEST(patches_run_once) { /* U1 */
    te_ctx *te = talking();
    counted c = {0};
    te_patch patch = counted_patch("mine", "2.30", &c);
    CHECK(!te_patches_applied(te));
    CHECK(te_register_patch(te, &patch) == TE_OK && te_num_patches(te) == 2);
    CHECK(te_patch_at(te, 1).state == TE_PATCH_WAITING);
    CHECK(te_apply_patches(te) == TE_OK && te_patches_applied(te));
    CHECK(te_apply_patches(te) == TE_OK && te_patches_applied(te));
    CHECK(c.applied == 1 && c.looked == 1 && c.undone == 0);
    CHECK_EQ_INT(lines_with("3 patch \"mine\" is applied to version 2.20.0"), 1);
    /* One that is registered later is looked at by the next call, and no other. */
    counted later = {.needless = true};
    patch = counted_patch("later", NULL, &later);
    CHECK(te_register_patch(te, &patch) == TE_OK && !te_patches_applied(te));
    CHECK(te_apply_patches(te) == TE_OK && te_patches_applied(te) && c.applied == 1 && later.applied == 0);
    CHECK(te_patch_at(te, 2).state == TE_PATCH_SKIPPED);
    CHECK_STR(te_patch_at(te, 2).why, "has all that it brings");
    te_ctx_destroy(te);
}

TE_TEST(patches_gates) { /* U2, U3, and the order of versions */
    static const struct {
        const char *have, *fixed;
        bool applies;
    } row[] = {{"2.12", "2.12", false},      {"2.12.0", "2.12", false},     {"2.11.9", "2.12", true},          {"2.12.0.dev0", "2.12", true}, {"2.12.0.dev0+1a2b3c", "2.12", true},
               {"2.12.0+1a2b", "2.12", false}, {"2.12.0rc1", "2.12", true},   {"2.12.0a1", "2.12.0b1", true},    {"2.12.post1", "2.12", false}, {"2.9", "2.12", true},
               {"10.0", "2.12", false},       {"", "2.12", true} /* "0.0.0" */, {"2.12.0rc1.dev2", "2.12rc1", true}, {"2.12rc1", "2.12.0rc1.dev2", false}, {"2.12rc2", "2.12.0.rc1", false},
               {"2.20.0", NULL, true}};
    for (int i = 0; i < COUNT(row); i++) {
        te_ctx *te = talking();
        counted c = {0};
        te_patch patch = counted_patch("mine", row[i].fixed, &c);
        test_case("%s against %s", row[i].have, row[i].fixed ? row[i].fixed : "none");
        CHECK(te_set_library_version(te, row[i].have) == TE_OK && te_register_patch(te, &patch) == TE_OK && te_apply_patches(te) == TE_OK);
        CHECK_OK(te);
        CHECK_EQ_INT(c.applied, row[i].applies);
        CHECK(te_patch_at(te, 1).state == (row[i].applies ? TE_PATCH_APPLIED : TE_PATCH_SKIPPED));
        te_ctx_destroy(te);
    }
    test_case("what is not there");
    te_ctx *te = talking();
    counted c = {.absent = true};
    te_patch patch = counted_patch("nothing there", NULL, &c);
    te_fused_adam_methods legacy = {te_initialize_state_legacy, 0};
    te_register_patch(te, &patch);
    te_fused_adam_set_methods(te, &legacy);
    CHECK(te_apply_patches(te) == TE_OK && te_patches_applied(te)); /* a skip is a decision, too */
    CHECK_OK(te);
    CHECK(c.applied == 0 && te_fused_adam_get_methods(te).initialize_state == te_initialize_state_legacy);
    CHECK_EQ_INT(lines_with("4 patch \"fused_adam_quantized_tensor\" is skipped: version 2.20.0 is not older than 2.12"), 1);
    CHECK_EQ_INT(lines_with("patch \"nothing there\" is skipped: there is nothing to patch"), 1);
    CHECK_EQ_INT(lines_with("is applied"), 0);
    te_ctx_destroy(te);
}

TE_TEST(patches_the_slot) { /* U4, U5, U6, and back */
    const int all = TE_STATE_DEQUANTIZES | TE_STATE_ZEROS_LIKE | TE_STATE_EMPTY_LIKE;
    for (int capabilities = 0; capabilities <= all; capabilities++) {
        te_ctx *te = talking();
        te_fused_adam_methods old = {te_initialize_state_legacy, capabilities};
        test_case("capabilities %d", capabilities);
        te_set_library_version(te, "2.11.0");
        te_fused_adam_set_methods(te, &old);
        CHECK(te_apply_patches(te) == TE_OK);
        te_fused_adam_methods now = te_fused_adam_get_methods(te);
        CHECK(now.initialize_state == (capabilities == all ? te_initialize_state_legacy : te_initialize_state) && now.capabilities == all);
        CHECK_EQ_INT(lines_with("patch \"fused_adam_quantized_tensor\" is applied to version 2.11.0"), capabilities != all);
        CHECK(te_unapply_patches(te) == TE_OK && !te_patches_applied(te));
        now = te_fused_adam_get_methods(te);
        CHECK(now.initialize_state == te_initialize_state_legacy && now.capabilities == capabilities);
        CHECK(te_apply_patches(te) == TE_OK && te_patches_applied(te));
        CHECK(te_fused_adam_get_methods(te).capabilities == all);
        te_ctx_destroy(te);
    }
}

TE_TEST_DEVICES(patches_that_fail) { /* O2; and what is refused */
    int order = 0;
    counted first = {.order = &order, .number = 1}, second = {.order = &order, .number = 2, .result = TE_ERR_STATE};
    te_patch patch = counted_patch("first", NULL, &first), other = counted_patch("second", NULL, &second);
    te_register_patch(te, &patch);
    te_register_patch(te, &other);
    CHECK(te_apply_patches(te) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "patch \"second\": its apply returned TE_ERR_STATE");
    CHECK(!te_patches_applied(te) && te_patch_at(te, 1).state == TE_PATCH_APPLIED && te_patch_at(te, 2).state == TE_PATCH_WAITING);
    second.result = TE_OK;
    CHECK(te_apply_patches(te) == TE_OK && te_patches_applied(te) && first.applied == 1 && second.applied == 1);
    CHECK(te_unapply_patches(te) == TE_OK && first.undone == 1 && second.undone == 1);
    CHECK_EQ_INT(order, 1221);
    CHECK(te_unapply_patches(te) == TE_OK && first.undone == 1);
    char report[8192];
    te_apply_patches(te);
    te_report(te, report, sizeof report);
    CHECK_STR(report, "patch fused_adam_quantized_tensor: skipped: version 2.20.0 is not older than 2.12");
    CHECK_STR(report, "patch second: applied to version 2.20.0");
    second.result = TE_ERR_STATE; /* an undo that fails leaves it applied */
    CHECK(te_unapply_patches(te) == TE_ERR_STATE && te_patch_at(te, 2).state == TE_PATCH_APPLIED && te_patch_at(te, 1).state == TE_PATCH_APPLIED);
    CHECK_ERROR(te, TE_ERR_STATE, "patch \"second\": its undo returned TE_ERR_STATE");
    te_register_patch(te, &patch);
    CHECK_ERROR(te, TE_ERR_INVALID, "patch 1 is named \"first\" already");
    te_register_patch(te, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "the patch is NULL");
    te_register_patch(te, &(te_patch){.name = "half", .apply = counted_apply});
    CHECK_ERROR(te, TE_ERR_INVALID, "patch \"half\" without undo");
    te_register_patch(te, &(te_patch){.name = "new", .fixed_in = "soon", .apply = counted_apply, .undo = counted_undo});
    CHECK_ERROR(te, TE_ERR_INVALID, "fixed_in \"soon\" is no version");
    te_set_library_version(te, "2.12-final");
    CHECK_ERROR(te, TE_ERR_INVALID, "\"2.12-final\" is no version");
    te_fused_adam_set_methods(te, &(te_fused_adam_methods){NULL, 0});
    CHECK_ERROR(te, TE_ERR_INVALID, "initialize_state is NULL");
    CHECK(te_num_patches(te) == 3 && !te_patch_at(te, 3).name && !te_patch_at(te, -1).name);
    CHECK(te_apply_patches(NULL) == TE_ERR_STATE && te_unapply_patches(NULL) == TE_ERR_STATE && te_register_patch(NULL, &patch) == TE_ERR_STATE && !te_patches_applied(NULL) &&
          te_num_patches(NULL) == 0 && !te_patch_at(NULL, 0).name && te_set_library_version(NULL, "1") == TE_ERR_STATE && te_fused_adam_set_methods(NULL, NULL) == TE_ERR_STATE);
}

/* A patch whose `found` or `needed` registers so many others that the list moves. */
static bool registers_others(te_ctx *te, void *user) {
    static counted others;
    const char letter = *(const char *)user;
    for (int i = 0; i < 40; i++) {
        const char name[] = {letter, (char)('0' + i / 10), (char)('0' + i % 10), 0};
        te_patch patch = counted_patch(name, NULL, &others);
        te_register_patch(te, &patch);
    }
    return letter == 'a';
}
TE_TEST(patches_that_register_others) {
    te_ctx *te = talking();
    counted c = {0};
    te_patch by_found = counted_patch("by found", NULL, &c), by_needed = counted_patch("by needed", NULL, &c), absent = counted_patch("absent", NULL, &c);
    by_found.found = by_needed.needed = absent.found = registers_others;
    by_found.needed = by_needed.found = NULL;
    by_found.user = by_needed.user = (char[]){"a"};
    absent.user = (char[]){"c"};
    by_found.apply = by_found.undo = by_needed.apply = by_needed.undo = absent.apply = absent.undo = patch_nothing;
    te_register_patch(te, &by_found);
    te_register_patch(te, &absent);
    CHECK(te_apply_patches(te) == TE_OK && te_num_patches(te) == 83);
    CHECK_OK(te);
    for (int i = 3; i < te_num_patches(te); i++) CHECK(te_patch_at(te, i).state == TE_PATCH_APPLIED); /* and looked at, by the same call */
    CHECK(te_patch_at(te, 1).state == TE_PATCH_APPLIED && te_patch_at(te, 2).state == TE_PATCH_SKIPPED && strcmp(te_patch_at(te, 2).name, "absent") == 0);
    CHECK_STR(te_patch_at(te, 2).why, "there is nothing to patch");
    te_ctx_destroy(te);
    te = talking();
    te_register_patch(te, &by_needed);
    CHECK(te_apply_patches(te) == TE_OK && te_num_patches(te) == 42 && te_patch_at(te, 1).state == TE_PATCH_APPLIED);
    CHECK_STR(te_patch_at(te, 1).why, "applied to version");
    te_ctx_destroy(te);
}

/* ---- states ---- */

static bool all_zero(te_tensor *x) {
    const size_t n = te_tensor_bytes(x);
    uint8_t *bytes = (uint8_t *)test_alloc(n);
    te_tensor_to_host(x, bytes);
    for (size_t i = 0; i < n; i++)
        if (bytes[i]) return false;
    return true;
}
static bool shaped(const te_tensor *x, int ndim, const int64_t *shape) { return x && te_tensor_ndim(x) == ndim && memcmp(te_tensor_shape(x), shape, (size_t)ndim * sizeof(int64_t)) == 0; }
static int decoded;
static void count_decoding(te_ctx *te, const te_trace *e, void *user) {
    (void)te, (void)user;
    decoded += e->op == TE_OP_FP8_DEQUANTIZE && e->phase == TE_TRACE_BEFORE;
}

TE_TEST_DEVICES(state_of_a_plain_parameter) { /* U7, U8, U10, U11, U12, O1 */
    te_module *m = box_of(te, TE_F32, SHAPE(4, 4));
    te_optimizer *opt = adam_of(te, m, NULL);
    te_tensor *p = te_module_parameter(m, "p"), *scale, *x;
    CHECK(te_initialize_state(opt, p, "exp_avg", true, false) == TE_OK); /* U7 */
    x = te_optimizer_state(opt, p, "exp_avg", &scale);
    CHECK(te_tensor_dtype(x) == TE_F32 && shaped(x, SHAPE(4, 4)) && all_zero(x) && !scale);
    CHECK(te_initialize_state(opt, p, "master_param", false, true) == TE_OK); /* U10; two bytes an element */
    x = te_optimizer_state(opt, p, "master_param", &scale);
    CHECK(te_tensor_dtype(x) == TE_U8 && shaped(x, SHAPE(16, 2)) && all_zero(x) && !scale);

    m = box_of(te, TE_F32, SHAPE(3, 5));
    opt = adam_of(te, m, NULL);
    p = te_module_parameter(m, "p");
    CHECK(te_initialize_state(opt, p, "exp_avg_sq", false, false) == TE_OK); /* U8 */
    x = te_optimizer_state(opt, p, "exp_avg_sq", &scale);
    CHECK(te_tensor_dtype(x) == TE_F32 && shaped(x, SHAPE(3, 5)) && !scale);

    m = box_of(te, TE_F32, SHAPE(2, 2));
    p = te_module_parameter(m, "p");
    for (int i = 0; i < 3; i++) { /* U11, U12, O1 */
        const te_dtype dtype = (te_dtype[]){TE_F16, TE_F8E4M3, TE_BF16}[i];
        opt = adam_of(te, m, &(te_fused_adam_desc){.exp_avg_dtype = dtype});
        CHECK(te_initialize_state(opt, p, "exp_avg", true, false) == TE_OK);
        x = te_optimizer_state(opt, p, "exp_avg", &scale);
        CHECK(te_tensor_dtype(x) == dtype && shaped(x, SHAPE(2, 2)) && all_zero(x));
        CHECK(scale && te_tensor_dtype(scale) == TE_F32 && shaped(scale, SHAPE(1)) && te_tensor_item(scale) == 1);
        CHECK(te_tensor_item(te_tensor_narrow(te_tensor_view(te_optimizer_get_unscaled_state(opt, p, "exp_avg"), SHAPE(4)), 0, 0, 1)) == 0);
    }
    CHECK_OK(te);
}
TE_TEST_DEVICES(state_of_a_quantized_parameter) { /* U9, O3, and the legacy function */
    te_module *m = quantized_box(te, te_recipe_current_scaling(), 2, 3);
    te_tensor *p = te_module_parameter(m, "weight"), *x;
    te_fused_adam_methods legacy = {te_initialize_state_legacy, 0};
    te_tensor_set_sharded(p, true);
    te_set_trace(te, count_decoding, NULL);
    decoded = 0;
    te_optimizer *opt = adam_of(te, m, NULL);
    CHECK_EQ_INT(decoded, 1); /* the master's value, and nothing else */
    CHECK(te_initialize_state(opt, p, "exp_avg", true, false) == TE_OK);
    CHECK_EQ_INT(decoded, 1);
    te_set_trace(te, NULL, NULL);
    x = te_optimizer_state(opt, p, "exp_avg", NULL);
    CHECK(te_tensor_dtype(x) == TE_F32 && shaped(x, SHAPE(2, 3)) && all_zero(x) && te_tensor_is_sharded(x));
    CHECK(te_tensor_is_sharded(te_optimizer_state(opt, p, "exp_avg_sq", NULL)) && te_tensor_is_sharded(te_optimizer_state(opt, p, "master_param", NULL)));

    te_set_library_version(te, "2.11");
    te_fused_adam_set_methods(te, &legacy);
    CHECK(!te_fused_adam_create(te, m, NULL));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "parameter weight is stored quantized, and this function makes states of plain ones alone; call te_apply_patches before");
    te_module *plain = box_of(te, TE_BF16, SHAPE(2, 3));
    te_tensor_set_sharded(te_module_parameter(plain, "p"), true);
    te_optimizer *old = adam_of(te, plain, NULL);
    CHECK(!te_tensor_is_sharded(te_optimizer_state(old, te_module_parameter(plain, "p"), "exp_avg", NULL)));
    CHECK(te_optimizer_initialize_state(old, te_module_parameter(plain, "p"), "exp_avg", true, false) == TE_OK && !te_tensor_is_sharded(te_optimizer_state(old, te_module_parameter(plain, "p"), "exp_avg", NULL)));
    CHECK(te_apply_patches(te) == TE_OK);
    CHECK(te_optimizer_initialize_state(old, te_module_parameter(plain, "p"), "exp_avg", true, false) == TE_OK && te_tensor_is_sharded(te_optimizer_state(old, te_module_parameter(plain, "p"), "exp_avg", NULL)));
    opt = adam_of(te, m, NULL);
    CHECK(opt && te_tensor_is_sharded(te_optimizer_state(opt, p, "exp_avg", NULL)));
    CHECK_OK(te);
}
TE_TEST_DEVICES(states_of_every_kind) { /* A11: parameter x format of the state x remainders x sharded */
    static const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16, TE_F8E4M3};
    for (int kind = 0; kind < 4; kind++) {
        te_module *m = kind == 0   ? box_of(te, TE_BF16, SHAPE(16, 32))
                       : kind == 1 ? box_of(te, TE_F32, SHAPE(16, 32))
                       : kind == 2 ? quantized_box(te, te_recipe_current_scaling(), 16, 32)
                                   : quantized_box(te, te_recipe_block_scaling(), 16, 32);
        te_tensor *p = te_module_parameter(m, kind < 2 ? "p" : "weight");
        for (int format = 0; format < COUNT(formats); format++) {
            te_optimizer *opt = te_fused_adam_create(te, m, &(te_fused_adam_desc){.exp_avg_dtype = formats[format]});
            for (int bits = 0; bits < 8; bits++) {
                const bool remainders = bits & 1, sharded = (bits & 2) != 0, zero = (bits & 4) != 0;
                te_tensor *x, *scale;
                test_case("parameter %d, %s%s%s%s", kind, te_dtype_name(formats[format]), remainders ? ", remainders" : "", sharded ? ", sharded" : "", zero ? ", zero" : "");
                te_tensor_set_sharded(p, sharded);
                CHECK(te_optimizer_initialize_state(opt, p, "exp_avg", zero, remainders) == TE_OK);
                x = te_optimizer_state(opt, p, "exp_avg", &scale);
                CHECK(te_tensor_dtype(x) == (remainders ? TE_U8 : formats[format]));
                CHECK(remainders ? shaped(x, SHAPE(16 * 32, 2)) : shaped(x, SHAPE(16, 32)));
                if (zero || remainders) CHECK(all_zero(x));
                CHECK(!scale == (remainders || formats[format] == TE_F32));
                if (scale) CHECK(te_tensor_item(scale) == 1);
                CHECK(te_tensor_is_sharded(x) == sharded);
            }
            te_optimizer_destroy(opt);
        }
    }
    CHECK_OK(te);
}

static int own_calls;
static te_result own_initialize(te_optimizer *opt, te_tensor *param, const char *name, bool zero_buffer, bool store_param_remainders) {
    own_calls++;
    return te_initialize_state(opt, param, name, zero_buffer, store_param_remainders);
}
static te_result no_initialize(te_optimizer *opt, te_tensor *param, const char *name, bool zero_buffer, bool store_param_remainders) {
    (void)opt, (void)param, (void)name, (void)zero_buffer, (void)store_param_remainders;
    return TE_OK;
}
TE_TEST_DEVICES(slots_of_the_program) {
    te_module *m = box_of(te, TE_BF16, SHAPE(4));
    te_tensor *p = te_module_parameter(m, "p");
    te_fused_adam_methods own = {own_initialize, 0}, none = {no_initialize, 0};
    own_calls = 0;
    te_fused_adam_set_methods(te, &own);
    te_optimizer *opt = adam_of(te, m, &(te_fused_adam_desc){.store_param_remainders = true});
    CHECK_EQ_INT(own_calls, 3);
    CHECK(te_tensor_dtype(te_optimizer_state(opt, p, "master_param", NULL)) == TE_U8);
    te_fused_adam_set_methods(te, &none);
    CHECK(!te_fused_adam_create(te, m, NULL));
    CHECK_ERROR(te, TE_ERR_STATE, "initialize_state of te_fused_adam_set_methods returned TE_OK, and parameter p has no state \"exp_avg\"");
    te_fused_adam_set_methods(te, NULL);
    CHECK(te_fused_adam_get_methods(te).initialize_state == te_initialize_state && te_fused_adam_get_methods(NULL).initialize_state == te_initialize_state);
    /* A master that is made anew has the parameter's value where it is next read, in a file as well. */
    te_optimizer *whole = adam_of(te, m, NULL);
    CHECK(te_optimizer_initialize_state(whole, p, "master_param", false, false) == TE_OK);
    CHECK(test_read(te_optimizer_get_unscaled_state(whole, p, "master_param"))[3] == 1);
    CHECK(te_optimizer_initialize_state(whole, p, "master_param", false, false) == TE_OK);
    CHECK(te_model_save(te, test_path("m.safetensors"), m, whole, NULL, 0) == TE_OK);
    te_safetensors *file = te_safetensors_open(te, test_path("m.safetensors"));
    CHECK(test_read(te_safetensors_read(file, "optimizer/p.master_param"))[3] == 1);
    te_safetensors_close(file);
    CHECK_OK(te);

    te_initialize_state(opt, p, "momentum", true, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "there is no state \"momentum\"");
    te_initialize_state(opt, te_tensor_full(te, TE_F32, SHAPE(4), 1), "exp_avg", true, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "the tensor is no parameter of this optimizer");
    te_initialize_state(opt, NULL, "exp_avg", true, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "the parameter is NULL");
    te_initialize_state_legacy(opt, p, NULL, true, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_state_legacy: the state's name is NULL");
    te_optimizer *sgd = te_fused_sgd_create(te, m, &(te_fused_sgd_desc){.lr = 1});
    te_optimizer_initialize_state(sgd, p, "master_param", true, false);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "made by te_fused_sgd_create");
    te_optimizer_destroy(sgd);
    CHECK(!te_optimizer_state(opt, p, "momentum", NULL) && !te_optimizer_state(NULL, p, "exp_avg", NULL) && !te_optimizer_state(opt, NULL, "exp_avg", NULL));
    CHECK(te_initialize_state(NULL, p, "exp_avg", true, false) == TE_ERR_STATE && te_optimizer_initialize_state(NULL, p, "exp_avg", true, false) == TE_ERR_STATE);
}
