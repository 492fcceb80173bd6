# SPDX-License-Identifier: Apache-2.0
"""The tokens that each layer keeps: kinds of layers, pages that layers share, model configs."""
