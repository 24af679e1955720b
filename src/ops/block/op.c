/* ops/block/op.c: FP8 quantization with one f32 scale for each block of 1 x 128 or 128 x 128 elements: checks, the
 * CPU's reference and launches. This file must not depend on how a GPU computes the scales. */

enum { TE__BLOCK = 128 };

/* ---- checks ---- */

/* Checks the row-wise or the column-wise copy of a quantized tensor. The codes are [rows, ld] with ld >= cols. The
 * scales are [ceil(cols / 128), rows] for 1 x 128 blocks, and [ceil(rows / 128), ceil(cols / 128)] for 128 x 128
 * blocks. The last dimension of the scales is rounded up to a multiple of 4, so that four scales are 16 aligned
 * bytes. */
static te_result te__block_check_copy(te_ctx *te, const char *op, const char *name, const char *scale_name,
                                      const te_tensor *q, const te_tensor *scale_inv, int64_t rows, int64_t cols,
                                      bool two_dimensional) {
    char text[TE__SHAPE_TEXT];
    int64_t scale_rows = two_dimensional ? te__div_up(rows, TE__BLOCK) : te__div_up(cols, TE__BLOCK);
    int64_t scale_cols = te__round_up(two_dimensional ? te__div_up(cols, TE__BLOCK) : rows, 4);
    te_result result = te__want_codes(te, op, name, q, rows, cols);
    if (result != TE_OK) return result;
    if (te__rows(scale_inv) != scale_rows || te__cols(scale_inv) != scale_cols)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: %s is %s; with %s blocks, %s of %lld rows and %lld columns has [%lld, %lld]", op,
                        scale_name, te__shape_text(scale_inv, text), two_dimensional ? "128 x 128" : "1 x 128", name,
                        (long long)rows, (long long)cols, (long long)scale_rows, (long long)scale_cols);
    return TE_OK;
}

static te_result te__check_block_quantize(te_ctx *te, te_op_block_quantize_args *a) {
    int64_t m = te__rows(a->x), n = te__cols(a->x);
    te_result result = TE_OK;
    if (!a->row && !a->col) return te__fail(te, TE_ERR_INVALID, "block_quantize: neither row nor col is given");
    if ((!a->row && a->row_scale_inv) || (!a->col && a->col_scale_inv))
        return te__fail(te, TE_ERR_INVALID, "block_quantize: %s_scale_inv is given without %s", a->row ? "col" : "row",
                        a->row ? "col" : "row");
    if (a->row)
        result = te__block_check_copy(te, "block_quantize", "row", "row_scale_inv", a->row, a->row_scale_inv, m, n,
                                      a->two_dimensional);
    if (result == TE_OK && a->col)
        result = te__block_check_copy(te, "block_quantize", "col", "col_scale_inv", a->col, a->col_scale_inv, n, m,
                                      a->two_dimensional);
    return result == TE_OK ? te__want_one_format(te, "block_quantize", "row", a->row, "col", a->col) : result;
}

static te_result te__check_block_dequantize(te_ctx *te, te_op_block_dequantize_args *a) {
    return te__block_check_copy(te, "block_dequantize", "q", "scale_inv", a->q, a->scale_inv,
                                a->columnwise ? te__cols(a->y) : te__rows(a->y),
                                a->columnwise ? te__rows(a->y) : te__cols(a->y), a->two_dimensional);
}

/* Returns the scale to use if fp8_max / amax overflows f32. As in TransformerEngine, it is the largest finite number of
 * x's dtype. */
static float te__block_limit(te_dtype dtype) {
    return dtype == TE_F16 ? 65504.0f : dtype == TE_BF16 ? te__bf16_to_f32(0x7f7f) : FLT_MAX;
}

/* ---- CPU: quantize ---- */

typedef struct te__block_job {
    const te_op_block_quantize_args *a;
    int64_t m, n, tiles_n;
    te_dtype format;
    float fp8_max, limit;
} te__block_job;

/* A tile of x, with zeros beyond the edges of x, and its scales. Rows of `v` are padded, so that a column uses
 * different cache sets. */
typedef struct te__block_tile {
    float v[TE__BLOCK][TE__BLOCK + 16];
    float row_scale[TE__BLOCK], col_scale[TE__BLOCK];
} te__block_tile;

/* Computes the scales of a tile's rows and columns. A NaN counts as 0. Maxima compare bits, because compilers vectorize
 * integer maxima. */
static void te__block_scales(const te__block_job *j, te__block_tile *t) {
    const te_op_block_quantize_args *a = j->a;
    int32_t row[TE__BLOCK], col[TE__BLOCK], largest = 0;
    int r, c;
    memset(col, 0, sizeof(col));
    for (r = 0; r < TE__BLOCK; r++) {
        int32_t most = 0;
        for (c = 0; c < TE__BLOCK; c++) {
            int32_t bits = (int32_t)(te__f32_bits(t->v[r][c]) & 0x7fffffffu);
            bits = bits > 0x7f800000 ? 0 : bits;
            most = bits > most ? bits : most;
            col[c] = bits > col[c] ? bits : col[c];
        }
        row[r] = most;
        largest = most > largest ? most : largest;
    }
    for (r = 0; r < TE__BLOCK; r++) {
        float row_amax = te__bits_f32((uint32_t)(a->two_dimensional ? largest : row[r]));
        float col_amax = te__bits_f32((uint32_t)(a->two_dimensional ? largest : col[r]));
        t->row_scale[r] = te__block_scale(row_amax, j->fp8_max, a->epsilon, j->limit, !a->fp32_scales);
        t->col_scale[r] = te__block_scale(col_amax, j->fp8_max, a->epsilon, j->limit, !a->fp32_scales);
    }
}

/* Writes a tile's codes and scales to the row-wise or the column-wise copy of x. The copy has `lines` rows of `length`
 * elements. The tile's first element is at row `line_block` * 128 and column `block` * 128 of the copy. Codes beyond
 * `length` are padding, which has no scales. */
static void te__block_store(const te__block_job *j, const te__block_tile *t, bool columnwise, int64_t line_block,
                            int64_t block, int64_t lines, int64_t length) {
    const te_tensor *q = columnwise ? j->a->col : j->a->row,
                    *scale_inv = columnwise ? j->a->col_scale_inv : j->a->row_scale_inv;
    const float *scale = columnwise ? t->col_scale : t->row_scale;
    float *inverse = te__f32_data(scale_inv), line[TE__BLOCK];
    int64_t first = line_block * TE__BLOCK, at = block * TE__BLOCK, ld = te__cols(q), scale_cols = te__cols(scale_inv),
            i, k;
    int64_t size = te__min(TE__BLOCK, ld - at), count = te__min(TE__BLOCK, lines - first);
    for (i = 0; i < count && size > 0; i++) {
        if (columnwise)
            for (k = 0; k < TE__BLOCK; k++) line[k] = t->v[k][i] * scale[i];
        else
            for (k = 0; k < TE__BLOCK; k++) line[k] = t->v[i][k] * scale[i];
        te__store_row(te__data(q), j->format, (first + i) * ld + at, size, line);
    }
    if (at >= length || first >= lines) return; /* padding has no scale */
    if (!j->a->two_dimensional) {
        for (i = 0; i < te__min(TE__BLOCK, scale_cols - first); i++)
            inverse[block * scale_cols + first + i] = i < count ? te__rcp_f32(scale[i]) : 0.0f;
        return;
    }
    inverse[line_block * scale_cols + block] = te__rcp_f32(scale[0]);
    if (at + TE__BLOCK >= length)
        for (k = block + 1; k < scale_cols; k++) inverse[line_block * scale_cols + k] = 0.0f;
}

static void te__block_quantize_tile(const te__block_job *j, int64_t tile_m, int64_t tile_n, te__block_tile *t) {
    const te_tensor *x = j->a->x;
    int64_t row = tile_m * TE__BLOCK, col = tile_n * TE__BLOCK;
    int64_t rows = te__min(TE__BLOCK, j->m - row), cols = te__min(TE__BLOCK, j->n - col), r;
    if (rows < TE__BLOCK || cols < TE__BLOCK) memset(t->v, 0, sizeof(t->v));
    for (r = 0; r < rows && cols > 0; r++) te__load_row(te__data(x), x->dtype, (row + r) * j->n + col, cols, t->v[r]);
    te__block_scales(j, t);
    if (j->a->row) te__block_store(j, t, false, tile_m, tile_n, j->m, j->n);
    if (j->a->col) te__block_store(j, t, true, tile_n, tile_m, j->n, j->m);
}
static void te__block_quantize_tiles(void *user, int64_t begin, int64_t end) {
    const te__block_job *j = (const te__block_job *)user;
    te__block_tile tile;
    int64_t i;
    for (i = begin; i < end; i++) te__block_quantize_tile(j, i / j->tiles_n, i % j->tiles_n, &tile);
}

/* Return the numbers of tiles along m and n. The tiles also cover the padding. */
static int64_t te__block_tiles_m(const te_op_block_quantize_args *a) {
    return te__div_up(te__max(te__rows(a->x), te__cols_of(a->col)), TE__BLOCK);
}
static int64_t te__block_tiles_n(const te_op_block_quantize_args *a) {
    return te__div_up(te__max(te__cols(a->x), te__cols_of(a->row)), TE__BLOCK);
}

static te_result te__cpu_block_quantize(te_ctx *te, const te_op_block_quantize_args *a) {
    te__block_job j;
    if (a->noop && *te__f32_data(a->noop) == 1.0f) return TE_OK;
    j.a = a;
    j.m = te__rows(a->x);
    j.n = te__cols(a->x);
    j.tiles_n = te__block_tiles_n(a);
    j.format = a->row ? a->row->dtype : a->col->dtype;
    j.fp8_max = j.format == TE_F8E4M3 ? 448.0f : 57344.0f;
    j.limit = te__block_limit(a->x->dtype);
    te__parallel_for(te, te__block_tiles_m(a) * j.tiles_n, 1, te__block_quantize_tiles, &j);
    return TE_OK;
}

/* ---- CPU: dequantize ---- */

/* Dequantizes bands `begin` to `end` - 1 of y, of 128 rows each. Column-wise codes are stored transposed. */
static void te__block_dequantize_bands(void *user, int64_t begin, int64_t end) {
    enum { ROWS = 16 };
    const te_op_block_dequantize_args *a = (const te_op_block_dequantize_args *)user;
    const float *scale = te__f32_data(a->scale_inv);
    const void *q = te__data(a->q);
    int64_t m = te__rows(a->y), n = te__cols(a->y), ld = te__cols(a->q), scale_cols = te__cols(a->scale_inv), band, row,
            col, r, c;
    float v[ROWS][TE__BLOCK], line[ROWS];
    for (band = begin; band < end; band++)
        for (row = band * TE__BLOCK; row < te__min(m, (band + 1) * TE__BLOCK); row += ROWS)
            for (col = 0; col < n; col += TE__BLOCK) {
                int64_t rows = te__min(ROWS, m - row), cols = te__min(TE__BLOCK, n - col), block = col / TE__BLOCK;
                if (!a->columnwise) {
                    for (r = 0; r < rows; r++) {
                        float s =
                            a->two_dimensional ? scale[band * scale_cols + block] : scale[block * scale_cols + row + r];
                        te__load_row(q, a->q->dtype, (row + r) * ld + col, cols, v[r]);
                        for (c = 0; c < cols; c++) v[r][c] *= s;
                    }
                } else {
                    for (c = 0; c < cols; c++) {
                        float s =
                            a->two_dimensional ? scale[block * scale_cols + band] : scale[band * scale_cols + col + c];
                        te__load_row(q, a->q->dtype, (col + c) * ld + row, rows, line);
                        for (r = 0; r < rows; r++) v[r][c] = line[r] * s;
                    }
                }
                for (r = 0; r < rows; r++) {
                    te__one_nan(v[r], cols);
                    te__store_row(te__data(a->y), a->y->dtype, (row + r) * n + col, cols, v[r]);
                }
            }
}
static te_result te__cpu_block_dequantize(te_ctx *te, const te_op_block_dequantize_args *a) {
    te_op_block_dequantize_args args = *a;
    te__parallel_for(te, te__div_up(te__rows(a->y), TE__BLOCK), 1, te__block_dequantize_bands, &args);
    return TE_OK;
}

/* ---- plans ---- */

static te_result te__cuda_plan_block_quantize(te__plan *p, const te_op_block_quantize_args *a) {
    int64_t tiles_m = te__block_tiles_m(a), tiles_n = te__block_tiles_n(a);
    te__block_quantize_kargs k = TE_ZERO;
    te__launch *l;
    if (tiles_m == 0 || tiles_n == 0) return TE_OK;
    k.x = te__data(a->x);
    k.m = te__rows(a->x);
    k.n = te__cols(a->x);
    if (a->row) {
        k.row = te__data(a->row);
        k.row_scale = te__f32_data(a->row_scale_inv);
        k.ld = te__cols(a->row);
        k.ld_row_scale = te__cols(a->row_scale_inv);
        k.vector_row = te__rows_aligned(a->row, k.ld, 16);
    }
    if (a->col) {
        k.col = te__data(a->col);
        k.col_scale = te__f32_data(a->col_scale_inv);
        k.ldc = te__cols(a->col);
        k.ld_col_scale = te__cols(a->col_scale_inv);
        k.vector_col = te__rows_aligned(a->col, k.ldc, 16);
    }
    k.noop = te__f32_data(a->noop);
    k.epsilon = a->epsilon;
    k.limit = te__block_limit(a->x->dtype);
    k.tiles_n = (unsigned)tiles_n;
    k.x_dt = a->x->dtype;
    k.y_dt = a->row ? a->row->dtype : a->col->dtype;
    k.two_dimensional = a->two_dimensional;
    k.power_of_two = !a->fp32_scales;
    k.vector_x = te__rows_aligned(a->x, k.n, 16);
    l = te__plan_with(p, "block", "block_quantize", tiles_m * tiles_n, 512, &k, sizeof(k));
    te__launch_option(l, "X_DT", k.x_dt);
    te__launch_option(l, "Y_DT", k.y_dt);
    p->native = p->sm >= 89;
    te__plan_why(
        p, p->native
               ? "one pass for scales and both copies; cvt instructions"
               : "one pass for scales and both copies; FP8 rounding in integer arithmetic, which gives the same bits");
    return TE_OK;
}

static te_result te__cuda_plan_block_dequantize(te__plan *p, const te_op_block_dequantize_args *a) {
    te__launch *l;
    te__block_dequantize_kargs *k;
    if (te__numel(a->y) == 0) return TE_OK;
    l = te__plan_launch(p, "block", a->columnwise ? "block_dequantize_col" : "block_dequantize");
    k = TE__KARGS(p, l, te__block_dequantize_kargs);
    k->q = te__data(a->q);
    k->scale_inv = te__f32_data(a->scale_inv);
    k->y = te__data(a->y);
    k->m = te__rows(a->y);
    k->n = te__cols(a->y);
    k->ld = te__cols(a->q);
    k->ld_scale = te__cols(a->scale_inv);
    k->q_dt = a->q->dtype;
    k->y_dt = a->y->dtype;
    k->two_dimensional = a->two_dimensional;
    k->vector_q = te__rows_aligned(a->q, k->ld, a->columnwise ? 16 : 8);
    k->vector_y = te__rows_aligned(a->y, k->n, 16);
    te__launch_option(l, "Q_DT", k->q_dt);
    te__launch_option(l, "Y_DT", k->y_dt);
    if (a->columnwise) {
        k->tiles_n = (unsigned)te__div_up(k->n, 128);
        te__launch_blocks(l, te__div_up(k->m, 128) * k->tiles_n, 256);
    } else {
        te__launch_blocks(l, te__div_up(k->m * te__div_up(k->n, 8), 1024), 256);
    }
    p->native = p->sm >= 89;
    te__plan_why(p, p->native ? "one pass; cvt instructions" : "one pass; FP8 decoded in integer arithmetic, exactly");
    return TE_OK;
}
