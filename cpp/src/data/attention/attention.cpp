// SPDX-License-Identifier: Apache-2.0
#include "kvcore/attention.hpp"

#include <algorithm>
#include <atomic>

#include "data/attention/attention.hpp"
#include "data/attention/plan.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

// The cost that is worth a thread, in multiply-adds of a key with all vectors.
constexpr std::int64_t kCostWorthAThread = 1 << 15;

/// The offsets of the parts of a workspace, in bytes.
struct WorkspaceLayout {
    PlanCounts counts;
    ScratchLayout scratch;
    std::int64_t threads;
    std::int64_t items;
    std::int64_t begins;
    std::int64_t slots;
    std::int64_t part_values;
    std::int64_t part_lse;
    std::int64_t scratches;
    std::int64_t size = 0;

    WorkspaceLayout(const AttentionInput& input, int most_threads)
        : counts(count_plan(input)), scratch(AttentionSizes(input), counts.limits) {
        const std::int64_t heads = input.queries.heads;
        const std::int64_t tokens = input.offsets[input.table.batch];
        threads = std::clamp<std::int64_t>(std::min<std::int64_t>(most_threads, counts.items), 1,
                                           counts.cost / kCostWorthAThread + 1);
        items = take(counts.items * std::int64_t{sizeof(WorkItem)});
        begins = take((tokens + 2) * std::int64_t{sizeof(std::int64_t)});
        slots = take(counts.parts * std::int64_t{sizeof(std::int64_t)});
        part_values = take(counts.parts * heads * input.pool.v.dim * std::int64_t{sizeof(float)});
        part_lse = take(counts.parts * heads * std::int64_t{sizeof(float)});
        scratches = take(threads * scratch.size * std::int64_t{sizeof(float)});
    }

   private:
    std::int64_t take(std::int64_t bytes) noexcept {
        constexpr std::int64_t kAlignment = 64;
        const std::int64_t at = size;
        size += (bytes + kAlignment - 1) / kAlignment * kAlignment;
        return at;
    }
};

template <class T>
T* at(std::byte* workspace, std::int64_t offset) noexcept {
    return reinterpret_cast<T*>(workspace + offset);
}

}  // namespace

std::int64_t attention_workspace_bytes(const AttentionInput& input, int threads) {
    constexpr std::int64_t kToAlign = 64;
    return WorkspaceLayout(input, threads).size + kToAlign;
}

void cpu::attention_by(const AttentionKernels& kernels, const AttentionInput& input,
                       const AttentionOutput& output, std::byte* workspace, int threads) {
    const WorkspaceLayout layout(input, threads);
    workspace += -reinterpret_cast<std::uintptr_t>(workspace) & 63U;
    AttentionJob job{
        &input,
        &output,
        AttentionSizes(input),
        layout.scratch,
        {at<WorkItem>(workspace, layout.items), at<std::int64_t>(workspace, layout.begins),
         at<std::int64_t>(workspace, layout.slots)},
        at<float>(workspace, layout.part_values),
        at<float>(workspace, layout.part_lse)};
    write_plan(input, layout.counts, job.plan);
    auto* scratches = at<float>(workspace, layout.scratches);
    std::atomic<std::int64_t> next{0};
    const int workers = static_cast<int>(layout.threads);
    cpu::parallel_for(workers, 1, workers, [&](std::int64_t worker, std::int64_t) {
        float* scratch = scratches + worker * layout.scratch.size;
        for (std::int64_t i = next++; i < job.plan.num_items; i = next++) {
            kernels.attend(job, job.plan.items[i], scratch);
        }
    });
    const std::int64_t tokens = input.offsets[input.table.batch];
    if (job.plan.begins[tokens] == 0) return;
    const std::int64_t bytes = input.queries.heads * input.pool.v.dim * std::int64_t{sizeof(float)};
    const std::int64_t mergers =
        std::clamp<std::int64_t>(tokens / cpu::worth_a_thread(bytes), 1, workers);
    cpu::parallel_for(
        mergers, 1, static_cast<int>(mergers), [&](std::int64_t merger, std::int64_t next_merger) {
            kernels.merge_parts(job, tokens * merger / mergers, tokens * next_merger / mergers,
                                scratches + merger * layout.scratch.size);
        });
}

void attention(const AttentionInput& input, const AttentionOutput& output, std::byte* workspace,
               int threads) {
    cpu::attention_by(cpu::kernels().attention, input, output, workspace, threads);
}

void merge_states(std::int64_t n, std::int64_t dim, DType dtype, AttentionStates a,
                  AttentionStates b, std::byte* values, float* lse, int threads) {
    const auto merge = cpu::kernels().attention.merge_two[static_cast<int>(dtype)];
    cpu::parallel_for(
        n, cpu::worth_a_thread(3 * dim * item_size(dtype)), threads,
        [&](std::int64_t begin, std::int64_t end) { merge(begin, end, dim, a, b, values, lse); });
}

}  // namespace kvcore
