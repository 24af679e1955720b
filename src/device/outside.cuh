// device/outside.cuh: included by kernels that take ids: reports an id that is out of range to the host. This file must
// not depend on any operation.
#pragma once
#include "base/outside.h"
#include "device/base.cuh"

// Records for the host an id outside of 0 .. bound - 1, a rare case. The host reads *to after it has waited for the
// kernel. Any thread may call this function; only the first id is kept.
TE_DEV void te_tell_outside(te__outside *to, te_i64 id, te_i64 place, te_i64 bound) {
    if (atomicAdd(&to->count, 1ull) != 0) return;
    to->id = id, to->place = place, to->bound = bound;
}
// Converts an id that may be negative to an id from the beginning. With from_end, a negative id counts from the end.
TE_DEV te_i64 te_from_begin(te_i64 id, te_i64 bound, int from_end) { return from_end && id < 0 ? id + bound : id; }
