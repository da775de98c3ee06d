// One step of a ternary parameter, a panel of rows at a time. Included once per instruction set, inside a namespace of
// its own, by ternary.cpp, after simd.hpp; the code is the same for all. Sums over a block run in the same sixteen lanes
// everywhere, so sets that fuse multiplication and addition give the same bits as each other.
//
// The decisions (what is rounded, when, from which stored value) are those of leantune/codec and
// leantune/optim/ternary_adamw.py, which say why.

INLINE float from_bf16(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE float from_pattern(int64_t pattern) {
    const int32_t bits = (int32_t)(pattern > 0 ? pattern : 0);
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE int32_t pattern_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = (uint32_t)pattern_of(value);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline void fill(float *x, float value, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) x[i] = value;
}

// Byte i of a group of n trits holds the trits i, i + p, ... i + 4p as digits 0, 1, 2 of base 3, p = ceil(n / 5). What
// is absent becomes digit 1, trit 0.
static void unpack(const uint8_t *__restrict packed, int n, uint8_t *__restrict digits, int padded) {
    const int p = (n + 4) / 5;
    uint8_t *__restrict first = digits, *__restrict second = digits + p, *__restrict third = second + p,
                       *__restrict fourth = third + p, *__restrict fifth = fourth + p;
    for (int i = 0; i < p; i++) {  // (b * 171) >> 9 is b / 3, exact below 256
        const uint16_t b0 = packed[i], b1 = (uint16_t)(b0 * 171) >> 9, b2 = (uint16_t)(b1 * 171) >> 9,
                       b3 = (uint16_t)(b2 * 171) >> 9, b4 = (uint16_t)(b3 * 171) >> 9;
        first[i] = (uint8_t)(b0 - 3 * b1);
        second[i] = (uint8_t)(b1 - 3 * b2);
        third[i] = (uint8_t)(b2 - 3 * b3);
        fourth[i] = (uint8_t)(b3 - 3 * b4);
        fifth[i] = (uint8_t)b4;
    }
    for (int i = n; i < padded; i++) digits[i] = 1;
}

// The inverse; absent trits are digit 0. Writes up to four digits behind the n.
static void pack(uint8_t *__restrict digits, int n, uint8_t *__restrict packed) {
    const int p = (n + 4) / 5;
    for (int i = n; i < 5 * p; i++) digits[i] = 0;
    const uint8_t *first = digits, *second = digits + p, *third = second + p, *fourth = third + p, *fifth = fourth + p;
    for (int i = 0; i < p; i++) {
        uint8_t value = (uint8_t)(fifth[i] + fifth[i] + fifth[i] + fourth[i]);
        value = (uint8_t)(value + value + value + third[i]);
        value = (uint8_t)(value + value + value + second[i]);
        packed[i] = (uint8_t)(value + value + value + first[i]);
    }
}

// WIDTH elements in fp32.
INLINE Floats read(const float *x) { return load(x); }
INLINE Floats read(const uint16_t *x) { return (Floats)(widen(x) << 16); }
INLINE float read_one(const float *x) { return *x; }
INLINE float read_one(const uint16_t *x) { return from_bf16(*x); }

// n elements of a row in fp32.
template <class Element> static void read_row(const Element *__restrict in, int64_t stride, int64_t n, float *__restrict out) {
    int64_t i = 0;
    if (stride == 1)
        for (; i + WIDTH <= n; i += WIDTH) store(out + i, read(in + i));
    for (; i < n; i++) out[i] = read_one(in + i * stride);
}

static void read_row(const void *matrix, int dtype, int64_t offset, int64_t stride, int64_t n, float *out) {
    if (dtype == LEANTUNE_FLOAT32)
        read_row((const float *)matrix + offset, stride, n, out);
    else
        read_row((const uint16_t *)matrix + offset, stride, n, out);
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

// What belongs to the columns, worked out once for all rows. Behind the last column everything is 0.
struct Columns {
    int64_t wide, span;              // columns, rounded up to whole blocks and to sixteen
    std::vector<float> memory;
    float *times, *over, *units;     // f of the stored v; 1 / f of the new; 1 / OCTAVE in live columns
    float *carried, *basis;          // V^T of the stored carry and of this step, (rank, wide)
    float *count;                    // live elements of each block, 1 at least

    Columns(const LeantuneTernary *t)
        : wide(t->blocks_per_row * t->block), span((t->cols + 15) / 16 * 16), memory((size_t)((3 + 2 * t->rank) * wide + t->blocks_per_row)) {
        times = memory.data();
        over = times + wide;
        units = over + wide;
        carried = units + wide;
        basis = carried + t->rank * wide;
        count = basis + t->rank * wide;
        relative(t->column_means, t->cols, times);
        relative(t->new_column_means, t->cols, over);
        for (int64_t j = 0; j < t->cols; j++) {
            units[j] = over[j] > 0.0f ? 1.0f / OCTAVE : 0.0f;
            count[j / t->block] += over[j] > 0.0f ? 1.0f : 0.0f;
            over[j] = over[j] > 0.0f ? 1.0f / over[j] : 0.0f;
        }
        for (int64_t b = 0; b < t->blocks_per_row; b++) count[b] = count[b] > 1.0f ? count[b] : 1.0f;
        for (int k = 0; k < t->rank; k++)
            for (int64_t j = 0; j < t->cols; j++) {
                carried[k * wide + j] = from_bf16(t->carry_columns[j * t->rank + k]);
                basis[k * wide + j] = units[j] > 0.0f ? from_bf16(t->basis[j * t->rank + k]) : 0.0f;
            }
    }

    // c / mean(c), at least LEAST_FACTOR; 0 where c is.
    static void relative(const float *means, int64_t cols, float *out) {
        double sum = 0.0;
        for (int64_t j = 0; j < cols; j++) sum += means[j];
        const float mean = (float)(sum / (double)cols);
        for (int64_t j = 0; j < cols; j++) {
            const float share = means[j] / mean;
            out[j] = means[j] > 0.0f ? (share > LEAST_FACTOR ? share : LEAST_FACTOR) : 0.0f;
        }
    }
};

// Memory of this thread that outlives the call: giving it back each time would have the system clear it each time.
template <class Number> static Number *kept(size_t size) {
    static thread_local std::vector<Number> memory;
    if (memory.size() < size) memory.resize(size);
    return memory.data();
}

// Up to four rows between their decoding and their encoding, (4, wide) each, and scratch for one group: five
// neighbouring blocks of a row (the last of a row fewer), whose trits share bytes.
struct Panel {
    int64_t wide;
    int rows;  // that fit: four, or fewer where four would leave the caches
    float *u, *ratio, *residual, *offset, *work, *second_work;
    uint32_t *bits;
    uint8_t *old_trits, *trits, *second;

    Panel(const LeantuneTernary *t, const Columns &columns) : wide(columns.wide), rows(columns.wide <= 2048 ? 4 : columns.wide <= 8192 ? 2 : 1) {
        const int64_t group = 5 * (int64_t)t->block + 16, size = rows * wide;
        u = kept<float>((size_t)((t->rank ? 3 : 2) * size + 4 * group));
        ratio = u + size;
        residual = t->rank ? ratio + size : u;  // without a carry the residual is u itself, until a plane is taken off
        offset = ratio + size * (t->rank ? 2 : 1);
        work = offset + group;
        second_work = work + group;
        bits = (uint32_t *)(second_work + group);
        old_trits = kept<uint8_t>((size_t)(size + 3 * group));
        trits = old_trits + size + group;  // unpack() writes up to four digits behind the last
        second = trits + group;
    }
};

struct Group {
    int n, blocks, padded;
    int64_t row, left, first_block, bytes;  // left: first column; bytes: offset of its trits in the state's rows
    Group(const LeantuneTernary *t, int64_t row, int64_t left) : row(row), left(left) {
        const int64_t wide = 5 * (int64_t)t->block, rest = t->cols - left;
        n = (int)(rest < wide ? rest : wide);
        blocks = (n + t->block - 1) / t->block;
        padded = (n + 15) / 16 * 16;
        first_block = row * t->blocks_per_row + left / t->block;
        bytes = row * t->bytes_per_row + left / 5;
    }
    int present(const LeantuneTernary *t, int b) const { return n - b * t->block < t->block ? n - b * t->block : t->block; }
    int used(const LeantuneTernary *t, int b) const { return (present(t, b) + 15) / 16 * 16; }
};

// -- decode and rule --------------------------------------------------------------------------------------------------

// u = beta1 U V^T of a row, for what the trits and the gradient are added to. `mine`: beta1 U.
static void start_from_carry(const Columns &columns, const float *mine, int rank, float *__restrict u) {
    for (int k = 0; k < rank; k++) {
        const Floats factor = all(mine[k]);
        const float *column = columns.carried + k * columns.wide;
        for (int64_t i = 0; i < columns.span; i += WIDTH)
            store(u + i, k ? fma(factor, load(column + i), load(u + i)) : factor * load(column + i));
    }
}

// u += beta1 s q, for the second momentum plane of a block.
static void add_plane(const uint8_t *digits, float scale, float *u, int size) {
    const Table table(-scale, 0.0f, scale);
    for (int i = 0; i < size; i += WIDTH) store(u + i, load(u + i) + pick(table, widen(digits + i)));
}

// What of a block's state the rule reads.
struct Stored {
    const uint8_t *momentum, *variance;  // digits
    float scale;
    uint16_t level, step;
};

// Where beta1 C of a block comes from: nowhere, from four products of U and V, or from `u`, where it already is.
enum Carry { NONE, FOUR, READY };

struct Carried {
    const float *row, *columns;  // beta1 U of the row, (rank); V^T from the block's first column on
    int64_t wide;
};

// A block's v and u of this step from what is stored and the gradient: u is left in `u`, v / f in `ratio`; returns the
// sum of the latter.
template <Carry CARRY, class Element>
static float rule(const LeantuneTernary *t, const Element *grad, const Stored &stored, const Carried &carried,
                  const float *times, const float *over, float *u, float *ratio, int size) {
    const int32_t centre = (int32_t)((uint32_t)stored.level << 16), octaves = (int32_t)(from_bf16(stored.step) * OCTAVE);
    const Table old_u(-t->beta1 * stored.scale, 0.0f, t->beta1 * stored.scale);
    const Table old_v(t->beta2 * from_pattern((int64_t)centre - octaves), t->beta2 * from_pattern(centre),
                      t->beta2 * from_pattern((int64_t)centre + octaves));
    const Floats rest1 = all(t->rest1), rest2 = all(t->rest2), bias = all(__builtin_sqrtf(t->bias)), eps = all(t->eps),
                 factor = all(t->grad_scale);
    Floats of_carry[4];
    if (CARRY == FOUR)
        for (int k = 0; k < 4; k++) of_carry[k] = all(carried.row[k]);
    Sum sum;
    for (int i = 0; i < size; i += 16)
        for (int p = 0; p < PARTS; p++) {
            const int at = i + p * WIDTH;
            const Floats g = read(grad + at) * factor;
            const Floats v = fma(pick(old_v, widen(stored.variance + at)), load(times + at), rest2 * g * g);
            Floats before = pick(old_u, widen(stored.momentum + at));
            if (CARRY == FOUR)
                for (int k = 0; k < 4; k++) before = fma(of_carry[k], load(carried.columns + k * carried.wide + at), before);
            if (CARRY == READY) before += load(u + at);
            store(u + at, fma(g / fma(root(v), bias, eps), rest1, before));
            const Floats relative = v * load(over + at);
            store(ratio + at, relative);
            sum.part[p] += relative;
        }
    return total(sum);
}

template <Carry CARRY>
static float rule(const LeantuneTernary *t, int64_t offset, int present, const Stored &stored, const Carried &carried,
                  const float *times, const float *over, float *work, float *u, float *ratio) {
    const int used = (present + 15) / 16 * 16;
    if (t->grad_column == 1 && present == used) {
        if (t->grad_dtype == LEANTUNE_FLOAT32)
            return rule<CARRY>(t, (const float *)t->grad + offset, stored, carried, times, over, u, ratio, used);
        return rule<CARRY>(t, (const uint16_t *)t->grad + offset, stored, carried, times, over, u, ratio, used);
    }
    read_row(t->grad, t->grad_dtype, offset, t->grad_column, present, work);
    fill(work, 0.0f, present, used);
    return rule<CARRY>(t, (const float *)work, stored, carried, times, over, u, ratio, used);
}

// -- the second moment's encoding -------------------------------------------------------------------------------------

// What is found out about a block of ratios v / f on the way to its level, step and trits. Each stage runs over all
// blocks of a group before the next: what one waits for, the others fill.
struct LogBlock {
    float sum, count;                // of the ratios; of live elements
    float offsets, products;         // sums: of the offsets, of the offsets times the old trits
    float once, twice;               // sums: of the old trits, of their squares
    float inverse, shift, reach;     // 1 / d; the level, from the mean, in octaves; the float of l + d
    float kept;                      // sum of what of the ratios the largest trit reaches
    uint16_t level, step;
    bool empty() const { return !(sum / count > EMPTY); }
};

// Offsets of log v / f from that of the mean, in octaves, and their sums with `old`, the digits of the last coding.
static void log_offsets(LogBlock &block, const float *ratio, const uint8_t *old, const float *units, float *offset, int size) {
    const float mean = block.sum / block.count, share = mean * FLOOR;
    const Floats least = all(share > TINY ? share : TINY);
    const Ints from = all_ints(pattern_of(mean));
    Sum offsets, products;
    int zeros = 0, twos = 0;
    for (int i = 0; i < size; i += 16) {
        for (int p = 0; p < PARTS; p++) {
            const int at = i + p * WIDTH;
            const Floats octaves = to_floats(bits_of(larger(load(ratio + at), least)) - from) * load(units + at);
            store(offset + at, octaves);
            offsets.part[p] += octaves;
            products.part[p] = fma(octaves, to_floats(widen(old + at)), products.part[p]);
        }
        count_digits(old + i, zeros, twos);
    }
    block.offsets = total(offsets);
    block.products = total(products) - block.offsets;  // trits are digits less 1
    block.once = (float)(twos - zeros);
    block.twice = (float)(twos + zeros);
}

// The first log-step of a block, from the spread of its offsets.
static float first_step(const float *offset, float average, float count, int size) {
    Sum squares;
    for (int i = 0; i < size; i += 16)
        for (int p = 0; p < PARTS; p++) {
            const Floats octaves = load(offset + i + p * WIDTH);
            squares.part[p] = fma(octaves, octaves, squares.part[p]);
        }
    const float square = total(squares) / count - average * average;
    return __builtin_sqrtf(square > 0.0f ? square : 0.0f) * FIRST_STEP;
}

// The level and the step. `previous`: the step of the last coding.
INLINE void choose_level(LogBlock &block, uint16_t previous, const float *offset, int size) {
    block.level = block.step = 0;
    block.inverse = block.shift = block.reach = 0.0f;
    if (block.empty()) return;
    const float average = block.offsets / block.count;
    const int32_t centre = pattern_of(block.sum / block.count);
    int32_t upper = (centre + (int32_t)(average * OCTAVE) + (1 << 15)) >> 16;
    if (upper > LARGEST_LEVEL) upper = LARGEST_LEVEL;
    float step = from_bf16(previous);
    if (previous) {
        const float spread = block.twice * block.count - block.once * block.once;
        if (spread > 0.0f) step = (block.products * block.count - block.offsets * block.once) / spread;
    } else {
        step = first_step(offset, average, block.count, size);
    }
    block.step = to_bf16(step < LEAST_STEP ? LEAST_STEP : step > MOST_STEP ? MOST_STEP : step);
    block.level = (uint16_t)upper;
    step = from_bf16(block.step);
    block.inverse = 1.0f / step;
    block.shift = (float)((upper << 16) - centre) * (1.0f / OCTAVE);
    block.reach = from_pattern(((int64_t)upper << 16) + (int32_t)(step * OCTAVE));
}

// The digits of floor(clamp((offset - shift) / d, -1, 1) + uniform), uniform from the low 16 bits, in units of 2^-16.
static void round_trits(LogBlock &block, const float *offset, const float *ratio, const uint32_t *bits, uint8_t *digits, int size) {
    const Floats scale = all(block.inverse * 65536.0f), base = all(65536.0f - block.shift * block.inverse * 65536.0f),
                 least = Floats{}, most = all(131072.0f), reach = all(block.reach);
    Sum kept;
    for (int i = 0; i < size; i += 16) {
        Ints digit[PARTS];
        for (int p = 0; p < PARTS; p++) {
            const int at = i + p * WIDTH;
            const Floats place = smaller(larger(fma(load(offset + at), scale, base), least), most);
            digit[p] = (truncate(place) + (*(const Ints *)(bits + at) & 0xFFFF)) >> 16;
            kept.part[p] += smaller(load(ratio + at), reach);
        }
        narrow(digit, digits + i);
    }
    block.kept = total(kept);
}

// The level rises by what lies beyond it and its step, where that is much: what is cut off would compound.
INLINE void raise_level(LogBlock &block) {
    if (block.empty()) return;
    const int32_t missing = (pattern_of(block.sum) - pattern_of(block.kept) + (1 << 15)) >> 16;
    const int32_t raised = block.level + (missing >= LEAST_RAISE ? missing : 0);
    block.level = (uint16_t)(raised > LARGEST_LEVEL ? LARGEST_LEVEL : raised);
}

// Encode v / f of a group: trits into `digits`, level and step into the state.
static void encode_variance(const LeantuneTernary *t, const Columns &columns, const Group &g, const float *ratio,
                            const uint8_t *old, const float *sums, float *offset, const uint32_t *bits, uint8_t *digits) {
    const float *units = columns.units + g.left;
    LogBlock blocks[5];
    for (int b = 0; b < g.blocks; b++) {
        const int at = b * t->block;
        blocks[b].sum = sums[b];
        blocks[b].count = columns.count[g.left / t->block + b];
        log_offsets(blocks[b], ratio + at, old + at, units + at, offset + at, g.used(t, b));
    }
    for (int b = 0; b < g.blocks; b++)
        choose_level(blocks[b], t->variance_step[g.first_block + b], offset + b * t->block, g.used(t, b));
    for (int b = 0; b < g.blocks; b++) {
        const int at = b * t->block, used = g.used(t, b);
        round_trits(blocks[b], offset + at, ratio + at, bits + at, digits + at, used);
        if (blocks[b].count < (float)used)
            for (int i = at; i < at + used; i++) digits[i] = units[i] > 0.0f ? digits[i] : 1;
    }
    for (int b = 0; b < g.blocks; b++) {
        raise_level(blocks[b]);
        t->variance_level[g.first_block + b] = blocks[b].level;
        t->variance_step[g.first_block + b] = blocks[b].step;
    }
}

// -- the momentum's encoding ------------------------------------------------------------------------------------------

static float sum_of_squares(const float *x, int size) {
    Sum squares;
    for (int i = 0; i < size; i += 16)
        for (int p = 0; p < PARTS; p++) {
            const Floats value = load(x + i + p * WIDTH);
            squares.part[p] = fma(value, value, squares.part[p]);
        }
    return total(squares);
}

// The digits of sign(r) where |r| > limit; sums: of the chosen |r|, and their number.
static void choose_trits(const float *__restrict residual, float limit, uint8_t *__restrict digits, int size, float *sums) {
    const Floats threshold = all(limit);
    Sum chosen;
    int number = 0;
    for (int i = 0; i < size; i += 16) {
        Ints above[PARTS], below[PARTS];
        for (int p = 0; p < PARTS; p++) {
            const Floats r = load(residual + i + p * WIDTH);
            above[p] = (Ints)(r > threshold);
            below[p] = (Ints)(r < -threshold);
            chosen.part[p] += keep(r, above[p]) - keep(r, below[p]);
        }
        number += ternary_digits(above, below, digits + i);
    }
    sums[0] = total(chosen);
    sums[1] = (float)number;
}

// T(residual) of a group's blocks: digits, and scales into the state; `scales`: as they were stored.
static void encode_momentum(const LeantuneTernary *t, const Group &g, int plane, const float *residual, uint8_t *digits, float *scales) {
    float limits[5], sums[5][2];
    for (int b = 0; b < g.blocks; b++)
        limits[b] = sum_of_squares(residual + b * t->block, g.used(t, b)) / (float)g.present(t, b);
    for (int b = 0; b < g.blocks; b++) {
        const int at = b * t->block;
        choose_trits(residual + at, __builtin_sqrtf(limits[b]) * THRESHOLD, digits + at, g.used(t, b), sums[b]);
    }
    for (int b = 0; b < g.blocks; b++) {
        uint16_t *stored = t->momentum_scale[plane] + g.first_block + b;
        *stored = to_bf16(sums[b][0] / (sums[b][1] > 1.0f ? sums[b][1] : 1.0f));
        scales[b] = from_bf16(*stored);
    }
}

// out = residual - s q of a group.
static void subtract_plane(const LeantuneTernary *t, const Group &g, const float *residual, const uint8_t *digits,
                           const float *scales, float *out) {
    for (int b = 0; b < g.blocks; b++) {
        const Table table(scales[b], 0.0f, -scales[b]);
        const int start = b * t->block, end = start + g.used(t, b);
        for (int i = start; i < end; i += WIDTH) store(out + i, load(residual + i) + pick(table, widen(digits + i)));
    }
}

// -- the weights ------------------------------------------------------------------------------------------------------

static inline void move(float *__restrict w, const float *__restrict step, float decay, float lr, int n) {
    for (int i = 0; i < n; i++) w[i] = fma(-lr, step[i], w[i] * decay);
}

static void store_bf16_nearest(const float *__restrict values, uint16_t *__restrict weight, int n) {
    for (int i = 0; i < n; i++) weight[i] = to_bf16(values[i]);
}

static void store_bf16(const uint32_t *__restrict pattern, const uint32_t *__restrict bits, uint16_t *__restrict weight, int n) {
    for (int i = 0; i < n; i++) weight[i] = (uint16_t)((pattern[i] + (bits[i] >> 16)) >> 16);
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

// step = u + beta1 / (1 - beta1) (residual - s q), the residual of the last plane.
struct Release {
    Table table;
    Floats factor;
    Release(float scale, float release) : table(scale, 0.0f, -scale), factor(all(release)) {}
    __attribute__((always_inline)) Floats step(const float *u, const float *residual, const uint8_t *digits) const {
        return fma(factor, load(residual) + pick(table, widen(digits)), load(u));
    }
};

// The step of a block moves bf16 weights, stochastically rounded: the sum of a float's bits and sixteen random ones, cut.
static void move_bf16(const LeantuneTernary *t, const Release &release, const float *u, const float *residual,
                      const uint8_t *digits, const uint32_t *bits, uint16_t *weight, int size) {
    const Floats decay = all(t->decay), rate = all(-t->lr);
    for (int i = 0; i < size; i += WIDTH) {
        const Floats w = fma(rate, release.step(u + i, residual + i, digits + i), read(weight + i) * decay);
        narrow(((Words)w + (*(const Words *)(bits + i) >> 16)) >> 16, weight + i);
    }
}

// `weight` moves by `step`, whatever its format.
static void write_weight(const LeantuneTernary *t, int64_t offset, const float *step, const uint32_t *bits, float *work, int n) {
    if (t->weight_dtype == LEANTUNE_FLOAT32) {
        move((float *)t->weight + offset, step, t->decay, t->lr, n);
        return;
    }
    uint16_t *weight = (uint16_t *)t->weight + offset;
    read_row(weight, 1, n, work);
    if (t->remainder) add_remainder((uint32_t *)work, t->remainder + offset, n);
    move(work, step, t->decay, t->lr, n);
    if (t->remainder)
        store_24((const uint32_t *)work, bits, t->stochastic ? 0xFF : 0, t->stochastic ? 0 : 128, weight,
                 t->remainder + offset, n);
    else if (t->stochastic)
        store_bf16((const uint32_t *)work, bits, weight, n);
    else
        store_bf16_nearest(work, weight, n);
}

// Move the weights of a group.
static void move_group(const LeantuneTernary *t, const Group &g, const float *u, const float *residual, const uint8_t *digits,
                       const float *scales, const uint32_t *bits, float *step, float *work) {
    const int64_t offset = g.row * t->cols + g.left;
    const bool usual = t->weight_dtype == LEANTUNE_BFLOAT16 && t->stochastic && !t->remainder;
    for (int b = 0; b < g.blocks; b++) {
        const int at = b * t->block, present = g.present(t, b), used = g.used(t, b);
        const Release release(scales[b], t->release);
        if (usual && present == used) {
            move_bf16(t, release, u + at, residual + at, digits + at, bits + at, (uint16_t *)t->weight + offset + at, used);
            continue;
        }
        for (int i = at; i < at + used; i += WIDTH) store(step + i, release.step(u + i, residual + i, digits + i));
        write_weight(t, offset + at, step + at, bits + at, work, present);
    }
}

// -- a panel ----------------------------------------------------------------------------------------------------------

// Ask for a row of a (rows, cols) matrix of contiguous rows, ahead of its use.
static void fetch(const void *matrix, int dtype, int64_t start, int64_t cols) {
    const int64_t bytes = dtype == LEANTUNE_FLOAT32 ? 4 : 2;
    const char *from = (const char *)matrix + start * bytes;
    for (int64_t i = 0; i < cols * bytes; i += 64) __builtin_prefetch(from + i);
}

// The first half of a row's step: what is stored becomes u and v / f; `sums`: of the latter, by block.
static void decode_row(const LeantuneTernary *t, const Columns &columns, const Panel &panel, int64_t row, int r, float *sums) {
    float *u = panel.u + r * panel.wide, *ratio = panel.ratio + r * panel.wide;
    uint8_t *old = panel.old_trits + r * panel.wide;
    fetch(t->weight, t->weight_dtype, row * t->cols, t->cols);
    float mine[MOST_RANK];
    for (int k = 0; k < t->rank; k++) mine[k] = t->beta1 * from_bf16(t->carry_rows[row * t->rank + k]);
    if (t->rank && t->rank != 4) start_from_carry(columns, mine, t->rank, u);
    for (int64_t left = 0; left < t->cols; left += 5 * t->block) {
        const Group g(t, row, left);
        unpack(t->momentum_trits[0] + g.bytes, g.n, panel.trits, g.padded);
        if (t->planes == 2) unpack(t->momentum_trits[1] + g.bytes, g.n, panel.second, g.padded);
        unpack(t->variance_trits + g.bytes, g.n, old + left, g.padded);
        for (int b = 0; b < g.blocks; b++) {
            const int64_t column = left + b * t->block, scalar = g.first_block + b;
            const int64_t offset = row * t->grad_row + column * t->grad_column;
            const Stored stored = {panel.trits + b * t->block, old + column, from_bf16(t->momentum_scale[0][scalar]),
                                   t->variance_level[scalar], t->variance_step[scalar]};
            const float *times = columns.times + column, *over = columns.over + column;
            const Carried carried = {mine, columns.carried + column, columns.wide};
            const int present = g.present(t, b);
            float *sum = sums + column / t->block;
            if (!t->rank)
                *sum = rule<NONE>(t, offset, present, stored, carried, times, over, panel.work, u + column, ratio + column);
            else if (t->rank == 4)
                *sum = rule<FOUR>(t, offset, present, stored, carried, times, over, panel.work, u + column, ratio + column);
            else
                *sum = rule<READY>(t, offset, present, stored, carried, times, over, panel.work, u + column, ratio + column);
            if (t->planes == 2)
                add_plane(panel.second + b * t->block, t->beta1 * from_bf16(t->momentum_scale[1][scalar]), u + column, g.used(t, b));
        }
    }
}

// <row, direction> for R rows.
template <int R>
static void dots(const float *rows, int64_t wide, int64_t span, const float *direction, float *out, int stride) {
    Sum sums[R];
    for (int64_t i = 0; i < span; i += 16)
        for (int p = 0; p < PARTS; p++) {
            const int64_t at = i + p * WIDTH;
            const Floats across = load(direction + at);
            for (int r = 0; r < R; r++) sums[r].part[p] = fma(load(rows + r * wide + at), across, sums[r].part[p]);
        }
    for (int r = 0; r < R; r++) out[r * stride] = total(sums[r]);
}

// residual -= U V_k, products_k += u^T W_k for direction k of R rows; `from`: what the residual starts as.
template <int R>
INLINE void take_direction(const float *u, const float *from, float *residual, int64_t wide, int64_t span, const float *direction,
                           const float *stored, const float *exact, int stride, float *products) {
    Floats taken[R], weight[R];
    for (int r = 0; r < R; r++) taken[r] = all(-stored[r * stride]), weight[r] = all(exact[r * stride]);
    for (int64_t i = 0; i < span; i += WIDTH) {
        const Floats across = load(direction + i);
        Floats sum = load(products + i);
        for (int r = 0; r < R; r++) {
            sum = fma(weight[r], load(u + r * wide + i), sum);
            store(residual + r * wide + i, fma(taken[r], across, load(from + r * wide + i)));
        }
        store(products + i, sum);
    }
}

// The same for four directions of one row, `basis` and `products` (4, wide).
static void take_four(const float *__restrict u, float *__restrict residual, int64_t wide, int64_t span, const float *__restrict basis,
                      const float *stored, const float *exact, float *__restrict products) {
    Floats taken[4], weight[4];
    for (int k = 0; k < 4; k++) taken[k] = all(-stored[k]), weight[k] = all(exact[k]);
    for (int64_t i = 0; i < span; i += WIDTH) {
        const Floats value = load(u + i);
        Floats rest = value;
        for (int k = 0; k < 4; k++) {
            rest = fma(taken[k], load(basis + k * wide + i), rest);
            store(products + k * wide + i, fma(weight[k], value, load(products + k * wide + i)));
        }
        store(residual + i, rest);
    }
}

// U = u V of R rows, stored as bf16; the residual u - U V^T; products += u^T U.
template <int R>
static void project(const LeantuneTernary *t, const Columns &columns, int64_t first, const float *u, float *residual, float *products) {
    const int rank = t->rank;
    const int64_t wide = columns.wide, span = columns.span;
    float exact[R * MOST_RANK], stored[R * MOST_RANK];
    for (int k = 0; k < rank; k++) dots<R>(u, wide, span, columns.basis + k * wide, exact + k, rank);
    for (int i = 0; i < R * rank; i++) {
        t->carry_rows[first * rank + i] = to_bf16(exact[i]);
        stored[i] = from_bf16(t->carry_rows[first * rank + i]);
    }
    if (rank == 4) {
        for (int r = 0; r < R; r++)
            take_four(u + r * wide, residual + r * wide, wide, span, columns.basis, stored + 4 * r, exact + 4 * r, products);
        return;
    }
    for (int k = 0; k < rank; k++)
        take_direction<R>(u, k ? residual : u, residual, wide, span, columns.basis + k * wide, stored + k, exact + k, rank,
                          products + k * wide);
}

// The same for any number of rows.
static void project(const LeantuneTernary *t, const Columns &columns, const Panel &panel, int64_t first, int count, float *products) {
    int r = 0;
    if (count == 4) project<4>(t, columns, first, panel.u, panel.residual, products), r = 4;
    for (; r + 2 <= count; r += 2)
        project<2>(t, columns, first + r, panel.u + r * panel.wide, panel.residual + r * panel.wide, products);
    if (r < count) project<1>(t, columns, first + r, panel.u + r * panel.wide, panel.residual + r * panel.wide, products);
}

// The second half of a row's step: encode v, then u; move the weights.
static void encode_row(const LeantuneTernary *t, const Columns &columns, const Panel &panel, int64_t row, int r, const float *sums) {
    const int64_t start = r * panel.wide;
    float scales[5];
    if (t->grad_column == 1 && row + panel.rows < t->rows)
        fetch(t->grad, t->grad_dtype, (row + panel.rows) * t->grad_row, t->cols);
    for (int64_t left = 0; left < t->cols; left += 5 * t->block) {
        const Group g(t, row, left);
        const int64_t at = start + left, block = left / t->block;
        for (int b = 0; b < g.blocks; b++) random_bits(t->key, t->first_row + row, block + b, g.used(t, b), panel.bits + b * t->block);
        encode_variance(t, columns, g, panel.ratio + at, panel.old_trits + at, sums + block, panel.offset, panel.bits, panel.trits);
        pack(panel.trits, g.n, t->variance_trits + g.bytes);
        const float *residual = panel.residual + at;
        for (int plane = 0; plane < t->planes; plane++) {
            if (plane) {
                subtract_plane(t, g, residual, panel.trits, scales, panel.work);
                residual = panel.work;
                pack(panel.trits, g.n, t->momentum_trits[0] + g.bytes);
            }
            encode_momentum(t, g, plane, residual, panel.trits, scales);
        }
        move_group(t, g, panel.u + at, residual, panel.trits, scales, panel.bits, panel.offset, panel.second_work);
        pack(panel.trits, g.n, t->momentum_trits[t->planes - 1] + g.bytes);
    }
}

static void step_rows(const LeantuneTernary *t, const Columns &columns, int64_t top, int64_t bottom, float *products) {
    Panel panel(t, columns);
    std::vector<float> sums((size_t)(panel.rows * t->blocks_per_row)), wide_products((size_t)(t->rank * panel.wide));
    for (int64_t first = top; first < bottom; first += panel.rows) {
        const int count = (int)(bottom - first < panel.rows ? bottom - first : panel.rows);
        for (int r = 0; r < count; r++) decode_row(t, columns, panel, first + r, r, sums.data() + r * t->blocks_per_row);
        if (t->rank) project(t, columns, panel, first, count, wide_products.data());
        for (int r = 0; r < count; r++) encode_row(t, columns, panel, first + r, r, sums.data() + r * t->blocks_per_row);
    }
    for (int k = 0; k < t->rank; k++)
        std::memcpy(products + k * t->cols, wide_products.data() + k * panel.wide, sizeof(float) * (size_t)t->cols);
}

static void step(const LeantuneTernary *t, float *products, int chunks) {
    const Columns columns(t);
#pragma omp parallel for num_threads(t->threads) schedule(dynamic, 1)
    for (int chunk = 0; chunk < chunks; chunk++)
        step_rows(t, columns, t->rows * chunk / chunks, t->rows * (chunk + 1) / chunks,
                  products + (int64_t)chunk * t->rank * t->cols);
}

// Sum of n squares.
template <class Element> static double sum_of_squares(const Element *x, int64_t n) {
    Sum sums[4];
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int s = 0; s < 4; s++)
            for (int p = 0; p < PARTS; p++) {
                const Floats value = read(x + i + 16 * s + p * WIDTH);
                sums[s].part[p] = fma(value, value, sums[s].part[p]);
            }
    float four[4];
    totals(sums[0], sums[1], sums[2], sums[3], four);
    double result = ((double)four[0] + four[1]) + ((double)four[2] + four[3]);
    for (; i < n; i++) result += (double)read_one(x + i) * read_one(x + i);
    return result;
}

static double sum_of_squares(const void *x, int dtype, int64_t start, int64_t n) {
    if (dtype == LEANTUNE_FLOAT32) return sum_of_squares((const float *)x + start, n);
    return sum_of_squares((const uint16_t *)x + start, n);
}

// <x, y>, and y -= factor x, in fp64.
static double dot(const double *__restrict x, const double *__restrict y, int64_t n) {
    double lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) lanes[l] += x[i + l] * y[i + l];
    for (; i < n; i++) lanes[0] += x[i] * y[i];
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

static void subtract(double *__restrict y, double factor, const double *__restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] -= factor * x[i];
}

// leantune/codec/low_rank.py's next_basis: Gram-Schmidt of Y + shift V.
static void next_basis(const float *products, const uint16_t *basis, int64_t cols, int rank, uint16_t *out) {
    double square = 0.0;
    for (int k = 0; k < rank; k++) square += sum_of_squares(products + k * cols, cols);
    float shift = __builtin_sqrtf((float)square) * BASIS_SHIFT;
    shift = shift > 1e-30f ? shift : 1e-30f;
    std::vector<double> memory((size_t)(rank * cols));
    for (int k = 0; k < rank; k++) {
        double *mine = memory.data() + k * cols;
        for (int64_t j = 0; j < cols; j++) mine[j] = products[k * cols + j] + shift * from_bf16(basis[j * rank + k]);
        for (int pass = 0; pass < 2; pass++)
            for (int l = 0; l < k; l++) {
                const double *other = memory.data() + l * cols;
                subtract(mine, dot(mine, other, cols), other, cols);
            }
        const double over = 1.0 / __builtin_sqrt(dot(mine, mine, cols));
        for (int64_t j = 0; j < cols; j++) mine[j] *= over;
        for (int64_t j = 0; j < cols; j++) out[j * rank + k] = to_bf16((float)mine[j]);
    }
}

// The same rule with fp32 states, for rows [top, bottom): nothing is dropped, so the step is u. t->block: elements that
// share a key of random bits.
static void exact_rows(const LeantuneTernary *t, float *momentum, float *variance, int64_t top, int64_t bottom) {
    std::vector<float> scratch((size_t)(2 * t->block));
    std::vector<uint32_t> bits((size_t)t->block);
    const float root_bias = __builtin_sqrtf(t->bias);
    for (int64_t row = top; row < bottom; row++)
        for (int64_t left = 0; left < t->cols; left += t->block) {
            const int n = (int)(t->cols - left < t->block ? t->cols - left : t->block);
            const int64_t offset = row * t->cols + left;
            float *__restrict grad = scratch.data(), *__restrict u = momentum + offset, *__restrict v = variance + offset;
            read_row(t->grad, t->grad_dtype, row * t->grad_row + left * t->grad_column, t->grad_column, n, grad);
            for (int i = 0; i < n; i++) {
                const float g = grad[i] * t->grad_scale;
                v[i] = fma(v[i], t->beta2, t->rest2 * g * g);
                u[i] = fma(t->rest1, g / fma(__builtin_sqrtf(v[i]), root_bias, t->eps) - u[i], u[i]);
            }
            if (t->stochastic) random_bits(t->key, t->first_row + row, left / t->block, n, bits.data());
            write_weight(t, offset, u, bits.data(), scratch.data() + t->block, n);
        }
}

template <class Element>
static void square_rows(const LeantuneTernary *t, const Element *grad, int64_t top, int64_t bottom, double *__restrict columns) {
    const float factor = t->grad_scale;
    std::memset(columns, 0, sizeof(double) * (size_t)t->cols);
    for (int64_t row = top; row < bottom; row++) {
        const Element *mine = grad + row * t->grad_row;
        int64_t i = 0;
        if (t->grad_column == 1)
            for (; i + WIDTH <= t->cols; i += WIDTH) {
                const Floats g = read(mine + i) * factor;
                add_wide(columns + i, g * g);
            }
        for (; i < t->cols; i++) {
            const float g = read_one(mine + i * t->grad_column) * factor;
            columns[i] += (double)(g * g);
        }
    }
}

// columns = sums of g^2 over rows [top, bottom).
static void square_rows(const LeantuneTernary *t, int64_t top, int64_t bottom, double *columns) {
    if (t->grad_dtype == LEANTUNE_FLOAT32)
        square_rows(t, (const float *)t->grad, top, bottom, columns);
    else
        square_rows(t, (const uint16_t *)t->grad, top, bottom, columns);
}
