/* ops/gemm/kargs.h: arguments of the gemm kernels. Read by the host's compiler and by the kernels': plain structs
 * alone. */

/* Products by groups: rows of A and D, or values of k, of one group after another; B, or D, of all of them. */
typedef struct te__gemm_grouping {
    const void *sizes;     /* [count], or [count + 1] offsets */
    long long b_elements;  /* of B, from one group to the next; along k: of D */
    long long block_b;     /* scales of B from one group to the next */
    int count;             /* 0: one product */
    int dt;                /* of sizes: i32 or i64 */
    int offsets, along_k;
    int each_a, each_b;    /* scale_a, scale_b: one for each group */
} te__gemm_grouping;

/* D = epilogue(scale_a scale_b op(A) op(B) + bias) + (accumulate ? D : 0); see te_gemm_args. */
typedef struct te__gemm_kargs {
    long long k_split; /* of one split, a multiple of the slab; >= k without splits. First, since no kernel changes it
                        * in a copy: NVRTC 12.0 reads the first member of a changed copy from the arguments
                        * themselves */
    const void *a, *b; /* op(A) m x k: element (i, p) at i * lda + p, or p * lda + i if a_t */
    void *d;           /* [m, ldd] */
    void *aux;         /* [m, ldaux] of d_dt, or NULL */
    const void *bias;  /* [n], or NULL */
    const float *scale_a, *scale_b; /* [1], or NULL for 1; with rows_a or columns_b [m] or [n] */
    const float *block_a, *block_b; /* scales of blocks of 128 k: lines first for 2-D ones, else blocks first; see
                                     * te_op_block_quantize. gemv_k: also the bytes of MXFP8's and NVFP4's */
    const float *partial;           /* gemm_reduce: f32 [splits, m, n up to a multiple of 8] */
    float *row_sums;                /* gemm_hopper: of D's columns, [m / 16 rounded up, n]: each of 16 rows */
    long long m, n, k;        /* by groups: m, or along k: k, of all */
    long long lda, ldb, ldd, ldaux; /* in elements */
    long long d_split;        /* elements of D from one split to the next */
    long long ld_block_a, ld_block_b;
    float factor_a, factor_b; /* scale_a and scale_b are multiplied with these */
    int a_dt, b_dt, d_dt, bias_dt;
    int a_t, b_t; /* a_t: A lies k x m; b_t: B lies n x k */
    int epilogue; /* te_epilogue */
    int accumulate;
    int splits;
    int vector; /* rows of D and aux start at multiples of 8 elements and 16 bytes */
    int rows_a, columns_b; /* scale_a has one for each row of D, scale_b one for each column */
    int block;             /* 0: no block scales; te__gemm_block_kind */
    int phase, phases, first_b; /* gemm_hopper with BLOCK = 4: row i of A has scale phase + i * phases. It and gemv_k:
                                 * column j of B is column first_b + j of the scales */
    te__gemm_grouping groups;
} te__gemm_kargs;

/* Shapes of the blocks of A and B. */
typedef enum te__gemm_block_kind {
    TE__GEMM_1D_1D = 1,
    TE__GEMM_1D_2D = 2,
    TE__GEMM_2D_1D = 3,
    TE__GEMM_1D_2D_SHIFTED = 4
} te__gemm_block_kind;

/* One operand of gemm_prepare, whose copy has rows at multiples of 16 elements: bytes that move, or MXFP8's or NVFP4's
 * codes, which become bf16. */
typedef struct te__gemm_prepare_side {
    const unsigned char *from;   /* NULL and no rows: nothing to do */
    const unsigned char *scale;  /* of codes; else NULL */
    unsigned char *out;          /* [rows, ld_out], columns beyond the last become 0 */
    long long rows, columns;
    long long ld, ld_out;
    long long ld_scale;          /* swizzled: groups, a multiple of 4 */
    int dt;                      /* of codes */
    int down;                    /* groups run down the columns, not along the rows */
} te__gemm_prepare_side;
typedef struct te__gemm_prepare_kargs {
    te__gemm_prepare_side side[2]; /* A and B; block y of the grid does side y */
    int swizzled;
} te__gemm_prepare_kargs;

/* Bits of gemm_hopper's option STORE: the parts of its epilogue, and the one that says whether TMA stores D, or
 * epilogue.cuh does. */
enum {
    TE__GEMM_STORE_TMA = 1,
    TE__GEMM_STORE_BIAS = 2,
    TE__GEMM_STORE_GELU = 4,
    TE__GEMM_STORE_AUX = 8, /* and the input of GELU, to aux */
    TE__GEMM_STORE_DGELU = 16,
    TE__GEMM_STORE_ADD = 32, /* to D */
    TE__GEMM_STORE_SUMS = 64, /* of D's columns, to row_sums */
    TE__GEMM_STORE_LINES = 128 /* scales of rows or columns; not by TMA */
};

/* gemm_hopper: slots, buffers of the epilogue, block scales, barriers: all that a block can have. */
#define TE__GEMM_HOPPER_SHARED (192 * 1024 + 8 * 4096 + 3072)

/* gemm_groups: sizes to where each group lies and which tiles it has, and maps that end where it ends. */
typedef struct te__gemm_group_row {
    int begin, end;                    /* rows, or values of k */
    unsigned tiles_begin, tiles_end;   /* tiles (pairs of them, in clusters), those of all groups in a row */
} te__gemm_group_row;
typedef struct te__gemm_groups_kargs {
    unsigned long long map[2][16]; /* of all groups */
    int dim[2];                    /* the dimension that ends with the group: 0 or 1; -1: no map */
    te__gemm_grouping groups;
    long long total;               /* rows, or values of k */
    unsigned per_row;              /* tiles that share rows; along k: all of a group */
    int bm;
    int skip_empty;                /* along k: empty groups have no tiles */
    int pad;
    te__gemm_group_row *rows;      /* out: [count], and behind them, in `begin`, a counter: 0 */
    unsigned long long *maps;      /* out: [count][2][16] */
} te__gemm_groups_kargs;

/* Tensor maps must lie at multiples of 64 bytes, which kernel arguments do only when their type asks for it. */
#ifdef __CUDACC__
#define TE__ALIGN_64 __align__(64)
#else
#define TE__ALIGN_64
#endif
typedef struct TE__ALIGN_64 te__gemm_hopper_kargs {
    unsigned long long a_map[16], b_map[16], d_map[16], aux_map[16];
    te__gemm_kargs g;
    const te__gemm_group_row *rows; /* by groups: from gemm_groups */
    const unsigned long long *maps; /* along rows: of D and aux; along k: of A and B */
    unsigned long long pad[1];      /* to a multiple of 64, so that both compilers see one size */
} te__gemm_hopper_kargs;
/* CUDA has 64 bits alone */
typedef char te__gemm_hopper_kargs_fit[sizeof(void *) < 8 || sizeof(te__gemm_hopper_kargs) % 64 == 0 ? 1 : -1];
