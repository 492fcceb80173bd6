// SPDX-License-Identifier: Apache-2.0
#include "kvcore/eviction.hpp"

namespace kvcore {
namespace {

void link_after(EvictionHook& place, EvictionHook& entry) noexcept {
    entry.prev = &place;
    entry.next = place.next;
    place.next->prev = &entry;
    place.next = &entry;
}

}  // namespace

LruPolicy::LruPolicy() noexcept { ends_.prev = ends_.next = &ends_; }

void LruPolicy::touch(EvictionHook& entry) noexcept {
    if (entry.is_listed()) remove(entry);
    link_after(*ends_.prev, entry);
}

void LruPolicy::expose(EvictionHook& entry) noexcept { link_after(ends_, entry); }

void LruPolicy::remove(EvictionHook& entry) noexcept {
    entry.prev->next = entry.next;
    entry.next->prev = entry.prev;
    entry.prev = entry.next = nullptr;
}

EvictionHook* LruPolicy::victim() noexcept { return ends_.next == &ends_ ? nullptr : ends_.next; }

EvictionHook* LruPolicy::likely_after(const EvictionHook& entry) noexcept {
    return entry.next == &ends_ ? nullptr : entry.next;
}

}  // namespace kvcore
