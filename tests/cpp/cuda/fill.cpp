// SPDX-License-Identifier: Apache-2.0
// Pages filled by emulated lanes: the pool must have the bytes of the CPU at every alignment.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulation/emulation.hpp"
#include "kvcore/cuda.hpp"
#include "kvcore/page_bytes.hpp"
#include "support/check.hpp"

namespace tests::cuda::fill {

namespace {

TEST(fill_has_the_cpu_s_bytes) {
    kvcore::cuda::emulation::reset(1);
    const std::vector<std::int64_t> ids{4, 0, 2};
    for (const std::int64_t page_bytes : {0, 1, 3, 16, 40, 4096 + 2}) {
        for (const std::int64_t shift : {0, 1, 2, 4, 8}) {
            const std::int64_t stride = page_bytes + 24;
            std::vector<std::byte> expected(static_cast<std::size_t>(6 * stride + 16),
                                            std::byte{0xff});
            std::vector<std::byte> found = expected;
            const auto n = static_cast<std::int64_t>(ids.size());
            kvcore::fill_pages({expected.data() + shift, stride, page_bytes}, ids.data(), n,
                               std::byte{0x5a});
            const std::vector<std::int64_t> named{-1, 4, 6, 0, std::int64_t{1} << 40, 2, -7};
            const kvcore::cuda::Status status = kvcore::cuda::fill_pages(
                {found.data() + shift, stride, page_bytes}, 6, named.data(),
                static_cast<std::int64_t>(named.size()), std::byte{0x5a}, {0, nullptr});
            CHECK(status == kvcore::cuda::kSuccess);
            CHECK(found == expected);
        }
    }
}

}  // namespace

}  // namespace tests::cuda::fill
