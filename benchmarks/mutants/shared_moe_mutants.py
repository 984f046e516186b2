"""Faults of shared-moe: routing, gates, capacity, the balance loss, which expert computes what."""

from __future__ import annotations

import functools

from mutant import Mutant, on

MODELS = "gpt2 llama t5 bert"
SHARED = on(MODELS, "shared-moe(experts=4, k=2)")
UNEVEN = on("gpt2 llama", "shared-moe(experts=4, k=2, renormalize=false)")
FOUR = on("llama-4-layers gpt2-4-layers", "shared-moe(experts=4, k=2, groups=2)")
SLICED = on("gpt2 llama", "shared-moe(groups=0, slices=4, experts=3)")
EXPORTED = on("llama", "shared-moe(experts=4, k=2)", "onnx")

mixture = functools.partial(Mutant, "shared-moe", "passes/shared_moe/mixture_of_experts.py")
slicing = functools.partial(Mutant, "shared-moe", "passes/shared_moe/slicing.py")
grouping = functools.partial(Mutant, "shared-moe", "passes/shared_moe/grouping.py")
whole = functools.partial(Mutant, "shared-moe", "passes/shared_moe/shared_moe.py")
losses = functools.partial(Mutant, "shared-moe", "retrofit/surgery/auxiliary_losses.py")

MUTANTS = [
    mixture(
        "experts are weighed by each other's gates",
        "(y.view(*gates.shape, self.width) * gates.unsqueeze(-1))",
        "(y.view(*gates.shape, self.width) * gates.flip(-1).unsqueeze(-1))",
        trials=SHARED,
    ),
    mixture(
        "the chosen experts are averaged, whatever their gates",
        "(y.view(*gates.shape, self.width) * gates.unsqueeze(-1)).sum(1)",
        "y.view(*gates.shape, self.width).mean(1)",
        trials=SHARED,
    ),
    mixture(
        "the router's gates are detached",
        "        gates, selected = probabilities.topk(self.k, dim=-1)  # (tokens, g, K)\n",
        "        gates, selected = probabilities.topk(self.k, dim=-1)\n        gates = gates.detach()\n",
        trials=SHARED,
    ),
    mixture(
        "the least likely experts are chosen",
        "probabilities.topk(self.k, dim=-1)",
        "probabilities.topk(self.k, dim=-1, largest=False)",
        trials=SHARED,
    ),
    mixture(
        "renormalize=true: the gates are left as they are",
        "        elif self.renormalize:\n",
        "        elif False:\n",
        trials=SHARED,
    ),
    mixture(
        "renormalize=false: the gates are divided by their sum",
        "        elif self.renormalize:\n",
        "        elif True:\n",
        trials=UNEVEN,
    ),
    mixture(
        "the gates are divided by the largest, not by their sum",
        "            gates = gates / gates.sum(-1, keepdim=True)\n",
        "            gates = gates / gates.amax(-1, keepdim=True)\n",
        trials=SHARED,
    ),
    mixture(
        "the gates are a sigmoid of the logits, not their softmax",
        "probabilities = logits.softmax(-1)",
        "probabilities = logits.sigmoid()",
        trials=SHARED,
    ),
    mixture(
        "the router's noise acts in evaluation too",
        "if self.training and self.noise:",
        "if self.noise:",
        trials=SHARED,
    ),
    mixture(
        "training has no noise on the router's logits",
        "if self.training and self.noise:",
        "if False:",
        trials=SHARED,
    ),
    mixture(
        "the noise is uniform, and so never negative",
        "self.noise * torch.randn_like(logits)",
        "self.noise * torch.rand_like(logits)",
        trials=SHARED,
    ),
    mixture(
        "experts have no capacity",
        "if self.capacity is not None:",
        "if False:",
        trials=SHARED,
    ),
    mixture(
        "tokens above an expert's capacity are dropped in evaluation too",
        "        if self.training:\n            dispatched",
        "        if True:\n            dispatched",
        trials=SHARED,
    ),
    mixture(
        "an expert's capacity leaves out K",
        "self.capacity * self.k * tokens / self.experts - 1e-9",
        "self.capacity * tokens / self.experts - 1e-9",
        trials=SHARED,
    ),
    mixture(
        "an expert's capacity is rounded down",
        "math.ceil(self.capacity * self.k * tokens / self.experts - 1e-9)",
        "math.floor(self.capacity * self.k * tokens / self.experts)",
        trials=SHARED,
    ),
    mixture(
        "an expert keeps the last tokens of a batch, not the first",
        "dispatched.cumsum(0).gather(-1, selected)",
        "dispatched.flip(0).cumsum(0).flip(0).gather(-1, selected)",
        trials=SHARED,
    ),
    mixture(
        "the balance loss is never recorded",
        "            if self.balance:\n",
        "            if False:\n",
        trials=SHARED,
    ),
    mixture(
        "the balance loss is not weighed by λ",
        "self.balance * balance_loss(probabilities, dispatched)",
        "balance_loss(probabilities, dispatched)",
        trials=SHARED,
    ),
    mixture(
        "the balance loss leaves out the factor E",
        "return probabilities.shape[-1] * (m * p).sum()",
        "return (m * p).sum()",
        trials=SHARED,
    ),
    mixture(
        "the balance loss has no gradient",
        ", probabilities.mean(0)\n",
        ", probabilities.detach().mean(0)\n",
        trials=SHARED,
    ),
    mixture(
        "the balance loss is Σ P², which asks nothing about the dispatches",
        "(m * p).sum()",
        "(p * p).sum()",
        trials=SHARED,
    ),
    mixture(
        "the balance loss counts first choices only",
        "balance_loss(probabilities, dispatched), self)",
        "balance_loss(probabilities, F.one_hot(selected[..., 0], self.experts)), self)",
        trials=SHARED,
    ),
    mixture(
        "an expert computes on another token than the one sent to it",
        "index_select(0, order // selected.shape[1])",
        "index_select(0, order % len(x))",
        trials=SHARED,
    ),
    mixture(
        "the experts' results are put back by the sorting order, not by its inverse",
        "self.weigh(y.index_select(0, torch.argsort(order)), gates)",
        "self.weigh(y.index_select(0, order), gates)",
        trials=SHARED,
    ),
    mixture(
        "every expert has the bias of the first",
        "bias.to(y.dtype).index_select(0, expert)",
        "bias.to(y.dtype)[:1]",
        trials=on("gpt2", "shared-moe(experts=4, k=2)"),
    ),
    mixture(
        "gate and up are swapped in every expert",
        "narrow(-1, port.start, self.units) for port in self.ports]",
        "narrow(-1, port.start, self.units) for port in reversed(self.ports)]",
        trials=on("llama t5-gated", "shared-moe(experts=4, k=2)"),
    ),
    mixture(
        "exported programs: the experts of a token are another token's",
        "        rows = x.repeat_interleave(selected.shape[1], 0)\n",
        "        rows = x.repeat(selected.shape[1], 1)\n",
        trials=EXPORTED,
        test="tests/passes/shared_moe/test_mixture_of_experts.py::test_exports_for_any_number_of_tokens",
    ),
    mixture(
        "exported programs of many tokens: experts are weighed by each other's gates",
        "(y * weights.t().unsqueeze(-1))",
        "(y * weights.flip(-1).t().unsqueeze(-1))",
        trials=EXPORTED,
    ),
    mixture(
        "slices: the weight is the router's probability, not 1",
        "            gates = gates / gates.detach()\n",
        "            pass\n",
        trials=SLICED,
    ),
    mixture(
        "slices: the router gets no gradient",
        "            gates = gates / gates.detach()\n",
        "            gates = gates.detach() / gates.detach()\n",
        trials=SLICED,
    ),
    mixture(
        "slices: every slice's router chooses among the experts of the first",
        "        if self.slices > 1:\n            selected =",
        "        if False:\n            selected =",
        trials=SLICED,
    ),
    mixture(
        "slices: in evaluation the least likely experts are chosen",
        "logits.topk(1, dim=-1).indices",
        "logits.topk(1, dim=-1, largest=False).indices",
        trials=SLICED,
    ),
    mixture(
        "a few tokens: each has the experts in another order",
        "products_of_matrices(x, weight, bias, selected) if",
        "products_of_matrices(x, weight, bias, selected.flip(1)) if",
        trials=SLICED,
        test="tests/passes/shared_moe/test_mixture_of_experts.py::test_few_tokens_use_compiled_products",
    ),
    slicing(
        "the bias of y is added for every slice",
        "torch.cat([bias.unsqueeze(0), bias.new_zeros(self.count - 1, len(bias))])",
        "bias.expand(self.count, -1)",
        trials=SLICED,
    ),
    slicing(
        "the rows of gate and up are swapped",
        "self.places.index(number) * self.units",
        "(len(self.places) - 1 - self.places.index(number)) * self.units",
        trials=on("llama t5-gated", "shared-moe(groups=0, slices=4, experts=3)"),
    ),
    mixture(
        "an expert's rows end before its last token",
        "device=expert.device), right=True).to(torch.int32)",
        "device=expert.device), right=False).to(torch.int32)",
        trials=SHARED,
    ),
    mixture(
        "the experts' matrices get no gradient",
        "        weight = weight.to(rows.dtype)  #",
        "        weight = weight.detach().to(rows.dtype)  #",
        trials=SHARED,
    ),
    grouping(
        "all experts of a group are taken from its first feed-forward",
        "tuple(int((e + 0.5) * len(self.sites) / experts) for e in range(experts))",
        "(0,) * experts",
        trials=FOUR,
    ),
    grouping(
        "groups take every other layer, not neighbouring ones",
        "members = sites[index * len(sites) // count : (index + 1) * len(sites) // count]",
        "members = sites[index::count]",
        trials=FOUR,
        test="tests/passes/shared_moe/test_shared_moe.py::test_wide_net_is_a_plain_loop_over_the_dense_feed_forwards",
    ),
    whole(
        "the model's forward never adds the balance loss",
        "if self.balance and not isinstance(own_forward(edit.model), ForwardWithAuxiliaryLosses):",
        "if False:",
        trials=SHARED,
    ),
    whole(
        "the option noise is the variance 1/E, where the default's standard deviation is 1/E",
        "noise=1 / self.experts if self.noise is None",
        "noise=self.experts**-0.5 if self.noise is None",
        trials=SHARED,
    ),
    whole(
        "the option capacity has no effect",
        "            capacity=self.capacity,\n",
        "            capacity=None,\n",
        trials=SHARED,
    ),
    losses(
        "the balance loss is taken away from the model's loss",
        "loss + sum(weight * recorded_loss.to(loss) for recorded_loss in recorded)",
        "loss - sum(weight * recorded_loss.to(loss) for recorded_loss in recorded)",
        trials=SHARED,
    ),
    losses(
        "of several routings' balance losses only the last is added",
        "sum(weight * recorded_loss.to(loss) for recorded_loss in recorded)",
        "sum(weight * recorded_loss.to(loss) for recorded_loss in recorded[-1:])",
        trials=SHARED,
    ),
    losses(
        "the balance loss is added in evaluation too",
        "if not (module.training and torch.is_grad_enabled()):",
        "if False:",
        trials=SHARED,
        equivalent="mixtures record their balance loss in training only, so in evaluation there is none to add",
    ),
]
