// SPDX-License-Identifier: Apache-2.0
// The two products of attention, register-blocked. Each ISA's source includes this file inside its
// own unnamed namespace, after rows.hpp.

/// A block of sums. Before anything is added, row m is multiplied by keeps[m]; with `keeps`
/// nullptr, all sums begin at 0.
struct Sums {
    float* data;
    std::int64_t stride;
    const float* keeps;
};

/// The left factors of a product, one row for each vector: queries.
struct Factors {
    const float* data;
    std::int64_t stride;

    float at(std::int64_t m, std::int64_t r) const { return data[m * stride + r]; }
    void skip(std::int64_t n) { data += n * stride; }
};
/// Weights as left factors. Their rows have a constant distance, so one register addresses many
/// rows.
struct Weights {
    const float* data;

    float at(std::int64_t m, std::int64_t r) const { return data[m * kTileKeys + r]; }
    void skip(std::int64_t n) { data += n * kTileKeys; }
};

// sums[m][i ..] += factors[m][r] * rows[r][i ..] for rows begin .. end, in order.
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

constexpr int kBlockVectors = 6;  // vectors of a block, if there are many

// The number of column registers that one pass over the rows fills, as many as fit. Each pass looks
// up the page of every row again, so fewer passes are cheaper.
constexpr int columns_at_a_time(int vectors) {
    constexpr int kMost = KVCORE_LANES == 16 ? 4 : 2;
    if (KVCORE_LANES == 16 && vectors == 1) return 2 * kMost;
    return vectors > 6 ? kMost / 2 : kMost;
}

// Adds columns i .. `whole`, kN registers at a time, then fewer; returns the end of the added
// columns.
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

// Adds the products of n vectors of factors to columns from .. to of the sums, which are padded.
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
    // Rows that are converted while they are read are read for more vectors at a time. With few
    // registers, this leaves one register for a row, but pairs need two.
    constexpr bool kHasRoom = kLanes == 16 || !Rows::kIsInPairs;
    using Most = std::integral_constant<int, Rows::kIsConverted && kHasRoom ? 8 : kBlockVectors>;
    while (n >= Most::value) n -= step(Most());
    while (n >= 4 && n != 5) n -= step(std::integral_constant<int, 4>());
    if (n >= 3) n -= step(std::integral_constant<int, 3>());
    if (n >= 2) n -= step(std::integral_constant<int, 2>());
    if (n >= 1) step(std::integral_constant<int, 1>());
}

/// The keys of one multiplication: the rows to read now, and the rows to prefetch.
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

// sums[t][m] += key[t] * queries[m][i ..]. The registers of a sum have sixteen lanes together;
// `part` selects the register that the products are added to.
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

// sums[t][m] += queries[m] . keys[t] for the sixteen elements from i.
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

// sums[t][m] += queries[m] . keys[t] for one cache line of elements. Paired elements are in the
// order of `part_pairs`.
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

// sums[t][m] = queries[m] . keys[t]; the sixteen lanes are not yet added up.
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
// scores[m][t] for four vectors and four keys. The sums use all registers, and the lanes of all
// sums are added up together.
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
    F32 halves[2];  // of two keys; a quarter: vectors m and m + 4 of key 0, then of key 1
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

// scores[m][begin .. end] = queries[m] . keys[begin .. end]. Scores are computed for groups of four
// keys, so `keys` must have pointers up to the next multiple of four. Keys have `dim` elements;
// queries are padded with zeros.
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
        next = keys;  // prefetch only once
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
