/* api/lora.h: LoRA adapters (Hu et al. 2021). A model's weights are frozen, and pairs of small matrices are trained.
 *
 * A Linear with adapters computes y = x W^T + b + B(A(x) * alpha / dim). W and b are frozen. The children lora_A [dim,
 * in] and lora_B [out, dim], both Linears without a bias, are trained. x W^T + b is the module's own forward, the same
 * as without adapters, under any recipe. Recipes apply to the two children, too. lora_B starts at zero, so outputs do
 * not change at first. Other classes can have adapters, too:
 *
 *     LayerNormLinear    adapters read the output of the norm
 *     LayerNormMLP       adapters for both GEMMs: children fc1 and fc2, each with lora_A and lora_B. Its path
 *                        in target_modules means both GEMMs, "PATH.fc1" means fc1 alone
 *     GroupedLinear      lora_A and lora_B are GroupedLinears with the same groups, and use the group sizes of the call
 *     Embedding          lora_A is an Embedding [num_embeddings, dim], which starts at zero; lora_B is a Linear from
 *                        dim to embedding_dim; no dropout
 *     Gate               only the gate of a CausalLM's experts; its adapters stay in high precision under every recipe
 *     experts            GroupedExperts, GroupedExpertsDeepEP, and the experts of a CausalLM. Adapters are stacks over
 *                        this rank's E experts, in children with a parameter "weight". r is the rank of the adapters:
 *                            lora_gate_and_up_A   [E, hidden, r]
 *                            lora_gate_and_up_B   [E, r, 2 inter] (not gated: [E, r, inter]), starts at zero
 *                            lora_down_A          [E, inter, r]
 *                            lora_down_B          [E, r, hidden], starts at zero
 *                        Each linear layer adds (x A B) alpha / r, in high precision under every recipe; no dropout, no
 *                        DoRA. Source: GroupedExpertsLoRA
 *
 *     te_module *model = te_hf_open(te, "llama", NULL);
 *     te_lora_apply(model, &(te_lora_desc){ .dim = 16 }, NULL);          // all modules called *_proj, and experts
 *     te_optimizer *adam = te_fused_adam_create(te, model, NULL);        // of the adapters alone
 *     ...
 *     te_lora_save(model, "adapter");                                    // for the peft library
 *     te_lora_merge(model);                                              // or as one model:
 *     te_hf_save(model, "merged");
 *
 * PeftConfig's fields use_triton and use_memory_efficient_lora do not exist here, because they only select an
 * implementation.
 * Source: nemo_automodel.components._peft. Source of modules_to_save, bias, DoRA and adapters of embeddings: the peft
 * library. */

/* Where dropout is applied. */
typedef enum te_dropout_position {
    TE_DROPOUT_POST = 0, /* to the output of lora_B */
    TE_DROPOUT_PRE = 1   /* to the input of lora_A */
} te_dropout_position;
/* The initial values of lora_A. */
typedef enum te_lora_init {
    TE_LORA_XAVIER = 0, /* N(0, 2 / (in + dim)); E experts of rank r: N(0, 2 / ((in + E) r)), torch's rule for a 3-D
                         * tensor */
    TE_LORA_KAIMING = 1 /* uniform within +- 1 / sqrt(in); experts of rank r: +- 1 / sqrt(in r) */
} te_lora_init;
/* Selects biases to train in addition to adapters (peft: LoraConfig.bias): parameters named "bias" or ending in
 * "_bias". */
typedef enum te_lora_bias {
    TE_LORA_BIAS_NONE = 0,     /* none */
    TE_LORA_BIAS_ALL = 1,      /* biases of all modules */
    TE_LORA_BIAS_LORA_ONLY = 2 /* biases of modules with adapters */
} te_lora_bias;
/* Options of te_lora_apply (Automodel: PeftConfig). Zero-initialised; lists are read during the call only.
 *
 * A name in a list of modules is a pattern for a module's whole path below the model, as in Automodel. "*" or ".*"
 * matches any characters. The rest is a regular expression with:
 *   - characters, ".", "+", "?" and escaped punctuation
 *   - classes "[..]", groups "(..)" and "|"
 *
 * Repetition counts such as "{2}", groups that begin with "(?", and escapes such as \\d are refused. "*[qv]_proj" and
 * "*.(q|v)_proj" match q_proj and v_proj of all layers. Put alternatives into a group. Without a group, "x|y" becomes
 * "^x|y$", as in Automodel: it matches the path y, and every path that begins with x. A pattern has at most 512 bytes.
 * Matching takes time proportional to the pattern's length times the path's length.
 *
 * A name without the characters *+?[](){}|^$\ also matches every path whose last components are this name: "q_proj"
 * matches "model.layers.0.self_attn.q_proj". Only such a name ("embed_tokens") gives adapters to an Embedding. Modules
 * that cannot have adapters are skipped.
 *
 * The experts of a layer get adapters all together. They are chosen by the path of their module "experts" or, in a
 * CausalLM, by names that match all Linears of the experts ("w1", "w2" and "w3" of Mixtral). Names that match only some
 * of these Linears are refused.
 * As in Automodel, match_all_linear and exclude_modules count the experts and the Gate of a CausalLM as Linears, but no
 * other experts and gates. */
typedef struct te_lora_desc {
    const char *const *target_modules;  /* [num_target_modules]; NULL => "*_proj", and the experts of a CausalLM */
    int num_target_modules;             /* length of target_modules */
    const char *const *exclude_modules; /* [num_exclude_modules]: all Linears except these get adapters, modules of
                                         * other classes do not; not together with target_modules */
    int num_exclude_modules;            /* length of exclude_modules */
    bool match_all_linear;              /* true => all Linears get adapters, modules of other classes do not; not
                                         * together with the two lists above */
    int dim;                            /* rank; 0 => 8 */
    float alpha;                        /* 0 => 32 */
    /* DoRA (Liu et al. 2024, as in peft): y = x V^T * m / |V| + b with V = W + (alpha / dim) B A. m [out] is a third
     * trained child, lora_magnitude_vector, which starts as |V|, the norms of V's rows. The backward pass treats |V| as
     * a constant. Only for Linears whose weight is not sharded over ranks */
    bool use_dora;
    float dropout;                      /* probability of dropout, in training; 0 => none */
    te_dropout_position dropout_position; /* 0 => TE_DROPOUT_POST */
    te_lora_init lora_A_init;           /* 0 => xavier; not read for an Embedding */
    te_dtype lora_dtype;                /* format of the adapters: f32, f16 or bf16; 0 => the weight's format. Inputs of
                                         * another format are cast */
    bool moe_rank_scaling;              /* true => the rank of experts' adapters is dim / (experts per token), rounded
                                         * down with a warning. alpha does not change: the factor is alpha / (the
                                         * reduced rank) */
    bool skip_freeze;                   /* true => parameters of modules without adapters stay as they are; false => all
                                         * parameters but adapters are frozen */
    const char *const *modules_to_save; /* [num_modules_to_save] modules that get no adapters: copies of their
                                         * parameters are trained, and te_lora_remove drops the copies (peft) */
    int num_modules_to_save;            /* length of modules_to_save */
    te_lora_bias bias;                  /* 0 => no bias is trained */
    const char *base_model_name_or_path; /* copied; te_lora_save writes it; NULL => the folder of te_hf_open or, without
                                          * such a folder, the JSON value null */
} te_lora_desc;

/* Creates adapters for the modules that desc chooses (NULL: the default desc). Freezes all parameters except
 * modules_to_save and trained biases. Draws from the random state. Allocates. Create optimizers afterwards.
 * *num_modules (may be NULL) receives the number of adapted places: up to two in a LayerNormMLP, one for the experts of
 * a layer.
 * Adapters of a Linear sharded by column or row are sharded in the same way; all ranks draw the same numbers, and each
 * keeps its shard. Adapters of a module on TE_PARAMS_META have no memory either.
 *
 * After an error nothing has changed.
 * TE_ERR_INVALID for a number out of range, also with moe_rank_scaling if dim is below the number of experts per token.
 * TE_ERR_INVALID if no module matches.
 * TE_ERR_INVALID if a module already has adapters or a forward function of te_module_set_forward.
 * TE_ERR_UNSUPPORTED for:
 *   - a pattern with syntax that te_lora_desc refuses
 *   - use_dora with another class than Linear, or with a Linear sharded over ranks
 *   - GroupedExpertsTE, and a GroupedLinear sharded over ranks
 *   - names that match only some of the Linears of experts
 *   - a parameter of modules_to_save that is stored quantized
 *
 * TE_ERR_STATE in a graph's capture, and for modules of te_make_graphed_callables.
 * Source: apply_lora_to_linear_modules. */
TE_API te_result te_lora_apply(te_module *model, const te_lora_desc *desc, int *num_modules);
/* Merges all adapters into the weights and removes the adapters: adds (alpha / dim) B A to each weight, summed in f32
 * and rounded once, or quantized anew by the weight's own quantizer. Under DoRA the rows are also scaled to their
 * magnitudes. modules_to_save and trained biases keep their trained values. Parameters stay frozen
 * (te_module_set_requires_grad). Destroy the optimizer of the adapters.
 * TE_ERR_INVALID if there are no adapters.
 * TE_ERR_UNSUPPORTED if a weight is shared with another module of any tree, such as the table of a tied model.
 * TE_ERR_STATE if a weight has no memory, in a graph's capture, and for modules of te_make_graphed_callables.
 * TE_ERR_OUT_OF_MEMORY leaves some modules merged and the rest with adapters: outputs are the same, and the call may be
 * repeated. */
TE_API te_result te_lora_merge(te_module *model);
/* Removes all adapters without merging. modules_to_save and trained biases get their original tensors back, cast to the
 * trained copies' format. Parameters stay frozen. Errors as te_lora_merge, except those about weights; nothing has
 * changed after TE_ERR_OUT_OF_MEMORY. */
TE_API te_result te_lora_remove(te_module *model);
/* Writes the adapters, modules_to_save and trained biases to a folder in the layout of the peft library:
 * adapter_model.safetensors and adapter_config.json. Creates the folder if it is missing. Dropout in the config always
 * means dropout in front of lora_A, as in peft. Tensor names begin with "base_model.model." and go on with:
 *
 *     PATH.lora_A.weight, PATH.lora_B.weight               for all modules that are not named below. In a LayerNormMLP,
 *                                                          PATH.fc1 and PATH.fc2 stand in place of PATH. For group N of
 *                                                          a GroupedLinear, the names end in weightN. (peft has no
 *                                                          LayerNormMLP and no GroupedLinear)
 *     PATH.E.PROJ.lora_A.weight, PATH.E.PROJ.lora_B.weight for expert E of the experts at PATH. PROJ is gate_proj,
 *                                                          up_proj or down_proj, or the name in a CausalLM's files;
 *                                                          gate and up have the same lora_A
 *     PATH.lora_embedding_A, PATH.lora_embedding_B         for an Embedding, [dim, num_embeddings] and [embedding_dim,
 *                                                          dim]
 *     PATH.lora_magnitude_vector                           for DoRA
 *     PATH.weight, PATH.bias ...                           for modules_to_save and trained biases (PATH.base_layer.bias
 *                                                          if the module has adapters)
 *
 * A tied table in modules_to_save is written a second time as lm_head.weight (ensure_weight_tying). Syncs.
 * TE_ERR_INVALID if there are no adapters.
 * TE_ERR_UNSUPPORTED if adapters or trained parameters are sharded over ranks (te_model_save writes this rank's part).
 * TE_ERR_UNSUPPORTED if only some modules have DoRA.
 * Other errors as te_safetensors_write. */
TE_API te_result te_lora_save(te_module *model, const char *folder);
/* Reads adapters from a folder that peft or te_lora_save has written. Modules with adapters in the file get adapters,
 * with dropout in front of lora_A. Existing adapters must have the file's rank, and are overwritten. alpha is the
 * file's. Values are rounded to the adapters' format; new adapters have the weight's format. modules_to_save and the
 * biases that the config chooses become trained, with the file's values. All other parameters are frozen. Syncs.
 *
 * If gate and up of experts have different lora_A in the file, the experts get twice the file's rank and alpha. lora_A
 * then contains both matrices, and lora_B has zeros so that gate and up each use their own part of lora_A.
 * With adapters of lm_head and embed_tokens, peft also writes the base weight (base_layer.weight). This weight is not
 * loaded, but it must equal the model's weight after both are rounded to the narrower of the two formats.
 *
 * Nothing in the folder is trusted.
 * TE_ERR_IO if a file cannot be read.
 * TE_ERR_FORMAT for a damaged file.
 * TE_ERR_FORMAT for a tensor that is no adapter of this model, and for parameters of another base model.
 * TE_ERR_FORMAT for a missing tensor of an adapter or of modules_to_save.
 * TE_ERR_SHAPE if a shape does not fit the module.
 * TE_ERR_UNSUPPORTED for:
 *   - adapters of lm_head in a tied model
 *   - a parameter that is stored quantized but must be compared or trained
 *   - a value of init_lora_weights that changes the base weight
 *   - different alphas within the experts of one layer
 *   - an alpha_pattern with syntax that te_lora_desc refuses
 *   - other settings of the config that te.h does not have, such as target_parameters
 *
 * Also the errors of te_lora_apply. After an error nothing has changed. Exception: after TE_ERR_IO and
 * TE_ERR_OUT_OF_MEMORY, adapters and trained parameters that existed before may have new values. */
TE_API te_result te_lora_load(te_module *model, const char *folder);
