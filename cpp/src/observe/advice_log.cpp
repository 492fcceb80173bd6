// SPDX-License-Identifier: Apache-2.0
#include "observe/advice_log.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "observe/page_hash.hpp"
#include "tree/token_hash.hpp"
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

// The pages that are in no tree.
std::int64_t uncommitted(const Replica& home) noexcept {
    return home.pool.num_blocks() - home.pool.num_free() - home.tree.num_cached();
}

std::int64_t own_uncommitted(const Sequence& sequence) noexcept {
    return sequence.pages.size() - sequence.pages.committed();
}

std::int64_t others_uncommitted(const Replica& home, const Sequence& sequence) noexcept {
    return uncommitted(home) - own_uncommitted(sequence);
}

}  // namespace

AdviceSums& AdviceSums::operator+=(const AdviceSums& other) noexcept {
    admissions += other.admissions;
    prompt_tokens += other.prompt_tokens;
    cached_tokens += other.cached_tokens;
    device_tokens += other.device_tokens;
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
    Recorder(AdviceLog& log, Replica& home, std::size_t replica, std::int64_t most_pages)
        : index(most_pages),
          log_(log),
          replica_(replica),
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
        const TokenId* const tokens = node->page_tokens(first - node->start, page_size);
        entered.clear();
        std::uint64_t* const stored_hashes = hashes_.data();
        const auto note = [&, ids, stored_hashes](std::int32_t i, std::uint64_t page) {
            hash = page_hash::extended(hash, page);
            stored_hashes[ids[i]] = hash;
            if (log_.is_sampled(hash)) log_.add_sampled(entered, hash, first + i);
        };
        for_each_page_hash(page_hash::kSeed, tokens, page_size, n, note);
        // The index keeps the pages that it has, while other pages of the run enter.
        for (const Page& page : entered) index.note_distance(page.hash);
        // LRU evicts the end of a run first, so its first page enters last.
        for (auto page = entered.rbegin(); page != entered.rend(); ++page) {
            page->entry = index.enter(page->hash);
        }
    }
    void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        if (log_.is_forgetting_) {
            const BlockId* const ids = node->ids(tree_.page_size()) + (first - node->start);
            for (std::int32_t i = 0; i < n; ++i) forget(hash(ids[i]));
        }
        if (next_ != nullptr) next_->removed(node, first, n);
    }

    ShadowIndex index;
    std::vector<Page> entered;  // the sampled pages of the last run that entered the tree

   private:
    [[nodiscard]] std::uint64_t hash_before(const TreeNode* node,
                                            std::int32_t first) const noexcept {
        if (first > node->start) return hash(node->ids(tree_.page_size())[first - node->start - 1]);
        const TreeNode* const parent = node->parent;
        if (parent->is_root()) return page_hash::of_namespace(PrefixTree::name_of(parent));
        return hash(parent->ids(tree_.page_size())[parent->num_pages - 1]);
    }
    void forget(std::uint64_t hash) noexcept {
        if (!log_.is_sampled(hash)) return;
        log_.add_record(replica_, {hash, 0, 0, false, 0, AdviceRecord::kForgotten});
        const ShadowIndex::Entry entry = index.find(hash);
        if (entry != ShadowIndex::kNone) index.remove(entry);
    }

    AdviceLog& log_;
    const std::size_t replica_;
    PrefixTree& tree_;
    TreeListener* const next_;
    std::vector<std::uint64_t> hashes_;
};

// ---- the log ------------------------------------------------------------------------------------

AdviceLog::AdviceLog(const CacheConfig& config,
                     const std::vector<std::unique_ptr<Replica>>& replicas, bool is_lru,
                     Clock clock)
    : config_(config),
      is_lru_(is_lru),
      clock_(clock),
      sample_(sample_of(config)),
      slices_(kNumSlices) {
    const std::size_t bytes = replicas.size() * kNumSlices * kSliceRecords * sizeof(AdviceRecord);
    records_.reset(static_cast<AdviceRecord*>(std::malloc(bytes)));
    if (records_ == nullptr) throw std::bad_alloc();
    for (Slice& slice : slices_) {
        slice.num_records.resize(replicas.size());
        slice.sums.resize(config.quotas.size() + 1);
    }
    slices_[slice_].begin = clock_();
    for (std::size_t i = 0; i < replicas.size(); ++i) {
        recorders_.push_back(
            std::make_unique<Recorder>(*this, *replicas[i], i, num_entries(config, sample_)));
    }
}

AdviceLog::~AdviceLog() = default;

AdviceRecord* AdviceLog::records_of(std::size_t replica, std::size_t slice) const noexcept {
    return records_.get() + (replica * kNumSlices + slice) * kSliceRecords;
}

void AdviceLog::begin_slice(std::int64_t now) noexcept {
    slice_ = (slice_ + 1) % kNumSlices;
    Slice& next = slices_[slice_];
    next.begin = now;
    std::fill(next.num_records.begin(), next.num_records.end(), 0);
    std::fill(next.sums.begin(), next.sums.end(), AdviceSums());
}

void AdviceLog::add_record(std::size_t replica, const AdviceRecord& record) noexcept {
    if (slices_[slice_].num_records[replica] == kSliceRecords) begin_slice(clock_());
    std::size_t& n = slices_[slice_].num_records[replica];
    records_of(replica, slice_)[n++] = record;
}

// The pages that are in no tree take room in a cache of any size, except the `own` pages of the
// request.
std::int32_t AdviceLog::room(const Replica& home, const ShadowIndex& index,
                             std::int64_t own) const noexcept {
    const std::int64_t pages = home.pool.num_free() + home.tree.num_cached() + own;
    const std::int64_t sampled = pages / static_cast<std::int64_t>(sample_);
    return static_cast<std::int32_t>(sampled - index.num_held());
}

void AdviceLog::begin(SequenceHandle handle) {
    if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
    Row& row = rows_[handle.index];
    row.use_end = row.next = 0;
    row.is_noted = row.is_counted = false;
}

// The page takes the place of another page in its column.
void AdviceLog::hold(Row& row, ShadowIndex& index, const Page& page) noexcept {
    const auto at = std::lower_bound(
        row.pages.begin(), row.pages.end(), page.column,
        [](const Page& known, std::int32_t column) { return known.column < column; });
    const bool is_known = at != row.pages.end() && at->column == page.column;
    if (is_known && at->entry == page.entry) return;
    index.hold(page.entry);
    if (is_known) {
        static_cast<void>(index.release(at->entry));
        *at = page;
        return;
    }
    try {
        row.pages.insert(at, page);
    } catch (const std::bad_alloc&) {
        static_cast<void>(index.release(page.entry));
        ++lost_uses_;
    }
}

void AdviceLog::begin_uses(Row& row, const RequestView& request,
                           std::int64_t known_tokens) const noexcept {
    const std::int64_t page = config_.page_size;
    row.is_noted = true;
    row.known_tokens = known_tokens;
    row.distance = 0;
    row.next = 0;
    // A claim that begins again was counted.
    row.use_end = row.is_counted ? 0 : static_cast<std::int32_t>((request.end - 1) / page);
    row.sums = {};
    row.sums.admissions = 1;
}

void AdviceLog::note_hit(const Replica& home, const Sequence& sequence, const RequestView& request,
                         TokenCounts::Positions fresh) noexcept {
    Row& row = rows_[request.sequence.index];
    if (!row.is_noted) begin_uses(row, request, fresh.begin);
    const ShadowIndex& index = recorder_of(sequence).index;
    const std::int32_t committed = sequence.pages.committed();
    find_sampled(sequence, row.next, committed);
    use_pages(sequence, row, row.sums, sampled_, [&](const Page& page) {
        if (page.was_held) return std::int64_t{0};
        return distance(index.distance(page.entry), others_uncommitted(home, sequence));
    });
    end_uses(row, row.sums, committed);
    const std::int64_t hit = sequence.hit_tokens;
    const std::int64_t page = config_.page_size;
    const std::int64_t on_device = std::min<std::int64_t>(hit / page, sequence.pages.committed());
    const auto after = [&](std::int64_t first, std::int64_t end) {
        return std::max<std::int64_t>(0, end - std::max(first, fresh.begin));
    };
    row.sums.prompt_tokens = after(0, fresh.end);
    row.sums.cached_tokens = after(0, hit);
    row.sums.device_tokens = after(0, on_device * page);
    row.sums.partial_tokens = after(hit / page * page, hit);
}

void AdviceLog::add_sampled(std::vector<Page>& pages, std::uint64_t hash,
                            std::int32_t column) noexcept {
    try {
        pages.push_back({hash, ShadowIndex::kNone, column, 0, false, false});
    } catch (const std::bad_alloc&) {
        ++lost_uses_;
    }
}

// Finds the sampled pages of columns that are in the tree.
void AdviceLog::find_sampled(const Sequence& sequence, std::int32_t first,
                             std::int32_t end) noexcept {
    sampled_.clear();
    if (first >= end) return;
    const Recorder& recorder = recorder_of(sequence);
    const TreeNode* node = PrefixTree::position(sequence.pages.node(), end).node;
    for (std::int32_t column = end; column > first; node = node->parent) {
        const BlockId* const ids = node->ids(config_.page_size) - node->start;
        const std::int32_t begin = std::max(first, node->start);
        for (; column > begin; --column) {
            const std::uint64_t hash = recorder.hash(ids[column - 1]);
            if (is_sampled(hash)) add_sampled(sampled_, hash, column - 1);
        }
    }
    std::reverse(sampled_.begin(), sampled_.end());
    for (Page& page : sampled_) page.entry = recorder.index.find(page.hash);
}

// The request holds these pages from now on.
template <class DistanceOf>
void AdviceLog::use_pages(const Sequence& sequence, Row& row, AdviceSums& sums,
                          std::vector<Page>& pages, const DistanceOf& distance_of) noexcept {
    ShadowIndex& index = recorder_of(sequence).index;
    for (Page& page : pages) {
        const bool is_known = page.entry != ShadowIndex::kNone;
        if (page.column >= row.next && page.column < row.use_end) {
            page.was_held = is_known && index.is_held(page.entry);
            count_use(row, sums, page, is_known ? distance_of(page) : kNotFound);
        }
        if (is_known) hold(row, index, page);
    }
}

// The columns before `end` were used, whether their pages are sampled or not.
void AdviceLog::end_uses(Row& row, AdviceSums& sums, std::int32_t end) const noexcept {
    const std::int64_t page = config_.page_size;
    const std::int64_t first = std::max(row.known_tokens, row.next * page);
    sums.use_tokens += std::max<std::int64_t>(0, std::min(end, row.use_end) * page - first);
    row.next = std::max(row.next, end);
}

// A page has at least the distance of the pages before it.
void AdviceLog::count_use(Row& row, AdviceSums& sums, Page& page,
                          std::int64_t distance) const noexcept {
    const std::int64_t size = config_.page_size;
    row.distance = std::max(row.distance, distance);
    page.tokens = static_cast<std::int32_t>(
        std::clamp<std::int64_t>((page.column + 1) * size - row.known_tokens, 0, size));
    sums.sampled_uses += page.tokens > 0 ? 1 : 0;
    sums.sampled_tokens += page.tokens;
    for (std::size_t i = 0; i < AdviceTokens::kFactors.size(); ++i) {
        const double pages = AdviceTokens::kFactors[i] * static_cast<double>(config_.num_pages);
        if (static_cast<double>(row.distance) < pages) sums.found_tokens[i] += page.tokens;
    }
    page.is_found_by_lru = row.distance < config_.num_pages;
    page.was_held = page.was_held && row.distance < kNotFound;
}

// Room is made after the last use, when the request holds the pages of all its uses.
void AdviceLog::record_uses(const Replica& home, const Sequence& sequence, const Row& row,
                            std::int32_t first, Owner owner) noexcept {
    if (row.pages.empty()) return;
    const std::int32_t room_now =
        room(home, recorder_of(sequence).index, own_uncommitted(sequence));
    const auto is_use = [&](const Page& page) {
        return page.column >= first && page.column < row.use_end;
    };
    const auto uses = std::count_if(row.pages.begin(), row.pages.end(), is_use);
    std::ptrdiff_t n = 0;
    for (const Page& page : row.pages) {
        if (!is_use(page)) continue;
        add_record(static_cast<std::size_t>(sequence.replica),
                   {page.hash, page.tokens, ++n == uses ? room_now : AdviceRecord::kAnyRoom,
                    page.is_found_by_lru, owner,
                    page.was_held ? AdviceRecord::kUseOfHeld : AdviceRecord::kUse});
    }
}

void AdviceLog::seal(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                     Owner owner) noexcept {
    Row& row = rows_[handle.index];
    if (!row.is_noted || row.is_counted) return;
    row.is_counted = true;
    const std::int64_t now = clock_();
    if (now - slices_[slice_].begin >= kSliceTime) begin_slice(now);
    record_uses(home, sequence, row, 0, owner);
    slices_[slice_].sums[owner] += row.sums;
}

void AdviceLog::note_commit(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                            Owner owner, std::int32_t first, std::int32_t first_new,
                            std::int32_t end) noexcept {
    Row& row = rows_[handle.index];
    Recorder& recorder = recorder_of(sequence);
    AdviceSums& sums = slices_[slice_].sums[owner];
    const std::int32_t next = row.next;
    const auto distance_of = [&](const Page& page) {
        const bool is_repeated = page.column >= first && page.column < first_new;
        const std::int64_t before = recorder.index.distance_before(page.entry);
        const bool is_new = is_repeated || before == ShadowIndex::kNew;
        return is_new ? kNotFound : distance(before, others_uncommitted(home, sequence));
    };
    find_sampled(sequence, std::min(first, next), first_new);
    use_pages(sequence, row, sums, sampled_, distance_of);
    if (first_new < end) use_pages(sequence, row, sums, recorder.entered, distance_of);
    end_uses(row, sums, end);
    if (next < row.use_end) record_uses(home, sequence, row, next, owner);
}

void AdviceLog::share(const Sequence& sequence, SequenceHandle parent, SequenceHandle child,
                      std::int32_t columns) noexcept {
    ShadowIndex& index = recorder_of(sequence).index;
    for (const Page& page : rows_[parent.index].pages) {
        if (page.column < columns) hold(rows_[child.index], index, page);
    }
}

void AdviceLog::release(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                        Owner owner) noexcept {
    Row& row = rows_[handle.index];
    const std::int32_t end = sequence.pages.committed();
    // Pages that arrived from a lower tier were not committed.
    if (row.is_counted && row.next < std::min(end, row.use_end)) {
        note_commit(home, handle, sequence, owner, end, end, end);
    }
    ShadowIndex& index = recorder_of(sequence).index;
    for (auto page = row.pages.rbegin(); page != row.pages.rend(); ++page) {
        const std::int32_t room_before = room(home, index, 0);
        if (!index.release(page->entry)) continue;
        add_record(static_cast<std::size_t>(sequence.replica),
                   {page->hash, 0, room_before, false, 0, AdviceRecord::kLeft});
    }
    row.pages.clear();
    row.is_noted = false;
}

void AdviceLog::reset() noexcept {
    for (std::size_t i = 0; i < recorders_.size(); ++i) {
        recorders_[i]->index.clear();
        add_record(i, {0, 0, 0, false, 0, AdviceRecord::kReset});
    }
}

AdviceCopy AdviceLog::copy() const {
    const std::int64_t now = clock_();
    AdviceCopy found;
    found.records.resize(recorders_.size());
    found.sums.resize(slices_.front().sums.size());
    found.is_lru = is_lru_;
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
        found.seconds = std::max(found.seconds, static_cast<double>(now - slice.begin) / 1e9);
    }
    return found;
}

void AdviceLog::check_integrity() const {
    std::int64_t holders = 0;
    for (const auto& recorder : recorders_) {
        recorder->index.check_integrity();
        holders += recorder->index.count_holders();
    }
    for (const Row& row : rows_) holders -= static_cast<std::int64_t>(row.pages.size());
    detail::require_law(holders == 0,
                        "advice: each sampled page of a claim has the claim as holder");
}

}  // namespace kvcore
