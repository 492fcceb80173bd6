# SPDX-License-Identifier: Apache-2.0
"""Reads the layers of a model from its Hugging Face ``config.json``."""
