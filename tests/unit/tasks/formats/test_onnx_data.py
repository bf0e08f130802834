"""Fault 51: data of a graph that lies outside of its folder is found in the graph, whatever part of it names the place."""

import os

import onnx
import pytest
from onnx import TensorProto, helper

from tasks.common.errors import IntegrityError
from tasks.formats.onnx_data import external_places, require_data_beside, require_own_data, require_plain_folder

pytestmark = pytest.mark.unit

DATA = "model.onnx.data"


def tensor(location, *, offset="0", length="16", name="weight"):
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        made.external_data.add(key=key, value=value)
    return made


def graph(*initializers, nodes=()):
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    nodes = [*nodes, helper.make_node("Identity", ["weight"], ["y"])]
    return helper.make_graph(nodes, "g", [], [out], list(initializers))


def model(made, **more):
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], **more)


def in_initializer(evil):
    return model(graph(evil))


def in_constant(evil):
    return model(graph(tensor(DATA), nodes=[helper.make_node("Constant", [], ["c"], value=evil)]))


def in_list_of_tensors(evil):
    return model(graph(tensor(DATA), nodes=[helper.make_node("Odd", [], ["c"], values=[evil])]))


def in_branch(evil):
    branch = graph(evil)
    node = helper.make_node("If", ["c"], ["d"], then_branch=branch, else_branch=branch)
    return model(graph(tensor(DATA), nodes=[node]))


def in_function(evil):
    inside = helper.make_node("Constant", [], ["c"], value=evil)
    function = helper.make_function("f", "f", [], ["c"], [inside], [helper.make_opsetid("", 20)])
    return model(graph(tensor(DATA)), functions=[function])


def in_sparse(evil):
    sparse = onnx.SparseTensorProto(values=evil, indices=tensor(DATA, name="i"), dims=[8])
    made = graph(tensor(DATA))
    made.sparse_initializer.append(sparse)
    return model(made)


def in_training(evil):
    made = model(graph(tensor(DATA)))
    made.training_info.add().initialization.CopyFrom(graph(evil))
    return made


def in_a_second_graph(evil):
    """Protobuf merges a field that comes twice."""
    first, second = model(graph(tensor(DATA))), onnx.ModelProto(graph=graph(evil))
    merged = onnx.ModelProto()
    merged.ParseFromString(first.SerializeToString() + second.SerializeToString())
    assert len(merged.graph.initializer) == 2
    return type("Bytes", (), {"SerializeToString": lambda _: first.SerializeToString() + second.SerializeToString()})()


PLACES = (
    in_initializer,
    in_constant,
    in_list_of_tensors,
    in_branch,
    in_function,
    in_sparse,
    in_training,
    in_a_second_graph,
)


@pytest.mark.parametrize("put", PLACES)
def test_data_is_found_wherever_the_graph_names_it(put):
    graph_bytes = put(tensor("../outside")).SerializeToString()
    assert "../outside" in [where for place in external_places(graph_bytes) for where in place.locations]
    with pytest.raises(IntegrityError, match=r"\.\./outside"):
        require_own_data(graph_bytes, {DATA: 16}, named="model.onnx")
    require_own_data(put(tensor(DATA)).SerializeToString(), {DATA: 16}, named="model.onnx")


@pytest.mark.parametrize(
    "location",
    ["../data", "a/../../data", "/etc/passwd", "sub/data", ".", "", "..", "c:\\data", "model.onnx.data\x00x"],
)
def test_only_a_plain_name_beside_the_graph_is_followed(location):
    sizes = {DATA: 16, location: 16}
    with pytest.raises(IntegrityError, match="reads data from"):
        require_own_data(model(graph(tensor(location))).SerializeToString(), sizes, named="model.onnx")


def test_an_entry_that_is_said_twice_is_judged_twice():
    twice = tensor("../outside")
    twice.external_data.add(key="location", value=DATA)
    with pytest.raises(IntegrityError, match=r"\.\./outside"):
        require_own_data(model(graph(twice)).SerializeToString(), {DATA: 16}, named="model.onnx")


@pytest.mark.parametrize(
    ("offset", "length"), [("1", "16"), ("0", "17"), ("99999999999", "1"), ("-1", "1"), ("x", "1")]
)
def test_data_beyond_the_end_of_its_file_is_refused(offset, length):
    made = model(graph(tensor(DATA, offset=offset, length=length))).SerializeToString()
    with pytest.raises(IntegrityError):
        require_own_data(made, {DATA: 16}, named="model.onnx")


DAMAGES = (
    lambda data: data[:-3],
    lambda data: b"\xff" * 40,
    lambda data: data + b"\x0b",
    lambda data: data + b"\x3a\xff\xff\xff\x7f",
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_graph_is_refused(damage):
    made = model(graph(tensor(DATA))).SerializeToString()
    with pytest.raises(IntegrityError, match="no ONNX graph"):
        require_own_data(damage(made), {DATA: 16}, named="model.onnx")


def test_messages_that_nest_without_end_are_refused():
    inner = b""
    for _ in range(400):
        for tag in (0x32, 0x2A, 0x0A):  # GraphProto in AttributeProto in NodeProto in GraphProto
            inner = bytes([tag]) + _varint(len(inner)) + inner
    with pytest.raises(IntegrityError, match="no ONNX graph"):
        require_own_data(b"\x3a" + _varint(len(inner)) + inner, {DATA: 16}, named="model.onnx")


def _varint(value):
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    for place in (folder, folder / "variants" / "int8"):
        place.mkdir(parents=True)
        (place / "model.onnx").write_bytes(model(graph(tensor(DATA))).SerializeToString())
        (place / DATA).write_bytes(bytes(16))
    return folder


@pytest.mark.parametrize("below", ["", "variants/int8"])
def test_a_folder_with_links_or_foreign_data_is_refused_variants_too(folder, below, tmp_path):
    require_plain_folder(folder)
    data = folder / below / DATA
    os.link(data, tmp_path / "second-name")
    with pytest.raises(IntegrityError, match="holds links"):
        require_plain_folder(folder)
    (tmp_path / "second-name").unlink()
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match="holds links"):
        require_plain_folder(folder)
    with pytest.raises(IntegrityError, match="reads data from"):
        require_data_beside(folder)
    data.unlink()
    (folder / below / "model.onnx").write_bytes(model(graph(tensor("../../elsewhere"))).SerializeToString())
    with pytest.raises(IntegrityError, match="elsewhere"):
        require_data_beside(folder)
