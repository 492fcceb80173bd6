# SPDX-License-Identifier: Apache-2.0
"""Turn counts of tokens and pages into hit rates."""

from __future__ import annotations

__all__ = ["HIT_RATES", "HitRates"]

HIT_RATES = ("token_hit_rate", "served_token_hit_rate", "page_hit_rate")


class HitRates:
    """Give whoever counts tokens and pages the rates of them."""

    cached_tokens: int
    prompt_tokens: int
    served_prompt_tokens: int
    cached_pages: int
    prompt_pages: int

    @property
    def token_hit_rate(self) -> float:
        """Fraction of prompt tokens found in the cache; those of refused requests are not."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def served_token_hit_rate(self) -> float:
        """The same of the served requests alone."""
        return self.cached_tokens / self.served_prompt_tokens if self.served_prompt_tokens else 0.0

    @property
    def page_hit_rate(self) -> float:
        """Fraction of prompt pages found in the cache as whole pages."""
        return self.cached_pages / self.prompt_pages if self.prompt_pages else 0.0
