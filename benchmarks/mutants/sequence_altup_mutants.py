"""Faults of sequence-altup: prediction and correction, which tokens are anchors, what follows them, what decoding stores."""

from __future__ import annotations

import functools

from mutant import Mutant, on

MODELS = "gpt2 llama bert"
DEFAULT = on(MODELS, "sequence-altup(k=2, layers=all)")
THREE = on("gpt2 llama", "sequence-altup(k=3, layers=all)")
SKIP = on("gpt2 bert", "sequence-altup(k=2, layers=all, method=stride-and-skip)")
POOLED = on("bert", "sequence-altup(k=3, layers=all, method=average-pooling)")
EXPORTED = on("gpt2", "sequence-altup(k=3, layers=all)", "onnx")  # of two tokens in a row neither is an anchor

layers = functools.partial(Mutant, "sequence-altup", "passes/sequence_altup/strided_layers.py")
decoding = functools.partial(Mutant, "sequence-altup", "passes/sequence_altup/decoding.py")
anchors = functools.partial(Mutant, "sequence-altup", "passes/sequence_altup/arguments.py")
call = functools.partial(Mutant, "sequence-altup", "passes/sequence_altup/arguments.py")
dims = functools.partial(Mutant, "sequence-altup", "passes/sequence_altup/arguments.py")
growing = functools.partial(Mutant, "sequence-altup", "passes/sequence_altup/growing_anchors.py")
placed = functools.partial(Mutant, "sequence-altup", "passes/sequence_altup/anchor_cache.py")
whole = functools.partial(Mutant, "sequence-altup", "passes/sequence_altup/sequence_altup.py")

MUTANTS = [
    layers(
        "a1 is left out of the prediction",
        "return (self.scalars()[0] * x + anchors.spread(corrections, earlier))",
        "return (x + anchors.spread(corrections, earlier))",
        trials=DEFAULT,
    ),
    layers(
        "a2 is left out of the prediction at the anchor",
        "(a2 - b * (a1 + a2)) * x",
        "(a2 - b * a1) * x",
        trials=DEFAULT,
    ),
    layers(
        "a2 is left out of what the other tokens get",
        "(a2 - b * (a1 + a2)) * x",
        "(-b * (a1 + a2)) * x",
        trials=DEFAULT,
    ),
    layers(
        "ỹ is not weighed by b",
        "return (b * y + (a2",
        "return (y + (a2",
        trials=DEFAULT,
    ),
    layers(
        "the prediction at the anchor is added to the correction, not taken away",
        "(a2 - b * (a1 + a2)) * x",
        "(a2 + b * (a1 + a2)) * x",
        trials=DEFAULT,
    ),
    layers(
        "the correction takes away the layer's input, whatever a1 and a2 are",
        "(a2 - b * (a1 + a2)) * x",
        "(a2 - b) * x",
        trials=DEFAULT,
    ),
    layers(
        "b begins at one half",
        '("b", 1.0)',
        '("b", 0.5)',
        trials=DEFAULT,
    ),
    layers(
        "a1 begins at 0: the tokens between forget themselves",
        '("a1", 1.0)',
        '("a1", 0.0)',
        trials=DEFAULT,
    ),
    layers(
        "padding is counted as tokens where anchors are chosen",
        "real = self.real(call, 0, 0)",
        "real = None",
        trials=DEFAULT,
    ),
    layers(
        "stride-and-skip: the tokens between get what their anchor computed",
        "return torch.where(anchors.is_anchor(x), anchors.spread(corrections, earlier), x).to(x.dtype)",
        "return anchors.spread(corrections, earlier).to(x.dtype)",
        trials=SKIP,
    ),
    layers(
        "stride-and-skip: anchors skip the layer, and the tokens between get its result",
        "torch.where(anchors.is_anchor(x),",
        "torch.where(~anchors.is_anchor(x),",
        trials=SKIP,
    ),
    layers(
        "average-pooling: the layer computes on the anchor, not on the window's mean",
        "return anchors.window_means(x)",
        "return anchors.pick(x)",
        trials=POOLED,
    ),
    layers(
        "average-pooling: the window's result is added to the tokens, where it should replace them",
        "        return anchors.spread(corrections, earlier).to(x.dtype)\n",
        "        return x + anchors.spread(corrections, earlier).to(x.dtype)\n",
        trials=POOLED,
    ),
    layers(
        "corrections get no gradient",
        "anchors.spread(corrections, earlier)).to(x.dtype)",
        "anchors.spread(corrections.detach(), earlier)).to(x.dtype)",
        trials=DEFAULT,
    ),
    decoding(
        "decoding: the corrections are those of the anchor before the last",
        "earlier, corrections = stored.earlier, None",
        "earlier, corrections = (stored.corrections[:, -2:-1] if stored.corrections is not None else stored.earlier), None",
        trials=DEFAULT,
    ),
    decoding(
        "decoding: an anchor's recurrent states advance in every row",
        "    if advancing is not None:\n        restore_states(cache, waiting, advancing)\n",
        "",
        trials=DEFAULT,
        test="tests/passes/sequence_altup/test_sequence_altup.py::test_cached_decoding_is_the_full_forward",
    ),
    anchors(
        "average-pooling: the mean of the last, shorter window is divided by k",
        "        return sums / sizes\n\n    def spread",
        "        return sums / self.k\n\n    def spread",
        trials=POOLED,
    ),
    anchors(
        "average-pooling: padding is part of the means",
        "slots = torch.where(self.real, self.slot, self.count).expand(x.shape[0], -1)",
        "slots = torch.where(self.slot >= 0, self.slot, self.count).expand(x.shape[0], -1)",
        trials=POOLED,
    ),
    anchors(
        "in decoding the first anchor is counted in the wrong direction",
        "self.first = -before % k",
        "self.first = before % k",
        trials=THREE,
        test="tests/passes/sequence_altup/test_decoding.py::test_chunks_of_any_size_on_any_cache_are_the_formula",
    ),
    anchors(
        "each token gets the correction of the anchor after it",
        "return first_tokens(spread, self.length)\n",
        "return first_tokens(spread.roll(-self.k, 1), self.length)\n",
        trials=DEFAULT,
    ),
    anchors(
        "each token gets the correction of the anchor before its own",
        "        spread = values.unsqueeze(2).expand(-1, -1, self.k, -1).flatten(1, 2)",
        "        values = torch.cat([values[:, :1], values[:, :-1]], 1)\n"
        "        spread = values.unsqueeze(2).expand(-1, -1, self.k, -1).flatten(1, 2)",
        trials=DEFAULT,
    ),
    anchors(
        "the first token's correction reaches every token",
        "spread = values.unsqueeze(2).expand(-1, -1, self.k, -1).flatten(1, 2)",
        "spread = values[:, :1].expand_as(values).unsqueeze(2).expand(-1, -1, self.k, -1).flatten(1, 2)",
        trials=DEFAULT,
    ),
    anchors(
        "with padding, anchors are every k-th column, not every k-th position",
        "position = real.cumsum(1) - 1 + before",
        "position = torch.arange(length, device=real.device).expand_as(real) + before",
        trials=DEFAULT,
    ),
    anchors(
        "with padding, the filled slots are visible as keys",
        "self.valid = (slot >= start) & (slot < start + own)",
        "self.valid = (slot >= 0) & (slot < self.count + 0 * own)",
        trials=DEFAULT,
    ),
    anchors(
        "with padding, a token after a cached part gets the anchor before its own",
        "torch.where(self.early, 0, self.slot + 1)",
        "torch.where(self.early, 0, self.slot)",
        trials=DEFAULT,
    ),
    anchors(
        "with padding, padding tokens may be anchors",
        "self.anchors = real & is_computed(position, k, dense_share)",
        "self.anchors = is_computed(position, k, dense_share)",
        trials=DEFAULT,
        test="tests/passes/sequence_altup/test_strided_layers.py::test_padding_on_either_side_changes_nothing",
    ),
    anchors(
        "stride-and-skip: the token after each anchor counts as the anchor",
        "return ((torch.arange(self.length, device=x.device) - self.first) % self.k == 0)",
        "return ((torch.arange(self.length, device=x.device) - self.first) % self.k == 1)",
        trials=SKIP,
    ),
    call(
        "kept tokens are numbered 0, 1, 2, …, not by their own positions",
        "tensor = take(tensor, dim, indices, batch)",
        "tensor = take(tensor, dim, indices if dims.shows_padding else slice(0, anchors.count), batch)",
        trials=on("llama gpt2", "sequence-altup(k=2, layers=all)"),
    ),
    call(
        "the mask's keys are the first ones, not every k-th",
        "tensor = take(tensor, dim, indices, batch)",
        "tensor = take(tensor, dim, slice(0, anchors.count) "
        "if number and number == last and key_indices is None else indices, batch)",
        trials=DEFAULT,
    ),
    call(
        "the mask's queries are the first ones, not every k-th",
        "tensor = take(tensor, dim, indices, batch)",
        "tensor = take(tensor, dim, slice(0, anchors.count) if number < last else indices, batch)",
        trials=DEFAULT,
    ),
    call(
        "filled slots are not hidden in the mask",
        "if dims.shows_padding and number == last and visible is not None:",
        "if False:",
        trials=DEFAULT,
    ),
    dims(
        "a mask that is added to the scores shows tokens as padding that it does not hide",
        "visible = visible > (HIDDEN if mask.dim() > 2 or dims.zero_is_real else 0.5)",
        "visible = visible > (0.0 if mask.dim() > 2 or dims.zero_is_real else 0.5)",
        trials=on("gpt2-eager", "sequence-altup(k=2, layers=all)"),
    ),
    growing(
        "decoding: the stored correction is the first anchor's, not the last one's",
        "return None if stored is None or not stored.shape[1] else stored[:, -1:]",
        "return None if stored is None or not stored.shape[1] else stored[:, :1]",
        trials=DEFAULT,
    ),
    growing(
        "decoding: the corrections do not follow the beams",
        'for name in ("corrections", "real", "columns", "valid"):',
        'for name in ("real", "columns", "valid"):',
        trials=THREE,
    ),
    growing(
        "decoding: tokens are counted only at anchors",
        "            self.tokens += length\n            if corrections is not None:",
        "            self.tokens += new.count * self.k\n            if corrections is not None:",
        trials=DEFAULT,
    ),
    growing(
        "decoding: a new anchor's correction is not stored",
        "joined = corrections if self.corrections is None else torch.cat([self.corrections, corrections], 1)",
        "joined = corrections if self.corrections is None else self.corrections",
        trials=DEFAULT,
    ),
    growing(
        "decoding with padding: holes are visible as keys",
        "visible = torch.cat([self.valid, new.valid], 1) & (keys >= 0) & (keys < extent)",
        "visible = (keys >= 0) & (keys < extent)",
        trials=DEFAULT,
    ),
    growing(
        "a cropped cache keeps the anchors of the tokens that were cropped",
        "                setattr(layer, name, value.narrow(SERIES[name], 0, self.stored))\n",
        "                pass\n",
        trials=DEFAULT,
        test="tests/passes/sequence_altup/test_sequence_altup.py::test_tokens_can_be_taken_back",
    ),
    placed(
        "exported decoding: the correction is that of the last slot, be there an anchor in it or not",
        "torch.where(new.valid[:, -1:, None], latest, self.last)",
        "latest",
        trials=EXPORTED,
        test="tests/passes/sequence_altup/test_placed_anchors.py::"
        "test_an_exported_step_without_a_mask_sees_what_the_row_stores_and_no_more",
    ),
    placed(
        "exported decoding: an anchor sees the anchors after it",
        "& (number <= self.numbers[:, None, :, None])",
        "& (number >= 0)",
        trials=EXPORTED,
        test="tests/passes/sequence_altup/test_placed_anchors.py::test_tokens_of_one_step_without_a_mask_see_no_anchor_after_them",
    ),
    whole(
        "layers=inner: the first layer is strided too",
        "set(range(1, count - 1))",
        "set(range(0, count - 1))",
        trials=on("llama-3-layers", "sequence-altup(k=2)"),
    ),
    whole(
        "average-pooling is applied to causal stacks, where it looks ahead",
        'if self.method == "average-pooling" and stack.causal and self.k > 1:',
        "if False:",
        trials=on("gpt2", "sequence-altup(k=2, layers=all, method=average-pooling)"),
    ),
]
