/* ops/gemm/kargs.h: the arguments of the gemm kernels. The host's and the kernels' compilers both read this file. */

/* How the operands of te_op_grouped_gemm lie in memory:
 * - Groups of rows: A and D hold the groups one after the other. B is a stack of matrices.
 * - Groups along k (`along_k`): A and B hold the groups one after the other. D is a stack of matrices. */
typedef struct te__gemm_grouping {
    const void *sizes;     /* [count], or [count + 1] offsets */
    long long b_elements;  /* elements from one group to the next in B, or in D with along_k */
    long long block_b;     /* scales of B from one group to the next */
    int count;             /* number of groups; 0: one product */
    int dt;                /* dtype of sizes: i32 or i64 */
    int offsets, along_k;
    int each_a, each_b;    /* whether scale_a (scale_b) has one number for each group */
} te__gemm_grouping;

/* The arguments of D = epilogue(scale_a scale_b op(A) op(B) + bias) + (accumulate ? D : 0), as in te_op_gemm_args. */
typedef struct te__gemm_kargs {
    long long k_split; /* values of k in one split, a multiple of a kernel's slab. If k is not split, k_split is k or
                        * more. The first member must be one that no kernel changes. Because of a bug in NVRTC 12.0, a
                        * kernel that changes the first member in its own copy of the struct may still read the old
                        * value */
    const void *a, *b; /* op(A) m x k: element (i, p) at i * lda + p, or p * lda + i if a_t */
    void *d;           /* [m, ldd] */
    void *aux;         /* [m, ldaux] of d_dt, or NULL */
    const void *bias;  /* [n], or NULL */
    const float *scale_a, *scale_b; /* [1], or NULL for 1; with rows_a [m], with columns_b [n] */
    const float *block_a, *block_b; /* block scales: [lines / 128, k / 128] for 2-D blocks, [k / 128, lines] for 1-D
                                     * blocks. A line is a row of op(A) or a column of op(B). For gemv_k also scales
                                     * of MXFP8 and NVFP4, as bytes */
    const float *partial;           /* gemm_reduce: f32 [splits, m, n up to a multiple of 8] */
    float *row_sums;                /* gemm_hopper: sums of D's columns, one for each 16 rows: [m / 16 rounded up, n] */
    long long m, n, k;        /* in a grouped GEMM, m (or k, with along_k) is the sum over all groups */
    long long lda, ldb, ldd, ldaux; /* in elements */
    long long d_split;        /* elements of D from one split to the next */
    long long ld_block_a, ld_block_b;
    float factor_a, factor_b; /* scale_a and scale_b are multiplied by these */
    int a_dt, b_dt, d_dt, bias_dt;
    int a_t, b_t; /* a_t: A lies k x m; b_t: B lies n x k */
    int epilogue; /* te_epilogue */
    int accumulate;
    int splits;
    int vector; /* whether rows of D and aux start at multiples of 8 elements and of 16 bytes */
    int rows_a, columns_b; /* whether scale_a has one number for each row of D, and scale_b one for each column */
    int block;             /* te__gemm_block_kind; 0: no block scales */
    int phase, phases, first_b; /* BLOCK = 4 of gemm_hopper: the scale of row i of A has index phase + i * phases,
                                 * and B begins at column first_b of its tensor */
    te__gemm_grouping groups;
} te__gemm_kargs;

/* The shapes of the scaling blocks. A name gives the shape for A and after it the shape for B. 1D is 1 x 128, and 2D is
 * 128 x 128. With SHIFTED, B does not begin at the start of a block. */
typedef enum te__gemm_block_kind {
    TE__GEMM_1D_1D = 1,
    TE__GEMM_1D_2D = 2,
    TE__GEMM_2D_1D = 3,
    TE__GEMM_1D_2D_SHIFTED = 4
} te__gemm_block_kind;

/* How gemv_k and gemv_joint quantize A. */
typedef struct te__gemv_quantizing {
    const float *scale; /* the scale of delayed scaling; NULL: the kernel computes scales */
    float *amax;        /* delayed scaling: raised to the amax of A; or NULL */
    float epsilon;
    float code_max; /* NVFP4: the largest block scale, 448 or 256; blocks of FP8: the limit of te__block_scale */
    int power_of_two;
    int vector; /* whether rows of A start at multiples of 16 bytes */
} te__gemv_quantizing;
typedef struct te__gemv_kargs {
    te__gemm_kargs g;
    te__gemv_quantizing q;
} te__gemv_kargs;

/* The norm of A's rows before the products of gemv_joint (gemv_norm.cuh). */
enum { TE__GEMV_NORM_CHUNKS = 4 };
typedef struct te__gemv_norm {
    const void *gamma, *beta; /* [k]; beta: or NULL */
    float eps, one_nth;         /* one_nth: 1 / k */
    int zero_centered, rounded; /* as in te__norm_fwd_kargs */
    int warps;                  /* of a row, each lane with up to TE__GEMV_NORM_CHUNKS vectors of eight elements */
    int layernorm, dt;          /* for the options: LayerNorm or RMSNorm, and the te_dtype of gamma and beta */
} te__gemv_norm;
/* One of the products of gemv_joint. If there are fewer than three, the last one stands in the places that are left. */
typedef struct te__gemv_part {
    const void *b;        /* [n, k], rows at multiples of 16 bytes */
    const void *block_b;  /* the scales of B, or NULL */
    void *d;              /* [m, n] */
    const void *bias;     /* [n], or NULL */
    const float *scale_b; /* [1], or NULL for 1 */
    long long ldb;        /* bytes from one row of B to the next */
    long long ldd;        /* elements */
    int ld_block_b, n, bias_dt;
    int tiles;            /* tiles of this product and of those before it */
} te__gemv_part;
/* The arguments of gemv_joint. */
typedef struct te__gemv_joint_kargs {
    te__gemv_part part[3];
    const void *a; /* [m, k], rows at multiples of 16 bytes */
    long long lda;
    int m, k, d_dt;
    float factor_a, factor_b;
    int early; /* whether no kernel that may still run writes B, its scales, its factors or the norm's weights, so that
                * they are read before the kernel's turn */
    int rope_early; /* whether that is so, too, of all that te__rope_kargs names but what is written */
    te__gemv_quantizing q;
    const void *residual; /* [m, n], or NULL */
    void *y;              /* [m, n] of D's format: the result of the step after the products, or NULL */
    te__gemv_norm norm;   /* with NORM */
} te__gemv_joint_kargs;
/* The bytes of shared memory for `few` lines of k values, without the sums of two tiles of 16 lines. Each line has
 * `turns` turns of `turn` f16, and 64 bytes, so that lines start in different banks. Behind the lines are four f32
 * scales for each turn of each line, and 256 bytes of zeros. One line of NVFP4 has integers in place of f16, and a
 * table in the last of these bytes (gemv_integers.cuh). */
#define TE__GEMV_LINE(turns, turn) ((turns) * (turn) * 2 + 64)
#define TE__GEMV_SHARED(few, turns, turn) ((few) * (TE__GEMV_LINE(turns, turn) + (turns) * 16) + 256)
#define TE__GEMV_SUMS(warps, lines) (2 * (warps) * (lines) * 16 * 4 + 128) /* `lines`: of Y, rounded up to whole sets */
/* The bytes of shared memory for a turn of sixteen lines of B in gemv_joint, with their scales. */
#define TE__GEMV_SLOT(scales) (2048 + ((scales) ? 256 : 0))
/* The bytes that gemv_joint keeps of the rotation of a line, if it has no registers for them, and the fewest warps of a
 * tile for which it does. With fewer, there are more tiles, whose bytes would take the place of a turn of B. */
#define TE__GEMV_ROTATED 16
#define TE__GEMV_KEPT_WARPS 4

/* One operand of gemm_prepare. Rows of `out` start at multiples of 16 bytes, or of 16 bf16 if codes are decoded. */
typedef struct te__gemm_prepare_side {
    const unsigned char *from;   /* NULL: there is nothing to do, and rows is 0 */
    const unsigned char *scale;  /* the scales of codes; else NULL */
    unsigned char *out;          /* [rows, ld_out]; columns beyond the last become 0 */
    long long rows, columns;
    long long ld, ld_out;
    long long ld_scale;          /* row length of the scales; for swizzled scales the number of scales along k, a
                                  * multiple of 4 */
    int dt;                      /* te_dtype of the codes */
    int down;                    /* whether the scaling groups run down the columns, not along the rows */
} te__gemm_prepare_side;
typedef struct te__gemm_prepare_kargs {
    te__gemm_prepare_side side[2]; /* A and B; the blocks with blockIdx.y = i do side[i] */
    int swizzled;
} te__gemm_prepare_kargs;

/* Bits of gemm_hopper's option STORE: the parts of the epilogue, and whether TMA stores D. */
enum {
    TE__GEMM_STORE_TMA = 1,
    TE__GEMM_STORE_BIAS = 2,
    TE__GEMM_STORE_GELU = 4,
    TE__GEMM_STORE_AUX = 8, /* also stores GELU's input to aux */
    TE__GEMM_STORE_DGELU = 16,
    TE__GEMM_STORE_ADD = 32, /* adds to D */
    TE__GEMM_STORE_SUMS = 64, /* sums of D's columns to row_sums */
    TE__GEMM_STORE_LINES = 128 /* scales of rows or columns; not with TMA */
};

/* The bytes of shared memory of a gemm_hopper block: the most that a block can have. */
#define TE__GEMM_HOPPER_SHARED (192 * 1024 + 8 * 4096 + 3072)

/* The rows and the tiles of one group of a grouped GEMM, as the kernel gemm_groups computes them. */
typedef struct te__gemm_group_row {
    int begin, end;                    /* rows, or values of k */
    unsigned tiles_begin, tiles_end;   /* the group has the tiles tiles_begin .. tiles_end - 1, counted through all
                                        * groups. With clusters, a pair of tiles counts as one */
} te__gemm_group_row;
typedef struct te__gemm_groups_kargs {
    unsigned long long map[2][16]; /* tensor maps of all groups together, to be copied */
    int dim[2];                    /* dim[i] is the dimension of map[i], 0 or 1, that ends where the group ends. It is
                                    * -1 if there is no map[i] */
    te__gemm_grouping groups;
    long long total;               /* rows, or values of k, of all groups */
    unsigned per_row;              /* if along_k, a group has per_row tiles; otherwise each `bm` rows of a group have
                                    * per_row tiles */
    int bm;
    int skip_empty;                /* with along_k: whether empty groups have no tiles */
    int pad;
    te__gemm_group_row *rows;      /* output: [count + 1]. The last element is no group; its `begin`, set to 0, is
                                    * the counter from which gemm_hopper's blocks draw tile numbers */
    unsigned long long *maps;      /* output: [count][2][16] */
} te__gemm_groups_kargs;

/* Aligns a struct to 64 bytes, which tensor maps need. Kernel arguments have this alignment only if their type demands
 * it. */
#ifdef __CUDACC__
#define TE__ALIGN_64 __align__(64)
#else
#define TE__ALIGN_64
#endif
typedef struct TE__ALIGN_64 te__gemm_hopper_kargs {
    unsigned long long a_map[16], b_map[16], d_map[16], aux_map[16];
    te__gemm_kargs g;
    const te__gemm_group_row *rows; /* in a grouped GEMM: the output of gemm_groups */
    const unsigned long long *maps; /* tensor maps of each group: of A and B with along_k, else of D and aux */
    unsigned long long pad[1];      /* fills up to a multiple of 64 bytes, so that both compilers see the same size */
} te__gemm_hopper_kargs;
/* checked for 64-bit pointers alone, the only ones that CUDA has */
typedef char te__gemm_hopper_kargs_fit[sizeof(void *) < 8 || sizeof(te__gemm_hopper_kargs) % 64 == 0 ? 1 : -1];
