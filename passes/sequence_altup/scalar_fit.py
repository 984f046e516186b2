"""The start of strided layers' scalars on calibration data: fitted to the dense layers' outputs and to the model's predictions.

    y_i = a1 x_i + c x_{⌊i/k⌋k} + b ỹ_{⌊i/k⌋k}        c = a2 − b (a1 + a2)

is linear in a1, c and b. For each layer, on its inputs in the dense model, the weighted normal equations of these three unknowns
are solved with the dense layer's output as the target. a2 = (c + b a1) / (1 − b) has a pole at b = 1, where c = −a1 for any a2: a
solution too near it is replaced by the best one with b = 1. A solution is kept if it is nearer to the dense layer on the held-out
windows than 1, 0, 1.

The least squared error of a layer is not the least loss of the model: uncertain parts shrink, in every layer again. So all layers'
scalars move from 1, 0, 1 towards their solutions by the share at which the rewritten model's predictions on the held-out windows
are nearest to the dense model's. From there they take some steps of gradient descent on other windows, in each layer as far as its
own error stays below that of 1, 0, 1; these are kept if they lower the same distance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from retrofit.passes.sequence_altup.strided_layers import SequenceAltUpLayer
from retrofit.sdk import Edit
from retrofit.sdk.data import DensePredictions, RecordedCall, evaluation_mode, split_calibration, token_weights, weighted_error

TOKENS = 2048  # for the scalars of a layer
PREDICTED = 1024  # tokens whose predictions are compared
SHARES = (1.0, 0.5, 0.25)  # of the way from the start to the solutions, to be tried
STEPS, RATE = 16, 0.03  # of Adam on the scalars of all layers
NAMES = ("a1", "a2", "b")
POLE = 0.02  # of 1 − b, below which b is 1
RIDGE = 1e-4  # towards the start, relative to the mean diagonal of the normal equations

Scalars = tuple[float, float, float]  # a1, a2, b
START: Scalars = (1.0, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class DenseModel:
    """The dense model on calibration data: its layers' calls by path, and its predictions.

    A layer whose calls cannot be repeated on their own is not `fitted`: it keeps its initial scalars.
    """

    fitted: Mapping[str, list[RecordedCall]]
    held_out: Mapping[str, list[RecordedCall]]
    predictions: DensePredictions

    @classmethod
    def record(cls, edit: Edit, paths: Sequence[str]) -> DenseModel | None:
        """Return None without calibration data."""
        if edit.calibration is None:
            return None
        fitted, held_out = (part.record(edit.model, paths) for part in split_calibration(edit.calibration, TOKENS))
        model = edit.model
        fitted = {path: calls for path, calls in fitted.items() if calls and calls[0].is_repeatable(model.get_submodule(path))}
        predictions = DensePredictions.record(model, *split_calibration(edit.calibration, PREDICTED, PREDICTED))
        return cls(fitted, held_out, predictions)


def fit_scalars(edit: Edit, dense: DenseModel) -> None:
    """Fit the scalars of the strided layers, and note the distance of the predictions and of each layer before and after."""
    layers = {path: strided_layer(edit.model, path) for path in dense.fitted}
    held_out = {path: regression(layer, dense.held_out[path]) for path, layer in layers.items()}
    before = {path: error_of(layer, START, *held_out[path]) for path, layer in layers.items()}
    solutions = {path: solve(*regression(layer, dense.fitted[path])) for path, layer in layers.items()}
    solutions = {
        path: scalars if error_of(layers[path], scalars, *held_out[path]) <= before[path] else START
        for path, scalars in solutions.items()
    }

    def bounded(path: str, scalars: Scalars, towards: Scalars) -> Scalars:
        """Return `scalars`, moved from those of `towards` as far as the layer's error does not exceed that of the start."""
        tried = (moved(towards, scalars, share) for share in SHARES)
        return next((nearer for nearer in tried if error_of(layers[path], nearer, *held_out[path]) <= before[path]), towards)

    candidates = [dict.fromkeys(layers, START)]
    candidates += [{path: moved(START, scalars, share) for path, scalars in solutions.items()} for share in SHARES]
    distances = [distance_with(candidate, layers, edit.model, dense.predictions) for candidate in candidates]
    nearest = candidates[distances.index(min(distances))]
    set_all(layers, nearest)
    parameters = [layer.get_parameter(name) for layer in layers.values() for name in NAMES]
    dense.predictions.descend(edit.model, parameters, STEPS, RATE)
    candidates.append({path: bounded(path, scalars_of(layer), nearest[path]) for path, layer in layers.items()})
    distances.append(distance_with(candidates[-1], layers, edit.model, dense.predictions))
    set_all(layers, candidates[distances.index(min(distances))])
    for path in dense.held_out:
        if strided_layer(edit.model, path).b.item() == 1.0:  # the correction subtracts what a2 adds
            edit.expect_late_gradient(strided_layer(edit.model, path).get_parameter("a2"))
    after = {path: error_of(layer, scalars_of(layer), *held_out[path]) for path, layer in layers.items()}
    edit.note(f"{dense.predictions.unit} on windows held out: {distances[0]:.3f} → {min(distances):.3f}")
    for path in layers:
        edit.note("relative error on windows held out", path, {"before": before[path], "after": after[path]}, worst="highest")


def strided_layer(model: nn.Module, path: str) -> SequenceAltUpLayer:
    layer = model.get_submodule(path)
    assert isinstance(layer, SequenceAltUpLayer)
    return layer


def distance_with(
    scalars: Mapping[str, Scalars], layers: Mapping[str, SequenceAltUpLayer], model: nn.Module, predictions: DensePredictions
) -> float:
    """Return the distance of the model's predictions with these scalars from the dense ones."""
    set_all(layers, scalars)
    return predictions.distance(model)


def moved(begin: Scalars, end: Scalars, share: float) -> Scalars:
    """Return the scalars whose a1, c and b are this share of the way from those of `begin` to those of `end`."""
    a1, c, b = (start + share * (goal - start) for start, goal in zip(linear(begin), linear(end), strict=True))
    return (a1, 0.0, 1.0) if b == 1 else (a1, (c + b * a1) / (1 - b), b)


def linear(scalars: Scalars) -> tuple[float, float, float]:
    """Return a1, c and b of the scalars a1, a2 and b."""
    a1, a2, b = scalars
    return a1, a2 - b * (a1 + a2), b


def regression(layer: SequenceAltUpLayer, calls: Sequence[RecordedCall]) -> tuple[Tensor, Tensor]:
    """Return the three terms of y for each token, and the dense layer's y: (3, tokens, d) and (tokens, d)."""
    terms = []
    with evaluation_mode(layer):
        for scalars in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):  # c = 0, c = 1, c = 0
            set_scalars(layer, scalars)
            terms.append(torch.cat([call.real(layer.stream_of(call.repeat(layer))) for call in calls]).float())
    set_scalars(layer, START)
    return torch.stack(terms), torch.cat([call.real(layer.stream_of(call.output)) for call in calls]).float()


def solve(terms: Tensor, y: Tensor) -> Scalars:
    """Return the scalars with the least weighted squared error, from the terms (3, tokens, d) to y (tokens, d)."""
    weighted = (terms * token_weights(y, *terms).unsqueeze(-1)).flatten(1).double()
    flat, target = terms.flatten(1).double(), y.flatten().double()
    a1, c, b = least_squares(weighted @ flat.t(), weighted @ target, torch.tensor([1.0, -1.0, 1.0]).to(flat)).tolist()
    if abs(1 - b) > POLE:
        return a1, (c + b * a1) / (1 - b), b
    difference, weighted_difference = flat[0] - flat[1], weighted[0] - weighted[1]  # y − ỹ = a1 (x_i − x_{⌊i/k⌋k})
    gram = (weighted_difference @ difference).view(1, 1)
    a1 = float(least_squares(gram, (weighted_difference @ (target - flat[2])).view(1), torch.ones(1).to(flat)))
    return a1, 0.0, 1.0


def least_squares(gram: Tensor, right: Tensor, start: Tensor) -> Tensor:
    """Return the solution of the normal equations with a ridge towards `start`."""
    ridge = (RIDGE * gram.diagonal().mean()).clamp_min(torch.finfo(gram.dtype).tiny)
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), right + ridge * start)


def error_of(layer: SequenceAltUpLayer, scalars: Scalars, terms: Tensor, y: Tensor) -> float:
    """Return the weighted relative error of these scalars in the dtype of the layer."""
    a1, c, b = linear(tuple(float(layer.a1.detach().new_tensor(value)) for value in scalars))  # type: ignore[arg-type]
    return float(weighted_error(a1 * terms[0] + c * terms[1] + b * terms[2], y, token_weights(y, *terms)))


@torch.no_grad()
def set_scalars(layer: SequenceAltUpLayer, scalars: Scalars) -> None:
    for name, value in zip(NAMES, scalars, strict=True):
        layer.get_parameter(name).fill_(value)


def scalars_of(layer: SequenceAltUpLayer) -> Scalars:
    return layer.a1.item(), layer.a2.item(), layer.b.item()


def set_all(layers: Mapping[str, SequenceAltUpLayer], scalars: Mapping[str, Scalars]) -> None:
    for path, layer in layers.items():
        set_scalars(layer, scalars[path])
