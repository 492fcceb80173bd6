# SPDX-License-Identifier: Apache-2.0
"""The command line, one module per command; `kvcore.__main__` starts `main.main`."""
