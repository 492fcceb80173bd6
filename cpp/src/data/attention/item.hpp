// SPDX-License-Identifier: Apache-2.0
// Computes one item of attention, from its queries to its results. Each ISA's source includes this
// file inside its own unnamed namespace, after stage.hpp and weights.hpp.

/// The state of an item while it is computed. The vectors of a head of the pool are numbered token
/// by token, `sizes.group` for each token.
struct ItemWork {
    const AttentionJob& job;
    const WorkItem& item;
    std::int64_t vectors;  // of each head of the pool
    bool is_staged;
    SeeingToken* tokens;
    float* queries;
    float* sums;
    float* maxima;
    float* totals;
    float* keeps;
    float* scores;
    float* keys;
    float* across;
    float* values;

    ItemWork(const AttentionJob& of_job, const WorkItem& of_item, float* scratch)
        : job(of_job),
          item(of_item),
          vectors(of_item.num_tokens * of_job.sizes.group),
          is_staged(kvcore::is_staged(*of_job.input, vectors)),
          tokens(reinterpret_cast<SeeingToken*>(scratch + of_job.layout.tokens)),
          queries(scratch + of_job.layout.queries),
          sums(scratch + of_job.layout.sums),
          maxima(scratch + of_job.layout.maxima),
          totals(scratch + of_job.layout.totals),
          keeps(scratch + of_job.layout.keeps),
          scores(scratch + of_job.layout.scores),
          keys(scratch + of_job.layout.keys),
          across(scratch + of_job.layout.across),
          values(scratch + of_job.layout.values) {}

    bool reads_in_pairs(const PagedTensor<const std::byte>& tensor) const {
        return !is_staged && tensor.dtype == DType::kBFloat16;
    }
};

template <DType kDType>
void widen_vector(const std::byte* from, std::int64_t n, float scale, float* to) {
    widen_row<kDType>(from, n, scale, to);
    for (std::int64_t i = n; i % kPadding != 0; ++i) to[i] = 0;
}

// Writes the queries as floats, scaled and padded with zeros, and clears the sums.
inline void begin_item(const ItemWork& work) {
    const AttentionInput& input = *work.job.input;
    const AttentionSizes& sizes = work.job.sizes;
    const auto& q = input.queries;
    constexpr decltype(&widen_vector<DType::kFloat32>) kWiden[] = {widen_vector<DType::kFloat32>,
                                                                   widen_vector<DType::kFloat16>,
                                                                   widen_vector<DType::kBFloat16>};
    const bool in_pairs = work.reads_in_pairs(input.pool.k);
    list_tokens(input, work.item, work.tokens);
    float* query = work.queries;
    for (std::int64_t head = 0; head < work.item.num_heads; ++head) {
        for (std::int64_t i = 0; i < work.item.num_tokens; ++i) {
            for (std::int64_t g = 0; g < sizes.group; ++g) {
                const std::int64_t query_head = (work.item.first_head + head) * sizes.group + g;
                kWiden[static_cast<int>(q.dtype)](
                    q.data + work.tokens[i].token * q.token_stride + query_head * q.head_stride,
                    sizes.key_dim, input.rule.scale, query);
                if (in_pairs) part_pairs(query, sizes.key_dim);
                query += sizes.key_floats;
            }
        }
    }
    const std::int64_t all_vectors = work.vectors * work.item.num_heads;
    for (std::int64_t m = 0; m < all_vectors; ++m) {
        work.maxima[m] = kNothing;
        work.totals[m] = 0;
    }
    for (std::int64_t i = 0; i < all_vectors * sizes.value_floats; ++i) work.sums[i] = 0;
}

// Finds the rows of keys first .. first + n of an item.
inline void find_rows(const ItemWork& work, std::int64_t first, std::int64_t n, TileRows& rows) {
    const auto& pool = work.job.input->pool;
    const auto& table = work.job.input->table;
    const std::uint32_t* pages = table.pages + work.item.stack.row * table.row_stride;
    const auto& k = pool.k.scales;
    const auto& v = pool.v.scales;
    std::int64_t column = first / pool.page_size;
    std::int64_t token = first % pool.page_size;
    for (std::int64_t t = 0; t < n; ++t) {
        const std::int64_t page = pages[column];
        rows.k[t] = pool.k.at(page, token, 0);
        rows.v[t] = pool.v.at(page, token, 0);
        rows.rope[t] = pool.rope.dim > 0 ? pool.rope.at(page, token, 0) : nullptr;
        rows.k_scales[t] =
            k.data == nullptr ? nullptr : k.data + page * k.page_stride + token * k.token_stride;
        rows.v_scales[t] =
            v.data == nullptr ? nullptr : v.data + page * v.page_stride + token * v.token_stride;
        if (++token == pool.page_size) {
            token = 0;
            ++column;
        }
    }
    rows.n = n;
    for (std::int64_t t = n; t < kTileKeys; ++t) {
        rows.k[t] = rows.k[n - 1];
        rows.v[t] = rows.v[n - 1];
    }
}

/// A run of tokens of an item that see the same keys of a tile.
struct Run {
    std::int64_t first_token;
    std::int64_t end_token;
    std::int64_t begin;  // key of the tile
    std::int64_t end;
};

// Visits the runs of a tile of n keys; the tokens of a run are attended together. There are no
// masks: a masked key has weight zero, but zero times a NaN value is NaN.
template <class Visit>
inline void for_each_run(const ItemWork& work, std::int64_t first_key, std::int64_t n,
                         const Visit& visit) {
    const auto clipped = [&](std::int64_t key) {
        const std::int64_t at = key - first_key;
        return at < 0 ? 0 : at < n ? at : n;
    };
    std::int64_t from = 0;
    while (from < work.item.num_tokens) {
        const std::int64_t begin = clipped(work.tokens[from].begin);
        const std::int64_t end = clipped(work.tokens[from].end);
        std::int64_t to = from + 1;
        while (to < work.item.num_tokens && clipped(work.tokens[to].begin) == begin &&
               clipped(work.tokens[to].end) == end) {
            ++to;
        }
        if (begin < end) visit(Run{from, to, begin, end});
        from = to;
    }
}

/// The factor that normalises the sums of an attention state, and its LSE. See `merge_states`.
struct Totals {
    float factor;  // of the sums
    float lse;
};

// `most`, `total`: the largest score and the sum of the weights. The sink adds a weight, but no
// value.
inline Totals close(float most, float total, float sink) {
    const float highest = most > sink ? most : sink;
    if (highest == kNothing) return {0, kNothing};
    const float scale = exponential(all(most - highest))[0];
    const float sum = total * scale + exponential(all(sink - highest))[0];
    return {scale / sum, highest + __builtin_logf(sum)};
}

template <DType kDType>
void narrow_vector(const float* from, std::int64_t n, float factor, std::byte* to) {
    for_lanes(n, [&](std::int64_t i, std::int64_t count) {
        store_elements<kDType>(to, i, count, load<F32>(from + i) * all(factor));
    });
}

constexpr decltype(&narrow_vector<DType::kFloat32>) kNarrowVector[] = {
    narrow_vector<DType::kFloat32>, narrow_vector<DType::kFloat16>,
    narrow_vector<DType::kBFloat16>};

inline void finish_vector(const ItemWork& work, std::int64_t vector, std::int64_t i,
                          std::int64_t query_head) {
    const AttentionJob& job = work.job;
    const auto& q = job.input->queries;
    const auto& out = job.output->values;
    const std::int64_t dim = job.input->pool.v.dim;
    const std::int64_t token = work.tokens[i].token;
    float* sums = work.sums + vector * job.sizes.value_floats;
    if (work.reads_in_pairs(job.input->pool.v)) join_pairs(sums, dim);
    const bool is_part = work.item.slot >= 0;
    const float* sinks = job.input->rule.sinks;
    const float sink = is_part || sinks == nullptr ? kNothing : sinks[query_head];
    const Totals totals = close(work.maxima[vector], work.totals[vector], sink);
    if (is_part) {
        const std::int64_t at = (work.item.slot + i) * q.heads + query_head;
        narrow_vector<DType::kFloat32>(sums, dim, totals.factor,
                                       reinterpret_cast<std::byte*>(job.part_values + at * dim));
        job.part_lse[at] = totals.lse;
        return;
    }
    kNarrowVector[static_cast<int>(out.dtype)](
        sums, dim, totals.factor,
        out.data + token * out.token_stride + query_head * out.head_stride);
    if (job.output->lse != nullptr) job.output->lse[token * q.heads + query_head] = totals.lse;
}
