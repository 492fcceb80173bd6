// SPDX-License-Identifier: Apache-2.0
// Makes checked views of whole caches from arrays.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "kvcore/page_bytes.hpp"

namespace kvcore::python {

/// K or V of a cache: an array [pages, layers, ...], or a list with an array [pages, ...] of the
/// same shape and strides for each layer. The last `dense` axes are contiguous. Sizes and strides
/// are without the layers.
template <class Byte>
class LayeredArg {
   public:
    /// `rank`: the axes of the single array. ValueError for anything else, or for read-only memory
    /// that is written.
    LayeredArg(const pybind11::list& arrays, const char* name, pybind11::ssize_t rank,
               pybind11::ssize_t dense)
        : name_(name) {
        for (const pybind11::handle each : arrays) {
            add(pybind11::cast<pybind11::array>(each), rank, dense);
        }
        if (data_.empty()) throw pybind11::value_error(concat(name, " has no layers"));
        if (!std::is_const_v<Byte>) check_layers_apart(arrays);
    }

    [[nodiscard]] const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
    [[nodiscard]] std::int64_t stride(std::size_t axis) const noexcept { return strides_[axis]; }
    [[nodiscard]] std::int64_t layer_stride() const noexcept { return layer_stride_; }
    [[nodiscard]] std::int64_t layers() const noexcept { return layers_; }
    [[nodiscard]] std::int64_t item_size() const noexcept { return item_size_; }
    [[nodiscard]] Byte* data() const noexcept { return data_[0]; }
    /// Returns a pointer for each layer, or nullptr for a single array.
    [[nodiscard]] Byte* const* table() const noexcept {
        return data_.size() > 1 ? data_.data() : nullptr;
    }

    template <class Other>
    void check_apart(const LayeredArg<Other>& other) const {
        for (const Extent& mine : extents_) {
            for (const Extent& theirs : other.extents()) {
                if (!mine.overlaps(theirs)) continue;
                throw pybind11::value_error(
                    concat(name_, " and ", other.name(),
                           " overlap in memory; copy_pages copies within one pool"));
            }
        }
    }
    [[nodiscard]] const std::vector<Extent>& extents() const noexcept { return extents_; }
    [[nodiscard]] const char* name() const noexcept { return name_; }

   private:
    void add(const pybind11::array& array, pybind11::ssize_t rank, pybind11::ssize_t dense) {
        const bool is_whole = array.ndim() == rank;
        if (array.ndim() != rank - 1 && (!is_whole || !data_.empty())) {
            throw pybind11::value_error(concat(name_, " has shape ", shape_text(array),
                                               ", must have ", rank,
                                               " axes, or one axis less per layer array"));
        }
        check_numbers(array, name_);
        std::vector<std::int64_t> shape;
        std::vector<std::int64_t> strides;
        for (pybind11::ssize_t axis = 0; axis < array.ndim(); ++axis) {
            if (is_whole && axis == 1) continue;
            shape.push_back(array.shape(axis));
            strides.push_back(array.strides(axis));
        }
        check(array, shape, strides, dense);
        layers_ = is_whole ? array.shape(1) : layers_ + 1;
        layer_stride_ = is_whole ? array.strides(1) : 0;
        item_size_ = array.itemsize();
        extents_.emplace_back(array);
        data_.push_back(static_cast<Byte*>(const_cast<void*>(array.data())));
        shape_ = std::move(shape);
        strides_ = std::move(strides);
    }

    void check(const pybind11::array& array, const std::vector<std::int64_t>& shape,
               const std::vector<std::int64_t>& strides, pybind11::ssize_t dense) const {
        const bool is_alike = shape == shape_ && strides == strides_;
        if (!data_.empty() && (!is_alike || array.itemsize() != item_size_)) {
            throw pybind11::value_error(
                concat("the layers of ", name_, " differ; all must have one shape and strides"));
        }
        std::int64_t step = array.itemsize();
        for (std::size_t i = 0; i < static_cast<std::size_t>(dense); ++i) {
            const std::size_t axis = shape.size() - 1 - i;
            if (shape[axis] > 1 && strides[axis] != step) {
                throw pybind11::value_error(
                    concat(name_, " is strided within a row; make its last axes contiguous"));
            }
            step *= shape[axis];
        }
        if (std::is_const_v<Byte>) return;
        if (!array.writeable()) {
            throw pybind11::value_error(concat(name_, " is read-only; pass a writable array"));
        }
        check_own_memory(array, name_);
    }

    // It is enough to compare neighbours in memory: all layers have the same shape and strides.
    void check_layers_apart(const pybind11::list& arrays) const {
        std::vector<pybind11::array> layers;
        for (const pybind11::handle each : arrays) layers.push_back(each.cast<pybind11::array>());
        std::sort(layers.begin(), layers.end(), [](const auto& a, const auto& b) {
            return reinterpret_cast<std::uintptr_t>(a.data()) <
                   reinterpret_cast<std::uintptr_t>(b.data());
        });
        for (std::size_t i = 1; i < layers.size(); ++i) {
            check_no_common_memory(layers[i], concat("a layer of ", name_), layers[i - 1],
                                   "another layer");
        }
    }

    const char* name_;
    std::vector<Byte*> data_;
    std::vector<Extent> extents_;
    std::vector<std::int64_t> shape_;
    std::vector<std::int64_t> strides_;
    std::int64_t layers_ = 0;
    std::int64_t layer_stride_ = 0;
    std::int64_t item_size_ = 0;
};

/// A cache as [K] or [K, V]; each is an array [pages, layers, page_size, heads, dim] or a list by
/// layer. Or in vLLM's layout [pages, layers, heads, units, page_size, elements of a unit].
template <class Byte>
class CacheArg {
   public:
    CacheArg(const pybind11::list& tensors, const char* name, bool is_packed) {
        for (const pybind11::handle each : tensors) {
            tensors_.emplace_back(pybind11::cast<pybind11::list>(each), name, is_packed ? 6 : 5,
                                  is_packed ? 3 : 1);
            const LayeredArg<Byte>& added = tensors_.back();
            const Sizes sizes = sizes_of(added, is_packed);
            if (tensors_.size() > 1 && !(sizes == sizes_)) {
                throw pybind11::value_error(
                    concat("K and V of ", name, " differ in pages, layers, page size or heads"));
            }
            sizes_ = sizes;
            if (is_packed) check_unit(added);
            row_bytes_.push_back(added.shape().back() * added.item_size() *
                                 (is_packed ? added.shape()[2] : 1));
        }
        if (tensors_.empty() || tensors_.size() > 2) {
            throw pybind11::value_error(concat(name, " must be K, or K and V"));
        }
        if (!std::is_const_v<Byte> && tensors.size() == 2) check_parts_apart(tensors, name);
    }

    struct Sizes {
        std::int64_t pages, layers, page_size, heads;
        bool operator==(const Sizes& other) const noexcept {
            return pages == other.pages && fits(other);
        }
        /// Returns true if the sizes agree in all fields except pages.
        [[nodiscard]] bool fits(const Sizes& other) const noexcept {
            return layers == other.layers && page_size == other.page_size && heads == other.heads;
        }
    };
    [[nodiscard]] const Sizes& sizes() const noexcept { return sizes_; }
    [[nodiscard]] const std::vector<std::int64_t>& row_bytes() const noexcept { return row_bytes_; }
    [[nodiscard]] const std::vector<LayeredArg<Byte>>& tensors() const noexcept { return tensors_; }

    [[nodiscard]] CacheView<Byte> view() const {
        CacheView<Byte> view{sizes_.layers, sizes_.page_size, sizes_.heads, {}, {}};
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            CacheTensor<Byte>& tensor = i == 0 ? view.k : view.v;
            place(tensor, tensors_[i]);
            tensor.token_stride = tensors_[i].stride(1);
            tensor.head_stride = tensors_[i].stride(2);
            tensor.row_bytes = row_bytes_[i];
        }
        return view;
    }
    [[nodiscard]] PackedCacheView<Byte> packed_view() const {
        PackedCacheView<Byte> view;
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            PackedTensor<Byte>& tensor = i == 0 ? view.k : view.v;
            place(tensor, tensors_[i]);
            tensor.head_stride = tensors_[i].stride(1);
            tensor.units = tensors_[i].shape()[2];
            tensor.unit_bytes = tensors_[i].shape()[4] * tensors_[i].item_size();
        }
        return view;
    }
    /// Returns a packed cache as rows: a row is the part of a page for a head.
    [[nodiscard]] CacheView<Byte> head_view() const {
        CacheView<Byte> view{sizes_.layers, 1, sizes_.heads, {}, {}};
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            CacheTensor<Byte>& tensor = i == 0 ? view.k : view.v;
            place(tensor, tensors_[i]);
            tensor.head_stride = tensors_[i].stride(1);
            tensor.row_bytes = row_bytes_[i] * sizes_.page_size;
        }
        return view;
    }

   private:
    // Compares K and V layer by layer, or as whole arrays.
    static void check_parts_apart(const pybind11::list& tensors, const char* name) {
        const auto keys = tensors[0].cast<pybind11::list>();
        const auto values = tensors[1].cast<pybind11::list>();
        for (std::size_t i = 0; i < std::min(keys.size(), values.size()); ++i) {
            check_no_common_memory(values[i].cast<pybind11::array>(), concat("V of ", name),
                                   keys[i].cast<pybind11::array>(), "K");
        }
    }

    template <class Tensor>
    static void place(Tensor& tensor, const LayeredArg<Byte>& from) noexcept {
        tensor.data = from.data();
        tensor.layers = from.table();
        tensor.page_stride = from.stride(0);
        tensor.layer_stride = from.layer_stride();
    }

    static void check_unit(const LayeredArg<Byte>& tensor) {
        const std::int64_t bytes = tensor.shape()[4] * tensor.item_size();
        if (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 16) return;
        throw pybind11::value_error(
            concat(tensor.name(), " has units of ", bytes, " bytes, must be 1, 2, 4 or 16"));
    }

    static Sizes sizes_of(const LayeredArg<Byte>& tensor, bool is_packed) {
        const auto& shape = tensor.shape();
        return {shape[0], tensor.layers(), is_packed ? shape[3] : shape[1],
                is_packed ? shape[1] : shape[2]};
    }

    std::vector<LayeredArg<Byte>> tensors_;
    std::vector<std::int64_t> row_bytes_;
    Sizes sizes_ = {};
};

/// The arrays of a replica's pool. Keeps them alive for the owner, which copies within them.
class PoolArg {
   public:
    /// `arrays`: a list of the arguments that CacheArg takes.
    explicit PoolArg(pybind11::list arrays) : arrays_(std::move(arrays)) {
        caches_.reserve(arrays_.size());
        for (const pybind11::handle each : arrays_) {
            caches_.emplace_back(pybind11::cast<pybind11::list>(each), "the pool", false);
        }
    }

    [[nodiscard]] const std::vector<CacheArg<std::byte>>& caches() const noexcept {
        return caches_;
    }
    [[nodiscard]] std::vector<CacheView<std::byte>> views() const {
        std::vector<CacheView<std::byte>> views;
        for (const CacheArg<std::byte>& cache : caches_) views.push_back(cache.view());
        return views;
    }

   private:
    pybind11::list arrays_;
    std::vector<CacheArg<std::byte>> caches_;
};

}  // namespace kvcore::python
