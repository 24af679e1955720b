/* moe/grouped.c: GEMMs of groups of rows, with the group sizes on the host or on the device. This file must not depend
 * on GroupedLinear's parameters, or on how groups are chosen.
 *
 * With sizes on the host and a quantization recipe, each group has a GEMM of its own. Otherwise te_op_grouped_gemm
 * multiplies all groups at once, and reads all weights as one tensor. If the weights are not adjacent in memory, they
 * are first copied into one tensor. */

/* A function that returns the weight or the bias of group i (`kind` is "weight" or "bias"). The tensor is a parameter
 * of another module than m. */
typedef te_tensor *(*te__group_parameter_fn)(te_module *m, const char *kind, int i);

typedef struct te__grouped_module {
    te_grouped_linear_desc desc; /* in_features and out_features are those of this rank */
    te__group_parameter_fn borrow; /* NULL: weight0, weight1 ... are the module's own */
    te__scaling *scaling;
    te__weight_cache *caches; /* [num_gemms] */
} te__grouped_module;

/* One call of a GroupedLinear, with the parameters of the module and the arguments. */
typedef struct te__grouped_call {
    te_module *m;
    te__grouped_module *s;
    te__quant_call quant;
    te_microbatch microbatch;
    te_tensor *x, *y; /* x [M, in], contiguous, not recorded on the tape; y [M, out] */
    te_tensor **weights, **biases; /* [num_gemms]; biases NULL: none are added */
    const int64_t *splits;         /* group sizes on the host, or NULL */
    te_tensor *sizes;              /* group sizes on the device */
} te__grouped_call;

static void te__release_all(te_tensor *const *x, int n) {
    int i;
    for (i = 0; i < n; i++) te_tensor_release(x[i]);
}

/* Returns an alias of `rows` rows of the matrix x, from row `first` on. The alias is not recorded on the tape. */
static te_tensor *te__rows_of(const te_tensor *x, int64_t first, int64_t rows) {
    return te__alias_2d(x, first * te__cols(x) * te__dtype_size(x->dtype), x->dtype, rows, te__cols(x));
}
/* Sets the rows of x from row `first` on to 0. */
static te_result te__zero_rows_from(te_ctx *te, te_tensor *x, int64_t first) {
    te_tensor *rest;
    if (!x) return te_error_code(te);
    if (first >= te__rows(x) || te__cols(x) == 0) return TE_OK;
    rest = te__rows_of(x, first, te__rows(x) - first);
    return rest ? te_tensor_fill(rest, 0.0) : te_error_code(te);
}

/* ---- groups one by one ---- */

/* State of the tape node of te__grouped_each. The arrays te__linear_state[n] and int64_t sizes[n] follow this struct in
 * memory. */
typedef struct te__each_state {
    int n;
    bool biases;
    te__like x;
    int64_t rows, in, used; /* x as a matrix is [rows, in]; used: rows that belong to groups */
} te__each_state;
static size_t te__each_bytes(int n) {
    return sizeof(te__each_state) + (size_t)n * (sizeof(te__linear_state) + sizeof(int64_t));
}
static te__linear_state *te__each_product(const te__each_state *s) {
    return (te__linear_state *)(void *)((char *)(uintptr_t)s + sizeof(te__each_state));
}
static int64_t *te__each_sizes(const te__each_state *s) { return (int64_t *)(void *)(te__each_product(s) + s->n); }

static void te__each_release(te_ctx *te, void *state) {
    te__each_state *s = (te__each_state *)state;
    int i;
    for (i = 0; i < s->n; i++) te__linear_release(te, te__each_product(s) + i);
}
static te_result te__each_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                   te_tensor **dx, const bool *needs) {
    const te__each_state *s = (const te__each_state *)state;
    te_tensor *g = te_tensor_contiguous(dy[0]);
    te_result result = g ? TE_OK : te_error_code(te);
    int64_t at = 0;
    int i;
    if (result == TE_OK && needs[0]) {
        dx[0] = te__empty_of(te, &s->x);
        result = dx[0] ? te__zero_rows_from(te, te__alias_2d(dx[0], 0, s->x.dtype, s->rows, s->in), s->used)
                       : te_error_code(te);
    }
    for (i = 0; i < s->n && result == TE_OK; i++) {
        int64_t rows = te__each_sizes(s)[i];
        te_tensor *part = te__rows_of(g, at, rows), *made[4] = {NULL, NULL, NULL, NULL};
        const bool wanted[4] = {needs[0], needs[1 + i], s->biases && needs[1 + s->n + i], false};
        if (needs[0]) made[0] = te__alias_2d(dx[0], at * s->in * te__dtype_size(s->x.dtype), s->x.dtype, rows, s->in);
        if (!part || (needs[0] && !made[0])) return te_error_code(te);
        result = te__linear_backward(te, te__each_product(s) + i, saved + 3 * i, &part, made, wanted);
        dx[1 + i] = made[1];
        if (s->biases) dx[1 + s->n + i] = made[2];
        at += rows;
    }
    return result;
}

static te_result te__grouped_each(const te__grouped_call *c, te_tensor *input) {
    te_ctx *te = c->m->te;
    int n = c->s->desc.num_gemms, i, made = 0;
    size_t made_bytes = (size_t)n * sizeof(te__linear_made), state_bytes = te__each_bytes(n),
           list_bytes = (size_t)(5 * n + 1) * sizeof(te_tensor *);
    te__linear_made *all = (te__linear_made *)te__alloc_zero(te, made_bytes);
    te__each_state *state = (te__each_state *)te__alloc_zero(te, state_bytes);
    te_tensor **list = (te_tensor **)te__alloc_zero(te, list_bytes), **in = list,
              **saved = list ? list + 2 * n + 1 : NULL;
    te_result result = all && state && list ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    int64_t at = 0;
    if (result == TE_OK) {
        state->n = n;
        state->biases = c->biases != NULL;
        state->rows = te__rows(c->x);
        state->in = te__cols(c->x);
        state->x = te__like_of(input);
        in[0] = input;
    }
    for (i = 0; i < n && result == TE_OK; i++) {
        te__linear_call call = TE_ZERO;
        call.quant = &c->quant;
        call.gemm = call.group = i;
        call.cache = &c->s->caches[i];
        call.microbatch = c->microbatch;
        call.fuse_wgrad = c->s->desc.gemm.fuse_wgrad_accumulation;
        call.delays = c->s->desc.gemm.delay_wgrad_compute ? c->s->scaling : NULL;
        call.save_original_input = c->s->desc.save_original_input;
        call.x = te__rows_of(c->x, at, c->splits[i]);
        call.out = te__rows_of(c->y, at, c->splits[i]);
        call.weight = in[1 + i] = c->weights[i];
        if (c->biases) call.bias = in[1 + n + i] = c->biases[i];
        call.made = &all[i];
        if (!call.x || !call.out) result = te_error_code(te);
        if (result != TE_OK) break;
        call.x->requires_grad = input->requires_grad; /* the alias has no tape node of its own */
        if (!te__linear(&call)) {
            result = te_error_code(te);
            break;
        }
        te__each_product(state)[i] = all[i].state;
        memcpy(saved + 3 * i, all[i].saved, sizeof(all[i].saved));
        te__each_sizes(state)[i] = c->splits[i];
        at += c->splits[i];
        made++;
    }
    if (result == TE_OK) {
        state->used = at;
        result = te__zero_rows_from(te, c->y, at);
    }
    if (result == TE_OK) { /* te__record_owning takes over the state, and releases it even on failure */
        if (!te__record_owning("grouped_linear", c->y, te__each_backward, state, state_bytes, te__each_release, in,
                               1 + n + (c->biases ? n : 0), saved, 3 * n))
            result = te_error_code(te);
    } else
        for (i = 0; i < made; i++) te__linear_release(te, &all[i].state);
    for (i = 0; i < made; i++) te__release_all(all[i].saved, 3);
    te__free(te, all);
    te__free(te, state);
    te__free(te, list);
    return result;
}

/* ---- all groups at once ---- */

/* Returns n matrices [rows, cols] as one matrix [n * rows, cols]: an alias if the matrices are contiguous in one
 * buffer, otherwise a copy. */
static te_tensor *te__stack(te_ctx *te, te_tensor *const *x, int n) {
    int64_t rows = x[0]->ndim > 1 ? te__rows(x[0]) : 1, cols = te__cols(x[0]),
            bytes = rows * cols * te__dtype_size(x[0]->dtype);
    te_tensor *all;
    int i;
    for (i = 0; i < n && x[i]->buffer == x[0]->buffer && x[i]->dtype == x[0]->dtype &&
                x[i]->offset == x[0]->offset + i * bytes && te__is_contiguous(x[i]);
         i++) {}
    if (i == n) return te__alias_2d(x[0], 0, x[0]->dtype, n * rows, cols);
    all = te__empty_2d(te, x[0]->dtype, n * rows, cols);
    for (i = 0; i < n && all; i++) {
        te_tensor *place = te__alias_2d(all, i * bytes, all->dtype, rows, cols), *from = te__as_matrix(x[i]);
        if (!place || !from || te_tensor_copy(place, from) != TE_OK) return NULL;
    }
    return all;
}

/* The form of a quantized operand of te_op_grouped_gemm. CODES: codes and scales. EXACT: codes times block scales,
 * exact in bf16. VALUES: decoded values, rounded. */
typedef enum te__grouped_way { TE__GROUPED_CODES, TE__GROUPED_EXACT, TE__GROUPED_VALUES } te__grouped_way;

/* Returns how a grouped GEMM can get the operands `a` and w[0] to w[n - 1]. `a_which` and `w_which` select TE_ROWWISE
 * or TE_COLUMNWISE copies.
 * With block scaling, TE__GROUPED_CODES needs 1 x 128 blocks in operand `a`, and 128 x 128 blocks in each w[i]. If
 * `along_k` is true, each w[i] needs 1 x 128 blocks instead. */
static te__grouped_way te__grouped_way_of(const te_tensor *a, int a_which, te_tensor *const *w, int n, int w_which,
                                          bool along_k) {
    te__grouped_way way = TE__GROUPED_CODES;
    int i;
    for (i = 0; i < n; i++) {
        const te__quant_copy *ca = a->quantized ? te__copy_of(a, a_which) : NULL,
                             *cw = w[i]->quantized ? te__copy_of(w[i], w_which) : NULL;
        if (!te__copies_meet(ca, cw)) return TE__GROUPED_VALUES;
        if (ca->cls->facts & TE__EXACT_CODES)
            way = TE__GROUPED_EXACT;
        else if (!(ca->cls->facts & TE__TENSOR_SCALED) &&
                 (ca->two_dimensional || cw->two_dimensional == along_k))
            return TE__GROUPED_VALUES;
    }
    return way;
}
/* Returns the codes of x times their block scales, as bf16 [M, N]. Does not apply te__exact_scale or undo a Hadamard
 * transform. Keeps padding between groups. */
static te_tensor *te__exact_codes(const te_tensor *x, int which) {
    const te__quant_copy *c = te__copy_of(x, which);
    te_tensor *y =
        x->quantized->sizes && te__copy_is_padded(c, which) ? te__padded_shell(x, c) : te__alias_any(x);
    te__quant_copy *own;
    int64_t one = 1;
    if (!y) return NULL;
    te_tensor_release(y->quantized->sizes);
    y->quantized->sizes = NULL;
    own = te__copy_of(y, which);
    own->rht = false;
    if (own->amax) {
        te_tensor_release(own->amax);
        /* amax 0 decodes with a factor that rounds to 1 in bf16 */
        own->amax = te_tensor_retain(te_tensor_zeros(x->te, TE_F32, 1, &one));
        if (!own->amax) return NULL;
    }
    return own->cls->decode(y, own, which, TE_BF16);
}
/* Returns the factors for an operand of kind TE__GROUPED_EXACT: one for each group, or one for all. Returns NULL if
 * `amax` is NULL. */
static te_tensor *te__exact_scale(te_tensor *amax, const te__quant_copy *c) {
    return amax ? te__axpby(amax, NULL, te__gemm_nvfp4_factor(c->e4m3_max_256), 0.0f) : NULL;
}
/* Returns x as an operand of a grouped GEMM, converted as `way` says. Sets *scale and *scaling if the GEMM needs
 * them. */
static te_tensor *te__grouped_operand(te_tensor *x, int which, te__grouped_way way, te_dtype dtype,
                                      const te_tensor **scale, te_scaling *scaling) {
    const te__quant_copy *c = way == TE__GROUPED_VALUES ? NULL : te__copy_of(x, which);
    if (!c) return te__plain_factor(x, which, dtype);
    if (way == TE__GROUPED_EXACT) {
        *scale = te__exact_scale(c->amax, c);
        return c->amax && !*scale ? NULL : te__exact_codes(x, which);
    }
    *scale = c->scale;
    *scaling = te__scaling_kind(c);
    return c->data;
}

/* For the rows of each group i, computes g->d = a w[i], or a w[i]^T if `w_transposed` is true. */
static te_result te__grouped_rows_product(te_ctx *te, te_tensor *a, te_tensor *const *w, int n, bool w_transposed,
                                          te_op_grouped_gemm_args *g) {
    int which = w_transposed ? TE_ROWWISE : TE_COLUMNWISE, i;
    size_t bytes = 2 * (size_t)n * sizeof(te_tensor *);
    te_tensor **list = (te_tensor **)te__alloc_zero(te, bytes), **scale = list ? list + n : NULL;
    te__grouped_way way = te__grouped_way_of(a, TE_ROWWISE, w, n, which, false);
    te_result result = list ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    for (i = 0; i < n && result == TE_OK; i++) {
        const te_tensor *own = NULL;
        list[i] = te__grouped_operand(w[i], which, way, g->d->dtype, &own, &g->scaling_b);
        scale[i] = (te_tensor *)own;
        if (!list[i]) result = te_error_code(te);
    }
    if (result == TE_OK) {
        g->a = te__grouped_operand(a, TE_ROWWISE, way, g->d->dtype, &g->scale_a, &g->scaling_a);
        g->b = te__stack(te, list, n);
        if (scale[0]) g->scale_b = te__stack(te, scale, n);
        g->b_transposed = w_transposed || way == TE__GROUPED_CODES; /* column-wise codes are stored transposed */
        result = g->a && g->b && (!scale[0] || g->scale_b) ? te_op_grouped_gemm(te, g) : te_error_code(te);
    }
    te__frame_end(te, NULL, 0);
    te__free(te, list);
    return result;
}
/* For each group i, computes matrix i of g->d as dy^T x over the rows of the group. */
static te_result te__grouped_k_product(te_ctx *te, te_tensor *dy, te_tensor *x, te_op_grouped_gemm_args *g) {
    te__grouped_way way = te__grouped_way_of(dy, TE_COLUMNWISE, &x, 1, TE_COLUMNWISE, true);
    const te__quant_copy *c = way == TE__GROUPED_VALUES ? NULL : te__copy_of(x, TE_COLUMNWISE);
    te_result result;
    te__frame_begin(te);
    g->a = te__grouped_operand(dy, TE_COLUMNWISE, way, dy->dtype, &g->scale_a, &g->scaling_a);
    g->b = te__grouped_operand(x, TE_COLUMNWISE, way, dy->dtype, &g->scale_b, &g->scaling_b);
    g->along_k = true;
    g->a_transposed = way != TE__GROUPED_CODES;
    g->b_transposed = way == TE__GROUPED_CODES;
    result = g->a && g->b ? TE_OK : te_error_code(te);
    if (result == TE_OK && c && x->quantized->sizes && te__copy_is_padded(c, TE_COLUMNWISE)) {
        g->k = te__padded_rows(g->k, te__numel(g->sizes), c->cls->group_rows);
        g->sizes = te__padded_sizes(te, g->sizes, c->cls->group_rows, 0, NULL);
        if (!g->sizes) result = te_error_code(te);
    }
    if (result == TE_OK) result = te_op_grouped_gemm(te, g);
    te__frame_end(te, NULL, 0);
    return result;
}

/* Says how a GroupedLinear quantizes its input or its output gradient. Each group is quantized by itself. */
typedef struct te__grouped_spec {
    te__quant_spec spec, child[2]; /* spec.row and spec.col are NULL, or point to child[0] and child[1] */
} te__grouped_spec;

/* Returns an alias of every `step`-th element of the f32 tensor x, from element `first` on, as a strided vector [n]. */
static te_tensor *te__every(const te_tensor *x, int first, int step, int n) {
    te_tensor *y = te__alias_1d(x, first * (int64_t)sizeof(float), TE_F32, n);
    if (y) y->stride[0] = step;
    return y;
}
/* Changes *spec so that each group has its own scale and amax. Leaves *spec unchanged if all groups share one given
 * scale, or if the form of the quantizer is not TE__FORM_CODES (codes with scales). */
static te_result te__spec_by_group(const te__quant_call *q, bool backward, int slot, te_tensor *sizes,
                                   te__quant_spec *spec) {
    const te__slots *slots = backward ? &q->scaling->backward : q->forward;
    int step = backward ? TE__SLOTS_BACKWARD : TE__SLOTS_FORWARD, n = q->scaling->num_gemms;
    if (spec->cls->form != TE__FORM_CODES) return TE_OK;
    if (spec->row_scaled)
        return te__fail(q->scaling->te, TE_ERR_UNSUPPORTED,
                        "GroupedLinear: NVFP4 with an amax for each row, and m_splits_tensor, whose products take one "
                        "for each group; give the sizes in m_splits, or "
                        "leave row_scaled_activation off");
    if (spec->cls->facts & TE__SCALE_GIVEN) {
        if (spec->scale != slots->slot_scale[slot]) return TE_OK;
        spec->scale = te__every(slots->scale, slot, step, n);
        spec->amax = te__every(slots->history, slot, step, n);
        if (!spec->scale || !spec->amax) return te_error_code(q->scaling->te);
    }
    spec->sizes = sizes;
    return TE_OK;
}
/* Fills *s for the tensor of `slot` (input or output gradient). The caller must not move *s, because s->spec points
 * into it. */
static te_result te__grouped_spec_of(const te__quant_call *q, bool backward, int slot, int usage, te_tensor *sizes,
                                     te__grouped_spec *s) {
    te_result result = TE_OK;
    int i;
    s->spec = te__slot_spec(q, backward, 0, slot, usage);
    if (s->spec.cls->form != TE__FORM_PARTS) return te__spec_by_group(q, backward, slot, sizes, &s->spec);
    for (i = 0; i < 2 && result == TE_OK; i++) {
        s->child[i] = *te__spec_of(&s->spec, i ? TE_COLUMNWISE : TE_ROWWISE);
        result = te__spec_by_group(q, backward, slot, sizes, &s->child[i]);
    }
    s->spec.row = &s->child[0];
    s->spec.col = &s->child[1];
    return result;
}

/* Sets the sizes, the output and split_accumulator of a grouped GEMM in *g. All other fields become 0. */
static void te__grouped_gemm_of(te_op_grouped_gemm_args *g, const te_tensor *sizes, int n, te_tensor *d, int64_t rows,
                                int64_t cols, int64_t inner, bool split) {
    memset(g, 0, sizeof(*g));
    g->sizes = sizes;
    g->groups = n;
    g->d = d;
    g->m = rows;
    g->n = cols;
    g->k = inner;
    g->split_accumulator = split;
}

typedef struct te__all_state {
    int n;
    bool biases, quantize_grad, fuse_wgrad, overwrite_main_grad, split_dgrad, split_wgrad;
    int quantize_w; /* the copy of each weight that the backward pass makes by quantizing what it has saved; 0: none */
    int quantize_x; /* the copy of x (TE_ROWWISE or TE_COLUMNWISE) that the backward pass makes by quantizing saved[0];
                     * 0: no copy */
    te__like x;
    int64_t rows, in, out;
    te_dtype weight_dtype, bias_dtype;
    te__scaling *delays; /* an owned reference if te_backward_dw computes the weight gradients later, otherwise NULL */
    te__quant_call quant;
} te__all_state;
static void te__all_release(te_ctx *te, void *state) {
    (void)te;
    te__quant_call_drop(&((te__all_state *)state)->quant);
    te__scaling_release(((te__all_state *)state)->delays);
}

/* Operands of the GEMM that computes all weight gradients. The struct owns references only if te_backward_dw computes
 * the gradients later. The array te__var *vars[n] follows in memory. */
typedef struct te__all_wgrad {
    te_tensor *dy, *x, *sizes;
    int64_t out, in, rows;
    int n;
    te_dtype dtype;
    bool fused, overwrite, split;
    uint64_t saved_at;
} te__all_wgrad;
static te__var **te__wgrad_vars(const te__all_wgrad *g) {
    return (te__var **)(void *)((char *)(uintptr_t)g + sizeof(te__all_wgrad));
}

/* Computes the weight gradients. A fused gradient is added to the main_grad of weight i, or overwrites it. Any other
 * gradient is returned in dw[i]. */
static te_result te__all_wgrad_product(te_ctx *te, const te__all_wgrad *g, te_tensor **dw) {
    te__var **vars = te__wgrad_vars(g);
    te_dtype dtype = g->dtype;
    te_tensor *all;
    te_op_grouped_gemm_args gemm;
    te_result result;
    int i, fused = 0;
    for (i = 0; i < g->n; i++)
        if (g->fused && vars[i] && vars[i]->main_grad) {
            dtype = vars[i]->main_grad->dtype;
            fused++;
        }
    all = te__empty_2d(te, fused == g->n ? dtype : g->dtype, g->n * g->out, g->in);
    if (!all) return te_error_code(te);
    te__grouped_gemm_of(&gemm, g->sizes, g->n, all, g->out, g->in, g->rows, g->split);
    result = te__grouped_k_product(te, g->dy, g->x, &gemm);
    for (i = 0; i < g->n && result == TE_OK; i++) {
        te_tensor *part = te__rows_of(all, i * g->out, g->out),
                  *main_grad = g->fused && vars[i] ? vars[i]->main_grad : NULL;
        if (!part) return te_error_code(te);
        if (!main_grad) {
            dw[i] = part;
            continue;
        }
        result = te__axpby_into(main_grad, part, g->overwrite ? NULL : main_grad, 1.0f, 1.0f);
    }
    return result;
}
static void te__all_wgrad_release(te_ctx *te, void *state) {
    te__all_wgrad *g = (te__all_wgrad *)state;
    int i;
    te_tensor_release(g->dy);
    te_tensor_release(g->x);
    te_tensor_release(g->sizes);
    for (i = 0; i < g->n; i++)
        if (te__wgrad_vars(g)[i]) te__var_release(te, te__wgrad_vars(g)[i]);
}
static te_result te__all_wgrad_run(te_ctx *te, void *state) {
    const te__all_wgrad *g = (const te__all_wgrad *)state;
    size_t bytes = (size_t)g->n * sizeof(te_tensor *);
    te_tensor **dw;
    te_result result;
    int i;
    if (te__written_since(g->x, g->saved_at) || te__written_since(g->dy, g->saved_at) ||
        te__written_since(g->sizes, g->saved_at))
        return te__fail(te, TE_ERR_STATE,
                        "te_backward_dw: the %s of a GroupedLinear was written after te_backward, and the weights' "
                        "gradients need it; call te_backward_dw first",
                        te__written_since(g->x, g->saved_at)    ? "input"
                        : te__written_since(g->dy, g->saved_at) ? "output's gradient"
                                                                : "m_splits_tensor");
    dw = (te_tensor **)te__alloc_zero(te, bytes);
    if (!dw) return TE_ERR_OUT_OF_MEMORY;
    result = te__all_wgrad_product(te, g, dw);
    for (i = 0; i < g->n && result == TE_OK; i++)
        if (dw[i] && te__wgrad_vars(g)[i]) result = te__var_add_grad(te, te__wgrad_vars(g)[i], dw[i]);
    te__free(te, dw);
    return result;
}

static te_result te__all_weight_grads(te_ctx *te, const te__all_state *s, te_tensor *dy, te_tensor *x, te_tensor *sizes,
                                      te_tensor **dx) {
    size_t bytes = sizeof(te__all_wgrad) + (size_t)s->n * sizeof(te__var *);
    te__all_wgrad *g = (te__all_wgrad *)te__alloc_zero(te, bytes);
    te_result result;
    bool later = s->delays && s->delays->module;
    int i;
    if (!g) return TE_ERR_OUT_OF_MEMORY;
    g->dy = dy;
    g->x = x;
    g->sizes = sizes;
    g->out = s->out;
    g->in = s->in;
    g->rows = s->rows;
    g->n = s->n;
    g->dtype = s->weight_dtype;
    g->fused = s->fuse_wgrad;
    g->overwrite = s->overwrite_main_grad;
    g->split = s->split_wgrad;
    g->saved_at = te->writes;
    for (i = 0; i < s->n; i++) {
        te__wgrad_vars(g)[i] = te->playing->inputs[1 + i];
        later = later && te->playing->inputs[1 + i] && te->playing->inputs[1 + i]->leaf;
    }
    if (later) {
        te_tensor_retain(dy);
        te_tensor_retain(x);
        te_tensor_retain(sizes);
        te__note_saved(dy);
        te__note_saved(x);
        te__note_saved(sizes);
        for (i = 0; i < s->n; i++) te__wgrad_vars(g)[i]->refs++;
        result = te__defer(te, s->delays, te__all_wgrad_run, te__all_wgrad_release, g, bytes);
    } else
        result = te__all_wgrad_product(te, g, dx + 1);
    te__free(te, g);
    return result;
}

/* saved: x, sizes, weights. */
static te_result te__all_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                  te_tensor **dx, const bool *needs) {
    const te__all_state *s = (const te__all_state *)state;
    te_tensor *g = te_tensor_contiguous(dy[0]), *gq, *x = saved[0], *w[TE_MAX_GEMMS];
    bool weights = false, biases = false;
    te_result result = TE_OK;
    int i;
    if (g) g = te__alias_2d(g, 0, g->dtype, s->rows, s->out);
    if (!g) return te_error_code(te);
    for (i = 0; i < s->n; i++) {
        weights = weights || needs[1 + i];
        biases = biases || (s->biases && needs[1 + s->n + i]);
    }
    gq = g;
    if (s->quantize_grad && (needs[0] || weights)) {
        te__grouped_spec how;
        result = te__grouped_spec_of(&s->quant, true, TE__SLOT_GRAD_OUTPUT,
                                     (needs[0] ? TE_ROWWISE : 0) | (weights ? TE_COLUMNWISE : 0), saved[1], &how);
        gq = result == TE_OK ? te__quantize_operand(g, &how.spec) : NULL;
        if (!gq) return te_error_code(te);
        te__inspect(s->quant.scaling, 0, TE_TENSOR_GRAD_OUTPUT, g, gq);
    }
    if (biases) {
        te_op_grouped_column_sum_args sum = TE_ZERO;
        te_tensor *all = te__empty_2d(te, s->bias_dtype, s->n, s->out);
        sum.x = g;
        sum.sizes = saved[1];
        sum.out = all;
        result = all ? te_op_grouped_column_sum(te, &sum) : te_error_code(te);
        for (i = 0; i < s->n && result == TE_OK; i++) {
            dx[1 + s->n + i] = te__alias_1d(all, i * s->out * te__dtype_size(s->bias_dtype), s->bias_dtype, s->out);
            if (!dx[1 + s->n + i]) result = te_error_code(te);
        }
    }
    if (needs[0] && result == TE_OK) {
        te_tensor *d;
        dx[0] = te_tensor_zeros(te, s->x.dtype, s->x.ndim, s->x.shape);
        d = dx[0] ? te__alias_2d(dx[0], 0, s->x.dtype, s->rows, s->in) : NULL;
        if (d) {
            te_op_grouped_gemm_args gemm;
            te__grouped_gemm_of(&gemm, saved[1], s->n, d, s->rows, s->in, s->out, s->split_dgrad);
            for (i = 0; i < s->n && result == TE_OK; i++) {
                w[i] = te__saved_weight(saved[2 + i], &s->quant, i, s->quantize_w);
                if (!w[i]) result = te_error_code(te);
            }
            if (result == TE_OK) result = te__grouped_rows_product(te, gq, w, s->n, false, &gemm);
        } else
            result = te_error_code(te);
    }
    if (weights && result == TE_OK && s->quantize_x) {
        te__grouped_spec how;
        result = te__grouped_spec_of(&s->quant, false, TE__SLOT_INPUT, s->quantize_x, saved[1], &how);
        x = result == TE_OK ? te__quantize_operand(x, &how.spec) : NULL;
        if (!x) return te_error_code(te);
    }
    return weights && result == TE_OK ? te__all_weight_grads(te, s, gq, x, saved[1], dx) : result;
}

/* Returns the weight of group i, quantized by the recipe. */
static te_tensor *te__grouped_weight(const te__grouped_call *c, int i, int usage) {
    te__linear_call call = TE_ZERO;
    call.quant = &c->quant;
    call.gemm = i;
    call.cache = &c->s->caches[i];
    call.microbatch = c->microbatch;
    call.weight = c->weights[i];
    return te__quantized_weight(&call, usage);
}

/* Calibrates delayed scaling without quantizing: records the amax of each group of the input, and of each weight. */
static te_result te__grouped_calibrate(const te__grouped_call *c) {
    te__grouped_spec how;
    te_op_amax_args amax = TE_ZERO;
    te_result result = te__grouped_spec_of(&c->quant, false, TE__SLOT_INPUT, TE_ROWWISE, c->sizes, &how);
    int i;
    amax.x = c->x;
    amax.amax = how.spec.amax;
    amax.keep = true;
    if (result == TE_OK && how.spec.sizes && amax.amax) {
        amax.groups = te__row_groups(c->m->te, c->sizes, te__rows(c->x));
        result = amax.groups ? te_op_amax(c->m->te, &amax) : te_error_code(c->m->te);
    } else if (result == TE_OK && amax.amax)
        result = te_op_amax(c->m->te, &amax);
    for (i = 0; i < c->s->desc.num_gemms && result == TE_OK; i++) {
        te__quant_spec spec = te__slot_spec(&c->quant, false, i, TE__SLOT_WEIGHT, TE_ROWWISE);
        if (c->weights[i]->buffer && spec.amax) result = te__amax_into(c->weights[i], spec.amax);
    }
    return result;
}

/* Runs the forward pass of te__grouped_all. Fills the arrays `in`, `saved` and `w`, which
 * te__grouped_all has allocated. */
static te_result te__grouped_all_with(const te__grouped_call *c, te_tensor *input, te__all_state *state, te_tensor **in,
                                      te_tensor **saved, te_tensor **w) {
    te_ctx *te = c->m->te;
    const te_grouped_linear_desc *d = &c->s->desc;
    const te_recipe *recipe = c->quant.enabled ? &c->quant.recipe : NULL;
    te_op_grouped_gemm_args gemm;
    te_tensor *xq = c->x;
    te_result result = TE_OK;
    bool wants_weight = false, wants_x = te__wants_grad(input),
         block = recipe && te__recipe_class_of(recipe)->facts & TE__SPLITS_ALWAYS;
    int keep = recipe && recipe->backward_override == TE_BACKWARD_DEQUANTIZED ? TE_ROWWISE : TE_COLUMNWISE, i,
        n = d->num_gemms;
    if (c->quant.calibrating && !c->quant.enabled && te__keeps_scales(c->quant.scaling, &c->quant.recipe))
        result = te__grouped_calibrate(c);
    if (result != TE_OK) return result;
    in[0] = input;
    for (i = 0; i < n; i++) {
        in[1 + i] = c->weights[i];
        if (c->biases) in[1 + n + i] = c->biases[i];
        wants_weight = wants_weight || te__wants_grad(c->weights[i]);
    }
    if (recipe) {
        bool again = d->save_original_input && recipe->backward_override != TE_BACKWARD_HIGH_PRECISION;
        te__grouped_spec how;
        result = te__grouped_spec_of(&c->quant, false, TE__SLOT_INPUT, TE_ROWWISE | (wants_weight && !again ? keep : 0),
                                     c->sizes, &how);
        if (result != TE_OK) return result;
        if (d->save_original_input && (how.spec.cls->facts & TE__SCALE_GIVEN || how.spec.stochastic))
            return te__fail(te, TE_ERR_INVALID,
                            "GroupedLinear: save_original_input, and the input's quantizer is %s: quantized again, the "
                            "input would not be the same; leave the "
                            "option off, or use another recipe",
                            how.spec.stochastic ? "stochastic" : how.spec.cls->name);
        if (again && wants_weight && how.spec.cls->form != TE__FORM_PLAIN) state->quantize_x = keep;
        xq = te__quantize_operand(c->x, &how.spec);
        if (!xq) return te_error_code(te);
        if (xq != c->x) te__inspect(c->quant.scaling, 0, TE_TENSOR_INPUT, c->x, xq);
        state->split_dgrad = block || te__switch(recipe->split_dgrad, true);
        state->split_wgrad = block || te__switch(recipe->split_wgrad, true);
        state->quantize_grad = recipe->backward_override == TE_BACKWARD_QUANTIZED;
    }
    for (i = 0; i < n && result == TE_OK; i++) {
        w[i] = recipe ? te__grouped_weight(c, i, TE_ROWWISE | (wants_x ? keep : 0)) : te__plain(c->weights[i]);
        if (!w[i]) result = te_error_code(te);
    }
    te__grouped_gemm_of(&gemm, c->sizes, n, c->y, te__rows(c->x), d->out_features, d->in_features,
                        recipe && (block || te__switch(recipe->split_fprop, false)));
    if (result == TE_OK && c->biases) {
        gemm.bias = te__stack(te, c->biases, n);
        if (!gemm.bias) result = te_error_code(te);
    }
    if (result == TE_OK) result = te_tensor_fill(c->y, 0.0); /* rows after the last group stay 0 */
    if (result == TE_OK) result = te__grouped_rows_product(te, xq, w, n, true, &gemm);
    for (i = 0; i < n && result == TE_OK; i++) {
        te_tensor *x = c->weights[i];
        if (recipe && recipe->backward_override == TE_BACKWARD_HIGH_PRECISION) w[i] = te__plain(x);
        if (!w[i]) return te_error_code(te);
        saved[2 + i] = wants_x ? te__weight_to_save(x, w[i], &c->quant, keep, &state->quantize_w) : NULL;
        if (saved[2 + i] && x->var && x->var->leaf) saved[2 + i]->is_weight = true;
    }
    if (recipe && recipe->backward_override == TE_BACKWARD_HIGH_PRECISION) xq = c->x;
    saved[0] = !wants_weight       ? NULL
               : state->quantize_x ? c->x
               : xq->quantized     ? te__quant_keep(xq, te__copy_of(xq, keep)->data ? keep : TE_ROWWISE)
                                   : xq;
    saved[1] = c->sizes;
    return result;
}

static te_result te__grouped_all(const te__grouped_call *c, te_tensor *input) {
    te_ctx *te = c->m->te;
    const te_grouped_linear_desc *d = &c->s->desc;
    int n = d->num_gemms;
    size_t bytes = (size_t)(4 * n + 3) * sizeof(te_tensor *);
    te_tensor **list = (te_tensor **)te__alloc_zero(te, bytes), **saved, **w;
    te__all_state state = TE_ZERO;
    te_result result;
    if (!list) return TE_ERR_OUT_OF_MEMORY;
    saved = list + 2 * n + 1;
    w = saved + n + 2;
    result = te__grouped_all_with(c, input, &state, list, saved, w);
    if (result == TE_OK) {
        state.n = n;
        state.biases = c->biases != NULL;
        state.fuse_wgrad = d->gemm.fuse_wgrad_accumulation;
        state.overwrite_main_grad = c->microbatch == TE_MICROBATCH_FIRST;
        state.rows = te__rows(c->x);
        state.in = d->in_features;
        state.out = d->out_features;
        state.x = te__like_of(input);
        state.weight_dtype = c->weights[0]->dtype;
        state.bias_dtype = c->biases ? c->biases[0]->dtype : TE_DTYPE_NONE;
        state.delays = d->gemm.delay_wgrad_compute ? c->s->scaling : NULL;
        if (state.delays) state.delays->refs++;
        if (state.quantize_grad || state.quantize_x || state.quantize_w) state.quant = te__quant_call_keep(&c->quant);
        if (!te__record_owning("grouped_linear", c->y, te__all_backward, &state, sizeof(state), te__all_release, list,
                               1 + n + (c->biases ? n : 0), saved, n + 2))
            result = te_error_code(te);
    }
    te__free(te, list);
    return result;
}
