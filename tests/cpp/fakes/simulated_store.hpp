// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/errors.hpp"
#include "kvcore/page_keys.hpp"
#include "kvcore/store_moves.hpp"
#include "support/check.hpp"
#include "support/group_probe.hpp"
#include "support/random.hpp"

/// The memory of the host tier's parts, in words, and the expected words.
struct StoredWords {
    std::function<std::int64_t(std::int32_t part)> size;
    std::function<Digest&(std::int32_t replica, std::int32_t part, BlockId page, std::int64_t i)>
        word;
    /// `ends`: digests of the tokens up to each token of a column.
    std::function<Digest(const std::vector<Digest>& ends, std::int32_t part, std::int64_t i)>
        expected;
};

/// A store below a manager's host tier, which is written and read while others use the manager. It
/// computes the key of each prefix itself. The content that it gets must have been written for
/// exactly the tokens of the key, and it returns this content.
class SimulatedStore {
   public:
    using Words = std::vector<Digest>;

    SimulatedStore(kvcore::CacheManager& manager, Random& random, StoredWords words)
        : manager_(manager), random_(random), words_(std::move(words)) {}

    [[nodiscard]] std::int64_t num_written() const { return num_written_; }
    [[nodiscard]] std::int64_t num_filled() const { return num_filled_; }
    /// Hits that had the full length of the fills for them.
    [[nodiscard]] std::int64_t num_complete() const { return num_complete_; }

    /// Return true if no transfer holds pages of the tier.
    [[nodiscard]] bool is_idle() const { return writes_.empty() && fills_.empty(); }

    /// Make a random call of a writer.
    void write() {
        const std::int64_t dice = random_.below(3);
        if (writes_.empty() || (dice == 0 && writes_.size() < 4)) {
            return take(random_.between(1, 9));
        }
        Write& write = random_.pick(writes_);
        if (!write.is_copied) return copy(write);
        finish(write);
    }
    /// Make a random call of a reader, for a prompt.
    void read(std::int32_t replica, const Request& prompt) {
        if (random_.chance(30)) return begin(replica, prompt, true);
        if (fills_.empty() || (fills_.size() < 3 && random_.chance(50))) {
            return begin(replica, prompt, false);
        }
        Fill& fill = random_.pick(fills_);
        if (!fill.is_copied) return copy(fill);
        finish(fill);
    }
    /// A reset forgot the waiting writes: the tier's records from before need not be kept.
    void note_reset() {
        for (std::int32_t r = 0; r < manager_.config().num_replicas; ++r) {
            for (const auto& [digest, record] : records(r)) forgotten_.insert({r, digest});
        }
    }
    /// Finish all fills, and write all columns that were not forgotten.
    void drain() {
        while (!fills_.empty()) {
            if (!fills_[0].is_copied) copy(fills_[0]);
            finish(fills_[0]);
        }
        do {
            while (!writes_.empty()) {
                if (!writes_[0].is_copied) copy(writes_[0]);
                finish(writes_[0]);
            }
            take(64);
        } while (!writes_.empty());
        CHECK_EQ(manager_.num_waiting_writes(), 0);
        for (std::int32_t r = 0; r < manager_.config().num_replicas; ++r) check_kept(r);
    }

   private:
    struct Write {
        kvcore::StoreMoves moves;
        std::vector<std::vector<Digest>> ends;  // digests of each column
        bool is_copied = false;
    };
    struct Fill {
        kvcore::StoreMoves moves;
        std::int64_t arrives = 0;
        bool is_copied = false;
    };
    using Kept = std::map<std::int32_t, Words>;

    [[nodiscard]] Cached records(std::int32_t replica) const {
        return records_of(manager_, replica, {"", "other"});
    }
    [[nodiscard]] std::int64_t page_size() const { return manager_.config().page_size; }
    [[nodiscard]] std::vector<kvcore::PageKey> keys_of(const std::string& name,
                                                       const std::vector<TokenId>& tokens) const {
        kvcore::KeyOptions options;
        options.seed = manager_.config().key_seed;
        if (!name.empty()) options.extra_key = name;
        kvcore::KeyChain chain(page_size(), options);
        chain.extend(tokens.data(), count(tokens));
        return chain.keys();
    }
    // The key of a record, from the tokens up to its end.
    [[nodiscard]] kvcore::PageKey key_of(const Cached& records, Digest end) const {
        std::vector<TokenId> tokens;
        auto at = records.find(end);
        Digest root = end;
        for (; at != records.end(); at = records.find(root)) {
            tokens.insert(tokens.begin(), at->second.tokens.begin(), at->second.tokens.end());
            root = at->second.parent;
        }
        const std::string name = root == digest_of_namespace("") ? "" : "other";
        CHECK_EQ(root, digest_of_namespace(name));
        return keys_of(name, tokens).back();
    }
    [[nodiscard]] static std::vector<Digest> ends_of(const CachedColumn& column) {
        std::vector<Digest> ends;
        Digest digest = column.parent;
        for (const TokenId token : column.tokens) {
            ends.push_back(digest = digest_after(digest, token));
        }
        return ends;
    }
    [[nodiscard]] static BlockId page_of(const CachedColumn& record, std::int32_t part) {
        if (part == kvcore::kStatePart) return record.state;
        return record.pages.empty() ? record.id : item(record.pages, part);
    }
    template <class Visit>
    static void for_each_part(const kvcore::StoreMoves& moves, const Visit& visit) {
        std::int32_t k = 0;
        for (std::size_t i = 0; i < moves.keys.size(); ++i) {
            for (; k < moves.ends[i]; ++k) visit(i, item(moves.parts, k));
        }
    }
    Words words_of(std::int32_t replica, kvcore::StoredPart part) {
        Words words;
        for (std::int64_t i = 0; i < words_.size(part.part); ++i) {
            words.push_back(words_.word(replica, part.part, part.page, i));
        }
        return words;
    }

    // Take writes: they must be records of the tier with all their parts, and with their keys.
    void take(std::int64_t most) {
        Write write;
        const bool has = manager_.take_writes(most, write.moves);
        CHECK_EQ(has, write.moves.ticket != 0);
        if (!has) return;
        const kvcore::StoreMoves& moves = write.moves;
        CHECK(count(moves.keys) <= most && moves.keys.size() == moves.ends.size());
        const Cached now = records(moves.replica);
        std::map<std::pair<std::int32_t, BlockId>, Digest> owners;
        for (const auto& [digest, record] : now) {
            for (std::int32_t part = 0; part <= kvcore::kStatePart; ++part) {
                if (!has_part(record, part)) continue;
                CHECK(owners.emplace(std::pair(part, page_of(record, part)), digest).second);
            }
        }
        std::vector<std::set<Digest>> found(moves.keys.size());
        std::vector<std::int64_t> parts(moves.keys.size());
        for_each_part(moves, [&](std::size_t i, kvcore::StoredPart part) {
            const auto owner = owners.find({part.part, part.page});
            CHECK(owner != owners.end());
            found[i].insert(owner->second);
            ++parts[i];
        });
        for (std::size_t i = 0; i < found.size(); ++i) {
            CHECK_EQ(found[i].size(), 1U);
            const CachedColumn& record = now.at(*found[i].begin());
            CHECK_EQ(parts[i], count_parts(record));
            CHECK(moves.keys[i] == key_of(now, *found[i].begin()));
            write.ends.push_back(ends_of(record));
        }
        if (random_.chance(20)) check_keys(now, moves.replica);
        writes_.push_back(std::move(write));
    }
    // A known key must be the record's key, and the parent's key must also be known.
    void check_keys(const Cached& now, std::int32_t replica) const {
        const kvcore::RecordKeys& keys =
            *kvcore::CacheManagerProbe::replica(manager_, replica).host->keys;
        for (const auto& [digest, record] : now) {
            const kvcore::PageKey* key = keys.find(record.id);
            if (key == nullptr) continue;
            CHECK(*key == key_of(now, digest));
            const auto parent = now.find(record.parent);
            CHECK(parent == now.end() || keys.find(parent->second.id) != nullptr);
        }
    }
    [[nodiscard]] static bool has_part(const CachedColumn& record, std::int32_t part) {
        if (part == kvcore::kStatePart) return record.state >= 0;
        if (record.pages.empty()) return part == 0;
        return part < count(record.pages) && item(record.pages, part) >= 0;
    }
    [[nodiscard]] static std::int64_t count_parts(const CachedColumn& record) {
        std::int64_t n = 0;
        for (std::int32_t part = 0; part <= kvcore::kStatePart; ++part) {
            n += has_part(record, part) ? 1 : 0;
        }
        return n;
    }
    // Copy the parts, long after they were handed out.
    void copy(Write& write) {
        for_each_part(write.moves, [&](std::size_t i, kvcore::StoredPart part) {
            const Words words = words_of(write.moves.replica, part);
            for (std::size_t k = 0; k < words.size(); ++k) {
                CHECK_EQ(words[k],
                         words_.expected(write.ends[i], part.part, static_cast<std::int64_t>(k)));
            }
            const auto [known, is_new] = kept_[write.moves.keys[i]].emplace(part.part, words);
            CHECK(is_new || known->second == words);
            ++num_written_;
        });
        write.is_copied = true;
    }
    void finish(Write& write) {
        const std::uint64_t ticket = write.moves.ticket;
        manager_.finish_writes(ticket);
        CHECK_THROWS(kvcore::InvalidHandleError, manager_.finish_writes(ticket));
        writes_.erase(writes_.begin() + (&write - writes_.data()));
    }

    [[nodiscard]] std::uint64_t parts_of(const kvcore::PageKey& key) const {
        std::uint64_t parts = 0;
        const auto found = kept_.find(key);
        if (found == kept_.end()) return 0;
        for (const auto& [part, words] : found->second) parts |= std::uint64_t{1} << part;
        return parts;
    }
    [[nodiscard]] kvcore::StoreSearch search(std::int32_t replica, const Request& prompt) const {
        return manager_.search_below(replica, prompt.name_space(), prompt.tokens().data(),
                                     prompt.end());
    }
    // Compute the keys from the start of the prefix, and from the end of the tier's prefix.
    [[nodiscard]] std::vector<kvcore::PageKey> ask_keys(const Request& prompt,
                                                        const kvcore::StoreSearch& found) const {
        const TokenId* tokens = prompt.tokens().data();
        std::vector<kvcore::PageKey> keys(static_cast<std::size_t>(found.most));
        manager_.keys_below(prompt.name_space(), tokens, 0, found.most,
                            manager_.root_key_below(prompt.name_space()), keys.data());
        std::vector<kvcore::PageKey> behind(static_cast<std::size_t>(found.most - found.stored));
        manager_.keys_below(prompt.name_space(), tokens, found.stored, found.most, found.parent,
                            behind.data());
        CHECK(std::equal(behind.begin(), behind.end(), keys.begin() + found.stored));
        CHECK(keys == keys_of(prompt.name_space(), prompt.tokens()));
        return keys;
    }
    void begin(std::int32_t replica, const Request& prompt, bool is_whole) {
        const kvcore::StoreSearch found = search(replica, prompt);
        if (found.most == 0) return;
        CHECK_EQ(found.most, prompt.end() / page_size());
        CHECK(found.stored <= found.have && found.legal <= found.have && found.have <= found.most);
        const std::vector<kvcore::PageKey> keys = ask_keys(prompt, found);
        const auto end = static_cast<std::int32_t>(random_.between(1, found.most));
        std::vector<kvcore::ColumnParts> items =
            manager_.needed_below(replica, prompt.name_space(), prompt.tokens().data(), end);
        std::vector<kvcore::PageKey> of_items;
        bool has_all = true;
        std::int32_t before = -1;
        for (kvcore::ColumnParts& each : items) {
            CHECK(before < each.column && each.column < end && each.parts != 0);
            before = each.column;
            const kvcore::PageKey& key = item(keys, each.column);
            std::uint64_t parts = each.parts & parts_of(key);
            if (!is_whole && random_.chance(10)) parts &= random_.next();
            has_all = has_all && parts == each.parts;
            each.parts = parts;
            of_items.push_back(key);
        }
        Fill fill;
        manager_.begin_fill(replica, prompt.name_space(), prompt.tokens().data(), end, items.data(),
                            of_items.data(), count(items), fill.moves);
        if (fill.moves.ticket == 0) return;
        check_given(fill.moves, items, of_items);
        const bool is_complete = has_all && fill.moves.keys.size() == items.size() &&
                                 count_bits(items) == count(fill.moves.parts);
        fills_.push_back(std::move(fill));
        if (!is_whole || !is_complete) return;
        // No other call comes between: the hit must have the promised length.
        fills_.back().arrives = count(items);
        copy(fills_.back());
        finish(fills_.back());
        CHECK(search(replica, prompt).most == 0 || search(replica, prompt).legal >= end);
        ++num_complete_;
    }
    [[nodiscard]] static std::int64_t count_bits(const std::vector<kvcore::ColumnParts>& items) {
        std::int64_t n = 0;
        for (const kvcore::ColumnParts& each : items) {
            for (std::uint64_t parts = each.parts; parts != 0; parts &= parts - 1) ++n;
        }
        return n;
    }
    // Check that a fill has only parts that were asked for.
    void check_given(const kvcore::StoreMoves& moves, const std::vector<kvcore::ColumnParts>& items,
                     const std::vector<kvcore::PageKey>& keys) const {
        std::map<kvcore::PageKey, std::uint64_t> asked;
        for (std::size_t i = 0; i < keys.size(); ++i) asked[keys[i]] = items[i].parts;
        CHECK(moves.keys.size() == moves.ends.size() && !moves.keys.empty());
        for_each_part(moves, [&](std::size_t i, kvcore::StoredPart part) {
            CHECK((asked.at(moves.keys[i]) >> part.part & 1) != 0);
        });
    }
    // Parts that do not arrive are garbage.
    void copy(Fill& fill) {
        if (fill.arrives == 0) {
            const std::int64_t n = count(fill.moves.keys);
            fill.arrives = random_.chance(60) ? n : random_.between(0, n);
        }
        for_each_part(fill.moves, [&](std::size_t i, kvcore::StoredPart part) {
            const Words& words = kept_.at(fill.moves.keys[i]).at(part.part);
            const bool arrives = static_cast<std::int64_t>(i) < fill.arrives;
            for (std::int64_t k = 0; k < count(words); ++k) {
                words_.word(fill.moves.replica, part.part, part.page, k) =
                    arrives ? item(words, k) : 1;
            }
        });
        fill.is_copied = true;
    }
    void finish(Fill& fill) {
        // No other writer has changed the pages.
        for_each_part(fill.moves, [&](std::size_t i, kvcore::StoredPart part) {
            if (static_cast<std::int64_t>(i) >= fill.arrives) return;
            CHECK(words_of(fill.moves.replica, part) == kept_.at(fill.moves.keys[i]).at(part.part));
        });
        const std::uint64_t ticket = fill.moves.ticket;
        const std::int32_t replica = fill.moves.replica;
        manager_.finish_fill(ticket, fill.arrives, random_.chance(30));
        CHECK_THROWS(kvcore::InvalidHandleError, manager_.finish_fill(ticket, 0));
        num_filled_ += fill.arrives;
        fills_.erase(fills_.begin() + (&fill - fills_.data()));
        if (random_.chance(20)) check_keys(records(replica), replica);
    }
    void check_kept(std::int32_t replica) const {
        const Cached now = records(replica);
        for (const auto& [digest, record] : now) {
            if (forgotten_.count({replica, digest}) > 0) continue;
            const std::uint64_t kept = parts_of(key_of(now, digest));
            for (std::int32_t part = 0; part <= kvcore::kStatePart; ++part) {
                CHECK(!has_part(record, part) || (kept >> part & 1) != 0);
            }
        }
    }

    kvcore::CacheManager& manager_;
    Random& random_;
    StoredWords words_;
    std::map<kvcore::PageKey, Kept> kept_;
    std::vector<Write> writes_;
    std::vector<Fill> fills_;
    std::set<std::pair<std::int32_t, Digest>> forgotten_;
    std::int64_t num_written_ = 0;
    std::int64_t num_filled_ = 0;
    std::int64_t num_complete_ = 0;
};
