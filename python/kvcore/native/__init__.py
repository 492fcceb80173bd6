# SPDX-License-Identifier: Apache-2.0
"""Native code that runs per request and per step, in Cython.

Four extension modules; each needs only the modules before it in this list. ``contexts`` reads
arguments: tokens, extra keys, contexts. ``tree`` has the prefix tree without a manager and the keys
of pages. ``engine`` has the methods of a manager. ``snapshots`` exports and imports cached pages.
"""
