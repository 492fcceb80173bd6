// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>

#include "isa.hpp"
#include "kvcore/kernels.hpp"
#include "parallel.hpp"

namespace kvcore {
namespace {

int narrow_index(DType dtype) noexcept {
    return dtype == DType::kFloat8E4M3FN ? 0 : dtype == DType::kFloat8E5M2 ? 1 : 2;
}

const cpu::WideKernels& kernels_of(DType wide) {
    return cpu::kernels().wide[static_cast<int>(wide)];
}

std::int64_t worth(std::int64_t elements_each) noexcept {
    return cpu::worth_a_thread(elements_each * item_size(DType::kFloat32));
}

// Calls body(head, its offset in elements) for each run of `dim` elements of some rows.
template <class Body>
void for_each_run(HeadRows shape, std::int64_t begin, std::int64_t end, const Body& body) {
    for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t head = 0; head < shape.heads; ++head) {
            body(head, (row * shape.heads + head) * shape.dim);
        }
    }
}

// One scale for each head, from all rows: each thread finds its rows' largest, then all are merged.
void find_scales(HeadRows shape, DType wide, const std::byte* source, DType narrow, float* scales,
                 int threads) {
    const auto largest_magnitude = kernels_of(wide).largest_magnitude;
    std::fill(scales, scales + shape.heads, 0.0F);
    std::mutex merging;
    cpu::parallel_for(
        shape.rows, worth(shape.heads * shape.dim), threads,
        [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t head = 0; head < shape.heads; ++head) {
                float most = 0;
                for (std::int64_t row = begin; row < end; ++row) {
                    const std::int64_t at = (row * shape.heads + head) * shape.dim;
                    most =
                        std::max(most, largest_magnitude(source + at * item_size(wide), shape.dim));
                }
                const std::lock_guard<std::mutex> lock(merging);
                scales[head] = std::max(scales[head], most);
            }
        });
    for (std::int64_t head = 0; head < shape.heads; ++head) {
        scales[head] = std::max(scales[head] / largest(narrow), cpu::kSmallestScale);
    }
}

}  // namespace

void quantize(Groups shape, DType wide, const std::byte* source, DType narrow, std::byte* codes,
              float* scales, int threads) {
    const auto kernel = kernels_of(wide).quantize_groups[narrow_index(narrow)];
    cpu::parallel_for(
        shape.groups, worth(shape.group), threads, [&](std::int64_t begin, std::int64_t end) {
            kernel(source + begin * shape.group * item_size(wide), codes + begin * shape.group,
                   scales + begin, end - begin, shape.group, largest(narrow));
        });
}

void quantize(HeadRows shape, DType wide, const std::byte* source, DType narrow, std::byte* codes,
              float* scales, int threads) {
    find_scales(shape, wide, source, narrow, scales, threads);
    quantize_by(shape, wide, source, narrow, codes, scales, threads);
}

void quantize_by(HeadRows shape, DType wide, const std::byte* source, DType narrow,
                 std::byte* codes, const float* scales, int threads) {
    const auto kernel = kernels_of(wide).narrow[narrow_index(narrow)];
    cpu::parallel_for(shape.rows, worth(shape.heads * shape.dim), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          for_each_run(shape, begin, end, [&](std::int64_t head, std::int64_t at) {
                              kernel(source + at * item_size(wide), codes + at, shape.dim,
                                     1.0F / scales[head]);
                          });
                      });
}

void dequantize(Groups shape, DType narrow, const std::byte* codes, const float* scales, DType wide,
                std::byte* destination, int threads) {
    const auto kernel = kernels_of(wide).dequantize_groups[narrow_index(narrow)];
    cpu::parallel_for(
        shape.groups, worth(shape.group), threads, [&](std::int64_t begin, std::int64_t end) {
            kernel(codes + begin * shape.group, scales + begin,
                   destination + begin * shape.group * item_size(wide), end - begin, shape.group);
        });
}

void dequantize(HeadRows shape, DType narrow, const std::byte* codes, const float* scales,
                DType wide, std::byte* destination, int threads) {
    const auto kernel = kernels_of(wide).widen[narrow_index(narrow)];
    cpu::parallel_for(shape.rows, worth(shape.heads * shape.dim), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          for_each_run(shape, begin, end, [&](std::int64_t head, std::int64_t at) {
                              kernel(codes + at, destination + at * item_size(wide), shape.dim,
                                     scales[head]);
                          });
                      });
}

}  // namespace kvcore
