/* ops/attn/choice.c: chooses the kernels for an attention problem, and says why faster kernels cannot run it. This file
 * must not depend on the sizes of the kernels' tiles. */

/* One bit for each group of faster kernels; the fastest group is the last. 0 means the general kernels, which can run
 * every problem. */
enum { TE__ATTN_MMA = 1, TE__ATTN_HOPPER = 2 };

/* X(feature, kernels that support it in the forward pass, kernels that support it in the backward pass, description) */
#define TE__ATTN_TABLE(X)                                                                             \
    X(WITHOUT_NVRTC, 0, 0, "no NVRTC to compile other kernels")                                       \
    X(FORMATS, 0, 0, "f32, or tensors of different formats")                                          \
    X(CHANNELS, 0, 0, "heads of a size that is no multiple of 8")                                     \
    X(UNALIGNED, 0, 0, "rows that do not start at multiples of 16 bytes")                             \
    X(WIDE, 0, 0, "heads above 256 channels")                                                         \
    X(EMPTY, 0, 0, "no queries, or no keys")                                                          \
    X(SIGN, 0, 0, "a scale below 1e-30")                                                              \
    X(FP8, 0, 0, "S or dP rounded to FP8 codes by the sums of whole rows")                            \
    X(SOFTCAP_TINY, TE__ATTN_MMA | TE__ATTN_HOPPER, 0,                                                \
      "gradients under a soft cap below 0.01")                   \
    X(OTHER_CHIP, TE__ATTN_MMA, TE__ATTN_MMA, "the chip is no Hopper")                                \
    X(ABOVE_128, TE__ATTN_MMA | TE__ATTN_HOPPER, TE__ATTN_HOPPER,                                     \
      "gradients of heads above 128 channels, which Hopper's kernels alone have")                     \
    X(BIAS_FORMAT, TE__ATTN_HOPPER, TE__ATTN_HOPPER, "a bias of the other 16-bit format")             \
    X(PAGES, TE__ATTN_MMA, TE__ATTN_MMA, "keys in pages")                                             \
    X(SHORT, TE__ATTN_MMA | TE__ATTN_HOPPER, TE__ATTN_MMA,                                            \
      "gradients of packed sequences of less than 32 rows, whose sums would fill tiles of their own") \
    X(STRIDES, TE__ATTN_MMA, TE__ATTN_MMA, "strides of 0, or beyond 2^39 bytes")                      \
    X(SOFTCAP_ADDED, TE__ATTN_MMA, 0, "a soft cap beside a bias or ALiBi, which are added behind it") \
    X(MOD, TE__ATTN_HOPPER, TE__ATTN_HOPPER, "the user's rule for scores, compiled in")
typedef enum te__attn_feature {
#define TE__FEATURE(name, forward, backward, what) TE__ATTN_HAS_##name,
    TE__ATTN_TABLE(TE__FEATURE)
#undef TE__FEATURE
    TE__ATTN_FEATURES
} te__attn_feature;
typedef struct te__attn_row {
    int serves[2];         /* forward, backward */
    const char *instead[2]; /* te_explain's sentence, if the general [0] or the mma.sync [1] kernels run */
} te__attn_row;
static const te__attn_row te__attn_rows[TE__ATTN_FEATURES] = {
#define TE__FEATURE(name, forward, backward, what)                                                               \
    {{forward, backward},                                                                                        \
     {"general kernels, in f32, and not tensor cores: " what, "tensor cores by mma.sync and not wgmma: " what}},
    TE__ATTN_TABLE(TE__FEATURE)
#undef TE__FEATURE
};
/* The problems that Hopper's kernels for FP8 codes cannot run: X(condition, description). The general kernels run them.
 * TE__ATTN_CODES_TABLE has those of both passes. */
#define TE__ATTN_CODES_TABLE(X)                                                                                   \
    X(p->baseline, "no NVRTC to compile other kernels")                                                           \
    X(!p->hopper, "the chip is no Hopper")                                                                        \
    X(a->q.dt != TE_F8E4M3 || a->k.dt != TE_F8E4M3 || a->v.dt != TE_F8E4M3, "codes of another format than e4m3")  \
    X(a->d % 16 || a->d_v % 16, "heads of a size that is no multiple of 16")                                      \
    X(te__max(a->d, a->d_v) > 128, "heads above 128 channels")                                                    \
    X(te__attn_is_empty(a), "no queries, or no keys")                                                             \
    X(!(a->scale >= 1e-30f), "a scale below 1e-30")                                                               \
    X(a->dropout_p > 0.0f, "dropout")                                                                             \
    X(a->x.softcap > 0.0f, "a soft cap")                                                                          \
    X(mod, "the user's rule for scores")                                                                          \
    X(a->x.alibi || a->x.bias.dt != TE_DTYPE_NONE, "a bias or ALiBi")                                             \
    X(a->x.mask.dt != TE_DTYPE_NONE || a->x.blocks.dt != TE_DTYPE_NONE, "a mask of elements or of blocks")        \
    X(a->x.softmax != (int)TE_SOFTMAX_VANILLA, "a softmax with an offset")
#define TE__ATTN_FP8_TABLE(X)                                                                                     \
    TE__ATTN_CODES_TABLE(X)                                                                                       \
    X(a->x.s_dt != TE_F8E4M3, "S that is not rounded to e4m3")                                                    \
    X(!a->x.by_row, "S rounded to FP8 codes by the sums of whole rows")                                           \
    X(a->o.dt != TE_BF16 && a->o.dt != TE_F16, "o in f32")                                                        \
    X(a->x.page_size != 0, "keys in pages")                                                                       \
    X(max_logit, "max_logit, since a row's largest score is not looked for")                                      \
    X(!te__attn_codes_fit(a, false), "codes whose rows do not start at multiples of 16 bytes, or strides of 0")
#define TE__ATTN_FP8_BWD_TABLE(X)                                                                                 \
    TE__ATTN_CODES_TABLE(X)                                                                                       \
    X(a->d_o.dt != TE_F8E5M2 || a->x.dp_dt != TE_F8E5M2, "d_o or dP in another format than e5m2")                 \
    X(!o, "no o, so that D is the sum of P dP")                                                                   \
    X((a->dq.dt != TE_BF16 && a->dq.dt != TE_F16) || a->dk.dt != a->dq.dt || a->dv.dt != a->dq.dt ||              \
          (a->o.dt != TE_BF16 && a->o.dt != TE_F16),                                                              \
      "o or gradients in f32, or gradients of different formats")                                                 \
    X(te__attn_has(p, a, mod, true, TE__ATTN_HAS_SHORT), "packed sequences of less than 32 rows")                 \
    X(!te__attn_codes_fit(a, true), "codes whose rows do not start at multiples of 16 bytes, or strides of 0")
static const char te__attn_why_fp8[] = "FP8 tensor cores: TMA and wgmma";

static const char te__attn_why_hopper[] = "tensor cores: TMA and wgmma";

/* Checks that rows of x can be copied in pieces of 16 bytes. A dimension of size 1 needs no stride, except for packed
 * sequences or pages. */
static bool te__attn_view_is_aligned(const te__attn_view *x, const te__attn_kargs *a, int s, int heads) {
    const int64_t rows = s == 1 && !a->x.on ? 0 : x->s, batches = a->batch == 1 && !a->x.page_size ? 0 : x->b;
    return te__view_is_aligned(x->p, rows | batches | (heads == 1 ? 0 : x->h));
}
/* Checks that TMA accepts a stride, which counts elements of 2 bytes. The stride must be positive and below 2^39 bytes.
 * A dimension of size 1 needs no stride. */
static bool te__attn_stride_fits(int64_t stride, int64_t size) {
    return size == 1 || (stride > 0 && stride < (int64_t)1 << 38);
}
static bool te__attn_view_fits(const te__attn_view *x, int64_t rows, int64_t heads, int64_t batch) {
    return te__attn_stride_fits(x->s, rows) && te__attn_stride_fits(x->h, heads) && te__attn_stride_fits(x->b, batch);
}

static bool te__attn_is_empty(const te__attn_kargs *a) {
    return a->s_q == 0 || a->s_kv == 0 || a->batch == 0 || a->heads == 0 || (a->x.packed_q && a->x.t_q == 0) ||
           (a->x.packed_kv && a->x.t_kv == 0);
}
/* Checks that rows of FP8 codes can be copied in pieces of 16 bytes, and read by TMA. */
static bool te__attn_view_has_codes(const te__attn_view *x, int64_t rows, int64_t heads, int64_t batch) {
    return ((uintptr_t)x->p | (uintptr_t)(rows == 1 ? 0 : x->s) | (uintptr_t)(heads == 1 ? 0 : x->h) |
            (uintptr_t)(batch == 1 ? 0 : x->b)) %
                   16 ==
               0 &&
           te__attn_view_fits(x, rows, heads, batch);
}
/* Checks that Hopper's kernels for FP8 codes can read the codes, and that TMA can access o or the gradients. */
static bool te__attn_codes_fit(const te__attn_kargs *a, bool backward) {
    const int64_t rows_q = a->x.packed_q ? a->x.t_q : a->s_q, rows_kv = a->x.packed_kv ? a->x.t_kv : a->s_kv,
                  batch_q = a->x.packed_q ? 1 : a->batch, batch_kv = a->x.packed_kv ? 1 : a->batch;
    const te__attn_view *const of_q[2] = {&a->o, &a->dq}, *const of_kv[2] = {&a->dk, &a->dv};
    bool fits = te__attn_view_has_codes(&a->q, rows_q, a->heads, batch_q) &&
                te__attn_view_has_codes(&a->k, rows_kv, a->groups, batch_kv) &&
                te__attn_view_has_codes(&a->v, rows_kv, a->groups, batch_kv) &&
                (!backward || te__attn_view_has_codes(&a->d_o, rows_q, a->heads, batch_q));
    int i;
    for (i = 0; i < (backward ? 2 : 1); i++)
        fits = fits && te__attn_view_is_aligned(of_q[i], a, a->s_q, a->heads) &&
               te__attn_view_fits(of_q[i], rows_q, a->heads, batch_q);
    for (i = 0; i < (backward ? 2 : 0); i++)
        fits = fits && te__attn_view_is_aligned(of_kv[i], a, a->s_kv, a->groups) &&
               te__attn_view_fits(of_kv[i], rows_kv, a->groups, batch_kv);
    return fits;
}

/* The smallest soft cap whose gradients run on tensor cores. Some tensor-core kernels compute the cap's derivative from
 * log2(P) + lse2. The derivative's error is about 1e-6 / (cap * log2(e)): 7e-5 at this cap. */
#define TE__ATTN_TINY_CAP 1e-2f

/* Returns true if S or dP is rounded to FP8 codes (te_attn_fp8). */
static bool te__attn_rounds(const te__attn_kargs *a) { return a->x.s_dt || a->x.dp_dt; }

/* The tensors of a forward or backward pass. The tensors in `of_q` have one row for each query, those in `of_kv` one
 * row for each key. */
typedef struct te__attn_views {
    const te__attn_view *of_q[4], *of_kv[4];
    int count; /* tensors in each array */
} te__attn_views;
static te__attn_views te__attn_views_of(const te__attn_kargs *a, bool backward) {
    te__attn_views v = TE_ZERO;
    v.of_q[0] = &a->q, v.of_q[1] = &a->o, v.of_q[2] = &a->d_o, v.of_q[3] = &a->dq;
    v.of_kv[0] = &a->k, v.of_kv[1] = &a->v, v.of_kv[2] = &a->dk, v.of_kv[3] = &a->dv;
    v.count = backward ? 4 : 2;
    return v;
}

/* Returns true if the problem has feature f. An optional tensor is given if its `dt` is set. Its pointer may still be
 * NULL here, because the tensor may have no memory yet. */
static bool te__attn_has(const te__plan *p, const te__attn_kargs *a, bool mod, bool backward, te__attn_feature f) {
    const te__attn_views v = te__attn_views_of(a, backward);
    const te__attn_extra *x = &a->x;
    const int dt = a->q.dt, d = (int)te__max(a->d, a->d_v);
    bool fits = true;
    int i;
    switch (f) {
    case TE__ATTN_HAS_WITHOUT_NVRTC: return p->baseline;
    case TE__ATTN_HAS_FORMATS:
        for (i = 0; i < v.count; i++) fits = fits && v.of_q[i]->dt == dt && v.of_kv[i]->dt == dt;
        return !fits || (dt != TE_BF16 && dt != TE_F16);
    case TE__ATTN_HAS_CHANNELS: return a->d % 8 || a->d_v % 8;
    case TE__ATTN_HAS_UNALIGNED:
        for (i = 0; i < v.count; i++)
            fits = fits && te__attn_view_is_aligned(v.of_q[i], a, a->s_q, a->heads) &&
                   te__attn_view_is_aligned(v.of_kv[i], a, a->s_kv, a->groups);
        return !fits;
    case TE__ATTN_HAS_WIDE: return d > 256;
    case TE__ATTN_HAS_EMPTY: return te__attn_is_empty(a);
    case TE__ATTN_HAS_SIGN: return !(a->scale >= 1e-30f); /* a bias or ALiBi is divided by the scale */
    case TE__ATTN_HAS_FP8: return te__attn_rounds(a);
    case TE__ATTN_HAS_SOFTCAP_TINY: return x->softcap > 0.0f && x->softcap < TE__ATTN_TINY_CAP;
    case TE__ATTN_HAS_MOD: return mod;
    case TE__ATTN_HAS_SOFTCAP_ADDED: return x->softcap > 0.0f && (x->bias.dt != TE_DTYPE_NONE || x->alibi);
    case TE__ATTN_HAS_BIAS_FORMAT: return x->bias.dt != TE_DTYPE_NONE && x->bias.dt != dt && x->bias.dt != TE_F32;
    case TE__ATTN_HAS_OTHER_CHIP: return !p->hopper;
    case TE__ATTN_HAS_ABOVE_128: return d > 128;
    case TE__ATTN_HAS_PAGES: return x->page_size != 0;
    case TE__ATTN_HAS_SHORT: return d <= 128 && x->packed_q && (int64_t)a->batch * 32 > (int64_t)x->t_q + 2048;
    case TE__ATTN_HAS_STRIDES:
        for (i = 0; i < v.count; i++)
            fits = fits &&
                   te__attn_view_fits(v.of_q[i], x->packed_q ? x->t_q : a->s_q, a->heads, x->packed_q ? 1 : a->batch) &&
                   te__attn_view_fits(v.of_kv[i], x->packed_kv ? x->t_kv : a->s_kv, a->groups,
                                      x->packed_kv ? 1 : a->batch);
        return !fits;
    case TE__ATTN_FEATURES: break;
    }
    return false;
}

#define TE__LACKS(condition, what)                                                                        \
    if (condition) {                                                                                      \
        te__plan_why(p, "general kernels, in f32, and not FP8 tensor cores: " what);                      \
        return false;                                                                                     \
    }
/* Returns true if attn_fwd_fp8_hopper.cu can run a problem with FP8 codes. Writes the reason to the plan. `max_logit`:
 * max_logit is wanted; its pointer may still be NULL. */
static bool te__attn_choose_fp8(te__plan *p, const te__attn_kargs *a, bool mod, bool max_logit) {
    TE__ATTN_FP8_TABLE(TE__LACKS)
    te__plan_why(p, te__attn_why_fp8);
    return true;
}
/* Returns true if attn_bwd_fp8_hopper.cu can run a problem with FP8 codes. `o`: o is given; its pointer may still be
 * NULL. */
static bool te__attn_choose_fp8_bwd(te__plan *p, const te__attn_kargs *a, bool mod, bool o) {
    TE__ATTN_FP8_BWD_TABLE(TE__LACKS)
    te__plan_why(p, te__attn_why_fp8);
    return true;
}
#undef TE__LACKS

/* Returns the fastest kernels that can run the problem, or 0 for the general kernels. Writes the reason to the plan. */
static int te__attn_choose(te__plan *p, const te__attn_kargs *a, bool mod, bool backward) {
    int serves = TE__ATTN_MMA | TE__ATTN_HOPPER, f;
    te__plan_why(p, te__attn_why_hopper);
    for (f = 0; f < (int)TE__ATTN_FEATURES && serves; f++) {
        const int left = serves & te__attn_rows[f].serves[backward];
        if (left == serves || !te__attn_has(p, a, mod, backward, (te__attn_feature)f)) continue;
        if (!(left & TE__ATTN_HOPPER)) te__plan_why(p, te__attn_rows[f].instead[left != 0]);
        serves = left;
    }
    return serves & TE__ATTN_HOPPER ? TE__ATTN_HOPPER : serves;
}
