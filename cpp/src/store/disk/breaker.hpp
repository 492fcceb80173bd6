// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>

#include "kvcore/disk_store.hpp"

namespace kvcore {

/// Tells whether a store that fails is worth another try: not for some time after so many failures
/// in a row, then with one try at a time until one succeeds.
///
/// Threads: any number. Cost: a mutex.
class Breaker {
   public:
    Breaker(std::int32_t failures, std::int64_t pause_ns) noexcept
        : most_(failures), pause_ns_(pause_ns) {}

    /// Whether to try now. Each yes is followed by one of `succeeded`, `failed`,
    /// `gave_up`.
    [[nodiscard]] bool admits(std::int64_t now) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (state_ == BreakerState::kClosed) return true;
        if (state_ == BreakerState::kHalfOpen || now < open_until_) return false;
        state_ = BreakerState::kHalfOpen;
        return true;
    }
    void succeeded() noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        state_ = BreakerState::kClosed;
        in_a_row_ = 0;
    }
    void failed(std::int64_t now) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (in_a_row_ < most_) ++in_a_row_;
        if (in_a_row_ < most_) return;
        state_ = BreakerState::kOpen;
        open_until_ = now + pause_ns_;
    }
    /// Nothing was tried after all.
    void gave_up() noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (state_ != BreakerState::kHalfOpen) return;
        state_ = BreakerState::kOpen;
    }
    /// Whether `admits` would say no.
    [[nodiscard]] bool is_refusing(std::int64_t now) const noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (state_ == BreakerState::kOpen) return now < open_until_;
        return state_ == BreakerState::kHalfOpen;
    }
    [[nodiscard]] BreakerState state() const noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        return state_;
    }

   private:
    mutable std::mutex mutex_;
    std::int32_t most_;
    std::int64_t pause_ns_;
    BreakerState state_ = BreakerState::kClosed;
    std::int32_t in_a_row_ = 0;
    std::int64_t open_until_ = 0;
};

}  // namespace kvcore
