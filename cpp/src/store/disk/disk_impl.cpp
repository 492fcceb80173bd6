// SPDX-License-Identifier: Apache-2.0
#include "store/disk/disk_impl.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <utility>

#include "kvcore/errors.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

constexpr std::int64_t kLeastSegment = std::int64_t{64} << 20;
constexpr double kNanoseconds = 1e9;
constexpr std::size_t kMostCallers = 16;  // watched while they erase or grow

std::int64_t nanoseconds(double seconds) noexcept {
    return static_cast<std::int64_t>(seconds * kNanoseconds);
}

/// The content of a slot according to its header.
struct Found {
    SlotPlace place;
    StoreKey key;
    std::uint64_t parts = 0;
    std::int64_t payload = 0;
    std::uint64_t sequence = 0;
    enum class Kind : std::uint8_t { kFree, kCorrupt, kForeign, kFailed, kStored };  // best first
    Kind kind = Kind::kFree;
};

Found look_at(const SlotFiles& files, SlotPlace place, std::int64_t slot_bytes,
              const StoreKey& fingerprint, std::byte* block) {
    Found found;
    found.place = place;
    iovec part{block, static_cast<std::size_t>(kHeaderBytes)};
    const int error = files.read(place.slot, &part, 1);
    if (error != 0) {
        if (error != kEndOfFile) found.kind = Found::Kind::kFailed;
        return found;
    }
    SlotHeader header;
    const HeaderState state = read_header(block, slot_bytes, header);
    if (state == HeaderState::kEmpty) return found;
    if (state == HeaderState::kCorrupt) {
        found.kind = Found::Kind::kCorrupt;
        return found;
    }
    if (header.sequence < files.floor()) return found;
    found.kind = header.fingerprint == fingerprint ? Found::Kind::kStored : Found::Kind::kForeign;
    found.key = header.key;
    found.parts = header.parts;
    found.payload = static_cast<std::int64_t>(header.payload_bytes);
    found.sequence = header.sequence;
    return found;
}

}  // namespace

DiskSeams system_seams() {
    return {std::make_shared<FileOps>(), [] {
                return std::chrono::duration_cast<std::chrono::nanoseconds>(
                           std::chrono::steady_clock::now().time_since_epoch())
                    .count();
            }};
}

DiskStore::Impl::Impl(DiskStoreConfig given, const DiskSeams& seams)
    : config(std::move(given)),
      slot_bytes(kHeaderBytes + whole_blocks(config.page_bytes)),
      seams_(seams),
      process_(::getpid()),
      began_(static_cast<std::size_t>(config.threads) + kMostCallers),
      breaker_(config.breaker_failures, nanoseconds(config.breaker_seconds)),
      index_(config.directories.size()) {
    for (int i = 0; i < config.threads; ++i) io_.emplace_back(slot_bytes, config.fingerprint);
    open_directories();
    scan();
    queue_ = std::make_unique<IoQueue>(config.threads, config.queue_pages, config.slow_seconds);
}

void DiskStore::Impl::open_directories() {
    for (const DiskDirectory& directory : config.directories) {
        const std::int64_t segment = config.segment_bytes > 0
                                         ? config.segment_bytes
                                         : std::max(kLeastSegment, directory.quota_bytes / 64);
        directories_.push_back(std::make_unique<SlotFiles>(*seams_.ops, directory, slot_bytes,
                                                           segment, config.direct));
        const SlotFiles& files = *directories_.back();
        rooms_.push_back({files.num_slots(), files.capacity(), 0});
        if (files.was_reset()) ++counters_.corrupt;
        sequence_ = std::max<std::uint64_t>(sequence_, files.floor());
    }
}

// Finds the pages of earlier stores; a page counts as used when it was written. The other slots are
// given out in this order: empty slots, corrupt slots, slots with other fingerprints, oldest first.
void DiskStore::Impl::scan() {
    std::vector<Found> all;
    for (std::size_t d = 0; d < directories_.size(); ++d) {
        index_.make_room(d, directories_[d]->num_slots());
    }
    for (std::size_t d = 0; d < directories_.size(); ++d) {
        for (std::int64_t slot = 0; slot < directories_[d]->num_slots(); ++slot) {
            all.emplace_back().place = {static_cast<std::int32_t>(d), slot};
        }
    }
    constexpr std::int64_t kWorthAThread = 16;
    cpu::parallel_for(static_cast<std::int64_t>(all.size()), kWorthAThread, config.threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          const AlignedBuffer block(kHeaderBytes);
                          for (std::int64_t i = begin; i < end; ++i) {
                              Found& found = all[static_cast<std::size_t>(i)];
                              found = look_at(files_of(found.place), found.place, slot_bytes,
                                              config.fingerprint, block.data());
                          }
                      });
    std::stable_sort(all.begin(), all.end(), [](const Found& a, const Found& b) {
        return a.kind != b.kind ? a.kind < b.kind : a.sequence < b.sequence;
    });
    const auto stored = std::find_if(all.begin(), all.end(), [](const Found& found) {
        return found.kind == Found::Kind::kStored;
    });
    std::reverse(all.begin(), stored);  // the slot freed last is given out first
    for (const Found& found : all) {
        const SlotId slot = index_.add(found.place);
        if (found.kind == Found::Kind::kCorrupt) ++counters_.corrupt;
        if (found.kind == Found::Kind::kFailed) ++counters_.errors;
        if (found.kind == Found::Kind::kForeign) ++foreign_;
        sequence_ = std::max<std::uint64_t>(sequence_, found.sequence + 1);
        if (found.kind != Found::Kind::kStored) {
            index_.free(slot);
            continue;
        }
        bool is_busy = false;
        const SlotId before = index_.publish(slot, found.key, found.parts, found.payload, is_busy);
        if (before != kNoSlot) erase_and_free(before);
    }
    restored_ = index_.num_stored();
}

bool DiskStore::Impl::is_forked() const noexcept { return ::getpid() != process_; }

bool DiskStore::Impl::is_closed() const noexcept {
    if (is_forked()) return true;
    const std::lock_guard<std::mutex> lock(mutex_);
    return state_ != State::kOpen;
}

void DiskStore::Impl::close() {
    if (is_forked()) return;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (state_ != State::kOpen) {
            changed_.wait(lock, [this] { return state_ == State::kClosed; });
            return;
        }
        state_ = State::kClosing;
    }
    queue_->stop();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return calls_ == 0; });
    for (const auto& directory : directories_) directory->close();
    state_ = State::kClosed;
    changed_.notify_all();
}

// Takes a free slot of the next directory in turn, or grows that directory by the slots of one
// file.
SlotId DiskStore::Impl::next_free(std::unique_lock<std::mutex>& lock, bool& must_look_again) {
    const std::int64_t now = seams_.clock();
    for (std::size_t i = 0; i < rooms_.size(); ++i) {
        const std::size_t directory = (next_directory_ + i) % rooms_.size();
        const SlotId slot = index_.take_free(directory);
        if (slot != kNoSlot) {
            next_directory_ = directory + 1;
            return slot;
        }
        const Room& room = rooms_[directory];
        if (room.slots >= room.capacity || now < room.retry_at) continue;
        if (growing_) {
            changed_.wait(lock);
        } else {
            grow(directory, lock);
        }
        must_look_again = true;
        return kNoSlot;
    }
    return kNoSlot;
}

SlotId DiskStore::Impl::obtain() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (bool must_look_again = true; must_look_again;) {
        must_look_again = false;
        SlotId slot = next_free(lock, must_look_again);
        if (slot != kNoSlot) return slot;
        if (must_look_again) continue;
        slot = index_.evict();
        if (slot != kNoSlot) {
            ++counters_.evicted;
            return slot;
        }
        // All slots are broken: the disk failed, not the slots.
        must_look_again = index_.num_slots() > 0 && index_.num_broken() == index_.num_slots();
        if (must_look_again) index_.free_broken();
    }
    return kNoSlot;
}

// Releases the lock while the disk allocates space; grows one directory at a time.
void DiskStore::Impl::grow(std::size_t directory, std::unique_lock<std::mutex>& lock) {
    SlotFiles& files = *directories_[directory];
    Room& room = rooms_[directory];
    growing_ = true;
    int error = 0;
    try {
        index_.make_room(directory, std::min(files.segment_slots(), room.capacity - room.slots));
        lock.unlock();
        const Watch watch(*this, seams_.clock());
        error = files.grow();
    } catch (...) {
        error = ENOMEM;
    }
    if (!lock.owns_lock()) lock.lock();
    growing_ = false;
    changed_.notify_all();
    if (error != 0) {
        ++counters_.errors;
        room.retry_at = seams_.clock() + nanoseconds(config.breaker_seconds);
        return;
    }
    const std::int64_t first = room.slots;
    room.slots = files.num_slots();
    for (std::int64_t slot = room.slots; slot-- > first;) {  // lower slots are taken first
        index_.free(index_.add({static_cast<std::int32_t>(directory), slot}));
    }
}

void DiskStore::Impl::unpin(SlotId slot) noexcept {
    bool is_last = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_last = index_.unpin(slot);
    }
    if (is_last) erase_and_free(slot);
}

void DiskStore::Impl::set_suspect(SlotId slot, bool is_suspect) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    index_.set_suspect(slot, is_suspect);
}

// Erases the header, so that the page is not found after a restart; skips the write while the disk
// fails. If a suspect slot fails again, the disk has no new failure.
void DiskStore::Impl::erase_and_free(SlotId slot) noexcept {
    SlotPlace place;
    bool was_suspect = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        place = index_.place_of(slot);
        was_suspect = index_.is_suspect(slot);
    }
    bool is_written = true;
    if (is_refusing()) {
        ++counters_.refused;
    } else {
        const std::int64_t begin = seams_.clock();
        iovec part{zeros_.data(), static_cast<std::size_t>(kHeaderBytes)};
        {
            const Watch watch(*this, begin);
            is_written = files_of(place).write(place.slot, &part, 1) == 0;
        }
        const std::int64_t end = seams_.clock();
        if (!is_written) ++counters_.errors;
        const bool is_news = !is_written && !was_suspect;
        if (is_news || is_slow(end - begin)) breaker_.failed(end);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_written) index_.set_suspect(slot, true);
    index_.free(slot);
}

void DiskStore::Impl::check_integrity() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    index_.check_integrity();
    std::int64_t slots = 0;
    for (const Room& room : rooms_) slots += room.slots;
    detail::require_law(growing_ || slots == index_.num_slots(), "each slot of a file is known");
}

namespace {

using detail::concat;

template <class Byte>
void check_pages(const std::vector<StorePage<Byte>>& pages, std::int64_t page_bytes) {
    for (const StorePage<Byte>& page : pages) {
        std::int64_t sum = 0;
        std::int32_t last = -1;
        for (const StorePart<Byte>& part : page.parts) {
            if (part.part <= last || part.part >= kMaxStoreParts) {
                throw std::invalid_argument(concat("part ", part.part, " after part ", last,
                                                   "; part numbers must rise and be less than ",
                                                   kMaxStoreParts));
            }
            if (part.bytes < 1 || part.bytes > page_bytes - sum) {
                throw std::invalid_argument(
                    concat("part ", part.part, " of ", part.bytes, " bytes after ", sum,
                           "; a part has at least 1, a page of this store at most ", page_bytes));
            }
            last = part.part;
            sum += part.bytes;
        }
        if (page.parts.empty()) throw std::invalid_argument("a page without parts; give it a part");
    }
}

// Returns true if a stored page has the parts of another page, judged by the part numbers and the
// total sizes.
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

/// Ends the write of a key. No other thread writes the key before that.
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

/// Pages to read; each page is pinned until its read is over.
class DiskStore::Impl::GetJob final : public StoreJob {
   public:
    GetJob(Impl& impl, std::vector<PageToRead> pages)
        : StoreJob(0), impl_(impl), pages_(std::move(pages)) {
        slots_.reserve(pages_.size());
    }
    ~GetJob() override {
        if (!was_submitted_) give_up();
    }
    /// Ends a job that will not run.
    void give_up() noexcept {
        for (; !slots_.empty(); slots_.pop_back()) impl_.unpin(slots_.back());
        set_size(0);
        served_ = 0;
    }

    /// Pins the pages before the first page that lacks a part. The caller holds the lock.
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
    /// From now on, the threads that run the job unpin its pages.
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

    /// Counts hits and misses after all pages of the job.
    void count() noexcept {
        impl_.counters_.hits += served_;
        impl_.counters_.misses += static_cast<std::int64_t>(pages_.size()) - served_;
    }

   private:
    Impl& impl_;
    std::vector<PageToRead> pages_;
    std::vector<SlotId> slots_;  // of the first pages
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
    /// Ends a job that will not run.
    void give_up() noexcept { set_size(0); }

   private:
    Impl& impl_;
    std::vector<PageToWrite> pages_;
    const std::uint64_t born_;
    std::atomic<std::int64_t> stored_{0};
};

void DiskStore::Impl::parts_of(const StoreKey* keys, std::size_t n, std::uint64_t* parts) const {
    const Call call(*this);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = 0; i < n; ++i) {
        const SlotId slot = index_.find(keys[i]);
        parts[i] = slot == kNoSlot ? 0 : index_.parts_of(slot);
    }
}

// Also refuses while a transfer hangs: pages queued after it would hang as well.
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

// Returns false if the queue stays full for as long as a transfer may take: the disk hangs.
template <class Job>
bool DiskStore::Impl::submit(const std::shared_ptr<Job>& job) {
    const Submission answer = queue_->submit(job, [&] { job->submitted(); });
    if (answer == Submission::kStopped) {
        throw Error("this disk store was closed during the call; open another");
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
        if (index_.find(page.key) == slot) {  // no other reader has dropped it
            ++counters_.corrupt;
            [[maybe_unused]] const bool is_busy = index_.drop(slot);  // false: this reader pins it
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
        sequence = sequence_++;  // less than the floor of a later `clear`
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

// Cleared pages are recognised by their sequence numbers, also after a restart; their headers stay.
std::int64_t DiskStore::Impl::clear() {
    const Call call(*this);
    const std::lock_guard<std::mutex> alone(clearing_);
    std::int64_t cleared = 0;
    std::uint64_t floor = 0;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        floor = ++sequence_;
        floor_ = floor;
        cleared = index_.clear();
    }
    for (const auto& directory : directories_) save_floor(*directory, floor);
    return cleared;
}

void DiskStore::Impl::save_floor(SlotFiles& files, std::uint64_t floor) noexcept {
    if (is_refusing()) {
        ++counters_.refused;
        return;
    }
    const std::int64_t begin = seams_.clock();
    int error = 0;
    try {
        const Watch watch(*this, begin);
        error = files.raise_floor(floor);
    } catch (...) {
        error = ENOMEM;
    }
    const std::int64_t end = seams_.clock();
    if (error != 0) ++counters_.errors;
    if (error != 0 || is_slow(end - begin)) breaker_.failed(end);
}

}  // namespace kvcore
