"""Scripts that know nothing of MiCS, in the idioms of ``nlp_example.py`` and Hugging Face's ``*_no_trainer.py``.

Written anew, with toy data in place of downloads. The main process prints losses and metrics; both save what
`from_pretrained` loads.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    get_linear_schedule_with_warmup,
    get_scheduler,
)

VOCABULARY = 32


def write_pretrained(folder: Path) -> None:
    """A model with dropout, without a head."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(3)
    BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes)).save_pretrained(folder)


def rows(count: int, first: int) -> list[dict[str, Any]]:
    """Tokenized texts of different lengths, padded, with a class."""
    generator = torch.Generator().manual_seed(first)
    tokens = torch.randint(1, VOCABULARY, (count, 8), generator=generator)
    lengths = torch.randint(4, 9, (count, 1), generator=generator)
    mask = (torch.arange(8) < lengths).long()
    return [
        {"input_ids": row * kept, "attention_mask": kept, "labels": int(row[0]) % 2}
        for row, kept in zip(tokens, mask, strict=True)
    ]


def collated(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch."""
    return {name: torch.stack([torch.as_tensor(each[name]) for each in samples]) for name in samples[0]}


def masked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch in which tokens are masked at random."""
    batch = collated(samples)
    is_masked = torch.rand(batch["input_ids"].shape) < 0.3
    batch["labels"] = torch.where(is_masked, batch["input_ids"], -100)
    batch["input_ids"] = batch["input_ids"].masked_fill(is_masked, 0)
    return batch


def save(accelerator: Accelerator, model: Any, args: argparse.Namespace, seen: list[float]) -> None:
    """The last lines of every ``*_no_trainer.py``."""
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        with open(Path(args.output_dir) / "all_results.json", "w") as f:
            json.dump({"class": type(accelerator).__name__, "seen": seen}, f)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def nlp_example(args: argparse.Namespace) -> None:
    """Classification, with the model moved to the device before `prepare`."""
    accelerator = Accelerator()
    set_seed(42)
    with accelerator.main_process_first():
        train, evaluated = rows(24, 0), rows(7, 1)
    train_dataloader = DataLoader(train, shuffle=True, collate_fn=collated, batch_size=2)
    eval_dataloader = DataLoader(evaluated, shuffle=False, collate_fn=collated, batch_size=2)
    model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, return_dict=True)
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2, eps=1e-4)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=12)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    seen = []
    for _ in range(2):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            loss = model(**batch).loss / 2
            accelerator.backward(loss)
            if step % 2 == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            seen.append(accelerator.gather(loss.detach()).mean().item())
        model.eval()
        right = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
            right += (predictions == references).tolist()
        assert len(right) == 7
        seen.append(sum(right) / len(right))
        accelerator.print(f"accuracy {seen[-1]}")
    save(accelerator, model, args, seen)


def no_trainer(args: argparse.Namespace) -> None:
    """Masked language modelling with accumulation, weight decay by name, checkpoints and perplexity."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(7)
    model = AutoModelForMaskedLM.from_pretrained(args.model_name_or_path)
    if model.get_input_embeddings().weight.shape[0] < VOCABULARY:
        model.resize_token_embeddings(VOCABULARY)
    train_dataloader = DataLoader(rows(22, 2), shuffle=True, collate_fn=masked, batch_size=2)
    eval_dataloader = DataLoader(rows(7, 3), collate_fn=masked, batch_size=2)
    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay) == is_bare],
            "weight_decay": 0.0 if is_bare else 0.1,
        }
        for is_bare in (False, True)
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=1e-2, eps=1e-4)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        name="linear",
        optimizer=optimizer,
        num_warmup_steps=accelerator.num_processes,
        num_training_steps=2 * num_update_steps_per_epoch,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    seen = []
    for epoch in range(2):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                seen.append(accelerator.gather(loss.detach()).mean().item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(2)))
        seen.append(math.exp(torch.cat(losses).mean()))
        accelerator.save_state(str(Path(args.output_dir) / f"epoch_{epoch}"))
    save(accelerator, model, args, seen)


SCRIPTS = {"nlp_example": nlp_example, "no_trainer": no_trainer}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=[*SCRIPTS])
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--output_dir", required=True)
    args = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()  # no report of the head that is not in the files
    SCRIPTS[args.script](args)


if __name__ == "__main__":
    main()
