// SPDX-License-Identifier: Apache-2.0
// Copies strided blocks of bytes in the fewest runs that are contiguous on both sides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "data/copy_runs.hpp"

namespace kvcore {

/// Steps along one axis on both sides, in bytes.
struct CopyAxis {
    std::int64_t count;
    std::int64_t to_stride;
    std::int64_t from_stride;
};

/// Runs of `run` bytes along up to kMaxAxes axes. The axis with the longest steps in the
/// destination is outermost. An axis without gaps on both sides becomes part of the run, so a page
/// that is one piece has no axes left.
class CopyNest {
   public:
    static constexpr std::size_t kMaxAxes = 5;

    constexpr CopyNest() = default;
    CopyNest(std::int64_t run, const std::array<CopyAxis, kMaxAxes>& axes) noexcept : run_(run) {
        for (const CopyAxis& axis : axes) {
            if (axis.count != 1) insert(axis);
            if (axis.count == 0) run_ = 0;
        }
        while (lengthen_run()) {
        }
        merge_axes();
    }

    /// Passes all runs to the copier.
    void copy(std::byte* to, const std::byte* from, RunCopier& copier) const noexcept {
        if (run_ > 0) copy_axis(0, to, from, copier);
    }

   private:
    // Inserts an axis after the axes with longer steps.
    void insert(const CopyAxis& axis) noexcept {
        std::size_t i = size_++;
        for (; i > 0 && std::abs(axes_[i - 1].to_stride) < std::abs(axis.to_stride); --i) {
            axes_[i] = axes_[i - 1];
        }
        axes_[i] = axis;
    }

    // Makes one axis a part of the run; returns false if no axis has steps as long as the run.
    bool lengthen_run() noexcept {
        for (std::size_t i = 0; i < size_; ++i) {
            const CopyAxis axis = axes_[i];
            if (axis.to_stride != run_ || axis.from_stride != run_) continue;
            run_ *= axis.count;
            remove(i);
            return true;
        }
        return false;
    }

    // Merges two neighbouring axes if the steps of the outer axis are as long as the whole inner
    // axis.
    void merge_axes() noexcept {
        for (std::size_t i = 0; i + 1 < size_;) {
            CopyAxis& outer = axes_[i];
            CopyAxis& inner = axes_[i + 1];
            if (outer.to_stride != inner.to_stride * inner.count ||
                outer.from_stride != inner.from_stride * inner.count) {
                ++i;
                continue;
            }
            inner.count *= outer.count;
            remove(i);
        }
    }

    void remove(std::size_t i) noexcept {
        for (--size_; i < size_; ++i) axes_[i] = axes_[i + 1];
    }

    void copy_axis(std::size_t depth, std::byte* to, const std::byte* from,
                   RunCopier& copier) const noexcept {
        if (depth == size_) return copier.copy(to, from, run_);
        const CopyAxis axis = axes_[depth];
        for (std::int64_t i = 0; i < axis.count; ++i) {
            copy_axis(depth + 1, to + i * axis.to_stride, from + i * axis.from_stride, copier);
        }
    }

    std::array<CopyAxis, kMaxAxes> axes_ = {};
    std::size_t size_ = 0;
    std::int64_t run_ = 0;
};

}  // namespace kvcore
