// SPDX-License-Identifier: Apache-2.0
// Reads rows of elements for the two products of attention. Each ISA's source includes this file
// inside its own unnamed namespace, after math.hpp.

// Reads elements of a dtype. Some codes are faster to widen to a value that is off by a power of
// two: a scale is multiplied by kFactor to correct it.
template <DType kDType>
struct Read : Element<kDType> {
    static constexpr float kFactor = 1;
};
#if defined(KVCORE_HALVES)
template <>
struct Read<DType::kFloat8E4M3FN> : Element<DType::kFloat8E4M3FN> {
    static constexpr float kFactor = 0x1p8F;
    // The bits of a half whose exponent is too low by eight. The addition carries into bit 14 only
    // for a NaN; this bit makes the result a NaN of a half.
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

// Loads elements i .. i + kLanes of n as floats, with zeros after the end. Only with kMayEnd may
// the lanes reach past the end.
template <DType kDType, bool kMayEnd>
inline F32 load_padded(const std::byte* from, std::int64_t i, std::int64_t n) {
    if (!kMayEnd || i + kLanes <= n) return read_elements<kDType>(from, i, kLanes);
    return i < n ? read_elements<kDType>(from, i, n - i) : F32{};
}

// ---- two elements in a lane --------------------------------------------------------------------
// Two bfloat16 codes in 32 bits become floats with one shift and one mask: half the cost of
// widening them in order. This separates the elements of a block of lanes, first the even elements,
// then the odd elements. So queries are put into the same order, and sums are put back in order at
// the end.

template <DType kDType>
constexpr bool kIsPaired = kDType == DType::kBFloat16;

inline F32 even_of(U32 pairs) { return floats(pairs << 16); }
inline F32 odd_of(U32 pairs) { return floats(pairs & 0xffff0000U); }

// The number of query elements that are reordered together, the same for all instruction sets.
constexpr std::int64_t kPairedElements = 32;

// Puts the elements of a query into the order in which `dots` reads keys, for all whole blocks of
// `dim`.
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

// Puts the sums of paired values back in order, two registers at a time.
inline void join_pairs(float* sums, std::int64_t dim) {
    for (std::int64_t i = 0; i + 2 * kLanes <= dim; i += 2 * kLanes) {
        const auto even = load<F32>(sums + i);
        const auto odd = load<F32>(sums + i + kLanes);
        store(sums + i, low_zipped(even, odd));
        store(sums + i + kLanes, high_zipped(even, odd));
    }
}

// ---- prefetching -------------------------------------------------------------------------------
// A processor cannot predict the address of the page that follows. The code prefetches it line by
// line while it computes something else, which leaves room for loads that are needed at once. The
// prefetching functions are always inlined: GCC takes a function that only prefetches for a
// function without effect, and drops the call.

constexpr std::int64_t kLineBytes = 64;

[[gnu::always_inline]] inline void ask_for(const std::byte* line) {
    __builtin_prefetch(line, 0, 3);
}

[[gnu::always_inline]] inline void ask_for_row(const std::byte* row, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += kLineBytes) ask_for(row + i);
}

/// The rows of a head in a tile, at any addresses.
struct HeadRowsAt {
    const std::byte* const* rows;
    std::int64_t offset;  // bytes

    const std::byte* at(std::int64_t row) const { return rows[row] + offset; }
};

/// The elements of a head's rows, and the rows to prefetch.
template <DType kDType>
struct PointedRows {
    static constexpr bool kIsConverted = true;
    static constexpr bool kIsInPairs = kIsPaired<kDType>;
    HeadRowsAt now;
    HeadRowsAt next;
    std::int64_t n;  // elements of a row

    // Reads elements i .. i + kN * kLanes of a row.
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
    // Prefetches the number of bytes that was read, kBytes at `at` of a row. Two neighbouring lines
    // arrive faster if they are prefetched directly one after the other. If a read of a row takes
    // less than two lines, the pair of lines belongs to another row: while the first line of the
    // rows is read, pairs of the first half of the rows are prefetched.
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
