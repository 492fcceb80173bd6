// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "store/disk/file_ops.hpp"

namespace kvcore {

/// The interface between a disk store and the system: calls on files, and a clock in nanoseconds.
struct DiskSeams {
    std::shared_ptr<FileOps> ops;
    std::function<std::int64_t()> clock;
};

/// The calls and the clock of the system.
[[nodiscard]] DiskSeams system_seams();

}  // namespace kvcore
