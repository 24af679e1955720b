/* base/outside.h: the record in which a kernel tells the host about ids that are out of range. The host and kernels
 * compile this header. */
#ifndef TE__OUTSIDE_H
#define TE__OUTSIDE_H

/* The number of ids that were out of range, and the first one that was found: `id`, at index `place`. The allowed ids
 * are 0 .. bound - 1. */
typedef struct te__outside {
    unsigned long long count;
    long long id, place, bound;
} te__outside;

#endif
