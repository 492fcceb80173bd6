// SPDX-License-Identifier: Apache-2.0
// Copies runs of bytes between any addresses, as fast as memory allows.
//
// Copies of scattered rows are slower than one long memcpy because the processor waits: it
// prefetches within a run, but not past its end, and it reads each line of the destination before
// it overwrites the line. So a copier looks some kilobytes ahead in the order of its runs,
// prefetches their sources while it copies, and writes whole lines past the caches.
// `bench/data_path.py` and `bench/transfer.py` compare it with memcpy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvcore {

constexpr std::int64_t kLineBytes = 64;

/// From this number of bytes in one call, the caches of a core would not keep the written bytes.
constexpr std::int64_t kStreamedBytes = 4 << 20;

inline std::int64_t offset_in_line(const std::byte* at) noexcept {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at) %
                                     static_cast<std::uintptr_t>(kLineBytes));
}

/// Returns the number of bytes from an address to the next start of a line; 0 at a start of a line.
inline std::int64_t bytes_to_line(const std::byte* at) noexcept {
    return (kLineBytes - offset_in_line(at)) % kLineBytes;
}

/// Copies 64 bytes to an aligned line, and does not bring the line into the caches.
inline void stream_line(std::byte* to, const std::byte* from) noexcept {
#if defined(__SSE2__)
    const auto* words = reinterpret_cast<const __m128i*>(from);
    auto* line = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(words);
    const __m128i b = _mm_loadu_si128(words + 1);
    const __m128i c = _mm_loadu_si128(words + 2);
    const __m128i d = _mm_loadu_si128(words + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
#else
    std::memcpy(to, from, static_cast<std::size_t>(kLineBytes));
#endif
}

/// Makes streamed lines visible to other threads before all later writes.
inline void finish_streams() noexcept {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/// Copies runs in the given order. Some runs are copied late, the last runs in the destructor. No
/// two runs may share a byte, and the bytes of all sources must not change before the destructor
/// returns. For one thread.
class RunCopier {
   public:
    /// `call_bytes`: bytes that the whole call moves, at least the bytes of this copier.
    explicit RunCopier(std::int64_t call_bytes) noexcept : streams_(call_bytes >= kStreamedBytes) {}
    RunCopier(const RunCopier&) = delete;
    RunCopier& operator=(const RunCopier&) = delete;
    ~RunCopier() {
        while (count_ > 0) copy_oldest(nullptr, 0);
        if (!streams_) return;
        write_line();
        finish_streams();
    }

    void copy(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept {
        if (!streams_ || bytes < kLeastStreamed) {
            std::memcpy(to, from, static_cast<std::size_t>(bytes));
            return;
        }
        for (std::int64_t done = 0; done < bytes; done += kPiece) {
            add({to + done, from + done, std::min(bytes - done, kPiece)});
        }
    }

   private:
    struct Piece {
        std::byte* to;
        const std::byte* from;
        std::int64_t bytes;
    };
    static constexpr std::int64_t kPiece = 2048;
    static constexpr std::int64_t kAhead = 4096;         // bytes
    static constexpr std::int64_t kLeastStreamed = 128;  // shorter runs may have no whole line
    static constexpr unsigned kCapacity = 8;

    void add(const Piece& piece) noexcept {
        const std::byte* from = piece.from;
        std::int64_t unfetched = piece.bytes;
        while (count_ == kCapacity || (count_ > 0 && waiting_ + piece.bytes > kAhead)) {
            copy_oldest(from, unfetched);
            unfetched = 0;
        }
        for (std::int64_t at = 0; at < unfetched; at += kLineBytes) fetch(from + at);
        pieces_[(first_ + count_++) % kCapacity] = piece;
        waiting_ += piece.bytes;
    }

    // Copies the oldest piece, and meanwhile prefetches the lines of a later source.
    void copy_oldest(const std::byte* next, std::int64_t next_bytes) noexcept {
        const Piece piece = pieces_[first_];
        first_ = (first_ + 1) % kCapacity;
        --count_;
        waiting_ -= piece.bytes;
        std::int64_t at = std::min(bytes_to_line(piece.to), piece.bytes);
        if (at > 0) add_to_line(piece.to, piece.from, at);
        std::int64_t fetched = 0;
        for (; at + kLineBytes <= piece.bytes; at += kLineBytes) {
            if (fetched < next_bytes) {
                fetch(next + fetched);
                fetched += kLineBytes;
            }
            stream_line(piece.to + at, piece.from + at);
        }
        if (at < piece.bytes) add_to_line(piece.to + at, piece.from + at, piece.bytes - at);
        for (; fetched < next_bytes; fetched += kLineBytes) fetch(next + fetched);
    }

    // Keeps a part of a line until the next run has added the missing bytes: if a line is written
    // in parts, the processor reads it first.
    void add_to_line(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept {
        if (to != line_end_) {
            write_line();
            line_begin_ = line_end_ = to;
        }
        std::memcpy(line_ + offset_in_line(to), from, static_cast<std::size_t>(bytes));
        line_end_ += bytes;
        if (offset_in_line(line_end_) == 0) write_line();
    }

    void write_line() noexcept {
        const std::int64_t bytes = line_end_ - line_begin_;
        if (bytes == kLineBytes) {
            stream_line(line_begin_, line_);
        } else if (bytes > 0) {
            std::memcpy(line_begin_, line_ + offset_in_line(line_begin_),
                        static_cast<std::size_t>(bytes));
        }
        line_begin_ = line_end_ = nullptr;
    }

    // Prefetches into the second level: the first level has few places for lines in flight.
    static void fetch(const std::byte* line) noexcept { __builtin_prefetch(line, 0, 2); }

    Piece pieces_[kCapacity];
    unsigned first_ = 0;
    unsigned count_ = 0;
    std::int64_t waiting_ = 0;  // bytes of the waiting pieces
    bool streams_;
    std::byte* line_begin_ = nullptr;  // destination of the kept part of a line
    std::byte* line_end_ = nullptr;
    std::byte line_[kLineBytes];
};

/// Fills runs with a byte. For one thread.
class RunFiller {
   public:
    /// `call_bytes`: bytes that the whole call fills, at least the bytes of this filler.
    RunFiller(std::byte value, std::int64_t call_bytes) noexcept
        : streams_(call_bytes >= kStreamedBytes), value_(static_cast<int>(value)) {
        std::memset(line_, value_, sizeof line_);
    }
    RunFiller(const RunFiller&) = delete;
    RunFiller& operator=(const RunFiller&) = delete;
    ~RunFiller() {
        if (streams_) finish_streams();
    }

    void fill(std::byte* to, std::int64_t bytes) const noexcept {
        if (!streams_) return fill_here(to, bytes);
        std::int64_t at = std::min(bytes_to_line(to), bytes);
        fill_here(to, at);
        for (; at + kLineBytes <= bytes; at += kLineBytes) stream_line(to + at, line_);
        fill_here(to + at, bytes - at);
    }

   private:
    void fill_here(std::byte* to, std::int64_t bytes) const noexcept {
        std::memset(to, value_, static_cast<std::size_t>(bytes));
    }

    bool streams_;
    int value_;
    std::byte line_[kLineBytes];
};

}  // namespace kvcore
