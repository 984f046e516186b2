"""Faults of reversible: the step forwards and backwards, what is kept of it, its gradient, what is run twice, the options."""

from __future__ import annotations

import functools

from mutant import Mutant, on

DEFAULT = on("gpt2-4-layers llama-3-layers", "reversible(bits=2)")
DECODER = on("llama-4-layers", "reversible(bits=2)")
BOTH_STACKS = on("t5-gated", "reversible(bits=2)")
MIXTURES = on("llama-3-layers", "reversible(bits=2)")
LAYERS = "tests/passes/reversible/test_reversible_layers.py"

chain = functools.partial(Mutant, "reversible", "passes/reversible/chain.py")
fixed = functools.partial(Mutant, "reversible", "passes/reversible/fixed_point.py")
call = functools.partial(Mutant, "reversible", "passes/reversible/repeated_call.py")
layer = functools.partial(Mutant, "reversible", "passes/reversible/reversible_layer.py")
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
        "    for loss in tensors[len(tensors) - made[0].losses :]:\n",
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
        "with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(forget, forgotten):",
        "with torch.no_grad():",
        trials=on("t5-without-dropout", "reversible(bits=2)"),
        test=f"{LAYERS}::test_gradients_are_those_with_everything_kept_bit_for_bit",
    ),
    call(
        "tensors that several layers are given get no gradient from them",
        "trained = [one for one in inside if isinstance(one, Tensor) and one.requires_grad]",
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
        "if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_exporting():",
        "if not torch.is_grad_enabled() or torch.compiler.is_exporting():",
        trials=DEFAULT,
    ),
    layer(
        "trained, a layer is as it was",
        "if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_exporting():",
        "if True:",
        trials=DEFAULT,
    ),
    whole(
        "the option bits has no effect",
        "ReversibleLayer(layer, self.bits, ",
        "ReversibleLayer(layer, 4, ",
        trials=DEFAULT,
    ),
]
