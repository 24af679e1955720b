/* ops/act/list.h: the lists of activations and of their nonlinearities. The host's compiler and the kernels'
 * compiler both read this file. The build fails if the activations are not those of te_activation, or if a nonlinearity
 * has no ONNX nodes. */
#ifndef TE__ACT_LIST_H
#define TE__ACT_LIST_H

/* X(f, s, value, slope, name, also): one nonlinearity.
 *     value, slope  f(x) and f'(x)
 *     s             a sigmoid that `value` and `slope` read as the variable s; 0 if they need none
 *     name, also    names in Hugging Face transformers; "" if there is no second name
 * The host and the kernels each define
 *     TE__ACT_SIGMOID(k, x)         sigmoid(k x)
 *     TE__ACT_SIGMOID3(k1, k3, x)   sigmoid(k1 x + k3 x^3)
 *     TE__ACT_MAX0(x)               max(x, 0); 0 for NaN
 * GELU is the tanh form of Hendrycks and Gimpel, x (0.5 + 0.5 tanh(u)). It is computed as x sigmoid(2 u), because the
 * sum would lose digits by cancellation. */
#define TE__NONLINEARITIES(X)                                                                                        \
    X(gelu, TE__ACT_SIGMOID3(2.0f * 0.79788456f, 2.0f * 0.03567741f, x), x * s,                                      \
      s + 2.0f * x * s * (1.0f - s) * (0.79788456f + 0.1070322243f * x * x), "gelu_pytorch_tanh", "gelu_new")        \
    X(relu, 0.0f, TE__ACT_MAX0(x), x > 0.0f ? 1.0f : 0.0f, "relu", "")                                               \
    X(srelu, 0.0f, x > 0.0f ? x * x : 0.0f, TE__ACT_MAX0(2.0f * x), "relu2", "")                                     \
    X(silu, TE__ACT_SIGMOID(1.0f, x), x * s, s + x * s * (1.0f - s), "silu", "swish")                                \
    X(qgelu, TE__ACT_SIGMOID(1.702f, x), x * s, s + 1.702f * x * s * (1.0f - s), "quick_gelu", "")                   \
    X(sigmoid, TE__ACT_SIGMOID(1.0f, x), s, s * (1.0f - s), "sigmoid", "")

/* X(name, form, f, epilogue, one_kernel): one activation, in the order of te_activation.
 *     form        a te__act_form: how y is computed from the nonlinearity f
 *     epilogue    TE_EPILOGUE_...: the GEMM epilogue that multiplies by f'; NONE if there is none
 *     one_kernel  1: TransformerEngine's te.ops has one kernel for the activation's backward pass and the gradient of
 *                 the bias in front of the activation (ops/fused/backward_activation_bias.py) */
#define TE__ACTIVATIONS(X)                                                                                           \
    X(GELU, PLAIN, gelu, DGELU, 1)                                                                                   \
    X(RELU, PLAIN, relu, NONE, 1)                                                                                    \
    X(SILU, PLAIN, silu, NONE, 0)                                                                                    \
    X(QGELU, PLAIN, qgelu, NONE, 0)                                                                                  \
    X(SRELU, PLAIN, srelu, NONE, 0)                                                                                  \
    X(GEGLU, GATED, gelu, NONE, 0)                                                                                   \
    X(REGLU, GATED, relu, NONE, 0)                                                                                   \
    X(SWIGLU, GATED, silu, NONE, 0)                                                                                  \
    X(QGEGLU, GATED, qgelu, NONE, 0)                                                                                 \
    X(SREGLU, GATED, srelu, NONE, 0)                                                                                 \
    X(GLU, GATED, sigmoid, NONE, 0)                                                                                  \
    X(CLAMPED_SWIGLU, CLAMPED, silu, NONE, 0)

typedef enum te__act_form {
    TE__ACT_PLAIN,  /* y = f(x) */
    TE__ACT_GATED,  /* y = f(a) b, x = [a | b] */
    TE__ACT_CLAMPED /* y = c sigmoid(alpha c) (clamp(b, -limit, limit) + offset), c = min(a, limit) */
} te__act_form;

#define TE__ACT_F(f, s, value, slope, name, also) TE__F_##f,
typedef enum te__act_f { TE__NONLINEARITIES(TE__ACT_F) TE__F_COUNT } te__act_f;

/* One case of a switch over te__act_f. The function around it must have the variables `float s` and `float *slope`. */
#define TE__ACT_CASE(f, sigmoid, value, derivative, name, also)                                                      \
    case TE__F_##f:                                                                                                  \
        s = sigmoid;                                                                                                 \
        *slope = derivative;                                                                                         \
        return value;

#endif
