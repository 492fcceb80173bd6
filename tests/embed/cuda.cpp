// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdio>
#include <kvcore/cuda.hpp>

namespace cuda = kvcore::cuda;

// Fills page 1 of two, copies it to page 0, and answers the last byte of that.
cuda::Status try_device(int device, std::byte* last) {
    constexpr std::int64_t kPage = 4096;
    const std::int64_t fill[] = {1};
    const kvcore::PagePair copy[] = {{1, 0}};
    void* memory = nullptr;
    cuda::Stream stream;
    cuda::Status status = cuda::create_stream(device, &stream);
    if (status != cuda::kSuccess) return status;
    if ((status = cuda::allocate(device, 3 * kPage, &memory)) != cuda::kSuccess) return status;
    auto* pages = static_cast<std::byte*>(memory);
    auto* lists = reinterpret_cast<std::int64_t*>(pages + 2 * kPage);  // kernels read them there
    const cuda::Status steps[] = {
        cuda::copy(lists, fill, sizeof fill, stream),
        cuda::copy(lists + 1, copy, sizeof copy, stream),
        cuda::fill_pages({pages, kPage, kPage}, lists, 1, std::byte{42}, stream),
        cuda::copy_pages({pages, kPage, kPage}, reinterpret_cast<kvcore::PagePair*>(lists + 1), 1,
                         stream),
        cuda::copy(last, pages + kPage - 1, 1, stream),
        cuda::synchronize(stream),
        cuda::free_memory(device, memory),
        cuda::destroy_stream(stream)};
    for (const cuda::Status step : steps) {
        if (step != cuda::kSuccess) return step;
    }
    return cuda::kSuccess;
}

int main() {
    int devices = 0;
    cuda::Status status = cuda::count_devices(&devices);
    if (status != cuda::kSuccess) {
        std::printf("CUDA unavailable: %s\n", cuda::status_text(status));
        return 0;
    }
    std::byte last{};
    status = try_device(0, &last);
    std::printf("%s; page 0 ends with %d\n", cuda::status_text(status), static_cast<int>(last));
    return status == cuda::kSuccess && last == std::byte{42} ? 0 : 1;
}
