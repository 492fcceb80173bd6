// SPDX-License-Identifier: Apache-2.0
#include "kvcore/store_reader.hpp"

#include <algorithm>
#include <iterator>

namespace kvcore {
namespace {

// The most attempts to load a prompt. Each attempt uses the results of the attempts before.
constexpr int kRounds = 8;
using Clock = std::chrono::steady_clock;

Clock::duration duration_of(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

/// A call in progress, which uses the stores. It also ends the late reads that are over.
class StoreReader::Running {
   public:
    explicit Running(StoreReader& reader) : reader_(reader) {
        if (reader_.is_off()) return;  // in a child of fork, another thread may have had the lock
        bool has_late = false;
        {
            const std::lock_guard<std::mutex> lock(reader_.mutex_);
            is_on_ = !reader_.is_off();
            if (is_on_) ++reader_.running_;
            has_late = !reader_.late_.empty();
        }
        if (is_on_ && has_late) reader_.end_late_reads();
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running() {
        if (!is_on_) return;
        const std::lock_guard<std::mutex> lock(reader_.mutex_);
        --reader_.running_;
    }
    /// Returns false if the reader is off: the call does nothing.
    [[nodiscard]] bool is_on() const noexcept { return is_on_; }

   private:
    StoreReader& reader_;
    bool is_on_ = false;
};

/// The columns that a thread reads. While another thread reads any of them, it is empty.
class StoreReader::Flight {
   public:
    Flight(StoreReader& reader, const LowerSearch& search, const std::vector<ColumnParts>& columns)
        : reader_(reader) {
        names_.reserve(columns.size());
        for (const ColumnParts& each : columns) {
            names_.emplace_back(search.found().replica, search.key(each.column));
        }
    }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;
    ~Flight() {
        if (number_ == 0) return;
        const std::lock_guard<std::mutex> lock(reader_.mutex_);
        erase();
        reader_.changed_.notify_all();
    }

    /// Begins the flight. If another thread reads any of the columns, waits until that read has
    /// ended, and returns false.
    [[nodiscard]] bool begin(Clock::time_point until, bool& is_too_late) {
        std::unique_lock<std::mutex> lock(reader_.mutex_);
        for (const auto& name : names_) {
            const auto other = reader_.flights_.find(name);
            if (other == reader_.flights_.end()) continue;
            is_too_late = !reader_.has_ended(lock, until, *other);
            return false;
        }
        number_ = ++reader_.last_flight_;
        try {
            for (const auto& name : names_) reader_.flights_.emplace(name, number_);
        } catch (...) {
            erase();
            number_ = 0;
            throw;
        }
        return true;
    }

   private:
    void erase() noexcept {
        for (const auto& name : names_) reader_.flights_.erase(name);
    }

    StoreReader& reader_;
    std::vector<Flights::key_type> names_;
    std::uint64_t number_ = 0;
};

StoreReader::StoreReader(CacheManager& manager, std::vector<LowerStore*> stores, StoreHooks& hooks,
                         const Options& options)
    : manager_(manager), stores_(std::move(stores)), hooks_(hooks), options_(options) {}

void StoreReader::OpenFill::end(std::int64_t arrived, bool forward) noexcept {
    const std::uint64_t ticket = std::exchange(moves.ticket, 0);
    if (ticket != 0) manager.finish_fill(ticket, arrived, forward);
}

bool StoreReader::has(NextColumn& next) {
    const Running running(*this);
    if (!running.is_on()) return false;
    for (std::size_t s = 0; s < stores_.size(); ++s) {
        stores_[s]->parts_of(&next.keys.back(), 1, &next.parts);
        next.store = static_cast<std::int32_t>(s);
        if (next.parts != 0) return true;
    }
    return false;
}

std::int32_t StoreReader::reach(LowerSearch& search) {
    const Running running(*this);
    return running.is_on() ? search.reach(stores_) : search.found().have;
}

void StoreReader::load(LowerSearch& search) {
    const Running running(*this);
    if (!running.is_on()) return;
    const std::int32_t end = search.reach(stores_);
    manager_.note_stored(search.found(), end);
    const auto until = Clock::now() + duration_of(options_.seconds);
    for (int round = 0; round < kRounds; ++round) {
        const std::vector<ColumnParts> columns = search.longest(stores_, end, search.found().legal);
        if (columns.empty()) return;
        Flight flight(*this, search, columns);
        bool is_too_late = false;
        if (flight.begin(until, is_too_late)) {
            if (fill(search, columns)) return;
        } else if (is_too_late) {
            return;
        }
    }
}

void StoreReader::forget() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++epoch_;
}

bool StoreReader::close(double seconds) {
    switch_off();
    const auto until = Clock::now() + duration_of(seconds < 0 ? 1e9 : seconds);
    for (;;) {
        end_late_reads();
        std::unique_lock<std::mutex> lock(mutex_);
        if (late_.empty()) return running_ == 0;
        const double left = std::chrono::duration<double>(until - Clock::now()).count();
        if (left <= 0) return false;
        StoreTask& task = late_.front().late;
        lock.unlock();  // only this thread ends late reads: the reader is off
        if (!task.wait(std::min(left, StoreHooks::kInterval))) hooks_.check_interrupt();
    }
}

// Returns true if another attempt cannot load more.
bool StoreReader::fill(LowerSearch& search, const std::vector<ColumnParts>& columns) {
    std::list<Reading> own;
    Reading& reading = own.emplace_back(manager_);
    reading.epoch = epoch();
    StoreMoves& moves = reading.fill.moves;
    // Columns that wait to be written take room. They may also be written after this fill has
    // begun, but before `make_room` looks.
    const bool has_waiting = manager_.num_waiting_writes() > 0;
    search.begin_fill(columns, moves);
    const bool lacks_room = moves.ticket == 0 || moves.keys.size() < columns.size();
    if (lacks_room && (hooks_.make_room() || has_waiting)) {
        reading.fill.end(0, false);
        search.begin_fill(columns, moves);
    }
    if (moves.ticket == 0) return true;
    // The fill may lack columns that have arrived meanwhile, or for which the tier has no room.
    for (const ColumnParts& each : columns) {
        if (reading.columns.size() == moves.keys.size()) break;
        const PageKey& next = moves.keys[reading.columns.size()];
        if (search.key(each.column) == next) reading.columns.push_back(each.column);
    }
    hooks_.prepare(moves);
    const auto finish = [&] {
        if (reading.late.done()) {
            end(reading);
            return false;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        late_.splice(late_.end(), own);
        return true;
    };
    try {
        while (reading.arrived < moves.keys.size() && read_on(search, reading)) {
        }
    } catch (...) {
        static_cast<void>(finish());
        throw;
    }
    const bool is_whole = reading.arrived == moves.keys.size() || !reading.has_learned;
    const std::uint64_t began = reading.epoch;
    return finish() || is_whole || began != epoch();
}

// Reads the next columns from one store. Returns true if this fill can go on.
bool StoreReader::read_on(LowerSearch& search, Reading& reading) {
    const std::size_t first = reading.arrived;
    const std::int32_t store = search.at(reading.columns[first]).store;
    if (store < 0) return false;
    const ColumnRange range{reading.fill.moves, first, batch(search, reading)};
    std::vector<std::uint64_t> parts(range.n);
    const std::size_t served =
        stores_[static_cast<std::size_t>(store)]->read(range, parts.data(), reading.late, hooks_);
    for (std::size_t i = 0; i < served; ++i, ++reading.arrived) {
        if ((range.parts(i) & ~parts[i]) == 0) continue;
        search.at(reading.columns[reading.arrived]).parts = parts[i];
        reading.has_learned = true;
        return false;
    }
    if (served > 0 && store > 0) reading.is_from_lower = true;
    if (served == range.n) return true;
    reading.has_learned = true;
    return reading.late.done() && search.lose(stores_, reading.columns[reading.arrived]);
}

// The number of next columns that one read brings from one store: at most `batch_bytes`, but at
// least one column.
std::size_t StoreReader::batch(LowerSearch& search, const Reading& reading) const {
    const StoreMoves& moves = reading.fill.moves;
    const std::int32_t store = search.at(reading.columns[reading.arrived]).store;
    std::int64_t left = options_.batch_bytes;
    std::size_t end = reading.arrived;
    for (; end < moves.keys.size() && search.at(reading.columns[end]).store == store; ++end) {
        for (const StoredPart* part = moves.begin_of(end); part != moves.end_of(end); ++part) {
            left -= part->part == kStatePart ? options_.state_bytes : options_.page_bytes;
        }
        if (end > reading.arrived && left < 0) break;
    }
    return end - reading.arrived;
}

// Under the lock, because `forget` runs before the upper tiers are emptied: a fill that ends later
// brings no page.
void StoreReader::end(Reading& reading) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_wanted = reading.epoch == epoch_;
    reading.fill.end(is_wanted ? static_cast<std::int64_t>(reading.arrived) : 0,
                     reading.is_from_lower);
}

void StoreReader::end_late_reads() noexcept {
    std::list<Reading> over;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto each = late_.begin(); each != late_.end();) {
            const auto next = std::next(each);
            if (each->late.done()) over.splice(over.end(), late_, each);
            each = next;
        }
    }
    for (Reading& each : over) end(each);
}

std::uint64_t StoreReader::epoch() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    return epoch_;
}

// Waits until a flight of another thread has ended, or until a time. Returns true if it has ended.
bool StoreReader::has_ended(std::unique_lock<std::mutex>& lock, Clock::time_point until,
                            const Flights::value_type& flight) {
    const auto [name, number] = flight;
    for (;;) {
        const auto found = flights_.find(name);
        if (found == flights_.end() || found->second != number) return true;
        const auto now = Clock::now();
        if (now >= until) return false;
        const auto slice = std::min(until - now, duration_of(StoreHooks::kInterval));
        if (changed_.wait_for(lock, slice) == std::cv_status::no_timeout) continue;
        lock.unlock();
        hooks_.check_interrupt();
        lock.lock();
    }
}

}  // namespace kvcore
