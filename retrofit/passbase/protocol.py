"""The protocol of a pass, a frozen dataclass of hyperparameters with `plan` and `apply`; specs, and the passes installed.

`plan` reads a model's anatomy and returns which sites would be rewritten, which would not, and why; it changes nothing. `apply`
rewrites these sites through an edit. `Pass.rewrite` runs both and returns a `Rewrite`, the account of the changes.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from retrofit.anatomy.parts import NearMiss, Site
from retrofit.errors import CheckpointError, DoesNotFitError, SpecError, first_few
from retrofit.files.memory import in_gigabytes, memory_of
from retrofit.passbase.options import check_option, format_value, require_options

if TYPE_CHECKING:
    from torch import nn

    from retrofit.anatomy import Anatomy
    from retrofit.surgery import Edit


MAX_REASONS = 4  # near misses named in a refusal


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sites that a pass would rewrite, and the near misses with their reasons; subclasses add data for `apply`."""

    sites: tuple[Site, ...]
    near_misses: tuple[NearMiss, ...] = ()
    new_parameters: int = 0  # by the method's formula, not by counting
    formula: str = ""  # that formula with its numbers filled in
    exact: bool | None = None  # whether the result computes the dense function, if that depends on more than the options
    unseen: tuple[str, ...] = ()  # arguments missing from the example inputs that may make the plan wrong
    spec: str = ""  # the pass as it is saved, if the plan determines some of its options
    notes: tuple[str, ...] = ()
    on_host: bool = False  # whether the new parameters are in the CPU's memory, on whatever device the model is

    @property
    def fits_no_form(self) -> bool:
        """Return whether the pass rewrites nothing, neither in the model nor in its graph."""
        return not self.sites and bool(self.near_misses) and all(miss.in_any_form for miss in self.near_misses)


SomePlan = TypeVar("SomePlan", bound=Plan)


Names = tuple[str, ...]
Stacks = tuple[tuple[str, int, int, int | None], ...]


@dataclasses.dataclass(frozen=True)
class AppliedTo:
    """A description of the model that a pass was applied to."""

    sites: Names = ()  # module paths at that time
    ties: tuple[Names, ...] = ()  # the names of each parameter that had several
    stacks: Stacks = ()  # kind, layers, width, heads

    @classmethod
    def from_dict(cls, data: Any) -> AppliedTo:
        """Return the record from plain data. Raises `CheckpointError` unless it has the form that `to_dict` writes."""
        try:
            stacks = tuple((str(kind), int(layers), int(width), heads) for kind, layers, width, heads in data["stacks"])
            return cls(tuple(map(str, data["sites"])), tuple(tuple(map(str, names)) for names in data["ties"]), stacks)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                "the recorded model of the recipe is malformed",
                why=f"{type(error).__name__}: {error}",
                remedy="save the model again with retrofit.save",
                code="unreadable",
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {"sites": list(self.sites), "ties": list(map(list, self.ties)), "stacks": list(map(list, self.stacks))}

    def require_same(self, other: AppliedTo, spec: str) -> None:
        """Raises `CheckpointError` if the sites or stacks of `other`, found when replaying `spec`, differ from these."""
        if self.stacks != other.stacks:
            why = f"its stacks are {described(other.stacks)}; the recipe was applied to {described(self.stacks)}"
        elif sorted(self.sites) != sorted(other.sites):
            missing = [name for name in self.sites if name not in other.sites]
            more = [name for name in other.sites if name not in self.sites]
            why = "; ".join(
                f"{what}: {first_few(names)}"
                for what, names in (("no longer rewritten", missing), ("not rewritten before", more))
                if names
            )
        else:
            return
        raise CheckpointError(
            f"the model is not the one that {spec} was applied to",
            why=why,
            remedy="load it with the class, config and retrofit version it was saved with",
            code="other-model",
        )


def described(stacks: Stacks) -> str:
    return ", ".join(f"{kind} of {layers} layers, {width} wide, {heads or 'no'} heads" for kind, layers, width, heads in stacks)


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """The account of the changes that one pass made to a model."""

    spec: str  # replayed on a model without weights
    exact: bool
    sites: tuple[Site, ...]
    skipped: tuple[NearMiss, ...] = ()
    new_parameters: int = 0  # by the method's formula, not by counting
    superseded: int = 0  # elements added by earlier passes and removed by this one
    formula: str = ""  # that formula with its numbers filled in
    second_step: tuple[str, ...] = ()  # parameters whose gradient is zero until other parameters have changed
    unreached: tuple[str, ...] = ()  # parameters whose gradient is always zero
    unseen: tuple[str, ...] = ()  # arguments missing from the example inputs that may make the rewrite wrong
    notes: tuple[str, ...] = ()
    applied_to: AppliedTo | None = None
    added: tuple[str, ...] = ()  # the parameters that it added


class Dial(Protocol):
    """The dial of a pass: it blends an installed module from the dense function to the method's, in steps that the pass defines."""

    @property
    def name(self) -> str:
        """Return in words what changes with the dial."""
        ...

    def fits(self, site: nn.Module) -> bool:
        """Return whether this dial works on the site."""
        ...

    def turn(self, site: nn.Module, share: float) -> None:
        """Make the site compute the dense function at `share` 0 (if its parameters are dense), the installed one at 1."""
        ...


@dataclasses.dataclass(frozen=True)
class Recovery:
    """A pass's proposals for training: how long the stages with a teacher last, relative to the training itself, and rates."""

    align: float = 0.25  # of layer-wise distillation, before the training of the whole model
    anneal: float = 0.0  # relative to the steps of the whole model's training: the first, in which sites turn to the rewritten form
    dial: Dial | None = None  # used if the run's settings ask for it; else the outputs of dense and rewritten module are mixed
    rate: float = 1.0  # learning rate of the new parameters, as a multiple of that of the others
    table_rate: float = 1.0  # the same for tables whose rows are looked up (`RowTables`)


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC, Generic[SomePlan]):
    """A method with its hyperparameters; subclasses are frozen dataclasses that declare their fields with `option`.

    `plan` and `apply` are required. Everything else has a default, described in docs/write_a_pass.md, section 2.
    """

    name: ClassVar[str]  # the class's name in lower case: low-rank for LowRank
    summary: ClassVar[str]  # the first line of its docstring
    paper: ClassVar[str] = "none"
    calibrates: ClassVar[bool] = False  # whether it uses calibration data
    reads_tokenizer: ClassVar[str] = ""  # a spec with which it uses the model's tokenizer; "": it never does
    places_by: ClassVar[tuple[str, ...] | None] = None  # options that select its sites, each rewritten once; None: repeatable
    already: ClassVar[str] = "it is already rewritten"  # of such a site, in a refusal
    rewrites: ClassVar[str] = "site"  # the word for a site in a refusal: "feed-forward", "attention", …
    reference: ClassVar[Any] = None  # a `MethodReference`: an independent implementation of its modules, for the check `method`
    recovery: ClassVar[Recovery] = Recovery()
    # Its dial at 0 gives the dense function, which `undo` compares; thresholds set its time, the least with the dial at infinity.
    only_masks: ClassVar[bool] = False
    not_served: ClassVar[str] = ""  # why an engine with its own attention, such as vLLM, cannot run the model; "": it can
    candidates: ClassVar[tuple[str, ...]] = ()  # settings that `retrofit plan` tries: options of a spec, "active=4, rank=16"
    remedy: ClassVar[str] = "retrofit inspect shows what was found in the model"  # if no site fits and no near miss has a fix
    # If the rewritten model does not run:
    way_around: ClassVar[str] = "its code may depend on what is rewritten: exclude that, or use another pass"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if not hasattr(cls, "name"):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()
        if not hasattr(cls, "summary"):
            cls.summary = first_line(cls.__dict__.get("__doc__"))

    def __new__(cls, *given: Any, **named: Any) -> Self:
        require_options(cls, given, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, check_option(type(self), field, value))

    @property
    def exact(self) -> bool:
        """Return whether the rewritten model computes the dense model's function at step 0."""
        return False

    @property
    def exact_up_to(self) -> int | None:
        """Return the number of tokens up to which it computes the dense function; None if that does not depend on length."""
        return None

    @property
    def uses_tokenizer(self) -> bool:
        """Return whether it uses the model's tokenizer."""
        return bool(self.reads_tokenizer)

    @property
    def needs_calibration(self) -> bool:
        """Return whether `apply` requires calibration data; a saved model is loaded without it."""
        return False

    def idle_options(self) -> dict[str, tuple[str, ...]]:
        """Return the options without effect, by the setting that disables them, such as "lookup=lsh"."""
        return {}

    def idle_notes(self) -> tuple[str, ...]:
        """Return the notes on options that were given and have no effect."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return tuple(
            f"{name}={format_value(given[name])} has no effect with {cause}"
            for cause, names in self.idle_options().items()
            for name in names
            if given[name] != defaults[name]
        )

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int] | None:
        """Return extents that the weights it adds may have, given those of the model's; divisors of any may be omitted.

        Return None if they are not known before it has run. Otherwise, options of later passes that fit no extent are refused
        before capture.
        """
        return None

    @abc.abstractmethod
    def plan(self, anatomy: Anatomy) -> SomePlan:
        """Return the sites to rewrite and the near misses; changes nothing.

        Raises `DoesNotFitError` if the model as a whole does not fit; a single place that does not fit is a near miss of the plan.
        """

    @abc.abstractmethod
    def apply(self, plan: SomePlan, edit: Edit) -> None:
        """Rewrite the sites of the plan in `edit.model`; report findings to `edit.note`."""

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        """Plan for `anatomy` and apply the plan through `edit`. Raises `DoesNotFitError` if no site fits."""
        plan = self.fitting_plan(anatomy, edit)
        self.require_room(plan, edit)
        return self.carry_out(plan, edit)

    def fitting_plan(self, anatomy: Anatomy, edit: Edit | None = None) -> SomePlan:
        """Return the plan for this anatomy: the edit's, or a new one. Raises `DoesNotFitError` if it has no site."""
        plan: SomePlan | None = None if edit is None else edit.plans.get(self.spec())
        plan = self.plan(anatomy) if plan is None else plan
        if not plan.sites:
            raise self.nothing_fits(plan)
        return plan

    def require_room(self, plan: SomePlan, edit: Edit) -> None:
        """Raises `DoesNotFitError` if the plan's new parameters do not fit in the memory that they go to."""
        first = next(edit.model.parameters(), None)
        if first is None or first.is_meta or edit.keep is not None:
            return
        needed, limit = plan.new_parameters * first.element_size(), memory_of("cpu" if plan.on_host else first.device)
        if needed > limit:
            raise DoesNotFitError(
                f"{plan.new_parameters:,} new parameters do not fit in memory",
                by=self.name,
                why=f"they need {in_gigabytes(needed)}, {in_gigabytes(limit)} available",
                remedy="choose smaller settings",
                in_any_form=True,
                code="memory",
            )

    def carry_out(self, plan: SomePlan, edit: Edit) -> Rewrite:
        """Apply the plan and return the account of the changes."""
        import torch  # deferred, so that naming passes does not import torch

        edit.begin_pass(self.name)
        with torch.no_grad():
            self.apply(plan, edit)
        return Rewrite(
            plan.spec or self.spec(),
            self.exact if plan.exact is None else plan.exact,
            plan.sites,
            plan.near_misses,
            new_parameters=plan.new_parameters,
            formula=plan.formula,
            second_step=edit.late_parameters(),
            unreached=edit.unreached_parameters(),
            unseen=plan.unseen,
            notes=(*self.idle_notes(), *plan.notes, *edit.notes),
        )

    def nothing_fits(self, plan: SomePlan) -> DoesNotFitError:
        """Return the refusal of a plan without sites, composed from its near misses."""
        reasons = dict.fromkeys(f"{miss.name or 'the model'}: {miss.why}" for miss in plan.near_misses)
        codes = {miss.code for miss in plan.near_misses} or {"missing"}
        return DoesNotFitError(
            f"no {self.rewrites} of the model can be rewritten",
            by=self.name,
            why=first_few(reasons, MAX_REASONS, "; ") or "the chosen layers have none",
            remedy=next((miss.remedies for miss in plan.near_misses if miss.remedies), self.remedy),
            in_any_form=plan.fits_no_form,
            code=codes.pop() if len(codes) == 1 else "does-not-fit",
            sites=tuple(miss.name for miss in plan.near_misses),
        )

    def spec(self) -> str:
        """Return the pass as text with every option, so that a saved recipe keeps its meaning if a default changes."""
        fields = (f"{field.name}={format_value(getattr(self, field.name))}" for field in dataclasses.fields(self))
        return f"{self.name}({', '.join(fields)})"


def first_line(doc: str | None) -> str:
    """Return the first line of a docstring without its full stop."""
    return (doc or "").strip().partition("\n")[0].removesuffix(".")


AnyPass = Pass[Any]
Recipe = tuple[AnyPass, ...]


GROUP = "retrofit.passes"


def parse_spec(text: str) -> AnyPass:
    """Return the pass that `text` names, `altup` or `altup(k=2, init=hop)`."""
    if not isinstance(text, str):
        raise SpecError(f"{text!r} is not a pass", remedy="use a Pass, or its spec: altup(k=2)", code="no-pass")
    return make_pass(*split_spec(text))


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options' texts in a spec. Raises `SpecError` if it cannot be parsed."""
    match = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise SpecError(
            f"cannot read the pass {text!r}", remedy="write it as name(option=value, …), e.g. altup(k=2)", code="unreadable"
        )
    name, inside = match.group(1), match.group(2) or ""
    options: dict[str, str] = {}
    for item in filter(str.strip, inside.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            remedy = "name one pass per line" if ")" in inside else "write options as option=value"
            raise SpecError(f"{name}: cannot read {item.strip()!r}", remedy=remedy, code="unreadable")
        if key.strip() in options:
            raise SpecError(f"{name}: option {key.strip()} is given twice", remedy="give it once", option=key.strip(), code="twice")
        options[key.strip()] = value.strip()
    return name, options


def make_pass(name: str, options: Mapping[str, Any]) -> AnyPass:
    """Return the registered pass `name` with `options`. Raises `SpecError`, listing the known names, if one is unknown."""
    return load_pass(name)(**{key.replace("-", "_"): value for key, value in options.items()})


def pass_names() -> list[str]:
    """Return the names of the passes installed, without importing them."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})


def load_pass(name: str) -> type[AnyPass]:
    """Return the class of the pass installed as `name`, or of an imported class with that name."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            kind = entry.load()
            if not (isinstance(kind, type) and issubclass(kind, Pass)):
                raise SpecError(
                    f"the entry point {name!r} is not a retrofit pass",
                    why=f"it is {kind!r}",
                    remedy="name a subclass of Pass there",
                    code="no-pass",
                )
            return kind
    imported = next((kind for kind in subclasses(Pass) if getattr(kind, "name", None) == name), None)
    if imported is not None:
        return imported
    raise SpecError(f"unknown pass {name!r}", remedy=f"choose one of {', '.join(pass_names())}", code="unknown-pass")


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield every class derived from `kind` that has been imported."""
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def as_pass(given: AnyPass | str) -> AnyPass:
    """Return `given`, a pass or the spec of one, as a pass."""
    return given if isinstance(given, Pass) else parse_spec(given)


def parse_recipe(specs: Iterable[str]) -> Recipe:
    """Return the recipe for a list of specs."""
    return tuple(parse_spec(spec) for spec in specs)
