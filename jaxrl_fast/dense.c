/* A dense layer on a core of a CPU: activation(x kernel + bias), and its gradients, for rows x [R, I].

XLA's products of matrices this small spend a fifth of their time around their kernels and their activations in passes
of their own. Here one function computes tiles of any product in the registers, and what comes before and after it while
the rows are in the cache.

Called by `dense.py`, compiled by `native.py`. Each function also takes batches of everything, as leading axes.
*/

#include <string.h>

#include "native.h"

#if defined(__AVX512F__)
enum { LANES = 16, MOST_VECTORS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, MOST_VECTORS = 2 };
#elif defined(__SSE2__)
enum { LANES = 4, MOST_VECTORS = 2 };
#else
enum { LANES = 4, MOST_VECTORS = 4 };
#endif
enum { TILE_ROWS = 6 };  /* and MOST_VECTORS columns of sums: what the registers hold */
enum { TALL_ROWS = 12 }; /* of a tile that is one vector wide, or each sum would wait for the one before */
enum { ROWS_AT_A_TIME = 24 }; /* are activated while they are in the nearest cache */
enum { FEW_OUTPUTS = 8 }; /* fewer do not fill the registers, the inputs do: dense.FEW_OUTPUTS */
enum { NONE, TANH, RELU }; /* dense.ACTIVATIONS */

#define INLINE static inline __attribute__((always_inline))

/* c [M, N] = a b, plus start [N] unless that is NULL: a [M, K] lies in steps of its own, b [K, N] and c row by row. */
typedef struct {
    int64_t M, N, K;
    const float *a;
    ptrdiff_t a_row, a_column;
    const float *b, *start;
    float *c;
} Product;

/* A strip is some columns of c, `vectors` of so many lanes; a tile is a few rows of it. */
#define DEFINE_STRIP(name, lanes, vectors, tile_rows)                                             \
    INLINE void name##_tile(const Product *p, int64_t m, int64_t n, const int rows) {             \
        typedef float Vector __attribute__((vector_size(4 * lanes)));                             \
        typedef float Anywhere __attribute__((vector_size(4 * lanes), aligned(4), may_alias));    \
        const ptrdiff_t N = p->N, a_row = p->a_row, a_column = p->a_column;                       \
        const float *a = p->a + m * a_row, *b = p->b + n, *start = p->start;                      \
        float *c = p->c + m * N + n;                                                              \
        Vector sum[tile_rows][vectors];                                                           \
        for (int i = 0; i < rows; ++i)                                                            \
            for (int j = 0; j < vectors; ++j)                                                     \
                if (start) sum[i][j] = *(const Anywhere *)(start + n + j * lanes);                \
                else sum[i][j] = (Vector){0};                                                     \
        for (int64_t k = p->K; k > 0; --k, a += a_column, b += N)                                 \
            for (int i = 0; i < rows; ++i)                                                        \
                for (int j = 0; j < vectors; ++j)                                                 \
                    sum[i][j] += a[i * a_row] * *(const Anywhere *)(b + j * lanes);               \
        for (int i = 0; i < rows; ++i)                                                            \
            for (int j = 0; j < vectors; ++j) *(Anywhere *)(c + i * N + j * lanes) = sum[i][j];   \
    }                                                                                             \
    static int64_t name(const Product *p, int64_t n) {                                            \
        int64_t m = 0;                                                                            \
        for (; m + tile_rows <= p->M; m += tile_rows) name##_tile(p, m, n, tile_rows);            \
        for (; m + 4 <= p->M; m += 4) name##_tile(p, m, n, 4);                                    \
        if (m + 2 <= p->M) name##_tile(p, m, n, 2), m += 2;                                       \
        if (m + 1 <= p->M) name##_tile(p, m, n, 1);                                               \
        return n + vectors * lanes;                                                               \
    }
DEFINE_STRIP(wide_4, LANES, 4, TILE_ROWS)
DEFINE_STRIP(wide_3, LANES, 3, TILE_ROWS)
DEFINE_STRIP(wide_2, LANES, 2, TILE_ROWS)
DEFINE_STRIP(wide_1, LANES, 1, TALL_ROWS)
DEFINE_STRIP(eight, 8, 1, TALL_ROWS)
DEFINE_STRIP(four, 4, 1, TALL_ROWS)
DEFINE_STRIP(one, 1, 1, TALL_ROWS)

static void multiply(const Product *p) {
    int64_t n = 0;
    for (int64_t left; (left = p->N - n) >= LANES;) {
        int64_t vectors = left / LANES, strips = (vectors + MOST_VECTORS - 1) / MOST_VECTORS;
        switch ((vectors + strips - 1) / strips) { /* strips of about the same width: 5 are 3 and 2 */
            case 4: n = wide_4(p, n); break;
            case 3: n = wide_3(p, n); break;
            case 2: n = wide_2(p, n); break;
            default: n = wide_1(p, n);
        }
    }
    if (p->N - n >= 8) n = eight(p, n);
    if (p->N - n >= 4) n = four(p, n);
    if (n < p->N && p->N >= 4) n = four(p, p->N - 4); /* some columns once more */
    while (n < p->N) n = one(p, n);
}

/* y [R, O] for few outputs: rows x [R, I] by rows of the kernel, which is turned, [O, I], plus a bias [O]. */
static void multiply_rows(
    const float *x, const float *kernel, const float *bias, float *y, int64_t R, int64_t I, int64_t O
) {
    typedef float Vector __attribute__((vector_size(4 * LANES)));
    typedef float Anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
    typedef float Four __attribute__((vector_size(16)));
    for (int64_t r = 0; r < R; ++r, x += I)
        for (int64_t o = 0; o < O; ++o) {
            const float *weights = kernel + o * I;
            union { Vector whole; Four fours[LANES / 4]; } sums = {{0}};
            float rest = bias[o];
            int64_t i = 0;
            for (; i + LANES <= I; i += LANES)
                sums.whole += *(const Anywhere *)(x + i) * *(const Anywhere *)(weights + i);
            for (; i < I; ++i) rest += x[i] * weights[i];
            Four sum = sums.fours[0];
            for (int j = 1; j < LANES / 4; ++j) sum += sums.fours[j];
            *y++ = (sum[0] + sum[1]) + (sum[2] + sum[3]) + rest;
        }
}

/* x P(x^2) / Q(x^2), of degrees 4 and 4, fitted to the least relative error on [0, 8]: within 7 ulp of tanh there, and
1 - 2^-22 beyond. NaN stays NaN. */
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

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The gradient before the activation, of g [R, O] after it, and its sum over the rows. With no activation it is g. */
static const float *
deactivate(const float *g, const float *y, float *before, float *sum, int64_t R, int64_t O, int activation) {
    memset(sum, 0, (size_t)O * sizeof(float));
    if (activation == NONE) {
        int64_t r = 0;
        for (; r + 4 <= R; r += 4, g += 4 * O)
            for (int64_t o = 0; o < O; ++o) sum[o] += (g[o] + g[O + o]) + (g[2 * O + o] + g[3 * O + o]);
        for (; r < R; ++r, g += O)
            for (int64_t o = 0; o < O; ++o) sum[o] += g[o];
        return g - R * O;
    }
    for (int64_t r = 0; r < R; ++r) {
        const float *restrict g_row = g + r * O, *restrict y_row = y + r * O;
        float *restrict out = before + r * O, *restrict total = sum;
        if (activation == TANH) {
            for (int64_t o = 0; o < O; ++o) total[o] += out[o] = g_row[o] * (1 - y_row[o] * y_row[o]);
        } else {
            for (int64_t o = 0; o < O; ++o) total[o] += out[o] = y_row[o] > 0 ? g_row[o] : 0;
        }
    }
    return before;
}

/* out [N, M] of in [M, N], by squares of four. */
static void transpose(const float *restrict in, float *restrict out, int64_t M, int64_t N) {
    int64_t whole = M / 4 * 4;
    for (int64_t n = 0; n + 4 <= N; n += 4)
        for (int64_t m = 0; m < whole; m += 4) {
            float square[4][4];
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) square[j][i] = in[(m + i) * N + n + j];
            for (int j = 0; j < 4; ++j) memcpy(out + (n + j) * M + m, square[j], sizeof square[j]);
        }
    for (int64_t n = 0; n < N; ++n)
        for (int64_t m = n < N / 4 * 4 ? whole : 0; m < M; ++m) out[n * M + m] = in[m * N + n];
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
