// SPDX-License-Identifier: Apache-2.0
#include "store/disk/file_ops.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

namespace kvcore {
namespace {

constexpr mode_t kPrivate = S_IRUSR | S_IWUSR;  // the content of prompts is private

// Skips the transferred bytes.
void skip(iovec*& parts, int& n, std::size_t bytes) noexcept {
    while (n > 0 && bytes >= parts->iov_len) {
        bytes -= parts->iov_len;
        ++parts;
        --n;
    }
    if (n == 0) return;
    parts->iov_base = static_cast<std::byte*>(parts->iov_base) + bytes;
    parts->iov_len -= bytes;
}

template <class Transfer>
int transfer_all(const Transfer& transfer, iovec* parts, int n, off_t offset) {
    skip(parts, n, 0);
    while (n > 0) {
        const ssize_t moved = transfer(parts, n, offset);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return errno;
        if (moved == 0) return kEndOfFile;
        skip(parts, n, static_cast<std::size_t>(moved));
        offset += moved;
    }
    return 0;
}

}  // namespace

int FileOps::open(const char* path, int flags) { return ::open(path, flags | O_CLOEXEC, kPrivate); }

ssize_t FileOps::read(int fd, const iovec* parts, int n, off_t offset) {
    return ::preadv(fd, parts, n, offset);
}

ssize_t FileOps::write(int fd, const iovec* parts, int n, off_t offset) {
    return ::pwritev(fd, parts, n, offset);
}

int FileOps::allocate(int fd, off_t bytes) {
#if defined(__linux__)
    if (::fallocate(fd, 0, 0, bytes) == 0) return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
#endif
    struct stat now{};
    if (::fstat(fd, &now) != 0) return errno;
    return ::ftruncate(fd, std::max(bytes, now.st_size)) == 0 ? 0 : errno;
}

int allocate_all(FileOps& ops, int fd, off_t bytes) {
    int error = EINTR;
    while (error == EINTR) error = ops.allocate(fd, bytes);
    return error;
}

int read_all(FileOps& ops, int fd, iovec* parts, int n, off_t offset) {
    return transfer_all([&](iovec* p, int k, off_t at) { return ops.read(fd, p, k, at); }, parts, n,
                        offset);
}

int write_all(FileOps& ops, int fd, iovec* parts, int n, off_t offset) {
    return transfer_all([&](iovec* p, int k, off_t at) { return ops.write(fd, p, k, at); }, parts,
                        n, offset);
}

}  // namespace kvcore
