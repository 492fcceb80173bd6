// SPDX-License-Identifier: Apache-2.0
// Runs bodies whose lanes work in teams: the parts that lanes compute are joined before any lane
// continues.
//
// A team is a power of two of neighbouring lanes, at most a warp. In each team, every lane computes
// its part with body.part(team, lane, held). The parts are joined by shuffles, or in a loop if
// lanes are emulated. Every lane then continues with the joined part in body.finish(team, lane,
// part, held). `held` is the lane's own data between the two calls. Within a team, all reads of
// `part` come before all writes of `finish`.
#pragma once

#include <cstdint>
#include <type_traits>

#include "launch.hpp"

namespace kvcore::cuda {

/// The part of bodies that have nothing to join.
struct NoPart {};

/// Returns the number of lanes of a team: `items`, rounded up to a power of two, at most a warp.
[[nodiscard]] constexpr std::int32_t team_for(std::int64_t items) noexcept {
    std::int32_t lanes = 1;
    while (lanes < kWarp && lanes < items) lanes *= 2;
    return lanes;
}

/// A lane of a team.
struct TeamLane {
    std::int32_t lane;
    std::int32_t lanes;  // of the team

    /// Returns the lane's i-th piece; the lanes of a team take pieces in turn.
    [[nodiscard]] KVCORE_HOST_DEVICE constexpr std::uint32_t piece(int i) const noexcept {
        return static_cast<std::uint32_t>(lane + i * lanes);
    }
};

/// Teams and their sizes, as a grid of lanes.
struct Teams {
    std::int64_t count;
    std::int32_t lanes;  // of each

    [[nodiscard]] constexpr std::int32_t shift() const noexcept {
        std::int32_t bits = 0;
        while (1 << bits < lanes) ++bits;
        return bits;
    }
};

#if defined(__CUDACC__)

/// Runs a body of teams as lanes. All lanes of a warp stay together, also lanes without a team.
template <class Body>
struct TeamBody {
    static constexpr int kBlocks = kBlocksOf<Body>;

    Body body;
    std::int64_t teams;
    std::int32_t lanes;
    std::int32_t shift;  // lanes = 2^shift

    __device__ void operator()(Lane lane) const {
        const std::int64_t stride = lane.count() >> shift;
        const std::int32_t in_warp = lane.thread % kWarp;
        const std::int64_t in_team = in_warp >> shift;
        const TeamLane of{in_warp & (lanes - 1), lanes};
        std::int64_t first = (lane.index() - in_warp) >> shift;
        for (; first < teams; first += stride) {
            const std::int64_t team = first + in_team;
            typename Body::Held held;
            typename Body::Part part{};
            if (team < teams) part = body.part(team, of, held);
            part = join(part);
            if (team < teams) body.finish(team, of, part, held);
        }
    }

   private:
    [[nodiscard]] __device__ NoPart join(NoPart part) const {
        __syncwarp();
        return part;
    }
    template <class Part>
    [[nodiscard]] __device__ Part join(Part part) const {
        for (std::int32_t step = lanes / 2; step > 0; step /= 2) {
            part = Body::join(part, __shfl_xor_sync(0xffffffffU, part, step));
        }
        __syncwarp();
        return part;
    }
};

template <class Body>
[[nodiscard]] Status launch_teams(const Body& body, Teams teams, Stream stream) noexcept {
    return launch(TeamBody<Body>{body, teams.count, teams.lanes, teams.shift()},
                  grid_for(teams.count * teams.lanes), stream);
}

#else

/// Runs every team of a body, one after the other.
template <class Body>
void emulate_teams(const Body& body, Teams teams) {
    using Part = typename Body::Part;
    for (std::int64_t team = 0; team < teams.count; ++team) {
        typename Body::Held held[kWarp];
        Part all{};
        for (std::int32_t lane = 0; lane < teams.lanes; ++lane) {
            const Part part = body.part(team, {lane, teams.lanes}, held[lane]);
            if constexpr (!std::is_same_v<Part, NoPart>) all = Body::join(all, part);
        }
        for (std::int32_t lane = teams.lanes - 1; lane >= 0; --lane) {
            body.finish(team, {lane, teams.lanes}, all, held[lane]);
        }
    }
}

template <class Body>
[[nodiscard]] Status launch_teams(const Body& body, Teams teams, Stream stream) noexcept {
    static_assert(std::is_trivially_copyable_v<Body>, "bodies are arguments of kernels");
    if (teams.count == 0) return kSuccess;
    return emulation::enqueue(stream, [body, teams] { emulate_teams(body, teams); });
}

#endif

}  // namespace kvcore::cuda
