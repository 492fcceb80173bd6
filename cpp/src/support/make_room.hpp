// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvcore {

/// Makes room for `more` items, so that adding them cannot fail. It grows in steps that keep adding
/// cheap. Throws std::bad_alloc and has changed nothing.
template <class T>
void make_room(std::vector<T>& items, std::size_t more) {
    const std::size_t needed = items.size() + more;
    if (needed > items.capacity()) items.reserve(std::max(needed, 2 * items.capacity()));
}

}  // namespace kvcore
