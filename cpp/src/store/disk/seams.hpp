// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "store/disk/file_ops.hpp"

namespace kvcore {

/// Where a disk store meets the system: its calls on files, and its clock in nanoseconds.
struct DiskSeams {
    std::shared_ptr<FileOps> ops;
    std::function<std::int64_t()> clock;
};

/// Those of the system.
[[nodiscard]] DiskSeams system_seams();

}  // namespace kvcore
