// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/prefix_tree.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Is called when a cached column loses window pages or gets them again. The tree reports pages
/// that enter or leave with their column: see TreeListener.
///
/// Threads: called on the thread that changes the columns, under the manager's mutex.
class WindowListener {
   public:
    WindowListener() = default;
    WindowListener(const WindowListener&) = delete;
    WindowListener& operator=(const WindowListener&) = delete;
    virtual ~WindowListener() = default;

    /// A cached column has no pages of a window any more.
    virtual void lost(BlockId column, std::size_t window) noexcept = 0;
    /// The last column on the path to `end` has pages of these windows again. `windows`: a bit for
    /// each window.
    virtual void filled(TreePosition end, std::uint8_t windows) noexcept = 0;
};

}  // namespace kvcore
