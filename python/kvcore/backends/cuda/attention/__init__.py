# SPDX-License-Identifier: Apache-2.0
"""Attention on pages in GPU memory, in Triton; imported on first use.

``plan`` and ``settings`` do not need Triton.
"""
