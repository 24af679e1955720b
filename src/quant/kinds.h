/* quant/kinds.h: the structs of quantized tensors. te__quant_class has the facts and functions of one kind of
 * quantizer. quant/kind_NAME.c defines the kind NAME. Other files read these facts and never compare kinds. This file
 * must not depend on any single kind. */

/* ---- quantized tensors ---- */

typedef struct te__quant_class te__quant_class; /* a kind of quantizer, below */

/* The row-wise or the column-wise copy of a quantized tensor. te_quantized_view describes its layout. In a hybrid
 * tensor the two copies have different kinds. */
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
/* Describes how to quantize a tensor: it has the fields of a te_quantizer_desc, with defaults filled in. */
typedef struct te__quant_spec {
    const te__quant_class *cls;
    te_dtype dtype; /* of the codes */
    int usage;      /* TE_ROWWISE | TE_COLUMNWISE */
    te_tensor *x_amax; /* current scaling: the argument x_amax of te_op_fp8_quantize, f32 [2] (borrowed). Its first
                        * number is the amax of the input. NULL: the cast measures the amax */
    te_tensor *bias_grad; /* delayed and current scaling: receives the column sums of the input; or NULL */
    bool two_dimensional, power_of_two, fp32_scales, swizzled, rht, no_random_sign_mask, stochastic, row_scaled,
        e4m3_max_256;
    te_4over6_error four_over_six;
    float epsilon;
    te_group *group;                        /* the ranks that reduce amaxes together (borrowed) */
    te_tensor *scale, *amax;                /* f32 [1], or [n] with any stride if `sizes` is set. Only delayed scaling
                                             * has `scale`, and its cast writes `amax`. With other kinds, `amax` has
                                             * been computed before the cast, or is NULL */
    te_tensor *sizes;                       /* i32 or i64 [n]: the number of rows of each group (borrowed). Groups are
                                             * quantized separately. NULL: one group */
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
    te_quantizer *quantizer; /* the quantizer that made this tensor (retained); NULL if the tensor was made from a
                              * te__quant_spec alone */
    te__quant_copy row, col;
    te_tensor *sizes; /* [n]: the number of rows of each group. Each group has its own scale and amax (quant/groups.c).
                       * NULL: one group */
    uint64_t version_shift; /* added to the version of the buffer that holds the value. So the value keeps its version
                             * when it moves to another buffer */
    void *init_value; /* only of a weight: the value before it was first quantized, in the nominal dtype and in host
                       * memory; or NULL */
    size_t init_bytes;
    uint64_t init_version; /* the version of the tensor when its value was init_value */
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

/* Device memory that passes an amax from an operation to the next cast (te__amax_take). The cast resets the memory to
 * 0, which saves a launch. */
enum { TE__AMAX_WORDS = 4 };
typedef struct te__amax_word {
    te_tensor pair; /* f32 [2]: the amax, and the number of blocks of the cast that have read it. Both are 0 unless
                     * `taken`. `pair` must stay the first field */
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
    int num_optimizers;          /* number of optimizers. If it is 0, te_optimizer_step cannot mark the end of a
                                  * training step */
    struct te__snapshot *recording, *replaying; /* the snapshots of the innermost checkpointed function in its first run
                                                 * (`recording`) and in its second run (`replaying`); NULL: none */
    te__amax_word amax_words[TE__AMAX_WORDS];
    TE__ALIGNED(8) uint64_t amax_memory[TE__AMAX_WORDS]; /* the memory of amax_words, for a CPU context */
} te__quant_state;
static const te__slot te__quant_slot = {sizeof(te__quant_state)};
static te__quant_state *te__quant_of(const te_ctx *te) {
    return (te__quant_state *)te__slot_of(te, &te__quant_slot);
}

/* ---- kinds ---- */

typedef enum te__quant_form {
    TE__FORM_CODES, /* FP8 or FP4 codes and their scales; operations write and read both */
    TE__FORM_PLAIN, /* the tensor itself */
    TE__FORM_PARTS, /* a row-wise and a column-wise copy of different kinds, made by spec->row and spec->col */
    TE__FORM_OPAQUE /* tensors that functions of the user make and read */
} te__quant_form;

/* The facts of a kind, as bits. */
enum {
    TE__TENSOR_SCALED = 1,    /* one scale per tensor, f32 [1], the same in both copies; all kinds with this bit have
                               * the same layout */
    TE__SCALE_GIVEN = 2,      /* the caller sets spec->scale and spec->amax. The cast uses this scale, and stores the
                               * amax for the next update of the scale */
    TE__TENSOR_AMAX = 4,      /* each copy keeps an f32 amax of the whole tensor, or one for each row or column */
    TE__TRANSPOSED = 8,       /* the column-wise copy is stored transposed */
    TE__IN_PRODUCTS = 16,     /* te_op_gemm reads the copies; without this bit they are decoded before a product */
    TE__COLUMNS_FOLLOW = 32,  /* the column-wise copy is the transpose of the row-wise one, provided that each scale
                               * belongs to a square block or to the whole tensor */
    TE__BOTH_FROM_SLICES = 64, /* each slice of a weight is cast into both copies, since neither copy follows from the
                                * other. Tiles of the column-wise copy are slice_tile[1] x slice_tile[0] (see
                                * te__quant_class) */
    TE__EXACT_CODES = 128,    /* a code times its block's scale is exact in bf16 */
    TE__TAKES_AMAX = 256,     /* the operation that made a tensor can hand the amax of the tensor to the cast, in
                               * spec->amax or spec->x_amax */
    TE__BLOCKS_IN_ATTENTION = 512 /* FP8 attention reads q, k, v, o and their gradients in blocks of this kind */
};

/* The facts and functions of one kind of quantizer. Functions that the kind's `form` does not need are NULL. */
struct te__quant_class {
    te_quant_kind kind;
    const char *name; /* for messages */
    te__quant_form form;
    int facts;
    te_dtype code_dtype, scale_dtype; /* code_dtype NONE: te_quantizer_desc says e4m3 or e5m2 */
    te_scaling scaling[2];            /* passed to operations that read the codes; [1] is for two-dimensional blocks */
    int64_t slice_tile[2];            /* for weights that are quantized slice by slice: rows and columns of a tile with
                                       * one scale; 0: there are no tiles */
    const char *slices_need;          /* the error text for a weight that cannot be quantized slice by slice. NULL: the
                                       * kind refuses no weight. A kind with an error text and a slice_tile of 0
                                       * refuses every weight. A kind with an error text and another slice_tile refuses
                                       * a weight with blocks of another size, or with an option like rht */
    /* Checks the fields of `desc` that only this kind reads, and copies them into `spec`. NULL: there are no such
     * fields. */
    te_result (*resolve)(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec, const char *who);
    /* Computes the shape of the scales of a copy [outer, inner]. `inner` is the contraction dimension. NULL: the kind
     * has TE__TENSOR_SCALED, or no codes. */
    void (*scale_shape)(const te__quant_copy *c, bool columnwise, int64_t outer, int64_t inner, int64_t shape[2]);
    /* Quantizes x, which is contiguous, into `row` and `col`. One of the two may be NULL. Copies of the form
     * TE__FORM_OPAQUE get new tensors. */
    te_result (*fill)(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                      const te_tensor *noop);
    /* Returns copy c of x, decoded to a plain tensor that is not recorded on the tape. Returns NULL with an error on
     * failure. */
    te_tensor *(*decode)(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype);
    /* Only with TE__COLUMNS_FOLLOW: computes the scales of the transposed copy. NULL: both copies share their
     * scales. */
    te_result (*turn_scales)(te_ctx *te, const te__quant_copy *row, te__quant_copy *col, int64_t m, int64_t n);
    /* For inspection: returns the scaling factor of the whole tensor (te_quant_stats.scale), computed from `word`. If
     * the kind has TE__TENSOR_AMAX, `word` is the tensor's amax. Otherwise `word` is the scale-inverse. NULL: the kind
     * has no such factor. */
    float (*tensor_factor)(float word, bool e4m3_max_256);
    /* Ranks may exchange codes and scales of shards (along dimension 0) whose rows and columns are multiples of
     * shard_tile. 0: they may not. */
    int64_t shard_tile;
    int shard_scales[2]; /* the dimension of the scale tensor that grows with the number of rows: [0] for the row-wise
                          * copy, [1] for the column-wise copy */
    const char *two_dimensional; /* for messages: the name of the option for two-dimensional blocks. NULL: the kind
                                  * has no such option */
    int64_t group_rows;  /* rows in a block of the column-wise copy. Each group of rows begins at a multiple of this
                          * number. 0: no codes */
};

/* Returns true if a cast by `spec` can take the known amax of its input. A cast with rht cannot, because rht changes
 * the values. A cast with row_scaled or `sizes` cannot, because it needs several amaxes. */
static bool te__takes_amax(const te__quant_spec *spec) {
    return spec->cls->facts & TE__TAKES_AMAX && !spec->rht && !spec->row_scaled && !spec->sizes;
}

static bool te__is_opaque(const te__quant_class *cls) { return cls && cls->form == TE__FORM_OPAQUE; }

/* Returns true if copies of the kinds a and b have the same layout. */
static bool te__same_layout(const te__quant_class *a, const te__quant_class *b) {
    return a == b || (a->facts & b->facts & TE__TENSOR_SCALED);
}

/* Returns the spec of one copy. In a hybrid quantizer each copy has a spec of its own. */
static const te__quant_spec *te__spec_of(const te__quant_spec *spec, int which) {
    if (spec->cls->form != TE__FORM_PARTS) return spec;
    return which == TE_ROWWISE ? spec->row : spec->col;
}
static te__quant_copy *te__copy_of(const te_tensor *x, int which) {
    return which == TE_ROWWISE ? &x->quantized->row : &x->quantized->col;
}

/* Sets the four results to the tensors that a cast writes. A copy that is NULL gives NULL. */
static void te__cast_outputs(const te__quant_copy *row, const te__quant_copy *col, te_tensor **row_data,
                             te_tensor **row_scale, te_tensor **col_data, te_tensor **col_scale) {
    *row_data = row ? row->data : NULL;
    *row_scale = row ? row->scale : NULL;
    *col_data = col ? col->data : NULL;
    *col_scale = col ? col->scale : NULL;
}

/* Returns the leading dimension for codes. Rows start at multiples of 16 bytes, so kernels can load 16 bytes at a
 * time. */
static int64_t te__quant_ld(te_dtype dtype, int64_t columns) {
    return te__round_up(columns, dtype == TE_F4E2M1 ? 32 : 16);
}

/* Returns a contiguous tensor as a matrix [M, N]. The tape does not record this. */
static te_tensor *te__as_matrix(const te_tensor *x) { return te__alias_2d(x, 0, x->dtype, te__rows(x), te__cols(x)); }
