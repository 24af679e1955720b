/* api/ops_quant.h: the args of the raw operations that quantize. The rules of api/ops.h hold for all of them. */

/* ---- cast ---------------------------------------------------------------------------------------------------- */

/* Computes amax f32 [1] = max |x|. NaN is ignored and infinity is kept (as nvte_compute_amax).
 *   keep    true: amax becomes max(amax, max |x|)
 *   noop    optional f32 [1]: 1.0 => nothing is written
 *   groups  optional i32 [M], with x viewed as [M, N]: the group of each row, a number from 0 to n-1 (from
 *           te_op_moe_chunk_map with chunk_numbers). n is the number of groups. A row with another number belongs to no
 *           group. With `groups`, amax is f32 [n], or a column [n, 1] of a matrix. Element g is max |x| over the rows
 *           of group g, and 0 for a group without rows. Not with noop */
typedef struct te_op_amax_args {
    const te_tensor *x;
    te_tensor *amax;
    bool keep;
    const te_tensor *noop, *groups;
} te_op_amax_args;

/* Computes scale [n] and scale_inv [n] from amax [n], all f32 (as nvte_compute_scale_from_amax). RN rounds to the
 * nearest f32:
 *   a = amax < epsilon ? epsilon : amax
 *   scale = 1 if a is 0, inf or NaN, else RN(fp8_max / a). An infinite scale becomes FLT_MAX. power_of_two sets the
 *   mantissa of the scale to 0
 *   scale_inv = RN(1 / scale) */
typedef struct te_op_scale_from_amax_args {
    const te_tensor *amax;
    te_tensor *scale, *scale_inv; /* scale_inv optional */
    float fp8_max;
    float epsilon;                /* the least a; 0 => no least a */
    bool power_of_two;
} te_op_scale_from_amax_args;

/* Updates `count` states of delayed scaling in place (TransformerEngine: delayed_scaling_recipe). State i has n_i
 * scales: scale[i] is f32 [n_i], amax_history[i] is f32 [L_i, n_i]. Each scale becomes fp8_max / 2^margin / amax, where
 * `algo` takes amax from the scale's column of the history. Then the history moves by one row, and row 0 becomes 0. If
 * the newest amax (row 0) of a scale is 0, the scale and its column do not change. An infinite or NaN amax leaves the
 * scale unchanged.
 *   reduced  optional f32 [n_0 + n_1 + ..]: the newest amaxes, reduced over ranks. A number that is not 0 replaces the
 *            one in row 0 of the history */
typedef struct te_op_delayed_update_args {
    te_tensor *const *amax_history, *const *scale;
    int count;
    const te_tensor *reduced;
    float fp8_max;
    float margin;      /* -64 to 64 */
    te_amax_algo algo; /* how the amax is taken from the history; 0 => the largest */
} te_op_delayed_update_args;

/* Gathers the newest amaxes: copies row 0 of each history to `amaxes`, f32 [n_0 + n_1 + ..], one row behind the other.
 * amax_history[i] is f32 [L_i, n_i]. */
typedef struct te_op_delayed_gather_args {
    te_tensor *const *amax_history;
    int count; /* number of histories */
    te_tensor *amaxes;
} te_op_delayed_gather_args;

/* Casts x [.., N], viewed as [M, N], to FP8 with one scale (as nvte_quantize): q =
 * saturate(round_to_nearest_even(f32(x) * scale)). Infinity saturates, and NaN stays NaN.
 *   row        [M, ld] e4m3 or e5m2, optional: element (m, n) at m * ld + n; columns N .. ld-1 are written as 0
 *   col        [N, ldc] optional: the same codes transposed, element (m, n) at n * ldc + m; columns M .. ldc-1 are
 *              written as 0
 *   scale      f32 [1], read; NULL with `current`
 *   scale_inv  f32 [1], optional, written: RN(1 / scale)
 *   amax       f32 [1], optional, written: max(amax, max |x|) of the unscaled x; with `current`: max |x| alone
 *   current    true: the scale comes from max |x| as in te_op_scale_from_amax, with `epsilon` and `power_of_two`
 *              (Float8CurrentScalingQuantizer)
 *   x_amax     f32 [2], optional, aligned to 8 bytes, with `current` and without `noop`. Before the call, x_amax[0]
 *              must be max |x|, and x_amax[1] (a counter) must be 0. The call sets both to 0. Saves a pass over x
 *   dbias      [N] of any float format, optional: the column sums of x in f32 (the gradient of a bias). Not with `noop`
 *   noop       optional f32 [1]: 1.0 => nothing is written
 *   groups     optional i32 [M]: the group of each row, as in te_op_amax. scale, scale_inv and amax are then [n], one
 *              number for each group; scale and amax may also be columns [n, 1] of matrices. Rows of no group get codes
 *              0. Not with `current`, `dbias` or `noop` */
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

/* Computes y [M, N] = f32(q) * scale_inv, rounded once to y's format. q is [M, ld], ld >= N.
 *   groups  optional i32 [M]: the group of each row, as in te_op_amax. scale_inv is then f32 [n], one number for each
 *           group. Rows of no group become 0 */
typedef struct te_op_fp8_dequantize_args {
    const te_tensor *q, *scale_inv;
    te_tensor *y;
    const te_tensor *groups;
} te_op_fp8_dequantize_args;

/* Transposes the first N columns of src [M, lds] into dst [N, ldd]: dst(n, m) = src(m, n). Columns M .. ldd-1 of dst
 * become 0. src and dst have one format, of 4 (e2m1), 8, 16 or 32 bits. `rows` is M, `columns` N. */
typedef struct te_op_transpose_args {
    const te_tensor *src;
    te_tensor *dst;
    int64_t rows, columns;
} te_op_transpose_args;

/* ---- block ---------------------------------------------------------------------------------------------------
 * FP8 with one f32 scale for each 1 x 128 or 128 x 128 elements (DeepSeek-V3; TransformerEngine's
 * Float8BlockQuantizer). The last block of a row or column may be short. All padding is written as 0. */

/* Quantizes x [.., N], viewed as [M, N], with one scale for each tile. With two_dimensional ("2-D" below) a tile is 128
 * x 128 elements in both copies. Otherwise ("1-D") it is 1 x 128 elements in `row` and 128 x 1 in `col`.
 *   row            [M, ld] e4m3 or e5m2, optional
 *   row_scale_inv  f32. 1-D: [ceil(N / 128), round_up(M, 4)], the scale of row m and block j is at [j, m]. 2-D: [ceil(M
 *                  / 128), round_up(ceil(N / 128), 4)]
 *   col            [N, ldc], optional, transposed
 *   col_scale_inv  f32. 1-D: [ceil(M / 128), round_up(N, 4)]. 2-D: [ceil(N / 128), round_up(ceil(M / 128), 4)]
 *   noop           optional f32 [1]: 1.0 => nothing is written
 * For each tile, a = max |x|, with NaN ignored. The scale is that of te_op_scale_from_amax with `epsilon`, with two
 * differences. If fp8_max / a is infinite in f32, the scale is the largest finite number of x's format. The mantissa of
 * the scale is set to 0 unless fp32_scales is true. Then q = saturate(RNE(f32(x) * scale)) and scale_inv = RN(1 /
 * scale). */
typedef struct te_op_block_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale_inv, *col, *col_scale_inv;
    bool two_dimensional; /* blocks of 128 x 128; false => of 128 elements along a row or column */
    bool fp32_scales; /* false => scales are powers of two */
    float epsilon;
    const te_tensor *noop;
} te_op_block_quantize_args;

/* Computes y [M, N] = RN(f32(q) * scale_inv), rounded once more to y's format. If columnwise is true, q and scale_inv
 * are those of the column-wise copy. */
typedef struct te_op_block_dequantize_args {
    const te_tensor *q, *scale_inv;
    te_tensor *y;
    bool two_dimensional; /* as in te_op_block_quantize_args */
    bool columnwise;
} te_op_block_dequantize_args;

/* ---- mxfp8 ---------------------------------------------------------------------------------------------------
 * FP8 with one power-of-two scale (E8M0) for each 32 elements (OCP Microscaling Formats v1.0; TransformerEngine's
 * MXFP8Quantizer). */

/* Quantizes x [.., N], viewed as [M, N], with one scale for each block. A block is 32 elements along a row (`row`) or a
 * column (`col`). With two_dimensional a block is 32 x 32 elements; its scale is repeated. The last block of a row or
 * column may be short.
 *   row        [M, ld] e4m3 or e5m2, optional
 *   row_scale  e8m0 [round_up(M, 128), round_up(ceil(N / 32), 4)]
 *   col        [M, ld], optional, in the format of row: the values of x scaled along the columns; not transposed
 *   col_scale  e8m0 [round_up(ceil(M / 32), 4), round_up(N, 128)]
 *   swizzled   true: the scales have these shapes, but the layout of Blackwell's tensor cores: tiles of 128 x 4 scales,
 *              512 bytes each. A line is a row of x for `row`, a column of x for `col`. G is the padded number of
 *              blocks of a line. The scale of block j of line i is byte
 *              ((i / 128) * (G / 4) + j / 4) * 512 + (i % 32) * 16 + (i % 128) / 32 * 4 + (j % 4)
 *   noop       optional f32 [1]: 1.0 => nothing is written
 * For each block, the scale's code e is RN(amax * RN(1 / fp8_max)) rounded up to E8M0; the amax ignores NaN. Then q =
 * saturate(RNE(x * 2^(127 - e))), and NaN stays NaN. The padding of codes and scales is written as 0. */
typedef struct te_op_mxfp8_quantize_args {
    const te_tensor *x;
    te_tensor *row, *row_scale, *col, *col_scale;
    bool two_dimensional;
    bool swizzled;
    const te_tensor *noop;
} te_op_mxfp8_quantize_args;

/* Computes y [M, N] = f32(q) * 2^(e - 127), rounded to y's format. e is the code in `scale` (e8m0); q is [M, ld].
 * columnwise: q and scale are the column-wise copy's. */
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
 * The random Hadamard transform (rht) acts on the column-wise copy alone. Let v be rows 16 j .. 16 j + 15 of a column
 * of x; rows beyond M count as 0. The transform replaces v by H (s * v) / 4. H is the Sylvester-Hadamard matrix of
 * order 16. The 16 signs s are (+ + + - + - - - - - - + - + - -); with no_random_sign_mask all of them are +. */

/* Computes the amaxes that te_op_nvfp4_quantize needs. NaN is ignored, and infinity is kept. At least one of amax_row
 * and amax_col is needed.
 *   amax_row  optional. f32 [1]: max |x|. f32 [M]: max |x| of each row of x
 *   amax_col  optional. f32 [1]: max |x| or, with `rht`, the largest magnitude of the transformed x. f32 [N]: this
 *             maximum for each column of x
 *   keep      true: the old value stays if it is larger than the new amax
 *   noop      optional f32 [1]: 1.0 => nothing is written
 *   groups    optional i32 [M]: the group of each row, as in te_op_amax. amax_row and amax_col are then f32 [n]. Groups
 *             must begin at multiples of 16 rows: each 16 rows have the group of the first of them. Not with noop */
typedef struct te_op_nvfp4_amax_args {
    const te_tensor *x;
    te_tensor *amax_row, *amax_col;
    bool rht;
    bool no_random_sign_mask; /* the signs of the transform are all + */
    bool keep;
    const te_tensor *noop, *groups;
} te_op_nvfp4_amax_args;

/* Quantizes x [.., N], viewed as [M, N], with one scale for each block. A block is 16 elements along a row (`row`) or a
 * column (`col`). With two_dimensional a block is a tile of 16 x 16 elements; its scale is repeated. The last block may
 * be short. Padding is written as 0.
 *   row        e2m1 [M, ld], optional; two codes a byte, the even column in the low half
 *   row_scale  e4m3 [round_up(M, 128), round_up(ceil(N / 16), 4)]
 *   amax_row   input f32 [1], or f32 [M] for one amax in each row ("row-scaled"). Optional if row is NULL and amax_col
 *              is given
 *   col        e2m1 [N, ldc], transposed, optional. With rht it has codes for round_up(M, 16) rows of x, and ldc is not
 *              smaller
 *   col_scale  e4m3 [round_up(N, 128), round_up(ceil(M / 16), 4)]
 *   amax_col   input f32 [1], or f32 [N] for one amax in each column of x ("row-scaled"). NULL => amax_row, which must
 *              be [1]
 *   two_dimensional   both copies use amax_row (or amax_col, if amax_row is NULL), which must be [1]. Not with rht if
 *                     col is given
 *   swizzled   true: the scales are in the layout of te_op_mxfp8_quantize with `swizzled`
 *   groups     optional i32 [M]: the group of each row, as in te_op_amax. amax_row and amax_col are then f32 [n]. For
 *              the column-wise copy, groups must begin at multiples of 16 rows: each 16 rows have the group of the
 *              first of them. Rows of no group are quantized with the amax of group 0. Not with two_dimensional,
 *              `measure` or `noop`
 *   rht        true: the column-wise copy is first transformed and rounded to bf16. The transform sums as a tensor core
 *              does. Each product is truncated 25 bits below the leading bit of the largest product. The products are
 *              added exactly, and the sum is truncated to f32. In both copies a NaN makes the scale of its block NaN
 *              and all codes of the block 7 (the value 6)
 * The arithmetic, with F = 448 (256 if e4m3_max_256):
 *   S = min(F * 6 / amax, FLT_MAX), but 1 if amax or S is 0
 *   d = E4M3(RN(block amax * RN(S * RN(1 / 6))))        the block's scale
 *   mult = min(RN(1 / RN(d * RN(1 / S))), FLT_MAX)
 *   q = E2M1(RNE(RN(x * mult)))                         saturated; NaN => 6
 * Two options change the arithmetic:
 *   stochastic_rounding  the magnitude of q is the largest code not above t = RN(|RN(x * mult)| + u * step), and q has
 *                        the sign of x; NaN => 6. step is 0.5 for magnitudes |RN(x * mult)| below 2. It is 1 from 2 to
 *                        4, and 2 from 4 on. u = k / 256, where k is byte i of the 16 bytes of Philox (seed, offset,
 *                        r * blocks + c). r is the index of the row in the copy, c that of the block in the row, and i
 *                        that of the element in the block. `blocks` is the number of blocks of a row that hold elements
 *                        of x. The column-wise copy uses offset + 1. two_dimensional changes none of this
 *   four_over_six  d is E4M3(b) or E4M3(RN(b * 1.5)), with b = RN(RN(block amax / 6) * S). A block takes the second d
 *                  if this d gives the smaller error, else the first d. The error is the sum over the block's elements,
 *                  in order, of |e| or e * e, with e = RN(RN(RN(RN(q * d) * amax) / (6 F)) - x). q is the code that
 *                  would be written; every operation is rounded. A tile has 16 such sums, one for each of its rows in
 *                  the copy. Sum i + 8 is added to sum i, then sum i + 4, i + 2 and i + 1. Each copy chooses
 *                  separately, also for tiles */
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
    bool measure; /* true: te_op_nvfp4_amax writes amax_row and amax_col first. Both may be the same tensor [1] unless
                   * col is transformed */
    const te_tensor *noop; /* optional */
    const te_tensor *groups;
} te_op_nvfp4_quantize_args;

/* Computes y [M, N] = RN(q * RN(RN(d * amax) * RN(1 / (6 F)))), rounded to y's format. d is the scale of the block of q
 * in `scale` (e4m3). F is 448, or 256 with e4m3_max_256. An amax of 0 counts as 6 F.
 *   columnwise  true: q and scale are those of the column-wise copy; with rht the inverse transform follows, in f32
 *   amax        f32 [1] or [M]; with columnwise [1] or [N]
 *   groups      optional i32 [M], as in te_op_nvfp4_quantize; amax is then f32 [n] */
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
 * These operations quantize this rank's slice of a matrix (TransformerEngine's partial casts). The codes of all slices
 * together have the same bytes as when the whole matrix is quantized. The steps:
 *   1. te_op_shard_amax computes the amax of each tile over the slice.
 *   2. The caller reduces the amaxes over the ranks.
 *   3. te_op_shard_scales computes scales from the reduced amaxes.
 *   4. te_op_shard_cast writes the codes of the slice. */

/* Computes the amax of each tile of a matrix over the elements in the slice x: amax f32 [ceil(M / tile_rows), ceil(N /
 * tile_columns)], 0 for a tile without such elements. NaN is ignored. x has the n elements from `start` on, in
 * row-major order. Fast for tiles of 128 x 128, 16 x 16, 1 x 32 and 32 x 1. */
typedef struct te_op_shard_amax_args {
    const te_tensor *x;
    te_tensor *amax;
    int64_t rows, columns; /* M, N of the matrix */
    int64_t start;
    int64_t tile_rows, tile_columns;
} te_op_shard_amax_args;

/* Computes the scales of a whole matrix from the amaxes of its tiles, as the operation that quantizes the whole matrix
 * does. At least one output is needed.
 *   BLOCK_2D  reads amax, one for each 128 x 128 elements. Writes row_scale f32 (scale_inv), and its transpose to
 *             col_scale. amax_limit is the largest finite number of the matrix's format (0 => that of f32)
 *   MXFP8     reads amax, one for each 1 x 32 elements, and amax_col, one for each 32 x 1. Writes row_scale and
 *             col_scale, e8m0
 *   NVFP4     reads amax, one for each 16 x 16 elements, and amax_tensor f32 [1]. Writes row_scale and col_scale, e4m3,
 *             repeated for the rows of each tile
 *   multiplier  BLOCK_2D, optional, in row_scale's layout: the scale of each tile. te_op_shard_cast needs it with
 *               fp32_scales, because RN(1 / scale_inv) can differ from the scale
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

/* Quantizes the slice x: n float elements from element `start` of the matrix [rows, columns]. Writes the codes of the
 * slice alone, and no padding.
 *   dst          a row-wise copy [rows, ld] of the matrix; with `flat` the codes of the slice alone (dst may be
 *                longer). In a flat e2m1 dst the first code is in the low half of a byte if start is even, else in the
 *                high half. If a byte has codes of two slices, only this slice's half of the byte changes
 *   scaling      TENSOR: x is multiplied by scale f32 [1], and amax, optional f32 [1], becomes max(amax, max |x|).
 *                BLOCK_2D, MXFP8, NVFP4: scale is as te_op_shard_scales writes it. NVFP4 needs amax_tensor too
 *   multiplier   BLOCK_2D, optional: as te_op_shard_scales writes it. NULL => RN(1 / scale), exact only for powers of
 *                two
 *   columnwise   MXFP8: scale is that of the column-wise copy. TENSOR: dst is the transposed copy [columns, ld] (not
 *                flat). Must be false with other scalings: their column-wise copy is made from the gathered row-wise
 *                copy */
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

/* Measures the error of a quantization. Sums are taken in a fixed order.
 *   x       the values, any float format
 *   y       f32: the dequantized values
 *   limit   f32, optional: the largest magnitude that each element's scale can represent
 *   counts  i64 [6], the numbers of: all elements; elements with x != 0 and y == 0 (underflow); elements with finite x
 *           and |x| > 1.004 * limit (saturated); NaN in x; infinities in x; zeros in x
 *   sums    f32 [5], over the elements with finite x and y: the sums of x^2, y^2, x y and (x - y)^2, and the maximum of
 *           |x - y| */
typedef struct te_op_quant_error_args {
    const te_tensor *x, *y, *limit;
    te_tensor *counts, *sums;
} te_op_quant_error_args;
