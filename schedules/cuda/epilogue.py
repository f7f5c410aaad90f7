"""An epilogue as a CUDA function object, called with the values of adjacent channels of a pixel.

It processes four channels at a time, the size of one load; parameters are padded accordingly. Sums
and products are written as rounded intrinsics, so that the compiler does not fuse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bnncc.schedules.cuda import few_bit, text
from bnncc.schedules.cuda.terms import TEXT
from bnncc.schedules.cuda.text import C_TYPES, HERE, each
from bnncc.topi_binary import layout
from bnncc.topi_binary.algebra import STEPS, changed, conditions, stands_for
from bnncc.topi_binary.build import aliases, input_types, output_types
from bnncc.topi_binary.spec import Spec
from bnncc.topi_binary.step import FETCHED, Step, output_kinds, step_inputs


def source(
    name: str,
    spec: Spec,
    headers: Sequence[str],
    constants: Mapping[str, text.Constant],
    call: str,
    members: str = "",
    before: Sequence[str] = (),
) -> str:
    """Return the text of a kernel that ends with the epilogue of `spec`.

    Parameters
    ----------
    name : str
        Name of the kernel.
    spec : Spec
        Spec of the kernel.
    headers : sequence of str
        Device headers to include.
    constants : mapping of str to Constant
        Constants of the layer, see `text.layer`.
    call : str
        Body of the function, with the placeholders ``{layer}`` and ``{finish}``, which constructs
        the epilogue.
    members : str, default ""
        Additional members of the layer.
    before : sequence of str, optional
        Text that precedes everything else.

    Returns
    -------
    str
    """
    finish, made = _Writer(f"{name}_epilogue", spec, spec.steps).write()
    layer = f"{name}_layer"
    function = text.function(name, spec, call.format(layer=layer, finish=made))
    parts = [*before, text.layer(layer, constants, members), finish, function]
    return text.source(headers, parts)


_EACH_FOUR = (
    "#pragma unroll",
    "    for (int i = 0; i < LANES; i += 4) {",
    "      const int c = at.first + Order::offset(i);",
)


class _Writer:
    def __init__(self, name: str, spec: Spec, steps: tuple[Step, ...]) -> None:
        self.name, self.spec, self.steps = name, spec, steps
        self.channels = spec.output_channels
        self.height, self.width = spec.output_hw
        first = len(input_types(spec)) - sum(map(step_inputs, steps))
        self.inputs = iter(range(first, len(input_types(spec))))
        self.outputs = iter(range(len(output_types(spec))))
        self.fields: dict[str, tuple[str, str]] = {}  # type and initial value
        self.planes: list[tuple[str, int]] = []
        self.fetched: list[tuple[str, list[str]]] = []  # tensors read before anything is stored

    def write(self) -> tuple[str, str]:
        body = [line for step in self.steps for line in self._step(step)]
        declared = [f"    unsigned bits{k}[Order::words(LANES)] = {{}};" for _, k in self.planes]
        stored = [
            f"    Order::template store<LANES, {self.channels}>({plane}, at, bits{k});"
            for plane, k in self.planes
        ]
        arrays = [f"    float {name}[LANES];" for name, _ in self.fetched]
        struct = "\n".join([
            f"struct {self.name} {{",
            *(f"  {kind} {field};" for field, (kind, _) in self.fields.items()),
            "  template <int LANES>",
            "  struct Fetched {",
            *arrays,
            "  };",
            "  // Reads the tensors that are added: all loads are under way together, and if there",
            "  // is room for them, before the sums are there.",
            "  template <class Order, int LANES>",
            "  __device__ __forceinline__ void fetch(Order, const bnncc::Place& at,",
            "                                        Fetched<LANES>& fetched) const {",
            *(line for _, lines in self.fetched for line in lines),
            *(["    Order::together();"] if self.fetched else []),
            "  }",
            "  template <class Order, int LANES, typename T>",
            "  __device__ __forceinline__ void operator()(Order order, const bnncc::Place& at,",
            "                                             const T (&raw)[LANES]) const {",
            "    Fetched<LANES> fetched;",
            "    fetch(order, at, fetched);",
            "    (*this)(order, at, raw, fetched);",
            "  }",
            "  template <class Order, int LANES, typename T>",
            "  __device__ __forceinline__ void operator()(Order, const bnncc::Place& at,",
            "                                             const T (&raw)[LANES],",
            "                                             const Fetched<LANES>& fetched) const {",
            *declared,
            *_EACH_FOUR,
            f"      if (!Order::whole(LANES, {self.channels}) && c >= {self.channels}) continue;",
            "      float v[4];",
            *each("v[k] = (float)raw[i + k];"),
            *(f"      {line}" for line in body),
            "    }",
            *stored,
            "  }",
            "};",
        ])  # fmt: skip
        values = ", ".join(value for _, value in self.fields.values())
        return struct, f"{self.name}{{{values}}}"

    def _field(self, kind: str, name: str, value: str = "") -> str:
        self.fields[name] = (kind, value or name)
        return name

    def _input(self) -> str:
        position = next(self.inputs)
        kind = C_TYPES[input_types(self.spec)[position][1]]
        return self._field(f"const {kind}*", f"in{position}")

    def _output(self, kind: str) -> str:
        position = next(self.outputs)
        over = aliases(self.spec)[position]
        # A store in place: the tensor that was added, which only its owner reads.
        value = f"const_cast<{kind}*>(in{over})" if over >= 0 else ""
        return self._field(f"{kind}*", f"out{position}", value)

    def _step(self, step: Step) -> Iterator[str]:
        taken = [self._input() for _ in range(step_inputs(step))]
        yield "{"
        if step.op in STEPS:
            if step.op in FETCHED:
                params = [f"{self._fetch(step, taken[0])}[i + k]"]
            else:
                params = [f"p{k}[k]" for k in range(len(taken))]
                for k, pointer in enumerate(taken):
                    yield f"  float p{k}[4]; bnncc::load4(p{k}, {pointer} + {HERE});"
            yield from each(f"v[k] = {changed(TEXT, step, 'v[k]', params)};")
        elif step.op == "store":
            yield from self._store(step, "v")
        elif step.op == "levels":
            filled = layout.blocks(self.channels) * layout.LANES
            yield from few_bit.levels(step, taken, filled)
            yield from self._levels(step, taken)
        else:
            for k, pointer in enumerate(taken):
                yield f"  int p{k}[4]; bnncc::load4(p{k}, {pointer} + {HERE});"
            seen = "v[k]" if step.op == "bits" else "raw[i + k]"
            limits = [f"p{k}[k]" for k in range(len(taken))]
            for test in conditions(TEXT, step, seen, limits):
                yield from self._bits(test)
        yield "}"

    def _bits(self, test: str) -> Iterator[str]:
        number = len(self.planes)
        self.planes.append((self._output("unsigned"), number))
        word, bit = f"bits{number}[Order::word(i)]", "(Order::bit(i) + k)"
        yield from each(f"{word} |= (unsigned)({test}) << {bit};")

    def _planar(self, step: Step) -> bool:
        return step.layout == "NCHW" and self.spec.output_rank == 4

    def _planar_at(self) -> str:
        area = self.height * self.width
        return f"((size_t)at.image * {self.channels} + c + k) * {area} + at.y * {self.width} + at.x"

    def _fetch(self, step: Step, pointer: str) -> str:
        """Load a tensor's values before anything is stored; return their array.

        A store might alias the tensor, so the compiler would not move a later load up.
        """
        name = f"tensor{len(self.fetched)}"
        body = f"      float (&four)[4] = *(float (*)[4])(fetched.{name} + i);"
        if step.period == 1:
            whole = f"at.exists ? bnncc::number({pointer} + (size_t)at.pixel) : 1.0f"
            read = f"      four[0] = four[1] = four[2] = four[3] = {whole};"
            self.fetched.append((name, [*_EACH_FOUR, body, read, "    }"]))
            return f"fetched.{name}"
        channels = step.period or self.channels
        if step.op != "gate" and self._planar(step):
            there = f"bnncc::number({pointer} + {self._planar_at()})"
            value = f"c + k < {self.channels} ? {there} : 0.0f"
            read = "\n".join(each(f"four[k] = {value};"))
        else:
            row = "(size_t)at.image" if step.op == "gate" else "(size_t)at.pixel"
            whole = str(channels % 4 == 0).lower()
            start = f"{pointer} + {row} * {channels}"
            channel = f"c % {channels}" if step.period else "c"
            place = f"{start} + {channel}" if step.period else f"{start} + {HERE}"
            read = f"      bnncc::fetch4<{whole}>(four, {place}, {channels} - {channel});"
        lines = [
            *_EACH_FOUR,
            f"      if (!Order::whole(LANES, {self.channels}) && c >= {self.channels}) continue;",
            body,
            read,
            "    }",
        ]
        self.fetched.append((name, lines))
        return f"fetched.{name}"

    def _levels(self, step: Step, taken: list[str]) -> Iterator[str]:
        plane = 0
        for kind in output_kinds(step):
            if kind == "planes":
                yield from self._bits(f"level[k] >> {plane} & 1")
                plane += 1
            elif kind == "value":
                yield "  float stood[4];"
                yield from each(f"stood[k] = {stands_for(TEXT, step, 'level[k]')};")
                yield from self._store(step, "stood")
            elif kind == "table":
                yield "  float found[4];"
                yield from each(f"found[k] = __ldg({taken[-1]} + level[k]);")
                yield from self._store(step, "found")
            else:
                pointer = self._output("float" if kind == "floats" else "unsigned")
                words = layout.level_words(self.channels, kind)
                yield from few_bit.packed(kind, pointer, words)

    def _store(self, step: Step, values: str) -> Iterator[str]:
        pointer = self._output(C_TYPES[step.dtype if step.op == "store" else "float32"])
        if self._planar(step):
            yield from each(
                f"if (c + k < {self.channels} && at.exists) "
                f"bnncc::put({pointer} + {self._planar_at()}, {values}[k]);"
            )
            return
        whole = str(self.channels % 4 == 0).lower()
        place = f"{pointer} + (size_t)at.pixel * {self.channels} + {HERE}"
        yield f"  if (at.exists) bnncc::store4<{whole}>({place}, {values}, {self.channels} - c);"
