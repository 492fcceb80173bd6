// SPDX-License-Identifier: Apache-2.0
// K22: digests of pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atomics.hpp"
#include "data/digest_word.hpp"
#include "kvcore/cuda.hpp"
#include "kvcore/types.hpp"
#include "page_lists.hpp"
#include "teams.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// Sets all digests to 0.
struct ClearBody {
    std::uint64_t* digests;  // [n]
    std::int64_t n;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        for (std::int64_t i = lane.index(); i < n; i += lane.count()) digests[i] = 0;
    }
};

/// Each team adds the sum of a chunk to the digest of its page, or writes the digest if the chunk
/// is the whole page.
///
/// A page is cut into grains, and a lane loads one grain at once: a unit, or the units that make a
/// word. A lane has kTogether loads in flight before it multiplies.
template <class Unit>
struct DigestBody {
    PageBytes<const std::byte> pool;
    std::int64_t num_pages;
    const std::int64_t* ids;  // [pages]
    std::uint64_t* digests;   // [pages]
    std::uint64_t weight;
    std::int32_t rounds;  // of a lane in a chunk, kTogether grains each
    Divider chunks;       // of a page
    bool adds;

    struct Held {};
    using Part = std::uint64_t;
    static constexpr std::int32_t kWord = 8;
    static constexpr std::int32_t kSize = sizeof(Unit);
    static constexpr std::int32_t kGrain = kSize > kWord ? kSize : kWord;
    static constexpr std::int32_t kTogether = 8;
    static constexpr std::int32_t kStep = kGrain * kWarp;  // bytes
    static constexpr std::int32_t kRound = kStep * kTogether;

    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t team, TeamLane lane,
                                               Held& /*held*/) const {
        const std::int64_t index = chunks.quotient(team);
        const std::int64_t chunk = chunks.remainder(team, index);
        const std::int32_t in_round = lane.lane * kGrain;
        const std::int64_t first = chunk * rounds * kRound + in_round;
        const std::int64_t id = ids[index];
        if (!is_page(id, num_pages)) return 0;
        const std::byte* at = pool.page(id) + first;
        std::int64_t left = pool.page_bytes - first;
        std::uint64_t counter = static_cast<std::uint64_t>(first / kWord + 1) * kDigestStep;
        Part sum = 0;
        KVCORE_KEEP_LOOP
        for (std::int32_t i = 0; i < rounds && left > 0; ++i) {
            sum += left >= kRound - kStep + kGrain
                       ? add_round<true>(at, kRound, counter)
                       : add_round<false>(at, static_cast<std::int32_t>(left), counter);
            at += kRound;
            left -= kRound;
            counter += std::uint64_t{kRound / kWord} * kDigestStep;
        }
        return sum;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Part join(Part a, Part b) { return a + b; }
    KVCORE_HOST_DEVICE void finish(std::int64_t team, TeamLane lane, Part part,
                                   const Held& /*held*/) const {
        if (lane.lane != 0) return;
        std::uint64_t* digest = digests + chunks.quotient(team);
        if (adds) {
            atomic_add(digest, part * weight);
        } else {
            *digest = part * weight;
        }
    }

   private:
    /// Sums the grains of a lane in a round; `counter` belongs to the first grain. With kIsWhole,
    /// all grains are in the page; otherwise only grains that begin in the `left` bytes are added.
    template <bool kIsWhole>
    [[nodiscard]] KVCORE_HOST_DEVICE static Part add_round(const std::byte* at, std::int32_t left,
                                                           std::uint64_t counter) {
        Grain grains[kTogether] = {};
        for (std::int32_t i = 0; i < kTogether; ++i) {
            const std::int32_t offset = i * kStep;
            if (kIsWhole || offset < left) grains[i] = load_grain(at + offset, left - offset);
        }
        Part sum = 0;
        for (std::int32_t i = 0; i < kTogether; ++i) {
            if (kIsWhole || i * kStep < left) sum += add_words(grains[i], counter);
            counter += std::uint64_t{kStep / kWord} * kDigestStep;
        }
        return sum;
    }

    using Grain = std::conditional_t<(kSize > kWord), Unit, std::uint64_t>;

    /// Loads a grain. Bytes after the end of the page are 0.
    [[nodiscard]] KVCORE_HOST_DEVICE static Grain load_grain(const std::byte* at,
                                                             std::int32_t left) {
        if constexpr (kSize > kWord) {
            return load_unit<Unit>(at);
        } else {
            std::uint64_t word = 0;
            for (std::int32_t byte = 0; byte < kWord; byte += kSize) {
                if (byte >= left) break;
                word |= std::uint64_t{load_unit<Unit>(at + byte)} << (8 * byte);
            }
            return word;
        }
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Part add_words(const Grain& grain,
                                                           std::uint64_t counter) {
        if constexpr (kSize > kWord) {
            return digest_word(word_of(grain, 0), counter) +
                   digest_word(word_of(grain, 1), counter + kDigestStep);
        } else {
            return digest_word(grain, counter);
        }
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static std::uint64_t word_of(const Unit16& unit,
                                                                  std::int64_t half) {
        return unit.words[half * 2] | std::uint64_t{unit.words[half * 2 + 1]} << 32;
    }
};

namespace {

// A page is cut into the fewest chunks that keep a whole GPU busy, so that few sums are added up. A
// page with one team is a single chunk, and nothing is added up.
constexpr std::int64_t kBusyTeams = 1 << 13;

[[nodiscard]] std::int64_t rounds_for(std::int64_t rounds_of_page, std::int64_t pages) noexcept {
    const std::int64_t all = rounds_of_page * pages;
    const std::int64_t wanted = all / kBusyTeams < 1 ? 1 : all / kBusyTeams;
    return wanted < rounds_of_page ? wanted : rounds_of_page;
}

[[nodiscard]] Status digest(const PageBytes<const std::byte>& pool, std::int64_t num_pages,
                            const std::int64_t* ids, std::int64_t n, std::uint64_t weight,
                            bool adds, std::uint64_t* digests, Stream stream) noexcept {
    return with_unit(alignment_of(pool.data, pool.page_stride, pool.page_bytes), [&](auto unit) {
        using Body = DigestBody<decltype(unit)>;
        const std::int64_t of_page = ceil_div(pool.page_bytes, Body::kRound);
        const std::int64_t rounds = rounds_for(of_page, n);
        const std::int64_t chunks = ceil_div(of_page, rounds);
        const bool is_sum = adds || chunks > 1;
        if (is_sum && !adds) {
            const Status status = launch(ClearBody{digests, n}, grid_for(n), stream);
            if (status != kSuccess) return status;
        }
        return launch_teams(Body{pool, num_pages, ids, digests, weight,
                                 static_cast<std::int32_t>(rounds), Divider(chunks), is_sum},
                            {n * chunks, kWarp}, stream);
    });
}

}  // namespace

Status add_digests(const PageBytes<const std::byte>& pool, std::int64_t num_pages,
                   const std::int64_t* ids, std::int64_t n, std::uint64_t weight,
                   std::uint64_t* digests, Stream stream) noexcept {
    if (n < 0) return kInvalidCall;
    if (pool.page_bytes == 0) return kSuccess;
    return digest(pool, num_pages, ids, n, weight, true, digests, stream);
}

Status digest_pages(const PageBytes<const std::byte>& pool, std::int64_t num_pages,
                    const std::int64_t* ids, std::int64_t n, std::uint64_t* digests,
                    Stream stream) noexcept {
    if (n < 0) return kInvalidCall;
    if (pool.page_bytes == 0) return launch(ClearBody{digests, n}, grid_for(n), stream);
    return digest(pool, num_pages, ids, n, 1, false, digests, stream);
}

}  // namespace kvcore::cuda
