// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>

#include "kvcore/disk_store.hpp"

namespace kvcore {

/// Decides whether a failing store is tried again. After `failures` failures in a row it refuses
/// tries for some time; after that it admits one try at a time, until a try succeeds.
///
/// Threads: any number. Cost: a mutex.
class Breaker {
   public:
    Breaker(std::int32_t failures, std::int64_t pause_ns) noexcept
        : most_(failures), pause_ns_(pause_ns) {}

    /// Returns true if the store may be tried now. The caller then calls `succeeded`, `failed` or
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
    /// The caller tried nothing after `admits`.
    void gave_up() noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (state_ != BreakerState::kHalfOpen) return;
        state_ = BreakerState::kOpen;
    }
    /// Returns true if `admits` would return false.
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
