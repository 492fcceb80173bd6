// SPDX-License-Identifier: Apache-2.0
// K22: digests of pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atomics.hpp"
#include "data/digest_word.hpp"
#include "kvcore/cuda.hpp"
#include "kvcore/types.hpp"
#include "teams.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// Digests begin at 0.
struct ClearBody {
    std::uint64_t* digests;  // [n]
    std::int64_t n;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        for (std::int64_t i = lane.index(); i < n; i += lane.count()) digests[i] = 0;
    }
};

/// A team adds a chunk of a page to its digest.
template <class Unit>
struct DigestBody {
    PageBytes<const std::byte> pool;
    const std::int64_t* ids;  // [pages]
    std::uint64_t* digests;   // [pages]
    std::uint64_t weight;
    Divider chunks;  // of a page

    struct Held {};
    using Part = std::uint64_t;
    static constexpr std::int64_t kWord = 8;
    static constexpr std::int64_t kSize = sizeof(Unit);
    static constexpr std::int64_t kGrain = kSize > kWord ? kSize : kWord;  // what a lane loads
    static constexpr std::int64_t kGrains = 16;                            // of a lane in a chunk

    [[nodiscard]] static constexpr std::int64_t chunks_of(std::int64_t page_bytes) noexcept {
        return ceil_div(page_bytes, kGrain * kGrains * kWarp);
    }

    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t team, TeamLane lane,
                                               Held& /*held*/) const {
        const std::int64_t index = chunks.quotient(team);
        const std::int64_t chunk = chunks.remainder(team, index);
        const std::byte* page = pool.page(ids[index]);
        Part sum = 0;
        for (std::int64_t i = 0; i < kGrains; ++i) {
            const std::int64_t grain = (chunk * kGrains + i) * kWarp + lane.lane;
            if (grain * kGrain < pool.page_bytes) sum += add_grain(page, grain);
        }
        return sum;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Part join(Part a, Part b) { return a + b; }
    KVCORE_HOST_DEVICE void finish(std::int64_t team, TeamLane lane, Part part,
                                   const Held& /*held*/) const {
        if (lane.lane == 0) atomic_add(digests + chunks.quotient(team), part * weight);
    }

   private:
    [[nodiscard]] KVCORE_HOST_DEVICE Part add_grain(const std::byte* page,
                                                    std::int64_t grain) const {
        const std::byte* at = page + grain * kGrain;
        if constexpr (kGrain > kWord) {
            const Unit unit = load_unit<Unit>(at);
            const std::uint64_t counter = static_cast<std::uint64_t>(grain * 2 + 1) * kDigestStep;
            return digest_word(word_of(unit, 0), counter) +
                   digest_word(word_of(unit, 1), counter + kDigestStep);
        } else {
            std::uint64_t word = 0;  // what the page lacks stays 0
            for (std::int64_t byte = 0; byte < kWord; byte += kSize) {
                if (grain * kWord + byte >= pool.page_bytes) break;
                word |= std::uint64_t{load_unit<Unit>(at + byte)} << (8 * byte);
            }
            return digest_word(word, static_cast<std::uint64_t>(grain + 1) * kDigestStep);
        }
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static std::uint64_t word_of(const Unit16& unit,
                                                                  std::int64_t half) {
        return unit.words[half * 2] | std::uint64_t{unit.words[half * 2 + 1]} << 32;
    }
};

Status add_digests(const PageBytes<const std::byte>& pool, const std::int64_t* ids, std::int64_t n,
                   std::uint64_t weight, std::uint64_t* digests, Stream stream) noexcept {
    if (n < 0) return kInvalidCall;
    if (pool.page_bytes == 0) return kSuccess;
    return with_unit(alignment_of(pool.data, pool.page_stride, pool.page_bytes), [&](auto unit) {
        using Body = DigestBody<decltype(unit)>;
        const std::int64_t chunks = Body::chunks_of(pool.page_bytes);
        return launch_teams(Body{pool, ids, digests, weight, Divider(chunks)}, {n * chunks, kWarp},
                            stream);
    });
}

Status digest_pages(const PageBytes<const std::byte>& pool, const std::int64_t* ids, std::int64_t n,
                    std::uint64_t* digests, Stream stream) noexcept {
    if (n < 0) return kInvalidCall;
    const Status status = launch(ClearBody{digests, n}, grid_for(n), stream);
    return status == kSuccess ? add_digests(pool, ids, n, 1, digests, stream) : status;
}

}  // namespace kvcore::cuda
