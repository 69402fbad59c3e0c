"""Do layers that sleep train as the same layers do that compute, and does the report say what they make of a step?"""

import copy
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.compare import main, parser
from benchmarks.floor import hop_to_compute
from benchmarks.report import Cluster, describe, make_report
from benchmarks.workload import AWAY, SleepingBlock, Workload
from benchmarks.workload_options import parse

TINY = Workload(
    width=32,
    layers=3,
    vocabulary=64,
    sequence=4,
    micro_batch=1,
    accumulation=2,
    compute=AWAY,
    forward_s=1e-3,
    backward_s=2e-3,
)


def plain_block(block: SleepingBlock, x: torch.Tensor) -> torch.Tensor:
    wide = torch.tanh(x @ block.widen.weight.T + block.widen.bias)
    return x + wide @ block.narrow.weight.T + block.narrow.bias


def test_losses_and_gradients_are_those_without_a_sleep() -> None:
    sleeping, awake = TINY.model().double(), replace(TINY, forward_s=0.0, backward_s=0.0).model().double()
    (batch, _) = TINY.batches(0, 0)
    found, expected = sleeping(batch.inputs, batch.targets), awake(batch.inputs, batch.targets)
    found.backward()
    expected.backward()
    assert torch.equal(found, expected)
    for (name, own), other in zip(sleeping.named_parameters(), awake.parameters(), strict=True):
        assert own.grad is not None, name
        assert torch.equal(own.grad, other.grad), name


def test_gradients_of_a_block_are_those_of_its_formula() -> None:
    block = TINY.model().blocks[0].double()
    twin = copy.deepcopy(block)
    x = torch.randn(1, 4, 32, dtype=torch.float64, requires_grad=True)
    same_x = x.detach().clone().requires_grad_()
    block(x).square().sum().backward()
    plain_block(twin, same_x).square().sum().backward()
    pairs = [(x, same_x), *zip(block.parameters(), twin.parameters(), strict=True)]
    for own, other in pairs:
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-12)
        assert own.grad.count_nonzero() == own.numel()  # what is sent is no zero


def test_each_block_sleeps_once_in_its_forward_and_once_in_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    (batch, _) = TINY.batches(0, 0)
    loss = TINY.model()(batch.inputs, batch.targets)
    assert slept == [1e-3] * 3
    loss.backward()
    assert slept == [1e-3] * 3 + [2e-3] * 3
    assert TINY.sleep_s == pytest.approx(2 * sum(slept))


def test_gradients_of_weights_come_after_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    block = TINY.model().blocks[0]
    had_gradient: list[bool] = []
    monkeypatch.setattr(time, "sleep", lambda _: had_gradient.append(block.narrow.bias.grad is not None))
    block(torch.randn(1, 4, 32, requires_grad=True)).sum().backward()
    assert had_gradient == [False, False]
    assert block.narrow.bias.grad is not None


def test_the_number_of_parameters_is_the_models() -> None:
    assert TINY.numel == sum(parameter.numel() for parameter in TINY.model().parameters())


def test_the_second_hop_is_compared_with_compute() -> None:
    assert hop_to_compute(compute_s=4.0, hop_bytes=60, link_bytes_per_s=10) == 1.5


def test_the_header_says_how_the_ratio_follows() -> None:
    cluster = Cluster(nodes=4, ranks_per_node=2, rate_mbit=8.0)  # 1e6 bytes a second
    hop_s = 2 * 3 / 4 * TINY.numel * 4 / 1e6
    compute_s = 2 * 3 * 3e-3
    header = describe(make_report([], TINY, cluster, loss_tolerance=1e-4))
    assert f"3 layers sleep 1 and 2 ms: compute {compute_s:.3f} s" in header
    assert f"{hop_s:.3f} s; hop/compute {hop_s / compute_s:.2f}" in header
    assert "sleep" not in describe(make_report([], Workload(), cluster, loss_tolerance=1e-4))


def test_the_defaults_are_two_thirds_of_compute_for_the_link() -> None:
    options = parse(parser(), ["--compute", "away"])
    (width,) = options.width
    shape = Workload(width=width, layers=options.layers, vocabulary=options.vocabulary, compute=AWAY)
    hop_s = shape.numel * 4 / (options.rate_mbit * 1e6 / 8)
    compute_s = 4 * options.layers * (options.forward_ms + options.backward_ms) / 1e3
    assert hop_s / compute_s == pytest.approx(0.65, abs=0.02)
    blocks = sum(parameter.numel() for parameter in shape.model().blocks.parameters())
    assert blocks > 0.98 * shape.numel


def test_what_is_said_outranks_the_defaults() -> None:
    options = parse(parser(), "--compute away --layers 5 --width 64 128 --forward-ms 3".split())
    assert (options.layers, options.width, options.forward_ms, options.backward_ms) == (5, [64, 128], 3.0, 12.0)
    assert parse(parser(), []).layers == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--forward-ms 5", "`--forward-ms 5 --backward-ms 0` was asked for, and with `--compute cores` no layer"),
        ("--compute away --backward-ms 0", "`--forward-ms 6 --backward-ms 0` is no time of a layer. Use finite"),
        ("--compute away --forward-ms -1", "`--forward-ms -1 --backward-ms 12` is no time of a layer"),
        ("--compute away --forward-ms 0", "`--forward-ms 0 --backward-ms 12` is no time of a layer"),
        ("--compute away --forward-ms inf", "`--forward-ms inf --backward-ms 12` is no time of a layer"),
        ("--compute away --forward-ms nan", "`--forward-ms nan --backward-ms 12` is no time of a layer"),
    ],
)
def test_wrong_times_are_refused(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments.split(), "--rounds", "0"]) == 2  # refused in any case, but not for that
    assert expected in capsys.readouterr().err


def test_other_places_of_compute_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(parser(), ["--compute", "moon"])
    assert "invalid choice: 'moon' (choose from" in capsys.readouterr().err
