// SPDX-License-Identifier: Apache-2.0
// Items of canonical CBOR (RFC 8949, 4.2.1): every number in the fewest bytes, every length known
// in front. A sink is what has append(const char*, std::size_t), such as a std::string; the bytes
// are the same on every machine. O(bytes of the item).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvcore::cbor {

/// A head and its number take at most so many bytes.
constexpr std::size_t kMostHeadBytes = 9;

/// Writes the head of an item of a major type (0 .. 7) and its number; returns its bytes.
inline std::size_t write_head(char* out, unsigned major, std::uint64_t number) noexcept {
    const bool is_short = number < 24;
    const unsigned log = number <= 0xff ? 0 : number <= 0xffff ? 1 : number <= 0xffffffff ? 2 : 3;
    const std::size_t more = is_short ? 0 : std::size_t{1} << log;
    const auto low = is_short ? static_cast<unsigned>(number) : 24 + log;
    out[0] = static_cast<char>(major << 5 | low);
    for (std::size_t i = 0; i < more; ++i) {
        out[1 + i] = static_cast<char>(number >> (8 * (more - 1 - i)) & 0xff);
    }
    return 1 + more;
}

template <class Sink>
void put_head(Sink& out, unsigned major, std::uint64_t number) {
    char head[kMostHeadBytes];
    out.append(head, write_head(head, major, number));
}

template <class Sink>
void put_integer(Sink& out, std::int64_t value) {
    const auto bits = static_cast<std::uint64_t>(value);
    put_head(out, value < 0 ? 1 : 0, value < 0 ? ~bits : bits);
}

template <class Sink>
void put_bytes(Sink& out, std::string_view bytes) {
    put_head(out, 2, bytes.size());
    out.append(bytes.data(), bytes.size());
}

/// Of UTF-8.
template <class Sink>
void put_text(Sink& out, std::string_view text) {
    put_head(out, 3, text.size());
    out.append(text.data(), text.size());
}

/// In front of `n` items.
template <class Sink>
void put_array(Sink& out, std::uint64_t n) {
    put_head(out, 4, n);
}

template <class Sink>
void put_nil(Sink& out) {
    out.append("\xf6", 1);
}

}  // namespace kvcore::cbor
