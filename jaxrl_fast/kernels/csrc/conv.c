/* Unpadded convolutions of images on a core of a CPU: activation(x * kernel + bias), and their gradients.

A patch is never copied. What it holds lies at the same distances from its first number, `terms`, wherever that is,
`pixels`; so the patches of an image are a matrix that `multiply` reads where they are.

Called by `convolve.py`, compiled by `native.py`. Each function also takes batches of everything, as leading axes.
*/

#include "threads.h"

enum { GATHERED = 1 };
#include "gemm.h"

typedef struct {
    int64_t batch, B, H, W, C, O;       /* images x [B, H, W, C], to O channels */
    int64_t side, stride, apart;        /* of patches, and from one to the next that shares no pixel with it */
    int64_t pixels, terms, run;         /* patches in an image, numbers in a patch, and in a row of it */
    int64_t size;                       /* of an image */
    int64_t parts;                      /* of the images: each has a gradient of its own */
    int of_bytes, activation, widely;   /* whether XLA's threads take parts */
} Layer;

static Layer layer_of(XLA_FFI_CallFrame *call) {
    const XLA_FFI_Buffer *x = argument(call, 0), *kernel = argument(call, 1);
    const int64_t *of_x = x->dims + x->rank - 4, *of_kernel = kernel->dims + kernel->rank - 4;
    int32_t attributes[4]; /* activation, parts, stride, widely: by their names */
    for (int i = 0; i < 4; ++i) attributes[i] = *(int32_t *)((XLA_FFI_Scalar *)call->attrs.attrs[i])->value;
    Layer l = {count(x, 4), of_x[0], of_x[1], of_x[2], of_x[3], of_kernel[3], of_kernel[0], attributes[2]};
    l.apart = (l.side + l.stride - 1) / l.stride;
    l.pixels = ((l.H - l.side) / l.stride + 1) * ((l.W - l.side) / l.stride + 1);
    l.run = l.side * l.C, l.terms = l.side * l.run, l.size = l.H * l.W * l.C;
    l.of_bytes = x->dtype == XLA_FFI_DataType_U8, l.activation = attributes[0];
    l.parts = attributes[1], l.widely = attributes[3];
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

/* The first image of a part; that of the next one is where it ends. */
static int64_t first_of(const Layer *l, int64_t part) { return l->B * part / l->parts; }

typedef struct {
    const Layer *l;
    const XLA_FFI_Buffer *x;
    int64_t i; /* of a batch */
    const float *kernel, *bias;
    float *y, *rooms;
    const int32_t *pixels, *terms;
} Forward;

static void forward(const void *what, int64_t part) {
    const Forward *f = what;
    const Layer *l = f->l;
    const int64_t size = l->pixels * l->O;
    for (int64_t b = first_of(l, part); b < first_of(l, part + 1); ++b) {
        const float *from = image(l, f->x, f->i * l->B + b, f->rooms + part * l->size);
        multiply(&(Product){
            .M = l->pixels, .N = l->O, .K = l->terms, .a = from, .rows = f->pixels, .terms = f->terms,
            .b = f->kernel, .start = f->bias, .c = f->y + b * size,
        });
        activate(f->y + b * size, size, l->activation);
    }
}

/* Arguments: x f32 or u8 [B, H, W, C], kernel f32 [S, S, C, O], bias [O].
Results: y [B, H', W', O], room for the places of pixels and terms, and for an image of each part as floats. */
XLA_FFI_Error *convolve_forward(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    const Layer l = layer_of(call);
    if (!l.batch) return NULL;
    int32_t *pixels = result(call, 1)->data, *terms = pixels + l.pixels;
    find_patches(&l, pixels, terms);
    Forward f = {
        .l = &l, .x = argument(call, 0), .kernel = argument(call, 1)->data, .bias = argument(call, 2)->data,
        .y = result(call, 0)->data, .rooms = result(call, 2)->data, .pixels = pixels, .terms = terms,
    };
    for (; f.i < l.batch; ++f.i, f.kernel += l.terms * l.O, f.bias += l.O, f.y += l.B * l.pixels * l.O)
        share(call, forward, &f, l.parts, l.widely);
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

/* What all parts found, in their order: some numbers of each, from `first` on. */
static void sum_parts(const Layer *l, const float *found, float *restrict sum, int64_t first, int64_t size) {
    memcpy(sum, found + first, (size_t)size * sizeof(float));
    for (int64_t part = 1; part < l->parts; ++part) {
        const float *restrict next = found + part * (l->terms + 1) * l->O + first;
        for (int64_t i = 0; i < size; ++i) sum[i] += next[i];
    }
}

typedef struct {
    const Layer *l;
    const XLA_FFI_Buffer *x;
    int64_t i;
    const float *y, *g;
    float *before, *turned, *to_kernels, *to_x, *rooms; /* [parts][kernel and bias], what each part finds */
    const int32_t *pixels, *terms, *outputs, *places, *ends, *in_order;
} Backward;

static void backward(const void *what, int64_t part) {
    const Backward *f = what;
    const Layer *l = f->l;
    const int64_t size = l->pixels * l->O, first = first_of(l, part), end = first_of(l, part + 1);
    float *to_kernel = f->to_kernels + part * (l->terms + 1) * l->O, *to_bias = to_kernel + l->terms * l->O;
    const float *before = deactivate(
        f->g + first * size, f->y + first * size, f->before + first * size, to_bias, (end - first) * l->pixels, l->O,
        l->activation
    );
    memset(to_kernel, 0, (size_t)(l->terms * l->O) * sizeof(float));
    for (int64_t b = first; b < end; ++b, before += size) {
        multiply(&(Product){
            .M = l->terms, .N = l->O, .K = l->pixels, .a = image(l, f->x, f->i * l->B + b, f->rooms + part * l->size),
            .rows = f->terms, .terms = f->pixels, .b = before, .c = to_kernel, .onto = 1,
        });
        if (!f->to_x) continue;
        float *to_x = f->to_x + b * l->size;
        memset(to_x, 0, (size_t)l->size * sizeof(float));
        for (int64_t group = 0, start = 0; group < l->apart * l->apart; start = f->ends[group++])
            for (int64_t row = 0; row < l->side; ++row)
                multiply(&(Product){
                    .M = f->ends[group] - start, .N = l->run, .K = l->O, .a = before, .rows = f->outputs + start,
                    .terms = f->in_order, .b = f->turned + row * l->run * l->O, .c = to_x + row * l->W * l->C,
                    .places = f->places + start, .onto = 1,
                });
    }
}

/* Arguments: x, kernel, y, and the gradient g [B, H', W', O] of what becomes of y.
Results: the gradients of kernel and bias; room for as many numbers as y has, as the kernel has, as the gradients of
kernel and bias have in each part, for places (those of pixels and terms, twice more pixels, outputs and groups) and for
an image of each part; and the gradient of x, if that is wanted. */
XLA_FFI_Error *convolve_backward(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    const Layer l = layer_of(call);
    if (!l.batch) return NULL;
    const float *kernel = argument(call, 1)->data;
    float *to_kernel = result(call, 0)->data, *to_bias = result(call, 1)->data, *turned = result(call, 3)->data;
    float *to_kernels = result(call, 4)->data;
    int32_t *pixels = result(call, 5)->data, *terms = pixels + l.pixels, *outputs = terms + l.terms;
    int32_t *places = outputs + l.pixels, *in_order = places + l.pixels, *ends = in_order + l.O;
    find_patches(&l, pixels, terms);
    deal_patches(&l, pixels, outputs, places, ends);
    for (int32_t o = 0; o < l.O; ++o) in_order[o] = o;
    Backward f = {
        .l = &l, .x = argument(call, 0), .y = argument(call, 2)->data, .g = argument(call, 3)->data,
        .before = result(call, 2)->data, .turned = turned, .to_kernels = to_kernels, .rooms = result(call, 6)->data,
        .to_x = call->rets.size > 7 ? result(call, 7)->data : NULL,
        .pixels = pixels, .terms = terms, .outputs = outputs, .places = places, .ends = ends, .in_order = in_order,
    };
    const int64_t size = l.B * l.pixels * l.O, of_kernel = l.terms * l.O;
    for (; f.i < l.batch; ++f.i, f.y += size, f.g += size, kernel += of_kernel) {
        for (int64_t row = 0; f.to_x && row < l.side; ++row)
            transpose(kernel + row * l.run * l.O, turned + row * l.run * l.O, l.run, l.O);
        share(call, backward, &f, l.parts, l.widely);
        sum_parts(&l, to_kernels, to_kernel, 0, of_kernel);
        sum_parts(&l, to_kernels, to_bias, of_kernel, l.O);
        to_kernel += of_kernel, to_bias += l.O;
        if (f.to_x) f.to_x += l.B * l.size;
    }
    return NULL;
}
