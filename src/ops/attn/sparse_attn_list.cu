// ops/attn/sparse_attn_list.cu: lists the slots that name each key of sparse attention, in the order of their queries.
// So the gradient of a key is always summed in the same order. The queries of a sequence are cut into chunks. The
// launches differ in `step`:
//   0  One block for each chunk. It counts in cursor[key] how often the chunk's queries name the key.
//   1  One thread for each key. start[key] becomes the sum of the key's counts, and each chunk's cursor[key] the sum of
//      the counts of the chunks before.
//   2  One block for each sequence. start[key] becomes the sum of the counts of all keys before `key`.
//   3  One block for each chunk. It goes through its queries in order and writes list[start[key] + cursor[key]++] = the
//      slot. So start[key] + cursor[key] becomes the index in `list` where the chunk's queries end. The slots of a
//      query that names a key twice have no order yet: enough for a kernel that only needs queries.
//   4  One warp for each key. It sorts the list of a key that some query names twice.
//
// Launch: grid batch * chunks (steps 0 and 3), batch * ceil(s_kv / 256) (step 1), batch (step 2) or ceil(batch * s_kv /
// 8) (step 4), block 256.
// te:baseline
#include "ops/attn/sparse.cuh"
#ifdef TE_SMALL
#define TE_SPARSE_AHEAD 1
#else
#define TE_SPARSE_AHEAD 8
#endif

// Sorts list[begin .. end - 1]. Most lists are in order already.
TE_DEV void te_sparse_sort(int *list, int begin, int end) {
    bool wrong = false;
#pragma unroll 1
    for (int e = begin + (threadIdx.x & 31); e + 1 < end; e += 32) wrong |= list[e] > list[e + 1];
    if (!__any_sync(0xffffffffu, wrong) || (threadIdx.x & 31)) return;
#pragma unroll 1
    for (int e = begin + 1; e < end; e++) {
        const int slot = list[e];
        int to = e;
#pragma unroll 1
        for (; to > begin && list[to - 1] > slot; to--) list[to] = list[to - 1];
        list[to] = slot;
    }
}

// Step 1.
TE_DEV void te_sparse_count(const te__sparse_attn_kargs &a) {
    const int blocks = (a.s_kv + 255) / 256, b = (int)(blockIdx.x / (te_u32)blocks),
              j = (int)(blockIdx.x - (te_u32)b * (te_u32)blocks) * 256 + (int)threadIdx.x;
    int *cursor = a.cursor + (te_i64)b * a.chunks * a.s_kv + j, sum = 0;
    if (j >= a.s_kv) return;
#pragma unroll 1
    for (int c = 0; c < a.chunks; c += TE_SPARSE_AHEAD) {
        int n[TE_SPARSE_AHEAD]; // all loaded before the first store, because loads after a store would wait for it
#pragma unroll
        for (int i = 0; i < TE_SPARSE_AHEAD; i++) n[i] = c + i < a.chunks ? cursor[(te_i64)(c + i) * a.s_kv] : 0;
#pragma unroll
        for (int i = 0; i < TE_SPARSE_AHEAD; i++) {
            if (c + i < a.chunks) cursor[(te_i64)(c + i) * a.s_kv] = sum;
            sum += n[i];
        }
    }
    a.start[(te_i64)b * (a.s_kv + 1) + j] = sum;
}
// Step 2.
TE_DEV void te_sparse_scan(int *start, int s_kv) {
    __shared__ int sums[256];
    int before = 0;
#pragma unroll 1
    for (int j = threadIdx.x; j - (int)threadIdx.x < s_kv; j += 256) {
        const int mine = j < s_kv ? start[j] : 0;
        sums[threadIdx.x] = mine;
        __syncthreads();
#pragma unroll 1
        for (int away = 1; away < 256; away *= 2) {
            const int add = threadIdx.x >= away ? sums[threadIdx.x - away] : 0;
            __syncthreads();
            sums[threadIdx.x] += add;
            __syncthreads();
        }
        if (j < s_kv) start[j] = before + sums[threadIdx.x] - mine;
        before += sums[255];
        __syncthreads();
    }
    if (threadIdx.x == 0) start[s_kv] = before;
}

extern "C" __global__ void __launch_bounds__(256, 4)
    te_sparse_attn_list(const __grid_constant__ te__sparse_attn_kargs a) {
    te_follow();
    if (a.step == 1) {
        te_sparse_count(a);
        return;
    }
    if (a.step == 2) {
        te_sparse_scan(a.start + (te_i64)blockIdx.x * (a.s_kv + 1), a.s_kv);
        return;
    }
    if (a.step == 4) {
        const te_i64 row = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5), of = row / a.s_kv;
        const int *start = a.start + of * (a.s_kv + 1) + (row - of * a.s_kv);
        if (of < a.batch) te_sparse_sort(a.list + of * a.s_q * a.n, start[0], start[1]);
        return;
    }
    const int b = (int)(blockIdx.x / (te_u32)a.chunks), chunk = (int)(blockIdx.x - (te_u32)b * (te_u32)a.chunks);
    const int part = chunk / a.cuts * a.part, begin = part + (chunk % a.cuts) * a.rows,
              end = min(min(a.s_q, part + a.part), begin + a.rows);
    int *cursor = a.cursor + ((te_i64)b * a.chunks + chunk) * a.s_kv, *to = a.list + (te_i64)b * a.s_q * a.n;
    const int *start = a.start + (te_i64)b * (a.s_kv + 1);
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
            if (a.step == 3) to[start[key] + at] = i * a.n + k;
        }
        if (a.step == 3) __syncthreads();
    }
}
