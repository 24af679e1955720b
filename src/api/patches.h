/* api/patches.h: changes to functions of the library while a program runs, each behind a version and a test of whether
 * it is needed (nemo_automodel.shared.te_patches).
 *
 *     te_apply_patches(te);                               before the first optimizer is made; again at any time
 *     opt = te_fused_adam_create(te, model, &adam);
 *
 * te.h comes with one patch, "fused_adam_quantized_tensor". te.h's own functions do not need it: their version,
 * TE_TRANSFORMER_ENGINE_VERSION, is later than the one that made the patch needless. Patches, slots and versions belong
 * to a context, so ranks that are threads have patches of their own. */

/* The version of TransformerEngine whose behaviour te.h has. */
#define TE_TRANSFORMER_ENGINE_VERSION "2.20.0"

/* ---- the slot of FusedAdam ---- */

/* Makes the state `state_name` ("exp_avg", "exp_avg_sq", "master_param") of `param`, in place of an existing one.
 *   zero_buffer            true: the state is zeros; false: its values are undefined until they are set
 *   store_param_remainders true: the state is remainders, u8 [elements, 2], and zeros in any case; false: the state has
 *   the format that the optimizer's desc gives it
 * A new master takes its parameter's value in the next step. */
typedef te_result (*te_initialize_state_fn)(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders);
/* The three parts of the fix for parameters that are stored quantized. A function that has all of them needs no
 * patch. */
typedef enum te_state_capability {
    TE_STATE_DEQUANTIZES = 1, /* such a parameter counts as the tensor that te_dequantize makes of it */
    TE_STATE_ZEROS_LIKE = 2,  /* zeros are shaped like the dequantized tensor */
    TE_STATE_EMPTY_LIKE = 4   /* uninitialised memory is shaped like the dequantized tensor */
} te_state_capability;
/* The functions that te_fused_adam_create and its optimizers call. */
typedef struct te_fused_adam_methods {
    te_initialize_state_fn initialize_state; /* makes every state of a new optimizer, and masters that a cast makes
                                              * necessary */
    int capabilities; /* of initialize_state: te_state_capability, or-ed */
} te_fused_adam_methods;
/* Returns the methods in force: te_initialize_state with all capabilities, unless te_fused_adam_set_methods set
 * others. */
TE_API te_fused_adam_methods te_fused_adam_get_methods(const te_ctx *te);
/* Sets the methods (copied) of optimizers that are made from here on; NULL => te.h's own. TE_ERR_INVALID without a
 * function. */
TE_API te_result te_fused_adam_set_methods(te_ctx *te, const te_fused_adam_methods *methods);

/* te.h's own initialize_state (te_initialize_state_fn). The state has the shape of the dequantized parameter (nothing
 * is decoded for it), and is marked as sharded if the parameter is (te_tensor_is_sharded). A state in e4m3 stands for
 * TransformerEngine's uint8. Allocates; refused inside a graph's capture, and graphs with a step of `opt` cannot be
 * launched any more. TE_ERR_INVALID for a tensor that is no parameter of `opt`, or a name that is not one of its
 * states.
 * Source: FusedAdam.initialize_state of TransformerEngine, from 2.12 on. */
TE_API te_result te_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name, bool zero_buffer,
                                     bool store_param_remainders);
/* initialize_state as it was before TransformerEngine 2.12: TE_ERR_UNSUPPORTED for a parameter that is stored
 * quantized, and no state is marked as sharded. It has no te_state_capability. */
TE_API te_result te_initialize_state_legacy(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders);
/* Calls the initialize_state in force; TE_ERR_UNSUPPORTED for an optimizer that is not FusedAdam. */
TE_API te_result te_optimizer_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               bool zero_buffer, bool store_param_remainders);
/* Returns a state as it is stored (borrowed); NULL if there is none of that name. *scale (may be NULL) receives the
 * state's scale, f32 [1] (borrowed), or NULL. States in other formats than f32 have a scale, except remainders; the
 * scale of a bf16 state stays 1. te_optimizer_get_unscaled_state gives the values. */
TE_API te_tensor *te_optimizer_state(const te_optimizer *opt, const te_tensor *param, const char *state_name,
                                     te_tensor **scale);

/* ---- patches ---- */

/* A patch. Its functions are called with `user`, which must outlive the context. */
typedef struct te_patch {
    const char *name;                            /* for messages and te_report; unique in a context (copied) */
    const char *fixed_in;                        /* the first version of TransformerEngine that does not need the patch,
                                                  * "2.12" (copied); NULL => every version needs it */
    bool (*found)(te_ctx *te, void *user);       /* is there something to patch? NULL => yes */
    bool (*needed)(te_ctx *te, void *user);      /* does it lack what the patch brings? NULL => yes */
    te_result (*apply)(te_ctx *te, void *user);  /* required: puts the patch in force. On failure it has changed
                                                  * nothing, has recorded the error in the context, and returns its
                                                  * code */
    te_result (*undo)(te_ctx *te, void *user);   /* required: puts back what was there before */
    void *user;                                  /* handed to the four functions */
} te_patch;
/* What te_apply_patches has done with a patch. */
typedef enum te_patch_state {
    TE_PATCH_WAITING = 0, /* nothing yet, or its apply failed */
    TE_PATCH_SKIPPED = 1, /* skipped it: it is not needed */
    TE_PATCH_APPLIED = 2  /* applied it: it is in force */
} te_patch_state;
/* One patch of a context. */
typedef struct te_patch_info {
    const char *name;    /* borrowed from the context */
    te_patch_state state; /* as the last te_apply_patches or te_unapply_patches left it */
    char why[160];       /* a sentence: why it was skipped, or that it was applied */
} te_patch_info;
/* Adds a patch (copied) behind those that are there; the next te_apply_patches decides about it. TE_ERR_INVALID without
 * a name, apply or undo, for a name that is taken, and for a fixed_in that is no version. */
TE_API te_result te_register_patch(te_ctx *te, const te_patch *patch);
/* Decides about every waiting patch, in order: applies it if the library version is older than fixed_in and `found` and
 * `needed` return true, and skips it otherwise. A skipped patch leaves a line in the debug log with the reason, an
 * applied one a line in the info log. A second call does nothing. Stops at the first patch that fails: it stays
 * waiting, and a later call tries it again. Refused inside a graph's capture. */
TE_API te_result te_apply_patches(te_ctx *te);
/* Undoes the applied patches, the last one first; all patches are waiting from then on. Existing optimizers keep their
 * states. */
TE_API te_result te_unapply_patches(te_ctx *te);
/* Has te_apply_patches decided about every patch? False before its first call, and after a call that failed. */
TE_API bool te_patches_applied(const te_ctx *te);
/* Returns the number of patches of the context; te.h's own is number 0. */
TE_API int te_num_patches(te_ctx *te);
/* Returns patch `index`; its name is NULL outside the list. */
TE_API te_patch_info te_patch_at(te_ctx *te, int index);
/* Sets the version that te_patch.fixed_in is compared with, for a program that puts functions of an older version into
 * the slots. Versions are written and ordered as in PEP 440 ("2.12.0.dev0" is older than "2.12"). NULL =>
 * TE_TRANSFORMER_ENGINE_VERSION; "" counts as "0.0.0". TE_ERR_INVALID for anything else. */
TE_API te_result te_set_library_version(te_ctx *te, const char *version);
