// SPDX-License-Identifier: Apache-2.0
// Every kernel of kvcore::cuda with lanes that run on the CPU.
#include "../digest.hpp"
#include "../fill.hpp"
#include "../pages.hpp"
#include "../step.hpp"
#include "../tokens.hpp"
