/* ops/shard/kargs.h: the arguments of the shard kernels. The compilers of host and device both read this file, so it
 * has plain structs only.
 *
 * The slice x has elements start .. start + n - 1 of a matrix [rows, columns]. */

/* Sizes of tiles. TE__SHARD_ANY: any size, and a block of shard_amax handles one tile at a time. With the other sizes
 * a block handles several tiles at once. */
enum { TE__SHARD_ANY = 0, TE__SHARD_128X128 = 1, TE__SHARD_16X16 = 2, TE__SHARD_1X32 = 3, TE__SHARD_32X1 = 4 };

typedef struct te__shard_amax_kargs {
    const void *x;
    float *amax; /* [tiles_m, tiles_n] */
    long long rows, columns, start, n;
    long long tiles_m, tiles_n, tile_rows, tile_columns;
    unsigned blocks_n; /* blocks of 256 columns */
    int x_dt, kind;
    int vector; /* x is aligned to 16 bytes; start and columns are multiples of 8 */
} te__shard_amax_kargs;

typedef struct te__shard_scales_kargs {
    const float *amax, *amax_col, *amax_tensor;
    void *row_scale, *col_scale; /* [row_m, row_n] and [col_m, col_n], or NULL; row_n and col_n are multiples of 4 */
    float *multiplier;           /* [row_m, row_n], or NULL */
    long long rows, columns, row_m, row_n, col_m, col_n;
    float fp8_max, fp8_max_inverse, epsilon, limit, code_max;
    int scaling, power_of_two;
} te__shard_scales_kargs;

typedef struct te__shard_cast_kargs {
    const void *x;
    void *dst;
    const void *scale; /* rows of scale_ld elements */
    const float *multiplier, *amax_tensor;
    float *amax; /* [1], or NULL */
    long long rows, columns, start, n;
    long long ld; /* elements of a row of dst */
    long long scale_ld;
    long long first, count;     /* the groups of 16 columns that the slice touches */
    long long groups_per_row;
    float code_max;
    int x_dt, q_dt, scaling, columnwise;
    int flat;     /* dst has only the slice */
    int straight; /* dst is flat with e2m1 codes, and `columns` is odd. So a byte may hold codes of two rows. The matrix
                   * is treated as one row, cut into groups of 16 */
    int vector;   /* x and dst are aligned to 16 bytes; start, columns and ld are multiples of 16 */
    unsigned tiles_n; /* shard_cast_transposed: tiles of 64 columns */
    long long first_tile; /* shard_cast_transposed: index of the tile of 128 matrix rows in which the slice begins */
} te__shard_cast_kargs;
