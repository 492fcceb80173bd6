// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "oracle/oracle.hpp"

// Results of the oracle and of the manager, as text for failures.

inline std::string to_text(const kvcore::ReservePlan& plan) {
    return "hit " + std::to_string(plan.hit_tokens) + " new " + std::to_string(plan.new_pages) +
           " evicted " + std::to_string(plan.evicted_pages) + " copied " +
           std::to_string(plan.copied_tokens) + " fits " + check::text(plan.fits);
}

inline std::string to_text(const oracle::Option& option) {
    return "hit end " + std::to_string(option.hit_tokens) + " new " +
           std::to_string(option.new_pages()) + " evicted " + std::to_string(option.evicted) +
           " copied " + std::to_string(option.copied) + " start " + std::to_string(option.start) +
           " active " + std::to_string(option.active) + " available " +
           std::to_string(option.available) + " fits " + check::text(option.fits);
}

inline std::string to_text(const std::vector<oracle::Option>& options) {
    std::string out;
    for (const oracle::Option& option : options) out += "\n    or " + to_text(option);
    return out;
}
