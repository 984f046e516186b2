"""What `retrofit apply --stream` takes: memory at most, and time against that of copying the files it reads and writes.

    python benchmarks/larger_than_memory.py --size 1b
    python benchmarks/larger_than_memory.py --size 7b --pass "altup(k=2)" --verify
    python benchmarks/larger_than_memory.py --size mixture-2b --load
    python benchmarks/larger_than_memory.py --size 1b --pass "sparse-ffn(sparsity=8)" --calibrate text.txt

A model with random weights in bfloat16 is written shard by shard to a temporary folder in --folder; nothing of it is ever whole in
memory. Each pass is applied to it in a process of its own, whose memory is looked at every 20 ms: resident is all of it, own is
without the pages of mapped files, which the system can take back. Before each measurement the files that it reads are dropped from
the page cache. Copying is that of as many bytes as the result has, read from the source and brought to the disk (fsync).
Seconds are those that passed; busy are those that the process kept a processor, which say more on a machine that others use too.
With --load the result is loaded by stock `from_pretrained(device_map="auto", max_memory=…)` with the layers on the disk, and makes
one token.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2000},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "vocab_size": 32000},
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "mixture-smoke": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 2000,
        "num_local_experts": 8,
        "num_key_value_heads": 2,
    },
    "mixture-2b": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_key_value_heads": 8,
    },
}
SPECS = ("altup(k=2)", "memory(lookup=softmax, rank=16)", "shared-moe(groups=1)")
GB = 1e9
POOL = 10_000_019  # random numbers; each weight is these, from a place of its own on, over and over


def layers_of(sizes: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The shapes of the weights by their published names, a part of the model at a time."""
    d, units, rows = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    heads, keys = sizes["num_attention_heads"], sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    yield {"model.embed_tokens.weight": (rows, d)}
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {f"{at}{norm}_layernorm.weight": (d,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (d, d) for name in "qo"}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (d // heads * keys, d) for name in "kv"}
        if "num_local_experts" in sizes:
            shapes[f"{at}block_sparse_moe.gate.weight"] = (sizes["num_local_experts"], d)
            for expert in range(sizes["num_local_experts"]):
                inner = f"{at}block_sparse_moe.experts.{expert}."
                shapes |= {f"{inner}w1.weight": (units, d), f"{inner}w3.weight": (units, d), f"{inner}w2.weight": (d, units)}
        else:
            shapes |= {f"{at}mlp.{name}_proj.weight": (units, d) for name in ("gate", "up")}
            shapes[f"{at}mlp.down_proj.weight"] = (d, units)
        yield shapes
    yield {"model.norm.weight": (d,), "lm_head.weight": (rows, d)}


def write_model(sizes: dict[str, Any], folder: Path) -> None:
    """A random model in `folder`, a shard a layer."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, MixtralConfig

    folder.mkdir()
    mixture = "num_local_experts" in sizes
    config = (MixtralConfig if mixture else LlamaConfig)(**sizes, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = ["MixtralForCausalLM" if mixture else "LlamaForCausalLM"]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(POOL).uniform_(-0.035, 0.035, generator=generator).to(torch.bfloat16)  # drawn once: drawing is slow
    parts = list(layers_of(sizes))
    names: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            start = int(torch.randint(POOL, (1,), generator=generator))
            drawn = torch.cat([pool[start:], *[pool] * (count // POOL), pool])[:count].view(shape)
            tensors[name] = drawn.clone() if len(shape) > 1 else torch.ones(shape, dtype=torch.bfloat16)
            names[name], total = file, total + tensors[name].nbytes
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copying(source: Path, target: Path, size: int) -> tuple[float, float]:
    """Seconds, and busy ones, to copy `size` bytes of the source's files, again if they are fewer, and bring them to the disk."""
    drop_from_page_cache(source)
    target.mkdir()
    files = sorted(source.glob("*.safetensors"))
    start, busy, copied = time.perf_counter(), time.process_time(), 0
    while copied < size:
        for number, file in enumerate(files):
            if copied < size:
                place = target / f"{copied}-{number}"
                shutil.copyfile(file, place)
                descriptor = os.open(place, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
                copied += file.stat().st_size
    part = size / copied
    seconds = (time.perf_counter() - start) * part, (time.process_time() - busy) * part
    shutil.rmtree(target)
    return seconds


def busy_seconds() -> float:
    """That processors were busy with commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(command: list[str]) -> tuple[float, float, int, int]:
    """Seconds that a command took, and was busy, and the most bytes that were resident, and that were its own."""
    start, before = time.perf_counter(), busy_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    resident = own = 0
    while process.poll() is None:
        try:
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
            resident = max(resident, int(lines["VmHWM"].split()[0]) * 1024)
            own = max(own, int(lines["RssAnon"].split()[0]) * 1024)
        except (OSError, KeyError):
            pass  # it has just ended
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    assert process.stdout is not None
    said = process.stdout.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{said}")
    return seconds, busy_seconds() - before, resident, own


LOAD = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], device_map="auto", max_memory={"cpu": sys.argv[2]}, offload_folder=sys.argv[1] + ".offload", dtype="auto"
)
assert "disk" in model.hf_device_map.values(), model.hf_device_map
print(model(torch.tensor([[1, 2, 3]])).logits.argmax(-1).tolist())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--pass", dest="specs", action="append", help=f"a pass with its options (default: {', '.join(SPECS)})")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where there is room for two such models")
    parser.add_argument("--calibrate", metavar="FILE", type=Path, help="text that the passes fit to")
    parser.add_argument("--verify", action="store_true", help="with the checks that run in a stream")
    parser.add_argument("--load", action="store_true", help="load each result with its layers on the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, output = Path(name) / "model", Path(name) / "result"
        write_model(SIZES[options.size], source)
        print(f"{options.size}: {size_of(source) / GB:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, bfloat16")
        print("| pass | result | resident | own | time | busy | copying as much | busy |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for spec in options.specs or SPECS:
            drop_from_page_cache(source)
            recipe = Path(name) / "recipe.txt"
            recipe.write_text(spec + "\n")
            command = [sys.executable, "-m", "retrofit.cli", "apply", "--stream", "--recipe", str(recipe), str(source)]
            command += ["-o", str(output)] + ([] if options.verify else ["--no-verify"])
            command += ["--calibrate", str(options.calibrate)] if options.calibrate else []
            seconds, busy, resident, own = measured(command)
            size = size_of(output)
            loaded = ""
            if options.load:
                allowed = f"{max(1, size // 4 // 2**20)}MiB"
                loading, _, most, _ = measured([sys.executable, "-c", LOAD, str(output), allowed])
                loaded = f"    loaded with {allowed} for weights: {loading:.1f} s, {most / GB:.2f} GB resident\n"
                shutil.rmtree(f"{output}.offload", ignore_errors=True)
            shutil.rmtree(output)  # before there is a copy: a disk need not have room for both
            copied, copied_busy = copying(source, Path(name) / "copy", size)
            memory, times = (resident, own), (seconds, busy, copied, copied_busy)
            figures = " | ".join([*(f"{one / GB:.2f} GB" for one in memory), *(f"{one:.1f} s" for one in times)])
            how = (", calibrated" if options.calibrate else "") + (", verified" if options.verify else "")
            print(f"| `{spec}`{how} | {size / GB:.2f} GB | {figures} |\n{loaded}", end="", flush=True)


if __name__ == "__main__":
    main()
