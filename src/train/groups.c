/* train/groups.c: the parameter groups of an optimizer, and the numbers of each group, such as the learning rate. This
 * file must not depend on what a step does. */

/* Returns true if `text` matches `pattern`. In the pattern * stands for any characters, and ? for one character. */
static bool te__matches(const char *pattern, const char *text) {
    const char *star = NULL, *from = NULL; /* star: the pattern after the last *; from: the place in the text where
                                            * `star` is tried */
    while (*text) {
        if (*pattern == '*') {
            star = ++pattern;
            from = text;
        } else if (*pattern == '?' || *pattern == *text) {
            pattern++;
            text++;
        } else if (star) {
            pattern = star;
            text = ++from;
        } else
            return false;
    }
    while (*pattern == '*') pattern++;
    return *pattern == 0;
}

static bool te__group_takes(const te_param_group *g, const te_tensor *param, const char *path) {
    int i;
    if (g->pattern) return te__matches(g->pattern, path);
    for (i = 0; i < g->num_params; i++)
        if (g->params[i] == param) return true;
    return false;
}

/* Checks that 0 <= value < below; NaN fails. */
static bool te__opt_in_range(te_ctx *te, const char *create, const char *name, float value, float below) {
    if (value >= 0.0f && value < below) return true;
    return te__not_ok(te, TE_ERR_INVALID, "%s: %s is %g; 0 (the default) or more, and less than %g, is possible",
                      create, name, (double)value, (double)below);
}
static bool te__param_group_ok(te_ctx *te, const te__opt_class *cls, const te_param_group *g, int index) {
    char name[48];
    if (!g->pattern == !g->params || (g->params && g->num_params < 1))
        return te__not_ok(
            te, TE_ERR_INVALID,
            "%s: groups[%d] has pattern %s%.100s%s and %s of %d; a pattern of paths, or a list of parameters, "
            "says which ones are of the group",
            cls->create, index, g->pattern ? "\"" : "", g->pattern ? g->pattern : "NULL", g->pattern ? "\"" : "",
            g->params ? "params" : "no params", g->num_params);
    if (g->weight_decay != 0.0f && g->no_weight_decay)
        return te__not_ok(te, TE_ERR_INVALID,
                          "%s: groups[%d] has weight_decay %g and no_weight_decay; leave one of them out", cls->create,
                          index, (double)g->weight_decay);
    if (!cls->has_betas && (g->beta1 != 0.0f || g->beta2 != 0.0f || g->eps != 0.0f))
        return te__not_ok(te, TE_ERR_INVALID,
                          "%s: groups[%d] has beta1 %g, beta2 %g, eps %g, which Adam alone reads; leave them 0",
                          cls->create, index, (double)g->beta1, (double)g->beta2, (double)g->eps);
#define TE__GROUP_IN_RANGE(field, below)                        \
    (snprintf(name, sizeof(name), "groups[%d]." #field, index), \
     te__opt_in_range(te, cls->create, name, g->field, below))
    return TE__GROUP_IN_RANGE(lr, FLT_MAX) && TE__GROUP_IN_RANGE(weight_decay, FLT_MAX) &&
           TE__GROUP_IN_RANGE(beta1, 1.0f) && TE__GROUP_IN_RANGE(beta2, 1.0f) && TE__GROUP_IN_RANGE(eps, FLT_MAX);
#undef TE__GROUP_IN_RANGE
}

/* Makes the groups of an optimizer. Group 0 gets `usual`, the hyperparameters that the optimizer's desc gives for
 * parameters without a group. groups[i] becomes group i + 1. */
static bool te__groups_open(te_optimizer *opt, const te_param_group *groups, int n, const te__opt_group *usual) {
    te_ctx *te = opt->te;
    int i;
    if (n < 0 || n > TE_MAX_PARAM_GROUPS || (n > 0 && !groups))
        return te__not_ok(te, TE_ERR_INVALID, "%s: groups is %s and num_groups %d; 0 to %d are possible",
                          opt->cls->create, groups ? "given" : "NULL", n, (int)TE_MAX_PARAM_GROUPS);
    opt->groups = (te__opt_group *)te__alloc_zero(te, (size_t)(n + 1) * sizeof(te__opt_group));
    if (!opt->groups) return false;
    opt->num_groups = n + 1;
    opt->groups[0] = *usual;
    for (i = 0; i < n; i++) {
        const te_param_group *g = &groups[i];
        te__opt_group *own = &opt->groups[i + 1];
        if (!te__param_group_ok(te, opt->cls, g, i)) return false;
        own->lr = g->lr;
        own->own_lr = g->lr != 0.0f;
        own->beta1 = g->beta1 != 0.0f ? g->beta1 : usual->beta1;
        own->beta2 = g->beta2 != 0.0f ? g->beta2 : usual->beta2;
        own->eps = g->eps != 0.0f ? g->eps : usual->eps;
        own->weight_decay = g->no_weight_decay ? 0.0f : g->weight_decay != 0.0f ? g->weight_decay : usual->weight_decay;
    }
    return true;
}
/* Puts each parameter into the first group that names it. A group that gets no parameter is an error. */
static bool te__groups_share(te_optimizer *opt, const te_param_group *groups) {
    int g, i, k;
    for (g = 1; g < opt->num_groups; g++) {
        const te_param_group *from = &groups[g - 1];
        int named = 0, took = 0;
        for (i = 0; i < opt->num_params; i++) {
            te__opt_param *p = &opt->params[i];
            if (!te__group_takes(from, p->param, p->path)) continue;
            named++;
            if (p->group != 0) continue;
            p->group = g;
            took++;
        }
        for (k = 0; from->params && k < from->num_params; k++)
            for (i = 0; i <= opt->num_params; i++) {
                if (i < opt->num_params && opt->params[i].param != from->params[k]) continue;
                if (i < opt->num_params) break;
                return te__not_ok(
                    opt->te, TE_ERR_INVALID,
                    "%s: groups[%d].params[%d] is %s; a parameter of the module that requires a gradient is needed",
                    opt->cls->create, g - 1, k, from->params[k] ? "none of its parameters" : "NULL");
            }
        if (took > 0) continue;
        return te__not_ok(
            opt->te, TE_ERR_INVALID,
            "%s: groups[%d] (%s%.100s%s) has no parameter%s; a group takes those that no group before it has taken",
            opt->cls->create, g - 1, from->pattern ? "\"" : "", from->pattern ? from->pattern : "a list",
            from->pattern ? "\"" : "", named ? " of its own" : "");
    }
    return true;
}

static float te__group_lr(const te_optimizer *opt, int g) {
    return opt->groups[g].own_lr ? opt->groups[g].lr : opt->options.lr;
}
static bool te__opt_decays(const te_optimizer *opt) {
    int g;
    for (g = 0; g < opt->num_groups; g++)
        if (opt->groups[g].weight_decay > 0.0f) return true;
    return false;
}

/* te__opt_numbers_count returns how many numbers change with each step. te__opt_numbers writes them: a learning rate
 * for each group, two bias corrections for each group, the step. */
static int te__opt_numbers_count(const te_optimizer *opt) { return 3 * opt->num_groups + 1; }
static void te__opt_numbers(const te_optimizer *opt, int64_t step, float *out) {
    int g;
    for (g = 0; g < opt->num_groups; g++) {
        const te__opt_group *from = &opt->groups[g];
        float *pair = out + opt->num_groups + 2 * g;
        out[g] = te__group_lr(opt, g);
        pair[0] = opt->cls->has_betas ? te__adam_unbias(opt->options.no_bias_correction, from->beta1, step) : 1.0f;
        pair[1] = opt->cls->has_betas ? te__adam_unbias(opt->options.no_bias_correction, from->beta2, step) : 1.0f;
    }
    out[3 * opt->num_groups] = (float)step;
}

/* Returns the group with the user's index `group`. Index -1 stands for group 0, which has the hyperparameters
 * of the optimizer's desc. */
static te__opt_group *te__param_group_at(const te_optimizer *opt, int group, const char *function) {
    if (opt && group >= -1 && group + 1 < opt->num_groups) return &opt->groups[group + 1];
    if (opt)
        te__fail(opt->te, TE_ERR_INVALID, "%s: group %d of %d; they count from 0", function, group,
                 opt->num_groups - 1);
    return NULL;
}
TE_API void te_optimizer_set_group_lr(te_optimizer *opt, int group, float lr) {
    te__opt_group *g = te__param_group_at(opt, group, "te_optimizer_set_group_lr");
    if (!g || !te__opt_in_range(opt->te, "te_optimizer_set_group_lr", "lr", lr, FLT_MAX)) return;
    if (group < 0) opt->options.lr = lr;
    else g->lr = lr;
    g->own_lr = group >= 0;
}
TE_API float te_optimizer_group_lr(const te_optimizer *opt, int group) {
    return te__param_group_at(opt, group, "te_optimizer_group_lr") ? te__group_lr(opt, group + 1) : 0.0f;
}
TE_API int te_optimizer_num_groups(const te_optimizer *opt) { return opt ? opt->num_groups - 1 : 0; }
