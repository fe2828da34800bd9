/* Define vectors as wide as the CPU's registers. */

#ifndef JAXRL_FAST_SIMD_H
#define JAXRL_FAST_SIMD_H

#if defined(__AVX512F__)
enum { LANES = 16, MAX_VECTORS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, MAX_VECTORS = 2 };
#elif defined(__SSE2__)
enum { LANES = 4, MAX_VECTORS = 2 };
#else
enum { LANES = 4, MAX_VECTORS = 4 };
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float UnalignedVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any address */

/* Return the sum of the lanes. */
INLINE float total(Vector lanes) {
    typedef float Four __attribute__((vector_size(16)));
    union { Vector whole; Four fours[LANES / 4]; } parts = {lanes};
    Four sum = parts.fours[0];
    for (int i = 1; i < LANES / 4; ++i) sum += parts.fours[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

#endif
