/* api/ops.h: the rules of all raw operations, and the args of the mathematical ones. A raw operation has an args struct
 * with explicit outputs. It is not recorded for te_backward: raw operations serve programs with an autograd graph of
 * their own.
 *
 * The caller allocates the outputs. A call that is refused changes nothing. Calls are asynchronous on CUDA, and never
 * wait for the device. They are synchronous on the CPU. The first call with a new combination of formats compiles a
 * kernel (or loads it from the cache). Workspace comes from the context's memory pool. Every operation gives the same
 * bits again on the same device.
 *
 * Every operation refuses these tensors:
 *   TE_ERR_STATE    a NULL tensor that is needed, or a tensor made by te_tensor_describe
 *   TE_ERR_INVALID  a tensor of another context, or an output that shares a byte with another tensor of the call. "y
 *                   may be x" allows both to be the same elements in the same format. In lists, only tensors at the
 *                   same index are compared
 *   TE_ERR_DTYPE    a quantized tensor (te_quantized_view returns its codes and scales as plain tensors), or a format
 *                   that this argument does not allow
 *   TE_ERR_SHAPE    a strided tensor, unless the operation's comment allows strides
 *
 * Unless said otherwise, tensors are plain, contiguous and borrowed for the call. Float tensors are f32, f16 or bf16.
 * Sums are taken in f32 or better; results are rounded once. N is the last size of a tensor, M the product of all other
 * sizes. "optional" fields may be NULL. These fields mean the same everywhere:
 *   seed, offset  the key and the offset of Philox4x32-10, from which random numbers come
 *   rng           optional i64 [2], a random state on the device: number 0 replaces seed, number 1 is added to offset
 *   noop          optional f32 [1] on the device: 1.0 => the call writes nothing
 *   fp8_max       the largest value of a code: 448 for e4m3, 57344 for e5m2
 *   format        order of dimensions; 0 => [s, b, H, d] */

/* The list of operations, each named once: X(lower-case name, UPPER-CASE name, family). */
#define TE_OP_LIST_CORE(X)                            \
    X(copy, COPY, math)                               \
    X(fill, FILL, math)                               \
    X(random, RANDOM, math)                           \
    X(axpby, AXPBY, math)                             \
    X(mul, MUL, math)                                 \
    X(sum, SUM, math)                                 \
    X(column_sum, COLUMN_SUM, math)                   \
    X(row_dot, ROW_DOT, math)                         \
    X(argmax, ARGMAX, math)                           \
    X(embedding_fwd, EMBEDDING_FWD, math)             \
    X(embedding_bwd, EMBEDDING_BWD, math)             \
    X(amax, AMAX, cast)                               \
    X(scale_from_amax, SCALE_FROM_AMAX, cast)         \
    X(delayed_update, DELAYED_UPDATE, cast)           \
    X(fp8_quantize, FP8_QUANTIZE, cast)               \
    X(fp8_dequantize, FP8_DEQUANTIZE, cast)           \
    X(transpose, TRANSPOSE, cast)                     \
    X(delayed_gather, DELAYED_GATHER, cast)           \
    X(block_quantize, BLOCK_QUANTIZE, block)          \
    X(block_dequantize, BLOCK_DEQUANTIZE, block)      \
    X(mxfp8_quantize, MXFP8_QUANTIZE, mxfp8)          \
    X(mxfp8_dequantize, MXFP8_DEQUANTIZE, mxfp8)      \
    X(shard_amax, SHARD_AMAX, shard)                  \
    X(shard_scales, SHARD_SCALES, shard)              \
    X(shard_cast, SHARD_CAST, shard)                  \
    X(quant_error, QUANT_ERROR, stats)                \
    X(nvfp4_amax, NVFP4_AMAX, nvfp4)                  \
    X(nvfp4_quantize, NVFP4_QUANTIZE, nvfp4)          \
    X(nvfp4_dequantize, NVFP4_DEQUANTIZE, nvfp4)      \
    X(gemm, GEMM, gemm)                               \
    X(grouped_gemm, GROUPED_GEMM, gemm)               \
    X(layernorm_fwd, LAYERNORM_FWD, norm)             \
    X(layernorm_bwd, LAYERNORM_BWD, norm)             \
    X(rmsnorm_fwd, RMSNORM_FWD, norm)                 \
    X(rmsnorm_bwd, RMSNORM_BWD, norm)                 \
    X(l2normalize_fwd, L2NORMALIZE_FWD, norm)         \
    X(l2normalize_bwd, L2NORMALIZE_BWD, norm)         \
    X(act_fwd, ACT_FWD, act)                          \
    X(act_bwd, ACT_BWD, act)                          \
    X(scaled_act_fwd, SCALED_ACT_FWD, act)            \
    X(scaled_act_bwd, SCALED_ACT_BWD, act)            \
    X(rope, ROPE, rope)                               \
    X(qkv_rope, QKV_ROPE, rope)                       \
    X(qkv_rope_bwd, QKV_ROPE_BWD, rope)               \
    X(attn_fwd, ATTN_FWD, attn)                       \
    X(attn_bwd, ATTN_BWD, attn)                       \
    X(sparse_attn_fwd, SPARSE_ATTN_FWD, attn)         \
    X(sparse_attn_bwd, SPARSE_ATTN_BWD, attn)         \
    X(cu_seqlens, CU_SEQLENS, kv)                     \
    X(copy_to_kv_cache, COPY_TO_KV_CACHE, kv)         \
    X(advance_kv_cache, ADVANCE_KV_CACHE, kv)         \
    X(detect_causal_mask, DETECT_CAUSAL_MASK, kv)     \
    X(softmax_fwd, SOFTMAX_FWD, softmax)              \
    X(softmax_bwd, SOFTMAX_BWD, softmax)              \
    X(dropout_add_fwd, DROPOUT_ADD_FWD, dropout)      \
    X(dropout_add_bwd, DROPOUT_ADD_BWD, dropout)      \
    X(cross_entropy_fwd, CROSS_ENTROPY_FWD, loss)     \
    X(cross_entropy_merge, CROSS_ENTROPY_MERGE, loss) \
    X(cross_entropy_bwd, CROSS_ENTROPY_BWD, loss)     \
    X(mse_fwd, MSE_FWD, loss)                         \
    X(mse_bwd, MSE_BWD, loss)                         \
    X(adam, ADAM, optim)                              \
    X(store_state, STORE_STATE, optim)                \
    X(sgd, SGD, optim)                                \
    X(l2norm, L2NORM, optim)                          \
    X(multi_scale, MULTI_SCALE, optim)                \
    X(step_numbers, STEP_NUMBERS, optim)              \
    X(update_scale, UPDATE_SCALE, optim)              \
    X(softcap, SOFTCAP, softcap)                      \
    X(joint_gemm, JOINT_GEMM, joint)
/* The operations for sequences that ranks share. */
#define TE_OP_LIST_DIST(X)                       \
    X(context_rows, CONTEXT_ROWS, context)       \
    X(context_lengths, CONTEXT_LENGTHS, context) \
    X(context_merge, CONTEXT_MERGE, context)
/* The operations of mixtures of experts. */
#define TE_OP_LIST_MOE(X)                          \
    X(moe_splits, MOE_SPLITS, moe)                 \
    X(moe_mask_map, MOE_MASK_MAP, moe)             \
    X(moe_index_map, MOE_INDEX_MAP, moe)           \
    X(moe_local_ids, MOE_LOCAL_IDS, moe)           \
    X(moe_chunk_map, MOE_CHUNK_MAP, moe)           \
    X(moe_permute, MOE_PERMUTE, moe)               \
    X(moe_unpermute, MOE_UNPERMUTE, moe)           \
    X(moe_unpermute_bwd, MOE_UNPERMUTE_BWD, moe)   \
    X(moe_router_fwd, MOE_ROUTER_FWD, moe)         \
    X(moe_router_bwd, MOE_ROUTER_BWD, moe)         \
    X(moe_aux_loss_fwd, MOE_AUX_LOSS_FWD, moe)     \
    X(moe_aux_loss_bwd, MOE_AUX_LOSS_BWD, moe)     \
    X(grouped_column_sum, GROUPED_COLUMN_SUM, moe)
/* All operations, also those that a build leaves out. */
#define TE_OP_LIST_ALL(X) TE_OP_LIST_CORE(X) TE_OP_LIST_DIST(X) TE_OP_LIST_MOE(X)
/* Expands the macro X for each operation of this build, and the macro `NONE` for each other operation, in the order of
 * te_op. TE_NO_MOE without TE_NO_DIST leaves out no operation, because context parallelism uses operations of
 * TE_OP_LIST_MOE. */
#define TE_OP_LIST_EACH(X, NONE) \
    TE_OP_LIST_CORE(X) TE_OP_LIST_DIST(TE_OP_DIST(X, NONE)) TE_OP_LIST_MOE(TE_OP_MOE(X, NONE))
/* The operations of this build. */
#define TE_OP_LIST(X) TE_OP_LIST_EACH(X, TE_OP_LEFT_OUT)
/* Expands to nothing. It stands for an operation that this build leaves out. */
#define TE_OP_LEFT_OUT(lower, UPPER, family)
#ifdef TE_NO_DIST
#define TE_OP_DIST(X, NONE) NONE /* this build leaves out the operations of TE_OP_LIST_DIST; they get NONE */
#else
#define TE_OP_DIST(X, NONE) X /* this build has the operations of TE_OP_LIST_DIST; they get X */
#endif
#if defined(TE_NO_MOE) && defined(TE_NO_DIST)
#define TE_OP_MOE(X, NONE) NONE /* this build leaves out the operations of TE_OP_LIST_MOE; they get NONE */
#else
#define TE_OP_MOE(X, NONE) X /* this build has the operations of TE_OP_LIST_MOE; they get X */
#endif

/* The numbers of the operations: TE_OP_COPY, TE_OP_FILL and so on. They do not depend on TE_NO_DIST and TE_NO_MOE. */
typedef enum te_op {
    TE_OP_NONE = 0, /* no operation; calls refuse it */
#define TE_OP_ID(lower, UPPER, family) TE_OP_##UPPER,
    TE_OP_LIST_ALL(TE_OP_ID)
#undef TE_OP_ID
        TE_OP_COUNT
} te_op;

/* Returns the name of an operation, such as "gemm" or "fp8_quantize"; "?" for a value outside the list. Static
 * string. */
TE_API const char *te_query_name(te_op op);
/* Returns the name of an operation's family, such as "gemm" or "cast"; "?" for a value outside the list. Static
 * string. */
TE_API const char *te_query_family(te_op op);

/* ---- math ---------------------------------------------------------------------------------------------------- */

/* dst = src, converted between f32, f16, bf16, i32, i64 and u8; float to float rounds to nearest even. 8-bit floats and
 * i16 are not converted: dst must have the format of src or, for 8-bit floats, u8, which receives the same bytes. src
 * and dst have equal shapes and any strides. src and dst may share memory: all of src is read before dst is written. If
 * their byte ranges overlap, the call takes a workspace for all elements in the narrower format. */
typedef struct te_op_copy_args {
    const te_tensor *src;
    te_tensor *dst;
} te_op_copy_args;

/* Sets every element of dst to `value`, rounded to nearest even (integers: truncated, saturated). dst is not e2m1. */
typedef struct te_op_fill_args {
    te_tensor *dst;
    double value;
} te_op_fill_args;

/* Sets every dst[i] to a random number: uniform on [a, b), with b - a finite, or normal with mean a and standard
 * deviation b. Element i comes from block i / 4 of Philox4x32-10 at (seed, offset). Rounding a uniform number to f16 or
 * bf16 may give b itself. */
typedef struct te_op_random_args {
    te_tensor *dst;
    te_random_kind kind; /* 0 => uniform */
    float a, b;
    uint64_t seed, offset;
    const te_tensor *rng;    /* optional */
} te_op_random_args;

/* out = alpha * x + beta * y, in f32. All three have the same shape; their formats may differ. out may be x or y.
 *   y              optional; NULL => beta is not read
 *   alpha_device   optional f32 [1], multiplies alpha
 *   divide_device  optional f32 [1]; alpha is divided by max(divide_device, 1) */
typedef struct te_op_axpby_args {
    const te_tensor *x, *y;
    te_tensor *out;
    float alpha, beta;
    const te_tensor *alpha_device;
    const te_tensor *divide_device;
} te_op_axpby_args;

/* out = x * y, in f32. y has x's shape, or is [M]: one factor for each row of x. Formats may differ. out may be x, or y
 * if y has x's shape. */
typedef struct te_op_mul_args {
    const te_tensor *x, *y;
    te_tensor *out;
} te_op_mul_args;

/* out f32 [1] = scale * the sum of all elements of x, added in a fixed order. */
typedef struct te_op_sum_args {
    const te_tensor *x;
    te_tensor *out;
    float scale; /* 0 => 1 */
} te_op_sum_args;

/* out [N] = (accumulate ? out : 0) + the sum of the M rows of x [.., N]. This is the gradient of a bias. */
typedef struct te_op_column_sum_args {
    const te_tensor *x;
    te_tensor *out;
    bool accumulate;
} te_op_column_sum_args;

/* out[m] is the dot product of row m of x and row m of y, in f32. out [M] has any float format. */
typedef struct te_op_row_dot_args {
    const te_tensor *x, *y;
    te_tensor *out;
} te_op_row_dot_args;

/* out[m], i32, is the index of the largest element of row m of x [.., N]: the lowest index, if several are equal. NaN
 * counts as larger than all numbers, and -0 equals 0. out has one element for each row. N is 1 to 2^31 - 1. */
typedef struct te_op_argmax_args {
    const te_tensor *x;
    te_tensor *out;
} te_op_argmax_args;

/* Row lookup: y [.., H] = table[ids], table [V, H], ids i32 or i64 of any shape [..].
 *   vocab_size, vocab_start   the table has rows vocab_start .. vocab_start + V - 1 of a vocabulary of vocab_size rows,
 *                             which is split over ranks. An id of another rank gives a row of zeros: sum y over the
 *                             ranks. vocab_size 0 => V
 *   from_end   true => ids -vocab_size .. -1 count from the end of the vocabulary
 * TE_ERR_INVALID for other ids outside 0 .. vocab_size - 1. The CPU returns it from the call. A GPU gives rows of
 * zeros, and returns it from the next call that waits (te_synchronize). */
typedef struct te_op_embedding_fwd_args {
    const te_tensor *ids, *table;
    te_tensor *y;
    int64_t vocab_size, vocab_start;
    bool from_end;
} te_op_embedding_fwd_args;
/* dtable [V, H] = (accumulate ? dtable : 0) + the gradient: each row of dy [.., H] is added, in f32, to the row of its
 * id, in the order of the ids. Ids out of range: as in the forward. */
typedef struct te_op_embedding_bwd_args {
    const te_tensor *ids, *dy;
    te_tensor *dtable;
    bool accumulate;
    int64_t vocab_size, vocab_start; /* the forward's */
    bool from_end; /* the forward's */
} te_op_embedding_bwd_args;
