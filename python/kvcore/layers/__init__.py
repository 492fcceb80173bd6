# SPDX-License-Identifier: Apache-2.0
"""Which layers keep which tokens: kinds of layers, pages that layers share, configs of models."""
