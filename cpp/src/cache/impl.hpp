// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>

#include "cache/cache_data.hpp"
#include "cache/claim.hpp"
#include "cache/commit.hpp"
#include "cache/fetch.hpp"
#include "cache/forget.hpp"
#include "cache/fork.hpp"
#include "cache/pin.hpp"
#include "cache/plan.hpp"
#include "cache/reserve.hpp"
#include "kvcore/cache_manager.hpp"
#include "observe/event_keys.hpp"

namespace kvcore {

/// The parts of a CacheManager: its state and its verbs. Only CacheManager sees more than one verb,
/// and it locks the mutex while it uses them.
struct CacheManager::Impl {
    Impl(const CacheConfig& config, const PolicyFactory& make_policy)
        : state(config, make_policy) {}

    std::mutex mutex;
    std::condition_variable finished;  // signals finished transfers
    CacheData state;
    Pins pins;
    Departures departures{state.copies};
    BatchRows rows{state};
    Admitter admitter{state, departures};
    Reserver reserver{state, departures};
    OrderedReserver ordered{state, rows, admitter, reserver};
    JointReserver joint{state, departures, admitter, reserver};
    Fetcher fetcher{state, rows, joint};
    Committer committer{state};
    Forker forker{state};
    Claims claims{state};
    Forgetter forgetter{state};
    std::mutex reading;  // for readers of events; locked before `mutex`
    std::unique_ptr<EventKeys> event_keys =
        state.events == nullptr
            ? nullptr
            : std::make_unique<EventKeys>(state.config, state.grouping, state.replicas);
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
