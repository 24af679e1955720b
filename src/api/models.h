/* api/models.h: models that exist: language models of the Llama kind, and the folders that they are published in.
 *
 * Parameters have the names of a Llama's files ("model.layers.0.self_attn.q_proj.weight"), so te_module_visit_tensors,
 * optimizers and checkpoints speak of them by these. Files of other families may have other names, or several of the
 * parameters in one tensor: te_hf_open takes these apart, and te_hf_save puts them together again. Hidden states are
 * [b, s, hidden], ids [b, s]. */

/* How a layer rotates queries and keys. */
typedef struct te_lm_rotary {
    float base;                     /* 0 => 10000 */
    int rotary_dim;                 /* the first so many channels of a head are rotated, an even number; 0 => all */
    te_rope_scaling scaling;        /* for longer contexts; 0 => none. The lists of TE_ROPE_LONGROPE are copied */
} te_lm_rotary;

/* A language model: embedding, num_hidden_layers layers of attention and a gated MLP, each behind an RMSNorm, a norm,
 * and a product with the vocabulary.
 *
 *     model.embed_tokens                 Embedding
 *     model.layers.N                     DecoderLayer
 *         input_layernorm, post_attention_layernorm[, pre_feedforward_layernorm, post_feedforward_layernorm]   RMSNorm
 *         self_attn                      DecoderAttention: q_proj, k_proj, v_proj, o_proj (Linear)[, q_norm, k_norm
 *                                        (RMSNorm)], sdpa (SDPA)
 *         mlp                            MLP: gate_proj, up_proj, down_proj (Linear)
 *         block_sparse_moe               with experts, in place of mlp: MoE: gate (Gate), experts (LinearExperts):
 *                                        E (MLP): w1 (gate), w3 (up), w2 (down), and w1, w3, w2 (GroupedLinear)
 *     model.norm                         RMSNorm
 *     lm_head                            Linear, unless the embedding's table is used for it
 *
 * Under autocast the projections are quantized; the embedding, the gate of experts and the product with the vocabulary
 * stay in high precision, and are not stored quantized either.
 *
 * Experts run together, and sizes that the gate decides stay on the device, so te_graph_begin can record such a model.
 * Each of the three GroupedLinear multiplies the rows of all experts by the weights of the Linear of its name in each:
 * those hold the parameters, and a forward or a recipe of their own is not asked; set it on the GroupedLinear.
 * Zero-initialised. */
typedef struct te_causal_lm_desc {
    int64_t vocab_size, hidden_size, intermediate_size; /* rows of the embedding, their size, and the size inside the
                                                         * MLP */
    int num_hidden_layers;       /* at least 1 */
    int num_attention_heads, num_key_value_heads;        /* the second divides the first; 0 => as many */
    int64_t head_dim;                                    /* 0 => hidden_size / num_attention_heads */
    te_activation activation;    /* of the MLP, gated; 0 => TE_SWIGLU */
    float rms_norm_eps;          /* 0 => 1e-5 */
    bool zero_centered_gamma;    /* norms multiply by 1 + weight */
    bool qkv_bias, o_bias, mlp_bias; /* biases of q_proj, k_proj and v_proj; of o_proj; of the MLP's products */
    bool qk_norm;                /* an RMSNorm of each head of queries and keys, before the rotation */
    bool feedforward_norms;      /* norms behind the attention and on both sides of the MLP: residuals are added to what
                                  * is normalised */
    bool tie_word_embeddings;    /* no lm_head: the embedding's table */
    float embedding_scale;       /* factor of the embedding's rows, rounded to their format; 0 => 1 */
    float softmax_scale;         /* 0 => 1 / sqrt(head_dim) */
    float attn_logit_softcapping, final_logit_softcapping; /* x becomes cap * tanh(x / cap), of scores and of logits; 0
                                                            * => not */
    float attention_dropout;     /* probability, in training; 0 => none */
    int64_t sliding_window;      /* keys that a layer with a window sees, the query's own included; 0 => no windows */
    const bool *sliding_layers;  /* [num_hidden_layers]: which layers have it; NULL => all. Copied */
    te_lm_rotary rotary, sliding_rotary; /* of layers without and with a window */
    int num_local_experts, num_experts_per_tok; /* experts of each layer, up to TE_MAX_GEMMS, and how many of them a
                                                 * token goes to; 0 => none */
    int64_t moe_intermediate_size; /* the size inside an expert; 0 => intermediate_size */
    te_switch norm_topk_prob;    /* a token's experts weigh the softmax of the scores of these alone; off: of the scores
                                  * of all experts; 0 => on */
    const bool *dense_layers;    /* [num_hidden_layers]: which layers have an MLP in place of experts; NULL => none.
                                  * Copied */
    te_dtype params_dtype;       /* of parameters and hidden states: f32, f16 or bf16; 0 => bf16 */
    te_params_device device;     /* of parameters; 0 => the context's */
    te_init init;                /* of weights */
    const char *name;            /* copied; NULL => "causal_lm" */
} te_causal_lm_desc;
/* Makes such a model. Forward: ids i32 or i64 [b, s], at least one, -> logits [b, s, vocab_size] in params_dtype.
 * te_module_state gives its te_causal_lm_desc, defaults filled in and without its pointers. NULL with TE_ERR_INVALID
 * for sizes that do not fit. Owned by the caller. */
TE_API te_module *te_causal_lm_create(te_ctx *te, const te_causal_lm_desc *desc);

/* Makes room for the keys and values of `max_length` positions of `batch` sequences, for all layers of a model
 * (te_causal_lm_create, te_hf_open), in its format. A forward with args->kv_cache takes its ids as those that follow on
 * the cached ones, and adds their keys and values: recording must be off (te_no_grad_begin), and the length then is
 * within max_length (TE_ERR_INVALID).
 *
 * With TE_ROPE_LONGROPE sequences of more than original_max_position_embeddings rotate all their keys in another way. A
 * call that would grow a cache beyond that length is refused (TE_ERR_STATE): truncate the cache to 0 and give all ids
 * again, as transformers' generate does. Owned by the caller: te_kv_cache_destroy. */
TE_API te_kv_cache *te_kv_cache_create(te_module *model, int64_t batch, int64_t max_length);
/* Releases it. NULL is fine. */
TE_API void te_kv_cache_destroy(te_kv_cache *c);
/* The number of positions that it holds. */
TE_API int64_t te_kv_cache_length(const te_kv_cache *c);
/* Forgets all positions from `length` on: 0 starts anew. TE_ERR_INVALID for more than there are. */
TE_API te_result te_kv_cache_truncate(te_kv_cache *c, int64_t length);

/* Options of te_hf_open; zero-initialised. */
typedef struct te_hf_desc {
    te_dtype params_dtype; /* f32, f16 or bf16, which the file's formats are converted to; 0 => that of the embedding in
                            * the file */
} te_hf_desc;
/* Opens a model in the folder layout of Hugging Face transformers: config.json, and model.safetensors or the shards
 * that model.safetensors.index.json lists. Its model_type is one of llama, mistral, mixtral, qwen2, qwen3, gemma,
 * gemma2, gemma3_text, gemma3, phi3, qwen3_moe. The model is one of te_causal_lm_create; inside
 * te_quantized_model_init_begin its projections are stored quantized. desc may be NULL. Owned by the caller:
 * te_module_destroy. It allocates and syncs.
 *
 * Of a gemma3, Gemma 3 with vision, the text opens. The tensors of its vision tower and projector are kept as bytes in
 * host memory as long as the model, for te_hf_save.
 *
 * Nothing in the folder is trusted. NULL, and the message names the file, the key or tensor, and both values: TE_ERR_IO
 * for what cannot be read, TE_ERR_FORMAT for damage and for files that contradict each other (a tensor that is missing,
 * or too many, or not where the index says), TE_ERR_SHAPE for shapes that are not those of config.json,
 * TE_ERR_UNSUPPORTED for a model that te.h would compute wrongly, and for weights in pytorch_model.bin alone. The files
 * that te_hf_save takes along are read as well, and kept as long as the model; each has 256 MiB at most (TE_ERR_IO). */
TE_API te_module *te_hf_open(te_ctx *te, const char *folder, const te_hf_desc *desc);
/* Writes such a folder, which is made if it is missing: config.json as te_hf_open read it, and all parameters of
 * `model` into model.safetensors, quantized ones decoded, under the names and in the cuts of the files that they came
 * from. Tensors of these files that are no parameters of the model (gemma3) are written as they were. Parameters that
 * are one tensor there have memory twice until they are written. Byte for byte go those files along that the folder
 * had when te_hf_open read it: generation_config.json, tokenizer.json, tokenizer_config.json,
 * special_tokens_map.json, added_tokens.json, vocab.json, merges.txt, tokenizer.model, tokenizer.model.v3,
 * tekken.json, chat_template.jinja, chat_template.json, preprocessor_config.json, processor_config.json. It may be
 * the same folder. TE_ERR_INVALID for a model that te_hf_open has not made, TE_ERR_STATE for one that has lost a part
 * of such a tensor; else as te_safetensors_write. Syncs. Each file is replaced whole, the weights first, then
 * config.json: if that cannot be written, the folder has new weights beside its old one. Shards and other files that
 * were there stay; the shards are not read any more. te_lora_save names adapters by the parameters of the model,
 * which peft finds in families whose files have these names. */
TE_API te_result te_hf_save(te_module *model, const char *folder);
