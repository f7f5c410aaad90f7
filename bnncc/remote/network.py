"""Networks on devices: TVM's RPC, to the server of `bnncc device-kit` or to TVM's own.

Only the first tells what it is, so that what it cannot run is refused before anything is sent,
counts threads, and times kernels alone.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bnncc.errors import ArtifactError, DeviceError, UsageError
from bnncc.remote.connection import Link, open_session, parse_address, request
from bnncc.runtime import container, manifest
from bnncc.runtime.manifest import TensorInfo
from bnncc.runtime.session import CopyingSession, check_failed
from bnncc.targets import host
from bnncc.targets.host import normal_arch

TIMEOUT = 300.0
"""Seconds of silence of a device that owes an answer, after which it is given up."""

_CRASH = re.compile(r"bnncc: the session (crashed: [^\n]*|took longer[^\n]*)")
_SECONDS_A_CALL = 10.0


def connect(
    rpc: str | None = None,
    *,
    tracker: str | None = None,
    key: str | None = None,
    timeout: float = TIMEOUT,
) -> Device:
    """Open a session on a device.

    Parameters
    ----------
    rpc : str, optional
        ``HOST:PORT`` of the device.
    tracker : str, optional
        ``HOST:PORT`` of a TVM RPC tracker that lists it. Give either `rpc` or `tracker`.
    key : str, optional
        Key of the device at the tracker, or key that its server was started with.
    timeout : float
        Seconds to wait for a busy device of a tracker, and for each answer.

    Raises
    ------
    DeviceError
        If it is missing or busy, or is not a device.
    UsageError
        If the address is wrong, or none or several are given.
    """
    check_where(rpc, tracker=tracker, key=key, timeout=timeout)
    if host.system() == "windows":  # whose processes inherit no connection by its number
        raise DeviceError(
            "devices cannot be reached from Windows", hint="use Linux, macOS or WSL for them"
        )
    if rpc is not None:
        address = parse_address(rpc)
        sock = open_session(address, key or "")
    else:
        address, match = request(parse_address(str(tracker)), str(key), timeout)
        sock = open_session(address, match, from_tracker=True)
    return Device(str(address), Link(sock, timeout))


def check_where(
    rpc: str | None = None,
    *,
    tracker: str | None = None,
    key: str | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Check that arguments of `connect` name one device, without looking for it.

    Parameters
    ----------
    rpc, tracker, key, timeout
        As in `connect`.

    Raises
    ------
    UsageError
        If they do not.
    """
    if (rpc is None) == (tracker is None):
        raise UsageError("a device needs either an address (--rpc) or a tracker (--tracker)")
    if not isinstance(timeout, int | float):
        raise UsageError(f"timeout is of type {type(timeout).__name__}, expected seconds")
    if timeout <= 0:
        raise UsageError(f"timeout is {timeout:g}, expected seconds above 0")
    if tracker is not None and key is None:
        raise UsageError("--tracker needs --key, the key of the device to request")


class Device:
    """A session on a device; a context manager that ends the session.

    Made by `connect`.

    Attributes
    ----------
    address : str
        For messages.
    info : dict
        What the device reports: ``machine``, ``cpu``, ``features``, ``tvm``, ``cpus``; empty if
        its server is TVM's own.
    """

    def __init__(self, address: str, link: Link) -> None:
        self.address = address
        self._link = link
        self._loaded = 0
        self._threads = 0
        try:
            with self.speaking("saying hello"):
                from tvm import rpc

                self._rpc = rpc.connect("127.0.0.1", link.port, key=link.key)
            self.info = self._describe()
        except BaseException:
            link.close()
            raise

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session, and unload what was loaded on the device."""
        self._link.close()

    @property
    def processor(self) -> str:
        """The model of its processor, or ``unknown``."""
        return str(self.info.get("cpu", "unknown"))

    @property
    def cpu(self) -> Any:
        """Its memory, as TVM names it."""
        return self._rpc.cpu()

    def check(self, content: dict[str, Any], path: str) -> None:
        """Refuse an artifact that the device cannot run, as `manifest.check_machine` does.

        Parameters
        ----------
        content : dict
            The artifact's manifest.
        path : str
            The artifact, for messages.
        """
        if self.info:
            machine = manifest.Machine(
                f"the device at {self.address}",
                normal_arch(str(self.info["machine"])),
                frozenset(str(self.info["features"]).split()),
                str(self.info["tvm"]),
            )
            manifest.check_machine(content, path, machine)

    def set_threads(self, count: int) -> None:
        """Choose how many threads kernels use: as many as at first, or fewer.

        Parameters
        ----------
        count : int
            TVM uses no more than the device has CPUs.
        """
        if self._threads == count:
            return
        if self.info:
            self._call("choosing threads", "bnncc.set_threads", count)
        self._call("choosing threads", "runtime.config_threadpool", 1, count)
        self._threads = count

    def load(self, library: bytes) -> Any:
        """Upload and load ``lib.so``.

        Returns
        -------
        tvm.runtime.Module
            On the device.

        Raises
        ------
        ArtifactError
            If the device cannot load it.
        DeviceError
            If it is lost.
        """
        self._loaded += 1
        name = f"{self._loaded}.{container.LIBRARY}"
        with self.speaking("uploading"):
            self._rpc.upload(bytearray(library), name)
        try:
            with self.speaking("loading"):
                module = self._rpc.load_module(name)
        except DeviceError as error:
            if self._link.lost:
                raise
            raise ArtifactError(
                str(error), hint="is the artifact for the architecture of the device?"
            ) from error
        with contextlib.suppress(DeviceError), self.speaking("removing the file"):
            self._rpc.remove(name)  # loaded, it is no longer needed
        return module

    def session(
        self, module: Any, inputs: tuple[TensorInfo, ...], *, check_finite: bool
    ) -> RemoteSession:
        """Return a virtual machine on the device.

        Parameters
        ----------
        module : tvm.runtime.Module
            From `load`.
        inputs : tuple of TensorInfo
            Of the network.
        check_finite : bool
            Refuse NaN and infinities.
        """
        return RemoteSession(self, module, inputs, check_finite=check_finite)

    @contextlib.contextmanager
    def speaking(self, doing: str) -> Iterator[None]:
        """Turn errors of TVM in this context into one line about the device.

        Parameters
        ----------
        doing : str
            What the device is asked for, as in "while ...".

        Raises
        ------
        DeviceError
            If it fails.
        InputError
            If an index or a divisor computed from the inputs is none.
        """
        try:
            yield
        except (RuntimeError, AttributeError, OSError, ValueError) as error:
            if (found := check_failed(error)) is not None:
                raise found from error
            text = str(error).strip()
            if crash := _CRASH.search(text):
                raise DeviceError(
                    f"{self.address}: the session {crash[1]}, while {doing}",
                    hint="the device is free again; an illegal instruction means that its processor"
                    " lacks a feature of the artifact's target",
                ) from error
            if self._link.lost:
                raise DeviceError(
                    f"{self.address}: lost the device while {doing}: {self._link.lost}",
                    hint="see the output of its server",
                ) from error
            line = text.splitlines()[-1] if text else type(error).__name__
            raise DeviceError(f"{self.address}: {doing} failed: {line[:300]}") from error

    def _describe(self) -> dict[str, Any]:
        try:
            with self.speaking("describing itself"):
                info = json.loads(self._rpc.get_function("bnncc.device_info")())
        except DeviceError:
            if self._link.lost:
                raise
            return {}  # TVM's own server
        if not isinstance(info, dict) or not {"machine", "features", "tvm"} <= info.keys():
            raise DeviceError(f"{self.address}: sends a description that bnncc cannot read")
        return info

    def _call(self, doing: str, function: str, *args: Any) -> Any:
        with self.speaking(doing):
            return self._rpc.get_function(function)(*args)


class RemoteSession(CopyingSession):
    """A virtual machine on a device, made by `Device.session`."""

    def __init__(
        self, device: Device, module: Any, inputs: tuple[TensorInfo, ...], *, check_finite: bool
    ) -> None:
        self._device = device
        with device.speaking("starting the network"):
            super().__init__(module, inputs, check_finite=check_finite, cpu=device.cpu)
        self.main = self._run
        self.times_kernels = bool(device.info)

    def _run(self, *tensors: Any) -> Any:
        with self._device.speaking("running the network"):
            self.vm.set_input("main", *tensors)
            self.vm.invoke_stateful("main")
            return self.vm.get_outputs("main")

    def use_threads(self) -> int:
        """Have the device use `threads`, and return how many it uses."""
        if self.threads is not None:
            self._device.set_threads(self.threads)
        return int(self._device._call("counting threads", "runtime.NumThreads"))

    def tensors(self, arrays: Any) -> list[Any]:
        """Return `arrays` as checked tensors on the device."""
        with self._device.speaking("sending inputs"):
            return super().tensors(arrays)

    def arrays(self, result: Any) -> list[np.ndarray]:
        """Return what `main` returned as arrays."""
        with self._device.speaking("sending outputs"):
            return super().arrays(result)

    def time_network(self, tensors: list[Any], repeat: int) -> np.ndarray:
        """Time the network by the device's clock, without the network round trip."""
        self._run(*tensors)
        times: list[float] = []
        with self._device.speaking("timing the network"):
            count = 1
            while len(times) < repeat:
                timer = self.vm.time_evaluator("invoke_stateful", self.cpu, number=1, repeat=count)
                times.extend(timer("main").results)
                most = int(_SECONDS_A_CALL / max(times[-1], 1e-9))  # it must not seem lost
                count = max(1, min(repeat - len(times), most))
        return np.array(times[-repeat:]) * 1e6

    def time_kernel(self, name: str, arguments: Sequence[np.ndarray | int]) -> np.ndarray:
        """Time a kernel by the device's own clock."""
        with self._device.speaking(f"timing `{name}`"):
            return super().time_kernel(name, arguments)

    def run_kernel(
        self, name: str, arguments: Sequence[np.ndarray | int]
    ) -> list[np.ndarray | int]:
        """Run one kernel alone, on the device."""
        with self._device.speaking(f"running `{name}`"):
            return super().run_kernel(name, arguments)

    def _library_of(self, kernel: str) -> Any:
        return self._device._call(
            f"looking for `{kernel}`", "bnncc.kernel_owner", self.module, kernel
        )
