// device/outside.cuh: reports to the host that an id (of a token, a class, an expert ...) is out of range. This file
// must not depend on any operation.
#pragma once
#include "base/outside.h"
#include "device/base.cuh"

// Records an id outside of 0 .. bound - 1 in `to`, which the host reads after the kernel. Only the first id is kept.
TE_DEV void te_tell_outside(te__outside *to, te_i64 id, te_i64 place, te_i64 bound) {
    if (atomicAdd(&to->count, 1ull) != 0) return;
    to->id = id, to->place = place, to->bound = bound;
}
// If from_end is not 0, a negative id counts from the end, and id + bound is returned. Otherwise returns id.
TE_DEV te_i64 te_from_begin(te_i64 id, te_i64 bound, int from_end) { return from_end && id < 0 ? id + bound : id; }
