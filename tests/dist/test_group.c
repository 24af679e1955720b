/* tests/dist/test_group.c: groups of threads: each collective against arithmetic written down again, in every format, with 1 to 8 ranks and
 * sizes that they do not divide; arguments that do not fit; ranks that leave; groups of a user's own. */
#include "ranks.h"
#include "base/common.h"
#include "base/numbers.h"

/* ---- values: rank r's n bytes, and what becomes of them ----------------------------------------------------------- */

typedef union number {
    float f;
    int64_t i;
} number;

static bool is_real(te_dtype dtype) { return dtype == TE_F32 || dtype == TE_F16 || dtype == TE_BF16; }
static int size_of(te_dtype dtype) { return te_dtype_bits(dtype) / 8; }

static number get(const void *data, te_dtype dtype, int64_t i) {
    number v;
    uint16_t half = 0;
    v.i = 0;
    if (size_of(dtype) == 2) memcpy(&half, (const char *)data + 2 * i, 2);
    if (dtype == TE_F32) memcpy(&v.f, (const char *)data + 4 * i, 4);
    else if (dtype == TE_F16) v.f = te__f16_to_f32(half);
    else if (dtype == TE_BF16) v.f = te__bf16_to_f32(half);
    else if (dtype == TE_I32) v.i = ((const int32_t *)data)[i];
    else if (dtype == TE_I64) v.i = ((const int64_t *)data)[i];
    else v.i = ((const uint8_t *)data)[i];
    return v;
}
static void put(void *data, te_dtype dtype, int64_t i, number v) {
    uint16_t half = dtype == TE_F16 ? te__f32_to_f16(v.f) : dtype == TE_BF16 ? te__f32_to_bf16(v.f) : 0;
    if (dtype == TE_F32) memcpy((char *)data + 4 * i, &v.f, 4);
    else if (is_real(dtype)) memcpy((char *)data + 2 * i, &half, 2);
    else if (dtype == TE_I32) ((int32_t *)data)[i] = (int32_t)(uint32_t)(uint64_t)v.i;
    else if (dtype == TE_I64) ((int64_t *)data)[i] = v.i;
    else ((uint8_t *)data)[i] = (uint8_t)v.i;
}

/* xorshift: the runner's own arrays belong to its thread. */
static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}
/* Numbers whose sum depends on the order: exponents far apart, both infinities and NaN among them; whole ranges of the integers. */
static void *make_values(te_dtype dtype, int64_t n, int rank) {
    char *data = (char *)calloc((size_t)n + 1, (size_t)size_of(dtype));
    uint64_t state = 88172645463325252u + (uint64_t)rank * 7919u;
    for (int64_t i = 0; i < n; i++) {
        uint64_t r = next_random(&state);
        number v;
        v.i = (int64_t)r;
        if (is_real(dtype)) {
            v.i = 0;
            v.f = ldexpf((float)(int32_t)(r >> 32) * 4.656612873077393e-10f, (int)(r % 25) - 12);
            if (r % 61 == 0) v.f = NAN;
            if (r % 67 == 0) v.f = r & 4096 ? INFINITY : -INFINITY;
            if (r % 71 == 0) v.f = r & 4096 ? 0.0f : -0.0f;
            if (i == 0) v.f = NAN; /* on all ranks */
        }
        put(data, dtype, i, v);
    }
    return data;
}

/* Element i over the ranks, in rank order: f32 sums rounded once, integers that wrap around, a maximum that ignores NaN. */
static void reduce(void *out, void *const *in, int ranks, te_dtype dtype, te_reduce_op op, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        number v = get(in[0], dtype, i);
        for (int k = 1; k < ranks; k++) {
            number x = get(in[k], dtype, i);
            if (is_real(dtype)) {
                if (op == TE_REDUCE_SUM) v.f = v.f + x.f;
                else if (!isnan(x.f) && !(v.f >= x.f)) v.f = x.f;
            } else if (op == TE_REDUCE_SUM) {
                v.i = (int64_t)((uint64_t)v.i + (uint64_t)x.i);
            } else if (x.i > v.i) {
                v.i = x.i;
            }
        }
        put(out, dtype, i, v);
    }
}

/* Equal bytes; any NaN for a NaN. */
static bool same(const void *got, const void *want, te_dtype dtype, int64_t n) {
    if (!is_real(dtype)) return memcmp(got, want, (size_t)(n * size_of(dtype))) == 0;
    for (int64_t i = 0; i < n; i++) {
        bool nans = isnan(get(got, dtype, i).f) && isnan(get(want, dtype, i).f);
        if (!nans && memcmp((const char *)got + i * size_of(dtype), (const char *)want + i * size_of(dtype), (size_t)size_of(dtype)) != 0) return false;
    }
    return true;
}

static te_tensor *tensor_of(te_ctx *te, te_dtype dtype, int64_t n, const void *data) {
    return data ? te_tensor_from_host(te, dtype, 1, &n, data) : te_tensor_zeros(te, dtype, 1, &n);
}
static void *bytes_of(const te_tensor *x) {
    void *host = calloc(te_tensor_bytes(x) + 1, 1);
    te_tensor_to_host(x, host);
    return host;
}

static const int64_t sizes[] = {0, 1, 2, 3, 7, 8, 17, 255, 256, 257, 1031};

/* ---- the collectives ---------------------------------------------------------------------------------------------- */

typedef struct reduce_case {
    te_dtype dtype;
    te_reduce_op op;
} reduce_case;
static const reduce_case reductions[] = {{TE_F32, TE_REDUCE_SUM},  {TE_F16, TE_REDUCE_SUM}, {TE_BF16, TE_REDUCE_SUM}, {TE_I32, TE_REDUCE_SUM},
                                         {TE_I64, TE_REDUCE_SUM},  {TE_F32, TE_REDUCE_MAX}, {TE_F16, TE_REDUCE_MAX},  {TE_BF16, TE_REDUCE_MAX},
                                         {TE_I32, TE_REDUCE_MAX},  {TE_I64, TE_REDUCE_MAX}, {TE_U8, TE_REDUCE_MAX},   {TE_F8E8M0, TE_REDUCE_MAX}};

static void reduce_all(rank_state *s) {
    for (int c = 0; c < COUNT(reductions); c++) {
        te_dtype dtype = reductions[c].dtype;
        for (int z = 0; z < COUNT(sizes); z++) {
            int64_t n = sizes[z];
            void *in[MAX_RANKS], *want = calloc((size_t)n + 1, 8);
            te_scope_begin(s->te);
            for (int k = 0; k < s->size; k++) in[k] = make_values(dtype, n, k);
            reduce(want, in, s->size, dtype, reductions[c].op, n);
            te_tensor *x = tensor_of(s->te, dtype, n, in[s->rank]);
            uint64_t version = te_tensor_version(x);
            EXPECT(s, te_all_reduce(s->group, x, reductions[c].op) == TE_OK);
            EXPECT(s, s->size == 1 || te_tensor_version(x) > version);
            void *got = bytes_of(x);
            if (!same(got, want, dtype, n)) {
                char text[96];
                snprintf(text, sizeof text, "all_reduce %s %s of %lld elements", te_dtype_name(dtype), reductions[c].op ? "max" : "sum", (long long)n);
                wrong(s, text);
            }
            free(got);
            free(want);
            for (int k = 0; k < s->size; k++) free(in[k]);
            te_scope_end(s->te);
        }
    }
}
TE_TEST(all_reduce) {
    for (int size = 1; size <= MAX_RANKS; size++) run_ranks(size, reduce_all, NULL);
}

static void scatter_all(rank_state *s) {
    for (int c = 0; c < COUNT(reductions); c++) {
        te_dtype dtype = reductions[c].dtype;
        if (reductions[c].op != TE_REDUCE_SUM) continue;
        for (int z = 0; z < COUNT(sizes); z++) {
            int64_t n = sizes[z], whole = n * s->size;
            void *in[MAX_RANKS], *want = calloc((size_t)whole + 1, 8);
            te_scope_begin(s->te);
            for (int k = 0; k < s->size; k++) in[k] = make_values(dtype, whole, k);
            if (s->size > 1) reduce(want, in, s->size, dtype, TE_REDUCE_SUM, whole);
            else memcpy(want, in[0], (size_t)(whole * size_of(dtype)));
            te_tensor *x = tensor_of(s->te, dtype, whole, in[s->rank]), *out = tensor_of(s->te, dtype, n, NULL);
            EXPECT(s, te_reduce_scatter(s->group, x, out) == TE_OK);
            void *got = bytes_of(out), *kept = bytes_of(x);
            EXPECT(s, same(got, (char *)want + n * s->rank * size_of(dtype), dtype, n));
            EXPECT(s, memcmp(kept, in[s->rank], (size_t)(whole * size_of(dtype))) == 0);
            free(got);
            free(kept);
            free(want);
            for (int k = 0; k < s->size; k++) free(in[k]);
            te_scope_end(s->te);
        }
    }
}
TE_TEST(reduce_scatter) {
    for (int size = 1; size <= MAX_RANKS; size++) run_ranks(size, scatter_all, NULL);
}

/* Bytes whose every value names rank and place. */
static void *make_bytes(size_t bytes, int rank) {
    uint8_t *data = (uint8_t *)calloc(bytes + 1, 1);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)(i * 37 + (size_t)rank * 101 + 1);
    return data;
}
static void gather_one(rank_state *s, te_dtype dtype, int64_t rows, int64_t cols) {
    int64_t shape[2] = {rows, cols}, whole[2] = {rows * s->size, cols};
    te_scope_begin(s->te);
    te_tensor *x = te_tensor_empty(s->te, dtype, 2, shape), *out = te_tensor_empty(s->te, dtype, 2, whole);
    size_t bytes = te_tensor_bytes(x);
    void *mine = make_bytes(bytes, s->rank);
    te_tensor_copy_from_host(x, mine);
    EXPECT(s, te_all_gather(s->group, x, out) == TE_OK);
    void *got = bytes_of(out);
    for (int k = 0; k < s->size; k++) {
        void *want = make_bytes(bytes, k);
        EXPECT(s, memcmp((char *)got + bytes * (size_t)k, want, bytes) == 0);
        free(want);
    }
    free(got);
    /* in place: x is the rank's own part of out */
    if (te_dtype_bits(dtype) >= 8) {
        te_tensor *part = te_tensor_narrow(out, 0, rows * s->rank, rows);
        void *next = make_bytes(bytes, s->rank + 50);
        te_tensor_copy_from_host(part, next);
        EXPECT(s, te_all_gather(s->group, part, out) == TE_OK);
        got = bytes_of(out);
        for (int k = 0; k < s->size; k++) {
            void *want = make_bytes(bytes, k + 50);
            EXPECT(s, memcmp((char *)got + bytes * (size_t)k, want, bytes) == 0);
            free(want);
        }
        free(got);
        free(next);
    }
    free(mine);
    te_scope_end(s->te);
}
static void gather_all(rank_state *s) {
    for (int dtype = 1; dtype < TE_DTYPE_COUNT; dtype++) {
        gather_one(s, (te_dtype)dtype, 0, 4);
        gather_one(s, (te_dtype)dtype, 1, 1);
        gather_one(s, (te_dtype)dtype, 3, 5);
        gather_one(s, (te_dtype)dtype, 7, 129);
    }
}
TE_TEST(all_gather) {
    for (int size = 1; size <= MAX_RANKS; size++) run_ranks(size, gather_all, NULL);
}

static void broadcast_all(rank_state *s) {
    for (int dtype = 1; dtype < TE_DTYPE_COUNT; dtype++)
        for (int root = 0; root < s->size; root++)
            for (int64_t rows = 0; rows < 3; rows++) {
                int64_t shape[2] = {rows, 67};
                te_scope_begin(s->te);
                te_tensor *x = te_tensor_empty(s->te, (te_dtype)dtype, 2, shape);
                size_t bytes = te_tensor_bytes(x);
                void *mine = make_bytes(bytes, s->rank), *want = make_bytes(bytes, root);
                te_tensor_copy_from_host(x, mine);
                EXPECT(s, te_broadcast(s->group, x, root) == TE_OK);
                void *got = bytes_of(x);
                EXPECT(s, memcmp(got, want, bytes) == 0);
                free(mine);
                free(want);
                free(got);
                te_scope_end(s->te);
            }
}
TE_TEST(broadcast) {
    for (int size = 1; size <= MAX_RANKS; size++) run_ranks(size, broadcast_all, NULL);
}

/* Nobody passes a barrier before the last has come to it. */
typedef struct barrier_case {
    pthread_mutex_t mutex;
    int came;
} barrier_case;
static void barrier_many(rank_state *s) {
    barrier_case *b = (barrier_case *)(uintptr_t)s->arg;
    for (int i = 1; i <= 200; i++) {
        pthread_mutex_lock(&b->mutex);
        b->came++;
        pthread_mutex_unlock(&b->mutex);
        EXPECT(s, te_barrier(s->group) == TE_OK);
        pthread_mutex_lock(&b->mutex);
        bool all = b->came >= i * s->size;
        pthread_mutex_unlock(&b->mutex);
        EXPECT(s, all);
    }
}
TE_TEST(barrier) {
    for (int size = 1; size <= MAX_RANKS; size++) {
        barrier_case b;
        b.came = 0;
        pthread_mutex_init(&b.mutex, NULL);
        run_ranks(size, barrier_many, &b);
        pthread_mutex_destroy(&b.mutex);
    }
}

/* The same bits on all ranks and again in another run; every NaN is one NaN. */
typedef struct repeat_case {
    uint32_t bits[2][MAX_RANKS][1001];
    int run;
} repeat_case;
static void reduce_once(rank_state *s) {
    repeat_case *c = (repeat_case *)(uintptr_t)s->arg;
    void *data = make_values(TE_F32, 1001, s->rank);
    te_tensor *x = tensor_of(s->te, TE_F32, 1001, data);
    EXPECT(s, te_all_reduce(s->group, x, TE_REDUCE_SUM) == TE_OK);
    te_tensor_to_host(x, c->bits[c->run][s->rank]);
    free(data);
}
TE_TEST(same_bits) {
    repeat_case *c = (repeat_case *)test_alloc(sizeof *c);
    for (c->run = 0; c->run < 2; c->run++) run_ranks(5, reduce_once, c);
    for (int k = 0; k < 5; k++) {
        CHECK_BYTES("other run", c->bits[1][k], c->bits[0][k], sizeof c->bits[0][0]);
        CHECK_BYTES("other rank", c->bits[0][k], c->bits[0][0], sizeof c->bits[0][0]);
    }
    CHECK(c->bits[0][0][0] == 0x7fffffffu);
}

/* Ranks on the GPU, and on both devices at once. */
static void devices_all(rank_state *s) {
    reduce_all(s);
    scatter_all(s);
    gather_all(s);
    broadcast_all(s);
}
TE_TEST_DEVICES(groups) {
    const char *device = te_ctx_device(te);
    run_ranks_on(device, false, 2, devices_all, NULL);
    run_ranks_on(device, true, 3, devices_all, NULL);
}

/* ---- arguments that do not fit ------------------------------------------------------------------------------------ */

/* After a failure the same group goes on, and x is what it was. */
static void goes_on(rank_state *s) {
    float mine = (float)(s->rank + 1), got = 0;
    te_tensor *x = tensor_of(s->te, TE_F32, 1, &mine);
    EXPECT(s, te_all_reduce(s->group, x, TE_REDUCE_SUM) == TE_OK);
    te_tensor_to_host(x, &got);
    EXPECT(s, got == (float)(s->size * (s->size + 1) / 2));
}

typedef te_result (*odd_fn)(rank_state *s, bool odd);
typedef struct odd_case {
    odd_fn fn;
    te_result code;
    const char *needle; /* in the message of all */
    const char *other;  /* and this too; may be NULL */
} odd_case;

static te_result odd_dtype(rank_state *s, bool odd) {
    return te_all_reduce(s->group, tensor_of(s->te, odd ? TE_BF16 : TE_F32, 6, NULL), TE_REDUCE_SUM);
}
static te_result odd_count(rank_state *s, bool odd) { return te_all_reduce(s->group, tensor_of(s->te, TE_F32, odd ? 5 : 6, NULL), TE_REDUCE_SUM); }
static te_result odd_op(rank_state *s, bool odd) { return te_all_reduce(s->group, tensor_of(s->te, TE_F32, 6, NULL), odd ? TE_REDUCE_MAX : TE_REDUCE_SUM); }
static te_result odd_root(rank_state *s, bool odd) { return te_broadcast(s->group, tensor_of(s->te, TE_F32, 6, NULL), odd ? 1 : 0); }
static te_result odd_call(rank_state *s, bool odd) { return odd ? te_barrier(s->group) : te_all_reduce(s->group, tensor_of(s->te, TE_F32, 6, NULL), TE_REDUCE_SUM); }
static te_result odd_gather(rank_state *s, bool odd) {
    int64_t n = odd ? 4 : 3;
    return te_all_gather(s->group, tensor_of(s->te, TE_U8, n, NULL), tensor_of(s->te, TE_U8, n * s->size, NULL));
}
static te_result odd_scatter(rank_state *s, bool odd) {
    te_dtype dtype = odd ? TE_I64 : TE_I32;
    return te_reduce_scatter(s->group, tensor_of(s->te, dtype, 2 * s->size, NULL), tensor_of(s->te, dtype, 2, NULL));
}
static te_result odd_broadcast(rank_state *s, bool odd) { return te_broadcast(s->group, tensor_of(s->te, TE_F8E4M3, odd ? 9 : 8, NULL), 0); }
/* refused at the front door of one rank */
static te_result bad_parts(rank_state *s, bool odd) {
    return te_all_gather(s->group, tensor_of(s->te, TE_F32, 3, NULL), tensor_of(s->te, TE_F32, 3 * s->size + (odd ? 1 : 0), NULL));
}
static te_result bad_formats(rank_state *s, bool odd) {
    return te_all_gather(s->group, tensor_of(s->te, TE_F32, 3, NULL), tensor_of(s->te, odd ? TE_I32 : TE_F32, 3 * s->size, NULL));
}
static te_result bad_sum(rank_state *s, bool odd) { return te_all_reduce(s->group, tensor_of(s->te, odd ? TE_U8 : TE_F32, 3, NULL), TE_REDUCE_SUM); }
static te_result bad_op(rank_state *s, bool odd) { return te_all_reduce(s->group, tensor_of(s->te, TE_F32, 3, NULL), (te_reduce_op)(odd ? 2 : 0)); }
static te_result bad_root(rank_state *s, bool odd) { return te_broadcast(s->group, tensor_of(s->te, TE_F32, 3, NULL), odd ? s->size : 0); }
static te_result bad_stride(rank_state *s, bool odd) {
    int64_t shape[2] = {4, 6};
    te_tensor *x = te_tensor_zeros(s->te, TE_F32, 2, shape);
    return te_all_reduce(s->group, odd ? te_tensor_transpose(x, 0, 1) : x, TE_REDUCE_MAX);
}
static te_result bad_described(rank_state *s, bool odd) {
    int64_t n = 4;
    return te_all_reduce(s->group, odd ? te_tensor_describe(s->te, TE_F32, 1, &n) : tensor_of(s->te, TE_F32, n, NULL), TE_REDUCE_MAX);
}
/* whose tensor could not be made */
static te_result bad_input(rank_state *s, bool odd) {
    int64_t n = -3;
    return te_all_reduce(s->group, odd ? te_tensor_zeros(s->te, TE_F32, 1, &n) : tensor_of(s->te, TE_F32, 6, NULL), TE_REDUCE_SUM);
}

static const odd_case odd_cases[] = {
    {odd_dtype, TE_ERR_DTYPE, "f32 [6]", "bf16 [6]"},
    {odd_count, TE_ERR_SHAPE, "f32 [6]", "f32 [5]"},
    {odd_op, TE_ERR_INVALID, "sum", "maximum"},
    {odd_root, TE_ERR_INVALID, "rank 0 names rank", "as the root and rank"},
    {odd_call, TE_ERR_STATE, "te_all_reduce", "te_barrier"},
    {odd_gather, TE_ERR_SHAPE, "u8 [3]", "u8 [4]"},
    {odd_scatter, TE_ERR_DTYPE, "i32 [", "i64 ["},
    {odd_broadcast, TE_ERR_SHAPE, "e4m3 [8]", "e4m3 [9]"},
    {bad_parts, TE_ERR_SHAPE, "times the elements of x in out", NULL},
    {bad_formats, TE_ERR_DTYPE, "out is i32 and x is f32", NULL},
    {bad_sum, TE_ERR_DTYPE, "x is u8", NULL},
    {bad_op, TE_ERR_INVALID, "op is 2", NULL},
    {bad_root, TE_ERR_INVALID, "root is", NULL},
    {bad_stride, TE_ERR_SHAPE, "strided", NULL},
    {bad_described, TE_ERR_STATE, "te_tensor_describe", NULL},
    {bad_input, TE_ERR_STATE, "negative size", NULL},
};

typedef struct odd_arg {
    const odd_case *c;
    int odd; /* the rank that is */
} odd_arg;
static void odd_rank(rank_state *s) {
    const odd_arg *a = (const odd_arg *)s->arg;
    te_result r = a->c->fn(s, s->rank == a->odd);
    s->result = r;
    snprintf(s->error, sizeof s->error, "%s", te_error(s->te));
    te_clear_error(s->te);
    goes_on(s);
}
TE_TEST(misfits) {
    for (int size = 2; size <= 4; size += 2)
        for (int odd = 0; odd < size; odd += size - 1)
            for (int c = 0; c < COUNT(odd_cases); c++) {
                odd_arg a = {&odd_cases[c], odd};
                test_case("case %d, rank %d of %d is odd", c, odd, size);
                rank_state *all = run_ranks(size, odd_rank, &a);
                for (int k = 0; k < size; k++) {
                    CHECK_STR(te_result_name(all[k].result), te_result_name(a.c->code));
                    CHECK_STR(all[k].error, a.c->needle);
                    if (a.c->other) CHECK_STR(all[k].error, a.c->other);
                    if (a.c->other || k != odd) CHECK_STR(all[k].error, "group \"threads\", rank");
                }
            }
}

/* A rank without a tensor is silent itself, and the others hear of it. */
static void without_tensor(rank_state *s) {
    te_tensor *x = s->rank == 1 ? NULL : tensor_of(s->te, TE_F32, 6, NULL);
    s->result = te_all_reduce(s->group, x, TE_REDUCE_SUM);
    snprintf(s->error, sizeof s->error, "%s", te_error(s->te));
    te_clear_error(s->te);
    goes_on(s);
}
TE_TEST(null_on_one_rank) {
    rank_state *all = run_ranks(3, without_tensor, NULL);
    for (int k = 0; k < 3; k++) {
        CHECK_EQ_INT(all[k].result, TE_ERR_STATE);
        if (k != 1) CHECK_STR(all[k].error, "rank 1 failed: it was given NULL");
    }
    CHECK(all[1].error[0] == 0);
}

/* A failed call changes nothing. */
static void unchanged(rank_state *s) {
    float mine[6], got[6];
    for (int i = 0; i < 6; i++) mine[i] = (float)(10 * s->rank + i);
    te_tensor *x = tensor_of(s->te, TE_F32, s->rank == 2 ? 5 : 6, mine);
    note(s, te_all_reduce(s->group, x, TE_REDUCE_SUM));
    te_tensor_to_host(x, got);
    EXPECT(s, memcmp(mine, got, te_tensor_bytes(x)) == 0);
}
TE_TEST(failure_changes_nothing) {
    rank_state *all = run_ranks(3, unchanged, NULL);
    for (int k = 0; k < 3; k++) CHECK_EQ_INT(all[k].result, TE_ERR_SHAPE);
}

/* One rank cannot get the memory for its copy. */
typedef struct scarce {
    bool none;
} scarce;
static void *scarce_alloc(void *user, size_t bytes, size_t alignment) {
    (void)alignment;
    return ((scarce *)user)->none && bytes >= 4096 ? NULL : malloc(bytes);
}
static void scarce_release(void *user, void *pointer, size_t bytes) {
    (void)user, (void)bytes;
    free(pointer);
}
static void out_of_memory(rank_state *s) {
    scarce memory = {false};
    te_ctx_desc desc = {0};
    desc.device = "cpu";
    desc.log = no_log;
    desc.cpu_threads = 1;
    desc.host_allocator.alloc = scarce_alloc;
    desc.host_allocator.release = scarce_release;
    desc.host_allocator.user = &memory;
    te_ctx *te = te_ctx_create(&desc);
    te_thread_hub *hub = (te_thread_hub *)(uintptr_t)s->arg;
    te_group *group = te_thread_group_create(te, hub, s->rank);
    te_tensor *x = tensor_of(te, TE_F32, 4096, NULL);
    memory.none = s->rank == 1;
    s->result = te_all_reduce(group, x, TE_REDUCE_SUM);
    snprintf(s->error, sizeof s->error, "%s", te_error(te));
    memory.none = false;
    te_clear_error(te);
    EXPECT(s, te_all_reduce(group, x, TE_REDUCE_SUM) == TE_OK);
    te_group_destroy(group);
    te_ctx_destroy(te);
}
TE_TEST(no_memory) {
    te_thread_hub *hub = te_thread_hub_create(3);
    rank_state *all = run_ranks(3, out_of_memory, hub);
    for (int k = 0; k < 3; k++) {
        CHECK_EQ_INT(all[k].result, TE_ERR_OUT_OF_MEMORY);
        CHECK_STR(all[k].error, k == 1 ? "16384 bytes" : "rank 1 failed");
    }
    te_thread_hub_destroy(hub);
}

/* ---- ranks that come and go --------------------------------------------------------------------------------------- */

static void leaves_early(rank_state *s) {
    EXPECT(s, te_barrier(s->group) == TE_OK);
    if (s->rank == 1) return;
    note(s, te_barrier(s->group));
    EXPECT(s, te_all_reduce(s->group, tensor_of(s->te, TE_F32, 6, NULL), TE_REDUCE_SUM) == TE_ERR_STATE);
    te_clear_error(s->te);
}
TE_TEST(a_rank_leaves) {
    for (int round = 0; round < 20; round++) {
        rank_state *all = run_ranks(4, leaves_early, NULL);
        for (int k = 0; k < 4; k++) {
            if (k == 1) continue;
            CHECK_EQ_INT(all[k].result, TE_ERR_STATE);
            CHECK_STR(all[k].error, "has left the group"); /* rank 1, or one that it made leave */
        }
    }
}

/* The hub is destroyed under a rank that waits for one that never comes. */
typedef struct lonely {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    bool joined;
} lonely;
static void waits_alone(rank_state *s) {
    lonely *l = (lonely *)(uintptr_t)s->arg;
    pthread_mutex_lock(&l->mutex);
    l->joined = true;
    pthread_cond_signal(&l->cond);
    pthread_mutex_unlock(&l->mutex);
    note(s, te_barrier(s->group));
}
TE_TEST(hub_destroyed) {
    lonely l;
    rank_state s = {0};
    l.joined = false;
    pthread_mutex_init(&l.mutex, NULL);
    pthread_cond_init(&l.cond, NULL);
    s.fn = waits_alone;
    s.arg = &l;
    s.device = "cpu";
    s.hub = te_thread_hub_create(2);
    s.size = 2;
    REQUIRE(pthread_create(&s.thread, NULL, rank_main, &s) == 0);
    pthread_mutex_lock(&l.mutex);
    while (!l.joined) pthread_cond_wait(&l.cond, &l.mutex);
    pthread_mutex_unlock(&l.mutex);
    te_thread_hub_destroy(s.hub); /* whether it waits already or is about to, the rank learns of it */
    pthread_join(s.thread, NULL);
    CHECK_MSG(s.wrong == 0, "%s", s.what);
    CHECK_EQ_INT(s.result, TE_ERR_STATE);
    CHECK_STR(s.error, "te_thread_hub_destroy");
    pthread_mutex_destroy(&l.mutex);
    pthread_cond_destroy(&l.cond);
}

TE_TEST(joining) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    te_thread_hub *hub = te_thread_hub_create(2);
    CHECK(te_thread_hub_create(0) == NULL);
    CHECK(te_thread_group_create(NULL, hub, 0) == NULL);
    CHECK(te_thread_group_create(te, NULL, 0) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "hub is NULL");
    CHECK(te_thread_group_create(te, hub, 2) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "ranks 0 to 1");
    te_group *a = te_thread_group_create(te, hub, 0);
    REQUIRE_OK(te);
    CHECK(te_thread_group_create(other, hub, 0) == NULL);
    CHECK_ERROR(other, TE_ERR_STATE, "rank 0 of 2 is taken");
    CHECK(te_thread_group_create(te, hub, 1) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "this context is rank 0 already");
    te_group_destroy(a);
    CHECK(te_thread_group_create(te, hub, 0) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "rank 0 of 2 has left");
    te_group *b = te_thread_group_create(other, hub, 1);
    CHECK_EQ_INT(te_barrier(b), TE_ERR_STATE); /* rank 0 was there, and will not come */
    CHECK_ERROR(other, TE_ERR_STATE, "rank 0 has left");
    te_group_destroy(b);
    a = te_thread_group_create(te, hub, 0);
    CHECK_OK(te);
    te_group_destroy(a);
    te_thread_hub_destroy(hub);
    te_thread_hub_destroy(NULL);
    te_group_destroy(NULL);
}

/* ---- no group, and groups of a user's own ------------------------------------------------------------------------- */

TE_TEST_DEVICES(no_group) {
    const float values[6] = {1, -2, NAN, 4, INFINITY, 0};
    te_thread_hub *hub = te_thread_hub_create(1);
    te_group *one = te_thread_group_create(te, hub, 0), *groups[2] = {NULL, one};
    CHECK(te_group_rank(NULL) == 0 && te_group_size(NULL) == 1 && te_group_size(one) == 1);
    for (int g = 0; g < 2; g++) {
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(2, 3), values), *out = test_guarded(te, TE_F32, SHAPE(6));
        CHECK_EQ_INT(te_all_reduce(groups[g], x, TE_REDUCE_SUM), TE_OK);
        CHECK_EQ_INT(te_broadcast(groups[g], x, 0), TE_OK);
        CHECK_EQ_INT(te_barrier(groups[g]), TE_OK);
        CHECK_EQ_INT(te_all_gather(groups[g], x, out), TE_OK);
        CHECK_BYTES("x", test_read_bytes(x), values, sizeof values);
        CHECK_BYTES("gathered", test_read_bytes(out), values, sizeof values);
        out = test_guarded(te, TE_F32, SHAPE(1, 6));
        CHECK_EQ_INT(te_reduce_scatter(groups[g], x, out), TE_OK);
        CHECK_BYTES("scattered", test_read_bytes(out), values, sizeof values);
        CHECK_EQ_INT(te_all_gather(groups[g], x, x), TE_OK);
        CHECK_EQ_INT(te_all_reduce(groups[g], NULL, TE_REDUCE_SUM), TE_ERR_STATE);
        CHECK_OK(te); /* a NULL passes in silence */
        CHECK_EQ_INT(te_broadcast(groups[g], x, 1), TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "root is 1");
        CHECK_EQ_INT(te_all_gather(groups[g], x, test_guarded(te, TE_F32, SHAPE(7))), TE_ERR_SHAPE);
        CHECK_ERROR(te, TE_ERR_SHAPE, "out is [7] and x is [2, 3]");
        CHECK_EQ_INT(te_all_reduce(groups[g], test_tensor(te, TE_F8E4M3, SHAPE(2, 3), values), TE_REDUCE_MAX), TE_ERR_DTYPE);
        CHECK_ERROR(te, TE_ERR_DTYPE, "x is e4m3");
        /* 4-bit rows fill whole bytes: one row of 6 is not two of 3 */
        CHECK_EQ_INT(te_all_gather(groups[g], te_tensor_empty(te, TE_F4E2M1, SHAPE(2, 3)), te_tensor_empty(te, TE_F4E2M1, SHAPE(6))), TE_ERR_SHAPE);
        CHECK_ERROR(te, TE_ERR_SHAPE, "rows of e2m1");
    }
    te_group_destroy(one);
    te_thread_hub_destroy(hub);
}

/* The arguments of calls to a user's functions, and their answers. */
typedef struct custom {
    int calls[6];
    te_result answer;
    te_ctx *te;
    te_tensor *x, *out;
    int last; /* op or root */
} custom;
static te_result custom_all_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    custom *c = (custom *)user;
    c->calls[0]++, c->te = te, c->x = x, c->last = (int)op;
    return c->answer;
}
static te_result custom_all_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    custom *c = (custom *)user;
    c->calls[1]++, c->te = te, c->x = (te_tensor *)(uintptr_t)x, c->out = out;
    return c->answer;
}
static te_result custom_reduce_scatter(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    custom *c = (custom *)user;
    c->calls[2]++, c->te = te, c->x = (te_tensor *)(uintptr_t)x, c->out = out;
    return c->answer;
}
static te_result custom_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    custom *c = (custom *)user;
    c->calls[3]++, c->te = te, c->x = x, c->last = root;
    return c->answer;
}
static te_result custom_barrier(void *user) {
    custom *c = (custom *)user;
    c->calls[4]++;
    return c->answer;
}
static void custom_destroy(void *user) { ((custom *)user)->calls[5]++; }

TE_TEST_DEVICES(custom_group) {
    custom c = {0};
    char name[16] = "mine";
    te_group_desc d = {0};
    d.name = name;
    d.rank = 1;
    d.size = 3;
    d.user = &c;
    d.all_reduce = custom_all_reduce;
    d.all_gather = custom_all_gather;
    d.reduce_scatter = custom_reduce_scatter;
    d.broadcast = custom_broadcast;
    d.destroy = custom_destroy;
    CHECK(te_group_create(NULL, &d) == NULL && te_group_create(te, NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "desc is NULL");
    CHECK(te_group_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "barrier is NULL");
    d.barrier = custom_barrier;
    d.rank = 3;
    CHECK(te_group_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "rank 3 of 3");
    CHECK_EQ_INT(c.calls[5], 0);
    d.rank = 1;
    te_group *g = te_group_create(te, &d);
    REQUIRE_OK(te);
    name[0] = 0; /* it was copied */
    CHECK(te_group_rank(g) == 1 && te_group_size(g) == 3);

    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(6)), *small = te_tensor_zeros(te, TE_F32, SHAPE(2)), *big = te_tensor_zeros(te, TE_F32, SHAPE(3, 6));
    uint64_t version = te_tensor_version(x);
    CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_MAX), TE_OK);
    CHECK(c.te == te && c.x == x && c.last == TE_REDUCE_MAX && te_tensor_version(x) > version);
    CHECK_EQ_INT(te_all_gather(g, x, big), TE_OK);
    CHECK(c.x == x && c.out == big);
    CHECK_EQ_INT(te_reduce_scatter(g, x, small), TE_OK);
    CHECK(c.x == x && c.out == small);
    CHECK_EQ_INT(te_broadcast(g, x, 2), TE_OK);
    CHECK(c.x == x && c.last == 2);
    CHECK_EQ_INT(te_barrier(g), TE_OK);
    for (int i = 0; i < 5; i++) CHECK_EQ_INT(c.calls[i], 1);
    CHECK_OK(te);

    /* bad arguments do not come through, and neither does a warm-up */
    CHECK_EQ_INT(te_all_gather(g, x, small), TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "out is [2] and x is [6]; 3 ranks need 3 times the elements of x in out");
    CHECK_EQ_INT(te_all_reduce(g, x, (te_reduce_op)7), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "op is 7");
    te_warmup_begin(te);
    CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_SUM), TE_OK);
    CHECK_EQ_INT(te_barrier(g), TE_OK);
    te_warmup_end(te);
    for (int i = 0; i < 5; i++) CHECK_EQ_INT(c.calls[i], 1);

    /* its own failures carry the group's name and the rank */
    c.answer = TE_ERR_DEVICE;
    CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_SUM), TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "te_all_reduce: group \"mine\", rank 1 of 3: it returned TE_ERR_DEVICE");
    c.answer = (te_result)77;
    CHECK_EQ_INT(te_barrier(g), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "it returned 77");

    te_ctx *other = test_context("cpu");
    CHECK_EQ_INT(te_broadcast(g, te_tensor_zeros(other, TE_F32, SHAPE(6)), 0), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "x belongs to another context");
    te_group_destroy(g);
    CHECK_EQ_INT(c.calls[5], 1);
}
