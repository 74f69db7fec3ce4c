/* Vectors of LANES floats in GCC's and Clang's vector extension, and the few operations on them
 * that need an instruction by name. The file that includes this one defines TARGET_AVX512,
 * TARGET_AVX2 or neither; with neither it is NEON on arm64 and plain C elsewhere. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))

#if defined(TARGET_AVX512)
#define LANES 16
#elif defined(TARGET_AVX2)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float vf_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf load(const float *p) { return *(const vf_unaligned *)p; }
INLINE void store(float *p, vf x) { *(vf_unaligned *)p = x; }
INLINE vu load_words(const uint32_t *p) { return *(const vu_unaligned *)p; }
INLINE void store_words(uint32_t *p, vu x) { *(vu_unaligned *)p = x; }

/* fp16, one at a time */

INLINE uint32_t bits_of(float x) {
    union {
        float x;
        uint32_t bits;
    } both = {.x = x};
    return both.bits;
}

INLINE float from_bits(uint32_t bits) {
    union {
        uint32_t bits;
        float x;
    } both = {.bits = bits};
    return both.x;
}

INLINE float half_to_float(uint16_t h) {
#if defined(TARGET_AVX512) || defined(TARGET_AVX2)
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    __fp16 x;
    memcpy(&x, &h, 2);
    return x;
#else
    /* Exponent and mantissa moved to float's place, then scaled, which also makes subnormals. */
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    if (bits >= 0x0f800000) /* infinity and NaN */
        return from_bits(sign | 0x7f800000 | bits);
    return from_bits(sign | bits_of(from_bits(bits) * 0x1p112f));
#endif
}

/* Rounds to nearest, ties to even. */
INLINE uint16_t float_to_half(float x) {
#if defined(TARGET_AVX512) || defined(TARGET_AVX2)
    return _cvtss_sh(x, 0);
#elif defined(__aarch64__)
    __fp16 h = (__fp16)x;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
#else
    uint32_t bits = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
    if (bits >= 0x47800000) /* 65536 and more, and NaN */
        return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (bits < 0x38800000) /* subnormal: float's own rounding at the place of 2^-24 */
        return (uint16_t)(sign | (bits_of(from_bits(bits) + 0.5f) - 0x3f000000));
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits - 0x38000000) >> 13));
#endif
}

INLINE float bfloat_to_float(uint16_t h) {
    return from_bits((uint32_t)h << 16);
}

/* Vectors from narrower elements */

INLINE vf load_half(const uint16_t *p) {
#if defined(TARGET_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(TARGET_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vf x = {0};
    for (int i = 0; i < LANES; i++)
        x[i] = half_to_float(p[i]);
    return x;
#endif
}

/* As float_to_half. */
INLINE void store_half(uint16_t *p, vf x) {
#if defined(TARGET_AVX512)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(TARGET_AVX2)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, 0));
#elif defined(__aarch64__)
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    for (int i = 0; i < LANES; i++)
        p[i] = float_to_half(x[i]);
#endif
}

INLINE vf load_bfloat(const uint16_t *p) {
#if defined(TARGET_AVX512)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(TARGET_AVX2)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#elif defined(__aarch64__)
    return (vf)vshll_n_u16(vld1_u16(p), 16);
#else
    vf x = {0};
    for (int i = 0; i < LANES; i++)
        x[i] = bfloat_to_float(p[i]);
    return x;
#endif
}

/* LANES bytes as floats 0 to 255. */
INLINE vf load_bytes(const uint8_t *p) {
#if defined(TARGET_AVX512)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(TARGET_AVX2)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vi x = {0};
    for (int i = 0; i < LANES; i++)
        x[i] = p[i];
    return __builtin_convertvector(x, vf);
#endif
}

/* The lowest nibble of each word as a float 0 to 15. */
INLINE vf nibble(vu words) {
#if defined(TARGET_AVX512)
    const vf values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)words, (__m512)values);
#else
    return __builtin_convertvector((vi)(words & 15), vf);
#endif
}

/* The lowest nibble of each word as the float that it is: sign, two bits of exponent, one more. */
INLINE vf small_float(vu words) {
#if defined(TARGET_AVX512)
    const vf values = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (vf)_mm512_permutexvar_ps((__m512i)words, (__m512)values);
#elif defined(TARGET_AVX2)
    const vf sizes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    vf size = (vf)_mm256_permutevar8x32_ps((__m256)sizes, (__m256i)words);
    return (vf)((vu)size ^ (words & 8) << 28);
#else
    static const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    vf size = {0};
    for (int i = 0; i < LANES; i++)
        size[i] = sizes[words[i] & 7];
    return (vf)((vu)size ^ (words & 8) << 28);
#endif
}

/* The lowest byte of each word as a float 0 to 255. */
INLINE vf low_byte(vu words) { return __builtin_convertvector((vi)(words & 255), vf); }

/* Lane i takes p[index[i]]; reads LANES floats at p. */
INLINE vf pick(const float *p, vi index) {
#if defined(TARGET_AVX512)
    return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(p));
#elif defined(TARGET_AVX2)
    return (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(p), (__m256i)index);
#else
    vf x = {0};
    for (int i = 0; i < LANES; i++)
        x[i] = p[index[i]];
    return x;
#endif
}

/* The first n lanes, the others zero; the memory past them is not touched. */

INLINE vf load_n(const float *p, int n) {
#if defined(TARGET_AVX512)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    if (n == LANES)
        return load(p);
    float all[LANES] = {0};
    memcpy(all, p, 4 * (size_t)n);
    return load(all);
#endif
}

INLINE vf load_half_n(const uint16_t *p, int n) {
#if defined(TARGET_AVX512)
    __mmask16 there = (__mmask16)((1u << n) - 1);
    return (vf)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, p));
#else
    uint16_t all[LANES] = {0};
    for (int i = 0; i < n; i++)
        all[i] = p[i];
    return load_half(all);
#endif
}

INLINE vf load_bfloat_n(const uint16_t *p, int n) {
    uint16_t all[LANES] = {0};
    for (int i = 0; i < n; i++)
        all[i] = p[i];
    return load_bfloat(all);
}

INLINE vu load_words_n(const uint32_t *p, int n) { return (vu)load_n((const float *)p, n); }

INLINE void store_n(float *p, vf x, int n) {
#if defined(TARGET_AVX512)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#else
    if (n == LANES) {
        store(p, x);
        return;
    }
    float all[LANES];
    store(all, x);
    memcpy(p, all, 4 * (size_t)n);
#endif
}

/* Lanes across */

INLINE vf max_of(vf a, vf b) {
#if defined(TARGET_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(TARGET_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
#endif
}

INLINE vf min_of(vf a, vf b) {
#if defined(TARGET_AVX512)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(TARGET_AVX2)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    vi less = a < b;
    return (vf)(((vi)a & less) | ((vi)b & ~less));
#endif
}

INLINE float sum_lanes(vf x) {
#if defined(TARGET_AVX512)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return sum;
#endif
}

INLINE float max_lane(vf x) {
#if defined(TARGET_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float max = x[0];
    for (int i = 1; i < LANES; i++)
        max = x[i] > max ? x[i] : max;
    return max;
#endif
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* a0 b0 a1 b1 ... of the lower halves, then of the upper. */
#if LANES == 16
#define LOW_PAIRS(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_PAIRS(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define LOW_PAIRS(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH_PAIRS(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define LOW_PAIRS(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH_PAIRS(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#endif

/* Square of LANES x LANES in place: each pass is one step of a perfect shuffle. */
INLINE void transpose(vf rows[LANES]) {
#pragma GCC unroll 4
    for (int size = LANES; size > 1; size /= 2) {
        vf next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = LOW_PAIRS(rows[i], rows[i + LANES / 2]);
            next[2 * i + 1] = HIGH_PAIRS(rows[i], rows[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            rows[i] = next[i];
    }
}

/* Lane i of the result is the sum of rows[i]'s lanes. */
INLINE vf sum_rows(const vf rows[LANES]) {
    vf all[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        all[i] = rows[i];
#pragma GCC unroll 4
    for (int n = LANES / 2; n; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++)
            all[i] = LOW_PAIRS(all[i], all[i + n]) + HIGH_PAIRS(all[i], all[i + n]);
    return all[0];
}

/* exp, to about 1e-7 relative (Cody and Waite's reduction, Cephes' polynomial); 0 below -87. */
INLINE vf exp_of(vf x) {
    const vf magic = splat(0x1.8p23f);
    vi small = x < splat(-87.3f);
    x = min_of(max_of(x, splat(-87.3f)), splat(88.3f));
    vf n = (x * splat(1.44269504f) + magic) - magic;
    vf r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)exponent) & ~small);
}

INLINE vf tanh_of(vf x) { return splat(1.0f) - splat(2.0f) / (exp_of(x + x) + splat(1.0f)); }
