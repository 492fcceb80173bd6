// SPDX-License-Identifier: Apache-2.0
// The threads' side of what leaves the caches and is brought back: see cache_manager.cpp.
#include "observe/cache_copies.hpp"

#include <mutex>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "cache/cached_tree.hpp"
#include "cache/impl.hpp"

namespace kvcore {
namespace {

using Lock = std::lock_guard<std::mutex>;

template <class Held>
void end_locked(std::unique_ptr<Held>& held) noexcept {
    if (held == nullptr) return;
    const Lock lock(held->mutex);
    held.reset();
}

template <class Held, class Get>
auto& part_of(const std::unique_ptr<Held>& held, const Get& get) noexcept {
    static const std::decay_t<decltype(get(held->columns))> none;  // constant, and empty
    return held == nullptr ? none : get(held->columns);
}

}  // namespace

CachedTree CacheManager::cached_tree(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    return cached_tree::list(impl_->state, replica);
}

std::uint64_t CacheManager::num_resets() const {
    const Lock lock(impl_->mutex);
    return impl_->state.cache_copies.num_resets();
}

CacheExport CacheManager::export_columns(const ColumnSpan& span) {
    const Lock lock(impl_->mutex);
    ManagerState& state = impl_->state;
    const TreePosition at = cached_tree::find(state, span);
    if (at.node == nullptr) return {};
    state.cache_copies.make_room();
    return CacheExport(std::make_unique<CacheExport::Held>(
        impl_->mutex, state.cache_copies, state.replica_at(span.replica), at, span.first));
}

CacheImport CacheManager::import_columns(const ColumnSpan& span, const CachedColumn* columns) {
    const Lock lock(impl_->mutex);
    ManagerState& state = impl_->state;
    cached_tree::check_span(state, span);
    cached_tree::check_offer(state, span, columns);
    if (span.num_resets != state.cache_copies.num_resets()) {
        return {ImportStatus::kReset, nullptr};
    }
    state.cache_copies.make_room();
    auto held = std::make_unique<CacheImport::Held>(impl_->mutex, state.cache_copies,
                                                    state.replica_at(span.replica), span, columns);
    const ImportStatus status = held->columns.status();
    const bool holds = status == ImportStatus::kTaken || status == ImportStatus::kKnown;
    if (!holds) held.reset();
    return {status, std::move(held)};
}

bool CacheManager::publish(CacheImport& filled, bool more) {
    if (filled.held_ == nullptr) {
        throw std::invalid_argument(
            "the import holds nothing: it was published, or took nothing; publish each once");
    }
    const Lock lock(impl_->mutex);
    const bool is_wanted = filled.held_->columns.publish(impl_->state.holds, more);
    filled.held_.reset();
    return is_wanted;
}

CacheExport::CacheExport() noexcept = default;

CacheExport::CacheExport(std::unique_ptr<Held> held) noexcept : held_(std::move(held)) {}

CacheExport::CacheExport(CacheExport&& other) noexcept = default;

CacheExport& CacheExport::operator=(CacheExport&& other) noexcept {
    CacheExport moved(std::move(other));
    held_.swap(moved.held_);
    return *this;
}

CacheExport::~CacheExport() { end_locked(held_); }

const std::vector<CachedColumn>& CacheExport::columns() const noexcept {
    return part_of(held_, [](const ColumnExport& held) -> auto& { return held.columns(); });
}

const std::vector<BlockId>& CacheExport::pages() const noexcept {
    return part_of(held_, [](const ColumnExport& held) -> auto& { return held.pages(); });
}

CacheImport::CacheImport() noexcept = default;

CacheImport::CacheImport(ImportStatus status, std::unique_ptr<Held> held) noexcept
    : status_(status), held_(std::move(held)) {}

CacheImport::CacheImport(CacheImport&& other) noexcept = default;

CacheImport& CacheImport::operator=(CacheImport&& other) noexcept {
    CacheImport moved(std::move(other));
    held_.swap(moved.held_);
    status_ = moved.status_;
    return *this;
}

CacheImport::~CacheImport() { end_locked(held_); }

const std::vector<CachedColumn>& CacheImport::columns() const noexcept {
    return part_of(held_, [](const ColumnImport& held) -> auto& { return held.columns(); });
}

const std::vector<BlockId>& CacheImport::pages() const noexcept {
    return part_of(held_, [](const ColumnImport& held) -> auto& { return held.pages(); });
}

}  // namespace kvcore
