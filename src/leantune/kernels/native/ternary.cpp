// The CPU kernel of TernaryAdamW: the same rows compiled for three instruction sets, chosen when first used.
#include "ternary.h"

#include <cstring>
#include <memory>
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
static const float BASIS_SHIFT = 1.0f / 131072.0f;  // of the norm of Y
static const int64_t PANEL = 24576;  // elements of a panel of rows, 8 bytes each: a share of the second cache
static const int32_t LEAST_RAISE = 8;         // units of 2^-7 octave
static const int32_t LARGEST_LEVEL = (0x7F7F0000 - 8 * (1 << 23)) >> 16;

// The first whole cache line of what begins here: vectors that lie across two lines cost twice.
enum { LINE = 64 };
template <class Number> static Number *aligned(Number *memory) {
    return (Number *)(((uintptr_t)memory + LINE - 1) / LINE * LINE);
}

static inline uint64_t splitmix64(uint64_t value) {
    value += 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define LEANTUNE_X86 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,popcnt,prefer-vector-width=512")
#define WIDTH 16
namespace avx512 {
#include "simd.hpp"
#include "ternary_rows.hpp"
}
#undef WIDTH
#undef INLINE
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,popcnt")
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,popcnt"))), apply_to = function)
#define WIDTH 16
namespace avx512 {
#include "simd.hpp"
#include "ternary_rows.hpp"
}
#undef WIDTH
#undef INLINE
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,popcnt"))), apply_to = function)
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
    void (*step)(const LeantuneTernary *, float *, int64_t, int);
    void (*step_in_order)(const LeantuneTernary *, float *, int64_t, int);
    void (*exact)(const LeantuneTernary *, int64_t, int64_t);
    void (*store)(const LeantuneTernary *, const float *, int64_t, int64_t, int64_t, int64_t);
    void (*next_basis)(const float *, const uint16_t *, int64_t, int, uint16_t *);
    double (*sum_of_squares)(const void *, int, int64_t, int64_t);
};

static const Variant VARIANTS[] = {
#ifdef LEANTUNE_X86
    {"avx512", avx512::square_rows, avx512::step, avx512::step_in_order, avx512::exact_rows, avx512::store_rows, avx512::next_basis, avx512::sum_of_squares},
    {"avx2", avx2::square_rows, avx2::step, avx2::step_in_order, avx2::exact_rows, avx2::store_rows, avx2::next_basis, avx2::sum_of_squares},
#endif
    {"portable", portable::square_rows, portable::step, portable::step_in_order, portable::exact_rows, portable::store_rows, portable::next_basis, portable::sum_of_squares},
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

// Sums of `size` numbers over ranges of rows, kept apart until all are there, and added up in their order.
template <class Number> struct Partial {
    int64_t size;
    int chunks;
    std::unique_ptr<Number[]> memory;  // written by whoever has the range
    Partial(int64_t size, int chunks) : size(size), chunks(chunks), memory(new Number[(size_t)(size * chunks) + LINE / sizeof(Number)]) {}
    Number *of(int chunk) { return aligned(memory.get()) + size * chunk; }
    void add_up() {
        for (int chunk = 1; chunk < chunks; chunk++)
            for (int64_t i = 0; i < size; i++) of(0)[i] += of(chunk)[i];
    }
};

// Ranges of rows whose sums are kept apart, `size` bytes each, together at most 1 MiB; enough elements each to hide the
// start of one. A power of two is shared evenly by two, four, eight threads.
static int chunks_of(const LeantuneTernary *t, int64_t size, int64_t elements_each) {
    const int64_t bounds[] = {64, t->rows, (1 << 20) / (size > 1 ? size : 1), t->rows * t->cols / elements_each};
    int64_t most = bounds[0];
    for (int64_t bound : bounds) most = bound < most ? bound : most;
    int chunks = 1;
    while (2 * chunks <= most) chunks *= 2;
    return chunks;
}

void leantune_ternary_squares(const LeantuneTernary *t, double *columns) {
    const Variant *variant = chosen;
    const int chunks = chunks_of(t, 8 * t->cols, 1 << 17);
    const bool apart = t->threads > 1;
    Partial<double> partial(t->cols, apart ? chunks : 2);
    const auto squares = [&](int chunk, double *out) { variant->squares(t, t->rows * chunk / chunks, t->rows * (chunk + 1) / chunks, out); };
#pragma omp parallel for num_threads(t->threads) schedule(dynamic, 1) if (apart && chunks > 1)
    for (int chunk = 0; chunk < (apart ? chunks : 1); chunk++) squares(chunk, partial.of(chunk));
    if (apart) partial.add_up();
    for (int chunk = 1; !apart && chunk < chunks; chunk++) {
        squares(chunk, partial.of(1));
        partial.add_up();
    }
    std::memcpy(columns, partial.of(0), sizeof(double) * (size_t)t->cols);
}

// Decode, rule, encode, move the weights; Y, (rank, cols), at the beginning of what it returns.
static Partial<float> step(const LeantuneTernary *t) {
    const int64_t wide = t->blocks_per_row * t->block, size = t->refresh ? t->rank * wide : 0;
    const int chunks = chunks_of(t, 4 * t->rank * wide, 1 << 15);
    const bool apart = t->threads > 1;
    Partial<float> partial(size, apart ? chunks : 2);
    (apart ? chosen->step : chosen->step_in_order)(t, partial.of(0), size, chunks);
    if (apart) partial.add_up();
    for (int64_t k = 1; size && k < t->rank; k++) std::memmove(partial.of(0) + k * t->cols, partial.of(0) + k * wide, sizeof(float) * (size_t)t->cols);
    return partial;
}

void leantune_ternary_step(const LeantuneTernary *t, float *products) {
    Partial<float> partial = step(t);
    if (t->refresh) std::memcpy(products, partial.of(0), sizeof(float) * (size_t)(t->rank * t->cols));
}

void leantune_next_basis(const float *products, const uint16_t *basis, int64_t cols, int rank, uint16_t *out) {
    chosen->next_basis(products, basis, cols, rank, out);
}

// c += (1 - beta2) (mean of g^2 - c), rounded as `_column_means` of optim/ternary_adamw.py rounds it.
static void new_means(const LeantuneTernary *t, const double *sums, float *means) {
    for (int64_t j = 0; j < t->cols; j++) {
        const float mean = (float)(sums[j] / (double)t->rows), before = t->column_means[j];
        means[j] = before + t->rest2 * (mean - before);
    }
}

static void update_ternary(LeantuneTernary t) {
    std::vector<float> means((size_t)t.cols);
    if (!t.sampled) {
        std::memcpy(means.data(), t.column_means, sizeof(float) * (size_t)t.cols);
    } else {
        std::vector<double> sums((size_t)t.cols);
        leantune_ternary_squares(&t, sums.data());
        new_means(&t, sums.data(), means.data());
    }
    t.new_column_means = means.data();
    Partial<float> products = step(&t);
    std::memcpy(t.column_means, means.data(), sizeof(float) * (size_t)t.cols);
    for (int64_t j = 0; t.rank && j < t.cols; j++)
        for (int k = 0; k < t.rank; k++) t.carry_columns[j * t.rank + k] = means[j] > 0.0f ? t.basis[j * t.rank + k] : 0;
    if (t.rank && t.refresh) chosen->next_basis(products.of(0), t.basis, t.cols, t.rank, t.carry_basis);
}

static void update_exact(const LeantuneTernary *t) {
    const Variant *variant = chosen;
    const int64_t height = t->cols >= 16384 ? 1 : 16384 / t->cols, pieces = (t->rows + height - 1) / height;
#pragma omp parallel for num_threads(t->threads) if (pieces > 1 && t->threads > 1)
    for (int64_t piece = 0; piece < pieces; piece++)
        variant->exact(t, piece * height, (piece + 1) * height < t->rows ? (piece + 1) * height : t->rows);
}

static void update(LeantuneTernary t, int threads) {
    t.threads = threads;
    if (t.exact_momentum)
        update_exact(&t);
    else
        update_ternary(t);
}

// Whether a thread takes a whole parameter by itself, where there are several: what is not shared among threads (the
// columns, the next basis) then keeps none waiting.
static bool small(const LeantuneTernary *t) { return t->rows * t->cols <= 1 << 22 && t->cols <= 1 << 14; }

void leantune_update(const LeantuneTernary *const *parameters, int64_t count) {
    const int threads = count ? parameters[0]->threads : 1;
    const bool shared = threads > 1 && count > 2 * threads;
    for (int64_t i = 0; i < count; i++)
        if (!shared || !small(parameters[i])) update(*parameters[i], threads);
    if (!shared) return;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
        if (small(parameters[i])) update(*parameters[i], 1);
}

void leantune_store(const LeantuneTernary *t, const float *values, int64_t top, int64_t rows, int64_t left, int64_t cols) {
    const Variant *variant = chosen;
    const int64_t height = cols >= 16384 ? 1 : 16384 / cols, pieces = (rows + height - 1) / height;
#pragma omp parallel for num_threads(t->threads) if (pieces > 1 && t->threads > 1)
    for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = piece * height, count = rows - first < height ? rows - first : height;
        variant->store(t, values + first * cols, top + first, count, left, cols);
    }
}

void leantune_sums_of_squares(const void *const *arrays, const int32_t *dtypes, const int64_t *sizes, int64_t count,
                              int threads, float *sums) {
    const Variant *variant = chosen;
    const int64_t piece = 1 << 18;
    struct Piece { int64_t array, start, size; };
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < count; i++)
        for (int64_t start = 0; start < sizes[i]; start += piece)
            pieces.push_back({i, start, sizes[i] - start < piece ? sizes[i] - start : piece});
    std::vector<double> parts(pieces.size()), totals((size_t)count);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (pieces.size() > 1)
    for (int64_t p = 0; p < (int64_t)pieces.size(); p++)
        parts[p] = variant->sum_of_squares(arrays[pieces[p].array], dtypes[pieces[p].array], pieces[p].start, pieces[p].size);
    for (size_t p = 0; p < pieces.size(); p++) totals[pieces[p].array] += parts[p];
    for (int64_t i = 0; i < count; i++) sums[i] = (float)totals[i];
}
