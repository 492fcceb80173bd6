// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>

#include "cache/cache_data.hpp"
#include "cache/held_hit.hpp"
#include "cache/pin.hpp"
#include "kvcore/cache_manager.hpp"
#include "observe/event_keys.hpp"

namespace kvcore {

/// The parts of a CacheManager: its data and the mutex that guards it.
struct CacheManager::Impl {
    Impl(const CacheConfig& config, const PolicyFactory& make_policy)
        : cache(config, make_policy) {}

    std::mutex mutex;
    std::condition_variable finished;  // signals finished transfers
    CacheData cache;
    Pins pins;
    std::mutex reading;  // for readers of events; locked before `mutex`
    std::unique_ptr<EventKeys> event_keys =
        cache.events == nullptr
            ? nullptr
            : std::make_unique<EventKeys>(cache.config, cache.grouping, cache.replicas);
};

/// A hit, and the mutex that guards its release.
struct PrefixHit::Held {
    Held(std::mutex& given, HeldHit&& found) noexcept : mutex(given), hit(std::move(found)) {}

    std::mutex& mutex;
    HeldHit hit;
};

/// An export or import that is registered with the manager, and the mutex that guards its end.
template <class Columns>
struct KnownCopy {
    template <class... Given>
    KnownCopy(std::mutex& guard, CacheCopies& all, Replica& home, const Given&... rest)
        : mutex(guard), known(all), columns(home, rest...) {
        known.add(columns);
    }
    KnownCopy(const KnownCopy&) = delete;
    KnownCopy& operator=(const KnownCopy&) = delete;
    ~KnownCopy() { known.remove(columns); }

    std::mutex& mutex;
    CacheCopies& known;
    Columns columns;
};
struct CacheExport::Held : KnownCopy<ColumnExport> {
    using KnownCopy::KnownCopy;
};
struct CacheImport::Held : KnownCopy<ColumnImport> {
    using KnownCopy::KnownCopy;
};

}  // namespace kvcore
