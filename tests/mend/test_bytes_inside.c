/* tests/mend/test_bytes_inside.c: two lists that private code lives by are whole and right: the fields of a recipe, and what each operation writes. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

#include "../../tools/catalogue.h"

/* ---- 5: the comparison of recipes knows every field ------------------------------------------------------------- */

/* Of two recipes that differ in one bit: they are the same if that bit is padding, and only then. A field that te__recipe_same forgets fails here. */
TE_TEST(p05_no_field_of_a_recipe_is_forgotten) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
    te_recipe ones, a, b;
    size_t padding = 0;
    memset(&ones, 0xFF, sizeof ones);
    __builtin_clear_padding(&ones); /* what is left of the ones is fields */
    for (size_t i = 0; i < sizeof a; i++) {
        memset(&a, 0, sizeof a);
        memset(&b, 0, sizeof b);
        ((unsigned char *)&b)[i] = 1;
        bool field = ((unsigned char *)&ones)[i] != 0;
        CHECK_MSG(te__recipe_same(&a, &b) == !field, "byte %zu is %s, and recipes that differ there are %s", i, field ? "of a field" : "padding",
                  field ? "the same" : "not");
        padding += !field;
    }
    CHECK(padding > 0); /* else this test has shown nothing */
    a.margin = b.margin = NAN; /* a recipe is the same as itself */
    memcpy(&b, &a, sizeof a);
    CHECK(te__recipe_same(&a, &b));
    return;
#endif
#endif
    SKIP("the compiler cannot tell padding from fields");
}

/* ---- 11: every write is counted --------------------------------------------------------------------------------- */

/* The tensors of one call, with their uses; each list's members apart. */
enum { SEEN = 64 };
typedef struct seen {
    te__arg_walk walk; /* first: what the walk hands on */
    te_tensor *x[SEEN];
    te__arg_use use[SEEN];
    int place[SEEN]; /* among all that the operation can name */
    uint64_t version[SEEN];
    void *bytes[SEEN];
    int n, visited;
} seen;
/* By place: what was said to be written, and what was seen to be. */
static uint64_t claimed[TE_OP_COUNT], written[TE_OP_COUNT];
static void see(te__arg_walk *w, void *slot, te__arg_use use) {
    seen *s = (seen *)w;
    te_tensor *x = te__arg_tensor(slot);
    int place = s->visited++;
    if (!x || s->n == SEEN) return;
    s->x[s->n] = x;
    s->place[s->n] = place;
    s->use[s->n++] = use;
}

static bool shares(const seen *s, int i) { /* its memory is also that of something written */
    for (int k = 0; k < s->n; k++)
        if (k != i && s->use[k] != TE__IN && s->x[k]->buffer == s->x[i]->buffer) return true;
    return false;
}

/* By the list, by what really happens to each tensor's bytes, and by `out`, which says it once more. */
static void check_call(te_ctx *te, te_op op, void *args, te_tensor *const *out, int num_out, const char *label) {
    seen s;
    memset(&s, 0, sizeof s);
    te__any_args filled;
    memcpy(&filled, args, te__ops[op].args_size); /* defaults, which uses may hang on */
    CHECK_EQ_INT(te__ops[op].check(te, &filled), TE_OK);
    REQUIRE_OK(te);
    te__walk_args(&s.walk, op, &filled, see, false);
    test_case("%s: %s", te_query_name(op), label);
    for (int i = 0; i < s.n; i++) {
        s.version[i] = te_tensor_version(s.x[i]);
        s.bytes[i] = test_read_bytes(s.x[i]);
    }
    CHECK_EQ_INT(te__run(te, op, args), TE_OK);
    CHECK_OK(te);
    for (int i = 0; i < s.n; i++) {
        bool grew = te_tensor_version(s.x[i]) > s.version[i];
        bool changed = memcmp(test_read_bytes(s.x[i]), s.bytes[i], te_tensor_bytes(s.x[i])) != 0;
        if (s.use[i] != TE__IN) claimed[op] |= (uint64_t)1 << s.place[i];
        if (changed) written[op] |= (uint64_t)1 << s.place[i];
        if (s.use[i] == TE__IN && !shares(&s, i))
            CHECK_MSG(!grew && !changed, "tensor %d (%s) is read, and %s", i, te_dtype_name(s.x[i]->dtype), changed ? "was written" : "counted as written");
        else
            CHECK_MSG(grew, "tensor %d (%s) is written, and not counted", i, te_dtype_name(s.x[i]->dtype));
    }
    for (int k = 0; k < num_out; k++) {
        int i = 0;
        while (i < s.n && s.x[i] != out[k]) i++;
        CHECK_MSG(i < s.n && s.use[i] != TE__IN, "output %d is not listed as one", k);
    }
}

/* Every tensor that a call can name is named by one at least: the catalogue's calls, and below those with what they leave out. A bit for each place
 * in the list of ops/record.c, set when a call had a tensor there. */
typedef struct cover {
    te__arg_walk walk;
    uint64_t named;
    int at;
} cover;
static void cover_slot(te__arg_walk *w, void *slot, te__arg_use use) {
    cover *c = (cover *)w;
    (void)use;
    if (te__arg_tensor(slot)) c->named |= (uint64_t)1 << c->at;
    c->at++;
}
/* Fields alone; lists come with every call. */
#define COUNT_T(field, use) +1
#define COUNT_L(field, n, use)
#define COUNT_OP(lower, UPPER, family) 0 TE__ARGS_##lower(COUNT_T, COUNT_L),
static const int num_fields[TE_OP_COUNT] = {0, TE_OP_LIST(COUNT_OP)};
#define NAME_T(field, use) #field " "
#define NAME_L(field, n, use)
#define NAME_OP(lower, UPPER, family) TE__ARGS_##lower(NAME_T, NAME_L) "",
static const char *const field_names[TE_OP_COUNT] = {"", TE_OP_LIST(NAME_OP)};
#define COVER_T(field, use) cover_slot(w, (void *)&a->field, TE__IN);
#define COVER_L(field, n, use)
#define COVER_OP(lower, UPPER, family)                          \
    static void cover_##lower(te__arg_walk *w, void *args) {     \
        te_op_##lower##_args *a = (te_op_##lower##_args *)args;        \
        TE__ARGS_##lower(COVER_T, COVER_L)(void) a, (void)w;     \
    }
TE_OP_LIST(COVER_OP)
#define COVER_ROW(lower, UPPER, family) cover_##lower,
static void (*const covers[TE_OP_COUNT])(te__arg_walk *, void *) = {NULL, TE_OP_LIST(COVER_ROW)};

static uint64_t covered[TE_OP_COUNT];
static void run_and_cover(te_ctx *te, te_op op, void *args, te_tensor *const *out, int num_out, const char *label) {
    cover c;
    memset(&c, 0, sizeof c);
    covers[op](&c.walk, args);
    covered[op] |= c.named;
    check_call(te, op, args, out, num_out, label);
}
static te_tensor *zeros(te_ctx *te, te_dtype dtype, int64_t rows, int64_t cols) {
    return cols ? te_tensor_zeros(te, dtype, SHAPE(rows, cols)) : te_tensor_zeros(te, dtype, SHAPE(rows));
}

/* The same call with more of its tensors. True while there is another `way`. */
static bool add_more(te_ctx *te, call *c, int way) {
    enum { M = 130, N = 264 };
    bool last = way == 1; /* of most operations' ways */
    te_tensor *one = te_tensor_full(te, TE_F32, SHAPE(1), 0.5), *one_out = zeros(te, TE_F32, 1, 0), *rng = zeros(te, TE_I64, 2, 0);
    te_tensor *no = zeros(te, TE_F32, 1, 0), *vm = zeros(te, TE_F32, M, 0), *mn = call_normal(te, TE_F32, 2, (const int64_t[]){M, N}, 9);
    if (way > 2) return false;
    switch (c->op) {
    case TE_OP_RANDOM: c->args.random.rng = rng; return way == 0;
    case TE_OP_AXPBY:
        c->args.axpby.alpha_device = one;
        c->args.axpby.divide_device = one;
        return way == 0;
    case TE_OP_AMAX:
        c->args.amax.noop = no;
        c->args.amax.keep = way == 1;
        return way < 2;
    case TE_OP_DELAYED_UPDATE: c->args.delayed_update.reduced = te_tensor_full(te, TE_F32, SHAPE(6), 2); return way == 0;
    case TE_OP_FP8_QUANTIZE:
        if (way == 0) {
            c->args.fp8_quantize.noop = no;
            c->args.fp8_quantize.dbias = NULL;
            c->args.fp8_quantize.x_amax = NULL;
            return !c->args.fp8_quantize.current || c->args.fp8_quantize.scale == NULL;
        }
        c->args.fp8_quantize.noop = NULL;
        c->args.fp8_quantize.current = true;
        c->args.fp8_quantize.scale = NULL;
        c->args.fp8_quantize.x_amax = te_tensor_from_host(te, TE_F32, SHAPE(2), (const float[]){3, 0});
        c->args.fp8_quantize.dbias = zeros(te, TE_F32, N, 0);
        return last;
    case TE_OP_BLOCK_QUANTIZE: c->args.block_quantize.noop = no; return way == 0;
    case TE_OP_MXFP8_QUANTIZE: c->args.mxfp8_quantize.noop = no; return way == 0;
    case TE_OP_SHARD_SCALES:
        if (way == 0) {
            c->args.shard_scales.multiplier = zeros(te, TE_F32, 2, 4);
            return true;
        }
        c->args.shard_scales.dtype = TE_DTYPE_NONE;
        if (way == 2) {
            c->args.shard_scales.scaling = TE_SCALING_MXFP8;
            c->args.shard_scales.amax = te_tensor_full(te, TE_F32, SHAPE(M, 9), 2);
            c->args.shard_scales.amax_col = te_tensor_full(te, TE_F32, SHAPE(5, N), 2);
            c->args.shard_scales.amax_tensor = NULL;
            c->args.shard_scales.row_scale = zeros(te, TE_F8E8M0, 256, 12);
            c->args.shard_scales.col_scale = zeros(te, TE_F8E8M0, 8, 384);
            return true;
        }
        c->args.shard_scales.multiplier = NULL;
        c->args.shard_scales.scaling = TE_SCALING_NVFP4;
        c->args.shard_scales.amax = te_tensor_full(te, TE_F32, SHAPE(9, 17), 2);
        c->args.shard_scales.amax_tensor = one;
        c->args.shard_scales.row_scale = zeros(te, TE_F8E4M3, 256, 20);
        c->args.shard_scales.col_scale = NULL;
        return true;
    case TE_OP_SHARD_CAST:
        if (way == 0) {
            c->args.shard_cast.multiplier = te_tensor_full(te, TE_F32, SHAPE(2, 4), 4);
            return true;
        }
        c->args.shard_cast.multiplier = NULL;
        if (way == 2) {
            c->args.shard_cast.scaling = TE_SCALING_NVFP4;
            c->args.shard_cast.dst = zeros(te, TE_F4E2M1, M, 272);
            c->args.shard_cast.scale = te_tensor_full(te, TE_F8E4M3, SHAPE(256, 20), 2);
            c->args.shard_cast.amax_tensor = one;
            c->args.shard_cast.amax = NULL;
            return true;
        }
        c->args.shard_cast.scaling = TE_SCALING_TENSOR;
        c->args.shard_cast.scale = one;
        c->args.shard_cast.amax = one_out;
        return true;
    case TE_OP_QUANT_ERROR: c->args.quant_error.limit = mn; return way == 0;
    case TE_OP_NVFP4_AMAX:
        c->args.nvfp4_amax.noop = no;
        c->args.nvfp4_amax.keep = way == 1;
        return way < 2;
    case TE_OP_NVFP4_QUANTIZE:
        if (!c->args.nvfp4_quantize.amax_col) return false;
        if (way == 0) {
            c->args.nvfp4_quantize.rng = rng;
            c->args.nvfp4_quantize.noop = no;
        } else
            c->args.nvfp4_quantize.measure = true; /* now the amaxes are written */
        return way < 2;
    case TE_OP_GEMM:
        if (c->args.gemm.scaling_a != TE_SCALING_TENSOR || c->args.gemm.accumulate) return false;
        c->args.gemm.epilogue = way ? TE_EPILOGUE_DGELU : TE_EPILOGUE_GELU; /* writes aux, or reads it */
        c->args.gemm.aux = zeros(te, c->args.gemm.d->dtype, c->args.gemm.m, c->args.gemm.n);
        c->args.gemm.bias_gradient = way ? zeros(te, TE_F32, c->args.gemm.n, 0) : NULL;
        c->args.gemm.bias = way ? NULL : zeros(te, TE_F32, c->args.gemm.n, 0);
        if (te__is_fp8(c->args.gemm.a->dtype)) {
            c->args.gemm.scale_a = one;
            c->args.gemm.scale_b = one;
        }
        return way < 2;
    case TE_OP_GROUPED_GEMM:
        if (c->args.grouped_gemm.along_k) return false;
        c->args.grouped_gemm.epilogue = way ? TE_EPILOGUE_DGELU : TE_EPILOGUE_GELU;
        c->args.grouped_gemm.bias = NULL;
        c->args.grouped_gemm.aux = zeros(te, c->args.grouped_gemm.d->dtype, M, N);
        return way < 2;
    case TE_OP_LAYERNORM_FWD:
    case TE_OP_RMSNORM_FWD: {
        te_norm_fwd_args *n = &c->args.layernorm_fwd;
        n->rstd = vm;
        if (c->op == TE_OP_LAYERNORM_FWD) n->mean = zeros(te, TE_F32, M, 0);
        if (way == 0 && c->op == TE_OP_RMSNORM_FWD && !te__is_fp8(n->y->dtype)) n->y_amax = one_out;
        n->amax = n->y_amax ? NULL : one_out;
        if (way == 0) return true;
        n->y = zeros(te, TE_F8E4M3, M, 272);
        n->y_col = zeros(te, TE_F8E4M3, N, 144);
        n->y_amax = NULL;
        n->amax = one_out;
        n->scale = one;
        n->scale_inv = zeros(te, TE_F32, 1, 0);
        return last;
    }
    case TE_OP_LAYERNORM_BWD:
    case TE_OP_RMSNORM_BWD: c->args.layernorm_bwd.add = mn; return way == 0;
    case TE_OP_ROPE: c->args.rope.start_positions = zeros(te, TE_I32, 2, 0); return way == 0;
    case TE_OP_QKV_ROPE: c->args.qkv_rope.start_positions = zeros(te, TE_I32, 2, 0); return way == 0;
    case TE_OP_QKV_ROPE_BWD: c->args.qkv_rope_bwd.start_positions = zeros(te, TE_I32, 2, 0); return way == 0;
    case TE_OP_ATTN_FWD:
        c->args.attn_fwd.rng = rng;
        c->args.attn_fwd.dropout_p = 0.1f;
        return way == 0;
    case TE_OP_ATTN_BWD: c->args.attn_bwd.rng = rng; return way == 0;
    case TE_OP_DROPOUT_ADD_FWD: c->args.dropout_add_fwd.rng = rng; return way == 0;
    case TE_OP_DROPOUT_ADD_BWD: c->args.dropout_add_bwd.rng = rng; return way == 0;
    case TE_OP_CROSS_ENTROPY_FWD: c->args.cross_entropy_fwd.count = one_out; return way == 0;
    case TE_OP_CROSS_ENTROPY_BWD: c->args.cross_entropy_bwd.count = one; return way == 0;
    case TE_OP_ADAM:
        c->args.adam.grad_scale = one;
        c->args.adam.found_inf = no;
        c->args.adam.lr_device = one;
        c->args.adam.bias_correction = te_tensor_full(te, TE_F32, SHAPE(2), 1.5);
        return way == 0;
    case TE_OP_L2NORM:
        c->args.l2norm.per_tensor = zeros(te, TE_F32, c->args.l2norm.num_tensors, 0);
        c->args.l2norm.clip = one_out;
        c->args.l2norm.max_norm = 1;
        return way == 0;
    case TE_OP_MULTI_SCALE:
        c->args.multi_scale.scale_device = one;
        te_tensor_fill((te_tensor *)c->args.multi_scale.in[0], INFINITY); /* for found_inf to be written */
        c->args.multi_scale.found_inf = one_out;
        return way == 0;
    default: return false;
    }
}

TE_TEST_DEVICES(p11_every_write_is_counted) {
    memset(covered, 0, sizeof covered);
    memset(claimed, 0, sizeof claimed);
    memset(written, 0, sizeof written);
    for (int pass = 0; pass < 2; pass++) {
        te_dtype dtype = pass ? TE_BF16 : TE_F32;
        call c;
        for (int i = 0; te_scope_begin(te), call_build(&c, te, i, dtype); i++) {
            REQUIRE_OK(te);
            run_and_cover(te, c.op, &c.args, c.out, c.num_out, c.label);
            for (int way = 0; add_more(te, &c, way); way++) run_and_cover(te, c.op, &c.args, NULL, 0, c.label);
            te_scope_end(te);
        }
        te_scope_end(te);
    }
    test_case("all calls together");
    for (int op = 1; op < TE_OP_COUNT; op++) {
        uint64_t all = ((uint64_t)1 << num_fields[op]) - 1;
        if (op == TE_OP_RMSNORM_FWD) all &= ~(uint64_t)(1 << 2 | 1 << 4); /* has no beta and no mean, though its args are LayerNorm's */
        if (op == TE_OP_RMSNORM_BWD) all &= ~(uint64_t)(1 << 3 | 1 << 8);
        CHECK_MSG(claimed[op] == (claimed[op] & written[op]), "%s: places %llx are said to be written, and no call was seen to", te_query_name((te_op)op),
                  (unsigned long long)(claimed[op] & ~written[op]));
        CHECK_MSG(covered[op] == all, "%s: no call names the tensors %llx of %s", te_query_name((te_op)op), (unsigned long long)(all & ~covered[op]),
                  field_names[op]);
    }
}

/* Asking changes nothing, nor does a warm-up. */
TE_TEST(p11_nothing_is_counted_that_was_not_written) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 8));
    te_op_fill_args fill = {0};
    te_explanation why;
    uint64_t before = te_tensor_version(x);
    fill.dst = x;
    te_explain(te, TE_OP_FILL, &fill, "sm_90", &why);
    CHECK(te_tensor_version(x) == before);
    te_warmup_begin(te);
    te_op_fill(te, &fill);
    te_warmup_end(te);
    CHECK(te_tensor_version(x) == before);
    te_op_fill(te, &fill);
    CHECK(te_tensor_version(x) > before);
    CHECK_OK(te);
}
