/* nn/inference.c: the key-value cache: sequences, the pages of each sequence, and the memory of each layer. This file
 * must not depend on what any class computes.
 *
 * A cache without pages is stored as one page for each sequence. A step (te_inference_params_pre_step) prepares its
 * state in `next`, so that a step that fails changes nothing. All numbers that kernels read are in one tensor that
 * never moves. So a captured graph reads the numbers of the current step. The graph must have been captured with at
 * least as many sequences as the step has. */

typedef struct te__cached_sequence {
    int64_t id, before, length; /* before: number of tokens of earlier steps; length: `before` plus the tokens of this
                                 * step */
    int64_t num_pages;
} te__cached_sequence;
typedef struct te__cached_state {
    te__cached_sequence *sequences; /* [max_batch_size], in the order of the step */
    int32_t *pages;                 /* [max_batch_size, pages_of_each]: page numbers of each sequence */
    int32_t *free;                  /* [num_pages]: page numbers that no sequence uses; taken from the front */
    int64_t num_sequences, num_free;
} te__cached_state;
typedef struct te__cached_layer {
    te_module *module; /* held, so that no other module gets its address */
    te_tensor *k, *v;  /* [pages, page_size, heads, d] */
    te_tensor *k_factors, *v_factors; /* [pages, page_size, heads], of caches in E4M3, or NULL */
} te__cached_layer;

struct te_inference_params {
    te_ctx *te;
    te_inference_params_desc desc; /* with defaults */
    int64_t num_pages, page_size, pages_of_each;
    te__cached_state now, next;    /* next: the state that a step prepares */
    int64_t longest, tokens;       /* longest: largest number of new tokens of a sequence in the step; tokens: new
                                    * tokens of all sequences */
    int32_t *numbers;              /* host copy of `device` */
    te_tensor *device;             /* i32: cu_seqlens_q, cu_seqlens_kv, start_positions, page_table */
    te__cached_layer *layers;
    int num_layers, cap_layers;
    te__closable closable;
};

/* Returns the index in `numbers` at which a list begins: cu_seqlens_q (`list` is 0), cu_seqlens_kv (1), start_positions
 * (2) or page_table (3). */
static int64_t te__cached_at(const te_inference_params *c, int list) {
    const int64_t b = c->desc.max_batch_size;
    return list == 0 ? 0 : list == 1 ? b + 1 : list == 2 ? 2 * (b + 1) : 2 * (b + 1) + b;
}
static int64_t te__cached_numbers(const te_inference_params *c) {
    return te__cached_at(c, 3) + c->desc.max_batch_size * c->pages_of_each;
}

/* ---- creation ---- */

static size_t te__cached_bytes(const te_inference_params *c, int list) {
    const size_t b = (size_t)c->desc.max_batch_size;
    return list == 0   ? b * sizeof(te__cached_sequence)
           : list == 1 ? b * (size_t)c->pages_of_each * sizeof(int32_t)
                       : (size_t)c->num_pages * sizeof(int32_t);
}
static bool te__cached_open(te_inference_params *c, te__cached_state *s) {
    s->sequences = (te__cached_sequence *)te__alloc_zero(c->te, te__cached_bytes(c, 0));
    s->pages = s->sequences ? (int32_t *)te__alloc_zero(c->te, te__cached_bytes(c, 1)) : NULL;
    s->free = s->pages ? (int32_t *)te__alloc_zero(c->te, te__cached_bytes(c, 2)) : NULL;
    return s->free != NULL;
}
static void te__cached_close(te_inference_params *c, te__cached_state *s) {
    te__free(c->te, s->sequences);
    te__free(c->te, s->pages);
    te__free(c->te, s->free);
}
static void te__inference_params_close(void *owner) { te_inference_params_destroy((te_inference_params *)owner); }

TE_API void te_inference_params_destroy(te_inference_params *c) {
    int i;
    if (!c || te__refuse_hook(c->te, "te_inference_params_destroy") != TE_OK) return;
    te__closable_remove(&c->closable);
    for (i = 0; i < c->num_layers; i++) {
        te_tensor_release(c->layers[i].k);
        te_tensor_release(c->layers[i].v);
        te_tensor_release(c->layers[i].k_factors);
        te_tensor_release(c->layers[i].v_factors);
        te__module_unhold(c->layers[i].module);
    }
    te__free(c->te, c->layers);
    te_tensor_release(c->device);
    te__free(c->te, c->numbers);
    te__cached_close(c, &c->now);
    te__cached_close(c, &c->next);
    te__free(c->te, c);
}

/* Checks a desc and fills its defaults. */
static te_result te__inference_desc_ok(te_ctx *te, te_inference_params_desc *d) {
    const char *const who = "te_inference_params_create";
    const int64_t most = 1 << 26; /* limit of tokens and pages, so that page tables fit into a 32-bit address space */
    if (!d->head_dim_v) d->head_dim_v = d->head_dim_k;
    if (!d->dtype) d->dtype = TE_BF16;
    if (!d->max_ctx_len) d->max_ctx_len = d->max_sequence_length;
    if (d->max_batch_size < 1 || d->max_sequence_length < 1 || d->num_heads_kv < 1 || d->head_dim_k < 1 ||
        d->head_dim_v < 1 || d->max_ctx_len < 1 || d->max_sequence_length > most / d->max_batch_size)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: max_batch_size %lld, max_sequence_length %lld, num_heads_kv %d, head_dim_k %lld, head_dim_v "
            "%lld, max_ctx_len %lld; each is at least 1, and "
            "the product of the first two at most 2^26",
            who, (long long)d->max_batch_size, (long long)d->max_sequence_length, d->num_heads_kv,
            (long long)d->head_dim_k, (long long)d->head_dim_v, (long long)d->max_ctx_len);
    if (!te__is_float(d->dtype) && d->dtype != TE_F8E4M3)
        return te__fail(te, TE_ERR_DTYPE, "%s: dtype %s; f32, f16, bf16 and e4m3 are possible", who,
                        te_dtype_name(d->dtype));
    if (d->dtype == TE_F8E4M3 && te__max(d->head_dim_k, d->head_dim_v) > TE__CODED_ROW)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "%s: dtype e4m3, head_dim_k %lld and head_dim_v %lld; at most %d are possible", who,
                        (long long)d->head_dim_k, (long long)d->head_dim_v, (int)TE__CODED_ROW);
    if (!d->is_paged && (d->page_size || d->total_num_pages))
        return te__fail(te, TE_ERR_INVALID,
                        "%s: page_size %lld and total_num_pages %lld without is_paged; set it, or leave them zero", who,
                        (long long)d->page_size, (long long)d->total_num_pages);
    if (d->is_paged && (d->page_size < 1 || d->max_sequence_length % d->page_size || d->total_num_pages < 0 ||
                        d->total_num_pages > most))
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: page_size %lld, max_sequence_length %lld, total_num_pages %lld; the first divides the second, "
            "and the third is at most 2^26, or 0 for "
            "enough",
            who, (long long)d->page_size, (long long)d->max_sequence_length, (long long)d->total_num_pages);
    return TE_OK;
}

TE_API te_inference_params *te_inference_params_create(te_ctx *te, const te_inference_params_desc *desc) {
    te_inference_params *c;
    te_inference_params_desc d;
    int64_t n;
    if (!te || !te__has_desc(te, desc, "te_inference_params_create")) return NULL;
    d = *desc;
    if (te__inference_desc_ok(te, &d) != TE_OK) return NULL;
    c = (te_inference_params *)te__alloc_zero(te, sizeof(*c));
    if (!c) return NULL;
    c->te = te;
    c->desc = d;
    c->page_size = d.is_paged ? d.page_size : d.max_sequence_length;
    c->pages_of_each = d.max_sequence_length / c->page_size;
    c->num_pages = d.total_num_pages ? d.total_num_pages : d.max_batch_size * c->pages_of_each;
    te__closable_add(te, &c->closable, "cache", te__inference_params_close, c);
    n = te__cached_numbers(c);
    te__frame_begin(te);
    c->device = te_tensor_retain(te__empty_1d(te, TE_I32, n));
    te__frame_end(te, NULL, 0);
    if (c->device) c->device->buffer->apart = true; /* te__step_fill takes each page once; entries
                                                    * without rows are not read */
    c->numbers = c->device ? (int32_t *)te__alloc_zero(te, (size_t)n * sizeof(int32_t)) : NULL;
    if (c->numbers && te__cached_open(c, &c->now) && te__cached_open(c, &c->next)) {
        te_inference_params_reset(c);
        return c;
    }
    te_inference_params_destroy(c);
    return NULL;
}

TE_API te_result te_inference_params_reset(te_inference_params *c) {
    int64_t i;
    if (!c) return TE_ERR_STATE;
    c->now.num_sequences = c->longest = c->tokens = 0;
    c->now.num_free = c->num_pages;
    for (i = 0; i < c->num_pages; i++) c->now.free[i] = (int32_t)i;
    return TE_OK;
}
TE_API int64_t te_inference_params_num_sequences(const te_inference_params *c) { return c ? c->now.num_sequences : 0; }
TE_API int64_t te_inference_params_free_pages(const te_inference_params *c) { return c ? c->now.num_free : 0; }

/* Returns the index of sequence `id` in `now`, or -1. The search begins at index `hint`. */
static int64_t te__cached_find(const te_inference_params *c, int64_t id, int64_t hint) {
    const int64_t n = c->now.num_sequences;
    int64_t i;
    for (i = 0; i < n; i++)
        if (c->now.sequences[(hint + i) % n].id == id) return (hint + i) % n;
    return -1;
}
TE_API int64_t te_inference_params_seqlen(const te_inference_params *c, int64_t seq_id) {
    const int64_t at = c ? te__cached_find(c, seq_id, 0) : -1;
    return at < 0 ? 0 : c->now.sequences[at].length;
}

/* ---- a step ---- */

/* Fills next.sequences from `ids` and `lens`, the step's sequences. If a sequence of the step is already in `now`,
 * makes its num_pages in `now` negative as a mark. A sequence that has the mark already is twice in `ids`, which is an
 * error. Sequences of `now` without a mark have ended, and their pages become free. The caller removes the marks, also
 * on failure. */
static te_result te__step_sequences(te_inference_params *c, const int64_t *ids, const int64_t *lens, int64_t n) {
    const char *const who = "te_inference_params_pre_step";
    int64_t i, k, needed = 0;
    for (i = 0; i < n; i++) {
        const int64_t at = te__cached_find(c, ids[i], i);
        te__cached_sequence *s = &c->next.sequences[i];
        if (lens[i] < 1 || lens[i] > c->desc.max_ctx_len)
            return te__fail(c->te, TE_ERR_INVALID,
                            "%s: sequence %lld has %lld new tokens; 1 to %lld (max_ctx_len) are possible", who,
                            (long long)ids[i], (long long)lens[i], (long long)c->desc.max_ctx_len);
        for (k = 0; at < 0 && k < i && c->next.sequences[k].id != ids[i]; k++) {}
        if (at >= 0 ? c->now.sequences[at].num_pages < 0 : k < i)
            return te__fail(c->te, TE_ERR_INVALID,
                            "%s: sequence %lld is twice in the list of %lld; once with all its new tokens is possible",
                            who, (long long)ids[i], (long long)n);
        s->id = ids[i];
        s->before = at < 0 ? 0 : c->now.sequences[at].length;
        s->num_pages = at < 0 ? 0 : c->now.sequences[at].num_pages;
        if (lens[i] > INT64_MAX - s->before)
            return te__fail(c->te, TE_ERR_INVALID,
                            "%s: step_lens[%lld] is %lld; the cache has room for %lld tokens of each sequence", who,
                            (long long)i, (long long)lens[i], (long long)c->desc.max_sequence_length);
        s->length = s->before + lens[i];
        if (at >= 0) {
            memcpy(c->next.pages + i * c->pages_of_each, c->now.pages + at * c->pages_of_each,
                   (size_t)s->num_pages * sizeof(int32_t));
            c->now.sequences[at].num_pages = -s->num_pages;
        }
        if (s->length > c->desc.max_sequence_length)
            return te__fail(c->te, TE_ERR_STATE,
                            "%s: sequence %lld would have %lld tokens (%lld and %lld new ones), and the cache has room "
                            "for %lld of each (max_sequence_length): end it, or make "
                            "a larger cache",
                            who, (long long)s->id, (long long)s->length, (long long)s->before, (long long)lens[i],
                            (long long)c->desc.max_sequence_length);
        needed += te__div_up(s->length, c->page_size) - s->num_pages;
    }
    /* append pages of ended sequences to the free ones */
    memcpy(c->next.free, c->now.free, (size_t)c->now.num_free * sizeof(int32_t));
    c->next.num_free = c->now.num_free;
    for (i = 0; i < c->now.num_sequences; i++)
        for (k = 0; k < c->now.sequences[i].num_pages; k++)
            c->next.free[c->next.num_free++] = c->now.pages[i * c->pages_of_each + k];
    if (needed > c->next.num_free)
        return te__fail(c->te, TE_ERR_STATE,
                        "%s: the %lld sequences need %lld more pages of %lld tokens, and %lld are free "
                        "(total_num_pages %lld): end some, which may begin anew "
                        "later, or make a larger cache",
                        who, (long long)n, (long long)needed, (long long)c->page_size, (long long)c->next.num_free,
                        (long long)c->num_pages);
    return TE_OK;
}

/* Assigns pages to next.sequences, and fills `numbers` for the step. */
static void te__step_fill(te_inference_params *c, int64_t n) {
    int32_t *cu_q = c->numbers, *cu_kv = c->numbers + te__cached_at(c, 1), *start = c->numbers + te__cached_at(c, 2),
            *table = c->numbers + te__cached_at(c, 3);
    int64_t i, taken = 0;
    cu_q[0] = cu_kv[0] = 0;
    for (i = 0; i < n; i++) {
        te__cached_sequence *s = &c->next.sequences[i];
        int32_t *pages = c->next.pages + i * c->pages_of_each;
        while (s->num_pages * c->page_size < s->length) pages[s->num_pages++] = c->next.free[taken++];
        cu_q[i + 1] = cu_q[i] + (int32_t)(s->length - s->before);
        cu_kv[i + 1] = cu_kv[i] + (int32_t)s->length;
        start[i] = (int32_t)s->before;
        memset(table + i * c->pages_of_each, 0, (size_t)c->pages_of_each * sizeof(int32_t));
        memcpy(table + i * c->pages_of_each, pages, (size_t)s->num_pages * sizeof(int32_t));
    }
    for (i = n; i < c->desc.max_batch_size; i++) { /* indices without a sequence get no tokens; a graph that was
                                                    * captured with more sequences reads these indices, too */
        cu_q[i + 1] = cu_q[n];
        cu_kv[i + 1] = cu_kv[n];
        start[i] = 0;
        memset(table + i * c->pages_of_each, 0, (size_t)c->pages_of_each * sizeof(int32_t));
    }
    c->next.num_sequences = n;
    c->next.num_free -= taken;
    memmove(c->next.free, c->next.free + taken, (size_t)c->next.num_free * sizeof(int32_t));
}

TE_API te_result te_inference_params_pre_step(te_inference_params *c, const int64_t *seq_ids, const int64_t *step_lens,
                                              int64_t n) {
    te__cached_state before;
    te_result result;
    int64_t i;
    if (!c) return TE_ERR_STATE;
    if (c->te->error_code != TE_OK) return c->te->error_code;
    if (n < 0 || (n > 0 && (!seq_ids || !step_lens)))
        return te__fail(c->te, TE_ERR_INVALID, "te_inference_params_pre_step: %lld sequences%s", (long long)n,
                        n > 0 ? ", and seq_ids or step_lens is NULL" : "; 0 or more are possible");
    if (n > c->desc.max_batch_size)
        return te__fail(c->te, TE_ERR_STATE,
                        "te_inference_params_pre_step: %lld sequences, and the cache has room for %lld "
                        "(max_batch_size): leave out those that can wait, or "
                        "make a larger cache",
                        (long long)n, (long long)c->desc.max_batch_size);
    result = te__step_sequences(c, seq_ids, step_lens, n);
    for (i = 0; i < c->now.num_sequences; i++)
        c->now.sequences[i].num_pages = te__max(c->now.sequences[i].num_pages, -c->now.sequences[i].num_pages);
    if (result != TE_OK) return result;
    te__step_fill(c, n);
    result = te_tensor_copy_from_host(c->device, c->numbers);
    if (result != TE_OK) return result;
    before = c->now;
    c->now = c->next;
    c->next = before;
    c->tokens = c->numbers[n];
    for (i = 0, c->longest = 0; i < n; i++) c->longest = te__max(c->longest, step_lens[i]);
    return TE_OK;
}

/* ---- a layer ---- */

static te__cached_layer *te__cached_layer_of(te_inference_params *c, te_module *m) {
    const te_inference_params_desc *d = &c->desc;
    te_ctx *te = c->te;
    te__cached_layer l;
    const bool codes = d->dtype == TE_F8E4M3;
    bool warming;
    int i;
    for (i = 0; i < c->num_layers; i++)
        if (c->layers[i].module == m) return &c->layers[i];
    if (te->capture) {
        te__refuse_capture(te, "making a layer's cache of keys and values",
                           "call te_inference_params_allocate_memory before te_graph_begin");
        return NULL;
    }
    if (!te__grow(te, (void **)&c->layers, &c->cap_layers, c->num_layers, sizeof(te__cached_layer))) return NULL;
    int64_t shape[4] = {c->num_pages, c->page_size, d->num_heads_kv, d->head_dim_k};
    warming = te->warming; /* after te_warmup_begin no kernels run, but this memory must be zeroed even then */
    te->warming = false;
    te__frame_begin(te);
    l.k = te_tensor_retain(te_tensor_zeros(te, d->dtype, 4, shape));
    shape[3] = d->head_dim_v;
    l.v = te_tensor_retain(te_tensor_zeros(te, d->dtype, 4, shape));
    l.k_factors = codes ? te_tensor_retain(te_tensor_zeros(te, TE_F8E8M0, 3, shape)) : NULL;
    l.v_factors = codes ? te_tensor_retain(te_tensor_zeros(te, TE_F8E8M0, 3, shape)) : NULL;
    te__frame_end(te, NULL, 0);
    te->warming = warming;
    if (!l.k || !l.v || (codes && !(l.k_factors && l.v_factors))) {
        te_tensor_release(l.k);
        te_tensor_release(l.v);
        te_tensor_release(l.k_factors);
        te_tensor_release(l.v_factors);
        return NULL;
    }
    l.module = te__module_hold(m);
    c->layers[c->num_layers] = l;
    return &c->layers[c->num_layers++];
}

static te_tensor *te__cached_list(te_inference_params *c, int list, int64_t rows, int64_t cols) {
    const int64_t byte = te__cached_at(c, list) * (int64_t)sizeof(int32_t);
    return cols ? te__alias_2d(c->device, byte, TE_I32, rows, cols) : te__alias_1d(c->device, byte, TE_I32, rows);
}
TE_API te_tensor *te_inference_params_get_seqlens_pre_step(te_inference_params *c) {
    return c ? te__cached_list(c, 2, c->now.num_sequences, 0) : NULL;
}
/* Returns i32 [b + 1]: where each sequence's tokens of the step begin. */
static te_tensor *te__inference_cu_seqlens(te_inference_params *c) {
    return te__cached_list(c, 0, c->now.num_sequences + 1, 0);
}

/* Returns the number of tokens of the longest sequence. */
static int64_t te__inference_longest(const te_inference_params *c) {
    int64_t i, longest = 0;
    for (i = 0; i < c->now.num_sequences; i++) longest = te__max(longest, c->now.sequences[i].length);
    return longest;
}

/* Checks that a call can run with this cache: same context, gradients off, and a step that has sequences. */
static te_result te__inference_ready(const te_inference_params *c, const te_ctx *te, const char *who) {
    if (c->te != te)
        return te__fail((te_ctx *)te, TE_ERR_INVALID,
                        "%s: inference_params is of another context; make it in that of the model", who);
    if (te_grad_enabled(te))
        return te__fail((te_ctx *)te, TE_ERR_STATE,
                        "%s: a call with inference_params cannot be recorded; open te_no_grad_begin first", who);
    if (c->now.num_sequences == 0)
        return te__fail(
            (te_ctx *)te, TE_ERR_STATE,
            "%s: inference_params has no sequences; te_inference_params_pre_step says which ones a step has", who);
    return TE_OK;
}

/* Returns true if the cache takes keys and values of this dtype. A cache in E4M3 makes codes of any. */
static bool te__inference_takes(const te_inference_params *c, te_dtype dtype) {
    return c->desc.dtype == TE_F8E4M3 ? te__is_float(dtype) : dtype == c->desc.dtype;
}
/* Checks that x (k or v) has the heads, the channels and the dtype of the cache. Also checks that x has at least the
 * tokens of the step. */
static te_result te__inference_fits(const te_inference_params *c, const char *name, const te_tensor *x,
                                    int64_t channels, te_qkv_format format) {
    const char *const who = "te_inference_params_step";
    const int ndim = format == TE_THD ? 3 : 4;
    const int64_t n = c->now.num_sequences;
    char text[TE__SHAPE_TEXT];
    if (x->ndim != ndim || x->shape[ndim - 2] != c->desc.num_heads_kv || x->shape[ndim - 1] != channels ||
        !te__inference_takes(c, x->dtype))
        return te__fail(c->te, te__inference_takes(c, x->dtype) ? TE_ERR_SHAPE : TE_ERR_DTYPE,
                        "%s: %s is %s %s; the cache has %d heads of %lld channels in %s (%s)", who, name,
                        te_dtype_name(x->dtype), te__shape_text(x, text), c->desc.num_heads_kv, (long long)channels,
                        te_dtype_name(c->desc.dtype),
                        format == TE_THD ? "[tokens, heads, d]" : "[s, b, heads, d] or [b, s, heads, d]");
    if (format == TE_THD ? x->shape[0] < c->tokens
                         : x->shape[format == TE_BSHD ? 0 : 1] != n || x->shape[format == TE_BSHD ? 1 : 0] < c->longest)
        return te__fail(c->te, TE_ERR_SHAPE,
                        "%s: %s is %s; the step has %lld sequences, of at most %lld new tokens and %lld in all", who,
                        name, te__shape_text(x, text), (long long)n, (long long)c->longest, (long long)c->tokens);
    return TE_OK;
}

/* Sets *rows to the rows of the cache of `layer` that the step's new keys and values are written to. k and v have the
 * layout `format`, and `groups` heads of d channels; x is the projection that has them. Returns false if they do not
 * fit; te_inference_params_step then says why. */
static bool te__inference_rows(te_inference_params *c, te_module *layer, const te_tensor *x, int groups, int64_t d,
                               te_qkv_format format, te__cache_rows *rows) {
    const int64_t n = c->now.num_sequences;
    te__cached_layer *l;
    if (format == TE_THD || groups != c->desc.num_heads_kv || d != c->desc.head_dim_k || d != c->desc.head_dim_v ||
        !te__inference_takes(c, x->dtype) || x->shape[format == TE_BSHD ? 0 : 1] != n ||
        x->shape[format == TE_BSHD ? 1 : 0] < c->longest)
        return false;
    l = te__cached_layer_of(c, layer);
    if (!l) return false;
    rows->k = l->k;
    rows->v = l->v;
    rows->k_factors = l->k_factors;
    rows->v_factors = l->v_factors;
    rows->cu_seqlens = te__inference_cu_seqlens(c);
    rows->positions = te_inference_params_get_seqlens_pre_step(c);
    rows->page_table = te__cached_list(c, 3, n, c->pages_of_each);
    return rows->cu_seqlens && rows->positions && rows->page_table;
}

TE_API te_result te_inference_params_step(te_inference_params *c, te_module *layer, te_tensor *k, te_tensor *v,
                                          te_qkv_format format, te_inference_step *step) {
    te_op_copy_to_kv_cache_args a = TE_ZERO;
    te__cached_layer *l;
    te_tensor *before;
    te_result result;
    int64_t n;
    if (!c || !k || !v) return c && c->te->error_code != TE_OK ? c->te->error_code : TE_ERR_STATE;
    if (!layer || !step)
        return te__fail(c->te, TE_ERR_INVALID, "te_inference_params_step: %s is NULL", layer ? "step" : "layer");
    result = te__inference_ready(c, k->te, "te_inference_params_step");
    if (result == TE_OK) result = te__inference_fits(c, "k", k, c->desc.head_dim_k, format);
    if (result == TE_OK) result = te__inference_fits(c, "v", v, c->desc.head_dim_v, format);
    if (result != TE_OK) return result;
    n = c->now.num_sequences;
    l = te__cached_layer_of(c, layer);
    before = te_inference_params_get_seqlens_pre_step(c);
    memset(step, 0, sizeof(*step));
    step->rule.cu_seqlens_q = te__inference_cu_seqlens(c);
    step->rule.cu_seqlens_kv = te__cached_list(c, 1, n + 1, 0);
    step->rule.page_table = te__cached_list(c, 3, n, c->pages_of_each);
    if (format == TE_THD) step->rule.max_seqlen_q = c->longest;
    if (!l || !before || !step->rule.cu_seqlens_q || !step->rule.cu_seqlens_kv || !step->rule.page_table)
        return te_error_code(c->te);
    a.k = k;
    a.v = v;
    a.k_cache = step->k = l->k;
    a.v_cache = step->v = l->v;
    a.k_factors = step->rule.k_factors = l->k_factors;
    a.v_factors = step->rule.v_factors = l->v_factors;
    if (k->in_cache && v->in_cache) return TE_OK; /* te__inference_rows */
    a.format = format;
    a.cu_seqlens = step->rule.cu_seqlens_q;
    a.start_positions = before;
    a.page_table = step->rule.page_table;
    return te_op_copy_to_kv_cache(c->te, &a);
}

/* Copies all pages of each sequence to one tensor and returns it, [n, max_sequence_length, heads, d]. */
static te_tensor *te__cached_whole(te_inference_params *c, te_tensor *pages) {
    const int64_t n = c->now.num_sequences, heads = pages->shape[2], d = pages->shape[3];
    te_tensor *table = te__cached_list(c, 3, n, c->pages_of_each);
    const int64_t shape[4] = {n, c->desc.max_sequence_length, heads, d};
    return te_tensor_view(te_embedding_lookup(te__view_2d(pages, c->num_pages, c->page_size * heads * d), table), 4,
                          shape);
}
TE_API te_result te_inference_params_convert_paged_to_nonpaged(te_inference_params *c, te_module *layer, te_tensor **k,
                                                               te_tensor **v) {
    te__cached_layer *l;
    if (k) *k = NULL;
    if (v) *v = NULL;
    if (!c || !layer) return TE_ERR_STATE;
    if (c->te->error_code != TE_OK) return c->te->error_code;
    if (!k || !v)
        return te__fail(c->te, TE_ERR_INVALID,
                        "te_inference_params_convert_paged_to_nonpaged: %s is NULL; the keys and the values go to "
                        "tensors of the caller's",
                        k ? "v" : "k");
    if (c->desc.dtype == TE_F8E4M3)
        return te__fail(c->te, TE_ERR_UNSUPPORTED,
                        "te_inference_params_convert_paged_to_nonpaged: the cache is %s, whose rows have factors; f32, "
                        "f16 and bf16 are possible. te_attention reads the pages with the rule of "
                        "te_inference_params_step",
                        te_dtype_name(c->desc.dtype));
    l = te__cached_layer_of(c, layer);
    if (!l) return te_error_code(c->te);
    *k = te__cached_whole(c, l->k);
    *v = te__cached_whole(c, l->v);
    if (*k && *v) return TE_OK;
    *k = *v = NULL;
    return te_error_code(c->te);
}
