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


def butterflies(v):
    """H v / 4 along the last axis of 16."""
    v = v.copy()
    for h in (1, 2, 4, 8):
        for i in range(16):
            if i & h == 0:
                a, b = v[..., i].copy(), v[..., i + h].copy()
                v[..., i], v[..., i + h] = a + b, a - b
    return v * F32(0.25)


def hadamard(v, sign_mask):
    """The random Hadamard transform along the rows of v [R, C]: [R, C rounded up to 16]."""
    g = groups_of(v, 16)
    return butterflies(g * SIGNS if sign_mask else g).reshape(v.shape[0], -1)


def hadamard_back(v, sign_mask):
    g = butterflies(groups_of(v, 16))
    return (g * SIGNS if sign_mask else g).reshape(v.shape[0], -1)[:, : v.shape[1]]


def sum_in_order(e, axis):
    total = F32(0)
    for part in np.moveaxis(e, axis, 0):
        total = total + part
    return total


def nvfp4_codes(v, block_amax, s, stretch, stochastic):
    """(codes [R, groups, 16], scale codes [R, groups]) of v [R, C]; s: S of each row [R, 1]."""
    d = encode(block_amax * (s * ONE_SIXTH) * F32(stretch), E4M3)  # a product with 1 is exact
    step = decode(d, E4M3) * (F32(1) / s)
    multiplier = np.minimum(F32(1) / step, F32_MAX)
    scaled = groups_of(v, 16) * multiplier[:, :, None]
    if stochastic is None:
        return encode(scaled, E2M1), d, step
    seed, offset = stochastic
    rows, blocks = d.shape
    random = np.frombuffer(b"".join(philox_bytes(seed, offset, i) for i in range(rows * blocks)), np.uint8).reshape(rows, blocks, 16)
    magnitude = np.abs(scaled)
    width = np.where(magnitude < 2, F32(0.5), np.where(magnitude < 4, F32(1), F32(2)))
    t = magnitude + random.astype(F32) / F32(256) * width
    codes = np.searchsorted(GRID, t, side="right") - 1
    return np.where(np.isnan(t), 7, codes | np.where(np.signbit(scaled), 8, 0)).astype(np.uint8), d, step


def nvfp4_quantize(x, amax_row, amax_col, ld, ldc, two_dimensional=False, rht=False, sign_mask=True, stochastic=None, four_over_six=None,
                   ceiling=448, swizzled=False):
    """amax_row [1] or [M]; stochastic: (seed, offset); four_over_six: None, "mae" or "mse"."""
    m, n = x.shape

    def error(v, codes, step):
        e = groups_of(v, 16) - decode(codes, E2M1) * step[:, :, None]
        return sum_in_order(np.abs(e) if four_over_six == "mae" else e * e, 2)

    def tile_error(e):
        return sum_in_order(pad(e, round_up(m, 16), e.shape[1]).reshape(-1, 16, e.shape[1]), 1)

    # Which blocks map their largest to 4. With tiles, both copies follow the rows of x.
    def better(v, block_amax, s):
        six, _, step6 = nvfp4_codes(v, block_amax, s, 1, None)
        four, _, step4 = nvfp4_codes(v, block_amax, s, 1.5, None)
        return error(v, six, step6), error(v, four, step4)

    tiles = tile_amax(x, 16)
    out = {}
    for name, v, a, stride in (("row", x, amax_row, ld), ("col", x.T, amax_col, ldc)):
        if name == "col" and (a is None or stride is None):
            continue
        if name == "col" and rht:
            v = hadamard(v, sign_mask)
        s = np.broadcast_to(nvfp4_tensor_scale(a, ceiling).reshape(-1, 1), (v.shape[0], 1))
        if two_dimensional:
            block = np.repeat(tiles if name == "row" else tiles.T, 16, 0)[: v.shape[0]]
        else:
            block = amax(groups_of(v, 16), 2)
        draw = None if stochastic is None else (stochastic[0], stochastic[1] + (name == "col"))
        codes, d, _ = nvfp4_codes(v, block, s, 1, draw)
        if four_over_six:
            four, d4, _ = nvfp4_codes(v, block, s, 1.5, draw)
            if two_dimensional:
                along = np.repeat(tiles, 16, 0)[:m]
                e6, e4 = (tile_error(e) for e in better(x, along, np.broadcast_to(s[:1], (m, 1))))
                pick = e4 < e6
                pick = np.repeat(pick if name == "row" else pick.T, 16, 0)[: v.shape[0]]
            else:
                e6, e4 = better(v, block, s)
                pick = e4 < e6
            codes, d = np.where(pick[:, :, None], four, codes), np.where(pick, d4, d)
        codes = codes.reshape(v.shape[0], -1)[:, : v.shape[1]]
        out[name] = pad(codes, v.shape[0], stride)
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
