/* api/tensor.h: tensors.
 *
 * A tensor is a reference-counted view of a block of memory: number format, at most TE_MAX_DIMS sizes, strides. It
 * belongs to the innermost scope (te_scope_begin); te_tensor_retain keeps it beyond. Shapes are row-major: the last
 * size varies fastest. A size may be 0. Of 4-bit formats (e2m1) two elements share a byte, the even one in its low half, and each row (run along
 * the last size) begins at a whole byte: [3, 5] has 9 bytes, and no dimensions at all 1.
 *
 * A function that takes a tensor and is given NULL returns NULL (or TE_ERR_STATE) and reports nothing: the call that
 * made the NULL has reported already. */

/* Uninitialised. Allocates. */
TE_API te_tensor *te_tensor_empty(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);
TE_API te_tensor *te_tensor_zeros(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);
/* Every element = value, rounded to nearest even (integers: truncated). */
TE_API te_tensor *te_tensor_full(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, double value);
/* Uniform on [low, high), or normal with `mean` and `std`, computed in f32 from the context's random state and rounded to
 * dtype. The same bits on CPU and GPU. Advances the random state by one offset. */
TE_API te_tensor *te_tensor_uniform(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, float low, float high);
TE_API te_tensor *te_tensor_normal(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, float mean, float std);
/* Copies host bytes (row-major, of `dtype`) into a new tensor. The host memory may be reused when the call returns. */
TE_API te_tensor *te_tensor_from_host(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const void *host);
/* As te_tensor_from_host, from f32, rounding each element to dtype (nearest even; FP8 saturates as te.h's casts do). */
TE_API te_tensor *te_tensor_from_f32(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const float *host);
/* Wraps memory that te.h does not own: host memory on the CPU, device memory on CUDA. No copy. `release` (may be NULL)
 * is called with `user` when the last reference is gone. The memory must be 16-byte aligned for the fast kernels; less
 * alignment works and is slower. */
TE_API te_tensor *te_tensor_wrap(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, void *data,
                                 void (*release)(void *user), void *user);

/* One more reference, beyond the scope's. Returns its argument. */
TE_API te_tensor *te_tensor_retain(te_tensor *x);
/* Gives back a reference taken by te_tensor_retain, and sets nothing else. NULL is fine. */
TE_API void te_tensor_release(te_tensor *x);

/* Same memory, other shape; one size may be -1 (inferred). x must be contiguous. Of e2m1 the bytes must stay as many as they are: an odd last
 * size stays. Differentiable. Alias. */
TE_API te_tensor *te_tensor_view(te_tensor *x, int ndim, const int64_t *shape);
/* Elements start .. start+length-1 of dimension `dim` (negative counts from the end). Alias; strided unless dim is the
 * first. Differentiable. Not of e2m1, nor is te_tensor_transpose. */
TE_API te_tensor *te_tensor_narrow(te_tensor *x, int dim, int64_t start, int64_t length);
/* Dimensions a and b swapped. Alias; strided. Differentiable. */
TE_API te_tensor *te_tensor_transpose(te_tensor *x, int a, int b);
/* x itself if it is contiguous, else a contiguous copy. Differentiable. */
TE_API te_tensor *te_tensor_contiguous(te_tensor *x);
/* x in another number format (f32, f16, bf16), or x itself if it has it already. Differentiable. */
TE_API te_tensor *te_tensor_cast(te_tensor *x, te_dtype dtype);
/* A new tensor with x's value and no history. Alias. */
TE_API te_tensor *te_tensor_detach(te_tensor *x);

TE_API te_ctx *te_tensor_ctx(const te_tensor *x);
TE_API te_dtype te_tensor_dtype(const te_tensor *x); /* of a quantized tensor: the nominal one that dequantizing gives */
TE_API int te_tensor_ndim(const te_tensor *x);
TE_API const int64_t *te_tensor_shape(const te_tensor *x);   /* [ndim], borrowed */
TE_API const int64_t *te_tensor_strides(const te_tensor *x); /* [ndim], in elements, borrowed */
TE_API int64_t te_tensor_numel(const te_tensor *x);
TE_API size_t te_tensor_bytes(const te_tensor *x); /* of a contiguous tensor of this shape and format */
TE_API bool te_tensor_is_contiguous(const te_tensor *x);
TE_API bool te_tensor_is_quantized(const te_tensor *x);
/* The first element's address, on the context's device (borrowed). NULL for an empty or a quantized tensor. */
TE_API void *te_tensor_data(const te_tensor *x);

/* Whole tensor to host memory of te_tensor_bytes(x), row-major. Syncs. Quantized tensors: dequantize first. */
TE_API te_result te_tensor_to_host(const te_tensor *x, void *host);
/* The same, as f32 [numel]. Quantized tensors are dequantized. Syncs. */
TE_API te_result te_tensor_to_f32(const te_tensor *x, float *host);
/* The only element of x, as double. Syncs. NaN when x is NULL or has another size. */
TE_API double te_tensor_item(const te_tensor *x);
/* Overwrites x: from host bytes of its own format and size, or from another tensor (same shape, any float format), which may share memory with it: a
 * range moved along, a matrix transposed in place (see te_copy). */
TE_API te_result te_tensor_copy_from_host(te_tensor *x, const void *host);
TE_API te_result te_tensor_copy(te_tensor *dst, const te_tensor *src);
TE_API te_result te_tensor_fill(te_tensor *x, double value);

/* Says that somebody outside te.h wrote the memory of x, so that cached quantized copies of it are made anew. Every
 * write through te.h does this by itself. */
TE_API void te_tensor_touch(te_tensor *x);
TE_API uint64_t te_tensor_version(const te_tensor *x);

/* A name for error messages, copied. */
TE_API te_tensor *te_tensor_set_name(te_tensor *x, const char *name);
TE_API const char *te_tensor_name(const te_tensor *x);
