# SPDX-License-Identifier: Apache-2.0
"""Evaluate the expressions of docs/grafana.json over scrapes: the part of PromQL that they use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

#: Samples of a scrape, by name and labels.
Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]
#: Labels and values; a number is one without labels.
Vector = dict[tuple[tuple[str, str], ...], float]

_TOKEN = re.compile(r'\s*([A-Za-z_]\w*|[\d.]+|"[^"]*"|=~|[-+/(){}\[\],=])')


def evaluate(expression: str, scrapes: Sequence[Scrape], seconds: float) -> Vector:
    """Return what an expression is at the last of `scrapes`, which lie `seconds` apart.

    A rate is that between the first and the last of them.
    """
    plain = expression.replace("$__rate_interval", "0")
    tokens = _TOKEN.findall(plain)
    assert "".join(tokens) == re.sub(r"\s+", "", plain), expression
    reader = _Reader(tokens, scrapes, seconds * (len(scrapes) - 1))
    found = reader.sum()
    assert reader.at == len(tokens), expression
    return found


class _Reader:
    """Read the tokens of an expression from left to right, and evaluate it."""

    def __init__(self, tokens: list[str], scrapes: Sequence[Scrape], span: float) -> None:
        self._tokens, self._scrapes, self._span = tokens, scrapes, span
        self.at = 0

    def _take(self, *wanted: str) -> str:
        token = self._tokens[self.at]
        assert not wanted or token in wanted, (token, wanted)
        self.at += 1
        return token

    def _is_next(self, *wanted: str) -> bool:
        return self.at < len(self._tokens) and self._tokens[self.at] in wanted

    def sum(self) -> Vector:
        left = self._quotient()
        while self._is_next("+", "-"):
            sign = 1 if self._take() == "+" else -1
            right = self._quotient()
            left = _matched(left, right, lambda a, b, sign=sign: a + sign * b)
        return left

    def _quotient(self) -> Vector:
        left = self._term()
        while self._is_next("/"):
            self._take()
            left = _matched(left, self._term(), lambda a, b: a / b if b else math.nan)
        return left

    def _term(self) -> Vector:
        token = self._take()
        if token == "(":
            found = self.sum()
            self._take(")")
            return found
        if token in ("sum", "max"):
            return self._gathered(sum if token == "sum" else max)
        if token == "histogram_quantile":
            self._take("(")
            share = float(self._take())
            self._take(",")
            found = self.sum()
            self._take(")")
            return _quantile(share, found)
        if token in ("rate", "increase"):
            self._take("(")
            found = self._selected(self._take(), is_range=True)
            self._take(")")
            span = self._span if token == "rate" else 1.0
            return {labels: value / span for labels, value in found.items()}
        if token == "scalar":
            self._take("(")
            (value,) = self.sum().values()
            self._take(")")
            return {(("", "scalar"),): value}
        return self._selected(token, is_range=False)

    def _gathered(self, gather: Callable[[Sequence[float]], float]) -> Vector:
        kept: list[str] = []
        if self._is_next("by"):
            self._take()
            self._take("(")
            while not self._is_next(")"):
                kept.append(self._take())
                if self._is_next(","):
                    self._take()
            self._take(")")
        self._take("(")
        found = self.sum()
        self._take(")")
        parts: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for labels, value in found.items():
            parts.setdefault(tuple(each for each in labels if each[0] in kept), []).append(value)
        return {labels: gather(values) for labels, values in parts.items()}

    def _selected(self, name: str, *, is_range: bool) -> Vector:
        wanted: list[tuple[str, str]] = []
        self._take("{")
        while not self._is_next("}"):
            label, how, value = self._take(), self._take(), self._take().strip('"')
            if how == "=":
                wanted.append((label, value))
            if self._is_next(","):
                self._take()
        self._take("}")
        if is_range:
            for token in "[0]":
                self._take(token)
        first, last = self._scrapes[0], self._scrapes[-1]
        return {
            key[1]: value - (first.get(key, 0.0) if is_range else 0.0)
            for key, value in last.items()
            if key[0] == name and all(each in key[1] for each in wanted)
        }


def _matched(left: Vector, right: Vector, join: Callable[[float, float], float]) -> Vector:
    scalar = right.get((("", "scalar"),))
    if scalar is not None:
        return {labels: join(value, scalar) for labels, value in left.items()}
    return {labels: join(value, right[labels]) for labels, value in left.items() if labels in right}


def _quantile(share: float, buckets: Vector) -> Vector:
    """Return where a share of the calls lies, as if they were spread evenly in each bucket."""
    upto = sorted((float(dict(labels)["le"]), value) for labels, value in buckets.items())
    total = upto[-1][1] if upto else 0.0
    if total == 0.0:
        return {(): math.nan}
    low, below = 0.0, 0.0
    for bound, calls in upto:
        if calls >= share * total:
            if math.isinf(bound):
                return {(): low}
            part = (share * total - below) / (calls - below)
            return {(): low + (bound - low) * part}
        low, below = bound, calls
    return {(): low}
