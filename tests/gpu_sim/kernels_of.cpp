// SPDX-License-Identifier: Apache-2.0
#include "kernels_of.hpp"

#include <cuda_runtime_api.h>
#include <fatbinary_section.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace gpu_sim {

namespace {

/// One text of PTX, parsed at the first use.
struct Text {
    std::string_view ptx;
    std::unique_ptr<Module> module;
};
/// The contents of a translation unit: a text for each architecture.
using Fatbin = std::map<int, Text>;

struct Function {
    Fatbin* fatbin;
    std::string name;
};

struct Program {
    std::mutex mutex;
    std::vector<std::unique_ptr<Fatbin>> fatbins;
    std::map<const void*, Function> functions;
};
Program& program() {
    static Program& all = *new Program;
    return all;
}

template <class T>
T field(const std::byte* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// A header of 16 bytes holds the size of the entries after it. Each entry has a header with its own
// length, the payload's length, its kind, a compression flag and its architecture.
Fatbin read(const std::byte* at) {
    constexpr std::uint32_t kMagic = 0xba55ed50U;
    constexpr std::uint16_t kPtx = 1;
    Fatbin found;
    if (field<std::uint32_t>(at) != kMagic) throw std::runtime_error("no fatbin");
    const std::byte* end = at + field<std::uint16_t>(at + 6) + field<std::uint64_t>(at + 8);
    for (at += field<std::uint16_t>(at + 6); at < end;) {
        const auto header = field<std::uint32_t>(at + 4);
        const auto size = field<std::uint64_t>(at + 8);
        if (field<std::uint16_t>(at) == kPtx) {
            if (field<std::uint32_t>(at + 16) != 0) {
                throw std::runtime_error("PTX is compressed; compile with nvcc --no-compress");
            }
            const std::string_view text(reinterpret_cast<const char*>(at) + header, size);
            found[static_cast<int>(field<std::uint32_t>(at + 28))].ptx =
                text.substr(0, text.find('\0'));
        }
        at += header + size;
    }
    return found;
}

}  // namespace

const Kernel* kernel_of(const void* function, int architecture) {
    const std::lock_guard<std::mutex> lock(program().mutex);
    const auto found = program().functions.find(function);
    if (found == program().functions.end()) return nullptr;
    auto after = found->second.fatbin->upper_bound(architecture);
    if (after == found->second.fatbin->begin()) return nullptr;
    Text& text = (--after)->second;
    if (text.module == nullptr) {
        try {
            text.module = std::make_unique<Module>(parse(text.ptx));
        } catch (const std::exception& error) {
            std::fprintf(stderr, "%s\n", error.what());
            std::abort();
        }
    }
    const auto kernel = text.module->find(found->second.name);
    return kernel == text.module->end() ? nullptr : &kernel->second;
}

}  // namespace gpu_sim

// nvcc's host code calls these functions before main.
extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
    using namespace gpu_sim;
    const std::lock_guard<std::mutex> lock(program().mutex);
    const auto* of = static_cast<const __fatBinC_Wrapper_t*>(wrapper);
    program().fatbins.push_back(
        std::make_unique<Fatbin>(read(reinterpret_cast<const std::byte*>(of->data))));
    return reinterpret_cast<void**>(program().fatbins.back().get());
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** handle, const char* function, char*, const char* name, int,
                            uint3*, uint3*, dim3*, dim3*, int*) {
    using namespace gpu_sim;
    const std::lock_guard<std::mutex> lock(program().mutex);
    program().functions[function] = {reinterpret_cast<Fatbin*>(handle), name};
}

// kvcore calls cudaLaunchKernel itself; no code calls the functions that stand for kernels.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
    return cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
    return cudaErrorNotSupported;
}

}  // extern "C"
