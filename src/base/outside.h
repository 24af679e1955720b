/* base/outside.h: ids outside of their range, as a kernel leaves them for the host. Read by the host and by kernels: a
 * plain struct alone. */
#ifndef TE__OUTSIDE_H
#define TE__OUTSIDE_H

/* How many there were, and the first one that was found: `id` at `place`, where 0 .. bound - 1 are possible. */
typedef struct te__outside {
    unsigned long long count;
    long long id, place, bound;
} te__outside;

#endif
