/* Apply activations, and compute their gradients. */

#ifndef JAXRL_FAST_ACTIVATIONS_H
#define JAXRL_FAST_ACTIVATIONS_H

#include <string.h>

#include "simd.h"
#include "ffi.h"

enum { NONE, TANH, RELU }; /* same order as ACTIVATIONS in activations.py */

/* Return tanh(x) as x P(x^2) / Q(x^2), with P and Q of degree 4 that minimize the relative error on [0, 8]. The result
is within 7 ulp there and 1 - 2^-22 above. NaN stays NaN. */
INLINE float tanh_of(float x) {
    x = x > 8 ? 8 : x;
    x = x < -8 ? -8 : x;
    float q = x * x, p = 1.52304670e-08f, d = 8.52246774e-07f;
    p = p * q + 2.18947008e-05f, d = d * q + 3.41129603e-04f;
    p = p * q + 3.57160055e-03f, d = d * q + 2.61644527e-02f;
    p = p * q + 1.34445002e-01f, d = d * q + 4.67778275e-01f;
    p = p * q + 1, d = d * q + 1;
    return x * p / d;
}

static void activate(float *y, int64_t size, int activation) {
    if (activation == TANH)
        for (int64_t i = 0; i < size; ++i) y[i] = tanh_of(y[i]);
    if (activation == RELU)
        for (int64_t i = 0; i < size; ++i) y[i] = y[i] < 0 ? 0 : y[i];
}

/* Return the gradient before the activation, for g [R, O] after it: `grad_pre`, or g itself if there is no activation.
Write its sum over the rows to `sum` [O], unless that is NULL. */
static const float *activation_backward(
    const float *g, const float *y, float *grad_pre, float *sum, int64_t R, int64_t O, int activation
) {
    if (sum) memset(sum, 0, (size_t)O * sizeof(float));
    if (activation == NONE) {
        if (!sum) return g;
        int64_t r = 0;
        for (; r + 4 <= R; r += 4, g += 4 * O)
            for (int64_t o = 0; o < O; ++o) sum[o] += (g[o] + g[O + o]) + (g[2 * O + o] + g[3 * O + o]);
        for (; r < R; ++r, g += O)
            for (int64_t o = 0; o < O; ++o) sum[o] += g[o];
        return g - R * O;
    }
    for (int64_t r = 0; r < R; ++r) {
        const float *restrict g_row = g + r * O, *restrict y_row = y + r * O;
        float *restrict out = grad_pre + r * O, *restrict total = sum;
        if (activation == TANH) {
            for (int64_t o = 0; o < O; ++o) out[o] = g_row[o] * (1 - y_row[o] * y_row[o]);
        } else {
            for (int64_t o = 0; o < O; ++o) out[o] = y_row[o] > 0 ? g_row[o] : 0;
        }
        for (int64_t o = 0; total && o < O; ++o) total[o] += out[o];
    }
    return grad_pre;
}

#endif
