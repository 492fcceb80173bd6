// SPDX-License-Identifier: Apache-2.0
// PTX as the simulation runs it: kernels are lists of instructions, whose operands are numbers of
// registers. Immediates and addresses of symbols are also registers, but read-only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gpu_sim {

constexpr int kWarp = 32;

/// A mask of lanes in a warp: bit 0 is lane 0.
using Mask = std::uint32_t;
constexpr Mask kAllLanes = 0xffffffffU;

/// A register of a warp: the low bits of each word count; conversions leave arbitrary upper bits.
struct alignas(64) Register {
    std::uint64_t of[kWarp];
};

struct Instruction;
/// A computation of lanes from their own registers.
using Operation = void (*)(const Instruction&, Register* registers, Mask lanes);

enum class Kind : std::uint8_t {
    kCompute,
    kLoad,
    kStore,
    kAtomic,
    kBranch,
    kExit,
    kWarpBarrier,
    kShuffle,
    kVote,
    kBlockBarrier,
};

enum class Space : std::uint8_t { kGeneric, kGlobal, kParam, kShared, kLocal };

struct Instruction {
    Kind kind = Kind::kCompute;
    Operation run = nullptr;  // kCompute
    std::int32_t guard = -1;  // a predicate register, or -1
    bool runs_if = true;      // value of the guard
    std::vector<std::int32_t> out;
    std::vector<std::int32_t> in;  // for memory: the address is the first
    std::int64_t offset = 0;       // added to an address
    Space space = Space::kGeneric;
    std::uint8_t bytes = 0;  // of an element in memory
    bool is_signed = false;
    char mode = 0;  // of a shuffle: b(fly), u(p), d(own), i(dx); of a vote: a(ll), o(ne), b(its)
    std::int32_t target = -1;  // of a branch
    std::string action;        // of an atomic
    std::string text;
    std::string source;  // file:line, if the compiler states it
};

/// Special registers come before all others.
enum Special : std::int32_t {
    kTidX,
    kTidY,
    kTidZ,
    kNtidX,
    kNtidY,
    kNtidZ,
    kCtaidX,
    kCtaidY,
    kCtaidZ,
    kNctaidX,
    kNctaidY,
    kNctaidZ,
    kLaneid,
    kNumSpecial
};

/// Memory that a kernel declares, or a parameter; `at` is its offset in its space.
struct Symbol {
    Space space;
    std::int64_t at;
    std::int32_t reg;  // holds its address
};

struct Kernel {
    std::string name;
    std::vector<Instruction> code;
    std::int32_t num_registers = kNumSpecial;
    std::vector<std::pair<std::int32_t, std::uint64_t>> constants;
    std::map<std::string, Symbol> symbols;
    std::vector<std::pair<std::int64_t, std::int64_t>> parameters;  // offset, bytes
    std::int64_t parameter_bytes = 0;
    std::int64_t shared_bytes = 0;
    std::int64_t local_bytes = 0;
};

/// Kernels by name.
using Module = std::map<std::string, Kernel>;

/// Parses the PTX that nvcc writes. Throws std::runtime_error with the line of an unknown
/// construct.
[[nodiscard]] Module parse(std::string_view text);

/// Returns the operation of an opcode such as "add.s64"; nullptr if the opcode is unknown.
[[nodiscard]] Operation find_operation(const std::string& opcode);

using Operations = std::unordered_map<std::string, Operation>;
void add_integers(Operations& table);
void add_floats(Operations& table);
void add_conversions(Operations& table);

}  // namespace gpu_sim
