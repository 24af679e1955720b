/* ops/softcap/kargs.h: arguments of the kernel of capped numbers. Read by both compilers. */
#ifndef TE__SOFTCAP_KARGS_H
#define TE__SOFTCAP_KARGS_H

typedef struct te__softcap_kargs {
    const void *x, *dy; /* dy NULL: forward */
    void *y;
    long long count;
    float cap;
    int x_dt, dy_dt, y_dt;
} te__softcap_kargs;

#endif /* TE__SOFTCAP_KARGS_H */
