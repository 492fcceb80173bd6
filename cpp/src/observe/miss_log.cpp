// SPDX-License-Identifier: Apache-2.0
#include "observe/miss_log.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "kvcore/errors.hpp"
#include "support/coarse_clock.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

// ---- listening to a tree ------------------------------------------------------------------------

/// Listens to one tree, and passes each call on to the listener that the tree had before.
///
/// Owns: the tag of each cached page, by page id; by the id of each run, the hash of the prefix
/// that it ends, computed when it is needed, and the lost run that continued it, while only its
/// start is cached.
class MissLog::Recorder final : public TreeListener {
   public:
    Recorder(MissLog& log, LostRuns& lost, Level& level, Misses::Reason pressure)
        : tree_(level.tree),
          next_(tree_.listener()),
          log_(log),
          lost_(lost),
          pressure_(pressure),
          tags_(static_cast<std::size_t>(level.pool.end_id())) {
        tree_.set_listener(this);
    }
    ~Recorder() override { tree_.set_listener(next_); }

    void stored(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        if (next_ != nullptr) next_->stored(node, first, n);
        store_tags(node, first, n);
        if (num_ends_ == 0) return;
        const TreeNode* grown = first == node->start ? node->parent : node;
        guarded(0, [&] { index_end(grown, first); });
    }
    void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        if (next_ != nullptr) next_->removed(node, first, n);
        guarded(n, [&] { note(node, first, n); });
    }

    /// The hash of the first `depth` pages of the path to `node`. Throws std::bad_alloc.
    [[nodiscard]] std::uint64_t hash(const TreeNode* node, std::int32_t depth) {
        while (!node->is_root() && depth <= node->start) node = node->parent;
        const std::int32_t last = depth;
        path_.clear();
        for (; !node->is_root() && !has_hash(node, depth); node = node->parent) {
            path_.push_back(node);
            depth = node->start;
        }
        std::uint64_t found = node->is_root() ? LostRuns::hash_of_name(PrefixTree::name_of(node))
                                              : runs_[node->id].hash;
        for (; !path_.empty(); path_.pop_back()) {
            const TreeNode* next = path_.back();
            const std::int32_t end = path_.size() == 1 ? last : next->end();
            const BlockId* const ids = next->ids(tree_.page_size());
            for (std::int32_t i = 0; i < end - next->start; ++i) {
                found = LostRuns::extended(found, tag(ids[i]));
            }
            if (end == next->end()) {
                Run& run = of(next);
                run.depth = end;
                run.hash = found;
            }
        }
        return found;
    }
    /// The lost run that continued the prefix at `at`, if the prefix ends a run; or 0.
    [[nodiscard]] LostRuns::Number end_of(TreePosition at) const noexcept {
        const bool is_end = !at.node->is_root() && at.node->end() == at.depth;
        return is_end && at.node->id < runs_.size() ? runs_[at.node->id].end : 0;
    }

   private:
    struct Run {
        std::uint64_t hash = 0;
        std::int32_t depth = 0;  // of the run's end when `hash` was computed; 0: no hash
        LostRuns::Number end = 0;
    };

    [[nodiscard]] std::uint32_t& tag(BlockId page) noexcept {
        return tags_[static_cast<std::size_t>(page)];
    }
    void store_tags(const TreeNode* node, std::int32_t first, std::int32_t n) noexcept {
        const std::int32_t page_size = tree_.page_size();
        const BlockId* const ids = node->ids(page_size) + (first - node->start);
        const TokenId* const tokens = node->page_tokens(first - node->start, page_size);
        for_each_page_hash(0, tokens, page_size, n, [&](std::int32_t i, std::uint64_t hash) {
            tag(ids[i]) = LostRuns::tag_of(hash);
        });
    }
    [[nodiscard]] bool has_hash(const TreeNode* node, std::int32_t depth) const noexcept {
        return depth == node->end() && node->id < runs_.size() && runs_[node->id].depth == depth;
    }
    [[nodiscard]] Run& of(const TreeNode* node) {
        if (node->id >= runs_.size()) runs_.resize(2 * std::size_t{node->id} + 64);
        return runs_[node->id];
    }
    // If memory is short, the pages are lost.
    template <class Note>
    void guarded(std::int32_t n, const Note& note) noexcept {
        try {
            note();
        } catch (const std::bad_alloc&) {
            log_.counts_.lost_pages += n;
        }
    }
    void note(const TreeNode* node, std::int32_t first, std::int32_t n) {
        const bool is_whole = first == node->start;
        Run& run = of(node);
        const LostRuns::Number next_part = std::exchange(run.end, 0);
        num_ends_ -= next_part != 0 ? 1 : 0;
        run.depth = 0;
        const std::uint64_t before = is_whole ? hash(node->parent, first) : 0;
        const Misses::Reason cause = log_.forced_ == Misses::kNumReasons ? pressure_ : log_.forced_;
        const BlockId* const ids = node->ids(tree_.page_size()) + (first - node->start);
        const LostRuns::Number lost = lost_.add(n, {cause, coarse_time()}, next_part,
                                                [&](std::int32_t i) { return tag(ids[i]); });
        if (is_whole) return lost_.index(lost, before);
        runs_[node->id].end = lost;
        ++num_ends_;
    }
    // A run grows, after `depth` pages. Other pages may now continue it, so its lost end is found
    // by the hash of the prefix.
    void index_end(const TreeNode* node, std::int32_t depth) {
        if (node->id >= runs_.size() || runs_[node->id].end == 0) return;
        const LostRuns::Number lost = std::exchange(runs_[node->id].end, 0);
        --num_ends_;
        lost_.index(lost, hash(node, depth));
    }

    PrefixTree& tree_;
    TreeListener* const next_;
    MissLog& log_;
    LostRuns& lost_;
    const Misses::Reason pressure_;
    std::vector<std::uint32_t> tags_;  // by page id
    std::vector<Run> runs_;
    std::int64_t num_ends_ = 0;  // runs with an `end`
    std::vector<const TreeNode*> path_;
};

// ---- admissions ---------------------------------------------------------------------------------

MissLog::MissLog(const CacheConfig& config, const std::vector<std::unique_ptr<Replica>>& replicas)
    : config_(config) {
    const auto n = static_cast<std::int64_t>(replicas.size());
    for (const auto& home : replicas) {
        lost_.push_back(std::make_unique<LostRuns>(
            config.page_size, std::max<std::int64_t>(1, config.explain_pages / n)));
        recorders_.push_back(
            std::make_unique<Recorder>(*this, *lost_.back(), *home, Misses::kEvicted));
        recorders_.push_back(
            home->host == nullptr
                ? nullptr
                : std::make_unique<Recorder>(*this, *lost_.back(), *home->host, Misses::kHostFull));
    }
}

MissLog::~MissLog() = default;

void MissLog::note_stored(SequenceHandle handle, std::int32_t columns) noexcept {
    Row& row = rows_[handle.index];
    if (!row.is_counted) row.stored = std::max(row.stored, columns);
}

void MissLog::prefetch(const Sequence& sequence, const RequestView& request,
                       const FoundHit& hit) noexcept {
    const auto replica = static_cast<std::size_t>(sequence.replica);
    LostRuns& lost = *lost_[replica];
    const TreePosition at = hit.match.at;
    const std::int64_t first = std::int64_t{at.depth} * config_.page_size;
    LostPage& next = rows_[request.sequence.index].next;
    next.column = -1;
    if (lost.is_empty() || sequence.is_sealed() || first + config_.page_size > request.end) return;
    try {
        next.path = at.depth == 0 ? LostRuns::hash_of_name(request.name_space)
                                  : recorders_[2 * replica]->hash(at.node, at.depth);
    } catch (const std::bad_alloc&) {
        return;  // `note_hit` tries again
    }
    next.tag = lost.tag_of(request.tokens + first);
    next.column = at.depth;
    lost.prefetch(next.path, next.tag);
}

void MissLog::note_hit(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                       const RequestView& request, const FoundHit& hit,
                       bool declines_partial) noexcept {
    Row& row = rows_[handle.index];
    if (row.is_noted && hit.wanted == 0) return;  // no hit was searched
    row.is_noted = true;
    row.misses = {};
    row.misses.prompt_tokens = request.end;
    row.misses.cached_tokens = sequence.hit_tokens;
    try {
        explain({home, sequence, request, hit, declines_partial}, row);
    } catch (const std::bad_alloc&) {
        row.misses.tokens = {};
        row.misses.tokens[Misses::kNeverSeen] = row.misses.uncached_tokens();
    }
}

// Gives each token after the hit to a reason, in the order of the tokens.
void MissLog::explain(const Admission& given, Row& row) {
    const std::int32_t page = config_.page_size;
    const RequestView& request = given.request;
    const Replica& home = given.home;
    Misses& misses = row.misses;
    const std::int64_t cached = misses.cached_tokens;
    const auto add = [&](Misses::Reason reason, std::int64_t first, std::int64_t end) {
        misses.tokens[reason] += std::max<std::int64_t>(0, end - std::max(first, cached));
    };
    const auto add_pages = [&](Misses::Reason reason, std::int32_t first, std::int32_t end) {
        add(reason, std::int64_t{first} * page, std::int64_t{end} * page);
    };
    const auto whole = static_cast<std::int32_t>(request.end / page);
    add(Misses::kPartialPage, std::int64_t{whole} * page, request.end);
    auto depth = static_cast<std::int32_t>(cached / page);
    if (depth >= whole) return;
    const std::int32_t first = depth;
    // Without windows and states, cached pages after the hit are pages that it could not take.
    const bool may_continue = home.narrows_hits() || depth >= given.hit.wanted;
    if (may_continue) {
        const std::int64_t n = std::int64_t{whole} * page;
        const auto last = static_cast<std::int32_t>((request.end - 1) / page);
        const std::int64_t taken = std::int64_t{given.sequence.pages.committed()} * page;
        std::int32_t end =
            home.tree.match(given.sequence.pages.node(), request.tokens + taken, n - taken)
                .at.depth;
        end = std::max(
            {end, given.hit.seen, home.find_stored(request.name_space, request.tokens, n).depth});
        for (; depth < end; ++depth) {
            const bool is_last = depth >= last;
            const bool is_wanted = depth < given.hit.wanted && home.narrows_hits();
            add_pages(is_last     ? Misses::kPartialPage
                      : is_wanted ? Misses::kUnreachable
                                  : Misses::kDeclined,
                      depth, depth + 1);
        }
    }
    const std::int32_t stored = std::min(row.stored, whole);
    if (stored > depth) {
        add_pages(Misses::kLate, depth, stored);
        depth = stored;
    }
    if (depth < whole) depth = find_lost(given, depth, row, add_pages);
    if (depth >= whole) return;
    // A partly equal page of which the hit takes no token.
    std::int64_t begin = std::int64_t{depth} * page;
    const bool may_copy = !home.narrows_hits() && depth == first && cached == begin;
    if (may_copy && (config_.partial_page_reuse != 1 || given.declines_partial)) {
        TreeNode* root = home.tree.find_namespace(request.name_space);
        const PrefixMatch match =
            root == nullptr ? PrefixMatch{}
                            : home.tree.match(root, request.tokens, request.end - 1, true);
        const std::int64_t n = match.at.depth == depth ? match.partial_tokens : 0;
        add(given.declines_partial ? Misses::kDeclined : Misses::kPartialPage, begin, begin + n);
        begin += n;
    }
    std::int64_t elsewhere = 0;
    if (home.tree.has_namespaces()) {
        elsewhere = std::int64_t{page} *
                    home.tree.match_elsewhere(request.name_space, request.tokens,
                                              std::int64_t{whole} * page, kMostNamespaces);
    }
    add(Misses::kOtherNamespace, begin, std::max(begin, elsewhere));
    add(Misses::kNeverSeen, std::max(begin, elsewhere), std::int64_t{whole} * page);
}

// Finds the pages after `depth` that were evicted. Returns the depth after them.
template <class Add>
std::int32_t MissLog::find_lost(const Admission& given, std::int32_t depth, Row& row,
                                const Add& add) {
    const auto replica = static_cast<std::size_t>(given.sequence.replica);
    LostRuns& lost = *lost_[replica];
    if (lost.is_empty()) return depth;
    Recorder& recorder = *recorders_[2 * replica];
    Recorder* const host = recorders_[2 * replica + 1].get();
    const std::int32_t page = config_.page_size;
    const auto whole = static_cast<std::int32_t>(given.request.end / page);
    const TokenId* tokens = given.request.tokens;
    const TreeNode* node = given.sequence.pages.node();
    LostPage next = row.next;
    if (next.column != depth) {
        const std::int32_t known = std::min(given.sequence.pages.committed(), depth);
        next.path = lost.extended(recorder.hash(node, known), tokens + std::int64_t{known} * page,
                                  depth - known);
        next.tag = lost.tag_of(tokens + std::int64_t{depth} * page);
    }
    LostRuns::Number end = recorder.end_of({const_cast<TreeNode*>(node), depth});
    while (depth < whole) {
        LostRuns::Number host_end = 0;
        if (host != nullptr && depth > 0) {
            const TreePosition at = given.home.find_stored(given.request.name_space, tokens,
                                                           std::int64_t{depth} * page);
            if (at.depth == depth) host_end = host->end_of(at);
        }
        const TokenId* const first = tokens + std::int64_t{depth} * page;
        const LostRuns::Found found =
            lost.take(next.path, next.tag, first, whole - depth, end, host_end);
        if (found.num_pages == 0) break;
        add(found.loss.cause, depth, depth + found.num_pages);
        row.misses.note_eviction(static_cast<double>(coarse_time() - found.loss.time) * 1e-9);
        depth += found.num_pages;
        if (depth < whole) next.tag = lost.tag_of(tokens + std::int64_t{depth} * page);
        end = 0;
    }
    return depth;
}

void MissLog::seal(SequenceHandle handle) noexcept {
    Row& row = rows_[handle.index];
    if (!row.is_noted || row.is_counted) return;
    row.is_counted = true;
    row.epoch = epoch_;
    counts_.sum.add(row.misses);
    ++counts_.admissions;
}

void MissLog::uncount(SequenceHandle handle) noexcept {
    Row& row = rows_[handle.index];
    if (row.is_counted && row.epoch == epoch_) {
        counts_.sum.add(row.misses, -1);
        --counts_.admissions;
    }
    row.is_noted = row.is_counted = false;
}

void MissLog::reset_counts() noexcept {
    counts_.sum = {};
    counts_.admissions = counts_.lost_pages = 0;
    ++epoch_;
}

MissCounts MissLog::counts() const noexcept {
    MissCounts found = counts_;
    for (const auto& each : lost_) found.remembered_pages += each->num_pages();
    return found;
}

void MissLog::check_integrity() const {
    const auto check = [](const Misses& misses) {
        std::int64_t sum = misses.cached_tokens;
        for (const std::int64_t n : misses.tokens) {
            detail::require_law(n >= 0, "misses: a number of tokens is at least 0");
            sum += n;
        }
        detail::require_law(sum == misses.prompt_tokens,
                            "misses: cached and missed tokens are the tokens of the prompt");
    };
    check(counts_.sum);
    for (const auto& each : lost_) each->check_integrity();
    for (const Row& row : rows_) {
        if (row.is_noted) check(row.misses);
    }
}

}  // namespace kvcore
