/* api/tensor.h: tensors.
 *
 * A tensor is a reference-counted view of memory, with at most TE_MAX_DIMS sizes. It belongs to the innermost scope
 * (te_scope_begin); te_tensor_retain keeps the tensor beyond the scope's end. Shapes are row-major. A size may be 0. In
 * the 4-bit format (e2m1) two elements share a byte, the even one in the low half. Each e2m1 row begins at a whole
 * byte: [3, 5] has 9 bytes.
 *
 * A function that is given a NULL tensor returns NULL (or TE_ERR_STATE, 0, false, "") and reports no error: the call
 * that returned the NULL has reported one. */

/* Returns a new tensor of this shape, uninitialised. Allocates. */
TE_API te_tensor *te_tensor_empty(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);
/* Returns a new tensor of any format whose bytes are 0. Allocates. */
TE_API te_tensor *te_tensor_zeros(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);
/* Returns a new tensor whose elements are `value`, rounded to nearest even (integers: truncated, saturated). Not e2m1.
 * Allocates. */
TE_API te_tensor *te_tensor_full(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, double value);
/* Returns a new tensor (f32, f16, bf16) of uniform random numbers in [low, high); rounding may give `high`. CPU and GPU
 * give the same numbers. The random offset grows by 1. Allocates. */
TE_API te_tensor *te_tensor_uniform(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, float low, float high);
/* Like te_tensor_uniform, with numbers of the normal distribution with `mean` and standard deviation `std`. */
TE_API te_tensor *te_tensor_normal(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, float mean, float std);
/* Returns a new tensor with the content of `host` (row-major, of `dtype`), which may be reused afterwards.
 * Allocates. */
TE_API te_tensor *te_tensor_from_host(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const void *host);
/* Like te_tensor_from_host, but `host` is f32 [numel]. Each element is rounded to dtype, to nearest even; FP8
 * saturates. Not e2m1. */
TE_API te_tensor *te_tensor_from_f32(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const float *host);
/* Returns a row-major tensor in the caller's memory `data` (host memory on the CPU, device memory on CUDA). `data` is
 * borrowed until the last reference is gone; then `release` (may be NULL) is called with `user`. On CUDA `release` must
 * free in the order of the context's stream (cuMemFreeAsync), or synchronize first: kernels may still run. `data` must
 * be aligned to one element (else TE_ERR_INVALID). Fast kernels need an alignment of 16 bytes. */
TE_API te_tensor *te_tensor_wrap(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, void *data,
                                 void (*release)(void *user), void *user);

/* Takes one more reference, which outlives the scope. Returns x. */
TE_API te_tensor *te_tensor_retain(te_tensor *x);
/* Gives back a reference of te_tensor_retain. NULL is fine. A call without a matching te_tensor_retain is an error of
 * the program: the call frees a tensor that its scope still holds. */
TE_API void te_tensor_release(te_tensor *x);

/* Returns a view of x (contiguous) in another shape; one size may be -1. Differentiable. e2m1: an odd last size must
 * not change, an even one must stay even. */
TE_API te_tensor *te_tensor_view(te_tensor *x, int ndim, const int64_t *shape);
/* Returns a view of elements start .. start + length - 1 of `dim` (negative: from the end), strided unless `dim` is 0.
 * Differentiable. Not e2m1. */
TE_API te_tensor *te_tensor_narrow(te_tensor *x, int dim, int64_t start, int64_t length);
/* Returns a strided view of x with dimensions a and b swapped (negative: counted from the end). Differentiable. Not
 * e2m1. */
TE_API te_tensor *te_tensor_transpose(te_tensor *x, int a, int b);
/* Returns x itself if it is contiguous, else a contiguous copy (allocates). Differentiable. */
TE_API te_tensor *te_tensor_contiguous(te_tensor *x);
/* Returns x converted between f32, f16 and bf16 (allocates), or x itself if it is of `dtype`. Differentiable. */
TE_API te_tensor *te_tensor_cast(te_tensor *x, te_dtype dtype);
/* Returns a view of x through which no gradient flows back to x. */
TE_API te_tensor *te_tensor_detach(te_tensor *x);

TE_API te_ctx *te_tensor_ctx(const te_tensor *x);            /* the context that x was made in (borrowed) */
TE_API te_dtype te_tensor_dtype(const te_tensor *x);         /* the number format; of a quantized tensor the nominal
                                                              * one */
TE_API int te_tensor_ndim(const te_tensor *x);               /* number of dimensions */
TE_API const int64_t *te_tensor_shape(const te_tensor *x);   /* [ndim], borrowed */
TE_API const int64_t *te_tensor_strides(const te_tensor *x); /* [ndim], in elements, borrowed */
TE_API int64_t te_tensor_numel(const te_tensor *x);          /* number of elements: the product of the sizes */
TE_API size_t te_tensor_bytes(const te_tensor *x);           /* bytes of a contiguous tensor of this shape and format */
TE_API bool te_tensor_is_contiguous(const te_tensor *x);     /* whether x is row-major without gaps */
TE_API bool te_tensor_is_quantized(const te_tensor *x);      /* whether a quantizer made x (te_quantized_kind tells
                                                              * which kind) */
/* Returns the address of the first element, in the memory of the context's device (borrowed). NULL for an empty or a
 * quantized tensor. */
TE_API void *te_tensor_data(const te_tensor *x);

/* Copies x to host memory: te_tensor_bytes(x) bytes, row-major. Syncs. Refuses a quantized tensor; use te_dequantize or
 * te_tensor_to_f32 for it. */
TE_API te_result te_tensor_to_host(const te_tensor *x, void *host);
/* Copies x to host memory as f32 [numel]. Quantized tensors are dequantized. Syncs. */
TE_API te_result te_tensor_to_f32(const te_tensor *x, float *host);
/* Returns the value of a plain tensor of one element. Syncs. Returns NaN for NULL. Returns NaN and sets the error
 * TE_ERR_SHAPE for any other tensor. */
TE_API double te_tensor_item(const te_tensor *x);
/* Overwrites x (contiguous) with te_tensor_bytes(x) bytes of x's format from `host`, which may be reused
 * afterwards. */
TE_API te_result te_tensor_copy_from_host(te_tensor *x, const void *host);
/* Copies src to dst, which has the same shape, and converts the elements (formats: te_op_copy). src and dst may share
 * memory. */
TE_API te_result te_tensor_copy(te_tensor *dst, const te_tensor *src);
/* Sets every element of x (contiguous) to `value`, rounded as te_tensor_full does. */
TE_API te_result te_tensor_fill(te_tensor *x, double value);

/* Tells te.h that other code has written the memory of x. Cached quantized copies of x are then made anew. In the
 * capture of a graph, the call belongs ahead of the operations that read what a kernel of other code writes: they read
 * memory that the capture has not written while kernels ahead of them still run. */
TE_API void te_tensor_touch(te_tensor *x);
/* Returns a number that grows with each write to x's memory; 0 for a quantized tensor. */
TE_API uint64_t te_tensor_version(const te_tensor *x);

/* Gives x a name for error messages (copied; NULL removes the name). Returns x. */
TE_API te_tensor *te_tensor_set_name(te_tensor *x, const char *name);
/* Returns the name of x (borrowed), or "". */
TE_API const char *te_tensor_name(const te_tensor *x);

/* Marks x as this rank's shard of a larger tensor (PyTorch: a DTensor). If `sharded` is false, removes the mark. The
 * functions of api/formats.h read the mark. A view of x has no mark. */
TE_API void te_tensor_set_sharded(te_tensor *x, bool sharded);
/* Returns whether te_tensor_set_sharded has marked x. False for NULL. */
TE_API bool te_tensor_is_sharded(const te_tensor *x);
