// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <utility>

#include "kvcore/errors.hpp"
#include "store/disk/disk_call.hpp"

namespace kvcore {
namespace {

using detail::concat;

template <class Byte>
void check_pages(const std::vector<StorePage<Byte>>& pages, std::int64_t page_bytes) {
    for (const StorePage<Byte>& page : pages) {
        std::int64_t sum = 0;
        std::int32_t last = -1;
        for (const StorePart<Byte>& part : page.parts) {
            if (part.part <= last || part.part >= kMaxStoreParts) {
                throw std::invalid_argument(concat("part ", part.part, " behind part ", last,
                                                   "; they must rise and be less than ",
                                                   kMaxStoreParts));
            }
            if (part.bytes < 1 || part.bytes > page_bytes - sum) {
                throw std::invalid_argument(concat(
                    "part ", part.part, " of ", part.bytes, " bytes behind ", sum,
                    "; a part has at least 1, and a page of this store at most ", page_bytes));
            }
            last = part.part;
            sum += part.bytes;
        }
        if (page.parts.empty()) throw std::invalid_argument("a page without parts; give it one");
    }
}

// Whether a stored page has the parts of another, as far as the sizes tell.
bool is_part_of(const KnownPage& part, const KnownPage& stored) noexcept {
    if (part.parts == stored.parts) return part.payload_bytes == stored.payload_bytes;
    return (part.parts & ~stored.parts) == 0 && part.payload_bytes < stored.payload_bytes;
}

std::size_t time_bucket(std::int64_t nanoseconds) noexcept {
    std::size_t bucket = 0;
    for (std::int64_t us = nanoseconds / 1000; us >= 2 && bucket < 31; us /= 2) ++bucket;
    return bucket;
}

}  // namespace

/// A key that nobody else writes meanwhile.
class DiskStore::Impl::WriteOfKey {
   public:
    WriteOfKey(Impl& impl, const StoreKey& key) noexcept : impl_(impl), key_(key) {}
    WriteOfKey(const WriteOfKey&) = delete;
    WriteOfKey& operator=(const WriteOfKey&) = delete;
    ~WriteOfKey() {
        const std::lock_guard<std::mutex> lock(impl_.mutex_);
        impl_.index_.end_write(key_);
    }

   private:
    Impl& impl_;
    const StoreKey& key_;
};

/// Pages that are being read; each is pinned until its turn is over.
class DiskStore::Impl::GetJob final : public StoreJob {
   public:
    GetJob(Impl& impl, std::vector<PageToRead> pages)
        : StoreJob(0), impl_(impl), pages_(std::move(pages)) {
        slots_.reserve(pages_.size());
    }
    ~GetJob() override {
        if (!was_submitted_) give_up();
    }
    /// The job does not run.
    void give_up() noexcept {
        for (; !slots_.empty(); slots_.pop_back()) impl_.unpin(slots_.back());
        set_size(0);
        served_ = 0;
    }

    /// Pins the pages up to the first that lacks a part. Under the lock.
    void pin() noexcept {
        for (const PageToRead& page : pages_) {
            const SlotId slot = impl_.index_.find(page.key);
            if (slot == kNoSlot || (known(page).parts & ~impl_.index_.parts_of(slot)) != 0) break;
            slots_.push_back(slot);
            impl_.index_.pin(slot);
        }
        set_size(static_cast<std::int64_t>(slots_.size()));
        served_ = size();
    }
    /// From now on its pages are those of the threads that run it.
    void submitted() noexcept { was_submitted_ = true; }

    void run(std::int64_t page, std::size_t worker) noexcept override {
        const auto i = static_cast<std::size_t>(page);
        if (page < served_ && !impl_.read(pages_[i], slots_[i], worker)) {
            std::int64_t seen = served_;
            while (page < seen && !served_.compare_exchange_weak(seen, page)) {
            }
        }
        impl_.unpin(slots_[i]);
        if (++ended_ == size()) count();
    }
    [[nodiscard]] std::int64_t result() const noexcept override { return served_; }

    /// Once all of its pages are over.
    void count() noexcept {
        impl_.counters_.hits += served_;
        impl_.counters_.misses += static_cast<std::int64_t>(pages_.size()) - served_;
    }

   private:
    Impl& impl_;
    std::vector<PageToRead> pages_;
    std::vector<SlotId> slots_;  // a prefix
    bool was_submitted_ = false;
    std::atomic<std::int64_t> served_{0};
    std::atomic<std::int64_t> ended_{0};
};

class DiskStore::Impl::PutJob final : public StoreJob {
   public:
    PutJob(Impl& impl, std::vector<PageToWrite> pages)
        : StoreJob(static_cast<std::int64_t>(pages.size())),
          impl_(impl),
          pages_(std::move(pages)),
          born_(impl.sequence_) {}

    void run(std::int64_t page, std::size_t worker) noexcept override {
        try {
            if (impl_.write(pages_[static_cast<std::size_t>(page)], born_, worker)) ++stored_;
        } catch (...) {  // no memory left for the index
            ++impl_.counters_.errors;
        }
    }
    [[nodiscard]] std::int64_t result() const noexcept override { return stored_; }
    void submitted() const noexcept {}
    /// The job does not run.
    void give_up() noexcept { set_size(0); }

   private:
    Impl& impl_;
    std::vector<PageToWrite> pages_;
    const std::uint64_t born_;
    std::atomic<std::int64_t> stored_{0};
};

std::uint64_t DiskStore::Impl::parts_of(const StoreKey& key) const {
    const Call call(*this);
    const std::lock_guard<std::mutex> lock(mutex_);
    const SlotId slot = index_.find(key);
    return slot == kNoSlot ? 0 : index_.parts_of(slot);
}

// Also where a transfer hangs: what queues up behind it would hang as well.
bool DiskStore::Impl::is_refusing() const noexcept {
    const std::int64_t now = seams_.clock();
    if (breaker_.is_refusing(now)) return true;
    return std::any_of(began_.begin(), began_.end(), [&](const auto& began) {
        const std::int64_t at = began;
        return at != 0 && is_slow(now - at);
    });
}

std::shared_ptr<StoreJob> DiskStore::Impl::get(std::vector<PageToRead> pages) {
    check_pages(pages, config.page_bytes);
    const Call call(*this);
    const auto n = static_cast<std::int64_t>(pages.size());
    auto job = std::make_shared<GetJob>(*this, std::move(pages));
    if (is_refusing()) {
        counters_.refused += n;
    } else {
        const std::lock_guard<std::mutex> lock(mutex_);
        job->pin();
    }
    if (job->size() > 0 && submit(job)) return job;
    job->give_up();
    job->count();
    return job;
}

std::shared_ptr<StoreJob> DiskStore::Impl::put(std::vector<PageToWrite> pages) {
    check_pages(pages, config.page_bytes);
    const Call call(*this);
    const auto n = static_cast<std::int64_t>(pages.size());
    auto job = std::make_shared<PutJob>(*this, std::move(pages));
    if (is_refusing()) {
        counters_.refused += n;
        job->give_up();
    } else if (!submit(job)) {
        job->give_up();
    }
    return job;
}

// False where the queue stays full for as long as a transfer may take: the disk hangs.
template <class Job>
bool DiskStore::Impl::submit(const std::shared_ptr<Job>& job) {
    const Submission answer = queue_->submit(job, [&] { job->submitted(); });
    if (answer == Submission::kStopped) {
        throw Error("this disk store was closed meanwhile; open another");
    }
    if (answer == Submission::kFull) counters_.refused += job->size();
    return answer == Submission::kAccepted;
}

std::int64_t DiskStore::Impl::remove(const std::vector<StoreKey>& keys) {
    const Call call(*this);
    std::int64_t removed = 0;
    for (const StoreKey& key : keys) {
        SlotId slot = kNoSlot;
        bool is_busy = false;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            slot = index_.find(key);
            if (slot == kNoSlot) continue;
            is_busy = index_.drop(slot);
        }
        ++removed;
        if (is_busy) erase_and_free(slot);
    }
    return removed;
}

template <class Transfer>
PageOutcome DiskStore::Impl::timed(std::size_t worker, std::array<DiskCounters::Count, 32>& times,
                                   const Transfer& transfer) noexcept {
    const std::int64_t begin = seams_.clock();
    began_[worker] = begin;
    const PageOutcome outcome = transfer(io_[worker]);
    began_[worker] = 0;
    const std::int64_t end = seams_.clock();
    ++times[time_bucket(end - begin)];
    if (is_slow(end - begin)) {
        ++counters_.timeouts;
        breaker_.failed(end);
    } else if (outcome == PageOutcome::kFailed) {
        breaker_.failed(end);
    } else {
        breaker_.succeeded();
    }
    if (outcome == PageOutcome::kFailed) ++counters_.errors;
    return outcome;
}

bool DiskStore::Impl::read(const PageToRead& page, SlotId slot, std::size_t worker) noexcept {
    if (!breaker_.admits(seams_.clock())) {
        ++counters_.refused;
        return false;
    }
    SlotPlace place;
    KnownPage stored;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        place = index_.place_of(slot);
        stored = {index_.parts_of(slot), index_.payload_of(slot)};
    }
    const PageOutcome outcome = timed(worker, counters_.read_times, [&](PageIo& io) {
        return io.read(files_of(place), place.slot, page, stored);
    });
    set_suspect(slot, outcome == PageOutcome::kFailed);
    if (outcome == PageOutcome::kRight) {
        counters_.bytes_read += known(page).payload_bytes;
        return true;
    }
    if (outcome == PageOutcome::kCorrupt) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (index_.find(page.key) == slot) {  // nobody else has found out
            ++counters_.corrupt;
            [[maybe_unused]] const bool is_busy = index_.drop(slot);  // no: this reader has it
        }
    }
    return false;
}

bool DiskStore::Impl::write(const PageToWrite& page, std::uint64_t born, std::size_t worker) {
    const KnownPage given = known(page);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (born < floor_) return false;
        const SlotId slot = index_.find(page.key);
        if (slot != kNoSlot && !index_.is_suspect(slot) &&
            is_part_of(given, {index_.parts_of(slot), index_.payload_of(slot)})) {
            index_.touch(slot);
            return true;
        }
        if (!index_.begin_write(page.key)) return false;
    }
    const WriteOfKey writing(*this, page.key);
    if (!breaker_.admits(seams_.clock())) {
        ++counters_.refused;
        return false;
    }
    const SlotId slot = obtain();
    if (slot != kNoSlot) return write_to(slot, page, born, worker);
    breaker_.gave_up();
    ++counters_.no_room;
    return false;
}

bool DiskStore::Impl::write_to(SlotId slot, const PageToWrite& page, std::uint64_t born,
                               std::size_t worker) {
    SlotPlace place;
    std::uint64_t sequence = 0;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        place = index_.place_of(slot);
        sequence = sequence_++;  // less than the floor of a `clear` that comes later
        if (born < floor_) {
            index_.free(slot);
            breaker_.gave_up();
            return false;
        }
    }
    const PageOutcome outcome = timed(worker, counters_.write_times, [&](PageIo& io) {
        return io.write(files_of(place), place.slot, page, sequence);
    });
    if (outcome != PageOutcome::kRight) {
        set_suspect(slot, true);
        erase_and_free(slot);
        return false;
    }
    const KnownPage written = known(page);
    ++counters_.written;
    counters_.bytes_written += written.payload_bytes;
    bool is_busy = false;
    bool is_cleared = false;
    SlotId before = kNoSlot;
    try {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_cleared = born < floor_;
        if (!is_cleared) {
            before = index_.publish(slot, page.key, written.parts, written.payload_bytes, is_busy);
        }
    } catch (...) {
        erase_and_free(slot);
        throw;
    }
    if (is_cleared) {
        erase_and_free(slot);
        return false;
    }
    if (before != kNoSlot && is_busy) erase_and_free(before);
    return true;
}

DiskStoreStats DiskStore::Impl::stats() const {
    const Call call(*this);
    DiskStoreStats out;
    out.hits = counters_.hits;
    out.misses = counters_.misses;
    out.written = counters_.written;
    out.evicted = counters_.evicted;
    out.bytes_read = counters_.bytes_read;
    out.bytes_written = counters_.bytes_written;
    out.corrupt = counters_.corrupt;
    out.errors = counters_.errors;
    out.timeouts = counters_.timeouts;
    out.refused = counters_.refused;
    out.no_room = counters_.no_room;
    std::copy(counters_.read_times.begin(), counters_.read_times.end(), out.read_times.begin());
    std::copy(counters_.write_times.begin(), counters_.write_times.end(), out.write_times.begin());
    out.restored = restored_;
    out.foreign = foreign_;
    out.queued = queue_->num_waiting();
    out.breaker = breaker_.state();
    out.direct = std::all_of(directories_.begin(), directories_.end(),
                             [](const auto& files) { return files->is_direct(); });
    const std::lock_guard<std::mutex> lock(mutex_);
    out.slots = index_.num_slots();
    out.stored = index_.num_stored();
    out.broken = index_.num_broken();
    for (const Room& room : rooms_) out.capacity += room.capacity;
    return out;
}

}  // namespace kvcore
