/* ops/moe/cpu.c: the reference of the moe operations, in plain loops. Sums over the copies of a token (one for each
 * of its experts) are in f32, in the order of the copies. Long sums are in double. */

/* ---- maps ---- */

static void te__store_index(const te_tensor *x, int64_t i, int64_t v) {
    if (x->dtype == TE_I64)
        ((int64_t *)te__data(x))[i] = v;
    else if (x->dtype == TE_I16)
        ((int16_t *)te__data(x))[i] = (int16_t)v; /* numbers of experts, at most TE_MOE_MAX_EXPERTS */
    else
        ((int32_t *)te__data(x))[i] = (int32_t)v;
}

static te_result te__cpu_moe_splits(te_ctx *te, const te_op_moe_splits_args *a) {
    int64_t n = te__numel(a->padded), i, offset = 0;
    (void)te;
    for (i = 0; i < n; i++) {
        int64_t given = a->sizes ? te__load_index(te__data(a->sizes), a->sizes->dtype, i) : a->values[i];
        /* the size is limited, so that it still fits in 64 bits when it is rounded up to a multiple of `align` */
        int64_t size = te__min(te__max(0, given), INT64_MAX - a->align), padded = te__round_up(size, a->align);
        te__store_index(a->padded, i, padded);
        if (a->offsets) te__store_index(a->offsets, i, offset);
        offset += padded - size;
    }
    return TE_OK;
}

static te_result te__cpu_moe_mask_map(te_ctx *te, const te_op_moe_mask_map_args *a) {
    int64_t tokens = te__rows(a->routing_map), experts = te__cols(a->routing_map), t, e, next = 0;
    const void *mask = te__data(a->routing_map);
    int32_t *map = (int32_t *)te__data(a->row_id_map);
    (void)te;
    for (t = 0; t < tokens; t++) map[t * (2 * experts + 1) + 2 * experts] = 0;
    for (e = 0; e < experts; e++) { /* numbers the rows, expert by expert */
        int64_t begin = next;
        for (t = 0; t < tokens; t++) {
            int32_t *row = map + t * (2 * experts + 1);
            if (!te__load_integer(mask, a->routing_map->dtype, t * experts + e)) continue;
            row[row[2 * experts]] = (int32_t)next++;
            row[experts + row[2 * experts]++] = (int32_t)e;
        }
        if (a->tokens_per_expert) te__store_index(a->tokens_per_expert, e, next - begin);
    }
    for (t = 0; t < tokens; t++) { /* the list of experts of each token is ascending now; this reverses it */
        int32_t *row = map + t * (2 * experts + 1), n = row[2 * experts], i;
        for (i = 0; i < n / 2; i++) {
            int32_t dst = row[i], expert = row[experts + i];
            row[i] = row[n - 1 - i];
            row[n - 1 - i] = dst;
            row[experts + i] = row[experts + n - 1 - i];
            row[experts + n - 1 - i] = expert;
        }
        for (i = n; i < (int32_t)experts; i++) row[i] = row[experts + i] = -1;
    }
    return TE_OK;
}

/* Compares two 64-bit numbers for qsort. The upper half of a number is a key, and the lower half is a position. */
static int te__moe_compare(const void *x, const void *y) {
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return (a > b) - (a < b);
}
static te_result te__cpu_moe_index_map(te_ctx *te, const te_op_moe_index_map_args *a) {
    int64_t items = te__numel(a->experts), topk = te__cols(a->experts), tokens = te__rows(a->experts), i;
    size_t bytes = (size_t)(items + 1) * sizeof(uint64_t);
    uint64_t *order = (uint64_t *)te__alloc(te, bytes);
    int32_t *map = (int32_t *)te__data(a->row_id_map);
    if (!order) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < items; i++)
        order[i] = (uint64_t)(uint32_t)te__load_index(te__data(a->experts), a->experts->dtype, i) << 32 | (uint64_t)i;
    qsort(order, (size_t)items, sizeof(uint64_t), te__moe_compare);
    for (i = 0; i < items; i++) {
        int64_t item = (int64_t)(uint32_t)order[i];
        map[item % topk * tokens + item / topk] = i < a->num_out_tokens ? (int32_t)i : -1;
    }
    te__free(te, order);
    return TE_OK;
}

static te_result te__cpu_moe_local_ids(te_ctx *te, const te_op_moe_local_ids_args *a) {
    int64_t n = te__numel(a->experts), topk = te__max(1, te__cols(a->experts)), i, e;
    const uint8_t *dropped = te__u8_data(a->dropped);
    (void)te;
    for (e = 0; e < a->count; e++) te__store_index(a->tokens_per_expert, e, 0);
    for (i = 0; i < n; i++) {
        e = te__load_index(te__data(a->experts), a->experts->dtype, i);
        e = e < a->first || e - a->first >= a->count || (dropped && dropped[i / topk]) ? -1 : e - a->first;
        ((int32_t *)te__data(a->local))[i] = (int32_t)e;
        if (e >= 0)
            te__store_index(a->tokens_per_expert, e,
                            te__load_index(te__data(a->tokens_per_expert), a->tokens_per_expert->dtype, e) + 1);
    }
    return TE_OK;
}
/* Limits a count or an offset of rows to the range of i32. Sums of such numbers fit in 64 bits. */
static int64_t te__moe_bounded(int64_t x) { return te__max(-(int64_t)INT32_MAX, te__min(x, INT32_MAX)); }
static te_result te__cpu_moe_chunk_map(te_ctx *te, const te_op_moe_chunk_map_args *a) {
    int64_t n = te__numel(a->sizes), tokens = te__numel(a->row_id_map), i, k, t = 0;
    const void *sizes = te__data(a->sizes);
    int32_t *map = (int32_t *)te__data(a->row_id_map);
    if (a->sorted_index && te__want_inside(te, TE__OUTSIDE_moe_chunk_map, a->sorted_index, 0, n, NULL) != TE_OK)
        return TE_ERR_INVALID;
    for (i = 0; i < n; i++) {
        int64_t size = te__max(0, te__load_index(sizes, a->sizes->dtype, i)),
                to = a->offsets ? te__moe_bounded(te__load_index(te__data(a->offsets), a->offsets->dtype, i)) + t : t,
                end;
        if (a->sorted_index) {
            to = 0;
            for (k = 0; k < n; k++) {
                int64_t chunk = te__load_index(te__data(a->sorted_index), a->sorted_index->dtype, k);
                if (chunk == i) break;
                if (chunk >= 0 && chunk < n)
                    to += te__max(0, te__moe_bounded(te__load_index(sizes, a->sizes->dtype, chunk)));
            }
        }
        for (end = te__min(tokens - t, size); end > 0; end--, to++) map[t++] = (int32_t)(a->chunk_numbers ? i : to);
    }
    for (; t < tokens; t++) map[t] = a->offsets || a->chunk_numbers ? -1 : (int32_t)t;
    return TE_OK;
}

/* ---- permute ---- */

/* A map and its memory. */
typedef struct te__moe_route {
    te__moe_map m;
    const int32_t *map;
    const te_tensor *pad_offsets;
    int64_t rows; /* rows of the permuted side */
} te__moe_route;

static te__moe_route te__moe_route_of(te_ctx *te, const te_tensor *row_id_map, int64_t topk,
                                      const te_tensor *pad_offsets, int64_t rows) {
    te__moe_route r;
    te__moe_map_of(te, "", row_id_map, topk, pad_offsets, &r.m);
    r.map = (const int32_t *)te__data(row_id_map);
    r.pad_offsets = pad_offsets;
    r.rows = rows;
    return r;
}
/* te__moe_count returns how many copies token t may have, one for each of its experts.
 *
 * te__moe_row returns the row of copy i of token t, or -1. Sets *place to the copy's index among the token's
 * probabilities. */
static int64_t te__moe_count(const te__moe_route *r, int64_t t) {
    int64_t experts = r->m.experts;
    return experts ? te__min(te__max(r->map[t * (2 * experts + 1) + 2 * experts], 0), experts) : r->m.copies;
}
static int64_t te__moe_row(const te__moe_route *r, int64_t t, int64_t i, int64_t *place) {
    int64_t experts = r->m.experts, row;
    if (!experts) {
        *place = i;
        row = r->map[i * r->m.tokens + t];
    } else {
        *place = r->map[t * (2 * experts + 1) + experts + i];
        row = r->map[t * (2 * experts + 1) + i];
        if (*place < 0 || *place >= experts) return -1;
        if (row >= 0 && r->pad_offsets)
            row += te__moe_bounded(te__load_index(te__data(r->pad_offsets), r->pad_offsets->dtype, *place));
    }
    return row >= 0 && row < r->rows ? row : -1;
}

/* Returns the inverse map, an array [rows]. The caller frees it. Sets *bytes to the size of its memory. If row r gets a
 * copy of a token, element r of the array is token * copies + place (see te__moe_row). Otherwise element r is -1.
 * Returns NULL if memory is short. */
static int32_t *te__moe_invert(te_ctx *te, const te__moe_route *r, size_t *bytes) {
    int32_t *source;
    int64_t t, i, row;
    *bytes = (size_t)(r->rows + 1) * sizeof(int32_t);
    source = (int32_t *)te__alloc(te, *bytes);
    if (!source) return NULL;
    for (row = 0; row < r->rows; row++) source[row] = -1;
    for (t = 0; t < r->m.tokens; t++)
        for (i = 0; i < te__moe_count(r, t); i++) {
            int64_t place;
            row = te__moe_row(r, t, i, &place);
            if (row >= 0) source[row] = (int32_t)te__max(source[row], t * r->m.copies + place);
        }
    return source;
}

typedef struct te__moe_permute_job {
    const te_op_moe_permute_args *a;
    const int32_t *source;
    te__moe_map m;
} te__moe_permute_job;
static void te__moe_permute_rows(void *user, int64_t begin, int64_t end) {
    const te__moe_permute_job *j = (const te__moe_permute_job *)user;
    const te_op_moe_permute_args *a = j->a;
    int64_t row, bytes = te__cols(a->y) * te__dtype_size(a->y->dtype);
    for (row = begin; row < end; row++) {
        int32_t from = j->source[row];
        float p = from >= 0 && a->probs ? te__load_element(te__data(a->probs), a->probs->dtype, from) : 0.0f;
        bool zero = from < 0 || (a->probs && j->m.experts && p == 0.0f);
        if (bytes && zero) memset((char *)te__data(a->y) + row * bytes, 0, (size_t)bytes);
        if (bytes && !zero)
            memcpy((char *)te__data(a->y) + row * bytes, (const char *)te__data(a->x) + from / j->m.copies * bytes,
                   (size_t)bytes);
        if (a->probs) te__store_row(te__data(a->permuted_probs), a->probs->dtype, row, 1, &p);
    }
}
static te_result te__cpu_moe_permute(te_ctx *te, const te_op_moe_permute_args *a) {
    te__moe_route route = te__moe_route_of(te, a->row_id_map, a->topk, a->pad_offsets, te__rows(a->y));
    te__moe_permute_job job;
    size_t bytes;
    int32_t *source = te__moe_invert(te, &route, &bytes);
    if (!source) return TE_ERR_OUT_OF_MEMORY;
    job.a = a;
    job.source = source;
    job.m = route.m;
    te__parallel_for(te, route.rows, 16, te__moe_permute_rows, &job);
    te__free(te, source);
    return TE_OK;
}

typedef struct te__moe_unpermute_job {
    const te_op_moe_unpermute_args *a;
    te__moe_route route;
} te__moe_unpermute_job;
static void te__moe_unpermute_token(const te__moe_unpermute_job *j, int64_t t) {
    const te_op_moe_unpermute_args *a = j->a;
    float sum[TE__MATH_PIECE], v[TE__MATH_PIECE];
    int64_t h = te__cols(a->x), count = te__moe_count(&j->route, t), at, i, k, place;
    for (at = 0; at < h; at += TE__MATH_PIECE) {
        int64_t n = te__min(TE__MATH_PIECE, h - at);
        memset(sum, 0, (size_t)n * sizeof(float));
        for (i = 0; i < count; i++) {
            int64_t row = te__moe_row(&j->route, t, i, &place);
            float p;
            if (row < 0) continue;
            p = a->merging_probs ? te__load_element(te__data(a->merging_probs), a->merging_probs->dtype,
                                                    t * j->route.m.copies + place)
                                 : 1.0f;
            te__load_row(te__data(a->x), a->x->dtype, row * h + at, n, v);
            for (k = 0; k < n; k++) sum[k] = te__fma(v[k], p, sum[k]);
        }
        te__store_row(te__data(a->y), a->y->dtype, t * h + at, n, sum);
    }
    if (!a->probs) return;
    for (i = 0, sum[0] = 0.0f; i < j->route.m.copies; i++)
        te__store_row(te__data(a->probs), a->probs->dtype, t * j->route.m.copies + i, 1, sum);
    for (i = 0; i < count; i++) {
        int64_t row = te__moe_row(&j->route, t, i, &place);
        if (row < 0) continue;
        v[0] = te__load_element(te__data(a->permuted_probs), a->permuted_probs->dtype, row);
        te__store_row(te__data(a->probs), a->probs->dtype, t * j->route.m.copies + place, 1, v);
    }
}
static void te__moe_unpermute_tokens(void *user, int64_t begin, int64_t end) {
    int64_t t;
    for (t = begin; t < end; t++) te__moe_unpermute_token((const te__moe_unpermute_job *)user, t);
}
static te_result te__cpu_moe_unpermute(te_ctx *te, const te_op_moe_unpermute_args *a) {
    te__moe_unpermute_job job;
    job.a = a;
    job.route = te__moe_route_of(te, a->row_id_map, a->topk, a->pad_offsets, te__rows(a->x));
    te__parallel_for(te, job.route.m.tokens, 16, te__moe_unpermute_tokens, &job);
    return TE_OK;
}

typedef struct te__moe_unpermute_bwd_job {
    const te_op_moe_unpermute_bwd_args *a;
    te__moe_route route;
    const int32_t *source;
} te__moe_unpermute_bwd_job;
static void te__moe_unpermute_bwd_rows(void *user, int64_t begin, int64_t end) {
    const te__moe_unpermute_bwd_job *j = (const te__moe_unpermute_bwd_job *)user;
    const te_op_moe_unpermute_bwd_args *a = j->a;
    int64_t h = te__cols(a->dy), row, at, k;
    float v[TE__MATH_PIECE];
    for (row = begin; row < end; row++) {
        int32_t from = j->source[row];
        float p = from < 0 ? 0.0f : te__load_element(te__data(a->merging_probs), a->merging_probs->dtype, from);
        for (at = 0; at < h; at += TE__MATH_PIECE) {
            int64_t n = te__min(TE__MATH_PIECE, h - at);
            if (from < 0)
                memset(v, 0, sizeof(v));
            else
                te__load_row(te__data(a->dy), a->dy->dtype, from / j->route.m.copies * h + at, n, v);
            for (k = 0; k < n && from >= 0; k++) v[k] *= p;
            te__store_row(te__data(a->dx), a->dx->dtype, row * h + at, n, v);
        }
    }
}
static void te__moe_dprobs_tokens(void *user, int64_t begin, int64_t end) {
    const te__moe_unpermute_bwd_job *j = (const te__moe_unpermute_bwd_job *)user;
    const te_op_moe_unpermute_bwd_args *a = j->a;
    int64_t h = te__cols(a->dy), copies = j->route.m.copies, t, i, at, k, place;
    float v[TE__MATH_PIECE], w[TE__MATH_PIECE], zero = 0.0f;
    for (t = begin; t < end; t++) {
        for (i = 0; i < copies; i++) te__store_row(te__data(a->dprobs), a->dprobs->dtype, t * copies + i, 1, &zero);
        for (i = 0; i < te__moe_count(&j->route, t); i++) {
            int64_t row = te__moe_row(&j->route, t, i, &place);
            double sum = 0.0;
            if (row < 0) continue;
            for (at = 0; at < h; at += TE__MATH_PIECE) {
                int64_t n = te__min(TE__MATH_PIECE, h - at);
                te__load_row(te__data(a->dy), a->dy->dtype, t * h + at, n, v);
                te__load_row(te__data(a->x), a->x->dtype, row * h + at, n, w);
                for (k = 0; k < n; k++) sum += (double)v[k] * (double)w[k];
            }
            v[0] = (float)sum;
            te__store_row(te__data(a->dprobs), a->dprobs->dtype, t * copies + place, 1, v);
        }
    }
}
static te_result te__cpu_moe_unpermute_bwd(te_ctx *te, const te_op_moe_unpermute_bwd_args *a) {
    te__moe_unpermute_bwd_job job;
    size_t bytes = 0;
    int32_t *source = NULL;
    job.a = a;
    job.route = te__moe_route_of(te, a->row_id_map, a->topk, a->pad_offsets,
                                 a->dx  ? te__rows(a->dx)
                                 : a->x ? te__rows(a->x)
                                        : 0);
    if (a->dprobs) te__parallel_for(te, job.route.m.tokens, 16, te__moe_dprobs_tokens, &job);
    if (!a->dx) return TE_OK;
    job.source = source = te__moe_invert(te, &job.route, &bytes);
    if (!source) return TE_ERR_OUT_OF_MEMORY;
    te__parallel_for(te, job.route.rows, 16, te__moe_unpermute_bwd_rows, &job);
    te__free(te, source);
    return TE_OK;
}

/* ---- auxiliary loss, sums ---- */

/* Together, these two functions compute coeff * num_experts / (topk * total^2), with the same steps as the kernels. */
static float te__moe_loss_factor(float coeff, int experts, int topk) { return (float)experts * coeff / (float)topk; }
static float te__moe_coefficient(float factor, const te_tensor *total_device, int64_t total) {
    float t = total_device ? (float)*(const int64_t *)te__data(total_device) : (float)total;
    return factor / t / t;
}

static te_result te__cpu_moe_aux_loss_fwd(te_ctx *te, const te_op_moe_aux_loss_fwd_args *a) {
    int64_t rows = te__rows(a->probs), cols = te__cols(a->probs), i, k;
    double sum = 0.0;
    float loss;
    (void)te;
    for (k = 0; k < cols; k++) {
        double column = 0.0;
        for (i = 0; i < rows; i++)
            column += (double)te__load_element(te__data(a->probs), a->probs->dtype, i * cols + k);
        sum += column * (double)te__load_element(te__data(a->tokens_per_expert), a->tokens_per_expert->dtype, k);
    }
    loss = (float)(sum * (double)te__moe_coefficient(te__moe_loss_factor(a->coeff, a->num_experts, a->topk),
                                                     a->total_device, a->total_num_tokens));
    te__store_row(te__data(a->loss), a->loss->dtype, 0, 1, &loss);
    return TE_OK;
}
static te_result te__cpu_moe_aux_loss_bwd(te_ctx *te, const te_op_moe_aux_loss_bwd_args *a) {
    int64_t rows = te__rows(a->dprobs), cols = te__cols(a->dprobs), i, k;
    float c = te__moe_coefficient(te__moe_loss_factor(a->coeff, a->num_experts, a->topk), a->total_device,
                                  a->total_num_tokens);
    float g = te__load_element(te__data(a->dloss), a->dloss->dtype, 0);
    (void)te;
    for (k = 0; k < cols; k++) {
        float v = c * te__load_element(te__data(a->tokens_per_expert), a->tokens_per_expert->dtype, k) * g;
        for (i = 0; i < rows; i++) te__store_row(te__data(a->dprobs), a->dprobs->dtype, i * cols + k, 1, &v);
    }
    return TE_OK;
}

typedef struct te__grouped_sum_job {
    const te_op_grouped_column_sum_args *a;
    int64_t groups;
} te__grouped_sum_job;
static void te__grouped_sum_columns(void *user, int64_t begin, int64_t end) {
    const te__grouped_sum_job *j = (const te__grouped_sum_job *)user;
    const te_op_grouped_column_sum_args *a = j->a;
    int64_t m = te__rows(a->x), n = te__cols(a->x), col, g, i;
    for (col = begin; col < end; col++) {
        int64_t row = 0;
        for (g = 0; g < j->groups; g++) {
            int64_t size = te__load_index(te__data(a->sizes), a->sizes->dtype, g),
                    last = row + te__min(te__max(size, 0), m - row);
            double sum = 0.0;
            float f;
            for (i = row; i < last; i++) sum += (double)te__load_element(te__data(a->x), a->x->dtype, i * n + col);
            f = (float)sum;
            te__store_row(te__data(a->out), a->out->dtype, g * n + col, 1, &f);
            row = last;
        }
    }
}
static te_result te__cpu_grouped_column_sum(te_ctx *te, const te_op_grouped_column_sum_args *a) {
    te__grouped_sum_job job;
    job.a = a;
    job.groups = te__numel(a->sizes);
    te__parallel_for(te, te__cols(a->x), 16, te__grouped_sum_columns, &job);
    return TE_OK;
}
