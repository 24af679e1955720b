/* cpu/rows.c: converts consecutive elements of any dtype to and from f32. Only this file of the CPU backend has a
 * switch over dtypes. It must not depend on operations. */

/* Converts f to an integer dtype. Truncates and saturates like the GPU; converts NaN to 0. */
static int64_t te__truncate(float f, te_dtype dtype) {
    if (f != f) return 0;
    if (dtype == TE_U8) return f <= 0.0f ? 0 : f >= 255.0f ? 255 : (int64_t)f;
    if (dtype == TE_I16) return f <= -32768.0f ? INT16_MIN : f >= 32767.0f ? INT16_MAX : (int64_t)f;
    if (dtype == TE_I32) return f <= -2147483648.0f ? INT32_MIN : f >= 2147483648.0f ? INT32_MAX : (int64_t)f;
    return f <= -9223372036854775808.0f ? INT64_MIN : f >= 9223372036854775808.0f ? INT64_MAX : (int64_t)f;
}

/* Each entry is X(dtype, C type, p[i] as f32, in[i] as the dtype). f32 and e2m1 have no entry: f32 is only
 * copied, and e2m1 has two elements in a byte. */
#define TE__ROW_LIST(X)                                                       \
    X(TE_F16, uint16_t, te__f16_to_f32(p[i]), te__f32_to_f16(in[i]))          \
    X(TE_BF16, uint16_t, te__bf16_to_f32(p[i]), te__f32_to_bf16(in[i]))       \
    X(TE_F8E4M3, uint8_t, te__e4m3_to_f32(p[i]), te__f32_to_e4m3(in[i]))      \
    X(TE_F8E5M2, uint8_t, te__e5m2_to_f32(p[i]), te__f32_to_e5m2(in[i]))      \
    X(TE_F8E8M0, uint8_t, te__e8m0_to_f32(p[i]), te__f32_to_e8m0(in[i]))      \
    X(TE_U8, uint8_t, (float)p[i], (uint8_t)te__truncate(in[i], TE_U8))       \
    X(TE_I16, int16_t, (float)p[i], (int16_t)te__truncate(in[i], TE_I16))     \
    X(TE_I32, int32_t, (float)p[i], (int32_t)te__truncate(in[i], TE_I32))     \
    X(TE_I64, int64_t, (float)p[i], te__truncate(in[i], TE_I64))

/* Converts the elements index .. index + n - 1 of an array of `dtype` to f32. */
static void te__load_row(const void *data, te_dtype dtype, int64_t index, int64_t n, float *out) {
    int64_t i;
    if (n == 0) return; /* the arrays may be NULL then */
    switch (dtype) {
    case TE_F32: memcpy(out, (const float *)data + index, (size_t)n * sizeof(float)); break;
    /* The low half of a byte holds the element with the even index. */
    case TE_F4E2M1: {
        const uint8_t *p = (const uint8_t *)data;
        for (i = 0; i < n; i++) out[i] = te__e2m1_to_f32((uint8_t)(p[(index + i) / 2] >> (index + i) % 2 * 4 & 15));
        break;
    }
#define TE__LOAD(name, type, load, store)              \
    case name: {                                       \
        const type *p = (const type *)data + index;    \
        for (i = 0; i < n; i++) out[i] = load;         \
        break;                                         \
    }
        TE__ROW_LIST(TE__LOAD)
#undef TE__LOAD
    default: break;
    }
}
static void te__store_row(void *data, te_dtype dtype, int64_t index, int64_t n, const float *in) {
    int64_t i;
    if (n == 0) return;
    switch (dtype) {
    case TE_F32: memcpy((float *)data + index, in, (size_t)n * sizeof(float)); break;
#define TE__STORE(name, type, load, store)             \
    case name: {                                       \
        type *p = (type *)data + index;                \
        for (i = 0; i < n; i++) p[i] = store;          \
        break;                                         \
    }
        TE__ROW_LIST(TE__STORE)
#undef TE__STORE
    default: break;
    }
}

/* Writes a row of a KV cache in E4M3: the codes of x[0 .. n - 1], and the factor 2^e that makes them numbers. Changes
 * x. The largest number gets a code of 224 to 448. A NaN keeps to its own element. */
static void te__store_coded_row(void *codes, int64_t at, void *factors, int64_t factor_at, int64_t n, float *x) {
    float top = 0.0f, by;
    uint8_t e;
    int64_t i;
    for (i = 0; i < n; i++) top = fmaxf(top, fabsf(x[i]));
    e = te__mxfp8_exponent(top, TE__E4M3_MAX_INVERSE);
    by = te__mxfp8_multiplier(e);
    for (i = 0; i < n; i++) x[i] *= by;
    te__store_row(codes, TE_F8E4M3, at, n, x);
    ((uint8_t *)factors)[factor_at] = e;
}

static bool te__is_nan_bits(float x) { return (te__f32_bits(x) & 0x7fffffffu) > 0x7f800000u; }
/* Replaces every NaN by the NaN that the GPU produces. Otherwise the bits of a NaN would depend on the processor. */
static void te__one_nan(float *v, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++)
        if (te__is_nan_bits(v[i])) v[i] = te__bits_f32(0x7fffffffu);
}

/* Returns one element as f32; slow. */
static float te__load_element(const void *data, te_dtype dtype, int64_t index) {
    float f = 0.0f;
    te__load_row(data, dtype, index, 1, &f);
    return f;
}
static int64_t te__load_index(const void *data, te_dtype dtype, int64_t index) {
    if (dtype == TE_I16) return ((const int16_t *)data)[index];
    return dtype == TE_I64 ? ((const int64_t *)data)[index] : (int64_t)((const int32_t *)data)[index];
}
