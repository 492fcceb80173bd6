// SPDX-License-Identifier: Apache-2.0
#include "observe/export_import.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"

namespace kvcore {

/// The columns in the tree after the insertion.
struct ColumnImport::Arrived {
    std::vector<DuplicatePage> duplicates;
    std::vector<BlockId> cached;     // ids of the columns
    std::vector<std::uint8_t> knew;  // of each, the windows that it had before
};

ColumnImport::ColumnImport(Replica& replica, const ColumnSpan& span, const CachedColumn* offered)
    : home_(replica), first_(span.first) {
    const auto page = std::int64_t{replica.tree.page_size()};
    find_place(span, static_cast<std::int32_t>(span.n / page));
    if (status_ != ImportStatus::kTaken) return;
    const auto n = static_cast<std::size_t>(span.n / page - first_);
    tokens_.assign(span.tokens + page * first_, span.tokens + span.n);
    columns_.reserve(n);
    choose(offered, n, budget());
    const auto lanes = static_cast<std::size_t>(replica.grouping().num_lanes());
    own_.assign(columns_.size(), ColumnPages::kNoPage);
    pages_.assign(columns_.size() * lanes, ColumnPages::kNoPage);
    tokens_.resize(columns_.size() * static_cast<std::size_t>(page));
    offered_.assign(offered, offered + columns_.size());
    if (columns_.empty()) {
        status_ = ImportStatus::kNoRoom;
        place_.end();
    } else {
        take();
    }
}

// Pins the end of the prefix that the tree has of `n` columns, and counts the columns of the prefix
// from `first_` on.
void ColumnImport::find_place(const ColumnSpan& span, std::int32_t n) {
    PrefixTree& tree = home_.tree;
    TreeNode* root = tree.find_namespace(span.name_space);
    if (root == nullptr) {
        status_ = ImportStatus::kNoParent;
        if (first_ > 0) return;
        status_ = ImportStatus::kTaken;
        place_ = PrefixRef(home_, home_.open(span.name_space));
        return;
    }
    const TreePosition at = tree.match(root, span.tokens, std::int64_t{n} * tree.page_size()).at;
    if (at.depth < first_) {
        status_ = ImportStatus::kNoParent;
        return;
    }
    // The pin holds full pages, but no windows.
    if (quotas::longest_held(home_, at, at.depth) < at.depth) {
        status_ = ImportStatus::kNoRoom;
        return;
    }
    num_known_ = at.depth - first_;
    place_ = PrefixRef(home_, home_.hold(at));
}

// Only free pages: cached pages were used since the snapshot was taken.
ColumnImport::Budget ColumnImport::budget() const {
    Budget found{home_.num_free(), home_.pool.num_free(), home_.num_free_slots()};
    if (home_.owners != nullptr) {
        found.pages = std::min(found.pages, QuotaTrial(home_).room(0, 0));
    }
    return found;
}

// Chooses the offered parts that the tree lacks, as far as there is room. A checkpoint without a
// free slot is left out.
void ColumnImport::choose(const CachedColumn* offered, std::size_t n, Budget budget) {
    std::vector<BlockId> known(static_cast<std::size_t>(num_known_));
    home_.tree.copy_pages({place_.node(), first_ + num_known_}, first_, known.data());
    for (std::size_t i = 0; i < n; ++i) {
        CachedColumn wanted = offered[i];
        for (std::size_t w = 0; !is_new(i) && w < Grouping::kMaxWindows; ++w) {
            if (!tiered::has_window(wanted.windows, w) || !home_.columns->has(known[i], w))
                continue;
            wanted.windows &= static_cast<std::uint8_t>(~(1U << w));
        }
        const bool has_state =
            !is_new(i) && home_.find_checkpoint(known[i]) != RecurrentSlots::kNone;
        if (wanted.state >= 0 && (has_state || budget.slots == 0)) wanted.state = -1;
        columns_.push_back(wanted);
        const std::int64_t pages = count_pages(i);
        const bool needs_column = is_new(i) || pages > 0;
        if (pages > budget.pages || (needs_column && budget.columns == 0)) {
            columns_.pop_back();
            return;
        }
        budget.pages -= pages;
        budget.columns -= needs_column ? 1 : 0;
        budget.slots -= wanted.state >= 0 ? 1 : 0;
    }
}

std::int64_t ColumnImport::count_pages(std::size_t i) const noexcept {
    const Grouping& grouping = home_.grouping();
    return (is_new(i) ? grouping.num_full_lanes() : 0) +
           tiered::count_pages(grouping, columns_[i].windows);
}

// Gives back everything it took if an integrity check fails.
void ColumnImport::take() {
    num_known_ = std::min(num_known_, static_cast<std::int32_t>(columns_.size()));
    status_ = ImportStatus::kKnown;
    home_.set_taker(0);
    std::size_t i = 0;
    try {
        for (; i < columns_.size(); ++i) {
            const bool is_taken = is_new(i) || count_pages(i) > 0;
            if (is_taken) take_column(i);
            if (columns_[i].state >= 0) columns_[i].state = home_.states->take();
            if (is_taken || columns_[i].state >= 0) status_ = ImportStatus::kTaken;
        }
    } catch (const IntegrityError&) {
        for (; i < columns_.size(); ++i) columns_[i].state = -1;  // no slot was taken for these
        give_back(0);
        throw;
    }
    home_.note_peak();
}

void ColumnImport::take_column(std::size_t i) {
    BlockId& own = own_[i];
    detail::require_law(home_.pool.allocate(1, &own), "import: the counted columns are available");
    home_.note_taken(&own, 1);
    home_.enter(own);
    if (is_new(i)) home_.fill_full(own);
    for (std::size_t w = 0; w < home_.grouping().windows().size(); ++w) {
        if (tiered::has_window(columns_[i].windows, w)) home_.columns->fill(own, w);
    }
    const auto lanes = static_cast<std::size_t>(home_.grouping().num_lanes());
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        pages_[i * lanes + lane] = home_.page(own, static_cast<std::int32_t>(lane));
    }
}

ColumnImport::~ColumnImport() { give_back(0); }

void ColumnImport::give_back(std::size_t from) noexcept {
    for (std::size_t i = from; i < columns_.size(); ++i) {
        if (own_[i] >= 0) {
            home_.leave(own_[i], {});
            home_.pool.free(&own_[i], 1);
        }
        if (columns_[i].state >= 0) home_.states->give_back(columns_[i].state);
    }
    columns_.resize(std::min(columns_.size(), from));
    own_.resize(columns_.size());
}

// A pin on a held page protects all pages before it. If another request cached some of these pages
// meanwhile, quotas may leave no room to hold them.
std::size_t ColumnImport::count_publishable() const noexcept {
    const std::size_t n = columns_.size();
    if (home_.owners == nullptr) return n;
    const std::int64_t page = home_.tree.page_size();
    const auto num_tokens = static_cast<std::int64_t>(tokens_.size()) - num_known_ * page;
    const TokenId* tokens = tokens_.data() + num_known_ * page;
    const TreePosition at = home_.tree.match(place_.node(), tokens, num_tokens).at;
    if (at.depth == first_ + num_known_) return n;
    auto end = static_cast<std::size_t>(num_known_);
    while (end < n && !is_held(end)) ++end;
    return end;
}

bool ColumnImport::publish(bool more) {
    if (!place_) return false;
    const std::size_t n = count_publishable();
    if (n == 0) return true;  // the import ends unpublished
    const auto num_new = static_cast<std::int32_t>(n) - num_known_;
    Arrived arrived;
    arrived.duplicates.reserve(static_cast<std::size_t>(num_new));
    arrived.cached.resize(n);
    arrived.knew.resize(n);
    home_.make_room_to_cache(num_new, home_.num_sequences + 1);
    const std::ptrdiff_t known_tokens = std::ptrdiff_t{num_known_} * home_.tree.page_size();
    TreeNode* end = home_.tree.insert(place_.node(), tokens_.data() + known_tokens,
                                      own_.data() + num_known_, num_new, arrived.duplicates);
    settle(arrived, end);
    if (!more) home_.tree.shrink(end);
    return true;
}

// Cannot fail.
void ColumnImport::settle(Arrived& arrived, TreeNode* end) noexcept {
    give_back(arrived.cached.size());
    if (end != place_.node()) place_ = PrefixRef(home_, {end, PrefixTree::depth_of(end)});
    const auto n = static_cast<std::int32_t>(columns_.size());
    home_.tree.copy_pages({end, first_ + n}, first_, arrived.cached.data());
    for (std::size_t i = 0; i < columns_.size(); ++i) {
        if (own_[i] < 0) continue;
        if (own_[i] != arrived.cached[i]) {
            merge(i, arrived);
            continue;
        }
        home_.cache(own_[i]);
        if (is_held(i)) entrust_to_tree(i, end);
    }
    leave_windows(arrived, end);
    if (home_.states != nullptr) hand_over_states(arrived, end);
    place_.end_use();
    if (home_.owners != nullptr) tell_owners(arrived, end);
    columns_.clear();
    own_.clear();
    pages_.clear();
    tokens_.clear();
}

// Turns a hold on a page that the tree has now into a pin. Splits the run after the page, so that
// the pin protects no later page. Without memory for the split, the pin protects the whole run.
void ColumnImport::entrust_to_tree(std::size_t i, TreeNode* end) noexcept {
    TreePosition at = PrefixTree::position(end, first_ + static_cast<std::int32_t>(i) + 1);
    try {
        at.node = home_.tree.split(at);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): `at` is the whole run
    }
    home_.move_refs_to_tree(own_[i], at);
}

// Moves the pages that the tree's column lacks into it, unless a caller holds them. The import
// reads the tree's column from now on, in place of its own column.
void ColumnImport::merge(std::size_t i, Arrived& arrived) noexcept {
    const BlockId cached = arrived.cached[i];
    for (std::size_t w = 0; w < home_.grouping().windows().size(); ++w) {
        if (home_.columns->has(cached, w)) arrived.knew[i] |= static_cast<std::uint8_t>(1U << w);
    }
    home_.enter(cached);
    const auto depth = first_ + static_cast<std::int32_t>(i) + 1;
    if (!is_held(i)) home_.fill_holes({place_.node(), depth}, cached, own_[i]);
    home_.leave(own_[i], {});
    home_.pool.free(&own_[i], 1);
}

// Leaves the windows of each series of columns together. Windows that were kept for a next turn are
// kept again; the other windows count as passed by a request. Windows that the tree already had are
// used now.
void ColumnImport::leave_windows(const Arrived& arrived, TreeNode* end) noexcept {
    const auto is_kept = [&](std::size_t i) {
        return (offered_[i].windows & ~offered_[i].passed) != 0;
    };
    if (home_.columns == nullptr) return;
    home_.columns->begin_leaving();
    for (std::size_t i = 0, behind = 0; i < columns_.size(); i = behind) {
        while (behind < columns_.size() && is_kept(behind) == is_kept(i)) ++behind;
        const auto depth = first_ + static_cast<std::int32_t>(behind);
        home_.columns->leave_from(PrefixTree::position(end, depth));
        for (std::size_t c = i; c < behind; ++c) leave_column(c, arrived);
    }
}

void ColumnImport::leave_column(std::size_t i, const Arrived& arrived) noexcept {
    using Departure = ColumnPages::Departure;
    ColumnPages& columns = *home_.columns;
    for (std::size_t w = 0; w < columns.grouping().windows().size(); ++w) {
        const bool is_passed = tiered::has_window(offered_[i].passed, w);
        const bool is_kept = tiered::has_window(offered_[i].windows, w) && !is_passed;
        const bool was_there = own_[i] < 0 || tiered::has_window(arrived.knew[i], w);
        if (own_[i] >= 0) {
            const Departure how = is_passed ? Departure::kPassed : Departure::kKept;
            columns.leave(arrived.cached[i], w, was_there ? Departure::kUnused : how);
        }
        if (is_kept && was_there) columns.renew(arrived.cached[i], w);
    }
}

void ColumnImport::hand_over_states(const Arrived& arrived, TreeNode* end) noexcept {
    RecurrentSlots& states = *home_.states;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
        const RecurrentSlots::Slot known = states.find(arrived.cached[i]);
        if (known != RecurrentSlots::kNone && offered_[i].state >= 0) states.renew(known);
        if (columns_[i].state < 0) continue;
        if (known == RecurrentSlots::kNone) {
            states.hand_over(columns_[i].state, arrived.cached[i],
                             PrefixTree::position(end, first_ + static_cast<std::int32_t>(i) + 1));
        } else {
            states.give_back(columns_[i].state);
        }
    }
}

// The owners count these pages as held since they were taken. The tree reports no change for pages
// that were never protected: the last pages, after the last held page.
void ColumnImport::tell_owners(const Arrived& arrived, TreeNode* end) noexcept {
    const auto n = static_cast<std::int64_t>(own_.size());
    const std::int32_t depth = first_ + static_cast<std::int32_t>(n);
    const std::int64_t unprotected = std::min(n, home_.tree.num_unprotected({end, depth}));
    for (auto i = static_cast<std::size_t>(n - unprotected); i < own_.size(); ++i) {
        if (own_[i] < 0 || own_[i] != arrived.cached[i]) continue;
        const auto let_go = [&](BlockId page) { home_.owners->let_go(&page, 1); };
        home_.for_each_full_page(own_[i], let_go);
    }
}

// Everything that can fail comes before the first hold. Only the holds on checkpoints come earlier;
// they end by themselves.
ColumnExport::ColumnExport(Replica& replica, TreePosition at, std::int32_t first)
    : home_(replica), ids_(static_cast<std::size_t>(at.depth - first)) {
    const std::int32_t lanes = replica.grouping().num_lanes();
    replica.tree.copy_pages(at, first, ids_.data());
    columns_.reserve(ids_.size());
    pages_.reserve(ids_.size() * static_cast<std::size_t>(lanes));
    if (replica.states != nullptr) states_.reserve(ids_.size());
    for (const BlockId column : ids_) {
        columns_.push_back(describe(column));
        for (std::int32_t lane = 0; lane < lanes; ++lane) {
            pages_.push_back(replica.page(column, lane));
        }
        if (columns_.back().state < 0) continue;
        states_.emplace_back(*replica.states, columns_.back().state);
    }
    for (const BlockId column : ids_) replica.enter(column);
    path_ = PrefixRef(replica, at, PrefixRef::Pages::of(ids_));
    replica.note_peak();
}

ColumnExport::~ColumnExport() {
    // If the tree no longer has the columns, no page of them is kept.
    const TreePosition end = path_.at();
    for (const BlockId column : ids_) home_.leave(column, end);
    path_.end();
}

CachedColumn ColumnExport::describe(BlockId column) const noexcept {
    CachedColumn found;
    for (std::size_t w = 0; w < home_.grouping().windows().size(); ++w) {
        const auto bit = static_cast<std::uint8_t>(1U << w);
        if (home_.columns->has(column, w)) found.windows |= bit;
        if (home_.columns->is_passed(column, w)) found.passed |= bit;
    }
    if (home_.has_checkpoint(column)) found.state = home_.find_checkpoint(column);
    return found;
}

}  // namespace kvcore
