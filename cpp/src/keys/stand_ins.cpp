// SPDX-License-Identifier: Apache-2.0
#include "kvcore/extra_keys.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

using Lock = std::lock_guard<std::mutex>;

void append_number(std::string& name, std::uint64_t number) {
    for (int byte = 0; byte < 8; ++byte) {
        name.push_back(static_cast<char>((number >> (8 * byte)) & 0xff));
    }
}

[[noreturn]] void refuse_name(std::size_t left) {
    throw std::invalid_argument(detail::concat("the name of a stand-in ends in ", left,
                                               " unexpected bytes; make it with stand_in_name"));
}

// Reads a number at the front of `name`, and removes it.
std::uint64_t read_number(std::string_view& name) {
    if (name.size() < 8) refuse_name(name.size());
    std::uint64_t number = 0;
    for (std::size_t byte = 0; byte < 8; ++byte) {
        number |= std::uint64_t{static_cast<unsigned char>(name[byte])} << (8 * byte);
    }
    name.remove_prefix(8);
    return number;
}

// Refuses keys in another order: a list of keys has exactly one name, as it has exactly one form in
// the key of a page.
void require_ascending(const ExtraKey* keys, std::size_t n) {
    for (std::size_t i = 1; i < n; ++i) {
        if (keys[i - 1] < keys[i]) continue;
        throw std::invalid_argument(
            detail::concat("extra key ", i, " of a token does not come after extra key ", i - 1,
                           " by length and bytes; sort the keys, and give each once"));
    }
}

}  // namespace

// Lengths come before bytes, so that different lists of keys have different names.
std::string stand_in_name(TokenId token, const ExtraKey* keys, std::size_t n) {
    require_ascending(keys, n);
    std::string name;
    append_number(name, static_cast<std::uint64_t>(std::int64_t{token}));
    for (std::size_t i = 0; i < n; ++i) {
        append_number(name, static_cast<std::uint64_t>(keys[i].length));
        append_number(name, keys[i].bytes.size());
        name += keys[i].bytes;
    }
    return name;
}

StandInParts read_stand_in_name(std::string_view name) {
    StandInParts parts;
    parts.token = static_cast<TokenId>(static_cast<std::int64_t>(read_number(name)));
    while (!name.empty()) {
        ExtraKey key;
        key.length = static_cast<std::int64_t>(read_number(name));
        const std::uint64_t size = read_number(name);
        if (size > name.size()) refuse_name(name.size());
        key.bytes = name.substr(0, size);
        name.remove_prefix(size);
        parts.keys.push_back(key);
    }
    require_ascending(parts.keys.data(), parts.keys.size());
    return parts;
}

StandIns::StandIns(std::int64_t num_ids, std::int64_t fewest)
    : num_ids_(num_ids), fewest_(fewest), due_(fewest) {
    const std::int64_t most = std::int64_t{kHighest} - kLowest + 1;
    if (num_ids < 1 || num_ids > most || fewest < 1) {
        throw std::invalid_argument(detail::concat("stand-ins: num_ids is ", num_ids,
                                                   ", must be 1 .. ", most, "; fewest is ", fewest,
                                                   ", must be at least 1"));
    }
}

// A free id exists, because there are fewer names than ids.
TokenId StandIns::next_free_id() const noexcept {
    std::int64_t next = next_;
    while (entries_.count(static_cast<TokenId>(kLowest + next)) > 0) next = (next + 1) % num_ids_;
    return static_cast<TokenId>(kLowest + next);
}

TokenId StandIns::acquire(std::string_view name) {
    const Lock lock(mutex_);
    if (const auto known = ids_.find(name); known != ids_.end()) {
        Entry& entry = entries_.at(known->second);
        ++entry.users;
        entry.is_leaving = false;
        return known->second;
    }
    if (static_cast<std::int64_t>(entries_.size()) == num_ids_) {
        throw CapacityError(detail::concat("all ", num_ids_,
                                           " stand-ins for extra keys are in use; "
                                           "release requests or reset the prefix caches"));
    }
    const TokenId id = next_free_id();
    const auto place = entries_.emplace(id, Entry{std::string(name), 1, false}).first;
    try {
        ids_.emplace(place->second.name, id);
    } catch (...) {
        entries_.erase(place);
        throw;
    }
    next_ = (std::int64_t{id} - kLowest + 1) % num_ids_;
    return id;
}

TokenId StandIns::find(std::string_view name) const {
    const Lock lock(mutex_);
    const auto known = ids_.find(name);
    return known == ids_.end() ? 0 : known->second;
}

std::optional<std::string> StandIns::name_of(TokenId id) const {
    const Lock lock(mutex_);
    const auto known = entries_.find(id);
    if (known == entries_.end()) return std::nullopt;
    return known->second.name;
}

std::string StandIns::hold(TokenId id) {
    const Lock lock(mutex_);
    const auto known = entries_.find(id);
    if (known == entries_.end()) return {};
    std::string name = known->second.name;
    ++known->second.users;
    known->second.is_leaving = false;
    return name;
}

void StandIns::release(TokenId id) {
    const Lock lock(mutex_);
    const auto known = entries_.find(id);
    if (known == entries_.end() || known->second.users == 0) {
        throw InvalidHandleError(detail::concat("stand-in ", id, " has no user to give it up"));
    }
    --known->second.users;
}

std::int64_t StandIns::size() const {
    const Lock lock(mutex_);
    return static_cast<std::int64_t>(entries_.size());
}

bool StandIns::is_sweep_due() const {
    const Lock lock(mutex_);
    return static_cast<std::int64_t>(entries_.size()) >= due_;
}

void StandIns::begin_sweep() {
    const Lock lock(mutex_);
    for (auto& [id, entry] : entries_) entry.is_leaving = entry.users == 0;
}

void StandIns::end_sweep(const TokenId* held, std::size_t n) {
    const Lock lock(mutex_);
    for (std::size_t i = 0; i < n; ++i) {
        const auto known = entries_.find(held[i]);
        if (known != entries_.end()) known->second.is_leaving = false;
    }
    for (auto at = entries_.begin(); at != entries_.end();) {
        if (at->second.is_leaving) {
            ids_.erase(at->second.name);
            at = entries_.erase(at);
        } else {
            ++at;
        }
    }
    due_ = std::max(fewest_, 2 * static_cast<std::int64_t>(entries_.size()));
}

void StandIns::check_integrity() const {
    const Lock lock(mutex_);
    detail::require_law(entries_.size() == ids_.size(), "stand-ins: each id has a name");
    for (const auto& [name, id] : ids_) {
        const auto entry = entries_.find(id);
        const bool agrees = entry != entries_.end() && entry->second.name == name;
        detail::require_law(agrees && entry->second.users >= 0, "stand-ins: each name has its id");
    }
}

}  // namespace kvcore
