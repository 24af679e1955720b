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

// Returns the line of product number `product` that is line number `line` of the tile whose lines begin at `first`.
TE_DEV int te_rotate_line(const te__rope_kargs &a, int product, int first, int line) {
    const int head = first / a.d, in = first - head * a.d;
    if (product == 2 || in >= 2 * a.half) return first + line;
    return head * a.d + in / 2 + (line & 7) + (line & 8 ? a.half : 0);
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
// Rotates v, a result as D has it, with its mate, and writes it.
TE_DEV void te_rotate_put(const te_rotated &r, float v, float mate, int dt) {
    if (r.channel == 1) v = te_rope_first(v, mate, r.turn);
    if (r.channel == 2) v = te_rope_second(mate, v, r.turn);
    if (r.to) te_store(r.to, 0, dt, v);
}
