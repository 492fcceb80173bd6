// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cache/admission.hpp"
#include "cache/state.hpp"
#include "transfer/departures.hpp"

namespace kvcore {

/// The first half of a reservation: works out what it would do and changes nothing. `plan` is that
/// half alone, so it tells exactly what `reserve` would do. The second half is the Reserver's.
///
/// Threads: none of its own. Cost: comparing the prompt with the cache, where a hit is looked for,
/// and O(columns that are written again).
class Admitter {
   public:
    Admitter(const ManagerState& state, const Departures& departures) noexcept
        : state_(state), departures_(departures) {}

    /// The longest hit of a claim of which nothing has been fetched or written.
    [[nodiscard]] FoundHit find_hit(const Sequence& sequence, const RequestView& request) const {
        FoundHit hit;
        find_hit(hit, sequence, request, ReserveOptions::kUnlimited, true);
        return hit;
    }
    /// What a reservation with that hit does, or with its whole pages alone where the page to copy
    /// from would be needed itself.
    [[nodiscard]] Admission admit(const FoundHit& hit, const Sequence& sequence,
                                  const RequestView& request, std::int64_t num_steps) const {
        Admission admission;
        admission.hit = hit;
        complete(admission, sequence, request, {num_steps});
        return admission;
    }
    /// Both.
    [[nodiscard]] Admission admit(const Sequence& sequence, const RequestView& request,
                                  const Asked& asked, bool allow_partial = true) const {
        Admission admission;
        find_hit(admission.hit, sequence, request, asked.options.max_hit, allow_partial);
        complete(admission, sequence, request, asked);
        return admission;
    }
    /// Evictable pages that a request has once it has taken that hit.
    [[nodiscard]] std::int64_t count_adopted(const Replica& home, const FoundHit& hit) const;

   private:
    void find_hit(FoundHit& hit, const Sequence& sequence, const RequestView& request,
                  std::int64_t max_hit, bool allow_partial) const;
    void narrow_to_state(FoundHit& hit, TreePosition& whole, const Replica& home,
                         std::int64_t limit) const;
    void find_below(FoundHit& hit, const TierIndex& host, const RequestView& request,
                    std::int64_t limit) const;
    void find_columns_below(FoundHit& hit, TreePosition whole, const Replica& home,
                            const RequestView& request, std::int64_t limit) const;
    void complete(Admission& admission, const Sequence& sequence, const RequestView& request,
                  const Asked& asked) const;
    void count(Admission& admission, const Sequence& sequence, const RequestView& request,
               const Asked& asked) const;
    void count_columns(Admission& admission, const Sequence& sequence, std::int64_t needed) const;
    void count_returned(Admission& admission, const Sequence& sequence) const;
    void count_pages(Admission& admission, const Sequence& sequence, const RequestView& request,
                     std::int64_t num_steps) const;
    [[nodiscard]] std::int64_t count_ahead(const Admission& admission, const Sequence& sequence,
                                           const RequestView& request, const Asked& asked,
                                           const Owner* owner) const;
    // Columns that the request has in a window then, and others read too or are not the `owner`'s.
    [[nodiscard]] std::int64_t count_shared(std::size_t window, const Admission& admission,
                                            const Sequence& sequence, const RequestView& request,
                                            const Owner* owner) const;
    [[nodiscard]] std::int32_t first_read(std::size_t window, const Admission& admission,
                                          const RequestView& request) const;
    void count_available(Admission& admission, const Sequence& sequence) const;
    [[nodiscard]] std::int64_t count_source(const Replica& home, const FoundHit& hit) const;
    void place_state(Admission& admission, const Sequence& sequence, const RequestView& request,
                     const Asked& asked) const;

    const ManagerState& state_;
    const Departures& departures_;
};

}  // namespace kvcore
