"""Number formats, scales and random bits, from their definitions.

Every array is float32 and every operation on it one IEEE operation, as TransformerEngine's kernels have them; casts to the small
formats are those of ml_dtypes, after what overflows has been clamped (ml_dtypes' e4m3fn would make it a NaN). Knows no layout.
"""

import ml_dtypes
import numpy as np

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
F32_MAX = np.finfo(F32).max
BF16_MAX = float(ml_dtypes.finfo(BF16).max)
LARGEST = {E4M3: F32(448), E5M2: F32(57344), E2M1: F32(6)}

np.seterr(all="ignore")  # infinities and NaN are the point


def encode(x, fmt):
    """Codes (uint8) of float32 x: nearest even, saturating; NaN is the positive NaN code, or +6 in E2M1."""
    x = np.asarray(x, F32)
    top = LARGEST[fmt]
    code = np.clip(x, -top, top).astype(fmt).view(np.uint8)
    if fmt == E2M1:
        return np.where(np.isnan(x), 7, code & 15).astype(np.uint8)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def decode(code, fmt):
    return np.asarray(code, np.uint8).view(fmt).astype(F32)


def amax(x, axis=None):
    """The largest magnitude; a NaN counts as nothing, an infinity as itself."""
    x = np.abs(np.asarray(x, F32))
    return np.max(np.where(np.isnan(x), F32(0), x), axis=axis, initial=F32(0))


def scale_from_amax(a, fp8_max, epsilon=0.0, power_of_two=False, limit=F32_MAX):
    """TransformerEngine's compute_scale_from_amax."""
    a = np.asarray(a, F32)
    a = np.where(a < F32(epsilon), F32(epsilon), a)
    s = F32(fp8_max) / a
    s = np.where(np.isinf(s), F32(limit), s)
    if power_of_two:
        mantissa, exponent = np.frexp(s)  # s = mantissa * 2^exponent, 1/2 <= mantissa < 1
        s = np.where(np.isnan(s), s, np.ldexp(F32(0.5), exponent)).astype(F32)
    return np.where((a == 0) | np.isinf(a) | np.isnan(a), F32(1), s).astype(F32)


def e8m0_up(v):
    """The E8M0 code of the smallest power of two that is not below v >= 0; infinity gives the largest code."""
    mantissa, exponent = np.frexp(np.asarray(v, F32))
    exponent = exponent - (mantissa == 0.5)
    code = np.clip(exponent + 127, 0, 254)
    return np.where(v == 0, 0, np.where(np.isinf(v), 254, code)).astype(np.uint8)


def nvfp4_tensor_scale(a, ceiling):
    """S: what brings a tensor's largest magnitude to `ceiling` (of the block scales) times 6."""
    a = np.asarray(a, F32)
    s = np.minimum(F32(F32(ceiling) * F32(6)) / a, F32_MAX)
    return np.where((a == 0) | (s == 0), F32(1), s).astype(F32)


def philox(seed, offset, block):
    """Philox4x32-10 (Salmon et al., SC 2011): key seed, counter block + offset * 2^64. Four words."""
    c = [block & 0xFFFFFFFF, block >> 32, offset & 0xFFFFFFFF, offset >> 32]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(high >> 32) ^ c[1] ^ k[0], high & 0xFFFFFFFF, (low >> 32) ^ c[3] ^ k[1], low & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def philox_bytes(seed, offset, block):
    return b"".join(word.to_bytes(4, "little") for word in philox(seed, offset, block))


def check():
    """What this module rests on, against published values."""
    # Random123's known answers.
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**64 - 1
    assert philox(ones, ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = philox(0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88)
    assert pi == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    # Ties of E2M1, the limits of the E8M0 rounding, and IEEE subnormals in numpy's float32.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, np.inf, np.nan, -np.inf, -0.0]
    assert list(encode(ties, E2M1)) == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 15, 8]
    assert list(encode([448, 464, 1e9, -np.inf, np.nan, -0.0, 2**-10], E4M3)) == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x80, 0]
    assert list(encode([57344, np.inf, -np.inf, -np.nan], E5M2)) == [0x7B, 0x7B, 0xFB, 0x7F]
    bits = np.array([0, 1, 0x400000, 0x400001, 0x800000, 0x800001, 0x3F800000, 0x3F800001, 0x7F000000, 0x7F000001, 0x7F800000], np.uint32)
    assert list(e8m0_up(bits.view(F32))) == [0, 0, 0, 1, 1, 2, 127, 128, 254, 254, 254]
    assert (F32(1) / F32(448)).view(np.uint32) == 0x3B124925 and (F32(1) / F32(57344)).view(np.uint32) == 0x37924925
    assert np.array([F32(2.0**-100) * F32(2.0**-40)]).view(np.uint32)[0] == 1 << 9
