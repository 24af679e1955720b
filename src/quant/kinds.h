/* quant/kinds.h: the row of one kind of quantizer, a table of facts and functions, and helpers that several kinds use.
 * The rows stand in quant/kind_NAME.c; all other parts ask a row and compare no kinds. Must not know any one of
 * them. */

/* ---- quantized tensors ---- */

typedef struct te__quant_class te__quant_class; /* a kind of quantizer, below */

/* One copy of a quantized tensor, and how it is to be read; the layouts stand at te_quantized_view. The copies of a
 * hybrid tensor are of different kinds. */
typedef struct te__quant_copy {
    const te__quant_class *cls;
    te_tensor *data;  /* NULL: this copy was not made */
    te_tensor *scale; /* NULL: identity */
    te_tensor *amax;  /* NVFP4 */
    bool two_dimensional;   /* block, MXFP8, NVFP4 */
    bool rht, no_random_sign_mask; /* NVFP4 */
    bool e4m3_max_256;      /* NVFP4 */
    bool swizzled;          /* MXFP8, NVFP4 */
    te_custom_quantizer custom;
} te__quant_copy;
/* How to quantize: a te_quantizer_desc with its defaults resolved. */
typedef struct te__quant_spec {
    const te__quant_class *cls;
    te_dtype dtype; /* of the codes */
    int usage;      /* TE_ROWWISE | TE_COLUMNWISE */
    te_tensor *x_amax; /* current: f32 [2], the amax of what is quantized, as te_op_fp8_quantize takes it (borrowed);
                        * NULL: the cast measures it */
    te_tensor *bias_grad; /* delayed, current: gets the sums of columns of what is quantized; or NULL */
    bool two_dimensional, power_of_two, fp32_scales, swizzled, rht, no_random_sign_mask, stochastic, row_scaled,
        e4m3_max_256;
    te_4over6_error four_over_six;
    float epsilon;
    te_group *group;                        /* reduces amaxes; borrowed */
    te_tensor *scale, *amax;                /* delayed: f32 [1] each; with sizes [n], of any stride. Others: scale NULL,
                                             * amax that of what is quantized, if its maker left it
                                             * (te__quant_out_open) */
    te_tensor *sizes;                       /* i32 or i64 [n]: rows of groups, each quantized by itself (borrowed);
                                             * NULL: one group */
    const struct te__quant_spec *row, *col; /* hybrid */
    te_custom_quantizer custom;
} te__quant_spec;

struct te_quantizer {
    te_ctx *te;
    int refs;
    te__quant_spec spec;
    te__quant_spec child[2]; /* hybrid: row-wise, column-wise */
};

typedef struct te__quantized {
    const te__quant_class *cls; /* of the quantizer that made it */
    te_quantizer *quantizer; /* that quantizer (a reference), if the user holds it too, else NULL */
    te__quant_copy row, col;
    te_tensor *sizes; /* of groups of rows, each with scales and amaxes of its own, [n] (quant/groups.c); NULL: one
                       * group */
    uint64_t version_shift; /* added to the version of the memory that counts its values: they may move to other
                             * memory */
    void *init_value; /* of a weight: its value before it was first quantized, in its nominal dtype, in host memory; or
                       * NULL */
    size_t init_bytes;
    uint64_t init_version; /* the version of the tensor that init_value is the value of */
} te__quantized;

/* The references that a copy of a quantized tensor holds. */
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
typedef struct te__quantized_init { /* te_quantized_model_init_begin */
    te_recipe recipe;
    bool enabled, preserve;
} te__quantized_init;

/* A word of device memory in which an operation leaves the amax of its output, for the cast that quantizes this output
 * next (te__amax_take). The cast leaves 0 there, so the word needs neither an allocation nor a launch that clears
 * it. */
enum { TE__AMAX_WORDS = 4 };
typedef struct te__amax_word {
    te_tensor pair; /* f32 [2]: the amax, and a count of blocks for the cast; 0 while the word is free. The first field:
                     * te__amax_give finds the word by its address */
    te_tensor amax; /* the first number of the pair */
    te__buffer buffer;
    bool taken;
} te__amax_word;

typedef struct te__quant_state {
    te__autocast autocast[TE__MAX_AUTOCAST];
    int num_autocast;
    te__quantized_init quantized_init[TE__MAX_AUTOCAST];
    int num_quantized_init;
    bool inspecting;             /* te_quant_inspect */
    te_microbatch is_first_microbatch; /* of calls that do not give theirs */
    struct te__scaling *scaling; /* the scaling states of this context's modules, a list */
    bool has_scales;             /* there was one at least */
    int num_optimizers;          /* 0: no call tells when a step has ended */
    struct te__snapshot *recording, *replaying; /* of the innermost checkpoint that runs for the first time, or again */
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
    TE__FORM_PARTS, /* copies of two other kinds, spec->row and spec->col */
    TE__FORM_OPAQUE /* tensors that the user's functions make and read */
} te__quant_form;

/* Facts of a kind. */
enum {
    TE__TENSOR_SCALED = 1,    /* one scale a tensor, f32 [1], in both copies; such kinds read each other's copies */
    TE__SCALE_GIVEN = 2,      /* spec->scale and spec->amax come from outside: the scale in force, and the amax for its
                               * update */
    TE__TENSOR_AMAX = 4,      /* each copy keeps an f32 amax of the whole tensor, or one a line */
    TE__TRANSPOSED = 8,       /* a column-wise copy lies transposed */
    TE__IN_PRODUCTS = 16,     /* te_op_gemm reads the copies; products decode those of other kinds */
    TE__COLUMNS_FOLLOW = 32,  /* the column-wise copy is the row-wise one transposed, where a scale is that of a square
                               * of elements, or of all */
    TE__BOTH_FROM_SLICES = 64, /* slices are cast into both copies, for neither gives the other; tiles are turned in the
                                * column-wise one */
    TE__EXACT_CODES = 128,    /* codes times the scales of their blocks are bf16 without rounding */
    TE__TAKES_AMAX = 256,     /* the cast takes the amax of the whole tensor from the operation that made it: spec->amax
                               * or spec->x_amax */
    TE__BLOCKS_IN_ATTENTION = 512 /* FP8 attention takes q, k, v, o and their gradients by these blocks */
};

/* Functions may be NULL where their comment says so, and wherever `form` leaves them nothing to do. */
struct te__quant_class {
    te_quant_kind kind;
    const char *name; /* for messages */
    te__quant_form form;
    int facts;
    te_dtype code_dtype, scale_dtype; /* code_dtype NONE: e4m3 or e5m2, as the desc asks */
    te_scaling scaling[2];            /* for operations that read the copies; [1]: of two-dimensional blocks */
    int64_t slice_tile[2];            /* rows and columns that share a scale in weights quantized by slices; 0: none
                                       * do */
    const char *slices_need;          /* the refusal of a spec whose blocks are not such tiles, or that casts with other
                                       * options; of any spec if there are no tiles; NULL: any spec will do */
    /* Copies the fields of a desc that this kind alone reads into the spec, and refuses wrong ones. NULL: it has
     * none. */
    te_result (*resolve)(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec, const char *who);
    /* Shape of a copy's scales; `inner` runs along the contraction. NULL: TE__TENSOR_SCALED, or not codes. */
    void (*scale_shape)(const te__quant_copy *c, bool columnwise, int64_t outer, int64_t inner, int64_t shape[2]);
    /* Quantizes x (contiguous) into these copies, NULL for none; not both NULL. Opaque copies get new tensors. */
    te_result (*fill)(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                      const te_tensor *noop);
    /* The value of one copy of x as a plain tensor, without history; NULL with an error. */
    te_tensor *(*decode)(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype);
    /* TE__COLUMNS_FOLLOW: the scales of the transposed codes. NULL: both copies share theirs. */
    te_result (*turn_scales)(te_ctx *te, const te__quant_copy *row, te__quant_copy *col, int64_t m, int64_t n);
    /* The factor of a whole tensor, for inspection, from its amax or (without TE__TENSOR_AMAX) its scale. NULL: it has
     * none. */
    float (*tensor_factor)(float word, bool e4m3_max_256);
    /* Shards of a tensor's first dimension travel between ranks as codes and scales where their rows and columns are
     * multiples of this; 0: never. */
    int64_t shard_tile;
    int shard_scales[2]; /* the dimension of the scales that grows with the rows: of the row-wise copy, of the
                          * column-wise one */
    const char *two_dimensional; /* what makes blocks of two dimensions, for messages; NULL: there are none */
    int64_t group_rows;  /* rows that blocks of the column-wise copy have in common: groups of rows begin at multiples
                          * of these there; 0: not codes */
};

/* Does a cast by `spec` take an amax? Not where the numbers are transformed first, or where each line or each group of
 * rows has an amax of its own. */
static bool te__takes_amax(const te__quant_spec *spec) {
    return spec->cls->facts & TE__TAKES_AMAX && !spec->rht && !spec->row_scaled && !spec->sizes;
}

static bool te__is_opaque(const te__quant_class *cls) { return cls && cls->form == TE__FORM_OPAQUE; }

/* Does a copy of one kind mean the same as that of the other? */
static bool te__same_layout(const te__quant_class *a, const te__quant_class *b) {
    return a == b || (a->facts & b->facts & TE__TENSOR_SCALED);
}

/* The spec of one copy: hybrid quantizers have two. */
static const te__quant_spec *te__spec_of(const te__quant_spec *spec, int which) {
    if (spec->cls->form != TE__FORM_PARTS) return spec;
    return which == TE_ROWWISE ? spec->row : spec->col;
}
static te__quant_copy *te__copy_of(const te_tensor *x, int which) {
    return which == TE_ROWWISE ? &x->quantized->row : &x->quantized->col;
}

/* The outputs of a cast into these copies; NULLs for a copy that is NULL. */
static void te__cast_outputs(const te__quant_copy *row, const te__quant_copy *col, te_tensor **row_data,
                             te_tensor **row_scale, te_tensor **col_data, te_tensor **col_scale) {
    *row_data = row ? row->data : NULL;
    *row_scale = row ? row->scale : NULL;
    *col_data = col ? col->data : NULL;
    *col_scale = col ? col->scale : NULL;
}

/* Rows of codes start at multiples of 16 bytes, so that every kernel may load them 16 bytes at a time whatever the
 * shape. */
static int64_t te__quant_ld(te_dtype dtype, int64_t columns) {
    return te__round_up(columns, dtype == TE_F4E2M1 ? 32 : 16);
}

/* A contiguous tensor as [M, N], without history. */
static te_tensor *te__as_matrix(const te_tensor *x) { return te__alias_2d(x, 0, x->dtype, te__rows(x), te__cols(x)); }
