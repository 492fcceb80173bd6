// SPDX-License-Identifier: Apache-2.0
// The exceptions of the control path. An expected failure (a full pool) is a returned value;
// exceptions are for wrong calls. A call that throws has changed nothing. Bad argument values are
// std::invalid_argument, a broken internal law (see check_integrity) is IntegrityError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvcore {

/// Base of every error that is kvcore's own.
class Error : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

/// A call needs more pages than are free, and cannot report this by its return value.
class InsufficientBlocksError : public Error {
   public:
    using Error::Error;
};

/// The handle names no claimed sequence.
class RequestNotFoundError : public Error {
   public:
    using Error::Error;
};

/// Replica full, sequence longer than the limit, or request larger than the whole pool.
class CapacityError : public Error {
   public:
    using Error::Error;
};

/// Double free, double unpin, stale handle.
class InvalidHandleError : public Error {
   public:
    using Error::Error;
};

/// Transfers into the sequence's pages are owed or under way: see CacheManager::take_owed and wait.
class PendingTransfersError : public Error {
   public:
    using Error::Error;
};

/// A conservation law does not hold: a bug in kvcore or in an eviction policy, or memory
/// overwritten from outside. A call that throws it has changed nothing, but cached pages may be
/// evicted.
class IntegrityError : public std::logic_error {
   public:
    using std::logic_error::logic_error;
};

/// The row of a batch that an error is about. Errors of batch calls have this class as a second
/// base.
class BatchRow {
   public:
    explicit BatchRow(std::int64_t row) noexcept : row_(row) {}
    BatchRow(const BatchRow&) = default;
    BatchRow& operator=(const BatchRow&) = default;
    virtual ~BatchRow() = default;
    /// The row, from 0 over the whole batch.
    [[nodiscard]] std::int64_t row() const noexcept { return row_; }

   private:
    std::int64_t row_;
};

/// `Base` about one row of a batch.
template <class Base>
class InRow : public Base, public BatchRow {
   public:
    InRow(std::int64_t row, const std::string& text) : Base(text), BatchRow(row) {}
};

namespace detail {

/// Builds error texts: `concat("page ", id, " of ", n)`.
inline void append_to(std::string& out, const std::string& part) { out += part; }
inline void append_to(std::string& out, const char* part) { out += part; }
template <class Number>
void append_to(std::string& out, Number part) {
    out += std::to_string(part);
}
template <class... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
    std::string out;
    (append_to(out, parts), ...);
    return out;
}

/// Throws IntegrityError naming the law unless it holds.
inline void require_law(bool holds, const char* law) {
    if (!holds) throw IntegrityError(law);
}

}  // namespace detail
}  // namespace kvcore
