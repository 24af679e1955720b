// device/outside.cuh: included by kernels that take ids: tells the host about an id that is out of range. Knows no
// operation.
#pragma once
#include "base/outside.h"
#include "device/base.cuh"

// Records an id outside of 0 .. bound - 1, which is rare, for the host. The host reads *to once it has waited for the
// kernel. Any thread may call it; the first id found stays.
TE_DEV void te_tell_outside(te__outside *to, te_i64 id, te_i64 place, te_i64 bound) {
    if (atomicAdd(&to->count, 1ull) != 0) return;
    to->id = id, to->place = place, to->bound = bound;
}
// Returns the id counted from the beginning. A negative id counts from the end if from_end is set.
TE_DEV te_i64 te_from_begin(te_i64 id, te_i64 bound, int from_end) { return from_end && id < 0 ? id + bound : id; }
