// ops/math/fill.cu: sets every element of a contiguous array to the same bits.
//
// Benchmark: "fill" in tests/bench/h200.csv.
//
// Launch: block 256, one block for each 16 KiB. dst is aligned to its elements, and to 16 bytes if `vector`.
//
// te:baseline
#include "device/base.cuh"
#include "ops/math/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_fill(const __grid_constant__ te__fill_kargs a) {
    te_follow();
    te_u8 *dst = (te_u8 *)a.dst;
    te_i64 begin = (te_i64)blockIdx.x * 16384, end = begin + 16384 < a.bytes ? begin + 16384 : a.bytes;
    te_i64 whole = a.vector ? (end - begin) / 16 : 0;
    ulonglong2 pattern = make_ulonglong2(a.pattern, a.pattern);
    for (te_i64 i = threadIdx.x; i < whole; i += 256) ((ulonglong2 *)(dst + begin))[i] = pattern;
    for (te_i64 i = begin + whole * 16 + threadIdx.x * a.unit; i < end; i += 256 * a.unit) {
        if (a.unit == 1) dst[i] = (te_u8)a.pattern;
        if (a.unit == 2) *(te_u16 *)(dst + i) = (te_u16)a.pattern;
        if (a.unit == 4) *(te_u32 *)(dst + i) = (te_u32)a.pattern;
        if (a.unit == 8) *(te_u64 *)(dst + i) = a.pattern;
    }
}
