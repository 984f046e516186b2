"""Faults of merge-cross-attention: the softmax over two sets of keys, what each attention borrows of the other, the cache."""

from __future__ import annotations

import functools

from mutant import Mutant, on

BOTH = on("t5 t5-gated", "merge-cross-attention")
ONE = on("t5 t5-gated", "merge-cross-attention(attentions=1)")
AT_FIRST = on("t5", "merge-cross-attention(positions=first)")
WEIGHED = on("t5", "merge-cross-attention(weight=0.1)")
OPERATOR = "tests/passes/merge_cross_attention/test_joint_attention.py::"

joint = functools.partial(Mutant, "merge-cross-attention", "passes/merge_cross_attention/joint_attention.py")
others = functools.partial(Mutant, "merge-cross-attention", "passes/merge_cross_attention/joint_attention.py")
layer = functools.partial(Mutant, "merge-cross-attention", "passes/merge_cross_attention/merged_layer.py")
borrowed = functools.partial(Mutant, "merge-cross-attention", "passes/merge_cross_attention/attention_calls.py")
cache = functools.partial(Mutant, "merge-cross-attention", "passes/merge_cross_attention/merged_layer.py")
whole = functools.partial(Mutant, "merge-cross-attention", "passes/merge_cross_attention/merge_cross_attention.py")

MUTANTS = [
    joint(
        "two softmaxes, one for each set of keys",
        "p = torch.cat([s, t], -1).softmax(-1)",
        "p = torch.cat([s.softmax(-1), t.softmax(-1)], -1) / 2",
        trials=BOTH,
    ),
    joint(
        "the other keys' values are weighed by the first probabilities",
        "own.weighed(first) + others.weighed(second)",
        "own.weighed(first) + others.weighed(second.flip(-1))",
        trials=BOTH,
    ),
    joint(
        "the other keys are not seen",
        "s, t = own.scores(), others.scores()",
        "s, t = own.scores(), others.scores() - 1e9",
        trials=BOTH,
    ),
    joint(
        "boolean masks show what they hide",
        "s.masked_fill(~self.mask, torch.finfo(s.dtype).min)",
        "s.masked_fill(self.mask, torch.finfo(s.dtype).min)",
        trials=on("bart", "merge-cross-attention"),
    ),
    joint(
        "the scale of the model's scores is left out",
        "query.shape[-1] ** -0.5 if scale is None else scale)",
        "query.shape[-1] ** -0.5)",
        trials=BOTH,
    ),
    joint(
        "causal calls see later tokens",
        'if given.get("is_causal"):',
        "if False:",
        trials=on("bart", "merge-cross-attention"),
    ),
    joint(
        "the weight of the other keys is applied to the attention's own",
        "            t = t + self.added()",
        "            s = s + self.added()",
        trials=WEIGHED,
    ),
    others(
        "the weight begins as the logarithm's argument",
        "math.log(weight)",
        "weight",
        trials=WEIGHED,
    ),
    joint(
        "at the first token's position the encoder's keys get no bias",
        "bias = torch.where(bias > HIDDEN, bias, 0.0)",
        "bias = torch.zeros_like(bias)",
        trials=AT_FIRST,
    ),
    joint(
        "of many queries the other keys have no weight",
        "parts[1] = (parts[1] + self.added()).to(q.dtype)",
        "parts[1] = parts[1].to(q.dtype)",
        trials=WEIGHED,
        test=f"{OPERATOR}test_it_is_one_softmax_over_the_keys_of_both_sets",
    ),
    joint(
        "many queries see what the masks hide",
        "if own.mask is None and others.mask is None and not self.weighs:",
        "if not self.weighs:",
        trials=BOTH,
        test=f"{OPERATOR}test_it_is_one_softmax_over_the_keys_of_both_sets",
    ),
    layer(
        "the encoder's states are not seen by the first attention",
        "return answered(layer, self.attention, other, args, kwargs)\n\n    def cross_code",
        "return answered(layer, self.attention, None, args, kwargs)\n\n    def cross_code",
        trials=BOTH,
    ),
    layer(
        "the second attention reads the stream that the first one read",
        "x if value is before else value for value in arguments",
        "value for value in arguments",
        trials=BOTH,
    ),
    layer(
        "the second attention keeps its keys where the first has its own",
        "container[place] = stack.enter_context(second_layers(container[place], layers))",
        "pass",
        trials=BOTH,
    ),
    layer(
        "a cross-attention that is gone adds what it returned",
        "self.out_key, x.new_zeros(",
        "self.out_key, x.new_ones(",
        trials=ONE,
    ),
    borrowed(
        "the encoder's keys are made by the cross-attention's own weights",
        "replaced = {path: module_at(lender, other) for path, other in borrowing.modules.items()}",
        "replaced = {path: module_at(code, path) for path, other in borrowing.modules.items()}",
        trials=BOTH,
    ),
    cache(
        "the encoder's keys are computed in every step, and appended",
        "cache.is_updated[layers + index] = is_updated",
        "cache.is_updated[layers + index] = False",
        trials=BOTH,
    ),
    whole(
        "the option attentions has no effect",
        "chosen, self.attentions, self.positions)",
        "chosen, 2, self.positions)",
        trials=ONE,
    ),
]
