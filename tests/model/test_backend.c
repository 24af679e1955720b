/* tests/model/test_backend.c: how a model of NeMo Automodel is put together: names and rules of backends, FP8 of a whole model, modules by backend, shapes without memory, the place in a
 * step. Expectations are Automodel's own tests and the rules written down again (tests/golden/backends.txt, tools/golden/backends.py). */
#include "../te_test.h"

static const te_backend_capabilities nothing, cuda_only = {.cuda = true}, all = {.have_te = true, .have_deep_ep = true, .have_gmm = true, .have_uccl_ep = true, .cuda = true};

/* Validates what `text` says, in a context with these capabilities. */
static te_result validated(te_ctx *te, const char *text, te_backend_config *c) {
    memset(c, 0, sizeof(*c));
    te_result result = te_backend_config_parse(te, text, c);
    return result == TE_OK ? te_backend_config_validate(te, c, NULL) : result;
}
#define ACCEPTED(text, condition)                                                         \
    do {                                                                                  \
        te_backend_config c;                                                              \
        CHECK(validated(te, text, &c) == TE_OK);                                          \
        CHECK_MSG(condition, "%s: not %s", text, #condition);                             \
        CHECK_OK(te);                                                                     \
    } while (0)
#define REFUSED(text, code, needle)                                                       \
    do {                                                                                  \
        te_backend_config c;                                                              \
        test_case("%s", text);                                                            \
        CHECK(validated(te, text, &c) == (code));                                         \
        CHECK_ERROR(te, code, needle);                                                    \
    } while (0)

/* How often the log has `needle`. */
static int logged(const char *needle) {
    int n = 0;
    for (const char *at = test_log_text(); at && (at = strstr(at, needle)); at++) n++;
    return n;
}

/* ---- defaults, names, rules ---- */

TE_TEST(backend_defaults_follow_from_what_there_is) {
    te_backend_config c = te_backend_config_defaults(&nothing);
    CHECK(c.attn == TE_ATTN_SDPA && c.linear == TE_LINEAR_TORCH && c.rms_norm == TE_RMS_NORM_TORCH_FP32 && c.experts == TE_EXPERTS_TORCH && c.dispatcher == TE_DISPATCHER_TORCH);
    CHECK(c.rope_fusion == TE_OFF && c.rope == TE_ROPE_TORCH && c.dispatcher_num_sms == 20 && !c.has_te_fp8 && c.gate_precision == TE_DTYPE_NONE && c.cuda_graph.modules == 0);
    CHECK(!c.no_dispatcher_share_token_dispatcher && !c.dispatcher_async_dispatch && !c.fake_balanced_gate && c.fake_gate_noise == 0 && !c.enable_fsdp_optimizations && !c.compile_attn);
    CHECK(!c.no_hf_state_dict_adapter && c.enable_deepep == TE_DEFAULT);
    CHECK(c.mok.fwd_num_comm_sms == 40 && c.mok.bwd_num_comm_sms == 28 && c.mok.minibatch_size == 4096 && c.mok.macrobatch_size == 131072);
    CHECK(c.mok.schedule_capacity_multiplier == 0.5 && c.mok.all_gather_top_experts_chunk_bytes == 2048);
    c = te_backend_config_defaults(&cuda_only);
    CHECK(c.attn == TE_ATTN_SDPA && c.linear == TE_LINEAR_TORCH && c.rms_norm == TE_RMS_NORM_TORCH_FP32 && c.experts == TE_EXPERTS_TORCH_MM && c.dispatcher == TE_DISPATCHER_TORCH);
    c = te_backend_config_defaults(&all);
    CHECK(c.attn == TE_ATTN_TE && c.linear == TE_LINEAR_TE && c.rms_norm == TE_RMS_NORM_TORCH_FP32 && c.experts == TE_EXPERTS_TORCH_MM && c.dispatcher == TE_DISPATCHER_DEEPEP);
    te_backend_capabilities uccl = cuda_only;
    uccl.have_uccl_ep = true;
    CHECK(te_backend_config_defaults(&uccl).dispatcher == TE_DISPATCHER_UCCL_EP);
    CHECK(te_backend_config_defaults(NULL).attn == TE_ATTN_SDPA);
    /* a context's own */
    te_ctx *te = test_context("cpu");
    te_backend_capabilities own = te_backend_get_capabilities(te);
    CHECK(own.have_te && own.have_deep_ep && own.have_gmm && own.have_uccl_ep && !own.cuda);
    te_backend_set_capabilities(te, &cuda_only);
    own = te_backend_get_capabilities(te);
    CHECK(own.cuda && !own.have_te);
    ACCEPTED("", c.experts == TE_EXPERTS_TORCH_MM && c.attn == TE_ATTN_SDPA);
    te_backend_set_capabilities(te, NULL);
    CHECK(te_backend_get_capabilities(te).have_te && !te_backend_get_capabilities(te).cuda);
    CHECK(!te_backend_get_capabilities(NULL).have_te);
    CHECK_EQ_INT(logged("warning"), 0);
}

TE_TEST(backend_config_fields_are_read_and_kept) {
    te_ctx *te = test_context("cpu");
    ACCEPTED("gate_precision=torch.float32", c.gate_precision == TE_F32);
    ACCEPTED("gate_precision=float32", c.gate_precision == TE_F32);
    ACCEPTED("gate_precision=FLOAT32", c.gate_precision == TE_F32);
    ACCEPTED("gate_precision=torch.BFloat16", c.gate_precision == TE_BF16);
    ACCEPTED("gate_precision=bf16", c.gate_precision == TE_BF16);
    ACCEPTED("gate_precision=half", c.gate_precision == TE_F16);
    ACCEPTED("gate_precision=long", c.gate_precision == TE_I64);
    ACCEPTED("", c.gate_precision == TE_DTYPE_NONE);
    REFUSED("gate_precision=torch.float64", TE_ERR_UNSUPPORTED, "gate_precision is \"float64\", a format that te.h does not have");
    REFUSED("gate_precision=complex64", TE_ERR_UNSUPPORTED, "complex64");
    REFUSED("gate_precision=fp32", TE_ERR_INVALID, "gate_precision is \"fp32\"; float32, float");
    REFUSED("gate_precision=flaot32", TE_ERR_INVALID, "is \"float32\" meant?");
    ACCEPTED("fake_gate_noise=0.5,fake_balanced_gate=true", c.fake_gate_noise == 0.5 && c.fake_balanced_gate);
    ACCEPTED("fake_gate_noise=-3", c.fake_gate_noise == -3 && !c.fake_balanced_gate);
    ACCEPTED("dispatcher_num_sms=24", c.dispatcher_num_sms == 24);
    ACCEPTED("dispatcher_share_token_dispatcher=false", c.no_dispatcher_share_token_dispatcher);
    ACCEPTED("dispatcher_share_token_dispatcher=true,dispatcher_async_dispatch=true", !c.no_dispatcher_share_token_dispatcher && c.dispatcher_async_dispatch);
    ACCEPTED("enable_hf_state_dict_adapter=false,enable_fsdp_optimizations=true", c.no_hf_state_dict_adapter && c.enable_fsdp_optimizations);
    ACCEPTED("compile_attn=true", c.compile_attn);
    ACCEPTED("compile_attn=false", !c.compile_attn);
    ACCEPTED("experts=torch_mm_mxfp8,dispatcher=torch", c.experts == TE_EXPERTS_TORCH_MM_MXFP8 && c.dispatcher == TE_DISPATCHER_TORCH);
    ACCEPTED("  attn = eager ,\tlinear=quack,", c.attn == TE_ATTN_EAGER && c.linear == TE_LINEAR_QUACK);
    REFUSED("compile_mla=true", TE_ERR_INVALID, "\"compile_mla\" is no field of a te_backend_config");
    REFUSED("atn=te", TE_ERR_INVALID, "\"atn\" is no field of a te_backend_config; is \"attn\" meant?");
    REFUSED("attn=bogus", TE_ERR_INVALID, "attn is \"bogus\"; te, sdpa, flex, eager, tilelang, cudnn, magi are possible");
    REFUSED("dispatcher=deepeep", TE_ERR_INVALID, "is \"deepep\" meant?");
    REFUSED("rms_norm=torch_fp23", TE_ERR_INVALID, "is \"torch_fp32\" meant?");
    REFUSED("attn:te", TE_ERR_INVALID, "\"attn:te\" has no '='");
    REFUSED("attn=te,,linear=te", TE_ERR_INVALID, "has no '='");
    REFUSED("attn=te,attn=sdpa", TE_ERR_INVALID, "attn is given twice");
    REFUSED("te_fp8=block,te_fp8.recipe=mxfp8", TE_ERR_INVALID, "te_fp8.recipe is given twice");
    REFUSED("cuda_graph.modules=attn,cuda_graph=te_dpa", TE_ERR_INVALID, "cuda_graph is given twice");
    REFUSED("attn=", TE_ERR_INVALID, "attn is \"\"");
    REFUSED("dispatcher_num_sms=2.5", TE_ERR_INVALID, "dispatcher_num_sms is \"2.5\"; a whole number is needed");
    REFUSED("dispatcher_num_sms=99999999999", TE_ERR_INVALID, "a whole number");
    REFUSED("fake_gate_noise=much", TE_ERR_INVALID, "fake_gate_noise is \"much\"; a number is needed");
    REFUSED("compile_attn=yes", TE_ERR_INVALID, "compile_attn is \"yes\"; false, true are possible");
    /* nothing is lost, and values outside of the lists are found before all rules */
    te_backend_config c = {.attn = TE_ATTN_FLEX}, before = c;
    CHECK(te_backend_config_parse(te, "linear=te,experts=nobody", &c) == TE_ERR_INVALID && memcmp(&c, &before, sizeof(c)) == 0);
    te_clear_error(te);
    c.dispatcher = (te_dispatcher_backend)9;
    before = c;
    CHECK(te_backend_config_validate(te, &c, NULL) == TE_ERR_INVALID && memcmp(&c, &before, sizeof(c)) == 0);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_backend_config_validate: dispatcher is \"9\"; torch, deepep");
    c = (te_backend_config){.gate_precision = (te_dtype)77};
    te_backend_config_validate(te, &c, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "gate_precision is 77");
    CHECK(te_backend_config_parse(te, NULL, &c) == TE_ERR_INVALID && te_backend_config_parse(NULL, "", &c) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_INVALID, "text is NULL");
    te_backend_config_validate(te, NULL, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "config is NULL");
    /* single names */
    int value = -1;
    CHECK(te_backend_parse(te, "experts", "gmm", &value) == TE_OK && value == TE_EXPERTS_GMM);
    CHECK(te_backend_parse(te, "rope", "torch", &value) == TE_OK && value == TE_ROPE_TORCH);
    te_backend_parse(te, "linear", "tee", &value);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_backend_parse: linear is \"tee\"; torch, te, quack are possible; is \"te\" meant?");
    te_backend_parse(te, "compile_attn", "true", &value);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_backend_parse: field \"compile_attn\"");
    CHECK_STR(te_backend_name("dispatcher", TE_DISPATCHER_MOK), "mok");
    CHECK_STR(te_backend_name("attn", 0), "default");
    CHECK(strcmp(te_backend_name("attn", 99), "?") == 0 && strcmp(te_backend_name("compile_attn", 1), "?") == 0);
}

TE_TEST(backend_rules_rewrite_with_a_message) {
    static const char *const experts[] = {"te", "gmm", "torch", "torch_mm"}, *const dispatchers[] = {"torch", "deepep", "hybridep", "uccl_ep"};
    char text[256];
    te_ctx_desc desc = {.device = "cpu", .log = test__log, .log_level = TE_LOG_INFO};
    te_ctx *te = test_context_with(&desc);
    for (int e = 0; e < COUNT(experts); e++)
        for (int d = 0; d < COUNT(dispatchers); d++) {
            int before = logged("experts=torch_mm and dispatcher=torch are used");
            bool rewritten = e < 2 && d == 0;
            te_backend_config c;
            snprintf(text, sizeof text, "experts=%s,dispatcher=%s", experts[e], dispatchers[d]);
            test_case("%s", text);
            CHECK(validated(te, text, &c) == TE_OK);
            CHECK_STR(te_backend_name("experts", (int)c.experts), rewritten ? "torch_mm" : experts[e]);
            CHECK_STR(te_backend_name("dispatcher", (int)c.dispatcher), dispatchers[d]);
            CHECK_EQ_INT(logged("experts=torch_mm and dispatcher=torch are used") - before, rewritten);
        }
    test_case("enable_deepep");
    CHECK_EQ_INT(logged("enable_deepep"), 0);
    ACCEPTED("enable_deepep=true,dispatcher=hybridep,experts=gmm", c.dispatcher == TE_DISPATCHER_HYBRIDEP && c.experts == TE_EXPERTS_GMM && c.enable_deepep == TE_DEFAULT);
    ACCEPTED("enable_deepep=false,dispatcher=deepep,experts=gmm", c.dispatcher == TE_DISPATCHER_DEEPEP && c.experts == TE_EXPERTS_GMM && c.enable_deepep == TE_DEFAULT);
    ACCEPTED("enable_deepep=true,dispatcher=torch,experts=torch", c.dispatcher == TE_DISPATCHER_TORCH && c.experts == TE_EXPERTS_TORCH && c.enable_deepep == TE_DEFAULT);
    CHECK_EQ_INT(logged("enable_deepep is gone"), 3);
    test_case("rope_fusion");
    ACCEPTED("", c.rope_fusion == TE_OFF);
    ACCEPTED("rope_fusion=false", c.rope_fusion == TE_OFF);
    CHECK_EQ_INT(logged("rope_fusion"), 0);
    ACCEPTED("rope_fusion=true", c.rope_fusion == TE_OFF);
    CHECK_EQ_INT(logged("rope_fusion is turned off, as NeMo Automodel does"), 1);
    ACCEPTED("rope=quack,rope_fusion=true", c.rope_fusion == TE_OFF && c.rope == TE_ROPE_QUACK);
    CHECK(logged("rope=quack rotates by its own kernel") == 1 && logged("as NeMo Automodel does") == 1);
    ACCEPTED("rope_fusion=true,keep_rope_fusion=true", c.rope_fusion == TE_ON);
    ACCEPTED("keep_rope_fusion=true", c.rope_fusion == TE_OFF); /* no GPU */
    te_backend_set_capabilities(te, &all);
    ACCEPTED("keep_rope_fusion=true", c.rope_fusion == TE_ON);
    ACCEPTED("", c.rope_fusion == TE_OFF);
    te_backend_set_capabilities(te, NULL);
    CHECK(logged("as NeMo Automodel does") == 1);
    REFUSED("keep_rope_fusion=true,rope_fusion=true,cuda_graph=attn,attn=te,linear=torch,rms_norm=torch", TE_ERR_INVALID, "rope_fusion true");
}

static te_result no_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) { return (void)user, (void)te, (void)x, (void)op, TE_OK; }
static te_result no_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) { return (void)user, (void)te, (void)x, (void)out, TE_OK; }
static te_result no_broadcast(void *user, te_ctx *te, te_tensor *x, int root) { return (void)user, (void)te, (void)x, (void)root, TE_OK; }
static te_result no_barrier(void *user) { return (void)user, TE_OK; }
TE_TEST(backend_messages_come_from_the_first_rank) {
    te_ctx_desc desc = {.device = "cpu", .log = test__log, .log_level = TE_LOG_INFO};
    te_ctx *te = test_context_with(&desc);
    for (int rank = 1; rank >= 0; rank--) {
        te_group *group = te_group_create(te, &(te_group_desc){.rank = rank, .size = 2, .all_reduce = no_reduce, .all_gather = no_gather, .reduce_scatter = no_gather,
                                                               .broadcast = no_broadcast, .barrier = no_barrier});
        te_backend_config c = {.enable_deepep = TE_ON, .rope_fusion = TE_ON, .experts = TE_EXPERTS_GMM};
        REQUIRE_OK(te);
        CHECK(te_backend_config_validate(te, &c, group) == TE_OK && c.experts == TE_EXPERTS_TORCH_MM && c.enable_deepep == TE_DEFAULT);
        CHECK_EQ_INT(logged("enable_deepep is gone"), rank == 0);
        CHECK_EQ_INT(logged("are used"), rank == 0);
        CHECK_EQ_INT(logged("rope_fusion is turned off"), 2 - rank); /* that one from every rank */
        te_group_destroy(group);
    }
}

TE_TEST(backend_te_fp8_needs_a_backend) {
    te_ctx *te = test_context("cpu");
    ACCEPTED("", !c.has_te_fp8);
    ACCEPTED("te_fp8=block,linear=te,experts=te,dispatcher=deepep", c.has_te_fp8 && c.te_fp8.recipe == TE_FP8_BLOCK && c.experts == TE_EXPERTS_TE);
    ACCEPTED("te_fp8.recipe=mxfp8,linear=te", c.te_fp8.recipe == TE_FP8_MXFP8);
    REFUSED("te_fp8=current,linear=torch,experts=torch", TE_ERR_INVALID, "te_fp8 requires at least one TE backend, and linear is \"torch\" and experts \"torch\"");
    /* rule 8 comes first */
    REFUSED("te_fp8=current,linear=torch,experts=te,dispatcher=torch", TE_ERR_INVALID, "experts \"torch_mm\"");
    ACCEPTED("te_fp8=current,linear=te,experts=te,dispatcher=torch", c.has_te_fp8 && c.experts == TE_EXPERTS_TORCH_MM);
    ACCEPTED("te_fp8=current,linear=torch,experts=te,dispatcher=hybridep", c.experts == TE_EXPERTS_TE);
    REFUSED("te_fp8=curent,linear=te", TE_ERR_INVALID, "te_fp8 is \"curent\"; current, block, mxfp8 are possible; is \"current\" meant?");
    REFUSED("te_fp8.recip=block", TE_ERR_INVALID, "\"te_fp8.recip\" is no field of a te_backend_config; is \"te_fp8.recipe\" meant?");
    te_backend_config c = {.linear = TE_LINEAR_TE, .has_te_fp8 = true, .te_fp8 = {.recipe = TE_FP8_OBJECT}};
    te_backend_config_validate(te, &c, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fp8.recipe is TE_FP8_OBJECT and te_fp8.object NULL");
    te_recipe mine = te_recipe_delayed_scaling();
    c.te_fp8.object = &mine;
    CHECK(te_backend_config_validate(te, &c, NULL) == TE_OK && c.te_fp8.object == &mine);
    c.te_fp8.recipe = (te_fp8_recipe)4;
    te_backend_config_validate(te, &c, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fp8.recipe is 4");
    c.te_fp8.recipe = TE_FP8_BLOCK;
    te_backend_config_validate(te, &c, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fp8.recipe is \"block\" and te_fp8.object a recipe");
}

TE_TEST(backend_cuda_graph_and_mok_are_checked) {
    te_ctx *te = test_context("cpu");
    ACCEPTED("", c.cuda_graph.modules == 0);
    ACCEPTED("cuda_graph=te_dpa,attn=te", c.cuda_graph.modules == TE_CUDA_GRAPH_TE_DPA);
    ACCEPTED("cuda_graph.modules=attn + moe_router+moe_preprocess,attn=te,linear=torch,rms_norm=torch,dispatcher=hybridep",
             c.cuda_graph.modules == (TE_CUDA_GRAPH_ATTN | TE_CUDA_GRAPH_MOE_ROUTER | TE_CUDA_GRAPH_MOE_PREPROCESS));
    ACCEPTED("cuda_graph=", c.cuda_graph.modules == 0); /* the empty list */
    ACCEPTED("attn=te, cuda_graph.modules = \t,linear=te", c.cuda_graph.modules == 0 && c.linear == TE_LINEAR_TE);
    REFUSED("cuda_graph=attn+", TE_ERR_INVALID, "cuda_graph is \"\"; attn, te_dpa");
    REFUSED("cuda_graph=+", TE_ERR_INVALID, "cuda_graph is \"\"; attn, te_dpa");
    REFUSED("cuda_graph=,cuda_graph=attn", TE_ERR_INVALID, "cuda_graph is given twice");
    REFUSED("cuda_graph=mlp", TE_ERR_INVALID, "cuda_graph is \"mlp\"; attn, te_dpa, moe_router, moe_preprocess are possible");
    REFUSED("cuda_graph=te_dpa+te_dpa,attn=te", TE_ERR_INVALID, "cuda_graph has \"te_dpa\" twice");
    REFUSED("cuda_graph=attn+te_dpa,attn=te", TE_ERR_INVALID, "has attn and te_dpa");
    REFUSED("cuda_graph=attn,attn=sdpa", TE_ERR_INVALID, "has attn and attn is \"sdpa\"; attn=te is needed");
    REFUSED("cuda_graph=te_dpa,attn=sdpa", TE_ERR_INVALID, "has te_dpa and attn is \"sdpa\"");
    REFUSED("cuda_graph=attn,attn=te,linear=te,rms_norm=torch", TE_ERR_INVALID, "linear is \"te\"");
    REFUSED("cuda_graph=attn,attn=te,linear=torch,rms_norm=te", TE_ERR_INVALID, "rms_norm \"te\"");
    ACCEPTED("rope_fusion=true,cuda_graph=attn,attn=te,linear=torch,rms_norm=torch", c.rope_fusion == TE_OFF);
    REFUSED("cuda_graph=moe_preprocess,dispatcher=hybridep", TE_ERR_INVALID, "moe_preprocess without moe_router");
    REFUSED("cuda_graph=moe_router+moe_preprocess,dispatcher=deepep", TE_ERR_INVALID, "dispatcher is \"deepep\"; dispatcher=hybridep is needed");
    REFUSED("cuda_graph=moe_router,fake_balanced_gate=true", TE_ERR_INVALID, "fake_balanced_gate is true");
    te_backend_config c = {.cuda_graph = {.modules = 64}};
    te_backend_config_validate(te, &c, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "cuda_graph.modules is 64");
    /* FP8 inside of attention is not captured */
    te_recipe mine = te_recipe_current_scaling();
    c = (te_backend_config){.attn = TE_ATTN_TE, .linear = TE_LINEAR_TE, .has_te_fp8 = true, .te_fp8 = {.recipe = TE_FP8_OBJECT, .object = &mine}, .cuda_graph = {.modules = TE_CUDA_GRAPH_TE_DPA}};
    CHECK(te_backend_config_validate(te, &c, NULL) == TE_OK);
    mine.fp8_dpa = true;
    te_backend_config_validate(te, &c, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "the recipe of te_fp8 has fp8_dpa");

    ACCEPTED("dispatcher=mok,mok.fwd_num_comm_sms=16,mok.minibatch_size=512,mok.macrobatch_size=1024", c.mok.fwd_num_comm_sms == 16 && c.mok.macrobatch_size == 1024);
    REFUSED("mok.fwd_num_comm_sms=41", TE_ERR_INVALID, "mok.fwd_num_comm_sms is 41; a positive multiple of 2 is needed");
    REFUSED("mok.bwd_num_comm_sms=-2", TE_ERR_INVALID, "mok.bwd_num_comm_sms is -2");
    REFUSED("mok.fwd_num_comm_sms=true", TE_ERR_INVALID, "mok.fwd_num_comm_sms is \"true\"; a whole number is needed");
    REFUSED("mok.schedule_capacity_multiplier=inf", TE_ERR_INVALID, "a number is needed");
    c = (te_backend_config){.mok = {.schedule_capacity_multiplier = (double)INFINITY}};
    te_backend_config_validate(te, &c, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "mok.schedule_capacity_multiplier is inf");
    REFUSED("mok.minibatch_size=700", TE_ERR_INVALID, "mok.minibatch_size is 700; a positive multiple of 256");
    REFUSED("mok.minibatch_size=512,mok.macrobatch_size=700", TE_ERR_INVALID, "mok.macrobatch_size is 700; a positive multiple of 512");
    REFUSED("mok.all_gather_top_experts_chunk_bytes=24", TE_ERR_INVALID, "a positive multiple of 16");
}

TE_TEST(backend_config_is_written_as_it_is_read) {
    te_ctx *te = test_context("cpu");
    static const char *const texts[] = {
        "", "attn=te,linear=torch,rms_norm=torch,experts=gmm,dispatcher=hybridep,cuda_graph=attn+moe_router+moe_preprocess",
        "rope=quack,rope_fusion=true,keep_rope_fusion=true,dispatcher_num_sms=64,dispatcher_share_token_dispatcher=false,dispatcher_async_dispatch=true,mok.minibatch_size=512,"
        "mok.schedule_capacity_multiplier=0.1,enable_deepep=false,fake_balanced_gate=true,fake_gate_noise=0.3,enable_hf_state_dict_adapter=false,enable_fsdp_optimizations=true,"
        "te_fp8=mxfp8,gate_precision=bfloat16,compile_attn=true"};
    for (int i = 0; i < COUNT(texts); i++) {
        te_backend_config c, again;
        char text[1024], small[8];
        memset(&c, 0, sizeof(c));
        memset(&again, 0, sizeof(again));
        CHECK(te_backend_config_parse(te, texts[i], &c) == TE_OK);
        CHECK_EQ_INT(te_backend_config_print(&c, text, sizeof text), strlen(texts[i]));
        CHECK_MSG(strcmp(text, texts[i]) == 0, "\"%s\" is written as \"%s\"", texts[i], text);
        CHECK(te_backend_config_parse(te, text, &again) == TE_OK && memcmp(&c, &again, sizeof(c)) == 0);
        CHECK_EQ_INT(te_backend_config_print(&c, small, sizeof small), strlen(texts[i]));
        CHECK(strncmp(small, texts[i], 7) == 0);
        /* a validated config stays valid and the same */
        if (te_backend_config_validate(te, &c, NULL) == TE_OK) {
            again = c;
            CHECK(te_backend_config_validate(te, &again, NULL) == TE_OK && memcmp(&c, &again, sizeof(c)) == 0);
        }
        te_clear_error(te);
    }
}

/* A10. The file says how its lines are ordered: tools/golden/backends.py. */
TE_TEST(backend_rules_over_all_combinations) {
    static const int graphs[] = {0, TE_CUDA_GRAPH_ATTN, TE_CUDA_GRAPH_TE_DPA};
    te_ctx *te = test_context("cpu");
    char path[1024], pattern[32] = "";
    const char *here = strstr(__FILE__, "model/test_backend.c");
    int left = 0, cases = 0, wrong = 0;
    snprintf(path, sizeof path, "%.*sgolden/backends.txt", (int)(here - __FILE__), __FILE__);
    FILE *f = fopen(path, "r");
    REQUIRE(f != NULL);
    for (int graph = 0; graph < 3; graph++)
        for (int outer = 0; outer < 2 * 3 * 7 * 4; outer++) {
            if (left == 0 && fscanf(f, "%d %31s", &left, pattern) != 2) left = 0;
            CHECK_MSG(left > 0 && strlen(pattern) == 25, "the file ends early");
            for (int inner = 0; inner < 25 && left > 0; inner++, cases++) {
                te_backend_config c = {.cuda_graph = {.modules = graphs[graph]}, .has_te_fp8 = outer >= 84}, before;
                c.linear = (te_linear_backend)(1 + outer / 28 % 3);
                c.attn = (te_attn_backend)(1 + outer / 4 % 7);
                c.rms_norm = (te_rms_norm_backend)(1 + outer % 4);
                c.experts = (te_experts_backend)(1 + inner / 5);
                c.dispatcher = (te_dispatcher_backend)(1 + inner % 5);
                before = c;
                te_result result = te_backend_config_validate(te, &c, NULL);
                bool kept = c.experts == before.experts && c.dispatcher == before.dispatcher;
                bool torch = c.experts == TE_EXPERTS_TORCH_MM && c.dispatcher == TE_DISPATCHER_TORCH;
                const char *error = te_error(te);
                char got = result == TE_OK ? (kept ? '.' : torch ? 't' : '?') : strstr(error, "cuda_graph.modules has") ? '9' : strstr(error, "at least one TE backend") ? 'X' : '?';
                if (got != pattern[inner] && wrong++ < 5) {
                    char text[512];
                    te_backend_config_print(&before, text, sizeof text);
                    test_fail(__FILE__, __LINE__, "%s: %c, not %c (%s)", text, got, pattern[inner], error);
                }
                te_clear_error(te);
            }
            left--;
        }
    CHECK_EQ_INT(left, 0);
    CHECK_EQ_INT(cases, 3 * 2 * 3 * 7 * 4 * 25);
    fclose(f);
}

/* ---- FP8 of a whole model ---- */

TE_TEST(fp8_config_builds_its_recipe) {
    te_ctx *te = test_context("cpu");
    te_fp8_config c = {0};
    te_recipe storage, mine = te_recipe_nvfp4();
    CHECK(te_fp8_config_build_recipe(te, &c, &storage) == &storage && storage.kind == TE_RECIPE_CURRENT);
    c.recipe = TE_FP8_BLOCK;
    CHECK(te_fp8_config_build_recipe(te, &c, &storage) == &storage && storage.kind == TE_RECIPE_BLOCK);
    CHECK_EQ_INT(logged("mxfp8"), 0);
    c.recipe = TE_FP8_MXFP8;
    for (int i = 1; i <= 2; i++) {
        CHECK(te_fp8_config_build_recipe(te, &c, &storage) == &storage && storage.kind == TE_RECIPE_MXFP8);
        CHECK_EQ_INT(logged("te_fp8 mxfp8"), i);
    }
    c = (te_fp8_config){.recipe = TE_FP8_OBJECT, .object = &mine};
    CHECK(te_fp8_config_build_recipe(te, &c, &storage) == &mine);
    CHECK_OK(te);
    c.object = NULL;
    CHECK(!te_fp8_config_build_recipe(te, &c, &storage));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fp8_config_build_recipe: te_fp8.recipe is TE_FP8_OBJECT");
    CHECK(!te_fp8_config_build_recipe(te, NULL, &storage));
    CHECK_ERROR(te, TE_ERR_INVALID, "config is NULL");
    /* without TransformerEngine nothing is looked at */
    te_backend_set_capabilities(te, &cuda_only);
    CHECK(!te_fp8_config_build_recipe(te, &c, &storage));
    CHECK_OK(te);
    te_backend_set_capabilities(te, NULL);

    CHECK(te_fp8_config_parse(te, "mxfp8", false, &c) == TE_OK && c.recipe == TE_FP8_MXFP8);
    CHECK(te_fp8_config_parse(te, "blok", false, &c) == TE_ERR_INVALID && c.recipe == TE_FP8_MXFP8);
    CHECK_ERROR(te, TE_ERR_INVALID, "recipe is \"blok\"; current, block, mxfp8 are possible; is \"block\" meant?");
    CHECK(te_fp8_config_parse(te, "blok", true, &c) == TE_OK && c.recipe == TE_FP8_CURRENT);
    CHECK_OK(te);
}

TE_TEST(fp8_config_opens_a_region_or_leaves_all_as_it_is) {
    te_ctx *te = test_context("cpu");
    te_fp8_config c = {.recipe = TE_FP8_BLOCK}, bad = {.recipe = TE_FP8_OBJECT};
    te_recipe block = te_recipe_block_scaling();
    CHECK(te_fp8_maybe_autocast_begin(te, &c) == TE_OK && te_autocast_enabled(te));
    CHECK(te_fp8_maybe_autocast_end(te) == TE_OK && !te_autocast_enabled(te));
    CHECK(te_fp8_maybe_autocast_begin(te, NULL) == TE_OK && !te_autocast_enabled(te));
    CHECK(te_fp8_maybe_autocast_end(te) == TE_OK);
    te_backend_set_capabilities(te, &nothing);
    CHECK(te_fp8_maybe_autocast_begin(te, &c) == TE_OK && !te_autocast_enabled(te));
    CHECK(te_fp8_maybe_autocast_end(te) == TE_OK);
    /* a region outside goes on inside */
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &block});
    CHECK(te_fp8_maybe_autocast_begin(te, &c) == TE_OK && te_autocast_enabled(te));
    CHECK(te_fp8_maybe_autocast_end(te) == TE_OK && te_autocast_enabled(te));
    te_autocast_end(te);
    te_backend_set_capabilities(te, NULL);
    CHECK(te_fp8_maybe_autocast_begin(te, &bad) == TE_ERR_INVALID && !te_autocast_enabled(te));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fp8.object NULL");
    CHECK(te_fp8_maybe_autocast_begin(NULL, &c) == TE_ERR_STATE);
}
