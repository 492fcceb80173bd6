// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "store/disk/file_ops.hpp"
#include "store/disk/slot_format.hpp"

namespace kvcore {

/// Names of the files in a directory that hold slots, in order. Throws Error.
[[nodiscard]] std::vector<std::string> segment_files(const std::string& directory);

/// The lock on a directory, held by one process and, in that process, by one store.
///
/// Owns: the open lock file, which contains the process id.
class DirectoryLock {
   public:
    /// Throws Error with the owner if the lock is already held.
    explicit DirectoryLock(const std::string& directory);
    DirectoryLock(DirectoryLock&& other) noexcept;
    DirectoryLock& operator=(DirectoryLock&&) = delete;
    ~DirectoryLock() { release(); }
    /// Releases the lock, also for forks that inherited the lock file.
    void release() noexcept;

    /// The process that holds a directory's lock; 0: not held, -1: held by an unknown process.
    [[nodiscard]] static std::int64_t owner_of(const std::string& directory);

   private:
    int file_;
};

/// The slots of one directory, by number, in files with equal numbers of slots; the last file may
/// have fewer.
///
/// Owns: the directory's lock and its open files.
/// Invariant: slots 0 .. num_slots - 1 can be read and written.
/// Threads: `read` and `write` any number; `grow` and `raise_floor` one thread each; no other
/// thread runs during the other methods.
class SlotFiles {
   public:
    /// Opens the existing files. Throws Error if the directory is in use, cannot be written, or has
    /// slots of another size.
    SlotFiles(FileOps& ops, DiskDirectory directory, std::int64_t slot_bytes,
              std::int64_t segment_bytes, bool direct);
    SlotFiles(const SlotFiles&) = delete;
    SlotFiles& operator=(const SlotFiles&) = delete;
    ~SlotFiles() { close(); }

    [[nodiscard]] const std::string& path() const noexcept { return directory_.path; }
    [[nodiscard]] std::int64_t num_slots() const noexcept { return num_slots_; }
    /// Slots within the quota.
    [[nodiscard]] std::int64_t capacity() const noexcept { return capacity_; }
    /// The maximum number of slots that `grow` adds, within the capacity.
    [[nodiscard]] std::int64_t segment_slots() const noexcept { return shape_.segment_slots; }
    [[nodiscard]] bool is_direct() const noexcept { return direct_; }
    /// Returns true if the existing files had no known shape and were removed at the start.
    [[nodiscard]] bool was_reset() const noexcept { return was_reset_; }
    /// Pages with a lower sequence number were cleared.
    [[nodiscard]] std::uint64_t floor() const noexcept { return shape_.floor; }
    /// Raises the floor. Returns 0 if the new floor is permanent, otherwise errno or kEndOfFile.
    [[nodiscard]] int raise_floor(std::uint64_t floor);

    /// Adds the missing slots of the last file or, if it is full, the slots of a new file, as far
    /// as the disk has space. Returns 0, or errno if no slot was added.
    [[nodiscard]] int grow();
    /// Reads or writes from the beginning of a slot. The parts are whole blocks at multiples of a
    /// block; the array `parts` is changed. Returns as read_all and write_all.
    [[nodiscard]] int read(std::int64_t slot, iovec* parts, int n) const;
    [[nodiscard]] int write(std::int64_t slot, iovec* parts, int n) const;
    void close() noexcept;

   private:
    [[nodiscard]] bool load_shape(std::int64_t slot_bytes);
    [[nodiscard]] std::int64_t segments_of(std::int64_t slots) const noexcept;
    [[nodiscard]] int write_shape_file(const StoreShape& shape);
    void save_shape();
    [[nodiscard]] int move_shape(std::byte* block, bool is_write);
    [[nodiscard]] std::int64_t fit(int file, std::int64_t there, std::int64_t most, int& error);
    [[nodiscard]] int add_file();
    [[nodiscard]] int extend_file();
    [[nodiscard]] std::int64_t num_files() const noexcept {
        return static_cast<std::int64_t>(files_.size());
    }
    void remove_segments(std::int64_t from) const;
    void open_segments();
    [[nodiscard]] int open_file(const std::string& name, int flags);
    [[nodiscard]] std::int64_t slots_in(std::int64_t segment) const noexcept;
    [[nodiscard]] off_t offset_of(std::int64_t slot) const noexcept {
        return slot % shape_.segment_slots * shape_.slot_bytes;
    }
    [[nodiscard]] int file_of(std::int64_t slot) const noexcept {
        return files_[static_cast<std::size_t>(slot / shape_.segment_slots)];
    }

    FileOps& ops_;
    DiskDirectory directory_;
    DirectoryLock lock_;
    StoreShape shape_;
    std::int64_t capacity_ = 0;
    std::int64_t num_slots_ = 0;
    std::atomic<bool> direct_;
    bool was_reset_ = false;
    std::vector<int> files_;  // with capacity for all: it never moves
};

}  // namespace kvcore
