# SPDX-License-Identifier: Apache-2.0
"""Attention on pages in the memory of GPUs, in Triton; imported when it is first asked for.

``plan`` and ``settings`` need no Triton, all else does.
"""
