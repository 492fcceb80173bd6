// SPDX-License-Identifier: Apache-2.0
// The main function of test programs that need no other.
#include "support/check.hpp"

int main(int count, char** words) { return check::run_cases(count, words); }
