# SPDX-License-Identifier: Apache-2.0
"""Native code that runs per request and per step, in Cython.

Four extension modules; each needs only the modules in front of it. ``contexts`` reads what callers
pass: tokens, extra keys, contexts. ``tree`` is the prefix tree without a manager, with the keys of
pages. ``engine`` has the verbs of a manager. ``snapshots`` moves cached pages out and in.
"""
