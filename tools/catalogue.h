/* catalogue.h: one typical call of every raw operation, for tools that go through them all: te_explain asks what each would do,
 * te_info --selftest runs each on the GPU and on the CPU and compares. Public API alone. */
#ifndef TE_CATALOGUE_H_INCLUDED
#define TE_CATALOGUE_H_INCLUDED

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALL_MAX_OUTPUTS = 8 };

/* A call that is ready to be made. Tensors belong to the context's innermost scope. */
typedef struct call {
    const char *label;
    te_op op;
    union {
#define CALL_MEMBER(lower, UPPER, family) te_op_##lower##_args lower;
        TE_OP_LIST(CALL_MEMBER)
#undef CALL_MEMBER
    } args;
    te_tensor *out[CALL_MAX_OUTPUTS];
    int num_out;
    double tolerance; /* normalised error that GPU and CPU may differ by; 0: bytes */
} call;

/* How far two correct implementations may be apart, by the format that a result is rounded to: half a unit of the last place for the one
 * rounding, doubled, since sums in another order move values across a rounding boundary. */
static inline double call_tolerance(te_dtype d) { return d == TE_F32 ? 1e-5 : d == TE_F16 ? 1e-3 : 8e-3; }

/* Normal numbers from a fixed seed: a 64-bit mix, then the sum of four uniforms. */
static inline te_tensor *call_normal(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, uint64_t seed) {
    int64_t n = 1, i;
    te_tensor *x;
    float *host;
    for (i = 0; i < ndim; i++) n *= shape[i];
    host = (float *)malloc((size_t)(n ? n : 1) * sizeof(float));
    if (!host) return NULL;
    for (i = 0; i < n; i++) {
        uint64_t z = (seed << 40) + (uint64_t)i * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        host[i] = ((float)(z & 0xFFFF) + (float)(z >> 16 & 0xFFFF) + (float)(z >> 32 & 0xFFFF) + (float)(z >> 48) - 131070.0f) * (1.0f / 37837.0f);
    }
    x = te_tensor_from_f32(te, dtype, ndim, shape, host);
    free(host);
    return x;
}
static inline te_tensor *call_out(call *c, te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) {
    te_tensor *x = te_tensor_zeros(te, dtype, ndim, shape);
    if (c->num_out < CALL_MAX_OUTPUTS) c->out[c->num_out++] = x;
    return x;
}
/* Two sequences of 60 and 77 queries and of 91 and 50 keys, with padding between them. */
static inline te_attn_rule call_packed(te_ctx *te) {
    static const int32_t q[3] = {0, 60, 137}, kv[3] = {0, 91, 141}, q_padded[3] = {0, 64, 144}, kv_padded[3] = {3, 96, 160};
    const int64_t three[1] = {3}, slopes[2] = {2, 8};
    te_attn_rule x;
    memset(&x, 0, sizeof x);
    x.mask = TE_MASK_PADDING_CAUSAL;
    x.cu_seqlens_q = te_tensor_from_host(te, TE_I32, 1, three, q);
    x.cu_seqlens_kv = te_tensor_from_host(te, TE_I32, 1, three, kv);
    x.cu_seqlens_q_padded = te_tensor_from_host(te, TE_I32, 1, three, q_padded);
    x.cu_seqlens_kv_padded = te_tensor_from_host(te, TE_I32, 1, three, kv_padded);
    x.max_seqlen_q = 80;
    x.max_seqlen_kv = 96;
    x.core_attention_bias_type = TE_ATTN_BIAS_ALIBI;
    x.alibi_slopes = te_tensor_full(te, TE_F32, 2, slopes, 0.125);
    return x;
}
/* A bias for each head, a mask for all that hides every third key, and an offset of the softmax; for the catalogue's [77, 2, 8, 64]. */
static inline te_attn_rule call_biased(te_ctx *te, te_dtype dtype) {
    const int64_t bias[4] = {1, 8, 77, 77}, keys[4] = {1, 1, 1, 77}, heads[1] = {8};
    unsigned char hidden[77];
    te_attn_rule x;
    int i;
    memset(&x, 0, sizeof x);
    for (i = 0; i < 77; i++) hidden[i] = i % 3 == 1;
    x.mask = TE_MASK_ARBITRARY;
    x.attention_mask = te_tensor_from_host(te, TE_U8, 4, keys, hidden);
    x.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE;
    x.core_attention_bias = call_normal(te, dtype, 4, bias, 6);
    x.softmax_type = TE_SOFTMAX_LEARNABLE;
    x.softmax_offset = call_normal(te, TE_F32, 1, heads, 7);
    return x;
}
/* E2M1 codes [rows, ld], ld even: every pair of codes comes up. */
static inline te_tensor *call_fp4(te_ctx *te, int64_t rows, int64_t ld) {
    const int64_t shape[2] = {rows, ld};
    unsigned char *host = (unsigned char *)malloc((size_t)(rows * ld / 2));
    te_tensor *x;
    int64_t i;
    if (!host) return NULL;
    for (i = 0; i < rows * ld / 2; i++) host[i] = (unsigned char)(i * 167 + i / 251);
    x = te_tensor_from_host(te, TE_F4E2M1, 2, shape, host);
    free(host);
    return x;
}
static inline te_tensor *call_ids(te_ctx *te, int64_t n, int range) {
    int32_t *host = (int32_t *)malloc((size_t)n * sizeof(int32_t));
    te_tensor *x;
    int64_t i;
    if (!host) return NULL;
    for (i = 0; i < n; i++) host[i] = (int32_t)((i * 7919) % range);
    x = te_tensor_from_host(te, TE_I32, 1, &n, host);
    free(host);
    return x;
}

/* The group of each of `rows` rows: 0, then 2, then 1, and of the last ones none. */
static inline te_tensor *call_groups(te_ctx *te, int64_t rows) {
    int32_t host[256];
    int64_t i;
    for (i = 0; i < rows; i++) host[i] = i < 48 ? 0 : i < 112 ? 2 : i < 128 ? 1 : -1;
    return te_tensor_from_host(te, TE_I32, 1, &rows, host);
}

/* u8 [1, 1, n, n]: row i sees keys 0 .. i. n up to 80. */
static inline te_tensor *call_causal_mask(te_ctx *te, int64_t n) {
    unsigned char host[80 * 80];
    const int64_t shape[4] = {1, 1, n, n};
    int64_t i;
    for (i = 0; i < n * n; i++) host[i] = i % n <= i / n;
    return te_tensor_from_host(te, TE_U8, 4, shape, host);
}
/* A routing mask of two experts for each token. */
static inline te_tensor *call_mask(te_ctx *te, int64_t tokens, int64_t experts) {
    const int64_t shape[2] = {tokens, experts};
    uint8_t *host = (uint8_t *)calloc((size_t)(tokens * experts), 1);
    te_tensor *x;
    int64_t t;
    if (!host) return NULL;
    for (t = 0; t < tokens; t++) host[t * experts + t * 7 % experts] = host[t * experts + (t * 11 + 3) % experts] = 1;
    x = te_tensor_from_host(te, TE_U8, 2, shape, host);
    free(host);
    return x;
}
static inline te_tensor *call_mask_map(te_ctx *te, int64_t tokens, int64_t experts) {
    const int64_t shape[2] = {tokens, 2 * experts + 1};
    te_op_moe_mask_map_args a;
    memset(&a, 0, sizeof a);
    a.routing_map = call_mask(te, tokens, experts);
    a.row_id_map = te_tensor_empty(te, TE_I32, 2, shape);
    te_op_moe_mask_map(te, &a);
    return a.row_id_map;
}

/* Bytes from low to low + range - 1: codes and scales of formats that no f32 is rounded to. */
static inline te_tensor *call_bytes(te_ctx *te, te_dtype dtype, int64_t rows, int64_t cols, int low, int range) {
    size_t n = (size_t)(rows * cols), i;
    uint8_t *host = (uint8_t *)malloc(n);
    const int64_t shape[2] = {rows, cols};
    te_tensor *x;
    if (!host) return NULL;
    for (i = 0; i < n; i++) host[i] = (uint8_t)(low + (int)((uint32_t)i * 2654435761u >> 16) % range);
    x = te_tensor_from_host(te, dtype, 2, shape, host);
    free(host);
    return x;
}

enum { CALL_END = 200 }; /* above all numbers of calls, which need not follow each other */

/* Builds the call of a number for `dtype`, or with `probe` its op and label alone; false: it has none. Sizes are off-tile on purpose. */
static inline bool call_numbered(call *c, te_ctx *te, int index, te_dtype dtype, bool probe) {
    const int64_t M = 130, N = 264, K = 136, one[1] = {1}, three[1] = {3}, vm[1] = {M}, vn[1] = {N}, mn[2] = {M, N}, mk[2] = {M, K}, nk[2] = {N, K}, nm[2] = {N, 144};
    const int64_t m2n[2] = {M, 2 * N}, row[2] = {M, 272}, scales[1] = {6}, history[2] = {4, 6};
    const int64_t packed_q[3] = {150, 8, 64}, packed_kv[3] = {170, 2, 64}, eight[1] = {8};
    const int64_t q[4] = {77, 2, 8, 64}, kv[4] = {77, 2, 2, 64}, lse[3] = {2, 8, 77}, packed[3] = {77, 2, 12 * 64}, table[2] = {100, N}, slice[1] = {20001};
    static te_adam_tensor adam[1];
    static te_sgd_tensor sgd[1];
    static const te_tensor *list[2];
    static te_tensor *list_out[1];
    static te_tensor *states[2], *state_scales[1];
    memset(c, 0, sizeof *c);
    c->tolerance = call_tolerance(dtype);
#define CALL(number, OP, text)  \
    case number:                \
        c->op = TE_OP_##OP;     \
        c->label = text;        \
        if (probe) return true;
    switch (index) {
        CALL(0, COPY, "copy to f32")
        c->args.copy.src = call_normal(te, dtype, 2, mn, 1);
        c->args.copy.dst = call_out(c, te, TE_F32, 2, mn);
        c->tolerance = 0;
        break;
        CALL(1, FILL, "fill")
        c->args.fill.dst = call_out(c, te, dtype, 2, mn);
        c->args.fill.value = 0.3;
        c->tolerance = 0;
        break;
        CALL(2, RANDOM, "random normal")
        c->args.random.dst = call_out(c, te, dtype, 2, mn);
        c->args.random.kind = TE_RANDOM_NORMAL;
        c->args.random.b = 1;
        c->args.random.seed = 7;
        c->tolerance = 0;
        break;
        CALL(3, AXPBY, "axpby")
        c->args.axpby.x = call_normal(te, dtype, 2, mn, 1);
        c->args.axpby.y = call_normal(te, dtype, 2, mn, 2);
        c->args.axpby.out = call_out(c, te, dtype, 2, mn);
        c->args.axpby.alpha = 0.5f;
        c->args.axpby.beta = 2;
        break;
        CALL(4, SUM, "sum")
        c->args.sum.x = call_normal(te, dtype, 2, mn, 1);
        c->args.sum.out = call_out(c, te, TE_F32, 1, one);
        c->tolerance = 1e-4; /* the sum of 34320 values of either sign is small beside them */
        break;
        CALL(5, COLUMN_SUM, "column sum")
        c->args.column_sum.x = call_normal(te, dtype, 2, mn, 1);
        c->args.column_sum.out = call_out(c, te, dtype, 1, vn);
        break;
        CALL(6, EMBEDDING_FWD, "embedding")
        c->args.embedding_fwd.ids = call_ids(te, M, 100);
        c->args.embedding_fwd.table = call_normal(te, dtype, 2, table, 1);
        c->args.embedding_fwd.y = call_out(c, te, dtype, 2, mn);
        c->tolerance = 0;
        break;
        CALL(7, EMBEDDING_BWD, "embedding backward")
        c->args.embedding_bwd.ids = call_ids(te, M, 100);
        c->args.embedding_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.embedding_bwd.dtable = call_out(c, te, dtype, 2, table);
        break;
        CALL(8, AMAX, "amax")
        c->args.amax.x = call_normal(te, dtype, 2, mn, 1);
        c->args.amax.amax = call_out(c, te, TE_F32, 1, one);
        c->tolerance = 0;
        break;
        CALL(9, SCALE_FROM_AMAX, "scale from amax")
        c->args.scale_from_amax.amax = call_normal(te, TE_F32, 1, scales, 1);
        c->args.scale_from_amax.scale = call_out(c, te, TE_F32, 1, scales);
        c->args.scale_from_amax.scale_inv = call_out(c, te, TE_F32, 1, scales);
        c->args.scale_from_amax.fp8_max = 448;
        c->tolerance = 0;
        break;
        CALL(10, DELAYED_UPDATE, "delayed update")
        states[0] = call_out(c, te, TE_F32, 2, history);
        te_tensor_copy(states[0], call_normal(te, TE_F32, 2, history, 1));
        state_scales[0] = call_out(c, te, TE_F32, 1, scales);
        c->args.delayed_update.amax_history = states;
        c->args.delayed_update.scale = state_scales;
        c->args.delayed_update.count = 1;
        c->args.delayed_update.fp8_max = 448;
        c->tolerance = 0;
        break;
        CALL(11, FP8_QUANTIZE, "quantize e4m3, both copies")
        c->args.fp8_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.fp8_quantize.row = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.fp8_quantize.col = call_out(c, te, TE_F8E4M3, 2, nm);
        c->args.fp8_quantize.scale = te_tensor_full(te, TE_F32, 1, one, 100);
        c->args.fp8_quantize.scale_inv = call_out(c, te, TE_F32, 1, one);
        c->args.fp8_quantize.amax = call_out(c, te, TE_F32, 1, one);
        c->tolerance = 0;
        break;
        CALL(12, FP8_DEQUANTIZE, "dequantize")
        c->args.fp8_dequantize.q = call_normal(te, TE_F8E4M3, 2, row, 1);
        c->args.fp8_dequantize.scale_inv = te_tensor_full(te, TE_F32, 1, one, 0.01);
        c->args.fp8_dequantize.y = call_out(c, te, dtype, 2, mn);
        c->tolerance = 0;
        break;
        CALL(13, TRANSPOSE, "transpose of codes")
        c->args.transpose.src = call_normal(te, TE_F8E4M3, 2, row, 1);
        c->args.transpose.dst = call_out(c, te, TE_F8E4M3, 2, nm);
        c->args.transpose.rows = M;
        c->args.transpose.columns = N;
        c->tolerance = 0;
        break;
        CALL(14, DELAYED_GATHER, "gather of amaxes")
        states[0] = call_normal(te, TE_F32, 2, history, 1);
        states[1] = call_normal(te, TE_F32, 2, mn, 2);
        c->args.delayed_gather.amax_history = states;
        c->args.delayed_gather.count = 2;
        c->args.delayed_gather.amaxes = call_out(c, te, TE_F32, 1, (const int64_t[]){6 + N});
        c->tolerance = 0;
        break;
        CALL(15, GEMM, "gemm x W^T + bias")
        c->args.gemm.a = call_normal(te, dtype, 2, mk, 1);
        c->args.gemm.b = call_normal(te, dtype, 2, nk, 2);
        c->args.gemm.b_transposed = true;
        c->args.gemm.bias = call_normal(te, dtype, 1, vn, 3);
        c->args.gemm.d = call_out(c, te, dtype, 2, mn);
        c->args.gemm.m = M;
        c->args.gemm.n = N;
        c->args.gemm.k = K;
        if (dtype == TE_F32) c->tolerance = 1e-3; /* TF32 operands: 2^-11 each */
        break;
        CALL(16, GEMM, "gemm of fp8 codes")
        c->args.gemm.a = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){M, 144}, 1);
        c->args.gemm.b = call_normal(te, TE_F8E5M2, 2, (const int64_t[]){N, 144}, 2);
        c->args.gemm.b_transposed = true;
        c->args.gemm.scale_a = te_tensor_full(te, TE_F32, 1, one, 0.5);
        c->args.gemm.scale_b = te_tensor_full(te, TE_F32, 1, one, 0.25);
        c->args.gemm.split_accumulator = true;
        c->args.gemm.d = call_out(c, te, dtype, 2, mn);
        c->args.gemm.m = M;
        c->args.gemm.n = N;
        c->args.gemm.k = K;
        if (dtype == TE_F32) c->tolerance = 1e-3; /* Hopper's FP8 accumulator keeps about 14 bits */
        break;
        CALL(17, LAYERNORM_FWD, "layernorm")
        c->args.layernorm_fwd.x = call_normal(te, dtype, 2, mn, 1);
        c->args.layernorm_fwd.gamma = call_normal(te, dtype, 1, vn, 2);
        c->args.layernorm_fwd.beta = call_normal(te, dtype, 1, vn, 3);
        c->args.layernorm_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.layernorm_fwd.mean = call_out(c, te, TE_F32, 1, vm);
        c->args.layernorm_fwd.rstd = call_out(c, te, TE_F32, 1, vm);
        break;
        CALL(18, LAYERNORM_BWD, "layernorm backward")
        c->args.layernorm_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.layernorm_bwd.x = call_normal(te, dtype, 2, mn, 2);
        c->args.layernorm_bwd.gamma = call_normal(te, dtype, 1, vn, 3);
        c->args.layernorm_bwd.mean = te_tensor_full(te, TE_F32, 1, vm, 0.01);
        c->args.layernorm_bwd.rstd = te_tensor_full(te, TE_F32, 1, vm, 1.02);
        c->args.layernorm_bwd.dx = call_out(c, te, dtype, 2, mn);
        c->args.layernorm_bwd.dgamma = call_out(c, te, dtype, 1, vn);
        c->args.layernorm_bwd.dbeta = call_out(c, te, dtype, 1, vn);
        break;
        CALL(19, RMSNORM_FWD, "rmsnorm")
        c->args.rmsnorm_fwd.x = call_normal(te, dtype, 2, mn, 1);
        c->args.rmsnorm_fwd.gamma = call_normal(te, dtype, 1, vn, 2);
        c->args.rmsnorm_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.rmsnorm_fwd.rstd = call_out(c, te, TE_F32, 1, vm);
        break;
        CALL(20, RMSNORM_BWD, "rmsnorm backward")
        c->args.rmsnorm_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.rmsnorm_bwd.x = call_normal(te, dtype, 2, mn, 2);
        c->args.rmsnorm_bwd.gamma = call_normal(te, dtype, 1, vn, 3);
        c->args.rmsnorm_bwd.rstd = te_tensor_full(te, TE_F32, 1, vm, 1.02);
        c->args.rmsnorm_bwd.dx = call_out(c, te, dtype, 2, mn);
        c->args.rmsnorm_bwd.dgamma = call_out(c, te, dtype, 1, vn);
        break;
        CALL(21, ACT_FWD, "swiglu")
        c->args.act_fwd.x = call_normal(te, dtype, 2, m2n, 1);
        c->args.act_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.act_fwd.activation = TE_SWIGLU;
        break;
        CALL(22, ACT_BWD, "gelu backward")
        c->args.act_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.act_bwd.x = call_normal(te, dtype, 2, mn, 2);
        c->args.act_bwd.dx = call_out(c, te, dtype, 2, mn);
        c->args.act_bwd.activation = TE_GELU;
        c->args.act_bwd.amax = call_out(c, te, TE_F32, 1, one);
        break;
        CALL(23, ROPE, "rope")
        c->args.rope.x = call_normal(te, dtype, 4, q, 1);
        c->args.rope.y = call_out(c, te, dtype, 4, q);
        break;
        CALL(24, QKV_ROPE, "split qkv, rope")
        c->args.qkv_rope.qkv = call_normal(te, dtype, 3, packed, 1);
        c->args.qkv_rope.q = call_out(c, te, dtype, 4, q);
        c->args.qkv_rope.k = call_out(c, te, dtype, 4, kv);
        c->args.qkv_rope.v = call_out(c, te, dtype, 4, kv);
        c->args.qkv_rope.num_heads = 8;
        c->args.qkv_rope.num_groups = 2;
        c->args.qkv_rope.head_dim = 64;
        c->args.qkv_rope.interleaved_groups = true;
        break;
        CALL(25, QKV_ROPE_BWD, "split qkv, rope, backward")
        c->args.qkv_rope_bwd.qkv = call_out(c, te, dtype, 3, packed);
        c->args.qkv_rope_bwd.q = call_normal(te, dtype, 4, q, 1);
        c->args.qkv_rope_bwd.k = call_normal(te, dtype, 4, kv, 2);
        c->args.qkv_rope_bwd.v = call_normal(te, dtype, 4, kv, 3);
        c->args.qkv_rope_bwd.num_heads = 8;
        c->args.qkv_rope_bwd.num_groups = 2;
        c->args.qkv_rope_bwd.head_dim = 64;
        c->args.qkv_rope_bwd.interleaved_groups = true;
        break;
        CALL(26, ATTN_FWD, "attention, causal, grouped heads")
        c->args.attn_fwd.q = call_normal(te, dtype, 4, q, 1);
        c->args.attn_fwd.k = call_normal(te, dtype, 4, kv, 2);
        c->args.attn_fwd.v = call_normal(te, dtype, 4, kv, 3);
        c->args.attn_fwd.o = call_out(c, te, dtype, 4, q);
        c->args.attn_fwd.lse = call_out(c, te, TE_F32, 3, lse);
        if (dtype != TE_F32) c->tolerance *= 2; /* probabilities are rounded to the format as well */
        break;
        CALL(27, ATTN_BWD, "attention backward")
        c->args.attn_bwd.q = call_normal(te, dtype, 4, q, 1);
        c->args.attn_bwd.k = call_normal(te, dtype, 4, kv, 2);
        c->args.attn_bwd.v = call_normal(te, dtype, 4, kv, 3);
        c->args.attn_bwd.o = call_normal(te, dtype, 4, q, 4);
        c->args.attn_bwd.d_o = call_normal(te, dtype, 4, q, 5);
        c->args.attn_bwd.lse = te_tensor_full(te, TE_F32, 3, lse, 4);
        c->args.attn_bwd.dq = call_out(c, te, dtype, 4, q);
        c->args.attn_bwd.dk = call_out(c, te, dtype, 4, kv);
        c->args.attn_bwd.dv = call_out(c, te, dtype, 4, kv);
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(28, DROPOUT_ADD_FWD, "bias, dropout, residual")
        c->args.dropout_add_fwd.x = call_normal(te, dtype, 2, mn, 1);
        c->args.dropout_add_fwd.bias = call_normal(te, dtype, 1, vn, 2);
        c->args.dropout_add_fwd.residual = call_normal(te, dtype, 2, mn, 3);
        c->args.dropout_add_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.dropout_add_fwd.p = 0.25f;
        c->args.dropout_add_fwd.seed = 3;
        break;
        CALL(29, DROPOUT_ADD_BWD, "dropout backward")
        c->args.dropout_add_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.dropout_add_bwd.dx = call_out(c, te, dtype, 2, mn);
        c->args.dropout_add_bwd.p = 0.25f;
        c->args.dropout_add_bwd.seed = 3;
        break;
        CALL(30, CROSS_ENTROPY_FWD, "cross-entropy")
        c->args.cross_entropy_fwd.logits = call_normal(te, dtype, 2, mn, 1);
        c->args.cross_entropy_fwd.target = call_ids(te, M, (int)N);
        c->args.cross_entropy_fwd.loss = call_out(c, te, TE_F32, 1, vm);
        c->args.cross_entropy_fwd.lse = call_out(c, te, TE_F32, 1, vm);
        c->args.cross_entropy_fwd.count = call_out(c, te, TE_F32, 1, one);
        c->args.cross_entropy_fwd.ignore_index = -100;
        break;
        CALL(31, CROSS_ENTROPY_BWD, "cross-entropy backward")
        c->args.cross_entropy_bwd.logits = call_normal(te, dtype, 2, mn, 1);
        c->args.cross_entropy_bwd.target = call_ids(te, M, (int)N);
        c->args.cross_entropy_bwd.lse = te_tensor_full(te, TE_F32, 1, vm, 6);
        c->args.cross_entropy_bwd.dloss = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.cross_entropy_bwd.dlogits = call_out(c, te, dtype, 2, mn);
        c->args.cross_entropy_bwd.ignore_index = -100;
        break;
        CALL(32, MSE_FWD, "mean squared error")
        c->args.mse_fwd.x = call_normal(te, dtype, 2, mn, 1);
        c->args.mse_fwd.target = call_normal(te, dtype, 2, mn, 2);
        c->args.mse_fwd.loss = call_out(c, te, TE_F32, 1, one);
        break;
        CALL(33, MSE_BWD, "mean squared error backward")
        c->args.mse_bwd.x = call_normal(te, dtype, 2, mn, 1);
        c->args.mse_bwd.target = call_normal(te, dtype, 2, mn, 2);
        c->args.mse_bwd.dloss = te_tensor_full(te, TE_F32, 1, one, 100);
        c->args.mse_bwd.dx = call_out(c, te, dtype, 2, mn);
        break;
        CALL(34, ADAM, "adam")
        memset(adam, 0, sizeof adam);
        adam[0].grad = call_normal(te, dtype, 2, mn, 1);
        adam[0].param = c->out[c->num_out++] = call_normal(te, dtype, 2, mn, 2);
        adam[0].m = call_out(c, te, TE_F32, 2, mn);
        adam[0].v = call_out(c, te, TE_F32, 2, mn);
        adam[0].master = c->out[c->num_out++] = call_normal(te, TE_F32, 2, mn, 2);
        c->args.adam.tensors = adam;
        c->args.adam.num_tensors = 1;
        c->args.adam.lr = 1e-3f;
        c->args.adam.beta1 = 0.9f;
        c->args.adam.beta2 = 0.999f;
        c->args.adam.eps = 1e-8f;
        c->args.adam.step = 1;
        break;
        CALL(35, L2NORM, "norm of many tensors")
        list[0] = call_normal(te, dtype, 2, mn, 1);
        list[1] = call_normal(te, dtype, 1, vn, 2);
        c->args.l2norm.tensors = list;
        c->args.l2norm.num_tensors = 2;
        c->args.l2norm.norm = call_out(c, te, TE_F32, 1, one);
        c->args.l2norm.clip = call_out(c, te, TE_F32, 1, one);
        c->args.l2norm.max_norm = 1;
        c->args.l2norm.inv_scale = te_tensor_full(te, TE_F32, 1, one, 0.5);
        c->args.l2norm.found_inf = call_out(c, te, TE_F32, 1, one);
        break;
        CALL(36, MULTI_SCALE, "scale of many tensors")
        list[0] = call_normal(te, dtype, 2, mn, 1);
        list_out[0] = call_out(c, te, dtype, 2, mn);
        c->args.multi_scale.in = list;
        c->args.multi_scale.out = list_out;
        c->args.multi_scale.num_tensors = 1;
        c->args.multi_scale.scale = 0.3f;
        break;
        CALL(37, BLOCK_QUANTIZE, "quantize 1x128 blocks")
        c->args.block_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.block_quantize.row = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.block_quantize.row_scale_inv = call_out(c, te, TE_F32, 2, (const int64_t[]){3, 132});
        c->args.block_quantize.col = call_out(c, te, TE_F8E4M3, 2, nm);
        c->args.block_quantize.col_scale_inv = call_out(c, te, TE_F32, 2, (const int64_t[]){2, N});
        c->tolerance = 0;
        break;
        CALL(38, BLOCK_QUANTIZE, "quantize 128x128 blocks")
        c->args.block_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.block_quantize.row = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.block_quantize.row_scale_inv = call_out(c, te, TE_F32, 2, (const int64_t[]){2, 4});
        c->args.block_quantize.col = call_out(c, te, TE_F8E4M3, 2, nm);
        c->args.block_quantize.col_scale_inv = call_out(c, te, TE_F32, 2, (const int64_t[]){3, 4});
        c->args.block_quantize.two_dimensional = true;
        c->tolerance = 0;
        break;
        CALL(39, BLOCK_DEQUANTIZE, "dequantize 1x128 blocks")
        c->args.block_dequantize.q = call_normal(te, TE_F8E4M3, 2, row, 1);
        c->args.block_dequantize.scale_inv = call_normal(te, TE_F32, 2, (const int64_t[]){3, 132}, 2);
        c->args.block_dequantize.y = call_out(c, te, dtype, 2, mn);
        c->tolerance = 0;
        break;
        CALL(40, BLOCK_DEQUANTIZE, "dequantize 128x1 blocks")
        c->args.block_dequantize.q = call_normal(te, TE_F8E4M3, 2, nm, 1);
        c->args.block_dequantize.scale_inv = call_normal(te, TE_F32, 2, (const int64_t[]){2, N}, 2);
        c->args.block_dequantize.y = call_out(c, te, dtype, 2, mn);
        c->args.block_dequantize.columnwise = true;
        c->tolerance = 0;
        break;
        CALL(41, SHARD_AMAX, "amax by tile of a slice")
        c->args.shard_amax.x = call_normal(te, dtype, 1, slice, 1);
        c->args.shard_amax.rows = M;
        c->args.shard_amax.columns = N;
        c->args.shard_amax.start = 1003;
        c->args.shard_amax.tile_rows = c->args.shard_amax.tile_columns = 128;
        c->args.shard_amax.amax = call_out(c, te, TE_F32, 2, (const int64_t[]){2, 3});
        c->tolerance = 0;
        break;
        CALL(42, SHARD_SCALES, "block scales from amaxes")
        c->args.shard_scales.scaling = TE_SCALING_BLOCK_2D;
        c->args.shard_scales.amax = call_normal(te, TE_F32, 2, (const int64_t[]){2, 3}, 1);
        c->args.shard_scales.row_scale = call_out(c, te, TE_F32, 2, (const int64_t[]){2, 4});
        c->args.shard_scales.col_scale = call_out(c, te, TE_F32, 2, (const int64_t[]){3, 4});
        c->args.shard_scales.rows = M;
        c->args.shard_scales.columns = N;
        c->tolerance = 0;
        break;
        CALL(43, SHARD_CAST, "cast of a slice to e4m3 by blocks")
        c->args.shard_cast.x = call_normal(te, dtype, 1, slice, 1);
        c->args.shard_cast.dst = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.shard_cast.scale = te_tensor_full(te, TE_F32, 2, (const int64_t[]){2, 4}, 0.25);
        c->args.shard_cast.scaling = TE_SCALING_BLOCK_2D;
        c->args.shard_cast.rows = M;
        c->args.shard_cast.columns = N;
        c->args.shard_cast.start = 1003;
        c->tolerance = 0;
        break;
        CALL(44, QUANT_ERROR, "error of a quantization")
        c->args.quant_error.x = call_normal(te, dtype, 2, mn, 1);
        c->args.quant_error.y = call_normal(te, TE_F32, 2, mn, 1);
        c->args.quant_error.counts = call_out(c, te, TE_I64, 1, scales);
        c->args.quant_error.sums = call_out(c, te, TE_F32, 1, (const int64_t[]){5});
        c->tolerance = 1e-5;
        break;
        CALL(45, MXFP8_QUANTIZE, "mxfp8, both copies")
        c->args.mxfp8_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.mxfp8_quantize.row = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.mxfp8_quantize.row_scale = call_out(c, te, TE_F8E8M0, 2, (const int64_t[]){256, 12});
        c->args.mxfp8_quantize.col = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.mxfp8_quantize.col_scale = call_out(c, te, TE_F8E8M0, 2, (const int64_t[]){8, 384});
        c->tolerance = 0;
        break;
        CALL(46, MXFP8_DEQUANTIZE, "mxfp8 dequantize")
        c->args.mxfp8_dequantize.q = call_normal(te, TE_F8E4M3, 2, row, 1);
        c->args.mxfp8_dequantize.scale = te_tensor_full(te, TE_F8E8M0, 2, (const int64_t[]){256, 12}, 0.25);
        c->args.mxfp8_dequantize.y = call_out(c, te, dtype, 2, mn);
        c->tolerance = 0;
        break;
        CALL(47, GEMM, "gemm of fp8 blocks, 1D x 2D")
        c->args.gemm.a = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){M, 144}, 1);
        c->args.gemm.b = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){N, 144}, 2);
        c->args.gemm.b_transposed = true;
        c->args.gemm.scaling_a = TE_SCALING_BLOCK_1D;
        c->args.gemm.scaling_b = TE_SCALING_BLOCK_2D;
        c->args.gemm.scale_a = call_normal(te, TE_F32, 2, (const int64_t[]){2, 132}, 3);
        c->args.gemm.scale_b = call_normal(te, TE_F32, 2, (const int64_t[]){3, 4}, 4);
        c->args.gemm.d = call_out(c, te, dtype, 2, mn);
        c->args.gemm.m = M;
        c->args.gemm.n = N;
        c->args.gemm.k = K;
        if (dtype == TE_F32) c->tolerance = 1e-3; /* Hopper's FP8 accumulator keeps about 14 bits */
        break;
        CALL(48, GEMM, "gemm of mxfp8")
        c->args.gemm.a = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){M, 144}, 1);
        c->args.gemm.b = call_normal(te, TE_F8E5M2, 2, (const int64_t[]){N, 144}, 2);
        c->args.gemm.b_transposed = true;
        c->args.gemm.scaling_a = c->args.gemm.scaling_b = TE_SCALING_MXFP8;
        c->args.gemm.scale_a = call_bytes(te, TE_F8E8M0, 256, 8, 122, 10);
        c->args.gemm.scale_b = call_bytes(te, TE_F8E8M0, 384, 8, 122, 10);
        c->args.gemm.d = call_out(c, te, dtype, 2, mn);
        c->args.gemm.m = M;
        c->args.gemm.n = N;
        c->args.gemm.k = K;
        break;
        CALL(49, GEMM, "gemm of nvfp4")
        c->args.gemm.a = call_bytes(te, TE_F4E2M1, M, 160, 0, 256);
        c->args.gemm.b = call_bytes(te, TE_F4E2M1, N, 160, 0, 256);
        c->args.gemm.b_transposed = true;
        c->args.gemm.scaling_a = c->args.gemm.scaling_b = TE_SCALING_NVFP4;
        c->args.gemm.scale_a = call_bytes(te, TE_F8E4M3, 256, 12, 40, 60);
        c->args.gemm.scale_b = call_bytes(te, TE_F8E4M3, 384, 12, 40, 60);
        c->args.gemm.amax_a = te_tensor_full(te, TE_F32, 1, vm, 3);
        c->args.gemm.amax_b = te_tensor_full(te, TE_F32, 1, one, 5);
        c->args.gemm.d = call_out(c, te, dtype, 2, mn);
        c->args.gemm.m = M;
        c->args.gemm.n = N;
        c->args.gemm.k = K;
        break;
        CALL(50, NVFP4_AMAX, "nvfp4 amaxes, before and after the transform")
        c->args.nvfp4_amax.x = call_normal(te, dtype, 2, mn, 1);
        c->args.nvfp4_amax.amax_row = call_out(c, te, TE_F32, 1, one);
        c->args.nvfp4_amax.amax_col = call_out(c, te, TE_F32, 1, one);
        c->args.nvfp4_amax.rht = true;
        c->tolerance = 0;
        break;
        CALL(51, NVFP4_QUANTIZE, "quantize nvfp4, both copies, the column-wise one transformed")
        c->args.nvfp4_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.nvfp4_quantize.row = call_out(c, te, TE_F4E2M1, 2, (const int64_t[]){M, 288});
        c->args.nvfp4_quantize.row_scale = call_out(c, te, TE_F8E4M3, 2, (const int64_t[]){256, 20});
        c->args.nvfp4_quantize.col = call_out(c, te, TE_F4E2M1, 2, (const int64_t[]){N, 160});
        c->args.nvfp4_quantize.col_scale = call_out(c, te, TE_F8E4M3, 2, (const int64_t[]){384, 12});
        c->args.nvfp4_quantize.amax_row = te_tensor_full(te, TE_F32, 1, one, 3.5);
        c->args.nvfp4_quantize.amax_col = te_tensor_full(te, TE_F32, 1, one, 4.5);
        c->args.nvfp4_quantize.rht = true;
        c->tolerance = 0;
        break;
        CALL(52, NVFP4_QUANTIZE, "quantize nvfp4 by 16 x 16, both copies")
        c->args.nvfp4_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.nvfp4_quantize.row = call_out(c, te, TE_F4E2M1, 2, (const int64_t[]){M, 288});
        c->args.nvfp4_quantize.row_scale = call_out(c, te, TE_F8E4M3, 2, (const int64_t[]){256, 20});
        c->args.nvfp4_quantize.col = call_out(c, te, TE_F4E2M1, 2, (const int64_t[]){N, 160});
        c->args.nvfp4_quantize.col_scale = call_out(c, te, TE_F8E4M3, 2, (const int64_t[]){384, 12});
        c->args.nvfp4_quantize.amax_row = te_tensor_full(te, TE_F32, 1, one, 3.5);
        c->args.nvfp4_quantize.two_dimensional = true;
        c->tolerance = 0;
        break;
        CALL(53, NVFP4_QUANTIZE, "quantize nvfp4, both copies, rounded stochastically")
        c->args.nvfp4_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.nvfp4_quantize.row = call_out(c, te, TE_F4E2M1, 2, (const int64_t[]){M, 288});
        c->args.nvfp4_quantize.row_scale = call_out(c, te, TE_F8E4M3, 2, (const int64_t[]){256, 20});
        c->args.nvfp4_quantize.col = call_out(c, te, TE_F4E2M1, 2, (const int64_t[]){N, 160});
        c->args.nvfp4_quantize.col_scale = call_out(c, te, TE_F8E4M3, 2, (const int64_t[]){384, 12});
        c->args.nvfp4_quantize.amax_row = te_tensor_full(te, TE_F32, 1, one, 3.5);
        c->args.nvfp4_quantize.amax_col = te_tensor_full(te, TE_F32, 1, one, 4.5);
        c->args.nvfp4_quantize.rht = c->args.nvfp4_quantize.stochastic_rounding = true;
        c->args.nvfp4_quantize.seed = 7;
        c->tolerance = 0;
        break;
        CALL(54, NVFP4_DEQUANTIZE, "dequantize nvfp4")
        c->args.nvfp4_dequantize.q = call_fp4(te, M, 288);
        c->args.nvfp4_dequantize.scale = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){256, 20}, 2);
        c->args.nvfp4_dequantize.amax = te_tensor_full(te, TE_F32, 1, one, 3.5);
        c->args.nvfp4_dequantize.y = call_out(c, te, dtype, 2, mn);
        c->tolerance = 0;
        break;
        CALL(55, NVFP4_DEQUANTIZE, "dequantize nvfp4, column-wise, the transform taken back")
        c->args.nvfp4_dequantize.q = call_fp4(te, N, 160);
        c->args.nvfp4_dequantize.scale = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){384, 12}, 2);
        c->args.nvfp4_dequantize.amax = te_tensor_full(te, TE_F32, 1, one, 3.5);
        c->args.nvfp4_dequantize.y = call_out(c, te, dtype, 2, mn);
        c->args.nvfp4_dequantize.columnwise = c->args.nvfp4_dequantize.rht = true;
        c->tolerance = 0;
        break;
        CALL(56, LAYERNORM_FWD, "layernorm and the amax of y")
        c->args.layernorm_fwd.x = call_normal(te, dtype, 2, mn, 1);
        c->args.layernorm_fwd.gamma = call_normal(te, dtype, 1, vn, 2);
        c->args.layernorm_fwd.beta = call_normal(te, dtype, 1, vn, 3);
        c->args.layernorm_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.layernorm_fwd.y_amax = call_out(c, te, TE_F32, 1, one);
        break;
        CALL(57, RMSNORM_FWD, "rmsnorm to fp8, both copies") /* of equal numbers: no code is a matter of the order of summation */
        c->args.rmsnorm_fwd.x = te_tensor_full(te, dtype, 2, mn, 2);
        c->args.rmsnorm_fwd.gamma = te_tensor_full(te, dtype, 1, vn, 1.5);
        c->args.rmsnorm_fwd.scale = te_tensor_full(te, TE_F32, 1, one, 4);
        c->args.rmsnorm_fwd.y = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.rmsnorm_fwd.y_col = call_out(c, te, TE_F8E4M3, 2, nm);
        c->args.rmsnorm_fwd.amax = call_out(c, te, TE_F32, 1, one);
        c->tolerance = 1e-6;
        break;
        CALL(58, GROUPED_GEMM, "grouped gemm along rows, one group empty")
        c->args.grouped_gemm.a = call_normal(te, dtype, 2, mk, 1);
        c->args.grouped_gemm.b = call_normal(te, dtype, 3, (const int64_t[]){4, N, K}, 2);
        c->args.grouped_gemm.b_transposed = true;
        c->args.grouped_gemm.bias = call_normal(te, dtype, 2, (const int64_t[]){4, N}, 3);
        c->args.grouped_gemm.sizes = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){4}, (const int32_t[]){70, 0, 19, 41});
        c->args.grouped_gemm.d = call_out(c, te, dtype, 2, mn);
        c->args.grouped_gemm.groups = 4;
        c->args.grouped_gemm.m = M;
        c->args.grouped_gemm.n = N;
        c->args.grouped_gemm.k = K;
        if (dtype == TE_F32) c->tolerance = 1e-3;
        break;
        CALL(59, GROUPED_GEMM, "grouped gemm along k, added to f32 sums")
        c->args.grouped_gemm.a = call_normal(te, dtype, 2, (const int64_t[]){K, M}, 1);
        c->args.grouped_gemm.b = call_normal(te, dtype, 2, (const int64_t[]){K, N}, 2);
        c->args.grouped_gemm.a_transposed = true;
        c->args.grouped_gemm.sizes = te_tensor_from_host(te, TE_I64, 1, (const int64_t[]){3}, (const int64_t[]){65, 0, 71});
        c->args.grouped_gemm.d = call_out(c, te, TE_F32, 3, (const int64_t[]){3, M, N});
        c->args.grouped_gemm.groups = 3;
        c->args.grouped_gemm.m = M;
        c->args.grouped_gemm.n = N;
        c->args.grouped_gemm.k = K;
        c->args.grouped_gemm.along_k = c->args.grouped_gemm.accumulate = true;
        if (dtype == TE_F32) c->tolerance = 1e-3;
        break;
        CALL(60, GROUPED_GEMM, "grouped gemm of fp8 codes, a scale for each group")
        c->args.grouped_gemm.a = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){M, 144}, 1);
        c->args.grouped_gemm.b = call_normal(te, TE_F8E4M3, 3, (const int64_t[]){2, N, 144}, 2);
        c->args.grouped_gemm.b_transposed = true;
        c->args.grouped_gemm.scale_a = te_tensor_full(te, TE_F32, 1, (const int64_t[]){2}, 0.5);
        c->args.grouped_gemm.scale_b = te_tensor_full(te, TE_F32, 1, (const int64_t[]){2}, 0.25);
        c->args.grouped_gemm.offsets = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 50, 130});
        c->args.grouped_gemm.split_accumulator = true;
        c->args.grouped_gemm.d = call_out(c, te, dtype, 2, mn);
        c->args.grouped_gemm.groups = 2;
        c->args.grouped_gemm.m = M;
        c->args.grouped_gemm.n = N;
        c->args.grouped_gemm.k = 136;
        if (dtype == TE_F32) c->tolerance = 1e-3;
        break;
        CALL(61, ACT_FWD, "squared reglu to fp8, both copies")
        c->args.act_fwd.x = call_normal(te, dtype, 2, m2n, 1);
        c->args.act_fwd.y = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.act_fwd.col = call_out(c, te, TE_F8E4M3, 2, nm);
        c->args.act_fwd.activation = TE_SREGLU; /* products alone: the same codes on every device */
        c->args.act_fwd.scale = te_tensor_full(te, TE_F32, 1, one, 40);
        c->args.act_fwd.scale_inv = call_out(c, te, TE_F32, 1, one);
        c->args.act_fwd.amax = call_out(c, te, TE_F32, 1, one);
        break;
        CALL(62, ACT_BWD, "squared relu backward to fp8, both copies, bias gradient")
        c->args.act_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.act_bwd.x = call_normal(te, dtype, 2, mn, 2);
        c->args.act_bwd.dx = call_out(c, te, TE_F8E4M3, 2, row);
        c->args.act_bwd.col = call_out(c, te, TE_F8E4M3, 2, nm);
        c->args.act_bwd.dbias = call_out(c, te, dtype, 1, vn);
        c->args.act_bwd.activation = TE_SRELU;
        c->args.act_bwd.scale = te_tensor_full(te, TE_F32, 1, one, 40);
        c->args.act_bwd.scale_inv = te_tensor_full(te, TE_F32, 1, one, 0);
        c->args.act_bwd.amax = call_out(c, te, TE_F32, 1, one);
        break;
        CALL(63, ATTN_FWD, "attention of packed sequences, alibi")
        c->args.attn_fwd.q = call_normal(te, dtype, 3, packed_q, 1);
        c->args.attn_fwd.k = call_normal(te, dtype, 3, packed_kv, 2);
        c->args.attn_fwd.v = call_normal(te, dtype, 3, packed_kv, 3);
        c->args.attn_fwd.o = call_out(c, te, dtype, 3, packed_q);
        c->args.attn_fwd.lse = te_tensor_zeros(te, TE_F32, 2, (const int64_t[]){8, 150}); /* no output to compare: -inf in padding */
        c->args.attn_fwd.format = TE_THD;
        c->args.attn_fwd.rule = call_packed(te);
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(64, ATTN_BWD, "attention of packed sequences, alibi, backward")
        c->args.attn_bwd.q = call_normal(te, dtype, 3, packed_q, 1);
        c->args.attn_bwd.k = call_normal(te, dtype, 3, packed_kv, 2);
        c->args.attn_bwd.v = call_normal(te, dtype, 3, packed_kv, 3);
        c->args.attn_bwd.o = call_normal(te, dtype, 3, packed_q, 4);
        c->args.attn_bwd.d_o = call_normal(te, dtype, 3, packed_q, 5);
        c->args.attn_bwd.lse = te_tensor_full(te, TE_F32, 2, (const int64_t[]){8, 150}, 4);
        c->args.attn_bwd.dq = call_out(c, te, dtype, 3, packed_q);
        c->args.attn_bwd.dk = call_out(c, te, dtype, 3, packed_kv);
        c->args.attn_bwd.dv = call_out(c, te, dtype, 3, packed_kv);
        c->args.attn_bwd.format = TE_THD;
        c->args.attn_bwd.rule = call_packed(te);
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(65, ATTN_FWD, "attention with bias, mask and learnable offset")
        c->args.attn_fwd.q = call_normal(te, dtype, 4, q, 1);
        c->args.attn_fwd.k = call_normal(te, dtype, 4, kv, 2);
        c->args.attn_fwd.v = call_normal(te, dtype, 4, kv, 3);
        c->args.attn_fwd.o = call_out(c, te, dtype, 4, q);
        c->args.attn_fwd.lse = call_out(c, te, TE_F32, 3, lse);
        c->args.attn_fwd.max_logit = call_out(c, te, TE_F32, 1, eight);
        c->args.attn_fwd.rule = call_biased(te, dtype);
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(66, ATTN_BWD, "attention with bias, mask and learnable offset, backward")
        c->args.attn_bwd.q = call_normal(te, dtype, 4, q, 1);
        c->args.attn_bwd.k = call_normal(te, dtype, 4, kv, 2);
        c->args.attn_bwd.v = call_normal(te, dtype, 4, kv, 3);
        c->args.attn_bwd.o = call_normal(te, dtype, 4, q, 4);
        c->args.attn_bwd.d_o = call_normal(te, dtype, 4, q, 5);
        c->args.attn_bwd.lse = te_tensor_full(te, TE_F32, 3, lse, 4);
        c->args.attn_bwd.dq = call_out(c, te, dtype, 4, q);
        c->args.attn_bwd.dk = call_out(c, te, dtype, 4, kv);
        c->args.attn_bwd.dv = call_out(c, te, dtype, 4, kv);
        c->args.attn_bwd.dbias = call_out(c, te, dtype, 4, (const int64_t[]){1, 8, 77, 77});
        c->args.attn_bwd.dsoftmax_offset = call_out(c, te, TE_F32, 1, eight);
        c->args.attn_bwd.rule = call_biased(te, dtype);
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(67, ATTN_FWD, "attention to a cache in pages")
        c->args.attn_fwd.q = call_normal(te, dtype, 4, (const int64_t[]){5, 2, 8, 64}, 1);
        c->args.attn_fwd.k = call_normal(te, dtype, 4, (const int64_t[]){8, 16, 2, 64}, 2);
        c->args.attn_fwd.v = call_normal(te, dtype, 4, (const int64_t[]){8, 16, 2, 64}, 3);
        c->args.attn_fwd.o = call_out(c, te, dtype, 4, (const int64_t[]){5, 2, 8, 64});
        c->args.attn_fwd.rule.mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
        c->args.attn_fwd.rule.cu_seqlens_q = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 5, 8});
        c->args.attn_fwd.rule.cu_seqlens_kv = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 41, 101});
        c->args.attn_fwd.rule.page_table = te_tensor_from_host(te, TE_I32, 2, (const int64_t[]){2, 4}, (const int32_t[]){6, 1, 4, 0, 7, 2, 3, 5});
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(68, ADAM, "adam with states of 16 bits")
        memset(adam, 0, sizeof adam);
        adam[0].grad = call_normal(te, dtype, 2, mn, 1);
        adam[0].param = c->out[c->num_out++] = call_normal(te, dtype, 2, mn, 2);
        adam[0].m = call_out(c, te, TE_F16, 2, mn);
        adam[0].v = call_out(c, te, TE_F16, 2, mn);
        adam[0].master = c->out[c->num_out++] = call_normal(te, TE_F16, 2, mn, 2);
        adam[0].m_scale = call_out(c, te, TE_F32, 1, one);
        adam[0].v_scale = call_out(c, te, TE_F32, 1, one);
        adam[0].master_scale = c->out[c->num_out++] = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.adam.tensors = adam;
        c->args.adam.num_tensors = 1;
        c->args.adam.lr = 1e-3f;
        c->args.adam.beta1 = 0.9f;
        c->args.adam.beta2 = 0.999f;
        c->args.adam.eps = 1e-8f;
        c->args.adam.step = 1;
        break;
        CALL(69, STORE_STATE, "an optimizer's state to fp8")
        c->args.store_state.x = call_normal(te, dtype, 2, mn, 1);
        c->args.store_state.amax = te_tensor_full(te, TE_F32, 1, one, 5);
        c->args.store_state.state = call_out(c, te, TE_F8E4M3, 2, mn);
        c->args.store_state.scale = call_out(c, te, TE_F32, 1, one);
        break;
        CALL(70, SGD, "sgd with momentum")
        memset(sgd, 0, sizeof sgd);
        sgd[0].grad = call_normal(te, dtype, 2, mn, 1);
        sgd[0].param = c->out[c->num_out++] = call_normal(te, dtype, 2, mn, 2);
        sgd[0].momentum = call_out(c, te, TE_F32, 2, mn);
        sgd[0].master = c->out[c->num_out++] = call_normal(te, TE_F32, 2, mn, 2);
        c->args.sgd.tensors = sgd;
        c->args.sgd.num_tensors = 1;
        c->args.sgd.lr = 0.1f;
        c->args.sgd.momentum = 0.9f;
        c->args.sgd.weight_decay = 0.01f;
        break;
        CALL(71, CROSS_ENTROPY_FWD, "cross-entropy of a part of the vocabulary")
        c->args.cross_entropy_fwd.logits = call_normal(te, dtype, 2, mn, 1);
        c->args.cross_entropy_fwd.target = call_ids(te, M, 2 * (int)N);
        c->args.cross_entropy_fwd.parts = call_out(c, te, TE_F32, 2, (const int64_t[]){M, 3});
        c->args.cross_entropy_fwd.label_smoothing = 0.1f;
        c->args.cross_entropy_fwd.ignore_index = -100;
        c->args.cross_entropy_fwd.vocab_size = 2 * N;
        c->args.cross_entropy_fwd.vocab_start = N;
        break;
        CALL(72, CROSS_ENTROPY_MERGE, "cross-entropy of two parts")
        c->args.cross_entropy_merge.parts = call_normal(te, TE_F32, 3, (const int64_t[]){2, M, 3}, 1);
        c->args.cross_entropy_merge.target = call_ids(te, M, (int)N);
        c->args.cross_entropy_merge.loss = call_out(c, te, TE_F32, 1, vm);
        c->args.cross_entropy_merge.lse = call_out(c, te, TE_F32, 1, vm);
        c->args.cross_entropy_merge.label_smoothing = 0.1f;
        c->args.cross_entropy_merge.ignore_index = -100;
        c->args.cross_entropy_merge.vocab_size = N;
        break;
        CALL(73, SOFTMAX_FWD, "masked softmax of scores")
        c->args.softmax_fwd.x = call_normal(te, dtype, 4, (const int64_t[]){2, 3, 77, 200}, 1);
        c->args.softmax_fwd.mask = te_tensor_zeros(te, TE_U8, 4, (const int64_t[]){2, 1, 77, 200});
        c->args.softmax_fwd.y = call_out(c, te, dtype, 4, (const int64_t[]){2, 3, 77, 200});
        c->args.softmax_fwd.scale = 0.125f;
        break;
        CALL(74, SOFTMAX_FWD, "causal softmax of scores")
        c->args.softmax_fwd.x = call_normal(te, dtype, 3, (const int64_t[]){3, 77, 101}, 1);
        c->args.softmax_fwd.y = call_out(c, te, dtype, 3, (const int64_t[]){3, 77, 101});
        c->args.softmax_fwd.causal = true;
        break;
        CALL(75, SOFTMAX_BWD, "softmax backward")
        c->args.softmax_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.softmax_bwd.y = call_normal(te, dtype, 2, mn, 2);
        c->args.softmax_bwd.dx = call_out(c, te, dtype, 2, mn);
        c->args.softmax_bwd.scale = 0.125f;
        break;
        CALL(76, L2NORMALIZE_FWD, "L2 normalization")
        c->args.l2normalize_fwd.x = call_normal(te, dtype, 2, mn, 1);
        c->args.l2normalize_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.l2normalize_fwd.rnorm = call_out(c, te, TE_F32, 1, vm);
        break;
        CALL(77, L2NORMALIZE_BWD, "L2 normalization backward")
        c->args.l2normalize_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.l2normalize_bwd.x = call_normal(te, dtype, 2, mn, 2);
        c->args.l2normalize_bwd.rnorm = te_tensor_full(te, TE_F32, 1, vm, 0.06);
        c->args.l2normalize_bwd.dx = call_out(c, te, dtype, 2, mn);
        break;
        CALL(78, ACT_FWD, "swiglu of interleaved halves")
        c->args.act_fwd.x = call_normal(te, dtype, 2, m2n, 1);
        c->args.act_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.act_fwd.activation = TE_SWIGLU;
        c->args.act_fwd.activation_params.glu_interleave_size = 24;
        break;
        CALL(79, ACT_BWD, "swiglu of interleaved halves backward")
        c->args.act_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.act_bwd.x = call_normal(te, dtype, 2, m2n, 2);
        c->args.act_bwd.dx = call_out(c, te, dtype, 2, m2n);
        c->args.act_bwd.activation = TE_SWIGLU;
        c->args.act_bwd.activation_params.glu_interleave_size = 33;
        break;
        CALL(80, MOE_SPLITS, "sizes of groups, padded")
        c->args.moe_splits.sizes = call_ids(te, 70, 100);
        c->args.moe_splits.padded = call_out(c, te, TE_I64, 1, (const int64_t[]){70});
        c->args.moe_splits.offsets = call_out(c, te, TE_I32, 1, (const int64_t[]){70});
        c->args.moe_splits.align = 16;
        c->tolerance = 0;
        break;
        CALL(81, MOE_MASK_MAP, "map of a routing mask")
        c->args.moe_mask_map.routing_map = call_mask(te, M, 40);
        c->args.moe_mask_map.row_id_map = call_out(c, te, TE_I32, 2, (const int64_t[]){M, 81});
        c->args.moe_mask_map.tokens_per_expert = call_out(c, te, TE_I64, 1, (const int64_t[]){40});
        c->tolerance = 0;
        break;
        CALL(82, MOE_INDEX_MAP, "map of routing indices")
        c->args.moe_index_map.experts = call_ids(te, 2 * M, 100);
        c->args.moe_index_map.row_id_map = call_out(c, te, TE_I32, 1, (const int64_t[]){2 * M});
        c->args.moe_index_map.num_out_tokens = 200;
        c->tolerance = 0;
        break;
        CALL(125, MOE_LOCAL_IDS, "places of experts on a rank")
        c->args.moe_local_ids.experts = te_tensor_view(call_ids(te, 2 * M, 100), 2, (const int64_t[]){M, 2});
        c->args.moe_local_ids.dropped = te_tensor_view(call_mask(te, 26, 5), 1, vm);
        c->args.moe_local_ids.local = call_out(c, te, TE_I32, 2, (const int64_t[]){M, 2});
        c->args.moe_local_ids.tokens_per_expert = call_out(c, te, TE_I64, 1, (const int64_t[]){40});
        c->args.moe_local_ids.first = 30;
        c->args.moe_local_ids.count = 40;
        c->tolerance = 0;
        break;
        CALL(126, MOE_ROUTER_FWD, "router of a Gate: eight of 264 experts, by biased softmax, in three of eight groups")
        c->args.moe_router_fwd.logits = call_normal(te, TE_F32, 2, mn, 1);
        c->args.moe_router_fwd.expert_bias = call_normal(te, TE_F32, 1, vn, 2);
        c->args.moe_router_fwd.topk_probs = call_out(c, te, dtype, 2, (const int64_t[]){M, 8});
        c->args.moe_router_fwd.topk_indices = call_out(c, te, TE_I32, 2, (const int64_t[]){M, 8});
        c->args.moe_router_fwd.topk = 8;
        c->args.moe_router_fwd.use_pre_softmax = true;
        c->args.moe_router_fwd.norm_topk_prob = TE_ON;
        c->args.moe_router_fwd.num_groups = 8;
        c->args.moe_router_fwd.group_topk = 3;
        c->args.moe_router_fwd.group_best = 2;
        break;
        CALL(127, MOE_ROUTER_BWD, "router of a Gate backward: biased probabilities of seven experts")
        c->args.moe_router_bwd.logits = call_normal(te, dtype, 2, mn, 1);
        c->args.moe_router_bwd.topk_indices = te_tensor_view(call_ids(te, 7 * M, 264), 2, (const int64_t[]){M, 7});
        c->args.moe_router_bwd.dtopk_probs = call_normal(te, TE_F32, 2, (const int64_t[]){M, 7}, 2);
        c->args.moe_router_bwd.expert_bias = te_tensor_full(te, TE_F32, 1, vn, 0.25);
        c->args.moe_router_bwd.dlogits = call_out(c, te, dtype, 2, mn);
        c->args.moe_router_bwd.topk = 7;
        c->args.moe_router_bwd.score_function = TE_SCORE_SQRTSOFTPLUS;
        c->args.moe_router_bwd.bias_in_probs = true;
        break;
        CALL(128, ACT_FWD, "clamped swiglu without offset")
        c->args.act_fwd.x = call_normal(te, dtype, 2, m2n, 1);
        c->args.act_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.act_fwd.activation = TE_CLAMPED_SWIGLU;
        c->args.act_fwd.activation_params.limit = 1;
        c->args.act_fwd.activation_params.alpha = 1;
        c->args.act_fwd.activation_params.no_glu_linear_offset = true;
        break;
        CALL(129, MUL, "product of two")
        c->args.mul.x = call_normal(te, dtype, 2, mn, 1);
        c->args.mul.y = call_normal(te, dtype, 2, mn, 2);
        c->args.mul.out = call_out(c, te, dtype, 2, mn);
        break;
        CALL(130, MUL, "rows times factors")
        c->args.mul.x = call_normal(te, dtype, 2, mn, 1);
        c->args.mul.y = call_normal(te, TE_F32, 1, vm, 2);
        c->args.mul.out = call_out(c, te, dtype, 2, mn);
        break;
        CALL(131, ROW_DOT, "products of rows")
        c->args.row_dot.x = call_normal(te, dtype, 2, mn, 1);
        c->args.row_dot.y = call_normal(te, dtype, 2, mn, 2);
        c->args.row_dot.out = call_out(c, te, TE_F32, 1, vm);
        break;
        CALL(132, SCALED_ACT_FWD, "swiglu times factors of rows")
        c->args.scaled_act_fwd.x = call_normal(te, dtype, 2, m2n, 1);
        c->args.scaled_act_fwd.act_scales = call_normal(te, dtype, 1, vm, 2);
        c->args.scaled_act_fwd.y = call_out(c, te, dtype, 2, mn);
        c->args.scaled_act_fwd.activation = TE_SWIGLU;
        break;
        CALL(133, SCALED_ACT_BWD, "swiglu times factors of rows backward")
        c->args.scaled_act_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.scaled_act_bwd.x = call_normal(te, dtype, 2, m2n, 2);
        c->args.scaled_act_bwd.act_scales = call_normal(te, dtype, 1, vm, 3);
        c->args.scaled_act_bwd.dx = call_out(c, te, dtype, 2, m2n);
        c->args.scaled_act_bwd.dact_scales = call_out(c, te, TE_F32, 1, vm);
        c->args.scaled_act_bwd.activation = TE_SWIGLU;
        break;
        CALL(83, MOE_CHUNK_MAP, "map of sorted chunks")
        c->args.moe_chunk_map.sizes = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){4}, (const int32_t[]){50, 0, 13, 60});
        c->args.moe_chunk_map.sorted_index = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){4}, (const int32_t[]){2, 3, 1, 0});
        c->args.moe_chunk_map.row_id_map = call_out(c, te, TE_I32, 1, vm);
        c->tolerance = 0;
        break;
        CALL(84, MOE_PERMUTE, "permute tokens and probabilities")
        c->args.moe_permute.x = call_normal(te, dtype, 2, mn, 1);
        c->args.moe_permute.row_id_map = call_mask_map(te, M, 40);
        c->args.moe_permute.probs = call_normal(te, TE_F32, 2, (const int64_t[]){M, 40}, 2);
        c->args.moe_permute.y = call_out(c, te, dtype, 2, (const int64_t[]){2 * M, N});
        c->args.moe_permute.permuted_probs = call_out(c, te, TE_F32, 1, (const int64_t[]){2 * M});
        c->tolerance = 0;
        break;
        CALL(85, MOE_UNPERMUTE, "unpermute with merging probabilities")
        c->args.moe_unpermute.x = call_normal(te, dtype, 2, (const int64_t[]){2 * M, N}, 1);
        c->args.moe_unpermute.row_id_map = call_mask_map(te, M, 40);
        c->args.moe_unpermute.merging_probs = call_normal(te, TE_F32, 2, (const int64_t[]){M, 40}, 2);
        c->args.moe_unpermute.y = call_out(c, te, dtype, 2, mn);
        break;
        CALL(86, MOE_UNPERMUTE_BWD, "unpermute backward")
        c->args.moe_unpermute_bwd.dy = call_normal(te, dtype, 2, mn, 1);
        c->args.moe_unpermute_bwd.x = call_normal(te, dtype, 2, (const int64_t[]){2 * M, N}, 2);
        c->args.moe_unpermute_bwd.row_id_map = call_mask_map(te, M, 40);
        c->args.moe_unpermute_bwd.merging_probs = call_normal(te, TE_F32, 2, (const int64_t[]){M, 40}, 3);
        c->args.moe_unpermute_bwd.dx = call_out(c, te, dtype, 2, (const int64_t[]){2 * M, N});
        c->args.moe_unpermute_bwd.dprobs = call_out(c, te, TE_F32, 2, (const int64_t[]){M, 40});
        break;
        CALL(87, MOE_ROUTER_FWD, "router: eight of 264 experts, in four of eight groups")
        c->args.moe_router_fwd.logits = call_normal(te, TE_F32, 2, mn, 1);
        c->args.moe_router_fwd.expert_bias = call_normal(te, TE_F32, 1, vn, 2);
        c->args.moe_router_fwd.probs = call_out(c, te, TE_F32, 2, mn);
        c->args.moe_router_fwd.routing_map = call_out(c, te, TE_U8, 2, mn);
        c->args.moe_router_fwd.topk = 8;
        c->args.moe_router_fwd.num_groups = 8;
        c->args.moe_router_fwd.group_topk = 4;
        c->args.moe_router_fwd.score_function = TE_SCORE_SIGMOID;
        c->tolerance = 1e-5;
        break;
        CALL(88, MOE_ROUTER_BWD, "router backward, all scores")
        c->args.moe_router_bwd.logits = call_normal(te, dtype, 2, mn, 1);
        c->args.moe_router_bwd.dprobs = call_normal(te, TE_F32, 2, mn, 2);
        c->args.moe_router_bwd.dlogits = call_out(c, te, dtype, 2, mn);
        c->args.moe_router_bwd.topk = 2;
        c->args.moe_router_bwd.all_scores = true;
        break;
        CALL(89, MOE_AUX_LOSS_FWD, "auxiliary loss")
        c->args.moe_aux_loss_fwd.probs = call_normal(te, dtype, 2, mn, 1);
        c->args.moe_aux_loss_fwd.tokens_per_expert = call_ids(te, N, 9);
        c->args.moe_aux_loss_fwd.loss = call_out(c, te, TE_F32, 1, one);
        c->args.moe_aux_loss_fwd.total_num_tokens = M;
        c->args.moe_aux_loss_fwd.num_experts = 264;
        c->args.moe_aux_loss_fwd.topk = 2;
        c->args.moe_aux_loss_fwd.coeff = 1;
        c->tolerance = 1e-4; /* a sum of values of either sign */
        break;
        CALL(90, MOE_AUX_LOSS_BWD, "auxiliary loss backward")
        c->args.moe_aux_loss_bwd.dloss = te_tensor_full(te, TE_F32, 1, one, 0.5);
        c->args.moe_aux_loss_bwd.tokens_per_expert = call_ids(te, N, 9);
        c->args.moe_aux_loss_bwd.dprobs = call_out(c, te, dtype, 2, mn);
        c->args.moe_aux_loss_bwd.total_num_tokens = M;
        c->args.moe_aux_loss_bwd.num_experts = 264;
        c->args.moe_aux_loss_bwd.topk = 2;
        c->args.moe_aux_loss_bwd.coeff = 1;
        break;
        CALL(91, GROUPED_COLUMN_SUM, "column sums of groups")
        c->args.grouped_column_sum.x = call_normal(te, dtype, 2, mn, 1);
        c->args.grouped_column_sum.sizes = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){50, 0, 77});
        c->args.grouped_column_sum.out = call_out(c, te, dtype, 2, (const int64_t[]){3, N});
        break;
        CALL(92, SOFTCAP, "capped numbers")
        c->args.softcap.x = call_normal(te, dtype, 2, mn, 1);
        c->args.softcap.y = call_out(c, te, dtype, 2, mn);
        c->args.softcap.cap = 0.7f;
        break;
        CALL(95, STEP_NUMBERS, "bias corrections behind a skipped step")
        c->args.step_numbers.found_inf = c->out[c->num_out++] = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.step_numbers.skipped = c->out[c->num_out++] = te_tensor_full(te, TE_F32, 1, one, 2);
        c->args.step_numbers.count = true;
        c->args.step_numbers.step = 9;
        c->args.step_numbers.betas = te_tensor_full(te, TE_F32, 2, (const int64_t[]){3, 2}, 0.9);
        c->args.step_numbers.bias_correction = call_out(c, te, TE_F32, 2, (const int64_t[]){3, 2});
        break;
        CALL(96, UPDATE_SCALE, "loss scale")
        c->args.update_scale.scale = c->out[c->num_out++] = te_tensor_full(te, TE_F32, 1, one, 1024);
        c->args.update_scale.inv_scale = call_out(c, te, TE_F32, 1, one);
        c->args.update_scale.growth_tracker = c->out[c->num_out++] = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.update_scale.found_inf = c->out[c->num_out++] = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.update_scale.growth_factor = 2;
        c->args.update_scale.backoff_factor = 0.5f;
        c->args.update_scale.growth_interval = 2;
        break;
        CALL(97, ROPE, "rope of packed sequences")
        c->args.rope.x = call_normal(te, dtype, 3, packed_q, 1);
        c->args.rope.y = call_out(c, te, dtype, 3, packed_q);
        c->args.rope.format = TE_THD;
        c->args.rope.cu_seqlens = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 64, 144});
        break;
        CALL(98, CU_SEQLENS, "lengths from a mask")
        c->args.cu_seqlens.mask = call_mask(te, 40, 77);
        c->args.cu_seqlens.cu_seqlens = call_out(c, te, TE_I32, 1, (const int64_t[]){41});
        break;
        CALL(99, COPY_TO_KV_CACHE, "keys and values into pages")
        c->args.copy_to_kv_cache.k = call_normal(te, dtype, 4, (const int64_t[]){5, 2, 2, 64}, 1);
        c->args.copy_to_kv_cache.v = call_normal(te, dtype, 4, (const int64_t[]){5, 2, 2, 32}, 2);
        c->args.copy_to_kv_cache.k_cache = call_out(c, te, dtype, 4, (const int64_t[]){8, 16, 2, 64});
        c->args.copy_to_kv_cache.v_cache = call_out(c, te, dtype, 4, (const int64_t[]){8, 16, 2, 32});
        c->args.copy_to_kv_cache.cu_seqlens = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 5, 8});
        c->args.copy_to_kv_cache.start_positions = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){2}, (const int32_t[]){13, 40});
        c->args.copy_to_kv_cache.page_table = te_tensor_from_host(te, TE_I32, 2, (const int64_t[]){2, 4}, (const int32_t[]){6, 1, 4, 0, 7, 2, 3, 5});
        break;
        CALL(156, GEMM, "gemm that quantizes its few rows")
        c->args.gemm.a = call_normal(te, dtype, 2, (const int64_t[]){3, 144}, 1);
        c->args.gemm.b = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){N, 144}, 2);
        c->args.gemm.b_transposed = true;
        c->args.gemm.d = call_out(c, te, dtype, 2, (const int64_t[]){3, N});
        c->args.gemm.m = 3;
        c->args.gemm.n = N;
        c->args.gemm.k = 144;
        c->args.gemm.quantize_a = TE_F8E4M3;
        c->args.gemm.quantize_scale = te_tensor_full(te, TE_F32, 1, one, 64);
        c->args.gemm.quantize_amax = call_out(c, te, TE_F32, 1, one);
        break;
        CALL(161, JOINT_GEMM, "three products of nvfp4 that quantize their few rows")
        c->args.joint_gemm.a = call_normal(te, dtype, 2, (const int64_t[]){3, 256}, 1);
        for (int i = 0; i < 3; i++) {
            te_joint_product *p = &c->args.joint_gemm.product[i];
            p->b = call_bytes(te, TE_F4E2M1, N, 256, 0, 256);
            p->scale_b = call_bytes(te, TE_F8E4M3, 384, 16, 40, 60);
            p->amax_b = te_tensor_full(te, TE_F32, 1, one, 3 + i);
            p->bias = call_normal(te, dtype, 1, vn, 2);
            p->d = call_out(c, te, dtype, 2, (const int64_t[]){3, N});
            p->n = N;
        }
        c->args.joint_gemm.count = 3;
        c->args.joint_gemm.m = 3;
        c->args.joint_gemm.k = 256;
        c->args.joint_gemm.scaling_a = c->args.joint_gemm.scaling_b = TE_SCALING_NVFP4;
        c->args.joint_gemm.quantize_a = TE_F4E2M1;
        break;
        CALL(162, JOINT_GEMM, "gate and up with their activation")
        c->args.joint_gemm.a = call_normal(te, dtype, 2, (const int64_t[]){3, 256}, 1);
        c->args.joint_gemm.product[0].d = call_out(c, te, dtype, 3, (const int64_t[]){2, 3, N});
        for (int i = 0; i < 2; i++) {
            c->args.joint_gemm.product[i].b = call_normal(te, dtype, 2, (const int64_t[]){N, 256}, 2 + i);
            c->args.joint_gemm.product[i].n = N;
        }
        c->args.joint_gemm.count = 2;
        c->args.joint_gemm.m = 3;
        c->args.joint_gemm.k = 256;
        c->args.joint_gemm.activation = TE_SWIGLU;
        c->args.joint_gemm.y = call_out(c, te, dtype, 2, (const int64_t[]){3, N});
        c->tolerance = 4 * (dtype == TE_F32 ? 1e-3 : c->tolerance); /* TF32; a product of two results, of which one goes through a nonlinearity */
        break;
        CALL(163, JOINT_GEMM, "a product added to what is there")
        c->args.joint_gemm.a = call_normal(te, dtype, 2, (const int64_t[]){3, 256}, 1);
        c->args.joint_gemm.product[0].b = call_normal(te, dtype, 2, (const int64_t[]){N, 256}, 2);
        c->args.joint_gemm.product[0].d = call_out(c, te, dtype, 2, (const int64_t[]){3, N});
        c->args.joint_gemm.product[0].n = N;
        c->args.joint_gemm.count = 1;
        c->args.joint_gemm.m = 3;
        c->args.joint_gemm.k = 256;
        c->args.joint_gemm.residual = call_normal(te, dtype, 2, (const int64_t[]){3, N}, 3);
        if (dtype == TE_F32) c->tolerance = 1e-3; /* TF32 */
        c->args.joint_gemm.y = call_out(c, te, dtype, 2, (const int64_t[]){3, N});
        break;
        CALL(168, JOINT_GEMM, "two products of rows that LayerNorm makes")
        c->args.joint_gemm.a = call_normal(te, dtype, 2, (const int64_t[]){3, 256}, 1);
        c->args.joint_gemm.norm.normalization = TE_LAYERNORM;
        c->args.joint_gemm.norm_weight = call_normal(te, dtype, 1, (const int64_t[]){256}, 4);
        c->args.joint_gemm.norm_bias = call_normal(te, dtype, 1, (const int64_t[]){256}, 5);
        for (int i = 0; i < 2; i++) {
            c->args.joint_gemm.product[i].b = call_normal(te, dtype, 2, (const int64_t[]){N, 256}, 2 + i);
            c->args.joint_gemm.product[i].d = call_out(c, te, dtype, 2, (const int64_t[]){3, N});
            c->args.joint_gemm.product[i].n = N;
        }
        c->args.joint_gemm.count = 2;
        c->args.joint_gemm.m = 3;
        c->args.joint_gemm.k = 256;
        c->tolerance = 2 * (dtype == TE_F32 ? 1e-3 : c->tolerance); /* TF32; the norm rounds, too, before the products do */
        break;
        CALL(169, JOINT_GEMM, "queries, keys and values, rotated into pages") {
            te_op_joint_gemm_args *a = &c->args.joint_gemm;
            a->a = call_normal(te, dtype, 2, (const int64_t[]){4, 256}, 1);
            for (int i = 0; i < 3; i++) {
                a->product[i].n = i ? 2 * 64 : 8 * 64;
                a->product[i].b = call_normal(te, dtype, 2, (const int64_t[]){a->product[i].n, 256}, 2 + i);
            }
            a->product[0].d = call_out(c, te, dtype, 2, (const int64_t[]){4, 12 * 64});
            a->count = 3;
            a->m = 4;
            a->k = 256;
            a->rope.q = call_out(c, te, dtype, 4, (const int64_t[]){2, 2, 8, 64});
            a->rope.k_cache = call_out(c, te, dtype, 4, (const int64_t[]){8, 16, 2, 64});
            a->rope.v_cache = call_out(c, te, dtype, 4, (const int64_t[]){8, 16, 2, 64});
            a->rope.cu_seqlens = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 2, 3});
            a->rope.cache_positions = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){2}, (const int32_t[]){13, 40});
            a->rope.page_table = te_tensor_from_host(te, TE_I32, 2, (const int64_t[]){2, 4}, (const int32_t[]){6, 1, 4, 0, 7, 2, 3, 5});
            a->rope.format = TE_BSHD;
            a->rope.num_heads = 8;
            a->rope.num_groups = 2;
            a->rope.head_dim = 64;
            c->tolerance = 2 * (dtype == TE_F32 ? 1e-3 : c->tolerance); /* TF32; the product rounds before the rotation does */
            break;
        }
        CALL(157, QKV_ROPE, "split qkv, rope, into pages")
        c->args.qkv_rope.qkv = call_normal(te, dtype, 3, (const int64_t[]){2, 2, 12 * 64}, 1);
        c->args.qkv_rope.q = call_out(c, te, dtype, 4, (const int64_t[]){2, 2, 8, 64});
        c->args.qkv_rope.k_cache = call_out(c, te, dtype, 4, (const int64_t[]){8, 16, 2, 64});
        c->args.qkv_rope.v_cache = call_out(c, te, dtype, 4, (const int64_t[]){8, 16, 2, 64});
        c->args.qkv_rope.cu_seqlens = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 2, 3});
        c->args.qkv_rope.cache_positions = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){2}, (const int32_t[]){13, 40});
        c->args.qkv_rope.page_table = te_tensor_from_host(te, TE_I32, 2, (const int64_t[]){2, 4}, (const int32_t[]){6, 1, 4, 0, 7, 2, 3, 5});
        c->args.qkv_rope.num_heads = 8;
        c->args.qkv_rope.num_groups = 2;
        c->args.qkv_rope.head_dim = 64;
        break;
        CALL(103, SPARSE_ATTN_FWD, "attention by lists of keys, with sinks")
        c->args.sparse_attn_fwd.q = call_normal(te, dtype, 4, (const int64_t[]){2, 39, 10, 72}, 1);
        c->args.sparse_attn_fwd.kv = call_normal(te, dtype, 3, (const int64_t[]){2, 50, 72}, 2);
        c->args.sparse_attn_fwd.indices = te_tensor_view(call_ids(te, 2 * 39 * 37, 57), 3, (const int64_t[]){2, 39, 37}); /* 50 to 56: empty slots */
        c->args.sparse_attn_fwd.sinks = call_normal(te, TE_F32, 1, (const int64_t[]){10}, 3);
        c->args.sparse_attn_fwd.o = call_out(c, te, dtype, 4, (const int64_t[]){2, 39, 10, 72});
        c->args.sparse_attn_fwd.lse = call_out(c, te, TE_F32, 3, (const int64_t[]){2, 10, 39});
        break;
        CALL(104, SPARSE_ATTN_BWD, "attention by lists of keys, backward")
        c->args.sparse_attn_bwd.q = call_normal(te, dtype, 4, (const int64_t[]){2, 39, 10, 72}, 1);
        c->args.sparse_attn_bwd.kv = call_normal(te, dtype, 3, (const int64_t[]){2, 50, 72}, 2);
        c->args.sparse_attn_bwd.indices = te_tensor_view(call_ids(te, 2 * 39 * 37, 57), 3, (const int64_t[]){2, 39, 37});
        c->args.sparse_attn_bwd.sinks = call_normal(te, TE_F32, 1, (const int64_t[]){10}, 3);
        c->args.sparse_attn_bwd.o = call_normal(te, dtype, 4, (const int64_t[]){2, 39, 10, 72}, 4);
        c->args.sparse_attn_bwd.d_o = call_normal(te, dtype, 4, (const int64_t[]){2, 39, 10, 72}, 5);
        c->args.sparse_attn_bwd.lse = te_tensor_full(te, TE_F32, 3, (const int64_t[]){2, 10, 39}, 4);
        c->args.sparse_attn_bwd.dq = call_out(c, te, dtype, 4, (const int64_t[]){2, 39, 10, 72});
        c->args.sparse_attn_bwd.dkv = call_out(c, te, dtype, 3, (const int64_t[]){2, 50, 72});
        c->args.sparse_attn_bwd.dsinks = call_out(c, te, TE_F32, 1, (const int64_t[]){10});
        break;
        CALL(105, ATTN_FWD, "attention, block mask")
        c->args.attn_fwd.q = call_normal(te, dtype, 4, (const int64_t[]){300, 1, 4, 64}, 1);
        c->args.attn_fwd.k = call_normal(te, dtype, 4, (const int64_t[]){300, 1, 2, 64}, 2);
        c->args.attn_fwd.v = call_normal(te, dtype, 4, (const int64_t[]){300, 1, 2, 64}, 3);
        c->args.attn_fwd.o = call_out(c, te, dtype, 4, (const int64_t[]){300, 1, 4, 64});
        c->args.attn_fwd.lse = call_out(c, te, TE_F32, 3, (const int64_t[]){1, 4, 300});
        c->args.attn_fwd.rule.mask = TE_MASK_NONE;
        c->args.attn_fwd.rule.block_mask = te_tensor_from_host(te, TE_U8, 4, (const int64_t[]){1, 1, 3, 3}, (const unsigned char[]){1, 0, 2, 0, 1, 0, 2, 0, 0});
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(106, ATTN_BWD, "attention backward, block mask")
        c->args.attn_bwd.q = call_normal(te, dtype, 4, (const int64_t[]){300, 1, 4, 64}, 1);
        c->args.attn_bwd.k = call_normal(te, dtype, 4, (const int64_t[]){300, 1, 2, 64}, 2);
        c->args.attn_bwd.v = call_normal(te, dtype, 4, (const int64_t[]){300, 1, 2, 64}, 3);
        c->args.attn_bwd.o = call_normal(te, dtype, 4, (const int64_t[]){300, 1, 4, 64}, 4);
        c->args.attn_bwd.d_o = call_normal(te, dtype, 4, (const int64_t[]){300, 1, 4, 64}, 5);
        c->args.attn_bwd.lse = te_tensor_full(te, TE_F32, 3, (const int64_t[]){1, 4, 300}, 4);
        c->args.attn_bwd.dq = call_out(c, te, dtype, 4, (const int64_t[]){300, 1, 4, 64});
        c->args.attn_bwd.dk = call_out(c, te, dtype, 4, (const int64_t[]){300, 1, 2, 64});
        c->args.attn_bwd.dv = call_out(c, te, dtype, 4, (const int64_t[]){300, 1, 2, 64});
        c->args.attn_bwd.rule.mask = TE_MASK_NONE;
        c->args.attn_bwd.rule.block_mask = te_tensor_from_host(te, TE_U8, 4, (const int64_t[]){1, 1, 3, 3}, (const unsigned char[]){1, 0, 2, 0, 1, 0, 2, 0, 0});
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(158, ARGMAX, "the largest of each row")
        c->args.argmax.x = call_normal(te, dtype, 2, mn, 1);
        c->args.argmax.out = call_out(c, te, TE_I32, 1, (const int64_t[]){M});
        c->tolerance = 0;
        break;
        CALL(159, ADVANCE_KV_CACHE, "numbers of the next step of a cache")
        c->args.advance_kv_cache.start_positions = call_out(c, te, TE_I32, 1, three);
        c->args.advance_kv_cache.cu_seqlens_q = call_out(c, te, TE_I32, 1, (const int64_t[]){4});
        c->args.advance_kv_cache.cu_seqlens_kv = call_out(c, te, TE_I32, 1, (const int64_t[]){4});
        c->args.advance_kv_cache.added = 5;
        c->args.advance_kv_cache.step = 1;
        break;
        CALL(107, DETECT_CAUSAL_MASK, "is a mask causal")
        c->args.detect_causal_mask.mask = call_causal_mask(te, 77);
        c->args.detect_causal_mask.causal = call_out(c, te, TE_I32, 1, one);
        break;
        CALL(100, CONTEXT_ROWS, "rows of packed sequences that ranks share")
        c->args.context_rows.cu_seqlens = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){4}, (const int32_t[]){0, 48, 56, 144});
        c->args.context_rows.map = call_out(c, te, TE_I32, 1, (const int64_t[]){160});
        c->args.context_rows.ranks = 4;
        break;
        CALL(101, CONTEXT_LENGTHS, "lengths of the chunks of a rank")
        c->args.context_lengths.cu_seqlens = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){4}, (const int32_t[]){0, 41, 49, 130});
        c->args.context_lengths.cu_seqlens_padded = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){4}, (const int32_t[]){0, 48, 56, 144});
        c->args.context_lengths.lengths = call_out(c, te, TE_I32, 1, (const int64_t[]){4});
        c->args.context_lengths.starts = call_out(c, te, TE_I32, 1, (const int64_t[]){4});
        c->args.context_lengths.ranks = 4;
        c->args.context_lengths.rank = 1;
        break;
        CALL(102, CONTEXT_MERGE, "attention to more keys joins")
        c->args.context_merge.x = call_normal(te, dtype, 4, q, 1);
        c->args.context_merge.x_lse = call_normal(te, TE_F32, 3, lse, 2);
        c->args.context_merge.x_max_logit = call_normal(te, TE_F32, 1, eight, 3);
        c->args.context_merge.o = call_out(c, te, TE_F32, 4, q);
        c->args.context_merge.lse = call_out(c, te, TE_F32, 3, lse);
        c->args.context_merge.max_logit = call_out(c, te, TE_F32, 1, eight);
        break;
        CALL(150, AMAX, "amaxes of groups of rows")
        c->args.amax.x = call_normal(te, dtype, 2, mn, 1);
        c->args.amax.amax = call_out(c, te, TE_F32, 1, three);
        c->args.amax.groups = call_groups(te, M);
        c->tolerance = 0;
        break;
        CALL(151, FP8_QUANTIZE, "quantize e5m2 by groups of rows, both copies")
        c->args.fp8_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.fp8_quantize.row = call_out(c, te, TE_F8E5M2, 2, row);
        c->args.fp8_quantize.col = call_out(c, te, TE_F8E5M2, 2, nm);
        c->args.fp8_quantize.scale = te_tensor_from_host(te, TE_F32, 1, three, (const float[]){3, 100, 0.7f});
        c->args.fp8_quantize.scale_inv = call_out(c, te, TE_F32, 1, three);
        c->args.fp8_quantize.amax = call_out(c, te, TE_F32, 1, three);
        c->args.fp8_quantize.groups = call_groups(te, M);
        c->tolerance = 0;
        break;
        CALL(152, FP8_DEQUANTIZE, "dequantize by groups of rows")
        c->args.fp8_dequantize.q = call_normal(te, TE_F8E4M3, 2, row, 1);
        c->args.fp8_dequantize.scale_inv = te_tensor_from_host(te, TE_F32, 1, three, (const float[]){0.3f, 0.01f, 2});
        c->args.fp8_dequantize.y = call_out(c, te, dtype, 2, mn);
        c->args.fp8_dequantize.groups = call_groups(te, M);
        c->tolerance = 0;
        break;
        CALL(153, NVFP4_AMAX, "nvfp4 amaxes of groups of rows")
        c->args.nvfp4_amax.x = call_normal(te, dtype, 2, mn, 1);
        c->args.nvfp4_amax.amax_row = call_out(c, te, TE_F32, 1, three);
        c->args.nvfp4_amax.amax_col = call_out(c, te, TE_F32, 1, three);
        c->args.nvfp4_amax.rht = true;
        c->args.nvfp4_amax.groups = call_groups(te, M);
        c->tolerance = 0;
        break;
        CALL(154, NVFP4_QUANTIZE, "nvfp4 by groups of rows, both copies")
        c->args.nvfp4_quantize.x = call_normal(te, dtype, 2, mn, 1);
        c->args.nvfp4_quantize.row = call_out(c, te, TE_F4E2M1, 2, (const int64_t[]){M, 288});
        c->args.nvfp4_quantize.row_scale = call_out(c, te, TE_F8E4M3, 2, (const int64_t[]){256, 20});
        c->args.nvfp4_quantize.col = call_out(c, te, TE_F4E2M1, 2, (const int64_t[]){N, 160});
        c->args.nvfp4_quantize.col_scale = call_out(c, te, TE_F8E4M3, 2, (const int64_t[]){384, 12});
        c->args.nvfp4_quantize.amax_row = te_tensor_from_host(te, TE_F32, 1, three, (const float[]){3.5f, 30, 2});
        c->args.nvfp4_quantize.amax_col = te_tensor_from_host(te, TE_F32, 1, three, (const float[]){4.5f, 40, 5});
        c->args.nvfp4_quantize.rht = true;
        c->args.nvfp4_quantize.groups = call_groups(te, M);
        c->tolerance = 0;
        break;
        CALL(155, NVFP4_DEQUANTIZE, "nvfp4 dequantize by groups of rows, column-wise")
        c->args.nvfp4_dequantize.q = call_fp4(te, N, 160);
        c->args.nvfp4_dequantize.scale = call_normal(te, TE_F8E4M3, 2, (const int64_t[]){384, 12}, 2);
        c->args.nvfp4_dequantize.amax = te_tensor_from_host(te, TE_F32, 1, three, (const float[]){3.5f, 30, 2});
        c->args.nvfp4_dequantize.y = call_out(c, te, dtype, 2, mn);
        c->args.nvfp4_dequantize.columnwise = c->args.nvfp4_dequantize.rht = true;
        c->args.nvfp4_dequantize.groups = call_groups(te, M);
        c->tolerance = 0;
        break;
        CALL(160, ATTN_FWD, "attention of e4m3 codes, causal, grouped heads")
        c->args.attn_fwd.q = call_normal(te, TE_F8E4M3, 4, q, 1);
        c->args.attn_fwd.k = call_normal(te, TE_F8E4M3, 4, kv, 2);
        c->args.attn_fwd.v = call_normal(te, TE_F8E4M3, 4, kv, 3);
        c->args.attn_fwd.o = call_out(c, te, dtype, 4, q);
        c->args.attn_fwd.lse = call_out(c, te, TE_F32, 3, lse);
        c->args.attn_fwd.fp8.s_dtype = TE_F8E4M3;
        c->args.attn_fwd.fp8.s_amax = call_out(c, te, TE_F32, 1, one);
        c->args.attn_fwd.fp8.q_scale_inv = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.attn_fwd.fp8.k_scale_inv = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.attn_fwd.fp8.v_scale_inv = te_tensor_full(te, TE_F32, 1, one, 0.5);
        c->tolerance = 5e-2; /* two devices may round probabilities to other codes */
        break;
        CALL(164, COPY_TO_KV_CACHE, "keys and values into pages of codes")
        c->args.copy_to_kv_cache.k = call_normal(te, dtype, 4, (const int64_t[]){5, 2, 2, 64}, 1);
        c->args.copy_to_kv_cache.v = call_normal(te, dtype, 4, (const int64_t[]){5, 2, 2, 32}, 2);
        c->args.copy_to_kv_cache.k_cache = call_out(c, te, TE_F8E4M3, 4, (const int64_t[]){8, 16, 2, 64});
        c->args.copy_to_kv_cache.v_cache = call_out(c, te, TE_F8E4M3, 4, (const int64_t[]){8, 16, 2, 32});
        c->args.copy_to_kv_cache.k_factors = call_out(c, te, TE_F8E8M0, 3, (const int64_t[]){8, 16, 2});
        c->args.copy_to_kv_cache.v_factors = call_out(c, te, TE_F8E8M0, 3, (const int64_t[]){8, 16, 2});
        c->args.copy_to_kv_cache.cu_seqlens = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 5, 8});
        c->args.copy_to_kv_cache.start_positions = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){2}, (const int32_t[]){13, 40});
        c->args.copy_to_kv_cache.page_table = te_tensor_from_host(te, TE_I32, 2, (const int64_t[]){2, 4}, (const int32_t[]){6, 1, 4, 0, 7, 2, 3, 5});
        break;
        CALL(165, QKV_ROPE, "split qkv, into pages of codes")
        c->args.qkv_rope.qkv = call_normal(te, dtype, 3, (const int64_t[]){2, 2, 12 * 64}, 1);
        c->args.qkv_rope.q = call_out(c, te, dtype, 4, (const int64_t[]){2, 2, 8, 64});
        c->args.qkv_rope.k_cache = call_out(c, te, TE_F8E4M3, 4, (const int64_t[]){8, 16, 2, 64});
        c->args.qkv_rope.v_cache = call_out(c, te, TE_F8E4M3, 4, (const int64_t[]){8, 16, 2, 64});
        c->args.qkv_rope.k_factors = call_out(c, te, TE_F8E8M0, 3, (const int64_t[]){8, 16, 2});
        c->args.qkv_rope.v_factors = call_out(c, te, TE_F8E8M0, 3, (const int64_t[]){8, 16, 2});
        c->args.qkv_rope.cu_seqlens = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 2, 3});
        c->args.qkv_rope.cache_positions = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){2}, (const int32_t[]){13, 40});
        c->args.qkv_rope.num_heads = 8;
        c->args.qkv_rope.num_groups = 2;
        c->args.qkv_rope.head_dim = 64;
        c->args.qkv_rope.page_table = te_tensor_from_host(te, TE_I32, 2, (const int64_t[]){2, 4}, (const int32_t[]){6, 1, 4, 0, 7, 2, 3, 5});
        break;
        CALL(166, ATTN_FWD, "attention to a cache of codes")
        c->args.attn_fwd.q = call_normal(te, dtype, 4, (const int64_t[]){5, 2, 8, 64}, 1);
        c->args.attn_fwd.k = call_normal(te, TE_F8E4M3, 4, (const int64_t[]){8, 16, 2, 64}, 2);
        c->args.attn_fwd.v = call_normal(te, TE_F8E4M3, 4, (const int64_t[]){8, 16, 2, 64}, 3);
        c->args.attn_fwd.o = call_out(c, te, dtype, 4, (const int64_t[]){5, 2, 8, 64});
        c->args.attn_fwd.rule.mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
        c->args.attn_fwd.rule.cu_seqlens_q = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 5, 8});
        c->args.attn_fwd.rule.cu_seqlens_kv = te_tensor_from_host(te, TE_I32, 1, (const int64_t[]){3}, (const int32_t[]){0, 41, 101});
        c->args.attn_fwd.rule.page_table = te_tensor_from_host(te, TE_I32, 2, (const int64_t[]){2, 4}, (const int32_t[]){6, 1, 4, 0, 7, 2, 3, 5});
        c->args.attn_fwd.rule.k_factors = te_tensor_full(te, TE_F8E8M0, 3, (const int64_t[]){8, 16, 2}, 0.5);
        c->args.attn_fwd.rule.v_factors = te_tensor_full(te, TE_F8E8M0, 3, (const int64_t[]){8, 16, 2}, 2);
        if (dtype != TE_F32) c->tolerance *= 2;
        break;
        CALL(167, ATTN_BWD, "attention of e4m3 codes, causal, grouped heads, backward")
        c->args.attn_bwd.q = call_normal(te, TE_F8E4M3, 4, q, 1);
        c->args.attn_bwd.k = call_normal(te, TE_F8E4M3, 4, kv, 2);
        c->args.attn_bwd.v = call_normal(te, TE_F8E4M3, 4, kv, 3);
        c->args.attn_bwd.o = call_normal(te, dtype, 4, q, 4);
        c->args.attn_bwd.d_o = call_normal(te, TE_F8E5M2, 4, q, 5);
        c->args.attn_bwd.lse = te_tensor_full(te, TE_F32, 3, lse, 4);
        c->args.attn_bwd.dq = call_out(c, te, dtype, 4, q);
        c->args.attn_bwd.dk = call_out(c, te, dtype, 4, kv);
        c->args.attn_bwd.dv = call_out(c, te, dtype, 4, kv);
        c->args.attn_bwd.fp8.dp_dtype = TE_F8E5M2;
        c->args.attn_bwd.fp8.dp_scale = te_tensor_full(te, TE_F32, 1, one, 8);
        c->args.attn_bwd.fp8.dp_amax = call_out(c, te, TE_F32, 1, one);
        c->args.attn_bwd.fp8.q_scale_inv = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.attn_bwd.fp8.k_scale_inv = te_tensor_full(te, TE_F32, 1, one, 1);
        c->args.attn_bwd.fp8.v_scale_inv = te_tensor_full(te, TE_F32, 1, one, 0.5);
        c->args.attn_bwd.fp8.do_scale_inv = te_tensor_full(te, TE_F32, 1, one, 2);
        c->tolerance = 5e-2; /* two devices may round probabilities and dP to other codes */
        break;
    default: return false;
    }
#undef CALL
    return true;
}
/* Builds the call at place `index`, by number, for `dtype`; false when there are no more. */
static inline bool call_build(call *c, te_ctx *te, int index, te_dtype dtype) {
    int number;
    for (number = 0; number < CALL_END; number++)
        if (call_numbered(c, te, number, dtype, true) && index-- == 0) return call_numbered(c, te, number, dtype, false);
    return false;
}

/* sqrt(sum (got - want)^2 / sum want^2) over all outputs, the worst of them; 0 when all bytes are equal. Infinity where one is NaN and the
 * other is not, and where codes or scales of 8 bits or fewer differ. Both calls were made; `got` on one context, `want` on another. */
static inline double call_difference(const call *got, const call *want) {
    double worst = 0;
    int i;
    for (i = 0; i < got->num_out; i++) {
        int64_t n = te_tensor_numel(got->out[i]), k;
        float *a = (float *)malloc((size_t)(n + 1) * sizeof(float)), *b = (float *)malloc((size_t)(n + 1) * sizeof(float));
        double error = 0, size = 0;
        if (a && b && te_dtype_bits(te_tensor_dtype(want->out[i])) <= 8) {
            size_t bytes = te_tensor_bytes(want->out[i]); /* no more than n + 1 floats */
            if (te_tensor_to_host(got->out[i], a) != TE_OK || te_tensor_to_host(want->out[i], b) != TE_OK || memcmp(a, b, bytes) != 0) worst = (double)INFINITY;
        } else if (!a || !b || te_tensor_to_f32(got->out[i], a) != TE_OK || te_tensor_to_f32(want->out[i], b) != TE_OK)
            worst = (double)INFINITY;
        else
            for (k = 0; k < n; k++) {
                if (memcmp(a + k, b + k, sizeof(float)) == 0) {
                    size += isfinite(b[k]) ? (double)b[k] * b[k] : 0;
                    continue;
                }
                if (!isfinite(a[k]) || !isfinite(b[k])) worst = (double)INFINITY;
                error += ((double)a[k] - b[k]) * ((double)a[k] - b[k]);
                size += (double)b[k] * b[k];
            }
        error = sqrt(error / (size > 0 ? size : 1));
        if (!(error <= worst)) worst = error;
        free(a);
        free(b);
    }
    return worst;
}

#endif /* TE_CATALOGUE_H_INCLUDED */
