/* api/optimizer_states.h: the states of FusedAdam. A program can replace the function that creates them, and can read
 * them in their stored format. */

/* Creates the state `state_name` ("exp_avg", "exp_avg_sq", "master_param") of `param`; replaces an existing state.
 *   zero_buffer             true: the state is zeros; false: its values are undefined until they are set
 *   store_param_remainders  true: the state is stored as remainders (the lower halves of f32 numbers), u8 [elements,
 *                           2], and is zeros whatever zero_buffer is; false: the state has the format that
 *                           te_fused_adam_desc gives it
 * A new master gets the value of its parameter in the next step. */
typedef te_result (*te_initialize_state_fn)(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders);
/* These flags say what an initialize_state function does with a parameter that is stored quantized. A function that has
 * all three needs no patch (api/patches.h). */
typedef enum te_state_capability {
    TE_STATE_DEQUANTIZES = 1, /* the function treats a quantized parameter as the tensor that te_dequantize makes of
                               * it */
    TE_STATE_ZEROS_LIKE = 2,  /* states that begin as zeros get the shape of the dequantized tensor */
    TE_STATE_EMPTY_LIKE = 4   /* uninitialised states get the shape of the dequantized tensor */
} te_state_capability;
/* The functions that te_fused_adam_create and its optimizers call. */
typedef struct te_fused_adam_methods {
    te_initialize_state_fn initialize_state; /* creates every state of a new optimizer, and the master weights that are
                                              * needed after a cast of the model */
    int capabilities; /* te_state_capability bits of initialize_state, or-ed */
} te_fused_adam_methods;
/* Returns the methods in force. They are te_initialize_state with all capabilities, unless te_fused_adam_set_methods
 * has set others. */
TE_API te_fused_adam_methods te_fused_adam_get_methods(const te_ctx *te);
/* Sets the methods by which states are created from now on. `methods` is copied; NULL sets te.h's own methods.
 * TE_ERR_INVALID if initialize_state is NULL. */
TE_API te_result te_fused_adam_set_methods(te_ctx *te, const te_fused_adam_methods *methods);

/* Creates a state; this is te.h's own te_initialize_state_fn. The state has the shape of the dequantized parameter (no
 * decoding takes place), and is marked as sharded if the parameter is (te_tensor_is_sharded). Where TransformerEngine
 * has a state of dtype uint8, te.h has e4m3. The call allocates memory. It fails inside a graph's capture. Graphs that
 * were captured with a step of `opt` cannot be launched any more. TE_ERR_INVALID if `param` is not a parameter of
 * `opt`, or `state_name` not a state of `opt`.
 * Source: FusedAdam.initialize_state of TransformerEngine, from 2.12 on. */
TE_API te_result te_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name, bool zero_buffer,
                                     bool store_param_remainders);
/* Creates a state as TransformerEngine before 2.12 did. TE_ERR_UNSUPPORTED if the parameter is stored quantized. No
 * state is marked as sharded. This function has none of the flags of te_state_capability. */
TE_API te_result te_initialize_state_legacy(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders);
/* Calls the initialize_state function in force (te_fused_adam_get_methods). TE_ERR_UNSUPPORTED if the optimizer is not
 * FusedAdam. */
TE_API te_result te_optimizer_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               bool zero_buffer, bool store_param_remainders);
/* Returns a state as it is stored (borrowed); NULL if there is none of that name. *scale (`scale` may be NULL) receives
 * the state's scale, f32 [1] (borrowed), or NULL if the state has no scale. States in other formats than f32 have a
 * scale, except remainders. The scale of a bf16 state stays 1. te_optimizer_get_unscaled_state gives the values. */
TE_API te_tensor *te_optimizer_state(const te_optimizer *opt, const te_tensor *param, const char *state_name,
                                     te_tensor **scale);
