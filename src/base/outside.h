/* base/outside.h: the note that a kernel leaves for the host about ids out of range. Read by the host and by kernels: a
 * plain struct alone. */
#ifndef TE__OUTSIDE_H
#define TE__OUTSIDE_H

/* The number of ids out of range, and the first one found: `id` at `place`. The allowed ids are 0 .. bound - 1. */
typedef struct te__outside {
    unsigned long long count;
    long long id, place, bound;
} te__outside;

#endif
