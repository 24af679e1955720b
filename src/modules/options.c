/* modules/options.c: refuses options that the API has, but that a module does not support yet. Each group of options
 * has a table of unsupported fields. This file must not depend on what any option does. */

typedef struct te__option_group {
    const char *name; /* name of the struct member that holds the group, with a dot at the end */
    const te__field *fields; /* in the struct's order */
    int num_fields;
} te__option_group;

#define TE__LATER(field) TE__FIELD(TE__TYPE, field, 0)
#define TE__LATER_OF_BOTH                                                                                \
    TE__LATER(cu_seqlens_q_padded), TE__LATER(cu_seqlens_kv_padded), TE__LATER(max_seqlen_q),            \
        TE__LATER(max_seqlen_kv), TE__LATER(bottom_right_diagonal), TE__LATER(core_attention_bias_type), \
        TE__LATER(core_attention_bias), TE__LATER(alibi_slopes), TE__LATER(score_mod)
#define TE__TYPE te_attn_call
/* The fields of te_attn_call that SDPA does not read. attention_mask must come first: a class that reads attention_mask
 * checks only the fields after it. */
static const te__field te__sdpa_call_later[] = {
    TE__LATER(attention_mask),   TE__LATER_OF_BOTH,           TE__LATER(attention_mask_q),
    TE__LATER(pad_between_seqs), TE__LATER(inference_params), TE__LATER(qkv_layer),
    TE__LATER(kv_layer),         TE__LATER(qkv_interleave_dim)};
#undef TE__TYPE
#define TE__TYPE te_attn_rule
/* The fields of a desc that SDPA does not read. */
static const te__field te__sdpa_rule_later[] = {TE__LATER(attention_mask), TE__LATER(cu_seqlens_q),
                                                TE__LATER(cu_seqlens_kv),  TE__LATER_OF_BOTH,
                                                TE__LATER(kv_bshd),        TE__LATER(page_table),
                                                TE__LATER(k_factors),      TE__LATER(v_factors),
                                                TE__LATER(block_mask)};
#undef TE__TYPE
#undef TE__LATER_OF_BOTH
#undef TE__LATER
static const te__option_group te__sdpa_rule_group = {"rule.", te__sdpa_rule_later, TE__COUNT(te__sdpa_rule_later)};
static const te__option_group te__sdpa_call_group = {"attention.", te__sdpa_call_later, TE__COUNT(te__sdpa_call_later)};

/* Returns the first field of `group` that is set in `options`, or NULL. The search begins at the field with index
 * `first`. */
static const te__field *te__option_set(const te__option_group *group, int first, const void *options) {
    for (; first < group->num_fields; first++)
        if (te__field_is_set((const char *)options, &group->fields[first])) return &group->fields[first];
    return NULL;
}
/* Checks that `options` sets no field of `group`. Otherwise records an error that names the field, and returns
 * false. */
static bool te__options_ok(te_ctx *te, const char *who, const te__option_group *group, const void *options) {
    const te__field *f = te__option_set(group, 0, options);
    if (f)
        te__fail(te, TE_ERR_UNSUPPORTED, "%s: %s%s is not implemented yet; leave it zero", who, group->name, f->name);
    return !f;
}
