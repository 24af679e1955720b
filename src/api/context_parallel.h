/* api/context_parallel.h: batches for ranks that share sequences (te_parallel_options.cp_group), in TransformerEngine's
 * layout: a sequence is 2 n chunks of one length, and rank r of n has chunks r and 2 n - 1 - r, one behind the other.
 * Tensors may have any format whose elements are whole bytes. Results are new tensors of the innermost scope, without
 * history.
 *
 *     te_pad_thd_sequences_for_cp      once for a batch: pads sequences to multiples of 2 n
 *     te_get_batch_on_this_cp_rank     for ids, targets, positions: this rank's tokens
 *     te_gather_batch_of_cp_ranks      all tokens again, of what the model made from them */

/* How the tokens of a batch are laid out, and which ranks share them. */
typedef struct te_cp_batch {
    te_group *cp_group;     /* the ranks (borrowed); NULL => one rank, which has all tokens. TransformerEngine's default
                             * is the group of all ranks */
    te_group *cp_p2p_group; /* with TE_CP_A2A_P2P: the ring's ranks (borrowed); NULL => none */
    te_qkv_format format;   /* TE_SBHD: tokens along the first dimension; TE_BSHD: along the second; TE_THD: along the
                             * first, or [1, tokens, ..]; 0 => TE_SBHD. TransformerEngine's default is thd */
    te_tensor *cu_seqlens_padded; /* TE_THD: i32 [b + 1], where each sequence begins, padding included; the lengths are
                                   * multiples of 2 n (borrowed) */
} te_cp_batch;

/* Returns this rank's tokens of x, a batch that every rank has whole: [.., s / n, ..]. NULL with TE_ERR_SHAPE where 2 n
 * does not divide the number of tokens. cu_seqlens_padded that cannot be divided are refused on the CPU; a GPU leaves
 * such a sequence where it is. Source: transformer_engine.pytorch, get_batch_on_this_cp_rank (there for TE_THD
 * alone). */
TE_API te_tensor *te_get_batch_on_this_cp_rank(te_tensor *x, const te_cp_batch *batch);
/* Undoes te_get_batch_on_this_cp_rank: gathers the ranks' x [.., s / n, ..] into the whole batch, in the order of the
 * sequences, on every rank. All ranks call it. A rank whose x is NULL tells the others, and every rank gets NULL. */
TE_API te_tensor *te_gather_batch_of_cp_ranks(te_tensor *x, const te_cp_batch *batch);
/* Returns the indices of this rank's tokens among all `total_tokens`, i32 [total_tokens / cp_size], for
 * te_embedding_lookup. cu_seqlens: i32 [b + 1] of packed sequences with their padding. Source:
 * transformer_engine_torch, thd_get_partitioned_indices. */
TE_API te_tensor *te_thd_get_partitioned_indices(te_tensor *cu_seqlens, int64_t total_tokens, int cp_size, int cp_rank);

/* The result of te_pad_thd_sequences_for_cp: a packed batch whose sequences have padded lengths. */
typedef struct te_padded_sequences {
    te_tensor *input_ids, *labels;  /* [N'], in the formats of the arguments */
    te_tensor *cu_seqlens_padded;   /* i32 [b + 1] */
} te_padded_sequences;
/* Pads each sequence of input_ids and labels (i32 or i64, [N] or [1, N]; labels may be NULL) behind its end to a
 * multiple of divisibility_factor, which is 2 * cp_size. The padding is padding_token_id (usually 0) and
 * padding_label_id (usually -100, which te_cross_entropy ignores). cu_seqlens: i32 [b + 1]; tokens behind the last
 * sequence are dropped. Copies all three tensors to the host, so it waits for the device. TE_ERR_INVALID for cu_seqlens
 * that descend or pass the end.
 * Source: transformer_engine.pytorch, pad_thd_sequences_for_cp. */
TE_API te_result te_pad_thd_sequences_for_cp(te_tensor *input_ids, te_tensor *labels, te_tensor *cu_seqlens,
                                             int64_t divisibility_factor, int64_t padding_token_id,
                                             int64_t padding_label_id, te_padded_sequences *out);
/* Returns the positions 0, 1, 2 .. of each sequence, continued through its padding, for sequences padded by
 * te_pad_thd_sequences_for_cp: i32 or i64 (dtype 0 => i64) [N']. Copies cu_seqlens to the host, so it waits for the
 * device. Source: transformer_engine.pytorch, generate_positional_ids_for_cp. */
TE_API te_tensor *te_generate_positional_ids_for_cp(te_tensor *cu_seqlens, int64_t divisibility_factor, te_dtype dtype);
