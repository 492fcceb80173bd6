# SPDX-License-Identifier: Apache-2.0
"""A Redis Cluster for one test: masters on free ports of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from redis_server import RedisServer, free_port

_SLOTS = 16_384


class RedisCluster:
    """Masters that share the slots equally; optionally the first master has a replica."""

    def __init__(self, folder: Path, masters: int = 3, *, has_replica: bool = False) -> None:
        self.servers: list[RedisServer] = []
        try:
            self._begin(folder, masters, has_replica=has_replica)
        except BaseException:
            self.kill()
            raise

    def _begin(self, folder: Path, masters: int, *, has_replica: bool) -> None:
        for i in range(masters + has_replica):
            bus = free_port()
            options = (
                *("--cluster-enabled", "yes", "--cluster-config-file", f"nodes{i}.conf"),
                *("--cluster-port", str(bus), "--cluster-node-timeout", "500"),
                *("--cluster-require-full-coverage", "no"),
                *("--cluster-allow-replica-migration", "no"),
            )
            self.servers.append(RedisServer(folder, *options))
            self.servers[0].client().execute_command(
                "CLUSTER", "MEET", "127.0.0.1", self.servers[i].port, bus
            )
        for i, server in enumerate(self.servers[:masters]):
            first, end = i * _SLOTS // masters, (i + 1) * _SLOTS // masters
            server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        self.ids = [each.client().execute_command("CLUSTER", "MYID") for each in self.servers]
        self.wait(lambda: all(self._knows_all(each) for each in self.servers))
        if has_replica:
            self.servers[-1].client().execute_command("CLUSTER", "REPLICATE", self.ids[0])
            self.wait(lambda: self.servers[0].client().info("replication")["connected_slaves"] == 1)
            self.wait(
                lambda: self.servers[-1].client().info("replication")["master_link_status"] == "up"
            )

    def _knows_all(self, server: RedisServer) -> bool:
        found = bytes(server.client().execute_command("CLUSTER", "INFO"))
        return b"cluster_state:ok" in found and b"cluster_slots_ok:%d" % _SLOTS in found

    def wait(self, is_so: Any) -> None:
        ends = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < ends
            time.sleep(0.05)

    @property
    def url(self) -> str:
        """The address of one master."""
        return self.servers[1].url

    def names(self) -> list[list[bytes]]:
        """Return the keys of each master."""
        return [sorted(server.client().keys()) for server in self.servers]

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
