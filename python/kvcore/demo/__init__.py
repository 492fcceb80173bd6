# SPDX-License-Identifier: Apache-2.0
"""Serve chats with a small model through the real manager and kernels."""

from __future__ import annotations

from kvcore.demo.chats import Chat, ChatSettings, make_chats
from kvcore.demo.check import Check, check
from kvcore.demo.engine import EngineSettings
from kvcore.demo.model import Shape, Transformer
from kvcore.demo.protocol import LanguageModel
from kvcore.demo.report import DemoReport, RunReport
from kvcore.demo.run import Watcher, run_demo
from kvcore.demo.serve import ChatServer
from kvcore.demo.served import Served
from kvcore.demo.settings import DemoSettings

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
