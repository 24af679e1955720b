// device/outside.cuh: included by kernels that take ids: tells the host of one that is out of range. Knows no
// operation.
#pragma once
#include "base/outside.h"
#include "device/base.cuh"

// Any thread may call it, in the rare branch of an id outside of 0 .. bound - 1. The host reads *to once it has waited
// for the kernel; the first one found stays.
TE_DEV void te_tell_outside(te__outside *to, te_i64 id, te_i64 place, te_i64 bound) {
    if (atomicAdd(&to->count, 1ull) != 0) return;
    to->id = id, to->place = place, to->bound = bound;
}
// An id that counts from the begin, of one that counts from the end if it is negative, and from_end is set.
TE_DEV te_i64 te_from_begin(te_i64 id, te_i64 bound, int from_end) { return from_end && id < 0 ? id + bound : id; }
