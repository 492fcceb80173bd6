// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvcore/disk_store.hpp"
#include "kvcore/errors.hpp"
#include "store/disk/aligned_buffer.hpp"
#include "store/disk/breaker.hpp"
#include "store/disk/io_queue.hpp"
#include "store/disk/page_io.hpp"
#include "store/disk/seams.hpp"
#include "store/disk/slot_files.hpp"
#include "store/disk/slot_index.hpp"

namespace kvcore {

/// The counters of DiskStoreStats, incremented by several threads.
struct DiskCounters {
    using Count = std::atomic<std::int64_t>;
    Count hits{0}, misses{0}, written{0}, evicted{0}, bytes_read{0}, bytes_written{0}, corrupt{0},
        errors{0}, timeouts{0}, refused{0}, no_room{0};
    std::array<Count, 32> read_times{}, write_times{};
};

/// The parts of a DiskStore, and the paths of reads and writes through them.
class DiskStore::Impl {
   public:
    Impl(DiskStoreConfig config, const DiskSeams& seams);

    void parts_of(const StoreKey* keys, std::size_t n, std::uint64_t* parts) const;
    [[nodiscard]] std::shared_ptr<StoreJob> get(std::vector<PageToRead> pages);
    [[nodiscard]] std::shared_ptr<StoreJob> put(std::vector<PageToWrite> pages);
    std::int64_t remove(const std::vector<StoreKey>& keys);
    std::int64_t clear();
    [[nodiscard]] DiskStoreStats stats() const;
    void close();
    [[nodiscard]] bool is_closed() const noexcept;
    void check_integrity() const;

    /// Returns true if this process is a fork of the process that opened the store: a fork does not
    /// have its threads.
    [[nodiscard]] bool is_forked() const noexcept;

    const DiskStoreConfig config;
    const std::int64_t slot_bytes;

   private:
    class GetJob;
    class PutJob;
    class Call;
    class WriteOfKey;
    class Watch;
    enum class State { kOpen, kClosing, kClosed };
    /// The slots of a directory: a copy of the values in SlotFiles, guarded by the lock.
    struct Room {
        std::int64_t slots;
        std::int64_t capacity;
        std::int64_t retry_at;  // after the disk refused: the time of the next try
    };

    void open_directories();
    void scan();
    [[nodiscard]] bool is_refusing() const noexcept;
    [[nodiscard]] bool is_slow(std::int64_t taken_ns) const noexcept {
        return static_cast<double>(taken_ns) > config.slow_seconds * 1e9;
    }
    template <class Job>
    [[nodiscard]] bool submit(const std::shared_ptr<Job>& job);
    [[nodiscard]] bool read(const PageToRead& page, SlotId slot, std::size_t worker) noexcept;
    // `born`: the sequence number when the caller gave the page. `clear` forgets pages with lower
    // numbers.
    [[nodiscard]] bool write(const PageToWrite& page, std::uint64_t born, std::size_t worker);
    [[nodiscard]] bool write_to(SlotId slot, const PageToWrite& page, std::uint64_t born,
                                std::size_t worker);
    [[nodiscard]] SlotId obtain();
    [[nodiscard]] SlotId next_free(std::unique_lock<std::mutex>& lock, bool& must_look_again);
    void grow(std::size_t directory, std::unique_lock<std::mutex>& lock);
    void unpin(SlotId slot) noexcept;
    void erase_and_free(SlotId slot) noexcept;
    void save_floor(SlotFiles& files, std::uint64_t floor) noexcept;
    void set_suspect(SlotId slot, bool is_suspect) noexcept;
    template <class Transfer>
    [[nodiscard]] PageOutcome timed(std::size_t worker, std::array<DiskCounters::Count, 32>& times,
                                    const Transfer& transfer) noexcept;
    [[nodiscard]] SlotFiles& files_of(SlotPlace place) const noexcept {
        return *directories_[static_cast<std::size_t>(place.directory)];
    }

    DiskSeams seams_;
    pid_t process_;
    std::vector<std::unique_ptr<SlotFiles>> directories_;
    AlignedBuffer zeros_{kHeaderBytes};  // the header of a slot without a page
    std::vector<PageIo> io_;             // [threads]
    // [threads and callers]: start time of a transfer, an erase or a growth; 0: idle.
    std::vector<std::atomic<std::int64_t>> began_;
    Breaker breaker_;
    DiskCounters counters_;
    std::int64_t restored_ = 0;
    std::int64_t foreign_ = 0;
    std::atomic<std::uint64_t> sequence_{1};
    std::mutex clearing_;  // one `clear` at a time; locked before `mutex_`

    mutable std::mutex mutex_;  // guards all members below
    mutable std::condition_variable changed_;
    SlotIndex index_;
    std::uint64_t floor_ = 0;  // pages given before it were cleared
    std::vector<Room> rooms_;  // by directory
    std::size_t next_directory_ = 0;
    bool growing_ = false;
    State state_ = State::kOpen;
    mutable std::int64_t calls_ = 0;  // in progress
    std::unique_ptr<IoQueue> queue_;
};

/// A call in progress, which `close` waits for. Throws Error if the store refuses calls.
class DiskStore::Impl::Call {
   public:
    explicit Call(const Impl& impl) : impl_(impl) {
        if (impl.is_forked()) {
            throw Error(detail::concat("this disk store belongs to process ", impl.process_,
                                       ", of which this one is a fork; open a store here"));
        }
        const std::lock_guard<std::mutex> lock(impl_.mutex_);
        if (impl_.state_ != State::kOpen) throw Error("this disk store is closed; open another");
        ++impl_.calls_;
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
        const std::lock_guard<std::mutex> lock(impl_.mutex_);
        if (--impl_.calls_ == 0) impl_.changed_.notify_all();
    }

   private:
    const Impl& impl_;
};

/// A system call that may hang; `is_refusing` sees it while it lasts.
class DiskStore::Impl::Watch {
   public:
    // Without a free entry this call is not watched: calls in the other entries show a hang.
    Watch(Impl& impl, std::int64_t now) noexcept {
        auto i = static_cast<std::size_t>(impl.config.threads);  // lower entries: the threads
        for (; i < impl.began_.size() && entry_ == nullptr; ++i) {
            std::int64_t none = 0;
            if (impl.began_[i].compare_exchange_strong(none, now)) entry_ = &impl.began_[i];
        }
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() {
        if (entry_ != nullptr) *entry_ = 0;
    }

   private:
    std::atomic<std::int64_t>* entry_ = nullptr;
};

}  // namespace kvcore
