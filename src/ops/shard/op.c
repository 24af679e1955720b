/* ops/shard/op.c: checks calls that quantize a slice of a matrix. This file must not depend on the backend. */

/* Checks that the slice lies inside the matrix, and that the size of the matrix fits 64 bits. */
static te_result te__shard_slice(te_ctx *te, const char *op, const te_tensor *x, int64_t rows, int64_t columns,
                                 int64_t start) {
    int64_t n = te__numel(x);
    if (rows < 0 || columns < 0 || (columns > 0 && rows > INT64_MAX / 4 / columns))
        return te__fail(te, TE_ERR_SHAPE, "%s: the matrix is [%lld, %lld]", op, (long long)rows, (long long)columns);
    if (start < 0 || start > rows * columns || n > rows * columns - start)
        return te__fail(te, TE_ERR_SHAPE, "%s: %lld elements from %lld on do not lie in [%lld, %lld]", op, (long long)n,
                        (long long)start, (long long)rows, (long long)columns);
    return TE_OK;
}

/* Checks that x has the format `dtype` and is [m, n]. */
static te_result te__shard_matrix(te_ctx *te, const char *op, const char *name, const te_tensor *x, te_dtype dtype,
                                  int64_t m, int64_t n) {
    char text[TE__SHAPE_TEXT];
    te_result result = te__want_dtype(te, op, name, x, dtype);
    if (result != TE_OK) return result;
    if (te__rows(x) != m || te__cols(x) != n)
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; [%lld, %lld] is needed", op, name, te__shape_text(x, text),
                        (long long)m, (long long)n);
    return TE_OK;
}

/* Sets *dtype and the shape [*m, *n] for the scales of one copy (row-wise or column-wise) of a matrix [rows,
 * columns]. */
static void te__shard_scale_shape(te_scaling scaling, bool columnwise, int64_t rows, int64_t columns, te_dtype *dtype,
                                  int64_t *m, int64_t *n) {
    int64_t along = columnwise ? rows : columns, across = columnwise ? columns : rows;
    if (scaling == TE_SCALING_BLOCK_2D) {
        *dtype = TE_F32;
        *m = te__div_up(across, 128);
        *n = te__round_up(te__div_up(along, 128), 4);
    } else if (scaling == TE_SCALING_MXFP8 && columnwise) { /* scales are not transposed, since codes are not */
        *dtype = TE_F8E8M0;
        *m = te__round_up(te__div_up(rows, 32), 4);
        *n = te__round_up(columns, 128);
    } else {
        *dtype = scaling == TE_SCALING_MXFP8 ? TE_F8E8M0 : TE_F8E4M3;
        *m = te__round_up(across, 128);
        *n = te__round_up(te__div_up(along, scaling == TE_SCALING_MXFP8 ? 32 : 16), 4);
    }
}
static te_result te__shard_scale(te_ctx *te, const char *op, const char *name, const te_tensor *x, te_scaling scaling,
                                 bool columnwise, int64_t rows, int64_t columns) {
    te_dtype dtype;
    int64_t m, n;
    te__shard_scale_shape(scaling, columnwise, rows, columns, &dtype, &m, &n);
    return te__shard_matrix(te, op, name, x, dtype, m, n);
}

/* ---- amax ---- */

static te_result te__check_shard_amax(te_ctx *te, te_op_shard_amax_args *a) {
    te_result result = te__shard_slice(te, "shard_amax", a->x, a->rows, a->columns, a->start);
    if (result != TE_OK) return result;
    if (a->tile_rows < 1 || a->tile_columns < 1)
        return te__fail(te, TE_ERR_INVALID, "shard_amax: tiles of %lld x %lld; 1 or more each", (long long)a->tile_rows,
                        (long long)a->tile_columns);
    a->tile_rows = te__min(a->tile_rows, te__max(1, a->rows));
    a->tile_columns = te__min(a->tile_columns, te__max(1, a->columns));
    return te__shard_matrix(te, "shard_amax", "amax", a->amax, TE_F32, te__div_up(a->rows, a->tile_rows),
                            te__div_up(a->columns, a->tile_columns));
}

/* ---- scales ---- */

static te_result te__check_shard_scales(te_ctx *te, te_op_shard_scales_args *a) {
    const char *op = "shard_scales";
    int64_t rows = a->rows, columns = a->columns, tile = a->scaling == TE_SCALING_BLOCK_2D ? 128 : 16;
    te_result result = TE_OK;
    if (a->scaling != TE_SCALING_BLOCK_2D && a->scaling != TE_SCALING_MXFP8 && a->scaling != TE_SCALING_NVFP4)
        return te__fail(
            te, TE_ERR_INVALID,
            "shard_scales: scaling %d; BLOCK_2D, MXFP8 and NVFP4 have scales by tile (te_op_scale_from_amax: TENSOR)",
            (int)a->scaling);
    if (rows < 0 || columns < 0 || (columns > 0 && rows > INT64_MAX / 4 / columns))
        return te__fail(te, TE_ERR_SHAPE, "shard_scales: the matrix is [%lld, %lld]", (long long)rows,
                        (long long)columns);
    if (a->dtype == TE_DTYPE_NONE) a->dtype = a->scaling == TE_SCALING_NVFP4 ? TE_F4E2M1 : TE_F8E4M3;
    if (a->scaling == TE_SCALING_NVFP4 ? a->dtype != TE_F4E2M1 : !te__is_fp8(a->dtype))
        return te__fail(te, TE_ERR_DTYPE,
                        "shard_scales: codes in %s; BLOCK_2D and MXFP8 go with e4m3 and e5m2, NVFP4 with e2m1",
                        te_dtype_name(a->dtype));
    if (!(a->epsilon >= 0.0f)) return te__fail(te, TE_ERR_INVALID, "shard_scales: epsilon is %g", (double)a->epsilon);
    if (a->amax_limit == 0.0f) a->amax_limit = FLT_MAX;
    if (!(a->amax_limit > 0.0f && a->amax_limit <= FLT_MAX))
        return te__fail(te, TE_ERR_INVALID,
                        "shard_scales: amax_limit is %g; the largest finite number of a float format is needed",
                        (double)a->amax_limit);
    if (!a->row_scale && !a->col_scale && !a->multiplier)
        return te__fail(te, TE_ERR_INVALID, "shard_scales: neither row_scale nor col_scale is given");
    if (a->multiplier && a->scaling != TE_SCALING_BLOCK_2D)
        return te__fail(te, TE_ERR_INVALID,
                        "shard_scales: multiplier belongs to BLOCK_2D; MXFP8 and NVFP4 take theirs from the scales");
    if (a->row_scale) result = te__shard_scale(te, op, "row_scale", a->row_scale, a->scaling, false, rows, columns);
    if (result == TE_OK && a->col_scale)
        result = te__shard_scale(te, op, "col_scale", a->col_scale, a->scaling, true, rows, columns);
    if (result == TE_OK && a->multiplier)
        result = te__shard_scale(te, op, "multiplier", a->multiplier, a->scaling, false, rows, columns);
    if (result != TE_OK) return result;
    if (a->scaling == TE_SCALING_MXFP8) {
        if (a->row_scale) result = te__shard_matrix(te, op, "amax", a->amax, TE_F32, rows, te__div_up(columns, 32));
        if (result == TE_OK && a->col_scale)
            result = te__shard_matrix(te, op, "amax_col", a->amax_col, TE_F32, te__div_up(rows, 32), columns);
    } else {
        result = te__shard_matrix(te, op, "amax", a->amax, TE_F32, te__div_up(rows, tile), te__div_up(columns, tile));
        if (result == TE_OK && a->scaling == TE_SCALING_NVFP4)
            result = te__want_numel(te, op, "amax_tensor", a->amax_tensor, 1);
    }
    return result;
}

static float te__shard_fp8_max(te_dtype dtype) { return dtype == TE_F8E5M2 ? 57344.0f : 448.0f; }

/* ---- cast ---- */

/* Checks the format and the size of dst. */
static te_result te__shard_codes(te_ctx *te, const te_op_shard_cast_args *a) {
    char text[TE__SHAPE_TEXT];
    bool fp4 = a->scaling == TE_SCALING_NVFP4, transposed = a->scaling == TE_SCALING_TENSOR && a->columnwise;
    int64_t m = transposed ? a->columns : a->rows, n = transposed ? a->rows : a->columns, need = te__numel(a->x);
    if (fp4 ? a->dst->dtype != TE_F4E2M1 : !te__is_fp8(a->dst->dtype))
        return te__fail(te, TE_ERR_DTYPE, "shard_cast: dst is %s; NVFP4 goes with e2m1, all others with e4m3 and e5m2",
                        te_dtype_name(a->dst->dtype));
    if (!a->flat) {
        if (te__rows(a->dst) == m && te__cols(a->dst) >= n) return TE_OK;
        return te__fail(te, TE_ERR_SHAPE, "shard_cast: dst is %s; %lld rows of at least %lld columns are needed",
                        te__shape_text(a->dst, text), (long long)m, (long long)n);
    }
    if (transposed)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "shard_cast: a flat slice of a transposed copy is in no order; cast into the row-wise copy, or "
                        "into a whole transposed one");
    if (fp4 && need > 0) need += a->start % 2;
    if (te__numel(a->dst) < need || (fp4 && te__rows(a->dst) > 1 && te__cols(a->dst) % 2 != 0))
        return te__fail(te, TE_ERR_SHAPE, "shard_cast: flat dst is %s; [%lld] or more is needed",
                        te__shape_text(a->dst, text), (long long)need);
    return TE_OK;
}

static te_result te__check_shard_cast(te_ctx *te, te_op_shard_cast_args *a) {
    const char *op = "shard_cast";
    te_result result = te__shard_slice(te, op, a->x, a->rows, a->columns, a->start);
    if (result != TE_OK) return result;
    if (a->scaling != TE_SCALING_TENSOR && a->scaling != TE_SCALING_BLOCK_2D && a->scaling != TE_SCALING_MXFP8 &&
        a->scaling != TE_SCALING_NVFP4)
        return te__fail(te, TE_ERR_INVALID,
                        "shard_cast: scaling %d; TENSOR, BLOCK_2D, MXFP8 and NVFP4 are possible (1 x 128 blocks are no "
                        "format of weights)",
                        (int)a->scaling);
    if (a->columnwise && a->scaling != TE_SCALING_TENSOR && a->scaling != TE_SCALING_MXFP8)
        return te__fail(te, TE_ERR_INVALID,
                        "shard_cast: columnwise goes with TENSOR and MXFP8; other column-wise copies are transposes of "
                        "the gathered rows (te_op_transpose)");
    if (a->amax && a->scaling != TE_SCALING_TENSOR)
        return te__fail(te, TE_ERR_INVALID, "shard_cast: amax goes with TENSOR; te_op_shard_amax gives those of tiles");
    if (a->multiplier && a->scaling != TE_SCALING_BLOCK_2D)
        return te__fail(te, TE_ERR_INVALID, "shard_cast: multiplier goes with BLOCK_2D");
    result = te__shard_codes(te, a);
    if (result == TE_OK && a->scaling == TE_SCALING_TENSOR) {
        result = te__want_dtype(te, op, "scale", a->scale, TE_F32);
        if (result == TE_OK) result = te__want_numel(te, op, "scale", a->scale, 1);
    } else if (result == TE_OK)
        result = te__shard_scale(te, op, "scale", a->scale, a->scaling, a->columnwise, a->rows, a->columns);
    if (result == TE_OK && a->multiplier)
        result = te__shard_scale(te, op, "multiplier", a->multiplier, a->scaling, false, a->rows, a->columns);
    if (result == TE_OK && a->scaling == TE_SCALING_NVFP4)
        result = te__want_numel(te, op, "amax_tensor", a->amax_tensor, 1);
    return result;
}
