// SPDX-License-Identifier: Apache-2.0
// The disk tier: pages in files of fixed slots, found by their keys, also after a restart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvcore {

/// 32 bytes that name a page's content, such as a SHA-256; a store never looks into them.
struct StoreKey {
    std::array<std::byte, 32> bytes{};

    friend bool operator==(const StoreKey& a, const StoreKey& b) noexcept {
        return std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()) == 0;
    }
};

/// Parts that a page can have: one for each bundle of its groups; part 0 alone without groups.
constexpr std::int32_t kMaxStoreParts = 64;

/// The bytes of one part of a page in memory.
template <class Byte>
struct StorePart {
    std::int32_t part;
    Byte* data;
    std::int64_t bytes;
};

/// A page and where some of its parts lie, by rising numbers. Fastest when they begin at multiples
/// of 4 KiB and have multiples of it: then they are not copied on their way.
template <class Byte>
struct StorePage {
    StoreKey key;
    std::vector<StorePart<Byte>> parts;
};
using PageToRead = StorePage<std::byte>;
using PageToWrite = StorePage<const std::byte>;

/// A directory of a store, and the most that its files may take, in bytes.
struct DiskDirectory {
    std::string path;
    std::int64_t quota_bytes;
};

struct DiskStoreConfig {
    // On disks of their own: pages are spread over them.
    std::vector<DiskDirectory> directories = {};
    std::int64_t page_bytes = 0;  // of all parts of a page together, at most
    StoreKey fingerprint = {};    // of the model, layout, dtype, ...: pages of others are not found
    int threads = 4;              // that read and write
    std::int64_t queue_pages = 256;     // waiting for one of them; who brings more waits
    std::int64_t segment_bytes = 0;     // of a file; 0: a 64th of the quota, at least 64 MiB
    bool direct = true;                 // past the system's page cache, where the file system can
    std::int32_t breaker_failures = 5;  // in a row: then nothing is tried for some time
    double breaker_seconds = 10;        // this long
    double slow_seconds = 5;            // a read or write that takes longer is a failure
};

/// Whether a store tries: yes, not now, or with one page at a time to see whether it works again.
enum class BreakerState { kClosed, kOpen, kHalfOpen };

/// Counters since the store was opened. Pages, unless it says otherwise.
struct DiskStoreStats {
    /// By time taken: less than 2, 4, 8, ... microseconds.
    using Times = std::array<std::int64_t, 32>;

    std::int64_t slots = 0;     // that the files have now
    std::int64_t capacity = 0;  // slots within the quotas
    std::int64_t stored = 0;
    std::int64_t broken = 0;    // slots that failed, and are left alone until it is reopened
    std::int64_t restored = 0;  // found by the scan at the start
    std::int64_t foreign = 0;   // there, of another fingerprint
    std::int64_t hits = 0;      // served
    std::int64_t misses = 0;    // asked for and not served, for whatever reason
    std::int64_t written = 0;
    std::int64_t evicted = 0;
    std::int64_t bytes_read = 0;
    std::int64_t bytes_written = 0;
    std::int64_t corrupt = 0;  // bytes that are not those written; their pages are gone
    std::int64_t errors = 0;   // reads, writes and allocations that the system refused or cut short
    std::int64_t timeouts = 0;  // reads and writes that took too long
    std::int64_t refused = 0;   // not tried: the breaker was open
    std::int64_t no_room = 0;  // not written: every slot was in use or broken, and the disk gave no
                               // space for more
    std::int64_t queued = 0;   // waiting now
    BreakerState breaker = BreakerState::kClosed;
    bool direct = false;  // whether all directories are read and written directly
    Times read_times{};
    Times write_times{};
};

class StoreJob;

/// A batch under way. Its memory must stay as it is until the batch is done: the destructor waits.
/// Threads: one at a time.
class StoreTask {
   public:
    StoreTask() noexcept = default;
    explicit StoreTask(std::shared_ptr<StoreJob> job) noexcept;
    StoreTask(StoreTask&& other) noexcept = default;
    StoreTask& operator=(StoreTask&& other) noexcept;
    ~StoreTask();

    [[nodiscard]] bool done() const noexcept;
    /// Waits for so many seconds at most, for ever if negative. Returns done(). Throws Error in a
    /// child of fork.
    bool wait(double seconds = -1) const;
    /// Waits. Pages that were read, a prefix of the batch; or that are stored now.
    [[nodiscard]] std::int64_t result() const;

   private:
    std::shared_ptr<StoreJob> job_;
};

struct DiskSeams;  // what tests put in the place of the system

/// Pages of K and V in files, by key.
///
/// Owns: the files `segment-*.kv` of its directories, which nobody else opens meanwhile; threads.
/// Invariant: a page is found once all its bytes are written, and is served if its key, its
/// fingerprint and the CRCs of all that is read are right. Where they are not, it is gone.
/// Failures of the disk are misses with a counter; what throws is a wrong argument
/// (std::invalid_argument), or a call after `close` or in a child of `fork` (Error).
/// When the quotas are used up, the page goes that was used least recently and is not being read.
/// Nothing is synced: a crash of the system loses pages, never their integrity.
/// Threads: any number.
/// Cost: `contains` O(1) per page; `get` and `put` a read or write of the page and a CRC over it;
/// the constructor reads the header of every slot. Memory: about 150 bytes a slot.
class DiskStore {
   public:
    /// Opens the directories, and makes those that are missing. Throws std::invalid_argument for a
    /// wrong config, and Error where a directory is in use, has slots of another size or cannot be
    /// written.
    explicit DiskStore(DiskStoreConfig config);
    DiskStore(DiskStoreConfig config, const DiskSeams& seams);
    DiskStore(const DiskStore&) = delete;
    DiskStore& operator=(const DiskStore&) = delete;
    ~DiskStore();

    /// The parts of a page that are stored, a bit each; 0 for an unknown page.
    [[nodiscard]] std::uint64_t parts_of(const StoreKey& key) const;

    /// Reads pages, all of them or a prefix: the first that lacks a part, or cannot be read, ends
    /// it. The memory of those behind it may have been written to.
    StoreTask get_async(std::vector<PageToRead> pages);
    [[nodiscard]] std::int64_t get(std::vector<PageToRead> pages) {
        return get_async(std::move(pages)).result();
    }
    /// Writes pages, but those whose parts are stored already. A page that has other parts, or
    /// others' sizes, or could not be read the last time, is replaced. While the queue is full a
    /// batch waits, `slow_seconds` at most: then it is refused.
    StoreTask put_async(std::vector<PageToWrite> pages);
    std::int64_t put(std::vector<PageToWrite> pages) {
        return put_async(std::move(pages)).result();
    }
    /// Forgets pages. Returns how many there were. For good, but for those whose slots cannot be
    /// written at that moment: they may be back after a restart.
    std::int64_t remove(const std::vector<StoreKey>& keys);
    /// Forgets all pages, also those on their way from an earlier `put`. Returns how many were
    /// found before. For good once it returns, but on a disk that cannot be written at that moment.
    /// One block is written to each directory.
    std::int64_t clear();

    [[nodiscard]] DiskStoreStats stats() const;
    /// Bytes of a slot, and most of a page.
    [[nodiscard]] std::int64_t slot_bytes() const noexcept;
    [[nodiscard]] std::int64_t page_bytes() const noexcept;
    /// Carries out what waits, ends the threads and lets the directories go. A second call does
    /// nothing.
    void close();
    [[nodiscard]] bool is_closed() const noexcept;

    /// Throws IntegrityError unless each slot is free, being written, or found by its key.
    /// O(slots).
    void check_integrity() const;

   private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

/// What the files of a directory hold, whoever uses them.
struct DiskReport {
    std::int64_t slot_bytes = 0;
    std::int64_t slots = 0;
    std::int64_t stored = 0;
    std::int64_t payload_bytes = 0;
    std::int64_t file_bytes = 0;
    std::int64_t corrupt = 0;
    std::int64_t owner = 0;                 // process that uses it; 0: none
    std::vector<std::string> bad_slots;     // file and slot of those that are corrupt
    std::vector<StoreKey> fingerprints;     // distinct
    std::vector<std::int64_t> page_counts;  // pages of each
};

/// Reads the headers of a store's slots, and all bytes if `verify`. Throws std::invalid_argument
/// for a directory without a store, and Error where it cannot be read or, with `verify`, is in use.
[[nodiscard]] DiskReport inspect_disk_store(const std::string& directory, bool verify);

/// Removes the files of a store; throws as above, also where it is in use. Returns their bytes.
std::int64_t purge_disk_store(const std::string& directory);

}  // namespace kvcore
