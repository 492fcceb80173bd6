// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "emulation/emulation.hpp"
#include "kvcore/cuda.hpp"
#include "support/random.hpp"

/// Random inputs for tests of emulated kernels: bytes, sizes and strides of every alignment.
namespace cuda_scene {

using Bytes = std::vector<std::byte>;

constexpr kvcore::cuda::Stream kDefault{0, nullptr};

inline Bytes random_bytes(Random& random, std::int64_t n) {
    Bytes bytes(static_cast<std::size_t>(n));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    return bytes;
}

/// Return a divisor of all addresses and strides of a scene. Half of the results allow the widest
/// units.
inline std::int64_t random_alignment(Random& random) {
    return random.chance(50) ? 16 : std::int64_t{1} << random.below(4);
}

inline std::int64_t round_up(std::int64_t bytes, std::int64_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

/// Return a size that engines use, or an unusual size.
inline std::int64_t random_dim(Random& random) {
    std::vector<std::int64_t> dims = {1, 7, 16, 59, 64, 80, 96, 112, 128};
    return random.pick(dims);
}
inline std::int64_t random_page_size(Random& random) {
    std::vector<std::int64_t> sizes = {1, 2, 3, 16, 24, 48};
    return random.pick(sizes);
}

/// Return 0 .. n - 1 in random order.
template <class T>
std::vector<T> shuffled(Random& random, std::int64_t n) {
    std::vector<T> ids(static_cast<std::size_t>(n));
    std::iota(ids.begin(), ids.end(), T{0});
    for (std::int64_t i = n - 1; i > 0; --i) {
        std::swap(ids[static_cast<std::size_t>(i)],
                  ids[static_cast<std::size_t>(random.below(i + 1))]);
    }
    return ids;
}

/// Return an id without a page in a pool of `pages`: negative, or slightly or much too large.
inline std::int64_t random_stranger(Random& random, std::int64_t pages) {
    std::vector<std::int64_t> ids = {-1,
                                     -1 - pages,
                                     pages,
                                     pages + 1,
                                     std::int64_t{1} << 40,
                                     std::numeric_limits<std::int64_t>::max(),
                                     std::numeric_limits<std::int64_t>::min()};
    return random.pick(ids);
}

/// Return the items in their order, mixed with items from `make`.
template <class T, class Make>
std::vector<T> with_strangers(Random& random, const std::vector<T>& items, const Make& make) {
    std::vector<T> all;
    for (const T& item : items) {
        while (random.chance(30)) all.push_back(make());
        all.push_back(item);
    }
    all.push_back(make());
    return all;
}

template <class T>
std::int64_t size_of(const std::vector<T>& values) {
    return static_cast<std::int64_t>(values.size());
}

}  // namespace cuda_scene
