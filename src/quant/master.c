/* quant/master.c: from sharded f32 master weights to the quantized weights of a model: amaxes of the slices, reduced over the ranks; scales
 * of the whole; codes of the slices. Knows slices and groups; must not know optimizers or modules.
 *
 * Procedures: TransformerEngine, pytorch/tensor/utils.py (quantize_master_weights). Weights are worked through kind by kind, so that ranks
 * meet in the same collectives whatever they own. */

/* One copy (MXFP8: both) of one weight. */
typedef struct te__master_job {
    te_tensor *weight;
    const te__quant_spec *spec;
    int which;          /* the copy that is written */
    te__quant_copy *copy, *col; /* col: MXFP8 */
    te_tensor *shard, *shard_col;
    te_tensor *slice;   /* in the nominal dtype, or NULL */
    int64_t start, rows, cols;
    te_tensor *amax, *amax_col, *amax_tensor; /* views of packed buffers */
    te_tensor *multiplier; /* block scales of any f32: what their inverses cannot give back */
} te__master_job;

typedef struct te__master_run {
    te_ctx *te;
    const te_master_weights *w;
    te__master_job *job;
    int num_jobs;
} te__master_run;

/* ---- checking: nothing is written before every weight has passed ---- */

static te_result te__master_refuse(te_ctx *te, int i, const char *why) { return te__fail(te, TE_ERR_INVALID, "te_quantize_master_weights: weight %d: %s", i, why); }

static te_result te__master_check_spec(te_ctx *te, int i, const te__quant_spec *s, bool within_hybrid) {
    if (within_hybrid && !te__is_tensor_scaled(s->kind) && s->kind != TE_QUANT_IDENTITY)
        return te__master_refuse(te, i, "a hybrid quantizer with block scales; per-tensor and identity parts are possible");
    if (s->kind == TE_QUANT_CUSTOM) return te__master_refuse(te, i, "a custom quantizer cannot quantize slices; quantize the whole weight (te_quantize_into)");
    if (s->kind == TE_QUANT_BLOCK && !s->two_dimensional) return te__master_refuse(te, i, "1 x 128 blocks; weights need 128 x 128 (block_scaling_dim 2)");
    if (s->kind == TE_QUANT_NVFP4 && (!s->two_dimensional || s->rht || s->stochastic || s->row_scaled || s->four_over_six || s->swizzled))
        return te__master_refuse(te, i, "NVFP4 with 1 x 16 blocks, a transform, stochastic rounding, row scales, 4-over-6 or swizzled scales; slices need plain 16 x 16 blocks");
    if (s->kind == TE_QUANT_MXFP8 && (s->two_dimensional || s->swizzled))
        return te__master_refuse(te, i, "MXFP8 with 32 x 32 blocks or swizzled scales; slices need 1 x 32 and plain scales");
    return TE_OK;
}

/* Where the codes of a slice are to go instead of the weight. */
static te_result te__master_check_shard(te_ctx *te, int i, const te_tensor *shard, const te_tensor *data, int64_t start, int64_t n, bool slice) {
    int64_t need = data->dtype == TE_F4E2M1 ? (start % 2 + n + 1) / 2 : n * te__dtype_size(data->dtype);
    if (!slice) return TE_OK;
    if (!shard || shard->te != te || !shard->buffer || !te__is_contiguous(shard) || (shard->dtype != TE_U8 && shard->dtype != data->dtype) ||
        (int64_t)te_tensor_bytes(shard) < need)
        return te__fail(te, TE_ERR_INVALID, "te_quantize_master_weights: weight %d: the shard is %s of %lld bytes; a contiguous u8 or %s tensor of at least %lld is needed", i,
                        shard ? te_dtype_name(shard->dtype) : "NULL", shard ? (long long)te_tensor_bytes(shard) : 0LL, te_dtype_name(data->dtype), (long long)need);
    return TE_OK;
}

static te_result te__master_check(te_ctx *te, const te_master_weights *w, int i, int *jobs) {
    te_tensor *weight = w->model_weights[i], *master = w->master_weights[i];
    te__quantized *q;
    te_result result;
    int64_t n, start;
    char text[TE__SHAPE_TEXT];
    if (!weight || weight->te != te) return te__master_refuse(te, i, weight ? "it belongs to another context" : "it is NULL");
    q = weight->quantized;
    if (!q || !q->quantizer)
        return te__master_refuse(te, i, q ? "it has no quantizer; make it by te_quantize or under te_quantized_model_init_begin" : "it is plain; a quantized weight is needed");
    if (weight->ndim != 2) return te__fail(te, TE_ERR_SHAPE, "te_quantize_master_weights: weight %d is %s; a matrix is needed", i, te__shape_text(weight, text));
    if (q->kind == TE_QUANT_HYBRID) {
        result = te__master_check_spec(te, i, q->quantizer->spec.row, true);
        if (result == TE_OK) result = te__master_check_spec(te, i, q->quantizer->spec.col, true);
        if (result == TE_OK && w->shard_weights && q->row.data && q->col.data)
            result = te__master_refuse(te, i, "a hybrid weight with both copies cannot go to shards; gather it whole, or keep one copy");
    } else
        result = te__master_check_spec(te, i, &q->quantizer->spec, false);
    if (result != TE_OK) return result;
    if (q->kind == TE_QUANT_MXFP8 && !(q->row.data && q->col.data)) return te__master_refuse(te, i, "an MXFP8 weight needs both copies (TE_ROWWISE | TE_COLUMNWISE)");
    if (!q->row.data && !te__is_tensor_scaled(q->kind) && q->kind != TE_QUANT_HYBRID) return te__master_refuse(te, i, "it has no row-wise copy");
    if (!q->row.data && te__is_tensor_scaled(q->kind) && w->shard_weights) return te__master_refuse(te, i, "it has a column-wise copy alone, whose slices are not contiguous: no shards");
    *jobs += q->kind == TE_QUANT_HYBRID ? (q->row.data != NULL) + (q->col.data != NULL) : 1;
    if (!master) return TE_OK;
    n = te__numel(master);
    start = w->start_offsets[i];
    if (master->te != te || master->dtype != TE_F32 || !master->buffer || !te__is_contiguous(master))
        return te__fail(te, TE_ERR_DTYPE, "te_quantize_master_weights: master %d is %s %s; a contiguous f32 tensor of this context is needed", i,
                        te_dtype_name(master->dtype), te__shape_text(master, text));
    if (start < 0 || n > te__numel(weight) || start > te__numel(weight) - n)
        return te__fail(te, TE_ERR_SHAPE, "te_quantize_master_weights: slice %d begins at %lld and has %lld elements; the weight has %lld", i, (long long)start,
                        (long long)n, (long long)te__numel(weight));
    if (w->shard_weights) {
        result = te__master_check_shard(te, i, w->shard_weights[i], q->row.data ? q->row.data : q->col.data, start, n, true);
        if (result == TE_OK && q->kind == TE_QUANT_MXFP8)
            result = te__master_check_shard(te, i, w->shard_columnwise ? w->shard_columnwise[i] : NULL, q->col.data, start, n, true);
    }
    return result;
}

/* ---- pieces ---- */

/* `count` f32 numbers of `buffer` from `at` on, as [rows, cols]. */
static te_tensor *te__master_view(te_tensor *buffer, int64_t at, int64_t rows, int64_t cols) {
    te_tensor *y = te__alias(buffer);
    if (!y) return NULL;
    y->ndim = 2;
    y->shape[0] = rows;
    y->shape[1] = y->stride[0] = cols;
    y->stride[1] = 1;
    y->offset += at * (int64_t)sizeof(float);
    return y;
}
static te_tensor *te__master_scalar(te_tensor *buffer, int64_t i) { return te__slot_view(buffer, (int)i); }

static te_result te__slice_amax(const te__master_job *j, te_tensor *amax, int64_t tile_rows, int64_t tile_cols) {
    te_shard_amax_args args = TE_ZERO;
    args.x = j->slice;
    args.amax = amax;
    args.rows = j->rows;
    args.columns = j->cols;
    args.start = j->start;
    args.tile_rows = tile_rows;
    args.tile_columns = tile_cols;
    return te_shard_amax(j->weight->te, &args);
}

/* Codes of the slice into the weight's copy `c`, or into its shard. */
static te_result te__slice_cast(const te__master_job *j, te__quant_copy *c, te_tensor *shard, bool columnwise, const te_tensor *scale, te_tensor *amax) {
    te_shard_cast_args args = TE_ZERO;
    te_tensor *flat = NULL;
    if (!j->slice) return TE_OK;
    if (shard) { /* u8 is as good as the codes' own format */
        flat = te__alias(shard);
        if (!flat) return te_error_code(j->weight->te);
        flat->dtype = c->data->dtype;
        flat->ndim = 1;
        flat->shape[0] = (int64_t)te_tensor_bytes(shard) * 8 / te_dtype_bits(flat->dtype);
        flat->stride[0] = 1;
    }
    args.x = j->slice;
    args.dst = flat ? flat : c->data;
    args.flat = flat != NULL;
    args.scale = scale;
    args.multiplier = j->multiplier;
    args.amax = amax;
    args.amax_tensor = c->amax;
    args.scaling = te__scaling_kind(c);
    args.rows = j->rows;
    args.columns = j->cols;
    args.start = j->start;
    args.columnwise = columnwise;
    args.e4m3_max_256 = c->e4m3_max_256;
    return te_shard_cast(j->weight->te, &args);
}

/* The jobs of one kind, in order. */
static int te__master_next(const te__master_run *r, te_quant_kind kind, int after) {
    int i;
    for (i = after; i < r->num_jobs && r->job[i].spec->kind != kind; i++) {}
    return i;
}
#define TE__MASTER_EACH(r, kind, i) for (i = te__master_next(r, kind, 0); i < (r)->num_jobs; i = te__master_next(r, kind, i + 1))

/* ---- kinds ---- */

/* scale_inv = RN(1 / scale), as the cast writes it: by a cast of one zero. */
static te_result te__scale_inverse(te_ctx *te, te_tensor *scale, te_tensor *scale_inv) {
    int64_t one = 1;
    te_fp8_quantize_args cast = TE_ZERO;
    cast.x = te_tensor_zeros(te, TE_F32, 1, &one);
    cast.row = te__empty_2d(te, TE_F8E4M3, 1, 16);
    cast.scale = scale;
    cast.scale_inv = scale_inv;
    return cast.x && cast.row ? te_fp8_quantize(te, &cast) : te_error_code(te);
}

static te_result te__master_delayed(te__master_run *r) {
    te_result result = TE_OK;
    te_tensor *amaxes;
    int i, n = 0;
    TE__MASTER_EACH(r, TE_QUANT_DELAYED, i) n++;
    if (n == 0) return TE_OK;
    TE__MASTER_EACH(r, TE_QUANT_DELAYED, i) {
        te__master_job *j = &r->job[i];
        if (result == TE_OK) result = te__slice_cast(j, j->copy, j->shard, j->which == TE_COLUMNWISE, j->spec->scale, j->spec->amax);
        if (result == TE_OK) result = te__scale_inverse(r->te, j->spec->scale, j->copy->scale);
    }
    if (result != TE_OK || te_group_size(r->w->group) == 1) return result;
    amaxes = te__empty_1d(r->te, TE_F32, n);
    n = 0;
    TE__MASTER_EACH(r, TE_QUANT_DELAYED, i) if (result == TE_OK) result = te_tensor_copy(te__master_scalar(amaxes, n++), te__master_scalar(r->job[i].spec->amax, 0));
    if (result == TE_OK) result = te_all_reduce(r->w->group, amaxes, TE_REDUCE_MAX);
    n = 0;
    TE__MASTER_EACH(r, TE_QUANT_DELAYED, i) if (result == TE_OK) result = te_tensor_copy(te__master_scalar(r->job[i].spec->amax, 0), te__master_scalar(amaxes, n++));
    return result;
}

/* amax of every job's slice, reduced: f32 [n], 0 where nobody owns anything. */
static te_tensor *te__master_amaxes(te__master_run *r, te_quant_kind kind) {
    te_result result = TE_OK;
    te_tensor *amaxes;
    int64_t n = 0;
    int i;
    TE__MASTER_EACH(r, kind, i) n++;
    if (n == 0) return NULL;
    amaxes = te_tensor_zeros(r->te, TE_F32, 1, &n);
    if (!amaxes) return NULL;
    n = 0;
    TE__MASTER_EACH(r, kind, i) {
        te__master_job *j = &r->job[i];
        te_amax_args amax = TE_ZERO;
        j->amax_tensor = te__master_scalar(amaxes, n++);
        amax.x = j->slice;
        amax.amax = j->amax_tensor;
        if (!j->amax_tensor) result = te_error_code(r->te);
        if (result == TE_OK && j->slice) result = te_amax(r->te, &amax);
    }
    if (result == TE_OK) result = te_all_reduce(r->w->group, amaxes, TE_REDUCE_MAX);
    return result == TE_OK ? amaxes : NULL;
}

static te_result te__master_current(te__master_run *r) {
    te_tensor *amaxes = te__master_amaxes(r, TE_QUANT_CURRENT);
    te_result result = TE_OK;
    int i;
    if (!amaxes) return r->te->error_code;
    TE__MASTER_EACH(r, TE_QUANT_CURRENT, i) {
        te__master_job *j = &r->job[i];
        te_scale_from_amax_args args = TE_ZERO;
        args.amax = j->amax_tensor;
        args.scale = te__empty_1d(r->te, TE_F32, 1);
        args.scale_inv = te__master_scalar(j->copy->scale, 0);
        args.fp8_max = te_dtype_max(j->spec->dtype);
        args.epsilon = j->spec->epsilon;
        args.power_of_two = j->spec->power_of_two;
        if (result == TE_OK) result = args.scale && args.scale_inv ? te_scale_from_amax(r->te, &args) : te_error_code(r->te);
        if (result == TE_OK) result = te__slice_cast(j, j->copy, j->shard, j->which == TE_COLUMNWISE, args.scale, NULL);
    }
    return result;
}

/* Kinds with scales by tile: amaxes of all tiles of all weights in one buffer, one reduction, then scales and codes. */
static te_result te__master_tiles(te__master_run *r, te_quant_kind kind, int64_t tile_rows, int64_t tile_cols, bool both) {
    te_tensor *buffer;
    te_result result = TE_OK;
    int64_t total = 0, at = 0;
    int i;
    TE__MASTER_EACH(r, kind, i) {
        const te__master_job *j = &r->job[i];
        total += te__div_up(j->rows, tile_rows) * te__div_up(j->cols, tile_cols) + (both ? te__div_up(j->rows, tile_cols) * te__div_up(j->cols, tile_rows) : 0);
    }
    if (total == 0) return TE_OK;
    buffer = te_tensor_zeros(r->te, TE_F32, 1, &total);
    if (!buffer) return te_error_code(r->te);
    TE__MASTER_EACH(r, kind, i) {
        te__master_job *j = &r->job[i];
        j->amax = te__master_view(buffer, at, te__div_up(j->rows, tile_rows), te__div_up(j->cols, tile_cols));
        if (!j->amax) return te_error_code(r->te);
        at += te__numel(j->amax);
        if (j->slice && result == TE_OK) result = te__slice_amax(j, j->amax, tile_rows, tile_cols);
        if (!both) continue;
        j->amax_col = te__master_view(buffer, at, te__div_up(j->rows, tile_cols), te__div_up(j->cols, tile_rows));
        if (!j->amax_col) return te_error_code(r->te);
        at += te__numel(j->amax_col);
        if (j->slice && result == TE_OK) result = te__slice_amax(j, j->amax_col, tile_cols, tile_rows);
    }
    if (result == TE_OK) result = te_all_reduce(r->w->group, buffer, TE_REDUCE_MAX);
    TE__MASTER_EACH(r, kind, i) {
        te__master_job *j = &r->job[i];
        te_shard_scales_args args = TE_ZERO;
        if (result != TE_OK) break;
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
        if (kind == TE_QUANT_BLOCK && args.fp32_scales) {
            args.multiplier = j->multiplier = te__empty_like(j->copy->scale, TE_F32);
            if (!j->multiplier) return te_error_code(r->te);
        }
        args.epsilon = j->spec->epsilon;
        args.amax_limit = te_dtype_max(j->weight->dtype);
        args.e4m3_max_256 = j->spec->e4m3_max_256;
        if (j->amax_tensor) result = te_tensor_copy(te__master_scalar(j->copy->amax, 0), j->amax_tensor);
        if (result == TE_OK) result = te_shard_scales(r->te, &args);
        if (result == TE_OK) result = te__slice_cast(j, j->copy, j->shard, false, j->copy->scale, NULL);
        if (result == TE_OK && both) result = te__slice_cast(j, j->col, j->shard_col, true, j->col->scale, NULL);
    }
    return result;
}

static te_result te__master_identity(te__master_run *r) {
    te_result result = TE_OK;
    int i;
    TE__MASTER_EACH(r, TE_QUANT_IDENTITY, i) {
        te__master_job *j = &r->job[i];
        te_tensor *dst, *src;
        if (!j->slice || result != TE_OK) continue;
        dst = te__alias(j->shard ? j->shard : j->copy->data);
        src = te__alias(j->slice);
        if (!dst || !src) return te_error_code(r->te);
        dst->dtype = j->copy->data->dtype;
        dst->ndim = src->ndim = 1;
        dst->shape[0] = src->shape[0] = te__numel(j->slice);
        dst->stride[0] = src->stride[0] = 1;
        if (!j->shard) dst->offset += j->start * te__dtype_size(dst->dtype);
        result = te_tensor_copy(dst, src);
    }
    return result;
}

/* ---- the whole ---- */

static void te__master_add(te__master_run *r, int i, int which, const te__quant_spec *spec) {
    te__master_job *j = &r->job[r->num_jobs++];
    const te_master_weights *w = r->w;
    j->weight = w->model_weights[i];
    j->spec = spec;
    j->which = which;
    j->copy = te__copy_of(j->weight, which);
    j->col = &j->weight->quantized->col;
    j->shard = w->shard_weights && w->master_weights[i] ? w->shard_weights[i] : NULL;
    j->shard_col = w->shard_columnwise && w->master_weights[i] ? w->shard_columnwise[i] : NULL;
    j->rows = te__rows(j->weight);
    j->cols = te__cols(j->weight);
    j->start = w->master_weights[i] ? w->start_offsets[i] : 0;
    /* rounded as a model trained in that format would have it */
    j->slice = w->master_weights[i] && te__numel(w->master_weights[i]) > 0 ? te_tensor_cast(w->master_weights[i], j->weight->dtype) : NULL;
}

TE_API te_result te_quantize_master_weights(te_ctx *te, const te_master_weights *w) {
    te__master_run run = TE_ZERO;
    te_result result = TE_OK;
    size_t bytes;
    int i, jobs = 0;
    if (!te || !w) return TE_ERR_STATE;
    if (w->count < 0 || (w->count > 0 && (!w->model_weights || !w->master_weights || !w->start_offsets)))
        return te__fail(te, TE_ERR_INVALID, "te_quantize_master_weights: %d weights; three lists of as many entries are needed", w->count);
    for (i = 0; i < w->count && result == TE_OK; i++) result = te__master_check(te, w, i, &jobs);
    if (result != TE_OK || jobs == 0) return result;
    run.te = te;
    run.w = w;
    bytes = (size_t)jobs * sizeof(te__master_job);
    run.job = (te__master_job *)te__alloc_zero(te, bytes);
    if (!run.job) return TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    te->tape.no_grad++;
    for (i = 0; i < w->count; i++) {
        te__quantized *q = w->model_weights[i]->quantized;
        const te__quant_spec *spec = &q->quantizer->spec;
        te_quantized_clear_init_value(w->model_weights[i]);
        if (q->kind == TE_QUANT_HYBRID) {
            if (q->row.data) te__master_add(&run, i, TE_ROWWISE, spec->row);
            if (q->col.data) te__master_add(&run, i, TE_COLUMNWISE, spec->col);
        } else
            te__master_add(&run, i, q->row.data ? TE_ROWWISE : TE_COLUMNWISE, spec);
        if (te->error_code != TE_OK) result = te->error_code;
    }
    if (result == TE_OK) result = te__master_delayed(&run);
    if (result == TE_OK) result = te__master_current(&run);
    if (result == TE_OK) result = te__master_tiles(&run, TE_QUANT_BLOCK, 128, 128, false);
    if (result == TE_OK) result = te__master_tiles(&run, TE_QUANT_MXFP8, 1, 32, true);
    if (result == TE_OK && te__master_next(&run, TE_QUANT_NVFP4, 0) < run.num_jobs) {
        result = te__master_amaxes(&run, TE_QUANT_NVFP4) ? TE_OK : te_error_code(te);
        if (result == TE_OK) result = te__master_tiles(&run, TE_QUANT_NVFP4, 16, 16, false);
    }
    if (result == TE_OK) result = te__master_identity(&run);
    for (i = 0; i < run.num_jobs && result == TE_OK && !w->manual_post_processing; i++) { /* stale from here on; the next forward makes them anew */
        te__quantized *q = run.job[i].weight->quantized;
        if (run.job[i].which == TE_ROWWISE && q->kind != TE_QUANT_HYBRID && te__copies_agree(&q->row)) te__copy_release(&q->col);
    }
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    te__free(te, run.job, bytes);
    return result;
}
#undef TE__MASTER_EACH

TE_API te_result te_cast_master_weights_to_fp8(te_ctx *te, const te_master_weights *w) { return te_quantize_master_weights(te, w); }

TE_API te_result te_post_all_gather_processing(te_ctx *te, te_tensor *const *model_weights, int count) {
    te_result result = TE_OK;
    int i;
    if (!te) return TE_ERR_STATE;
    if (count < 0 || (count > 0 && !model_weights)) return te__fail(te, TE_ERR_INVALID, "te_post_all_gather_processing: %d weights without a list", count);
    for (i = 0; i < count; i++) {
        if (!model_weights[i] || model_weights[i]->te != te) return te__fail(te, TE_ERR_INVALID, "te_post_all_gather_processing: weight %d is NULL or of another context", i);
    }
    for (i = 0; i < count && result == TE_OK; i++) {
        te_tensor *x = model_weights[i];
        if (x->quantized && x->quantized->row.data && x->quantized->kind != TE_QUANT_HYBRID && te__copies_agree(&x->quantized->row)) result = te__quant_add_columnwise(x);
    }
    return result;
}
