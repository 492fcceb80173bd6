// SPDX-License-Identifier: Apache-2.0
#include "sibling_order.hpp"

#include <algorithm>

namespace kvcore {
namespace {

constexpr std::uint64_t unsigned_token(TokenId token) noexcept {
    return static_cast<std::uint32_t>(token);
}

}  // namespace

std::uint64_t SiblingOrder::key_of(const TokenId* page) const noexcept {
    return unsigned_token(page[0]) << 32 | (page_size_ > 1 ? unsigned_token(page[1]) : 0);
}

// Tokens compare as unsigned numbers; `limit` < page_size compares a shorter start.
bool SiblingOrder::is_less(const Entry& entry, std::uint64_t key, const TokenId* page,
                           std::int32_t limit) const noexcept {
    if (limit == 1) return (entry.key >> 32) < unsigned_token(page[0]);
    if (entry.key != key) return entry.key < key;
    const TokenId* other = entry.child->tokens;
    const std::int32_t common = common_tokens(other, page, limit);
    return common < limit && unsigned_token(other[common]) < unsigned_token(page[common]);
}

SiblingOrder::Place SiblingOrder::lower_bound(const TokenId* page,
                                              std::int32_t limit) const noexcept {
    const std::uint64_t key = limit > 1 ? key_of(page) : 0;  // page has no second token to read
    const auto less = [&](const Entry& entry, int) { return is_less(entry, key, page, limit); };
    // The last chunk whose first entry is less holds the place.
    auto first = std::lower_bound(firsts_.begin(), firsts_.end(), 0, less);
    if (first != firsts_.begin()) --first;
    const auto chunk = static_cast<std::size_t>(first - firsts_.begin());
    const Entry* begin = chunks_[chunk]->entries;
    const Entry* end = begin + chunks_[chunk]->size;
    return {chunk, static_cast<std::size_t>(std::lower_bound(begin, end, 0, less) - begin)};
}

SiblingOrder::Place SiblingOrder::place_of(const TreeNode* child) const noexcept {
    Place place = lower_bound(child->tokens, page_size_);
    // First pages of siblings differ, so the place is exact, but may be "one past" a chunk.
    if (place.index == chunks_[place.chunk]->size) place = {place.chunk + 1, 0};
    return place;
}

void SiblingOrder::insert(TreeNode* child) {
    const Entry entry{key_of(child->tokens), child};
    if (chunks_.empty()) {
        chunks_.push_back(std::make_unique<Chunk>());
        firsts_.push_back(entry);
    }
    Place place = lower_bound(child->tokens, page_size_);
    if (chunks_[place.chunk]->size == kChunk) {
        constexpr std::size_t kHalf = kChunk / 2;
        auto upper = std::make_unique<Chunk>();
        Chunk& lower = *chunks_[place.chunk];
        std::copy(lower.entries + kHalf, lower.entries + kChunk, upper->entries);
        lower.size = upper->size = kHalf;
        const auto next = static_cast<std::ptrdiff_t>(place.chunk) + 1;
        firsts_.insert(firsts_.begin() + next, upper->entries[0]);
        chunks_.insert(chunks_.begin() + next, std::move(upper));
        if (place.index > kHalf) place = {place.chunk + 1, place.index - kHalf};
    }
    Chunk& chunk = *chunks_[place.chunk];
    Entry* at = chunk.entries + place.index;
    std::copy_backward(at, chunk.entries + chunk.size, chunk.entries + chunk.size + 1);
    *at = entry;
    ++chunk.size;
    firsts_[place.chunk] = chunk.entries[0];
}

void SiblingOrder::erase(const TreeNode* child) noexcept {
    const Place place = place_of(child);
    Chunk& chunk = *chunks_[place.chunk];
    Entry* at = chunk.entries + place.index;
    std::copy(at + 1, chunk.entries + chunk.size, at);
    if (--chunk.size == 0) {
        chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(place.chunk));
        firsts_.erase(firsts_.begin() + static_cast<std::ptrdiff_t>(place.chunk));
    } else {
        firsts_[place.chunk] = chunk.entries[0];
    }
}

void SiblingOrder::replace(const TreeNode* child, TreeNode* replacement) noexcept {
    const Place place = place_of(child);
    chunks_[place.chunk]->entries[place.index].child = replacement;
    firsts_[place.chunk] = chunks_[place.chunk]->entries[0];
}

TreeNode* SiblingOrder::longest_common_start(const TokenId* page, std::int32_t limit,
                                             std::int32_t* common) const noexcept {
    *common = 0;
    TreeNode* best = nullptr;
    const auto consider = [&](const Entry& entry) {
        // The key tells without a look at the sibling when not even the first token agrees.
        if ((entry.key >> 32) != unsigned_token(page[0])) return;
        const std::int32_t length = common_tokens(entry.child->tokens, page, limit);
        if (length > *common) {
            *common = length;
            best = entry.child;
        }
    };
    const Place place = lower_bound(page, limit);
    const Chunk& chunk = *chunks_[place.chunk];
    if (place.index > 0) consider(chunk.entries[place.index - 1]);
    if (place.index < chunk.size) {
        consider(chunk.entries[place.index]);
    } else if (place.chunk + 1 < chunks_.size()) {
        consider(firsts_[place.chunk + 1]);
    }
    return best;
}

}  // namespace kvcore
