// SPDX-License-Identifier: Apache-2.0
#include "layers/grouping.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "kvcore/types.hpp"

namespace kvcore {
namespace {

constexpr std::int64_t kMaxLanes = 4096;
constexpr std::int64_t kMostChunks = 1024;  // of different offsets; no model has more than one

[[noreturn]] void refuse(std::int32_t group, const char* name, std::int64_t value,
                         const char* must) {
    throw std::invalid_argument(detail::concat("group ", group, ": ", name, " is ", value, must));
}

bool is_plain_group(const CacheGroup& group, std::int32_t column_tokens) {
    return group.kind == GroupKind::kFull && group.num_bundles == 1 &&
           (group.page_size == 0 || group.page_size == column_tokens);
}

}  // namespace

Grouping::Grouping(std::int32_t column_tokens, const std::vector<CacheGroup>& groups)
    : column_tokens_(column_tokens) {
    const bool is_plain =
        groups.empty() || (groups.size() == 1 && is_plain_group(groups[0], column_tokens_));
    if (is_plain || column_tokens_ < 1) {  // sizes are checked elsewhere
        bundles_.push_back({});
        num_lanes_ = num_full_lanes_ = 1;
        return;
    }
    for (std::size_t i = 0; i < groups.size(); ++i) add(static_cast<std::int32_t>(i), groups[i]);
    if (windows_.size() > kMaxWindows) {
        throw std::invalid_argument(detail::concat(
            windows_.size(), " groups have a window or chunk, must be at most ", kMaxWindows));
    }
}

void Grouping::add(std::int32_t group, CacheGroup rule) {
    if (rule.page_size == 0) rule.page_size = column_tokens_;
    if (rule.num_bundles < 1) refuse(group, "num_bundles", rule.num_bundles, ", must be >= 1");
    if (rule.kind != GroupKind::kFull && rule.span < 1) {
        refuse(group, "span", rule.span, ", must be at least 1 token");
    }
    if (rule.page_size < 1 || column_tokens_ % rule.page_size != 0) {
        refuse(group, "page_size", rule.page_size,
               detail::concat(", must divide the configured page_size, ", column_tokens_).c_str());
    }
    const std::int32_t pages = column_tokens_ / rule.page_size;
    const std::int64_t lanes = std::int64_t{pages} * rule.num_bundles;
    if (num_lanes_ + lanes > kMaxLanes) {
        refuse(group, "num_bundles", rule.num_bundles,
               ", must be smaller: a column has at most 4096 pages");
    }
    const bool is_full = rule.kind == GroupKind::kFull;
    const auto window = is_full ? -1 : static_cast<std::int32_t>(windows_.size());
    const auto num_lanes = static_cast<std::int32_t>(lanes);
    if (is_full) {
        num_full_lanes_ += num_lanes;
    } else {
        const std::int64_t reach = ceil_div(rule.span - 1, column_tokens_) + 1;
        windows_.push_back({rule, num_lanes_, num_lanes, static_cast<std::int32_t>(reach)});
    }
    groups_.push_back({num_lanes_, num_lanes, window});
    for (std::int32_t b = 0; b < rule.num_bundles; ++b) {
        bundles_.push_back({num_lanes_ + b * pages, pages, window});
    }
    num_lanes_ += num_lanes;
}

// The window pages of a request with this number of columns while the first token of the last
// column runs by itself: no token of that column has moved a window yet.
std::int64_t Grouping::window_pages(std::int64_t columns, const Service& service) const noexcept {
    const std::int64_t written = (columns - 1) * column_tokens_ - service.kept_tokens;
    std::int64_t pages = 0;
    for (const Window& window : windows_) {
        const std::int64_t first = first_column(window, std::max<std::int64_t>(0, written));
        pages += (columns - first) * window.num_lanes;
    }
    return pages;
}

// A request holds the most pages in its last column, or in the last column of an earlier chunk. If
// the chunk size is not a multiple of the column size, some chunks touch one column more than
// others. The number of different cases is the number of offsets in a column at which a chunk may
// begin.
std::int64_t Grouping::least_pages(std::int64_t n, const Service& service) const noexcept {
    const std::int64_t columns = ceil_div(n, column_tokens_);
    if (columns == 0) return 0;
    std::int64_t pages = columns * num_full_lanes_ + window_pages(columns, service);
    for (const Window& window : windows_) {
        if (window.rule.kind != GroupKind::kChunked) continue;
        const std::int64_t chunk = window.rule.span;
        const std::int64_t places = column_tokens_ / std::gcd<std::int64_t>(chunk, column_tokens_);
        const std::int64_t last = (columns * column_tokens_ - service.kept_tokens) / chunk;
        const std::int64_t first = std::max<std::int64_t>(0, last - std::min(places, kMostChunks));
        for (std::int64_t i = last; i > first; --i) {
            const std::int64_t end = ceil_div(i * chunk + service.kept_tokens, column_tokens_);
            const std::int64_t full = (service.reserves_chunks ? end : columns) * num_full_lanes_;
            pages = std::max(pages, full + window_pages(end, service));
        }
    }
    return pages;
}

std::int64_t Grouping::most_tokens(std::int64_t num_pages, const Service& service) const noexcept {
    std::int64_t fits = 0;
    std::int64_t too_many = std::numeric_limits<std::int32_t>::max();
    while (too_many - fits > 1) {
        const std::int64_t n = fits + (too_many - fits) / 2;
        (least_pages(n, service) <= num_pages ? fits : too_many) = n;
    }
    return fits;
}

// Each column has a page of every full lane. Without full lanes, requests keep the columns of all
// their tokens, and the same number may be cached or be in flight from one owner to another.
std::int64_t Grouping::most_columns(std::int64_t num_pages, std::int64_t max_sequences,
                                    std::int64_t max_seq_len) const noexcept {
    if (num_full_lanes_ > 0) return num_pages;
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    const std::int64_t of_request = ceil_div(max_seq_len, column_tokens_);
    const std::int64_t of_requests =
        of_request > kMost / max_sequences ? kMost : of_request * max_sequences;
    return std::min(kMost, 2 * of_requests + 2 * num_pages);
}

}  // namespace kvcore
