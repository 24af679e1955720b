/* ops/test_attn_places.c: attention gives a sequence the same bits wherever it lies: packed among others, with garbage between them, anywhere in a batch, again, and beside other work of the
 * device. Each sequence alone is what it is compared with. */
#include "../te_test.h"

enum { HEADS = 4, GROUPS = 2, RESULTS = 4 }; /* o, dq, dk, dv */
static const char *const results[RESULTS] = {"o", "dq", "dk", "dv"};

/* Packed q, k, v and the gradient of o: sequence i has rows at[i] .. at[i] + length[i] - 1, of numbers that are its own, and NaN lies between sequences. */
typedef struct packed {
    te_tensor *q, *k, *v, *d_o, *cu, *starts;
    int n, longest;
} packed;
static te_tensor *rows_of(te_ctx *te, te_dtype dtype, const int *length, const int *at, int n, int64_t heads, int64_t d, uint64_t seed) {
    const int64_t row = heads * d;
    float *x = test_alloc((size_t)(at[n] * row) * sizeof(float));
    for (int64_t i = 0; i < at[n] * row; i++) x[i] = NAN;
    for (int i = 0; i < n; i++)
        if (length[i]) memcpy(x + at[i] * row, test_normal(length[i] * row, seed + 10 * (uint64_t)length[i]), (size_t)(length[i] * row) * sizeof(float));
    return test_tensor(te, dtype, SHAPE(at[n], heads, d), x);
}
static packed pack(te_ctx *te, te_dtype dtype, const int *length, int n, int gap, int64_t d) {
    packed p = {.n = n};
    int at[32] = {0};
    int64_t starts[32] = {0}, cu[32] = {0};
    for (int i = 0; i < n; i++) {
        at[i + 1] = at[i] + length[i] + gap;
        starts[i + 1] = at[i + 1];
        cu[i + 1] = cu[i] + length[i];
        if (length[i] > p.longest) p.longest = length[i];
    }
    p.q = rows_of(te, dtype, length, at, n, HEADS, d, 1);
    p.k = rows_of(te, dtype, length, at, n, GROUPS, d, 2);
    p.v = rows_of(te, dtype, length, at, n, GROUPS, d, 3);
    p.d_o = rows_of(te, dtype, length, at, n, HEADS, d, 4);
    p.cu = test_i32(te, SHAPE(n + 1), cu);
    p.starts = test_i32(te, SHAPE(n + 1), starts);
    return p;
}

static void attend(te_tensor *q, te_tensor *k, te_tensor *v, te_tensor *d_o, const te_attn_desc *desc, te_tensor *out[RESULTS]) {
    te_tensor *x[3] = {q, k, v};
    for (int i = 0; i < 3; i++) x[i] = te_tensor_set_requires_grad(te_tensor_detach(x[i]), true);
    out[0] = te_attention(x[0], x[1], x[2], desc);
    te_backward_from(out[0], d_o);
    for (int i = 0; i < 3; i++) out[i + 1] = te_tensor_grad(x[i]);
}

TE_TEST_DEVICES(attn_of_packed_sequences_is_that_of_each_alone) {
    static const int lengths[] = {129, 1, 0, 300, 17, 128, 64};
    static const struct {
        te_dtype dtype;
        int64_t d;
        te_attn_mask mask;
        te_window window;
    } cases[] = {{TE_BF16, 128, TE_MASK_PADDING_CAUSAL, {0}}, {TE_BF16, 64, TE_MASK_PADDING, {0}}, {TE_F16, 96, TE_MASK_PADDING_CAUSAL, {true, 40, 0}}, {TE_BF16, 192, TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, {0}},
                 {TE_F16, 256, TE_MASK_PADDING_CAUSAL, {0}}, {TE_BF16, 200, TE_MASK_PADDING, {true, 30, 70}}};
    for (int c = 0; c < COUNT(cases); c += test_every_sanitized(3)) {
        test_case("case %d", c);
        const int64_t d = cases[c].d;
        te_attn_desc desc = {.format = TE_THD, .rule = {.mask = cases[c].mask, .window = cases[c].window}};
        packed all = pack(te, cases[c].dtype, lengths, COUNT(lengths), 5, d);
        te_tensor *whole[RESULTS], *alone[RESULTS];
        desc.rule.cu_seqlens_q = desc.rule.cu_seqlens_kv = all.cu;
        desc.rule.cu_seqlens_q_padded = desc.rule.cu_seqlens_kv_padded = all.starts;
        desc.rule.max_seqlen_q = desc.rule.max_seqlen_kv = all.longest;
        attend(all.q, all.k, all.v, all.d_o, &desc, whole);
        REQUIRE_OK(te);
        float *read[RESULTS];
        for (int r = 0; r < RESULTS; r++) read[r] = test_read(whole[r]);
        for (int i = 0, at = 0; i < COUNT(lengths); at += lengths[i++] + 5) {
            if (!lengths[i]) continue;
            packed one = pack(te, cases[c].dtype, lengths + i, 1, 0, d);
            desc.rule.cu_seqlens_q = desc.rule.cu_seqlens_kv = one.cu;
            desc.rule.cu_seqlens_q_padded = desc.rule.cu_seqlens_kv_padded = NULL;
            desc.rule.max_seqlen_q = desc.rule.max_seqlen_kv = 0;
            attend(one.q, one.k, one.v, one.d_o, &desc, alone);
            REQUIRE_OK(te);
            for (int r = 0; r < RESULTS; r++) {
                const int64_t n = te_tensor_numel(alone[r]), row = n / lengths[i];
                CHECK_BYTES(results[r], read[r] + at * row, test_read(alone[r]), (size_t)n * sizeof(float));
                for (int64_t j = 0; j < 5 * row; j++) CHECK(read[r][(at + lengths[i]) * row + j] == 0);
            }
        }
    }
}

/* More tiles than a device has multiprocessors, most of which lie behind the end of a sequence of their own: without a longest length, each sequence has tiles for all rows. And of padded
 * batches, whose rows behind a sequence become 0: a third of the sequences has no keys. Heads of any size. */
TE_TEST_DEVICES(attn_of_tiles_without_keys) {
    enum { N = 20 };
    int lengths[N];
    for (int i = 0; i < N; i++) lengths[i] = i % 3 == 1 ? 0 : 1 + (i * 83) % 300;
    for (int64_t d = 64; d <= 256; d += 64 * test_every_sanitized(3)) {
        packed all = pack(te, TE_BF16, lengths, N, 0, d);
        te_attn_desc desc = {.format = TE_THD, .rule = {.mask = TE_MASK_PADDING_CAUSAL, .cu_seqlens_q = all.cu, .cu_seqlens_kv = all.cu}};
        test_case("d %d", (int)d);
        te_no_grad_begin(te);
        float *whole = test_read(te_attention(all.q, all.k, all.v, &desc));
        te_tensor *padded[3], *part[3] = {all.q, all.k, all.v};
        for (int i = 0; i < 3; i++) {
            padded[i] = te_tensor_full(te, TE_BF16, SHAPE(N, 512, i ? GROUPS : HEADS, d), NAN);
            for (int b = 0, at = 0; b < N; at += lengths[b++])
                if (lengths[b]) te_tensor_copy(te_tensor_narrow(te_tensor_narrow(padded[i], 0, b, 1), 1, 0, lengths[b]), te_tensor_view(te_tensor_narrow(part[i], 0, at, lengths[b]), 4, (const int64_t[]){1, lengths[b], i ? GROUPS : HEADS, d}));
        }
        desc.format = TE_BSHD;
        float *apart = test_read(te_attention(padded[0], padded[1], padded[2], &desc));
        REQUIRE_OK(te);
        for (int b = 0, at = 0; b < N; at += lengths[b++]) {
            const int64_t row = HEADS * d, first = b * 512 * row;
            packed one = pack(te, TE_BF16, lengths + b, 1, 0, d);
            desc.format = TE_THD, desc.rule.cu_seqlens_q = desc.rule.cu_seqlens_kv = one.cu;
            float *alone = lengths[b] ? test_read(te_attention(one.q, one.k, one.v, &desc)) : NULL;
            for (int64_t j = lengths[b] * row; j < 512 * row; j++)
                if (apart[first + j] != 0) {
                    CHECK_MSG(false, "sequence %d: padding row %d is %g", b, (int)(j / row), (double)apart[first + j]);
                    break;
                }
            if (!alone) continue;
            CHECK_BYTES("packed", whole + at * row, alone, (size_t)(lengths[b] * row) * sizeof(float));
            CHECK_BYTES("padded", apart + first, alone, (size_t)(lengths[b] * row) * sizeof(float));
        }
        te_no_grad_end(te);
    }
}

/* The same numbers as sequences 0 and 2 of a batch, and alone. */
TE_TEST_DEVICES(attn_is_the_same_anywhere_in_a_batch) {
    static const int64_t sizes[][2] = {{1, 64}, {17, 128}, {129, 128}, {300, 64}, {257, 96}, {257, 192}, {130, 256}};
    for (int c = 0; c < COUNT(sizes); c++)
        for (int causal = 0; causal < 2; causal++) {
            if ((2 * c + causal) % test_every_odd(3)) continue;
            const int64_t s = sizes[c][0], d = sizes[c][1];
            te_attn_desc desc = {.format = TE_BSHD, .rule.mask = causal ? TE_MASK_CAUSAL : TE_MASK_NONE};
            te_tensor *one[4], *three[4], *alone[RESULTS], *among[RESULTS];
            test_case("s %d d %d causal %d", (int)s, (int)d, causal);
            for (int i = 0; i < 4; i++) {
                const int64_t heads = i == 1 || i == 2 ? GROUPS : HEADS, n = s * heads * d;
                float *x = test_alloc((size_t)(3 * n) * sizeof(float));
                for (int b = 0; b < 3; b++) memcpy(x + b * n, test_normal(n, (uint64_t)(i + 1 + 10 * (b == 1))), (size_t)n * sizeof(float));
                one[i] = test_tensor(te, TE_BF16, SHAPE(1, s, heads, d), x);
                three[i] = test_tensor(te, TE_BF16, SHAPE(3, s, heads, d), x);
            }
            attend(one[0], one[1], one[2], one[3], &desc, alone);
            attend(three[0], three[1], three[2], three[3], &desc, among);
            REQUIRE_OK(te);
            for (int r = 0; r < RESULTS; r++) {
                const int64_t n = te_tensor_numel(alone[r]);
                for (int b = 0; b < 3; b += 2) CHECK_BYTES(results[r], test_read(among[r]) + b * n, test_read(alone[r]), (size_t)n * sizeof(float));
            }
        }
}

/* More tiles than a device has multiprocessors, so that each block computes several: again, while another context keeps the device busy. */
TE_TEST_DEVICES(attn_is_the_same_beside_other_work) {
    const int64_t s = te_ctx_is_cuda(te) ? 1500 : 150, b = te_ctx_is_cuda(te) ? 4 : 1;
    te_ctx *other = test_context(te_ctx_device(te));
    te_attn_desc desc = {.format = TE_BSHD};
    REQUIRE(other != NULL);
    for (int64_t d = 64; d <= 256; d *= 2) {
        te_tensor *x[4], *busy = te_tensor_zeros(other, TE_F32, SHAPE(te_ctx_is_cuda(te) ? 1 << 24 : 1 << 10)), *first[RESULTS], *again[RESULTS];
        test_case("d %d", (int)d);
        for (int i = 0; i < 4; i++) x[i] = te_tensor_normal(te, TE_BF16, SHAPE(b, s, i == 1 || i == 2 ? GROUPS : HEADS, d), 0, 1);
        for (int turn = 0; turn < 3; turn++) {
            for (int i = 0; i < 20 && turn; i++) te_tensor_fill(busy, i);
            attend(x[0], x[1], x[2], x[3], &desc, again);
            REQUIRE_OK(te);
            for (int r = 0; r < RESULTS; r++) {
                if (turn) CHECK_BYTES(results[r], test_read_bytes(again[r]), test_read_bytes(first[r]), (size_t)te_tensor_numel(again[r]) * 2);
                else first[r] = again[r];
            }
        }
        te_synchronize(other);
    }
}
