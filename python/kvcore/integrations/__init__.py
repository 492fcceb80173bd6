# SPDX-License-Identifier: Apache-2.0
"""Adapters for other engines: one subpackage for each engine, imported only on demand."""
