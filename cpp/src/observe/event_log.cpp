// SPDX-License-Identifier: Apache-2.0
#include "observe/event_log.hpp"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "support/memory.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

void PageNews::clear() noexcept {
    items.clear();
    ids.clear();
    windows.clear();
    tokens.clear();
    names.clear();
    keys.clear();
}

/// Listens to one tree.
class EventLog::Recorder final : public TreeListener, public WindowListener {
   public:
    Recorder(EventLog& log, std::int32_t index, Level& level)
        : index(index), tree(level.tree), columns(level.columns.get()), log_(log) {
        tree.set_listener(this);
        if (columns != nullptr) columns->set_window_listener(this);
    }
    ~Recorder() override {
        tree.set_listener(nullptr);
        if (columns != nullptr) columns->set_window_listener(nullptr);
    }

    void stored(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        log_.note(n, [&] { log_.note_stored(*this, node, first, n); });
    }
    void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        const BlockId* ids = node->ids(tree.page_size()) + (first - node->start);
        log_.note(n, [&] { log_.note_gone(*this, PageNews::Kind::kRemoved, ids, n, nullptr); });
    }
    void lost(BlockId column, std::size_t window) noexcept override {
        const auto windows = static_cast<std::uint8_t>(1U << window);
        log_.note(1, [&] { log_.note_gone(*this, PageNews::Kind::kLost, &column, 1, &windows); });
    }
    void filled(TreePosition end, std::uint8_t windows) noexcept override {
        const TreePosition at = PrefixTree::position(end.node, end.depth);
        log_.note(1, [&] {
            log_.seal();
            log_.note_stored(*this, at.node, at.depth - 1, 1);
            log_.news_.windows.back() = windows;
            log_.seal();
        });
    }
    /// The parts of a column, as bits.
    [[nodiscard]] std::uint8_t windows_of(BlockId column) const noexcept {
        unsigned windows = PageNews::kFullPages;
        for (std::size_t w = 0; w < columns->grouping().windows().size(); ++w) {
            if (columns->has(column, w)) windows |= 1U << w;
        }
        return static_cast<std::uint8_t>(windows);
    }

    const std::int32_t index;
    PrefixTree& tree;
    ColumnPages* const columns;  // nullptr without groups

   private:
    EventLog& log_;
};

EventLog::EventLog(const CacheConfig& config, const Grouping& grouping,
                   const std::vector<std::unique_ptr<Replica>>& replicas)
    : grouping_(grouping), most_pages_(config.event_pages) {
    for (std::size_t i = 0; i < replicas.size(); ++i) {
        replicas[i]->for_each_level([&](Level& level) {
            const auto index = static_cast<std::int32_t>(trees_.size());
            trees_.push_back(std::make_unique<Recorder>(*this, index, level));
        });
        trees_.resize(2 * (i + 1));  // nullptr without a host tier
    }
}

EventLog::~EventLog() = default;

// Drops the news if there are too many pages or memory runs out: a change of a tree must not fail
// because of the log.
template <class Note>
void EventLog::note(std::int64_t pages, const Note& note) noexcept {
    if (is_deaf()) return;
    const auto known = static_cast<std::int64_t>(news_.ids.size() + news_.keys.size());
    if (known + pages > most_pages_) return drop();
    try {
        note();
    } catch (const std::bad_alloc&) {
        drop();
    }
}

void EventLog::drop() noexcept {
    news_.clear();
    has_dropped_ = is_sealed_ = true;
}

// Returns true if the item continues the last page of the previous item.
bool EventLog::goes_on(const PageNews::Item& item) const noexcept {
    if (is_sealed_ || news_.items.empty() || item.parent == PageNews::kNoParent) return false;
    const PageNews::Item& last = news_.items.back();
    return last.kind == item.kind && last.tree == item.tree && news_.ids.back() == item.parent;
}

void EventLog::note_stored(const Recorder& tree, const TreeNode* node, std::int32_t first,
                           std::int32_t n) {
    const std::int32_t page_size = tree.tree.page_size();
    const std::int32_t offset = first - node->start;
    const BlockId* ids = node->ids(page_size) + offset;
    PageNews::Item item{PageNews::Kind::kStored, tree.index, n};
    if (offset > 0) {
        item.parent = ids[-1];
    } else if (!node->parent->is_root()) {
        item.parent = node->parent->ids(page_size)[node->parent->num_pages - 1];
    } else if (const std::string_view name = PrefixTree::name_of(node); !name.empty()) {
        item.name = static_cast<std::int32_t>(news_.names.size());
        news_.names.emplace_back(name);
    }
    const auto count = static_cast<std::size_t>(n);
    const auto num_tokens = count * static_cast<std::size_t>(page_size);
    make_room(news_.items, 1);
    make_room(news_.ids, count);
    make_room(news_.tokens, num_tokens);
    if (tree.columns != nullptr) make_room(news_.windows, count);
    if (goes_on(item)) {
        news_.items.back().num_pages += n;
    } else {
        news_.items.push_back(item);
    }
    news_.ids.insert(news_.ids.end(), ids, ids + n);
    const TokenId* tokens = node->page_tokens(offset, page_size);
    news_.tokens.insert(news_.tokens.end(), tokens, tokens + num_tokens);
    is_sealed_ = false;
    if (tree.columns == nullptr) return;
    std::transform(ids, ids + n, std::back_inserter(news_.windows),
                   [&](BlockId column) { return tree.windows_of(column); });
}

// `windows` [n]: the lost windows; nullptr: all parts of the columns.
void EventLog::note_gone(const Recorder& tree, PageNews::Kind kind, const BlockId* ids,
                         std::int32_t n, const std::uint8_t* windows) {
    make_room(news_.items, 1);
    make_room(news_.ids, static_cast<std::size_t>(n));
    if (tree.columns != nullptr) make_room(news_.windows, static_cast<std::size_t>(n));
    const bool is_more = !news_.items.empty() && news_.items.back().kind == kind &&
                         news_.items.back().tree == tree.index;
    if (is_more) {
        news_.items.back().num_pages += n;
    } else {
        news_.items.push_back({kind, tree.index, n});
    }
    news_.ids.insert(news_.ids.end(), ids, ids + n);
    for (std::int32_t i = 0; tree.columns != nullptr && i < n; ++i) {
        news_.windows.push_back(windows != nullptr ? windows[i] : tree.windows_of(ids[i]));
    }
}

void EventLog::written(std::int32_t replica, const PageKey* keys, std::int64_t n) noexcept {
    note(n, [&] {
        make_room(news_.items, 1);
        news_.keys.insert(news_.keys.end(), keys, keys + n);
        news_.items.push_back({PageNews::Kind::kWritten, 2 * replica, n});
    });
}

// Notes each run after the run that it continues.
void EventLog::note_all() {
    news_.clear();
    for (std::size_t i = 0; i < trees_.size(); ++i) {
        if (i % 2 == 0) {
            news_.items.push_back({PageNews::Kind::kCleared, static_cast<std::int32_t>(i)});
        }
        if (trees_[i] == nullptr) continue;
        for (const TreeNode* run : trees_[i]->tree.runs()) {
            is_sealed_ = true;
            note_stored(*trees_[i], run, run->start, run->num_pages);
        }
    }
    is_sealed_ = true;
}

// Drops the earlier news, which are useless after kCleared.
void EventLog::end_reset() noexcept {
    is_deaf_ = false;
    if (has_dropped_) return;
    try {
        note_all();
    } catch (const std::bad_alloc&) {
        return drop();
    }
    if (static_cast<std::int64_t>(news_.ids.size()) > most_pages_) drop();
}

const PageNews& EventLog::begin_read() {
    if (has_dropped_) {
        try {
            note_all();
        } catch (const std::bad_alloc&) {
            news_.clear();
            throw;
        }
        has_dropped_ = false;
    }
    is_sealed_ = true;
    std::swap(news_, reading_);
    return reading_;
}

// Frees the memory of a burst; keeps the memory of usual news.
void EventLog::end_read(bool done) noexcept {
    constexpr std::size_t kKept = 1U << 20;
    if (reading_.tokens.capacity() > kKept) {
        reading_ = PageNews();
    } else {
        reading_.clear();
    }
    if (!done) drop();
}

void EventLog::find_tokens_up_to(TokenId highest, std::vector<TokenId>& out) const {
    for (const PageNews* news : {&news_, &reading_}) {
        std::copy_if(news->tokens.begin(), news->tokens.end(), std::back_inserter(out),
                     [&](TokenId token) { return token <= highest; });
    }
}

}  // namespace kvcore
