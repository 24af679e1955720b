/* quant/kinds.h: the row of one kind of quantizer, a table of facts and functions, and helpers that several kinds use.
 * The rows stand in quant/kind_NAME.c; all other parts ask a row and compare no kinds. Must not know any one of
 * them. */

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
