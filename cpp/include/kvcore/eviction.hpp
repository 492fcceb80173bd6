// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvcore {

/// What a policy needs to keep an entry in its order; a tree node derives from it.
struct EvictionHook {
    EvictionHook* prev = nullptr;
    EvictionHook* next = nullptr;

    /// Whether a policy has it in its order.
    [[nodiscard]] bool is_listed() const noexcept { return next != nullptr; }
};

/// The order in which unreferenced cached runs go.
///
/// Owns: the order, not the entries. The tree lists an entry when it is let go, and asks for the
/// next victim when pages are needed; entries that turn out to be protected are taken off the list
/// by the tree and come back when they are let go again.
/// Threads: none of its own.
/// Cost: O(1) or O(log n) per verb, whatever the number of entries; nothing is rebuilt per call.
class EvictionPolicy {
   public:
    EvictionPolicy() = default;
    EvictionPolicy(const EvictionPolicy&) = delete;
    EvictionPolicy& operator=(const EvictionPolicy&) = delete;
    virtual ~EvictionPolicy() = default;

    /// The entry was used until just now. Lists it, or moves it.
    virtual void touch(EvictionHook& entry) noexcept = 0;

    /// The unlisted entry lost its last child to eviction, or was set aside as a victim: its value
    /// is that of what went last, so it is the next to go.
    virtual void expose(EvictionHook& entry) noexcept = 0;

    /// Takes a listed entry off the list.
    virtual void remove(EvictionHook& entry) noexcept = 0;

    /// The least valuable entry, still listed; nullptr when none is.
    [[nodiscard]] virtual EvictionHook* victim() noexcept = 0;

    /// The entry that would likely be the victim after `entry`, a listed one; nullptr when unknown.
    /// A hint: what it answers is only asked for ahead of its use.
    [[nodiscard]] virtual EvictionHook* likely_after(const EvictionHook& entry) noexcept = 0;
};

/// Least recently used first: an intrusive list by time of release. Every verb is O(1).
class LruPolicy final : public EvictionPolicy {
   public:
    LruPolicy() noexcept;
    void touch(EvictionHook& entry) noexcept override;
    void expose(EvictionHook& entry) noexcept override;
    void remove(EvictionHook& entry) noexcept override;
    [[nodiscard]] EvictionHook* victim() noexcept override;
    [[nodiscard]] EvictionHook* likely_after(const EvictionHook& entry) noexcept override;

   private:
    EvictionHook ends_;  // ends_.next is the oldest entry, ends_.prev the newest
};

}  // namespace kvcore
