// SPDX-License-Identifier: Apache-2.0
#include "store/disk/slot_files.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "kvcore/errors.hpp"

#if !defined(O_DIRECT)
#define O_DIRECT 0
#endif

namespace kvcore {
namespace {

using detail::concat;

constexpr std::int64_t kShapeBytes = kDiskBlock;

[[noreturn]] void refuse(const std::string& directory, int error) {
    throw Error(concat("directory ", directory, " of the disk store: ",
                       std::generic_category().message(error), "; give a writable directory"));
}

std::string lock_path(const std::string& directory) { return directory + "/" + kLockName; }

// The process id in a lock file, or -1 without a valid id.
std::int64_t written_owner(int file) noexcept {
    std::array<char, 24> text{};
    if (::pread(file, text.data(), text.size() - 1, 0) <= 0) return -1;
    const long long owner = std::strtoll(text.data(), nullptr, 10);
    return owner > 0 ? owner : -1;
}

// Returns true if `path` still names the open file.
bool is_file_at(int file, const std::string& path) noexcept {
    struct stat opened{};
    struct stat named{};
    return ::fstat(file, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
           opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

// Returns the locked file, or -1 if another store holds the lock; `owner` is its process.
int try_lock(const std::string& directory, std::int64_t& owner) {
    const std::string path = lock_path(directory);
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (file < 0) refuse(directory, errno);
    if (::flock(file, LOCK_EX | LOCK_NB) == 0) {
        if (is_file_at(file, path)) return file;
        owner = -1;  // removed by a purge meanwhile
    } else {
        owner = written_owner(file);
    }
    ::close(file);
    return -1;
}

// Creates the directory if it is missing, and returns its path.
const std::string& made(const std::string& directory) {
    try {
        std::filesystem::create_directories(directory);
    } catch (const std::filesystem::filesystem_error& error) {
        refuse(directory, error.code().value());
    }
    return directory;
}

}  // namespace

// Does not use the iterator of std::filesystem, which ends the program when memory runs out.
std::vector<std::string> segment_files(const std::string& directory) {
    struct Close {
        void operator()(DIR* open) const noexcept { ::closedir(open); }
    };
    const std::unique_ptr<DIR, Close> open(::opendir(directory.c_str()));
    if (open == nullptr) refuse(directory, errno);
    std::vector<std::string> names;
    while (const dirent* entry = ::readdir(open.get())) {
        std::string name = entry->d_name;
        if (segment_number(name) >= 0) names.push_back(std::move(name));
    }
    std::sort(names.begin(), names.end());
    return names;
}

DirectoryLock::DirectoryLock(const std::string& directory) {
    const std::string text = concat(static_cast<std::int64_t>(::getpid()), "\n");
    constexpr int kTries = 5;  // `owner_of` also takes the lock for a moment
    std::int64_t owner = -1;
    file_ = try_lock(directory, owner);
    for (int i = 1; i < kTries && file_ < 0; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(i));
        file_ = try_lock(directory, owner);
    }
    if (file_ < 0) {
        throw Error(concat("directory ", directory, " is in use by ",
                           owner > 0 ? concat("process ", owner) : std::string("another store"),
                           "; close that store first, or give each store its own directory"));
    }
    const bool is_told =
        ::ftruncate(file_, 0) == 0 && ::pwrite(file_, text.data(), text.size(), 0) > 0;
    static_cast<void>(is_told);  // the text is for people: the lock holds without it
}

DirectoryLock::DirectoryLock(DirectoryLock&& other) noexcept
    : file_(std::exchange(other.file_, -1)) {}

void DirectoryLock::release() noexcept {
    if (file_ < 0) return;
    ::flock(file_, LOCK_UN);
    ::close(std::exchange(file_, -1));
}

std::int64_t DirectoryLock::owner_of(const std::string& directory) {
    const int file = ::open(lock_path(directory).c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const bool is_free = ::flock(file, LOCK_SH | LOCK_NB) == 0;
    const std::int64_t owner = is_free ? 0 : written_owner(file);
    ::close(file);
    return owner;
}

SlotFiles::SlotFiles(FileOps& ops, DiskDirectory directory, std::int64_t slot_bytes,
                     std::int64_t segment_bytes, bool direct)
    : ops_(ops), directory_(std::move(directory)), lock_(made(directory_.path)), direct_(direct) {
    shape_.slot_bytes = slot_bytes;
    shape_.segment_slots = std::max<std::int64_t>(1, segment_bytes / slot_bytes);
    capacity_ = (directory_.quota_bytes - kShapeBytes) / slot_bytes;
    if (!load_shape(slot_bytes)) {
        remove_segments(0);
        save_shape();
    }
    const std::int64_t segments = segments_of(capacity_);
    files_.reserve(static_cast<std::size_t>(segments));
    remove_segments(segments);
    try {
        open_segments();
    } catch (...) {
        close();
        throw;
    }
}

std::int64_t SlotFiles::segments_of(std::int64_t slots) const noexcept {
    return (slots + shape_.segment_slots - 1) / shape_.segment_slots;
}

// Reads or writes the shape file. Returns 0, errno or kEndOfFile.
int SlotFiles::move_shape(std::byte* block, bool is_write) {
    const int flags = is_write ? O_RDWR | O_CREAT : O_RDONLY;
    const int file = open_file(kShapeName, flags);
    if (file < 0) return errno;
    iovec part{block, static_cast<std::size_t>(kShapeBytes)};
    const int error =
        is_write ? write_all(ops_, file, &part, 1, 0) : read_all(ops_, file, &part, 1, 0);
    ::close(file);
    if (error != EINVAL || !direct_) return error;
    direct_ = false;  // some file systems refuse the read, not the open
    return move_shape(block, is_write);
}

// Returns true if the directory has a usable shape.
bool SlotFiles::load_shape(std::int64_t slot_bytes) {
    const AlignedBuffer block(kShapeBytes);
    const int error = move_shape(block.data(), false);
    if (error == ENOENT) return false;
    if (error > 0) refuse(path(), error);
    StoreShape found;
    std::uint32_t version = kDiskFormatVersion;
    const HeaderState state =
        error == 0 ? read_shape(block.data(), found, version) : HeaderState::kCorrupt;
    if (version != kDiskFormatVersion) {
        throw Error(concat("directory ", path(), " holds a disk store of format ", version,
                           ", this kvcore reads format ", kDiskFormatVersion,
                           "; purge it, or give another directory"));
    }
    was_reset_ = state != HeaderState::kRight;
    if (was_reset_) return false;
    if (found.slot_bytes != slot_bytes) {
        throw Error(concat("directory ", path(), " holds slots of ", found.slot_bytes,
                           " bytes, this store needs ", slot_bytes,
                           "; purge it with `kvcore tier purge`, or give another directory"));
    }
    shape_ = found;
    return true;
}

int SlotFiles::write_shape_file(const StoreShape& shape) {
    const AlignedBuffer block(kShapeBytes);
    write_shape(shape, block.data());
    return move_shape(block.data(), true);
}

int SlotFiles::raise_floor(std::uint64_t floor) {
    StoreShape raised = shape_;
    raised.floor = floor;
    const int error = write_shape_file(raised);
    if (error == 0) shape_.floor = floor;
    return error;
}

void SlotFiles::save_shape() {
    const int error = write_shape_file(shape_);
    if (error != 0) refuse(path(), error > 0 ? error : EIO);
}

// Removes files beyond the quota, or with slots of unknown size.
void SlotFiles::remove_segments(std::int64_t from) const {
    for (const std::string& name : segment_files(path())) {
        if (segment_number(name) >= from) ::unlink((path() + "/" + name).c_str());
    }
}

// Throws Error for an existing file that cannot be opened: otherwise its pages would be overwritten
// later.
void SlotFiles::open_segments() {
    while (num_slots_ < capacity_) {
        const std::int64_t files = num_files();
        const std::string whole = path() + "/" + segment_name(files);
        if (::access(whole.c_str(), F_OK) != 0) {
            if (errno != ENOENT) refuse(path(), errno);
            return;
        }
        const int error = grow();
        if (error != 0 && error != ENOSPC && error != EDQUOT) refuse(path(), error);
        if (num_files() == files) return;
    }
}

// Opens a file past the page cache. If the file system refuses, this file and all later files are
// opened with the page cache.
int SlotFiles::open_file(const std::string& name, int flags) {
    const std::string whole = path() + "/" + name;
    if (direct_) {
        const int file = ops_.open(whole.c_str(), flags | O_DIRECT);
        if (file >= 0 || errno != EINVAL) return file;
        direct_ = false;
    }
    return ops_.open(whole.c_str(), flags);
}

std::int64_t SlotFiles::slots_in(std::int64_t segment) const noexcept {
    return std::min(shape_.segment_slots, capacity_ - segment * shape_.segment_slots);
}

// Extends a file from `there` to at most `most` slots, as far as the disk has space. Returns the
// new number of slots.
std::int64_t SlotFiles::fit(int file, std::int64_t there, std::int64_t most, int& error) {
    for (std::int64_t more = most - there; more > 0; more /= 2) {
        error = allocate_all(ops_, file, (there + more) * shape_.slot_bytes);
        if (error == 0) return there + more;
        if (error != ENOSPC && error != EDQUOT) break;
    }
    return there;
}

int SlotFiles::grow() {
    if (num_slots_ >= capacity_) return ENOSPC;
    return num_slots_ < num_files() * shape_.segment_slots ? extend_file() : add_file();
}

int SlotFiles::extend_file() {
    const std::int64_t last = num_files() - 1;
    const std::int64_t there = num_slots_ - last * shape_.segment_slots;
    int error = 0;
    const std::int64_t slots = fit(files_.back(), there, slots_in(last), error);
    num_slots_ += slots - there;
    return slots > there ? 0 : error;
}

int SlotFiles::add_file() {
    const std::string name = segment_name(num_files());
    const int file = open_file(name, O_RDWR | O_CREAT);
    if (file < 0) return errno;
    struct stat now{};
    const bool is_new = ::fstat(file, &now) != 0 || now.st_size == 0;
    const std::int64_t most = slots_in(num_files());
    int error = 0;
    const std::int64_t slots =
        fit(file, std::min<std::int64_t>(most, now.st_size / shape_.slot_bytes), most, error);
    if (slots == 0) {
        ::close(file);
        if (is_new) ::unlink((path() + "/" + name).c_str());
        return error > 0 ? error : EIO;
    }
    // The quota may have been larger before.
    if (slots == most && now.st_size > slots * shape_.slot_bytes &&
        ::ftruncate(file, slots * shape_.slot_bytes) != 0) {
        ::close(file);
        return errno;
    }
    files_.push_back(file);
    num_slots_ += slots;
    return 0;
}

int SlotFiles::read(std::int64_t slot, iovec* parts, int n) const {
    return read_all(ops_, file_of(slot), parts, n, offset_of(slot));
}

int SlotFiles::write(std::int64_t slot, iovec* parts, int n) const {
    return write_all(ops_, file_of(slot), parts, n, offset_of(slot));
}

void SlotFiles::close() noexcept {
    for (const int file : files_) ::close(file);
    files_.clear();
    lock_.release();
}

}  // namespace kvcore
