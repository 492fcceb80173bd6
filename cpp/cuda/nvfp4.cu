// SPDX-License-Identifier: Apache-2.0
#include "nvfp4.hpp"
