/* ops/gemm/kargs.h: arguments of the gemm kernels. Read by the host's compiler and by the kernels': plain structs alone. */

/* D = epilogue(scale_a scale_b op(A) op(B) + bias) + (accumulate ? D : 0); see te_gemm_args. */
typedef struct te__gemm_kargs {
    const void *a, *b; /* op(A) m x k: element (i, p) at i * lda + p, or p * lda + i if a_t */
    void *d;           /* [m, ldd] */
    void *aux;         /* [m, ldaux] of d_dt, or NULL */
    const void *bias;  /* [n], or NULL */
    const float *scale_a, *scale_b; /* [1], or NULL for 1 */
    const float *partial;           /* gemm_reduce: f32 [splits, m, n] */
    long long m, n, k;
    long long lda, ldb, ldd, ldaux; /* in elements */
    long long k_split;        /* k of one split, a multiple of the slab; >= k without splits */
    long long d_split;        /* elements of D from one split to the next */
    int a_dt, b_dt, d_dt, bias_dt;
    int a_t, b_t; /* a_t: A lies k x m; b_t: B lies n x k */
    int epilogue; /* te_epilogue */
    int accumulate;
    int splits;
    int vector; /* rows of D and aux start at multiples of 8 elements and 16 bytes */
} te__gemm_kargs;

/* gemm_hopper: 192 KB of slots, eight stages of 4 KB, barriers, and room to start at a multiple of 1024. */
#define TE__GEMM_HOPPER_SHARED (192 * 1024 + 8 * 4096 + 128 + 1024)

/* Tensor maps must lie at multiples of 64 bytes, which kernel arguments do only when their type asks for it. */
#ifdef __CUDACC__
#define TE__ALIGN_64 __align__(64)
#else
#define TE__ALIGN_64
#endif
typedef struct TE__ALIGN_64 te__gemm_hopper_kargs {
    unsigned long long a_map[16], b_map[16];
    te__gemm_kargs g;
    unsigned long long pad[10]; /* to 512 bytes, a multiple of 64, so that both compilers see one size */
} te__gemm_hopper_kargs;
