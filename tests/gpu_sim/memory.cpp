// SPDX-License-Identifier: Apache-2.0
#include "memory.hpp"

#include <sys/mman.h>

#include <cstring>
#include <stdexcept>

namespace gpu_sim {

namespace {

constexpr int kMaxDevices = 16;
constexpr std::uintptr_t kSpan = std::uintptr_t{1} << 40;  // address range of a device
constexpr std::uintptr_t kAlignment = 256;
constexpr std::uintptr_t kGap = 256;  // between allocations; belongs to no allocation
constexpr std::uintptr_t kPage = 4096;

// Addresses of all devices, reserved once for the process; a page takes memory at its first write.
std::uintptr_t base() {
    static const std::uintptr_t kBase = [] {
        void* found = mmap(nullptr, kSpan * kMaxDevices, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) throw std::runtime_error("no addresses for simulated devices");
        return reinterpret_cast<std::uintptr_t>(found);
    }();
    return kBase;
}

std::uintptr_t round_up(std::uintptr_t value, std::uintptr_t to) {
    return (value + to - 1) / to * to;
}

// Never decreases: addresses of earlier machines are not reused.
std::uintptr_t& used(int device) {
    static std::uintptr_t all[kMaxDevices] = {};
    return all[device];
}

std::string text_of(std::uintptr_t address, std::int64_t bytes) {
    char text[64];
    std::snprintf(text, sizeof text, "%lld bytes at 0x%llx", static_cast<long long>(bytes),
                  static_cast<unsigned long long>(address));
    return text;
}

}  // namespace

void Memory::reset(int devices, std::int64_t bytes) {
    for (const auto& [begin, region] : regions_) {
        if (region.owner == Owner::kDevice) {
            madvise(reinterpret_cast<void*>(begin / kPage * kPage),
                    round_up(region.end, kPage) - begin / kPage * kPage, MADV_DONTNEED);
        }
    }
    regions_.clear();
    pinned_.clear();
    free_.assign(static_cast<std::size_t>(devices), bytes);
    total_ = bytes;
    allocations_ = 0;
}

void* Memory::allocate(int device, std::int64_t bytes) {
    std::int64_t& left = free_[static_cast<std::size_t>(device)];
    if (bytes > left) return nullptr;
    const auto size = static_cast<std::uintptr_t>(bytes);
    // An allocation owns whole pages, so the pages of a freed allocation can be returned.
    const std::uintptr_t offset = round_up(used(device), size < kPage ? kAlignment : kPage);
    const std::uintptr_t begin = base() + static_cast<std::uintptr_t>(device) * kSpan + offset;
    used(device) = offset + size + kGap;
    if (used(device) > kSpan) return nullptr;
    const std::uintptr_t first = begin / kPage * kPage;
    mprotect(reinterpret_cast<void*>(first), round_up(begin + size, kPage) - first,
             PROT_READ | PROT_WRITE);
    std::memset(reinterpret_cast<void*>(begin), 0xff, size);
    regions_[begin] = {Owner::kDevice, device, begin, begin + size};
    left -= bytes;
    ++allocations_;
    return reinterpret_cast<void*>(begin);
}

bool Memory::free(void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    const auto found = regions_.find(address);
    if (found == regions_.end()) {  // of an earlier machine
        return address >= base() && address < base() + kSpan * kMaxDevices;
    }
    Region& region = found->second;
    if (region.owner != Owner::kDevice) return false;
    region.owner = Owner::kFreed;
    const std::uintptr_t first = round_up(region.begin, kPage);
    if (region.end > first) {
        madvise(reinterpret_cast<void*>(first), (region.end - first) / kPage * kPage,
                MADV_DONTNEED);
    }
    free_[static_cast<std::size_t>(region.device)] +=
        static_cast<std::int64_t>(region.end - region.begin);
    --allocations_;
    return true;
}

bool Memory::pin(void* pointer, std::int64_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
    const auto end = begin + static_cast<std::uintptr_t>(bytes);
    const auto after = pinned_.lower_bound(end);  // the first that begins after it
    if (after != pinned_.begin() && std::prev(after)->second.end > begin) return false;
    pinned_[begin] = {Owner::kPinned, -1, begin, end};
    return true;
}

bool Memory::unpin(void* pointer) {
    return pinned_.erase(reinterpret_cast<std::uintptr_t>(pointer)) == 1;
}

Region Memory::region_of(std::uintptr_t address) const {
    const bool is_devices = address >= base() && address < base() + kSpan * kMaxDevices;
    const auto& among = is_devices ? regions_ : pinned_;
    auto after = among.upper_bound(address);
    if (after != among.begin() && address < (--after)->second.end) return after->second;
    return {is_devices ? Owner::kBetween : Owner::kPageable, -1, 0, 0};
}

std::string Memory::why_not(int device, std::uintptr_t address, std::int64_t bytes,
                            Region& region) const {
    region = region_of(address);
    const std::uintptr_t end = address + static_cast<std::uintptr_t>(bytes);
    const bool is_inside = end <= region.end;
    switch (region.owner) {
        case Owner::kDevice:
            if (is_inside && region.device == device) return "";
            if (is_inside)
                return text_of(address, bytes) + " are of device " + std::to_string(region.device);
            break;
        case Owner::kPinned:
            if (is_inside) return "";
            break;
        case Owner::kPageable:
            if (!is_host_shared_)
                return text_of(address, bytes) + " are neither a device's nor pinned";
            region = {Owner::kPageable, -1, address, end};
            return "";
        case Owner::kFreed:
            return text_of(address, bytes) + " were freed";
        default:
            return text_of(address, bytes) + " are of no allocation";
    }
    return text_of(address, bytes) + " end beyond an allocation of " +
           std::to_string(region.end - region.begin) + " bytes";
}

}  // namespace gpu_sim
