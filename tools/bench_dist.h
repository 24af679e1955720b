/* bench_dist.h: te_bench dist: what ranks cost, and what they give. Any number of them, started by torchrun, mpirun or srun; each takes the GPU of its
 * place on the host (ranks.h), or the CPU. Every comparison is between two ways of the same ranks in one run: "one GPU" is each rank by itself, all at
 * once. Times are the host's, from a barrier to the end of the slowest rank's work, the median of seven (on the CPU of three).
 *
 *     overlap    a pass through layers of a Llama whose gradients are exchanged, and whose parameters are gathered, over the pass without; the part of the
 *                exchange that shows, over the time of the exchange alone; and steps with the optimizer: tokens of all ranks over those of one GPU
 *     graph      the same pass, gradients exchanged, and steps of each way of sharding, as launches of a te_graph, over their calls
 *     gather     te_fsdp_unshard of weights that are stored in FP8, over those in BF16: microseconds
 *     tensor     layers that ranks share, with sequence parallelism, over one GPU; with options ub_..., over the layers without
 *     context    a layer of a long sequence that ranks share, over one GPU
 *     experts    layers of a Mixtral whose experts ranks share, each with tokens of its own: tokens of all ranks over those of one GPU
 *     model      a Llama of 1.5 G parameters in shards, with AdamW: tokens of all ranks over those of one GPU; peak memory
 *     size       a Llama of 8 G in shards, layers checkpointed: peak memory over the formula of api/sharding.h, which has no activations. Only if named
 *
 * --small: sizes of the CPU on a GPU, to try it. */

typedef struct dist_sizes {
    const char *name;
    int64_t hidden, inner, heads, groups, tokens, long_tokens, vocabulary;
    int layers, experts;
} dist_sizes;
static const dist_sizes dist_large = {"Llama-8B", HIDDEN, FFN, HEADS, GROUPS, 8192, 32768, 1024, 4, 8};
static const dist_sizes dist_small = {"tiny", 64, 128, 4, 2, 32, 64, 64, 2, 4};

typedef struct dist_bench {
    bench *b;
    te_ctx *te;
    te_dist dist;
    const dist_sizes *z;
    double alone; /* tokens a second of one GPU's step through the layers; 0: not measured */
} dist_bench;

/* A model with what it is run on. */
typedef struct dist_work {
    dist_bench *d;
    te_module *m;
    te_optimizer *adam;
    te_tensor *x, *dy;        /* of layers, [tokens, 1, hidden] */
    te_tensor *ids, *targets; /* of a language model, [1, tokens] */
    te_tensor *loss;          /* of the last pass of a language model */
    te_rotary_desc rotary;
    te_graph *graph;
} dist_work;

/* ---- runs ---- */

static void dist_pass(void *arg) {
    dist_work *w = (dist_work *)arg;
    te_forward_args args = TE_ZERO;
    te_tensor *loss;
    te_scope_begin(w->d->te);
    args.input = w->ids ? w->ids : w->x;
    args.rotary = w->ids ? NULL : &w->rotary;
    te_forward_with(w->m, &args);
    if (w->ids) {
        loss = te_cross_entropy(args.outputs.out, w->targets, NULL);
        te_backward(loss);
        te_tensor_copy(w->loss, te_tensor_detach(loss));
    } else
        te_backward_from(args.outputs.out, w->dy);
    te_scope_end(w->d->te);
}
static void dist_forget(void *arg) { te_module_zero_grad(((dist_work *)arg)->m); }
static void dist_step(void *arg) {
    dist_pass(arg);
    te_optimizer_step(((dist_work *)arg)->adam);
}
static void dist_launch(void *arg) { te_graph_launch(((dist_work *)arg)->graph); }
static void dist_unshard(void *arg) { te_fsdp_unshard(((dist_work *)arg)->m); }
static void dist_reshard(void *arg) { te_fsdp_reshard(((dist_work *)arg)->m); }

/* Seconds of `run`; `after` is not measured. */
static double dist_time(dist_bench *d, void (*run)(void *arg), void (*after)(void *arg), dist_work *w) {
    enum { RUNS = 7 };
    const int runs = te_ctx_is_cuda(d->te) ? RUNS : 3;
    float times[RUNS] = {0};
    for (int i = te_ctx_is_cuda(d->te) ? -3 : -1; i < runs && te_ok(d->te); i++) {
        const double seconds = time_of_ranks(d->te, d->dist.world, run, w, 1);
        if (i >= 0) times[i] = (float)seconds;
        if (after) after(w);
    }
    qsort(times, (size_t)runs, sizeof(float), by_value);
    return (double)times[runs / 2];
}

/* ---- models ---- */

/* Layers that ranks share (`parallel`), or have whole, with `tokens` of this rank. */
static dist_work dist_layers(dist_bench *d, int count, int64_t tokens, const te_parallel_options *parallel) {
    const int64_t shape[3] = {tokens, 1, d->z->hidden};
    te_transformer_layer_desc desc = TE_ZERO;
    te_module *layer[16];
    dist_work w = TE_ZERO;
    desc.hidden_size = d->z->hidden;
    desc.ffn_hidden_size = d->z->inner;
    desc.attention.num_attention_heads = (int)d->z->heads;
    desc.attention.num_gqa_groups = (int)d->z->groups;
    desc.attention.attn_mask_type = TE_MASK_CAUSAL;
    desc.norm.normalization = TE_RMSNORM;
    desc.activation = TE_SWIGLU;
    desc.gemm.no_bias = true;
    if (parallel) desc.parallel = *parallel;
    te_seed(d->te, 1);
    for (int i = 0; i < count; i++) layer[i] = te_transformer_layer_create(d->te, &desc);
    w.d = d;
    w.m = te_sequential_create(d->te, layer, count);
    w.x = te_tensor_normal(d->te, TE_BF16, 3, shape, 0, 1);
    w.dy = te_tensor_normal(d->te, TE_BF16, 3, shape, 0, 1);
    return w;
}
static void dist_share(dist_bench *d, te_module *m, te_shard shard, bool no_prefetch) {
    te_data_parallel_desc desc = TE_ZERO;
    desc.group = d->dist.world;
    desc.shard = shard;
    desc.no_prefetch = no_prefetch;
    for (int i = 0; i < te_module_num_children(m); i++) te_fsdp_unit(te_module_child(m, i), &desc);
    desc.no_reshard_after_forward = true; /* as FSDP2 does: a backward pass begins with the model's own unit */
    te_fsdp_unit(m, &desc);
}
static void dist_adam(dist_work *w) {
    te_fused_adam_desc desc = TE_ZERO;
    desc.lr = 1e-4f;
    w->adam = te_fused_adam_create(w->d->te, w->m, &desc);
}
static void dist_drop(dist_work *w) {
    te_graph_destroy(w->graph);
    te_optimizer_destroy(w->adam);
    te_module_destroy(w->m);
}
static void dist_shape(const dist_bench *d, int layers, int64_t tokens, char text[96]) {
    snprintf(text, 96, "%d ranks: %d x %s %lld", d->dist.size, layers, d->z->name, (long long)tokens);
}

/* ---- data parallelism: what shows of the exchanges ---- */

/* A collective by itself. */
typedef enum dist_collective { DIST_REDUCE, DIST_TRADE, DIST_GATHER } dist_collective;
typedef struct dist_message {
    dist_collective kind;
    te_group *world;
    te_tensor *x, *out;
} dist_message;
static void dist_send(void *arg) {
    dist_message *m = (dist_message *)arg;
    if (m->kind == DIST_REDUCE) te_all_reduce(m->world, m->x, TE_REDUCE_SUM);
    else if (m->kind == DIST_GATHER) te_all_gather(m->world, m->x, m->out);
    else te_all_to_all(m->world, m->x, NULL, m->out, NULL);
}
/* Seconds for each byte of its message. */
static double dist_alone(dist_bench *d, dist_collective kind, int64_t bytes) {
    const te_dtype dtype = d->dist.size == 2 || kind != DIST_REDUCE ? TE_BF16 : TE_F32; /* as gradients travel */
    const int64_t n = d->dist.size, size = dtype == TE_F32 ? 4 : 2, whole = (bytes / size + n - 1) / n * n, part = whole / n;
    dist_message m = TE_ZERO;
    double seconds;
    te_scope_begin(d->te);
    m.kind = kind;
    m.world = d->dist.world;
    m.x = te_tensor_zeros(d->te, dtype, 1, kind == DIST_GATHER ? &part : &whole);
    if (kind != DIST_REDUCE) m.out = te_tensor_zeros(d->te, dtype, 1, &whole);
    for (int i = 0; i < 3; i++) dist_send(&m);
    seconds = time_of_ranks(d->te, d->dist.world, dist_send, &m, te_ctx_is_cuda(d->te) ? 20 : 2);
    te_scope_end(d->te);
    return seconds / (double)bytes;
}

static void dist_overlap(dist_bench *d) {
    static const struct {
        const char *name;
        te_shard shard;
        bool no_prefetch;
    } rows[] = {{"gradients", TE_SHARD_NONE, false}, {"optimizer shards", TE_SHARD_OPTIMIZER, false}, {"parameter shards", TE_SHARD_PARAMETERS, false},
                {"parameter shards, not ahead", TE_SHARD_PARAMETERS, true}};
    const int layers = d->z->layers;
    const double tokens = (double)d->z->tokens, ranks = d->dist.size;
    double pass, step, elements, reduce, trade, gather;
    char shape[96], name[96];
    dist_shape(d, layers, d->z->tokens, shape);
    te_scope_begin(d->te);
    dist_work w = dist_layers(d, layers, d->z->tokens, NULL);
    elements = (double)te_module_num_parameters(w.m);
    dist_adam(&w);
    pass = dist_time(d, dist_pass, dist_forget, &w);
    step = dist_time(d, dist_step, NULL, &w);
    d->alone = tokens / step;
    dist_drop(&w);
    te_scope_end(d->te);
    /* buckets of gradients, and the weights of a unit */
    const double size = d->dist.size == 2 ? 2 : 4; /* of an element in an all-reduce */
    const int64_t bucket = te__min((int64_t)25 << 20, (int64_t)(4 * elements)) / 4;
    reduce = dist_alone(d, DIST_REDUCE, (int64_t)size * bucket);
    trade = dist_alone(d, DIST_TRADE, 2 * bucket);
    gather = dist_alone(d, DIST_GATHER, (int64_t)(2 * elements / layers));
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows) && te_ok(d->te); i++) {
        const double alone = rows[i].shard == TE_SHARD_NONE ? size * elements * reduce : 2 * elements * trade + (rows[i].shard == TE_SHARD_PARAMETERS ? 2 * 2 * elements * gather : 0);
        double with, exposed;
        te_scope_begin(d->te);
        w = dist_layers(d, layers, d->z->tokens, NULL);
        dist_share(d, w.m, rows[i].shard, rows[i].no_prefetch);
        dist_adam(&w);
        with = dist_time(d, dist_pass, dist_forget, &w);
        exposed = with - pass;
        snprintf(name, sizeof name, "pass, %s", rows[i].name);
        report_against(d->b, name, shape, with, tokens / with, tokens / pass, "token/s", "no exchange");
        snprintf(name, sizeof name, "exposed, %s", rows[i].name);
        report_against(d->b, name, shape, exposed, exposed * 1e3, alone * 1e3, "ms", "exchange alone");
        with = dist_time(d, dist_step, NULL, &w);
        snprintf(name, sizeof name, "step, %s", rows[i].name);
        report_against(d->b, name, shape, with, ranks * tokens / with, d->alone, "token/s", "one GPU");
        dist_drop(&w);
        te_scope_end(d->te);
    }
}

static void dist_graph(dist_bench *d) {
    static const struct {
        const char *name;
        te_shard shard;
        bool steps;
    } rows[] = {{"pass as a graph, gradients", TE_SHARD_NONE, false},
                {"step as a graph, gradients", TE_SHARD_NONE, true},
                {"step as a graph, optimizer shards", TE_SHARD_OPTIMIZER, true},
                {"step as a graph, parameter shards", TE_SHARD_PARAMETERS, true}};
    char shape[96];
    dist_shape(d, d->z->layers, d->z->tokens, shape);
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows) && te_ok(d->te); i++) {
        void (*run)(void *arg) = rows[i].steps ? dist_step : dist_pass;
        double calls, launches;
        te_scope_begin(d->te);
        dist_work w = dist_layers(d, d->z->layers, d->z->tokens, NULL);
        dist_share(d, w.m, rows[i].shard, false);
        if (rows[i].steps) dist_adam(&w);
        calls = dist_time(d, run, dist_forget, &w);
        te_graph_begin(d->te);
        run(&w);
        w.graph = te_graph_end(d->te);
        launches = dist_time(d, dist_launch, NULL, &w);
        report_against(d->b, rows[i].name, shape, launches, launches * 1e6, calls * 1e6, "us", "calls");
        dist_drop(&w);
        te_scope_end(d->te);
    }
}

/* The same layers, stored in BF16 and in FP8 of the current recipe: half the bytes travel. */
static void dist_gather(dist_bench *d) {
    te_recipe recipe = te_recipe_current_scaling();
    te_quantized_model_init_desc stored = TE_ZERO;
    double seconds[2];
    char shape[96];
    dist_shape(d, d->z->layers, 0, shape);
    shape[strlen(shape) - 2] = 0;
    stored.recipe = &recipe;
    for (int fp8 = 0; fp8 < 2; fp8++) {
        te_scope_begin(d->te);
        if (fp8) te_quantized_model_init_begin(d->te, &stored);
        dist_work w = dist_layers(d, d->z->layers, 2, NULL);
        if (fp8) te_quantized_model_init_end(d->te);
        dist_share(d, w.m, TE_SHARD_PARAMETERS, false);
        dist_reshard(&w);
        seconds[fp8] = dist_time(d, dist_unshard, dist_reshard, &w);
        dist_drop(&w);
        te_scope_end(d->te);
    }
    report(d->b, "gather of weights bf16", shape, seconds[0], seconds[0] * 1e6, "us");
    report_against(d->b, "gather of weights fp8", shape, seconds[1], seconds[1] * 1e6, seconds[0] * 1e6, "us", "bf16");
}

/* ---- ranks that share layers, sequences, experts ---- */

/* Without options of overlap, over one GPU; with them, over that. */
static void dist_tensor(dist_bench *d) {
    static const struct {
        const char *name;
        bool ag, rs, rs_dgrad, bulk;
    } rows[] = {{"pass, tensor and sequence parallel", false, false, false, false},
                {"pass, ub_overlap_ag", true, false, false, false},
                {"pass, ub_overlap_ag and ub_overlap_rs", true, true, false, false},
                {"pass, ub_overlap_ag, rs and rs_dgrad", true, true, true, false},
                {"pass, ub_bulk_dgrad and ub_bulk_wgrad", false, false, false, true}};
    const int64_t n = d->dist.size, tokens = d->z->tokens;
    double before = 0;
    char shape[96];
    if (d->z->groups % n || tokens % n) {
        printf("tensor: left out, since %d ranks do not divide %d heads of keys\n", (int)n, (int)d->z->groups);
        return;
    }
    dist_shape(d, d->z->layers, tokens, shape);
    for (int i = -1; i < (int)(sizeof rows / sizeof *rows) && te_ok(d->te); i++) {
        te_parallel_options parallel = TE_ZERO;
        double seconds;
        if (i >= 0) {
            parallel.tp_group = d->dist.world;
            parallel.set_parallel_mode = parallel.sequence_parallel = true;
            parallel.ub_overlap_ag = rows[i].ag, parallel.ub_overlap_rs = rows[i].rs, parallel.ub_overlap_rs_dgrad = rows[i].rs_dgrad;
            parallel.ub_bulk_dgrad = parallel.ub_bulk_wgrad = rows[i].bulk;
        }
        te_scope_begin(d->te);
        dist_work w = dist_layers(d, d->z->layers, i < 0 ? tokens : tokens / n, i < 0 ? NULL : &parallel);
        seconds = dist_time(d, dist_pass, dist_forget, &w);
        dist_drop(&w);
        te_scope_end(d->te);
        if (i >= 0) report_against(d->b, rows[i].name, shape, seconds, (double)tokens / seconds, (double)tokens / before, "token/s", i ? "no overlap" : "one GPU");
        if (i <= 0) before = seconds;
    }
}
static void dist_context(dist_bench *d) {
    const int64_t n = d->dist.size, tokens = d->z->long_tokens / (2 * n) * (2 * n);
    te_parallel_options parallel = TE_ZERO;
    double seconds[2];
    char shape[96];
    parallel.cp_group = d->dist.world;
    dist_shape(d, 1, tokens, shape);
    for (int i = 0; i < 2; i++) {
        te_scope_begin(d->te);
        dist_work w = dist_layers(d, 1, i ? tokens / n : tokens, i ? &parallel : NULL);
        seconds[i] = dist_time(d, dist_pass, dist_forget, &w);
        dist_drop(&w);
        te_scope_end(d->te);
    }
    report_against(d->b, "pass, context parallel", shape, seconds[1], (double)tokens / seconds[1], (double)tokens / seconds[0], "token/s", "one GPU");
}

/* Ids of this rank, and those that follow. */
static void dist_ids(dist_work *w, int64_t tokens, int64_t vocabulary) {
    const int64_t shape[2] = {1, tokens}, one = 1;
    int32_t *ids = (int32_t *)malloc((size_t)(tokens + 1) * sizeof *ids);
    if (!ids) return;
    for (int64_t i = 0; i <= tokens; i++) ids[i] = (int32_t)((uint64_t)(i + 1 + w->d->dist.rank * 77777) * 0x9E3779B97F4A7C15u >> 33) % (int32_t)vocabulary;
    w->ids = te_tensor_from_host(w->d->te, TE_I32, 2, shape, ids);
    w->targets = te_tensor_from_host(w->d->te, TE_I32, 2, shape, ids + 1);
    w->loss = te_tensor_zeros(w->d->te, TE_F32, 1, &one);
    free(ids);
}
static void dist_experts(dist_bench *d) {
    const int n = d->dist.size, layers = 2;
    const double tokens = (double)d->z->tokens;
    te_causal_lm_desc desc = TE_ZERO;
    double seconds[2];
    char shape[96];
    if (d->z->experts % n) {
        printf("experts: left out, since %d ranks do not divide %d experts\n", n, d->z->experts);
        return;
    }
    desc.vocab_size = d->z->vocabulary, desc.hidden_size = d->z->hidden, desc.intermediate_size = d->z->inner, desc.num_hidden_layers = layers;
    desc.num_attention_heads = (int)d->z->heads, desc.num_key_value_heads = (int)d->z->groups;
    desc.num_local_experts = d->z->experts, desc.num_experts_per_tok = 2;
    snprintf(shape, sizeof shape, "%d ranks: %d x %s, %d experts, %d", n, layers, d->z->name, d->z->experts, (int)d->z->tokens);
    for (int i = 0; i < 2; i++) {
        dist_work w = TE_ZERO;
        te_scope_begin(d->te);
        w.d = d;
        desc.ep_group = i ? d->dist.world : NULL;
        te_seed(d->te, 1);
        w.m = te_causal_lm_create(d->te, &desc);
        dist_ids(&w, d->z->tokens, d->z->vocabulary);
        seconds[i] = dist_time(d, dist_pass, dist_forget, &w);
        dist_drop(&w);
        te_scope_end(d->te);
    }
    report_against(d->b, "pass, expert parallel", shape, seconds[1], n * tokens / seconds[1], tokens / seconds[0], "token/s", "one GPU");
}

/* ---- a whole model ---- */

typedef struct dist_model {
    const char *name;
    int64_t hidden, inner, heads, groups, vocabulary, tokens;
    int layers;
    bool checkpoint;
} dist_model;
static const dist_model dist_1b = {"Llama 1.5 G", 2048, 8192, 32, 8, 128256, 4096, 16, false}, dist_8b = {"Llama 8 G", 4096, 14336, 32, 8, 128256, 4096, 32, true},
                        dist_tiny = {"tiny", 64, 128, 4, 2, 64, 32, 2, false}, dist_tiny_again = {"tiny", 64, 128, 4, 2, 64, 32, 2, true};

/* Makes a model unit by unit, so that no rank ever has all of it; without `shard` whole. */
static te_module *dist_model_create(dist_bench *d, const dist_model *z, bool shard) {
    static const char *const others[] = {"model.embed_tokens", "model.norm", "lm_head"};
    te_data_parallel_desc unit = TE_ZERO;
    te_causal_lm_desc desc = TE_ZERO;
    te_module *m;
    char name[64];
    desc.vocab_size = z->vocabulary, desc.hidden_size = z->hidden, desc.intermediate_size = z->inner, desc.num_hidden_layers = z->layers;
    desc.num_attention_heads = (int)z->heads, desc.num_key_value_heads = (int)z->groups;
    desc.device = shard ? TE_PARAMS_META : TE_PARAMS_DEFAULT;
    unit.group = d->dist.world;
    unit.shard = TE_SHARD_PARAMETERS;
    te_seed(d->te, 1);
    m = te_causal_lm_create(d->te, &desc);
    for (int i = 0; i < z->layers && m; i++) {
        snprintf(name, sizeof name, "model.layers.%d", i);
        te_module *layer = te_module_find(m, name);
        if (z->checkpoint) te_module_set_checkpoint(layer, true);
        if (!shard) continue;
        te_module_reset_parameters(layer);
        te_fsdp_unit(layer, &unit);
    }
    for (int i = 0; i < 3 && m && shard; i++) te_module_reset_parameters(te_module_find(m, others[i]));
    unit.no_reshard_after_forward = true; /* as FSDP2 does: a backward pass begins with the model's own unit */
    if (m && shard) te_fsdp_unit(m, &unit);
    return m;
}
/* Bytes at the most in a step, beside activations: api/sharding.h. The largest bucket is the gradient of the embedding. */
static double dist_model_bytes(const dist_model *z, double elements, double ranks) {
    const double table = (double)(z->vocabulary * z->hidden), root = 2 * table, layer = (elements - root) / z->layers;
    return (2 + 12 + 2) * elements / ranks /* parameters, master and two moments, gradients */
           + 2 * root                      /* gathered around all layers */
           + 2 * table                     /* a gradient of the root that is not exchanged yet */
           + 4 * table + (ranks > 2 ? 4 * table / ranks : 0) /* its exchange: sent and received in 16 bits, added up in f32 */
           + 2 * 2 * layer;                /* a layer, and the one that is gathered ahead */
}
static void dist_whole_model(dist_bench *d, const dist_model *z, bool compare) {
    const double tokens = (double)z->tokens, ranks = d->dist.size, MiB = 1048576;
    double alone = 0, seconds, first = 0, last = 0, bytes, peak;
    char shape[96];
    snprintf(shape, sizeof shape, "%d ranks: %s s%d", d->dist.size, z->name, (int)z->tokens);
    for (int shard = !compare; shard < 2 && te_ok(d->te); shard++) {
        dist_work w = TE_ZERO;
        te_scope_begin(d->te);
        const double before = (double)te_memory_get_stats(d->te).allocated;
        w.d = d;
        w.m = dist_model_create(d, z, shard);
        dist_ids(&w, z->tokens, z->vocabulary);
        dist_adam(&w);
        dist_step(&w);
        first = te_tensor_item(w.loss);
        te_memory_reset_peak(d->te);
        seconds = dist_time(d, dist_step, NULL, &w);
        last = te_tensor_item(w.loss);
        peak = (double)te_memory_get_stats(d->te).peak_allocated - before;
        bytes = shard ? dist_model_bytes(z, (double)te_module_num_parameters(w.m), ranks) : 0;
        if (!shard) alone = tokens / seconds;
        report_against(d->b, shard ? "training step, parameter shards" : "training step, one GPU", shape, seconds, (shard ? ranks : 1) * tokens / seconds, shard ? alone : 0, "token/s", "one GPU");
        report_against(d->b, shard ? "peak memory, parameter shards" : "peak memory, one GPU", shape, seconds, peak / MiB, bytes / MiB, "MiB", "formula");
        if (te_ok(d->te)) printf("    loss %.4f after one step, %.4f after the last, of the same ids%s\n", first, last, last < first ? "" : ": IT DOES NOT FALL");
        dist_drop(&w);
        te_scope_end(d->te);
    }
}

/* ---- all of it ---- */

static void dist_head(dist_bench *d) {
    const char *commit = getenv("TE_BENCH_COMMIT");
    char text[512], date[16] = "";
    time_t now = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    snprintf(text, sizeof text, "%d ranks, %s, NCCL %d.%d.%d, te.h %d.%d.%d%s%s%s, %s; medians by the host's clock, the slowest rank's", d->dist.size,
             te_ctx_is_cuda(d->te) ? d->te->cuda->name : "CPU", te__nccl.version / 10000, te__nccl.version / 100 % 100, te__nccl.version % 100, TE_VERSION_MAJOR,
             TE_VERSION_MINOR, TE_VERSION_PATCH, commit && commit[0] ? " (" : "", commit ? commit : "", commit && commit[0] ? ")" : "", date);
    printf("%s\n%-42s %-20s %13s %18s %9s  ratio\n", text, "what", "shape", "time", "ours", "theirs");
    if (d->b->csv) fprintf(d->b->csv, "# %s\nwhat,shape,microseconds,ours,unit,against,theirs,ratio\n", text);
}
/* The words behind `dist`, or all parts but `size`. */
static bool dist_wants(const bench *b, const char *part) {
    for (int i = 0; i < b->num_words; i++)
        if (!strcmp(b->words[i], part)) return true;
    return b->num_words == 1 && strcmp(part, "size") != 0; /* `dist` alone */
}
/* Returns the exit status. */
static int bench_dist(bench *b, const char *device, const char *csv, bool small) {
    static const char *const parts[] = {"dist", "overlap", "graph", "gather", "tensor", "context", "experts", "model", "size"};
    te_dist_desc layout_of_all = TE_ZERO;
    dist_bench d = TE_ZERO;
    int status;
    for (int i = 0, k; i < b->num_words; i++) {
        for (k = 0; k < (int)(sizeof parts / sizeof *parts) && strcmp(b->words[i], parts[k]);) k++;
        if (k < (int)(sizeof parts / sizeof *parts)) continue;
        fprintf(stderr, "te_bench: dist has overlap, graph, gather, tensor, context, experts, model and size, not %s\n", b->words[i]);
        return 2;
    }
    d.te = b->te = open_own_device(device);
    d.b = b;
    if (te_dist_init(d.te, &layout_of_all, &d.dist) == TE_OK && d.dist.size == 1) {
        fprintf(stderr, "te_bench: dist measures several ranks; torchrun, mpirun and srun start them\n");
        te_dist_finish(&d.dist);
        te_ctx_destroy(d.te);
        return 2;
    }
    d.z = te_ctx_is_cuda(d.te) && !small ? &dist_large : &dist_small;
    rank_0_prints(d.dist.rank);
    if (te_ok(d.te)) {
        if (csv && d.dist.rank == 0) b->csv = fopen(csv, "w");
        dist_head(&d);
        if (dist_wants(b, "overlap")) dist_overlap(&d);
        if (te_ok(d.te) && dist_wants(b, "graph")) dist_graph(&d);
        if (te_ok(d.te) && dist_wants(b, "gather")) dist_gather(&d);
        if (te_ok(d.te) && dist_wants(b, "tensor")) dist_tensor(&d);
        if (te_ok(d.te) && dist_wants(b, "context")) dist_context(&d);
        if (te_ok(d.te) && dist_wants(b, "experts")) dist_experts(&d);
        if (te_ok(d.te) && dist_wants(b, "model")) dist_whole_model(&d, d.z == &dist_small ? &dist_tiny : &dist_1b, true);
        if (te_ok(d.te) && dist_wants(b, "size")) dist_whole_model(&d, d.z == &dist_small ? &dist_tiny_again : &dist_8b, false);
    }
    status = te_ok(d.te) ? 0 : 1;
    if (status) fprintf(stderr, "te_bench: %s\n", te_error(d.te));
    if (b->csv) fclose(b->csv);
    te_dist_finish(&d.dist);
    te_ctx_destroy(d.te);
    return status;
}
