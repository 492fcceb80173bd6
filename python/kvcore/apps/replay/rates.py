# SPDX-License-Identifier: Apache-2.0
"""Turn counts of tokens and pages into hit rates."""

from __future__ import annotations

__all__ = ["HIT_RATES", "HitRates"]

HIT_RATES = ("token_hit_rate", "served_token_hit_rate", "page_hit_rate")


class HitRates:
    """Base class of reports: hit rates from counts of tokens and pages."""

    cached_tokens: int
    prompt_tokens: int
    served_prompt_tokens: int
    cached_pages: int
    prompt_pages: int

    @property
    def token_hit_rate(self) -> float:
        """Fraction of prompt tokens found in the cache; tokens of refused requests are misses."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def served_token_hit_rate(self) -> float:
        """Fraction of the prompt tokens of served requests found in the cache."""
        return self.cached_tokens / self.served_prompt_tokens if self.served_prompt_tokens else 0.0

    @property
    def page_hit_rate(self) -> float:
        """Fraction of prompt pages found in the cache as whole pages."""
        return self.cached_pages / self.prompt_pages if self.prompt_pages else 0.0
