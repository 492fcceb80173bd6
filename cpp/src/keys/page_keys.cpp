// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_keys.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "keys/hashed_items.hpp"
#include "kvcore/errors.hpp"
#include "support/memory.hpp"

namespace kvcore {
namespace {

constexpr std::string_view kDefaultVllmSeed = "vllm-none-hash";

void put_text_or_nil(std::string& out, const std::optional<std::string>& text) {
    if (text) {
        cbor::put_text(out, *text);
    } else {
        cbor::put_nil(out);
    }
}

// Writes an item that is encoded already, or nil if it is empty.
template <class Sink>
void put_item_or_nil(Sink& out, std::string_view item) {
    if (item.empty()) {
        cbor::put_nil(out);
    } else {
        out.append(item.data(), item.size());
    }
}

}  // namespace

PageKey root_key(const KeyOptions& options) {
    std::string items;
    if (options.scheme == KeyScheme::kVllm) {
        items = options.seed;
        if (items.empty()) cbor::put_text(items, kDefaultVllmSeed);
    } else {
        cbor::put_array(items, 5);
        cbor::put_text(items, "kvcore");
        cbor::put_integer(items, kKeySchemeVersion);
        put_item_or_nil(items, options.seed);
        put_text_or_nil(items, options.cache_salt);
        put_text_or_nil(items, options.extra_key);
    }
    return Sha256::of(items.data(), items.size());
}

PageKey page_key(const PageKey& parent, const TokenId* tokens, std::int64_t n,
                 std::string_view extra) {
    Sha256 hash;
    keys::HashedItems out(hash);
    out.begin_page(parent, n);
    out.put_tokens(tokens, n);
    put_item_or_nil(out, extra);
    return out.finish();
}

std::vector<PageKey> embedding_digests(const std::byte* rows, std::int64_t n,
                                       std::int64_t row_bytes, std::int64_t page_size) {
    std::vector<PageKey> digests;
    digests.reserve(static_cast<std::size_t>(ceil_div(n, page_size)));
    for (std::int64_t first = 0; first < n; first += page_size) {
        const std::int64_t size = std::min(page_size, n - first) * row_bytes;
        digests.push_back(Sha256::of(rows + first * row_bytes, static_cast<std::size_t>(size)));
    }
    return digests;
}

namespace {

const PageKey& digest_of_nothing() noexcept {
    static const PageKey digest = Sha256::of(nullptr, 0);
    return digest;
}

}  // namespace

KeyChain::KeyChain(std::int64_t page_size, KeyOptions options)
    : page_size_(page_size), options_(std::move(options)), root_(root_key(options_)) {
    if (page_size < 1) {
        throw std::invalid_argument(
            detail::concat("page_size is ", page_size, ", must be at least 1 token"));
    }
    if (options_.embeddings && options_.scheme != KeyScheme::kVllm) {
        throw std::invalid_argument(
            "there are embeddings, must be none with the scheme of kvcore; give their digest as an "
            "extra key");
    }
}

void KeyChain::check(const PlacedKey* extra, std::size_t num_extra, std::int64_t n) const {
    std::int64_t least = num_tokens_;
    for (std::size_t i = 0; i < num_extra; ++i) {
        if (extra[i].start < least || extra[i].start - num_tokens_ >= n) {
            throw std::invalid_argument(detail::concat(
                "extra key ", i, " starts at ", extra[i].start, ", must be ", least, " .. ",
                num_tokens_ + n - 1, ": in the new tokens, and sorted by their starts"));
        }
        if (extra[i].length < 1) {
            throw std::invalid_argument(detail::concat(
                "extra key ", i, " has length ", extra[i].length, ", must be at least 1 token"));
        }
        if (i > 0 && !(extra[i - 1] < extra[i])) {
            throw std::invalid_argument(
                detail::concat("extra key ", i, " does not come after extra key ", i - 1,
                               " by start, length and bytes; sort the keys, and give each once"));
        }
        least = extra[i].start;
    }
}

void KeyChain::extend(const TokenId* tokens, std::int64_t n, const PlacedKey* extra,
                      std::size_t num_extra) {
    check(extra, num_extra, n);
    std::vector<Extra> added;
    added.reserve(num_extra);
    for (std::size_t i = 0; i < num_extra; ++i) {
        added.push_back({extra[i].start, extra[i].length, std::string(extra[i].bytes)});
    }
    make_room(extras_, num_extra);
    make_room(touch_, extras_.size() + num_extra - touch_.size());
    make_room(keys_, static_cast<std::size_t>((num_tokens_ % page_size_ + n) / page_size_));
    for (Extra& each : added) extras_.push_back(std::move(each));
    hash(tokens, n);
}

void KeyChain::hash(const TokenId* tokens, std::int64_t n) noexcept {
    keys::HashedItems out(page_);
    while (n > 0) {
        const std::int64_t filled = num_tokens_ % page_size_;
        if (filled == 0) out.begin_page(keys_.empty() ? root_ : keys_.back(), page_size_);
        const std::int64_t taken = std::min(n, page_size_ - filled);
        out.put_tokens(tokens, taken);
        num_tokens_ += taken;
        tokens += taken;
        n -= taken;
        if (filled + taken == page_size_) finish_page(out);
    }
    out.flush();
}

void KeyChain::truncate(std::int64_t num_pages) {
    const auto held = static_cast<std::int64_t>(keys_.size());
    if (num_pages < 0 || num_pages > held) {
        throw std::invalid_argument(
            detail::concat("num_pages is ", num_pages, ", must be 0 .. ", held));
    }
    make_room(touch_, extras_.size() - touch_.size());
    keys_.resize(static_cast<std::size_t>(num_pages));
    num_tokens_ = num_pages * page_size_;
    page_ = Sha256();
    const auto is_behind = [this](const Extra& each) { return each.start >= num_tokens_; };
    extras_.erase(std::find_if(extras_.begin(), extras_.end(), is_behind), extras_.end());
    first_ahead_ = extras_.size();
    touch_.clear();
    for (std::size_t i = 0; i < extras_.size(); ++i) touch_.push_back(i);
    leave_behind(num_tokens_);
}

// Ends a page after all its tokens, which num_tokens_ counts already.
void KeyChain::finish_page(keys::HashedItems& out) noexcept {
    while (first_ahead_ < extras_.size() && extras_[first_ahead_].start < num_tokens_) {
        touch_.push_back(first_ahead_++);
    }
    put_extra(out);
    keys_.push_back(out.finish());
    leave_behind(num_tokens_);
}

void KeyChain::put_extra(keys::HashedItems& out) const noexcept {
    const bool is_vllm = options_.scheme == KeyScheme::kVllm;
    const bool has_name = is_vllm && options_.extra_key;
    const bool has_salt =
        is_vllm && keys_.empty() && options_.cache_salt && !options_.cache_salt->empty();
    const bool has_embeddings = is_vllm && options_.embeddings;
    const std::size_t items = touch_.size() + has_name + has_salt + has_embeddings;
    if (items == 0) {
        cbor::put_nil(out);
        return;
    }
    cbor::put_array(out, items);
    if (has_name) cbor::put_text(out, *options_.extra_key);
    put_placed(out);
    if (has_salt) cbor::put_text(out, *options_.cache_salt);
    if (has_embeddings) {
        const std::vector<PageKey>& digests = *options_.embeddings;
        const std::size_t page = keys_.size();
        const PageKey& digest = page < digests.size() ? digests[page] : digest_of_nothing();
        cbor::put_bytes(out, {reinterpret_cast<const char*>(digest.data()), digest.size()});
    }
}

void KeyChain::put_placed(keys::HashedItems& out) const noexcept {
    const std::int64_t first = num_tokens_ - page_size_;
    for (const std::size_t i : touch_) {
        const Extra& each = extras_[i];
        if (options_.scheme == KeyScheme::kVllm) {
            cbor::put_array(out, 2);
            cbor::put_text(out, each.bytes);
            cbor::put_integer(out, each.start - first);
        } else {
            put_placed_key(out, {each.start - first, each.length, each.bytes});
        }
    }
}

// All extra keys in touch_ start before the token.
void KeyChain::leave_behind(std::int64_t token) noexcept {
    const auto is_over = [this, token](std::size_t i) {
        return extras_[i].length <= token - extras_[i].start;
    };
    touch_.erase(std::remove_if(touch_.begin(), touch_.end(), is_over), touch_.end());
}

}  // namespace kvcore
