// SPDX-License-Identifier: Apache-2.0
// Converts between dtypes with a scale. Each ISA's source includes this file inside its own unnamed
// namespace, after lanes.hpp.

// Calls body(index of the first element, elements) for runs of at most kLanes.
template <class Body>
inline void for_lanes(std::int64_t n, Body&& body) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, n - i);
}

template <DType kDType>
inline F32 load_elements(const std::byte* from, std::int64_t i, std::int64_t n) {
    using Storage = typename Element<kDType>::Storage;
    const std::byte* at = from + i * item_size(kDType);
    return Element<kDType>::widen(n == kLanes ? load<Storage>(at) : load_some<Storage>(at, n));
}

template <class Storage>
inline void store_codes(std::byte* at, std::int64_t n, Storage codes) {
    if (n == kLanes) {
        store(at, codes);
    } else {
        store_some(at, codes, n);
    }
}

template <DType kDType>
inline void store_elements(std::byte* to, std::int64_t i, std::int64_t n, F32 value) {
    store_codes(to + i * item_size(kDType), n, Element<kDType>::narrow(value));
}

// ---- the largest magnitude ---------------------------------------------------------------------

// This pass waits for memory: the processor's own prefetcher is late while codes are computed.
template <std::int64_t kBytes>
inline void fetch_ahead(const std::byte* at) {
    constexpr std::int64_t kAhead = 1024;
    constexpr std::int64_t kLine = 64;
    for (std::int64_t line = 0; line < kBytes; line += kLine)
        __builtin_prefetch(at + kAhead + line);
}

// Returns the largest of n magnitudes as the bits of a float; NaN is larger than infinity.
template <DType kIn>
std::uint32_t largest_bits(const std::byte* source, std::int64_t n) {
    using Bits = typename Magnitudes<kIn>::Bits;
    constexpr std::int64_t kCount = sizeof(Bits) / item_size(kIn);
    Bits most{};
    Bits other{};  // two, because a maximum waits for the previous maximum
    std::int64_t i = 0;
    for (; i + 2 * kCount <= n; i += 2 * kCount) {
        const std::byte* at = source + i * item_size(kIn);
        fetch_ahead<2 * sizeof(Bits)>(at);
        most = larger(Magnitudes<kIn>::of(load<Bits>(at)), most);
        other = larger(Magnitudes<kIn>::of(load<Bits>(at + sizeof(Bits))), other);
    }
    for (; i < n; i += kCount) {
        Bits some{};
        const std::int64_t left = n - i < kCount ? n - i : kCount;
        __builtin_memcpy(&some, source + i * item_size(kIn),
                         static_cast<std::size_t>(left * item_size(kIn)));
        most = larger(Magnitudes<kIn>::of(some), most);
    }
    return Magnitudes<kIn>::largest(larger(most, other));
}

// Returns the largest of n magnitudes as the bits of a float; skips infinities and NaN.
template <DType kIn>
std::uint32_t largest_finite_bits(const std::byte* source, std::int64_t n) {
    U32 most{};
    for_lanes(n, [&](std::int64_t i, std::int64_t count) {
        const U32 magnitude = bits(load_elements<kIn>(source, i, count)) & ~kSign;
        most = larger(magnitude < kInfinity ? magnitude : U32{}, most);
    });
    return largest_lane(most);
}

inline float float_from(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

template <DType kIn>
void raise_to_largest(const Tile& tile, float* most) {
    for (std::int64_t token = 0; token < tile.tokens; ++token) {
        for (std::int64_t head = 0; head < tile.heads; ++head) {
            const std::byte* from =
                tile.source + token * tile.source_token + head * tile.source_head;
            std::uint32_t found = largest_bits<kIn>(from, tile.dim);
            if (found >= kInfinity) found = largest_finite_bits<kIn>(from, tile.dim);
            const float largest = float_from(found);
            most[head] = largest > most[head] ? largest : most[head];
        }
    }
}

// ---- wide to narrow ----------------------------------------------------------------------------

// destination = source * factor. `largest_magnitude`: bits of the largest magnitude. Most groups do
// not saturate and hold no infinity or NaN; narrowing these groups takes half the work.
template <DType kIn, DType kOut>
inline void narrow_group(const std::byte* source, std::byte* destination, std::int64_t n,
                         std::uint32_t largest_magnitude, float factor) {
    constexpr float kLimit = 1.0001F * largest(kOut);  // rounds to the largest code
    constexpr float kTiny = 0x1p-100F;                 // above this, kPlainFactor cuts off no bits
    using Code = Element<kOut>;
    if (!(float_from(largest_magnitude) * factor <= kLimit && factor >= kTiny)) {
        for_lanes(n, [&](std::int64_t i, std::int64_t count) {
            store_elements<kOut>(destination, i, count,
                                 load_elements<kIn>(source, i, count) * factor);
        });
        return;
    }
    const float plain = factor * Code::kPlainFactor;
    const auto value = [&](std::int64_t i, std::int64_t count) {
        return load_elements<kIn>(source, i, count) * plain;
    };
    std::int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        const F32 values[4] = {value(i, kLanes), value(i + kLanes, kLanes),
                               value(i + 2 * kLanes, kLanes), value(i + 3 * kLanes, kLanes)};
        store_four<kOut>(destination + i, values);
    }
    for (; i < n; i += kLanes) {
        const std::int64_t count = n - i < kLanes ? n - i : kLanes;
        store_codes(destination + i, count, Code::narrow_plain(value(i, count)));
    }
}

struct GroupScale {
    std::uint32_t largest;  // bits of the largest magnitude
    float scale;
};

template <DType kIn, DType kOut>
inline GroupScale scale_of_group(const std::byte* source, std::int64_t n) {
    constexpr float kLimit = largest(kOut);
    const std::uint32_t found = largest_bits<kIn>(source, n);
    const float most = float_from(found < kInfinity ? found : largest_finite_bits<kIn>(source, n));
    const float ratio = most / kLimit;
    return {found, ratio > kSmallestScale ? ratio : kSmallestScale};
}

// Calls body(source, destination, offset of the scales) for each head of each token.
template <class Body>
inline void for_heads(const Tile& tile, Body&& body) {
    for (std::int64_t token = 0; token < tile.tokens; ++token) {
        for (std::int64_t head = 0; head < tile.heads; ++head) {
            body(tile.source + token * tile.source_token + head * tile.source_head,
                 tile.destination + token * tile.destination_token + head * tile.destination_head,
                 token * tile.scale_token + head * tile.scale_head);
        }
    }
}

// Computes the scale of the next group before the codes of this group, which do not wait for it.
template <DType kIn, DType kOut>
void quantize(const Tile& tile) {
    const std::int64_t groups = tile.dim / tile.group;
    const std::int64_t group_bytes = tile.group * item_size(kIn);
    for_heads(tile, [&](const std::byte* from, std::byte* to, std::int64_t at) {
        GroupScale next{};
        if (groups > 0) next = scale_of_group<kIn, kOut>(from, tile.group);
        for (std::int64_t g = 0; g < groups; ++g, from += group_bytes, to += tile.group) {
            const GroupScale now = next;
            if (g + 1 < groups) next = scale_of_group<kIn, kOut>(from + group_bytes, tile.group);
            store(tile.new_scales + at + g * 4, now.scale);
            narrow_group<kIn, kOut>(from, to, tile.group, now.largest, 1.0F / now.scale);
        }
    });
}

inline float scale_at(const Tile& tile, std::int64_t offset) {
    return tile.scales == nullptr ? 1.0F : load<float>(tile.scales + offset);
}

template <DType kIn, DType kOut>
void quantize_by(const Tile& tile) {
    const std::int64_t groups = tile.dim / tile.group;
    const std::int64_t group_bytes = tile.group * item_size(kIn);
    for_heads(tile, [&](const std::byte* from, std::byte* to, std::int64_t at) {
        std::uint32_t next = groups > 0 ? largest_bits<kIn>(from, tile.group) : 0;
        for (std::int64_t g = 0; g < groups; ++g, from += group_bytes, to += tile.group) {
            const std::uint32_t now = next;
            if (g + 1 < groups) next = largest_bits<kIn>(from + group_bytes, tile.group);
            narrow_group<kIn, kOut>(from, to, tile.group, now, 1.0F / scale_at(tile, at + g * 4));
        }
    });
}

// ---- narrow to wide, wide to wide --------------------------------------------------------------

// destination = source * scale
template <DType kIn, DType kOut>
inline void widen_group(const std::byte* source, std::byte* destination, std::int64_t n,
                        float scale) {
    constexpr float kHuge = 0x1p118F;  // below this, kPlainFactor causes no overflow
    const float plain = scale / Element<kIn>::kPlainFactor;
    const bool is_plain = scale < kHuge && scale > -kHuge;
    std::int64_t i = 0;
    for (; is_plain && i + 4 * kLanes <= n; i += 4 * kLanes) {
        F32 values[4];
        if (!load_four<kIn>(source + i, values)) break;
        for (F32& value : values) value *= plain;
        store_four_wide<kOut>(destination + i * item_size(kOut), values);
    }
    for (; i < n; i += kLanes) {
        const std::int64_t count = n - i < kLanes ? n - i : kLanes;
        store_elements<kOut>(destination, i, count, load_elements<kIn>(source, i, count) * scale);
    }
}

template <DType kIn, DType kOut>
void dequantize(const Tile& tile) {
    const std::int64_t groups = tile.dim / tile.group;
    for_heads(tile, [&](const std::byte* from, std::byte* to, std::int64_t at) {
        for (std::int64_t g = 0; g < groups; ++g) {
            widen_group<kIn, kOut>(from + g * tile.group, to + g * tile.group * item_size(kOut),
                                   tile.group, scale_at(tile, at + g * 4));
        }
    });
}

template <DType kIn, DType kOut>
void widen(const Tile& tile) {
    for_heads(tile, [&](const std::byte* from, std::byte* to, std::int64_t) {
        for_lanes(tile.dim, [&](std::int64_t i, std::int64_t count) {
            store_elements<kOut>(to, i, count, load_elements<kIn>(from, i, count));
        });
    });
}
