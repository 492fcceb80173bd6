// SPDX-License-Identifier: Apache-2.0
#include "kvcore/disk_lower_store.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

constexpr std::size_t kTimes = 512;

StoreKey store_key(const PageKey& key) noexcept {
    StoreKey out;
    std::memcpy(out.bytes.data(), key.data(), key.size());
    return out;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

bool wait_for(const StoreTask& task, double seconds, StoreHooks& hooks) {
    constexpr double kInterval = StoreHooks::kInterval;
    for (double left = seconds;; left -= kInterval) {
        if (task.wait(std::clamp(left, 0.0, kInterval))) return true;
        if (left <= kInterval) return false;
        hooks.check_interrupt();
    }
}

}  // namespace

DiskLowerStore::DiskLowerStore(DiskStore& store, std::vector<TierMemory> memory, double seconds)
    : store_(store), memory_(std::move(memory)), seconds_(seconds) {
    counters_.read_seconds.reserve(kTimes);
}

void DiskLowerStore::parts_of(const PageKey* keys, std::size_t n, std::uint64_t* parts) {
    std::vector<StoreKey> names(n);
    for (std::size_t i = 0; i < n; ++i) names[i] = store_key(keys[i]);
    try {
        store_.parts_of(names.data(), n, parts);
    } catch (const Error&) {
        count(&Counters::errors);
        std::fill_n(parts, n, 0);
    }
}

std::size_t DiskLowerStore::read(const ColumnRange& columns, std::uint64_t* parts, StoreTask& late,
                                 StoreHooks& hooks) {
    const auto begin = std::chrono::steady_clock::now();
    const StoreMoves& moves = columns.moves;
    std::vector<PageToRead> pages(columns.n);
    for (std::size_t i = 0; i < columns.n; ++i) {
        const std::size_t column = columns.first + i;
        pages[i].key = store_key(columns.key(i));
        for (const StoredPart* part = moves.begin_of(column); part != moves.end_of(column);
             ++part) {
            pages[i].parts.push_back(place_of(moves.replica, *part));
        }
    }
    try {
        late = store_.get_async(std::move(pages));
    } catch (const Error&) {
        count(&Counters::errors);
        return 0;
    }
    if (!wait_for(late, seconds_, hooks)) {
        count(&Counters::timeouts);
        return 0;
    }
    const auto served = static_cast<std::size_t>(late.result());
    late = StoreTask();
    for (std::size_t i = 0; i < served; ++i) parts[i] = columns.parts(i);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (counters_.read_seconds.size() < kTimes) counters_.read_seconds.push_back(0);
    counters_.read_seconds[next_time_++ % kTimes] = seconds_since(begin);
    return served;
}

StorePart<std::byte> DiskLowerStore::place_of(std::int32_t replica, StoredPart part) const {
    const TierMemory& memory = memory_[static_cast<std::size_t>(replica)];
    const TierRows& rows = part.part == kStatePart ? memory.slots : memory.pages;
    return {part.part, rows.data + part.page * rows.bytes, rows.bytes};
}

DiskLowerStore::Counters DiskLowerStore::take_counters() {
    Counters next;
    next.read_seconds.reserve(kTimes);
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(counters_, std::move(next));
}

void DiskLowerStore::count(std::int64_t Counters::* counter) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++(counters_.*counter);
}

}  // namespace kvcore
