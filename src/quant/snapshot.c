/* quant/snapshot.c: keeps what must be the same in both runs of a checkpointed function, such as the random state and
 * delayed scales. This file must not depend on modules. */

typedef struct te__snapshot_scales {
    te__scaling *scaling; /* a reference */
    te_tensor *scale;     /* f32 [n]: a copy of the scales that the first run read (retained) */
    te__slots slots;      /* the slots of the second run. Their scales are the field `scale` of this struct. The second
                           * run also writes amaxes to these slots. No scales are computed from these amaxes */
} te__snapshot_scales;

typedef struct te__snapshot {
    struct te__snapshot *outer; /* the snapshot that was being recorded before this one */
    const te_module *module; /* the module whose forward is checkpointed, or NULL */
    te__rng_state rng;
    te_microbatch microbatch; /* the setting of te_step_set_is_first_microbatch */
    te__autocast *autocast; /* a copy of the autocast stack */
    int num_autocast;
    te__snapshot_scales *scales; /* in the order of the calls of modules */
    int num_scales, cap_scales, next_scales;
    te_tensor **params; /* the leaves of the tape that functions read in the first run (retained) */
    int num_params, cap_params;
    uint64_t taken_at; /* te->writes at the end of the first run */
} te__snapshot;

static void te__snapshot_free(te_ctx *te, te__snapshot *s) {
    int i;
    if (!s) return;
    for (i = 0; i < s->num_scales; i++) {
        te__slots_close(te, &s->scales[i].slots);
        te_tensor_release(s->scales[i].scale);
        te__scaling_release(s->scales[i].scaling);
    }
    for (i = 0; i < s->num_params; i++) te_tensor_release(s->params[i]);
    te__free(te, s->scales);
    te__free(te, s->params);
    te__free(te, s->autocast);
    te__free(te, s);
}

/* Keeps a reference to x if x is a leaf of the tape. The tape itself keeps no reference to x, because the first run of
 * a checkpointed function records no nodes. */
static void te__snapshot_note_leaf(te_ctx *te, te_tensor *x) {
    te__snapshot *s = te__quant_of(te)->recording;
    int i;
    if (!x || !x->requires_grad || !x->var || !x->var->leaf) return;
    for (i = 0; i < s->num_params; i++)
        if (s->params[i] == x) return;
    if (!te__grow(te, (void **)&s->params, &s->cap_params, s->num_params, sizeof(te_tensor *))) return;
    s->params[s->num_params++] = te_tensor_retain(x);
    te__note_saved(x);
}

/* Begins the first run of a checkpoint. This run records nothing on the tape. */
static te__snapshot *te__snapshot_begin(te_ctx *te, const te_module *module) {
    te__snapshot *s = (te__snapshot *)te__alloc_zero(te, sizeof(te__snapshot));
    if (!s) return NULL;
    s->module = module;
    s->rng = te__rng_now(te);
    s->microbatch = te__quant_of(te)->is_first_microbatch;
    s->num_autocast = te__quant_of(te)->num_autocast;
    s->autocast = (te__autocast *)te__alloc(te, (size_t)te__quant_of(te)->num_autocast * sizeof(te__autocast));
    if (!s->autocast) {
        te__free(te, s);
        return NULL;
    }
    memcpy(s->autocast, te__quant_of(te)->autocast, (size_t)te__quant_of(te)->num_autocast * sizeof(te__autocast));
    s->outer = te__quant_of(te)->recording;
    te__quant_of(te)->recording = s;
    te->tape.no_grad++;
    te->tape.hidden_no_grad++;
    return s;
}
static void te__snapshot_end(te_ctx *te, te__snapshot *s) {
    te->tape.hidden_no_grad--;
    te->tape.no_grad--;
    te__quant_of(te)->recording = s->outer;
    s->taken_at = te->writes;
}

/* Copies the scales of `slots` for the second run. Called in the first run, right before a module's call reads these
 * scales. */
static te_result te__snapshot_note(te_ctx *te, te__scaling *scaling, const te__slots *slots) {
    te__snapshot *s = te__quant_of(te)->recording;
    te__snapshot_scales *e;
    if (!te__grow(te, (void **)&s->scales, &s->cap_scales, s->num_scales, sizeof(te__snapshot_scales)))
        return TE_ERR_OUT_OF_MEMORY;
    e = &s->scales[s->num_scales];
    memset(e, 0, sizeof(*e));
    te__frame_begin(te);
    e->scale = te_tensor_retain(te__empty_like(slots->scale, TE_F32));
    te__frame_end(te, NULL, 0);
    if (!e->scale || te_tensor_copy(e->scale, slots->scale) != TE_OK) {
        te_tensor_release(e->scale);
        return te_error_code(te);
    }
    e->scaling = scaling;
    scaling->refs++;
    s->num_scales++;
    return TE_OK;
}

/* Prepares the scales and amaxes for the next module call of the second run, and sets *slots to them. */
static te_result te__snapshot_take(te_ctx *te, te__scaling *scaling, te__slots **slots) {
    te__snapshot *s = te__quant_of(te)->replaying;
    te__snapshot_scales *e = s->next_scales < s->num_scales ? &s->scales[s->next_scales] : NULL;
    te_tensor *amaxes;
    te_result result;
    if (!e || e->scaling != scaling)
        return te__fail(te, TE_ERR_STATE,
                        "te_checkpoint: the second run calls another module than the first: call %d of those that keep "
                        "scales is of a %s, it was %s%s; a "
                        "checkpointed function must do the same each time",
                        s->next_scales + 1, scaling->module_type, e ? "of a " : "not there",
                        e ? e->scaling->module_type : "");
    s->next_scales++;
    int64_t shape[2] = {1, scaling->forward.n};
    *slots = &e->slots;
    if (!te__slots_open(te, &e->slots, scaling->forward.n)) return TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    amaxes = te_tensor_zeros(te, TE_F32, 2, shape);
    result = amaxes ? te__slots_set(&e->slots, e->scale, amaxes) : te_error_code(te);
    te__frame_end(te, NULL, 0);
    return result;
}

/* In the second run, gives a module's call the scales of the first run. In the first run, copies the scales that the
 * call reads. */
static te_result te__snapshot_call(te_ctx *te, te__scaling *scaling, te__quant_call *call) {
    te_result result = te__quant_of(te)->replaying ? te__snapshot_take(te, scaling, &call->forward) : TE_OK;
    return result == TE_OK && te__quant_of(te)->recording ? te__snapshot_note(te, scaling, call->forward) : result;
}

/* The state that te__snapshot_replay replaces and te__snapshot_replayed restores. */
typedef struct te__replay {
    te__snapshot *outer;
    te__rng_state rng;
    te__autocast autocast[TE__MAX_AUTOCAST];
    int num_autocast, no_grad;
    te_microbatch microbatch;
} te__replay;

/* Begins the second run, which records on the tape. Fails if a parameter was written after the first run. */
static te_result te__snapshot_replay(te_ctx *te, te__snapshot *s, te__replay *r) {
    char shape[TE__SHAPE_TEXT];
    int i;
    for (i = 0; i < s->num_params; i++)
        if (te__written_since(s->params[i], s->taken_at))
            return te__fail(te, TE_ERR_STATE,
                            "te_checkpoint: the parameter %s, %s %s, was written after the forward pass, which is to "
                            "run again now; gradients would be wrong. "
                            "Call te_backward before what writes it (te_optimizer_step, te_tensor_copy ...)",
                            s->params[i]->name ? s->params[i]->name : "without a name",
                            te_dtype_name(s->params[i]->dtype), te__shape_text(s->params[i], shape));
    r->outer = te__quant_of(te)->replaying;
    r->rng = te__rng_now(te);
    memcpy(r->autocast, te__quant_of(te)->autocast, sizeof(r->autocast));
    r->num_autocast = te__quant_of(te)->num_autocast;
    r->no_grad = te->tape.no_grad;
    r->microbatch = te__quant_of(te)->is_first_microbatch;
    te__quant_of(te)->is_first_microbatch = s->microbatch;
    te__rng_back(te, s->rng);
    memcpy(te__quant_of(te)->autocast, s->autocast, (size_t)s->num_autocast * sizeof(te__autocast));
    te__quant_of(te)->num_autocast = s->num_autocast;
    te__quant_of(te)->replaying = s;
    te->tape.replays++;
    s->next_scales = 0;
    te->tape.no_grad = 0;
    return TE_OK;
}
/* Ends the second run, and releases its scales and amaxes. The tape nodes of this run hold references to the tensors
 * that they need. */
static void te__snapshot_replayed(te_ctx *te, te__snapshot *s, const te__replay *r) {
    int i;
    te__quant_of(te)->is_first_microbatch = r->microbatch;
    te->tape.no_grad = r->no_grad;
    te__quant_of(te)->replaying = r->outer;
    te->tape.replays--;
    memcpy(te__quant_of(te)->autocast, r->autocast, sizeof(r->autocast));
    te__quant_of(te)->num_autocast = r->num_autocast;
    te__rng_back(te, r->rng);
    for (i = 0; i < s->num_scales; i++) te__slots_close(te, &s->scales[i].slots);
}
