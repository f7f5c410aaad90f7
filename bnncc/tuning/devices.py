"""How many devices there are to measure on."""

from __future__ import annotations

from typing import Any

from bnncc.errors import DeviceError
from bnncc.remote.connection import parse_address, summary


def free_devices(device: dict[str, Any] | None) -> int:
    """Return how many processes can measure at a time.

    Parameters
    ----------
    device : dict or None
        Arguments of `bnncc.remote.connect`; None for this machine, where it is one.

    Returns
    -------
    int
        All devices that a tracker knows of the kind, busy or not.

    Raises
    ------
    DeviceError
        If the tracker knows none, or is not there.
    """
    if device is None or device.get("tracker") is None:
        return 1
    address = parse_address(str(device["tracker"]))
    keys = summary(address)
    count = keys.count(str(device["key"]))
    if not count:
        raise DeviceError(
            f"tracker {address} has no device with key `{device['key']}`",
            hint=f"it has: {', '.join(sorted(set(keys))) or 'none'}",
        )
    return count
