"""Update locality: the elements on which the update of one element depends.

An update depends on its own element (Adam), on its whole tensor (Muon, Adafactor, LAMB), or on all tensors (a global
norm, one step size for all). The first kind can step on rows of tensors, the second on whole tensors assigned to ranks,
the third on neither. Steps of an optimizer cannot show which kind it is: a norm may count only above a threshold, or
after many steps. So classes are known by name or declared by the user, and all others are refused.
"""

from __future__ import annotations

import enum
import inspect
from typing import Any

from torch.optim import Optimizer

from mics_strategy.errors import ConfigError


class UpdateLocality(enum.IntEnum):
    """Elements on which the update of one element depends.

    Attributes:
        ELEMENTWISE: The element itself.
        PER_TENSOR: All elements of its tensor.
        GLOBAL: All elements of all tensors.
    """

    ELEMENTWISE = 0
    PER_TENSOR = 1
    GLOBAL = 2


_DECLARED = {"element": UpdateLocality.ELEMENTWISE, "tensor": UpdateLocality.PER_TENSOR}

# Classes by package, named so that nothing is imported. Those of torch, schedulefree 1.4.1 and pytorch_optimizer 4.1.0
# are trained against one process by tests/engine/optimizer/test_known_optimizers.py. Those of timm 1.0.31 were run on
# halves of tensors. Sources of torchao 0.18, transformers 5.23, bitsandbytes, apex and DeepSpeed were read.
_ELEMENTWISE = {
    "torch": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    "schedulefree": """
        AdamWScheduleFree AdamWScheduleFreeClosure AdamWScheduleFreePaper AdamWScheduleFreeReference
        RAdamScheduleFree RAdamScheduleFreeClosure SGDScheduleFree SGDScheduleFreeClosure SGDScheduleFreeReference""",
    "torchao": "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8 _AdamW",
    "pytorch_optimizer": """
        AccSGD AdaBelief AdaBound AdaDelta AdaMax AdamC AdamG AdaMod Adan AdaPNM AdaSmooth AdEMAMix ADOPT AggMo Ano
        BCOS DiffGrad DualAdam EXAdam FOCUS FTRL Grams GrokFastAdamW Kate LaProp Lion MADGRAD MSVAG PAdam PID PNM
        QHAdam QHM RAdam ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD SGDW SignSGD SimplifiedAdEMAMix SRMM
        Tiger VSGD Yogi""",
    "timm": "AdaBelief AdamWLegacy Adan Adopt LaProp Lion MADGRAD NAdamLegacy NAdamW RAdamLegacy RMSpropTF SGDW",
    "apex": "FusedAdam",
    "bitsandbytes": """
        Adagrad Adagrad32bit Adagrad8bit Adam Adam32bit Adam8bit AdamW AdamW32bit AdamW8bit Lion Lion32bit Lion8bit
        PagedAdam PagedAdam32bit PagedAdam8bit PagedAdamW PagedAdamW32bit PagedAdamW8bit PagedLion PagedLion32bit
        PagedLion8bit RMSprop RMSprop32bit RMSprop8bit SGD SGD32bit SGD8bit""",
    "deepspeed": "DeepSpeedCPUAdam",
}
_PER_TENSOR = {
    "torch": "Adafactor Muon",
    "pytorch_optimizer": """
        A2Grad AdaFactor AdaGO Adalite AdamP AdaMuon AdamWSN AdaNorm AdaShift AdaTAM Aida Alice Amos APOLLO
        ApolloDQN CAME Conda Fira FlashAdamW Fromage GaLore Lamb LARS MARS Muon MuonClip Nero NorMuon NovoGrad RACS
        Ranger ROSE ScalableShampoo SCION SCIONLight SGDP SGDSaI Shampoo SM3 SOAP SPAM SpectralSphere SPlus
        StableAdamW StableSPAM TAM""",
    "timm": "Adafactor AdafactorBigVision AdamP Lars Mars Muon NvNovoGrad SGDP",
    "transformers": "Adafactor",
}
_GLOBAL = {
    "torch": "LBFGS",
    "timm": "Kron Lamb",
    "pytorch_optimizer": """
        AdaGC Adai AdamS AliG ASGD AvaGrad DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD DASH
        DistributedMuon EmoFact EmoLynx EmoNavi Gravity Kron LoRARite Prodigy Ranger21 SWATS""",
}
# Packages whose classes keep their locality with all options. In others, an elementwise class is known with the default
# options and these, and a class of whole tensors is known with the default flags and these.
_ANY_OPTIONS = ("torch", "schedulefree", "torchao", "transformers")
_FREE_OPTIONS = frozenset(
    """ams_bound amsgrad args beta betas capturable dampening eps fixed_decay foreach fused is_paged lr maximize
    min_8bit_size momentum nesterov optim_bits use_adjusted_lr weight_decay weight_decouple""".split()
)
_COUPLING_FLAGS = ("adanorm", "cautious", "rank", "sn", "stable_adamw", "use_gc")  # of groups, in no signature


def locality_by_group(optimizer: Optimizer, declared: str) -> list[UpdateLocality]:
    """Update locality of each parameter group of an optimizer.

    Args:
        optimizer: Optimizer to look up. It is not changed and takes no step.
        declared: `ShardConfig.update_locality`, which counts for classes and options that are not known.

    Raises:
        ConfigError: The class or an option is not known, and the user has declared nothing.
    """
    return [_locality_of(optimizer, group, declared) for group in optimizer.param_groups]


def kind_of(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's own class, where Fabric has derived another one from it."""
    cls = type(optimizer)
    return cls.__bases__[-1] if cls.__module__.endswith("fabric.wrappers") else cls


def _locality_of(optimizer: Optimizer, group: dict[str, Any], declared: str) -> UpdateLocality:
    cls = kind_of(optimizer)
    known = _known_locality(cls)
    if known is UpdateLocality.GLOBAL:
        return known
    option = None if known is None else _unknown_option(optimizer, group, known)
    if known is not None and option is None:
        return known if group.get("use_muon", True) else UpdateLocality.ELEMENTWISE  # a group of Muon for its Adam
    if declared in _DECLARED:
        return _DECLARED[declared]
    subject = f"`{cls.__module__}.{cls.__qualname__}`" + (f" with `{option}`" if option else "")
    raise ConfigError(
        f"It is not known on which elements an update of {subject} depends, and each rank holds rows of every tensor. "
        "Declare it in the ShardConfig: `update_locality='element'` if an update depends on its own element alone, and "
        "not on the tensor's shape; `update_locality='tensor'` with `optimizer_layout='tensors'` if it needs its whole "
        "tensor (norms, means, matrix products). If it needs all tensors together, replicate all states with the "
        "preset 'ddp'."
    )


def _known_locality(cls: type[Optimizer]) -> UpdateLocality | None:
    package = cls.__module__.partition(".")[0]
    if getattr(cls.step, "__module__", "").partition(".")[0] not in (package, "torch"):
        return None  # a script has replaced its step
    for locality, names_by_package in zip(UpdateLocality, (_ELEMENTWISE, _PER_TENSOR, _GLOBAL), strict=True):
        if cls.__qualname__ in names_by_package.get(package, "").split():
            return locality
    return None


def _unknown_option(optimizer: Optimizer, group: dict[str, Any], known: UpdateLocality) -> str | None:
    """An option, as ``name=value``, with which a class was not verified, or None."""
    cls = kind_of(optimizer)
    if cls.__module__.partition(".")[0] in _ANY_OPTIONS:
        return None
    is_elementwise = known is UpdateLocality.ELEMENTWISE
    holder = getattr(optimizer, "args", optimizer)  # bitsandbytes keeps its options there
    defaults = {name: parameter.default for name, parameter in inspect.signature(cls.__init__).parameters.items()}
    defaults |= dict.fromkeys(_COUPLING_FLAGS if is_elementwise else (), None)
    for name, default in defaults.items():
        value = group.get(name, getattr(holder, name, default))
        is_compared = isinstance(value, (bool, int, float, str) if is_elementwise else bool)
        if is_compared and name not in _FREE_OPTIONS and value != default and (value or default):
            return f"{name}={value!r}"
    return None
