"""The commands that write something, with tiny models: what is given to them, and what they leave on the disk."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import torch
import transformers

RUN = "import sys; from retrofit.cli import main; sys.exit(main(sys.argv[1:]))"
APPLY = ("apply", "--pass", "altup", "--no-verify")  # what is tested with it is not the check, which takes most of the time
UNFINISHED = ".retrofit-{}.unfinished"
OWN = ("seconds_per_step", "output", "folder")  # entries of a run's record that no two runs have in common


@dataclasses.dataclass(frozen=True)
class Work:
    """A command, where {name} is a file of the materials; what it writes, and what of it is on the disk before it is done."""

    arguments: str
    output: str
    unfinished: str = ""
    again: str = ""  # what is added to go on where there is something to go on from
    replaces: bool = True  # with --force


TRAIN = "train {dense} --data {text} --steps 8 --length 16 --batch-size 2 --eval-every 4 --save-every 2 --eval-fraction 0.1"
WORKS = {
    "apply to a file": Work("apply --pass sum --no-verify {model}", "out.pt"),
    "train": Work(TRAIN, "out", "out.run", "--resume"),
    "apply": Work("apply --pass sum {dense}", "out"),
    "stream": Work("apply --stream --pass sum --no-verify {dense}", "out", UNFINISHED.format("out")),
    "export": Work("export {dense}", "out.onnx"),
    "bundle": Work("bundle {rewritten}", "out"),
    "teach": Work("teach {dense} --data {text} --length 16 --top 4", "out", "out", replaces=False),
}


def given(work: Work, materials: Path, folder: Path) -> list[str]:
    """The words of the command, which writes into the folder."""
    files = {"dense": "dense", "model": "model.pt", "rewritten": "rewritten", "text": "text.txt"}
    words = [one.format(**{name: materials / file for name, file in files.items()}) for one in shlex.split(work.arguments)]
    return [*words, "-o", str(folder / work.output)]


def contents(path: Path) -> dict[str, Any]:
    """What is in a file or below a directory, without what no two runs have in common."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    found: dict[str, Any] = {str(one.relative_to(path)): one.read_bytes() for one in files if one.suffix != ".png"}
    if "run.json" in found:
        record = json.loads(found["run.json"])
        found["run.json"] = {key: value for key, value in record.items() if key not in OWN}
        found = {name: value for name, value in found.items() if not name.startswith("checkpoint-")}
    return found


def require_no_complaint(ended: Any) -> None:
    """Nothing that the command said is a failure that was unexpected error."""
    assert "Traceback" not in ended.err and "unexpected error" not in ended.err, ended.err


def only_stages(said: str) -> bool:
    """Whether every line on stderr names a stage of the work, and none is an error, a note or a library's."""
    return all(re.match(r"retrofit: (?!error|note)", line) for line in said.splitlines())


def gpt2(seed: int = 0, width: int = 32, layers: int = 3) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=2, vocab_size=300, n_positions=32, bos_token_id=0, eos_token_id=0
        )
    ).eval()


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=3,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=300,
            max_position_embeddings=32,
        )
    ).eval()
