// SPDX-License-Identifier: Apache-2.0
// Turns scores into weights. Each ISA's source includes this file inside its own unnamed namespace,
// after math.hpp.

constexpr float kNothing = -__builtin_inff();  // the score of a key that is not seen

/// The states of some vectors while their keys are processed.
struct RunningStates {
    float* maxima;  // of scores
    float* totals;  // of weights
    float* keeps;   // factors for the earlier sums; padded
};

// scores = cap * tanh(score / cap) for keys from .. to.
inline void cap_scores(float* scores, std::int64_t from, std::int64_t to, float soft_cap) {
    for (std::int64_t t = from; t < to; t += kLanes) {
        const F32 score = load<F32>(scores + t);
        const F32 capped = hyperbolic_tangent(score / soft_cap) * soft_cap;
        store(scores + t, capped);
    }
}

// `from` and `to` are multiples of 16. Most tiles are whole; the loops over whole tiles have
// constant bounds.
template <bool kIsWhole>
inline float find_greatest(const float* scores, std::int64_t from, std::int64_t to) {
    if (kIsWhole) {
        from = 0;
        to = kTileKeys;
    }
    F32 found = all(kNothing);
    KVCORE_UNROLL
    for (std::int64_t t = from; t < to; t += kLanes) found = greater(load<F32>(scores + t), found);
    return greatest_lane(found);
}

// Replaces scores by weights; returns their sum.
template <bool kIsWhole>
inline float exponentiate(float* scores, std::int64_t from, std::int64_t to, float origin) {
    if (kIsWhole) {
        from = 0;
        to = kTileKeys;
    }
    F32 sums[kSixteen] = {};
    KVCORE_UNROLL
    for (std::int64_t t = from; t < to; t += 16) {
        KVCORE_UNROLL
        for (int part = 0; part < kSixteen; ++part) {
            float* at = scores + t + part * kLanes;
            const F32 weight = exponential(load<F32>(at) - all(origin));
            store(at, weight);
            sums[part] = sums[part] + weight;
        }
    }
    return sum_of(sums);
}

template <bool kIsWhole>
inline void weigh_between(std::int64_t n, float* scores, std::int64_t from, std::int64_t to,
                          const RunningStates& states) {
    for (std::int64_t m = 0; m < n; ++m) {
        const float greatest = find_greatest<kIsWhole>(scores + m * kTileKeys, from, to);
        const float before = states.maxima[m];
        states.maxima[m] = greatest > before ? greatest : before;
        states.keeps[m] = greatest > before ? before - greatest : 0;
    }
    for (std::int64_t m = 0; m < n; m += kLanes) {
        store(states.keeps + m, exponential(load<F32>(states.keeps + m)));
    }
    for (std::int64_t m = 0; m < n; ++m) {
        const float origin = states.maxima[m] == kNothing ? 0 : states.maxima[m];
        states.totals[m] = states.totals[m] * states.keeps[m] +
                           exponentiate<kIsWhole>(scores + m * kTileKeys, from, to, origin);
    }
}

// Turns the scores of n vectors for keys begin .. end of a tile into weights. The other keys of the
// same groups of sixteen get weight zero.
inline void weigh(std::int64_t n, float* scores, std::int64_t begin, std::int64_t end,
                  float soft_cap, const RunningStates& states) {
    const std::int64_t from = begin / 16 * 16;
    const std::int64_t to = (end + 15) / 16 * 16;
    for (std::int64_t m = 0; m < n; ++m) {
        float* row = scores + m * kTileKeys;
        if (soft_cap > 0) cap_scores(row, from, to, soft_cap);
        for (std::int64_t t = from; t < begin; ++t) row[t] = kNothing;
        for (std::int64_t t = end; t < to; ++t) row[t] = kNothing;
    }
    if (from == 0 && to == kTileKeys) {
        weigh_between<true>(n, scores, from, to, states);
    } else {
        weigh_between<false>(n, scores, from, to, states);
    }
}
