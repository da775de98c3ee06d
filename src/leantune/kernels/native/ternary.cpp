// The CPU kernel of TernaryAdamW: the same rows compiled for three instruction sets, chosen when first used.
#include "ternary.h"

#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const float OCTAVE = 8388608.0f;       // 2^23, units of a float's pattern in an octave
static const float TINY = 1.17549435e-38f;    // 2^-126
static const float EMPTY = 4.70197740e-38f;   // 2^-124: a block with a smaller mean v is empty
static const float FLOOR = 1.0f / 1024.0f;    // of a block's mean, before the logarithm
static const float LEAST_FACTOR = 9.09494702e-13f;  // 2^-40, of a live column
static const float FIRST_STEP = 1.22f, LEAST_STEP = 0.05f, MOST_STEP = 8.0f, THRESHOLD = 0.612f;
static const int32_t SMALLEST = 0x00800000;   // the pattern of 2^-126
static const int32_t LEAST_RAISE = 8;         // units of 2^-7 octave
static const int32_t LARGEST_LEVEL = (0x7F7F0000 - 8 * (1 << 23)) >> 16;

static inline uint64_t splitmix64(uint64_t value) {
    value += 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define LEANTUNE_X86 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define WIDTH 16
namespace avx512 {
#include "simd.hpp"
#include "ternary_rows.hpp"
}
#undef WIDTH
#undef INLINE
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define WIDTH 8
namespace avx2 {
#include "simd.hpp"
#include "ternary_rows.hpp"
}
#undef WIDTH
#undef INLINE
#pragma GCC pop_options
#elif defined(__clang__) && defined(__x86_64__)
#define LEANTUNE_X86 1
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#define WIDTH 16
namespace avx512 {
#include "simd.hpp"
#include "ternary_rows.hpp"
}
#undef WIDTH
#undef INLINE
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#define WIDTH 8
namespace avx2 {
#include "simd.hpp"
#include "ternary_rows.hpp"
}
#undef WIDTH
#undef INLINE
#pragma clang attribute pop
#endif
#define WIDTH 4
namespace portable {
#include "simd.hpp"
#include "ternary_rows.hpp"
}
#undef WIDTH
#undef INLINE

struct Variant {
    const char *name;
    void (*squares)(const LeantuneTernary *, int64_t, int64_t, double *);
    void (*step)(const LeantuneTernary *, float *, int);
};

static const Variant VARIANTS[] = {
#ifdef LEANTUNE_X86
    {"avx512", avx512::square_rows, avx512::step},
    {"avx2", avx2::square_rows, avx2::step},
#endif
    {"portable", portable::square_rows, portable::step},
};

static bool runs_here(const char *name) {
#ifdef LEANTUNE_X86
    if (!std::strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!std::strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return true;
}

static const Variant *best() {
    for (const Variant &variant : VARIANTS)
        if (runs_here(variant.name)) return &variant;
    return nullptr;
}

static const Variant *chosen = best();

int leantune_interface(void) { return LEANTUNE_INTERFACE; }

const char *leantune_instructions(void) { return chosen->name; }

int leantune_use(const char *instructions) {
    for (const Variant &variant : VARIANTS)
        if (!std::strcmp(variant.name, instructions) && runs_here(variant.name)) {
            chosen = &variant;
            return 0;
        }
    return 1;
}

// The first of `chunks` rows of `size` numbers becomes their sum, in one order.
template <class Number> static void add_up(Number *partial, int64_t size, int chunks) {
    for (int chunk = 1; chunk < chunks; chunk++)
        for (int64_t i = 0; i < size; i++) partial[i] += partial[chunk * size + i];
}

void leantune_ternary_squares(const LeantuneTernary *t, double *partial, int chunks) {
    const Variant *variant = chosen;
#pragma omp parallel for num_threads(t->threads) schedule(dynamic, 1)
    for (int chunk = 0; chunk < chunks; chunk++)
        variant->squares(t, t->rows * chunk / chunks, t->rows * (chunk + 1) / chunks, partial + chunk * t->cols);
    add_up(partial, t->cols, chunks);
}

void leantune_ternary_step(const LeantuneTernary *t, float *partial, int chunks) {
    chosen->step(t, partial, chunks);
    add_up(partial, t->rank * t->cols, chunks);
}
