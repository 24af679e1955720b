/* moe/padding.c: the modules Fp8Padding and Fp8Unpadding, which add rows of zeros behind each group of rows and remove
 * them. This file must not depend on GEMMs. */

/* Returns align_size of the desc. If it is 0, returns the alignment of m's current recipe, or 16 without a recipe. */
static int64_t te__padding_align(const te_module *m) {
    const te_fp8_padding_desc *d = (const te_fp8_padding_desc *)m->state;
    te__autocast cast;
    if (d->align_size > 0) return d->align_size;
    if (!te__autocast_of(m, &cast)) return 16;
    return te__recipe_class_of(&cast.recipe)->align;
}
/* Removes the padding from the rows x. `map` is the index map that added the padding. */
static te_tensor *te__unmove(te_tensor *x, te_tensor *map) {
    te_moe_unpermute_desc desc = TE_ZERO;
    desc.map_type = TE_MAP_INDEX;
    return te_moe_unpermute(x, map, &desc);
}

static te_result te__padding_run(te_module *m, te_forward_args *args, bool unpad) {
    te_ctx *te = m->te;
    int n = ((const te_fp8_padding_desc *)m->state)->num_gemms, i;
    int64_t align, rows, before = 0, after = 0;
    te_tensor *x, *sizes, *padded, *offsets = NULL, *map;
    te_result result;
    x = te__moe_tokens(args->input, m->cls->name);
    if (!x) return te_error_code(te);
    align = te__padding_align(m);
    rows = te__rows(x);
    result = te__call_splits(m, args, n, rows, &sizes);
    if (result != TE_OK) return result;
    for (i = 0; args->m_splits && i < n; i++) {
        before += args->m_splits[i];
        after += te__round_up(args->m_splits[i], align);
    }
    if (args->m_splits && rows != (unpad ? after : before))
        return te__fail(te, TE_ERR_SHAPE, "%s: the input has %lld rows, and the groups%s %lld", m->cls->name,
                        (long long)rows, unpad ? ", padded," : "", (long long)(unpad ? after : before));
    if (!args->m_splits) { /* the sizes are only on the device, so the largest possible number of rows is taken */
        before = rows;
        after = rows + n * (align - 1);
    }
    padded = te__moe_splits(te, sizes, args->m_splits, n, align, &offsets);
    if (!padded) return te_error_code(te);
    if (!sizes) sizes = te__moe_splits(te, NULL, args->m_splits, n, 1, NULL);
    map = sizes ? te__chunk_map(te, sizes, NULL, offsets, before) : NULL;
    if (!map) return te_error_code(te);
    if (!unpad) args->outputs.m_splits = padded;
    for (i = 0; !unpad && args->m_splits && args->padded_m_splits && i < n; i++) /* last: both may be one array */
        args->padded_m_splits[i] = te__round_up(args->m_splits[i], align);
    return te__output(m, args,
                      unpad ? te__unmove(x, map) : te__permute("fp8_padding", x, map, 1, NULL, NULL, NULL, after));
}
static te_result te__pad_forward(te_module *m, te_forward_args *args) { return te__padding_run(m, args, false); }
static te_result te__unpad_forward(te_module *m, te_forward_args *args) { return te__padding_run(m, args, true); }
static const te_module_class te__pad_class = {"Fp8Padding", sizeof(te_fp8_padding_desc), te__pad_forward, NULL, NULL};
static const te_module_class te__unpad_class = {"Fp8Unpadding", sizeof(te_fp8_padding_desc), te__unpad_forward, NULL,
                                                NULL};

static te_module *te__padding_create(te_ctx *te, const te_fp8_padding_desc *desc, const te_module_class *cls,
                                     const char *who, const char *name) {
    if (!te || !te__has_desc(te, desc, who) || !te__num_gemms_ok(te, who, desc->num_gemms)) return NULL;
    if (desc->align_size < 0 || desc->align_size > INT32_MAX) { /* maps store row numbers as i32 */
        return te__no_module(te, TE_ERR_INVALID,
                             "%s: align_size is %lld; 0 takes the recipe's, and at most 2^31 - 1 is possible", who,
                             (long long)desc->align_size);
    }
    return te__module_built(te__module_with_desc(te, cls, desc, desc->name, name));
}
TE_API te_module *te_fp8_padding_create(te_ctx *te, const te_fp8_padding_desc *desc) {
    return te__padding_create(te, desc, &te__pad_class, "te_fp8_padding_create", "fp8_padding");
}
TE_API te_module *te_fp8_unpadding_create(te_ctx *te, const te_fp8_padding_desc *desc) {
    return te__padding_create(te, desc, &te__unpad_class, "te_fp8_unpadding_create", "fp8_unpadding");
}
