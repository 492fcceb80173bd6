// SPDX-License-Identifier: Apache-2.0
#include "pages/page_owners.hpp"

#include "kvcore/errors.hpp"

namespace kvcore {

HeldCounts::HeldCounts(const std::vector<TenantQuota>& quotas) : shares_(quotas.size() + 1) {
    for (std::size_t i = 0; i < quotas.size(); ++i) {
        shares_[i + 1].quota = quotas[i];
        num_reserved_ += quotas[i].reserved_pages;
    }
    unfilled_ = num_reserved_;
}

void PageOwners::hold(const BlockId* pages, std::int64_t n) noexcept {
    for (std::int64_t i = 0; i < n; ++i) {
        Owner& state = states_[static_cast<std::size_t>(pages[i])];
        if ((state & kHeld) != 0) continue;
        counts_.add(state, 1);
        state = static_cast<Owner>(state | kHeld);
    }
}

void PageOwners::let_go(const BlockId* pages, std::int64_t n) noexcept {
    for (std::int64_t i = 0; i < n; ++i) {
        Owner& state = states_[static_cast<std::size_t>(pages[i])];
        if ((state & kHeld) == 0) continue;
        state = static_cast<Owner>(state & ~kHeld);
        counts_.add(state, -1);
    }
}

void PageOwners::give(const BlockId* pages, std::int64_t n, Owner owner) noexcept {
    for (std::int64_t i = 0; i < n; ++i) {
        const bool held = is_held(pages[i]);
        let_go(pages + i, 1);
        states_[static_cast<std::size_t>(pages[i])] = owner;
        if (held) hold(pages + i, 1);
    }
}

void PageOwners::check_integrity() const {
    std::vector<std::int64_t> held(counts_.num_owners());
    for (const Owner state : states_) {
        if ((state & kHeld) != 0) ++held[static_cast<std::size_t>(state & ~kHeld)];
    }
    for (std::size_t owner = 0; owner < held.size(); ++owner) {
        detail::require_law(counts_.held(static_cast<Owner>(owner)) == held[owner],
                            "tenants: held pages are counted");
    }
}

}  // namespace kvcore
