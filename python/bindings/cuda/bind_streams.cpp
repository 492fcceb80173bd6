// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::python::check_status;
using kvcore::python::Maker;
using kvcore::python::pointer_of;
using kvcore::python::stream_of;
using kvcore::python::without_gil;

namespace {

/// An event of a device by CUDA's handle.
cuda::Event event_of(int device, std::uintptr_t handle) noexcept {
    return {device, pointer_of(handle)};
}

/// A stream that does not wait for the legacy default stream. It is destroyed with the object.
class OwnedStream {
   public:
    explicit OwnedStream(int device) {
        check_status(without_gil([&] { return cuda::create_stream(device, &stream_); }),
                     "a stream of cuda:", device);
    }
    OwnedStream(const OwnedStream&) = delete;
    OwnedStream& operator=(const OwnedStream&) = delete;
    ~OwnedStream() {
        if (!maker_.is_this_process()) return;
        without_gil([this] { (void)cuda::destroy_stream(stream_); });
    }
    [[nodiscard]] int device() const noexcept { return stream_.device; }
    [[nodiscard]] std::uintptr_t handle() const noexcept {
        return reinterpret_cast<std::uintptr_t>(stream_.handle);
    }

   private:
    Maker maker_;
    cuda::Stream stream_;
};

class OwnedEvent {
   public:
    explicit OwnedEvent(int device) {
        check_status(without_gil([&] { return cuda::create_event(device, &event_); }),
                     "an event of cuda:", device);
    }
    OwnedEvent(const OwnedEvent&) = delete;
    OwnedEvent& operator=(const OwnedEvent&) = delete;
    ~OwnedEvent() {
        if (!maker_.is_this_process()) return;
        without_gil([this] { (void)cuda::destroy_event(event_); });
    }
    [[nodiscard]] int device() const noexcept { return event_.device; }
    [[nodiscard]] std::uintptr_t handle() const noexcept {
        return reinterpret_cast<std::uintptr_t>(event_.handle);
    }

   private:
    Maker maker_;
    cuda::Event event_;
};

/// Makes a device the current device of the calling thread, for CUDA, for other libraries and for
/// kvcore.
class DeviceScope {
   public:
    explicit DeviceScope(int device) noexcept : device_(device) {}
    void enter() {
        check_status(without_gil([this] { return cuda::enter_device(device_, &has_entered_); }),
                     "work on cuda:", device_);
    }
    void leave(const py::args& /*error*/) noexcept {
        if (has_entered_) without_gil([] { return cuda::leave_device(); });
        has_entered_ = false;
    }

   private:
    int device_;
    bool has_entered_ = false;
};

void record(std::uintptr_t event, int device, std::uintptr_t stream) {
    const cuda::Status status = without_gil(
        [&] { return cuda::record(event_of(device, event), stream_of(device, stream)); });
    check_status(status, "recording an event on a stream of cuda:", device);
}

void wait(std::uintptr_t event, int device, std::uintptr_t stream) {
    const cuda::Status status =
        without_gil([&] { return cuda::wait(stream_of(device, stream), event_of(device, event)); });
    check_status(status, "making a stream of cuda:", device, " wait for an event");
}

bool query(std::uintptr_t event, int device) {
    bool is_done = false;
    check_status(without_gil([&] { return cuda::query(event_of(device, event), &is_done); }),
                 "looking at an event of cuda:", device);
    return is_done;
}

bool is_capturing(int device, std::uintptr_t stream) {
    bool answer = false;
    check_status(
        without_gil([&] { return cuda::is_capturing(stream_of(device, stream), &answer); }),
        "looking at a stream of cuda:", device);
    return answer;
}

void synchronize(int device, std::uintptr_t stream) {
    check_status(without_gil([&] { return cuda::synchronize(stream_of(device, stream)); }),
                 "waiting for a stream of cuda:", device);
}

void synchronize_event(std::uintptr_t event, int device) {
    check_status(without_gil([&] { return cuda::synchronize(event_of(device, event)); }),
                 "waiting for an event of cuda:", device);
}

void synchronize_device(int device) {
    check_status(without_gil([&] { return cuda::synchronize_device(device); }),
                 "waiting for cuda:", device);
}

}  // namespace

void bind_cuda_streams(py::module_& module) {
    py::class_<OwnedStream>(module, "Stream", "A stream of a device, destroyed with the object.")
        .def(py::init<int>(), py::arg("device"))
        .def_property_readonly("device", &OwnedStream::device)
        .def_property_readonly("ptr", &OwnedStream::handle);
    py::class_<OwnedEvent>(module, "Event", "An event of a device, destroyed with the object.")
        .def(py::init<int>(), py::arg("device"))
        .def_property_readonly("device", &OwnedEvent::device)
        .def_property_readonly("ptr", &OwnedEvent::handle);
    py::class_<DeviceScope>(module, "DeviceScope",
                            "A context manager that makes a device the thread's current device.")
        .def(py::init<int>(), py::arg("device"))
        .def("__enter__", &DeviceScope::enter)
        .def("__exit__", &DeviceScope::leave);
    module.def("record", &record, py::arg("event"), py::arg("device"), py::arg("stream"),
               "Record an event after the work that a stream has now.");
    module.def("wait", &wait, py::arg("event"), py::arg("device"), py::arg("stream"),
               "Make the further work of a stream wait for an event.");
    module.def("query", &query, py::arg("event"), py::arg("device"),
               "Return true if an event's work is done.");
    module.def("is_capturing", &is_capturing, py::arg("device"), py::arg("stream"),
               "Return true if a stream is being captured into a graph.");
    module.def("synchronize", &synchronize, py::arg("device"), py::arg("stream"),
               "Block the host until a stream's work is done.");
    module.def("synchronize_event", &synchronize_event, py::arg("event"), py::arg("device"),
               "Block the host until an event's work is done.");
    module.def("synchronize_device", &synchronize_device, py::arg("device"),
               "Block the host until all work of a device is done.");
}
