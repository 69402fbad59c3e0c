"""Trained text models as folders that transformers reads: `python -m recipes.hf_export RUN_FOLDER FOLDER`.

A folder has config.json, safetensors files and the tokenizer. `AutoModelForCausalLM.from_pretrained` (for BERT and
RoBERTa, `AutoModelForMaskedLM`) returns a model whose logits are those of the trained one, to the bit.

1. The model is built on the meta device; its configuration gets the special tokens of the tokenizer.
2. Weights come from the ranks at the end of a run, from a full checkpoint (both in the memory of one process), or from
   a sharded checkpoint (one tensor at a time).
3. RoBERTa's rows of positions are moved: transformers derives positions from the padding token. In training every token
   has a position.
"""

import copy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PretrainedConfig

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.export import Export, export_safetensors
from mics_strategy.checkpoint.safe_reader import SafeReader
from mics_strategy.checkpoint.state import MODEL
from mics_strategy.errors import MiCSError, command_error

from .config import Recipe, load_recipe
from .errors import RecipeError
from .hf_tokenizer import ExportedTokenizer, exported_tokenizer
from .models.build import build_model

TOKENIZER = "tokenizer.json"
_FIRST_TRAINED_ROW = 2  # of the table of positions, of the families that number them after a padding token
_WRAPPERS = ("", "model.", "module.", "model.module.")  # what frameworks put before the names of a model


class HFExport:
    """Export at the end of a run, to the folder `hf` of its output folder.

    Args:
        recipe: The resolved recipe, of a text family.
        tokenizer: Tokenizer of the training data.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.folder = Path(recipe.trainer.output_dir) / "hf"

    def write(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the trained model on the first rank. Collective.

        Cost:
            Memory: the whole model on the CPU of the first rank.
        """
        sharded = getattr(trainer.strategy, "sharded", None)
        weights = module.state_dict() if sharded is None else sharded.full_state_dict()
        if trainer.is_global_zero:
            _clear(self.folder)
            export_weights(self.recipe, weights, self.tokenizer, self.folder)


def export_weights(recipe: Recipe, weights: dict[str, torch.Tensor], tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers reads, from weights in memory.

    Args:
        recipe: The resolved recipe.
        weights: State dict of the model, also with the prefix of a module that holds it.
        tokenizer: Tokenizer of the training data.
        folder: New or empty folder.

    Raises:
        RecipeError: The family is not one of transformers, or the names are not those of the model.
    """
    shell, tokens = _shell(recipe), exported_tokenizer(tokenizer, recipe)
    prefix = _prefix({name: value.shape for name, value in weights.items()}, shell)
    named = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    named = {name: value for name, value in named.items() if name in shell.state_dict()}
    table = _position_table(shell)
    if table:
        named[table] = _moved_rows(named[table], tokens.padding_id)
    dtype = next(iter(named.values())).dtype
    shell.config = _config(shell, tokens, dtype)
    shell.to(dtype).save_pretrained(folder, state_dict=named)
    tokens.save(folder)


def export_checkpoint(recipe: Recipe, checkpoint: Path, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers reads, from a full or a sharded checkpoint of a run.

    Args:
        recipe: The resolved recipe of the run.
        checkpoint: A file, or the folder of a sharded checkpoint.
        tokenizer: Tokenizer of the training data.
        folder: New or empty folder.

    Raises:
        RecipeError: The family is not one of transformers, or the checkpoint is of another model.
        CheckpointError: A sharded checkpoint is damaged.
    """
    if checkpoint.is_dir():
        _export_sharded(recipe, checkpoint, tokenizer, folder)
        return
    saved = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    export_weights(recipe, saved["state_dict"], tokenizer, folder)


def _export_sharded(recipe: Recipe, checkpoint: Path, tokenizer: Tokenizer, folder: Path) -> None:
    shell, tokens = _shell(recipe), exported_tokenizer(tokenizer, recipe)
    saved = SafeReader(checkpoint).read_metadata().state_dict_metadata
    dtypes = {name.removeprefix(f"{MODEL}."): entry for name, entry in saved.items() if name.startswith(f"{MODEL}.")}
    prefix = _prefix({name: entry.size for name, entry in dtypes.items() if hasattr(entry, "size")}, shell)
    first: Any = dtypes[prefix + next(iter(shell.state_dict()))]
    with tempfile.TemporaryDirectory() as settings:
        shell.config = _config(shell, tokens, first.properties.dtype)
        shell.config.architectures = [type(shell).__name__]
        shell.config.save_pretrained(settings)
        if shell.can_generate():
            shell.generation_config.save_pretrained(settings)
        tokens.save(Path(settings))
        files = export_safetensors(checkpoint, Export(folder=folder, prefix=prefix, config=Path(settings)))
    table = _position_table(shell)
    for file in files if table else ():
        with safe_open(file, "pt") as opened:
            has_table = table in opened.keys()
        if has_table:
            named = load_file(file)
            named[table] = _moved_rows(named[table], tokens.padding_id)
            save_file(named, file, {"format": "pt"})


def check_exportable(recipe: Recipe) -> None:
    """Refuse families that transformers does not have.

    Raises:
        RecipeError: It is such a family.
    """
    if recipe.model.reads_images:
        raise RecipeError(
            f"`model.family={recipe.model.family}` was to be exported for transformers, which does not have it. Use "
            "`mics export CHECKPOINT FOLDER --prefix model.` for safetensors files of a sharded checkpoint, or "
            '`torch.load(CHECKPOINT)["state_dict"]` of a full one, and `recipes.models.build.build_model`.'
        )


def _shell(recipe: Recipe) -> Any:
    check_exportable(recipe)
    plain = replace(recipe.model, compile="none", activation_checkpointing=False)
    with torch.device("meta"):
        return build_model(plain, recipe.sample_size)


def _config(shell: Any, tokens: ExportedTokenizer, dtype: torch.dtype) -> PretrainedConfig:
    config = copy.deepcopy(shell.config)
    config.dtype = dtype
    config.bos_token_id, config.eos_token_id = tokens.first_id, tokens.end_id
    if shell.can_generate():
        config.use_cache = True
        generation = shell.generation_config
        generation.bos_token_id, generation.eos_token_id, generation.use_cache = tokens.first_id, tokens.end_id, True
    else:
        config.pad_token_id = tokens.padding_id
    if _position_table(shell):
        config.max_position_embeddings += tokens.padding_id + 1 - _FIRST_TRAINED_ROW
    return config


def _position_table(shell: Any) -> str:
    """Return the name of the table whose rows follow the padding token; empty for families without one."""
    is_numbered = shell.config.model_type.startswith("roberta")
    return f"{shell.base_model_prefix}.embeddings.position_embeddings.weight" if is_numbered else ""


def _moved_rows(table: torch.Tensor, padding_id: int) -> torch.Tensor:
    """Return the table whose first trained row follows the row of the padding token; the rows before are 0."""
    return torch.cat([table.new_zeros(padding_id + 1, table.shape[1]), table[_FIRST_TRAINED_ROW:]])


def _prefix(saved: Mapping[str, Sequence[int]], shell: Any) -> str:
    """Return what is before the names of the model.

    Args:
        saved: Shapes of the weights by name.
        shell: The model.

    Raises:
        RecipeError: Names or shapes are of another model.
    """
    needed = shell.state_dict()
    for prefix in _WRAPPERS:
        if all(prefix + name in saved for name in needed):
            for name, value in needed.items():
                if (found := (*saved[prefix + name],)) != (*value.shape,):
                    raise RecipeError(
                        f"The weights to export were to be those of the recipe, but `{name}` has the shape {found}, "
                        f"not {(*value.shape,)}. Use the config.yaml of the run that wrote them."
                    )
            return prefix
    missing = next(name for name in needed if not any(prefix + name in saved for prefix in _WRAPPERS))
    raise RecipeError(
        f"The weights to export were to be those of the recipe, but have no `{missing}`; they have "
        f"{', '.join(sorted(saved)[:3])}, ... Use the config.yaml of the run that wrote them."
    )


def _clear(folder: Path) -> None:
    """Delete the files of an earlier export of this run."""
    for file in folder.glob("*") if folder.is_dir() else ():
        if file.is_file():
            file.unlink()


def newest_checkpoint(run_folder: Path) -> Path:
    """Return the newest whole checkpoint of a run.

    Raises:
        RecipeError: There is none.
    """
    folder = run_folder / "checkpoints"
    whole = [path for path in folder.glob("step=*") if path.is_file() or atomic.is_checkpoint(path)]
    if not whole:
        raise RecipeError(
            f"{folder} has no checkpoint to export. Name the output folder of a run with "
            "`trainer.checkpoint_every_steps`, or a checkpoint after it, or train with `--trainer.export_hf=true`."
        )
    return max(whole, key=lambda path: int(path.stem.removeprefix("step=")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Export the newest checkpoint of a run, or a given one; what a user can repair ends it with one line.

    Args:
        arguments: `RUN_FOLDER FOLDER [CHECKPOINT]`; default: those of the process.
    """
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if len(given) not in (2, 3) or given[0].startswith("-"):
        sys.exit("usage: mics export-hf RUN_FOLDER FOLDER [CHECKPOINT]")
    run_folder, folder = Path(given[0]), Path(given[1])
    try:
        for file in (run_folder / "config.yaml", *(Path(text) for text in given[2:])):
            if not file.exists():
                raise RecipeError(f"{file} does not exist. Name the output folder of a run, and a checkpoint of it.")
        recipe = load_recipe([f"--config={run_folder / 'config.yaml'}"], has_cuda=False)
        check_exportable(recipe)
        if not (run_folder / TOKENIZER).is_file():
            raise RecipeError(f"{run_folder / TOKENIZER} does not exist. Copy the one of the data's folder there.")
        if folder.exists() and any(folder.iterdir()):
            raise RecipeError(f"The export was to be written to {folder}, which is not empty. Choose a new folder.")
        checkpoint = Path(given[2]) if given[2:] else newest_checkpoint(run_folder)
        export_checkpoint(recipe, checkpoint, Tokenizer.from_file(str(run_folder / TOKENIZER)), folder)
    except (MiCSError, OSError) as error:
        sys.exit(command_error("export-hf", error))
    print(f"{folder} has the weights of {checkpoint}")


if __name__ == "__main__":
    main()
