// Runs every entry of the CPU kernel on awkward shapes, each array in a heap block of its exact size: built with
// -fsanitize=address,undefined by test_native.py, any access outside one stops it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "ternary.h"

static float draw() { return (float)(rand() % 20001 - 10000) / 10000.0f; }

static uint16_t bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

template <class T> struct Array {
    T *data;
    int64_t size;
    template <class Make> Array(int64_t size, Make make) : data((T *)malloc(sizeof(T) * (size_t)size)), size(size) {
        for (int64_t i = 0; i < size; i++) data[i] = (T)make();
    }
    ~Array() { free(data); }
};

static void run(int64_t rows, int64_t cols, int rank, int planes, int block, int grad_dtype, int weight_dtype, bool nearest,
                bool remainder) {
    const int64_t blocks = (cols + block - 1) / block, group = 5 * block, full = cols / group, rest = cols - full * group;
    const int64_t bytes = full * block + (rest + 4) / 5, count = rows * cols;
    auto small = [] { return bf16(0.1f * draw()); };
    auto trits = [] { return rand() % 243; };
    auto means = [] { return rand() % 5 ? 1e-3f : 0.0f; };
    auto zero = [] { return 0; };
    Array<float> grad_32(count, draw), weight_32(count, draw), exact_momentum(count, zero), exact_variance(count, zero);
    Array<uint16_t> grad_16(count, small), weight_16(count, small), scale(rows * blocks, [] { return bf16(0.5f); }),
        second_scale(rows * blocks, small), level(rows * blocks, [] { return bf16(1e-3f); }),
        step(rows * blocks, [] { return rand() % 3 ? bf16(1.0f) : 0; }), carry_rows(rows * rank, small),
        carry_columns(cols * rank, small), carry_basis(cols * rank, small), basis(cols * rank, small);
    Array<uint8_t> momentum(rows * bytes, trits), second(rows * bytes, trits), variance(rows * bytes, trits);
    Array<int8_t> low(count, [] { return rand() % 256 - 128; });
    Array<float> column_means(cols, means), new_means(cols, means);
    Array<float> products(rank * cols, zero);
    Array<double> squares(cols, zero);

    LeantuneTernary t{};
    t.rows = rows, t.cols = cols, t.grad_row = cols, t.grad_column = 1, t.blocks_per_row = blocks, t.bytes_per_row = bytes;
    t.key = 1, t.block = block, t.planes = planes, t.rank = rank, t.grad_dtype = grad_dtype, t.weight_dtype = weight_dtype;
    t.stochastic = !nearest, t.threads = 1, t.lr = 1e-3f, t.decay = 1.0f, t.beta1 = 0.9f, t.rest1 = 0.1f, t.release = 9.0f;
    t.beta2 = 0.999f, t.rest2 = 0.001f, t.bias = 1.0f, t.eps = 1e-8f, t.grad_scale = 1.0f;
    t.grad = grad_dtype ? (void *)grad_16.data : (void *)grad_32.data;
    t.weight = weight_dtype ? (void *)weight_16.data : (void *)weight_32.data;
    t.remainder = remainder ? low.data : nullptr;
    t.momentum_trits[0] = momentum.data, t.momentum_scale[0] = scale.data;
    t.momentum_trits[1] = second.data, t.momentum_scale[1] = second_scale.data;
    t.variance_trits = variance.data, t.variance_level = level.data, t.variance_step = step.data;
    t.carry_rows = carry_rows.data, t.carry_columns = carry_columns.data, t.carry_basis = carry_basis.data;
    t.basis = basis.data, t.column_means = column_means.data, t.new_column_means = new_means.data;

    const LeantuneTernary *parameters[] = {&t, &t};
    leantune_ternary_squares(&t, squares.data);
    for (int kind = 0; kind < 4; kind++) {
        t.refresh = kind & 1, t.sampled = kind >> 1;
        leantune_ternary_step(&t, products.data);
        leantune_update(parameters, 2);
    }
    t.block = (int)(cols < 128 ? cols : 128);
    t.exact_momentum = exact_momentum.data, t.exact_variance = exact_variance.data;
    leantune_update(parameters, 1);
    if (weight_dtype) leantune_store(&t, grad_32.data, 0, rows, 0, cols);
    if (weight_dtype && cols > t.block) leantune_store(&t, grad_32.data, rows - 1, 1, t.block, cols - t.block);
    float sum;
    leantune_sums_of_squares(&t.grad, &t.grad_dtype, &count, 1, 1, &sum);
}

int main() {
    const int64_t shapes[][2] = {{1, 16}, {1, 640}, {5, 17}, {3, 130}, {7, 641}, {9, 1}, {4, 127}, {13, 576}, {2, 1281}, {6, 2100}, {3, 9000}};
    for (auto &shape : shapes)
        for (int rank : {0, 1, 4, 5})
            for (int planes : {1, 2})
                for (int block : {16, 64, 128, 240})
                    for (int grad : {LEANTUNE_FLOAT32, LEANTUNE_BFLOAT16})
                        for (int weight : {LEANTUNE_FLOAT32, LEANTUNE_BFLOAT16})
                            for (int rounding = 0; rounding < (weight == LEANTUNE_BFLOAT16 ? 3 : 1); rounding++)
                                run(shape[0], shape[1], rank, planes, block, grad, weight, rounding == 1, rounding == 2);
    std::puts("nothing outside its bounds");
    return 0;
}
