# SPDX-License-Identifier: Apache-2.0
"""Which worker of a cluster has how much of a prompt, and who is to run it."""

from kvcore.routing.index import PrefixIndex
from kvcore.routing.router import POLICIES, Router

__all__ = ["POLICIES", "PrefixIndex", "Router"]
