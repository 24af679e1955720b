/* ops/mxfp8/cpu.c: the CPU's reference of the MXFP8 casts. The kernels write the same bytes on every GPU. This file
 * must not depend on the kernels. */

enum { TE__MX_COLUMNS = 128, TE__MX_TILE_GROUPS = TE__MX_COLUMNS / TE__MX_GROUP };

static void te__mx_clear(te_tensor *x) {
    if (x && te__numel(x) > 0) memset(te__data(x), 0, (size_t)te__numel(x));
}

/* ---- quantize ---- */

typedef struct te__mx_quantize_job {
    const te_op_mxfp8_quantize_args *a;
    int64_t m, n, ld, ldc, tiles_n;
    te__mx_layout row_layout, col_layout;
    te_dtype format;
    float max_inverse;
} te__mx_quantize_job;

/* Returns the maximum of `most` and |x|, both as the bits of a float. A NaN counts as 0. The function works
 * on integers, because the compiler vectorizes the maximum of integers. */
static int32_t te__mx_larger(int32_t most, float x) {
    int32_t a = (int32_t)(te__f32_bits(x) & 0x7fffffffu);
    a = a > 0x7f800000 ? 0 : a;
    return a > most ? a : most;
}

/* One tile of x, with zeros beyond the edges of x, and the E8M0 scales of its groups of 32 elements. */
typedef struct te__mx_tile {
    int64_t first_row, first_col;
    int rows, cols; /* rows and columns that exist */
    float v[TE__MX_GROUP][TE__MX_COLUMNS];
    uint8_t row_e[TE__MX_GROUP][TE__MX_TILE_GROUPS], col_e[TE__MX_COLUMNS];
} te__mx_tile;

static void te__mx_tile_load(const te__mx_quantize_job *j, te__mx_tile *t) {
    int32_t row_most[TE__MX_GROUP][TE__MX_TILE_GROUPS] = TE_ZERO, col_most[TE__MX_COLUMNS] = TE_ZERO, both;
    int r, g, i;
    memset(t->v, 0, sizeof(t->v));
    for (r = 0; r < t->rows; r++) {
        te__load_row(te__data(j->a->x), j->a->x->dtype, (t->first_row + r) * j->n + t->first_col, t->cols, t->v[r]);
        for (g = 0; g < TE__MX_TILE_GROUPS; g++)
            for (i = 0; i < TE__MX_GROUP; i++)
                row_most[r][g] = te__mx_larger(row_most[r][g], t->v[r][g * TE__MX_GROUP + i]);
        for (i = 0; i < TE__MX_COLUMNS; i++) col_most[i] = te__mx_larger(col_most[i], t->v[r][i]);
    }
    for (g = 0; g < TE__MX_TILE_GROUPS && j->a->two_dimensional; g++) {
        both = 0;
        for (r = 0; r < TE__MX_GROUP; r++) both = both > row_most[r][g] ? both : row_most[r][g];
        for (r = 0; r < TE__MX_GROUP; r++) row_most[r][g] = col_most[g * TE__MX_GROUP + r] = both;
    }
    for (r = 0; r < TE__MX_GROUP; r++)
        for (g = 0; g < TE__MX_TILE_GROUPS; g++)
            t->row_e[r][g] = te__mxfp8_exponent(te__bits_f32((uint32_t)row_most[r][g]), j->max_inverse);
    for (i = 0; i < TE__MX_COLUMNS; i++)
        t->col_e[i] = te__mxfp8_exponent(te__bits_f32((uint32_t)col_most[i]), j->max_inverse);
}

/* Writes the codes of row r of the tile to `copy`. The tile's zeros beyond the edges of x become the padding of
 * `copy`. */
static void te__mx_store_codes(const te__mx_quantize_job *j, const te__mx_tile *t, te_tensor *copy, int64_t ld, int r,
                               const float *multiplier) {
    float scaled[TE__MX_COLUMNS];
    int i;
    if (t->first_col >= ld) return;
    for (i = 0; i < TE__MX_COLUMNS; i++) scaled[i] = te__mul_f32(t->v[r][i], multiplier[i]);
    te__store_row(te__data(copy), j->format, (t->first_row + r) * ld + t->first_col,
                  te__min(TE__MX_COLUMNS, ld - t->first_col), scaled);
}

static void te__mx_tile_store_row(const te__mx_quantize_job *j, const te__mx_tile *t) {
    uint8_t *scale = te__u8_data(j->a->row_scale);
    float multiplier[TE__MX_COLUMNS];
    int r, g, i;
    for (r = 0; r < t->rows; r++) {
        for (g = 0; g < TE__MX_TILE_GROUPS; g++) {
            float f = te__mxfp8_multiplier(t->row_e[r][g]);
            for (i = 0; i < TE__MX_GROUP; i++) multiplier[g * TE__MX_GROUP + i] = f;
            if (g * TE__MX_GROUP < t->cols)
                scale[te__mx_scale_at(&j->row_layout, t->first_row + r, t->first_col / TE__MX_GROUP + g)] =
                    t->row_e[r][g];
        }
        te__mx_store_codes(j, t, j->a->row, j->ld, r, multiplier);
    }
}
static void te__mx_tile_store_col(const te__mx_quantize_job *j, const te__mx_tile *t) {
    uint8_t *scale = te__u8_data(j->a->col_scale);
    float multiplier[TE__MX_COLUMNS];
    int r, i;
    for (i = 0; i < TE__MX_COLUMNS; i++) {
        multiplier[i] = te__mxfp8_multiplier(t->col_e[i]);
        if (i < t->cols)
            scale[te__mx_scale_at(&j->col_layout, t->first_col + i, t->first_row / TE__MX_GROUP)] = t->col_e[i];
    }
    for (r = 0; r < t->rows; r++) te__mx_store_codes(j, t, j->a->col, j->ldc, r, multiplier);
}
static void te__mx_quantize_tiles(void *user, int64_t begin, int64_t end) {
    const te__mx_quantize_job *j = (const te__mx_quantize_job *)user;
    te__mx_tile t;
    int64_t tile;
    for (tile = begin; tile < end; tile++) {
        t.first_row = tile / j->tiles_n * TE__MX_GROUP;
        t.first_col = tile % j->tiles_n * TE__MX_COLUMNS;
        t.rows = (int)te__min(TE__MX_GROUP, j->m - t.first_row);
        t.cols = (int)te__max(0, te__min(TE__MX_COLUMNS, j->n - t.first_col));
        te__mx_tile_load(j, &t);
        if (j->a->row) te__mx_tile_store_row(j, &t);
        if (j->a->col) te__mx_tile_store_col(j, &t);
    }
}

static te_result te__cpu_mxfp8_quantize(te_ctx *te, const te_op_mxfp8_quantize_args *a) {
    te__mx_quantize_job j;
    if (a->noop && *te__f32_data(a->noop) == 1.0f) return TE_OK;
    j.a = a;
    j.m = te__rows(a->x);
    j.n = te__cols(a->x);
    j.ld = te__cols_of(a->row);
    j.ldc = te__cols_of(a->col);
    j.tiles_n = te__div_up(te__max(j.n, te__max(j.ld, j.ldc)), TE__MX_COLUMNS);
    j.row_layout = te__mx_layout_of(j.m, j.n, false, a->swizzled);
    j.col_layout = te__mx_layout_of(j.m, j.n, true, a->swizzled);
    j.format = a->row ? a->row->dtype : a->col->dtype;
    j.max_inverse = te__mx_max_inverse(j.format);
    te__mx_clear(a->row_scale);
    te__mx_clear(a->col_scale);
    te__parallel_for(te, te__div_up(j.m, TE__MX_GROUP) * j.tiles_n, 4, te__mx_quantize_tiles, &j);
    return TE_OK;
}

/* ---- dequantize ---- */

typedef struct te__mx_dequantize_job {
    const te_op_mxfp8_dequantize_args *a;
    int64_t m, n, ld, tiles_n;
    te__mx_layout layout;
} te__mx_dequantize_job;

static void te__mx_dequantize_tiles(void *user, int64_t begin, int64_t end) {
    const te__mx_dequantize_job *j = (const te__mx_dequantize_job *)user;
    const uint8_t *scale = te__u8_data(j->a->scale);
    float v[TE__MX_COLUMNS], factor[TE__MX_COLUMNS];
    int64_t tile, row, i;
    for (tile = begin; tile < end; tile++) {
        int64_t first_row = tile / j->tiles_n * TE__MX_GROUP, first_col = tile % j->tiles_n * TE__MX_COLUMNS;
        int64_t cols = te__min(TE__MX_COLUMNS, j->n - first_col);
        for (row = first_row; row < te__min(j->m, first_row + TE__MX_GROUP); row++) {
            if (j->a->columnwise) {
                for (i = 0; i < cols && row == first_row; i++)
                    factor[i] = te__e8m0_to_f32(scale[te__mx_scale_at(&j->layout, first_col + i, row / TE__MX_GROUP)]);
            } else {
                for (i = 0; i < cols; i++)
                    factor[i] =
                        i % TE__MX_GROUP
                            ? factor[i - 1]
                            : te__e8m0_to_f32(scale[te__mx_scale_at(&j->layout, row, (first_col + i) / TE__MX_GROUP)]);
            }
            te__load_row(te__data(j->a->q), j->a->q->dtype, row * j->ld + first_col, cols, v);
            for (i = 0; i < cols; i++) v[i] = te__mul_f32(v[i], factor[i]);
            te__one_nan(v, cols);
            te__store_row(te__data(j->a->y), j->a->y->dtype, row * j->n + first_col, cols, v);
        }
    }
}
static te_result te__cpu_mxfp8_dequantize(te_ctx *te, const te_op_mxfp8_dequantize_args *a) {
    te__mx_dequantize_job j;
    j.a = a;
    j.m = te__rows(a->y);
    j.n = te__cols(a->y);
    j.ld = te__cols(a->q);
    j.tiles_n = te__div_up(j.n, TE__MX_COLUMNS);
    j.layout = te__mx_layout_of(j.m, j.n, a->columnwise, a->swizzled);
    te__parallel_for(te, te__div_up(j.m, TE__MX_GROUP) * j.tiles_n, 4, te__mx_dequantize_tiles, &j);
    return TE_OK;
}
