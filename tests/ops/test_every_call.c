/* tests/ops/test_every_call.c: what operations say of their args holds for every one of them: what each writes is counted, padding is cleared, defaults pass again, and the same mistake is the
 * same complaint everywhere. By the calls of tools/catalogue.h, with all tensors that they can name. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

#include "../../tools/catalogue.h"

/* The args of two calls are alike if their fields are: te__args_clear_padding clears what is no field's, and nothing else. */
TE_TEST(padding_of_args_is_cleared) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
    te__any_args fields, args;
    bool compared;
    size_t padding = 0;
#define OF_OP(lower, UPPER, family) \
    memset(&fields, 0xFF, sizeof fields); \
    memset(&args, 0xFF, sizeof args); \
    __builtin_clear_padding(&fields.lower); /* what is left of the ones is fields */ \
    te__args_clear_padding(TE_OP_##UPPER, &args); \
    compared = te__onnx_emitter(TE_OP_##UPPER) && te__onnx_emitter(TE_OP_##UPPER) != te__onnx_nothing; /* which has lists */ \
    for (size_t i = 0; i < sizeof fields.lower && compared; i++) { \
        bool field = ((unsigned char *)&fields)[i] != 0; \
        CHECK_MSG(field == (((unsigned char *)&args)[i] != 0), #lower ": byte %zu is %s", i, field ? "of a field, and cleared" : "padding, and stays"); \
        padding += !field; \
    }
    TE_OP_LIST(OF_OP)
#undef OF_OP
    CHECK(padding > 0);
    return;
#endif
#endif
    SKIP("the compiler cannot tell padding from fields");
}

/* ---- every write is counted ------------------------------------------------------------------------------------- */

/* The tensors of one call, with their uses; each list's members apart. */
enum { SEEN = 64 };
typedef struct seen {
    te_tensor *x[SEEN];
    te_arg_use use[SEEN];
    int place[SEEN]; /* among all that the operation can name */
    uint64_t version[SEEN];
    void *bytes[SEEN];
    int n;
} seen;
/* By place: what was said to be written, and what was seen to be. */
static uint64_t claimed[TE_OP_COUNT], written[TE_OP_COUNT];
static void see(seen *s, te_op op, const void *args) {
    te_arg list[SEEN];
    int n = (int)te_query_args(op, args, list, SEEN);
    CHECK(n <= SEEN);
    for (int i = 0; i < n && i < SEEN; i++) {
        if (!list[i].tensor) continue;
        s->x[s->n] = list[i].tensor;
        s->place[s->n] = i;
        s->use[s->n++] = list[i].use;
    }
}

static bool shares(const seen *s, int i) { /* its memory is also that of something written */
    for (int k = 0; k < s->n; k++)
        if (k != i && s->use[k] != TE_ARG_IN && s->x[k]->buffer == s->x[i]->buffer) return true;
    return false;
}

/* Defaults that a check has filled in pass it again, and nothing changes: hooks ask about the args of a call that is being made. */
static void check_again(te_ctx *te, te_op op, const void *args) {
    te__any_args once, twice;
    te__args l;
    memset(&once, 0, sizeof once);
    memcpy(&once, args, te__ops[op].args_size);
    CHECK_EQ_INT(te__check_args(te, &l, op, &once, true), TE_OK);
    twice = once;
    CHECK_EQ_INT(te__check_args(te, &l, op, &twice, true), TE_OK);
    CHECK_OK(te);
    CHECK_BYTES("args", &twice, &once, te__ops[op].args_size);
}
/* By the list, by what really happens to each tensor's bytes, and by `out`, which says it once more. */
static void check_call(te_ctx *te, te_op op, void *args, te_tensor *const *out, int num_out, const char *label) {
    seen s = TE_ZERO;
    CHECK(te_query_supported(te, op, args));
    see(&s, op, args);
    test_case("%s: %s", te_query_name(op), label);
    check_again(te, op, args);
    for (int i = 0; i < s.n; i++) {
        s.version[i] = te_tensor_version(s.x[i]);
        s.bytes[i] = test_read_bytes(s.x[i]);
    }
    CHECK_EQ_INT(te__run(te, op, args), TE_OK);
    CHECK_OK(te);
    for (int i = 0; i < s.n; i++) {
        bool grew = te_tensor_version(s.x[i]) > s.version[i];
        bool changed = memcmp(test_read_bytes(s.x[i]), s.bytes[i], te_tensor_bytes(s.x[i])) != 0;
        if (s.use[i] != TE_ARG_IN) claimed[op] |= (uint64_t)1 << s.place[i];
        if (changed) written[op] |= (uint64_t)1 << s.place[i];
        if (s.use[i] == TE_ARG_IN && !shares(&s, i))
            CHECK_MSG(!grew && !changed, "tensor %d (%s) is read, and %s", i, te_dtype_name(s.x[i]->dtype), changed ? "was written" : "counted as written");
        else
            CHECK_MSG(grew, "tensor %d (%s) is written, and not counted", i, te_dtype_name(s.x[i]->dtype));
    }
    for (int k = 0; k < num_out; k++) {
        int i = 0;
        while (i < s.n && s.x[i] != out[k]) i++;
        CHECK_MSG(i < s.n && s.use[i] != TE_ARG_IN, "output %d is not listed as one", k);
    }
}

/* Every tensor that a call can name is named by one at least: the catalogue's calls, and below those with what they leave out. A bit for each field in the
 * list of ops/args.c, set when a call had a tensor there. Fields alone; lists come with every call. */
static uint64_t fields_of(te_op op, const void *args, bool given, char *names, size_t size) {
    te_arg list[SEEN];
    uint64_t bits = 0;
    int n = (int)te_query_args(op, args, list, SEEN), at = 0;
    for (int i = 0; i < n; i++) {
        if (list[i].index >= 0) continue;
        if (!given || list[i].tensor) bits |= (uint64_t)1 << at;
        if (names) snprintf(names + strlen(names), size - strlen(names), "%s ", list[i].name);
        at++;
    }
    return bits;
}

static uint64_t covered[TE_OP_COUNT];
static void run_and_cover(te_ctx *te, te_op op, void *args, te_tensor *const *out, int num_out, const char *label) {
    covered[op] |= fields_of(op, args, true, NULL, 0);
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
    if (strstr(c->label, "groups of rows")) return false; /* with all that they can name */
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
    case TE_OP_JOINT_GEMM: {
        te_op_qkv_rope_args *r = &c->args.joint_gemm.rope;
        if (!r->q || way > 1) return false;
        r->angles.start_positions = way ? NULL : zeros(te, TE_I32, 2, 0);
        r->angles.positions = zeros(te, TE_I64, 2, 0);
        if (way) { /* by a table, of the one position that all tokens have, and into codes */
            memset(&r->angles, 0, offsetof(te_rope_angles, rotary_dim));
            r->angles.freqs = te_tensor_full(te, TE_F32, SHAPE(1, 1, 1, 64), 0.25);
            r->k_cache = te_tensor_zeros(te, TE_F8E4M3, SHAPE(8, 16, 2, 64));
            r->v_cache = te_tensor_zeros(te, TE_F8E4M3, SHAPE(8, 16, 2, 64));
            r->k_factors = te_tensor_zeros(te, TE_F8E8M0, SHAPE(8, 16, 2));
            r->v_factors = te_tensor_zeros(te, TE_F8E8M0, SHAPE(8, 16, 2));
        }
        return true;
    }
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
    case TE_OP_ROPE:
    case TE_OP_QKV_ROPE:
    case TE_OP_QKV_ROPE_BWD: {
        te_rope_angles *angles = c->op == TE_OP_ROPE ? &c->args.rope.angles : c->op == TE_OP_QKV_ROPE ? &c->args.qkv_rope.angles : &c->args.qkv_rope_bwd.angles;
        const te_tensor *x = c->op == TE_OP_ROPE ? c->args.rope.x : c->op == TE_OP_QKV_ROPE ? c->args.qkv_rope.q : c->args.qkv_rope_bwd.q;
        angles->start_positions = zeros(te, TE_I32, 2, 0);
        angles->positions = zeros(te, TE_I64, te_tensor_shape(x)[0], 0);
        if (way == 1) { /* by a table, of the one position that all tokens have */
            memset(angles, 0, offsetof(te_rope_angles, rotary_dim));
            angles->start_positions = NULL;
            angles->freqs = te_tensor_full(te, TE_F32, SHAPE(1, 1, 1, angles->rotary_dim ? angles->rotary_dim : te_tensor_shape(x)[te_tensor_ndim(x) - 1]), 0.25);
        }
        if (way == 2 && c->op == TE_OP_QKV_ROPE && !c->args.qkv_rope.k_cache) {
            te_op_qkv_rope_args *a = &c->args.qkv_rope;
            a->rotated = te_tensor_zeros(te, te_tensor_dtype(a->qkv), te_tensor_ndim(a->qkv), te_tensor_shape(a->qkv));
            a->q = a->k = a->v = NULL;
        }
        if (way == 2 && c->op == TE_OP_QKV_ROPE_BWD) {
            te_op_qkv_rope_bwd_args *a = &c->args.qkv_rope_bwd;
            a->rotated = te_tensor_zeros(te, te_tensor_dtype(a->qkv), te_tensor_ndim(a->qkv), te_tensor_shape(a->qkv));
            a->q = a->k = a->v = NULL;
        }
        return way < (c->op == TE_OP_ROPE || (c->op == TE_OP_QKV_ROPE && c->args.qkv_rope.k_cache) ? 2 : 3);
    }
    case TE_OP_ATTN_FWD:
        if (c->args.attn_fwd.rule.k_factors) return false; /* a cache of codes has neither dropout nor fp8 */
        c->args.attn_fwd.rng = rng;
        c->args.attn_fwd.rule.dropout_p = 0.1f;
        c->args.attn_fwd.fp8.s_dtype = TE_F8E4M3;
        c->args.attn_fwd.fp8.s_scale = one;
        c->args.attn_fwd.fp8.s_amax = one_out;
        for (int i = 0; i < TE_SCORE_MOD_AUX; i++) c->args.attn_fwd.rule.score_mod.aux[i] = zeros(te, TE_F32, 1, 0);
        return way == 0;
    case TE_OP_ATTN_BWD:
        c->args.attn_bwd.rng = rng;
        c->args.attn_bwd.fp8.s_dtype = c->args.attn_bwd.fp8.dp_dtype = TE_F8E5M2;
        c->args.attn_bwd.fp8.s_scale = one;
        c->args.attn_bwd.fp8.dp_scale = zeros(te, TE_F32, 1, 0);
        te_tensor_fill(c->args.attn_bwd.fp8.dp_scale, 8);
        c->args.attn_bwd.fp8.dp_amax = one_out;
        for (int i = 0; i < TE_SCORE_MOD_AUX; i++) c->args.attn_bwd.rule.score_mod.aux[i] = zeros(te, TE_F32, 1, 0);
        return way == 0;
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
    case TE_OP_SGD:
        c->args.sgd.grad_scale = one;
        c->args.sgd.found_inf = no;
        c->args.sgd.lr_device = one;
        return way == 0;
    case TE_OP_L2NORM:
        c->args.l2norm.per_tensor = zeros(te, TE_F32, c->args.l2norm.num_tensors, 0);
        c->args.l2norm.clip = one_out;
        c->args.l2norm.max_norm = 1;
        te_tensor_fill((te_tensor *)c->args.l2norm.tensors[0], INFINITY); /* for found_inf to be written */
        return way == 0;
    case TE_OP_MULTI_SCALE:
        c->args.multi_scale.scale_device = one;
        te_tensor_fill((te_tensor *)c->args.multi_scale.in[0], INFINITY); /* for found_inf to be written */
        c->args.multi_scale.found_inf = one_out;
        return way == 0;
    case TE_OP_MOE_CHUNK_MAP:
        c->args.moe_chunk_map.sorted_index = NULL;
        c->args.moe_chunk_map.offsets = te_tensor_from_host(te, TE_I64, SHAPE(4), (const int64_t[]){0, 14, 14, 17});
        return way == 0;
    case TE_OP_MOE_PERMUTE: c->args.moe_permute.pad_offsets = zeros(te, TE_I64, 40, 0); return way == 0;
    case TE_OP_MOE_UNPERMUTE:
        c->args.moe_unpermute.pad_offsets = zeros(te, TE_I64, 40, 0);
        c->args.moe_unpermute.permuted_probs = te_tensor_full(te, TE_F32, SHAPE(2 * M), 0.5);
        c->args.moe_unpermute.probs = zeros(te, TE_F32, M, 40);
        return way == 0;
    case TE_OP_MOE_UNPERMUTE_BWD: c->args.moe_unpermute_bwd.pad_offsets = zeros(te, TE_I64, 40, 0); return way == 0;
    case TE_OP_MOE_ROUTER_FWD:
        c->args.moe_router_fwd.routing_bits = zeros(te, TE_U8, M, N / 8);
        c->args.moe_router_fwd.topk_indices = zeros(te, TE_I64, M, 8);
        return way == 0;
    case TE_OP_MOE_ROUTER_BWD:
        c->args.moe_router_bwd.routing_map = call_mask(te, M, N);
        c->args.moe_router_bwd.all_scores = false;
        return way == 0;
    case TE_OP_MOE_AUX_LOSS_FWD: c->args.moe_aux_loss_fwd.total_device = te_tensor_full(te, TE_I64, SHAPE(1), 7); return way == 0;
    case TE_OP_MOE_AUX_LOSS_BWD: c->args.moe_aux_loss_bwd.total_device = te_tensor_full(te, TE_I64, SHAPE(1), 7); return way == 0;
    case TE_OP_SOFTCAP: c->args.softcap.dy = mn; return way == 0;
    case TE_OP_STEP_NUMBERS: c->args.step_numbers.step_device = one; return way == 0;
    default: return false;
    }
}

TE_TEST_DEVICES(every_write_is_counted) {
    memset(covered, 0, sizeof covered);
    memset(claimed, 0, sizeof claimed);
    memset(written, 0, sizeof written);
    for (int pass = 0; pass < 2; pass++) {
        te_dtype dtype = pass ? TE_BF16 : TE_F32;
        call c;
        for (int i = 0; te_scope_begin(te), call_build(&c, te, i, dtype); i++) {
            REQUIRE_OK(te);
            if ((i + pass) % test_every_sanitized(1) == 0) { /* with a sanitizer each call in one format */
                run_and_cover(te, c.op, &c.args, c.out, c.num_out, c.label);
                for (int way = 0; add_more(te, &c, way); way++) run_and_cover(te, c.op, &c.args, NULL, 0, c.label);
            }
            te_scope_end(te);
        }
        te_scope_end(te);
    }
    test_case("all calls together");
    for (int op = 1; op < TE_OP_COUNT; op++) {
        te__any_args none = TE_ZERO;
        char names[512] = "";
        uint64_t all = fields_of((te_op)op, &none, false, names, sizeof names);
        if (op == TE_OP_RMSNORM_FWD) all &= ~(uint64_t)(1 << 2 | 1 << 4); /* has no beta and no mean, though its args are LayerNorm's */
        if (op == TE_OP_RMSNORM_BWD) all &= ~(uint64_t)(1 << 3 | 1 << 8);
        CHECK_MSG(claimed[op] == (claimed[op] & written[op]), "%s: places %llx are said to be written, and no call was seen to", te_query_name((te_op)op),
                  (unsigned long long)(claimed[op] & ~written[op]));
        CHECK_MSG(covered[op] == all, "%s: no call names the tensors %llx of %s", te_query_name((te_op)op), (unsigned long long)(all & ~covered[op]),
                  names);
    }
}

/* Defaults that come of sizes, where these are 0. */
TE_TEST(defaults_of_empty_tensors_pass_again) {
    te_ctx *te = test_context("cpu");
    te_tensor *none = te_tensor_zeros(te, TE_BF16, SHAPE(3, 0)), *one = te_tensor_zeros(te, TE_F32, SHAPE(1));
    for (int gated = 0; gated < 2; gated++) {
        test_case("gated %d", gated);
        te_op_act_fwd_args f = {.x = none, .activation = gated ? TE_SWIGLU : TE_GELU, .y = te_tensor_zeros(te, TE_F8E4M3, SHAPE(3, 0)), .col = te_tensor_zeros(te, TE_F8E4M3, SHAPE(0, 3)), .scale = one};
        check_again(te, TE_OP_ACT_FWD, &f);
        te_op_act_bwd_args b = {.x = none, .dy = none, .activation = f.activation, .dx = f.y, .col = f.col, .scale = one};
        check_again(te, TE_OP_ACT_BWD, &b);
    }
    te_op_moe_index_map_args map = {.experts = te_tensor_zeros(te, TE_I32, SHAPE(0, 2)), .row_id_map = te_tensor_zeros(te, TE_I32, SHAPE(0))};
    check_again(te, TE_OP_MOE_INDEX_MAP, &map);
}

/* Asking changes nothing, nor does a warm-up. */
TE_TEST(nothing_is_counted_that_was_not_written) {
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

/* ---- the same mistake is the same complaint, in every place of every operation ------------------------------------ */

/* `args` with one tensor replaced: refused by calls and by questions, with this code, the operation and the field in the message, and nothing written. */
static void refused(te_ctx *te, te__args *l, void *args, int k, int64_t i, te_tensor *instead, bool described, te_result code, const char *text) {
    const te__arg *p = &l->arg[k];
    te_tensor *x = te__arg_tensor(p, i);
    uint64_t writes = te->writes;
    te_explanation e;
    char start[128], index[32] = "";
    if (p->list) snprintf(index, sizeof index, "[%lld]", (long long)i);
    snprintf(start, sizeof start, "%s: %s%s", te_query_name(l->op), p->name, index);
    memcpy(te__arg_slot(p, i), &instead, sizeof instead);
    te_result result = te__run(te, l->op, args);
    const char *error = te_error(te);
    CHECK_MSG(result == code && strncmp(error, start, strlen(start)) == 0 && strstr(error, text), "%s: expected %s \"%s...%s\", got %s \"%s\"",
              te_query_name(l->op), te_result_name(code), start, text, te_result_name(result), error);
    te_clear_error(te);
    CHECK_MSG(te->writes == writes, "%s: something was written", start);
    if (!described) CHECK_MSG(te_explain(te, l->op, args, "sm_90", &e) == code, "%s: te_explain says %s", start, te_error(te));
    te_clear_error(te);
    memcpy(te__arg_slot(p, i), &x, sizeof x);
}

static void every_mistake(te_ctx *te, te_ctx *other, te_tensor *quantized, te_op op, void *args) {
    te__args l;
    te__args_of(&l, op, args, true);
    for (int k = 0; k < l.n; k++)
        for (int64_t i = 0; i < te__arg_count(&l.arg[k]); i++) {
            const te_tensor *x = te__arg_tensor(&l.arg[k], i);
            uint32_t flags = l.arg[k].flags;
            int wrong = 1;
            if (!x) {
                CHECK_MSG(flags & TE__OPT, "%s: %s is needed and not given", te_query_name(op), l.arg[k].name);
                continue;
            }
            if (!(flags & TE__OPT)) refused(te, &l, args, k, i, NULL, false, TE_ERR_STATE, " is NULL; a tensor is needed there");
            refused(te, &l, args, k, i, te_tensor_empty(other, x->dtype, x->ndim, x->shape), false, TE_ERR_INVALID, " belongs to another context");
            refused(te, &l, args, k, i, quantized, false, TE_ERR_DTYPE, " is a quantized tensor; te_dequantize it");
            refused(te, &l, args, k, i, te_tensor_describe(te, x->dtype, x->ndim, x->shape), true, TE_ERR_STATE, "was made by te_tensor_describe and has no memory");
            while (wrong < TE_DTYPE_COUNT && (flags >> wrong & 1)) wrong++;
            REQUIRE(wrong < TE_DTYPE_COUNT);
            refused(te, &l, args, k, i, te_tensor_empty(te, (te_dtype)wrong, x->ndim, x->shape), false, TE_ERR_DTYPE, " is needed");
            if (!(flags & TE__STRIDED) && x->dtype != TE_F4E2M1)
                refused(te, &l, args, k, i, te_tensor_transpose(te_tensor_empty(te, x->dtype, SHAPE(3, 5)), 0, 1), false, TE_ERR_SHAPE, " [5, 3] is strided");
        }
}

/* Two tensors of a call in the same memory, and a little apart: refused with both names, unless the list says that it is fine. */
static int overlaps_refused, overlaps_allowed;
static void every_overlap(te_ctx *te, te_op op, void *args) {
    te__args l;
    te__args_of(&l, op, args, true);
    for (int o = 0; o < l.n; o++)
        for (int k = 0; k < l.n; k++) {
            te__arg *out = &l.arg[o], *with = &l.arg[k];
            te_tensor *x = te__arg_count(out) ? te__arg_tensor(out, 0) : NULL, *y = te__arg_count(with) ? te__arg_tensor(with, 0) : NULL;
            uint32_t both = out->flags & with->flags;
            bool in = !(with->flags & TE__OUT);
            int64_t n = x ? te_tensor_numel(x) : 0;
            if (o == k || !x || !y || !(out->flags & TE__OUT) || (!in && k < o) || x->dtype != y->dtype || !te__same_shape(x, y) || x->dtype == TE_F4E2M1 || !n) continue;
            for (int shift = 0; shift < 2 && n > shift; shift++) {
                te_tensor *base = te_tensor_zeros(te, x->dtype, SHAPE(n + 16)), *a = te_tensor_view(te_tensor_narrow(base, 0, 0, n), x->ndim, x->shape);
                te_tensor *b = te_tensor_view(te_tensor_narrow(base, 0, shift ? n > 8 ? 8 : 1 : 0, n), x->ndim, x->shape);
                bool fine = in ? (both & TE__MEETS) || (!shift && (both & TE__SAME)) : !shift && (both & TE__TWIN);
                const char *error;
                test_case("%s: %s and %s, %s", te_query_name(op), out->name, with->name, shift ? "overlapping" : "the same");
                REQUIRE_OK(te);
                memcpy(te__arg_slot(out, 0), &a, sizeof a);
                memcpy(te__arg_slot(with, 0), &b, sizeof b);
                te_result result = te__run(te, op, args);
                error = te_error(te);
                if (fine) CHECK_MSG(result == TE_OK, "%s", error);
                else
                    CHECK_MSG(result == TE_ERR_INVALID && strstr(error, out->name) && strstr(error, with->name) && strstr(error, "0x") &&
                                  strstr(error, shift ? "overlap" : "are the same memory"), "%s: %s", te_result_name(result), error);
                te_clear_error(te);
                if (!fine) CHECK(!te_query_supported(te, op, args));
                overlaps_refused += !fine;
                overlaps_allowed += fine;
                memcpy(te__arg_slot(out, 0), &x, sizeof x);
                memcpy(te__arg_slot(with, 0), &y, sizeof y);
            }
        }
}

TE_TEST(every_operation_refuses_alike) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    te_quantizer_desc d = {0};
    d.kind = TE_QUANT_CURRENT;
    te_quantizer *quantizer = te_quantizer_create(te, &d);
    te_tensor *quantized = te_quantize(quantizer, te_tensor_normal(te, TE_BF16, SHAPE(32, 32), 0, 1));
    call c;
    REQUIRE_OK(te);
    overlaps_refused = overlaps_allowed = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; te_scope_begin(te), te_scope_begin(other), call_build(&c, te, i, pass ? TE_BF16 : TE_F32); i++) {
            for (int way = -1; (i + pass) % test_every_sanitized(1) == 0 && (way < 0 || add_more(te, &c, way)); way++) {
                test_case("%s: %s, way %d", te_query_name(c.op), c.label, way);
                every_mistake(te, other, quantized, c.op, &c.args);
                every_overlap(te, c.op, &c.args);
            }
            te_scope_end(te);
            te_scope_end(other);
        }
        te_scope_end(te);
        te_scope_end(other);
    }
    CHECK_MSG(overlaps_refused > 200 / test_every_sanitized(1) && overlaps_allowed > 10 / test_every_sanitized(1), "%d pairs were refused, %d allowed", overlaps_refused, overlaps_allowed);
    te_quantizer_destroy(quantizer);
    CHECK_OK(te);
}
