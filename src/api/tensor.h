/* api/tensor.h: tensors.
 *
 * A tensor is a reference-counted view of a block of memory: number format, at most TE_MAX_DIMS sizes, strides. It
 * belongs to the innermost scope (te_scope_begin); te_tensor_retain keeps it beyond. Shapes are row-major: the last
 * size varies fastest. A size may be 0. Of 4-bit formats (e2m1) two elements share a byte, the even one in its low
 * half, and each row (run along the last size) begins at a whole byte: [3, 5] has 9 bytes, and a tensor without
 * dimensions 1.
 *
 * A function that is given a NULL tensor returns NULL (or TE_ERR_STATE, 0, false, "") and reports nothing: the call
 * that made the NULL has reported already. */

/* A new tensor, [shape], uninitialised. Allocates. */
TE_API te_tensor *te_tensor_empty(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);
/* A new tensor whose bytes are 0, of any format. Allocates. */
TE_API te_tensor *te_tensor_zeros(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);
/* A new tensor whose elements are `value`, rounded to nearest even (integers: truncated, saturated). Not e2m1.
 * Allocates. */
TE_API te_tensor *te_tensor_full(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, double value);
/* A new tensor, f32, f16 or bf16, uniform on [low, high): computed in f32 from the context's random state and rounded
 * to dtype. In f16 and bf16 the rounding may give `high` itself. The same bits on CPU and GPU. Advances the random
 * state by one offset. Allocates. */
TE_API te_tensor *te_tensor_uniform(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, float low, float high);
/* The same from the normal distribution with `mean` and standard deviation `std`. */
TE_API te_tensor *te_tensor_normal(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, float mean, float std);
/* A new tensor from host bytes (row-major, of `dtype`). The host memory may be reused when the call returns.
 * Allocates. */
TE_API te_tensor *te_tensor_from_host(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const void *host);
/* The same from f32 [numel], each element rounded to dtype: nearest even; FP8 saturates. Not e2m1. */
TE_API te_tensor *te_tensor_from_f32(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const float *host);
/* A tensor over the caller's memory, row-major: host memory on the CPU, device memory on CUDA. Borrowed, no copy, until
 * the last reference is gone: then `release` (may be NULL) is called with `user`; on CUDA kernels that use the memory
 * may still run on the context's stream, so it frees in that stream's order (cuMemFreeAsync), or synchronizes with it
 * first. Kernels are fastest at addresses that are multiples of 16 bytes; the element's own alignment is needed
 * (TE_ERR_INVALID). */
TE_API te_tensor *te_tensor_wrap(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, void *data,
                                 void (*release)(void *user), void *user);

/* Takes one more reference, which outlives the scope. Returns x. */
TE_API te_tensor *te_tensor_retain(te_tensor *x);
/* Gives back a reference taken by te_tensor_retain. NULL is fine. One release too many is the caller's error: the
 * tensor is freed while its scope still holds it. */
TE_API void te_tensor_release(te_tensor *x);

/* x in another shape of as many elements; one size may be -1 (inferred). x must be contiguous. For e2m1 the number of
 * bytes must not change: an odd last size stays. Alias. Differentiable. */
TE_API te_tensor *te_tensor_view(te_tensor *x, int ndim, const int64_t *shape);
/* Elements start .. start + length - 1 of dimension `dim` (negative: from the end). Alias; strided unless dim is the
 * first. Differentiable.
 * Not e2m1. */
TE_API te_tensor *te_tensor_narrow(te_tensor *x, int dim, int64_t start, int64_t length);
/* Dimensions a and b (negative: from the end) swapped. Alias; strided. Differentiable. Not e2m1. */
TE_API te_tensor *te_tensor_transpose(te_tensor *x, int a, int b);
/* x itself if it is contiguous, else a contiguous copy (allocates). Differentiable. */
TE_API te_tensor *te_tensor_contiguous(te_tensor *x);
/* x converted between f32, f16 and bf16 (allocates), or x itself if it is of `dtype`. Differentiable. */
TE_API te_tensor *te_tensor_cast(te_tensor *x, te_dtype dtype);
/* x without its history: no gradient flows back through it. Alias. */
TE_API te_tensor *te_tensor_detach(te_tensor *x);

TE_API te_ctx *te_tensor_ctx(const te_tensor *x);            /* the context that it was made in (borrowed) */
TE_API te_dtype te_tensor_dtype(const te_tensor *x);         /* of a quantized tensor: the nominal one, which
                                                              * dequantizing gives */
TE_API int te_tensor_ndim(const te_tensor *x);               /* number of dimensions */
TE_API const int64_t *te_tensor_shape(const te_tensor *x);   /* [ndim], borrowed */
TE_API const int64_t *te_tensor_strides(const te_tensor *x); /* [ndim], in elements, borrowed */
TE_API int64_t te_tensor_numel(const te_tensor *x);          /* number of elements: the product of the sizes */
TE_API size_t te_tensor_bytes(const te_tensor *x);           /* of a contiguous tensor of this shape and format */
TE_API bool te_tensor_is_contiguous(const te_tensor *x);     /* row-major without gaps? */
TE_API bool te_tensor_is_quantized(const te_tensor *x);      /* made by a quantizer? (te_quantized_kind tells which
                                                              * kind) */
/* The first element's address, on the context's device (borrowed). NULL for an empty or a quantized tensor. */
TE_API void *te_tensor_data(const te_tensor *x);

/* Copies x to host memory, te_tensor_bytes(x) bytes, row-major. Syncs. A quantized tensor is refused: te_dequantize or
 * te_tensor_to_f32. */
TE_API te_result te_tensor_to_host(const te_tensor *x, void *host);
/* The same, as f32 [numel]. Quantized tensors are dequantized. Syncs. */
TE_API te_result te_tensor_to_f32(const te_tensor *x, float *host);
/* The value of a one-element tensor. Syncs. NaN for NULL, and with TE_ERR_SHAPE for any other size. */
TE_API double te_tensor_item(const te_tensor *x);
/* Overwrites x (contiguous) from host bytes of its format, te_tensor_bytes(x) of them. The host memory may be reused
 * when the call returns. */
TE_API te_result te_tensor_copy_from_host(te_tensor *x, const void *host);
/* dst = src, of the same shape, converted (te_op_copy names the formats). They may share memory: a range moved along, a
 * matrix transposed in place. */
TE_API te_result te_tensor_copy(te_tensor *dst, const te_tensor *src);
/* Sets every element of x (contiguous), rounded as te_tensor_full does. */
TE_API te_result te_tensor_fill(te_tensor *x, double value);

/* Tells te.h that the memory of x was written from outside, so that cached quantized copies of it are made anew. Every
 * write through te.h does this by itself. */
TE_API void te_tensor_touch(te_tensor *x);
/* A number that grows with each write to x's memory; 0 for a quantized tensor. */
TE_API uint64_t te_tensor_version(const te_tensor *x);

/* Gives x a name for error messages (copied; NULL takes it away). Returns x. */
TE_API te_tensor *te_tensor_set_name(te_tensor *x, const char *name);
/* The name of x (borrowed), or "". */
TE_API const char *te_tensor_name(const te_tensor *x);

/* Says that x is this rank's part of a tensor that ranks share (PyTorch: a DTensor), which is what the functions that
 * keep or cast formats ask (api/formats.h). Moves and changes nothing. A view does not inherit it. */
TE_API void te_tensor_set_sharded(te_tensor *x, bool sharded);
/* Was that said of x? False for NULL. */
TE_API bool te_tensor_is_sharded(const te_tensor *x);
