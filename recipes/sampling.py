"""What does the trained model write?"""

import torch
from lightning.pytorch import LightningModule, Trainer
from tokenizers import Tokenizer

from .config import SampleConfig


@torch.no_grad()
def write_sample(
    trainer: Trainer, module: LightningModule, tokenizer: Tokenizer, config: SampleConfig, *, max_context: int
) -> str:
    """Continue a prompt, one token after another. Call it on all ranks, while the strategy is set up.

    The forward of a sharded model is collective, so every rank runs the same number of forwards on the same
    tokens; for this reason there is no early stop at the end of a text either.

    Args:
        trainer: gives precision and device.
        module: called with tokens [1, S], returns logits [1, S, V].
        tokenizer: of the training data.
        config: prompt, length, temperature.
        max_context: longest context the model was trained on.

    Returns:
        Prompt and continuation, the same on every rank.

    Cost:
        `config.num_tokens` forwards of one sequence, without a cache.
    """
    tokens = tokenizer.encode(config.prompt, add_special_tokens=False).ids
    length = len(tokens) + config.num_tokens
    source = torch.Generator().manual_seed(0)
    was_training = module.training
    module.eval()
    while len(tokens) < length:
        context = tokens[-max_context:]
        with trainer.precision_plugin.forward_context():
            logits = module(torch.tensor([context], device=trainer.strategy.root_device))
        choice = _choose(logits[0, -1].float().cpu()[: tokenizer.get_vocab_size()], config.temperature, source)
        tokens.append(trainer.strategy.broadcast(choice))
    module.train(was_training)
    return tokenizer.decode(tokens, skip_special_tokens=False)


def _choose(logits: torch.Tensor, temperature: float, source: torch.Generator) -> int:
    """Draw one token from logits [V], or take the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=source))
