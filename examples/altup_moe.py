"""AltUp + MoE, the combination of the AltUp paper's supplement C: a wider stream, and 128 partial experts beside every layer.

    python examples/altup_moe.py

One recipe: `altup(k=2)`, then `memory(lookup=softmax, buckets=128, rank=16)`. On a T5 of two layers a side, of random weights, it
shows that nothing changes at step 0, what was added, and that the experts learn.
"""

from __future__ import annotations

import torch
from transformers import T5Config, T5ForConditionalGeneration

import retrofit
from retrofit.passes import AltUp, Memory

RECIPE = (AltUp(k=2), Memory(lookup="softmax", buckets=128, rank=16))


def small_t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=512,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).eval()


def main() -> None:
    torch.manual_seed(0)
    model = small_t5()
    ids = torch.randint(2, 512, (16, 12))
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids)
    dense = sum(parameter.numel() for parameter in model.parameters())

    retrofit.apply(model, *RECIPE)  # verified, or else left as it was
    with torch.no_grad():
        after = model(input_ids=ids, labels=ids)
    print("recipe      ", ", ".join(one.spec() for one in retrofit.recipe(model) or ()))
    print(f"parameters   {dense:,} → {sum(parameter.numel() for parameter in model.parameters()):,}")
    print(f"at step 0    logits moved by {float((after.logits - before.logits).abs().max()):.1e}, loss {float(after.loss):.3f}")

    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    tables = {name: parameter for name, parameter in model.named_parameters() if name.endswith("memory.v")}
    used = [int((table.detach() != 0).flatten(1).any(1).sum()) for table in tables.values()]
    print(f"trained      30 steps on one batch, loss {float(loss.detach()):.3f}; experts in use beside each layer: {used} of 128")


if __name__ == "__main__":
    main()
