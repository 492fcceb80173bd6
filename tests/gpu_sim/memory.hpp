// SPDX-License-Identifier: Apache-2.0
// Memory of simulated devices, and what of the host's they may reach.
//
// Devices have ranges of the host's addresses, from which allocations are cut in order; an address
// is never given out twice, so that one which was freed is known as such. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gpu_sim {

enum class Owner : std::uint8_t { kDevice, kPinned, kPageable, kFreed, kBetween };

/// A run of bytes that belong together, [begin, end).
struct Region {
    Owner owner = Owner::kPageable;
    int device = -1;
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
};

class Memory {
   public:
    /// Forgets everything: so many devices of so many bytes. What is freed later of what was
    /// allocated before is nobody's business.
    void reset(int devices, std::int64_t bytes);

    /// nullptr: out of memory. Filled with bytes that are no zeros.
    [[nodiscard]] void* allocate(int device, std::int64_t bytes);
    /// Whether there was such an allocation.
    [[nodiscard]] bool free(void* pointer);
    [[nodiscard]] bool pin(void* pointer, std::int64_t bytes);
    [[nodiscard]] bool unpin(void* pointer);

    /// What an address belongs to. Of pageable memory nothing is known but the address.
    [[nodiscard]] Region region_of(std::uintptr_t address) const;
    [[nodiscard]] Region region_of(const void* pointer) const {
        return region_of(reinterpret_cast<std::uintptr_t>(pointer));
    }
    /// Why a device may not touch bytes, empty where it may. `region` is where they lie.
    [[nodiscard]] std::string why_not(int device, std::uintptr_t address, std::int64_t bytes,
                                      Region& region) const;

    /// Whether kernels may reach all memory of the host, as on systems with one table of pages.
    void share_host(bool is_shared) { is_host_shared_ = is_shared; }

    [[nodiscard]] std::int64_t total() const { return total_; }
    [[nodiscard]] std::int64_t free_bytes(int device) const {
        return free_[static_cast<std::size_t>(device)];
    }
    [[nodiscard]] std::int64_t num_allocations() const { return allocations_; }
    [[nodiscard]] std::int64_t num_pinned() const {
        return static_cast<std::int64_t>(pinned_.size());
    }

   private:
    std::map<std::uintptr_t, Region> regions_;  // of devices, freed ones too, by their begin
    std::map<std::uintptr_t, Region> pinned_;
    std::vector<std::uintptr_t> next_;  // of each device
    std::vector<std::int64_t> free_;
    std::int64_t total_ = 0;
    std::int64_t allocations_ = 0;
    bool is_host_shared_ = true;
};

}  // namespace gpu_sim
