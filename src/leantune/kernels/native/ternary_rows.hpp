// One step of a ternary parameter, row by row. Included once per instruction set, inside a namespace of its own, by
// ternary.cpp; the code is the same for all. It is compiled without contraction of a * b + c and every sum over a block
// runs in the same 16 lanes, so all instruction sets give the same bits.
//
// The decisions (what is rounded, when, from which stored value) are those of leantune/codec and
// leantune/optim/ternary_adamw.py, which say why.

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16)));

// Sixteen partial sums, as two vectors of eight: one of sixteen would live in memory where registers hold eight.
struct Lanes {
    Eight low, high;
    Lanes() : low{}, high{} {}
    float reduce() const {
        const Eight both = low + high;
        const Four half = Four{both[0], both[1], both[2], both[3]} + Four{both[4], both[5], both[6], both[7]};
        return (half[0] + half[2]) + (half[1] + half[3]);
    }
};

static inline float from_bf16(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline const Eight &eight(const float *x) { return *(const Eight *)x; }

static inline float sum(const float *x, int n) {
    Lanes total;
    for (int i = 0; i < n; i += 16) {
        total.low += eight(x + i);
        total.high += eight(x + i + 8);
    }
    return total.reduce();
}

static inline float dot(const float *x, const float *y, int64_t n) {
    Lanes total;
    for (int64_t i = 0; i < n; i += 16) {
        total.low += eight(x + i) * eight(y + i);
        total.high += eight(x + i + 8) * eight(y + i + 8);
    }
    return total.reduce();
}

static inline float sum_of_squares(const float *x, int n) { return dot(x, x, n); }

// Byte i of a group of n trits holds the trits i, i + p, ... i + 4p as digits of base 3, p = ceil(n / 5).
static void unpack(const uint8_t *__restrict packed, int n, float *__restrict trits, int padded) {
    const int p = (n + 4) / 5;
    float *__restrict first = trits, *__restrict second = trits + p, *__restrict third = second + p, *__restrict fourth = third + p,
                *__restrict fifth = fourth + p;
    for (int i = 0; i < p; i++) {  // (b * 171) >> 9 is b / 3, exact below 256
        const int32_t b0 = packed[i], b1 = (b0 * 171) >> 9, b2 = (b1 * 171) >> 9, b3 = (b2 * 171) >> 9,
                      b4 = (b3 * 171) >> 9;
        first[i] = (float)(b0 - 3 * b1 - 1);
        second[i] = (float)(b1 - 3 * b2 - 1);
        third[i] = (float)(b2 - 3 * b3 - 1);
        fourth[i] = (float)(b3 - 3 * b4 - 1);
        fifth[i] = (float)(b4 - 1);
    }
    for (int i = n; i < padded; i++) trits[i] = 0.0f;
}

static void pack(const float *__restrict trits, int n, uint8_t *__restrict packed) {
    const int p = (n + 4) / 5;
    if (n == 5 * p) {
        const float *first = trits, *second = trits + p, *third = second + p, *fourth = third + p, *fifth = fourth + p;
        for (int i = 0; i < p; i++) {
            const float value = (((fifth[i] * 3.0f + fourth[i]) * 3.0f + third[i]) * 3.0f + second[i]) * 3.0f + first[i];
            packed[i] = (uint8_t)(int32_t)(value + 121.0f);
        }
        return;
    }
    for (int i = 0; i < p; i++) {  // absent trits are digit 0, that is -1
        float value = 0.0f;
        for (int k = 4; k >= 0; k--) value = value * 3.0f + (k * p + i < n ? trits[k * p + i] : -1.0f);
        packed[i] = (uint8_t)(int)(value + 121.0f);
    }
}

static void load(const void *matrix, int dtype, int64_t offset, int64_t stride, int n, float *__restrict out) {
    if (stride != 1) {
        for (int i = 0; i < n; i++, offset += stride)
            out[i] = dtype == LEANTUNE_FLOAT32 ? ((const float *)matrix)[offset] : from_bf16(((const uint16_t *)matrix)[offset]);
        return;
    }
    if (dtype == LEANTUNE_FLOAT32) {
        std::memcpy(out, (const float *)matrix + offset, sizeof(float) * n);
        return;
    }
    const uint16_t *__restrict in = (const uint16_t *)matrix + offset;
    uint32_t *__restrict bits = (uint32_t *)out;
    for (int i = 0; i < n; i++) bits[i] = (uint32_t)in[i] << 16;
}

// bits of element i of a block: mix32(key ^ i * golden), the counter hash of codec/counter_hash.py.
static void random_bits(uint64_t key, int64_t row, int64_t block, int size, uint32_t *__restrict out) {
    const uint32_t seed = (uint32_t)splitmix64(splitmix64((uint64_t)row ^ key) ^ (uint64_t)block);
    for (int i = 0; i < size; i++) {
        uint32_t x = seed ^ ((uint32_t)i * 0x9E3779B9u);
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        out[i] = x ^ (x >> 16);
    }
}

// A group: five neighbouring blocks of a row (the last of a row fewer), decoded into fp32.
struct Group {
    int n, padded, blocks, block;
    int64_t row, left, first_block, bytes;  // left: first column; bytes: offset of its trits in the state's row
    float *grad, *decoded, *u, *v, *x, *q, *work;
    uint32_t *bits;
};

// y += factor * x
static inline void add_scaled(float *__restrict y, float factor, const float *__restrict x, int n) {
    for (int i = 0; i < n; i++) y[i] += factor * x[i];
}

// y += f0 row0 + f1 row1 + f2 row2 + f3 row3, in this order.
static void add_four(float *__restrict y, const float *factors, int stride, const float *__restrict rows, int64_t wide,
                     int64_t n) {
    const float f0 = factors[0], f1 = factors[stride], f2 = factors[2 * stride], f3 = factors[3 * stride];
    const float *r0 = rows, *r1 = rows + wide, *r2 = r1 + wide, *r3 = r2 + wide;
    for (int64_t i = 0; i < n; i++) y[i] = (((y[i] + f0 * r0[i]) + f1 * r1[i]) + f2 * r2[i]) + f3 * r3[i];
}

static inline void scale(float *y, float factor, int n) {
    for (int i = 0; i < n; i++) y[i] *= factor;
}

static inline void fill(float *y, float value, int from, int to) {
    for (int i = from; i < to; i++) y[i] = value;
}

// C = U V^T of this group, 0 without a carry.
static void carried_part(const LeantuneTernary *t, const Group &g, const uint16_t *rows, const float *columns,
                         float *__restrict out) {
    fill(out, 0.0f, 0, g.padded);
    if (!rows) return;
    const uint16_t *row = rows + g.row * t->rank;
    const float *column = columns + g.left;
    int k = 0;
    for (; k + 4 <= t->rank; k += 4, column += 4 * t->cols) {
        const float factors[4] = {from_bf16(row[k]), from_bf16(row[k + 1]), from_bf16(row[k + 2]), from_bf16(row[k + 3])};
        add_four(out, factors, 1, column, t->cols, g.n);
    }
    for (; k < t->rank; k++, column += t->cols) add_scaled(out, from_bf16(row[k]), column, g.n);
}

// L(f) of n elements of a row, f = row factor * column factor within [2^-126, 2^60].
static void factor_patterns(float row, const float *__restrict columns, int32_t *__restrict pattern, int n) {
    float *__restrict factor = (float *)pattern;
    for (int i = 0; i < n; i++) {
        const float f = row * columns[i];
        factor[i] = f > TINY ? f < 1152921504606846976.0f ? f : 1152921504606846976.0f : TINY;
    }
}

// v = f times the ratio that level, step and trits say; `pattern` holds L(f).
static void decode_variance(float *__restrict out, const float *__restrict x, int size, uint16_t level, uint16_t step,
                            const int32_t *__restrict factors) {
    const int32_t centre = (int32_t)((uint32_t)level << 16), octaves = (int32_t)(from_bf16(step) * OCTAVE);
    int32_t *__restrict pattern = (int32_t *)out;
    for (int i = 0; i < size; i++) {
        int32_t ratio = (int32_t)x[i] * octaves + centre;
        ratio = (ratio > SMALLEST ? ratio : SMALLEST) - ONE;
        ratio = ratio > -2 * REACH ? ratio < 2 * REACH ? ratio : 2 * REACH : -2 * REACH;
        ratio += factors[i];
        pattern[i] = ratio > SMALLEST ? ratio : SMALLEST;
    }
}

// v becomes its ratio to f; `factors` holds L(f).
static void divide(float *__restrict v, const int32_t *__restrict factors, int n) {
    int32_t *__restrict pattern = (int32_t *)v;
    for (int i = 0; i < n; i++) {
        int32_t ratio = (pattern[i] > SMALLEST ? pattern[i] : SMALLEST) - factors[i];
        ratio = ratio > -REACH ? ratio < REACH ? ratio : REACH : -REACH;
        pattern[i] = ratio + ONE;
    }
}

static void rule(const LeantuneTernary *t, const float *__restrict grad, float *__restrict u, float *__restrict v, int n) {
    const float beta2 = t->beta2, rest2 = t->rest2, bias = t->bias, eps = t->eps, rest1 = t->rest1;
    for (int i = 0; i < n; i++) {
        const float next = v[i] * beta2 + rest2 * grad[i] * grad[i];
        const float normalised = grad[i] / (__builtin_sqrtf(next * bias) + eps);
        u[i] += rest1 * (normalised - u[i]);
        v[i] = next;
    }
}

// u, v and x of the group from the stored state and the gradient.
static void apply_rule(const LeantuneTernary *t, const Group &g) {
    load(t->grad, t->grad_dtype, g.row * t->grad_row + g.left * t->grad_column, t->grad_column, g.n, g.grad);
    fill(g.grad, 0.0f, g.n, g.padded);
    if (t->grad_scale != 1.0f) scale(g.grad, t->grad_scale, g.padded);
    carried_part(t, g, t->carry_rows, t->carry_columns, g.u);
    for (int plane = 0; plane < t->planes; plane++) {
        unpack(t->momentum_trits[plane] + g.bytes, g.n, g.q, g.padded);
        for (int b = 0; b < g.blocks; b++)
            add_scaled(g.u + b * g.block, from_bf16(t->momentum_scale[plane][g.first_block + b]), g.q + b * g.block, g.block);
    }
    unpack(t->variance_trits + g.bytes, g.n, g.x, g.padded);
    int32_t *factors = (int32_t *)g.work;
    factor_patterns(t->row_factors[g.row], t->column_factors + g.left, factors, g.n);
    for (int i = g.n; i < g.padded; i++) factors[i] = ONE;
    for (int b = 0; b < g.blocks; b++)
        decode_variance(g.v + b * g.block, g.x + b * g.block, g.block, t->variance_level[g.first_block + b],
                        t->variance_step[g.first_block + b], factors + b * g.block);
    rule(t, g.grad, g.u, g.v, g.padded);
    fill(g.v, 0.0f, g.n, g.padded);
}

static inline float deviation(const float *x, int size, float count) {
    const float mean = sum(x, size) / count, square = sum_of_squares(x, size) / count - mean * mean;
    return __builtin_sqrtf(square > 0.0f ? square : 0.0f);
}

// offset = L(v) - L(v[0]) in octaves, v floored.
static void log_offsets(const float *__restrict v, float least, float *__restrict offset, int size, int32_t *first) {
    int32_t *__restrict pattern = (int32_t *)offset;
    for (int i = 0; i < size; i++) offset[i] = v[i] > least ? v[i] : least;
    const int32_t start = pattern[0];
    for (int i = 0; i < size; i++) offset[i] = (float)(pattern[i] - start) * (1.0f / OCTAVE);
    *first = start;
}

// x = floor(clamp(offset / d, -1, 1) + uniform), uniform from the low 16 bits.
static void round_trits(const float *__restrict offset, float inverse, const uint32_t *__restrict bits, float *__restrict x, int size) {
    for (int i = 0; i < size; i++) {
        float y = offset[i] * inverse;
        y = y > -1.0f ? y : -1.0f;
        y = y < 1.0f ? y : 1.0f;
        y += (float)(int32_t)(bits[i] & 0xFFFF) * (1.0f / 65536.0f);
        x[i] = (float)(int32_t)(y + 1.0f) - 1.0f;  // y + 1 lies in [0, 3): truncation is floor
    }
}

// sum min(v, the float of this pattern).
static float sum_up_to(const float *__restrict v, int32_t pattern, float *__restrict work, int size) {
    float cap;
    std::memcpy(&cap, &pattern, sizeof cap);
    for (int i = 0; i < size; i++) work[i] = v[i] < cap ? v[i] : cap;
    return sum(work, size);
}

// The ratios v / f of one block into its level, step and trits (written over x).
static void encode_variance(const float *v, float *x, float *offset, const uint32_t *bits, int size, int present,
                            uint16_t *level, uint16_t *step) {
    const float count = (float)present, total = sum(v, size), mean = total / count;
    if (!(mean > EMPTY)) {
        *level = *step = 0;
        fill(x, 0.0f, 0, size);
        return;
    }
    const float share = mean * (1.0f / 1024.0f);
    int32_t first;
    log_offsets(v, share > TINY ? share : TINY, offset, size, &first);
    fill(offset, 0.0f, present, size);
    const int64_t centre = (int64_t)first + (int64_t)(sum(offset, size) / count * OCTAVE);
    int64_t upper = (centre + (1 << 15)) >> 16;
    if (upper > LARGEST_LEVEL) upper = LARGEST_LEVEL;
    const float shift = (float)((upper << 16) - first) * (1.0f / OCTAVE);
    for (int i = 0; i < size; i++) offset[i] -= shift;
    fill(offset, 0.0f, present, size);
    const float previous = from_bf16(*step);
    float next;
    if (previous == 0.0f) {
        next = deviation(offset, size, count) * 1.22f;
    } else {
        const float mean = sum(offset, size) / count, old_mean = sum(x, size) / count;
        const float shared = dot(offset, x, size) / count - mean * old_mean;
        const float old = sum_of_squares(x, size) / count - old_mean * old_mean;
        next = old > 0.0f ? shared / old : previous;
    }
    next = next < 0.05f ? 0.05f : next > 8.0f ? 8.0f : next;
    *step = to_bf16(next);
    *level = (uint16_t)upper;
    round_trits(offset, 1.0f / from_bf16(*step), bits, x, size);
    fill(x, 0.0f, present, size);
    // The level rises by what lies beyond it and its step, where that is much: what is cut off would compound.
    const int64_t reach = (int64_t)(upper << 16) + (int32_t)(from_bf16(*step) * OCTAVE);
    const float kept = sum_up_to(v, (int32_t)(reach > SMALLEST ? reach : SMALLEST), offset, size);
    int32_t wanted_bits, kept_bits;
    std::memcpy(&wanted_bits, &total, sizeof total);
    std::memcpy(&kept_bits, &kept, sizeof kept);
    const int64_t missing = ((int64_t)wanted_bits - kept_bits + (1 << 15)) >> 16;
    if (missing >= LEAST_RAISE) *level = (uint16_t)(upper + missing > LARGEST_LEVEL ? LARGEST_LEVEL : upper + missing);
}

static void choose_trits(const float *__restrict residual, float threshold, float *__restrict q, int size) {
    for (int i = 0; i < size; i++) {
        const float r = residual[i];
        q[i] = (r > threshold ? 1.0f : 0.0f) - (r < -threshold ? 1.0f : 0.0f);
    }
}

// T(residual) of one block: its trits into q; returns the stored scale.
static float encode_momentum(const float *residual, float *q, int size, int present, uint16_t *scale) {
    choose_trits(residual, __builtin_sqrtf(sum_of_squares(residual, size) / (float)present) * 0.612f, q, size);
    const float chosen = sum_of_squares(q, size);
    *scale = to_bf16(dot(residual, q, size) / (chosen > 1.0f ? chosen : 1.0f));
    return from_bf16(*scale);
}

static inline void move(float *__restrict w, const float *__restrict step, float decay, float lr, int n) {
    for (int i = 0; i < n; i++) w[i] = w[i] * decay - lr * step[i];
}

static void store_bf16(const uint32_t *__restrict pattern, const uint32_t *__restrict bits, uint16_t *__restrict weight, int n) {
    for (int i = 0; i < n; i++) weight[i] = (uint16_t)((pattern[i] + (bits[i] >> 16)) >> 16);
}

static void store_bf16_nearest(const float *__restrict values, uint16_t *__restrict weight, int n) {
    for (int i = 0; i < n; i++) weight[i] = to_bf16(values[i]);
}

// The nearest bf16 and an 8-bit remainder; `keep` masks the random bits, `half` rounds to nearest instead.
static void store_24(const uint32_t *__restrict pattern, const uint32_t *__restrict bits, uint32_t keep, uint32_t half,
                     uint16_t *__restrict weight, int8_t *__restrict remainder, int n) {
    for (int i = 0; i < n; i++) {
        const uint32_t noise = ((bits[i] >> 16) & keep) + half;
        const int32_t units = (int32_t)(pattern[i] + noise) >> 8, high = (units + 128) >> 8;
        weight[i] = (uint16_t)high;
        remainder[i] = (int8_t)(units - high * 256);
    }
}

static void add_remainder(uint32_t *__restrict pattern, const int8_t *__restrict remainder, int n) {
    for (int i = 0; i < n; i++) pattern[i] += (uint32_t)(int32_t)remainder[i] << 8;
}

static void write_weight(const LeantuneTernary *t, const Group &g, const float *step) {
    const int64_t offset = g.row * t->cols + g.left;
    if (t->weight_dtype == LEANTUNE_FLOAT32) {
        move((float *)t->weight + offset, step, t->decay, t->lr, g.n);
        return;
    }
    uint16_t *weight = (uint16_t *)t->weight + offset;
    uint32_t *pattern = (uint32_t *)g.work;
    load(t->weight, t->weight_dtype, offset, 1, g.n, g.work);
    if (t->remainder) add_remainder(pattern, t->remainder + offset, g.n);
    move(g.work, step, t->decay, t->lr, g.n);
    if (t->remainder)
        store_24(pattern, g.bits, t->stochastic ? 0xFF : 0, t->stochastic ? 0 : 128, weight, t->remainder + offset, g.n);
    else if (t->stochastic)
        store_bf16(pattern, g.bits, weight, g.n);
    else
        store_bf16_nearest(g.work, weight, g.n);
}

static inline void subtract(float *__restrict out, const float *__restrict a, const float *__restrict b, int n) {
    for (int i = 0; i < n; i++) out[i] = a[i] - b[i];
}

// u becomes the step: (u - beta1 u_q) / (1 - beta1).
static inline void release(float *__restrict u, const float *__restrict decoded, float beta1, float factor, int n) {
    for (int i = 0; i < n; i++) u[i] = (u[i] - beta1 * decoded[i]) * factor;
}

// The second pass over a group: encode v, and u against the new carry; move the weights.
static void finish_group(const LeantuneTernary *t, const Group &g) {
    apply_rule(t, g);
    factor_patterns(t->new_row_factors[g.row], t->new_column_factors + g.left, (int32_t *)g.work, g.n);
    divide(g.v, (const int32_t *)g.work, g.n);
    for (int b = 0; b < g.blocks; b++) {
        const int at = b * g.block, present = g.n - at < g.block ? g.n - at : g.block;
        random_bits(t->key, t->first_row + g.row, g.left / g.block + b, g.block, g.bits + at);
        encode_variance(g.v + at, g.x + at, g.work, g.bits + at, g.block, present, t->variance_level + g.first_block + b,
                        t->variance_step + g.first_block + b);
    }
    pack(g.x, g.n, t->variance_trits + g.bytes);
    carried_part(t, g, t->new_rows, t->new_columns, g.decoded);
    for (int plane = 0; plane < t->planes; plane++) {
        subtract(g.work, g.u, g.decoded, g.padded);
        for (int b = 0; b < g.blocks; b++) {
            const int at = b * g.block, present = g.n - at < g.block ? g.n - at : g.block;
            const float s =
                encode_momentum(g.work + at, g.q + at, g.block, present, t->momentum_scale[plane] + g.first_block + b);
            add_scaled(g.decoded + at, s, g.q + at, g.block);
        }
        pack(g.q, g.n, t->momentum_trits[plane] + g.bytes);
    }
    release(g.u, g.decoded, t->beta1, t->release, g.padded);
    write_weight(t, g, g.u);
}

struct Scratch {
    std::vector<float> memory;
    Group group;
    Scratch(const LeantuneTernary *t) : memory(8 * (size_t)(5 * t->block)) {
        float *at = memory.data();
        for (float **place : {&group.grad, &group.decoded, &group.u, &group.v, &group.x, &group.q, &group.work})
            *place = at, at += 5 * t->block;
        group.bits = (uint32_t *)at;
        group.block = t->block;
    }
    void move_to(const LeantuneTernary *t, int64_t row, int64_t left) {
        const int64_t wide = 5 * (int64_t)t->block, rest = t->cols - left;
        group.row = row;
        group.left = left;
        group.n = (int)(rest < wide ? rest : wide);
        group.blocks = (group.n + t->block - 1) / t->block;
        group.padded = group.blocks * t->block;
        group.first_block = row * t->blocks_per_row + left / t->block;
        group.bytes = row * t->bytes_per_row + left / 5;
    }
};

static void step_rows(const LeantuneTernary *t, int64_t top, int64_t bottom) {
    Scratch scratch(t);
    for (int64_t row = top; row < bottom; row++)
        for (int64_t left = 0; left < t->cols; left += 5 * t->block) {
            scratch.move_to(t, row, left);
            finish_group(t, scratch.group);
        }
}

// rows[r] = sum g^2 of row r, columns += g^2, for rows [top, bottom).
static void square_rows(const LeantuneTernary *t, int64_t top, int64_t bottom, float *rows, double *columns) {
    const int64_t wide = 5 * (int64_t)t->block;
    std::vector<float> scratch(wide);
    float *__restrict square = scratch.data();
    for (int64_t row = top; row < bottom; row++) {
        float total = 0.0f;
        for (int64_t left = 0; left < t->cols; left += wide) {
            const int n = (int)(t->cols - left < wide ? t->cols - left : wide), padded = (n + 15) / 16 * 16;
            load(t->grad, t->grad_dtype, row * t->grad_row + left * t->grad_column, t->grad_column, n, square);
            fill(square, 0.0f, n, padded);
            const float factor = t->grad_scale;
            double *__restrict column = columns + left;
            for (int i = 0; i < padded; i++) square[i] = (square[i] * factor) * (square[i] * factor);
            for (int i = 0; i < n; i++) column[i] += (double)square[i];
            total += sum(square, padded);
        }
        rows[row] = total;
    }
}

// <row, direction> for four rows of `wide` elements.
static void dot_four(const float *rows, int64_t wide, const float *direction, float *out, int stride) {
    Lanes total[4];
    for (int64_t i = 0; i < wide; i += 16) {
        const Eight low = eight(direction + i), high = eight(direction + i + 8);
        for (int r = 0; r < 4; r++) {
            total[r].low += eight(rows + r * wide + i) * low;
            total[r].high += eight(rows + r * wide + i + 8) * high;
        }
    }
    for (int r = 0; r < 4; r++) out[r * stride] = total[r].reduce();
}

// Rows [top, bottom) of the power iteration: product = u V, columns += u^T product, gram += product^T product. Rows go
// four at a time, so that the basis and the sums, which no first cache holds, are walked a quarter as often.
static void momentum_rows(const LeantuneTernary *t, int64_t top, int64_t bottom, const float *basis, float *product,
                          float *columns, double *gram) {
    Scratch scratch(t);
    const int rank = t->rank;
    const int64_t wide = (t->cols + 15) / 16 * 16, most = wide <= 16384 ? 4 : 1;
    std::vector<float> whole(most * wide);
    for (int64_t first = top; first < bottom; first += most) {
        const int64_t count = bottom - first < most ? bottom - first : most;
        for (int64_t r = 0; r < count; r++)
            for (int64_t left = 0; left < t->cols; left += 5 * t->block) {
                scratch.move_to(t, first + r, left);
                apply_rule(t, scratch.group);
                std::memcpy(whole.data() + r * wide + left, scratch.group.u, sizeof(float) * scratch.group.n);
            }
        float *mine = product + first * rank;
        for (int k = 0; k < rank; k++) {
            const float *direction = basis + k * wide;
            float *column = columns + k * t->cols;
            if (count == 4) {
                dot_four(whole.data(), wide, direction, mine + k, rank);
                add_four(column, mine + k, rank, whole.data(), wide, t->cols);
            } else {
                for (int64_t r = 0; r < count; r++) {
                    mine[r * rank + k] = dot(whole.data() + r * wide, direction, wide);
                    add_scaled(column, mine[r * rank + k], whole.data() + r * wide, (int)t->cols);
                }
            }
        }
        for (int64_t r = 0; r < count; r++)
            for (int k = 0; k < rank; k++)
                for (int l = 0; l < rank; l++)
                    gram[k * rank + l] += (double)mine[r * rank + k] * (double)mine[r * rank + l];
    }
}
