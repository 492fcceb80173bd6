// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "layers/grouping.hpp"
#include "level/level.hpp"

struct PlainLayout {
    kvcore::Grouping layout;
};

/// A level of a cache in which all layers keep every token.
struct PlainLevel : private PlainLayout, public kvcore::Level {
    PlainLevel(std::int64_t num_pages, std::int32_t page_size)
        : PlainLayout{kvcore::Grouping(page_size, {})}, Level(layout, Size{num_pages}) {}
};
