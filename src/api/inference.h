/* api/inference.h: the keys and values of earlier calls, which attention keeps for the next ones (KV cache).
 *
 * The program gives each sequence a number, by which the cache knows it. Each step of a program begins with
 * te_inference_params_pre_step, which says which sequences there are and how many new tokens each has. Then comes a
 * forward pass whose args->attention.inference_params is the cache, inside te_no_grad_begin. The batch of that pass are
 * these sequences, in this order: [longest, b, ..] or [b, longest, ..] with the new tokens first in each, or packed one
 * behind the other (TE_THD). Every module with self attention then adds its keys and values to the cache, rotates the
 * new tokens from each sequence's present length on, and lets each query see all keys up to itself:
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

/* Sizes of a cache. Numbers of heads are those of one rank under tensor parallelism. */
typedef struct te_inference_params_desc {
    int64_t max_batch_size;      /* the most sequences at a time; at least 1 */
    int64_t max_sequence_length; /* the most tokens of a sequence; at least 1 */
    int num_heads_kv;            /* heads of keys and values; at least 1 */
    int64_t head_dim_k;          /* channels of a key's head; at least 1 */
    int64_t head_dim_v;          /* channels of a value's head; 0 => head_dim_k */
    te_dtype dtype;              /* f32, f16 or bf16, the format of the keys and values that are added; 0 => bf16.
                                  * TransformerEngine has no default: dtype is required */
    bool is_paged;               /* sequences take pages as they grow; false => each has room for max_sequence_length
                                  * tokens from the beginning */
    int64_t page_size;           /* with is_paged: tokens of a page; divides max_sequence_length */
    int64_t total_num_pages;     /* with is_paged: pages of all sequences; 0 => enough for max_batch_size sequences of
                                  * full length, the number that TransformerEngine requires */
    int64_t max_ctx_len;         /* the most new tokens of a sequence in a step; 0 => max_sequence_length */
} te_inference_params_desc;

/* Makes a cache without sequences. The memory of each layer is allocated by its first call, or by
 * te_inference_params_allocate_memory. NULL with TE_ERR_INVALID for sizes that do not fit. Owned by the caller:
 * te_inference_params_destroy. Allocates. */
TE_API te_inference_params *te_inference_params_create(te_ctx *te, const te_inference_params_desc *desc);
/* Releases the cache. NULL is fine. */
TE_API void te_inference_params_destroy(te_inference_params *c);
/* Allocates the memory of every DotProductAttention at m and below now. */
TE_API te_result te_inference_params_allocate_memory(te_inference_params *c, te_module *m);
/* Begins a step with the sequences seq_ids[0 .. n - 1]; sequence i has step_lens[i] new tokens, at least 1. A number
 * that the cache knows continues its sequence. A new number begins a sequence. Sequences of the cache that are not in
 * the list have ended, and leave their room to those of this very call.
 *
 * TE_ERR_STATE, with both numbers, if a sequence would become longer than max_sequence_length, or sequences or pages
 * run out. Nothing has changed then: te_clear_error, and call again with fewer sequences. TE_ERR_INVALID for a number
 * that is listed twice, or lengths below 1 or above max_ctx_len. TE_ERR_STATE inside a graph's capture. A forward pass
 * captured earlier serves this step if it was captured with at least as many sequences, and at least as many tokens of
 * each. TransformerEngine's pre_step takes an ordered dict, and advances a known sequence by one token whatever length
 * is given. */
TE_API te_result te_inference_params_pre_step(te_inference_params *c, const int64_t *seq_ids, const int64_t *step_lens,
                                              int64_t n);
/* Forgets all sequences; the memory of layers stays allocated. */
TE_API te_result te_inference_params_reset(te_inference_params *c);
/* Returns the number of sequences of the step; 0 for NULL. */
TE_API int64_t te_inference_params_num_sequences(const te_inference_params *c);
/* Returns the tokens of a sequence, including those of the step; 0 for a number that the cache does not know. */
TE_API int64_t te_inference_params_seqlen(const te_inference_params *c, int64_t seq_id);
/* Returns the number of free pages; without is_paged the number of sequences that there is still room for; 0 for
 * NULL. */
TE_API int64_t te_inference_params_free_pages(const te_inference_params *c);

/* Returns i32 [b], the tokens that each sequence had before the step: the position that its new tokens are rotated from
 * (te_rotary_desc.start_positions). In the innermost scope; NULL on an error. */
TE_API te_tensor *te_inference_params_get_seqlens_pre_step(te_inference_params *c);

/* The cache of one layer during a step, as te_attention takes it. The numbers in its tensors hold until the next step
 * begins. */
typedef struct te_inference_step {
    te_tensor *k, *v;           /* pages of keys and values, with those of this call (borrowed from the cache) */
    te_attn_rule rule;          /* filled in: cu_seqlens_q (the step's tokens), cu_seqlens_kv (all tokens),
                                 * max_seqlen_q, page_table; tensors of the innermost scope. The caller sets rule.mask,
                                 * a mask with padding */
} te_inference_step;
/* Adds the step's rotated keys and values, in `format`, to those of `layer` and fills *step, for attention of the
 * user's; DotProductAttention calls this itself. `layer` is any module; it identifies the memory. k and v are [longest,
 * b, heads, d] or [b, longest, heads, d], or packed. */
TE_API te_result te_inference_params_step(te_inference_params *c, te_module *layer, te_tensor *k, te_tensor *v,
                                          te_qkv_format format, te_inference_step *step);
/* Copies the keys and values of a layer's sequences out of their pages: *k [b, max_sequence_length, heads, d], *v
 * likewise, in the innermost scope. Rows from a sequence's length on hold arbitrary values. */
TE_API te_result te_inference_params_convert_paged_to_nonpaged(te_inference_params *c, te_module *layer, te_tensor **k,
                                                               te_tensor **v);
