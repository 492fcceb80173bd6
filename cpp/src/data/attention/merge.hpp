// SPDX-License-Identifier: Apache-2.0
// Merges attention over disjoint keys. Each ISA's source includes this file inside its own unnamed
// namespace, after item.hpp.

inline float exponential_of(float x) { return exponential(all(x))[0]; }

// to = a * of_a + b * of_b. An operand with factor 0 is not read.
template <DType kDType>
void blend(std::int64_t n, const std::byte* a, float of_a, const std::byte* b, float of_b,
           std::byte* to) {
    for_lanes(n, [&](std::int64_t i, std::int64_t count) {
        F32 value{};
        if (of_a != 0) value = load_elements<kDType>(a, i, count) * all(of_a);
        if (of_b != 0) value = fused(load_elements<kDType>(b, i, count), all(of_b), value);
        store_elements<kDType>(to, i, count, value);
    });
}

// An LSE of +inf also means an empty state.
inline float known(float lse) { return lse == -kNothing ? kNothing : lse; }

template <DType kDType>
void merge_two(std::int64_t begin, std::int64_t end, std::int64_t dim, AttentionStates a,
               AttentionStates b, std::byte* values, float* lse) {
    const std::int64_t size = dim * item_size(kDType);
    for (std::int64_t i = begin; i < end; ++i) {
        const float of_a = known(a.lse[i]);
        const float of_b = known(b.lse[i]);
        const float most = of_b > of_a ? of_b : of_a;
        const float origin = most == kNothing ? 0 : most;
        const float weight_a = exponential_of(of_a - origin);
        const float weight_b = exponential_of(of_b - origin);
        const float sum = weight_a + weight_b;
        const float factor = most == kNothing ? 0 : 1 / sum;
        blend<kDType>(dim, a.values + i * size, weight_a * factor, b.values + i * size,
                      weight_b * factor, values + i * size);
        lse[i] = most == kNothing ? kNothing : most + __builtin_logf(sum);
    }
}

// Merges the parts of one query, in the order of their keys.
inline void merge_vector(const AttentionJob& job, std::int64_t token, std::int64_t query_head,
                         float* sums) {
    const std::int64_t dim = job.input->pool.v.dim;
    const auto& out = job.output->values;
    const std::int64_t* slots = job.plan.slots + job.plan.begins[token];
    const std::int64_t n = job.plan.begins[token + 1] - job.plan.begins[token];
    const auto place = [&](std::int64_t i) {
        return slots[i] * job.input->queries.heads + query_head;
    };
    float most = kNothing;
    for (std::int64_t i = 0; i < n; ++i) {
        const float lse = job.part_lse[place(i)];
        most = lse > most ? lse : most;
    }
    float total = 0;
    for (std::int64_t i = 0; i < dim; ++i) sums[i] = 0;
    for (std::int64_t i = 0; i < n && most > kNothing; ++i) {
        const float weight = exponential_of(job.part_lse[place(i)] - most);
        total += weight;
        const auto* values = reinterpret_cast<const std::byte*>(job.part_values + place(i) * dim);
        auto* to = reinterpret_cast<std::byte*>(sums);
        blend<DType::kFloat32>(dim, to, 1, values, weight, to);
    }
    const float* sinks = job.input->rule.sinks;
    const Totals totals = close(most, total, sinks == nullptr ? kNothing : sinks[query_head]);
    kNarrowVector[static_cast<int>(out.dtype)](
        sums, dim, totals.factor,
        out.data + token * out.token_stride + query_head * out.head_stride);
    if (job.output->lse == nullptr) return;
    job.output->lse[token * job.input->queries.heads + query_head] = totals.lse;
}

void merge_parts(const AttentionJob& job, std::int64_t begin, std::int64_t end, float* scratch) {
    for (std::int64_t token = begin; token < end; ++token) {
        if (job.plan.begins[token] == job.plan.begins[token + 1]) continue;
        for (std::int64_t head = 0; head < job.input->queries.heads; ++head) {
            merge_vector(job, token, head, scratch);
        }
    }
}

constexpr AttentionKernels attention_kernels() noexcept {
    return {attend,
            merge_parts,
            {merge_two<DType::kFloat32>, merge_two<DType::kFloat16>, merge_two<DType::kBFloat16>}};
}
