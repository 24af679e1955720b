// ops/math/embedding_sort.cu: lists the tokens of each id in ascending order, by a stable counting sort without atomics
// between blocks.
//
//   block b     sorts the bucket of ids b * bucket .. (b + 1) * bucket - 1. It reads all ids.
//   warp w      reads the w-th of 32 equal stretches of the tokens.
//
//   pass 1      place[w][i] counts the tokens of id i in stretch w. below[w] counts the tokens of stretch w whose ids
//               are less than the bucket's first id.
//   between     Turns each count into the position of the first token of id i in stretch w. Positions are ordered by
//               id, then by stretch.
//   pass 2      Writes each token to its position. match_any ranks equal ids among 32 tokens of a warp. Of the first
//               64 groups of 32 tokens, pass 2 skips those without a token of the bucket.
//
// Launch: block 1024; grid: vocab / bucket rounded up. Shared: static.
//
// te:baseline
#include "device/outside.cuh"
#include "ops/math/kargs.h"

// Returns the row of the embedding table for the id of token t, or -1 if t is beyond the last token.
TE_DEV te_i64 te_token_id(const te__embedding_bwd_kargs &a, te_i64 t, te_i64 end) {
    return t < end ? te_from_begin(te_load_index(a.ids, t, a.ids_dt), a.all, a.from_end) - a.first : -1;
}

// Reports ids outside of the vocabulary. Each block checks different ids. Not inlined, because inlining would cost
// registers.
static __device__ __noinline__ void te_tell_ids(const void *ids, int dt, te_i64 tokens, te_i64 all, int from_end,
                                                te__outside *to) {
    for (te_i64 t = (te_i64)blockIdx.x * 1024 + threadIdx.x; t < tokens; t += (te_i64)gridDim.x * 1024) {
        te_i64 id = te_load_index(ids, t, dt);
        if ((te_u64)te_from_begin(id, all, from_end) >= (te_u64)all) te_tell_outside(to, id, t, all);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 2)
    te_embedding_sort(const __grid_constant__ te__embedding_bwd_kargs a) {
    te_follow();
    te_tell_ids(a.ids, a.ids_dt, a.tokens, a.all, a.from_end, a.outside);
    __shared__ te_u32 place[32][TE__EMBEDDING_BUCKET];
    __shared__ te_u32 below[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_i64 first = (te_i64)blockIdx.x * a.bucket, last = first + a.bucket < a.vocab ? first + a.bucket : a.vocab;
    int ids = (int)(last - first);
    te_i64 stretch = te_div_up(te_div_up(a.tokens, 32), 32) * 32, begin = warp * stretch;
    te_i64 end = begin + stretch < a.tokens ? begin + stretch : a.tokens;
    te_u32 earlier = (1u << lane) - 1, smaller = 0;
    te_u64 ours = 0; // bit i: group i of 32 tokens has a token of the bucket

    for (int i = lane; i < ids; i += 32) place[warp][i] = 0;
    __syncwarp();
    // All lanes make the same number of iterations, because each lane must take part in the votes of the warp (ballot,
    // any, match_any). Four groups of 32 ids are loaded at once.
    for (te_i64 t = begin; t < end; t += 128) {
        te_i64 id[4];
#pragma unroll
        for (int k = 0; k < 4; k++) id[k] = te_token_id(a, t + 32 * k + lane, end);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            bool mine = id[k] >= first && id[k] < last;
            smaller += __popc(__ballot_sync(0xffffffffu, id[k] >= 0 && id[k] < first));
            if (!__any_sync(0xffffffffu, mine)) continue;
            te_i64 group = (t - begin) / 32 + k;
            if (group < 64) ours |= (te_u64)1 << group;
            te_u32 equal = __match_any_sync(0xffffffffu, mine ? (int)(id[k] - first) : -1);
            if (mine && (equal & earlier) == 0) place[warp][id[k] - first] += __popc(equal);
            __syncwarp();
        }
    }
    if (lane == 0) below[warp] = smaller;
    __syncthreads();

    // Thread i sums the counts of id i over all stretches. A scan then gives the position of each id's first token.
    __shared__ te_u32 warp_total[32];
    te_u32 base = 0, mine = 0;
    for (int w = 0; w < 32; w++) base += below[w];
    if ((int)threadIdx.x < ids)
        for (int w = 0; w < 32; w++) mine += place[w][threadIdx.x];
    te_u32 upto = mine;
    for (int d = 1; d < 32; d <<= 1) {
        te_u32 left = __shfl_up_sync(0xffffffffu, upto, d);
        if (lane >= d) upto += left;
    }
    if (lane == 31) warp_total[warp] = upto;
    __syncthreads();
    for (int w = 0; w < warp; w++) base += warp_total[w];
    te_u32 at = base + upto - mine;
    if ((int)threadIdx.x < ids) {
        a.start[first + threadIdx.x] = at;
        if (first + threadIdx.x == a.vocab - 1) a.start[a.vocab] = at + mine;
        for (int w = 0; w < 32; w++) {
            te_u32 here = place[w][threadIdx.x];
            place[w][threadIdx.x] = at;
            at += here;
        }
    }
    __syncthreads();

    for (te_i64 t = begin, group = 0; t < end; t += 32, group++) {
        if (group < 64) { // skips to the next group with a token of the bucket
            if (ours == 0) {
                group = 63, t = begin + 63 * 32;
                continue;
            }
            group = __ffsll((te_i64)ours) - 1, t = begin + group * 32, ours &= ours - 1;
        }
        te_i64 id = te_token_id(a, t + lane, end);
        bool here = id >= first && id < last;
        if (!__any_sync(0xffffffffu, here)) continue;
        te_u32 equal = __match_any_sync(0xffffffffu, here ? (int)(id - first) : -1);
        te_u32 to = here ? place[warp][id - first] : 0;
        __syncwarp();
        if (here) {
            a.order[to + __popc(equal & earlier)] = (te_u32)(t + lane);
            if ((equal & earlier) == 0) place[warp][id - first] = to + __popc(equal);
        }
        __syncwarp();
    }
}
