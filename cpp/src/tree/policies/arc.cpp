// SPDX-License-Identifier: Apache-2.0
#include "tree/policies/arc.hpp"

#include <algorithm>

namespace kvcore {

void ArcPolicy::make_room(NodeId last) {
    runs_.make_room(last, Run{});
    rings_.make_room(last);
    ghosts_.make_room(last);
}

void ArcPolicy::insert(NodeId node, std::int32_t, std::int32_t pages, std::int32_t) noexcept {
    runs_[node] = {0, pages, false, true};
    pages_[0] += pages;
}

void ArcPolicy::identify(NodeId node, std::uint64_t fingerprint) noexcept {
    Run& run = runs_[node];
    run.fingerprint = fingerprint;
    if (!run.is_new) return;
    run.is_new = false;
    const int list = ghosts_.take(fingerprint);
    if (list < 0) return;
    adapt(list == 1, run.pages);
    set_reused(run);
}

// The step is the number of pages that came back, times the ratio of the two ghost lists: a hit in
// the shorter list counts more.
void ArcPolicy::adapt(bool was_reused, std::int64_t pages) noexcept {
    const auto other = static_cast<std::int64_t>(ghosts_.size(!was_reused));
    const auto own = static_cast<std::int64_t>(ghosts_.size(was_reused)) + 1;  // + the entry taken
    const std::int64_t step = pages * std::max<std::int64_t>(1, other / own);
    share_ =
        std::clamp<std::int64_t>(share_ + (was_reused ? -step : step), 0, pages_[0] + pages_[1]);
}

void ArcPolicy::set_reused(Run& run) noexcept {
    if (run.is_reused) return;
    run.is_reused = true;
    pages_[0] -= run.pages;
    pages_[1] += run.pages;
}

void ArcPolicy::hit(NodeId node) noexcept {
    set_reused(runs_[node]);
    if (!rings_.contains(node)) return;
    rings_.erase(node);
    rings_.push_back(true, node);
}

void ArcPolicy::release(NodeId node, std::uint64_t) noexcept {
    rings_.erase(node);
    rings_.push_back(runs_[node].is_reused, node);
}

// `resize` sets the pages of `upper`.
void ArcPolicy::split(NodeId upper, NodeId lower) noexcept {
    runs_[upper] = runs_[lower];
    runs_[upper].pages = 0;
}

void ArcPolicy::resize(NodeId node, std::int32_t, std::int32_t pages) noexcept {
    Run& run = runs_[node];
    pages_[run.is_reused ? 1 : 0] += pages - run.pages;
    run.pages = pages;
}

void ArcPolicy::erase(NodeId node) noexcept {
    const Run& run = runs_[node];
    rings_.erase(node);
    pages_[run.is_reused ? 1 : 0] -= run.pages;
    ghosts_.add(run.is_reused, run.fingerprint);
}

bool ArcPolicy::takes_reused() const noexcept {
    if (rings_.front(false) == kNoNode) return true;
    return pages_[0] <= share_ && rings_.front(true) != kNoNode;
}

NodeId ArcPolicy::victim() noexcept { return rings_.front(takes_reused()); }

std::size_t ArcPolicy::upcoming(NodeId* out, std::size_t n) const noexcept {
    const bool first = takes_reused();
    const std::size_t found = rings_.first(first, out, n);
    return found + rings_.first(!first, out + found, n - found);
}

}  // namespace kvcore
