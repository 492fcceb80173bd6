// SPDX-License-Identifier: Apache-2.0
// Strided copies and sums of lengths, run by emulated lanes.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kvcore/cuda.hpp"
#include "support/check.hpp"
#include "support/cuda_scene.hpp"

namespace tests::cuda::arrays {

using cuda_scene::Bytes;
using cuda_scene::kDefault;
namespace cuda = kvcore::cuda;

namespace {

/// The stride of each axis and the size of the array in bytes. The axes have a random order, and
/// some have gaps.
struct Strides {
    std::vector<std::int64_t> steps;
    std::int64_t bytes;
};

Strides random_strides(Random& random, const std::vector<std::int64_t>& sizes, std::int64_t item) {
    Strides found{std::vector<std::int64_t>(sizes.size()), item};
    auto order = random.chance(30) ? std::vector<std::int64_t>{}
                                   : cuda_scene::shuffled<std::int64_t>(
                                         random, static_cast<std::int64_t>(sizes.size()));
    if (order.empty()) {  // C order
        for (auto axis = static_cast<std::int64_t>(sizes.size()) - 1; axis >= 0; --axis) {
            order.push_back(axis);
        }
    }
    for (const std::int64_t axis : order) {
        const auto at = static_cast<std::size_t>(axis);
        found.steps[at] = found.bytes + (random.chance(20) ? item * random.below(3) : 0);
        found.bytes = found.steps[at] * sizes[at];
    }
    return found;
}

TEST(strided_copies_move_every_item) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(1));
    for (int i = 0; i < 2000; ++i) {
        const std::int64_t item = std::int64_t{1} << random.below(5);
        std::vector<std::int64_t> sizes(static_cast<std::size_t>(random.below(7)));
        std::int64_t count = 1;
        for (std::int64_t& size : sizes)
            count *= size = random.between(random.chance(3) ? 0 : 1, 4);
        const Strides from = random_strides(random, sizes, item);
        const Strides to = random_strides(random, sizes, item);
        const Bytes source = cuda_scene::random_bytes(random, from.bytes);
        Bytes found(static_cast<std::size_t>(to.bytes), std::byte{0x5a});
        Bytes expected = found;
        for (std::int64_t index = 0; index < count; ++index) {
            std::int64_t rest = index;
            std::int64_t read = 0;
            std::int64_t written = 0;
            for (std::size_t axis = sizes.size(); axis-- > 0;) {
                read += rest % sizes[axis] * from.steps[axis];
                written += rest % sizes[axis] * to.steps[axis];
                rest /= sizes[axis];
            }
            std::memcpy(expected.data() + written, source.data() + read,
                        static_cast<std::size_t>(item));
        }
        cuda::StridedCopy copy;
        copy.item_bytes = item;
        copy.num_axes = static_cast<int>(sizes.size());
        for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
            copy.axes[axis] = {sizes[axis], from.steps[axis], to.steps[axis]};
        }
        CHECK_EQ(cuda::copy_strided(copy, source.data(), found.data(), kDefault), cuda::kSuccess);
        CHECK(found == expected);
    }
}

TEST(axes_may_run_backwards_and_repeat) {
    cuda::emulation::reset(1);
    const Bytes source{std::byte{1}, std::byte{2}, std::byte{3}};
    Bytes found(6);
    cuda::StridedCopy copy;
    copy.item_bytes = 1;
    copy.num_axes = 2;
    copy.axes[0] = {2, 0, 3};
    copy.axes[1] = {3, -1, 1};
    CHECK_EQ(cuda::copy_strided(copy, source.data() + 2, found.data(), kDefault), cuda::kSuccess);
    const Bytes expected{std::byte{3}, std::byte{2}, std::byte{1},
                         std::byte{3}, std::byte{2}, std::byte{1}};
    CHECK(found == expected);
}

TEST(too_many_axes_are_refused) {
    cuda::emulation::reset(1);
    cuda::StridedCopy copy;
    copy.item_bytes = 1;
    copy.num_axes = cuda::StridedCopy::kMostAxes + 1;
    CHECK_EQ(cuda::copy_strided(copy, nullptr, nullptr, kDefault), cuda::kInvalidCall);
}

TEST(offsets_are_sums) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(1));
    for (int i = 0; i < 200; ++i) {
        std::vector<std::uint32_t> lengths(static_cast<std::size_t>(random.below(300)));
        std::vector<std::uint32_t> expected = {0};
        for (std::uint32_t& length : lengths) {
            length = static_cast<std::uint32_t>(random.next());
            expected.push_back(expected.back() + length);
        }
        std::vector<std::uint32_t> found(lengths.size() + 2, 77U);
        expected.push_back(77U);
        CHECK_EQ(
            cuda::row_offsets(lengths.data(), found.data(), cuda_scene::size_of(lengths), kDefault),
            cuda::kSuccess);
        CHECK(found == expected);
    }
    CHECK_EQ(cuda::row_offsets(nullptr, nullptr, -1, kDefault), cuda::kInvalidCall);
}

/// The digest of a pair of pools is one sum.
TEST(digests_are_added_up) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(1));
    const Bytes one = cuda_scene::random_bytes(random, std::int64_t{3} * 40);
    const Bytes two = cuda_scene::random_bytes(random, std::int64_t{3} * 24);
    const std::vector<std::int64_t> ids = {2, 0};
    std::vector<std::uint64_t> first(2), second(2), found(2);
    kvcore::digest_pages({one.data(), 40, 40}, ids.data(), 2, first.data());
    kvcore::digest_pages({two.data(), 24, 24}, ids.data(), 2, second.data());
    CHECK_EQ(cuda::digest_pages({one.data(), 40, 40}, 3, ids.data(), 2, found.data(), kDefault),
             cuda::kSuccess);
    CHECK_EQ(cuda::add_digests({two.data(), 24, 24}, 3, ids.data(), 2, 3, found.data(), kDefault),
             cuda::kSuccess);
    for (std::size_t i = 0; i < 2; ++i) CHECK_EQ(found[i], first[i] + 3 * second[i]);
}

}  // namespace

}  // namespace tests::cuda::arrays
