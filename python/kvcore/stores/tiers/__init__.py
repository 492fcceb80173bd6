# SPDX-License-Identifier: Apache-2.0
"""Stores below a manager's host tier: who asks which of them, what is written, and what counts.

`stack` puts it together: `reader` brings pages with what `depths` and `flights` know, `writer`
writes them, `adapters` use the stores, `records` are what kvcore checks pages by where a store does
not, and `calls` bound what a store may cost. `options` and `choice` read a manager's arguments,
`methods` are those that it gets.
"""
