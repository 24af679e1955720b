/* ops/gemm/choice.c: chooses a tile size and a number of splits of k by a small model of the time that each would take.
 * Nothing is tried out, so the same shapes get the same kernel, and the same bits, in every run. Knows what tiles cost;
 * must not know kernels' arguments. */

/* One tile size of a kernel. */
typedef struct te__gemm_tile_kind {
    int bm, bn;
    int option;  /* the kernel's option: TILE of gemm_mma; WAVES, or TE__GEMM_PINGPONG, of gemm_hopper */
    int cluster; /* blocks that share an operand: tiles above each other share B, or, if bm > bn, tiles beside each
                  * other share A */
    double speed[6]; /* share of the best utilisation of the tensor cores, for each kind of product that the kernel's
                      * table names; 0: the tile is not used for that kind */
} te__gemm_tile_kind;

/* Return how many blocks of a cluster share one tile's part of A, or of B; 1: none is shared. */
static int te__gemm_share_a(const te__gemm_tile_kind *t) { return t->bm > t->bn ? t->cluster : 1; }
static int te__gemm_share_b(const te__gemm_tile_kind *t) { return t->bm > t->bn ? 1 : t->cluster; }
/* Returns how many clusters run at a time. */
static int64_t te__gemm_clusters(const te__plan *p, const te__gemm_tile_kind *t) {
    return te__max(p->num_sms / t->cluster, 1);
}

enum { TE__GEMM_PINGPONG = 3 };

typedef struct te__gemm_choice {
    const te__gemm_tile_kind *tile;
    int64_t tiles, splits;
    int64_t k_split; /* k of one split */
} te__gemm_choice;

/* One operand that the kernels multiply: the call's own, or its decoded copy. */
typedef struct te__gemm_side {
    const void *data;
    te_dtype dtype;
    int64_t ld;
    bool k_major; /* neighbours along k are neighbours in memory */
} te__gemm_side;
typedef struct te__gemm_problem {
    const te_op_gemm_args *args; /* with groups: one product of all groups' rows, or of all their k */
    const te_op_grouped_gemm_args *groups; /* NULL: one product, no groups */
    te__gemm_side a, b;
    int block;  /* te__gemm_block_kind, or 0 */
    int phase, phases, first_b; /* where block scales begin: see te__gemm_kargs */
    bool aligned; /* gemm_prepare has copied an operand to aligned rows */
} te__gemm_problem;

/* Returns the number of bm x bn tiles of D. Groups along rows: an upper bound, since each group may end with a tile
 * that is not full. */
static int64_t te__gemm_num_tiles(const te__gemm_problem *q, int64_t bm, int64_t bn) {
    const te_op_gemm_args *a = q->args;
    int64_t down = !q->groups           ? te__div_up(a->m, bm)
                   : q->groups->along_k ? q->groups->groups * te__div_up(a->m, bm)
                                        : te__min(a->m / bm + q->groups->groups, a->m);
    return down * te__div_up(a->n, bn);
}
/* Returns the number of tiles, the tiles of one cluster counted as one. */
static int64_t te__gemm_cluster_tiles(const te__gemm_problem *q, const te__gemm_tile_kind *t) {
    return te__gemm_num_tiles(q, t->bm * te__gemm_share_b(t), t->bn * te__gemm_share_a(t));
}

static bool te__gemm_side_is_aligned(const te__gemm_side *x) {
    return (uintptr_t)x->data % 16 == 0 && x->ld * te_dtype_bits(x->dtype) % 128 == 0;
}
/* Returns whether A, B and each of their rows start at multiples of 16 bytes. */
static bool te__gemm_is_aligned(const te__gemm_problem *q) {
    return te__gemm_side_is_aligned(&q->a) && te__gemm_side_is_aligned(&q->b);
}
/* Returns whether rows start at multiples of 16 bytes, but some of them within a sector (32 bytes) of the L2 cache. */
static bool te__gemm_side_is_off(const te__gemm_side *x) {
    return te__gemm_side_is_aligned(x) && ((uintptr_t)x->data % 32 != 0 || x->ld * te_dtype_bits(x->dtype) % 256 != 0);
}

/* Returns the least time of a slab for a block whose rows start within sectors, in te__gemm_cost's unit: some three
 * cycles for each such row that the block loads by TMA, and one for each that the other block of the cluster loads.
 * Fitted with te__gemm_cost's constants. */
static double te__gemm_tma_cost(const te__gemm_tile_kind *t, const te__gemm_problem *q) {
    int share_a = te__gemm_share_a(t), share_b = te__gemm_share_b(t);
    double rows_a = te__gemm_side_is_off(&q->a) ? t->bm : 0, rows_b = te__gemm_side_is_off(&q->b) ? t->bn : 0;
    return 0.9e-3 * (rows_a + rows_b) + 2.2e-3 * (rows_a / share_a + rows_b / share_b);
}

/* Returns the modelled time of a product. The unit is a slab of a 128 x 256 tile (0.55 us on an H200).
 * The constants are fitted to measurements of 41 shapes by `te_bench --tune`; on 64 shapes the choices were 1 % slower
 * than the best alternatives on average, 11 % at most. Fitted by hand since: 128 x 192 tiles in clusters, to eight more
 * shapes, and the start of a cluster, to 35.
 * The model: a tile costs its slabs, and the part of writing D that is not hidden. Device memory bounds all tiles
 * together: 2.2 MB a slab, 80 KB for one block. A cluster costs its start. Split-K costs a second launch, and a pass of
 * the partial sums through the L2 cache. work: the cost of the epilogue on 128 x 256 values. */
static double te__gemm_cost(const te__plan *p, const te__gemm_tile_kind *t, double speed, const te__gemm_problem *q,
                            int64_t slabs, int64_t splits, bool tma, double work) {
    const te_op_gemm_args *a = q->args;
    double size = (double)t->bm * t->bn / (128.0 * 256.0),
           bytes = (double)(a->m + a->n) * (double)a->k * (double)te__dtype_size(q->a.dtype);
    int64_t at_once = te__gemm_clusters(p, t), items = te__gemm_cluster_tiles(q, t) * splits,
            rounds = te__div_up(items, at_once);
    int64_t blocks = te__min(items, at_once) * t->cluster;
    double slab = fmax(size / speed, tma ? te__gemm_tma_cost(t, q) : 0.0), tail = (1.6 + work) * size;
    double floor = bytes / fmin(2.2e6, 80e3 * (double)te__max(blocks, 1));
    double cost = (double)rounds * ((double)te__div_up(slabs, splits) * slab + 0.8) +
                  (t->option == TE__GEMM_PINGPONG ? 1.0 : (double)rounds) * tail;
    cost = fmax(cost, floor) + 0.1 * fmin(cost, floor);
    if (t->cluster > 1) cost += 0.3;
    if (splits > 1) cost += 3.2 + (double)a->m * (double)a->n * 4.0 * (double)(splits + 1) / 1.9e6;
    return cost;
}

/* Returns the modelled time of a product by groups, as if all groups had one size. The unit is te__gemm_cost's; the
 * constants are earlier ones, with which grouped products were measured. */
static double te__grouped_cost(const te__plan *p, const te__gemm_tile_kind *t, double speed,
                               const te_op_grouped_gemm_args *a, int64_t bk, bool hopper) {
    int64_t granule = !hopper ? 128 : a->along_k ? 256 : 64; /* rows that are computed even if only one of them
                                                              * exists */
    int64_t m = a->along_k ? a->m : te__div_up(a->m, a->groups), k = a->along_k ? te__div_up(a->k, a->groups) : a->k;
    int64_t down = te__div_up(m, t->bm), across = te__div_up(a->n, t->bn);
    /* size: of a tile, on average */
    double size = (double)te__round_up(m, te__min(granule, t->bm)) / (double)down * (double)t->bn / (128.0 * 256.0);
    int64_t rounds =
        te__div_up(a->groups * down * te__round_up(across, a->along_k ? 1 : t->cluster), te__max(p->num_sms, 1));
    return (double)rounds * ((double)te__div_up(k, bk) * size / speed + 0.3 + size);
}

/* Lets `te_bench --tune` and tests run each alternative: number `take`, or -1 for the best. */
#ifdef TE__TUNE
static struct te__gemm_tune {
    int take, count;
    double cost[512];
} te__gemm_tune = {-1, 0, {0}};
static bool te__gemm_skips(double cost) {
    int index = te__gemm_tune.count < TE__COUNT(te__gemm_tune.cost) - 1 ? te__gemm_tune.count++ : te__gemm_tune.count;
    te__gemm_tune.cost[index] = cost;
    return te__gemm_tune.take >= 0 && index != te__gemm_tune.take;
}
#define TE__GEMM_SKIPS(cost) te__gemm_skips(cost)
#define TE__GEMM_TUNES (te__gemm_tune.take >= 0)
/* with count 0 the alternatives are about to be counted, so no choice is remembered or reused */
#define TE__GEMM_REMEMBERS (te__gemm_tune.take < 0 && te__gemm_tune.count > 0)
#else
#define TE__GEMM_SKIPS(cost) false
#define TE__GEMM_TUNES false
#define TE__GEMM_REMEMBERS true
#endif

/* Returns whether TMA may store rows of n elements: they must start and end at multiples of 16 bytes. TMA writes whole
 * pieces of 16 bytes, so a row that ended within a piece would overwrite the bytes behind it. */
static bool te__gemm_tma_may_store(const void *data, int64_t ld, int64_t n, int64_t size) {
    return (uintptr_t)data % 16 == 0 && ld * size % 16 == 0 && n * size % 16 == 0;
}

/* Returns te__gemm_cost's `work`: that of the epilogue, or of stores to rows that start or end within 16 bytes. */
static double te__gemm_work(const te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    if (a->epilogue != TE_EPILOGUE_NONE || a->bias_gradient) return 6.0;
    return !p->hopper || te__gemm_tma_may_store(te__data(a->d), te__gemm_ld(a->d), a->n, te__dtype_size(a->d->dtype))
               ? 0.0
               : 0.5;
}

/* Returns the tile and the number of splits with the least cost. use: the kind of product, an index of `speed`. bk:
 * elements of k in a slab. hopper: for gemm_hopper, which reads by TMA. */
static te__gemm_choice te__gemm_search(const te__plan *p, const te__gemm_tile_kind *kinds, int count, int use,
                                       const te__gemm_problem *q, int64_t bk, bool hopper) {
    const te_op_gemm_args *a = q->args;
    static const int64_t splits[] = {1, 2, 3, 4, 6, 8, 12, 16};
    enum { SHORTEST = 4 }; /* least slabs of a split: fewer do not fill the pipeline */
    const int64_t most_workspace = (int64_t)256 << 20;
    int64_t slabs = te__div_up(a->k, bk);
    double work = te__gemm_work(p, q);
    te__gemm_choice best = TE_ZERO;
    double best_cost = 0.0;
    int i, s;
    for (i = 0; i < count; i++)
        for (s = 0; s < TE__COUNT(splits); s++) {
            const te__gemm_tile_kind *t = &kinds[i];
            double cost;
            if (t->speed[use] == 0.0 ||
                (q->block && (t->bn > 128 || (t->cluster > 1 && q->groups && q->groups->along_k))))
                continue;
            if (s > 0 && (q->groups || slabs < SHORTEST * splits[s] ||
                          (double)a->m * (double)a->n * 4.0 * (double)splits[s] > (double)most_workspace))
                continue;
            cost = q->groups ? te__grouped_cost(p, t, t->speed[use], q->groups, bk, hopper)
                             : te__gemm_cost(p, t, t->speed[use], q, slabs, splits[s], hopper, work);
            if ((!q->groups && TE__GEMM_SKIPS(cost)) || (best.tile && cost >= best_cost)) continue;
            best.tile = t;
            best.splits = splits[s];
            best_cost = cost;
        }
    best.tiles = te__gemm_cluster_tiles(q, best.tile);
    best.k_split = te__round_up(te__div_up(slabs, best.splits) * bk, q->block ? 128 : bk); /* whole blocks */
    best.splits = te__div_up(a->k, best.k_split); /* rounding up may have left the last splits empty */
    return best;
}

/* ---- the choice, kept -------------------------------------------------------------------------------------------- */

typedef char te__gemm_memo_fits[sizeof(te__gemm_choice) <= TE__MEMO_VALUE ? 1 : -1];

/* Returns te__gemm_search's choice, remembered by problem: a search costs a quarter of a launch. */
static te__gemm_choice te__gemm_choose(te__plan *p, const te__gemm_tile_kind *kinds, int count, int use,
                                       const te__gemm_problem *q, int64_t bk, bool hopper) {
    const te_op_gemm_args *a = q->args;
    int64_t key[TE__MEMO_KEY / 8] = {a->m,
                                     a->n,
                                     a->k,
                                     (int64_t)(uintptr_t)kinds,
                                     (int64_t)q->a.dtype,
                                     q->block << 3 | use,
                                     (int64_t)(2.0 * te__gemm_work(p, q)) << 2};
    te__gemm_choice c;
    bool known = false;
    void *memo;
    if (q->groups) return te__gemm_search(p, kinds, count, use, q, bk, hopper);
    key[6] |= (te__gemm_side_is_off(&q->a) ? 1 : 0) | (te__gemm_side_is_off(&q->b) ? 2 : 0);
    memo = TE__GEMM_REMEMBERS ? te__cuda_memo(p, key, &known) : NULL;
    if (!known) c = te__gemm_search(p, kinds, count, use, q, bk, hopper);
    if (known) memcpy(&c, memo, sizeof(c));
    else if (memo) memcpy(memo, &c, sizeof(c));
    return c;
}
