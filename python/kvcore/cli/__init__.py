# SPDX-License-Identifier: Apache-2.0
"""The command line, one module per command; `kvcore.cli.main.main` is the entry point."""
