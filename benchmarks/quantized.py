"""Sparse and quantized together, in ONNX Runtime: speed and held-out loss of SmolLM2, dense and rewritten, float32, int8 and int4.

    PYTHONPATH=tests python benchmarks/quantized.py --folder files --export dense        # once for each model, some minutes
    PYTHONPATH=tests python benchmarks/quantized.py --folder files --export sparse
    PYTHONPATH=tests python benchmarks/quantized.py --folder files --rounds 15           # the table
    python benchmarks/quantized.py --operators                                           # what the choices of the packing rest on

The models take turns in every round, `--tokens` steps of one token after a prompt of `--past`: a strided layer computes one token
in k. A ratio is the median over the rounds of the dense model's time in the same form over a model's. The float files are written
and checked by `retrofit.export_onnx`, the others packed from them by what `--weights` of `retrofit export` calls. The loss is that
of the files, on windows of the demo's text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional as F

import retrofit
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states
from retrofit.onnx.exporter.weight_quantization import BLOCK, quantize_weights
from retrofit.passbase.protocol import parse_recipe

sys.path.insert(0, str(Path(__file__).parent / "learning"))
SPARSE = "sparse-ffn(sparsity=16)"
FORMS = {"float32": None, "int8": 8, "int4": 4}
D, D_FF, ACTIVE = 576, 1536, 96  # of SmolLM2's feed-forwards, one unit in 16 active


def main() -> None:
    options = parse()
    if options.operators:
        operators(options)
    elif options.export:
        export(options)
    else:
        table(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("quantized"))
    parser.add_argument("--export", choices=("dense", "sparse"))
    parser.add_argument("--recipe", default=SPARSE, help="passes as text, separated by semicolons, or a file of a recipe")
    parser.add_argument("--calibrated", action="store_true", help="the start is fitted to text, which takes some minutes")
    parser.add_argument("--operators", action="store_true", help="time feed-forwards of single operators")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--past", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4, help="steps timed together, one after the other")
    parser.add_argument("--windows", type=int, default=4, help="of 128 tokens, for the loss")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


# Models.


def export(options: argparse.Namespace) -> None:
    from experiment import SmolLM2, calibration_windows
    from whole_model import recipe_of

    start = time.perf_counter()
    begun = SmolLM2()
    model = begun.trained(options.folder)
    torch.manual_seed(0)
    if options.export == "sparse":
        windows = calibration_windows(model, begun.tokenizer) if options.calibrated else None
        model = retrofit.apply(model, *parse_recipe(recipe_of(options.recipe)[1]), calibration=windows, verify=False)
    options.folder.mkdir(parents=True, exist_ok=True)
    made = retrofit.export_onnx(model.eval(), options.folder / f"{options.export}.float32.onnx", force=True)
    print(f"{made}\n{options.export}: {time.perf_counter() - start:.0f} s")


def file_of(name: str, form: str, options: argparse.Namespace) -> Path:
    path: Path = options.folder / f"{name}.{form}.onnx"
    bits = FORMS[form]
    if bits is not None and not path.exists():
        graph = onnx_ir.load(options.folder / f"{name}.float32.onnx")
        done = quantize_weights(graph, bits, lambda matrix: True)
        onnx_ir.save(graph, path)
        print(f"{path.name}: {len(done)} matrices packed", flush=True)
    return path


def table(options: argparse.Namespace) -> None:
    held = windows(options)
    names = [(name, form) for form in options.forms for name in ("dense", "sparse")]
    files = {one: file_of(*one, options) for one in names}
    sessions = {one: OnnxSession(path, options.threads) for one, path in files.items()}
    steps = {one: steps_of(session, options) for one, session in sessions.items()}
    times: dict[tuple[str, str], list[float]] = {one: [] for one in names}
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for turn in range(options.rounds + 1):
        shift = turn % len(names)
        for one in names[shift:] + names[:shift]:
            start = clock()
            for step in steps[one]:
                sessions[one](step)
            if turn:  # the first round warms up
                times[one].append((clock() - start) / options.tokens)
    print(f"SmolLM2-135M, {options.recipe}; {options.past} tokens before, {options.threads} thread(s), {options.rounds} rounds")
    print(f"{'':<18}{'ms a token':>12}{'over dense':>12}{'over dense float32':>20}{'MiB':>8}{'loss':>9}")
    for name, form in names:
        mine = times[name, form]
        cells = [ratio(times["dense", base], mine) for base in (form, options.forms[0])]
        size = files[name, form].stat().st_size / 2**20
        loss = loss_of(sessions[name, form], held)
        print(
            f"{name:<8}{form:<10}{1e3 * statistics.median(mine):>12.2f}{cells[0]:>12.2f}{cells[1]:>20.2f}{size:>8.0f}{loss:>9.4f}",
            flush=True,
        )


def ratio(base: list[float], mine: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(base, mine, strict=True))


def windows(options: argparse.Namespace) -> torch.Tensor:
    """Of the end of the demo's text, which no start was fitted to: (windows, 128)."""
    from experiment import TEXTS, SmolLM2

    ids = torch.tensor(SmolLM2().tokenizer(TEXTS[0][-(len(TEXTS[0]) * 3 // 100) :])["input_ids"])
    return ids[: options.windows * 128].view(options.windows, 128)


def inputs_of(ids: torch.Tensor, past: int = 0) -> dict[str, torch.Tensor]:
    mask = torch.ones(1, past + ids.shape[1], dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(past, past + ids.shape[1])[None]}


def steps_of(session: OnnxSession, options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """The inputs of the steps that follow a prompt, one token each."""
    past, steps = options.past, []
    ids = torch.randint(1000, 40000, (1, past + options.tokens), generator=torch.Generator().manual_seed(1))
    outputs = session({**inputs_of(ids[:, :past]), **session.empty_states(1)})
    for place in range(past, past + options.tokens):
        steps.append({**inputs_of(ids[:, place : place + 1], place), **next_step_states(outputs)})
        outputs = session(steps[-1])
    return steps


def loss_of(session: OnnxSession, held: torch.Tensor) -> float:
    losses = []
    for row in held:
        logits = session({**inputs_of(row[None]), **session.empty_states(1)})["logits"][0, :-1]
        losses.append(float(F.cross_entropy(logits.float(), row[1:])))
    return statistics.mean(losses)


# Single operators.


def operators(options: argparse.Namespace) -> None:
    """Thirty gated feed-forwards after one another, each of matrices of its own, for one token."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, D)).astype("f")
    sessions = {name: feed_forwards(build, rng) for name, build in forms().items()}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(options.rounds):
        for name, session in sessions.items():
            units = torch.from_numpy(np.sort(rng.choice(D_FF, ACTIVE, replace=False)))
            start = time.perf_counter()
            session({"x": torch.from_numpy(x), "units": units})
            times[name].append(time.perf_counter() - start)
    print(f"30 feed-forwards, d = {D}, d_ff = {D_FF}, {ACTIVE} rows gathered; one token, median of {options.rounds} rounds")
    for name, mine in times.items():
        print(f"{name:<60}{1e3 * statistics.median(mine):>8.2f} ms")


Nodes = list[Any]
Held = dict[str, np.ndarray]
Build = Callable[[str, str, str, int, int, np.random.Generator], tuple[Nodes, Held]]


def forms() -> dict[str, Build]:
    return {
        "dense, float32": dense,
        "dense, DynamicQuantizeMatMul": dynamic,
        "dense, MatMulNBits, 8 bits, multiplying float32": blocks(8, 0),
        "dense, MatMulNBits, 8 bits, multiplying int8": blocks(8, 4),
        "dense, MatMulNBits, 4 bits, multiplying int8": blocks(4, 4),
        "gathered, float32": gathered("float32"),
        "gathered, int8, its rows scaled": gathered("rows"),
        "gathered, int8, what they are multiplied by scaled": gathered("columns"),
        "gathered, GatherBlockQuantized, 8 bits": gathered("blocks", 8),
        "gathered, GatherBlockQuantized, 4 bits": gathered("blocks", 4),
    }


def feed_forwards(build: Build, rng: np.random.Generator) -> OnnxSession:
    nodes, held, x = [], {}, "x"
    for layer in range(30):
        for role, into, out, rows, columns in (("gate", x, "g", D, D_FF), ("up", x, "u", D, D_FF), ("down", "h", "y", D_FF, D)):
            at = into if into == x else f"{into}{layer}"
            made, more = build(f"{role}{layer}", at, f"{out}{layer}", rows, columns, rng)
            if role == "down":
                nodes.append(helper.make_node("Mul", [f"g{layer}", f"u{layer}"], [f"h{layer}"]))
            nodes, held = nodes + made, held | more
        x = f"y{layer}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, D])]
    if any("units" in node.input for node in nodes):
        inputs.append(helper.make_tensor_value_info("units", TensorProto.INT64, [ACTIVE]))
    outputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [numpy_helper.from_array(one, name) for name, one in held.items()])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return OnnxSession(helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString(), 1)


def dense(name: str, x: str, y: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[Nodes, Held]:
    matrix = (rng.standard_normal((rows, columns)) / 30).astype("f")
    return [helper.make_node("MatMul", [x, name], [y])], {name: matrix}


def dynamic(name: str, x: str, y: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[Nodes, Held]:
    held = {
        name: rng.integers(-127, 128, (rows, columns)).astype("i1"),
        f"{name}.s": np.full(columns, 4e-4, "f"),
        f"{name}.z": np.zeros(columns, "i1"),
    }
    return [helper.make_node("DynamicQuantizeMatMul", [x, *held], [y], domain="com.microsoft")], held


def blocks(bits: int, level: int) -> Build:
    def build(name: str, x: str, y: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[Nodes, Held]:
        held = {
            name: rng.integers(0, 256, (columns, rows // BLOCK, BLOCK * bits // 8)).astype("u1"),
            f"{name}.s": np.full((columns, rows // BLOCK), 4e-4, "f"),
        }
        how = {"K": rows, "N": columns, "bits": bits, "block_size": BLOCK} | ({"accuracy_level": level} if level else {})
        return [helper.make_node("MatMulNBits", [x, *held], [y], domain="com.microsoft", **how)], held

    return build


def gathered(form: str, bits: int = 8) -> Build:
    def build(name: str, x: str, y: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[Nodes, Held]:
        r = f"{name}.r"
        held: Held
        if form == "float32":
            held = {name: (rng.standard_normal((D_FF, D)) / 30).astype("f")}
            nodes = [helper.make_node("Gather", [name, "units"], [r])]
        elif form == "rows":
            held = {name: rng.integers(-127, 128, (D_FF, D)).astype("i1"), f"{name}.s": np.full((D_FF, 1), 4e-4, "f")}
            nodes = [helper.make_node("Gather", [one, "units"], [f"{one}.few"]) for one in held]
            nodes.append(helper.make_node("Cast", [f"{name}.few"], [f"{name}.n"], to=TensorProto.FLOAT))
            nodes.append(helper.make_node("Mul", [f"{name}.n", f"{name}.s.few"], [r]))
        elif form == "columns":
            held = {name: rng.integers(-127, 128, (D_FF, D)).astype("i1"), f"{name}.s": np.full(D_FF, 4e-4, "f")}
            nodes = [helper.make_node("Gather", [one, "units"], [f"{one}.few"]) for one in held]
            nodes.append(helper.make_node("Cast", [f"{name}.few"], [r], to=TensorProto.FLOAT))
        else:
            held = {
                name: rng.integers(0, 256, (D_FF, D * bits // 8)).astype("u1"),
                f"{name}.s": np.full((D_FF, D // BLOCK), 4e-4, "f"),
            }
            how = {"gather_axis": 0, "quantize_axis": 1, "block_size": BLOCK, "bits": bits}
            nodes = [helper.make_node("GatherBlockQuantized", [name, "units", f"{name}.s"], [r], domain="com.microsoft", **how)]
        if columns == D:  # down: what it multiplies is scaled
            if form == "columns":
                nodes.append(helper.make_node("Mul", [x, f"{name}.s.few"], [f"{name}.x"]))
                x = f"{name}.x"
            nodes.append(helper.make_node("MatMul", [x, r], [y]))
        elif form == "columns":
            nodes.append(helper.make_node("Gemm", [x, r], [f"{name}.y"], transB=1))
            nodes.append(helper.make_node("Mul", [f"{name}.y", f"{name}.s.few"], [y]))
        else:
            nodes.append(helper.make_node("Gemm", [x, r], [y], transB=1))
        return nodes, held

    return build


if __name__ == "__main__":
    main()
