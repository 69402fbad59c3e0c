"""Does error feedback send later what an encoding loses, so that nothing is lost over all rounds?

The check knows nothing of stages: what all ranks have put in is what has come out and what the residuals hold.
"""

import pytest
import torch
from torch import Tensor

from mics_strategy import Codec, ConfigError
from mics_strategy.comm import route as routes
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.residuals import residual_numel
from mics_strategy.comm.route import ALL_REDUCE, REDUCE_SCATTER
from tests.comm.networks import Network
from tests.comm.plain import Plain
from tests.ranks import RankContext, RankPool, simulate

FP32 = torch.float32
ROUNDS = 3
CODECS = {
    "int4": Codec(bits=4, block_size=64, feedback=True),
    "rotated": Codec(bits=4, block_size=64, feedback=True, rotation=True),
    "int2": Codec(bits=2, block_size=64, feedback=True),
}
Round = tuple[Tensor, Tensor, bool]  # the output, a copy of the residual, and whether the first round is the plain one


def placed(network: Network, residual: Tensor, full_numel: int) -> Tensor:
    """The residual at the places of its elements in the full tensor, with padding."""
    full = torch.zeros(full_numel)
    route = network.one.route
    start = network.one.index // route.strides[route.num_quantized]
    full[start * residual.numel() :][: residual.numel()] = residual
    return full


def rounds(ctx: RankContext, kind: str, codec: Codec, links: str, stages: int, numel: int) -> list[Round]:
    """What some rounds with other values each give this rank."""
    network = Network(ctx, codec, links, stages)
    one, collective = network.one, ALL_REDUCE if kind == "all_reduce" else REDUCE_SCATTER
    full_numel = one.size * numel
    residual = torch.zeros(residual_numel(one.route, collective, full_numel))
    if kind == "all_reduce":
        one.reserve("all_reduce", full_numel, FP32, FP32)
        padded = one.route.num_slices * routes.all_reduce_slice(one.route, full_numel)
    else:
        one.reserve("reduce_scatter", full_numel, FP32, FP32)
        padded = full_numel
    network.lend()
    found = []
    for salt in range(ROUNDS):
        given = [network.values(index, full_numel, salt=salt) for index in range(one.size)]
        if kind == "all_reduce":
            out = given[one.index].clone()
            one.all_reduce(out, FP32, "block", residual).wait()
            is_plain = torch.equal(out, Plain.of(one).all_reduce(given, FP32))
        else:
            out = torch.full((numel,), torch.nan)
            one.reduce_scatter(out, given[one.index], False, "block", residual).wait()
            is_plain = torch.equal(out, Plain.of(one).reduce(given, FP32, None))
        found.append((out, placed(network, residual, padded), is_plain))
    return found


@pytest.mark.wide(every=3)
@pytest.mark.one_job
@pytest.mark.parametrize("kind", ["reduce", "all_reduce"])
@pytest.mark.parametrize(
    ("nodes", "per_node", "stages", "links", "codec", "numel"),
    [
        *[(2, 2, 2, "all", "int4", 150_016), (2, 2, 2, "slow", "rotated", 256), (2, 2, 1, "slow", "int2", 192)],
        *[(1, 4, 1, "all", "rotated", 128), (2, 2, 2, "all", "int2", 64), (4, 1, 1, "slow", "int4", 320)],
    ],
)
def test_nothing_is_lost_over_all_rounds(
    ranks: RankPool, nodes: int, per_node: int, stages: int, links: str, codec: str, numel: int, kind: str
) -> None:
    world, job = nodes * per_node, (kind, CODECS[codec], links, stages, numel)
    found = ranks(world, rounds, *job, ranks_per_node=per_node)
    pending = torch.zeros_like(found[0][0][1])
    for salt in range(ROUNDS):
        of_round = [by_rank[salt] for by_rank in found]
        values = torch.zeros_like(pending)
        for index in range(world):
            generator = torch.Generator().manual_seed(1000 * salt + index)
            values[: world * numel] += torch.randn(world * numel, generator=generator)
        order = sorted(range(world), key=lambda rank: (rank % per_node, rank // per_node))
        received = of_round[0][0] if kind == "all_reduce" else torch.cat([of_round[rank][0] for rank in order])
        left = torch.stack([residual for _, residual, _ in of_round]).sum(0)
        expected = (pending + values - left)[: world * numel]
        torch.testing.assert_close(received, expected, rtol=1e-5, atol=1e-5)
        assert left.abs().max() > 0.01
        assert [is_plain for *_, is_plain in of_round] == [salt == 0] * world
        pending = left
    if numel > 1000:
        return  # in chunks on gloo only, in which ranks sum other shares of an all-reduce
    for one, other in zip(found, simulate(world, rounds, *job, ranks_per_node=per_node), strict=True):
        for (out, residual, _), (other_out, other_residual, _) in zip(one, other, strict=True):
            assert torch.equal(out, other_out)
            assert torch.equal(residual, other_residual)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_constant_arrives_exactly_in_the_mean(codec: Codec) -> None:
    """Without feedback the mean would keep the error of one encoding."""
    quantizer, values, rounds = Quantizer(codec, torch.device("cpu")), torch.randn(640), 64
    residual, total, out = torch.zeros(640), torch.zeros(640), torch.empty(640)
    encoded = torch.empty(codec.encoded_bytes(640), dtype=torch.uint8)
    for _ in range(rounds):
        quantizer.encode(values, encoded, residual)
        quantizer.decode(encoded, out)
        total += out
    assert (total / rounds - values).abs().max() < 1.5 * values.abs().max() / rounds
    quantizer.encode(values, encoded)
    quantizer.decode(encoded, out)
    assert (out - values).abs().max() > 2 * values.abs().max() / rounds


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_nonfinite_block_leaves_nothing_in_its_residual(bad: float) -> None:
    codec = CODECS["int4"]
    quantizer, residual = Quantizer(codec, torch.device("cpu")), torch.full((256,), 0.01)
    encoded, values = torch.empty(codec.encoded_bytes(256), dtype=torch.uint8), torch.randn(256)
    residual[70] = 3e38 if bad == 3e38 else 0.01  # overflows in the sum only
    values[70] = bad
    quantizer.encode(values, encoded, residual)
    assert codec.has_nonfinite(encoded, 256)
    assert residual.isfinite().all()
    assert (residual[64:128] == 0).all()
    assert (residual[:64] != 0).any()


def test_feedback_of_random_rounding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`feedback=True`.*random rounding.*rounding='nearest'"):
        Codec(bits=4, feedback=True, rounding="stochastic")


@pytest.mark.parametrize(("block_size"), [96, 16384])
def test_a_rotation_of_other_blocks_is_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match=r"`rotation=True`.*`block_size=.*Use block_size=128"):
        Codec(bits=4, block_size=block_size, rotation=True)
