// SPDX-License-Identifier: Apache-2.0
// Transposes matrices of small units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvcore {

/// A matrix of units. The units of a row are contiguous.
template <class Byte>
struct UnitRows {
    Byte* data;
    std::int64_t row_stride;  // bytes
};

namespace detail {

constexpr std::int64_t kVectorBytes = 16;

#if defined(__SSE2__)
template <int kUnit>
__m128i low_halves(__m128i a, __m128i b) noexcept {
    if constexpr (kUnit == 1) return _mm_unpacklo_epi8(a, b);
    if constexpr (kUnit == 2) return _mm_unpacklo_epi16(a, b);
    return _mm_unpacklo_epi32(a, b);
}
template <int kUnit>
__m128i high_halves(__m128i a, __m128i b) noexcept {
    if constexpr (kUnit == 1) return _mm_unpackhi_epi8(a, b);
    if constexpr (kUnit == 2) return _mm_unpackhi_epi16(a, b);
    return _mm_unpackhi_epi32(a, b);
}

/// Transposes a square; each side has the number of units of a vector. Interleaving the rows of the
/// first half with the rows of the second half moves the highest bit of the row number to the low
/// end of the column number. When all bits have moved, rows are columns.
template <int kUnit>
void transpose_square(const UnitRows<std::byte>& to,
                      const UnitRows<const std::byte>& from) noexcept {
    constexpr std::size_t kSide = kVectorBytes / kUnit;
    __m128i rows[kSide];
    for (std::size_t i = 0; i < kSide; ++i) {
        const std::byte* row = from.data + static_cast<std::int64_t>(i) * from.row_stride;
        rows[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
    }
    for (std::size_t moved = 1; moved < kSide; moved *= 2) {
        __m128i mixed[kSide];
        for (std::size_t i = 0; i < kSide / 2; ++i) {
            mixed[2 * i] = low_halves<kUnit>(rows[i], rows[i + kSide / 2]);
            mixed[2 * i + 1] = high_halves<kUnit>(rows[i], rows[i + kSide / 2]);
        }
        for (std::size_t i = 0; i < kSide; ++i) rows[i] = mixed[i];
    }
    for (std::size_t i = 0; i < kSide; ++i) {
        std::byte* row = to.data + static_cast<std::int64_t>(i) * to.row_stride;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row), rows[i]);
    }
}
#else
template <int kUnit>
void transpose_square(const UnitRows<std::byte>& to,
                      const UnitRows<const std::byte>& from) noexcept {
    for (std::int64_t i = 0; i < kVectorBytes / kUnit; ++i) {
        for (std::int64_t j = 0; j < kVectorBytes / kUnit; ++j) {
            std::memcpy(to.data + j * to.row_stride + i * kUnit,
                        from.data + i * from.row_stride + j * kUnit, kUnit);
        }
    }
}
#endif

template <int kUnit>
void transpose_units(const UnitRows<std::byte>& to, const UnitRows<const std::byte>& from,
                     std::int64_t rows, std::int64_t columns) noexcept {
    constexpr std::int64_t kSide = kVectorBytes / kUnit;
    const std::int64_t whole_rows = kUnit < kVectorBytes ? rows / kSide * kSide : 0;
    const std::int64_t whole_columns = kUnit < kVectorBytes ? columns / kSide * kSide : 0;
    const auto one_by_one = [&](std::int64_t row, std::int64_t first, std::int64_t last) {
        for (std::int64_t column = first; column < last; ++column) {
            std::memcpy(to.data + column * to.row_stride + row * kUnit,
                        from.data + row * from.row_stride + column * kUnit, kUnit);
        }
    };
    if constexpr (kUnit < kVectorBytes) {
        for (std::int64_t column = 0; column < whole_columns; column += kSide) {
            for (std::int64_t row = 0; row < whole_rows; row += kSide) {
                transpose_square<kUnit>(
                    {to.data + column * to.row_stride + row * kUnit, to.row_stride},
                    {from.data + row * from.row_stride + column * kUnit, from.row_stride});
            }
        }
    }
    for (std::int64_t row = 0; row < whole_rows; ++row) one_by_one(row, whole_columns, columns);
    for (std::int64_t row = whole_rows; row < rows; ++row) one_by_one(row, 0, columns);
}

}  // namespace detail

/// Writes unit j of row i to unit i of row j. Units have 1, 2, 4 or 16 bytes.
inline void transpose(const UnitRows<std::byte>& to, const UnitRows<const std::byte>& from,
                      std::int64_t rows, std::int64_t columns, std::int64_t unit_bytes) noexcept {
    switch (unit_bytes) {
        case 1:
            return detail::transpose_units<1>(to, from, rows, columns);
        case 2:
            return detail::transpose_units<2>(to, from, rows, columns);
        case 4:
            return detail::transpose_units<4>(to, from, rows, columns);
        default:
            return detail::transpose_units<16>(to, from, rows, columns);
    }
}

}  // namespace kvcore
