# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests share most pages: SGLang's schedule policy dfs-weight."""

from __future__ import annotations


def dfs_weight_order(paths: list[list[int]]) -> list[int]:
    """Return the indices of requests in the order of a walk over their paths of page ids.

    After a prefix, the branch with the most requests comes first. Requests whose path ends at the
    prefix come last.
    """
    order: list[int] = []
    # Entries: requests, the number of pages they are known to share, true after the walk below.
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
