"""Run networks on other machines.

`bnncc.remote.connect` returns a `bnncc.remote.Device`, on which `bnncc.Artifact.load` can put a
network.
"""

from __future__ import annotations

from bnncc.remote.network import Device, check_where, connect

__all__ = ["Device", "check_where", "connect"]
