# SPDX-License-Identifier: Apache-2.0
"""In which order waiting requests share most: SGLang's schedule policy dfs-weight."""

from __future__ import annotations


def dfs_weight_order(paths: list[list[int]]) -> list[int]:
    """Return the indices of requests as a walk meets their prefixes, given by page ids.

    Of the ways on from a prefix those of more requests come first, its own requests last.
    """
    order: list[int] = []
    left: list[tuple[list[int], bool]] = [([*range(len(paths))], False)]
    while left:
        members, is_walked = left.pop()
        if is_walked or len(members) < 2:
            order += members
            continue
        group = [paths[each] for each in members]
        columns = enumerate(zip(*group, strict=False))  # as far as the shortest
        depth = next((i for i, pages in columns if len({*pages}) > 1), min(map(len, group)))
        ways: dict[tuple[int, ...], list[int]] = {}
        for each in members:
            ways.setdefault(tuple(paths[each][depth : depth + 1]), []).append(each)
        left.append((ways.pop((), []), True))
        left += [(way, False) for way in sorted(ways.values(), key=len, reverse=True)[::-1]]
    return order
