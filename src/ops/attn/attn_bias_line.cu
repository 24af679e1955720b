// ops/attn/attn_bias_line.cu: prepares a bias that all queries share, for Hopper's forward kernel with X_KEYS. The bias
// is [b|1, h|1, 1, s_kv] of any dtype and strides. The result is operand B of a matrix product that adds the bias to S.
//
// For each key a thread writes eight bf16 numbers: hi, mid, lo and five zeros. hi + mid + lo is the bias times
// te__attn_line_kargs.factor, in units of Q K^T. Each of the three has 8 bits of the fraction, so together they have
// all 24 bits of f32. They are truncated, so that nothing finite becomes infinite. If the bias is infinite, mid and lo
// are 0, because bias - hi would be NaN. The keys from s_kv to the end of the forward kernel's last block get zeros.
//
// Launch: grid: ceil(keys / 256) blocks for each sequence and head of the bias; block 256.
// te:arch 90a
#include "ops/attn/attn.cuh"

// Returns x truncated to a bf16 number, as f32. It keeps the upper half of the bits.
TE_DEV float te_cut(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

extern "C" __global__ void __launch_bounds__(256) te_attn_bias_line(const __grid_constant__ te__attn_line_kargs a) {
    te_follow();
    const te_u32 parts = (te_u32)(a.keys + 255) / 256, row = blockIdx.x / parts, b = row / (te_u32)a.heads,
                 h = row - b * (te_u32)a.heads;
    const int j = (int)(blockIdx.x - row * parts) * 256 + (int)threadIdx.x;
    if (j >= a.keys) return;
    const float x =
        j < a.s_kv ? a.factor * te_load(a.bias.p, b * a.bias.b + h * a.bias.h + j * a.bias.j, a.bias.dt) : 0.0f;
    const float hi = x == x ? te_cut(x) : __uint_as_float(0x7fc00000u /* NaN. te_cut would turn some NaNs into an
                                                                       * infinity. */);
    const float rest = fabsf(x) < TE_INF ? x - hi : 0.0f, mid = te_cut(rest), lo = rest - mid;
    const te_u32 first = __float_as_uint(hi) >> 16 | __float_as_uint(mid), second = __float_as_uint(lo) >> 16;
    ((uint4 *)a.to.p)[b * a.to.b + h * a.to.h + j] = make_uint4(first, second, 0, 0);
}
