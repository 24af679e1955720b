/* api/ops.h: raw operations: explicit outputs, an args struct, no tape. For engines that bring their own graph; the
 * functions and modules of the later chapters call these and nothing else.
 *
 * A call resolves defaults, validates, plans, launches; an error comes before any side effect. The caller allocates outputs. Asynchronous on CUDA,
 * synchronous on the CPU; no hidden host wait. The first call with a new combination of formats compiles a kernel (or loads it from the
 * cache); workspace comes from the context's pool. Every operation gives the same bits again on the same device.
 *
 * Every operation refuses alike. A tensor gives TE_ERR_STATE if it is needed and NULL, or made by te_tensor_describe; TE_ERR_INVALID if it is of another
 * context; TE_ERR_DTYPE if it is a quantized tensor (its copies are plain ones: te_quantized_view) or of a format that the operation does not take
 * there; TE_ERR_SHAPE if it is strided, where strides are not mentioned. An output shares no byte with any other tensor of the call (TE_ERR_INVALID),
 * but for what an operation says: "y may be x" is the very same elements in the same format. Of lists only the tensors of one place are compared.
 *
 * Unless said otherwise: tensors are plain, contiguous and of the call's context, borrowed for the call; float tensors are f32, f16 or bf16; sums
 * are taken in f32 or better; results are rounded once. M is the product of the leading sizes and N the last size. "optional" fields may be
 * NULL. These fields mean the same everywhere:
 *   seed, offset  the random numbers that are drawn: those of Philox4x32-10 with this key, at this offset
 *   rng           optional i64 [2], a random state on the device: its first number replaces seed, its second is added to offset
 *   noop          optional f32 [1] on the device: 1.0 => the call writes nothing
 *   fp8_max       the largest code: 448 for e4m3, 57344 for e5m2
 *   format        order of dimensions; 0 => [s, b, H, d] */

/* Every operation, once: X(lower-case name, UPPER-CASE name, family). */
#define TE_OP_LIST(X)                                  \
    X(copy, COPY, math)                                \
    X(fill, FILL, math)                                \
    X(random, RANDOM, math)                            \
    X(axpby, AXPBY, math)                              \
    X(sum, SUM, math)                                  \
    X(column_sum, COLUMN_SUM, math)                    \
    X(embedding_fwd, EMBEDDING_FWD, math)              \
    X(embedding_bwd, EMBEDDING_BWD, math)              \
    X(amax, AMAX, cast)                                \
    X(scale_from_amax, SCALE_FROM_AMAX, cast)          \
    X(delayed_update, DELAYED_UPDATE, cast)            \
    X(fp8_quantize, FP8_QUANTIZE, cast)                \
    X(fp8_dequantize, FP8_DEQUANTIZE, cast)            \
    X(transpose, TRANSPOSE, cast)                      \
    X(delayed_gather, DELAYED_GATHER, cast)            \
    X(block_quantize, BLOCK_QUANTIZE, block)           \
    X(block_dequantize, BLOCK_DEQUANTIZE, block)       \
    X(mxfp8_quantize, MXFP8_QUANTIZE, mxfp8)           \
    X(mxfp8_dequantize, MXFP8_DEQUANTIZE, mxfp8)       \
    X(shard_amax, SHARD_AMAX, shard)                   \
    X(shard_scales, SHARD_SCALES, shard)               \
    X(shard_cast, SHARD_CAST, shard)                   \
    X(quant_error, QUANT_ERROR, stats)                 \
    X(nvfp4_amax, NVFP4_AMAX, nvfp4)                   \
    X(nvfp4_quantize, NVFP4_QUANTIZE, nvfp4)           \
    X(nvfp4_dequantize, NVFP4_DEQUANTIZE, nvfp4)       \
    X(gemm, GEMM, gemm)                                \
    X(grouped_gemm, GROUPED_GEMM, gemm)                \
    X(layernorm_fwd, LAYERNORM_FWD, norm)              \
    X(layernorm_bwd, LAYERNORM_BWD, norm)              \
    X(rmsnorm_fwd, RMSNORM_FWD, norm)                  \
    X(rmsnorm_bwd, RMSNORM_BWD, norm)                  \
    X(act_fwd, ACT_FWD, act)                           \
    X(act_bwd, ACT_BWD, act)                           \
    X(rope, ROPE, rope)                                \
    X(qkv_rope, QKV_ROPE, rope)                        \
    X(qkv_rope_bwd, QKV_ROPE_BWD, rope)                \
    X(attn_fwd, ATTN_FWD, attn)                        \
    X(attn_bwd, ATTN_BWD, attn)                        \
    X(dropout_add_fwd, DROPOUT_ADD_FWD, dropout)       \
    X(dropout_add_bwd, DROPOUT_ADD_BWD, dropout)       \
    X(cross_entropy_fwd, CROSS_ENTROPY_FWD, loss)      \
    X(cross_entropy_bwd, CROSS_ENTROPY_BWD, loss)      \
    X(mse_fwd, MSE_FWD, loss)                          \
    X(mse_bwd, MSE_BWD, loss)                          \
    X(adam, ADAM, optim)                               \
    X(l2norm, L2NORM, optim)                           \
    X(multi_scale, MULTI_SCALE, optim)

/* The operations: TE_OP_COPY ... TE_OP_MULTI_SCALE, in the order of TE_OP_LIST. */
typedef enum te_op {
    TE_OP_NONE = 0, /* none: refused */
#define TE_OP_ID(lower, UPPER, family) TE_OP_##UPPER,
    TE_OP_LIST(TE_OP_ID)
#undef TE_OP_ID
        TE_OP_COUNT
} te_op;

/* ---- math ---------------------------------------------------------------------------------------------------- */

/* dst = src, converting between any two unquantized formats (f32, f16, bf16, i32, i64, u8; float to float rounds to
 * nearest even). Equal shapes, any strides on both sides. Raw bytes of 8-bit formats copy to the same format or u8.
 * src and dst may share memory: dst becomes what it would if all of src were read first (through a workspace of the narrower format, where the ranges
 * of their bytes overlap). If each element is its own copy, nothing is done. */
typedef struct te_op_copy_args {
    const te_tensor *src;
    te_tensor *dst;
} te_op_copy_args;

/* dst[i] = value, rounded to nearest even; for integers truncated and saturated. Any format but e2m1. */
typedef struct te_op_fill_args {
    te_tensor *dst;
    double value;
} te_op_fill_args;

/* dst[i]: uniform on [a, b) or normal with mean a and standard deviation b; element i comes from Philox4x32-10 block
 * i / 4 of (seed, offset). Contiguous, f32/f16/bf16. */
typedef struct te_op_random_args {
    te_tensor *dst;
    te_random_kind kind; /* 0 => uniform */
    float a, b;
    uint64_t seed, offset;
    const te_tensor *rng;    /* optional */
} te_op_random_args;

/* out = alpha * x + beta * y, in f32. Same shape; y optional (then beta is not read); out may be x or y. Formats may
 * differ. alpha_device: optional f32 [1] that multiplies alpha; divide_device: optional f32 [1]: alpha is divided by max(divide_device, 1). */
typedef struct te_op_axpby_args {
    const te_tensor *x, *y;
    te_tensor *out;
    float alpha, beta;
    const te_tensor *alpha_device;
    const te_tensor *divide_device;
} te_op_axpby_args;

/* out f32 [1] = scale * sum of all elements of x, in a fixed order. */
typedef struct te_op_sum_args {
    const te_tensor *x;
    te_tensor *out;
    float scale; /* 0 => 1 */
} te_op_sum_args;

/* out [N] = (accumulate ? out : 0) + sum over the M rows of x [.., N]: a bias gradient. */
typedef struct te_op_column_sum_args {
    const te_tensor *x;
    te_tensor *out;
    bool accumulate;
} te_op_column_sum_args;

/* y [.., H] = table [V, H] at ids (i32 or i64, any shape [..]). An id outside 0 .. V-1 gives a row of zeros. */
typedef struct te_op_embedding_fwd_args {
    const te_tensor *ids, *table;
    te_tensor *y;
} te_op_embedding_fwd_args;
/* dtable [V, H] = (accumulate ? dtable : 0) + the rows of dy [.., H] at ids, summed in f32 in the order of the ids. */
typedef struct te_op_embedding_bwd_args {
    const te_tensor *ids, *dy;
    te_tensor *dtable;
    bool accumulate;
} te_op_embedding_bwd_args;

/* ---- cast ---------------------------------------------------------------------------------------------------- */

/* amax f32 [1] = max |x|, NaN ignored, infinity kept (as nvte_compute_amax). keep: amax becomes the maximum of that and its present value.
 * noop: optional. */
typedef struct te_op_amax_args {
    const te_tensor *x;
    te_tensor *amax;
    bool keep;
    const te_tensor *noop;
} te_op_amax_args;

/* scale [n], scale_inv [n] from amax [n], all f32 (as nvte_compute_scale_from_amax):
 *   a = amax < epsilon ? epsilon : amax;  a is 0, inf or NaN => scale 1
 *   scale = RN(fp8_max / a), infinity => FLT_MAX, power_of_two => mantissa cleared;  scale_inv = RN(1 / scale) */
typedef struct te_op_scale_from_amax_args {
    const te_tensor *amax;
    te_tensor *scale, *scale_inv; /* scale_inv optional */
    float fp8_max;
    float epsilon;                /* the least a; 0 => none */
    bool power_of_two;
} te_op_scale_from_amax_args;

/* The delayed-scaling update (TransformerEngine: delayed_scaling_recipe) of `count` states at once, state i with n_i slots: amax_history[i] f32
 * [L_i, n_i], scale[i] f32 [n_i], both updated in place: scale = fp8_max / 2^margin / amax, the histories move by one row, and row 0 becomes 0. A slot
 * whose newest amax is 0 stays as it is; an infinite or NaN amax leaves the scale. One launch for some 200 states.
 * reduced: optional f32 [n_0 + n_1 + ..], the amaxes after a reduction over a group, used where not 0 in place of row 0 of the history. */
typedef struct te_op_delayed_update_args {
    te_tensor *const *amax_history, *const *scale;
    int count;
    const te_tensor *reduced;
    float fp8_max;
    float margin;      /* -64 to 64 */
    te_amax_algo algo; /* how an amax is taken from its history; 0 => the largest */
} te_op_delayed_update_args;

/* amaxes f32 [n_0 + n_1 + ..] = row 0 of each of `count` histories amax_history[i] f32 [L_i, n_i], for a reduction over a group. */
typedef struct te_op_delayed_gather_args {
    te_tensor *const *amax_history;
    int count;
    te_tensor *amaxes;
} te_op_delayed_gather_args;

/* Per-tensor FP8 cast (as nvte_quantize). x [.., N] viewed as [M, N]; q = saturate(round_to_nearest_even(f32(x) * scale)),
 * infinity saturates, NaN stays NaN.
 *   row        [M, ld]  e4m3 or e5m2, optional: element (m, n) at m * ld + n, columns N .. ld-1 are written as 0
 *   col        [N, ldc] the same codes transposed, optional: element at n * ldc + m, columns M .. ldc-1 written as 0
 *   scale      f32 [1]  read; NULL with `current`
 *   scale_inv  f32 [1]  optional, written: RN(1 / scale)
 *   amax       f32 [1]  optional: max(amax, max |x|) of the unscaled input; with `current`: = max |x|
 *   current    the scale comes from x itself, by te_op_scale_from_amax's rule with fp8_max of the codes' format, `epsilon`
 *              and `power_of_two` (Float8CurrentScalingQuantizer)
 *   x_amax     f32 [2], optional, with `current` and without `noop`, at a multiple of 8 bytes: max |x|, as `amax` of te_op_act_fwd and others has left
 *              it, and 0. x is then read once. Both become 0
 *   dbias      [N] of any float format, optional: the sums of x's columns in f32: the gradient of a bias, if x is a gradient; not with `noop`
 *   noop       optional f32 [1]: 1.0 => nothing is written */
typedef struct te_op_fp8_quantize_args {
    const te_tensor *x;
    te_tensor *row, *col;
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    const te_tensor *noop;
    bool current;
    float epsilon;
    bool power_of_two;
    te_tensor *x_amax, *dbias;
} te_op_fp8_quantize_args;

/* y = f32(q) * scale_inv, rounded once to y's format. q [M, ld] with ld >= N, y [M, N]. */
typedef struct te_op_fp8_dequantize_args {
    const te_tensor *q, *scale_inv;
    te_tensor *y;
} te_op_fp8_dequantize_args;

/* dst [N, ldd] = transpose of src [M, lds] restricted to its first N columns: dst(n, m) = src(m, n), pad columns M .. ldd-1
 * zero. 4-bit (e2m1), 8-, 16- or 32-bit elements, same format. `rows` and `columns` are M and N. */
typedef struct te_op_transpose_args {
    const te_tensor *src;
    te_tensor *dst;
    int64_t rows, columns;
} te_op_transpose_args;

/* ---- block ---------------------------------------------------------------------------------------------------
 * FP8 with one f32 scale for each 1 x 128 or 128 x 128 elements (DeepSeek-V3; TransformerEngine's Float8BlockQuantizer). The
 * two copies are quantized independently: along the rows of x, and along its columns. Any size: the last block of a row or
 * column may be short. All padding is written as 0. */

/* x [.., N] viewed as [M, N], tiles of 1 x 128 (row), 128 x 1 (col), or 128 x 128 (two_dimensional; both).
 *   row            [M, ld] e4m3 or e5m2, optional
 *   row_scale_inv  f32: 1-D [ceil(N / 128), round_up(M, 4)], the block's index first; 2-D [ceil(M / 128), round_up(ceil(N / 128), 4)]
 *   col            [N, ldc], transposed, optional
 *   col_scale_inv  f32: 1-D [ceil(M / 128), round_up(N, 4)]; 2-D [ceil(N / 128), round_up(ceil(M / 128), 4)]
 * Per tile: a = max |x|, NaN ignored; scale by te_op_scale_from_amax's rule with `epsilon`, except that an infinite quotient
 * becomes the largest finite number of x's format, and that the mantissa is cleared unless fp32_scales;
 * q = saturate(RNE(f32(x) * scale)); scale_inv = RN(1 / scale). noop: optional. */
typedef struct te_op_block_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale_inv, *col, *col_scale_inv;
    bool two_dimensional; /* scales of 128 x 128; false => of 1 x 128 along each copy */
    bool fp32_scales; /* false => powers of two */
    float epsilon;
    const te_tensor *noop;
} te_op_block_quantize_args;

/* y [M, N] = RN(f32(q) * scale_inv), rounded once more to y's format. columnwise: q and scale_inv are the column-wise copy. */
typedef struct te_op_block_dequantize_args {
    const te_tensor *q, *scale_inv;
    te_tensor *y;
    bool two_dimensional; /* as in te_op_block_quantize_args */
    bool columnwise;
} te_op_block_dequantize_args;

/* ---- mxfp8 ---------------------------------------------------------------------------------------------------
 * FP8 with one power-of-two scale (E8M0) for each 32 elements (OCP Microscaling Formats v1.0; TransformerEngine's MXFP8Quantizer). */

/* x [.., N] viewed as [M, N]; groups of 32 along a row (row) or along a column (col), or 32 x 32 (two_dimensional: one scale
 * for the tile, repeated in both copies' scales). The last group of a row or column may be short. noop: optional.
 *   row        [M, ld] e4m3 or e5m2, optional
 *   row_scale  e8m0 [round_up(M, 128), round_up(ceil(N / 32), 4)]
 *   col        [M, ld], not transposed: the values of x scaled along the columns, in the format of row, optional
 *   col_scale  e8m0 [round_up(ceil(M / 32), 4), round_up(N, 128)]
 *   swizzled   the scales have the layout that Blackwell's tensor cores read (and the same shapes): [R, C] of them are tiles of 128 x 4, 512 bytes
 *              each; scale (i, j) (i: row of x or column of x; j: index of the group along the contraction) at
 *              ((i / 128) * (T / 4) + j / 4) * 512 + (i % 32) * 16 + (i % 128) / 32 * 4 + j % 4, T the padded number of groups
 * Per group: e = E8M0 of RN(amax * RN(1 / fp8_max)), rounded up (NaN never enters an amax); q = saturate(RNE(x * 2^(127 - e))), NaN stays NaN.
 * The padding of codes and scales is written as 0. */
typedef struct te_op_mxfp8_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale, *col, *col_scale;
    bool two_dimensional;
    bool swizzled;
    const te_tensor *noop;
} te_op_mxfp8_quantize_args;

/* y [M, N] = f32(q) * 2^(e - 127), rounded to y's format. q [M, ld], scale e8m0; columnwise: the scales run along the columns. */
typedef struct te_op_mxfp8_dequantize_args {
    const te_tensor *q, *scale;
    te_tensor *y;
    bool columnwise;
    bool swizzled; /* the layout of the scales */
} te_op_mxfp8_dequantize_args;

/* ---- nvfp4 ---------------------------------------------------------------------------------------------------
 * FP4 (E2M1) with one E4M3 scale for each 16 elements and one f32 amax above them (TransformerEngine's NVFP4Quantizer).
 *
 * The random Hadamard transform acts on the column-wise copy alone: 16 neighbours v of a column (rows 16 j .. 16 j + 15 of x;
 * rows beyond M count as 0) become H (s * v) / 4, s = + + + - + - - - - - - + - + - - (all + without the sign mask), H the Sylvester matrix of order
 * 16. In f32: signs first, then for h = 1, 2, 4, 8 the pairs (i, i + h) become (a + b, a - b), then * 0.25. */

/* amax_row f32 [1] = max |x|, or [M] (one for each row of x); amax_col f32 [1] = the same of what the column-wise copy will
 * quantize (after the transform with `rht`), or [N] (one for each column of x). NaN ignored, infinity kept. Either may be NULL. keep: the maximum
 * with their present values is taken; false => they are overwritten. noop: optional. */
typedef struct te_op_nvfp4_amax_args {
    const te_tensor *x;
    te_tensor *amax_row, *amax_col;
    bool rht;
    bool no_random_sign_mask; /* s is all + */
    bool keep;
    const te_tensor *noop;
} te_op_nvfp4_amax_args;

/* x [.., N] viewed as [M, N]; blocks of 16 along a row (row), along a column (col), or 16 x 16 (two_dimensional: one scale for
 * the tile, repeated for its 16 rows and columns). The last block may be short.
 *   row        e2m1 [M, ld], optional; two codes a byte, the even column in the low half
 *   row_scale  e4m3 [round_up(M, 128), round_up(ceil(N / 16), 4)]
 *   amax_row   f32 [1], or [M] (row-scaled: each row has a scale of its own in place of the tensor's), read
 *   col        e2m1 [N, ldc], transposed, optional; with rht it includes the codes of rows M .. round_up(M, 16) - 1, so ldc >= round_up(M, 16)
 *   col_scale  e4m3 [round_up(N, 128), round_up(ceil(M / 16), 4)]
 *   amax_col   f32 [1], or [N] (row-scaled: each column of x, a row of the copy, has a scale of its own), read; NULL => amax_row's, which is [1]
 *              then. amax_row may be NULL if only col is asked for. two_dimensional: amax_row's for both copies (amax_col's if that is
 *              NULL), [1]; and no rht with col
 *   swizzled   scales in the layout of te_op_mxfp8_quantize
 *   rht        of the column-wise copy: each 16 rows of a column, times their signs (unless no_random_sign_mask), times the Hadamard matrix / 4, rounded to
 *              bf16; amax, scales and codes are those of the rounded values. Sums are taken as a tensor core takes them: each product is truncated
 *              25 bits below the leading bit of the largest, they are added exactly, and the sum is truncated to f32. A NaN makes the scales of
 *              its blocks NaN, in both copies, and their codes 7 (6)
 * With F = 448 (256 if e4m3_max_256):
 *   S = min(F * 6 / amax, FLT_MAX), 1 if amax or S is 0;  d = E4M3(RN(block amax * RN(S * RN(1 / 6))));
 *   mult = min(RN(1 / RN(d * RN(1 / S))), FLT_MAX);  q = E2M1(RNE(RN(x * mult))), saturated, NaN => 6
 * stochastic_rounding: q = the largest code not above t = RN(|RN(x * mult)| + u * step), with x's sign; step 0.5, 1, 2 for
 *   magnitudes below 2, below 4, and above; u = k / 256, k byte t of the 16 bytes of Philox (seed, offset, row * blocks + block),
 *   t the element's place in its block; offset + 1 for the column-wise copy (row: of that copy, blocks: those
 *   of its rows that hold elements of x). The same for two_dimensional; NaN => 6 here too.
 * four_over_six: b = RN(RN(block amax / 6) * S), d = E4M3(b); each block (or tile) is also tried with d = E4M3(RN(b * 1.5)), and keeps it
 *   if the error is smaller: the sum over its elements, in order, of |e| or e * e, e = RN(RN(RN(RN(q * d) * amax) / (6 F)) - x), every operation
 *   rounded; tiles: the sums of its 16 rows in that copy, half to half (i with i + 8, then + 4, + 2, + 1). q is as it would be written. Each copy
 *   chooses for itself, tiles too.
 * Padding is written as 0. */
typedef struct te_op_nvfp4_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale, *col, *col_scale;
    const te_tensor *amax_row, *amax_col;
    bool two_dimensional;
    bool rht;          /* of the column-wise copy */
    bool no_random_sign_mask; /* the transform's signs are all + */
    bool stochastic_rounding;
    uint64_t seed, offset;
    const te_tensor *rng; /* optional */
    te_4over6_error four_over_six; /* 0 => off */
    bool e4m3_max_256; /* F = 256 */
    bool swizzled;
    bool measure; /* amax_row and amax_col are written first, as te_op_nvfp4_amax does without keep */
    const te_tensor *noop; /* optional */
} te_op_nvfp4_quantize_args;

/* y [M, N] = RN(q * RN(RN(d * amax) * RN(1 / (6 F)))), rounded to y's format; d: `scale`, e4m3; an amax of 0 counts as 6 F (S = 1). columnwise: the
 * column-wise copy; with rht its inverse (the transpose) is applied, in f32. amax f32 [1] or [M], columnwise [N]. */
typedef struct te_op_nvfp4_dequantize_args {
    const te_tensor *q, *scale, *amax;
    te_tensor *y;
    bool columnwise;
    bool rht, no_random_sign_mask; /* as the copy was quantized; so are the next two */
    bool e4m3_max_256;      /* F = 256 */
    bool swizzled;          /* the layout of the scales */
} te_op_nvfp4_dequantize_args;

/* ---- shard ---------------------------------------------------------------------------------------------------
 * Quantizing this rank's slice of a matrix (TransformerEngine's partial casts): amaxes of the slice by tile, to be reduced over the ranks; scales
 * from the reduced amaxes; codes of the slice. Together the slices give the bytes that quantizing the whole matrix gives. */

/* amax f32 [ceil(M / tile_rows), ceil(N / tile_columns)] = max |x| of the elements of each tile that lie in the slice, 0 where there
 * are none; NaN ignored. x: n float elements, the matrix's elements start .. start + n - 1 in row-major order. Fast for tiles of 128 x 128,
 * 16 x 16, 1 x 32 and 32 x 1; for one amax of all, te_op_amax of x. */
typedef struct te_op_shard_amax_args {
    const te_tensor *x;
    te_tensor *amax;
    int64_t rows, columns; /* M, N of the matrix */
    int64_t start;
    int64_t tile_rows, tile_columns;
} te_op_shard_amax_args;

/* Scales of a whole matrix from its amaxes by tile, in the layout that the quantizing operation writes (padding 0), by its rule.
 *   BLOCK_2D  amax by 128 x 128 -> row_scale f32 (scale_inv), and col_scale its transpose; amax_limit: the largest finite number
 *             of the format that was quantized from (0 => f32's)
 *   MXFP8     amax by 1 x 32 -> row_scale, and amax_col by 32 x 1 -> col_scale, e8m0
 *   NVFP4     amax by 16 x 16 and amax_tensor f32 [1] -> row_scale, and col_scale, e4m3, repeated for the rows of each tile
 *   multiplier  BLOCK_2D, optional: the factors that te_op_block_quantize multiplies with, in row_scale's layout; te_op_shard_cast needs it with
 *               fp32_scales, because the reciprocal of a rounded reciprocal is another number
 * rows, columns: M, N of the matrix. Outputs may be NULL, but not all. */
typedef struct te_op_shard_scales_args {
    te_scaling scaling; /* BLOCK_2D, MXFP8 or NVFP4 */
    const te_tensor *amax, *amax_col, *amax_tensor;
    te_tensor *row_scale, *col_scale;
    int64_t rows, columns;
    te_dtype dtype;    /* of the codes; 0 => e4m3, NVFP4: e2m1 */
    bool fp32_scales;  /* BLOCK_2D: as in te_op_block_quantize_args */
    float epsilon;     /* BLOCK_2D: the least amax that a scale is made from */
    float amax_limit;
    bool e4m3_max_256; /* NVFP4: F = 256 */
    te_tensor *multiplier;
} te_op_shard_scales_args;

/* Codes of the slice x (n float elements from element `start` of [rows, columns]).
 *   dst    a row-wise copy [rows, ld] of the matrix; or, flat, the codes of the slice alone (e2m1: the first code is in the low half if
 *          start is even, else the high half; bytes shared with neighbours keep their other half)
 *   scaling TENSOR: x is multiplied with scale f32 [1], and amax, optional f32 [1], becomes max(amax, max |x|); BLOCK_2D, MXFP8, NVFP4: scale as
 *          te_op_shard_scales writes it; NVFP4 needs amax_tensor
 *   multiplier  BLOCK_2D, optional: as te_op_shard_scales writes it; NULL => RN(1 / scale), which is the same for powers of two alone
 *   columnwise  MXFP8: scale is the column-wise one, running along the columns; TENSOR: dst is the transposed copy [columns, ld]
 *               (not flat). Other column-wise copies are made from the gathered rows.
 * The codes of the slice alone are written: padding, which quantizing the whole matrix writes as 0, is not. A flat dst may be longer than its
 * slice. */
typedef struct te_op_shard_cast_args {
    const te_tensor *x;
    te_tensor *dst;
    const te_tensor *scale, *amax_tensor;
    te_tensor *amax;
    te_scaling scaling;
    int64_t rows, columns, start;
    bool flat, columnwise;
    bool e4m3_max_256; /* NVFP4: F = 256 */
    const te_tensor *multiplier;
} te_op_shard_cast_args;

/* ---- stats --------------------------------------------------------------------------------------------------- */

/* The error of a quantization. x: the values, any float format; y f32: the dequantized ones; limit f32, optional: the largest magnitude that each
 * element's scale can represent. Sums in a fixed order.
 *   counts  i64 [6]: elements; x != 0 and y == 0 (underflow); x finite and |x| > 1.004 limit (saturated); NaN in x; infinite in x; zeros in x
 *   sums    f32 [5]: over elements with finite x and y: x^2, y^2, x y, (x - y)^2; and max |x - y| */
typedef struct te_op_quant_error_args {
    const te_tensor *x, *y, *limit;
    te_tensor *counts, *sums;
} te_op_quant_error_args;

/* ---- gemm ---------------------------------------------------------------------------------------------------- */

/* D [m, n] = epilogue(alpha * scale_a * scale_b * op(A) op(B) + bias) + (accumulate ? D : 0), accumulated in f32.
 *   A        a: [m, lda], or with a_transposed [k, lda];  op(A) is m x k
 *   B        b: [k, ldb], or with b_transposed [n, ldb], the layout of a weight;  op(B) is k x n
 *   formats  f32 (as TF32 on tensor cores, exact on the CPU), f16, bf16, alike for A and B; e4m3/e5m2 in any mix but
 *            e5m2 x e5m2; e2m1 x e2m1. FP8 and FP4 operands are K-major (A not transposed, B transposed), except that the
 *            column-wise copies of MXFP8, which are not transposed in memory, are MN-major (A transposed, B not transposed).
 *   D        d: f32, f16 or bf16 [m, ldd]
 *   bias     [n] of any float format, optional
 *   scaling  scaling_a and scaling_b, the layouts of scale_a and scale_b (alike, or BLOCK_1D and BLOCK_2D; BLOCK_2D x BLOCK_2D is refused):
 *            TENSOR   f32 [1], optional (1): the scale_inv of FP8 operands
 *            BLOCK    f32, the scale_inv of te_op_block_quantize for that copy; the sums of each 128 k are scaled and added in f32
 *            MXFP8    e8m0, as te_op_mxfp8_quantize wrote them
 *            NVFP4    e4m3, as te_op_nvfp4_quantize wrote them, and amax_a, amax_b f32 [1], or [m] and [n] when row-scaled; the product is
 *                     multiplied by amax_a * amax_b / (6 F)^2. k of a transformed copy is its padded one, round_up(M, 16).
 *   swizzled_scales    MXFP8, NVFP4: both in the swizzled layout
 *   aux      [m, n] of D's format
 *   bias_gradient  [n] of any float format, optional: the sums of D's columns as stored, in f32. D is contiguous then, and not accumulated
 *   split_accumulator  promote partial sums to full f32 regularly; false allows the tensor core's own accumulator. BLOCK always does.
 * MXFP8 and NVFP4 operands are decoded into bf16 where tensor cores do not read them: exactly, but for digits below bf16's last bit, 2^-133. That takes
 * a workspace of up to 2 (m + n) k bytes, rows rounded up; for small m or n with both operands K-major, mostly none. sm_90: an operand whose rows do
 * not begin at multiples of 16 bytes may be copied into a workspace of its size first. te_explain gives the workspace of a call.
 * k == 0 => D = bias (or D stays when accumulating); m or n == 0 => nothing is written. m, n, k are given because the tensors may be padded or have
 * more dimensions. */
typedef struct te_op_gemm_args {
    const te_tensor *a, *b;
    te_tensor *d;
    int64_t m, n, k;
    bool a_transposed, b_transposed;
    bool accumulate;
    bool split_accumulator;
    const te_tensor *scale_a, *scale_b;
    const te_tensor *bias;
    te_epilogue epilogue;
    te_tensor *aux, *bias_gradient;
    te_scaling scaling_a, scaling_b; /* 0 => TENSOR */
    const te_tensor *amax_a, *amax_b;
    bool swizzled_scales;
    bool e4m3_max_256_a, e4m3_max_256_b; /* NVFP4: F is 256 for that operand */
} te_op_gemm_args;

/* Products of many matrices at once, one for each group (an expert and its tokens), whose sizes only the device knows: no host wait.
 *   along rows  D rows of g = epilogue(scale_a scale_b op(A) rows of g times op(B[g]) + bias[g]) + ...: a forward pass, or its dgrad
 *               A [m, lda], the rows of group 0, then those of group 1, ...; D [m, ldd] likewise
 *               B [groups, n, ldb] (b_transposed) or [groups, k, ldb];  bias [groups, n], optional;  aux [m, n] of D's format
 *   along_k     D[g] = scale_a scale_b op(A) op(B) over the values of k of g + ...: wgrad
 *               op(A) m x k, op(B) k x n: as te_op_gemm's, k being that of all groups; D [groups, m, ldd]. No bias, no epilogue. D[g] of
 *               an empty group is 0, or stays when accumulating
 *   sizes       i32 or i64 [groups]: rows, or values of k, of each group: any numbers from 0 up, no padding;
 *   offsets     or, in their place, i32 or i64 [groups + 1], ascending: the start of each group, and the end of the last
 *   m, n, k     m (along_k: k) is an upper bound of the sum of sizes: rows beyond the last group are neither read nor written. Sizes that exceed it or
 *               are negative are cut to m and to 0: nothing beyond the tensors is touched
 *   formats     A and B f32, f16, bf16 (alike), or e4m3/e5m2 in any mix but e5m2 x e5m2, contiguous along k. FP8 along_k takes plain
 *               transposed copies, [m, lda] and [n, ldb]: groups start at any column.  D f32, f16, bf16
 *   scaling     TENSOR: scale_a, scale_b f32 [1] or [groups], optional.  Along rows also A BLOCK_1D with B BLOCK_2D: scale_a as
 *               te_op_block_quantize writes it for all of A, scale_b [groups, ceil(n / 128), round_up(ceil(k / 128), 4)]
 * a, b, d, a_transposed, b_transposed, accumulate, split_accumulator and epilogue are those of te_op_gemm. */
typedef struct te_op_grouped_gemm_args {
    const te_tensor *a, *b;
    te_tensor *d;
    const te_tensor *sizes, *offsets;
    int64_t groups, m, n, k;
    bool along_k;
    bool a_transposed, b_transposed;
    bool accumulate;
    bool split_accumulator;
    const te_tensor *scale_a, *scale_b;
    const te_tensor *bias;
    te_epilogue epilogue;
    te_tensor *aux;
    te_scaling scaling_a, scaling_b; /* 0 => TENSOR */
} te_op_grouped_gemm_args;

/* ---- norm ---------------------------------------------------------------------------------------------------- */

/* y = (x - mean) * rstd * gamma' + beta, per row of [M, N]; gamma' = gamma + 1 if zero_centered_gamma.
 * RMSNorm: mean = 0, rstd = rsqrt(mean(x^2) + eps), no beta.
 *   mean, rstd  f32 [M] (mean: LayerNorm only), optional
 *   y           float; or e4m3/e5m2 [M, ld] with `scale` (f32 [1], read), and optionally `scale_inv` and `amax` as in
 *               te_op_fp8_quantize: the f32 result is quantized without an intermediate rounding
 *   amax        f32 [1], optional: max(amax, max |y|), of FP8 before scaling, of a float y as it is stored; NaN left out
 *   y_amax      f32 [1], for a float y and in place of amax, optional: becomes max |y|, as by te_op_amax
 *   y_col       for an FP8 y, of its format, [N, ldc] with ldc >= M, optional: the transpose of y; columns from M on are written as 0 */
typedef struct te_norm_fwd_args {
    const te_tensor *x, *gamma, *beta;
    te_tensor *y, *mean, *rstd;
    float eps; /* 0 => 1e-5 */
    bool zero_centered_gamma;
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *y_amax, *y_col;
} te_norm_fwd_args;
typedef te_norm_fwd_args te_op_layernorm_fwd_args; /* x [.., N], gamma [N], beta [N] (optional) */
typedef te_norm_fwd_args te_op_rmsnorm_fwd_args;   /* x [.., N], gamma [N] */

/* dx [M, N], dgamma [N], dbeta [N] (both optional; dbeta: LayerNorm) from dy [M, N] and the forward's x [M, N], gamma [N], mean f32 [M] (LayerNorm) and
 * rstd f32 [M]. add: optional [M, N], added to dx in f32 before rounding; dx may be add or dy, if their formats are the same. rounded: dx is rounded
 * before that as well: the sum of two stored gradients. accumulate: dgamma and dbeta are added to. */
typedef struct te_norm_bwd_args {
    const te_tensor *dy, *x, *gamma, *mean, *rstd, *add;
    te_tensor *dx, *dgamma, *dbeta;
    bool zero_centered_gamma; /* as in the forward */
    bool accumulate;
    bool rounded;
} te_norm_bwd_args;
typedef te_norm_bwd_args te_op_layernorm_bwd_args; /* with mean */
typedef te_norm_bwd_args te_op_rmsnorm_bwd_args;   /* without mean and dbeta */

/* ---- act ----------------------------------------------------------------------------------------------------- */

/* Does the activation read [M, 2N] and give [M, N]? */
TE_API bool te_activation_is_gated(te_activation activation);

/* y [M, N] = act(x), x [M, N] or gated [M, 2N]. y may be e4m3/e5m2 [M, ld], with scale, scale_inv and amax as in te_norm_fwd_args; or x, of what is not gated.
 *   col   optional, e4m3/e5m2 [N, ldc]: the same codes transposed, columns M .. ldc-1 written as 0; y may be NULL then
 *   amax  f32 [1], optional: max(amax, max |y|), of FP8 before scaling, of f16 and bf16 as they are written: current scaling of y needs no
 *         pass of its own to find it */
typedef struct te_op_act_fwd_args {
    const te_tensor *x;
    te_tensor *y;
    te_activation activation; /* needed */
    float limit; /* clamped SwiGLU; 0 => 7 */
    float alpha; /* clamped SwiGLU; 0 => 1.702 */
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *col;
} te_op_act_fwd_args;

/* dx = dy * act'(x), the shape of x, and may be x, or dy of what is not gated; or e4m3/e5m2 [M, ld], with scale, scale_inv, amax and col [N or 2N, ldc] as in the forward.
 *   dbias       optional [N or 2N]: the sums of dx's columns, before it is rounded: the gradient of a bias that was added to x
 *   rounded     dx is rounded to x's format first: codes, amax and dbias are those of a dx in that format
 *   accumulate  dbias is added to */
typedef struct te_op_act_bwd_args {
    const te_tensor *dy, *x;
    te_tensor *dx;
    te_activation activation; /* needed */
    float limit, alpha;       /* as in the forward */
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *col, *dbias;
    bool accumulate;
    bool rounded;
} te_op_act_bwd_args;

/* ---- rope ---------------------------------------------------------------------------------------------------- */

/* Rotary embedding (Su et al. 2021), angle(t, i) = (t + position) * base^(-2i / rotary_dim), computed in f32 in the kernel.
 *   x, y        [s, b, h, d] or, by `format`, [b, s, h, d]; the channels of a head adjacent, other strides free; y may be x
 *   rotary_dim  the first rotary_dim channels are rotated, the rest pass through; even, at most 1024; 0 => d
 *   interleaved channels 2i and 2i + 1 are a pair; false => i and i + rotary_dim / 2
 *   position_offset  added to every position, at most 2^53 in magnitude
 *   start_positions  optional i32 [b], added to each sequence's positions
 *   backward    the transposed rotation */
typedef struct te_op_rope_args {
    const te_tensor *x;
    te_tensor *y;
    te_qkv_format format;
    float base; /* 0 => 10000 */
    int rotary_dim;
    bool interleaved;
    float position_scale; /* multiplies the position; 0 => 1 */
    int64_t position_offset;
    const te_tensor *start_positions;
    bool backward;
} te_op_rope_args;

/* Splits a packed projection into q [s, b, H, d], k and v [s, b, G, d], rotating q and k unless no_rope.
 *   format    TE_BSHD => b and s are exchanged in all four
 *   qkv   [s, b, (H + 2G) * d]; interleaved_groups: ordered [G, (H/G q heads, k, v), d], else [Q | K | V] (as MultiheadAttention)
 *   num_heads, num_groups, head_dim   H, G, d
 * base, rotary_dim, interleaved, position_scale, position_offset and start_positions are those of te_op_rope. */
typedef struct te_op_qkv_rope_args {
    const te_tensor *qkv;
    te_tensor *q, *k, *v;
    te_qkv_format format;
    int num_heads, num_groups, head_dim;
    bool interleaved_groups;
    bool no_rope;
    float base;
    int rotary_dim;
    bool interleaved;
    float position_scale;
    int64_t position_offset;
    const te_tensor *start_positions;
} te_op_qkv_rope_args;
/* The gradient: dqkv (`qkv`, written) from dq, dk, dv (`q`, `k`, `v`, read). format, num_heads, num_groups, head_dim, interleaved_groups, no_rope, base,
 * rotary_dim, interleaved, position_scale, position_offset and start_positions are the forward's. */
typedef struct te_op_qkv_rope_bwd_args {
    te_tensor *qkv;
    const te_tensor *q, *k, *v;
    te_qkv_format format;
    int num_heads, num_groups, head_dim;
    bool interleaved_groups;
    bool no_rope;
    float base;
    int rotary_dim;
    bool interleaved;
    float position_scale;
    int64_t position_offset;
    const te_tensor *start_positions;
} te_op_qkv_rope_bwd_args;

/* ---- attn ---------------------------------------------------------------------------------------------------- */

/* The keys that a query sees beside its mask: from `left` before it to `right` behind it, both counted from the diagonal of the mask. */
typedef struct te_window {
    bool on;             /* false => no window */
    int64_t left, right; /* numbers of keys; -1 => no bound on that side */
} te_window;

/* O = softmax(scale * Q K^T, masked) V, never materialising the score matrix.
 *   q, o  [s_q, b, H, d], k, v [s_kv, b, G, d] (format TE_BSHD: b first); any strides, the last dimension contiguous; head h uses group
 *         h / (H / G); d up to 256; v may have another head size than q and k
 *   lse   f32 [b, H, s_q]: log of the sum of exp of the scaled scores, -inf for a row that sees no key (its o is 0)
 *   window   keys i + delta - left .. i + delta + right are visible; not on => unbounded;
 *         delta = s_kv - s_q for bottom-right masks, else 0
 *   dropout_p   probability of zeroing an element of P; bits from Philox at (seed, offset) and rng, element ((b*H + h)*s_q + i)*s_kv + j */
typedef struct te_op_attn_fwd_args {
    const te_tensor *q, *k, *v;
    te_tensor *o, *lse;
    te_qkv_format format;
    te_attn_mask mask;   /* 0 => causal */
    te_window window;
    float softmax_scale; /* 0 => 1 / sqrt(d) */
    float dropout_p;
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_attn_fwd_args;

/* dq, dk, dv (shapes of q, k, v) from d_o (shape of o) and the q, k, v, o, lse of the forward, with its format, mask, has_window, window_left,
 * window_right, softmax_scale, dropout_p, seed, offset and rng. Deterministic. */
typedef struct te_op_attn_bwd_args {
    const te_tensor *q, *k, *v, *o, *lse, *d_o;
    te_tensor *dq, *dk, *dv;
    te_qkv_format format;
    te_attn_mask mask;
    te_window window; /* as in the forward pass */
    float softmax_scale;
    float dropout_p;
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_attn_bwd_args;

/* ---- dropout ------------------------------------------------------------------------------------------------- */

/* y = residual + keep(x + bias) / (1 - p): bias [N], residual [.., N] optional. Element i is kept when the Philox uniform of
 * (seed, offset) and rng at i is >= p; p = 0 draws nothing. Evaluated in f32, rounded once. y may be x or residual. */
typedef struct te_op_dropout_add_fwd_args {
    const te_tensor *x, *bias, *residual;
    te_tensor *y;
    float p;
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_dropout_add_fwd_args;
/* dx = keep(dy) / (1 - p), with the forward's p, seed, offset and rng; dx may be dy. (The gradient of residual is dy, that of bias the column sum of dx.) */
typedef struct te_op_dropout_add_bwd_args {
    const te_tensor *dy;
    te_tensor *dx;
    float p;
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_dropout_add_bwd_args;

/* ---- loss ---------------------------------------------------------------------------------------------------- */

/* Per row of logits [M, V]: loss f32 [M] = (1-e)(lse - x_y) + e*lse - (e/V) sum x, lse f32 [M] saved.
 * target i32 or i64 [M]; a target == ignore_index (or outside 0 .. V-1) gives loss 0 and gradient 0. label_smoothing: e, 0 to 1.
 * count: optional f32 [1], the number of targets that are not ignored. */
typedef struct te_op_cross_entropy_fwd_args {
    const te_tensor *logits, *target;
    te_tensor *loss, *lse, *count;
    float label_smoothing;
    int64_t ignore_index; /* TransformerEngine's default is -100; 0 is a legal target, so this field has no default */
} te_op_cross_entropy_fwd_args;
/* dlogits [M, V] = (softmax - target distribution) * dloss[m] * scale / max(count, 1), from the forward's logits, target, lse, label_smoothing and
 * ignore_index; dloss f32 [M] or [1] (broadcast); count: optional f32 [1]. dlogits may be logits. */
typedef struct te_op_cross_entropy_bwd_args {
    const te_tensor *logits, *target, *lse, *dloss, *count;
    te_tensor *dlogits;
    float scale; /* 0 => 1 */
    float label_smoothing;
    int64_t ignore_index;
} te_op_cross_entropy_bwd_args;

/* loss f32 [1] = mean((x - target)^2); x and target of one shape and format. */
typedef struct te_op_mse_fwd_args {
    const te_tensor *x, *target;
    te_tensor *loss;
} te_op_mse_fwd_args;
/* dx = dloss * 2 (x - target) / numel, the shape and format of x and target; dloss f32 [1]. */
typedef struct te_op_mse_bwd_args {
    const te_tensor *x, *target, *dloss;
    te_tensor *dx;
} te_op_mse_bwd_args;

/* ---- optim --------------------------------------------------------------------------------------------------- */

/* One parameter of te_op_adam: grad and param (f32, f16, bf16), the moments m and v (f32), and optionally master (f32): then the step works on it and
 * param = round(master). All have the same number of elements. */
typedef struct te_adam_tensor {
    const te_tensor *grad;
    te_tensor *param, *m, *v, *master;
} te_adam_tensor;
/* One Adam(W) step over a list of tensors (as FusedAdam).
 *   p -= lr * (m/bc1 / (sqrt(v/bc2) + eps) + weight_decay * p)       bc = 1 - beta^step, or 1 if no_bias_correction
 * grad_scale: optional f32 [1] on the device, multiplies every gradient (clipping, un-scaling). found_inf: optional f32 [1];
 * if it is not 0 nothing is changed. lr_device: optional f32 [1], replaces lr. bias_correction: optional f32 [2], 1/bc1 and 1/bc2, replaces
 * step and no_bias_correction. One call changes all parameters, or none. */
typedef struct te_op_adam_args {
    const te_adam_tensor *tensors;             /* [num_tensors] */
    int num_tensors, num_undecayed;            /* the last num_undecayed take no weight decay */
    float lr, beta1, beta2, eps, weight_decay; /* read as they are: no defaults */
    int64_t step;                              /* 1 for the first */
    bool no_adam_w_mode;                              /* weight decay goes into the gradient (Adam); false => into the step (AdamW) */
    bool no_bias_correction;                   /* bc = 1 */
    const te_tensor *grad_scale, *found_inf, *lr_device, *bias_correction;
} te_op_adam_args;

/* norm f32 [1] = sqrt(sum over tensors[0 .. num_tensors - 1] of sum x^2), in a fixed order. per_tensor: optional f32 [num_tensors], the norm of each.
 * clip: optional f32 [1] = min(1, max_norm / (norm + 1e-6)); NaN and inf propagate. */
typedef struct te_op_l2norm_args {
    const te_tensor *const *tensors;
    int num_tensors;
    te_tensor *norm, *per_tensor, *clip;
    float max_norm;
} te_op_l2norm_args;

/* out[i] = in[i] * scale * (scale_device ? *scale_device : 1) for num_tensors tensors; out[i] may be in[i]. found_inf: optional f32 [1], becomes 1 if an
 * input is not finite, and else stays. */
typedef struct te_op_multi_scale_args {
    const te_tensor *const *in;
    te_tensor *const *out;
    int num_tensors;
    float scale;
    const te_tensor *scale_device;
    te_tensor *found_inf;
} te_op_multi_scale_args;

/* One function an operation: te_result te_op_gemm(te_ctx *te, const te_op_gemm_args *args), and so on. Errors: TE_ERR_SHAPE,
 * TE_ERR_DTYPE, TE_ERR_INVALID, TE_ERR_UNSUPPORTED, TE_ERR_OUT_OF_MEMORY, TE_ERR_COMPILE, TE_ERR_DEVICE. */
#define TE_OP_FUNCTION(lower, UPPER, family) TE_API te_result te_op_##lower(te_ctx *te, const te_op_##lower##_args *args);
TE_OP_LIST(TE_OP_FUNCTION)
#undef TE_OP_FUNCTION

/* The name of an operation: "gemm", "fp8_quantize" ... Static string; "?" for a value outside the list. */
TE_API const char *te_query_name(te_op op);
/* The name of its family, which is that of its folder of kernels: "gemm", "cast" ... Static string; "?" for a value outside the list. */
TE_API const char *te_query_family(te_op op);
