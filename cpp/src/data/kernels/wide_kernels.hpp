// SPDX-License-Identifier: Apache-2.0
// The conversions of a wide dtype as a table. Each ISA's source includes this file inside its own
// unnamed namespace, after quantize.hpp and nvfp4.hpp.

template <DType kWide, std::size_t... kWideIndex, std::size_t... kNarrowIndex>
constexpr WideKernels wide_kernels(std::index_sequence<kWideIndex...>,
                                   std::index_sequence<kNarrowIndex...>) noexcept {
    return {raise_to_largest<kWide>,
            {quantize<kWide, static_cast<DType>(kNumWide + kNarrowIndex)>...},
            {quantize_by<kWide, static_cast<DType>(kNumWide + kNarrowIndex)>...},
            {dequantize<static_cast<DType>(kNumWide + kNarrowIndex), kWide>...},
            {widen<kWide, static_cast<DType>(kWideIndex)>...},
            quantize_nvfp4<kWide>,
            dequantize_nvfp4<kWide>};
}

template <DType kWide>
constexpr WideKernels wide_kernels() noexcept {
    return wide_kernels<kWide>(std::make_index_sequence<kNumWide>{},
                               std::make_index_sequence<kNumNarrow>{});
}
