// SPDX-License-Identifier: Apache-2.0
// The eviction order if layers have windows, computed slowly with linear searches.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "layers/column_pages.hpp"
#include "oracle/slow_hits.hpp"
#include "oracle/slow_policy.hpp"

/// A slow version of ColumnPages.
class SlowColumns final : public kvcore::PoolListener, public kvcore::TreeListener {
   public:
    using BlockId = kvcore::BlockId;
    using NodeId = kvcore::NodeId;
    using TreeNode = kvcore::TreeNode;
    using TreePosition = kvcore::TreePosition;
    using How = kvcore::ColumnPages::Departure;
    using Entry = std::pair<BlockId, std::size_t>;

    SlowColumns(const kvcore::Grouping& grouping, std::int64_t num_pages,
                kvcore::BlockPool& columns, kvcore::PrefixTree& tree, SlowPolicy& policy,
                std::int64_t num_slots)
        : grouping_(grouping),
          num_pages_(num_pages),
          checkpoints_(num_slots),
          columns_(columns),
          tree_(tree),
          policy_(policy),
          state_(static_cast<std::size_t>(columns.num_blocks())) {
        for (Column& column : state_) column.windows.resize(num_windows());
        columns.set_listener(this);
        tree.set_listener(this);
        policy.departures_of = [this](NodeId run) {
            std::vector<NodeId> ids;
            for (const Left& left : left_) {
                if (left.is_spare) continue;
                const TreeNode* owner = owner_of(left);
                if (owner != nullptr && owner->id == run) ids.push_back(left.id);
            }
            return ids;
        };
        policy.suspect = [this](NodeId run) {
            if (checkpoints_.exist()) suspect(tree_.run(run));
        };
        policy.pardon = [this](NodeId run) {
            const auto is_it = [&](const TreeNode* node) { return node->id == run; };
            condemned_.erase(std::remove_if(condemned_.begin(), condemned_.end(), is_it),
                             condemned_.end());
        };
    }

    [[nodiscard]] std::int64_t num_free() const {
        std::int64_t held = 0;
        for (const Column& column : state_) {
            held += column.is_full ? grouping_.num_full_lanes() : 0;
            for (std::size_t w = 0; w < num_windows(); ++w) {
                held += column.windows[w].has ? lanes(w) : 0;
            }
        }
        return num_pages_ - held;
    }
    [[nodiscard]] std::int64_t num_evictable() const {
        std::int64_t pages = tree_.num_evictable() * grouping_.num_full_lanes();
        for (BlockId c = 0; c < columns_.num_blocks(); ++c) {
            for (std::size_t w = 0; w < num_windows(); ++w) pages += is_idle(c, w) ? lanes(w) : 0;
        }
        return pages;
    }
    [[nodiscard]] bool has(BlockId column, std::size_t w) const { return of(column, w).has; }
    [[nodiscard]] bool is_idle(BlockId column, std::size_t w) const {
        return of(column, w).has && of(column, w).readers == 0 && at(column).is_cached;
    }
    [[nodiscard]] std::int32_t longest_hit(TreePosition end) const {
        std::vector<BlockId> ids(static_cast<std::size_t>(end.depth));
        tree_.copy_pages(end, 0, ids.data());
        return slow_longest_hit(grouping_, ids, checkpoints_,
                                [&](BlockId column, std::size_t w) { return has(column, w); });
    }

    void fill_full(BlockId column) { at(column).is_full = true; }
    void fill(BlockId column, std::size_t w) { of(column, w).has = true; }
    void enter(BlockId column, std::size_t w) { ++of(column, w).readers; }
    void leave(BlockId column, std::size_t w, How how) {
        Window& window = of(column, w);
        if (--window.readers > 0 || !window.has) return;
        if (!at(column).is_cached) {
            window.has = false;
        } else if (how == How::kPassed) {
            take_out({column, w});
            passed_.push_back({column, w});
        } else if (how == How::kUseless) {
            take_out({column, w});
            unreachable_.push_back({column, w});
        } else if (how == How::kKept || !is_queued({column, w})) {
            put_in({column, w});
        }
    }
    void enter_all(BlockId column) {
        for (std::size_t w = 0; w < num_windows(); ++w) enter(column, w);
    }
    void leave_all(BlockId column, TreePosition end) {
        begin_leaving();
        leave_from(end);
        for (std::size_t w = 0; w < num_windows(); ++w) leave(column, w, How::kUnused);
    }
    void begin_leaving() {
        ++moment_;
        is_spare_ = false;
    }
    void leave_from(TreePosition end, bool is_spare = false) {
        end_ = end;
        is_spare_ = is_spare;
    }
    void keep(BlockId column, std::size_t w) {
        const Entry entry{column, w};
        if (std::find(passed_.begin(), passed_.end(), entry) != passed_.end()) put_in(entry);
    }
    // Take ids of departures when ColumnPages does: a policy orders equal candidates by id.
    void make_room_to_cache(std::int64_t n, std::int64_t) {
        constexpr std::size_t kSpare = kvcore::ColumnPages::kSpareDepartures;
        if (policy_.free.size() >= kSpare) return;
        const std::size_t entries =
            static_cast<std::size_t>(tree_.num_cached() + n) * num_windows();
        policy_.make_room_for_departures(
            std::min(entries, policy_.num_departures() - policy_.free.size() + 2 * kSpare));
    }
    void cache(BlockId column) { at(column).is_cached = true; }
    void fill_holes(kvcore::TreePosition, BlockId cached, BlockId own) {
        for (std::size_t w = 0; w < num_windows(); ++w) {
            if (has(cached, w) || !has(own, w)) continue;
            of(own, w).has = false;
            of(cached, w).has = true;
            ++num_filled_;
            if (is_idle(cached, w)) put_in({cached, w});
        }
    }
    void freed(const BlockId* ids, std::int64_t n) noexcept override {
        for (const BlockId* id = ids; id != ids + n; ++id) {
            for (std::size_t w = 0; w < num_windows(); ++w) {
                if (is_queued({*id, w}) && !policy_.goes_by_time) lose({*id, w});
                take_out({*id, w});
                of(*id, w).has = false;
            }
            at(*id).is_full = at(*id).is_cached = false;
            if (checkpoints_.has(*id)) lose_checkpoint(*id);
        }
    }
    [[nodiscard]] SlowCheckpoints& checkpoints() { return checkpoints_; }
    [[nodiscard]] const SlowCheckpoints& checkpoints() const { return checkpoints_; }
    void add_checkpoint(BlockId column) {
        if (checkpoints_.has(column)) return;
        if (const BlockId gone = checkpoints_.oldest_if_full(); gone >= 0) lose_checkpoint(gone);
        checkpoints_.add(column);
    }
    void stored(TreeNode*, std::int32_t, std::int32_t) noexcept override {}
    void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        std::vector<BlockId> ids(static_cast<std::size_t>(first + n));
        tree_.copy_pages({node, first + n}, 0, ids.data());
        for (std::int32_t c = first; c < first + n; ++c) {
            removed_from_[ids[static_cast<std::size_t>(c)]] = node->num_pages > 0 ? node : nullptr;
        }
        for (Left& left : left_) {
            const auto gone = ids.begin() + first;
            if (std::find(gone, ids.end(), left.anchor) == ids.end()) continue;
            left.anchor = first == 0 ? -1 : ids[static_cast<std::size_t>(first - 1)];
        }
    }

    std::int64_t make_room(std::int64_t pages, std::int64_t columns, kvcore::EvictionGuard guard) {
        std::int64_t evicted = 0;
        while (num_free() < pages || columns_.num_free() < columns) {
            const std::int64_t free = num_free();
            if (!evict_next(pages - free, columns - columns_.num_free(), guard)) break;
            evicted += num_free() - free;
        }
        return evicted;
    }

   private:
    struct Window {
        bool has = false;
        std::int64_t readers = 0;
    };
    struct Column {
        bool is_full = false;
        bool is_cached = false;
        std::vector<Window> windows{};
    };
    struct Left {
        NodeId id = 0;
        BlockId anchor = -1;  // a column of the run in which it ends
        std::int32_t depth = 0;
        std::int64_t moment = 0;
        std::int64_t broken = 0;  // number in order of breaking; 0: intact
        bool is_spare = false;
        std::vector<Entry> entries{};
    };

    [[nodiscard]] std::size_t num_windows() const { return grouping_.windows().size(); }
    [[nodiscard]] std::int64_t lanes(std::size_t w) const {
        return grouping_.windows()[w].num_lanes;
    }
    [[nodiscard]] Column& at(BlockId column) { return state_[static_cast<std::size_t>(column)]; }
    [[nodiscard]] const Column& at(BlockId column) const {
        return state_[static_cast<std::size_t>(column)];
    }
    [[nodiscard]] Window& of(BlockId column, std::size_t w) { return at(column).windows[w]; }
    [[nodiscard]] const Window& of(BlockId column, std::size_t w) const {
        return at(column).windows[w];
    }
    [[nodiscard]] TreeNode* owner_of(const Left& left) const {
        return left.anchor < 0 ? nullptr : run_of(tree_, left.anchor);
    }

    [[nodiscard]] bool is_queued(const Entry& entry) const {
        const auto has = [&](const auto& entries) {
            return std::find(entries.begin(), entries.end(), entry) != entries.end();
        };
        return has(passed_) || has(unreachable_) ||
               std::any_of(left_.begin(), left_.end(),
                           [&](const Left& left) { return has(left.entries); });
    }
    void take_out(const Entry& entry) {
        passed_.erase(std::remove(passed_.begin(), passed_.end(), entry), passed_.end());
        unreachable_.erase(std::remove(unreachable_.begin(), unreachable_.end(), entry),
                           unreachable_.end());
        for (auto left = left_.begin(); left != left_.end(); ++left) {
            const auto found = std::find(left->entries.begin(), left->entries.end(), entry);
            if (found == left->entries.end()) continue;
            left->entries.erase(found);
            if (!left->entries.empty()) return;
            if (!left->is_spare) policy_.end(left->id);
            policy_.free.push_back(left->id);
            left_.erase(left);
            return;
        }
    }
    void put_in(const Entry& entry) {
        take_out(entry);
        const auto known = std::find_if(left_.begin(), left_.end(), [&](const Left& left) {
            return left.moment == moment_ && left.is_spare == is_spare_ &&
                   (policy_.goes_by_time || left.depth == end_.depth);
        });
        if (known != left_.end()) return known->entries.push_back(entry);
        const auto at = kvcore::PrefixTree::position(end_.node, end_.depth);
        BlockId anchor = 0;
        tree_.copy_pages(at, at.depth - 1, &anchor);
        left_.push_back({policy_.free.back(), anchor, end_.depth, moment_, 0, is_spare_, {entry}});
        policy_.free.pop_back();
        if (!is_spare_) policy_.begin(left_.back().id, at.node->id);
    }
    // An entry lost its pages: no entry that left with it, at this depth or deeper, serves a hit
    // any more.
    void lose(const Entry& entry) {
        std::int32_t depth = -1;
        std::int64_t moment = 0;
        bool is_spare = false;
        for (const Left& left : left_) {
            const auto& entries = left.entries;
            if (std::find(entries.begin(), entries.end(), entry) == entries.end()) continue;
            if (left.broken == 0) depth = left.depth;
            moment = left.moment;
            is_spare = left.is_spare;
        }
        TreeNode* run = nullptr;
        std::int32_t deepest = depth;
        if (depth >= 0) {
            break_all(moment, is_spare, depth, entry);
            for (const Left& left : left_) {
                if (left.moment != moment || left.is_spare != is_spare) continue;
                if (left.depth < deepest) continue;
                deepest = left.depth;
                run = owner_of(left);
            }
        }
        take_out(entry);
        if (run != nullptr && deepest >= run->end()) judge(run);
    }
    // Break the entry's departure first, then the later departures in order, then the earlier ones.
    void break_all(std::int64_t moment, bool is_spare, std::int32_t depth, const Entry& entry) {
        const auto first = std::find_if(left_.begin(), left_.end(), [&](const Left& left) {
            return std::find(left.entries.begin(), left.entries.end(), entry) != left.entries.end();
        });
        const auto break_if_behind = [&](Left& left) {
            const bool breaks = left.moment == moment && left.is_spare == is_spare &&
                                left.depth >= depth && left.broken == 0;
            if (breaks) left.broken = ++num_broken_;
        };
        std::for_each(first, left_.end(), break_if_behind);
        std::for_each(left_.begin(), first, break_if_behind);
    }
    void judge(TreeNode* run) {
        if (run->is_root() || run->num_children > 0 || run->pins > 0) return;
        const bool is_known =
            std::find(condemned_.begin(), condemned_.end(), run) != condemned_.end();
        legal_[run] = {longest_hit({run, run->end()}), num_filled_};
        if (legal_[run].first == run->end()) {
            policy_.pardon(run->id);
        } else if (!is_known) {
            condemned_.push_back(run);
        }
    }

    bool evict_next(std::int64_t pages, std::int64_t columns, kvcore::EvictionGuard guard) {
        const std::int64_t wanted = std::min<std::int64_t>(
            64, std::max<std::int64_t>({1, pages / grouping_.num_lanes(), columns}));
        const std::int64_t rest = columns <= 0 && pages < grouping_.num_lanes() ? pages : 0;
        if (pages > 0 && !unreachable_.empty()) return evict(unreachable_.front());
        if (pages > 0) {
            const Left* broken = nullptr;
            for (const Left& left : left_) {
                const bool is_first =
                    left.broken > 0 && (broken == nullptr || left.broken < broken->broken);
                if (is_first) broken = &left;
            }
            if (broken != nullptr) return evict(broken->entries.front());
        }
        if (evict_useless(wanted, rest, guard)) return true;
        if (pages > 0 && !passed_.empty()) return evict(passed_.front());
        const auto spare = std::find_if(left_.begin(), left_.end(),
                                        [](const Left& left) { return left.is_spare; });
        if (pages > 0 && spare != left_.end()) return evict(spare->entries.front());
        NodeId departure = pages > 0 ? policy_.next(tree_) : 0;
        if (departure == 0) {
            if (const auto part = part_of(tree_.next_victim(guard).end, rest)) return evict(*part);
            if (evict_runs(wanted, guard)) return true;
            departure = pages > 0 ? policy_.first_aside() : 0;
        }
        for (const Left& left : left_) {
            if (left.id == departure) return evict(left.entries.front());
        }
        return false;
    }
    bool evict(Entry entry) {
        if (of(entry.first, entry.second).readers > 0) {
            take_out(entry);
        } else {
            of(entry.first, entry.second).has = false;
            lose(entry);
        }
        return true;
    }
    // Return the window of a run's last column that can provide the last wanted pages, if the
    // column has more pages than that.
    std::optional<Entry> part_of(kvcore::TreePosition end, std::int64_t pages) {
        if (end.node == nullptr || pages <= 0) return std::nullopt;
        BlockId column = 0;
        tree_.copy_pages(end, end.depth - 1, &column);
        std::int64_t all = grouping_.num_lanes();
        std::optional<std::pair<std::int64_t, std::size_t>> fewest;
        for (std::size_t w = 0; w < num_windows(); ++w) {
            const std::int64_t lanes = grouping_.windows()[w].num_lanes;
            if (!of(column, w).has) all -= lanes;
            if (!of(column, w).has || of(column, w).readers > 0 || lanes < pages) continue;
            if (!fewest || lanes < fewest->first) fewest = {lanes, w};
        }
        if (all <= pages || !fewest) return std::nullopt;
        return Entry{column, fewest->second};
    }
    bool evict_useless(std::int64_t n, std::int64_t rest, kvcore::EvictionGuard guard) {
        while (!condemned_.empty()) {
            TreeNode* run = condemned_.front();
            const std::int32_t legal = legal_[run].first;
            const std::int64_t useless = run->end() - std::max(legal, run->start);
            if (run->num_children > 0 || run->pins > 0 || run == guard.node || useless <= 0) {
                condemned_.pop_front();
                continue;
            }
            if (legal_[run].second != num_filled_) {
                judge(run);
                continue;
            }
            if (const auto part = part_of({run, run->end()}, rest)) return evict(*part);
            TreeNode* parent = run->parent;
            const bool is_gone = useless <= n && legal <= run->start;
            policy_.aim = run->id;
            evict_columns(std::min(n, useless), guard);
            policy_.aim = kvcore::kNoNode;
            if (useless <= n) judge(is_gone ? parent : run);
            return true;
        }
        return false;
    }
    void lose_checkpoint(BlockId column) {
        checkpoints_.forget(column);
        TreeNode* run = run_of(tree_, column);
        if (run == nullptr) run = removed_from_[column];  // that run may have other checkpoints
        if (run != nullptr) suspect(run);
    }
    void suspect(TreeNode* run) {
        policy_.pardon(run->id);
        if (run->num_children > 0 || run->pins > 0) return;
        legal_[run] = {0, -1};
        condemned_.push_back(run);
    }
    bool evict_runs(std::int64_t n, kvcore::EvictionGuard guard) {
        if (checkpoints_.exist()) {
            const NodeId victim = tree_.victim();
            if (victim == kvcore::kNoNode) return false;
            n = std::min<std::int64_t>(n, tree_.run(victim)->num_pages);
        }
        return evict_columns(n, guard);
    }
    bool evict_columns(std::int64_t n, kvcore::EvictionGuard guard) {
        std::array<BlockId, 64> ids;
        n = tree_.evict(n, ids.data(), guard);
        std::reverse(ids.begin(), ids.begin() + n);  // the first victim is used first
        columns_.free(ids.data(), n);
        return n > 0;
    }

    const kvcore::Grouping& grouping_;
    std::int64_t num_pages_;
    SlowCheckpoints checkpoints_;
    kvcore::BlockPool& columns_;
    kvcore::PrefixTree& tree_;
    SlowPolicy& policy_;
    std::vector<Column> state_;
    std::map<BlockId, TreeNode*> removed_from_;
    std::vector<Entry> unreachable_;
    std::vector<Entry> passed_;
    std::deque<Left> left_;
    std::deque<TreeNode*> condemned_;
    // The end of the longest hit in a run, and the number of filled holes when it was computed.
    std::map<TreeNode*, std::pair<std::int32_t, std::int64_t>> legal_;
    TreePosition end_;
    bool is_spare_ = false;
    std::int64_t moment_ = 0;
    std::int64_t num_broken_ = 0;
    std::int64_t num_filled_ = 0;
};
