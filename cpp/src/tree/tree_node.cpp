// SPDX-License-Identifier: Apache-2.0
#include "tree/tree_node.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "tree/token_hash.hpp"

namespace kvcore {
namespace {

std::uint64_t random_seed() {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32) | device();
}

// The system takes microseconds to return a seed, so all trees of a process share a seed.
std::uint64_t process_seed() {
    static const std::uint64_t seed = random_seed();
    return seed;
}

}  // namespace

ChildIndex::ChildIndex(std::int32_t page_size) : page_size_(page_size), seed_(process_seed()) {
    segments_.push_back(new_segment(kSmall));
}

ChildIndex::Segment ChildIndex::new_segment(std::size_t buckets) {
    auto* memory = static_cast<TreeNode**>(allocate_chunk(buckets * sizeof(TreeNode*)));
    std::fill(memory, memory + buckets, nullptr);
    return Segment(memory);
}

std::uint32_t ChildIndex::hash(const TreeNode* parent, const TokenId* page) const noexcept {
    constexpr std::uint64_t kMul = 0xbb67ae8584caa73bU;
    const std::uint64_t seed = seed_ ^ (std::uint64_t{parent->id} * kMul);
    return static_cast<std::uint32_t>(hash_tokens(seed, page, page_size_));
}

std::size_t ChildIndex::bucket_of(std::uint32_t hash) const noexcept {
    const std::size_t wide = std::size_t{hash} & (2 * base_ - 1);
    return wide < num_buckets_ ? wide : wide - base_;
}

TreeNode* ChildIndex::find(const TreeNode* parent, const TokenId* page) const noexcept {
    const std::uint32_t wanted = hash(parent, page);
    const std::size_t bytes = static_cast<std::size_t>(page_size_) * sizeof(TokenId);
    for (TreeNode* node = bucket(bucket_of(wanted)); node != nullptr; node = node->hash_next) {
        if (node->hash == wanted && node->parent == parent &&
            std::memcmp(node->tokens, page, bytes) == 0) {
            return node;
        }
    }
    return nullptr;
}

// A table is full when it has a node for every bucket; from this size on it grows by one bucket per
// node. A segment has at least 1024 buckets, so one new segment is enough.
void ChildIndex::reserve(std::size_t n) {
    const std::size_t last = size_ + n - 1;
    if (last < num_buckets_ || segment_of(last) < segments_.size()) return;
    segments_.push_back(new_segment(last < kLarge ? kSmall : kLarge));
}

void ChildIndex::insert(TreeNode* node) {
    reserve(1);
    if (size_ + 1 > num_buckets_) add_bucket();
    node->hash = hash(node->parent, node->tokens);
    TreeNode*& head = bucket(bucket_of(node->hash));
    node->hash_next = head;
    node->is_indexed = true;
    head = node;
    ++size_;
}

void ChildIndex::erase(TreeNode* node) noexcept {
    TreeNode** link = &bucket(bucket_of(node->hash));
    while (*link != node) link = &(*link)->hash_next;
    *link = node->hash_next;
    node->hash_next = nullptr;
    node->is_indexed = false;
    --size_;
    if (num_buckets_ > kSmall && size_ < num_buckets_ / 4) drop_bucket();
}

void ChildIndex::replace(TreeNode* node, TreeNode* replacement) noexcept {
    TreeNode** link = &bucket(bucket_of(node->hash));
    while (*link != node) link = &(*link)->hash_next;
    *link = replacement;
    replacement->hash = node->hash;
    replacement->hash_next = node->hash_next;
    replacement->is_indexed = true;
    node->hash_next = nullptr;
    node->is_indexed = false;
}

// Moves the nodes that belong to the new bucket `num_buckets` from its partner, the bucket
// `num_buckets - base`.
void ChildIndex::add_bucket() noexcept {
    TreeNode*& fresh = bucket(num_buckets_);
    TreeNode** link = &bucket(num_buckets_ - base_);
    while (*link != nullptr) {
        TreeNode* node = *link;
        if ((std::size_t{node->hash} & (2 * base_ - 1)) == num_buckets_) {
            *link = node->hash_next;
            node->hash_next = fresh;
            fresh = node;
        } else {
            link = &node->hash_next;
        }
    }
    if (++num_buckets_ == 2 * base_) base_ *= 2;
}

void ChildIndex::drop_bucket() noexcept {
    --num_buckets_;
    if (num_buckets_ < base_) base_ /= 2;
    TreeNode** link = &bucket(num_buckets_ - base_);
    while (*link != nullptr) link = &(*link)->hash_next;
    *link = bucket(num_buckets_);
    bucket(num_buckets_) = nullptr;
    if (!starts_segment(num_buckets_)) return;
    while (segments_.size() > segment_of(num_buckets_)) segments_.pop_back();
}

namespace {

constexpr std::uint64_t unsigned_token(TokenId token) noexcept {
    return static_cast<std::uint32_t>(token);
}

// Returns the index of the first of `n` sorted keys that is not below `wanted`. Has no branch that
// can be mispredicted.
std::size_t lower_key(const std::uint64_t* keys, std::size_t n, std::uint64_t wanted) noexcept {
    const std::uint64_t* base = keys;
    while (n > 1) {
        const std::size_t half = n / 2;
        base += base[half - 1] < wanted ? half : 0;
        n -= half;
    }
    return static_cast<std::size_t>(base - keys) + (n == 1 && *base < wanted ? 1 : 0);
}

// Returns the index of the first of `n` children that is not before `page` by its first `limit`
// tokens. Reads the tokens of children, by `child_at(i)`, only where keys are equal.
template <class ChildAt>
std::size_t lower_child(const std::uint64_t* keys, std::size_t n, std::uint64_t wanted,
                        const TokenId* page, std::int32_t limit, ChildAt&& child_at) noexcept {
    std::size_t low = lower_key(keys, n, wanted);
    if (limit == 1 || low == n || keys[low] != wanted) return low;
    const bool is_last = wanted == std::numeric_limits<std::uint64_t>::max();
    std::size_t high = is_last ? n : low + lower_key(keys + low, n - low, wanted + 1);
    while (low < high) {
        const std::size_t middle = (low + high) / 2;
        const TokenId* tokens = child_at(middle)->tokens;
        const std::int32_t common = common_tokens(tokens, page, limit);
        const bool less =
            common < limit && unsigned_token(tokens[common]) < unsigned_token(page[common]);
        (less ? low : high) = less ? middle + 1 : middle;
    }
    return low;
}

}  // namespace

// Tokens compare as unsigned numbers.
std::uint64_t SiblingOrder::key_of(const TokenId* page) const noexcept {
    return unsigned_token(page[0]) << 32 | (page_size_ > 1 ? unsigned_token(page[1]) : 0);
}

// The place is in the last chunk whose first child is before the page.
std::size_t SiblingOrder::chunk_of(std::uint64_t wanted, const TokenId* page,
                                   std::int32_t limit) const noexcept {
    for (const std::size_t at : recent_) {
        if (at + 1 < first_keys_.size() && first_keys_[at] < wanted &&
            wanted < first_keys_[at + 1]) {
            return at;
        }
    }
    const std::size_t above =
        lower_child(first_keys_.data(), first_keys_.size(), wanted, page, limit,
                    [&](std::size_t i) { return chunks_[i]->children[0]; });
    const std::size_t at = above > 0 ? above - 1 : 0;
    recent_[next_recent_++ % recent_.size()] = at;
    return at;
}

void SiblingOrder::prefetch(const TokenId* page) const noexcept {
    const Chunk& chunk = *chunks_[chunk_of(key_of(page), page, page_size_)];
    for (std::size_t line = 0; line < sizeof(chunk); line += 64) {
        kvcore::prefetch(reinterpret_cast<const char*>(&chunk) + line);
    }
}

SiblingOrder::Place SiblingOrder::lower_bound(const TokenId* page,
                                              std::int32_t limit) const noexcept {
    // With `limit` 1, `page` may have no second token. Second token 0 sorts before all others.
    const std::uint64_t wanted = limit > 1 ? key_of(page) : unsigned_token(page[0]) << 32;
    const std::size_t at = chunk_of(wanted, page, limit);
    const Chunk& chunk = *chunks_[at];
    for (std::size_t line = 0; line < sizeof(chunk.keys); line += 64) {
        kvcore::prefetch(reinterpret_cast<const char*>(&chunk) + line);
    }
    return {at, lower_child(chunk.keys, chunk.size, wanted, page, limit,
                            [&](std::size_t i) { return chunk.children[i]; })};
}

SiblingOrder::Place SiblingOrder::place_of(const TreeNode* child) const noexcept {
    Place place = lower_bound(child->tokens, page_size_);
    // The place is exact, because first pages of siblings differ, but it may be the end of a chunk.
    if (place.index == chunks_[place.chunk]->size) place = {place.chunk + 1, 0};
    return place;
}

void OrderChunk::insert(std::size_t at, std::uint64_t key, TreeNode* child) noexcept {
    std::copy_backward(keys + at, keys + size, keys + size + 1);
    std::copy_backward(children + at, children + size, children + size + 1);
    keys[at] = key;
    children[at] = child;
    ++size;
}

void OrderChunk::erase(std::size_t at) noexcept {
    std::copy(keys + at + 1, keys + size, keys + at);
    std::copy(children + at + 1, children + size, children + at);
    --size;
}

// Also makes room in the directory, so that the caller cannot fail after this call.
SiblingOrder::Chunk* SiblingOrder::new_chunk() {
    const std::size_t room = 2 * chunks_.size() + 1;
    if (chunks_.capacity() == chunks_.size()) chunks_.reserve(room);
    if (first_keys_.capacity() == first_keys_.size()) first_keys_.reserve(room);
    return arena_.allocate();
}

void SiblingOrder::split_chunk(std::size_t index) {
    constexpr std::size_t kHalf = Chunk::kCapacity / 2;
    Chunk* upper = new_chunk();
    Chunk& lower = *chunks_[index];
    std::copy(lower.keys + kHalf, lower.keys + Chunk::kCapacity, upper->keys);
    std::copy(lower.children + kHalf, lower.children + Chunk::kCapacity, upper->children);
    lower.size = kHalf;
    upper->size = Chunk::kCapacity - kHalf;
    const auto next = static_cast<std::ptrdiff_t>(index) + 1;
    first_keys_.insert(first_keys_.begin() + next, upper->keys[0]);
    chunks_.insert(chunks_.begin() + next, upper);
}

void SiblingOrder::insert(TreeNode* child) {
    if (chunks_.empty()) {
        chunks_.push_back(new_chunk());
        first_keys_.push_back(0);
    }
    Place place = chunks_[0]->size == 0 ? Place{0, 0} : lower_bound(child->tokens, page_size_);
    if (chunks_[place.chunk]->size == Chunk::kCapacity) {
        split_chunk(place.chunk);
        const std::size_t lower = chunks_[place.chunk]->size;
        if (place.index > lower) place = {place.chunk + 1, place.index - lower};
    }
    Chunk& chunk = *chunks_[place.chunk];
    chunk.insert(place.index, key_of(child->tokens), child);
    first_keys_[place.chunk] = chunk.keys[0];
}

void SiblingOrder::erase(const TreeNode* child) noexcept {
    const Place place = place_of(child);
    Chunk& chunk = *chunks_[place.chunk];
    chunk.erase(place.index);
    if (chunk.size > 0) {
        first_keys_[place.chunk] = chunk.keys[0];
        return;
    }
    arena_.recycle(&chunk);
    chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(place.chunk));
    first_keys_.erase(first_keys_.begin() + static_cast<std::ptrdiff_t>(place.chunk));
}

void SiblingOrder::replace(const TreeNode* child, TreeNode* replacement) noexcept {
    const Place place = place_of(child);
    chunks_[place.chunk]->children[place.index] = replacement;
}

TreeNode* SiblingOrder::longest_common_start(const TokenId* page, std::int32_t limit,
                                             std::int32_t* common) const noexcept {
    *common = 0;
    TreeNode* best = nullptr;
    const auto consider = [&](const Chunk& chunk, std::size_t index) {
        // If fewer than two tokens agree, the key is enough and the sibling is not read.
        const std::uint64_t key = chunk.keys[index];
        if ((key >> 32) != unsigned_token(page[0])) return;
        TreeNode* child = chunk.children[index];
        const bool is_one = limit == 1 || key != key_of(page);
        const std::int32_t length = is_one ? 1 : common_tokens(child->tokens, page, limit);
        if (length > *common) {
            *common = length;
            best = child;
        }
    };
    const Place place = lower_bound(page, limit);
    const Chunk& chunk = *chunks_[place.chunk];
    if (place.index > 0) consider(chunk, place.index - 1);
    if (place.index < chunk.size) {
        consider(chunk, place.index);
    } else if (place.chunk + 1 < chunks_.size()) {
        consider(*chunks_[place.chunk + 1], 0);
    }
    return best;
}

// Walks outwards from the place of the page: the common lengths fall on both sides.
std::size_t SiblingOrder::common_starts(const TokenId* page, std::int32_t limit, TreeNode** out,
                                        std::int32_t* common, std::size_t n) const noexcept {
    const auto child = [&](Place place) { return chunks_[place.chunk]->children[place.index]; };
    const auto length = [&](Place place) {
        if (place.chunk >= chunks_.size()) return 0;
        return common_tokens(child(place)->tokens, page, limit);
    };
    const auto below = [&](Place place) {
        if (place.index > 0) return Place{place.chunk, place.index - 1};
        const std::size_t chunk = place.chunk - 1;  // wraps around before the first chunk
        return Place{chunk, chunk < chunks_.size() ? chunks_[chunk]->size - 1 : 0};
    };
    const auto settled = [&](Place place) {
        return place.index < chunks_[place.chunk]->size ? place : Place{place.chunk + 1, 0};
    };
    const Place start = lower_bound(page, limit);
    Place lower = below(start);
    Place upper = settled(start);
    std::int32_t lower_length = length(lower);
    std::int32_t upper_length = length(upper);
    std::size_t found = 0;
    while (found < n && std::max(lower_length, upper_length) > 0) {
        const bool is_upper = upper_length >= lower_length;
        Place& place = is_upper ? upper : lower;
        out[found] = child(place);
        common[found++] = is_upper ? upper_length : lower_length;
        place = is_upper ? settled({place.chunk, place.index + 1}) : below(place);
        (is_upper ? upper_length : lower_length) = length(place);
    }
    return found;
}

}  // namespace kvcore
