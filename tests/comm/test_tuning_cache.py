"""Is what was measured on some links found again, on these links only, and does a bad cache harm nobody?"""

import json
import logging
from pathlib import Path

import pytest

from mics_strategy.topology import Axis, Span
from mics_strategy.tuning.autotune import TuningKey, load_cached, store_result
from mics_strategy.tuning.threshold import FLAT, SizeTiming

TWO_BY_TWO = Span(axes=(Axis(name="intra_node", size=2, stride=1), Axis(name="inter_node", size=2, stride=2)))
TWO_BY_FOUR = Span(axes=(Axis(name="intra_node", size=4, stride=1), Axis(name="inter_node", size=2, stride=4)))
TIMINGS = (SizeTiming(1024, 1e-3, 2e-3, FLAT), SizeTiming(4096, 3e-3, 2e-3, ""))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return tmp_path / "mics_strategy" / "tuning"


def links(
    collective: str = "all_gather",
    span: Span = TWO_BY_TWO,
    hosts: tuple[str, ...] = ("a", "b"),
    per_node: int = 2,
    backend_key: str = "gloo on cpu",
) -> TuningKey:
    return TuningKey.for_this_job(collective, span, hosts, per_node, backend_key)


def test_what_was_kept_is_recalled(folder: Path) -> None:
    store_result(links(), 4096, TIMINGS)
    assert load_cached(links()) == 4096
    [path] = folder.iterdir()
    kept = {"full_bytes": 1024, "flat_s": 1e-3, "hierarchical_s": 2e-3, "winner": "flat"}
    assert json.loads(path.read_text())["timings"][0] == kept


@pytest.mark.parametrize(
    "other",
    [
        {"hosts": ("a", "c")},
        {"hosts": ("b", "a")},
        {"hosts": ("a", "b", "c", "d")},
        {"per_node": 4},
        {"collective": "reduce_scatter"},
        {"span": TWO_BY_FOUR},
        {"backend_key": "nccl on NVIDIA H100"},
    ],
    ids=str,
)
def test_other_links_have_another_decision(other: dict) -> None:
    store_result(links(), 4096, TIMINGS)
    assert links(**other).file_name != links().file_name
    assert load_cached(links(**other)) is None


def test_other_interfaces_and_versions_have_another_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    store_result(links(), 4096, TIMINGS)
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "eth1")
        assert load_cached(links()) is None
    monkeypatch.setattr("torch.__version__", "9.9")
    assert load_cached(links()) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"decision": 4096}', '{"decision": "4096", "links": {}}', "\x00"],
    ids=repr,
)
def test_a_damaged_file_is_measured_anew_and_said_once(
    text: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_result(links(), 4096, TIMINGS)
    (folder / links().file_name).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_cached(links()) is None
    assert ["cannot be read" in record.message for record in caplog.records] == [True]
    store_result(links(), 8192, TIMINGS)
    assert load_cached(links()) == 8192


@pytest.mark.parametrize("number", [-1, True, 1.5, None])
def test_a_number_that_is_none_is_not_believed(number: object, folder: Path) -> None:
    store_result(links(), 4096, TIMINGS)
    path = folder / links().file_name
    path.write_text(json.dumps({**json.loads(path.read_text()), "decision": number}))
    assert load_cached(links()) is None


def test_a_decision_of_other_links_under_the_same_name_is_not_believed(folder: Path) -> None:
    store_result(links(), 4096, TIMINGS)
    (folder / links().file_name).rename(folder / links(hosts=("a", "c")).file_name)
    assert load_cached(links(hosts=("a", "c"))) is None


def test_a_cache_that_cannot_be_written_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        store_result(links(), 4096, TIMINGS)
    assert ["cannot be written" in record.message for record in caplog.records] == [True]


def test_a_file_is_there_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_result(links(), 4096, TIMINGS)

    def fail(self: Path, target: Path) -> Path:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fail)
    store_result(links(), 8192, TIMINGS)
    assert load_cached(links()) == 4096
