// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <stdexcept>

#include "cache/cache_data.hpp"
#include "layers/residency.hpp"
#include "level/quotas.hpp"

namespace kvcore {

/// A hit that was found and will be allocated later; its pages are pinned. Its run is cut when the
/// hit is allocated, and with quotas when it is found.
///
/// Owns: at most one pin each on the run where its pages end, on the page to copy from, and in the
/// host tier; with groups, holds on the pages that windows read on the device and in the host tier;
/// with states, a hold on the checkpoint where it ends. Invariant: holds on windows and states end
/// before the pins that keep their runs. The members end in reverse order, so a hit is destroyed or
/// moved from, but never assigned. Threads: not thread-safe; CacheManager locks around it. Cost:
/// O(1), with groups O(columns that windows read).
class HeldHit {
   public:
    /// Throws std::bad_alloc, only with groups or quotas.
    HeldHit(const CacheData& cache, const FoundHit& found, const Sequence& sequence,
            const RequestView& request)
        : found_(found), claimed_(standing(sequence, request)) {
        Replica& home = cache.home_of(sequence);
        quotas::shorten(home, found_, sequence.hit_tokens);
        if (found_.shares()) {
            windows_ = WindowHold(home, found_.match.at, found_.tokens);
            if (!found_.ends_below()) checkpoint_ = home.hold_state(found_.match.at);
            if (found_.is_partial()) {
                const std::int32_t column = found_.match.at.depth;
                source_ = WindowHold(home, found_.match.partial, found_.tokens, column);
            }
        }
        if (found_.below.node != nullptr) {
            records_ = WindowHold(*home.host, found_.below, found_.tokens);
        }
        if (!checkpoint_) checkpoint_ = home.hold_stored_state(found_.below);
        hold(home);
    }
    HeldHit(HeldHit&&) noexcept = default;
    HeldHit& operator=(HeldHit&&) = delete;
    ~HeldHit() = default;  // pins end last

    [[nodiscard]] const FoundHit& found() const noexcept { return found_; }
    /// Throws std::invalid_argument if the request or its claim has changed since the match.
    void require_unmoved(const Sequence& sequence, const RequestView& request) const {
        if (claimed_ == standing(sequence, request)) return;
        throw std::invalid_argument(
            "the request was reserved, fetched or changed since it was matched; match it again");
    }

    /// Throws std::invalid_argument if pages of the hit were forgotten since the match.
    void require_cached() const {
        for (const TreePosition& at : {found_.match.at, found_.match.partial, found_.below}) {
            if (at.node == nullptr) continue;
            if (!PrefixTree::is_forgotten(PrefixTree::position(at.node, at.depth).node)) continue;
            throw std::invalid_argument(
                "pages of the hit were forgotten since the request was matched; match it again");
        }
    }

    /// Nothing may be evicted between `let_go` and `hold`. Without its own pins, a hit does not
    /// block its allocation.
    void hold(Replica& home) noexcept {
        if (!found_.is_taken()) return;
        const auto pin = [](PrefixTree& tree, const TreePosition& at) {
            return at.node == nullptr ? TreePin() : TreePin(tree, at.node);
        };
        windows_.enter();
        source_.enter();
        records_.enter();
        checkpoint_.enter();
        place_ = pin(home.tree, found_.match.at);
        partial_ = pin(home.tree, found_.match.partial);
        if (found_.below.node != nullptr) below_ = pin(home.host->tree, found_.below);
    }
    /// Cuts the runs at the end of the hit, so that a later `hold` needs no page after the hit:
    /// with write-back, those pages may be evicted while the hit is not held. Throws
    /// std::bad_alloc.
    void cut(Replica& home) {
        if (found_.shares()) {
            found_.match.at.node = home.tree.split(found_.match.at);
            windows_.move_to(found_.match.at);
        }
        if (found_.below.node == nullptr) return;
        found_.below.node = home.host->tree.split(found_.below);
        records_.move_to(found_.below);
    }
    /// The hit was released and its pages may be evicted: it cannot be allocated any more.
    void give_up() noexcept {
        place_.reset();
        found_ = {};
        claimed_ = {};
    }
    void let_go() noexcept {
        settle(found_.match.at);
        settle(found_.match.partial);
        settle(found_.below);
        checkpoint_.leave();
        records_.leave();
        source_.leave();
        windows_.leave();
        below_.reset();
        partial_.reset();
        if (found_.match.at.depth > 0) place_.reset();  // keeps a namespace without pages
    }

   private:
    /// The values that a hit depends on.
    struct Standing {
        SequenceHandle sequence;
        std::int64_t start = 0;
        std::int64_t active = 0;
        std::int64_t end = 0;
        std::int64_t hit_tokens = 0;
        std::int32_t committed = 0;
        bool is_sealed = false;

        friend bool operator==(const Standing& a, const Standing& b) noexcept {
            return a.sequence == b.sequence && a.start == b.start && a.active == b.active &&
                   a.end == b.end && a.hit_tokens == b.hit_tokens && a.committed == b.committed &&
                   a.is_sealed == b.is_sealed;
        }
    };
    [[nodiscard]] static Standing standing(const Sequence& sequence,
                                           const RequestView& request) noexcept {
        return {request.sequence,    request.start,       request.active,
                request.end,         sequence.hit_tokens, sequence.pages.committed(),
                sequence.is_sealed()};
    }
    // Runs may have been cut since the match.
    static void settle(TreePosition& at) noexcept {
        if (at.node != nullptr) at = PrefixTree::position(at.node, at.depth);
    }

    FoundHit found_;
    Standing claimed_;
    TreePin place_;
    TreePin partial_;
    TreePin below_;
    WindowHold windows_;
    WindowHold source_;
    WindowHold records_;
    StateHold checkpoint_;
};

}  // namespace kvcore
