// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

namespace kvcore {

/// The system's calls on files, which tests replace to make them fail.
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
    /// Sets space aside and makes the file that long; only the length where the file system cannot.
    /// 0 or errno.
    virtual int allocate(int fd, off_t bytes);
};

/// Sets space aside, whatever interrupts it. 0 or errno.
[[nodiscard]] int allocate_all(FileOps& ops, int fd, off_t bytes);

/// Reads or writes all of the parts, which are changed. 0, errno, or kEndOfFile.
constexpr int kEndOfFile = -1;
[[nodiscard]] int read_all(FileOps& ops, int fd, iovec* parts, int n, off_t offset);
[[nodiscard]] int write_all(FileOps& ops, int fd, iovec* parts, int n, off_t offset);

}  // namespace kvcore
