/* onnx/graph.c: the graph of an ONNX file while it is built, the sizes in it that vary, and the writing of the file.
 * This file must not depend on operations of te.h.
 *
 * Every value of the graph is an item: an input, a weight, constant numbers, or the single result of a node. A node
 * that is requested twice is made once, so layers share masks and rotations. The file leaves out items that no output
 * needs.
 *
 * A function that makes a value returns the index of its item. It returns TE__ONNX_FAILED if the context has an error,
 * or if an argument is TE__ONNX_FAILED. So a chain of calls needs only one check at its end. */

enum { TE__ONNX_FAILED = -1, TE__ONNX_BUCKETS = 4096 };
enum { TE__ONNX_BATCH, TE__ONNX_SEQUENCE, TE__ONNX_SEQUENCE_KV, TE__ONNX_SYMBOLS }; /* the sizes that vary */

/* A size, stride or offset in the run with the caller's inputs, and in the run with larger inputs (see
 * te__onnx_factor). */
typedef struct te__onnx_size {
    int64_t first, second;
} te__onnx_size;

typedef enum te__onnx_kind {
    TE__ONNX_INPUT = 1,   /* an input of the graph */
    TE__ONNX_WEIGHT = 2,  /* the bytes of a tensor */
    TE__ONNX_NUMBERS = 3, /* the content of `bytes` */
    TE__ONNX_NODE = 4     /* the result of `op` */
} te__onnx_kind;

typedef struct te__onnx_item {
    te__onnx_kind kind;
    char *name;
    int type, ndim; /* unused for a NODE */
    int64_t shape[TE_MAX_DIMS];
    const char *axis[TE_MAX_DIMS]; /* INPUT: the names of sizes that vary (static) */
    te_tensor *tensor;             /* WEIGHT: retained */
    te__text bytes;                /* NUMBERS: the data; NODE: its attributes */
    const char *op;                /* NODE: name of the ONNX operator (static) */
    int *in, num_in;
    int next;  /* next older item in the same bucket of the hash table; -1: none */
    bool live; /* an output of the graph needs this item */
} te__onnx_item;

/* A size that varies. It is defined as the size of one dimension (`axis`) of one input (`input`). */
typedef struct te__onnx_symbol {
    const char *name; /* static */
    int64_t times;    /* a prime, different for each symbol; the size in the second run is `times` * `first` */
    int64_t first;    /* the size in the first run; 0: no dimension of an input has this symbol */
    int input, axis;
} te__onnx_symbol;

typedef struct te__onnx_output {
    const char *name; /* static */
    int item, type, ndim;
    te__onnx_size shape[TE_MAX_DIMS];
} te__onnx_output;

struct te__onnx_write;
struct te__onnx_plain;

typedef struct te__onnx {
    te_ctx *te;
    const char *module, *op; /* names of the call that is being translated; used in names of items and in messages */
    te__onnx_item *items;
    int num_items, cap_items;
    int bucket[TE__ONNX_BUCKETS]; /* hash table: 1 + the index of the newest item in each bucket; 0: no item */
    te__onnx_symbol symbol[TE__ONNX_SYMBOLS];
    te__onnx_output *outputs;
    int num_outputs, cap_outputs;
    struct te__onnx_write *writes; /* see onnx/memory.c */
    int num_writes, cap_writes, num_constants;
    struct te__onnx_plain *plain; /* see onnx/quant.c */
    int num_plain, cap_plain;
} te__onnx;

/* Records an error for something that a graph cannot express. The message begins with the current call and its module.
 * Returns TE__ONNX_FAILED. */
static TE_PRINTF(2, 3) int te__onnx_refuse(te__onnx *g, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (!g->op) te__fail(g->te, TE_ERR_UNSUPPORTED, "te_onnx_export: %s", text);
    else te__fail(g->te, TE_ERR_UNSUPPORTED, "te_onnx_export: %s of \"%s\": %s", g->op, g->module, text);
    return TE__ONNX_FAILED;
}

static void te__onnx_item_free(te__onnx *g, te__onnx_item *x) {
    te__free(g->te, x->name);
    te__text_free(&x->bytes);
    te_tensor_release(x->tensor);
    te__free(g->te, x->in);
}
static void te__onnx_graph_free(te__onnx *g) {
    int i;
    for (i = 0; i < g->num_items; i++) te__onnx_item_free(g, &g->items[i]);
    te__free(g->te, g->items);
    te__free(g->te, g->outputs);
}

/* ---- items ---- */

/* Appends a new item without a name and returns it. Returns NULL if the context has an error. */
static te__onnx_item *te__onnx_item_new(te__onnx *g, te__onnx_kind kind) {
    te__onnx_item *x;
    if (g->te->error_code != TE_OK ||
        !te__grow(g->te, (void **)&g->items, &g->cap_items, g->num_items, sizeof(te__onnx_item)))
        return NULL;
    x = &g->items[g->num_items++];
    memset(x, 0, sizeof(*x));
    x->kind = kind;
    x->next = -1;
    x->bytes.memory = &g->te->host_allocator;
    return x;
}
static int te__onnx_named(te__onnx *g, te__onnx_item *x, const char *name) {
    x->name = te__copy_string(g->te, name);
    return x->name ? g->num_items - 1 : TE__ONNX_FAILED;
}
/* Adds a weight. Its bytes are read from the tensor when the file is written. */
static int te__onnx_weight(te__onnx *g, const char *name, te_tensor *tensor) {
    te__onnx_item *x;
    int type = te__onnx_type(tensor->dtype);
    if (!type)
        return te__onnx_refuse(g, "\"%s\" is %s, a format that ONNX's opset %d lacks", name,
                               te_dtype_name(tensor->dtype), (int)TE__ONNX_OPSET);
    x = te__onnx_item_new(g, TE__ONNX_WEIGHT);
    if (!x) return TE__ONNX_FAILED;
    x->type = type;
    x->ndim = tensor->ndim;
    memcpy(x->shape, tensor->shape, sizeof(x->shape));
    x->tensor = te_tensor_retain(tensor);
    return te__onnx_named(g, x, name);
}

/* If an earlier item has the same content as the last item, removes the last item and returns the earlier one.
 * Otherwise names the last item and returns it. */
static int te__onnx_once(te__onnx *g) {
    te__onnx_item *x = &g->items[g->num_items - 1];
    uint64_t hash = te__hash64(te__text_str(&x->bytes), x->bytes.n, (uint64_t)x->kind * 64 + (uint64_t)x->type);
    char name[640];
    int *bucket, i;
    if (x->op) hash = te__hash64(x->op, strlen(x->op), hash);
    if (x->num_in) hash = te__hash64(x->in, (size_t)x->num_in * sizeof(int), hash);
    bucket = &g->bucket[hash % TE__ONNX_BUCKETS];
    for (i = *bucket - 1; i >= 0; i = g->items[i].next) {
        const te__onnx_item *y = &g->items[i];
        if (x->kind == y->kind && x->type == y->type && x->num_in == y->num_in && x->bytes.n == y->bytes.n &&
            x->ndim == y->ndim && memcmp(x->shape, y->shape, sizeof(x->shape)) == 0 &&
            (!x->op || strcmp(x->op, y->op) == 0) &&
            (!x->num_in || memcmp(x->in, y->in, (size_t)x->num_in * sizeof(int)) == 0) &&
            (!x->bytes.n || memcmp(x->bytes.s, y->bytes.s, x->bytes.n) == 0)) {
            te__onnx_item_free(g, x);
            g->num_items--;
            return i;
        }
    }
    x->next = *bucket - 1;
    *bucket = g->num_items;
    snprintf(name, sizeof(name), "%s/%s_%d", g->op ? g->module : "", x->op ? x->op : "numbers", g->num_items);
    return te__onnx_named(g, x, name);
}

static int te__onnx_numbers(te__onnx *g, int type, int ndim, const int64_t *shape, const void *data, size_t bytes) {
    te__onnx_item *x = te__onnx_item_new(g, TE__ONNX_NUMBERS);
    if (!x) return TE__ONNX_FAILED;
    x->type = type;
    x->ndim = ndim;
    if (ndim) memcpy(x->shape, shape, (size_t)ndim * sizeof(int64_t));
    te__text_add(&x->bytes, (const char *)data, bytes);
    return te__onnx_once(g);
}
static int te__onnx_i64s(te__onnx *g, int n, const int64_t *v) {
    int64_t shape = n;
    return te__onnx_numbers(g, TE__ONNX_INT64, 1, &shape, v, (size_t)n * sizeof(*v));
}
static int te__onnx_i64(te__onnx *g, int64_t v) { return te__onnx_numbers(g, TE__ONNX_INT64, 0, NULL, &v, sizeof(v)); }
static int te__onnx_f32(te__onnx *g, float v) { return te__onnx_numbers(g, TE__ONNX_FLOAT, 0, NULL, &v, sizeof(v)); }

/* ---- nodes ---- */

/* Makes a node. It takes ownership of the memory of `attributes`, which may be NULL. */
static int te__onnx_node(te__onnx *g, const char *op, te__text *attributes, int n, const int *in) {
    te__onnx_item *x;
    bool fine = true;
    int i;
    for (i = 0; i < n; i++) fine = fine && in[i] >= 0;
    x = fine ? te__onnx_item_new(g, TE__ONNX_NODE) : NULL;
    if (x) x->in = (int *)te__alloc(g->te, (size_t)n * sizeof(int));
    if (!x || !x->in) {
        if (attributes) te__text_free(attributes);
        return TE__ONNX_FAILED;
    }
    x->op = op;
    x->num_in = n;
    memcpy(x->in, in, (size_t)n * sizeof(int));
    if (attributes) x->bytes = *attributes;
    return te__onnx_once(g);
}
static int te__onnx_1(te__onnx *g, const char *op, int x) { return te__onnx_node(g, op, NULL, 1, &x); }
static int te__onnx_2(te__onnx *g, const char *op, int x, int y) {
    int in[2] = {x, y};
    return te__onnx_node(g, op, NULL, 2, in);
}
static int te__onnx_3(te__onnx *g, const char *op, int x, int y, int z) {
    int in[3] = {x, y, z};
    return te__onnx_node(g, op, NULL, 3, in);
}
static te__text te__onnx_attributes(te__onnx *g) {
    te__text t = TE_ZERO;
    t.memory = &g->te->host_allocator;
    return t;
}
static int te__onnx_cast(te__onnx *g, int x, int type) {
    te__text t = te__onnx_attributes(g);
    te__onnx_attr_int(&t, "to", type);
    return te__onnx_node(g, "Cast", &t, 1, &x);
}
static int te__onnx_transpose(te__onnx *g, int x, int n, const int *order) {
    te__text t = te__onnx_attributes(g);
    int64_t perm[TE_MAX_DIMS + 1];
    int i;
    for (i = 0; i < n; i++) perm[i] = order[i];
    te__onnx_attr_ints(&t, "perm", n, perm);
    return te__onnx_node(g, "Transpose", &t, 1, &x);
}
static int te__onnx_swap4(te__onnx *g, int x, int a, int b, int c, int d) {
    int order[4] = {a, b, c, d};
    return te__onnx_transpose(g, x, 4, order);
}
static int te__onnx_concat(te__onnx *g, int axis, int n, const int *in) {
    te__text t = TE_ZERO;
    if (n == 1) return in[0];
    t = te__onnx_attributes(g);
    te__onnx_attr_int(&t, "axis", axis);
    return te__onnx_node(g, "Concat", &t, n, in);
}
static int te__onnx_concat2(te__onnx *g, int axis, int x, int y) {
    int in[2] = {x, y};
    return te__onnx_concat(g, axis, 2, in);
}
static int te__onnx_unsqueeze(te__onnx *g, int x, int64_t axis) {
    return te__onnx_2(g, "Unsqueeze", x, te__onnx_i64s(g, 1, &axis));
}
static int te__onnx_squeeze(te__onnx *g, int x, int64_t axis) {
    return te__onnx_2(g, "Squeeze", x, te__onnx_i64s(g, 1, &axis));
}
/* Returns the elements begin, begin + step, ... before `end` along dimension `axis`. The graph items `begin` and `end`
 * are int64 vectors with one element. */
static int te__onnx_slice(te__onnx *g, int x, int64_t axis, int begin, int end, int64_t step) {
    int in[5];
    in[0] = x;
    in[1] = begin;
    in[2] = end;
    in[3] = te__onnx_i64s(g, 1, &axis);
    in[4] = te__onnx_i64s(g, 1, &step);
    return te__onnx_node(g, "Slice", NULL, step == 1 ? 4 : 5, in);
}
static int te__onnx_cut(te__onnx *g, int x, int64_t axis, int64_t begin, int64_t end, int64_t step) {
    return te__onnx_slice(g, x, axis, te__onnx_i64s(g, 1, &begin), te__onnx_i64s(g, 1, &end), step);
}
/* Reduces over one axis and keeps it with size 1. */
static int te__onnx_reduce(te__onnx *g, const char *op, int x, int64_t axis) {
    return te__onnx_2(g, op, x, te__onnx_i64s(g, 1, &axis));
}
/* Reduces over one axis and removes it. */
static int te__onnx_reduce_away(te__onnx *g, const char *op, int x, int64_t axis) {
    return te__onnx_squeeze(g, te__onnx_reduce(g, op, x, axis), axis);
}
/* Reduces over all axes to a number without dimensions. */
static int te__onnx_reduce_all(te__onnx *g, const char *op, int x) {
    te__text t = te__onnx_attributes(g);
    te__onnx_attr_int(&t, "keepdims", 0);
    return te__onnx_node(g, op, &t, 1, &x);
}

/* ---- sizes that vary ----
 *
 * The module runs twice: with the caller's sizes, and with larger ones. For the second run each varying size is
 * multiplied by a different prime. The quotient of the two values of a size or stride is then a product of these
 * primes. It shows which varying sizes are factors of the size or stride. */

static te__onnx_size te__onnx_fixed(int64_t n) {
    te__onnx_size s;
    s.first = s.second = n;
    return s;
}
static te__onnx_size te__onnx_times(te__onnx_size x, te__onnx_size y) {
    x.first *= y.first;
    x.second *= y.second;
    return x;
}
static bool te__onnx_is_fixed(te__onnx_size s) { return s.first == s.second; }
static bool te__onnx_is(te__onnx_size s, int64_t n) { return s.first == n && s.second == n; }
static bool te__onnx_same(te__onnx_size x, te__onnx_size y) { return x.first == y.first && x.second == y.second; }

/* Finds s = factor * product over i of symbol[i] ^ power[i]. A power may be negative. Fails if s is no such product. */
static bool te__onnx_factor(te__onnx *g, te__onnx_size s, int64_t *factor, int power[TE__ONNX_SYMBOLS]) {
    int64_t up = s.second, down = s.first, a = s.first, b = s.second;
    int i;
    memset(power, 0, TE__ONNX_SYMBOLS * sizeof(int));
    *factor = s.first;
    if (te__onnx_is_fixed(s)) return true;
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    if (a > 0) {
        up /= a;
        down /= a;
    }
    for (i = 0; i < TE__ONNX_SYMBOLS && s.first > 0; i++) {
        const te__onnx_symbol *y = &g->symbol[i];
        for (; y->first && up && up % y->times == 0; up /= y->times, power[i]++) {
            if (*factor % y->first != 0) break;
            *factor /= y->first;
        }
        for (; y->first && down % y->times == 0; down /= y->times, power[i]--) *factor *= y->first;
    }
    if (up == 1 && down == 1 && s.first > 0) return true;
    te__onnx_refuse(
        g,
        "a size is %lld for the inputs that were given and %lld for larger ones; it must be a product of the "
        "sizes that vary, since the file serves "
        "all of them",
        (long long)s.first, (long long)s.second);
    return false;
}

/* Returns the size s as a 64-bit vector of one number. The graph computes it from the shapes of its inputs. */
static int te__onnx_size_of(te__onnx *g, te__onnx_size s) {
    int64_t factor;
    int power[TE__ONNX_SYMBOLS], i, k, v;
    if (!te__onnx_factor(g, s, &factor, power)) return TE__ONNX_FAILED;
    v = te__onnx_i64s(g, 1, &factor);
    for (k = 0; k < 2; k++) /* multiplies first and divides later, so that the quotients are exact */
        for (i = 0; i < TE__ONNX_SYMBOLS; i++) {
            const te__onnx_symbol *y = &g->symbol[i];
            te__text t;
            int shape, n = k ? -power[i] : power[i];
            if (n <= 0) continue;
            t = te__onnx_attributes(g);
            te__onnx_attr_int(&t, "start", y->axis);
            te__onnx_attr_int(&t, "end", y->axis + 1);
            shape = te__onnx_node(g, "Shape", &t, 1, &y->input);
            if (!k && factor == 1 && g->items[v < 0 ? 0 : v].kind == TE__ONNX_NUMBERS) v = shape, n--;
            for (; n > 0; n--) v = te__onnx_2(g, k ? "Div" : "Mul", v, shape);
        }
    return v;
}
/* Returns the size s as a number without dimensions, because Range needs that. */
static int te__onnx_scalar(te__onnx *g, te__onnx_size s) {
    if (te__onnx_is_fixed(s)) return te__onnx_i64(g, s.first);
    return te__onnx_2(g, "Reshape", te__onnx_size_of(g, s), te__onnx_i64s(g, 0, NULL));
}
/* Returns the numbers 0 .. n - 1. */
static int te__onnx_range(te__onnx *g, te__onnx_size n) {
    return te__onnx_3(g, "Range", te__onnx_i64(g, 0), te__onnx_scalar(g, n), te__onnx_i64(g, 1));
}

/* Returns a shape for Reshape or Expand. If `infer` is true and only one size varies, writes this size as -1, and
 * Reshape computes it. */
static int te__onnx_shape(te__onnx *g, int n, const te__onnx_size *shape, bool infer) {
    int64_t fixed[TE_MAX_DIMS + 2];
    int part[TE_MAX_DIMS + 2], i, vary = 0, parts = 0;
    for (i = 0; i < n; i++) {
        vary += !te__onnx_is_fixed(shape[i]);
        fixed[i] = te__onnx_is_fixed(shape[i]) ? shape[i].first : -1;
    }
    if (vary == 0 || (vary == 1 && infer)) return te__onnx_i64s(g, n, fixed);
    for (i = 0; i < n; i++) part[parts++] = te__onnx_size_of(g, shape[i]);
    return te__onnx_concat(g, 0, parts, part);
}
static int te__onnx_reshape(te__onnx *g, int x, int n, const te__onnx_size *shape) {
    return te__onnx_2(g, "Reshape", x, te__onnx_shape(g, n, shape, true));
}

/* ---- the file ---- */

static bool te__onnx_mark(te__onnx *g) {
    int i, k;
    for (i = 0; i < g->num_outputs; i++) g->items[g->outputs[i].item].live = true;
    for (i = g->num_items - 1; i >= 0; i--) /* a node comes after the items that it reads */
        for (k = 0; g->items[i].live && k < g->items[i].num_in; k++) g->items[g->items[i].in[k]].live = true;
    for (i = 0; i < g->num_items; i++)
        if (g->items[i].bytes.oom)
            return te__fail(g->te, TE_ERR_OUT_OF_MEMORY, "te_onnx_export: %s", te__no_memory_text) == TE_OK;
    return true;
}

static int te__onnx_by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}
/* Checks that no two values of the graph have the same name. They might, because a program may give a module any
 * name. */
static te_result te__onnx_names_differ(te__onnx *g) {
    size_t bytes = (size_t)(g->num_items + g->num_outputs) * sizeof(char *);
    const char **names = (const char **)te__alloc(g->te, bytes);
    te_result result = TE_OK;
    int i, n = 0;
    if (!names) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < g->num_items; i++)
        if (g->items[i].live || g->items[i].kind == TE__ONNX_INPUT) names[n++] = g->items[i].name;
    for (i = 0; i < g->num_outputs; i++) names[n++] = g->outputs[i].name;
    qsort(names, (size_t)n, sizeof(*names), te__onnx_by_name);
    for (i = 1; i < n && result == TE_OK; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            result = te__fail(
                g->te, TE_ERR_INVALID,
                "te_onnx_export: two values of the graph are \"%s\"; give the module or the parameter another name",
                names[i]);
    te__free(g->te, names);
    return result;
}

static void te__onnx_put_node(te__text *graph, const te__onnx_item *items, const char *name, const char *op, int n,
                              const int *in, const te__text *attributes) {
    te__text node = TE_ZERO;
    int i;
    node.memory = graph->memory;
    for (i = 0; i < n; i++) te__pb_string(&node, 1, items[in[i]].name);
    if (strcmp(op, "TopK") == 0) { /* The graph uses the second result of TopK. The first result needs a name too. */
        te__text values = TE_ZERO;
        values.memory = graph->memory;
        te__text_printf(&values, "%s.values", name);
        te__pb_message(&node, 2, &values);
    }
    te__pb_string(&node, 2, name);
    te__pb_string(&node, 3, name);
    te__pb_string(&node, 4, op);
    if (attributes) te__text_add(&node, te__text_str(attributes), attributes->n);
    te__pb_message(graph, 1, &node);
}

/* Returns the name of a varying size, such as "2*batch*sequence", or NULL for a fixed one. */
static const char *te__onnx_axis_text(te__onnx *g, te__onnx_size s, char text[128]) {
    int64_t factor;
    int power[TE__ONNX_SYMBOLS], i, k;
    size_t n = 0;
    if (te__onnx_is_fixed(s) || !te__onnx_factor(g, s, &factor, power)) return NULL;
    text[0] = 0;
    if (factor != 1) n += (size_t)snprintf(text, 128, "%lld", (long long)factor);
    for (i = 0; i < TE__ONNX_SYMBOLS; i++)
        for (k = power[i]; k != 0 && n < 100; k += k > 0 ? -1 : 1)
            n += (size_t)snprintf(text + n, 128 - n, "%s%s", k < 0 ? "/" : n ? "*" : "", g->symbol[i].name);
    return text;
}
static void te__onnx_put_output(te__onnx *g, te__text *graph, const te__onnx_output *y) {
    const char *axis[TE_MAX_DIMS];
    char text[TE_MAX_DIMS][128];
    int64_t shape[TE_MAX_DIMS];
    int i;
    for (i = 0; i < y->ndim; i++) {
        axis[i] = te__onnx_axis_text(g, y->shape[i], text[i]);
        shape[i] = y->shape[i].first;
    }
    te__onnx_put_value(graph, 12, y->name, y->type, y->ndim, shape, axis);
}

static bool te__onnx_is_initializer(const te__onnx_item *x) {
    return x->live && (x->kind == TE__ONNX_WEIGHT || x->kind == TE__ONNX_NUMBERS);
}
static uint64_t te__onnx_bytes(const te__onnx_item *x) {
    return x->kind == TE__ONNX_WEIGHT ? te_tensor_bytes(x->tensor) : x->bytes.n;
}
/* Writes the beginning of an initializer. The caller must write the bytes of the initializer next. */
static void te__onnx_put_initializer(te__text *t, const te__onnx_item *x) {
    te__text tensor = TE_ZERO;
    tensor.memory = t->memory;
    te__onnx_put_tensor(&tensor, x->name, x->type, x->ndim, x->shape, te__onnx_bytes(x));
    te__pb_head(t, 5, tensor.n + te__onnx_bytes(x));
    te__text_add(t, te__text_str(&tensor), tensor.n);
    if (tensor.oom) t->oom = true;
    te__text_free(&tensor);
}

/* `head` receives the part of the model that comes before the content of its graph. `tail` receives the opset, which
 * comes after the graph. */
static void te__onnx_put_model(te__text *head, te__text *tail, uint64_t graph_bytes) {
    te__text opset = TE_ZERO;
    char version[32];
    opset.memory = tail->memory;
    snprintf(version, sizeof(version), "%d.%d.%d", TE_VERSION_MAJOR, TE_VERSION_MINOR, TE_VERSION_PATCH);
    te__pb_int(head, 1, TE__ONNX_IR);
    te__pb_string(head, 2, "te.h");
    te__pb_string(head, 3, version);
    te__pb_head(head, 7, graph_bytes);
    te__pb_string(&opset, 1, "");
    te__pb_int(&opset, 2, TE__ONNX_OPSET);
    te__pb_message(tail, 8, &opset);
}

/* Writes the file: `head`, `graph` (nodes, inputs and outputs), each initializer, `tail`. The bytes of a weight come
 * directly from its tensor. */
static te_result te__onnx_stream(te__onnx *g, const char *path, const te__text *head, const te__text *graph,
                                 const te__text *tail) {
    te_ctx *te = g->te;
    te__file_out out;
    te__text why = TE_ZERO, one = TE_ZERO;
    te_result result = TE_OK;
    int i;
    void *staging = te__alloc(te, TE__ST_CHUNK);
    if (!staging) return TE_ERR_OUT_OF_MEMORY;
    one.memory = &te->host_allocator;
    te__file_out_begin(&out, path, &why);
    te__file_out_write(&out, head->s, head->n);
    te__file_out_write(&out, graph->s, graph->n);
    for (i = 0; i < g->num_items && result == TE_OK && !out.failed; i++) {
        const te__onnx_item *x = &g->items[i];
        if (!te__onnx_is_initializer(x)) continue;
        te__text_clear(&one);
        te__onnx_put_initializer(&one, x);
        if (one.oom) result = te__fail(te, TE_ERR_OUT_OF_MEMORY, "te_onnx_export: %s", te__no_memory_text);
        te__file_out_write(&out, te__text_str(&one), one.n);
        if (x->kind == TE__ONNX_NUMBERS) te__file_out_write(&out, te__text_str(&x->bytes), x->bytes.n);
        else if (result == TE_OK) result = te__st_store(te, &out, x->tensor, staging);
    }
    te__file_out_write(&out, tail->s, tail->n);
    te__free(te, staging);
    te__text_free(&one);
    return te__st_end(te, &out, &why, result);
}

static te_result te__onnx_write_file(te__onnx *g, const char *path, const char *name) {
    te_ctx *te = g->te;
    te__text graph = TE_ZERO, head = TE_ZERO, tail = TE_ZERO, one = TE_ZERO;
    uint64_t bytes;
    te_result result;
    int i;
    if (!te__onnx_mark(g)) return te_error_code(te);
    result = te__onnx_names_differ(g);
    if (result != TE_OK) return result;
    graph.memory = head.memory = tail.memory = one.memory = &te->host_allocator;
    for (i = 0; i < g->num_items; i++) {
        const te__onnx_item *x = &g->items[i];
        if (x->live && x->kind == TE__ONNX_NODE)
            te__onnx_put_node(&graph, g->items, x->name, x->op, x->num_in, x->in, &x->bytes);
    }
    for (i = 0; i < g->num_outputs; i++)
        te__onnx_put_node(&graph, g->items, g->outputs[i].name, "Identity", 1, &g->outputs[i].item, NULL);
    te__pb_string(&graph, 2, name);
    for (i = 0; i < g->num_items; i++) {
        const te__onnx_item *x = &g->items[i];
        if (x->kind == TE__ONNX_INPUT) te__onnx_put_value(&graph, 11, x->name, x->type, x->ndim, x->shape, x->axis);
    }
    for (i = 0; i < g->num_outputs; i++) te__onnx_put_output(g, &graph, &g->outputs[i]);
    bytes = graph.n;
    for (i = 0; i < g->num_items; i++) {
        if (!te__onnx_is_initializer(&g->items[i])) continue;
        te__text_clear(&one);
        te__onnx_put_initializer(&one, &g->items[i]);
        graph.oom = graph.oom || one.oom; /* te__text_clear resets one.oom */
        bytes += one.n + te__onnx_bytes(&g->items[i]);
    }
    te__onnx_put_model(&head, &tail, bytes);
    bytes += head.n + tail.n;
    if (te->error_code != TE_OK) result = te->error_code;
    else if (graph.oom || head.oom || tail.oom)
        result = te__fail(te, TE_ERR_OUT_OF_MEMORY, "te_onnx_export: %s", te__no_memory_text);
    else if (bytes > INT32_MAX)
        result = te__fail(te, TE_ERR_UNSUPPORTED,
                          "te_onnx_export: the file would have %llu bytes, and readers of protobuf take %lld at most; "
                          "export a model of 16-bit or quantized "
                          "weights, or its parts one by one",
                          (unsigned long long)bytes, (long long)INT32_MAX);
    else
        result = te__onnx_stream(g, path, &head, &graph, &tail);
    te__text_free(&graph);
    te__text_free(&head);
    te__text_free(&tail);
    te__text_free(&one);
    return result;
}
