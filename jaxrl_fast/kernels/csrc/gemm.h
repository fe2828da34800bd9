/* Multiply small matrices on one core of a CPU.

XLA spends a fifth of the time of such small products outside of its inner loops. `gemm` computes any product by tiles
of sums in registers. Its callers apply bias and activation while the rows are in the cache.

The including file defines INDIRECT: 1 if offset tables address the left matrix, 0 if strides do.
*/

#ifndef JAXRL_FAST_GEMM_H
#define JAXRL_FAST_GEMM_H

#include "activations.h"

enum { TILE_ROWS = 6 }; /* of a tile of MAX_VECTORS vectors, which fills the registers */
enum { TALL_ROWS = 8 }; /* of a tile of one vector; with fewer, sums would wait for each other */

/* c [M, N] = a b + start [N], where start may be NULL. b [K, N] and c are row-major; if INDIRECT, `places` may hold the
offset of each row of c. Element (m, k) of a [M, K] is at m a_row + k a_column; if INDIRECT, at rows[m] + cols[k]. */
typedef struct {
    int64_t M, N, K;
    const float *a;
    ptrdiff_t a_row, a_column;
    const float *b, *start;
    float *c;
    const int32_t *rows, *cols, *places;
    int accumulate; /* add to c, and ignore start; only if INDIRECT */
} Gemm;

/* A strip is `vectors` vectors of columns of c, each of `lanes` lanes; a tile is a few rows of a strip. */
#define DEFINE_STRIP(name, lanes, vectors, tile_rows)                                                              \
    INLINE void name##_tile(const Gemm *p, int64_t m, int64_t n, const int rows) {                                 \
        typedef float Vector __attribute__((vector_size(4 * lanes)));                                              \
        typedef float UnalignedVec __attribute__((vector_size(4 * lanes), aligned(4), may_alias));                 \
        const ptrdiff_t N = p->N, a_row = p->a_row, a_column = p->a_column;                                        \
        const float *a = p->a + (INDIRECT ? 0 : m * a_row), *b = p->b + n, *start = p->start;                      \
        const int32_t *cols = p->cols, *places = p->places;                                                        \
        ptrdiff_t from[tile_rows];                                                                                 \
        float *c[tile_rows];                                                                                       \
        Vector sum[tile_rows][vectors];                                                                            \
        for (int i = 0; i < rows; ++i) {                                                                           \
            from[i] = INDIRECT ? p->rows[m + i] : i * a_row;                                                       \
            c[i] = p->c + n + (INDIRECT && places ? places[m + i] : (m + i) * N);                                  \
            for (int j = 0; j < vectors; ++j)                                                                      \
                if (INDIRECT && p->accumulate) sum[i][j] = *(const UnalignedVec *)(c[i] + j * lanes);              \
                else if (start) sum[i][j] = *(const UnalignedVec *)(start + n + j * lanes);                        \
                else sum[i][j] = (Vector){0};                                                                      \
        }                                                                                                          \
        for (int64_t k = 0; k < p->K; ++k, b += N, a += INDIRECT ? 0 : a_column) {                                 \
            const float *term = INDIRECT ? a + cols[k] : a;                                                        \
            for (int i = 0; i < rows; ++i)                                                                         \
                for (int j = 0; j < vectors; ++j)                                                                  \
                    sum[i][j] += term[from[i]] * *(const UnalignedVec *)(b + j * lanes);                           \
        }                                                                                                          \
        for (int i = 0; i < rows; ++i)                                                                             \
            for (int j = 0; j < vectors; ++j) *(UnalignedVec *)(c[i] + j * lanes) = sum[i][j];                     \
    }                                                                                                              \
    static int64_t name(const Gemm *p, int64_t n) {                                                                \
        int64_t m = 0;                                                                                             \
        for (; m + tile_rows <= p->M; m += tile_rows) name##_tile(p, m, n, tile_rows);                             \
        for (; m + 4 <= p->M; m += 4) name##_tile(p, m, n, 4);                                                     \
        if (m + 2 <= p->M) name##_tile(p, m, n, 2), m += 2;                                                        \
        if (m + 1 <= p->M) name##_tile(p, m, n, 1);                                                                \
        return n + vectors * lanes;                                                                                \
    }
DEFINE_STRIP(wide_4, LANES, 4, TILE_ROWS)
DEFINE_STRIP(wide_3, LANES, 3, TILE_ROWS)
DEFINE_STRIP(wide_2, LANES, 2, TILE_ROWS)
DEFINE_STRIP(wide_1, LANES, 1, TALL_ROWS)
DEFINE_STRIP(eight, 8, 1, TALL_ROWS)
DEFINE_STRIP(four, 4, 1, TALL_ROWS)
DEFINE_STRIP(one, 1, 1, TALL_ROWS)

static void gemm(const Gemm *p) {
    int64_t n = 0;
    for (int64_t left; (left = p->N - n) >= LANES;) {
        int64_t vectors = left / LANES, strips = (vectors + MAX_VECTORS - 1) / MAX_VECTORS;
        switch ((vectors + strips - 1) / strips) { /* strips of similar width, e.g. 5 = 3 + 2 */
            case 4: n = wide_4(p, n); break;
            case 3: n = wide_3(p, n); break;
            case 2: n = wide_2(p, n); break;
            default: n = wide_1(p, n);
        }
    }
    if (p->N - n >= 8) n = eight(p, n);
    if (p->N - n >= 4) n = four(p, n);
    if (n < p->N && p->N >= 4 && !p->accumulate) n = four(p, p->N - 4); /* computes some columns twice */
    while (n < p->N) n = one(p, n);
}

/* Transpose `in` [M, N] to `out` [N, M], in blocks of 4 x 4. */
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

#endif
