/* api/module.h: the module tree: what a model is made of, built-in classes and one's own alike.
 *
 * A module has a class, a name, children, parameters (trained) and buffers (saved, not trained). Everything that walks a
 * model walks this tree: optimizers, checkpoints, printing, freezing. The built-in classes have no private door. */

/* What one forward call carries, beside the input. Zero-initialised: every field's zero means "not given". */
typedef enum te_microbatch { TE_MICROBATCH_NONE = 0, TE_MICROBATCH_FIRST = 1, TE_MICROBATCH_LATER = 2 } te_microbatch;
#define TE_MAX_OUTPUTS 4
#define TE_MAX_MODULE_DEPTH 256 /* levels of a tree of modules */
typedef struct te_forward_args {
    te_tensor *input;          /* hidden states [s, b, h] or [b, s, h], ids, ... */
    te_tensor *encoder_output; /* cross attention */
    te_tensor *key, *value;    /* te_dot_product_attention: input is the query */
    const te_rotary_desc *rotary; /* TransformerEngine's rotary_pos_emb; NULL => none */
    te_attn_mask mask;         /* 0 => the module's own */
    bool has_window;
    int64_t window_left, window_right;
    te_microbatch is_first_microbatch; /* FIRST: quantize the weight and keep the copy; LATER: use the kept one */
    void *user;                /* for classes of one's own */
    te_tensor *outputs[TE_MAX_OUTPUTS]; /* written: out[, bias][, ln_out] */
    int num_outputs;           /* written */
} te_forward_args;

typedef struct te_module_class {
    const char *name;    /* "Linear" ...; must outlive the modules */
    size_t state_size;   /* bytes of the class's own data, zeroed, 16-byte aligned: te_module_state */
    /* Fills args->outputs and num_outputs. On failure returns the result code after the context has its error. */
    te_result (*forward)(te_module *self, te_forward_args *args);
    void (*destroy)(te_module *self);          /* before children and parameters go; may be NULL */
    te_result (*reset_parameters)(te_module *self); /* may be NULL */
} te_module_class;

/* Owned by the caller until it is given to a parent (te_module_add_child); te_module_destroy releases a whole tree. The tape keeps what a backward pass
 * that is still to come needs of it. */
TE_API te_module *te_module_create(te_ctx *te, const te_module_class *cls, const char *name);
TE_API void te_module_destroy(te_module *m);
TE_API void *te_module_state(te_module *m);
TE_API te_ctx *te_module_ctx(const te_module *m);
TE_API const te_module_class *te_module_get_class(const te_module *m);
TE_API const char *te_module_name(const te_module *m);
TE_API te_module *te_module_parent(const te_module *m);
/* "layers.3.self_attention.qkv", written into buffer (truncated to fit). Returns buffer. */
TE_API const char *te_module_path(const te_module *m, char *buffer, size_t size);

/* Gives `child` to `parent` under `name` (copied). Returns child. A NULL child passes through. */
TE_API te_module *te_module_add_child(te_module *parent, const char *name, te_module *child);
TE_API int te_module_num_children(const te_module *m);
TE_API te_module *te_module_child(const te_module *m, int index);
/* By dotted path; NULL if there is none. */
TE_API te_module *te_module_find(te_module *m, const char *path);

/* Registers a tensor (retained) under `name` (copied). Parameters get requires_grad. Returns the tensor. */
TE_API te_tensor *te_module_add_parameter(te_module *m, const char *name, te_tensor *tensor);
TE_API te_tensor *te_module_add_buffer(te_module *m, const char *name, te_tensor *tensor);
/* Own ones, by name; NULL if there is none. Borrowed. */
TE_API te_tensor *te_module_parameter(const te_module *m, const char *name);

typedef enum te_entry_kind { TE_ENTRY_PARAMETER = 0, TE_ENTRY_BUFFER = 1 } te_entry_kind;
/* Walks modules (parents first, in order of creation) and, for each, its entries. Return false to stop. */
typedef bool (*te_module_visit_fn)(void *user, te_module *m);
typedef bool (*te_tensor_visit_fn)(void *user, te_module *m, const char *path, te_tensor *tensor, te_entry_kind kind);
TE_API bool te_module_visit(te_module *m, te_module_visit_fn visit, void *user);
TE_API bool te_module_visit_tensors(te_module *m, te_tensor_visit_fn visit, void *user);
TE_API int64_t te_module_num_parameters(te_module *m);
TE_API void te_module_set_requires_grad(te_module *m, bool on);
TE_API void te_module_zero_grad(te_module *m);
/* Training (the default) or evaluation: dropout is off in the latter. Whole tree. */
TE_API void te_module_train(te_module *m, bool training);
TE_API bool te_module_is_training(const te_module *m);
/* An indented tree with shapes, into buffer (truncated to fit); returns the length that the whole text has. */
TE_API size_t te_module_print(te_module *m, char *buffer, size_t size);

/* The instance's own forward, which shadows the class's; NULL takes it away. Returns what was there. */
typedef te_result (*te_module_forward_fn)(te_module *self, te_forward_args *args);
TE_API te_module_forward_fn te_module_set_forward(te_module *m, te_module_forward_fn forward);

/* Whether the module's forward runs under te_checkpoint: its activations are made again in the backward pass. args->user and what it points to must
 * then live until te_backward. */
TE_API void te_module_set_checkpoint(te_module *m, bool on);

/* Runs a module. te_forward gives it one input and returns its first output. */
TE_API te_tensor *te_forward(te_module *m, te_tensor *x);
TE_API te_tensor *te_forward_with(te_module *m, te_forward_args *args);
