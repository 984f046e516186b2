"""A teacher's predictions on disk: for every token of a text's windows the k largest probabilities and the sum of the rest.

A folder with `teacher.json`, the facts that they depend on, and shards of a fixed number of windows, in the order of the text:

    ids                (windows, seq, k)   the vocabulary's most probable ids, the most probable first
    log_probabilities  (windows, seq, k)   of these, at the temperature in `teacher.json`, in float16
    log_rest           (windows, seq)      of all others together
    loss               (windows)           the teacher's own

A window is found by its number in the text, so training may draw windows in any order. The hidden tokens of a window, if the
objective hides tokens, depend only on its number and the seed in `teacher.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from retrofit.errors import CheckpointError, TrainingError
from retrofit.files.atomic_writes import whole_file
from retrofit.files.headers import Extent, extents_in
from retrofit.training.distillation import LargestPredictions, LogitHead, Predictions, total_divergence
from retrofit.training.layerwise import DenseSites
from retrofit.training.objectives import token_logits
from retrofit.training.windows import WINDOW

RECORD = "teacher.json"
FORMAT = "retrofit teacher's predictions"
SHARDS = "windows-*.safetensors"
TENSORS = ("ids", "log_probabilities", "log_rest", "loss")
OPEN = 64  # shards


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that a teacher's predictions depend on."""

    teacher: str  # path of the teacher; "" for one in memory
    weights: str  # a hash
    vocabulary: int
    tokenizer: str  # a hash
    objective: str
    example: str  # hash of the inputs and targets of the first window
    length: int  # tokens a window
    windows: int
    text: str  # a hash of the windows
    top: int  # k
    temperature: float
    seed: int
    bf16: bool
    shard: int  # windows a shard

    @property
    def shards(self) -> int:
        return -(-self.windows // self.shard)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A fact that differs between two sides, as text, with the fix."""

    what: str
    why: str
    remedy: str


class KeptPredictions:
    """The predictions in a folder."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder, self.facts = folder, facts
        self.shard = functools.lru_cache(OPEN)(self.open_shard)

    @staticmethod
    def in_folder(folder: str | Path) -> KeptPredictions:
        """Return the predictions in a folder; raises `TrainingError` if it holds none or is incomplete."""
        folder = Path(folder)
        facts = read_facts(folder)
        if facts is None:
            raise TrainingError(
                f"{folder} holds no predictions of a teacher",
                why=f"it has no {RECORD} of retrofit teach",
                remedy=f"write them with retrofit teach DENSE --data TEXT -o {folder}, or name the dense model itself",
                code="missing",
                option="teacher",
            )
        kept = KeptPredictions(folder, facts)
        missing = kept.missing()
        if missing:
            raise TrainingError(
                f"{folder} is incomplete",
                why=f"{facts.shards - len(missing)} of {facts.shards} files are there",
                remedy="run the same retrofit teach command again to continue",
                code="incomplete",
                option="teacher",
            )
        return kept

    def path(self, number: int) -> Path:
        """Return the file of the shard with this number."""
        return self.folder / f"windows-{number:06}.safetensors"

    def missing(self) -> list[int]:
        """Return the numbers of the missing shards."""
        return [number for number in range(self.facts.shards) if not self.path(number).is_file()]

    def write(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Write the shard with this number completely or not at all."""
        with whole_file(self.path(number), force=True) as file:
            file.write(save({name: value.contiguous() for name, value in tensors.items()}))

    def open_shard(self, number: int) -> Any:
        """Return the opened shard, which agrees with `Facts`; raises `CheckpointError` if it does not."""
        file = self.path(number)
        try:
            require_shapes(extents_in(file), self.rows_of(number), self.facts.top)
            return safe_open(file, "pt")
        except Exception as error:
            raise damaged(file, error.why if isinstance(error, CheckpointError) else str(error)) from error

    def rows_of(self, number: int) -> int:
        """Return the number of windows in the shard with this number."""
        return min(self.facts.shard, self.facts.windows - number * self.facts.shard)

    def rows(self, name: str, windows: Sequence[int]) -> Tensor:
        """Return one of the tensors above for these windows: (windows, …)."""
        places = (divmod(window, self.facts.shard) for window in windows)
        return torch.cat([self.shard(number).get_slice(name)[row : row + 1] for number, row in places])

    def predictions(self, windows: Sequence[int]) -> LargestPredictions:
        """Return the teacher's predictions for the tokens of these windows, in order."""
        ids, log_p, log_rest = (self.rows(name, windows).flatten(0, 1) for name in ("ids", "log_probabilities", "log_rest"))
        if ids.numel() and not 0 <= int(ids.long().min()) <= int(ids.long().max()) < self.facts.vocabulary:
            raise damaged(self.path(windows[0] // self.facts.shard), f"it names ids beyond the {self.facts.vocabulary:,} there are")
        return LargestPredictions(ids, log_p, log_rest)

    def loss(self, windows: Sequence[int]) -> float:
        """Return the teacher's own loss, the mean over these windows."""
        return float(self.rows("loss", windows).double().mean())

    def kept_share(self) -> float:
        """Return the total probability of a token's k ids: the mean over all tokens."""
        rests = torch.cat([self.shard(number).get_tensor("log_rest").flatten() for number in range(self.facts.shards)])
        return 1.0 - float(rests.double().exp().mean())

    def size(self) -> int:
        """Size on disk in bytes."""
        return sum(self.path(number).stat().st_size for number in range(self.facts.shards))


def damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read", why=why, remedy="remove it and run the same retrofit teach command again", code="unreadable"
    )


def require_shapes(found: Mapping[str, Extent], windows: int, top: int) -> None:
    """Raise `ValueError` if the tensors of a shard do not have the shapes listed above."""
    shapes = {name: found[name].shape for name in TENSORS if name in found}
    kept = shapes.get("ids", ())
    expected = {"ids": (windows, *kept[1:2], top), "log_probabilities": kept, "log_rest": kept[:-1], "loss": kept[:1]}
    if len(kept) != 3 or shapes != expected or found["ids"].dtype.is_floating_point:
        raise ValueError(f"its tensors are {shapes}, and should be of {windows} windows and {top} ids a token")


def are_facts(facts: Facts) -> bool:
    """Return whether every fact has its type, and every count is at least one."""
    kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    typed = all(
        isinstance(value := getattr(facts, field.name), kinds[str(field.type)])
        and (field.type == "bool" or not isinstance(value, bool))
        for field in dataclasses.fields(Facts)
    )
    return typed and min(facts.vocabulary, facts.length, facts.windows, facts.shard) >= 1 and facts.top >= 0


def read_facts(folder: Path) -> Facts | None:
    """Return the facts that the predictions in a folder depend on; None if it holds no predictions."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record.pop("format") != FORMAT:
            return None
        facts = Facts(**record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return facts if are_facts(facts) else None


def write_facts(folder: Path, facts: Facts) -> None:
    with whole_file(folder / RECORD, force=True) as file:
        file.write(json.dumps({"format": FORMAT, **dataclasses.asdict(facts)}, indent=2, ensure_ascii=False).encode())


def difference(kept: Facts, facts: Facts) -> Difference | None:
    """Return the first fact in which predictions on disk differ from what is needed; None if they fit."""
    again = "write the predictions again for it with retrofit teach, to another folder"
    if kept.vocabulary != facts.vocabulary:
        why = f"it has {kept.vocabulary:,} tokens, the model {facts.vocabulary:,}"
        return Difference("another vocabulary", why, "name the predictions of the dense model that was rewritten")
    if kept.tokenizer != facts.tokenizer:
        return Difference("another tokenizer", "the same text would be other tokens", "use the tokenizer of the teacher")
    if kept.length != facts.length:
        why = f"its windows have {kept.length} tokens, those of this run {facts.length}"
        return Difference("windows of another length", why, f"use --length {kept.length}, or {again}")
    if kept.text != facts.text:
        why = f"it was given {kept.windows:,} windows, this run has {facts.windows:,}"
        why = why if kept.windows != facts.windows else "there are as many windows, of other tokens"
        return Difference("another text", why, f"use the same --data in the same order, or {again}")
    if (kept.objective, kept.example) != (facts.objective, facts.example):
        why = f"it learned {kept.objective}, the model learns {facts.objective}"
        why = why if kept.objective != facts.objective else "the model would read or predict other tokens of the first window"
        return Difference("another objective", why, "name the predictions of the dense model that was rewritten")
    if kept.temperature != facts.temperature:
        why = f"its predictions are those at temperature {kept.temperature:g}, this run compares them at {facts.temperature:g}"
        return Difference("another temperature", why, f"use --temperature {kept.temperature:g}, or {again}")
    return None


@dataclasses.dataclass(frozen=True)
class KeptTeacher:
    """A teacher with predictions on disk and no module to learn from."""

    kept: KeptPredictions
    sites: DenseSites

    @staticmethod
    def of(folder: str | Path, student: nn.Module, facts: Facts) -> KeptTeacher:
        """Return the teacher whose predictions are in `folder`. Raises `TrainingError` if they depend on other facts."""
        kept = KeptPredictions.in_folder(folder)
        found = difference(kept.facts, facts)
        if found is not None:
            raise TrainingError(
                f"the predictions in {folder} are of {found.what}",
                why=found.why,
                remedy=found.remedy,
                code="other-run",
                option="teacher",
            )
        return KeptTeacher(kept, DenseSites(student, student, ()))

    @contextlib.contextmanager
    def teaching(self, device: torch.device) -> Iterator[None]:
        """Do nothing: predictions are moved to the student's device when they are needed."""
        yield

    def forward(self, batch: Mapping[str, Any]) -> None:
        """Do nothing: there is no model to run."""

    def predictions(self, batch: Mapping[str, Any], head: LogitHead | None) -> Predictions:
        """Return the predictions for all tokens of a batch."""
        return self.kept.predictions(batch[WINDOW].tolist())

    def divergence(self, outputs: Any, batch: Mapping[str, Any], temperature: float) -> Tensor:
        """Return the mean over all tokens of the divergence of the student's outputs for a batch from the teacher's predictions."""
        student = token_logits(outputs)
        if student.shape[-1] != self.kept.facts.vocabulary:
            raise TrainingError(
                f"the model's logits are {student.shape[-1]:,} numbers a token",
                why=f"the teacher's vocabulary has {self.kept.facts.vocabulary:,} tokens",
                remedy="use the dense model with --teacher",
                code="other-vocabulary",
                option="teacher",
            )
        return total_divergence(student, self.predictions(batch, None), temperature) / student[..., 0].numel()
