"""The page that is written from the results: what each part found, what failed, and what has not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from on_cuda.parts import FAILED

Results = Mapping[str, Any]

DENSE_CALLED = "dense called"  # in a row of another model
PEERS_SLOW, PEERS_FAST = 0.86, "1.5 to 1.8"
HEAD = """# On a GPU

Written by `python benchmarks/gpu.py` (`make gpu`), from what it measured in one run or several; nothing here was typed by hand.
A figure is a median, taken with the device's own events after a warm-up. ×: how much faster than the dense model or way in the same
row or table; above 1 is faster. –: not measured."""


def page(results: Results, keys: Sequence[str]) -> str:
    """The whole page; `keys` are the names of all parts, in the order in which they are listed."""
    places = {key: place for place, key in enumerate(keys)}
    results = dict(sorted(results.items(), key=lambda one: places.get(one[0], len(places))))
    sections = [
        HEAD,
        machine(results),
        yardstick(results),
        verdict(results),
        rows(results),
        tiles(results),
        decoding(results),
        mixtures(results),
    ]
    sections += [steps(results), depths(results), checks(results), large(results), recovery(results), sequences(results)]
    sections += [failed(results), missing(results, keys)]
    return "\n\n".join(section for section in sections if section)


# ── Cells and tables ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))


def section(title: str, text: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A section with a table, nothing where the table is empty."""
    return f"## {title}\n\n{text}\n\n{table(head, lines)}" if lines else ""


def number(value: Any, digits: int = 3) -> str:
    """A figure to so many digits, `failed` for what an exception said, a dash for none."""
    if isinstance(value, (str, dict)):
        return "failed"
    return "–" if value is None else f"{value:.{digits}g}"


def times(dense: Any, mine: Any) -> str:
    """How much faster `mine` is, a dash where one of them is not known."""
    known = isinstance(dense, (int, float)) and isinstance(mine, (int, float))
    return f"×{dense / mine:.2f}" if known else "failed" if isinstance(mine, (str, dict)) else "–"


def gib(value: Any) -> str:
    return f"{value / 2**30:.2f}" if isinstance(value, (int, float)) else "–"


def of(results: Results, prefix: str) -> dict[str, Any]:
    """The results whose names begin so, by the rest of the name."""
    return {key.removeprefix(prefix): value for key, value in results.items() if key.startswith(prefix)}


# ── What the device is, and what it says about reading rows ──────────────────────────────────────────────────────────────────────


def machine(results: Results) -> str:
    one = results.get("machine", {})
    if "device" not in one:
        return "The machine was not described: its part has not run."
    if one.get("rehearsal"):
        return "**A rehearsal at tiny sizes: no figure here says anything.**"
    versions = ", ".join(f"{name} {one[name]}" for name in ("torch", "transformers", "triton"))
    moved, multiplied = f"{one['copy TB/s']:.2f} TB/s", f"{one['bf16 TFLOP/s']:.0f} TFLOP/s"
    ceilings = f"It copies {moved}, bytes read and written, and multiplies {multiplied} in bfloat16"
    return f"**{one['device']}**, {one['processors']} multiprocessors, {one['CPUs']} CPUs; {versions}.\n{ceilings}."


BARS = {  # aims: a compiled step's time over the dense one's, a token's speed; two more depend on what was measured
    "altup(k=2, embedding=recycled)": (1.04, 0.97),
    "altup(k=4, embedding=recycled)": (1.08, None),
    "sequence-altup(k=2)": (None, None),
    "sequence-altup(k=4)": (None, 1.15),
    "shared-moe(groups=0, slices=4)": (1.25, 0.95),
    "shared-moe(groups=0, k=1)": (None, 0.9),
    "sparse-ffn(sparsity=8)": (1.15, None),
}
STRIDED, OVER_PRODUCTS = "sequence-altup", 1.1  # a step's time over what its FLOPs say
TWICE, OF_BYTES = "shared-moe(groups=0, k=2)", 0.9  # a token's speed over what the bytes that it reads allow


def yardstick(results: Results) -> str:
    """The page's first lines, by which one decides, and the table that they are read from."""
    found = of(results, "yardstick: ")
    said = [line for name, one in found.items() if (line := in_words(name, one))]
    lines = []
    for name, one in found.items():
        cells = [f"`{name}`"]
        for way in ("called", "compiled"):
            step, token = one.get(f"steps, {way}", {}), one.get(f"tokens, {way}", {})
            cells += [number(step.get("dense", step.get(FAILED))), number(step.get("pass", step.get(FAILED))), longer(step)]
            cells += [number(token.get("pass", token.get(FAILED))), times(token.get("dense"), token.get("pass"))]
        head = one.get("heads", {})
        cells += [number(head.get("dense")), number(head.get("pass")), without_heads(one, "compiled") or "–"]
        lines.append([*cells, number(one.get("steps, called", {}).get("products"))])
    head = ["", "dense step", "step", "takes", "token", "×", "dense step, compiled", "step", "takes", "token", "×"]
    head += ["dense head", "head", "takes without heads", "products"]
    text = (
        "A Llama of 1.1 billion parameters, 16 layers, bfloat16, 32,000 ids; milliseconds, dense and pass in one process in turns. "
        "A step is forward, backward and AdamW on 4 × 2048 tokens; a token is decoded at batch 1 in a CUDA graph. Compiled: "
        "in training every layer by itself, in decoding the model. `takes` is how much longer than dense, × how much faster; the "
        "last column is the forward's FLOPs over the dense one's."
    )
    table_of = section("The yardstick", text, head, lines)
    return "\n\n".join(part for part in ("\n".join(said), table_of) if part)


def in_words(name: str, one: Mapping[str, Any]) -> str:
    """What the figures of a pass say, and whether they reach what was aimed at, in one line; empty where there are none."""
    step, token = (one.get(f"{what}, compiled", {}) for what in ("steps", "tokens"))
    products, read = one.get("steps, called", {}).get("products"), token.get("bytes")
    most, least = BARS.get(name, (None, None))
    found = []
    if longer(step).startswith("×"):
        most = OVER_PRODUCTS * products if name.startswith(STRIDED) and products else most
        rest = without_heads(one, "compiled")
        text = f"a compiled training step takes {longer(step)} the dense model's time" + (
            f", {rest} without the heads" if rest else ""
        )
        found.append(text + reached(step["pass"] / step["dense"], most, at_most=True))
    if times(token.get("dense"), token.get("pass")).startswith("×"):
        speed, least = token["dense"] / token["pass"], OF_BYTES / read if name == TWICE and read else least
        found.append(f"a token is decoded at ×{speed:.2f} the dense model's speed" + reached(speed, least, at_most=False))
    return f"- `{name}`: {'; '.join(found)}." if found else ""


def reached(value: float, aim: float | None, *, at_most: bool) -> str:
    """Return whether the aim is reached, in parentheses; empty without an aim."""
    if aim is None:
        return ""
    met = value <= aim if at_most else value >= aim
    return f" (aim: {'at most' if at_most else 'at least'} ×{aim:.2f}, {'reached' if met else 'missed'})"


def longer(step: Mapping[str, Any]) -> str:
    """How much longer the step of the pass takes."""
    known = all(isinstance(step.get(which), (int, float)) for which in ("dense", "pass"))
    return f"×{step['pass'] / step['dense']:.2f}" if known else "failed" if FAILED in step else "–"


def without_heads(one: Mapping[str, Any], way: str) -> str:
    """The same without what the heads take by themselves."""
    step, head = one.get(f"steps, {way}", {}), one.get("heads", {})
    if not all(isinstance(value.get(which), (int, float)) for value in (step, head) for which in ("dense", "pass")):
        return ""
    dense = step["dense"] - head["dense"]
    return f"×{(step['pass'] - head['pass']) / dense:.2f}" if dense > 0 else ""


def verdict(results: Results) -> str:
    """What peers report, next to what was found here."""
    lines = [f"- {text}" for text in (alone(results), in_a_model(results)) if text]
    if not lines:
        return ""
    said = (
        f"Others report that sparse kernels which win on a CPU lose on CUDA (×{PEERS_SLOW}), and that reading half of the rows "
        f"gives ×{PEERS_FAST} for one token. Here:"
    )
    return f"## Where this stands\n\n{said}\n\n" + "\n".join(lines)


def alone(results: Results) -> str:
    """Of the feed-forward by itself, one token, half of the rows."""
    found = []
    for size, cells in of(results, "rows: crossover ").items():
        for kind in ("called", "graph"):
            one = cells.get("N=8 k=4 tokens=1", {}).get(kind, {})
            given = times(one.get("dense"), one.get("rows given"))
            if "rows" in one:
                found.append(f"{size} {kind}: {times(one.get('dense'), one['rows'])}, its rows given {given}")
    return (
        "half of the rows of a feed-forward, one token, with the controller that chooses them: " + "; ".join(found) if found else ""
    )


def in_a_model(results: Results) -> str:
    """Of whole models, batch 1, half of the rows."""
    plain, compiled = of(results, "decode: "), of(results, "compiled: ")
    dense, found = plain.get("dense", {}).get("batch 1", {}), []
    fast = compiled.get("dense, batch 1", {})
    for name, row in plain.items():
        if name.endswith("rows read") and "active=4" in name:
            one, other = row.get("batch 1", {}), compiled.get(f"{name}, batch 1", {})
            kinds = ("called", "graph") if DENSE_CALLED in one else ("graph",)
            speeds = [f"{kind} {times(dense_time(dense, one, kind), one.get(kind))}" for kind in kinds]
            found.append(f"`{name}`: {', '.join(speeds)}, compiled {times(fast.get('compiled'), other.get('compiled'))}")
    return "a whole decoder, batch 1: " + "; ".join(found) if found else ""


# ── Rows of a feed-forward ───────────────────────────────────────────────────────────────────────────────────────────────────────


def rows(results: Results) -> str:
    """Whether the kernels are right, and the four ways by tokens."""
    lines = []
    for size, cells in of(results, "rows: crossover ").items():
        for setting, row in cells.items():
            if not isinstance(row, dict):
                continue
            lines.append([size, setting, *speeds(row, ("mask", "rows", "rows given")), row.get("rule", "–")])
    head = ["d", "", "dense, µs", "mask", "rows", "rows given", "dense, µs (graph)", "mask", "rows", "rows given", "the rule takes"]
    text = "One feed-forward of d and 4 d, bfloat16, its weights read from memory: as calls from Python, then as a CUDA graph."
    found = section("Reading rows", text, head, lines)
    return "\n\n".join(one for one in (kernels_right(results), columns(results), found) if one)


def speeds(row: Mapping[str, Any], ways: Sequence[str]) -> list[str]:
    """Microseconds of the dense way and how much faster the others are, as calls and as a graph."""
    cells = []
    for kind in ("called", "graph"):
        one = row.get(kind, {})
        cells += [number(scaled(one.get("dense"), 1e3)), *(times(one.get("dense"), one.get(way)) for way in ways)]
    return cells


def columns(results: Results) -> str:
    """A layer after activation-sparsity."""
    lines = []
    for size, cells in of(results, "columns: ").items():
        for setting, row in cells.items():
            if not isinstance(row, dict):
                continue
            lines.append([size, setting, *speeds(row, ("mask", "columns")), number(row.get("differs"), 1)])
    head = ["", "", "dense, µs", "mask", "columns", "dense, µs (graph)", "mask", "columns", "‖columns − mask‖ / ‖mask‖"]
    text = (
        "A Llama layer after `activation-sparsity`, bfloat16: dense products of the masked inputs, and only the columns that these "
        "need (two tokens: those that either needs); as calls from Python, then as a CUDA graph."
    )
    return section("Columns", text, head, lines)


def kernels_right(results: Results) -> str:
    errors = {name: one for name, one in results.get("rows: right", {}).items() if isinstance(one, dict)}
    lines = [
        [name, *(f"{one[kind]:.1e}" for kind in ("products", "sums", "allowed")), verdict_of(one)] for name, one in errors.items()
    ]
    text = (
        "‖out − ref‖ / ‖ref‖ of the Triton kernels of `passes/triton_kernels.py`, against float64, the largest over several shapes."
    )
    return section("The kernels", text, ["", "products", "sums", "allowed", ""], lines)


def verdict_of(one: Mapping[str, float]) -> str:
    return "right" if max(one["products"], one["sums"]) <= one["allowed"] else "**wrong**"


def tiles(results: Results) -> str:
    found = {name: one for name, one in results.get("rows: tiles", {}).items() if isinstance(one, dict)}
    lines = [[name, *(f"{setting}: {number(scaled(time, 1e3))}" for setting, time in one.items())] for name, one in found.items()]
    longest = max(map(len, lines), default=0)
    text = (
        "Microseconds of each kernel for one token and half of the rows, as a CUDA graph, by the rows and columns that a program "
        "reads at a time and its warps; `programs`: the sums, by how many programs they are split into."
    )
    return section("Tiles", text, [""] * longest, [[*line, *[""] * (longest - len(line))] for line in lines])


def scaled(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, (int, float)) else value


# ── Decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def decoding(results: Results) -> str:
    """Tokens a second of every pass, by batch: called, as a graph, compiled."""
    plain, compiled = of(results, "decode: "), of(results, "compiled: ")
    batches = list(dict.fromkeys(name for one in plain.values() for name in one if name.startswith("batch")))
    tables = []
    for batch in batches:
        dense, fast = plain.get("dense", {}).get(batch, {}), compiled.get(f"dense, {batch}", {})
        lines = []
        for name, row in plain.items():
            one, other = row.get(batch, row), compiled.get(f"{name}, {batch}", {})
            made = other.get("compiled", other.get(FAILED))
            cells = [f"`{name}`"]
            for kind in ("called", "graph"):
                mine = one.get(kind, one.get(FAILED))
                cells += [number(mine), times(dense_time(dense, one, kind), mine)]
            cells += [number(one.get("graph differs"), 2), number(made), times(fast.get("compiled"), made)]
            cells += [number(other.get("compiled, no graphs")), number(other.get("graph breaks")), number(other.get("differs"), 2)]
            lines.append(cells)
        head = ["", "called", "×", "graph", "×", "differs", "compiled", "×", "no graphs", "breaks", "differs"]
        tables.append(f"### {batch.capitalize()}\n\n{table(head, lines)}")
    text = (
        "Milliseconds a token of a Llama with four layers as wide as those of a model of a billion parameters, bfloat16, static "
        "cache, behind 128 tokens. A graph is one CUDA graph of four plain calls; compiled is `torch.compile`, "
        '`mode="reduce-overhead"`. `differs` is how far the logits are from those of plain calls, ‖a − b‖ / ‖b‖: more than a few '
        "percent means that this way is wrong or, of a pass that chooses what it computes, that rounding decides some choices."
    )
    if not any(DENSE_CALLED in row.get(batch, {}) for row in plain.values() for batch in batches):
        text += (
            " The dense model was called in another process than each of the others, and how long calls from Python take depends "
            "on the process too: only graphs and what is compiled are to be compared here."
        )
    for name, one in of(results, "exact: ").items():
        text += f" `{name}` compiled in float32, batch 1: {number(one.get('differs', one.get(FAILED)), 2)}."
    return "\n\n".join([f"## Decoding\n\n{text}", *tables, *growing(results)]) if tables else ""


def dense_time(dense: Mapping[str, Any], row: Mapping[str, Any], kind: str) -> Any:
    """Milliseconds of the dense model: as it was called in the row's own process, where it was, else in its own."""
    return row[DENSE_CALLED] if kind == "called" and DENSE_CALLED in row else dense.get(kind)


def growing(results: Results) -> list[str]:
    """With a cache that grows, as torch chooses its attention and without cuDNN's."""
    found = of(results, "growing: ")
    dense, lines = found.get("dense", {}), []
    for name, one in found.items():
        cells = [f"`{name}`"]
        for way in ("as chosen", "without cuDNN"):
            mine = one.get(way, one.get(FAILED))
            cells += [number(mine), times(dense.get(way), mine)]
        lines.append(cells)
    text = (
        "Milliseconds a token of plain calls at batch 1. torch takes cuDNN's attention first on some GPUs, which makes a plan for "
        "every length of the keys; `torch.backends.cuda.enable_cudnn_sdp(False)` leaves it out."
    )
    head = ["", "as torch chooses", "×", "without cuDNN's", "×"]
    return [f"### A cache that grows\n\n{text}\n\n{table(head, lines)}"] if lines else []


# ── Mixtures, training, memory ───────────────────────────────────────────────────────────────────────────────────────────────────


def mixtures(results: Results) -> str:
    lines = []
    for name, row in results.get("mixtures", {}).items():
        if isinstance(row, dict):
            one, step = row.get("forward", {}), row.get("step", {})
            ways = ("one expert", "grouped", "loop", "copied", "every")
            lines.append([name, *(number(one.get(way)) for way in ways), number(step.get("grouped")), number(step.get("loop"))])
    head = ["", "one expert", "grouped", "loop", "copied", "every", "step, grouped", "step, loop"]
    text = (
        "Milliseconds of a mixture of gated experts; `one expert` is the dense feed-forward of that size. A step is forward and "
        "backward."
    )
    return section("Grouped products", text, head, lines)


def steps(results: Results) -> str:
    found = of(results, "train: ")
    dense, lines = found.get("dense", {}), []
    for name, one in found.items():
        above = one["peak"] - one["before"] if "peak" in one else None
        before = dense["peak"] - dense["before"] if "peak" in dense else None
        ratio = f"×{one['step'] / dense['step']:.2f}" if "step" in one and "step" in dense else "–"
        more = f"×{above / before:.2f}" if above and before else "–"
        lines.append([f"`{name}`", number(one.get("step", one.get(FAILED))), ratio, gib(one.get("before")), gib(above), more])
    text = (
        "Forward, backward and AdamW, bfloat16, 4×1024 tokens, four layers of d = 2048; ratios to the dense model, of time and of "
        "memory. Above 1 is slower, or more."
    )
    head = ["", "ms a step", "time", "GiB before", "GiB more at most", "memory"]
    return section("Training steps", text, head, lines)


def depths(results: Results) -> str:
    lines = []
    for name, one in of(results, "memory by depth: ").items():
        used = {depth: two["peak"] - two["before"] for depth, two in one.items() if isinstance(two, dict)}
        few, many = [*used.values(), None, None][:2]
        ratio = f"×{many / few:.2f}" if few and many else "–"
        lines.append([name, gib(few), gib(many), ratio])
    text = (
        "GiB that forward and backward take above the model and its gradients, few layers and many (`DEPTHS` in "
        "`benchmarks/on_cuda/steps.py`)."
    )
    return section("Memory by depth", text, ["", "few", "many", "ratio"], lines)


# ── Whole rewrites and runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def checks(results: Results) -> str:
    lines = []
    for name, one in of(results, "checks: ").items():
        spec, _, dtype = name.rpartition(", ")
        status = [check for check, status in one.get("checks", {}).items() if status == "passed"]
        lines.append([f"`{spec}`", dtype, "failed" if FAILED in one or not one["ok"] else f"{len(status)} passed"])
    text = "Every pass on a small model on the device, with all checks; what failed is at the end of the page."
    return section("Checks on the device", text, ["", "", "checks"], lines)


def large(results: Results) -> str:
    lines = []
    for name, one in of(results, "apply ").items():
        size, _, spec = name.partition(": ")
        for way in ("unverified", "verified"):
            row = one.get(way, {})
            lines.append(
                [size, f"`{spec}`", way, number(row.get("seconds", one.get(FAILED))), gib(row.get("before")), gib(row.get("peak"))]
            )
    text = (
        "`retrofit.apply` on a Llama of random bfloat16 weights on the device, without data: seconds, GiB before it and at most "
        "during it."
    )
    return section("Large models", text, ["", "", "", "seconds", "GiB before", "GiB at most"], lines)


def recovery(results: Results) -> str:
    found = of(results, "recovery: ")
    model = found.get("model", {})
    lines = []
    for name, one in found.items():
        if name == "model":
            continue
        losses = one.get("eval_losses", [])
        start = one.get("start_loss") if one.get("start_loss") is not None else losses[0][1] if losses else None
        last = losses[-1][1] if losses else one.get(FAILED)
        cells = [one.get("model", "–"), name, number(one.get("dense_loss"), 5), number(start, 5), number(last, 5)]
        lines.append([*cells, str(one.get("steps", "–")), number(one.get("seconds_per_step"))])
    absent = f" Not installed there: {', '.join(model['not installed'])}." if model.get("not installed") else ""
    size = f" The model has {model['parameters']:,} parameters.{absent}" if "parameters" in model else ""
    text = f"`sparse-ffn(sparsity=8, active=4)`, calibrated, then trained on; held-out losses in nats.{size}"
    head = ["model", "way", "dense", "at the start", "at the end", "steps", "seconds a step"]
    return section("A recovery run", text, head, lines)


def sequences(results: Results) -> str:
    lines = []
    for name, row in results.get("attention in buckets", {}).items():
        if isinstance(row, dict):
            one = row.get("milliseconds", {})
            memory = [gib(above(row.get(f"{way} bytes"))) for way in ("dense", "buckets")]
            lines.append(
                [name, number(one.get("dense")), number(one.get("buckets")), times(one.get("dense"), one.get("buckets")), *memory]
            )
    text = "One causal attention, 16 heads of 64, two rounds of hashes: milliseconds, and GiB above its operands."
    found = section("Long sequences", text, ["", "dense", "buckets", "×", "GiB, dense", "GiB, buckets"], lines)
    scans = [[name, *(number(one.get(way)) for way in ("all at once", "in chunks", "loop"))] for name, one in scanned(results)]
    head = ["", "all at once", "in chunks (as exported)", "loop"]
    return "\n\n".join(
        one for one in (found, section("The scan of a recurrence", "Milliseconds, forward and backward.", head, scans)) if one
    )


def above(memory: Any) -> Any:
    return memory["peak"] - memory["before"] if isinstance(memory, dict) and "peak" in memory else None


def scanned(results: Results) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in results.get("scan", {}).items() if isinstance(one, dict)]


# ── What failed, and what is missing ─────────────────────────────────────────────────────────────────────────────────────────────


def failures(results: Any, path: str = "") -> Iterator[str]:
    """What exceptions said, each with where."""
    for key, value in results.items():
        where = f"{path} › {key}" if path and key != FAILED else path or key
        if key == FAILED or key.endswith(f" {FAILED}") or (isinstance(value, str) and "Error:" in value):
            yield f"{where}: {value}"
        elif isinstance(value, dict):
            yield from failures(value, where)


def failed(results: Results) -> str:
    lines = [f"- {line}" for line in failures(results)]
    return "\n".join(["## What failed", "", *lines]) if lines else ""


def missing(results: Results, keys: Sequence[str]) -> str:
    absent = [key for key in keys if key not in results]
    if not absent:
        return "Every part has run."
    said = f"{len(absent)} of {len(keys)} parts; the same command goes on with them."
    return "\n".join(["## What has not run", "", said, "", *(f"- {key}" for key in absent)])
