// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "kvcore/errors.hpp"
#include "store/disk/disk_impl.hpp"

namespace kvcore {

/// A call under way, which `close` waits for. Throws Error where calls are refused.
class DiskStore::Impl::Call {
   public:
    explicit Call(const Impl& impl) : impl_(impl) {
        if (impl.is_forked()) {
            throw Error(detail::concat("this disk store belongs to process ", impl.process_,
                                       ", of which this one is a fork; open one here"));
        }
        const std::lock_guard<std::mutex> lock(impl_.mutex_);
        if (impl_.state_ != State::kOpen) throw Error("this disk store is closed; open another");
        ++impl_.calls_;
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
        const std::lock_guard<std::mutex> lock(impl_.mutex_);
        if (--impl_.calls_ == 0) impl_.changed_.notify_all();
    }

   private:
    const Impl& impl_;
};

/// A call of the system that may hang, seen by `is_refusing` while it lasts.
class DiskStore::Impl::Watch {
   public:
    // Where all entries are taken, one that hangs is seen by the others.
    Watch(Impl& impl, std::int64_t now) noexcept {
        auto i = static_cast<std::size_t>(impl.config.threads);  // the others are theirs
        for (; i < impl.began_.size() && entry_ == nullptr; ++i) {
            std::int64_t none = 0;
            if (impl.began_[i].compare_exchange_strong(none, now)) entry_ = &impl.began_[i];
        }
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() {
        if (entry_ != nullptr) *entry_ = 0;
    }

   private:
    std::atomic<std::int64_t>* entry_ = nullptr;
};

}  // namespace kvcore
