// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include "store/disk/disk_call.hpp"

namespace kvcore {

// Pages of before are known by their sequence numbers, also after a restart; their headers stay.
std::int64_t DiskStore::Impl::clear() {
    const Call call(*this);
    const std::lock_guard<std::mutex> alone(clearing_);
    std::int64_t cleared = 0;
    std::uint64_t floor = 0;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        floor = ++sequence_;
        floor_ = floor;
        cleared = index_.clear();
    }
    for (const auto& directory : directories_) save_floor(*directory, floor);
    return cleared;
}

void DiskStore::Impl::save_floor(SlotFiles& files, std::uint64_t floor) noexcept {
    if (is_refusing()) {
        ++counters_.refused;
        return;
    }
    const std::int64_t begin = seams_.clock();
    int error = 0;
    try {
        const Watch watch(*this, begin);
        error = files.raise_floor(floor);
    } catch (...) {
        error = ENOMEM;
    }
    const std::int64_t end = seams_.clock();
    if (error != 0) ++counters_.errors;
    if (error != 0 || is_slow(end - begin)) breaker_.failed(end);
}

}  // namespace kvcore
