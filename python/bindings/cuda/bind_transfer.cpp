// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "kvcore/cuda.hpp"
#include "transfer_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::LayerRange;
using kvcore::PagePair;
using kvcore::PageStart;
using kvcore::python::check_alike;
using kvcore::python::check_rank;
using kvcore::python::check_status;
using kvcore::python::concat;
using kvcore::python::count_independent;
using kvcore::python::Destination;
using kvcore::python::DeviceNumbers;
using kvcore::python::Ids;
using kvcore::python::layer_range;
using kvcore::python::pairs_of;
using kvcore::python::seen_all;
using kvcore::python::Source;
using kvcore::python::starts_of;
using kvcore::python::stream_of;

namespace {

static_assert(sizeof(PageStart) == 3 * sizeof(std::int64_t), "rows of an array are starts");

py::ssize_t count_rows(const Ids& numbers, const char* name, py::ssize_t columns) {
    check_rank(numbers, name, concat("(n, ", columns, ")").c_str(), 2);
    if (numbers.shape(1) == columns) return numbers.shape(0);
    throw py::value_error(concat(name, " must have ", columns, " columns"));
}

/// Pairs of pages [n, 2], or separate lists of sources and destinations [n] on the device.
class PagesToMove {
   public:
    explicit PagesToMove(const py::object& given)
        : are_split_(py::isinstance<py::list>(given)),
          first_(are_split_ ? py::object(given.cast<py::list>()[0]) : given),
          second_(are_split_ ? py::object(given.cast<py::list>()[1]) : given),
          sources_(first_.ids("the pages")),
          destinations_(second_.ids("the pages")) {
        if (!are_split_) {
            count_ = count_rows(sources_, "the pages", 2);
            return;
        }
        check_rank(sources_, "the pages", "(n,)", 1);
        check_rank(destinations_, "the pages", "(n,)", 1);
        if (sources_.size() != destinations_.size()) {
            throw py::value_error("the numbers of sources and destinations differ");
        }
        count_ = sources_.size();
    }

    [[nodiscard]] bool are_split() const noexcept { return are_split_; }
    [[nodiscard]] bool are_readable() const noexcept { return first_.is_readable(); }
    [[nodiscard]] py::ssize_t count() const noexcept { return count_; }
    [[nodiscard]] const Ids& checked() const noexcept { return sources_; }
    [[nodiscard]] const PagePair* pairs() const { return first_.data<PagePair>(); }
    [[nodiscard]] const std::int64_t* sources() const { return first_.data<std::int64_t>(); }
    [[nodiscard]] const std::int64_t* destinations() const { return second_.data<std::int64_t>(); }

   private:
    bool are_split_;
    DeviceNumbers first_;
    DeviceNumbers second_;
    Ids sources_;
    Ids destinations_;
    py::ssize_t count_ = 0;
};

/// Calls move(pages...) with the pairs or with the two lists.
template <class Move>
cuda::Status with_pages(const PagesToMove& pages, const Move& move) {
    return pages.are_split() ? move(pages.sources(), pages.destinations()) : move(pages.pairs());
}

void transfer(const py::list& source, bool source_is_packed, const py::list& destination,
              bool destination_is_packed, const py::object& pairs, std::int64_t first_layer,
              std::int64_t num_layers, std::int64_t max_blocks, int device, std::uintptr_t stream) {
    const Source from(seen_all(source).cast<py::list>(), "the source", source_is_packed);
    const Destination to(seen_all(destination).cast<py::list>(), "the destination",
                         destination_is_packed);
    check_alike(from, to);
    const PagesToMove pages(pairs);
    if (pages.are_readable()) {
        (void)pairs_of(pages.checked(), from.sizes().pages, to.sizes().pages);
    }
    const py::ssize_t n = pages.count();
    const LayerRange range = layer_range(first_layer, num_layers, from.sizes().layers);
    if (max_blocks < 0) {
        throw py::value_error(concat("max_blocks is ", max_blocks, ", must be at least 0"));
    }
    const cuda::PageCounts counts{from.sizes().pages, to.sizes().pages};
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        const cuda::Stream queue = stream_of(device, stream);
        status = with_pages(pages, [&](auto... ids) {
            if (source_is_packed && destination_is_packed) {
                return cuda::transfer(from.head_view(), to.head_view(), counts, ids..., n, range,
                                      max_blocks, queue);
            }
            if (destination_is_packed) {
                return cuda::transfer_to_packed(from.view(), to.packed_view(), counts, ids..., n,
                                                range, max_blocks, queue);
            }
            if (source_is_packed) {
                return cuda::transfer_from_packed(from.packed_view(), to.view(), counts, ids..., n,
                                                  range, max_blocks, queue);
            }
            return cuda::transfer(from.view(), to.view(), counts, ids..., n, range, max_blocks,
                                  queue);
        });
    }
    check_status(status, "moving ", n, " pages on cuda:", device);
}

/// Enqueues copies with readable values as if in their order; other copies all at once.
void copy_partial(const py::list& given, const py::object& copies, int device,
                  std::uintptr_t stream) {
    const Destination pool(seen_all(given).cast<py::list>(), "the pool", false);
    const DeviceNumbers numbers(copies);
    const Ids checked = numbers.ids("copies");
    const auto n = static_cast<std::size_t>(count_rows(checked, "copies", 3));
    std::vector<PageStart> all;
    if (numbers.is_readable()) all = starts_of(checked, pool);
    const auto view = pool.view();
    const auto* starts = numbers.data<PageStart>();
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        for (std::size_t done = 0; done < n && status == cuda::kSuccess;) {
            const std::size_t count =
                all.empty() ? n : count_independent(all.data() + done, n - done);
            status =
                cuda::copy_partial(view, pool.sizes().pages, starts + done,
                                   static_cast<std::int64_t>(count), stream_of(device, stream));
            done += count;
        }
    }
    check_status(status, "copying ", n, " starts of pages on cuda:", device);
}

}  // namespace

void bind_cuda_transfer(py::module_& module) {
    module.def("transfer", &transfer, py::arg("source"), py::arg("source_is_packed"),
               py::arg("destination"), py::arg("destination_is_packed"), py::arg("pairs"),
               py::arg("first_layer"), py::arg("num_layers"), py::arg("max_blocks"),
               py::arg("device"), py::arg("stream"));
    module.def("copy_partial", &copy_partial, py::arg("pool"), py::arg("copies"), py::arg("device"),
               py::arg("stream"));
}
