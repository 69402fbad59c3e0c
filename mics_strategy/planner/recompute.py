"""Which activations a backward computes again: those of all layers, of some of them, or of attention alone.

Pure.

Source:
    A share of the layers: `selective_checkpointing` of IBM's fms-fsdp (1/2), `selective_ac_option` of torchtitan (2).
    Attention alone: Korthikanti et al. (arXiv:2205.05198), section 5. Fused attention keeps no scores, so that here the
    projections in front of it are computed again, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from mics_strategy.errors import ConfigError
from mics_strategy.planner.model import UnitModel

Recompute = bool | float | str
"""All layers or none, a share of them between 0 and 1, or `ATTENTION`."""
ATTENTION = "attention"
_WORDS: dict[str, Recompute] = {"yes": True, "no": False, "auto": "auto", ATTENTION: ATTENTION}


def parse_recompute(text: str) -> Recompute:
    """Read what is recomputed, as in "yes", "no", "auto", "attention", "1/2" or "0.5".

    Raises:
        ConfigError: It is none of these.
    """
    match = re.fullmatch(r"(\d*\.?\d+)(?:/([1-9]\d*))?", text)
    share = float(match[1]) / int(match[2] or 1) if match else -1.0
    if text not in _WORDS and not 0 < share <= 1:
        raise ConfigError(f"`--recompute {text}` is not known. Use {', '.join(_WORDS)}, or a share of layers as 1/2.")
    return _WORDS.get(text, share)


def recompute_word(recompute: Recompute) -> str:
    """What is recomputed in one word of a table."""
    known = next((word for word, value in _WORDS.items() if value == recompute), None)
    return known or f"{recompute:.3g}"


def recompute_phrase(recompute: Recompute) -> str:
    """What is recomputed as the end of a sentence; empty for nothing."""
    if not recompute:
        return ""
    if isinstance(recompute, str):
        return f", {recompute} recomputed"
    return ", layers recomputed" if recompute == 1 else f", {recompute:.3g} of the layers recomputed"


def recomputed_units(units: Iterable[UnitModel], recompute: Recompute) -> list[bool]:
    """Whether something of each unit is recomputed. A share is spread evenly over the layers.

    Raises:
        ConfigError: The share is less than a layer, or no layer has fused attention.
    """
    share, layer, found = 1.0 if isinstance(recompute, str) else float(recompute), 0, []
    has_attention = False
    for unit in units:
        layer += unit.is_layer
        has_attention |= unit.attention.saved_bytes > 0
        found.append(unit.is_layer and unit.has_backward and _floor(layer * share) > _floor((layer - 1) * share))
    if share and layer and not _floor(layer * share):
        raise ConfigError(
            f"`recompute={share:.3g}` is less than one of the {layer} layers. Use 1/{layer} or more, or do without."
        )
    if recompute == ATTENTION and not has_attention:
        raise ConfigError(
            "`recompute='attention'` recomputes fused attention, and no layer has any. Use True, False, or a share of "
            "the layers such as 1/2."
        )
    return found


def _floor(value: float) -> int:
    return math.floor(value + 1e-9)  # a third of 3 is 1


def kept_and_made_bytes(unit: UnitModel, recompute: Recompute) -> tuple[int, int]:
    """Bytes of one sample that a recomputed unit keeps for the backward, and those that the backward makes again."""
    if recompute == ATTENTION:
        return unit.saved_bytes - unit.attention.saved_bytes, unit.attention.saved_bytes
    return unit.input_bytes, unit.saved_bytes
