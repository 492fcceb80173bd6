// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvcore/dtype.hpp"

/// Elements of any dtype, by the scalar conversions.
inline float read_element(kvcore::DType dtype, const std::byte* at) {
    using kvcore::DType;
    std::uint32_t code = 0;
    std::memcpy(&code, at, static_cast<std::size_t>(kvcore::item_size(dtype)));
    switch (dtype) {
        case DType::kFloat16:
            return kvcore::from_half(static_cast<std::uint16_t>(code));
        case DType::kBFloat16:
            return kvcore::from_bfloat16(static_cast<std::uint16_t>(code));
        case DType::kFloat8E4M3FN:
            return kvcore::from_e4m3fn(static_cast<std::uint8_t>(code));
        case DType::kFloat8E5M2:
            return kvcore::from_e5m2(static_cast<std::uint8_t>(code));
        case DType::kInt8:
            return static_cast<float>(static_cast<std::int8_t>(code));
        default:
            return kvcore::float_of(code);
    }
}

inline void write_element(kvcore::DType dtype, std::byte* at, float value) {
    using kvcore::DType;
    std::uint32_t code = kvcore::bits_of(value);
    switch (dtype) {
        case DType::kFloat16:
            code = kvcore::to_half(value);
            break;
        case DType::kBFloat16:
            code = kvcore::to_bfloat16(value);
            break;
        case DType::kFloat8E4M3FN:
            code = kvcore::to_e4m3fn(value);
            break;
        case DType::kFloat8E5M2:
            code = kvcore::to_e5m2(value);
            break;
        case DType::kInt8:
            code = static_cast<std::uint8_t>(kvcore::to_int8(value));
            break;
        default:
            break;
    }
    std::memcpy(at, &code, static_cast<std::size_t>(kvcore::item_size(dtype)));
}
