/* tests/quant/test_groups.c: quantization over a group of ranks: each holds a part of the batch, and all quantize as one that has the whole.
 * Ranks are threads, each with a context of its own; what they leave behind is compared when they have ended. */
#include "../dist/ranks.h"

enum { SIZES = 4 /* of groups: 1 to 4 ranks */, COLS = 48, OUT = 32, STEPS = 4 };

/* Leaves the bytes of x behind. */
static void leave(rank_state *s, const te_tensor *x) {
    size_t bytes = x ? te_tensor_bytes(x) : 0;
    void *host = calloc(1, bytes + 1);
    EXPECT(s, x != NULL);
    if (bytes) EXPECT(s, te_tensor_to_host(x, host) == TE_OK);
    s->bytes[s->num_left] = bytes;
    s->left[s->num_left++] = host;
}

/* ---- a batch in parts ----------------------------------------------------------------------------------------------- */

/* Rows of rank r of n; one of several ranks has none. Multiples of 16: blocks do not cross the parts. */
static int64_t rows_of(int r, int n) { return n >= 3 && r == 1 ? 0 : 16 * (r + 1); }
static int64_t first_of(int r, int n) {
    int64_t first = 0;
    for (int i = 0; i < r; i++) first += rows_of(i, n);
    return first;
}
/* Numbers of row m, column k: the largest of each rank's are of another size, and in another step another rank has the largest. */
static float value(int64_t m, int64_t k, int step) {
    uint64_t h = (uint64_t)m * 1315423911u + (uint64_t)k * 2654435761u + (uint64_t)step * 97531u + 12345;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    return ((float)(h % 2001) - 1000.0f) * 0.001f * (float)(1 + (m / 16 + step) % 5);
}
static te_tensor *part(te_ctx *te, te_dtype dtype, int64_t first, int64_t rows, int64_t cols, int step) {
    float *host = (float *)calloc((size_t)(rows * cols) + 1, sizeof(float));
    for (int64_t m = 0; m < rows; m++)
        for (int64_t k = 0; k < cols; k++) host[m * cols + k] = value(first + m, k, step);
    te_tensor *x = te_tensor_from_f32(te, dtype, SHAPE(rows, cols), host);
    free(host);
    return x;
}
/* This rank's part of a batch of `n` ranks; without a group: all of it. */
typedef struct share {
    int64_t first, rows;
} share;
static share share_of(const rank_state *s, int n) {
    share a = {s->group ? first_of(s->rank, n) : 0, s->group ? rows_of(s->rank, n) : first_of(n, n)};
    return a;
}

/* ---- quantizers ----------------------------------------------------------------------------------------------------- */

typedef struct quantizing {
    te_quantizer_desc d;
    int ranks;
    bool apart; /* without the group, after all */
} quantizing;
static void quantize_part(rank_state *s) {
    const quantizing *arg = (const quantizing *)s->arg;
    te_quantizer_desc d = arg->d;
    d.amax_group = arg->apart ? NULL : s->group;
    share mine = share_of(s, arg->ranks);
    te_quantizer *q = te_quantizer_create(s->te, &d);
    te_tensor *x = part(s->te, TE_BF16, mine.first, mine.rows, COLS, 0);
    te_tensor *y = te_quantize(q, x), *into = te_quantizer_make_empty(q, TE_BF16, SHAPE(mine.rows, COLS)), *data, *scale;
    EXPECT(s, te_quantize_into(q, x, into, NULL) == TE_OK);
    for (int which = TE_ROWWISE; which <= TE_COLUMNWISE; which++)
        for (int again = 0; again < 2; again++) {
            EXPECT(s, te_quantized_view(again ? into : y, which, &data, &scale) == TE_OK);
            leave(s, data);
            leave(s, scale);
            leave(s, d.kind == TE_QUANT_NVFP4 ? te_quantized_amax(again ? into : y, which) : scale);
        }
    te_quantizer_destroy(q);
}
static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
/* Bytes `from` .. of rows of `ld` bytes. */
static bool same_part(const char *what, const uint8_t *a, int64_t lda, const uint8_t *b, int64_t ldb, int64_t from, int64_t rows, int64_t bytes) {
    for (int64_t i = 0; i < rows; i++)
        if (memcmp(a + i * lda, b + i * ldb + from, (size_t)bytes) != 0) {
            test_fail(__FILE__, __LINE__, "%s: row %lld differs from that of the whole batch", what, (long long)i);
            return false;
        }
    return true;
}

TE_TEST_DEVICES(groups_of_quantizers) {
    static const te_quantizer_desc kinds[] = {
        {.kind = TE_QUANT_CURRENT},
        {.kind = TE_QUANT_CURRENT, .dtype = TE_F8E5M2, .current.power_of_two_scales = true},
        {.kind = TE_QUANT_NVFP4},
        {.kind = TE_QUANT_NVFP4, .quantization_2d = TE_ON},
        {.kind = TE_QUANT_NVFP4, .nvfp4.rht = TE_ON},
        {.kind = TE_QUANT_NVFP4, .nvfp4.four_over_six = TE_4OVER6_MSE, .nvfp4.e4m3_max_256 = true},
    };
    for (int k = 0; k < COUNT(kinds); k++)
        for (int n = 1; n <= SIZES; n++) {
            quantizing arg = {kinds[k], n, false}, alone = {kinds[k], n, true};
            rank_state *whole = run_ranks_on(te_ctx_device(te), false, 0, quantize_part, &arg), *all = run_ranks_on(te_ctx_device(te), false, n, quantize_part, &arg),
                       *apart = run_ranks_on(te_ctx_device(te), false, n, quantize_part, &alone);
            bool fp4 = kinds[k].kind == TE_QUANT_NVFP4;
            int64_t total = first_of(n, n), half = fp4 ? 2 : 1, pad = fp4 ? 32 : 16;
            int differ = 0;
            for (int r = 0; r < n; r++) {
                int64_t first = first_of(r, n), rows = rows_of(r, n);
                for (int again = 0; again < 2; again++) {
                    test_case("kind %d, rank %d of %d%s", k, r, n, again ? ", in place" : "");
                    uint8_t *const *got = (uint8_t *const *)all[r].left + 3 * again, *const *want = (uint8_t *const *)whole->left + 3 * again;
                    int64_t ld = up(COLS, pad) / half;
                    same_part("row-wise codes", got[0], ld, want[0] + first * ld, ld, 0, rows, ld);
                    same_part("column-wise codes", got[6], up(rows, pad) / half, want[6], up(total, pad) / half, first / half, COLS, rows / half);
                    CHECK_BYTES("amax or scale, by rows", got[2], want[2], 4);
                    CHECK_BYTES("amax or scale, by columns", got[8], want[8], 4);
                    if (fp4) {
                        same_part("row-wise scales", got[1], up(COLS / 16, 4), want[1] + first * up(COLS / 16, 4), up(COLS / 16, 4), 0, rows, COLS / 16);
                        same_part("column-wise scales", got[7], up(rows / 16, 4), want[7], up(total / 16, 4), first / 16, COLS, rows / 16);
                    }
                }
                differ += memcmp(apart[r].left[2], whole->left[2], 4) != 0;
            }
            CHECK_MSG(n == 1 || differ > 0, "the test cannot tell");
        }
}

/* ---- modules -------------------------------------------------------------------------------------------------------- */

typedef struct training {
    te_recipe recipe;
    int ranks;
    bool several; /* two modules more, one of two products */
} training;

static void set_values(rank_state *s, te_module *m, const char *name, int seed) {
    te_tensor *w = te_module_parameter(m, name);
    EXPECT(s, w != NULL);
    if (!w) return;
    int64_t rows = te_tensor_ndim(w) == 2 ? te_tensor_shape(w)[0] : 1;
    EXPECT(s, te_tensor_copy(w, te_tensor_view(part(s->te, te_tensor_dtype(w), 0, rows, te_tensor_numel(w) / rows, seed), te_tensor_ndim(w), te_tensor_shape(w))) == TE_OK);
}

/* STEPS steps; leaves the last output and the last gradient of the input, and the scaling state of the modules. */
static void train_part(rank_state *s) {
    const training *arg = (const training *)s->arg;
    te_ctx *te = s->te;
    share mine = share_of(s, arg->ranks);
    te_linear_desc d = {0};
    te_layernorm_mlp_desc mlp = {0};
    d.in_features = COLS;
    d.out_features = OUT;
    mlp.hidden_size = OUT;
    mlp.ffn_hidden_size = 16;
    te_module *m = te_linear_create(te, &d), *second = arg->several ? te_layernorm_mlp_create(te, &mlp) : NULL;
    d.in_features = OUT;
    te_module *third = arg->several ? te_linear_create(te, &d) : NULL;
    set_values(s, m, "weight", 7);
    if (second) {
        set_values(s, second, "fc1_weight", 8);
        set_values(s, second, "fc2_weight", 9);
        set_values(s, third, "weight", 10);
    }
    te_autocast_desc cast = {0};
    cast.recipe = &arg->recipe;
    cast.amax_group = s->group;
    for (int step = 0; step < STEPS; step++) {
        te_scope_begin(te);
        te_tensor *x = te_tensor_set_requires_grad(part(te, TE_BF16, mine.first, mine.rows, COLS, step), true);
        EXPECT(s, te_autocast_begin(te, &cast) == TE_OK);
        te_tensor *y = te_forward(m, x);
        if (second) y = te_forward(third, te_forward(second, y));
        EXPECT(s, te_autocast_end(te) == TE_OK);
        EXPECT(s, te_backward_from(y, part(te, TE_BF16, mine.first, mine.rows, OUT, step + 2)) == TE_OK);
        if (step == STEPS - 1) {
            leave(s, y);
            leave(s, te_tensor_grad(x));
        }
        te_scope_end(te);
    }
    static const char *const names[] = {"fp8_scale_fwd", "fp8_amax_history_fwd", "fp8_scale_bwd", "fp8_amax_history_bwd"};
    te_module *const modules[3] = {m, second, third};
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 4 && modules[k] && arg->recipe.kind == TE_RECIPE_DELAYED; i++) leave(s, te_module_parameter(modules[k], names[i]));
    te_module_destroy(third);
    te_module_destroy(second);
    te_module_destroy(m);
}

static float bf16(uint16_t code) {
    uint32_t bits = (uint32_t)code << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
/* Rows of the whole batch's output and gradient, to the bit. On CUDA the sizes may choose other tiles: then sums end in another order, and what
 * is quantized after them may fall on the neighbouring code; `limit` is what that may amount to. */
static void same_rows(te_ctx *te, const rank_state *got, const rank_state *whole, int n, double limit) {
    int64_t first = first_of(got->rank, n), rows = rows_of(got->rank, n);
    static const int64_t cols[2] = {OUT, COLS};
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "the input's gradient" : "the output";
        const uint16_t *a = (const uint16_t *)got->left[i], *b = (const uint16_t *)whole->left[i] + first * cols[i];
        int64_t count = rows * cols[i];
        CHECK_EQ_INT(got->bytes[i], count * 2);
        if (!te_ctx_is_cuda(te)) {
            CHECK_BYTES(name, a, b, (size_t)count * 2);
            continue;
        }
        float *f = test_floats(count), *g = test_floats(count);
        for (int64_t k = 0; k < count; k++) f[k] = bf16(a[k]), g[k] = bf16(b[k]);
        if (count) CHECK_ERROR_BELOW(name, f, g, count, limit);
    }
}

TE_TEST_DEVICES(groups_scale_by_the_whole_batch) {
    for (int k = 0; k < 3; k++)
        for (int n = 1; n <= SIZES; n++) {
            training arg = {0};
            arg.recipe = k == 0 ? te_recipe_current_scaling() : te_recipe_nvfp4();
            arg.recipe.nvfp4.stochastic_rounding = k > 0 ? TE_OFF : TE_DEFAULT; /* its random numbers go by the row within the tensor */
            arg.recipe.nvfp4.rht = k == 2 ? TE_OFF : TE_DEFAULT;
            arg.ranks = n;
            rank_state *whole = run_ranks_on(te_ctx_device(te), false, 0, train_part, &arg), *all = run_ranks_on(te_ctx_device(te), false, n, train_part, &arg);
            for (int r = 0; r < n; r++) {
                test_case("recipe %d, rank %d of %d", k, r, n);
                same_rows(te, &all[r], whole, n, 0.01);
            }
        }
}

TE_TEST_DEVICES(groups_of_delayed_scaling) {
    for (int n = 1; n <= SIZES; n++)
        for (int algo = 0; algo < 2; algo++)
            for (int apart = 0; apart < 2; apart++) {
                training arg = {0};
                arg.recipe = te_recipe_delayed_scaling();
                arg.recipe.delayed.amax_history_len = 3;
                arg.recipe.delayed.amax_algo = algo ? TE_AMAX_MOST_RECENT : TE_AMAX_MAX;
                arg.recipe.delayed.no_reduce_amax = apart;
                arg.ranks = n;
                rank_state *whole = run_ranks_on(te_ctx_device(te), false, 0, train_part, &arg), *all = run_ranks_on(te_ctx_device(te), false, n, train_part, &arg);
                int differ = 0;
                CHECK_EQ_INT(whole->num_left, 6);
                for (int r = 0; r < n; r++) {
                    test_case("rank %d of %d, algo %d%s", r, n, algo, apart ? ", apart" : "");
                    if (!apart) same_rows(te, &all[r], whole, n, 0.01);
                    for (int i = 2; i < 6; i++)
                        if (!apart)
                            CHECK_BYTES("scales and histories", all[r].left[i], whole->left[i], whole->bytes[i]);
                        else
                            differ += memcmp(all[r].left[i], whole->left[i], whole->bytes[i]) != 0;
                }
                CHECK(!apart || n == 1 || differ > 0);
            }
}

/* Functions of the user's own see the reduced amaxes. */
static float largest(void *user, const float *history, int length) {
    (void)user;
    float amax = 0;
    for (int i = 0; i < length; i++) amax = fmaxf(amax, history[i]);
    return amax;
}
static float half_scale(void *user, float amax, float old, float fp8_max) {
    (void)user;
    return amax > 0 ? fp8_max / amax / 2 : old;
}
TE_TEST_DEVICES(groups_with_functions_of_ones_own) {
    training arg = {0};
    arg.recipe = te_recipe_delayed_scaling();
    arg.recipe.delayed.amax_history_len = 3;
    arg.recipe.delayed.amax_fn = largest;
    arg.recipe.delayed.scale_fn = half_scale;
    arg.ranks = 3;
    rank_state *whole = run_ranks_on(te_ctx_device(te), false, 0, train_part, &arg), *all = run_ranks_on(te_ctx_device(te), false, 3, train_part, &arg);
    for (int r = 0; r < 3; r++)
        for (int i = 2; i < 6; i++) {
            test_case("rank %d, tensor %d", r, i);
            CHECK_BYTES("scales and histories", all[r].left[i], whole->left[i], whole->bytes[i]);
        }
}

/* Several modules, every recipe: the ranks meet in the same collectives in the same order, and nobody waits. */
TE_TEST_DEVICES(groups_of_several_modules) {
    for (int kind = TE_RECIPE_DELAYED; kind <= TE_RECIPE_NVFP4; kind++) {
        training arg = {0};
        arg.recipe = kind == TE_RECIPE_DELAYED ? te_recipe_delayed_scaling() : kind == TE_RECIPE_CURRENT ? te_recipe_current_scaling() : kind == TE_RECIPE_BLOCK ? te_recipe_block_scaling()
                   : kind == TE_RECIPE_MXFP8 ? te_recipe_mxfp8() : te_recipe_nvfp4();
        if (kind == TE_RECIPE_DELAYED) arg.recipe.delayed.amax_history_len = 3;
        arg.recipe.nvfp4.stochastic_rounding = kind == TE_RECIPE_NVFP4 ? TE_OFF : TE_DEFAULT;
        arg.ranks = 4;
        arg.several = true;
        rank_state *whole = run_ranks_on(te_ctx_device(te), false, 0, train_part, &arg), *all = run_ranks_on(te_ctx_device(te), false, 4, train_part, &arg);
        for (int r = 0; r < 4; r++) {
            test_case("recipe %s, rank %d", te_recipe_name((te_recipe_kind)kind), r);
            same_rows(te, &all[r], whole, 4, 0.1);
            CHECK_EQ_INT(all[r].num_left, kind == TE_RECIPE_DELAYED ? 14 : 2);
            if (!te_ctx_is_cuda(te))
                for (int i = 2; i < all[r].num_left; i++) CHECK_BYTES("scales and histories", all[r].left[i], whole->left[i], whole->bytes[i]);
            for (int i = 2; i < all[r].num_left; i++) CHECK_BYTES("as on the first rank", all[r].left[i], all[0].left[i], all[0].bytes[i]);
        }
    }
}

/* ---- a group of one's own ------------------------------------------------------------------------------------------- */

enum { LOGGED = 64 };
typedef struct logging {
    int64_t sizes[LOGGED];
    int calls, fail_at;
} logging;
static te_result logged_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    logging *l = (logging *)user;
    (void)te;
    if (op != TE_REDUCE_MAX) return TE_ERR_INVALID;
    if (l->calls < LOGGED) l->sizes[l->calls] = te_tensor_numel(x);
    if (++l->calls == l->fail_at) return TE_ERR_IO;
    return TE_OK;
}
static te_result unused_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    (void)user, (void)te, (void)x, (void)out;
    return TE_ERR_UNSUPPORTED;
}
static te_result unused_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    (void)user, (void)te, (void)x, (void)root;
    return TE_ERR_UNSUPPORTED;
}
static te_result unused_barrier(void *user) {
    (void)user;
    return TE_ERR_UNSUPPORTED;
}
static te_group *logging_group(te_ctx *te, logging *l) {
    te_group_desc d = {0};
    d.name = "logging";
    d.size = 2;
    d.user = l;
    d.all_reduce = logged_reduce;
    d.all_gather = d.reduce_scatter = unused_gather;
    d.broadcast = unused_broadcast;
    d.barrier = unused_barrier;
    return te_group_create(te, &d);
}

/* How many amaxes a step exchanges: one reduction a direction with delayed scaling, however many modules there are; one a tensor with
 * current scaling; NVFP4: one a copy with an amax of its own. */
TE_TEST_DEVICES(groups_exchange_no_more_than_they_must) {
    for (int kind = TE_RECIPE_DELAYED; kind <= TE_RECIPE_NVFP4; kind++) {
        static const int calls[] = {0, 2, 6, 0, 0, 2 * (2 + 1 + 2)}; /* NVFP4: transformed inputs and gradients have two amaxes, 2-D weights one */
        logging l = {{0}, 0, 0};
        te_group *group = logging_group(te, &l);
        te_linear_desc d = {0};
        d.in_features = d.out_features = 32;
        te_module *a = te_linear_create(te, &d), *b = te_linear_create(te, &d);
        te_recipe r = kind == TE_RECIPE_DELAYED ? te_recipe_delayed_scaling() : kind == TE_RECIPE_CURRENT ? te_recipe_current_scaling() : kind == TE_RECIPE_BLOCK ? te_recipe_block_scaling()
                    : kind == TE_RECIPE_MXFP8 ? te_recipe_mxfp8() : te_recipe_nvfp4();
        te_autocast_desc cast = {0};
        cast.recipe = &r;
        cast.amax_group = group;
        te_scope_begin(te);
        te_tensor *x = te_tensor_set_requires_grad(part(te, TE_BF16, 0, 16, 32, 0), true);
        te_autocast_begin(te, &cast);
        te_tensor *y = te_forward(b, te_forward(a, x));
        te_autocast_end(te);
        te_backward_from(y, y);
        test_case("recipe %s", te_recipe_name(r.kind));
        CHECK_OK(te);
        CHECK_EQ_INT(l.calls, calls[kind]);
        for (int i = 0; i < l.calls && i < LOGGED; i++) CHECK_EQ_INT(l.sizes[i], kind == TE_RECIPE_DELAYED ? i ? 4 : 6 : 1);
        te_scope_end(te);
        te_module_destroy(a);
        te_module_destroy(b);
        te_group_destroy(group);
    }
}

/* A collective that fails is named, and the tensor that was to be written stays. */
TE_TEST_DEVICES(groups_that_fail) {
    for (int kind = 0; kind < 2; kind++)
        for (int at = 1; at <= 1 + kind; at++) {
            test_case("kind %d, collective %d", kind, at);
            logging l = {{0}, 0, 0};
            te_quantizer_desc d = {0};
            d.kind = kind ? TE_QUANT_NVFP4 : TE_QUANT_CURRENT;
            d.nvfp4.rht = kind ? TE_ON : TE_DEFAULT;
            d.amax_group = logging_group(te, &l);
            te_quantizer *q = te_quantizer_create(te, &d);
            te_tensor *y = te_quantize(q, part(te, TE_BF16, 0, 32, COLS, 0)), *x = part(te, TE_BF16, 5, 32, COLS, 3), *data, *scale;
            REQUIRE_OK(te);
            void *before[6], *after[6];
            size_t bytes[6] = {0};
            for (int turn = 0; turn < 2; turn++) {
                for (int i = 0; i < 2; i++) {
                    te_tensor *amax = te_quantized_amax(y, i + 1);
                    te_quantized_view(y, i + 1, &data, &scale);
                    te_tensor *const parts[3] = {data, scale, amax ? amax : scale};
                    for (int k = 0; k < 3; k++) {
                        bytes[3 * i + k] = te_tensor_bytes(parts[k]);
                        (turn ? after : before)[3 * i + k] = test_read_bytes(parts[k]);
                    }
                }
                if (turn) break;
                l.calls = 0;
                l.fail_at = at;
                CHECK_EQ_INT(te_quantize_into(q, x, y, NULL), TE_ERR_IO);
                CHECK_ERROR(te, TE_ERR_IO, "te_all_reduce: group \"logging\", rank 0 of 2: it returned TE_ERR_IO");
            }
            for (int i = 0; i < 6; i++) CHECK_BYTES("as before", after[i], before[i], bytes[i]);
            l.calls = 0;
            CHECK(!te_quantize(q, x));
            CHECK_ERROR(te, TE_ERR_IO, "it returned TE_ERR_IO");
            l.fail_at = 0;
            CHECK_EQ_INT(te_quantize_into(q, x, y, NULL), TE_OK);
            CHECK_OK(te);
            te_quantizer_destroy(q);
            te_group_destroy(d.amax_group);
        }
}

/* One rank runs out of memory on its way: nobody waits for it. */
typedef struct starving {
    te_quant_kind kind;
    int request;
} starving;
static void starve_part(rank_state *s) {
    const starving *arg = (const starving *)s->arg;
    te_quantizer_desc d = {0};
    d.kind = arg->kind;
    d.amax_group = s->group;
    te_quantizer *q = te_quantizer_create(s->te, &d);
    te_tensor *x = part(s->te, TE_BF16, 16 * s->rank, 16, COLS, 0);
    EXPECT(s, te_barrier(s->group) == TE_OK);
    te_memory_trim(s->te);
    if (s->rank == 1) s->fail_at = s->requests + arg->request;
    s->failed = !te_quantize(q, x);
    s->fail_at = 0;
    EXPECT(s, s->failed == !te_ok(s->te));
    te_clear_error(s->te);
    te_quantizer_destroy(q);
}
TE_TEST(groups_with_a_rank_that_starves) {
    for (int k = 0; k < 2; k++) {
        int refusals = 0;
        for (int n = 1; n < 40; n++) {
            starving arg = {k ? TE_QUANT_NVFP4 : TE_QUANT_CURRENT, n};
            rank_state *all = run_ranks(3, starve_part, &arg);
            test_case("kind %d, request %d", k, n);
            CHECK(all[0].failed == all[1].failed && all[2].failed == all[1].failed);
            refusals += all[1].failed;
        }
        CHECK_MSG(refusals > 3 && refusals < 39, "%d refusals", refusals);
    }
}

/* A rank that fails in a region tells the others, which reduce amaxes where it ends; then all go on. */
typedef struct failing {
    te_recipe recipe;
    bool waits; /* the others wait for amaxes at the region's end */
} failing;
static void fail_in_region(rank_state *s) {
    const failing *arg = (const failing *)s->arg;
    te_ctx *te = s->te;
    te_linear_desc d = {0};
    te_autocast_desc cast = {0};
    d.in_features = d.out_features = 32;
    cast.recipe = &arg->recipe;
    cast.amax_group = s->group;
    te_module *m = te_linear_create(te, &d);
    for (int step = 0; step < 3; step++) {
        const bool fails = step == 1 && s->rank == 1;
        te_scope_begin(te);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_BF16, SHAPE(32, 32), 1), true);
        te_autocast_begin(te, &cast);
        if (fails) te_tensor_view(x, SHAPE(31, 31)); /* outside of modules, before the first amax */
        te_tensor *y = fails ? NULL : te_forward(m, x);
        te_autocast_end(te);
        if (y) te_backward(te_sum_all(y));
        EXPECT(s, te_ok(te) == (step != 1 || (!arg->waits && s->rank == 0)));
        if (step == 1 && arg->waits) EXPECT(s, strstr(te_error(te), "[31, 31]") && (s->rank == 1 || strstr(te_error(te), "rank 1 failed")));
        te_clear_error(te);
        te_scope_end(te);
        EXPECT(s, te_barrier(s->group) == TE_OK);
    }
    te_module_destroy(m);
}
TE_TEST(groups_with_a_rank_that_fails_in_a_region) {
    failing f[3] = {{te_recipe_delayed_scaling(), true}, {te_recipe_delayed_scaling(), false}, {te_recipe_mxfp8(), false}};
    f[1].recipe.delayed.no_reduce_amax = true;
    for (int i = 0; i < COUNT(f); i++) {
        test_case("%s, %s", te_recipe_name(f[i].recipe.kind), f[i].waits ? "amaxes of all ranks" : "amaxes of each rank");
        run_ranks(2, fail_in_region, &f[i]);
    }
}
