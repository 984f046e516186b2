"""Faults of sparse-qkv: the convolution over tokens and modules, the columns, decoding, the mask, the fit."""

from __future__ import annotations

import functools

from mutant import Mutant, on

MODELS, TWO_MODELS = "gpt2 llama t5 bert", "gpt2 llama"
DEFAULT = on(MODELS, "sparse-qkv")
EVEN = on(TWO_MODELS, "sparse-qkv(kernel=2)")
GROUPED = on("llama", "sparse-qkv")
OUTPUT = on(TWO_MODELS, "sparse-qkv(output=mult-conv)")
CALIBRATED = on("gpt2 llama", "sparse-qkv", "calibrated")

conv = functools.partial(Mutant, "sparse-qkv", "passes/sparse_qkv/modular_projection.py")
columns = functools.partial(Mutant, "sparse-qkv", "passes/sparse_qkv/sparse_attention.py")
attention = functools.partial(Mutant, "sparse-qkv", "passes/sparse_qkv/sparse_attention.py")
projections = functools.partial(Mutant, "sparse-qkv", "passes/sparse_qkv/sparse_projections.py")
mask = functools.partial(Mutant, "sparse-qkv", "retrofit/surgery/wrappers.py")
whole = functools.partial(Mutant, "sparse-qkv", "passes/sparse_qkv/sparse_qkv.py")
fit = functools.partial(Mutant, "sparse-qkv", "passes/sparse_qkv/fitting.py")

MUTANTS = [
    conv(
        "the convolution reads modules shifted by one",
        "m.shape[-2], kernel // 2",
        "m.shape[-2], kernel // 2 + 1",
        trials=DEFAULT,
    ),
    conv(
        "an even kernel is centred on the module before",
        "m.shape[-2], kernel // 2",
        "m.shape[-2], (kernel - 1) // 2",
        trials=EVEN,
    ),
    conv(
        "the convolution wraps around the modules, where it should read zeros outside them",
        "    padded = F.pad(m, (0, 0, before, kernel - 1 - before))\n",
        "    padded = torch.cat([m[..., modules - before :, :], m, m[..., : kernel - 1 - before, :]], -2)\n",
        trials=DEFAULT,
    ),
    conv(
        "the neighbouring modules are read in inverse order",
        "for o in range(kernel)], -1)",
        "for o in reversed(range(kernel))], -1)",
        trials=DEFAULT,
    ),
    conv(
        "shared keys and values are read around the last module of their group, not the first",
        "padded[..., o : o + modules : stride, :]",
        "padded[..., o + stride - 1 : o + modules : stride, :]",
        trials=GROUPED,
    ),
    conv(
        "for many tokens the taps of earlier tokens are exchanged",
        "gated(delayed(taps[tau], tau, self.kernel), gates, tau)",
        "gated(delayed(taps[self.kernel - tau], tau, self.kernel), gates, tau)",
        trials=DEFAULT,
    ),
    conv(
        "for few tokens the taps are in inverse order",
        "return neighbours(torch.cat(taps, -1), kernel, stride)",
        "return neighbours(torch.cat(taps[::-1], -1), kernel, stride)",
        trials=DEFAULT,
    ),
    conv(
        "for many tokens a token reads its last F − 1 only once",
        "for tau in range(1, self.kernel):",
        "for tau in range(1, self.kernel - 1):",
        trials=DEFAULT,
    ),
    conv(
        "each tap reads the token at the other end of the window",
        "values.narrow(1, kernel - 1 - tau, values.shape[1] - kernel + 1)",
        "values.narrow(1, tau, values.shape[1] - kernel + 1)",
        trials=DEFAULT,
    ),
    conv(
        "the convolution reads tokens that its mask hides",
        "    return values * gates[..., tau - 1].to(values.dtype).view(*gates.shape[:-1], *(1 for _ in values.shape[2:]))\n",
        "    return values\n",
        trials=DEFAULT,
    ),
    conv(
        "the gate of the token before is that of the earliest one",
        "gates[..., tau - 1].to",
        "gates[..., tau - 2].to",
        trials=DEFAULT,
    ),
    conv(
        "the convolution's bias is left out",
        "return y + self.bias.to(y.dtype)",
        "return y",
        trials=DEFAULT,
    ),
    conv(
        "the convolution's bias is taken away",
        "return y + self.bias.to(y.dtype)",
        "return y - self.bias.to(y.dtype)",
        trials=DEFAULT,
    ),
    conv(
        "the convolution's input gets no gradient",
        "return self.mult(x)  # type",
        "return self.mult(x).detach()  # type",
        trials=DEFAULT,
    ),
    conv(
        "keys and values come in each other's place",
        'parts = [self.get_submodule(f"conv_{letter}")(m, gates, inputs[stride]) for letter, stride in self.strides.items()]',
        "parts = [self.get_submodule(f\"conv_{dict(k='v', v='k').get(letter, letter)}\")(m, gates, inputs[stride]) "
        "for letter, stride in self.strides.items()]",
        trials=DEFAULT,
    ),
    conv(
        "without convolutions, keys and values come in each other's place",
        'parts = [self.get_submodule(f"mult_{letter}")(x) for letter in self.strides]',
        "parts = [self.get_submodule(f\"mult_{dict(k='v', v='k').get(letter, letter)}\")(x) for letter in self.strides]",
        trials=on(TWO_MODELS, "sparse-qkv(variant=mult)"),
    ),
    conv(
        "a module's columns are laid out position by position, not module by module",
        "torch.cat([part.flatten(-2) for part in parts], -1)",
        "torch.cat([part.transpose(-1, -2).flatten(-2) for part in parts], -1)",
        trials=DEFAULT,
    ),
    conv(
        "variant=conv: x is divided into modules position by position",
        'x.unflatten(-1, (self.module_count, -1)) if self.variant == "conv"',
        'x.unflatten(-1, (-1, self.module_count)).transpose(-1, -2) if self.variant == "conv"',
        trials=on(TWO_MODELS, "sparse-qkv(variant=conv)"),
    ),
    columns(
        "the columns of a projection are in inverse order",
        "return super().forward(y if self.order is None else y.index_select(-1, self.order))",
        "return super().forward(y.flip(-1))",
        trials=DEFAULT,
    ),
    columns(
        "keys and values are the columns of the queries",
        "y = x.narrow(-1, self.start, self.width)",
        "y = x.narrow(-1, 0, self.width)",
        trials=on("llama", "sparse-qkv"),
    ),
    columns(
        "a projection's dense bias is left out",
        "return y if self.bias is None else y + self.bias.to(y.dtype)",
        "return y",
        trials=on("gpt2 bert", "sparse-qkv"),
    ),
    columns(
        "a projection's dense bias is added twice",
        "return y if self.bias is None else y + self.bias.to(y.dtype)",
        "return y if self.bias is None else y + 2 * self.bias.to(y.dtype)",
        trials=on("gpt2 bert", "sparse-qkv"),
    ),
    projections(
        "columns that lie head by head are put in order by the inverse permutation",
        "        order[column] = new\n",
        "        order[new] = column\n",
        trials=on("gpt-neox", "sparse-qkv"),
    ),
    projections(
        "keys are fitted to the values' weights, and values to the keys'",
        "own = {letter: weights[letter] for letter in projection.strides}",
        'own = {one: weights[{"k": "v", "v": "k"}.get(one, one)] for one in projection.strides}',
        trials=DEFAULT,
    ),
    projections(
        "the projections are fitted to half the dense weights",
        "        weights = weights_by_letter(self.site, model)\n",
        "        weights = {letter: 0.5 * one for letter, one in weights_by_letter(self.site, model).items()}\n",
        trials=DEFAULT,
    ),
    attention(
        "decoding forgets the tokens before: the convolution reads zeros there",
        "before = histories[name].advance(m, staying)",
        "histories[name].advance(m, staying)",
        trials=on("gpt2 llama t5", "sparse-qkv"),
    ),
    attention(
        "the history keeps the first of the new tokens, not the last",
        "before = histories[name].advance(m, staying)",
        "before = histories[name].advance(m.flip(1), staying)",
        trials=on("gpt2 llama t5", "sparse-qkv"),
    ),
    attention(
        "attentions share one history in the cache",
        "columns = project_with_history(self.sparse, stream, visible, histories, name, cache)",
        'columns = project_with_history(self.sparse, stream, visible, histories, "", cache)',
        trials=on("gpt2 llama", "sparse-qkv"),
        test="tests/passes/sparse_qkv/test_sparse_qkv_stays.py::test_generation_with_a_cache_is_generation_without",
    ),
    attention(
        "the output layer's convolution reads padding",
        "project_with_history(self.output.sparse, y, visible, histories,",
        "project_with_history(self.output.sparse, y, None, histories,",
        trials=OUTPUT,
    ),
    attention(
        "in cross-attention the convolutions read the source's padding",
        "            container[key] = source * (kept.transpose(0, 1) if self.tokens_first else kept)\n",
        "            pass\n",
        trials=on("t5", "sparse-qkv"),
    ),
    attention(
        "the convolutions receive the tokens one later",
        "torch.cat([before.to(m.dtype), m], 1)",
        "torch.cat([before[:, :1].to(m.dtype), before.to(m.dtype), m], 1)[:, :-1]",
        trials=DEFAULT,
    ),
    mask(
        "the gates are one token late: g[t,1] is that of the token itself",
        "torch.arange(1, past + 1, device=visible.device)",
        "torch.arange(0, past, device=visible.device)",
        trials=DEFAULT,
    ),
    mask(
        "the mask is read the wrong way round",
        "visible = head > HIDDEN if head.is_floating_point() else head.bool() ^ true_hides",
        "visible = head <= HIDDEN if head.is_floating_point() else ~head.bool() ^ true_hides",
        trials=DEFAULT,
    ),
    whole(
        "the fit is never made",
        "        errors = projections.fit(edit.model, {})\n",
        "        errors = dict[str, tuple[float, float]]()\n",
        trials=DEFAULT,
    ),
    whole(
        "the weights are fitted without the calibration data",
        "moments = self.second_moments(plan, edit)",
        "moments = {}",
        trials=CALIBRATED,
        test="tests/passes/sparse_qkv/test_output_fit.py::test_no_attention_is_worse_on_windows_held_out",
    ),
    whole(
        "the attentions' own outputs are not fitted",
        "dense = self.dense_attentions(plan, edit)",
        "dense = {}",
        trials=CALIBRATED,
        test="tests/passes/sparse_qkv/test_output_fit.py::test_no_attention_is_worse_on_windows_held_out",
    ),
    fit(
        "the taps of earlier tokens keep their noise",
        "        weight.zero_()\n",
        "",
        trials=DEFAULT,
    ),
    fit(
        "the fitted taps are put to the earliest token, not to the token itself",
        "weight[:, 0].copy_(tap)",
        "weight[:, -1].copy_(tap)",
        trials=DEFAULT,
    ),
    fit(
        "D and E are scaled apart after every sweep, and not put back",
        "d, e = balanced(d, e)",
        "d = balanced(d, e)[0]",
        trials=DEFAULT,
    ),
]
