/* api/formats.h: number formats of whole models: casts and what stays in f32, sampling in f32, frozen parts in the
 * compute format, the logits of a language model (nemo_automodel.components.models.common.utils).
 *
 *     te_module_set_keep_in_fp32(model, (const char *[]){"norm", "inv_freq"}, 2, false);
 *     te_cast_model_to_dtype(model, NULL);   bf16, but for tensors with one of these words in their path
 *
 * Floating tensors are those in f32, f16 and bf16, and tensors that are stored quantized, whose codes stay while their
 * nominal format changes. Tensors keep their identity: the handle of a parameter or buffer is the same before and
 * after, so optimizers, tied modules and the program's own pointers see the new format. Its memory is new, all of it
 * taken before the first tensor changes: for the time of the call the device holds both models, and on any failure the
 * model is what it was. Tensors that lay one behind the other, or in each other's memory, do so again; views that the
 * program made of one keep the memory from before, and memory of the program's (te_tensor_wrap) is given back to it. A
 * gradient is cast with its parameter; main gradients and decoupled ones stay, as they belong to the program. A
 * backward pass that needs the values of a parameter from before its cast cannot run: that te_backward gives
 * TE_ERR_STATE. Graphs that use one cannot be launched any more. The scaling state of delayed recipes ("fp8_scale_...",
 * "fp8_amax_history_...") is f32 by nature: no cast touches it. Nothing here syncs. TE_ERR_STATE inside a graph's
 * capture or a warm-up; a context that has an error keeps it, and nothing happens.
 *
 * A parameter that several modules have goes by one of its paths, the first in the order of te_module_visit_tensors
 * (PyTorch: named_parameters): a word is looked for in that one, the parameter is a frozen or a trained one of that
 * module alone, and snapshots are taken and put back by it. Two functions leave out or take whole modules, as there:
 * skip_modules are out of the tree for the time of a cast, so that a parameter with a path outside of them is cast; and
 * te_restore_fp32_modules casts all tensors of a module whose path has a word, whatever their own first paths are. A
 * buffer that several modules have is kept in f32, or left as it is, if that holds for one of its paths. */

/* ---- what stays in f32 ---- */

/* Keeps tensors of the tree below m in f32 when m is the module that is cast: those whose path from m contains one of
 * `count` words ("norm" is in "layers.0.layernorm.weight").
 * Replaces the words that m has (copied; count 0: none from here on). Strict ones stay in f32 in a model with sharded
 * parameters as well, where others are for buffers alone, since the ranks cast parameters alike. An attribute of m
 * ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"). TE_ERR_INVALID for a word that is NULL.
 * Source: these attributes of transformers.PreTrainedModel. */
TE_API te_result te_module_set_keep_in_fp32(te_module *m, const char *const *keywords, int count, bool strict);
/* Writes the words of m, strict ones first and each once, into keywords[0 .. room) (borrowed until the next
 * te_module_set_keep_in_fp32 of m) and returns how many there are. Words of modules below m do not count. */
TE_API int te_get_fp32_module_keywords(const te_module *m, const char **keywords, int room);
/* The same for the strict ones alone. */
TE_API int te_get_strict_fp32_module_keywords(const te_module *m, const char **keywords, int room);
/* Has the tree a parameter that is sharded (te_tensor_is_sharded)? */
TE_API bool te_has_dtensor_params(te_module *m);

/* Options of te_cast_model_to_dtype; zero is the default. */
typedef struct te_cast_model_desc {
    te_dtype dtype;                  /* f32, f16 or bf16; 0 => bf16 */
    const char *const *skip_modules; /* [num_skip_modules] names: a child of one of them, at any depth, stays as it is
                                      * with all below it, words of te_module_set_keep_in_fp32 aside */
    int num_skip_modules;            /* 0 => none */
} te_cast_model_desc;
/* Casts every floating parameter and buffer of the tree, those that files pass over included. Tensors that m's words
 * name become f32, or stay it, with every bit; in a model with sharded parameters a word that is not strict keeps
 * buffers alone, and is told of in one warning. An optimizer's masters and moments stay; a parameter that needs a
 * master now gets one with the next step. desc may be NULL.
 * Asynchronous on CUDA: one launch a tensor. TE_ERR_DTYPE for another format. */
TE_API te_result te_cast_model_to_dtype(te_module *m, const te_cast_model_desc *desc);

/* Copies of tensors in f32, by path. */
typedef struct te_fp32_snapshots te_fp32_snapshots;
/* f32 copies of the floating parameters whose path contains one of parameter_keywords, and of the floating buffers
 * whose path contains one of buffer_keywords: parameters under the first of their paths, buffers under each. Owned by
 * the caller: te_fp32_snapshots_destroy, before the context. NULL with an error. Allocates. */
TE_API te_fp32_snapshots *te_snapshot_fp32_tensors(te_module *m, const char *const *parameter_keywords,
                                                   int num_parameter_keywords, const char *const *buffer_keywords,
                                                   int num_buffer_keywords);
/* Puts the values of `parameters` and `buffers` (one and the same, or NULL for none) back by path: such a tensor
 * becomes f32. The path of a parameter is passed over where it leads nowhere, or is not the first one of the parameter
 * there; one of a buffer that leads nowhere is tried without the steps "_checkpoint_wrapped_module" before that.
 * Nothing is added to a module. */
TE_API te_result te_restore_fp32_tensor_snapshots(te_module *m, const te_fp32_snapshots *parameters,
                                                  const te_fp32_snapshots *buffers);
/* How many tensors it holds. */
TE_API int te_fp32_snapshots_count(const te_fp32_snapshots *s);
/* Copy `index` (borrowed), its path (borrowed) and its kind, each of which may be NULL; NULL outside of the list. */
TE_API te_tensor *te_fp32_snapshots_at(const te_fp32_snapshots *s, int index, const char **path, te_entry_kind *kind);
/* Releases the copies. NULL is fine. */
TE_API void te_fp32_snapshots_destroy(te_fp32_snapshots *s);
/* Casts the floating tensors of modules whose path contains one of the words, and those whose own path does, to f32.
 * Their values are what the format before has left of them. */
TE_API te_result te_restore_fp32_modules(te_module *m, const char *const *keywords, int count);
/* The same for buffers alone. */
TE_API te_result te_restore_fp32_buffers(te_module *m, const char *const *keywords, int count);

/* ---- sampling in f32 ---- */

/* A region in which a model is in f32. */
typedef struct te_fp32_scope te_fp32_scope;
/* Options of te_yield_fp32_model_begin; zero is the default. */
typedef struct te_yield_fp32_model_desc {
    te_dtype restore_dtype;        /* of the whole model after the region; 0 => every tensor goes back to the format
                                    * that it has now */
    bool restore_first_parameter;  /* Automodel's default: with restore_dtype 0 the format of the first floating
                                    * parameter, which one that is kept in f32 makes f32 for all */
} te_yield_fp32_model_desc;
/* Casts the whole model to f32, for first values that are drawn there and rounded once: a normal distribution sampled
 * in bf16 has another variance. te_yield_fp32_model_end must follow on every path, also after an error. The module must
 * outlive the region. desc may be NULL. NULL with an error, and the model is what it was.
 * Source: yield_fp32_model. */
TE_API te_fp32_scope *te_yield_fp32_model_begin(te_module *m, const te_yield_fp32_model_desc *desc);
/* Ends the region: casts back, where tensors that m's words keep in f32 stay as they are, bit for bit, and one that was
 * put into the model since goes to the format of the first floating parameter that they do not keep. Works on a context
 * that has an error, which stays the first one. On failure the model is in f32 and the region open: the call may be
 * repeated.
 * NULL is fine, and gives TE_OK. */
TE_API te_result te_yield_fp32_model_end(te_fp32_scope *scope);

/* ---- frozen parts ---- */

/* Options of te_cast_frozen_modules_to_compute_dtype; zero is the default. */
typedef struct te_cast_frozen_desc {
    te_dtype compute_dtype;      /* f32, f16 or bf16; 0 => nothing happens */
    bool any_frozen_base;        /* Automodel's rule: a frozen tensor of any shape makes its module one with adapters,
                                  * so that a frozen scalar of the root casts the whole model */
} te_cast_frozen_desc;
/* Casts frozen floating parameters to the compute format, but for sharded ones and those that m's words keep in f32,
 * and with them trainable ones at and below a module that owns a frozen matrix itself: its adapters (LoRA). Other
 * trainable parameters stay. Buffers go along below such a module, and below one that has parameters and none to train.
 * desc may be NULL, which does nothing.
 * Source: cast_frozen_modules_to_compute_dtype. */
TE_API te_result te_cast_frozen_modules_to_compute_dtype(te_module *m, const te_cast_frozen_desc *desc);

/* ---- logits ---- */

/* Says in which format `m` computes where that is not the format of its weight (FSDP: MixedPrecisionPolicy.param_dtype
 * of a unit of its own); 0 => of its weight. te_compute_lm_head_logits reads it: it runs m with its input and its
 * floating parameters cast, those of modules below m as well, and the parameters' gradients come back in their own
 * formats. Other calls of m compute in the format of its weight; so do graphs of te_make_graphed_callables. An
 * attribute of m ("fsdp_param_dtype"). TE_ERR_DTYPE for a format that is not floating. */
TE_API te_result te_module_set_param_dtype(te_module *m, te_dtype dtype);
/* That format; TE_DTYPE_NONE if none was set. */
TE_API te_dtype te_module_param_dtype(const te_module *m);

/* Options of te_compute_lm_head_logits; zero is the default. */
typedef struct te_lm_head_options {
    int64_t logits_to_keep;          /* n > 0: the last n positions (all if there are fewer); 0 => all. Negative:
                                      * TE_ERR_INVALID; or: */
    bool negative_skips;             /* Automodel's (Python's) meaning of a negative one: all positions but the first
                                      * -n */
    te_tensor *positions;            /* in place of logits_to_keep: i64 or i32 [n] of positions to keep, on the device;
                                      * -1 is the last one, -2 the one before it. One that is not there is
                                      * TE_ERR_INVALID: of this call on the CPU, of the next call that waits on a GPU
                                      * (te_synchronize), where it gives the logits of zeros. NULL => not given */
    bool is_thd;                     /* results [t, ...] of packed sequences become [1, t, ...] */
    bool fp32_lm_head;               /* the product is computed in f32, by a head that has f32 weights, whatever
                                      * te_module_param_dtype is, and its result cast to the format of hidden */
    bool output_hidden_states;       /* hidden, whole, comes back beside the logits */
} te_lm_head_options;
/* The results of te_compute_lm_head_logits; borrowed from the innermost scope. */
typedef struct te_lm_head_result {
    te_tensor *logits;        /* [.., positions, vocabulary]; NULL with an error */
    te_tensor *hidden_states; /* with output_hidden_states, else NULL */
} te_lm_head_result;
/* Runs `lm_head` on the hidden states [b, s, h] or [t, h], or on some of their positions. The input is cast to the
 * head's format: te_module_param_dtype, or its "weight"'s; a head without either takes it as it is. The logits have the
 * format that the head gives them, but under fp32_lm_head. lm_head NULL: the logits are `hidden` itself. options may be
 * NULL.
 * Recorded. Source: compute_lm_head_logits. */
TE_API te_lm_head_result te_compute_lm_head_logits(te_module *lm_head, te_tensor *hidden,
                                                   const te_lm_head_options *options);
