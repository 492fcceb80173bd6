// SPDX-License-Identifier: Apache-2.0
#include "request/priorities.hpp"

#include <algorithm>
#include <stdexcept>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

void check_priority(std::int32_t priority, std::int64_t duration) {
    if (priority < 0 || priority > 100) {
        throw std::invalid_argument(detail::concat("priority is ", priority, ", must be 0 .. 100"));
    }
    if (duration < 1) {
        throw std::invalid_argument(
            detail::concat("a priority lasts ", duration, " units of time, must be at least 1"));
    }
}

void check_request(const RequestPriority& priority) {
    check_priority(priority.priority, priority.duration);
    std::int64_t last = 0;
    for (const RetainedTokens& range : priority.ranges) {
        check_priority(range.priority, range.duration);
        if (range.start < last || range.end <= range.start) {
            throw std::invalid_argument(detail::concat(
                "retained tokens are ", range.start, " .. ", range.end,
                ", must be at least 1 token and start at ", last, " or later; sort the ranges"));
        }
        last = range.end;
    }
}

}  // namespace

void Priorities::set(SequenceHandle sequence, const RequestPriority& priority) {
    check_request(priority);
    auto own = std::make_unique<RequestPriority>(priority);
    if (sequence.index >= all_.size()) all_.resize(sequence.index + std::size_t{1});
    all_[sequence.index] = std::move(own);
}

void Priorities::forget(SequenceHandle sequence) noexcept {
    if (sequence.index < all_.size()) all_[sequence.index].reset();
}

Retention Priorities::lasting(std::int32_t priority, std::int64_t duration) const noexcept {
    const std::int64_t left = Retention::kForever - std::max<std::int64_t>(now_, 0);
    return {priority, duration < left ? now_ + duration : Retention::kForever};
}

Priorities::Segment Priorities::segment_of(const RequestPriority& priority,
                                           std::int32_t column) const noexcept {
    constexpr std::int64_t kLast = std::numeric_limits<std::int32_t>::max();
    const auto column_of = [&](std::int64_t token) {
        return static_cast<std::int32_t>(std::min(ceil_div(token, page_size_), kLast));
    };
    for (const RetainedTokens& range : priority.ranges) {
        const std::int32_t start = column_of(range.start);
        const std::int32_t end = column_of(range.end);
        if (column >= end || start == end) continue;
        if (column < start) return {start, lasting(priority.priority, priority.duration)};
        return {end, lasting(range.priority, range.duration)};
    }
    return {static_cast<std::int32_t>(kLast), lasting(priority.priority, priority.duration)};
}

void Priorities::retain(PrefixTree& tree, SequenceHandle sequence, TreePosition at,
                        std::int32_t first) const noexcept {
    while (first < at.depth) {
        const Segment kept = segment(sequence, first);
        tree.retain(at, first, std::min(kept.end, at.depth), kept.retention);
        first = kept.end;
    }
}

Owner quotas::owner_of(const CacheConfig& config, std::int32_t tenant) {
    const auto n = static_cast<std::int64_t>(config.quotas.size());
    if (tenant < RequestPriority::kNoTenant || tenant >= n) {
        throw std::invalid_argument(detail::concat("tenant is ", tenant, ", must be one of ", n,
                                                   " quotas, counted from 0, or kNoTenant"));
    }
    return static_cast<Owner>(tenant + 1);
}

}  // namespace kvcore
