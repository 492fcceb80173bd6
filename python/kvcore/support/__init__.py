# SPDX-License-Identifier: Apache-2.0
"""What every other room uses: checks of arguments, dtypes, sizes as text, threads."""
