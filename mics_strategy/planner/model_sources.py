"""Models as a user names them: from the catalog, a configuration, or a function.

- `llama-7b`: a name of `models.toml`, described by formula.
- `gpt2-xl`: a recipe, whose model is built from its YAML on the meta device and traced, with the recipe's length of
  samples unless another is stated.
- `path/to/config.json`, its folder, or a name that transformers knows (`gpt2`): a model of transformers, which is built
  on the meta device and traced.
- `package.module:factory`: a function that returns a module and an example, which are traced. It is called under
  ``torch.device("meta")`` with `seq_len`, if it has such a parameter, and returns `(module, example)`. The example has
  the keyword arguments of the module's forward for one sample, tensors [1, ...]; it may be a `TraceInput`, which also
  has units and a loss.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mics_strategy.errors import ConfigError, nearest
from mics_strategy.planner.catalog import describe_model, is_image_model, model_names
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.recipe_names import recipe_names, recipes_package
from mics_strategy.version import install_advice

_HUB_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as a user names it.

    Attributes:
        text: Name, path, or `module:factory`.
        seq_len: Tokens of a sample; 0 where they were not stated.
        dtype: Dtype of the computation.
    """

    text: str
    seq_len: int
    dtype: torch.dtype

    def describe(self) -> ModelDescription:
        """The description of the model.

        Raises:
            ConfigError: There is no such model, or it needs a length of samples, or has none.
        """
        if self.text.lower().replace("_", "-") in {name.replace("_", "-") for name in model_names()}:
            self._check_seq_len(is_needed=not is_image_model(self.text))
            return describe_model(self.text, self.seq_len, self.dtype.itemsize)
        path = Path(self.text)
        if path.exists() or path.suffix == ".json":
            return self._of_config(path)
        if ":" in self.text:
            return self._of_factory()
        if self.text in recipe_names():
            return self._trace(*recipe_model(self.text, self.seq_len))
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(
                f"`--model {self.text}` is neither a model of the catalog, nor a recipe, nor a file, nor "
                f"`module:factory`.{nearest(self.text, known_names())}"
            )
        return self._of_transformers(transformers_config(self.text), self.text, self.text)

    def _check_seq_len(self, *, is_needed: bool) -> None:
        if is_needed and self.seq_len < 1:
            raise ConfigError(
                f"`--model {self.text}` has sequences whose length is not stated. Add `--seq-len`, for example "
                "`--seq-len 2048`."
            )
        if not is_needed and self.seq_len:
            raise ConfigError(
                f"`--seq-len {self.seq_len}` was given with `--model {self.text}`, whose samples have no length. Leave "
                "out `--seq-len`."
            )

    def _of_config(self, path: Path) -> ModelDescription:
        """Describe a model of transformers from its configuration."""
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"`--model {self.text}`: {file} does not exist. Give a config.json, or its folder.")
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(
                f"`--model {self.text}` is built by transformers, which is not installed. {install_advice('recipes')} "
                "Or name a model of the catalog."
            )
        transformers: Any = importlib.import_module("transformers")
        try:
            config = transformers.AutoConfig.from_pretrained(str(file))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is no configuration of transformers: {error}. Correct the file.") from error
        return self._of_transformers(config, file.parent.resolve().name if path.is_dir() else file.stem, str(file))

    def _of_transformers(self, config: Any, name: str, source: str) -> ModelDescription:
        """Describe the model of a configuration of transformers, which `source` states."""
        self._check_seq_len(is_needed=True)
        transformers: Any = importlib.import_module("transformers")
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and self.seq_len > positions:
            raise ConfigError(
                f"`--seq-len {self.seq_len}` is longer than the {positions} positions (`max_position_embeddings`) of "
                f"{source}. Use at most {positions}, or change its configuration."
            )
        names = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, name)]
        with torch.device("meta"):
            if names:
                model = getattr(transformers, names[0])(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config)
        example = {"input_ids": torch.zeros(1, self.seq_len, dtype=torch.int64)}
        return self._trace(model, TraceInput(name=name, example=example, tokens_per_sample=self.seq_len))

    def _of_factory(self) -> ModelDescription:
        """Describe the module that a function builds."""
        module_name, _, name = self.text.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # an import inside the module
            raise ConfigError(
                f"`--model {self.text}`: there is no module `{module_name}` here. Run the command in the folder that "
                "holds it, or install it."
            ) from error
        factory = getattr(module, name, None)
        if not callable(factory):
            functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(
                f"`--model {self.text}`: {module_name} has no function `{name}`.{nearest(name, functions)}"
            )
        takes_length = "seq_len" in inspect.signature(factory).parameters
        self._check_seq_len(is_needed=takes_length)
        with torch.device("meta"):
            built = factory(seq_len=self.seq_len) if takes_length else factory()
        if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
            raise ConfigError(
                f"`{self.text}` returned {type(built).__name__}, not `(module, example)`. Return the module, and the "
                "keyword arguments of its forward for one sample."
            )
        model, example = built
        if isinstance(example, Mapping):
            example = TraceInput(name=name, example=example, tokens_per_sample=self.seq_len or 1)
        if not isinstance(example, TraceInput):
            raise ConfigError(
                f"`{self.text}` returned {type(example).__name__} beside its module. Return keyword arguments of the "
                "forward as a dict, or a `TraceInput`."
            )
        return self._trace(model, example)

    def _trace(self, model: nn.Module, traced: TraceInput) -> ModelDescription:
        """Trace a module in training mode and in the dtype of the computation."""
        example = tree_map(self._cast, dict(traced.example))
        return trace_model(model.to(self.dtype).train(), dataclasses.replace(traced, example=example))

    def _cast(self, value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_floating else value


def known_names() -> set[str]:
    """Names of models of the catalog and of recipes."""
    return {*model_names(), *recipe_names()}


def recipe_model(name: str, seq_len: int) -> tuple[nn.Module, TraceInput]:
    """The model of a recipe on the meta device, and an example.

    Args:
        name: Name of the recipe.
        seq_len: Tokens of a sample; 0 for those of the recipe.

    Raises:
        ConfigError: What the recipes need is not installed.
    """
    try:
        recipes: Any = importlib.import_module(f"{recipes_package()}.plan_advice")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`{name}` is a recipe, which needs `{error.name}`, and that is not installed. {install_advice('recipes')}"
        ) from error
    model: tuple[nn.Module, TraceInput] = recipes.named_model(name, seq_len)
    return model


def transformers_config(name: str) -> Any:
    """The configuration of a model that transformers knows, from its cache or the hub, or of a folder.

    The hub is asked once whether it has the model: transformers would ask six times, for half a minute.

    Raises:
        ConfigError: transformers knows no such model.
    """
    transformers: Any = importlib.import_module("transformers")
    hub: Any = importlib.import_module("huggingface_hub")
    is_slip = bool(difflib.get_close_matches(name.lower(), known_names(), cutoff=0.85))
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        if is_slip or Path(name).exists():
            reason = nearest(name, known_names()) if is_slip else f" {' '.join(str(error).split())}"
            raise ConfigError(f"`{name}` is not a model of transformers, nor of the catalog.{reason}") from error
    try:
        hub.HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
        return transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # of the hub, which names no common class, or of its HTTP client
        raise ConfigError(
            f"`{name}` is not a model of the catalog, nor a recipe, nor in transformers' cache, and the hub has no "
            f"configuration of it or was not reached: {' '.join(str(error).split())}. Correct the name, or download "
            f"the model's config.json and name its folder.{nearest(name, known_names())}"
        ) from error
