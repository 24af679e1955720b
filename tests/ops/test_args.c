/* The list of what operations name, as programs see it: te_query_args, and the trace hook on top of it. */
#include "../te_test.h"

#include "../../tools/catalogue.h"

static te_result run_call(te_ctx *te, const call *c) {
    switch (c->op) {
#define RUN(lower, UPPER, family) \
    case TE_OP_##UPPER: return te_op_##lower(te, &c->args.lower);
        TE_OP_LIST(RUN)
#undef RUN
    default: return TE_ERR_INVALID;
    }
}

TE_TEST(args_are_listed) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 6)), *n = te_tensor_zeros(te, TE_F32, SHAPE(6));
    te_op_column_sum_args sum = {0};
    te_arg list[8];
    memset(list, 0, sizeof list);
    sum.x = x;
    sum.out = n;
    CHECK_EQ_INT(te_query_args(TE_OP_COLUMN_SUM, &sum, NULL, 0), 2);
    CHECK_EQ_INT(te_query_args(TE_OP_COLUMN_SUM, &sum, list, 1), 2);
    CHECK(list[0].tensor == x && list[0].use == TE_ARG_IN && list[0].index == -1 && !list[0].optional && !strcmp(list[0].name, "x"));
    CHECK(list[1].name == NULL); /* beyond the capacity */
    te_query_args(TE_OP_COLUMN_SUM, &sum, list, 8);
    CHECK(list[1].tensor == n && list[1].use == TE_ARG_OUT && !strcmp(list[1].name, "out"));
    sum.accumulate = true;
    te_query_args(TE_OP_COLUMN_SUM, &sum, list, 8);
    CHECK(list[1].use == TE_ARG_INOUT);

    te_adam_tensor two[2];
    te_op_adam_args adam = {0};
    te_arg of_adam[20];
    memset(two, 0, sizeof two);
    two[0].param = x;
    two[1].grad = x;
    adam.tensors = two;
    adam.num_tensors = 2;
    CHECK_EQ_INT(te_query_args(TE_OP_ADAM, &adam, of_adam, 20), 20);
    CHECK(of_adam[0].tensor == x && of_adam[0].index == 0 && !strcmp(of_adam[0].name, "param") && of_adam[0].use == TE_ARG_INOUT);
    CHECK(of_adam[3].tensor == x && of_adam[3].index == 1 && !strcmp(of_adam[3].name, "grad") && of_adam[3].use == TE_ARG_IN);
    CHECK(of_adam[9].tensor == NULL && of_adam[9].optional && !strcmp(of_adam[9].name, "master"));
    adam.num_tensors = -1;
    CHECK_EQ_INT(te_query_args(TE_OP_ADAM, &adam, of_adam, 16), 4);
    CHECK_EQ_INT(te_query_args(TE_OP_NONE, &adam, of_adam, 16), 0);
    CHECK_EQ_INT(te_query_args(TE_OP_ADAM, NULL, of_adam, 16), 0);
    CHECK_OK(te);
}

/* ---- every operation is seen ---- */

typedef struct watch {
    const call *expected;
    int before, after;
    int seen[TE_OP_COUNT], fields[TE_OP_COUNT];
} watch;
static void watch_call(te_ctx *te, const te_trace *event, void *user) {
    watch *w = (watch *)user;
    te_arg got[64], want[64];
    int64_t n = te_query_args(event->op, event->args, got, 64);
    (void)te;
    if (!w->expected) return;
    CHECK(event->op == w->expected->op && event->mode == TE_TRACE_RUN && !event->backward && !event->module[0] && event->result == TE_OK);
    CHECK(event->args != (const void *)&w->expected->args); /* a copy, with defaults */
    CHECK_EQ_INT(te_query_args(w->expected->op, &w->expected->args, want, 64), n);
    for (int64_t i = 0; i < n && i < 64; i++) CHECK_MSG(got[i].tensor == want[i].tensor && got[i].use == want[i].use, "field %s", got[i].name);
    for (int k = 0; k < w->expected->num_out; k++) {
        bool found = false;
        for (int64_t i = 0; i < n && i < 64; i++) found = found || (got[i].tensor == w->expected->out[k] && (got[i].use & TE_ARG_OUT));
        CHECK_MSG(found, "output %d is no output of the trace", k);
    }
    if (event->phase == TE_TRACE_BEFORE) {
        CHECK(w->before == w->after);
        w->before++;
        w->seen[event->op]++;
        w->fields[event->op] = (int)n;
    } else {
        w->after++;
        CHECK(w->before == w->after);
    }
}
TE_TEST_DEVICES(trace_sees_every_operation) {
    watch w = {0};
    call c;
    REQUIRE(te_set_trace(te, watch_call, &w) == TE_OK);
    CHECK(te_set_trace(NULL, watch_call, &w) == TE_ERR_STATE);
    for (int i = 0; te_scope_begin(te), w.expected = NULL, call_build(&c, te, i, TE_BF16); i++) {
        int before = w.before;
        test_case("%s", c.label);
        w.expected = &c;
        CHECK_EQ_INT(run_call(te, &c), TE_OK);
        CHECK_EQ_INT(w.before - before, 1);
        te_scope_end(te);
    }
    te_scope_end(te);
    for (int op = 1; op < TE_OP_COUNT; op++) CHECK_MSG(w.seen[op] && w.fields[op], "%s is not seen", te_query_name((te_op)op));
    te_set_trace(te, NULL, NULL);
    int last = w.before;
    te_tensor_zeros(te, TE_F32, SHAPE(4));
    te_tensor_full(te, TE_F32, SHAPE(4), 1);
    CHECK_EQ_INT(w.before, last);
    CHECK_OK(te);
}

/* Completed args are args: inside a hook they are asked about again. te_query_supported adds no error, whatever it answers. */
static void ask_again(te_ctx *te, const te_trace *event, void *user) {
    te_explanation e;
    (void)user;
    CHECK_EQ_INT(te_explain(te, event->op, event->args, NULL, &e), TE_OK);
    CHECK(te_query_supported(te, event->op, event->args));
    CHECK(!te_query_supported(te, TE_OP_NONE, event->args) && te_ok(te));
}
TE_TEST_DEVICES(a_hook_asks_about_every_operation) {
    call c;
    te_set_trace(te, ask_again, NULL);
    for (int i = 0; te_scope_begin(te), call_build(&c, te, i, TE_BF16); i++) {
        test_case("%s", c.label);
        CHECK_EQ_INT(run_call(te, &c), TE_OK);
        CHECK_OK(te);
        te_scope_end(te);
    }
    te_scope_end(te);
    test_case("a layer");
    te_module *layer = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 32, .ffn_hidden_size = 48, .attention.num_attention_heads = 2});
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(4, 1, 32), 1);
    te_backward(te_sum_all(te_forward(layer, x)));
    te_set_trace(te, NULL, NULL);
    te_module_destroy(layer);
    CHECK_OK(te);
}

/* ---- a small profiler: calls by operation and shape of what they write ---- */

typedef struct profile_row {
    te_op op;
    bool backward;
    char shape[64];
    int calls;
} profile_row;
typedef struct profile {
    profile_row row[128];
    int num_rows, open;
    char paths[8192];
} profile;
static void profile_call(te_ctx *te, const te_trace *event, void *user) {
    profile *p = (profile *)user;
    te_arg args[64];
    int64_t n = te_query_args(event->op, event->args, args, 64);
    profile_row row = {0};
    int i;
    (void)te;
    p->open += event->phase == TE_TRACE_BEFORE ? 1 : -1;
    if (event->phase == TE_TRACE_BEFORE) return;
    row.op = event->op;
    row.backward = event->backward;
    for (i = 0; i < n && i < 64; i++) {
        const te_tensor *x = args[i].tensor;
        if (!x || !(args[i].use & TE_ARG_OUT)) continue;
        for (int d = 0; d < te_tensor_ndim(x); d++)
            snprintf(row.shape + strlen(row.shape), sizeof row.shape - strlen(row.shape), d ? "x%lld" : "%lld", (long long)te_tensor_shape(x)[d]);
        break; /* the first one will do */
    }
    if (!strstr(p->paths, event->module) && strlen(p->paths) + strlen(event->module) + 2 < sizeof p->paths) strcat(strcat(p->paths, event->module), "\n");
    for (i = 0; i < p->num_rows; i++)
        if (p->row[i].op == row.op && p->row[i].backward == row.backward && !strcmp(p->row[i].shape, row.shape)) break;
    if (i == COUNT(p->row)) return;
    if (i == p->num_rows) p->row[p->num_rows++] = row;
    p->row[i].calls++;
}
static int profile_calls(const profile *p, const char *family, bool backward, const char *shape) {
    int n = 0;
    for (int i = 0; i < p->num_rows; i++)
        if (!strcmp(te_query_family(p->row[i].op), family) && p->row[i].backward == backward && (!shape || !strcmp(p->row[i].shape, shape))) n += p->row[i].calls;
    return n;
}
TE_TEST_DEVICES(trace_profiles_a_layer) {
    te_transformer_layer_desc d = {0};
    d.hidden_size = 32;
    d.ffn_hidden_size = 96;
    d.attention.num_attention_heads = 4;
    d.norm.normalization = TE_RMSNORM;
    d.activation = TE_SWIGLU;
    d.gemm.no_bias = true;
    te_module *layer = te_transformer_layer_create(te, &d);
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(16, 2, 32), 0, 1);
    profile *p = (profile *)test_alloc(sizeof *p);
    memset(p, 0, sizeof *p);
    te_tensor_set_requires_grad(x, true);
    te_set_trace(te, profile_call, p);
    te_backward(te_mean_all(te_forward(layer, x)));
    te_set_trace(te, NULL, NULL);
    CHECK_OK(te);
    CHECK_EQ_INT(p->open, 0);
    CHECK_EQ_INT(profile_calls(p, "gemm", false, NULL), 4); /* qkv, proj, fc1, fc2 */
    CHECK_EQ_INT(profile_calls(p, "gemm", true, NULL), 8);  /* dx and dW of each */
    CHECK_EQ_INT(profile_calls(p, "gemm", true, "192x32"), 1); /* dW of fc1 */
    CHECK_EQ_INT(profile_calls(p, "norm", false, NULL), 2);
    CHECK_EQ_INT(profile_calls(p, "norm", true, NULL), 2);
    CHECK_EQ_INT(profile_calls(p, "attn", false, "16x2x4x8"), 1);
    CHECK_EQ_INT(profile_calls(p, "attn", true, "16x2x4x8"), 1);
    CHECK_EQ_INT(profile_calls(p, "act", false, "16x2x96"), 1);
    CHECK_EQ_INT(profile_calls(p, "act", true, "16x2x192"), 1);
    CHECK_STR(p->paths, "self_attention");
    CHECK_STR(p->paths, "layernorm_mlp");
    te_module_destroy(layer);
}

/* ---- the rules ---- */

typedef struct rules {
    te_tensor *x;
    int calls[3], ended; /* by mode */
    te_trace_phase act_in;
    int what; /* to do in the hook */
    te_result result;
    float read;
    uint64_t version[2];
    te_module *m;
    te_optimizer *opt;
    te_graph *graph;
    te_inference_params *caches;
    te_kv_cache *cache;
    te_grad_scaler *scaler;
} rules;
enum { NOTHING, AN_OPERATION, A_FUNCTION, A_GRAPH, A_WARMUP, A_SCOPE, A_SCOPES_END, A_MODULE, A_CHILD, A_PARAMETER, AN_OPTIMIZER, OWN_GRAPH, A_CONTEXT, A_GRADIENT, A_MAIN_GRADIENT, CACHES, A_CACHE,
       A_SCALER, READ_BACK, TURN_OFF,
       EXPLAIN };
static void ruled(te_ctx *te, const te_trace *event, void *user) {
    rules *r = (rules *)user;
    te_op_fill_args fill = {0};
    te_explanation why;
    r->calls[event->mode]++;
    r->ended += event->phase == TE_TRACE_AFTER;
    r->version[event->phase] = te_tensor_version(r->x);
    if (event->phase != r->act_in) return;
    fill.dst = r->x;
    fill.value = 9;
    if (r->what == AN_OPERATION) r->result = te_op_fill(te, &fill);
    if (r->what == A_FUNCTION) r->result = te_add(r->x, r->x) ? TE_OK : te_error_code(te);
    if (r->what == A_GRAPH) r->result = te_graph_begin(te);
    if (r->what == A_WARMUP) r->result = te_warmup_begin(te);
    if (r->what == A_SCOPE) te_scope_begin(te);
    if (r->what == A_SCOPES_END) te_scope_end(te);
    if (r->what == A_MODULE) te_module_destroy(r->m);
    if (r->what == A_CHILD) te_module_remove_child(r->m, "0");
    if (r->what == A_PARAMETER) te_module_add_parameter(te_module_find(r->m, "0"), "weight", r->x);
    if (r->what == AN_OPTIMIZER) te_optimizer_destroy(r->opt);
    if (r->what == OWN_GRAPH) te_graph_destroy(r->graph);
    if (r->what == A_CONTEXT) te_ctx_destroy(te);
    if (r->what == A_GRADIENT) te_tensor_zero_grad(te_module_parameter(te_module_find(r->m, "0"), "weight"));
    if (r->what == A_MAIN_GRADIENT) te_tensor_set_main_grad(r->x, NULL);
    if (r->what == CACHES) te_inference_params_destroy(r->caches);
    if (r->what == A_CACHE) te_kv_cache_destroy(r->cache);
    if (r->what == A_SCALER) te_grad_scaler_destroy(r->scaler);
    if (r->what >= A_SCOPE && r->what <= A_SCALER) r->result = te_error_code(te);
    if (r->what == READ_BACK) r->result = te_tensor_to_f32(r->x, &r->read);
    if (r->what == TURN_OFF) r->result = te_set_trace(te, NULL, NULL);
    if (r->what == EXPLAIN) r->result = te_explain(te, event->op, event->args, NULL, &why);
}
static void ruled_fill(te_ctx *te, rules *r, int what, te_trace_phase phase, float value) {
    r->what = what;
    r->act_in = phase;
    r->result = TE_ERR_IO;
    r->calls[0] = r->calls[1] = r->calls[2] = r->ended = 0;
    te_set_trace(te, ruled, r);
    te_tensor_fill(r->x, value);
    te_set_trace(te, NULL, NULL);
}
TE_TEST_DEVICES(a_hook_looks_on) {
    static const char *const refused[] = {"", "te_op_fill from inside a trace hook", "from inside a trace hook", "te_graph_begin from inside a trace hook",
                                          "te_warmup_begin from inside a trace hook", "te_scope_begin from inside a trace hook", "te_scope_end from inside a trace hook",
                                          "te_module_destroy from inside a trace hook", "te_module_remove_child from inside a trace hook",
                                          "te_module_add_parameter from inside a trace hook", "te_optimizer_destroy from inside a trace hook", "te_graph_destroy from inside a trace hook",
                                          "te_ctx_destroy from inside a trace hook", "te_tensor_zero_grad from inside a trace hook", "te_tensor_set_main_grad from inside a trace hook",
                                          "te_inference_params_destroy from inside a trace hook", "te_kv_cache_destroy from inside a trace hook", "te_grad_scaler_destroy from inside a trace hook"};
    rules r = {0};
    r.x = te_tensor_full(te, TE_F32, SHAPE(1), 3);
    r.m = te_sequential_create(te, (te_module *[]){te_linear_create(te, &(te_linear_desc){.in_features = 4, .out_features = 4})}, 1);
    r.opt = te_fused_adam_create(te, r.m, NULL);
    te_backward(te_sum_all(te_forward(r.m, te_tensor_full(te, TE_BF16, SHAPE(1, 4), 1))));
    REQUIRE(te_graph_begin(te) == TE_OK);
    te_tensor_fill(r.x, 3);
    r.graph = te_graph_end(te);
    REQUIRE(r.graph != NULL);
    te_causal_lm_desc small = {.vocab_size = 11, .hidden_size = 8, .intermediate_size = 8, .num_hidden_layers = 1, .num_attention_heads = 2, .head_dim = 4};
    te_module *lm = te_causal_lm_create(te, &small);
    r.cache = te_kv_cache_create(lm, 1, 4);
    r.caches = te_inference_params_create(te, &(te_inference_params_desc){.max_batch_size = 1, .max_sequence_length = 4, .num_heads_kv = 1, .head_dim_k = 8});
    r.scaler = te_grad_scaler_create(te, NULL);
    REQUIRE(r.cache && r.caches && r.scaler);
    for (int what = AN_OPERATION; what <= A_SCALER; what++)
        for (int phase = 0; phase < 2; phase++) {
            test_case("%d in phase %d", what, phase);
            ruled_fill(te, &r, what, (te_trace_phase)phase, 5 + (float)what);
            CHECK_ERROR(te, TE_ERR_STATE, refused[what]);
            CHECK_EQ_INT(r.result, TE_ERR_STATE);
            CHECK_EQ_INT(r.calls[TE_TRACE_RUN], 2); /* what was refused is not traced */
            CHECK(test_read(r.x)[0] == 5 + (float)what); /* the traced call is itself */
        }
    CHECK(te_tensor_grad(te_module_parameter(te_module_child(r.m, 0), "weight")) != NULL);
    te_graph_destroy(r.graph);
    te_optimizer_destroy(r.opt);
    te_module_destroy(r.m);
    te_inference_params_destroy(r.caches);
    te_kv_cache_destroy(r.cache);
    te_grad_scaler_destroy(r.scaler);
    te_module_destroy(lm);
    test_case("reading");
    ruled_fill(te, &r, READ_BACK, TE_TRACE_AFTER, 7);
    CHECK(r.result == TE_OK && r.read == 7);
    CHECK(r.version[TE_TRACE_AFTER] > r.version[TE_TRACE_BEFORE]);
    ruled_fill(te, &r, READ_BACK, TE_TRACE_BEFORE, 8);
    CHECK(r.result == TE_OK && r.read == 7);
    ruled_fill(te, &r, EXPLAIN, TE_TRACE_BEFORE, 8);
    CHECK(r.result == TE_OK && r.calls[TE_TRACE_RUN] == 2);
    test_case("the begin and the end of a call go to one function");
    ruled_fill(te, &r, TURN_OFF, TE_TRACE_BEFORE, 9);
    CHECK(r.result == TE_OK && r.calls[TE_TRACE_RUN] == 2 && r.ended == 1);
    CHECK_OK(te);

    test_case("refused args are not traced");
    te_op_fill_args none = {0};
    r.what = NOTHING;
    r.calls[0] = 0;
    te_set_trace(te, ruled, &r);
    te_op_fill(te, &none);
    CHECK_ERROR(te, TE_ERR_STATE, "fill: dst is NULL; a tensor is needed there");
    CHECK_EQ_INT(r.calls[0], 0);

    test_case("a warm-up");
    te_warmup_begin(te);
    te_tensor_fill(r.x, 1);
    te_warmup_end(te);
    CHECK(r.calls[TE_TRACE_WARMUP] == 2 && r.calls[TE_TRACE_RUN] == 0 && r.version[0] == r.version[1]);

    test_case("a capture");
    REQUIRE(te_graph_begin(te) == TE_OK);
    te_tensor_fill(r.x, 2);
    te_graph *g = te_graph_end(te);
    REQUIRE(g != NULL);
    CHECK(r.calls[TE_TRACE_CAPTURE] == 2 && r.calls[TE_TRACE_RUN] == 0);
    CHECK(te_graph_launch(g) == TE_OK);
    CHECK(test_read(r.x)[0] == 2);
    CHECK_EQ_INT(r.calls[0] + r.calls[1] + r.calls[2], 4); /* a launch is not traced */
    te_set_trace(te, NULL, NULL);
    te_graph_destroy(g);
    CHECK_OK(te);
}

/* ---- outputs on top of others ---- */

/* Heads of one packed projection alternate in memory: their bytes are apart though the ranges meet. */
TE_TEST_DEVICES(strided_outputs_may_alternate) {
    te_tensor *packed = te_tensor_zeros(te, TE_BF16, SHAPE(8, 2, 12, 16)), *in = te_tensor_normal(te, TE_BF16, SHAPE(8, 2, 12, 16), 0, 1);
    te_op_attn_bwd_args b = {0};
    te_op_attn_fwd_args f = {0};
    te_tensor *d[3], *v[3];
    for (int i = 0; i < 3; i++) {
        d[i] = te_tensor_narrow(packed, 2, 4 * i, 4);
        v[i] = te_tensor_narrow(in, 2, 4 * i, 4);
    }
    f.q = v[0], f.k = v[1], f.v = v[2];
    f.o = te_tensor_empty(te, TE_BF16, SHAPE(8, 2, 4, 16));
    f.lse = te_tensor_empty(te, TE_F32, SHAPE(2, 4, 8));
    CHECK_EQ_INT(te_op_attn_fwd(te, &f), TE_OK);
    b.q = v[0], b.k = v[1], b.v = v[2], b.o = f.o, b.lse = f.lse;
    b.d_o = te_tensor_normal(te, TE_BF16, SHAPE(8, 2, 4, 16), 0, 1);
    b.dq = d[0], b.dk = d[1], b.dv = d[2];
    CHECK_EQ_INT(te_op_attn_bwd(te, &b), TE_OK);
    CHECK_OK(te);
    b.dk = d[0];
    te_op_attn_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_INVALID, "attn_bwd: dq, which is written, and dk are the same memory");
    b.dk = te_tensor_narrow(packed, 2, 2, 4); /* two heads of dq, two of dk */
    te_op_attn_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_INVALID, "they overlap: give dq memory of its own");
}

/* In place, wherever the documentation says so. */
TE_TEST_DEVICES(in_place_is_as_good) {
    enum { M = 33, N = 72 };
    for (int way = 0; way < 8; way++) {
        float *result[2];
        for (int place = 0; place < 2; place++) {
            te_tensor *x = test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 1)), *y = test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 2));
            te_tensor *over = way % 2 ? y : x, *out = place ? over : te_tensor_zeros(te, TE_BF16, SHAPE(M, N));
            te_op_axpby_args axpby = {0};
            te_op_act_fwd_args act = {0};
            te_op_act_bwd_args act_grad = {0};
            te_op_dropout_add_fwd_args drop = {0};
            te_op_dropout_add_bwd_args drop_grad = {0};
            test_case("way %d, %s", way, place ? "in place" : "apart");
            axpby.x = x, axpby.y = y, axpby.out = out, axpby.alpha = 2, axpby.beta = 3;
            act.x = x, act.y = out, act.activation = TE_GELU;
            act_grad.dy = y, act_grad.x = x, act_grad.dx = out, act_grad.activation = TE_GELU;
            drop.x = x, drop.residual = y, drop.y = out, drop.p = 0.25f, drop.seed = 5;
            drop_grad.dy = x, drop_grad.dx = out, drop_grad.p = 0.25f, drop_grad.seed = 5;
            switch (way) {
            case 0: case 1: te_op_axpby(te, &axpby); break;
            case 2: te_op_act_fwd(te, &act); break;
            case 3: case 4: te_op_act_bwd(te, &act_grad); break;
            case 5: drop.y = place ? x : out; te_op_dropout_add_fwd(te, &drop); out = drop.y; break;
            case 6: te_op_dropout_add_bwd(te, &drop_grad); break;
            default: te_op_dropout_add_fwd(te, &drop);
            }
            CHECK_OK(te);
            result[place] = test_read(out);
        }
        CHECK_BYTES("in place", result[1], result[0], M * N * sizeof(float));
    }
}

/* ---- what may stay as it is ---- */

static te_arg_use use_of(te_op op, const void *args, const char *name) {
    te_arg list[32];
    int64_t n = te_query_args(op, args, list, 32);
    for (int64_t i = 0; i < n; i++)
        if (!strcmp(list[i].name, name)) return list[i].use;
    return (te_arg_use)0;
}
/* Whoever plays calls again must know that these values are not all written. */
TE_TEST(args_that_may_stay_are_read_too) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 16)), *one = te_tensor_zeros(te, TE_F32, SHAPE(1)), *fp8 = te_tensor_zeros(te, TE_F8E4M3, SHAPE(4, 16));
    te_tensor *scale = te_tensor_zeros(te, TE_F8E8M0, SHAPE(128, 4)), *fp4 = te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 16)), *e4m3 = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4));
    for (int noop = 0; noop < 2; noop++) {
        const te_tensor *flag = noop ? one : NULL;
        const te_arg_use want = noop ? TE_ARG_INOUT : TE_ARG_OUT;
        te_op_amax_args a = {.x = x, .amax = one, .noop = flag};
        te_op_fp8_quantize_args f = {.x = x, .row = fp8, .col = fp8, .scale_inv = one, .amax = one, .noop = flag, .current = true};
        te_op_block_quantize_args b = {.x = x, .row = fp8, .row_scale_inv = x, .col = fp8, .col_scale_inv = x, .noop = flag};
        te_op_mxfp8_quantize_args m = {.x = x, .row = fp8, .row_scale = scale, .col = fp8, .col_scale = scale, .noop = flag};
        te_op_nvfp4_amax_args n = {.x = x, .amax_row = one, .amax_col = one, .noop = flag};
        te_op_nvfp4_quantize_args q = {.x = x, .row = fp4, .row_scale = e4m3, .col = fp4, .col_scale = e4m3, .amax_row = one, .amax_col = one, .measure = true, .noop = flag};
        static const char *const copies[] = {"row", "col", "row_scale", "col_scale", "row_scale_inv", "col_scale_inv", "scale_inv", "amax", "amax_row", "amax_col"};
        test_case("noop %d", noop);
        CHECK_EQ_INT(use_of(TE_OP_AMAX, &a, "amax"), want);
        for (int i = 0; i < COUNT(copies); i++) {
            te_arg_use got[5];
            got[0] = use_of(TE_OP_FP8_QUANTIZE, &f, copies[i]), got[1] = use_of(TE_OP_BLOCK_QUANTIZE, &b, copies[i]), got[2] = use_of(TE_OP_MXFP8_QUANTIZE, &m, copies[i]);
            got[3] = use_of(TE_OP_NVFP4_AMAX, &n, copies[i]), got[4] = use_of(TE_OP_NVFP4_QUANTIZE, &q, copies[i]);
            for (int k = 0; k < 5; k++) CHECK_MSG(!got[k] || got[k] == want, "%s of operation %d", copies[i], k);
        }
        q.measure = false;
        CHECK_EQ_INT(use_of(TE_OP_NVFP4_QUANTIZE, &q, "amax_row"), TE_ARG_IN);
    }
    te_tensor *small = te_tensor_zeros(te, TE_F32, SHAPE(4, 3)), *wide = te_tensor_zeros(te, TE_F32, SHAPE(4, 5)), *high = te_tensor_zeros(te, TE_F32, SHAPE(6, 3));
    te_op_gemm_args g = {.d = small, .aux = small, .m = 4, .n = 3, .k = 2, .epilogue = TE_EPILOGUE_GELU};
    CHECK(use_of(TE_OP_GEMM, &g, "d") == TE_ARG_OUT && use_of(TE_OP_GEMM, &g, "aux") == TE_ARG_OUT);
    g.d = wide, g.aux = high;
    CHECK(use_of(TE_OP_GEMM, &g, "d") == TE_ARG_INOUT && use_of(TE_OP_GEMM, &g, "aux") == TE_ARG_INOUT);
    te_op_grouped_gemm_args r = {.d = small, .aux = small, .m = 4, .n = 3, .k = 2, .groups = 2, .epilogue = TE_EPILOGUE_GELU};
    CHECK(use_of(TE_OP_GROUPED_GEMM, &r, "d") == TE_ARG_INOUT && use_of(TE_OP_GROUPED_GEMM, &r, "aux") == TE_ARG_INOUT); /* rows behind the last group */
    r.along_k = true, r.aux = NULL, r.d = high, r.m = 3;
    CHECK_EQ_INT(use_of(TE_OP_GROUPED_GEMM, &r, "d"), TE_ARG_OUT);
    r.d = te_tensor_zeros(te, TE_F32, SHAPE(6, 4));
    CHECK_EQ_INT(use_of(TE_OP_GROUPED_GEMM, &r, "d"), TE_ARG_INOUT);
}

TE_TEST_DEVICES(writes_of_losses_and_statistics_are_counted) {
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(6, 32), 0, 1), *t = te_tensor_normal(te, TE_F32, SHAPE(6, 32), 0, 1);
    te_tensor *gamma = te_tensor_full(te, TE_F32, SHAPE(32), 1), *out[4];
    uint64_t before[4];
    te_op_mse_fwd_args loss = {0};
    te_op_mse_bwd_args dx = {0};
    te_op_rmsnorm_fwd_args norm = {0};
    out[0] = loss.loss = te_tensor_zeros(te, TE_F32, SHAPE(1));
    out[1] = dx.dx = te_tensor_zeros(te, TE_F32, SHAPE(6, 32));
    out[2] = norm.y = te_tensor_zeros(te, TE_F32, SHAPE(6, 32));
    out[3] = norm.rstd = te_tensor_zeros(te, TE_F32, SHAPE(6));
    loss.x = dx.x = norm.x = x;
    loss.target = dx.target = t;
    dx.dloss = loss.loss;
    norm.gamma = gamma;
    for (int i = 0; i < 4; i++) before[i] = te_tensor_version(out[i]);
    te_op_mse_fwd(te, &loss);
    te_op_mse_bwd(te, &dx);
    te_op_rmsnorm_fwd(te, &norm);
    for (int i = 0; i < 4; i++) CHECK_MSG(te_tensor_version(out[i]) > before[i], "write %d is not counted", i);
    CHECK_OK(te);
}
