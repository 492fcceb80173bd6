// SPDX-License-Identifier: Apache-2.0
#include "kvcore/prefix_index.hpp"

#include <algorithm>
#include <array>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "routing/alive_workers.hpp"
#include "routing/page_table.hpp"
#include "routing/worker_sets.hpp"

namespace kvcore {
namespace {

// How far ahead pages are prefetched: entries of the table, then the sets that they refer to.
constexpr std::size_t kFarAhead = 24;
constexpr std::size_t kAhead = 8;

}  // namespace

class PrefixIndex::Impl {
   public:
    explicit Impl(std::int32_t num_workers)
        : sets_(num_workers), pages_of_(static_cast<std::size_t>(num_workers)) {}

    [[nodiscard]] std::int32_t num_workers() const noexcept {
        return static_cast<std::int32_t>(pages_of_.size());
    }
    [[nodiscard]] std::int64_t& pages_of(std::int32_t worker) {
        if (worker < 0 || worker >= num_workers()) {
            throw std::out_of_range("worker " + std::to_string(worker) + " of " +
                                    std::to_string(num_workers()));
        }
        return pages_of_[static_cast<std::size_t>(worker)];
    }

    void store(std::int32_t worker, const std::uint64_t* pages, std::size_t n, Medium medium) {
        const std::unique_lock lock(mutex_);
        std::int64_t& held = pages_of(worker);
        for (std::size_t i = 0; i < n; ++i) {
            if (i + kAhead < n) table_.prefetch(pages[i + kAhead]);
            std::uint64_t& set = table_.at(pages[i]);
            try {
                const auto at = static_cast<std::uint32_t>(worker);
                held += sets_.add(set, at, static_cast<std::uint8_t>(medium)) ? 1 : 0;
            } catch (const std::bad_alloc&) {
                if (set == 0) table_.erase(&set);
                throw;
            }
        }
    }

    void remove(std::int32_t worker, const std::uint64_t* pages, std::size_t n, Medium medium) {
        const std::unique_lock lock(mutex_);
        std::int64_t& held = pages_of(worker);
        for (std::size_t i = 0; i < n; ++i) {
            if (i + kAhead < n) table_.prefetch(pages[i + kAhead]);
            std::uint64_t* set = table_.known(pages[i]);
            if (set == nullptr) continue;
            const auto at = static_cast<std::uint32_t>(worker);
            held -= sets_.drop(*set, at, static_cast<std::uint8_t>(medium)) ? 1 : 0;
            if (*set == 0) table_.erase(set);
        }
    }

    void clear(std::int32_t worker) {
        const std::unique_lock lock(mutex_);
        std::int64_t& held = pages_of(worker);
        if (held == 0) return;
        table_.update_all([&](std::uint64_t& set) {
            sets_.drop(set, static_cast<std::uint32_t>(worker), kAnyMedium);
        });
        table_.shrink();
        held = 0;
    }

    void match(const std::uint64_t* pages, std::size_t n, std::uint8_t media,
               std::int32_t* held) const {
        std::fill(held, held + num_workers(), 0);
        const std::shared_lock lock(mutex_);
        for (std::size_t i = 0; i < std::min(n, kFarAhead); ++i) table_.prefetch(pages[i]);
        std::array<std::uint64_t, kAhead> ahead{};  // the sets of the next pages
        for (std::size_t i = 0; i < std::min(n, kAhead); ++i) ahead[i] = look(pages[i]);
        AliveWorkers alive;
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint64_t set = ahead[i % kAhead];
            if (i + kFarAhead < n) table_.prefetch(pages[i + kFarAhead]);
            if (i + kAhead < n) ahead[i % kAhead] = look(pages[i + kAhead]);
            if (i == 0) {
                sets_.for_each_word(set, media, [&](std::size_t word, std::uint64_t bits) {
                    alive.add(word, bits);
                });
            } else {
                keep(alive, set, media, static_cast<std::int32_t>(i), held);
            }
            if (alive.is_empty()) return;
        }
        alive.end(static_cast<std::int32_t>(n), held);
    }

    [[nodiscard]] std::int64_t num_pages() const {
        const std::shared_lock lock(mutex_);
        return static_cast<std::int64_t>(table_.size());
    }
    [[nodiscard]] std::int64_t num_pages(std::int32_t worker) {
        const std::shared_lock lock(mutex_);
        return pages_of(worker);
    }
    [[nodiscard]] std::int64_t num_bytes() const {
        const std::shared_lock lock(mutex_);
        return static_cast<std::int64_t>(table_.num_bytes() + sets_.num_bytes() +
                                         pages_of_.size() * sizeof(std::int64_t));
    }
    void check_integrity() const {
        const std::shared_lock lock(mutex_);
        std::vector<std::int64_t> counted(pages_of_.size());
        std::size_t pages = 0;
        table_.for_each([&](std::uint64_t page, std::uint64_t set) {
            ++pages;
            if (table_.find(page) != set) throw std::logic_error("index: each page is found");
            std::int64_t workers = 0;
            sets_.for_each_word(set, kAnyMedium, [&](std::size_t word, std::uint64_t bits) {
                for (std::size_t worker = 64 * word; bits != 0; bits >>= 1U, ++worker) {
                    if ((bits & 1U) == 0) continue;
                    ++counted.at(worker);
                    ++workers;
                }
            });
            if (workers == 0) throw std::logic_error("index: each page has a worker");
            if (sets_.is_single(set) != (workers == 1)) {
                throw std::logic_error("index: the only worker of a page is in its entry");
            }
        });
        if (pages != table_.size()) throw std::logic_error("index: pages are counted");
        if (counted != pages_of_) throw std::logic_error("index: pages of workers are counted");
    }

   private:
    [[nodiscard]] std::uint64_t look(std::uint64_t page) const noexcept {
        const std::uint64_t set = table_.find(page);
        sets_.prefetch(set);
        return set;
    }

    void keep(AliveWorkers& alive, std::uint64_t set, std::uint8_t media, std::int32_t depth,
              std::int32_t* held) const {
        if (sets_.is_row(set)) {
            const auto found = [&](std::size_t word) { return sets_.bits(set, word, media); };
            return alive.keep(found, depth, held);
        }
        std::array<std::uint64_t, AliveWorkers::kMostWords>
            found{};  // few workers: few words are set
        sets_.for_each_word(set, media,
                            [&](std::size_t word, std::uint64_t bits) { found[word] = bits; });
        alive.keep([&](std::size_t word) { return found[word]; }, depth, held);
    }

    mutable std::shared_mutex mutex_;
    PageTable table_;
    WorkerSets sets_;
    std::vector<std::int64_t> pages_of_;  // by worker
};

static_assert(PrefixIndex::kMostWorkers <= 64 * AliveWorkers::kMostWords, "a word for each 64");

PrefixIndex::PrefixIndex(std::int32_t num_workers) {
    if (num_workers < 1 || num_workers > kMostWorkers) {
        throw std::invalid_argument("num_workers is " + std::to_string(num_workers) +
                                    ", must be 1 .. " + std::to_string(kMostWorkers));
    }
    impl_ = std::make_unique<Impl>(num_workers);
}
PrefixIndex::~PrefixIndex() = default;

std::int32_t PrefixIndex::num_workers() const noexcept { return impl_->num_workers(); }
std::int64_t PrefixIndex::num_pages() const { return impl_->num_pages(); }
std::int64_t PrefixIndex::num_pages(std::int32_t worker) const { return impl_->num_pages(worker); }
std::int64_t PrefixIndex::num_bytes() const { return impl_->num_bytes(); }
void PrefixIndex::store(std::int32_t worker, const std::uint64_t* pages, std::size_t n,
                        Medium medium) {
    impl_->store(worker, pages, n, medium);
}
void PrefixIndex::remove(std::int32_t worker, const std::uint64_t* pages, std::size_t n,
                         Medium medium) {
    impl_->remove(worker, pages, n, medium);
}
void PrefixIndex::clear(std::int32_t worker) { impl_->clear(worker); }
void PrefixIndex::match(const std::uint64_t* pages, std::size_t n, std::uint8_t media,
                        std::int32_t* held) const {
    impl_->match(pages, n, media, held);
}
void PrefixIndex::check_integrity() const { impl_->check_integrity(); }

}  // namespace kvcore
