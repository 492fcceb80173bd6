// SPDX-License-Identifier: Apache-2.0
// Launches of kernels: which warps and lanes run next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.hpp"
#include "ptx.hpp"

namespace gpu_sim {

struct Size3 {
    std::uint32_t x = 1;
    std::uint32_t y = 1;
    std::uint32_t z = 1;

    [[nodiscard]] std::int64_t count() const { return std::int64_t{x} * y * z; }
};

/// The error that a device returns after a kernel broke a rule.
class Fault : public std::runtime_error {
   public:
    Fault(int status, const std::string& what) : std::runtime_error(what), status_(status) {}
    [[nodiscard]] int status() const { return status_; }

   private:
    int status_;
};
constexpr int kIllegalAddress = 700;
constexpr int kMisalignedAddress = 716;
constexpr int kLaunchFailure = 719;

/// The work of a kernel's launches: instructions of warps, and bytes that lanes moved.
struct Counts {
    std::int64_t launches = 0;
    std::int64_t instructions = 0;
    std::int64_t loaded = 0;
    std::int64_t stored = 0;
    std::int64_t accesses = 0;  // of global memory, by warps
};

struct Launch {
    const Kernel& kernel;
    Size3 grid;
    Size3 block;
    std::vector<std::byte> parameters;
    std::int64_t dynamic_shared = 0;
    int device = 0;
    std::uint64_t seed = 0;  // 0: blocks, warps and lanes in natural order
};

/// Runs all lanes. The seed selects the next warp, and the side of a branch that runs first; parted
/// lanes merge where they meet. Throws Fault.
void run(const Launch& launch, const Memory& memory, Counts& counts);

// ---- between the files of this folder ---------------------------------------------------------

/// SplitMix64 (Steele, Lea and Flood 2014).
class Draw {
   public:
    explicit Draw(std::uint64_t seed) : state_(seed) {}
    std::uint64_t below(std::uint64_t n) {
        std::uint64_t bits = state_ += 0x9e3779b97f4a7c15U;
        bits = (bits ^ (bits >> 30U)) * 0xbf58476d1ce4e5b9U;
        bits = (bits ^ (bits >> 27U)) * 0x94d049bb133111ebU;
        return (bits ^ (bits >> 31U)) % n;
    }

   private:
    std::uint64_t state_;
};

/// Loads, stores and atomics of a warp; checks the memory that its block may access.
class Access {
   public:
    Access(const Memory& memory, int device, Counts& counts)
        : memory_(memory), device_(device), counts_(counts) {}

    /// Adds parameters, shared or local memory: memory of the launch, of a block or of a lane.
    void add_own(const std::byte* begin, std::int64_t bytes) {
        const auto at = reinterpret_cast<std::uintptr_t>(begin);
        own_.push_back({Owner::kDevice, device_, at, at + static_cast<std::uintptr_t>(bytes)});
    }
    void perform(const Instruction& instruction, Register* registers, Mask lanes);

   private:
    void check(const Instruction& instruction, std::uintptr_t address, std::int64_t bytes,
               int lane);
    void count(const Instruction& instruction, std::int64_t bytes, Mask lanes);

    const Memory& memory_;
    int device_;
    Counts& counts_;
    std::vector<Region> own_;
    Region last_ = {};  // of the last access
};

}  // namespace gpu_sim
