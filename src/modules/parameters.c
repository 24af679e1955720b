/* modules/parameters.c: allocates and initializes the parameters of modules, whole, sharded or quantized. This file
 * must not depend on what any class computes. */

/* A forward function looks up its parameters in each call, because te_module_add_parameter may have replaced one, for
 * example to tie weights. */

/* Sets m->rng_tracker to the random state `name`, or to NULL if `name` is NULL. Fails if there is no such random
 * state. */
static bool te__rng_open(te_module *m, const char *name) {
    const te__rng_tracker *t = name ? te__rng_tracker_find(m->te, name, m->cls->name) : NULL;
    m->rng_tracker = t ? t->name : NULL;
    return !name || t;
}
static te_result te__fork_begin(te_module *m) {
    return m->rng_tracker ? te_rng_fork_begin(m->te, m->rng_tracker) : TE_OK;
}
static void te__fork_end(te_module *m) {
    if (m->rng_tracker) te_rng_fork_end(m->te);
}

/* Initializes x, which is not quantized, with init_method, or with a normal distribution if there is no init_method. */
static te_result te__init_fill(te_tensor *x, const te_init *init) {
    te_op_random_args args = TE_ZERO;
    te__draw draw;
    te_result result;
    if (init->init_method) {
        x->te->tape.no_grad++;
        result = te__returned(x->te, init->init_method(init->user, x), "the init_method", x->name ? x->name : "weight");
        x->te->tape.no_grad--;
        if (result == TE_OK) result = x->te->error_code;
        /* if init_method has recorded an error itself, te__fail keeps that error */
        return result == TE_OK ? TE_OK
                               : te__fail(x->te, result, "the init_method of \"%s\" returned %s",
                                          x->name ? x->name : "weight", te_result_name(result));
    }
    args.dst = x;
    args.kind = TE_RANDOM_NORMAL;
    args.b = init->std > 0.0f ? init->std : 0.023f;
    draw = te__rng_draw(x->te, 1);
    args.seed = draw.seed;
    args.offset = draw.offset;
    args.rng = draw.rng;
    return te_op_random(x->te, &args);
}

/* Initializes a weight. Each rank draws the whole weight, so that the values do not depend on the number of ranks,
 * and the random states of all ranks stay equal. */
static te_result te__init_weight(te_module *m, te_tensor *x, const te_init *init, te_parallel_mode mode,
                                 const te__sharding *sharding) {
    te__parallel p = m->parallel;
    te__split split = te__split_of(&p, mode, sharding);
    te_tensor *plain, *whole;
    te_result result;
    int64_t shape[2];
    if (!x) return TE_ERR_STATE;
    if (init->no_init) return TE_OK;
    p.mode = p.size > 1 ? mode : TE_PARALLEL_NONE;
    if (p.mode && !p.group)
        return te__fail(m->te, TE_ERR_STATE,
                        "%s: its weights are shared by %d ranks (tp_size), and which of them this is, is not known; "
                        "call te_set_tensor_parallel_group",
                        m->name, p.size);
    te__frame_begin(x->te);
    plain = whole = x->quantized ? te__empty_like(x, x->dtype) : x;
    if (p.mode && plain) {
        shape[0] = x->shape[0] * (p.mode == TE_PARALLEL_COLUMN ? p.size : 1);
        shape[1] = x->shape[1] * (p.mode == TE_PARALLEL_ROW ? p.size : 1);
        whole = te_tensor_empty(x->te, x->dtype, 2, shape);
        if (whole && x->name) te_tensor_set_name(whole, x->name);
    }
    result = plain && whole ? te__fork_begin(m) : te_error_code(x->te);
    if (result == TE_OK) { /* a weight of this rank alone leaves out what other ranks draw for theirs */
        const te__split *own = !init->init_method && x->split && x->split->dim < 0 ? x->split : NULL;
        if (own) te__rng_draw(m->te, own->skip[0]);
        result = te__init_fill(whole, init);
        if (own) te__rng_draw(m->te, own->skip[1]);
        te__fork_end(m);
    }
    if (result == TE_OK && whole != plain) {
        x->te->tape.no_grad++;
        result = te__split_take(plain, whole, &split);
        x->te->tape.no_grad--;
    }
    if (result == TE_OK && x->quantized) result = te__primary_start(x, plain);
    te__frame_end(x->te, NULL, 0);
    return result;
}

/* Adds an uninitialised parameter, which reset_parameters fills. */
static void te__add_shaped(te_module *m, const char *name, te_dtype dtype, int ndim, const int64_t *shape) {
    te__frame_begin(m->te);
    te_module_add_parameter(
        m, name, m->meta ? te_tensor_describe(m->te, dtype, ndim, shape) : te_tensor_empty(m->te, dtype, ndim, shape));
    te__frame_end(m->te, NULL, 0);
}
/* Adds a matrix, or a vector if cols is 0. */
static void te__add_weight(te_module *m, const char *name, te_dtype dtype, int64_t rows, int64_t cols) {
    const int64_t shape[2] = {rows, cols};
    te__add_shaped(m, name, dtype ? dtype : TE_BF16, cols ? 2 : 1, shape);
}
/* Sets the device of the parameters that are added later. If their group of ranks is not known yet,
 * te_set_tensor_parallel_group gives them memory. */
static void te__params_on(te_module *m, te_params_device device) {
    m->awaits_group = device == TE_PARAMS_DEFAULT && m->parallel.size > 1 && !m->parallel.group;
    m->meta = device == TE_PARAMS_META || m->awaits_group;
    if ((int)device < 0 || device > TE_PARAMS_META)
        te__fail(m->te, TE_ERR_INVALID, "%s: device %d; TE_PARAMS_DEFAULT (0) and TE_PARAMS_META (1) are possible",
                 m->cls->name, (int)device);
}

/* Adds the weight of a GEMM. */
static void te__add_product_weight(te_module *m, const char *name, te_dtype dtype, int64_t rows, int64_t cols) {
    int before = m->num_entries;
    te__add_weight(m, name, dtype, rows, cols);
    if (m->num_entries > before) m->entries[before].product_weight = true;
}

/* Replaces the weights of GEMMs by quantized tensors. Does nothing outside of te_quantized_model_init_begin and
 * te_quantized_model_init_end. */
static te_result te__quantize_weights(te_module *m) {
    char path[sizeof(m->te->module_path)];
    te_result result = TE_OK;
    int i, gemm = 0;
    if (!te__quantizes_weights(m->te)) return TE_OK;
    te__making_path(m, path, sizeof(path));
    te__frame_begin(m->te);
    for (i = 0; i < m->num_entries && result == TE_OK; i++) {
        te_tensor *y;
        if (!m->entries[i].product_weight) continue;
        if (m->entries[i].tensor->quantized) { /* quantized by an earlier call that failed later */
            gemm++;
            continue;
        }
        y = te__primary_create(m->entries[i].tensor, m->cls->name, path, gemm++);
        result = y ? TE_OK : te_error_code(m->te);
        if (y && y != m->entries[i].tensor) {
            const bool trained = m->entries[i].tensor->requires_grad;
            te__split_same(y, m->entries[i].tensor);
            y->sequence_parallel = m->entries[i].tensor->sequence_parallel;
            te_tensor *main_grad = te_tensor_retain(te_tensor_main_grad(m->entries[i].tensor));
            te_module_add_parameter(m, m->entries[i].name, y);
            te_tensor_set_requires_grad(y, trained);
            if (main_grad) result = te_tensor_set_main_grad(y, main_grad);
            te_tensor_release(main_grad);
        }
    }
    te__frame_end(m->te, NULL, 0);
    return result;
}

/* Runs the class's reset_parameters, if there is one. */
static te_result te__class_reset(te_module *m) {
    return m->cls->reset_parameters ? te__returned(m->te, m->cls->reset_parameters(m), "reset_parameters", m->name)
                                    : TE_OK;
}
/* Initializes the parameters of a module for the first time. */
static te_result te__start_parameters(te_module *m) {
    te_result result = m->te->error_code;
    if (result == TE_OK) result = te__class_reset(m);
    if (result == TE_OK) result = te__quantize_weights(m);
    return result == TE_OK ? m->te->error_code : result;
}

/* Ends the creation of a module. On any failure destroys the module and returns NULL. */
static te_module *te__module_built(te_module *m) {
    if (!m) return NULL;
    if (m->te->error_code == TE_OK && (m->meta || te__start_parameters(m) == TE_OK)) {
        m->maker = NULL;
        m->built_in = true;
        return m;
    }
    te__rng_back(m->te, m->rng);
    te_module_destroy(m);
    return NULL;
}

/* Returns how many entries of m, from `first` on, share one block of memory. Sets *bytes to the size of the block. Only
 * `stacked` entries with the same dtype and number of dimensions share a block. */
static int te__stack_of(const te_module *m, int first, size_t *bytes) {
    const te_tensor *x = m->entries[first].tensor;
    int i;
    *bytes = 0;
    for (i = first; i < m->num_entries; i++) {
        const te_tensor *y = m->entries[i].tensor;
        if (i > first && !(m->entries[first].stacked && m->entries[i].stacked && y->dtype == x->dtype &&
                           y->ndim == x->ndim && !y->buffer && !y->quantized))
            break;
        *bytes += te__shape_bytes(y->dtype, y->ndim, y->shape);
    }
    return i - first;
}
static te_result te__give_memory(te_module *m) {
    te_result result = TE_OK;
    int i, k, n;
    for (i = 0; i < m->num_entries && result == TE_OK; i += n) {
        te__buffer *b;
        size_t bytes, at = 0;
        n = 1;
        if (m->entries[i].tensor->buffer || m->entries[i].tensor->quantized) continue;
        n = te__stack_of(m, i, &bytes);
        b = te__buffer_create(m->te, bytes);
        if (!b) result = te_error_code(m->te);
        for (k = i; b && k < i + n; k++) {
            te_tensor *x = m->entries[k].tensor;
            x->buffer = b;
            x->offset = (int64_t)at;
            if (k > i) b->refs++;
            at += te__shape_bytes(x->dtype, x->ndim, x->shape);
        }
    }
    return result;
}

/* Returns the tensor that has the value of x: x itself, or the codes of a quantized one. */
static const te_tensor *te__first_part(te_tensor *x) {
    te_tensor *part[TE__MAX_PARTS];
    return te__parts(x, part) > 0 && part[0] ? part[0] : x;
}

/* Initializes the parameters of m, but not those of its children. Allocates parameters that have no memory. */
static te_result te__reset_own(te_module *m) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < m->num_entries && result == TE_OK; i++)
        if (m->entries[i].tensor->moves && !te__data(te__first_part(m->entries[i].tensor)))
            result = te__fail(m->te, TE_ERR_STATE, "te_module_reset_parameters: \"%s\" of \"%s\" %s",
                              m->entries[i].name, m->name, te__no_memory_why(m->entries[i].tensor));
    if (result == TE_OK && m->meta) result = te__give_memory(m);
    if (result == TE_OK && m->meta) result = te__start_parameters(m);
    else if (result == TE_OK) result = te__class_reset(m);
    if (result == TE_OK) m->meta = m->awaits_group = false;
    return result;
}
static te_result te__reset_tree(te_module *m) {
    te_result result = te__reset_own(m);
    int i;
    for (i = 0; i < m->num_children && result == TE_OK; i++) result = te__reset_tree(m->children[i]);
    return result;
}
/* Makes the context's device current and calls reset(m). On failure restores the random state. */
static te_result te__reset_by(te_module *m, te_result (*reset)(te_module *m), const char *who) {
    te_ctx *te = m->te;
    te__rng_state random;
    te_result result;
    bool entered;
    if (te->error_code != TE_OK) return te->error_code;
    if (te->capture) return te__refuse_capture(te, who, "give parameters their values before te_graph_begin");
    result = te__tree_whole(m);
    if (result == TE_OK) result = te__device_enter(te, &entered);
    if (result != TE_OK) return result;
    random = te__rng_now(te);
    result = reset(m);
    if (result == TE_OK) result = te->error_code;
    if (result != TE_OK) {
        /* if the class has recorded an error itself, te__fail keeps that error */
        te__fail(te, result, "%s: the function of a class returned %s", who, te_result_name(result));
        te__rng_back(te, random);
    }
    te__device_leave(te, entered);
    return result;
}
TE_API te_result te_module_reset_parameters(te_module *m) {
    return m ? te__reset_by(m, te__reset_tree, "te_module_reset_parameters") : TE_ERR_STATE;
}

/* ---- tensor parallelism ---- */

static te_result te__group_joined(te_module *m) {
    te_result result = m->awaits_group ? te__reset_own(m) : TE_OK;
    int i;
    for (i = 0; i < m->num_children && result == TE_OK; i++) result = te__group_joined(m->children[i]);
    return result;
}
/* Sets `group` in each tensor-parallel module of the tree m. If `check` is true, only checks the number of ranks. */
static te_result te__group_set(te_module *m, te_group *group, bool check) {
    te_result result = TE_OK;
    char path[256];
    int i;
    if (m->parallel.size > 1 && check && m->parallel.size != te__group_size(group))
        return te__fail(m->te, TE_ERR_INVALID,
                        "te_set_tensor_parallel_group: \"%s\" was created with tp_size %d and the group has %d ranks; "
                        "they must be equal",
                        te_module_path(m, path, sizeof(path)), m->parallel.size, te__group_size(group));
    if (m->parallel.size > 1 && !check) {
        m->parallel.group = group;
        m->met = 0;
        for (i = 0; i < m->num_entries; i++)
            if (m->entries[i].tensor->split) m->entries[i].tensor->split->group = group;
    }
    for (i = 0; i < m->num_children && result == TE_OK; i++) result = te__group_set(m->children[i], group, check);
    return result;
}
TE_API te_result te_set_tensor_parallel_group(te_module *m, te_group *group) {
    te_result result;
    if (!m) return TE_ERR_STATE;
    result = te__group_allowed(m->te, group, "te_set_tensor_parallel_group", "the group");
    if (result == TE_OK) result = te__group_set(m, group, true);
    if (result == TE_OK) result = te__group_set(m, group, false);
    return result == TE_OK ? te__reset_by(m, te__group_joined, "te_set_tensor_parallel_group") : result;
}

TE_API bool te_tensor_sequence_parallel(const te_tensor *x) { return x && x->sequence_parallel; }
TE_API te_tensor *te_tensor_set_sequence_parallel(te_tensor *x, bool on) {
    if (x) x->sequence_parallel = on;
    return x;
}

static bool te__mark_by_tokens(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) te_tensor_set_sequence_parallel(x, true);
    return true;
}
/* Marks all parameters below m, which may be NULL: each rank has their gradients by its own tokens alone. */
static void te__takes_own_tokens(te_module *m) {
    if (m) te_module_visit_tensors(m, te__mark_by_tokens, NULL);
}

/* Checks `o`. Copies the options to m->parallel, unless there is one rank or `mode` is TE_PARALLEL_NONE. Returns false
 * if an option is invalid. */
static bool te__parallel_open(te_module *m, const te_parallel_options *o, te_parallel_mode mode) {
    te__parallel *p = &m->parallel;
    te_ctx *te = m->te;
    int size = o->tp_group ? te__group_size(o->tp_group) : o->tp_size;
    if (o->tp_size < 0 || (o->tp_group && o->tp_size > 1 && o->tp_size != size))
        return te__not_ok(
            te, TE_ERR_INVALID,
            "%s: tp_size %d and a tp_group of %d rank%s; leave tp_size 0 where a group is given, or give the "
            "number of ranks",
            m->cls->name, o->tp_size, te__group_size(o->tp_group), te__group_size(o->tp_group) == 1 ? "" : "s");
    if (te__group_allowed(te, o->tp_group, m->cls->name, "tp_group") != TE_OK ||
        te__ranks_allowed(te, size, m->cls->name, "tp_size") != TE_OK)
        return false;
    if ((int)o->parallel_mode < 0 || o->parallel_mode > TE_PARALLEL_ROW || (int)o->symmetric_ar_type < 0 ||
        o->symmetric_ar_type > TE_SYMMETRIC_AR_ONE_SHOT)
        return te__not_ok(
            te, TE_ERR_INVALID,
            "%s: parallel_mode %d, symmetric_ar_type %d; TE_PARALLEL_NONE to TE_PARALLEL_ROW (0 to 2) and "
            "TE_SYMMETRIC_AR_NONE to "
            "TE_SYMMETRIC_AR_ONE_SHOT (0 to 3) are possible",
            m->cls->name, (int)o->parallel_mode, (int)o->symmetric_ar_type);
    p->mode = mode;
    if (mode == TE_PARALLEL_NONE || size < 2) return true;
    p->group = o->tp_group;
    p->size = size;
    p->sequence = o->sequence_parallel;
    p->beside = (o->ub_overlap_ag ? TE__UB_OVERLAP_AG : 0) | (o->ub_overlap_rs ? TE__UB_OVERLAP_RS : 0) |
                (o->ub_overlap_rs_dgrad ? TE__UB_OVERLAP_RS_DGRAD : 0) | (o->ub_bulk_dgrad ? TE__UB_BULK_DGRAD : 0) |
                (o->ub_bulk_wgrad ? TE__UB_BULK_WGRAD : 0);
    return true;
}
/* Checks that the ranks divide `size` evenly. */
static bool te__divides(te_module *m, const char *name, int64_t size) {
    if (m->parallel.size < 2 || size % m->parallel.size == 0) return true;
    return te__not_ok(m->te, TE_ERR_INVALID, "%s: %s is %lld and tp_size %d; the ranks must divide it", m->cls->name,
                      name, (long long)size, m->parallel.size);
}
static int64_t te__per_rank(const te_module *m, int64_t size) {
    return m->parallel.size > 1 ? size / m->parallel.size : size;
}
/* Checks that m has a group if ranks share its work. */
static te_result te__parallel_ready(const te_module *m) {
    if (m->parallel.size < 2 || m->parallel.group) return TE_OK;
    return te__fail(m->te, TE_ERR_STATE,
                    "%s: %d ranks share its work (tp_size) and it has no group; call te_set_tensor_parallel_group, or "
                    "create it with tp_group",
                    m->cls->name, m->parallel.size);
}
/* Notes which part of a parameter this rank of a tensor-parallel module has. Rows of `sharding` (NULL: one block) are
 * divided, or the columns (TE_PARALLEL_ROW), and nothing for TE_PARALLEL_NONE. */
static void te__split_mark(te_module *m, te_tensor *x, te_parallel_mode mode, const te__sharding *sharding) {
    if (!x || m->parallel.size < 2 || mode == TE_PARALLEL_NONE) return;
    te__free(m->te, x->split);
    x->split = (te__split *)te__alloc_zero(m->te, sizeof(te__split));
    if (x->split) *x->split = te__split_of(&m->parallel, mode, sharding);
}
/* Returns m's parallelism with the mode of one product. */
static te__parallel te__parallel_as(const te_module *m, te_parallel_mode mode) {
    te__parallel p = m->parallel;
    p.mode = mode;
    p.sequence = p.sequence && !te__functions_of(m->te)->whole_rows;
    if (mode == TE_PARALLEL_COLUMN && te__functions_of(m->te)->input_sums) p.mode = TE_PARALLEL_NONE;
    return p;
}
/* ---- the weight and the bias of a GEMM, each stored as one parameter or split into several ---- */

typedef struct te__product_params {
    int count;           /* number of weights, and of biases */
    int weights, biases; /* indices of the first weight and the first bias in m->entries, the module's parameters and
                          * buffers; `biases` is -1 if there are no biases */
} te__product_params;

/* Adds one parameter for each part of `split`. The parameters are consecutive row ranges of one tensor, so te__join
 * returns this tensor without a copy. */
static void te__add_parts(te_module *m, const te_parameters_split *split, const int64_t *rows, const char *kind,
                          te_dtype dtype, int64_t cols) {
    int64_t at = 0;
    te_tensor *whole = NULL;
    int i, before, ndim = cols ? 2 : 1;
    int64_t shape[2] = {0, cols};
    for (i = 0; i < split->count; i++) shape[0] += rows[i];
    te__frame_begin(m->te);
    if (!m->meta) whole = te_tensor_empty(m->te, dtype, ndim, shape);
    for (i = 0; i < split->count; i++) {
        size_t n = strlen(split->names[i]);
        char name[256];
        while (n > 0 && split->names[i][n - 1] == '_') n--; /* "query" and "query_" both give query_weight */
        snprintf(name, sizeof(name), "%.*s_%s", (int)te__min((int64_t)n, 200), split->names[i], kind);
        shape[0] = rows[i];
        before = m->num_entries;
        te_module_add_parameter(m, name,
                                m->meta ? te_tensor_describe(m->te, dtype, ndim, shape)
                                : whole ? te__alias_as(whole, at, dtype, ndim, shape)
                                        : NULL);
        if (m->num_entries > before) m->entries[before].stacked = true;
        at += rows[i] * (cols ? cols : 1) * te__dtype_size(dtype);
    }
    te__frame_end(m->te, NULL, 0);
}
/* Computes the rows of each parameter on this rank. */
static te_result te__split_rows(te_module *m, const te_parameters_split *split, te_parallel_mode mode, int64_t out,
                                int64_t *rows) {
    int64_t sum = 0;
    int i, k;
    if (!split->names || (!split->sizes && out % split->count))
        return te__fail(
            m->te, TE_ERR_INVALID,
            "%s: parameters_split: names %s, %d equal parts of out_features %lld; give names, and sizes where the "
            "parts are not equal",
            m->cls->name, split->names ? "given" : "NULL", split->count, (long long)out);
    for (i = 0; i < split->count; i++) {
        const char *name = split->names[i];
        rows[i] = split->sizes ? split->sizes[i] : out / split->count;
        for (k = 0; k < i && name && strcmp(split->names[k], name) != 0; k++) {}
        if (!name || !name[0] || k < i || rows[i] < 1 || rows[i] > out - sum)
            return te__fail(
                m->te, TE_ERR_INVALID,
                "%s: parameters_split: part %d is \"%s\" with %lld rows, and %lld of out_features %lld are left; "
                "each part needs a name of its own, and "
                "all rows together are out_features",
                m->cls->name, i, name ? name : "", (long long)rows[i], (long long)(out - sum), (long long)out);
        sum += rows[i];
        if (mode == TE_PARALLEL_COLUMN && !te__divides(m, name, rows[i])) return te_error_code(m->te);
        if (mode == TE_PARALLEL_COLUMN) rows[i] = te__per_rank(m, rows[i]);
    }
    if (sum == out) return TE_OK;
    return te__fail(m->te, TE_ERR_INVALID,
                    "%s: the sizes of parameters_split add up to %lld and out_features is %lld; they must be equal",
                    m->cls->name, (long long)sum, (long long)out);
}

/* Adds the weights and biases of a GEMM. `out` and `in` are the sizes of the weight before it is divided among ranks,
 * and `sharding` its blocks. */
static void te__product_open(te_module *m, te__product_params *p, te_parallel_mode mode,
                             const te_parameters_split *split, const te_gemm_options *o, int64_t out, int64_t in,
                             const te__sharding *sharding) {
    te_dtype dtype = o->params_dtype ? o->params_dtype : TE_BF16;
    int i;
    int64_t rows[TE__MAX_NODE_TENSORS], own = mode == TE_PARALLEL_COLUMN ? te__per_rank(m, out) : out;
    p->count = split->count > 1 ? split->count : 1;
    p->weights = m->num_entries;
    p->biases = -1;
    if (!te__divides(m, mode == TE_PARALLEL_ROW ? "in_features" : "out_features", mode == TE_PARALLEL_ROW ? in : out))
        return;
    if (mode == TE_PARALLEL_ROW) in = te__per_rank(m, in);
    if (split->count < 0 || split->count > TE__MAX_NODE_TENSORS) {
        te__fail(m->te, TE_ERR_INVALID, "%s: parameters_split.count %d; 0 (one parameter) to %d are possible",
                 m->cls->name, split->count, TE__MAX_NODE_TENSORS);
        return;
    }
    if (p->count > 1 && (o->fuse_wgrad_accumulation || te__quantizes_weights(m->te))) {
        te__fail(
            m->te, TE_ERR_INVALID,
            "%s: parameters_split.count %d %s; one product reads all parts as one matrix: leave one of the two out",
            m->cls->name, split->count,
            o->fuse_wgrad_accumulation ? "and fuse_wgrad_accumulation" : "inside te_quantized_model_init_begin");
        return;
    }
    if (split->count == 0) {
        te__add_product_weight(m, "weight", dtype, own, in);
        if (!o->no_bias) te__add_weight(m, "bias", dtype, own, 0);
    } else if (te__split_rows(m, split, mode, out, rows) == TE_OK) {
        te__add_parts(m, split, rows, "weight", dtype, in);
        if (split->count == 1 && m->num_entries > p->weights) m->entries[p->weights].product_weight = true;
        if (!o->no_bias) te__add_parts(m, split, rows, "bias", dtype, 0);
    }
    if (!o->no_bias) p->biases = p->weights + p->count;
    for (i = p->weights; i < m->num_entries; i++) /* a row-parallel bias is whole on each rank */
        if (m->entries[i].tensor->ndim == 2 || mode == TE_PARALLEL_COLUMN)
            te__split_mark(m, m->entries[i].tensor, mode, sharding);
}

typedef struct te__join_state {
    int count;
    int64_t rows[TE__MAX_NODE_TENSORS];
} te__join_state;
static te_result te__join_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                   te_tensor **dx, const bool *needs) {
    const te__join_state *s = (const te__join_state *)state;
    int64_t at = 0;
    int i;
    (void)saved;
    for (i = 0; i < s->count; at += s->rows[i++])
        if (needs[i] && !(dx[i] = te_tensor_narrow(dy[0], 0, at, s->rows[i]))) return te_error_code(te);
    return TE_OK;
}
/* Joins `count` parameters by rows, beginning with m->entries[at]. Returns an alias if the parameters are adjacent in
 * memory, otherwise a copy. */
static te_tensor *te__join(te_module *m, int at, int count) {
    te__join_state state = TE_ZERO;
    te_tensor *part[TE__MAX_NODE_TENSORS], *y, *first = m->entries[at].tensor;
    int64_t shape[TE_MAX_DIMS], next = first->offset, rows = 0;
    bool together = first->buffer != NULL;
    int i;
    if (count == 1) return first;
    state.count = count;
    for (i = 0; i < count; i++) {
        te_tensor *x = part[i] = m->entries[at + i].tensor;
        if (x->quantized || x->ndim != first->ndim || x->ndim < 1 || x->dtype != first->dtype ||
            (x->ndim == 2 && x->shape[1] != first->shape[1])) {
            char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
            return te__no_tensor(
                m->te, TE_ERR_SHAPE,
                "%s: the parameter \"%s\" is %s%s %s and \"%s\" %s %s; the parts of one matrix are plain, of one "
                "format and one number of columns",
                m->name, m->entries[at + i].name, x->quantized ? "quantized, " : "", te_dtype_name(x->dtype),
                te__shape_text(x, a), m->entries[at].name, te_dtype_name(first->dtype), te__shape_text(first, b));
        }
        together = together && x->buffer == first->buffer && x->offset == next && te__is_contiguous(x);
        next += te__numel(x) * te__dtype_size(x->dtype);
        rows += state.rows[i] = x->shape[0];
    }
    memcpy(shape, first->shape, sizeof(shape));
    shape[0] = rows;
    y = together ? te__alias_as(first, 0, first->dtype, first->ndim, shape)
                 : te_tensor_empty(m->te, first->dtype, first->ndim, shape);
    m->te->tape.no_grad++;
    for (i = 0, rows = 0; i < count && y && !together; rows += state.rows[i++])
        if (te_tensor_copy(te_tensor_narrow(y, 0, rows, state.rows[i]), part[i]) != TE_OK) y = NULL;
    m->te->tape.no_grad--;
    return te__record("join", y, te__join_backward, &state, sizeof(state), part, count, NULL, 0);
}
static te_tensor *te__product_weight(te_module *m, const te__product_params *p) {
    return te__join(m, p->weights, p->count);
}
static te_tensor *te__product_bias(te_module *m, const te__product_params *p) {
    return p->biases < 0 ? NULL : te__join(m, p->biases, p->count);
}

/* Initializes each weight separately, and sets the biases to 0. */
static te_result te__product_reset(te_module *m, const te__product_params *p, const te_init *init,
                                   te_parallel_mode mode, const te__sharding *sharding) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < p->count && result == TE_OK; i++)
        result = te__init_weight(m, m->entries[p->weights + i].tensor, init, mode, sharding);
    for (i = 0; i < p->count && p->biases >= 0 && result == TE_OK; i++)
        result = te_tensor_fill(m->entries[p->biases + i].tensor, 0.0);
    return result;
}

/* Marks the biases of a row-parallel GEMM as sequence parallel if m uses sequence parallelism. Each rank then adds the
 * bias to its own tokens, so the bias gradients must be summed over the ranks. */
static void te__product_tag_bias(te_module *m, const te__product_params *p) {
    int i;
    for (i = 0; m->parallel.sequence && p->biases >= 0 && i < p->count && p->biases + i < m->num_entries; i++)
        te_tensor_set_sequence_parallel(m->entries[p->biases + i].tensor, true);
}
