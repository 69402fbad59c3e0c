"""Plain data parallel training with transformers: `accelerate launch --num_processes 2 trainer_ddp.py`."""

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.set_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
tokens = torch.randint(64, (40, 8), generator=torch.Generator().manual_seed(0))
arguments = TrainingArguments(
    output_dir="trainer",
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=8,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"rank {arguments.process_index}: loss {float(losses[-1]):.4f}")
