// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>
#include <vector>

#include "batch_args.hpp"
#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "kvcore/cuda.hpp"
#include "paged_batch_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::python::BatchArgs;
using kvcore::python::check_status;
using kvcore::python::DeviceNumbers;
using kvcore::python::Move;
using kvcore::python::seen;
using kvcore::python::seen_all;
using kvcore::python::stream_of;
using kvcore::python::TokenTransfer;
using kvcore::python::TransferArgs;

namespace {

/// The part of a call for a pool, and the pages of the pool.
struct Part {
    Move move;
    std::int64_t num_pages;
    std::int64_t num_tokens;
};

/// Checks all arguments before anything is enqueued. Offsets on the device may end before the
/// tokens; the remaining tokens are padding.
std::vector<Part> parts_of(const py::list& transfers, const BatchArgs& batch, bool is_readable,
                           bool writes_pool) {
    std::vector<Part> found;
    TransferArgs args(writes_pool);
    for (const py::handle each : transfers) {
        const TokenTransfer& transfer = args.add(seen_all(each).cast<py::tuple>());
        const bool has_tokens = transfer.tokens.ndim() > 0;
        const std::int64_t total = is_readable  ? batch.total()
                                   : has_tokens ? transfer.tokens.shape(0)
                                                : 0;
        found.push_back({transfer.checked(total, writes_pool), transfer.pool.shape(0), total});
    }
    for (const auto& [numbers, name] : batch.numbers()) args.check_numbers(numbers, name);
    return found;
}

cuda::DeviceBatch batch_of(const Part& part, cuda::DeviceBatch batch) {
    batch.num_pages = part.num_pages;
    batch.num_tokens = part.num_tokens;
    return batch;
}

cuda::TokenMove<std::byte, const std::byte> bytes_in(const Move& move) {
    return {move.row, move.rows<std::byte>(), move.source()};
}
cuda::TokenMove<const std::byte, std::byte> bytes_out(const Move& move) {
    return {move.row, move.rows<const std::byte>(), move.tokens};
}

/// Returns true if one launch can move K and V, or both parts of latent rows, as copies or as
/// conversions.
bool is_pair(const std::vector<Part>& parts) {
    if (parts.size() != 2 || parts[0].num_pages != parts[1].num_pages ||
        parts[0].num_tokens != parts[1].num_tokens) {
        return false;
    }
    const Move& k = parts[0].move;
    const Move& v = parts[1].move;
    if (k.is_copy != v.is_copy || k.shape.page_size != v.shape.page_size) return false;
    return k.is_copy || (k.has_scale == v.has_scale && k.wide == v.wide && k.scales == v.scales &&
                         k.shape.heads == v.shape.heads);
}

cuda::Status append(const Part& part, const cuda::DeviceBatch& on_device, cuda::Stream stream) {
    const cuda::DeviceBatch batch = batch_of(part, on_device);
    const Move& move = part.move;
    if (move.is_copy) {
        return cuda::append_batch(move.row, move.rows<std::byte>(), batch, move.source(), nullptr,
                                  stream);
    }
    return move.has_scale ? cuda::append_batch(move.shape, move.pool, batch, move.source(),
                                               move.wide, move.scale, nullptr, stream)
                          : cuda::append_batch(move.shape, move.pool, batch, move.source(),
                                               move.wide, move.scales, nullptr, stream);
}

cuda::Status gather(const Part& part, const cuda::DeviceBatch& on_device, cuda::Stream stream) {
    const cuda::DeviceBatch batch = batch_of(part, on_device);
    const Move& move = part.move;
    return move.is_copy ? cuda::gather_batch(move.row, move.rows<const std::byte>(), batch,
                                             move.tokens, nullptr, stream)
                        : cuda::gather_batch(move.shape, move.readable_pool(), batch, move.tokens,
                                             move.wide, nullptr, stream);
}

cuda::Status append(const std::vector<Part>& parts, const cuda::DeviceBatch& on_device,
                    cuda::Stream stream) {
    if (is_pair(parts)) {
        const Move& k = parts[0].move;
        const Move& v = parts[1].move;
        const cuda::DeviceBatch batch = batch_of(parts[0], on_device);
        if (k.is_copy) {
            return cuda::append_batch(bytes_in(k), bytes_in(v), batch, nullptr, stream);
        }
        const cuda::TensorPair<kvcore::PagedTensor<std::byte>> pools{k.pool, v.pool};
        const cuda::TensorPair<kvcore::TokenRows<const std::byte>> sources{k.source(), v.source()};
        return k.has_scale
                   ? cuda::append_batch(k.shape, pools, batch, sources, k.wide,
                                        cuda::TensorPair<float>{k.scale, v.scale}, nullptr, stream)
                   : cuda::append_batch(k.shape, pools, batch, sources, k.wide, k.scales, nullptr,
                                        stream);
    }
    cuda::Status status = cuda::kSuccess;
    for (const Part& part : parts) {
        if (status == cuda::kSuccess) status = append(part, on_device, stream);
    }
    return status;
}

cuda::Status gather(const std::vector<Part>& parts, const cuda::DeviceBatch& on_device,
                    cuda::Stream stream) {
    if (is_pair(parts)) {
        const Move& k = parts[0].move;
        const Move& v = parts[1].move;
        const cuda::DeviceBatch batch = batch_of(parts[0], on_device);
        return k.is_copy ? cuda::gather_batch(bytes_out(k), bytes_out(v), batch, nullptr, stream)
                         : cuda::gather_batch(k.shape, {k.readable_pool(), v.readable_pool()},
                                              batch, {k.tokens, v.tokens}, k.wide, nullptr, stream);
    }
    cuda::Status status = cuda::kSuccess;
    for (const Part& part : parts) {
        if (status == cuda::kSuccess) status = gather(part, on_device, stream);
    }
    return status;
}

void append_tokens(const py::list& transfers, const py::object& table, const py::object& lengths,
                   const py::object& offsets, int device, std::uintptr_t stream) {
    const py::array pages = seen(table);
    const DeviceNumbers ends(offsets);
    const BatchArgs batch(pages, ends.checked(), ends.is_readable());
    const py::array cached = lengths.is_none() ? py::array() : seen(lengths);
    const std::uint32_t* begin = lengths.is_none() ? nullptr : batch.cached(cached);
    const std::vector<Part> parts = parts_of(transfers, batch, ends.is_readable(), true);
    const cuda::DeviceBatch on_device{batch.table(), {begin, ends.data<std::uint32_t>()}, 0, 0};
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = append(parts, on_device, stream_of(device, stream));
    }
    check_status(status, "appending tokens on cuda:", device);
}

void gather_tokens(const py::list& transfers, const py::object& table, const py::object& offsets,
                   int device, std::uintptr_t stream) {
    const py::array pages = seen(table);
    const DeviceNumbers ends(offsets);
    const BatchArgs batch(pages, ends.checked(), ends.is_readable());
    const std::vector<Part> parts = parts_of(transfers, batch, ends.is_readable(), false);
    const cuda::DeviceBatch on_device{batch.table(), {nullptr, ends.data<std::uint32_t>()}, 0, 0};
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = gather(parts, on_device, stream_of(device, stream));
    }
    check_status(status, "gathering tokens on cuda:", device);
}

}  // namespace

void bind_cuda_batch(py::module_& module) {
    module.def("append_tokens", &append_tokens, py::arg("transfers"), py::arg("table"),
               py::arg("lengths"), py::arg("offsets"), py::arg("device"), py::arg("stream"));
    module.def("gather_tokens", &gather_tokens, py::arg("transfers"), py::arg("table"),
               py::arg("offsets"), py::arg("device"), py::arg("stream"));
}
