/* api/inference.h: the keys and values of earlier calls, which attention keeps for the next ones (KV cache).
 *
 * A sequence has a number that the program gives it, and places in the cache. Each step of a program begins with
 * te_inference_params_pre_step, which says which sequences there are and how many new tokens each has, and goes on with
 * a forward pass whose args->attention.inference_params is the cache, inside te_no_grad_begin. The batch of that pass
 * are these sequences, in this order: [longest, b, ..] or [b, longest, ..] with the new tokens first in each, or packed
 * one behind the other (TE_THD). Every module with self attention then adds its keys and values to the cache, rotates
 * from the positions where its sequences stand, and sees all keys up to each query:
 *
 *     te_inference_params *cache = te_inference_params_create(te, &(te_inference_params_desc){.max_batch_size = 8,
 *     .max_sequence_length = 2048, .num_heads_kv = 8, .head_dim_k = 128});
 *     te_inference_params_pre_step(cache, (int64_t[]){7, 9}, (int64_t[]){12, 30}, 2);
 *                   two new sequences of 12 and 30 tokens: x is [30, 2, hidden]
 *     te_forward_with(layer, &(te_forward_args){.input = x, .attention.inference_params = cache});
 *     te_inference_params_pre_step(cache, (int64_t[]){9}, (int64_t[]){1}, 1);
 *                   7 has ended, its room is free; 9 has one more token: x is [1, 1, hidden]
 *
 * Source: transformer_engine.pytorch.attention.InferenceParams. */

/* Sizes of a cache. Those of heads are a rank's own under tensor parallelism. */
typedef struct te_inference_params_desc {
    int64_t max_batch_size;      /* sequences at a time; at least 1 */
    int64_t max_sequence_length; /* tokens of each; at least 1 */
    int num_heads_kv;            /* heads of keys and values; at least 1 */
    int64_t head_dim_k;          /* their channels; at least 1 */
    int64_t head_dim_v;          /* those of values; 0 => head_dim_k */
    te_dtype dtype;              /* f32, f16 or bf16, the keys' own; 0 => bf16 */
    bool is_paged;               /* sequences take pages as they grow, in place of max_sequence_length tokens each from
                                  * the beginning */
    int64_t page_size;           /* tokens of a page, with is_paged; divides max_sequence_length */
    int64_t total_num_pages;     /* pages of all sequences; 0 => enough for all of full length, as TransformerEngine has
                                  * it */
    int64_t max_ctx_len;         /* the most new tokens of a sequence in a step; 0 => max_sequence_length */
} te_inference_params_desc;

/* A cache without sequences. A layer's memory comes with its first call, or by te_inference_params_allocate_memory.
 * NULL with TE_ERR_INVALID for sizes that do not fit. Owned by the caller: te_inference_params_destroy. Allocates. */
TE_API te_inference_params *te_inference_params_create(te_ctx *te, const te_inference_params_desc *desc);
/* Releases it. NULL is fine. */
TE_API void te_inference_params_destroy(te_inference_params *c);
/* Gives every DotProductAttention at m and below its memory now. */
TE_API te_result te_inference_params_allocate_memory(te_inference_params *c, te_module *m);
/* Begins a step with the sequences seq_ids[0 .. n - 1], of which each has step_lens[i] new tokens, at least 1. Those
 * that the cache has go on where they stand; a number that is new begins a sequence; those that it has and the list
 * lacks have ended, and leave their room to the others of this very call.
 *
 * Where a sequence would become longer than max_sequence_length, or sequences or pages run out, TE_ERR_STATE, with both
 * numbers, before anything has changed: te_clear_error, and call again with fewer sequences. TE_ERR_INVALID for a
 * number twice, or lengths below 1 or above max_ctx_len. TE_ERR_STATE inside a graph's capture; a captured forward pass
 * of as many sequences or more, with as many tokens of each or more, serves this step. TransformerEngine's pre_step
 * takes an ordered dict, and lets a sequence that it has go on by one token whatever its length there. */
TE_API te_result te_inference_params_pre_step(te_inference_params *c, const int64_t *seq_ids, const int64_t *step_lens,
                                              int64_t n);
/* Forgets all sequences; the memory of layers stays. */
TE_API te_result te_inference_params_reset(te_inference_params *c);
/* The number of sequences of the step; 0 for NULL. */
TE_API int64_t te_inference_params_num_sequences(const te_inference_params *c);
/* The tokens of a sequence, those of the step included; 0 for a number that it does not have. */
TE_API int64_t te_inference_params_seqlen(const te_inference_params *c, int64_t seq_id);
/* Pages that no sequence has (without is_paged: room for so many sequences); 0 for NULL. */
TE_API int64_t te_inference_params_free_pages(const te_inference_params *c);

/* i32 [b]: the tokens of each sequence before the step: where its new ones are rotated to
 * (te_rotary_desc.start_positions). In the innermost scope; NULL on an error. */
TE_API te_tensor *te_inference_params_get_seqlens_pre_step(te_inference_params *c);

/* The cache of one layer during a step, as te_attention takes it. The numbers in its tensors are those of the step
 * until the next one begins. */
typedef struct te_inference_step {
    te_tensor *k, *v;           /* pages of keys and values, with those of this call (borrowed from the cache) */
    te_attn_rule rule;          /* in tensors of the innermost scope: cu_seqlens_q of the step, cu_seqlens_kv of all
                                 * tokens, max_seqlen_q, page_table. The mask, one with padding, is the caller's */
} te_inference_step;
/* For attention of the user's: adds the rotated keys and values of the step's tokens, in `format`, to those of `layer`
 * (any module, which is the name of its memory) and fills *step. k as [longest, b, heads, d] or [b, longest, heads, d],
 * or packed. DotProductAttention calls this itself. */
TE_API te_result te_inference_params_step(te_inference_params *c, te_module *layer, te_tensor *k, te_tensor *v,
                                          te_qkv_format format, te_inference_step *step);
/* The keys and values of a layer's sequences in one piece, copied: *k [b, max_sequence_length, heads, d], *v likewise,
 * in the innermost scope. Rows from a sequence's length on hold anything. */
TE_API te_result te_inference_params_convert_paged_to_nonpaged(te_inference_params *c, te_module *layer, te_tensor **k,
                                                               te_tensor **v);
