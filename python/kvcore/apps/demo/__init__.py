# SPDX-License-Identifier: Apache-2.0
"""Serve chats with a small model, through the real manager and kernels."""

from __future__ import annotations

from kvcore.apps.demo.chats import Chat, ChatSettings, make_chats
from kvcore.apps.demo.check import Check, check
from kvcore.apps.demo.engine import EngineSettings
from kvcore.apps.demo.model import Shape, Transformer
from kvcore.apps.demo.protocol import LanguageModel
from kvcore.apps.demo.report import DemoReport, RunReport
from kvcore.apps.demo.run import Watcher, run_demo
from kvcore.apps.demo.serve import ChatServer
from kvcore.apps.demo.served import Served
from kvcore.apps.demo.settings import DemoSettings

__all__ = [
    "Chat",
    "ChatServer",
    "ChatSettings",
    "Check",
    "DemoReport",
    "DemoSettings",
    "EngineSettings",
    "LanguageModel",
    "RunReport",
    "Served",
    "Shape",
    "Transformer",
    "Watcher",
    "check",
    "make_chats",
    "run_demo",
]
