/* quant/recipe.c: the checks of recipes, and how a recipe quantizes each operand of a product. This file must not
 * depend on the autocast stack or on modules. */

static te_recipe te__recipe_of(te_recipe_kind kind) {
    te_recipe r = TE_ZERO;
    r.kind = kind;
    return r;
}
TE_API te_recipe te_recipe_delayed_scaling(void) { return te__recipe_of(TE_RECIPE_DELAYED); }
TE_API te_recipe te_recipe_current_scaling(void) { return te__recipe_of(TE_RECIPE_CURRENT); }
TE_API te_recipe te_recipe_block_scaling(void) { return te__recipe_of(TE_RECIPE_BLOCK); }
TE_API te_recipe te_recipe_mxfp8(void) { return te__recipe_of(TE_RECIPE_MXFP8); }
TE_API te_recipe te_recipe_nvfp4(void) { return te__recipe_of(TE_RECIPE_NVFP4); }
TE_API te_recipe te_recipe_custom(te_result (*factory)(void *user, const te_quantizer_role *role,
                                                       te_quantizer_desc *desc),
                                  void *user) {
    te_recipe r = te__recipe_of(TE_RECIPE_CUSTOM);
    r.custom.factory = factory;
    r.custom.user = user;
    return r;
}
/* The slots of one product, numbered as in TransformerEngine. */
enum {
    TE__SLOT_INPUT = 0,
    TE__SLOT_WEIGHT = 1,
    TE__SLOT_OUTPUT = 2,
    TE__SLOTS_FORWARD = 3,
    TE__SLOT_GRAD_OUTPUT = 0,
    TE__SLOT_GRAD_INPUT = 1,
    TE__SLOTS_BACKWARD = 2
};

/* ---- the table of the kinds of recipes ---- */

/* Facts of a kind of recipe. */
enum {
    TE__SPLITS_ALWAYS = 1,  /* products never use fast accumulation: split_fprop, split_dgrad and split_wgrad are always
                             * on */
    TE__ACT_IN_ONE_KERNEL = 2, /* TransformerEngine computes an activation's gradient, the codes of this gradient, and
                                * dbias in one kernel. te__act_grad_of rounds as this kernel does */
    TE__IN_ATTENTION = 4    /* the options fp8_dpa and fp8_mha are possible */
};
/* The table entry of one kind of recipe, with the properties of that kind. Other files read these properties instead of
 * comparing kinds of recipes. */
typedef struct te__recipe_class {
    const char *name;
    const te__quant_class *cls; /* the kind of quantizer for every operand; NULL: the user's factory chooses one for
                                 * each operand (te__asks_factory) */
    int facts;
    te_format format;           /* the value of te_recipe.format by default */
    int64_t align;              /* Fp8Padding pads groups of rows to multiples of this */
    const char *not_in_attention; /* for an error text: why fp8_dpa and fp8_mha are not possible; NULL if
                                   * TE__IN_ATTENTION is set */
    /* Sets the fields of an operand's spec, except cls and dtype. NULL: there is nothing to set. */
    void (*spec)(const te_recipe *r, bool backward, bool weight, te_group *group, te__quant_spec *s);
    /* Checks the values of the fields that only this kind has. NULL: there is nothing to check. */
    te_result (*check)(te_ctx *te, const te_recipe *r);
} te__recipe_class;

static te_result te__recipe_delayed_check(te_ctx *te, const te_recipe *r) {
    if (!r->backward_override) return TE_OK;
    return te__fail(te, TE_ERR_INVALID,
                    "recipe delayed: backward_override; the scales of gradients would never be updated: use "
                    "another recipe, or none of it");
}
static void te__recipe_current_spec(const te_recipe *r, bool backward, bool weight, te_group *group,
                                    te__quant_spec *s) {
    (void)backward, (void)weight;
    s->power_of_two = r->current.power_of_two_scales;
    s->epsilon = r->amax_epsilon;
    s->group = group;
}

static int te__block_dim(int given, int by_default) { return given ? given : by_default; }
static void te__recipe_block_spec(const te_recipe *r, bool backward, bool weight, te_group *group, te__quant_spec *s) {
    (void)group;
    s->two_dimensional =
        2 == (weight ? te__block_dim(r->block.w_block_scaling_dim, 2)
                     : te__block_dim(backward ? r->block.grad_block_scaling_dim : r->block.x_block_scaling_dim, 1));
    s->fp32_scales = r->block.fp32_scales;
    s->epsilon = r->amax_epsilon;
}
static te_result te__recipe_block_check(te_ctx *te, const te_recipe *r) {
    int x = te__block_dim(r->block.x_block_scaling_dim, 1), w = te__block_dim(r->block.w_block_scaling_dim, 2),
        g = te__block_dim(r->block.grad_block_scaling_dim, 1);
    if (x < 1 || x > 2 || w < 1 || w > 2 || g < 1 || g > 2)
        return te__fail(te, TE_ERR_INVALID,
                        "recipe block: block scaling dimensions %d (x), %d (w), %d (grad); 1 (1 x 128) and 2 (128 "
                        "x 128) are possible",
                        x, w, g);
    if (x + w == 4 || g + w == 4 || x + g == 4)
        return te__fail(te, TE_ERR_INVALID,
                        "recipe block: block scaling dimensions %d (x), %d (w), %d (grad); two operands with 128 x "
                        "128 blocks do not meet in one "
                        "product: at most one of the three may be 2",
                        x, w, g);
    return TE_OK;
}

static void te__recipe_mxfp8_spec(const te_recipe *r, bool backward, bool weight, te_group *group, te__quant_spec *s) {
    (void)backward, (void)group;
    s->two_dimensional = weight && r->mxfp8.quantization_2d == TE_ON;
}

/* Returns true if the block scales of an NVFP4 operand with 4-over-6 go up to 256 instead of 448. */
static bool te__recipe_e4m3_256(te_nvfp4_e4m3_256 scope, bool weight) {
    if (scope == TE_NVFP4_E4M3_256_NONE) return false;
    return scope != (weight ? TE_NVFP4_E4M3_256_ACTIVATIONS : TE_NVFP4_E4M3_256_WEIGHTS);
}
static void te__recipe_nvfp4_spec(const te_recipe *r, bool backward, bool weight, te_group *group, te__quant_spec *s) {
    s->two_dimensional = weight && r->nvfp4.quantization_2d != TE_OFF;
    s->rht = !weight && r->nvfp4.rht != TE_OFF;
    s->stochastic = backward && r->nvfp4.stochastic_rounding != TE_OFF;
    s->row_scaled = !weight && !backward && r->nvfp4.row_scaled_activation;
    if (!backward && r->nvfp4.four_over_six & (weight ? TE_NVFP4_4OVER6_WEIGHTS : TE_NVFP4_4OVER6_ACTIVATIONS)) {
        s->four_over_six = r->nvfp4.four_over_six_mse ? TE_4OVER6_MSE : TE_4OVER6_MAE;
        s->e4m3_max_256 = te__recipe_e4m3_256(r->nvfp4.four_over_six_e4m3_256, weight);
    }
    s->group = s->row_scaled ? NULL : group;
}
static te_result te__recipe_nvfp4_check(te_ctx *te, const te_recipe *r) {
    if ((int)r->nvfp4.four_over_six < 0 || r->nvfp4.four_over_six > TE_NVFP4_4OVER6_ALL)
        return te__fail(te, TE_ERR_INVALID, "recipe nvfp4: four_over_six %d is not in te_nvfp4_4over6",
                        (int)r->nvfp4.four_over_six);
    if ((int)r->nvfp4.four_over_six_e4m3_256 < 0 || r->nvfp4.four_over_six_e4m3_256 > TE_NVFP4_E4M3_256_NONE)
        return te__fail(te, TE_ERR_INVALID, "recipe nvfp4: four_over_six_e4m3_256 %d is not in te_nvfp4_e4m3_256",
                        (int)r->nvfp4.four_over_six_e4m3_256);
    return TE_OK;
}

static te_result te__recipe_custom_check(te_ctx *te, const te_recipe *r) {
    return r->custom.factory
               ? TE_OK
               : te__fail(te, TE_ERR_INVALID, "recipe custom: the factory is NULL (te_recipe_custom)");
}

/* The entries, in the order of te_recipe_kind. */
static const te__recipe_class te__recipe_classes[] = {
    {"none", NULL, 0, TE_FORMAT_HYBRID, 16, NULL, NULL, NULL},
    {"delayed", &te__quant_delayed, TE__ACT_IN_ONE_KERNEL | TE__IN_ATTENTION, TE_FORMAT_HYBRID, 16, NULL, NULL,
     te__recipe_delayed_check},
    {"current", &te__quant_current, TE__IN_ATTENTION, TE_FORMAT_HYBRID, 16, NULL, te__recipe_current_spec, NULL},
    {"block", &te__quant_block, TE__SPLITS_ALWAYS, TE_FORMAT_E4M3, 16, "no block scales", te__recipe_block_spec,
     te__recipe_block_check},
    {"mxfp8", &te__quant_mxfp8, TE__ACT_IN_ONE_KERNEL | TE__IN_ATTENTION, TE_FORMAT_E4M3, 32, NULL,
     te__recipe_mxfp8_spec, NULL},
    {"nvfp4", &te__quant_nvfp4, 0, TE_FORMAT_HYBRID, 128, "no FP4 operands", te__recipe_nvfp4_spec,
     te__recipe_nvfp4_check},
    {"custom", NULL, TE__IN_ATTENTION, TE_FORMAT_HYBRID, 128, NULL, NULL, te__recipe_custom_check}};
TE__STATIC_ASSERT(sizeof(te__recipe_classes) / sizeof(te__recipe_classes[0]) == TE_RECIPE_KIND_COUNT,
                  "a kind of recipe has no row");

static bool te__recipe_known(te_recipe_kind kind) {
    return (int)kind > (int)TE_RECIPE_NONE && (int)kind < (int)TE_RECIPE_KIND_COUNT;
}
static const te__recipe_class *te__recipe_class_of(const te_recipe *r) {
    return &te__recipe_classes[te__recipe_known(r->kind) ? r->kind : TE_RECIPE_NONE];
}
/* Returns true if a factory of the user chooses the quantizer of each operand. */
static bool te__asks_factory(const te_recipe *r) { return te__recipe_known(r->kind) && !te__recipe_class_of(r)->cls; }
/* Returns true if this recipe's kind of quantizer has the fact `fact` (quant/kinds.h). Returns false for a recipe with
 * a factory. */
static bool te__recipe_has(const te_recipe *r, int fact) {
    const te__quant_class *cls = te__recipe_class_of(r)->cls;
    return cls && (cls->facts & fact) != 0;
}
TE_API const char *te_recipe_name(te_recipe_kind kind) {
    return kind == TE_RECIPE_NONE || te__recipe_known(kind) ? te__recipe_classes[kind].name : "?";
}

/* Returns the dtype of the FP8 codes in the forward or the backward direction. */
static te_dtype te__recipe_dtype(const te_recipe *r, bool backward) {
    te_format format = r->format == TE_FORMAT_DEFAULT ? te__recipe_class_of(r)->format : r->format;
    return backward && format == TE_FORMAT_HYBRID ? TE_F8E5M2 : TE_F8E4M3;
}

/* Returns the spec that quantizes operand `slot` of a product. The spec of a delayed recipe has no scale yet. Not for
 * custom recipes. */
static te__quant_spec te__recipe_spec(const te_recipe *r, bool backward, int slot, te_group *group) {
    const te__recipe_class *row = te__recipe_class_of(r);
    te__quant_spec s;
    memset(&s, 0, sizeof(s));
    s.cls = row->cls;
    s.dtype = s.cls->code_dtype ? s.cls->code_dtype : te__recipe_dtype(r, backward);
    if (row->spec) row->spec(r, backward, !backward && slot == TE__SLOT_WEIGHT, group, &s);
    return s;
}

/* ---- checks ---- */

/* Every field of te_recipe, with a mask of the recipe kinds that read it; 0: all kinds. A recipe must not set a field
 * that its kind ignores. */
static const te__field te__recipe_fields[] = {
#define TE__ONE(field) TE__FIELD(te_recipe, field, 0)
#define TE__OF(KIND) (1 << TE_RECIPE_##KIND)
#define TE__ROW(group, KINDS, field) TE__FIELD_IN(te_recipe, group, te_##group##_recipe, field, KINDS)
    TE__ONE(kind),
    TE__FIELD(te_recipe, format, TE__OF(DELAYED) | TE__OF(CURRENT) | TE__OF(BLOCK) | TE__OF(MXFP8) | TE__OF(CUSTOM)),
    TE__ONE(backward_override),
    TE__ONE(split_fprop),
    TE__ONE(split_dgrad),
    TE__ONE(split_wgrad),
    TE__FIELD(te_recipe, amax_epsilon, TE__OF(CURRENT) | TE__OF(BLOCK)),
    TE__ONE(fp8_dpa),
    TE__ONE(fp8_mha),
    TE__ROW(delayed, TE__OF(DELAYED) | TE__OF(CUSTOM), margin),
    TE__ROW(delayed, TE__OF(DELAYED) | TE__OF(CUSTOM), amax_history_len),
    TE__ROW(delayed, TE__OF(DELAYED) | TE__OF(CUSTOM), amax_algo),
    TE__ROW(delayed, TE__OF(DELAYED) | TE__OF(CUSTOM), amax_fn),
    TE__ROW(delayed, TE__OF(DELAYED) | TE__OF(CUSTOM), scale_fn),
    TE__ROW(delayed, TE__OF(DELAYED) | TE__OF(CUSTOM), user),
    TE__ROW(delayed, TE__OF(DELAYED) | TE__OF(CUSTOM), no_reduce_amax),
    TE__ROW(current, TE__OF(CURRENT), power_of_two_scales),
    TE__ROW(block, TE__OF(BLOCK), x_block_scaling_dim),
    TE__ROW(block, TE__OF(BLOCK), w_block_scaling_dim),
    TE__ROW(block, TE__OF(BLOCK), grad_block_scaling_dim),
    TE__ROW(block, TE__OF(BLOCK), fp32_scales),
    TE__ROW(mxfp8, TE__OF(MXFP8), quantization_2d),
    TE__ROW(nvfp4, TE__OF(NVFP4), rht),
    TE__ROW(nvfp4, TE__OF(NVFP4), stochastic_rounding),
    TE__ROW(nvfp4, TE__OF(NVFP4), quantization_2d),
    TE__ROW(nvfp4, TE__OF(NVFP4), row_scaled_activation),
    TE__ROW(nvfp4, TE__OF(NVFP4), four_over_six),
    TE__ROW(nvfp4, TE__OF(NVFP4), four_over_six_mse),
    TE__ROW(nvfp4, TE__OF(NVFP4), four_over_six_e4m3_256),
    TE__ROW(custom, TE__OF(CUSTOM), factory),
    TE__ROW(custom, TE__OF(CUSTOM), user)
#undef TE__ONE
#undef TE__OF
#undef TE__ROW
};

/* Returns true if all fields of a and b are equal. Floats are compared by their bits, so a recipe with a NaN equals
 * itself. */
static bool te__recipe_same(const te_recipe *a, const te_recipe *b) {
    return te__fields_same(a, b, te__recipe_fields, TE__COUNT(te__recipe_fields));
}

/* Returns a checksum of a recipe that is the same in all processes, and not 0: of functions it knows whether there are
 * any. NULL, no recipe: 1. */
static uint64_t te__recipe_sum(const te_recipe *r) {
    te_recipe plain;
    bool given[3];
    uint64_t sum;
    int i;
    if (!r) return 1;
    plain = *r;
    given[0] = r->delayed.amax_fn != NULL;
    given[1] = r->delayed.scale_fn != NULL;
    given[2] = r->custom.factory != NULL;
    sum = te__hash64(given, sizeof(given), 0);
    plain.delayed.amax_fn = NULL;
    plain.delayed.scale_fn = NULL;
    plain.custom.factory = NULL;
    plain.delayed.user = plain.custom.user = NULL;
    for (i = 0; i < TE__COUNT(te__recipe_fields); i++)
        sum = te__hash64((const char *)&plain + te__recipe_fields[i].offset, te__recipe_fields[i].size, sum);
    return sum ? sum : 1;
}

/* Writes a recipe into a text that ranks compare. Its name lacks the options; the sum tells them apart. */
enum { TE__RECIPE_TEXT = 64 };
static const char *te__recipe_text(te_recipe_kind kind, uint64_t sum, char text[TE__RECIPE_TEXT]) {
    snprintf(text, TE__RECIPE_TEXT, "recipe %s (checksum %016llx)", te_recipe_name(kind), (unsigned long long)sum);
    return text;
}
/* The same of a recipe, or of none (NULL). */
static const char *te__recipe_told(const te_recipe *r, char text[TE__RECIPE_TEXT]) {
    return te__recipe_text(r ? r->kind : TE_RECIPE_NONE, te__recipe_sum(r), text);
}

/* Fails if a field is set that recipes of this kind do not read. */
static te_result te__recipe_check_kinds(te_ctx *te, const te_recipe *r) {
    int i, kind;
    for (i = 0; i < TE__COUNT(te__recipe_fields); i++) {
        const te__field *f = &te__recipe_fields[i];
        char kinds[64] = "";
        size_t used = 0;
        if (!f->mark || f->mark & 1 << r->kind || !te__field_is_set(r, f)) continue;
        for (kind = TE_RECIPE_NONE; kind < TE_RECIPE_KIND_COUNT && used < sizeof(kinds); kind++)
            if (f->mark & 1 << kind)
                used += (size_t)snprintf(kinds + used, sizeof(kinds) - used, "%s%s", used ? ", " : "",
                                         te_recipe_name((te_recipe_kind)kind));
        return te__fail(te, TE_ERR_INVALID,
                        "recipe %s: %s is set, a field of recipes of the kind %s; leave it zero, or use such a recipe",
                        te_recipe_name(r->kind), f->name, kinds);
    }
    return TE_OK;
}

/* Calls the factory of a custom recipe for one operand. If the factory leaves the desc without a kind, the operand
 * stays in high precision. */
static te_result te__recipe_ask(te_ctx *te, const te_recipe *r, const te_quantizer_role *role,
                                te_quantizer_desc *desc) {
    te_result result =
        te__returned(te, r->custom.factory(r->custom.user, role, desc), "recipe custom: the factory", NULL);
    if (result != TE_OK) return te__fail(te, result, "recipe custom: the factory returned %s", te_result_name(result));
    if (desc->kind == TE_QUANT_NONE) desc->kind = te__quant_identity.kind;
    return TE_OK;
}

/* Checks a recipe. If several fields are wrong, the error is that of the first one. */
static te_result te__recipe_check(te_ctx *te, const te_recipe *r) {
    const te__recipe_class *row = te__recipe_class_of(r);
    if (!te__recipe_known(r->kind))
        return te__fail(te, TE_ERR_INVALID,
                        "recipe kind %d; te_recipe_delayed_scaling(), _current_scaling, _block_scaling, _mxfp8, _nvfp4 "
                        "and _custom make valid ones",
                        (int)r->kind);
    if (!te__is_switch(r->split_fprop) || !te__is_switch(r->split_dgrad) || !te__is_switch(r->split_wgrad))
        return te__fail(te, TE_ERR_INVALID,
                        "recipe %s: split_fprop %d, split_dgrad %d, split_wgrad %d; TE_DEFAULT (0), TE_ON (1) and "
                        "TE_OFF (2) are possible",
                        te_recipe_name(r->kind), (int)r->split_fprop, (int)r->split_dgrad, (int)r->split_wgrad);
    if (!te__is_switch(r->mxfp8.quantization_2d) || !te__is_switch(r->nvfp4.quantization_2d) ||
        !te__is_switch(r->nvfp4.rht) || !te__is_switch(r->nvfp4.stochastic_rounding))
        return te__fail(te, TE_ERR_INVALID,
                        "recipe %s: mxfp8.quantization_2d %d, nvfp4.quantization_2d %d, nvfp4.rht %d, "
                        "nvfp4.stochastic_rounding %d; TE_DEFAULT (0), TE_ON (1) and TE_OFF (2) are possible",
                        te_recipe_name(r->kind), (int)r->mxfp8.quantization_2d, (int)r->nvfp4.quantization_2d,
                        (int)r->nvfp4.rht, (int)r->nvfp4.stochastic_rounding);
    if (r->format == TE_FORMAT_E5M2)
        return te__fail(te, TE_ERR_INVALID,
                        "recipe %s: format E5M2; a product of E5M2 with E5M2 does not exist: use TE_FORMAT_HYBRID "
                        "(E5M2 gradients) or TE_FORMAT_E4M3",
                        te_recipe_name(r->kind));
    if (te__recipe_check_kinds(te, r) != TE_OK) return TE_ERR_INVALID;
    if ((int)r->format < 0 || r->format > TE_FORMAT_E5M2)
        return te__fail(te, TE_ERR_INVALID, "recipe %s: format %d; HYBRID (1) and E4M3 (2) are possible",
                        te_recipe_name(r->kind), (int)r->format);
    if (r->delayed.amax_history_len < 0)
        return te__fail(te, TE_ERR_INVALID, "recipe delayed: amax_history_len %d; 1 or more (0 => 1024)",
                        r->delayed.amax_history_len);
    if ((int)r->delayed.amax_algo < 0 || r->delayed.amax_algo > TE_AMAX_MOST_RECENT)
        return te__fail(te, TE_ERR_INVALID, "recipe delayed: amax_algo %d is not in te_amax_algo",
                        (int)r->delayed.amax_algo);
    if (!(r->amax_epsilon >= 0.0f))
        return te__fail(te, TE_ERR_INVALID, "recipe %s: amax_epsilon %g; it cannot be negative",
                        te_recipe_name(r->kind), (double)r->amax_epsilon);
    if ((r->fp8_dpa || r->fp8_mha) && !(row->facts & TE__IN_ATTENTION))
        return te__fail(te, TE_ERR_INVALID,
                        "recipe %s: fp8_dpa %d and fp8_mha %d; attention takes %s: leave both off, or use a per-tensor "
                        "recipe, which te_module_set_recipe can give to "
                        "DotProductAttention alone",
                        te_recipe_name(r->kind), r->fp8_dpa, r->fp8_mha,
                        row->not_in_attention);
    if ((int)r->backward_override < 0 || r->backward_override > TE_BACKWARD_DEQUANTIZED)
        return te__fail(te, TE_ERR_INVALID, "recipe %s: backward_override %d is not in te_backward_override",
                        te_recipe_name(r->kind), (int)r->backward_override);
    return row->check ? row->check(te, r) : TE_OK;
}
