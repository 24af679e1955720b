/* functions/shared_input.c: one input of several products, such as those of queries, keys and values, is quantized
 * once. This file must not depend on what the products compute. */

/* An input that a module hands to several products, one after another, and the copy that the first of them made. */
typedef struct te__shared_input {
    te_tensor *x;       /* borrowed: the module holds it while it runs the products */
    te_tensor *codes;   /* retained; NULL: no product has quantized x */
    uint64_t version;   /* of x, when `codes` was made */
    te__quant_spec spec; /* how */
} te__shared_input;

/* Returns true if two casts by a and b give the same copies of one tensor, and have no other effect. */
static bool te__same_casts(const te__quant_spec *a, const te__quant_spec *b) {
    const bool owns[] = {a->x_amax || b->x_amax, a->bias_grad || b->bias_grad, a->scale || b->scale,
                         a->amax || b->amax,     a->sizes || b->sizes,         a->stochastic || b->stochastic};
    int i;
    for (i = 0; i < TE__COUNT(owns); i++)
        if (owns[i]) return false; /* memory or a random state of one cast */
    return a->cls == b->cls && a->cls->form == TE__FORM_CODES && !(a->cls->facts & TE__SCALE_GIVEN) &&
           a->dtype == b->dtype && a->usage == b->usage && a->two_dimensional == b->two_dimensional &&
           a->power_of_two == b->power_of_two && a->fp32_scales == b->fp32_scales && a->swizzled == b->swizzled &&
           a->rht == b->rht && a->no_random_sign_mask == b->no_random_sign_mask && a->row_scaled == b->row_scaled &&
           a->e4m3_max_256 == b->e4m3_max_256 && a->four_over_six == b->four_over_six && a->epsilon == b->epsilon &&
           a->group == b->group;
}

/* Returns x quantized by `spec`: the copy that an earlier product of *s made, or a new one. `s` may be NULL. */
static te_tensor *te__quantize_shared(te__shared_input *s, te_tensor *x, const te__quant_spec *spec) {
    te_tensor *codes;
    if (!s || s->x != x) return te__quantize(x, spec);
    if (s->codes && s->version == te_tensor_version(x) && te__same_casts(&s->spec, spec))
        return te__alias_any(s->codes);
    codes = te__quantize(x, spec);
    if (!codes || !te__same_casts(spec, spec)) return codes;
    te_tensor_release(s->codes);
    s->codes = te_tensor_retain(codes);
    s->version = te_tensor_version(x);
    s->spec = *spec;
    return codes;
}
