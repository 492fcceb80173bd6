// SPDX-License-Identifier: Apache-2.0
#include "routing/worker_sets.hpp"

namespace kvcore {
namespace {

constexpr std::uint32_t kNoList = ~std::uint32_t{0};

}  // namespace

bool WorkerSets::add(Set& set, std::uint32_t worker, std::uint8_t media) {
    switch (kind(set)) {
        case kNone:
            set = single(worker, media);
            return true;
        case kSingle: {
            const std::uint32_t other = worker_of(set);
            const std::uint8_t of_other = media_of(set);
            if (other == worker) {
                set = single(worker, static_cast<std::uint8_t>(of_other | media));
                return false;
            }
            // One word of bits is shorter than a list.
            Set several = num_words_ == 1 ? new_row() : new_list();
            if (num_words_ == 1) {
                add_to_row(several, other, of_other);
                add_to_row(several, worker, media);
            } else {
                List& list = lists_[index(several)];
                list.size = 2;
                list.items[0] = other << 3U | of_other;
                list.items[1] = worker << 3U | media;
            }
            set = several;
            return true;
        }
        case kList:
            return add_to_list(set, worker, media);
        default:
            return add_to_row(set, worker, media);
    }
}

bool WorkerSets::add_to_list(Set& set, std::uint32_t worker, std::uint8_t media) {
    List& list = lists_[index(set)];
    for (std::uint32_t i = 0; i < list.size; ++i) {
        if (list.items[i] >> 3U != worker) continue;
        list.items[i] |= media;
        return false;
    }
    if (list.size < list.items.size()) {
        list.items[list.size++] = worker << 3U | media;
        return true;
    }
    const Set row = new_row();
    for (const std::uint32_t item : lists_[index(set)].items) {
        add_to_row(row, item >> 3U, static_cast<std::uint8_t>(item & 7U));
    }
    add_to_row(row, worker, media);
    free_list(set);
    set = row;
    return true;
}

bool WorkerSets::add_to_row(Set set, std::uint32_t worker, std::uint8_t media) noexcept {
    const bool is_new = media_in_row(set, worker) == 0;
    std::uint64_t* row = &rows_[row_at(set)];
    row[0] += is_new ? 1 : 0;
    for (std::size_t m = 0; m < kMedia; ++m) {
        if ((media >> m & 1U) == 0) continue;
        row[1 + m * num_words_ + worker / 64] |= std::uint64_t{1} << worker % 64;
    }
    return is_new;
}

bool WorkerSets::drop(Set& set, std::uint32_t worker, std::uint8_t media) noexcept {
    switch (kind(set)) {
        case kSingle: {
            if (worker_of(set) != worker) return false;
            const auto left = static_cast<std::uint8_t>(media_of(set) & ~media);
            set = left == 0 ? 0 : single(worker, left);
            return left == 0;
        }
        case kList:
            return drop_from_list(set, worker, media);
        case kRow:
            return drop_from_row(set, worker, media);
        default:
            return false;
    }
}

bool WorkerSets::drop_from_list(Set& set, std::uint32_t worker, std::uint8_t media) noexcept {
    List& list = lists_[index(set)];
    for (std::uint32_t i = 0; i < list.size; ++i) {
        std::uint32_t& item = list.items[i];
        if (item >> 3U != worker) continue;
        item &= ~std::uint32_t{media};
        if ((item & 7U) != 0) return false;
        item = list.items[--list.size];
        if (list.size == 1) {
            const std::uint32_t last = list.items[0];
            free_list(set);
            set = single(last >> 3U, static_cast<std::uint8_t>(last & 7U));
        }
        return true;
    }
    return false;
}

bool WorkerSets::drop_from_row(Set& set, std::uint32_t worker, std::uint8_t media) noexcept {
    const std::uint8_t there = media_in_row(set, worker);
    if (there == 0) return false;
    std::uint64_t* row = &rows_[row_at(set)];
    for (std::size_t m = 0; m < kMedia; ++m) {
        if ((media >> m & 1U) == 0) continue;
        row[1 + m * num_words_ + worker / 64] &= ~(std::uint64_t{1} << worker % 64);
    }
    if ((there & ~media) != 0) return false;
    if (--row[0] == 1) {
        const Set last = only_one_of(set);
        free_row(set);
        set = last;
    }
    return true;
}

WorkerSets::Set WorkerSets::only_one_of(Set row) const noexcept {
    for (std::uint32_t w = 0; w < num_words_; ++w) {
        const std::uint64_t found = bits(row, w, 7);
        if (found == 0) continue;
        std::uint32_t worker = 64 * w;
        while ((found >> (worker - 64 * w) & 1U) == 0) ++worker;
        return single(worker, media_in_row(row, worker));
    }
    return 0;  // not reached: there is one
}

std::uint8_t WorkerSets::media_in_row(Set row, std::uint32_t worker) const noexcept {
    std::uint8_t found = 0;
    for (std::size_t m = 0; m < kMedia; ++m) {
        const std::uint64_t word = rows_[row_at(row) + 1 + m * num_words_ + worker / 64];
        if ((word >> worker % 64 & 1U) != 0) found = static_cast<std::uint8_t>(found | 1U << m);
    }
    return found;
}

std::int64_t WorkerSets::count(Set set) const {
    std::int64_t n = 0;
    for_each_word(set, 7, [&](std::size_t, std::uint64_t found) {
        for (; found != 0; found &= found - 1) ++n;
    });
    return n;
}

WorkerSets::Set WorkerSets::new_list() {
    std::size_t at = first_free_list_;
    if (first_free_list_ != kNoList) {
        first_free_list_ = lists_[at].size;
    } else {
        at = lists_.size();
        lists_.emplace_back();
    }
    return Set{at} << 2U | kList;
}

WorkerSets::Set WorkerSets::new_row() {
    std::uint64_t at = first_free_row_;
    if (first_free_row_ != kNobody) {
        std::uint64_t* row = &rows_[at * row_stride()];
        first_free_row_ = row[0];
        row[0] = 0;  // its bits are 0, except the bits of the last worker
        for (std::size_t i = 1; i < row_stride(); ++i) row[i] = 0;
    } else {
        at = rows_.size() / row_stride();
        rows_.resize(rows_.size() + row_stride());
    }
    return Set{at} << 2U | kRow;
}

void WorkerSets::free_list(Set set) noexcept {
    lists_[index(set)].size = first_free_list_;
    first_free_list_ = static_cast<std::uint32_t>(index(set));
}

void WorkerSets::free_row(Set set) noexcept {
    rows_[row_at(set)] = first_free_row_;
    first_free_row_ = index(set);
}

}  // namespace kvcore
