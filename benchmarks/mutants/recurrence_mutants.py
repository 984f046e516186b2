"""Faults of recurrence: the scan forwards and backwards, the gates, padding, directions, the state in the cache, the options."""

from __future__ import annotations

import functools

from mutant import Mutant, on

MODELS, DECODERS, ENCODERS = "gpt2 llama t5 bert", "gpt2 llama", "bert t5"
DEFAULT = on(MODELS, "recurrence(rank=4)")
DECODING = on(DECODERS, "recurrence(rank=4)")
BOTH = on(ENCODERS, "recurrence(rank=4, bidirectional=true)")
EXPORTED = on("gpt2", "recurrence(rank=4)", "onnx")

unit = functools.partial(Mutant, "recurrence", "passes/recurrence/simple_recurrent_unit.py")
whole = functools.partial(Mutant, "recurrence", "passes/recurrence/recurrence.py")

MUTANTS = [
    unit(
        "the rounds end one too early: a token reads only those near it",
        "while reach < c.shape[1]:",
        "while 2 * reach < c.shape[1]:",
        trials=DEFAULT,
    ),
    unit(
        "the factors of a round are those of the round before",
        "f = torch.cat([f[:, :reach], f[:, reach:] * f[:, :-reach]], 1)",
        "f = torch.cat([f[:, :reach], f[:, reach:]], 1)",
        trials=DEFAULT,
    ),
    unit(
        "the gradient is carried back by the gate of the token itself, not of the next",
        "following = torch.cat([f[:, 1:], torch.zeros_like(f[:, :1])], 1)",
        "following = f",
        trials=DEFAULT,
    ),
    unit(
        "the gradient of a gate is that of the state it leads to, not of the one it keeps",
        "return g * earlier, g, g[:, 0] * f[:, 0]",
        "return g * c, g, g[:, 0] * f[:, 0]",
        trials=DEFAULT,
    ),
    unit(
        "the gradient stops at the token itself",
        "g = doubled(following.flip(1), gradient.flip(1)).flip(1)",
        "g = gradient",
        trials=DEFAULT,
    ),
    unit(
        "many tokens begin without the state before them",
        "torch.cat([x[:, :1] + f[:, :1] * before.unsqueeze(1), x[:, 1:]], 1)",
        "x",
        trials=DECODING,
    ),
    unit(
        "one token begins without the state before it",
        "first = f[:, :1] * before.unsqueeze(1) + x[:, :1]",
        "first = x[:, :1]",
        trials=DECODING,
    ),
    unit(
        "the second of two tokens forgets the first",
        "return torch.cat([first, f[:, 1:] * first + x[:, 1:]], 1)",
        "return torch.cat([first, x[:, 1:]], 1)",
        trials=DECODING,
    ),
    unit(
        "an exported program leaves a token out of its own state",
        "later = (position.unsqueeze(1) > position).unsqueeze(-1)",
        "later = (position.unsqueeze(1) >= position).unsqueeze(-1)",
        trials=EXPORTED,
    ),
    unit(
        "an exported program forgets what came before a chunk",
        "c = inner + total.exp() * states[:, :-1].unsqueeze(2)",
        "c = inner",
        trials=EXPORTED,
    ),
    unit(
        "what is new is not weighed by the gate",
        "added = (1 - keep) * u",
        "added = u",
        trials=DEFAULT,
    ),
    unit(
        "the input passes the second gate where the state should",
        "return use * c + math.sqrt(3) * (1 - use) * x, c",
        "return (1 - use) * c + math.sqrt(3) * use * x, c",
        trials=DEFAULT,
    ),
    unit(
        "the input is not scaled by √3",
        "math.sqrt(3) * (1 - use) * x",
        "(1 - use) * x",
        trials=DEFAULT,
    ),
    unit(
        "the gates have no biases",
        "keep, use = (gates + self.b.to(x.dtype)).sigmoid().chunk(2, -1)",
        "keep, use = gates.sigmoid().chunk(2, -1)",
        trials=DEFAULT,
    ),
    unit(
        "padding closes the gate and is forgotten with all before it",
        "keep, added = torch.where(kept, keep, 1.0), torch.where(kept, added, 0.0)",
        "added = torch.where(kept, added, 0.0)",
        trials=DEFAULT,
        test="tests/passes/recurrence/test_recurrence.py::test_padding_between_tokens_leaves_the_state_as_it_was",
    ),
    unit(
        "padding is read like any token",
        "        if real is not None:\n",
        "        if False:\n",
        trials=DEFAULT,
    ),
    unit(
        "backwards padding is looked for at the wrong end",
        "None if real is None else real.flip(1)",
        "real",
        trials=BOTH,
    ),
    unit(
        "what was read backwards is not put back into order",
        "h = torch.cat([h, back.flip(1)], -1)",
        "h = torch.cat([h, back], -1)",
        trials=BOTH,
    ),
    unit(
        "both directions read forwards",
        "self.backwards(low.flip(1), None,",
        "self.backwards(low, None,",
        trials=BOTH,
    ),
    unit(
        "W_out begins with noise",
        "self.w_out.zero_()",
        "self.w_out.normal_(std=0.02)",
        trials=DEFAULT,
    ),
    unit(
        "the second gate is that of the state",
        "return use * c + math.sqrt(3) * (1 - use) * x, c",
        "return use * c + math.sqrt(3) * (1 - keep) * x, c",
        trials=DEFAULT,
    ),
    unit(
        "the gates begin open: their biases are ones",
        "self.b.zero_()",
        "self.b.fill_(1.0)",
        trials=DEFAULT,
    ),
    unit(
        "the biases are not counted",
        "rank * width + 3 * rank * rank + 2 * rank)",
        "rank * width + 3 * rank * rank)",
        trials=DEFAULT,
    ),
    unit(
        "nothing says that W_in gets its gradient later",
        "return [parameter for parameter in self.parameters() if parameter is not self.w_out]",
        "return []",
        trials=DEFAULT,
    ),
    unit(
        "W_in begins with the spread of a matrix of r rows",
        "self.w_in.normal_(std=len(self.w_in) ** -0.5)",
        "self.w_in.normal_(std=self.w_in.shape[1] ** -0.5)",
        trials=DEFAULT,
    ),
    whole(
        "the recurrence reads what the feed-forward made",
        "added = self.added(x, call",
        "added = self.added(y, call",
        trials=on("gpt2 llama", "recurrence(rank=4)"),
    ),
    whole(
        "the recurrence gets no gradient",
        "y + added.to(y.dtype)",
        "y + added.detach().to(y.dtype)",
        trials=DEFAULT,
    ),
    whole(
        "no state is kept in the cache",
        '"cache": cache,',
        '"cache": None,',
        trials=DECODING,
    ),
    whole(
        "the state of the first token is kept, not of the last",
        "histories[name].push(c)",
        "histories[name].push(c[:, :1])",
        trials=DECODING,
    ),
    whole(
        "all layers have one state",
        'f"{layer}.{self.name_in_layer}".strip(".")',
        "self.name_in_layer",
        trials=DECODING,
        test="tests/passes/recurrence/test_recurrence.py::test_a_state_in_the_cache_goes_on_in_steps_and_in_chunks",
    ),
    whole(
        "a checkpointed layer reads what its first run left in the cache",
        "checkpointed = bool(self.training and ",
        "checkpointed = bool(False and ",
        trials=DECODING,
        equivalent="transformers turns the cache off itself where it checkpoints layers",
    ),
    whole(
        "the option rank has no effect",
        "RecurrentUnit(site.width, self.rank, site.bidirectional, float_like",
        "RecurrentUnit(site.width, 8, site.bidirectional, float_like",
        trials=DEFAULT,
    ),
    whole(
        "the option bidirectional has no effect",
        "both = bidirectional and not causal",
        "both = False",
        trials=on("bert", "recurrence(rank=4, bidirectional=true)"),
    ),
    whole(
        "decoders are read in both directions too",
        "both = bidirectional and not causal",
        "both = bidirectional",
        trials=on("t5", "recurrence(rank=4, bidirectional=true)"),
    ),
]
