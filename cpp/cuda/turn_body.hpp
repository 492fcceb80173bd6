// SPDX-License-Identifier: Apache-2.0
// The body of kernels that transpose matrices: a page's head between token order and unit order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy_body.hpp"
#include "kvcore/cuda.hpp"
#include "page_lists.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// The heads of pages; an item is K or V of one head.
template <template <class> class Layers>
struct HeadItems {
    struct Tensor {
        Layers<std::byte> to;
        Layers<const std::byte> from;
        std::int64_t to_page;
        std::int64_t from_page;
        std::int64_t to_head;
        std::int64_t from_head;
    };
    Tensor tensors[2];
    PairList list;  // [items / layers / heads]
    Divider layers;
    Divider heads;
    static constexpr bool kKnowsSource = false;

    [[nodiscard]] bool counts() const noexcept { return false; }
    [[nodiscard]] KVCORE_HOST_DEVICE Place find(int part, std::int64_t item,
                                                bool /*counts*/) const {
        const std::int64_t outer = heads.quotient(item);
        const std::int64_t head = heads.remainder(item, outer);
        const std::int64_t index = layers.quotient(outer);
        const std::int64_t layer = layers.remainder(outer, index);
        const PagePair pair = list.at(index);
        if (!are_pages(pair, list.pages)) return {};
        const Tensor& tensor = tensors[part];
        return {tensor.to.at(layer) + pair.destination * tensor.to_page + head * tensor.to_head,
                tensor.from.at(layer) + pair.source * tensor.from_page + head * tensor.from_head};
    }
};

/// The cut of a head's matrix into lanes, and the strides of its units, in bytes.
struct TurnPart {
    Divider lanes = Divider(1);   // of a head
    Divider tokens = Divider(1);  // number of lanes along the tokens
    std::int64_t units = 0;
    std::int64_t from_token = 0;
    std::int64_t from_unit = 0;
    std::int64_t to_token = 0;
    std::int64_t to_unit = 0;
};

/// A row of a tile: contiguous elements.
template <int kBytes>
struct alignas(kBytes) TileRow {
    std::uint32_t words[kBytes / 4];
};

/// Moves K in units of 16 bytes, a few units of a token for each lane, and V in square tiles of
/// elements, which a lane transposes in registers. Neighbouring lanes have neighbouring tokens,
/// then units, so a warp reads and writes whole sectors on both sides.
template <class Items, int kItem>
struct TurnBody {
    static constexpr int kSide = kItem == 4 ? 4 : 8;  // elements
    static constexpr int kTileBytes = kSide * kItem;  // of a row
    static constexpr int kUnits = 4;
    using Row = TileRow<kTileBytes>;

    Items items;
    TurnPart parts[2];  // of K and V
    bool is_to_packed;
    std::int64_t lanes_of_k;
    std::int64_t all_lanes;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        for (std::int64_t at = lane.index(); at < all_lanes; at += lane.count()) {
            const int which = at < lanes_of_k ? 0 : 1;
            const TurnPart& part = parts[which];
            const std::int64_t index = which == 0 ? at : at - lanes_of_k;
            const std::int64_t item = part.lanes.quotient(index);
            const auto in_head = static_cast<std::uint32_t>(part.lanes.remainder(index, item));
            const std::int64_t unit = part.tokens.small_quotient(in_head);
            const std::int64_t token = in_head - unit * part.tokens.divisor();
            const Place place = items.find(which, item, false);
            if (place.to == nullptr) continue;
            if (which == 0) {
                move_units(part, place, token, unit);
            } else {
                turn(part, place, token * kSide, unit * kSide);
            }
        }
    }

   private:
    // Moves units of a token from unit `first`, in steps of the number of lanes of the token.
    KVCORE_HOST_DEVICE static void move_units(const TurnPart& part, const Place& place,
                                              std::int64_t token, std::int64_t first) {
        const std::int64_t step = (part.units + kUnits - 1) / kUnits;
        const std::byte* from = place.from + token * part.from_token + first * part.from_unit;
        std::byte* to = place.to + token * part.to_token + first * part.to_unit;
        Unit16 held[kUnits] = {};
        KVCORE_UNROLL
        for (int i = 0; i < kUnits; ++i) {
            if (first + i * step >= part.units) continue;
            held[i] = load_unit<Unit16>(from + i * step * part.from_unit);
        }
        KVCORE_UNROLL
        for (int i = 0; i < kUnits; ++i) {
            if (first + i * step >= part.units) continue;
            store_unit(to + i * step * part.to_unit, held[i]);
        }
    }

    KVCORE_HOST_DEVICE void turn(const TurnPart& part, const Place& place, std::int64_t token,
                                 std::int64_t unit) const {
        const std::int64_t from_row = is_to_packed ? part.from_token : part.from_unit;
        const std::int64_t to_row = is_to_packed ? part.to_unit : part.to_token;
        const std::byte* from = place.from + token * part.from_token + unit * part.from_unit;
        std::byte* to = place.to + token * part.to_token + unit * part.to_unit;
        Row rows[kSide];
        KVCORE_UNROLL
        for (int i = 0; i < kSide; ++i) rows[i] = load_unit<Row>(from + i * from_row);
        KVCORE_UNROLL
        for (int i = 0; i < kSide; ++i) store_unit(to + i * to_row, column_of(rows, i));
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Row column_of(const Row (&rows)[kSide], int column) {
        constexpr int kOfWord = 4 / kItem;
        constexpr std::uint32_t kElement = kItem == 4 ? ~0U : (1U << (8 * (kItem % 4))) - 1;
        const int shift = column % kOfWord * kItem * 8;
        Row found{};
        KVCORE_UNROLL
        for (int i = 0; i < kSide; ++i) {
            const std::uint32_t element = rows[i].words[column / kOfWord] >> shift & kElement;
            found.words[i / kOfWord] |= element << (i % kOfWord * kItem * 8);
        }
        return found;
    }
};

}  // namespace kvcore::cuda
