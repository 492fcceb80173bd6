// SPDX-License-Identifier: Apache-2.0
// The conversions of a wide dtype as a table. Each ISA's source includes this file inside its own
// unnamed namespace, after quantize.hpp and nvfp4.hpp.

template <DType kWide>
constexpr WideKernels wide_kernels() noexcept {
    using D = DType;
    static_assert(kNumNarrow == 3 && kNumWide == 3, "a list below lacks a dtype");
    return {raise_to_largest<kWide>,
            {quantize<kWide, D::kFloat8E4M3FN>, quantize<kWide, D::kFloat8E5M2>,
             quantize<kWide, D::kInt8>},
            {quantize_by<kWide, D::kFloat8E4M3FN>, quantize_by<kWide, D::kFloat8E5M2>,
             quantize_by<kWide, D::kInt8>},
            {dequantize<D::kFloat8E4M3FN, kWide>, dequantize<D::kFloat8E5M2, kWide>,
             dequantize<D::kInt8, kWide>},
            {widen<kWide, D::kFloat32>, widen<kWide, D::kFloat16>, widen<kWide, D::kBFloat16>},
            quantize_nvfp4<kWide>,
            dequantize_nvfp4<kWide>};
}
