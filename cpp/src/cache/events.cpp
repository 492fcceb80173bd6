// SPDX-License-Identifier: Apache-2.0
// The threads' side of the manager, for who listens to its caches.
#include <stdexcept>

#include "cache/impl.hpp"
#include "kvcore/cache_manager.hpp"

namespace kvcore {
namespace {

using EventLock = std::lock_guard<std::mutex>;

}  // namespace

// Keys are made while others use the manager. One reader at a time: each goes on from the keys that
// the one before it has made.
std::vector<CacheEvent> CacheManager::take_events() {
    if (impl_->event_keys == nullptr) {
        throw std::invalid_argument(
            "this manager has no events; give event_pages, or events=True in Python, when it is "
            "made");
    }
    EventLog& log = *impl_->state.events;
    const EventLock reading(impl_->reading);
    const auto end_read = [&](bool done) {
        const EventLock lock(impl_->mutex);
        log.end_read(done);
    };
    const PageNews* news = nullptr;
    {
        const EventLock lock(impl_->mutex);
        news = &log.begin_read();
    }
    std::vector<CacheEvent> events;
    try {
        events = impl_->event_keys->read(*news);
    } catch (...) {
        end_read(false);
        throw;
    }
    end_read(true);
    return events;
}

void CacheManager::note_written(std::int32_t replica, const PageKey* keys, std::int64_t n,
                                std::uint64_t num_resets) {
    const EventLock lock(impl_->mutex);
    ManagerState& state = impl_->state;
    static_cast<void>(state.replica_at(replica));
    if (state.events == nullptr || n == 0) return;
    if (num_resets == state.cache_copies.num_resets()) state.events->written(replica, keys, n);
}

}  // namespace kvcore
