"""Faults of sparse-ffn: the choice of units, the training noise, the two ways to compute, the start."""

from __future__ import annotations

import functools

from mutant import Mutant, on

MODELS, TWO_MODELS = "gpt2 llama t5 bert", "gpt2 llama"
ONE = on(MODELS, "sparse-ffn(sparsity=8)")
TWO = on(TWO_MODELS, "sparse-ffn(sparsity=8, active=2)")
GATE = on("llama t5-gated", "sparse-ffn(sparsity=8, active=2, controller=gate)")
GATED = on("llama t5-gated", "sparse-ffn(sparsity=8)")
MULTIPLIED = on(TWO_MODELS, "sparse-ffn(sparsity=8, multiply_by_controller=true)")
SCALED = on(TWO_MODELS, "sparse-ffn(sparsity=8, scale=true)")
CALIBRATED = on("gpt2 llama", "sparse-ffn(sparsity=8)", "calibrated")

layer = functools.partial(Mutant, "sparse-ffn", "passes/sparse_ffn/sparse_feed_forward.py")
choice = functools.partial(Mutant, "sparse-ffn", "passes/sparse_ffn/unit_choice.py")
gate = functools.partial(Mutant, "sparse-ffn", "passes/sparse_ffn/unit_choice.py")
rows = functools.partial(Mutant, "sparse-ffn", "passes/indexed_rows.py")
whole = functools.partial(Mutant, "sparse-ffn", "passes/sparse_ffn/sparse_ffn.py")
fitted = functools.partial(
    Mutant,
    "sparse-ffn",
    "passes/sparse_ffn/output_fit.py",
    trials=CALIBRATED,
    test="tests/passes/sparse_ffn/test_output_fit.py::"
    "test_each_solution_is_that_of_least_squares_with_rows_that_pull_to_the_dense_matrix",
)
start = functools.partial(Mutant, "sparse-ffn", "passes/sparse_ffn/controller_fit.py")
contributions = functools.partial(Mutant, "sparse-ffn", "passes/sparse_ffn/controller_fit.py")

MUTANTS = [
    layer(
        "gate and up are swapped where all rows are used",
        "port.step] for port in self.ports]\n\n    def port_value(",
        "port.step] for port in reversed(self.ports)]\n\n    def port_value(",
        trials=GATED,
    ),
    layer(
        "gate and up are swapped where the rows of the active units are gathered",
        "            for index, port in enumerate(self.ports)\n        ]\n",
        "            for index, port in enumerate(self.ports)\n        ][::-1]\n",
        trials=GATED,
    ),
    layer(
        "h is not multiplied by the controller where all rows are used",
        "return self.down(h * mask.flatten(-2).to(h.dtype))",
        "return self.down(h)",
        trials=on(TWO_MODELS, "sparse-ffn(sparsity=4, active=2)"),
    ),
    layer(
        "the active units are those of the block before, where rows are gathered",
        "first = torch.arange(0, self.units, self.sparsity, device=x.device)\n",
        "first = torch.arange(0, self.units, self.sparsity, device=x.device).roll(1)\n",
        trials=ONE,
    ),
    layer(
        "the controller's logits are laid out unit by unit over the blocks, not block by block",
        "self.bias.float()).unflatten(-1, (-1, self.sparsity))",
        "self.bias.float()).unflatten(-1, (self.sparsity, -1)).transpose(-1, -2)",
        trials=ONE,
    ),
    layer(
        "the controller's bias is left out",
        "F.linear(low, self.c2.float().t(), self.bias.float())",
        "F.linear(low, self.c2.float().t())",
        trials=ONE,
    ),
    layer(
        "C1 gets no gradient",
        "low = x.to(self.c1.dtype) @ self.c1\n",
        "low = x.to(self.c1.dtype) @ self.c1.detach()\n",
        trials=ONE,
    ),
    layer(
        "the controller reads a relu of C1's result",
        "low = x.float() @ self.c1.float()",
        "low = (x.float() @ self.c1.float()).relu()",
        trials=ONE,
    ),
    layer(
        "the choice is drawn at random in evaluation too",
        "        if self.training:\n            return self.compute_drawn",
        "        if True:\n            return self.compute_drawn",
        trials=ONE,
    ),
    layer(
        "training chooses as evaluation does: without noise and without a gradient for the controller",
        "        if self.training:\n            return self.compute_drawn",
        "        if False:\n            return self.apply_mask",
        trials=ONE,
    ),
    layer(
        "multiply_by_controller: the weights are probabilities among the active units only",
        "return [unit, logits.softmax(-1).gather(-1, unit)] if",
        "return [unit, logits.gather(-1, unit).softmax(-1)] if",
        trials=on(TWO_MODELS, "sparse-ffn(sparsity=8, active=2, multiply_by_controller=true)"),
    ),
    layer(
        "multiply_by_controller: training leaves the probability out",
        "return mask * logits.softmax(-1) if self.multiply else mask",
        "return mask",
        trials=MULTIPLIED,
    ),
    layer(
        "scale: h is multiplied by N / k, not by its root",
        "self.factor = math.sqrt(self.sparsity / count) if self.scales else 1.0",
        "self.factor = self.sparsity / count if self.scales else 1.0",
        trials=SCALED,
    ),
    layer(
        "scale: h is multiplied by √N, whatever k is",
        "self.factor = math.sqrt(self.sparsity / count) if self.scales else 1.0",
        "self.factor = math.sqrt(self.sparsity) if self.scales else 1.0",
        trials=on(TWO_MODELS, "sparse-ffn(sparsity=8, active=2, scale=true)"),
    ),
    rows(
        "the rows of the active units are gathered without the matrix's bias",
        "return z if bias is None else z + bias[indices].to(z.dtype)",
        "return z",
        trials=on("gpt2 bert", "sparse-ffn(sparsity=8)"),
    ),
    rows(
        "the rows of the active units are gathered with the biases of the first units",
        "z + bias[indices].to(z.dtype)",
        "z + bias[: indices.shape[-1]].to(z.dtype)",
        trials=on("gpt2 bert", "sparse-ffn(sparsity=8)"),
    ),
    layer(
        "the output's bias is left out where rows are gathered",
        "return indexed_sums(h, active, self.down.weight, self.down.bias).view(x.shape)",
        "return indexed_sums(h, active, self.down.weight).view(x.shape)",
        trials=on("gpt2 bert", "sparse-ffn(sparsity=8)"),
    ),
    layer(
        "the gate as controller: units are chosen by its value, not by its magnitude",
        "magnitude = self.activation(gate).float().abs() * self.lengths.float()",
        "magnitude = self.activation(gate).float() * self.lengths.float()",
        trials=GATE,
    ),
    layer(
        "the gate as controller: the lengths of the rows of W_up and W_out are left out",
        "self.activation(gate).float().abs() * self.lengths.float()",
        "self.activation(gate).float().abs()",
        trials=GATE,
    ),
    layer(
        "the gate as controller: units are chosen before the activation",
        "magnitude = self.activation(gate).float()",
        "magnitude = gate.float()",
        trials=GATE,
    ),
    layer(
        "the gate as controller: only the rows of W_out count",
        "rows.float().norm(dim=1) * down.float().norm(dim=1)",
        "down.float().norm(dim=1)",
        trials=GATE,
    ),
    layer(
        "the gate as controller: units are chosen by up, not by the gate",
        "gate = [self.port_value(self.ports[self.gate_port], x)]",
        "gate = [self.port_value(self.ports[1 - self.gate_port], x)]",
        trials=GATE,
    ),
    choice(
        "the worst units of each block are chosen",
        "return logits.max(-1, keepdim=True).indices if k == 1 else logits.topk(k).indices",
        "return logits.min(-1, keepdim=True).indices if k == 1 else logits.topk(k, largest=False).indices",
        trials=ONE,
    ),
    choice(
        "of k active units only the first and the last candidates are considered",
        "logits.topk(k).indices",
        "logits[..., : logits.shape[-1] - 1].topk(k).indices",
        trials=TWO,
    ),
    choice(
        "the second active unit of a block is left out where all rows are used",
        "return torch.zeros(*units.shape[:-1], n, dtype=values.dtype, device=units.device).scatter(-1, units, values)",
        "return torch.zeros(*units.shape[:-1], n, dtype=values.dtype, device=units.device)"
        ".scatter(-1, units[..., :1], values[..., :1])",
        trials=on(TWO_MODELS, "sparse-ffn(sparsity=8, active=4)"),
    ),
    choice(
        "the temperature divides the noise, which it should multiply",
        "choice, relaxed = logits.detach() + temperature * gumbel_noise(logits), logits",
        "choice, relaxed = logits.detach() + gumbel_noise(logits) / temperature, logits",
        trials=ONE,
    ),
    choice(
        "the straight-through gradient is that of the noisy logits",
        "return straight_through(choice, relaxed, k)",
        "return straight_through(choice, relaxed + gumbel_noise(logits), k)",
        trials=ONE,
    ),
    choice(
        "the hard choice passes no gradient on to the controller",
        "return hard + (soft - soft.detach())",
        "return hard",
        trials=ONE,
    ),
    choice(
        "the noise has the wrong sign: log E in place of −log E is no Gumbel noise",
        "return uniform.log_().neg_().log_().neg_()",
        "return uniform.log_().neg_().log_()",
        trials=ONE,
    ),
    choice(
        "training has no noise",
        "choice, relaxed = logits.detach() + temperature * gumbel_noise(logits), logits",
        "choice, relaxed = logits.detach(), logits",
        trials=ONE,
    ),
    choice(
        "the noise is that of an exponential distribution, whose logarithm was forgotten",
        "uniform.log_().neg_().log_().neg_()",
        "uniform.log_().neg_().neg_()",
        trials=ONE,
    ),
    choice(
        "the relaxation is used for three batches in ten, and the hard choice for the others",
        "logits.device) < hard",
        "logits.device) >= hard",
        trials=ONE,
    ),
    choice(
        "the relaxation has noise too",
        "choice, relaxed = logits.detach() + temperature * gumbel_noise(logits), logits",
        "choice = relaxed = logits + temperature * gumbel_noise(logits)",
        trials=ONE,
    ),
    choice(
        "active=k: the relaxation sums to one, not to k",
        "return torch.addcmul(full, rest, torch.add(logits, full, alpha=-FAR).softmax(dim))",
        "return logits.softmax(dim)",
        trials=TWO,
    ),
    choice(
        "active=k: the relaxation goes above one",
        "return torch.addcmul(full, rest, torch.add(logits, full, alpha=-FAR).softmax(dim))",
        "return k * logits.softmax(dim)",
        trials=TWO,
    ),
    choice(
        "active=k: of the units with their full 1 the last is forgotten",
        "enumerate(reversed(rests[1:]))",
        "enumerate([*reversed(rests[1:])][:-1])",
        trials=TWO,
    ),
    gate(
        "the gate as controller: of the two ports the other one is taken for the gate",
        "    (port,) = read[gate]\n    activation = extract(factors[gate], ports[port], site.hidden)\n",
        "    (port,) = read[1 - gate]\n    activation = extract(factors[1 - gate], ports[port], site.hidden)\n",
        trials=GATE,
    ),
    rows(
        "the rows that are summed are not weighed by h",
        "per_sample_weights=h.to(rows.dtype)",
        "per_sample_weights=torch.ones_like(h).to(rows.dtype)",
        trials=ONE,
    ),
    rows(
        "gathered products are those of the first token",
        "token = torch.arange(tokens).repeat_interleave(blocks)",
        "token = torch.zeros(tokens, dtype=torch.long).repeat_interleave(blocks)",
        trials=ONE,
    ),
    whole(
        "the fit of the controller is never made",
        "                getattr(block, name).copy_(values)\n",
        "                pass\n",
        trials=ONE,
    ),
    whole(
        "the rows of W_out keep the dense order when the units are permuted",
        'rows = Rearranged(transposed=site.out.out_first, order="order", dim=1 if site.out.out_first else 0, fitted=fitted)',
        "rows = Rearranged(transposed=site.out.out_first, dim=1 if site.out.out_first else 0, fitted=fitted)",
        trials=CALIBRATED,
    ),
    whole(
        "the option temperature has no effect",
        "            temperature=self.temperature,\n",
        "            temperature=1.0,\n",
        trials=ONE,
    ),
    whole(
        "the option hard has no effect",
        "            hard=self.hard,\n",
        "            hard=1.0,\n",
        trials=ONE,
    ),
    contributions(
        "the start leaves the lengths of the rows of W_out out of the contributions",
        "return self.hidden(*z).abs() * self.lengths",
        "return self.hidden(*z).abs()",
        trials=ONE,
    ),
    contributions(
        "the start predicts the units' values, not how much they contribute",
        "return self.hidden(*z).abs() * self.lengths",
        "return self.hidden(*z) * self.lengths",
        trials=ONE,
    ),
    start(
        "the controller is fitted to its own opposite",
        "return Controller(c1.float(), c2.float(), bias.float()).spread_out",
        "return Controller(c1.float(), -c2.float(), -bias.float()).spread_out",
        trials=ONE,
    ),
    start(
        "the controller's bias forgets the mean of x",
        "bias = c - moments.x.double() @ c1 @ c2",
        "bias = c",
        trials=CALIBRATED,
        test="tests/passes/sparse_ffn/test_controller_fit.py::test_a_regression_goes_through_the_means",
    ),
    fitted(
        "the output matrix is fitted without λ",
        "system.diagonal().add_(strength * size)",
        "system.diagonal().add_(1e-6 * size)",
    ),
    fitted(
        "the output matrix is fitted with all units active",
        "yield a.float(), dense(",
        "yield h.float(), dense(",
    ),
    fitted(
        "the output matrix is fitted to what other tokens miss",
        "products.addmm_(weighted, y)",
        "products.addmm_(weighted, y.roll(1, 0))",
    ),
    fitted(
        "the output matrix is fitted, and its bias not",
        "None if dense.bias is None else dense.bias + change[units]",
        "dense.bias",
        trials=on("gpt2", "sparse-ffn(sparsity=8)", "calibrated"),
    ),
    fitted(
        "the fitted output matrix is measured and never kept",
        "best, least = candidate, errors",
        "least = errors",
        test="tests/passes/sparse_ffn/test_output_fit.py::test_with_enough_tokens_it_is_better",
    ),
    whole(
        "the output matrix is fitted on noise",
        "fit_output(block, x[~held_out], x[held_out])",
        "fit_output(block, torch.randn_like(x[~held_out]), x[held_out])",
        trials=CALIBRATED,
    ),
]
