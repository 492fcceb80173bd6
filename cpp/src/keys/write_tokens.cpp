// SPDX-License-Identifier: Apache-2.0
#include "keys/kernels.hpp"

namespace kvcore::keys {
namespace {

// Without a branch, because the length of the next token cannot be predicted.
std::size_t write_token(std::uint8_t* out, std::int32_t token) noexcept {
    const std::uint64_t sign = token < 0 ? 1 : 0;
    const std::uint64_t number = static_cast<std::uint32_t>(sign != 0 ? ~token : token);
    const unsigned is_long = number >= 24, is_two = number > 0xff, is_four = number > 0xffff;
    const std::uint64_t low = is_long != 0 ? 24 + is_two + is_four : number;
    // A number below 24 is in the head; the second term writes the same bits again.
    const unsigned more = is_long + is_two + 2 * is_four;
    const std::uint64_t item = (sign << 5 | low) << 56 | number << (56 - 8 * more);
    for (int i = 0; i < 5; ++i) out[i] = static_cast<std::uint8_t>(item >> (56 - 8 * i));
    return 1 + more;
}

}  // namespace

std::size_t write_tokens_portable(std::uint8_t* out, const std::int32_t* tokens, std::size_t n) {
    std::uint8_t* end = out;
    for (std::size_t i = 0; i < n; ++i) end += write_token(end, tokens[i]);
    return static_cast<std::size_t>(end - out);
}

}  // namespace kvcore::keys
