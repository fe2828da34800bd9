/* Unpadded convolutions of images on a core of a CPU: activation(x * kernel + bias), and their gradients.

A patch is never copied. What it holds lies at the same distances from its first number, `terms`, wherever that is,
`pixels`; so the patches of an image are a matrix that `multiply` reads where they are.

Called by `convolve.py`, compiled by `native.py`. Each function also takes batches of everything, as leading axes.
*/

#include "tiles.h"

typedef struct {
    int64_t batch, B, H, W, C, O;       /* images x [B, H, W, C], to O channels */
    int64_t side, stride, apart;        /* of patches, and from one to the next that shares no pixel with it */
    int64_t pixels, terms, run;         /* patches in an image, numbers in a patch, and in a row of it */
    int64_t size;                       /* of an image */
    int of_bytes, activation;
} Layer;

static Layer layer_of(XLA_FFI_CallFrame *call) {
    const XLA_FFI_Buffer *x = argument(call, 0), *kernel = argument(call, 1);
    const int64_t *of_x = x->dims + x->rank - 4, *of_kernel = kernel->dims + kernel->rank - 4;
    int32_t attributes[2]; /* activation, stride: by their names */
    for (int i = 0; i < 2; ++i) attributes[i] = *(int32_t *)((XLA_FFI_Scalar *)call->attrs.attrs[i])->value;
    Layer l = {count(x, 4), of_x[0], of_x[1], of_x[2], of_x[3], of_kernel[3], of_kernel[0], attributes[1]};
    l.apart = (l.side + l.stride - 1) / l.stride;
    l.pixels = ((l.H - l.side) / l.stride + 1) * ((l.W - l.side) / l.stride + 1);
    l.run = l.side * l.C, l.terms = l.side * l.run, l.size = l.H * l.W * l.C;
    l.of_bytes = x->dtype == XLA_FFI_DataType_U8, l.activation = attributes[0];
    return l;
}

/* Where in an image each patch begins, row by row, and from there each of its numbers. */
static void find_patches(const Layer *l, int32_t *pixels, int32_t *terms) {
    for (int64_t row = 0; row + l->side <= l->H; row += l->stride)
        for (int64_t column = 0; column + l->side <= l->W; column += l->stride)
            *pixels++ = (int32_t)((row * l->W + column) * l->C);
    for (int64_t row = 0; row < l->side; ++row)
        for (int64_t i = 0; i < l->run; ++i) *terms++ = (int32_t)(row * l->W * l->C + i);
}

/* Image i as floats, in `room` where they were bytes. */
static const float *image(const Layer *l, const XLA_FFI_Buffer *x, int64_t i, float *room) {
    if (!l->of_bytes) return (const float *)x->data + i * l->size;
    const uint8_t *bytes = (const uint8_t *)x->data + i * l->size;
    for (int64_t j = 0; j < l->size; ++j) room[j] = bytes[j];
    return room;
}

/* Arguments: x f32 or u8 [B, H, W, C], kernel f32 [S, S, C, O], bias [O].
Results: y [B, H', W', O], room for the places of pixels and terms, and for one image as floats. */
XLA_FFI_Error *convolve_forward(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    const Layer l = layer_of(call);
    const float *kernel = argument(call, 1)->data, *bias = argument(call, 2)->data;
    float *y = result(call, 0)->data, *room = result(call, 2)->data;
    int32_t *pixels = result(call, 1)->data, *terms = pixels + l.pixels;
    find_patches(&l, pixels, terms);
    for (int64_t i = 0; i < l.batch; ++i, kernel += l.terms * l.O, bias += l.O)
        for (int64_t b = 0; b < l.B; ++b, y += l.pixels * l.O) {
            const float *from = image(&l, argument(call, 0), i * l.B + b, room);
            multiply(&(Product){
                .M = l.pixels, .N = l.O, .K = l.terms, .a = from, .rows = pixels, .terms = terms,
                .b = kernel, .start = bias, .c = y,
            });
            activate(y, l.pixels * l.O, l.activation);
        }
    return NULL;
}

/* Patches dealt to groups in which none shares a pixel with another: where each has its outputs, where its numbers. */
static void deal_patches(const Layer *l, const int32_t *pixels, int32_t *outputs, int32_t *places, int32_t *ends) {
    const int64_t width = (l->W - l->side) / l->stride + 1, height = l->pixels / width;
    int32_t dealt = 0;
    for (int64_t group = 0; group < l->apart * l->apart; ++group) {
        for (int64_t row = group / l->apart; row < height; row += l->apart)
            for (int64_t column = group % l->apart; column < width; column += l->apart, ++dealt) {
                const int64_t pixel = row * width + column;
                outputs[dealt] = (int32_t)(pixel * l->O), places[dealt] = pixels[pixel];
            }
        ends[group] = dealt;
    }
}

/* Arguments: x, kernel, y, and the gradient g [B, H', W', O] of what becomes of y.
Results: the gradients of kernel and bias; room for as many numbers as y has, as the kernel has, for places (those of
pixels and terms, twice more pixels, outputs and groups) and for an image; and the gradient of x, if that is wanted. */
XLA_FFI_Error *convolve_backward(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    const Layer l = layer_of(call);
    const float *kernel = argument(call, 1)->data, *y = argument(call, 2)->data, *g = argument(call, 3)->data;
    float *to_kernel = result(call, 0)->data, *to_bias = result(call, 1)->data, *room = result(call, 2)->data;
    float *turned = result(call, 3)->data, *floats = result(call, 5)->data;
    float *to_x = call->rets.size > 6 ? result(call, 6)->data : NULL;
    int32_t *pixels = result(call, 4)->data, *terms = pixels + l.pixels, *outputs = terms + l.terms;
    int32_t *places = outputs + l.pixels, *in_order = places + l.pixels, *ends = in_order + l.O;
    const int64_t size = l.B * l.pixels * l.O;
    find_patches(&l, pixels, terms);
    deal_patches(&l, pixels, outputs, places, ends);
    for (int32_t o = 0; o < l.O; ++o) in_order[o] = o;
    for (int64_t i = 0; i < l.batch; ++i, kernel += l.terms * l.O, y += size, g += size) {
        const float *before = deactivate(g, y, room, to_bias, l.B * l.pixels, l.O, l.activation);
        for (int64_t row = 0; to_x && row < l.side; ++row)
            transpose(kernel + row * l.run * l.O, turned + row * l.run * l.O, l.run, l.O);
        memset(to_kernel, 0, (size_t)(l.terms * l.O) * sizeof(float));
        for (int64_t b = 0; b < l.B; ++b, before += l.pixels * l.O) {
            multiply(&(Product){
                .M = l.terms, .N = l.O, .K = l.pixels, .a = image(&l, argument(call, 0), i * l.B + b, floats),
                .rows = terms, .terms = pixels, .b = before, .c = to_kernel, .onto = 1,
            });
            if (!to_x) continue;
            memset(to_x, 0, (size_t)l.size * sizeof(float));
            for (int64_t group = 0, first = 0; group < l.apart * l.apart; first = ends[group++])
                for (int64_t row = 0; row < l.side; ++row)
                    multiply(&(Product){
                        .M = ends[group] - first, .N = l.run, .K = l.O, .a = before, .rows = outputs + first,
                        .terms = in_order, .b = turned + row * l.run * l.O, .c = to_x + row * l.W * l.C,
                        .places = places + first, .onto = 1,
                    });
            to_x += l.size;
        }
        to_kernel += l.terms * l.O, to_bias += l.O;
    }
    return NULL;
}
