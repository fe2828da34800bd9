/* Products of matrices on a core of a CPU.

XLA's products of matrices this small spend a fifth of their time around their kernels. Here one function computes tiles
of any product in the registers, and its callers do what comes before and after while the rows are in the cache.

Whoever includes this defines GATHERED: 1 if tables say where a product's left numbers lie, 0 if steps do.
*/

#ifndef JAXRL_FAST_TILES_H
#define JAXRL_FAST_TILES_H

#include "activations.h"

enum { TILE_ROWS = 6 }; /* and MOST_VECTORS columns of sums: what the registers hold */
enum { TALL_ROWS = 8 }; /* of a tile that is one vector wide, or each sum would wait for the one before */

/* c [M, N] = a b, plus start [N] unless that is NULL. b [K, N] lies row by row, and c too, or its rows at `places`.
The number (m, k) of a [M, K] lies at m a_row + k a_column, or, if GATHERED, at rows[m] + terms[k]. */
typedef struct {
    int64_t M, N, K;
    const float *a;
    ptrdiff_t a_row, a_column;
    const float *b, *start;
    float *c;
    const int32_t *rows, *terms, *places;
    int onto; /* c is added to, and there is no start */
} Product;

/* A strip is some columns of c, `vectors` of so many lanes; a tile is a few rows of it. */
#define DEFINE_STRIP(name, lanes, vectors, tile_rows)                                                          \
    INLINE void name##_tile(const Product *p, int64_t m, int64_t n, const int rows) {                          \
        typedef float Vector __attribute__((vector_size(4 * lanes)));                                          \
        typedef float Anywhere __attribute__((vector_size(4 * lanes), aligned(4), may_alias));                 \
        const ptrdiff_t N = p->N, a_row = p->a_row, a_column = p->a_column;                                    \
        const float *a = p->a + (GATHERED ? 0 : m * a_row), *b = p->b + n, *start = p->start;                  \
        const int32_t *terms = p->terms, *places = p->places;                                                  \
        ptrdiff_t from[tile_rows];                                                                             \
        float *c[tile_rows];                                                                                   \
        Vector sum[tile_rows][vectors];                                                                        \
        for (int i = 0; i < rows; ++i) {                                                                       \
            from[i] = GATHERED ? p->rows[m + i] : i * a_row;                                                   \
            c[i] = p->c + n + (GATHERED && places ? places[m + i] : (m + i) * N);                              \
            for (int j = 0; j < vectors; ++j)                                                                  \
                if (GATHERED && p->onto) sum[i][j] = *(const Anywhere *)(c[i] + j * lanes);                    \
                else if (start) sum[i][j] = *(const Anywhere *)(start + n + j * lanes);                        \
                else sum[i][j] = (Vector){0};                                                                  \
        }                                                                                                      \
        for (int64_t k = 0; k < p->K; ++k, b += N, a += GATHERED ? 0 : a_column) {                             \
            const float *term = GATHERED ? a + terms[k] : a;                                                   \
            for (int i = 0; i < rows; ++i)                                                                     \
                for (int j = 0; j < vectors; ++j) sum[i][j] += term[from[i]] * *(const Anywhere *)(b + j * lanes);\
        }                                                                                                      \
        for (int i = 0; i < rows; ++i)                                                                         \
            for (int j = 0; j < vectors; ++j) *(Anywhere *)(c[i] + j * lanes) = sum[i][j];                     \
    }                                                                                                          \
    static int64_t name(const Product *p, int64_t n) {                                                         \
        int64_t m = 0;                                                                                         \
        for (; m + tile_rows <= p->M; m += tile_rows) name##_tile(p, m, n, tile_rows);                         \
        for (; m + 4 <= p->M; m += 4) name##_tile(p, m, n, 4);                                                 \
        if (m + 2 <= p->M) name##_tile(p, m, n, 2), m += 2;                                                    \
        if (m + 1 <= p->M) name##_tile(p, m, n, 1);                                                            \
        return n + vectors * lanes;                                                                            \
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
    if (n < p->N && p->N >= 4 && !p->onto) n = four(p, p->N - 4); /* some columns once more */
    while (n < p->N) n = one(p, n);
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

#endif
