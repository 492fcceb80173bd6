// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::python::check_status;
using kvcore::python::concat;
using kvcore::python::Maker;
using kvcore::python::pointer_of;
using kvcore::python::stream_of;
using kvcore::python::without_gil;

namespace {

/// Memory of a device, freed with the object. Immutable; usable on any thread.
class DeviceMemory {
   public:
    DeviceMemory(int device, std::int64_t bytes) : device_(device), bytes_(bytes) {
        if (bytes < 0) throw py::value_error(concat("bytes is ", bytes, ", must be at least 0"));
        const cuda::Status status =
            without_gil([&] { return cuda::allocate(device, bytes, &pointer_); });
        std::int64_t free = 0;
        std::int64_t total = 0;
        if (status == cuda::kSuccess) return;
        // If the device responds, the cause is missing memory.
        if (without_gil([&] { return cuda::memory_info(device, &free, &total); }) !=
            cuda::kSuccess) {
            check_status(status, bytes, " bytes are asked for on cuda:", device);
        }
        PyErr_SetString(PyExc_MemoryError,
                        concat(bytes, " bytes are asked for on cuda:", device, ", ", free, " of ",
                               total, " are free: ", cuda::status_text(status))
                            .c_str());
        throw py::error_already_set();
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory() {
        if (!maker_.is_this_process()) return;
        // The call may wait for the device.
        without_gil([this] { (void)cuda::free_memory(device_, pointer_); });
    }

    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::uintptr_t address() const noexcept {
        return reinterpret_cast<std::uintptr_t>(pointer_);
    }

   private:
    Maker maker_;
    int device_;
    std::int64_t bytes_;
    void* pointer_ = nullptr;
};

/// Zeroed, pinned host memory in separate memory pages. The mapping has the requested size;
/// allocators of CUDA's own pinned memory round up to powers of two. All devices can access the
/// memory; `device` is a device that the caller uses.
class PinnedMemory {
   public:
    PinnedMemory(int device, std::int64_t bytes) : device_(device), bytes_(bytes) {
        if (bytes < 1) throw py::value_error(concat("bytes is ", bytes, ", must be at least 1"));
        const auto page = static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
        mapped_ = static_cast<std::size_t>((bytes + page - 1) / page * page);
        pointer_ =
            mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pointer_ == MAP_FAILED) {
            PyErr_SetString(PyExc_MemoryError, concat(bytes,
                                                      " bytes of host memory are asked for, "
                                                      "the system has too little")
                                                   .c_str());
            throw py::error_already_set();
        }
#if defined(MADV_DONTFORK)
        // A child of this process gets no copy of the pages. With copy-on-write the first writer of
        // a page would get a new page, and the device would keep the old page. So these addresses
        // are free in the child.
        (void)madvise(pointer_, mapped_, MADV_DONTFORK);
#endif
        const cuda::Status status = without_gil([this] {
            return cuda::pin_memory(device_, pointer_, static_cast<std::int64_t>(mapped_));
        });
        if (status == cuda::kSuccess) return;
        munmap(pointer_, mapped_);
        check_status(status, bytes, " bytes of host memory cannot be pinned for cuda:", device);
    }
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;
    ~PinnedMemory() {
        if (!maker_.is_this_process()) return;
        without_gil([this] { (void)cuda::unpin_memory(device_, pointer_); });
        munmap(pointer_, mapped_);
    }

    [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::uintptr_t address() const noexcept {
        return reinterpret_cast<std::uintptr_t>(pointer_);
    }
    [[nodiscard]] py::buffer_info buffer() {
        return {static_cast<std::uint8_t*>(pointer_), bytes_};
    }

   private:
    Maker maker_;
    int device_;
    std::int64_t bytes_;
    std::size_t mapped_ = 0;
    void* pointer_ = nullptr;
};

// ---- devices -----------------------------------------------------------------------------------

/// Returns (number of devices, "" or the reason why there is no device).
py::tuple count_devices() {
    int count = 0;
    const cuda::Status status = without_gil([&] { return cuda::count_devices(&count); });
    return py::make_tuple(count, status == cuda::kSuccess ? "" : cuda::status_text(status));
}

py::tuple memory_info(int device) {
    std::int64_t free = 0;
    std::int64_t total = 0;
    check_status(without_gil([&] { return cuda::memory_info(device, &free, &total); }),
                 "the memory of cuda:", device);
    return py::make_tuple(free, total);
}

int device_of(std::uintptr_t address) {
    int device = -1;
    check_status(without_gil([&] { return cuda::device_of(pointer_of(address), &device); }),
                 "the device of an address");
    return device;
}

// ---- copies ------------------------------------------------------------------------------------

void fill(std::uintptr_t destination, std::uint8_t value, std::int64_t bytes, int device,
          std::uintptr_t stream) {
    const cuda::Status status = without_gil([&] {
        return cuda::fill(pointer_of(destination), std::byte{value}, bytes,
                          stream_of(device, stream));
    });
    check_status(status, "filling ", bytes, " bytes on cuda:", device);
}

void copy(std::uintptr_t destination, std::uintptr_t source, std::int64_t bytes, int device,
          std::uintptr_t stream) {
    const cuda::Status status = without_gil([&] {
        return cuda::copy(pointer_of(destination), pointer_of(source), bytes,
                          stream_of(device, stream));
    });
    check_status(status, "copying ", bytes, " bytes on cuda:", device);
}

using Addresses = py::array_t<std::uint64_t, py::array::c_style>;

void copy_batch(const Addresses& destinations, const Addresses& sources,
                const kvcore::python::Ids& bytes, int device, std::uintptr_t stream) {
    const py::ssize_t n = bytes.size();
    if (destinations.size() != n || sources.size() != n) {
        throw py::value_error(concat("there are ", destinations.size(), " destinations, ",
                                     sources.size(), " sources and ", n, " sizes, must be equal"));
    }
    for (py::ssize_t i = 0; i < n; ++i) {
        if (bytes.data()[i] >= 0) continue;
        throw py::value_error(concat("bytes[", i, "] is ", bytes.data()[i], ", below 0"));
    }
    static_assert(sizeof(void*) == sizeof(std::uint64_t));
    const cuda::Status status = without_gil([&] {
        return cuda::copy_batch(reinterpret_cast<void* const*>(destinations.data()),
                                reinterpret_cast<const void* const*>(sources.data()), bytes.data(),
                                n, stream_of(device, stream));
    });
    check_status(status, n, " copies on cuda:", device);
}

}  // namespace

void bind_cuda_memory(py::module_& module) {
    module.def("count_devices", &count_devices, "Return the device count, and '' or an error.");
    module.def("memory_info", &memory_info, py::arg("device"), "Return free and total bytes.");
    module.def("device_of", &device_of, py::arg("address"),
               "Return the device of an address, -1 for host memory.");
    module.def("fill", &fill, py::arg("destination"), py::arg("value"), py::arg("bytes"),
               py::arg("device"), py::arg("stream"));
    module.def("copy", &copy, py::arg("destination"), py::arg("source"), py::arg("bytes"),
               py::arg("device"), py::arg("stream"));
    module.def("copy_batch", &copy_batch, py::arg("destinations"), py::arg("sources"),
               py::arg("bytes"), py::arg("device"), py::arg("stream"));
    py::class_<DeviceMemory>(module, "DeviceMemory", "Memory of a device, freed with the object.")
        .def(py::init<int, std::int64_t>(), py::arg("device"), py::arg("bytes"))
        .def_property_readonly("device", &DeviceMemory::device)
        .def_property_readonly("bytes", &DeviceMemory::bytes)
        .def_property_readonly("ptr", &DeviceMemory::address);
    py::class_<PinnedMemory>(module, "PinnedMemory", py::buffer_protocol(),
                             "Pinned host memory, zeroed; numpy sees it as uint8.")
        .def(py::init<int, std::int64_t>(), py::arg("device"), py::arg("bytes"))
        .def_property_readonly("bytes", &PinnedMemory::bytes)
        .def_property_readonly("ptr", &PinnedMemory::address)
        .def_buffer(&PinnedMemory::buffer);
}
