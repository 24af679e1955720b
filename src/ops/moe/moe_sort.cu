// ops/moe/moe_sort.cu: moves the items (elements of `experts`) of a chunk to their buckets, in the order of the items.
// An item's key is its expert id. A pass sorts by eight bits of the key, and has one bucket for each value of these
// bits. The last pass of the sort writes the row_id_map instead of the moved items.
//
// Launch: block 256, one thread for each bucket; grid: chunks of TE__MOE_SORT_CHUNK items.
//
// te:baseline
#include "ops/moe/sort.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_sort(const __grid_constant__ te__moe_sort_kargs a) {
    te_follow();
    __shared__ te_u8 bits[TE__MOE_SORT_CHUNK];
    int n = te_moe_sort_bits(a, bits), to = a.counts[threadIdx.x * a.chunks + blockIdx.x];
    TE_LOOP
    for (int i = 0; i < n; i++) {
        if (bits[i] != threadIdx.x) continue;
        te_i64 at = (te_i64)blockIdx.x * TE__MOE_SORT_CHUNK + i, place = a.from ? a.from[a.items + at] : at;
        if (a.to) {
            a.to[to] = te_moe_sort_key(a, at);
            a.to[a.items + to] = (int)place;
        } else
            a.map[place % a.topk * a.tokens + place / a.topk] = to < a.kept ? to : -1;
        to++;
    }
}
