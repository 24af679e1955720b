/* nn/options.c: options that have a field and that no module reads yet: a table of them for each group, a list of groups for each desc, and the check that
 * refuses one that is set. Must not know what any option does. */

typedef struct te__option_group {
    const char *name; /* of the member that embeds it, with a dot; "" for fields of the desc itself */
    const te__field *fields; /* in the order of the struct; mark: a value that means the same as 0, or 0 */
    int num_fields;
} te__option_group;

#define TE__LATER(field) TE__FIELD(TE__TYPE, field, 0)

#define TE__TYPE te_parallel_options
static const te__field te__parallel_later[] = {TE__LATER(cp_group), TE__LATER(cp_p2p_group), TE__LATER(cp_comm_type)};
#undef TE__TYPE
#define TE__TYPE te_attention_call
/* SDPA reads masks without padding and windows alone. */
static const te__field te__sdpa_call_later[] = {
    TE__LATER(bottom_right_diagonal), TE__LATER(attention_mask), TE__LATER(attention_mask_q), TE__LATER(cu_seqlens_q), TE__LATER(cu_seqlens_kv), TE__LATER(cu_seqlens_q_padded),
    TE__LATER(cu_seqlens_kv_padded), TE__LATER(max_seqlen_q), TE__LATER(max_seqlen_kv), TE__LATER(pad_between_seqs), TE__LATER(core_attention_bias_type),
    TE__LATER(core_attention_bias), TE__LATER(alibi_slopes), TE__LATER(inference_params), TE__LATER(score_mod), TE__LATER(qkv_layer), TE__LATER(kv_layer), TE__LATER(qkv_interleave_dim)};
#undef TE__TYPE
#undef TE__LATER

#define TE__GROUP(name, fields) {name, fields, TE__COUNT(fields)}
static const te__option_group te__parallel_group = TE__GROUP("parallel.", te__parallel_later),
                              te__sdpa_call_group = TE__GROUP("attention.", te__sdpa_call_later);
#undef TE__GROUP

/* Where a desc, or the args of a call, embeds groups. */
typedef struct te__option_place {
    const te__option_group *group;
    size_t offset;
} te__option_place;
typedef struct te__options {
    te__option_place places[5]; /* one without a group ends them */
} te__options;

enum { TE__DESC_LINEAR, TE__DESC_NORM, TE__DESC_LAYERNORM_LINEAR, TE__DESC_LAYERNORM_MLP, TE__DESC_DPA, TE__DESC_MHA, TE__DESC_LAYER, TE__DESC_GROUPED_LINEAR, TE__DESC_SDPA_CALL,
       TE__DESCS };
#define TE__IN(type, member, group) {&te__##group, offsetof(type, member)}
static const te__options te__all_options[TE__DESCS] = {
    {{TE__IN(te_linear_desc, parallel, parallel_group), {NULL, 0}, {NULL, 0}, {NULL, 0}}},
    {{TE__IN(te_norm_desc, parallel, parallel_group), {NULL, 0}, {NULL, 0}, {NULL, 0}, {NULL, 0}}},
    {{TE__IN(te_layernorm_linear_desc, parallel, parallel_group), {NULL, 0}, {NULL, 0}, {NULL, 0}}},
    {{TE__IN(te_layernorm_mlp_desc, parallel, parallel_group), {NULL, 0}, {NULL, 0}, {NULL, 0}}},
    {{TE__IN(te_dot_product_attention_desc, parallel, parallel_group), {NULL, 0}, {NULL, 0}, {NULL, 0}}},
    {{TE__IN(te_multihead_attention_desc, parallel, parallel_group), {NULL, 0}, {NULL, 0}}},
    {{TE__IN(te_transformer_layer_desc, parallel, parallel_group), {NULL, 0}, {NULL, 0}}},
    {{TE__IN(te_grouped_linear_desc, parallel, parallel_group), {NULL, 0}, {NULL, 0}, {NULL, 0}}},
    {{TE__IN(te_forward_args, attention, sdpa_call_group), {NULL, 0}, {NULL, 0}, {NULL, 0}}}
};
#undef TE__IN

/* False, with an error that names the field, if `s` (a desc, or the args of a call) sets one that no module reads yet. */
static bool te__options_ok(te_ctx *te, const char *who, int desc, const void *s) {
    const te__option_place *p;
    int i;
    for (p = te__all_options[desc].places; p < te__all_options[desc].places + TE__COUNT(te__all_options[desc].places) && p->group; p++)
        for (i = 0; i < p->group->num_fields; i++) {
            const te__field *f = &p->group->fields[i];
            const char *in = (const char *)s + p->offset;
            if (!te__field_is_set(in, f) || (f->mark && memcmp(in + f->offset, &f->mark, f->size) == 0)) continue;
            te__fail(te, TE_ERR_UNSUPPORTED, "%s: %s%s is not implemented yet; leave it zero", who, p->group->name, f->name);
            return false;
        }
    return true;
}
