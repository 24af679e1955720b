/* lm/families.c: a table with one row of data for each family of language models that te_hf_open supports. A row has:
 * - the keys that config.json may have, with the defaults of the transformers library
 * - the traits of the model
 * - the rules that convert tensors of the files to parameters
 * Other files of lm/ do not mention a family by name. */

/* A rule that maps tensors of a file to parameters of the model. The field `file` lists the names of the tensors, and
 * the field `model` lists the names of the parameters. The rows of all these tensors, one after the other, equal the
 * rows of all these parameters. So a rule can rename, split or join tensors. te_hf_save applies the rule in reverse.
 *
 * "@" stands for any text, which is the same in `file` and `model`.
 * "*" stands for a number. If `file` and `model` both have "*", the number is the same in both. If only one of them has
 * "*", the number takes the values 0, 1, 2 ... The tensor or parameter without "*" then has an additional first
 * dimension, with one entry for each value of the number.
 * Tensors of a file that make up one parameter have equal sizes. */
typedef struct te__lm_rule {
    const char *file[3], *model[3];
    bool transposed; /* the tensor in the file is the transpose of the parameter */
} te__lm_rule;
/* The last rule of each list. It keeps every name that no earlier rule matches. */
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
/* Rules for the stacked parameters that transformers 5 writes with save_pretrained(save_original_format=False). */
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

/* Describes a model that contains a text model and other parts. Its config.json has the keys of the text model in
 * "text_config". */
typedef struct te__lm_inner {
    const char *type;    /* the model_type of the text model; text_config may lack it */
    const char *kept[4]; /* prefixes of the names of tensors outside the text model; te_hf_save writes these tensors
                          * unchanged */
} te__lm_inner;
static const te__lm_inner te__lm_gemma3_inner = {
    "gemma3_text", {"vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."}};

enum { TE__LM_LAYOUTS = 2 };
typedef struct te__lm_family {
    const char *model_type;
    const char *reads;  /* JSON: keys with the defaults of this family (null: no default). It lists the keys of
                         * te__lm_own_keys that the family reads, and the keys of te__lm_keys whose default differs from
                         * te__lm_defaults. */
    const char *always; /* JSON: the traits of the family (te__lm_traits), and keys whose values override those in
                         * config.json */
    const te__lm_rule *layouts[TE__LM_LAYOUTS]; /* each entry is the list of rules for one way to name the tensors in
                                                 * files; NULL: no further entry */
    const te__lm_inner *inner;                  /* NULL: the whole model is a text model */
} te__lm_family;

#define TE__LM_TEXT(...) #__VA_ARGS__
/* The defaults of all families. A default is used if neither the config.json nor `reads` of the family has the key. */
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

/* Related families that te.h does not support. An entry has the model_type, the reason, and a hint at a supported
 * family. */
static const char *const te__lm_others[][3] = {
    {"llama4", ", Llama 4 with vision, chunked attention and experts of its own", ". Of Llama, 1 to 3 open (llama)"},
    {"llama4_text", ", Llama 4 with chunked attention and experts of its own", ". Of Llama, 1 to 3 open (llama)"}};

/* Returns the entry of te__lm_families for `model_type`, or NULL if there is none. */
static const te__lm_family *te__lm_family_of(const char *model_type) {
    int i = 0;
    while (i < TE__COUNT(te__lm_families) && strcmp(te__lm_families[i].model_type, model_type) != 0) i++;
    return i < TE__COUNT(te__lm_families) ? &te__lm_families[i] : NULL;
}
