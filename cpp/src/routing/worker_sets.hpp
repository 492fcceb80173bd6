// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/memory.hpp"

namespace kvcore {

/// The workers of many pages, each with the media on which it has the page. A set is a word: 0 for
/// no worker, the only worker, or the place of several workers. Not thread-safe.
class WorkerSets {
   public:
    using Set = std::uint64_t;

    explicit WorkerSets(std::int32_t num_workers)
        : num_words_((static_cast<std::size_t>(num_workers) + 63) / 64) {}

    [[nodiscard]] std::size_t num_bytes() const noexcept {
        return lists_.capacity() * sizeof(List) + rows_.capacity() * sizeof(std::uint64_t);
    }
    /// The number of words of bits by worker.
    [[nodiscard]] std::size_t num_words() const noexcept { return num_words_; }

    /// The worker has the page on these media; returns true if it had the page on no medium. Throws
    /// std::bad_alloc, and has changed nothing.
    bool add(Set& set, std::uint32_t worker, std::uint8_t media);
    /// The worker no longer has it on these media; returns true if it had it on no other medium.
    bool drop(Set& set, std::uint32_t worker, std::uint8_t media) noexcept;

    void prefetch(Set set) const noexcept {
        if (kind(set) == kList) kvcore::prefetch(&lists_[index(set)]);
        if (kind(set) == kRow) kvcore::prefetch(&rows_[row_at(set)]);
    }
    [[nodiscard]] bool is_single(Set set) const noexcept { return kind(set) == kSingle; }
    [[nodiscard]] static std::uint32_t worker_of(Set single) noexcept {
        return static_cast<std::uint32_t>(single >> kWorkerShift);
    }
    [[nodiscard]] static std::uint8_t media_of(Set single) noexcept {
        return static_cast<std::uint8_t>(single >> kMediaShift & 7U);
    }
    /// Visits the workers that have a page on any of the media: calls visit(word, bits) for some
    /// words, at least the words with a bit, each once.
    template <class Visit>
    void for_each_word(Set set, std::uint8_t media, const Visit& visit) const {
        switch (kind(set)) {
            case kSingle:
                if ((media_of(set) & media) != 0) {
                    visit(worker_of(set) / 64, std::uint64_t{1} << worker_of(set) % 64);
                }
                return;
            case kList:
                return for_each_word_of(lists_[index(set)], media, visit);
            case kRow:
                for (std::size_t w = 0; w < num_words_; ++w) visit(w, bits(set, w, media));
                return;
            default:
                return;
        }
    }
    /// A word of bits, as in `for_each_word`.
    [[nodiscard]] std::uint64_t bits(Set row, std::size_t word, std::uint8_t media) const noexcept {
        const std::uint64_t* of_device = &rows_[row_at(row) + 1 + word];
        std::uint64_t found = 0;
        for (std::size_t m = 0; m < kMedia; ++m) {
            if ((media >> m & 1U) != 0) found |= of_device[m * num_words_];
        }
        return found;
    }
    [[nodiscard]] bool is_row(Set set) const noexcept { return kind(set) == kRow; }

    /// The number of workers that have the page, counted from the parts of the set.
    [[nodiscard]] std::int64_t count(Set set) const;

   private:
    enum Kind : std::uint8_t { kNone = 0, kSingle = 1, kList = 2, kRow = 3 };
    static constexpr std::size_t kMedia = 3;
    static constexpr unsigned kMediaShift = 2;
    static constexpr unsigned kWorkerShift = 5;

    struct List {
        std::uint32_t size = 0;                 // the next free list, if the list is free
        std::array<std::uint32_t, 15> items{};  // worker << 3 | media, in no order
    };

    [[nodiscard]] static Kind kind(Set set) noexcept { return static_cast<Kind>(set & 3U); }
    [[nodiscard]] static std::size_t index(Set set) noexcept { return set >> 2U; }
    [[nodiscard]] static Set single(std::uint32_t worker, std::uint8_t media) noexcept {
        return Set{worker} << kWorkerShift | Set{media} << kMediaShift | kSingle;
    }
    [[nodiscard]] std::size_t row_stride() const noexcept { return 1 + kMedia * num_words_; }
    [[nodiscard]] std::size_t row_at(Set set) const noexcept { return index(set) * row_stride(); }

    template <class Visit>
    static void for_each_word_of(const List& list, std::uint8_t media, const Visit& visit) {
        for (std::uint32_t i = 0; i < list.size; ++i) {
            const std::uint32_t word = list.items[i] >> 9U;
            std::uint64_t found = 0;
            bool is_first = true;
            for (std::uint32_t k = 0; k < list.size; ++k) {
                if (list.items[k] >> 9U != word) continue;
                is_first &= k >= i;
                if ((list.items[k] & media) != 0) {
                    found |= std::uint64_t{1} << (list.items[k] >> 3U & 63U);
                }
            }
            if (is_first) visit(word, found);
        }
    }

    [[nodiscard]] Set new_list();
    [[nodiscard]] Set new_row();
    void free_list(Set set) noexcept;
    void free_row(Set set) noexcept;
    bool add_to_list(Set& set, std::uint32_t worker, std::uint8_t media);
    bool add_to_row(Set set, std::uint32_t worker, std::uint8_t media) noexcept;
    bool drop_from_list(Set& set, std::uint32_t worker, std::uint8_t media) noexcept;
    bool drop_from_row(Set& set, std::uint32_t worker, std::uint8_t media) noexcept;
    [[nodiscard]] Set only_one_of(Set row) const noexcept;
    [[nodiscard]] std::uint8_t media_in_row(Set row, std::uint32_t worker) const noexcept;

    static constexpr std::uint64_t kNobody = ~std::uint64_t{0};

    std::size_t num_words_;
    std::vector<List, ChunkAllocator<List>> lists_;
    // The number of workers, and words by medium; or the next free row.
    std::vector<std::uint64_t, ChunkAllocator<std::uint64_t>> rows_;
    std::uint32_t first_free_list_ = ~std::uint32_t{0};
    std::uint64_t first_free_row_ = kNobody;
};

}  // namespace kvcore
