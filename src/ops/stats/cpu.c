/* ops/stats/cpu.c: the CPU's reference of the error statistics, with sums in double. The elements are always split into
 * TE__STATS_PARTS parts. So the number of threads does not change the sums. */

enum { TE__STATS_PARTS = 64, TE__STATS_PIECE = 1024 };

typedef struct te__stats_part {
    double xx, yy, xy, dd;
    float largest;
    int64_t count[TE__STATS_COUNTS];
} te__stats_part;

typedef struct te__stats_job {
    const te_op_quant_error_args *a;
    int64_t n;
    te__stats_part part[TE__STATS_PARTS];
} te__stats_job;

static void te__stats_element(te__stats_part *p, float x, float y, float limit) {
    bool finite = fabsf(x) <= FLT_MAX;
    p->count[0] += x != 0.0f && y == 0.0f;
    p->count[1] += finite && fabsf(x) > te__mul_f32(1.004f, limit);
    p->count[2] += x != x;
    p->count[3] += x == x && !finite;
    p->count[4] += x == 0.0f;
    if (finite && fabsf(y) <= FLT_MAX) {
        float d = x - y;
        p->xx += (double)x * (double)x;
        p->yy += (double)y * (double)y;
        p->xy += (double)x * (double)y;
        p->dd += (double)d * (double)d;
        if (fabsf(d) > p->largest) p->largest = fabsf(d);
    }
}
static void te__stats_parts(void *user, int64_t begin, int64_t end) {
    te__stats_job *j = (te__stats_job *)user;
    const te_op_quant_error_args *a = j->a;
    const float *y = te__f32_data(a->y), *limit = te__f32_data(a->limit);
    float x[TE__STATS_PIECE];
    int64_t part, at, i;
    for (part = begin; part < end; part++) {
        int64_t stop = j->n / TE__STATS_PARTS * (part + 1) + (part == TE__STATS_PARTS - 1 ? j->n % TE__STATS_PARTS : 0);
        for (at = j->n / TE__STATS_PARTS * part; at < stop; at += TE__STATS_PIECE) {
            int64_t size = te__min(TE__STATS_PIECE, stop - at);
            te__load_row(te__data(a->x), a->x->dtype, at, size, x);
            for (i = 0; i < size; i++)
                te__stats_element(&j->part[part], x[i], y[at + i], limit ? limit[at + i] : FLT_MAX);
        }
    }
}
static te_result te__cpu_quant_error(te_ctx *te, const te_op_quant_error_args *a) {
    te__stats_job j;
    te__stats_part all;
    float *sums = te__f32_data(a->sums);
    int64_t *counts = (int64_t *)te__data(a->counts);
    int i, c;
    memset(&j, 0, sizeof(j));
    memset(&all, 0, sizeof(all));
    j.a = a;
    j.n = te__numel(a->x);
    te__parallel_for(te, TE__STATS_PARTS, te__max(1, TE__STATS_PARTS * 16384 / te__max(1, j.n)), te__stats_parts, &j);
    for (i = 0; i < TE__STATS_PARTS; i++) {
        const te__stats_part *p = &j.part[i];
        all.xx += p->xx;
        all.yy += p->yy;
        all.xy += p->xy;
        all.dd += p->dd;
        if (p->largest > all.largest) all.largest = p->largest;
        for (c = 0; c < TE__STATS_COUNTS; c++) all.count[c] += p->count[c];
    }
    counts[0] = j.n;
    for (c = 0; c < TE__STATS_COUNTS; c++) counts[1 + c] = all.count[c];
    sums[0] = (float)all.xx;
    sums[1] = (float)all.yy;
    sums[2] = (float)all.xy;
    sums[3] = (float)all.dd;
    sums[4] = all.largest;
    return TE_OK;
}
