// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "kvcore/disk_store.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/page_bytes.hpp"
#include "store/disk/file_ops.hpp"
#include "store/disk/slot_files.hpp"
#include "store/disk/slot_format.hpp"

namespace kvcore {
namespace {

using detail::concat;

/// A file opened for reading through the page cache.
class WholeFile {
   public:
    explicit WholeFile(const std::string& path)
        : file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (file_ >= 0) return;
        throw Error(concat(path, ": ", std::generic_category().message(errno),
                           "; run as the user of the store"));
    }
    WholeFile(const WholeFile&) = delete;
    WholeFile& operator=(const WholeFile&) = delete;
    ~WholeFile() { ::close(file_); }

    /// Returns 0, errno or kEndOfFile.
    [[nodiscard]] int read(std::byte* to, std::int64_t bytes, std::int64_t offset) {
        iovec part{to, static_cast<std::size_t>(bytes)};
        return read_all(ops_, file_, &part, 1, offset);
    }

   private:
    FileOps ops_;
    int file_;
};

StoreShape shape_of(const std::string& directory) {
    const std::string path = directory + "/" + kShapeName;
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) {
        throw std::invalid_argument(
            concat(directory, " is not a directory of a disk store: it has no file ", kShapeName));
    }
    const AlignedBuffer block(kDiskBlock);
    StoreShape shape;
    std::uint32_t version = 0;
    WholeFile file(path);
    if (file.read(block.data(), kDiskBlock, 0) == 0 &&
        read_shape(block.data(), shape, version) == HeaderState::kRight) {
        return shape;
    }
    throw std::invalid_argument(concat(directory, " is not a disk store of format ",
                                       kDiskFormatVersion, ": its file ", kShapeName,
                                       " is corrupt or of another format; give another directory"));
}

// Returns true if the bytes [payload_bytes] have the CRCs of the header.
bool is_right_payload(const SlotHeader& header, const std::byte* at) noexcept {
    return std::all_of(header.part.begin(), header.part.end(), [&](const SlotHeader::Part& part) {
        const std::byte* begin = std::exchange(at, at + part.bytes);
        return crc32c(begin, part.bytes) == part.crc;
    });
}

void count_page(DiskReport& report, const SlotHeader& header) {
    ++report.stored;
    report.payload_bytes += static_cast<std::int64_t>(header.payload_bytes);
    auto at = std::find(report.fingerprints.begin(), report.fingerprints.end(), header.fingerprint);
    if (at == report.fingerprints.end()) {
        report.fingerprints.push_back(header.fingerprint);
        report.page_counts.push_back(0);
        at = report.fingerprints.end() - 1;
    }
    ++report.page_counts[static_cast<std::size_t>(at - report.fingerprints.begin())];
}

void look_through(DiskReport& report, const std::string& directory, const std::string& name,
                  std::uint64_t floor, bool verify) {
    WholeFile file(directory + "/" + name);
    const auto bytes =
        static_cast<std::int64_t>(std::filesystem::file_size(directory + "/" + name));
    report.file_bytes += bytes;
    const AlignedBuffer slot(report.slot_bytes);
    for (std::int64_t i = 0; i < bytes / report.slot_bytes; ++i) {
        const std::int64_t wanted = verify ? report.slot_bytes : kHeaderBytes;
        SlotHeader header;
        ++report.slots;
        const bool is_read = file.read(slot.data(), wanted, i * report.slot_bytes) == 0;
        const HeaderState state =
            is_read ? read_header(slot.data(), report.slot_bytes, header) : HeaderState::kCorrupt;
        if (state == HeaderState::kEmpty) continue;
        if (state == HeaderState::kRight && header.sequence < floor) continue;
        const bool is_right = state == HeaderState::kRight &&
                              (!verify || is_right_payload(header, slot.data() + kHeaderBytes));
        if (is_right) {
            count_page(report, header);
        } else {
            ++report.corrupt;
            report.bad_slots.push_back(concat(name, ":", i));
        }
    }
}

}  // namespace

DiskReport inspect_disk_store(const std::string& directory, bool verify) {
    DiskReport report;
    report.slot_bytes = shape_of(directory).slot_bytes;
    report.owner = DirectoryLock::owner_of(directory);
    std::vector<DirectoryLock> locks;  // no store writes during the check
    if (verify) locks.emplace_back(directory);
    const std::uint64_t floor = shape_of(directory).floor;
    for (const std::string& name : segment_files(directory)) {
        look_through(report, directory, name, floor, verify);
    }
    return report;
}

std::int64_t purge_disk_store(const std::string& directory) {
    static_cast<void>(shape_of(directory));
    const DirectoryLock lock(directory);
    std::int64_t bytes = 0;
    std::vector<std::string> names = segment_files(directory);
    names.insert(names.end(), {kShapeName, kLockName});
    for (const std::string& name : names) {
        const std::string path = concat(directory, "/", name);
        std::error_code error;
        bytes += static_cast<std::int64_t>(std::filesystem::file_size(path, error));
        std::filesystem::remove(path, error);
        if (error) throw Error(concat(path, ": ", error.message(), "; remove it by hand"));
    }
    return bytes;
}

}  // namespace kvcore
