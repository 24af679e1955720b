/* ops/attn/cuda.c: tiles and launches of the mma.sync and the general attention kernels. This file must not depend on
 * the driver.
 *
 * For the tensor-core kernels, head sizes are rounded up to the next size that these kernels are compiled for. The
 * added channels are zeros. */

/* The tiles of an mma.sync kernel. d: rounded-up head size. m: 16-row fragments of a warp. tile: keys (for dK and dV:
 * queries) at a time. */
typedef struct te__attn_tiles {
    int d, m, warps, tile;
} te__attn_tiles;

/* Returns how many bytes of shared memory a block can have. */
static int64_t te__attn_shared_limit(const te__plan *p) {
    return te__sm_shared(p->sm) - 1024;
}

static int te__attn_padded_d(const te__attn_kargs *a) {
    int d = (int)te__round_up(te__max(a->d, a->d_v), 32);
    return d <= 128 ? d : (int)te__round_up(d, 64);
}
static int64_t te__attn_row_bytes(int d) { return 2 * d + 16; }

static int64_t te__attn_fwd_shared(te__attn_tiles t) {
    return te__attn_row_bytes(t.d) * (16 * t.m * t.warps + 4 * t.tile);
}
static int64_t te__attn_dq_shared(te__attn_tiles t) {
    return te__attn_row_bytes(t.d) * (32 * t.m * t.warps + 4 * t.tile);
}
static int64_t te__attn_dkv_shared(te__attn_tiles t) {
    return te__attn_row_bytes(t.d) * (32 * t.m * t.warps + 4 * t.tile) + 16 * t.tile;
}

/* The next functions choose tiles so that O, S and dP fit into registers and, where that helps, two blocks fit on a
 * multiprocessor. The options of te__attn_extra (`extras`) need registers, so with them tiles are smaller. */
static te__attn_tiles te__attn_fwd_tiles(const te__plan *p, int d, bool dropout, bool extras) {
    te__attn_tiles t;
    t.d = d;
    t.m = d <= 128 && !extras ? 2 : 1;
    t.warps = 4;
    t.tile = d > 128 || (d > 64 && dropout && !extras) ? 32 : 64;
    if (te__attn_fwd_shared(t) > te__attn_shared_limit(p)) t.tile = 32;
    return t;
}
static te__attn_tiles te__attn_dq_tiles(const te__plan *p, int d, bool dropout, bool extras) {
    te__attn_tiles t;
    const bool narrow = extras || (d == 128 && dropout);
    t.d = d;
    t.m = narrow ? 1 : 2;
    t.warps = narrow && d % 64 == 0 ? 8 : 4; /* Four if d is no multiple of 64: eight warps would then copy 64 rows at
                                              * a time (te_copier), but a narrow tile has only 32. */
    t.tile = d <= 64 && !dropout && !extras ? 64 : 32;
    if (te__attn_dq_shared(t) > te__attn_shared_limit(p)) {
        t.m = 1;
        t.warps = 4;
    }
    return t;
}
static te__attn_tiles te__attn_dkv_tiles(const te__plan *p, int d, bool dropout, bool extras) {
    te__attn_tiles t;
    t.d = d;
    t.m = 1;
    t.warps = extras && d % 64 ? 4 : 8; /* four warps for the same reason as in te__attn_dq_tiles */
    t.tile = extras || (d == 128 && dropout) ? 32 : 64;
    if (te__attn_dkv_shared(t) > te__attn_shared_limit(p)) {
        t.warps = 4;
        t.tile = d == 128 ? 32 : 64;
    }
    return t;
}

/* Returns true if the general kernels must process a head in chunks of channels. */
static bool te__attn_is_wide(const te__attn_kargs *a) { return te__max(a->d, a->d_v) > TE__ATTN_CHUNK; }
/* Returns the bytes of shared memory of a general kernel. A thread block owns TE__ATTN_ROWS queries (keys for dK and
 * dV) of tensors with `mine` and `mine2` channels. It reads TE__ATTN_LANES rows at a time of tensors with `theirs` and
 * `theirs2` channels. `mine2` and `theirs2` may be 0. Shared memory also holds an f32 weight for each pair of an owned
 * row and a row that is read. For wide heads, shared memory holds only one chunk of one owned tensor and one chunk of
 * one tensor that is read. */
static int64_t te__attn_general_shared(const te__attn_kargs *a, int64_t mine, int64_t mine2, int64_t theirs,
                                       int64_t theirs2) {
    int64_t rows, lanes;
    if (te__attn_is_wide(a)) mine = theirs = TE__ATTN_CHUNK, mine2 = theirs2 = 0;
    rows = TE__ATTN_ROW(mine) + TE__ATTN_ROW(mine2);
    lanes = TE__ATTN_LANE_ROW(theirs) + (theirs2 ? TE__ATTN_LANE_ROW(theirs2) : 0);
    return 4 * (TE__ATTN_ROWS * rows + TE__ATTN_LANES * lanes + TE__ATTN_ROWS * TE__ATTN_LANES);
}

/* Launches a kernel for `heads` heads of each sequence and `rows` rows of each head. The kernel writes `channels`
 * channels of each row. `t` is NULL for a general kernel. Only general kernels support `mod`. */
static te_result te__attn_launch(te__plan *p, const te__attn_kargs *a, const char *kernel, int64_t rows, int64_t heads,
                                 int64_t channels, const te__attn_tiles *t, int64_t shared, const char *mod) {
    const int64_t blocks = te__div_up(rows, t ? 16 * t->m * t->warps : TE__ATTN_ROWS) * a->batch * heads;
    te__launch *l;
    if (blocks == 0) return TE_OK;
    if (blocks > INT_MAX)
        return te__fail(
            p->te, TE_ERR_UNSUPPORTED,
            "attention: %lld rows in each of %lld heads of %d sequences are more blocks than a launch can have",
            (long long)rows, (long long)heads, a->batch);
    l = te__plan_launch(p, "attn", kernel);
    *TE__KARGS(p, l, te__attn_kargs) = *a;
    te__launch_size(l, blocks, t ? 1 : te__div_up(channels, TE__ATTN_CHUNK), 1, t ? 32 * t->warps : 128, shared);
    if (t) {
        te__launch_option(l, "X_DT", a->q.dt);
        te__launch_option(l, "X_D", t->d);
        te__launch_option(l, "X_TILE", t->tile);
        te__launch_option(l, "X_WARPS", t->warps);
        te__launch_option(l, "X_M", t->m);
        te__launch_option(l, "X_DROPOUT", a->dropout_p > 0.0f);
        te__launch_option(l, "X_EXTRA", a->x.on);
        if (a->x.softcap > 0.0f) te__launch_option(l, "X_CAP", 1);
    } else {
        te__launch_option(l, "X_WIDE", te__attn_is_wide(a));
        if (!a->x.on) te__launch_option(l, "X_EXTRA", 0);
    }
    return te__attn_launch_mod(p, l, mod);
}

/* Launches attn_clear.cu. It clears the rows that belong to no sequence, and sets max_logit to -inf. */
static void te__attn_launch_clear(te__plan *p, const te__attn_kargs *a, bool backward, bool max_logit) {
    const int64_t rows = (a->x.packed_q ? a->x.t_q : 0) + (int64_t)(backward && a->x.packed_kv ? a->x.t_kv : 0);
    if (rows == 0 && (!max_logit || a->heads == 0)) return;
    te__plan_with(p, "attn", "attn_clear", te__max(1, te__div_up(rows, 8)), 256, a, sizeof(*a));
}

/* Launches the kernels for the gradients of the bias and of the softmax's offset (`sink`). They read lse2 and delta,
 * which earlier kernels make. `bits` is NULL without Hopper's kernels. Gradients that have no memory yet have NULL
 * pointers in *a. */
static te_result te__attn_launch_extras(te__plan *p, const te__attn_kargs *a, bool sink, const char *mod,
                                        const te__attn_bits *bits) {
    const te__attn_extra *x = &a->x;
    const int64_t blocks =
        te__div_up(a->s_kv, TE__ATTN_LANES) * te__div_up(x->dbias_i, TE__ATTN_ROWS) * x->dbias_h * x->dbias_b;
    te__launch *l;
    if (sink && a->heads) te__plan_with(p, "attn", "attn_bwd_sink", a->heads, 256, a, sizeof(*a));
    if (blocks == 0) return TE_OK; /* dbias is not given, or is empty */
    if (bits) return te__attn_plan_bias_hopper(p, a, mod, bits);
    if (blocks > INT_MAX) return te__attn_bias_too_large(p, a);
    l = te__plan_launch(p, "attn", "attn_bwd_bias");
    *TE__KARGS(p, l, te__attn_kargs) = *a;
    te__launch_size(l, blocks, 1, 1, 128, te__attn_general_shared(a, a->d, a->d_v, a->d, a->d_v));
    te__launch_option(l, "X_WIDE", te__attn_is_wide(a));
    return te__attn_launch_mod(p, l, mod);
}

/* Writes the text of the user's rule to `code`, or nothing without a rule. Fails if there is a rule but no NVRTC. */
static te_result te__attn_mod(te__plan *p, const char *op, const te_score_mod *m, te__text *code) {
    te_result r;
    if (!te__has_score_mod(m)) return TE_OK;
    r = te__score_mod_check_form(p->te, op, m, true);
    if (r != TE_OK) return r;
    if (p->baseline)
        return te__fail(p->te, TE_ERR_LIBRARY,
                        "%s: rule.score_mod has expressions, and there is no NVRTC to compile them; install one (pip "
                        "install nvidia-cuda-nvrtc-cu12), or name its file in TE_NVRTC_PATH",
                        op);
    te__score_mod_code(m, code);
    return code->oom ? te__fail(p->te, TE_ERR_OUT_OF_MEMORY, "%s: out of host memory", op) : TE_OK;
}

/* ---- caches of E4M3 codes ---- */

static bool te__attn_is_coded(const te__attn_kargs *a) { return a->x.k_factors.dt != 0; }
/* Returns true if rows of k's and v's codes can be read in pieces of `bytes` bytes. */
static bool te__attn_coded_rows_fit(const te__attn_kargs *a, int bytes) {
    const te__attn_view *x[2];
    int i;
    x[0] = &a->k, x[1] = &a->v;
    for (i = 0; i < 2; i++)
        if (((uintptr_t)x[i]->p | (uintptr_t)x[i]->s | (uintptr_t)x[i]->h | (uintptr_t)x[i]->b) % (uintptr_t)bytes)
            return false;
    return a->d % bytes == 0 && a->d_v % bytes == 0;
}
/* Returns the problem after attn_cache_numbers.cu: k and v are [batch, s_kv, groups, d] in q's format. They have no
 * memory yet. */
static te__attn_kargs te__attn_numbers_of(const te__attn_kargs *a) {
    te__attn_kargs n = *a;
    const te__attn_view none = TE_ZERO;
    te__attn_view *x[2];
    int i;
    x[0] = &n.k, x[1] = &n.v;
    for (i = 0; i < 2; i++) {
        x[i]->p = NULL;
        x[i]->dt = a->q.dt;
        x[i]->h = i == 0 ? a->d : a->d_v;
        x[i]->s = a->groups * x[i]->h;
        x[i]->b = a->s_kv * x[i]->s;
    }
    n.x.k_factors = n.x.v_factors = none;
    n.x.pages = NULL;
    n.x.page_size = n.x.num_pages = n.x.pages_of_each = 0;
    return n;
}
/* Launches attn_cache_numbers for the cache of *a, and gives k and v of *n their memory. */
static te_result te__attn_plan_numbers(te__plan *p, const te__attn_kargs *a, te__attn_kargs *n) {
    const int64_t of_k = (int64_t)a->batch * n->k.b, of_v = (int64_t)a->batch * n->v.b;
    te__attn_cache_kargs *k;
    te__launch *l;
    if (a->batch > 65535)
        return te__fail(p->te, TE_ERR_UNSUPPORTED, "attention: %d sequences of a cache in e4m3; 65535 are possible",
                        a->batch);
    n->k.p = te__plan_floats(p, te__div_up(of_k, 8) * 4 + te__div_up(of_v, 8) * 4);
    if (!n->k.p) return p->result;
    n->v.p = (float *)n->k.p + te__div_up(of_k, 8) * 4;
    l = te__plan_launch(p, "attn", "attn_cache_numbers");
    k = TE__KARGS(p, l, te__attn_cache_kargs);
    k->a = *a;
    k->k = n->k.p;
    k->v = n->v.p;
    te__launch_size(l, te__div_up(a->s_kv, 16), a->batch, 2, 256, 0);
    te__launch_option(l, "X_DT", a->q.dt);
    return TE_OK;
}

/* ---- few queries (attn_decode.cu) ---- */

static int te__attn_decode_rows(const te__attn_kargs *a) { return a->s_q * (a->heads / a->groups) <= 8 ? 8 : 16; }
/* Returns the largest number of chunks of a sequence. */
static int te__attn_decode_share(const te__attn_kargs *a) {
    return (int)te__div_up(TE__ATTN_DECODE_BLOCKS, a->groups);
}
/* Returns the largest number of chunks of a sequence of this problem. */
static int te__attn_decode_splits(const te__attn_kargs *a) {
    const int64_t share = te__attn_decode_share(a),
                  most = a->s_kv <= TE__ATTN_DECODE_SHORT ? te__min(share, TE__ATTN_DECODE_TOGETHER) : share;
    return (int)te__min(most, te__div_up(a->s_kv, TE__ATTN_DECODE_CHUNK(1, 1)));
}
static int64_t te__attn_decode_shared(const te__attn_kargs *a, bool clustered) {
    const int d = te__attn_padded_d(a), rows = te__attn_decode_rows(a), codes = te__attn_is_coded(a),
              sent = clustered ? TE__ATTN_DECODE_SENT(d, a->s_q * (a->heads / a->groups)) : 0;
    return te__max(te__max(TE__ATTN_DECODE_TILES(d, rows, codes), TE__ATTN_DECODE_SUMS(d, rows)) + sent,
                   TE__ATTN_DECODE_JOINED(rows, te__attn_decode_share(a)));
}
static bool te__attn_decode_has_clusters(const te__plan *p) { return p->sm >= 90 && p->sm < 120; }
/* Returns about the most blocks that run at once. */
static int64_t te__attn_decode_at_once(const te__plan *p, int64_t shared) {
    enum {
        BESIDE = 1024 + 384, /* bytes of a block: those that the GPU reserves, and static ones with eight rows */
        MOST = 4             /* blocks of a multiprocessor, by registers */
    };
    return p->num_sms * te__min(MOST, te__sm_shared(p->sm) / te__round_up(shared + BESIDE, 128));
}
/* Returns the number of blocks of a cluster, for `splits` chunks of each of `places` sequences and KV heads; 0: no
 * clusters. With many blocks, clusters take longer to start than they save. They are not used either where the memory
 * for what they send keeps blocks from running at once. Sums have the same bits either way. */
static int te__attn_decode_cluster(const te__plan *p, const te__attn_kargs *a, int splits, int64_t places) {
    const int64_t blocks = places * te__round_up(splits, TE__ATTN_DECODE_TOGETHER),
                  at_once = te__attn_decode_at_once(p, te__attn_decode_shared(a, true));
    if (!te__attn_decode_has_clusters(p) || splits <= 1 || blocks > 4 * (int64_t)p->num_sms) return 0;
    if (blocks > at_once && at_once < te__attn_decode_at_once(p, te__attn_decode_shared(a, false))) return 0;
    return splits > 4 ? TE__ATTN_DECODE_TOGETHER : splits > 2 ? 4 : 2;
}

/* `kernels`: those for the problem or, of a cache of codes, for its numbers. */
static bool te__attn_decodes(const te__plan *p, const te__attn_kargs *a, int kernels, bool mod, bool max_logit) {
    return kernels != 0 && !mod && !max_logit && a->dropout_p == 0.0f && a->x.blocks.dt == TE_DTYPE_NONE &&
           (int64_t)a->s_q * (a->heads / a->groups) <= TE__ATTN_DECODE_ROWS &&
           (a->x.page_size % 16 == 0 || a->x.pages_of_each == 1) && /* no tile of 16 keys lies in two pages */
           a->groups <= TE__PLAN_MANY_COUNTERS && a->batch <= 32 * (TE__PLAN_MANY_COUNTERS / a->groups) &&
           (!te__attn_is_coded(a) || te__attn_coded_rows_fit(a, 16)) &&
           te__attn_decode_shared(a, te__attn_decode_has_clusters(p)) <= te__attn_shared_limit(p);
}
/* Sets what the kernel reads before te_follow: the lengths of sequences and the rows of keys and values that are there
 * when the graph is launched (ops/early.c). */
static void te__attn_decode_early(const te__plan *p, const te_op_attn_fwd_args *x, te__attn_decode_kargs *k) {
    const te_attn_rule *r = &x->rule;
    te__cache_use use = TE_ZERO;
    const int *old = NULL;
    if (!te__is_settled(p, r->cu_seqlens_q) || !te__is_settled(p, r->cu_seqlens_kv) ||
        !te__is_settled(p, r->cu_seqlens_q_padded) || !te__is_settled(p, r->cu_seqlens_kv_padded))
        return;
    use.k = x->k;
    use.v = x->v;
    use.k_factors = r->k_factors;
    use.v_factors = r->v_factors;
    use.table = r->page_table;
    use.sequences = k->a.batch;
    if (!te__settled_rows(p, &use, &old)) return;
    if (old && te__attn_kv_format(x) != TE_BSHD) return; /* rows of a cache are its second dimension */
    k->early = 1;
    k->old = old;
}
static te_result te__attn_plan_decode(te__plan *p, const te_op_attn_fwd_args *args, const te__attn_kargs *a) {
    const int d = te__attn_padded_d(a), heads = a->heads / a->groups, share = te__attn_decode_share(a),
              together = (int)te__min(a->batch, TE__PLAN_MANY_COUNTERS / a->groups), /* launches use the same memory in
                                                                                      * turn */
              most = te__attn_decode_splits(a),
              cluster = te__attn_decode_cluster(p, a, most, (int64_t)together * a->groups),
              splits = cluster ? (int)te__round_up(most, cluster) : most;
    float *part = splits > 1
                      ? te__plan_floats(p, (int64_t)together * a->groups * splits * heads * a->s_q * (a->d_v + 4))
                      : NULL;
    int first;
    if (splits > 1 && !part) return p->result;
    for (first = 0; first < a->batch; first += together) {
        te__launch *l = te__plan_launch(p, "attn", "attn_decode");
        te__attn_decode_kargs *k = TE__KARGS(p, l, te__attn_decode_kargs);
        k->a = *a;
        k->part = part;
        k->counters = te__plan_many_counters(p);
        k->splits = splits;
        k->share = share;
        k->first = first;
        k->heads = heads;
        k->clustered = cluster > 0;
        l->cluster = (unsigned)cluster;
        l->cluster_y = true;
        l->overlaps = true;
        te__attn_decode_early(p, args, k);
        te__launch_size(l, a->groups, splits, te__min(together, a->batch - first), 32 * TE__ATTN_DECODE_WARPS,
                        te__attn_decode_shared(a, cluster > 0));
        te__launch_option(l, "X_DT", a->q.dt);
        te__launch_option(l, "X_D", d);
        te__launch_option(l, "X_ROWS", te__attn_decode_rows(a));
        te__launch_option(l, "X_CODES", te__attn_is_coded(a));
        te__launch_option(l, "X_EXTRA", a->x.on);
    }
    return te__plan_why(p, "few queries: keys split over blocks, each key read once for all heads that share it");
}

static te_result te__attn_plan_general(te__plan *p, const te__attn_kargs *a, const char *mod) {
    return te__attn_launch(p, a, "attn_fwd", a->s_q, a->heads, a->d_v, NULL,
                           te__attn_general_shared(a, a->d, 0, te__max(a->d, a->d_v), 0), mod);
}
static te_result te__attn_plan_fwd(te__plan *p, const te_op_attn_fwd_args *args, const char *mod) {
    te__attn_kargs a = te__attn_problem(args), numbers = te__attn_is_coded(&a) ? te__attn_numbers_of(&a) : a;
    const bool fp8 = a.x.codes && te__attn_choose_fp8(p, &a, mod != NULL, args->max_logit != NULL);
    const int kernels = a.x.codes ? 0 : te__attn_choose(p, &numbers, mod != NULL, false);
    te__attn_launch_clear(p, &a, false, args->max_logit != NULL);
    if (te__attn_decodes(p, &a, kernels, mod != NULL, args->max_logit != NULL))
        return te__attn_plan_decode(p, args, &a);
    if (kernels && te__attn_is_coded(&a)) {
        if (te__attn_coded_rows_fit(&a, 8) && !a.x.packed_kv) {
            if (te__attn_plan_numbers(p, &a, &numbers) != TE_OK) return p->result;
            a = numbers;
        } else {
            te__plan_why(p,
                         "general kernels, in f32, and not tensor cores: codes that are packed, or rows of them that "
                         "do not start at multiples of 8 bytes");
            return te__attn_plan_general(p, &a, mod);
        }
    }
    if (fp8) return te__attn_plan_fwd_fp8(p, &a);
    if (kernels == TE__ATTN_HOPPER) return te__attn_plan_fwd_hopper(p, &a, mod);
    if (kernels == TE__ATTN_MMA) {
        const te__attn_tiles t = te__attn_fwd_tiles(p, te__attn_padded_d(&a), a.dropout_p > 0.0f, a.x.on);
        return te__attn_launch(p, &a, "attn_fwd_mma", a.s_q, a.heads, a.d_v, &t, te__attn_fwd_shared(t), NULL);
    }
    return te__attn_plan_general(p, &a, mod);
}
static te_result te__cuda_plan_attn_fwd(te__plan *p, const te_op_attn_fwd_args *args) {
    te__text code = TE_ZERO;
    te_result r = te__attn_mod(p, "attn_fwd", &args->rule.score_mod, &code);
    if (r == TE_OK) r = te__attn_plan_fwd(p, args, code.n ? code.s : NULL);
    te__text_free(&code);
    return r;
}

static te_result te__attn_plan_bwd(te__plan *p, const te_op_attn_bwd_args *args, const char *mod) {
    te__attn_kargs a = te__attn_problem_bwd(args);
    const int64_t rows = (int64_t)a.batch * a.heads * a.s_pad; /* rows that kernels are launched for; packed sequences
                                                                * need memory for fewer (`kept`) */
    /* for the general kernels */
    const int64_t shared = te__attn_general_shared(&a, a.d, a.d_v, a.d, a.d_v), most = te__max(a.d, a.d_v);
    const bool fp8 = a.x.codes && te__attn_choose_fp8_bwd(p, &a, mod != NULL, args->o != NULL);
    const int kernels = fp8         ? TE__ATTN_HOPPER
                        : a.x.codes ? 0
                                    : te__attn_choose(p, &a, mod != NULL, true);
    const int64_t kept = a.x.packed_q ? a.heads * te__attn_packed_rows(a.x.t_q, a.batch) : rows;
    te_result r;
    te__attn_launch_clear(p, &a, true, false);
    if (rows / 8 > INT_MAX)
        return te__fail(p->te, TE_ERR_UNSUPPORTED, "attn_bwd: %lld query rows are more than a launch can have",
                        (long long)rows);
    if (kept > 0) {
        a.lse2 = te__plan_floats(p, 2 * kept);
        if (!a.lse2) return p->result;
        a.delta = a.lse2 + kept;
        if (rows > 0 && kernels != TE__ATTN_HOPPER) {
            te__launch *l = te__plan_with(p, "attn", "attn_delta", rows / 8, 256, &a, sizeof(a));
            if (!a.x.on) te__launch_option(l, "X_EXTRA", 0);
        }
    }
    if (fp8) return te__attn_plan_bwd_fp8(p, &a, rows, kept);
    if (te__attn_rounds(&a)) { /* The kernel for dQ writes delta, and the kernels after it read delta. */
        r = te__attn_launch(p, &a, "attn_bwd_dq", a.s_q, a.heads, a.d, NULL, shared, mod);
        if (r == TE_OK) r = te__attn_launch_extras(p, &a, args->dsoftmax_offset != NULL, mod, NULL);
        return r == TE_OK ? te__attn_launch(p, &a, "attn_bwd_dkv", a.s_kv, a.groups, most, NULL, shared, mod) : r;
    }
    if (kernels == TE__ATTN_HOPPER) {
        te__attn_bits bits = TE_ZERO;
        r = te__attn_plan_bwd_hopper(p, &a, rows, mod, &bits);
        return r == TE_OK ? te__attn_launch_extras(p, &a, args->dsoftmax_offset != NULL, mod, &bits) : r;
    }
    r = te__attn_launch_extras(p, &a, args->dsoftmax_offset != NULL, mod, NULL);
    if (r != TE_OK) return r;
    if (kernels == TE__ATTN_MMA) {
        const int d = te__attn_padded_d(&a);
        const te__attn_tiles q = te__attn_dq_tiles(p, d, a.dropout_p > 0.0f, a.x.on),
                             kv = te__attn_dkv_tiles(p, d, a.dropout_p > 0.0f, a.x.on);
        r = te__attn_launch(p, &a, "attn_bwd_dkv_mma", a.s_kv, a.groups, most, &kv, te__attn_dkv_shared(kv), NULL);
        return r == TE_OK
                   ? te__attn_launch(p, &a, "attn_bwd_dq_mma", a.s_q, a.heads, a.d, &q, te__attn_dq_shared(q), NULL)
                   : r;
    }
    r = te__attn_launch(p, &a, "attn_bwd_dkv", a.s_kv, a.groups, most, NULL, shared, mod);
    return r == TE_OK ? te__attn_launch(p, &a, "attn_bwd_dq", a.s_q, a.heads, a.d, NULL, shared, mod) : r;
}
static te_result te__cuda_plan_attn_bwd(te__plan *p, const te_op_attn_bwd_args *args) {
    te__text code = TE_ZERO;
    te_result r = te__attn_mod(p, "attn_bwd", &args->rule.score_mod, &code);
    if (r == TE_OK) r = te__attn_plan_bwd(p, args, code.n ? code.s : NULL);
    te__text_free(&code);
    return r;
}
