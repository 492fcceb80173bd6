// SPDX-License-Identifier: Apache-2.0
#include "tree/child_index.hpp"

#include <algorithm>
#include <cstring>
#include <random>

namespace kvcore {
namespace {

// Odd constants with well-mixed bits (the fractional parts of sqrt(2) and sqrt(3)).
constexpr std::uint64_t kMulA = 0x6a09e667f3bcc909ULL;
constexpr std::uint64_t kMulB = 0xbb67ae8584caa73bULL;

constexpr std::uint64_t mix(std::uint64_t state, std::uint64_t word, std::uint64_t mul) noexcept {
    state = (state ^ word) * mul;
    return state ^ (state >> 29);
}

std::uint64_t load64(const TokenId* tokens) noexcept {
    std::uint64_t word;
    std::memcpy(&word, tokens, sizeof word);
    return word;
}

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
    // Two independent lanes: in a single chain each multiplication waits for the one before.
    std::uint64_t a = seed_ ^ (static_cast<std::uint64_t>(parent->id) * kMulB);
    std::uint64_t b = ~seed_;
    std::int32_t i = 0;
    for (; i + 4 <= page_size_; i += 4) {
        a = mix(a, load64(page + i), kMulA);
        b = mix(b, load64(page + i + 2), kMulB);
    }
    for (; i < page_size_; ++i) a = mix(a, static_cast<std::uint32_t>(page[i]), kMulA);
    const std::uint64_t h = mix(a, (b << 32) | (b >> 32), kMulB);
    return static_cast<std::uint32_t>(h ^ (h >> 32));
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

}  // namespace kvcore
