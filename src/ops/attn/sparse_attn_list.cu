// ops/attn/sparse_attn_list.cu: lists the queries that read each key of sparse attention, in ascending order. So the
// gradient of a key is always summed in the same order. The queries of a sequence are cut into chunks. There are three
// launches, which differ in `step`:
//   0  One block for each chunk. It counts in cursor[key] how often the chunk's queries name the key.
//   1  One block for each sequence. start[key] becomes the sum of the counts of all keys before `key`. Each chunk's
//      cursor[key] becomes the index in `list` where its queries begin.
//   2  One block for each chunk. It goes through its queries in order and writes list[cursor[key]++] = the query. A
//      query that names a key twice is in the list twice.
//
// Launch: grid batch * chunks (steps 0 and 2) or batch (step 1), block 256.
// te:baseline
#include "ops/attn/sparse.cuh"

extern "C" __global__ void __launch_bounds__(256, 4)
    te_sparse_attn_list(const __grid_constant__ te__sparse_attn_kargs a) {
    te_follow();
    __shared__ int sums[256];
    const int chunk = a.step == 1 ? 0 : (int)(blockIdx.x % a.chunks),
              b = a.step == 1 ? (int)blockIdx.x : (int)(blockIdx.x / a.chunks);
    int *cursor = a.cursor + ((te_i64)b * a.chunks + chunk) * a.s_kv;
    if (a.step == 1) {
        int before = 0;
#pragma unroll 1
        for (int j0 = 0; j0 < a.s_kv; j0 += 256) {
            const int j = j0 + threadIdx.x;
            int mine = 0;
#pragma unroll 1
            for (int c = 0; j < a.s_kv && c < a.chunks; c++) mine += cursor[(te_i64)c * a.s_kv + j];
            sums[threadIdx.x] = mine;
            __syncthreads();
#pragma unroll 1
            for (int away = 1; away < 256; away *= 2) {
                const int add = threadIdx.x >= away ? sums[threadIdx.x - away] : 0;
                __syncthreads();
                sums[threadIdx.x] += add;
                __syncthreads();
            }
            int at = before + sums[threadIdx.x] - mine;
            before += sums[255];
            if (j < a.s_kv) a.start[(te_i64)b * (a.s_kv + 1) + j] = at;
#pragma unroll 1
            for (int c = 0; j < a.s_kv && c < a.chunks; c++) {
                const int n = cursor[(te_i64)c * a.s_kv + j];
                cursor[(te_i64)c * a.s_kv + j] = at;
                at += n;
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) a.start[(te_i64)b * (a.s_kv + 1) + a.s_kv] = before;
        return;
    }
    const int rows = (a.s_q + a.chunks - 1) / a.chunks, begin = min(a.s_q, chunk * rows),
              end = min(a.s_q, begin + rows);
#pragma unroll 1
    for (int j = threadIdx.x; a.step == 0 && j < a.s_kv; j += 256) cursor[j] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = begin; i < end; i++) {
        const int *list = a.indices + ((te_i64)b * a.s_q + i) * a.n;
#pragma unroll 1
        for (int k = threadIdx.x; k < a.n; k += 256) {
            const int key = te_sparse_key(a, list, k);
            if (key < 0) continue;
            const int at = atomicAdd(cursor + key, 1);
            if (a.step == 2) a.list[(te_i64)b * a.s_q * a.n + at] = i;
        }
        if (a.step == 2) __syncthreads();
    }
}
