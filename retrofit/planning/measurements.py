"""The measurements for a plan, by name: each is written to a folder at once, so that an interrupted run resumes.

The folder contains `measured.json`, with the facts that the measurements depend on, and sketches of the effect of each replacement
on the predictions. Without a folder they are in memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from retrofit.errors import PlanningError, first_line
from retrofit.files.atomic_writes import whole_file
from retrofit.passbase.protocol import AnyPass
from retrofit.planning.variants import short_spec
from retrofit.training.teaching import short_hash

RECORD = "measured.json"
FORMAT = "retrofit plan's measurements"
NAMES = {"text": "text, or in how many of its tokens are used"}  # of facts, in messages
NOISE = 0.01  # of a time


class MeasurementStore:
    """All measurements so far."""

    def __init__(self, folder: Path | None, facts: dict[str, Any], *, force: bool = False) -> None:
        self.folder, self.facts = folder, facts
        self.values: dict[str, Any] = {}
        self.sketches: dict[str, Tensor] = {}
        if folder is not None:
            self.open(folder, force=force)

    @staticmethod
    def value_in(folder: Path | None, name: str) -> Any:
        """Return the value `name` in a folder, of any plan; None if there is none."""
        try:
            return None if folder is None else json.loads((folder / RECORD).read_text(encoding="utf-8"))["values"][name]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # `open` reports the problem
            return None

    def open(self, folder: Path, *, force: bool) -> None:
        """Read the folder's measurements. Raises `PlanningError` if they are of something else, unless `force`."""
        record = folder / RECORD
        if folder.exists() and not (folder.is_dir() and (record.is_file() or not any(folder.iterdir()))):
            raise PlanningError(
                f"{folder} exists already",
                why="it does not hold measurements of retrofit plan",
                remedy="choose another -o",
                code="occupied",
            )
        if not record.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            return
        try:
            kept = json.loads(record.read_text(encoding="utf-8"))
            facts, values = kept["facts"], dict(kept["values"])
            known = kept["format"] == FORMAT
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PlanningError(
                f"{record} cannot be read", why=str(error), remedy="remove the directory, or choose another -o", code="unreadable"
            ) from error
        if known and facts == self.facts:
            self.values = values
            return
        if not force:
            names = [name for name in self.facts if facts.get(name) != self.facts[name]] if known else ["format"]
            differing = [NAMES.get(name, name) for name in names]
            raise PlanningError(
                f"{folder} holds the measurements of another plan",
                why=f"it differs in {' and '.join(differing)}",
                remedy="choose another -o, or start over with --force",
                code="exists",
            )
        for file in (*folder.glob("*.safetensors"), record):
            file.unlink()

    def measure(self, name: str, action: Callable[[], Any]) -> Any:
        """Return the value `name`, plain data; measure it by `action` if it is not known yet."""
        if name not in self.values:
            self.values[name] = action()
            self.write()
        return self.values[name]

    def put(self, name: str, value: Any) -> None:
        """Store the value under that name."""
        if self.values.get(name) != value:
            self.values[name] = value
            self.write()

    def write(self) -> None:
        """Write all values to disk."""
        if self.folder is not None:
            with whole_file(self.folder / RECORD, force=True) as file:
                file.write(json.dumps({"format": FORMAT, "facts": self.facts, "values": self.values}, indent=1).encode())

    def file(self, name: str) -> Path | None:
        """Return the file for tensors of this name; None if nothing is written."""
        return None if self.folder is None else self.folder / f"{name}.safetensors"

    def keep_sketch(self, name: str, sketch: Tensor) -> None:
        """Store a sketch; it is written before the value that refers to it."""
        self.sketches[name] = sketch
        if (path := self.file(name)) is not None:
            with whole_file(path, force=True) as file:
                file.write(save({"u": sketch.to(torch.float16)}))

    def sketch(self, name: str) -> Tensor:
        """Return the sketch `name`, rounded as on disk."""
        if name not in self.sketches:
            path = self.file(name)
            assert path is not None
            try:
                self.sketches[name] = load(path.read_bytes())["u"]
            except (OSError, SafetensorError, KeyError) as error:
                remedy = f"remove {path.parent}, or name another -o"
                raise PlanningError(f"{path} cannot be read", why=first_line(error), remedy=remedy, code="unreadable") from error
        return self.sketches[name].to(torch.float16).float()


@dataclasses.dataclass(frozen=True)
class Site:
    """One replacement that can be chosen: its candidate, its place, its costs and its loss by itself."""

    candidate: int
    number: int  # among the candidate's replacements
    depths: tuple[int, ...]
    paths: tuple[str, ...]
    kind: str  # equal for replacements with equal times: of one candidate and one structure
    costs: dict[str, float]  # added by it, as shares of the dense model's
    alone: float  # distance
    sketch: str  # its name; "" if the distance is estimated from similar sites


@dataclasses.dataclass(frozen=True)
class CandidateRecord:
    """The measurements of one candidate, read from the store."""

    number: int
    candidate: AnyPass
    store: MeasurementStore
    quantities: tuple[str, ...]  # the ones whose times are measured
    dense_bytes: int

    @property
    def name(self) -> str:
        return short_spec(self.candidate)

    def key(self, *parts: object) -> str:
        """Return the name of a value of this candidate."""
        return " ".join(map(str, (self.name, *parts)))

    def get(self, *parts: object) -> Any:
        """Return that value; None if it was not measured."""
        return self.store.values.get(self.key(*parts))

    @property
    def sites(self) -> list[dict[str, Any]]:
        """Return the description of each replacement: depths, paths, bytes and structure."""
        found: list[dict[str, Any]] = self.store.values[self.key("sites")]
        return found

    @property
    def is_fitted(self) -> bool:
        """Return whether the candidate was fitted in all its layers, rather than in a few or none."""
        return self.get("uniform held out") is not None

    @property
    def has_losses(self) -> bool:
        """Return whether the losses of some sites are known, and the candidate was not refused."""
        return self.get("refused") is None and self.get("sites") is not None and (self.is_fitted or self.sampled[0] > 0)

    @property
    def sampled(self) -> tuple[int, int]:
        """Return the number of sites whose loss is known, and the number of sites."""
        return sum(self.alone(index) is not None for index in range(len(self.sites))), len(self.sites)

    def alone(self, index: int) -> tuple[float, str] | None:
        """Return the distance that a site causes by itself, and the name of its sketch; None if it was not measured."""
        for kind, sketch in (("alone", sketch_name), ("sampled", sampled_name)):
            if (found := self.get(kind, index)) is not None:
                return found["distance"], sketch(self.candidate, index)
        return None

    def added(self, site: Mapping[str, Any], quantity: str) -> float:
        """Return what a site adds to a quantity, as a share of the dense model's."""
        if quantity not in self.quantities:
            return float(site["bytes"]) / self.dense_bytes
        return float(self.store.values[self.key(quantity, site["structure"])])

    def added_by_structure(self, quantity: str) -> list[float]:
        """Return what all sites of each structure add to a quantity."""
        added: dict[str, float] = {}
        for site in self.sites:
            added[site["structure"]] = added.get(site["structure"], 0.0) + self.added(site, quantity)
        return list(added.values())

    def share(self, quantity: str) -> float:
        """Return the quantity of the candidate in all layers, as a share of the dense model's."""
        return 1 + sum(self.added_by_structure(quantity))

    def saves(self, quantity: str) -> bool:
        """Return whether all sites of one structure together reduce a quantity, by more than the error of a time."""
        return min(self.added_by_structure(quantity)) < (-NOISE if quantity in self.quantities else 0.0)

    def cost_text(self) -> str:
        """Return the known times of the candidate in all its layers, as the end of a sentence."""
        try:
            shares = [f"{quantity} takes {self.share(quantity):.2f} times as much" for quantity in self.quantities]
        except KeyError:
            return ""
        return f"; {', '.join(shares)}" if shares else ""

    def least_text(self, wanted: Collection[str]) -> str:
        """Return the least value of each quantity over the structures' sites, as text."""
        return ", ".join(f"{name} takes {1 + min(self.added_by_structure(name)):.2f} times as much" for name in wanted)

    def choosable(self) -> list[Site]:
        """Return the sites with the costs and loss of each; unmeasured ones are interpolated."""
        found, sites = [], self.sites
        known = {index: value for index in range(len(sites)) if (value := self.alone(index)) is not None}
        finite = {index: distance for index, (distance, _) in known.items() if math.isfinite(distance)}
        for index, site in enumerate(sites):
            distance, sketch = known.get(index) or (between(finite, index), "")
            if math.isfinite(distance):
                costs = {quantity: self.added(site, quantity) for quantity in (*self.quantities, "memory")}
                kind = f"{self.number} {site['structure']}"
                found.append(Site(self.number, index, tuple(site["depths"]), tuple(site["paths"]), kind, costs, distance, sketch))
        return found

    def missing_text(self) -> str:
        """Return which sites cannot be chosen, or are estimated from others; "" if there are none."""
        measured, count = self.sampled
        if measured < count:
            return f"{count - measured} of its {count} sites were not measured: assumed to be like the others"
        lost = count - len(self.choosable())
        return f"at {lost} of its {count} sites its outputs contain NaN or Inf" if lost else ""


def between(known: Mapping[int, float], place: int) -> float:
    """Return the value at a place, interpolated between known ones linearly in logarithms; outside, the nearest one's."""
    places = sorted(place for place, value in known.items() if value > 0)
    if not places:
        return math.nan
    return float(numpy.exp(numpy.interp(place, places, [math.log(known[index]) for index in places])))


def spread(count: int) -> list[int]:
    """Return the numbers below `count` in an order in which each is far from those before it: the first few are spread out."""
    bits = max(1, (count - 1).bit_length())
    backwards = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return [number for number in backwards if number < count]


def variant_name(candidate: AnyPass) -> str:
    """Return the name under which a candidate's values are stored."""
    return f"{candidate.name}-{short_hash(candidate.spec().encode())}"


def sketch_name(candidate: AnyPass, number: int) -> str:
    """Return the name under which a site's effect on the predictions is stored."""
    return f"{variant_name(candidate)}-{number}"


def sampled_name(candidate: AnyPass, number: int) -> str:
    """Return the same for a site that was fitted in a few layers only."""
    return f"{variant_name(candidate)}-few-{number}"
