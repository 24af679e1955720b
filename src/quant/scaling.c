/* quant/scaling.c: the state that modules keep for recipes: delayed scales, quantizers of custom recipes, and
 * quantization errors. This file must not depend on what modules compute. */

/* The delayed scales of a module in one direction. Each of the n slots is one operand of a product. `scale` is f32 [n].
 * `history` is f32 [length, n]. slot_scale[i] is a view of scale[i]. slot_amax[i] is a view of history[0][i]. */
typedef struct te__slots {
    te_tensor *scale, *history;
    te_tensor **slot_scale, **slot_amax; /* [n] */
    int n;
    bool pending;     /* amaxes were recorded since the scales were last computed */
    te_recipe recipe; /* the recipe under which the amaxes were recorded */
    te_group *group;  /* the group that reduces the amaxes; borrowed */
    te_group *also[2]; /* te__quant_call.also */
    te_tensor *kept_scale, *kept_history; /* copies of scale and history, made when the current training step began */
    bool kept_pending;                    /* the value of `pending` at the start of the step */
} te__slots;

/* The quantizer that a custom recipe's factory has chosen for one slot. */
typedef struct te__custom_slot {
    te__quant_spec spec, child[2];
    bool own_scale; /* a delayed slot that uses the module's scale and history */
} te__custom_slot;
typedef struct te__custom_slots {
    struct te__custom_slots *next; /* the quantizers of another recipe. If the recipe changes after a forward pass,
                                    * the backward pass still uses the quantizers of the forward pass */
    te_result (*factory)(void *user, const te_quantizer_role *role, te_quantizer_desc *desc);
    void *user;
    te_format format; /* te_recipe.format; slots with own_scale have codes of this format */
    bool any_own_scale;
    te__custom_slot slot[1]; /* TE__CUSTOM_SLOTS entries for each GEMM. The allocation is larger than the struct */
} te__custom_slots;
enum { TE__CUSTOM_SLOTS = 5 }; /* in the order of te_tensor_type */

/* The operands of a product that are inspected. */
enum { TE__INSPECTED_TYPES = 3 }; /* input, weight, gradient of the output */

typedef struct te__measured {
    const te__quant_class *cls; /* NULL: not measured yet */
    int which;
    bool e4m3_max_256;
    te_tensor *counts, *sums, *amax, *scale; /* all retained. `scale` is the argument for cls->tensor_factor, or NULL */
} te__measured;

typedef struct te__inspection {
    char path[256];
    const char *module_type;
    te__measured slot[1]; /* TE__INSPECTED_TYPES entries for each GEMM. The allocation is larger than the struct */
} te__inspection;

static void te__measured_close(te__measured *s) {
    te_tensor_release(s->counts);
    te_tensor_release(s->sums);
    te_tensor_release(s->amax);
    te_tensor_release(s->scale);
    memset(s, 0, sizeof(*s));
}
/* The scaling state of a module. The module holds a reference, and so does each tape node whose backward function
 * quantizes. */
typedef struct te__scaling {
    te_ctx *te;
    int refs;
    te_module *module; /* NULL: the module was destroyed */
    struct te__scaling *next; /* the next state of this context */
    int num_gemms;
    te__slots forward, backward;
    te__custom_slots *custom;
    const char *module_type; /* the name of the module's class; static */
    te__inspection *inspection;
} te__scaling;

static bool te__slots_open(te_ctx *te, te__slots *s, int n) {
    s->n = n;
    s->slot_scale = (te_tensor **)te__alloc_zero(te, 2 * (size_t)n * sizeof(te_tensor *));
    s->slot_amax = s->slot_scale ? s->slot_scale + n : NULL;
    return s->slot_scale != NULL;
}
static void te__slots_clear(te__slots *s) {
    int i;
    for (i = 0; s->slot_scale && i < s->n; i++) {
        te_tensor_release(s->slot_scale[i]);
        te_tensor_release(s->slot_amax[i]);
        s->slot_scale[i] = s->slot_amax[i] = NULL;
    }
    te_tensor_release(s->scale);
    te_tensor_release(s->history);
    te_tensor_release(s->kept_scale);
    te_tensor_release(s->kept_history);
    s->scale = s->history = s->kept_scale = s->kept_history = NULL;
}
static void te__slots_close(te_ctx *te, te__slots *s) {
    te__slots_clear(s);
    te__free(te, s->slot_scale);
    s->slot_scale = s->slot_amax = NULL;
}

/* Returns element i of the f32 tensor x, as a tensor that shares the memory of x. */
static te_tensor *te__slot_view(const te_tensor *x, int64_t i) {
    return te__alias_1d(x, i * (int64_t)sizeof(float), TE_F32, 1);
}

/* Makes *s use the tensors `scale` and `history`, and retains both. On failure *s is left empty. */
static te_result te__slots_set(te__slots *s, te_tensor *scale, te_tensor *history) {
    te_ctx *te = scale ? scale->te : NULL;
    bool whole = true;
    int i;
    if (!scale || !history) return te ? te_error_code(te) : TE_ERR_OUT_OF_MEMORY;
    te_tensor_retain(scale);
    te_tensor_retain(history);
    te__slots_clear(s);
    s->scale = scale;
    s->history = history;
    te__frame_begin(te);
    for (i = 0; i < s->n; i++) {
        s->slot_scale[i] = te_tensor_retain(te__slot_view(scale, i));
        s->slot_amax[i] = te_tensor_retain(te__slot_view(history, i));
        whole = whole && s->slot_scale[i] && s->slot_amax[i];
    }
    te__frame_end(te, NULL, 0);
    if (!whole) te__slots_clear(s); /* else the next forward would use half-filled slots */
    return whole ? TE_OK : te_error_code(te);
}
/* Allocates kept_scale and kept_history, and copies the present scale and history into them. te_clear_error copies
 * the kept values back. */
static te_result te__slots_keep(te__slots *s) {
    te_ctx *te = s->scale->te;
    bool whole;
    te__frame_begin(te);
    s->kept_scale = te_tensor_retain(te__empty_like(s->scale, TE_F32));
    s->kept_history = te_tensor_retain(te__empty_like(s->history, TE_F32));
    s->kept_pending = false;
    whole = s->kept_scale && s->kept_history && te_tensor_copy(s->kept_scale, s->scale) == TE_OK &&
            te_tensor_copy(s->kept_history, s->history) == TE_OK;
    te__frame_end(te, NULL, 0);
    if (!whole) te__slots_clear(s);
    return whole ? TE_OK : te_error_code(te);
}

/* Returns a new history of `length` rows. It begins with the rows of `old`, which may be NULL. All other rows are
 * zero. */
static te_tensor *te__history_resized(te_ctx *te, const te_tensor *old, int64_t length, int n) {
    te_tensor *x;
    int64_t keep;
    int64_t shape[2] = {length, n};
    x = te_tensor_zeros(te, TE_F32, 2, shape);
    if (!x || !old) return x;
    keep = te__min(length, old->shape[0]);
    if (te_tensor_copy(te_tensor_narrow(x, 0, 0, keep), te_tensor_narrow(te__alias(old), 0, 0, keep)) != TE_OK)
        return NULL;
    return x;
}

/* ---- a training step that fails ----
 *
 * Scales and histories change during a step. A step that fails is repeated as a whole. So scales and histories are
 * copied when a step begins. te_clear_error copies them back.
 *
 * A step may have several microbatches. te_optimizer_step ends a step. Without an optimizer, a step lasts until the
 * next te_graph_launch, or until the next te_autocast_begin that is not inside another region. te_model_load ends a
 * step too, so that te_clear_error keeps the loaded scales. */

/* Copies all scales and histories to kept_scale and kept_history. If `back` is true, copies in the other direction. */
static te_result te__scales_move(te_ctx *te, bool back) {
    enum { MOST = 8192 /* number of tensors in one operation */ };
    te_op_multi_scale_args args = TE_ZERO;
    te__scaling *s;
    te_tensor **list;
    te_result result = TE_OK;
    int count = 0, n = 0, i, at;
    size_t bytes;
    for (s = te__quant_of(te)->scaling; s; s = s->next)
        count += 2 * ((s->forward.scale != NULL) + (s->backward.scale != NULL));
    if (count == 0) return TE_OK;
    bytes = 2 * (size_t)count * sizeof(te_tensor *);
    list = (te_tensor **)te__alloc(te, bytes);
    if (!list) return TE_ERR_OUT_OF_MEMORY;
    for (s = te__quant_of(te)->scaling; s; s = s->next)
        for (i = 0; i < 2; i++) {
            te__slots *slots = i ? &s->backward : &s->forward;
            if (!slots->scale) continue;
            list[n] = slots->scale;
            list[count + n++] = slots->kept_scale;
            list[n] = slots->history;
            list[count + n++] = slots->kept_history;
        }
    args.scale = 1.0f;
    for (at = 0; at < count && result == TE_OK; at += MOST) {
        args.in = (const te_tensor *const *)(list + (back ? count : 0) + at);
        args.out = list + (back ? 0 : count) + at;
        args.num_tensors = (int)te__min(MOST, count - at);
        result = te_op_multi_scale(te, &args);
    }
    te__free(te, list);
    for (s = te__quant_of(te)->scaling; s && result == TE_OK; s = s->next)
        for (i = 0; i < 2; i++) {
            te__slots *slots = i ? &s->backward : &s->forward;
            if (back)
                slots->pending = slots->kept_pending;
            else
                slots->kept_pending = slots->pending;
        }
    return result;
}
static te_result te__scales_give_back(te_ctx *te) {
    te_result result = te__scales_move(te, true);
    if (result == TE_OK) te__step_ends(te);
    return result;
}
/* Copies all scales and histories when a training step begins. It is called wherever a step may begin, and does nothing
 * inside a step. */
static te_result te__scales_keep(te_ctx *te) {
    te_result result = TE_OK;
    if (!te__quant_of(te)->has_scales || te->capture || te->warming || te->tape.replays) return TE_OK;
    if (te->error_code != TE_OK && te->in_step) return TE_OK; /* the step has failed, and the program has not yet called
                                                               * te_clear_error */
    if (te->step_failed) result = te__scales_give_back(te);
    if (result != TE_OK || (te->in_step && te__quant_of(te)->num_optimizers > 0)) return result;
    te->in_step = false; /* if the copy fails, there is nothing to restore */
    result = te__scales_move(te, false);
    te->in_step = result == TE_OK;
    if (te->error_code != TE_OK) te__step_fails(te);
    return result;
}

static int te__history_length(const te_recipe *r) {
    return r->delayed.amax_history_len > 0 ? r->delayed.amax_history_len : 1024;
}

static size_t te__inspection_bytes(const te__scaling *s) {
    return sizeof(te__inspection) + (size_t)(s->num_gemms * TE__INSPECTED_TYPES) * sizeof(te__measured);
}
static void te__inspection_close(te__scaling *s) {
    int i;
    if (!s->inspection) return;
    for (i = 0; i < s->num_gemms * TE__INSPECTED_TYPES; i++) te__measured_close(&s->inspection->slot[i]);
    te__free(s->te, s->inspection);
    s->inspection = NULL;
}

static size_t te__custom_slots_bytes(const te__scaling *s) {
    return sizeof(te__custom_slots) + (size_t)(s->num_gemms * TE__CUSTOM_SLOTS) * sizeof(te__custom_slot);
}
static void te__custom_slots_close(te__scaling *s, te__custom_slots *slots) {
    int i;
    for (i = 0; i < s->num_gemms * TE__CUSTOM_SLOTS; i++)
        te__spec_close_whole(&slots->slot[i].spec, slots->slot[i].child);
    te__free(s->te, slots);
}
/* Returns the quantizers that this recipe's factory has chosen, or NULL if it has not been called yet. */
static te__custom_slots *te__custom_slots_of(const te__scaling *s, const te_recipe *r) {
    te__custom_slots *slots = s->custom;
    while (slots &&
           !(slots->factory == r->custom.factory && slots->user == r->custom.user && slots->format == r->format))
        slots = slots->next;
    return slots;
}
/* Releases a reference to a scaling state; s may be NULL. */
static void te__scaling_release(te__scaling *s) {
    te__scaling **p;
    te_ctx *te;
    if (!s || --s->refs > 0) return;
    te = s->te;
    while (s->custom) {
        te__custom_slots *slots = s->custom;
        s->custom = slots->next;
        te__custom_slots_close(s, slots);
    }
    te__inspection_close(s);
    for (p = &te__quant_of(te)->scaling; *p; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            break;
        }
    te__slots_close(te, &s->forward);
    te__slots_close(te, &s->backward);
    te__free(te, s);
}
/* Releases the module's reference, when the module is destroyed. */
static void te__scaling_leave(te__scaling *s) {
    if (!s) return;
    te__deferred_forget(s->te, s);
    s->module = NULL;
    te__scaling_release(s);
}
static te__scaling *te__scaling_create(te_ctx *te, te_module *module, int num_gemms) {
    te__scaling *s = (te__scaling *)te__alloc_zero(te, sizeof(te__scaling));
    if (!s) return NULL;
    s->te = te;
    s->refs = 1;
    s->module = module;
    s->num_gemms = num_gemms;
    s->next = te__quant_of(te)->scaling;
    te__quant_of(te)->scaling = s;
    te__quant_of(te)->has_scales = true;
    if (te__slots_open(te, &s->forward, num_gemms * TE__SLOTS_FORWARD) &&
        te__slots_open(te, &s->backward, num_gemms * TE__SLOTS_BACKWARD))
        return s;
    te__scaling_release(s);
    return NULL;
}

/* ---- a call -------------------------------------------------------------------------------------------------- */

/* The quantization settings of one call of a module. A tape node keeps a copy, so the backward pass uses the same
 * recipe and group. */
typedef struct te__quant_call {
    te__scaling *scaling; /* NULL: the call runs in high precision */
    te_recipe recipe;
    te_group *group; /* reduces amaxes; borrowed */
    te_group *also[2]; /* groups whose ranks exchange codes, so that they need one scale whatever the recipe says: they
                        * reduce amaxes, too. Borrowed; NULL: none */
    bool enabled;    /* false: at most amaxes are recorded (calibrating) */
    bool calibrating;
    te__slots *forward; /* the scales that the forward pass reads, and the amaxes that it writes. They are the
                         * module's own. In the second run of a checkpointed function they are those of the
                         * te__snapshot */
} te__quant_call;

/* Returns a copy of *q for a tape node. It holds a reference to q->scaling; te__quant_call_drop releases it. */
static te__quant_call te__quant_call_keep(const te__quant_call *q) {
    te__quant_call kept = *q;
    if (kept.scaling) kept.scaling->refs++;
    kept.forward = NULL; /* the backward pass does not read it */
    return kept;
}
static void te__quant_call_drop(te__quant_call *q) {
    te__scaling_release(q->scaling);
    q->scaling = NULL;
}
