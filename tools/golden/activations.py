"""The activations and their gradients in float32, from TransformerEngine's formulas (common/util/math.h, vectorized_pointwise.h): one IEEE operation at a time, but
tanh and exp, which are float64's, rounded. Activations have te.h's numbers. Knows no quantizer.
"""

import numpy as np

from numerics import F32

GELU, RELU, SILU, QGELU, SRELU, GEGLU, REGLU, SWIGLU, QGEGLU, SREGLU, GLU, CLAMPED_SWIGLU = NUMBERS = range(1, 13)
PLAIN = {GEGLU: GELU, SWIGLU: SILU, REGLU: RELU, SREGLU: SRELU, QGEGLU: QGELU}  # what a gated one does to its first half
PRODUCTS = (RELU, SRELU, REGLU, SREGLU)  # without a transcendental function: the same bits everywhere
LIMIT, ALPHA, OFFSET = F32(7), F32(1.702), F32(1)


def tanh(x):
    return np.tanh(x.astype(np.float64)).astype(F32)


def sigmoid(x):
    return F32(1) / (F32(1) + np.exp(-x.astype(np.float64)).astype(F32))


def value(act, x):
    if act == GELU:
        return x * (F32(0.5) + F32(0.5) * tanh(x * (F32(0.79788456) + F32(0.03567741) * x * x)))
    if act == RELU:
        return np.fmax(x, F32(0))
    if act == SRELU:
        return np.where(x > 0, x * x, F32(0))
    if act == GLU:
        return sigmoid(x)
    return x * sigmoid(ALPHA * x if act == QGELU else x)


def slope(act, x):
    if act == GELU:
        t = tanh(F32(0.79788456) * x * (F32(1) + F32(0.044715) * x * x))
        return F32(0.5) * x * ((F32(1) - t * t) * (F32(0.79788456) + F32(0.1070322243) * x * x)) + F32(0.5) * (F32(1) + t)
    if act == RELU:
        return np.where(x > 0, F32(1), F32(0))
    if act == SRELU:
        return np.fmax(F32(2) * x, F32(0))
    a = ALPHA if act == QGELU else F32(1)
    s = sigmoid(a * x)
    return s * (F32(1) - s) if act == GLU else a * x * (s * (F32(1) - s)) + s


def is_gated(act):
    return act >= GEGLU


def halves(x):
    n = x.shape[1] // 2
    return x[:, :n], x[:, n:]


def forward(act, x):
    """The f32 result, of which the kernels take the amax before they store it."""
    if not is_gated(act):
        return value(act, x)
    a, b = halves(x)
    if act == CLAMPED_SWIGLU:
        return value(QGELU, np.fmin(a, LIMIT)) * (np.fmin(np.fmax(-LIMIT, b), LIMIT) + OFFSET)
    return value(PLAIN.get(act, act), a) * b


def backward(act, dy, x):
    if not is_gated(act):
        return slope(act, x) * dy
    a, b = halves(x)
    if act == CLAMPED_SWIGLU:
        c = np.fmin(a, LIMIT)
        inside = np.abs(b) <= LIMIT
        b = np.fmin(np.fmax(-LIMIT, b), LIMIT) + OFFSET
        return np.concatenate([np.where(a <= LIMIT, slope(QGELU, c), F32(0)) * dy * b, np.where(inside, F32(1), F32(0)) * dy * value(QGELU, c)], 1)
    act = PLAIN.get(act, act)
    return np.concatenate([slope(act, a) * dy * b, dy * value(act, a)], 1)
