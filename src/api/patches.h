/* api/patches.h: changes to functions of the library while a program runs, each behind a version and a test of whether
 * it is needed (nemo_automodel.shared.te_patches).
 *
 *     te_apply_patches(te);                               before the first optimizer is made; again at any time
 *     opt = te_fused_adam_create(te, model, &adam);
 *
 * te.h comes with one patch, "fused_adam_quantized_tensor", and its own functions need none: their version,
 * TE_TRANSFORMER_ENGINE_VERSION, is past the one that made the patch needless. All of it belongs to a context, so ranks
 * that are threads have patches of their own. */

/* The TransformerEngine whose behaviour te.h has. */
#define TE_TRANSFORMER_ENGINE_VERSION "2.20.0"

/* ---- the slot of FusedAdam ---- */

/* Makes the state `state_name` ("exp_avg", "exp_avg_sq", "master_param") of `param` in the place of the one that is
 * there.
 *   zero_buffer            the state is zeros; false: its values mean nothing until they are set
 *   store_param_remainders the state is remainders, u8 [elements, 2], and zeros in any case; false: of the format that
 *   the desc has for it
 * A new master has its parameter's value from the next step on. */
typedef te_result (*te_initialize_state_fn)(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders);
/* The three parts of the mend, which make the patch needless if a function has all of them. */
typedef enum te_state_capability {
    TE_STATE_DEQUANTIZES = 1, /* a parameter that is stored quantized counts as the tensor that te_dequantize makes of
                               * it */
    TE_STATE_ZEROS_LIKE = 2,  /* zeros are shaped like that tensor */
    TE_STATE_EMPTY_LIKE = 4   /* so is memory without values */
} te_state_capability;
/* The functions that te_fused_adam_create and its optimizers call. */
typedef struct te_fused_adam_methods {
    te_initialize_state_fn initialize_state; /* makes every state of a new optimizer, and masters that a cast makes
                                              * necessary */
    int capabilities; /* of that function: te_state_capability, or-ed */
} te_fused_adam_methods;
/* The methods in force: te_initialize_state with all capabilities, unless others were set. */
TE_API te_fused_adam_methods te_fused_adam_get_methods(const te_ctx *te);
/* Sets those of optimizers that are made from here on (copied); NULL => te.h's own. TE_ERR_INVALID without a
 * function. */
TE_API te_result te_fused_adam_set_methods(te_ctx *te, const te_fused_adam_methods *methods);

/* te.h's own function for the slot: the state has the shape of the dequantized parameter (nothing is decoded for it),
 * and te_tensor_is_sharded as the parameter has it. e4m3 stands for TransformerEngine's uint8. Allocates; refused
 * inside a graph's capture, and graphs with a step of `opt` cannot be launched any more. TE_ERR_INVALID for a tensor
 * that is no parameter of `opt`, or a name that it has no state of.
 * Source: FusedAdam.initialize_state of TransformerEngine, from 2.12 on. */
TE_API te_result te_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name, bool zero_buffer,
                                     bool store_param_remainders);
/* The function as it was before 2.12: TE_ERR_UNSUPPORTED for a parameter that is stored quantized, and no state is
 * marked as sharded. Its capabilities are 0. */
TE_API te_result te_initialize_state_legacy(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders);
/* Calls the function in force; TE_ERR_UNSUPPORTED for an optimizer that is not FusedAdam. */
TE_API te_result te_optimizer_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               bool zero_buffer, bool store_param_remainders);
/* A state as it is stored (borrowed); NULL if there is none of the name. *scale (may be NULL) becomes the state's
 * scale, f32 [1] (borrowed): every state in another format than f32 has one, remainders aside, and that of a bf16 state
 * stays 1; else NULL. te_optimizer_get_unscaled_state gives values. */
TE_API te_tensor *te_optimizer_state(const te_optimizer *opt, const te_tensor *param, const char *state_name,
                                     te_tensor **scale);

/* ---- patches ---- */

/* A patch. Its functions are called with `user`, which must outlive the context. */
typedef struct te_patch {
    const char *name;                            /* in messages and te_report; no two of a context have the same
                                                  * (copied) */
    const char *fixed_in;                        /* the version of TransformerEngine from which on it is not needed,
                                                  * "2.12" (copied); NULL => needed by every version */
    bool (*found)(te_ctx *te, void *user);       /* is there something to patch? NULL => yes */
    bool (*needed)(te_ctx *te, void *user);      /* does that lack what the patch brings? NULL => yes */
    te_result (*apply)(te_ctx *te, void *user);  /* needed. On failure it has changed nothing, and returns the result
                                                  * after the context has its error */
    te_result (*undo)(te_ctx *te, void *user);   /* needed: puts back what was there before */
    void *user;
} te_patch;
/* Has a patch been looked at? */
typedef enum te_patch_state {
    TE_PATCH_WAITING = 0, /* not yet, or its apply failed */
    TE_PATCH_SKIPPED = 1, /* yes: it is not needed */
    TE_PATCH_APPLIED = 2  /* yes: it is in force */
} te_patch_state;
/* One patch of a context. */
typedef struct te_patch_info {
    const char *name;    /* borrowed from the context */
    te_patch_state state; /* as the last te_apply_patches or te_unapply_patches left it */
    char why[160];       /* a sentence: why it was skipped, or that it was applied */
} te_patch_info;
/* Adds a patch behind those that are there (copied); the next te_apply_patches looks at it. TE_ERR_INVALID without a
 * name, apply or undo, for a name that is taken, and for a fixed_in that is no version. */
TE_API te_result te_register_patch(te_ctx *te, const te_patch *patch);
/* Looks at every patch that is waiting, in order: its version, found, needed, and applies it if all of them say so. A
 * skipped one leaves a line in the debug log with the reason, an applied one a line in the info log. A second call does
 * nothing. Stops at the first patch that fails: it stays waiting, and a later call tries it again. Refused inside a
 * graph's capture. */
TE_API te_result te_apply_patches(te_ctx *te);
/* Undoes what was applied, the last one first; all patches are waiting from then on. Optimizers that exist keep the
 * states that they have. */
TE_API te_result te_unapply_patches(te_ctx *te);
/* Has te_apply_patches looked at all patches there are? False before its first call, and after one that failed. */
TE_API bool te_patches_applied(const te_ctx *te);
/* How many patches the context has; te.h's own is number 0. */
TE_API int te_num_patches(te_ctx *te);
/* Patch `index`; a name of NULL outside of the list. */
TE_API te_patch_info te_patch_at(te_ctx *te, int index);
/* Sets the version that patches are compared with, as PEP 440 writes and orders it ("2.12.0.dev0" is older than
 * "2.12"); NULL => TE_TRANSFORMER_ENGINE_VERSION, and "" counts as "0.0.0". For code that carries functions of an older
 * version in the slots. TE_ERR_INVALID for anything else. */
TE_API te_result te_set_library_version(te_ctx *te, const char *version);
