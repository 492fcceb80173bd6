// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

namespace kvcore {

/// The system calls on files; tests replace them with calls that fail.
///
/// Threads: any number.
class FileOps {
   public:
    FileOps() = default;
    FileOps(const FileOps&) = delete;
    FileOps& operator=(const FileOps&) = delete;
    virtual ~FileOps() = default;

    virtual int open(const char* path, int flags);
    virtual ssize_t read(int fd, const iovec* parts, int n, off_t offset);
    virtual ssize_t write(int fd, const iovec* parts, int n, off_t offset);
    /// Allocates space and makes the file at least `bytes` long; only extends the file if the file
    /// system cannot allocate. Returns 0 or errno.
    virtual int allocate(int fd, off_t bytes);
};

/// Allocates space, and repeats the call after interrupts. Returns 0 or errno.
[[nodiscard]] int allocate_all(FileOps& ops, int fd, off_t bytes);

/// Reads or writes all parts, and changes the array `parts`. Returns 0, errno or kEndOfFile.
constexpr int kEndOfFile = -1;
[[nodiscard]] int read_all(FileOps& ops, int fd, iovec* parts, int n, off_t offset);
[[nodiscard]] int write_all(FileOps& ops, int fd, iovec* parts, int n, off_t offset);

}  // namespace kvcore
