"""Faults of altup: prediction, correction, the blocks, the exact starts, the fused contraction."""

from __future__ import annotations

import functools

from mutant import Mutant, on

MODELS, TWO_MODELS = "gpt2 llama t5 bert", "gpt2 llama"
HOP = on(MODELS, "altup(k=2)")
LOCKSTEP = on(TWO_MODELS, "altup(k=2, init=lockstep)")
RECYCLED = on(TWO_MODELS, "altup(k=2, embedding=recycled)")
RECYCLED_LOCKSTEP = on(TWO_MODELS, "altup(k=2, embedding=recycled, init=lockstep)")
DENSE = on(TWO_MODELS, "altup(k=2, coefficients=dense)")
DENSE_LOCKSTEP = on(TWO_MODELS, "altup(k=2, coefficients=dense, init=lockstep)")
DYNAMIC = on(TWO_MODELS, "altup(k=2, coefficients=dynamic)")
EXTRA = on("gpt2 llama", "altup(k=3, extra=8)")

layers = functools.partial(Mutant, "altup", "passes/altup/layers.py")
fused = functools.partial(Mutant, "altup", "passes/altup/layers.py")
blocks = functools.partial(Mutant, "altup", "passes/altup/layers.py")
whole = functools.partial(Mutant, "altup", "passes/altup/altup.py")
growth = functools.partial(Mutant, "altup", "passes/altup/plan.py")

MUTANTS = [
    layers(
        "in a hop the active block's row of P is not that of the next block",
        "        p[j] = p[n]\n",
        "",
        trials=HOP,
    ),
    layers(
        "in a hop g corrects the block that is left, not the next one",
        "g = torch.eye(k)[n]",
        "g = torch.eye(k)[j]",
        trials=HOP,
    ),
    layers(
        "every layer computes on block 0",
        "x if self.expand else self.block(x, self.active)",
        "x if self.expand else self.block(x, 0)",
        trials=HOP,
    ),
    layers(
        "the correction adds g x̂^j where it should take it away",
        "p.narrow(-2, self.active, 1), value=-1)",
        "p.narrow(-2, self.active, 1), value=1)",
        trials=HOP,
    ),
    layers(
        "the correction takes away the prediction of block 0, not of the active block",
        "p.narrow(-2, self.active, 1), value=-1)",
        "p.narrow(-2, 0, 1), value=-1)",
        trials=HOP,
    ),
    layers(
        "the correction takes away the active block itself, not its prediction",
        "a = torch.addcmul(p, g, p.narrow(-2, self.active, 1), value=-1)",
        "a = torch.addcmul(p, g, torch.eye(self.k, dtype=p.dtype).narrow(-2, self.active, 1), value=-1)",
        trials=LOCKSTEP,
    ),
    layers(
        "the prediction is taken away whole, whatever g is",
        "        a = torch.addcmul(p, g, p.narrow",
        "        a = torch.addcmul(p, torch.ones_like(g), p.narrow",
        trials=LOCKSTEP,
    ),
    layers(
        "P is transposed: blocks predict each other the wrong way round",
        "        return self.p, self.g\n",
        "        return self.p.mT, self.g\n",
        trials=LOCKSTEP,
    ),
    layers(
        "P gets no gradient",
        "        return self.p, self.g\n",
        "        return self.p.detach(), self.g\n",
        trials=LOCKSTEP,
    ),
    layers(
        "g is applied to the blocks in inverse order",
        "        return self.p, self.g\n",
        "        return self.p, self.g.flip(0)\n",
        trials=LOCKSTEP,
    ),
    layers(
        "a stream that enters d wide is read by the first column of P alone",
        "a = a.sum(-1, keepdim=True)",
        "a = a.narrow(-1, 0, 1)",
        trials=RECYCLED_LOCKSTEP,
    ),
    layers(
        "where the blocks are combined, x̃ is weighed by the first block's g alone",
        "g = weighted_sum(g.unbind(-2), self.combine).unsqueeze(-2)",
        "g = g.narrow(-2, 0, 1)",
        trials=RECYCLED_LOCKSTEP,
    ),
    layers(
        "dense: the correction compares x̃ with the active block, not with its prediction",
        "y.to(x.dtype) - self.block(predicted, self.active), self.g)",
        "y.to(x.dtype) - block, self.g)",
        trials=DENSE_LOCKSTEP,
    ),
    layers(
        "dense: the matrix P is transposed",
        "predicted = F.linear(wide, self.p)",
        "predicted = F.linear(wide, self.p.t())",
        trials=DENSE_LOCKSTEP,
    ),
    layers(
        "dense: x̃ is added to the prediction without taking the prediction of its block away",
        "F.linear(y.to(x.dtype) - self.block(predicted, self.active), self.g)",
        "F.linear(y.to(x.dtype), self.g)",
        trials=DENSE,
    ),
    layers(
        "dynamic: P is made from the layer's output, not from the active block",
        "F.linear(self.route(block), self.prediction_coefs.weight)",
        "F.linear(self.route(y), self.prediction_coefs.weight)",
        trials=DYNAMIC,
    ),
    layers(
        "dynamic: g is made from the active block, not from the layer's output",
        "F.linear(self.route(y), self.correction_coefs.weight)",
        "F.linear(self.route(block), self.correction_coefs.weight)",
        trials=DYNAMIC,
    ),
    layers(
        "dynamic: the router has no tanh",
        "torch.tanh(self.modality_router(self.router_norm(v.to(weight.dtype)) / self.width).float())",
        "self.modality_router(self.router_norm(v.to(weight.dtype)) / self.width).float()",
        trials=DYNAMIC,
    ),
    layers(
        "dynamic: the router's input is not divided by d",
        "self.router_norm(v.to(weight.dtype)) / self.width)",
        "self.router_norm(v.to(weight.dtype)))",
        trials=DYNAMIC,
    ),
    layers(
        "dynamic: the router reads v without its norm",
        "self.modality_router(self.router_norm(v.to(weight.dtype)) / self.width)",
        "self.modality_router(v.to(weight.dtype) / self.width)",
        trials=DYNAMIC,
    ),
    layers(
        "dynamic: a token's P is transposed",
        ".unflatten(-1, (self.k, self.k))",
        ".unflatten(-1, (self.k, self.k)).mT",
        trials=DYNAMIC,
    ),
    layers(
        "dynamic: what the router adds to P is taken away from it",
        "p = self.base_p + F.linear",
        "p = self.base_p - F.linear",
        trials=DYNAMIC,
    ),
    layers(
        "dynamic: the coefficients of the first token are used for all of them",
        "p = self.base_p + F.linear(self.route(block)",
        "p = self.base_p + F.linear(self.route(block[..., :1, :].expand_as(block))",
        trials=DYNAMIC,
    ),
    fused(
        "fused contraction: the gradient of x goes through A, not through its transpose",
        "grad_x = mix(grad, a.mT)",
        "grad_x = mix(grad, a)",
        trials=HOP,
    ),
    fused(
        "fused contraction: the gradient of x̃ is not weighed by g",
        "grad_y = mix(grad, g.mT)",
        "grad_y = mix(grad, torch.ones_like(g.mT))",
        trials=LOCKSTEP,
    ),
    fused(
        "fused contraction: the gradient of A is transposed",
        "grad_a = (rows @ x.mT).sum_to_size(a.shape)",
        "grad_a = (rows @ x.mT).mT.sum_to_size(a.shape)",
        trials=LOCKSTEP,
    ),
    fused(
        "fused contraction: the gradient of g is that of the blocks in inverse order",
        "grad_g = (rows @ y)",
        "grad_g = (rows @ y).flip(-2)",
        trials=LOCKSTEP,
    ),
    fused(
        "fused contraction: the gradient of A is halved",
        "grad_a = (rows @ x.mT)",
        "grad_a = (0.5 * rows @ x.mT)",
        trials=LOCKSTEP,
    ),
    fused(
        "fused contraction: with gradients, x̃ is left out",
        "        return mix_and_add(x, y, a, g)\n\n    @staticmethod",
        "        return mix_and_add(x, torch.zeros_like(y), a, g)\n\n    @staticmethod",
        trials=HOP,
    ),
    fused(
        "every block is weighed by the first block's coefficient",
        "mixed = add(mixed, blocks[c], columns[c])",
        "mixed = add(mixed, blocks[c], columns[0])",
        trials=LOCKSTEP,
    ),
    fused(
        "blocks are combined with the weights in inverse order",
        "for term, weight in zip(terms, weights, strict=True) if weight",
        "for term, weight in zip(terms, weights[::-1], strict=True) if weight",
        trials=RECYCLED,
    ),
    blocks(
        "the blocks come out of a lifted norm in inverse order",
        "torch.cat([item_at(output, 0) for output in outputs], -1)",
        "torch.cat([item_at(output, 0) for output in reversed(outputs)], -1)",
        trials=HOP,
    ),
    blocks(
        "positions are added to the first block only",
        "torch.cat([y] * self.k, -1)",
        "torch.cat([y, *[torch.zeros_like(y)] * (self.k - 1)], -1)",
        trials=HOP,
    ),
    blocks(
        "a tied head weighs the blocks in inverse order",
        "zip(blocks, self.scale, strict=True)",
        "zip(blocks, list(self.scale)[::-1], strict=True)",
        trials=HOP,
    ),
    blocks(
        "the extra sub-blocks are projected up by each other's matrices",
        "parts, self.weight.to(extra.dtype)",
        "parts, self.weight.flip(0).to(extra.dtype)",
        trials=EXTRA,
    ),
    blocks(
        "the head narrows the extra blocks by each other's matrices",
        "blocks.unflatten(-1, (len(self.weight), -1)), self.weight.to(blocks.dtype)",
        "blocks.unflatten(-1, (len(self.weight), -1)), self.weight.flip(0).to(blocks.dtype)",
        trials=EXTRA,
    ),
    whole(
        "alternating selection keeps to the first block, as SameUp does",
        "return depth % self.k if",
        "return 0 if",
        trials=HOP,
    ),
    whole(
        "alternating selection goes through the blocks backwards",
        "return depth % self.k if",
        "return -depth % self.k if",
        trials=on("gpt2 llama", "altup(k=3)"),
    ),
    whole(
        "the hop goes to the block that the layer works on already",
        "wrapper.start(self.init, layer.next_active)",
        "wrapper.start(self.init, layer.active)",
        trials=HOP,
    ),
    whole(
        "the blocks are combined to the last one, where the dense stream is in the first",
        "(1.0,) + (0.0,) * (self.k - 1)",
        "(0.0,) * (self.k - 1) + (1.0,)",
        trials=RECYCLED,
    ),
    whole(
        "lockstep: a head of its own sums the blocks, where it should take their mean (no 1/K)",
        "self.new_columns, 1 / self.k)",
        "self.new_columns)",
        trials=on("llama", "altup(k=2, init=lockstep)"),
    ),
    whole(
        "lockstep: the blocks are summed at the end, where it should be their mean (no 1/K)",
        'return (1 / self.k,) * self.k if self.init == "lockstep"',
        'return (1.0,) * self.k if self.init == "lockstep"',
        trials=on("gpt2 bert", "altup(k=2, init=lockstep)"),
    ),
    whole(
        "a tied head's block weights do not train",
        'learnable=self.init == "hop"',
        "learnable=False",
        trials=HOP,
    ),
    whole(
        "the coefficients of every layer are frozen",
        "        if not layer.trained:",
        "        if layer.trained:",
        trials=HOP,
    ),
    growth(
        "new columns of a token table begin as copies, where a hop needs an embedding of their own",
        'elif growth.start == "noise":',
        'elif growth.start == "never":',
        trials=HOP,
        test="tests/passes/altup/test_altup.py::test_the_extra_blocks_hold_something_of_their_own_after_a_hop",
    ),
]
