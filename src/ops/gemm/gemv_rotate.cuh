// ops/gemm/gemv_rotate.cuh: queries, keys and values that a kernel multiplies, rotated and written where te_op_qkv_rope
// writes them, with its bits. This file must not depend on how they are multiplied.
//
// A tile is sixteen lines of one of the products. Where channels are rotated, these are eight neighbouring channels and
// their mates, `half` channels further on. So both channels of a pair are in one tile, eight lines apart:
//
//     heads of 64 channels, all rotated:   tile 0: channels 0 .. 7, 32 .. 39     tile 1: channels 8 .. 15, 40 .. 47
//
// d is a multiple of 16 and `half` of 8. Pairs are `half` channels apart.
#pragma once
#include "ops/rope/rope_pair.cuh"

// Of a tile of queries or keys. *line is where its lines would begin if they were neighbours, and *eight is 8. If the
// tile is rotated, sets *line to its first line, and *eight to the lines from there to its line number 8.
TE_DEV void te_rotate_tile(const te__rope_kargs &a, int *line, int *eight) {
    const int in = *line % a.d;
    if (in < 2 * a.half) *line -= in - in / 2, *eight = a.half;
}

// Where a result goes, and how it is rotated.
struct te_rotated {
    void *to;    // NULL: nowhere, since the token has no place in the cache
    float2 turn; // te_rope_turn of the channel's angle
    int channel; // of a pair, 1 or 2; 0: the result is not rotated
};
TE_DEV_CALL te_rotated te_rotate_ask(const te__rope_kargs &a, int product, int column, int token) {
    const te__rope_view &view = product == 0 ? a.q : product == 1 ? a.k : a.v;
    const int head = column / a.d, channel = column - head * a.d;
    const int t = a.batch_first ? token % a.seq : token / a.batch;
    int b = a.batch_first ? token / a.seq : token % a.batch;
    te_i64 of_t = t, of_b = b;
    te_rotated r = {nullptr, make_float2(1.0f, 0.0f), 0};
    if (product == 0 || te__rope_cache_place(&a, t, b, &of_t, &of_b)) {
        const te_i64 at = of_t * view.s + of_b * view.b + head * view.h + channel;
        r.to = (te_u8 *)view.p + at * (view.dt == TE_F32 ? 4 : 2);
    }
    if (product == 2 || channel >= 2 * a.half) return r;
    const te_i64 position = te__rope_position(&a, t, &b);
    float angle;
    if (a.has_freqs) {
        const float *row = te__rope_row(&a, position, b);
        angle = row ? row[channel] : NO_ROW;
    } else {
        angle = te_rope_angle(a, position, channel < a.half ? channel : channel - a.half);
    }
    r.channel = channel < a.half ? 1 : 2;
    r.turn = te_rope_turn(a, angle);
    return r;
}
// Writes r to TE__GEMV_ROTATED bytes of shared memory at `at`, a multiple of 16. te_rotate_kept reads it. `channel` is
// in the highest bits of the address `to`, which are 0 in all addresses.
TE_DEV void te_rotate_keep(te_u32 at, const te_rotated &r) {
    const te_u64 to = (te_u64)r.to | (te_u64)r.channel << 62;
    te_sts16(at, make_uint4((te_u32)to, (te_u32)(to >> 32), __float_as_uint(r.turn.x), __float_as_uint(r.turn.y)));
}
TE_DEV te_rotated te_rotate_kept(te_u32 at) {
    const uint4 u = te_lds16(at);
    return {(void *)(u.x | (te_u64)(u.y & 0x3fffffffu) << 32), make_float2(__uint_as_float(u.z), __uint_as_float(u.w)),
            (int)(u.y >> 30)};
}
// Rotates v, a result as D has it, with its mate, and writes it.
TE_DEV void te_rotate_put(const te_rotated &r, float v, float mate, int dt) {
    if (r.channel == 1) v = te_rope_first(v, mate, r.turn);
    if (r.channel == 2) v = te_rope_second(mate, v, r.turn);
    if (r.to) te_store(r.to, 0, dt, v);
}
