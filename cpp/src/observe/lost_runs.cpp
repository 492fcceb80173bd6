// SPDX-License-Identifier: Apache-2.0
#include "observe/lost_runs.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {

std::uint64_t LostRuns::hash_of_name(std::string_view name) noexcept {
    constexpr std::uint64_t kMul = 0xc2b2ae3d27d4eb4fU;
    std::uint64_t hash = kMul + name.size();
    for (; !name.empty(); name.remove_prefix(std::min(name.size(), sizeof hash))) {
        std::uint64_t word = 0;
        std::memcpy(&word, name.data(), std::min(name.size(), sizeof word));
        hash = folded_product(hash ^ word, kMul);
    }
    return hash;
}

std::uint64_t LostRuns::extended(std::uint64_t before, const TokenId* tokens,
                                 std::int32_t n) const noexcept {
    for_each_page_hash(0, tokens, page_size_, n, [&](std::int32_t, std::uint64_t hash) {
        before = extended(before, tag_of(hash));
    });
    return before;
}

// ---- room ---------------------------------------------------------------------------------------

// Makes room for a run of `pages` pages. Each record of the oldest run that is not live any more
// gives its place.
void LostRuns::make_room(std::uint32_t pages) {
    const std::uint64_t needed = std::min<std::uint64_t>(num_added_ + pages, most_pages_);
    while (tags_.size() < needed) tags_.resize(std::max<std::size_t>(256, 2 * tags_.size()));
    const auto is_over = [&](const Record& run) {
        return head() + pages - run.begin > most_pages_;
    };
    while (oldest_ != next_ && is_over(record(oldest_))) ++oldest_;
    if (next_ - oldest_ == records_.size()) grow_records();
}

void LostRuns::grow_records() {
    const std::size_t size = std::max<std::size_t>(64, 2 * records_.size());
    decltype(records_) records(size);
    decltype(heads_) heads(4 * size);
    for (Number i = oldest_; i != next_; ++i) records[i & (size - 1)] = record(i);
    records_.swap(records);
    heads_.swap(heads);
    num_waiting_ = 0;
    for (Number i = oldest_; i != next_; ++i) {
        if (record(i).key != 0) link(i);
    }
}

// ---- the index ----------------------------------------------------------------------------------

void LostRuns::link(Number number) noexcept {
    Number& first = head_of(record(number).key);
    record(number).next = first;
    first = number;
}

void LostRuns::wait(Number number) noexcept {
    if (num_waiting_ == waiting_.size()) link_first_waiting();
    waiting_[(first_waiting_ + num_waiting_) % waiting_.size()] = number;
    ++num_waiting_;
}

void LostRuns::link_first_waiting() noexcept {
    const Number number = waiting_[first_waiting_ % waiting_.size()];
    ++first_waiting_;
    --num_waiting_;
    if (has_record(number)) link(number);
}

// Links the waiting runs if the chain of this key would have a run of them.
void LostRuns::link_waiting(std::uint64_t key) noexcept {
    for (std::uint32_t i = 0; i < num_waiting_; ++i) {
        const Number number = waiting_[(first_waiting_ + i) % waiting_.size()];
        if (record(number).key != key) continue;
        while (num_waiting_ > 0) link_first_waiting();
    }
}

// ---- runs ---------------------------------------------------------------------------------------

// There is room.
LostRuns::Number LostRuns::push(const Record& run) noexcept {
    record(next_) = run;
    return next_++;
}

LostRuns::Record LostRuns::begin_run(std::int32_t n, Loss loss, Number next_part) {
    const std::uint32_t pages = std::min(static_cast<std::uint32_t>(n), most_pages_);
    make_room(pages);
    Record run;
    run.loss = loss.time * 16 + loss.cause;
    run.begin = head();
    run.num_pages = pages;
    run.next_part = next_part;
    return run;
}

LostRuns::Number LostRuns::push_added(const Record& run) noexcept {
    num_added_ += run.num_pages;
    kvcore::prefetch(&record(oldest_ + 4));
    kvcore::prefetch(&record(next_ + 4));
    kvcore::prefetch(&tag(head() + 64));
    return push(run);
}

// In a chain a later record has a higher number, so a run that was not added last gets a new
// number.
void LostRuns::index(Number number, std::uint64_t before) {
    if (!is_live(number)) return;
    if (number != next_ - 1) {
        make_room(0);
        number = push(Record(record(number)));
    }
    Record& run = record(number);
    run.key = extended(before, tag(run.begin));
    kvcore::prefetch(&head_of(run.key));
    wait(number);
}

// Returns how many of the pages `tokens` [n] have the tags from `begin` on, and extends `path` by
// them.
std::int32_t LostRuns::num_equal(std::uint64_t& path, const TokenId* tokens, std::int32_t n,
                                 std::uint32_t begin) noexcept {
    std::uint64_t hashes[kBlock];
    std::int32_t size = 4;
    for (std::int32_t i = 0; i < n; size = kBlock) {
        size = std::min(size, n - i);
        hash_pages(hashes, 0, tokens + std::ptrdiff_t{i} * page_size_, page_size_, size);
        for (std::int32_t j = 0; j < size; ++j, ++i) {
            const std::uint32_t next = tag_of(hashes[j]);
            if (next != tag(begin + static_cast<std::uint32_t>(i))) return i;
            path = extended(path, next);
        }
    }
    return n;
}

LostRuns::Found LostRuns::take(std::uint64_t& path, std::uint32_t first_tag, const TokenId* tokens,
                               std::int32_t n, Number first_end, Number second_end) {
    if (is_empty()) return {};
    const std::uint64_t key = extended(path, first_tag);
    link_waiting(key);
    Number like[kMostCompared];
    std::size_t size = 0;
    for (const Number end : {first_end, second_end}) {
        if (is_live(end) && tag(record(end).begin) == first_tag) like[size++] = end;
    }
    for (Number i = head_of(key); has_record(i) && size < kMostCompared; i = record(i).next) {
        if (record(i).key == key && is_live(i)) like[size++] = i;
    }
    if (size == 0) return {};
    const Number newest = *std::min_element(like, like + size, [&](Number a, Number b) {
        return head() - record(a).begin < head() - record(b).begin;
    });
    const Record run = record(newest);
    const std::int32_t most = std::min(static_cast<std::int32_t>(run.num_pages), n);
    path = key;
    const std::int32_t equal = 1 + num_equal(path, tokens + page_size_, most - 1, run.begin + 1);
    for (std::size_t i = 0; i < size; ++i) {
        if (like[i] != newest) cut(like[i], newest, equal, key);
    }
    cut(newest, newest, equal, key);
    supersede(key, newest);
    return {equal, {static_cast<Misses::Reason>(run.loss % 16), run.loss / 16}};
}

// All runs of the key are cut where they differ from `newest`, so their pages left again later:
// takes them out of the index.
void LostRuns::supersede(std::uint64_t key, Number newest) noexcept {
    if (record(newest).key != key) return;
    Number* link = &head_of(key);
    while (has_record(*link)) {
        Record& run = record(*link);
        if (run.key == key && *link != newest) {
            *link = run.next;
            run.key = 0;
        } else {
            link = &run.next;
        }
    }
}

// A request may cache the first `most` pages of the run `like` again. Cuts a run at their end, or
// where the two runs differ, so that the pages after the cut are found by the hash of the prefix.
// `key` is the hash of the prefix up to the end of the first page of both.
void LostRuns::cut(Number number, Number like, std::int32_t most, std::uint64_t key) {
    make_room(0);
    if (!is_live(number) || !is_live(like)) return;
    Record& run = record(number);
    const std::uint32_t end =
        std::min({run.num_pages, record(like).num_pages, static_cast<std::uint32_t>(most)});
    std::uint32_t equal = 1;
    for (; equal < end && tag(run.begin + equal) == tag(record(like).begin + equal); ++equal) {
        key = extended(key, tag(run.begin + equal));
    }
    if (equal == run.num_pages) {
        if (run.next_part != 0) index(std::exchange(run.next_part, 0), key);
        return;
    }
    Record rest = run;
    rest.key = 0;
    rest.begin += equal;
    rest.num_pages -= equal;
    run.num_pages = equal;
    run.next_part = 0;
    index(push(rest), key);
}

void LostRuns::check_integrity() const {
    using detail::require_law;
    const auto at = [this](Number number) { return records_[number & (records_.size() - 1)]; };
    require_law(next_ - oldest_ <= records_.size(), "lost runs: the ring has room for each record");
    for (Number i = oldest_; i != next_; ++i) {
        require_law(at(i).num_pages > 0, "lost runs: a run has pages");
    }
    for (Number i : heads_) {
        for (; has_record(i); i = at(i).next) {
            const Number next = at(i).next;
            require_law(!has_record(next) || next - oldest_ < i - oldest_,
                        "lost runs: the newest run of a chain comes first");
            require_law(at(i).key != 0, "lost runs: each run of a chain has a key");
        }
    }
}

}  // namespace kvcore
