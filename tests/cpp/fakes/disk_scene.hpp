// SPDX-License-Identifier: Apache-2.0
// A temporary directory, pages whose bytes follow from their keys, and a disk that fails.
#pragma once

#include <fcntl.h>
#include <stdlib.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/disk_store.hpp"
#include "store/disk/seams.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

using kvcore::DiskStore;
using kvcore::DiskStoreConfig;
using kvcore::StoreKey;

/// A new directory, which is removed with its content.
class TemporaryDirectory {
   public:
    TemporaryDirectory() {
        std::string name = std::filesystem::temp_directory_path() / "kvcore-disk-XXXXXX";
        CHECK(mkdtemp(name.data()) != nullptr);
        path = name;
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    ~TemporaryDirectory() { std::filesystem::remove_all(path); }

    std::string path;
};

inline StoreKey key_of(std::uint64_t number) {
    StoreKey key;
    for (std::size_t i = 0; i < 4; ++i) {
        const std::uint64_t word = scramble(4 * number + i);
        std::memcpy(key.bytes.data() + 8 * i, &word, sizeof word);
    }
    return key;
}

/// The bytes of part `part` of page `number`.
inline std::vector<std::byte> content(std::uint64_t number, std::int32_t part, std::int64_t bytes) {
    std::vector<std::byte> out(static_cast<std::size_t>(bytes));
    Random random(number * 64 + static_cast<std::uint64_t>(part) + 1);
    for (std::size_t i = 0; i < out.size(); i += 8) {
        const std::uint64_t word = random.next();
        std::memcpy(out.data() + i, &word, std::min<std::size_t>(8, out.size() - i));
    }
    return out;
}

/// Puts and gets pages of one part, or of several parts of the same size, and checks their bytes.
class Pages {
   public:
    explicit Pages(DiskStore& store, std::int64_t part_bytes) : store_(store), bytes_(part_bytes) {}

    std::int64_t put(const std::vector<std::uint64_t>& numbers,
                     const std::vector<std::int32_t>& parts = {0}) {
        std::vector<std::vector<std::byte>> memory;
        std::vector<kvcore::PageToWrite> pages;
        for (const std::uint64_t number : numbers) {
            pages.push_back({key_of(number), {}});
            for (const std::int32_t part : parts) {
                memory.push_back(content(number, part, bytes_));
                pages.back().parts.push_back({part, memory.back().data(), bytes_});
            }
        }
        return store_.put(std::move(pages));
    }
    /// The number of served pages, after a check of their bytes.
    std::int64_t get(const std::vector<std::uint64_t>& numbers,
                     const std::vector<std::int32_t>& parts = {0}) {
        std::vector<std::vector<std::byte>> memory;
        std::vector<kvcore::PageToRead> pages;
        for (const std::uint64_t number : numbers) {
            pages.push_back({key_of(number), {}});
            for (const std::int32_t part : parts) {
                memory.emplace_back(static_cast<std::size_t>(bytes_));
                pages.back().parts.push_back({part, memory.back().data(), bytes_});
            }
        }
        const std::int64_t served = store_.get(std::move(pages));
        CHECK(served >= 0 && served <= static_cast<std::int64_t>(numbers.size()));
        std::size_t next = 0;
        for (std::size_t i = 0; i < static_cast<std::size_t>(served); ++i) {
            for (const std::int32_t part : parts) {
                CHECK(memory[next++] == content(numbers[i], part, bytes_));
            }
        }
        return served;
    }
    [[nodiscard]] bool has(std::uint64_t number) { return store_.parts_of(key_of(number)) != 0; }

   private:
    DiskStore& store_;
    std::int64_t bytes_;
};

/// The system's file operations, with faults that a test chooses.
class FaultyOps final : public kvcore::FileOps {
   public:
    std::atomic<int> read_error{0};   // errno of every read; 0: no error
    std::atomic<int> write_error{0};  // errno of every write
    std::atomic<int> allocate_error{0};
    std::atomic<std::int64_t> disk_bytes{std::int64_t{1} << 60};  // size limit of a file
    std::atomic<int> interruptions{0};                            // next allocations, with EINTR
    std::atomic<int> open_error{0};                               // errno of every open
    std::atomic<std::int64_t> bad_from{-1};  // start of the range of a file that fails ...
    std::atomic<std::int64_t> bad_to{-1};    // ... in every read and write, and its end
    std::function<void()> before_allocate;
    std::atomic<int> refuse_direct{0};     // errno of an O_DIRECT open
    std::atomic<bool> short_reads{false};  // one block per read, and none in the end
    std::atomic<bool> small_moves{false};  // one block at a time, until the end
    std::function<void()> before_move;

    int open(const char* path, int flags) override;
    ssize_t read(int fd, const iovec* parts, int n, off_t offset) override {
        return move(is_bad(offset, EIO, read_error), parts, n, [&](const iovec* p, int k) {
            if (short_reads && offset % (1 << 16) != 0) return ssize_t{0};
            return FileOps::read(fd, p, k, offset);
        });
    }
    ssize_t write(int fd, const iovec* parts, int n, off_t offset) override {
        return move(is_bad(offset, EIO, write_error), parts, n,
                    [&](const iovec* p, int k) { return FileOps::write(fd, p, k, offset); });
    }
    int allocate(int fd, off_t bytes) override {
        if (before_allocate) before_allocate();
        if (interruptions > 0) {
            --interruptions;
            return EINTR;
        }
        if (bytes > disk_bytes) return ENOSPC;
        return allocate_error != 0 ? int{allocate_error} : FileOps::allocate(fd, bytes);
    }

   private:
    [[nodiscard]] int is_bad(off_t at, int error, int otherwise) const {
        return bad_from <= at && at < bad_to ? error : otherwise;
    }
    template <class Move>
    ssize_t move(int error, const iovec* parts, int n, const Move& transfer) {
        if (before_move) before_move();
        if (error != 0) {
            errno = error;
            return -1;
        }
        if (!small_moves && !short_reads) return transfer(parts, n);
        iovec block = parts[0];
        block.iov_len = std::min<std::size_t>(block.iov_len, 4096);
        return transfer(&block, 1);
    }
};

inline int FaultyOps::open(const char* path, int flags) {
    if (open_error != 0 && std::strstr(path, "segment-") != nullptr) {
        errno = open_error;
        return -1;
    }
#if defined(O_DIRECT)
    if (refuse_direct != 0 && (flags & O_DIRECT) != 0) {
        errno = refuse_direct;
        return -1;
    }
#endif
    return FileOps::open(path, flags);
}

/// A store whose disk fails when a test chooses, on a clock that the test moves.
struct FaultyScene {
    explicit FaultyScene(DiskStoreConfig config) : config(std::move(config)) { open(); }
    void open() {
        store.reset();
        store = std::make_unique<DiskStore>(
            config, kvcore::DiskSeams{ops, [this] { return std::int64_t{now}; }});
    }

    std::shared_ptr<FaultyOps> ops = std::make_shared<FaultyOps>();
    std::atomic<std::int64_t> now{1};  // nanoseconds
    DiskStoreConfig config;
    std::unique_ptr<DiskStore> store;
};

/// Return a configuration for `pages` pages of one part.
inline DiskStoreConfig disk_config(const std::string& path, std::int64_t page_bytes,
                                   std::int64_t pages) {
    const std::int64_t slot = 4096 + (page_bytes + 4095) / 4096 * 4096;
    DiskStoreConfig config;
    config.directories = {{path, 4096 + pages * slot}};
    config.page_bytes = page_bytes;
    config.fingerprint = key_of(12345);
    config.threads = 3;
    config.segment_bytes = 4 * slot;
    return config;
}
