/* ops/gemm/kargs.h: the arguments of the gemm kernels. The host's compiler and the kernels' compiler both read it:
 * plain structs alone. */

/* How a product by groups lies in memory. Along rows: the groups' rows of A and D follow each other, and B is a stack
 * of one matrix for each group. Along k: the groups' values of k of A and B follow each other, and D is the stack. */
typedef struct te__gemm_grouping {
    const void *sizes;     /* [count], or [count + 1] offsets */
    long long b_elements;  /* elements of B from one group to the next; along k: elements of D */
    long long block_b;     /* scales of B from one group to the next */
    int count;             /* number of groups; 0: one product */
    int dt;                /* dtype of sizes: i32 or i64 */
    int offsets, along_k;
    int each_a, each_b;    /* scale_a, scale_b have one number for each group */
} te__gemm_grouping;

/* D = epilogue(scale_a scale_b op(A) op(B) + bias) + (accumulate ? D : 0); see te_op_gemm_args. */
typedef struct te__gemm_kargs {
    long long k_split; /* k of one split, a multiple of the slab; >= k without splits. Must be the first member: NVRTC
                        * 12.0 reads the first member of a changed copy from the original arguments, and no kernel
                        * changes k_split in a copy */
    const void *a, *b; /* op(A) m x k: element (i, p) at i * lda + p, or p * lda + i if a_t */
    void *d;           /* [m, ldd] */
    void *aux;         /* [m, ldaux] of d_dt, or NULL */
    const void *bias;  /* [n], or NULL */
    const float *scale_a, *scale_b; /* [1], or NULL for 1; with rows_a [m], with columns_b [n] */
    const float *block_a, *block_b; /* scales of blocks of 128 k: [lines, k] for 2-D blocks, [k, lines] for 1-D ones;
                                     * see te_op_block_quantize. gemv_k: also the bytes of MXFP8's and NVFP4's scales */
    const float *partial;           /* gemm_reduce: f32 [splits, m, n up to a multiple of 8] */
    float *row_sums;                /* gemm_hopper: sums of D's columns over each 16 rows, [m / 16 rounded up, n] */
    long long m, n, k;        /* by groups: m (along k: k) counts all groups */
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
    int rows_a, columns_b; /* scale_a has a number for each row of D, scale_b one for each column */
    int block;             /* te__gemm_block_kind; 0: no block scales */
    int phase, phases, first_b; /* gemm_hopper with BLOCK = 4: row i of A has scale phase + i * phases. There and in
                                 * gemv_k: column j of B has the scale of column first_b + j */
    te__gemm_grouping groups;
} te__gemm_kargs;

/* The shapes of A's and of B's blocks: 1D is 1 x 128, 2D is 128 x 128. SHIFTED: B does not begin with a block. */
typedef enum te__gemm_block_kind {
    TE__GEMM_1D_1D = 1,
    TE__GEMM_1D_2D = 2,
    TE__GEMM_2D_1D = 3,
    TE__GEMM_1D_2D_SHIFTED = 4
} te__gemm_block_kind;

/* One operand of gemm_prepare: bytes to be moved, or MXFP8's or NVFP4's codes to become bf16. Rows of the copy start at
 * multiples of 16 elements. */
typedef struct te__gemm_prepare_side {
    const unsigned char *from;   /* NULL, with no rows: nothing to do */
    const unsigned char *scale;  /* the scales of codes; else NULL */
    unsigned char *out;          /* [rows, ld_out]; columns beyond the last become 0 */
    long long rows, columns;
    long long ld, ld_out;
    long long ld_scale;          /* row length of the scales; swizzled: groups of a line, a multiple of 4 */
    int dt;                      /* te_dtype of the codes */
    int down;                    /* groups run down the columns, not along the rows */
} te__gemm_prepare_side;
typedef struct te__gemm_prepare_kargs {
    te__gemm_prepare_side side[2]; /* A and B; block y of the grid does side y */
    int swizzled;
} te__gemm_prepare_kargs;

/* Bits of gemm_hopper's option STORE: the parts of its epilogue, and whether TMA stores D, or epilogue.cuh. */
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

/* Bytes of shared memory of gemm_hopper, all that a block can have: slots, buffers of the epilogue, block scales,
 * barriers. */
#define TE__GEMM_HOPPER_SHARED (192 * 1024 + 8 * 4096 + 3072)

/* One group as gemm_groups finds it: where it lies and which tiles it has. */
typedef struct te__gemm_group_row {
    int begin, end;                    /* rows, or values of k */
    unsigned tiles_begin, tiles_end;   /* tiles (in clusters: pairs of tiles), counted through all groups */
} te__gemm_group_row;
typedef struct te__gemm_groups_kargs {
    unsigned long long map[2][16]; /* maps of all groups, to be copied */
    int dim[2];                    /* the dimension that is to end with the group: 0 or 1; -1: no map */
    te__gemm_grouping groups;
    long long total;               /* rows, or values of k, of all groups */
    unsigned per_row;              /* tiles that share rows; along k: all tiles of a group */
    int bm;
    int skip_empty;                /* along k: empty groups have no tiles */
    int pad;
    te__gemm_group_row *rows;      /* out: [count], then one more, whose `begin` is a counter, set to 0 */
    unsigned long long *maps;      /* out: [count][2][16] */
} te__gemm_groups_kargs;

/* Aligns to 64 bytes, as tensor maps must be; kernel arguments are aligned so only if their type asks for it. */
#ifdef __CUDACC__
#define TE__ALIGN_64 __align__(64)
#else
#define TE__ALIGN_64
#endif
typedef struct TE__ALIGN_64 te__gemm_hopper_kargs {
    unsigned long long a_map[16], b_map[16], d_map[16], aux_map[16];
    te__gemm_kargs g;
    const te__gemm_group_row *rows; /* by groups: what gemm_groups wrote */
    const unsigned long long *maps; /* along rows: of D and aux; along k: of A and B */
    unsigned long long pad[1];      /* to a multiple of 64, so that both compilers see one size */
} te__gemm_hopper_kargs;
/* CUDA has only 64 bits */
typedef char te__gemm_hopper_kargs_fit[sizeof(void *) < 8 || sizeof(te__gemm_hopper_kargs) % 64 == 0 ? 1 : -1];
