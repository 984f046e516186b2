"""AltUp: the residual stream grows K times wider while every layer stays as wide as it was.

The stream is one tensor (batch, seq, K·d); block i is its i-th contiguous d columns. A layer works on block j:

    predict   x̂^i = Σ_m p[i,m] x^m
    compute   x̃ = layer(x^j)
    correct   x_new^i = x̂^i + g[i] (x̃ − x̂^j)

Predict and correct are one linear map over the K+1 vectors x^1 … x^K, x̃: A = [P − g p_jᵀ | g].

Alternating Updates for Efficient Transformers (NeurIPS 2023), Alg. 1 and §4.1 (Recycled-AltUp). Alg. 2, with matrices for
coefficients, and §5.4 are from the paper on external memory before it. Input-dependent coefficients are Gemma 3n's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from retrofit.passes.altup.blocks import BlockScale, Blockwise, DivideAndProject, Replicated
from retrofit.passes.altup.contraction import combine_blocks, contract, weighted_sum
from retrofit.passes.altup.widening import Widening, WidePlan
from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    NearMiss,
    Pass,
    Rewrite,
    Site,
    SpecError,
    Stack,
    Wrapper,
    argument_place,
    find_argument,
    option,
    selected_depths,
    shape,
    with_item,
)

# ── The layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def start_coefficients(init: str, k: int, j: int, n: int) -> tuple[Tensor, Tensor]:
    """P [K, K] and g [K] that hand the dense stream on from block j to block n; all blocks carry it in lockstep, one in a hop."""
    p, g = torch.eye(k), torch.ones(k)
    if init == "hop":
        p[j] = p[n]
        g = torch.eye(k)[n]
    return p, g


class AltUpLayer(Wrapper):
    """The d-wide `layer` works on block `active` of a K·d-wide stream, and `p` [K, K] and `g` [K] predict and correct all blocks.

    The stream enters by the argument `stream_in` and leaves by `stream_out`, an index or key of what the layer returns (None: the
    value itself). `narrow` names other K·d-wide arguments and the block of each that the layer gets; the rest passes untouched.

    - `expand`: the stream enters d wide and stands for K equal blocks. `combine`: it leaves d wide, as Σ_i combine[i] x^i.
    - `rotate`: the blocks move up by one afterwards, so that a layer called at every depth meets them in turn with one `active`.
    """

    second_step: ClassVar[tuple[str, ...]] = ()  # parameters whose gradient is zero until others have moved

    def __init__(
        self,
        layer: nn.Module,
        width: int,
        k: int,
        active: int = 0,
        *,
        stream_in: int | str = 0,
        stream_out: int | str | None = None,
        narrow: Mapping[int | str, int] | None = None,
        expand: bool = False,
        combine: Sequence[float] | None = None,
        rotate: bool = False,
    ) -> None:
        super().__init__(layer)
        self.width, self.k, self.active = width, k, active
        self.stream_in, self.stream_out = argument_place(layer, stream_in), stream_out
        self.narrow = [(argument_place(layer, key), block) for key, block in (narrow or {}).items()]
        self.expand, self.rotate = expand, rotate
        self.combine = None if combine is None else tuple(float(weight) for weight in combine)
        like = next((parameter for parameter in layer.parameters() if parameter.is_floating_point()), torch.empty(()))
        self.add_coefficients(like.device, like.dtype)
        self.start("lockstep", active)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(self.stream_in, arguments, keywords)
        x = container[key]
        self.check_width(x)
        container[key] = block = x if self.expand else self.block(x, self.active)
        for place, i in self.narrow:
            container, key = find_argument(place, arguments, keywords)
            container[key] = None if container[key] is None else self.block(container[key], i)
        output = self.layer(*arguments, **keywords)
        out = None if isinstance(output, Tensor) else self.stream_out
        return with_item(output, out, self.update(x, block, output if out is None else output[out]))

    def check_width(self, x: Tensor) -> None:
        """The stream is as wide as it must be here, else `DoesNotFitError`."""
        width = self.width if self.expand else self.k * self.width
        if x.shape[-1] != width:
            raise DoesNotFitError(
                f"a layer was handed a stream {x.shape[-1]} wide, where AltUp's is {width}",
                why="it was embedded elsewhere: by the dense model's table, or by one put in place of the widened one",
                remedy="embed with model.get_input_embeddings(), or rewrite with embedding=recycled: it takes them as before",
            )

    def block(self, x: Tensor, i: int) -> Tensor:
        return x.narrow(-1, i * self.width, self.width)

    def update(self, x: Tensor, block: Tensor, y: Tensor) -> Tensor:
        """x_new, from the stream x, its active block and x̃ = y; `rotate`, `expand` and `combine` only change A."""
        p, g = self.coefficients(block, y)
        g = g.unsqueeze(-1)
        a = torch.addcmul(p, g, p.narrow(-2, self.active, 1), value=-1)  # P − g p_jᵀ
        if self.rotate:
            a, g = a.roll(-1, -2), g.roll(-1, -2)
        if self.expand:
            a = a.sum(-1, keepdim=True)
        if self.combine is not None:
            a = weighted_sum(a.unbind(-2), self.combine).unsqueeze(-2)
            g = weighted_sum(g.unbind(-2), self.combine).unsqueeze(-2)
        return contract(x, y, a, g)

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        self.p = nn.Parameter(torch.empty(self.k, self.k, device=device, dtype=dtype))
        self.g = nn.Parameter(torch.empty(self.k, device=device, dtype=dtype))

    @torch.no_grad()
    def start(self, init: str, n: int) -> None:
        """The coefficients are those of the exact start `init` (lockstep or hop), where layer n works on next."""
        with self.p.device:  # a model built without values may have layers that have some
            p, g = start_coefficients(init, self.k, self.active, n)
        self.p.copy_(p)
        self.g.copy_(g)

    def coefficients(self, block: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """P and g; here the same for every token."""
        return self.p, self.g

    @staticmethod
    def count(width: int, k: int) -> int:
        """How many parameters the method adds to a layer."""
        return k**2 + k

    def extra_repr(self) -> str:
        return f"k={self.k}, active={self.active}"


class DenseAltUpLayer(AltUpLayer):
    """Alg. 2: `p` [K·d, K·d] predicts the whole stream, x̂ = P x, and `g` [K·d, d] corrects it, x_new = x̂ + G (x̃ − x̂^j)."""

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        wide = self.k * self.width
        self.p = nn.Parameter(torch.empty(wide, wide, device=device, dtype=dtype))
        self.g = nn.Parameter(torch.empty(wide, self.width, device=device, dtype=dtype))

    @torch.no_grad()
    def start(self, init: str, n: int) -> None:
        with self.p.device:
            p, g = start_coefficients(init, self.k, self.active, n)
            one = torch.eye(self.width)
        self.p.copy_(torch.kron(p, one))
        self.g.copy_(torch.kron(g.unsqueeze(-1), one))

    def update(self, x: Tensor, block: Tensor, y: Tensor) -> Tensor:
        wide = torch.cat([x] * self.k, -1) if self.expand else x
        predicted = F.linear(wide, self.p)
        new = (predicted + F.linear(y.to(x.dtype) - self.block(predicted, self.active), self.g)).to(x.dtype)
        new = new.roll(-self.width, -1) if self.rotate else new
        return new if self.combine is None else combine_blocks(new, self.combine)

    @staticmethod
    def count(width: int, k: int) -> int:
        return (k * width) ** 2 + k * width**2


class DynamicAltUpLayer(AltUpLayer):
    """Coefficients that depend on the token, as in Gemma 3n: P from the active block, g from what the layer made of it.

    Each is its start, `base_p` or `base_g`, plus a linear map of r(v) = tanh(modality_router(router_norm(v) / d)). The names are
    Gemma 3n's, and as there `coef_clip` bounds both maps in training. Its `correct_output_scale` has no counterpart: it scales what
    feeds Gemma's per-layer embeddings, never the stream.
    """

    second_step: ClassVar[tuple[str, ...]] = ("modality_router.weight", "router_norm.weight")  # until the maps leave zero

    def __init__(
        self, layer: nn.Module, width: int, k: int, active: int = 0, *, coef_clip: float | None = None, **how: Any
    ) -> None:
        super().__init__(layer, width, k, active, **how)
        self.coef_clip = coef_clip

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router_norm = nn.RMSNorm(self.width, eps=1e-6, **like)
        self.modality_router = nn.Linear(self.width, self.k, bias=False, **like)
        self.prediction_coefs = nn.Linear(self.k, self.k**2, bias=False, **like)
        self.correction_coefs = nn.Linear(self.k, self.k, bias=False, **like)
        self.register_buffer("base_p", torch.empty(self.k, self.k, **like))
        self.register_buffer("base_g", torch.empty(self.k, **like))

    @torch.no_grad()
    def start(self, init: str, n: int) -> None:
        with self.base_p.device:
            p, g = start_coefficients(init, self.k, self.active, n)
        self.base_p.copy_(p)
        self.base_g.copy_(g)
        self.modality_router.weight.normal_(std=self.width**0.5)  # what enters the tanh has unit variance
        self.prediction_coefs.weight.zero_()
        self.correction_coefs.weight.zero_()

    def coefficients(self, block: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = self.base_p + F.linear(self.route(block), self.clipped(self.prediction_coefs.weight)).unflatten(-1, (self.k, self.k))
        return p, self.base_g + F.linear(self.route(y), self.clipped(self.correction_coefs.weight))

    def route(self, v: Tensor) -> Tensor:
        """r(v), one value in (−1, 1) a block: (…, d) gives (…, K)."""
        weight = self.modality_router.weight
        return torch.tanh(self.modality_router(self.router_norm(v.to(weight.dtype)) / self.width).float()).to(weight.dtype)

    def clipped(self, weight: Tensor) -> Tensor:
        return weight if self.coef_clip is None or not self.training else weight.clamp(-self.coef_clip, self.coef_clip)

    @staticmethod
    def count(width: int, k: int) -> int:
        return width + k * width + k**3 + k**2


COEFFICIENTS: dict[str, type[AltUpLayer]] = {"scalar": AltUpLayer, "dense": DenseAltUpLayer, "dynamic": DynamicAltUpLayer}

# ── The pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class AltUp(Pass):
    """Widen the residual stream to K·d while every layer stays d wide: predict, compute one block, correct all of them."""

    name: ClassVar[str] = "altup"
    summary: ClassVar[str] = "widen the residual stream K times; each layer works on one block of it and corrects the others"
    paper: ClassVar[str] = "Alternating Updates for Efficient Transformers, Alg. 1"

    k: int = option(2, "K, the number of d-wide blocks in the stream", minimum=2)
    selection: str = option(
        "alternating", "the block a layer works on: depth mod K, or the first (SameUp)", choices=("alternating", "same")
    )
    embedding: str = option(
        "wide", "a K·d-wide token table, or the d-wide look-up K times (Recycled-AltUp)", choices=("wide", "recycled")
    )
    init: str = option(
        "hop", "the exact start: blocks all equal, or the dense stream hops between them", choices=("lockstep", "hop")
    )
    coefficients: str = option(
        "scalar", "p and g are scalars, matrices, or depend on the token (Gemma 3n)", choices=tuple(COEFFICIENTS)
    )
    extra: int = option(0, "extra embedding width e, divided by K−1 and projected to d (0: (K−1)·d, no projection)", minimum=0)
    layers: str = option("all", "depths that get coefficients of their own, e.g. 0-5+8; the others keep their start")
    stacks: str = option("all", "stacks to widen", choices=("all", "encoder", "decoder"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extra % (self.k - 1):
            raise SpecError(
                f"altup: extra={self.extra} does not divide into K−1 = {self.k - 1} sub-blocks", remedy="choose a multiple of K−1"
            )
        if self.extra and (self.init != "hop" or self.embedding != "wide"):
            raise SpecError(
                f"altup: extra={self.extra} needs init=hop and embedding=wide",
                why="a block projected up from fewer columns cannot equal the dense embedding, as lockstep would have it",
                remedy="add init=hop",
            )

    @property
    def exact(self) -> bool:
        return True

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        return Application(self, anatomy, edit).run()


class Application:
    """One AltUp rewrite of one model."""

    def __init__(self, altup: AltUp, anatomy: Anatomy, edit: Edit) -> None:
        self.altup, self.anatomy, self.edit = altup, anatomy, edit
        self.model = anatomy.model
        self.flow = anatomy.flow
        self.nodes = self.flow.named
        self.sites: list[Site] = []
        self.terms: list[tuple[str, int]] = []  # of the parameter formula
        self.projects: dict[str, DivideAndProject] = {}  # by token table
        self.skipped: list[NearMiss] = []
        self.late: list[str] = []  # parameters whose gradient is zero in the first step
        self.stacks = self.chosen_stacks()

    def run(self) -> Rewrite:
        altup = self.altup
        self.check()
        tables = {stack.entry: self.tables_of(stack) if altup.embedding == "wide" else [] for stack in self.stacks}
        ends = {stack.entry: bool(tables[stack.entry]) and self.reaches_head(stack) for stack in self.stacks}
        homes = {stack.entry: self.homes(stack) for stack in self.stacks}
        plan = Widening(self.anatomy, self.stacks, homes, [node for found in tables.values() for node in found], ends).run()
        self.widen_tables(plan)
        for path, key in plan.blockwise.items():
            module = Blockwise(self.model.get_submodule(path), altup.k, 0 if key is None else key)
            self.wrap(path, module, f"applied to each of the {altup.k} blocks")
        for path in plan.replicated:
            self.wrap(path, Replicated(self.model.get_submodule(path), altup.k), f"output replicated {altup.k} times")
        for name in plan.buffers:
            self.repeat_buffer(name)
        for name in plan.parameters:
            self.grow(name, -1, *self.copies(name, -1), "a copy for each block, (K−1) times its size")
        self.widen_heads(plan)
        for stack in self.stacks:
            self.wrap_layers(stack, plan, starts_wide=bool(tables[stack.entry]), ends_wide=ends[stack.entry])
        formula = " + ".join(f"{label} = {count:,}" for label, count in self.terms)
        return Rewrite(
            altup.spec(),
            True,
            tuple(self.sites),
            tuple(self.skipped),
            new_parameters=sum(count for _, count in self.terms),
            formula=formula,
            second_step=tuple(self.late),
        )

    def chosen_stacks(self) -> list[Stack]:
        """The stacks to widen: of several streams that run through the same layers, the one through most of them."""
        chosen: list[Stack] = []
        for stack in sorted(self.anatomy.stacks, key=lambda one: -len(one.layers)):
            taken = {(layer.name, layer.call) for other in chosen for layer in other.layers if layer.name}
            if self.altup.stacks not in ("all", stack.kind):
                self.skipped.append(NearMiss(stack.name, f"it is the {stack.kind}, and stacks={self.altup.stacks}"))
            elif any((layer.name, layer.call) in taken for layer in stack.layers):
                self.skipped.append(NearMiss(stack.name, "a second stream through layers of which another stream is widened"))
            else:
                chosen.append(stack)
        return [stack for stack in self.anatomy.stacks if stack in chosen]

    def check(self) -> None:
        if not self.stacks:
            raise DoesNotFitError(
                f"the model has no {self.altup.stacks}",
                why=f"its stacks are: {', '.join(stack.kind for stack in self.anatomy.stacks)}",
            )
        attends = any("attention" in branch.role for stack in self.stacks for layer in stack.layers for branch in layer.branches)
        for stack in self.stacks:
            for layer in stack.layers:
                why = ""
                if not layer.name:
                    why = "the residual additions stand in the model's own code, no module owns a layer"
                elif layer.stream_in in (-1, None) or layer.stream_out == -1:
                    why = "the module does not take the stream as an argument and return it"
                elif shape(self.nodes[layer.entry])[-1] != stack.width:  # type: ignore[index]
                    why = "the stream is several blocks wide already"
                if why:
                    raise DoesNotFitError(
                        f"altup: layer {layer.name or layer.exit} of the {stack.kind} {stack.name or 'stack'} cannot be wrapped",
                        why=why if attends else f"{why}; no layer attends, so this may be no transformer at all",
                        remedy="apply altup once, to a model whose layers are modules that take the stream and return it",
                    )

    # Where the dense stream is, and where width begins and ends.

    def active(self, depth: int) -> int:
        return depth % self.altup.k if self.altup.selection == "alternating" else 0

    def shared(self, stack: Stack) -> bool:
        return len({layer.name for layer in stack.layers}) < len(stack.layers)

    def homes(self, stack: Stack) -> list[int]:
        """The block that holds the dense stream before each layer, and the first one after the last."""
        return [0 if self.shared(stack) else self.active(depth) for depth in range(len(stack.layers))] + [0]

    def tables_of(self, stack: Stack) -> list[fx.Node]:
        """The token look-ups that the stack's stream begins with."""
        names = {part.node for part in self.anatomy.embeddings}
        entry = self.nodes[stack.entry]
        found = [node for node in self.flow.nodes if node.name in names and self.flow.reaches(node, entry)]
        largest = max((shape(node.args[0])[0] for node in found), default=0)  # type: ignore[index]
        return [node for node in found if shape(node.args[0])[0] == largest]  # type: ignore[index]

    def reaches_head(self, stack: Stack) -> bool:
        """Whether the model's head makes one output a token from what this stack hands on."""
        head = self.anatomy.head
        if head is None or stack is not self.anatomy.stacks[-1]:
            return False
        size, stream = shape(self.nodes[head.node]) or (), shape(self.nodes[stack.exit]) or ()
        return self.flow.reaches(self.nodes[stack.exit], self.nodes[head.node]) and size[:-1] == stream[:-1]

    # The edits.

    def wrap(self, path: str, wrapper: nn.Module, what: str) -> None:
        self.edit.replace_module(path, wrapper)
        self.sites.append(Site(path, what))

    def grow(self, name: str, dim: int, extent: int, fill: Callable[[Tensor], Any], what: str, scale: float = 1.0) -> None:
        """The parameter `name`, times `scale`, is followed along `dim` by `extent` entries more, as `fill` fills them in place."""
        old = self.model.get_parameter(name)
        width = old.shape[dim]
        size = list(old.shape)
        size[dim] += extent
        new = nn.Parameter(old.detach().new_empty(size), requires_grad=old.requires_grad)
        dense, rest = new.detach().split([width, extent], dim)
        dense.copy_(old)
        if scale != 1.0:
            dense.mul_(scale)
        fill(rest)
        for module in list(self.model.modules()):
            if any(parameter is old for parameter in module._parameters.values()):
                for attribute in ("embedding_dim", "in_features"):
                    if getattr(module, attribute, None) == width:
                        self.edit.set_attribute(module, attribute, new.shape[dim])
        index = [slice(None)] * old.dim()
        index[dim] = slice(0, width)
        self.edit.widen_parameter(old, new, tuple(index), what, scale)
        self.terms.append((f"{name}, {what}", rest.numel()))

    def copies(self, name: str, dim: int, scale: float = 1.0) -> tuple[int, Callable[[Tensor], Any]]:
        """What `grow` takes for K−1 copies of the parameter, times `scale`, side by side."""
        old = self.model.get_parameter(name).detach()

        def fill(rest: Tensor) -> None:
            for part in rest.chunk(self.altup.k - 1, dim):
                part.copy_(old).mul_(scale)

        return (self.altup.k - 1) * old.shape[dim], fill

    def widen_tables(self, plan: WidePlan) -> None:
        """A token's row holds K blocks, or the dense one and e columns more, projected to the others after the look-up."""
        altup = self.altup
        for name, paths in plan.tables.items():
            table = self.model.get_parameter(name)
            width = table.shape[1]
            if altup.init == "lockstep":
                self.grow(name, 1, *self.copies(name, 1), "(K−1)·V·d")
            else:
                columns = altup.extra or (altup.k - 1) * width
                self.grow(name, 1, columns, partial(fill_with_noise, like=table), "V·e" if altup.extra else "(K−1)·V·d")
            if altup.extra:
                project = DivideAndProject(altup.extra, altup.k, width).to(device=table.device, dtype=table.dtype)
                self.projects[name] = project
                self.terms.append(("projections, e·d", altup.extra * width))
                for path in paths:
                    module = self.model.get_submodule(path)
                    self.edit.add_module(module, "project", project)
                    self.edit.add_handle(module.register_forward_hook(project.after))
            self.sites.extend(Site(path, f"token table widened to {'d+e' if altup.extra else 'K·d'}") for path in paths)

    def widen_heads(self, plan: WidePlan) -> None:
        """Every head reads the whole stream, with a result that is the dense one's."""
        altup, k, lockstep = self.altup, self.altup.k, self.altup.init == "lockstep"
        for name, site in plan.heads.items():
            tied = name in plan.tables
            if not site.path and (tied or altup.extra):
                raise DoesNotFitError(
                    f"altup: the head ({name}) is applied in the model's own code",
                    why="the blocks must be weighed or projected before it, and no module stands there",
                    remedy="use embedding=recycled",
                )
            if not tied:
                width, what = self.model.get_parameter(name).shape[site.dim], "V·e" if altup.extra else "(K−1)·V·d"
                if lockstep:
                    self.grow(name, site.dim, *self.copies(name, site.dim, 1 / k), what, 1 / k)
                else:
                    self.grow(name, site.dim, altup.extra or (k - 1) * width, Tensor.zero_, what)
            if tied:
                scale = BlockScale([1 / k] * k if lockstep else [1.0] + [0.0] * (k - 1), learnable=not lockstep)
                self.before(site.path, "block_scale", scale, name)
                if not lockstep:
                    self.terms.append(("weights of the tied head's blocks, K", k))
            if altup.extra:
                project = self.projects.get(name) or next(iter(self.projects.values()))
                module = self.model.get_submodule(site.path)
                self.edit.add_module(module, "project", project)
                self.edit.add_handle(module.register_forward_pre_hook(project.before))
            self.sites.append(Site(site.path or name, f"{'tied ' if tied else ''}head reads {'d+e' if altup.extra else 'K·d'}"))

    def before(self, path: str, child: str, module: BlockScale, like: str) -> None:
        """`module`, a child of the module at `path`, acts on what that one is given."""
        owner, parameter = self.model.get_submodule(path), self.model.get_parameter(like)
        self.edit.add_module(owner, child, module.to(device=parameter.device, dtype=parameter.dtype))
        self.edit.add_handle(owner.register_forward_pre_hook(module.before))

    def repeat_buffer(self, name: str) -> None:
        owner, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(owner)
        buffer = module.get_buffer(leaf)
        self.edit.set_attribute(module, leaf, torch.cat([buffer] * self.altup.k, -1))
        self.edit.make_persistent(module, leaf)
        self.sites.append(Site(name, f"buffer replicated {self.altup.k} times"))

    def wrap_layers(self, stack: Stack, plan: WidePlan, starts_wide: bool, ends_wide: bool) -> None:
        altup, k, shared = self.altup, self.altup.k, self.shared(stack)
        chosen = selected_depths(altup.layers, len(stack.layers), self.altup.name)
        kind = COEFFICIENTS[altup.coefficients]
        if shared and not (starts_wide and ends_wide):
            raise DoesNotFitError(
                f"altup: the layers of {stack.name} share their weights across depth",
                why="one module runs at every depth, so the stream has to be wide before the first and after the last",
                remedy="use embedding=wide on a model with a per-token head",
            )
        combine = [1 / k] * k if altup.init == "lockstep" else [1.0] + [0.0] * (k - 1)
        wide = {(layer.layer.name, layer.layer.call): layer for layer in plan.layers}
        last = len(stack.layers) - 1
        done: set[str] = set()
        for depth, layer in enumerate(stack.layers):
            if layer.name in done:
                continue
            done.add(layer.name)
            rotate = shared and altup.selection == "alternating"
            wrapper = kind(
                self.model.get_submodule(layer.name),
                stack.width,
                k,
                0 if shared else self.active(depth),
                stream_in=layer.stream_in if layer.stream_in is not None else 0,
                stream_out=layer.stream_out,
                narrow={key: block for key, block in wide[(layer.name, layer.call)].narrow.items() if key is not None},
                expand=depth == 0 and not starts_wide,
                combine=combine if depth == last and not ends_wide else None,
                rotate=rotate,
            )
            following = self.active(1) if shared else 0 if depth == last else self.active(depth + 1)
            wrapper.start(altup.init, following)
            self.late.extend(f"{layer.name}.{name}" for name in wrapper.second_step)
            if altup.init == "hop" and following == wrapper.active:  # the stream stays, so p acts on the other blocks only
                self.late.append(f"{layer.name}.p")
            if depth in chosen:
                self.terms.append((f"{layer.name}: p and g", kind.count(stack.width, k)))
            else:
                hold_still(wrapper)
            self.edit.replace_module(layer.name, wrapper)
            self.sites.append(Site(layer.name, f"works on block {wrapper.active} of {k}" + (" in turn" if rotate else "")))


def fill_with_noise(rest: Tensor, like: Tensor) -> None:
    """`rest` is noise with the spread of `like`."""
    rest.normal_(std=1.0 if like.is_meta else float(like.detach().std()))


def hold_still(wrapper: AltUpLayer) -> None:
    """The wrapper's own parameters are buffers: they stay at their start and are saved, and do not count as parameters."""
    for name, parameter in list(wrapper._parameters.items()):
        del wrapper._parameters[name]
        wrapper.register_buffer(name, None if parameter is None else parameter.detach())
