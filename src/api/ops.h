/* api/ops.h: raw operations: explicit outputs, an args struct, no tape. For engines that bring their own graph; the
 * functions and modules of the later chapters call these and nothing else.
 *
 * A call resolves defaults, validates, plans, launches; an error comes before any side effect. The caller allocates
 * outputs. Asynchronous on CUDA, synchronous on the CPU; no hidden host wait. The first call with a new combination of
 * formats compiles a kernel (or loads it from the cache); workspace comes from the context's pool. Every operation
 * gives the same bits again on the same device.
 *
 * Every operation refuses alike. A tensor gives TE_ERR_STATE if it is needed and NULL, or made by te_tensor_describe;
 * TE_ERR_INVALID if it is of another context; TE_ERR_DTYPE if it is a quantized tensor (its copies are plain ones:
 * te_quantized_view) or of a format that the operation does not take there; TE_ERR_SHAPE if it is strided, where
 * strides are not mentioned. An output shares no byte with any other tensor of the call (TE_ERR_INVALID), but for what
 * an operation says: "y may be x" is the very same elements in the same format. Of lists only the tensors of one place
 * are compared.
 *
 * Unless said otherwise: tensors are plain, contiguous and of the call's context, borrowed for the call; float tensors
 * are f32, f16 or bf16; sums are taken in f32 or better; results are rounded once. M is the product of the leading
 * sizes and N the last size. "optional" fields may be NULL. These fields mean the same everywhere:
 *   seed, offset  the random numbers that are drawn: those of Philox4x32-10 with this key, at this offset
 *   rng           optional i64 [2], a random state on the device: its first number replaces seed, its second is added
 *                 to offset
 *   noop          optional f32 [1] on the device: 1.0 => the call writes nothing
 *   fp8_max       the largest code: 448 for e4m3, 57344 for e5m2
 *   format        order of dimensions; 0 => [s, b, H, d] */

/* Every operation, once: X(lower-case name, UPPER-CASE name, family). */
#define TE_OP_LIST(X)                                  \
    X(copy, COPY, math)                                \
    X(fill, FILL, math)                                \
    X(random, RANDOM, math)                            \
    X(axpby, AXPBY, math)                              \
    X(mul, MUL, math)                                  \
    X(sum, SUM, math)                                  \
    X(column_sum, COLUMN_SUM, math)                    \
    X(row_dot, ROW_DOT, math)                          \
    X(embedding_fwd, EMBEDDING_FWD, math)              \
    X(embedding_bwd, EMBEDDING_BWD, math)              \
    X(amax, AMAX, cast)                                \
    X(scale_from_amax, SCALE_FROM_AMAX, cast)          \
    X(delayed_update, DELAYED_UPDATE, cast)            \
    X(fp8_quantize, FP8_QUANTIZE, cast)                \
    X(fp8_dequantize, FP8_DEQUANTIZE, cast)            \
    X(transpose, TRANSPOSE, cast)                      \
    X(delayed_gather, DELAYED_GATHER, cast)            \
    X(block_quantize, BLOCK_QUANTIZE, block)           \
    X(block_dequantize, BLOCK_DEQUANTIZE, block)       \
    X(mxfp8_quantize, MXFP8_QUANTIZE, mxfp8)           \
    X(mxfp8_dequantize, MXFP8_DEQUANTIZE, mxfp8)       \
    X(shard_amax, SHARD_AMAX, shard)                   \
    X(shard_scales, SHARD_SCALES, shard)               \
    X(shard_cast, SHARD_CAST, shard)                   \
    X(quant_error, QUANT_ERROR, stats)                 \
    X(nvfp4_amax, NVFP4_AMAX, nvfp4)                   \
    X(nvfp4_quantize, NVFP4_QUANTIZE, nvfp4)           \
    X(nvfp4_dequantize, NVFP4_DEQUANTIZE, nvfp4)       \
    X(gemm, GEMM, gemm)                                \
    X(grouped_gemm, GROUPED_GEMM, gemm)                \
    X(layernorm_fwd, LAYERNORM_FWD, norm)              \
    X(layernorm_bwd, LAYERNORM_BWD, norm)              \
    X(rmsnorm_fwd, RMSNORM_FWD, norm)                  \
    X(rmsnorm_bwd, RMSNORM_BWD, norm)                  \
    X(l2normalize_fwd, L2NORMALIZE_FWD, norm)          \
    X(l2normalize_bwd, L2NORMALIZE_BWD, norm)          \
    X(act_fwd, ACT_FWD, act)                           \
    X(act_bwd, ACT_BWD, act)                           \
    X(scaled_act_fwd, SCALED_ACT_FWD, act)             \
    X(scaled_act_bwd, SCALED_ACT_BWD, act)             \
    X(rope, ROPE, rope)                                \
    X(qkv_rope, QKV_ROPE, rope)                        \
    X(qkv_rope_bwd, QKV_ROPE_BWD, rope)                \
    X(attn_fwd, ATTN_FWD, attn)                        \
    X(attn_bwd, ATTN_BWD, attn)                        \
    X(sparse_attn_fwd, SPARSE_ATTN_FWD, attn)          \
    X(sparse_attn_bwd, SPARSE_ATTN_BWD, attn)          \
    X(cu_seqlens, CU_SEQLENS, kv)                      \
    X(copy_to_kv_cache, COPY_TO_KV_CACHE, kv)          \
    X(detect_causal_mask, DETECT_CAUSAL_MASK, kv)      \
    X(context_rows, CONTEXT_ROWS, context)             \
    X(context_lengths, CONTEXT_LENGTHS, context)       \
    X(context_merge, CONTEXT_MERGE, context)           \
    X(softmax_fwd, SOFTMAX_FWD, softmax)               \
    X(softmax_bwd, SOFTMAX_BWD, softmax)               \
    X(dropout_add_fwd, DROPOUT_ADD_FWD, dropout)       \
    X(dropout_add_bwd, DROPOUT_ADD_BWD, dropout)       \
    X(cross_entropy_fwd, CROSS_ENTROPY_FWD, loss)      \
    X(cross_entropy_merge, CROSS_ENTROPY_MERGE, loss)  \
    X(cross_entropy_bwd, CROSS_ENTROPY_BWD, loss)      \
    X(mse_fwd, MSE_FWD, loss)                          \
    X(mse_bwd, MSE_BWD, loss)                          \
    X(adam, ADAM, optim)                               \
    X(store_state, STORE_STATE, optim)                 \
    X(sgd, SGD, optim)                                 \
    X(l2norm, L2NORM, optim)                           \
    X(multi_scale, MULTI_SCALE, optim)                 \
    X(step_numbers, STEP_NUMBERS, optim)               \
    X(update_scale, UPDATE_SCALE, optim)               \
    X(moe_splits, MOE_SPLITS, moe)                     \
    X(moe_mask_map, MOE_MASK_MAP, moe)                 \
    X(moe_index_map, MOE_INDEX_MAP, moe)               \
    X(moe_local_ids, MOE_LOCAL_IDS, moe)               \
    X(moe_chunk_map, MOE_CHUNK_MAP, moe)               \
    X(moe_permute, MOE_PERMUTE, moe)                   \
    X(moe_unpermute, MOE_UNPERMUTE, moe)               \
    X(moe_unpermute_bwd, MOE_UNPERMUTE_BWD, moe)       \
    X(moe_router_fwd, MOE_ROUTER_FWD, moe)             \
    X(moe_router_bwd, MOE_ROUTER_BWD, moe)             \
    X(moe_aux_loss_fwd, MOE_AUX_LOSS_FWD, moe)         \
    X(moe_aux_loss_bwd, MOE_AUX_LOSS_BWD, moe)         \
    X(grouped_column_sum, GROUPED_COLUMN_SUM, moe)     \
    X(softcap, SOFTCAP, softcap)

/* The operations: TE_OP_COPY, TE_OP_FILL ..., in the order of TE_OP_LIST. */
typedef enum te_op {
    TE_OP_NONE = 0, /* none: refused */
#define TE_OP_ID(lower, UPPER, family) TE_OP_##UPPER,
    TE_OP_LIST(TE_OP_ID)
#undef TE_OP_ID
        TE_OP_COUNT
} te_op;

/* The name of an operation: "gemm", "fp8_quantize" ... Static string; "?" for a value outside the list. */
TE_API const char *te_query_name(te_op op);
/* The name of its family, which is that of its folder of kernels: "gemm", "cast" ... Static string; "?" for a value
 * outside the list. */
TE_API const char *te_query_family(te_op op);

/* ---- math ---------------------------------------------------------------------------------------------------- */

/* dst = src, converting between any two unquantized formats (f32, f16, bf16, i32, i64, u8; float to float rounds to
 * nearest even). Equal shapes, any strides on both sides. Raw bytes of 8-bit formats copy to the same format or u8.
 * src and dst may share memory: dst becomes what it would if all of src were read first (through a workspace of the
 * narrower format, where the ranges of their bytes overlap). If each element is its own copy, nothing is done. */
typedef struct te_op_copy_args {
    const te_tensor *src;
    te_tensor *dst;
} te_op_copy_args;

/* dst[i] = value, rounded to nearest even; for integers truncated and saturated. Any format but e2m1. */
typedef struct te_op_fill_args {
    te_tensor *dst;
    double value;
} te_op_fill_args;

/* dst[i]: uniform on [a, b), b - a finite, or normal with mean a and standard deviation b; element i comes from
 * Philox4x32-10 block i / 4 of (seed, offset). Computed in f32 and rounded to the format: in f16 and bf16 a uniform
 * number may become b itself. Contiguous, f32/f16/bf16. */
typedef struct te_op_random_args {
    te_tensor *dst;
    te_random_kind kind; /* 0 => uniform */
    float a, b;
    uint64_t seed, offset;
    const te_tensor *rng;    /* optional */
} te_op_random_args;

/* out = alpha * x + beta * y, in f32. Same shape; y optional (then beta is not read); out may be x or y. Formats may
 * differ. alpha_device: optional f32 [1] that multiplies alpha; divide_device: optional f32 [1]: alpha is divided by
 * max(divide_device, 1). */
typedef struct te_op_axpby_args {
    const te_tensor *x, *y;
    te_tensor *out;
    float alpha, beta;
    const te_tensor *alpha_device;
    const te_tensor *divide_device;
} te_op_axpby_args;

/* out = x * y, in f32. out of x's shape [.., N]; y of x's shape, or [M]: one number for each of its M rows. Formats may
 * differ; out may be x, or y of x's shape. */
typedef struct te_op_mul_args {
    const te_tensor *x, *y;
    te_tensor *out;
} te_op_mul_args;

/* out f32 [1] = scale * sum of all elements of x, in a fixed order. */
typedef struct te_op_sum_args {
    const te_tensor *x;
    te_tensor *out;
    float scale; /* 0 => 1 */
} te_op_sum_args;

/* out [N] = (accumulate ? out : 0) + sum over the M rows of x [.., N]: a bias gradient. */
typedef struct te_op_column_sum_args {
    const te_tensor *x;
    te_tensor *out;
    bool accumulate;
} te_op_column_sum_args;

/* out [M] of any float format = the products of the M rows of x and of y [.., N], each summed up in f32: the gradient
 * of factors of rows. */
typedef struct te_op_row_dot_args {
    const te_tensor *x, *y;
    te_tensor *out;
} te_op_row_dot_args;

/* y [.., H] = table [V, H] at ids (i32 or i64, any shape [..]).
 *   vocab_size, vocab_start   the table is rows vocab_start .. vocab_start + V - 1 of a vocabulary of vocab_size, which
 *                             ranks share: an id of another rank's gives a row of zeros, so that the sum over the ranks
 *                             is the whole; 0 => V: all of it
 *   from_end   ids -vocab_size .. -1 count from the end of the vocabulary
 * Other ids outside 0 .. vocab_size - 1 are an error (TE_ERR_INVALID): of the call on the CPU, of the next call that
 * waits on a GPU (te_synchronize), where they give rows of zeros. */
typedef struct te_op_embedding_fwd_args {
    const te_tensor *ids, *table;
    te_tensor *y;
    int64_t vocab_size, vocab_start;
    bool from_end;
} te_op_embedding_fwd_args;
/* dtable [V, H] = (accumulate ? dtable : 0) + the rows of dy [.., H] at ids, summed in f32 in the order of the ids.
 * vocab_size, vocab_start, from_end and ids out of range: as in the forward. */
typedef struct te_op_embedding_bwd_args {
    const te_tensor *ids, *dy;
    te_tensor *dtable;
    bool accumulate;
    int64_t vocab_size, vocab_start;
    bool from_end;
} te_op_embedding_bwd_args;
