"""Whether vLLM, with the plugin, computes what transformers does of rewritten models.

    VLLM/bin/python benchmarks/serving/served.py -o TABLE             make vllm; goes on after the rows that TABLE has
    VLLM/bin/python benchmarks/serving/served.py --only llama --passes altup sum
    VLLM/bin/python benchmarks/serving/served.py --only llama --passes sparse-qkv recurrence "memory(lookup=ngram" --fault
    VLLM/bin/python benchmarks/serving/served.py --only llama gpt2 phi --processes 2 --settings "at once"
    VLLM/bin/python benchmarks/serving/served.py --speed DIR          tokens a second beside a dense model, on an idle machine

Every parameter is moved away from where the pass put it. Prompts of unlike lengths, some with a common beginning, are continued
greedily: by `generate` in transformers, each alone, and by vLLM at once, and in chunks of 24 tokens with a cache so small that
sequences are preempted; then again, with known prefixes, and with two samples for each prompt; and, of the first family, with a
LoRA adapter, which is in the weights of what transformers computes. A row says how far a log-probability
of a prompt's token or of a new one is off, and how many greedy continuations are other ones. A family is first tried dense, in
vLLM's Transformers backend alone: what that does not run is no fault of ours, and its row is wrong only if a number is off.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import dataclasses
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))  # set by `launch`
IS_FIRST = os.environ.get("RANK", "0") == "0"  # of the processes
PORTS = itertools.count(29600)  # one for each model that is divided

VOCABULARY = 200
SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 512, "n_inner": 96, "num_key_value_heads": None},
    "gpt_neox": {"num_key_value_heads": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None},
    "mistral": {"sliding_window": 40},
    "gemma2": {"sliding_window": 40, "query_pre_attn_scalar": 32},
    "phi": {"num_key_value_heads": 2},
}
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "opt", "phi", "olmo2", "granite", "gemma2", "cohere"),
    *("starcoder2", "smollm3"),
)
PASSES = (
    "altup(k=2)",
    "altup(k=2, embedding=recycled)",
    "altup(k=2, coefficients=dynamic)",
    "sum",
    "shared-moe(experts=4, k=2, groups=0)",
    "shared-moe(experts=4, groups=1)",
    "shared-moe(experts=2, slices=4, groups=0)",
    "sparse-ffn(sparsity=8)",
    "activation-sparsity(level=0.4)",
    "reversible",
    "sparse-loss(modules=4)",
    "memory",
    "memory(beside=values)",
    "memory(form=gated, rank=8)",
    "memory(tables=host)",
    "memory(lookup=softmax)",
    "memory(lookup=lsh)",
    "memory(lookup=ngram, buckets=512)",
    "sparse-qkv",
    "recurrence",
)
TOGETHER = (  # each of these passes, several in one model, with which families other than the first are tried
    "altup(k=2) + memory(lookup=ngram, buckets=512) + recurrence",
    "altup(k=2, embedding=recycled) + shared-moe(experts=2, slices=4, groups=0) + sparse-qkv + memory",
    "memory(form=gated, rank=8) + altup(k=2, coefficients=dynamic) + sparse-ffn(sparsity=8)",
    "sum + shared-moe(experts=4, groups=1) + memory(tables=host)",
    "memory(lookup=softmax) + reversible + shared-moe(experts=4, k=2, groups=0)",
    "activation-sparsity(level=0.4) + memory(lookup=lsh) + sparse-loss(modules=4)",
    "recurrence + memory(beside=values)",
)
REFUSED = ("sequence-altup(k=2)", "lsh-attention")
TIMED = ("altup(k=2, embedding=recycled)", "memory", "shared-moe(experts=2, slices=4, groups=0)", "recurrence")
DENSE = "dense"  # no pass: vLLM's Transformers backend alone, which has to run a family before a rewritten one can
BASE = {"enforce_eager": True, "dtype": "float32", "max_model_len": 256, "block_size": 32, "max_num_seqs": 8}
NEW = 64
CLOSE = 1e-4  # of log-probabilities in float32


@dataclasses.dataclass(frozen=True)
class Setting:
    """How vLLM is run."""

    name: str
    options: dict[str, Any]
    again: bool  # whether the prompts come twice, the second time with known prefixes, and then with two samples for each
    compiled: bool = False


AT_ONCE = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 512}
IN_CHUNKS = {"enable_prefix_caching": True, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 12}
RANK = 4  # of an adapter
SETTINGS = (
    Setting("at once", AT_ONCE, again=False),
    Setting("in chunks", IN_CHUNKS, again=True),
    Setting("LoRA", {**AT_ONCE, "enable_lora": True, "max_lora_rank": 8}, again=False),  # of the first family, as is the next
    Setting("compiled", {**IN_CHUNKS, "enforce_eager": False}, again=True, compiled=True),
)


def label(setting: Setting) -> str:
    return setting.name if PROCESSES == 1 else f"{setting.name}, {PROCESSES} processes"


def prompts(model: Any = None) -> list[list[int]]:
    """Return prompts of unlike lengths; the second, third and fourth have one beginning.

    It is longer for a model with a sliding window: where its layers need blocks of unlike sizes, vLLM reuses 96 tokens at a time.
    """
    import torch

    draw = torch.Generator().manual_seed(7)
    shared = 96 if model is not None and has_window(model) else 64
    beginning = torch.randint(3, VOCABULARY, (shared + 6,), generator=draw).tolist()
    own = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in (5, 3, 17, 33, 1)]
    return [own[0], beginning + own[1], beginning + own[2], beginning[:shared], own[3], own[4]]


def has_window(model: Any) -> bool:
    return bool(getattr(model.config, "sliding_window", None))


def dense(family: str) -> Any:
    """Return a small random model of a family, or the one in a directory.

    Its attention is the eager one: transformers' others leave out a cap of attention scores, which Gemma 2 has.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    if Path(family).is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32, attn_implementation="eager").eval()
    sizes = {**SIZES, **OWN.get(family, {})}
    config = transformers.AutoConfig.for_model(family, **{name: value for name, value in sizes.items() if value is not None})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def written(model: Any, spec: str, folder: Path, noise: float) -> Any:
    """Return the model after the passes, its parameters moved, as it was saved to the folder."""
    import torch

    import retrofit
    from retrofit.passbase.protocol import parse_spec

    recipe = spec.split(" + ") if spec != DENSE else []
    if recipe:
        needed = any(parse_spec(part).needs_calibration for part in recipe)
        ids = torch.randint(3, VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(2))
        retrofit.apply(model, *recipe, verify=False, calibration=ids if needed else None)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(noise * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model.eval()


def write_adapter(model: Any, folder: Path) -> None:
    """Write a LoRA adapter of the linear layers of transformers' own modules, as PEFT does, and add it to their weights."""
    import safetensors.torch
    import torch

    torch.manual_seed(3)
    tensors = {}
    for path, module in model.base_model.named_modules():
        for name, child in module.named_children() if type(module).__module__.startswith("transformers.") else ():
            if type(child) is torch.nn.Linear:
                a, b = torch.randn(RANK, child.in_features) / child.in_features**0.5, 0.1 * torch.randn(child.out_features, RANK)
                child.weight.data += b @ a
                place = f"base_model.model.{model.base_model_prefix}.{path}.{name}"
                tensors |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "task_type": "CAUSAL_LM"}
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence, and what vLLM says of the likeliest and chosen tokens of each step."""

    prompt: list[int]
    tokens: list[int]
    of_prompt: list[Any]
    of_tokens: list[Any]

    def entries(self) -> Iterator[tuple[int, int, Any]]:
        """Yield a position, the token that may follow, and what is said of it."""
        for first, steps in ((0, self.of_prompt), (len(self.prompt) - 1, self.of_tokens)):
            for position, step in enumerate(steps, first):
                yield from ((position, token, entry) for token, entry in step.items())


def log_probabilities(model: Any, cases: Iterable[Case]) -> Any:
    """Return what transformers computes for the entries of each case."""
    import torch

    found = []
    for case in cases:
        with torch.no_grad():
            rows = model(torch.tensor([case.prompt + case.tokens])).logits[0].double().log_softmax(-1)
        found += [rows[position, token] for position, token, _ in case.entries()]
    return torch.stack(found)


def continuations(model: Any) -> list[list[int]]:
    """Return for each prompt the tokens that follow in transformers."""
    import torch

    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts(model)]


@contextlib.contextmanager
def engine(folder: Path, options: dict[str, Any]) -> Iterator[Any]:
    """vLLM with the model, gone afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    made = None
    if PROCESSES > 1:
        os.environ["MASTER_PORT"] = str(next(PORTS))
        options = {**options, "tensor_parallel_size": PROCESSES, "distributed_executor_backend": "external_launcher"}
    try:
        made = LLM(str(folder), skip_tokenizer_init=True, disable_log_stats=False, **{**BASE, **options})
        yield made
    finally:
        del made
        gc.collect()
        cleanup_dist_env_and_memory()


@dataclasses.dataclass
class Found:
    """What vLLM gave in a setting."""

    gap: float = 0.0  # the largest difference of a log-probability
    compared: int = 0
    others: int = 0  # continuations with another token
    known: int = 0  # tokens whose keys, values and states were there already
    preemptions: int = 0
    rounding: float = 0.0  # of a trained model: the largest difference between transformers in float32 and float64

    def __str__(self) -> str:
        own = f", float32 {self.rounding:.1e}" if self.rounding else ""
        return f"{self.gap:.1e}{own} ({self.compared}), {self.others} other, {self.known} known, {self.preemptions} preempted"


def compare(folder: Path, model: Any, expected: list[list[int]], setting: Setting, is_trained: bool = False) -> Found:
    """Return how far vLLM is from transformers; for a trained model, from transformers in float64."""
    import torch
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_for_torch_compile = lambda self: None  # of classes with which this process computes what is expected
    found = Found()
    adapter = LoRARequest("adapter", 1, str(folder / "adapter")) if setting.options.get("enable_lora") else None
    common: dict[str, Any] = {"max_tokens": NEW, "logprobs": 1, "ignore_eos": True, "detokenize": False}
    asked = [SamplingParams(temperature=0, prompt_logprobs=1, **common)]  # for which a prompt is computed, known or not
    if setting.again:
        asked += [SamplingParams(temperature=0, **common), SamplingParams(temperature=1, n=2, **common)]
    requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts(model)]
    compiling = torch._dynamo.config.patch(disable=not setting.compiled)  # vLLM compiles helpers of its own, for each size anew
    cases: list[Case] = []
    with compiling, engine(folder, setting.options) as llm:
        for sampling in asked:
            results = llm.generate(requests, sampling, use_tqdm=False, lora_request=adapter)
            for prompt, following, result in zip(prompts(model), expected, results, strict=True):
                found.known += result.num_cached_tokens or 0
                for output in result.outputs:
                    tokens = list(output.token_ids)
                    found.others += not sampling.temperature and tokens != following
                    cases.append(Case(prompt, tokens, (result.prompt_logprobs or [None])[1:], output.logprobs))
        counts = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
        found.preemptions = int(sum(counts))
    said = torch.tensor([entry.logprob for case in cases for _, _, entry in case.entries()], dtype=torch.float64)
    computed = log_probabilities(model, cases)
    if is_trained:
        exact = log_probabilities(model.double(), cases)
        found.rounding, computed = (computed - exact).abs().max().item(), exact
        model.float()
    found.gap, found.compared = (said - computed).abs().max().item(), len(said)
    return found


def speed(llm: Any, sequences: int) -> tuple[float, float]:
    """Return the tokens a second of greedy continuations at once, and per second of processor time."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    requests: Any = [{"prompt_token_ids": prompt} for prompt in itertools.islice(itertools.cycle(prompts()), sequences)]
    begin, used = time.perf_counter(), time.process_time()
    llm.generate(requests, asked, use_tqdm=False)
    tokens = sequences * NEW
    return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - used)


def write_speeds(directory: str, specs: Iterable[str], rounds: int, sequences: list[int], compiled: bool) -> None:
    """Print for each model the medians of rounds, in which each has its turn. All models are in memory from the beginning."""
    common: dict[str, Any] = {"enforce_eager": not compiled, "enable_prefix_caching": False, "max_num_seqs": max(sequences)}
    found: dict[int, dict[str, list[tuple[float, float]]]] = {count: {} for count in sequences}
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        engines = {"dense, vLLM's own": stack.enter_context(engine(Path(directory), {"model_impl": "vllm", **common}))}
        for number, spec in enumerate(specs):
            folder = Path(place, str(number))
            written(dense(directory), spec, folder, 0)
            engines[spec] = stack.enter_context(engine(folder, common))
        for llm, count in itertools.product(engines.values(), sequences):
            speed(llm, count)  # shapes that are new to it
        print("all models are ready", flush=True)
        for _ in range(rounds):
            for count, (name, llm) in itertools.product(sequences, engines.items()):
                found[count].setdefault(name, []).append(speed(llm, count))
    for count, of_models in found.items():
        first = [statistics.median(column) for column in zip(*next(iter(of_models.values())), strict=True)]
        for name, values in of_models.items():
            for kind, column, of_dense in zip(
                ("second", "second of processor time"), zip(*values, strict=True), first, strict=True
            ):
                middle, spread = statistics.median(column), f"{min(column):.1f} to {max(column):.1f}"
                said = f"{count} at once {middle:7.1f} tokens a {kind} ({spread}), {middle / of_dense:.2f} of dense"
                print(f"{name:45} {said}", flush=True)


@contextlib.contextmanager
def shifted() -> Iterator[None]:
    """A fault: states are read a slot too far; in several processes, the parts of all but the first begin an entry too early."""
    from retrofit.anatomy.feed_forwards import TensorShare
    from retrofit.serving import vllm_model
    from retrofit.serving.slot_tables import Places

    own, own_share, own_heads = Places.before, TensorShare.of, vllm_model.own_heads

    def before(self: Any, *arguments: Any) -> Any:
        late = copy.copy(self)
        late.positions = self.positions + 1
        return own(late, *arguments)

    def share(self: Any, whole: Any) -> Any:
        entries = self.entries
        if self.part and entries is not None:
            entries = slice(entries.start - 1, entries.stop - 1) if isinstance(entries, slice) else entries - 1
        return own_share(dataclasses.replace(self, entries=entries), whole)

    def heads(x: Any, count: int) -> Any:
        return own_heads(x if IS_FIRST else x.roll(1, 1), count)

    if PROCESSES > 1:
        TensorShare.of, vllm_model.own_heads = share, heads  # type: ignore[method-assign]
    else:
        Places.before = before  # type: ignore[method-assign]
    try:
        yield
    finally:
        Places.before, TensorShare.of, vllm_model.own_heads = own, own_share, own_heads  # type: ignore[method-assign]


def rows_of(families: list[str], passes: list[str], everything: bool) -> Iterator[tuple[str, str]]:
    """Yield families and passes: dense, each pass of the first and several together, these alone of others unless all is asked."""
    for number, family in enumerate(families):
        alone = (*PASSES, *REFUSED) if everything or passes or not number else ()
        specs = (DENSE, *alone, *TOGETHER)
        yield from ((family, spec) for spec in specs if not passes or any(spec.startswith(name) for name in passes))


def row_of(family: str, spec: str, settings: list[str], fault: bool) -> dict[str, Any]:
    """Return what came of a family after a pass, by setting; "not made" where the pass does not fit."""
    from retrofit.errors import DoesNotFitError

    row: dict[str, Any] = {"family": Path(family).name, "pass": spec}
    with tempfile.TemporaryDirectory() as place:
        try:
            model = written(dense(family), spec, Path(place), 0.003 if Path(family).is_dir() else 0.03)
        except DoesNotFitError as error:
            return {**row, "not made": str(error).splitlines()[0]}
        expected = continuations(model)
        for setting in SETTINGS:
            if setting.name in settings:
                if setting.options.get("enable_lora"):
                    write_adapter(model, Path(place, "adapter"))
                    expected = continuations(model)
                if has_window(model) and "num_gpu_blocks_override" in setting.options:
                    blocks = 2 * setting.options["num_gpu_blocks_override"]  # two kinds of layers, each with blocks of its own
                    setting = dataclasses.replace(setting, options={**setting.options, "num_gpu_blocks_override": blocks})
                if spec == DENSE:
                    setting = dataclasses.replace(setting, options={**setting.options, "model_impl": "transformers"})
                try:
                    with shifted() if fault else contextlib.nullcontext():
                        row[label(setting)] = dataclasses.asdict(
                            compare(Path(place), model, expected, setting, Path(family).is_dir())
                        )
                except Exception as error:
                    row[label(setting)] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return row


def is_as_wanted(row: dict[str, Any], fault: bool) -> bool:
    """Return whether a row is what it is to be: equal, refused where it is to be, or off where there is a fault."""
    found = [value for value in row.values() if not isinstance(value, str)]
    said = [value for name, value in row.items() if isinstance(value, str) and name not in ("family", "pass", "not made")]
    if row["pass"] == DENSE and said:
        return not found
    if row["pass"] in REFUSED:
        return not found and all("does not run in vLLM" in text for text in said)
    equal = all(one["gap"] <= max(CLOSE, 2 * one["rounding"]) and not one["others"] for one in found)
    return not said and (bool(found) and not equal if fault else equal)


COLUMNS = ("largest difference", "compared", "other tokens", "known tokens", "preempted", "of float32")  # of `Found`
Rows = dict[tuple[str, str], dict[str, Any]]  # by family and pass


def write_table(rows: Rows, path: Path) -> None:
    """Write a line for each setting of each row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["family", "pass", "setting", *COLUMNS, "said"])
        for (family, spec), row in rows.items():
            for name, value in [item for item in row.items() if item[0] not in ("family", "pass")]:
                said = isinstance(value, str)
                gap, *counts, own = [""] * len(COLUMNS) if said else value.values()
                of_float32 = f"{own:.1e}" if own else ""
                table.writerow([family, spec, name, gap if said else f"{gap:.1e}", *counts, of_float32, value if said else ""])


def read_table(path: Path) -> Rows:
    """Return the rows of a table that are as wanted; none where there is no table."""
    rows: Rows = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for family, spec, name, gap, *counts, own, said in list(csv.reader(file))[1:]:
                value = said or dataclasses.asdict(Found(float(gap), *map(int, counts), float(own or 0)))
                rows.setdefault((family, spec), {"family": family, "pass": spec})[name] = value
    return {key: row for key, row in rows.items() if is_as_wanted(row, fault=False)}


def launch(processes: int) -> int:
    """Run this command in so many processes, each of which has a part of every model; return the highest exit status."""
    if left := sorted(Path("/dev/shm").glob("-tp:*-cpushm_*")):  # vLLM gives those of every run the same names
        raise SystemExit(f"{', '.join(map(str, left))}: another vLLM runs, or was stopped; remove them if none runs")
    common = {**os.environ, "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    running = [
        subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    return max(process.wait() for process in running)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(FAMILIES), help="families, or directories of trained models")
    parser.add_argument("--passes", nargs="*", default=[], help="beginnings of their specs")
    parser.add_argument("--settings", nargs="*", default=[setting.name for setting in SETTINGS])
    parser.add_argument("--everything", action="store_true", help="every pass of every family")
    parser.add_argument("--processes", type=int, default=1, help="among which each model is divided")
    parser.add_argument(
        "--fault", action="store_true", help="with states, or parts of tensors, a place off: every row has to be off"
    )
    parser.add_argument("-o", "--output", type=Path, help="the rows as a table (CSV), added to those that it has")
    parser.add_argument(
        "--speed", metavar="DIR", help="instead: tokens a second of the model in a directory, dense and after passes"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of --speed: measurements of each model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8], help="of --speed: numbers that are continued at once")
    parser.add_argument("--compiled", action="store_true", help="of --speed: compiled, as vLLM runs models unless told otherwise")
    arguments = parser.parse_args()
    if arguments.processes > PROCESSES:
        return launch(arguments.processes)
    if arguments.speed is not None:
        write_speeds(arguments.speed, arguments.passes or TIMED, arguments.rounds, arguments.sequences, arguments.compiled)
        return 0
    rows, wrong = read_table(arguments.output) if arguments.output is not None else {}, 0
    for family, spec in rows_of(arguments.only, arguments.passes, arguments.everything):
        name = Path(family).name
        known = rows.get((name, spec), {})
        wanted = SETTINGS if family == arguments.only[0] else SETTINGS[:2]
        settings = [one.name for one in wanted if one.name in arguments.settings and not {label(one), "not made"} & known.keys()]
        if not settings:
            continue
        row = row_of(family, spec, settings, arguments.fault)
        fine = is_as_wanted(row, arguments.fault)
        wrong += not fine
        rows[name, spec] = {**known, **row}
        if not IS_FIRST:
            continue
        for setting, value in [item for item in row.items() if item[0] not in ("family", "pass")]:
            said = value[:200] if isinstance(value, str) else Found(**value)
            print(f"{'' if fine else 'WRONG ':6}{name:9} {spec:45} {setting:9} {said}", flush=True)
        if arguments.output is not None:
            write_table(rows, arguments.output)
    if IS_FIRST:
        print(f"{len(rows)} rows, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
