/* api/lora.h: LoRA: models whose weights stay as they are, and learn by small matrices beside them (Hu et al. 2021), on
 * te.h's Linear.
 *
 * A Linear with adapters computes y = x W^T + b + B(A(x) * alpha / dim): W and b are frozen, and its children lora_A
 * [dim, in] and lora_B [out, dim] are trained, both Linears without a bias. The first product is the class's own
 * forward: recipes, weights that are stored quantized and is_first_microbatch apply to it as to the adapters. The
 * second factor of each pair begins at zero, so a model's outputs are at first what they were. Other classes have
 * adapters as well:
 *
 *     LayerNormLinear    beside its product, of what the norm makes
 *     LayerNormMLP       beside its two products; each has a child, fc1 and fc2, with lora_A and lora_B. The module's
 *                        name means both, "PATH.fc1" one
 *     GroupedLinear      lora_A and lora_B are GroupedLinears of as many groups, and take the call's sizes
 *     Embedding          lora_A is an Embedding [num_embeddings, dim], which begins at zero, and lora_B a Linear from
 *                        dim to embedding_dim; no dropout
 *     Gate               of a CausalLM's experts, in high precision whatever the recipe is
 *     experts            GroupedExperts, GroupedExpertsDeepEP, and the experts of a CausalLM. Stacks of all experts of
 *                        the rank, children with a parameter "weight": lora_gate_and_up_A [E, dim, r] and lora_down_A
 *                        [E, inter, r], lora_gate_and_up_B [E, r, 2 inter] (not gated: [E, r, inter]) and lora_down_B
 *                        [E, r, dim], which begin at zero. Each product adds (x A B) alpha / r, in high precision
 *                        whatever the recipe is; no dropout, no DoRA. Source: GroupedExpertsLoRA
 *
 *     te_module *model = te_hf_open(te, "llama", NULL);
 *     te_lora_apply(model, &(te_lora_desc){ .dim = 16 }, NULL);          // all modules called *_proj, and experts
 *     te_optimizer *adam = te_fused_adam_create(te, model, NULL);        // of the adapters alone
 *     ...
 *     te_lora_save(model, "adapter");                                    // for the peft library
 *     te_lora_merge(model);                                              // or as one model:
 *     te_hf_save(model, "merged");
 *
 * Of PeftConfig these have no field: use_triton and use_memory_efficient_lora are choices of speed. Source:
 * nemo_automodel.components._peft; modules_to_save, bias, DoRA and adapters of embeddings: the peft library. */

/* Where dropout stands. */
typedef enum te_dropout_position {
    TE_DROPOUT_POST = 0, /* behind lora_B */
    TE_DROPOUT_PRE = 1   /* in front of lora_A */
} te_dropout_position;
/* The first values of lora_A. */
typedef enum te_lora_init {
    TE_LORA_XAVIER = 0, /* N(0, 2 / (in + dim)); of experts N(0, 2 / ((in + E) r)), which torch makes of three sizes */
    TE_LORA_KAIMING = 1 /* uniform within +- 1 / sqrt(in), of experts +- 1 / sqrt(in r) */
} te_lora_init;
/* Which biases are trained beside adapters (peft: LoraConfig.bias): parameters called bias, and those of names that end
 * in _bias. */
typedef enum te_lora_bias {
    TE_LORA_BIAS_NONE = 0,     /* none */
    TE_LORA_BIAS_ALL = 1,      /* of all modules */
    TE_LORA_BIAS_LORA_ONLY = 2 /* of the modules with adapters */
} te_lora_bias;
/* Which modules get adapters, and of what kind (Automodel: PeftConfig). Zero-initialised; lists are read during the
 * call.
 *
 * A name is a pattern of paths below the model, from their beginning to their end, as Automodel reads it: * (or .*)
 * stands for any characters, and the rest is a regular expression: characters,
 * . + ? classes in [], groups in (), | and, behind a backslash, punctuation. So "*[qv]_proj" and "*.(q|v)_proj" are
 * q_proj and v_proj of all layers. As there, | parts all of the pattern, anchors
 * included: put alternatives into a group. Counts {}, extensions (?, and escapes as \\d are refused by name; a pattern
 * has 512 bytes at most, and takes time in proportion to its length and the path's. A name without operators also means
 * all modules whose path ends in it behind a dot: "q_proj" is "model.layers.0.self_attn.q_proj" too. Patterns pass over
 * modules that cannot have adapters, and over Embeddings, which get them by a name without operators alone
 * ("embed_tokens").
 *
 * Experts get adapters all together: by the path of the module "experts", or, in a CausalLM, by names that mean all of
 * their Linears ("w1", "w2" and "w3" of Mixtral); names of some of these are refused. match_all_linear and
 * exclude_modules count the experts and the Gate of a CausalLM as Linears, and others not, as Automodel does. */
typedef struct te_lora_desc {
    const char *const *target_modules;  /* [num_target_modules]; NULL => "*_proj", and the experts of a CausalLM */
    int num_target_modules;             /* how many */
    const char *const *exclude_modules; /* [num_exclude_modules] all Linears, and no other classes, but these, in place
                                         * of target_modules */
    int num_exclude_modules;            /* how many */
    bool match_all_linear;              /* all Linears, and no other classes, in place of both */
    int dim;                            /* rank; 0 => 8 */
    float alpha;                        /* 0 => 32 */
    /* DoRA, of Linears that one rank has: y = x V^T * m / |V| + b, V = W + alpha / dim B A, with a third trained child,
     * lora_magnitude_vector: m [out] of the lengths |V| of V's rows, which are constants in the backward pass (Liu et
     * al. 2024, as in peft) */
    bool use_dora;
    float dropout;                      /* probability, in training; 0 => none */
    te_dropout_position dropout_position; /* 0 => behind lora_B */
    te_lora_init lora_A_init;           /* 0 => xavier; not read for an Embedding */
    te_dtype lora_dtype;                /* of the adapters: f32, f16 or bf16; 0 => the weight's. Inputs are cast where
                                         * they differ */
    bool moe_rank_scaling;              /* adapters of experts have rank dim / experts of each token, rounded down with
                                         * a warning; alpha stays, so their factor is alpha / that rank */
    bool skip_freeze;                   /* parameters of modules without adapters go on as they are; false => all but
                                         * adapters are frozen */
    const char *const *modules_to_save; /* [num_modules_to_save] modules of which all parameters are trained, in place
                                         * of adapters: copies, which te_lora_remove drops (peft) */
    int num_modules_to_save;            /* how many */
    te_lora_bias bias;                  /* 0 => none is trained */
    const char *base_model_name_or_path; /* what te_lora_save writes, copied; NULL => the folder that te_hf_open was
                                          * given, or null */
} te_lora_desc;

/* Gives adapters to the modules of a tree that desc names (NULL: the default one), and freezes everything else but
 * modules_to_save and biases. Writes the number of products with new adapters, of which a LayerNormMLP has two, and
 * experts count as one, into *num_modules, which may be NULL. Draws from the random state: ranks that share a weight
 * take their parts of one draw, and adapters of a Linear divided by column or by row are divided with it. On
 * TE_PARAMS_META adapters have no memory either. Allocates; optimizers are made afterwards.
 *
 * Nothing has changed after an error. TE_ERR_INVALID: numbers out of their range (moe_rank_scaling with dim below the
 * experts of a token), no module of these names, one that has adapters or a forward of its own. TE_ERR_UNSUPPORTED: a
 * pattern's syntax; use_dora for another class than Linear, or for one that ranks share; GroupedExpertsTE; some of
 * the Linears of experts; a GroupedLinear that ranks share; a parameter of modules_to_save that is stored quantized.
 * TE_ERR_STATE: in a graph's capture, and for modules of te_make_graphed_callables. Source:
 * apply_lora_to_linear_modules. */
TE_API te_result te_lora_apply(te_module *model, const te_lora_desc *desc, int *num_modules);
/* Adds alpha / dim B A to each weight, summed in f32 and rounded once, or quantized anew by the weight's own quantizer,
 * and takes the adapters away; the rows of a weight under DoRA get their magnitudes. Modules of modules_to_save, and
 * biases, which were trained beside adapters, stay as they are. Parameters stay frozen (te_module_set_requires_grad).
 * An optimizer of the adapters has nothing to step any more: destroy it.
 * TE_ERR_INVALID without adapters; TE_ERR_UNSUPPORTED for a weight that another module has as well, of whatever tree,
 * the table of a tied model included; TE_ERR_STATE for one without memory, in a graph's capture, and for modules of
 * te_make_graphed_callables. After TE_ERR_OUT_OF_MEMORY some modules are merged and the others have their adapters:
 * outputs are the same, and the call may be repeated. */
TE_API te_result te_lora_merge(te_module *model);
/* Takes the adapters away and forgets them; modules_to_save and biases have the tensors from before again, in the
 * format of what was trained. Parameters stay frozen. The same errors, but for those of weights; nothing has changed
 * after TE_ERR_OUT_OF_MEMORY. */
TE_API te_result te_lora_remove(te_module *model);
/* Writes the adapters, and what is trained beside them, in the layout of the peft library, into a folder that is made
 * if it is missing: adapter_model.safetensors and adapter_config.json, where dropout is in front of lora_A, as peft has
 * it. Names behind "base_model.model.":
 *
 *     PATH.lora_A.weight, PATH.lora_B.weight               of LayerNormMLP PATH.fc1 and PATH.fc2; of group N of a
 *                                                          GroupedLinear ...weightN. Neither is a module of peft's
 *     PATH.E.PROJ.lora_A.weight, PATH.E.PROJ.lora_B.weight of experts PATH: for each expert E gate_proj, up_proj and
 *                                                          down_proj, or as a CausalLM's files call them; those of gate
 *                                                          and up have the same lora_A
 *     PATH.lora_embedding_A, PATH.lora_embedding_B         of an Embedding, [dim, num_embeddings] and [embedding_dim,
 *                                                          dim]
 *     PATH.lora_magnitude_vector                           of DoRA
 *     PATH.weight, PATH.bias ...                           of modules_to_save, and trained biases (PATH.base_layer.bias
 *                                                          beside adapters)
 *
 * A tied table of modules_to_save is there as lm_head.weight, too (ensure_weight_tying). TE_ERR_INVALID without
 * adapters; TE_ERR_UNSUPPORTED where ranks share a module of these (te_model_save writes this rank's part), and for
 * modules with and without DoRA; else as te_safetensors_write. Syncs. */
TE_API te_result te_lora_save(te_module *model, const char *folder);
/* Reads such a folder, of peft or of te_lora_save: modules that the file names get adapters, with dropout in front of
 * lora_A, unless they have some of the same rank; alpha is the file's; values are rounded to the adapters' format,
 * which is the weight's where they are new. Experts whose gate and up have different lora_A get twice the file's rank
 * and alpha: lora_A has both, and lora_B zeros beside each. modules_to_save and biases of the config are trained,
 * with the file's values. Other parameters of the file, which peft writes beside adapters of lm_head and embed_tokens
 * (base_layer.weight), are compared with the model's, in the narrower of both formats, and passed over. All else is
 * frozen.
 *
 * Nothing in the folder is trusted: TE_ERR_IO for what cannot be read, TE_ERR_FORMAT for damage, for tensors that are
 * no adapter's of this model, for adapters and modules_to_save that lack one and for parameters of another base model,
 * TE_ERR_SHAPE for shapes that are not the module's, TE_ERR_UNSUPPORTED for adapters of lm_head in a tied model, for a
 * parameter to compare or to train that is stored quantized, and for what the config asks for beyond this
 * (init_lora_weights that change the weight too, target_parameters, several alphas within experts, syntax in
 * alpha_pattern that is not that of te_lora_desc ...), and those of te_lora_apply. After any error all is as it was,
 * but for the values of adapters and trained parameters that there were already after TE_ERR_IO and
 * TE_ERR_OUT_OF_MEMORY. Syncs. */
TE_API te_result te_lora_load(te_module *model, const char *folder);
