/* ops/gemm/choice.c: chooses a tile size and a number of splits of k. A model estimates the running time of each
 * choice. Calls with equal arguments and equally aligned data get the same choice on the same GPU, and so the same
 * bits. This file must not depend on the kernels' arguments. A slab is the values of k that a kernel loads at a
 * time. */

/* One tile size of a kernel. */
typedef struct te__gemm_tile_kind {
    int bm, bn;
    int option;  /* the option that selects the tile: TILE of gemm_mma; WAVES (or TE__GEMM_PINGPONG) of gemm_hopper */
    int cluster; /* number of blocks in a cluster. If bm > bn, these blocks have the same rows of D, so they share a
                  * part of A. Otherwise they have the same columns of D, so they share a part of B */
    double speed[6]; /* for each kind of product (see the kernel's table in cuda.c); 1: as fast as the best tiles; 0:
                      * not used */
} te__gemm_tile_kind;

/* Return how many blocks of a cluster use the same part of A, or of B; 1: not shared. */
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
    int64_t k_split; /* values of k in one split */
} te__gemm_choice;

/* One operand as the kernel of the product reads it: the operand of the call, or gemm_prepare's copy of it. */
typedef struct te__gemm_side {
    const void *data;
    te_dtype dtype;
    int64_t ld;
    bool k_major; /* neighbours along k are neighbours in memory */
} te__gemm_side;
typedef struct te__gemm_problem {
    const te_op_gemm_args *args; /* one product; with groups, m (along_k: k) is the sum over all groups */
    const te_op_grouped_gemm_args *groups; /* NULL: one product, no groups */
    te__gemm_side a, b;
    int block;  /* te__gemm_block_kind, or 0 */
    int phase, phases, first_b; /* where the block scales begin: see te__gemm_kargs */
    bool aligned; /* whether gemm_prepare has copied an operand to aligned rows */
    bool turned;  /* whether an f32 operand has been transposed, so that it is K-major */
    const te_op_gemm_args *high; /* the call whose A gemv_k quantizes, if `args` are those of its product of codes */
} te__gemm_problem;

/* Returns the number of bm x bn tiles of D. With groups of rows it is an upper bound, because each group may have one
 * incomplete tile. */
static int64_t te__gemm_num_tiles(const te__gemm_problem *q, int64_t bm, int64_t bn) {
    const te_op_gemm_args *a = q->args;
    int64_t down = !q->groups           ? te__div_up(a->m, bm)
                   : q->groups->along_k ? q->groups->groups * te__div_up(a->m, bm)
                                        : te__min(a->m / bm + q->groups->groups, a->m);
    return down * te__div_up(a->n, bn);
}
/* Returns the number of tiles of D, where all tiles of one cluster count as one. */
static int64_t te__gemm_cluster_tiles(const te__gemm_problem *q, const te__gemm_tile_kind *t) {
    return te__gemm_num_tiles(q, t->bm * te__gemm_share_b(t), t->bn * te__gemm_share_a(t));
}

static bool te__gemm_side_is_aligned(const te__gemm_side *x) {
    return (uintptr_t)x->data % 16 == 0 && x->ld * te_dtype_bits(x->dtype) % 128 == 0;
}
/* Returns whether A, B and all their rows start at multiples of 16 bytes. */
static bool te__gemm_is_aligned(const te__gemm_problem *q) {
    return te__gemm_side_is_aligned(&q->a) && te__gemm_side_is_aligned(&q->b);
}
/* Returns whether some rows start in the middle of a sector of the L2 cache (32 bytes), but all at multiples of 16
 * bytes. */
static bool te__gemm_side_is_off(const te__gemm_side *x) {
    return te__gemm_side_is_aligned(x) && ((uintptr_t)x->data % 32 != 0 || x->ld * te_dtype_bits(x->dtype) % 256 != 0);
}

/* Returns the least time of TMA for one slab of a block, if rows start in the middle of an L2 sector. The unit is that
 * of te__gemm_cost. Such a row costs about three cycles, or one if another block of the cluster loads it. */
static double te__gemm_tma_cost(const te__gemm_tile_kind *t, const te__gemm_problem *q) {
    int share_a = te__gemm_share_a(t), share_b = te__gemm_share_b(t);
    double rows_a = te__gemm_side_is_off(&q->a) ? t->bm : 0, rows_b = te__gemm_side_is_off(&q->b) ? t->bn : 0;
    return 0.9e-3 * (rows_a + rows_b) + 2.2e-3 * (rows_a / share_a + rows_b / share_b);
}

/* Returns the running time of a product according to the model. The unit of time is the time of one slab of a 128 x 256
 * tile (0.55 us on an H200). `work` is the time of the epilogue for 128 x 256 values. The model:
 * - A tile takes the time of its slabs, and of those stores to D that overlap with no other work.
 * - In one unit of time, device memory delivers at most 2.2 MB in all, and at most 80 KB to each block.
 * - A cluster takes a fixed time to start.
 * - Split-K takes the time of a second launch, and of a pass of the partial sums through the L2 cache.
 * The constants were fitted with `te_bench --tune` to measurements of 41 shapes. On 64 shapes the choices were 1 %
 * slower than the best on average, and 11 % at most. Two constants were fitted by hand: the speed of 128 x 192 tiles in
 * clusters, and the time to start a cluster. */
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

/* Returns the model's time of a grouped product, with groups of equal size. The unit is that of te__gemm_cost. */
static double te__grouped_cost(const te__plan *p, const te__gemm_tile_kind *t, double speed,
                               const te_op_grouped_gemm_args *a, int64_t bk, bool hopper) {
    int64_t granule = !hopper ? 128 : a->along_k ? 256 : 64; /* rows that are always computed together */
    int64_t m = a->along_k ? a->m : te__div_up(a->m, a->groups), k = a->along_k ? te__div_up(a->k, a->groups) : a->k;
    int64_t down = te__div_up(m, t->bm), across = te__div_up(a->n, t->bn);
    /* the average size of a tile, in tiles of 128 x 256 */
    double size = (double)te__round_up(m, te__min(granule, t->bm)) / (double)down * (double)t->bn / (128.0 * 256.0);
    int64_t rounds =
        te__div_up(a->groups * down * te__round_up(across, a->along_k ? 1 : t->cluster), te__max(p->num_sms, 1));
    return (double)rounds * ((double)te__div_up(k, bk) * size / speed + 0.3 + size);
}

/* Lets `te_bench --tune` and tests run each alternative. `take` is the number of the alternative; -1: the best. */
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
/* Whether te__gemm_choose stores and reuses choices. A caller that counts the alternatives sets `count` to 0, so that
 * the search runs even for a product whose choice is stored. */
#define TE__GEMM_REMEMBERS (te__gemm_tune.take < 0 && te__gemm_tune.count > 0)
#else
#define TE__GEMM_SKIPS(cost) false
#define TE__GEMM_TUNES false
#define TE__GEMM_REMEMBERS true
#endif

/* Returns whether TMA may store rows of n elements. TMA writes whole pieces of 16 bytes, even beyond the end of a
 * row. */
static bool te__gemm_tma_may_store(const void *data, int64_t ld, int64_t n, int64_t size) {
    return (uintptr_t)data % 16 == 0 && ld * size % 16 == 0 && n * size % 16 == 0;
}

/* Returns te__gemm_cost's `work`: the cost of the epilogue, or of stores that TMA may not do. */
static double te__gemm_work(const te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    if (a->epilogue != TE_EPILOGUE_NONE || a->bias_gradient) return 6.0;
    return !p->hopper || te__gemm_tma_may_store(te__data(a->d), te__gemm_ld(a->d), a->n, te__dtype_size(a->d->dtype))
               ? 0.0
               : 0.5;
}

/* Returns the tile and the number of splits that cost the least. `use` is the index in a tile's `speed`. `bk` is the
 * number of values of k in a slab. */
static te__gemm_choice te__gemm_search(const te__plan *p, const te__gemm_tile_kind *kinds, int count, int use,
                                       const te__gemm_problem *q, int64_t bk, bool hopper) {
    const te_op_gemm_args *a = q->args;
    static const int64_t splits[] = {1, 2, 3, 4, 6, 8, 12, 16};
    enum { SHORTEST = 4 }; /* the least number of slabs in a split; fewer do not fill the pipeline */
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
    best.k_split = te__round_up(te__div_up(slabs, best.splits) * bk, q->block ? 128 : bk); /* whole blocks of 128 with
                                                                                            * block scales */
    best.splits = te__div_up(a->k, best.k_split); /* rounding up may have left the last splits empty */
    return best;
}

/* ---- the choice, kept -------------------------------------------------------------------------------------------- */

typedef char te__gemm_memo_fits[sizeof(te__gemm_choice) <= TE__MEMO_VALUE ? 1 : -1];

/* Returns what te__gemm_search chooses, and stores it for the next product of the same shape. A search takes a quarter
 * of the time of a launch. */
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
