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
/* The state of a patch after the last te_apply_patches or te_unapply_patches. */
typedef enum te_patch_state {
    TE_PATCH_WAITING = 0, /* not applied yet, or its apply failed */
    TE_PATCH_SKIPPED = 1, /* skipped, since it is not needed */
    TE_PATCH_APPLIED = 2  /* applied, and in force */
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
