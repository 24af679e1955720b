/* quant/master.c: quantizes the weights of a model from slices of f32 master weights. The ranks reduce the amaxes of
 * their slices. Each rank then computes all scales, and the codes of its slices. This file must not depend on
 * optimizers or modules.
 *
 * The results equal those of TransformerEngine's quantize_master_weights (pytorch/tensor/utils.py). TransformerEngine
 * reduces once for each kind of scaling. Here one te_all_reduce reduces all amaxes. Every rank takes part in it, even a
 * rank without slices. No weight is written before this reduction. If a rank fails before it, the call fails on all
 * ranks and changes nothing. */

/* The work on one copy, row-wise or column-wise, of one weight. For a kind with TE__BOTH_FROM_SLICES it is the work on
 * both copies. */
typedef struct te__master_job {
    te_tensor *weight;
    const te__quant_spec *spec;
    int which;                  /* the copy that is written */
    te__quant_copy *copy, *col; /* col: the column-wise copy, used with TE__BOTH_FROM_SLICES */
    te_tensor *shard, *shard_col;
    te_tensor *slice;           /* this rank's slice in the nominal dtype, or NULL */
    int64_t start, rows, cols;
    te_tensor *amax_tensor, *amax, *amax_col; /* views of te__master_run.buffer, or NULL. amax_tensor: the amax of
                                               * the whole weight. amax, amax_col: the amaxes of the row-wise tiles
                                               * and of the column-wise tiles */
} te__master_job;

typedef struct te__master_run {
    te_ctx *te;
    const te_master_weights *w;
    te__master_job *job;
    int num_jobs;
    te_tensor *buffer; /* f32: every amax of every job */
} te__master_run;

/* ---- checks: nothing is written before every weight has passed ---- */

static te_result te__master_refuse(te_ctx *te, int i, const char *why) {
    return te__fail(te, TE_ERR_INVALID, "te_quantize_master_weights: weight %d: %s", i, why);
}

static te_result te__master_check_spec(te_ctx *te, int i, const te__quant_spec *s, bool within_hybrid) {
    const te__quant_class *cls = s->cls;
    bool plain = s->two_dimensional == (cls->slice_tile[0] > 1) && !s->rht && !s->stochastic && !s->row_scaled &&
                 !s->four_over_six && !s->swizzled;
    if (within_hybrid && cls->slice_tile[0])
        return te__master_refuse(te, i,
                                 "a hybrid quantizer with block scales; per-tensor and identity parts are possible");
    return cls->slices_need && (cls->slice_tile[0] == 0 || !plain) ? te__master_refuse(te, i, cls->slices_need) : TE_OK;
}

/* Checks `shard`. The codes of a slice are written to this tensor, and not to the weight. An empty slice needs no
 * shard. */
static te_result te__master_check_shard(te_ctx *te, int i, const te_tensor *shard, const te_tensor *data, int64_t start,
                                        int64_t n) {
    int64_t need = data->dtype == TE_F4E2M1 ? (start % 2 + n + 1) / 2 : n * te__dtype_size(data->dtype);
    if (n == 0) return TE_OK;
    if (!shard || shard->te != te || !shard->buffer || !te__is_contiguous(shard) ||
        (shard->dtype != TE_U8 && shard->dtype != data->dtype) || (int64_t)te_tensor_bytes(shard) < need)
        return te__fail(te, TE_ERR_INVALID,
                        "te_quantize_master_weights: weight %d: the shard is %s of %lld bytes; a contiguous u8 or %s "
                        "tensor of at least %lld is needed",
                        i, shard ? te_dtype_name(shard->dtype) : "NULL",
                        shard ? (long long)te_tensor_bytes(shard) : 0LL, te_dtype_name(data->dtype), (long long)need);
    return TE_OK;
}

static te_result te__master_check(te_ctx *te, const te_master_weights *w, int i, int *jobs) {
    te_tensor *weight = w->model_weights[i], *master = w->master_weights[i];
    te__quantized *q;
    te_result result;
    bool both;
    int64_t n, start;
    char text[TE__SHAPE_TEXT];
    if (!weight || weight->te != te)
        return te__master_refuse(te, i, weight ? "it belongs to another context" : "it is NULL");
    q = weight->quantized;
    if (!q || !q->quantizer)
        return te__master_refuse(
            te, i,
            q ? "it has no quantizer; make it by te_quantize or under te_quantized_model_init_begin"
              : "it is plain; a quantized weight is needed");
    if (weight->ndim != 2)
        return te__fail(te, TE_ERR_SHAPE, "te_quantize_master_weights: weight %d is %s; a matrix is needed", i,
                        te__shape_text(weight, text));
    if (q->cls->form == TE__FORM_PARTS) {
        result = te__master_check_spec(te, i, q->quantizer->spec.row, true);
        if (result == TE_OK) result = te__master_check_spec(te, i, q->quantizer->spec.col, true);
        if (result == TE_OK && w->shard_weights && q->row.data && q->col.data)
            result = te__master_refuse(
                te, i, "a hybrid weight with both copies cannot go to shards; gather it whole, or keep one copy");
    } else
        result = te__master_check_spec(te, i, &q->quantizer->spec, false);
    if (result != TE_OK) return result;
    both = q->cls->facts & TE__BOTH_FROM_SLICES;
    if (both && !(q->row.data && q->col.data))
        return te__fail(
            te, TE_ERR_INVALID,
            "te_quantize_master_weights: weight %d: an %s weight needs both copies (TE_ROWWISE | TE_COLUMNWISE)", i,
            q->cls->name);
    if (!q->row.data && !(q->cls->facts & TE__TENSOR_SCALED) && q->cls->form != TE__FORM_PARTS)
        return te__master_refuse(te, i, "it has no row-wise copy");
    if (!q->row.data && q->col.cls->facts & TE__TENSOR_SCALED && w->shard_weights)
        return te__master_refuse(te, i, "it has a column-wise copy alone, whose slices are not contiguous: no shards");
    *jobs += q->cls->form == TE__FORM_PARTS ? (q->row.data != NULL) + (q->col.data != NULL) : 1;
    if (!master) return TE_OK;
    n = te__numel(master);
    start = w->start_offsets[i];
    if (master->te != te || master->dtype != TE_F32 || !master->buffer || !te__is_contiguous(master))
        return te__fail(
            te, TE_ERR_DTYPE,
            "te_quantize_master_weights: master %d is %s %s; a contiguous f32 tensor of this context is needed", i,
            te_dtype_name(master->dtype), te__shape_text(master, text));
    if (start < 0 || n > te__numel(weight) || start > te__numel(weight) - n)
        return te__fail(
            te, TE_ERR_SHAPE,
            "te_quantize_master_weights: slice %d begins at %lld and has %lld elements; the weight has %lld", i,
            (long long)start, (long long)n, (long long)te__numel(weight));
    if (w->shard_weights) {
        result = te__master_check_shard(te, i, w->shard_weights[i], q->row.data ? q->row.data : q->col.data, start, n);
        if (result == TE_OK && both)
            result = te__master_check_shard(te, i, w->shard_columnwise ? w->shard_columnwise[i] : NULL, q->col.data,
                                            start, n);
    }
    return result;
}

/* ---- before the reduction: amaxes of the slices ---- */

/* Returns a view of `buffer` as a matrix [rows, cols]. `at` is the index of its first element in `buffer`. */
static te_tensor *te__master_view(const te_tensor *buffer, int64_t at, int64_t rows, int64_t cols) {
    return te__alias_2d(buffer, at * (int64_t)sizeof(float), TE_F32, rows, cols);
}

/* Sets the amax tensors of the job to views of `buffer`, from element `at` on. Returns how many elements of `buffer`
 * they take, or -1 with an error. If `buffer` is NULL, only counts the elements. */
static int64_t te__master_place(te__master_job *j, te_tensor *buffer, int64_t at) {
    const te__quant_class *cls = j->spec->cls;
    int64_t tr = cls->slice_tile[0], tc = cls->slice_tile[1], n = 0, m, k;
    if (cls->facts & (TE__TENSOR_SCALED | TE__TENSOR_AMAX)) {
        if (buffer && !(j->amax_tensor = te__slot_view(buffer, at))) return -1;
        n++;
    }
    if (tr == 0) return n;
    m = te__div_up(j->rows, tr);
    k = te__div_up(j->cols, tc);
    if (buffer && !(j->amax = te__master_view(buffer, at + n, m, k))) return -1;
    n += m * k;
    if (!(cls->facts & TE__BOTH_FROM_SLICES)) return n;
    m = te__div_up(j->rows, tc);
    k = te__div_up(j->cols, tr);
    if (buffer && !(j->amax_col = te__master_view(buffer, at + n, m, k))) return -1;
    return n + m * k;
}

static te_result te__slice_amax(const te__master_job *j, te_tensor *amax, int64_t tile_rows, int64_t tile_cols) {
    te_op_shard_amax_args args = TE_ZERO;
    args.x = j->slice;
    args.amax = amax;
    args.rows = j->rows;
    args.columns = j->cols;
    args.start = j->start;
    args.tile_rows = tile_rows;
    args.tile_columns = tile_cols;
    return te_op_shard_amax(j->weight->te, &args);
}

/* Measures the amaxes of the job's slice, if this rank has one. With delayed scaling, the amax is at least
 * spec->amax. */
static te_result te__master_measure(const te__master_job *j) {
    const te__quant_class *cls = j->spec->cls;
    te_result result = TE_OK;
    if (cls->facts & TE__SCALE_GIVEN) result = te__amax_into(j->spec->amax, j->amax_tensor);
    if (!j->slice || result != TE_OK) return result;
    if (j->amax_tensor) result = te__amax_into(j->slice, j->amax_tensor);
    if (j->amax && result == TE_OK) result = te__slice_amax(j, j->amax, cls->slice_tile[0], cls->slice_tile[1]);
    if (j->amax_col && result == TE_OK) result = te__slice_amax(j, j->amax_col, cls->slice_tile[1], cls->slice_tile[0]);
    return result;
}

/* ---- after the reduction: the scales of the weights and the codes of the slices ---- */

/* Writes the codes of the slice into copy `c` of the weight, or into the shard if there is one. */
static te_result te__slice_cast(const te__master_job *j, te__quant_copy *c, te_tensor *shard, bool columnwise,
                                const te_tensor *scale, const te_tensor *multiplier) {
    te_op_shard_cast_args args = TE_ZERO;
    te_tensor *flat = NULL;
    if (!j->slice) return TE_OK;
    if (shard) { /* a u8 shard holds bytes of the codes' dtype */
        flat =
            te__alias_1d(shard, 0, c->data->dtype, (int64_t)te_tensor_bytes(shard) * 8 / te_dtype_bits(c->data->dtype));
        if (!flat) return te_error_code(j->weight->te);
    }
    args.x = j->slice;
    args.dst = flat ? flat : c->data;
    args.flat = flat != NULL;
    args.scale = scale;
    args.amax_tensor = c->amax;
    args.scaling = te__scaling_kind(c);
    args.rows = j->rows;
    args.columns = j->cols;
    args.start = j->start;
    args.columnwise = columnwise;
    args.e4m3_max_256 = c->e4m3_max_256;
    args.multiplier = multiplier;
    return te_op_shard_cast(j->weight->te, &args);
}

/* Writes 1 / `scale`, rounded to nearest, to `scale_inv`. A cast by te_op_fp8_quantize can write this number, so
 * this function casts a single zero. `scale_inv` then has the same bits as after any other cast with this scale. */
static te_result te__scale_inverse(te_ctx *te, te_tensor *scale, te_tensor *scale_inv) {
    int64_t one = 1;
    te_op_fp8_quantize_args cast = TE_ZERO;
    cast.x = te_tensor_zeros(te, TE_F32, 1, &one);
    cast.row = te__empty_2d(te, TE_F8E4M3, 1, 16);
    cast.scale = scale;
    cast.scale_inv = scale_inv;
    return cast.x && cast.row ? te_op_fp8_quantize(te, &cast) : te_error_code(te);
}

static te_result te__master_per_tensor(const te__master_job *j) {
    te_ctx *te = j->weight->te;
    te_tensor *scale;
    te_result result;
    if (j->spec->cls->facts & TE__SCALE_GIVEN) { /* delayed scaling: the scale stays. spec->amax is raised, not
                                                  * overwritten, because several weights may share it */
        scale = j->spec->scale;
        result = te__amax_into(j->amax_tensor, j->spec->amax);
        if (result == TE_OK) result = te__scale_inverse(te, scale, j->copy->scale);
    } else {
        scale = te__empty_1d(te, TE_F32, 1);
        result = te__scale_of_amax(j->spec, j->amax_tensor, scale, j->copy->scale);
    }
    return result == TE_OK ? te__slice_cast(j, j->copy, j->shard, j->which == TE_COLUMNWISE, scale, NULL) : result;
}

static te_result te__master_by_tile(const te__master_job *j) {
    bool both = j->spec->cls->facts & TE__BOTH_FROM_SLICES;
    te_op_shard_scales_args args = TE_ZERO;
    te_result result = TE_OK;
    args.scaling = te__scaling_kind(j->copy);
    args.amax = j->amax;
    args.amax_col = j->amax_col;
    args.amax_tensor = j->amax_tensor;
    args.row_scale = j->copy->scale;
    args.col_scale = both ? j->col->scale : NULL;
    args.rows = j->rows;
    args.columns = j->cols;
    args.dtype = j->spec->dtype;
    args.fp32_scales = j->spec->fp32_scales;
    args.epsilon = j->spec->epsilon;
    args.amax_limit = te_dtype_max(j->weight->dtype);
    args.e4m3_max_256 = j->spec->e4m3_max_256;
    if (j->spec->fp32_scales) { /* the cast needs the scale itself: 1 / scale_inv may differ from it by rounding */
        args.multiplier = te__empty_like(j->copy->scale, TE_F32);
        if (!args.multiplier) return te_error_code(j->weight->te);
    }
    if (j->amax_tensor) result = te_tensor_copy(j->copy->amax, j->amax_tensor);
    if (result == TE_OK) result = te_op_shard_scales(j->weight->te, &args);
    if (result == TE_OK) result = te__slice_cast(j, j->copy, j->shard, false, j->copy->scale, args.multiplier);
    if (result == TE_OK && both) result = te__slice_cast(j, j->col, j->shard_col, true, j->col->scale, NULL);
    return result;
}

static te_result te__master_identity(const te__master_job *j) {
    te_dtype dtype = j->copy->data->dtype;
    te_tensor *dst, *src;
    if (!j->slice) return TE_OK;
    dst = te__alias_1d(j->shard ? j->shard : j->copy->data, j->shard ? 0 : j->start * te__dtype_size(dtype), dtype,
                       te__numel(j->slice));
    src = te__alias_1d(j->slice, 0, j->slice->dtype, te__numel(j->slice));
    return dst && src ? te_tensor_copy(dst, src) : te_error_code(j->weight->te);
}

/* ---- the whole ---- */

static te_result te__master_add(te__master_run *r, int i, int which, const te__quant_spec *spec) {
    te__master_job *j = &r->job[r->num_jobs++];
    const te_master_weights *w = r->w;
    te_tensor *master = w->master_weights[i];
    j->weight = w->model_weights[i];
    j->spec = spec;
    j->which = which;
    j->copy = te__copy_of(j->weight, which);
    j->col = &j->weight->quantized->col;
    j->rows = te__rows(j->weight);
    j->cols = te__cols(j->weight);
    if (!master || te__numel(master) == 0) return TE_OK;
    j->shard = w->shard_weights ? w->shard_weights[i] : NULL;
    j->shard_col = w->shard_columnwise ? w->shard_columnwise[i] : NULL;
    j->start = w->start_offsets[i];
    j->slice = te_tensor_cast(master, j->weight->dtype); /* rounded to the nominal dtype of the weight */
    return j->slice ? TE_OK : te_error_code(r->te);
}

/* Does all work of this rank that comes before the reduction of the amaxes. A failure here may happen on this rank
 * alone. */
static te_result te__master_prepare(te__master_run *r) {
    te_result result = TE_OK;
    int64_t total = 0, n;
    int i;
    for (i = 0; i < r->w->count && result == TE_OK; i++) {
        const te__quantized *q = r->w->model_weights[i]->quantized;
        const te__quant_spec *spec = &q->quantizer->spec;
        if (q->cls->form != TE__FORM_PARTS) {
            result = te__master_add(r, i, q->row.data ? TE_ROWWISE : TE_COLUMNWISE, spec);
            continue;
        }
        if (q->row.data) result = te__master_add(r, i, TE_ROWWISE, spec->row);
        if (q->col.data && result == TE_OK) result = te__master_add(r, i, TE_COLUMNWISE, spec->col);
    }
    for (i = 0; i < r->num_jobs; i++) total += te__master_place(&r->job[i], NULL, 0);
    total = te__max(total, 1); /* every rank reduces, even a rank that owns nothing */
    if (result == TE_OK) r->buffer = te_tensor_zeros(r->te, TE_F32, 1, &total);
    if (!r->buffer) return te_error_code(r->te);
    for (i = 0, total = 0; i < r->num_jobs && result == TE_OK; i++, total += n) {
        n = te__master_place(&r->job[i], r->buffer, total);
        result = n < 0 ? te_error_code(r->te) : te__master_measure(&r->job[i]);
    }
    return result;
}

static te_result te__master_write(te__master_run *r) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < r->num_jobs && result == TE_OK; i++) {
        te__master_job *j = &r->job[i];
        if (!r->te->warming) te_quantized_clear_init_value(j->weight);
        result = j->spec->cls->slice_tile[0]            ? te__master_by_tile(j)
                 : j->spec->cls->form == TE__FORM_PLAIN ? te__master_identity(j)
                                                        : te__master_per_tensor(j);
        if (result == TE_OK && !r->te->warming && !r->w->manual_post_processing && j->which == TE_ROWWISE &&
            te__column_follows(j->weight)) {
            if (r->te->capture && j->weight->quantized->col.data) /* launches of the graph read the copy at its present
                                                                   * address, so the copy is overwritten in place */
                result = te__quant_add_columnwise(j->weight);
            else
                te__copy_release(&j->weight->quantized->col); /* the next forward pass makes a new copy */
        }
    }
    return result;
}

TE_API te_result te_quantize_master_weights(te_ctx *te, const te_master_weights *w) {
    te__master_run run = TE_ZERO;
    te_result result = TE_OK;
    size_t bytes = 0;
    int i, jobs = 0;
    if (!te) return TE_ERR_STATE;
    if (!te__has_desc(te, w, "te_quantize_master_weights") ||
        te__group_allowed(te, w->group, "te_quantize_master_weights", "group") != TE_OK)
        return te->error_code;
    if (w->count < 0 || (w->count > 0 && (!w->model_weights || !w->master_weights || !w->start_offsets)))
        result =
            te__fail(te, TE_ERR_INVALID,
                     "te_quantize_master_weights: %d weights; three lists of as many entries are needed", w->count);
    for (i = 0; i < w->count && result == TE_OK; i++) result = te__master_check(te, w, i, &jobs);
    run.te = te;
    run.w = w;
    if (result == TE_OK) {
        bytes = ((size_t)jobs + 1) * sizeof(te__master_job);
        run.job = (te__master_job *)te__alloc_zero(te, bytes);
        if (!run.job) result = TE_ERR_OUT_OF_MEMORY;
    }
    te__frame_begin(te);
    te->tape.no_grad++;
    if (result == TE_OK) result = te__master_prepare(&run);
    result = result == TE_OK ? te__all_reduce(w->group, run.buffer, TE_REDUCE_MAX)
                             : te__refuse(w->group, TE__ALL_REDUCE, result);
    if (result == TE_OK) result = te__master_write(&run);
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    te__free(te, run.job);
    return result;
}

TE_API te_result te_cast_master_weights_to_fp8(te_ctx *te, const te_master_weights *w) {
    return te_quantize_master_weights(te, w);
}

TE_API te_result te_post_all_gather_processing(te_ctx *te, te_tensor *const *model_weights, int count) {
    te_result result = TE_OK;
    int i;
    if (!te) return TE_ERR_STATE;
    if (count < 0 || (count > 0 && !model_weights))
        return te__fail(te, TE_ERR_INVALID, "te_post_all_gather_processing: %d weights without a list", count);
    for (i = 0; i < count; i++) {
        if (!model_weights[i] || model_weights[i]->te != te)
            return te__fail(te, TE_ERR_INVALID,
                            "te_post_all_gather_processing: weight %d is NULL or of another context", i);
    }
    for (i = 0; i < count && result == TE_OK; i++) {
        if (model_weights[i]->quantized && te__column_follows(model_weights[i]))
            result = te__quant_add_columnwise(model_weights[i]);
    }
    return result;
}
