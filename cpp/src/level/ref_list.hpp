// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvcore {

/// The place of a reference in the RefList of its level. Empty references are in no list.
///
/// Threads: no locks of its own. Cost: O(1); allocates nothing and never throws.
class RefLink {
   public:
    RefLink(const RefLink&) = delete;
    RefLink& operator=(const RefLink&) = delete;

   protected:
    RefLink() noexcept = default;
    ~RefLink() { unlink(); }

    void link_before(RefLink& next) noexcept {
        next_ = &next;
        prev_ = next.prev_;
        prev_->next_ = this;
        next.prev_ = this;
    }
    void unlink() noexcept {
        if (next_ == nullptr) return;
        prev_->next_ = next_;
        next_->prev_ = prev_;
        prev_ = next_ = nullptr;
    }
    /// Takes the place of a link that leaves its list.
    void replace(RefLink& other) noexcept {
        if (other.next_ == nullptr) return;
        link_before(*other.next_);
        other.unlink();
    }

   private:
    template <class Ref>
    friend class RefList;

    RefLink* prev_ = nullptr;
    RefLink* next_ = nullptr;
};

/// The references of one kind to the pages of a level, in the order in which they began.
///
/// Owns: nothing; each reference enters and leaves the list itself, and the list outlives it.
/// Threads: no locks of its own. Cost: O(1), `for_each` O(references); allocates nothing.
template <class Ref>
class RefList : private RefLink {
   public:
    RefList() noexcept { prev_ = next_ = this; }
    ~RefList() { prev_ = next_ = nullptr; }

    [[nodiscard]] bool empty() const noexcept { return next_ == this; }
    void add(RefLink& ref) noexcept { ref.link_before(*this); }
    /// Calls visit(ref) for each reference. `visit` may end the reference.
    template <class Visit>
    void for_each(const Visit& visit) {
        for (RefLink* each = next_; each != this;) {
            Ref& ref = static_cast<Ref&>(*each);
            each = each->next_;
            visit(ref);
        }
    }
    template <class Visit>
    void for_each(const Visit& visit) const {
        for (const RefLink* each = next_; each != this; each = each->next_) {
            visit(static_cast<const Ref&>(*each));
        }
    }
};

}  // namespace kvcore
