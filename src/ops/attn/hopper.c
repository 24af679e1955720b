/* ops/attn/hopper.c: tensor maps, the order of tiles, and launches of the attention kernels of sm_90a. This file must
 * not depend on the driver. */

/* Returns the smallest head size >= d for which the Hopper kernels are compiled. */
static int te__attn_hopper_d(int d) { return d <= 64 ? 64 : d <= 96 ? 96 : d <= 128 ? 128 : d <= 192 ? 192 : 256; }
/* Finds the head sizes of the kernel: *d for q and k, *d_v for v and o. They differ only for 192 and 128 (multi-head
 * latent attention). */
static void te__attn_hopper_heads(const te__attn_kargs *a, int *d, int *d_v) {
    *d = te__attn_hopper_d(a->d);
    *d_v = te__attn_hopper_d(a->d_v);
    if (*d != 192 || *d_v != 128) *d = *d_v = te__max(*d, *d_v);
}

/* Makes a tensor map for [batch, heads, rows, d]. A box has 64 channels and `box` rows. */
static void te__attn_map(te__plan *p, unsigned long long map[16], const te__attn_view *x, int64_t d, int64_t rows,
                         int64_t heads, int64_t batch, int box) {
    const uint64_t dims[4] = {(uint64_t)d, (uint64_t)rows, (uint64_t)heads, (uint64_t)batch};
    const uint64_t strides[3] = {(uint64_t)(rows > 1 ? 2 * x->s : 16), (uint64_t)(heads > 1 ? 2 * x->h : 16),
                                 (uint64_t)(batch > 1 ? 2 * x->b : 16)};
    const uint32_t boxes[4] = {64, (uint32_t)box, 1, 1};
    te__cuda_tensor_map(p, map, x->p, (te_dtype)x->dt, 4, dims, strides, boxes, 128);
}
static void te__attn_maps_q(te__plan *p, const te__attn_kargs *a, unsigned long long map[16], const te__attn_view *x,
                            int d, int box) {
    te__attn_map(p, map, x, d, a->x.packed_q ? a->x.t_q : a->s_q, a->heads, a->x.packed_q ? 1 : a->batch, box);
}
static void te__attn_maps_kv(te__plan *p, const te__attn_kargs *a, unsigned long long map[16], const te__attn_view *x,
                             int d, int box) {
    te__attn_map(p, map, x, d, a->x.packed_kv ? a->x.t_kv : a->s_kv, a->groups, a->x.packed_kv ? 1 : a->batch, box);
}

/* Adds the text of the user's rule (te_score_mod) to the launch. `mod` is this text, or NULL if there is no rule. */
static te_result te__attn_launch_mod(te__plan *p, te__launch *l, const char *mod) {
    return mod ? te__launch_code(p, l, "ops/attn/score_mod.cuh", mod) : TE_OK;
}

/* Returns how many heads run at the same time. Their K and V fill at most a third of the L2 cache, unless K and V of a
 * single head are larger. With a causal mask or a window, the limit is two thirds. The tiles then take unequal time,
 * and more heads at the same time balance the work better. */
static int te__attn_together(const te__attn_kargs *a) {
    const bool diagonal = a->x.causal || a->x.left >= 0 || a->x.right >= 0;
    const int64_t bytes = te__max(1, (int64_t)a->s_kv * (a->d + a->d_v) * 2), heads = (int64_t)a->batch * a->heads;
    int64_t groups = te__max(1, (int64_t)(diagonal ? 32 << 20 : 16 << 20) / bytes), n = 1;
    while (2 * n <= groups) n *= 2;
    return (int)te__min(heads, n * (a->heads / a->groups));
}

/* X(option, condition, value, two): if `condition` is true, a Hopper kernel gets `option` with `value`. `two` is 1 if
 * tiles must have 128 rows. Tiles of 192 rows leave no registers for such an option or, with X_BLOCKS, would lie in two
 * blocks of the block mask. */
#define TE__ATTN_STEPS(X)                                                                \
    X("X_CAP", a->x.softcap > 0.0f, 1, 1)                                                \
    X("X_ALIBI", a->x.alibi, 1, 0)                                                       \
    X("X_BIAS", a->x.bias.dt != TE_DTYPE_NONE, a->x.bias.dt, 1)                          \
    X("X_PAIRS", a->x.bias.dt != TE_DTYPE_NONE, te__attn_bias_pairs(a), 1)               \
    X("X_MASK", a->x.mask.dt != TE_DTYPE_NONE, 1, 1)                                     \
    X("X_BLOCKS", a->x.blocks.dt != TE_DTYPE_NONE, 1, 1)

/* Returns how the kernels read the bias: the value of X_PAIRS (see hopper_scores.cuh). */
static int te__attn_bias_pairs(const te__attn_kargs *a) {
    const te__attn_table *t = &a->x.bias;
    const int size = t->dt == (int)TE_F32 ? 4 : 2;
    if (a->s_kv % 2 || t->j != 1 || t->b % 2 || t->h % 2 || t->i % 2 || (uintptr_t)t->p % (2 * (size_t)size)) return 0;
    return t->i == 0 ? 2 : 1;
}
/* Returns true if TMA can load the bias in tiles of 16-bit elements. */
static bool te__attn_bias_in_tiles(const te__attn_kargs *a) {
    const te__attn_table *t = &a->x.bias;
    const bool strides = t->i % 8 == 0 && t->h % 8 == 0 && t->b % 8 == 0 && t->i < (int64_t)1 << 38 &&
                         t->h < (int64_t)1 << 38 && t->b < (int64_t)1 << 38;
    return t->dt != TE_DTYPE_NONE && t->dt != (int)TE_F32 && te__attn_bias_pairs(a) == 1 && strides &&
           (uintptr_t)t->p % 16 == 0;
}
/* Makes a tensor map for the bias. If the bias repeats along a dimension, this dimension has size 1. */
static void te__attn_map_bias(te__plan *p, unsigned long long map[16], const te__attn_kargs *a) {
    const te__attn_table *t = &a->x.bias;
    const uint64_t dims[4] = {(uint64_t)a->s_kv, (uint64_t)a->s_q, (uint64_t)(t->h ? a->heads : 1),
                              (uint64_t)(t->b ? a->batch : 1)};
    const uint64_t strides[3] = {(uint64_t)(2 * t->i), (uint64_t)(t->h ? 2 * t->h : 16),
                                 (uint64_t)(t->b ? 2 * t->b : 16)};
    const uint32_t boxes[4] = {64, 64, 1, 1};
    te__cuda_tensor_map(p, map, t->p, (te_dtype)t->dt, 4, dims, strides, boxes, 128);
}
/* Sets the options of hopper_scores.cuh that the problem needs. `mod` is the text of the user's rule, or NULL. */
static te_result te__attn_scores_options(te__plan *p, te__launch *l, const te__attn_kargs *a, const char *mod) {
#define TE__STEP(option, there, value, wide) \
    if (there) te__launch_option(l, option, value);
    TE__ATTN_STEPS(TE__STEP)
#undef TE__STEP
    return te__attn_launch_mod(p, l, mod);
}
/* Returns true if the problem needs a step that only kernels with tiles of 128 rows support. */
static bool te__attn_needs_two_waves(const te__attn_kargs *a, const char *mod) {
#define TE__STEP(option, there, value, two) || ((two) && (there))
    return mod TE__ATTN_STEPS(TE__STEP);
#undef TE__STEP
}

/* Launches attn_dropout_bits, and returns where the bits are. `keys` is the number of keys of a block in the kernels
 * that read the bits. Field `words` of the result is NULL without dropout, or if the bits would fill more than 2 GB. */
static te__attn_bits te__attn_plan_bits(te__plan *p, const te__attn_kargs *a, int keys) {
    const int64_t of_all =
        a->x.packed_q ? a->heads * te__attn_packed_rows(a->x.t_q, a->batch) : (int64_t)a->batch * a->heads * a->s_pad;
    const int64_t rows = of_all + 128 /* the last tile of 192 rows may reach 128 rows beyond the padded rows */,
                  bytes = 16 * rows * te__div_up(te__round_up(a->s_kv, keys), 128);
    te__attn_bits bits = TE_ZERO;
    te__launch *l;
    te__attn_bits_kargs *k;
    if (a->dropout_p == 0.0f) return bits;
    if (bytes > (int64_t)2 << 30) {
        te__plan_why(
            p, "tensor cores: TMA and wgmma, which draw dropout's bits themselves: these would fill more than 2 GB");
        return bits;
    }
    bits.rows = rows;
    bits.words = (unsigned *)te__plan_workspace(p, bytes);
    if (!bits.words) return bits;
    l = te__plan_launch(p, "attn", "attn_dropout_bits");
    k = TE__KARGS(p, l, te__attn_bits_kargs);
    k->a = *a;
    k->bits = bits;
    te__launch_size(l, te__div_up(a->s_q, 128) * a->heads * a->batch, te__div_up(a->s_kv, TE__ATTN_BITS_KEYS), 1, 256,
                    0);
    return bits;
}
/* Returns how many bytes attn_bias_line writes. `keys` is the number of keys of a block in the forward kernel. */
static int64_t te__attn_line_bytes(const te__attn_kargs *a, int keys) {
    return 16 * te__round_up(a->s_kv, keys) * (a->x.bias.h ? a->heads : 1) * (a->x.bias.b ? a->batch : 1);
}
/* Returns true if the forward kernel adds the bias by a matrix product (X_KEYS). All queries must share the bias, and
 * there must be more than one tile of queries. */
static bool te__attn_bias_in_keys(const te__attn_kargs *a, int keys) {
    return a->x.bias.dt != TE_DTYPE_NONE && a->x.bias.i == 0 && a->s_q > 128 &&
           te__attn_line_bytes(a, keys) <= (int64_t)1 << 30;
}
/* Launches attn_bias_line. All queries share the bias. The kernel writes it in the form of operand B of a matrix
 * product, with 16 bytes for each key. The strides of the result count keys. */
static te__attn_table te__attn_plan_line(te__plan *p, const te__attn_kargs *a, int keys, float factor) {
    const te__attn_table *bias = &a->x.bias;
    const int64_t batch = bias->b ? a->batch : 1, heads = bias->h ? a->heads : 1, row = te__round_up(a->s_kv, keys);
    te__attn_table line = TE_ZERO;
    te__launch *l;
    te__attn_line_kargs *k;
    line.p = te__plan_workspace(p, te__attn_line_bytes(a, keys));
    line.dt = (int)TE_BF16;
    line.h = bias->h ? row : 0;
    line.b = bias->b ? row * heads : 0;
    if (!line.p) return line;
    l = te__plan_launch(p, "attn", "attn_bias_line");
    k = TE__KARGS(p, l, te__attn_line_kargs);
    k->bias = *bias;
    k->to = line;
    k->heads = (int)heads;
    k->s_kv = a->s_kv;
    k->keys = (int)row;
    k->factor = factor;
    te__launch_blocks(l, te__div_up(row, 256) * heads * batch, 256);
    return line;
}
/* Sets the option X_DROPOUT (hopper_dropout.cuh). */
static void te__attn_dropout_option(te__launch *l, const te__attn_kargs *a, const te__attn_bits *bits) {
    te__launch_option(l, "X_DROPOUT", a->dropout_p == 0.0f ? 0 : bits->words ? 1 : 2);
}

static te_result te__attn_plan_fwd_hopper(te__plan *p, const te__attn_kargs *a, const char *mod) {
    const bool two = te__attn_needs_two_waves(a, mod);
    const float bias_factor = a->x.bias_scale / a->scale;
    int d, d_v, waves, keys;
    bool bias_tiles, bias_keys;
    int64_t rows, tiles, shared;
    te__launch *l;
    te__attn_fwd_hopper_kargs *k;
    te__attn_bits bits;
    te__attn_table line = TE_ZERO;
    te__attn_hopper_heads(a, &d, &d_v);
    /* A block of a block mask has 128 keys. A tile of 64 keys lies in one block, but a tile of 96 keys (d_v of 192) may
     * lie in two. So the kernel for 256 channels runs, whose tiles have 64 keys. */
    if (a->x.blocks.dt != TE_DTYPE_NONE && d_v == 192) d = d_v = 256;
    /* Tiles of 192 rows take fewer cycles per row. But if there are few of them, more of the chip is idle. */
    waves = d == 64 && a->s_q > 1024 && !two ? 3 : 2;
    keys = TE__ATTN_FWD_KEYS(d, d_v);
    bias_tiles = te__attn_bias_in_tiles(a) && TE__ATTN_BIAS_SHARED(d, d_v, waves) <= TE__ATTN_SHARED_MAX;
    bias_keys = te__attn_bias_in_keys(a, keys);
    rows = te__div_up(a->s_q, 64 * waves);
    tiles = rows * a->heads * a->batch;
    if (tiles > INT_MAX)
        return te__fail(p->te, TE_ERR_UNSUPPORTED,
                        "attention: %d rows in each of %d heads of %d sequences are more tiles than a launch can have",
                        a->s_q, a->heads, a->batch);
    bits = te__attn_plan_bits(p, a, keys);
    if (bias_keys && p->result == TE_OK) line = te__attn_plan_line(p, a, keys, bias_factor);
    if (p->result != TE_OK) return p->result;
    shared = bias_tiles  ? TE__ATTN_BIAS_SHARED(d, d_v, waves)
             : bias_keys ? TE__ATTN_KEYS_SHARED(d, d_v, waves)
                         : TE__ATTN_FWD_SHARED(d, d_v, waves) + (a->x.alibi ? TE__ATTN_LINE_BYTES(d) : 0);
    l = te__plan_launch(p, "attn", "attn_fwd_hopper");
    k = TE__KARGS(p, l, te__attn_fwd_hopper_kargs);
    k->a = *a;
    if (bias_keys) memset(&k->a.x.bias, 0, sizeof(k->a.x.bias)); /* the kernel reads the line instead */
    k->bits = bits;
    k->line = line;
    te__attn_maps_q(p, a, k->q_map, &a->q, a->d, 64);
    te__attn_maps_q(p, a, k->o_map, &a->o, a->d_v, 64);
    te__attn_maps_kv(p, a, k->k_map, &a->k, a->d, keys);
    te__attn_maps_kv(p, a, k->v_map, &a->v, a->d_v, keys);
    k->bias_factor = bias_factor;
    k->order.counter = te__plan_counters(p);
    k->order.tiles = (int)tiles;
    k->order.rows = (int)rows;
    k->order.together = te__attn_together(a);
    if (bias_tiles) te__attn_map_bias(p, k->bias_map, a);
    te__launch_size(l, te__min(tiles, p->num_sms), 1, 1, 128 * (waves + 1), shared);
    te__launch_option(l, "X_DT", a->q.dt);
    te__launch_option(l, "X_D", d);
    te__launch_option(l, "X_D_V", d_v);
    te__launch_option(l, "X_WAVES", waves);
    te__attn_dropout_option(l, a, &bits);
    if (bias_tiles) te__launch_option(l, "X_TILES", 1);
    if (bias_keys) te__launch_option(l, "X_KEYS", 1);
    return te__attn_scores_options(p, l, &k->a, mod);
}

/* ---- FP8 ---- */

/* Makes a tensor map of FP8 codes for [batch, heads, rows, d]. A box has d_box channels, the swizzle's bytes, and `box`
 * rows. */
static void te__attn_map_codes(te__plan *p, unsigned long long map[16], const te__attn_view *x, int64_t d, int64_t rows,
                               int64_t heads, int64_t batch, int d_box, int box) {
    const uint64_t dims[4] = {(uint64_t)d, (uint64_t)rows, (uint64_t)heads, (uint64_t)batch};
    const uint64_t strides[3] = {(uint64_t)(rows > 1 ? x->s : 16), (uint64_t)(heads > 1 ? x->h : 16),
                                 (uint64_t)(batch > 1 ? x->b : 16)};
    const uint32_t boxes[4] = {(uint32_t)d_box, (uint32_t)box, 1, 1};
    te__cuda_tensor_map(p, map, x->p, TE_F8E4M3, 4, dims, strides, boxes, d_box);
}
/* Launches attn_fwd_fp8_values, and makes the map of V^T, whose boxes have d channels. */
static void te__attn_plan_values(te__plan *p, const te__attn_kargs *a, unsigned long long map[16], int d) {
    const bool packed = a->x.packed_kv != 0;
    const int64_t batch = packed ? 1 : a->batch, keys = te__div_up(a->s_kv, TE__ATTN_FP8_KEYS),
                  row = packed ? ((int64_t)te__attn_fp8_values_at(a->x.t_kv, a->batch) + TE__ATTN_FP8_KEYS)
                               : keys * TE__ATTN_FP8_KEYS;
    te__launch *l;
    te__attn_fp8_values_kargs *k;
    te__attn_view v = TE_ZERO;
    v.s = row;
    v.h = row * a->d_v;
    v.b = v.h * a->groups;
    v.p = te__plan_workspace(p, batch * v.b);
    if (!v.p) return;
    l = te__plan_launch(p, "attn", "attn_fwd_fp8_values");
    k = TE__KARGS(p, l, te__attn_fp8_values_kargs);
    k->a = *a;
    k->to = v.p;
    k->row = row;
    te__launch_blocks(l, keys * a->groups * a->batch, 256);
    te__launch_option(l, "X_D", d);
    te__attn_map_codes(p, map, &v, row, a->d_v, a->groups, batch, TE__ATTN_FP8_KEYS, d);
}
static te_result te__attn_plan_fwd_fp8(te__plan *p, const te__attn_kargs *a) {
    const int d = te__max(a->d, a->d_v) <= 64 ? 64 : 128;
    const int64_t rows = te__div_up(a->s_q, 128), tiles = rows * a->heads * a->batch,
                  blocks = te__div_up(a->s_kv, TE__ATTN_FP8_KEYS) * a->groups * a->batch;
    unsigned long long v_map[16];
    te__launch *l;
    te__attn_fwd_fp8_kargs *k;
    if (te__max(tiles, blocks) > INT_MAX)
        return te__fail(p->te, TE_ERR_UNSUPPORTED,
                        "attention: %d rows and %d keys in each of %d heads of %d sequences are more tiles than a "
                        "launch can have",
                        a->s_q, a->s_kv, a->heads, a->batch);
    te__attn_plan_values(p, a, v_map, d);
    if (p->result != TE_OK) return p->result;
    l = te__plan_launch(p, "attn", "attn_fwd_fp8_hopper");
    k = TE__KARGS(p, l, te__attn_fwd_fp8_kargs);
    k->a = *a;
    memcpy(k->v_map, v_map, sizeof(v_map));
    te__attn_map_codes(p, k->q_map, &a->q, a->d, a->x.packed_q ? a->x.t_q : a->s_q, a->heads,
                       a->x.packed_q ? 1 : a->batch, d, 64);
    te__attn_map_codes(p, k->k_map, &a->k, a->d, a->x.packed_kv ? a->x.t_kv : a->s_kv, a->groups,
                       a->x.packed_kv ? 1 : a->batch, d, TE__ATTN_FP8_KEYS);
    te__attn_maps_q(p, a, k->o_map, &a->o, a->d_v, 64);
    k->order.counter = te__plan_counters(p);
    k->order.tiles = (int)tiles;
    k->order.rows = (int)rows;
    k->order.together = te__attn_together(a);
    te__launch_size(l, te__min(tiles, p->num_sms), 1, 1, 384, TE__ATTN_FP8_SHARED(d));
    te__launch_option(l, "X_DT", a->o.dt);
    te__launch_option(l, "X_D", d);
    return TE_OK;
}

static void te__attn_bwd_maps(te__plan *p, const te__attn_kargs *a, te__attn_bwd_hopper_kargs *k, int queries,
                              int keys) {
    te__attn_maps_q(p, a, k->q_map, &a->q, a->d, queries);
    te__attn_maps_q(p, a, k->do_map, &a->d_o, a->d_v, queries);
    te__attn_maps_kv(p, a, k->k_map, &a->k, a->d, keys);
    te__attn_maps_kv(p, a, k->v_map, &a->v, a->d_v, keys);
    te__attn_maps_kv(p, a, k->dk_map, &a->dk, a->d, 64);
    te__attn_maps_kv(p, a, k->dv_map, &a->dv, a->d_v, 64);
}
/* Launches a backward kernel. d_v must be 0 for a kernel without matrix products. */
static te__launch *te__attn_launch_bwd(te__plan *p, const te__attn_bwd_hopper_kargs *k, const char *kernel,
                                       int64_t blocks, int threads, int64_t shared, int d, int d_v) {
    te__launch *l = te__plan_launch(p, "attn", kernel);
    *TE__KARGS(p, l, te__attn_bwd_hopper_kargs) = *k;
    te__launch_size(l, blocks, 1, 1, threads, shared);
    te__launch_option(l, "X_DT", k->a.q.dt);
    te__launch_option(l, "X_D", d);
    if (d_v == 0) return l;
    te__launch_option(l, "X_D_V", d_v);
    te__attn_dropout_option(l, &k->a, &k->bits);
    return l;
}
static void te__attn_launch_rows(te__plan *p, const te__attn_bwd_hopper_kargs *k, int64_t rows, int d) {
    te__attn_launch_bwd(p, k, "attn_bwd_rows", rows / (8192 / d), 256, 0, d, 0);
}
static te_result te__attn_bwd_too_large(te__plan *p, const te__attn_kargs *a) {
    return te__fail(p->te, TE_ERR_UNSUPPORTED,
                    "attention: the gradients of %d queries in each of %d heads of %d sequences need more blocks than "
                    "a launch can have",
                    a->s_q, a->heads, a->batch);
}

/* Plans the backward pass for heads above 128 channels. One kernel computes dK and dV, in blocks of 64 keys: dK
 * and dV of 128 keys would not fit into registers. Another kernel computes dQ. */
static te_result te__attn_plan_bwd_wide(te__plan *p, const te__attn_kargs *a, int64_t rows, const char *mod,
                                        te__attn_bits *bits) {
    const int64_t keys = te__div_up(a->s_kv, 64), queries = te__div_up(a->s_q, 128),
                  of_keys = keys * a->groups * a->batch, of_queries = queries * a->heads * a->batch;
    te__attn_bwd_hopper_kargs k;
    te__launch *l;
    int d, d_v;
    if (te__max(te__max(of_keys, of_queries), rows / 8) > INT_MAX) return te__attn_bwd_too_large(p, a);
    te__attn_hopper_heads(a, &d, &d_v);
    memset(&k, 0, sizeof(k));
    k.a = *a;
    k.bits = *bits = te__attn_plan_bits(p, a, 64);
    if (p->result != TE_OK) return p->result;
    te__attn_bwd_maps(p, a, &k, 64, 64);
    te__attn_maps_q(p, a, k.dq_map, &a->dq, a->d, 64);
    te__attn_launch_rows(p, &k, rows, a->d_v <= 128 ? 128 : 256);
    k.order.rows = (int)keys;
    k.order.together = te__min(8, a->groups * a->batch); /* number of heads whose blocks alternate */
    l = te__attn_launch_bwd(p, &k, "attn_bwd_dkv_hopper", of_keys, 384, TE__ATTN_DKV_SHARED(d, d_v), d, d_v);
    if (te__attn_scores_options(p, l, a, mod) != TE_OK) return p->result;
    k.order.rows = (int)queries;
    k.order.together = te__attn_together(a);
    l = te__attn_launch_bwd(p, &k, "attn_bwd_dq_hopper", of_queries, 384, TE__ATTN_DQ_SHARED(d, d_v), d, d_v);
    return te__attn_scores_options(p, l, a, mod);
}

static te_result te__attn_bias_too_large(te__plan *p, const te__attn_kargs *a) {
    return te__fail(p->te, TE_ERR_UNSUPPORTED,
                    "attn_bwd: dbias of [%d, %d, %d, %d] needs more blocks than a launch can have", a->x.dbias_b,
                    a->x.dbias_h, a->x.dbias_i, a->s_kv);
}
/* Launches the kernel that adds up the parts of the gradient of the bias. */
static te_result te__attn_put_bias(te__plan *p, const te__attn_bias_hopper_kargs *k) {
    const te__attn_extra *x = &k->a.x;
    const int64_t blocks = te__div_up((int64_t)x->dbias_b * x->dbias_h * x->dbias_i * k->a.s_kv, 256);
    if (blocks > INT_MAX) return te__attn_bias_too_large(p, &k->a);
    te__plan_with(p, "attn", "attn_bwd_bias_put", blocks, 256, k, sizeof(*k));
    return p->result;
}
/* Returns true if the kernel for dK and dV also makes the gradient of the bias (X_SUMS). All queries must share the
 * bias. */
static bool te__attn_bias_in_sums(const te__attn_kargs *a) {
    const te__attn_extra *x = &a->x;
    return te__max(a->d, a->d_v) <= 128 && x->dbias_i == 1 && x->dbias_b > 0 &&
           (x->dbias_h == 1 || (x->dbias_h == a->heads && a->heads == a->groups));
}
/* Launches the kernel that makes dB from X_SUMS's sums. It adds up all sequences and heads that share the bias. */
static te_result te__attn_put_bias_sums(te__plan *p, const te__attn_bwd_hopper_kargs *from) {
    const te__attn_extra *x = &from->a.x;
    const int64_t of_batch = from->bias_row * from->a.groups;
    /* the dimensions that are summed over */
    const bool heads = x->dbias_h == 1 && from->a.groups > 1, batch = x->dbias_b == 1 && from->a.batch > 1;
    te__attn_bias_hopper_kargs k;
    memset(&k, 0, sizeof(k));
    k.a = from->a;
    k.to.p = from->bias_sum;
    k.to.b = of_batch;
    k.to.h = from->bias_row;
    k.parts = (heads ? from->a.groups : 1) * (batch ? from->a.batch : 1); /* adjacent for each sequence */
    k.part = heads || !batch ? from->bias_row : of_batch;
    return te__attn_put_bias(p, &k);
}

/* Sets up the arguments of attn_bwd_hopper.cu and attn_bwd_fp8_hopper.cu for heads of d channels, except maps, and
 * allocates the sums of dQ. `rows` is the number of rows of lse2 and delta. Returns the number of thread blocks, or 0
 * on failure. */
static int64_t te__attn_bwd_open(te__plan *p, const te__attn_kargs *a, int64_t rows, int d,
                                 te__attn_bwd_hopper_kargs *k) {
    const int queries = TE__ATTN_BWD_QUERIES(d);
    const int64_t keys = te__div_up(a->s_kv, 128), blocks = keys * a->groups * a->batch,
                  of_head = a->x.packed_q ? a->x.t_q / queries + a->batch + 1 : a->s_pad / queries,
                  tiles = of_head * a->heads * (a->x.packed_q ? 1 : a->batch);
    if (te__max(blocks, rows / queries) > INT_MAX) {
        te__attn_bwd_too_large(p, a);
        return 0;
    }
    memset(k, 0, sizeof(*k));
    k->a = *a;
    k->queries = queries;
    k->tiles_of_head = of_head;
    k->dq_sum = te__plan_floats(p, tiles * queries * d);
    k->added = te__plan_ints(p, tiles);
    k->order.counter = te__plan_counters(p);
    k->order.tiles = (int)blocks;
    k->order.rows = (int)keys;
    k->order.together = te__min(a->groups <= 8 ? 8 : 16, a->groups * a->batch); /* heads whose blocks alternate */
    return k->dq_sum && k->added ? blocks : 0;
}
/* Launches attn_bwd_put. */
static void te__attn_launch_put(te__plan *p, const te__attn_bwd_hopper_kargs *k, int d) {
    te__launch *l = te__plan_launch(p, "attn", "attn_bwd_put");
    *TE__KARGS(p, l, te__attn_bwd_hopper_kargs) = *k;
    te__launch_size(l, te__div_up(k->a.s_q, k->queries) * k->a.heads * k->a.batch, 1, 1, 256, 0);
    te__launch_option(l, "X_DT", k->a.dq.dt);
    te__launch_option(l, "X_D", d);
}

/* Plans the backward pass. `rows` is the number of rows of lse2 and delta that attn_bwd_rows handles. The kernel for 64
 * channels has no registers for dropout's bits, so dropout uses the kernel for 128 channels. */
static te_result te__attn_plan_bwd_hopper(te__plan *p, const te__attn_kargs *a, int64_t rows, const char *mod,
                                          te__attn_bits *bits) {
    const int d = te__max(a->d, a->d_v) <= 64 && a->dropout_p == 0.0f ? 64 : 128;
    const bool sums = te__attn_bias_in_sums(a), tiles_of_bias = te__attn_bias_in_tiles(a);
    te__attn_bwd_hopper_kargs k;
    te__launch *l;
    int64_t blocks;
    if (te__max(a->d, a->d_v) > 128) return te__attn_plan_bwd_wide(p, a, rows, mod, bits);
    blocks = te__attn_bwd_open(p, a, rows, d, &k);
    if (blocks == 0) return p->result;
    k.bits = *bits = te__attn_plan_bits(p, a, 128);
    if (p->result != TE_OK) return p->result;
    if (sums) {
        k.bias_row = (int64_t)k.order.rows * 128;
        k.bias_sum = te__plan_floats(p, k.bias_row * a->groups * a->batch);
        if (!k.bias_sum) return p->result;
    }
    te__attn_bwd_maps(p, a, &k, k.queries, 128);
    if (tiles_of_bias) te__attn_map_bias(p, k.bias_map, a);
    k.bias_factor = a->x.bias_scale / a->scale;
    te__attn_launch_rows(p, &k, rows, d);
    l = te__attn_launch_bwd(p, &k, "attn_bwd_hopper", blocks, 384, TE__ATTN_BWD_SHARED(d), d, d);
    if (tiles_of_bias) te__launch_option(l, "X_TILES", 1);
    if (sums) te__launch_option(l, "X_SUMS", 1);
    if (te__attn_scores_options(p, l, a, mod) != TE_OK) return p->result;
    te__attn_launch_put(p, &k, d);
    return sums ? te__attn_put_bias_sums(p, &k) : p->result;
}

/* Plans the backward pass from FP8 codes. `rows` is the number of rows that attn_bwd_fp8_rows handles, and `kept` the
 * number of rows of lse2. */
static te_result te__attn_plan_bwd_fp8(te__plan *p, const te__attn_kargs *a, int64_t rows, int64_t kept) {
    const int d = TE__ATTN_BWD_FP8_D;
    const int64_t rows_q = a->x.packed_q ? a->x.t_q : a->s_q, rows_kv = a->x.packed_kv ? a->x.t_kv : a->s_kv;
    const int64_t batch_q = a->x.packed_q ? 1 : a->batch, batch_kv = a->x.packed_kv ? 1 : a->batch;
    te__attn_bwd_fp8_kargs k;
    te__attn_view q16 = TE_ZERO, do16;
    te__launch *l;
    int64_t blocks;
    memset(&k, 0, sizeof(k));
    if (kept > INT_MAX) return te__attn_bwd_too_large(p, a);
    blocks = te__attn_bwd_open(p, a, rows, d, &k.b);
    if (blocks == 0) return p->result;
    k.q16 = te__plan_workspace(p, kept * d * 2);
    k.do16 = te__plan_workspace(p, kept * d * 2);
    if (!k.q16 || !k.do16) return p->result;
    q16.s = d;
    q16.dt = (int)TE_BF16;
    do16 = q16;
    q16.p = k.q16;
    do16.p = k.do16;
    te__attn_map(p, k.q16_map, &q16, d, kept, 1, 1, 64);
    te__attn_map(p, k.do16_map, &do16, d, kept, 1, 1, 64);
    te__attn_map_codes(p, k.b.q_map, &a->q, a->d, rows_q, a->heads, batch_q, d, k.b.queries);
    te__attn_map_codes(p, k.b.do_map, &a->d_o, a->d_v, rows_q, a->heads, batch_q, d, k.b.queries);
    te__attn_map_codes(p, k.b.k_map, &a->k, a->d, rows_kv, a->groups, batch_kv, d, 128);
    te__attn_map_codes(p, k.b.v_map, &a->v, a->d_v, rows_kv, a->groups, batch_kv, d, 128);
    te__attn_maps_kv(p, a, k.b.dk_map, &a->dk, a->d, 64);
    te__attn_maps_kv(p, a, k.b.dv_map, &a->dv, a->d_v, 64);
    l = te__plan_launch(p, "attn", "attn_bwd_fp8_rows");
    *TE__KARGS(p, l, te__attn_bwd_fp8_kargs) = k;
    te__launch_blocks(l, rows / 64, 256);
    te__launch_option(l, "X_DT", a->o.dt);
    l = te__plan_launch(p, "attn", "attn_bwd_fp8_hopper");
    *TE__KARGS(p, l, te__attn_bwd_fp8_kargs) = k;
    te__launch_size(l, blocks, 1, 1, 384, TE__ATTN_BWD_FP8_SHARED);
    te__launch_option(l, "X_OUT", a->dk.dt);
    te__attn_launch_put(p, &k.b, d);
    return p->result;
}

/* The number of tiles of dB that keeps a chip busy. If dB has fewer tiles, each tile is divided into partial sums. The
 * number is the same for every chip, so that dB is the same, bit for bit, on every chip. Tiles of a shared bias take
 * unequal time, so more of them are needed. */
enum { TE__ATTN_BIAS_TILES = 264, TE__ATTN_BIAS_TILES_SHARED = 1056 };
/* Plans the gradient of the bias, after the kernels that make lse2 and delta. Plans nothing if te__attn_bias_in_sums is
 * true: another kernel then makes this gradient. */
static te_result te__attn_plan_bias_hopper(te__plan *p, const te__attn_kargs *a, const char *mod,
                                           const te__attn_bits *bits) {
    const te__attn_extra *x = &a->x;
    const bool shared = x->dbias_i == 1;
    const int64_t rows = te__div_up(a->s_q, 128),
                  of_part = te__div_up(a->s_kv, 128) * (shared ? 1 : rows) * x->dbias_h * x->dbias_b;
    const int64_t pairs =
        (x->dbias_b == 1 ? a->batch : 1) * (int64_t)(x->dbias_h == 1 ? a->heads : 1) * (shared ? rows : 1);
    const int64_t parts =
        te__min(pairs, te__div_up(shared ? TE__ATTN_BIAS_TILES_SHARED : TE__ATTN_BIAS_TILES, of_part));
    te__attn_bias_hopper_kargs k;
    te__launch *l;
    int d, d_v;
    if (te__attn_bias_in_sums(a)) return p->result;
    if (of_part * parts > INT_MAX) return te__attn_bias_too_large(p, a);
    memset(&k, 0, sizeof(k));
    k.a = *a;
    k.bits = *bits;
    te__attn_hopper_heads(a, &d, &d_v);
    te__attn_maps_q(p, a, k.q_map, &a->q, a->d, 128);
    te__attn_maps_q(p, a, k.do_map, &a->d_o, a->d_v, 128);
    te__attn_maps_kv(p, a, k.k_map, &a->k, a->d, 128);
    te__attn_maps_kv(p, a, k.v_map, &a->v, a->d_v, 128);
    k.order.counter = te__plan_counters(p);
    k.order.tiles = (int)(of_part * parts);
    k.order.rows = (int)rows;
    k.tiles_of_part = (int)of_part;
    k.parts = (int)parts;
    k.to = x->dbias;
    k.by = x->bias_scale;
    if (parts > 1) {
        const int64_t row = te__round_up(a->s_kv, 4);
        k.to.i = row;
        k.to.h = row * x->dbias_i;
        k.to.b = k.to.h * x->dbias_h;
        k.to.dt = (int)TE_F32;
        k.part = k.to.b * x->dbias_b;
        k.to.p = te__plan_workspace(p, k.part * parts * (int64_t)sizeof(float));
        if (!k.to.p) return p->result;
        k.by = 1.0f;
    }
    {
        const int64_t some = k.to.dt == (int)TE_F32 ? 2 : 8; /* elements of a store */
        k.aligned = (parts > 1 || a->s_kv % some == 0) && k.to.b % some == 0 && k.to.h % some == 0 &&
                    k.to.i % some == 0 && (uintptr_t)k.to.p % 16 == 0;
    }
    l = te__plan_launch(p, "attn", "attn_bwd_bias_hopper");
    *TE__KARGS(p, l, te__attn_bias_hopper_kargs) = k;
    te__launch_size(l, te__min(of_part * parts, p->num_sms), 1, 1, 384, TE__ATTN_DBIAS_SHARED);
    te__launch_option(l, "X_DT", a->q.dt);
    te__launch_option(l, "X_D", d);
    te__launch_option(l, "X_D_V", d_v);
    te__attn_dropout_option(l, a, bits);
    te__launch_option(l, "X_OUT", k.to.dt);
    if (te__attn_scores_options(p, l, a, mod) != TE_OK || parts == 1) return p->result;
    return te__attn_put_bias(p, &k);
}
