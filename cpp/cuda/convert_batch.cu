// SPDX-License-Identifier: Apache-2.0
#include "convert_batch.hpp"
