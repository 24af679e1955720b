/* api/models.h: creates, opens and saves published language models of the Llama kind, in folders with the Hugging Face
 * layout.
 *
 * Parameters are named as in the files of Llama ("model.layers.0.self_attn.q_proj.weight"), whatever the model's
 * family. Hidden states are [b, s, hidden], ids [b, s]. */

/* The rotary embedding of a layer's queries and keys. */
typedef struct te_lm_rotary {
    float base;                     /* 0 => 10000 */
    int rotary_dim;                 /* number of rotated channels of a head, the first ones; even; 0 => all */
    te_rope_scaling scaling;        /* changes frequencies for longer contexts; 0 => unchanged. The lists
                                     * short_factor and long_factor are copied */
} te_lm_rotary;

/* How the ranks of a tp_group share a language model, beside heads and MLPs; zero-initialised. Without several ranks in
 * tp_group nothing here has an effect. All ranks give the same options. */
typedef struct te_lm_parallel_options {
    te_switch vocab_parallel; /* on: the ranks share the vocabulary. Each has vocab_size / size rows of the embedding
                               * and of lm_head, and its columns of the logits; they must divide vocab_size. Off: each
                               * has the whole. 0 => on if they divide vocab_size, else off. The module lm_head by
                               * itself gives this rank's columns. Megatron: always on, and pads the vocabulary */
    bool parallel_output;     /* with a shared vocabulary, a forward returns this rank's columns of the logits, for
                               * te_cross_entropy, which never gathers them: dist_process_group is
                               * te_causal_lm_logits_group. Calls with kv_cache return all columns. false => all calls
                               * do, gathered from the ranks, for readers that know nothing of ranks. Megatron's
                               * default: true */
    bool sequence_parallel;   /* between the products of a layer a rank has its part of the b * s tokens alone: norms,
                               * experts and residuals are not computed on all ranks, and their activations take a
                               * size-th of the memory. The ranks must divide s. Hidden states of layers are then
                               * [b, s / size, hidden], whose rows are those from rank * b * s / size on. Calls with
                               * kv_cache run without, with the same result up to rounding. Gradients of norms, of
                               * experts, of biases of o_proj and down_proj, and of an embedding and lm_head that are
                               * whole on each rank, are then parts too: sum them over the ranks before
                               * te_optimizer_step (te_tensor_sequence_parallel) */
    bool ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad; /* those of
                               * te_parallel_options, for all projections, and lm_head */
} te_lm_parallel_options;

/* A language model: an embedding, num_hidden_layers layers, a final RMSNorm and an lm_head. Each layer has attention
 * and a gated MLP, with an RMSNorm in front of each. Zero-initialised.
 *
 *     model.embed_tokens                 Embedding
 *     model.layers.N                     DecoderLayer
 *         input_layernorm, post_attention_layernorm[, pre_feedforward_layernorm, post_feedforward_layernorm]   RMSNorm
 *         self_attn                      DecoderAttention: q_proj, k_proj, v_proj, o_proj (Linear)[, q_norm, k_norm
 *                                        (RMSNorm)], sdpa (SDPA)
 *         mlp                            MLP: gate_proj, up_proj, down_proj (Linear)
 *         block_sparse_moe               MoE, in place of mlp in a model with experts. Its children are gate (Gate) and
 *                                        experts (LinearExperts). `experts` has an MLP for each expert, named 0, 1 ..,
 *                                        with w1 (gate), w3 (up) and w2 (down). It also has three GroupedLinears: w1,
 *                                        w3 and w2
 *     model.norm                         RMSNorm
 *     lm_head                            Linear, unless the embedding's table is used for it
 *
 * Under autocast the projections are quantized, and with quantized_lm_head lm_head too. The embedding, the gate of
 * experts and, without quantized_lm_head, lm_head stay in high precision, and are never stored quantized.
 *
 * All experts run in three grouped GEMMs. Group sizes stay on the device, so a capture (te_graph_begin) can record the
 * GEMMs. Each GroupedLinear (w1, w3, w2) uses the weights of all experts' Linears of its name. Those Linears are never
 * run: set a recipe or a forward on the GroupedLinear. */
typedef struct te_causal_lm_desc {
    int64_t vocab_size, hidden_size, intermediate_size; /* rows of the embedding; size of a hidden state; inner size of
                                                         * the MLP */
    int num_hidden_layers;       /* at least 1 */
    int num_attention_heads, num_key_value_heads;        /* numbers of query heads, and of key and value heads. The
                                                          * second divides the first; 0 => num_attention_heads */
    int64_t head_dim;                                    /* 0 => hidden_size / num_attention_heads */
    te_activation activation;    /* a gated activation, for the MLP; 0 => TE_SWIGLU */
    float rms_norm_eps;          /* 0 => 1e-5 */
    bool zero_centered_gamma;    /* norms multiply by 1 + weight */
    bool qkv_bias, o_bias, mlp_bias; /* biases of q_proj, k_proj and v_proj; of o_proj; of the MLP's projections */
    bool qk_norm;                /* an RMSNorm of each query and key head, before the rotation */
    bool feedforward_norms;      /* true => a layer has four norms: before and after the attention, and before and after
                                  * the MLP. A norm after attention or MLP is applied before the residual is added */
    bool tie_word_embeddings;    /* true => the model has no lm_head, and computes logits with the embedding's table */
    bool quantized_lm_head;      /* true => lm_head is quantized as the projections are, and stored quantized with them;
                                  * not with tie_word_embeddings. A decoded token reads fewer bytes, and logits are less
                                  * exact. false => it stays in high precision */
    float embedding_scale;       /* factor of the embedding's rows, rounded to the rows' format; 0 => 1 */
    float softmax_scale;         /* 0 => 1 / sqrt(head_dim) */
    float attn_logit_softcapping, final_logit_softcapping; /* cap of scores; cap of logits: x becomes cap * tanh(x /
                                                            * cap); 0 => no cap */
    float attention_dropout;     /* probability, in training; 0 => none */
    int64_t sliding_window;      /* number of keys that a query sees in a layer with a window, its own included; 0 => no
                                  * windows */
    const bool *sliding_layers;  /* [num_hidden_layers]: true for layers with a window; NULL => all layers have a
                                  * window. Copied */
    te_lm_rotary rotary, sliding_rotary; /* rotary embedding of layers without a window, and of layers with a window */
    int num_local_experts, num_experts_per_tok; /* num_local_experts: number of experts in each layer, at most
                                                 * TE_MAX_GEMMS; 0 => no experts. num_experts_per_tok: number of experts
                                                 * chosen for each token */
    int64_t moe_intermediate_size; /* inner size of an expert; 0 => intermediate_size */
    te_switch norm_topk_prob;    /* on: router weights are a softmax over the chosen experts; off: over all experts; 0
                                  * => on */
    const bool *dense_layers;    /* [num_hidden_layers]: true for layers with an MLP instead of experts; NULL => none.
                                  * Copied */
    /* Ranks that share the model (borrowed for its lifetime; te_dist has these groups). NULL => one rank. All ranks
     * make the same calls, with the same ids, except as said here. Sizes above are those of the whole model. */
    te_group *tp_group;          /* they share the heads of attention and the columns of the MLP's inner size, and
                                  * divide num_attention_heads, num_key_value_heads and intermediate_size; and the
                                  * vocabulary (parallel). Norms and experts are whole on each. Sum the gradients of
                                  * q_norm and k_norm over them before te_optimizer_step
                                  * (te_tensor_sequence_parallel) */
    te_lm_parallel_options parallel; /* how the ranks of tp_group share the vocabulary, and tokens between products */
    te_group *cp_group;          /* they share each sequence: ids and logits of a rank are its chunks
                                  * (te_get_batch_on_this_cp_rank, TE_BSHD). No caches */
    te_group *ep_group;          /* rank r has the experts r * E / n to (r + 1) * E / n - 1 of E, and n divides E. They
                                  * have ids of their own, in any number, and exchange tokens; the host waits for their
                                  * number (te_set_max_dispatch_tokens: it does not) */
    te_dtype params_dtype;       /* format of parameters and hidden states: f32, f16 or bf16; 0 => bf16 */
    te_params_device device;     /* where parameters are allocated; 0 => the context's device */
    te_init init;                /* initial values of weights */
    const char *name;            /* copied; NULL => "causal_lm" */
} te_causal_lm_desc;
/* Creates a CausalLM, owned by the caller. Its forward takes ids, i32 or i64 [b, s] (not empty), and returns logits [b,
 * s, vocab_size] in params_dtype; with logits_to_keep, [b, logits_to_keep, vocab_size]: a call that only needs the next
 * token saves the product with lm_head for all other positions, except without a cache under
 * parallel.sequence_parallel. TE_ERR_INVALID unless 0 <= logits_to_keep <= s.
 * Of these columns parallel.parallel_output leaves this rank's. te_module_state returns the te_causal_lm_desc with
 * defaults filled in (parallel.vocab_parallel is TE_ON or TE_OFF) and all pointers but those of groups NULL.
 * TE_ERR_INVALID if sizes contradict each other, or for quantized_lm_head with tie_word_embeddings. */
TE_API te_module *te_causal_lm_create(te_ctx *te, const te_causal_lm_desc *desc);
/* Returns the ranks that share the columns of the logits that a call of the CausalLM m without kv_cache returns, for
 * te_cross_entropy_desc.dist_process_group (borrowed); NULL if a call returns all columns, and for other modules. */
TE_API te_group *te_causal_lm_logits_group(const te_module *m);

/* Options of te_kv_cache_create_with; zero-initialised. */
typedef struct te_kv_cache_desc {
    int64_t batch;      /* number of sequences; at least 1 */
    int64_t max_length; /* number of positions of each; at least 1 */
    te_dtype dtype;     /* 0, or the model's format => keys and values as they are. e4m3 => codes, with a factor for
                         * each head of each position (te_op_copy_to_kv_cache): half of bf16's memory, and one byte a
                         * head, and attention reads as much less. Nothing is calibrated. Attention always reads what
                         * the cache has, in a long step as well. TE_ERR_DTYPE for other formats */
} te_kv_cache_desc;
/* Allocates a KV cache in the model's format, for `max_length` positions of `batch` sequences in all layers. `model`
 * was made by te_causal_lm_create or te_hf_open. The caller owns the cache and must call te_kv_cache_destroy.
 * TE_ERR_STATE inside a capture. te_kv_cache_create_with has more options.
 * A forward with args->kv_cache treats its ids as the continuation of the cached positions, and appends their keys and
 * values. TE_ERR_INVALID if the new length exceeds max_length. TE_ERR_STATE if gradients are enabled
 * (te_no_grad_begin).
 *
 * With TE_ROPE_LONGROPE, a forward that would extend the cache beyond original_max_position_embeddings gives
 * TE_ERR_STATE: longer sequences rotate all keys with long_factor, but cached keys keep their rotation. Truncate the
 * cache to 0 and give all ids again, as transformers' generate does.
 *
 * A step with a cache can be captured once, and launched for each token (te_graph_begin), because the positions are in
 * device memory and advance with the step:
 *
 *     step();                               // forward_with of the newest id, te_argmax, te_tensor_copy to that id
 *     te_graph_begin(te);
 *     step();
 *     te_graph *graph = te_graph_end(te);
 *     while (te_graph_launch(graph) == TE_OK) te_tensor_to_host(id, &ids[n++]);
 *
 * te_kv_cache_length grows with each launch, and te_kv_cache_truncate may be called between two launches. A launch of
 * up to 16 new tokens has the bits of a call. If a captured step has more tokens, or the cache was empty at the
 * capture, attention reads the lengths from device memory and may run another kernel than a call does, so the last
 * bits may differ. A launch can return these errors, before anything runs:
 * TE_ERR_INVALID if the length would exceed max_length.
 * TE_ERR_STATE if the cache was destroyed.
 * TE_ERR_STATE if TE_ROPE_LONGROPE or TE_ROPE_DYNAMIC rotates differently than at the length of the capture.
 * A capture is refused if the module `sdpa` has a forward of its own. */
TE_API te_kv_cache *te_kv_cache_create(te_module *model, int64_t batch, int64_t max_length);
TE_API te_kv_cache *te_kv_cache_create_with(te_module *model, const te_kv_cache_desc *desc);
/* Destroys a KV cache. `c` may be NULL. */
TE_API void te_kv_cache_destroy(te_kv_cache *c);
/* Returns the number of cached positions; 0 for NULL. */
TE_API int64_t te_kv_cache_length(const te_kv_cache *c);
/* Drops all cached positions except the first `length`; 0 empties the cache. TE_ERR_INVALID if `length` is negative or
 * above the number of cached positions. TE_ERR_STATE inside a capture. */
TE_API te_result te_kv_cache_truncate(te_kv_cache *c, int64_t length);

/* Options of te_hf_open; zero-initialised. */
typedef struct te_hf_desc {
    te_dtype params_dtype; /* format of the parameters: f32, f16 or bf16; 0 => the format of the embedding in the
                            * files */
    const struct te_dist *dist; /* the ranks that share the model (te_dist_init), by its groups tensor, context and
                                 * expert; each reads its parts of the files. The groups are borrowed for the model's
                                 * lifetime, and *dist for the call. NULL => one rank */
    te_lm_parallel_options parallel; /* how the ranks of dist->tensor share the vocabulary, and the tokens between
                                      * products */
    bool quantized_lm_head; /* that of te_causal_lm_desc; TE_ERR_INVALID for a model with tied embeddings
                             * (tie_word_embeddings in config.json, or by default, as in Gemma) */
    const struct te_data_parallel_desc *units; /* makes units (te_fsdp_unit) of the layers, and one of the rest, for
                                                * ranks that share the model; all of them must call te_hf_open. With
                                                * TE_SHARD_PARAMETERS a rank reads its slices alone, and holds no more
                                                * than these and one unit. NULL => no units. Not kept. With dist,
                                                * units->group is dist->data; experts that ranks of dist->expert share
                                                * become units over dist->expert_data, whose gradients are divided as
                                                * the others */
} te_hf_desc;
/* Opens a model in the folder layout of Hugging Face transformers: config.json, and model.safetensors or the shards
 * that model.safetensors.index.json lists. The model_type in config.json is one of llama, mistral, mixtral, qwen2,
 * qwen3, gemma, gemma2, gemma3_text, gemma3, phi3, qwen3_moe. The result is a CausalLM (te_causal_lm_create). In a
 * region of te_quantized_model_init_begin, its projections are stored quantized, and with desc->quantized_lm_head
 * lm_head. desc may be NULL. Owned by the caller: te_module_destroy. Allocates and syncs.
 *
 * For gemma3 (Gemma 3 with vision) only the text model is opened. The tensors of the vision tower and the projector
 * stay in host memory as long as the model lives, for te_hf_save. The files that te_hf_save copies stay there too. If
 * one of these files has more than 256 MiB, the error is TE_ERR_IO.
 *
 * A rank of dist->tensor reads its own rows of the files: of the embedding, of lm_head, and of projections whose
 * outputs the ranks divide. Of weights that are stored quantized, of o_proj and of down_proj, it reads the whole
 * tensor, one at a time.
 *
 * With desc->units, weights that are stored quantized, weights whose columns dist->tensor divides (o_proj, down_proj),
 * and tensors that the files have transposed, are gathered from all ranks, each of which reads a part of the bytes;
 * with less than TE_SHARD_PARAMETERS all tensors are, but for rows that dist->tensor divides. If one rank of
 * dist, or of units->group, fails, all do.
 *
 * Nothing in the folder is trusted. On an error the result is NULL, and the message names the file, the key or tensor,
 * the value found and the value expected.
 * TE_ERR_IO if a file cannot be read.
 * TE_ERR_FORMAT if a file is damaged.
 * TE_ERR_FORMAT if files contradict each other (a tensor is missing, unexpected, or not in the file that the index
 * names).
 * TE_ERR_SHAPE if shapes differ from config.json.
 * TE_ERR_INVALID for desc->quantized_lm_head and a model with tied embeddings.
 * TE_ERR_UNSUPPORTED for a model that te.h cannot compute correctly.
 * TE_ERR_UNSUPPORTED if the only weights are in pytorch_model.bin. */
TE_API te_module *te_hf_open(te_ctx *te, const char *folder, const te_hf_desc *desc);
/* Writes `model`, opened by te_hf_open, to a folder. The folder is created if it is missing. It may be the opened
 * folder. config.json is written as te_hf_open read it. All parameters are written to model.safetensors, quantized ones
 * decoded. Names and tensor layout are those of the opened files. Other tensors of the opened files (gemma3) are
 * written unchanged. If the opened files have one tensor for several parameters (such as qkv_proj), te_hf_save joins
 * the parameters in a copy. Memory holds one tensor of the files at a time beside the model.
 *
 * These files are copied byte for byte, if te_hf_open found them: generation_config.json, tokenizer.json,
 * tokenizer_config.json, special_tokens_map.json, added_tokens.json, vocab.json, merges.txt, tokenizer.model,
 * tokenizer.model.v3, tekken.json, chat_template.jinja, chat_template.json, preprocessor_config.json,
 * processor_config.json.
 *
 * Weights of an earlier save in the folder are removed at the end, as by transformers: model.safetensors, the index,
 * files named as below that the new index does not name, and what killed saves have left of all these. So only one save
 * into a folder may run at a time.
 *
 * With te_hf_desc.dist, all ranks of the world must call it, and else all ranks of the units, with one folder. If
 * parameters are sharded (TE_SHARD_PARAMETERS), and te_fsdp_unshard has not gathered them, each rank writes a file of
 * its own, model-00001-of-00004.safetensors and so on, all at once, while units are gathered one by one. If the folder
 * has files of these names, those of the save are named model.1-00001-of-00004.safetensors, or by the next number that
 * is free. When all are there, rank 0 writes model.safetensors.index.json, which names all tensors and their files, and
 * removes the others. So at any moment, also of a kill, the folder opens with the weights of before, or with the new
 * ones. Without sharded parameters rank 0 writes all. Parts of tensor-parallel ranks, and experts, are gathered for one
 * tensor of the files at a time: a rank holds no more than its own, one unit, and this tensor.
 * If a rank fails, all fail with its error, and what was there stays. TE_ERR_UNSUPPORTED, without dist, if units have
 * different groups.
 *
 * Syncs. Each file is replaced atomically, the weights first, then config.json. If config.json cannot be written, the
 * folder has new weights and an old config.json.
 * TE_ERR_INVALID for a model that te_hf_open did not make, or one with adapters.
 * TE_ERR_STATE if a module was removed whose parameter is a part of a joined tensor.
 * Other errors as te_safetensors_write.
 *
 * te_lora_save names adapters after the parameters of the model. peft finds them only if the opened files use the same
 * names. */
TE_API te_result te_hf_save(te_module *model, const char *folder);
