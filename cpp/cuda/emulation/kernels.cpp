// SPDX-License-Identifier: Apache-2.0
// Every kernel of kvcore::cuda with lanes that run on the CPU.
#include "../arrays.hpp"
#include "../convert_batch.hpp"
#include "../convert_widen.hpp"
#include "../digest.hpp"
#include "../fill.hpp"
#include "../merge.hpp"
#include "../packed.hpp"
#include "../pages.hpp"
#include "../quantize.hpp"
#include "../quantize_runs.hpp"
#include "../step.hpp"
#include "../tokens.hpp"
