// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "request/sequence_table.hpp"

namespace kvcore {

struct Undo {
    Sequence* sequence;
    std::int64_t before;
};

/// The changes of a call to the sequences of a batch. The destructor restores the old values unless
/// `keep` was called, because a batch may be refused at its last row. At most one change per row.
template <auto kMember>
class UndoLog {
   public:
    /// Throws std::bad_alloc.
    UndoLog(std::vector<Undo>& scratch, std::int64_t rows) {
        scratch.resize(static_cast<std::size_t>(rows));
        begin_ = end_ = scratch.data();
    }
    UndoLog(const UndoLog&) = delete;
    UndoLog& operator=(const UndoLog&) = delete;
    ~UndoLog() {
        while (end_ != begin_) {
            --end_;
            end_->sequence->*kMember = end_->before;
        }
    }
    void set(Sequence& sequence, std::int64_t value) noexcept {
        *end_++ = {&sequence, sequence.*kMember};
        sequence.*kMember = value;
    }
    void keep() noexcept { end_ = begin_; }

   private:
    Undo* begin_;
    Undo* end_;
};

}  // namespace kvcore
