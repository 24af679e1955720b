"""Writes tests/golden/*.safetensors: inputs and the bytes that te.h's quantizing operations have to make of them.

    make golden                   in the root of the repository: a virtual environment under build/, then this program
    python golden.py FOLDER       the same by hand

An implementation apart from te.h: numpy and ml_dtypes, one IEEE operation at a time, written from TransformerEngine's
arithmetic. It shares no code with te.h, and nothing that te.h does can change it. numerics.py has formats and scales,
recipes.py the operations, activations.py those of its name, this file what they are asked; backends.py writes a table of its own.

A file has metadata "cases" = how many there are and "case I" = the operation and its arguments, as words:

    case 7: block_quantize x=odd_33x65 two_dimensional=1 epsilon=0x1p-10 row=007.row row_scale_inv=007.row_scale_inv

x names a tensor of inputs.safetensors or of the same file, or is every_bf16: the 65536 bit patterns of bf16 in order, as [512, 128]. Other
names are tensors of the same file: what is written, or, where the operation reads, what it reads. FIELD.before is what an
output holds before the call. Numbers are decimal or hexadecimal. E2M1 tensors have an even number of columns. near: a relative error that amaxes may
have (and one unit in the last place what is rounded), since exponentials differ; without it bytes are equal.

Running it twice gives equal files. It is not part of CI: the files are committed, and change when the contract does.
"""

import json
import os
import struct
import sys

import numpy as np
import safetensors

import activations
import backends
import numerics
from numerics import *
from recipes import *

KINDS = {F32: "F32", np.float16: "F16", BF16: "BF16", E4M3: "F8_E4M3", E5M2: "F8_E5M2", E8M0: "F8_E8M0", E2M1: "F4", np.uint8: "U8"}
KINDS = {np.dtype(k): v for k, v in KINDS.items()}


# ---- files ----


class File:
    """Tensors and cases. The safetensors package writes metadata in no fixed order, so the bytes are put together here."""

    def __init__(self, name):
        self.name, self.tensors, self.cases = name, {}, []

    def tensor(self, name, array, kind=None):
        """kind: the format of codes that are held as bytes."""
        array = np.ascontiguousarray(array)
        kind = np.dtype(kind or array.dtype)
        shape = list(array.shape)
        if kind == E2M1:
            array = pack(array)
        self.tensors[name] = (KINDS[kind], shape, array.tobytes())
        return name

    def case(self, op, outputs=(), inputs=(), **arguments):
        """outputs, inputs: [(field, array, kind or None)]."""
        words = [op]
        for key, value in arguments.items():
            if value is None or value is False:
                continue
            if isinstance(value, (float, np.floating)):
                value = float(value).hex()
            words.append(f"{key}={int(value) if value is True else value}")
        for field, array, kind in list(inputs) + list(outputs):
            words.append(f"{field}={self.tensor(f'{len(self.cases):03}.{field}', array, kind)}")
        self.cases.append(" ".join(words))

    def write(self, folder):
        width = {"F32": 0, "F16": 1, "BF16": 1}
        names = sorted(self.tensors, key=lambda n: (width.get(self.tensors[n][0], 2), n))
        header = {}
        if self.cases:
            header["__metadata__"] = {"cases": str(len(self.cases))} | {f"case {i}": c for i, c in enumerate(self.cases)}
        at = 0
        for name in names:
            kind, shape, data = self.tensors[name]
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        content = struct.pack("<Q", len(text)) + text + b"".join(self.tensors[n][2] for n in names)
        read = dict(safetensors.deserialize(content))
        assert all(bytes(read[n]["data"]) == self.tensors[n][2] and read[n]["shape"] == self.tensors[n][1] for n in names)
        with open(os.path.join(folder, self.name + ".safetensors"), "wb") as f:
            f.write(content)
        print(f"{self.name}: {len(self.cases)} cases, {len(names)} tensors, {len(content)} bytes")
        return len(content)


# ---- inputs ----


class Random:
    """Numbers from the raw words of PCG64, which numpy keeps the same for ever (its distributions it does not)."""

    def __init__(self, seed):
        self.bits = np.random.PCG64(seed)

    def words(self, *shape):
        return self.bits.random_raw(int(np.prod(shape))).reshape(shape)

    def integers(self, low, high, *shape):
        return low + ((self.words(*shape) >> np.uint64(33)) % np.uint64(high - low)).astype(np.int64)

    def normal(self, *shape):
        """Close to it: four uniform numbers of 16 bits, added up."""
        w = self.words(*shape)
        parts = sum((w >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.float64) for i in range(4))
        return (parts - 2 * 65535) / 37837.0


def at_random(r, x, share, values):
    """About `share` of x's elements, and at least one, become one of `values`."""
    count = max(1, int(x.size * share))
    x.ravel()[r.integers(0, x.size, count)] = np.array(values)[r.integers(0, len(values), count)]
    return x


def patches(r, x, size, values):
    """Patches of size x size are multiplied with one of `values` each."""
    m, n = x.shape
    factor = np.array(values)[r.integers(0, len(values), -(-m // size), -(-n // size))]
    return x * spread(factor, m, n, size, size)


def make_input(kind, shape, dtype, seed):
    r = Random(seed)
    x = r.normal(*shape)
    least, largest = {BF16: (2.0**-133, BF16_MAX), np.float16: (2.0**-24, 65504.0), F32: (2.0**-149, float(F32_MAX))}[dtype]
    if kind == "tiny":  # near the smallest normal number: quotients overflow
        x *= 2.0**-18 if dtype == np.float16 else 2.0**-120
    elif kind == "huge":
        x = np.clip(x * largest, -largest, largest)
    elif kind == "denormal":
        x *= least * 8
    elif kind == "zero":
        x *= 0
    elif kind == "spread":  # many magnitudes side by side: where the order of a sum is seen
        x = np.ldexp(x, r.integers(-40, 41, *shape))
    elif kind == "infinite":
        x = at_random(r, x, 0.01, [np.inf, -np.inf])
    elif kind == "nan":
        x = at_random(r, x, 0.01, [np.nan])
    elif kind == "grid":  # numbers and ties of the small formats, amaxes that are exactly their largest
        x = r.integers(-24, 25, *shape) * 0.25
        x = np.where(r.integers(0, 5, *shape) == 0, x * 448 / 6, x)
        x = patches(r, x, 16, [1, 2, 0.25, 1 / 448, 2.0**-9, 57344 / 448])
    elif kind in ("wide", "odd"):  # blocks from zero to a thousand, lone outliers; odd: also all that a number can be
        x = patches(r, x, 16, [1, 1, 1, 0, 1e-3, 40, 2.0**-20])
        x = patches(r, x, 32, [1, 1, 1, 0, 0.01, 1, 7])
        x = at_random(r, x, 0.002, [300.0, -1000.0, -0.0])
        if kind == "odd":
            limit = min(1.0, largest / 7000)
            x = patches(r, x * limit, 16, [1, 1, 1, 1, 1, largest / 7000, least * 4, least * 3000])
            x = at_random(r, x, 0.001, [np.inf, -np.inf, np.nan])
            x = at_random(r, x, 0.002, [largest, -largest, least, -least, 0.0, -0.0])
    x = x.astype(dtype)
    if kind == "nan" and dtype == BF16:  # payloads and signs of every kind
        u = x.view(np.uint16)
        u[np.isnan(x.astype(F32))] = 0x7FC0
        u.ravel()[:: max(1, x.size // 7)] = [0x7F81, 0xFFC1, 0x7FFF, 0xFFFF, 0xFF81, 0x7FC0, 0xFFA5, 0x7FA0][: len(u.ravel()[:: max(1, x.size // 7)])]
    return x


SMALL = ["normal", "tiny", "huge", "denormal", "zero", "infinite", "nan"]
MEDIUM = ["normal", "tiny", "huge", "denormal", "grid", "odd"]


def all_inputs():
    x = {}
    for m, n, kinds in ((1, 1, SMALL), (3, 5, SMALL), (33, 65, MEDIUM), (127, 129, ["wide"]), (128, 128, ["wide"]), (16, 512, ["wide", "odd"])):
        for kind in kinds:
            x[f"{kind}_{m}x{n}"] = make_input(kind, (m, n), BF16, len(x) + 1)
    for name, dtype in (("f32", F32), ("f16", np.float16)):
        for kind in ("tiny", "odd"):
            x[f"{name}_{kind}_33x65"] = make_input(kind, (33, 65), dtype, len(x) + 1)
    x["spread_64x48"] = make_input("spread", (64, 48), BF16, len(x) + 1)
    return x


INPUTS = all_inputs()
EVERY = np.arange(65536, dtype=np.uint16).view(BF16).reshape(512, 128)


def f32(name):
    return (EVERY if name == "every_bf16" else INPUTS[name]).astype(F32)


def limit_of(name):
    """The largest finite number of the input's format."""
    dtype = EVERY.dtype if name == "every_bf16" else INPUTS[name].dtype
    return F32(BF16_MAX) if dtype == BF16 else F32(np.finfo(dtype).max)


def strides(name, multiple, tight=False):
    m, n = f32(name).shape
    return (n, m) if tight else (round_up(n, multiple), round_up(m, multiple))


FORMAT = {E4M3: "e4m3", E5M2: "e5m2"}
BY_SIZE = [f"{kind}_{size}" for size in ("1x1", "3x5") for kind in SMALL] + [f"{kind}_33x65" for kind in MEDIUM]
# Which copies are written when both would take much room: (row, col).
COPIES = ((True, True), (True, False), (False, True))
OTHERS = ["f32_tiny_33x65", "f32_odd_33x65", "f16_tiny_33x65", "f16_odd_33x65"]


# ---- what is asked ----


def fp8_cases():
    f = File("fp8")
    for name in list(INPUTS) + ["every_bf16"]:
        f.case("amax", [("amax", amax(f32(name)).reshape(1), None)], x=name)

    special = [0, 2.0**-149, 3e-45, 2.0**-127, 2.0**-126, 1e-36, 1.3165e-36, 2e-36, 1e-3, 1, 1.5, 448, 57344, 65504, 3e38, F32_MAX, np.inf, np.nan]
    a = np.concatenate([np.array(special, F32), np.ldexp(Random(77).normal(110), Random(78).integers(-130, 120, 110)).astype(F32)])
    a = np.abs(a)
    for fp8_max, epsilon, power in ((448, 0, False), (448, 0, True), (57344, 0, False), (57344, 2.0**-20, True), (448, 3e-39, False), (256, np.inf, False)):
        s = scale_from_amax(a, fp8_max, epsilon, power)
        f.case("scale_from_amax", [("scale", s, None), ("scale_inv", F32(1) / s, None)], [("amax", a, None)], fp8_max=float(fp8_max), epsilon=float(epsilon),
               power_of_two=power)

    def quantize(name, fmt, scale=None, before=0.0, epsilon=0.0, power=False, tight=False, row=True, col=True):
        x, a = f32(name), amax(f32(name))
        ld, ldc = strides(name, 16, tight)
        current = scale is None
        s = scale_from_amax(a, LARGEST[fmt], epsilon, power) if current else F32(scale)
        r = fp8_quantize(x, fmt, s, ld, ldc)
        outputs = [(k, r[k], fmt) for k, wanted in (("row", row), ("col", col)) if wanted]
        outputs += [("scale_inv", r["scale_inv"].reshape(1), None), ("amax", (a if current else np.fmax(a, F32(before))).reshape(1), None)]
        f.case("fp8_quantize", outputs, x=name, current=current, scale=scale, epsilon=float(epsilon) or None, power_of_two=power,
               **{"amax.before": F32(before)})

    quantize("every_bf16", E4M3, 1.0, col=False)
    quantize("every_bf16", E5M2, 1.0, col=False)
    scales = [1.0, 0.75, 300.0, 2.0**100, 1e-30, 2.0**-149, float(F32_MAX)]
    for i, name in enumerate(BY_SIZE + OTHERS):
        fmt, other = ((E4M3, E5M2), (E5M2, E4M3))[i % 2]
        row, col = COPIES[i % 3 if f32(name).size > 15 else 0]
        quantize(name, fmt, F32(scales[i % len(scales)]), before=(0.0, 2.5)[i // 2 % 2], tight=i % 4 == 1, row=col, col=row)
        quantize(name, other, None, before=7.0, epsilon=(0.0, 2.0**-8, 0.0, 1e-38)[i % 4], power=i // 2 % 2 == 0, tight=i % 4 == 2, row=row, col=col)
    quantize("wide_127x129", E4M3)
    quantize("wide_128x128", E5M2, 3.3, row=False)
    quantize("wide_16x512", E4M3, power=True, col=False)
    quantize("odd_16x512", E5M2, 0.01, col=False)

    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    for i, (fmt, y) in enumerate((fmt, y) for fmt in (E4M3, E5M2) for y in (F32, BF16, np.float16)):
        for scale_inv in (F32(0.37), F32(2.0**-130)):
            out = (decode(codes, fmt) * scale_inv)[:, :60].astype(y)
            f.case("fp8_dequantize", [("y", out, None)], [("q", codes, fmt), ("scale_inv", scale_inv.reshape(1), None)])
    return f


def delayed_cases():
    f = File("delayed")
    pool = np.array([0, 0, 1e-45, 1e-38, 1e-36, 0.5, 1, 1, 3, 448, 1e4, 3e38, np.inf, np.nan], F32)
    for i, (length, fp8_max, margin, recent, reduce) in enumerate(
            (length, (448.0, 57344.0)[k % 2], (0.0, 1.0, -2.0, 2.5)[k % 4], k // 2 % 2 == 1, k // 4 % 2 == 1)
            for length in (1, 2, 3, 16, 300) for k in range(8) if length < 300 or k in (2, 5)):
        n = 3 if length == 300 else 20
        r = Random(1000 + i)
        history = np.abs(r.normal(length, n)).astype(F32)
        history = np.where(r.integers(0, 3, length, n) == 0, pool[r.integers(0, len(pool), length, n)], history).astype(F32)
        reduced = pool[r.integers(0, len(pool), n)] if reduce else None
        scale = np.abs(r.normal(n)).astype(F32)
        after, s = delayed_update(history, scale, reduced, fp8_max, margin, recent)
        inputs = [("amax_history.before", history, None), ("scale.before", scale, None)] + ([("reduced", reduced, None)] if reduce else [])
        f.case("delayed_update", [("amax_history", after, None), ("scale", s, None)], inputs, fp8_max=fp8_max, margin=margin, most_recent=recent)
    return f


def block_cases():
    f = File("block")

    def quantize(name, fmt=E4M3, two=False, fp32_scales=False, epsilon=0.0, tight=False, row=True, col=True, back=False):
        x = f32(name)
        ld, ldc = strides(name, 16, tight)
        r = block_quantize(x, fmt, two, fp32_scales, epsilon, limit_of(name), ld, ldc)
        outputs = []
        for k, wanted in (("row", row), ("col", col)):
            if wanted:
                outputs += [(k, r[k], fmt), (k + "_scale_inv", r[k + "_scale_inv"], None)]
        f.case("block_quantize", outputs, x=name, two_dimensional=two, fp32_scales=fp32_scales, epsilon=float(epsilon) or None)
        for columnwise, k in enumerate(("row", "col")) if back else ():
            m, n = x.shape[::-1] if columnwise else x.shape
            y = block_dequantize(r[k], r[k + "_scale_inv"], fmt, m, n, two)
            f.case("block_dequantize", [("y", (y.T if columnwise else y).astype((BF16, F32)[columnwise]), None)],
                   [("q", r[k], fmt), ("scale_inv", r[k + "_scale_inv"], None)], two_dimensional=two, columnwise=bool(columnwise))

    quantize("every_bf16", col=False)
    for i, name in enumerate(BY_SIZE + OTHERS):
        row, col = COPIES[i % 3 if f32(name).size > 15 else 0]
        quantize(name, (E4M3, E5M2)[i % 2], i // 2 % 2 == 1, i // 3 % 2 == 1, (0.0, 0.0, 2.0**-6, 1e-39)[i // 4 % 4], i % 5 == 1, row, col)
        quantize(name, (E5M2, E4M3)[i // 3 % 2], i // 2 % 2 == 0, i // 3 % 2 == 0, 0.0, i % 5 == 2, col, row,
                 back=name in ("odd_33x65", "normal_3x5", "nan_3x5"))
    quantize("wide_127x129")
    quantize("wide_128x128", E5M2, fp32_scales=True, row=False)
    quantize("wide_16x512", two=True, fp32_scales=True, col=False)
    quantize("odd_16x512")
    return f


def mxfp8_cases():
    f = File("mxfp8")

    def quantize(name, fmt=E4M3, two=False, swizzled=False, tight=False, row=True, col=True, back=False):
        x = f32(name)
        m, n = x.shape
        ld = strides(name, 16, tight)[0]
        r = mxfp8_quantize(x, fmt, two, swizzled, ld)
        outputs = []
        for k, wanted in (("row", row), ("col", col)):
            if wanted:
                outputs += [(k, r[k], fmt), (k + "_scale", r[k + "_scale"], E8M0)]
        f.case("mxfp8_quantize", outputs, x=name, two_dimensional=two, swizzled=swizzled)
        for columnwise, k in enumerate(("row", "col")) if back else ():
            flat = mxfp8_quantize(x, fmt, two, False, ld)
            y = mxfp8_dequantize(flat[k], flat[k + "_scale"], fmt, m, n, columnwise)
            f.case("mxfp8_dequantize", [("y", y.astype((F32, BF16)[columnwise]), None)], [("q", r[k], fmt), ("scale", r[k + "_scale"], E8M0)],
                   columnwise=bool(columnwise), swizzled=swizzled)

    quantize("every_bf16", col=False)
    for i, name in enumerate(BY_SIZE + OTHERS):
        row, col = COPIES[i % 3 if f32(name).size > 15 else 0]
        quantize(name, (E4M3, E5M2)[i % 2], i // 2 % 2 == 1, i // 3 % 2 == 1, i % 5 == 1, row, col)
        if f32(name).size > 15:
            quantize(name, (E4M3, E5M2)[i // 3 % 2], i // 2 % 2 == 0, i // 3 % 2 == 0, i % 5 == 2, col, row, back=name in ("odd_33x65",))
            continue
        quantize(name, (E5M2, E4M3)[i % 2], i // 2 % 2 == 0, i // 3 % 2 == 0, False, row, col, back=name in ("tiny_3x5", "huge_3x5", "nan_3x5"))
    quantize("wide_127x129", swizzled=True, row=False)
    quantize("wide_128x128", E5M2, two=True, row=False)
    quantize("wide_16x512", two=True, swizzled=True, col=False)
    quantize("odd_16x512")
    return f


def nvfp4_cases():
    f = File("nvfp4")

    def amaxes(name, rows, rht, sign_mask):
        """rows: one of each row of x, and one of each column (transformed first)."""
        x = f32(name)
        turned = hadamard(x.T, sign_mask) if rht else x.T
        return (amax(x, 1), amax(turned, 1)) if rows else (amax(x).reshape(1), amax(turned).reshape(1))

    def take_amax(name, rows=False, rht=False, sign_mask=True, keep=None):
        a, c = amaxes(name, rows, rht, sign_mask)
        before = {"keep": True, "amax_row.before": F32(keep), "amax_col.before": F32(keep)} if keep is not None else {}
        if keep is not None:
            a, c = np.fmax(a, F32(keep)), np.fmax(c, F32(keep))
        f.case("nvfp4_amax", [("amax_row", a, None), ("amax_col", c, None)], x=name, rht=rht, no_sign_mask=not sign_mask, **before)

    def quantize(name, rows=False, two=False, rht=False, sign_mask=True, seed=None, four=None, ceiling=448, swizzled=False, tight=False, row=True,
                 col=True, a=None, back=False):
        x = f32(name)
        m, n = x.shape
        ld, ldc = strides(name, 2 if tight and not rht else 32)
        if a is None:
            a, c = amaxes(name, rows, rht, sign_mask)
        else:
            c = a
        stochastic = None if seed is None else (seed, seed % 1000003 * 2**31 + 5)
        options = dict(two_dimensional=two, rht=rht, sign_mask=sign_mask, stochastic=stochastic, four_over_six=four, ceiling=ceiling, swizzled=swizzled)
        r = nvfp4_quantize(x, a, c, ld, ldc if col else None, **options)
        inputs = [("amax_row", a, None)] if row or not (rht or rows) else []
        inputs += [("amax_col", c, None)] if col and (rht or rows) else []
        outputs = []
        for k, wanted in (("row", row), ("col", col)):
            if wanted:
                outputs += [(k, r[k], E2M1), (k + "_scale", r[k + "_scale"], E4M3)]
        f.case("nvfp4_quantize", outputs, inputs, x=name, two_dimensional=two, rht=rht, no_sign_mask=rht and not sign_mask,
               stochastic_rounding=seed is not None, seed=seed, offset=stochastic and stochastic[1], four_over_six=four, e4m3_max_256=ceiling == 256,
               swizzled=swizzled)
        if not back:
            return
        flat = nvfp4_quantize(x, a, c, ld, ldc if col else None, **options | {"swizzled": False})
        for columnwise, k in enumerate(("row", "col") if col else ("row",)):
            p, q = (n, m) if columnwise else (m, n)
            turned = rht and columnwise == 1
            if turned:
                q = round_up(m, 16)
            y = nvfp4_dequantize(flat[k], flat[k + "_scale"], c if columnwise else a, p, q, ceiling, turned, sign_mask)
            y = y.T[:m] if columnwise else y
            f.case("nvfp4_dequantize", [("y", y.astype((BF16, F32)[columnwise]), None)],
                   [("q", r[k], E2M1), ("scale", r[k + "_scale"], E4M3), ("amax", c if columnwise else a, None)], columnwise=columnwise == 1, rht=turned,
                   no_sign_mask=turned and not sign_mask, e4m3_max_256=ceiling == 256, swizzled=swizzled)

    for i, name in enumerate(list(INPUTS) + ["every_bf16"]):
        take_amax(name, rows=i % 3 == 0, rht=i % 4 < 2, sign_mask=i % 4 == 0, keep=0.125 if i % 7 == 5 else None)
    for name in MEDIUM:
        take_amax(name + "_33x65", rht=True)

    quantize("every_bf16", rows=True, col=False)
    for i, name in enumerate(BY_SIZE + OTHERS):
        seed = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
        medium = name.endswith("33x65")
        row, col = COPIES[i % 3 if medium else 0]
        backs = name in ("odd_33x65", "huge_3x5", "normal_3x5", "nan_3x5")
        if medium or i % 2:
            quantize(name, two=i % 4 == 3, seed=seed if i % 6 == 5 else None, ceiling=(448, 256)[i // 2 % 2], swizzled=i % 5 == 3, tight=i % 5 == 1, row=row,
                     col=col, back=backs)
        if medium or i % 2 == 0:
            quantize(name, rht=True, sign_mask=i % 4 != 3, seed=seed if i % 3 else None, swizzled=i % 5 == 2, row=col, col=row or not col, back=backs)
        if medium:
            quantize(name, rows=i % 3 == 0, four=("mae", "mse")[i % 2], two=i % 3 == 1, ceiling=(448, 256)[i // 3 % 2], row=row,
                     col=col)
    quantize("normal_3x5", a=np.array([0], F32), back=True)
    quantize("normal_33x65", a=np.array([1e-37], F32), col=False)
    quantize("normal_3x5", rht=True, back=True)
    quantize("denormal_3x5", rows=True, back=True)
    quantize("grid_33x65", rht=True, sign_mask=False, swizzled=True, row=False, back=True)
    quantize("normal_33x65", rows=True, ceiling=256, back=True)
    quantize("wide_127x129", rht=True, seed=1)
    quantize("wide_127x129", four="mse", two=True, ceiling=256)
    quantize("wide_128x128", two=True, seed=2**64 - 1, swizzled=True)
    quantize("wide_128x128", four="mae", row=False)
    quantize("wide_16x512", rht=True, swizzled=True)
    quantize("odd_16x512", rows=True, row=False)
    quantize("wide_128x128", rows=True, back=True)
    quantize("odd_33x65", rows=True, rht=True, back=True)
    quantize("spread_64x48", rht=True, back=True)
    quantize("spread_64x48", rht=True, sign_mask=False, row=False)
    quantize("infinite_3x5", rht=True)
    for kind in MEDIUM:  # both copies choose for themselves
        quantize(kind + "_33x65", four="mae", two=True, row=kind == "tiny")
        quantize(kind + "_33x65", four="mse", ceiling=256, row=False)
    return f


def act_cases():
    """Activations whose amax is taken from f32, what they store, and codes of that by that amax: quantize_with_amax."""
    f = File("act")

    def cast(name, y, a, i):
        (m, n), (fmt, power) = y.shape, ((E4M3, False), (E5M2, True))[i % 2]
        r = fp8_quantize(y.astype(F32), fmt, scale_from_amax(a, LARGEST[fmt], 0.0, power), round_up(n, 16), round_up(m, 16))
        outputs = [("row", r["row"], fmt), ("col", r["col"], fmt), ("scale_inv", r["scale_inv"].reshape(1), None), ("x_amax", np.zeros(2, F32), None)]
        f.case("fp8_quantize", outputs, [("x_amax.before", np.array([a, 0], F32), None)], x=name, current=True, power_of_two=power)
        if y.dtype == BF16 and i % 3 == 0:
            r = nvfp4_quantize(y.astype(F32), a.reshape(1), a.reshape(1), round_up(n, 32), round_up(m, 32))
            outputs = [(k + e, r[k + e], fmt) for k in ("row", "col") for e, fmt in (("", E2M1), ("_scale", E4M3))]
            f.case("nvfp4_quantize", outputs, [("amax_row", a.reshape(1), None)], x=name)

    def calls(act, x, dy, i):
        near = None if act in activations.PRODUCTS else 2.0**-18  # f32 sums that cancel, and te.h's sigmoid; a rounding to 16 bits changes a number by up to 2^-9, f16 2^-12
        y, dx = activations.forward(act, x.astype(F32)), activations.backward(act, dy.astype(F32), x.astype(F32))
        source = f.tensor(f"{len(f.cases):03}.x", x)
        for op, name, v, inputs in (("act_fwd", "y", y, []), ("act_bwd", "dx", dx, [("dy", dy, None)])):
            a, stored, at = amax(v), v.astype(x.dtype), len(f.cases)
            f.case(op, [(name, stored, None), ("amax", a.reshape(1), None)], inputs, x=source, activation=act, near=near, **{"amax.before": F32(0)})
            if amax(stored.astype(F32)) != a:
                cast(f"{at:03}.{name}", stored, a, i)

    calls(activations.GELU, np.ones((1, 1), BF16), np.ones((1, 1), BF16), 0)
    apart = 0
    for act in activations.NUMBERS:
        for i, (m, n, dtype) in enumerate(((19, 16, BF16), (9, 16, np.float16))):
            r = Random(500 + 2 * act + i)
            x = (r.normal(m, 2 * n if activations.is_gated(act) else n) * 3).astype(dtype)
            before = len(f.cases)
            calls(act, x, r.normal(m, n).astype(dtype), act + i)
            apart += len(f.cases) - before > 2
    assert apart > 12  # few amaxes are numbers of 16 bits
    return f


def main(folder):
    numerics.check()
    inputs = File("inputs")
    for name, x in INPUTS.items():
        inputs.tensor(name, x)
    total = sum(f.write(folder) for f in (inputs, fp8_cases(), delayed_cases(), block_cases(), mxfp8_cases(), nvfp4_cases(), act_cases()))
    backends.write(os.path.join(folder, "backends.txt"))
    print(total, "bytes")


if __name__ == "__main__":
    main(sys.argv[1])
