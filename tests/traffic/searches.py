# SPDX-License-Identifier: Apache-2.0
"""Settings of the state machines, as shares of the search of the Hypothesis profile."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def machine_settings(*, steps: int, examples: int = 100) -> settings:
    """Search `examples` runs of `steps` steps under the profile ``long``.

    Other profiles search the same share of their own examples and steps (tests/conftest.py).
    """
    profile = settings()
    return settings(
        max_examples=max(1, profile.max_examples * examples // 100),
        stateful_step_count=profile.stateful_step_count * steps // 50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
