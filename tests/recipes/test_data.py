"""The same text, tokens and batches everywhere, and an exact continuation."""

import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.batch import BatchPlan
from recipes.config import DataConfig
from recipes.data.grammar import GrammarSource
from recipes.data.loaders import TrainLoader, ValidationLoader, samples_at
from recipes.data.local_docs import LocalDocsSource, prose_paragraphs, read_docs_below, read_local_docs, versions_key
from recipes.data.masking import IGNORED_LABEL
from recipes.data.permutation import Permutation
from recipes.data.prepare import PreparedData, prepare
from recipes.data.samples import NextTokenSamples, SampleIds
from recipes.data.source import Document, TextPart, held_out
from recipes.data.stream import TokenStream
from recipes.data.tokenizer import END_OF_TEXT, encode_documents, special_tokens, token_dtype, train_tokenizer
from recipes.errors import RecipeError

AWKWARD = ["", " ", "naïve café — 数据 🙂", "tabs\tand\nlines\r\n", "  two  spaces ", "x" * 500]


def sentences(num_documents: int, seed: int = 0) -> list[str]:
    return [document.text for document in grammar(num_documents, seed)]


def grammar(num_documents: int, seed: int = 0) -> list[Document]:
    source = GrammarSource(num_documents=num_documents, seed=seed)
    return [document for part in source.parts() for document in source.read(part)]


def store(num_samples: int = 50, sequence_length: int = 4, name: str = "f") -> NextTokenSamples:
    tokens = np.arange(num_samples * sequence_length + 1, dtype=np.uint32)
    cuts = (0, 7, 7, 30, 31, len(tokens))  # parts end inside sequences, one is empty, one is shorter than a sequence
    stream = TokenStream([tokens[start:end] for start, end in pairwise(cuts)])
    return NextTokenSamples(tokens=stream, sequence_length=sequence_length, name=name)


def ids(indices: list[int]) -> SampleIds:
    return SampleIds(indices=np.array(indices), epochs=np.zeros(len(indices), np.int64), seed=0)


def loader(world_size: int, rank: int, micro_size: int = 2, num_steps: int = 6, **options: object) -> TrainLoader:
    plan = BatchPlan(global_size=24, micro_size=micro_size, world_size=world_size, sequence_length=4)
    return TrainLoader(options.pop("store", store()), plan, rank, num_steps, seed=options.pop("seed", 7))


def global_batches(world_size: int, micro_size: int) -> list[list[int]]:
    """The first token of every sequence of each optimizer step, in the order of micro-steps and ranks."""
    ranks = [list(loader(world_size, rank, micro_size)) for rank in range(world_size)]
    micro_steps = [torch.cat([batch["input_ids"][:, 0] for batch in row]) for row in zip(*ranks, strict=True)]
    return torch.cat(micro_steps).reshape(6, 24).tolist()


# Corpora


def test_grammar_is_the_same_text_on_every_machine():
    documents = grammar(2000)
    assert zlib.crc32("\n".join(document.text for document in documents).encode()) == 1056527502
    assert sum(document.information_nats for document in documents) == pytest.approx(221554.47, abs=0.01)


def test_grammar_depends_on_its_seed():
    assert sentences(3, seed=0) != sentences(3, seed=1)


def test_prose_keeps_english_and_drops_code_tables_and_lists():
    text = """Return the lines of a file, each with its line number.

    >>> for line in lines("a.txt"): print(line)

    Args:
        path: the file that shall be read, as a string or as a path object.

    ======  ======
    column  column

    The ``path`` may be :class:`~pathlib.Path` or a string; both
    are opened in the same way.

    short one.
    """
    assert prose_paragraphs(text) == [
        "Return the lines of a file, each with its line number.",
        "The path may be pathlib.Path or a string; both are opened in the same way.",
    ]


def test_docstrings_are_read_without_importing_and_each_text_once(tmp_path: Path):
    prose = "Wait until the lamp is lit and the {} has left the quiet garden."
    files = {
        "a.py": f'"""{prose.format("king")}"""\nraise SystemExit("imported")\n',
        "b.py": f'def f():\n    """{prose.format("queen")}\n\n    {prose.format("king")}"""\n',
        "broken.py": f'"""{prose.format("miller")}""" def',
        "tests/c.py": f'"""{prose.format("sailor")}"""\n',
        "d.txt": f'"""{prose.format("farmer")}"""\n',
    }
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert read_docs_below([tmp_path]) == [prose.format("king"), prose.format("queen")]


@pytest.mark.slow
def test_this_machine_holds_enough_english_for_the_demonstration():
    source = LocalDocsSource(packages=("iniconfig",))
    assert sum(len(document.text.encode()) for document in source.read(TextPart(name="all"))) > 400_000
    assert "iniconfig" in source.origin
    assert "iniconfig-" in versions_key(["iniconfig"])


def test_a_missing_package_is_named_before_anything_is_read():
    with pytest.raises(RecipeError, match=r"no_such_package.*not installed.*Install"):
        read_local_docs(["no_such_package"])


def test_documents_are_held_out_by_their_text_alone():
    documents = [f"document {index}" for index in range(4000)]
    chosen = [document for document in documents if held_out(document, 0.05)]
    assert 150 < len(chosen) < 250
    assert set(chosen) <= {document for document in documents if held_out(document, 0.1)}


# Tokenizer


@pytest.mark.parametrize("text", AWKWARD, ids=range(len(AWKWARD)))
def test_the_tokenizer_gives_every_text_back(text: str):
    tokenizer = train_tokenizer(sentences(20), 300)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_training_a_tokenizer_twice_gives_the_same_tokens():
    documents = sentences(50)
    first, second = train_tokenizer(documents, 400), train_tokenizer(documents, 400)
    assert first.get_vocab() == second.get_vocab()
    assert first.get_vocab_size() == 400


def test_every_document_ends_with_the_end_of_text():
    documents = ["a b", "c"]
    tokenizer = train_tokenizer(documents, 300)
    tokens = np.concatenate(list(encode_documents(tokenizer, documents, special_tokens(tokenizer, "causal").end)))
    assert tokens.dtype == token_dtype(tokenizer) == np.uint16
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == f"a b{END_OF_TEXT}c{END_OF_TEXT}"


# Order


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_a_permutation_meets_every_number_once(size: int):
    order = Permutation(size=size, seed=3, epoch=0)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


def test_permutations_differ_by_seed_and_epoch_and_mix():
    size = 10_000
    orders = [
        Permutation(size=size, seed=seed, epoch=epoch)(np.arange(size)) for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert (order == np.arange(size)).sum() < 10
    assert all((a == b).sum() < 10 for a, b in pairwise(orders))


def test_a_permutation_is_the_same_on_every_machine():
    assert Permutation(size=1000, seed=3, epoch=1)(np.arange(5)).tolist() == [866, 584, 374, 425, 706]


def test_each_epoch_reads_every_sequence_once():
    indices = samples_at(np.arange(150), num_samples=50, seed=1).indices.reshape(3, 50)
    assert all(sorted(epoch) == list(range(50)) for epoch in indices.tolist())
    assert len({tuple(epoch) for epoch in indices.tolist()}) == 3


# Loaders


def test_labels_are_the_next_tokens():
    batch = store().read(ids([0, 3]))
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [13, 14, 15, 16]]


@pytest.mark.parametrize(("world_size", "micro_size"), [(2, 2), (3, 4), (4, 6), (12, 1), (24, 1)])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world_size: int, micro_size: int):
    assert global_batches(world_size, micro_size) == global_batches(1, 1)


@pytest.mark.parametrize("stop", [0, 12, 24, 36])
def test_a_loader_resumes_exactly(stop: int):
    whole = [batch["input_ids"].tolist() for batch in loader(2, rank=1)]
    first = loader(2, rank=1)
    batches = iter(first)
    before = [next(batches)["input_ids"].tolist() for _ in range(stop)]
    second = loader(2, rank=1)
    second.load_state_dict(first.state_dict())
    assert before + [batch["input_ids"].tolist() for batch in second] == (
        whole if stop < 36 else whole * 1 + after(whole)
    )


def after(whole: list[object]) -> list[object]:
    """What follows a complete pass: the next pass, over later epochs of the data."""
    following = loader(2, rank=1)
    following.consumed_samples = 6 * 24
    batches = [batch["input_ids"].tolist() for batch in following]
    assert len(batches) == len(whole)
    return batches


def test_a_loader_resumes_on_another_number_of_ranks():
    saved = loader(2, rank=0)
    batches = iter(saved)
    for _ in range(3 * saved.plan.accumulation):
        next(batches)
    ranks = [loader(4, rank) for rank in range(4)]
    for rank in ranks:
        rank.load_state_dict(saved.state_dict())
    rows = zip(*(list(rank) for rank in ranks), strict=True)
    rest = torch.cat([torch.cat([batch["input_ids"][:, 0] for batch in row]) for row in rows])
    assert rest.reshape(3, 24).tolist() == global_batches(1, 1)[3:]


def test_the_state_is_plain_and_the_same_on_all_ranks():
    ranks = [loader(2, rank) for rank in range(2)]
    for rank in ranks:
        next(iter(rank))
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert ranks[0].state_dict() == {"consumed_samples": 4, "seed": 7, "fingerprint": "f-s4"}


@pytest.mark.parametrize("options", [{"store": store(name="g")}, {"seed": 8}], ids=["other-data", "other-order"])
def test_a_loader_refuses_the_state_of_other_data(options: dict[str, object]):
    with pytest.raises(RecipeError, match=r"trained on data f-s4.*Resume with the same corpus"):
        loader(2, rank=0, **options).load_state_dict(loader(2, rank=0).state_dict())


def test_a_loader_refuses_a_state_inside_a_global_batch():
    state = loader(2, rank=0).state_dict() | {"consumed_samples": 28}
    with pytest.raises(RecipeError, match=r"28 samples.*global_size=24"):
        loader(2, rank=0).load_state_dict(state)


@pytest.mark.parametrize(("world_size", "micro_size"), [(1, 1), (2, 4), (3, 2)])
def test_validation_reads_every_sequence_once_in_equally_many_batches(world_size: int, micro_size: int):
    plan = BatchPlan(global_size=24, micro_size=micro_size, world_size=world_size, sequence_length=4)
    ranks = [list(ValidationLoader(store(), plan, rank, num_samples=13)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    labels = torch.cat([batch["labels"] for batches in ranks for batch in batches])
    assert sorted(labels[labels != IGNORED_LABEL].tolist()) == list(range(1, 13 * 4 + 1))


def test_a_corpus_without_a_sequence_is_refused():
    with pytest.raises(RecipeError, match=r"sequence_length=64.*65 tokens or more"):
        NextTokenSamples(tokens=TokenStream([np.zeros(10, np.uint16)]), sequence_length=64, name="f")


# Preparation


def prepared(cache_dir: Path, sequence_length: int = 64) -> PreparedData:
    config = DataConfig(
        source="grammar", grammar_documents=200, sequence_length=sequence_length, cache_dir=str(cache_dir)
    )
    return prepare(config, vocab_size=400)


def test_prepared_data_is_made_once_and_read_as_memory_maps(cache_dir: Path, capsys: pytest.CaptureFixture[str]):
    first = prepared(cache_dir)
    assert "once on this machine" in capsys.readouterr().out
    second = prepared(cache_dir)
    assert capsys.readouterr().out == ""
    assert first.train.fingerprint == second.train.fingerprint
    (first_tokens,), (second_tokens,) = first.train.tokens.arrays, second.train.tokens.arrays
    assert isinstance(second_tokens, np.memmap)
    assert np.array_equal(first_tokens, second_tokens)
    assert 0 < second.floor_nats < 2
    assert 1 < second.bytes_per_token < 5


def test_the_fingerprint_names_data_and_sequence_length(cache_dir: Path):
    assert prepared(cache_dir).train.fingerprint != prepared(cache_dir, 32).train.fingerprint


def test_a_failed_preparation_leaves_nothing_behind(tmp_path: Path):
    config = DataConfig(source="grammar", grammar_documents=2, validation_share=1e-9, cache_dir=str(tmp_path))
    with pytest.raises(RecipeError, match="leaves none for validation"):
        prepare(config, vocab_size=300)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.slow
def test_processes_that_start_together_prepare_once(repository: Path, tmp_path: Path):
    code = (
        "from recipes.config import DataConfig\n"
        "from recipes.data.prepare import prepare\n"
        f"config = DataConfig(source='grammar', grammar_documents=1000, cache_dir={str(tmp_path)!r})\n"
        "print(prepare(config, vocab_size=400).train.fingerprint)\n"
    )
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(line.startswith("preparing") for lines in outputs for line in lines) == 1
    assert len({lines[-1] for lines in outputs}) == 1
