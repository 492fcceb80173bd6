// SPDX-License-Identifier: Apache-2.0
// Memory of simulated devices, and the host memory that they may access.
//
// Each device has a range of the host's addresses, and allocates from it in order. An address is
// never reused, so a freed address is recognised. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gpu_sim {

enum class Owner : std::uint8_t { kDevice, kPinned, kPageable, kFreed, kBetween };

/// A run of bytes with one owner, [begin, end).
struct Region {
    Owner owner = Owner::kPageable;
    int device = -1;
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
};

class Memory {
   public:
    /// Forgets all allocations: makes `devices` devices of `bytes` bytes. A later free of an
    /// earlier allocation has no effect.
    void reset(int devices, std::int64_t bytes);

    /// Returns memory filled with nonzero bytes; nullptr if out of memory.
    [[nodiscard]] void* allocate(int device, std::int64_t bytes);
    /// Returns true if the allocation existed.
    [[nodiscard]] bool free(void* pointer);
    [[nodiscard]] bool pin(void* pointer, std::int64_t bytes);
    [[nodiscard]] bool unpin(void* pointer);

    /// The region of an address. For pageable memory the region is only the address.
    [[nodiscard]] Region region_of(std::uintptr_t address) const;
    [[nodiscard]] Region region_of(const void* pointer) const {
        return region_of(reinterpret_cast<std::uintptr_t>(pointer));
    }
    /// Explains why a device must not access bytes; empty if it may. `region` is their region.
    [[nodiscard]] std::string why_not(int device, std::uintptr_t address, std::int64_t bytes,
                                      Region& region) const;

    /// Sets whether kernels may access all host memory, as on systems with one page table.
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
    std::map<std::uintptr_t, Region> regions_;  // of devices, also freed ones, by their begin
    std::map<std::uintptr_t, Region> pinned_;
    std::vector<std::uintptr_t> next_;  // of each device
    std::vector<std::int64_t> free_;
    std::int64_t total_ = 0;
    std::int64_t allocations_ = 0;
    bool is_host_shared_ = true;
};

}  // namespace gpu_sim
