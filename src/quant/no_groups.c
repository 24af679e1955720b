/* quant/no_groups.c: replaces quant/groups.c when TE_NO_MOE is defined. Then no tensor and no spec has groups of rows
 * (`sizes`). */

static int64_t te__padded_rows(int64_t rows, int64_t n, int64_t align) {
    (void)n, (void)align;
    return rows;
}
static te_tensor *te__row_groups(te_ctx *te, const te_tensor *sizes, int64_t rows) {
    (void)te, (void)sizes, (void)rows;
    return NULL;
}
static te_result te__unpad_groups(const te_tensor *x, const te_tensor *sizes, int64_t align, te_tensor *y) {
    (void)sizes, (void)align, (void)y;
    return te_error_code(x->te);
}
static bool te__copy_is_padded(const te__quant_copy *c, int which) {
    (void)c, (void)which;
    return false;
}
static te_tensor *te__padded_shell(const te_tensor *x, const te__quant_copy *c) {
    (void)c;
    return te__alias_any(x);
}
static te_result te__fill_copies(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                 const te_tensor *noop) {
    return spec->cls->fill(x, spec, row, col, noop);
}
