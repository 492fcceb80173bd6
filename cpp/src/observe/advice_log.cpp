// SPDX-License-Identifier: Apache-2.0
#include "observe/advice_log.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "layers/column_pages.hpp"
#include "observe/page_hash.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {
namespace {

constexpr std::int64_t kLargestFactor = 4;
static_assert(AdviceTokens::kFactors.back() == kLargestFactor, "the index has room for it");

std::uint64_t sample_of(const CacheConfig& config) {
    if (!config.groups.empty() || !config.states.empty()) {
        throw std::invalid_argument(
            detail::concat("advice_sample is ", config.advice_sample,
                           ", must be 0 for layers with windows or states: the advice assumes that "
                           "all layers keep every token"));
    }
    auto sample = static_cast<std::uint64_t>(config.advice_sample);
    if ((sample & (sample - 1)) != 0) {
        throw std::invalid_argument(
            detail::concat("advice_sample is ", config.advice_sample, ", must be a power of two"));
    }
    const auto pages = static_cast<std::uint64_t>(kLargestFactor * config.num_pages);
    while (pages / sample > AdviceLog::kMostEntries) sample *= 2;
    return sample;
}

std::int64_t num_entries(const CacheConfig& config, std::uint64_t sample) noexcept {
    const auto pages = kLargestFactor * config.num_pages;
    return std::max<std::int64_t>(16, pages / static_cast<std::int64_t>(sample));
}

}  // namespace

AdviceSums& AdviceSums::operator+=(const AdviceSums& other) noexcept {
    admissions += other.admissions;
    prompt_tokens += other.prompt_tokens;
    cached_tokens += other.cached_tokens;
    partial_tokens += other.partial_tokens;
    use_tokens += other.use_tokens;
    sampled_uses += other.sampled_uses;
    sampled_tokens += other.sampled_tokens;
    for (std::size_t i = 0; i < found_tokens.size(); ++i) found_tokens[i] += other.found_tokens[i];
    return *this;
}

// ---- listening to a tree ------------------------------------------------------------------------

/// Listens to the tree of a replica, and passes each call on to the listener that the tree had
/// before.
///
/// Owns: the shadow index of the replica, and the hash of the prefix that ends with each cached
/// page, by page id.
class AdviceLog::Recorder final : public TreeListener {
   public:
    Recorder(const AdviceLog& log, Replica& home, std::int64_t most_pages)
        : index(most_pages),
          log_(log),
          tree_(home.tree),
          next_(home.tree.listener()),
          hashes_(static_cast<std::size_t>(home.pool.end_id())) {
        tree_.set_listener(this);
    }
    ~Recorder() override { tree_.set_listener(next_); }

    /// The hash of the prefix that ends with a cached page.
    [[nodiscard]] std::uint64_t hash(BlockId page) const noexcept {
        return hashes_[static_cast<std::size_t>(page)];
    }

    void stored(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        if (next_ != nullptr) next_->stored(node, first, n);
        const std::int32_t page_size = tree_.page_size();
        std::uint64_t hash = hash_before(node, first);
        const BlockId* const ids = node->ids(page_size) + (first - node->start);
        const TokenId* tokens = node->page_tokens(first - node->start, page_size);
        for (std::int32_t i = 0; i < n; ++i, tokens += page_size) {
            hash = page_hash::extended(hash, tokens, page_size);
            hashes_[static_cast<std::size_t>(ids[i])] = hash;
        }
        // LRU evicts the end of a run first, so its first page enters last.
        for (std::int32_t i = n; i-- > 0;) enter(this->hash(ids[i]));
    }
    void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        if (log_.is_forgetting_) {
            const BlockId* const ids = node->ids(tree_.page_size()) + (first - node->start);
            for (std::int32_t i = 0; i < n; ++i) forget(hash(ids[i]));
        }
        if (next_ != nullptr) next_->removed(node, first, n);
    }

    ShadowIndex index;

   private:
    [[nodiscard]] std::uint64_t hash_before(const TreeNode* node,
                                            std::int32_t first) const noexcept {
        if (first > node->start) return hash(node->ids(tree_.page_size())[first - node->start - 1]);
        const TreeNode* const parent = node->parent;
        if (parent->is_root()) return page_hash::of_namespace(PrefixTree::name_of(parent));
        return hash(parent->ids(tree_.page_size())[parent->num_pages - 1]);
    }
    void enter(std::uint64_t hash) noexcept {
        if (!log_.is_sampled(hash)) return;
        const ShadowIndex::Entry entry = index.find(hash);
        if (entry == ShadowIndex::kNone) {
            static_cast<void>(index.add(hash));  // if all entries are held, the page is left out
        } else if (!index.is_held(entry)) {
            index.touch(entry);
        }
    }
    void forget(std::uint64_t hash) noexcept {
        const ShadowIndex::Entry entry =
            log_.is_sampled(hash) ? index.find(hash) : ShadowIndex::kNone;
        if (entry != ShadowIndex::kNone) index.remove(entry);
    }

    const AdviceLog& log_;
    PrefixTree& tree_;
    TreeListener* const next_;
    std::vector<std::uint64_t> hashes_;
};

// ---- the log ------------------------------------------------------------------------------------

std::int64_t AdviceLog::steady_time() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

AdviceLog::AdviceLog(const CacheConfig& config,
                     const std::vector<std::unique_ptr<Replica>>& replicas, Clock clock)
    : config_(config), clock_(clock), sample_(sample_of(config)), slices_(kNumSlices) {
    const std::size_t bytes = replicas.size() * kNumSlices * kSliceRecords * sizeof(AdviceRecord);
    records_.reset(static_cast<AdviceRecord*>(std::malloc(bytes)));
    if (records_ == nullptr) throw std::bad_alloc();
    for (Slice& slice : slices_) {
        slice.num_records.resize(replicas.size());
        slice.sums.resize(config.quotas.size() + 1);
    }
    slices_[slice_].begin = clock_();
    for (const auto& home : replicas) {
        recorders_.push_back(
            std::make_unique<Recorder>(*this, *home, num_entries(config, sample_)));
    }
}

AdviceLog::~AdviceLog() = default;

AdviceRecord* AdviceLog::records_of(std::size_t replica, std::size_t slice) const noexcept {
    return records_.get() + (replica * kNumSlices + slice) * kSliceRecords;
}

AdviceLog::Slice& AdviceLog::present_slice() noexcept {
    const Slice& present = slices_[slice_];
    const std::int64_t now = clock_();
    const bool is_full = std::any_of(present.num_records.begin(), present.num_records.end(),
                                     [](std::size_t n) { return n == kSliceRecords; });
    if (!is_full && now - present.begin < kSliceTime) return slices_[slice_];
    slice_ = (slice_ + 1) % kNumSlices;
    Slice& next = slices_[slice_];
    next.begin = now;
    std::fill(next.num_records.begin(), next.num_records.end(), 0);
    std::fill(next.sums.begin(), next.sums.end(), AdviceSums());
    return next;
}

void AdviceLog::add_record(std::int16_t replica, const AdviceRecord& record) noexcept {
    const auto of = static_cast<std::size_t>(replica);
    std::size_t& n = present_slice().num_records[of];
    records_of(of, slice_)[n++] = record;
}

// The pages that are in no tree take room in a cache of any size.
std::int32_t AdviceLog::room(const Replica& home, const ShadowIndex& index) const noexcept {
    const std::int64_t in_tree = home.pool.num_free() + home.tree.num_cached();
    const std::int64_t sampled = in_tree / static_cast<std::int64_t>(sample_);
    return static_cast<std::int32_t>(sampled - index.num_held());
}

void AdviceLog::begin(SequenceHandle handle) {
    if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
    Row& row = rows_[handle.index];
    row.is_noted = row.is_counted = false;
}

void AdviceLog::hold(Row& row, ShadowIndex& index, const Use& use) noexcept {
    const auto at = std::lower_bound(
        row.pages.begin(), row.pages.end(), use.column,
        [](const Use& known, std::int32_t column) { return known.column < column; });
    if (at != row.pages.end() && at->column == use.column) {
        if (at->entry == use.entry) return;
        index.hold(use.entry);
        static_cast<void>(index.release(at->entry));
        at->entry = use.entry;
        return;
    }
    try {
        row.pages.insert(at, use);
    } catch (const std::bad_alloc&) {
        ++lost_uses_;
        return;
    }
    index.hold(use.entry);
}

void AdviceLog::note_hit(const Replica& home, const Sequence& sequence, const RequestView& request,
                         TokenCounts::Positions fresh) noexcept {
    Row& row = rows_[request.sequence.index];
    if (!row.is_noted) use_pages(home, sequence, request, row, fresh.begin);
    row.is_noted = true;
    row.sums.prompt_tokens = std::max<std::int64_t>(0, fresh.end - fresh.begin);
    const std::int64_t whole = sequence.hit_tokens / config_.page_size * config_.page_size;
    row.sums.cached_tokens = std::max<std::int64_t>(0, sequence.hit_tokens - fresh.begin);
    row.sums.partial_tokens =
        std::max<std::int64_t>(0, sequence.hit_tokens - std::max(whole, fresh.begin));
}

// Finds the distance of each sampled page. A page has at least the distance of the pages before it.
void AdviceLog::use_pages(const Replica& home, const Sequence& sequence, const RequestView& request,
                          Row& row, std::int64_t known_tokens) noexcept {
    const Recorder& recorder = recorder_of(sequence);
    ShadowIndex& index = recorder_of(sequence).index;
    const PageRow& pages = sequence.pages;
    const std::int64_t page = config_.page_size;
    const std::int64_t others = home.pool.num_blocks() - home.pool.num_free() -
                                home.tree.num_cached() - (pages.size() - pages.committed());
    const auto end = static_cast<std::int32_t>((request.end - 1) / page);
    std::uint64_t hash = page_hash::of_namespace(request.name_space);
    std::int64_t distance = 0;
    row.sums = {};
    row.sums.admissions = 1;
    row.sums.use_tokens = std::max<std::int64_t>(0, end * page - known_tokens);
    for (std::int32_t column = 0; column < end; ++column) {
        hash = column < pages.num_cached()
                   ? recorder.hash(pages[column])
                   : page_hash::extended(hash, request.tokens + column * page, config_.page_size);
        if (!is_sampled(hash)) continue;
        const std::int64_t tokens =
            std::clamp<std::int64_t>((column + 1) * page - known_tokens, 0, page);
        row.sums.sampled_uses += tokens > 0 ? 1 : 0;
        row.sums.sampled_tokens += tokens;
        const ShadowIndex::Entry entry = index.find(hash);
        if (entry == ShadowIndex::kNone) distance = kNotFound;
        if (distance == kNotFound) continue;
        const bool is_held = index.is_held(entry);
        const std::int64_t before = index.distance(entry) * static_cast<std::int64_t>(sample_);
        if (!is_held) distance = std::max(distance, before + others);
        distance = std::min<std::int64_t>(distance, kNotFound - 1);
        for (std::size_t i = 0; i < AdviceTokens::kFactors.size(); ++i) {
            const double size = AdviceTokens::kFactors[i] * static_cast<double>(config_.num_pages);
            if (static_cast<double>(distance) < size) row.sums.found_tokens[i] += tokens;
        }
        hold(row, index,
             {entry, column, static_cast<std::int32_t>(distance), static_cast<std::int32_t>(tokens),
              is_held});
    }
}

void AdviceLog::seal(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                     Owner owner) noexcept {
    Row& row = rows_[handle.index];
    if (!row.is_noted || row.is_counted) return;
    row.is_counted = true;
    const ShadowIndex& index = recorder_of(sequence).index;
    for (const Use& use : row.pages) {
        add_record(sequence.replica, {index.hash(use.entry), use.tokens, use.distance,
                                      room(home, index), owner, use.was_held});
    }
    present_slice().sums[owner] += row.sums;
}

void AdviceLog::note_commit(SequenceHandle handle, const Sequence& sequence, std::int32_t first,
                            std::int32_t end) noexcept {
    const Recorder& recorder = recorder_of(sequence);
    ShadowIndex& index = recorder_of(sequence).index;
    ColumnsUp columns({sequence.pages.node(), end}, config_.page_size);
    for (std::int32_t column = end; column-- > first;) {
        const std::uint64_t hash = recorder.hash(columns[column]);
        if (!is_sampled(hash)) continue;
        const ShadowIndex::Entry entry = index.find(hash);
        if (entry == ShadowIndex::kNone) continue;
        hold(rows_[handle.index], index, {entry, column, 0, 0, false});
    }
}

void AdviceLog::share(const Sequence& sequence, SequenceHandle parent, SequenceHandle child,
                      std::int32_t columns) noexcept {
    ShadowIndex& index = recorder_of(sequence).index;
    for (const Use& use : rows_[parent.index].pages) {
        if (use.column < columns) hold(rows_[child.index], index, use);
    }
}

void AdviceLog::release(const Replica& home, SequenceHandle handle,
                        const Sequence& sequence) noexcept {
    Row& row = rows_[handle.index];
    ShadowIndex& index = recorder_of(sequence).index;
    if (row.pages.empty()) return;
    for (std::size_t i = row.pages.size(); i-- > 0;) {
        const ShadowIndex::Entry entry = row.pages[i].entry;
        const std::int32_t room_before = room(home, index);
        if (!index.release(entry)) continue;
        add_record(sequence.replica,
                   {index.hash(entry), AdviceRecord::kLeft, 0, room_before, 0, false});
    }
    row.pages.clear();
    row.is_noted = false;
}

void AdviceLog::reset() noexcept {
    for (const auto& recorder : recorders_) recorder->index.clear();
}

AdviceCopy AdviceLog::copy() const {
    const std::int64_t now = clock_();
    AdviceCopy found;
    found.records.resize(recorders_.size());
    found.sums.resize(slices_.front().sums.size());
    found.pages = config_.num_pages;
    found.page_size = config_.page_size;
    found.sample = static_cast<std::int64_t>(sample_);
    found.lost_uses = lost_uses_;
    constexpr std::int64_t kWindow = kSliceTime * static_cast<std::int64_t>(kNumSlices);
    for (std::size_t i = 1; i <= kNumSlices; ++i) {
        const std::size_t at = (slice_ + i) % kNumSlices;
        const Slice& slice = slices_[at];
        if (now - slice.begin >= kWindow) continue;
        for (std::size_t owner = 0; owner < slice.sums.size(); ++owner) {
            found.sums[owner] += slice.sums[owner];
        }
        for (std::size_t r = 0; r < recorders_.size(); ++r) {
            const AdviceRecord* const records = records_of(r, at);
            found.records[r].insert(found.records[r].end(), records,
                                    records + slice.num_records[r]);
        }
        found.seconds = std::max(found.seconds, static_cast<double>(now - slice.begin) * 1e-9);
    }
    return found;
}

void AdviceLog::check_integrity() const {
    for (const auto& recorder : recorders_) recorder->index.check_integrity();
}

}  // namespace kvcore
