// The CPU kernel of TernaryAdamW: the same rows compiled for three instruction sets, chosen when first used.
#include "ternary.h"

#include <cstring>
#include <vector>

static const float OCTAVE = 8388608.0f;          // 2^23, units of a float's pattern in an octave
static const float TINY = 1.17549435e-38f;       // 2^-126
static const float EMPTY = 4.70197740e-38f;      // 2^-124: a block with a smaller mean v is empty
static const int32_t SMALLEST = 0x00800000;      // the pattern of 2^-126
static const int32_t ONE = 0x3F800000;           // the pattern of 1
static const int32_t REACH = 60 * (1 << 23);     // v lies within 60 octaves of its factors
static const int64_t LEAST_RAISE = 8;  // units of 2^-7 octave
static const int64_t LARGEST_LEVEL = (0x7F7F0000 - 8 * (1 << 23)) >> 16;

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
namespace avx512 {
#include "ternary_rows.hpp"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "ternary_rows.hpp"
}
#pragma GCC pop_options
#elif defined(__clang__) && defined(__x86_64__)
#define LEANTUNE_X86 1
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
namespace avx512 {
#include "ternary_rows.hpp"
}
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
namespace avx2 {
#include "ternary_rows.hpp"
}
#pragma clang attribute pop
#endif
namespace portable {
#include "ternary_rows.hpp"
}

typedef void (*StepRows)(const LeantuneTernary *, int64_t, int64_t);
typedef void (*MomentumRows)(const LeantuneTernary *, int64_t, int64_t, const float *, float *, float *, double *);
typedef void (*SquareRows)(const LeantuneTernary *, int64_t, int64_t, float *, double *);

struct Variant {
    const char *name;
    StepRows step;
    MomentumRows momentum;
    SquareRows squares;
};

static const Variant VARIANTS[] = {
#ifdef LEANTUNE_X86
    {"avx512", avx512::step_rows, avx512::momentum_rows, avx512::square_rows},
    {"avx2", avx2::step_rows, avx2::momentum_rows, avx2::square_rows},
#endif
    {"portable", portable::step_rows, portable::momentum_rows, portable::square_rows},
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

void leantune_ternary_momentum(const LeantuneTernary *t, const float *basis, float *product, float *columns,
                               double *gram, int chunks) {
    const Variant *variant = chosen;
#pragma omp parallel for num_threads(t->threads) schedule(dynamic, 1)
    for (int chunk = 0; chunk < chunks; chunk++)
        variant->momentum(t, t->rows * chunk / chunks, t->rows * (chunk + 1) / chunks, basis, product,
                          columns + (int64_t)chunk * t->rank * t->cols, gram + (int64_t)chunk * t->rank * t->rank);
}

void leantune_ternary_squares(const LeantuneTernary *t, float *rows, double *columns, int chunks) {
    const Variant *variant = chosen;
#pragma omp parallel for num_threads(t->threads) schedule(dynamic, 1)
    for (int chunk = 0; chunk < chunks; chunk++)
        variant->squares(t, t->rows * chunk / chunks, t->rows * (chunk + 1) / chunks, rows, columns + chunk * t->cols);
}

void leantune_ternary_step(const LeantuneTernary *t) {
    const Variant *variant = chosen;
    // About 64k elements a piece: enough to hide the start of a piece, small enough to share evenly.
    const int64_t height = t->cols >= 65536 ? 1 : 65536 / t->cols, pieces = (t->rows + height - 1) / height;
#pragma omp parallel for num_threads(t->threads) schedule(dynamic, 1)
    for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t top = piece * height, bottom = top + height < t->rows ? top + height : t->rows;
        variant->step(t, top, bottom);
    }
}
