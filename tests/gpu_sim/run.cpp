// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <algorithm>
#include <memory>
#include <numeric>

namespace gpu_sim {

namespace {

// The lanes of a warp at the same instruction.
struct Group {
    std::int32_t at;
    Mask lanes;
};

enum class Stop : std::uint8_t { kDone, kBlockBarrier, kPause };

using Registers = std::unique_ptr<Register[]>;

/// A warp: groups of lanes that part at branches and merge at the same instruction.
class Warp {
   public:
    Warp(const Kernel& kernel, Registers registers, Mask lanes)
        : kernel_(kernel), registers_(std::move(registers)), groups_{{0, lanes}} {}

    [[nodiscard]] Register* registers() { return registers_.get(); }
    [[nodiscard]] Registers give_back() { return std::move(registers_); }

    /// Runs until all lanes have exited or wait for other warps, or `budget` instructions have run.
    /// By default the group with the lowest instruction runs first. With `mixes` any group runs,
    /// and groups sometimes part without a branch: only an instruction that names lanes keeps them
    /// together.
    Stop run(Access& access, Draw& draw, bool mixes, std::int64_t budget, std::int64_t& count) {
        while (!groups_.empty()) {
            if (budget <= 0) return Stop::kPause;
            const std::size_t chosen = choose(draw, mixes);
            if (chosen == groups_.size()) return Stop::kBlockBarrier;
            if (mixes && draw.below(4) == 0) part(chosen, static_cast<Mask>(draw.below(kAllLanes)));
            const std::int64_t before = count;
            // Runs a single group, or up to a place where groups may merge.
            do {
                ++count;
                if (!step(access, chosen)) break;
            } while (groups_.size() == 1 && count - before < budget &&
                     !(mixes && draw.below(8) == 0));
            budget -= count - before;
        }
        return Stop::kDone;
    }
    /// Releases the groups that wait for other warps.
    void pass_block_barrier() {
        for (Group& group : groups_) ++group.at;
    }
    [[nodiscard]] const Instruction& at() const { return code(groups_[current_].at); }

   private:
    [[nodiscard]] const Instruction& code(std::int32_t at) const {
        return kernel_.code[static_cast<std::size_t>(at)];
    }

    // Returns a group that can run; with `mixes` prefers the group of the leading lane. Returns
    // groups_.size() if all groups wait for other warps.
    std::size_t choose(Draw& draw, bool mixes) {
        merge();
        if (mixes && draw.below(100) == 0) leader_ = static_cast<int>(draw.below(kWarp));
        std::size_t best = groups_.size();
        std::size_t ready = 0;
        for (std::size_t i = 0; i < groups_.size(); ++i) {
            if (waits(groups_[i])) continue;
            ++ready;
            if (mixes && (groups_[i].lanes >> leader_ & 1U) != 0) return i;
            const bool is_better = best == groups_.size() || groups_[i].at < groups_[best].at;
            if (mixes ? draw.below(ready) == 0 : is_better) best = i;
        }
        if (best == groups_.size() && !(groups_.size() == 1 && is_block_barrier(groups_[0]))) {
            current_ = 0;
            throw Fault(kLaunchFailure, "lanes wait for lanes that do not arrive");
        }
        return best;
    }
    void merge() {
        for (std::size_t i = 0; i < groups_.size(); ++i) {
            for (std::size_t j = groups_.size() - 1; j > i; --j) {
                if (groups_[j].at != groups_[i].at) continue;
                groups_[i].lanes |= groups_[j].lanes;
                groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(j));
            }
        }
    }
    void part(std::size_t chosen, Mask staying) {
        const Group left{groups_[chosen].at, groups_[chosen].lanes & ~staying};
        const Mask rest = groups_[chosen].lanes & staying;
        if (left.lanes == 0 || rest == 0 || is_exchange(code(left.at).kind)) return;
        groups_[chosen].lanes = rest;
        groups_.push_back(left);
    }
    [[nodiscard]] static bool is_exchange(Kind kind) {
        return kind == Kind::kWarpBarrier || kind == Kind::kShuffle || kind == Kind::kVote ||
               kind == Kind::kBlockBarrier;
    }
    [[nodiscard]] bool is_block_barrier(const Group& group) const {
        return code(group.at).kind == Kind::kBlockBarrier;
    }
    // Returns true if a group must wait for lanes that its instruction names.
    [[nodiscard]] bool waits(const Group& group) {
        const Instruction& i = code(group.at);
        if (i.kind == Kind::kBlockBarrier) return true;
        if (!is_exchange(i.kind)) return false;
        const auto lane = __builtin_ctz(group.lanes);
        const auto named = static_cast<Mask>(registers_[i.in[0]].of[lane]);
        if ((named & group.lanes) != group.lanes) {
            current_ = static_cast<std::size_t>(&group - groups_.data());
            throw Fault(kLaunchFailure, "a lane that its own mask does not name");
        }
        return named != group.lanes;
    }

    // Runs one instruction of a group. Returns true if the group may run on without a new choice.
    bool step(Access& access, std::size_t chosen) {
        current_ = chosen;
        Group& group = groups_[chosen];
        const Instruction& i = code(group.at);
        Mask lanes = group.lanes;
        if (i.guard >= 0) {
            Mask set = 0;
            for (int lane = 0; lane < kWarp; ++lane) {
                set |= static_cast<Mask>(registers_[i.guard].of[lane] & 1U) << lane;
            }
            lanes &= i.runs_if ? set : ~set;
        }
        switch (i.kind) {
            case Kind::kBranch:
                return branch(chosen, i.target, lanes);
            case Kind::kExit:
                return leave(chosen, lanes);
            case Kind::kCompute:
                if (lanes != 0) i.run(i, registers_.get(), lanes);
                ++group.at;
                return true;
            case Kind::kLoad:
            case Kind::kStore:
            case Kind::kAtomic:
                if (lanes != 0) access.perform(i, registers_.get(), lanes);
                ++group.at;
                return true;
            default:
                if (lanes != group.lanes) throw Fault(kLaunchFailure, "an exchange under a guard");
                if (i.kind == Kind::kBlockBarrier || waits(group)) return false;
                exchange(i, lanes);
                ++group.at;
                return true;
        }
    }
    bool branch(std::size_t chosen, std::int32_t target, Mask lanes) {
        Group& group = groups_[chosen];
        if (lanes == group.lanes) {
            group.at = target;
        } else {
            ++group.at;
            group.lanes &= ~lanes;
            if (lanes != 0) groups_.push_back({target, lanes});
        }
        return lanes == 0 || groups_.size() == 1;
    }
    bool leave(std::size_t chosen, Mask lanes) {
        Group& group = groups_[chosen];
        ++group.at;
        group.lanes &= ~lanes;
        if (group.lanes != 0) return true;
        groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(chosen));
        return false;
    }

    void exchange(const Instruction& i, Mask lanes) {
        if (i.kind == Kind::kShuffle) shuffle(i, lanes);
        if (i.kind == Kind::kVote) vote(i, lanes);
    }
    // The low half of the third operand bounds a segment of lanes, the high half is its width.
    void shuffle(const Instruction& i, Mask lanes) {
        Register found{};
        Register is_inside{};
        for (int lane = 0; lane < kWarp; ++lane) {
            if ((lanes >> lane & 1U) == 0) continue;
            const auto by = static_cast<int>(registers_[i.in[2]].of[lane] & 31U);
            const auto limits = static_cast<int>(registers_[i.in[3]].of[lane]);
            const int segment = limits >> 8 & 31;
            const int most = (lane & segment) | (limits & 31 & ~segment);
            const int least = lane & segment;
            int from = i.mode == 'b'   ? lane ^ by
                       : i.mode == 'u' ? lane - by
                       : i.mode == 'd' ? lane + by
                                       : least | (by & ~segment);
            const bool is_in = i.mode == 'u' ? from >= most : from <= most;
            if (!is_in) from = lane;
            if ((lanes >> from & 1U) == 0) throw Fault(kLaunchFailure, "a shuffle from no lane");
            found.of[lane] = registers_[i.in[1]].of[from];
            is_inside.of[lane] = is_in ? 1 : 0;
        }
        for (int lane = 0; lane < kWarp; ++lane) {
            if ((lanes >> lane & 1U) == 0) continue;
            registers_[i.out[0]].of[lane] = found.of[lane];
            if (i.out.size() > 1) registers_[i.out[1]].of[lane] = is_inside.of[lane];
        }
    }
    void vote(const Instruction& i, Mask lanes) {
        Mask set = 0;
        for (int lane = 0; lane < kWarp; ++lane) {
            set |= static_cast<Mask>(registers_[i.in[1]].of[lane] & 1U) << lane;
        }
        set &= lanes;
        const std::uint64_t answer = i.mode == 'b' ? set : i.mode == 'a' ? set == lanes : set != 0;
        for (int lane = 0; lane < kWarp; ++lane) {
            if ((lanes >> lane & 1U) != 0) registers_[i.out[0]].of[lane] = answer;
        }
    }

    const Kernel& kernel_;
    Registers registers_;
    std::vector<Group> groups_;
    std::size_t current_ = 0;
    int leader_ = 0;
};

/// The blocks of a launch, one after the other; the warps of a block run in turns.
class Blocks {
   public:
    Blocks(const Launch& launch, const Memory& memory, Counts& counts)
        : launch_(launch), memory_(memory), counts_(counts), draw_(launch.seed) {}

    void run() {
        const std::int64_t n = launch_.grid.count();
        std::int64_t step = 1;
        std::int64_t first = 0;
        if (launch_.seed != 0) {  // a step coprime to the count visits every block
            const auto some = static_cast<std::uint64_t>(n);
            first = static_cast<std::int64_t>(draw_.below(some));
            do {
                step = 1 + static_cast<std::int64_t>(draw_.below(some));
            } while (std::gcd(step, n) != 1);
        }
        __extension__ using Wide = __int128;
        for (std::int64_t i = 0; i < n; ++i) {
            run_block(static_cast<std::int64_t>((Wide{i} * step + first) % n));
        }
    }

   private:
    void run_block(std::int64_t block) {
        const auto threads = launch_.block.count();
        const auto warps = (threads + kWarp - 1) / kWarp;
        std::vector<std::byte> shared(
            static_cast<std::size_t>(launch_.kernel.shared_bytes + launch_.dynamic_shared));
        std::vector<std::unique_ptr<Warp>> running(static_cast<std::size_t>(warps));
        std::vector<std::int64_t> ready(running.size());
        std::iota(ready.begin(), ready.end(), 0);
        Access access(memory_, launch_.device, counts_);
        access.add_own(launch_.parameters.data(), launch_.kernel.parameter_bytes);
        access.add_own(shared.data(), static_cast<std::int64_t>(shared.size()));
        std::vector<std::byte> local(
            static_cast<std::size_t>(launch_.kernel.local_bytes * warps * kWarp));
        access.add_own(local.data(), static_cast<std::int64_t>(local.size()));
        // Warps of some blocks take turns, and parted lanes run in any order.
        const bool mixes = launch_.seed != 0 && draw_.below(kMixed) == 0;
        std::int64_t waiting = 0;
        while (!ready.empty()) {
            const std::size_t turn = launch_.seed == 0 ? 0 : draw_.below(ready.size());
            const std::int64_t number = ready[turn];
            auto& warp = running[static_cast<std::size_t>(number)];
            if (warp == nullptr) warp = make_warp(block, number, shared, local);
            const std::int64_t budget =
                mixes ? 1 + static_cast<std::int64_t>(draw_.below(200)) : kUnlimited;
            const Stop stop = run_warp(*warp, access, mixes, budget, block, number);
            if (stop == Stop::kPause) continue;
            ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(turn));
            if (stop == Stop::kDone) {
                spare_.push_back(warp->give_back());
                warp.reset();
            } else {
                ++waiting;
            }
            if (ready.empty() && waiting > 0) {
                for (std::size_t i = 0; i < running.size(); ++i) {
                    if (running[i] == nullptr) continue;
                    running[i]->pass_block_barrier();
                    ready.push_back(static_cast<std::int64_t>(i));
                }
                waiting = 0;
            }
        }
    }

    Stop run_warp(Warp& warp, Access& access, bool mixes, std::int64_t budget, std::int64_t block,
                  std::int64_t number) {
        try {
            return warp.run(access, draw_, mixes, budget, counts_.instructions);
        } catch (const Fault& fault) {
            const Instruction& at = warp.at();
            throw Fault(fault.status(), launch_.kernel.name + ", block " + std::to_string(block) +
                                            ", warp " + std::to_string(number) + ", " +
                                            fault.what() + "\n    " + at.source + ": " + at.text);
        }
    }

    std::unique_ptr<Warp> make_warp(std::int64_t block, std::int64_t number,
                                    const std::vector<std::byte>& shared,
                                    const std::vector<std::byte>& local) {
        const Kernel& kernel = launch_.kernel;
        const std::int64_t first = number * kWarp;
        const std::int64_t lanes = std::min<std::int64_t>(kWarp, launch_.block.count() - first);
        const Mask mask = lanes == kWarp ? kAllLanes : (1U << lanes) - 1;
        Registers registers = new_registers();
        const Size3& grid = launch_.grid;
        const Size3& size = launch_.block;
        const auto set = [&registers](std::int32_t reg, int lane, std::int64_t value) {
            registers[reg].of[lane] = static_cast<std::uint64_t>(value);
        };
        for (int lane = 0; lane < kWarp; ++lane) {
            const std::int64_t thread = first + lane;
            set(kTidX, lane, thread % size.x);
            set(kTidY, lane, thread / size.x % size.y);
            set(kTidZ, lane, thread / size.x / size.y);
            set(kNtidX, lane, size.x);
            set(kNtidY, lane, size.y);
            set(kNtidZ, lane, size.z);
            set(kCtaidX, lane, block % grid.x);
            set(kCtaidY, lane, block / grid.x % grid.y);
            set(kCtaidZ, lane, block / grid.x / grid.y);
            set(kNctaidX, lane, grid.x);
            set(kNctaidY, lane, grid.y);
            set(kNctaidZ, lane, grid.z);
            set(kLaneid, lane, lane);
            for (const auto& [name, symbol] : kernel.symbols) {
                const std::byte* base = symbol.space == Space::kParam ? launch_.parameters.data()
                                        : symbol.space == Space::kShared
                                            ? shared.data()
                                            : local.data() + thread * kernel.local_bytes;
                set(symbol.reg, lane, reinterpret_cast<std::intptr_t>(base) + symbol.at);
            }
        }
        return std::make_unique<Warp>(kernel, std::move(registers), mask);
    }
    // Reuses the registers of an exited warp, or makes new ones; no code writes their immediates.
    Registers new_registers() {
        if (!spare_.empty()) {
            Registers found = std::move(spare_.back());
            spare_.pop_back();
            return found;
        }
        Registers made(new Register[static_cast<std::size_t>(launch_.kernel.num_registers)]);
        for (const auto& [reg, value] : launch_.kernel.constants) {
            std::fill_n(made[reg].of, kWarp, value);
        }
        return made;
    }

    static constexpr std::int64_t kUnlimited = std::int64_t{1} << 62;
    static constexpr std::uint64_t kMixed =
        16;  // one block in 16, because it takes ten times as long

    const Launch& launch_;
    const Memory& memory_;
    Counts& counts_;
    Draw draw_;
    std::vector<Registers> spare_;
};

}  // namespace

void run(const Launch& launch, const Memory& memory, Counts& counts) {
    ++counts.launches;
    Blocks(launch, memory, counts).run();
}

}  // namespace gpu_sim
