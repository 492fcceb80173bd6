# SPDX-License-Identifier: Apache-2.0
"""Requests and prefix caches as bytes: files and pickles, and the code that reads them back."""
