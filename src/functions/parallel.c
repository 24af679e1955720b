/* functions/parallel.c: matrix products that several ranks share, and the gathering of plain or quantized shards. This
 * file must not depend on modules. */

typedef struct te__parallel {
    te_group *group; /* not owned; may be NULL until the group is set, even if `size` is above 1 */
    int size;        /* 0 or 1: nothing is shared */
    te_parallel_mode mode;
    bool sequence;   /* true: sequence parallelism; between products each rank has only its part of the first
                      * dimension */
    int beside;      /* which exchanges run beside products: bits TE__UB_... */
} te__parallel;
/* The options ub_... of te_parallel_options. */
enum {
    TE__UB_OVERLAP_AG = 1 << 0,
    TE__UB_OVERLAP_RS = 1 << 1,
    TE__UB_OVERLAP_RS_DGRAD = 1 << 2,
    TE__UB_BULK_DGRAD = 1 << 3,
    TE__UB_BULK_WGRAD = 1 << 4
};

static bool te__shares(const te__parallel *p, te_parallel_mode mode) {
    return TE__HAS_RANKS && p->size > 1 && p->mode == mode;
}
/* Returns true if the ranks gather an operand: the input (TE_PARALLEL_COLUMN) or the gradient of the output
 * (TE_PARALLEL_ROW). */
static bool te__gathers(const te__parallel *p, te_parallel_mode mode) { return te__shares(p, mode) && p->sequence; }

/* ---- shards of the first dimension ---- */

static void te__whole_shape(const te_group *group, const te_tensor *x, int64_t shape[TE_MAX_DIMS]) {
    memcpy(shape, x->shape, sizeof(x->shape));
    shape[0] *= te__group_size(group);
}
/* Concatenates the shards x of all ranks along the first dimension. Does not record on the tape. If this rank has
 * failed, x is NULL, and all ranks return NULL. */
static te_tensor *te__gather(te_group *group, const te_tensor *x) {
    int64_t shape[TE_MAX_DIMS];
    te_tensor *y;
    if (!x) {
        te__refuse(group, TE__ALL_GATHER, te_error_code(group->te));
        return NULL;
    }
    te__whole_shape(group, x, shape);
    y = te_tensor_empty(x->te, x->dtype, x->ndim, shape);
    if (!y) te__refuse(group, TE__ALL_GATHER, te_error_code(x->te));
    return y ? te__checked(y, te__all_gather(group, x, y)) : NULL;
}

/* ---- parts of parameters ---- */

static te__split te__split_of(const te__parallel *p, te_parallel_mode mode, const te__sharding *sharding) {
    te__split s = TE_ZERO;
    s.group = p->group;
    s.size = p->size;
    s.dim = mode == TE_PARALLEL_ROW;
    if (sharding && s.dim == 0) s.sharding = *sharding;
    return s;
}
/* Notes that x is a parameter of this rank of `group` alone. `first`: see te__split. */
static void te__split_own(te_tensor *x, te_group *group, te__own_form own, int first) {
    te__free(x->te, x->split);
    x->split = (te__split *)te__alloc_zero(x->te, sizeof(te__split));
    if (!x->split) return;
    x->split->group = group;
    x->split->size = te__group_size(group);
    x->split->dim = -1;
    x->split->own = own;
    x->split->first = first;
}
/* Notes that `to`, a copy, is the same part of a parameter as `from`. */
static void te__split_same(te_tensor *to, const te_tensor *from) {
    if (!to || !from->split || to->split) return;
    to->split = (te__split *)te__alloc(to->te, sizeof(te__split));
    if (to->split) *to->split = *from->split;
}
/* Copies between the part x of one rank, NULL after an error, and the whole parameter. */
static te_result te__split_copy(te_tensor *x, te_tensor *whole, const te__split *s, int rank, bool to_whole) {
    int64_t from = 0, to = 0;
    te_result result = x ? TE_OK : te_error_code(whole->te);
    const int blocks = s->dim == 0 && s->sharding.num_blocks ? s->sharding.num_blocks : 1;
    int i;
    for (i = 0; i < blocks && result == TE_OK; i++) {
        const int64_t all = s->dim == 0 && s->sharding.num_blocks ? s->sharding.block[i] : whole->shape[s->dim],
                      own = all / s->size;
        te_tensor *part = te_tensor_narrow(x, s->dim, to, own),
                  *place = te_tensor_narrow(whole, s->dim, from + rank * own, own);
        result = !part || !place ? te_error_code(x->te)
                 : to_whole      ? te_tensor_copy(place, part)
                                 : te_tensor_copy(part, place);
        from += all;
        to += own;
    }
    return result;
}
/* Copies this rank's part of the parameter `whole` to x. */
static te_result te__split_take(te_tensor *x, te_tensor *whole, const te__split *s) {
    return te__split_copy(x, whole, s, te__group_rank(s->group), false);
}
/* Returns the whole parameter of which x, plain, is this rank's part. All ranks of the group must call it. If this rank
 * has failed, x is NULL, and all ranks return NULL. */
static te_tensor *te__split_whole(te_tensor *x, const te__split *s) {
    te_tensor *each, *whole;
    int64_t shape[TE_MAX_DIMS], rows;
    int k;
    te_result result = TE_OK;
    x = x ? te_tensor_contiguous(x) : NULL;
    each = te__gather(s->group, x);
    if (!each) return NULL;
    if (s->dim == 0 && !s->sharding.num_blocks) return each;
    memcpy(shape, x->shape, sizeof(shape));
    rows = shape[0];
    shape[s->dim] *= s->size;
    whole = te_tensor_empty(x->te, x->dtype, x->ndim, shape);
    for (k = 0; k < s->size && whole && result == TE_OK; k++)
        result = te__split_copy(te_tensor_narrow(each, 0, k * rows, rows), whole, s, k, true);
    return te__checked(whole, result);
}

/* Returns the sum of x over the ranks. Does not record on the tape. If this rank has failed, x is NULL, and all ranks
 * return NULL. */
static te_tensor *te__summed(te_group *group, te_tensor *x) {
    te_tensor *y = te__copied(x, x ? x->dtype : TE_DTYPE_NONE);
    return te__all_reduce(group, y, TE_REDUCE_SUM) == TE_OK ? y : NULL;
}

/* Sums *y over the ranks. Under sequence parallelism *y becomes this rank's part of the first dimension. An error in
 * `result` makes all ranks fail. With `beside` the sum runs beside later work, and *y has no numbers until this flight
 * has landed. `beside` may be NULL. */
static te_result te__reduce_parts(const te__parallel *p, te_tensor **y, te_result result, te__flight *beside) {
    te__collective kind = p->sequence ? TE__REDUCE_SCATTER : TE__ALL_REDUCE;
    te_tensor *part = *y;
    int64_t shape[TE_MAX_DIMS];
    char text[TE__SHAPE_TEXT];
    if (result != TE_OK) return te__refuse(p->group, kind, result);
    if (!p->sequence)
        return beside ? te__flight_begin(beside, p->group, kind, part, NULL, TE_OK)
                      : te__all_reduce(p->group, part, TE_REDUCE_SUM);
    if (part->shape[0] % p->size)
        return te__refuse(
            p->group, kind,
            te__fail(part->te, TE_ERR_SHAPE,
                     "sequence_parallel: the result of a product is %s, and %d ranks share its first dimension; "
                     "pad it to a multiple of them",
                     te__shape_text(part, text), p->size));
    memcpy(shape, part->shape, sizeof(shape));
    shape[0] /= p->size;
    *y = te_tensor_empty(part->te, part->dtype, part->ndim, shape);
    if (!*y) return te__refuse(p->group, kind, te_error_code(part->te));
    return beside ? te__flight_begin(beside, p->group, kind, part, *y, TE_OK)
                  : te__reduce_scatter(p->group, part, *y);
}

/* ---- quantized shards ---- */

/* Returns true if the codes of the shards equal those of the whole tensor. This requires that no scaling block extends
 * into the next rank's rows. A recipe with one scale per tensor also needs spec->group, which is not checked. */
static bool te__codes_gather(const te__quant_spec *spec, const te_tensor *x) {
    int64_t tile = spec->cls->form == TE__FORM_CODES ? spec->cls->shard_tile : 0;
    return tile && !spec->two_dimensional && !spec->row_scaled && !spec->swizzled && te__rows(x) % tile == 0 &&
           te__cols(x) % tile == 0;
}
/* Returns true if the codes of the quantized tensor x can be gathered (see te__codes_gather). */
static bool te__copy_gathers(const te_tensor *x) {
    const te__quant_copy *c = te__first_copy(x);
    te__quant_spec spec;
    if (x->quantized->cls->form != TE__FORM_CODES || !c->data) return false;
    spec = te__copy_spec(c);
    spec.row_scaled = c->amax && te__numel(c->amax) != 1;
    return te__codes_gather(&spec, x);
}

/* A matrix whose parts are on their way from all ranks. */
typedef struct te__travel {
    te__flight flight;
    te_tensor *whole;
    te_tensor *stage; /* u8 [size, rows, bytes of a row]: where the parts arrive; NULL: they lie in `whole` without
                       * gaps, and arrive there */
    int dim;          /* the dimension along which `whole` is put together */
    int64_t used;     /* rows (dim 0) or bytes of a row (dim 1) of each part that are no padding */
} te__travel;

/* Begins to concatenate the matrices `part` of all ranks along `dim` into `whole`: the first `used` rows (dim 0) or
 * columns (dim 1) of each; the others are padding. `beside`: later work may run meanwhile. */
static te_result te__travel_begin(te__travel *t, te_group *group, const te_tensor *part, te_tensor *whole, int dim,
                                  int64_t used, bool beside) {
    const int64_t bytes = (int64_t)te__row_bytes(part->dtype, part->shape[1]);
    int64_t shape[3];
    te_tensor *from, *to;
    shape[0] = te__group_size(group);
    shape[1] = part->shape[0];
    shape[2] = bytes;
    memset(t, 0, sizeof(*t));
    t->whole = whole;
    t->dim = dim;
    t->used = dim == 1 ? (int64_t)te__row_bytes(part->dtype, used) : used;
    from = te__alias_2d(part, 0, TE_U8, shape[1], bytes);
    if (dim == 0 && used == shape[1]) to = te__alias_as(whole, 0, TE_U8, 3, shape);
    else to = t->stage = te_tensor_empty(part->te, TE_U8, 3, shape);
    if (!from || !to) return te__refuse(group, TE__ALL_GATHER, te_error_code(part->te));
    return beside ? te__flight_begin(&t->flight, group, TE__ALL_GATHER, from, to, TE_OK)
                  : te__all_gather(group, from, to);
}
static te_result te__travel_end(te__travel *t) {
    const te_tensor *stage = t->stage;
    te_result result = te__flight_land(&t->flight);
    te_tensor *to;
    int64_t i;
    if (stage && result == TE_OK) {
        to = te__alias_2d(t->whole, 0, TE_U8, t->whole->shape[0],
                          (int64_t)te__row_bytes(t->whole->dtype, t->whole->shape[1]));
        for (i = 0; i < stage->shape[0] && result == TE_OK; i++)
            result = te_tensor_copy(te_tensor_narrow(to, t->dim, i * t->used, t->used),
                                    te_tensor_narrow(te__alias_2d(stage, i * stage->shape[1] * stage->shape[2], TE_U8,
                                                                  stage->shape[1], stage->shape[2]),
                                                     t->dim, 0, t->used));
    }
    te__flight_drop(&t->flight);
    te__drop(t->stage);
    t->stage = NULL;
    te__touch(t->whole);
    return result;
}

/* A tensor whose shards are on their way from all ranks: te__arrival_begin, then te__arrival_end in the same frame. */
typedef struct te__arrival {
    te_tensor *y;          /* the whole tensor */
    te__travel travel[4];  /* its data; or codes and scales of its copies */
    int travels;
    int usage, made;       /* y is quantized: the copies that are asked for, and those that travel */
    bool quantizes;        /* y is plain, and is quantized by `spec` when it has come */
    te__quant_spec spec;
} te__arrival;

/* Replaces *to, the scale or amax of a gathered tensor, by the tensor `from`, the scale or amax of a shard. All shards
 * have the same scale and amax. Does nothing if *to is NULL. */
static void te__share_factor(te_tensor **to, te_tensor *from) {
    if (!*to) return;
    te_tensor_release(*to);
    *to = te_tensor_retain(from);
}
static te_result te__arrive_plain(te__arrival *a, te_group *group, te_tensor *x, bool beside) {
    te__travel *t = &a->travel[0];
    int64_t shape[TE_MAX_DIMS];
    if (!x) return te__refuse(group, TE__ALL_GATHER, te_error_code(group->te));
    te__whole_shape(group, x, shape);
    a->y = t->whole = te_tensor_empty(x->te, x->dtype, x->ndim, shape);
    if (!a->y) return te__refuse(group, TE__ALL_GATHER, te_error_code(x->te));
    a->travels = 1;
    return beside ? te__flight_begin(&t->flight, group, TE__ALL_GATHER, x, a->y, TE_OK)
                  : te__all_gather(group, x, a->y);
}
static te_result te__arrive_copy(te__arrival *a, te_group *group, const te_tensor *x, int which, bool beside) {
    const te__quant_copy *from = te__copy_of(x, which);
    te__quant_copy *to = te__copy_of(a->y, which);
    const bool columnwise = which == TE_COLUMNWISE;
    const int64_t m = te__rows(x);
    te_result result = te__travel_begin(&a->travel[a->travels++], group, from->data, to->data,
                                        columnwise && from->cls->facts & TE__TRANSPOSED, m, beside);
    if (result == TE_OK && !(from->cls->facts & TE__TENSOR_SCALED))
        result = te__travel_begin(&a->travel[a->travels++], group, from->scale, to->scale,
                                  from->cls->shard_scales[columnwise], columnwise ? m / from->cls->shard_tile : m,
                                  beside);
    return result;
}
/* te__copy_gathers(x) is true. If the recipe has one scale per tensor, column-wise codes are made after the gather. */
static te_result te__arrive_codes(te__arrival *a, te_group *group, const te_tensor *x, int usage, bool beside) {
    const te__quant_copy *first = te__first_copy(x);
    const bool turned = first->cls->facts & TE__TENSOR_SCALED;
    te__quant_spec spec = te__copy_spec(first);
    te_result result = TE_OK;
    int64_t shape[TE_MAX_DIMS];
    int which;
    te__whole_shape(group, x, shape);
    spec.rht = x->quantized->col.data && x->quantized->col.rht;
    a->usage = usage;
    a->made = turned ? TE_ROWWISE : usage;
    a->y = te__quant_empty(x->te, x->dtype, x->ndim, shape, &spec, a->made, te__rows(x) % 128 != 0); /* true: padding
                                                                                                     * is 0 */
    if (!a->y) return te__refuse(group, TE__ALL_GATHER, te_error_code(x->te));
    for (which = TE_ROWWISE; which <= TE_COLUMNWISE && result == TE_OK; which++) {
        if (!(a->made & which)) continue;
        result = te__arrive_copy(a, group, x, which, beside);
        te__share_factor(&te__copy_of(a->y, which)->amax, te__copy_of(x, which)->amax);
        if (turned) te__share_factor(&te__copy_of(a->y, which)->scale, te__copy_of(x, which)->scale);
    }
    return result;
}
/* Drops an arrival that does not end. Does nothing to one that has ended or is zero. */
static void te__arrival_drop(te__arrival *a) {
    while (a->travels > 0) te__flight_drop(&a->travel[--a->travels].flight);
}
/* Begins to gather the shards x of all ranks. x is quantized, or becomes it by `spec`, which may be NULL: codes travel,
 * if they can, and *shard is this rank's. Otherwise plain rows do, which are quantized when they have come, and *shard
 * is NULL. `shard` may be NULL. `usage`: the copies that te__arrival_end returns of a quantized tensor. If this rank
 * has failed, x is NULL, and all ranks fail. */
static te_result te__arrival_begin(te__arrival *a, te_group *group, te_tensor *x, const te__quant_spec *spec, int usage,
                                   bool beside, te_tensor **shard) {
    te_result result;
    memset(a, 0, sizeof(*a));
    if (shard) *shard = NULL;
    if (x && !x->quantized && spec && te__codes_gather(spec, x)) {
        te__quant_spec own = *spec;
        if (spec->cls->facts & TE__TENSOR_SCALED) own.usage = TE_ROWWISE;
        x = te__quantize(x, &own);
        if (shard) *shard = x;
    } else if (x && x->quantized && !te__copy_gathers(x))
        x = te__plain(x);
    else if (x && !x->quantized && spec && spec->cls->form != TE__FORM_PLAIN) {
        a->quantizes = true;
        a->spec = *spec;
        a->spec.group = NULL;
    }
    result = x && x->quantized ? te__arrive_codes(a, group, x, usage, beside) : te__arrive_plain(a, group, x, beside);
    if (result != TE_OK) te__arrival_drop(a);
    return result;
}
/* Returns the whole tensor. Ends an arrival that has begun without an error. */
static te_tensor *te__arrival_end(te__arrival *a) {
    te_tensor *y = a->y;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < a->travels; i++) {
        te_result landed = te__travel_end(&a->travel[i]);
        if (result == TE_OK) result = landed;
    }
    a->travels = 0;
    if (result == TE_OK && a->usage & ~a->made) result = te__quant_add_columnwise(y);
    if (result == TE_OK && a->made & ~a->usage) te__copy_release(te__copy_of(y, TE_ROWWISE));
    if (result != TE_OK) return NULL;
    return a->quantizes ? te__quantize(y, &a->spec) : y;
}
/* Gathers at once what te__arrival_begin describes. */
static te_tensor *te__gather_by(te_group *group, te_tensor *x, const te__quant_spec *spec, int usage,
                                te_tensor **shard) {
    te__arrival a;
    return te__arrival_begin(&a, group, x, spec, usage, false, shard) == TE_OK ? te__arrival_end(&a) : NULL;
}
/* ---- as a function ---- */

static te_result te__gather_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                     te_tensor **dx, const bool *needs) {
    const te__parallel *p = (const te__parallel *)state;
    (void)saved, (void)needs;
    dx[0] = te_tensor_contiguous(dy[0]);
    return te__reduce_parts(p, &dx[0], dx[0] ? TE_OK : te_error_code(te), NULL);
}
/* Concatenates the shards x along the first dimension, and records this on the tape. The backward pass sums the
 * gradients over the ranks, and keeps this rank's part. */
static te_tensor *te__gather_rows(const te__parallel *p, te_tensor *x) {
    if (x && !te__need_float(x, "sequence_parallel")) x = NULL;
    x = te_tensor_contiguous(x);
    return te__record("gather", te__gather(p->group, x), te__gather_backward, p, sizeof(*p), &x, 1, NULL, 0);
}

static te_result te__scatter_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                      te_tensor **dx, const bool *needs) {
    (void)saved, (void)needs;
    dx[0] = te__gather(((const te__parallel *)state)->group, te_tensor_contiguous(dy[0]));
    return dx[0] ? TE_OK : te_error_code(te);
}
/* Sums x, a new tensor that nobody else has, over the ranks. Under sequence parallelism the result is this rank's part
 * of the first dimension. Recorded: the gradient of x is that of the whole sum. If this rank has failed, x is NULL, and
 * all ranks return NULL. */
static te_tensor *te__sum_rows(const te__parallel *p, te_tensor *x) {
    te_tensor *y = x;
    if (te__reduce_parts(p, &y, x ? TE_OK : te_error_code(p->group->te), NULL) != TE_OK) return NULL;
    return p->sequence ? te__record("scatter", y, te__scatter_backward, p, sizeof(*p), &x, 1, NULL, 0) : y;
}

static te_result te__input_sum_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                        te_tensor **dx, const bool *needs) {
    (void)saved, (void)needs;
    dx[0] = te__summed(((const te__parallel *)state)->group, te_tensor_contiguous(dy[0]));
    return dx[0] ? TE_OK : te_error_code(te);
}
/* Returns x for products of which each rank has columns: its gradient is the sum of theirs over the ranks. */
static te_tensor *te__input_sum(const te__parallel *p, te_tensor *x) {
    return te__record("input_sum", te__alias(x), te__input_sum_backward, p, sizeof(*p), &x, 1, NULL, 0);
}

/* ---- results that each rank reads whole ---- */

typedef struct te__whole_state {
    int size, rank, dim;
} te__whole_state;
static te_result te__whole_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                    te_tensor **dx, const bool *needs) {
    const te__whole_state *s = (const te__whole_state *)state;
    const int64_t own = dy[0]->shape[s->dim] / s->size;
    (void)saved, (void)needs;
    dx[0] = te_tensor_contiguous(te_tensor_narrow(dy[0], s->dim, s->rank * own, own));
    return dx[0] ? TE_OK : te_error_code(te);
}
/* Joins the parts x [.., N] of all ranks along the first dimension, or, with `columns`, along the last one. Each rank
 * computes the same from the whole, so the gradient of x is its part of the whole's gradient, without a sum. If this
 * rank has failed, x is NULL, and all ranks return NULL. */
static te_tensor *te__join_parts(te_group *group, te_tensor *x, bool columns) {
    te__whole_state state;
    te_tensor *y;
    int64_t shape[TE_MAX_DIMS], each[3];
    x = te_tensor_contiguous(x);
    y = te__gather(group, x);
    if (!y) return NULL;
    state.size = te__group_size(group);
    state.rank = te__group_rank(group);
    state.dim = columns ? x->ndim - 1 : 0;
    if (columns) {
        memcpy(shape, x->shape, sizeof(shape));
        shape[state.dim] *= state.size;
        each[0] = state.size;
        each[1] = te__rows(x);
        each[2] = te__cols(x);
        y = te_tensor_view(y, 3, each);
        if (each[1] > 1) y = te_tensor_contiguous(te_tensor_transpose(y, 0, 1));
        y = te_tensor_view(y, x->ndim, shape);
    }
    return te__record("join_parts", y, te__whole_backward, &state, sizeof(state), &x, 1, NULL, 0);
}
