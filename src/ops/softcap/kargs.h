/* ops/softcap/kargs.h: arguments of the kernels of capped scores, and which keys a row of scores sees. Read by both compilers. */
#ifndef TE__SOFTCAP_KARGS_H
#define TE__SOFTCAP_KARGS_H

typedef struct te__softcap_kargs {
    const void *x, *dy; /* dy NULL: forward */
    void *y;
    long long count;
    float cap;
    int x_dt, dy_dt, y_dt;
} te__softcap_kargs;

typedef struct te__capped_softmax_kargs {
    const void *x, *dy; /* dy NULL: forward */
    void *y;
    long long rows, s_q, s_kv;
    long long delta;       /* row i stands at key i + delta */
    long long left, right; /* keys that it sees before and behind that one */
    float scale, cap;      /* cap 0: none */
    int x_dt, dy_dt, y_dt;
} te__capped_softmax_kargs;

#ifdef __CUDACC_RTC__
#define TE__SOFTCAP_BOTH __device__ __forceinline__
#else
#define TE__SOFTCAP_BOTH static inline
#endif

/* The keys of a row: from *first up to, not including, *end. */
TE__SOFTCAP_BOTH void te__capped_keys(const te__capped_softmax_kargs *a, long long row, long long *first, long long *end) {
    const long long at = row % a->s_q + a->delta;
    *first = at > a->left ? at - a->left : 0;
    *end = at < a->s_kv - 1 - a->right ? at + a->right + 1 : a->s_kv;
}

#endif /* TE__SOFTCAP_KARGS_H */
