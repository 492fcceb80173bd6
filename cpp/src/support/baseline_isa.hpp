// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <string_view>

namespace kvcore {

/// True if the environment variable KVCORE_ISA asks for code that every processor runs.
[[nodiscard]] inline bool wants_baseline_isa() noexcept {
    const char* asked = std::getenv("KVCORE_ISA");
    return asked != nullptr && std::string_view(asked) == "baseline";
}

}  // namespace kvcore
