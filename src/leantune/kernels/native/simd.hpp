// Vectors of WIDTH floats and the few operations that the compiler's own vector types do not give. Included once per
// instruction set, before ternary_rows.hpp. Multiplications and additions are fused where the set can, and only where
// fma() says so.

enum { PARTS = 16 / WIDTH };  // vectors in sixteen elements

typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE Floats load(const float *x) { return *(const Floats *)x; }
INLINE void store(float *x, Floats value) { *(Floats *)x = value; }
INLINE Floats all(float value) { return value - Floats{}; }
INLINE Ints all_ints(int32_t value) { return value - Ints{}; }

// Floats and integers of the same bits.
INLINE Ints bits_of(Floats x) { return (Ints)x; }
INLINE Floats of_bits(Ints x) { return (Floats)x; }
INLINE Floats keep(Floats x, Ints mask) { return of_bits(bits_of(x) & mask); }

#if WIDTH > 4
INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

#if WIDTH == 16
INLINE Floats fma(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE Floats root(Floats x) { return (Floats)_mm512_sqrt_ps((__m512)x); }
INLINE Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE Floats to_floats(Ints x) { return (Floats)_mm512_cvtepi32_ps((__m512i)x); }
INLINE Ints truncate(Floats x) { return (Ints)_mm512_cvttps_epi32((__m512)x); }
INLINE Ints widen(const uint8_t *x) { return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)); }
INLINE Words widen(const uint16_t *x) { return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)); }
INLINE void narrow(const Words *x, uint16_t *out) { _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)x[0])); }
INLINE void narrow(const Ints *x, uint8_t *out) { _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)x[0])); }
struct Table {
    __m512 values;
    explicit Table(const float *three) : values(_mm512_castps128_ps512(_mm_loadu_ps(three))) {}
    Table(float a, float b, float c) : values(_mm512_setr_ps(a, b, c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)) {}
};
INLINE Floats pick(const Table &table, Ints digits) { return (Floats)_mm512_permutexvar_ps((__m512i)digits, table.values); }
#elif WIDTH == 8
INLINE Floats fma(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE Floats root(Floats x) { return (Floats)_mm256_sqrt_ps((__m256)x); }
INLINE Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE Floats to_floats(Ints x) { return (Floats)_mm256_cvtepi32_ps((__m256i)x); }
INLINE Ints truncate(Floats x) { return (Ints)_mm256_cvttps_epi32((__m256)x); }
INLINE Ints widen(const uint8_t *x) { return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x)); }
INLINE Words widen(const uint16_t *x) { return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)); }
INLINE void narrow(const Words *x, uint16_t *out) {
    _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x[0], (__m256i)x[1]), 0xD8));
}
INLINE void narrow(const Ints *x, uint8_t *out) {
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), 0xD8);
    _mm_storeu_si128((__m128i *)out, _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
}
struct Table {
    __m256 values;
    explicit Table(const float *three) : values(_mm256_castps128_ps256(_mm_loadu_ps(three))) {}
    Table(float a, float b, float c) : values(_mm256_setr_ps(a, b, c, 0, 0, 0, 0, 0)) {}
};
INLINE Floats pick(const Table &table, Ints digits) { return (Floats)_mm256_permutevar8x32_ps(table.values, (__m256i)digits); }
#else
INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE float fma(float a, float b, float c) { return a * b + c; }
INLINE Floats root(Floats x) {
    for (int i = 0; i < WIDTH; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
}
INLINE Floats larger(Floats a, Floats b) {
    const Ints mask = a > b;
    return of_bits((bits_of(a) & mask) | (bits_of(b) & ~mask));
}
INLINE Floats smaller(Floats a, Floats b) {
    const Ints mask = a < b;
    return of_bits((bits_of(a) & mask) | (bits_of(b) & ~mask));
}
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints truncate(Floats x) { return __builtin_convertvector(x, Ints); }
INLINE Ints widen(const uint8_t *x) {
    Ints result;
    for (int i = 0; i < WIDTH; i++) result[i] = x[i];
    return result;
}
INLINE Words widen(const uint16_t *x) {
    Words result;
    for (int i = 0; i < WIDTH; i++) result[i] = x[i];
    return result;
}
INLINE void narrow(const Words *x, uint16_t *out) {
    for (int i = 0; i < 16; i++) out[i] = (uint16_t)x[i / WIDTH][i % WIDTH];
}
INLINE void narrow(const Ints *x, uint8_t *out) {
    for (int part = 0; part < PARTS; part++)
        for (int i = 0; i < WIDTH; i++) out[part * WIDTH + i] = (uint8_t)x[part][i];
}
struct Table {
    Floats low, middle, high;
    explicit Table(const float *three) : Table(three[0], three[1], three[2]) {}
    Table(float a, float b, float c) : low(all(a)), middle(all(b)), high(all(c)) {}
};
INLINE Floats pick(const Table &table, Ints digits) {
    return of_bits((bits_of(table.low) & (digits == 0)) | (bits_of(table.middle) & (digits == 1)) |
                   (bits_of(table.high) & (digits == 2)));
}
#endif

// WIDTH numbers in fp64, to which floats are added.
struct Doubles {
#if WIDTH == 16
    __m512d low, high;
    explicit Doubles(const double *x) : low(_mm512_loadu_pd(x)), high(_mm512_loadu_pd(x + 8)) {}
    void add(Floats x) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1)));
    }
    void store(double *x) const { _mm512_storeu_pd(x, low), _mm512_storeu_pd(x + 8, high); }
#elif WIDTH == 8
    __m256d low, high;
    explicit Doubles(const double *x) : low(_mm256_loadu_pd(x)), high(_mm256_loadu_pd(x + 4)) {}
    void add(Floats x) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)));
    }
    void store(double *x) const { _mm256_storeu_pd(x, low), _mm256_storeu_pd(x + 4, high); }
#else
    double lanes[WIDTH];
    explicit Doubles(const double *x) { std::memcpy(lanes, x, sizeof lanes); }
    void add(Floats x) {
        for (int i = 0; i < WIDTH; i++) lanes[i] += (double)x[i];
    }
    void store(double *x) const { std::memcpy(x, lanes, sizeof lanes); }
#endif
};

// Sixteen digits: 1 + sign(r) where `kept` is all ones, else 1. How many digits were added in sixteens: their sum, and how
// many are 1. BYTES bytes of five trits each to digits and back: trit k of byte i is digits[i + k * p].
#if WIDTH == 4
enum { BYTES = 16 };
INLINE void signed_digits(const Ints *kept, const Floats *r, uint8_t *out) {
    for (int i = 0; i < 16; i++)
        out[i] = (uint8_t)(kept[i / WIDTH][i % WIDTH] ? (r[i / WIDTH][i % WIDTH] < 0.0f ? 0 : 2) : 1);
}
struct DigitCount {
    int total = 0, middle = 0;
    __attribute__((always_inline)) void add(const uint8_t *digits) {
        for (int i = 0; i < 16; i++) total += digits[i], middle += digits[i] == 1;
    }
    int sum() const { return total; }
    int ones() const { return middle; }
};
typedef uint8_t Bytes __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * BYTES), aligned(1), may_alias));
INLINE void unpack_bytes(const uint8_t *packed, uint8_t *digits, int p) {
    Bytes rest = *(const Bytes *)packed;
    for (int k = 0; k < 4; k++) {
        const Bytes third = __builtin_convertvector(__builtin_convertvector(rest, Halves) * 171 >> 9, Bytes);
        *(Bytes *)(digits + k * p) = rest - (third + third + third);
        rest = third;
    }
    *(Bytes *)(digits + 4 * p) = rest;
}
INLINE void pack_bytes(const uint8_t *digits, int p, uint8_t *packed) {
    Bytes value = *(const Bytes *)(digits + 4 * p);
    for (int k = 3; k >= 0; k--) value = value + value + value + *(const Bytes *)(digits + k * p);
    *(Bytes *)packed = value;
}
#else
enum { BYTES = 32 };
INLINE void signed_digits(const Ints *kept, const Floats *r, uint8_t *out) {
#if WIDTH == 16
    const __m128i negated = _mm512_cvtepi32_epi8((__m512i)((kept[0] & 1) | ((Ints)(r[0] < 0.0f) & kept[0])));
    _mm_storeu_si128((__m128i *)out, _mm_add_epi8(_mm_set1_epi8(1), negated));
#else
    const __m256i masks = _mm256_packs_epi32((__m256i)kept[0], (__m256i)kept[1]);
    const __m256i signs = _mm256_packs_epi32((__m256i)r[0], (__m256i)r[1]);  // saturates: the sign is all that is left
    const __m256i negated = _mm256_sign_epi16(masks, signs);                // -1 where positive
    const __m128i quarters = _mm_packs_epi16(_mm256_castsi256_si128(negated), _mm256_extracti128_si256(negated, 1));
    _mm_storeu_si128((__m128i *)out, _mm_sub_epi8(_mm_set1_epi8(1), _mm_shuffle_epi32(quarters, 0xD8)));
#endif
}
struct DigitCount {
    __m128i total = _mm_setzero_si128(), middle = _mm_setzero_si128();
    __attribute__((always_inline)) void add(const uint8_t *digits) {
        const __m128i sixteen = _mm_loadu_si128((const __m128i *)digits), zero = _mm_setzero_si128();
        total = _mm_add_epi64(total, _mm_sad_epu8(sixteen, zero));
        middle = _mm_add_epi64(middle, _mm_sad_epu8(_mm_cmpeq_epi8(sixteen, _mm_set1_epi8(1)), zero));  // 255 for each
    }
    static int both(__m128i halves) { return (int)(_mm_cvtsi128_si64(halves) + _mm_extract_epi64(halves, 1)); }
    int sum() const { return both(total); }
    int ones() const { return both(middle) / 255; }
};
INLINE void unpack_bytes(const uint8_t *packed, uint8_t *digits, int p) {
    const __m256i third = _mm256_set1_epi16(171 << 7);  // the high half of (b * 171) << 7 is b / 3, exact below 256
    __m256i rest = _mm256_loadu_si256((const __m256i *)packed);
    __m256i even = _mm256_and_si256(rest, _mm256_set1_epi16(0xFF)), odd = _mm256_srli_epi16(rest, 8);
    for (int k = 0; k < 4; k++) {
        even = _mm256_mulhi_epu16(even, third);
        odd = _mm256_mulhi_epu16(odd, third);
        const __m256i both = _mm256_or_si256(even, _mm256_slli_epi16(odd, 8));
        _mm256_storeu_si256((__m256i *)(digits + k * p), _mm256_sub_epi8(rest, _mm256_add_epi8(both, _mm256_add_epi8(both, both))));
        rest = both;
    }
    _mm256_storeu_si256((__m256i *)(digits + 4 * p), rest);
}
INLINE void pack_bytes(const uint8_t *digits, int p, uint8_t *packed) {
    __m256i value = _mm256_loadu_si256((const __m256i *)(digits + 4 * p));
    for (int k = 3; k >= 0; k--) {
        const __m256i next = _mm256_loadu_si256((const __m256i *)(digits + k * p));
        value = _mm256_add_epi8(_mm256_add_epi8(value, value), _mm256_add_epi8(value, next));
    }
    _mm256_storeu_si256((__m256i *)packed, value);
}
#endif

// Sixteen partial sums: lane i of elements i, i + 16, i + 32 and so on.
struct Sum {
    Floats part[PARTS];
    Sum() {
        for (int p = 0; p < PARTS; p++) part[p] = Floats{};
    }
};

// The totals of four sums, in one order for the sets that fuse.
#if WIDTH == 4
INLINE float total(const Sum &sum) {
    const Floats four = (sum.part[0] + sum.part[2]) + (sum.part[1] + sum.part[3]);
    return (four[0] + four[1]) + (four[2] + four[3]);
}
INLINE void totals(const Sum &a, const Sum &b, const Sum &c, const Sum &d, float *out) {
    out[0] = total(a), out[1] = total(b), out[2] = total(c), out[3] = total(d);
}
#else
INLINE __m256 eight(const Sum &sum) {
#if WIDTH == 16
    const __m512 sixteen = (__m512)sum.part[0];
    return _mm256_add_ps(_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps(sixteen, 1));
#else
    return (__m256)(sum.part[0] + sum.part[1]);
#endif
}
INLINE void totals(const Sum &a, const Sum &b, const Sum &c, const Sum &d, float *out) {
    const __m256 both = _mm256_hadd_ps(_mm256_hadd_ps(eight(a), eight(b)), _mm256_hadd_ps(eight(c), eight(d)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
}
INLINE float total(const Sum &sum) {
    const __m256 pairs = _mm256_hadd_ps(eight(sum), eight(sum)), four = _mm256_hadd_ps(pairs, pairs);
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}
#endif
