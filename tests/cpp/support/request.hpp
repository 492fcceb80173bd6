// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "support/random.hpp"
#include "support/tokens.hpp"

using kvcore::BlockId;
using kvcore::TokenId;

/// A digest of a namespace and all tokens up to a position. A model's K and V at this position
/// depend on exactly these tokens, so the digest also serves as the content of a page slot. 64
/// well-mixed bits: among 10^6 prefixes, two share a digest with a probability of 3e-8.
using Digest = std::uint64_t;

template <class T>
T& item(std::vector<T>& values, std::int64_t index) {
    return values[static_cast<std::size_t>(index)];
}
template <class T>
const T& item(const std::vector<T>& values, std::int64_t index) {
    return values[static_cast<std::size_t>(index)];
}
template <class T>
std::int64_t count(const std::vector<T>& values) {
    return static_cast<std::int64_t>(values.size());
}

inline Digest digest_of_namespace(const std::string& name) {
    Digest digest = 0x243f6a8885a308d3ULL;
    for (const char c : name) digest = scramble(digest + static_cast<unsigned char>(c) + 1);
    return digest;
}

inline Digest digest_after(Digest before, TokenId token) {
    return scramble(before * 0xd1342543de82ef95ULL + static_cast<std::uint32_t>(token) + 1);
}

/// A request as an engine keeps it: its tokens and its progress.
class Request {
   public:
    Request(std::string name_space, const std::vector<TokenId>& tokens)
        : name_space_(std::move(name_space)), root_(digest_of_namespace(name_space_)) {
        for (const TokenId token : tokens) append(token);
        active = end();
    }

    kvcore::SequenceHandle sequence;
    std::int64_t start = 0;
    std::int64_t active = 0;

    [[nodiscard]] std::int64_t end() const { return count(tokens_); }
    [[nodiscard]] const std::string& name_space() const { return name_space_; }
    [[nodiscard]] const std::vector<TokenId>& tokens() const { return tokens_; }

    /// The digest of the first `n` tokens.
    [[nodiscard]] Digest digest(std::int64_t n) const {
        return n == 0 ? root_ : item(digests_, n - 1);
    }
    /// The contents of the slots of positions 0, 1, ... after they are written.
    [[nodiscard]] const Digest* contents() const { return digests_.data(); }

    void append(TokenId token) {
        digests_.push_back(digest_after(digest(end()), token));
        tokens_.push_back(token);
    }
    /// Cut the tokens to `n` >= 1; all of them are to run.
    void rewind(std::int64_t n) {
        tokens_.resize(static_cast<std::size_t>(n));
        digests_.resize(static_cast<std::size_t>(n));
        active = n;
        if (start >= n) start = n - 1;
    }

    [[nodiscard]] kvcore::RequestView view() const {
        return {sequence, tokens_.data(), start, active, end(), name_space_};
    }

   private:
    std::string name_space_;
    Digest root_;
    std::vector<TokenId> tokens_;
    std::vector<Digest> digests_;
};
