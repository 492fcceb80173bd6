// SPDX-License-Identifier: Apache-2.0
#include "kvcore/disk_store.hpp"

#include <cmath>
#include <utility>

#include "kvcore/errors.hpp"
#include "store/disk/disk_impl.hpp"

namespace kvcore {
namespace {

using detail::concat;

constexpr std::int64_t kLargestPage = std::int64_t{1} << 30;
constexpr std::int64_t kMostThreads = 256;

void check_range(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (least <= value && value <= most) return;
    throw std::invalid_argument(concat(name, " is ", value, ", must be ", least, " to ", most));
}

void check_seconds(const char* name, double value) {
    constexpr double kMostSeconds = 1e9;
    if (value > 0 && value <= kMostSeconds) return;
    throw std::invalid_argument(
        concat(name, " is ", value, ", must be more than 0 and at most 1e9 seconds"));
}

void check_directory(const DiskDirectory& directory, std::int64_t slot_bytes) {
    constexpr std::int64_t kMost = std::int64_t{1} << 60;
    if (directory.path.empty() || directory.path.find('\0') != std::string::npos) {
        throw std::invalid_argument("a directory of the disk store has no name; give its path");
    }
    const std::int64_t least = kDiskBlock + slot_bytes;
    if (directory.quota_bytes >= least && directory.quota_bytes <= kMost) return;
    throw std::invalid_argument(concat("directory ", directory.path, " has a quota of ",
                                       directory.quota_bytes, " bytes, must be ", least,
                                       " (one page) .. ", kMost));
}

DiskStoreConfig checked(DiskStoreConfig config) {
    constexpr std::int64_t kMostPages = std::int64_t{1} << 31;
    check_range("page_bytes", config.page_bytes, 1, kLargestPage);
    check_range("threads", config.threads, 1, kMostThreads);
    check_range("queue_pages", config.queue_pages, 1, kMostPages);
    check_range("segment_bytes", config.segment_bytes, 0, std::int64_t{1} << 50);
    check_range("breaker_failures", config.breaker_failures, 1, 1'000'000);
    check_seconds("breaker_seconds", config.breaker_seconds);
    check_seconds("slow_seconds", config.slow_seconds);
    if (config.directories.empty()) {
        throw std::invalid_argument("a disk store without directories; give it a directory");
    }
    for (const DiskDirectory& directory : config.directories) {
        check_directory(directory, kHeaderBytes + whole_blocks(config.page_bytes));
    }
    return config;
}

}  // namespace

StoreTask::StoreTask(std::shared_ptr<StoreJob> job) noexcept : job_(std::move(job)) {}

StoreTask& StoreTask::operator=(StoreTask&& other) noexcept {
    const StoreTask before(std::move(job_));  // its destructor waits
    job_ = std::move(other.job_);
    return *this;
}

StoreTask::~StoreTask() {
    if (job_ != nullptr && job_->is_here()) job_->wait(-1);
}

bool StoreTask::done() const noexcept { return job_ == nullptr || job_->done(); }

bool StoreTask::wait(double seconds) const {
    if (job_ == nullptr) return true;
    if (!job_->is_here()) {
        throw Error(
            "this batch belongs to a process of which this one is a fork; wait in that process");
    }
    return job_->wait(seconds);
}

std::int64_t StoreTask::result() const {
    wait();
    return job_ == nullptr ? 0 : job_->result();
}

DiskStore::DiskStore(DiskStoreConfig config) : DiskStore(std::move(config), system_seams()) {}

DiskStore::DiskStore(DiskStoreConfig config, const DiskSeams& seams)
    : impl_(std::make_unique<Impl>(checked(std::move(config)), seams)) {}

// In a fork, the threads, the locks and the directories belong to the parent: leaves them
// untouched.
DiskStore::~DiskStore() {
    if (impl_->is_forked()) {
        [[maybe_unused]] const Impl* left_alone = impl_.release();
    } else {
        impl_->close();
    }
}

std::uint64_t DiskStore::parts_of(const StoreKey& key) const {
    std::uint64_t parts = 0;
    impl_->parts_of(&key, 1, &parts);
    return parts;
}

void DiskStore::parts_of(const StoreKey* keys, std::size_t n, std::uint64_t* parts) const {
    impl_->parts_of(keys, n, parts);
}

StoreTask DiskStore::get_async(std::vector<PageToRead> pages) {
    return StoreTask(impl_->get(std::move(pages)));
}

StoreTask DiskStore::put_async(std::vector<PageToWrite> pages) {
    return StoreTask(impl_->put(std::move(pages)));
}

std::int64_t DiskStore::remove(const std::vector<StoreKey>& keys) { return impl_->remove(keys); }

std::int64_t DiskStore::clear() { return impl_->clear(); }

DiskStoreStats DiskStore::stats() const { return impl_->stats(); }

std::int64_t DiskStore::slot_bytes() const noexcept { return impl_->slot_bytes; }

std::int64_t DiskStore::page_bytes() const noexcept { return impl_->config.page_bytes; }

void DiskStore::close() { impl_->close(); }

bool DiskStore::is_closed() const noexcept { return impl_->is_closed(); }

void DiskStore::check_integrity() const { impl_->check_integrity(); }

}  // namespace kvcore
