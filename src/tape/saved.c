/* tape/saved.c: hooks that pack and unpack the saved tensors of tape nodes. This file must not depend on what a hook
 * does with a tensor. */

TE_API te_result te_saved_tensors_begin(te_ctx *te, const te_saved_tensors_hooks *hooks) {
    if (!te) return TE_ERR_STATE;
    if (!hooks || !hooks->pack || !hooks->unpack)
        return te__fail(te, TE_ERR_INVALID, "te_saved_tensors_begin: %s; both pack and unpack are needed",
                        !hooks        ? "hooks is NULL"
                        : hooks->pack ? "unpack is NULL"
                                      : "pack is NULL");
    if (te->tape.num_hooks == TE__MAX_HOOKS)
        return te__fail(
            te, TE_ERR_STATE,
            "te_saved_tensors_begin: %d regions are open, which is the most; is a te_saved_tensors_end missing?",
            TE__MAX_HOOKS);
    te->tape.hooks[te->tape.num_hooks++] = *hooks;
    return TE_OK;
}
TE_API te_result te_saved_tensors_end(te_ctx *te) {
    if (!te) return TE_ERR_STATE;
    if (te->tape.num_hooks == 0)
        return te__fail(te, TE_ERR_STATE, "te_saved_tensors_end without te_saved_tensors_begin");
    te->tape.num_hooks--;
    return TE_OK;
}

/* Offers each saved tensor of a node to the hooks of the innermost region. Skips parameters, since the model holds
 * their memory anyway. */
static te_result te__saved_pack(te_ctx *te, te__node *node) {
    int i;
    if (te->tape.num_hooks == 0 || node->num_saved == 0) return TE_OK;
    node->hooks = te->tape.hooks[te->tape.num_hooks - 1];
    node->packed = (void **)te__alloc_zero(te, (size_t)node->num_saved * sizeof(void *));
    node->packed_as = (te__packed_as *)te__alloc_zero(te, (size_t)node->num_saved * sizeof(te__packed_as));
    if (!node->packed || !node->packed_as) {
        te__free(te, node->packed);
        te__free(te, node->packed_as);
        node->packed = NULL;
        node->packed_as = NULL;
        return TE_ERR_OUT_OF_MEMORY;
    }
    for (i = 0; i < node->num_saved; i++) {
        te_tensor *x = node->saved[i];
        if (!x || x->is_weight || (x->var && x->var->leaf)) continue;
        te->tape.no_grad++; /* the hook's computations are not recorded */
        node->packed[i] = node->hooks.pack(node->hooks.user, x);
        te->tape.no_grad--;
        if (te->error_code != TE_OK) return te->error_code;
        if (!node->packed[i]) continue;
        node->packed_as[i].dtype = x->dtype;
        node->packed_as[i].ndim = x->ndim;
        memcpy(node->packed_as[i].shape, x->shape, sizeof(x->shape));
        te_tensor_release(x);
        node->saved[i] = NULL;
    }
    return TE_OK;
}

/* Unpacks the saved tensors of a node. Called right before the backward function of the node. */
static te_result te__saved_unpack(te_ctx *te, te__node *node) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int i;
    for (i = 0; node->packed && i < node->num_saved; i++) {
        const te__packed_as *as = &node->packed_as[i];
        void *handle = node->packed[i];
        te_tensor *x;
        if (!handle) continue;
        node->packed[i] = NULL; /* from here on unpack owns the handle */
        x = node->hooks.unpack(node->hooks.user, handle);
        if (te->error_code != TE_OK) return te->error_code;
        if (!x)
            return te__fail(te, TE_ERR_STATE, "te_backward: %s: unpack gave NULL for saved tensor %d of %d", node->name,
                            i + 1, node->num_saved);
        if (x->te != te)
            return te__fail(te, TE_ERR_INVALID, "te_backward: %s: unpack gave a tensor of another context (%s)",
                            node->name, x->te->device_name);
        if (x->dtype != as->dtype || x->ndim != as->ndim ||
            memcmp(x->shape, as->shape, (size_t)as->ndim * sizeof(int64_t)) != 0)
            return te__fail(te, TE_ERR_SHAPE,
                            "te_backward: %s: unpack gave %s %s for saved tensor %d of %d; pack was given %s %s",
                            node->name, te_dtype_name(x->dtype), te__shape_text(x, a), i + 1, node->num_saved,
                            te_dtype_name(as->dtype), te__dims_text(as->ndim, as->shape, b));
        node->saved[i] = te_tensor_retain(x);
    }
    return TE_OK;
}
