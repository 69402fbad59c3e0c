"""Hidden tokens: the rule of BERT, and the same masks on any number of ranks."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.batch import BatchPlan
from recipes.data.config import DataConfig
from recipes.data.hashing import draws, keys_of, uniform
from recipes.data.loaders import TrainLoader, ValidationLoader
from recipes.data.masking import IGNORED_LABEL, Masker
from recipes.data.prepare import PreparedData, prepare
from recipes.data.samples import MaskedSamples, SampleIds
from recipes.data.stream import TokenStream
from recipes.data.tokenizer import (
    SpecialTokens,
    TokenizerRequest,
    load_tokenizer,
    special_tokens,
    train_tokenizer,
    vocabulary_size,
)
from recipes.errors import RecipeError
from tests.recipes.hub_layout import texts

PAD, FIRST, SEP, MASK = 0, 1, 2, 3
SPECIAL = SpecialTokens(end=SEP, first=FIRST, mask=MASK, ids=(PAD, FIRST, SEP, MASK))
VOCAB = 50


def masker(num_targets: int = 5) -> Masker:
    return Masker(mask=MASK, special_ids=SPECIAL.ids, vocab_size=VOCAB, num_targets=num_targets)


def rows(num_rows: int, columns: int = 32) -> np.ndarray:
    """Tokens with a special one in every eighth place."""
    tokens = np.random.default_rng(0).integers(4, VOCAB, (num_rows, columns))
    tokens[:, ::8] = SEP
    return tokens


def keys(num_rows: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    counter = np.arange(num_rows)
    return keys_of([np.full_like(counter, seed), np.full_like(counter, epoch), counter])


def samples(num_tokens: int = 401, sequence_length: int = 16) -> MaskedSamples:
    tokens = np.random.default_rng(1).integers(4, VOCAB, num_tokens).astype(np.uint16)
    tokens[::9] = SEP
    return MaskedSamples(
        TokenStream([tokens[:100], tokens[100:]]),
        sequence_length=sequence_length,
        name="m",
        special=SPECIAL,
        vocab_size=VOCAB,
        mask_share=0.15,
    )


# The rule


def test_every_row_has_the_same_number_of_targets():
    labels = masker(5)(rows(500), keys(500)).labels
    assert ((labels != IGNORED_LABEL).sum(axis=1) == 5).all()


def test_special_tokens_are_never_hidden_and_never_drawn():
    tokens = rows(2000)
    masked = masker(20)(tokens, keys(2000))
    is_special = np.isin(tokens, SPECIAL.ids)
    assert (masked.labels[is_special] == IGNORED_LABEL).all()
    assert (masked.inputs[is_special] == tokens[is_special]).all()
    replaced = masked.inputs[(masked.inputs != tokens) & (masked.inputs != MASK)]
    assert len(replaced) > 1000
    assert not np.isin(replaced, SPECIAL.ids).any()


def test_labels_are_the_tokens_that_were_there():
    tokens = rows(100)
    masked = masker()(tokens, keys(100))
    is_target = masked.labels != IGNORED_LABEL
    assert (masked.labels[is_target] == tokens[is_target]).all()
    assert (masked.inputs[~is_target] == tokens[~is_target]).all()


def test_of_the_targets_eight_tenths_are_masked_and_one_is_random():
    tokens = rows(4000)
    masked = masker(5)(tokens, keys(4000))
    is_target = masked.labels != IGNORED_LABEL
    shares = {
        "mask": (masked.inputs[is_target] == MASK).mean(),
        "same": (masked.inputs[is_target] == tokens[is_target]).mean(),
    }
    ordinary = VOCAB - len(SPECIAL.ids)
    assert shares["mask"] == pytest.approx(0.8, abs=0.01)
    assert shares["same"] == pytest.approx(0.1 + 0.1 / ordinary, abs=0.01)


def test_every_place_and_every_random_token_is_chosen_equally_often():
    tokens = np.full((6000, 16), 10)
    masked = masker(4)(tokens, keys(6000))
    places = (masked.labels != IGNORED_LABEL).sum(axis=0)
    assert places.min() > 1300  # 1500 each
    assert places.max() < 1700
    drawn = Counter(masked.inputs[(masked.inputs != MASK) & (masked.inputs != 10)].tolist())
    assert set(drawn) == set(range(4, VOCAB)) - {10}
    assert max(drawn.values()) < 2 * min(drawn.values())


def test_a_row_with_few_ordinary_tokens_hides_them_all():
    tokens = np.full((1, 16), SEP)
    tokens[0, 3:5] = 7
    assert (masker(5)(tokens, keys(1)).labels != IGNORED_LABEL).sum() == 2


def test_masks_differ_by_seed_epoch_and_sample():
    tokens = np.full((1, 64), 10)
    labels = [
        masker(9)(tokens, keys_of([np.array([seed]), np.array([epoch]), np.array([sample])])).labels.tobytes()
        for seed in range(3)
        for epoch in range(3)
        for sample in range(3)
    ]
    assert len(set(labels)) == 27


def test_masks_are_the_same_on_every_machine():
    masked = masker(3)(np.arange(4, 20)[None, :], keys(1, seed=5, epoch=2))
    changed = np.flatnonzero(masked.inputs[0] != np.arange(4, 20)).tolist()
    targets = np.flatnonzero(masked.labels[0] != IGNORED_LABEL).tolist()
    assert (targets, changed, masked.inputs[0, changed].tolist()) == ([4, 12, 13], [12], [3])


def test_draws_are_uniform_and_independent_of_the_purpose():
    bits = draws(keys(100), 200, 0)
    values = uniform(bits)
    assert values.mean() == pytest.approx(0.5, abs=0.01)
    assert values.var() == pytest.approx(1 / 12, abs=0.002)
    other = uniform(draws(keys(100), 200, 1))
    assert abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.02


# Sequences


def test_a_sequence_is_packed_between_its_first_and_last_token():
    store = samples()
    ids = SampleIds(indices=np.array([3, 0, 27]), epochs=np.zeros(3, np.int64), seed=1)
    batch = store.read(ids)
    assert store.num_samples == 401 // 14
    original = torch.where(batch["labels"] == IGNORED_LABEL, batch["input_ids"], batch["labels"]).numpy()
    stream = np.concatenate(store.tokens.arrays)
    for row, index in zip(original, (3, 0, 27), strict=True):
        assert row.tolist() == [FIRST, *stream[index * 14 : index * 14 + 14].tolist(), SEP]
    assert PAD not in batch["input_ids"]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def global_batches(world_size: int, micro_size: int) -> list[list[bytes]]:
    """Inputs and labels of every sequence of four optimizer steps, over several epochs."""
    plan = BatchPlan(global_size=12, micro_size=micro_size, world_size=world_size, sequence_length=16)
    ranks = [TrainLoader(samples(), plan, rank, num_steps=4, seed=3) for rank in range(world_size)]
    sequences = []
    for row in zip(*ranks, strict=True):
        pairs = torch.cat([torch.stack([batch["input_ids"], batch["labels"]], dim=1) for batch in row])
        sequences += [pair.numpy().tobytes() for pair in pairs]
    return [sequences[step * 12 : step * 12 + 12] for step in range(4)]


@pytest.mark.parametrize(("world_size", "micro_size"), [(2, 3), (4, 1), (3, 2), (12, 1)])
def test_masked_global_batches_do_not_depend_on_ranks_or_micro_batches(world_size: int, micro_size: int):
    assert global_batches(world_size, micro_size) == global_batches(1, 12)


def test_a_sequence_is_masked_anew_in_each_epoch():
    store = samples()
    read = [store.read(SampleIds(indices=np.array([4]), epochs=np.array([e]), seed=3))["labels"] for e in (0, 1)]
    assert not torch.equal(*read)


def test_validation_masks_are_the_same_in_each_pass():
    plan = BatchPlan(global_size=4, micro_size=2, world_size=2, sequence_length=16)
    loader = ValidationLoader(samples(), plan, rank=1, num_samples=11)
    first, second = list(loader), list(loader)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, second, strict=True))


def test_sequences_without_room_for_a_token_are_refused():
    with pytest.raises(RecipeError, match=r"sequence_length=2.*at least 3"):
        samples(sequence_length=2)


# Tokenizers


def test_a_trained_tokenizer_of_a_masked_model_has_its_special_tokens():
    tokenizer = train_tokenizer(["a b c"] * 10, 300, "masked")
    special = special_tokens(tokenizer, "masked")
    assert (special.first, special.end, special.mask) == (1, 2, 3)
    assert [tokenizer.id_to_token(index) for index in special.ids] == ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]


def test_a_vocabulary_without_room_for_the_special_tokens_is_refused():
    with pytest.raises(RecipeError, match=r"vocab_size=259.*\[MASK\].*at least 260"):
        train_tokenizer(["a"], 259, "masked")


@pytest.fixture
def masked_data(cache_dir: Path) -> PreparedData:
    config = DataConfig(source="grammar", grammar_documents=200, sequence_length=32, cache_dir=str(cache_dir))
    return prepare(config, 400, "masked")


def test_prepared_text_of_a_masked_model(masked_data: PreparedData):
    ids = SampleIds(indices=np.arange(8), epochs=np.zeros(8, np.int64), seed=0)
    batch = masked_data.train.read(ids)
    assert (batch["input_ids"][:, 0] == 1).all()
    assert (batch["input_ids"][:, -1] == 2).all()
    assert ((batch["labels"] != IGNORED_LABEL).sum(dim=1) == round(0.15 * 32)).all()
    assert masked_data.train.fingerprint.endswith("-s32-mask0.15")


def test_causal_and_masked_stores_are_different_stores(masked_data: PreparedData, cache_dir: Path):
    config = DataConfig(source="grammar", grammar_documents=200, sequence_length=32, cache_dir=str(cache_dir))
    assert prepare(config, 400).folder != masked_data.folder


def test_a_tokenizer_file_and_its_folder_give_the_same_tokens(tmp_path: Path, cache_dir: Path):
    train_tokenizer(["the king and the queen"] * 20, 320).save(str(tmp_path / "tokenizer.json"))
    options = {"source": "grammar", "grammar_documents": 50, "cache_dir": str(cache_dir), "validation_share": 0.2}
    prepared = [
        prepare(DataConfig(**options, tokenizer=str(path)), 400) for path in (tmp_path, tmp_path / "tokenizer.json")
    ]
    assert prepared[0].folder == prepared[1].folder
    assert vocabulary_size(prepared[0].tokenizer) <= 320


def identify_and_load(request: TokenizerRequest) -> None:
    assert request.identity
    load_tokenizer(request)


@pytest.mark.parametrize(
    ("name", "objective", "message"),
    [
        ("folder/none.json", "causal", r"data.tokenizer=.*none.json. has no file"),
        ("folder", "causal", r"has no file .*folder/tokenizer.json"),
        ("causal.json", "masked", r"neither \(\[CLS\], \[SEP\], \[MASK\]\) or \(<s>, </s>, <mask>\)"),
        ("masked.json", "causal", r"none of <\|endoftext\|>"),
        ("large.json", "causal", r"tokens up to 319, .model.vocab_size=310. has rows up to 309.*vocab_size=320"),
    ],
    ids=["no-file", "no-file-in-folder", "no-mask", "no-end", "too-large"],
)
def test_tokenizers_that_do_not_fit_are_refused(name: str, objective: str, message: str, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    text = texts(40)
    train_tokenizer(text, 300).save(str(tmp_path / "causal.json"))
    train_tokenizer(text, 300, "masked").save(str(tmp_path / "masked.json"))
    train_tokenizer(text, 320).save(str(tmp_path / "large.json"))
    request = TokenizerRequest(name=str(tmp_path / name), vocab_size=310, objective=objective)
    with pytest.raises(RecipeError, match=message):
        identify_and_load(request)


def test_a_name_is_looked_up_on_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def refuse(name: str, local_files_only: bool) -> None:
        asked.append(local_files_only)
        raise OSError(f"{name} is not cached")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    request = TokenizerRequest(name="someone/something", vocab_size=310, objective="causal")
    with pytest.raises(RecipeError, match=r"someone/something. is neither a file.*data.download=true.*hf download"):
        load_tokenizer(request)
    assert asked == [True]


def test_a_folder_of_transformers_gives_its_tokens(tmp_path: Path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    trained = train_tokenizer(["the king and the queen"] * 20, 300, "masked")
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=trained, model_max_length=8, **names).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).mask_token_id == 3
    loaded = load_tokenizer(TokenizerRequest(name=str(tmp_path), vocab_size=300, objective="masked"))
    text = "the king and the queen " * 20
    assert loaded.encode(text).ids == trained.encode(text).ids
    assert json.loads(loaded.to_str())["truncation"] is None
