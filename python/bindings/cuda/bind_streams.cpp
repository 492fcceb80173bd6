// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::python::check_status;
using kvcore::python::pointer_of;
using kvcore::python::stream_of;
using kvcore::python::without_gil;

namespace {

cuda::Event event_of(std::uintptr_t handle) noexcept { return pointer_of(handle); }

/// A stream that does not wait for the legacy default one, destroyed with the object.
class OwnedStream {
   public:
    explicit OwnedStream(int device) {
        check_status(cuda::create_stream(device, &stream_), "a stream of cuda:", device);
    }
    OwnedStream(const OwnedStream&) = delete;
    OwnedStream& operator=(const OwnedStream&) = delete;
    ~OwnedStream() {
        without_gil([this] { (void)cuda::destroy_stream(stream_); });
    }
    [[nodiscard]] int device() const noexcept { return stream_.device; }
    [[nodiscard]] std::uintptr_t handle() const noexcept {
        return reinterpret_cast<std::uintptr_t>(stream_.handle);
    }

   private:
    cuda::Stream stream_;
};

class OwnedEvent {
   public:
    explicit OwnedEvent(int device) : device_(device) {
        check_status(cuda::create_event(device, &event_), "an event of cuda:", device);
    }
    OwnedEvent(const OwnedEvent&) = delete;
    OwnedEvent& operator=(const OwnedEvent&) = delete;
    ~OwnedEvent() {
        without_gil([this] { (void)cuda::destroy_event(event_); });
    }
    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] std::uintptr_t handle() const noexcept {
        return reinterpret_cast<std::uintptr_t>(event_);
    }

   private:
    int device_;
    cuda::Event event_ = nullptr;
};

void record(std::uintptr_t event, int device, std::uintptr_t stream) {
    check_status(cuda::record(event_of(event), stream_of(device, stream)),
                 "recording an event on a stream of cuda:", device);
}

void wait(std::uintptr_t event, int device, std::uintptr_t stream) {
    check_status(cuda::wait(stream_of(device, stream), event_of(event)),
                 "making a stream of cuda:", device, " wait for an event");
}

bool query(std::uintptr_t event) {
    bool is_done = false;
    check_status(cuda::query(event_of(event), &is_done), "looking at an event");
    return is_done;
}

bool is_capturing(int device, std::uintptr_t stream) {
    bool answer = false;
    check_status(cuda::is_capturing(stream_of(device, stream), &answer),
                 "looking at a stream of cuda:", device);
    return answer;
}

void synchronize(int device, std::uintptr_t stream) {
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = cuda::synchronize(stream_of(device, stream));
    }
    check_status(status, "waiting for a stream of cuda:", device);
}

void synchronize_event(std::uintptr_t event) {
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = cuda::synchronize(event_of(event));
    }
    check_status(status, "waiting for an event");
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
    module.def("record", &record, py::arg("event"), py::arg("device"), py::arg("stream"),
               "Let an event stand for the work that a stream has now.");
    module.def("wait", &wait, py::arg("event"), py::arg("device"), py::arg("stream"),
               "Let a stream's further work wait for an event.");
    module.def("query", &query, py::arg("event"), "Tell whether an event's work is done.");
    module.def("is_capturing", &is_capturing, py::arg("device"), py::arg("stream"),
               "Tell whether what a stream is given now goes into a graph.");
    module.def("synchronize", &synchronize, py::arg("device"), py::arg("stream"),
               "Block the host until a stream's work is done.");
    module.def("synchronize_event", &synchronize_event, py::arg("event"),
               "Block the host until an event's work is done.");
}
