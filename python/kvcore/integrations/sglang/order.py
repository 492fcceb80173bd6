# SPDX-License-Identifier: Apache-2.0
"""In which order waiting requests share most: SGLang's schedule policy dfs-weight."""

from __future__ import annotations


def dfs_weight_order(paths: list[list[int]]) -> list[int]:
    """Return the indices of requests as a walk meets their prefixes, given by page ids.

    Of the ways on from a prefix those of more requests come first, its own requests last.
    """
    order: list[int] = []
    # Requests, how many pages they are known to share, and whether nothing is left to be walked.
    left: list[tuple[list[int], int, bool]] = [([*range(len(paths))], 0, False)]
    while left:
        members, depth, is_walked = left.pop()
        if is_walked or len(members) < 2:
            order += members
            continue
        group = [paths[each] for each in members]
        shortest = min(map(len, group))
        while depth < shortest and len({path[depth] for path in group}) == 1:
            depth += 1
        ways: dict[tuple[int, ...], list[int]] = {}
        for each in members:
            ways.setdefault(tuple(paths[each][depth : depth + 1]), []).append(each)
        left.append((ways.pop((), []), depth, True))
        ranked = sorted(ways.values(), key=len, reverse=True)
        left += [(way, depth + 1, False) for way in reversed(ranked)]
    return order
