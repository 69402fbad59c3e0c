"""State comes back bitwise from JSON and bytes, and nothing else is taken."""

import math
import pickle
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from mics_strategy import ConfigError
from mics_strategy.recovery.plain_data import as_bytes, decode, encode

PLAIN = (
    {"betas": (0.9, 0.999), "lr": 0.1, "names": ["a", None, True], "empty": {}, "nested": ((), [1, 2**70])},
    OrderedDict(b=1, a=-0.0),
    Counter({3: 2, 5: 1}),
    {1: "one", 2.5: {"deep": [OrderedDict()]}},
    1e-323,
)


def sent(value: Any) -> Any:
    """The value as a newcomer gets it."""
    encoded = encode(value, "value")
    messages = iter([as_bytes(tensor) for tensor in encoded.tensors if tensor.numel()])
    return decode(encoded.text, lambda out: out.copy_(next(messages)))


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_stays_of_its_types(value: Any) -> None:
    assert pickle.dumps(sent(value)) == pickle.dumps(value)


def test_numbers_that_json_has_not_stay() -> None:
    assert math.isnan(sent([math.nan])[0])
    assert sent((math.inf, -math.inf)) == (math.inf, -math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)], ids=str)
def test_tensors_stay_bitwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).mul(100).to(dtype)
    received = sent({"tensors": [tensor, tensor.t() if tensor.ndim == 2 else tensor]})["tensors"]
    assert [(each.dtype, each.shape) for each in received] == [(dtype, tensor.shape), (dtype, tensor.t().shape)]
    assert torch.equal(received[0], tensor)
    assert torch.equal(received[1], tensor.t())


def test_bytes_are_counted_before_anything_is_sent() -> None:
    assert encode([torch.zeros(3), {"a": torch.zeros(2, 2, dtype=torch.bfloat16)}], "value").num_bytes == 12 + 8


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [object()]}, r"`value\['a'\]\[0\]` is a builtins.object"),
        ({"a": {1, 2}}, r"`value\['a'\]` is a builtins.set"),
        ({(1, 2): 3}, r"`value` has the key \(1, 2\)"),
        ([torch.zeros(2).to_sparse()], r"`value\[0\]` is a torch.Tensor"),
    ],
)
def test_other_objects_are_refused_by_their_place(value: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        encode(value, "value")


@pytest.mark.parametrize("text", ['{"object": []}', '{"list": [], "tuple": []}', "{}", "cos"])
def test_a_text_that_is_none_of_ours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text, lambda out: out)
