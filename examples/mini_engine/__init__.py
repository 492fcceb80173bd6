# SPDX-License-Identifier: Apache-2.0
"""A small LLM engine on kvcore: see README.md in this folder."""
