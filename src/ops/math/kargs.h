/* ops/math/kargs.h: the arguments of the math kernels. The host's and the kernels' compilers both read this file. */

/* The arguments of the kernel `copy`:
 * - Raw copy: an item is `unit` bytes, and strides count items.
 * - Converting copy (unit is 0): an item is `width` neighbours along the last dimension, and strides count elements. */
typedef struct te__copy_kargs {
    const void *src;
    void *dst;
    long long items; /* the product of shape */
    long long shape[8], src_stride[8], dst_stride[8];
    int ndim;
    int unit;  /* 1, 2, 4, 8 or 16; 0: convert */
    int width; /* 1, 4 or 8 */
    int src_dt, dst_dt;
} te__copy_kargs;

/* The arguments of the kernel `transpose`. A block transposes two tiles of 128 / size rows and 64 columns: side by
 * side if elements are bytes, otherwise one above the other. */
typedef struct te__transpose_kargs {
    const void *src; /* [.., m, lds] */
    void *dst;       /* [.., n, ldd] */
    long long m, n, lds, ldd;
    long long filled; /* number of columns of dst that are written. Columns m to filled - 1 become 0 */
    long long src_stride[6], dst_stride[6]; /* strides of the `dims` dimensions that precede the matrix, in elements */
    unsigned shape[6];
    unsigned tiles, tiles_n; /* tiles: pairs of tiles in a matrix; tiles_n: pairs of tiles along n */
    int dims;
    int size;       /* bytes of an element: 1, 2 or 4 */
    int vector_src; /* whether rows of src start at multiples of 16 bytes (8 if elements are bytes) */
    int vector_dst; /* whether rows of dst start at multiples of 16 bytes */
} te__transpose_kargs;

typedef struct te__fill_kargs {
    void *dst;
    long long bytes;
    unsigned long long pattern; /* one element's bits, repeated to eight bytes */
    int unit;                   /* bytes of an element: 1, 2, 4 or 8 */
    int vector;                 /* dst is aligned to 16 bytes */
} te__fill_kargs;

typedef struct te__random_kargs {
    void *dst;
    long long n;
    unsigned long long seed, offset;
    const void *rng; /* te__rng_read */
    float a, b;
    float below_b; /* the largest f32 below b */
    int kind;      /* te_random_kind */
    int dt;
} te__random_kargs;

typedef struct te__axpby_kargs {
    const void *x, *y; /* y may be NULL */
    void *out;
    const float *alpha_device, *divide_device; /* [1], or NULL for 1 */
    long long n;
    float alpha, beta;
    int x_dt, y_dt, out_dt;
    int vector; /* x, y and out are aligned to 16 bytes */
} te__axpby_kargs;

/* The arguments of the kernels mul and row_dot. */
typedef struct te__mul_kargs {
    const void *x, *y; /* [m, n]; mul with by_rows: y is [m] */
    void *out;         /* mul: [m, n]; row_dot: [m] */
    long long m, n;
    int by_rows;
    int x_dt, y_dt, out_dt;
    int vector; /* whether rows start at multiples of 16 bytes; in mul without by_rows, whether the arrays do so */
} te__mul_kargs;

/* The arguments of the kernel `sum`. Block b adds up TE__SUM_CHUNK elements and writes partial[b]. If there is
 * only one block, it writes `out` instead. */
#define TE__SUM_CHUNK 16384
typedef struct te__sum_kargs {
    const void *x;
    float *partial; /* [partials] */
    float *out;     /* [1] */
    long long n, partials;
    float scale;
    int x_dt;
    int vector;
} te__sum_kargs;

/* The arguments of the kernel argmax. A block finds the largest key (te__argmax_key) of one chunk of a row, and writes
 * it to `best`. With one chunk a row, it writes the index instead. */
typedef struct te__argmax_kargs {
    const void *x;            /* [m, n] */
    int *out;                 /* [m] */
    unsigned long long *best; /* [m, chunks] */
    unsigned *counter;        /* counter of te_last_block */
    long long m, n, chunk;    /* chunk: elements of a chunk, a multiple of TE__ARGMAX_STEP */
    int chunks, x_dt, vector;
} te__argmax_kargs;
#define TE__ARGMAX_STEP 2048 /* elements that a block of 256 threads reads at a time */
/* Returns a key for element i of a row, from the bits of its value as f32. The largest key is that of the largest
 * element, and of the first of equal ones. Every key is above 0. */
TE__BOTH unsigned long long te__argmax_key(unsigned bits, long long i) {
    unsigned order = bits == 0x80000000u ? 0u : bits; /* -0 equals 0 */
    order = order & 0x80000000u ? ~order : order | 0x80000000u;
    if ((bits & 0x7fffffffu) > 0x7f800000u) order = 0xffffffffu; /* all NaN are equal, and the largest */
    return (unsigned long long)order << 32 | (0xffffffffu - (unsigned)i);
}
TE__BOTH int te__argmax_index(unsigned long long key) { return (int)(0xffffffffu - (unsigned)key); }

/* The arguments of the kernel column_sum. A column block is 256 columns. A thread block adds up the rows of one chunk
 * in one column block, and writes the sums to the chunk's row of partial [chunks, n]. */
typedef struct te__column_sum_kargs {
    const void *x; /* [m, n] */
    float *partial;
    void *out; /* [n] */
    unsigned *counters; /* [groups]: 0 between kernels */
    long long m, n;
    long long chunk; /* rows of a chunk */
    long long chunks;
    unsigned column_blocks, groups;
    int x_dt, out_dt;
    int accumulate;
} te__column_sum_kargs;

/* The arguments of the kernel column_sum_short, which sums the columns of an f32 matrix in one pass. The matrix has at
 * most some thousand rows. */
typedef struct te__column_sum_short_kargs {
    const float *x; /* [m, n] */
    void *out;      /* [n] */
    long long m, n;
    int out_dt, accumulate;
} te__column_sum_short_kargs;

typedef struct te__embedding_fwd_kargs {
    const void *ids, *table; /* [tokens], [vocab, h] */
    void *y;                 /* [tokens, h] */
    struct te__outside *outside;
    long long tokens, vocab, h;
    long long all, first; /* all: size of the whole vocabulary; first: id of the table's first row. The table has the
                           * rows of the ids first .. first + vocab - 1 */
    int ids_dt, table_dt, y_dt;
    int from_end; /* whether negative ids count from the end of the vocabulary */
    int vector;   /* whether rows of table and y start at multiples of 16 bytes */
} te__embedding_fwd_kargs;

/* The arguments of two kernels. embedding_sort orders the tokens by id. embedding_bwd adds up the rows of dy for
 * each id. */
typedef struct te__embedding_bwd_kargs {
    const void *ids, *dy; /* [tokens], [tokens, h] */
    void *dtable;         /* [vocab, h] */
    unsigned *start;      /* [vocab + 1]: the tokens of id v are order[start[v]] to order[start[v + 1] - 1] */
    unsigned *order;      /* [tokens] */
    struct te__outside *outside;
    long long tokens, vocab, h;
    long long all, first; /* as in te__embedding_fwd_kargs */
    int splits; /* number of warps of embedding_bwd that share the columns of an id */
    int bucket; /* number of ids that a block of embedding_sort sorts, at most TE__EMBEDDING_BUCKET */
    int ids_dt, dy_dt, dtable_dt;
    int accumulate, from_end;
    int vector; /* whether rows of dy and dtable start at multiples of 16 bytes and h is a multiple of eight */
} te__embedding_bwd_kargs;
#define TE__EMBEDDING_BUCKET 256
