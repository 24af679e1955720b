/* quant/autocast.c: recipes, the autocast stack, and the scaling state that delayed recipes keep for each module. Knows quantizers;
 * must not know what a module computes. */

TE_API te_recipe te_recipe_delayed_scaling(void) {
    te_recipe r = TE_ZERO;
    r.kind = TE_RECIPE_DELAYED;
    return r;
}
TE_API te_recipe te_recipe_current_scaling(void) {
    te_recipe r = TE_ZERO;
    r.kind = TE_RECIPE_CURRENT;
    return r;
}

/* ---- scaling state ---- */

/* Slots of one GEMM, as TransformerEngine counts them. */
enum { TE__SLOT_INPUT = 0, TE__SLOT_WEIGHT = 1, TE__SLOT_OUTPUT = 2, TE__SLOTS_FORWARD = 3, TE__SLOT_GRAD_OUTPUT = 0, TE__SLOT_GRAD_INPUT = 1, TE__SLOTS_BACKWARD = 2 };
enum { TE__MAX_GEMMS = 2, TE__MAX_SLOTS = TE__MAX_GEMMS * TE__SLOTS_FORWARD };

/* One direction: scale f32 [n], history f32 [L, n]; views of single slots for the casts. */
typedef struct te__slots {
    te_tensor *scale, *history;
    te_tensor *slot_scale[TE__MAX_SLOTS], *slot_amax[TE__MAX_SLOTS];
    int n;
    bool pending; /* amaxes were recorded since the last update */
} te__slots;

typedef struct te__scaling {
    te_ctx *te;
    struct te__scaling *next;
    int num_gemms;
    te_recipe recipe; /* of the last forward */
    te__slots forward, backward;
} te__scaling;

static void te__slots_close(te__slots *s) {
    int i;
    for (i = 0; i < s->n; i++) {
        te_tensor_release(s->slot_scale[i]);
        te_tensor_release(s->slot_amax[i]);
        s->slot_scale[i] = s->slot_amax[i] = NULL;
    }
    te_tensor_release(s->scale);
    te_tensor_release(s->history);
    s->scale = s->history = NULL;
}

/* Element i of an f32 tensor as a tensor of its own. */
static te_tensor *te__slot_view(te_tensor *x, int i) {
    te_tensor *y = te__alias(x);
    if (!y) return NULL;
    y->ndim = 1;
    y->shape[0] = y->stride[0] = 1;
    y->offset += i * (int64_t)sizeof(float);
    return y;
}

/* Points the slots at these tensors (retained), or at nothing. */
static te_result te__slots_set(te__slots *s, te_tensor *scale, te_tensor *history) {
    te_ctx *te = scale ? scale->te : NULL;
    bool whole = true;
    int i;
    if (!scale || !history) return te ? te_error_code(te) : TE_ERR_OUT_OF_MEMORY;
    te_tensor_retain(scale);
    te_tensor_retain(history);
    te__slots_close(s);
    s->scale = scale;
    s->history = history;
    te__frame_begin(te);
    for (i = 0; i < s->n; i++) {
        s->slot_scale[i] = te_tensor_retain(te__slot_view(scale, i));
        s->slot_amax[i] = te_tensor_retain(te__slot_view(history, i));
        whole = whole && s->slot_scale[i] && s->slot_amax[i];
    }
    te__frame_end(te, NULL, 0);
    if (!whole) te__slots_close(s); /* else the next forward would take them for good */
    return whole ? TE_OK : te_error_code(te);
}

/* A history of `length` rows that begins with the rows of the old one; new rows are zero. */
static te_tensor *te__history_resized(te_ctx *te, const te_tensor *old, int64_t length, int n) {
    int64_t shape[2];
    te_tensor *x;
    int64_t keep;
    shape[0] = length;
    shape[1] = n;
    x = te_tensor_zeros(te, TE_F32, 2, shape);
    if (!x || !old) return x;
    keep = te__min(length, old->shape[0]);
    if (te_tensor_copy(te_tensor_narrow(x, 0, 0, keep), te_tensor_narrow(te__alias(old), 0, 0, keep)) != TE_OK) return NULL;
    return x;
}

static int te__history_length(const te_recipe *r) { return r->amax_history_len > 0 ? r->amax_history_len : 1024; }

static void te__scaling_open(te_ctx *te, te__scaling *s, int num_gemms) {
    s->te = te;
    s->num_gemms = num_gemms;
    s->forward.n = num_gemms * TE__SLOTS_FORWARD;
    s->backward.n = num_gemms * TE__SLOTS_BACKWARD;
    s->next = te->scaling;
    te->scaling = s;
}
static void te__scaling_close(te__scaling *s) {
    te__scaling **p;
    if (!s->te) return;
    for (p = &s->te->scaling; *p; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            break;
        }
    te__slots_close(&s->forward);
    te__slots_close(&s->backward);
    s->te = NULL;
}

/* fp8_max of a direction: the update scales all its slots alike. */
static te_dtype te__recipe_dtype(const te_recipe *r, bool backward) { return backward && r->format != TE_FORMAT_E4M3 ? TE_F8E5M2 : TE_F8E4M3; }

static te_result te__slots_update(te__scaling *s, te__slots *slots, bool backward) {
    te_delayed_update_args args = TE_ZERO;
    if (!slots->pending) return TE_OK;
    slots->pending = false;
    args.amax_history = &slots->history;
    args.scale = &slots->scale;
    args.count = 1;
    args.fp8_max = te_dtype_max(te__recipe_dtype(&s->recipe, backward));
    args.margin = s->recipe.margin;
    args.algo = s->recipe.amax_algo;
    return te_delayed_update(s->te, &args);
}

static void te__update_backward_slots(te_ctx *te) {
    te__scaling *s;
    for (s = te->scaling; s; s = s->next)
        if (te__slots_update(s, &s->backward, true) != TE_OK) return;
}

/* ---- autocast ---- */

TE_API te_result te_autocast_begin(te_ctx *te, const te_autocast_desc *desc) {
    te__autocast *a;
    if (!te) return TE_ERR_STATE;
    if (te->num_autocast == TE__MAX_AUTOCAST)
        return te__fail(te, TE_ERR_STATE, "te_autocast_begin: %d regions are open; is a te_autocast_end missing?", te->num_autocast);
    a = &te->autocast[te->num_autocast];
    a->recipe = desc && desc->recipe ? *desc->recipe : te_recipe_delayed_scaling();
    a->enabled = !(desc && desc->disabled);
    a->calibrating = desc && desc->calibrating;
    if (a->recipe.kind != TE_RECIPE_DELAYED && a->recipe.kind != TE_RECIPE_CURRENT)
        return te__fail(te, TE_ERR_INVALID, "te_autocast_begin: recipe kind %d; te_recipe_delayed_scaling() and te_recipe_current_scaling() make valid ones",
                        (int)a->recipe.kind);
    if ((int)a->recipe.format < 0 || a->recipe.format > TE_FORMAT_E4M3)
        return te__fail(te, TE_ERR_INVALID, "te_autocast_begin: format %d; HYBRID (1) and E4M3 (2) are possible", (int)a->recipe.format);
    if (a->recipe.amax_history_len < 0)
        return te__fail(te, TE_ERR_INVALID, "te_autocast_begin: amax_history_len %d; 1 or more (0 => 1024)", a->recipe.amax_history_len);
    te->num_autocast++;
    te->after_backward = te__update_backward_slots;
    return TE_OK;
}

TE_API te_result te_autocast_end(te_ctx *te) {
    te__scaling *s;
    te_result result = TE_OK;
    bool enabled;
    if (!te) return TE_ERR_STATE;
    if (te->num_autocast == 0) return te__fail(te, TE_ERR_STATE, "te_autocast_end without te_autocast_begin");
    enabled = te->autocast[--te->num_autocast].enabled;
    if (te->num_autocast > 0 || !enabled || !te_grad_enabled(te) || te->error_code != TE_OK) return te->error_code;
    for (s = te->scaling; s && result == TE_OK; s = s->next) result = te__slots_update(s, &s->forward, false);
    return result;
}

static const te__autocast *te__autocast_now(const te_ctx *te) { return te->num_autocast ? &te->autocast[te->num_autocast - 1] : NULL; }

TE_API bool te_autocast_enabled(const te_ctx *te) {
    const te__autocast *a = te ? te__autocast_now(te) : NULL;
    return a && a->enabled;
}

/* How slot `slot` of GEMM `gemm` is quantized under the recipe in force. */
static te__quant_spec te__slot_spec(te__scaling *s, const te_recipe *r, bool backward, int gemm, int slot, int usage) {
    te__quant_spec spec;
    te__slots *slots = backward ? &s->backward : &s->forward;
    int i = gemm * (backward ? TE__SLOTS_BACKWARD : TE__SLOTS_FORWARD) + slot;
    memset(&spec, 0, sizeof(spec));
    spec.kind = r->kind == TE_RECIPE_DELAYED ? TE_QUANT_DELAYED : TE_QUANT_CURRENT;
    spec.dtype = te__recipe_dtype(r, backward);
    spec.usage = usage;
    spec.power_of_two_scales = r->power_of_two_scales;
    spec.amax_epsilon = r->amax_epsilon;
    if (r->kind == TE_RECIPE_DELAYED) {
        spec.scale = slots->slot_scale[i];
        spec.amax = slots->slot_amax[i];
        slots->pending = true;
    }
    return spec;
}
