/* te_onnx_export: the files have the structure that ONNX wants, every parameter is there once and byte for byte, the module stays as it was, and whatever has no form in ONNX is
 * refused by name. The Python test behind `make test-onnx` runs the files. */
#define _GNU_SOURCE
#include "../faults/purse.h"

#include <dirent.h>

/* ---- a reader of protobuf, of the fields that are asked for ---- */

typedef struct field {
    int number;
    uint64_t value;      /* a varint, or four bytes */
    const uint8_t *data; /* a field of bytes, `value` of them */
} field;
typedef struct message {
    const uint8_t *at, *end;
    bool damaged;
} message;

static uint64_t varint(message *m) {
    uint64_t v = 0;
    for (int shift = 0; m->at < m->end && shift < 64; shift += 7) {
        uint8_t byte = *m->at++;
        v |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return v;
    }
    m->damaged = true;
    return 0;
}
static bool next(message *m, field *f) {
    if (m->at >= m->end || m->damaged) return false;
    uint64_t key = varint(m);
    f->number = (int)(key >> 3);
    f->data = NULL;
    if ((key & 7) == 0) f->value = varint(m);
    else if ((key & 7) == 5 && m->end - m->at >= 4) memcpy(&f->value, m->at, 4), f->value &= 0xffffffffu, m->at += 4;
    else if ((key & 7) == 2) {
        f->value = varint(m);
        f->data = m->at;
        if (f->value > (uint64_t)(m->end - m->at)) m->damaged = true;
        else m->at += f->value;
    } else m->damaged = true;
    return !m->damaged;
}
static message inside(const field *f) { return (message){f->data, f->data + f->value, false}; }
static const char *text(const field *f) {
    char *s = (char *)test_alloc((size_t)f->value + 1);
    memcpy(s, f->data, (size_t)f->value);
    return s;
}

/* The content of a file. */
enum { MOST = 2048 };
typedef struct value {
    const char *name;
    int type, ndim;
    int64_t shape[8];
    const char *axis[8];
    const uint8_t *data;
    uint64_t bytes;
} value;
typedef struct node {
    const char *op;
    const char *in[16], *out[4];
    int num_in, num_out;
} node;
typedef struct file {
    int ir, opset;
    const char *producer, *name;
    node nodes[MOST];
    value weights[MOST], inputs[32], outputs[8];
    int num_nodes, num_weights, num_inputs, num_outputs;
    bool damaged;
} file;

static void read_tensor(message m, value *v) {
    field f;
    while (next(&m, &f))
        if (f.number == 1) v->shape[v->ndim++] = (int64_t)f.value;
        else if (f.number == 2) v->type = (int)f.value;
        else if (f.number == 8) v->name = text(&f);
        else if (f.number == 9) v->data = f.data, v->bytes = f.value;
}
static void read_value(message m, value *v) {
    field f;
    while (next(&m, &f)) {
        if (f.number == 1) v->name = text(&f);
        if (f.number != 2) continue;
        field kind, part, dim, size;
        message type = inside(&f);
        REQUIRE(next(&type, &kind) && kind.number == 1);
        message tensor = inside(&kind);
        while (next(&tensor, &part)) {
            if (part.number == 1) v->type = (int)part.value;
            if (part.number != 2) continue;
            message dims = inside(&part);
            while (next(&dims, &dim)) {
                message one = inside(&dim);
                REQUIRE(next(&one, &size));
                if (size.number == 2) v->axis[v->ndim] = text(&size);
                v->shape[v->ndim++] = size.number == 1 ? (int64_t)size.value : -1;
            }
        }
    }
}
static file *read_model(const char *path) {
    file *x = (file *)test_alloc(sizeof(file));
    size_t n;
    const uint8_t *bytes = test_read_file(path, &n);
    message model = {bytes, bytes + n, bytes == NULL};
    field f, g, h;
    while (next(&model, &f)) {
        message m = f.data ? inside(&f) : model;
        if (f.number == 1) x->ir = (int)f.value;
        if (f.number == 2) x->producer = text(&f);
        if (f.number == 8)
            while (next(&m, &g))
                if (g.number == 2) x->opset = (int)g.value;
        if (f.number != 7) continue;
        while (next(&m, &g)) {
            if (g.number == 2) x->name = text(&g);
            if (g.number == 5) read_tensor(inside(&g), &x->weights[x->num_weights++]);
            if (g.number == 11) read_value(inside(&g), &x->inputs[x->num_inputs++]);
            if (g.number == 12) read_value(inside(&g), &x->outputs[x->num_outputs++]);
            if (g.number != 1) continue;
            message c = inside(&g);
            node *y = &x->nodes[x->num_nodes++];
            while (next(&c, &h))
                if (h.number == 1) y->in[y->num_in++] = text(&h);
                else if (h.number == 2) y->out[y->num_out++] = text(&h);
                else if (h.number == 4) y->op = text(&h);
            x->damaged |= c.damaged;
        }
        x->damaged |= m.damaged;
    }
    x->damaged |= model.damaged;
    return x;
}
static int count_of(const file *x, const char *op) {
    int n = 0;
    for (int i = 0; i < x->num_nodes; i++) n += !strcmp(x->nodes[i].op, op);
    return n;
}
static const value *weight_of(const file *x, const char *name) {
    const value *found = NULL;
    for (int i = 0; i < x->num_weights; i++)
        if (!strcmp(x->weights[i].name, name)) {
            CHECK_MSG(!found, "the weight %s is there twice", name);
            found = &x->weights[i];
        }
    return found;
}

/* Names are made once and before they are read; every node reads something. */
static void check_order(const file *x) {
    const char **known = (const char **)test_alloc(sizeof(char *) * 4 * MOST);
    int n = 0;
    for (int i = 0; i < x->num_inputs; i++) known[n++] = x->inputs[i].name;
    for (int i = 0; i < x->num_weights; i++) known[n++] = x->weights[i].name;
    for (int i = 0; i < x->num_nodes; i++) {
        const node *y = &x->nodes[i];
        CHECK_MSG(y->num_in > 0 && y->num_out > 0, "node %d (%s) reads or makes nothing", i, y->op);
        for (int k = 0; k < y->num_in; k++) {
            bool found = false;
            for (int j = 0; j < n && !found; j++) found = !strcmp(known[j], y->in[k]);
            CHECK_MSG(found, "node %d (%s) reads %s, which nothing has made before", i, y->op, y->in[k]);
        }
        for (int k = 0; k < y->num_out; k++) {
            for (int j = 0; j < n; j++) CHECK_MSG(strcmp(known[j], y->out[k]) != 0, "%s is made twice", y->out[k]);
            known[n++] = y->out[k];
        }
    }
    for (int i = 0; i < x->num_outputs; i++) {
        bool found = false;
        for (int j = 0; j < n && !found; j++) found = !strcmp(known[j], x->outputs[i].name);
        CHECK_MSG(found, "nothing makes the output %s", x->outputs[i].name);
    }
}
/* Called with every parameter: it is in the file once, in its format and shape, byte for byte. */
static bool check_parameter(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    static const int types[TE_DTYPE_COUNT] = {[TE_F32] = 1, [TE_F16] = 10, [TE_BF16] = 16};
    (void)m;
    if (kind != TE_ENTRY_PARAMETER) return true;
    const value *w = weight_of((const file *)user, path);
    CHECK_MSG(w != NULL, "the parameter %s is missing", path);
    if (!w) return true;
    CHECK_EQ_INT(w->type, types[te_tensor_dtype(x)]);
    CHECK_EQ_INT(w->ndim, te_tensor_ndim(x));
    for (int i = 0; i < w->ndim; i++) CHECK_EQ_INT(w->shape[i], te_tensor_shape(x)[i]);
    CHECK_EQ_INT(w->bytes, te_tensor_bytes(x));
    void *host = test_alloc(te_tensor_bytes(x) + 1);
    te_tensor_to_host(x, host);
    if (w->bytes == te_tensor_bytes(x)) CHECK_BYTES(path, w->data, host, te_tensor_bytes(x));
    return true;
}
static file *check_file(te_module *m, const char *path) {
    file *x = read_model(path);
    CHECK(!x->damaged);
    CHECK_EQ_INT(x->ir, 9);
    CHECK_EQ_INT(x->opset, 19);
    CHECK_STR(x->producer, "te.h");
    check_order(x);
    te_module_visit_tensors(m, check_parameter, x);
    return x;
}

static te_tensor *normal(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) { return te_tensor_normal(te, dtype, ndim, shape, 0, 1); }
static te_result export_of(te_module *m, te_tensor *x, const char *path) { return te_onnx_export(m, &(te_forward_args){.input = x}, path); }
static int files_in_folder(void) {
    DIR *d = opendir(test_dir());
    int n = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

/* ---- files ---- */

TE_TEST_DEVICES(onnx_of_a_linear) {
    static const te_dtype types[] = {TE_F32, TE_BF16, TE_F16};
    for (int i = 0; i < COUNT(types); i++) {
        test_case("%s", te_dtype_name(types[i]));
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 5, .gemm.params_dtype = types[i], .name = "projection"});
        const char *path = test_path("linear.onnx");
        CHECK_EQ_INT(export_of(m, normal(te, types[i], SHAPE(3, 2, 8)), path), TE_OK);
        REQUIRE_OK(te);
        file *x = check_file(m, path);
        const int casts = types[i] == TE_F32 ? 0 : 6; /* of input, weight and bias to f32, of the sum to its format; the output is read, and written */
        CHECK_STR(x->name, "projection");
        CHECK_EQ_INT(x->num_weights, 2);
        CHECK_EQ_INT(count_of(x, "MatMul"), 1);
        CHECK_EQ_INT(count_of(x, "Add"), 1);
        CHECK_EQ_INT(count_of(x, "Transpose"), 1);
        CHECK_EQ_INT(count_of(x, "Cast"), casts);
        CHECK_EQ_INT(x->num_nodes, 4 + casts); /* and the Identity that gives the output its name */
        CHECK_EQ_INT(x->num_inputs, 1);
        CHECK_STR(x->inputs[0].name, "input");
        CHECK_EQ_INT(x->inputs[0].ndim, 3);
        CHECK_STR(x->inputs[0].axis[0], "sequence");
        CHECK_STR(x->inputs[0].axis[1], "batch");
        CHECK_EQ_INT(x->inputs[0].shape[2], 8);
        CHECK_EQ_INT(x->num_outputs, 1);
        CHECK_STR(x->outputs[0].name, "out");
        CHECK_STR(x->outputs[0].axis[0], "sequence");
        CHECK_STR(x->outputs[0].axis[1], "batch");
        CHECK_EQ_INT(x->outputs[0].shape[2], 5);
        te_module_destroy(m);
    }
}

/* Names of sizes follow the order of dimensions that the attention has; keys have a length of their own. Layers share their masks. */
TE_TEST_DEVICES(onnx_of_layers) {
    const te_attn_options heads = {.num_attention_heads = 4, .num_gqa_groups = 2, .qkv_format = TE_BSHD};
    te_module *list[2];
    for (int i = 0; i < 2; i++)
        list[i] = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 32, .ffn_hidden_size = 48, .attention = heads, .gemm.params_dtype = TE_F32});
    te_module *m = te_sequential_create(te, list, 2);
    const char *path = test_path("layers.onnx");
    te_rotary_desc rotary = {.base = 500};
    CHECK_EQ_INT(te_onnx_export(m, &(te_forward_args){.input = normal(te, TE_F32, SHAPE(2, 5, 32)), .rotary = &rotary}, path), TE_OK);
    REQUIRE_OK(te);
    file *x = check_file(m, path);
    CHECK_STR(x->inputs[0].axis[0], "batch");
    CHECK_STR(x->inputs[0].axis[1], "sequence");
    CHECK_EQ_INT(count_of(x, "Softmax"), 2);
    CHECK_EQ_INT(count_of(x, "LayerNormalization"), 4);
    CHECK_EQ_INT(count_of(x, "LessOrEqual"), 1); /* the causal mask */
    CHECK_EQ_INT(count_of(x, "Cos"), 1);
    CHECK(weight_of(x, "1.self_attention.proj.weight") != NULL);
    te_module_destroy(m);

    m = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 32, .ffn_hidden_size = 48, .attention.num_attention_heads = 4, .layer_type = TE_LAYER_DECODER});
    te_forward_args args = {.input = normal(te, TE_BF16, SHAPE(5, 2, 32)), .encoder_output = normal(te, TE_BF16, SHAPE(5, 2, 32))};
    CHECK_EQ_INT(te_onnx_export(m, &args, path), TE_OK);
    REQUIRE_OK(te);
    x = check_file(m, path);
    CHECK_EQ_INT(x->num_inputs, 2);
    CHECK_STR(x->inputs[1].name, "encoder_output");
    CHECK_STR(x->inputs[1].axis[0], "sequence_kv");
    CHECK_STR(x->inputs[1].axis[1], "batch");
    te_module_destroy(m);
}

/* A bias that is returned is a parameter and an output, each under its name; a table that is used twice is there once. */
TE_TEST_DEVICES(onnx_of_shared_parameters) {
    const char *path = test_path("shared.onnx");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 5, .gemm.return_bias = true});
    CHECK_EQ_INT(export_of(m, normal(te, TE_BF16, SHAPE(6, 8)), path), TE_OK);
    REQUIRE_OK(te);
    file *x = check_file(m, path);
    CHECK_EQ_INT(x->num_outputs, 2);
    CHECK_STR(x->outputs[1].name, "output_bias");
    CHECK_STR(x->inputs[0].axis[0], "batch");
    te_module_destroy(m);
    m = te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = 24, .hidden_size = 16, .intermediate_size = 32, .num_hidden_layers = 1, .num_attention_heads = 2, .tie_word_embeddings = true});
    CHECK_EQ_INT(export_of(m, te_tensor_zeros(te, TE_I32, SHAPE(2, 5)), path), TE_OK);
    REQUIRE_OK(te);
    x = check_file(m, path);
    CHECK_EQ_INT(x->inputs[0].type, 6); /* int32 */
    CHECK_EQ_INT(count_of(x, "Gather"), 1);
    int tables = 0;
    for (int i = 0; i < x->num_weights; i++) tables += x->weights[i].bytes == 24 * 16 * 2;
    CHECK_EQ_INT(tables, 1);
    te_module_destroy(m);
}

/* Delayed scaling: the scale that the module has; two FP8 operands, each quantized and decoded. The module, its scales and the random state are as before. */
TE_TEST_DEVICES(onnx_keeps_scales) {
    te_recipe recipe = te_recipe_delayed_scaling();
    te_autocast_desc autocast = {.recipe = &recipe};
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 32, .out_features = 16});
    te_tensor *x = normal(te, TE_BF16, SHAPE(16, 2, 32));
    const char *path = test_path("fp8.onnx");
    for (int fresh = 1; fresh >= 0; fresh--) {
        float scale[3] = {1, 1, 1}, after[3], history[3 * 1024], history_after[3 * 1024];
        uint64_t seed, offset, seed_after, offset_after;
        test_case(fresh ? "a module that has never run" : "a module that has run");
        if (!fresh) {
            te_autocast_begin(te, &autocast);
            te_forward(m, x);
            te_autocast_end(te);
            te_tensor_to_f32(te_module_parameter(m, "fp8_scale_fwd"), scale);
            te_tensor_to_f32(te_module_parameter(m, "fp8_amax_history_fwd"), history);
            CHECK(scale[0] != 1 && scale[1] != 1);
        } else
            memset(history, 0, sizeof history);
        te_rng_get(te, &seed, &offset);
        te_autocast_begin(te, &autocast);
        CHECK_EQ_INT(export_of(m, x, path), fresh ? TE_ERR_STATE : TE_OK);
        if (fresh) CHECK_ERROR(te, TE_ERR_STATE, "\"linear\" has no scales yet");
        te_autocast_end(te);
        REQUIRE_OK(te);
        te_rng_get(te, &seed_after, &offset_after);
        CHECK(seed == seed_after && offset == offset_after);
        te_tensor_to_f32(te_module_parameter(m, "fp8_scale_fwd"), after);
        te_tensor_to_f32(te_module_parameter(m, "fp8_amax_history_fwd"), history_after);
        CHECK_BYTES("scales", after, scale, sizeof after);
        CHECK_BYTES("history", history_after, history, sizeof history);
        if (fresh) {
            CHECK_EQ_INT(files_in_folder(), 0);
            continue;
        }
        file *f = check_file(m, path);
        CHECK_EQ_INT(count_of(f, "QuantizeLinear"), 2);
        CHECK_EQ_INT(count_of(f, "DequantizeLinear"), 2);
        for (int i = 0, k = 0; i < f->num_nodes; i++) {
            if (strcmp(f->nodes[i].op, "QuantizeLinear") != 0) continue;
            const value *s = weight_of(f, f->nodes[i].in[1]), *zero = weight_of(f, f->nodes[i].in[2]);
            float got;
            REQUIRE(s && zero && s->bytes == 4);
            memcpy(&got, s->data, 4);
            CHECK_MSG(got == 1 / scale[k], "scale %d is %g, not %g", k, (double)got, 1 / (double)scale[k]);
            CHECK_EQ_INT(zero->type, 17); /* float8e4m3fn */
            CHECK_EQ_INT(zero->ndim, 0);
            k++;
        }
    }
    te_module_destroy(m);
}

/* A module that is stored quantized: codes and decoding; and of blocks, decoded weights. */
TE_TEST_DEVICES(onnx_of_stored_codes) {
    const char *path = test_path("stored.onnx");
    for (int block = 0; block < 2; block++) {
        te_recipe recipe = block ? te_recipe_mxfp8() : te_recipe_current_scaling();
        te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 32, .out_features = 64});
        te_quantized_model_init_end(te);
        te_tensor *plain = te_dequantize(te_module_parameter(m, "weight"), TE_BF16);
        uint16_t want[64 * 32];
        te_tensor_to_host(plain, want);
        CHECK_EQ_INT(export_of(m, normal(te, TE_BF16, SHAPE(16, 2, 32)), path), TE_OK);
        REQUIRE_OK(te);
        file *x = read_model(path);
        check_order(x);
        const value *codes = weight_of(x, "weight.row.data"), *decoded = weight_of(x, "weight.decoded");
        CHECK(!weight_of(x, "weight"));
        CHECK(block ? decoded && !codes : codes && !decoded);
        if (!block && codes) CHECK_EQ_INT(codes->type, 17);
        if (!block) CHECK_EQ_INT(count_of(x, "DequantizeLinear"), 1);
        CHECK_EQ_INT(count_of(x, "QuantizeLinear"), 0);
        if (block && decoded && decoded->bytes == sizeof want) CHECK_BYTES("decoded", decoded->data, want, sizeof want);
        te_module_destroy(m);
    }
}

/* The child runs twice, on its own result. */
static te_result ask_twice(te_module *m, te_forward_args *args) {
    te_module *child = te_module_child(m, 0);
    args->outputs.out = te_forward(child, te_forward(child, args->input));
    return te_error_code(te_module_ctx(m));
}
/* A weight that two calls read is decoded once, and its name is there once. */
TE_TEST_DEVICES(onnx_decodes_a_weight_once) {
    static const te_module_class twice = {.name = "Twice", .forward = ask_twice};
    const te_recipe recipes[] = {te_recipe_block_scaling(), te_recipe_mxfp8(), te_recipe_nvfp4()};
    const char *path = test_path("twice.onnx");
    for (int i = 0; i < COUNT(recipes); i++) {
        te_module *m = te_module_create(te, &twice, NULL);
        te_module_add_child(m, "linear", te_linear_create(te, &(te_linear_desc){.in_features = 128, .out_features = 128}));
        test_case("recipe %d", i);
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipes[i]});
        CHECK_EQ_INT(export_of(m, normal(te, TE_BF16, SHAPE(64, 2, 128)), path), TE_OK);
        te_autocast_end(te);
        REQUIRE_OK(te);
        file *x = read_model(path);
        check_order(x);
        CHECK(weight_of(x, "linear.weight.decoded") != NULL);
        CHECK_EQ_INT(count_of(x, "MatMul"), 2);
        int decoded = 0;
        for (int k = 0; k < x->num_weights; k++) {
            decoded += strstr(x->weights[k].name, "decoded") != NULL;
            CHECK(weight_of(x, x->weights[k].name) != NULL); /* once */
        }
        CHECK_EQ_INT(decoded, 1);
        te_module_destroy(m);
    }
}

/* One tensor as two inputs, and a parameter as an input: each stands in the file by itself. */
TE_TEST_DEVICES(onnx_tells_inputs_apart) {
    const char *path = test_path("apart.onnx");
    te_module *m = te_dot_product_attention_create(te, &(te_dot_product_attention_desc){.attention = {.num_attention_heads = 4, .kv_channels = 8}});
    te_tensor *q = normal(te, TE_F32, SHAPE(6, 2, 4, 8)), *k = normal(te, TE_F32, SHAPE(7, 2, 4, 8));
    CHECK_EQ_INT(te_onnx_export(m, &(te_forward_args){.input = q, .key = k, .value = k}, path), TE_OK);
    REQUIRE_OK(te);
    file *x = check_file(m, path);
    static const char *const names[] = {"input", "key", "value"};
    CHECK_EQ_INT(x->num_inputs, 3);
    for (int i = 0; i < x->num_inputs; i++) {
        int readers = 0;
        for (int n = 0; n < x->num_nodes; n++)
            for (int j = 0; j < x->nodes[n].num_in; j++) readers += !strcmp(x->nodes[n].in[j], names[i]);
        CHECK_MSG(readers > 0, "no node reads %s", names[i]);
    }
    te_module_destroy(m);
    m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 8, .gemm.params_dtype = TE_F32});
    CHECK_EQ_INT(export_of(m, te_module_parameter(m, "weight"), path), TE_OK);
    REQUIRE_OK(te);
    check_file(m, path);
    te_module_destroy(m);
}

/* Keys have positions of their own, and a padding mask of one sequence follows the batch. */
TE_TEST_DEVICES(onnx_of_one_sequence) {
    const char *path = test_path("one.onnx");
    te_module *m = te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = 32, .attention = {.num_attention_heads = 4, .attn_mask_type = TE_MASK_PADDING},
                                                                                             .gemm.params_dtype = TE_F32});
    te_rotary_desc rotary = {.positions = te_tensor_zeros(te, TE_I32, SHAPE(1, 5))}, rotary_key = {.positions = te_tensor_zeros(te, TE_I32, SHAPE(1, 5))};
    te_forward_args args = {.input = normal(te, TE_F32, SHAPE(5, 1, 32)), .rotary = &rotary, .rotary_key = &rotary_key};
    args.attention.attention_mask = te_tensor_zeros(te, TE_U8, SHAPE(1, 1, 1, 5));
    CHECK_EQ_INT(te_onnx_export(m, &args, path), TE_OK);
    REQUIRE_OK(te);
    file *x = check_file(m, path);
    static const struct {
        const char *name;
        int last;
    } want[] = {{"attention_mask", 3}, {"positions", 1}, {"positions_key", 1}};
    CHECK_EQ_INT(x->num_inputs, 4);
    for (int i = 0; i < COUNT(want); i++) {
        const value *v = &x->inputs[i + 1];
        CHECK_STR(v->name, want[i].name);
        CHECK(v->axis[0] && !strcmp(v->axis[0], "batch"));
        CHECK(v->axis[want[i].last] && !strcmp(v->axis[want[i].last], "sequence"));
    }
    te_module_destroy(m);
}

/* A table of angles is an input, whose sizes are the batch and the sequence where it has a row for each token; a table of more positions is fixed. A rotation of no channel leaves no node. */
TE_TEST_DEVICES(onnx_of_a_rotary_table) {
    const char *path = test_path("table.onnx");
    te_module *m = te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = 32, .attention = {.num_attention_heads = 4}, .gemm.params_dtype = TE_F32});
    te_rotary_desc rotary = {.freqs = normal(te, TE_F32, SHAPE(5, 2, 1, 6))}, key = {.freqs = normal(te, TE_F32, SHAPE(40, 1, 1, 8))};
    te_forward_args args = {.input = normal(te, TE_F32, SHAPE(5, 2, 32)), .rotary = &rotary, .rotary_key = &key};
    CHECK_EQ_INT(te_onnx_export(m, &args, path), TE_OK);
    REQUIRE_OK(te);
    file *x = check_file(m, path);
    CHECK_EQ_INT(x->num_inputs, 3);
    CHECK_STR(x->inputs[1].name, "freqs");
    CHECK_STR(x->inputs[1].axis[0], "sequence");
    CHECK_STR(x->inputs[1].axis[1], "batch");
    CHECK_STR(x->inputs[2].name, "freqs_key");
    CHECK(!x->inputs[2].axis[0] && !x->inputs[2].axis[1]);
    CHECK_EQ_INT(count_of(x, "Cos"), 4); /* both channels of a pair, of queries and of keys */
    rotary.positions = te_tensor_zeros(te, TE_I32, SHAPE(5));
    CHECK(te_onnx_export(m, &args, path) != TE_OK);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "freqs has angles of its own for each sequence, and positions chooses their rows");
    args.rotary = &(te_rotary_desc){.rotary_percent = 0.01f}, args.rotary_key = NULL;
    CHECK_EQ_INT(te_onnx_export(m, &args, path), TE_OK);
    REQUIRE_OK(te);
    CHECK_EQ_INT(count_of(check_file(m, path), "Cos"), 0);
    te_module_destroy(m);
}

/* Equal calls give equal bytes, and a hook of the program's is back in its place. */
static void count_calls(te_ctx *te, const te_trace *event, void *user) {
    (void)te, (void)event;
    ++*(int *)user;
}
TE_TEST_DEVICES(onnx_twice_is_the_same) {
    te_module *m = te_layernorm_mlp_create(te, &(te_layernorm_mlp_desc){.hidden_size = 16, .ffn_hidden_size = 24, .activation = TE_SWIGLU});
    te_tensor *x = normal(te, TE_BF16, SHAPE(5, 2, 16));
    size_t n[2];
    uint8_t *bytes[2];
    int calls = 0;
    te_set_trace(te, count_calls, &calls);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_INT(export_of(m, x, test_path("mlp.onnx")), TE_OK);
        bytes[i] = test_read_file(test_path("mlp.onnx"), &n[i]);
    }
    CHECK(n[0] == n[1] && memcmp(bytes[0], bytes[1], n[0]) == 0);
    CHECK_EQ_INT(calls, 0);
    te_forward(m, x);
    CHECK(calls > 0);
    te_set_trace(te, NULL, NULL);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- modules of the user's own ---- */

static te_result ask_cast(te_module *m, te_forward_args *args) {
    te_tensor *x = te_tensor_empty(te_module_ctx(m), TE_F32, 2, te_tensor_shape(args->input));
    te_tensor_copy(x, args->input);
    args->outputs.out = te_scale(x, 2);
    return te_error_code(te_module_ctx(m));
}
static te_result ask_choice(te_module *m, te_forward_args *args) {
    args->outputs.out = te_add(args->input, args->topk_weights);
    args->outputs.topk_indices = te_tensor_empty(te_module_ctx(m), TE_I64, 2, te_tensor_shape(args->input));
    te_tensor_copy(args->outputs.topk_indices, args->outputs.out);
    args->outputs.aux_loss = te_sum_all(args->outputs.out);
    return te_error_code(te_module_ctx(m));
}
/* Every field of the args has a value, and the bytes between them others in each run. */
static te_result ask_padding(te_module *m, te_forward_args *args) {
    static int byte;
    te_ctx *te = te_module_ctx(m);
    te_tensor *x = args->input;
    te_op_l2normalize_fwd_args norm;
    te_op_act_fwd_args act;
    byte = byte % 200 + 1;
    memset(&norm, byte, sizeof norm);
    memset(&act, byte, sizeof act);
    norm.x = x, norm.y = te_tensor_empty(te, TE_F32, 2, te_tensor_shape(x)), norm.rnorm = NULL, norm.eps = 0;
    te_op_l2normalize_fwd(te, &norm);
    act.x = norm.y, act.y = args->outputs.out = te_tensor_empty(te, TE_F32, 2, te_tensor_shape(x)), act.activation = TE_SILU, act.activation_params = (te_activation_params){0};
    act.scale = NULL, act.scale_inv = act.amax = act.col = NULL;
    te_op_act_fwd(te, &act);
    return te_error_code(te);
}
static te_tensor *own_head(te_tensor *q, te_tensor *k, te_epilogue epilogue) {
    te_ctx *te = te_tensor_ctx(q);
    const int64_t t = te_tensor_shape(q)[0], d = te_tensor_shape(q)[1];
    te_tensor *s = te_tensor_empty(te, TE_F32, SHAPE(t, t)), *p = te_tensor_empty(te, TE_F32, SHAPE(t, t)), *o = te_tensor_empty(te, TE_F32, SHAPE(t, d));
    te_op_gemm(te, &(te_op_gemm_args){.a = q, .b = k, .b_transposed = true, .d = s, .m = t, .n = t, .k = d, .epilogue = epilogue});
    te_op_softmax_fwd(te, &(te_op_softmax_fwd_args){.x = s, .y = p, .causal = true});
    te_op_gemm(te, &(te_op_gemm_args){.a = p, .b = k, .d = o, .m = t, .n = d, .k = t});
    return o;
}
/* Attention out of single operations, with something beside the product of queries and keys. */
static te_result ask_gelu_scores(te_module *m, te_forward_args *args) {
    args->outputs.out = own_head(args->input, te_scale(args->input, 2), TE_EPILOGUE_GELU);
    return te_error_code(te_module_ctx(m));
}
/* And two heads of it: the second one's keys lie in front of the first one's. */
static te_result ask_two_heads(te_module *m, te_forward_args *args) {
    const int64_t t = te_tensor_shape(args->input)[0], d = te_tensor_shape(args->input)[1];
    te_tensor *q[2] = {te_scale(args->input, 2), te_scale(args->input, 3)}, *k = te_tensor_empty(te_module_ctx(m), TE_F32, SHAPE(2 * t, d));
    for (int i = 0; i < 2; i++) te_tensor_copy(te_tensor_narrow(k, 0, i * t, t), args->input);
    te_tensor *o = own_head(q[0], te_tensor_narrow(k, 0, t, t), TE_EPILOGUE_NONE);
    args->outputs.out = te_add(o, own_head(q[1], te_tensor_narrow(k, 0, 0, t), TE_EPILOGUE_NONE));
    return te_error_code(te_module_ctx(m));
}
/* Ids that count from the end of a parameter's rows. */
static te_result ask_from_end(te_module *m, te_forward_args *args) {
    te_op_embedding_fwd_args a = {.ids = args->input, .table = te_module_parameter(m, "table"), .from_end = true};
    a.y = args->outputs.out = te_tensor_empty(te_module_ctx(m), TE_F32, SHAPE(te_tensor_shape(args->input)[0], te_tensor_shape(args->input)[1], 3));
    te_op_embedding_fwd(te_module_ctx(m), &a);
    return te_error_code(te_module_ctx(m));
}
TE_TEST_DEVICES(onnx_of_own_modules) {
    static const struct {
        te_module_class cls;
        const char *op; /* how often is it in the file? */
        int count;
    } own[] = {{{.name = "Cast", .forward = ask_cast}, "Cast", 2}, /* the graph's integers have 64 bits */
               {{.name = "Choice", .forward = ask_choice}, "Add", 1},
               {{.name = "Padding", .forward = ask_padding}, "Sigmoid", 1},
               {{.name = "GeluScores", .forward = ask_gelu_scores}, "Sigmoid", 1},
               {{.name = "TwoHeads", .forward = ask_two_heads}, "MatMul", 4},
               {{.name = "FromEnd", .forward = ask_from_end}, "Less", 2}}; /* than 0, and than the number of rows */
    const char *path = test_path("own.onnx");
    te_tensor *x = normal(te, TE_F32, SHAPE(4, 6)), *ids = te_tensor_zeros(te, TE_I32, SHAPE(4, 6));
    for (int i = 0; i < COUNT(own); i++) {
        te_module *m = te_module_create(te, &own[i].cls, NULL);
        test_case("%s", own[i].cls.name);
        if (i == 5) te_module_add_parameter(m, "table", normal(te, TE_F32, SHAPE(5, 3)));
        CHECK_EQ_INT(te_onnx_export(m, &(te_forward_args){.input = i == 0 || i == 5 ? ids : x, .topk_weights = i == 1 ? x : NULL}, path), TE_OK);
        REQUIRE_OK(te);
        file *y = check_file(m, path);
        CHECK_EQ_INT(count_of(y, own[i].op), own[i].count);
        CHECK_EQ_INT(y->num_outputs, i == 1 ? 3 : 1);
        if (i == 1) {
            CHECK_STR(y->outputs[1].name, "topk_indices");
            CHECK_STR(y->outputs[2].name, "aux_loss");
            CHECK_STR(y->inputs[1].name, "topk_weights");
            CHECK_STR(y->inputs[1].axis[0], "batch");
        }
        te_module_destroy(m);
    }
}

/* ---- refusals ---- */

static te_result ask_loss(te_module *m, te_forward_args *args) {
    te_ctx *te = te_module_ctx(m);
    int64_t rows = te_tensor_shape(args->input)[0];
    args->outputs.out = te_cross_entropy(args->input, te_tensor_zeros(te, TE_I32, SHAPE(rows)), NULL);
    return te_error_code(te);
}
/* The host makes a tensor of the size of the input. */
static te_result ask_host(te_module *m, te_forward_args *args) {
    const int64_t *shape = te_tensor_shape(args->input);
    float *host = test_floats(shape[0] * shape[1]);
    args->outputs.out = te_add(args->input, te_tensor_from_f32(te_module_ctx(m), TE_F32, 2, shape, host));
    return te_error_code(te_module_ctx(m));
}
/* The host writes over what an operation has made. */
static te_result ask_overwritten(te_module *m, te_forward_args *args) {
    te_tensor *y = te_scale(args->input, 2);
    te_tensor_copy_from_host(y, test_floats(te_tensor_numel(y)));
    args->outputs.out = te_scale(y, 3);
    return te_error_code(te_module_ctx(m));
}
/* Another call for more rows: of the same operation, with other tensors. */
static te_result ask_more(te_module *m, te_forward_args *args) {
    te_tensor *y = te_scale(args->input, 2);
    args->outputs.out = te_tensor_shape(args->input)[0] > 4 ? te_scale(y, 3) : te_add(y, y);
    return te_error_code(te_module_ctx(m));
}
/* A size that is no product: a row more than the input has. */
static te_result ask_affine(te_module *m, te_forward_args *args) {
    te_tensor *list[2];
    list[0] = args->input;
    list[1] = te_tensor_narrow(args->input, 0, 0, 1);
    args->outputs.out = te_concat(list, 2, 0);
    return te_error_code(te_module_ctx(m));
}
/* An operation that writes a list of tensors, in place. */
static te_result ask_list(te_module *m, te_forward_args *args) {
    te_tensor *list[1];
    list[0] = te_scale(args->input, 2);
    te_op_multi_scale(te_module_ctx(m), &(te_op_multi_scale_args){.in = (const te_tensor *const *)list, .out = list, .num_tensors = 1, .scale = 3});
    args->outputs.out = te_scale(list[0], 5);
    return te_error_code(te_module_ctx(m));
}
/* Codes whose scale is not there. */
static te_result ask_codes(te_module *m, te_forward_args *args) {
    te_ctx *te = te_module_ctx(m);
    args->outputs.out = te_tensor_empty(te, TE_F8E4M3, 2, te_tensor_shape(args->input));
    return te_op_fp8_quantize(te, &(te_op_fp8_quantize_args){.x = args->input, .row = args->outputs.out, .scale = te_tensor_full(te, TE_F32, SHAPE(1), 3)});
}
/* The gradient of an operation whose forward pass has a form. */
static te_result ask_gradient(te_module *m, te_forward_args *args) {
    te_ctx *te = te_module_ctx(m);
    args->outputs.out = te_tensor_empty(te, TE_F32, 2, te_tensor_shape(args->input));
    return te_op_softcap(te, &(te_op_softcap_args){.x = args->input, .dy = args->input, .y = args->outputs.out, .cap = 2});
}
/* Attention to the codes of a cache. */
static te_result ask_cache(te_module *m, te_forward_args *args) {
    te_ctx *te = te_module_ctx(m);
    te_tensor *codes = te_tensor_zeros(te, TE_F8E4M3, SHAPE(1, 4, 1, 6)), *of_rows = te_tensor_zeros(te, TE_F8E8M0, SHAPE(1, 4, 1));
    te_tensor *y = te_attention(te_tensor_view(args->input, 4, (const int64_t[]){1, -1, 1, 6}), codes, codes, &(te_attn_desc){.format = TE_BSHD, .rule = {.mask = TE_MASK_NONE, .k_factors = of_rows, .v_factors = of_rows}});
    args->outputs.out = te_tensor_view(y, 2, (const int64_t[]){-1, 6});
    return te_error_code(te);
}
TE_TEST_DEVICES(onnx_refuses_what_a_graph_cannot) {
    static const struct {
        te_module_class cls;
        const char *needle;
    } own[] = {{{.name = "Loss", .forward = ask_loss}, "cross_entropy_fwd"},
               {{.name = "Host", .forward = ask_host}, "[4, 6], and [8, 6] at larger inputs"},
               {{.name = "Overwritten", .forward = ask_overwritten}, "a collective or the host"},
               {{.name = "List", .forward = ask_list}, "multi_scale of \"List\": it writes a list of tensors"},
               {{.name = "Codes", .forward = ask_codes}, "the output \"out\" is codes, e4m3"},
               {{.name = "Gradient", .forward = ask_gradient}, "softcap of \"Gradient\": it is that of a backward pass"},
               {{.name = "More", .forward = ask_more}, "call 2 of an operation is axpby"},
               {{.name = "Cache", .forward = ask_cache}, "keys and values that are codes of a cache"},
               {{.name = "Affine", .forward = ask_affine}, "of which copy has written a part"}};
    const char *path = test_path("refused.onnx");
    te_tensor *x = normal(te, TE_F32, SHAPE(4, 6));
    for (int i = 0; i < COUNT(own); i++) {
        te_module *m = te_module_create(te, &own[i].cls, NULL);
        test_case("%s", own[i].cls.name);
        CHECK_EQ_INT(export_of(m, x, path), TE_ERR_UNSUPPORTED);
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, own[i].needle);
        te_module_destroy(m);
    }
    CHECK_EQ_INT(files_in_folder(), 0);
}

/* A gate's choice has weights of its own and none of all experts: refused by name, where a NULL was read. */
TE_TEST_DEVICES(onnx_refuses_gates) {
    const te_moe_config c = {.dim = 16, .n_routed_experts = 4, .n_activated_experts = 2, .moe_inter_dim = 8, .dtype = TE_F32, .norm_topk_prob = true};
    te_module *gate = te_gate_create(te, &c, TE_DTYPE_NONE, NULL), *moe = te_moe_create(te, &c, &(te_moe_backend){.dispatcher = TE_DISPATCHER_TORCH, .experts = TE_EXPERTS_TORCH_MM});
    te_tensor *x = normal(te, TE_F32, SHAPE(6, 16));
    REQUIRE_OK(te);
    for (int i = 0; i < 2; i++) {
        CHECK(te_forward(i ? moe : gate, x) != NULL);
        CHECK_EQ_INT(export_of(i ? moe : gate, x, test_path("gate.onnx")), TE_ERR_UNSUPPORTED);
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "moe_router_fwd of \"gate\": it is the choice of a Gate");
    }
    CHECK_EQ_INT(files_in_folder(), 0);
    te_module_destroy(gate);
    te_module_destroy(moe);
}

/* Attention of each backend has the batch first, also where none of its operations says so (eager). */
TE_TEST_DEVICES(onnx_of_backends_of_attention) {
    const char *path = test_path("attention.onnx");
    for (te_attn_backend b = TE_ATTN_SDPA; b <= TE_ATTN_EAGER; b = (te_attn_backend)(b + 1)) {
        te_module *m = te_initialize_attn_module(te, b, &(te_attn_module_desc){.num_attention_heads = 4, .num_gqa_groups = 2, .num_qk_channels = 8, .softmax_scale = 0.3f});
        const te_forward_args args = {.input = normal(te, TE_F32, SHAPE(2, 5, 4, 8)), .key = normal(te, TE_F32, SHAPE(2, 5, 2, 8)), .value = normal(te, TE_F32, SHAPE(2, 5, 2, 8)),
                                      .attention.attn_mask_type = TE_MASK_NONE};
        test_case("backend %d", (int)b);
        CHECK_EQ_INT(te_onnx_export(m, &args, path), TE_OK);
        REQUIRE_OK(te);
        file *x = check_file(m, path);
        REQUIRE(x->num_inputs == 3);
        for (int i = 0; i < 3; i++) {
            CHECK_STR(x->inputs[i].axis[0], "batch");
            CHECK_STR(x->inputs[i].axis[1], i ? "sequence_kv" : "sequence");
        }
        te_module_destroy(m);
    }
}

/* The start of this slice is 2 with four tokens and 0 with twelve. An export must refuse it: a size of 0 is no multiple of any input size. */
static te_result ask_shrinking(te_module *m, te_forward_args *args) {
    const int64_t s = te_tensor_shape(args->input)[0];
    args->outputs.out = te_scale(te_tensor_narrow(args->input, 0, s < 6 ? 6 - s : 0, 2), 2);
    return te_error_code(te_module_ctx(m));
}
TE_TEST(onnx_refuses_what_shrinks) {
    static const te_module_class cls = {.name = "Shrinking", .forward = ask_shrinking};
    te_ctx *te = test_context("cpu");
    te_module *m = te_module_create(te, &cls, NULL);
    CHECK_EQ_INT(export_of(m, normal(te, TE_F32, SHAPE(4, 1, 6)), test_path("shrinking.onnx")), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "a size is 2 for the inputs that were given and 0 for larger ones");
    te_module_destroy(m);
}

TE_TEST_DEVICES(onnx_refuses_calls) {
    const char *path = test_path("refused.onnx");
    te_tensor *x = normal(te, TE_BF16, SHAPE(6, 2, 32));
    te_module *layer = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 32, .ffn_hidden_size = 48, .attention.num_attention_heads = 4, .hidden_dropout = 0.1f});
    te_module *grouped = te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = 2, .in_features = 32, .out_features = 16});
    te_module *core = te_dot_product_attention_create(te, &(te_dot_product_attention_desc){.attention = {.num_attention_heads = 4, .kv_channels = 8}});
    te_module *shared = te_linear_create(te, &(te_linear_desc){.in_features = 32, .out_features = 16, .parallel = {.tp_size = 2, .parallel_mode = TE_PARALLEL_ROW}});
    CHECK_OK(te);
    export_of(layer, x, path);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "dropout_add_fwd of \"layer\": it drops elements with probability 0.1; te_module_train(module, false)");
    te_module_train(layer, false);
    CHECK_EQ_INT(export_of(layer, x, path), TE_OK);
    remove(path);
    te_onnx_export(grouped, &(te_forward_args){.input = normal(te, TE_BF16, SHAPE(6, 32)), .m_splits = (const int64_t[]){2, 4}}, path);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "m_splits_tensor");
    te_module *lm = te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = 16, .hidden_size = 32, .intermediate_size = 32, .num_hidden_layers = 1, .num_attention_heads = 2});
    te_onnx_export(lm, &(te_forward_args){.input = te_tensor_zeros(te, TE_I32, SHAPE(1, 4)), .logits_to_keep = 2}, path);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "logits_to_keep is 2, a number of the host");
    te_module_destroy(lm);
    te_onnx_export(core, &(te_forward_args){.input = normal(te, TE_BF16, SHAPE(6, 2, 4, 8)), .key = normal(te, TE_BF16, SHAPE(5, 2, 4, 8)), .value = normal(te, TE_BF16, SHAPE(6, 2, 4, 8))}, path);
    CHECK(!te_ok(te)); /* the module itself refuses */
    te_clear_error(te);
    export_of(shared, x, path);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "shared by 2 ranks");
    te_onnx_export(layer, NULL, path);
    CHECK_ERROR(te, TE_ERR_INVALID, "inputs is NULL");
    te_onnx_export(layer, &(te_forward_args){0}, path);
    CHECK_ERROR(te, TE_ERR_INVALID, "inputs->input is NULL");
    export_of(layer, x, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "path is NULL");
    CHECK_EQ_INT(export_of(NULL, x, path), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_onnx_export: the module is NULL");
    export_of(layer, te_tensor_zeros(te, TE_BF16, SHAPE(0, 2, 32)), path);
    CHECK_ERROR(te, TE_ERR_INVALID, "no size may be 0");
    te_graph_begin(te);
    export_of(layer, x, path);
    CHECK_ERROR(te, TE_ERR_STATE, "a graph's capture");
    te_graph_destroy(te_graph_end(te));
    te_clear_error(te);
    CHECK_EQ_INT(files_in_folder(), 0);
    te_module_destroy(layer);
    te_module_destroy(grouped);
    te_module_destroy(core);
    te_module_destroy(shared);
}

/* ---- paths ---- */

TE_TEST_DEVICES(onnx_leaves_no_half_file) {
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 256, .out_features = 256});
    te_tensor *x = normal(te, TE_BF16, SHAPE(2, 2, 256));
    export_of(m, x, test_path("no/such/folder.onnx"));
    CHECK_ERROR(te, TE_ERR_IO, "no/such/folder.onnx");
    CHECK_EQ_INT(files_in_folder(), 0);
    export_of(m, x, test_dir());
    CHECK_ERROR(te, TE_ERR_IO, "");
    CHECK_EQ_INT(files_in_folder(), 0);
    te_module_destroy(m);
}
TE_TEST_DEVICES(onnx_full_disk_keeps_the_old_file) {
    const char *path = test_path("kept.onnx");
    size_t n, after_n;
    if (!test_limit_files(1 << 30)) SKIP("no limit on the size of files here");
    test_limit_files(-1);
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 256, .out_features = 256});
    te_tensor *x = normal(te, TE_BF16, SHAPE(2, 2, 256));
    CHECK_EQ_INT(export_of(m, x, path), TE_OK);
    uint8_t *before = test_read_file(path, &n);
    for (int limit = 16; limit < 100000; limit *= 8) {
        test_case("%d bytes fit", limit);
        CHECK(test_limit_files(limit));
        te_result result = export_of(m, x, path);
        test_limit_files(-1);
        CHECK_EQ_INT(result, TE_ERR_IO);
        CHECK_ERROR(te, TE_ERR_IO, "what was there before is untouched");
        uint8_t *after = test_read_file(path, &after_n);
        CHECK(n == after_n && memcmp(before, after, n) == 0);
        CHECK_EQ_INT(files_in_folder(), 1);
    }
    te_module_destroy(m);
}

/* Every request for memory is refused in turn: the export fails, nothing leaks, no file is there, and the module's scales are as before. */
TE_TEST(onnx_without_memory) {
    for (int device = 0; device < 2; device++) {
        purse *host = new_purse(), *memory = new_purse(), *of = device ? memory : host;
        te_ctx_desc desc = purse_desc(host, memory);
        te_ctx *te = test_context_with(&desc);
        REQUIRE(te != NULL);
        of->stays_out = device; /* the pool gives back what it has, and asks again */
        te_recipe recipe = te_recipe_delayed_scaling();
        te_autocast_desc autocast = {.recipe = &recipe};
        te_module *m = te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = 16, .out_features = 16});
        te_tensor *x = normal(te, TE_BF16, SHAPE(16, 1, 16));
        float scale[3], after[3];
        te_autocast_begin(te, &autocast);
        te_forward(m, x);
        te_autocast_end(te);
        REQUIRE_OK(te);
        te_tensor_to_f32(te_module_parameter(m, "fp8_scale_fwd"), scale);
        bool done = false;
        for (int64_t n = 1; n < 5000 && !done; n += test_every_of(17, 4)) {
            test_case("request %lld for memory of the %s", (long long)n, device ? "device" : "host");
            te_autocast_begin(te, &autocast);
            REQUIRE_OK(te);
            int64_t refused = of->refused;
            of->fail_at = of->calls + n;
            te_result result = export_of(m, x, test_path("memory.onnx"));
            of->fail_at = 0;
            done = of->refused == refused;
            te_clear_error(te);
            te_autocast_end(te);
            te_clear_error(te);
            CHECK_EQ_INT(result, done ? TE_OK : TE_ERR_OUT_OF_MEMORY);
            CHECK_EQ_INT(files_in_folder(), done ? 1 : 0);
            te_tensor_to_f32(te_module_parameter(m, "fp8_scale_fwd"), after);
            CHECK_BYTES("scales", after, scale, sizeof scale);
        }
        CHECK(done);
        remove(test_path("memory.onnx"));
        te_module_destroy(m);
    }
}
