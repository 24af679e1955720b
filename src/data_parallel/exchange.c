/* data_parallel/exchange.c: when and how the gradients of units travel between ranks. This file must not depend on what
 * a module computes.
 *
 * The exchange of a bucket begins as soon as te_backward has all of its gradients, and runs beside the pass on a second
 * stream, if the group can do that (dist/flight.c). All ranks must make the exchanges in one order, and not every rank
 * reaches every unit, so the buckets of a model have a fixed order: the reverse of the order of their modules in the
 * tree, which a backward pass follows as a rule. A bucket that is ready early waits for those before it. Buckets that
 * wait at the end of the pass are exchanged then. */

/* ---- the exchange ---- */

/* Returns whether divisions by `divisor`, a power of two then, are exact for all but the smallest numbers. */
static bool te__divides_exactly(float divisor) {
    int exponent;
    return frexpf(divisor, &exponent) == 0.5f;
}
/* Returns the format in which the gradients of a bucket travel: the 16-bit format of its parameters, where the results
 * are those of f32; otherwise f32. Two ways give the results of f32:
 *   - each rank gets its slices from all ranks, and adds them up in f32 itself;
 *   - two ranks add bf16 numbers: the sum is rounded once, and the division by a power of two rounds nothing. (In f16
 *     the sum could overflow before the division.)
 * All ranks must choose the same format, also a rank that lacks the gradients. So the choice depends on the formats of
 * parameters and main_grads, which ranks compare. */
static te_dtype te__bucket_format(const te__bucket *b) {
    const te__dp_unit *u = b->unit;
    const te_dtype dtype = b->n ? b->list[0]->dtype : TE_F32;
    int i;
    if (u->set ? !(u->desc.group && u->desc.group->is.all_to_all)
               : dtype == TE_F16 || te__group_size(u->desc.group) != 2 ||
                     !te__divides_exactly(te__unit_divisor(&u->desc)))
        return TE_F32;
    for (i = 0; i < b->n; i++) {
        const te_tensor *x = b->list[i], *main_grad = te_tensor_main_grad(x);
        if (x->dtype != dtype || (main_grad && main_grad->dtype != dtype)) return TE_F32;
    }
    return dtype;
}
/* Informs the other ranks that this rank does not exchange the unit's gradients. Returns `result`. */
static te_result te__unit_refuse(const te__dp_unit *u, te_result result) {
    return te__refuse(u->desc.group, u->set ? TE__REDUCE_SCATTER : TE__ALL_REDUCE, result);
}

/* Returns whether a gradient of a unit was written after te->writes was `since`. */
static bool te__unit_is_reached(const te__dp_unit *u, uint64_t since) {
    int i, k;
    for (i = 0; i < u->num_params; i++)
        for (k = 0; k < 2; k++) {
            const te_tensor *grad = k ? te_tensor_main_grad(u->params[i]) : te_tensor_grad(u->params[i]);
            if (grad && grad->buffer && grad->buffer->written_at > since) return true;
        }
    return false;
}

/* Stores this rank's gradients of a bucket in grads[0 .. n - 1], and notes their formats. */
static te_result te__bucket_gradients(te__bucket *b, te_tensor **grads) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < b->n && result == TE_OK; i++) {
        const te_tensor *grad = te_tensor_grad(b->list[i]);
        grads[i] = NULL;
        if (b->unit->set && grad && grad->buffer && te__is_outside(grad->buffer))
            return te__refuse_capture(grad->te,
                                      "the exchange of a sharded gradient from before, to which each launch would add,",
                                      "forget gradients before te_graph_begin, or exchange them before it");
        /* during te_backward a gradient may share memory with another */
        if (b->list[i]->var) result = te__leaf_own(b->list[i]->te, b->list[i]->var);
        if (result == TE_OK) result = te__main_or_grad(b->list[i], &grads[i]);
        b->had[i] = grads[i] ? grads[i]->dtype : TE_DTYPE_NONE;
        b->lacks = b->lacks || !grads[i];
    }
    return result;
}
/* Returns, in host memory, how many ranks have the gradient of each parameter, from `counts`; the caller frees it. */
static float *te__bucket_counts(const te__bucket *b, te_tensor *counts, te_result *result) {
    te_ctx *te = b->unit->module->te;
    float *count = (float *)te__alloc(te, ((size_t)b->n + 1) * sizeof(float));
    *result = count ? te_tensor_to_f32(counts, count) : TE_ERR_OUT_OF_MEMORY;
    return count;
}

/* Two lists, of tensors that are read and of those that get their values. */
typedef struct te__pairs {
    te_tensor **from, **to; /* [capacity]; `from` is an allocation for both */
    int n;
} te__pairs;
static te__pairs te__pairs_open(te_ctx *te, int capacity) {
    te__pairs p = TE_ZERO;
    p.from = (te_tensor **)te__alloc(te, 2 * (size_t)capacity * sizeof(te_tensor *));
    p.to = p.from ? p.from + capacity : NULL;
    return p;
}
/* Adds a pair of x and the elements of the vector `flat` from `at` on. `out`: x is read; else x gets its values. */
static te_result te__pairs_add(te__pairs *p, te_tensor *x, te_tensor *flat, int64_t at, bool out) {
    te_tensor *own = te__alias_1d(x, 0, x->dtype, te__numel(x)),
              *part = te__alias_1d(flat, at * te__dtype_size(flat->dtype), flat->dtype, te__numel(x));
    if (!own || !part) return te_error_code(x->te);
    p->from[p->n] = out ? own : part;
    p->to[p->n++] = out ? part : own;
    return TE_OK;
}
/* Computes to = factor * from for each pair. */
static te_result te__pairs_scale(te_ctx *te, const te__pairs *p, float factor) {
    te_op_multi_scale_args a = TE_ZERO;
    a.in = (const te_tensor *const *)p->from;
    a.out = p->to;
    a.num_tensors = p->n;
    a.scale = factor;
    return p->n ? te_op_multi_scale(te, &a) : TE_OK;
}
/* Fills a vector of a number for each parameter of a bucket: 1 if this rank has the gradient, else 0. */
static te_result te__bucket_note_grads(const te__bucket *b, te_tensor *flags, te_tensor *const *grads) {
    te_result result = te_tensor_fill(flags, 1.0);
    int i;
    for (i = 0; i < b->n && result == TE_OK; i++)
        if (!grads[i]) result = te_tensor_fill(te_tensor_narrow(flags, 0, i, 1), 0.0);
    return result;
}
/* Returns one vector, in `format`, of all gradients; a missing gradient counts as zeros.
 * Behind the gradients, the vector has one number per parameter: 1 if this rank has the gradient, else 0. So the
 * all-reduce also counts the ranks that have the gradient. */
static te_tensor *te__bucket_flat(te_ctx *te, const te__bucket *b, te_dtype format, te_tensor *const *grads) {
    te_tensor *flat;
    te__pairs pairs = te__pairs_open(te, b->n);
    int64_t numel = 0, at = 0;
    te_result result;
    int i;
    for (i = 0; i < b->n; i++) numel += te__numel(b->list[i]);
    flat = pairs.from ? te__empty_1d(te, format, numel + b->n) : NULL;
    result = flat ? te__bucket_note_grads(b, te_tensor_narrow(flat, 0, numel, b->n), grads) : te_error_code(te);
    for (i = 0; i < b->n && result == TE_OK; i++) {
        const int64_t n = te__numel(b->list[i]);
        if (grads[i]) result = te__pairs_add(&pairs, grads[i], flat, at, true);
        else result = te_tensor_fill(te_tensor_narrow(flat, 0, at, n), 0.0);
        at += n;
    }
    if (result == TE_OK) result = te__pairs_scale(te, &pairs, 1.0f);
    te__free(te, pairs.from);
    return result == TE_OK ? flat : NULL;
}
/* Returns whether the group sums the gradients of a bucket, which travel in `format`, where they are. */
static bool te__bucket_is_summed(const te__bucket *b, te_dtype format) {
    const te_group *group = b->unit->desc.group;
    int i;
    if (!group || !group->sums) return false;
    for (i = 0; i < b->n; i++) {
        const te_tensor *main_grad = te_tensor_main_grad(b->list[i]);
        if ((main_grad ? main_grad : b->list[i])->dtype != format) return false;
    }
    return true;
}
/* Begins to sum the gradients in place. A gradient that is missing, or has another format after all, travels in memory
 * of its own. */
static te_result te__bucket_send_sums(te__bucket *b, te_dtype format, te_tensor *const *grads, te_result result) {
    te__dp_unit *u = b->unit;
    te_ctx *te = u->module->te;
    te__pairs pairs = te__pairs_open(te, b->n);
    const float divisor = te__unit_divisor(&u->desc);
    te_tensor *x;
    int i;
    b->sums = (te_tensor **)te__alloc_zero(te, ((size_t)b->n + 1) * sizeof(te_tensor *));
    b->mean = te__divides_exactly(divisor) && divisor == (float)te__group_size(u->desc.group);
    if (result == TE_OK && (!pairs.from || !b->sums)) result = te_error_code(te);
    for (i = 0; i < b->n && result == TE_OK; i++) {
        x = grads[i];
            if (!x || x->dtype != format || !te__is_contiguous(x)) {
            x = te__empty_1d(te, format, te__numel(b->list[i]));
            if (!x) result = te_error_code(te);
            else result = grads[i] ? te__pairs_add(&pairs, grads[i], x, 0, true) : te_tensor_fill(x, 0.0);
        }
        b->sums[i] = te_tensor_retain(x);
        if (result == TE_OK && b->list[i]->var) b->list[i]->var->flying = x == te_tensor_grad(b->list[i]);
    }
    if (result == TE_OK) result = te__pairs_scale(te, &pairs, 1.0f);
    te__free(te, pairs.from);
    x = result == TE_OK ? te__empty_1d(te, format, b->n) : NULL;
    if (result == TE_OK) result = x ? te__bucket_note_grads(b, x, grads) : te_error_code(te);
    if (result == TE_OK) b->sums[b->n] = te_tensor_retain(x);
    return te__flight_sums(&b->flight, u->desc.group, b->sums, b->n + 1, b->mean, result);
}
/* Stores the summed gradients, times `factor`, as gradients of the parameters: from `flat`, or from b->sums. If only
 * other ranks have the gradient of a parameter, creates it on this rank. */
static te_result te__bucket_spread(te__bucket *b, te_tensor *flat, float factor) {
    te_ctx *te = b->unit->module->te;
    const int fresh = te->tape.num_fresh;
    te__pairs pairs = te__pairs_open(te, b->n);
    te_result result = pairs.from ? TE_OK : te_error_code(te);
    te_tensor *flags = b->sums ? b->sums[b->n] : te_tensor_narrow(flat, 0, te__numel(flat) - b->n, b->n);
    float *count = b->lacks && result == TE_OK ? te__bucket_counts(b, flags, &result) : NULL;
    int64_t at = 0;
    int i;
    for (i = 0; i < b->n && result == TE_OK; i++) {
        te_tensor *param = b->list[i], *from = b->sums ? b->sums[i] : flat, *to = NULL;
        const bool had = b->had[i] != TE_DTYPE_NONE;
        const int64_t begin = b->sums ? 0 : at;
        at += te__numel(param);
        if (!had && count[i] == 0.0f) continue;
        if (had) result = te__main_or_grad(param, &to);
        else {
            to = te_tensor_empty(te, param->dtype, param->ndim, param->shape);
            result = to ? te__var_add_grad(te, param->var, to) : te_error_code(te);
        }
        if (from == to && factor == 1.0f) continue; /* it is there */
        if (result == TE_OK) result = te__pairs_add(&pairs, to, from, begin, false);
    }
    if (result == TE_OK) result = te__pairs_scale(te, &pairs, factor);
    result = te__leaves_own(te, fresh, result);
    te__free(te, count);
    te__free(te, pairs.from);
    return result;
}

/* ---- the exchange of slices ---- */

enum { TE__ROW_ALIGN = 8 }; /* elements: rows of a matrix of gradients begin at multiples of 16 bytes */
static int64_t te__bucket_num_flags(const te__bucket *b) { return te__round_up(b->n, TE__ROW_ALIGN); }
/* Returns f32 [ranks, te__bucket_num_flags]: 1 where this rank has the gradient of a parameter, else 0. */
static te_tensor *te__bucket_flags(const te__bucket *b, te_tensor *const *grads, int ranks) {
    te_ctx *te = b->unit->module->te;
    int64_t shape[2];
    float *flags;
    te_tensor *x;
    int r, i;
    shape[0] = ranks;
    shape[1] = te__bucket_num_flags(b);
    if (!b->lacks) return te_tensor_full(te, TE_F32, 2, shape, 1.0);
    flags = (float *)te__alloc_zero(te, (size_t)(shape[0] * shape[1]) * sizeof(float));
    if (!flags) return NULL;
    for (r = 0; r < ranks; r++)
        for (i = 0; i < b->n; i++) flags[r * shape[1] + i] = grads[i] ? 1.0f : 0.0f;
    x = te_tensor_from_host(te, TE_F32, 2, shape, flags);
    te__free(te, flags);
    return x;
}
/* Returns how many elements a rank's slices of a bucket's gradients have, with the gaps between them. */
static int64_t te__bucket_columns(const te__bucket *b) {
    int64_t columns = 0;
    int i;
    for (i = 0; i < b->n; i++) columns += b->list[i]->shard->chunk * b->list[i]->shard->width;
    return columns;
}
/* Returns one matrix [ranks, columns], in `format`, of all gradients; row r is for rank r, and has its slices of the
 * gradients. Behind them, each row has one number per parameter: 1 if this rank has the gradient, else 0. */
static te_tensor *te__bucket_rows(te__bucket *b, te_dtype format, int64_t columns, te_tensor *const *grads) {
    te_ctx *te = b->unit->module->te;
    const te__shard_set *set = b->unit->set;
    te_tensor *rows = te__empty_2d(te, format, set->size, columns), *flags;
    te_result result = rows ? TE_OK : te_error_code(te);
    const int64_t size = te__dtype_size(format);
    int64_t at = 0;
    bool gaps = false; /* slices may be shorter than their places */
    int i;
    for (i = 0; i < b->n; i++)
        gaps = gaps || !grads[i] || b->list[i]->shard->chunk * set->size != b->list[i]->shard->rows;
    if (result == TE_OK && gaps) result = te_tensor_fill(rows, 0.0);
    for (i = 0; i < b->n && result == TE_OK; i++) {
        const te__shard *s = b->list[i]->shard;
        if (grads[i])
            result = te__shard_copy(rows, columns * size, at * size, format, grads[i], grads[i]->dtype, s, s->width,
                                    s->width, true);
        at += s->chunk * s->width;
    }
    if (result != TE_OK) return NULL;
    flags = te__bucket_flags(b, grads, set->size);
    return flags && te_tensor_copy(te_tensor_narrow(rows, 1, at, columns - at), flags) == TE_OK ? rows : NULL;
}
/* Drops the whole gradients of a bucket, which are on their way. */
static te_result te__bucket_drop_gradients(te__bucket *b) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < b->n && result == TE_OK; i++) {
        te__var *v = b->list[i]->var;
        if (!v) continue;
        if (v->main_grad) result = te_tensor_fill(v->main_grad, 0.0);
        te_tensor_release(v->grad);
        v->grad = NULL;
    }
    return result;
}
/* Returns a vector: elements `at` to at + n - 1 of the sum of the first `rows` of x [any, columns], added in f32 in
 * their order. One row is not copied. */
static te_tensor *te__sum_of_rows(te_tensor *x, int rows, int64_t at, int64_t n) {
    const int64_t columns = x->shape[1], size = te__dtype_size(x->dtype);
    te_tensor *sum = te__alias_1d(x, at * size, x->dtype, n);
    int i;
    for (i = 1; i < rows && sum; i++) {
        const te_tensor *row = te__alias_1d(x, (i * columns + at) * size, x->dtype, n);
        te_tensor *to = i > 1 ? sum : te__empty_1d(x->te, TE_F32, n);
        sum = row && to && te__axpby_into(to, sum, row, 1.0f, 1.0f) == TE_OK ? to : NULL;
    }
    return sum;
}
/* Adds this rank's slices of the gradients, times 1 / divisor, to the gradients of the slices. Their sum over the ranks
 * is that of the rows of `rows`. */
static te_result te__bucket_keep_slices(te__bucket *b, te_tensor *rows, float divisor) {
    te_ctx *te = b->unit->module->te;
    const int64_t columns = rows->shape[1], size = te__dtype_size(rows->dtype);
    const int n = (int)rows->shape[0];
    const bool fused = n > 1 && te__divides_exactly(divisor); /* the last addition and the product are one pass */
    const float factor = 1.0f / divisor;
    te_result result = TE_OK;
    float *count =
        b->lacks ? te__bucket_counts(b, te__sum_of_rows(rows, n, te__bucket_columns(b), b->n), &result) : NULL;
    int64_t at = 0;
    int i;
    for (i = 0; i < b->n && result == TE_OK; i++) {
        te_tensor *x = b->list[i], *own, *sum, *row = NULL;
        te__shard *s = x->shard;
        const int64_t begin = at;
        const bool had = b->had[i] != TE_DTYPE_NONE;
        at += s->chunk * s->width;
        if (!had && count[i] == 0.0f) continue;
        own = x->var->shard_grad;
        if (own) { /* an exchange before this one, since the last step */
            sum = te__sum_of_rows(rows, n, begin, s->length);
            result = sum ? te__axpby_into(own, sum, own, factor, 1.0f) : te_error_code(te);
            continue;
        }
        own = te__empty_1d(te, had ? b->had[i] : x->dtype, s->length);
        sum = te__sum_of_rows(rows, fused ? n - 1 : n, begin, s->length);
        if (fused) row = te__alias_1d(rows, ((n - 1) * columns + begin) * size, rows->dtype, s->length);
        if (!own || !sum || (fused && !row)) result = te_error_code(te);
        else if (s->length > 0)
            result = te__axpby_into(own, sum, row, factor, fused ? factor : 0.0f);
        if (result != TE_OK) break;
        x->var->shard_grad = te_tensor_retain(own);
        own->is_gradient = s->fresh = true;
        te__capture_has_grad(te, x->var);
    }
    te__free(te, count);
    return result;
}
/* Checks that the bucket's parameters are those that the unit had when it was sharded. */
static te_result te__bucket_same_params(const te__bucket *b) {
    int i;
    for (i = 0; i < b->n; i++)
        if (!b->list[i]->shard || b->list[i]->shard->set != b->unit->set)
            return te__fail(b->unit->module->te, TE_ERR_STATE,
                            "unit \"%s\": its trained parameter %d of %d was added, or made trainable, after the unit "
                            "was sharded; make the unit after all parameters",
                            b->unit->module->name, b->at + i + 1, b->unit->num_params);
    return te__shards_same(b->unit->set);
}

/* Begins the exchange of rows for all ranks. When it has ended, b->flight.out has the rows of all ranks for this one;
 * or one row, their sum. */
static te_result te__bucket_send_slices(te__bucket *b, te_dtype format, te_tensor *const *grads, te_result result) {
    te__dp_unit *u = b->unit;
    te_ctx *te = u->module->te;
    const te__collective kind = format == TE_F32 ? TE__REDUCE_SCATTER : TE__ALL_TO_ALL;
    te_tensor *rows = NULL, *own = NULL;
    if (result == TE_OK) {
        const int64_t columns = te__bucket_columns(b) + te__bucket_num_flags(b);
        rows = te__bucket_rows(b, format, columns, grads);
        own = rows ? te__empty_2d(te, format, kind == TE__ALL_TO_ALL ? u->set->size : 1, columns) : NULL;
        result = own ? TE_OK : te_error_code(te);
    }
    return te__flight_begin(&b->flight, u->desc.group, kind, rows, own, result);
}

/* ---- one bucket ---- */

/* Begins the exchange of a bucket. b->had stays NULL if there is nothing to exchange. */
static te_result te__bucket_begin(te__bucket *b) {
    te__dp_unit *u = b->unit;
    te_ctx *te = u->module->te;
    te_tensor **grads, *flat = NULL;
    te_dtype format;
    te_result result = TE_OK;
    b->done = true;
    b->lacks = false;
    if (u->set) result = te__bucket_same_params(b);
    if (u->set && result == TE_OK) result = te__shards_capture(u->set);
    if (result == TE_OK && (b->n == 0 || (!u->set && te__group_size(u->desc.group) == 1 &&
                                          u->desc.gradient_divide_factor == 0.0f)))
        return TE_OK;
    if (result == TE_OK && !u->met) {
        result = te__unit_meets(u->module, &u->desc);
        u->met = result == TE_OK && !te->warming && !te->capture;
    }
    if (result == TE_OK) result = te__units_meet_model(u);
    b->had = (te_dtype *)te__alloc_zero(te, (size_t)b->n * sizeof(te_dtype));
    grads = (te_tensor **)te__alloc_zero(te, (size_t)b->n * sizeof(te_tensor *));
    if (result == TE_OK && (!b->had || !grads)) result = TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    te->tape.no_grad++;
    if (result == TE_OK) result = te__bucket_gradients(b, grads);
    if (result == TE_OK && b->lacks && te->capture) /* the host must know whether another rank has it */
        result = te__refuse_capture(te, "the exchange of a parameter's gradient, which this rank does not have,",
                                    "let each pass reach all trained parameters of a unit, or freeze the others "
                                    "(te_tensor_set_requires_grad)");
    format = te__bucket_format(b);
    if (!u->set && te__bucket_is_summed(b, format))
        result = te__bucket_send_sums(b, format, grads, result);
    else if (!u->set) {
        flat = result == TE_OK ? te__bucket_flat(te, b, format, grads) : NULL;
        if (result == TE_OK && !flat) result = te_error_code(te);
        result = te__flight_begin(&b->flight, u->desc.group, TE__ALL_REDUCE, flat, NULL, result);
    } else
        result = te__bucket_send_slices(b, format, grads, result);
    if (result == TE_OK && u->set && !te->warming) result = te__bucket_drop_gradients(b);
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    te__free(te, grads);
    if (result != TE_OK) te__bucket_drop(b);
    return result;
}
/* Ends an exchange that te__bucket_begin has begun. `result`: an error of this rank from before, after which the sums
 * are dropped. */
static te_result te__bucket_land(te__bucket *b, te_result result) {
    te__dp_unit *u = b->unit;
    te_ctx *te = u->module->te;
    const float divisor = te__unit_divisor(&u->desc);
    if (!b->had) return result;
    te__frame_begin(te);
    te->tape.no_grad++;
    if (result == TE_OK) result = te__flight_land(&b->flight);
    if (result == TE_OK && !u->set)
        result = te__bucket_spread(b, b->flight.x, b->sums && b->mean ? 1.0f : 1.0f / divisor);
    else if (result == TE_OK && !te->warming) result = te__bucket_keep_slices(b, b->flight.out, divisor);
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    te__bucket_drop(b);
    u->exchanged_at = te->writes;
    return result;
}
/* Calls the program's own exchange of a unit. */
static te_result te__unit_post_backward(te__dp_unit *u) {
    te_ctx *te = u->module->te;
    te_result result = te__returned(te, u->desc.post_backward(u->desc.user, u->module), "the post_backward",
                                    u->module->name);
    /* if the callback has already set an error, that error stays */
    if (result != TE_OK)
        te__fail(te, result, "the post_backward of \"%s\" returned %s", u->module->name, te_result_name(result));
    u->exchanged_at = te->writes;
    return result;
}
/* Ends the oldest exchanges that are under way, until `most` are left. */
static te_result te__buckets_land(te_ctx *te, int most, te_result result) {
    te__sharding_state *s = te__sharding_of(te);
    while (s->num_flying > most) {
        te__bucket *b = s->flying[0];
        memmove(s->flying, s->flying + 1, (size_t)--s->num_flying * sizeof(s->flying[0]));
        result = te__bucket_land(b, result);
    }
    return result;
}
/* Begins the exchange of a bucket, if its unit's requires_gradient_sync is set. */
static te_result te__bucket_exchange(te__bucket *b) {
    te_ctx *te = b->unit->module->te;
    te__sharding_state *s = te__sharding_of(te);
    te_result result;
    if (!b->unit->state.requires_gradient_sync) return TE_OK;
    if (b->unit->desc.post_backward) {
        b->done = true;
        return te__unit_post_backward(b->unit);
    }
    result = te__buckets_land(te, TE__MAX_FLIGHTS - 1, TE_OK);
    if (result == TE_OK) result = te__bucket_begin(b);
    if (result == TE_OK && b->had) s->flying[s->num_flying++] = b;
    return result == TE_OK && !b->flight.end ? te__buckets_land(te, 0, TE_OK) : result; /* it has run already */
}
/* Exchanges the gradients of u between the ranks now, if state.requires_gradient_sync is set. */
static te_result te__unit_exchange(te__dp_unit *u) {
    te_ctx *te = u->module->te;
    te_result result = TE_OK;
    int i;
    if (!u->state.requires_gradient_sync) return TE_OK;
    result = te__units_list(te);
    if (result != TE_OK) return te__unit_refuse(u, result);
    for (i = 0; i < u->num_buckets && result == TE_OK; i++) result = te__bucket_exchange(&u->buckets[i]);
    result = te__buckets_land(te, 0, result);
    if (!te__sharding_of(te)->listed) te__units_forget(te);
    return result;
}

/* ---- a backward pass ---- */

/* Appends the buckets of a model to those that are exchanged in this pass: the last module of the tree comes first. */
static void te__units_queue(te_ctx *te, const te_module *root) {
    te__sharding_state *s = te__sharding_of(te);
    const int first = s->num_turn;
    te__dp_unit *u;
    int i, k;
    for (u = s->units; u; u = u->next) {
        if (!u->state.requires_gradient_sync || te__root_of(u->module) != root) continue;
        for (k = 0; k < u->num_buckets; k++) {
            te__bucket *b = &u->buckets[k];
            if (b->done) continue;
            if (!te__grow(te, (void **)&s->turn, &s->cap_turn, s->num_turn, sizeof(te__bucket *))) return;
            for (i = s->num_turn++; i > first && s->turn[i - 1]->place < b->place; i--) s->turn[i] = s->turn[i - 1];
            s->turn[i] = b;
        }
    }
}

/* Returns whether te__units_mark has marked a parameter of m, or of a module below, in the pass number `pass`. */
static bool te__units_are_marked(const te_module *m, uint64_t pass) {
    bool marked = false;
    int i;
    for (i = 0; i < m->num_entries && !marked; i++)
        marked = m->entries[i].tensor->var && m->entries[i].tensor->var->pass == pass;
    for (i = 0; i < m->num_children && !marked; i++) marked = te__units_are_marked(m->children[i], pass);
    return marked;
}
/* Adds `step` to the counts of the unit and of the bucket that have the variable v. */
static void te__unit_count(te__var *v, int step) {
    if (v && v->unit) ((te__dp_unit *)v->unit)->pending += step;
    if (v && v->bucket) ((te__bucket *)v->bucket)->pending += step;
}
/* Adds `step` to the counts of the units that have the parameters that a node reads. */
static void te__units_count(te__sharding_state *s, const te__node *node, int step) {
    const te__snapshot *again = te__checkpoint_snapshot(node);
    int k;
    if (node->foreign) s->foreign += step;
    for (k = 0; k < node->num_inputs; k++) te__unit_count(node->inputs[k], step);
    for (k = 0; again && k < again->num_params; k++) te__unit_count(again->params[k]->var, step);
}
/* Returns whether some parameter of a bucket was not marked in the pass number `pass`. */
static bool te__bucket_is_hidden(const te__bucket *b, uint64_t pass) {
    int i;
    for (i = 0; i < b->n; i++)
        if (!(b->list[i]->var && b->list[i]->var->pass == pass)) return true;
    return false;
}
/* Makes the variables of all parameters point to their units and buckets. */
static te_result te__units_mark_params(te_ctx *te) {
    te__sharding_state *s = te__sharding_of(te);
    te_result result;
    te__dp_unit *u;
    int i, k;
    s->listed = false;
    result = te__units_list(te);
    for (u = s->units; u; u = u->next) {
        u->pending = 0;
        te__unit_mark_params(u->module, u, u);
        for (k = 0; k < u->num_buckets; k++)
            for (i = 0; i < u->buckets[k].n; i++)
                if (u->buckets[k].list[i]->var) u->buckets[k].list[i]->var->bucket = &u->buckets[k];
    }
    s->listed = result == TE_OK;
    return result;
}
/* Marks the variables that a backward pass from the `count` tensors y can reach, and counts how often its nodes read
 * parameters of each unit. Decides which units exchange gradients in the pass. */
static void te__units_mark(te_ctx *te, const te__segment *s, te_tensor *const *y, int count) {
    const uint64_t pass = ++te->tape.passes;
    te__sharding_state *state = te__sharding_of(te);
    te__dp_unit *u;
    int i, k;
    state->foreign = 0;
    state->met_foreign = false;
    state->num_roots = 0;
    state->began_at = te->writes;
    if (state->units) te__units_mark_params(te); /* after a failure there are no lists, and the pass fails */
    if (!state->units && !te->shared) return;
    for (i = 0; i < count; i++)
        if (y[i]->var) y[i]->var->pass = pass;
    for (i = s->num_nodes - 1; i >= 0; i--) {
        const te__node *node = s->nodes[i];
        const te__snapshot *again;
        for (k = 0; node && k < node->num_outputs && !(node->outputs[k] && node->outputs[k]->pass == pass); k++) {}
        if (!node || k == node->num_outputs) continue;
        for (k = 0; k < node->num_inputs; k++)
            if (node->inputs[k]) node->inputs[k]->pass = pass;
        again = te__checkpoint_snapshot(node);
        for (k = 0; again && k < again->num_params; k++)
            if (again->params[k]->var) again->params[k]->var->pass = pass;
        te__units_count(state, node, 1);
        if (node->path) te__pass_meets(state, node->path->root);
    }
    state->met_foreign = state->foreign > 0;
    for (u = state->units; u; u = u->next)
        for (k = 0; k < u->num_buckets; k++)
            u->buckets[k].hidden = state->met_foreign && te__bucket_is_hidden(&u->buckets[k], pass);
    for (u = state->units; u; u = u->next)
        if (te__unit_is_first(state, u) && te__units_are_marked(te__root_of(u->module), pass)) {
            te__pass_meets(state, te__root_of(u->module));
            te__units_queue(te, te__root_of(u->module));
        }
}

/* Returns whether te_backward_dw still has to compute weight gradients of `top` or of a module below it. */
static bool te__units_are_deferred(const te_module *top) {
    const te__deferred *d = top->te->deferred;
    while (d && !te__scaling_below(d->owner, top)) d = d->next;
    return d != NULL;
}

/* Returns whether a node has saved a parameter of u whose memory is gathered and released. */
static bool te__unit_is_saved(const te__dp_unit *u, const te__node *node) {
    int i;
    for (i = 0; i < node->num_saved; i++) {
        const te_tensor *x = node->saved[i];
        if (x && x->moves && x->shard && x->shard->set == u->set) return true;
    }
    return false;
}
/* Returns whether a node that is played next needs a unit that te__unit_gather has not been called for. The first unit
 * of a pass may have stayed since its forward (no_reshard_after_forward): the one that comes next is then asked for. */
static bool te__unit_is_due(const te__sharding_state *s, const te__dp_unit *u, const te__node *node) {
    return u->set && u->set->of_parameters && (!te__shards_are_whole(u->set) || !s->gathered[TE__AHEAD_NODE]) &&
           te__unit_is_saved(u, node);
}
/* Called before te_backward plays a node: gathers the sharded parameters that the node has saved. If a checkpointed
 * function spans several units, first releases those that its nodes have gathered before: as a rule their turn is
 * over, else the next node gathers them again. */
static te_result te__units_node_begins(te_ctx *te, te__node *node) {
    te__sharding_state *s = te__sharding_of(te);
    te_result result = TE_OK;
    te__dp_unit *u;
    bool gathers = false;
    for (u = s->units; u && !gathers; u = u->next) gathers = te__unit_is_due(s, u, node);
    if (!gathers) return TE_OK;
    for (u = s->units; u && result == TE_OK; u = u->next) {
        if (!u->inner || u->set->depth > 0 || te__unit_is_saved(u, node)) continue;
        u->inner = false;
        if (u->state.reshard_after_backward) result = te__shards_scatter(u->set);
    }
    for (u = s->units; u && result == TE_OK; u = u->next) {
        if (!te__unit_is_due(s, u, node)) continue;
        if (!te__shards_are_whole(u->set)) u->inner = te->tape.plays > 1;
        result = te__unit_gather(u, TE__AHEAD_NODE);
    }
    return result;
}
/* Called when te_backward has played a node. Releases gathered parameters that no later node reads, and exchanges the
 * gradients of units that are complete and whose turn it is. */
static te_result te__units_node_ends(te_ctx *te, te__node *node) {
    te__sharding_state *s = te__sharding_of(te);
    te_result result = TE_OK;
    te__dp_unit *u;
    if (te->tape.plays != 1) return TE_OK; /* a checkpoint's node counts for the nodes of its function */
    te__units_count(s, node, -1);
    for (u = s->units; u && result == TE_OK; u = u->next)
        if (u->set && u->set->whole && u->pending == 0 && u->set->depth == 0 && u->state.reshard_after_backward)
            result = te__shards_scatter(u->set);
    while (result == TE_OK && !te->warming && s->next < s->num_turn) {
        te__bucket *b = s->turn[s->next];
        if (b->pending != 0 || b->unit->desc.post_backward || te__units_are_deferred(b->unit->module)) break;
        if (b->hidden && s->foreign > 0) break; /* such a node may make the gradient that is still missing */
        s->next++;
        result = te__bucket_exchange(b);
    }
    return result;
}

/* Ends a pass: releases gathered parameters, and drops the slices' gradients that a failed pass has made. */
static te_result te__units_leave(te_ctx *te, te_result result) {
    te__sharding_state *s = te__sharding_of(te);
    te__dp_unit *u;
    int i;
    result = te__buckets_land(te, 0, result);
    for (u = s->units; u; u = u->next) {
        te__unit_mark_params(u->module, u, NULL);
        u->inner = false;
        for (i = 0; u->set && i < u->set->n; i++) {
            te__shard *x = u->set->list[i];
            if (x->fresh && result != TE_OK && x->param->var) {
                te_tensor_release(x->param->var->shard_grad);
                x->param->var->shard_grad = NULL;
            }
            x->fresh = false;
        }
        if (u->set && u->set->depth == 0 && u->state.reshard_after_backward) {
            const te_result scattered = te__shards_scatter(u->set);
            if (result == TE_OK) result = scattered;
        }
    }
    te__units_ahead_end(te, result);
    te__units_forget(te);
    return result;
}
/* Queues the units of models whose gradients were written, though te__units_mark has not seen that nodes read their
 * parameters. m: the module of a te_backward_dw, which has completed gradients. NULL: a pass with nodes of te_record.
 */
static te_result te__units_queue_written(te_ctx *te, const te_module *m) {
    te__sharding_state *s = te__sharding_of(te);
    te_result result;
    te__dp_unit *u, *other;
    result = te__units_list(te);
    for (u = s->units; u && result == TE_OK; u = u->next)
        u->reached = !te__units_are_deferred(te__root_of(u->module)) &&
                     te__unit_is_reached(u, m ? u->exchanged_at : s->began_at);
    for (u = s->units; u && result == TE_OK; u = u->next) {
        bool reached = false;
        if (!te__unit_is_first(s, u)) continue;
        if (!m && te__units_are_marked(te__root_of(u->module), te->tape.passes)) continue; /* queued already */
        for (other = u; other; other = other->next)
            reached = reached || (other->reached && te__root_of(other->module) == te__root_of(u->module));
        if (reached) te__units_queue(te, te__root_of(u->module));
    }
    return result;
}
/* Exchanges what was not exchanged yet when a backward pass ends. If the pass has reached one unit of a model,
 * exchanges the gradients of all units of the model, because other ranks may have reached other units. */
static te_result te__units_exchange(te_ctx *te, const te_module *m, te_result result) {
    te__sharding_state *s = te__sharding_of(te);
    if (!s->units) return te__pass_ends(te, m, result);
    if (te->warming) return te__units_leave(te, result);
    if ((m || s->met_foreign) && result == TE_OK) result = te__units_queue_written(te, m);
    while (result == TE_OK && s->next < s->num_turn) {
        te__bucket *b = s->turn[s->next++];
        /* te_backward_dw will compute the remaining gradients and exchange them */
        if (b->done || te__units_are_deferred(te__root_of(b->unit->module))) continue;
        result = te__bucket_exchange(b);
    }
    return te__pass_ends(te, m, te__units_leave(te, result));
}

/* Called when a capture begins or ends: the slices alone hold the parameters then (train/shards.c, "graphs"). */
static te_result te__units_capture(te_ctx *te, bool begins) {
    te_result result = TE_OK;
    te__dp_unit *u;
    for (u = te__sharding_of(te)->units; u && result == TE_OK; u = u->next) {
        if (!u->set) continue;
        if (u->set->depth > 0)
            result = te__fail(te, TE_ERR_STATE, "%s: inside of a forward of unit \"%s\", whose parameters are sharded",
                              begins ? "te_graph_begin" : "te_graph_end", u->module->name);
        else
            result = te__shards_scatter(u->set);
    }
    return result;
}

static const te__room te__sharding_room = {
    &te__sharding_slot, te__sharding_open, NULL,                 te__units_capture,  NULL, NULL, NULL, te__units_mark,
    NULL,               te__units_exchange, te__units_node_begins, te__units_node_ends, NULL};
