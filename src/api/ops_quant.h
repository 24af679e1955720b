/* api/ops_quant.h: the args of the raw operations that quantize. The rules of api/ops.h hold for all of them. */

/* ---- cast ---------------------------------------------------------------------------------------------------- */

/* amax f32 [1] = max |x|; NaN is ignored, infinity kept (as nvte_compute_amax).
 *   keep    amax becomes the larger one of max |x| and its present value
 *   noop    optional
 *   groups  optional i32 [M], x viewed as [M, N]: the group of each row (te_op_moe_chunk_map with chunk_numbers makes
 *           this list from sizes). amax is f32 [n] then, or a column [n, 1] of a matrix: max |x| over the rows of each
 *           group, 0 for a group without rows. A row whose number is outside 0 .. n-1 belongs to no group. Not with
 *           noop */
typedef struct te_op_amax_args {
    const te_tensor *x;
    te_tensor *amax;
    bool keep;
    const te_tensor *noop, *groups;
} te_op_amax_args;

/* Computes scale [n] and scale_inv [n] from amax [n], all f32 (as nvte_compute_scale_from_amax):
 *   a = amax < epsilon ? epsilon : amax
 *   scale = 1 if a is 0, inf or NaN, else RN(fp8_max / a); infinity becomes FLT_MAX, power_of_two clears the mantissa
 *   scale_inv = RN(1 / scale) */
typedef struct te_op_scale_from_amax_args {
    const te_tensor *amax;
    te_tensor *scale, *scale_inv; /* scale_inv optional */
    float fp8_max;
    float epsilon;                /* the least a; 0 => no least a */
    bool power_of_two;
} te_op_scale_from_amax_args;

/* The update of delayed scaling (TransformerEngine: delayed_scaling_recipe), in place, for `count` states at once; one
 * launch serves some 200 states. State i has n_i slots: amax_history[i] f32 [L_i, n_i] and scale[i] f32 [n_i]. For each
 * slot scale = fp8_max / 2^margin / amax, with the amax that `algo` takes from the history; the history moves by one
 * row, and row 0 becomes 0. A slot whose newest amax is 0 stays as it is. An infinite or NaN amax leaves the scale
 * unchanged.
 *   reduced  optional f32 [n_0 + n_1 + ..]: the newest amaxes after a reduction over a group; an amax that is not 0
 *            here replaces the one in row 0 of the history */
typedef struct te_op_delayed_update_args {
    te_tensor *const *amax_history, *const *scale;
    int count;
    const te_tensor *reduced;
    float fp8_max;
    float margin;      /* -64 to 64 */
    te_amax_algo algo; /* how the amax is taken from the history; 0 => the largest */
} te_op_delayed_update_args;

/* amaxes f32 [n_0 + n_1 + ..] = row 0 of each of the `count` histories amax_history[i] f32 [L_i, n_i], one behind the
 * other, so that one collective can reduce them over a group. */
typedef struct te_op_delayed_gather_args {
    te_tensor *const *amax_history;
    int count;
    te_tensor *amaxes;
} te_op_delayed_gather_args;

/* Per-tensor FP8 cast (as nvte_quantize) of x [.., N], viewed as [M, N]: q = saturate(round_to_nearest_even(f32(x) *
 * scale)); infinity saturates, NaN stays NaN.
 *   row        [M, ld] e4m3 or e5m2, optional: element (m, n) at m * ld + n; columns N .. ld-1 are written as 0
 *   col        [N, ldc] optional: the same codes transposed, element (m, n) at n * ldc + m; columns M .. ldc-1 are
 *              written as 0
 *   scale      f32 [1], read; NULL with `current`
 *   scale_inv  f32 [1], optional, written: RN(1 / scale)
 *   amax       f32 [1], optional: max(amax, max |x|) of the unscaled x; with `current` max |x|
 *   current    the scale is computed from max |x| by the rule of te_op_scale_from_amax, with the fp8_max of the codes'
 *              format, `epsilon` and `power_of_two` (Float8CurrentScalingQuantizer)
 *   x_amax     f32 [2], optional, with `current` and without `noop`, at a multiple of 8 bytes. Its first number is max
 *              |x|, as `amax` of te_op_act_fwd and others has left it, its second is 0; so x is read only once. The
 *              call sets both to 0
 *   dbias      [N] of any float format, optional: the column sums of x in f32, which are the gradient of a bias if x is
 *              a gradient; not with `noop`
 *   noop       optional f32 [1]: 1.0 => nothing is written
 *   groups     optional i32 [M]: the group of each row, as in te_op_amax. scale, scale_inv and amax are [n], one number
 *              for each group; scale and amax may be columns [n, 1] of matrices. Rows of no group get codes 0. Not with
 *              `current` (te_op_amax and te_op_scale_from_amax make such scales), `dbias` or `noop` */
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

/* y = f32(q) * scale_inv, rounded once to y's format. q [M, ld] with ld >= N, y [M, N]. groups: optional i32 [M], as in
 * te_op_fp8_quantize: scale_inv is f32 [n] then, and rows of no group become 0. */
typedef struct te_op_fp8_dequantize_args {
    const te_tensor *q, *scale_inv;
    te_tensor *y;
    const te_tensor *groups;
} te_op_fp8_dequantize_args;

/* dst [N, ldd] = the transpose of the first N columns of src [M, lds]: dst(n, m) = src(m, n); columns M .. ldd-1 become
 * zero. 4-bit (e2m1), 8-, 16- or 32-bit elements; src and dst have the same format. `rows` and `columns` are M and
 * N. */
typedef struct te_op_transpose_args {
    const te_tensor *src;
    te_tensor *dst;
    int64_t rows, columns;
} te_op_transpose_args;

/* ---- block ---------------------------------------------------------------------------------------------------
 * FP8 with one f32 scale for each 1 x 128 or 128 x 128 elements (DeepSeek-V3; TransformerEngine's
 * Float8BlockQuantizer). The row-wise copy is quantized along the rows of x and the column-wise copy along its columns,
 * independently of each other. Any size: the last block of a row or column may be short. All padding is written as
 * 0. */

/* Quantizes x [.., N], viewed as [M, N], by tiles: 1 x 128 for row and 128 x 1 for col, or 128 x 128 for both
 * (two_dimensional).
 *   row            [M, ld] e4m3 or e5m2, optional
 *   row_scale_inv  f32: 1-D [ceil(N / 128), round_up(M, 4)], the block's index first; 2-D [ceil(M / 128),
 *                  round_up(ceil(N / 128), 4)]
 *   col            [N, ldc], transposed, optional
 *   col_scale_inv  f32: 1-D [ceil(M / 128), round_up(N, 4)]; 2-D [ceil(N / 128), round_up(ceil(M / 128), 4)]
 *   noop           optional
 * For each tile: a = max |x|, NaN ignored. The scale follows te_op_scale_from_amax with `epsilon`, with two
 * differences: an infinite quotient becomes the largest finite number of x's format, and the mantissa is cleared unless
 * fp32_scales. q = saturate(RNE(f32(x) * scale)), scale_inv = RN(1 / scale). */
typedef struct te_op_block_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale_inv, *col, *col_scale_inv;
    bool two_dimensional; /* one scale for each 128 x 128 elements; false => for each 128 elements along each copy */
    bool fp32_scales; /* false => scales are powers of two */
    float epsilon;
    const te_tensor *noop;
} te_op_block_quantize_args;

/* y [M, N] = RN(f32(q) * scale_inv), rounded once more to y's format. columnwise: q and scale_inv are those of the
 * column-wise copy. */
typedef struct te_op_block_dequantize_args {
    const te_tensor *q, *scale_inv;
    te_tensor *y;
    bool two_dimensional; /* as in te_op_block_quantize_args */
    bool columnwise;
} te_op_block_dequantize_args;

/* ---- mxfp8 ---------------------------------------------------------------------------------------------------
 * FP8 with one power-of-two scale (E8M0) for each 32 elements (OCP Microscaling Formats v1.0; TransformerEngine's
 * MXFP8Quantizer). */

/* Quantizes x [.., N], viewed as [M, N], by groups: 32 elements along a row (row) and along a column (col), or 32 x 32
 * (two_dimensional: one scale for the tile, repeated in the scales of both copies). The last group of a row or column
 * may be short.
 *   row        [M, ld] e4m3 or e5m2, optional
 *   row_scale  e8m0 [round_up(M, 128), round_up(ceil(N / 32), 4)]
 *   col        [M, ld], optional, in the format of row: the values of x scaled along the columns; not transposed
 *   col_scale  e8m0 [round_up(ceil(M / 32), 4), round_up(N, 128)]
 *   swizzled   the scales have the same shapes, and the layout that Blackwell's tensor cores read: tiles of 128 x 4
 *              scales, 512 bytes each. The scale of line i (a row of x for row, a column of x for col) and of group j
 *              along the contraction is at ((i / 128) * (T / 4) + j / 4) * 512 + (i % 32) * 16 + (i % 128) / 32 * 4 + j
 *              % 4, with T the padded number of groups
 *   noop       optional
 * For each group: e = E8M0 of RN(amax * RN(1 / fp8_max)), rounded up; the amax ignores NaN. q = saturate(RNE(x * 2^(127
 * - e))); NaN stays NaN. The padding of codes and scales is written as 0. */
typedef struct te_op_mxfp8_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale, *col, *col_scale;
    bool two_dimensional;
    bool swizzled;
    const te_tensor *noop;
} te_op_mxfp8_quantize_args;

/* y [M, N] = f32(q) * 2^(e - 127), rounded to y's format, with e the scale code. q [M, ld], scale e8m0. columnwise: q
 * and scale are those of the column-wise copy. */
typedef struct te_op_mxfp8_dequantize_args {
    const te_tensor *q, *scale;
    te_tensor *y;
    bool columnwise;
    bool swizzled; /* the layout of the scales */
} te_op_mxfp8_dequantize_args;

/* ---- nvfp4 ---------------------------------------------------------------------------------------------------
 * FP4 (E2M1) with one E4M3 scale for each 16 elements and one f32 amax for the tensor, or for each row
 * (TransformerEngine's NVFP4Quantizer).
 *
 * The random Hadamard transform (rht) acts on the column-wise copy alone. It replaces 16 neighbours v of a column (rows
 * 16 j .. 16 j + 15 of x; rows beyond M count as 0) by H (s * v) / 4. H is the Sylvester matrix of order 16. The signs
 * are s = + + + - + - - - - - - + - + - -, or all + with no_random_sign_mask. */

/* The amaxes that te_op_nvfp4_quantize needs. NaN is ignored, infinity kept.
 *   amax_row  f32 [1] = max |x|, or [M]: max |x| of each row of x; optional
 *   amax_col  f32 [1] = max of the magnitudes that the column-wise copy will quantize (transformed with `rht`), or [N]:
 *             the same of each column of x; optional, but one of the two is needed
 *   keep      the larger one of the new amax and the present value is stored; false => the new amax
 *   noop      optional
 *   groups    optional i32 [M]: the group of each row, as in te_op_amax; amax_row and amax_col are f32 [n] then. Groups
 *             begin at multiples of 16 rows: the first of 16 rows says which group all of them belong to. Not with
 *             noop */
typedef struct te_op_nvfp4_amax_args {
    const te_tensor *x;
    te_tensor *amax_row, *amax_col;
    bool rht;
    bool no_random_sign_mask; /* the signs of the transform are all + */
    bool keep;
    const te_tensor *noop, *groups;
} te_op_nvfp4_amax_args;

/* Quantizes x [.., N], viewed as [M, N], by blocks: 16 elements along a row (row) and along a column (col), or 16 x 16
 * (two_dimensional: one scale for the tile, repeated for its 16 rows and columns). The last block may be short. Padding
 * is written as 0.
 *   row        e2m1 [M, ld], optional; two codes a byte, the even column in the low half
 *   row_scale  e4m3 [round_up(M, 128), round_up(ceil(N / 16), 4)]
 *   amax_row   f32 [1], or [M] (row-scaled: each row has an amax), read; may be NULL if row is NULL and amax_col is
 *              given
 *   col        e2m1 [N, ldc], transposed, optional. With rht it includes the codes of rows M .. round_up(M, 16) - 1, so
 *              ldc >= round_up(M, 16)
 *   col_scale  e4m3 [round_up(N, 128), round_up(ceil(M / 16), 4)]
 *   amax_col   f32 [1], or [N] (row-scaled: each column of x, which is a row of the copy, has an amax), read. NULL =>
 *              amax_row, which is [1] then
 *   two_dimensional   both copies use amax_row (or amax_col, if amax_row is NULL), which is [1]; not with rht if col is
 *                     given
 *   swizzled   scales in the layout of te_op_mxfp8_quantize
 *   groups     optional i32 [M]: the group of each row, as in te_op_amax; amax_row and amax_col are f32 [n] then. The
 *              column-wise copy needs groups that begin at multiples of 16 rows, and takes the number of the first of
 *              16 rows. Rows of no group are quantized by the amax of group 0. Not with two_dimensional, `measure` or
 *              `noop`
 *   rht        the column-wise copy is transformed and rounded to bf16; amax, scales and codes are those of the rounded
 *              values. Sums are taken as a tensor core takes them: each product is truncated 25 bits below the leading
 *              bit of the largest product, the products are added exactly, and the sum is truncated to f32. In both
 *              copies a NaN makes the scale of its block NaN, and all codes of the block 7 (the value 6)
 * The arithmetic, with F = 448 (256 if e4m3_max_256):
 *   S = min(F * 6 / amax, FLT_MAX), but 1 if amax or S is 0
 *   d = E4M3(RN(block amax * RN(S * RN(1 / 6))))        the block's scale
 *   mult = min(RN(1 / RN(d * RN(1 / S))), FLT_MAX)
 *   q = E2M1(RNE(RN(x * mult)))                         saturated; NaN => 6
 * Two options change it:
 *   stochastic_rounding  q is the largest code not above t = RN(|RN(x * mult)| + u * step), with x's sign; NaN => 6.
 *                        step is 0.5, 1 or 2 for magnitudes below 2, below 4, and above. u = k / 256, with k byte i of
 *                        the 16 bytes of Philox (seed, offset, row * blocks + block). i is the element's place in its
 *                        block, blocks the number of blocks in a row of the copy that hold elements of x. The
 *                        column-wise copy uses offset + 1, and its own rows and blocks. two_dimensional changes nothing
 *                        in this
 *   four_over_six  b = RN(RN(block amax / 6) * S) and d = E4M3(b). Each block (or tile) is also tried with d =
 *                  E4M3(RN(b * 1.5)), and keeps this d if the error is smaller. The error is the sum over the block's
 *                  elements, in order, of |e| or e * e with e = RN(RN(RN(RN(q * d) * amax) / (6 F)) - x), every
 *                  operation rounded, q as it would be written. For a tile the 16 sums of its rows in the copy are
 *                  added half to half (i with i + 8, then + 4, + 2, + 1). Each copy chooses for itself, tiles too */
typedef struct te_op_nvfp4_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale, *col, *col_scale;
    const te_tensor *amax_row, *amax_col;
    bool two_dimensional;
    bool rht;          /* the column-wise copy is transformed */
    bool no_random_sign_mask; /* the signs of the transform are all + */
    bool stochastic_rounding;
    uint64_t seed, offset;
    const te_tensor *rng; /* optional */
    te_4over6_error four_over_six; /* 0 => off */
    bool e4m3_max_256; /* F = 256 */
    bool swizzled;
    bool measure; /* amax_row and amax_col are written first, as te_op_nvfp4_amax does without keep; both may be one
                   * tensor [1] unless col is transformed */
    const te_tensor *noop; /* optional */
    const te_tensor *groups;
} te_op_nvfp4_quantize_args;

/* y [M, N] = RN(q * RN(RN(d * amax) * RN(1 / (6 F)))), rounded to y's format; d is the block's number in `scale`
 * (e4m3). An amax of 0 counts as 6 F (S = 1).
 *   columnwise  q and scale are those of the column-wise copy; with rht the inverse transform (the transpose) is
 *               applied, in f32
 *   amax        f32 [1] or [M]; with columnwise [1] or [N]
 *   groups      optional i32 [M], as in te_op_nvfp4_quantize: amax is f32 [n] then */
typedef struct te_op_nvfp4_dequantize_args {
    const te_tensor *q, *scale, *amax;
    te_tensor *y;
    bool columnwise;
    bool rht, no_random_sign_mask; /* as in the quantizing call */
    bool e4m3_max_256;      /* F = 256 */
    bool swizzled;          /* the layout of the scales */
    const te_tensor *groups;
} te_op_nvfp4_dequantize_args;

/* ---- shard ---------------------------------------------------------------------------------------------------
 * Quantizing this rank's slice of a matrix (TransformerEngine's partial casts), in three steps: the amax of each tile
 * over the slice, to be reduced over the ranks; scales from the reduced amaxes; codes of the slice. Together the slices
 * have the bytes that quantizing the whole matrix gives. */

/* amax f32 [ceil(M / tile_rows), ceil(N / tile_columns)] = max |x| over the elements of each tile that lie in the
 * slice, 0 where none does; NaN is ignored. x has n float elements: elements start .. start + n - 1 of the matrix in
 * row-major order. Fast for tiles of 128 x 128, 16 x 16, 1 x 32 and 32 x 1. For one amax of the whole slice use
 * te_op_amax. */
typedef struct te_op_shard_amax_args {
    const te_tensor *x;
    te_tensor *amax;
    int64_t rows, columns; /* M, N of the matrix */
    int64_t start;
    int64_t tile_rows, tile_columns;
} te_op_shard_amax_args;

/* Computes the scales of a whole matrix from the amaxes of its tiles, by the rule and in the layout of the quantizing
 * operation (padding 0). Each output may be NULL, but not all of them.
 *   BLOCK_2D  reads amax by 128 x 128; writes row_scale f32 (scale_inv), and its transpose to col_scale. amax_limit:
 *             the largest finite number of the format that was quantized from (0 => f32's)
 *   MXFP8     reads amax by 1 x 32 and amax_col by 32 x 1; writes row_scale and col_scale, e8m0
 *   NVFP4     reads amax by 16 x 16 and amax_tensor f32 [1]; writes row_scale and col_scale, e4m3, repeated for the
 *             rows of each tile
 *   multiplier  BLOCK_2D, optional, in row_scale's layout: the factors that te_op_block_quantize multiplies with.
 *               te_op_shard_cast needs them with fp32_scales, because the reciprocal of a rounded reciprocal is another
 *               number
 *   rows, columns   M, N of the matrix */
typedef struct te_op_shard_scales_args {
    te_scaling scaling; /* BLOCK_2D, MXFP8 or NVFP4 */
    const te_tensor *amax, *amax_col, *amax_tensor;
    te_tensor *row_scale, *col_scale;
    int64_t rows, columns;
    te_dtype dtype;    /* the format of the codes; 0 => e4m3, for NVFP4 e2m1 */
    bool fp32_scales;  /* BLOCK_2D: as in te_op_block_quantize_args */
    float epsilon;     /* BLOCK_2D: the least amax that a scale is made from */
    float amax_limit;
    bool e4m3_max_256; /* NVFP4: F = 256 */
    te_tensor *multiplier;
} te_op_shard_scales_args;

/* Quantizes the slice x: n float elements from element `start` of the matrix [rows, columns]. Writes only the codes of
 * the slice; padding, which quantizing the whole matrix writes as 0, is not written.
 *   dst          a row-wise copy [rows, ld] of the matrix; or, with `flat`, the codes of the slice alone, in a dst that
 *                may be longer (e2m1: the first code is in the low half if start is even, else in the high half; in
 *                bytes shared with neighbours the neighbour's half stays)
 *   scaling      TENSOR: x is multiplied by scale f32 [1], and amax, optional f32 [1], becomes max(amax, max |x|).
 *                BLOCK_2D, MXFP8, NVFP4: scale as te_op_shard_scales writes it; NVFP4 needs amax_tensor
 *   multiplier   BLOCK_2D, optional: as te_op_shard_scales writes it; NULL => RN(1 / scale), which is the same only for
 *                powers of two
 *   columnwise   MXFP8: scale is the column-wise one, running along the columns. TENSOR: dst is the transposed copy
 *                [columns, ld] (not flat). Other column-wise copies are made from the gathered rows */
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

/* The error of a quantization. Sums are taken in a fixed order.
 *   x       the values, any float format
 *   y       f32: the dequantized values
 *   limit   f32, optional: the largest magnitude that the scale of each element can represent
 *   counts  i64 [6]: elements; x != 0 and y == 0 (underflow); x finite and |x| > 1.004 limit (saturated); NaN in x;
 *           infinite in x; zeros in x
 *   sums    f32 [5]: over the elements with finite x and y: x^2, y^2, x y, (x - y)^2; and max |x - y| */
typedef struct te_op_quant_error_args {
    const te_tensor *x, *y, *limit;
    te_tensor *counts, *sums;
} te_op_quant_error_args;
