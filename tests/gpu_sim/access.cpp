// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "run.hpp"

namespace gpu_sim {

namespace {

// One instruction of the host for each size.
std::uint64_t word_at(const std::byte* from, int bytes) {
    std::uint64_t word = 0;
    switch (bytes) {
        case 1:
            std::memcpy(&word, from, 1);
            break;
        case 2:
            std::memcpy(&word, from, 2);
            break;
        case 4:
            std::memcpy(&word, from, 4);
            break;
        default:
            std::memcpy(&word, from, 8);
    }
    return word;
}
void put_word(std::byte* to, std::uint64_t word, int bytes) {
    switch (bytes) {
        case 1:
            std::memcpy(to, &word, 1);
            break;
        case 2:
            std::memcpy(to, &word, 2);
            break;
        case 4:
            std::memcpy(to, &word, 4);
            break;
        default:
            std::memcpy(to, &word, 8);
    }
}

std::uint64_t loaded(const std::byte* from, const Instruction& i) {
    const std::uint64_t word = word_at(from, i.bytes);
    if (!i.is_signed) return word;
    const unsigned spare = 64U - 8U * i.bytes;
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(word << spare) >> spare);
}

// The value with which an atomic replaces `old`.
std::uint64_t combined(const Instruction& i, std::uint64_t old, std::uint64_t given,
                       std::uint64_t second) {
    const std::string& action = i.action;
    const unsigned spare = 64U - 8U * i.bytes;
    if (action == "add") return old + given;
    if (action == "and") return old & given;
    if (action == "or") return old | given;
    if (action == "xor") return old ^ given;
    if (action == "exch") return given;
    if (action == "cas") return (old << spare) == (given << spare) ? second : old;
    const bool is_less = i.is_signed ? static_cast<std::int64_t>(old << spare) <
                                           static_cast<std::int64_t>(given << spare)
                                     : old << spare < given << spare;
    return is_less == (action == "max") ? given : old;
}

}  // namespace

void Access::check(const Instruction& i, std::uintptr_t address, std::int64_t bytes, int lane) {
    const auto fault = [&](int status, const std::string& what) {
        throw Fault(status, "lane " + std::to_string(lane) + ": " + what);
    };
    if ((address & static_cast<std::uintptr_t>(bytes - 1)) != 0) {
        char text[96];
        std::snprintf(text, sizeof text, "0x%llx is no multiple of %lld bytes",
                      static_cast<unsigned long long>(address), static_cast<long long>(bytes));
        fault(kMisalignedAddress, text);
    }
    const std::uintptr_t end = address + static_cast<std::uintptr_t>(bytes);
    if (address >= last_.begin && end <= last_.end) return;
    for (const Region& region : own_) {
        if (address < region.begin || end > region.end) continue;
        if (i.space == Space::kGlobal) fault(kIllegalAddress, "an address of another space");
        return;
    }
    if (i.space != Space::kGlobal && i.space != Space::kGeneric) {
        fault(kIllegalAddress, "an address beyond its space");
    }
    const std::string why = memory_.why_not(device_, address, bytes, last_);
    if (!why.empty()) {
        last_ = {};
        fault(kIllegalAddress, why);
    }
}

void Access::count(const Instruction& i, std::int64_t bytes, Mask lanes) {
    if (i.space != Space::kGlobal && i.space != Space::kGeneric) return;
    counts_.accesses += 1;
    if (i.kind == Kind::kLoad) counts_.loaded += bytes * __builtin_popcount(lanes);
    if (i.kind == Kind::kStore) counts_.stored += bytes * __builtin_popcount(lanes);
}

void Access::perform(const Instruction& i, Register* r, Mask lanes) {
    const std::size_t elements = i.kind == Kind::kLoad    ? i.out.size()
                                 : i.kind == Kind::kStore ? i.in.size() - 1
                                                          : 1;
    const std::int64_t bytes = i.bytes * static_cast<std::int64_t>(elements);
    count(i, bytes, lanes);
    const Register& base = r[i.in[0]];
    for (int lane = 0; lane < kWarp; ++lane) {
        if ((lanes >> lane & 1U) == 0) continue;
        const auto address =
            static_cast<std::uintptr_t>(base.of[lane] + static_cast<std::uint64_t>(i.offset));
        check(i, address, bytes, lane);
        auto* at = reinterpret_cast<std::byte*>(address);
        if (i.kind == Kind::kLoad) {
            for (const std::int32_t to : i.out) {
                r[to].of[lane] = loaded(at, i);
                at += i.bytes;
            }
        } else if (i.kind == Kind::kStore) {
            for (std::size_t n = 1; n < i.in.size(); ++n) {
                put_word(at, r[i.in[n]].of[lane], i.bytes);
                at += i.bytes;
            }
        } else {
            const std::uint64_t old = loaded(at, i);
            const std::uint64_t second = i.in.size() > 2 ? r[i.in[2]].of[lane] : 0;
            const std::uint64_t found = combined(i, old, r[i.in[1]].of[lane], second);
            put_word(at, found, i.bytes);
            r[i.out[0]].of[lane] = old;
        }
    }
}

}  // namespace gpu_sim
