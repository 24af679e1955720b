/* ops/shard/cpu.c: the CPU's reference of the operations on slices of a matrix. The kernels give the same bytes. This
 * file must not depend on CUDA. */

enum { TE__SHARD_PIECE = 512, TE__SHARD_PARTS = 64 };

/* Finds the columns of a row that lie in the slice. They are *begin .. *end - 1. */
static void te__shard_columns(int64_t row, int64_t columns, int64_t start, int64_t n, int64_t *begin, int64_t *end) {
    *begin = te__max(0, start - row * columns);
    *end = te__min(columns, start + n - row * columns);
}

/* ---- amax ---- */

static void te__shard_amax_rows(void *user, int64_t begin, int64_t end) {
    const te_op_shard_amax_args *a = (const te_op_shard_amax_args *)user;
    int64_t tiles_n = te__cols(a->amax), n = te__numel(a->x), tile, row, from, to, at, i;
    float v[TE__SHARD_PIECE];
    for (tile = begin; tile < end; tile++) {
        float *amax = te__f32_data(a->amax) + tile * tiles_n;
        int64_t last = te__min(a->rows, (tile + 1) * a->tile_rows);
        for (i = 0; i < tiles_n; i++) amax[i] = 0.0f;
        for (row = tile * a->tile_rows; row < last; row++) {
            te__shard_columns(row, a->columns, a->start, n, &from, &to);
            for (at = from; at < to; at += TE__SHARD_PIECE) {
                int64_t size = te__min(TE__SHARD_PIECE, to - at), t = at / a->tile_columns,
                        left = (t + 1) * a->tile_columns - at;
                te__load_row(te__data(a->x), a->x->dtype, row * a->columns + at - a->start, size, v);
                for (i = 0; i < size; i++, left--) {
                    float magnitude = fabsf(v[i]);
                    if (left == 0) {
                        t++;
                        left = a->tile_columns;
                    }
                    if (magnitude > amax[t]) amax[t] = magnitude; /* a NaN never is */
                }
            }
        }
    }
}
static te_result te__cpu_shard_amax(te_ctx *te, const te_op_shard_amax_args *a) {
    te_op_shard_amax_args args = *a;
    if (te__numel(a->amax) == 0) return TE_OK;
    te__parallel_for(te, te__rows(a->amax), te__max(1, 32768 / te__max(1, a->tile_rows * a->columns)),
                     te__shard_amax_rows, &args);
    return TE_OK;
}

/* ---- scales ---- */

static float te__shard_block_scale(const te_op_shard_scales_args *a, float amax) {
    return te__block_scale(amax, te__shard_fp8_max(a->dtype), a->epsilon, a->amax_limit, !a->fp32_scales);
}
static void te__shard_scales_block(const te_op_shard_scales_args *a, te_tensor *out, bool columnwise, bool multiplier) {
    const float *amax = te__f32_data(a->amax);
    int64_t tiles_n = te__cols(a->amax), along = columnwise ? te__rows(a->amax) : tiles_n, i, j, m = te__rows(out),
            n = te__cols(out);
    float *scale = te__f32_data(out);
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            float s = j < along ? te__shard_block_scale(a, amax[columnwise ? j * tiles_n + i : i * tiles_n + j]) : 0.0f;
            scale[i * n + j] = j < along && !multiplier ? te__rcp_f32(s) : s;
        }
}
static void te__shard_scales_mxfp8(const te_op_shard_scales_args *a, const te_tensor *amaxes, te_tensor *out) {
    const float *amax = te__f32_data(amaxes);
    int64_t groups_m = te__rows(amaxes), groups_n = te__cols(amaxes), i, j, m = te__rows(out), n = te__cols(out);
    uint8_t *scale = te__u8_data(out);
    float inverse = a->dtype == TE_F8E5M2 ? TE__E5M2_MAX_INVERSE : TE__E4M3_MAX_INVERSE;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++)
            scale[i * n + j] = i < groups_m && j < groups_n ? te__mxfp8_exponent(amax[i * groups_n + j], inverse) : 0;
}
static void te__shard_scales_nvfp4(const te_op_shard_scales_args *a, te_tensor *out, bool columnwise) {
    const float *amax = te__f32_data(a->amax);
    int64_t tiles_n = te__cols(a->amax), along = columnwise ? te__rows(a->amax) : tiles_n,
            across = columnwise ? a->columns : a->rows;
    int64_t i, j, m = te__rows(out), n = te__cols(out);
    uint8_t *scale = te__u8_data(out);
    float tensor_scale =
        te__nvfp4_tensor_scale(*te__f32_data(a->amax_tensor), a->e4m3_max_256 ? 256.0f : 448.0f);
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            int64_t tile = columnwise ? j * tiles_n + i / 16 : i / 16 * tiles_n + j;
            scale[i * n + j] = i < across && j < along ? te__nvfp4_block_code(amax[tile], tensor_scale) : 0;
        }
}
static te_result te__cpu_shard_scales(te_ctx *te, const te_op_shard_scales_args *a) {
    (void)te;
    if (a->scaling == TE_SCALING_BLOCK_2D) {
        if (a->row_scale) te__shard_scales_block(a, a->row_scale, false, false);
        if (a->col_scale) te__shard_scales_block(a, a->col_scale, true, false);
        if (a->multiplier) te__shard_scales_block(a, a->multiplier, false, true);
    } else if (a->scaling == TE_SCALING_MXFP8) {
        if (a->row_scale) te__shard_scales_mxfp8(a, a->amax, a->row_scale);
        if (a->col_scale) te__shard_scales_mxfp8(a, a->amax_col, a->col_scale);
    } else {
        if (a->row_scale) te__shard_scales_nvfp4(a, a->row_scale, false);
        if (a->col_scale) te__shard_scales_nvfp4(a, a->col_scale, true);
    }
    return TE_OK;
}

/* ---- cast ---- */

typedef struct te__shard_job {
    const te_op_shard_cast_args *a;
    int64_t n, first_pair, pairs;
    float tensor_scale; /* for NVFP4 */
    float part[TE__SHARD_PARTS];
} te__shard_job;

/* Returns the multiplier of element (row, column). */
static float te__shard_multiplier(const te__shard_job *j, int64_t row, int64_t column) {
    const te_op_shard_cast_args *a = j->a;
    const void *scale = te__data(a->scale);
    int64_t ld = te__cols(a->scale);
    switch (a->scaling) {
    case TE_SCALING_BLOCK_2D:
        if (a->multiplier) return te__f32_data(a->multiplier)[row / 128 * ld + column / 128];
        return te__rcp_f32(((const float *)scale)[row / 128 * ld + column / 128]);
    case TE_SCALING_MXFP8:
        return te__mxfp8_multiplier(
            ((const uint8_t *)scale)[a->columnwise ? row / 32 * ld + column : row * ld + column / 32]);
    case TE_SCALING_NVFP4:
        return te__nvfp4_multiplier(((const uint8_t *)scale)[row * ld + column / 16], j->tensor_scale);
    case TE_SCALING_TENSOR: return *(const float *)scale;
    case TE_SCALING_BLOCK_1D: break; /* te__check_shard_cast refuses it */
    }
    return 0.0f;
}

/* Writes the codes of v[0 .. size - 1] to dst. v[0] is element (row, column) of the matrix; the others follow it in the
 * row. */
static void te__shard_put(const te__shard_job *j, int64_t row, int64_t column, int64_t size, const float *v) {
    const te_op_shard_cast_args *a = j->a;
    uint8_t *dst = te__u8_data(a->dst);
    int64_t ld = te__cols(a->dst), at = a->flat ? row * a->columns + column - a->start : row * ld + column, i;
    if (a->scaling == TE_SCALING_NVFP4) {
        at = a->flat ? at + a->start % 2 : row * te__round_up(ld, 2) + column;
        for (i = 0; i < size; i++, at++) {
            uint8_t *byte = dst + at / 2, code = te__f32_to_e2m1(v[i]);
            *byte = (uint8_t)(at % 2 ? (*byte & 0x0f) | code << 4 : (*byte & 0xf0) | code);
        }
    } else if (a->scaling == TE_SCALING_TENSOR && a->columnwise) {
        for (i = 0; i < size; i++) te__store_row(dst, a->dst->dtype, (column + i) * ld + row, 1, v + i);
    } else {
        te__store_row(dst, a->dst->dtype, at, size, v);
    }
}

static float te__shard_cast_row(const te__shard_job *j, int64_t row, float largest) {
    const te_op_shard_cast_args *a = j->a;
    /* the elements between two multiples of 16 share one multiplier */
    int64_t run = a->scaling == TE_SCALING_MXFP8 && a->columnwise ? 1 : 16;
    int64_t from, to, at, i;
    float v[TE__SHARD_PIECE];
    te__shard_columns(row, a->columns, a->start, j->n, &from, &to);
    for (at = from; at < to; at += TE__SHARD_PIECE) {
        int64_t size = te__min(TE__SHARD_PIECE, to - at);
        float multiplier = 0.0f;
        te__load_row(te__data(a->x), a->x->dtype, row * a->columns + at - a->start, size, v);
        for (i = 0; i < size; i++) {
            float magnitude = fabsf(v[i]);
            if (i == 0 || (at + i) % run == 0) multiplier = te__shard_multiplier(j, row, at + i);
            if (magnitude > largest) largest = magnitude;
            v[i] = te__mul_f32(v[i], multiplier);
        }
        te__shard_put(j, row, at, size, v);
    }
    return largest;
}
/* Casts the parts begin .. end - 1 of the work. A part has whole pairs of rows (2 i, 2 i + 1), so that no two threads
 * write to the same byte. In a flat dst with 4-bit codes, the last code of row 2 i and the first code of row 2 i + 1
 * can lie in one byte. */
static void te__shard_cast_parts(void *user, int64_t begin, int64_t end) {
    te__shard_job *j = (te__shard_job *)user;
    int64_t part, pair;
    for (part = begin; part < end; part++) {
        float largest = 0.0f;
        for (pair = j->pairs * part / TE__SHARD_PARTS; pair < j->pairs * (part + 1) / TE__SHARD_PARTS; pair++) {
            int64_t row = 2 * (j->first_pair + pair);
            largest = te__shard_cast_row(j, row, largest);
            if (row + 1 < j->a->rows) largest = te__shard_cast_row(j, row + 1, largest);
        }
        j->part[part] = largest;
    }
}
static te_result te__cpu_shard_cast(te_ctx *te, const te_op_shard_cast_args *a) {
    te__shard_job j;
    int i;
    j.a = a;
    j.n = te__numel(a->x);
    if (j.n == 0) return TE_OK;
    j.first_pair = a->start / a->columns / 2;
    j.pairs = (a->start + j.n - 1) / a->columns / 2 - j.first_pair + 1;
    j.tensor_scale = a->scaling == TE_SCALING_NVFP4 ? te__nvfp4_tensor_scale(*te__f32_data(a->amax_tensor),
                                                                             a->e4m3_max_256 ? 256.0f : 448.0f)
                                                    : 1.0f;
    te__parallel_for(te, TE__SHARD_PARTS, te__max(1, TE__SHARD_PARTS * 16384 / j.n), te__shard_cast_parts, &j);
    if (a->amax) {
        float *amax = te__f32_data(a->amax);
        for (i = 0; i < TE__SHARD_PARTS; i++)
            if (j.part[i] > *amax) *amax = j.part[i];
    }
    return TE_OK;
}
