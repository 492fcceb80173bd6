# SPDX-License-Identifier: Apache-2.0
"""Helpers of all other packages: argument checks, dtypes, sizes as text, threads."""
