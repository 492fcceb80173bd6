# SPDX-License-Identifier: Apache-2.0
"""Drive the real cache manager with request traffic, in virtual time.

A `Workload` is a list of requests with their times (`read_trace`, `chat_workload`). A
`PoolSettings` has the size of the pool. `replay_admission` and `replay_online` run a workload on a
pool and return a `ReplayReport`. `compare` runs several eviction policies and pools. `optimum`
returns the upper bound of all policies. No model runs and no pool is allocated: the manager works
on page ids only. With lower tiers, the manager has a real pool of tiny pages, and real tiers.
"""

from kvcore.apps.replay.admission import replay_admission
from kvcore.apps.replay.advised import AdviceCheck, CheckedRate, check_advice
from kvcore.apps.replay.belady import Optimum, optimum
from kvcore.apps.replay.chat import ChatSettings, chat_workload
from kvcore.apps.replay.comparison import Comparison, ComparisonRun, TierSizes, compare
from kvcore.apps.replay.decision import Decision
from kvcore.apps.replay.groups import GroupReport
from kvcore.apps.replay.model_pools import model_pool, with_checkpoints, with_host_tier
from kvcore.apps.replay.online import EngineSettings, replay_online
from kvcore.apps.replay.pool import (
    DEFAULT_POOL_TOKENS,
    MOST_REPLICAS,
    POLICIES,
    PoolError,
    PoolSettings,
)
from kvcore.apps.replay.report import HitTokens, ReplayReport
from kvcore.apps.replay.routed import MOST_ROUTED, RoutingReport, replay_routed
from kvcore.apps.replay.states import StateReport
from kvcore.apps.replay.tiers import TierReport
from kvcore.apps.replay.timeline import Timeline, TimelineBins
from kvcore.apps.replay.uses import PageUses, PageUsesError, page_uses
from kvcore.apps.replay.workload import Workload
from kvcore.apps.traces.errors import TraceError
from kvcore.apps.traces.formats import FORMATS
from kvcore.apps.traces.read import read_trace

TRACE_FORMATS = tuple(FORMATS)

__all__ = [
    "DEFAULT_POOL_TOKENS",
    "MOST_REPLICAS",
    "MOST_ROUTED",
    "POLICIES",
    "TRACE_FORMATS",
    "AdviceCheck",
    "ChatSettings",
    "CheckedRate",
    "Comparison",
    "ComparisonRun",
    "Decision",
    "EngineSettings",
    "GroupReport",
    "HitTokens",
    "Optimum",
    "PageUses",
    "PageUsesError",
    "PoolError",
    "PoolSettings",
    "ReplayReport",
    "RoutingReport",
    "StateReport",
    "TierReport",
    "TierSizes",
    "Timeline",
    "TimelineBins",
    "TraceError",
    "Workload",
    "chat_workload",
    "check_advice",
    "compare",
    "model_pool",
    "optimum",
    "page_uses",
    "read_trace",
    "replay_admission",
    "replay_online",
    "replay_routed",
    "with_checkpoints",
    "with_host_tier",
]
