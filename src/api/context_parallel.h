/* api/context_parallel.h: batches for ranks that share sequences (te_parallel_options.cp_group), in TransformerEngine's
 * layout: a sequence is 2 n chunks of one length, and rank r of n has numbers r and 2 n - 1 - r, one behind the other.
 * Tensors of any format of whole bytes; results are new tensors of the innermost scope, without history.
 *
 *     te_pad_thd_sequences_for_cp      once for a batch: sequences become multiples of 2 n long
 *     te_get_batch_on_this_cp_rank     for ids, targets, positions: this rank's tokens
 *     te_gather_batch_of_cp_ranks      and all tokens back, of what the model made of them */

/* How the tokens of a batch lie, and who has them. */
typedef struct te_cp_batch {
    te_group *cp_group;     /* the ranks (borrowed); NULL => one rank, which has all */
    te_group *cp_p2p_group; /* with TE_CP_A2A_P2P (borrowed) */
    te_qkv_format format;   /* tokens along the first dimension, TE_BSHD: the second; TE_THD: the first, or [1, tokens,
                             * ..] */
    te_tensor *cu_seqlens_padded; /* TE_THD: i32 [b + 1], where each sequence begins, padding included: multiples of 2 n
                                   * (borrowed) */
} te_cp_batch;

/* This rank's tokens of x, a batch that every rank has whole: [.., s / n, ..]. NULL with TE_ERR_SHAPE where 2 n ranks'
 * chunks do not divide the tokens. On the CPU wrong starts are refused; a GPU leaves what cannot be divided where it
 * is. Source: transformer_engine.pytorch, get_batch_on_this_cp_rank (there for TE_THD alone). */
TE_API te_tensor *te_get_batch_on_this_cp_rank(te_tensor *x, const te_cp_batch *batch);
/* The other way round: the ranks' x [.., s / n, ..] as a whole in the order of the sequences, on every rank. All ranks
 * call it: one without an x tells the others, and all get NULL. */
TE_API te_tensor *te_gather_batch_of_cp_ranks(te_tensor *x, const te_cp_batch *batch);
/* The numbers of this rank's tokens among all of `total_tokens`, i32 [total_tokens / cp_size], by cu_seqlens i32 [b +
 * 1] of packed sequences with their padding: for te_embedding_lookup. Source: transformer_engine_torch,
 * thd_get_partitioned_indices. */
TE_API te_tensor *te_thd_get_partitioned_indices(te_tensor *cu_seqlens, int64_t total_tokens, int cp_size, int cp_rank);

/* A packed batch whose sequences are multiples of a number long. */
typedef struct te_padded_sequences {
    te_tensor *input_ids, *labels;  /* [N'], of the given formats */
    te_tensor *cu_seqlens_padded;   /* i32 [b + 1] */
} te_padded_sequences;
/* Pads each sequence of input_ids and labels (i32 or i64, [N] or [1, N]; labels may be NULL) behind its end to a
 * multiple of divisibility_factor, which is 2 * cp_size, with padding_token_id (usually 0) and padding_label_id
 * (usually -100, which te_cross_entropy ignores). cu_seqlens i32 [b + 1]: tokens behind the last sequence are dropped.
 * Reads all three to the host, so it waits for the device. TE_ERR_INVALID for starts that descend or pass the end.
 * Source: transformer_engine.pytorch, pad_thd_sequences_for_cp. */
TE_API te_result te_pad_thd_sequences_for_cp(te_tensor *input_ids, te_tensor *labels, te_tensor *cu_seqlens,
                                             int64_t divisibility_factor, int64_t padding_token_id,
                                             int64_t padding_label_id, te_padded_sequences *out);
/* 0, 1, 2 .. of each sequence, through its padding, for sequences that are padded so: i32 or i64 (0 => i64) [N']. Reads
 * cu_seqlens to the host. Source: transformer_engine.pytorch, generate_positional_ids_for_cp. */
TE_API te_tensor *te_generate_positional_ids_for_cp(te_tensor *cu_seqlens, int64_t divisibility_factor, te_dtype dtype);
