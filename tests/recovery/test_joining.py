"""What a newcomer asks for, and how it is answered."""

import json
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ConfigError, MiCSError, Recovery, Topology, shard
from mics_strategy.comm.transport import GlooTransport, make_transport
from mics_strategy.recovery.joining import Application, Applications, Terms, answer_to, apply, difference
from mics_strategy.recovery.survivors import sources
from tests.ranks import RankContext, RankPool

DESCRIPTION = {"ranks of a block": "2", "`prefetch`": "1"}
TERMS = Terms(is_one_node=False, random=[3, 4], thresholds=[])


def test_an_application_that_fits_is_invited_until_it_is_answered() -> None:
    store = dist.HashStore()
    applications = Applications(store)
    index = apply(store, [4, 5], DESCRIPTION)
    assert not applications.invite(0, DESCRIPTION), "the thread has not looked yet"
    applications.poll()
    assert applications.invite(0, DESCRIPTION)
    assert json.loads(store.get("invited/0")) == {str(index): [4, 5]}
    assert answer_to(store, index) is None
    applications.accept(index, 0, TERMS)
    assert not applications.invite(1, DESCRIPTION), "it has been answered since the thread looked"
    assert answer_to(store, index) == (0, TERMS)
    applications.poll()
    assert applications.waiting == ()


def test_an_application_that_differs_is_refused_by_name() -> None:
    store = dist.HashStore()
    applications = Applications(store)
    index = apply(store, [4, 5], DESCRIPTION | {"`prefetch`": "2"})
    applications.poll()
    assert not applications.invite(0, DESCRIPTION)
    with pytest.raises(ConfigError, match="`prefetch`: 1 in the running job, 2 here"):
        answer_to(store, index)


@pytest.mark.parametrize("text", [b"no json", b"[[], {}]", b"[[4, 7], {}]", b"[[4, 5], 3]", b"{}", b'[["4"], {}]'])
def test_an_application_that_cannot_be_read_is_refused(text: bytes) -> None:
    assert difference(DESCRIPTION, Application.parse(0, text).description)


def test_a_block_of_another_size_is_refused_whatever_it_says() -> None:
    text = json.dumps([[4, 5, 6], DESCRIPTION]).encode()
    assert difference(DESCRIPTION, Application.parse(0, text).description).startswith("ranks of a block: 2")


def test_of_many_differences_some_are_shown() -> None:
    shown = difference({str(n): "1" for n in range(5)}, {str(n): "2" for n in range(5)})
    assert shown.endswith("; and 2 more")


@pytest.mark.parametrize(
    ("members", "newcomers", "expected"),
    [
        ([0, 1, 2, 3], [2, 3], {2: 0, 3: 1}),
        ([0, 1, 4, 5, 6, 7, 8, 9], [6, 7, 8, 9], {6: 0, 7: 1, 8: 4, 9: 5}),
        ([0, 1, 2, 3, 4, 5], [2, 3, 4, 5], {2: 0, 3: 1, 4: 0, 5: 1}),
    ],
)
def test_newcomers_get_states_from_the_same_place_of_other_blocks_in_turns(
    members: list[int], newcomers: list[int], expected: dict[int, int]
) -> None:
    assert sources(members, newcomers, 2) == expected


def flags(ctx: RankContext, raised: list[int]) -> bool:
    group = dist.new_group(timeout=timedelta(seconds=30))
    transport = make_transport(group, "all", "cpu")
    assert isinstance(transport, GlooTransport)
    return transport.any_of(ctx.rank in raised, 1)


@pytest.mark.parametrize("raised", [[], [0], [2], [0, 1, 2]], ids=str)
def test_behind_the_barrier_all_know_of_a_flag(ranks: RankPool, raised: list[int]) -> None:
    assert ranks(3, flags, raised) == [bool(raised)] * 3


def wrong_addresses(ctx: RankContext) -> list[str]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = shard(model, "mics", topology=Topology(ranks_per_node=2))
    sharded.adopt(optimizer)
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), False)
    messages = []
    for address in ("nowhere", f"127.0.0.1:{store.port}"):
        try:
            Recovery(sharded, [optimizer], join=address)
        except MiCSError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_where_there_is_no_job_all_ranks_say_so(ranks: RankPool) -> None:
    for messages in ranks(2, wrong_addresses):
        assert messages[0].startswith("ConfigError: `join='nowhere'` is no address")
        assert "is used by no job with `Recovery`" in messages[1]


def unknown_state(ctx: RankContext) -> str:
    class Counter:
        def state_dict(self) -> dict[str, Any]:
            return {"items": {1, 2}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = shard(model, "mics", topology=Topology(ranks_per_node=1))
    sharded.adopt(optimizer)
    with pytest.raises(ConfigError) as refused:
        Recovery(sharded, [optimizer], state={"counter": Counter()})
    return str(refused.value)


def test_state_that_no_newcomer_could_get_is_refused_at_once(ranks: RankPool) -> None:
    for message in ranks(2, unknown_state):
        assert message.startswith("`state['counter']['items']` is a builtins.set")
