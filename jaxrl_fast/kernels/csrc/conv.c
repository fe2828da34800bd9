/* Convolve images without padding on a CPU: activation(x * kernel + bias), and the gradients.

Patches are not copied. Element k of the patch at pixel m lies at pixel_offsets[m] + patch_offsets[k] in the image, so
`gemm` reads the patches of an image as one matrix, in place.

conv.py calls these functions, build.py compiles them. All arguments may have further leading axes, of batches.
*/

#include "threads.h"

enum { INDIRECT = 1 };
#include "gemm.h"

typedef struct {
    int64_t batch, B, H, W, C, O;             /* batches of images x [B, H, W, C], and O output channels */
    int64_t side, stride, tile_stride;        /* of patches; patches tile_stride steps apart share no pixel */
    int64_t pixels, patch_size, row_len;      /* output pixels of an image, elements of a patch and of its rows */
    int64_t size;                             /* elements of an image */
    int64_t parts;                            /* of the images; each part sums its own gradient */
    int is_uint8, activation, multithreaded;  /* multithreaded: XLA's threads may compute parts */
} Layer;

static Layer layer_of(XLA_FFI_CallFrame *call) {
    const XLA_FFI_Buffer *x = argument(call, 0), *kernel = argument(call, 1);
    const int64_t *of_x = x->dims + x->rank - 4, *of_kernel = kernel->dims + kernel->rank - 4;
    int32_t attributes[4]; /* in the order of their names: activation, multithreaded, parts, stride */
    for (int i = 0; i < 4; ++i) attributes[i] = *(int32_t *)((XLA_FFI_Scalar *)call->attrs.attrs[i])->value;
    Layer l = {count(x, 4), of_x[0], of_x[1], of_x[2], of_x[3], of_kernel[3], of_kernel[0], attributes[3]};
    l.tile_stride = (l.side + l.stride - 1) / l.stride;
    l.pixels = ((l.H - l.side) / l.stride + 1) * ((l.W - l.side) / l.stride + 1);
    l.row_len = l.side * l.C, l.patch_size = l.side * l.row_len, l.size = l.H * l.W * l.C;
    l.is_uint8 = x->dtype == XLA_FFI_DataType_U8, l.activation = attributes[0];
    l.parts = attributes[2], l.multithreaded = attributes[1];
    return l;
}

/* Compute the offset of each patch in an image, row by row, and the offset of each element in a patch. */
static void find_patches(const Layer *l, int32_t *pixel_offsets, int32_t *patch_offsets) {
    for (int64_t row = 0; row + l->side <= l->H; row += l->stride)
        for (int64_t column = 0; column + l->side <= l->W; column += l->stride)
            *pixel_offsets++ = (int32_t)((row * l->W + column) * l->C);
    for (int64_t row = 0; row < l->side; ++row)
        for (int64_t i = 0; i < l->row_len; ++i) *patch_offsets++ = (int32_t)(row * l->W * l->C + i);
}

/* Return image i as floats; bytes are converted in `scratch`. */
static const float *image(const Layer *l, const XLA_FFI_Buffer *x, int64_t i, float *scratch) {
    if (!l->is_uint8) return (const float *)x->data + i * l->size;
    const uint8_t *bytes = (const uint8_t *)x->data + i * l->size;
    for (int64_t j = 0; j < l->size; ++j) scratch[j] = bytes[j];
    return scratch;
}

/* Return the first image of a part. The part ends at the first image of the next one. */
static int64_t first_image(const Layer *l, int64_t part) { return l->B * part / l->parts; }

typedef struct {
    const Layer *l;
    const XLA_FFI_Buffer *x;
    int64_t i; /* the batch */
    const float *kernel, *bias;
    float *y, *scratch;
    const int32_t *pixel_offsets, *patch_offsets;
} Forward;

static void forward(const void *args, int64_t part) {
    const Forward *f = args;
    const Layer *l = f->l;
    const int64_t size = l->pixels * l->O;
    for (int64_t b = first_image(l, part); b < first_image(l, part + 1); ++b) {
        const float *from = image(l, f->x, f->i * l->B + b, f->scratch + part * l->size);
        gemm(&(Gemm){
            .M = l->pixels, .N = l->O, .K = l->patch_size, .a = from,
            .rows = f->pixel_offsets, .cols = f->patch_offsets, .b = f->kernel, .start = f->bias, .c = f->y + b * size,
        });
        activate(f->y + b * size, size, l->activation);
    }
}

/* Arguments: x f32 or u8 [B, H, W, C], kernel f32 [S, S, C, O], bias [O].
Results: y [B, H', W', O]; scratch for pixel_offsets and patch_offsets, and for one image of floats per part. */
XLA_FFI_Error *conv2d_forward(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const Layer l = layer_of(call);
    if (!l.batch) return NULL;
    int32_t *pixel_offsets = result(call, 1)->data, *patch_offsets = pixel_offsets + l.pixels;
    find_patches(&l, pixel_offsets, patch_offsets);
    Forward f = {
        .l = &l, .x = argument(call, 0), .kernel = argument(call, 1)->data, .bias = argument(call, 2)->data,
        .y = result(call, 0)->data, .scratch = result(call, 2)->data,
        .pixel_offsets = pixel_offsets, .patch_offsets = patch_offsets,
    };
    for (; f.i < l.batch; ++f.i, f.kernel += l.patch_size * l.O, f.bias += l.O, f.y += l.B * l.pixels * l.O)
        parallel_for(call, forward, &f, l.parts, l.multithreaded);
    return NULL;
}

/* Group patches so that no two patches of a group share a pixel. Write each one's offsets in the output and in the
image, group by group, and the end of each group. */
static void group_patches(
    const Layer *l, const int32_t *pixel_offsets, int32_t *outputs, int32_t *places, int32_t *ends
) {
    const int64_t width = (l->W - l->side) / l->stride + 1, height = l->pixels / width;
    int32_t num = 0;
    for (int64_t group = 0; group < l->tile_stride * l->tile_stride; ++group) {
        for (int64_t row = group / l->tile_stride; row < height; row += l->tile_stride)
            for (int64_t column = group % l->tile_stride; column < width; column += l->tile_stride, ++num) {
                const int64_t pixel = row * width + column;
                outputs[num] = (int32_t)(pixel * l->O), places[num] = pixel_offsets[pixel];
            }
        ends[group] = num;
    }
}

/* Sum `size` elements, from `first` on, of the gradients of all parts, in the order of the parts. */
static void sum_parts(const Layer *l, const float *part_grads, float *restrict sum, int64_t first, int64_t size) {
    memcpy(sum, part_grads + first, (size_t)size * sizeof(float));
    for (int64_t part = 1; part < l->parts; ++part) {
        const float *restrict next = part_grads + part * (l->patch_size + 1) * l->O + first;
        for (int64_t i = 0; i < size; ++i) sum[i] += next[i];
    }
}

typedef struct {
    const Layer *l;
    const XLA_FFI_Buffer *x;
    int64_t i;
    const float *y, *g;
    float *grad_pre, *transposed, *part_grads, *grad_x, *scratch; /* part_grads [parts, (kernel, bias)] */
    const int32_t *pixel_offsets, *patch_offsets, *outputs, *places, *ends, *identity;
} Backward;

static void backward(const void *args, int64_t part) {
    const Backward *f = args;
    const Layer *l = f->l;
    const int64_t size = l->pixels * l->O, first = first_image(l, part), end = first_image(l, part + 1);
    float *grad_kernel = f->part_grads + part * (l->patch_size + 1) * l->O;
    float *grad_bias = grad_kernel + l->patch_size * l->O;
    const float *grad_pre = activation_backward(
        f->g + first * size, f->y + first * size, f->grad_pre + first * size, grad_bias,
        (end - first) * l->pixels, l->O, l->activation
    );
    memset(grad_kernel, 0, (size_t)(l->patch_size * l->O) * sizeof(float));
    for (int64_t b = first; b < end; ++b, grad_pre += size) {
        gemm(&(Gemm){
            .M = l->patch_size, .N = l->O, .K = l->pixels,
            .a = image(l, f->x, f->i * l->B + b, f->scratch + part * l->size),
            .rows = f->patch_offsets, .cols = f->pixel_offsets, .b = grad_pre, .c = grad_kernel, .accumulate = 1,
        });
        if (!f->grad_x) continue;
        float *grad_x = f->grad_x + b * l->size;
        memset(grad_x, 0, (size_t)l->size * sizeof(float));
        for (int64_t group = 0, start = 0; group < l->tile_stride * l->tile_stride; start = f->ends[group++])
            for (int64_t row = 0; row < l->side; ++row)
                gemm(&(Gemm){
                    .M = f->ends[group] - start, .N = l->row_len, .K = l->O, .a = grad_pre, .rows = f->outputs + start,
                    .cols = f->identity, .b = f->transposed + row * l->row_len * l->O, .c = grad_x + row * l->W * l->C,
                    .places = f->places + start, .accumulate = 1,
                });
    }
}

/* Arguments: x, kernel, y, and the gradient g [B, H', W', O] of the loss with respect to y.
Results: the gradients of kernel and bias; scratch like y, like the kernel, for the gradients of each part, for offsets
(pixels, a patch, pixels twice, O, groups) and for one image of floats per part; the gradient of x, if needed. */
XLA_FFI_Error *conv2d_backward(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const Layer l = layer_of(call);
    if (!l.batch) return NULL;
    const float *kernel = argument(call, 1)->data;
    float *grad_kernel = result(call, 0)->data, *grad_bias = result(call, 1)->data, *transposed = result(call, 3)->data;
    float *part_grads = result(call, 4)->data;
    int32_t *pixel_offsets = result(call, 5)->data, *patch_offsets = pixel_offsets + l.pixels;
    int32_t *outputs = patch_offsets + l.patch_size;
    int32_t *places = outputs + l.pixels, *identity = places + l.pixels, *ends = identity + l.O;
    find_patches(&l, pixel_offsets, patch_offsets);
    group_patches(&l, pixel_offsets, outputs, places, ends);
    for (int32_t o = 0; o < l.O; ++o) identity[o] = o;
    Backward f = {
        .l = &l, .x = argument(call, 0), .y = argument(call, 2)->data, .g = argument(call, 3)->data,
        .grad_pre = result(call, 2)->data, .transposed = transposed, .part_grads = part_grads,
        .scratch = result(call, 6)->data,
        .grad_x = call->rets.size > 7 ? result(call, 7)->data : NULL,
        .pixel_offsets = pixel_offsets, .patch_offsets = patch_offsets, .outputs = outputs, .places = places,
        .ends = ends, .identity = identity,
    };
    const int64_t size = l.B * l.pixels * l.O, of_kernel = l.patch_size * l.O;
    for (; f.i < l.batch; ++f.i, f.y += size, f.g += size, kernel += of_kernel) {
        for (int64_t row = 0; f.grad_x && row < l.side; ++row)
            transpose(kernel + row * l.row_len * l.O, transposed + row * l.row_len * l.O, l.row_len, l.O);
        parallel_for(call, backward, &f, l.parts, l.multithreaded);
        sum_parts(&l, part_grads, grad_kernel, 0, of_kernel);
        sum_parts(&l, part_grads, grad_bias, of_kernel, l.O);
        grad_kernel += of_kernel, grad_bias += l.O;
        if (f.grad_x) f.grad_x += l.B * l.size;
    }
    return NULL;
}
