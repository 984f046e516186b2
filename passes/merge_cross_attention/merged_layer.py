"""A decoder layer whose attentions see the encoder's tokens and the decoder's, around the layer's own code.

The layer passes the encoder's states and the other arguments of its cross-attention to both attentions. Each attention runs its own
code, in which a `JointAttention` replaces torch's fused attention; the code of the other attention, with the weights of this one,
computes the other keys (`attention_calls.py`).

The second attention stores its keys of the decoder's tokens, and the first its keys of the encoder's, in additional layers of the
model's cache. A cache of n layers gets n more, of the same kinds, so operations of generation on a cache (selecting rows for beams,
removing tokens, a fixed length, exported states) apply to them too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from retrofit.passes.merge_cross_attention.attention_calls import Borrowing, borrowed_operands, copy_with
from retrofit.passes.merge_cross_attention.joint_attention import AttentionToOthers, JointAttention, JointSoftmax
from retrofit.sdk import ArgumentPlace, RetrofitError, Wrapper, argument_at, argument_place, with_item
from retrofit.sdk.modules import cache_among, call_with_keywords, child_modules, is_cache, tensor_argument
from retrofit.sdk.program import Key

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


@contextlib.contextmanager
def second_layers(cache: Any, layers: int) -> Iterator[Cache]:
    """Yield a view of the layers of `cache` after its first `layers`; they are added if they do not exist."""
    view: Any = object.__new__(type(cache))
    view.__dict__.update(cache.__dict__)
    if not hasattr(cache, "cross_attention_cache"):
        add_layers(cache, layers)
        view.layers, view.layer_class_to_replicate = cache.layers[layers:], None
        yield view
        cache.layers[layers:] = view.layers  # a cache may replace its layers when it is updated
        return
    with (
        second_layers(cache.self_attention_cache, layers) as view.self_attention_cache,
        second_layers(cache.cross_attention_cache, layers) as view.cross_attention_cache,
    ):
        view.is_updated = {index: bool(cache.is_updated.get(layers + index)) for index in range(layers)}
        yield view
        for index, is_updated in view.is_updated.items():
            cache.is_updated[layers + index] = is_updated


def add_layers(cache: Cache, layers: int) -> None:
    """Extend the cache to twice `layers` layers; the second half has the kinds of the first."""
    while len(cache.layers) < layers:
        assert cache.layer_class_to_replicate is not None, "the cache has fewer layers than the model, and cannot add any"
        cache.layers.append(cache.layer_class_to_replicate())
    while len(cache.layers) < 2 * layers:
        cache.layers.append(new_like(cache.layers[len(cache.layers) - layers]))


def new_like(layer: Any) -> Any:
    """Return an empty cache layer with the arguments of `layer`."""
    names = inspect.signature(type(layer)).parameters
    return type(layer)(**{name: getattr(layer, name) for name in names if hasattr(layer, name)})


KEYWORD = "merged"

Joint = JointAttention | JointSoftmax  # instead of torch's fused attention, or of the softmax of written-out scores


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The module of one attention of a layer, and the use of its code with the weights of the other."""

    path: str  # inside the layer
    stream_in: Key
    borrowing: Borrowing


@dataclasses.dataclass(frozen=True)
class CrossArguments:
    """The arguments of a layer that its cross-attention receives, except the stream."""

    source: Key  # the encoder's states, in the layer's call
    others: tuple[tuple[Key, Key], ...]  # key in the cross-attention's call, key in the layer's call


class MergedLayer(Wrapper):
    """Calls `layer` so that its attentions at `paths` receive the keyword `merged`, with the arguments that both need."""

    def __init__(self, layer: nn.Module, paths: tuple[str, ...], arguments: CrossArguments) -> None:
        super().__init__(layer)
        self.paths = paths
        self.source = argument_place(layer, arguments.source)
        self.others = tuple((key, argument_place(layer, own)) for key, own in arguments.others)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        merged = {
            "source": tensor_argument(self.source, args, kwargs),
            "arguments": tuple((key, value_at(place, args, kwargs)) for key, place in self.others),
            "cache": cache_among(args, kwargs),
        }
        return call_with_keywords(child_modules(self)["layer"], self.paths, {KEYWORD: merged}, args, kwargs)


class MergedSelfAttention(Wrapper):
    """Self-attention whose keys include the encoder's tokens, by its own weights: the first attention of the layer."""

    def __init__(
        self, layer: nn.Module, call: AttentionCall, cross: AttentionCall, arguments: CrossArguments, attention: Joint
    ) -> None:
        super().__init__(layer)
        self.stream_in, self.borrowing = argument_place(layer, call.stream_in), cross.borrowing
        self.attention, self.cross_stream = attention, cross.stream_in
        keys = cross.stream_in, *(key for key, _ in arguments.others)
        self.positional = 1 + max([-1, *(key for key in keys if isinstance(key, int))])  # arguments of the cross-attention
        self.cache_layers = 0  # number of the model's own cache layers; 0 if the cross-attention's layers are free
        self.__dict__["cross"] = nn.Identity()  # the module whose code is used; registered elsewhere, or without weights

    def forward(self, *args: Any, merged: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        given, layer = required(merged), child_modules(self)["layer"]
        given["self"] = args, kwargs
        if given["source"] is None:  # a decoder without an encoder
            return layer(*args, **kwargs)
        other = None
        if self.attention.share:
            x = argument_at(self.stream_in, args, kwargs)
            with_cache = given["cache"] is not None and cache_among(args, kwargs) is not None
            with own_cache(given["cache"] if with_cache else None, self.cache_layers) as cache:
                positional, keywords = self.cross_call(x, given, cache, cache_keyword(kwargs))
                other, given["returned"] = borrowed_operands(
                    self.cross_code(), layer, self.borrowing, self.attention.recorded, positional, keywords
                )
        return answered(layer, self.attention, other, args, kwargs)

    def cross_code(self) -> nn.Module:
        cross: nn.Module = self.__dict__["cross"]
        code: nn.Module = cross.__dict__["code"] if isinstance(cross, NoCrossAttention) else child_modules(cross)["layer"]
        return code

    def cross_call(self, x: Tensor, given: dict[str, Any], cache: Cache | None, name: str) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional arguments and keywords of a call of the cross-attention on x."""
        values = {self.cross_stream: x, **dict(given["arguments"])}
        keywords = {key: value for key, value in values.items() if isinstance(key, str)}
        if cache is not None:
            keywords[name] = cache
        return [values.get(place) for place in range(self.positional)], keywords


class MergedCrossAttention(Wrapper):
    """Cross-attention whose keys include the decoder's tokens, by its own weights: the second attention of the layer."""

    def __init__(self, layer: nn.Module, call: AttentionCall, own: AttentionCall, attention: Joint, layers: int) -> None:
        super().__init__(layer)
        self.stream_in, self.borrowing = argument_place(layer, call.stream_in), own.borrowing
        self.attention, self.cache_layers = attention, layers
        self.__dict__["own"] = nn.Identity()  # the first attention, whose code is used; registered elsewhere

    def forward(self, *args: Any, merged: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        given, layer = required(merged), child_modules(self)["layer"]
        other = None
        if self.attention.share:
            x = argument_at(self.stream_in, args, kwargs)
            first: Any = self.__dict__["own"]
            arguments, keywords = list(given["self"][0]), dict(given["self"][1])
            before = argument_at(first.stream_in, arguments, keywords)  # some modules get the stream as queries, keys and values
            arguments = [x if value is before else value for value in arguments]
            keywords = {word: x if value is before else value for word, value in keywords.items()}
            with cache_replaced(arguments, keywords, self.cache_layers):
                code, recorded = child_modules(first)["layer"], self.attention.recorded
                other, _ = borrowed_operands(code, layer, self.borrowing, recorded, arguments, keywords)
        return answered(layer, self.attention, other, args, kwargs)


class NoCrossAttention(nn.Module):
    """Replaces a removed cross-attention and returns zeros. Its code, which the first attention uses, is stored without weights."""

    def __init__(self, code: nn.Module, call: AttentionCall, returned: bool, out_key: Key, width: int) -> None:
        """`returned`: the module returned the term added to the stream, at `out_key` and of this width."""
        super().__init__()
        self.stream_in, self.returned, self.out_key, self.width = argument_place(code, call.stream_in), returned, out_key, width
        weights = [
            path for path, part in code.named_modules() if any(parameter is not None for parameter in part._parameters.values())
        ]
        self.__dict__["code"] = copy_with(code, {path: nn.Identity() for path in weights})  # no parameters, so not registered

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "code" not in self.__dict__:
                raise
            return getattr(self.__dict__["code"], name)

    def forward(self, *args: Any, merged: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        given = required(merged)
        if not self.returned:  # zeros already, and `Nothing` projects them
            return given["returned"]
        x: Tensor = argument_at(self.stream_in, args, kwargs)
        return with_item(given["returned"], self.out_key, x.new_zeros(*x.shape[:-1], self.width))


def required(merged: dict[str, Any] | None) -> dict[str, Any]:
    if merged is None:
        raise RetrofitError(
            "a merged attention was called outside its layer",
            why="its layer passes the encoder's states to it",
            remedy="call the layer, or the model",
            code="out-of-reach",
        )
    return merged


def answered(layer: nn.Module, attention: Joint, other: Mapping[str, Any] | None, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the output of `layer` with its attention replaced by `attention`, which sees the keys `other` too.

    Raises `RetrofitError` if the code of the layer, or that of the other attention, which gives `other` = {}, attends otherwise.
    """
    core = attention.answered(attention, other)
    with core:
        result = layer(*args, **kwargs)
    if not core.calls or other == {}:
        raise RetrofitError(
            f"an attention no longer calls {attention.replaces}",
            why="merged attention replaces that call",
            remedy="use the attn_implementation with which the model was rewritten",
            code="other-path",
        )
    return result


def value_at(place: ArgumentPlace, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument at a place; None if it was omitted."""
    position, keyword = place
    if keyword is not None and keyword in kwargs:
        return kwargs[keyword]
    return args[position] if position is not None and position < len(args) else None


def cache_keyword(kwargs: Mapping[str, Any]) -> str:
    """Return the keyword with which an attention receives the cache."""
    return next((name for name, value in kwargs.items() if is_cache(value)), "past_key_values")


def own_cache(cache: Cache | None, layers: int) -> contextlib.AbstractContextManager[Cache | None]:
    """Return a context with the layers of the cache after its first `layers`; for `layers` = 0 with the cache."""
    return second_layers(cache, layers) if cache is not None and layers else contextlib.nullcontext(cache)


@contextlib.contextmanager
def cache_replaced(arguments: list[Any], keywords: dict[str, Any], layers: int) -> Iterator[None]:
    """Within this context caches among the arguments are their layers after the first `layers`."""
    places: list[tuple[Any, Any]] = [(arguments, index) for index in range(len(arguments))]
    with contextlib.ExitStack() as stack:
        for container, place in [*places, *((keywords, name) for name in keywords)]:
            if is_cache(container[place]):
                container[place] = stack.enter_context(second_layers(container[place], layers))
        yield


@dataclasses.dataclass(frozen=True)
class OtherTokens:
    """At 0 each attention sees its own keys, as in the dense layer; at 1 it sees both sets."""

    name: str = "the weight of the keys that the merge adds"

    def fits(self, site: nn.Module) -> bool:
        """Return whether the layer has its cross-attention, without which 0 is not the dense layer."""
        return any(isinstance(module, MergedCrossAttention) for module in site.modules())

    def turn(self, site: nn.Module, share: float) -> None:
        """Set the weight of the keys that the merge adds to `share`."""
        for module in site.modules():
            if isinstance(module, AttentionToOthers):
                module.share = share
