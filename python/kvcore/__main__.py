# SPDX-License-Identifier: Apache-2.0
"""Run the command line: ``python -m kvcore`` is the same program as ``kvcore``."""

import sys

from kvcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
