/* ops/args.c: a list of the tensors in the args of each operation, and of how the operation uses each tensor. Also the
 * checks that all operations share. This file must not depend on what operations compute.
 * The list has one macro, TE__ARGS_<operation>, for each operation. These parts use the list:
 * - the common checks (te__args_check)
 * - the record of which tensors have been written (te__args_touch)
 * - captures (ops/record.c)
 * - te_query_args and the trace hook */

/* ---- the flags that the list uses ---- */

enum {
    /* The dtypes that an argument accepts. There is one bit for each te_dtype. */
    TE__AS_F32 = 1 << TE_F32,
    TE__AS_E4M3 = 1 << TE_F8E4M3,
    TE__AS_E8M0 = 1 << TE_F8E8M0,
    TE__AS_E2M1 = 1 << TE_F4E2M1,
    TE__AS_I32 = 1 << TE_I32,
    TE__AS_I64 = 1 << TE_I64,
    TE__AS_INDEX = TE__AS_I32 | TE__AS_I64,
    TE__AS_I16 = 1 << TE_I16,
    TE__AS_U8 = 1 << TE_U8,
    TE__AS_MASK = TE__AS_U8 | TE__AS_INDEX,
    TE__AS_FLOAT = TE__AS_F32 | 1 << TE_F16 | 1 << TE_BF16,
    TE__AS_CACHE = TE__AS_FLOAT | TE__AS_E4M3,
    TE__AS_AUX = TE__AS_FLOAT | TE__AS_MASK, /* tensors that expressions of the user read */
    TE__AS_FP8 = TE__AS_E4M3 | 1 << TE_F8E5M2,
    TE__AS_SCALE = TE__AS_F32 | TE__AS_E8M0 | TE__AS_E4M3, /* Scales. The operation itself checks that the dtype of the
                                                            * scales goes with the dtype of the codes. */
    /* all dtypes whose elements are whole bytes */
    TE__AS_BYTES = TE__AS_FLOAT | TE__AS_FP8 | TE__AS_E8M0 | 1 << TE_U8 | TE__AS_INDEX | TE__AS_I16,
    TE__AS_OPERAND = TE__AS_FLOAT | TE__AS_FP8 | TE__AS_E2M1,
    /* These flags say how the operation uses the tensor and what the operation allows. */
    TE__IN = TE_ARG_IN << 16,
    TE__OUT = TE_ARG_OUT << 16,
    TE__INOUT = TE__IN | TE__OUT, /* the old value is read, too */
    TE__OPT = 1 << 18,            /* may be NULL */
    TE__STRIDED = 1 << 19,        /* the common checks accept any strides */
    TE__SAME = 1 << 20,           /* An output and an input that both have this bit may be the same memory, because
                                   * element i is read before it is written. */
    TE__MEETS = 1 << 21,          /* an output and an input that both have this bit may overlap in any way */
    TE__TWIN = 1 << 22,           /* two outputs that both have this bit may be the same memory */
    TE__ONE = 1 << 23,            /* has one element, in any shape */
    /* Common pairs of a use and its dtypes. */
    TE__IN_FLOAT = TE__IN | TE__AS_FLOAT,
    TE__OUT_FLOAT = TE__OUT | TE__AS_FLOAT,
    TE__IN_F32 = TE__IN | TE__AS_F32,
    TE__OUT_F32 = TE__OUT | TE__AS_F32,
    TE__INOUT_F32 = TE__INOUT | TE__AS_F32,
    TE__IN_INDEX = TE__IN | TE__AS_INDEX,
    TE__IN_I32 = TE__IN | TE__AS_I32,
    TE__OUT_I32 = TE__OUT | TE__AS_I32
};
/* Flags that depend on other fields of the args. */
#define TE__NEED(condition) ((condition) ? 0 : TE__OPT)
#define TE__SUM (a->accumulate ? TE__INOUT : TE__OUT)
#define TE__MADE (a->noop ? TE__INOUT : TE__OUT) /* if `noop` is given, the device decides whether the output is
                                                  * written, so the old value may remain */
#define TE__KEPT (a->keep ? TE__INOUT : TE__MADE)
#define TE__MEASURED (a->measure ? TE__MADE : TE__IN)
/* Elements outside of the first `rows` rows and `cols` columns keep their values. So the old value counts as read. */
#define TE__PART(x, rows, cols) (a->x && (te__rows(a->x) > (rows) || te__cols(a->x) > (cols)) ? TE__IN : 0)
#define TE__AUX (a->epilogue == TE_EPILOGUE_GELU ? TE__OUT : TE__IN) | TE__NEED(a->epilogue == TE_EPILOGUE_DGELU)

/* ---- the list ---- */

/* T(field, flags) is a tensor. L(list, member, n, flags) is a list of n tensors: list[i], or list[i].member. Tests find
 * missing fields and wrong flags. */
#define TE__ARGS_copy(T, L) \
    T(src, TE__IN | TE__AS_BYTES | TE__STRIDED | TE__MEETS) T(dst, TE__OUT | TE__AS_BYTES | TE__STRIDED | TE__MEETS)
#define TE__ARGS_fill(T, L) T(dst, TE__OUT | TE__AS_BYTES)
#define TE__ARGS_random(T, L) T(dst, TE__OUT_FLOAT) T(rng, TE__IN | TE__AS_I64 | TE__OPT)
#define TE__ARGS_axpby(T, L) \
    T(x, TE__IN_FLOAT | TE__SAME) T(y, TE__IN_FLOAT | TE__SAME | TE__OPT) T(out, TE__OUT_FLOAT | TE__SAME) \
    T(alpha_device, TE__IN_F32 | TE__OPT | TE__ONE) T(divide_device, TE__IN_F32 | TE__OPT | TE__ONE)
#define TE__ARGS_mul(T, L) T(x, TE__IN_FLOAT | TE__SAME) T(y, TE__IN_FLOAT | TE__SAME) T(out, TE__OUT_FLOAT | TE__SAME)
#define TE__ARGS_row_dot(T, L) T(x, TE__IN_FLOAT) T(y, TE__IN_FLOAT) T(out, TE__OUT_FLOAT)
#define TE__ARGS_argmax(T, L) T(x, TE__IN_FLOAT) T(out, TE__OUT_I32)
#define TE__ARGS_sum(T, L) T(x, TE__IN_FLOAT) T(out, TE__OUT_F32 | TE__ONE)
#define TE__ARGS_column_sum(T, L) T(x, TE__IN_FLOAT) T(out, TE__SUM | TE__AS_FLOAT)
#define TE__ARGS_embedding_fwd(T, L) T(ids, TE__IN_INDEX) T(table, TE__IN_FLOAT) T(y, TE__OUT_FLOAT)
#define TE__ARGS_embedding_bwd(T, L) T(ids, TE__IN_INDEX) T(dy, TE__IN_FLOAT) T(dtable, TE__SUM | TE__AS_FLOAT)
#define TE__CACHE_FACTORS(T) /* of a cache in E4M3 */ \
    T(k_factors, TE__INOUT | TE__AS_E8M0 | TE__STRIDED | TE__OPT) \
    T(v_factors, TE__INOUT | TE__AS_E8M0 | TE__STRIDED | TE__OPT)
#define TE__GROUPS(T) T(groups, TE__IN_I32 | TE__OPT) /* the group of each row */
#define TE__ARGS_amax(T, L) \
    T(x, TE__IN_FLOAT) T(amax, TE__KEPT | TE__AS_F32 | TE__STRIDED) T(noop, TE__IN_F32 | TE__OPT | TE__ONE) \
    TE__GROUPS(T)
#define TE__ARGS_scale_from_amax(T, L) T(amax, TE__IN_F32) T(scale, TE__OUT_F32) T(scale_inv, TE__OUT_F32 | TE__OPT)
#define TE__ARGS_delayed_update(T, L) \
    L(amax_history, , a->count, TE__INOUT_F32) L(scale, , a->count, TE__INOUT_F32) T(reduced, TE__IN_F32 | TE__OPT)
#define TE__ARGS_delayed_gather(T, L) L(amax_history, , a->count, TE__IN_F32) T(amaxes, TE__OUT_F32)
#define TE__ARGS_fp8_quantize(T, L) \
    T(x, TE__IN_FLOAT) T(row, TE__MADE | TE__AS_FP8 | TE__OPT) T(col, TE__MADE | TE__AS_FP8 | TE__OPT) \
    T(scale, TE__IN_F32 | TE__STRIDED | TE__NEED(!a->current)) T(scale_inv, TE__MADE | TE__AS_F32 | TE__OPT) \
    T(amax, (a->current ? TE__MADE : TE__INOUT) | TE__AS_F32 | TE__STRIDED | TE__OPT) \
    T(noop, TE__IN_F32 | TE__OPT | TE__ONE) T(x_amax, TE__INOUT_F32 | TE__OPT) T(dbias, TE__OUT_FLOAT | TE__OPT) \
    TE__GROUPS(T)
#define TE__ARGS_FP8_DECODE(T) T(q, TE__IN | TE__AS_FP8) T(scale_inv, TE__IN_F32) T(y, TE__OUT_FLOAT)
#define TE__ARGS_fp8_dequantize(T, L) TE__ARGS_FP8_DECODE(T) TE__GROUPS(T)
#define TE__ARGS_transpose(T, L) \
    T(src, TE__IN | TE__AS_E2M1 | (TE__AS_BYTES & ~TE__AS_I64)) \
    T(dst, TE__OUT | TE__AS_E2M1 | (TE__AS_BYTES & ~TE__AS_I64))
#define TE__ARGS_block_quantize(T, L) \
    T(x, TE__IN_FLOAT) T(row, TE__MADE | TE__AS_FP8 | TE__OPT) \
    T(row_scale_inv, TE__MADE | TE__AS_F32 | TE__NEED(a->row)) T(col, TE__MADE | TE__AS_FP8 | TE__OPT) \
    T(col_scale_inv, TE__MADE | TE__AS_F32 | TE__NEED(a->col)) T(noop, TE__IN_F32 | TE__OPT | TE__ONE)
#define TE__ARGS_block_dequantize(T, L) TE__ARGS_FP8_DECODE(T)
#define TE__ARGS_mxfp8_quantize(T, L) \
    T(x, TE__IN_FLOAT) T(row, TE__MADE | TE__AS_FP8 | TE__OPT) T(row_scale, TE__MADE | TE__AS_E8M0 | TE__NEED(a->row)) \
    T(col, TE__MADE | TE__AS_FP8 | TE__OPT) T(col_scale, TE__MADE | TE__AS_E8M0 | TE__NEED(a->col)) \
    T(noop, TE__IN_F32 | TE__OPT | TE__ONE)
#define TE__ARGS_mxfp8_dequantize(T, L) T(q, TE__IN | TE__AS_FP8) T(scale, TE__IN | TE__AS_E8M0) T(y, TE__OUT_FLOAT)
#define TE__ARGS_shard_amax(T, L) T(x, TE__IN_FLOAT) T(amax, TE__OUT_F32)
#define TE__ARGS_shard_scales(T, L) \
    T(amax, TE__IN_F32 | TE__NEED(a->scaling != TE_SCALING_MXFP8 || a->row_scale)) \
    T(amax_col, TE__IN_F32 | TE__NEED(a->scaling == TE_SCALING_MXFP8 && a->col_scale)) \
    T(amax_tensor, TE__IN_F32 | TE__NEED(a->scaling == TE_SCALING_NVFP4)) \
    T(row_scale, TE__OUT | TE__AS_SCALE | TE__OPT) T(col_scale, TE__OUT | TE__AS_SCALE | TE__OPT) \
    T(multiplier, TE__OUT_F32 | TE__OPT)
#define TE__ARGS_shard_cast(T, L) \
    T(x, TE__IN_FLOAT) T(dst, TE__INOUT | TE__AS_FP8 | TE__AS_E2M1) T(scale, TE__IN | TE__AS_SCALE) \
    T(amax_tensor, TE__IN_F32 | TE__NEED(a->scaling == TE_SCALING_NVFP4)) T(amax, TE__INOUT_F32 | TE__OPT | TE__ONE) \
    T(multiplier, TE__IN_F32 | TE__OPT)
#define TE__ARGS_quant_error(T, L) \
    T(x, TE__IN_FLOAT) T(y, TE__IN_F32) T(limit, TE__IN_F32 | TE__OPT) T(counts, TE__OUT | TE__AS_I64) \
    T(sums, TE__OUT_F32)
#define TE__ARGS_nvfp4_amax(T, L) \
    T(x, TE__IN_FLOAT) T(amax_row, TE__KEPT | TE__AS_F32 | TE__OPT) T(amax_col, TE__KEPT | TE__AS_F32 | TE__OPT) \
    T(noop, TE__IN_F32 | TE__OPT | TE__ONE) TE__GROUPS(T)
/* Allows amax_row and amax_col to be one tensor (TE__TWIN). This needs the same values in the row-wise and the
 * column-wise copy, so no RHT. amax_row must be the amax of all values. */
#define TE__ONE_AMAX ((a->rht && a->col) || (a->amax_row && te__numel(a->amax_row) != 1) ? 0 : TE__TWIN)
#define TE__ARGS_nvfp4_quantize(T, L) \
    T(x, TE__IN_FLOAT) T(row, TE__MADE | TE__AS_E2M1 | TE__OPT) \
    T(row_scale, TE__MADE | TE__AS_E4M3 | TE__NEED(a->row)) T(col, TE__MADE | TE__AS_E2M1 | TE__OPT) \
    T(col_scale, TE__MADE | TE__AS_E4M3 | TE__NEED(a->col)) \
    T(amax_row, TE__MEASURED | TE__AS_F32 | TE__ONE_AMAX | TE__NEED(a->row || !a->amax_col)) \
    T(amax_col, TE__MEASURED | TE__AS_F32 | TE__ONE_AMAX | TE__OPT) T(rng, TE__IN | TE__AS_I64 | TE__OPT) \
    T(noop, TE__IN_F32 | TE__OPT | TE__ONE) TE__GROUPS(T)
#define TE__ARGS_nvfp4_dequantize(T, L) \
    T(q, TE__IN | TE__AS_E2M1) T(scale, TE__IN | TE__AS_E4M3) T(amax, TE__IN_F32) T(y, TE__OUT_FLOAT) TE__GROUPS(T)
#define TE__ARGS_gemm(T, L) \
    T(a, TE__IN | TE__AS_OPERAND | TE__STRIDED) T(b, TE__IN | TE__AS_OPERAND | TE__STRIDED) \
    T(d, TE__SUM | TE__PART(d, a->m, a->n) | TE__AS_FLOAT | TE__STRIDED) \
    T(scale_a, TE__IN | TE__AS_SCALE | TE__NEED(a->scaling_a != TE_SCALING_TENSOR && !a->quantize_a)) \
    T(scale_b, TE__IN | TE__AS_SCALE | TE__NEED(a->scaling_b != TE_SCALING_TENSOR)) T(bias, TE__IN_FLOAT | TE__OPT) \
    T(aux, TE__AUX | TE__PART(aux, a->m, a->n) | TE__AS_FLOAT | TE__STRIDED) T(bias_gradient, TE__OUT_FLOAT | TE__OPT) \
    T(amax_a, TE__IN_F32 | TE__NEED(a->scaling_a == TE_SCALING_NVFP4 && !a->quantize_a)) \
    T(amax_b, TE__IN_F32 | TE__NEED(a->scaling_b == TE_SCALING_NVFP4)) \
    T(quantize_scale, TE__IN_F32 | TE__OPT | TE__ONE) T(quantize_amax, TE__INOUT_F32 | TE__OPT | TE__ONE)
#define TE__JOINED(i) ((i) < a->count && a->count <= TE__COUNT(a->product)) /* the check refuses other counts */
#define TE__ARGS_JOINT(T, i) \
    T(product[i].b, TE__IN | TE__AS_OPERAND | TE__STRIDED | TE__NEED(TE__JOINED(i))) \
    T(product[i].d, TE__OUT_FLOAT | TE__STRIDED | TE__NEED(TE__JOINED(i) && !((i) && (a->activation || a->rope.q)))) \
    T(product[i].bias, TE__IN_FLOAT | TE__OPT) \
    T(product[i].scale_b, TE__IN | TE__AS_SCALE | TE__NEED(a->scaling_b != TE_SCALING_TENSOR && TE__JOINED(i))) \
    T(product[i].amax_b, TE__IN_F32 | TE__NEED(a->scaling_b == TE_SCALING_NVFP4 && TE__JOINED(i)))
#define TE__ARGS_JOINT_ROPE(T) \
    T(rope.q, TE__OUT_FLOAT | TE__STRIDED | TE__OPT) T(rope.k_cache, TE__INOUT | TE__AS_CACHE | TE__STRIDED | TE__OPT) \
    T(rope.v_cache, TE__INOUT | TE__AS_CACHE | TE__STRIDED | TE__OPT) \
    T(rope.k_factors, TE__INOUT | TE__AS_E8M0 | TE__STRIDED | TE__OPT) \
    T(rope.v_factors, TE__INOUT | TE__AS_E8M0 | TE__STRIDED | TE__OPT) T(rope.cu_seqlens, TE__IN_I32 | TE__OPT) \
    T(rope.cache_positions, TE__IN_I32 | TE__OPT) T(rope.page_table, TE__IN_I32 | TE__OPT) \
    T(rope.angles.start_positions, TE__IN_I32 | TE__OPT) T(rope.angles.positions, TE__IN_INDEX | TE__OPT) \
    T(rope.angles.freqs, TE__IN_F32 | TE__OPT)
#define TE__ARGS_joint_gemm(T, L) \
    T(a, TE__IN_FLOAT) T(norm_weight, TE__IN_FLOAT | TE__NEED(a->norm.normalization)) \
    T(norm_bias, TE__IN_FLOAT | TE__OPT) TE__ARGS_JOINT(T, 0) TE__ARGS_JOINT(T, 1) TE__ARGS_JOINT(T, 2) \
    T(residual, TE__IN_FLOAT | TE__OPT) T(y, TE__OUT_FLOAT | TE__NEED(a->activation || a->residual)) \
    TE__ARGS_JOINT_ROPE(T)
/* Without along_k, only the device knows how many rows of d and aux are written. The other rows keep their old values,
 * which count as read. */
#define TE__ARGS_grouped_gemm(T, L) \
    T(a, TE__IN | TE__AS_OPERAND | TE__STRIDED) T(b, TE__IN | TE__AS_OPERAND | TE__STRIDED) \
    T(d, TE__SUM | TE__PART(d, a->along_k ? te__size_times(a->groups, a->m) : 0, a->n) | TE__AS_FLOAT | TE__STRIDED) \
    T(sizes, TE__IN_INDEX | TE__OPT) T(offsets, TE__IN_INDEX | TE__OPT) \
    T(scale_a, TE__IN | TE__AS_SCALE | TE__NEED(a->scaling_a != TE_SCALING_TENSOR)) \
    T(scale_b, TE__IN | TE__AS_SCALE | TE__NEED(a->scaling_b != TE_SCALING_TENSOR)) T(bias, TE__IN_FLOAT | TE__OPT) \
    T(aux, TE__AUX | TE__PART(aux, 0, a->n) | TE__AS_FLOAT | TE__STRIDED)
#define TE__ARGS_layernorm_fwd(T, L) \
    T(x, TE__IN_FLOAT) T(gamma, TE__IN_FLOAT) T(beta, TE__IN_FLOAT | TE__OPT) T(y, TE__OUT_FLOAT | TE__AS_FP8) \
    T(mean, TE__OUT_F32 | TE__OPT) T(rstd, TE__OUT_F32 | TE__OPT) T(scale, TE__IN_F32 | TE__OPT | TE__ONE) \
    T(scale_inv, TE__OUT_F32 | TE__OPT | TE__ONE) T(amax, TE__INOUT_F32 | TE__OPT | TE__ONE) \
    T(y_amax, TE__OUT_F32 | TE__OPT | TE__ONE) T(y_col, TE__OUT | TE__AS_FP8 | TE__OPT)
#define TE__ARGS_NORM_BWD(T, needs_mean) \
    T(dy, TE__IN_FLOAT | TE__SAME) T(x, TE__IN_FLOAT) T(gamma, TE__IN_FLOAT) T(mean, TE__IN_F32 | needs_mean) \
    T(rstd, TE__IN_F32) T(add, TE__IN_FLOAT | TE__SAME | TE__OPT) T(dx, TE__OUT_FLOAT | TE__SAME) \
    T(dgamma, TE__SUM | TE__AS_FLOAT | TE__OPT) T(dbeta, TE__SUM | TE__AS_FLOAT | TE__OPT)
#define TE__ARGS_layernorm_bwd(T, L) TE__ARGS_NORM_BWD(T, 0)
#define TE__ARGS_rmsnorm_fwd(T, L) TE__ARGS_layernorm_fwd(T, L)
#define TE__ARGS_rmsnorm_bwd(T, L) TE__ARGS_NORM_BWD(T, TE__OPT)
#define TE__ARGS_act_fwd(T, L) \
    T(x, TE__IN_FLOAT | TE__SAME) T(y, TE__OUT_FLOAT | TE__AS_FP8 | TE__SAME | TE__NEED(!a->col)) \
    T(scale, TE__IN_F32 | TE__OPT | TE__ONE) T(scale_inv, TE__OUT_F32 | TE__OPT | TE__ONE) \
    T(amax, TE__INOUT_F32 | TE__OPT | TE__ONE) T(col, TE__OUT | TE__AS_FP8 | TE__OPT)
#define TE__ARGS_act_bwd(T, L) \
    T(dy, TE__IN_FLOAT | TE__SAME) T(x, TE__IN_FLOAT | TE__SAME) \
    T(dx, TE__OUT_FLOAT | TE__AS_FP8 | TE__SAME | TE__NEED(!a->col)) T(scale, TE__IN_F32 | TE__OPT | TE__ONE) \
    T(scale_inv, TE__OUT_F32 | TE__OPT | TE__ONE) T(amax, TE__INOUT_F32 | TE__OPT | TE__ONE) \
    T(col, TE__OUT | TE__AS_FP8 | TE__OPT) T(dbias, TE__SUM | TE__AS_FLOAT | TE__OPT)
#define TE__ARGS_scaled_act_fwd(T, L) \
    T(x, TE__IN_FLOAT | TE__SAME) T(act_scales, TE__IN_FLOAT) T(y, TE__OUT_FLOAT | TE__SAME)
#define TE__ARGS_scaled_act_bwd(T, L) \
    T(dy, TE__IN_FLOAT | TE__SAME) T(x, TE__IN_FLOAT | TE__SAME) T(act_scales, TE__IN_FLOAT) \
    T(dx, TE__OUT_FLOAT | TE__SAME) T(dact_scales, TE__OUT_FLOAT | TE__OPT)
#define TE__ARGS_ROPE_ANGLES(T) \
    T(angles.start_positions, TE__IN_I32 | TE__OPT) T(angles.positions, TE__IN_INDEX | TE__OPT) \
    T(angles.freqs, TE__IN_F32 | TE__OPT)
#define TE__ARGS_rope(T, L) \
    T(x, TE__IN_FLOAT | TE__STRIDED | TE__SAME) T(y, TE__OUT_FLOAT | TE__STRIDED | TE__SAME) TE__ARGS_ROPE_ANGLES(T) \
    T(cu_seqlens, TE__IN_I32 | TE__OPT)
#define TE__ARGS_QKV(T, packed, parts, cached) \
    T(qkv, packed | TE__AS_FLOAT | TE__SAME) T(q, parts | TE__AS_FLOAT | TE__STRIDED | TE__NEED(!a->rotated)) \
    T(k, parts | TE__AS_FLOAT | TE__STRIDED | TE__NEED(!a->rotated && !(cached))) \
    T(v, parts | TE__AS_FLOAT | TE__STRIDED | TE__NEED(!a->rotated && !(cached))) \
    T(rotated, parts | TE__AS_FLOAT | TE__SAME | TE__OPT) TE__ARGS_ROPE_ANGLES(T)
#define TE__ARGS_qkv_rope(T, L) \
    TE__ARGS_QKV(T, TE__IN, TE__OUT, a->k_cache) T(k_cache, TE__INOUT | TE__AS_CACHE | TE__STRIDED | TE__OPT) \
    T(v_cache, TE__INOUT | TE__AS_CACHE | TE__STRIDED | TE__OPT) TE__CACHE_FACTORS(T) \
    T(cu_seqlens, TE__IN_I32 | TE__OPT) T(cache_positions, TE__IN_I32 | TE__OPT) \
    T(page_table, TE__IN_I32 | TE__OPT)
#define TE__ARGS_qkv_rope_bwd(T, L) TE__ARGS_QKV(T, TE__OUT, TE__IN, false)
#define TE__ARGS_ATTN_RULE(T) \
    T(rule.attention_mask, TE__IN | 1 << TE_U8 | TE__STRIDED | TE__OPT) T(rule.cu_seqlens_q, TE__IN_I32 | TE__OPT) \
    T(rule.cu_seqlens_kv, TE__IN_I32 | TE__OPT) T(rule.cu_seqlens_q_padded, TE__IN_I32 | TE__OPT) \
    T(rule.cu_seqlens_kv_padded, TE__IN_I32 | TE__OPT) T(rule.core_attention_bias, TE__IN_FLOAT | TE__OPT) \
    T(rule.alibi_slopes, TE__IN_F32 | TE__OPT) T(rule.softmax_offset, TE__IN_F32 | TE__OPT) \
    T(rule.block_mask, TE__IN | 1 << TE_U8 | TE__OPT) T(rule.score_mod.aux[0], TE__IN | TE__AS_AUX | TE__OPT) \
    T(rule.score_mod.aux[1], TE__IN | TE__AS_AUX | TE__OPT) T(rule.score_mod.aux[2], TE__IN | TE__AS_AUX | TE__OPT) \
    T(rule.score_mod.aux[3], TE__IN | TE__AS_AUX | TE__OPT)
#define TE__ARGS_ATTN_CACHE(T) \
    T(rule.page_table, TE__IN_I32 | TE__OPT) T(rule.k_factors, TE__IN | TE__AS_E8M0 | TE__STRIDED | TE__OPT) \
    T(rule.v_factors, TE__IN | TE__AS_E8M0 | TE__STRIDED | TE__OPT)
#define TE__ARGS_attn_fwd(T, L) \
    T(q, TE__IN_FLOAT | TE__AS_FP8 | TE__STRIDED) T(k, TE__IN_FLOAT | TE__AS_FP8 | TE__STRIDED) \
    T(v, TE__IN_FLOAT | TE__AS_FP8 | TE__STRIDED) T(o, TE__OUT_FLOAT | TE__STRIDED) \
    T(lse, TE__OUT_F32 | TE__OPT) T(rng, TE__IN | TE__AS_I64 | TE__OPT) \
    T(max_logit, TE__OUT_F32 | TE__OPT) TE__ARGS_ATTN_RULE(T) TE__ARGS_ATTN_CACHE(T) \
    T(fp8.s_scale, TE__IN_F32 | TE__OPT) T(fp8.s_amax, TE__INOUT_F32 | TE__OPT) \
    T(fp8.q_scale_inv, TE__IN_F32 | TE__OPT) T(fp8.k_scale_inv, TE__IN_F32 | TE__OPT) \
    T(fp8.v_scale_inv, TE__IN_F32 | TE__OPT)
#define TE__ARGS_attn_bwd(T, L) \
    T(q, TE__IN_FLOAT | TE__AS_FP8 | TE__STRIDED) T(k, TE__IN_FLOAT | TE__AS_FP8 | TE__STRIDED) \
    T(v, TE__IN_FLOAT | TE__AS_FP8 | TE__STRIDED) \
    T(o, TE__IN_FLOAT | TE__STRIDED | TE__NEED(!a->fp8.s_dtype && !a->fp8.dp_dtype)) T(lse, TE__IN_F32) \
    T(d_o, TE__IN_FLOAT | TE__AS_FP8 | TE__STRIDED) T(dq, TE__OUT_FLOAT | TE__STRIDED) \
    T(dk, TE__OUT_FLOAT | TE__STRIDED) T(dv, TE__OUT_FLOAT | TE__STRIDED) T(rng, TE__IN | TE__AS_I64 | TE__OPT) \
    T(dbias, TE__OUT_FLOAT | TE__OPT) T(dsoftmax_offset, TE__OUT_F32 | TE__OPT) TE__ARGS_ATTN_RULE(T) \
    T(fp8.s_scale, TE__IN_F32 | TE__NEED(a->fp8.s_dtype)) \
    T(fp8.dp_scale, TE__IN_F32 | TE__NEED(a->fp8.dp_dtype)) \
    T(fp8.dp_amax, TE__INOUT_F32 | TE__OPT) T(fp8.q_scale_inv, TE__IN_F32 | TE__OPT) \
    T(fp8.k_scale_inv, TE__IN_F32 | TE__OPT) T(fp8.v_scale_inv, TE__IN_F32 | TE__OPT) \
    T(fp8.do_scale_inv, TE__IN_F32 | TE__OPT)
#define TE__ARGS_SPARSE_ATTN(T) \
    T(q, TE__IN_FLOAT | TE__STRIDED) T(kv, TE__IN_FLOAT | TE__STRIDED) T(indices, TE__IN_I32) \
    T(sinks, TE__IN_F32 | TE__OPT)
#define TE__ARGS_sparse_attn_fwd(T, L) \
    TE__ARGS_SPARSE_ATTN(T) T(o, TE__OUT_FLOAT | TE__STRIDED) T(lse, TE__OUT_F32 | TE__OPT)
#define TE__ARGS_sparse_attn_bwd(T, L) \
    TE__ARGS_SPARSE_ATTN(T) T(o, TE__IN_FLOAT | TE__STRIDED) T(lse, TE__IN_F32) T(d_o, TE__IN_FLOAT | TE__STRIDED) \
    T(dq, TE__OUT_FLOAT | TE__STRIDED) T(dkv, TE__OUT_FLOAT | TE__STRIDED) T(dsinks, TE__OUT_F32 | TE__OPT)
#define TE__ARGS_cu_seqlens(T, L) T(mask, TE__IN | 1 << TE_U8) T(cu_seqlens, TE__OUT_I32)
#define TE__ARGS_context_rows(T, L) T(cu_seqlens, TE__IN_I32 | TE__OPT) T(map, TE__OUT_I32)
#define TE__ARGS_context_lengths(T, L) \
    T(cu_seqlens, TE__IN_I32) T(cu_seqlens_padded, TE__IN_I32 | TE__OPT) T(lengths, TE__OUT_I32) \
    T(starts, TE__OUT_I32)
#define TE__ARGS_context_merge(T, L) \
    T(x, TE__IN_FLOAT | TE__STRIDED) T(o, TE__INOUT | TE__AS_FLOAT | TE__STRIDED) \
    T(x_lse, TE__IN_F32 | TE__NEED(a->lse)) T(lse, TE__INOUT_F32 | TE__STRIDED | TE__NEED(a->x_lse)) \
    T(x_max_logit, TE__IN_F32 | TE__NEED(a->max_logit)) T(max_logit, TE__INOUT_F32 | TE__NEED(a->x_max_logit))
#define TE__ARGS_copy_to_kv_cache(T, L) \
    T(k, TE__IN_FLOAT | TE__STRIDED) T(v, TE__IN_FLOAT | TE__STRIDED) T(cu_seqlens, TE__IN_I32) \
    T(start_positions, TE__IN_I32) T(page_table, TE__IN_I32 | TE__OPT) \
    T(k_cache, TE__INOUT | TE__AS_CACHE | TE__STRIDED) T(v_cache, TE__INOUT | TE__AS_CACHE | TE__STRIDED) \
    TE__CACHE_FACTORS(T)
#define TE__ARGS_advance_kv_cache(T, L) \
    T(start_positions, TE__INOUT | TE__AS_I32) T(cu_seqlens_q, TE__OUT_I32) T(cu_seqlens_kv, TE__OUT_I32)
#define TE__ARGS_detect_causal_mask(T, L) \
    T(mask, TE__IN_FLOAT | 1 << TE_U8 | TE__STRIDED) T(causal, TE__OUT_I32 | TE__ONE)
#define TE__ARGS_l2normalize_fwd(T, L) \
    T(x, TE__IN_FLOAT | TE__SAME) T(y, TE__OUT_FLOAT | TE__SAME) T(rnorm, TE__OUT_F32 | TE__OPT)
#define TE__ARGS_l2normalize_bwd(T, L) \
    T(dy, TE__IN_FLOAT | TE__SAME) T(x, TE__IN_FLOAT) T(rnorm, TE__IN_F32) T(dx, TE__OUT_FLOAT | TE__SAME)
#define TE__ARGS_softmax_fwd(T, L) \
    T(x, TE__IN_FLOAT | TE__SAME) T(mask, TE__IN | 1 << TE_U8 | TE__OPT) T(y, TE__OUT_FLOAT | TE__SAME)
#define TE__ARGS_softmax_bwd(T, L) T(dy, TE__IN_FLOAT | TE__SAME) T(y, TE__IN_FLOAT) T(dx, TE__OUT_FLOAT | TE__SAME)
#define TE__ARGS_softcap(T, L) \
    T(x, TE__IN_FLOAT | TE__SAME) T(dy, TE__IN_FLOAT | TE__SAME | TE__OPT) T(y, TE__OUT_FLOAT | TE__SAME)
#define TE__ARGS_dropout_add_fwd(T, L) \
    T(x, TE__IN_FLOAT | TE__SAME) T(bias, TE__IN_FLOAT | TE__OPT) T(residual, TE__IN_FLOAT | TE__SAME | TE__OPT) \
    T(y, TE__OUT_FLOAT | TE__SAME) T(rng, TE__IN | TE__AS_I64 | TE__OPT)
#define TE__ARGS_dropout_add_bwd(T, L) \
    T(dy, TE__IN_FLOAT | TE__SAME) T(dx, TE__OUT_FLOAT | TE__SAME) T(rng, TE__IN | TE__AS_I64 | TE__OPT)
#define TE__ARGS_cross_entropy_fwd(T, L) \
    T(logits, TE__IN_FLOAT) T(target, TE__IN_INDEX) T(loss, TE__OUT_F32 | TE__NEED(!a->parts)) \
    T(lse, TE__OUT_F32 | TE__NEED(!a->parts)) T(count, TE__OUT_F32 | TE__OPT | TE__ONE) \
    T(parts, TE__OUT_F32 | TE__OPT)
#define TE__ARGS_cross_entropy_merge(T, L) \
    T(parts, TE__IN_F32) T(target, TE__IN_INDEX) T(loss, TE__OUT_F32) T(lse, TE__OUT_F32)
#define TE__ARGS_cross_entropy_bwd(T, L) \
    T(logits, TE__IN_FLOAT | TE__SAME) T(target, TE__IN_INDEX) T(lse, TE__IN_F32) T(dloss, TE__IN_F32) \
    T(count, TE__IN_F32 | TE__OPT | TE__ONE) T(dlogits, TE__OUT_FLOAT | TE__SAME)
#define TE__ARGS_mse_fwd(T, L) T(x, TE__IN_FLOAT) T(target, TE__IN_FLOAT) T(loss, TE__OUT_F32 | TE__ONE)
#define TE__ARGS_mse_bwd(T, L) \
    T(x, TE__IN_FLOAT) T(target, TE__IN_FLOAT) T(dloss, TE__IN_F32 | TE__ONE) T(dx, TE__OUT_FLOAT)
#define TE__ARGS_adam(T, L) \
    L(tensors, .param, a->num_tensors, TE__INOUT | TE__AS_FLOAT) L(tensors, .grad, a->num_tensors, TE__IN_FLOAT) \
    L(tensors, .m, a->num_tensors, TE__INOUT | TE__AS_FLOAT | TE__AS_E4M3) \
    L(tensors, .v, a->num_tensors, TE__INOUT | TE__AS_FLOAT | TE__AS_E4M3) \
    L(tensors, .master, a->num_tensors, TE__INOUT_F32 | 1 << TE_F16 | 1 << TE_U8 | TE__OPT) \
    L(tensors, .m_scale, a->num_tensors, TE__INOUT_F32 | TE__OPT) \
    L(tensors, .v_scale, a->num_tensors, TE__INOUT_F32 | TE__OPT) \
    L(tensors, .master_scale, a->num_tensors, TE__INOUT_F32 | TE__OPT) T(grad_scale, TE__IN_F32 | TE__OPT | TE__ONE) \
    T(found_inf, TE__IN_F32 | TE__OPT | TE__ONE) T(lr_device, TE__IN_F32 | TE__OPT) \
    T(bias_correction, TE__IN_F32 | TE__OPT)
#define TE__ARGS_store_state(T, L) \
    T(x, TE__IN_FLOAT) T(amax, TE__IN_F32 | TE__ONE) T(state, TE__OUT | 1 << TE_F16 | TE__AS_E4M3) \
    T(scale, TE__OUT_F32 | TE__ONE)
#define TE__ARGS_sgd(T, L) \
    L(tensors, .param, a->num_tensors, TE__INOUT | TE__AS_FLOAT) L(tensors, .grad, a->num_tensors, TE__IN_FLOAT) \
    L(tensors, .momentum, a->num_tensors, TE__INOUT | TE__AS_FLOAT | TE__OPT) \
    L(tensors, .master, a->num_tensors, TE__INOUT_F32 | TE__OPT) T(grad_scale, TE__IN_F32 | TE__OPT | TE__ONE) \
    T(found_inf, TE__IN_F32 | TE__OPT | TE__ONE) T(lr_device, TE__IN_F32 | TE__OPT)
#define TE__ARGS_l2norm(T, L) \
    L(tensors, , a->num_tensors, TE__IN_FLOAT) T(norm, TE__OUT_F32 | TE__ONE) T(per_tensor, TE__OUT_F32 | TE__OPT) \
    T(clip, TE__OUT_F32 | TE__OPT | TE__ONE) T(inv_scale, TE__IN_F32 | TE__OPT | TE__ONE) \
    T(found_inf, TE__INOUT_F32 | TE__OPT | TE__ONE)
#define TE__ARGS_multi_scale(T, L) \
    L(in, , a->num_tensors, TE__IN_FLOAT | TE__SAME) L(out, , a->num_tensors, TE__OUT_FLOAT | TE__SAME) \
    T(scale_device, TE__IN_F32 | TE__OPT | TE__ONE) T(found_inf, TE__INOUT_F32 | TE__OPT | TE__ONE)
#define TE__ARGS_step_numbers(T, L) \
    T(found_inf, TE__INOUT_F32 | TE__OPT | TE__ONE) T(skipped, TE__INOUT_F32 | TE__ONE) \
    T(step_device, TE__IN_F32 | TE__OPT | TE__ONE) T(betas, TE__IN_F32 | TE__NEED(a->bias_correction)) \
    T(bias_correction, TE__OUT_F32 | TE__NEED(a->betas))
#define TE__ARGS_update_scale(T, L) \
    T(scale, TE__INOUT_F32 | TE__ONE) T(inv_scale, TE__OUT_F32 | TE__ONE) T(growth_tracker, TE__INOUT_F32 | TE__ONE) \
    T(found_inf, TE__INOUT_F32 | TE__ONE)
#define TE__ARGS_moe_splits(T, L) \
    T(sizes, TE__IN_INDEX | TE__OPT) T(padded, TE__OUT | TE__AS_INDEX) T(offsets, TE__OUT | TE__AS_INDEX | TE__OPT)
#define TE__ARGS_moe_mask_map(T, L) \
    T(routing_map, TE__IN | TE__AS_MASK) T(row_id_map, TE__OUT_I32) \
    T(tokens_per_expert, TE__OUT | TE__AS_INDEX | TE__OPT)
#define TE__ARGS_moe_index_map(T, L) T(experts, TE__IN_INDEX) T(row_id_map, TE__OUT_I32)
#define TE__ARGS_moe_local_ids(T, L) \
    T(experts, TE__IN_INDEX) T(dropped, TE__IN | TE__AS_U8 | TE__OPT) T(local, TE__OUT_I32) \
    T(tokens_per_expert, TE__OUT | TE__AS_INDEX)
#define TE__ARGS_moe_chunk_map(T, L) \
    T(sizes, TE__IN_INDEX) T(sorted_index, TE__IN_INDEX | TE__OPT) T(offsets, TE__IN_INDEX | TE__OPT) \
    T(row_id_map, TE__OUT_I32)
#define TE__ARGS_MOE_MAP(T) T(row_id_map, TE__IN_I32) T(pad_offsets, TE__IN_INDEX | TE__OPT)
#define TE__ARGS_moe_permute(T, L) \
    T(x, TE__IN | TE__AS_BYTES) TE__ARGS_MOE_MAP(T) T(probs, TE__IN_FLOAT | TE__NEED(a->permuted_probs)) \
    T(y, TE__OUT | TE__AS_BYTES) T(permuted_probs, TE__OUT_FLOAT | TE__NEED(a->probs))
#define TE__ARGS_moe_unpermute(T, L) \
    T(x, TE__IN_FLOAT) TE__ARGS_MOE_MAP(T) T(merging_probs, TE__IN_FLOAT | TE__OPT) \
    T(permuted_probs, TE__IN_FLOAT | TE__NEED(a->probs)) T(y, TE__OUT_FLOAT) \
    T(probs, TE__OUT_FLOAT | TE__NEED(a->permuted_probs))
#define TE__ARGS_moe_unpermute_bwd(T, L) \
    T(dy, TE__IN_FLOAT) T(x, TE__IN_FLOAT | TE__NEED(a->dprobs)) TE__ARGS_MOE_MAP(T) T(merging_probs, TE__IN_FLOAT) \
    T(dx, TE__OUT_FLOAT | TE__OPT) T(dprobs, TE__OUT_FLOAT | TE__OPT)
#define TE__ARGS_moe_router_fwd(T, L) \
    T(logits, TE__IN_FLOAT) T(expert_bias, TE__IN_FLOAT | TE__OPT) T(probs, TE__OUT_FLOAT | TE__NEED(!a->topk_probs)) \
    T(topk_probs, TE__OUT_FLOAT | TE__OPT) T(routing_map, TE__OUT | TE__AS_U8 | TE__OPT) \
    T(routing_bits, TE__OUT | TE__AS_U8 | TE__OPT) \
    T(topk_indices, TE__OUT | TE__AS_INDEX | TE__AS_I16 | TE__NEED(a->topk_probs))
#define TE__ARGS_moe_router_bwd(T, L) \
    T(logits, TE__IN_FLOAT) T(routing_map, TE__IN | TE__AS_U8 | TE__NEED(!a->all_scores && !a->dtopk_probs)) \
    T(dprobs, TE__IN_FLOAT | TE__NEED(!a->dtopk_probs)) \
    T(topk_indices, TE__IN_INDEX | TE__AS_I16 | TE__NEED(a->dtopk_probs)) T(dtopk_probs, TE__IN_FLOAT | TE__OPT) \
    T(expert_bias, TE__IN_FLOAT | TE__NEED(a->bias_in_probs)) T(dlogits, TE__OUT_FLOAT)
#define TE__ARGS_MOE_COUNTS(T) \
    T(tokens_per_expert, TE__IN_INDEX | TE__AS_FLOAT) T(total_device, TE__IN | TE__AS_I64 | TE__OPT | TE__ONE)
#define TE__ARGS_moe_aux_loss_fwd(T, L) T(probs, TE__IN_FLOAT) TE__ARGS_MOE_COUNTS(T) T(loss, TE__OUT_FLOAT | TE__ONE)
#define TE__ARGS_moe_aux_loss_bwd(T, L) T(dloss, TE__IN_FLOAT | TE__ONE) TE__ARGS_MOE_COUNTS(T) T(dprobs, TE__OUT_FLOAT)
#define TE__ARGS_grouped_column_sum(T, L) T(x, TE__IN_FLOAT) T(sizes, TE__IN_INDEX) T(out, TE__OUT_FLOAT)

/* A union of the args structs of all operations. It has room for any of them. */
typedef union te__any_args {
    uint64_t align[2];
#define TE__OP_MEMBER(lower, UPPER, family) te_op_##lower##_args lower;
    TE_OP_LIST(TE__OP_MEMBER)
#undef TE__OP_MEMBER
} te__any_args;

/* ---- padding ---- */

/* Clears the bytes between and after the fields of an args struct. Only operations whose args are compared
 * (onnx/export.c) need this. */
static void te__args_clear_padding(te_op op, te__any_args *args) {
#define TE__HOLE(lower, UPPER, before, next)                                                              \
    {TE_OP_##UPPER, offsetof(te_op_##lower##_args, before) + sizeof(((te_op_##lower##_args *)0)->before), \
     offsetof(te_op_##lower##_args, next)}
#define TE__TAIL(lower, UPPER, last)                                                                     \
    {                                                                                                    \
        TE_OP_##UPPER, offsetof(te_op_##lower##_args, last) + sizeof(((te_op_##lower##_args *)0)->last), \
            sizeof(te_op_##lower##_args)                                                                 \
    }
    static const struct {
        te_op op;
        size_t begin, end; /* begin >= end: on this machine there is no padding here */
    } holes[] = {TE__TAIL(embedding_fwd, EMBEDDING_FWD, from_end),
                 TE__TAIL(sum, SUM, scale),
                 TE__HOLE(dropout_add_fwd, DROPOUT_ADD_FWD, p, run),
                 TE__HOLE(amax, AMAX, keep, noop),
                 TE__TAIL(scale_from_amax, SCALE_FROM_AMAX, power_of_two),
                 TE__HOLE(fp8_quantize, FP8_QUANTIZE, current, epsilon),
                 TE__HOLE(fp8_quantize, FP8_QUANTIZE, power_of_two, x_amax),
                 TE__HOLE(block_quantize, BLOCK_QUANTIZE, fp32_scales, epsilon),
                 TE__HOLE(mxfp8_quantize, MXFP8_QUANTIZE, swizzled, noop),
                 TE__HOLE(nvfp4_quantize, NVFP4_QUANTIZE, stochastic_rounding, seed),
                 TE__HOLE(nvfp4_quantize, NVFP4_QUANTIZE, measure, noop),
                 TE__TAIL(block_dequantize, BLOCK_DEQUANTIZE, columnwise),
                 TE__TAIL(mxfp8_dequantize, MXFP8_DEQUANTIZE, swizzled),
                 TE__HOLE(nvfp4_dequantize, NVFP4_DEQUANTIZE, swizzled, groups),
                 TE__HOLE(gemm, GEMM, split_accumulator, scale_a),
                 TE__HOLE(gemm, GEMM, epilogue, aux),
                 TE__HOLE(gemm, GEMM, e4m3_max_256_b, quantize_a),
                 TE__HOLE(gemm, GEMM, quantize_power_of_two, quantize_scale),
                 TE__HOLE(grouped_gemm, GROUPED_GEMM, split_accumulator, scale_a),
                 TE__HOLE(grouped_gemm, GROUPED_GEMM, epilogue, aux),
                 TE__TAIL(grouped_gemm, GROUPED_GEMM, scaling_b),
                 TE__HOLE(layernorm_fwd, LAYERNORM_FWD, norm.zero_centered_gamma, scale),
                 TE__TAIL(layernorm_fwd, LAYERNORM_FWD, rounded),
                 TE__HOLE(rmsnorm_fwd, RMSNORM_FWD, norm.zero_centered_gamma, scale),
                 TE__TAIL(rmsnorm_fwd, RMSNORM_FWD, rounded),
                 TE__TAIL(l2normalize_fwd, L2NORMALIZE_FWD, eps),
                 TE__HOLE(act_fwd, ACT_FWD, activation, activation_params),
                 TE__HOLE(act_fwd, ACT_FWD, activation_params.no_glu_linear_offset,
                          activation_params.glu_interleave_size),
                 TE__HOLE(scaled_act_fwd, SCALED_ACT_FWD, activation, activation_params),
                 TE__HOLE(scaled_act_fwd, SCALED_ACT_FWD, activation_params.no_glu_linear_offset,
                          activation_params.glu_interleave_size),
                 TE__HOLE(rope, ROPE, format, angles),
                 TE__HOLE(rope, ROPE, angles.base, angles.inv_freq),
                 TE__HOLE(rope, ROPE, angles.interleaved, angles.position_scale),
                 TE__TAIL(rope, ROPE, no_rope),
                 TE__HOLE(qkv_rope, QKV_ROPE, no_rope, angles),
                 TE__HOLE(qkv_rope, QKV_ROPE, angles.base, angles.inv_freq),
                 TE__HOLE(qkv_rope, QKV_ROPE, angles.interleaved, angles.position_scale),
                 TE__HOLE(attn_fwd, ATTN_FWD, format, rule),
                 TE__HOLE(attn_fwd, ATTN_FWD, rule.mask, rule.window),
                 TE__HOLE(attn_fwd, ATTN_FWD, rule.window.on, rule.window.left),
                 TE__HOLE(attn_fwd, ATTN_FWD, rule.kv_bshd, rule.attention_mask),
                 TE__HOLE(attn_fwd, ATTN_FWD, rule.core_attention_bias_type, rule.core_attention_bias),
                 TE__HOLE(attn_fwd, ATTN_FWD, rule.softmax_type, rule.softmax_offset),
                 TE__HOLE(attn_fwd, ATTN_FWD, rule.score_mod.additive, rule.score_mod.aux),
                 TE__HOLE(attn_fwd, ATTN_FWD, fp8.part_of_keys, max_logit),
                 TE__TAIL(softmax_fwd, SOFTMAX_FWD, causal),
#if !defined(TE_NO_MOE) || !defined(TE_NO_DIST)
                 TE__TAIL(moe_chunk_map, MOE_CHUNK_MAP, chunk_numbers),
                 TE__HOLE(moe_router_fwd, MOE_ROUTER_FWD, use_pre_softmax, num_groups),
                 TE__HOLE(moe_router_fwd, MOE_ROUTER_FWD, all_scores, norm_topk_prob),
                 TE__TAIL(moe_router_fwd, MOE_ROUTER_FWD, zero_other_groups),
#endif
                 TE__TAIL(softcap, SOFTCAP, cap)};
#undef TE__HOLE
#undef TE__TAIL
    int i;
    for (i = 0; i < TE__COUNT(holes); i++)
        if (holes[i].op == op && holes[i].begin < holes[i].end)
            memset((char *)(void *)args + holes[i].begin, 0, holes[i].end - holes[i].begin);
}

/* ---- the arguments of one call ---- */

/* The address range of a tensor. It is empty if begin == end. */
typedef struct te__span {
    uintptr_t begin, end;
} te__span;

/* One argument of a call: a pointer to a tensor, or a list of `count` pointers, `stride` bytes apart. The pointers are
 * te_tensor * or const te_tensor *, so they are read and written by memcpy. */
typedef struct te__arg {
    const char *name;
    unsigned char *slot; /* where the pointer is stored; for a list: where its first pointer is stored; NULL if the list
                          * is NULL */
    void *list;          /* for a list: the address of the args' field that has the list; NULL if this is not a list */
    const char *list_name, *count_name; /* for a list: the names of the fields with the list and with its length */
    int64_t count;
    uint32_t stride, flags;
    te__span span; /* working memory of te__args_check: the address range of the tensor that it checks */
} te__arg;
enum { TE__MAX_ARGS = 32 };
typedef struct te__args {
    te_op op;
    int n;
    bool meet; /* true: te__args_check found that the address range of an output overlaps the range of another tensor */
    te__arg arg[TE__MAX_ARGS + 1]; /* The first n entries are valid. There is one entry more, because te__args_of writes
                                    * an entry before it decides whether to count the argument. */
} te__args;

#define TE__ARG_T(field, how)                   \
    p->name = #field;                           \
    p->slot = (unsigned char *)(void *)&a->field; \
    p->list = NULL;                             \
    p->count = 1;                               \
    p->flags = (uint32_t)(how);                 \
    p += all || a->field || !(p->flags & TE__OPT);
#define TE__ARG_L(field, member, length, how)                                     \
    p->name = #member[0] ? &#member[1] : #field;                                  \
    p->slot = a->field ? (unsigned char *)(void *)&a->field[0] member : NULL;     \
    p->list = (void *)&a->field;                                                  \
    p->list_name = #field;                                                        \
    p->count_name = &#length[3]; /* a-> */                                        \
    p->count = (length);                                                          \
    p->stride = (uint32_t)sizeof(a->field[0]);                                    \
    p->flags = (uint32_t)(how);                                                   \
    p++;
#define TE__ARG_COUNT_T(field, how) +1
#define TE__ARG_COUNT_L(field, member, length, how) +1
#define TE__ARGS_COLLECT(lower, UPPER, family)                                                                 \
    typedef char                                                                                               \
        te__##lower##_args_fit[0 TE__ARGS_##lower(TE__ARG_COUNT_T, TE__ARG_COUNT_L) <= TE__MAX_ARGS ? 1 : -1]; \
    static te__arg *te__collect_##lower(te__arg *p, void *args, bool all) {                                    \
        te_op_##lower##_args *a = (te_op_##lower##_args *)args;                                                \
        (void)all;                                                                                             \
        TE__ARGS_##lower(TE__ARG_T, TE__ARG_L) return p;                                                       \
    }
TE_OP_LIST(TE__ARGS_COLLECT)
#undef TE__ARGS_COLLECT

/* Fills in *l, the list of a call's arguments. *l points into `args`. If `all` is true, *l includes the optional
 * arguments that are NULL. */
static void te__args_of(te__args *l, te_op op, void *args, bool all) {
    static te__arg *(*const collect[TE_OP_COUNT])(te__arg *, void *, bool) = {NULL,
#define TE__ARG_ROW(lower, UPPER, family) te__collect_##lower,
#define TE__ARG_NONE(lower, UPPER, family) NULL,
        TE_OP_LIST_EACH(TE__ARG_ROW, TE__ARG_NONE)
#undef TE__ARG_ROW
#undef TE__ARG_NONE
    };
    l->op = op;
    l->n = (int)(collect[op](l->arg, args, all) - l->arg);
}
static void *te__arg_slot(const te__arg *p, int64_t i) { return p->list ? p->slot + (size_t)i * p->stride : p->slot; }
static te_tensor *te__arg_tensor(const te__arg *p, int64_t i) {
    te_tensor *x;
    memcpy(&x, te__arg_slot(p, i), sizeof(x));
    return x;
}
/* Returns the number of tensors of an argument. Returns 0 for a list that is NULL. */
static int64_t te__arg_count(const te__arg *p) { return p->slot ? p->count : 0; }

/* Records that the call writes each of its outputs. */
static void te__args_touch(const te__args *l) {
    const te__arg *p;
    int64_t i;
    for (p = l->arg; p < l->arg + l->n; p++)
        if (p->flags & TE__OUT)
            for (i = 0; i < te__arg_count(p); i++) te__touch(te__arg_tensor(p, i));
}

/* ---- names ---- */

static const char *const te__op_names[TE_OP_COUNT][2] = {{"?", "?"}, /* The name and the family of each operation. The
                                                                      * first entry is for a te_op that does not
                                                                      * exist. */
#define TE__OP_NAME(lower, UPPER, family) {#lower, #family},
    TE_OP_LIST_ALL(TE__OP_NAME)
#undef TE__OP_NAME
};
static const char *const *te__op_name(te_op op) { return te__op_names[(int)op > 0 && op < TE_OP_COUNT ? (int)op : 0]; }
TE_API const char *te_query_name(te_op op) { return te__op_name(op)[0]; }
TE_API const char *te_query_family(te_op op) { return te__op_name(op)[1]; }

TE_API int64_t te_query_args(te_op op, const void *args, te_arg *out, int64_t capacity) {
    te__args l;
    const te__arg *p;
    int64_t n = 0, i;
    if ((int)op <= 0 || op >= TE_OP_COUNT || !args) return 0;
    te__args_of(&l, op, (void *)args, true); /* args is only read here */
    for (p = l.arg; p < l.arg + l.n; p++)
        for (i = 0; i < te__arg_count(p); i++, n++) {
            if (!out || n >= capacity) continue;
            out[n].name = p->name;
            out[n].use = (te_arg_use)(p->flags >> 16 & 3);
            out[n].optional = (p->flags & TE__OPT) != 0;
            out[n].index = p->list ? i : -1;
            out[n].tensor = te__arg_tensor(p, i);
        }
    return n;
}

/* ---- the checks ---- */

/* Writes the name of an argument. If the tensor has a name of its own, that name follows in quotes, as in
 * `gamma "layer0.norm.weight"`. For a list, writes the list's name and an index, as in `param[3]`. */
enum { TE__ARG_TEXT = 160 };
static const char *te__arg_text(const te__arg *p, int64_t i, char *out) {
    const te_tensor *x = te__arg_tensor(p, i);
    int n = snprintf(out, TE__ARG_TEXT, p->list ? "%s[%lld]" : "%s", p->name, (long long)i);
    if (x && x->name) snprintf(out + n, (size_t)(TE__ARG_TEXT - n), " \"%.80s\"", x->name);
    return out;
}
/* Writes a list of dtypes: "f32, f16 or bf16". */
static const char *te__formats_text(uint32_t formats, char out[96]) {
    size_t used = 0;
    int d;
    out[0] = 0;
    for (d = 1; d < TE_DTYPE_COUNT; d++) {
        if (!(formats >> d & 1)) continue;
        used += (size_t)snprintf(out + used, 96 - used, "%s%s",
                                 !used                           ? ""
                                 : (formats & 0xffffu) >> d == 1 ? " or "
                                                                 : ", ",
                                 te_dtype_name((te_dtype)d));
    }
    return out;
}

/* Sets *s to the address range of x. Returns true if x is contiguous. */
static bool te__span_of(const te_tensor *x, te__span *s) {
    int64_t dense = 1, last = 0;
    bool contiguous = true;
    int i;
    s->begin = s->end = (uintptr_t)te__data(x);
    for (i = x->ndim - 1; i >= 0; i--) {
        if (x->shape[i] == 0) return true;
        if (x->shape[i] == 1) continue;
        contiguous = contiguous && x->stride[i] == dense;
        last += (x->shape[i] - 1) * x->stride[i];
        dense *= x->shape[i];
    }
    if (s->begin)
        s->end += (uintptr_t)(x->dtype == TE_F4E2M1 ? te__end(x) - x->offset : (last + 1) * te__dtype_size(x->dtype));
    return contiguous;
}
static bool te__spans_meet(te__span a, te__span b) { return a.begin < b.end && b.begin < a.end; }

/* Returns true if an argument passes all checks. Otherwise te__arg_refuse repeats the checks to find the one that
 * failed, and makes the message. */
static bool te__arg_is_fine(const te_ctx *te, te__arg *p, const te_tensor *x, bool run) {
    p->span.begin = p->span.end = 0;
    if (!x) return (p->flags & TE__OPT) != 0;
    if (x->te != te || x->quantized || !(p->flags >> x->dtype & 1) || (run && !x->buffer)) return false;
    if ((p->flags & TE__ONE) && te__numel(x) != 1) return false;
    return te__span_of(x, &p->span) || (p->flags & TE__STRIDED);
}
static te_result te__arg_refuse(te_ctx *te, const char *op, const te__arg *p, int64_t i) {
    const te_tensor *x = te__arg_tensor(p, i);
    char name[TE__ARG_TEXT], text[TE__SHAPE_TEXT > 96 ? TE__SHAPE_TEXT : 96];
    te__arg_text(p, i, name);
    if (!x) return te__fail(te, TE_ERR_STATE, "%s: %s is NULL; a tensor is needed there", op, name);
    if (x->te != te) return te__fail(te, TE_ERR_INVALID, "%s: %s belongs to another context", op, name);
    if (x->quantized)
        return te__fail(
            te, TE_ERR_DTYPE,
            "%s: %s is a quantized tensor; te_dequantize it, or pass the data of one copy (te_quantized_view)", op,
            name);
    if (!(p->flags >> x->dtype & 1))
        return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s; %s is needed", op, name, te_dtype_name(x->dtype),
                        te__formats_text(p->flags, text));
    if (!(p->flags & TE__STRIDED) && !te__is_contiguous(x))
        return te__fail(te, TE_ERR_SHAPE, "%s: %s %s is strided; te_tensor_contiguous makes a copy that is not", op,
                        name, te__shape_text(x, text));
    if ((p->flags & TE__ONE) && te__numel(x) != 1) return te__want_numel(te, op, name, x, 1);
    return te__fail(te, TE_ERR_STATE, "%s: %s %s %s", op, name, te__shape_text(x, text), te__no_memory_why(x));
}

/* Describes the memory of x as runs of *run adjacent bytes. The starts of two runs are a multiple of *period bytes
 * apart. If *period is 0, there is only one run. */
static void te__runs_of(const te_tensor *x, uint64_t *run, uint64_t *period) {
    uint64_t length = 1, gcd = 0, size = (uint64_t)te__dtype_size(x->dtype);
    int i;
    for (i = x->ndim - 1; i >= 0; i--) {
        uint64_t a = gcd, b = (uint64_t)x->stride[i], rest;
        if (x->shape[i] == 1) continue;
        if (!gcd && b == length) {
            length *= (uint64_t)x->shape[i];
            continue;
        }
        for (; b; a = b, b = rest) rest = a % b;
        gcd = a;
    }
    *run = length * size;
    *period = gcd * size;
}
/* Returns true if two tensors whose address ranges overlap may have bytes in common. Two columns of a matrix, or two
 * heads of a packed projection, have none. */
static bool te__tensors_meet(const te_tensor *x, const te_tensor *y) {
    uint64_t run_x, run_y, a, b, rest, at;
    if (te__is_contiguous(x) && te__is_contiguous(y)) return true;
    te__runs_of(x, &run_x, &a);
    te__runs_of(y, &run_y, &b);
    for (; b; a = b, b = rest) rest = a % b;
    if (!a) return true;
    /* The distance in bytes from the start of a run of x to the next start of a run of y. */
    at = (uint64_t)((uintptr_t)te__data(y) % a + a - (uintptr_t)te__data(x) % a) % a;
    return !(run_x <= at && at + run_y <= a);
}
/* Returns true if, for every i, element i of x is the same memory as element i of y. */
static bool te__tensors_equal(const te_tensor *x, const te_tensor *y) {
    if (te__data(x) != te__data(y) || x->dtype != y->dtype || te__numel(x) != te__numel(y)) return false;
    if (te__is_contiguous(x) && te__is_contiguous(y)) return true;
    return te__same_shape(x, y) && memcmp(x->stride, y->stride, (size_t)x->ndim * sizeof(int64_t)) == 0;
}
/* Fails if an output overlaps another argument and the flags do not allow it. i is the index in a list. */
static te_result te__args_meet(te_ctx *te, const char *op, const te__arg *out, const te__arg *other, int64_t i) {
    const te_tensor *x = te__arg_tensor(out, out->list ? i : 0), *y = te__arg_tensor(other, other->list ? i : 0);
    uint32_t both = out->flags & other->flags;
    char a[TE__ARG_TEXT], b[TE__ARG_TEXT];
    te__span s, t;
    bool allowed = !((out->flags & TE__OUT) && (other->flags & TE__OUT));
    if (te__tensors_equal(x, y) && (both & (allowed ? TE__SAME : TE__TWIN))) return TE_OK;
    if (!te__tensors_meet(x, y) || (allowed && (both & TE__MEETS))) return TE_OK;
    te__span_of(x, &s);
    te__span_of(y, &t);
    if (te__tensors_equal(x, y))
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: %s, which is written, and %s are the same memory, bytes %#llx to %#llx; give %s memory of its own", op,
            te__arg_text(out, out->list ? i : 0, a), te__arg_text(other, other->list ? i : 0, b),
            (unsigned long long)s.begin, (unsigned long long)s.end, out->name);
    return te__fail(te, TE_ERR_INVALID,
                    "%s: %s, which is written, lies in bytes %#llx to %#llx and %s in %#llx to %#llx; they overlap: "
                    "give %s memory of its own%s",
                    op, te__arg_text(out, out->list ? i : 0, a), (unsigned long long)s.begin, (unsigned long long)s.end,
                    te__arg_text(other, other->list ? i : 0, b), (unsigned long long)t.begin, (unsigned long long)t.end,
                    out->name, allowed && (both & TE__SAME) ? ", or the very same, in one format" : "");
}
/* Returns true if the address ranges of output `out` and argument `other` overlap. With `lists`, returns false for a
 * pair without a list. Without `lists`, returns false for a pair with a list. For two outputs, returns false unless
 * `out` is the earlier argument, so that each pair counts once. */
static bool te__pair_meets(const te__arg *out, const te__arg *other, bool lists) {
    return te__spans_meet(out->span, other->span) && out != other && lists == (out->list || other->list) &&
           (!(other->flags & TE__OUT) || out < other);
}
static bool te__any_meets(const te__args *l, bool lists) {
    const te__arg *end = l->arg + l->n, *out, *other;
    for (out = l->arg; out < end; out++)
        if (out->flags & TE__OUT)
            for (other = l->arg; other < end; other++)
                if (te__pair_meets(out, other, lists)) return true;
    return false;
}

/* Checks the tensors of a call:
 * - every required tensor is given
 * - each tensor belongs to this context, and is not a quantized tensor
 * - the operation accepts the tensor's dtype
 * - the tensor is contiguous, unless the operation accepts strides
 * - the tensor has one element, if the operation needs just one
 * - if `run` is true, the tensor has memory
 *
 * Sets l->meet if address ranges overlap. Only entries of lists at the same index are compared: all pairs could be
 * millions. */
static te_result te__args_check(te_ctx *te, te__args *l, bool run) {
    const char *op = te_query_name(l->op);
    int64_t places = 0, i;
    int k;
    for (k = 0; k < l->n; k++) {
        te__arg *p = &l->arg[k];
        if (!p->list) {
            if (!te__arg_is_fine(te, p, te__arg_tensor(p, 0), run)) return te__arg_refuse(te, op, p, 0);
            continue;
        }
        p->span.begin = p->span.end = 0;
        if (p->count < 0) return te__fail(te, TE_ERR_INVALID, "%s: %s is %lld", op, p->count_name, (long long)p->count);
        if (p->count > 0 && !p->slot)
            return te__fail(te, TE_ERR_INVALID, "%s: the list of %lld %s is NULL", op, (long long)p->count,
                            p->list_name);
        places = te__max(places, p->count);
    }
    l->meet = te__any_meets(l, false);
    for (i = 0; i < places; i++) {
        for (k = 0; k < l->n; k++) {
            te__arg *p = &l->arg[k];
            if (p->list && i < p->count && !te__arg_is_fine(te, p, te__arg_tensor(p, i), run))
                return te__arg_refuse(te, op, p, i);
        }
        l->meet = l->meet || te__any_meets(l, true);
    }
    return TE_OK;
}

/* Checks that outputs overlap other tensors only where the flags of both arguments allow it. This check comes last,
 * because an error about a wrong size is more helpful. */
static te_result te__args_apart(te_ctx *te, te__args *l) {
    int64_t places = 1, i;
    te_result r = TE_OK;
    int o, k;
    if (!l->meet) return TE_OK;
    for (i = 0; i < places; i++) {
        for (k = 0; k < l->n; k++) {
            te__arg *p = &l->arg[k];
            const te_tensor *x = !p->list || i < te__arg_count(p) ? te__arg_tensor(p, i) : NULL;
            if (p->list) places = te__max(places, p->count);
            p->span.begin = p->span.end = 0;
            if (x) te__span_of(x, &p->span);
        }
        for (o = 0; o < l->n && r == TE_OK; o++)
            for (k = 0; (l->arg[o].flags & TE__OUT) && k < l->n && r == TE_OK; k++)
                if ((i == 0 && te__pair_meets(&l->arg[o], &l->arg[k], false)) ||
                    te__pair_meets(&l->arg[o], &l->arg[k], true))
                    r = te__args_meet(te, te_query_name(l->op), &l->arg[o], &l->arg[k], i);
        if (r != TE_OK) return r;
    }
    return TE_OK;
}
