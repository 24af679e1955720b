// ops/math/copy.cu: copies src to dst, between any strides, and between any formats of 8 bits or more.
//
// A raw copy (unit > 0) is between equal formats. `unit` is at most 16 bytes. It divides the length of the last
// dimension, every stride and both addresses.
//
// A converting copy (unit = 0) goes through f32, or through 64-bit integers between integers. A float that becomes an
// integer is truncated and saturated, and NaN becomes 0. A narrower integer keeps the lower bits.
//
//   if ndim is 1   item i lies at i * stride on both sides
//   otherwise      item i is split into coordinates, of which the last one changes fastest
//
// transpose.cu copies transposed views of equal formats, because it is faster.
//
// Benchmark: "convert to f32" in tests/bench/h200.csv.
//
// Launch: block 256. A thread has four items, 256 apart. If `width` is 4 or 8, an item is this number of neighbours,
// and addresses and strides fulfil the conditions of te_raw_ask.
//
// te:baseline
// te:row SRC_DT=1 DST_DT=3
// te:row SRC_DT=3 DST_DT=1
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef SRC_DT
#define SRC_DT a.src_dt
#define DST_DT a.dst_dt
#define RAW a.unit
#else
#define RAW 0
#endif

TE_DEV bool te_is_integer(int dt) { return dt == TE_U8 || dt == TE_I32 || dt == TE_I64; }

TE_DEV void te_store_integer(void *p, te_i64 i, int dt, te_i64 v) {
    if (dt == TE_U8) ((te_u8 *)p)[i] = (te_u8)v;
    else if (dt == TE_I32) ((int *)p)[i] = (int)v;
    else ((te_i64 *)p)[i] = v;
}
TE_DEV te_i64 te_load_integer(const void *p, te_i64 i, int dt) {
    return dt == TE_U8 ? (te_i64)((const te_u8 *)p)[i] : te_load_index(p, i, dt);
}
TE_DEV te_i64 te_truncate(float f, int dt) {
    if (f != f) return 0;
    if (dt == TE_U8) return (te_i64)fminf(fmaxf(f, 0.0f), 255.0f);
    return dt == TE_I32 ? (te_i64)__float2int_rz(f) : __float2ll_rz(f); // both saturate
}
TE_DEV void te_convert(const te__copy_kargs &a, te_i64 from, te_i64 to) {
    if (!te_is_integer(DST_DT)) te_store(a.dst, to, DST_DT, te_load(a.src, from, SRC_DT));
    else if (te_is_integer(SRC_DT)) te_store_integer(a.dst, to, DST_DT, te_load_integer(a.src, from, SRC_DT));
    else te_store_integer(a.dst, to, DST_DT, te_truncate(te_load(a.src, from, SRC_DT), DST_DT));
}

// Computes the position `from` of item i in src and its position `to` in dst. Divides in 64 bits only if 31 bits are
// not enough, since division in 32 bits is much faster.
TE_DEV void te_locate(const te__copy_kargs &a, te_i64 i, te_i64 &from, te_i64 &to) {
    from = to = 0;
    if (a.ndim == 1) {
        from = i * a.src_stride[0], to = i * a.dst_stride[0];
        return;
    }
#pragma unroll 1
    for (int d = a.ndim - 1; d >= 0; d--) {
        te_i64 rest = d == 0 ? 0 : a.items >> 31 ? i / a.shape[d] : (te_i64)((te_u32)i / (te_u32)a.shape[d]);
        te_i64 at = i - rest * a.shape[d];
        from += at * a.src_stride[d], to += at * a.dst_stride[d];
        i = rest;
    }
}
// Computes the positions of a thread's four items before anything is loaded. A 64-bit division is a function call,
// which would have to save loaded values.
TE_DEV void te_locate4(const te__copy_kargs &a, te_i64 first, te_i64 from[4], te_i64 to[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) te_locate(a, first + k * 256, from[k], to[k]);
}

template <class T>
TE_DEV void te_copy_units(const te__copy_kargs &a, te_i64 first) {
    T item[4];
    te_i64 from[4], to[4];
    te_locate4(a, first, from, to);
    if (first + 768 < a.items) {
#pragma unroll
        for (int k = 0; k < 4; k++) item[k] = ((const T *)a.src)[from[k]];
#pragma unroll
        for (int k = 0; k < 4; k++) ((T *)a.dst)[to[k]] = item[k];
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (first + k * 256 < a.items) ((T *)a.dst)[to[k]] = ((const T *)a.src)[from[k]];
    }
}

// Converts items of N neighbours.
template <int N> TE_DEV void te_convert_items(const te__copy_kargs &a, te_i64 first) {
    te_raw<TE_ANY, N> item[4];
    te_i64 from[4], to[4];
    te_locate4(a, first, from, to);
    bool all = first + 768 < a.items; // all four loads are in flight at once then
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (all) item[k] = te_raw_ask<N>(a.src, from[k], SRC_DT);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float v[N];
        if (first + k * 256 >= a.items) break;
        if (!all) item[k] = te_raw_ask<N>(a.src, from[k], SRC_DT);
        te_raw_values<N>(item[k], SRC_DT, v);
        te_store_n<N>(a.dst, to[k], DST_DT, v);
    }
}

extern "C" __global__ void __launch_bounds__(256) te_copy(const __grid_constant__ te__copy_kargs a) {
    te_follow();
    te_i64 first = (te_i64)blockIdx.x * 1024 + threadIdx.x;
    switch (RAW) {
    case 16: te_copy_units<uint4>(a, first); return;
    case 8: te_copy_units<te_u64>(a, first); return;
    case 4: te_copy_units<te_u32>(a, first); return;
    case 2: te_copy_units<te_u16>(a, first); return;
    case 1: te_copy_units<te_u8>(a, first); return;
    default: break;
    }
    if (a.width == 8) return te_convert_items<8>(a, first);
    if (a.width == 4) return te_convert_items<4>(a, first);
    te_i64 from[4], to[4];
    te_locate4(a, first, from, to);
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (first + k * 256 < a.items) te_convert(a, from[k], to[k]);
}
