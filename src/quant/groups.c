/* quant/groups.c: groups of rows that are quantized separately. The sizes of the groups are on the device. This file
 * must not depend on the meaning of the groups.
 *
 * The column-wise copy is padded with rows of zeros if group_rows of the quantizer's kind is above 1. In a padded copy
 * each group begins at a multiple of group_rows rows. So no block has rows of two groups. The row-wise copy is not
 * padded. */

/* Returns an upper limit of the number of rows after n groups are padded to multiples of `align` rows. */
static int64_t te__padded_rows(int64_t rows, int64_t n, int64_t align) {
    return (rows + n * (align - 1)) / align * align;
}

/* Returns the index of each row's group, i32 [rows]. */
static te_tensor *te__row_groups(te_ctx *te, const te_tensor *sizes, int64_t rows) {
    te_op_moe_chunk_map_args args = TE_ZERO;
    args.sizes = sizes;
    args.row_id_map = te__empty_1d(te, TE_I32, rows);
    args.chunk_numbers = true;
    return args.row_id_map && te_op_moe_chunk_map(te, &args) == TE_OK ? args.row_id_map : NULL;
}

/* Returns the sizes of the groups, rounded up to multiples of `align`. If `map` is not NULL, sets *map to each row's
 * padded index, i32 [rows]. */
static te_tensor *te__padded_sizes(te_ctx *te, const te_tensor *sizes, int64_t align, int64_t rows, te_tensor **map) {
    te_op_moe_splits_args splits = TE_ZERO;
    te_op_moe_chunk_map_args args = TE_ZERO;
    splits.sizes = sizes;
    splits.padded = te__empty_1d(te, TE_I64, te__numel(sizes));
    splits.offsets = map ? te__empty_1d(te, TE_I64, te__numel(sizes)) : NULL;
    splits.align = align;
    if (!splits.padded || (map && !splits.offsets) || te_op_moe_splits(te, &splits) != TE_OK) return NULL;
    if (!map) return splits.padded;
    args.sizes = sizes;
    args.offsets = splits.offsets;
    args.row_id_map = *map = te__empty_1d(te, TE_I32, rows);
    return *map && te_op_moe_chunk_map(te, &args) == TE_OK ? splits.padded : NULL;
}

/* Pads the groups of x [M, N] with rows of zeros to multiples of `align` rows. Sets *padded to the padded sizes. */
static te_tensor *te__pad_groups(const te_tensor *x, const te_tensor *sizes, int64_t align, te_tensor **padded) {
    te_op_moe_permute_args args = TE_ZERO;
    te_tensor *map;
    *padded = te__padded_sizes(x->te, sizes, align, te__rows(x), &map);
    if (!*padded) return NULL;
    args.x = te__as_matrix(x);
    args.row_id_map = map;
    args.topk = 1;
    args.y = te__empty_2d(x->te, x->dtype, te__padded_rows(te__rows(x), te__numel(sizes), align), te__cols(x));
    return args.x && args.y && te_op_moe_permute(x->te, &args) == TE_OK ? args.y : NULL;
}
/* Removes the padding: copies the rows of x, a matrix with padded groups, to y. Rows of y that belong to no group
 * become 0. */
static te_result te__unpad_groups(const te_tensor *x, const te_tensor *sizes, int64_t align, te_tensor *y) {
    te_ctx *te = x->te;
    te_op_moe_unpermute_args args = TE_ZERO;
    te_tensor *map;
    if (!te__padded_sizes(te, sizes, align, te__rows(y), &map)) return te_error_code(te);
    args.x = x;
    args.row_id_map = map;
    args.topk = 1;
    args.y = te__as_matrix(y);
    return args.y ? te_op_moe_unpermute(te, &args) : te_error_code(te);
}

/* Returns true if this copy has padded groups. The tensor must have groups. */
static bool te__copy_is_padded(const te__quant_copy *c, int which) {
    return which == TE_COLUMNWISE && c->cls->group_rows > 1;
}

/* Returns a second handle to x. It has the shape [rows, N] of the padded copy c, and the sizes of the padded groups. */
static te_tensor *te__padded_shell(const te_tensor *x, const te__quant_copy *c) {
    te_tensor *y = te__alias_any(x),
              *sizes = y ? te__padded_sizes(x->te, x->quantized->sizes, c->cls->group_rows, 0, NULL) : NULL;
    if (!sizes) return NULL;
    y->ndim = 2;
    y->shape[0] = te__padded_rows(te__rows(x), te__numel(sizes), c->cls->group_rows);
    y->shape[1] = te__cols(x);
    te_tensor_release(y->quantized->sizes);
    y->quantized->sizes = te_tensor_retain(sizes);
    return y;
}

/* Quantizes x into `row` and `col` with the function `fill` of the kind. Pads the groups of x for `col` if needed. */
static te_result te__fill_copies(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                 const te_tensor *noop) {
    te__quant_spec apart = *spec;
    te_ctx *te = x->te;
    te_result result;
    if (!spec->sizes || !col || spec->cls->group_rows <= 1) return spec->cls->fill(x, spec, row, col, noop);
    result = row ? spec->cls->fill(x, spec, row, NULL, noop) : TE_OK;
    if (result != TE_OK) return result;
    x = te__pad_groups(x, spec->sizes, spec->cls->group_rows, &apart.sizes);
    return x ? spec->cls->fill(x, &apart, NULL, col, noop) : te__refuse(spec->group, TE__ALL_REDUCE, te_error_code(te));
}
