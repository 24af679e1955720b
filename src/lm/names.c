/* lm/names.c: applies the rules of a model family (te__lm_rule) to the names and values of tensors: from those of a
 * file to parameters, and back. This file must not depend on files on disk. */

enum { TE__LM_NAME = 512, TE__LM_FILE = 0, TE__LM_MODEL = 1 };

/* A group is a set of tensors of a file, together with the parameters that one rule makes of them. */
typedef struct te__lm_group {
    const te__lm_rule *rule;
    char text[TE__LM_NAME]; /* the text that "@" stands for */
    int64_t number;         /* the number that "*" stands for if both sides have "*" */
    int64_t first;          /* the first number of this rank's parameters, if only `model` has "*" (experts) */
    int count[2];           /* count[TE__LM_FILE]: number of tensors of the file; count[TE__LM_MODEL]: number of
                             * parameters */
    bool stacked[2];        /* stacked[TE__LM_FILE]: only `file` of the rule has "*"; stacked[TE__LM_MODEL]: only
                             * `model` has "*" */
} te__lm_group;

/* ---- patterns ---- */

/* Returns true if `name` matches the pattern. Then *from and *length give the text that "@" stands for, and *number is
 * the number that "*" stands for. */
static bool te__lm_matches(const char *pattern, const char *name, const char **from, size_t *length, int64_t *number) {
    for (; *pattern && *pattern != '@' && *pattern != '*'; pattern++, name++)
        if (*pattern != *name) return false;
    if (!*pattern) return !*name;
    if (*pattern == '*') {
        const char *digits = name;
        for (*number = 0; *name >= '0' && *name <= '9' && *number < INT_MAX / 10; name++)
            *number = *number * 10 + (*name - '0');
        /* rejects leading zeros, so that each number has only one name */
        return name > digits && !(digits[0] == '0' && name > digits + 1) &&
               te__lm_matches(pattern + 1, name, from, length, number);
    }
    *from = name; /* a pattern has one "@" at most */
    for (*length = 1; name[*length - 1]; ++*length)
        if (te__lm_matches(pattern + 1, name + *length, from, length, number)) return true;
    return false;
}
/* Writes the pattern to `name`, with "@" replaced by `text` and "*" replaced by `number`. Returns false if the name is
 * too long. */
static bool te__lm_expand(const char *pattern, const char *text, int64_t number, char *name) {
    size_t n = 0;
    for (; *pattern && n < TE__LM_NAME; pattern++)
        if (*pattern == '@') n += (size_t)snprintf(name + n, TE__LM_NAME - n, "%s", text);
        else if (*pattern == '*') n += (size_t)snprintf(name + n, TE__LM_NAME - n, "%lld", (long long)number);
        else name[n++] = *pattern;
    if (n >= TE__LM_NAME) return false;
    name[n] = 0;
    return true;
}
static int te__lm_patterns(const char *const *patterns) {
    int n = 0;
    while (n < 3 && patterns[n]) n++;
    return n;
}
/* Writes the name of tensor i of a group to `name`. `side` is TE__LM_FILE or TE__LM_MODEL. Returns false if the name is
 * too long. */
static bool te__lm_member(const te__lm_group *g, int side, int i, char *name) {
    const char *const *patterns = side == TE__LM_FILE ? g->rule->file : g->rule->model;
    const int n = te__lm_patterns(patterns);
    const int64_t first = side == TE__LM_MODEL ? g->first : 0;
    return te__lm_expand(patterns[i % n], g->text, g->stacked[side] ? first + i / n : g->number, name);
}

/* ---- groups ---- */

static te_tensor *te__lm_parameter(te_module *m, const char *name) {
    const char *dot = strrchr(name, '.');
    char path[TE__LM_NAME];
    const size_t n = dot ? (size_t)(dot - name) : 0;
    if (!dot || n >= sizeof(path)) return NULL;
    memcpy(path, name, n);
    path[n] = 0;
    return te_module_parameter(te_module_find(m, path), dot + 1);
}
static te_tensor *te__lm_model_tensor(const te__lm_group *g, te_module *m, int i) {
    char name[TE__LM_NAME];
    return te__lm_member(g, TE__LM_MODEL, i, name) ? te__lm_parameter(m, name) : NULL;
}
/* Fills *g with the group of parameter `name` of m. Returns the index of the parameter in the group. If the index is
 * not 0, g->count is incomplete. */
static int te__lm_group_of(const te__lm_rule *rules, te_module *m, const char *name, te__lm_group *g) {
    const char *from = "";
    size_t length = 0;
    int p = 0, files, models, place;
    bool stars[2];
    memset(g, 0, sizeof(*g));
    for (g->rule = rules;; g->rule++) {
        for (p = 0; p < 3 && g->rule->model[p]; p++)
            if (te__lm_matches(g->rule->model[p], name, &from, &length, &g->number)) break;
        if (p < 3 && g->rule->model[p]) break;
    }
    snprintf(g->text, sizeof(g->text), "%.*s", (int)te__min(length, sizeof(g->text) - 1), from);
    stars[TE__LM_FILE] = strchr(g->rule->file[0], '*') != NULL;
    stars[TE__LM_MODEL] = strchr(g->rule->model[0], '*') != NULL;
    g->stacked[TE__LM_FILE] = stars[TE__LM_FILE] && !stars[TE__LM_MODEL];
    g->stacked[TE__LM_MODEL] = stars[TE__LM_MODEL] && !stars[TE__LM_FILE];
    files = g->count[TE__LM_FILE] = te__lm_patterns(g->rule->file);
    models = g->count[TE__LM_MODEL] = te__lm_patterns(g->rule->model);
    for (g->first = g->stacked[TE__LM_MODEL] ? g->number : 0; g->first > 0; g->first--) {
        char before[TE__LM_NAME];
        if (!te__lm_expand(g->rule->model[0], g->text, g->first - 1, before) || !te__lm_parameter(m, before)) break;
    }
    place = p + (g->stacked[TE__LM_MODEL] ? (int)(g->number - g->first) * models : 0);
    if (place > 0) return place;
    if (g->stacked[TE__LM_FILE]) g->count[TE__LM_FILE] = (int)te__lm_parameter(m, name)->shape[0] * files;
    while (g->stacked[TE__LM_MODEL] && te__lm_model_tensor(g, m, g->count[TE__LM_MODEL]))
        g->count[TE__LM_MODEL] += models;
    return 0;
}
/* Checks that the model still has all parameters of the group, because the caller may have removed modules. */
static bool te__lm_is_complete(const te__lm_group *g, te_module *m) {
    char name[TE__LM_NAME];
    int i;
    for (i = 0; i < g->count[TE__LM_MODEL]; i++) {
        if (te__lm_member(g, TE__LM_MODEL, i, name) && te__lm_parameter(m, name)) continue;
        return te__not_ok(
            m->te, TE_ERR_STATE,
            "the model has no parameter \"%.120s\" any more, and its file has it in one tensor with others", name);
    }
    return true;
}
/* The parts of a parameter that ranks have; NULL: each has the whole. */
static const te__split *te__lm_split(const te_tensor *x) { return x->split && x->split->size > 1 ? x->split : NULL; }
/* The number of ranks among which the experts of a group are divided. */
static int te__lm_expert_ranks(const te__lm_group *g, te_module *m) {
    const te_tensor *x = te__lm_model_tensor(g, m, 0);
    const te__split *s = x ? te__lm_split(x) : NULL;
    return s && s->dim < 0 ? s->size : 1;
}
/* The size of dimension `dim` of a parameter as a matrix, on all ranks together. */
static int64_t te__lm_size(const te_tensor *x, int dim) {
    const te__split *s = te__lm_split(x);
    return (dim ? te__cols(x) : te__rows(x)) * (s && s->dim == dim ? s->size : 1);
}
/* Returns true if the group is a single tensor of the file and a single parameter, with the same shape. */
static bool te__lm_is_whole(const te__lm_group *g) {
    return g->count[TE__LM_FILE] == 1 && g->count[TE__LM_MODEL] == 1 && !g->stacked[TE__LM_FILE] &&
           !g->stacked[TE__LM_MODEL] && !g->rule->transposed;
}
/* Returns the total number of rows of all parameters of the group, on all ranks together. */
static int64_t te__lm_group_rows(const te__lm_group *g, te_module *m) {
    int64_t rows = 0;
    int i;
    for (i = 0; i < g->count[TE__LM_MODEL]; i++) rows += te__lm_size(te__lm_model_tensor(g, m, i), 0);
    return rows * (g->stacked[TE__LM_MODEL] ? te__lm_expert_ranks(g, m) : 1);
}
/* Writes to `shape` the shape that each file tensor of the group has. Returns the number of dimensions. */
static int te__lm_file_shape(const te__lm_group *g, te_module *m, int64_t *shape) {
    const te_tensor *first = te__lm_model_tensor(g, m, 0);
    int ndim = 0;
    if (te__lm_is_whole(g)) {
        memcpy(shape, first->shape, (size_t)first->ndim * sizeof(int64_t));
        if (te__lm_split(first) && first->split->dim >= 0) shape[first->split->dim] *= first->split->size;
        return first->ndim;
    }
    if (g->stacked[TE__LM_MODEL])
        shape[ndim++] = g->count[TE__LM_MODEL] / te__lm_patterns(g->rule->model) * te__lm_expert_ranks(g, m);
    shape[ndim + g->rule->transposed] =
        te__lm_group_rows(g, m) / g->count[TE__LM_FILE] / (g->stacked[TE__LM_MODEL] ? shape[0] : 1);
    shape[ndim + !g->rule->transposed] = te__lm_size(first, 1);
    return ndim + 2;
}
/* Writes to `file` the name that parameter `name` has in the file. The parameter must correspond to one whole tensor of
 * the file. */
static bool te__lm_file_name(const te__lm_rule *rules, const char *name, char *file) {
    const char *from = "";
    char text[TE__LM_NAME];
    size_t length = 0;
    int64_t number = 0;
    while (!te__lm_matches(rules->model[0], name, &from, &length, &number)) rules++;
    snprintf(text, sizeof(text), "%.*s", (int)te__min(length, sizeof(text) - 1), from);
    return te__lm_expand(rules->file[0], text, number, file);
}
/* Returns 1 if any of `rules` except the last, "@", matches the tensor name `file`, otherwise 0. */
static int te__lm_knows(const te__lm_rule *rules, const char *file) {
    const char *from;
    size_t length;
    int64_t number;
    int p;
    for (; strcmp(rules->file[0], "@") != 0; rules++)
        for (p = 0; p < 3 && rules->file[p]; p++)
            if (te__lm_matches(rules->file[p], file, &from, &length, &number)) return 1;
    return 0;
}

/* ---- values ---- */

/* Concatenates the rows of `n` matrices of the same dtype. Returns NULL if one of them is NULL. */
static te_tensor *te__lm_joined(te_tensor **parts, int n) {
    int i;
    for (i = 0; i < n; i++)
        if (!parts[i]) return NULL;
    return n == 1 ? parts[0] : te_concat(parts, n, 0);
}
/* Returns a tensor of the file as a matrix [rows, cols]. Transposes it first if `transposed` is set. */
static te_tensor *te__lm_matrix(te_tensor *x, bool transposed) {
    if (transposed) x = te_tensor_contiguous(te_tensor_transpose(x, -2, -1));
    return x ? te__view_2d(x, te__rows(x), te__cols(x)) : NULL;
}
/* Casts x to the parameter's dtype, views it in the parameter's shape, and copies it to the parameter. A quantized
 * parameter is quantized again. */
static te_result te__lm_give(te_tensor *parameter, te_tensor *x) {
    const te__split *s = te__lm_split(parameter);
    te_tensor *value;
    if (x && s && s->dim >= 0) { /* this rank's part of it */
        const int64_t own = parameter->shape[s->dim];
        if (x->ndim != parameter->ndim && s->dim == 0) x = te_tensor_view(x, 1, &x->shape[0]);
        x = te_tensor_contiguous(te_tensor_narrow(x, s->dim, te__group_rank(s->group) * own, own));
    }
    value = te_tensor_cast(x, parameter->dtype);
    if (value && value->ndim != parameter->ndim) value = te_tensor_view(value, parameter->ndim, parameter->shape);
    if (!value) return te_error_code(parameter->te);
    return parameter->quantized ? te__primary_start(parameter, value) : te_tensor_copy(parameter, value);
}
/* Sets the parameters of a group. `parts` has all file tensors of the group; the function overwrites its entries. */
static te_result te__lm_take_in(const te__lm_group *g, te_module *m, te_tensor **parts) {
    const te_dtype dtype = te__lm_model_tensor(g, m, 0)->dtype;
    te_tensor *all;
    te_result result = TE_OK;
    int64_t at = 0;
    int i;
    if (te__lm_is_whole(g)) return te__lm_give(te__lm_model_tensor(g, m, 0), parts[0]);
    if (g->stacked[TE__LM_MODEL]) at = g->first * (te__lm_group_rows(g, m) / te__lm_expert_ranks(g, m) /
                                                   (g->count[TE__LM_MODEL] / te__lm_patterns(g->rule->model)));
    for (i = 0; i < g->count[TE__LM_FILE]; i++)
        parts[i] = te__lm_matrix(te_tensor_cast(parts[i], dtype), g->rule->transposed);
    all = te__lm_joined(parts, g->count[TE__LM_FILE]);
    for (i = 0; i < g->count[TE__LM_MODEL] && all && result == TE_OK; i++) {
        te_tensor *x = te__lm_model_tensor(g, m, i);
        result = te__lm_give(x, te_tensor_narrow(all, 0, at, te__lm_size(x, 0)));
        at += te__lm_size(x, 0);
    }
    return all ? result : te_error_code(m->te);
}
/* The inverse of te__lm_take_in: computes the file tensors of a group from its parameters, and stores them in `parts`,
 * which has count[TE__LM_FILE] entries. Ranks that share parameters gather them: all must call it. */
static te_result te__lm_put_out(const te__lm_group *g, te_module *m, te_tensor **parts) {
    te_ctx *te = m->te;
    const int n = g->count[TE__LM_MODEL], files = g->count[TE__LM_FILE];
    te_tensor **members = (te_tensor **)te__alloc_zero(te, (size_t)n * sizeof(te_tensor *)), *all = NULL;
    int64_t shape[TE_MAX_DIMS];
    const int ndim = te__lm_file_shape(g, m, shape);
    const te__split *split;
    int i;
    for (i = 0; i < n && members; i++) {
        members[i] = te__lm_model_tensor(g, m, i);
        split = te__lm_split(members[i]);
        if (members[i]->quantized) members[i] = te_dequantize(members[i], TE_DTYPE_NONE);
        if (split && split->dim >= 0) members[i] = te__split_whole(members[i], split);
        if (!te__lm_is_whole(g)) members[i] = te__lm_matrix(members[i], false);
        if (!members[i]) break; /* the other ranks have failed too, and gather no more */
    }
    if (members) all = te__lm_joined(members, n);
    if (g->stacked[TE__LM_MODEL] && te__lm_expert_ranks(g, m) > 1)
        all = te__gather(te__lm_model_tensor(g, m, 0)->split->group, all);
    te__free(te, members);
    for (i = 0; i < files && all; i++) {
        te_tensor *x = all;
        if (te__lm_is_whole(g)) parts[i] = all;
        else {
            int64_t stored[TE_MAX_DIMS];
            memcpy(stored, shape, sizeof(stored));
            if (g->rule->transposed) {
                stored[ndim - 1] = shape[ndim - 2];
                stored[ndim - 2] = shape[ndim - 1];
            }
            if (files > 1) x = te_tensor_narrow(all, 0, i * (te__rows(all) / files), te__rows(all) / files);
            x = te_tensor_view(x, ndim, stored);
            parts[i] = g->rule->transposed ? te_tensor_contiguous(te_tensor_transpose(x, -2, -1)) : x;
        }
        if (!parts[i]) return te_error_code(te);
    }
    return all ? TE_OK : te_error_code(te);
}
