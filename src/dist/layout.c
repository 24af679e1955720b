/* dist/layout.c: the groups of a job whose ranks share the work in several ways at once. This file must not depend on
 * modules and recipes. */

/* The ways in which ranks share work. Ranks are numbered so that the first one varies fastest. */
enum { TE__BY_TENSOR, TE__BY_CONTEXT, TE__BY_EXPERT, TE__BY_DATA, TE__WAYS };

/* Fills in what the layout leaves open, and checks that it makes up the number of ranks. */
static te_result te__layout_read(te_ctx *te, const te_dist_desc *desc, int size, int ways[TE__WAYS]) {
    static const char *const names[TE__WAYS] = {"tp", "cp", "ep", "dp"};
    int64_t product = 1;
    int i;
    ways[TE__BY_TENSOR] = desc->tp;
    ways[TE__BY_CONTEXT] = desc->cp;
    ways[TE__BY_EXPERT] = desc->ep;
    ways[TE__BY_DATA] = desc->dp;
    for (i = 0; i < TE__WAYS; i++) {
        if (ways[i] < 0 || ways[i] > TE__MAX_RANKS)
            return te__fail(te, TE_ERR_INVALID, "te_dist_init: %s is %d; numbers of ranks are 1 or more, and 0 is 1%s",
                            names[i], ways[i], i == TE__BY_DATA ? ", or what is left" : "");
        if (ways[i] == 0 && i < TE__BY_DATA) ways[i] = 1;
        if (ways[i] == 0 && product <= size && size % product == 0) ways[i] = (int)(size / product);
        if (ways[i] == 0) ways[i] = 1;
        product = product * ways[i] > TE__MAX_RANKS ? TE__MAX_RANKS + 1 : product * ways[i];
    }
    if (product == size) return TE_OK;
    return te__fail(
        te, TE_ERR_INVALID,
        "te_dist_init: tp %d x cp %d x ep %d x dp %d make %s%lld ranks, and there are %d; start as many, or "
        "change the layout (dp 0 takes what is left)",
        ways[0], ways[1], ways[2], ways[3], product > TE__MAX_RANKS ? "more than " : "",
        (long long)te__min(product, TE__MAX_RANKS), size);
}

/* Returns the group of the ranks that differ from this one in `shared` ways alone (bits): NULL if there are none, the
 * whole world if it is that, else a part of it. */
static te_group *te__layout_group(te_group *world, const int ways[TE__WAYS], unsigned shared, te_result *result) {
    const int rank = te_group_rank(world), size = te_group_size(world);
    int color = 0, key = 0, count = 1, colors = 1, i, at = rank;
    te_group *part;
    if (*result != TE_OK) return NULL;
    for (i = 0; i < TE__WAYS; i++) {
        const int place = at % ways[i];
        at /= ways[i];
        if (shared >> i & 1) {
            key += place * count;
            count *= ways[i];
        } else {
            color += place * colors;
            colors *= ways[i];
        }
    }
    if (count == 1) return NULL;
    if (count == size) return world;
    part = te_group_split(world, color, key);
    if (!part) *result = te_error_code(world->te);
    return part;
}

TE_API void te_dist_finish(te_dist *dist) {
    te_group *groups[5], *world;
    int i, k;
    if (!dist) return;
    world = dist->world;
    groups[0] = dist->expert_data;
    groups[1] = dist->data;
    groups[2] = dist->expert;
    groups[3] = dist->context;
    groups[4] = dist->tensor;
    for (i = 0; i < 5; i++) {
        for (k = 0; k < i && groups[k] != groups[i]; k++) {}
        if (k == i && groups[i] != world) te_group_destroy(groups[i]);
    }
    if (dist->owns_world) te_group_destroy(world);
    memset(dist, 0, sizeof(*dist));
}

TE_API te_result te_dist_init(te_ctx *te, const te_dist_desc *desc, te_dist *dist) {
    int ways[TE__WAYS] = {1, 1, 1, 1};
    char text[128];
    te_result r;
    if (!te) return TE_ERR_STATE;
    if (!te__has_desc(te, desc, "te_dist_init")) return TE_ERR_INVALID;
    if (!dist) return te__fail(te, TE_ERR_INVALID, "te_dist_init: dist is NULL; it receives the groups");
    memset(dist, 0, sizeof(*dist));
    r = te__group_allowed(te, desc->world, "te_dist_init", "world");
    if (r != TE_OK) return r;
    dist->world = desc->world ? desc->world : te_nccl_group_create(te, &desc->processes);
    dist->owns_world = !desc->world;
    if (!dist->world) return te_error_code(te);
    dist->size = te_group_size(dist->world);
    dist->rank = te_group_rank(dist->world);
    r = te__layout_read(te, desc, dist->size, ways);
    snprintf(text, sizeof(text), "te_dist_init: tp %d x cp %d x ep %d x dp %d", ways[0], ways[1], ways[2], ways[3]);
    if (dist->size > 1) r = te__group_compare(dist->world, text, r);
    dist->tensor = te__layout_group(dist->world, ways, 1u << TE__BY_TENSOR, &r);
    dist->context = te__layout_group(dist->world, ways, 1u << TE__BY_CONTEXT, &r);
    dist->expert = te__layout_group(dist->world, ways, 1u << TE__BY_EXPERT, &r);
    dist->data =
        te__layout_group(dist->world, ways, 1u << TE__BY_CONTEXT | 1u << TE__BY_EXPERT | 1u << TE__BY_DATA, &r);
    dist->expert_data = dist->data;
    if (ways[TE__BY_EXPERT] > 1)
        dist->expert_data = te__layout_group(dist->world, ways, 1u << TE__BY_CONTEXT | 1u << TE__BY_DATA, &r);
    if (r == TE_OK) {
        dist->data_rank = dist->rank / ways[TE__BY_TENSOR] / ways[TE__BY_CONTEXT];
        dist->data_size = ways[TE__BY_EXPERT] * ways[TE__BY_DATA];
    }
    if (r != TE_OK) te_dist_finish(dist);
    return r;
}

TE_API int te_dist_local_rank(void) {
    te__text why = TE_ZERO;
    te__place place;
    const te_result r = te__place_read(&place, &why);
    te__text_free(&why);
    return r == TE_OK ? place.local_rank : 0;
}

TE_API te_result te_dist_seed(te_ctx *te, const te_dist *dist, uint64_t seed) {
    const int tp = dist ? te_group_size(dist->tensor) : 1, rank = dist ? dist->rank : 0;
    const uint64_t own = seed + ((uint64_t)rank + 1) * ((uint64_t)1 << 32) + ((uint64_t)1 << 31);
    uint64_t offset = 0;
    int i = 0;
    if (!te) return TE_ERR_STATE;
    while (i < te_rng_num_trackers(te) && strcmp(te_rng_tracker_name(te, i), TE_DIST_RNG) != 0) i++;
    if (i == te_rng_num_trackers(te)) {
        if (te_rng_tracker_add(te, TE_DIST_RNG, own) != TE_OK) return te_error_code(te);
    } else {
        te_rng_tracker_get(te, TE_DIST_RNG, NULL, &offset);
        te_rng_tracker_set(te, TE_DIST_RNG, own, offset);
    }
    te_rng_get(te, NULL, &offset);
    te_rng_set(te, seed + (uint64_t)(rank / tp) * ((uint64_t)1 << 32), offset);
    return te_error_code(te);
}
