// ops/attn/attn_fwd_fp8_values.cu: writes V^T for attn_fwd_fp8_hopper.cu. A row has the FP8 codes of one channel of a
// head, with zeros for keys beyond a sequence.
//
// Keys are permuted within each 16: position 4 t + 2 u + v has key 8 u + 2 t + v, with t < 4 and u, v < 2. The reason:
// in an FP8 operand A, lane t of a quad has four neighbouring columns, but in an accumulator it has two pairs, eight
// columns apart.
//
// A thread block has 128 keys of a head. It reads rows of V, and writes 128 bytes of each channel.
//
// Launch: grid ceil(s_kv / 128) * groups * batch, block 256.
// te:arch 90a
// te:row X_D=64|128
#include "ops/attn/attn.cuh"

enum { D = X_D, KEYS = TE__ATTN_FP8_KEYS, PITCH = D / 4 + 1 /* words of a row in shared memory */ };

extern "C" __global__ void __launch_bounds__(256)
    te_attn_fwd_fp8_values(const __grid_constant__ te__attn_fp8_values_kargs k) {
    te_follow();
    __shared__ te_u32 rows[KEYS * PITCH];
    const te__attn_kargs &a = k.a;
    const te_u32 blocks = (a.s_kv + KEYS - 1) / KEYS, of_head = blockIdx.x / blocks;
    const int n = (int)(blockIdx.x - of_head * blocks), b = (int)(of_head / (te_u32)a.groups),
              h = (int)(of_head - (te_u32)b * (te_u32)a.groups);
    const te__attn_seq seq = te__attn_seq_of(&a, b);
    if (n * KEYS >= seq.s_kv) return; // no query reads these
    const te_u8 *const from = (const te_u8 *)a.v.p + (a.x.packed_kv ? 0 : b * a.v.b) + h * a.v.h + seq.kv_at * a.v.s;
    enum { PIECES = KEYS * (D / 16) / 256 }; // of a thread, all loaded before the first is stored
    uint4 x[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = threadIdx.x + 256 * i, piece = at % (D / 16), key = n * KEYS + at / (D / 16);
        x[i] = key < seq.s_kv && 16 * piece < a.d_v ? *(const uint4 *)(from + key * a.v.s + 16 * piece)
                                                    : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = threadIdx.x + 256 * i;
        te_u32 *const to = rows + at / (D / 16) * PITCH + 4 * (at % (D / 16));
        to[0] = x[i].x, to[1] = x[i].y, to[2] = x[i].z, to[3] = x[i].w;
    }
    __syncthreads();
    te_u8 *const to = (te_u8 *)k.to + (a.x.packed_kv ? te__attn_fp8_values_at((int)seq.kv_at, b) : 0) + n * KEYS +
                      ((te_i64)(a.x.packed_kv ? 0 : b) * a.groups + h) * a.d_v * k.row;
    // a lane has four positions, for four channels at a time
    const int lane = threadIdx.x & 31, key = lane / 4 * 16 + lane % 4 * 2;
    for (int c = threadIdx.x / 32; 4 * c < a.d_v; c += 8) {
        const te_u32 *const at = rows + key * PITCH + c;
        const te_u32 x0 = at[0], x1 = at[PITCH], x2 = at[8 * PITCH], x3 = at[9 * PITCH];
        const te_u32 low01 = __byte_perm(x0, x1, 0x5140), low23 = __byte_perm(x2, x3, 0x5140),
                     high01 = __byte_perm(x0, x1, 0x7362), high23 = __byte_perm(x2, x3, 0x7362);
        te_u8 *const row = to + (te_i64)4 * c * k.row + 4 * lane;
        *(te_u32 *)row = __byte_perm(low01, low23, 0x5410);
        *(te_u32 *)(row + k.row) = __byte_perm(low01, low23, 0x7632);
        *(te_u32 *)(row + 2 * k.row) = __byte_perm(high01, high23, 0x5410);
        *(te_u32 *)(row + 3 * k.row) = __byte_perm(high01, high23, 0x7632);
    }
}
