/* train/publish.c: brings the new values of slices to the other ranks of a sharded parameter. This file must not depend
 * on when a step is made, or on the arithmetic of any optimizer. */

/* Refuses states whose scale belongs to the whole parameter, which no rank has. */
static bool te__opt_may_shard(const te_optimizer *opt, const char *path) {
    int k;
    for (k = 0; k < TE__OPT_STATES; k++)
        if (te__opt_is_scaled(opt->options.dtype[k]))
            return te__not_ok(opt->te, TE_ERR_UNSUPPORTED,
                              "%s: parameter %s is sharded, and the format of \"%s\" is %s, with one scale for all of "
                              "its elements; f32 and bf16 are possible (masters: f32)",
                              opt->cls->create, path, opt->cls->state[k], te_dtype_name(opt->options.dtype[k]));
    return true;
}

/* Returns the next set of shards, in the order of the parameters, or NULL. `listed`: only sets that have a parameter in
 * this step. *at counts parameters; it begins as -1. */
static te__shard_set *te__opt_next_set(te_optimizer *opt, int *at, bool listed) {
    int i;
    for (i = 0; *at < 0 && i < opt->num_params; i++)
        if (opt->params[i].shard && opt->params[i].shard->set) opt->params[i].shard->set->visited = false;
    for (++*at; *at < opt->num_params; ++*at) {
        te__shard_set *set = opt->params[*at].shard ? opt->params[*at].shard->set : NULL;
        if (!set || set->visited || (listed && !opt->params[*at].listed)) continue;
        set->visited = true;
        return set;
    }
    return NULL;
}
/* Forgets which gatherings have failed. */
static void te__opt_sets_begin(te_optimizer *opt) {
    te__shard_set *set;
    int at = -1;
    while (opt && (set = te__opt_next_set(opt, &at, false)) != NULL) set->told = false;
}
/* Returns whether a gathering has failed on all ranks since te__opt_sets_begin. A rank that told them again would wait
 * for ranks that are not in this call any more. */
static bool te__opt_sets_told(te_optimizer *opt) {
    te__shard_set *set;
    bool told = false;
    int at = -1;
    while (opt && (set = te__opt_next_set(opt, &at, false)) != NULL) told = told || set->told;
    return told;
}
/* Quantizes the new masters of a set's parameters, and gathers the new values on all ranks, or leaves them in the
 * slices. `keeps`: the step was skipped, so codes stay as they are. */
static te_result te__opt_publish_set(te_optimizer *opt, te__shard_set *set, bool keeps, te_result result) {
    te_ctx *te = opt->te;
    te_tensor **master = (te_tensor **)te__alloc_zero(te, (size_t)set->n * sizeof(te_tensor *)), *block = set->block;
    bool *skip = (bool *)te__alloc_zero(te, (size_t)set->n);
    int i, k, codes = 0;
    te__frame_begin(te);
    if (result == TE_OK && (!master || !skip)) result = TE_ERR_OUT_OF_MEMORY;
    if (result == TE_OK && !block) block = te_tensor_zeros(te, TE_U8, 1, &set->bytes);
    if (result == TE_OK && !block) result = te_error_code(te);
    for (i = 0; i < opt->num_params && master && skip; i++) {
        const te__opt_param *p = &opt->params[i];
        if (!p->shard || p->shard->set != set || !p->listed || !p->param->quantized || keeps) continue;
        for (k = 0; set->list[k] != p->shard; k++) {}
        master[k] = p->state[TE__OPT_MASTER].x;
        skip[k] = true;
        codes++;
    }
    if (codes && result == TE_OK) {
        result = te__shards_quantize(set, master, block);
        opt->told = result != TE_OK;
    }
    if (!set->of_parameters) {
        if (result == TE_OK) result = te__shards_pack(set, block, skip);
        if (!opt->told) {
            set->told = false;
            result = te__shards_spread(set, block, result);
            opt->told = set->told;
        }
    }
    for (i = 0; i < opt->num_params && set->of_parameters && result == TE_OK; i++) {
        te__shard *s = opt->params[i].shard;
        if (!s || s->set != set || !opt->params[i].listed || te->warming) continue;
        s->version = s->param->quantized ? te__param_version(s->param) : s->version + 1;
        s->written_at = ++te->writes;
        te__shard_writes(s);
    }
    te__frame_end(te, NULL, 0);
    te__free(te, master);
    te__free(te, skip);
    return result;
}
/* Brings the new values of sharded parameters to all ranks. If `result` is an error, tells it to the other ranks. */
static te_result te__opt_publish(te_optimizer *opt, const te_tensor *found_inf, te_result result) {
    te__shard_set *set;
    float found = 0.0f;
    int i, at = -1, codes = 0;
    for (i = 0; i < opt->num_params; i++)
        codes += opt->params[i].listed && opt->params[i].shard && opt->params[i].param->quantized;
    if (result == TE_OK && codes && found_inf && opt->te->capture)
        result = te__refuse_capture(opt->te,
                                    "te_grad_scaler_step of sharded weights that are stored quantized, whose codes "
                                    "stay if the host finds that the step is skipped,",
                                    "step outside of graphs, or train without a te_grad_scaler, as bf16 does");
    if (result == TE_OK && codes && found_inf && !opt->te->warming) result = te_tensor_to_host(found_inf, &found);
    opt->told = opt->told || te__opt_sets_told(opt);
    while (result == TE_OK && (set = te__opt_next_set(opt, &at, true)) != NULL)
        result = te__opt_publish_set(opt, set, found != 0.0f, result);
    return result;
}
/* Tells the ranks of all slices, and of all parts of parameters, that this rank's step has failed. */
static void te__opt_tell(te_optimizer *opt, te_result result) {
    te__shard_set *set;
    int i, at = -1;
    for (i = 0; i < opt->num_params; i++)
        if (opt->params[i].param->split) te__refuse(opt->params[i].param->split->group, TE__BETWEEN, result);
    while ((set = te__opt_next_set(opt, &at, false)) != NULL) te__refuse(set->group, TE__BETWEEN, result);
}
/* Releases gathered parameters before a step, which writes the slices. */
static te_result te__opt_scatter(te_optimizer *opt) {
    te_result result = TE_OK;
    te__shard_set *set;
    int at = -1;
    while (result == TE_OK && opt->sharded && (set = te__opt_next_set(opt, &at, false)) != NULL)
        result = te__shards_scatter(set);
    return result;
}

/* Splits a new master into the parameter and the remainders. All ranks of a sharded parameter must call it. */
static te_result te__opt_set_remainders(te__opt_param *p, te_tensor *master) {
    te__shard_set *set = p->shard ? p->shard->set : NULL;
    te_ctx *te = p->param->te;
    te_tensor *upper = te__own_value(p->param), *block;
    te_result result = upper ? te__opt_remainders(upper, &p->state[TE__OPT_MASTER], master, true) : te_error_code(te);
    if (set && !te__shards_are_whole(set)) {
        p->shard->version++;
        p->shard->written_at = ++te->writes;
    }
    if (!set || set->of_parameters) return result;
    block = result == TE_OK ? te_tensor_zeros(te, TE_U8, 1, &set->bytes) : NULL;
    if (result == TE_OK) result = block ? te__shards_pack(set, block, NULL) : te_error_code(te);
    return te__shards_spread(set, block, result);
}
