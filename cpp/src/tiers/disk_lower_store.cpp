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

template <class Byte>
std::uint64_t bits_of(const StorePage<Byte>& page) noexcept {
    std::uint64_t bits = 0;
    for (const StorePart<Byte>& part : page.parts) bits |= std::uint64_t{1} << part.part;
    return bits;
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

DiskLowerStore::DiskLowerStore(DiskStore& store, std::vector<TierMemory> memory, bool has_parts,
                               double seconds)
    : store_(store), memory_(std::move(memory)), has_parts_(has_parts), seconds_(seconds) {}

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
    took(&Counters::read_seconds, begin);
    return served;
}

StoreWrite DiskLowerStore::write(const StoreMoves& moves, const std::vector<std::size_t>& columns) {
    StoreWrite write;
    std::vector<PageToWrite> pages(columns.size());
    for (std::size_t i = 0; i < columns.size(); ++i) {
        pages[i].key = store_key(moves.keys[columns[i]]);
        const StoredPart* const end = moves.end_of(columns[i]);
        for (const StoredPart* part = moves.begin_of(columns[i]); part != end; ++part) {
            const StorePart<std::byte> place = place_of(moves.replica, *part);
            pages[i].parts.push_back({place.part, place.data, place.bytes});
        }
    }
    try {
        if (has_parts_) complete(pages, write);
        write.task = store_.put_async(std::move(pages));
    } catch (const Error&) {
        count(&Counters::errors);
    }
    return write;
}

std::int64_t DiskLowerStore::end(StoreWrite& write) {
    write.stored += write.task.result();
    took(&Counters::write_seconds, write.begin);
    return write.stored;
}

// Reads the other parts that the store has of each page, because a put replaces the page. A disk
// that hangs counts as a timeout, but `result` waits until the read has ended: the put would wait
// for the same disk, and `end` waits for the put without limit, because the put reads the memory of
// the host tier. Only the thread of the writer waits. A step waits for at most a time that its
// caller sets, and loads go on.
void DiskLowerStore::complete(std::vector<PageToWrite>& pages, StoreWrite& write) {
    for (PageToWrite& page : pages) {
        const std::uint64_t stored = store_.parts_of(page.key);
        const std::uint64_t given = bits_of(page);
        if ((stored & ~given) == 0 || (given & ~stored) == 0) continue;
        PageToRead others{page.key, {}};
        for (std::int32_t part = 0; part < kMaxStoreParts; ++part) {
            if ((stored & ~given & std::uint64_t{1} << part) == 0) continue;
            const std::int64_t bytes = place_of(0, {part, 0}).bytes;
            write.memory.emplace_back(static_cast<std::size_t>(bytes));
            others.parts.push_back({part, write.memory.back().data(), bytes});
        }
        const std::vector<StorePart<std::byte>> places = others.parts;
        const StoreTask task = store_.get_async({std::move(others)});
        if (!task.wait(seconds_)) count(&Counters::timeouts);
        if (task.result() != 1) continue;
        for (const StorePart<std::byte>& each : places) {
            page.parts.push_back({each.part, each.data, each.bytes});
        }
        std::sort(page.parts.begin(), page.parts.end(),
                  [](const auto& a, const auto& b) { return a.part < b.part; });
    }
}

void DiskLowerStore::remove(const std::vector<PageKey>& keys) {
    std::vector<StoreKey> names;
    names.reserve(keys.size());
    for (const PageKey& key : keys) names.push_back(store_key(key));
    try {
        store_.remove(names);
    } catch (const Error&) {
        count(&Counters::errors);
    }
}

StorePart<std::byte> DiskLowerStore::place_of(std::int32_t replica, StoredPart part) const {
    const TierMemory& memory = memory_[static_cast<std::size_t>(replica)];
    const TierRows& rows = part.part == kStatePart ? memory.slots : memory.pages;
    return {part.part, rows.data + part.page * rows.bytes, rows.bytes};
}

DiskLowerStore::Counters DiskLowerStore::take_counters() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(counters_, {});
}

void DiskLowerStore::took(std::vector<double> Counters::* times,
                          std::chrono::steady_clock::time_point begin) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<double>& all = counters_.*times;
    if (all.size() == kTimes) all.erase(all.begin());
    all.push_back(seconds.count());
}

void DiskLowerStore::count(std::int64_t Counters::* counter) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++(counters_.*counter);
}

}  // namespace kvcore
