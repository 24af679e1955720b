/* api/context_parallel.h: batches for ranks that share sequences (te_parallel_options.cp_group), in TransformerEngine's
 * layout. With n ranks, a sequence is cut into 2n chunks of equal length. Rank r has two of them: chunk r, then chunk
 * 2n - 1 - r. Elements must be whole bytes. Results are new tensors in the innermost scope, without gradients.
 *
 *     te_pad_thd_sequences_for_cp      called once per batch: pads sequences to multiples of 2 n
 *     te_get_batch_on_this_cp_rank     returns this rank's part of ids, targets or positions
 *     te_gather_batch_of_cp_ranks      gathers the parts of all ranks */

/* How the tokens of a batch are laid out, and which ranks share them. */
typedef struct te_cp_batch {
    te_group *cp_group;     /* the ranks that share the tokens (borrowed); NULL => this rank alone (TransformerEngine:
                             * all ranks) */
    te_group *cp_p2p_group; /* the ranks of the ring with TE_CP_A2A_P2P (borrowed); NULL => none */
    te_qkv_format format;   /* says which dimension of a tensor holds the tokens: the first for TE_SBHD, the second for
                             * TE_BSHD. For TE_THD it is the first, or the second if the tensor is [1, tokens, ..]. 0 =>
                             * TE_SBHD (TransformerEngine: thd) */
    te_tensor *cu_seqlens_padded; /* for TE_THD: i32 [b + 1], where each padded sequence begins (borrowed); lengths are
                                   * multiples of 2 n, for n ranks */
} te_cp_batch;

/* Returns this rank's tokens of x: [.., s / n, ..] with n ranks. x [.., s, ..] is the whole batch, on every rank.
 * TE_ERR_SHAPE if 2 n does not divide s. 2 n must also divide each length in cu_seqlens_padded: else the call fails on
 * the CPU, but gives a wrong result on a GPU.
 * Source: transformer_engine.pytorch, get_batch_on_this_cp_rank, which takes TE_THD alone. */
TE_API te_tensor *te_get_batch_on_this_cp_rank(te_tensor *x, const te_cp_batch *batch);
/* Undoes te_get_batch_on_this_cp_rank: gathers the n ranks' x [.., s / n, ..] into the whole batch, on every rank. All
 * ranks must call it. If x is NULL on one rank, every rank gets NULL. */
TE_API te_tensor *te_gather_batch_of_cp_ranks(te_tensor *x, const te_cp_batch *batch);
/* Returns the indices of this rank's tokens among all total_tokens tokens, for te_embedding_lookup: i32 [total_tokens /
 * cp_size]. cu_seqlens is i32 [b + 1]: where each padded sequence begins.
 * Source: transformer_engine_torch, thd_get_partitioned_indices. */
TE_API te_tensor *te_thd_get_partitioned_indices(te_tensor *cu_seqlens, int64_t total_tokens, int cp_size, int cp_rank);

/* The result of te_pad_thd_sequences_for_cp: a packed batch whose sequences have padded lengths. */
typedef struct te_padded_sequences {
    te_tensor *input_ids, *labels;  /* [N'], N' tokens with padding, in the formats of the arguments */
    te_tensor *cu_seqlens_padded;   /* i32 [b + 1] */
} te_padded_sequences;
/* Pads each sequence of input_ids and labels (i32 or i64, [N] or [1, N]; labels may be NULL) at its end, to a multiple
 * of divisibility_factor (normally 2 * cp_size). The padding is padding_token_id (usually 0) and padding_label_id
 * (usually -100, which te_cross_entropy ignores).
 * cu_seqlens is i32 [b + 1]; tokens behind the last sequence are dropped. TE_ERR_INVALID if the numbers in cu_seqlens
 * descend or are above N. Syncs: copies the three tensors to the host.
 * Source: transformer_engine.pytorch, pad_thd_sequences_for_cp. */
TE_API te_result te_pad_thd_sequences_for_cp(te_tensor *input_ids, te_tensor *labels, te_tensor *cu_seqlens,
                                             int64_t divisibility_factor, int64_t padding_token_id,
                                             int64_t padding_label_id, te_padded_sequences *out);
/* Returns the positions of all N' tokens of te_pad_thd_sequences_for_cp, padding included: [N'], in i32 or i64 (dtype 0
 * => i64). They count 0, 1, 2 and so on in each sequence, through its padding. Syncs: copies cu_seqlens to the host.
 * Source: transformer_engine.pytorch, generate_positional_ids_for_cp. */
TE_API te_tensor *te_generate_positional_ids_for_cp(te_tensor *cu_seqlens, int64_t divisibility_factor, te_dtype dtype);
