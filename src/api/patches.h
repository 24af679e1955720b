/* api/patches.h: patches, which change functions of te.h while a program runs. A patch is applied only if the library
 * version (te_set_library_version) and its own test say that it is needed. Source: nemo_automodel.shared.te_patches.
 *
 *     te_apply_patches(te);                               before the first optimizer is made; may be called again
 *     opt = te_fused_adam_create(te, model, &adam);
 *
 * te.h comes with one patch, "fused_adam_quantized_tensor", which its own functions do not need. Patches, the
 * te_fused_adam_methods and the library version belong to a context. */

/* The version of TransformerEngine that te.h behaves like. */
#define TE_TRANSFORMER_ENGINE_VERSION "2.20.0"

/* A patch. Its functions get `user`, which must outlive the context. */
typedef struct te_patch {
    const char *name;                            /* for messages and te_report; unique in a context (copied) */
    const char *fixed_in;                        /* the first version of TransformerEngine without need of the patch,
                                                  * such as "2.12" (copied); NULL => every version needs it */
    bool (*found)(te_ctx *te, void *user);       /* returns whether there is something to patch; NULL => always true */
    bool (*needed)(te_ctx *te, void *user);      /* returns whether the functions in force lack what the patch adds;
                                                  * NULL => always true */
    te_result (*apply)(te_ctx *te, void *user);  /* required: puts the patch in force. On failure it must change
                                                  * nothing, record the error in the context and return its code */
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
    char why[160];       /* a sentence that says why it was skipped, or that it was applied */
} te_patch_info;
/* Adds a patch (copied). TE_ERR_INVALID if `name`, `apply` or `undo` is missing, the name is taken, or fixed_in is not
 * a version. */
TE_API te_result te_register_patch(te_ctx *te, const te_patch *patch);
/* Decides about every waiting patch, in order. A patch is applied if the library version is older than fixed_in and
 * `found` and `needed` return true; otherwise it is skipped. The log gets a debug line for a skipped patch, an info
 * line for an applied one. Stops at the first patch that fails, which stays waiting. Refused inside a graph's
 * capture. */
TE_API te_result te_apply_patches(te_ctx *te);
/* Undoes the applied patches, the last one first. All patches are then waiting. Existing optimizers keep their
 * states. */
TE_API te_result te_unapply_patches(te_ctx *te);
/* Returns whether te_apply_patches has decided about every patch. */
TE_API bool te_patches_applied(const te_ctx *te);
/* Returns the number of patches of the context; te.h's own is number 0. */
TE_API int te_num_patches(te_ctx *te);
/* Returns patch number `index`. If there is no such patch, the name is NULL. */
TE_API te_patch_info te_patch_at(te_ctx *te, int index);
/* Sets the library version: the TransformerEngine that the te_fused_adam_methods behave like. PEP 440 orders versions
 * ("2.12.0.dev0" is older than "2.12"). NULL => TE_TRANSFORMER_ENGINE_VERSION; "" => "0.0.0". TE_ERR_INVALID for a
 * string that is no version. */
TE_API te_result te_set_library_version(te_ctx *te, const char *version);
