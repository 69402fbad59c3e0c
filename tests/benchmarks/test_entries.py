"""Are the words of the command line understood?"""

import pytest

from benchmarks.entries import Entry, default_ours, parse_ours, peer


def test_commas_separate_entries_and_overrides() -> None:
    entries = parse_ours("mics:grad_codec=int4,hierarchical=False,zero3,paro-iig:prefetch=2")
    assert [(entry.label, entry.name) for entry in entries] == [
        ("mics:grad_codec=int4,hierarchical=False", "mics"),
        ("zero3", "zero3"),
        ("paro-iig:prefetch=2", "paro-iig"),
    ]
    assert [entry.overrides for entry in entries] == [
        {"grad_codec": "int4", "hierarchical": False},
        {},
        {"prefetch": 2},
    ]
    assert all(entry.is_ours for entry in entries)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("8", 8),
        ("0.5", 0.5),
        ("node", "node"),
        ("gather+reduce", ["gather", "reduce"]),
        ("nan", "nan"),
    ],
)
def test_values_have_the_types_of_fields(text: str, value: object) -> None:
    (entry,) = parse_ours(f"mics:field={text}")
    assert entry.overrides == {"field": value}
    assert type(entry.overrides["field"]) is type(value)


@pytest.mark.parametrize("text", ["prefetch=2", "mics,prefetch=2", "mics:prefetch", "mics:prefetch=", ":prefetch=2"])
def test_what_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Write preset:field=value"):
        parse_ours(text)


def test_nothing_is_no_entry() -> None:
    assert parse_ours("") == []


def test_a_partition_of_two_nodes_needs_four() -> None:
    assert "partition_size" not in default_ours(2, 2)
    entries = parse_ours(default_ours(4, 2))
    assert Entry(label="mics:partition_size=4", name="mics", is_ours=True, overrides={"partition_size": 4}) in entries


def test_an_unknown_peer_is_refused() -> None:
    assert not peer("ddp").is_ours
    with pytest.raises(ValueError, match=r"`horovod` is not known\. Use ddp, fsdp2"):
        peer("horovod")
