"""Faults of reversible: the step forwards and backwards, what is kept of it, its gradient, two streams, what is run twice."""

from __future__ import annotations

import functools

from mutant import Mutant, on

DEFAULT = on("gpt2-4-layers llama-3-layers", "reversible(bits=2)")
DECODER = on("llama-4-layers", "reversible(bits=2)")
BOTH_STACKS = on("t5-gated", "reversible(bits=2)")
MIXTURES = on("llama-3-layers", "reversible(bits=2)")
TWO_STREAMS = on("gpt2-4-layers llama-3-layers t5-gated", "reversible(scheme=terraformer)")
LAYERS = "tests/passes/reversible/test_reversible_layers.py"
SWAPS = "tests/passes/reversible/test_two_streams.py"

chain = functools.partial(Mutant, "reversible", "passes/reversible/reversible_layer.py")
fixed = functools.partial(Mutant, "reversible", "passes/reversible/reversible_layer.py")
call = functools.partial(Mutant, "reversible", "passes/reversible/repeated_call.py")
layer = functools.partial(Mutant, "reversible", "passes/reversible/reversible_layer.py")
streams = functools.partial(Mutant, "reversible", "passes/reversible/two_streams.py")
branches = functools.partial(Mutant, "reversible", "passes/reversible/branch_calls.py")
swapped = functools.partial(Mutant, "reversible", "passes/reversible/two_streams.py")
whole = functools.partial(Mutant, "reversible", "passes/reversible/reversible.py")

MUTANTS = [
    chain(
        "a step subtracts the current stream once, not twice",
        "return y + signs * (((y - 2 * current) >> bits) + (previous >> bits))",
        "return y + signs * (((y - current) >> bits) + (previous >> bits))",
        trials=DEFAULT,
    ),
    chain(
        "a step forgets the stream before",
        "return y + signs * (((y - 2 * current) >> bits) + (previous >> bits))",
        "return y + signs * ((y - 2 * current) >> bits)",
        trials=DEFAULT,
    ),
    chain(
        "a step is undone without the bits that were lost",
        "- ((y - 2 * current) >> bits)) << bits) + low",
        "- ((y - 2 * current) >> bits)) << bits)",
        trials=DEFAULT,
    ),
    chain(
        "a step is undone with the other sign",
        "return ((signs * (after - y) - ",
        "return ((-signs * (after - y) - ",
        trials=DEFAULT,
    ),
    chain(
        "one sign for all rows",
        "torch.randint(2, (x.shape[0], *[1] * (x.dim() - 1)), device=x.device)",
        "torch.randint(2, (1, *[1] * (x.dim() - 1)), device=x.device)",
        trials=DEFAULT,
    ),
    chain(
        "the sign is always plus",
        "device=x.device) * 2 - 1",
        "device=x.device) * 0 + 1",
        trials=DEFAULT,
    ),
    chain(
        "every layer begins a chain of its own",
        "if earlier is None or len(earlier.chain.moves) != earlier.index:",
        "if True:",
        trials=DEFAULT,
    ),
    chain(
        "the gradient of a layer is not weighed by 1 + γ",
        "through, past, before = gradient + gamma * gradient, ",
        "through, past, before = gradient, ",
        trials=DEFAULT,
    ),
    chain(
        "the gradient past a layer has half its weight",
        "-2 * gamma * gradient, gamma * gradient",
        "-gamma * gradient, gamma * gradient",
        trials=DEFAULT,
    ),
    chain(
        "no gradient goes to the stream before",
        "return None, None, None, found[0], before, ",
        "return None, None, None, found[0], None, ",
        trials=DEFAULT,
    ),
    chain(
        "γ of the gradient is that of one bit",
        "move.signs.to(gradient.dtype) * 2.0**-chain.bits",
        "move.signs.to(gradient.dtype) * 0.5",
        trials=DEFAULT,
    ),
    chain(
        "losses recorded inside a layer are lost",
        "    for loss in tensors[len(tensors) - returned.losses :]:\n",
        "    for loss in ():\n",
        trials=MIXTURES,
        test="tests/passes/reversible/test_reversible.py::test_other_methods_inside_have_the_gradients_of_the_formula",
    ),
    chain(
        "a stream that cannot be represented is hidden",
        "returned.tensors[0] = not_a_number_where(y, to_float(after, y.dtype))",
        "returned.tensors[0] = to_float(after, y.dtype)",
        trials=DECODER,
        test=f"{LAYERS}::test_infinities_are_not_hidden",
    ),
    chain(
        "what is not reproduced is no error",
        "if not torch.equal(current.sum(), self.start):",
        "if False:",
        trials=DECODER,
        test=f"{LAYERS}::test_what_cannot_be_computed_again_is_an_error_with_the_reason",
    ),
    fixed(
        "one bit of the packed ones is lost",
        "for bit in range(count):",
        "for bit in range(count - 1):",
        trials=DEFAULT,
    ),
    fixed(
        "numbers are packed in one order and unpacked in another",
        "torch.arange(8, dtype=torch.uint8, device=like.device)",
        "torch.randperm(8, device=like.device).to(torch.uint8)",
        trials=DEFAULT,
    ),
    fixed(
        "numbers have eight bits behind the point",
        "SCALE = 2.0**32",
        "SCALE = 2.0**8",
        trials=DEFAULT,
    ),
    call(
        "random numbers are drawn anew when a layer is computed again",
        "self.random.restored() if self.random else contextlib.nullcontext()",
        "contextlib.nullcontext()",
        trials=on("gpt2-4-layers", "reversible(bits=2)"),
    ),
    call(
        "the first run of a layer may run other kernels than the second",
        "with recorded_graph(kept=False):",
        "with torch.no_grad():",
        trials=on("t5-without-dropout", "reversible(bits=2)"),
        test=f"{LAYERS}::test_gradients_are_those_with_everything_kept_bit_for_bit",
    ),
    call(
        "tensors that several layers are given get no gradient from them",
        "trained = [tensor for tensor in inside if isinstance(tensor, Tensor) and tensor.requires_grad]",
        "trained = [one for one in inside if isinstance(one, Tensor) and False]",
        trials=BOTH_STACKS,
    ),
    call(
        "a layer computed again reads the cache that it wrote to",
        "own = leaf.copied(values)",
        "own = leaf.cache",
        trials=DECODER,
    ),
    call(
        "autocast is as it is in the backward pass",
        "if enabled or torch.is_autocast_enabled(kind):",
        "if False:",
        trials=DECODER,
        test=f"{LAYERS}::test_under_autocast_the_gradients_are_the_same_in_it_and_after_it",
    ),
    layer(
        "evaluated, a layer takes a step too",
        "if not (self.training and torch.is_grad_enabled()) or is_exporting():",
        "if not torch.is_grad_enabled() or is_exporting():",
        trials=DEFAULT,
    ),
    layer(
        "trained, a layer is as it was",
        "if not (self.training and torch.is_grad_enabled()) or is_exporting():",
        "if True:",
        trials=DEFAULT,
    ),
    streams(
        "on two streams a branch is added to the stream that it read",
        "current, previous = previous + to_fixed(value), current",
        "current, previous = current + to_fixed(value), current",
        trials=TWO_STREAMS,
    ),
    streams(
        "on two streams a branch is not taken away in the backward pass",
        "previous = after - to_fixed(value.detach())",
        "previous = after",
        trials=TWO_STREAMS,
    ),
    streams(
        "on two streams the gradient does not go through the branches",
        "plus(of_older, found[0], link.dtypes[number + 1])",
        "plus(of_older, None, link.dtypes[number + 1])",
        trials=TWO_STREAMS,
    ),
    streams(
        "the gradient of the mean goes whole to both streams",
        "return (0.5 * gradient).to(newer), (0.5 * gradient).to(older)",
        "return gradient.to(newer), gradient.to(older)",
        trials=TWO_STREAMS,
    ),
    streams(
        "trained, the newer stream is returned and not the mean of both",
        "mean(newer, older, current, previous) if swaps.closes",
        "mean(newer, newer, current, current) if swaps.closes",
        trials=TWO_STREAMS,
    ),
    streams(
        "where one stream becomes two only the newer has a gradient",
        "return plus(of_newer, of_older)",
        "return of_newer",
        trials=TWO_STREAMS,
    ),
    streams(
        "what two streams do not reproduce is no error",
        "if not all(torch.equal(stream.sum(), start) for stream, start in zip(streams, self.start or (), strict=True)):",
        "if False:",
        trials=TWO_STREAMS,
        test=f"{SWAPS}::test_what_cannot_be_computed_again_is_an_error_with_the_reason",
    ),
    branches(
        "random numbers are drawn anew when a branch is computed again",
        "random = state.restored() if state is not None else RandomState(self.device).kept()",
        "random = RandomState(self.device).kept()",
        trials=TWO_STREAMS,
        test=f"{SWAPS}::test_gradients_are_those_with_everything_kept_bit_for_bit",
    ),
    branches(
        "a branch computed again has the losses of all branches",
        "own = losses[span[0] : span[1]]",
        "own = losses",
        trials=TWO_STREAMS,
        test=f"{SWAPS}::test_a_branch_has_the_losses_that_the_layers_own_code_records_for_it_alone",
    ),
    branches(
        "for one branch all of them are computed again",
        "            skipping.active = False\n            return blank.detach()",
        "            return blank.detach()",
        trials=TWO_STREAMS,
        test=f"{SWAPS}::test_a_branch_runs_twice_in_a_step_and_only_on_its_own_stream",
    ),
    swapped(
        "evaluated, the older stream stays the first one",
        "self.newer, self.older = base + value, self.newer",
        "self.newer, self.older = base + value, self.older",
        trials=TWO_STREAMS,
    ),
    swapped(
        "evaluated, the newer stream is returned and not the mean of both",
        "return torch.lerp(self.newer, self.older.to(self.newer.dtype), self.share / 2)",
        "return self.newer",
        trials=TWO_STREAMS,
    ),
    swapped(
        "the dial turns the wrong way",
        "torch.lerp(self.newer, self.older.to(self.newer.dtype), self.share)",
        "torch.lerp(self.newer, self.older.to(self.newer.dtype), 1 - self.share)",
        trials=TWO_STREAMS,
        test=f"{SWAPS}::test_a_decoder_is_the_loop_over_its_branches_anywhere_on_the_dial",
    ),
    whole(
        "two streams never end: no mean is taken",
        "links += [*chain[:-1], finder.last_of(chain, stack)]",
        "links += chain",
        trials=TWO_STREAMS,
    ),
    whole(
        "the option bits has no effect",
        "ReversibleLayer(layer, self.bits, ",
        "ReversibleLayer(layer, 4, ",
        trials=DEFAULT,
    ),
]
