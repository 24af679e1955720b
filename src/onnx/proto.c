/* onnx/proto.c: the wire format of protobuf, and ONNX's ids of message fields and number formats. This file must not
 * depend on tensors, nor on what an operation computes.
 *
 * A message is a sequence of fields. A field is a key (field number and wire type) and a value. The value is a varint,
 * four bytes, or a length followed by that many bytes. A message inside another message is of the last kind, so its
 * length must be known before it is written. */

enum { TE__ONNX_OPSET = 19, TE__ONNX_IR = 9 }; /* Opset 19 is the first in which QuantizeLinear makes FP8 codes. IR
                                                * version 9 was released with opset 19. */

/* ONNX's numbers for element types, from TensorProto.DataType */
enum {
    TE__ONNX_FLOAT = 1,
    TE__ONNX_UINT8 = 2,
    TE__ONNX_INT16 = 5,
    TE__ONNX_INT32 = 6,
    TE__ONNX_INT64 = 7,
    TE__ONNX_BOOL = 9,
    TE__ONNX_FLOAT16 = 10,
    TE__ONNX_BFLOAT16 = 16,
    TE__ONNX_E4M3 = 17,
    TE__ONNX_E5M2 = 19
};
/* Returns ONNX's number for the element type `dtype`, or 0 if this opset does not have the type. */
static int te__onnx_type(te_dtype dtype) {
    switch (dtype) {
    case TE_F32: return TE__ONNX_FLOAT;
    case TE_F16: return TE__ONNX_FLOAT16;
    case TE_BF16: return TE__ONNX_BFLOAT16;
    case TE_F8E4M3: return TE__ONNX_E4M3;
    case TE_F8E5M2: return TE__ONNX_E5M2;
    case TE_U8: return TE__ONNX_UINT8;
    case TE_I16: return TE__ONNX_INT16;
    case TE_I32: return TE__ONNX_INT32;
    case TE_I64: return TE__ONNX_INT64;
    default: return 0;
    }
}

/* ---- fields ---- */

static void te__pb_varint(te__text *t, uint64_t v) {
    char byte[10];
    size_t n = 0;
    do {
        byte[n++] = (char)((v & 127) | (v > 127 ? 128 : 0));
        v >>= 7;
    } while (v);
    te__text_add(t, byte, n);
}
static void te__pb_int(te__text *t, int field, int64_t v) {
    te__pb_varint(t, (uint64_t)field << 3);
    te__pb_varint(t, (uint64_t)v);
}
/* Writes the key and the length of a field of n bytes. The caller must write the n bytes next. */
static void te__pb_head(te__text *t, int field, uint64_t n) {
    te__pb_varint(t, (uint64_t)field << 3 | 2);
    te__pb_varint(t, n);
}
static void te__pb_bytes(te__text *t, int field, const void *data, size_t n) {
    te__pb_head(t, field, n);
    te__text_add(t, (const char *)data, n);
}
static void te__pb_string(te__text *t, int field, const char *s) { te__pb_bytes(t, field, s, strlen(s)); }
/* Appends a message as a field and frees it. */
static void te__pb_message(te__text *t, int field, te__text *message) {
    if (message->oom) t->oom = true;
    te__pb_bytes(t, field, te__text_str(message), message->n);
    te__text_free(message);
}
static void te__pb_float(te__text *t, int field, float v) {
    uint32_t bits;
    char byte[4];
    int i;
    memcpy(&bits, &v, sizeof(bits));
    for (i = 0; i < 4; i++) byte[i] = (char)(bits >> (8 * i) & 255);
    te__pb_varint(t, (uint64_t)field << 3 | 5);
    te__text_add(t, byte, 4);
}

/* ---- attributes of a node: NodeProto.attribute (5) ---- */

/* ONNX's numbers for the types of attributes, from AttributeProto.AttributeType */
enum { TE__ONNX_ATTR_FLOAT = 1, TE__ONNX_ATTR_INT = 2, TE__ONNX_ATTR_STRING = 3, TE__ONNX_ATTR_INTS = 7 };

static te__text te__onnx_attr_begin(te__text *node, const char *name) {
    te__text a = TE_ZERO;
    a.memory = node->memory;
    te__pb_string(&a, 1, name);
    return a;
}
static void te__onnx_attr_int(te__text *node, const char *name, int64_t v) {
    te__text a = te__onnx_attr_begin(node, name);
    te__pb_int(&a, 3, v);
    te__pb_int(&a, 20, TE__ONNX_ATTR_INT);
    te__pb_message(node, 5, &a);
}
static void te__onnx_attr_float(te__text *node, const char *name, float v) {
    te__text a = te__onnx_attr_begin(node, name);
    te__pb_float(&a, 2, v);
    te__pb_int(&a, 20, TE__ONNX_ATTR_FLOAT);
    te__pb_message(node, 5, &a);
}
static void te__onnx_attr_string(te__text *node, const char *name, const char *v) {
    te__text a = te__onnx_attr_begin(node, name);
    te__pb_string(&a, 4, v);
    te__pb_int(&a, 20, TE__ONNX_ATTR_STRING);
    te__pb_message(node, 5, &a);
}
static void te__onnx_attr_ints(te__text *node, const char *name, int n, const int64_t *v) {
    te__text a = te__onnx_attr_begin(node, name);
    int i;
    for (i = 0; i < n; i++) te__pb_int(&a, 8, v[i]);
    te__pb_int(&a, 20, TE__ONNX_ATTR_INTS);
    te__pb_message(node, 5, &a);
}

/* ---- TensorProto and ValueInfoProto ---- */

/* Writes a TensorProto without its data. The data is its last field, so the caller must write `bytes` bytes next. */
static void te__onnx_put_tensor(te__text *t, const char *name, int type, int ndim, const int64_t *shape,
                                uint64_t bytes) {
    int i;
    for (i = 0; i < ndim; i++) te__pb_int(t, 1, shape[i]);
    te__pb_int(t, 2, type);
    te__pb_string(t, 8, name);
    te__pb_head(t, 9, bytes);
}
/* Writes an input or output of the graph. axis[i] is the name of a varying size, or NULL if the size is always
 * shape[i]. */
static void te__onnx_put_value(te__text *graph, int field, const char *name, int type, int ndim, const int64_t *shape,
                               const char *const *axis) {
    te__text value = TE_ZERO, kind = TE_ZERO, tensor = TE_ZERO, dims = TE_ZERO;
    int i;
    value.memory = kind.memory = tensor.memory = dims.memory = graph->memory;
    for (i = 0; i < ndim; i++) {
        te__text dim = TE_ZERO;
        dim.memory = graph->memory;
        if (axis[i]) te__pb_string(&dim, 2, axis[i]);
        else te__pb_int(&dim, 1, shape[i]);
        te__pb_message(&dims, 1, &dim);
    }
    te__pb_int(&tensor, 1, type);
    te__pb_message(&tensor, 2, &dims);
    te__pb_message(&kind, 1, &tensor);
    te__pb_string(&value, 1, name);
    te__pb_message(&value, 2, &kind);
    te__pb_message(graph, field, &value);
}
