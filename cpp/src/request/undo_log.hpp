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
    UndoLog(std::vector<Undo>& scratch, std::int64_t rows) : undo_(scratch) {
        undo_.resize(static_cast<std::size_t>(rows));
    }
    UndoLog(const UndoLog&) = delete;
    UndoLog& operator=(const UndoLog&) = delete;
    ~UndoLog() {
        while (size_ > 0) {
            const Undo& undo = undo_[--size_];
            undo.sequence->*kMember = undo.before;
        }
    }
    void set(Sequence& sequence, std::int64_t value) noexcept {
        undo_[size_++] = {&sequence, sequence.*kMember};
        sequence.*kMember = value;
    }
    void keep() noexcept { size_ = 0; }

   private:
    std::vector<Undo>& undo_;
    std::size_t size_ = 0;
};

}  // namespace kvcore
