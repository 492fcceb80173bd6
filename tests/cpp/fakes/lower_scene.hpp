// SPDX-License-Identifier: Apache-2.0
// Lower stores that a test scripts, and a reader that loads prompts from them.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/lower_store.hpp"
#include "kvcore/store_reader.hpp"
#include "store/disk/io_queue.hpp"
#include "support/store_fixture.hpp"

using Columns = std::vector<std::int32_t>;

/// The exception of an interrupt.
struct Interrupted : std::runtime_error {
    Interrupted() : std::runtime_error("interrupted") {}
};

/// Hooks that do nothing, unless a test sets a function.
class FakeHooks final : public kvcore::StoreHooks {
   public:
    std::function<void(const kvcore::StoreMoves&)> on_prepare;
    std::function<bool()> on_room;
    std::function<void()> on_interrupt;

    void prepare(const kvcore::StoreMoves& fill) override {
        if (on_prepare) on_prepare(fill);
    }
    bool make_room() override { return on_room && on_room(); }
    void check_interrupt() override {
        if (on_interrupt) on_interrupt();
    }
};

/// A door that threads wait at.
class Door {
   public:
    void open() {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_open_ = true;
        changed_.notify_all();
    }
    void pass() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return is_open_; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = false;
};

/// A read of a store that lasts until the test opens the door.
class LongRead {
   public:
    LongRead() {
        CHECK(queue_.submit(job_, [] {}) == kvcore::Submission::kAccepted);
    }
    LongRead(const LongRead&) = delete;
    LongRead& operator=(const LongRead&) = delete;
    ~LongRead() { door.open(); }
    [[nodiscard]] kvcore::StoreTask task() const { return kvcore::StoreTask(job_); }

    Door door;

   private:
    class Job final : public kvcore::StoreJob {
       public:
        explicit Job(Door& door) : StoreJob(1), door_(door) {}
        void run(std::int64_t /*page*/, std::size_t /*worker*/) noexcept override { door_.pass(); }
        [[nodiscard]] std::int64_t result() const noexcept override { return 0; }

       private:
        Door& door_;
    };

    std::shared_ptr<Job> job_ = std::make_shared<Job>(door);
    kvcore::IoQueue queue_{1, 8, 1.0};
};

/// A store with parts of columns of one prompt.
class FakeStore final : public kvcore::LowerStore {
   public:
    FakeStore(const Keys& keys, std::map<std::int32_t, std::uint64_t> parts)
        : parts(std::move(parts)) {
        for (std::size_t i = 0; i < keys.size(); ++i) {
            columns_[keys[i]] = static_cast<std::int32_t>(i);
        }
    }

    std::map<std::int32_t, std::uint64_t> parts;  // by column
    bool lists_parts = true;         // false: it reports kAllParts for each stored page
    std::int32_t fails_from = 1000;  // reads and writes fail from this column on
    std::function<void(kvcore::StoreTask&)> on_read;
    std::function<void()> on_write;
    std::vector<Columns> asked;
    std::vector<Columns> reads;
    std::vector<Columns> writes;

    void parts_of(const kvcore::PageKey* keys, std::size_t n, std::uint64_t* found) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        asked.emplace_back();
        for (std::size_t i = 0; i < n; ++i) {
            asked.back().push_back(columns_.at(keys[i]));
            found[i] = stored(asked.back().back());
            if (!lists_parts && found[i] != 0) found[i] = kAllParts;
        }
    }
    std::size_t read(const kvcore::ColumnRange& columns, std::uint64_t* found,
                     kvcore::StoreTask& late, kvcore::StoreHooks& /*hooks*/) override {
        Columns names;
        for (std::size_t i = 0; i < columns.n; ++i) names.push_back(columns_.at(columns.key(i)));
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            reads.push_back(names);
        }
        if (on_read) on_read(late);
        if (!late.done()) return 0;
        std::size_t n = 0;
        for (; n < columns.n && names[n] < fails_from; ++n) {
            found[n] = stored(names[n]);
            if ((columns.parts(n) & ~found[n]) != 0) return n + 1;
        }
        return n;
    }

    kvcore::StoreWrite write(const kvcore::StoreMoves& moves,
                             const std::vector<std::size_t>& columns) override {
        kvcore::StoreWrite write;
        writes.emplace_back();
        for (const std::size_t i : columns) {
            const std::int32_t column = columns_.at(moves.keys[i]);
            if (column >= fails_from) continue;
            writes.back().push_back(column);
            parts[column] |= moves.parts_of(i);
            ++write.stored;
        }
        if (on_write) on_write();
        return write;
    }
    std::int64_t end(kvcore::StoreWrite& write) override { return write.stored; }
    void remove(const std::vector<kvcore::PageKey>& keys) override {
        for (const kvcore::PageKey& key : keys) parts.erase(columns_.at(key));
    }

   private:
    [[nodiscard]] std::uint64_t stored(std::int32_t column) const {
        const auto at = parts.find(column);
        return at == parts.end() ? 0 : at->second;
    }

    std::mutex mutex_;
    std::map<kvcore::PageKey, std::int32_t> columns_;
};

/// Return columns `first` .. `end` - 1, each with the same parts.
inline std::map<std::int32_t, std::uint64_t> columns_with(std::int32_t first, std::int32_t end,
                                                          std::uint64_t parts = 1) {
    std::map<std::int32_t, std::uint64_t> all;
    for (std::int32_t c = first; c < end; ++c) all[c] = parts;
    return all;
}

/// A manager, and a reader that loads its prompts.
class LowerScene : public StoreFixture {
   public:
    using StoreFixture::StoreFixture;

    kvcore::StoreReader& open(std::vector<kvcore::LowerStore*> stores,
                              std::int64_t batch_bytes = 1 << 20, double seconds = 60) {
        reader = std::make_unique<kvcore::StoreReader>(
            manager, std::move(stores), hooks,
            kvcore::StoreReader::Options{8, 8, batch_bytes, seconds});
        return *reader;
    }
    kvcore::LowerSearch search_of(const Tokens& tokens) {
        return {manager, search(tokens), "", tokens.data(), {}};
    }
    void load(const Tokens& tokens) {
        kvcore::LowerSearch found = search_of(tokens);
        reader->load(found);
        manager.check_integrity();
    }
    /// The number of pages of the host tier that a fill of an unseen prompt gets.
    std::int64_t room() {
        const kvcore::StoreMoves all = begin_fill(count_up(70000, 2 * manager.config().host_pages));
        finish_fill(all, 0);
        return count(all.keys);
    }

    FakeHooks hooks;
    std::unique_ptr<kvcore::StoreReader> reader;
};
