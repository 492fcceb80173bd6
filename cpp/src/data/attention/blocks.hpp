// SPDX-License-Identifier: Apache-2.0
// The two products of attention, register-blocked. Included by each ISA's source inside its own
// unnamed namespace, behind attention_rows.hpp.

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
        rows.template read<kN, kMayEnd>(r, i, row);
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

constexpr int kBlockVectors = 6;  // at a time, of many

// Registers of columns at a time, as many as there is room for: a row that is returned to less
// often has its page looked up less often.
constexpr int columns_at_a_time(int vectors) {
    constexpr int kMost = KVCORE_LANES == 16 ? 4 : 2;
    if (KVCORE_LANES == 16 && vectors == 1) return 2 * kMost;
    return vectors > 6 ? kMost / 2 : kMost;
}

// Columns i .. of those before `whole`, kN registers at a time and then fewer; returns where they
// end.
template <int kM, int kN, class By, class Rows>
inline std::int64_t add_columns(const By& factors, const Rows& rows, std::int64_t begin,
                                std::int64_t end, std::int64_t i, std::int64_t whole,
                                const Sums& sums) {
    for (; i + kN * kLanes <= whole; i += kN * kLanes) {
        add_products<kM, kN, false>(factors, rows, begin, end, i, sums);
    }
    if constexpr (kN > 1) {
        return add_columns<kM, kN / 2>(factors, rows, begin, end, i, whole, sums);
    }
    return i;
}

template <int kM, class By, class Rows>
void add_products_of(const By& factors, const Rows& rows, std::int64_t begin, std::int64_t end,
                     std::int64_t from, std::int64_t to, const Sums& sums) {
    const std::int64_t whole = rows.n < to ? rows.n : to;
    const std::int64_t i =
        add_columns<kM, columns_at_a_time(kM)>(factors, rows, begin, end, from, whole, sums);
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
    // What is converted as it is read is better read for more vectors at a time; with few registers
    // that leaves one for a row, and pairs take two.
    constexpr bool kHasRoom = kLanes == 16 || !Rows::kIsInPairs;
    using Most = std::integral_constant<int, Rows::kIsConverted && kHasRoom ? 8 : kBlockVectors>;
    while (n >= Most::value) n -= step(Most());
    while (n >= 4 && n != 5) n -= step(std::integral_constant<int, 4>());
    if (n >= 3) n -= step(std::integral_constant<int, 3>());
    if (n >= 2) n -= step(std::integral_constant<int, 2>());
    if (n >= 1) step(std::integral_constant<int, 1>());
}

/// Keys that are multiplied at a time: what is read of them, and what is read later.
template <int kKeys>
struct KeyRows {
    const std::byte* now[kKeys];
    const std::byte* later[kKeys];

    KeyRows(HeadRowsAt keys, HeadRowsAt next, std::int64_t first_key) {
        KVCORE_UNROLL
        for (int t = 0; t < kKeys; ++t) {
            now[t] = keys.at(first_key + t);
            later[t] = next.at(first_key + t);
        }
    }
    [[gnu::always_inline]] void ask_for_lines(std::int64_t at) const {
        KVCORE_UNROLL
        for (int t = 0; t < kKeys; ++t) ask_for(later[t] + at);
    }
};

// sums[t][m] += key[t] * queries[m][i ..], whose products lie in one of the registers of sixteen
// lanes.
template <int kKeys, int kM>
inline void add_lanes(const float* queries, std::int64_t query_stride, std::int64_t i,
                      const F32 (&key)[kKeys], std::int64_t part,
                      F32 (&sums)[kKeys][kM][kSixteen]) {
    KVCORE_UNROLL
    for (int m = 0; m < kM; ++m) {
        const F32 query = keep_in_register(load<F32>(queries + m * query_stride + i));
        KVCORE_UNROLL
        for (int t = 0; t < kKeys; ++t) sums[t][m][part] = fused(key[t], query, sums[t][m][part]);
    }
}

// sums[t][m] += queries[m] . keys[t] over the sixteen elements from i on.
template <DType kDType, int kKeys, int kM, bool kMayEnd>
inline void dot_sixteen(const float* queries, std::int64_t query_stride, const KeyRows<kKeys>& keys,
                        std::int64_t dim, std::int64_t i, F32 (&sums)[kKeys][kM][kSixteen]) {
    KVCORE_UNROLL
    for (int part = 0; part < kSixteen; ++part) {
        const std::int64_t at = i + part * kLanes;
        F32 key[kKeys];
        KVCORE_UNROLL
        for (int t = 0; t < kKeys; ++t) key[t] = load_padded<kDType, kMayEnd>(keys.now[t], at, dim);
        add_lanes(queries, query_stride, at, key, part, sums);
    }
}

// The same over a line of elements, in the order of `part_pairs` where they come in pairs.
template <DType kDType, int kKeys, int kM>
inline void dot_line(const float* queries, std::int64_t query_stride, const KeyRows<kKeys>& keys,
                     std::int64_t dim, std::int64_t i, F32 (&sums)[kKeys][kM][kSixteen]) {
    if constexpr (!kIsPaired<kDType>) {
        for (std::int64_t at = 0; at < kLineBytes / item_size(kDType); at += 16) {
            dot_sixteen<kDType, kKeys, kM, false>(queries, query_stride, keys, dim, i + at, sums);
        }
        return;
    }
    KVCORE_UNROLL
    for (std::int64_t part = 0; part < kSixteen; ++part) {
        U32 pairs[kKeys];
        F32 key[kKeys];
        KVCORE_UNROLL
        for (int t = 0; t < kKeys; ++t) {
            pairs[t] = load<U32>(keys.now[t] + (i + 2 * part * kLanes) * item_size(kDType));
            key[t] = even_of(pairs[t]);
        }
        add_lanes(queries, query_stride, i + part * kLanes, key, part, sums);
        KVCORE_UNROLL
        for (int t = 0; t < kKeys; ++t) key[t] = odd_of(pairs[t]);
        add_lanes(queries, query_stride, i + 16 + part * kLanes, key, part, sums);
    }
}

// sums[t][m] = queries[m] . keys[t], still in sixteen lanes.
template <DType kDType, int kKeys, int kM>
inline void dot_rows(const float* queries, std::int64_t query_stride, HeadRowsAt keys,
                     HeadRowsAt next, std::int64_t first_key, std::int64_t dim,
                     F32 (&sums)[kKeys][kM][kSixteen]) {
    constexpr std::int64_t kLine = kLineBytes / item_size(kDType);
    const KeyRows<kKeys> rows(keys, next, first_key);
    std::int64_t i = 0;
    for (; i + kLine <= dim; i += kLine) {
        rows.ask_for_lines(i * item_size(kDType));
        dot_line<kDType>(queries, query_stride, rows, dim, i, sums);
    }
    if (i == dim) return;
    rows.ask_for_lines(i * item_size(kDType));
    for (; i + 16 <= dim; i += 16) {
        dot_sixteen<kDType, kKeys, kM, false>(queries, query_stride, rows, dim, i, sums);
    }
    if (i < dim) {
        dot_sixteen<kDType, kKeys, kM, true>(queries, query_stride, rows, dim, i, sums);
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
