// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kvcore/types.hpp"

namespace kvcore {

/// Called when pages begin to be protected, or cease to be.
class ProtectionListener {
   public:
    ProtectionListener() = default;
    ProtectionListener(const ProtectionListener&) = delete;
    ProtectionListener& operator=(const ProtectionListener&) = delete;
    virtual ~ProtectionListener() = default;

    /// Pages [n] of a run.
    virtual void protect(const BlockId* pages, std::int32_t n, bool is_protected) noexcept = 0;
};

}  // namespace kvcore
