"""Plain data parallel training with Lightning: `python lightning_ddp.py`."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    """Predicts every token from itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 64))

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self.layers(tokens).flatten(0, 1), tokens.flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
model = Model()
data = DataLoader(TensorDataset(torch.randint(64, (40, 8))), batch_size=1)
trainer = Trainer(
    strategy="ddp",
    accelerator="cpu",
    devices=2,
    max_epochs=1,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, data)
print(f"rank {trainer.global_rank}: loss {trainer.callback_metrics['loss']:.4f}")
