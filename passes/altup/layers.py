"""The layers of AltUp: a d-wide layer reads one block of a K·d-wide stream, and a few coefficients update all blocks.

    predict   x̂^i = Σ_m p[i,m] x^m
    compute   x̃ = layer(x^j)
    correct   x_new^i = x̂^i + g[i] (x̃ − x̂^j)

Predict and correct are one linear map over the K+1 vectors x^1 … x^K, x̃: A = [P − g p_jᵀ | g], with one coefficient for all
columns of a block.

The sums run in a fixed order, element by element, so that coefficients 0, 1 and −1 give exact results in every dtype, also under
autocast and with TF32, which a matrix product does not guarantee.

Further modules let d-wide modules around the layers read the stream, and widen or narrow it at its ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.altup.stream_kernel import runs_kernel, update_stream
from retrofit.sdk import DoesNotFitError, Wrapper, argument_place, find_argument, item_at, map_first, with_item
from retrofit.sdk.modules import float_like, is_exporting


def mix(x: Tensor, a: Tensor) -> Tensor:
    """Return blocks Σ_c a[r,c] x^c, added in the order of c: x (…, C·d) and a ([…,] R, C) give (…, R, d)."""
    blocks = x.unflatten(-1, (a.shape[-1], 1, -1)).unbind(-3)  # C of (…, 1, d)
    columns = a.unsqueeze(-1).unbind(-2)  # C of ([…,] R, 1)
    mixed, add = blocks[0] * columns[0], addition()
    for c in range(1, len(blocks)):
        mixed = add(mixed, blocks[c], columns[c])
    return mixed


def mix_and_add(x: Tensor, y: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """Return blocks Σ_c a[r,c] x^c + g[r] y: y is added last, so it is unchanged if the terms before it cancel."""
    return addition()(mix(x, a), y.unsqueeze(-2), g).flatten(-2)


def addition() -> Callable[..., Tensor]:
    """Return the function x + a·b of tensors: in place on x, except in an export, whose graph must have no side effects."""
    return torch.addcmul if is_exporting() else Tensor.addcmul_


class Contraction(torch.autograd.Function):
    """`mix_and_add` that saves x and y for the backward pass, or neither if the coefficients are not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, g: Tensor) -> Tensor:
        trained = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        ctx.save_for_backward(a, g, *((x, y) if trained else ()))
        return mix_and_add(x, y, a, g)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        a, g, *kept = ctx.saved_tensors
        wants_x, wants_y, wants_a, wants_g = ctx.needs_input_grad
        grad_x = mix(grad, a.mT).flatten(-2) if wants_x else None
        grad_y = mix(grad, g.mT).squeeze(-2) if wants_y else None
        grad_a = grad_g = None
        if kept and torch.compiler.is_compiling():
            sums = summed_products(grad, kept[0], kept[1], a)
            grad_a = sums[..., :-1].sum_to_size(a.shape).to(a.dtype) if wants_a else None
            grad_g = sums[..., -1:].sum_to_size(g.shape).to(g.dtype) if wants_g else None
        elif kept:
            x, y = kept[0].unflatten(-1, (a.shape[-1], -1)), kept[1].unsqueeze(-1)  # (…, C, d), (…, d, 1)
            rows = grad.unflatten(-1, (a.shape[-2], -1))  # (…, R, d)
            with torch.autocast(grad.device.type, enabled=False):
                grad_a = (rows @ x.mT).sum_to_size(a.shape) if wants_a else None
                grad_g = (rows @ y).sum_to_size(g.shape) if wants_g else None
        return grad_x, grad_y, grad_a, grad_g


def summed_products(grad: Tensor, x: Tensor, y: Tensor, a: Tensor) -> Tensor:
    """Return the gradients of a and, in the last column, of g, ([…,] R, C + 1): sums that compile to one kernel."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    rows = grad.unflatten(-1, (a.shape[-2], -1)).to(wide).unbind(-2)  # R of (…, d)
    columns = (*x.unflatten(-1, (a.shape[-1], -1)).to(wide).unbind(-2), y.to(wide))
    products = (row * column for row in rows for column in columns)
    sums = [product.sum(-1) if a.dim() > 2 else product.sum() for product in products]  # by token, if each has coefficients
    place = torch.arange(len(sums), device=grad.device)
    total = sums[0].unsqueeze(-1)
    for number, value in enumerate(sums[1:], 1):  # indexed, not stacked: a compiler would copy each separately
        total = torch.where(place >= number, value.unsqueeze(-1), total)
    return total.unflatten(-1, (len(rows), len(columns)))


def contract(x: Tensor, y: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """Return Σ_c a[r,c] x^c + g[r] y in x's dtype: x (…, C·d), y (…, d), a ([…,] R, C), g ([…,] R, 1) give (…, R·d)."""
    dtype = x.dtype
    if y.dtype != dtype or a.dtype != dtype or g.dtype != dtype:
        y, a, g = y.to(dtype), a.to(dtype), g.to(dtype)
    if torch.is_grad_enabled() and not is_exporting():
        return Contraction.apply(x, y, a, g)  # type: ignore[no-any-return]
    return mix_and_add(x, y, a, g)


def combine_blocks(x: Tensor, weights: Sequence[float]) -> Tensor:
    """Return Σ_i weights[i] x^i: (…, K·d) gives (…, d)."""
    return weighted_sum(x.unflatten(-1, (len(weights), -1)).unbind(-2), weights)


def weighted_sum(terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ_i weights[i] terms[i] without terms of weight 0; a single term of weight 1 is returned unchanged."""
    (first, weight), *others = [(term, weight) for term, weight in zip(terms, weights, strict=True) if weight] or [(terms[0], 0.0)]
    total = first if weight == 1.0 else first * weight
    for term, weight in others:
        total = torch.add(total, term, alpha=weight)
    return total


class Blockwise(Wrapper):
    """Applies the d-wide `layer` to each block of its K·d-wide argument `wide`, and concatenates the outputs."""

    def __init__(self, layer: nn.Module, k: int, wide: int | str = 0) -> None:
        super().__init__(layer)
        self.k, self.place = k, argument_place(layer, wide)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(self.place, arguments, keywords)
        outputs = []
        for block in container[key].chunk(self.k, -1):
            container[key] = block
            outputs.append(self.layer(*arguments, **keywords))
        return with_item(outputs[0], 0, torch.cat([item_at(output, 0) for output in outputs], -1))


class Replicated(Wrapper):
    """The output of `layer`, K times side by side."""

    def __init__(self, layer: nn.Module, k: int) -> None:
        super().__init__(layer)
        self.k = k

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return map_first(self.layer(*args, **kwargs), lambda y: torch.cat([y] * self.k, -1))


class BlockScale(nn.Module):
    """Multiplies block i by scale[i]; `before`, a forward pre-hook of another module, does so to that module's first argument.

    A scale that is not learned is a tuple of numbers: a buffer would round 1/3 to the dtype of the weights.
    """

    def __init__(self, scale: Sequence[float], *, learnable: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.get_default_dtype())) if learnable else tuple(scale)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.chunk(len(self.scale), -1)
        return torch.cat([block * weight for block, weight in zip(blocks, self.scale, strict=True)], -1)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self(args[0]), *args[1:])


class DivideAndProject(nn.Module):
    """Divides an extra width e into K−1 sub-blocks and projects each to d (external-memory paper, §5.4).

    `after`, a forward hook of the look-up, widens its d+e columns to K·d; `before`, a forward pre-hook of the head, narrows K·d
    columns to d+e with the same matrices transposed.
    """

    def __init__(self, extra: int, k: int, width: int) -> None:
        super().__init__()
        part = extra // (k - 1)
        self.weight = nn.Parameter(torch.randn(k - 1, width, part) / part**0.5)  # (K−1, d, e/(K−1))

    def forward(self, extra: Tensor) -> Tensor:
        """Return (…, (K−1)·d) for (…, e)."""
        parts = extra.unflatten(-1, (len(self.weight), -1))  # (…, K−1, e/(K−1))
        return torch.einsum("...kp,kdp->...kd", parts, self.weight.to(extra.dtype)).flatten(-2)

    def narrow(self, blocks: Tensor) -> Tensor:
        """Return (…, e) for (…, (K−1)·d)."""
        parts = torch.einsum("...kd,kdp->...kp", blocks.unflatten(-1, (len(self.weight), -1)), self.weight.to(blocks.dtype))
        return parts.flatten(-2)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        width = self.weight.shape[1]
        return torch.cat([output[..., :width], self(output[..., width:])], -1)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, width = args[0], self.weight.shape[1]
        return (torch.cat([x[..., :width], self.narrow(x[..., width:])], -1), *args[1:])


HOME = "altup_home"  # an attribute of the streams that layers return: the block that holds the dense stream
ALL = -1  # its value if all blocks hold it
NO_LAYER_DROP = "load with layerdrop=0, or encoder_layerdrop=0 and decoder_layerdrop=0"


def start_coefficients(init: str, k: int, j: int, n: int) -> tuple[Tensor, Tensor]:
    """Return P [K, K] and g [K] that keep the dense stream in all blocks (lockstep), or move it from block j to n (hop)."""
    p, g = torch.eye(k), torch.ones(k)
    if init == "hop":
        p[j] = p[n]
        g = torch.eye(k)[n]
    return p, g


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at `path`; None if there is none, because the model is of another class than was rewritten."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def outer_width(model: nn.Module, path: str) -> int | None:
    """Return the width of the stream at a token table or head; None if there is no module of torch's at the path."""
    module = module_at(model, path)
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return module.in_features if isinstance(module, nn.Linear) else None


def reads_table(model: Any, paths: Iterable[str]) -> bool:
    """Return whether a table at one of the paths embeds the model's inputs."""
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):  # not a model of transformers, or one without a table
        return False
    return any(getattr(model.get_submodule(path), "weight", None) is weight for path in paths)


def holds(model: Any, path: str, layer: nn.Module) -> bool:
    """Return whether the module at `path` is the layer or wraps it; True if there is no module."""
    module = module_at(model, path)
    return not path or module is None or any(part is layer for part in module.modules())


def has_projection(model: Any, path: str) -> bool:
    """Return whether the module at `path` has a projection of extra columns; True if there is no module."""
    module = module_at(model, path)
    return module is None or any(isinstance(part, DivideAndProject) for part in module.modules())


def skips_its_hooks(model: Any, path: str) -> bool:
    """Return whether PEFT trains single tokens of the module at `path`: it reads the weight and bypasses the module's hooks."""
    peft: Any = sys.modules.get("peft.tuners.trainable_tokens.layer")
    module = module_at(model, path)
    if peft is None or module is None:
        return False
    layers: Any = (part for part in module.modules() if isinstance(part, peft.TrainableTokensLayer))
    live = (layer for layer in layers if not (layer.merged or layer.disable_adapters))
    return any(isinstance(child, (BlockScale, DivideAndProject)) for layer in live for child in layer.base_layer.children())


def layers_left_out(why: str, skipped: Sequence[str] = ()) -> DoesNotFitError:
    """Return the error for a stack that did not run the layers `skipped`; empty if they are unknown."""
    names = f": {skipped[0]}" + (f" to {skipped[-1]}" if len(skipped) > 1 else "") if skipped else ""
    return DoesNotFitError(
        f"layers of a stack rewritten by AltUp were skipped{names}",
        why=why,
        remedy="run all layers in their order (no assistant_early_exit, the original num_hidden_layers; in training no LayerDrop: "
        f"{NO_LAYER_DROP}), or rewrite with init=lockstep and embedding=wide",
        code="layers-skipped",
        site=skipped[0] if skipped else "",
        sites=skipped,
    )


class StackRun:
    """The progress of a stack whose dense stream moves between blocks.

    `depth` is that of the last layer called, −1 before the first. Streams that layers return have the attribute `HOME`. The stream
    that enters the stack does not, so a skipped first layer is not detected.
    """

    guards: ClassVar[tuple[str, ...]] = ("begin",)

    def __init__(self, layers: Sequence[str], entry: int) -> None:
        self.layers, self.entry = tuple(layers), entry  # their paths; the block in which the dense stream enters
        self.depth = len(self.layers) - 1

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Start another run: a forward pre-hook of the module that calls the layers."""
        if not torch.compiler.is_compiling():
            self.depth = -1

    def home(self, x: Tensor) -> int:
        """Return the block of x that holds the dense stream; `ALL` if x is not marked."""
        return getattr(x, HOME, self.entry if self.depth < 0 else ALL)

    def skipped(self, depth: int) -> tuple[str, ...]:
        """Return the paths of the layers before `depth` that did not run; that of the layer before it, if all were called."""
        return self.layers[self.depth + 1 : depth] or self.layers[max(depth - 1, 0) : depth]


class AltUpLayer(Wrapper):
    """The d-wide `layer` computes block `active` of a K·d-wide stream; `p` [K, K] and `g` [K] predict and correct all blocks.

    The stream is the argument `stream_in` and the item `stream_out` of the output: an index or key, None for the output itself.
    `narrow` names other K·d-wide arguments and the block of each that the layer receives; the others are passed unchanged.

    - `expand`: the stream enters d wide, and all K blocks equal it. `combine`: it leaves d wide, as Σ_i combine[i] x^i.
    - `next_active`: the block that holds the dense stream afterwards, at the start; None if all blocks hold it.
    - `rotate`: the blocks move up by one afterwards, so that a layer called at every depth computes each block in turn.
    """

    second_step: ClassVar[tuple[str, ...]] = ()  # parameters whose gradient is zero until others have moved
    guards: ClassVar[tuple[str, ...]] = ("require_ends",)

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
        self.next_active: int | None = None
        self.stack_run: StackRun | None = None  # of its stack, if the dense stream moves between blocks
        self.stack_depth = 0  # in `stack_run`
        self.stream_in, self.stream_out = argument_place(layer, stream_in), stream_out
        self.narrow = [(argument_place(layer, key), block) for key, block in (narrow or {}).items()]
        self.expand, self.rotate = expand, rotate
        self.ends: dict[str, int] = {}  # of the first layer: the paths of the widened tables and heads, and their widths
        self.place = ""  # of the first layer: its path in the model
        self.projected: tuple[str, ...] = ()  # of the first layer: the tables and heads with a projection of extra columns
        self.combine = None if combine is None else tuple(float(weight) for weight in combine)
        like = float_like(layer)
        self.add_coefficients(like.device, like.dtype)
        self.start("lockstep", active)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(self.stream_in, arguments, keywords)
        x = container[key]
        self.check_width(x)
        if self.stack_run is not None and not is_exporting():
            self.enter(self.stack_run, x)
        container[key] = block = x if self.expand else self.block(x, self.active)
        for place, i in self.narrow:
            container, key = find_argument(place, arguments, keywords)
            container[key] = None if container[key] is None else self.block(container[key], i)
        output = self.layer(*arguments, **keywords)
        stream = self.update(x, block, item_at(output, self.stream_out))
        if self.combine is None and not torch.compiler.is_compiling():
            setattr(stream, HOME, ALL if self.next_active is None or self.rotate else self.next_active)
        return with_item(output, self.stream_out, stream)

    def enter(self, run: StackRun, x: Tensor) -> None:
        """Record the call. Raises `DoesNotFitError` if another block of x than this layer's holds the dense stream."""
        if not torch.compiler.is_compiling() and not self.expand:
            if run.home(x) not in (ALL, self.active):
                raise layers_left_out(f"block {self.active} does not hold the dense stream", run.skipped(self.stack_depth))
            setattr(x, HOME, self.active)  # a user's hook may return x instead of the layer's output
        run.depth = self.stack_depth

    def require_end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `DoesNotFitError` if `module`, which reads the stream after this last layer, receives that of another layer."""
        for home in (getattr(value, HOME, None) for value in (*args, *kwargs.values())):
            if home is not None and (self.combine is not None or home not in (ALL, self.next_active)):
                skipped = self.stack_run.skipped(self.stack_depth + 1) if self.stack_run is not None else ()
                raise layers_left_out("the stream is read before its last layer", skipped)

    def require_ends(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `DoesNotFitError` if the ends of the stream in `model` changed, or the model gets embeddings of width d.

        The ends are this first layer, which must be at its place, and the widened tables and heads, which must not be replaced.
        """
        if torch.compiler.is_compiling() or is_exporting():
            return
        if self.stack_run is not None and not holds(model, self.place, self):
            raise layers_left_out("it is no longer where it was", [self.place])
        for path in self.ends:
            if skips_its_hooks(model, path):
                raise DoesNotFitError(
                    f"PEFT cannot train single tokens (trainable_token_indices) of the wide table that {path} reads",
                    why=f"it bypasses {path} when it reads the table, so the weights of AltUp's blocks are left out",
                    remedy="adapt the whole table with modules_to_save=, or rewrite with embedding=recycled",
                    site=path,
                    code="single-tokens",
                )
        for path, width in self.ends.items():
            if (found := outer_width(model, path)) not in (None, width):
                raise DoesNotFitError(
                    f"{path} is {found} wide, where AltUp's stream is {self.k * self.width}",
                    why="the widened module was replaced",
                    remedy=f"replace it before altup, or by one of width {width}; embedding=recycled leaves it as it was",
                    site=path,
                    code="width",
                )
        for path in self.projected:
            if not has_projection(model, path):
                raise DoesNotFitError(
                    f"{path} has lost the projection of its extra columns",
                    why="it was replaced, as resize_token_embeddings replaces an untied head",
                    remedy="resize or replace it before altup; altup without extra= takes either",
                    site=path,
                    code="replaced",
                )
        given = kwargs.get("inputs_embeds")
        if isinstance(given, Tensor) and given.shape[-1] == self.width and reads_table(model, self.ends):
            raise DoesNotFitError(
                f"inputs_embeds is {self.width} wide, where AltUp's stream is {self.k * self.width}",
                why="the token table was widened",
                remedy="embed with model.get_input_embeddings(), or rewrite with embedding=recycled",
                option="inputs_embeds",
                code="width",
            )

    def check_width(self, x: Tensor) -> None:
        """Raise `DoesNotFitError` if the stream does not have the width that this layer reads."""
        wide = self.k * self.width
        width = self.width if self.expand else wide
        if x.shape[-1] == wide != width:
            raise DoesNotFitError(
                "the layer that widens AltUp's stream received one that is wide already",
                why="it was called after another layer of its stack",
                remedy="call the layers in the order in which they were rewritten, each once; change the order before altup",
                code="layers-skipped",
            )
        if x.shape[-1] != width:
            raise DoesNotFitError(
                f"a layer received a stream {x.shape[-1]} wide, where AltUp's is {width}",
                why="it was embedded by another table than the widened one, or the layer that widens it was skipped, as LayerDrop "
                "does in training",
                remedy="embed with model.get_input_embeddings(), or rewrite with embedding=recycled; "
                f"turn LayerDrop off: {NO_LAYER_DROP}",
                code="width",
            )

    def block(self, x: Tensor, i: int) -> Tensor:
        return x.narrow(-1, i * self.width, self.width)

    def update(self, x: Tensor, block: Tensor, y: Tensor) -> Tensor:
        """Return x_new from the stream x, its active block and x̃ = y; `rotate`, `expand` and `combine` only change A."""
        p, g = self.coefficients(block, y)
        how = (self.active, int(self.rotate), int(self.expand))
        if runs_kernel(x, p) and not torch.compiler.is_compiling():
            return update_stream(x, y.to(x.dtype), p, g, how, self.combine)
        given, g = (p, g), g.unsqueeze(-1)
        a = torch.addcmul(p, g, p.narrow(-2, self.active, 1), value=-1)  # P − g p_jᵀ
        if self.rotate:
            a, g = a.roll(-1, -2), g.roll(-1, -2)
        if self.expand:
            a = a.sum(-1, keepdim=True)
        if self.combine is not None:
            a = weighted_sum(a.unbind(-2), self.combine).unsqueeze(-2)
            g = weighted_sum(g.unbind(-2), self.combine).unsqueeze(-2)
        if runs_kernel(x, p):
            y = y.to(x.dtype)
            with torch.no_grad():
                made = mix_and_add(x, y, a.to(x.dtype), g.to(x.dtype))
            return update_stream(x, y, *given, how, self.combine, made)
        return contract(x, y, a, g)

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        self.p = nn.Parameter(torch.empty(self.k, self.k, device=device, dtype=dtype))
        self.g = nn.Parameter(torch.empty(self.k, device=device, dtype=dtype))

    @torch.no_grad()
    def start(self, init: str, n: int) -> None:
        """Set the coefficients of the exact start `init` (lockstep or hop); the next layer computes block n."""
        with self.p.device:  # "meta" if the model has no values
            p, g = start_coefficients(init, self.k, self.active, n)
        self.p.copy_(p)
        self.g.copy_(g)

    def coefficients(self, block: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return P and g: the same for every token."""
        return self.p, self.g

    def freeze(self) -> None:
        """Replace the coefficients by buffers, which are saved, but not trained or counted as parameters."""
        for owner in (self, *(child for name, child in self.named_children() if name != "layer")):
            for name, parameter in list(owner._parameters.items()):
                del owner._parameters[name]
                owner.register_buffer(name, None if parameter is None else parameter.detach())

    @staticmethod
    def count(width: int, k: int) -> int:
        """Return the number of parameters that the method adds to a layer."""
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
            identity = torch.eye(self.width)
        self.p.copy_(torch.kron(p, identity))
        self.g.copy_(torch.kron(g.unsqueeze(-1), identity))

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
    """Coefficients that depend on the token, as in Gemma 3n: P from the active block, g from the layer's output.

    Each is its initial value, `base_p` or `base_g`, plus a linear map of r(v) = tanh(modality_router(router_norm(v) / d)). The
    names are Gemma 3n's. Its `correct_output_scale` has no counterpart: it scales only the input of the per-layer embeddings, never
    the stream.
    """

    second_step: ClassVar[tuple[str, ...]] = ("modality_router.weight", "router_norm.weight")  # until the maps leave zero

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
        self.modality_router.weight.normal_(std=self.width**0.5)  # gives the arguments of tanh unit variance
        self.prediction_coefs.weight.zero_()
        self.correction_coefs.weight.zero_()

    def coefficients(self, block: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = self.base_p + F.linear(self.route(block), self.prediction_coefs.weight).unflatten(-1, (self.k, self.k))
        return p, self.base_g + F.linear(self.route(y), self.correction_coefs.weight)

    def route(self, v: Tensor) -> Tensor:
        """Return r(v), one value in (−1, 1) for each block: (…, d) gives (…, K)."""
        weight = self.modality_router.weight
        return torch.tanh(self.modality_router(self.router_norm(v.to(weight.dtype)) / self.width).float()).to(weight.dtype)

    @staticmethod
    def count(width: int, k: int) -> int:
        return width + k * width + k**3 + k**2


COEFFICIENTS: dict[str, type[AltUpLayer]] = {"scalar": AltUpLayer, "dense": DenseAltUpLayer, "dynamic": DynamicAltUpLayer}
