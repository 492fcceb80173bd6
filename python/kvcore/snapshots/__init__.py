# SPDX-License-Identifier: Apache-2.0
"""Requests and prefix caches as bytes: files, pickles, and how a manager reads them again."""
