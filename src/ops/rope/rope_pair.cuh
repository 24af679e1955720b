// ops/rope/rope_pair.cuh: the rotation of a pair of channels, which all kernels share so that they give the same bits.
#pragma once
#include "device/base.cuh"
#include "base/sequences.h"
#include "ops/rope/kargs.h"

#define NO_ROW __int_as_float(0x7fffffff) // NaN: the angle of a position that has no row in freqs

// Returns the cosine and the sine of an angle. Both are multiplied by attention_factor, and the sine also by the
// direction.
TE_DEV float2 te_rope_turn(const te__rope_kargs &a, float angle) {
    float s, c;
    sincosf(angle, &s, &c);
    return make_float2(c * a.attention_factor, s * a.attention_factor * a.direction);
}
// Returns the angle of pair number `pair` at a position, without freqs.
TE_DEV float te_rope_angle(const te__rope_kargs &a, te_i64 position, int pair) {
    return __fmul_rn((float)position * a.position_scale, a.inv_freq[pair]);
}
// Return the two channels of the rotated pair (x, y). `turn`: te_rope_turn of the channel's angle.
TE_DEV float te_rope_first(float x, float y, float2 turn) { return fmaf(x, turn.x, -(y * turn.y)); }
TE_DEV float te_rope_second(float x, float y, float2 turn) { return fmaf(y, turn.x, x * turn.y); }
