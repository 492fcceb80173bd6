// SPDX-License-Identifier: Apache-2.0
// The two products of attention, register-blocked. Included by each ISA's source inside its own
// unnamed namespace, behind math.hpp.

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

// Asks for the cache line of some element. No processor foresees where the successor of a page
// lies; asking bit by bit, while something else is computed, leaves room for what is needed at
// once.
template <DType kDType>
inline void ask_for(const std::byte* row, std::int64_t i) {
    __builtin_prefetch(row + i * item_size(kDType), 0, 2);
}

inline void ask_for_row(const std::byte* row, std::int64_t bytes) {
    constexpr std::int64_t kLine = 64;
    for (std::int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(row + i, 0, 2);
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
    HeadRowsAt now;
    HeadRowsAt next;
    std::int64_t n;  // elements of a row

    template <bool kMayEnd>
    F32 at(std::int64_t row, std::int64_t i) const {
        if (!kMayEnd) ask_for<kDType>(next.at(row), i);
        return load_padded<kDType, kMayEnd>(now.at(row), i, n);
    }
    void ask_no_more() { next = now; }
};
struct DenseRows {
    static constexpr bool kIsConverted = false;
    const float* data;
    std::int64_t stride;  // floats
    std::int64_t n;       // padded

    template <bool kMayEnd>
    F32 at(std::int64_t row, std::int64_t i) const {
        return load<F32>(data + row * stride + i);
    }
    void ask_no_more() {}
};

/// What a block of sums is multiplied by before anything is added; nullptr: it begins at 0.
struct Sums {
    float* data;
    std::int64_t stride;
    const float* keeps;
};

/// Rows of numbers that rows of elements are multiplied by: queries.
struct Factors {
    const float* data;
    std::int64_t stride;

    float at(std::int64_t m, std::int64_t r) const { return data[m * stride + r]; }
    void skip(std::int64_t n) { data += n * stride; }
};
/// Weights, of which one register addresses many rows, for it is known how far apart they are.
struct Weights {
    const float* data;

    float at(std::int64_t m, std::int64_t r) const { return data[m * kTileKeys + r]; }
    void skip(std::int64_t n) { data += n * kTileKeys; }
};

// sums[m][i ..] += factors[m][r] * rows[r][i ..] over rows begin .. end, one after the other.
template <int kM, int kN, bool kMayEnd, class By, class Rows>
inline void add_products(const By& factors, const Rows& rows, std::int64_t begin, std::int64_t end,
                         std::int64_t i, const Sums& sums) {
    F32 block[kM][kN];
    KVCORE_UNROLL
    for (int m = 0; m < kM; ++m) {
        KVCORE_UNROLL
        for (int n = 0; n < kN; ++n) {
            block[m][n] =
                sums.keeps == nullptr
                    ? F32{}
                    : load<F32>(sums.data + m * sums.stride + i + n * kLanes) * all(sums.keeps[m]);
        }
    }
    for (std::int64_t r = begin; r < end; ++r) {
        F32 row[kN];
        KVCORE_UNROLL
        for (int n = 0; n < kN; ++n) row[n] = rows.template at<kMayEnd>(r, i + n * kLanes);
        KVCORE_UNROLL
        for (int m = 0; m < kM; ++m) {
            const F32 factor = all(factors.at(m, r));
            KVCORE_UNROLL
            for (int n = 0; n < kN; ++n) block[m][n] = fused(factor, row[n], block[m][n]);
        }
    }
    KVCORE_UNROLL
    for (int m = 0; m < kM; ++m) {
        KVCORE_UNROLL
        for (int n = 0; n < kN; ++n) {
            store(sums.data + m * sums.stride + i + n * kLanes, block[m][n]);
        }
    }
}

constexpr int kBlockVectors = 6;                           // at a time, of many
constexpr int kBlockColumns = KVCORE_LANES == 16 ? 4 : 2;  // registers

template <int kM, class By, class Rows>
void add_products_of(const By& factors, const Rows& rows, std::int64_t begin, std::int64_t end,
                     std::int64_t from, std::int64_t to, const Sums& sums) {
    std::int64_t i = from;
    const std::int64_t whole = rows.n < to ? rows.n : to;
    constexpr int kColumns = kM > 6 ? kBlockColumns / 2 : kBlockColumns;
    for (; i + kColumns * kLanes <= whole; i += kColumns * kLanes) {
        add_products<kM, kColumns, false>(factors, rows, begin, end, i, sums);
    }
    for (; i + kLanes <= whole; i += kLanes) {
        add_products<kM, 1, false>(factors, rows, begin, end, i, sums);
    }
    if (i < to) add_products<kM, 1, true>(factors, rows, begin, end, i, sums);
}

// The same for n vectors of factors and columns from .. to of the sums, which are padded.
template <class By, class Rows>
void add_products_to(std::int64_t n, By factors, Rows rows, std::int64_t begin, std::int64_t end,
                     std::int64_t from, std::int64_t to, Sums sums) {
    const auto step = [&](auto count) {
        constexpr int kM = decltype(count)::value;
        add_products_of<kM>(factors, rows, begin, end, from, to, sums);
        factors.skip(kM);
        sums.data += kM * sums.stride;
        if (sums.keeps != nullptr) sums.keeps += kM;
        rows.ask_no_more();
        return std::int64_t{kM};
    };
    // What is converted as it is read is better read for more vectors at a time.
    using Most = std::integral_constant<int, Rows::kIsConverted ? 8 : kBlockVectors>;
    while (n >= Most::value) n -= step(Most());
    while (n >= 4 && n != 5) n -= step(std::integral_constant<int, 4>());
    if (n >= 3) n -= step(std::integral_constant<int, 3>());
    if (n >= 2) n -= step(std::integral_constant<int, 2>());
    if (n >= 1) step(std::integral_constant<int, 1>());
}

// sums[t][m] += queries[m] . keys[t] over the sixteen elements from i on.
template <DType kDType, int kKeys, int kM, bool kMayEnd>
inline void dot_sixteen(const float* queries, std::int64_t query_stride,
                        const std::byte* const* keys, const std::byte* const* next,
                        std::int64_t dim, std::int64_t i, F32 (&sums)[kKeys][kM][kSixteen]) {
    KVCORE_UNROLL
    for (int part = 0; part < kSixteen; ++part) {
        const std::int64_t at = i + part * kLanes;
        F32 key[kKeys];
        KVCORE_UNROLL
        for (int t = 0; t < kKeys; ++t) {
            if (!kMayEnd) ask_for<kDType>(next[t], at);
            key[t] = load_padded<kDType, kMayEnd>(keys[t], at, dim);
        }
        KVCORE_UNROLL
        for (int m = 0; m < kM; ++m) {
            const F32 query = keep_in_register(load<F32>(queries + m * query_stride + at));
            KVCORE_UNROLL
            for (int t = 0; t < kKeys; ++t) {
                sums[t][m][part] = fused(key[t], query, sums[t][m][part]);
            }
        }
    }
}

// sums[t][m] = queries[m] . keys[t], still in sixteen lanes.
template <DType kDType, int kKeys, int kM>
inline void dot_rows(const float* queries, std::int64_t query_stride, HeadRowsAt keys,
                     HeadRowsAt next, std::int64_t first_key, std::int64_t dim,
                     F32 (&sums)[kKeys][kM][kSixteen]) {
    const std::byte* rows[kKeys];
    const std::byte* later[kKeys];
    KVCORE_UNROLL
    for (int t = 0; t < kKeys; ++t) {
        rows[t] = keys.at(first_key + t);
        later[t] = next.at(first_key + t);
    }
    std::int64_t i = 0;
    for (; i + 16 <= dim; i += 16) {
        dot_sixteen<kDType, kKeys, kM, false>(queries, query_stride, rows, later, dim, i, sums);
    }
    if (i < dim) {
        dot_sixteen<kDType, kKeys, kM, true>(queries, query_stride, rows, later, dim, i, sums);
    }
}

// scores[m][t] = queries[m] . keys[t] for four keys, summed in sixteen lanes.
template <DType kDType, int kM>
inline void dot_four(const float* queries, std::int64_t query_stride, HeadRowsAt keys,
                     HeadRowsAt next, std::int64_t first_key, std::int64_t dim, float* scores,
                     std::int64_t score_stride) {
    constexpr int kKeys = kM * kSixteen <= 4 ? 4 : kM * kSixteen <= 8 ? 2 : 1;  // at a time
    F4 folded[4][kM];
    KVCORE_UNROLL
    for (int first = 0; first < 4; first += kKeys) {
        F32 sums[kKeys][kM][kSixteen] = {};
        dot_rows<kDType>(queries, query_stride, keys, next, first_key + first, dim, sums);
        KVCORE_UNROLL
        for (int t = 0; t < kKeys; ++t) {
            KVCORE_UNROLL
            for (int m = 0; m < kM; ++m) folded[first + t][m] = fold(sums[t][m]);
        }
    }
    KVCORE_UNROLL
    for (int m = 0; m < kM; ++m) {
        store(scores + m * score_stride,
              sums_of(folded[0][m], folded[1][m], folded[2][m], folded[3][m]));
    }
}

#if KVCORE_LANES == 16 && defined(__AVX512F__)
// The same with as many registers as there are, whose sums are taken together.
template <DType kDType>
inline void dot_four_by_four(const float* queries, std::int64_t query_stride, HeadRowsAt keys,
                             HeadRowsAt next, std::int64_t first_key, std::int64_t dim,
                             float* scores, std::int64_t score_stride) {
    F32 sums[4][4][1] = {};
    dot_rows<kDType>(queries, query_stride, keys, next, first_key, dim, sums);
    store_quarters(sums_of_sixteen(sums[0], sums[1], sums[2], sums[3]), scores, score_stride);
}
template <DType kDType>
inline void dot_four_by_eight(const float* queries, std::int64_t query_stride, HeadRowsAt keys,
                              HeadRowsAt next, std::int64_t first_key, std::int64_t dim,
                              float* scores, std::int64_t score_stride) {
    F32 halves[2];  // of two keys: a quarter has vectors m and m + 4 of a key, then of the other
    for (int i = 0; i < 2; ++i) {
        F32 sums[2][8][1] = {};
        dot_rows<kDType>(queries, query_stride, keys, next, first_key + std::int64_t{2} * i, dim,
                         sums);
        halves[i] = sums_of_sixteen(sums[0], sums[0] + 4, sums[1], sums[1] + 4);
    }
    store_quarters(shuffled<0x88>(halves[0], halves[1]), scores, score_stride);
    store_quarters(shuffled<0xdd>(halves[0], halves[1]), scores + 4 * score_stride, score_stride);
}
#endif

// scores[m][begin .. end] = queries[m] . keys[begin .. end]; whole fours are worked out, so keys
// have pointers up to a multiple of four. `dim` elements, padded with zeros in the queries.
template <DType kDType>
void dots(std::int64_t n, const float* queries, std::int64_t query_stride, HeadRowsAt keys,
          HeadRowsAt next, std::int64_t dim, std::int64_t begin, std::int64_t end, float* scores,
          std::int64_t score_stride) {
    const auto step = [&](auto count) {
        constexpr int kM = decltype(count)::value;
        for (std::int64_t t = begin / 4 * 4; t < end; t += 4) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
            constexpr auto kDot = kM == 8   ? dot_four_by_eight<kDType>
                                  : kM == 4 ? dot_four_by_four<kDType>
                                            : dot_four < kDType,
                           kM < 4 ? kM : 1 > ;
#else
            constexpr auto kDot = dot_four<kDType, kM>;
#endif
            kDot(queries, query_stride, keys, next, t, dim, scores + t, score_stride);
        }
        next = keys;  // once is enough
        queries += kM * query_stride;
        scores += kM * score_stride;
        return std::int64_t{kM};
    };
    if constexpr (kLanes == 16) {
        while (n >= 8) n -= step(std::integral_constant<int, 8>());
    }
    while (n >= 4 && n != 5) n -= step(std::integral_constant<int, 4>());
    if (n >= 3) n -= step(std::integral_constant<int, 3>());
    if (n >= 2) n -= step(std::integral_constant<int, 2>());
    if (n >= 1) step(std::integral_constant<int, 1>());
}
