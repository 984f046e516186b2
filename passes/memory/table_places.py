"""Where tables go: to the modules whose input and output are the stream, or the input and output of a feed-forward."""

from __future__ import annotations

from retrofit.sdk import (
    BEFORE_THE_OUTER,
    BEFORE_TWO_STREAMS,
    LAYER_WITHIN,
    ON_TWO_STREAMS,
    Anatomy,
    DoesNotFitError,
    InnerLayers,
    Layer,
    NearMiss,
    Stack,
    WrappedModule,
    WrappedModules,
    collect_near_miss,
)

NO_FEED_FORWARD = "beside=layers needs no FFN; emit='graph' makes each a module"


class TablePlaces:
    """Finds the places for tables in one model."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.model, self.modules = anatomy.model, WrappedModules(anatomy, no_place, NO_FEED_FORWARD)
        self.within = InnerLayers(anatomy.flow)

    def of_layer(self, layer: Layer, stack: Stack, beside: str, near_misses: list[NearMiss]) -> list[WrappedModule]:
        """The places at one layer: the layer itself or its FFNs, as `beside` says; a near miss for each that has none."""
        places: list[WrappedModule] = []
        with collect_near_miss(layer.name or layer.exit, near_misses):
            if beside == "layers" and self.is_on_two_streams(layer):
                raise no_place(layer.name, ON_TWO_STREAMS, BEFORE_TWO_STREAMS)
            around = self.modules.stream_module(layer, stack)
            if beside == "layers":
                return [around]
            if self.within.inside(layer) is not layer:
                raise no_place(layer.name, LAYER_WITHIN, BEFORE_THE_OUTER)
            if not layer.ffns:
                raise no_place(layer.name, "it has no FFN", NO_FEED_FORWARD)
            for branch in layer.ffns:
                with collect_near_miss(branch.name or layer.name, near_misses):
                    places.append(self.modules.feed_forward(branch, stack.width))
        return places

    def is_on_two_streams(self, layer: Layer) -> bool:
        """Whether a module around the layer adds its branches to a stream that is not what the layer returns."""
        steps = layer.name.split(".")
        above = [self.model.get_submodule(".".join(steps[:count])) for count in range(len(steps) + 1)]
        return any(getattr(one, "adds_branches", False) for one in above)


def no_place(name: str, why: str, remedy: str) -> DoesNotFitError:
    return DoesNotFitError(f"memory: {name} can have no table", why=why, remedy=remedy)
