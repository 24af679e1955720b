/* ops/gemm/cuda.c: chooses the kernels of matrix products and of grouped GEMMs, and their launches. The only part of
 * the CUDA driver that this file may use is tensor maps.
 *
 * A line is a row of op(A) or a column of op(B). The kernels:
 * - gemm_hopper: wgmma, sm_90a.
 * - gemm_mma: mma.sync, sm_80 and later.
 * - gemv_k: at most sixteen lines times a K-major operand, or 32 of MXFP8 and NVFP4. It reads their codes itself.
 * - gemv_mn: at most eight lines times an operand that is not K-major.
 * - gemm_naive: any product on any GPU.
 * - gemm_prepare: decodes MXFP8 and NVFP4 into bf16 in the workspace, for all kernels but gemv_k.
 * If each group of a grouped GEMM has its own rows, only the device knows how many rows each group has. So the host
 * plans for the largest possible number of tiles. */

/* ---- gemm_naive -------------------------------------------------------------------------------------------------- */

static te_result te__gemm_plan_naive(te__plan *p, const te__gemm_problem *q) {
    te__launch *l = te__plan_launch(p, "gemm", "gemm_naive");
    te__gemm_fill(TE__KARGS(p, l, te__gemm_kargs), q);
    te__launch_size(l, te__gemm_num_tiles(q, 64, 64), 1, 1, 256, 0);
    if (q->args->bias_gradient && !te__gemm_plan_bias_gradient(p, q->args, NULL, 0)) return p->result;
    p->native = false;
    te__plan_why(p, q->args->k == 0 ? "k is 0: D is the epilogue of zeros"
                    : te__gemm_is_exact(p, q)
                        ? "exact_f32: plain f32 arithmetic, no tensor cores"
                        : TE__GEMM_WHY(q, "plain f32 arithmetic from the embedded PTX, no tensor cores: no NVRTC"));
    return TE_OK;
}

/* ---- gemm_mma ---------------------------------------------------------------------------------------------------- */

static te_result te__gemm_plan_mma(te__plan *p, const te__gemm_problem *q) {
    /* speed[0] is for ordinary products, speed[1] for products that need more registers. Shared memory holds four slabs
     * of 64 bytes of k. */
    static const te__gemm_tile_kind kinds[] = {
        {128, 256, 2, 1, {1.0}}, {128, 128, 1, 1, {0.9}}, {128, 128, 3, 1, {0.0, 0.8}}, {64, 64, 0, 1, {0.6, 0.6}}};
    bool fp8 = te__is_fp8(q->a.dtype), fp8_cores = p->sm == 89 || p->sm >= 120;
    /* if the groups divide k, a group may start at any element of a row of a K-major operand */
    bool within_rows = q->groups && q->groups->along_k && (q->a.k_major || q->b.k_major);
    bool aligned = te__gemm_is_aligned(q) && !within_rows,
         promote = fp8 && fp8_cores && q->args->split_accumulator && !q->block;
    bool is_heavy = q->a.dtype == TE_F32 || !aligned || promote || q->block;
    te__gemm_choice c =
        te__gemm_choose(p, kinds, TE__COUNT(kinds), is_heavy, q, 64 / te__dtype_size(q->a.dtype), false);
    te__launch *l = te__plan_launch(p, "gemm", "gemm_mma");
    te__gemm_kargs *k = TE__KARGS(p, l, te__gemm_kargs);
    te__gemm_fill(k, q);
    te__gemm_options(l, q);
    te__launch_option(l, "TILE", c.tile->option);
    te__launch_option(l, "ALIGNED", aligned);
    te__launch_option(l, "PROMOTE", promote);
    if (q->groups) te__launch_option(l, "GROUPED", 1);
    te__launch_size(l, c.tiles, c.splits, 1, c.tile->option >= 2 ? 256 : 128,
                    (int64_t)(c.tile->bm + c.tile->bn) * 64 * 4);
    if (!te__gemm_split(p, k, &c)) return p->result;
    if (c.splits > 1) te__gemm_plan_reduce(p, q, &c, k->d);
    if (q->args->bias_gradient && !te__gemm_plan_bias_gradient(p, q->args, NULL, 0)) return p->result;
    p->native = q->args->scaling_a < TE_SCALING_MXFP8 && (!fp8 || fp8_cores);
    te__plan_why(
        p, !aligned ? TE__GEMM_WHY_SUMS(q, promote,
                                        "tensor cores (mma.sync), shifted out of aligned words of 16 bytes (A, B, "
                                        "their rows or the groups are not 16-byte aligned)")
           : q->a.dtype == TE_F32 ? "tensor cores (mma.sync), f32 as TF32"
           : fp8 && !fp8_cores
               ? TE__GEMM_WHY_SUMS(q, promote, "fp8 decoded exactly into f16 on the way to the tensor cores (mma.sync)")
           : fp8 ? TE__GEMM_WHY_SUMS(q, promote, "fp8 tensor cores (mma.sync)")
                 : TE__GEMM_WHY_SUMS(q, promote, "tensor cores (mma.sync)"));
    return TE_OK;
}

/* ---- gemm_hopper ------------------------------------------------------------------------------------------------- */

/* Returns whether gemm_hopper can do the product. TMA counts in 32 bits. It loads the scales of B's 1 x 128 blocks in
 * pieces of 16 bytes. */
static bool te__gemm_fits_hopper(const te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    return p->hopper && te__max(te__max(a->m, a->n), a->k) <= INT_MAX - 1024 &&
           (!q->block || te__is_aligned(a->scale_b, 16));
}

/* Encodes a tensor map of `depth` matrices of `rows` x `columns`, `apart` elements apart. If `depth` is 0, the map has
 * two dimensions. A box has `box` rows of 128 bytes. */
static te_result te__gemm_map(te__plan *p, void *map, const void *data, te_dtype dtype, int64_t ld, int64_t columns,
                              int64_t rows, int64_t box, int64_t depth, int64_t apart) {
    int64_t size = (int)dtype == TE__MAP_TF32 ? 4 : te__dtype_size(dtype);
    uint64_t dims[3] = {(uint64_t)columns, (uint64_t)rows, (uint64_t)depth},
             strides[2] = {(uint64_t)(ld * size), (uint64_t)(apart * size)};
    uint32_t boxes[3] = {(uint32_t)(128 / size), (uint32_t)box, 1};
    return te__cuda_tensor_map(p, map, data, dtype, depth ? 3 : 2, dims, strides, boxes, 128);
}
/* Encodes the tensor map of an operand with `size` lines (rows of A, columns of B) of length k. A box:
 * - K-major: `box` lines by one slab (128 bytes) of k.
 * - Otherwise: 64 lines by one slab of k, or by half a slab if `box` is not a multiple of 64.
 * If each group has its own matrix, `stack` is the number of groups: loads beyond a group's end give zeros. Otherwise
 * `stack` is 0. */
static te_result te__gemm_operand_map(te__plan *p, void *map, const te__gemm_side *x, int64_t size, int64_t k,
                                      int64_t box, int64_t stack) {
    int64_t rows = x->k_major ? size : k;
    const te_dtype dtype = x->dtype == TE_F32 ? (te_dtype)TE__MAP_TF32 : x->dtype;
    return te__gemm_map(p, map, x->data, dtype, x->ld, x->k_major ? k : size, rows,
                        x->k_major ? box
                        : box % 64 ? 32
                                   : 64,
                        stack, x->ld * rows);
}
/* Encodes the tensor map of D or aux. The third dimension is the split of k or, if groups divide k, the group. */
static te_result te__gemm_out_map(te__plan *p, void *map, const te__gemm_kargs *k, const void *data, int64_t ld) {
    int64_t depth = k->groups.along_k ? k->groups.count : k->splits, apart = k->groups.along_k ? k->groups.b_elements
                                                                             : k->splits > 1   ? k->d_split
                                                                                               : ld;
    return te__gemm_map(p, map, data, (te_dtype)k->d_dt, ld, k->n, k->m, 64, depth, apart);
}

/* Returns the TE__GEMM_STORE_... bits of the epilogue. TMA stores D under these conditions:
 * - The rows of D and aux start and end at multiples of 16 bytes, or k is split. With splits, TMA may also write the
 *   padding behind the rows of partial sums.
 * - No row or column has a scale of its own.
 * - If the epilogue is dGELU, D is not f32.
 * - If both `accumulate` and aux are used, D is f32. */
static int te__gemm_store_of(const te__gemm_kargs *k) {
    int64_t size = te__dtype_size((te_dtype)k->d_dt);
    bool aligned = k->splits > 1 || (te__gemm_tma_may_store(k->d, k->ldd, k->n, size) &&
                                     te__gemm_tma_may_store(k->aux, k->ldaux, k->n, size));
    bool gelu = k->epilogue == TE_EPILOGUE_GELU, dgelu = k->epilogue == TE_EPILOGUE_DGELU, f32 = k->d_dt == TE_F32;
    bool aux_and_old = k->aux && k->accumulate && !f32, lines = k->rows_a || k->columns_b;
    int store = (k->bias ? TE__GEMM_STORE_BIAS : 0) | (gelu ? TE__GEMM_STORE_GELU : 0) |
                (gelu && k->aux ? TE__GEMM_STORE_AUX : 0) | (dgelu ? TE__GEMM_STORE_DGELU : 0) |
                (k->accumulate ? TE__GEMM_STORE_ADD : 0) | (lines ? TE__GEMM_STORE_LINES : 0);
    return !aligned || lines || (dgelu && f32) || aux_and_old ? store : store | TE__GEMM_STORE_TMA;
}
/* Fills in the launch of gemm_groups, which runs before gemm_hopper. For each group it writes copies of the tensor maps
 * that end where the group ends. */
static void te__gemm_plan_groups(te__plan *p, te__launch *l, const te__gemm_problem *q, te__gemm_hopper_kargs *h,
                                 const te__gemm_choice *c, bool by_tma) {
    const te_op_grouped_gemm_args *a = q->groups;
    te__gemm_groups_kargs *k = TE__KARGS(p, l, te__gemm_groups_kargs);
    memcpy(k->map[0], a->along_k ? h->a_map : h->d_map, sizeof(k->map[0]));
    memcpy(k->map[1], a->along_k ? h->b_map : h->aux_map, sizeof(k->map[1]));
    k->dim[0] = a->along_k ? !q->a.k_major : by_tma ? 1 : -1;
    k->dim[1] = a->along_k ? !q->b.k_major : by_tma && a->aux ? 1 : -1;
    k->groups = h->g.groups;
    k->total = a->along_k ? a->k : a->m;
    k->per_row =
        (unsigned)(a->along_k ? c->tiles / a->groups : te__div_up(a->n, c->tile->bn * te__gemm_share_a(c->tile)));
    k->bm = c->tile->bm;
    k->skip_empty = a->accumulate;
    h->rows = k->rows =
        (te__gemm_group_row *)te__plan_workspace(p, (a->groups + 1) * (int64_t)sizeof(te__gemm_group_row));
    h->maps = k->maps = (unsigned long long *)te__plan_workspace(p, a->groups * 2 * 128);
    te__launch_size(l, 1, 1, 1, 32, 0);
}

/* Returns with how many clusters gemm_hopper is launched: as many as run at a time, each for its share of the tiles.
 * Beside a collective some find no room, and begin when another cluster has done its whole share, so that the product
 * takes up to twice its time. So then a cluster has two tiles, or one if there are few, and goes where there is room
 * (tests/bench/notes.md, "Several GPUs"). Products of groups draw their tiles. Each tile has the same bits in any
 * cluster. */
static int64_t te__gemm_hopper_clusters(const te__plan *p, const te__gemm_problem *q, const te__gemm_choice *c) {
    const int64_t works = c->tiles * c->splits;
    int64_t clusters = te__gemm_clusters(p, c->tile);
    if (p->beside && !q->groups)
        clusters = te__max(clusters, c->tile->option == TE__GEMM_PINGPONG || works >= 4 * clusters
                                         ? te__div_up(works, 2)
                                         : works);
    return te__min(works, clusters);
}

static te_result te__gemm_plan_hopper(te__plan *p, const te__gemm_problem *q) {
    /* `speed` has three pairs: a single product, groups with their own rows, groups with their own part of k. The
     * second number of a pair is for promoted sums. With groups of rows, a cluster may share only A, because only
     * tiles in the same rows are sure to belong to one group. */
    static const te__gemm_tile_kind kinds[] = {{128, 256, 1, 2, {1.0, 0.0, 0.0, 0.0, 1.0, 0.0}},
                                               {128, 256, 1, 1, {0.985, 0.0, 0.0, 0.0, 0.985, 0.0}},
                                               {256, 128, 2, 2, {0.995, 0.96, 1.0, 1.0, 0.0, 0.96}},
                                               {256, 128, 2, 1, {0.0, 0.95, 0.97, 0.97, 0.0, 0.95}},
                                               {128, 128, 1, 2, {0.95, 0.0, 0.0, 0.0, 0.0, 0.0}},
                                               {128, 128, 1, 1, {0.95, 0.92, 0.0, 0.0, 0.94, 0.88}},
                                               {128, 128, TE__GEMM_PINGPONG, 2, {0.935, 0.0, 0.0, 0.0, 0.0, 0.0}},
                                               {64, 256, 0, 1, {0.81, 0.0, 0.8, 0.0, 0.8, 0.0}},
                                               {64, 128, 0, 1, {0.82, 0.755, 0.74, 0.0, 0.74, 0.0}},
                                               {64, 128, 0, 2, {0.78, 0.0, 0.0, 0.0, 0.0, 0.0}},
                                               {128, 192, 1, 1, {0.95, 0.95, 0.0, 0.0, 0.0, 0.0}},
                                               {128, 192, 1, 2, {0.95, 0.975, 0.0, 0.0, 0.0, 0.0}}};
    const te_op_gemm_args *a = q->args;
    const bool promote = te__is_fp8(q->a.dtype) && (a->split_accumulator || q->block),
               along_k = q->groups && q->groups->along_k, along_rows = q->groups && !along_k;
    te__gemm_choice c = te__gemm_choose(p, kinds, TE__COUNT(kinds),
                                        (along_k      ? 4
                                         : along_rows ? 2
                                                      : 0) +
                                            promote,
                                        q, 128 / te__dtype_size(q->a.dtype), true);
    te__launch *prepare = q->groups ? te__plan_launch(p, "gemm", "gemm_groups") : NULL,
               *l = te__plan_launch(p, "gemm", "gemm_hopper");
    te__gemm_hopper_kargs *k = TE__KARGS(p, l, te__gemm_hopper_kargs);
    int64_t blocks, sum_rows = 0, box_a = along_rows && c.tile->bm == 256 ? 128 : c.tile->bm / te__gemm_share_a(c.tile);
    float *sums_of_d = NULL;
    bool by_tma;
    int store;
    te__gemm_fill(&k->g, q);
    if (!te__gemm_split(p, &k->g, &c)) return p->result;
    store = te__gemm_store_of(&k->g);
    by_tma = (store & TE__GEMM_STORE_TMA) != 0;
    if (a->bias_gradient && by_tma && c.splits == 1) { /* a row of sums for each 16 rows of D */
        sum_rows = te__div_up(a->m, 16);
        k->g.row_sums = sums_of_d = (float *)te__plan_workspace(p, sum_rows * a->n * 4);
        if (!sums_of_d) return p->result;
        store |= TE__GEMM_STORE_SUMS;
    }
    l->cluster = (unsigned)c.tile->cluster;
    te__gemm_options(l, q);
    te__launch_option(l, "BN", c.tile->bn);
    te__launch_option(l, "WAVES", c.tile->option == TE__GEMM_PINGPONG ? 1 : c.tile->option);
    if (c.tile->option == TE__GEMM_PINGPONG) te__launch_option(l, "PINGPONG", 1);
    te__launch_option(l, "CLUSTER", c.tile->cluster);
    te__launch_option(l, "PROMOTE", promote);
    te__launch_option(l, "STORE", store);
    te__launch_option(l, "D_DT", k->g.d_dt);
    if (q->groups) te__launch_option(l, "GROUPED", along_k ? 2 : 1);
    blocks = c.tile->cluster * te__gemm_hopper_clusters(p, q, &c);
    te__launch_size(l, blocks, 1, 1, 384, TE__GEMM_HOPPER_SHARED);
    if (te__gemm_operand_map(p, k->a_map, &q->a, a->m, a->k, box_a, 0) != TE_OK ||
        te__gemm_operand_map(p, k->b_map, &q->b, a->n, a->k, c.tile->bn / te__gemm_share_b(c.tile),
                             along_rows ? q->groups->groups : 0) != TE_OK ||
        (by_tma && te__gemm_out_map(p, k->d_map, &k->g, k->g.d, k->g.ldd) != TE_OK) ||
        (k->g.aux && by_tma && te__gemm_out_map(p, k->aux_map, &k->g, k->g.aux, k->g.ldaux) != TE_OK))
        return p->result;
    if (q->groups) te__gemm_plan_groups(p, prepare, q, k, &c, by_tma);
    if (c.splits > 1) te__gemm_plan_reduce(p, q, &c, k->g.d);
    if (a->bias_gradient && !te__gemm_plan_bias_gradient(p, a, sums_of_d, sum_rows)) return p->result;
    p->native = a->scaling_a < TE_SCALING_MXFP8;
    te__plan_why(p, q->a.dtype == TE_F32 ? TE__GEMM_WHY(q, "TMA, which rounds f32 to TF32, and wgmma")
                                         : TE__GEMM_WHY_SUMS(q, promote, "TMA and wgmma"));
    return p->result;
}

/* ---- gemv_k and gemv_mn ------------------------------------------------------------------------------------------ */

/* Returns the long operand of a GEMV. */
static const te__gemm_side *te__gemv_x(const te__gemm_problem *q) { return q->args->m <= q->args->n ? &q->b : &q->a; }

/* Returns whether gemv_mn (if `mn`) or gemv_k takes the product. Their time is the time to read the long operand. A
 * line is a row of A or a column of B.
 * - gemv_k: at most sixteen lines of the short operand, or eight with unaligned lines or block scales, which need
 *   registers. 32 lines of MXFP8 and NVFP4: otherwise gemm_prepare decodes the whole long operand.
 * - gemv_k cannot split k. With k > 16384 it needs four lines of the long operand for each multiprocessor.
 * - gemv_mn: at most eight lines of the short operand, and at least 64 of the long one.
 * - gemm_hopper takes a short A with very many aligned lines of B: its ring buffer has more bytes in flight
 *   (tests/bench/notes.md). With a short B its ring buffer would be nearly empty. Products of one row that gemv_joint
 *   takes together, with what stands before and behind them, may have more lines. */
static int64_t te__gemv_most_shared = 40 * 1024; /* the most bytes of shared memory for the short operand: each block
                                                  * decodes all of it. Twice as many for MXFP8 of more than four
                                                  * lines. Tests set a smaller number */

/* Returns the number of values of k in a turn of gemv_k with codes. */
static int64_t te__gemv_turn(const te__gemm_problem *q) { return q->args->scaling_a == TE_SCALING_NVFP4 ? 256 : 128; }
/* Returns whether gemv_k can have the short operand in shared memory: few lines of codes, which are aligned. */
static bool te__gemv_shares(const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    const int64_t turn = te__gemv_turn(q), turns = te__div_up(a->k, turn), few = te__min(a->m, a->n),
                  most = te__gemv_most_shared * (a->scaling_a == TE_SCALING_MXFP8 && few > 4 ? 2 : 1);
    return few <= 16 && (te__is_fp8(q->a.dtype) || q->a.dtype == TE_F4E2M1) && q->a.k_major && q->b.k_major &&
           te__gemm_is_aligned(q) && turns <= most / (turn * 2) && TE__GEMV_SHARED(few, turns, turn) <= most;
}
/* Returns whether a short operand of codes is read faster from shared memory than into registers. Not codes of FP8
 * alone, which are as quick in registers. A block has to go over several tiles if it decodes many lines. */
static bool te__gemv_pays_sharing(const te__plan *p, const te_op_gemm_args *a) {
    const bool many = a->scaling_a == TE_SCALING_MXFP8 && te__min(a->m, a->n) > 4;
    return a->scaling_a >= TE_SCALING_MXFP8 && (!many || te__max(a->m, a->n) >= 160 * (int64_t)p->num_sms);
}
/* Returns whether gemv_k can read the scales of MXFP8 and NVFP4, if there are any: in words of four. */
static bool te__gemv_reads_scales(const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    return a->scaling_a < TE_SCALING_MXFP8 ||
           (te__gemm_is_aligned(q) && te__is_aligned(a->scale_a, 4) && te__is_aligned(a->scale_b, 4));
}

/* `most`: for each multiprocessor, the most bytes that all lines of the long operand have in one value of k. With more,
 * gemm_hopper takes the product. */
static bool te__gemm_is_gemv_of(const te__plan *p, const te__gemm_problem *q, bool mn, int most) {
    const te_op_gemm_args *a = q->args;
    const bool aligned = te__gemm_is_aligned(q), plain = !q->block && a->scaling_a < TE_SCALING_MXFP8;
    int64_t lines = te__max(a->m, a->n), size = te__dtype_size(q->a.dtype), sms = p->num_sms;
    if (TE__GEMM_TUNES || te__min(a->m, a->n) > (mn || !aligned || q->block ? 8 : plain ? 16 : 32)) return false;
    if (mn && (te__gemv_x(q)->k_major || size != 2 || lines < 64)) return false;
    if (!mn && (!q->a.k_major || !q->b.k_major || size > 2 || (a->k > 16384 && lines < 4 * sms))) return false;
    if (!mn && !te__gemv_reads_scales(q)) return false;
    return !(aligned && (mn || plain) && a->m < a->n && te__gemm_fits_hopper(p, q) && lines * size > most * sms);
}
static bool te__gemm_is_gemv(const te__plan *p, const te__gemm_problem *q, bool mn) {
    return te__gemm_is_gemv_of(p, q, mn, mn ? 512 : 192);
}

/* Fills in how gemv_k or gemv_joint quantizes A. */
static void te__gemv_fill_quantizing(te__gemv_quantizing *v, const te_op_gemm_args *a) {
    v->scale = te__f32_data(a->quantize_scale);
    v->amax = te__f32_data(a->quantize_amax);
    v->epsilon = a->quantize_epsilon;
    v->power_of_two = a->quantize_power_of_two;
    v->code_max = a->scaling_a == TE_SCALING_NVFP4 ? (a->e4m3_max_256_a ? 256.0f : 448.0f)
                                                   : te__block_limit(a->a->dtype);
    v->vector = te__rows_aligned(a->a, a->k, 16);
}

/* Returns the number of warps of a block of gemv_k, on which the bits of a product depend. */
static int te__gemv_warps(const te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    return te__div_up(te__max(a->m, a->n), 16) <= 4 * te__max(p->num_sms, 1) && te__gemm_is_aligned(q) && !q->block &&
                   a->scaling_a < TE_SCALING_MXFP8 && te__min(a->m, a->n) <= 8
               ? 16
               : 8;
}
/* Adds the options of the formats to a launch of gemv_k or gemv_joint. */
static void te__gemv_options(te__launch *l, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    const int64_t few = te__min(a->m, a->n);
    const int scales = a->scaling_a == TE_SCALING_MXFP8 ? 1 : a->scaling_a == TE_SCALING_NVFP4 ? 2 : 0;
    if (scales == 1 && few <= 4) te__launch_option(l, "FOURS", 1);
    else te__launch_option(l, "EIGHTS", (int)te__div_up(few, 8));
    te__launch_option(l, "SCALES", scales);
    te__launch_option(l, "SWIZZLED", scales && a->swizzled_scales);
    te__launch_option(l, "BLOCK", q->block);
    te__launch_option(l, "A_DT", q->a.dtype);
    te__launch_option(l, "B_DT", q->b.dtype);
}

/* Plans gemv_k or gemv_mn. In gemv_mn, a lane has four lines of the long operand and a block has sixteen warps, if all
 * blocks can be resident at once. Otherwise a lane has eight lines and a block eight warps. */
static te_result te__gemm_plan_gemv(te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    enum { SHORTEST = 1024 }; /* the least number of values of k in a split: 64 for each of sixteen warps */
    const te__gemm_side *x = te__gemv_x(q), *y = x == &q->a ? &q->b : &q->a;
    int scales = a->scaling_a == TE_SCALING_MXFP8 ? 1 : a->scaling_a == TE_SCALING_NVFP4 ? 2 : 0, warps;
    int64_t few = te__min(a->m, a->n), lines = te__max(a->m, a->n), sms = te__max(p->num_sms, 1), blocks;
    bool aligned = te__gemm_is_aligned(q);
    te__launch *l = te__plan_launch(p, "gemm", x->k_major ? "gemv_k" : "gemv_mn");
    te__gemv_kargs *v = x->k_major ? TE__KARGS(p, l, te__gemv_kargs) : NULL;
    te__gemm_kargs *k = v ? &v->g : TE__KARGS(p, l, te__gemm_kargs);
    te__gemm_choice c = TE_ZERO;
    int64_t shared = 0, resident;
    c.splits = 1;
    if (x->k_major) {
        blocks = te__div_up(lines, 16);
        warps = te__gemv_warps(p, q);
        te__gemv_options(l, q);
        if (te__gemv_shares(q) && (q->high || te__gemv_pays_sharing(p, a))) {
            shared = TE__GEMV_SHARED(few, te__div_up(a->k, te__gemv_turn(q)), te__gemv_turn(q)) +
                     TE__GEMV_SUMS(warps, scales == 1 && few <= 4 ? 4 : te__round_up(few, 8));
            resident = te__plan_resident(p, 32 * warps, shared, warps == 16 || few > (scales == 1 ? 4 : 8) ? 2 : 3);
            blocks = te__min(blocks, te__max(resident, 1));
            te__launch_option(l, "SHARED", 1);
        }
        if (q->high) te__launch_option(l, "HIGH", q->high->a->dtype);
    } else {
        int piece = lines > 64 * sms ? 8 : 4;
        aligned = (uintptr_t)x->data % (uintptr_t)(2 * piece) == 0 && x->ld % piece == 0;
        blocks = te__div_up(lines, (aligned ? 8 : 7) * piece);
        warps = piece == 8 ? 8 : 16;
        c.k_split = te__round_up(te__div_up(a->k, te__max(te__min(sms / blocks, a->k / SHORTEST), 1)), 128);
        c.splits = te__div_up(a->k, c.k_split);
        te__launch_option(l, "PIECE", piece);
        te__launch_option(l, "Y_T", !y->k_major);
        te__launch_option(l, "A_DT", q->a.dtype);
        te__launch_option(l, "B_DT", q->b.dtype);
    }
    te__gemm_fill(k, q);
    if (!te__gemm_split(p, k, &c)) return p->result;
    te__launch_option(l, "SHORT_A", x == &q->b);
    te__launch_option(l, "ALIGNED", aligned);
    te__launch_option(l, "WARPS", warps);
    if (q->high) {
        te__gemv_fill_quantizing(&v->q, q->high);
        v->g.a = te__data(q->high->a);
        v->g.a_dt = q->high->a->dtype;
        v->g.lda = a->k;
        v->g.scale_a = v->g.block_a = NULL;
    }
    te__launch_size(l, blocks, c.splits, 1, warps * 32, shared);
    if (c.splits > 1) te__gemm_plan_reduce(p, q, &c, k->d);
    if (a->bias_gradient && !te__gemm_plan_bias_gradient(p, a, NULL, 0)) return p->result;
    p->native = a->scaling_a < TE_SCALING_MXFP8 && !te__is_fp8(q->a.dtype);
    if (q->high)
        return te__plan_why(p,
                            "GEMV that quantizes A on its way to shared memory, in each block; codes decoded exactly "
                            "into f16, to the tensor cores (mma.sync)");
    te__plan_why(p,
                 scales || !te__is_fp8(q->a.dtype)
                     ? TE__GEMM_WHY(q, "straight from memory to the tensor cores (mma.sync): GEMV")
                     : TE__GEMM_WHY_SUMS(
                           q, false,
                           "GEMV: straight from memory, fp8 decoded exactly into f16, to the tensor cores (mma.sync)"));
    return TE_OK;
}

/* ---- D by phases ------------------------------------------------------------------------------------------------- */

static int64_t te__gemm_phased_from = (int64_t)1 << 27; /* the least number of elements of D for te__gemm_has_phases;
                                                         * tests set a smaller number */

/* Returns whether D is computed in phases. TMA stores only rows that start and end at multiples of 16 bytes. Of P
 * phases, phase i takes the rows i, i + P, i + 2 P and so on. The addresses of these rows are equal modulo 16, and the
 * phase computes only their aligned columns. The extra launches pay off if D is large and k is short. If k is long, the
 * multiplications hide the time of the stores. */
static bool te__gemm_has_phases(const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    if ((a->scaling_a != TE_SCALING_TENSOR && q->block != TE__GEMM_1D_2D) || a->bias || a->aux || a->accumulate ||
        a->bias_gradient || TE__GEMM_TUNES || te__dtype_size(q->a.dtype) > 2) /* a GEMV has no f32 */
        return false;
    return q->a.k_major && q->b.k_major && a->m * a->n >= te__gemm_phased_from && te__min(a->m, a->n) >= 64 &&
           a->k * te__dtype_size(q->a.dtype) <= 5120 &&
           !te__gemm_tma_may_store(te__data(a->d), te__gemm_ld(a->d), a->n, te__dtype_size(a->d->dtype));
}
/* Plans D in phases. Each phase computes the aligned columns of its rows. Then two GEMVs compute the first and the last
 * columns of all rows. */
static te_result te__gemm_plan_phases(te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    const int64_t size = te__dtype_size(a->d->dtype), of_a = te__dtype_size(q->a.dtype), piece = 16 / size,
                  ld = te__gemm_ld(a->d);
    int64_t phases = 1, i, row, col;
    while (phases * ld * size % 16) phases *= 2;
    for (i = 0; i < phases + 2; i++) {
        const bool ends = i >= phases;
        te__gemm_problem one = *q;
        te_op_gemm_args args = *a;
        te_tensor d = *a->d;
        row = ends ? 0 : i;
        col = i == phases ? 0
              : ends ? a->n - piece
                     : -(int64_t)((uintptr_t)te__data(a->d) / (uintptr_t)size + (uintptr_t)(row * ld)) & (piece - 1);
        one.args = &args, args.d = &d;
        /* integers, since te_explain has no pointers */
        one.a.data = (const void *)((uintptr_t)q->a.data + (uintptr_t)(row * q->a.ld * of_a));
        one.b.data = (const void *)((uintptr_t)q->b.data + (uintptr_t)(col * q->b.ld * of_a));
        one.a.ld *= ends ? 1 : phases;
        one.phase = (int)i, one.phases = (int)phases, one.first_b = (int)col;
        if (q->block && !ends) one.block = TE__GEMM_1D_2D_SHIFTED;
        args.m = ends ? a->m : te__div_up(a->m - row, phases);
        args.n = ends ? piece : (a->n - col) / piece * piece;
        d.ndim = 2, d.shape[0] = args.m, d.shape[1] = args.n, d.stride[0] = ends ? ld : phases * ld, d.stride[1] = 1;
        d.offset += (row * ld + col) * size;
        if ((ends ? te__gemm_plan_gemv(p, &one) : te__gemm_plan_hopper(p, &one)) != TE_OK) break;
    }
    p->native = true; /* the columns at the ends are not */
    te__plan_why(p, TE__GEMM_WHY_SUMS(q, te__is_fp8(q->a.dtype) && a->split_accumulator,
                                      "TMA and wgmma, by rows of D that start at one place within 16 bytes; a few "
                                      "columns at D's ends by a GEMV"));
    return p->result;
}

/* ---- the choice -------------------------------------------------------------------------------------------------- */

/* Returns whether the product is so small that unaligned loads of gemm_mma take less time than gemm_prepare. 16-bit
 * operands need k <= 32, which gemm_mma loads at once. */
static bool te__gemm_is_small(const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    return (te__is_fp8(q->a.dtype) || a->k <= 32) && (double)a->m * (double)a->n * (double)a->k <= 8e6;
}

/* Marks the operand as K-major if it has only one line (row of op(A) or column of op(B)) and the line is contiguous. */
static void te__gemm_one_line(te__gemm_side *x, int64_t lines, int64_t k) {
    if (lines != 1 || (!x->k_major && x->ld != 1)) return;
    x->k_major = true;
    x->ld = te__round_up(k, 16);
}

static te__gemm_side te__gemm_side_of(const te_tensor *x, bool k_major) {
    te__gemm_side side;
    side.data = te__data(x);
    side.dtype = x->dtype;
    side.ld = te__gemm_ld(x);
    side.k_major = k_major;
    return side;
}

static te__gemm_problem te__gemm_problem_of(const te_op_gemm_args *a) {
    te__gemm_problem q = TE_ZERO;
    q.args = a;
    q.a = te__gemm_side_of(a->a, !a->a_transposed);
    q.b = te__gemm_side_of(a->b, a->b_transposed);
    if (a->scaling_a < TE_SCALING_MXFP8) {
        te__gemm_one_line(&q.a, a->m, a->k);
        te__gemm_one_line(&q.b, a->n, a->k);
    }
    if (te__gemm_is_block(a->scaling_a))
        q.block = a->scaling_a == TE_SCALING_BLOCK_2D   ? TE__GEMM_2D_1D
                  : a->scaling_b == TE_SCALING_BLOCK_2D ? TE__GEMM_1D_2D
                                                        : TE__GEMM_1D_1D;
    return q;
}

/* Plans a product of codes, or of operands that are not quantized. */
static te_result te__gemm_plan_codes(te__plan *p, const te_op_gemm_args *a) {
    te__gemm_problem q = te__gemm_problem_of(a);
    if (a->k == 0 || te__gemm_is_exact(p, &q)) return te__gemm_plan_naive(p, &q);
    if (!p->baseline && te__gemm_is_gemv(p, &q, false)) return te__gemm_plan_gemv(p, &q);
    if (a->scaling_a >= TE_SCALING_MXFP8 && !te__gemm_plan_prepare(p, &q)) return p->result;
    if (p->baseline) return te__gemm_plan_naive(p, &q);
    if (te__gemm_is_gemv(p, &q, true)) return te__gemm_plan_gemv(p, &q);
    if (!te__gemm_fits_hopper(p, &q) || (q.a.dtype == TE_F32 && !te__gemm_pays_turning(&q)))
        return te__gemm_plan_mma(p, &q);
    if (q.a.dtype == TE_F32 && !te__gemm_plan_turns(p, &q)) return p->result;
    if (!te__gemm_is_aligned(&q)) {
        if (te__gemm_is_small(&q) || !te__gemm_fits_prepare(&q)) return te__gemm_plan_mma(p, &q);
        if (!te__gemm_plan_prepare(p, &q)) return p->result;
    }
    return te__gemm_has_phases(&q) ? te__gemm_plan_phases(p, &q) : te__gemm_plan_hopper(p, &q);
}

/* Plans a product whose A is quantized by the call: gemv_k, if it is the kernel for the codes as well, so that both
 * have the same bits; else a launch that quantizes A and a product of codes. */
static te_result te__gemm_plan_quantized(te__plan *p, const te_op_gemm_args *a) {
    te__gemm_codes c;
    te__gemm_problem q;
    te_result result;
    int i;
    te__gemm_codes_init(&c, p->te, a);
    q = te__gemm_problem_of(&c.product);
    if (!p->baseline && a->k > 0 && a->m <= a->n && a->m * a->k <= TE__GEMM_QUANTIZE_NUMBERS &&
        te__gemm_is_gemv(p, &q, false) && te__gemv_shares(&q)) {
        q.high = a;
        return te__gemm_plan_gemv(p, &q);
    }
    for (i = 0; i < 3; i++) {
        c.memory[i].data = te__plan_workspace(p, te__max(c.bytes[i], 1));
        if (!c.memory[i].data) return p->result;
    }
    TE__GEMM_QUANTIZE(result, te__cuda_plan_, p, a, &c);
    return result == TE_OK ? te__gemm_plan_codes(p, &c.product) : result;
}

/* ---- several products at once ------------------------------------------------------------------------------------ */

/* Products of gemv_joint that share A, and the step after them (te_op_joint_gemm). */
typedef struct te__gemm_joint {
    const te__gemm_problem *q; /* [count]; set by te__gemm_plan_joint */
    int count;
    te_activation activation;
    const te_tensor *residual; /* or NULL */
    te_tensor *y;              /* NULL: there is no step after the products */
    const te__gemv_norm *norm; /* of A's rows, or NULL */
    const void *rope;          /* te__rope_kargs, by which queries, keys and values are rotated; or NULL */
    size_t rope_bytes;
    bool norm_early;           /* whether gamma and beta are settled (ops/early.c) */
    bool rope_early;           /* whether places and angles of the rotation are */
} te__gemm_joint;
enum { TE__JOINT_PRODUCTS = 1, TE__JOINT_GATED = 2, TE__JOINT_SUM = 3 }; /* gemv_joint's option JOINT */

/* Returns the bytes of shared memory of gemv_joint for `depth` turns on their way to each of sixteen warps. */
static int64_t te__gemv_joint_ring(const te__gemm_problem *q, int depth) {
    const te_scaling s = q->args->scaling_a;
    return 16 * depth * TE__GEMV_SLOT(s == TE_SCALING_MXFP8 ? 1 : s == TE_SCALING_NVFP4 ? 2 : 0);
}
/* Returns the bytes of shared memory in which gemv_joint keeps the rotation of a tile of each group of `warps` warps
 * (its KEPT). */
static int64_t te__gemv_joint_kept(const te__gemm_problem *q, const te__gemm_joint *j, int warps) {
    const te_op_gemm_args *a = q->args;
    const bool kept = j->rope && a->m == 1 && a->scaling_a == TE_SCALING_NVFP4 && warps >= TE__GEMV_KEPT_WARPS;
    return kept ? 16 / warps * 16 * TE__GEMV_ROTATED : 0;
}
/* Returns all bytes of shared memory of gemv_joint without those of te__gemv_joint_kept. `gated`: there is an
 * activation, so that sums of two products are added up together. */
static int64_t te__gemv_joint_shared(const te__gemm_problem *q, bool gated, int depth) {
    const te_op_gemm_args *a = q->args;
    const int64_t turn = te__dtype_size(q->b.dtype) == 2 ? 64 : te__gemv_turn(q);
    return TE__GEMV_SHARED(a->m, a->k / turn, turn) + TE__GEMV_SUMS(16, (gated ? 2 : 1) * a->m) +
           te__gemv_joint_ring(q, depth);
}
/* Returns the number of turns on their way, and sets *shared to the bytes of shared memory of a block. `kept`: those of
 * te__gemv_joint_kept.
 *
 * In a decoding step, the blocks of one launch start while those of the launch before are still there, and each
 * multiprocessor should have one of either. The GPU puts a second block of a launch on a multiprocessor that has room
 * for two before it uses one that has room for one. So launches are wide or narrow by turns: a wide one has half of the
 * shared memory, so that no multiprocessor has room for two of it (a block takes 1024 bytes more), and leaves room for
 * a narrow one. Where a narrow one starts, each multiprocessor has a wide block, and room for one more. Sums are wide:
 * attention stands before one of them, with blocks on some multiprocessors alone, and products or pairs of products
 * stand before the other. */
static int te__gemv_joint_depth(const te__plan *p, const te__gemm_problem *q, bool gated, bool wide, int64_t kept,
                                int64_t *shared) {
    enum { BESIDE_RING = 14 << 10 }; /* bytes of a narrow block for A and sums */
    const int64_t both = te__sm_shared(p->sm) - 2 * 1024, half = te__sm_shared(p->sm) / 2;
    int64_t narrow;
    int depth = 3;
    while (depth > 1 && te__gemv_joint_ring(q, depth) + BESIDE_RING > both - half) depth--;
    narrow = te__gemv_joint_ring(q, depth) + BESIDE_RING;
    for (depth = 3; depth > 1; depth--)
        if (te__gemv_joint_shared(q, gated, depth) + kept <= (wide ? both - narrow : narrow)) break;
    *shared = te__gemv_joint_shared(q, gated, depth) + kept;
    if (wide) *shared = te__max(*shared, half);
    return depth;
}
/* Returns the number of warps that share a tile, at most the number of turns. Blocks have sixteen warps, and each
 * multiprocessor has one block. As many warps as leave each group one tile, since a second tile begins when the first
 * has ended. If single warps would have several tiles each (an lm_head): two warps, or as many as have eight turns
 * each; they read neighbouring bytes. Turns of one row of NVFP4 (`nvfp4_row`) have the most instructions: it is faster
 * in tiles of at most eight warps and, with pairs of products (`gated`), of at least four (tests/bench/notes.md). */
static int te__gemv_joint_warps(const te__plan *p, int64_t tiles, int64_t turns, bool nvfp4_row, bool gated) {
    int warps = 16;
    if (tiles > 16 * (int64_t)p->num_sms) {
        while (warps > 2 && 8 * warps > turns) warps /= 2;
        return turns > 1 ? warps : 1;
    }
    while (warps > 1 && (warps > turns || tiles > 16 / warps * (int64_t)p->num_sms)) warps /= 2;
    if (nvfp4_row && warps > 8) warps = 8;
    while (nvfp4_row && gated && warps < 4 && 2 * warps <= turns) warps *= 2;
    return warps;
}

/* Returns how gemv_joint computes the products. */
static const char *te__joint_why(const te__plan *p, const te__gemm_joint *j) {
#define TE__JOINT_COPIED "products of a few rows at once: B by copies ahead into shared memory, "
#define TE__JOINT_NORMED TE__JOINT_COPIED "A normalized and quantized by each block; "
#define TE__JOINT_QUANTIZED TE__JOINT_COPIED "A quantized by each block; "
#define TE__JOINT_MULTIPLIED "to the tensor cores (mma.sync)"
    const te_op_gemm_args *a = j->q->args;
    if (!j->q->high)
        return j->norm ? TE__JOINT_COPIED "A normalized by each block, " TE__JOINT_MULTIPLIED
                       : TE__JOINT_COPIED TE__JOINT_MULTIPLIED;
    if (a->m == 1 && a->scaling_a == TE_SCALING_NVFP4 && p->sm != 103) /* the kernel's INTEGERS */
        return j->norm ? TE__JOINT_NORMED "codes as integers, " TE__JOINT_MULTIPLIED
                       : TE__JOINT_QUANTIZED "codes as integers, " TE__JOINT_MULTIPLIED;
    return j->norm ? TE__JOINT_NORMED "codes decoded exactly into f16, " TE__JOINT_MULTIPLIED
                   : TE__JOINT_QUANTIZED "codes decoded exactly into f16, " TE__JOINT_MULTIPLIED;
#undef TE__JOINT_COPIED
#undef TE__JOINT_NORMED
#undef TE__JOINT_QUANTIZED
#undef TE__JOINT_MULTIPLIED
}

static te_result te__gemm_plan_gemv_joint(te__plan *p, const te__gemm_joint *j) {
    const te__gemm_problem *q = j->q;
    const te_op_gemm_args *a = q->args, *of_a = q->high ? q->high : a;
    te__launch *l = te__plan_launch(p, "gemm", "gemv_joint");
    te__gemv_joint_kargs *v = (te__gemv_joint_kargs *)te__plan_args(p, l, sizeof(*v) + j->rope_bytes);
    const int64_t turn = te__dtype_size(q->b.dtype) == 2 ? 64 : te__gemv_turn(q);
    const bool sum = j->residual && !j->activation;
    int64_t tiles = 0, shared;
    int i, warps, depth;
    v->a = te__data(of_a->a);
    v->lda = a->k;
    v->m = (int)a->m;
    v->k = (int)a->k;
    v->d_dt = a->d->dtype;
    v->residual = te__data(j->residual);
    v->y = te__data(j->y);
    if (j->rope) memcpy(v + 1, j->rope, j->rope_bytes);
    v->early = !j->norm || j->norm_early;
    v->rope_early = j->rope_early;
    for (i = 0; i < j->count; i++) {
        te__gemv_part *part = &v->part[i];
        te__gemm_kargs g = TE_ZERO;
        te__gemm_fill(&g, &q[i]);
        part->b = g.b;
        part->block_b = g.block_b;
        part->d = g.d;
        part->bias = g.bias;
        part->scale_b = g.scale_b;
        part->ldb = g.ldb * te_dtype_bits(q[i].b.dtype) / 8;
        part->ldd = g.ldd;
        part->ld_block_b = (int)g.ld_block_b;
        part->n = (int)g.n;
        part->bias_dt = g.bias_dt;
        tiles += te__div_up(g.n, 16);
        part->tiles = (int)tiles;
        v->factor_a = g.factor_a;
        v->factor_b = g.factor_b;
        v->early = v->early && te__is_settled(p, q[i].args->b) && te__is_settled(p, q[i].args->scale_b) &&
                   te__is_settled(p, q[i].args->amax_b);
    }
    for (; i < TE__COUNT(v->part); i++) v->part[i] = v->part[i - 1];
    if (j->activation) tiles /= 2; /* pairs */
    warps = te__gemv_joint_warps(p, tiles, a->k / turn, a->m == 1 && a->scaling_a == TE_SCALING_NVFP4,
                                 j->activation != 0);
    depth = te__gemv_joint_depth(p, q, j->activation != 0, sum, te__gemv_joint_kept(q, j, warps), &shared);
    if (q->high) te__gemv_fill_quantizing(&v->q, q->high);
    te__gemv_options(l, q);
    if (a->m == 1) te__launch_option(l, "ONE", 1);
    te__launch_option(l, "WARPS", warps);
    te__launch_option(l, "DEPTH", depth);
    te__launch_option(l, "HIGH", q->high ? of_a->a->dtype : 0);
    te__launch_option(l, "D_DT", a->d->dtype);
    te__launch_option(l, "JOINT", j->activation ? TE__JOINT_GATED : sum ? TE__JOINT_SUM : TE__JOINT_PRODUCTS);
    if (j->activation) te__launch_option(l, "ACT", j->activation);
    if (j->norm) {
        v->norm = *j->norm;
        te__launch_option(l, "NORM", j->norm->layernorm ? 2 : 1);
        te__launch_option(l, "W_DT", j->norm->dt);
    }
    if (j->rope) te__launch_option(l, "ROPE", 1);
    te__launch_size(l, p->num_sms, 1, 1, 512, shared); /* blocks without a tile keep a place too */
    l->overlaps = true;
    p->native = a->scaling_a < TE_SCALING_MXFP8 && !te__is_fp8(q->a.dtype);
    te__plan_why(p, te__joint_why(p, j));
    return p->result;
}

/* Plans the products a[0] .. a[joint.count - 1], which share A, with the norm before and the step after them, as one
 * launch of gemv_joint. Returns false, and has planned nothing, if the kernel cannot take one of them, or if the
 * formats of B or D differ: its options have one of each. */
static bool te__gemm_plan_joint(te__plan *p, const te_op_gemm_args *a, te__gemm_joint joint) {
    enum { MOST = TE__COUNT(((te__gemv_joint_kargs *)0)->part) };
    te__gemm_codes codes[MOST];
    te__gemm_problem q[MOST];
    const int64_t turn = !a->quantize_a ? 64 : a->quantize_a == TE_F4E2M1 ? 256 : 128; /* the kernel's TURN */
    const int most = a->m == 1 && joint.count > 1 ? 256 : 192;
    int i;
    if (joint.count < 1 || joint.count > MOST || a->m == 0 || a->k == 0 || a->m > 16 || p->baseline) return false;
    for (i = 0; i < joint.count; i++) {
        if (a->quantize_a) te__gemm_codes_init(&codes[i], p->te, &a[i]);
        q[i] = te__gemm_problem_of(a->quantize_a ? &codes[i].product : &a[i]);
        if (a->quantize_a) q[i].high = &a[i];
        if (q[i].b.dtype != q[0].b.dtype || a[i].d->dtype != a->d->dtype || a[i].n < a[i].m ||
            te__gemm_is_exact(p, &q[i]) || !te__gemm_is_gemv_of(p, &q[i], false, most) ||
            !te__gemm_is_aligned(&q[i]) || a[i].n > INT_MAX / 32 ||
            (q[i].block && q[i].block != TE__GEMM_1D_2D) ||
            q[i].b.ld > INT_MAX / 2048 || (a[i].scaling_b == TE_SCALING_NVFP4 && !te__is_aligned(a[i].scale_b, 16)) ||
            (a[i].amax_b && te__numel(a[i].amax_b) > 1) || a->k % turn != 0 || !te__rows_aligned(a->a, a->k, 16) ||
            (a->quantize_a && (a->m * a->k > TE__GEMM_QUANTIZE_NUMBERS || !te__gemv_shares(&q[i]))) ||
            !te__plan_fits(p, te__gemv_joint_shared(&q[i], joint.activation != 0, 1) +
                                  te__gemv_joint_kept(&q[i], &joint, TE__GEMV_KEPT_WARPS), 1))
            return false;
    }
    joint.q = q;
    te__gemm_plan_gemv_joint(p, &joint);
    return true;
}

static te_result te__cuda_plan_gemm(te__plan *p, const te_op_gemm_args *a) {
    if (a->m == 0 || a->n == 0)
        return a->bias_gradient && a->n && !te__gemm_plan_bias_gradient(p, a, NULL, 0) ? p->result : TE_OK;
    return a->quantize_a ? te__gemm_plan_quantized(p, a) : te__gemm_plan_codes(p, a);
}

static te_result te__cuda_plan_grouped_gemm(te__plan *p, const te_op_grouped_gemm_args *a) {
    te__gemm_problem q = TE_ZERO;
    te_op_gemm_args one = te__grouped_one(a);
    if (a->groups == 0 || a->m == 0 || a->n == 0) return TE_OK;
    q.args = &one;
    q.groups = a;
    q.a = te__gemm_side_of(a->a, !a->a_transposed);
    q.b = te__gemm_side_of(a->b, a->b_transposed);
    if (te__gemm_is_block(a->scaling_a)) q.block = a->along_k ? TE__GEMM_1D_1D : TE__GEMM_1D_2D;
    if (a->k == 0 || p->baseline || te__gemm_is_exact(p, &q)) return te__gemm_plan_naive(p, &q);
    return p->edits_maps && a->a->dtype != TE_F32 && te__gemm_fits_hopper(p, &q) && te__gemm_is_aligned(&q)
               ? te__gemm_plan_hopper(p, &q)
               : te__gemm_plan_mma(p, &q);
}
