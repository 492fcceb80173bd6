// SPDX-License-Identifier: Apache-2.0
// How a prefix tree represents the keys that a prompt has in addition to its tokens: a namespace
// for the whole prompt, and ids that replace the tokens with a key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "kvcore/types.hpp"

namespace kvcore {

/// The name of the prefix-cache namespace of an extra key (LoRA id, image hash) and a cache salt
/// (tenant). Different pairs have different names: the name records which parts are present and the
/// length of the first part. So ("a", "b") and ("ab", "") differ, as do "" and an absent part.
/// Without both parts the name is "", the default namespace. O(bytes).
[[nodiscard]] inline std::string namespace_name(std::optional<std::string_view> extra_key,
                                                std::optional<std::string_view> cache_salt) {
    if (!extra_key && !cache_salt) return {};
    const std::uint64_t length = extra_key ? extra_key->size() : 0;
    std::string name;
    name.push_back(static_cast<char>((extra_key ? 1 : 0) | (cache_salt ? 2 : 0)));
    for (int byte = 0; byte < 8; ++byte) {
        name.push_back(static_cast<char>((length >> (8 * byte)) & 0xff));
    }
    if (extra_key) name += *extra_key;
    if (cache_salt) name += *cache_salt;
    return name;
}

/// The parts of a namespace's name.
struct NamespaceParts {
    std::optional<std::string_view> extra_key;
    std::optional<std::string_view> cache_salt;
};

/// The inverse of namespace_name, as views of the name. If namespace_name cannot have made the
/// name, the whole name is the extra key. So different names of the same kind have different parts.
/// O(1).
[[nodiscard]] inline NamespaceParts read_namespace_name(std::string_view name) noexcept {
    constexpr std::size_t kHead = 9;
    if (name.empty()) return {};
    if (name.size() < kHead || name[0] < 1 || name[0] > 3) return {name, {}};
    std::uint64_t length = 0;
    for (std::size_t byte = 0; byte < 8; ++byte) {
        length |= std::uint64_t{static_cast<unsigned char>(name[1 + byte])} << (8 * byte);
    }
    const bool has_key = (name[0] & 1) != 0;
    const bool has_salt = (name[0] & 2) != 0;
    const std::size_t size = name.size() - kHead;
    const bool is_made = length <= size && (has_key || length == 0) && (has_salt || length == size);
    if (!is_made) return {name, {}};
    NamespaceParts parts;
    if (has_key) parts.extra_key = std::string_view(name.data() + kHead, length);
    if (has_salt) parts.cache_salt = std::string_view(name.data() + kHead + length, size - length);
    return parts;
}

/// Content that `length` tokens have in addition to their ids, for example an image; `bytes`
/// identifies the content.
struct ExtraKey {
    std::int64_t length = 0;
    std::string_view bytes;

    /// The order of a token's extra keys in its name.
    friend bool operator<(const ExtraKey& a, const ExtraKey& b) noexcept {
        return std::tie(a.length, a.bytes) < std::tie(b.length, b.bytes);
    }
};

/// The name of a token at which extra keys start: its id and all keys [n] that start at it, sorted
/// by length and bytes, without duplicates. Different tokens or keys have different names, and
/// KeyChain gives their pages different keys. Throws std::invalid_argument for keys in another
/// order. O(bytes).
[[nodiscard]] std::string stand_in_name(TokenId token, const ExtraKey* keys, std::size_t n);

/// The contents of a stand-in's name, with views of the name.
struct StandInParts {
    TokenId token = 0;
    std::vector<ExtraKey> keys;
};

/// The inverse of stand_in_name. Throws std::invalid_argument for a name that stand_in_name does
/// not make. O(keys).
[[nodiscard]] StandInParts read_stand_in_name(std::string_view name);

/// Token ids that replace tokens with extra keys, so that a PrefixTree distinguishes images by
/// comparing tokens. In the tokens that a tree gets, the stand-in for a name replaces the token at
/// which its extra keys start.
///
/// Owns: the names, each with its id and its number of users.
/// Invariant: different names have different ids, all from kLowest to kHighest; a sweep frees an id
/// for another name only if the id is in no tree and has had no user since before the trees were
/// searched.
/// Threads: any number may call any method; each call holds a mutex.
/// Memory: a method that cannot get memory throws std::bad_alloc and changes nothing.
/// Cost: O(log names) comparisons of a name; a sweep O(names + ids held).
class StandIns {
   public:
    /// A request's tokens must not be in this range if its trees hold stand-ins.
    static constexpr TokenId kLowest = std::numeric_limits<TokenId>::min();
    static constexpr TokenId kHighest = -(TokenId{1} << 30) - 1;

    /// `num_ids`: number of ids, from kLowest up. A sweep is due at `fewest` names, and later each
    /// time that the number of names has doubled. Throws std::invalid_argument for sizes out of
    /// range.
    explicit StandIns(std::int64_t num_ids = std::int64_t{kHighest} - kLowest + 1,
                      std::int64_t fewest = 4096);
    StandIns(const StandIns&) = delete;
    StandIns& operator=(const StandIns&) = delete;

    /// Returns the id of a name and adds a user. Throws CapacityError if all ids are in use.
    [[nodiscard]] TokenId acquire(std::string_view name);
    /// Returns the id of a name and adds no user, so a sweep may remove the name. Returns 0 for a
    /// name without an id, which is in no tree.
    [[nodiscard]] TokenId find(std::string_view name) const;
    /// The name of an id; nullopt for an unknown id.
    [[nodiscard]] std::optional<std::string> name_of(TokenId id) const;
    /// Returns the name of an id and adds a user; "" for an unknown id. Throws std::bad_alloc.
    [[nodiscard]] std::string hold(TokenId id);
    /// Removes a user. Throws InvalidHandleError for an id without users.
    void release(TokenId id);

    /// Names that have an id.
    [[nodiscard]] std::int64_t size() const;
    /// True if there are at least `fewest` names and twice as many as the last sweep left.
    [[nodiscard]] bool is_sweep_due() const;
    /// Begins a sweep. `end_sweep` removes each name that has no user now, gets no user before
    /// `end_sweep`, and is not in `held` [n]. Between the calls, the caller collects in `held` the
    /// ids in all trees and in all places that may put tokens into a tree. Only one sweep may run
    /// at a time.
    void begin_sweep();
    void end_sweep(const TokenId* held, std::size_t n);

    /// Throws IntegrityError unless names and ids agree.
    void check_integrity() const;

   private:
    struct Entry {
        std::string name;
        std::int64_t users = 0;
        bool is_leaving = false;  // no user since the sweep began
    };

    [[nodiscard]] TokenId next_free_id() const noexcept;

    mutable std::mutex mutex_;
    std::unordered_map<TokenId, Entry> entries_;
    // Keys are views of the names in entries_. An ordered map stays fast for keys that an attacker
    // chooses.
    std::map<std::string_view, TokenId> ids_;
    const std::int64_t num_ids_;
    const std::int64_t fewest_;
    std::int64_t next_ = 0;  // ids are used in turn, so that an id is reused as late as possible
    std::int64_t due_;       // number of names at which a sweep is due
};

}  // namespace kvcore
