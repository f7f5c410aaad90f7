"""Run kernels compiled for WebAssembly, in Node."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from bnncc.codegen import bare, link, wasm_text
from bnncc.codegen.pipeline import tvm_target
from bnncc.targets.spec import TargetSpec

NODE = shutil.which("node")
CAN_RUN = NODE is not None and link.available("wasm32")
needs_node = pytest.mark.skipif(
    not CAN_RUN, reason="needs node, and wasm-ld or ziglang (packages nodejs, lld)"
)

_SERVER = """\
const fs = require("node:fs");
const read = (size) => {
  const data = Buffer.alloc(size);
  for (let at = 0; at < size; ) {
    const got = fs.readSync(0, data, at, size - at);
    if (!got) process.exit(0);
    at += got;
  }
  return data;
};
const number = () => read(4).readUInt32LE();
const env = { ENV };
const bytes = read(number());
const { exports } = new WebAssembly.Instance(new WebAssembly.Module(bytes), { env });
for (;;) {
  const { name, sizes, repeat } = JSON.parse(read(number()));
  let end = exports.__heap_base.value;
  const places = sizes.map((size) => {
    end = Math.ceil(end / 64) * 64 + size;
    return end - size;
  });
  const missing = end - exports.memory.buffer.byteLength;
  if (missing > 0) exports.memory.grow(Math.ceil(missing / 65536));
  const memory = new Uint8Array(exports.memory.buffer);
  sizes.forEach((size, i) => memory.set(read(size), places[i]));
  let code = 0, best = Infinity;
  try {
    for (let i = 0; i < repeat; ++i) {
      const start = performance.now();
      code = exports[name](...places);
      best = Math.min(best, performance.now() - start);
    }
  } catch (error) {
    process.stderr.write(`${error}\\n`);
    code = 1;
  }
  const head = Buffer.alloc(12);
  head.writeInt32LE(code);
  head.writeDoubleLE(best, 4);
  const all = [head, ...sizes.map((size, i) => memory.subarray(places[i], places[i] + size))];
  for (const part of all) for (let at = 0; at < part.length; ) at += fs.writeSync(1, part, at);
}
"""


class Module:
    """Compiled kernels, called as those of ``tvm.compile`` are; use it as a context, or `close`.

    Parameters
    ----------
    functions : dict of str to PrimFunc
        Scheduled.
    target : TargetSpec
        One of WebAssembly.
    """

    def __init__(self, functions: dict[str, Any], target: TargetSpec) -> None:
        made = {name: _dense(func) for name, func in functions.items()}
        content, self._scratch, *_ = bare.build(made, tvm_target(target))
        wasm = link.link_wasm(content, exports=list(functions), imports=wasm_text.FUNCTIONS)
        env = ", ".join(f"{name}: {text}" for name, text in wasm_text.FUNCTIONS.items())
        command = [NODE, "--no-liftoff", "-e", _SERVER.replace("ENV", env)]
        self._node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(wasm)
        self.milliseconds = 0.0

    def __enter__(self) -> Module:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End Node."""
        for stream in (self._node.stdin, self._node.stdout):
            stream.close()
        self._node.wait(60)

    def __del__(self) -> None:
        """End Node with the module."""
        if hasattr(self, "_node"):
            self.close()

    def __getitem__(self, name: str) -> Any:
        def call(*tensors: Any) -> None:
            arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
            self.call(name, arrays)
            for tensor, array in zip(tensors, arrays, strict=True):
                tensor.copyfrom(array)

        return call

    def call(self, name: str, arrays: list[np.ndarray], repeat: int = 1) -> None:
        """Call a kernel; results are written to `arrays`."""
        room = np.full(max(self._scratch[name], 1), 0x5A, np.uint8)
        every = [*arrays, room]
        sizes = [array.nbytes for array in every]
        self._send(json.dumps({"name": name, "sizes": sizes, "repeat": repeat}).encode())
        for array in every:
            self._node.stdin.write(array.tobytes())
        self._node.stdin.flush()
        head = self._node.stdout.read(12)
        for array in every:
            raw = self._node.stdout.read(array.nbytes)
            array[...] = np.frombuffer(raw, array.dtype).reshape(array.shape)
        self.milliseconds = float(np.frombuffer(head[4:], "<f8")[0])
        if int.from_bytes(head[:4], "little"):
            raise RuntimeError("the kernel returned an error")

    def _send(self, data: bytes) -> None:
        self._node.stdin.write(len(data).to_bytes(4, "little") + data)
        self._node.stdin.flush()


def _dense(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose tensors begin where their pointers point, without gaps."""

    def dense(given: Any) -> Any:
        sizes = [int(extent) for extent in given.shape] if given.strides else []
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        return tirx.decl_buffer(given.shape, str(given.dtype), strides=strides or None)

    return func.specialize({given: dense(given) for given in func.params})
