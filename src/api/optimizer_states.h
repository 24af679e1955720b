/* api/optimizer_states.h: the states of FusedAdam. A program can replace the function that creates them, and can read
 * them in their stored format. */

/* Creates the state `state_name` ("exp_avg", "exp_avg_sq", "master_param") of `param`; replaces an existing state.
 *   zero_buffer             true: the state begins as zeros; false: its values are undefined
 *   store_param_remainders  true: the state is u8 [elements, 2], the lower 16 bits of f32 numbers, and begins as zeros
 *                           even if zero_buffer is false; false: the state has the format of te_fused_adam_desc
 * A new master gets the value of its parameter in the next step. */
typedef te_result (*te_initialize_state_fn)(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders);
/* Flags of an initialize_state function: how it treats a parameter that is stored quantized. A function with all three
 * flags needs no patch (api/patches.h). */
typedef enum te_state_capability {
    TE_STATE_DEQUANTIZES = 1, /* the function treats the parameter as te_dequantize of it */
    TE_STATE_ZEROS_LIKE = 2,  /* states that begin as zeros get the shape of the dequantized tensor */
    TE_STATE_EMPTY_LIKE = 4   /* uninitialised states get the shape of the dequantized tensor */
} te_state_capability;
/* The functions that te_fused_adam_create and its optimizers call. */
typedef struct te_fused_adam_methods {
    te_initialize_state_fn initialize_state; /* creates every state of a new optimizer, and master weights after a cast
                                              * of the model */
    int capabilities; /* te_state_capability bits of initialize_state, or-ed */
} te_fused_adam_methods;
/* Returns the methods in force, by default te_initialize_state with all capabilities. */
TE_API te_fused_adam_methods te_fused_adam_get_methods(const te_ctx *te);
/* Sets the methods from now on (copied); NULL => te.h's own methods. TE_ERR_INVALID if initialize_state is NULL. */
TE_API te_result te_fused_adam_set_methods(te_ctx *te, const te_fused_adam_methods *methods);

/* te.h's own te_initialize_state_fn. The state has the shape of the dequantized parameter, and is marked as sharded if
 * the parameter is. TransformerEngine's dtype uint8 is e4m3 here. Allocates. Fails inside a graph's capture. Graphs
 * with a step of `opt` cannot be launched any more. TE_ERR_INVALID if `param` or `state_name` is not one of `opt`.
 * Source: FusedAdam.initialize_state of TransformerEngine, from 2.12 on. */
TE_API te_result te_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name, bool zero_buffer,
                                     bool store_param_remainders);
/* Creates a state as TransformerEngine before 2.12 did, without any te_state_capability. TE_ERR_UNSUPPORTED if the
 * parameter is stored quantized. No state is marked as sharded. */
TE_API te_result te_initialize_state_legacy(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders);
/* Calls the initialize_state function in force (te_fused_adam_get_methods). TE_ERR_UNSUPPORTED if the optimizer is not
 * FusedAdam. */
TE_API te_result te_optimizer_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               bool zero_buffer, bool store_param_remainders);
/* Returns a state as it is stored (borrowed); NULL if there is none of that name. Unless `scale` is NULL, *scale
 * becomes the scale of the state, a borrowed f32 [1] tensor. The scale of a bf16 state of FusedAdam is 1. *scale
 * becomes NULL for an f32 state, for a u8 state (store_param_remainders) and for every state of SGD. */
TE_API te_tensor *te_optimizer_state(const te_optimizer *opt, const te_tensor *param, const char *state_name,
                                     te_tensor **scale);
