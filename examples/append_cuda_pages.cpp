// SPDX-License-Identifier: Apache-2.0
// Writes the keys of five tokens to pages on a GPU, copies a page and reads the tokens back through
// a page table, without Python. Link it with kvcore::cuda; see docs/cpp.md.
#include <cstdio>
#include <cstring>
#include <kvcore/cuda.hpp>

namespace cuda = kvcore::cuda;

constexpr std::int64_t kRow = 4 * sizeof(float);  // a token: one head of four floats
constexpr std::int64_t kPage = 2 * kRow;          // two tokens
constexpr std::int64_t kPages = 8;

// The inputs and outputs of the kernels, with the same layout on the host and on the GPU.
struct Memory {
    std::byte pages[kPages][kPage];
    float tokens[5][4], gathered[5][4];
    std::int64_t slots[5] = {12, 13, 2, 3, 6};  // page * 2 + position: pages 6, 1, 3
    kvcore::PagePair copies[1] = {{3, 0}};      // page 3 is copied to page 0
    std::uint32_t table[3] = {6, 1, 0};         // the last token is read from page 0
    std::uint32_t offsets[2] = {0, 5};          // one sequence of five tokens
};

cuda::Status run(Memory& host, Memory& gpu, cuda::Stream stream) {
    const kvcore::PagedTensor<std::byte> keys{gpu.pages[0], kvcore::DType::kFloat32, 4, kPage, kRow,
                                              kRow};
    const auto rows = [](auto* tokens) { return reinterpret_cast<std::byte*>(tokens); };
    const cuda::Status steps[] = {
        cuda::copy(&gpu, &host, sizeof host, stream),
        cuda::append_slots({kPages, 2, 1, keys, {}}, {rows(gpu.tokens), kRow, kRow}, {}, gpu.slots,
                           5, nullptr, stream),
        cuda::copy_pages({gpu.pages[0], kPage, kPage}, kPages, gpu.copies, 1, stream),
        cuda::gather_batch({1, kRow}, {gpu.pages[0], kPage, kRow, kRow, 2, nullptr},
                           {{gpu.table, 3, 3, 1}, {nullptr, gpu.offsets}, 5, kPages},
                           {rows(gpu.gathered), kRow, kRow}, nullptr, stream),
        cuda::copy(&host, &gpu, sizeof host, stream),
        cuda::synchronize(stream)};
    for (const cuda::Status step : steps) {
        if (step != cuda::kSuccess) return step;
    }
    return cuda::kSuccess;
}

int main() {
    Memory host{};
    for (int i = 0; i < 20; ++i) host.tokens[i / 4][i % 4] = static_cast<float>(i + 1);
    int devices = 0;
    void* memory = nullptr;
    cuda::Stream stream;
    cuda::Status status = cuda::count_devices(&devices);
    if (status != cuda::kSuccess) {
        std::printf("CUDA unavailable: %s\n", cuda::status_text(status));
        return 0;
    }
    status = cuda::allocate(0, sizeof host, &memory);
    if (status == cuda::kSuccess) status = cuda::create_stream(0, &stream);
    if (status == cuda::kSuccess) status = run(host, *static_cast<Memory*>(memory), stream);
    const bool same = std::memcmp(host.tokens, host.gathered, sizeof host.tokens) == 0;
    std::printf("%s; %s\n", cuda::status_text(status), same ? "all tokens are there" : "wrong");
    cuda::destroy_stream(stream);
    cuda::free_memory(0, memory);
    return status == cuda::kSuccess && same ? 0 : 1;
}
