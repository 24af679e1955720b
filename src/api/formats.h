/* api/formats.h: number formats of whole models: casts and what stays in f32, sampling in f32, frozen parts in the
 * compute format, the logits of a language model (nemo_automodel.components.models.common.utils).
 *
 *     te_module_set_keep_in_fp32(model, (const char *[]){"norm", "inv_freq"}, 2, false);
 *     te_cast_model_to_dtype(model, NULL);   bf16, but for tensors with one of these words in their path
 *
 * Floating tensors are tensors in f32, f16 and bf16, and tensors that are stored quantized: a cast keeps their codes
 * and changes their nominal format.
 *
 * Identity. The handle of a parameter or buffer stays the same, so optimizers, tied modules and the program's own
 * pointers see the new format. A gradient is cast with its parameter; main gradients and decoupled gradients stay, as
 * they belong to the program.
 *
 * Memory. A cast allocates all new memory before the first tensor changes: during the call the device holds both
 * models, and on any failure the model is what it was. Tensors that lay one behind another, or in each other's memory,
 * do so again. Views that the program made keep the old memory, and memory of the program's (te_tensor_wrap) is given
 * back to it.
 *
 * Tape and graphs. A te_backward that needs a parameter's values from before its cast gives TE_ERR_STATE. Graphs that
 * use a cast parameter cannot be launched any more.
 *
 * No cast changes the scaling state of delayed recipes ("fp8_scale_...", "fp8_amax_history_..."): it is always f32.
 * Nothing here syncs. TE_ERR_STATE inside a graph's capture or a warm-up; a context that has an error keeps it, and
 * nothing happens.
 *
 * Shared tensors. A parameter that several modules have goes by one of its paths, the first in the order of
 * te_module_visit_tensors (PyTorch: named_parameters): words are compared with that path, the parameter is a frozen or
 * a trained one of that module alone, and snapshots use that path. Two functions differ, as in Automodel.
 * te_cast_model_to_dtype takes skip_modules out of the tree during the cast, so it casts a parameter that also has a
 * path outside of them. te_restore_fp32_modules casts all tensors of a module whose path has a word, whatever their own
 * first paths are. A buffer that several modules have is kept in f32, or left as it is, if that holds for one of its
 * paths. */

/* ---- what stays in f32 ---- */

/* Names the tensors of the tree below m that stay in f32 when m is the module that is cast: those whose path from m
 * contains one of `count` words ("norm" is in "layers.0.layernorm.weight"). Replaces the words that m has (copied;
 * count 0: none from here on). In a model with sharded parameters strict words keep parameters and buffers, other words
 * buffers alone, because all ranks must cast parameters alike. The words are an attribute of m
 * ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"). TE_ERR_INVALID for a word that is NULL.
 * Source: these attributes of transformers.PreTrainedModel. */
TE_API te_result te_module_set_keep_in_fp32(te_module *m, const char *const *keywords, int count, bool strict);
/* Writes the words of m, strict ones first and each once, into keywords[0 .. room) (borrowed until the next
 * te_module_set_keep_in_fp32 of m). Returns how many there are. Words of modules below m do not count. */
TE_API int te_module_get_fp32_keywords(const te_module *m, const char **keywords, int room);
/* Writes the strict words of m alone, as te_module_get_fp32_keywords. */
TE_API int te_module_get_strict_fp32_keywords(const te_module *m, const char **keywords, int room);
/* Does the tree have a parameter that is sharded (te_tensor_is_sharded)? */
TE_API bool te_has_dtensor_params(te_module *m);

/* Options of te_cast_model_to_dtype; zero is the default. */
typedef struct te_cast_model_desc {
    te_dtype dtype;                  /* f32, f16 or bf16; 0 => bf16 */
    const char *const *skip_modules; /* [num_skip_modules] names: a child with one of these names, at any depth, stays
                                      * as it is with everything below it. Words of te_module_set_keep_in_fp32 still
                                      * apply there */
    int num_skip_modules;            /* 0 => none */
} te_cast_model_desc;
/* Casts every floating parameter and buffer of the tree, buffers that are not saved in files included. Tensors that m's
 * words name become f32; those that are f32 already keep every bit. In a model with sharded parameters a word that is
 * not strict keeps buffers alone, which one warning says. An optimizer's masters and moments stay; a parameter that
 * needs a master only now gets it with the next step. desc may be NULL. Asynchronous on CUDA: one launch a tensor.
 * TE_ERR_DTYPE for another format. */
TE_API te_result te_cast_model_to_dtype(te_module *m, const te_cast_model_desc *desc);

/* Copies of tensors in f32, by path. */
typedef struct te_fp32_snapshots te_fp32_snapshots;
/* Copies to f32 the floating parameters whose path contains one of parameter_keywords, and the floating buffers whose
 * path contains one of buffer_keywords: parameters under the first of their paths, buffers under each. Owned by the
 * caller: te_fp32_snapshots_destroy, before the context. NULL with an error. Allocates. */
TE_API te_fp32_snapshots *te_snapshot_fp32_tensors(te_module *m, const char *const *parameter_keywords,
                                                   int num_parameter_keywords, const char *const *buffer_keywords,
                                                   int num_buffer_keywords);
/* Restores the values of `parameters` and `buffers` (they may be the same object; NULL for none) by path; a restored
 * tensor becomes f32. A parameter's path is skipped if m has no parameter there, or if the first path of that parameter
 * in m is another one. If there is no buffer at a buffer's path, the path without its components
 * "_checkpoint_wrapped_module" is tried. Nothing is added to a module. */
TE_API te_result te_restore_fp32_tensor_snapshots(te_module *m, const te_fp32_snapshots *parameters,
                                                  const te_fp32_snapshots *buffers);
/* Returns the number of copies. */
TE_API int te_fp32_snapshots_count(const te_fp32_snapshots *s);
/* Returns copy `index` (borrowed), and its path (borrowed) and kind in *path and *kind, each of which may be NULL; NULL
 * outside the list. */
TE_API te_tensor *te_fp32_snapshots_at(const te_fp32_snapshots *s, int index, const char **path, te_entry_kind *kind);
/* Releases the copies. NULL is fine. */
TE_API void te_fp32_snapshots_destroy(te_fp32_snapshots *s);
/* Casts to f32 the floating tensors of modules whose path contains one of the words, and tensors whose own path does.
 * Digits that an earlier cast has rounded away do not come back. */
TE_API te_result te_restore_fp32_modules(te_module *m, const char *const *keywords, int count);
/* Casts to f32 as te_restore_fp32_modules, buffers alone. */
TE_API te_result te_restore_fp32_buffers(te_module *m, const char *const *keywords, int count);

/* ---- sampling in f32 ---- */

/* A region in which a model is in f32. */
typedef struct te_fp32_scope te_fp32_scope;
/* Options of te_fp32_scope_open; zero is the default. */
typedef struct te_fp32_scope_desc {
    te_dtype restore_dtype;        /* format of the whole model after the region; 0 => every tensor goes back to the
                                    * format that it has now. Automodel's default is that of restore_first_parameter */
    bool restore_first_parameter;  /* with restore_dtype 0: the whole model goes to the format of its first floating
                                    * parameter, as in Automodel. If that parameter is kept in f32, all become f32 */
} te_fp32_scope_desc;
/* Casts the whole model to f32, so that first values are drawn in f32 and rounded once: a normal distribution sampled
 * in bf16 has another variance. te_fp32_scope_close must follow on every path, also after an error. The module must
 * outlive the region. desc may be NULL. NULL with an error, and the model is what it was.
 * Source: yield_fp32_model. */
TE_API te_fp32_scope *te_fp32_scope_open(te_module *m, const te_fp32_scope_desc *desc);
/* Ends the region and casts back. Tensors that m's words keep in f32 stay as they are, bit for bit. A tensor that was
 * put into the model inside the region goes to the format of the first floating parameter that the words do not keep.
 * Works on a context that has an error, and keeps that error. On failure the model is in f32 and the region open: the
 * call may be repeated. NULL is fine, and gives TE_OK. */
TE_API te_result te_fp32_scope_close(te_fp32_scope *scope);

/* ---- frozen parts ---- */

/* Options of te_cast_frozen_modules_to_compute_dtype; zero is the default. */
typedef struct te_cast_frozen_desc {
    te_dtype compute_dtype;      /* f32, f16 or bf16; 0 => nothing happens */
    bool any_frozen_base;        /* true => a module that owns a frozen tensor of any shape counts as one with adapters,
                                  * as in Automodel; so a frozen scalar of the root casts the whole model. false => only
                                  * a frozen matrix counts */
} te_cast_frozen_desc;
/* Casts frozen floating parameters to the compute format, except sharded ones and those that m's words keep in f32.
 * Casts trainable parameters too, if they lie at or below a module that owns a frozen matrix itself: these are its
 * adapters (LoRA). Other trainable parameters stay. Casts buffers below such a module, and buffers below a module that
 * has parameters, none of them trainable. desc may be NULL, which does nothing.
 * Source: cast_frozen_modules_to_compute_dtype. */
TE_API te_result te_cast_frozen_modules_to_compute_dtype(te_module *m, const te_cast_frozen_desc *desc);

/* ---- logits ---- */

/* Sets the format in which `m` computes, if that is not the format of its weight (FSDP:
 * MixedPrecisionPolicy.param_dtype of a unit of its own); 0 => the format of its weight. te_compute_lm_head_logits
 * alone reads it: it runs m with its input and its floating parameters cast, those of modules below m as well, and the
 * parameters' gradients come back in their own formats. Other calls of m, and graphs of te_make_graphed_callables,
 * compute in the format of its weight. An attribute of m ("fsdp_param_dtype"). TE_ERR_DTYPE for a format that is not
 * floating. */
TE_API te_result te_module_set_param_dtype(te_module *m, te_dtype dtype);
/* Returns the format of te_module_set_param_dtype; TE_DTYPE_NONE if none was set. */
TE_API te_dtype te_module_param_dtype(const te_module *m);

/* Options of te_compute_lm_head_logits; zero is the default. */
typedef struct te_lm_head_options {
    int64_t logits_to_keep;          /* n > 0: the last n positions (all if there are fewer); 0 => all; negative:
                                      * TE_ERR_INVALID, or with negative_skips all positions but the first -n */
    bool negative_skips;             /* a negative logits_to_keep is allowed, with its meaning in Automodel (Python's
                                      * slice) */
    te_tensor *positions;            /* positions to keep, in place of logits_to_keep: i64 or i32 [n], on the device; -1
                                      * is the last position, -2 the one before it. A position that does not exist gives
                                      * TE_ERR_INVALID: from this call on the CPU, from the next call that waits on a
                                      * GPU (te_synchronize), where its logits are those of zeros. NULL => not given */
    bool is_thd;                     /* results [t, ...] of packed sequences become [1, t, ...] */
    bool fp32_lm_head;               /* the product is computed in f32, by a head that has f32 weights, whatever
                                      * te_module_param_dtype is, and its result is cast to the format of hidden */
    bool output_hidden_states;       /* hidden, with all positions, is returned beside the logits */
} te_lm_head_options;
/* The results of te_compute_lm_head_logits; borrowed from the innermost scope. */
typedef struct te_lm_head_result {
    te_tensor *logits;        /* [.., positions, vocabulary]; NULL with an error */
    te_tensor *hidden_states; /* with output_hidden_states, else NULL */
} te_lm_head_result;
/* Runs `lm_head` on the hidden states [b, s, h] or [t, h], or on some of their positions. The input is cast to the
 * head's format: te_module_param_dtype, or the format of its "weight"; a head without either takes the input as it is.
 * The logits have the format that the head gives them (see fp32_lm_head for the exception). lm_head NULL: the logits
 * are `hidden` itself. options may be NULL. Recorded. Source: compute_lm_head_logits. */
TE_API te_lm_head_result te_compute_lm_head_logits(te_module *lm_head, te_tensor *hidden,
                                                   const te_lm_head_options *options);
