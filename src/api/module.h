/* api/module.h: the module tree of which a model is made, built-in classes and the user's alike.
 *
 * A module has a class, a name, children, parameters (trained) and buffers (saved, not trained). Everything that walks
 * a model walks this tree: optimizers, checkpoints, printing, freezing. The built-in classes use the functions of this
 * chapter alone. */

/* The tensors that a module makes, by name; NULL for those that it does not make. Borrowed from the innermost scope. */
typedef struct te_outputs {
    te_tensor *out;       /* every module's */
    te_tensor *bias;      /* with return_bias: the bias, which is not added to `out` */
    te_tensor *ln_out;    /* with return_layernorm_output */
    te_tensor *max_logit; /* with return_max_logit */
    te_tensor *m_splits;  /* Fp8Padding's, i64 [num_gemms]: the padded sizes */
    te_tensor *topk_indices, *aux_loss; /* Gate's, MoE's: api/experts.h */
} te_outputs;
/* The place of a forward call among the microbatches of a step (TransformerEngine: is_first_microbatch). */
typedef enum te_microbatch {
    TE_MICROBATCH_NONE = 0,  /* not given: every call quantizes its weights */
    TE_MICROBATCH_FIRST = 1, /* the call quantizes the weights and keeps their copies; with fuse_wgrad_accumulation its
                              * weight gradients overwrite the main gradients */
    TE_MICROBATCH_LATER = 2  /* the call uses the kept copies; a weight that was written since is quantized again */
} te_microbatch;
#define TE_MAX_GEMMS 512 /* the most groups of a GroupedLinear, and the most experts of a layer */
#define TE_MAX_MODULE_DEPTH 256 /* the most levels of a tree of modules */
/* One forward call: its tensors, its options, its outputs. Zero-initialised; zero means "not given". Tensors are
 * borrowed for the call. */
typedef struct te_forward_args {
    te_tensor *input;                  /* hidden states [s, b, h] or [b, s, h], ids, a query ..., by the class */
    te_tensor *encoder_output;         /* cross attention: where keys and values come from, [s_kv, b, h] or [b, s_kv,
                                        * h], or packed [tokens, h] */
    te_tensor *key, *value;            /* DotProductAttention: [s_kv, b, G, d] each, beside the query in `input` */
    const te_rotary_desc *rotary;      /* rotates queries and keys (TransformerEngine: rotary_pos_emb); NULL => none */
    const te_rotary_desc *rotary_key;  /* rotates keys; NULL => `rotary` rotates them too */
    te_attn_call attention;       /* for modules with attention */
    te_cross_attention_call cross;     /* for a decoder's cross attention */
    const int64_t *m_splits;           /* GroupedLinear, Fp8Padding, Fp8Unpadding: the rows of each group, [num_gemms],
                                        * in host memory; under te_module_set_checkpoint this list must live until
                                        * te_backward. Or m_splits_tensor */
    te_tensor *m_splits_tensor;        /* the rows of each group, i32 or i64 [num_gemms], on the device */
    te_tensor *topk_weights, *topk_indices; /* experts: what a Gate has chosen (api/experts.h) */
    int64_t *padded_m_splits;          /* written by Fp8Padding with m_splits, [num_gemms]: the padded sizes; NULL =>
                                        * not asked for */
    bool fp8_output, fp8_grad;         /* Linear, LayerNormLinear, in an enabled autocast region: `out` (fp8_output) and
                                        * the gradient of the product's input (fp8_grad) are quantized by the recipe.
                                        * Modules take such inputs; other functions take them after te_dequantize; a
                                        * leaf gets its gradient decoded. DotProductAttention under a recipe with
                                        * fp8_dpa: fp8_output alone */
    te_microbatch
        is_first_microbatch; /* 0 => not given: Linear and GroupedLinear use te_step_get_is_first_microbatch */
    te_kv_cache *kv_cache;             /* CausalLM: keys and values of earlier calls, to which this call adds its own;
                                        * NULL => none */
    void *user;                        /* for classes of the user's; built-in modules hand it to their children */
    te_outputs outputs;                /* written by the call */
} te_forward_args;

/* A class of modules. Must outlive its modules. */
typedef struct te_module_class {
    const char *name;    /* "Linear" ...; must outlive the modules */
    size_t state_size;   /* bytes of the class's own data, zeroed, 16-byte aligned: te_module_state */
    /* Fills args->outputs, at least out. On failure records the error in the context and returns its code. Every class
     * needs a forward, container classes too: te_module_create refuses a class without one. */
    te_result (*forward)(te_module *self, te_forward_args *args);
    void (*destroy)(te_module *self);               /* called before children and parameters are released; may be
                                                     * NULL */
    te_result (*reset_parameters)(te_module *self); /* fills the parameters with their first values; may be NULL */
} te_module_class;

/* Makes a module of `cls` without children and parameters, named `name` (copied; NULL => the class's name). Owned by
 * the caller until it is given to a parent: te_module_destroy. TE_ERR_STATE inside a graph's capture. */
TE_API te_module *te_module_create(te_ctx *te, const te_module_class *cls, const char *name);
/* Releases a module and the tree below it, and removes it from its parent. Records on the tape stay valid: te_backward
 * may still run them. NULL is fine. TE_ERR_STATE, and nothing happens, inside a trace hook.
 *
 * A parent that needs the child remembers its name. Every parent needs its children, with two exceptions: a Sequential
 * runs the children that are left, and a built-in module does not need a child that the program added beside its own.
 * Until te_module_add_child gives the parent another child of that name, a tree that contains the parent is refused
 * with TE_ERR_STATE ("its child .. is gone") by everything that runs, saves, merges or resets it or gives it adapters.
 * te_module_print shows the missing child. */
TE_API void te_module_destroy(te_module *m);
TE_API void *te_module_state(te_module *m);                            /* returns the class's own state_size bytes
                                                                        * (borrowed) */
TE_API te_ctx *te_module_ctx(const te_module *m);                      /* returns the context that m was made in
                                                                        * (borrowed) */
TE_API const te_module_class *te_module_get_class(const te_module *m); /* returns the class of m (borrowed) */
TE_API const char *te_module_name(const te_module *m);                 /* returns the name of m among its parent's
                                                                        * children (borrowed); "" for NULL */
TE_API te_module *te_module_parent(const te_module *m);                /* returns the parent (borrowed); NULL at the
                                                                        * root */
/* Writes the names from the root's child down to m, "layers.3.self_attention.qkv", into buffer (truncated to fit); for
 * a root, its own name. Returns buffer. */
TE_API const char *te_module_path(const te_module *m, char *buffer, size_t size);

/* Gives `child` to `parent`, which owns it from here on. name: copied; NULL => the name that child has; without a dot.
 * The child goes behind the other children, or into the place of a destroyed child of that name (te_module_destroy).
 * Returns child. A NULL child passes through. TE_ERR_INVALID, and the caller keeps the child, if it has a parent, is
 * above `parent`, is of another context, has a sibling of that name, or would lie below level TE_MAX_MODULE_DEPTH. */
TE_API te_module *te_module_add_child(te_module *parent, const char *name, te_module *child);
/* Takes parent's child of that name out of the tree; the caller owns it from here on, and parent no longer needs it.
 * Returns the child; NULL with TE_ERR_INVALID if there is none, or if a built-in class runs it. */
TE_API te_module *te_module_remove_child(te_module *parent, const char *name);
TE_API int te_module_num_children(const te_module *m);            /* returns the number of direct children */
TE_API te_module *te_module_child(const te_module *m, int index); /* returns child `index`, in the order of adding
                                                                   * (borrowed); NULL outside */
/* Returns the module below m at a dotted path (borrowed); NULL if there is none; m for "". */
TE_API te_module *te_module_find(te_module *m, const char *path);

/* Registers a tensor (retained) as a parameter under `name` (copied), or puts it in the place of the parameter of that
 * name. The tensor requires a gradient from here on. Returns the tensor. */
TE_API te_tensor *te_module_add_parameter(te_module *m, const char *name, te_tensor *tensor);
/* Registers a tensor (retained) as a buffer under `name` (copied), saved with the model and not trained, or puts it in
 * the place of the buffer of that name. Returns the tensor. */
TE_API te_tensor *te_module_add_buffer(te_module *m, const char *name, te_tensor *tensor);
/* Sets whether the module's own buffer of that name goes into files. persistent = false: te_model_save and
 * te_model_load skip the buffer, and te_model_load skips an entry of that name in a file (PyTorch:
 * register_buffer(persistent=False)). TE_ERR_INVALID if there is no such buffer. */
TE_API te_result te_module_set_buffer_persistent(te_module *m, const char *name, bool persistent);
/* Returns the module's own parameter or buffer of that name (borrowed); NULL if there is none. */
TE_API te_tensor *te_module_parameter(const te_module *m, const char *name);

/* Keeps `value` with the module under `key` (copied), in the place of an earlier value: for notes of the user, or of a
 * layer above. No walk, checkpoint or cast sees attributes. `destroy` (may be NULL) is called with a value when the
 * value is replaced or removed or its module is destroyed, before the class's own destroy function. NULL is a value
 * too; te_module_remove_attribute removes one. */
TE_API te_result te_module_set_attribute(te_module *m, const char *key, void *value, void (*destroy)(void *value));
/* Writes the value under `key` into *value (may be NULL) and returns true; false if there is none. */
TE_API bool te_module_attribute(const te_module *m, const char *key, void **value);
/* Removes the value under `key`. A key that is not there is fine. */
TE_API void te_module_remove_attribute(te_module *m, const char *key);

/* The two kinds of tensors that a module owns. */
typedef enum te_entry_kind {
    TE_ENTRY_PARAMETER = 0, /* trained and saved */
    TE_ENTRY_BUFFER = 1     /* saved */
} te_entry_kind;
/* Called with each module of a tree. Returns false to stop the walk. */
typedef bool (*te_module_visit_fn)(void *user, te_module *m);
/* Called with each parameter and buffer of a tree, its module, and its dotted path from the walk's root (valid during
 * the call). Returns false to stop the walk. */
typedef bool (*te_tensor_visit_fn)(void *user, te_module *m, const char *path, te_tensor *tensor, te_entry_kind kind);
/* Calls `visit` with m and all modules below, parents first, children in order. Returns false if `visit` stopped the
 * walk or is NULL. */
TE_API bool te_module_visit(te_module *m, te_module_visit_fn visit, void *user);
/* Calls `visit` with every parameter and buffer, module by module in the order of te_module_visit. Returns false as
 * te_module_visit. */
TE_API bool te_module_visit_tensors(te_module *m, te_tensor_visit_fn visit, void *user);
/* Returns the number of elements of all parameters of the tree; a shared parameter counts wherever it is registered. */
TE_API int64_t te_module_num_parameters(te_module *m);
/* Gives all parameters of the tree new first values, children in order, as the create functions would draw them from
 * the present random state. Parameters of TE_PARAMS_META get their memory (inside te_quantized_model_init_begin .. _end
 * quantized); reading or training them earlier gives TE_ERR_STATE or TE_ERR_INVALID. On failure the random state is
 * what it was, and the call may be repeated. TE_ERR_STATE inside a graph's capture. */
TE_API te_result te_module_reset_parameters(te_module *m);
/* Sets whether all parameters of the tree require a gradient: true trains them, false freezes them. */
TE_API void te_module_set_requires_grad(te_module *m, bool on);
/* Drops the gradients of the whole tree, and those that wait for te_backward_dw. */
TE_API void te_module_zero_grad(te_module *m);
/* Sets the whole tree to training (the default) or to evaluation, where dropout is off. */
TE_API void te_module_train(te_module *m, bool training);
/* Is m in training? False for NULL. */
TE_API bool te_module_is_training(const te_module *m);
/* Writes an indented tree of names, classes, formats and shapes into buffer (truncated to fit); returns the length of
 * the whole text. */
TE_API size_t te_module_print(te_module *m, char *buffer, size_t size);

/* A forward function, as te_module_class has it. */
typedef te_result (*te_module_forward_fn)(te_module *self, te_forward_args *args);
/* Gives this module a forward of its own, which runs in place of its class's; NULL removes it. Returns the module's
 * earlier own forward, or NULL. */
TE_API te_module_forward_fn te_module_set_forward(te_module *m, te_module_forward_fn forward);

/* on: the module's forward runs under te_checkpoint: its activations are freed, and computed again in the backward
 * pass. args->user and what it points to must then live until te_backward. Off by default. */
TE_API void te_module_set_checkpoint(te_module *m, bool on);

/* Runs a module on one input. Returns its output `out`, in the innermost scope, or NULL: TE_ERR_STATE if the module or
 * the input is NULL. Asynchronous on CUDA. The first call with new formats compiles kernels, in parallel on other
 * threads; the call itself does not wait for the compilation. */
TE_API te_tensor *te_forward(te_module *m, te_tensor *x);
/* Runs a module as te_forward, with every option of the call; all outputs are in args->outputs. Returns `out`. */
TE_API te_tensor *te_forward_with(te_module *m, te_forward_args *args);
