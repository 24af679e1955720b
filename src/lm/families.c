/* lm/families.c: the families of language models that open, a row each, which is data alone: the keys that its
 * config.json may have and what transformers takes where they are missing, what its models are made of, and how the
 * tensors of its files become the model's parameters. The other parts of lm/ read rows; they know no family by name. */

/* Tensors of a file and the parameters of the model that they are: the rows of `file`, one tensor behind the other, are
 * the rows of `model`. So a rule renames (one to one), splits (one tensor to several parameters), joins or stacks
 * (several to one), and read the other way round it undoes that for te_hf_save. In names "@" is any text, the same on
 * both sides, and "*" a number: the same on both sides, or, where one side alone has it, all of them in order, in which
 * case the tensor of the other side has one more dimension in front. Parts of a single parameter are of equal size. */
typedef struct te__lm_rule {
    const char *file[3], *model[3];
    bool transposed; /* the file has columns for rows */
} te__lm_rule;
/* The last rule of each list. */
#define TE__LM_OTHERS {{"@"}, {"@"}, false}

static const te__lm_rule te__lm_same_names[] = {TE__LM_OTHERS};
static const te__lm_rule te__lm_phi3_names[] = {
    {{"@.qkv_proj.weight"}, {"@.q_proj.weight", "@.k_proj.weight", "@.v_proj.weight"}, false},
    {{"@.gate_up_proj.weight"}, {"@.gate_proj.weight", "@.up_proj.weight"}, false},
    TE__LM_OTHERS};
static const te__lm_rule te__lm_qwen3_moe_names[] = {
    {{"@.mlp.gate.weight"}, {"@.block_sparse_moe.gate.weight"}, false},
    {{"@.mlp.experts.*.gate_proj.weight"}, {"@.block_sparse_moe.experts.*.w1.weight"}, false},
    {{"@.mlp.experts.*.up_proj.weight"}, {"@.block_sparse_moe.experts.*.w3.weight"}, false},
    {{"@.mlp.experts.*.down_proj.weight"}, {"@.block_sparse_moe.experts.*.w2.weight"}, false},
    TE__LM_OTHERS};
/* The parameters of transformers 5 as they are: save_pretrained(save_original_format=False). */
static const te__lm_rule te__lm_stacked_names[] = {
    {{"@.mlp.gate.weight"}, {"@.block_sparse_moe.gate.weight"}, false},
    {{"@.mlp.experts.gate_up_proj"},
     {"@.block_sparse_moe.experts.*.w1.weight", "@.block_sparse_moe.experts.*.w3.weight"},
     false},
    {{"@.mlp.experts.down_proj"}, {"@.block_sparse_moe.experts.*.w2.weight"}, false},
    TE__LM_OTHERS};
static const te__lm_rule te__lm_gemma3_names[] = {{{"language_model.model.@"}, {"model.@"}, false},
                                                  {{"language_model.lm_head.@"}, {"lm_head.@"}, false},
                                                  TE__LM_OTHERS};
static const te__lm_rule te__lm_gemma3_new_names[] = {{{"model.language_model.@"}, {"model.@"}, false}, TE__LM_OTHERS};

/* A model of text within a larger one: its keys are those of text_config. */
typedef struct te__lm_inner {
    const char *type;    /* the family of the text, whose row tells what it is made of; "text_config" may name it */
    const char *kept[4]; /* how the names of the other tensors begin, which te_hf_save writes as they were */
} te__lm_inner;
static const te__lm_inner te__lm_gemma3_inner = {
    "gemma3_text", {"vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."}};

enum { TE__LM_LAYOUTS = 2 };
typedef struct te__lm_family {
    const char *model_type;
    const char *reads;  /* the keys that this family reads beside those that all read, and for each what it is where it
                         * is missing; null: nothing. Keys of all are here where they have another default */
    const char *always; /* keys that have this value whatever the file says, and traits (te__lm_traits) */
    const te__lm_rule *layouts[TE__LM_LAYOUTS]; /* names that its files may have; NULL: no more */
    const te__lm_inner *inner;                  /* NULL: the whole is a model of text */
} te__lm_family;

#define TE__LM_TEXT(...) #__VA_ARGS__
/* What all families have where their row says nothing else. */
static const char te__lm_defaults[] = TE__LM_TEXT({"rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu"});
static const te__lm_family te__lm_families[] = {
    {"llama", TE__LM_TEXT({"attention_bias": false, "mlp_bias": false}), TE__LM_TEXT({"null_kv_heads": true}),
     {te__lm_same_names, NULL}, NULL},
    {"mistral", TE__LM_TEXT({"sliding_window": 4096}), "{}", {te__lm_same_names, NULL}, NULL},
    {"mixtral",
     TE__LM_TEXT({"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": null, "router_jitter_noise": 0}),
     TE__LM_TEXT({"experts": true}), {te__lm_same_names, te__lm_stacked_names}, NULL},
    {"qwen2",
     TE__LM_TEXT({"num_key_value_heads": 32, "use_sliding_window": false, "sliding_window": 4096,
                  "max_window_layers": 28}),
     TE__LM_TEXT({"qkv_bias": true, "null_kv_heads": true, "lists_layer_types": true}), {te__lm_same_names, NULL},
     NULL},
    {"qwen3",
     TE__LM_TEXT({"num_key_value_heads": 32, "head_dim": 128, "attention_bias": false, "use_sliding_window": false,
                  "sliding_window": 4096, "max_window_layers": 28}),
     TE__LM_TEXT({"qk_norm": true, "null_kv_heads": true, "lists_layer_types": true}), {te__lm_same_names, NULL}, NULL},
    {"gemma",
     TE__LM_TEXT({"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "attention_bias": false,
                  "tie_word_embeddings": true}),
     TE__LM_TEXT({"zero_centered_gamma": true, "scaled_embedding": true, "gelu_is_tanh": true}),
     {te__lm_same_names, NULL}, NULL},
    {"gemma2",
     TE__LM_TEXT({"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false,
                  "tie_word_embeddings": true, "sliding_window": 4096, "query_pre_attn_scalar": 256,
                  "attn_logit_softcapping": 50, "final_logit_softcapping": 30}),
     TE__LM_TEXT({"zero_centered_gamma": true, "scaled_embedding": true, "feedforward_norms": true,
                  "lists_layer_types": true, "sliding_window_pattern": 2}),
     {te__lm_same_names, NULL}, NULL},
    {"gemma3_text",
     TE__LM_TEXT({"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                  "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false, "tie_word_embeddings": true,
                  "rope_theta": 1e6, "rope_local_base_freq": 10000, "sliding_window": 4096,
                  "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "attn_logit_softcapping": null,
                  "final_logit_softcapping": null}),
     TE__LM_TEXT({"zero_centered_gamma": true, "scaled_embedding": true, "feedforward_norms": true, "qk_norm": true,
                  "lists_layer_types": true, "rope_by_layer_type": true, "uncapped_scores": true}),
     {te__lm_same_names, NULL}, NULL},
    {"gemma3", TE__LM_TEXT({"tie_word_embeddings": true}), TE__LM_TEXT({"uncapped_logits": true}),
     {te__lm_gemma3_names, te__lm_gemma3_new_names}, &te__lm_gemma3_inner},
    {"phi3",
     TE__LM_TEXT({"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
                  "sliding_window": null, "resid_pdrop": 0}),
     TE__LM_TEXT({"null_kv_heads": true, "partial_rotary": true, "longrope_alone": true}), {te__lm_phi3_names, NULL},
     NULL},
    {"qwen3_moe",
     TE__LM_TEXT({"num_key_value_heads": 4, "attention_bias": false, "use_sliding_window": false,
                  "sliding_window": 4096, "num_local_experts": 128, "num_experts_per_tok": 8,
                  "moe_intermediate_size": 768, "norm_topk_prob": false, "decoder_sparse_step": 1}),
     TE__LM_TEXT({"qk_norm": true, "experts": true, "lists_dense_layers": true}),
     {te__lm_qwen3_moe_names, te__lm_stacked_names}, NULL},
};

/* Relatives of these that te.h does not compute: model_type, why, a way to a model that opens. */
static const char *const te__lm_others[][3] = {
    {"llama4", ", Llama 4 with vision, chunked attention and experts of its own", ". Of Llama, 1 to 3 open (llama)"},
    {"llama4_text", ", Llama 4 with chunked attention and experts of its own", ". Of Llama, 1 to 3 open (llama)"}};

/* The row of that model_type; NULL: none. */
static const te__lm_family *te__lm_family_of(const char *model_type) {
    int i = 0;
    while (i < TE__COUNT(te__lm_families) && strcmp(te__lm_families[i].model_type, model_type) != 0) i++;
    return i < TE__COUNT(te__lm_families) ? &te__lm_families[i] : NULL;
}
