/* ops/nvfp4/cpu.c: the CPU's reference of the NVFP4 amaxes and casts. The kernels write the same bytes on every GPU.
 * Casts are divided into strips of 16 rows of x, so that no two threads write the same byte. */

static bool te__nvfp4_noop(const te_tensor *noop) { return noop && *te__f32_data(noop) == 1.0f; }

/* Returns the maximum of `largest` and all |x|; NaN is ignored. */
static float te__nvfp4_largest(const float *x, int n, float largest) {
    int i;
    for (i = 0; i < n; i++) {
        float a = te__nvfp4_abs(x[i]);
        if (a > largest) largest = a;
    }
    return largest;
}

typedef float te__nvfp4_tile[16][16];

/* Groups of rows. Each group has its own amax. */
typedef struct te__nvfp4_row_groups {
    const int32_t *of_row; /* [rows]: the group of each row; NULL: no groups */
    int64_t rows, count;
} te__nvfp4_row_groups;
static te__nvfp4_row_groups te__nvfp4_groups_of(const te_tensor *groups, const te_tensor *amax) {
    te__nvfp4_row_groups g;
    g.of_row = (const int32_t *)te__data(groups);
    g.rows = groups ? te__numel(groups) : 0;
    g.count = amax ? te__numel(amax) : 0;
    return g;
}
/* Returns the group of a row, or -1. */
static int64_t te__nvfp4_group(const te__nvfp4_row_groups *g, int64_t row) {
    return row < g->rows && g->of_row[row] < g->count ? g->of_row[row] : -1;
}

/* Loads 16 x 16 elements of x, from row 16 * strip and column 16 * group on. Elements beyond the edges of x become
 * 0. */
static void te__nvfp4_load(const te_tensor *x, int64_t strip, int64_t group, te__nvfp4_tile v) {
    int64_t m = te__rows(x), n = te__cols(x), r, size = te__max(0, te__min(16, n - 16 * group));
    memset(v, 0, sizeof(te__nvfp4_tile));
    for (r = 0; r < 16 && 16 * strip + r < m; r++)
        te__load_row(te__data(x), x->dtype, (16 * strip + r) * n + 16 * group, size, v[r]);
}
/* Sets `turned` to the input of the column-wise copy: v transposed, and then transformed if `transform` is not 0. */
static void te__nvfp4_turn(te__nvfp4_tile v, int transform, te__nvfp4_tile turned) {
    int r, c;
    for (r = 0; r < 16; r++)
        for (c = 0; c < 16; c++) turned[c][r] = v[r][c];
    if (!transform) return;
    for (c = 0; c < 16; c++) {
        if (transform == 1) te__nvfp4_flip(turned[c], TE__NVFP4_SIGNS);
        te__nvfp4_transform_bf16(turned[c]);
    }
}

/* ---- amax ---- */

enum { TE__NVFP4_PARTS = 64 };
typedef struct te__nvfp4_amax_job {
    const te_op_nvfp4_amax_args *a;
    float row[TE__NVFP4_PARTS], col[TE__NVFP4_PARTS];
} te__nvfp4_amax_job;

static void te__nvfp4_amax_parts(void *user, int64_t begin, int64_t end) {
    te__nvfp4_amax_job *j = (te__nvfp4_amax_job *)user;
    const te_op_nvfp4_amax_args *a = j->a;
    int64_t m = te__rows(a->x), strips = te__div_up(m, 16), groups = te__div_up(te__cols(a->x), 16), part, strip, group,
            r;
    int transform = te__nvfp4_transform(a->rht, a->no_random_sign_mask);
    float *rows = te__nvfp4_is_vector(a->amax_row) ? te__f32_data(a->amax_row) : NULL;
    te__nvfp4_tile v, turned;
    for (part = begin; part < end; part++) {
        float row = 0.0f, col = 0.0f;
        for (strip = strips * part / TE__NVFP4_PARTS; strip < strips * (part + 1) / TE__NVFP4_PARTS; strip++) {
            float each[16] = TE_ZERO;
            for (group = 0; group < groups; group++) {
                te__nvfp4_load(a->x, strip, group, v);
                for (r = 0; r < 16; r++) each[r] = te__nvfp4_largest(v[r], 16, each[r]);
                if (!transform) continue;
                te__nvfp4_turn(v, transform, turned);
                col = te__nvfp4_largest(turned[0], 256, col);
            }
            row = te__nvfp4_largest(each, 16, row);
            for (r = 0; rows && r < 16 && 16 * strip + r < m; r++)
                rows[16 * strip + r] = te__nvfp4_largest(each + r, 1, a->keep ? rows[16 * strip + r] : 0.0f);
        }
        j->row[part] = row;
        j->col[part] = transform ? col : row;
    }
}
/* Computes the amax of each of the columns 16 * begin to 16 * end - 1. */
static void te__nvfp4_amax_columns(void *user, int64_t begin, int64_t end) {
    const te_op_nvfp4_amax_args *a = (const te_op_nvfp4_amax_args *)user;
    int64_t n = te__cols(a->x), strips = te__div_up(te__rows(a->x), 16), group, strip, c;
    int transform = te__nvfp4_transform(a->rht, a->no_random_sign_mask);
    float *cols = te__f32_data(a->amax_col);
    te__nvfp4_tile v, turned;
    for (group = begin; group < end; group++) {
        float each[16] = TE_ZERO;
        for (strip = 0; strip < strips; strip++) {
            te__nvfp4_load(a->x, strip, group, v);
            te__nvfp4_turn(v, transform, turned);
            for (c = 0; c < 16; c++) each[c] = te__nvfp4_largest(turned[c], 16, each[c]);
        }
        for (c = 0; c < 16 && 16 * group + c < n; c++)
            cols[16 * group + c] = te__nvfp4_largest(each + c, 1, a->keep ? cols[16 * group + c] : 0.0f);
    }
}
/* Computes the amaxes of groups `begin` to `end` - 1. All rows of a strip of 16 rows belong to the same group. */
static void te__nvfp4_amax_by_group(void *user, int64_t begin, int64_t end) {
    const te_op_nvfp4_amax_args *a = (const te_op_nvfp4_amax_args *)user;
    const te__nvfp4_row_groups g = te__nvfp4_groups_of(a->groups, a->amax_row ? a->amax_row : a->amax_col);
    int64_t strips = te__div_up(te__rows(a->x), 16), blocks = te__div_up(te__cols(a->x), 16), strip, block;
    int transform = te__nvfp4_transform(a->rht, a->no_random_sign_mask);
    float *rows = te__f32_data(a->amax_row), *cols = te__f32_data(a->amax_col);
    te__nvfp4_tile v, turned;
    for (; begin < end; begin++) {
        float row = rows && a->keep ? rows[begin] : 0.0f, col = cols && a->keep ? cols[begin] : 0.0f;
        for (strip = 0; strip < strips; strip++)
            for (block = 0; te__nvfp4_group(&g, 16 * strip) == begin && block < blocks; block++) {
                te__nvfp4_load(a->x, strip, block, v);
                row = te__nvfp4_largest(v[0], 256, row);
                te__nvfp4_turn(v, transform, turned);
                col = te__nvfp4_largest(turned[0], 256, col);
            }
        if (rows) rows[begin] = row;
        if (cols) cols[begin] = col;
    }
}
static te_result te__cpu_nvfp4_amax(te_ctx *te, const te_op_nvfp4_amax_args *a) {
    te__nvfp4_amax_job j;
    te_op_nvfp4_amax_args rest = *a;
    float *row, *col;
    if (te__nvfp4_noop(a->noop)) return TE_OK;
    if (a->groups) {
        te__parallel_for(te, te__numel(a->amax_row ? a->amax_row : a->amax_col), 1, te__nvfp4_amax_by_group, &rest);
        return TE_OK;
    }
    if (te__nvfp4_is_vector(a->amax_col)) {
        te__parallel_for(te, te__div_up(te__cols(a->x), 16), te__max(1, 1024 / te__max(1, te__rows(a->x))),
                         te__nvfp4_amax_columns, &rest);
        if (!a->amax_row) return TE_OK;
        rest.amax_col = NULL;
        rest.rht = false;
    }
    row = te__f32_data(rest.amax_row);
    col = te__f32_data(rest.amax_col);
    j.a = &rest;
    te__parallel_for(te, TE__NVFP4_PARTS, te__max(1, TE__NVFP4_PARTS * 16384 / te__max(1, te__numel(a->x))),
                     te__nvfp4_amax_parts, &j);
    if (row && !te__nvfp4_is_vector(rest.amax_row))
        *row = te__nvfp4_largest(j.row, TE__NVFP4_PARTS, a->keep ? *row : 0.0f);
    if (col) *col = te__nvfp4_largest(j.col, TE__NVFP4_PARTS, a->keep ? *col : 0.0f);
    return TE_OK;
}

/* ---- quantize ---- */

/* How the row-wise or the column-wise copy is rounded. */
typedef struct te__nvfp4_rounding {
    bool stochastic;
    bool nan; /* a NaN makes the scale of its block NaN */
    int four;
    float code_max;
    uint64_t seed, offset;
} te__nvfp4_rounding;

/* Quantizes 16 elements to codes with the block scale d. `block` is the number of the block in the row-wise or the
 * column-wise copy. It selects the random bytes. */
static void te__nvfp4_codes(const te__nvfp4_rounding *how, const float v[16], uint8_t d, float tensor_scale,
                            uint64_t block, uint8_t code[16]) {
    float multiplier = te__nvfp4_multiplier(d, tensor_scale);
    uint32_t words[4];
    int i;
    if (d == 0x7fu) {
        memset(code, 7, 16);
        return;
    }
    if (!how->stochastic) {
        for (i = 0; i < 16; i++) code[i] = te__f32_to_e2m1(te__mul_f32(v[i], multiplier));
        return;
    }
    te__philox(how->seed, how->offset, block, words);
    for (i = 0; i < 16; i++)
        code[i] = te__nvfp4_stochastic(te__nvfp4_product(v[i], multiplier), te__nvfp4_random_byte(words, i));
}
static float te__nvfp4_error(const te__nvfp4_rounding *how, const float v[16], uint8_t d, float amax, uint64_t block) {
    uint8_t code[16];
    float scale = te__e4m3_to_f32(d), most = te__mul_f32(how->code_max, 6.0f), sum = 0.0f;
    int i;
    te__nvfp4_codes(how, v, d, te__nvfp4_tensor_scale(amax, how->code_max), block, code);
    for (i = 0; i < 16; i++)
        sum = te__nvfp4_sum(sum, te__nvfp4_loss(v[i], code[i], scale, amax, most, how->four == TE_4OVER6_MSE));
    return sum;
}
/* Returns the sum of the errors of a tile's 16 rows, added in the same order as in a warp of the kernel. */
static float te__nvfp4_tile_sum(float e[16]) {
    int half, i;
    for (half = 8; half; half /= 2)
        for (i = 0; i < half; i++) e[i] = te__nvfp4_sum(e[i], e[i + half]);
    return e[0];
}
/* Returns the scale of 16 elements (rows = 1) or of a 16 x 16 tile (rows = 16). Row i is block number `block` + i *
 * `stride` of the copy. This number selects the random bytes. */
static uint8_t te__nvfp4_choose(const te__nvfp4_rounding *how, te__nvfp4_tile v, int rows, float amax, uint64_t block,
                                uint64_t stride) {
    float largest = te__nvfp4_largest(v[0], 16 * rows, 0.0f),
          tensor_scale = te__nvfp4_tensor_scale(amax, how->code_max), base, six[16], four[16];
    uint8_t d, stretched;
    int r, i;
    for (i = 0; how->nan && i < 16 * rows; i++)
        if (v[0][i] != v[0][i]) return 0x7f;
    if (!how->four) return te__nvfp4_block_code(largest, tensor_scale);
    base = te__nvfp4_base(largest, tensor_scale);
    d = te__f32_to_e4m3(base);
    stretched = te__f32_to_e4m3(te__mul_f32(base, 1.5f));
    for (r = 0; r < rows; r++) {
        six[r] = te__nvfp4_error(how, v[r], d, amax, block + (uint64_t)r * stride);
        four[r] = te__nvfp4_error(how, v[r], stretched, amax, block + (uint64_t)r * stride);
    }
    if (rows == 1) return four[0] < six[0] ? stretched : d;
    return te__nvfp4_tile_sum(four) < te__nvfp4_tile_sum(six) ? stretched : d;
}

/* The row-wise or the column-wise copy: its codes and scales. It has `rows` rows, and each row has `blocks` blocks of
 * 16 elements. */
typedef struct te__nvfp4_copy {
    uint8_t *q, *scale;
    int64_t rows, cols, bytes, blocks, scale_rows, groups; /* cols: number of columns that hold elements. The
                                                            * transform makes it a multiple of 16 */
    bool swizzled;
    te__nvfp4_rounding how;
} te__nvfp4_copy;

static void te__nvfp4_copy_of(te__nvfp4_copy *c, const te_op_nvfp4_quantize_args *a, te_tensor *q, te_tensor *scale,
                              int64_t rows, int64_t cols) {
    memset(c, 0, sizeof *c);
    c->how.stochastic = a->stochastic_rounding;
    c->how.nan = a->rht && !a->two_dimensional;
    c->how.four = (int)a->four_over_six;
    c->how.code_max = a->e4m3_max_256 ? 256.0f : 448.0f;
    c->how.seed = a->seed;
    c->how.offset = a->offset;
    te__rng_read(te__data(a->rng), &c->how.seed, &c->how.offset);
    c->swizzled = a->swizzled;
    c->blocks = te__div_up(cols, 16);
    if (!q) return;
    c->q = te__u8_data(q);
    c->scale = te__u8_data(scale);
    c->rows = rows;
    c->cols = q == a->col && a->rht ? te__round_up(cols, 16) : cols;
    c->bytes = te__div_up(te__cols(q), 2);
    c->scale_rows = te__round_up(rows, 128);
    c->groups = te__nvfp4_groups(cols);
}
/* Writes the scale and the codes of block (i, j). Codes beyond the edge are not written. Scales of rows beyond the edge
 * become 0. `amax` is the amax of the tensor, of row i, or of a group of rows. */
static void te__nvfp4_put(const te__nvfp4_copy *c, int64_t i, int64_t j, const float v[16], uint8_t d, float amax) {
    uint8_t code[16];
    int64_t b;
    if (i < c->rows && 8 * j < c->bytes) {
        te__nvfp4_codes(&c->how, v, d, te__nvfp4_tensor_scale(amax, c->how.code_max), (uint64_t)(i * c->blocks + j),
                        code);
        /* a NaN scale: elements beyond the edge get 0, not NaN */
        for (b = d == 0x7fu ? te__max(0, c->cols - 16 * j) : 16; b < 16; b++) code[b] = 0;
        for (b = 0; b < 8 && 8 * j + b < c->bytes; b++)
            c->q[i * c->bytes + 8 * j + b] = (uint8_t)(code[2 * b] | code[2 * b + 1] << 4);
    }
    if (i < c->scale_rows && j < c->groups) /* a tile's scale is not repeated beyond the edge */
        c->scale[te__nvfp4_scale_at(i, j, c->groups, c->swizzled)] = i < c->rows ? d : 0;
}
/* Writes the 16 x 16 tile v of a copy at row 16 * strip and column 16 * group. `amax` has one number:
 * - for each row of the copy, with `per_row`;
 * - for each group of rows of x, if by_group->of_row is set;
 * - for all rows otherwise. */
static void te__nvfp4_put_tile(const te__nvfp4_copy *c, int64_t strip, int64_t group, te__nvfp4_tile v,
                               const float *amax, bool per_row, const te__nvfp4_row_groups *by_group, bool turned,
                               bool two) {
    uint8_t d = 0;
    int r;
    if (two)
        d = te__nvfp4_choose(&c->how, v, 16, *amax, (uint64_t)(16 * strip * c->blocks + group), (uint64_t)c->blocks);
    for (r = 0; r < 16; r++) {
        int64_t i = 16 * strip + r;
        float of_row = by_group->of_row         ? amax[te__max(0, te__nvfp4_group(by_group, turned ? 16 * group : i))]
                       : per_row && i < c->rows ? amax[i]
                                                : *amax;
        if (!two) d = te__nvfp4_choose(&c->how, v + r, 1, of_row, (uint64_t)(i * c->blocks + group), 0);
        te__nvfp4_put(c, i, group, v[r], d, of_row);
    }
}

typedef struct te__nvfp4_job {
    const te_op_nvfp4_quantize_args *a;
    te__nvfp4_copy row, col;
    int64_t groups; /* number of groups of 16 columns of x, including the columns with which the row-wise codes and the
                     * scales are padded */
    const float *amax_row, *amax_col;
    bool per_row, per_col;
    te__nvfp4_row_groups by_group;
} te__nvfp4_job;

static void te__nvfp4_strips(void *user, int64_t begin, int64_t end) {
    te__nvfp4_job *j = (te__nvfp4_job *)user;
    const te_op_nvfp4_quantize_args *a = j->a;
    int transform = te__nvfp4_transform(a->rht, a->no_random_sign_mask);
    int64_t strip, group;
    te__nvfp4_tile v, turned;
    for (strip = begin; strip < end; strip++)
        for (group = 0; group < j->groups; group++) {
            te__nvfp4_load(a->x, strip, group, v);
            if (j->row.rows > 0)
                te__nvfp4_put_tile(&j->row, strip, group, v, j->amax_row, j->per_row, &j->by_group, false,
                                   a->two_dimensional);
            if (j->col.rows == 0) continue;
            te__nvfp4_turn(v, transform, turned);
            te__nvfp4_put_tile(&j->col, group, strip, turned, j->amax_col, j->per_col, &j->by_group, true,
                               a->two_dimensional);
        }
}
static te_result te__cpu_nvfp4_quantize(te_ctx *te, const te_op_nvfp4_quantize_args *a) {
    te__nvfp4_job j;
    int64_t m = te__rows(a->x), n = te__cols(a->x), strips;
    if (te__nvfp4_noop(a->noop)) return TE_OK;
    if (a->measure) {
        te_op_nvfp4_amax_args measures = te__nvfp4_measures(a);
        te_result result = te__cpu_nvfp4_amax(te, &measures);
        if (result != TE_OK) return result;
    }
    j.a = a;
    te__nvfp4_copy_of(&j.row, a, a->row, a->row_scale, m, n);
    te__nvfp4_copy_of(&j.col, a, a->col, a->col_scale, n, m);
    j.col.how.offset++;
    j.amax_row = te__f32_data(te__nvfp4_row_amax(a));
    j.amax_col = te__f32_data(te__nvfp4_col_amax(a));
    j.by_group = te__nvfp4_groups_of(a->groups, te__nvfp4_row_amax(a));
    j.per_row = te__nvfp4_is_vector(te__nvfp4_row_amax(a));
    j.per_col = te__nvfp4_is_vector(te__nvfp4_col_amax(a));
    strips = te__div_up(te__round_up(te__max(m, te__cols_of(a->col)), 128), 16);
    j.groups = te__div_up(te__round_up(te__max(n, te__cols_of(a->row)), 128), 16);
    te__parallel_for(te, strips, te__max(1, 64 / te__max(1, j.groups)), te__nvfp4_strips, &j);
    return TE_OK;
}

/* ---- dequantize ---- */

typedef struct te__nvfp4_dequantize_job {
    const te_op_nvfp4_dequantize_args *a;
    int64_t m, n, bytes, groups;
    const float *amax;
    bool per_row;
    te__nvfp4_row_groups by_group;
    float code_max;
} te__nvfp4_dequantize_job;

/* Decodes the 16 values of block (i, j). */
static void te__nvfp4_block_values(const te__nvfp4_dequantize_job *job, int64_t i, int64_t j, float v[16]) {
    const uint8_t *q = te__u8_data(job->a->q) + i * job->bytes,
                  *scale = te__u8_data(job->a->scale);
    int64_t amax = job->by_group.of_row ? te__max(0, te__nvfp4_group(&job->by_group, job->a->columnwise ? 16 * j : i))
                   : job->per_row       ? i
                                        : 0;
    float step = te__nvfp4_decode_step(scale[te__nvfp4_scale_at(i, j, job->groups, job->a->swizzled)], job->amax[amax],
                                       job->code_max);
    int k;
    for (k = 0; k < 16; k++) {
        int64_t at = 8 * j + k / 2;
        v[k] = te__nvfp4_product(te__e2m1_to_f32(at < job->bytes ? (uint8_t)(q[at] >> 4 * (k & 1) & 15) : 0), step);
    }
}
static void te__nvfp4_dequantize_strips(void *user, int64_t begin, int64_t end) {
    const te__nvfp4_dequantize_job *job = (const te__nvfp4_dequantize_job *)user;
    const te_op_nvfp4_dequantize_args *a = job->a;
    int64_t strip, group, r;
    te__nvfp4_tile v, turned;
    int k;
    for (strip = begin; strip < end; strip++)
        for (group = 0; 16 * group < job->n; group++) {
            int64_t rows = te__min(16, job->m - 16 * strip), cols = te__min(16, job->n - 16 * group);
            memset(v, 0, sizeof v);
            for (r = 0; r < (a->columnwise ? cols : rows); r++) {
                if (!a->columnwise) {
                    te__nvfp4_block_values(job, 16 * strip + r, group, v[r]);
                    continue;
                }
                te__nvfp4_block_values(job, 16 * group + r, strip, turned[r]);
                if (a->rht) te__nvfp4_hadamard(turned[r]);
                if (a->rht && !a->no_random_sign_mask) te__nvfp4_flip(turned[r], TE__NVFP4_SIGNS);
                for (k = 0; k < 16; k++) v[k][r] = turned[r][k];
            }
            for (r = 0; r < rows; r++) {
                te__one_nan(v[r], cols);
                te__store_row(te__data(a->y), a->y->dtype, (16 * strip + r) * job->n + 16 * group, cols, v[r]);
            }
        }
}
static te_result te__cpu_nvfp4_dequantize(te_ctx *te, const te_op_nvfp4_dequantize_args *a) {
    te__nvfp4_dequantize_job j;
    j.a = a;
    j.m = te__rows(a->y);
    j.n = te__cols(a->y);
    j.bytes = te__div_up(te__cols(a->q), 2);
    j.groups = te__cols(a->scale);
    j.amax = te__f32_data(a->amax);
    j.per_row = te__nvfp4_is_vector(a->amax);
    j.by_group = te__nvfp4_groups_of(a->groups, a->amax);
    j.code_max = a->e4m3_max_256 ? 256.0f : 448.0f;
    te__parallel_for(te, te__div_up(j.m, 16), te__max(1, 1024 / te__max(1, j.n)), te__nvfp4_dequantize_strips, &j);
    return TE_OK;
}
