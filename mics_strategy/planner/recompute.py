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
from mics_strategy.planner.model import ModelDescription, UnitModel

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
    """Whether something of each unit is recomputed. A share is spread evenly over the layers."""
    share, layer, found = 1.0 if isinstance(recompute, str) else float(recompute), 0, []
    for unit in units:
        layer += unit.is_layer
        found.append(unit.is_layer and unit.has_backward and _floor(layer * share) > _floor((layer - 1) * share))
    return found


def check_recompute(model: ModelDescription, recompute: Recompute) -> None:
    """Raise where nothing of a model would be recomputed.

    Raises:
        ConfigError: The share is less than a layer, or no layer has fused attention.
    """
    layers = sum(unit.is_layer for unit in model.units)
    if isinstance(recompute, float) and layers and not _floor(layers * recompute):
        raise ConfigError(
            f"`recompute={recompute:.3g}` is less than one of the {layers} layers. Use 1/{layers} or more."
        )
    if recompute == ATTENTION and not any(unit.attention.saved_bytes for unit in model.units):
        raise ConfigError(f"`recompute='attention'`: {model.name} has no fused attention. Use a share of layers.")


def _floor(value: float) -> int:
    return math.floor(value + 1e-9)  # a third of 3 is 1


def kept_and_made_bytes(unit: UnitModel, recompute: Recompute) -> tuple[int, int]:
    """Bytes of one sample that a recomputed unit keeps for the backward, and those that the backward makes again."""
    if recompute == ATTENTION:
        return unit.saved_bytes - unit.attention.saved_bytes, unit.attention.saved_bytes
    return unit.input_bytes, unit.saved_bytes
