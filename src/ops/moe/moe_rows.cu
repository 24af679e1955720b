// ops/moe/moe_rows.cu: fills in a mask map, a row_id_map made from a routing mask. The tokens of chunk c for expert e
// begin at row counts[e][c] of the permuted tensor.
//
//   pass 1   Thread e writes rows[t][e] for each token t of the chunk. rows[t][e] is the row of the permuted tensor
//            that gets token t for expert e, or -1 if t is not routed to e.
//   pass 2   A warp has one token t, and goes through the experts from the last one down. For each expert e of token t,
//            the warp appends rows[t][e] to t's list of rows in the map, and e to t's list of experts.
//
// Launch: block 256; grid: chunks of tokens.
//
// te:baseline
#include "ops/moe/loop.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_rows(const __grid_constant__ te__moe_map_kargs a) {
    te_follow();
    te_i64 begin = (te_i64)blockIdx.x * a.chunk, end = begin + a.chunk < a.tokens ? begin + a.chunk : a.tokens;
    TE_LOOP
    for (te_i64 e = threadIdx.x; e < a.experts; e += 256) {
        int row = a.counts[e * a.chunks + blockIdx.x];
        TE_LOOP
        for (te_i64 t = begin; t < end; t++) {
            te_i64 at = t * a.experts + e;
            bool routed = (a.routing_dt == TE_U8 ? (te_i64)((const te_u8 *)a.routing)[at]
                                                 : te_load_index(a.routing, at, a.routing_dt)) != 0;
            a.rows[at] = routed ? row++ : -1;
        }
    }
    __syncthreads();
    int lane = threadIdx.x & 31;
    TE_LOOP
    for (te_i64 t = begin + (threadIdx.x >> 5); t < end; t += 8) {
        int *map = a.map + t * (2 * a.experts + 1);
        int n = 0;
        TE_LOOP
        for (te_i64 first = a.experts - 1; first >= 0; first -= 32) {
            te_i64 e = first - lane;
            int row = e >= 0 ? a.rows[t * a.experts + e] : -1;
            te_u32 routed = __ballot_sync(0xffffffffu, row >= 0);
            int at = n + __popc(routed & ((1u << lane) - 1));
            if (row >= 0) map[at] = row, map[a.experts + at] = (int)e;
            n += __popc(routed);
        }
        TE_LOOP
        for (te_i64 i = n + lane; i < a.experts; i += 32) map[i] = map[a.experts + i] = -1;
        if (lane == 0) map[2 * a.experts] = n;
    }
}
