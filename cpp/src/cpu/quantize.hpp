// SPDX-License-Identifier: Apache-2.0
// Changing dtypes with a scale. Included by each ISA's source inside its own unnamed namespace,
// behind lanes.hpp.

// Calls body(index of the first element, elements) for runs of at most kLanes.
template <class Body>
inline void for_lanes(std::int64_t n, Body&& body) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, n - i);
}

template <DType kDType>
inline F32 load_elements(const std::byte* from, std::int64_t i, std::int64_t n) {
    using Storage = typename Element<kDType>::Storage;
    const std::byte* at = from + i * item_size(kDType);
    return Element<kDType>::widen(n == kLanes ? load<Storage>(at) : load_some<Storage>(at, n));
}

template <DType kDType>
inline void store_elements(std::byte* to, std::int64_t i, std::int64_t n, F32 value) {
    std::byte* at = to + i * item_size(kDType);
    const auto codes = Element<kDType>::narrow(value);
    if (n == kLanes) {
        store(at, codes);
    } else {
        store_some(at, codes, n);
    }
}

// The largest lane.
inline std::uint32_t largest_lane(U32 value) {
    std::uint32_t lanes[kLanes];
    store(lanes, value);
    for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::int64_t i = 0; i < half; ++i) {
            lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
        }
    }
    return lanes[0];
}

// The largest of n magnitudes as the bits of a float; of the finite ones where those are asked for.
template <DType kIn, bool kFinite>
std::uint32_t largest_bits(const std::byte* source, std::int64_t n) {
    U32 most{};
    U32 other{};  // two, for a maximum has to wait for the one before
    bool is_odd = false;
    for_lanes(n, [&](std::int64_t i, std::int64_t count) {
        U32 magnitude = bits(load_elements<kIn>(source, i, count)) & ~kSign;
        if (kFinite) magnitude = magnitude < kInfinity ? magnitude : U32{};
        (is_odd ? other : most) = larger(magnitude, is_odd ? other : most);
        is_odd = !is_odd;
    });
    return largest_lane(larger(most, other));
}

// The largest finite magnitude of n elements.
template <DType kIn>
float largest_magnitude(const std::byte* source, std::int64_t n) {
    std::uint32_t found = largest_bits<kIn, false>(source, n);
    if (found >= kInfinity) found = largest_bits<kIn, true>(source, n);
    float value;
    __builtin_memcpy(&value, &found, sizeof value);
    return value;
}

// destination = source * scale
template <DType kIn, DType kOut>
void multiply(const std::byte* source, std::byte* destination, std::int64_t n, float scale) {
    for_lanes(n, [&](std::int64_t i, std::int64_t count) {
        store_elements<kOut>(destination, i, count, load_elements<kIn>(source, i, count) * scale);
    });
}

// The scale of the next group is worked out before this one's codes, which do not wait for it.
template <DType kIn, DType kOut>
void quantize_groups(const std::byte* source, std::byte* destination, float* scales,
                     std::int64_t groups, std::int64_t group, float code_limit) {
    const auto find_scale = [&](std::int64_t g) {
        const float most = largest_magnitude<kIn>(source + g * group * item_size(kIn), group);
        const float ratio = most / code_limit;
        scales[g] = ratio > kSmallestScale ? ratio : kSmallestScale;
    };
    if (groups > 0) find_scale(0);
    for (std::int64_t g = 0; g < groups; ++g) {
        if (g + 1 < groups) find_scale(g + 1);
        multiply<kIn, kOut>(source + g * group * item_size(kIn),
                            destination + g * group * item_size(kOut), group, 1.0F / scales[g]);
    }
}

template <DType kIn, DType kOut>
void dequantize_groups(const std::byte* source, const float* scales, std::byte* destination,
                       std::int64_t groups, std::int64_t group) {
    for (std::int64_t g = 0; g < groups; ++g) {
        multiply<kIn, kOut>(source + g * group * item_size(kIn),
                            destination + g * group * item_size(kOut), group, scales[g]);
    }
}

template <DType kWide>
constexpr WideKernels wide_kernels() noexcept {
    using D = DType;
    return {largest_magnitude<kWide>,
            {quantize_groups<kWide, D::kFloat8E4M3FN>, quantize_groups<kWide, D::kFloat8E5M2>,
             quantize_groups<kWide, D::kInt8>},
            {multiply<kWide, D::kFloat8E4M3FN>, multiply<kWide, D::kFloat8E5M2>,
             multiply<kWide, D::kInt8>},
            {dequantize_groups<D::kFloat8E4M3FN, kWide>, dequantize_groups<D::kFloat8E5M2, kWide>,
             dequantize_groups<D::kInt8, kWide>},
            {multiply<D::kFloat8E4M3FN, kWide>, multiply<D::kFloat8E5M2, kWide>,
             multiply<D::kInt8, kWide>}};
}
