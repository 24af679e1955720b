"""What each quantizing operation writes, as a dictionary of arrays by the names of its output arguments.

x is a float32 matrix [M, N]. Codes are uint8, a byte each also in E2M1; pack() puts two into a byte. Knows no file.
"""

import numpy as np

from numerics import *


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def pad(a, rows, columns):
    return np.pad(a, ((0, rows - a.shape[0]), (0, columns - a.shape[1])))


def groups_of(x, size):
    """[M, groups, size], zeros behind the end of each row."""
    m, n = x.shape
    return pad(x, m, round_up(n, size)).reshape(m, -1, size)


def tile_amax(x, size):
    """[row tiles, column tiles]"""
    m, n = x.shape
    return amax(pad(x, round_up(m, size), round_up(n, size)).reshape(-(-m // size), size, -(-n // size), size), (1, 3))


def spread(a, rows, columns, size_rows, size_columns):
    """Each entry repeated for its tile, cut to [rows, columns]."""
    return np.repeat(np.repeat(a, size_rows, 0), size_columns, 1)[:rows, :columns]


def swizzle(s):
    """[R, T] with R % 128 == 0 and T % 4 == 0, into Blackwell's tiles of 128 x 4; the same shape, other places."""
    r, t = s.shape
    return s.reshape(r // 128, 4, 32, t // 4, 4).transpose(0, 3, 2, 1, 4).reshape(r, t)


# ---- per tensor ----


def fp8_quantize(x, fmt, scale, ld, ldc):
    codes = encode(x * F32(scale), fmt)
    return {
        "row": pad(codes, x.shape[0], ld),
        "col": pad(codes.T, x.shape[1], ldc),
        "scale_inv": F32(1) / F32(scale),
    }


def delayed_update(history, scale, reduced, fp8_max, margin, most_recent):
    """TransformerEngine's fused update: (history, scale) afterwards. history [L, n], its row 0 gathers the step's amax."""
    history, scale = history.copy(), scale.copy()
    scaled_max = F32(fp8_max) * F32(2.0**-margin)
    for i in range(history.shape[1]):
        old = history[:, i].copy()
        last = reduced[i] if reduced is not None and reduced[i] != 0 else old[0]
        if last == 0:
            continue
        a = last if most_recent else np.fmax.reduce(np.append(old[1:], last))
        history[:, i] = np.concatenate([[0], old[2:], [last]]) if len(old) > 1 else [0]
        if 0 < a < np.inf:
            scale[i] = np.minimum(scaled_max / a, F32_MAX)
    return history, scale


# ---- blocks of 128 ----


def block_quantize(x, fmt, two_dimensional, fp32_scales, epsilon, limit, ld, ldc):
    def scales(a):
        return scale_from_amax(a, LARGEST[fmt], epsilon, not fp32_scales, limit)

    out = {}
    for name, v, stride in (("row", x, ld), ("col", x.T, ldc)):
        m, n = v.shape
        if two_dimensional:
            s = scales(tile_amax(v, 128))
            inverse = F32(1) / s
            out[name + "_scale_inv"] = pad(inverse, s.shape[0], round_up(s.shape[1], 4))
            s = spread(s, m, n, 128, 128)
        else:
            s = scales(amax(groups_of(v, 128), 2))
            inverse = F32(1) / s
            out[name + "_scale_inv"] = pad(inverse.T, s.shape[1], round_up(m, 4))
            s = spread(s, m, n, 1, 128)
        out[name] = pad(encode(v * s, fmt), m, stride)
    return out


def block_dequantize(codes, scale_inv, fmt, m, n, two_dimensional):
    """codes [m, n] of either copy, as it lies."""
    if two_dimensional:
        s = spread(scale_inv, m, n, 128, 128)
    else:
        s = spread(scale_inv.T, m, n, 1, 128)
    return decode(codes[:m, :n], fmt) * s


# ---- MXFP8 ----


def mxfp8_quantize(x, fmt, two_dimensional, swizzled, ld):
    m, n = x.shape
    inverse = F32(1) / LARGEST[fmt]
    tiles = tile_amax(x, 32)
    out = {}
    for name, v, a in (("row", x, tiles), ("col", x.T, tiles.T)):
        if two_dimensional:
            a = np.repeat(a, 32, 0)[: v.shape[0]]
        else:
            a = amax(groups_of(v, 32), 2)
        e = e8m0_up(a * inverse)
        multiplier = np.ldexp(F32(1), 127 - e.astype(np.int32)).astype(F32)
        codes = encode(v * spread(multiplier, *v.shape, 1, 32), fmt)
        s = pad(e, round_up(e.shape[0], 128), round_up(e.shape[1], 4))
        if name == "col":
            codes = codes.T
        shape = s.shape if name == "row" else s.shape[::-1]
        out[name + "_scale"] = swizzle(s).reshape(shape) if swizzled else s.reshape(shape) if name == "row" else s.T
        out[name] = pad(codes, m, ld)
    return out


def mxfp8_dequantize(codes, scale, fmt, m, n, columnwise):
    """Of scales that are not swizzled."""
    e = spread(scale, m, n, 32, 1) if columnwise else spread(scale, m, n, 1, 32)
    return decode(codes[:m, :n], fmt) * decode(np.ascontiguousarray(e), E8M0)


# ---- NVFP4 ----

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F32)
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
ONE_SIXTH = F32(1) / F32(6)


def sylvester(size):
    return np.array([[1.0]]) if size == 1 else np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), sylvester(size // 2))


HADAMARD = sylvester(16) * 0.25  # its entries are exact in bf16, the factor included


def tensor_core_sum(products):
    """The sum over axis 1 as mma.sync on Hopper and tcgen05.mma on Blackwell have it for 16 products of bf16: none is rounded; all are
    cut to 25 bits below the leading bit of the largest, added exactly, and the sum is cut to the 24 bits of an f32."""
    _, exponent = np.frexp(np.max(np.abs(products), axis=1, initial=0, keepdims=True))
    terms = np.trunc(np.ldexp(products, 26 - exponent))
    total = np.ldexp(np.sum(terms, axis=1), exponent[:, 0] - 26)
    mantissa, exponent = np.frexp(total)
    return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24).astype(F32)


def hadamard(v, sign_mask):
    """The random Hadamard transform along the rows of v [R, C], rounded to bf16, as every kernel of TransformerEngine leaves it:
    [R, C rounded up to 16]."""
    g = groups_of(v, 16).reshape(-1, 16).astype(np.float64)
    matrix = HADAMARD * (SIGNS[:, None] if sign_mask else 1.0)
    out = np.zeros(g.shape, F32)
    finite = np.isfinite(g).all(1)
    out[finite] = tensor_core_sum(g[finite][:, :, None] * matrix[None])
    out[~finite] = np.sum(np.where(np.isfinite(g[~finite]), 0, g[~finite])[:, :, None] * matrix[None], axis=1)  # infinities and NaN alone decide
    return out.astype(BF16).astype(F32).reshape(v.shape[0], -1)


def hadamard_back(v, sign_mask):
    """The transpose, in f32: te.h's own, by butterflies. The factor comes first."""
    g = groups_of(v, 16) * F32(0.25)
    for h in (1, 2, 4, 8):
        for i in range(16):
            if i & h == 0:
                a, b = g[..., i].copy(), g[..., i + h].copy()
                g[..., i], g[..., i + h] = a + b, a - b
    return (g * SIGNS if sign_mask else g).reshape(v.shape[0], -1)[:, : v.shape[1]]


def nvfp4_codes(v, d, s, stochastic):
    """(codes [R, groups, 16], multipliers [R, groups]) of v [R, C] under the scale codes d; s: S of each row [R, 1]."""
    step = decode(d, E4M3) * (F32(1) / s)
    multiplier = np.minimum(F32(1) / step, F32_MAX)  # a NaN stays one
    scaled = groups_of(v, 16) * multiplier[:, :, None]
    if stochastic is None:
        return encode(scaled, E2M1)
    seed, offset = stochastic
    rows, blocks = d.shape
    random = np.frombuffer(b"".join(philox_bytes(seed, offset, i) for i in range(rows * blocks)), np.uint8).reshape(rows, blocks, 16)
    magnitude = np.abs(scaled)
    width = np.where(magnitude < 2, F32(0.5), np.where(magnitude < 4, F32(1), F32(2)))
    t = magnitude + random.astype(F32) / F32(256) * width
    codes = np.searchsorted(GRID, t, side="right") - 1
    return np.where(np.isnan(t), 7, codes | np.where(np.signbit(scaled), 8, 0)).astype(np.uint8)


def nvfp4_error(v, codes, d, a, ceiling, measure):
    """What each block of 16 loses, [R, groups]: TransformerEngine's accumulate_dequant_error, element after element. a: [R, 1]."""
    x = groups_of(v, 16)
    top = F32(6) * F32(ceiling)
    total = np.zeros(d.shape, F32)
    for i in range(16):
        value = decode(np.ascontiguousarray(codes[:, :, i]), E2M1) * decode(d, E4M3) * a / top
        lost = value - x[:, :, i]
        total = total + (np.abs(lost) if measure == "mae" else lost * lost)
    return total


def tile_sums(e):
    """The errors [R, groups] of 16 rows at a time, added as lanes of a warp do: half to half, four times; repeated for the rows."""
    t = pad(e, round_up(e.shape[0], 16), e.shape[1]).reshape(-1, 16, e.shape[1])
    for half in (8, 4, 2, 1):
        t = t[:, :half] + t[:, half : 2 * half]
    return np.repeat(t[:, 0], 16, 0)[: e.shape[0]]


def nvfp4_quantize(x, amax_row, amax_col, ld, ldc, two_dimensional=False, rht=False, sign_mask=True, stochastic=None, four_over_six=None,
                   ceiling=448, swizzled=False):
    """amax_row [1] or [M], amax_col [1] or [N]; stochastic: (seed, offset); four_over_six: None, "mae" or "mse"."""
    tiles = tile_amax(x, 16)
    out = {}
    for name, v, a, stride in (("row", x, amax_row, ld), ("col", x.T, amax_col, ldc)):
        if a is None or stride is None:
            continue
        if name == "col" and rht:
            v = hadamard(v, sign_mask)
        rows = v.shape[0]
        s = np.broadcast_to(nvfp4_tensor_scale(a, ceiling).reshape(-1, 1), (rows, 1))
        a = np.broadcast_to(np.asarray(a, F32).reshape(-1, 1), (rows, 1))
        if two_dimensional:
            block = np.repeat(tiles if name == "row" else tiles.T, 16, 0)[:rows]
        elif rht:  # the kernel that transforms lets a NaN through to the scales of both copies
            block = np.max(np.abs(groups_of(v, 16)), axis=2, initial=0)
        else:
            block = amax(groups_of(v, 16), 2)
        draw = None if stochastic is None else (stochastic[0], stochastic[1] + (name == "col"))
        if four_over_six:
            base = block / F32(6) * s
            d, d4 = encode(base, E4M3), encode(base * F32(1.5), E4M3)
            six, four = nvfp4_codes(v, d, s, draw), nvfp4_codes(v, d4, s, draw)
            e6, e4 = nvfp4_error(v, six, d, a, ceiling, four_over_six), nvfp4_error(v, four, d4, a, ceiling, four_over_six)
            if two_dimensional:
                e6, e4 = tile_sums(e6), tile_sums(e4)
            codes, d = np.where((e4 < e6)[:, :, None], four, six), np.where(e4 < e6, d4, d)
        else:
            d = encode(block * (s * ONE_SIXTH), E4M3)
            codes = nvfp4_codes(v, d, s, draw)
        codes = codes.reshape(rows, -1)[:, : v.shape[1]]
        out[name] = pad(codes, rows, stride)
        scale = pad(d, round_up(d.shape[0], 128), round_up(d.shape[1], 4))
        out[name + "_scale"] = swizzle(scale) if swizzled else scale
    return out


def nvfp4_dequantize(codes, scale, a, m, n, ceiling, rht=False, sign_mask=True):
    """codes [m, n] of either copy, as it lies."""
    top = F32(F32(ceiling) * F32(6))
    a = np.where(a == 0, top, a).astype(F32).reshape(-1, 1)
    block = decode(np.ascontiguousarray(scale[:m, : -(-n // 16)]), E4M3) * a * (F32(1) / top)
    y = decode(np.ascontiguousarray(codes[:m, :n]), E2M1) * spread(block, m, n, 1, 16)
    return hadamard_back(y, sign_mask) if rht else y


def pack(codes):
    """Two E2M1 codes a byte, the even column in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4
