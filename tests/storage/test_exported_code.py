"""`.pt2` files: none of them runs code when it is read, and what is damaged is refused in words."""

from __future__ import annotations

import io
import json
import pickle
import zipfile

import pytest
import torch
from support.refusals import refused
from torch import nn

from retrofit.errors import CheckpointError, DoesNotFitError
from retrofit.storage.checkpoint import load, save
from retrofit.storage.exported_program import MIXTURES, is_operator, is_size

MODEL, INPUTS = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, input_ids):
        return {"logits": self.head(self.embedding(input_ids) * self.scale)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "model.pt2"
    sizes = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}}
    inputs = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    torch.export.save(torch.export.export(Net().eval(), (), inputs, dynamic_shapes=sizes, strict=False), path)
    return path


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def rewritten(whole, path, changes):
    """The archive at `path` with other records: `changes` maps their names to bytes or to a function of the old JSON."""
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        records = {name.partition("/")[2]: old.read(name) for name in old.namelist()}
        for name, change in changes.items():
            records[name] = json.dumps(change(json.loads(records[name]))).encode() if callable(change) else change
        for name, content in records.items():
            new.writestr(f"model/{name}", content)
    return path


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def pickled_weight(config):
    config["config"]["head.weight"]["use_pickle"] = True
    return config


def pickled_constant(prefix):
    def change(config):
        config["config"]["scale"].update(path_name=f"{prefix}0", use_pickle=True)
        return config

    return change


def in_graph(change):
    def changed(program):
        change(program, program["graph_module"]["graph"])
        return program

    return {MODEL: changed}


def sized(text):
    return in_graph(lambda program, graph: graph["tensor_values"]["input_ids"]["sizes"][1]["as_expr"].update(expr_str=text))


def called(target):
    def change(program, graph):
        argument = {"name": "command", "arg": {"as_string": "exit 3"}, "kind": 1}
        graph["nodes"][-1].update(target=target, inputs=[argument])

    return in_graph(change)


def renamed(name):
    def change(program, graph):
        text = json.dumps(program).replace('"input_ids"', json.dumps(name))
        program.clear()
        program.update(json.loads(text))

    return in_graph(change)


def in_tree(**fields):
    def change(program, graph):
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        tree = json.loads(signature["out_spec"])
        tree[1].update(fields)
        signature["out_spec"] = json.dumps(tree)

    return in_graph(change)


def traps(path):
    trap = saved((Trap(path),))
    run = f"__import__('os').mkdir('{path}')"
    enum = json.dumps([{"__enum__": True, "fqn": "antigravity:A", "name": "a"}])
    return {
        "sample inputs": {INPUTS: trap},
        "a weight": {WEIGHTS: pickled_weight, "data/weights/weight_1": trap},
        "a constant": {CONSTANTS: pickled_constant("tensor_"), "data/constants/tensor_0": trap},
        "an opaque constant": {
            CONSTANTS: pickled_constant("opaque_obj_"),
            "data/constants/opaque_obj_0": pickle.dumps(Trap(path)),
        },
        "a custom object": {CONSTANTS: pickled_constant("custom_obj_"), "data/constants/custom_obj_0": trap},
        "weights of the older form": {"data/weights/model.pt": trap},
        "constants of the older form": {"data/constants/model.pt": trap},
        "a compiled library": {"data/aotinductor/model/model.so": b"\x7fELF"},
        "a size": sized(run),
        "a size in a string": sized(f"Add('{run}', 1)".replace("'os'", '"os"')),
        "an operator": called("torch.os.system"),
        "a function of operator": called("_operator.methodcaller"),
        "an operator on files": called("torch.ops.aten.from_file.default"),
        "an argument's name": renamed(f"input_ids={run}"),
        "a module's path": in_graph(
            lambda program, graph: graph["nodes"][0]["metadata"].update(nn_module_stack=f'L__self__,a")+{run}+("b,Net')
        ),
        "a key of the results": in_tree(context=json.dumps([run])),
        "an enum": in_tree(context=enum),
        "a default": in_tree(
            type="collections.defaultdict",
            context={"default_factory_module": "antigravity", "default_factory_name": "a", "dict_context": ["logits"]},
        ),
    }


@pytest.mark.parametrize("where", list(traps("")))
def test_no_part_of_the_file_runs(where, whole, tmp_path):
    path = rewritten(whole, tmp_path / "model.pt2", traps(tmp_path / "sprung")[where])
    with refused(CheckpointError, str(path), code="untrusted") as error:
        load(path)
    assert "--allow-pickle" in error.value.remedy
    assert not (tmp_path / "sprung").exists()


def test_whoever_trusts_the_file_loads_it(whole, tmp_path):
    path = rewritten(whole, tmp_path / "model.pt2", {INPUTS: saved(((Trap(tmp_path / "sprung"),), {}))})
    load(path, allow_pickle=True)
    assert (tmp_path / "sprung").exists()


def test_a_file_as_torch_writes_it_loads(whole, tmp_path):
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    reference = torch.export.load(whole).module()(input_ids=ids)["logits"]
    for path in (whole, rewritten(whole, tmp_path / "model.pt2", {})):
        assert torch.equal(load(path)(input_ids=ids)["logits"], reference)


def test_a_largest_size_outlives_loading_and_saving(whole, tmp_path):
    longest, longer = torch.ones(2, 64, dtype=torch.long), torch.ones(2, 65, dtype=torch.long)
    save(load(whole), tmp_path / "model.pt2")
    with pytest.raises((AssertionError, RuntimeError), match="64"):
        torch.export.load(tmp_path / "model.pt2").module()(input_ids=longer)
    for path in (whole, tmp_path / "model.pt2"):
        model = load(path)
        assert torch.equal(model(input_ids=longest)["logits"], torch.export.load(whole).module()(input_ids=longest)["logits"])
        with refused(DoesNotFitError, "65", "64", code="size", site="input_ids"):
            model(input_ids=longer)


class Attends(Net):
    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        return self.head(nn.functional.scaled_dot_product_attention(hidden, hidden, hidden))


def test_a_length_that_is_a_multiple_of_a_dynamic_size_loads(tmp_path):
    sizes = {"input_ids": {0: torch.export.Dim("batch"), 1: 2 * torch.export.Dim("half", min=2, max=16)}}
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    program = torch.export.export(Attends().eval(), (), inputs, dynamic_shapes=sizes, strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert torch.equal(load(tmp_path / "model.pt2")(input_ids=ids), program.module()(input_ids=ids))


def test_an_interval_of_what_is_no_size_is_code(whole, tmp_path):
    interval = {"exec('x')": {"min_val": 0, "max_val": 1}}
    path = rewritten(whole, tmp_path / "model.pt2", {MODEL: lambda program: program | {"range_constraints": interval}})
    with refused(CheckpointError, code="untrusted"):
        load(path)


def test_guards_do_not_run(whole, tmp_path):
    guard = f"__import__('os').mkdir('{tmp_path / 'sprung'}')"
    path = rewritten(whole, tmp_path / "model.pt2", {MODEL: lambda program: program | {"guards_code": [guard]}})
    load(path)(input_ids=torch.ones(2, 3, dtype=torch.long))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "text", ["Symbol('s27', positive=True, integer=True)", "Mul(Integer(4), Symbol('s27'))", "FloorDiv(s0, 2) + Max(1, s1)", "s0*4"]
)
def test_sizes(text):
    assert is_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "exec('x')",
        "(1).__class__",
        "Symbol('a b')",
        "[1][0]",
        "(lambda: 1)()",
        "Integer(**__builtins__)",
        "a; b",
        "lambdify(1)",
        "(",
    ],
)
def test_what_is_no_size(text):
    assert not is_size(text)


def test_operators():
    assert all(map(is_operator, ["torch.ops.aten.add.Tensor", "_operator.add", "torch.sym_max", MIXTURES]))
    assert not is_operator(MIXTURES.replace("fallback", "fallback_backward"))
    assert not any(map(is_operator, ["torch.ops.load_library", "torch.load", "_operator.call", "torch.ops.aten.nothing.default"]))


# Damaged files


@pytest.mark.parametrize("kept", [0, 10, 1000, 4000])
def test_a_truncated_file(kept, whole, tmp_path, capfd):
    (tmp_path / "cut.pt2").write_bytes(whole.read_bytes()[:kept])
    refused_quietly(tmp_path / "cut.pt2", capfd)


DAMAGES = {
    "an empty program": {MODEL: b"{}"},
    "a program of noise": {MODEL: b"\xff"},
    "a program that is a list": {MODEL: b"[1, 2]"},
    "no weights": {WEIGHTS: b"{}"},
    "a weight without a place": {WEIGHTS: b'{"config": {"head.weight": {}}}'},
    "another archive": {"archive_format": b"x"},
    "a later version": {"archive_version": b"999"},
    "a short weight": {"data/weights/weight_1": b"short"},
    "inputs that are no call": {INPUTS: saved((torch.ones(1),))},
    "a recipe of noise": {"extra/retrofit.json": b"{"},
    "a recipe that is no list": {"extra/retrofit.json": b'{"altup": 1}'},
    "a node that is missing": in_graph(lambda program, graph: graph["nodes"].pop(0)),
    "no outputs": in_graph(lambda program, graph: graph["outputs"].clear()),
}


@pytest.mark.parametrize("what", list(DAMAGES))
def test_a_damaged_file(what, whole, tmp_path, capfd):
    refused_quietly(rewritten(whole, tmp_path / "model.pt2", DAMAGES[what]), capfd)


def refused_quietly(path, capfd):
    with refused(CheckpointError, str(path), code="unreadable") as error:
        load(path)
    assert error.value.remedy
    assert capfd.readouterr() == ("", "")  # no traceback of torch's
