/* api/module.h: modules. A model is a tree of modules of built-in and user's classes.
 *
 * A module has a class, a name, children, parameters (trained) and buffers (saved, not trained). */

/* The output tensors of a module; NULL for those that it does not make. Borrowed from the innermost scope. */
typedef struct te_outputs {
    te_tensor *out;       /* the main output, of every module */
    te_tensor *bias;      /* with return_bias: the bias, which is then not added to `out` */
    te_tensor *ln_out;    /* with return_layernorm_output: the output of the norm */
    te_tensor *max_logit; /* with return_max_logit: the largest score of each head */
    te_tensor *m_splits;  /* of Fp8Padding, i64 [num_gemms]: the padded sizes */
    te_tensor *topk_indices, *aux_loss; /* of Gate and MoE; see api/experts.h */
} te_outputs;
/* The place of a forward call among the microbatches of a step (TransformerEngine: is_first_microbatch). */
typedef enum te_microbatch {
    TE_MICROBATCH_NONE = 0,  /* not given: every call quantizes the weights */
    TE_MICROBATCH_FIRST = 1, /* the call quantizes the weights and keeps the quantized copies; with
                              * fuse_wgrad_accumulation its weight gradients overwrite the main gradients */
    TE_MICROBATCH_LATER = 2  /* the call uses the kept copies; a weight that was written after its copy was made is
                              * quantized again */
} te_microbatch;
#define TE_MAX_GEMMS 512 /* maximum number of groups of a GroupedLinear, and of experts in a layer */
#define TE_MAX_MODULE_DEPTH 256 /* maximum number of levels in a tree of modules */
/* The tensors, options and outputs of one forward call. Zero-initialise; zero means "not given". Tensors are borrowed
 * for the call. */
typedef struct te_forward_args {
    te_tensor *input;                  /* depends on the class: hidden states [s, b, h] or [b, s, h], ids, a query and
                                        * so on */
    te_tensor *encoder_output;         /* for cross attention: hidden states for keys and values, [s_kv, b, h], [b,
                                        * s_kv, h] or packed [tokens, h] */
    te_tensor *key, *value;            /* for DotProductAttention, whose queries are `input`: keys and values, [s_kv, b,
                                        * G, d] each */
    const te_rotary_desc *rotary;      /* rotates queries and keys (TransformerEngine: rotary_pos_emb); NULL => none */
    const te_rotary_desc *rotary_key;  /* rotates keys; NULL => `rotary` rotates them too */
    te_attn_call attention;       /* for modules with attention */
    te_cross_attention_call cross;     /* for a decoder's cross attention */
    const int64_t *m_splits;           /* for GroupedLinear, Fp8Padding, Fp8Unpadding: rows of each group, [num_gemms],
                                        * in host memory; not together with m_splits_tensor. Under
                                        * te_module_set_checkpoint, borrowed until te_backward */
    te_tensor *m_splits_tensor;        /* the number of rows of each group, i32 or i64 [num_gemms], on the device */
    te_tensor *topk_weights, *topk_indices; /* for experts: the outputs of a Gate (api/experts.h) */
    int64_t *padded_m_splits;          /* written by Fp8Padding if m_splits is given: the padded size of each group,
                                        * [num_gemms]; NULL => not written */
    bool fp8_output, fp8_grad;         /* for Linear and LayerNormLinear in an enabled autocast region; fp8_output also
                                        * for DotProductAttention, under a recipe with fp8_dpa. fp8_output => `out` is
                                        * quantized by the recipe. A module accepts such an `out` as input; any other
                                        * function needs te_dequantize first.
                                        * fp8_grad => the gradient of the GEMM's input is quantized. If the input is a
                                        * leaf (te_tensor_set_requires_grad), its gradient is then dequantized */
    te_microbatch
        is_first_microbatch; /* 0 => Linear and GroupedLinear use te_step_get_is_first_microbatch */
    te_kv_cache *kv_cache;             /* for a CausalLM: keys and values of earlier calls; this call adds its own. NULL
                                        * => none */
    int64_t logits_to_keep;            /* for a CausalLM: number of positions, the last ones of `input`, that `out` has
                                        * logits of (transformers: logits_to_keep); 0 => all */
    void *user;                        /* for the user's classes; built-in modules hand it to their children */
    te_outputs outputs;                /* written by the call */
} te_forward_args;

/* A class of modules. Must outlive its modules. */
typedef struct te_module_class {
    const char *name;    /* name of the class, such as "Linear"; must outlive the modules */
    size_t state_size;   /* size in bytes of the class's own data in each module (te_module_state), zeroed and 16-byte
                          * aligned */
    /* Fills args->outputs, at least `out`. On failure records the error in the context and returns its code. Every
     * class needs a forward, container classes too. */
    te_result (*forward)(te_module *self, te_forward_args *args);
    void (*destroy)(te_module *self);               /* called before children and parameters are released; may be
                                                     * NULL */
    te_result (*reset_parameters)(te_module *self); /* gives the parameters their initial values; may be NULL */
} te_module_class;

/* Makes a module of class `cls` without children and parameters. `name` is copied; NULL => the class's name. The caller
 * owns the module until a parent takes it, and must call te_module_destroy. TE_ERR_STATE inside a graph's capture. */
TE_API te_module *te_module_create(te_ctx *te, const te_module_class *cls, const char *name);
/* Releases a module and the tree below it, and removes it from its parent. m may be NULL. Its nodes on the tape stay
 * valid. Inside a trace hook the call only gives TE_ERR_STATE.
 *
 * A parent that needs m is then incomplete. Running, saving, merging or resetting a tree with this parent, or giving it
 * adapters, fails with TE_ERR_STATE ("its child .. is gone"). te_module_add_child with the old name completes it again.
 * Two kinds of parents do not need m: a Sequential, and a built-in module to which the program added m. */
TE_API void te_module_destroy(te_module *m);
TE_API void *te_module_state(te_module *m);                            /* returns the class's own state_size bytes
                                                                        * (borrowed) */
TE_API te_ctx *te_module_ctx(const te_module *m);                      /* returns the context that m was made in
                                                                        * (borrowed) */
TE_API const te_module_class *te_module_get_class(const te_module *m); /* returns the class of m (borrowed) */
TE_API const char *te_module_name(const te_module *m);                 /* returns the name of m in its parent
                                                                        * (borrowed); "" for NULL */
TE_API te_module *te_module_parent(const te_module *m);                /* returns the parent (borrowed); NULL at the
                                                                        * root */
/* Writes the path of m into buffer (truncated to fit): the names from the root's child down to m, such as
 * "layers.3.self_attention.qkv". A root gives its own name. Returns buffer. */
TE_API const char *te_module_path(const te_module *m, char *buffer, size_t size);

/* Gives `child` to `parent`, which owns it from now on. Returns `child`, or NULL if it was not added. The child becomes
 * the last one, or replaces a destroyed child of the same name (te_module_destroy).
 * `name` is copied and has no dot; NULL => the name that `child` has.
 * TE_ERR_INVALID leaves the child with the caller. Causes:
 *   - `child` has a parent, or is above `parent` in its tree
 *   - `child` belongs to another context
 *   - `parent` has another child of this name
 *   - `child`, or a module below it, would be below level TE_MAX_MODULE_DEPTH */
TE_API te_module *te_module_add_child(te_module *parent, const char *name, te_module *child);
/* Removes parent's child of the given name from the tree and returns it; the caller owns it. The parent stays complete.
 * TE_ERR_INVALID if there is no such child, or if the parent's built-in class runs it. */
TE_API te_module *te_module_remove_child(te_module *parent, const char *name);
TE_API int te_module_num_children(const te_module *m);            /* returns the number of direct children */
TE_API te_module *te_module_child(const te_module *m, int index); /* returns child number `index`, in the order of
                                                                   * adding (borrowed); NULL if there is none */
/* Returns the module at a dotted path below m (borrowed); m itself for ""; NULL if there is none. */
TE_API te_module *te_module_find(te_module *m, const char *path);

/* Registers a tensor (retained) as the parameter `name` (copied) of m. Replaces an earlier one. The tensor requires a
 * gradient from now on. Returns the tensor. */
TE_API te_tensor *te_module_add_parameter(te_module *m, const char *name, te_tensor *tensor);
/* Registers a tensor (retained) as the buffer `name` (copied) of m: saved, not trained. Replaces an earlier one.
 * Returns the tensor. */
TE_API te_tensor *te_module_add_buffer(te_module *m, const char *name, te_tensor *tensor);
/* Sets whether the buffer `name` of m itself is saved in files. If not, te_model_save and te_model_load skip it, and an
 * entry of that name in a file is ignored (PyTorch: register_buffer(persistent=False)). TE_ERR_INVALID if m has no such
 * buffer. */
TE_API te_result te_module_set_buffer_persistent(te_module *m, const char *name, bool persistent);
/* Returns the parameter or buffer `name` of m itself (borrowed); NULL if there is none. */
TE_API te_tensor *te_module_parameter(const te_module *m, const char *name);

/* Stores `value` as the module's attribute `key` (copied), in place of an earlier value. Attributes are for notes:
 * te_module_visit, checkpoints and casts do not see them. NULL is a value like any other.
 * `destroy` (may be NULL) is called with the value when it is replaced, removed, or dropped with its module. It is
 * called before the class's own destroy function. */
TE_API te_result te_module_set_attribute(te_module *m, const char *key, void *value, void (*destroy)(void *value));
/* Writes the value of attribute `key` to *value (may be NULL) and returns true. Returns false if there is no such
 * attribute. */
TE_API bool te_module_attribute(const te_module *m, const char *key, void **value);
/* Removes the attribute `key`, if there is one. */
TE_API void te_module_remove_attribute(te_module *m, const char *key);

/* The two kinds of tensors that a module owns. */
typedef enum te_entry_kind {
    TE_ENTRY_PARAMETER = 0, /* trained and saved */
    TE_ENTRY_BUFFER = 1     /* saved */
} te_entry_kind;
/* A function that te_module_visit calls with each module of a tree. It returns false to stop the visit. */
typedef bool (*te_module_visit_fn)(void *user, te_module *m);
/* A function that te_module_visit_tensors calls with each parameter and buffer, and its module. `path` is the dotted
 * path of the tensor below the module that te_module_visit_tensors was called with. `path` is valid during the call.
 * The function returns false to stop the visit. */
typedef bool (*te_tensor_visit_fn)(void *user, te_module *m, const char *path, te_tensor *tensor, te_entry_kind kind);
/* Calls `visit` with m and all modules below it, parents before children, children in order. Returns false if `visit`
 * returned false or is NULL. */
TE_API bool te_module_visit(te_module *m, te_module_visit_fn visit, void *user);
/* Calls `visit` with every parameter and buffer of m's tree, in te_module_visit's order of modules. Returns false if
 * `visit` returned false or is NULL. */
TE_API bool te_module_visit_tensors(te_module *m, te_tensor_visit_fn visit, void *user);
/* Returns the number of elements of all parameters of the tree; a shared parameter counts once for each place where it
 * is registered. */
TE_API int64_t te_module_num_parameters(te_module *m);
/* Draws new initial values for all parameters of the tree, module by module, as the create functions do. Uses the
 * present random state. On failure the random state does not change, and the call may be repeated. TE_ERR_STATE inside
 * a graph's capture.
 * Parameters of TE_PARAMS_META get their memory here. To read or train them earlier gives TE_ERR_STATE or
 * TE_ERR_INVALID. Between te_quantized_model_init_begin and te_quantized_model_init_end they are stored quantized. */
TE_API te_result te_module_reset_parameters(te_module *m);
/* Sets whether all parameters of the tree require a gradient: true trains them, false freezes them. */
TE_API void te_module_set_requires_grad(te_module *m, bool on);
/* Drops the gradients of all parameters of the tree, also those that wait for te_backward_dw. */
TE_API void te_module_zero_grad(te_module *m);
/* Sets the whole tree to training (the default) or to evaluation. In evaluation dropout is off. */
TE_API void te_module_train(te_module *m, bool training);
/* Returns whether m is in training; false for NULL. */
TE_API bool te_module_is_training(const te_module *m);
/* Writes an indented tree of names, classes, formats and shapes into buffer (truncated to fit); returns the length of
 * the whole text. */
TE_API size_t te_module_print(te_module *m, char *buffer, size_t size);

/* A forward function, as in te_module_class. */
typedef te_result (*te_module_forward_fn)(te_module *self, te_forward_args *args);
/* Gives this module its own forward function, in place of its class's; NULL removes it. Returns the function that an
 * earlier call set, or NULL. */
TE_API te_module_forward_fn te_module_set_forward(te_module *m, te_module_forward_fn forward);

/* If `on` is true, the module's forward runs under te_checkpoint: activations are freed and computed again in the
 * backward pass. Off by default. args->user and its data must live until te_backward. */
TE_API void te_module_set_checkpoint(te_module *m, bool on);

/* Runs a module on one input. Returns its output `out`, in the innermost scope, or NULL on failure. TE_ERR_STATE if the
 * module or the input is NULL. Asynchronous on CUDA: the call may return before the device has done the work, and even
 * before missing kernels are compiled (by other threads). */
TE_API te_tensor *te_forward(te_module *m, te_tensor *x);
/* Runs a module as te_forward does, on all of *args. Writes args->outputs and returns `out`. */
TE_API te_tensor *te_forward_with(te_module *m, te_forward_args *args);
