/* api/inference.h: the KV cache. It keeps the keys and values of earlier calls, for attention in later calls.
 *
 * The program gives each sequence a number, its id in the cache. Each step begins with te_inference_params_pre_step,
 * which lists the step's sequences and their numbers of new tokens. Then comes a forward pass without gradients
 * (te_no_grad_begin), with the cache in args->attention.inference_params. The batch of this pass has the new tokens in
 * the order of the list: [s, b, ..], [b, s, ..] or, with TE_THD, packed. s is the largest number of new tokens; shorter
 * sequences are padded at the end. Every module with self attention adds its keys and values to the cache. New tokens
 * are rotated by their positions in the whole sequence, and each query sees all keys up to itself:
 *
 *     te_inference_params *cache = te_inference_params_create(te, &(te_inference_params_desc){.max_batch_size = 8,
 *     .max_sequence_length = 2048, .num_heads_kv = 8, .head_dim_k = 128});
 *     te_inference_params_pre_step(cache, (int64_t[]){7, 9}, (int64_t[]){12, 30}, 2);
 *                   two new sequences of 12 and 30 tokens: x is [30, 2, hidden]
 *     te_forward_with(layer, &(te_forward_args){.input = x, .attention.inference_params = cache});
 *     te_inference_params_pre_step(cache, (int64_t[]){9}, (int64_t[]){1}, 1);
 *                   sequence 7 has ended, and its memory is free; sequence 9 has one more token: x is [1, 1, hidden]
 *
 * Source: transformer_engine.pytorch.attention.InferenceParams. */

/* Options of te_inference_params_create. Numbers of heads are those of one rank under tensor parallelism. */
typedef struct te_inference_params_desc {
    int64_t max_batch_size;      /* maximum number of sequences at a time; at least 1 */
    int64_t max_sequence_length; /* maximum number of tokens in a sequence; at least 1 */
    int num_heads_kv;            /* number of heads of keys and values; at least 1 */
    int64_t head_dim_k;          /* channels of one head of a key; at least 1 */
    int64_t head_dim_v;          /* channels of one head of a value; 0 => head_dim_k */
    te_dtype dtype;              /* format of the cache, which added keys and values have too: f32, f16 or bf16; 0 =>
                                  * bf16 (TransformerEngine has no default). e4m3 => added keys and values have any of
                                  * these, and become codes, with a factor for each head of each token
                                  * (te_op_copy_to_kv_cache): half of bf16's memory, and one byte a head. Heads have at
                                  * most 1024 channels then, and fp8_dpa and fp8_mha are refused */
    bool is_paged;               /* true => a sequence gets more pages as it grows; false => it gets memory for
                                  * max_sequence_length tokens at its beginning */
    int64_t page_size;           /* read with is_paged: tokens per page, a divisor of max_sequence_length */
    int64_t total_num_pages;     /* read with is_paged: pages of all sequences together; 0 => enough for max_batch_size
                                  * full sequences, the number that TransformerEngine requires */
    int64_t max_ctx_len;         /* maximum number of new tokens of a sequence in one step; 0 => max_sequence_length */
} te_inference_params_desc;

/* Makes a cache without sequences. Each layer's memory is allocated by its first call, or by
 * te_inference_params_allocate_memory. The caller owns the cache and must call te_inference_params_destroy.
 * TE_ERR_INVALID if fields are out of range or contradict each other. Allocates. */
TE_API te_inference_params *te_inference_params_create(te_ctx *te, const te_inference_params_desc *desc);
/* Releases the cache. `c` may be NULL. */
TE_API void te_inference_params_destroy(te_inference_params *c);
/* Allocates the cache memory of all DotProductAttention modules in m's tree, before their first calls. */
TE_API te_result te_inference_params_allocate_memory(te_inference_params *c, te_module *m);
/* Begins a step with the sequences seq_ids[0 .. n - 1]; sequence i has step_lens[i] new tokens, at least 1. A new id
 * begins a sequence. Sequences that are not in the list have ended: their memory is free, also for this call.
 *
 * TE_ERR_STATE if a sequence would become longer than max_sequence_length, or for too many sequences or too few pages.
 * The message has the number and the limit that it exceeds. Nothing has changed then: call te_clear_error, then this
 * function with fewer sequences.
 * TE_ERR_INVALID for an id that is listed twice, and for lengths below 1 or above max_ctx_len.
 * TE_ERR_STATE inside a graph's capture.
 * A captured forward pass can be launched for this step if the capture had at least as many sequences, and at least as
 * many tokens for each.
 * (TransformerEngine's pre_step takes an ordered dict, and always advances a known sequence by one token.) */
TE_API te_result te_inference_params_pre_step(te_inference_params *c, const int64_t *seq_ids, const int64_t *step_lens,
                                              int64_t n);
/* Removes all sequences; the memory of the layers stays allocated. */
TE_API te_result te_inference_params_reset(te_inference_params *c);
/* Returns the number of sequences of the step; 0 for NULL. */
TE_API int64_t te_inference_params_num_sequences(const te_inference_params *c);
/* Returns the number of tokens of a sequence, including those of the step; 0 for an id that is not in the cache. */
TE_API int64_t te_inference_params_seqlen(const te_inference_params *c, int64_t seq_id);
/* Returns the number of free pages or, without is_paged, how many more sequences fit; 0 for NULL. */
TE_API int64_t te_inference_params_free_pages(const te_inference_params *c);

/* Returns i32 [b], in the innermost scope: each sequence's number of tokens before the step. For
 * te_rotary_desc.start_positions. NULL on failure. */
TE_API te_tensor *te_inference_params_get_seqlens_pre_step(te_inference_params *c);

/* The cache of one layer during a step, in the form that te_attention takes. Its tensors are valid until the next step
 * begins. */
typedef struct te_inference_step {
    te_tensor *k, *v;           /* pages of keys and values, including the new ones (borrowed from the cache) */
    te_attn_rule rule;          /* te_inference_params_step sets cu_seqlens_q (the step's tokens), cu_seqlens_kv (all
                                 * tokens), max_seqlen_q, page_table and, of a cache in e4m3, k_factors and v_factors,
                                 * in the innermost scope. The caller must set rule.mask to a padding mask */
} te_inference_step;
/* Adds the step's keys and values, already rotated, to the cache of `layer`, and fills *step. This function is for
 * attention modules of the user; DotProductAttention calls it itself. Each module, of any class, has its own part of
 * the cache.
 * `format` is the layout of k and v: [longest, b, heads, d], [b, longest, heads, d], or packed; `longest` is the
 * largest number of new tokens of a sequence. */
TE_API te_result te_inference_params_step(te_inference_params *c, te_module *layer, te_tensor *k, te_tensor *v,
                                          te_qkv_format format, te_inference_step *step);
/* Copies the keys and values of a layer out of their pages: *k and *v become [b, max_sequence_length, heads, d], in the
 * innermost scope. Rows behind the end of a sequence have arbitrary values. TE_ERR_UNSUPPORTED for a cache in e4m3. */
TE_API te_result te_inference_params_convert_paged_to_nonpaged(te_inference_params *c, te_module *layer, te_tensor **k,
                                                               te_tensor **v);
