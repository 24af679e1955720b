/* api/formats.h: the number formats of whole models, as in nemo_automodel.components.models.common.utils: casts of
 * models and of their frozen parts, tensors that stay in f32, and the logits of a language model.
 *
 *     te_module_set_keep_in_fp32(model, (const char *[]){"norm", "inv_freq"}, 2, false);
 *     te_cast_model_to_dtype(model, NULL);   bf16, except tensors with one of these words in their path
 *
 * Floating tensors are tensors in f32, f16 and bf16, and tensors that are stored quantized. A cast of a quantized
 * tensor keeps the codes and changes the nominal format.
 *
 * Identity. The handle of a parameter or buffer stays the same, so optimizers, tied modules and the program's own
 * pointers see the new format. A gradient is cast with its parameter. Main gradients and decoupled gradients are not
 * cast: they belong to the program.
 *
 * Memory. A cast allocates all new memory before the first tensor changes: the device holds old and new tensors
 * together, and on any failure the model is what it was before. Tensors that were adjacent in memory are adjacent in
 * the new memory, and tensors that shared the same memory share the new memory. Views that the program made keep the
 * old memory. The release function of a te_tensor_wrap tensor is called.
 *
 * Tape and graphs. A te_backward that needs a parameter's values from before its cast gives TE_ERR_STATE. Graphs that
 * use a cast parameter cannot be launched any more.
 *
 * No cast changes the scaling state of delayed recipes ("fp8_scale_...", "fp8_amax_history_..."), which is f32. No
 * function of this file syncs. In a graph's capture, and between te_warmup_begin and te_warmup_end, the functions give
 * TE_ERR_STATE. If the context has an error, they do nothing and the error stays.
 *
 * Shared tensors. A parameter that several modules share has several paths. The functions below use only the first
 * path in the order of te_module_visit_tensors (PyTorch: named_parameters). This path is searched for words, a snapshot
 * is stored under it, and its module counts as the owner of the parameter. There are three exceptions:
 *   - te_cast_model_to_dtype ignores paths inside skip_modules, as in Automodel, and casts a parameter that also has
 *     a path outside of them
 *   - te_restore_fp32_modules, as in Automodel, casts all tensors of a module whose path contains a word
 *   - a shared buffer stays in f32, or is not cast, if words or skip_modules say so for one of its paths */

/* ---- what stays in f32 ---- */

/* Sets the words that keep tensors in f32. A cast of m makes or leaves a tensor f32 if its path from m contains one of
 * these words. ("norm" is in "layers.0.layernorm.weight".) The `count` words are copied and replace those that m had;
 * count 0 removes them.
 * In a model with sharded parameters, only strict words keep parameters in f32; other words keep only buffers.
 * The words are an attribute of m ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"). TE_ERR_INVALID for a word
 * that is NULL.
 * Source: these attributes of transformers.PreTrainedModel. */
TE_API te_result te_module_set_keep_in_fp32(te_module *m, const char *const *keywords, int count, bool strict);
/* Lists the words that te_module_set_keep_in_fp32 has set on m itself, strict words first, each word once. Writes at
 * most `room` of them to `keywords`. Returns the number of all these words. The words are borrowed until the next
 * te_module_set_keep_in_fp32 of m. */
TE_API int te_module_get_fp32_keywords(const te_module *m, const char **keywords, int room);
/* Does the same as te_module_get_fp32_keywords for the strict words alone. */
TE_API int te_module_get_strict_fp32_keywords(const te_module *m, const char **keywords, int room);
/* Returns whether the tree of m has a parameter that is sharded (te_tensor_is_sharded). */
TE_API bool te_has_dtensor_params(te_module *m);

/* Options of te_cast_model_to_dtype; zero is the default. */
typedef struct te_cast_model_desc {
    te_dtype dtype;                  /* f32, f16 or bf16; 0 => bf16 */
    const char *const *skip_modules; /* [num_skip_modules] names of modules at any depth. These modules and all modules
                                      * below them are not cast. Exception: tensors that te_module_set_keep_in_fp32
                                      * keeps in f32 become f32 in these modules too */
    int num_skip_modules;            /* 0 => none */
} te_cast_model_desc;
/* Casts every floating parameter and buffer of m's tree, including buffers that are not saved in files. desc may be
 * NULL. Asynchronous on CUDA, with one launch per tensor.
 * Tensors whose path contains a word of te_module_set_keep_in_fp32 become f32; those that are f32 already keep every
 * bit. In a model with sharded parameters a word that is not strict keeps only buffers; one warning says so.
 * An optimizer's master weights and moments are not cast. If the cast takes a parameter out of f32, the next optimizer
 * step makes a master weight for the parameter, unless the optimizer has no_master_weights.
 * TE_ERR_DTYPE if desc->dtype is not f32, f16 or bf16. */
TE_API te_result te_cast_model_to_dtype(te_module *m, const te_cast_model_desc *desc);

/* Copies of tensors in f32, by path. */
typedef struct te_fp32_snapshots te_fp32_snapshots;
/* Makes f32 copies of the floating parameters whose path contains one of parameter_keywords. Copies floating buffers
 * likewise by buffer_keywords. A shared parameter is stored under its first path, a shared buffer under each
 * of its paths. Allocates. NULL on failure.
 * The caller owns the result, and calls te_fp32_snapshots_destroy before te_ctx_destroy. */
TE_API te_fp32_snapshots *te_snapshot_fp32_tensors(te_module *m, const char *const *parameter_keywords,
                                                   int num_parameter_keywords, const char *const *buffer_keywords,
                                                   int num_buffer_keywords);
/* Writes each copy back into the tensor of m at the copy's path; this tensor becomes f32. No tensor is added.
 * Parameters come from `parameters` and buffers from `buffers`. Both may be the same object; NULL means none.
 * A parameter's copy is skipped if its path leads to no parameter, or is not the first path of a shared one.
 * A buffer that is not found is searched again without the path's components "_checkpoint_wrapped_module". */
TE_API te_result te_restore_fp32_tensor_snapshots(te_module *m, const te_fp32_snapshots *parameters,
                                                  const te_fp32_snapshots *buffers);
/* Returns the number of copies. */
TE_API int te_fp32_snapshots_count(const te_fp32_snapshots *s);
/* Returns copy number `index` (borrowed), its path (borrowed) in *path and its kind in *kind; both pointers may be
 * NULL. Returns NULL if there is no such copy. */
TE_API te_tensor *te_fp32_snapshots_at(const te_fp32_snapshots *s, int index, const char **path, te_entry_kind *kind);
/* Releases the copies. `s` may be NULL. */
TE_API void te_fp32_snapshots_destroy(te_fp32_snapshots *s);
/* Casts floating tensors to f32 if their path, or their module's path, contains one of the `count` words in `keywords`.
 * Bits that an earlier cast rounded away do not come back. */
TE_API te_result te_restore_fp32_modules(te_module *m, const char *const *keywords, int count);
/* Casts to f32 as te_restore_fp32_modules does, but buffers alone. */
TE_API te_result te_restore_fp32_buffers(te_module *m, const char *const *keywords, int count);

/* ---- sampling in f32 ---- */

/* A region of code in which a whole model is in f32. */
typedef struct te_fp32_scope te_fp32_scope;
/* Options of te_fp32_scope_open; zero is the default. */
typedef struct te_fp32_scope_desc {
    te_dtype restore_dtype;        /* format of the whole model after the region; 0 => each tensor gets its old format
                                    * back (Automodel's default: restore_first_parameter) */
    bool restore_first_parameter;  /* read with restore_dtype 0: the whole model gets the format of its first floating
                                    * parameter, as in Automodel. This format is f32 if te_module_set_keep_in_fp32
                                    * keeps that parameter in f32 */
} te_fp32_scope_desc;
/* Casts the whole model to f32, so that its initial values can be drawn in f32 and rounded once. (A normal distribution
 * sampled in bf16 has another variance.) desc may be NULL. On failure returns NULL, and the model is unchanged.
 * te_fp32_scope_close must follow, also after an error. The module must outlive the region.
 * Source: yield_fp32_model. */
TE_API te_fp32_scope *te_fp32_scope_open(te_module *m, const te_fp32_scope_desc *desc);
/* Ends the region and casts the model back, except tensors that keywords of te_module_set_keep_in_fp32 keep in f32. A
 * tensor added inside the region gets the format of the first floating parameter that is not kept.
 * Works on a context that has an error, and keeps that error. If the call fails, the model is in f32 and the region
 * still open, so the call may be repeated. scope NULL => TE_OK. */
TE_API te_result te_fp32_scope_close(te_fp32_scope *scope);

/* ---- frozen parts ---- */

/* Options of te_cast_frozen_modules_to_compute_dtype; zero is the default. */
typedef struct te_cast_frozen_desc {
    te_dtype compute_dtype;      /* f32, f16 or bf16; 0 => nothing happens */
    bool any_frozen_base;        /* true => a frozen parameter of any shape counts as "a frozen matrix" in the list
                                  * below, as in Automodel. (One frozen scalar in the root is then enough to cast the
                                  * whole model.) false => only a frozen matrix counts */
} te_cast_frozen_desc;
/* Casts parts of m's tree to the compute format, for models with frozen parts. desc NULL => nothing happens. The call
 * casts:
 *   - frozen floating parameters
 *   - LoRA adapters: the trainable parameters of a module that owns a frozen matrix, and of the modules below it
 *   - buffers of a module that owns a frozen matrix, and of the modules below it
 *   - buffers below a module whose parameters (at least one) are all frozen
 *
 * It does not cast sharded parameters and tensors that te_module_set_keep_in_fp32 keeps in f32.
 * Source: cast_frozen_modules_to_compute_dtype. */
TE_API te_result te_cast_frozen_modules_to_compute_dtype(te_module *m, const te_cast_frozen_desc *desc);

/* ---- logits ---- */

/* Sets the format in which te_compute_lm_head_logits computes m (FSDP: MixedPrecisionPolicy.param_dtype); 0 => the
 * format of m's weight. te_compute_lm_head_logits casts its input and all floating parameters of m's tree to it;
 * gradients keep the parameters' own formats.
 * Other calls of m, and graphs of te_make_graphed_callables, ignore the set format. It is stored as an attribute of m
 * ("fsdp_param_dtype").
 * TE_ERR_DTYPE for a format that is not floating. */
TE_API te_result te_module_set_param_dtype(te_module *m, te_dtype dtype);
/* Returns the format of te_module_set_param_dtype; TE_DTYPE_NONE if none was set. */
TE_API te_dtype te_module_param_dtype(const te_module *m);

/* Options of te_compute_lm_head_logits; zero is the default. */
typedef struct te_lm_head_options {
    int64_t logits_to_keep;          /* number of last positions to keep (all, if there are fewer); 0 => all. A negative
                                      * number -n gives TE_ERR_INVALID or, with negative_skips, keeps all positions
                                      * except the first n */
    bool negative_skips;             /* true => a negative logits_to_keep is allowed and has the meaning of a Python
                                      * slice, as in Automodel */
    te_tensor *positions;            /* positions to keep, in place of logits_to_keep: i64 or i32 [n], on the device;
                                      * NULL => not given. -1 is the last position, -2 the one before it. A position
                                      * that does not exist gives TE_ERR_INVALID: on the CPU from this call, on a GPU
                                      * from the next call that waits (te_synchronize). Its logits on a GPU are those of
                                      * a hidden state of zeros */
    bool is_thd;                     /* true => the results [t, ...], of packed sequences, become [1, t, ...] */
    bool fp32_lm_head;               /* true => the logits are computed in f32 and cast to the format of `hidden`. The
                                      * head's weights must be f32; te_module_param_dtype is ignored */
    bool output_hidden_states;       /* true => `hidden`, with all its positions, is returned too */
} te_lm_head_options;
/* The results of te_compute_lm_head_logits; borrowed from the innermost scope. */
typedef struct te_lm_head_result {
    te_tensor *logits;        /* [.., positions, vocabulary]; NULL on failure */
    te_tensor *hidden_states; /* the hidden states with output_hidden_states, else NULL */
} te_lm_head_result;
/* Runs `lm_head` on the hidden states [b, s, h] or [t, h], or on some of their positions. lm_head NULL => the logits
 * are `hidden`. options may be NULL. Recorded on the tape.
 * The input is first cast to te_module_param_dtype or, if none was set, to the format of the head's "weight" (if there
 * is one). The logits have the format that the head returns (except with fp32_lm_head).
 * Source: compute_lm_head_logits. */
TE_API te_lm_head_result te_compute_lm_head_logits(te_module *lm_head, te_tensor *hidden,
                                                   const te_lm_head_options *options);
