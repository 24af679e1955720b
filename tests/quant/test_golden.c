/* The quantizing operations against files that another implementation wrote (tools/golden: numpy and ml_dtypes): same inputs, same bytes,
 * on every device. The files' metadata say which calls; here they are read and made. */
#include "../te_test.h"

/* ---- the operations by name ---- */

#define CALL(lower, UPPER, family) \
    static te_result call_##lower(te_ctx *te, const void *args) { return te_op_##lower(te, (const te_op_##lower##_args *)args); }
TE_OP_LIST(CALL)
static const struct {
    const char *name;
    te_result (*call)(te_ctx *te, const void *args);
} operations[] = {
#define NAMED(lower, UPPER, family) {#lower, call_##lower},
    TE_OP_LIST(NAMED)};

/* ---- one case: "OPERATION FIELD=VALUE FIELD=VALUE ..." ---- */

enum { MAX_OUTPUTS = 8 };
typedef struct golden_case {
    te_ctx *te;
    te_safetensors *file, *inputs;
    const char *text;
    int num_outputs;
    struct {
        const char *field, *name;
        te_tensor *got;
    } output[MAX_OUTPUTS];
} golden_case;

/* The value of a field, or NULL. */
static const char *field(const golden_case *c, const char *name) {
    size_t n = strlen(name);
    for (const char *at = strchr(c->text, ' '); at; at = strchr(at, ' ')) {
        at++;
        if (strncmp(at, name, n) != 0 || at[n] != '=') continue;
        size_t length = strcspn(at + n + 1, " ");
        char *value = (char *)test_alloc(length + 1);
        memcpy(value, at + n + 1, length);
        return value;
    }
    return NULL;
}
static bool flag(const golden_case *c, const char *name) { return field(c, name) != NULL; }
static float number(const golden_case *c, const char *name) {
    const char *text = field(c, name);
    return text ? strtof(text, NULL) : 0;
}
static uint64_t integer(const golden_case *c, const char *name) {
    const char *text = field(c, name);
    return text ? strtoull(text, NULL, 10) : 0;
}
static te_4over6_error four_over_six(const golden_case *c) {
    const char *text = field(c, "four_over_six");
    return !text ? TE_4OVER6_OFF : strcmp(text, "mse") == 0 ? TE_4OVER6_MSE : TE_4OVER6_MAE;
}

static te_tensor *input(const golden_case *c, const char *name) {
    const char *tensor = field(c, name);
    return tensor ? te_safetensors_read(c->file, tensor) : NULL;
}
static te_tensor *matrix(const golden_case *c) {
    const char *name = field(c, "x");
    if (strcmp(name, "every_bf16") != 0) return te_safetensors_read(te_safetensors_find(c->file, name) ? c->file : c->inputs, name);
    uint16_t *bits = (uint16_t *)test_alloc(65536 * sizeof(uint16_t));
    for (int i = 0; i < 65536; i++) bits[i] = (uint16_t)i;
    return te_tensor_from_host(c->te, TE_BF16, SHAPE(512, 128), bits);
}

/* A poisoned tensor like the one that is expected, or with what stands before the call in it. */
static te_tensor *output(golden_case *c, const char *name) {
    const char *tensor = field(c, name);
    char before[64];
    if (!tensor) return NULL;
    const te_safetensors_entry *e = te_safetensors_find(c->file, tensor);
    if (!e) {
        test_fail(__FILE__, __LINE__, "the file has no tensor %s", tensor);
        return NULL;
    }
    te_tensor *x = test_guarded(c->te, e->dtype, e->ndim, e->shape);
    snprintf(before, sizeof(before), "%s.before", name);
    tensor = field(c, before);
    if (tensor && te_safetensors_find(c->file, tensor)) te_tensor_copy(x, te_safetensors_read(c->file, tensor));
    else if (tensor) te_tensor_fill(x, (double)number(c, before));
    c->output[c->num_outputs].field = name;
    c->output[c->num_outputs].name = e->name;
    c->output[c->num_outputs++].got = x;
    return x;
}

/* All NaN are one: which of them an operation gives is not promised. */
static const uint8_t *bytes_of(const te_tensor *x) {
    uint8_t *bytes = (uint8_t *)test_read_bytes(x);
    te_dtype dtype = te_tensor_dtype(x);
    int64_t n = te_tensor_numel(x);
    if (dtype != TE_F32 && dtype != TE_F16 && dtype != TE_BF16) return bytes;
    const float *value = test_read(x);
    for (int64_t i = 0; i < n; i++)
        if (isnan(value[i])) memset(bytes + i * te_dtype_bits(dtype) / 8, 0xff, (size_t)te_dtype_bits(dtype) / 8);
    return bytes;
}

/* Makes the call. Which fields are outputs is written down here once more, as the operations have them. */
static te_result make_call(golden_case *c) {
    union {
        te_op_amax_args amax;
        te_op_scale_from_amax_args scale;
        te_op_delayed_update_args delayed;
        te_op_fp8_quantize_args fp8;
        te_op_fp8_dequantize_args fp8_back;
        te_op_block_quantize_args block;
        te_op_block_dequantize_args block_back;
        te_op_mxfp8_quantize_args mxfp8;
        te_op_mxfp8_dequantize_args mxfp8_back;
        te_op_nvfp4_amax_args nvfp4_amax;
        te_op_nvfp4_quantize_args nvfp4;
        te_op_nvfp4_dequantize_args nvfp4_back;
        te_op_act_fwd_args act;
        te_op_act_bwd_args act_back;
    } a;
    te_tensor *history, *scale;
    size_t length = strcspn(c->text, " ");
    memset(&a, 0, sizeof(a));
#define IS(name) (length == strlen(name) && strncmp(c->text, name, length) == 0)
    if (IS("amax")) {
        a.amax.x = matrix(c);
        a.amax.amax = output(c, "amax");
    } else if (IS("scale_from_amax")) {
        a.scale.amax = input(c, "amax");
        a.scale.scale = output(c, "scale");
        a.scale.scale_inv = output(c, "scale_inv");
        a.scale.fp8_max = number(c, "fp8_max");
        a.scale.epsilon = number(c, "epsilon");
        a.scale.power_of_two = flag(c, "power_of_two");
    } else if (IS("delayed_update")) {
        history = output(c, "amax_history");
        scale = output(c, "scale");
        a.delayed.amax_history = &history;
        a.delayed.scale = &scale;
        a.delayed.count = 1;
        a.delayed.reduced = input(c, "reduced");
        a.delayed.fp8_max = number(c, "fp8_max");
        a.delayed.margin = number(c, "margin");
        a.delayed.algo = flag(c, "most_recent") ? TE_AMAX_MOST_RECENT : TE_AMAX_MAX;
    } else if (IS("fp8_quantize")) {
        a.fp8.x = matrix(c);
        a.fp8.row = output(c, "row");
        a.fp8.col = output(c, "col");
        a.fp8.current = flag(c, "current");
        if (!a.fp8.current) {
            float value = number(c, "scale");
            a.fp8.scale = test_tensor(c->te, TE_F32, SHAPE(1), &value);
        }
        a.fp8.scale_inv = output(c, "scale_inv");
        a.fp8.amax = output(c, "amax");
        a.fp8.x_amax = output(c, "x_amax");
        a.fp8.epsilon = number(c, "epsilon");
        a.fp8.power_of_two = flag(c, "power_of_two");
    } else if (IS("fp8_dequantize")) {
        a.fp8_back.q = input(c, "q");
        a.fp8_back.scale_inv = input(c, "scale_inv");
        a.fp8_back.y = output(c, "y");
    } else if (IS("block_quantize")) {
        a.block.x = matrix(c);
        a.block.row = output(c, "row");
        a.block.row_scale_inv = output(c, "row_scale_inv");
        a.block.col = output(c, "col");
        a.block.col_scale_inv = output(c, "col_scale_inv");
        a.block.two_dimensional = flag(c, "two_dimensional");
        a.block.fp32_scales = flag(c, "fp32_scales");
        a.block.epsilon = number(c, "epsilon");
    } else if (IS("block_dequantize")) {
        a.block_back.q = input(c, "q");
        a.block_back.scale_inv = input(c, "scale_inv");
        a.block_back.y = output(c, "y");
        a.block_back.two_dimensional = flag(c, "two_dimensional");
        a.block_back.columnwise = flag(c, "columnwise");
    } else if (IS("mxfp8_quantize")) {
        a.mxfp8.x = matrix(c);
        a.mxfp8.row = output(c, "row");
        a.mxfp8.row_scale = output(c, "row_scale");
        a.mxfp8.col = output(c, "col");
        a.mxfp8.col_scale = output(c, "col_scale");
        a.mxfp8.two_dimensional = flag(c, "two_dimensional");
        a.mxfp8.swizzled = flag(c, "swizzled");
    } else if (IS("mxfp8_dequantize")) {
        a.mxfp8_back.q = input(c, "q");
        a.mxfp8_back.scale = input(c, "scale");
        a.mxfp8_back.y = output(c, "y");
        a.mxfp8_back.columnwise = flag(c, "columnwise");
        a.mxfp8_back.swizzled = flag(c, "swizzled");
    } else if (IS("nvfp4_amax")) {
        a.nvfp4_amax.x = matrix(c);
        a.nvfp4_amax.amax_row = output(c, "amax_row");
        a.nvfp4_amax.amax_col = output(c, "amax_col");
        a.nvfp4_amax.rht = flag(c, "rht");
        a.nvfp4_amax.no_random_sign_mask = flag(c, "no_sign_mask");
        a.nvfp4_amax.keep = flag(c, "keep");
    } else if (IS("nvfp4_quantize")) {
        a.nvfp4.x = matrix(c);
        a.nvfp4.row = output(c, "row");
        a.nvfp4.row_scale = output(c, "row_scale");
        a.nvfp4.col = output(c, "col");
        a.nvfp4.col_scale = output(c, "col_scale");
        a.nvfp4.amax_row = input(c, "amax_row");
        a.nvfp4.amax_col = input(c, "amax_col");
        a.nvfp4.two_dimensional = flag(c, "two_dimensional");
        a.nvfp4.rht = flag(c, "rht");
        a.nvfp4.no_random_sign_mask = flag(c, "no_sign_mask");
        a.nvfp4.stochastic_rounding = flag(c, "stochastic_rounding");
        a.nvfp4.seed = integer(c, "seed");
        a.nvfp4.offset = integer(c, "offset");
        a.nvfp4.four_over_six = four_over_six(c);
        a.nvfp4.e4m3_max_256 = flag(c, "e4m3_max_256");
        a.nvfp4.swizzled = flag(c, "swizzled");
    } else if (IS("nvfp4_dequantize")) {
        a.nvfp4_back.q = input(c, "q");
        a.nvfp4_back.scale = input(c, "scale");
        a.nvfp4_back.amax = input(c, "amax");
        a.nvfp4_back.y = output(c, "y");
        a.nvfp4_back.columnwise = flag(c, "columnwise");
        a.nvfp4_back.rht = flag(c, "rht");
        a.nvfp4_back.no_random_sign_mask = flag(c, "no_sign_mask");
        a.nvfp4_back.e4m3_max_256 = flag(c, "e4m3_max_256");
        a.nvfp4_back.swizzled = flag(c, "swizzled");
    } else if (IS("act_fwd")) {
        a.act.x = matrix(c);
        a.act.y = output(c, "y");
        a.act.amax = output(c, "amax");
        a.act.activation = (te_activation)integer(c, "activation");
    } else if (IS("act_bwd")) {
        a.act_back.x = matrix(c);
        a.act_back.dy = input(c, "dy");
        a.act_back.dx = output(c, "dx");
        a.act_back.amax = output(c, "amax");
        a.act_back.activation = (te_activation)integer(c, "activation");
    }
#undef IS
    for (int i = 0; i < COUNT(operations); i++)
        if (strlen(operations[i].name) == length && strncmp(c->text, operations[i].name, length) == 0) return operations[i].call(c->te, &a);
    test_fail(__FILE__, __LINE__, "te.h has no operation %.*s", (int)length, c->text);
    return TE_ERR_INVALID;
}

/* ---- one file ---- */

/* tests/golden/NAME.safetensors, which lies next to this file's folder. */
static te_safetensors *open_golden(te_ctx *te, const char *name) {
    char path[1024];
    const char *here = strstr(__FILE__, "quant/test_golden.c");
    snprintf(path, sizeof(path), "%.*sgolden/%s.safetensors", (int)(here - __FILE__), __FILE__, name);
    return te_safetensors_open(te, path);
}

static void check_file(te_ctx *te, const char *name) {
    te_safetensors *file = open_golden(te, name), *inputs = open_golden(te, "inputs");
    REQUIRE_OK(te);
    const char *count = te_safetensors_metadata(file, "cases");
    REQUIRE(count && atoi(count) > 0);
    for (int i = 0; i < atoi(count); i++) {
        golden_case c = {0};
        char key[32];
        snprintf(key, sizeof(key), "case %d", i);
        c.te = te;
        c.file = file;
        c.inputs = inputs;
        c.text = te_safetensors_metadata(file, key);
        REQUIRE(c.text != NULL);
        test_case("%s.safetensors %s: %s", name, key, c.text);
        te_scope_begin(te);
        te_result result = make_call(&c);
        CHECK_OK(te);
        CHECK_MSG(c.num_outputs > 0, "nothing to compare");
        for (int k = 0; k < c.num_outputs && result == TE_OK; k++) {
            const te_tensor *want = te_safetensors_read(file, c.output[k].name);
            if (flag(&c, "near")) /* one unit in the last place of 16 bits, for what lies on the edge of two of them; 1e-5: where products of up to 20 cancel */
                CHECK_CLOSE(c.output[k].field, test_read(c.output[k].got), test_read(want), te_tensor_numel(want),
                            te_tensor_dtype(want) == TE_F32 ? number(&c, "near") : te_tensor_dtype(want) == TE_BF16 ? 0x1p-7 : 0x1p-10, te_tensor_dtype(want) == TE_F32 ? 0 : 1e-5);
            else CHECK_BYTES(c.output[k].field, bytes_of(c.output[k].got), bytes_of(want), te_tensor_bytes(want));
        }
        te_clear_error(te);
        te_scope_end(te);
    }
    te_safetensors_close(file);
    te_safetensors_close(inputs);
}

TE_TEST_DEVICES(golden_fp8) { check_file(te, "fp8"); }
TE_TEST_DEVICES(golden_delayed) { check_file(te, "delayed"); }
TE_TEST_DEVICES(golden_block) { check_file(te, "block"); }
TE_TEST_DEVICES(golden_mxfp8) { check_file(te, "mxfp8"); }
TE_TEST_DEVICES(golden_nvfp4) { check_file(te, "nvfp4"); }
TE_TEST_DEVICES(golden_act) { check_file(te, "act"); }
