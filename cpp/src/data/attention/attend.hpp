// SPDX-License-Identifier: Apache-2.0
// Attends the keys of an item: K and V are read in place, or converted in scratch first. Each ISA's
// source includes this file inside its own unnamed namespace, after item.hpp.

inline RunningStates states_of(const ItemWork& work, std::int64_t vector) {
    return {work.maxima + vector, work.totals + vector, work.keeps};
}

inline Sums sums_of(const ItemWork& work, std::int64_t vector) {
    const std::int64_t stride = work.job.sizes.value_floats;
    return {work.sums + vector * stride, stride, work.keeps};
}

// A head of a tile. While one place is computed, the next place is prefetched: the next head, or
// the first head of the next tile.
struct Place {
    const TileRows& tile;
    std::int64_t head;  // of the pool

    HeadRowsAt keys(const ItemWork& work) const {
        return {tile.k, head * work.job.input->pool.k.head_stride};
    }
    HeadRowsAt values(const ItemWork& work) const {
        return {tile.v, head * work.job.input->pool.v.head_stride};
    }
};

// ---- few queries: K and V are read in place ----------------------------------------------------

// The factors that turn the codes of each key of a tile into elements: the key's scale, if the
// tensor has scales, times the constant that reading leaves out. Each key has only one factor:
// scores and weights are multiplied by it, not the elements.
struct KeyFactors {
    bool are_ones;
    float of[kTileKeys];

    KeyFactors(const PagedTensor<const std::byte>& tensor, const std::byte* const* scales,
               std::int64_t n, std::int64_t head) {
        const float constant = kReadFactor[static_cast<int>(tensor.dtype)];
        const bool has_scales = tensor.scales.data != nullptr;
        are_ones = !has_scales && constant == 1;
        if (are_ones) return;
        for (std::int64_t t = 0; t < kTileKeys; ++t) {
            float scale = 1;
            if (has_scales && t < n) {
                __builtin_memcpy(&scale, scales[t] + head * tensor.scales.head_stride,
                                 sizeof scale);
            }
            of[t] = scale * constant;
        }
    }

    // rows[m][t] *= of[t] for n rows and keys begin .. end, rounded outwards to whole groups of
    // sixteen.
    void apply(std::int64_t n, float* rows, std::int64_t begin, std::int64_t end) const {
        if (are_ones) return;
        for (std::int64_t t = begin / 16 * 16; t < end; t += kLanes) {
            const F32 factor = load<F32>(of + t);
            for (std::int64_t m = 0; m < n; ++m) {
                float* at = rows + m * kTileKeys + t;
                store(at, load<F32>(at) * factor);
            }
        }
    }
};

inline void attend_direct(const ItemWork& work, std::int64_t first_key, const Place& now,
                          const Place& next) {
    const auto& pool = work.job.input->pool;
    const AttentionSizes& sizes = work.job.sizes;
    const Dots dots_of = kDots[static_cast<int>(pool.k.dtype)];
    const AddValues add_values_of = kAddValues[static_cast<int>(pool.v.dtype)];
    const std::int64_t first_vector = (now.head - work.item.first_head) * work.vectors;
    const KeyFactors of_keys(pool.k, now.tile.k_scales, now.tile.n, now.head);
    const KeyFactors of_values(pool.v, now.tile.v_scales, now.tile.n, now.head);
    for_each_run(work, first_key, now.tile.n, [&](const Run& run) {
        const std::int64_t n = (run.end_token - run.first_token) * sizes.group;
        const std::int64_t vector = first_vector + run.first_token * sizes.group;
        dots_of(n, work.queries + vector * sizes.key_floats, sizes.key_floats, now.keys(work),
                next.keys(work), pool.k.dim, run.begin, run.end, work.scores, kTileKeys);
        of_keys.apply(n, work.scores, run.begin, run.end);
        weigh(n, work.scores, run.begin, run.end, work.job.input->rule.soft_cap,
              states_of(work, vector));
        of_values.apply(n, work.scores, run.begin, run.end);
        add_values_of(n, Weights{work.scores}, now.values(work), next.values(work), pool.v.dim,
                      run.begin, run.end, sums_of(work, vector));
    });
}

// ---- many queries: K and V are converted once for all queries ----------------------------------

inline void stage_nvfp4(const ItemWork& work, const Place& now) {
    const auto& pool = work.job.input->pool;
    const AttentionSizes& sizes = work.job.sizes;
    const TileRows& rows = now.tile;
    const Nvfp4Globals& global = work.job.input->nvfp4;
    stage_blocks(now.keys(work), rows.n, pool.k.dim, rows.k_scales,
                 now.head * pool.k.scales.head_stride, global.k, work.keys, sizes.key_floats);
    transpose(work.keys, sizes.key_floats, rows.n, sizes.key_dim, work.across);
    if (sizes.values_are_keys) return;
    stage_blocks(now.values(work), rows.n, pool.v.dim, rows.v_scales,
                 now.head * pool.v.scales.head_stride, global.v, work.values, sizes.value_floats);
}

inline void stage(const ItemWork& work, const Place& now) {
    const auto& pool = work.job.input->pool;
    const AttentionSizes& sizes = work.job.sizes;
    const TileRows& rows = now.tile;
    if (work.job.input->nvfp4.is_nvfp4) return stage_nvfp4(work, now);
    kStageRows[static_cast<int>(pool.k.dtype)](now.keys(work), rows.n, pool.k.dim, rows.k_scales,
                                               now.head * pool.k.scales.head_stride,
                                               pool.k.scales.group, work.keys, sizes.key_floats);
    if (pool.rope.dim > 0) {
        constexpr const std::byte* kNone[kTileKeys] = {};
        kStageRows[static_cast<int>(pool.rope.dtype)]({rows.rope, now.head * pool.rope.head_stride},
                                                      rows.n, pool.rope.dim, kNone, 0, 1,
                                                      work.keys + pool.k.dim, sizes.key_floats);
    }
    transpose(work.keys, sizes.key_floats, rows.n, sizes.key_dim, work.across);
    if (sizes.values_are_keys) return;
    kStageRows[static_cast<int>(pool.v.dtype)](
        now.values(work), rows.n, pool.v.dim, rows.v_scales, now.head * pool.v.scales.head_stride,
        pool.v.scales.group, work.values, sizes.value_floats);
}

// Prefetches part i of n of the keys and values of a head.
[[gnu::always_inline]] inline void ask_for_part(const ItemWork& work, const Place& place,
                                                std::int64_t i, std::int64_t n) {
    const auto& pool = work.job.input->pool;
    const std::int64_t per_byte = work.job.input->nvfp4.is_nvfp4 ? 2 : 1;
    for (std::int64_t t = kTileKeys * i / n; t < kTileKeys * (i + 1) / n; ++t) {
        ask_for_row(place.keys(work).at(t), pool.k.dim * item_size(pool.k.dtype) / per_byte);
        if (work.job.sizes.values_are_keys) continue;
        ask_for_row(place.values(work).at(t), pool.v.dim * item_size(pool.v.dtype) / per_byte);
    }
}

inline void attend_staged(const ItemWork& work, std::int64_t first_key, const Place& now,
                          const Place& next) {
    const AttentionSizes& sizes = work.job.sizes;
    const std::int64_t stride = sizes.values_are_keys ? sizes.key_floats : sizes.value_floats;
    const DenseRows keys{work.across, kTileKeys, kTileKeys};
    const DenseRows values{work.values, stride, stride};
    const std::int64_t first_vector = (now.head - work.item.first_head) * work.vectors;
    const std::int64_t parts = work.vectors / kBlockVectors + 1;
    stage(work, now);
    for_each_run(work, first_key, now.tile.n, [&](const Run& run) {
        const std::int64_t end = run.end_token * sizes.group;
        for (std::int64_t m = run.first_token * sizes.group; m < end; m += kBlockVectors) {
            const std::int64_t n = end - m < kBlockVectors ? end - m : kBlockVectors;
            const std::int64_t vector = first_vector + m;
            ask_for_part(work, next, m / kBlockVectors, parts);
            add_products_to(n, Factors{work.queries + vector * sizes.key_floats, sizes.key_floats},
                            keys, 0, sizes.key_dim, run.begin / 16 * 16, (run.end + 15) / 16 * 16,
                            Sums{work.scores, kTileKeys, nullptr});
            weigh(n, work.scores, run.begin, run.end, work.job.input->rule.soft_cap,
                  states_of(work, vector));
            add_products_to(n, Weights{work.scores}, values, run.begin, run.end, 0,
                            sizes.value_floats, sums_of(work, vector));
        }
    });
}

// ------------------------------------------------------------------------------------------------

void attend(const AttentionJob& job, const WorkItem& item, float* scratch) {
    const ItemWork work(job, item, scratch);
    begin_item(work);
    TileRows tiles[2];
    const auto tile_of = [&](std::int64_t key) -> TileRows& {
        return tiles[(key - item.first_key) / kTileKeys % 2];
    };
    const auto find_tile = [&](std::int64_t key) {
        const std::int64_t left = item.end_key - key;
        find_rows(work, key, left < kTileKeys ? left : kTileKeys, tile_of(key));
    };
    if (item.first_key < item.end_key) find_tile(item.first_key);
    for (std::int64_t key = item.first_key; key < item.end_key; key += kTileKeys) {
        const bool is_last = key + kTileKeys >= item.end_key;
        if (!is_last) find_tile(key + kTileKeys);
        const TileRows& now = tile_of(key);
        const TileRows& next = tile_of(is_last ? key : key + kTileKeys);
        const std::int64_t end_head = item.first_head + item.num_heads;
        for (std::int64_t head = item.first_head; head < end_head; ++head) {
            const Place later =
                head + 1 < end_head ? Place{now, head + 1} : Place{next, item.first_head};
            (work.is_staged ? attend_staged : attend_direct)(work, key, {now, head}, later);
        }
    }
    std::int64_t vector = 0;
    for (std::int64_t head = item.first_head; head < item.first_head + item.num_heads; ++head) {
        for (std::int64_t i = 0; i < item.num_tokens; ++i) {
            for (std::int64_t g = 0; g < job.sizes.group; ++g) {
                finish_vector(work, vector++, i, head * job.sizes.group + g);
            }
        }
    }
}
