// SPDX-License-Identifier: Apache-2.0
// Random traffic on a PrefixTree, compared with an oracle's set of pages: sequences that match,
// hold, grow and release, evictions with and without a guard, handles. Families grow to thousands
// of siblings.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kvcore/errors.hpp"
#include "kvcore/prefix_tree.hpp"
#include "oracle/oracle_cache.hpp"

namespace tests::tree::prefix_tree_random {

using kvcore::EvictionGuard;
using kvcore::PrefixMatch;
using kvcore::PrefixTree;
using kvcore::TreeNode;
using oracle::CachedPage;

namespace {

struct Traffic {
    std::int32_t page_size = 1;
    std::int64_t vocabulary = 2;
    std::int64_t most_pages = 300;  // the test evicts pages above this number
    int num_steps = 4000;
};

class CheckedTree {
   public:
    CheckedTree(const Traffic& traffic, std::uint64_t seed)
        : traffic_(traffic), random_(seed), tree_(traffic.page_size), cache_(traffic.page_size) {}

    void run() {
        for (int step = 0; step < traffic_.num_steps; ++step) {
            act();
            if (random_.chance(30)) check_counts();
            if (step % 100 == 0) check_everything();
            // Drain the tree now and then so that large families shrink again.
            const std::int64_t most = step % 1000 < 800 ? traffic_.most_pages : 10;
            if (cache_.size() > most) evict(cache_.size() - most);
        }
        while (!holders_.empty()) let_go();
        evict(cache_.size());
        CHECK_EQ(tree_.num_cached(), 0);
        CHECK_EQ(tree_.num_nodes(), 0);
        CHECK(tree_.find_namespace("x") == nullptr);
        check_everything();
    }

   private:
    struct Holder {
        std::unique_ptr<Request> request;
        TreeNode* node = nullptr;
        CachedPage* at = nullptr;
    };
    struct Kept {
        kvcore::PrefixHandle handle;
        Digest key = 0;
        std::vector<BlockId> ids;
    };

    void act() {
        const std::int64_t dice = random_.below(100);
        if (holders_.size() < 3 || (dice < 25 && holders_.size() < 8)) return begin();
        if (dice < 55) return grow(random_.pick(holders_));
        if (dice < 75) return let_go();
        if (dice < 90) return look_up(random_.pick(holders_));
        if (dice < 95) return check_handles();
        evict(random_.between(1, 6));
    }

    void append_random(Request& request, std::int64_t n) {
        for (; n > 0; --n) {
            request.append(static_cast<TokenId>(random_.below(traffic_.vocabulary)) - 1);
        }
    }

    // Hold the cached prefix of a prompt, as a hit does.
    void begin() {
        const std::string name = random_.chance(20) ? "x" : "";
        auto request = std::make_unique<Request>(name, std::vector<TokenId>{});
        if (!holders_.empty() && random_.chance(50)) {
            request = std::make_unique<Request>(*random_.pick(holders_).request);
            if (request->end() > 1) request->rewind(random_.between(1, request->end()));
        }
        append_random(*request, random_.below(3 * traffic_.page_size + 1));
        TreeNode* root = tree_.open_namespace(request->name_space());
        const PrefixMatch match = match_of(*request, root);
        Holder holder{std::move(request), tree_.split(match.at), nullptr};
        holder.at = cache_.match(*holder.request, holder.request->end());
        tree_.pin(holder.node);
        oracle::hold(holder.at);
        CHECK_EQ(PrefixTree::depth_of(holder.node), oracle::depth_of(holder.at));
        if (random_.chance(30)) keep_handle(holder, match);
        holder.request->start = 0;
        holders_.push_back(std::move(holder));
    }

    // Commit one to four more pages.
    void grow(Holder& holder) {
        Request& request = *holder.request;
        const std::int64_t first = oracle::depth_of(holder.at);
        const std::int64_t last = first + random_.between(1, 4);
        if (request.end() < last * traffic_.page_size) {
            append_random(request, last * traffic_.page_size - request.end());
        }
        std::vector<BlockId> ids;
        for (std::int64_t column = first; column < last; ++column) ids.push_back(next_id_++);
        std::vector<kvcore::DuplicatePage> found;
        TreeNode* end =
            tree_.insert(holder.node, request.tokens().data() + first * traffic_.page_size,
                         ids.data(), static_cast<std::int32_t>(last - first), found);
        tree_.pin(end);
        tree_.unpin(holder.node, false);
        holder.node = end;
        std::size_t num_found = 0;
        for (std::int64_t column = first; column < last; ++column) {
            CachedPage* page = cache_.enter(request, holder.at, column, item(ids, column - first));
            oracle::hold(page);
            oracle::drop(holder.at);
            holder.at = page;
            if (page->id == item(ids, column - first)) continue;
            CHECK(num_found < found.size());
            CHECK_EQ(found[num_found].index, column - first);
            CHECK_EQ(found[num_found++].cached, page->id);
        }
        CHECK_EQ(found.size(), num_found);
    }

    void let_go() {
        std::swap(random_.pick(holders_), holders_.back());
        const Holder& holder = holders_.back();
        tree_.unpin(holder.node, true);
        if (random_.chance(70) && holder.at != nullptr) tree_.shrink(holder.node);
        ++clock_;
        for (CachedPage* page = holder.at; page != nullptr; page = page->parent) {
            page->stamp = clock_;
        }
        oracle::drop(holder.at);
        holders_.pop_back();
    }

    PrefixMatch match_of(const Request& request, TreeNode* root) {
        const PrefixMatch match = tree_.match(root, request.tokens().data(), request.end(), true);
        const CachedPage* at = cache_.match(request, request.end());
        CHECK_EQ(match.at.depth, oracle::depth_of(at));
        std::vector<BlockId> ids(static_cast<std::size_t>(match.at.depth));
        tree_.copy_pages(match.at, 0, ids.data());
        CHECK_EQ(ids, oracle::ids_to(at));
        check_partial(request, match);
        std::int64_t unprotected = 0;
        for (; at != nullptr; at = at->parent) unprotected += at->holders == 0 ? 1 : 0;
        CHECK_EQ(tree_.num_unprotected(match.at), unprotected);
        return match;
    }
    void check_partial(const Request& request, const PrefixMatch& match) {
        // The oracle leaves one token to run.
        Request longer = request;
        longer.append(0);
        std::vector<CachedPage*> sources;
        CHECK_EQ(match.partial_tokens, cache_.find_sources(longer, match.at.depth, sources));
        if (match.partial_tokens == 0) return;
        CHECK_EQ(match.partial.depth, match.at.depth + 1);
        CHECK(source_of(match, sources) != nullptr);
        CHECK_EQ(tree_.is_protected(match.partial), source_of(match, sources)->holders > 0);
    }
    CachedPage* source_of(const PrefixMatch& match, const std::vector<CachedPage*>& sources) {
        BlockId id = -1;
        tree_.copy_pages(match.partial, match.partial.depth - 1, &id);
        for (CachedPage* source : sources) {
            if (source->id == id) return source;
        }
        return nullptr;
    }

    // If the best continuation is a partial page, evict other pages but not this one.
    void look_up(Holder& holder) {
        Request& request = *holder.request;
        append_random(request, random_.below(traffic_.page_size + 1));
        TreeNode* root = tree_.open_namespace(request.name_space());
        const PrefixMatch match = match_of(request, root);
        if (match.partial_tokens == 0 || match.at.depth != oracle::depth_of(holder.at)) return;
        Request longer = request;
        longer.append(0);
        std::vector<CachedPage*> sources;
        cache_.find_sources(longer, match.at.depth, sources);
        const CachedPage* spared = source_of(match, sources);
        evict(random_.between(1, 4), spared,
              {PrefixTree::position(match.partial.node, match.partial.depth).node, 1});
    }

    void evict(std::int64_t n, const CachedPage* spared = nullptr, EvictionGuard guard = {}) {
        std::vector<BlockId> ids(static_cast<std::size_t>(n));
        const std::int64_t possible = std::min(n, cache_.num_evictable(nullptr, spared));
        std::vector<BlockId> expected = tree_.evictable_pages();
        CHECK_EQ(expected.size(), cache_.num_evictable());
        CHECK_EQ(tree_.evict(n, ids.data(), guard), possible);
        ids.resize(static_cast<std::size_t>(possible));
        expected.resize(ids.size());
        if (guard.node == nullptr) CHECK_EQ(ids, expected);
        expected.clear();
        for (std::int64_t i = 0; i < possible; ++i) expected.push_back(cache_.evict(spared));
        std::sort(ids.begin(), ids.end());
        std::sort(expected.begin(), expected.end());
        CHECK_EQ(ids, expected);
    }

    // ---- handles -------------------------------------------------------------------------------
    void keep_handle(const Holder& holder, const PrefixMatch& match) {
        if (holder.at == nullptr || kept_.size() > 20) return;
        kept_.push_back({tree_.handle(match.at), holder.at->key, oracle::ids_to(holder.at)});
    }
    // A handle that still resolves has the pages that it was made for.
    void check_handles() {
        for (const Kept& kept : kept_) {
            try {
                const kvcore::TreePosition at = tree_.resolve(kept.handle);
                CHECK_EQ(at.depth, kept.ids.size());
                std::vector<BlockId> ids(kept.ids.size());
                tree_.copy_pages(at, 0, ids.data());
                CHECK_EQ(ids, kept.ids);
            } catch (const kvcore::InvalidHandleError&) {
                ++num_stale_;
            }
        }
        if (kept_.size() > 10) kept_.erase(kept_.begin(), kept_.begin() + 5);
    }

    void check_counts() {
        CHECK_EQ(tree_.num_cached(), cache_.size());
        CHECK_EQ(tree_.num_evictable(), cache_.num_evictable());
    }
    void check_everything() {
        check_counts();
        tree_.check_integrity();
        std::vector<BlockId> ids;
        tree_.for_each_run(
            [&](const BlockId* run, std::int32_t n) { ids.insert(ids.end(), run, run + n); });
        std::vector<BlockId> expected;
        for (const auto& entry : cache_.pages()) expected.push_back(entry.second.id);
        std::sort(ids.begin(), ids.end());
        std::sort(expected.begin(), expected.end());
        CHECK_EQ(ids, expected);
    }

    Traffic traffic_;
    Random random_;
    PrefixTree tree_;
    oracle::Cache cache_;
    std::vector<Holder> holders_;
    std::vector<Kept> kept_;
    std::uint64_t clock_ = 0;
    std::int64_t num_stale_ = 0;
    BlockId next_id_ = 0;
};

TEST(random_calls_agree_with_the_oracle) {
    const std::uint64_t seed = check::seed_or(15);
    for (const std::int32_t page_size : {1, 2, 3, 16}) {
        for (const std::int64_t vocabulary : {2, 4, 30, 100000}) {
            check::note = "page size " + std::to_string(page_size) + ", vocabulary " +
                          std::to_string(vocabulary);
            CheckedTree({page_size, vocabulary, 300, 4000}, seed).run();
        }
        CheckedTree({page_size, 100000, 4000, 5000}, seed).run();
    }
}

}  // namespace

}  // namespace tests::tree::prefix_tree_random
