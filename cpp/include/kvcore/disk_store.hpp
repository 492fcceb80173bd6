// SPDX-License-Identifier: Apache-2.0
// The disk tier: pages in files of fixed slots, found by their keys, even after a restart.
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

/// 32 bytes that name a page's content, such as a SHA-256; a store does not interpret them.
struct StoreKey {
    std::array<std::byte, 32> bytes{};

    friend bool operator==(const StoreKey& a, const StoreKey& b) noexcept {
        return std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()) == 0;
    }
};

/// Maximum number of parts of a page: one part for each bundle of its groups; only part 0 without
/// groups.
constexpr std::int32_t kMaxStoreParts = 64;

/// The bytes of one part of a page in memory.
template <class Byte>
struct StorePart {
    std::int32_t part;
    Byte* data;
    std::int64_t bytes;
};

/// A page and the addresses of some of its parts, in ascending order of part numbers. Fastest if
/// addresses and sizes of the parts are multiples of 4 KiB: then the parts are not copied on the
/// way to the disk.
template <class Byte>
struct StorePage {
    StoreKey key;
    std::vector<StorePart<Byte>> parts;
};
using PageToRead = StorePage<std::byte>;
using PageToWrite = StorePage<const std::byte>;

/// A directory of a store, and the maximum size of its files in bytes.
struct DiskDirectory {
    std::string path;
    std::int64_t quota_bytes;
};

struct DiskStoreConfig {
    // On separate disks: pages are spread over them.
    std::vector<DiskDirectory> directories = {};
    std::int64_t page_bytes = 0;     // of all parts of a page together, at most
    StoreKey fingerprint = {};       // of the model, layout, dtype, ...: other pages are not found
    int threads = 4;                 // that read and write
    std::int64_t queue_pages = 256;  // waiting for a thread; a caller with more pages waits
    std::int64_t segment_bytes = 0;  // of a file; 0: a 64th of the quota, at least 64 MiB
    bool direct = true;              // bypass the system's page cache if the file system can
    std::int32_t breaker_failures = 5;  // failures in a row that open the breaker
    double breaker_seconds = 10;        // that the breaker refuses all reads and writes
    double slow_seconds = 5;            // a read or write that takes longer is a failure
};

/// The state of a store's breaker: the store tries all reads and writes, none, or one page at a
/// time to check that they work again.
enum class BreakerState { kClosed, kOpen, kHalfOpen };

/// Counters since the store was opened. Pages, unless the comment names another unit.
struct DiskStoreStats {
    /// Counts by duration: less than 2, 4, 8, ... microseconds.
    using Times = std::array<std::int64_t, 32>;

    std::int64_t slots = 0;     // of the files now
    std::int64_t capacity = 0;  // slots within the quotas
    std::int64_t stored = 0;
    std::int64_t broken = 0;    // slots that failed; not used until the store is reopened
    std::int64_t restored = 0;  // found by the scan at the start
    std::int64_t foreign = 0;   // in the files, with another fingerprint
    std::int64_t hits = 0;      // served
    std::int64_t misses = 0;    // requested and not served, for any reason
    std::int64_t written = 0;
    std::int64_t evicted = 0;
    std::int64_t bytes_read = 0;
    std::int64_t bytes_written = 0;
    std::int64_t corrupt = 0;  // bytes that differ from the written bytes; the page is removed
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

/// A batch in flight. Its memory must stay unchanged until the batch is done: the destructor waits.
/// Threads: one at a time.
class StoreTask {
   public:
    StoreTask() noexcept = default;
    explicit StoreTask(std::shared_ptr<StoreJob> job) noexcept;
    StoreTask(StoreTask&& other) noexcept = default;
    StoreTask& operator=(StoreTask&& other) noexcept;
    ~StoreTask();

    [[nodiscard]] bool done() const noexcept;
    /// Waits for at most `seconds` seconds, forever if negative. Returns done(). Throws Error in a
    /// child of fork.
    bool wait(double seconds = -1) const;
    /// Waits. Returns the number of pages that were read (a prefix of the batch), or that are
    /// stored now.
    [[nodiscard]] std::int64_t result() const;

   private:
    std::shared_ptr<StoreJob> job_;
};

struct DiskSeams;  // replacements of system calls in tests

/// Pages of K and V in files, by key.
///
/// Owns: the files `segment-*.kv` of its directories, which nothing else may open while the store
/// uses them; threads.
/// Invariant: a page is found after all its bytes are written, and is served if its key, its
/// fingerprint and the CRCs of all bytes read are right. If they are wrong, the page is removed.
/// Failures of the disk are misses with a counter. A call throws only for a wrong argument
/// (std::invalid_argument), or after `close` or in a child of `fork` (Error).
/// When the quotas are used up, the store evicts the least recently used page that is not being
/// read. The store syncs nothing: a crash of the system loses pages, never their integrity.
/// Threads: any number.
/// Cost: `parts_of` O(1) per page; `get` and `put` a read or write of the page and a CRC over it;
/// the constructor reads the header of every slot. Memory: about 150 bytes a slot.
class DiskStore {
   public:
    /// Opens the directories, and creates missing directories. Throws std::invalid_argument for a
    /// wrong config, and Error if a directory is in use, has slots of another size or cannot be
    /// written.
    explicit DiskStore(DiskStoreConfig config);
    DiskStore(DiskStoreConfig config, const DiskSeams& seams);
    DiskStore(const DiskStore&) = delete;
    DiskStore& operator=(const DiskStore&) = delete;
    ~DiskStore();

    /// The stored parts of a page, one bit each; 0 for an unknown page.
    [[nodiscard]] std::uint64_t parts_of(const StoreKey& key) const;

    /// Reads pages, all of them or a prefix: the read ends at the first page that lacks a part or
    /// cannot be read. The memory of later pages may have been overwritten.
    StoreTask get_async(std::vector<PageToRead> pages);
    [[nodiscard]] std::int64_t get(std::vector<PageToRead> pages) {
        return get_async(std::move(pages)).result();
    }
    /// Writes pages, except pages whose parts are already stored. A page is replaced if its stored
    /// parts are others or have other sizes, or if it could not be read the last time. While the
    /// queue is full a batch waits, `slow_seconds` at most; after that it is refused.
    StoreTask put_async(std::vector<PageToWrite> pages);
    std::int64_t put(std::vector<PageToWrite> pages) {
        return put_async(std::move(pages)).result();
    }
    /// Forgets pages. Returns the number of them that were stored. The removal is permanent, except
    /// for pages whose slots cannot be written at that moment: these pages may return after a
    /// restart.
    std::int64_t remove(const std::vector<StoreKey>& keys);
    /// Forgets all pages, including pages in flight from an earlier `put`. Returns the number of
    /// pages that were stored. The removal is permanent when the call returns, except on a disk
    /// that cannot be written at that moment. Writes one block to each directory.
    std::int64_t clear();

    [[nodiscard]] DiskStoreStats stats() const;
    /// Bytes of a slot, and the maximum bytes of a page.
    [[nodiscard]] std::int64_t slot_bytes() const noexcept;
    [[nodiscard]] std::int64_t page_bytes() const noexcept;
    /// Finishes waiting reads and writes, ends the threads and releases the directories. A second
    /// call does nothing.
    void close();
    [[nodiscard]] bool is_closed() const noexcept;

    /// Throws IntegrityError unless each slot is free, being written, or found by its key.
    /// O(slots).
    void check_integrity() const;

   private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

/// The contents of a directory's files, whoever uses the directory.
struct DiskReport {
    std::int64_t slot_bytes = 0;
    std::int64_t slots = 0;
    std::int64_t stored = 0;
    std::int64_t payload_bytes = 0;
    std::int64_t file_bytes = 0;
    std::int64_t corrupt = 0;
    std::int64_t owner = 0;                 // process that uses it; 0: not in use
    std::vector<std::string> bad_slots;     // file and slot of each corrupt page
    std::vector<StoreKey> fingerprints;     // distinct
    std::vector<std::int64_t> page_counts;  // pages of each fingerprint
};

/// Reads the headers of a store's slots, and all bytes if `verify`. Throws std::invalid_argument
/// for a directory without a store, and Error if the directory cannot be read or, with `verify`, is
/// in use.
[[nodiscard]] DiskReport inspect_disk_store(const std::string& directory, bool verify);

/// Removes the files of a store. Throws as above, also if the store is in use. Returns the bytes of
/// the files.
std::int64_t purge_disk_store(const std::string& directory);

}  // namespace kvcore
