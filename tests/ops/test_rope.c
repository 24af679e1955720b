/* test_rope.c: rotary embedding and the split of packed projections: the formula in float64, there and back, the GPU against the CPU. */
#include "../te_test.h"

typedef struct rope_case {
    int64_t s, b, heads, groups, d; /* groups 0: te_op_rope; else te_op_qkv_rope and its backward */
    int rotary_dim;                 /* 0: d */
    te_dtype dtype;
    te_qkv_format format;
    bool interleaved, interleaved_groups, no_rope, backward, has_start;
    int positions;                  /* 1: i32 [s], 2: i64 [b, s] */
    int cp_size, cp_rank;
    bool given;                     /* frequencies, and a factor of cosine and sine */
    int freqs;                      /* a table of angles, 1: of all sequences, 2: of each */
    float base, position_scale;
    int64_t offset, pad; /* pad: channels between the heads of x and y, or of q, k and v */
} rope_case;

static void name_case(const rope_case *c) {
    test_case("%s %s s=%lld b=%lld heads=%lld/%lld d=%lld rotary=%d%s%s%s%s%s positions=%d freqs=%d cp=%d/%d scale=%g offset=%lld pad=%lld", te_dtype_name(c->dtype),
              c->format == TE_BSHD ? "bshd" : "sbhd", (long long)c->s, (long long)c->b, (long long)c->heads, (long long)c->groups, (long long)c->d,
              c->rotary_dim, c->interleaved ? " interleaved" : "", c->interleaved_groups ? " interleaved_groups" : "", c->no_rope ? " no_rope" : "",
              c->backward ? " backward" : "", c->given ? " given" : "", c->positions, c->freqs, c->cp_rank, c->cp_size, (double)c->position_scale, (long long)c->offset, (long long)c->pad);
}

static int64_t starts[] = {7, 0, 1000, 3};

/* ---- float64 ---- */

/* Frequencies that no base has, and positions that no place has. */
static float given_frequency(int i) { return 0.7f / (float)(1 + i * i); }
static const float given_attention_factor = 1.25f;
static int64_t given_position(const rope_case *c, int64_t t, int64_t b) { return (t * 37 + (c->positions == 2 ? b * 11 : 0)) % 101; }

static int64_t position_of(const rope_case *c, int64_t t, int64_t b) {
    int64_t at = t, half = c->s / 2;
    if (c->positions) at = given_position(c, t, b);
    else if (c->cp_size > 1) at = t < half ? c->cp_rank * half + t : (2 * c->cp_size - 1 - c->cp_rank) * half + t - half;
    return at + c->offset + (c->has_start ? starts[b] : 0);
}

/* Angles of a table: no two channels of a pair have one. */
static float table_angle(const rope_case *c, int64_t position, int64_t b, int channel) { return (float)((position * 37 + (c->freqs == 2 ? b * 11 : 0) + channel * 5) % 97) * 0.13f; }

/* One head at position t of sequence b. The angle is what the documentation says: a product of f32 numbers; all else is exact. */
static void reference_head(const rope_case *c, const float *x, int64_t t, int64_t b, float *y) {
    int dim = c->rotary_dim ? c->rotary_dim : (int)c->d, half = dim / 2;
    float position = (float)position_of(c, t, b) * (c->position_scale != 0 ? c->position_scale : 1);
    memcpy(y, x, (size_t)c->d * 4);
    if (c->no_rope) return;
    for (int i = 0; i < half; i++) {
        float frequency = c->given ? given_frequency(i) : (float)pow(c->base != 0 ? c->base : 10000, -2.0 * i / dim), angle = position * frequency;
        double cosine = cos((double)angle), sine = c->backward ? -sin((double)angle) : sin((double)angle);
        int u = c->interleaved ? 2 * i : i, v = c->interleaved ? 2 * i + 1 : i + half;
        double cosine_v = cosine, sine_u = sine, sine_v = sine; /* sine_u: of what u takes from v */
        if (c->freqs) {
            double of_u = (double)table_angle(c, position_of(c, t, b), b, u), of_v = (double)table_angle(c, position_of(c, t, b), b, v);
            cosine = cos(of_u), cosine_v = cos(of_v);
            sine_u = c->backward ? -sin(of_v) : sin(of_u), sine_v = c->backward ? -sin(of_u) : sin(of_v);
        }
        if (c->given) cosine *= given_attention_factor, cosine_v *= given_attention_factor, sine_u *= given_attention_factor, sine_v *= given_attention_factor;
        y[u] = (float)(x[u] * cosine - x[v] * sine_u);
        y[v] = (float)(x[v] * cosine_v + x[u] * sine_v);
    }
}

/* One rounding to a format, and the neighbour where f32 and float64 round differently. */
static double rtol_of(te_dtype dtype) { return dtype == TE_F32 ? 1e-6 : dtype == TE_F16 ? 1e-3 : 8e-3; }

/* ---- te_op_rope ---- */

static int64_t token_of(const rope_case *c, int64_t t, int64_t b) { return c->format == TE_BSHD ? b * c->s + t : t * c->b + b; }
static void heads_shape(const rope_case *c, int64_t heads, int64_t d, int64_t shape[4]) {
    shape[0] = c->format == TE_BSHD ? c->b : c->s;
    shape[1] = c->format == TE_BSHD ? c->s : c->b;
    shape[2] = heads;
    shape[3] = d;
}
/* values [tokens, heads, d] as a tensor with pad channels of NaN between the heads; NULL: an output. */
static te_tensor *heads_tensor(te_ctx *te, const rope_case *c, int64_t heads, const float *values, te_tensor **whole) {
    int64_t shape[4], ld = c->d + c->pad;
    heads_shape(c, heads, ld, shape);
    if (values) {
        int64_t rows = c->s * c->b * heads;
        float *memory = test_floats(rows * ld);
        for (int64_t i = 0; i < rows * ld; i++) memory[i] = i % ld < c->d ? values[i / ld * c->d + i % ld] : NAN;
        *whole = test_tensor(te, c->dtype, 4, shape, memory);
    } else {
        *whole = test_guarded(te, c->dtype, 4, shape);
    }
    return c->pad ? te_tensor_narrow(*whole, 3, 0, c->d) : *whole;
}
static float *heads_read(const rope_case *c, int64_t heads, te_tensor *whole) {
    int64_t rows = c->s * c->b * heads, ld = c->d + c->pad;
    float *memory = test_read(whole), *values = test_floats(rows * c->d);
    for (int64_t i = 0; i < rows * ld; i++) {
        if (i % ld < c->d)
            values[i / ld * c->d + i % ld] = memory[i];
        else
            CHECK(isnan(memory[i]));
    }
    return values;
}
static te_tensor *start_tensor(te_ctx *te, const rope_case *c) { return c->has_start ? test_i32(te, SHAPE(c->b), starts) : NULL; }

/* With a row for each position. */
static te_tensor *table_of(te_ctx *te, const rope_case *c) {
    int64_t rows = c->offset + c->s * (c->cp_size ? c->cp_size : 1), dim = c->rotary_dim ? c->rotary_dim : c->d, of = c->freqs == 2 ? c->b : 1, shape[4];
    for (int64_t t = 0; t < c->s; t++)
        for (int64_t b = 0; b < c->b; b++) rows = position_of(c, t, b) >= rows ? position_of(c, t, b) + 1 : rows;
    float *values = test_floats(rows * of * dim);
    for (int64_t i = 0; i < rows * of * dim; i++) values[i] = table_angle(c, i / dim / of, i / dim % of, (int)(i % dim));
    shape[0] = rows, shape[1] = of, shape[2] = 1, shape[3] = dim;
    return test_tensor(te, TE_F32, 4, shape, values);
}

static te_rope_angles angles_of(te_ctx *te, const rope_case *c) {
    te_rope_angles a = {0};
    a.base = c->base;
    a.rotary_dim = c->rotary_dim;
    a.interleaved = c->interleaved;
    a.position_scale = c->position_scale;
    a.position_offset = c->offset;
    a.start_positions = start_tensor(te, c);
    a.cp_size = c->cp_size;
    a.cp_rank = c->cp_rank;
    if (c->given && c->freqs) a.attention_factor = given_attention_factor;
    if (c->freqs) a.freqs = table_of(te, c);
    if (c->given && !c->freqs) {
        int half = (c->rotary_dim ? c->rotary_dim : (int)c->d) / 2;
        float *frequencies = test_floats(half);
        for (int i = 0; i < half; i++) frequencies[i] = given_frequency(i);
        a.inv_freq = frequencies;
        a.attention_factor = given_attention_factor;
    }
    if (c->positions) {
        int64_t rows = c->positions == 2 ? c->b : 1, shape[2] = {rows, c->s}, values[4 * 256];
        for (int64_t b = 0; b < rows; b++)
            for (int64_t t = 0; t < c->s; t++) values[b * c->s + t] = given_position(c, t, b);
        a.positions = c->positions == 2 ? te_tensor_from_host(te, TE_I64, 2, shape, values) : test_i32(te, 1, &c->s, values);
    }
    return a;
}

static float *run_rope(te_ctx *te, const rope_case *c, const float *x) {
    te_tensor *whole;
    te_op_rope_args a = {0};
    a.x = heads_tensor(te, c, c->heads, x, &whole);
    a.y = heads_tensor(te, c, c->heads, NULL, &whole);
    a.format = c->format;
    a.angles = angles_of(te, c);
    a.backward = c->backward;
    te_op_rope(te, &a);
    CHECK_OK(te);
    return heads_read(c, c->heads, whole);
}

static void check_rope(te_ctx *te, rope_case c) {
    int64_t n = c.s * c.b * c.heads * c.d;
    name_case(&c);
    float *x = test_rounded(c.dtype, test_normal(n, 1), n), *want = test_floats(n);
    for (int64_t t = 0; t < c.s; t++)
        for (int64_t b = 0; b < c.b; b++)
            for (int64_t h = 0; h < c.heads; h++) {
                int64_t at = (token_of(&c, t, b) * c.heads + h) * c.d;
                reference_head(&c, x + at, t, b, want + at);
            }
    float *got = run_rope(te, &c, x);
    CHECK_CLOSE("y", got, want, n, rtol_of(c.dtype), 1e-6);
    te_ctx *cpu = test_cpu_beside(te);
    if (cpu) CHECK_CLOSE("y against the CPU", got, run_rope(cpu, &c, x), n, rtol_of(c.dtype), 1e-6);
}

static const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16};

TE_TEST_DEVICES(rope) {
    int n = 0;
    static const int64_t sizes[][5] = {/* s, b, heads, d, rotary_dim */
                                       {5, 2, 3, 64, 0}, {1, 1, 1, 2, 0}, {17, 1, 2, 128, 64}, {3, 4, 2, 33, 10}, {130, 2, 4, 32, 32},
                                       {2, 2, 1, 48, 40}, {2, 1, 1, 1024, 0}, {2, 1, 1, 3000, 16}, {0, 2, 2, 8, 0}, {4, 0, 2, 8, 0},
                                       {3, 1, 128, 128, 0}, {2, 2, 64, 33, 10}}; /* more than two units of work a thread */
    for (int f = 0; f < COUNT(formats); f++)
        for (int i = 0; i < COUNT(sizes); i++)
            for (int k = 0; k < 4; k++) {
                rope_case c = {0};
                if (n++ % test_every_odd(3)) continue;
                c.s = sizes[i][0];
                c.b = sizes[i][1];
                c.heads = sizes[i][2];
                c.d = sizes[i][3];
                c.rotary_dim = (int)sizes[i][4];
                c.dtype = formats[f];
                c.interleaved = k & 1;
                c.format = k & 2 ? TE_BSHD : TE_SBHD;
                c.backward = i % 2;
                c.has_start = k == 1 && c.b;
                c.given = k == 2;
                c.positions = c.s && c.b && i % 4 == 1 ? 1 + k % 2 : 0;
                if (i % 4 == 2 && k & 1) c.s *= 2, c.cp_size = 2 + k / 2, c.cp_rank = k / 2; /* an even number of tokens */
                c.pad = i % 3 == 0 ? 8 : i % 3 == 1 ? 3 : 0;
                c.base = k == 3 ? 500000.0f : 0;
                check_rope(te, c);
                c.base = 0;
                c.freqs = 1 + (i + k) % 2;
                check_rope(te, c);
            }
}

/* A million positions on, both devices still turn by the same f32 angle. */
TE_TEST_DEVICES(rope_far_positions) {
    static const int64_t offsets[] = {100000, 999990, (int64_t)1 << 24};
    for (int i = 0; i < COUNT(offsets); i++)
        for (int k = 0; k < 2; k++) {
            rope_case c = {0};
            c.s = 20;
            c.b = 1;
            c.heads = 2;
            c.d = 64;
            c.dtype = TE_F32;
            c.interleaved = k;
            c.offset = offsets[i];
            c.position_scale = k ? 0.25f : 0;
            check_rope(te, c);
        }
}

/* Turned there and back; in place. */
TE_TEST_DEVICES(rope_in_place) {
    enum { N = 6 * 2 * 4 * 64 };
    float *x = test_normal(N, 3);
    for (int k = 0; k < 2; k++) {
        te_op_rope_args a = {0};
        a.x = a.y = test_tensor(te, TE_F32, SHAPE(6, 2, 4, 64), x);
        a.angles.interleaved = k;
        a.angles.position_offset = 11;
        te_op_rope(te, &a);
        float *turned = test_read(a.x);
        double moved = 0;
        for (int i = 0; i < N; i++) moved += fabs(turned[i] - x[i]);
        CHECK(moved > N / 10.0);
        a.backward = true;
        te_op_rope(te, &a);
        CHECK_OK(te);
        CHECK_TENSOR(a.x, x, 1e-5, 2e-6);
    }
}

/* Of sequences behind each other, the two chunks of each that a rank has turn as they do within the whole sequences. */
TE_TEST_DEVICES(rope_chunks_of_packed_sequences) {
    enum { RANKS = 2, TOKENS = 20, H = 3, D = 8, ROW = H * D, PART = TOKENS / RANKS };
    static const int64_t cu[3] = {0, 8, 20};
    float *x = test_normal(TOKENS * ROW, 5);
    te_op_rope_args a = {.format = TE_THD, .cu_seqlens = test_i32(te, SHAPE(3), cu)};
    a.x = test_tensor(te, TE_F32, SHAPE(TOKENS, H, D), x);
    te_tensor *y = test_guarded(te, TE_F32, SHAPE(TOKENS, H, D));
    a.y = y;
    te_op_rope(te, &a);
    CHECK_OK(te);
    float *whole = test_read(y), part[PART * ROW], want[PART * ROW];
    CHECK_BYTES("the second sequence begins anew", whole + cu[1] * ROW, x + cu[1] * ROW, ROW * sizeof(float)); /* an angle of 0 */
    for (int rank = 0; rank < RANKS; rank++) {
        int n = 0;
        for (int b = 0; b < 2; b++)
            for (int chunk = 0; chunk < 2; chunk++) {
                int64_t size = (cu[b + 1] - cu[b]) / (2 * RANKS), from = cu[b] + (chunk ? 2 * RANKS - 1 - rank : rank) * size;
                memcpy(part + n * ROW, x + from * ROW, (size_t)(size * ROW) * sizeof(float));
                memcpy(want + n * ROW, whole + from * ROW, (size_t)(size * ROW) * sizeof(float));
                n += (int)size;
            }
        a.x = test_tensor(te, TE_F32, SHAPE(PART, H, D), part);
        a.y = test_guarded(te, TE_F32, SHAPE(PART, H, D));
        a.angles.cp_size = RANKS;
        a.angles.cp_rank = rank;
        te_op_rope(te, &a);
        CHECK_OK(te);
        CHECK_BYTES("chunks", test_read(a.y), want, sizeof part);
    }
}

/* ---- te_op_qkv_rope ---- */

typedef struct qkv {
    float *packed, *q, *k, *v;
} qkv;

/* Forward: q, k, v from packed; backward: packed from q, k, v. */
static qkv run_qkv(te_ctx *te, const rope_case *c, const qkv *in) {
    qkv out = *in;
    te_tensor *whole[3], *packed;
    te_op_qkv_rope_args a = {0};
    te_op_qkv_rope_bwd_args r = {0};
    int64_t shape[4], width = (c->heads + 2 * c->groups) * c->d;
    heads_shape(c, width, 0, shape);
    packed = c->backward ? test_guarded(te, c->dtype, 3, shape) : test_tensor(te, c->dtype, 3, shape, in->packed);
    a.qkv = r.qkv = packed;
    r.q = a.q = heads_tensor(te, c, c->heads, c->backward ? in->q : NULL, &whole[0]);
    r.k = a.k = heads_tensor(te, c, c->groups, c->backward ? in->k : NULL, &whole[1]);
    r.v = a.v = heads_tensor(te, c, c->groups, c->backward ? in->v : NULL, &whole[2]);
    r.format = a.format = c->format;
    r.num_heads = a.num_heads = (int)c->heads;
    r.num_groups = a.num_groups = (int)c->groups;
    r.head_dim = a.head_dim = (int)c->d;
    r.interleaved_groups = a.interleaved_groups = c->interleaved_groups;
    r.no_rope = a.no_rope = c->no_rope;
    r.angles = a.angles = angles_of(te, c);
    if (c->backward)
        te_op_qkv_rope_bwd(te, &r);
    else
        te_op_qkv_rope(te, &a);
    CHECK_OK(te);
    if (c->backward) {
        out.packed = test_read(packed);
    } else {
        out.q = heads_read(c, c->heads, whole[0]);
        out.k = heads_read(c, c->groups, whole[1]);
        out.v = heads_read(c, c->groups, whole[2]);
    }
    return out;
}

static void compare_qkv(const rope_case *c, const qkv *got, const qkv *want) {
    int64_t tokens = c->s * c->b, kv = tokens * c->groups * c->d;
    double rtol = rtol_of(c->dtype);
    if (c->backward) {
        CHECK_CLOSE("qkv", got->packed, want->packed, tokens * (c->heads + 2 * c->groups) * c->d, rtol, 1e-6);
        return;
    }
    CHECK_CLOSE("q", got->q, want->q, tokens * c->heads * c->d, rtol, 1e-6);
    CHECK_CLOSE("k", got->k, want->k, kv, rtol, 1e-6);
    CHECK_CLOSE("v", got->v, want->v, kv, 0, 0);
}

/* `rotated`, in memory of its own and in that of qkv, has the bits of q, k and v where each lies in the projection. */
static void check_rotated(te_ctx *te, const rope_case *c, const qkv *apart) {
    const int64_t tokens = c->s * c->b, all = c->heads + 2 * c->groups, per_group = c->heads / c->groups, n = tokens * all * c->d;
    float *packed = test_floats(n);
    int64_t shape[4];
    heads_shape(c, all * c->d, 0, shape);
    for (int64_t token = 0; token < tokens; token++)
        for (int part = 0; part < 3; part++)
            for (int64_t h = 0; h < (part == 0 ? c->heads : c->groups); h++) {
                const int64_t heads = part == 0 ? c->heads : c->groups;
                const float *one = part == 0 ? apart->q : part == 1 ? apart->k : apart->v;
                const int64_t grouped = part == 0 ? h / per_group * (per_group + 2) + h % per_group : h * (per_group + 2) + per_group + part - 1;
                const int64_t place = c->interleaved_groups ? grouped : part == 0 ? h : c->heads + (part - 1) * c->groups + h;
                memcpy(packed + (token * all + place) * c->d, one + (token * heads + h) * c->d, (size_t)c->d * sizeof(float));
            }
    for (int in_place = 0; in_place < 2; in_place++) { /* forward: packed is what is to come out; backward: what goes in */
        te_tensor *x = test_tensor(te, c->dtype, 3, shape, c->backward ? packed : apart->packed), *y = in_place ? x : test_guarded(te, c->dtype, 3, shape);
        te_op_qkv_rope_args a = {.qkv = x, .rotated = y, .format = c->format, .num_heads = (int)c->heads, .num_groups = (int)c->groups, .head_dim = (int)c->d,
                                 .interleaved_groups = c->interleaved_groups, .no_rope = c->no_rope, .angles = angles_of(te, c)};
        te_op_qkv_rope_bwd_args r = {.qkv = y, .rotated = x, .format = c->format, .num_heads = (int)c->heads, .num_groups = (int)c->groups, .head_dim = (int)c->d,
                                     .interleaved_groups = c->interleaved_groups, .no_rope = c->no_rope, .angles = a.angles};
        if (c->backward)
            te_op_qkv_rope_bwd(te, &r);
        else
            te_op_qkv_rope(te, &a);
        CHECK_OK(te);
        CHECK_BYTES(in_place ? "in place" : "rotated", test_read(y), c->backward ? apart->packed : packed, (size_t)n * sizeof(float));
    }
}

static void check_qkv(te_ctx *te, rope_case c) {
    int64_t tokens = c.s * c.b, all = c.heads + 2 * c.groups, per_group = c.heads / c.groups;
    qkv in, want;
    name_case(&c);
    in.packed = test_rounded(c.dtype, test_normal(tokens * all * c.d, 1), tokens * all * c.d);
    in.q = test_rounded(c.dtype, test_normal(tokens * c.heads * c.d, 2), tokens * c.heads * c.d);
    in.k = test_rounded(c.dtype, test_normal(tokens * c.groups * c.d, 3), tokens * c.groups * c.d);
    in.v = test_rounded(c.dtype, test_normal(tokens * c.groups * c.d, 4), tokens * c.groups * c.d);
    want.packed = test_floats(tokens * all * c.d);
    want.q = test_floats(tokens * c.heads * c.d);
    want.k = test_floats(tokens * c.groups * c.d);
    want.v = test_floats(tokens * c.groups * c.d);
    for (int64_t t = 0; t < c.s; t++)
        for (int64_t b = 0; b < c.b; b++)
            for (int part = 0; part < 3; part++)
                for (int64_t h = 0; h < (part == 0 ? c.heads : c.groups); h++) {
                    int64_t token = token_of(&c, t, b), heads = part == 0 ? c.heads : c.groups, place;
                    float *one_in = part == 0 ? in.q : part == 1 ? in.k : in.v, *one_want = part == 0 ? want.q : part == 1 ? want.k : want.v;
                    rope_case turn = c;
                    turn.no_rope = c.no_rope || part == 2;
                    /* rows [groups, (queries of the group, k, v), d], or all of q, all of k, all of v */
                    if (c.interleaved_groups)
                        place = part == 0 ? h / per_group * (per_group + 2) + h % per_group : h * (per_group + 2) + per_group + part - 1;
                    else
                        place = part == 0 ? h : c.heads + (part - 1) * c.groups + h;
                    float *p_in = in.packed + (token * all + place) * c.d, *p_want = want.packed + (token * all + place) * c.d;
                    if (c.backward)
                        reference_head(&turn, one_in + (token * heads + h) * c.d, t, b, p_want);
                    else
                        reference_head(&turn, p_in, t, b, one_want + (token * heads + h) * c.d);
                }
    qkv got = run_qkv(te, &c, &in);
    compare_qkv(&c, &got, &want);
    qkv apart = got; /* and the other side */
    if (c.backward) apart.q = in.q, apart.k = in.k, apart.v = in.v;
    else apart.packed = in.packed;
    check_rotated(te, &c, &apart);
    te_ctx *cpu = test_cpu_beside(te);
    if (!cpu) return;
    qkv other = run_qkv(cpu, &c, &in);
    compare_qkv(&c, &got, &other);
}

TE_TEST_DEVICES(qkv_rope) {
    int n = 0;
    static const int64_t sizes[][6] = {/* s, b, heads, groups, d, rotary_dim */
                                       {5, 2, 4, 2, 64, 0}, {9, 1, 2, 2, 32, 16}, {3, 3, 6, 1, 128, 128}, {4, 2, 3, 3, 10, 6}, {70, 1, 4, 2, 16, 0}, {0, 2, 2, 1, 8, 0}};
    for (int f = 0; f < COUNT(formats); f++)
        for (int i = 0; i < COUNT(sizes); i++)
            for (int k = 0; k < 16; k++) {
                rope_case c = {0};
                if (n++ % test_every_odd(8)) continue;
                c.s = sizes[i][0];
                c.b = sizes[i][1];
                c.heads = sizes[i][2];
                c.groups = sizes[i][3];
                c.d = sizes[i][4];
                c.rotary_dim = (int)sizes[i][5];
                c.dtype = formats[f];
                c.backward = k & 1;
                c.interleaved_groups = k & 2;
                c.interleaved = k & 4;
                c.format = k & 8 ? TE_BSHD : TE_SBHD;
                c.no_rope = (i + k) % 5 == 4;
                c.has_start = k % 3 == 1;
                c.given = k % 5 == 2;
                c.positions = c.s && k % 4 == 3 ? 1 + i % 2 : 0;
                if (k % 4 == 2) c.s *= 2, c.cp_size = 4, c.cp_rank = i % 4;
                c.pad = k % 3 == 2 ? 8 : 0;
                c.offset = k;
                check_qkv(te, c);
                c.freqs = 1 + (i + k) % 2;
                check_qkv(te, c);
            }
}

/* Packed sequences: each has the very bits that it has by itself, whatever the others are. */
TE_TEST_DEVICES(rope_of_packed_sequences) {
    enum { SEQUENCES = 4, TOKENS = 75, HEADS = 3 };
    static const int64_t at[SEQUENCES + 1] = {0, 9, 9, 70, 74}; /* one is empty, and a row lies behind all */
    for (int n = 0; n < 3 * 2 * 2 * 2; n++) {
        const te_dtype dtype = n % 3 == 0 ? TE_F32 : n % 3 == 1 ? TE_BF16 : TE_F16;
        const int64_t d = n / 3 % 2 ? 64 : 10;
        const bool has_start = n / 6 % 2, backward = n / 12;
        float *x = test_normal(TOKENS * HEADS * d, 4), *got;
        test_case("%s d=%lld%s%s", te_dtype_name(dtype), (long long)d, has_start ? " start" : "", backward ? " backward" : "");
        te_op_rope_args a = {.x = test_tensor(te, dtype, SHAPE(TOKENS, HEADS, d), x), .y = test_guarded(te, dtype, SHAPE(TOKENS, HEADS, d)), .format = TE_THD, .angles.base = 300,
                             .angles.position_offset = 2, .angles.position_scale = 0.5f, .backward = backward};
        a.cu_seqlens = test_i32(te, SHAPE(SEQUENCES + 1), at);
        if (has_start) a.angles.start_positions = test_i32(te, SHAPE(SEQUENCES), starts);
        te_op_rope(te, &a);
        REQUIRE_OK(te);
        got = test_read(a.y);
        for (int b = 0; b < SEQUENCES; b++) {
            const int64_t rows = at[b + 1] - at[b];
            te_op_rope_args one = a;
            if (!rows) continue;
            one.format = TE_SBHD, one.cu_seqlens = NULL;
            one.x = test_tensor(te, dtype, SHAPE(rows, 1, HEADS, d), x + at[b] * HEADS * d);
            one.y = te_tensor_empty(te, dtype, SHAPE(rows, 1, HEADS, d));
            if (has_start) one.angles.start_positions = test_i32(te, SHAPE(1), starts + b);
            te_op_rope(te, &one);
            REQUIRE_OK(te);
            CHECK_BYTES("y", got + at[b] * HEADS * d, test_read(one.y), (size_t)(rows * HEADS * d) * sizeof(float));
        }
    }
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 3, 8));
    te_op_rope_args a = {.x = x, .y = te_tensor_zeros(te, TE_F32, SHAPE(4, 3, 8)), .format = TE_THD};
    te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "format is 2 and cu_seqlens NULL");
    a.cu_seqlens = te_tensor_zeros(te, TE_I32, SHAPE(1)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "cu_seqlens has 1 elements");
    a.format = TE_SBHD, a.x = te_tensor_zeros(te, TE_F32, SHAPE(4, 1, 3, 8)), a.y = te_tensor_zeros(te, TE_F32, SHAPE(4, 1, 3, 8)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "format is 0 and cu_seqlens given");
}

TE_TEST_DEVICES(rope_refuses) {
    te_op_rope_args good, a;
    te_op_qkv_rope_args q = {0};
    memset(&good, 0, sizeof good);
    good.x = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 3, 8));
    good.y = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 3, 8));
    a = good, a.angles.rotary_dim = 10, te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "10 of 8 channels");
    a = good, a.angles.rotary_dim = 3, te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "3 of 8 channels");
    a = good, a.y = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 3, 9)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "y is [4, 2, 3, 9]");
    a = good, a.angles.start_positions = te_tensor_zeros(te, TE_I32, SHAPE(4)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "start_positions");
    a = good, a.angles.start_positions = te_tensor_zeros(te, TE_I64, SHAPE(2)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "start_positions is i64");
    a = good, a.x = NULL, te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "x is NULL");
    a = good, a.angles.base = -1, te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "base is -1");
    a = good, a.angles.cp_size = 2, a.angles.cp_rank = 2, te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "cp_rank is 2 and cp_size 2");
    a = good, a.angles.cp_size = 2, a.angles.positions = te_tensor_zeros(te, TE_I32, SHAPE(4)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "positions are given, and cp_size is 2");
    a = good, a.format = TE_BSHD, a.angles.cp_size = 2, a.x = a.y = te_tensor_zeros(te, TE_F32, SHAPE(4, 3, 3, 8)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "the sequence has 3 tokens and cp_size is 2");
    a = good, a.angles.positions = te_tensor_zeros(te, TE_I32, SHAPE(3)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "positions has 3 elements; [4], or as many for each of 2 sequences");
    a = good, a.angles.positions = te_tensor_zeros(te, TE_F32, SHAPE(4)), te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "positions is f32");

    q.qkv = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 64));
    q.q = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 4, 8));
    q.k = q.v = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 2, 8));
    q.num_heads = 4;
    q.num_groups = 3;
    q.head_dim = 8;
    te_op_qkv_rope(te, &q);
    CHECK_ERROR(te, TE_ERR_INVALID, "4 heads in 3 groups");
    q.num_groups = 1;
    te_op_qkv_rope(te, &q);
    CHECK_ERROR(te, TE_ERR_SHAPE, "k is [4, 2, 2, 8]; with 4 heads in 1 groups it must be [4, 2, 1, 8]");
    q.num_groups = 2;
    q.qkv = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 63));
    te_op_qkv_rope(te, &q);
    CHECK_ERROR(te, TE_ERR_SHAPE, "qkv must be [8, 64]");
    q.qkv = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 64)), q.no_rope = true, q.format = TE_THD; /* no rotation needs one, but the order of tokens does */
    te_op_qkv_rope(te, &q);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "qkv_rope: format is 2 (TE_THD)");
    te_op_qkv_rope_bwd_args b = {.qkv = (te_tensor *)q.qkv, .q = q.q, .k = q.k, .v = q.v, .format = (te_qkv_format)7, .num_heads = 4, .num_groups = 2, .head_dim = 8, .no_rope = true};
    te_op_qkv_rope_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_INVALID, "qkv_rope_bwd: format is 7; TE_SBHD (0) and TE_BSHD (1)");
    q.format = TE_SBHD, q.rotated = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 64));
    te_op_qkv_rope(te, &q);
    CHECK_ERROR(te, TE_ERR_INVALID, "qkv_rope: q and rotated are given");
    q.q = q.k = q.v = NULL, q.rotated = te_tensor_zeros(te, TE_F32, SHAPE(2, 4, 64));
    te_op_qkv_rope(te, &q);
    CHECK_ERROR(te, TE_ERR_SHAPE, "qkv_rope: rotated is [2, 4, 64] and qkv is [4, 2, 64]");
    q.qkv = te_tensor_zeros(te, TE_F32, SHAPE(8, 64)), q.rotated = te_tensor_zeros(te, TE_F32, SHAPE(8, 64));
    te_op_qkv_rope(te, &q);
    CHECK_ERROR(te, TE_ERR_SHAPE, "qkv_rope: qkv is [8, 64]; [s, b, (H + 2G) * d] is needed with rotated");
    q.rotated = NULL;
    te_op_qkv_rope(te, &q);
    CHECK_ERROR(te, TE_ERR_STATE, "qkv_rope: q is NULL");
    a = good, a.angles.cp_size = 1 << 30, te_op_rope(te, &a);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "cp_size is 1073741824; at most 1048576");
}

/* A graph's calls come later than the memory that their frequencies were read from: of a program here, of the stack in te_apply_rotary_pos_emb. */
static void wipe_stack(void) {
    volatile float gone[8192];
    for (int i = 0; i < COUNT(gone); i++) gone[i] = 77;
}
TE_TEST_DEVICES(rope_in_a_graph_keeps_its_frequencies) {
    enum { S = 5, D = 8 };
    const te_rotary_desc linear = {.scaling = {.type = TE_ROPE_LINEAR, .factor = 4}};
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(S, 1, 1, D), test_normal(S * D, 1)), *qkv = test_tensor(te, TE_F32, SHAPE(S, 1, 3 * D), test_normal(S * 3 * D, 2)), *scaled = NULL;
    te_tensor *y[2][6];
    for (int run = 0; run < 2; run++) {
        float freq[D / 2] = {1, 0.5f, 0.25f, 0.125f};
        te_graph *g = NULL;
        for (int i = 0; i < 5; i++) y[run][i] = te_tensor_zeros(te, TE_F32, SHAPE(S, 1, i == 4 ? 3 : 1, D));
        y[run][5] = te_tensor_zeros(te, TE_F32, SHAPE(S, 1, 1, D));
        te_op_rope_args a = {.x = x, .y = y[run][0], .angles.inv_freq = freq};
        te_op_qkv_rope_args q = {.qkv = qkv, .q = y[run][1], .k = y[run][2], .v = y[run][3], .num_heads = 1, .num_groups = 1, .head_dim = D, .angles.inv_freq = freq};
        te_op_qkv_rope_bwd_args b = {.qkv = te_tensor_view(y[run][4], 3, (const int64_t[]){S, 1, 3 * D}), .q = x, .k = x, .v = x, .num_heads = 1, .num_groups = 1, .head_dim = D,
                                     .angles.inv_freq = freq};
        if (run) REQUIRE(te_graph_begin(te) == TE_OK);
        te_op_rope(te, &a);
        te_op_qkv_rope(te, &q);
        te_op_qkv_rope_bwd(te, &b);
        scaled = te_apply_rotary_pos_emb(x, &linear, TE_SBHD);
        te_tensor_copy(y[run][5], scaled);
        if (run) {
            g = te_graph_end(te);
            REQUIRE(g != NULL);
            for (int i = 0; i < COUNT(freq); i++) freq[i] = 77;
            wipe_stack();
            CHECK_EQ_INT(te_graph_launch(g), TE_OK);
        }
        REQUIRE_OK(te);
        for (int i = 0; run && i < 6; i++) CHECK_BYTES("by a graph", test_read(y[1][i]), test_read(y[0][i]), te_tensor_bytes(y[0][i]));
        te_graph_destroy(g);
    }
}

/* Keys and values that go from the projection into rows of a cache have the bits of a split, a rotation and a copy; rows of no token stay as they are. */
TE_TEST_DEVICES(rope_into_cache) {
    static const struct {
        int64_t s, b;
        int heads, groups, d, rotary;
        bool bshd, grouped, paged;
        te_dtype dtype;
    } cases[] = {{1, 3, 8, 2, 64, 64, true, true, true, TE_BF16}, {1, 1, 4, 4, 128, 128, true, false, false, TE_BF16}, {5, 2, 6, 3, 40, 16, false, true, true, TE_F16},
                 {2, 4, 4, 1, 24, 24, true, false, true, TE_F32}, {3, 2, 2, 2, 10, 6, false, false, false, TE_BF16}};
    for (int n = 0; n < 2 * COUNT(cases); n++) {
        const int i = n / 2;
        const bool codes = n % 2; /* caches in E4M3 */
        const te_dtype kept = codes ? TE_F8E4M3 : cases[i].dtype;
        const int64_t s = cases[i].s, b = cases[i].b, pages = cases[i].paged ? 3 * b : b, size = cases[i].paged ? 4 : 12, width = (cases[i].heads + 2 * cases[i].groups) * (int64_t)cases[i].d;
        const bool bshd = cases[i].bshd;
        int32_t cu[8] = {0}, starts[8], table[32];
        te_op_qkv_rope_args two = {0}, one;
        te_op_copy_to_kv_cache_args copy = {0};
        test_case("case %d%s", i, codes ? " in e4m3" : "");
        te_scope_begin(te);
        for (int j = 0; j < b; j++) {
            cu[j + 1] = cu[j] + (int32_t)(j % 2 && s > 1 ? s - 1 : s); /* a sequence with fewer tokens than rows */
            starts[j] = 3 + j;
            for (int k = 0; k < 3; k++) table[3 * j + k] = (int32_t)(3 * ((j + 1) % b) + 2 - k);
        }
        two.qkv = test_tensor(te, cases[i].dtype, SHAPE(bshd ? b : s, bshd ? s : b, width), test_normal(s * b * width, 1));
        two.format = bshd ? TE_BSHD : TE_SBHD;
        two.num_heads = cases[i].heads, two.num_groups = cases[i].groups, two.head_dim = cases[i].d;
        two.interleaved_groups = cases[i].grouped;
        two.angles.rotary_dim = cases[i].rotary;
        two.angles.interleaved = i == 3;
        two.angles.start_positions = te_tensor_from_host(te, TE_I32, SHAPE(b), starts);
        one = two;
        two.q = test_guarded(te, cases[i].dtype, SHAPE(bshd ? b : s, bshd ? s : b, two.num_heads, two.head_dim));
        two.k = test_guarded(te, cases[i].dtype, SHAPE(bshd ? b : s, bshd ? s : b, two.num_groups, two.head_dim));
        two.v = test_guarded(te, cases[i].dtype, SHAPE(bshd ? b : s, bshd ? s : b, two.num_groups, two.head_dim));
        one.q = test_guarded(te, cases[i].dtype, SHAPE(bshd ? b : s, bshd ? s : b, two.num_heads, two.head_dim));
        copy.k = two.k, copy.v = two.v;
        copy.format = two.format;
        one.cu_seqlens = copy.cu_seqlens = te_tensor_from_host(te, TE_I32, SHAPE(b + 1), cu);
        one.cache_positions = copy.start_positions = two.angles.start_positions;
        one.page_table = copy.page_table = cases[i].paged ? te_tensor_from_host(te, TE_I32, SHAPE(b, 3), table) : NULL;
        const float *old = test_normal(pages * size * two.num_groups * two.head_dim, 2);
        te_tensor *caches[4], *factors[4];
        for (int j = 0; j < 4; j++) caches[j] = test_guarded_with(te, kept, SHAPE(pages, size, two.num_groups, two.head_dim), old);
        for (int j = 0; j < 4; j++) factors[j] = codes ? test_guarded_with(te, TE_F8E8M0, SHAPE(pages, size, two.num_groups), old) : NULL;
        copy.k_cache = caches[0], copy.v_cache = caches[1], copy.k_factors = factors[0], copy.v_factors = factors[1];
        one.k_cache = caches[2], one.v_cache = caches[3], one.k_factors = factors[2], one.v_factors = factors[3];
        te_op_qkv_rope(te, &two);
        te_op_copy_to_kv_cache(te, &copy);
        te_op_qkv_rope(te, &one);
        REQUIRE_OK(te);
        CHECK_BYTES("q", test_read_bytes(one.q), test_read_bytes(two.q), te_tensor_bytes(two.q));
        for (int j = 0; j < 2; j++) CHECK_BYTES(j ? "v_cache" : "k_cache", test_read_bytes(caches[2 + j]), test_read_bytes(caches[j]), te_tensor_bytes(caches[j]));
        for (int j = 0; codes && j < 2; j++) CHECK_BYTES(j ? "v_factors" : "k_factors", test_read_bytes(factors[2 + j]), test_read_bytes(factors[j]), te_tensor_bytes(factors[j]));
        if (i == 0 && codes) {
            one.v_factors = NULL;
            te_op_qkv_rope(te, &one);
            CHECK_ERROR(te, TE_ERR_STATE, "v_cache is e4m3 and v_factors is NULL");
            one.v_factors = factors[3], one.k_cache = test_guarded(te, TE_BF16, SHAPE(pages, size, two.num_groups, two.head_dim));
            te_op_qkv_rope(te, &one);
            CHECK_ERROR(te, TE_ERR_INVALID, "k_cache is bf16 and k_factors is given");
        } else if (i == 0) {
            one.k = two.k;
            te_op_qkv_rope(te, &one);
            CHECK_ERROR(te, TE_ERR_INVALID, "k and k_cache");
            one.k = NULL, one.cu_seqlens = NULL;
            te_op_qkv_rope(te, &one);
            CHECK_ERROR(te, TE_ERR_INVALID, "belong together");
        }
        te_scope_end(te);
    }
}
