"""Merged cross-attention: the decoder's self-attention sees the encoder's tokens too, and no cross-attention is left."""
