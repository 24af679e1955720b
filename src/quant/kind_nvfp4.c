/* quant/kind_nvfp4.c: the kind TE_QUANT_NVFP4. It is FP4 with an f32 amax of the whole tensor. Each 16 elements, or
 * each block of 16 x 16, have an E4M3 scale. */

static te_result te__nvfp4_resolve(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec, const char *who) {
    if (desc->nvfp4.rht == TE_ON && desc->quantization_2d == TE_ON)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: rht and quantization_2d; the transform mixes rows, so its blocks are 1 x 16: choose one",
            who);
    if (desc->nvfp4.row_scaled && desc->amax_group)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: row_scaled and amax_group; each row has an amax of its own, which no group shares: choose one", who);
    spec->two_dimensional = desc->quantization_2d == TE_ON;
    spec->swizzled = desc->optimize_for_gemm;
    spec->rht = desc->nvfp4.rht == TE_ON;
    spec->no_random_sign_mask = desc->nvfp4.no_random_sign_mask;
    spec->stochastic = desc->nvfp4.stochastic_rounding == TE_ON;
    spec->row_scaled = desc->nvfp4.row_scaled;
    spec->four_over_six = desc->nvfp4.four_over_six;
    spec->e4m3_max_256 = desc->nvfp4.e4m3_max_256;
    return TE_OK;
}

static void te__nvfp4_scale_shape(const te__quant_copy *c, bool columnwise, int64_t outer, int64_t inner,
                                  int64_t shape[2]) {
    (void)c, (void)columnwise;
    shape[0] = te__round_up(outer, 128);
    shape[1] = te__round_up(te__div_up(inner, 16), 4);
}

/* Fills the copies. If spec->amax is not NULL, it already has the amax of x. Without a group of ranks, spec->amax is
 * the amax tensor of the copies. With a group, spec->amax is a separate tensor. The group reduces spec->amax, and the
 * result is copied to the amax tensor of the copies. */
static te_result te__nvfp4_fill(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                const te_tensor *noop) {
    te_ctx *te = x->te;
    te_op_nvfp4_amax_args amax = TE_ZERO;
    te_op_nvfp4_quantize_args cast = TE_ZERO;
    te_op_amax_args by_rows = TE_ZERO;
    te_tensor *whole[2] = {NULL, NULL}; /* the amax tensors of the copies if there is a group of ranks, else NULL. They
                                         * are written only after the collective has succeeded */
    te_result result = TE_OK;
    int i;
    amax.x = x;
    amax.amax_row = row ? row->amax : NULL;
    amax.amax_col = col && !(row && col->amax == row->amax) ? col->amax : NULL;
    amax.rht = spec->rht;
    amax.no_random_sign_mask = spec->no_random_sign_mask;
    amax.noop = noop;
    if (spec->sizes) {
        cast.groups = amax.groups = te__row_groups(te, spec->sizes, te__rows(x));
        if (!amax.groups) return te__refuse(spec->group, TE__ALL_REDUCE, te_error_code(te));
    }
    for (i = 0; i < 2 && te__group_size(spec->group) > 1; i++) {
        te_tensor **slot = i ? &amax.amax_col : &amax.amax_row, *own = *slot;
        if (!own) continue;
        *slot = spec->amax ? spec->amax : te__empty_1d(te, TE_F32, te__numel(own));
        if (!*slot) return te__refuse(spec->group, TE__ALL_REDUCE, te_error_code(te));
        if (noop) result = te_tensor_copy(*slot, own);
        if (result != TE_OK) return te__refuse(spec->group, TE__ALL_REDUCE, result);
        whole[i] = own;
    }
    cast.measure = !whole[0] && !whole[1] && !spec->sizes && !spec->amax; /* measure: the cast measures the amaxes
                                                                           * itself */
    if (spec->sizes && row) { /* te_op_nvfp4_amax needs groups that begin at multiples of 16 rows. In a row-wise copy
                               * they may begin anywhere. So te_op_amax measures the amaxes */
        by_rows.x = x;
        by_rows.amax = amax.amax_row;
        by_rows.groups = amax.groups;
        result = te_op_amax(te, &by_rows);
    } else if (!cast.measure && !spec->amax)
        result = te_op_nvfp4_amax(te, &amax);
    if (result != TE_OK && (whole[0] || whole[1])) return te__refuse(spec->group, TE__ALL_REDUCE, result);
    for (i = 0; i < 2 && result == TE_OK; i++)
        if (whole[i]) result = te__all_reduce(spec->group, i ? amax.amax_col : amax.amax_row, TE_REDUCE_MAX);
    for (i = 0; i < 2 && result == TE_OK; i++)
        if (whole[i]) result = te_tensor_copy(whole[i], i ? amax.amax_col : amax.amax_row);
    if (result != TE_OK) return result;
    cast.x = x;
    te__cast_outputs(row, col, &cast.row, &cast.row_scale, &cast.col, &cast.col_scale);
    cast.amax_row = row ? row->amax : NULL;
    cast.amax_col = col ? col->amax : NULL;
    cast.two_dimensional = spec->two_dimensional;
    cast.rht = spec->rht;
    cast.no_random_sign_mask = spec->no_random_sign_mask;
    cast.stochastic_rounding = spec->stochastic;
    if (spec->stochastic) { /* stochastic rounding uses two offsets of the random state, one for each copy */
        te__draw draw = te__rng_draw(te, 2);
        cast.seed = draw.seed;
        cast.offset = draw.offset;
        cast.rng = draw.rng;
    }
    cast.four_over_six = spec->four_over_six;
    cast.e4m3_max_256 = spec->e4m3_max_256;
    cast.swizzled = spec->swizzled;
    cast.noop = noop;
    return te_op_nvfp4_quantize(te, &cast);
}

static te_tensor *te__nvfp4_decode(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype) {
    te_op_nvfp4_dequantize_args args = TE_ZERO;
    args.q = c->data;
    args.scale = c->scale;
    args.amax = c->amax;
    args.y = te__empty_like(x, dtype);
    if (args.y && x->quantized->sizes) {
        args.groups = te__row_groups(x->te, x->quantized->sizes, te__rows(x));
        if (!args.groups) return NULL;
    }
    args.columnwise = which == TE_COLUMNWISE;
    args.rht = c->rht;
    args.no_random_sign_mask = c->no_random_sign_mask;
    args.e4m3_max_256 = c->e4m3_max_256;
    args.swizzled = c->swizzled;
    return args.y && te_op_nvfp4_dequantize(x->te, &args) == TE_OK ? args.y : NULL;
}

/* Computes the column-wise scales for blocks of 16 x 16: col_scale[c][j] = row_scale[16 * j][c / 16]. */
static te_result te__nvfp4_turn_scales(te_ctx *te, const te__quant_copy *row, te__quant_copy *col, int64_t m,
                                       int64_t n) {
    int64_t tiles = te__div_up(m, 16), from_ld = row->scale->shape[1], to_ld = col->scale->shape[1], part;
    te_result result = te->device->clear(te, te__data(col->scale), te_tensor_bytes(col->scale));
    for (part = 0; part < 2 && result == TE_OK; part++) { /* part 0: the whole blocks of 16 columns; part 1: the
                                                           * remaining columns */
        int64_t first = part ? n / 16 : 0, shape[3];
        te_tensor *src, *dst;
        shape[0] = part ? n % 16 != 0 : n / 16;
        shape[1] = part ? n % 16 : 16;
        shape[2] = tiles;
        if (shape[0] == 0) continue;
        src = te__alias_as(row->scale, first, row->scale->dtype, 3, shape);
        dst = te__alias_as(col->scale, first * 16 * to_ld, col->scale->dtype, 3, shape);
        if (!src || !dst) return te_error_code(te);
        src->stride[0] = 1;
        src->stride[1] = 0;
        src->stride[2] = 16 * from_ld;
        dst->stride[0] = 16 * to_ld;
        dst->stride[1] = to_ld;
        result = te_tensor_copy(dst, src);
    }
    return result;
}

static float te__nvfp4_tensor_factor(float amax, bool e4m3_max_256) {
    return te__nvfp4_tensor_scale(amax, e4m3_max_256 ? 256.0f : 448.0f);
}

static const te__quant_class te__quant_nvfp4 = {TE_QUANT_NVFP4,
                                                "NVFP4",
                                                TE__FORM_CODES,
                                                TE__TENSOR_AMAX | TE__TRANSPOSED | TE__IN_PRODUCTS |
                                                    TE__COLUMNS_FOLLOW | TE__EXACT_CODES | TE__TAKES_AMAX,
                                                TE_F4E2M1,
                                                TE_F8E4M3,
                                                {TE_SCALING_NVFP4, TE_SCALING_NVFP4},
                                                {16, 16},
                                                "NVFP4 with 1 x 16 blocks, a transform, stochastic rounding, row "
                                                "scales, 4-over-6 or swizzled scales; slices need plain 16 x 16 blocks",
                                                te__nvfp4_resolve,
                                                te__nvfp4_scale_shape,
                                                te__nvfp4_fill,
                                                te__nvfp4_decode,
                                                te__nvfp4_turn_scales,
                                                te__nvfp4_tensor_factor,
                                                16,
                                                {0, 1},
                                                "quantization_2d",
                                                16};
