/* quant/kinds.h: te__quant_class, the row of one kind of quantizer (a table of facts and functions), the structs of
 * quantized tensors, and helpers that several kinds use. The rows are in quant/kind_NAME.c; other files ask a row and
 * never compare kinds. Must not know any single kind. */

/* ---- quantized tensors ---- */

typedef struct te__quant_class te__quant_class; /* a kind of quantizer, below */

/* One copy of a quantized tensor, and how it must be read; te_quantized_view describes the layouts. The copies of a
 * hybrid tensor have different kinds. */
typedef struct te__quant_copy {
    const te__quant_class *cls;
    te_tensor *data;  /* NULL: this copy was not made */
    te_tensor *scale; /* NULL: the identity kind */
    te_tensor *amax;  /* NVFP4 */
    bool two_dimensional;   /* blocks of two dimensions: block, MXFP8, NVFP4 */
    bool rht, no_random_sign_mask; /* NVFP4 */
    bool e4m3_max_256;      /* NVFP4 */
    bool swizzled;          /* MXFP8, NVFP4 */
    te_custom_quantizer custom;
} te__quant_copy;
/* A specification of how to quantize: a te_quantizer_desc with its defaults resolved. */
typedef struct te__quant_spec {
    const te__quant_class *cls;
    te_dtype dtype; /* of the codes */
    int usage;      /* TE_ROWWISE | TE_COLUMNWISE */
    te_tensor *x_amax; /* current: f32 [2], the amax of the input, as te_op_fp8_quantize takes it (borrowed); NULL: the
                        * cast measures it */
    te_tensor *bias_grad; /* delayed, current: receives the column sums of the input; or NULL */
    bool two_dimensional, power_of_two, fp32_scales, swizzled, rht, no_random_sign_mask, stochastic, row_scaled,
        e4m3_max_256;
    te_4over6_error four_over_six;
    float epsilon;
    te_group *group;                        /* reduces amaxes; borrowed */
    te_tensor *scale, *amax;                /* delayed: f32 [1] each, or with `sizes` [n] of any stride. Other kinds:
                                             * scale NULL; amax: the amax of the input, if the operation that made it
                                             * left it (te__quant_out_open), or NULL */
    te_tensor *sizes;                       /* i32 or i64 [n]: the rows of groups that are quantized separately
                                             * (borrowed); NULL: one group */
    const struct te__quant_spec *row, *col; /* hybrid */
    te_custom_quantizer custom;
} te__quant_spec;

struct te_quantizer {
    te_ctx *te;
    int refs;
    te__quant_spec spec;
    te__quant_spec child[2]; /* hybrid: the row-wise and the column-wise part */
};

typedef struct te__quantized {
    const te__quant_class *cls; /* the kind of the quantizer that made it */
    te_quantizer *quantizer; /* the quantizer that made it (a reference), or NULL if an internal spec did */
    te__quant_copy row, col;
    te_tensor *sizes; /* [n], the sizes of groups of rows, each with its own scale and amax (quant/groups.c); NULL: one
                       * group */
    uint64_t version_shift; /* added to the version of the counting memory, since the value may move to other memory */
    void *init_value; /* of a weight: its value before it was first quantized, in its nominal dtype, in host memory; or
                       * NULL */
    size_t init_bytes;
    uint64_t init_version; /* the version of the tensor whose value is init_value */
} te__quantized;

/* Retains the tensors of a copy. */
static void te__copy_retain(const te__quant_copy *c) {
    te_tensor_retain(c->data);
    te_tensor_retain(c->scale);
    te_tensor_retain(c->amax);
}
static void te__copy_release(te__quant_copy *c) {
    te_tensor_release(c->data);
    te_tensor_release(c->scale);
    te_tensor_release(c->amax);
    memset(c, 0, sizeof(*c));
}

/* ---- the state of a context ---- */

enum { TE__MAX_AUTOCAST = 16 };
typedef struct te__autocast {
    te_recipe recipe;
    te_group *amax_group;
    bool enabled, calibrating;
} te__autocast;
typedef struct te__quantized_init { /* one region of te_quantized_model_init_begin */
    te_recipe recipe;
    bool enabled, preserve;
} te__quantized_init;

/* A word of device memory in which an operation leaves the amax of its output for the cast that quantizes the output
 * next (te__amax_take). The cast leaves 0 there, so the word needs neither an allocation nor a launch that clears
 * it. */
enum { TE__AMAX_WORDS = 4 };
typedef struct te__amax_word {
    te_tensor pair; /* f32 [2]: the amax, and a count of blocks for the cast; 0 while the word is free. Must be the
                     * first field: te__amax_give finds the word by its address */
    te_tensor amax; /* the first number of the pair */
    te__buffer buffer;
    bool taken;
} te__amax_word;

typedef struct te__quant_state {
    te__autocast autocast[TE__MAX_AUTOCAST];
    int num_autocast;
    te__quantized_init quantized_init[TE__MAX_AUTOCAST];
    int num_quantized_init;
    bool inspecting;             /* set by te_quant_inspect */
    te_microbatch is_first_microbatch; /* the value for calls that do not give one */
    struct te__scaling *scaling; /* a list of the scaling states of this context's modules */
    bool has_scales;             /* a scaling state has been made */
    int num_optimizers;          /* 0: no te_optimizer_step tells when a training step has ended */
    struct te__snapshot *recording, *replaying; /* of the innermost checkpoint in its first run, and of the innermost in
                                                 * its second run */
    te__amax_word amax_words[TE__AMAX_WORDS];
    TE__ALIGNED(8) uint64_t amax_memory[TE__AMAX_WORDS]; /* the memory of amax_words on the CPU */
} te__quant_state;
static const te__slot te__quant_slot = {sizeof(te__quant_state)};
static te__quant_state *te__quant_of(const te_ctx *te) {
    return (te__quant_state *)te__slot_of(te, &te__quant_slot);
}

/* ---- kinds ---- */

typedef enum te__quant_form {
    TE__FORM_CODES, /* FP8 or FP4 codes and scales, which operations write and read */
    TE__FORM_PLAIN, /* the tensor itself */
    TE__FORM_PARTS, /* copies of two other kinds: spec->row and spec->col */
    TE__FORM_OPAQUE /* tensors that functions of the user make and read */
} te__quant_form;

/* The facts of a kind, as bits. */
enum {
    TE__TENSOR_SCALED = 1,    /* one scale per tensor, f32 [1], the same in both copies; any kind with this bit can read
                               * such copies */
    TE__SCALE_GIVEN = 2,      /* spec->scale and spec->amax come from outside: the scale to use, and the amax for its
                               * next update */
    TE__TENSOR_AMAX = 4,      /* each copy keeps an f32 amax of the whole tensor, or one per line */
    TE__TRANSPOSED = 8,       /* the column-wise copy is stored transposed */
    TE__IN_PRODUCTS = 16,     /* te_op_gemm reads the copies; without this bit products decode them first */
    TE__COLUMNS_FOLLOW = 32,  /* the column-wise copy is the transpose of the row-wise one, if each scale belongs to a
                               * square of elements or to the whole tensor */
    TE__BOTH_FROM_SLICES = 64, /* slices are cast into both copies, since neither copy gives the other; the column-wise
                                * copy has transposed tiles */
    TE__EXACT_CODES = 128,    /* a code times its block's scale is exact in bf16 */
    TE__TAKES_AMAX = 256,     /* the cast can take the amax of the whole tensor from the operation that made the tensor:
                               * spec->amax or spec->x_amax */
    TE__BLOCKS_IN_ATTENTION = 512 /* FP8 attention reads q, k, v, o and their gradients in these blocks */
};

/* The row of one kind. A function may be NULL where its comment says so, and where `form` leaves it nothing to do. */
struct te__quant_class {
    te_quant_kind kind;
    const char *name; /* for messages */
    te__quant_form form;
    int facts;
    te_dtype code_dtype, scale_dtype; /* code_dtype NONE: e4m3 or e5m2, as the desc says */
    te_scaling scaling[2];            /* for operations that read the copies; [1]: with two-dimensional blocks */
    int64_t slice_tile[2];            /* rows and columns of the tile that shares a scale in weights quantized by
                                       * slices; 0: no tiles */
    const char *slices_need;          /* the error text for a spec whose blocks are not slice_tile, or that has other
                                       * options; without tiles, for any spec; NULL: any spec will do */
    /* Copies the fields of a desc that only this kind reads into the spec, and refuses wrong ones. NULL: there are no
     * such fields. */
    te_result (*resolve)(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec, const char *who);
    /* Computes the shape of a copy's scales; `inner` runs along the contraction. NULL: TE__TENSOR_SCALED, or not
     * codes. */
    void (*scale_shape)(const te__quant_copy *c, bool columnwise, int64_t outer, int64_t inner, int64_t shape[2]);
    /* Quantizes x (contiguous) into row and col, of which one may be NULL. Opaque copies get new tensors. */
    te_result (*fill)(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                      const te_tensor *noop);
    /* Returns the value of one copy of x as a plain tensor, without history; NULL with an error. */
    te_tensor *(*decode)(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype);
    /* With TE__COLUMNS_FOLLOW: writes the scales of the transposed codes. NULL: both copies share their scales. */
    te_result (*turn_scales)(te_ctx *te, const te__quant_copy *row, te__quant_copy *col, int64_t m, int64_t n);
    /* Returns the factor of a whole tensor, for inspection, from the tensor's amax, or without TE__TENSOR_AMAX from its
     * scale. NULL: there is none. */
    float (*tensor_factor)(float word, bool e4m3_max_256);
    /* Ranks exchange shards of a tensor's first dimension as codes and scales if the shard's rows and columns are
     * multiples of this; 0: never. */
    int64_t shard_tile;
    int shard_scales[2]; /* the dimension of the scales that grows with the rows: of the row-wise and of the column-wise
                          * copy */
    const char *two_dimensional; /* for messages: the option that makes two-dimensional blocks; NULL: there is none */
    int64_t group_rows;  /* rows in a block of the column-wise copy, in which groups of rows begin at multiples of this;
                          * 0: not codes */
};

/* Returns whether a cast by `spec` can take an amax. It cannot if the numbers are transformed first, or if each line or
 * each group of rows has its own amax. */
static bool te__takes_amax(const te__quant_spec *spec) {
    return spec->cls->facts & TE__TAKES_AMAX && !spec->rht && !spec->row_scaled && !spec->sizes;
}

static bool te__is_opaque(const te__quant_class *cls) { return cls && cls->form == TE__FORM_OPAQUE; }

/* Returns whether copies of kinds a and b have the same meaning. */
static bool te__same_layout(const te__quant_class *a, const te__quant_class *b) {
    return a == b || (a->facts & b->facts & TE__TENSOR_SCALED);
}

/* Returns the spec of one copy: hybrid quantizers have a different one for each copy. */
static const te__quant_spec *te__spec_of(const te__quant_spec *spec, int which) {
    if (spec->cls->form != TE__FORM_PARTS) return spec;
    return which == TE_ROWWISE ? spec->row : spec->col;
}
static te__quant_copy *te__copy_of(const te_tensor *x, int which) {
    return which == TE_ROWWISE ? &x->quantized->row : &x->quantized->col;
}

/* Stores the data and scale tensors of the copies `row` and `col`, which a cast is to write. Both results of a copy are
 * NULL if the copy is NULL. */
static void te__cast_outputs(const te__quant_copy *row, const te__quant_copy *col, te_tensor **row_data,
                             te_tensor **row_scale, te_tensor **col_data, te_tensor **col_scale) {
    *row_data = row ? row->data : NULL;
    *row_scale = row ? row->scale : NULL;
    *col_data = col ? col->data : NULL;
    *col_scale = col ? col->scale : NULL;
}

/* Returns the leading dimension of codes: rows start at multiples of 16 bytes, so that every kernel may load 16 bytes
 * at a time, whatever the shape. */
static int64_t te__quant_ld(te_dtype dtype, int64_t columns) {
    return te__round_up(columns, dtype == TE_F4E2M1 ? 32 : 16);
}

/* Returns a contiguous tensor as a matrix [M, N], without history. */
static te_tensor *te__as_matrix(const te_tensor *x) { return te__alias_2d(x, 0, x->dtype, te__rows(x), te__cols(x)); }
