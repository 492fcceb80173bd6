// SPDX-License-Identifier: Apache-2.0
#include "data/present_ahead.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>

namespace kvcore {
namespace {

// Bytes of a step: enough to make the cost of its system call negligible, few for a thread that
// waits.
constexpr std::size_t kPiece = std::size_t{8} << 20;

// The pause between two steps while enough memory is present: clearing memory takes bandwidth from
// threads that write.
constexpr std::chrono::milliseconds kPause{30};

// Keeps the contents of the memory; other threads may write to it meanwhile.
bool make_present(std::byte* memory, std::size_t bytes) noexcept {
#if defined(MADV_POPULATE_WRITE)
    return madvise(memory, bytes, MADV_POPULATE_WRITE) == 0;
#else
    static_cast<void>(memory);
    static_cast<void>(bytes);
    return false;
#endif
}

}  // namespace

PresentAhead::PresentAhead(std::byte* memory, std::size_t bytes, std::size_t ahead) noexcept
    : memory_(memory), bytes_(bytes), ahead_(ahead), process_(::getpid()) {
    if (bytes <= kPiece) {  // not worth a thread
        present_ = bytes;
        return;
    }
    while (is_behind()) advance();
    if (present_ == bytes_) return;
    try {
        thread_ = std::thread([this] { work(); });
    } catch (const std::system_error&) {
        present_ = bytes;
    }
}

PresentAhead::~PresentAhead() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    thread_.join();
}

bool PresentAhead::is_forked() const noexcept { return ::getpid() != process_; }

bool PresentAhead::is_behind() const noexcept {
    return present_ < std::min(bytes_, used_ + ahead_);
}

// A use far past the present memory is ignored: the memory in between may never be needed.
void PresentAhead::use(std::size_t end) noexcept {
    if (end > present_ + ahead_) return;
    std::size_t before = used_;
    while (before < end && !used_.compare_exchange_weak(before, end)) {
    }
    if (before >= end || present_ == bytes_ || is_forked()) return;
    while (present_ < end) advance();
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
}

void PresentAhead::advance() noexcept {
    const std::lock_guard<std::mutex> lock(clearing_);
    if (!is_behind()) return;
    const std::size_t begin = present_;
    const std::size_t bytes = std::min(kPiece, bytes_ - begin);
    // If the system refuses once, it would refuse again.
    present_ = make_present(memory_ + begin, bytes) ? begin + bytes : bytes_;
}

void PresentAhead::work() noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return stopping_ || is_behind(); });
        if (stopping_) return;
        lock.unlock();
        advance();
        lock.lock();
        const bool has_enough = present_ >= std::min(bytes_, used_ + ahead_ / 2);
        if (has_enough) changed_.wait_for(lock, kPause, [this] { return stopping_; });
    }
}

}  // namespace kvcore
