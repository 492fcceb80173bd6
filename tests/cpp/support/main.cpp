// SPDX-License-Identifier: Apache-2.0
// The program of a room that needs nothing else.
#include "support/check.hpp"

int main(int count, char** words) { return check::run_cases(count, words); }
