// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/manager_scene.hpp"

/// Everything observable of a scene, as text without addresses: managers with equal texts behave in
/// the same way. Checks integrity. Finally takes the scene apart to show the order in which pages
/// are handed out and evicted, on the device and in the host tier.
class ManagerText {
   public:
    explicit ManagerText(ManagerScene& scene) : scene_(scene), manager_(scene.manager) {}

    [[nodiscard]] std::string of_all() {
        scene_.take_over();
        add_call();
        add_state();
        take_apart();
        return std::move(text_);
    }
    /// The text without the call. `names_host_pages`: also name the content of each page of the
    /// tier.
    [[nodiscard]] std::string of_state(bool names_host_pages) {
        names_host_pages_ = names_host_pages;
        scene_.take_over();
        add_state();
        take_apart();
        return std::move(text_);
    }
    /// The text of the prompts' hits, including the host tier.
    [[nodiscard]] std::string of_reach() {
        add_reach();
        return std::move(text_);
    }

   private:
    template <class T>
    ManagerText& operator<<(const T& value) {
        if constexpr (std::is_convertible_v<T, std::string>) {
            text_ += value;
        } else {
            text_ += ' ' + check::text(value);
        }
        return *this;
    }
    ManagerText& operator<<(kvcore::SequenceHandle handle) {
        for (std::size_t i = 0; i < scene_.requests.size(); ++i) {
            if (scene_.at(i).sequence == handle) return *this << " #" << i;
        }
        return *this << " #gone";
    }
    ManagerText& operator<<(const kvcore::PageMove& copy) {
        return *this << "\n  copy" << copy.replica << copy.source << copy.destination
                     << copy.num_tokens << copy.sequence;
    }
    void add(const kvcore::Transfers& transfers) {
        *this << "\n ticket" << transfers.ticket;
        for (const kvcore::PageMove& copy : transfers.copies) *this << copy;
        for (const kvcore::PageMove& copy : transfers.tier_moves) {
            *this << "\n  host copy" << copy.replica << copy.is_load()
                  << copy.page_in(kvcore::Tier::kDevice) << copy.page_in(kvcore::Tier::kHost);
        }
        for (const kvcore::MovedRequest& moved : transfers.moved) {
            *this << "\n  moved" << moved.row << moved.start << moved.active;
        }
    }

    void add_call() {
        *this << "answer";
        for (const std::int64_t n : scene_.answer) *this << n;
        for (const kvcore::PageSwap& swap : scene_.swaps) {
            *this << "\n swap" << swap.row << swap.column << swap.page;
        }
        *this << "\n found" << scene_.found << " " << scene_.text_found;
        add(scene_.transfers);
        const auto status = static_cast<kvcore::FetchStatus>(scene_.answer[0]);
        if (scene_.answer[5] == 1 && status == kvcore::FetchStatus::kOk) add_tables();
    }
    void add_tables() {
        for (std::size_t r = 0; r < ManagerScene::kReplicas; ++r) {
            const kvcore::FetchTarget& target = scene_.targets[r];
            const ManagerScene::Table& table = *scene_.tables[r];
            *this << "\n target" << target.rows << target.width << target.longest_new
                  << target.longest_active;
            for (std::int64_t row = 0; row < target.rows; ++row) {
                *this << "\n  " << item(table.lengths, row) << ":";
                for (std::int64_t c = 0; c < target.width; ++c) {
                    *this << item(table.pages, row * ManagerScene::Table::kColumns + c);
                    if (scene_.mode.window == 0) continue;
                    *this << item(table.window_pages, row * ManagerScene::Table::kColumns + c);
                }
            }
        }
    }

    void add_counts() {
        for (std::int32_t r = 0; r < ManagerScene::kReplicas; ++r) {
            const kvcore::PoolStats s = manager_.stats(r);
            *this << "\n stats" << s.total_pages << s.free_pages << s.cached_pages
                  << s.evictable_pages << s.num_sequences << s.host_cached_pages;
        }
    }
    void add_state() {
        manager_.check_integrity();
        add_counts();
        const kvcore::Metrics m = manager_.metrics();
        *this << "\n metrics" << m.input_tokens << m.cache_tokens << m.copied_tokens
              << m.evicted_pages << m.peak_used_pages << m.stored_pages << m.loaded_pages;
        for (std::size_t i = 0; i < scene_.requests.size(); ++i) add_request(i);
        add_shared();
        manager_.check_integrity();
    }
    void add_request(std::size_t i) {
        const Request& request = scene_.at(i);
        *this << "\n request" << i << request.start << request.active << request.end();
        if (manager_.contains(request.sequence)) {
            const auto plan = manager_.plan(request.view());
            *this << " at" << manager_.replica_of(request.sequence) << " pages"
                  << manager_.pages_of(request.sequence);
            if (scene_.mode.window > 0) *this << manager_.pages_of(request.sequence, 1);
            *this << " plan" << plan.hit_tokens << plan.new_pages << plan.evicted_pages
                  << plan.copied_tokens << plan.fits;
        }
        for (std::int32_t r = 0; r < ManagerScene::kReplicas; ++r) {
            std::vector<BlockId> pages;
            static_cast<void>(manager_.match(r, request.name_space(), request.tokens().data(),
                                             request.end(), &pages));
            *this << " match" << pages;
        }
        *this << " recommended"
              << manager_.recommend_replica(request.name_space(), request.tokens().data(),
                                            request.end());
    }
    void add_shared() {
        std::vector<kvcore::RequestView> views;
        for (const auto& request : scene_.requests) {
            if (manager_.contains(request->sequence)) views.push_back(request->view());
        }
        for (const auto& group :
             manager_.shared_prefixes({views.data(), static_cast<std::int64_t>(views.size())})) {
            *this << "\n shared" << group.replica << group.num_tokens << group.rows;
        }
    }

    void take_apart() {
        if (!scene_.mode.copies_at_once) {
            for (const kvcore::PageMove& copy : manager_.take_copies()) *this << copy;
        }
        scene_.end(scene_.transfers);
        scene_.end_open();
        for (const auto& request : scene_.requests) {
            kvcore::Transfers owed;
            *this << "\n owed" << manager_.take_owed(request->sequence, owed);
            for (const kvcore::PageMove& copy : owed.copies) *this << copy;
            scene_.end(owed);
        }
        add_reach();
        manager_.check_integrity();
        for (const auto& request : scene_.requests) {
            if (manager_.contains(request->sequence)) manager_.release(request->sequence);
        }
        for (const kvcore::PinHandle& pin : scene_.pins) {
            *this << "\n pin" << pin.num_tokens;
            manager_.unpin(pin);
        }
        scene_.holds.clear();
        add_counts();
        for (std::int32_t r = 0; r < ManagerScene::kReplicas; ++r) drain(r);
        manager_.check_integrity();
    }
    void add_reach() {
        for (std::size_t i = 0; i < scene_.requests.size(); ++i) {
            Tokens tokens = scene_.at(i).tokens();
            tokens.push_back(0);
            for (std::int32_t r = 0; r < ManagerScene::kReplicas; ++r) {
                const kvcore::SequenceHandle asked = manager_.claim(r);
                const auto end = static_cast<std::int64_t>(tokens.size());
                const auto plan =
                    manager_.plan({asked, tokens.data(), 0, end, end, scene_.at(i).name_space()});
                *this << "\n reach" << plan.hit_tokens << plan.new_pages << plan.evicted_pages;
                manager_.release(asked);
            }
        }
    }
    /// Take all pages of a replica one by one, and store each page if there is a host tier.
    void drain(std::int32_t replica) {
        const std::int64_t page = ManagerScene::kPageSize;
        const std::int64_t blocks = manager_.config().num_pages;
        const Tokens tokens = count_up(1'000'000, (blocks + 1) * page);
        kvcore::RequestView view{manager_.claim(replica), tokens.data(), 0, 0, 0, ""};
        std::vector<kvcore::PageSwap> swaps;
        *this << "\n drained" << replica << ":";
        for (std::int64_t k = 0; k < blocks; ++k) {
            kvcore::Transfers owed;
            view.active = view.end = (k + 1) * page;
            const bool has_groups = scene_.mode.window > 0;
            if (has_groups && manager_.stats(replica).available_pages() < 2) break;
            CHECK_EQ(manager_.reserve(view, 1, scene_.mode.copies_at_once ? &owed : nullptr),
                     kvcore::ReserveStatus::kOk);
            CHECK(owed.empty());
            *this << manager_.pages_of(view.sequence).back();
            if (has_groups) *this << manager_.pages_of(view.sequence, 1).back();
            view.start = view.end++;
            view.active = view.end;
            manager_.commit({&view, 1}, swaps, scene_.mode.copies_at_once ? &owed : nullptr);
            for (const kvcore::PageMove& copy : owed.tier_moves) {
                *this << "/" << (names_host_pages_ ? copy.page_in(kvcore::Tier::kHost) : -1);
            }
            scene_.end(owed);
        }
        manager_.release(view.sequence);
    }

    ManagerScene& scene_;
    kvcore::CacheManager& manager_;
    bool names_host_pages_ = true;
    std::string text_;
};
