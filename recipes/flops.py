"""Arithmetic of one sample in FLOP, and the peak of a device.

Three numbers are called "TFLOPS" in the literature, and mixing them is the commonest error of benchmark pages:

- *model* FLOP count what the mathematics needs, forward and backward, whether or not anything is recomputed;
- *Megatron's* formula approximates them for a transformer with a feed-forward network of 4h, and counts the whole
  matrix of attention scores where a causal mask keeps half of it (AMSP reports its MFU so);
- *recomputed* FLOP also count the forward that activation checkpointing repeats (MiCS reports its TFLOPS so).

Symbols: s tokens in a sequence, L layers, h hidden size, V vocabulary. A multiplication and an addition are 2 FLOP.
"""

import re


def decoder_model_flop(*, matmul_params: int, s: int, L: int, h: int, is_causal: bool) -> float:
    """Return FLOP per sequence of any decoder: forward and backward, nothing recomputed.

    Args:
        matmul_params: Parameters that multiply every token (weights of linear layers and of the output projection; not
            the embedding table, which is looked up).
        s: Tokens in a sequence.
        L: Layers.
        h: Hidden size (heads times head size).
        is_causal: Whether to count only the half of the attention scores that a causal mask keeps, which is today's
            convention; False counts all of them, as a profiler does.
    """
    attention = 12 * L * h * s**2
    return 6 * matmul_params * s + (attention / 2 if is_causal else attention)


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


def llama_matmul_params(*, L: int, h: int, ffn: int, V: int, kv_share: float = 1.0) -> int:
    """Weights of a LLaMA that multiply every token.

    Args:
        L: layers.
        h: hidden size.
        ffn: hidden size of the gated feed-forward network, which has three matrices.
        V: vocabulary, for the output projection.
        kv_share: key-value heads over query heads.
    """
    per_layer = 2 * h * h + 2 * round(h * h * kv_share) + 3 * h * ffn
    return L * per_layer + V * h


def transformer_matmul_params(*, L: int, h: int, ffn: int, V: int, has_masked_head: bool) -> int:
    """Weights of a BERT, RoBERTa or GPT-2 that multiply every token.

    Args:
        L: layers.
        h: hidden size.
        ffn: hidden size of the feed-forward network, which has two matrices.
        V: vocabulary, for the output projection.
        has_masked_head: the output projection is preceded by a matrix of h by h.
    """
    return L * (4 * h * h + 2 * h * ffn) + V * h + (h * h if has_masked_head else 0)


# Dense peak without sparsity, in TFLOP/s, of 16-bit arithmetic with 32-bit accumulation: bfloat16, or float16 where the
# chip has no bfloat16. Source: the vendors' datasheets. The first pattern found in the device's name counts.
_PEAK_TFLOP_PER_S: tuple[tuple[str, float], ...] = (
    (r"GB[23]00", 2500.0),
    (r"B[23]00", 2250.0),
    (r"H200", 989.0),
    (r"H100 NVL", 835.0),
    (r"H[18]00 PCIe", 756.0),
    (r"H[18]00", 989.0),
    (r"A[18]00", 312.0),  # A800 and H800 differ from A100 and H100 in NVLink and 64-bit arithmetic
    (r"A10G", 125.0),
    (r"L4\b", 121.0),
    (r"V100S", 130.0),
    (r"V100-PCIE", 112.0),
    (r"V100", 125.0),
    (r"T4\b", 65.0),
    (r"MI300X", 1300.0),
    (r"MI355X", 2500.0),
)


def peak_tflop_per_s(device_name: str) -> float:
    """Return the dense 16-bit peak of a device, or 0.0 when the table does not know it.

    Args:
        device_name: Name from torch, for example "NVIDIA H100 80GB HBM3".
    """
    for pattern, peak in _PEAK_TFLOP_PER_S:
        if re.search(pattern, device_name):
            return peak
    return 0.0
