// SPDX-License-Identifier: Apache-2.0
// How the two products of attention read rows of elements. Included by each ISA's source inside its
// own unnamed namespace, behind math.hpp.

// How elements are read. Codes whose value is off by a power of two are faster to widen: kFactor,
// which goes into a scale, makes up for it.
template <DType kDType>
struct Read : Element<kDType> {
    static constexpr float kFactor = 1;
};
#if defined(KVCORE_HALVES)
template <>
struct Read<DType::kFloat8E4M3FN> : Element<DType::kFloat8E4M3FN> {
    static constexpr float kFactor = 0x1p8F;
    // The bits of a half whose exponent is too low by eight. Only a NaN's carry into bit 14, which
    // then makes it the NaN of a half.
    static F32 widen(U8 codes) {
        const U16 half = (signed_words(codes) << 7) & 0xbfff;
        return widen_half(half | ((half + 0x80) & 0x4000));
    }
};
#endif

template <DType kDType>
inline F32 read_elements(const std::byte* from, std::int64_t i, std::int64_t n) {
    using Storage = typename Read<kDType>::Storage;
    const std::byte* at = from + i * item_size(kDType);
    return Read<kDType>::widen(n == kLanes ? load<Storage>(at) : load_some<Storage>(at, n));
}

// Elements i .. i + kLanes of n as floats, zeros beyond the end, which only the last ones may
// reach.
template <DType kDType, bool kMayEnd>
inline F32 load_padded(const std::byte* from, std::int64_t i, std::int64_t n) {
    if (!kMayEnd || i + kLanes <= n) return read_elements<kDType>(from, i, kLanes);
    return i < n ? read_elements<kDType>(from, i, n - i) : F32{};
}

// ---- two elements to a lane --------------------------------------------------------------------
// Of 32 bits with two codes of bfloat16, one is a shift away from being a float and the other one a
// mask: half of what widening them in order takes. Those of a block of lanes then lie apart, first
// the even ones and then the odd ones, so queries are brought into that order and sums out of it.

template <DType kDType>
constexpr bool kIsPaired = kDType == DType::kBFloat16;

inline F32 even_of(U32 pairs) { return floats(pairs << 16); }
inline F32 odd_of(U32 pairs) { return floats(pairs & 0xffff0000U); }

// Elements of a query that are multiplied in such an order: the same for all instruction sets.
constexpr std::int64_t kPairedElements = 32;

// The order in which `dots` takes elements, for all whole blocks of `dim`.
inline void part_pairs(float* query, std::int64_t dim) {
    for (std::int64_t i = 0; i + kPairedElements <= dim; i += kPairedElements) {
        F32 even[kSixteen];
        F32 odd[kSixteen];
        for (std::int64_t part = 0; part < kSixteen; ++part) {
            const float* at = query + i + 2 * part * kLanes;
            even[part] = even_lanes(load<F32>(at), load<F32>(at + kLanes));
            odd[part] = odd_lanes(load<F32>(at), load<F32>(at + kLanes));
        }
        for (std::int64_t part = 0; part < kSixteen; ++part) {
            store(query + i + part * kLanes, even[part]);
            store(query + i + 16 + part * kLanes, odd[part]);
        }
    }
}

// Back from the order in which sums of such values are kept: two registers at a time.
inline void join_pairs(float* sums, std::int64_t dim) {
    for (std::int64_t i = 0; i + 2 * kLanes <= dim; i += 2 * kLanes) {
        const auto even = load<F32>(sums + i);
        const auto odd = load<F32>(sums + i + kLanes);
        store(sums + i, low_zipped(even, odd));
        store(sums + i + kLanes, high_zipped(even, odd));
    }
}

// ---- what is read later ------------------------------------------------------------------------
// No processor foresees where the successor of a page lies. It is asked for line by line while
// something else is computed, which leaves room for what is needed at once. What asks is always
// inlined: GCC takes a function that does nothing else for one without effect, and drops the call.

constexpr std::int64_t kLineBytes = 64;

[[gnu::always_inline]] inline void ask_for(const std::byte* line) {
    __builtin_prefetch(line, 0, 3);
}

[[gnu::always_inline]] inline void ask_for_row(const std::byte* row, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += kLineBytes) ask_for(row + i);
}

/// A head's rows in a tile, wherever they lie.
struct HeadRowsAt {
    const std::byte* const* rows;
    std::int64_t offset;  // bytes

    const std::byte* at(std::int64_t row) const { return rows[row] + offset; }
};

/// Elements of such rows, and what is read later.
template <DType kDType>
struct PointedRows {
    static constexpr bool kIsConverted = true;
    static constexpr bool kIsInPairs = kIsPaired<kDType>;
    HeadRowsAt now;
    HeadRowsAt next;
    std::int64_t n;  // elements of a row

    // Elements i .. i + kN * kLanes of a row.
    template <int kN, bool kMayEnd>
    void read(std::int64_t row, std::int64_t i, F32 (&into)[kN]) const {
        const std::byte* from = now.at(row);
        if constexpr (kIsInPairs && kN > 1) {
            KVCORE_UNROLL
            for (int c = 0; c < kN; c += 2) {
                const U32 pairs = load<U32>(from + (i + c * kLanes) * item_size(kDType));
                into[c] = even_of(pairs);
                into[c + 1] = odd_of(pairs);
            }
        } else {
            KVCORE_UNROLL
            for (int c = 0; c < kN; ++c) {
                into[c] = load_padded<kDType, kMayEnd>(from, i + c * kLanes, n);
            }
        }
        if (!kMayEnd) ask<kN * kLanes * item_size(kDType)>(row, i * item_size(kDType));
    }
    void ask_no_more() { next = now; }

   private:
    // Asks for as many bytes as were read, kBytes at `at` of a row. Lines that lie side by side
    // come faster one right behind the other: where a row is read for less than two of them, they
    // are those of another row, the first half of the rows while the first line is read.
    template <std::int64_t kBytes>
    [[gnu::always_inline]] void ask(std::int64_t row, std::int64_t at) const {
        constexpr std::int64_t kTwo = 2 * kLineBytes;
        const std::int64_t first = at / kTwo * kTwo;
        if (kBytes >= kTwo || first + kTwo > n * item_size(kDType)) {
            for (std::int64_t i = 0; i < kBytes; i += kLineBytes) ask_for(next.at(row) + at + i);
        } else {
            const std::int64_t line =
                at % kTwo * kTileKeys / kLineBytes + row * kBytes / kLineBytes;
            ask_for(next.at(line / 2) + first + line % 2 * kLineBytes);
        }
    }
};
struct DenseRows {
    static constexpr bool kIsConverted = false;
    static constexpr bool kIsInPairs = false;
    const float* data;
    std::int64_t stride;  // floats
    std::int64_t n;       // padded

    template <int kN, bool kMayEnd>
    void read(std::int64_t row, std::int64_t i, F32 (&into)[kN]) const {
        KVCORE_UNROLL
        for (int c = 0; c < kN; ++c) into[c] = load<F32>(data + row * stride + i + c * kLanes);
    }
    void ask_no_more() {}
};
