// SPDX-License-Identifier: Apache-2.0
#include "kvcore/disk_store.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "kvcore/disk_lower_store.hpp"
#include "kvcore/page_bytes.hpp"
#include "store_args.hpp"

namespace py = pybind11;
using kvcore::BreakerState;
using kvcore::DiskLowerStore;
using kvcore::DiskReport;
using kvcore::DiskStore;
using kvcore::DiskStoreConfig;
using kvcore::DiskStoreStats;
using kvcore::LowerStore;
using kvcore::StoreKey;
using kvcore::StoreTask;
using kvcore::TierMemory;
using kvcore::python::BatchArg;
using kvcore::python::HeldBuffer;
using kvcore::python::key_arg;
using kvcore::python::keys_arg;
using kvcore::python::PlacedBatchArg;
using kvcore::python::rows_arg;

namespace {

/// A batch in flight, with the memory that it reads or writes.
class BoundTask {
   public:
    BoundTask(StoreTask task, std::vector<HeldBuffer> held)
        : held_(std::move(held)), task_(std::make_unique<StoreTask>(std::move(task))) {}
    BoundTask(BoundTask&& other) noexcept = default;
    BoundTask& operator=(BoundTask&& other) = delete;
    ~BoundTask() {
        if (task_ == nullptr) return;
        PyThreadState* const state = PyEval_SaveThread();
        task_.reset();  // waits until the memory is unused
        PyEval_RestoreThread(state);
    }

    [[nodiscard]] bool done() const noexcept { return task_->done(); }
    // Waits in slices, so that Ctrl-C ends the wait.
    [[nodiscard]] bool wait(const std::optional<double>& timeout) const {
        constexpr double kSlice = 0.1;
        if (timeout && !(*timeout >= 0)) {
            throw py::value_error("timeout is negative, must be at least 0 seconds, or None");
        }
        double left = timeout.value_or(std::numeric_limits<double>::infinity());
        for (;;) {
            const double slice = std::min(left, kSlice);
            bool is_done = false;
            {
                const py::gil_scoped_release unlocked;
                is_done = task_->wait(slice);
            }
            if (is_done) return true;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
            left -= slice;
            if (left <= 0) return false;
        }
    }
    [[nodiscard]] std::int64_t result() const {
        static_cast<void>(wait(std::nullopt));
        return task_->result();
    }

   private:
    std::vector<HeldBuffer> held_;
    std::unique_ptr<StoreTask> task_;
};

/// A store that releases the GIL while it closes.
class BoundDiskStore {
   public:
    explicit BoundDiskStore(DiskStoreConfig config) {
        const py::gil_scoped_release unlocked;
        store_ = std::make_unique<DiskStore>(std::move(config));
    }
    BoundDiskStore(const BoundDiskStore&) = delete;
    BoundDiskStore& operator=(const BoundDiskStore&) = delete;
    ~BoundDiskStore() {
        PyThreadState* const state = PyEval_SaveThread();
        store_.reset();
        PyEval_RestoreThread(state);
    }
    [[nodiscard]] DiskStore& store() const noexcept { return *store_; }

   private:
    std::unique_ptr<DiskStore> store_;
};

/// A disk below a host tier, with the memory of the tier.
class BoundLowerStore {
   public:
    BoundLowerStore(const BoundDiskStore& disk, const py::list& pages, const py::list& slots,
                    bool has_parts, double seconds) {
        std::vector<TierMemory> memory(pages.size());
        for (std::size_t i = 0; i < pages.size(); ++i) {
            memory[i].pages = rows_arg(pages[i], "pages", held_);
        }
        for (std::size_t i = 0; i < slots.size(); ++i) {
            memory.at(i).slots = rows_arg(slots[i], "slots", held_);
        }
        store_ =
            std::make_unique<DiskLowerStore>(disk.store(), std::move(memory), has_parts, seconds);
    }
    [[nodiscard]] DiskLowerStore& store() const noexcept { return *store_; }

   private:
    std::vector<HeldBuffer> held_;
    std::unique_ptr<DiskLowerStore> store_;
};

py::bytes bytes_of(const StoreKey& key) {
    return {reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()};
}

std::unique_ptr<BoundDiskStore> open_store(
    const std::vector<std::pair<std::string, std::int64_t>>& directories, std::int64_t page_bytes,
    const py::object& fingerprint, int threads, std::int64_t queue_pages,
    std::int64_t segment_bytes, bool direct, std::int32_t breaker_failures, double breaker_seconds,
    double slow_seconds) {
    DiskStoreConfig config;
    for (const auto& [path, quota] : directories) config.directories.push_back({path, quota});
    config.page_bytes = page_bytes;
    config.fingerprint = key_arg(fingerprint, "fingerprint");
    config.threads = threads;
    config.queue_pages = queue_pages;
    config.segment_bytes = segment_bytes;
    config.direct = direct;
    config.breaker_failures = breaker_failures;
    config.breaker_seconds = breaker_seconds;
    config.slow_seconds = slow_seconds;
    return std::make_unique<BoundDiskStore>(std::move(config));
}

template <class Byte>
BoundTask begin(const BoundDiskStore& bound, const py::sequence& keys,
                const py::sequence& buffers) {
    BatchArg<Byte> batch(keys, buffers);
    StoreTask task;
    {
        const py::gil_scoped_release unlocked;
        if constexpr (std::is_const_v<Byte>) {
            task = bound.store().put_async(std::move(batch.pages));
        } else {
            task = bound.store().get_async(std::move(batch.pages));
        }
    }
    return {std::move(task), std::move(batch.held)};
}

BoundTask begin_placed(const BoundDiskStore& bound, const py::sequence& keys,
                       const py::sequence& places, const py::object& rows,
                       const py::object& slots) {
    PlacedBatchArg batch(keys, places, rows, slots);
    StoreTask task;
    {
        const py::gil_scoped_release unlocked;
        task = bound.store().get_async(std::move(batch.pages));
    }
    return {std::move(task), std::move(batch.held)};
}

std::vector<std::uint64_t> parts_of(const BoundDiskStore& bound, const py::sequence& given) {
    const std::vector<StoreKey> keys = keys_arg(given);
    std::vector<std::uint64_t> parts(keys.size());
    const py::gil_scoped_release unlocked;
    bound.store().parts_of(keys.data(), keys.size(), parts.data());
    return parts;
}

std::int64_t remove_pages(const BoundDiskStore& bound, const py::sequence& given) {
    const std::vector<StoreKey> keys = keys_arg(given);
    const py::gil_scoped_release unlocked;
    return bound.store().remove(keys);
}

const char* name_of(BreakerState state) noexcept {
    if (state == BreakerState::kClosed) return "closed";
    return state == BreakerState::kOpen ? "open" : "half-open";
}

py::dict stats_of(const BoundDiskStore& bound) {
    const DiskStoreStats stats = bound.store().stats();
    py::dict out;
    out["slots"] = stats.slots;
    out["capacity"] = stats.capacity;
    out["stored"] = stats.stored;
    out["broken"] = stats.broken;
    out["restored"] = stats.restored;
    out["foreign"] = stats.foreign;
    out["hits"] = stats.hits;
    out["misses"] = stats.misses;
    out["written"] = stats.written;
    out["evicted"] = stats.evicted;
    out["bytes_read"] = stats.bytes_read;
    out["bytes_written"] = stats.bytes_written;
    out["corrupt"] = stats.corrupt;
    out["errors"] = stats.errors;
    out["timeouts"] = stats.timeouts;
    out["refused"] = stats.refused;
    out["no_room"] = stats.no_room;
    out["queued"] = stats.queued;
    out["breaker"] = name_of(stats.breaker);
    out["direct"] = stats.direct;
    out["read_times"] = stats.read_times;
    out["write_times"] = stats.write_times;
    return out;
}

py::dict inspect(const std::string& directory, bool verify) {
    DiskReport report;
    {
        const py::gil_scoped_release unlocked;
        report = kvcore::inspect_disk_store(directory, verify);
    }
    py::dict fingerprints;
    for (std::size_t i = 0; i < report.fingerprints.size(); ++i) {
        fingerprints[bytes_of(report.fingerprints[i])] = report.page_counts[i];
    }
    py::dict out;
    out["slot_bytes"] = report.slot_bytes;
    out["slots"] = report.slots;
    out["stored"] = report.stored;
    out["payload_bytes"] = report.payload_bytes;
    out["file_bytes"] = report.file_bytes;
    out["corrupt"] = report.corrupt;
    out["owner"] = report.owner;
    out["bad_slots"] = report.bad_slots;
    out["fingerprints"] = fingerprints;
    return out;
}

std::int64_t purge(const std::string& directory) {
    const py::gil_scoped_release unlocked;
    return kvcore::purge_disk_store(directory);
}

std::uint32_t checksum(const py::object& data, std::uint32_t before) {
    const HeldBuffer buffer(data, false, "data");
    const py::gil_scoped_release unlocked;
    return kvcore::crc32c(buffer.data(), static_cast<std::size_t>(buffer.bytes()), before);
}

void bind_task(py::module_& module) {
    py::class_<BoundTask>(module, "StoreTask",
                          "A batch of pages in flight to or from a disk; holds their buffers.")
        .def("done", &BoundTask::done, "Return true if the batch is done, without waiting.")
        .def("wait", &BoundTask::wait, py::arg("timeout") = py::none(),
             "Wait for `timeout` seconds, or without end; return true if the batch is done.")
        .def("result", &BoundTask::result,
             "Wait; return the number of pages read, a prefix of the batch, or stored now.");
}

void bind_lower_store(py::module_& module) {
    py::class_<BoundLowerStore>(module, "DiskLowerStore",
                                "A disk store below a host tier, with the memory of the tier.")
        .def(py::init<const BoundDiskStore&, py::list, py::list, bool, double>(), py::arg("store"),
             py::arg("pages"), py::arg("slots"), py::arg("has_parts"), py::arg("seconds"),
             py::keep_alive<1, 2>())
        .def(
            "take_counters",
            [](const BoundLowerStore& bound) {
                const DiskLowerStore::Counters now = bound.store().take_counters();
                return py::make_tuple(now.errors, now.timeouts, now.read_seconds,
                                      now.write_seconds);
            },
            "Return the number of failed calls, of reads that exceeded the time limit, and the "
            "seconds of the last reads and writes, all since the last call.")
        .def("_capsule", [](const BoundLowerStore& bound) {
            return py::capsule(static_cast<LowerStore*>(&bound.store()), "kvcore.LowerStore");
        });
}

}  // namespace

void bind_disk_store(py::module_& module) {
    bind_task(module);
    py::class_<BoundDiskStore>(
        module, "DiskStore", "Pages in files of fixed slots, by key: see kvcore.stores.DiskStore.")
        .def(py::init(&open_store), py::arg("directories"), py::arg("page_bytes"),
             py::arg("fingerprint"), py::kw_only(), py::arg("threads"), py::arg("queue_pages"),
             py::arg("segment_bytes"), py::arg("direct"), py::arg("breaker_failures"),
             py::arg("breaker_seconds"), py::arg("slow_seconds"))
        .def("get", &begin<std::byte>, py::arg("keys"), py::arg("buffers"),
             "Start reading pages into buffers.")
        .def("get_placed", &begin_placed, py::arg("keys"), py::arg("places"), py::arg("rows"),
             py::arg("slots") = py::none(),
             "Start reading pages into rows of arrays: a list of (part, row) for each key.")
        .def("put", &begin<const std::byte>, py::arg("keys"), py::arg("buffers"),
             "Start writing pages from buffers.")
        .def("parts_of", &parts_of, py::arg("keys"),
             "Return the parts of each page, a bit for each part.")
        .def("remove", &remove_pages, py::arg("keys"), "Remove pages; return the number removed.")
        .def(
            "clear",
            [](const BoundDiskStore& bound) {
                const py::gil_scoped_release unlocked;
                return bound.store().clear();
            },
            "Remove all pages, also pages in flight; return the number removed.")
        .def("stats", &stats_of, "Return the counters since the store was opened.")
        .def_property_readonly(
            "slot_bytes", [](const BoundDiskStore& bound) { return bound.store().slot_bytes(); },
            "The bytes that a page takes in a file.")
        .def_property_readonly(
            "page_bytes", [](const BoundDiskStore& bound) { return bound.store().page_bytes(); },
            "The maximum number of bytes of a page.")
        .def_property_readonly(
            "closed", [](const BoundDiskStore& bound) { return bound.store().is_closed(); },
            "True if the store refuses every call: it is closed, or was opened before a fork.")
        .def(
            "close",
            [](const BoundDiskStore& bound) {
                const py::gil_scoped_release unlocked;
                bound.store().close();
            },
            "Finish waiting batches and release the directories.")
        .def(
            "check_integrity",
            [](const BoundDiskStore& bound) {
                const py::gil_scoped_release unlocked;
                bound.store().check_integrity();
            },
            "Raise AssertionError unless each slot is free, being written, or found by its key.");
    bind_lower_store(module);
    module.def("inspect_disk_store", &inspect, py::arg("directory"), py::arg("verify"),
               "Return the content of the files of a store; `verify`: check all bytes.");
    module.def("purge_disk_store", &purge, py::arg("directory"),
               "Remove the files of a store; return their bytes.");
    module.def("crc32c", &checksum, py::arg("data"), py::arg("before") = 0,
               "Return the CRC-32C of bytes. `before`: the CRC of the bytes before them.");
}
