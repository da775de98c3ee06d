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
    int i = 0;
    if (p >= BYTES)
        for (; i < p; i += BYTES) {
            if (i > p - BYTES) i = p - BYTES;  // the last ones overlap
            unpack_bytes(packed + i, digits + i, p);
        }
    for (; i < p; i++) {  // (b * 171) >> 9 is b / 3, exact below 256
        unsigned rest = packed[i];
        for (int k = 0; k < 5; k++) {
            const unsigned third = k < 4 ? (rest * 171) >> 9 : 0;
            digits[i + k * p] = (uint8_t)(rest - 3 * third);
            rest = third;
        }
    }
    for (i = n; i < padded; i++) digits[i] = 1;
}

// The inverse; absent trits are digit 0. Writes up to four digits behind the n.
static void pack(uint8_t *__restrict digits, int n, uint8_t *__restrict packed) {
    const int p = (n + 4) / 5;
    for (int i = n; i < 5 * p; i++) digits[i] = 0;
    int i = 0;
    if (p >= BYTES)
        for (; i < p; i += BYTES) {
            if (i > p - BYTES) i = p - BYTES;
            pack_bytes(digits + i, p, packed + i);
        }
    for (; i < p; i++) {
        unsigned value = 0;
        for (int k = 4; k >= 0; k--) value = 3 * value + digits[i + k * p];
        packed[i] = (uint8_t)value;
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

// The counter hash of codec/counter_hash.py: word j of a block is mix32(key ^ j * golden), for the elements i and i + 8 of
// sixteen neighbours. The first takes its low half for the state and its high half for the weight, the second the other
// way round.
INLINE uint64_t row_key(const LeantuneTernary *t, int64_t row) { return splitmix64((uint64_t)(t->first_row + row) ^ t->key); }
INLINE uint32_t seed_of(uint64_t key, int64_t block) { return (uint32_t)splitmix64(key ^ (uint64_t)block); }

static void random_words(uint32_t seed, int size, uint32_t *out) {
    const Words advance = Words{} + 0x9E3779B9u * (uint32_t)WIDTH;
    Words counter;
    for (int l = 0; l < WIDTH; l++) counter[l] = 0x9E3779B9u * (uint32_t)l;
    for (int j = 0; j < size / 2; j += WIDTH, counter += advance) {
        Words x = counter ^ seed;
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        *(Words *)(out + j) = x ^ (x >> 16);
    }
}

#if WIDTH == 16
// Sixteen elements' halves from eight words.
INLINE Ints state_bits(const uint32_t *words, int) {
    const __m256i eight = _mm256_loadu_si256((const __m256i *)words);
    return (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(eight, _mm256_set1_epi32(0xFFFF))), _mm256_srli_epi32(eight, 16), 1);
}
INLINE Words weight_bits(const uint32_t *words, int) {
    const __m256i eight = _mm256_loadu_si256((const __m256i *)words);
    return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_srli_epi32(eight, 16)), _mm256_and_si256(eight, _mm256_set1_epi32(0xFFFF)), 1);
}
#else
// Part p of sixteen elements' halves from eight words.
INLINE Ints state_bits(const uint32_t *words, int p) {
    const Words part = *(const Words *)(words + p * WIDTH % 8);
    return (Ints)(p * WIDTH < 8 ? part & 0xFFFF : part >> 16);
}
INLINE Words weight_bits(const uint32_t *words, int p) {
    const Words part = *(const Words *)(words + p * WIDTH % 8);
    return p * WIDTH < 8 ? part >> 16 : part & 0xFFFF;
}
#endif
INLINE uint32_t weight_bits_of(const uint32_t *words, int64_t i) {
    const uint32_t word = words[i / 16 * 8 + i % 8];
    return i % 16 < 8 ? word >> 16 : word & 0xFFFF;
}

// Five neighbouring blocks of a row (at its end fewer), whose trits share bytes: what is the same in all rows.
struct Group {
    int n, padded, blocks;       // elements; rounded up to sixteen
    int present[5], used[5];     // elements of each block; rounded up to sixteen
    int64_t left, block, bytes;  // first column; in a row of the state: the first block, the first byte of trits

    Group(const LeantuneTernary *t, int64_t left) : present(), used(), left(left), block(left / t->block), bytes(left / 5) {
        const int64_t wide = 5 * (int64_t)t->block, rest = t->cols - left;
        n = (int)(rest < wide ? rest : wide);
        padded = (n + 15) / 16 * 16;
        blocks = (n + t->block - 1) / t->block;
        for (int b = 0; b < blocks; b++) {
            present[b] = n - b * t->block < t->block ? n - b * t->block : t->block;
            used[b] = (present[b] + 15) / 16 * 16;
        }
    }
};

// What belongs to the columns, worked out once for all rows. Behind the last column everything is 0.
struct Columns {
    int64_t wide;                    // columns, rounded up to whole blocks
    std::vector<float> memory;
    float *times, *over;             // f of the stored v; 1 / f of the new
    int32_t *live;                   // all ones in live columns
    float *carried, *basis;          // V^T of the stored carry and of this step, (rank, wide)
    float *count;                    // live elements of each block, 1 at least
    std::vector<Group> groups;

    Columns(const LeantuneTernary *t)
        : wide(t->blocks_per_row * t->block), memory((size_t)((3 + 2 * t->rank) * wide + t->blocks_per_row) + LINE / sizeof(float)) {
        times = aligned(memory.data());
        over = times + wide;
        live = (int32_t *)(over + wide);
        carried = over + 2 * wide;
        basis = carried + t->rank * wide;
        count = basis + t->rank * wide;
        relative(t->column_means, t->cols, times);
        relative(t->new_column_means, t->cols, over);
        for (int64_t j = 0; j < t->cols; j++) {
            live[j] = over[j] > 0.0f ? -1 : 0;
            count[j / t->block] += over[j] > 0.0f ? 1.0f : 0.0f;
            over[j] = over[j] > 0.0f ? 1.0f / over[j] : 0.0f;
        }
        for (int64_t b = 0; b < t->blocks_per_row; b++) count[b] = count[b] > 1.0f ? count[b] : 1.0f;
        for (int64_t left = 0; left < t->cols; left += 5 * (int64_t)t->block) groups.emplace_back(t, left);
        for (int k = 0; k < t->rank; k++)
            for (int64_t j = 0; j < t->cols; j++) {
                carried[k * wide + j] = from_bf16(t->carry_columns[j * t->rank + k]);
                basis[k * wide + j] = live[j] ? from_bf16(t->basis[j * t->rank + k]) : 0.0f;
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
    if (memory.size() < size + LINE / sizeof(Number)) memory.resize(size + LINE / sizeof(Number));
    return aligned(memory.data());
}

// A few rows between their decoding and their encoding, and scratch for one group. What belongs to the columns is read
// block by block for all rows of the panel, so that it stays in the first cache.
struct Panel {
    int64_t wide, group;                 // elements of a row and of a group, rounded up to whole blocks
    int64_t wide_digits, digits;         // bytes for their digits: unpack() writes up to four behind the last
    int rows;                            // that fit: as many as the second cache holds well, eight at most
    float *u, *ratio;                    // (rows, wide)
    float *sums;                         // of the ratios, by block: (rows, blocks of a row)
    float *residual;                     // (rows, group)
    float *squares;                      // of the residual, by block: (rows, 5)
    float *tables;                       // what digits decode to, by block: of u and of v: (rows, 5, 2, 4)
    float *before, *exact, *stored;      // beta1 U; U; U as it is stored: (rows, rank)
    float *offset, *work, *second_work;  // (group)
    uint32_t *words;                     // (group / 2)
    uint8_t *old_trits;                  // of v, (rows, wide_digits)
    uint8_t *momentum[2];                // digits, (rows, digits)
    uint8_t *trits;                      // (digits)

    Panel(const LeantuneTernary *t, const Columns &columns) : wide(columns.wide), group(5 * (int64_t)t->block), wide_digits(wide + LINE), digits(group + LINE) {
        const int64_t fit = PANEL / wide;
        rows = (int)(fit < 1 ? 1 : fit > 8 ? 8 : fit);
        const struct { float **name; int64_t size; } floats[] = {
            {&u, rows * wide}, {&ratio, rows * wide}, {&sums, rows * t->blocks_per_row}, {&residual, rows * group},
            {&squares, rows * 5}, {&tables, rows * 40}, {&before, rows * t->rank}, {&exact, rows * t->rank},
            {&stored, rows * t->rank}, {&offset, group}, {&work, group}, {&second_work, group}, {(float **)&words, group / 2 + 16}};
        const struct { uint8_t **name; int64_t size; } bytes[] = {
            {&old_trits, rows * wide_digits}, {&momentum[0], rows * digits}, {&momentum[1], t->planes == 2 ? rows * digits : 0}, {&trits, digits}};
        int64_t size = 0;
        for (const auto &part : floats) size += lines(4 * part.size);
        for (const auto &part : bytes) size += lines(part.size);
        uint8_t *memory = kept<uint8_t>((size_t)size);
        for (const auto &part : floats) *part.name = (float *)memory, memory += lines(4 * part.size);
        for (const auto &part : bytes) *part.name = memory, memory += lines(part.size);
    }
    static int64_t lines(int64_t size) { return (size + LINE - 1) / LINE * LINE; }
};

// -- decode and rule --------------------------------------------------------------------------------------------------

// u = beta1 U V^T of a block, for what the trits and the gradient are added to. `before`: beta1 U.
static void start_from_carry(const float *columns, int64_t wide, const float *before, int rank, float *__restrict u, int size) {
    for (int k = 0; k < rank; k++) {
        const Floats factor = all(before[k]);
        for (int i = 0; i < size; i += WIDTH) {
            const Floats part = load(columns + k * wide + i);
            store(u + i, k ? fma(factor, part, load(u + i)) : factor * part);
        }
    }
}

// u += beta1 s q, for the second momentum plane of a block.
static void add_plane(const uint8_t *digits, float scale, float *u, int size) {
    const Table table(-scale, 0.0f, scale);
    for (int i = 0; i < size; i += WIDTH) store(u + i, load(u + i) + pick(table, widen(digits + i)));
}

// Where beta1 C of a block comes from: nowhere, from four products of U and V, or from `u`, where it already is.
enum Carry { NONE, FOUR, READY };

// What a block is decoded from, but for the gradient, and what it is decoded to.
struct Block {
    const uint8_t *momentum, *variance;  // digits
    const float *tables;                 // what they mean
    const float *before, *carried;       // beta1 U of the row; V^T from the block's first column on
    const float *times, *over;
    float *u, *ratio;
};

// A block's v and u of this step from what is stored and the gradient: u is left in `u` and, where v will be coded, v / f
// in `ratio`; returns the sum of the latter.
template <Carry CARRY, bool CODE, class Element>
static float rule(const LeantuneTernary *t, const Element *grad, const Block &block, int64_t wide, int size) {
    const Block x = block;  // the compiler must not think that storing changes it
    const Table old_u(x.tables), old_v(x.tables + 4);
    const Floats rest1 = all(t->rest1), rest2 = all(t->rest2), bias = all(__builtin_sqrtf(t->bias)), eps = all(t->eps),
                 factor = all(t->grad_scale);
    const float *first = x.carried, *second = first + wide, *third = second + wide, *fourth = third + wide;
    Floats of_carry[4];
    if (CARRY == FOUR)
        for (int k = 0; k < 4; k++) of_carry[k] = all(x.before[k]);
    Sum sum;
    for (int i = 0; i < size; i += 16)
        for (int p = 0; p < PARTS; p++) {
            const int at = i + p * WIDTH;
            const Floats g = read(grad + at) * factor;
            const Floats v = fma(pick(old_v, widen(x.variance + at)), load(x.times + at), rest2 * g * g);
            Floats before = pick(old_u, widen(x.momentum + at));
            if (CARRY == FOUR) {
                before = fma(of_carry[0], load(first + at), before);
                before = fma(of_carry[1], load(second + at), before);
                before = fma(of_carry[2], load(third + at), before);
                before = fma(of_carry[3], load(fourth + at), before);
            }
            if (CARRY == READY) before += load(x.u + at);
            store(x.u + at, fma(g / fma(root(v), bias, eps), rest1, before));
            if (CODE) {
                const Floats relative = v * load(x.over + at);
                store(x.ratio + at, relative);
                sum.part[p] += relative;
            }
        }
    return CODE ? total(sum) : 0.0f;
}

template <Carry CARRY, bool CODE>
static float rule(const LeantuneTernary *t, int64_t offset, int present, const Block &block, int64_t wide, float *work) {
    const int used = (present + 15) / 16 * 16;
    if (t->grad_column == 1 && present == used) {
        if (t->grad_dtype == LEANTUNE_FLOAT32) return rule<CARRY, CODE>(t, (const float *)t->grad + offset, block, wide, used);
        return rule<CARRY, CODE>(t, (const uint16_t *)t->grad + offset, block, wide, used);
    }
    read_row(t->grad, t->grad_dtype, offset, t->grad_column, present, work);
    fill(work, 0.0f, present, used);
    return rule<CARRY, CODE>(t, (const float *)work, block, wide, used);
}

template <Carry CARRY>
static float rule(const LeantuneTernary *t, bool code, int64_t offset, int present, const Block &block, int64_t wide, float *work) {
    return (code ? rule<CARRY, true> : rule<CARRY, false>)(t, offset, present, block, wide, work);
}

// -- the second moment's encoding -------------------------------------------------------------------------------------

// What is found out about the ratios v / f of a group's blocks on the way to their levels, steps and trits, a lane a
// block. Each stage runs over all blocks before the next: what one waits for, the others fill.
enum { LANES = 8 };
struct LogBlocks {
    float sum[LANES], count[LANES];         // of the ratios; of live elements
    float offsets[LANES], products[LANES];  // sums: of the offsets, of the offsets times the old trits; in octaves
    float once[LANES], twice[LANES];        // sums: of the old trits, of their squares
    float previous[LANES];                  // the step where these do not tell: that of the last coding
    float inverse[LANES], shift[LANES], reach[LANES];  // 1 / d; the level, from the mean, in octaves; the float of l + d
    float kept[LANES];                      // sum of what of the ratios the largest trit reaches
    int32_t level[LANES], step[LANES];
};

// Offsets of log v / f from that of the mean, in units of 1 / OCTAVE, and their sums with `old`, the digits of the last
// coding; `live`: masks of live columns.
template <bool DEAD>
INLINE void log_offsets(LogBlocks &blocks, int b, const float *ratio, const uint8_t *old, const int32_t *live, float *offset, int size) {
    const float mean = blocks.sum[b] / blocks.count[b], share = mean * FLOOR;
    const Floats least = all(share > TINY ? share : TINY);
    const Ints from = all_ints(pattern_of(mean));
    Sum offsets, products;
    DigitCount count;
    for (int i = 0; i < size; i += 16) {
        for (int p = 0; p < PARTS; p++) {
            const int at = i + p * WIDTH;
            Ints units = bits_of(larger(load(ratio + at), least)) - from;
            if (DEAD) units &= *(const Ints *)(live + at);
            const Floats distance = to_floats(units);
            store(offset + at, distance);
            offsets.part[p] += distance;
            products.part[p] = fma(distance, to_floats(widen(old + at)), products.part[p]);
        }
        count.add(old + i);
    }
    blocks.offsets[b] = total(offsets) * (1.0f / OCTAVE);
    blocks.products[b] = total(products) * (1.0f / OCTAVE) - blocks.offsets[b];  // trits are digits less 1
    blocks.once[b] = (float)(count.sum() - size);
    blocks.twice[b] = (float)(size - count.ones());
}

static float sum_of_squares(const float *x, int size) {
    Sum squares;
    for (int i = 0; i < size; i += 16)
        for (int p = 0; p < PARTS; p++) {
            const Floats value = load(x + i + p * WIDTH);
            squares.part[p] = fma(value, value, squares.part[p]);
        }
    return total(squares);
}

// The first log-step of a block, from the spread of its offsets.
static float first_step(const LogBlocks &blocks, int b, const float *offset, int size) {
    const float average = blocks.offsets[b] / blocks.count[b];
    const float square = sum_of_squares(offset, size) * (1.0f / OCTAVE / OCTAVE) / blocks.count[b] - average * average;
    return __builtin_sqrtf(square > 0.0f ? square : 0.0f) * FIRST_STEP;
}

// The levels and the steps.
static void choose_levels(LogBlocks &x) {
    for (int b = 0; b < LANES; b++) {
        const float mean = x.sum[b] / x.count[b], average = x.offsets[b] / x.count[b];
        const int32_t centre = pattern_of(mean), live = mean > EMPTY ? -1 : 0;
        int32_t upper = (centre + (int32_t)(average * OCTAVE) + (1 << 15)) >> 16;
        upper = (upper < LARGEST_LEVEL ? upper : LARGEST_LEVEL) & live;
        const float spread = x.twice[b] * x.count[b] - x.once[b] * x.once[b];
        const float slope = (x.products[b] * x.count[b] - x.offsets[b] * x.once[b]) / (spread > 0.0f ? spread : 1.0f);
        float step = spread > 0.0f ? slope : x.previous[b];
        step = step < LEAST_STEP ? LEAST_STEP : step;
        step = step > MOST_STEP ? MOST_STEP : step;
        x.step[b] = to_bf16(step);
        step = from_bf16((uint16_t)x.step[b]);
        x.step[b] &= live;
        x.level[b] = upper;
        x.inverse[b] = from_pattern(pattern_of(1.0f / step) & live);
        x.shift[b] = (float)(((upper << 16) - centre) & live) * (1.0f / OCTAVE);
        x.reach[b] = from_pattern(((upper << 16) + (int32_t)(step * OCTAVE)) & live);
    }
}

// The digits of floor(clamp((offset - shift) / d, -1, 1) + uniform), uniform from the low 16 bits, in units of 2^-16.
INLINE void round_trits(LogBlocks &blocks, int b, const float *offset, const float *ratio, const uint32_t *words, uint8_t *digits, int size) {
    const float inverse = blocks.inverse[b] * 65536.0f;
    const Floats scale = all(inverse * (1.0f / OCTAVE)), base = all(65536.0f - blocks.shift[b] * inverse), least = Floats{},
                 most = all(131072.0f), reach = all(blocks.reach[b]);
    Sum kept;
    for (int i = 0; i < size; i += 16) {
        Ints digit[PARTS];
        for (int p = 0; p < PARTS; p++) {
            const int at = i + p * WIDTH;
            const Floats place = smaller(larger(fma(load(offset + at), scale, base), least), most);
            digit[p] = (truncate(place) + state_bits(words + i / 2, p)) >> 16;
            kept.part[p] += smaller(load(ratio + at), reach);
        }
        narrow(digit, digits + i);
    }
    blocks.kept[b] = total(kept);
}

// Levels rise by what lies beyond them and their step, where that is much: what is cut off would compound.
static void raise_levels(LogBlocks &x) {
    for (int b = 0; b < LANES; b++) {
        const int32_t missing = (pattern_of(x.sum[b]) - pattern_of(x.kept[b]) + (1 << 15)) >> 16;
        const int32_t raised = x.level[b] + (missing >= LEAST_RAISE ? missing : 0);
        x.level[b] = x.step[b] ? (raised > LARGEST_LEVEL ? LARGEST_LEVEL : raised) : 0;
    }
}

// Encode v / f of a group, where it is to be coded: trits into the state by way of `digits`, levels and steps.
static void encode_variance(const LeantuneTernary *t, const Columns &columns, const Group &g, int64_t row, const float *ratio,
                            const uint8_t *old, const float *sums, float *offset, const uint32_t *words, uint8_t *digits) {
    const int32_t *live = columns.live + g.left;
    const float *count = columns.count + g.block;
    uint16_t *level = t->variance_level + row * t->blocks_per_row + g.block, *step = t->variance_step + row * t->blocks_per_row + g.block;
    bool code[5], any = false;
    for (int b = 0; b < g.blocks; b++) any |= code[b] = t->sampled || !level[b];
    if (!any) return;
    LogBlocks blocks = {};
    for (int b = 0; b < LANES; b++) blocks.count[b] = 1.0f;
    for (int b = 0; b < g.blocks; b++) {
        if (!code[b]) continue;
        const int at = b * t->block;
        blocks.sum[b] = sums[b];
        blocks.count[b] = count[b];
        blocks.previous[b] = from_bf16(step[b]);
        if (count[b] < (float)g.used[b])
            log_offsets<true>(blocks, b, ratio + at, old + at, live + at, offset + at, g.used[b]);
        else
            log_offsets<false>(blocks, b, ratio + at, old + at, live + at, offset + at, g.used[b]);
        if (!step[b]) {
            blocks.previous[b] = first_step(blocks, b, offset + at, g.used[b]);
            blocks.once[b] = blocks.twice[b] = 0.0f;
        }
    }
    choose_levels(blocks);
    for (int b = 0; b < g.blocks; b++) {
        const int at = b * t->block;
        if (!code[b]) {
            std::memcpy(digits + at, old + at, (size_t)g.used[b]);
            continue;
        }
        round_trits(blocks, b, offset + at, ratio + at, words + at / 2, digits + at, g.used[b]);
        if (count[b] < (float)g.used[b])
            for (int i = at; i < at + g.used[b]; i++) digits[i] = live[i] ? digits[i] : 1;
    }
    raise_levels(blocks);
    for (int b = 0; b < g.blocks; b++) {
        if (!code[b]) continue;
        level[b] = (uint16_t)blocks.level[b];
        step[b] = (uint16_t)blocks.step[b];
    }
    pack(digits, g.n, t->variance_trits + row * t->bytes_per_row + g.bytes);
}

// -- the momentum's encoding ------------------------------------------------------------------------------------------

// The digits of sign(r) where |r| > limit; the sum of the chosen |r|, and their number.
INLINE void choose_trits(const float *residual, float limit, uint8_t *digits, int size, float *sum, float *count) {
    const Floats threshold = all(limit);
    Sum chosen, number;
    Ints counted[PARTS] = {};
    for (int i = 0; i < size; i += 16) {
        Ints kept[PARTS];
        Floats r[PARTS];
        for (int p = 0; p < PARTS; p++) {
            r[p] = load(residual + i + p * WIDTH);
            const Floats magnitude = of_bits(bits_of(r[p]) & 0x7FFFFFFF);
            kept[p] = (Ints)(magnitude > threshold);
            chosen.part[p] += keep(magnitude, kept[p]);
            counted[p] -= kept[p];
        }
        signed_digits(kept, r, digits + i);
    }
    for (int p = 0; p < PARTS; p++) number.part[p] = to_floats(counted[p]);
    *sum = total(chosen);
    *count = total(number);
}

// T(residual) of a group's blocks, whose squares sum to `squares`: digits, and scales into the state; `scales`: as they
// were stored.
static void encode_momentum(const LeantuneTernary *t, const Group &g, int64_t row, int plane, const float *residual, const float *squares,
                            uint8_t *digits, float *scales) {
    float limits[LANES] = {}, sums[LANES] = {}, counts[LANES] = {};
    uint16_t *stored = t->momentum_scale[plane] + row * t->blocks_per_row + g.block;
    for (int b = 0; b < g.blocks; b++) limits[b] = squares[b] / (float)g.present[b];
    for (int b = 0; b < LANES; b++) limits[b] = __builtin_sqrtf(limits[b]) * THRESHOLD;
    for (int b = 0; b < g.blocks; b++) choose_trits(residual + b * t->block, limits[b], digits + b * t->block, g.used[b], sums + b, counts + b);
    for (int b = 0; b < g.blocks; b++) {
        stored[b] = to_bf16(sums[b] / (counts[b] > 1.0f ? counts[b] : 1.0f));
        scales[b] = from_bf16(stored[b]);
    }
}

static void block_squares(const LeantuneTernary *t, const Group &g, const float *residual, float *squares) {
    for (int b = 0; b < g.blocks; b++) squares[b] = sum_of_squares(residual + b * t->block, g.used[b]);
}

// out = residual - s q of a group.
static void subtract_plane(const LeantuneTernary *t, const Group &g, const float *residual, const uint8_t *digits,
                           const float *scales, float *out) {
    for (int b = 0; b < g.blocks; b++) {
        const Table table(scales[b], 0.0f, -scales[b]);
        const int start = b * t->block, end = start + g.used[b];
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
    for (int i = 0; i < n; i++) weight[i] = (uint16_t)((pattern[i] + weight_bits_of(bits, i)) >> 16);
}

// The nearest bf16 and an 8-bit remainder; `keep` masks the random bits, `half` rounds to nearest instead.
static void store_24(const uint32_t *__restrict pattern, const uint32_t *__restrict bits, uint32_t keep, uint32_t half,
                     uint16_t *__restrict weight, int8_t *__restrict remainder, int n) {
    for (int i = 0; i < n; i++) {
        const uint32_t noise = (weight_bits_of(bits, i) & keep) + half;
        const int32_t units = (int32_t)(pattern[i] + noise) >> 8, high = (units + 128) >> 8;
        weight[i] = (uint16_t)high;
        remainder[i] = (int8_t)(units - high * 256);
    }
}

static void add_remainder(uint32_t *__restrict pattern, const int8_t *__restrict remainder, int n) {
    for (int i = 0; i < n; i++) pattern[i] += (uint32_t)(int32_t)remainder[i] << 8;
}

// step = u + beta1 / (1 - beta1) (residual - s q), the residual of the last plane.
static void released_step(const LeantuneTernary *t, float scale, const float *u, const float *residual, const uint8_t *digits,
                          float *step, int size) {
    const Table table(scale, 0.0f, -scale);
    const Floats release = all(t->release);
    for (int i = 0; i < size; i += WIDTH)
        store(step + i, fma(release, load(residual + i) + pick(table, widen(digits + i)), load(u + i)));
}

// The step of a block moves bf16 weights, stochastically rounded: the sum of a float's bits and sixteen random ones, cut.
static void move_bf16(const LeantuneTernary *t, float scale, const float *u, const float *residual, const uint8_t *digits,
                      const uint32_t *bits, uint16_t *weight, int size) {
    const Floats decay = all(t->decay), rate = all(-t->lr), dropped = all(-t->lr * t->release);
    const float kept = t->lr * t->release * scale;
    const Table table(-kept, 0.0f, kept);
    for (int i = 0; i < size; i += 16) {
        Words moved[PARTS];
        for (int p = 0; p < PARTS; p++) {
            const int at = i + p * WIDTH;
            Floats w = fma(read(weight + at), decay, pick(table, widen(digits + at)));
            w = fma(dropped, load(residual + at), fma(rate, load(u + at), w));
            moved[p] = ((Words)w + weight_bits(bits + i / 2, p)) >> 16;
        }
        narrow(moved, weight + i);
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
static void move_group(const LeantuneTernary *t, const Group &g, int64_t row, const float *u, const float *residual, const uint8_t *digits,
                       const float *scales, const uint32_t *bits, float *step, float *work) {
    const int64_t offset = row * t->cols + g.left;
    const bool usual = t->weight_dtype == LEANTUNE_BFLOAT16 && t->stochastic && !t->remainder;
    for (int b = 0; b < g.blocks; b++) {
        const int at = b * t->block, present = g.present[b], used = g.used[b];
        if (usual && present == used) {
            move_bf16(t, scales[b], u + at, residual + at, digits + at, bits + at / 2, (uint16_t *)t->weight + offset + at, used);
            continue;
        }
        released_step(t, scales[b], u + at, residual + at, digits + at, step + at, used);
        write_weight(t, offset + at, step + at, bits + at / 2, work, present);
    }
}

// -- a panel ----------------------------------------------------------------------------------------------------------

// Ask for a row of a (rows, cols) matrix of contiguous rows, ahead of its use.
static void fetch(const void *matrix, int dtype, int64_t start, int64_t cols) {
    const int64_t bytes = dtype == LEANTUNE_FLOAT32 ? 4 : 2;
    const char *from = (const char *)matrix + start * bytes;
#pragma GCC unroll 4
    for (int64_t i = 0; i < cols * bytes; i += LINE) __builtin_prefetch(from + i);
}

// What the digits of a row's blocks mean, in three lanes of four: beta1 s q, and beta2 times the values at level - d, level,
// level + d.
static void write_tables(const LeantuneTernary *t, const Group &g, int64_t row, float *tables) {
    const int64_t first = row * t->blocks_per_row + g.block;
    for (int b = 0; b < g.blocks; b++) {
        const float scale = t->beta1 * from_bf16(t->momentum_scale[0][first + b]);
        const int32_t centre = (int32_t)((uint32_t)t->variance_level[first + b] << 16);
        const int32_t octaves = (int32_t)(from_bf16(t->variance_step[first + b]) * OCTAVE);
        float *table = tables + 8 * b;
        table[0] = -scale;
        table[1] = 0.0f;
        table[2] = scale;
        table[4] = t->beta2 * from_pattern((int64_t)centre - octaves);
        table[5] = t->beta2 * from_pattern(centre);
        table[6] = t->beta2 * from_pattern((int64_t)centre + octaves);
    }
}

// The first half of a row's step, block b of a group: what is stored becomes u and v / f.
static void decode_block(const LeantuneTernary *t, const Columns &columns, const Panel &panel, const Group &g, int64_t row, int r, int b) {
    const int64_t inside = b * t->block, column = g.left + inside, at = r * panel.wide + column;
    const int64_t offset = row * t->grad_row + column * t->grad_column;
    const Block block = {panel.momentum[0] + r * panel.digits + inside, panel.old_trits + r * panel.wide_digits + column, panel.tables + 40 * r + 8 * b,
                         panel.before + r * t->rank, columns.carried + column, columns.times + column, columns.over + column,
                         panel.u + at, panel.ratio + at};
    const bool code = t->sampled || !t->variance_level[row * t->blocks_per_row + g.block + b];
    float *sum = panel.sums + r * t->blocks_per_row + g.block + b;
    if (!t->rank) {
        *sum = rule<NONE>(t, code, offset, g.present[b], block, columns.wide, panel.work);
    } else if (t->rank == 4) {
        *sum = rule<FOUR>(t, code, offset, g.present[b], block, columns.wide, panel.work);
    } else {
        start_from_carry(block.carried, columns.wide, block.before, t->rank, block.u, g.used[b]);
        *sum = rule<READY>(t, code, offset, g.present[b], block, columns.wide, panel.work);
    }
    if (t->planes == 2)
        add_plane(panel.momentum[1] + r * panel.digits + inside,
                  t->beta1 * from_bf16(t->momentum_scale[1][row * t->blocks_per_row + g.block + b]), block.u, g.used[b]);
}

// U += u V over a block, `basis` (rank, wide) from its first column on.
static void add_dots(const float *u, const float *basis, int64_t wide, int rank, float *exact, int size) {
    int k = 0;
    for (; k + 4 <= rank; k += 4) {
        Sum sums[4];
        for (int i = 0; i < size; i += 16)
            for (int p = 0; p < PARTS; p++) {
                const Floats value = load(u + i + p * WIDTH);
                for (int l = 0; l < 4; l++)
                    sums[l].part[p] = fma(value, load(basis + (k + l) * wide + i + p * WIDTH), sums[l].part[p]);
            }
        float four[4];
        totals(sums[0], sums[1], sums[2], sums[3], four);
        for (int l = 0; l < 4; l++) exact[k + l] += four[l];
    }
    for (; k < rank; k++) {
        Sum sum;
        for (int i = 0; i < size; i += 16)
            for (int p = 0; p < PARTS; p++) {
                const int at = i + p * WIDTH;
                sum.part[p] = fma(load(u + at), load(basis + k * wide + at), sum.part[p]);
            }
        exact[k] += total(sum);
    }
}

// residual = from - U V^T over a block, and with REFRESH products += u^T U, for K directions; `basis` and `products`
// (K, wide). Returns the sum of the residual's squares.
template <int K, bool REFRESH>
static float take_directions(const float *__restrict u, const float *from, float *residual, int64_t wide, const float *__restrict basis,
                             const float *stored, const float *exact, float *__restrict products, int size) {
    Floats taken[K], weight[K];
    for (int k = 0; k < K; k++) taken[k] = all(-stored[k]), weight[k] = all(exact[k]);
    Sum squares;
    for (int i = 0; i < size; i += 16)
        for (int p = 0; p < PARTS; p++) {
            const int at = i + p * WIDTH;
            const Floats value = load(u + at);
            Floats rest = load(from + at);
            for (int k = 0; k < K; k++) {
                rest = fma(taken[k], load(basis + k * wide + at), rest);
                if (REFRESH) store(products + k * wide + at, fma(weight[k], value, load(products + k * wide + at)));
            }
            store(residual + at, rest);
            squares.part[p] = fma(rest, rest, squares.part[p]);
        }
    return total(squares);
}

// The same for all directions.
static float take_carry(const LeantuneTernary *t, const float *u, float *residual, int64_t wide, const float *basis, const float *stored,
                        const float *exact, float *products, int size) {
    float squares = 0.0f;
    const float *from = u;
    int k = 0;
    for (; k + 4 <= t->rank; k += 4, from = residual)
        squares = (t->refresh ? take_directions<4, true> : take_directions<4, false>)(u, from, residual, wide, basis + k * wide, stored + k,
                                                                                    exact + k, products + k * wide, size);
    for (; k < t->rank; k++, from = residual)
        squares = (t->refresh ? take_directions<1, true> : take_directions<1, false>)(u, from, residual, wide, basis + k * wide, stored + k,
                                                                                    exact + k, products + k * wide, size);
    return squares;
}

// The second half of a row's step, a group of it: encode v, then u; move the weights.
static void encode_group(const LeantuneTernary *t, const Columns &columns, const Panel &panel, const Group &g, int64_t row, int r) {
    const int64_t at = r * panel.wide + g.left, bytes = row * t->bytes_per_row + g.bytes;
    const uint64_t key = row_key(t, row);
    float scales[LANES], second_squares[5], *squares = panel.squares + 5 * r;
    for (int b = 0; b < g.blocks; b++) random_words(seed_of(key, g.block + b), g.used[b], panel.words + b * t->block / 2);
    encode_variance(t, columns, g, row, panel.ratio + at, panel.old_trits + r * panel.wide_digits + g.left, panel.sums + r * t->blocks_per_row + g.block, panel.offset,
                    panel.words, panel.trits);
    const float *u = panel.u + at, *residual = t->rank ? panel.residual + r * panel.group : u;
    if (!t->rank) block_squares(t, g, u, squares);
    encode_momentum(t, g, row, 0, residual, squares, panel.trits, scales);
    if (t->planes == 2) {
        subtract_plane(t, g, residual, panel.trits, scales, panel.work);
        residual = panel.work;
        pack(panel.trits, g.n, t->momentum_trits[0] + bytes);
        block_squares(t, g, residual, second_squares);
        encode_momentum(t, g, row, 1, residual, second_squares, panel.trits, scales);
    }
    move_group(t, g, row, u, residual, panel.trits, scales, panel.words, panel.offset, panel.second_work);
    pack(panel.trits, g.n, t->momentum_trits[t->planes - 1] + bytes);
}

// A panel's rows from `first` on. `products`: of u and U, (rank, wide).
static void step_panel(const LeantuneTernary *t, const Columns &columns, const Panel &panel, int64_t first, int count, float *products) {
    const int rank = t->rank;
    for (int i = 0; i < count * rank; i++) {
        panel.before[i] = t->beta1 * from_bf16(t->carry_rows[first * rank + i]);
        panel.exact[i] = 0.0f;
    }
    for (int r = 0; r < count; r++) fetch(t->weight, t->weight_dtype, (first + r) * t->cols, t->cols);
    for (const Group &g : columns.groups) {
        for (int r = 0; r < count; r++) {
            const int64_t bytes = (first + r) * t->bytes_per_row + g.bytes;
            for (int plane = 0; plane < t->planes; plane++)
                unpack(t->momentum_trits[plane] + bytes, g.n, panel.momentum[plane] + r * panel.digits, g.padded);
            unpack(t->variance_trits + bytes, g.n, panel.old_trits + r * panel.wide_digits + g.left, g.padded);
            write_tables(t, g, first + r, panel.tables + 40 * r);
        }
        for (int b = 0; b < g.blocks; b++)
            for (int r = 0; r < count; r++) {
                const int64_t column = g.left + b * t->block;
                decode_block(t, columns, panel, g, first + r, r, b);
                if (rank)
                    add_dots(panel.u + r * panel.wide + column, columns.basis + column, columns.wide, rank, panel.exact + r * rank, g.used[b]);
            }
    }
    for (int i = 0; i < count * rank; i++) {
        t->carry_rows[first * rank + i] = to_bf16(panel.exact[i]);
        panel.stored[i] = from_bf16(t->carry_rows[first * rank + i]);
    }
    for (const Group &g : columns.groups) {
        for (int b = 0; rank && b < g.blocks; b++)
            for (int r = 0; r < count; r++) {
                const int64_t inside = b * t->block, column = g.left + inside;
                panel.squares[5 * r + b] =
                    take_carry(t, panel.u + r * panel.wide + column, panel.residual + r * panel.group + inside, columns.wide,
                               columns.basis + column, panel.stored + r * rank, panel.exact + r * rank, products + column, g.used[b]);
            }
        for (int r = 0; r < count; r++) encode_group(t, columns, panel, g, first + r, r);
    }
}

// `products`: Y of these rows, (rank, wide).
static void step_rows(const LeantuneTernary *t, const Columns &columns, int64_t top, int64_t bottom, float *products) {
    const Panel panel(t, columns);
    if (t->refresh) std::memset(products, 0, sizeof(float) * (size_t)(t->rank * panel.wide));
    for (int64_t first = top; first < bottom; first += panel.rows) {
        const int count = (int)(bottom - first < panel.rows ? bottom - first : panel.rows);
        for (int64_t row = first + count; t->grad_column == 1 && row < first + 2 * count && row < t->rows; row++)
            fetch(t->grad, t->grad_dtype, row * t->grad_row, t->cols);
        step_panel(t, columns, panel, first, count, products);
    }
}

// `products`: Y of each of `chunks` ranges of rows, `size` numbers each.
static void step(const LeantuneTernary *t, float *products, int64_t size, int chunks) {
    const Columns columns(t);
#pragma omp parallel for num_threads(t->threads) schedule(dynamic, 1)
    for (int chunk = 0; chunk < chunks; chunk++)
        step_rows(t, columns, t->rows * chunk / chunks, t->rows * (chunk + 1) / chunks, products + chunk * size);
}

// The same, one range after the other: `products` holds their sum and, behind it, room for one.
static void step_in_order(const LeantuneTernary *t, float *products, int64_t size, int chunks) {
    const Columns columns(t);
    for (int chunk = 0; chunk < chunks; chunk++) {
        float *mine = products + (chunk ? size : 0);
        step_rows(t, columns, t->rows * chunk / chunks, t->rows * (chunk + 1) / chunks, mine);
        for (int64_t i = 0; chunk && i < size; i++) products[i] += mine[i];
    }
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
static void exact_rows(const LeantuneTernary *t, int64_t top, int64_t bottom) {
    std::vector<float> scratch((size_t)(2 * t->block));
    std::vector<uint32_t> bits((size_t)(t->block + 15) / 16 * 8 + 16);
    const float root_bias = __builtin_sqrtf(t->bias);
    for (int64_t row = top; row < bottom; row++) {
        const uint64_t key = row_key(t, row);
        for (int64_t left = 0; left < t->cols; left += t->block) {
            const int n = (int)(t->cols - left < t->block ? t->cols - left : t->block);
            const int64_t offset = row * t->cols + left;
            float *__restrict grad = scratch.data(), *__restrict u = t->exact_momentum + offset, *__restrict v = t->exact_variance + offset;
            read_row(t->grad, t->grad_dtype, row * t->grad_row + left * t->grad_column, t->grad_column, n, grad);
            for (int i = 0; i < n; i++) {
                const float g = grad[i] * t->grad_scale;
                v[i] = fma(v[i], t->beta2, t->rest2 * g * g);
                u[i] = fma(t->rest1, g / fma(__builtin_sqrtf(v[i]), root_bias, t->eps) - u[i], u[i]);
            }
            if (t->stochastic) random_words(seed_of(key, left / t->block), (n + 15) / 16 * 16, bits.data());
            write_weight(t, offset, u, bits.data(), scratch.data() + t->block, n);
        }
    }
}

// `values` (rows, cols) become the weights of as many rows and columns from (top, left) on, rounded stochastically; left
// is a multiple of t->block. A weight has 16 bits, or 24 with its remainder.
static void store_rows(const LeantuneTernary *t, const float *values, int64_t top, int64_t rows, int64_t left, int64_t cols) {
    std::vector<uint32_t> bits((size_t)(t->block + 15) / 16 * 8 + 16);
    for (int64_t r = 0; r < rows; r++) {
        const uint64_t key = row_key(t, top + r);
        for (int64_t i = 0; i < cols; i += t->block) {
            const int n = (int)(cols - i < t->block ? cols - i : t->block);
            const int64_t offset = (top + r) * t->cols + left + i;
            const uint32_t *pattern = (const uint32_t *)(values + r * cols + i);
            random_words(seed_of(key, (left + i) / t->block), (n + 15) / 16 * 16, bits.data());
            if (t->remainder)
                store_24(pattern, bits.data(), 0xFF, 0, (uint16_t *)t->weight + offset, t->remainder + offset, n);
            else
                store_bf16(pattern, bits.data(), (uint16_t *)t->weight + offset, n);
        }
    }
}

// columns += g^2 of R rows.
template <int R, class Element>
static void square_rows(const LeantuneTernary *t, const Element *grad, double *__restrict columns) {
    const float factor = t->grad_scale;
    int64_t i = 0;
    if (t->grad_column == 1)
        for (; i + WIDTH <= t->cols; i += WIDTH) {
            Doubles sum(columns + i);
            for (int r = 0; r < R; r++) {
                const Floats g = read(grad + r * t->grad_row + i) * factor;
                sum.add(g * g);
            }
            sum.store(columns + i);
        }
    for (; i < t->cols; i++)
        for (int r = 0; r < R; r++) {
            const float g = read_one(grad + r * t->grad_row + i * t->grad_column) * factor;
            columns[i] += (double)(g * g);
        }
}

template <class Element>
static void square_rows(const LeantuneTernary *t, const Element *grad, int64_t top, int64_t bottom, double *columns) {
    std::memset(columns, 0, sizeof(double) * (size_t)t->cols);
    for (; top + 4 <= bottom; top += 4) square_rows<4>(t, grad + top * t->grad_row, columns);
    for (; top < bottom; top++) square_rows<1>(t, grad + top * t->grad_row, columns);
}

// columns = sums of g^2 over rows [top, bottom).
static void square_rows(const LeantuneTernary *t, int64_t top, int64_t bottom, double *columns) {
    if (t->grad_dtype == LEANTUNE_FLOAT32)
        square_rows(t, (const float *)t->grad, top, bottom, columns);
    else
        square_rows(t, (const uint16_t *)t->grad, top, bottom, columns);
}
