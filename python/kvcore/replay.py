# SPDX-License-Identifier: Apache-2.0
"""Drive the real cache manager with request traffic, in virtual time.

A `Workload` says who asks what and when (`read_trace`, `chat_workload`), a `PoolSettings` how
large the pool is; `replay_admission` and `replay_online` run one against the other and return a
`ReplayReport`, `compare` does so for several eviction policies and pools. `optimum` says what no
policy can exceed. No model runs and no pool is allocated: the manager works on page ids alone. With
tiers below the device it has a pool of tiny pages, and they are real.
"""

from kvcore.apps.replay.admission import replay_admission
from kvcore.apps.replay.belady import Optimum, optimum
from kvcore.apps.replay.chat import ChatSettings, chat_workload
from kvcore.apps.replay.comparison import Comparison, ComparisonRun, compare
from kvcore.apps.replay.groups import GroupReport
from kvcore.apps.replay.online import EngineSettings, replay_online
from kvcore.apps.replay.pool import (
    DEFAULT_POOL_TOKENS,
    MOST_REPLICAS,
    POLICIES,
    PoolError,
    PoolSettings,
)
from kvcore.apps.replay.report import ReplayReport
from kvcore.apps.replay.routed import MOST_ROUTED, RoutingReport, replay_routed
from kvcore.apps.replay.tiers import TierReport
from kvcore.apps.replay.timeline import Timeline, TimelineBins
from kvcore.apps.replay.trace import TraceError, read_trace
from kvcore.apps.replay.uses import PageUses, PageUsesError, page_uses
from kvcore.apps.replay.workload import Workload

__all__ = [
    "DEFAULT_POOL_TOKENS",
    "MOST_REPLICAS",
    "MOST_ROUTED",
    "POLICIES",
    "ChatSettings",
    "Comparison",
    "ComparisonRun",
    "EngineSettings",
    "GroupReport",
    "Optimum",
    "PageUses",
    "PageUsesError",
    "PoolError",
    "PoolSettings",
    "ReplayReport",
    "RoutingReport",
    "TierReport",
    "Timeline",
    "TimelineBins",
    "TraceError",
    "Workload",
    "chat_workload",
    "compare",
    "optimum",
    "page_uses",
    "read_trace",
    "replay_admission",
    "replay_online",
    "replay_routed",
]
