// SPDX-License-Identifier: Apache-2.0
// Threads that write new pages of a host tier to a store below it, and fill the tier from this
// store, while other threads use the manager. Page contents are plain memory, as in these threads.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fakes/shared_slots.hpp"
#include "kvcore/page_keys.hpp"

/// The common data of the threads: contents of pages by their keys.
class SharedStore {
   public:
    using Contents = std::vector<Digest>;

    /// A key has one content, whichever thread wrote it.
    void put(const kvcore::PageKey& key, const Contents& contents) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto [known, is_new] = kept_.emplace(key, contents);
        CHECK(is_new || known->second == contents);
    }
    /// Return the content, empty if the key is unknown.
    [[nodiscard]] Contents get(const kvcore::PageKey& key) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = kept_.find(key);
        return found == kept_.end() ? Contents() : found->second;
    }

    std::atomic<std::int64_t> num_written{0};
    std::atomic<std::int64_t> num_filled{0};

   private:
    std::mutex mutex_;
    std::map<kvcore::PageKey, Contents> kept_;
};

class StoreWorker {
   public:
    StoreWorker(Shared& shared, SharedStore& store, std::uint64_t seed)
        : shared_(shared), manager_(shared.manager), store_(store), random_(seed) {}

    void write(std::int64_t num_operations) {
        for (std::int64_t i = 0; i < num_operations; ++i) write_some();
    }
    /// Write everything that waits. No other thread uses the manager now.
    void drain() {
        while (write_some()) {
        }
        CHECK_EQ(manager_.num_waiting_writes(), 0);
    }
    void fill(std::int64_t num_operations) {
        for (std::int64_t i = 0; i < num_operations; ++i) fill_some();
    }

   private:
    using Contents = SharedStore::Contents;

    [[nodiscard]] std::int64_t page_size() const { return manager_.config().page_size; }
    void pause() {
        if (random_.chance(30)) std::this_thread::yield();
    }

    bool write_some() {
        kvcore::StoreMoves moves;
        if (!manager_.take_writes(random_.between(1, 6), moves)) {
            std::this_thread::yield();
            return false;
        }
        for (std::size_t i = 0; i < moves.keys.size(); ++i) {
            pause();
            CHECK_EQ(moves.ends[i], static_cast<std::int32_t>(i) + 1);
            const Digest* page = shared_.host.page(moves.replica, moves.parts[i].page);
            store_.put(moves.keys[i], Contents(page, page + page_size()));
        }
        store_.num_written.fetch_add(count(moves.keys), std::memory_order_relaxed);
        manager_.finish_writes(moves.ticket);
        return true;
    }

    void fill_some() {
        std::vector<TokenId> tokens = random_.pick(shared_.prompts);
        const std::string name = random_.chance(20) ? "other" : "";
        const Request prompt(name, tokens);
        const auto replica =
            static_cast<std::int32_t>(random_.below(manager_.config().num_replicas));
        const kvcore::StoreSearch found =
            manager_.search_below(replica, name, tokens.data(), prompt.end());
        if (found.most == 0) return std::this_thread::yield();
        std::vector<kvcore::PageKey> keys(static_cast<std::size_t>(found.most));
        manager_.keys_below(name, tokens.data(), found.stored, found.most, found.parent,
                            keys.data() + found.stored);
        const auto needed = manager_.needed_below(replica, name, tokens.data(), found.most);
        std::vector<kvcore::ColumnParts> items;
        std::vector<kvcore::PageKey> of_items;
        std::map<kvcore::PageKey, Contents> contents;
        for (const kvcore::ColumnParts& each : needed) {
            if (each.column < found.stored) return;  // evicted meanwhile
            const kvcore::PageKey& key = item(keys, each.column);
            Contents known = store_.get(key);
            if (known.empty()) break;
            // The stored content must be this prompt's content.
            CHECK(std::equal(known.begin(), known.end(),
                             prompt.contents() + each.column * page_size()));
            contents[key] = std::move(known);
            items.push_back(each);
            of_items.push_back(key);
        }
        kvcore::StoreMoves moves;
        pause();
        manager_.begin_fill(replica, name, tokens.data(), found.most, items.data(), of_items.data(),
                            count(items), moves);
        if (moves.ticket != 0) bring(moves, contents);
    }
    void bring(const kvcore::StoreMoves& moves,
               const std::map<kvcore::PageKey, Contents>& contents) {
        const std::int64_t n = count(moves.keys);
        const std::int64_t arrives = random_.chance(70) ? n : random_.between(0, n);
        for (std::int64_t i = 0; i < n; ++i) {
            pause();
            Digest* page = shared_.host.page(moves.replica, item(moves.parts, i).page);
            const Contents& known = contents.at(item(moves.keys, i));
            if (i < arrives) {
                std::copy(known.begin(), known.end(), page);
            } else {
                std::fill(page, page + page_size(), Digest{1});
            }
        }
        store_.num_filled.fetch_add(arrives, std::memory_order_relaxed);
        manager_.finish_fill(moves.ticket, arrives, random_.chance(20));
    }

    Shared& shared_;
    kvcore::CacheManager& manager_;
    SharedStore& store_;
    Random random_;
};
