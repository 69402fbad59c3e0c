"""FLOP of one sample as published results count them.

Three numbers are called "TFLOPS" in the literature:

- *model* FLOP (`ModelDescription.model_flop_per_sample`) count what the mathematics needs, whether or not anything is
  recomputed; causal attention is halved;
- *Megatron's* formula approximates them for a feed-forward network of 4h, and counts the whole matrix of attention
  scores (AMSP reports its MFU so);
- *recomputed* FLOP also count the forward that activation checkpointing repeats (MiCS reports its TFLOPS so).

Symbols: s tokens in a sequence, L layers, h hidden size, V vocabulary. A multiplication and an addition are 2 FLOP.

Pure.
"""

from __future__ import annotations


def megatron_model_flop(*, s: int, L: int, h: int, V: int) -> float:
    """FLOP per sequence by Megatron's formula, nothing recomputed.

    The formula takes 8 h^2 weights for the feed-forward network and as many key-value heads as heads.

    Source:
        Megatron-LM (arXiv:2104.04473), section 5.1, without the recomputed forward. A dispatch-mode count of a
        127-layer BERT differs by 0.06 %. AMSP's table V follows it for LLaMA 7B and 13B.
    """
    return 72 * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))


def megatron_recomputed_flop(*, s: int, L: int, h: int, V: int) -> float:
    """FLOP per sequence by Megatron's formula with one recomputed forward.

    Source:
        Megatron-LM (arXiv:2104.04473), section 5.1; times sequences per second, it is the TFLOPS of MiCS
        (arXiv:2205.00119), section 5.1.1.
    """
    return 96 * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
