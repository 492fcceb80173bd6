# SPDX-License-Identifier: Apache-2.0
"""Stores below a manager's host tier: load pages from stores, and write pages to them.

`stack` combines the parts: native code loads pages into the host tier, `onload` does so in threads,
`writer` writes pages to the stores. `adapters` call the stores. `records` label pages, so that
kvcore can check pages of stores that do not. `calls` limits the time and the errors of a store.
`options` and `choice` read the arguments of a manager.
"""
