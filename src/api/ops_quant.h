/* api/ops_quant.h: the raw operations that quantize: their args; the rules of api/ops.h hold for all. */

/* ---- cast ---------------------------------------------------------------------------------------------------- */

/* amax f32 [1] = max |x|, NaN ignored, infinity kept (as nvte_compute_amax). keep: amax becomes the maximum of that and
 * its present value. noop: optional. groups: optional i32 [M], x viewed as [M, N]: the group of each row
 * (te_op_moe_chunk_map with chunk_numbers makes them of sizes). amax is f32 [n] then, or a
 * column [n, 1] of a matrix: max |x| of each group's rows, 0 of a group without any. Rows of other numbers than 0 ..
 * n-1 belong to no group. Not with noop. */
typedef struct te_op_amax_args {
    const te_tensor *x;
    te_tensor *amax;
    bool keep;
    const te_tensor *noop, *groups;
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

/* The delayed-scaling update (TransformerEngine: delayed_scaling_recipe) of `count` states at once, state i with n_i
 * slots: amax_history[i] f32 [L_i, n_i], scale[i] f32 [n_i], both updated in place: scale = fp8_max / 2^margin / amax,
 * the histories move by one row, and row 0 becomes 0. A slot whose newest amax is 0 stays as it is; an infinite or NaN
 * amax leaves the scale. One launch for some 200 states. reduced: optional f32 [n_0 + n_1 + ..], the amaxes after a
 * reduction over a group, used where not 0 in place of row 0 of the history. */
typedef struct te_op_delayed_update_args {
    te_tensor *const *amax_history, *const *scale;
    int count;
    const te_tensor *reduced;
    float fp8_max;
    float margin;      /* -64 to 64 */
    te_amax_algo algo; /* how an amax is taken from its history; 0 => the largest */
} te_op_delayed_update_args;

/* amaxes f32 [n_0 + n_1 + ..] = row 0 of each of `count` histories amax_history[i] f32 [L_i, n_i], for a reduction over
 * a group. */
typedef struct te_op_delayed_gather_args {
    te_tensor *const *amax_history;
    int count;
    te_tensor *amaxes;
} te_op_delayed_gather_args;

/* Per-tensor FP8 cast (as nvte_quantize). x [.., N] viewed as [M, N]; q = saturate(round_to_nearest_even(f32(x) *
 * scale)), infinity saturates, NaN stays NaN.
 *   row        [M, ld]  e4m3 or e5m2, optional: element (m, n) at m * ld + n, columns N .. ld-1 are written as 0
 *   col        [N, ldc] the same codes transposed, optional: element at n * ldc + m, columns M .. ldc-1 written as 0
 *   scale      f32 [1]  read; NULL with `current`
 *   scale_inv  f32 [1]  optional, written: RN(1 / scale)
 *   amax       f32 [1]  optional: max(amax, max |x|) of the unscaled input; with `current`: = max |x|
 *   current    the scale comes from x itself, by te_op_scale_from_amax's rule with fp8_max of the codes' format,
 *              `epsilon` and `power_of_two` (Float8CurrentScalingQuantizer)
 *   x_amax     f32 [2], optional, with `current` and without `noop`, at a multiple of 8 bytes: max |x|, as `amax` of
 *              te_op_act_fwd and others has left
 *              it, and 0. x is then read once. Both become 0
 *   dbias      [N] of any float format, optional: the sums of x's columns in f32: the gradient of a bias, if x is a
 *              gradient; not with `noop`
 *   noop       optional f32 [1]: 1.0 => nothing is written
 *   groups     optional i32 [M]: the group of each row, as te_op_amax has it. scale, scale_inv and amax are [n], one
 *              for each group, scale and amax also columns [n, 1] of matrices; the codes of rows of no group are 0. Not
 *              with `current` (te_op_amax and te_op_scale_from_amax make such scales), `dbias` or `noop` */
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
    const te_tensor *groups;
} te_op_fp8_quantize_args;

/* y = f32(q) * scale_inv, rounded once to y's format. q [M, ld] with ld >= N, y [M, N]. groups: optional i32 [M], as
 * te_op_fp8_quantize's: scale_inv is f32 [n], and rows of no group become 0. */
typedef struct te_op_fp8_dequantize_args {
    const te_tensor *q, *scale_inv;
    te_tensor *y;
    const te_tensor *groups;
} te_op_fp8_dequantize_args;

/* dst [N, ldd] = transpose of src [M, lds] restricted to its first N columns: dst(n, m) = src(m, n), pad columns M ..
 * ldd-1 zero. 4-bit (e2m1), 8-, 16- or 32-bit elements, same format. `rows` and `columns` are M and N. */
typedef struct te_op_transpose_args {
    const te_tensor *src;
    te_tensor *dst;
    int64_t rows, columns;
} te_op_transpose_args;

/* ---- block ---------------------------------------------------------------------------------------------------
 * FP8 with one f32 scale for each 1 x 128 or 128 x 128 elements (DeepSeek-V3; TransformerEngine's
 * Float8BlockQuantizer). The two copies are quantized independently: along the rows of x, and along its columns. Any
 * size: the last block of a row or column may be short. All padding is written as 0. */

/* x [.., N] viewed as [M, N], tiles of 1 x 128 (row), 128 x 1 (col), or 128 x 128 (two_dimensional; both).
 *   row            [M, ld] e4m3 or e5m2, optional
 *   row_scale_inv  f32: 1-D [ceil(N / 128), round_up(M, 4)], the block's index first; 2-D [ceil(M / 128),
 *                  round_up(ceil(N / 128), 4)]
 *   col            [N, ldc], transposed, optional
 *   col_scale_inv  f32: 1-D [ceil(M / 128), round_up(N, 4)]; 2-D [ceil(N / 128), round_up(ceil(M / 128), 4)]
 * Per tile: a = max |x|, NaN ignored; scale by te_op_scale_from_amax's rule with `epsilon`, except that an infinite
 * quotient becomes the largest finite number of x's format, and that the mantissa is cleared unless fp32_scales; q =
 * saturate(RNE(f32(x) * scale)); scale_inv = RN(1 / scale). noop: optional. */
typedef struct te_op_block_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale_inv, *col, *col_scale_inv;
    bool two_dimensional; /* scales of 128 x 128; false => of 1 x 128 along each copy */
    bool fp32_scales; /* false => powers of two */
    float epsilon;
    const te_tensor *noop;
} te_op_block_quantize_args;

/* y [M, N] = RN(f32(q) * scale_inv), rounded once more to y's format. columnwise: q and scale_inv are the column-wise
 * copy. */
typedef struct te_op_block_dequantize_args {
    const te_tensor *q, *scale_inv;
    te_tensor *y;
    bool two_dimensional; /* as in te_op_block_quantize_args */
    bool columnwise;
} te_op_block_dequantize_args;

/* ---- mxfp8 ---------------------------------------------------------------------------------------------------
 * FP8 with one power-of-two scale (E8M0) for each 32 elements (OCP Microscaling Formats v1.0; TransformerEngine's
 * MXFP8Quantizer). */

/* x [.., N] viewed as [M, N]; groups of 32 along a row (row) or along a column (col), or 32 x 32 (two_dimensional: one
 * scale for the tile, repeated in both copies' scales). The last group of a row or column may be short. noop: optional.
 *   row        [M, ld] e4m3 or e5m2, optional
 *   row_scale  e8m0 [round_up(M, 128), round_up(ceil(N / 32), 4)]
 *   col        [M, ld], not transposed: the values of x scaled along the columns, in the format of row, optional
 *   col_scale  e8m0 [round_up(ceil(M / 32), 4), round_up(N, 128)]
 *   swizzled   the scales have the layout that Blackwell's tensor cores read (and the same shapes): [R, C] of them are
 *              tiles of 128 x 4, 512 bytes each; scale (i, j) (i: row of x or column of x; j: index of the group along
 *              the contraction) at ((i / 128) * (T / 4) + j / 4) * 512 + (i % 32) * 16 + (i % 128) / 32 * 4 + j % 4, T
 *              the padded number of groups
 * Per group: e = E8M0 of RN(amax * RN(1 / fp8_max)), rounded up (NaN never enters an amax); q = saturate(RNE(x * 2^(127
 * - e))), NaN stays NaN.
 * The padding of codes and scales is written as 0. */
typedef struct te_op_mxfp8_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale, *col, *col_scale;
    bool two_dimensional;
    bool swizzled;
    const te_tensor *noop;
} te_op_mxfp8_quantize_args;

/* y [M, N] = f32(q) * 2^(e - 127), rounded to y's format. q [M, ld], scale e8m0; columnwise: the scales run along the
 * columns. */
typedef struct te_op_mxfp8_dequantize_args {
    const te_tensor *q, *scale;
    te_tensor *y;
    bool columnwise;
    bool swizzled; /* the layout of the scales */
} te_op_mxfp8_dequantize_args;

/* ---- nvfp4 ---------------------------------------------------------------------------------------------------
 * FP4 (E2M1) with one E4M3 scale for each 16 elements and one f32 amax above them (TransformerEngine's NVFP4Quantizer).
 *
 * The random Hadamard transform acts on the column-wise copy alone: 16 neighbours v of a column (rows 16 j .. 16 j + 15
 * of x; rows beyond M count as 0) become H (s * v) / 4, s = + + + - + - - - - - - + - + - - (all + without the sign
 * mask), H the Sylvester matrix of order 16. In f32: signs first, then for h = 1, 2, 4, 8 the pairs (i, i + h) become
 * (a + b, a - b), then * 0.25. */

/* amax_row f32 [1] = max |x|, or [M] (one for each row of x); amax_col f32 [1] = the same of what the column-wise copy
 * will quantize (after the transform with `rht`), or [N] (one for each column of x). NaN ignored, infinity kept. Either
 * may be NULL. keep: the maximum with their present values is taken; false => they are overwritten. noop: optional.
 * groups: optional i32 [M]: the group of each row, as te_op_amax has it; amax_row and amax_col are f32 [n] then. Groups
 * begin at multiples of 16 rows: the first of 16 rows says which group all of them belong to. Not with noop. */
typedef struct te_op_nvfp4_amax_args {
    const te_tensor *x;
    te_tensor *amax_row, *amax_col;
    bool rht;
    bool no_random_sign_mask; /* s is all + */
    bool keep;
    const te_tensor *noop, *groups;
} te_op_nvfp4_amax_args;

/* x [.., N] viewed as [M, N]; blocks of 16 along a row (row), along a column (col), or 16 x 16 (two_dimensional: one
 * scale for the tile, repeated for its 16 rows and columns). The last block may be short.
 *   row        e2m1 [M, ld], optional; two codes a byte, the even column in the low half
 *   row_scale  e4m3 [round_up(M, 128), round_up(ceil(N / 16), 4)]
 *   amax_row   f32 [1], or [M] (row-scaled: each row has a scale of its own in place of the tensor's), read
 *   col        e2m1 [N, ldc], transposed, optional; with rht it includes the codes of rows M .. round_up(M, 16) - 1, so
 *              ldc >= round_up(M, 16)
 *   col_scale  e4m3 [round_up(N, 128), round_up(ceil(M / 16), 4)]
 *   amax_col   f32 [1], or [N] (row-scaled: each column of x, a row of the copy, has a scale of its own), read; NULL =>
 *              amax_row's, which is [1] then. amax_row may be NULL if only col is asked for. two_dimensional:
 *              amax_row's for both copies (amax_col's if that is NULL), [1]; and no rht with col
 *   swizzled   scales in the layout of te_op_mxfp8_quantize
 *   groups     optional i32 [M]: the group of each row, as te_op_amax has it: amax_row and amax_col are f32 [n]. The
 *              column-wise copy needs groups that begin at multiples of 16 rows, and takes the number of the first of
 *              16. Rows of no group are quantized by the first group's amax. Not with two_dimensional, `measure` or
 *              `noop`
 *   rht        of the column-wise copy: each 16 rows of a column, times their signs (unless no_random_sign_mask), times
 *              the Hadamard matrix / 4, rounded to bf16; amax, scales and codes are those of the rounded values. Sums
 *              are taken as a tensor core takes them: each product is truncated 25 bits below the leading bit of the
 *              largest, they are added exactly, and the sum is truncated to f32. A NaN makes the scales of its blocks
 *              NaN, in both copies, and their codes 7 (6)
 * With F = 448 (256 if e4m3_max_256):
 *   S = min(F * 6 / amax, FLT_MAX), 1 if amax or S is 0;  d = E4M3(RN(block amax * RN(S * RN(1 / 6))));
 *   mult = min(RN(1 / RN(d * RN(1 / S))), FLT_MAX);  q = E2M1(RNE(RN(x * mult))), saturated, NaN => 6
 * stochastic_rounding: q = the largest code not above t = RN(|RN(x * mult)| + u * step), with x's sign; step 0.5, 1, 2
 * for
 *   magnitudes below 2, below 4, and above; u = k / 256, k byte t of the 16 bytes of Philox (seed, offset, row * blocks
 *   + block),
 *   t the element's place in its block; offset + 1 for the column-wise copy (row: of that copy, blocks: those
 *   of its rows that hold elements of x). The same for two_dimensional; NaN => 6 here too.
 * four_over_six: b = RN(RN(block amax / 6) * S), d = E4M3(b); each block (or tile) is also tried with d = E4M3(RN(b *
 * 1.5)), and keeps it
 *   if the error is smaller: the sum over its elements, in order, of |e| or e * e,
 *   e = RN(RN(RN(RN(q * d) * amax) / (6 F)) - x), every operation
 *   rounded; tiles: the sums of its 16 rows in that copy, half to half (i with i + 8, then + 4, + 2, + 1). q is as it
 *   would be written. Each copy
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
    bool measure; /* amax_row and amax_col are written first, as te_op_nvfp4_amax does without keep; they may be one [1]
                   * unless col is transformed */
    const te_tensor *noop; /* optional */
    const te_tensor *groups;
} te_op_nvfp4_quantize_args;

/* y [M, N] = RN(q * RN(RN(d * amax) * RN(1 / (6 F)))), rounded to y's format; d: `scale`, e4m3; an amax of 0 counts as
 * 6 F (S = 1). columnwise: the column-wise copy; with rht its inverse (the transpose) is applied, in f32. amax f32 [1]
 * or [M], columnwise [N]; with groups, optional i32 [M], f32 [n]: as te_op_nvfp4_quantize has them. */
typedef struct te_op_nvfp4_dequantize_args {
    const te_tensor *q, *scale, *amax;
    te_tensor *y;
    bool columnwise;
    bool rht, no_random_sign_mask; /* as the copy was quantized; so are the next two */
    bool e4m3_max_256;      /* F = 256 */
    bool swizzled;          /* the layout of the scales */
    const te_tensor *groups;
} te_op_nvfp4_dequantize_args;

/* ---- shard ---------------------------------------------------------------------------------------------------
 * Quantizing this rank's slice of a matrix (TransformerEngine's partial casts): amaxes of the slice by tile, to be
 * reduced over the ranks; scales from the reduced amaxes; codes of the slice. Together the slices give the bytes that
 * quantizing the whole matrix gives. */

/* amax f32 [ceil(M / tile_rows), ceil(N / tile_columns)] = max |x| of the elements of each tile that lie in the slice,
 * 0 where there are none; NaN ignored. x: n float elements, the matrix's elements start .. start + n - 1 in row-major
 * order. Fast for tiles of 128 x 128, 16 x 16, 1 x 32 and 32 x 1; for one amax of all, te_op_amax of x. */
typedef struct te_op_shard_amax_args {
    const te_tensor *x;
    te_tensor *amax;
    int64_t rows, columns; /* M, N of the matrix */
    int64_t start;
    int64_t tile_rows, tile_columns;
} te_op_shard_amax_args;

/* Scales of a whole matrix from its amaxes by tile, in the layout that the quantizing operation writes (padding 0), by
 * its rule.
 *   BLOCK_2D  amax by 128 x 128 -> row_scale f32 (scale_inv), and col_scale its transpose; amax_limit: the largest
 *             finite number of the format that was quantized from (0 => f32's)
 *   MXFP8     amax by 1 x 32 -> row_scale, and amax_col by 32 x 1 -> col_scale, e8m0
 *   NVFP4     amax by 16 x 16 and amax_tensor f32 [1] -> row_scale, and col_scale, e4m3, repeated for the rows of each
 *             tile
 *   multiplier  BLOCK_2D, optional: the factors that te_op_block_quantize multiplies with, in row_scale's layout;
 *               te_op_shard_cast needs it with fp32_scales, because the reciprocal of a rounded reciprocal is another
 *               number
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
 *   dst    a row-wise copy [rows, ld] of the matrix; or, flat, the codes of the slice alone (e2m1: the first code is in
 *          the low half if start is even, else the high half; bytes shared with neighbours keep their other half)
 *   scaling TENSOR: x is multiplied with scale f32 [1], and amax, optional f32 [1], becomes max(amax, max |x|);
 *           BLOCK_2D, MXFP8, NVFP4: scale as
 *          te_op_shard_scales writes it; NVFP4 needs amax_tensor
 *   multiplier  BLOCK_2D, optional: as te_op_shard_scales writes it; NULL => RN(1 / scale), which is the same for
 *               powers of two alone
 *   columnwise  MXFP8: scale is the column-wise one, running along the columns; TENSOR: dst is the transposed copy
 *               [columns, ld] (not flat). Other column-wise copies are made from the gathered rows.
 * The codes of the slice alone are written: padding, which quantizing the whole matrix writes as 0, is not. A flat dst
 * may be longer than its slice. */
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

/* The error of a quantization. x: the values, any float format; y f32: the dequantized ones; limit f32, optional: the
 * largest magnitude that each element's scale can represent. Sums in a fixed order.
 *   counts  i64 [6]: elements; x != 0 and y == 0 (underflow); x finite and |x| > 1.004 limit (saturated); NaN in x;
 *           infinite in x; zeros in x
 *   sums    f32 [5]: over elements with finite x and y: x^2, y^2, x y, (x - y)^2; and max |x - y| */
typedef struct te_op_quant_error_args {
    const te_tensor *x, *y, *limit;
    te_tensor *counts, *sums;
} te_op_quant_error_args;
