/* A dense layer on a core of a CPU: activation(x kernel + bias), and its gradients, for rows x [R, I].

Called by `dense.py`, compiled by `native.py`. Each function also takes batches of everything, as leading axes.
*/

enum { GATHERED = 0 };
#include "gemm.h"

enum { ROWS_AT_A_TIME = 24 }; /* are activated while they are in the nearest cache */
enum { FEW_OUTPUTS = 8 }; /* fewer do not fill the registers, the inputs do: dense.FEW_OUTPUTS */

/* y [R, O] for few outputs: rows x [R, I] by rows of the kernel, which is turned, [O, I], plus a bias [O]. */
static void multiply_rows(
    const float *x, const float *kernel, const float *bias, float *y, int64_t R, int64_t I, int64_t O
) {
    for (int64_t r = 0; r < R; ++r, x += I)
        for (int64_t o = 0; o < O; ++o) {
            const float *weights = kernel + o * I;
            Vector sums = {0};
            float rest = bias[o];
            int64_t i = 0;
            for (; i + LANES <= I; i += LANES) sums += *(const Anywhere *)(x + i) * *(const Anywhere *)(weights + i);
            for (; i < I; ++i) rest += x[i] * weights[i];
            *y++ = total(sums) + rest;
        }
}

/* What both functions are called with: a batch of layers, each with rows x [R, I], or columns [I, R] in their place. */
typedef struct {
    int64_t batch, R, I, O;
    ptrdiff_t x_row, x_column;
    int activation, columns;
} Layer;

static Layer layer_of(XLA_FFI_CallFrame *call) {
    const XLA_FFI_Buffer *x = argument(call, 0), *of_outputs = argument(call, 2); /* bias, or y */
    const int64_t *of_x = x->dims + x->rank - 2, O = of_outputs->dims[of_outputs->rank - 1];
    int32_t attributes[2]; /* activation, columns: by their names */
    for (int i = 0; i < 2; ++i) attributes[i] = *(int32_t *)((XLA_FFI_Scalar *)call->attrs.attrs[i])->value;
    Layer layer = {count(x, 2), of_x[0], of_x[1], O, of_x[1], 1, attributes[0], attributes[1]};
    if (layer.columns) layer.x_row = 1, layer.x_column = of_x[0];
    return layer;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Arguments: x f32 [R, I], kernel [I, O], or [O, I] with few outputs, and bias [O]. Result: y [R, O]. */
XLA_FFI_Error *dense_forward(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    const Layer l = layer_of(call);
    const float *x = argument(call, 0)->data, *kernel = argument(call, 1)->data, *bias = argument(call, 2)->data;
    float *y = result(call, 0)->data;
    for (int64_t i = 0; i < l.batch; ++i, x += l.R * l.I, kernel += l.I * l.O, bias += l.O)
        for (int64_t r = 0, rows; r < l.R; r += rows, y += rows * l.O) {
            rows = least(l.R - r, ROWS_AT_A_TIME);
            if (l.O < FEW_OUTPUTS) multiply_rows(x + r * l.I, kernel, bias, y, rows, l.I, l.O);
            else multiply(&(Product){rows, l.O, l.I, x + r * l.x_row, l.x_row, l.x_column, kernel, bias, y});
            activate(y, rows * l.O, l.activation);
        }
    return NULL;
}

/* Arguments: x f32 [R, I], kernel [I, O], y [R, O], and the gradient g [R, O] of what becomes of y.
Results: the gradients of kernel and bias; room for as many numbers as y has, and as are to be turned, which is the
kernel, or for columns y; and the gradient of x, if that is wanted. */
XLA_FFI_Error *dense_backward(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    const Layer l = layer_of(call);
    const float *x = argument(call, 0)->data, *kernel = argument(call, 1)->data;
    const float *y = argument(call, 2)->data, *g = argument(call, 3)->data;
    float *to_kernel = result(call, 0)->data, *to_bias = result(call, 1)->data, *room = result(call, 2)->data;
    const int wants_x = call->rets.size > 4;
    float *turned = result(call, 3)->data, *to_x = wants_x ? result(call, 4)->data : NULL;
    for (int64_t i = 0; i < l.batch; ++i, x += l.R * l.I, kernel += l.I * l.O, y += l.R * l.O, g += l.R * l.O) {
        const float *before = deactivate(g, y, room, to_bias, l.R, l.O, l.activation);
        if (l.O < FEW_OUTPUTS) {
            multiply(&(Product){l.O, l.I, l.R, before, 1, l.O, x, NULL, turned});
            transpose(turned, to_kernel, l.O, l.I);
        } else {
            multiply(&(Product){l.I, l.O, l.R, x, l.x_column, l.x_row, before, NULL, to_kernel});
        }
        to_kernel += l.I * l.O, to_bias += l.O;
        if (!wants_x) continue;
        if (l.columns) {
            transpose(before, turned, l.R, l.O);
            multiply(&(Product){l.I, l.R, l.O, kernel, l.O, 1, turned, NULL, to_x});
        } else {
            transpose(kernel, turned, l.I, l.O);
            multiply(&(Product){l.R, l.I, l.O, before, l.O, 1, turned, NULL, to_x});
        }
        to_x += l.R * l.I;
    }
    return NULL;
}
