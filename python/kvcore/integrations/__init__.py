# SPDX-License-Identifier: Apache-2.0
"""Other people's engines on kvcore: one subpackage each, none imported by kvcore itself."""
