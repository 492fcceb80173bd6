// SPDX-License-Identifier: Apache-2.0
#include "observe/miss_log.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "kvcore/errors.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {
namespace {

constexpr std::uint64_t kMulA = 0x9e3779b97f4a7c15U;
constexpr std::uint64_t kMulB = 0xc2b2ae3d27d4eb4fU;

constexpr std::uint64_t mixed(std::uint64_t state, std::uint64_t word, std::uint64_t mul) noexcept {
    state = (state ^ word) * mul;
    return state ^ (state >> 32);
}

std::uint64_t two_tokens(const TokenId* tokens) noexcept {
    std::uint64_t word = 0;
    std::memcpy(&word, tokens, sizeof word);
    return word;
}

// Returns the hash of a prefix from the hash of the prefix before, and `n` more tokens.
std::uint64_t extended(std::uint64_t before, const TokenId* tokens, std::int64_t n) noexcept {
    std::uint64_t a = before;
    std::uint64_t b = before * kMulB + 1;
    std::int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        a = mixed(a, two_tokens(tokens + i), kMulA);
        b = mixed(b, two_tokens(tokens + i + 2), kMulB);
    }
    for (; i < n; ++i) a = mixed(a, static_cast<std::uint32_t>(tokens[i]), kMulA);
    return mixed(a, (b << 32) | (b >> 32), kMulB);
}

// The hash after `n` pages: page by page, so that it does not depend on where runs end.
std::uint64_t behind_pages(std::uint64_t before, const TokenId* tokens, std::int32_t n,
                           std::int32_t page_size) noexcept {
    for (std::int32_t i = 0; i < n; ++i, tokens += page_size) {
        before = extended(before, tokens, page_size);
    }
    return before;
}

std::uint64_t hash_of_name(std::string_view name) noexcept {
    std::uint64_t hash = kMulB;
    for (const char each : name) hash = mixed(hash, static_cast<unsigned char>(each), kMulA);
    return hash;
}

double seconds_between(LostRuns::Time first, LostRuns::Time last) noexcept {
    return std::max(0.0, std::chrono::duration<double>(last - first).count());
}

}  // namespace

// ---- runs that left the trees -------------------------------------------------------------------

std::uint64_t LostRuns::key_of(std::uint64_t before, const TokenId* tokens) const noexcept {
    return extended(before, tokens, std::min(page_size_, 16));
}

LostRuns::Tokens LostRuns::copy(const TokenId* tokens, std::int32_t n) const {
    const std::size_t bytes =
        static_cast<std::size_t>(n) * static_cast<std::size_t>(page_size_) * sizeof(TokenId);
    Tokens made(static_cast<TokenId*>(std::malloc(bytes)));
    if (made == nullptr) throw std::bad_alloc();
    if (tokens != nullptr) std::memcpy(made.get(), tokens, bytes);
    return made;
}

// The newest entry of a bucket comes first.
void LostRuns::link(std::uint32_t at) noexcept {
    std::uint32_t& head = buckets_[entries_[at].key & (buckets_.size() - 1)];
    entries_[at].older = head;
    entries_[at].newer = kNone;
    if (head != kNone) entries_[head].newer = at;
    head = at;
}

void LostRuns::grow() {
    const std::size_t size = std::max<std::size_t>(64, 2 * entries_.size());
    std::vector<Entry> entries(size);
    std::vector<std::uint32_t> buckets(size, kNone);
    for (std::uint32_t i = 0; i < size_; ++i) {
        entries[i] = std::move(entries_[(oldest_ + i) & (entries_.size() - 1)]);
    }
    entries_.swap(entries);
    buckets_.swap(buckets);
    oldest_ = 0;
    for (std::uint32_t i = 0; i < size_; ++i) link(i);
}

void LostRuns::drop_oldest() noexcept {
    Entry& entry = entries_[oldest_];
    if (entry.older != kNone) entries_[entry.older].newer = entry.newer;
    if (entry.newer != kNone) {
        entries_[entry.newer].older = entry.older;
    } else {
        buckets_[entry.key & (buckets_.size() - 1)] = entry.older;
    }
    num_pages_ -= entry.run.num_pages;
    entry.tokens.reset();
    oldest_ = (oldest_ + 1) & static_cast<std::uint32_t>(entries_.size() - 1);
    --size_;
}

void LostRuns::add(const Run& run, Tokens tokens) {
    const auto n = static_cast<std::int32_t>(std::min<std::int64_t>(run.num_pages, most_pages_));
    while (size_ > 0 && num_pages_ + n > most_pages_) drop_oldest();
    if (size_ == entries_.size()) grow();
    const std::uint32_t at = (oldest_ + size_) & static_cast<std::uint32_t>(entries_.size() - 1);
    Entry& entry = entries_[at];
    entry.run = run;
    entry.run.num_pages = n;
    entry.key = key_of(run.before, tokens.get());
    entry.tokens = std::move(tokens);
    ++size_;
    num_pages_ += n;
    link(at);
}

std::int32_t LostRuns::count_equal(const Entry& entry, const TokenId* tokens,
                                   std::int32_t n) const noexcept {
    const std::int64_t most = std::int64_t{std::min(entry.run.num_pages, n)} * page_size_;
    const TokenId* const first = entry.tokens.get();
    const auto equal = std::mismatch(first, first + most, tokens).first - first;
    return static_cast<std::int32_t>(equal / page_size_);
}

// Calls visit(index of the entry, equal pages) until it returns true.
template <class Visit>
void LostRuns::for_each_like(std::uint64_t before, std::int32_t first, const TokenId* tokens,
                             std::int32_t n, const Visit& visit) const {
    if (size_ == 0) return;
    const std::uint64_t key = key_of(before, tokens);
    int compared = 0;
    for (std::uint32_t at = buckets_[key & (buckets_.size() - 1)];
         at != kNone && compared < kMostCompared; at = entries_[at].older) {
        const Entry& entry = entries_[at];
        if (entry.key != key || entry.run.before != before || entry.run.first != first) continue;
        ++compared;
        const std::int32_t equal = count_equal(entry, tokens, n);
        if (equal > 0 && visit(at, equal)) return;
    }
}

LostRuns::Found LostRuns::find(std::uint64_t before, std::int32_t first, const TokenId* tokens,
                               std::int32_t n) const noexcept {
    Found found;
    for_each_like(before, first, tokens, n, [&](std::uint32_t at, std::int32_t equal) {
        const Run& run = entries_[at].run;
        if (found.num_pages == 0 || run.time > found.time) found = {equal, run.cause, run.time};
        return false;
    });
    return found;
}

void LostRuns::split(std::uint64_t before, std::int32_t first, const TokenId* tokens,
                     std::int32_t n, std::int32_t pages) {
    for (int i = 0; i < kMostCompared; ++i) {
        if (size_ == entries_.size()) grow();
        std::uint32_t longer = kNone;
        std::int32_t cut = 0;
        for_each_like(before, first, tokens, n, [&](std::uint32_t at, std::int32_t equal) {
            cut = std::min(equal, pages);
            if (cut < entries_[at].run.num_pages) longer = at;
            return longer != kNone;
        });
        if (longer == kNone) return;
        Entry& entry = entries_[longer];
        Run rest = entry.run;
        rest.before = behind_pages(before, tokens, cut, page_size_);
        rest.first += cut;
        rest.num_pages -= cut;
        Tokens copied = copy(entry.tokens.get() + std::int64_t{cut} * page_size_, rest.num_pages);
        entry.tokens = copy(entry.tokens.get(), cut);
        entry.run.num_pages = cut;
        num_pages_ -= rest.num_pages;
        add(rest, std::move(copied));
    }
}

// ---- listening to a tree ------------------------------------------------------------------------

/// Listens to one tree, and passes each call on to the listener that the tree had before.
///
/// Owns: the evicted ends of runs whose start is still cached, and hashes of prefixes by the run
/// that ends them, computed when a run after them leaves.
class MissLog::Recorder final : public TreeListener {
   public:
    Recorder(MissLog& log, LostRuns& lost, Level& level, Misses::Reason pressure)
        : tree_(level.tree), next_(tree_.listener()), log_(log), lost_(lost), pressure_(pressure) {
        tree_.set_listener(this);
    }
    ~Recorder() override { tree_.set_listener(next_); }

    void stored(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        if (next_ != nullptr) next_->stored(node, first, n);
        if (ends_.empty()) return;
        const TreeNode* grown = first == node->start ? node->parent : node;
        guarded(grown, 0, [&] { add_end(grown); });
    }
    void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        if (next_ != nullptr) next_->removed(node, first, n);
        const bool is_whole = first == node->start;
        guarded(node, n, [&] { is_whole ? note_run(node, n) : note_end(node, first, n); });
        if (node->id < hashes_.size()) hashes_[node->id].depth = -1;
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
        std::uint64_t found =
            node->is_root() ? hash_of_name(PrefixTree::name_of(node)) : hashes_[node->id].hash;
        for (; !path_.empty(); path_.pop_back()) {
            const TreeNode* next = path_.back();
            const bool is_last = path_.size() == 1;
            const std::int32_t end = is_last ? last : next->end();
            found = behind_pages(found, next->tokens, end - next->start, tree_.page_size());
            if (end == next->end()) set_hash(next, found);
        }
        return found;
    }
    /// If the evicted end of a cached run begins with the page `tokens`, it is a lost run from now
    /// on. Throws std::bad_alloc.
    void settle_end(const TreeNode* node, const TokenId* tokens) {
        const auto end = ends_.find(node->id);
        if (end == ends_.end() || end->second.first != node->end()) return;
        const TokenId* last = end->second.tokens.data() + end->second.tokens.size();
        if (std::equal(last - tree_.page_size(), last, tokens)) add_end(node);
    }

   private:
    struct End {
        std::vector<TokenId> tokens;  // the last page first, because runs are evicted from the end
        std::int32_t first = 0;
        std::int32_t num_pages = 0;
        Misses::Reason cause = Misses::kEvicted;
        LostRuns::Time time;
    };
    struct Hash {
        std::int32_t depth = -1;  // of the run's end when it was computed
        std::uint64_t hash = 0;
    };

    [[nodiscard]] bool has_hash(const TreeNode* node, std::int32_t depth) const noexcept {
        return depth == node->end() && node->id < hashes_.size() &&
               hashes_[node->id].depth == depth;
    }
    void set_hash(const TreeNode* node, std::uint64_t hash) {
        if (node->id >= hashes_.size()) hashes_.resize(2 * std::size_t{node->id} + 64);
        hashes_[node->id] = {node->end(), hash};
    }
    // If memory is short, the pages are lost, and with them the evicted end of their run.
    template <class Note>
    void guarded(const TreeNode* node, std::int32_t n, const Note& note) noexcept {
        try {
            note();
        } catch (const std::bad_alloc&) {
            const auto end = ends_.find(node->id);
            if (end != ends_.end()) {
                n += end->second.num_pages;
                ends_.erase(end);
            }
            log_.counts_.lost_pages += n;
        }
    }
    [[nodiscard]] Misses::Reason cause() const noexcept {
        return log_.forced_ == Misses::kNumReasons ? pressure_ : log_.forced_;
    }

    // The end of a run left.
    void note_end(const TreeNode* node, std::int32_t first, std::int32_t n) {
        const auto known = ends_.find(node->id);
        if (known != ends_.end() && known->second.cause != cause()) add_end(node);
        End& end = ends_[node->id];
        const auto page = static_cast<std::ptrdiff_t>(tree_.page_size());
        const TokenId* tokens = node->page_tokens(first - node->start, tree_.page_size());
        make_room(end.tokens, static_cast<std::size_t>(n * page));
        for (std::int32_t i = n; i-- > 0;) {
            end.tokens.insert(end.tokens.end(), tokens + i * page, tokens + (i + 1) * page);
        }
        end.first = first;
        end.num_pages += n;
        end.cause = cause();
        end.time = std::chrono::steady_clock::now();
    }
    // A run left as a whole. Eviction has no more use for its tokens, but a forgotten run may have
    // holders.
    void note_run(TreeNode* node, std::int32_t n) {
        const auto end = ends_.empty() ? ends_.end() : ends_.find(node->id);
        const bool is_gone = node->num_pages == 0;
        if (end != ends_.end() && end->second.cause != cause()) {
            add_end(node);
        } else if (end != ends_.end()) {
            return note_run_with_end(node, n, end->second);
        }
        LostRuns::Tokens tokens = is_gone ? nullptr : lost_.copy(node->tokens, n);
        const std::uint64_t before = hash(node->parent, node->start);
        if (is_gone) tokens.reset(std::exchange(node->tokens, nullptr));
        lost_.add({before, node->start, n, cause(), std::chrono::steady_clock::now()},
                  std::move(tokens));
    }
    void note_run_with_end(const TreeNode* node, std::int32_t n, const End& end) {
        const auto page = static_cast<std::ptrdiff_t>(tree_.page_size());
        LostRuns::Tokens tokens = lost_.copy(nullptr, n + end.num_pages);
        copy_end(end, std::copy_n(node->tokens, n * page, tokens.get()));
        const LostRuns::Run run{hash(node->parent, node->start), node->start, n + end.num_pages,
                                cause(), std::chrono::steady_clock::now()};
        lost_.add(run, std::move(tokens));
        ends_.erase(node->id);
    }
    // A run grows, or its start leaves for another reason than its end: the end is a run from now
    // on.
    void add_end(const TreeNode* node) {
        const auto found = ends_.find(node->id);
        if (found == ends_.end()) return;
        const End& end = found->second;
        LostRuns::Tokens tokens = lost_.copy(nullptr, end.num_pages);
        copy_end(end, tokens.get());
        const std::uint64_t before = behind_pages(hash(node->parent, node->start), node->tokens,
                                                  end.first - node->start, tree_.page_size());
        lost_.add({before, end.first, end.num_pages, end.cause, end.time}, std::move(tokens));
        ends_.erase(found);
    }
    void copy_end(const End& end, TokenId* to) const noexcept {
        const auto page = static_cast<std::ptrdiff_t>(tree_.page_size());
        for (std::int32_t i = end.num_pages; i-- > 0;) {
            to = std::copy_n(end.tokens.data() + i * page, page, to);
        }
    }

    PrefixTree& tree_;
    TreeListener* const next_;
    MissLog& log_;
    LostRuns& lost_;
    const Misses::Reason pressure_;
    std::unordered_map<NodeId, End> ends_;
    std::vector<Hash> hashes_;  // of each run by its id
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

void MissLog::begin(SequenceHandle handle) {
    if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
    rows_[handle.index] = {};
}

void MissLog::note_stored(SequenceHandle handle, std::int32_t columns) noexcept {
    Row& row = rows_[handle.index];
    if (!row.is_counted) row.stored = std::max(row.stored, columns);
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
    depth = find_lost(given, depth, misses, add_pages);
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
    const std::int64_t elsewhere =
        std::int64_t{home.tree.match_elsewhere(request.name_space, request.tokens,
                                               std::int64_t{whole} * page, kMostNamespaces)} *
        page;
    add(Misses::kOtherNamespace, begin, std::max(begin, elsewhere));
    add(Misses::kNeverSeen, std::max(begin, elsewhere), std::int64_t{whole} * page);
}

// Finds the pages after `depth` that were evicted. Returns the depth after them.
template <class Add>
std::int32_t MissLog::find_lost(const Admission& given, std::int32_t depth, Misses& misses,
                                const Add& add) {
    const auto replica = static_cast<std::size_t>(given.sequence.replica);
    Recorder& recorder = *recorders_[2 * replica];
    Recorder* const host = recorders_[2 * replica + 1].get();
    LostRuns& lost = *lost_[replica];
    const std::int32_t page = config_.page_size;
    const auto whole = static_cast<std::int32_t>(given.request.end / page);
    const TokenId* tokens = given.request.tokens;
    const TreeNode* node = given.sequence.pages.node();
    const std::int32_t known = std::min(given.sequence.pages.committed(), depth);
    std::uint64_t before = behind_pages(recorder.hash(node, known),
                                        tokens + std::int64_t{known} * page, depth - known, page);
    const auto take = [&](const LostRuns::Found& found) {
        add(found.cause, depth, depth + found.num_pages);
        misses.note_eviction(seconds_between(found.time, std::chrono::steady_clock::now()));
        const TokenId* const first = tokens + std::int64_t{depth} * page;
        before = behind_pages(before, first, found.num_pages, page);
        depth += found.num_pages;
    };
    const auto rest = [&] { return tokens + std::int64_t{depth} * page; };
    if (depth < whole && !node->is_root() && PrefixTree::depth_of(node) == depth) {
        recorder.settle_end(node, rest());
    }
    while (depth < whole) {
        if (host != nullptr && depth > 0) {
            const TreePosition at = given.home.find_stored(given.request.name_space, tokens,
                                                           std::int64_t{depth} * page);
            if (at.depth == depth) host->settle_end(at.node, rest());
        }
        const LostRuns::Found found = lost.find(before, depth, rest(), whole - depth);
        if (found.num_pages == 0) break;
        lost.split(before, depth, rest(), whole - depth, found.num_pages);
        take(found);
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
    const std::int32_t stored = row.stored;
    row = {};
    row.stored = stored;
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
    for (const Row& row : rows_) check(row.misses);
}

}  // namespace kvcore
