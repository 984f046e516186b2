"""Faults of memory and of sum: which entry a token looks up, how it is weighed, what an entry computes."""

from __future__ import annotations

import functools

from mutant import Mutant, on

MODELS, TWO_MODELS = "gpt2 llama t5 bert", "gpt2 llama"
TOKEN_ID = on(MODELS, "memory(lookup=token-id)")
TOKEN_ID_RANK = on(TWO_MODELS, "memory(lookup=token-id, rank=2)")
SOFTMAX = on(TWO_MODELS, "memory(lookup=softmax, buckets=8)")
SOFTMAX_RANK = on(TWO_MODELS, "memory(lookup=softmax, buckets=8, rank=2)")
LSH = on(TWO_MODELS, "memory(lookup=lsh, buckets=8)")
GATED = on(MODELS, "memory(form=gated, rank=3)")
NGRAM_HASHES = on("gpt2", "memory(lookup=ngram, buckets=101)")
VALUES = on("gpt2 llama gpt-neox", "memory(beside=values)")
LATENT_VALUES = on("deepseek", "memory(beside=values)")
LSH_RANK = on(TWO_MODELS, "memory(lookup=lsh, buckets=8, rank=2)")
NGRAM = on(MODELS, "memory(lookup=ngram, ngrams=1-3, heads=2, buckets=40)")
GATED_NGRAM = on(TWO_MODELS, "memory(lookup=ngram, ngrams=2-3, buckets=40, gate=context)")
SUM = on(MODELS, "sum")

tables = functools.partial(Mutant, "memory", "passes/memory/external_memory.py")
folded = functools.partial(Mutant, "memory", "passes/memory/ngram_memory.py")
values = functools.partial(Mutant, "memory", "passes/memory/value_embeddings.py")
ngrams = functools.partial(Mutant, "memory", "passes/memory/ngram_memory.py")
layer = functools.partial(Mutant, "memory", "passes/memory/memory_layer.py")
ids = functools.partial(Mutant, "memory", "passes/memory/memory_layer.py")
whole = functools.partial(Mutant, "memory", "passes/memory/memory.py")
summed = functools.partial(Mutant, "sum", "passes/sum.py")

MUTANTS = [
    tables(
        "an expert has no relu where its matrices are gathered",
        "torch.bmm(x.unsqueeze(1), u).relu()",
        "torch.bmm(x.unsqueeze(1), u)",
        trials=TOKEN_ID_RANK,
    ),
    tables(
        "an expert has no relu where tokens are grouped",
        "u, ends).relu()",
        "u, ends)",
        trials=SOFTMAX_RANK,
    ),
    tables(
        "tokens are sorted by expert for the grouped product and never put back",
        ".index_select(0, torch.argsort(order))",
        "",
        trials=LSH_RANK,
    ),
    tables(
        "grouped tokens are put back by the sorting order, not by its inverse",
        "torch.argsort(order)",
        "order",
        trials=LSH_RANK,
    ),
    tables(
        "in a grouped product an expert ends before its last token",
        "torch.searchsorted(i, torch.arange(self.buckets, device=i.device), right=True).to(torch.int32)",
        "(torch.searchsorted(i, torch.arange(self.buckets, device=i.device), right=True) - 1).clamp(min=0).to(torch.int32)",
        trials=LSH_RANK,
    ),
    tables(
        "every token reads the row of the next id",
        "return ids.clamp(max=self.buckets - 1), ids < self.buckets",
        "return (ids + 1).clamp(max=self.buckets - 1), ids < self.buckets",
        trials=TOKEN_ID,
    ),
    tables(
        "every position reads the row of the token before it",
        "    return ids.reshape(x.shape[:-1])\n",
        "    return ids.reshape(x.shape[:-1]).roll(1, -1)\n",
        trials=TOKEN_ID,
    ),
    tables(
        "tokens that were added to the vocabulary get the last row, not nothing",
        "ids.clamp(max=self.buckets - 1), ids < self.buckets",
        "ids.clamp(max=self.buckets - 1), None",
        trials=TOKEN_ID,
        test="tests/passes/memory/test_memory.py::test_tokens_added_later_get_nothing",
    ),
    tables(
        "softmax lookup: the expert's output is not weighed by its probability",
        "        return i, weight\n",
        "        return i, None\n",
        trials=SOFTMAX,
    ),
    tables(
        "softmax lookup: the weight gets no gradient, so the router learns nothing",
        "        return i, weight\n",
        "        return i, weight.detach()\n",
        trials=SOFTMAX,
    ),
    tables(
        "softmax lookup: the least likely expert is chosen",
        ".softmax(-1).max(-1)",
        ".softmax(-1).min(-1)",
        trials=SOFTMAX,
    ),
    tables(
        "softmax lookup: the weight is a sigmoid, not the softmax's probability",
        ".float().softmax(-1).max(-1)",
        ".float().sigmoid().max(-1)",
        trials=SOFTMAX,
    ),
    tables(
        "softmax lookup: the jitter acts in evaluation too",
        "if self.training and self.jitter:",
        "if self.jitter:",
        trials=SOFTMAX,
    ),
    tables(
        "softmax lookup: training has no jitter",
        "if self.training and self.jitter:",
        "if False:",
        trials=SOFTMAX,
    ),
    tables(
        "softmax lookup: the jitter is added, where it should multiply",
        "x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)",
        "x = x + torch.empty_like(x).uniform_(-self.jitter, self.jitter)",
        trials=SOFTMAX,
    ),
    tables(
        "softmax lookup: the jitter only ever enlarges",
        "uniform_(1 - self.jitter, 1 + self.jitter)",
        "uniform_(1, 1 + self.jitter)",
        trials=SOFTMAX,
    ),
    tables(
        "U begins with variance 1/d², where LeCun's is 1/d",
        "torch.randn(buckets, width, rank, **kind) / math.sqrt(width)",
        "torch.randn(buckets, width, rank, **kind) / width",
        trials=TOKEN_ID_RANK,
    ),
    tables(
        "V begins with ones, not with zeros",
        "self.v = nn.Parameter(torch.zeros(",
        "self.v = nn.Parameter(torch.ones(",
        trials=TOKEN_ID_RANK,
    ),
    tables(
        "the router W begins with standard deviation 1, not 0.02",
        "nn.Parameter(0.02 * torch.randn(",
        "nn.Parameter(torch.randn(",
        trials=SOFTMAX,
    ),
    tables(
        "gated: the entry is added to the gate, where it should multiply",
        "F.linear(gate * self.rows(self.p, i), self.w_up)",
        "F.linear(gate + self.rows(self.p, i), self.w_up)",
        trials=GATED,
    ),
    tables(
        "gated: the activation follows the entry",
        "ACTIVATIONS[self.activation](F.linear(x.to(self.w_gate.dtype), self.w_gate))",
        "F.linear(x.to(self.w_gate.dtype), self.w_gate)",
        trials=GATED,
    ),
    tables(
        "gated: the gelu of tanh is the exact one",
        'lambda x: F.gelu(x, approximate="tanh")',
        "F.gelu",
        trials=on("gpt2", "memory(form=gated, rank=3, activation=gelu-tanh)"),
    ),
    tables(
        "gated: W_up begins with ones, not with zeros",
        "self.w_up = nn.Parameter(torch.zeros(",
        "self.w_up = nn.Parameter(torch.ones(",
        trials=GATED,
    ),
    tables(
        "gated: the entries begin at zero, and nothing ever learns",
        "self.p = nn.Parameter(torch.randn(",
        "self.p = nn.Parameter(torch.zeros(",
        trials=GATED,
    ),
    tables(
        "gated: W_gate begins with variance 1, where LeCun's is 1/d",
        "torch.randn(self.rank, self.width, **kind) / math.sqrt(self.width)",
        "torch.randn(self.rank, self.width, **kind)",
        trials=GATED,
    ),
    tables(
        "lsh: the hyperplanes are drawn anew in every call",
        "F.linear(unit, self.planes.float())",
        "F.linear(unit, torch.randn_like(self.planes).float())",
        trials=LSH,
    ),
    tables(
        "lsh: the hyperplanes have no offsets",
        ".float() + self.offsets.float()).long()",
        ".float()).long()",
        trials=LSH,
    ),
    tables(
        "lsh: tokens are not scaled to one length",
        "unit = F.normalize(x.float(), dim=-1) * math.sqrt(self.width)",
        "unit = x.float()",
        trials=LSH,
    ),
    tables(
        "lsh: the hyperplanes are √d too far apart",
        "F.normalize(x.float(), dim=-1) * math.sqrt(self.width)",
        "F.normalize(x.float(), dim=-1)",
        trials=LSH,
    ),
    tables(
        "lsh: cells of different families get one bucket: the digits are added without their place",
        "digit * self.slots**k for",
        "digit for",
        trials=LSH,
    ),
    tables(
        "lsh: cells lie between the hyperplanes' middles (rounded, not floored)",
        "cells = torch.floor(",
        "cells = torch.round(",
        trials=LSH,
    ),
    tables(
        "lsh: the hyperplanes are not saved with the model",
        'dtype=like.dtype) / math.sqrt(width))\n        self.register_buffer("offsets"',
        'dtype=like.dtype) / math.sqrt(width), persistent=False)\n        self.register_buffer("offsets"',
        trials=LSH,
    ),
    folded(
        "canonical ids: upper case keeps ids of its own",
        ".lower()",
        "",
        trials=NGRAM_HASHES,
        test="tests/passes/memory/test_canonical_ids.py::test_ids_whose_text_is_the_same_share_the_first",
    ),
    folded(
        "canonical ids: all byte tokens share one id, for they decode to the same sign",
        " and text and UNDECODABLE not in text",
        "",
        trials=NGRAM_HASHES,
        test="tests/passes/memory/test_canonical_ids.py::test_ids_whose_text_is_the_same_share_the_first",
    ),
    folded(
        "canonical ids: special tokens fold into words",
        "if id not in special and text",
        "if text",
        trials=NGRAM_HASHES,
        test="tests/passes/memory/test_canonical_ids.py::test_ids_whose_text_is_the_same_share_the_first",
    ),
    folded(
        "canonical ids: a leading space keeps ids of its own",
        '.removeprefix(" ")',
        "",
        trials=NGRAM_HASHES,
        test="tests/passes/memory/test_canonical_ids.py::test_ids_whose_text_is_the_same_share_the_first",
    ),
    values(
        "values: the gate is σ, not 2σ, and begins at a half",
        "gate = 2 * torch.sigmoid(",
        "gate = torch.sigmoid(",
        trials=VALUES,
    ),
    values(
        "values: the rows are added to the columns before the values'",
        "= site.blocks, site.start,",
        "= site.blocks, 0,",
        trials=on("gpt2 gpt-neox", "memory(beside=values)"),
        test="tests/passes/memory/test_value_embeddings.py::test_the_start_is_exact_and_a_trained_model_is_the_formula[causal/gpt2]",
    ),
    values(
        "values: heads take their gates in turn, column by column",
        ".unflatten(-1, (self.heads, -1)) * gate.unsqueeze(-1)).flatten(-2)",
        ".unflatten(-1, (-1, self.heads)) * gate.unsqueeze(-2)).flatten(-2)",
        trials=VALUES,
    ),
    values(
        "values: the rows are those of the token before",
        "self.look_up(x, ids.transpose(0, 1) if self.tokens_first and ids is not None else ids)",
        "self.look_up(x, None if ids is None else ids.roll(1, -1))",
        trials=VALUES,
    ),
    values(
        "values: the gate gets no gradient",
        "gate = 2 * torch.sigmoid(F.linear(x[..., : self.inputs].to(self.w.dtype), self.w))",
        "gate = 2 * torch.sigmoid(F.linear(x[..., : self.inputs].to(self.w.dtype), self.w)).detach()",
        trials=VALUES,
    ),
    values(
        "values: the table begins with noise",
        "self.table = nn.Parameter(torch.zeros(",
        "self.table = nn.Parameter(torch.randn(",
        trials=VALUES,
    ),
    values(
        "values: what they are added to is computed and then left out",
        'y: Tensor = children["memory"](children["layer"](*args, **kwargs), x, self.tokens.read())',
        'y: Tensor = children["layer"](*args, **kwargs)',
        trials=VALUES,
    ),
    values(
        "values: a cache of latents stores the ids of the tokens before",
        "ids.clamp(max=self.most)",
        "ids.roll(1, -1).clamp(max=self.most)",
        trials=LATENT_VALUES,
        test="tests/passes/memory/test_value_embeddings.py::test_decoding_with_a_cache_is_the_whole_forward[causal/deepseek_v3]",
    ),
    values(
        "values: seven of the eight bits of an id's digit are read",
        "ids >> shift & 255",
        "ids >> shift & 127",
        trials=LATENT_VALUES,
        test="tests/passes/memory/test_value_embeddings.py::test_a_cache_of_latents_keeps_every_id",
    ),
    ngrams(
        "n-grams: the multipliers are not odd",
        "device=like.device) | 1\n",
        "device=like.device) & -2\n",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: the multipliers have 32 bits",
        "torch.randint(-(2**63), 2**63 - 1,",
        "torch.randint(-(2**31), 2**31 - 1,",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: every token before has the multiplier of the token itself",
        "* self.multipliers[:, back])",
        "* self.multipliers[:, 0])",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: products are added, not joined by XOR",
        "code = code ^ (ids",
        "code = code + (ids",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: hashes of a low order read as many ids as the highest",
        "drawn * used.to(drawn))",
        "drawn)",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: the heads of an order share the prime",
        '        sizes = torch.tensor(moduli, device="cpu")\n',
        '        sizes = torch.tensor([moduli[index // 2 * 2] for index in range(len(moduli))], device="cpu")\n',
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: all hashes look their rows up from the table's first row on",
        "code.remainder(self.moduli) + self.first_rows",
        "code.remainder(self.moduli)",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: the remainder of a negative code is negative, and moved",
        "code.remainder(self.moduli)",
        "code.abs().remainder(self.moduli)",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: a row has zeros before its beginning, where the reserved id belongs",
        "before = ids.new_full((ids.shape[0], past), RESERVED)",
        "before = ids.new_zeros((ids.shape[0], past))",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: a cache that stores nothing yet is full of id 0",
        "return histories[self.name].advance(stored, staying_tokens(cache)) + RESERVED",
        "return (histories[self.name].advance(stored, staying_tokens(cache)) + RESERVED).clamp(min=0)",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: one id too few is kept in the cache",
        "return histories[self.name].advance(stored, staying_tokens(cache)) + RESERVED",
        "before = histories[self.name].advance(stored, staying_tokens(cache)) + RESERVED\n"
        "        before[:, 0] = RESERVED\n        return before",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: the ids of a step are not kept in the cache",
        "return histories[self.name].advance(stored, staying_tokens(cache)) + RESERVED",
        "return histories[self.name].last() + RESERVED",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams reach across the beginning of a sequence into its padding",
        "            gates = both(seen, position_gates(positions, past))\n",
        "",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: the window reads the tokens after a token",
        "for back in range(past + 1)], -1)",
        "for back in range(past, -1, -1)], -1)",
        trials=NGRAM,
    ),
    ngrams(
        "n-grams: the rows of the hashes are averaged, not summed",
        "self.rows(self.b, self.hashes(ids)).sum(-2)",
        "self.rows(self.b, self.hashes(ids)).mean(-2)",
        trials=NGRAM,
    ),
    ngrams(
        "gated n-grams: the gate is not divided by √d",
        "* math.sqrt(self.width)  # norm",
        "* self.width  # norm",
        trials=GATED_NGRAM,
    ),
    ngrams(
        "gated n-grams: the gate gets no gradient",
        "torch.sigmoid(gate)",
        "torch.sigmoid(gate.detach())",
        trials=GATED_NGRAM,
    ),
    ngrams(
        "gated n-grams: keys are values",
        "k, v = F.linear(e, self.w_k), F.linear(e, self.w_v)",
        "k, v = F.linear(e, self.w_v), F.linear(e, self.w_v)",
        trials=GATED_NGRAM,
    ),
    ngrams(
        "gated n-grams: the rows begin at zero, and so does W_V",
        "        nn.init.normal_(self.b, std=spread)\n",
        "",
        trials=GATED_NGRAM,
    ),
    ngrams(
        "n-grams: the multipliers are not saved with the model",
        'self.register_buffer("multipliers", drawn * used.to(drawn))',
        'self.register_buffer("multipliers", drawn * used.to(drawn), persistent=False)',
        trials=NGRAM,
    ),
    layer(
        "the memory reads the layer's output, not its input",
        "self.memory(x, ids)",
        "self.memory(y, ids)",
        trials=SOFTMAX,
    ),
    layer(
        "the memory's output is taken away, not added",
        "y + self.memory(x, ids)",
        "y - self.memory(x, ids)",
        trials=TOKEN_ID,
    ),
    layer(
        "the memory's output gets no gradient",
        "self.memory(x, ids).to(y.dtype)",
        "self.memory(x, ids).detach().to(y.dtype)",
        trials=TOKEN_ID,
    ),
    ids(
        "every row of the batch is looked up by the ids of the first",
        "return {TOKEN_IDS: ids}\n\n    def add_keyword",
        "return {TOKEN_IDS: ids[:1].expand_as(ids)}\n\n    def add_keyword",
        trials=TOKEN_ID,
    ),
    whole(
        "the option jitter has no effect",
        "jitter=self.jitter)",
        "jitter=0.0)",
        trials=SOFTMAX,
    ),
    whole(
        "the option rank has no effect on tables looked up by lsh",
        "LshMemory(rows, width, self.rank, like)",
        "LshMemory(rows, width, 0, like)",
        trials=LSH_RANK,
    ),
    summed(
        "the extra embedding is that of the next token",
        "return self.extra(ids)",
        "return self.extra(ids.roll(-1, -1))",
        trials=SUM,
    ),
    summed(
        "the extra embedding is looked up by position, not by token",
        "return self.extra(ids)",
        "return self.extra(ids.new_ones(ids.shape).cumsum(-1) - 1)",
        trials=SUM,
    ),
    summed(
        "the extra embedding is taken away, not added",
        "lambda y: y + self.look_up(ids).to(y.dtype)",
        "lambda y: y - self.look_up(ids).to(y.dtype)",
        trials=SUM,
    ),
    summed(
        "the extra embedding is scaled by √d",
        "self.look_up(ids).to(y.dtype)",
        "self.look_up(ids).to(y.dtype) * self.extra.embedding_dim**0.5",
        trials=SUM,
    ),
    summed(
        "the extra embedding begins with noise",
        "        nn.init.zeros_(extra.weight)\n",
        "",
        trials=SUM,
    ),
    summed(
        "tokens that were added to the vocabulary get the last row, not nothing",
        " * (ids < rows).unsqueeze(-1)",
        "",
        trials=SUM,
        test="tests/passes/test_sum.py::test_tokens_added_later_get_nothing",
    ),
]
