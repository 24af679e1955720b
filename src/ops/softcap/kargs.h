/* ops/softcap/kargs.h: the arguments of the softcap kernel. The host's compiler and the kernels' compiler both read
 * this file. */
#ifndef TE__SOFTCAP_KARGS_H
#define TE__SOFTCAP_KARGS_H

typedef struct te__softcap_kargs {
    const void *x, *dy; /* dy: NULL in the forward pass */
    void *y;
    long long count;
    float cap;
    int x_dt, dy_dt, y_dt;
} te__softcap_kargs;

#endif /* TE__SOFTCAP_KARGS_H */
