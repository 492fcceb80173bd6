# SPDX-License-Identifier: Apache-2.0
"""Drive the real cache manager with request traffic, in virtual time.

A `Workload` says who asks what and when (`read_trace`, `chat_workload`), a `PoolSettings` how
large the pool is; `replay_admission` and `replay_online` run one against the other and return a
`ReplayReport`, `compare` does so for several eviction policies and pools. `optimum` says what no
policy can exceed. No model runs and no pool is allocated: the manager works on page ids alone. With
tiers below the device it has a pool of tiny pages, and they are real.
"""

from kvcore.replay.admission import replay_admission
from kvcore.replay.belady import Optimum, optimum
from kvcore.replay.chat import ChatSettings, chat_workload
from kvcore.replay.comparison import Comparison, ComparisonRun, compare
from kvcore.replay.groups import GroupReport
from kvcore.replay.online import EngineSettings, replay_online
from kvcore.replay.pool import (
    DEFAULT_POOL_TOKENS,
    MOST_REPLICAS,
    POLICIES,
    PoolError,
    PoolSettings,
)
from kvcore.replay.report import ReplayReport
from kvcore.replay.routed import MOST_ROUTED, RoutingReport, replay_routed
from kvcore.replay.tiers import TierReport
from kvcore.replay.timeline import Timeline, TimelineBins
from kvcore.replay.trace import TraceError, read_trace
from kvcore.replay.uses import PageUses, PageUsesError, page_uses
from kvcore.replay.workload import Workload

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
