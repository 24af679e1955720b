/* ops/cast/cpu.c: the reference of amax, scales, FP8 casts and transpose. Every GPU gives the same bytes as this code.
 * The results do not depend on the number of threads. */

/* Returns the maximum of `largest` and all |x|. A NaN counts as 0. Maxima compare bits, because compilers vectorize
 * integer maxima. */
static float te__amax_of(const float *x, int64_t n, float largest) {
    int32_t most = (int32_t)te__f32_bits(largest);
    int64_t i;
    for (i = 0; i < n; i++) {
        int32_t a = (int32_t)(te__f32_bits(x[i]) & 0x7fffffffu);
        a = a > 0x7f800000 ? 0 : a;
        most = a > most ? a : most;
    }
    return te__bits_f32((uint32_t)most);
}

static bool te__noop_is_up(const te_tensor *noop) { return noop && *te__f32_data(noop) == 1.0f; }

/* ---- amax, scales ---- */

enum { TE__AMAX_PARTS = 64, TE__AMAX_PIECE = 1024 };
typedef struct te__amax_job {
    const te_tensor *x;
    float part[TE__AMAX_PARTS];
} te__amax_job;

static void te__amax_parts(void *user, int64_t begin, int64_t end) {
    te__amax_job *j = (te__amax_job *)user;
    float v[TE__AMAX_PIECE];
    int64_t n = te__numel(j->x), part, at;
    for (part = begin; part < end; part++) {
        int64_t stop = n / TE__AMAX_PARTS * (part + 1) + (part == TE__AMAX_PARTS - 1 ? n % TE__AMAX_PARTS : 0);
        float largest = 0.0f;
        for (at = n / TE__AMAX_PARTS * part; at < stop; at += TE__AMAX_PIECE) {
            int64_t size = te__min(TE__AMAX_PIECE, stop - at);
            te__load_row(te__data(j->x), j->x->dtype, at, size, v);
            largest = te__amax_of(v, size, largest);
        }
        j->part[part] = largest;
    }
}
static float te__amax_whole(te_ctx *te, const te_tensor *x, float largest) {
    te__amax_job j;
    j.x = x;
    te__parallel_for(te, TE__AMAX_PARTS, te__max(1, TE__AMAX_PARTS * 32768 / te__max(1, te__numel(x))), te__amax_parts,
                     &j);
    return te__amax_of(j.part, TE__AMAX_PARTS, largest);
}
/* Returns the address of element i of x, a vector of any stride, or NULL if there is no such element. */
static float *te__of_group(const te_tensor *x, int64_t i) {
    return x && i >= 0 && i < te__numel(x) ? te__f32_data(x) + i * (x->ndim ? x->stride[0] : 0) : NULL;
}

/* Computes the amaxes of groups `begin` to `end` - 1. With `keep` the old amax counts in the maximum. */
static void te__amax_groups(void *user, int64_t begin, int64_t end) {
    const te_op_amax_args *a = (const te_op_amax_args *)user;
    const int32_t *group = (const int32_t *)te__data(a->groups);
    float v[TE__AMAX_PIECE];
    int64_t m = te__rows(a->x), n = te__cols(a->x), row, at;
    for (; begin < end; begin++) {
        float *amax = te__of_group(a->amax, begin), largest = a->keep ? *amax : 0.0f;
        for (row = 0; row < m; row++)
            for (at = 0; group[row] == begin && at < n; at += TE__AMAX_PIECE) {
                int64_t size = te__min(TE__AMAX_PIECE, n - at);
                te__load_row(te__data(a->x), a->x->dtype, row * n + at, size, v);
                largest = te__amax_of(v, size, largest);
            }
        *amax = largest;
    }
}
static te_result te__cpu_amax(te_ctx *te, const te_op_amax_args *a) {
    float *amax = te__f32_data(a->amax);
    if (a->groups) {
        te_op_amax_args args = *a;
        te__parallel_for(te, te__numel(a->amax), 1, te__amax_groups, &args);
        return TE_OK;
    }
    if (te__noop_is_up(a->noop)) return TE_OK;
    *amax = te__amax_whole(te, a->x, a->keep ? *amax : 0.0f);
    return TE_OK;
}

static te_result te__cpu_scale_from_amax(te_ctx *te, const te_op_scale_from_amax_args *a) {
    const float *amax = te__f32_data(a->amax);
    float *scale = te__f32_data(a->scale), *scale_inv = te__f32_data(a->scale_inv);
    int64_t i, n = te__numel(a->amax);
    (void)te;
    for (i = 0; i < n; i++) {
        scale[i] = te__block_scale(amax[i], a->fp8_max, a->epsilon, FLT_MAX, a->power_of_two);
        if (scale_inv) scale_inv[i] = te__rcp_f32(scale[i]);
    }
    return TE_OK;
}

/* ---- delayed scaling ---- */

/* Updates one slot (one column of a history, with its scale) as TransformerEngine does
 * (common/recipe/delayed_scaling.cu). Row 0 gathers the amax of the current step. `reduced` replaces this amax unless
 * `reduced` is 0. Rows 1 .. length - 1 hold the amaxes of earlier steps, and the last row is the newest. If the amax of
 * the current step is 0, nothing changes. */
static void te__delayed_slot(float *history, int64_t length, int64_t n, float *scale, float reduced, float scaled_max,
                             bool most_recent) {
    float last = reduced != 0.0f ? reduced : history[0], amax = 0.0f, next;
    int64_t row;
    if (last == 0.0f) return;
    for (row = 1; row < length; row++) {
        /* The maximum is over the history before this shift. fmaxf ignores a NaN. */
        amax = fmaxf(amax, history[row * n]);
        history[row * n] = row + 1 < length ? history[(row + 1) * n] : last;
    }
    history[0] = 0.0f;
    amax = most_recent ? last : fmaxf(amax, last);
    if (!(amax > 0.0f && amax <= FLT_MAX)) return;
    next = scaled_max / amax;
    *scale = next > FLT_MAX ? FLT_MAX : next;
}
static te_result te__cpu_delayed_update(te_ctx *te, const te_op_delayed_update_args *a) {
    const float *reduced = te__f32_data(a->reduced);
    float scaled_max = te__delayed_scaled_max(a);
    int64_t slot;
    int i;
    (void)te;
    for (i = 0; i < a->count; i++) {
        float *history = te__f32_data(a->amax_history[i]), *scale = te__f32_data(a->scale[i]);
        int64_t length = a->amax_history[i]->shape[0], n = a->amax_history[i]->shape[1];
        for (slot = 0; slot < n; slot++)
            te__delayed_slot(history + slot, length, n, scale + slot, reduced ? *reduced++ : 0.0f, scaled_max,
                             a->algo == TE_AMAX_MOST_RECENT);
    }
    return TE_OK;
}
static te_result te__cpu_delayed_gather(te_ctx *te, const te_op_delayed_gather_args *a) {
    float *amaxes = te__f32_data(a->amaxes);
    int i;
    (void)te;
    for (i = 0; i < a->count; i++) {
        int64_t n = a->amax_history[i]->shape[1];
        if (n > 0) memcpy(amaxes, te__data(a->amax_history[i]), (size_t)n * sizeof(float));
        amaxes += n;
    }
    return TE_OK;
}

/* ---- quantize ---- */

enum { TE__CAST_TILE = 64 };

/* Transposes a tile: dst[c][r] = src[r][c]. Rows of both have TE__CAST_TILE bytes. */
static void te__transpose_tile(const uint8_t *src, uint8_t *dst) {
    int r, c, i;
    for (r = 0; r < TE__CAST_TILE; r += 8)
        for (c = 0; c < TE__CAST_TILE; c++) {
            uint8_t *to = dst + c * TE__CAST_TILE + r;
            for (i = 0; i < 8; i++) to[i] = src[(r + i) * TE__CAST_TILE + c];
        }
}

typedef struct te__quantize_job {
    const te_op_fp8_quantize_args *a;
    int64_t m, n, ld, ldc, tiles_m, tiles_n;
    te_dtype format;
    float scale;
    const int32_t *group; /* [m]: the group of each row; NULL: no groups. Each group has its own scale. */
    bool amax; /* the amax is wanted */
    int parts;
    float part[64]; /* amax of each part */
} te__quantize_job;

/* Casts one tile of x into `row` and `col`, with zeros beyond the edges of x. Returns the maximum of `largest` and the
 * tile's amax. */
static float te__quantize_tile(const te__quantize_job *j, int64_t first_row, int64_t first_col, float largest) {
    uint8_t code[TE__CAST_TILE * TE__CAST_TILE], turned[TE__CAST_TILE * TE__CAST_TILE];
    const te_tensor *x = j->a->x;
    uint8_t *row_data = te__u8_data(j->a->row), *col_data = te__u8_data(j->a->col);
    int64_t rows = te__min(TE__CAST_TILE, j->m - first_row), cols = te__min(TE__CAST_TILE, j->n - first_col), r, i;
    float v[TE__CAST_TILE], scale = j->scale;
    if (rows < TE__CAST_TILE || cols < TE__CAST_TILE) memset(code, 0, sizeof(code));
    for (r = 0; r < rows && cols > 0; r++) {
        te__load_row(te__data(x), x->dtype, (first_row + r) * j->n + first_col, cols, v);
        if (j->group) {
            const float *of_group = te__of_group(j->a->scale, j->group[first_row + r]);
            if (!of_group) memset(v, 0, sizeof(v));
            scale = of_group ? *of_group : 1.0f;
        }
        if (j->amax) largest = te__amax_of(v, cols, largest);
        for (i = 0; i < cols; i++) v[i] *= scale;
        te__store_row(code, j->format, r * TE__CAST_TILE, cols, v);
    }
    if (row_data && first_col < j->ld) {
        size_t bytes = (size_t)te__min(TE__CAST_TILE, j->ld - first_col);
        for (r = 0; r < rows; r++)
            memcpy(row_data + (first_row + r) * j->ld + first_col, code + r * TE__CAST_TILE, bytes);
    }
    if (col_data && first_row < j->ldc) {
        size_t bytes = (size_t)te__min(TE__CAST_TILE, j->ldc - first_row);
        te__transpose_tile(code, turned);
        for (i = 0; i < cols; i++)
            memcpy(col_data + (first_col + i) * j->ldc + first_row, turned + i * TE__CAST_TILE, bytes);
    }
    return largest;
}
static void te__quantize_parts(void *user, int64_t begin, int64_t end) {
    te__quantize_job *j = (te__quantize_job *)user;
    int64_t tiles = j->tiles_m * j->tiles_n, part, tile;
    for (part = begin; part < end; part++) {
        float largest = 0.0f;
        for (tile = tiles * part / j->parts; tile < tiles * (part + 1) / j->parts; tile++)
            largest =
                te__quantize_tile(j, tile / j->tiles_n * TE__CAST_TILE, tile % j->tiles_n * TE__CAST_TILE, largest);
        j->part[part] = largest;
    }
}
static te_result te__cpu_fp8_quantize(te_ctx *te, const te_op_fp8_quantize_args *a) {
    te__quantize_job j;
    float *amax = te__f32_data(a->amax), *scale_inv = te__f32_data(a->scale_inv);
    te_op_column_sum_args sum = TE_ZERO;
    if (te__noop_is_up(a->noop)) return TE_OK;
    sum.x = a->x;
    sum.out = a->dbias;
    j.a = a;
    j.m = te__rows(a->x);
    j.n = te__cols(a->x);
    j.ld = te__cols_of(a->row);
    j.ldc = te__cols_of(a->col);
    j.tiles_m = te__div_up(te__max(j.m, j.ldc), TE__CAST_TILE);
    j.tiles_n = te__div_up(te__max(j.n, j.ld), TE__CAST_TILE);
    j.format = a->row ? a->row->dtype : a->col->dtype;
    if (a->current) {
        float *found = te__f32_data(a->x_amax), largest = found ? found[0] : te__amax_whole(te, a->x, 0.0f);
        if (found) found[0] = found[1] = 0.0f;
        j.scale = te__block_scale(largest, te_dtype_max(j.format), a->epsilon, FLT_MAX, a->power_of_two);
        if (amax) *amax = largest;
    } else {
        j.scale = *te__f32_data(a->scale);
    }
    j.group = (const int32_t *)te__data(a->groups);
    j.amax = amax && !a->current && !a->groups;
    j.parts = (int)te__min(TE__COUNT(j.part), j.tiles_m * j.tiles_n);
    te__parallel_for(te, j.parts, j.parts < TE__COUNT(j.part) ? 4 : 1, te__quantize_parts, &j);
    if (j.amax) *amax = te__amax_of(j.part, j.parts, *amax);
    if (a->groups) {
        te_op_amax_args measure = TE_ZERO;
        int64_t i;
        for (i = 0; scale_inv && i < te__numel(a->scale); i++) scale_inv[i] = te__rcp_f32(*te__of_group(a->scale, i));
        measure.x = a->x;
        measure.amax = a->amax;
        measure.groups = a->groups;
        measure.keep = true;
        return amax ? te__cpu_amax(te, &measure) : TE_OK;
    }
    if (scale_inv) *scale_inv = te__rcp_f32(j.scale);
    return a->dbias ? te__cpu_column_sum(te, &sum) : TE_OK;
}

/* ---- dequantize, transpose ---- */

static void te__dequantize_rows(void *user, int64_t begin, int64_t end) {
    const te_op_fp8_dequantize_args *a = (const te_op_fp8_dequantize_args *)user;
    const int32_t *group = (const int32_t *)te__data(a->groups);
    float v[TE__AMAX_PIECE];
    int64_t n = te__cols(a->y), ld = te__cols(a->q), row, at, i;
    for (row = begin; row < end; row++) {
        const float *of_row = group ? te__of_group(a->scale_inv, group[row]) : te__f32_data(a->scale_inv);
        float scale_inv = of_row ? *of_row : 0.0f;
        for (at = 0; at < n; at += TE__AMAX_PIECE) {
            int64_t size = te__min(TE__AMAX_PIECE, n - at);
            te__load_row(te__data(a->q), a->q->dtype, row * ld + at, size, v);
            for (i = 0; i < size; i++) v[i] = of_row ? v[i] * scale_inv : 0.0f;
            te__one_nan(v, size);
            te__store_row(te__data(a->y), a->y->dtype, row * n + at, size, v);
        }
    }
}
static te_result te__cpu_fp8_dequantize(te_ctx *te, const te_op_fp8_dequantize_args *a) {
    te_op_fp8_dequantize_args args = *a;
    te__parallel_for(te, te__rows(a->y), te__max(1, 16384 / te__max(1, te__cols(a->y))), te__dequantize_rows, &args);
    return TE_OK;
}

/* Transposes bands `begin` to `end` - 1, of 32 columns of src each. A band fills only 32 rows of dst at a time, so the
 * cache lines of these rows stay in the cache until they are full. */
static void te__transpose_bands(void *user, int64_t begin, int64_t end) {
    const te_op_transpose_args *a = (const te_op_transpose_args *)user;
    const char *src = (const char *)te__data(a->src);
    char *dst = (char *)te__data(a->dst);
    int64_t size = te__dtype_size(a->src->dtype), lds = te__cols(a->src), ldd = te__cols(a->dst), band, m, n;
    for (band = begin; band < end; band++) {
        int64_t last = te__min((band + 1) * 32, a->columns);
        for (m = 0; m < a->rows; m++) {
            const char *from = src + m * lds * size;
            char *to = dst + m * size;
            if (size == 1) {
                for (n = band * 32; n < last; n++) to[n * ldd] = from[n];
            } else if (size == 2) {
                for (n = band * 32; n < last; n++) memcpy(to + n * ldd * 2, from + n * 2, 2);
            } else {
                for (n = band * 32; n < last; n++) memcpy(to + n * ldd * 4, from + n * 4, 4);
            }
        }
        for (n = band * 32; n < last && ldd > a->rows; n++)
            memset(dst + (n * ldd + a->rows) * size, 0, (size_t)((ldd - a->rows) * size));
    }
}
/* Transposes bands of 4-bit elements, 32 columns of src each. The even element is in a byte's low half. Rows are whole
 * bytes. */
static void te__transpose_nibbles(void *user, int64_t begin, int64_t end) {
    const te_op_transpose_args *a = (const te_op_transpose_args *)user;
    const uint8_t *src = te__u8_data(a->src);
    uint8_t *dst = te__u8_data(a->dst);
    int64_t lds = (te__cols(a->src) + 1) / 2, ldd = (te__cols(a->dst) + 1) / 2, band, m, n;
    for (band = begin; band < end; band++) {
        int64_t last = te__min((band + 1) * 32, a->columns);
        for (m = 0; m < a->rows; m += 2) {
            const uint8_t *even = src + m * lds, *odd = even + lds;
            for (n = band * 32; n < last; n++) {
                int shift = n % 2 * 4, high = m + 1 < a->rows ? odd[n / 2] >> shift & 15 : 0;
                dst[n * ldd + m / 2] = (uint8_t)((even[n / 2] >> shift & 15) | high << 4);
            }
        }
        for (n = band * 32; n < last; n++)
            memset(dst + n * ldd + (a->rows + 1) / 2, 0, (size_t)(ldd - (a->rows + 1) / 2));
    }
}
static te_result te__cpu_transpose(te_ctx *te, const te_op_transpose_args *a) {
    te_op_transpose_args args = *a;
    if (te__numel(a->dst) == 0) return TE_OK;
    te__parallel_for(te, te__div_up(a->columns, 32), te__max(1, 1024 / te__max(1, a->rows)),
                     te_dtype_bits(a->src->dtype) == 4 ? te__transpose_nibbles : te__transpose_bands, &args);
    return TE_OK;
}
