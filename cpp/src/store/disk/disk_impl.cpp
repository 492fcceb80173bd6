// SPDX-License-Identifier: Apache-2.0
#include "store/disk/disk_call.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "kvcore/errors.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

constexpr std::int64_t kLeastSegment = std::int64_t{64} << 20;
constexpr double kNanoseconds = 1e9;
constexpr std::size_t kMostCallers = 16;  // that erase or grow at once and are watched

std::int64_t nanoseconds(double seconds) noexcept {
    return static_cast<std::int64_t>(seconds * kNanoseconds);
}

/// What a header says of a slot.
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

// Finds what earlier stores left. Pages count as used when they were written. Of the other slots
// the empty ones are given out first, then the corrupt, then those of other fingerprints, oldest
// first.
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

// A directory whose turn it is gives a free slot, or the slots of one more file.
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
        // It was not the slots that were broken, but the disk.
        must_look_again = index_.num_slots() > 0 && index_.num_broken() == index_.num_slots();
        if (must_look_again) index_.free_broken();
    }
    return kNoSlot;
}

// Without the lock while the disk sets space aside; one directory at a time.
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
    for (std::int64_t slot = room.slots; slot-- > first;) {  // those taken first lie first
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

// So that the page is not found after a restart either; not where the disk fails anyway. That a
// slot fails again which has failed says nothing new about the disk.
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

}  // namespace kvcore
