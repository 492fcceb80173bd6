// SPDX-License-Identifier: Apache-2.0
#include "observe/event_keys.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "kvcore/extra_keys.hpp"
#include "kvcore/page_keys.hpp"

namespace kvcore {

EventKeys::EventKeys(const CacheConfig& config, const Grouping& grouping,
                     const std::vector<std::unique_ptr<Replica>>& replicas)
    : grouping_(grouping),
      stand_ins_(config.stand_ins),
      paths_(config.page_size, config.key_seed, config.stand_ins),
      page_size_(static_cast<std::size_t>(config.page_size)) {
    for (std::size_t i = 0; i < replicas.size(); ++i) {
        replicas[i]->for_each_level([&](const Level& level) {
            trees_.push_back(std::make_unique<Tree>(level.pool.end_id()));
        });
        trees_.resize(2 * (i + 1));  // nullptr without a host tier
    }
}

CacheEvent EventKeys::event(const PageNews::Item& item) {
    CacheEvent event;
    event.replica = item.tree / 2;
    event.medium = item.tree % 2 == 0 ? CacheMedium::kDevice : CacheMedium::kHost;
    return event;
}

std::uint8_t EventKeys::bit_of(std::size_t group) const noexcept {
    const std::int32_t window = grouping_.groups()[group].window;
    return window < 0 ? PageNews::kFullPages : static_cast<std::uint8_t>(1U << window);
}

std::vector<CacheEvent> EventKeys::read(const PageNews& news) {
    events_.clear();
    Cursor at{news.ids.data(), news.windows.empty() ? nullptr : news.windows.data(),
              news.tokens.data(), news.keys.data()};
    for (const PageNews::Item& item : news.items) {
        const auto n = static_cast<std::size_t>(item.num_pages);
        switch (item.kind) {
            case PageNews::Kind::kStored:
                read_stored(news, item, at);
                at.tokens += n * page_size_;
                break;
            case PageNews::Kind::kRemoved:
            case PageNews::Kind::kLost:
                read_gone(item, at);
                break;
            case PageNews::Kind::kWritten:
                events_.push_back(event(item));
                events_.back().medium = CacheMedium::kStorage;
                events_.back().keys.assign(at.keys, at.keys + n);
                at.keys += n;
                continue;
            case PageNews::Kind::kCleared:
                events_.push_back(event(item));
                events_.back().kind = CacheEvent::Kind::kCleared;
                for (std::int32_t i = item.tree; i < item.tree + 2; ++i) {
                    Tree* tree = trees_[static_cast<std::size_t>(i)].get();
                    if (tree == nullptr) continue;
                    tree->names.clear();
                    tree->reaches.clear();
                }
                continue;
        }
        at.ids += n;
        if (at.windows != nullptr) at.windows += n;
    }
    return std::move(events_);
}

// Replaces stand-in tokens by the tokens that they stand for, and adds their extra keys.
void EventKeys::begin_extras(TokenId* tokens, std::vector<Reach>& reaches) const {
    if (stand_ins_ == nullptr) return;
    for (std::size_t i = 0; i < page_size_; ++i) {
        if (tokens[i] > StandIns::kHighest) continue;
        const std::optional<std::string> name = stand_ins_->name_of(tokens[i]);
        if (!name) continue;
        const StandInParts parts = read_stand_in_name(*name);
        tokens[i] = parts.token;
        const auto start = static_cast<std::int64_t>(i);
        for (const ExtraKey& key : parts.keys) {
            // An endless key must not overflow.
            const std::int64_t most = std::numeric_limits<std::int64_t>::max() - start;
            reaches.push_back(
                {start, start + std::min(key.length, most), key.length, std::string(key.bytes)});
        }
    }
}

// `reaches`: the extra keys from the page before; on return, the extra keys for the next page.
void EventKeys::key_page(Tree& tree, BlockId id, const PageKey& before, std::vector<Reach>& reaches,
                         TokenId* tokens, std::int32_t page) {
    begin_extras(tokens, reaches);
    std::string extra;
    if (!reaches.empty()) cbor::put_array(extra, reaches.size());
    for (const Reach& each : reaches) {
        put_placed_key(extra, {each.start, each.length, each.bytes});
        made_.extras.push_back({page, each.start, each.length, each.bytes});
    }
    const auto n = static_cast<std::int64_t>(page_size_);
    PageKey& key = tree.keys[static_cast<std::size_t>(id)];
    key = page_key(before, tokens, n, extra);
    made_.keys.push_back(key);
    const auto is_over = [n](const Reach& each) { return each.end <= n; };
    reaches.erase(std::remove_if(reaches.begin(), reaches.end(), is_over), reaches.end());
    for (Reach& each : reaches) {
        each.start -= n;
        each.end -= n;
    }
    if (!reaches.empty()) tree.reaches[id] = reaches;
}

void EventKeys::read_stored(const PageNews& news, const PageNews::Item& item, Cursor at) {
    Tree& tree = *trees_[static_cast<std::size_t>(item.tree)];
    made_ = event(item);
    Name name;
    std::vector<Reach> reaches;
    PageKey before;
    if (item.parent == PageNews::kNoParent) {
        if (item.name >= 0) {
            name = std::make_shared<const std::string>(
                news.names[static_cast<std::size_t>(item.name)]);
            made_.name_space = *name;
        }
        before = paths_.root(made_.name_space);
    } else {
        before = tree.keys[static_cast<std::size_t>(item.parent)];
        made_.parent = before;
        const auto named = tree.names.find(item.parent);
        if (named != tree.names.end()) name = named->second;
        if (name != nullptr) made_.name_space = *name;
        const auto reached = tree.reaches.find(item.parent);
        if (reached != tree.reaches.end()) reaches = reached->second;
    }
    const auto n = static_cast<std::size_t>(item.num_pages);
    made_.keys.reserve(n);
    made_.tokens.assign(at.tokens, at.tokens + n * page_size_);
    for (std::size_t i = 0; i < n; ++i) {
        const BlockId id = at.ids[i];
        key_page(tree, id, before, reaches, made_.tokens.data() + i * page_size_,
                 static_cast<std::int32_t>(i));
        before = made_.keys.back();
        if (name != nullptr) tree.names[id] = name;
    }
    if (at.windows == nullptr) {
        events_.push_back(std::move(made_));
    } else {
        split_stored(item, at, made_);
    }
}

// Makes an event for each group and each run of pages that the group has.
void EventKeys::split_stored(const PageNews::Item& item, Cursor at, const CacheEvent& all) {
    for (std::size_t g = 0; g < grouping_.groups().size(); ++g) {
        const std::uint8_t bit = bit_of(g);
        for (std::int64_t i = 0; i < item.num_pages; ++i) {
            const std::int64_t first = i;
            while (i < item.num_pages && (at.windows[i] & bit) != 0) ++i;
            if (i > first) add_part(all, static_cast<std::int32_t>(g), first, i);
        }
    }
}

void EventKeys::add_part(const CacheEvent& all, std::int32_t group, std::int64_t first,
                         std::int64_t last) {
    CacheEvent part;
    part.medium = all.medium;
    part.replica = all.replica;
    part.group = group;
    part.name_space = all.name_space;
    part.parent = all.parent;
    if (first > 0) part.parent = all.keys[static_cast<std::size_t>(first - 1)];
    part.keys.assign(all.keys.begin() + first, all.keys.begin() + last);
    const auto page_size = static_cast<std::int64_t>(page_size_);
    part.tokens.assign(all.tokens.begin() + first * page_size,
                       all.tokens.begin() + last * page_size);
    for (const PageExtra& each : all.extras) {
        if (each.page < first || each.page >= last) continue;
        part.extras.push_back(each);
        part.extras.back().page -= static_cast<std::int32_t>(first);
    }
    events_.push_back(std::move(part));
}

void EventKeys::read_gone(const PageNews::Item& item, Cursor at) {
    Tree& tree = *trees_[static_cast<std::size_t>(item.tree)];
    const std::size_t groups = at.windows == nullptr ? 1 : grouping_.groups().size();
    for (std::size_t g = 0; g < groups; ++g) {
        CacheEvent gone = event(item);
        gone.kind = CacheEvent::Kind::kRemoved;
        if (at.windows != nullptr) gone.group = static_cast<std::int32_t>(g);
        for (std::int64_t i = 0; i < item.num_pages; ++i) {
            const bool has = at.windows == nullptr || (at.windows[i] & bit_of(g)) != 0;
            if (has) gone.keys.push_back(tree.keys[static_cast<std::size_t>(at.ids[i])]);
        }
        if (!gone.keys.empty()) events_.push_back(std::move(gone));
    }
    if (item.kind != PageNews::Kind::kRemoved) return;
    if (tree.names.empty() && tree.reaches.empty()) return;
    for (std::int64_t i = 0; i < item.num_pages; ++i) {
        tree.names.erase(at.ids[i]);
        tree.reaches.erase(at.ids[i]);
    }
}

}  // namespace kvcore
