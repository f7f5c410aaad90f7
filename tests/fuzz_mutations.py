"""Damage the bytes of model files, half of the time where a format keeps its structure."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import onnx
from google.protobuf.message import DecodeError, Message

PAYLOAD = 64
"""Bytes from which on a field of a protobuf message that is no message counts as payload."""

_NUMBERS = [
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
]


# ------------------------------------------------------------------------------------- structure


def everything(data: bytes) -> list[range]:
    """Take all bytes for structure."""
    return [range(len(data))]


def protobuf(data: bytes) -> list[range]:
    """Find the bytes of a protobuf message that are not long payloads."""
    found: list[range] = []
    work = [(0, len(data))]
    while work:
        start, stop = work.pop()
        fields = _fields(data, start, stop)
        if fields is None:
            if stop - start < PAYLOAD:
                found.append(range(start, stop))
            continue
        mark = start
        for low, high in fields:  # inside of length-delimited fields
            found.append(range(mark, low))
            work.append((low, high))
            mark = high
        found.append(range(mark, stop))
    return [r for r in found if len(r)]


def _varint(data: bytes, at: int, stop: int) -> tuple[int, int] | None:
    value = shift = 0
    while at < stop and shift < 64:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at
    return None


def _fields(data: bytes, at: int, stop: int) -> list[tuple[int, int]] | None:
    """Return the insides of the length-delimited fields of a message; None if it is none."""
    inside: list[tuple[int, int]] = []
    while at < stop:
        key = _varint(data, at, stop)
        if key is None or not 0 < key[0] >> 3 < 2**16:
            return None
        kind, at = key[0] & 7, key[1]
        if kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind in (0, 2):
            value = _varint(data, at, stop)
            if value is None:
                return None
            at = value[1]
            if kind == 2:
                inside.append((at, at + value[0]))
                at += value[0]
        else:
            return None
    return inside if at == stop else None


# ------------------------------------------------------------------------------------- mutations


def mutated(data: bytes, rng: random.Random, structure: Sequence[range]) -> bytes:
    """Return `data` with one to three wounds, in half of the cases within `structure`."""
    result = bytearray(data)
    inside = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not result:
            break
        if inside and structure:
            part = rng.choices(structure, [len(r) for r in structure])[0]
            at = min(rng.choice(part), len(result) - 1)
        else:
            at = rng.randrange(len(result))
        rng.choice(_WOUNDS)(result, at, rng)
    return bytes(result)


def _flip(data: bytearray, at: int, rng: random.Random) -> None:
    data[at] ^= 1 << rng.randrange(8)


def _byte(data: bytearray, at: int, rng: random.Random) -> None:
    data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(data: bytearray, at: int, rng: random.Random) -> None:
    size = rng.choice((2, 4, 8))
    value = rng.choice((*_NUMBERS, rng.getrandbits(64))) % (1 << 8 * size)
    data[at : at + size] = value.to_bytes(size, "little")


def _cut(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at : at + rng.choice((1, 2, 4, 16, 256))]


def _repeat(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = data[at : at + rng.choice((1, 4, 16, 256))]


def _insert(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))


def _truncate(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at:]


def _move(data: bytearray, at: int, rng: random.Random) -> None:
    size, other = rng.choice((1, 4, 8, 32)), rng.randrange(len(data))
    data[at : at + size] = data[other : other + size]


_WOUNDS = (_flip, _flip, _byte, _byte, _number, _number, _cut, _repeat, _insert, _truncate, _move)


# -------------------------------------------------------------------------------------- messages


def mutated_onnx(data: bytes, rng: random.Random, structure: Sequence[range]) -> bytes:
    """Return a model with wounds in its bytes or, as often, in the fields of its messages.

    Most wounds of the first kind leave no protobuf message, so that little is seen of them.
    """
    if rng.random() < 0.5:
        return mutated(data, rng, structure)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        return mutated(data, rng, structure)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _hurt(_some_message(model, rng), model, rng)
    return bytes(model.SerializeToString())


def _some_message(message: Message, rng: random.Random) -> Message:
    """Walk from a message to one somewhere inside it."""
    while True:
        inside: list[Message] = []
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                inside += [rng.choice(value)] if field.is_repeated else [value]
        if not inside or rng.random() < 0.15:
            return message
        message = rng.choice(inside)


def _hurt(message: Message, model: onnx.ModelProto, rng: random.Random) -> None:
    fields = message.ListFields()
    if not fields:
        return
    field, value = rng.choice(fields)
    if field.is_repeated and rng.random() < 0.6:
        other = rng.randrange(len(value))
        if rng.random() < 0.5:
            del value[other]
        elif field.type == field.TYPE_MESSAGE:
            value.add().CopyFrom(value[other])
        else:
            value.append(value[other])
    elif rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.type != field.TYPE_MESSAGE:
        new = _other_value(field, model, rng)
        if new is not None and field.is_repeated:
            value[rng.randrange(len(value))] = new
        elif new is not None:
            setattr(message, field.name, new)


def _other_value(field, model: onnx.ModelProto, rng: random.Random) -> object:
    """Return a value for a field: an edge case, or what another field of the model holds."""
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e-38, 3e38, float("inf"), float("nan"), rng.random()))
    if field.cpp_type == field.CPPTYPE_STRING:
        nodes = model.graph.node
        node = rng.choice(nodes) if nodes else onnx.NodeProto()
        names = [*node.input, *node.output, node.op_type, "", "A" * 300, "x"]
        text = rng.choice(names)
        return text.encode() if field.type == field.TYPE_BYTES else text
    if field.cpp_type == field.CPPTYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    if field.cpp_type == field.CPPTYPE_INT32:
        return rng.choice((0, 1, 2, 3, 6, 7, 16, 21, 22, -1, 2**31 - 1))
    if field.cpp_type == field.CPPTYPE_INT64:
        return rng.choice((0, 1, 2, 3, 5, 64, -1, -7, 2**31, 2**40, 2**63 - 1, -(2**63)))
    return None


# ------------------------------------------------------------------------------------------ JSON

_VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, 2, 7, -1, 2**31, 2**63, 10**30, 1.5, float("inf"), "", "x", "0", "-1"),
    *("99999", "4294967296", "(0, 0)", "(3, 3)", "(1000000, 1000000)", "(1,2,3,4,5)", "None"),
    *("True", [], {}, [0, 0, 0], [[0, 0, 0]], {"kernel": "(1, 1)"}, {"as_int": -1}),
    {"as_int": 1 << 40},
)


def hurt(content: Any, rng: random.Random) -> None:
    """Walk to some place inside a JSON value, and drop, copy or replace what is there."""
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = place[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
            place = inner
            continue
        break
    kind = rng.random()
    if kind < 0.2:
        del place[key]
    elif kind < 0.4 and isinstance(place, list):
        place.insert(rng.randrange(len(place) + 1), place[rng.randrange(len(place))])
    elif kind < 0.6:
        place[key] = place[rng.choice(keys)]
    else:
        place[key] = copy.deepcopy(rng.choice(_VALUES))  # else one is put into itself
