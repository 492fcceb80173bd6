// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/prefix_tree.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Told which pages of windows cached columns lose and get again. Pages that come and go with their
/// column are told by the tree: see TreeListener.
///
/// Threads: called by whoever changes the columns, under the manager's mutex.
class WindowListener {
   public:
    WindowListener() = default;
    WindowListener(const WindowListener&) = delete;
    WindowListener& operator=(const WindowListener&) = delete;
    virtual ~WindowListener() = default;

    /// A column of the tree has no pages of a window any more.
    virtual void lost(BlockId column, std::size_t window) noexcept = 0;
    /// The last column on the way to `end` has pages of these windows again, by bits.
    virtual void filled(TreePosition end, std::uint8_t windows) noexcept = 0;
};

}  // namespace kvcore
