"""Hostile model files: malformed ones, and ones that reach for files outside their folder. Made up, each with its name.

`malformed()` and `escapes()` are whole corpora; the same seed makes the same bytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.compiling import PNET, RNET
from tests.support.gpu_programs import program, write_mxr

CANARY = b"canary-secret-in-a-file-outside"


def model(**changes: Any) -> onnx.ModelProto:
    """A sound little model: y = relu(x @ w)."""
    nodes = changes.pop("nodes", None) or [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    weights = changes.pop("weights", None) or [numpy_helper.from_array(np.ones((3, 2), np.float32), "w")]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        changes.pop("inputs", None) or [value("x", TensorProto.FLOAT, ["N", 3])],
        changes.pop("outputs", None) or [value("y", TensorProto.FLOAT, ["N", 2])],
        initializer=weights,
    )
    opsets = changes.pop("opsets", None) or [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **changes)


def weight(**fields: Any) -> TensorProto:
    tensor = numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    for name, content in fields.items():
        if isinstance(content, list):
            del getattr(tensor, name)[:]
            getattr(tensor, name).extend(content)
        else:
            setattr(tensor, name, content)
    return tensor


def nested(depth: int) -> onnx.NodeProto:
    """An If inside an If inside …"""
    value = helper.make_tensor_value_info("o", TensorProto.FLOAT, [1])
    node = leaf = helper.make_node("Identity", ["x"], ["o"])
    for _ in range(depth):
        deep, flat = (helper.make_graph([made], "branch", [], [value]) for made in (node, leaf))
        node = helper.make_node("If", ["x"], ["o"], then_branch=deep, else_branch=flat)
    return node


def calls_itself() -> onnx.ModelProto:
    body = [helper.make_node("F", ["a"], ["b"], domain="local")]
    function = helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("local", 1)])
    return model(
        nodes=[helper.make_node("F", ["x"], ["y"], domain="local")],
        opsets=[helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
        functions=[function],
    )


def laughs() -> onnx.ModelProto:
    """Functions that each call the one before ten times: ten to the twelfth nodes in a few hundred bytes."""
    local = helper.make_opsetid("local", 1)
    functions = []
    for level in range(12):
        called = ("Relu", "") if level == 0 else (f"F{level - 1}", "local")
        names = ["a", *[f"t{i}" for i in range(9)], "b"]
        body = [helper.make_node(called[0], [names[i]], [names[i + 1]], domain=called[1]) for i in range(10)]
        opsets = [helper.make_opsetid("", 17), local]
        functions.append(helper.make_function("local", f"F{level}", ["a"], ["b"], body, opsets))
    nodes = [helper.make_node("F11", ["x"], ["y"], domain="local")]
    return model(nodes=nodes, opsets=[helper.make_opsetid("", 17), local], functions=functions)


def _edited(edit: Callable[[onnx.ModelProto], object], made: onnx.ModelProto | None = None) -> onnx.ModelProto:
    made = made or model()
    edit(made)
    return made


def _twice(made: onnx.ModelProto) -> None:
    made.functions.append(made.functions[0])


def _function() -> onnx.ModelProto:
    """A sound model that calls a function of its own."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "F", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets)
    return model(nodes=[helper.make_node("F", ["x"], ["y"], domain="local")], opsets=opsets, functions=[function])


def _hidden_recursion() -> onnx.ModelProto:
    """F of one overload calls G, which calls it; F of another is sound, and stands last."""
    made = _function()
    sound = made.functions[0]
    called = {"F": ("G", ""), "G": ("F", "a")}
    for name, (other, overload) in called.items():
        body = helper.make_node(other, ["a"], ["b"], domain="local", overload=overload)
        made.functions.add().CopyFrom(helper.make_function("local", name, ["a"], ["b"], [body], sound.opset_import))
    made.functions[1].overload = "a"
    made.functions.add().CopyFrom(sound)
    del made.functions[0]
    return made


WRONG: dict[str, tuple[Callable[[], bytes | onnx.ModelProto], str]] = {
    "empty": (lambda: b"", "empty (0 bytes)"),
    "text": (lambda: b"this is not a model, it is text\n" * 10, "not an ONNX model"),
    "random": (lambda: random.Random(1).randbytes(4096), "not an ONNX model"),
    "cut": (lambda: PNET.read_bytes()[:-4000], "not an ONNX model"),
    "no graph": (lambda: onnx.ModelProto(ir_version=8), "no graph"),
    "no opset": (lambda: model(opsets=[helper.make_opsetid("", 0)]), "opset 0 is not known"),
    "future opset": (lambda: model(opsets=[helper.make_opsetid("", 999)]), "opset 999 is not known"),
    "future opset of another domain": (
        lambda: model(
            nodes=[helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml")],
            opsets=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2**40)],
        ),
        "opset 1099511627776 is not known",
    ),
    "short raw data": (lambda: model(weights=[weight(raw_data=b"1234")]), "'w': its shape needs 24 bytes of raw data"),
    "long raw data": (lambda: model(weights=[weight(raw_data=b"1" * 64)]), "'w': its shape needs 24 bytes"),
    "overflowing shape": (lambda: model(weights=[weight(dims=[2**62, 2**62])]), "initializer 'w'"),
    "negative shape": (lambda: model(weights=[weight(dims=[-3, 2])]), "initializer 'w' has the shape [-3, 2]"),
    "unknown dtype": (lambda: model(weights=[weight(data_type=77)]), "unknown element type 77"),
    "missing input": (
        lambda: model(nodes=[helper.make_node("Relu", ["nowhere"], ["y"], name="r")]),
        "nothing makes 'nowhere', which node 'r' needs",
    ),
    "missing output": (lambda: model(nodes=[helper.make_node("Relu", ["x"], ["z"])]), "nothing makes output 'y'"),
    "cycle": (
        lambda: model(
            nodes=[helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
                   helper.make_node("Relu", ["b"], ["y"])]
        ),
        "depends on its own output",
    ),
    "made twice": (
        lambda: model(nodes=[helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"])]),
        "two nodes make 'y'",
    ),
    "no operator": (lambda: model(nodes=[helper.make_node("", ["x"], ["y"])]), "has no operator"),
    "deep": (lambda: model(nodes=[nested(28)]), "nest deeper than 24"),
    "recursion": (calls_itself, "calls itself"),
    "a billion laughs": (laughs, "stands for more than"),
    "huge input": (
        lambda: model(inputs=[helper.make_tensor_value_info("x", TensorProto.FLOAT, [2**40, 2**40])]),
        "input 'x' has the shape",
    ),
    "huge and empty input": (
        lambda: model(inputs=[helper.make_tensor_value_info("x", TensorProto.FLOAT, [0, 2**62])]),
        "input 'x' has the shape",
    ),
    "zero byte in a name": (
        lambda: model(inputs=[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in ("x", "x\0")]),
        "input 'x\\x00' has a zero byte in its name",
    ),
    "bad dimension": (
        lambda: model(inputs=[helper.make_tensor_value_info("x", TensorProto.FLOAT, [1] * 65)]),
        "input 'x' has the shape",
    ),
    "two initializers": (lambda: model(weights=[weight(), weight()]), "two initializers are named 'w'"),
    "two inputs": (
        lambda: model(inputs=[helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])] * 2),
        "two inputs are named 'x'",
    ),
    "no outputs": (lambda: _edited(lambda made: made.graph.ClearField("output")), "the model has no outputs"),
    "nameless input": (lambda: _edited(lambda made: made.graph.input.add()), "an input of the model has no name"),
    "own input": (
        lambda: model(nodes=[helper.make_node("Relu", ["y"], ["y"], name="r")]),
        "node 'r' depends on its own output",
    ),
    "two opsets": (
        lambda: model(opsets=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx", 18)]),
        "imports two opsets of domain ''",
    ),
    "opset missing": (lambda: model(opsets=[helper.make_opsetid("ai.onnx.ml", 3)]), "imports no opset of domain ''"),
    "negative opset": (lambda: model(opsets=[helper.make_opsetid("", -1)]), "opset -1 is not known"),
    "unknown operator": (
        lambda: model(nodes=[helper.make_node("Frobnicate", ["x"], ["y"], name="f")]),
        "node 'f': opset 17 has no operator 'Frobnicate'",
    ),
    "unknown domain": (
        lambda: model(nodes=[helper.make_node("Relu", ["x"], ["y"], name="f", domain="evil")]),
        "node 'f': operator 'Relu' is of unknown domain 'evil'",
    ),
    "sequence input": (
        lambda: model(inputs=[helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [1])]),
        "input 'x' is not a tensor",
    ),
    "unknown type of an input": (
        lambda: _edited(lambda made: setattr(made.graph.input[0].type.tensor_type, "elem_type", 99)),
        "input 'x' has the unknown element type 99",
    ),
    "segment": (lambda: _edited(lambda made: setattr(made.graph.initializer[0].segment, "begin", 1)), "in segments"),
    "deep dimensions": (lambda: model(weights=[weight(dims=[1] * 65)]), "initializer 'w' has the shape"),
    "zero times overflow": (lambda: model(weights=[weight(dims=[2**62, 2**62, 0])]), "initializer 'w' has the shape"),
    "name of bytes": (lambda: model().SerializeToString().replace(b"product", b"prod\xff\xfet"), "is not text"),
    "loose int4": (
        lambda: model(weights=[TensorProto(name="w", data_type=22, dims=[64], int32_data=[1] * 64)]),
        "initializer 'w': its shape needs 32 values, it has 64",
    ),
    "training": (lambda: _edited(lambda made: made.training_info.add()), "graphs for training"),
    "hidden recursion": (_hidden_recursion, "calls itself"),
    "function twice": (lambda: _edited(_twice, calls_itself()), "two functions of the model have one name"),
    "short constant": (
        lambda: model(nodes=[helper.make_node("Constant", [], ["y"], name="c", value=weight(raw_data=b"1"))]),
        "node 'c', attribute 'value': its shape needs 24 bytes",
    ),
    "short data in a function": (
        lambda: _edited(lambda made: made.functions[0].node[0].attribute.add(name="v", type=4).t.CopyFrom(
            weight(raw_data=b"1")), _function()),
        "attribute 'v': its shape needs 24 bytes",
    ),
    "short default of a function": (
        lambda: _edited(lambda made: made.functions[0].attribute_proto.add(name="d", type=4).t.CopyFrom(
            weight(raw_data=b"1")), _function()),
        "function 'F', attribute 'd': its shape needs 24 bytes",
    ),
    "short data in a branch": (
        lambda: _edited(lambda made: made.graph.node[0].attribute[0].g.initializer.add().CopyFrom(
            weight(raw_data=b"1")), model(nodes=[nested(1)], outputs=[
                helper.make_tensor_value_info("o", TensorProto.FLOAT, [1])])),
        "initializer 'w': its shape needs 24 bytes",
    ),
    "sparse": (
        lambda: _edited(lambda made: made.graph.sparse_initializer.add(dims=[-4]).values.CopyFrom(weight(name="s"))),
        "sparse initializer 's'",
    ),
    **{
        f"short values of type {number}": (
            lambda number=number: model(weights=[TensorProto(name="w", data_type=number, dims=[2**33, 9])]),
            "initializer 'w': its shape needs",
        )
        for number in range(1, 27)
    },
    **{
        f"type {number}": (lambda number=number: model(weights=[weight(data_type=number)]), "unknown element type")
        for number in (-1, 0, 27, 2**31 - 1)
    },
    **{
        f"shape {dims}": (lambda dims=dims: model(weights=[weight(dims=dims)]), "initializer 'w'")
        for dims in ([], [6, 2], [2**63 - 1, 2], [2**32, 2**32], [-1], [-(2**63), 2], [3, 2, 2**61], [0])
    },
    **{
        f"raw data of {size} bytes": (
            lambda size=size: model(weights=[weight(raw_data=bytes(size))]),
            "'w': its shape needs 24 bytes of raw data",
        )
        for size in (0, 1, 12, 20, 23, 25, 28, 48, 4096)
    },
}  # fmt: skip
"""What is wrong with a model: how to make one, and words that the refusal must have."""


def malformed(mutations: int) -> Iterator[tuple[str, bytes, str]]:
    """Yield name, bytes, and words that the refusal must have (`""`: any, or none where the bytes happen to be sound).

    `mutations` real models with bytes flipped come last, half of them in their graph, where names and shapes are.
    """
    for name, (make, words) in WRONG.items():
        made = make()
        yield name, made if isinstance(made, bytes) else made.SerializeToString(), words
    little = model().SerializeToString()
    for end in range(1, len(little)):
        yield f"cut at {end}", little[:end], ""
    chance = random.Random(20)
    for size in range(1, 40):
        yield f"{size * 13} random bytes", chance.randbytes(size * 13), ""
    for depth in (50, 99, 1000, 100_000):
        yield f"messages {depth} deep", _wire_nested(depth), ""
    for size in (2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1):
        yield f"a graph of {size} bytes", b"\x08\x08\x3a" + _varint(size) + b"\x0a\x00", ""
    yield "a varint without end", b"\x08" + b"\xff" * 64, ""
    yield "groups", b"\x0b" * 5000, ""
    yield "field 0", b"\x00\x00" + little, ""
    yield "a program of MIGraphX", b"\x84\xa7version\x08", ""
    for index in range(mutations):
        whole = (PNET if index % 4 else RNET).read_bytes()
        content = bytearray(whole)
        for _ in range(chance.randrange(1, 12)):
            # The graph's structure is at the end of these files as at their beginning; their middle is weights.
            where = chance.choice([range(2048), range(len(whole) - 4096, len(whole)), range(len(whole))])
            content[chance.choice(where)] = chance.choice([0, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        yield f"real model, mutation {index}", bytes(content), ""


def malformed_programs(folder: Path, mutations: int) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of programs of MIGraphX, damaged in both of their containers."""
    chance = random.Random(21)
    for suffix in (".mxr", ".json"):
        whole = write_mxr(folder / f"whole{suffix}", program()).read_bytes()
        for index in range(mutations):
            yield f"cut {suffix} {index}", whole[: chance.randrange(len(whole))]
            content = bytearray(whole)
            for _ in range(chance.randrange(1, 6)):
                content[chance.randrange(len(content))] = chance.randrange(256)
            yield f"flipped {suffix} {index}", bytes(content)
    yield "empty", b""
    yield "deep lists", b"\x81\xa7modules" + b"\x91" * 100_000
    yield "deep maps", b"\x81\xa7modules" + b"\x81\xa1a" * 100_000
    yield "deep JSON", b'{"modules":' + b"[" * 100_000
    for code in (b"\xdd", b"\xdf", b"\xdb", b"\xc6"):
        yield f"4 GiB behind {code.hex()}", b"\x81\xa8contexts" + code + b"\xff\xff\xff\xff"
    yield "extension", b"\x81\xa7version\xc7\xff\x01"
    yield "no text", b"\x81\xa7version\xa4\xff\xfe\xfd\xfc"


def _varint(number: int) -> bytes:
    content = bytearray()
    while number > 0x7F:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*content, number])


def _wire_nested(depth: int) -> bytes:
    """A graph in an attribute of a node of a graph …, as protobuf writes it."""
    content = b""
    for level in range(depth):
        field = (0x3A if level == depth - 1 else 0x32, 0x0A, 0x2A)[(depth - 1 - level) % 3]
        content = bytes([field]) + _varint(len(content)) + content
        if len(content) > 1 << 20:
            break
    return b"\x08\x08" + content


def outside_tensor(*entries: tuple[str, str], **fields: Any) -> TensorProto:
    """A tensor whose bytes are elsewhere."""
    content = {"name": "w", "data_type": TensorProto.FLOAT, "dims": [3, 2], "data_location": TensorProto.EXTERNAL}
    tensor = TensorProto(**{**content, **fields})
    for key, value in entries:
        tensor.external_data.add(key=key, value=value)
    return tensor


def external(location: str, **more: str) -> onnx.ModelProto:
    """A model with external data; a keyword adds an entry, or replaces one."""
    entries = {"location": location, "offset": "0", "length": "24", **more}
    return model(weights=[outside_tensor(*entries.items())])


def _at(location: str, prepare: Callable[[Path, Path], object] | None = None, **more: str) -> Escape:
    """External data at a location; `{outside}` in it is a folder next to the model's that holds a secret."""
    return lambda outside: external(location.format(outside=outside), **more), prepare or _data


def _entries(*entries: tuple[str, str], **fields: Any) -> Escape:
    def make(outside: Path) -> onnx.ModelProto:
        named = [(key.format(outside=outside), value.format(outside=outside)) for key, value in entries]
        return model(weights=[outside_tensor(*named, **fields)])

    return make, _data


def _hidden(hide: Callable[[TensorProto], onnx.ModelProto]) -> Escape:
    """A tensor with external data outside, in another place of the model than its initializers."""
    return lambda outside: hide(outside_tensor(("location", f"{outside}/secret"))), _data


def _data(folder: Path, outside: Path) -> None:
    (folder / "data").write_bytes(CANARY)


def _in_branch(tensor: TensorProto) -> onnx.ModelProto:
    made = model(nodes=[nested(1)], outputs=[helper.make_tensor_value_info("o", TensorProto.FLOAT, [1])])
    made.graph.node[0].attribute[0].g.initializer.append(tensor)
    return made


def _in_list(tensor: TensorProto) -> onnx.ModelProto:
    made = model()
    made.graph.node[0].attribute.add(name="v", type=9).tensors.append(tensor)
    return made


def _in_sparse(part: str) -> Callable[[TensorProto], onnx.ModelProto]:
    def hide(tensor: TensorProto) -> onnx.ModelProto:
        made = model()
        sparse = made.graph.sparse_initializer.add(dims=[4])
        sparse.values.CopyFrom(weight(name="s"))
        getattr(sparse, part).CopyFrom(tensor)
        return made

    return hide


def _in_sparse_attribute(tensor: TensorProto) -> onnx.ModelProto:
    made = model()
    made.graph.node[0].attribute.add(name="v", type=11).sparse_tensor.values.CopyFrom(tensor)
    return made


def _in_function(tensor: TensorProto) -> onnx.ModelProto:
    made = _function()
    made.functions[0].node[0].attribute.add(name="v", type=4).t.CopyFrom(tensor)
    return made


def _in_default(tensor: TensorProto) -> onnx.ModelProto:
    made = _function()
    made.functions[0].attribute_proto.add(name="v", type=4).t.CopyFrom(tensor)
    return made


def _in_training(tensor: TensorProto) -> onnx.ModelProto:
    made = model()
    made.training_info.add().initialization.initializer.append(tensor)
    return made


Escape = tuple[Callable[[Path], onnx.ModelProto], Callable[[Path, Path], object]]

ESCAPES: dict[str, Escape] = {
    # Where it says the data is.
    "absolute": _at("{outside}/secret"),
    "parent": _at("../outside/secret"),
    "hidden parent": _at("a/../../outside/secret"),
    "parent at the end": _at("data/.."),
    "dot": _at("./data"),
    "dot inside": _at("a/./data"),
    "double slash": _at("a//data"),
    "trailing slash": _at("data/"),
    "root": _at("/"),
    "backslash": _at("..\\outside\\secret"),
    "drive": _at("C:/secret"),
    "address": _at("file:///etc/passwd"),
    "address of a server": _at("https://example.org/secret"),
    "home": _at("~/secret"),
    "nul": _at("data\0/../secret"),
    "empty": _at(""),
    "process files": _at("/proc/self/environ"),
    "process root": _at("/proc/self/root{outside}/secret"),
    "device": _at("/dev/zero"),
    "long": _at("a/" * 600 + "data"),
    "missing": _at("elsewhere"),
    # What is there.
    "folder": _at("sub", lambda folder, outside: (folder / "sub").mkdir()),
    "symbolic link": _at("link", lambda folder, outside: (folder / "link").symlink_to(outside / "secret")),
    "symbolic link inside": _at("link", lambda folder, outside: (folder / "link").symlink_to("model.onnx")),
    "linked folder": _at("sub/secret", lambda folder, outside: (folder / "sub").symlink_to(outside)),
    "hard link": _at("hard", lambda folder, outside: (folder / "hard").hardlink_to(outside / "secret")),
    "named pipe": _at("pipe", lambda folder, outside: os.mkfifo(folder / "pipe")),
    "socket": _at("socket", lambda folder, outside: os.mknod(folder / "socket", 0o140600)),
    # How much of it.
    "negative offset": _at("data", offset="-1"),
    "huge offset": _at("data", offset="99999999999999999999"),
    "offset that wraps": _at("data", offset=str(2**64 - 8)),
    "offset in hexadecimal": _at("data", offset="0x10"),
    "offset with a sign": _at("data", offset="+0"),
    "offset in other digits": _at("data", offset="\u0661"),
    "offset past the end": _at("data", offset="16"),
    "negative length": _at("data", length="-24"),
    "short length": _at("data", length="23"),
    "petabyte": _at("data", length="1000000000000000"),
    # How it is said. MIGraphX takes the first entry for the file, the second for the offset, the third for the length.
    "unknown key": _at("data", checksum="x", __class__="y"),
    "base path": _at("data", basepath="/etc"),
    "checksum in front": _entries(("checksum", "{outside}/secret"), ("location", "data"), ("offset", "0")),
    "length in front": _entries(("length", "{outside}/secret"), ("location", "data")),
    "length for an offset": _entries(("location", "data"), ("length", "24")),
    "two locations": _entries(("location", "data"), ("location", "{outside}/secret")),
    "two locations, the bad one first": _entries(("location", "{outside}/secret"), ("location", "data")),
    "no location": _entries(("offset", "0"), ("length", "24")),
    "no entries": _entries(),
    "empty key": _entries(("", "{outside}/secret")),
    "location in capitals": _entries(("LOCATION", "{outside}/secret")),
    "said to be inside": _entries(("location", "{outside}/secret"), data_location=0, raw_data=bytes(24)),
    "said to be inside, with an empty key": _entries(("", "{outside}/secret"), data_location=0, raw_data=bytes(24)),
    "text": _entries(("location", "data"), data_type=TensorProto.STRING),
    # In which tensor.
    "a constant": _hidden(lambda tensor: model(nodes=[helper.make_node("Constant", [], ["y"], value=tensor)])),
    "a list of tensors": _hidden(_in_list),
    "a branch": _hidden(_in_branch),
    "sparse values": _hidden(_in_sparse("values")),
    "sparse indices": _hidden(_in_sparse("indices")),
    "a sparse attribute": _hidden(_in_sparse_attribute),
    "a function": _hidden(_in_function),
    "a function's default": _hidden(_in_default),
    "a graph for training": _hidden(_in_training),
}
"""Makers of a model, which get a folder outside; and what is to be put next to the model first."""


def escape(name: str, folder: Path) -> Path:
    """Write an escape with all that it needs into a folder; return the model. `outside/secret` is the canary."""
    make, prepare = ESCAPES[name]
    outside, beside = folder / "outside", folder / "model"
    outside.mkdir(parents=True)
    beside.mkdir()
    (outside / "secret").write_bytes(CANARY)
    path = beside / "model.onnx"
    path.write_bytes(make(outside).SerializeToString())
    prepare(beside, outside)
    return path
