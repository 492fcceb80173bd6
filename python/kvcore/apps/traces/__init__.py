# SPDX-License-Identifier: Apache-2.0
"""Read request traces of many formats into one form, and write the form; see `kvcore.replay`."""
