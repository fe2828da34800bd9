/* Compute a dense layer on one core of a CPU: activation(x kernel + bias) for rows x [R, I], and its gradients.

dense.py calls these functions, build.py compiles them. All arguments may have further leading axes, of batches.
*/

enum { INDIRECT = 0 };
#include "gemm.h"

enum { ROW_BLOCK = 24 };         /* rows that are activated while they are in the L1 cache */
enum { MIN_VECTOR_OUTPUTS = 8 }; /* fewer outputs do not fill vectors; same value in dense.py */

/* Compute y [R, O] for few outputs, as dot products of rows x [R, I] and kernel [O, I], plus bias [O]. */
static void dot_rows(
    const float *x, const float *kernel, const float *bias, float *y, int64_t R, int64_t I, int64_t O
) {
    for (int64_t r = 0; r < R; ++r, x += I)
        for (int64_t o = 0; o < O; ++o) {
            const float *weights = kernel + o * I;
            Vector sums = {0};
            float rest = bias[o];
            int64_t i = 0;
            for (; i + LANES <= I; i += LANES)
                sums += *(const UnalignedVec *)(x + i) * *(const UnalignedVec *)(weights + i);
            for (; i < I; ++i) rest += x[i] * weights[i];
            *y++ = total(sums) + rest;
        }
}

/* A batch of layers, each with rows x [R, I], which lie in memory as [I, R] if transposed_input. */
typedef struct {
    int64_t batch, R, I, O;
    ptrdiff_t x_row, x_column;
    int activation, needs_weights, transposed_input;
} Layer;

static Layer layer_of(XLA_FFI_CallFrame *call) {
    const XLA_FFI_Buffer *x = argument(call, 0), *of_outputs = argument(call, 2); /* bias, or y */
    const int64_t *of_x = x->dims + x->rank - 2, O = of_outputs->dims[of_outputs->rank - 1];
    int32_t attributes[3]; /* in the order of their names: activation, needs_weights, transposed_input */
    for (int i = 0; i < 3; ++i) attributes[i] = *(int32_t *)((XLA_FFI_Scalar *)call->attrs.attrs[i])->value;
    Layer layer = {count(x, 2), of_x[0], of_x[1], O, of_x[1], 1, attributes[0], attributes[1], attributes[2]};
    if (layer.transposed_input) layer.x_row = 1, layer.x_column = of_x[0];
    return layer;
}

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

/* Arguments: x f32 [R, I], kernel [I, O], or [O, I] if O < MIN_VECTOR_OUTPUTS, and bias [O]. Result: y [R, O]. */
XLA_FFI_Error *dense_forward(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const Layer l = layer_of(call);
    const float *x = argument(call, 0)->data, *kernel = argument(call, 1)->data, *bias = argument(call, 2)->data;
    float *y = result(call, 0)->data;
    for (int64_t i = 0; i < l.batch; ++i, x += l.R * l.I, kernel += l.I * l.O, bias += l.O)
        for (int64_t r = 0, rows; r < l.R; r += rows, y += rows * l.O) {
            rows = min(l.R - r, ROW_BLOCK);
            if (l.O < MIN_VECTOR_OUTPUTS) dot_rows(x + r * l.I, kernel, bias, y, rows, l.I, l.O);
            else gemm(&(Gemm){rows, l.O, l.I, x + r * l.x_row, l.x_row, l.x_column, kernel, bias, y});
            activate(y, rows * l.O, l.activation);
        }
    return NULL;
}

/* Compute the gradient of the kernel [I, O]. `transposed` is scratch like it. */
static void kernel_gradient(const Layer *l, const float *x, const float *grad_pre, float *transposed, float *grad) {
    if (l->O < MIN_VECTOR_OUTPUTS) {
        gemm(&(Gemm){l->O, l->I, l->R, grad_pre, 1, l->O, x, NULL, transposed});
        transpose(transposed, grad, l->O, l->I);
    } else {
        gemm(&(Gemm){l->I, l->O, l->R, x, l->x_column, l->x_row, grad_pre, NULL, grad});
    }
}

/* Compute the gradient of x. `transposed` is scratch like the kernel, or like y if transposed_input. */
static void input_gradient(const Layer *l, const float *kernel, const float *grad_pre, float *transposed, float *grad) {
    if (l->transposed_input) {
        transpose(grad_pre, transposed, l->R, l->O);
        gemm(&(Gemm){l->I, l->R, l->O, kernel, l->O, 1, transposed, NULL, grad});
    } else {
        transpose(kernel, transposed, l->I, l->O);
        gemm(&(Gemm){l->R, l->I, l->O, grad_pre, l->O, 1, transposed, NULL, grad});
    }
}

/* Arguments: x f32 [R, I], kernel [I, O], y [R, O], and the gradient g [R, O] of the loss with respect to y.
Results: scratch like y; scratch like the kernel, or like y if transposed_input; the gradients of kernel and bias if
needs_weights; that of x, if there is one more result. */
XLA_FFI_Error *dense_backward(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const Layer l = layer_of(call);
    const float *x = argument(call, 0)->data, *kernel = argument(call, 1)->data;
    const float *y = argument(call, 2)->data, *g = argument(call, 3)->data;
    float *scratch = result(call, 0)->data, *transposed = result(call, 1)->data;
    float *grad_kernel = l.needs_weights ? result(call, 2)->data : NULL;
    float *grad_bias = l.needs_weights ? result(call, 3)->data : NULL;
    const int before_x = l.needs_weights ? 4 : 2;
    float *grad_x = call->rets.size > before_x ? result(call, before_x)->data : NULL;
    for (int64_t i = 0; i < l.batch; ++i, x += l.R * l.I, kernel += l.I * l.O, y += l.R * l.O, g += l.R * l.O) {
        const float *grad_pre = activation_backward(g, y, scratch, grad_bias, l.R, l.O, l.activation);
        if (grad_kernel) {
            kernel_gradient(&l, x, grad_pre, transposed, grad_kernel);
            grad_kernel += l.I * l.O, grad_bias += l.O;
        }
        if (grad_x) {
            input_gradient(&l, kernel, grad_pre, transposed, grad_x);
            grad_x += l.R * l.I;
        }
    }
    return NULL;
}
