/* Layer normalization on a core of a CPU: activation(scale (x - mean) / deviation + offset) of rows x [R, F], and its
gradients (Ba et al. 2016, eq. 4).

Called by `layer_norm.py`, compiled by `native.py`. Each function also takes batches of everything, as leading axes.
*/

#include <math.h>

#include "activations.h"

static const float EPSILON = 1e-6f; /* flax's */

/* The mean of numbers x [F]. */
static float mean_of(const float *x, int64_t F) {
    Vector sums = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= F; i += LANES) sums += *(const Anywhere *)(x + i);
    for (; i < F; ++i) rest += x[i];
    return (total(sums) + rest) / (float)F;
}

/* The mean of (x - from_x) (y - from_y). */
static float mean_product(const float *x, float from_x, const float *y, float from_y, int64_t F) {
    Vector sums = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= F; i += LANES)
        sums += (*(const Anywhere *)(x + i) - from_x) * (*(const Anywhere *)(y + i) - from_y);
    for (; i < F; ++i) rest += (x[i] - from_x) * (y[i] - from_y);
    return (total(sums) + rest) / (float)F;
}

/* (x - mean) / deviation, and y, which may lie in the same place. */
static void normalize(
    const float *x, float mean, float inverse, const float *scale, const float *offset, float *normed, float *y,
    int64_t F
) {
    int64_t i = 0;
    for (; i + LANES <= F; i += LANES) {
        const Vector found = (*(const Anywhere *)(x + i) - mean) * inverse;
        *(Anywhere *)(normed + i) = found;
        *(Anywhere *)(y + i) = found * *(const Anywhere *)(scale + i) + *(const Anywhere *)(offset + i);
    }
    for (; i < F; ++i) {
        const float found = (x[i] - mean) * inverse;
        normed[i] = found, y[i] = found * scale[i] + offset[i];
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
Results: y [R, F]; and, if there is to be a gradient, the rows before their scale, and 1 / deviation [R]. */
XLA_FFI_Error *layer_norm_forward(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    const Layer l = layer_of(call);
    const float *x = argument(call, 0)->data, *scale = argument(call, 1)->data, *offset = argument(call, 2)->data;
    const int saves = call->rets.size > 1;
    float *y = result(call, 0)->data, *normed = saves ? result(call, 1)->data : y;
    float *inverses = saves ? result(call, 2)->data : NULL;
    for (int64_t i = 0; i < l.batch; ++i, scale += l.F, offset += l.F)
        for (int64_t r = 0; r < l.R; ++r, x += l.F, y += l.F, normed += l.F) {
            const float mean = mean_of(x, l.F), inverse = 1 / sqrtf(mean_product(x, mean, x, mean, l.F) + EPSILON);
            normalize(x, mean, inverse, scale, offset, normed, y, l.F);
            if (inverses) *inverses++ = inverse;
            activate(y, l.F, l.activation);
        }
    return NULL;
}

/* Arguments: the rows before their scale [R, F], scale [F], y [R, F], 1 / deviation [R], the gradient g [R, F] of y.
Results: the gradients of x, scale and offset, and room for as many numbers as x has.

With h = scale g: that of x is (h - mean(h) - normed mean(h normed)) / deviation. */
XLA_FFI_Error *layer_norm_backward(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    const Layer l = layer_of(call);
    const float *normed = argument(call, 0)->data, *scale = argument(call, 1)->data, *y = argument(call, 2)->data;
    const float *inverses = argument(call, 3)->data, *g = argument(call, 4)->data;
    float *to_x = result(call, 0)->data, *to_scale = result(call, 1)->data, *to_offset = result(call, 2)->data;
    float *room = result(call, 3)->data;
    const int64_t size = l.R * l.F;
    for (int64_t i = 0; i < l.batch; ++i, scale += l.F, to_scale += l.F, to_offset += l.F, y += size, g += size) {
        const float *before = deactivate(g, y, room, to_offset, l.R, l.F, l.activation);
        memset(to_scale, 0, (size_t)l.F * sizeof(float));
        for (int64_t r = 0; r < l.R; ++r, before += l.F, normed += l.F, to_x += l.F) {
            for (int64_t o = 0; o < l.F; ++o) to_scale[o] += before[o] * normed[o];
            for (int64_t o = 0; o < l.F; ++o) to_x[o] = before[o] * scale[o];
            const float mean = mean_of(to_x, l.F), along = mean_product(to_x, 0, normed, 0, l.F), inverse = *inverses++;
            for (int64_t o = 0; o < l.F; ++o) to_x[o] = (to_x[o] - mean - normed[o] * along) * inverse;
        }
    }
    return NULL;
}
