/* Normalize the columns of x [R, F] on one core of a CPU: activation(scale (x - mean) / deviation + offset), and its
gradients (Ioffe & Szegedy 2015, algorithm 1).

batch_norm.py calls these functions, build.py compiles them. All arguments may have further leading axes, of batches.
Each pass over the rows begins where the one before ended, since those rows are still in the cache.
*/

#include <math.h>

#include "activations.h"

typedef struct {
    int64_t batch, R, F;
    int activation;
    float epsilon; /* added to variances */
} Layer;

static Layer layer_of(XLA_FFI_CallFrame *call) {
    const XLA_FFI_Buffer *x = argument(call, 0);
    const int64_t *of_x = x->dims + x->rank - 2;
    const void *values[2]; /* in the order of their names: activation, epsilon */
    for (int i = 0; i < 2; ++i) values[i] = ((XLA_FFI_Scalar *)call->attrs.attrs[i])->value;
    return (Layer){count(x, 2), of_x[0], of_x[1], *(const int32_t *)values[0], *(const float *)values[1]};
}

static void multiply(float *x, float factor, int64_t F) {
    for (int64_t i = 0; i < F; ++i) x[i] *= factor;
}

static void forward(
    const Layer *l, const float *restrict x, const float *restrict scale, const float *restrict offset,
    float *restrict y, float *restrict mean, float *restrict variance, float *restrict inverse
) {
    const int64_t R = l->R, F = l->F;
    memset(mean, 0, (size_t)F * sizeof(float));
    memset(variance, 0, (size_t)F * sizeof(float));
    for (int64_t r = 0; r < R; ++r)
        for (int64_t i = 0; i < F; ++i) mean[i] += x[r * F + i];
    multiply(mean, 1 / (float)R, F);
    for (int64_t r = R - 1; r >= 0; --r)
        for (int64_t i = 0; i < F; ++i) variance[i] += (x[r * F + i] - mean[i]) * (x[r * F + i] - mean[i]);
    multiply(variance, 1 / (float)R, F);
    for (int64_t i = 0; i < F; ++i) inverse[i] = 1 / sqrtf(variance[i] + l->epsilon);
    for (int64_t r = 0; r < R; ++r, x += F, y += F) {
        for (int64_t i = 0; i < F; ++i) y[i] = (x[i] - mean[i]) * (scale[i] * inverse[i]) + offset[i];
        activate(y, F, l->activation);
    }
}

/* Arguments: x f32 [R, F], scale [F], offset [F]. Results: y [R, F]; mean, variance and 1 / deviation [F]. */
XLA_FFI_Error *batch_norm_forward(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const Layer l = layer_of(call);
    const float *x = argument(call, 0)->data, *scale = argument(call, 1)->data, *offset = argument(call, 2)->data;
    float *y = result(call, 0)->data, *mean = result(call, 1)->data;
    float *variance = result(call, 2)->data, *inverse = result(call, 3)->data;
    for (int64_t i = 0, of_x = 0, of_f = 0; i < l.batch; ++i, of_x += l.R * l.F, of_f += l.F)
        forward(
            &l, x + of_x, scale + of_f, offset + of_f, y + of_x, mean + of_f, variance + of_f, inverse + of_f
        );
    return NULL;
}

INLINE float before_activation(float g, float y, const int activation) {
    if (activation == TANH) return g * (1 - y * y);
    return activation == RELU && !(y > 0) ? 0 : g;
}

/* With h = (x - mean) / deviation and g before the activation, the gradient of x is
scale (g - mean(g) - h mean(g h)) / deviation. */
INLINE void backward(
    const Layer *l, const float *restrict x, const float *restrict scale, const float *restrict y,
    const float *restrict mean, const float *restrict inverse, const float *restrict g, float *restrict grad_x,
    float *restrict grad_scale, float *restrict grad_offset, const int activation
) {
    const int64_t R = l->R, F = l->F;
    const float share = 1 / (float)R;
    memset(grad_scale, 0, (size_t)F * sizeof(float));
    memset(grad_offset, 0, (size_t)F * sizeof(float));
    for (int64_t r = 0; r < R; ++r)
        for (int64_t i = 0, at = r * F; i < F; ++i, ++at) {
            const float before = before_activation(g[at], y[at], activation);
            grad_offset[i] += before;
            grad_scale[i] += before * ((x[at] - mean[i]) * inverse[i]);
        }
    for (int64_t r = R - 1; r >= 0; --r)
        for (int64_t i = 0, at = r * F; i < F; ++i, ++at) {
            const float before = before_activation(g[at], y[at], activation), h = (x[at] - mean[i]) * inverse[i];
            grad_x[at] = (scale[i] * inverse[i]) * (before - share * (grad_offset[i] + h * grad_scale[i]));
        }
}

/* Arguments: x [R, F], scale [F], y [R, F], mean [F], 1 / deviation [F], and the gradient g [R, F] of y.
Results: the gradients of x, scale and offset. */
XLA_FFI_Error *batch_norm_backward(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const Layer l = layer_of(call);
    const float *x = argument(call, 0)->data, *scale = argument(call, 1)->data, *y = argument(call, 2)->data;
    const float *mean = argument(call, 3)->data, *inverse = argument(call, 4)->data, *g = argument(call, 5)->data;
    float *grad_x = result(call, 0)->data, *grad_scale = result(call, 1)->data, *grad_offset = result(call, 2)->data;
    for (int64_t i = 0, of_x = 0, of_f = 0; i < l.batch; ++i, of_x += l.R * l.F, of_f += l.F) {
#define CALL(activation)                                                                                           \
    backward(                                                                                                      \
        &l, x + of_x, scale + of_f, y + of_x, mean + of_f, inverse + of_f, g + of_x, grad_x + of_x,                \
        grad_scale + of_f, grad_offset + of_f, activation                                                          \
    )
        if (l.activation == TANH) CALL(TANH);
        else if (l.activation == RELU) CALL(RELU);
        else CALL(NONE);
    }
    return NULL;
}
