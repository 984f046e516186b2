"""The trainer of a sharded model, which nothing is wrapped around; checkpoints are in parts that any number of processes reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.training import processes
from retrofit.training.sharded_checkpoints import fill_from_parts, read_parts, write_parts
from retrofit.training.trainers import DistillingTrainer, PretrainingTrainer
from retrofit.training.whole_checkpoints import SCHEDULER, not_whole, read_entry, require_numbers, require_state

WEIGHTS, OPTIMIZER = "weights", "optimizer"  # kinds of files
GROUPS = "param_groups"


class ShardedTrainer(PretrainingTrainer):
    """Trains a model that `sharding` made, or a whole one in a single process."""

    def __init__(self, **rest: Any) -> None:
        if processes.count() > 1:
            rest["model"]._is_accelerate_prepared = True  # accelerate leaves it as it is
        super().__init__(**rest)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Its parts are there already."""
        if processes.count() == 1:
            model.to(device)

    def shared_batches(self, rows: int, size: int) -> Iterator[tuple[range, bool]]:
        """As many batches for each process, because each needs the parts of the others; what is too many does not count."""
        step = size * processes.count()
        for first in range(0, rows, step):
            start = first + size * processes.number()
            counts = start < rows
            yield range(start, min(start + size, rows)) if counts else range(min(size, rows)), counts

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        assert output_dir is not None and self.model is not None
        write_parts(Path(output_dir), WEIGHTS, self.model.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.plain_optimizer.state_dict()
        named = {f"{index}.{key}": value for index, entry in state["state"].items() for key, value in entry.items()}
        write_parts(Path(output_dir), OPTIMIZER, {**named, GROUPS: state[GROUPS]})
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)
        processes.wait()  # the state of the trainer, which is written next, says that the checkpoint is whole

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        assert self.model is not None
        folder = Path(resume_from_checkpoint)
        parts = read_parts(folder, WEIGHTS)
        for name, value in self.model.state_dict().items():
            fill_from_parts(value, name, parts, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, optimizer = Path(checkpoint), self.plain_optimizer
        parts = read_parts(folder, OPTIMIZER)
        groups = parts[0].get(GROUPS)
        own = optimizer.state_dict()[GROUPS]
        if not isinstance(groups, list) or [len(one["params"]) for one in groups] != [len(one["params"]) for one in own]:
            raise not_whole(folder, "the optimizer's groups are not those of the model")
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        optimizer.load_state_dict({"state": dict(states(parameters, parts, folder)), GROUPS: groups})
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(dict(read_entry(folder / SCHEDULER)))

    @property
    def plain_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # type: ignore[return-value]

    def require_checkpoint(self, folder: Path) -> None:
        require_state(folder)
        require_numbers(folder)
        for kind in (WEIGHTS, OPTIMIZER):
            read_parts(folder, kind)


class ShardedDistillingTrainer(ShardedTrainer, DistillingTrainer):
    """The same, learning from the predictions of a teacher whose parameters are divided as the model's are."""


def states(parameters: list[nn.Parameter], parts: list[Mapping[str, Any]], folder: Path) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The optimizer's state of each parameter that has one: divided as the parameter is, or a number."""
    for index, parameter in enumerate(parameters):
        keys = [name.partition(".")[2] for name in parts[0] if name.startswith(f"{index}.")]
        entry = {}
        for key in keys:
            name = f"{index}.{key}"
            like = parameter.detach() if parts[0][name]["size"] else torch.zeros(())
            entry[key] = torch.zeros_like(like)
            fill_from_parts(entry[key], name, parts, folder)
        if entry:
            yield index, entry
