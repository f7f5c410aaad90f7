"""Text files of a network in WebAssembly: JavaScript module, types, and check program.

`c_network` determines the layout; this module only writes it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from bnncc._version import __version__
from bnncc.codegen.c_network import CHECK
from bnncc.codegen.c_text import ALIGNMENT, PLACES, Named, Sizes, extents, harmless
from bnncc.targets.spec import TargetSpec

ARRAYS = {
    "float32": "Float32Array", "float64": "Float64Array", "float16": "Uint16Array",
    "bfloat16": "Uint16Array", "bool": "Uint8Array", "int64": "BigInt64Array",
    "uint64": "BigUint64Array",
    **{f"{u}int{n}": f"{(u and 'Ui') or 'I'}nt{n}Array" for u in ("", "u") for n in (8, 16, 32)},
}  # fmt: skip
"""JavaScript array types; half-precision numbers are stored as bits."""

_MATH = (
    "exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "cbrt", "atan2",
)  # fmt: skip

_FUNCTIONS = {
    **{name: f"Math.{name}" for name in _MATH},
    "exp2": "(x) => 2 ** x",
    "fmod": "(x, y) => x % y",
    "pow": "(x, y) => (x === 1 || (x === -1 && !Number.isFinite(y) && y === y) ? 1 : x ** y)",
    "round": "(x) => Math.sign(x) * Math.floor(Math.abs(x) + 0.5)",
}

_ERF = """\
(x) => {
    const a = Math.abs(x);
    if (x !== x || a > 6) return Math.sign(x);
    if (a > 3) {  // a continued fraction
      let below = a;
      for (let n = 40; n > 0; --n) below = a + n / 2 / below;
      return Math.sign(x) * (1 - Math.exp(-a * a) / below / Math.sqrt(Math.PI));
    }
    let term = x, sum = x;
    for (let n = 1; n < 60; ++n) sum += (term *= -x * x / n) / (2 * n + 1);
    return 2 * sum / Math.sqrt(Math.PI);
  }"""

FUNCTIONS = {
    **{f"{name}{end}": text for name, text in _FUNCTIONS.items() for end in ("", "f")},
    "erff": _ERF,
}
"""C library functions available in JavaScript; computed in float64, so within 1 ulp in float32."""


_MODULE = """\
// NAME for TARGET, by bnncc VERSION: the network in WASM, called from JavaScript.

const ALIGNMENT = ALIGN, ARENA = BYTES;

export const inputs = INPUTS;

export const outputs = OUTPUTS;

const types = { TYPES };

// What WebAssembly has no instructions for.
const env = { ENV };

const aligned = (size) => Math.ceil(size / ALIGNMENT) * ALIGNMENT;
const count = (tensor) => tensor.shape.reduce((a, b) => a * b, 1);

/** A network with memory of its own: one for each caller that runs at the same time. */
export class Network {
  #run;
  #pointers = [];
  #arrays = new Map();

  constructor(instance) {
    const { memory, __heap_base: heap, RUN: run } = instance.exports;
    let end = aligned(heap.value);
    const place = (size) => (end += aligned(size)) - aligned(size);
    this.#pointers.push(place(ARENA));
    const tensors = [...Object.entries(inputs), ...Object.entries(outputs)];
    for (const [, tensor] of tensors) {
      this.#pointers.push(place(count(tensor) * types[tensor.type].BYTES_PER_ELEMENT));
    }
    const missing = end - memory.buffer.byteLength;
    if (missing > 0) memory.grow(Math.ceil(missing / 65536));
    tensors.forEach(([name, tensor], i) => {
      const view = new types[tensor.type](memory.buffer, this.#pointers[i + 1], count(tensor));
      this.#arrays.set(i < Object.keys(inputs).length ? name : `out ${name}`, view);
    });
    this.#run = run;
  }

  /** Takes an array for each input, by name, and returns one for each output. */
  run(given) {
    for (const [name, tensor] of Object.entries(inputs)) {
      const array = given[name], wanted = types[tensor.type], size = count(tensor);
      if (!(array instanceof wanted) || array.length !== size) {
        const found = array?.constructor?.name ?? typeof array;
        throw new TypeError(
          `input ${name}: found ${found} of ${array?.length}, expected ${wanted.name} of ${size}`);
      }
    }
    for (const name of Object.keys(inputs)) this.#arrays.get(name).set(given[name]);
    if (this.#run(...this.#pointers) !== 0) {
      throw new RangeError("an index is outside its tensor, or an integer is divided by 0");
    }
    return Object.fromEntries(
      Object.keys(outputs).map((name) => [name, this.#arrays.get(`out ${name}`).slice()]));
  }
}

/**
 * Loads the network: from WASM beside this file, or from a URL, a Response, bytes or a
 * WebAssembly.Module.
 */
export async function load(source = new URL("WASM", import.meta.url)) {
  source = await source;
  if (source instanceof WebAssembly.Module) {
    return new Network(await WebAssembly.instantiate(source, { env }));
  }
  if (typeof source === "string" || source instanceof URL) {
    const url = new URL(source, import.meta.url);
    if (url.protocol === "file:") {
      const { readFile } = await import("node:fs/promises");
      source = await readFile(url);
    } else {
      const response = await fetch(url);
      if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
      source = response;
    }
  }
  if (typeof Response !== "undefined" && source instanceof Response) {
    source = await source.arrayBuffer();
  }
  return new Network((await WebAssembly.instantiate(source, { env })).instance);
}
"""


def module(
    prefix: str, name: str, target: str, sizes: Sizes, given: Named, made: Named, wasm: bytes
) -> str:
    """Return ``NAME.mjs``, with the functions that `wasm` imports from it."""
    needed = [name for name in FUNCTIONS if b"\x03env" + _named(name) in wasm]
    texts = {
        "NAME": harmless(name),
        "TARGET": target,
        "VERSION": __version__,
        "ALIGN": str(ALIGNMENT),
        "BYTES": str(sizes.arena),
        "INPUTS": _described(given),
        "OUTPUTS": _described(made),
        "TYPES": _array_types(given, made),
        "ENV": ", ".join(f"{name}: {FUNCTIONS[name]}" for name in needed),
        "RUN": f"{prefix}_run",
        "WASM": f"{prefix}.wasm",
    }
    return _filled(_MODULE, texts)


def _named(name: str) -> bytes:
    return bytes([len(name)]) + name.encode()


def _filled(template: str, texts: Mapping[str, str]) -> str:
    """Replace the words in capitals that have a text."""
    return re.sub(r"\b[A-Z]+\b", lambda word: texts.get(word[0], word[0]), template)


def _array_types(given: Named, made: Named) -> str:
    """Return the array type of each type of tensor, as fields of an object."""
    types = dict.fromkeys(tensor.dtype for _, tensor in (*given, *made))
    return ", ".join(f"{kind}: {ARRAYS[kind]}" for kind in types)


def _described(tensors: Named) -> str:
    rows = [
        f"  {json.dumps(name)}: {{ type: {json.dumps(t.dtype)}, shape: {json.dumps(t.shape)}, "
        f"tensor: {json.dumps(t.name)} }},"
        for name, t in tensors
    ]
    return "\n".join(["{", *rows, "}"])


_DECLARATIONS = """\
// Types of NAME.mjs, by bnncc VERSION.

export interface Tensor {
  readonly type: string;
  readonly shape: readonly number[];
  /** Its name in the model. */
  readonly tensor: string;
}

export interface Inputs {
INPUTS
}

export interface Outputs {
OUTPUTS
}

export declare const inputs: Readonly<Record<keyof Inputs, Tensor>>;
export declare const outputs: Readonly<Record<keyof Outputs, Tensor>>;

/** A network with memory of its own: one for each caller that runs at the same time. */
export declare class Network {
  private constructor();
  /** Throws a TypeError if an input has another type or length. */
  run(inputs: Inputs): Outputs;
}

type Source = string | URL | Response | BufferSource | WebAssembly.Module;

/** Loads the network; by default from the file beside this one. */
export declare function load(source?: Source | Promise<Source>): Promise<Network>;
"""


def declarations(prefix: str, given: Named, made: Named) -> str:
    """Return ``NAME.d.mts``, where TypeScript looks for the types of ``NAME.mjs``."""

    def fields(tensors: Named) -> str:
        return "\n".join(
            f"  /** {extents(t)} */\n  {json.dumps(n)}: {ARRAYS[t.dtype]};" for n, t in tensors
        )

    texts = {
        "NAME": prefix, "VERSION": __version__, "INPUTS": fields(given), "OUTPUTS": fields(made),
    }  # fmt: skip
    return _filled(_DECLARATIONS, texts)


_CHECK_PROGRAM = """\
// Runs the network on the input in check/, in Node, and compares.

import { readFileSync } from "node:fs";
import { inputs, load, outputs } from "./MODULE.mjs";

const kept = KEPT, near = NEAR;
const arrays = { ARRAYS };
const stored = (file, kind) => {
  const bytes = readFileSync(new URL(`CHECK${file}.bin`, import.meta.url));
  return new kind(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
};
const count = (tensor) => tensor.shape.reduce((a, b) => a * b, 1);
const number = {
  float16: (b) => (b >> 15 ? -1 : 1) * ((b >> 10 & 31) === 31 ? (b & 1023 ? NaN : Infinity)
    : (b >> 10 & 31 ? 1024 + (b & 1023) : b & 1023) * 2 ** (Math.max(b >> 10 & 31, 1) - 25)),
  bfloat16: (b) => new Float32Array(Uint32Array.of(b << 16).buffer)[0],
};

const given = {};
for (const [name, tensor] of Object.entries(inputs)) {
  const values = stored(name, arrays[tensor.type]);
  given[name] = new arrays[tensor.type](count(tensor));
  for (let i = 0; i < given[name].length; ++i) given[name][i] = values[i % values.length];
}
const made = (await load()).run(given);
let wrong = 0;
for (const [name, tensor] of Object.entries(outputs)) {
  const right = stored(name, arrays[tensor.type]);
  const places = kept[`${name}AT`] ? stored(`${name}AT`, Uint32Array) : undefined;
  const value = number[tensor.type] ?? ((x) => x);
  let off = 0;
  for (let i = 0; i < right.length; ++i) {
    const x = value(made[name][places ? places[i] : i]), y = value(right[i]);
    const same = x === y || (x !== x && y !== y);
    off += !(same || (name in near && Math.abs(x - y) <= near[name]));
  }
  const found = right.length ? `${off} of ${right.length} values wrong` : "no values to compare";
  console.log(`${name}: ${found}`);
  wrong ||= off > 0;
}
process.exitCode = wrong ? 1 : 0;
"""


def program(
    prefix: str, given: Named, made: Named, kept: Mapping[str, int], near: Mapping[str, float]
) -> str:
    """Return ``check.mjs``, which runs the network on stored inputs and compares outputs.

    Parameters
    ----------
    prefix : str
        Prefix of the network's symbols.
    given, made : list of (str, TensorInfo)
        Inputs and outputs, with their names in JavaScript.
    kept : mapping of str to int
        Number of stored values of each; if only some values of an output are stored, also of their
        positions.
    near : mapping of str to float
        How far each float output may be off.
    """
    texts = {
        "MODULE": prefix,
        "KEPT": json.dumps(kept),
        "NEAR": json.dumps(near),
        "ARRAYS": _array_types(given, made),
    }
    text = _filled(_CHECK_PROGRAM, texts)
    return text.replace("CHECK${", f"{CHECK}${{").replace("}AT`", f"}}{PLACES}`")


def readme(prefix: str, name: str, target: TargetSpec, sizes: Sizes, wasm: bytes) -> str:
    """Return ``README.md``."""
    return f"""\
# {harmless(name)} for {target.name}

The network in WebAssembly: code and weights in one file, and a module of JavaScript that calls it,
in browsers and in Node. What the engine must have: {", ".join(target.features)}.

| file | |
|---|---|
| `{prefix}.wasm` | code and weights: {len(wasm):,} bytes, {sizes.weights:,} of them weights |
| `{prefix}.mjs` | `load()`, and `run({{input: array}})` of what it gives |
| `{prefix}.d.mts` | its types, for TypeScript |
| `check/`, `check.mjs` | a random input and its right output, and a program that compares |

    node check.mjs

Other hosts call `{prefix}_run(arena, inputs..., outputs...)` themselves: pointers into `memory`
behind `__heap_base`, multiples of {ALIGNMENT}; the arena has {sizes.arena:,} bytes; 0 is success.
Functions that it imports are C's of the same names.
"""
