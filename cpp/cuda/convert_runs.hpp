// SPDX-License-Identifier: Apache-2.0
// Converts elements to another dtype, as runs that share a scale. Runs are in contiguous memory, or
// they are tokens of a batch in the pages of a pool.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch_tokens.hpp"
#include "kvcore/cuda.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// The strides to the run of a token, a head and a group, in bytes. Memory of pages has no `token`;
/// contiguous memory has no `page` and no `entry`.
struct RunStrides {
    std::int64_t page = 0;
    std::int64_t entry = 0;
    std::int64_t token = 0;
    std::int64_t head = 0;
    std::int64_t group = 0;
    bool is_paged = false;

    /// Returns the offset of a head of a token.
    template <class Index>
    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t offset(const TokenPlace& place, Index at,
                                                         Index of_head) const noexcept {
        const std::int64_t in_token = std::int64_t{of_head} * head;
        if (!is_paged) return in_token + std::int64_t{at} * token;
        // Tables store page ids with 32 bits.
        const auto of_page = static_cast<std::uint32_t>(place.page);
        return in_token + std::int64_t{of_page} * page + place.entry * entry;
    }
    /// Returns the widest unit that divides the addresses of all runs.
    [[nodiscard]] std::int64_t alignment(const std::byte* data) const noexcept {
        return alignment_of(data, page, entry, token, head, group);
    }
};

/// Elements [tokens, heads, groups, group].
struct Runs {
    std::int64_t tokens = 0;
    std::int64_t heads = 1;
    std::int64_t groups = 1;  // of a head
    std::int64_t group = 0;   // elements
    const std::byte* source = nullptr;
    RunStrides from;
    std::byte* destination = nullptr;
    RunStrides to;
    const std::byte* scales = nullptr;  // float32, at any address; nullptr: all are `scale`
    float scale = 1.0F;                 // of codes that are written
    std::byte* new_scales = nullptr;    // destination of computed scales, instead of `scales`
    RunStrides of_scales;
    BatchTokens places{{}, 1, nullptr};
    bool is_paged = false;

    [[nodiscard]] std::int64_t elements() const noexcept { return tokens * heads * groups * group; }
};

/// Converts wide elements to codes. Computes their scales if `new_scales` is set.
[[nodiscard]] Status quantize_runs(const Runs& runs, DType wide, DType narrow,
                                   Stream stream) noexcept;
/// Converts elements of any dtype to another, wide dtype. Narrow elements are multiplied by their
/// scales.
[[nodiscard]] Status widen_runs(const Runs& runs, DType from, DType wide, Stream stream) noexcept;

/// Converts K and V, whose tokens are at the same places. If the shapes and the widths of pieces
/// are the same, one launch converts both and looks up each token once.
[[nodiscard]] Status quantize_runs(const Runs& k, const Runs& v, DType wide, DType narrow,
                                   Stream stream) noexcept;
[[nodiscard]] Status widen_runs(const Runs& k, const Runs& v, DType from, DType wide,
                                Stream stream) noexcept;

// ---- implementation -----------------------------------------------------------------------------

/// A part of a run: the work of a team of lanes.
struct RunPart {
    const std::byte* source = nullptr;
    std::byte* destination = nullptr;
    std::int64_t scale = 0;  // offset
};

/// The same part of a run, for each tensor.
template <int kTensors>
struct FoundParts {
    RunPart of[kTensors];
    std::int64_t pieces = 0;  // of elements; 0: nothing to do
};

/// The runs of tensors that have the same shape and the same places of tokens.
template <int kTensors>
struct RunsOf {
    Runs of[kTensors];
};

/// Cuts runs into numbered parts of at most `pieces_of_part` pieces.
template <int kTensors>
class RunParts {
   public:
    /// `piece`: elements of a piece; `item_from`, `item_to`: bytes of an element.
    RunParts(const RunsOf<kTensors>& runs, std::int64_t piece, std::int64_t item_from,
             std::int64_t item_to, std::int64_t pieces_of_part) noexcept
        : runs_(runs),
          pieces_(first().group / piece),
          of_part_(pieces_of_part),
          from_bytes_(pieces_of_part * piece * item_from),
          to_bytes_(pieces_of_part * piece * item_to),
          of_run_((pieces_ + pieces_of_part - 1) / pieces_of_part),
          of_head_(of_run_.divisor() * first().groups),
          of_token_(of_head_.divisor() * first().heads),
          is_small_(count() < Divider::kSmall) {}

    [[nodiscard]] std::int64_t count() const noexcept {
        return first().tokens * of_token_.divisor();
    }
    [[nodiscard]] KVCORE_HOST_DEVICE const Runs& runs(int tensor) const noexcept {
        return runs_.of[tensor];
    }

    /// Returns part i. `counts`: the calling lane counts tokens without a page for its team.
    [[nodiscard]] KVCORE_HOST_DEVICE FoundParts<kTensors> find(std::int64_t i,
                                                               bool counts) const noexcept {
        return is_small_ ? find_as(static_cast<std::uint32_t>(i), counts) : find_as(i, counts);
    }

   private:
    [[nodiscard]] KVCORE_HOST_DEVICE const Runs& first() const noexcept { return runs_.of[0]; }
    [[nodiscard]] KVCORE_HOST_DEVICE static std::uint32_t quotient(const Divider& by,
                                                                   std::uint32_t of) noexcept {
        return by.small_quotient(of);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static std::int64_t quotient(const Divider& by,
                                                                  std::int64_t of) noexcept {
        return by.quotient(of);
    }

    // Most runs are a whole head and are not cut: the steps for other runs are skipped.
    template <class Index>
    [[nodiscard]] KVCORE_HOST_DEVICE FoundParts<kTensors> find_as(Index i,
                                                                  bool counts) const noexcept {
        const Index token = quotient(of_token_, i);
        const Index in_token = i - token * static_cast<Index>(of_token_.divisor());
        TokenPlace place{0, 0};
        if (first().is_paged) place = first().places.find(token, counts && in_token == 0);
        if (place.page < 0) return {};
        const bool is_whole = of_head_.divisor() == 1;
        const Index head = is_whole ? in_token : quotient(of_head_, in_token);
        FoundParts<kTensors> found;
        found.pieces = pieces_;
        KVCORE_UNROLL
        for (int tensor = 0; tensor < kTensors; ++tensor) {
            const Runs& runs = runs_.of[tensor];
            found.of[tensor] = {runs.source + runs.from.offset(place, token, head),
                                runs.destination + runs.to.offset(place, token, head),
                                runs.of_scales.offset(place, token, head)};
        }
        if (is_whole) return found;
        const std::int64_t in_head = in_token - head * static_cast<Index>(of_head_.divisor());
        const std::int64_t group = of_run_.quotient(in_head);
        const std::int64_t part = of_run_.remainder(in_head, group);
        const std::int64_t left = pieces_ - part * of_part_;
        found.pieces = left < of_part_ ? left : of_part_;
        KVCORE_UNROLL
        for (int tensor = 0; tensor < kTensors; ++tensor) {
            const Runs& runs = runs_.of[tensor];
            found.of[tensor].source += group * runs.from.group + part * from_bytes_;
            found.of[tensor].destination += group * runs.to.group + part * to_bytes_;
            found.of[tensor].scale += group * runs.of_scales.group;
        }
        return found;
    }

    RunsOf<kTensors> runs_;
    std::int64_t pieces_;  // of a run
    std::int64_t of_part_;
    std::int64_t from_bytes_;  // of a whole part
    std::int64_t to_bytes_;
    Divider of_run_;  // parts
    Divider of_head_;
    Divider of_token_;
    bool is_small_;
};

/// True if K and V may be converted in one launch. Does not check the widths of pieces.
[[nodiscard]] inline bool are_alike(const Runs& k, const Runs& v) noexcept {
    return k.tokens == v.tokens && k.heads == v.heads && k.groups == v.groups &&
           k.group == v.group && (k.new_scales == nullptr) == (v.new_scales == nullptr);
}

/// True if runs may be converted in pieces of `count` elements.
[[nodiscard]] inline bool takes_pieces(const Runs& runs, std::int64_t count, std::int64_t item_from,
                                       std::int64_t item_to) noexcept {
    const auto needed = [&](std::int64_t item) { return count * item < 16 ? count * item : 16; };
    return runs.group % count == 0 && runs.from.alignment(runs.source) >= needed(item_from) &&
           runs.to.alignment(runs.destination) >= needed(item_to);
}

}  // namespace kvcore::cuda
