/* Normalize rows x [R, F] on one core of a CPU: activation(scale (x - mean) / deviation + offset), and its gradients
(Ba et al. 2016, eq. 4).

layer_norm.py calls these functions, build.py compiles them. All arguments may have further leading axes, of batches.
*/

#include <math.h>

#include "activations.h"

static const float EPSILON = 1e-6f; /* flax's default */

/* Return the mean of x [F]. */
static float mean_of(const float *x, int64_t F) {
    Vector sums = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= F; i += LANES) sums += *(const UnalignedVec *)(x + i);
    for (; i < F; ++i) rest += x[i];
    return (total(sums) + rest) / (float)F;
}

/* Return the mean of (x - from_x) (y - from_y). */
static float mean_product(const float *x, float from_x, const float *y, float from_y, int64_t F) {
    Vector sums = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= F; i += LANES)
        sums += (*(const UnalignedVec *)(x + i) - from_x) * (*(const UnalignedVec *)(y + i) - from_y);
    for (; i < F; ++i) rest += (x[i] - from_x) * (y[i] - from_y);
    return (total(sums) + rest) / (float)F;
}

/* Compute (x - mean) / deviation, and y = scale times that + offset. Both results may share memory. */
static void normalize(
    const float *x, float mean, float inverse, const float *scale, const float *offset, float *normalized, float *y,
    int64_t F
) {
    int64_t i = 0;
    for (; i + LANES <= F; i += LANES) {
        const Vector found = (*(const UnalignedVec *)(x + i) - mean) * inverse;
        *(UnalignedVec *)(normalized + i) = found;
        *(UnalignedVec *)(y + i) = found * *(const UnalignedVec *)(scale + i) + *(const UnalignedVec *)(offset + i);
    }
    for (; i < F; ++i) {
        const float found = (x[i] - mean) * inverse;
        normalized[i] = found, y[i] = found * scale[i] + offset[i];
    }
}

typedef struct {
    int64_t batch, R, F;
    int activation;
} Layer;

static Layer layer_of(XLA_FFI_CallFrame *call) {
    const XLA_FFI_Buffer *x = argument(call, 0);
    const int64_t *of_x = x->dims + x->rank - 2;
    return (Layer){count(x, 2), of_x[0], of_x[1], *(int32_t *)((XLA_FFI_Scalar *)call->attrs.attrs[0])->value};
}

/* Arguments: x f32 [R, F], scale [F], offset [F].
Results: y [R, F]; for a gradient also the normalized rows before scale and offset, and 1 / deviation [R]. */
XLA_FFI_Error *layer_norm_forward(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const Layer l = layer_of(call);
    const float *x = argument(call, 0)->data, *scale = argument(call, 1)->data, *offset = argument(call, 2)->data;
    const int saves = call->rets.size > 1;
    float *y = result(call, 0)->data, *normalized = saves ? result(call, 1)->data : y;
    float *inverses = saves ? result(call, 2)->data : NULL;
    for (int64_t i = 0; i < l.batch; ++i, scale += l.F, offset += l.F)
        for (int64_t r = 0; r < l.R; ++r, x += l.F, y += l.F, normalized += l.F) {
            const float mean = mean_of(x, l.F), inverse = 1 / sqrtf(mean_product(x, mean, x, mean, l.F) + EPSILON);
            normalize(x, mean, inverse, scale, offset, normalized, y, l.F);
            if (inverses) *inverses++ = inverse;
            activate(y, l.F, l.activation);
        }
    return NULL;
}

/* Arguments: normalized rows [R, F], scale [F], y [R, F], 1 / deviation [R], and the gradient g [R, F] of y.
Results: the gradients of x, scale and offset, and scratch like x.

With h = scale g, the gradient of x is (h - mean(h) - normalized mean(h normalized)) / deviation. */
XLA_FFI_Error *layer_norm_backward(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const Layer l = layer_of(call);
    const float *normalized = argument(call, 0)->data, *scale = argument(call, 1)->data, *y = argument(call, 2)->data;
    const float *inverses = argument(call, 3)->data, *g = argument(call, 4)->data;
    float *grad_x = result(call, 0)->data, *grad_scale = result(call, 1)->data, *grad_offset = result(call, 2)->data;
    float *scratch = result(call, 3)->data;
    const int64_t size = l.R * l.F;
    for (int64_t i = 0; i < l.batch; ++i, scale += l.F, grad_scale += l.F, grad_offset += l.F, y += size, g += size) {
        const float *grad_pre = activation_backward(g, y, scratch, grad_offset, l.R, l.F, l.activation);
        memset(grad_scale, 0, (size_t)l.F * sizeof(float));
        for (int64_t r = 0; r < l.R; ++r, grad_pre += l.F, normalized += l.F, grad_x += l.F) {
            for (int64_t o = 0; o < l.F; ++o) grad_scale[o] += grad_pre[o] * normalized[o];
            for (int64_t o = 0; o < l.F; ++o) grad_x[o] = grad_pre[o] * scale[o];
            const float mean = mean_of(grad_x, l.F), along = mean_product(grad_x, 0, normalized, 0, l.F);
            const float inverse = *inverses++;
            for (int64_t o = 0; o < l.F; ++o) grad_x[o] = (grad_x[o] - mean - normalized[o] * along) * inverse;
        }
    }
    return NULL;
}
