// SPDX-License-Identifier: Apache-2.0
// Offsets above 2^31 and 2^32, of bytes and of elements: kernels on sparse memory with pages at
// these offsets. Unused addresses stay unmapped, so a wrapped offset gives a wrong byte or a fault.
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/cuda.hpp"
#include "support/cuda_scene.hpp"

namespace tests::cuda::huge {

using cuda_scene::Bytes;
using cuda_scene::kDefault;
using cuda_scene::random_bytes;
namespace cuda = kvcore::cuda;

namespace {

constexpr std::int64_t kFar = (std::int64_t{1} << 33) + 4096;  // bytes of a page
constexpr std::int64_t kPages = 3;

class Sparse {
   public:
    Sparse()
        : data_(mmap(nullptr, static_cast<std::size_t>(kFar * kPages), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
        CHECK(data_ != MAP_FAILED);
    }
    ~Sparse() { munmap(data_, static_cast<std::size_t>(kFar * kPages)); }
    Sparse(const Sparse&) = delete;
    Sparse& operator=(const Sparse&) = delete;

    [[nodiscard]] std::byte* at(std::int64_t byte) const {
        return static_cast<std::byte*>(data_) + byte;
    }
    void write(std::int64_t byte, const Bytes& bytes) const {
        std::copy(bytes.begin(), bytes.end(), at(byte));
    }
    [[nodiscard]] bool holds(std::int64_t byte, const Bytes& bytes) const {
        return std::equal(bytes.begin(), bytes.end(), at(byte));
    }

   private:
    void* data_;
};

/// The rows of a token are also far apart: the entries of a page are 2^32 + 64 bytes from each
/// other.
constexpr std::int64_t kEntry = (std::int64_t{1} << 32) + 64;

TEST(slots_reach_far_tokens) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(65));
    const Sparse memory;
    const Bytes rows = random_bytes(random, std::int64_t{5} * 160);
    kvcore::PoolView<std::byte> pool{kPages, 2, 2, {}, {}, {}};
    pool.k = {memory.at(0), kvcore::DType::kInt8, 80, kFar, kEntry, kEntry / 2, {}};
    const std::vector<std::int64_t> slots = {4, 1, -1, 6, 2};
    std::int32_t bad = 0;
    CHECK_EQ(cuda::append_slots(pool, {rows.data(), 160, 80}, {nullptr, 0, 0}, slots.data(), 5,
                                &bad, kDefault),
             cuda::kSuccess);
    CHECK_EQ(bad, 1);
    for (const std::size_t token : {0, 1, 4}) {
        const auto first = rows.begin() + static_cast<std::ptrdiff_t>(token) * 160;
        const std::int64_t slot = slots[token];
        const std::int64_t at = slot / 2 * kFar + slot % 2 * kEntry;
        CHECK(memory.holds(at, Bytes(first, first + 80)));
        CHECK(memory.holds(at + kEntry / 2, Bytes(first + 80, first + 160)));
    }
}

TEST(batches_reach_far_pages) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(65));
    const Sparse memory;
    const Bytes rows = random_bytes(random, std::int64_t{3} * 96);
    Bytes gathered(rows.size());
    const std::uint32_t table[] = {2, 0};
    const std::uint32_t begin[] = {1};
    const std::uint32_t offsets[] = {0, 3};
    const cuda::DeviceBatch batch{{table, 2, 2, 1}, {begin, offsets}, 3, kPages};
    CHECK_EQ(cuda::append_batch({1, 96}, {memory.at(0), kFar, kEntry, 0, 2, nullptr}, batch,
                                {rows.data(), 96, 0}, nullptr, kDefault),
             cuda::kSuccess);
    CHECK(memory.holds(2 * kFar + kEntry, Bytes(rows.begin(), rows.begin() + 96)));
    CHECK(memory.holds(kEntry, Bytes(rows.begin() + 192, rows.end())));
    CHECK_EQ(cuda::gather_batch({1, 96}, {memory.at(0), kFar, kEntry, 0, 2, nullptr}, batch,
                                {gathered.data(), 96, 0}, nullptr, kDefault),
             cuda::kSuccess);
    CHECK(gathered == rows);
}

TEST(pages_are_copied_far) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(65));
    const Sparse memory;
    const Bytes page = random_bytes(random, 48);
    const kvcore::PageBytes<std::byte> pool{memory.at(0), kFar, 48};
    const kvcore::PagePair pair{0, 2};
    memory.write(0, page);
    CHECK_EQ(cuda::copy_pages(pool, 3, &pair, 1, kDefault), cuda::kSuccess);
    CHECK(memory.holds(2 * kFar, page));
    CHECK(memory.holds(kFar, Bytes(48)));

    const std::vector<std::int64_t> ids = {2, 1};
    std::vector<std::uint64_t> found(2), expected(2);
    const kvcore::PageBytes<const std::byte> readable{memory.at(0), kFar, 48};
    CHECK_EQ(cuda::digest_pages(readable, 3, ids.data(), 2, found.data(), kDefault),
             cuda::kSuccess);
    kvcore::digest_pages(readable, ids.data(), 2, expected.data());
    CHECK(found == expected);
    CHECK_EQ(cuda::fill_pages(pool, 3, ids.data(), 1, std::byte{7}, kDefault), cuda::kSuccess);
    CHECK(memory.holds(2 * kFar, Bytes(48, std::byte{7})));
}

TEST(transfers_reach_far_layers) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(65));
    const Sparse memory;
    Bytes near = random_bytes(random, 256);  // [page, layer, token, byte]
    kvcore::CacheView<std::byte> far{2, 2, 1, {}, {}};
    far.k = {memory.at(0), nullptr, kFar, kEntry, kEntry / 4, 0, 32};
    kvcore::CacheView<const std::byte> source{2, 2, 1, {}, {}};
    source.k = {near.data(), nullptr, 128, 64, 32, 0, 32};
    const std::vector<kvcore::PagePair> pairs = {{0, 2}, {1, 1}};
    CHECK_EQ(cuda::transfer(source, far, {2, 3}, pairs.data(), 2, {0, 2}, 1, kDefault),
             cuda::kSuccess);
    for (const kvcore::PagePair& pair : pairs) {
        for (std::int64_t layer = 0; layer < 2; ++layer) {
            for (std::int64_t token = 0; token < 2; ++token) {
                const auto first = near.begin() + pair.source * 128 + layer * 64 + token * 32;
                CHECK(memory.holds(pair.destination * kFar + layer * kEntry + token * kEntry / 4,
                                   Bytes(first, first + 32)));
            }
        }
    }
}

}  // namespace

}  // namespace tests::cuda::huge
