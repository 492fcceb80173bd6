// SPDX-License-Identifier: Apache-2.0
// What a prefix tree is shown for keys that a prompt has beside its tokens: a namespace for all of
// it, ids that stand in for tokens with a key.
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
/// (tenant). Different pairs have different names: which of the two are present and the length of
/// the first are part of it, so ("a", "b") and ("ab", "") differ, as do "" and none. None of both
/// is "", the default namespace. O(bytes).
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

/// What a namespace was named by.
struct NamespaceParts {
    std::optional<std::string_view> extra_key;
    std::optional<std::string_view> cache_salt;
};

/// The reverse of namespace_name, as views of that name; a name that it does not make is an extra
/// key. So different names of one kind have different parts. O(1).
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

/// What `length` tokens are beside their ids, an image for example: bytes that tell it from others.
struct ExtraKey {
    std::int64_t length = 0;
    std::string_view bytes;

    /// The order of extra keys of one token in its name.
    friend bool operator<(const ExtraKey& a, const ExtraKey& b) noexcept {
        return std::tie(a.length, a.bytes) < std::tie(b.length, b.bytes);
    }
};

/// What the token at the start of extra keys is: its id and all keys [n] that start there, by
/// length and bytes, each once. Different ones have different names, and KeyChain makes different
/// keys of their pages. Throws std::invalid_argument for keys in another order. O(bytes).
[[nodiscard]] std::string stand_in_name(TokenId token, const ExtraKey* keys, std::size_t n);

/// What a stand-in's name says, with views of the name.
struct StandInParts {
    TokenId token = 0;
    std::vector<ExtraKey> keys;
};

/// The reverse of stand_in_name. Throws std::invalid_argument for a name that it does not make.
/// O(keys).
[[nodiscard]] StandInParts read_stand_in_name(std::string_view name);

/// Token ids that stand for what is told apart by more than a token id, so that a PrefixTree keeps
/// images apart by comparing tokens: in what the tree is shown, the token at which extra keys start
/// is replaced by the stand-in of its name.
///
/// Owns: the names, each with its id and how many users it has.
/// Invariant: two names have two ids, all from kLowest to kHighest; an id is another name's only
/// after a sweep that found it in no tree, with no user from before the trees were looked at.
/// Threads: any number may call any method; one mutex, held for the length of a call.
/// Memory: a verb that cannot get it throws std::bad_alloc and has changed nothing.
/// Cost: O(log names) comparisons of a name; a sweep O(names + ids held).
class StandIns {
   public:
    /// No token of a request may be in this range where its trees hold stand-ins.
    static constexpr TokenId kLowest = std::numeric_limits<TokenId>::min();
    static constexpr TokenId kHighest = -(TokenId{1} << 30) - 1;

    /// `num_ids`: ids that there are, from kLowest up. A sweep is due from `fewest` names on, and
    /// then whenever they have doubled. Throws std::invalid_argument for sizes out of range.
    explicit StandIns(std::int64_t num_ids = std::int64_t{kHighest} - kLowest + 1,
                      std::int64_t fewest = 4096);
    StandIns(const StandIns&) = delete;
    StandIns& operator=(const StandIns&) = delete;

    /// The id of a name, with one more user. Throws CapacityError when all ids are in use.
    [[nodiscard]] TokenId acquire(std::string_view name);
    /// The id of a name without a new user, which a sweep may take; 0 for one that has none: then
    /// no tree holds it.
    [[nodiscard]] TokenId find(std::string_view name) const;
    /// The name that an id has; none for other ids.
    [[nodiscard]] std::optional<std::string> name_of(TokenId id) const;
    /// The name of an id, with one more user; "" for one that has none. Throws std::bad_alloc.
    [[nodiscard]] std::string hold(TokenId id);
    /// One user less. Throws InvalidHandleError for an id without users.
    void release(TokenId id);

    /// Names that have an id.
    [[nodiscard]] std::int64_t size() const;
    /// There are twice as many names as the last sweep has left.
    [[nodiscard]] bool is_sweep_due() const;
    /// A sweep begins: what has no user now and gets none until `end_sweep` is given up there,
    /// unless it is `held` [n]: in a tree that was looked at in between, with what else may put
    /// tokens into it. One sweep at a time.
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
    // By the names in entries_. Ordered: nobody can choose keys that make it slow.
    std::map<std::string_view, TokenId> ids_;
    const std::int64_t num_ids_;
    const std::int64_t fewest_;
    std::int64_t next_ = 0;  // ids go round, so that one comes again as late as can be
    std::int64_t due_;       // names at which a sweep is due
};

}  // namespace kvcore
