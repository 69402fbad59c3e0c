"""How does a backward with `create_graph=True` find its parameters when it is differentiated again?

The first backward runs through the nodes of the forward and makes new ones, of which no module knows. Both kinds use
the unit's parameters in the second backward, in an order of autograd's own. So each node that the forward of a unit has
made is given hooks when the first backward is about to run it: before the node itself, and before the nodes that it
makes, the unit is unsharded. Sequence numbers say which forward has made a node.

Cost: A walk over the graph in Python, only where `create_graph=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.graph import Node

from mics_strategy.engine.order import ForwardCall

Callback = Callable[[ForwardCall], None]


class DoubleBackward:
    """Hooks on the nodes of one backward that makes a graph.

    Args:
        before_node: Called before a node of a forward runs, in this backward and in later ones.
        before_made_node: Called before a node runs that this backward makes.
    """

    def __init__(self, before_node: Callback, before_made_node: Callback) -> None:
        self._before_node = before_node
        self._before_made_node = before_made_node
        self._hooked: set[tuple[ForwardCall, Node]] = set()

    def follow(self, call: ForwardCall, entry: Node) -> None:
        """Put hooks on the nodes that the forward `call` has made, as far as `entry` leads to them."""
        pending = [entry]
        while pending:
            node = pending.pop()
            following = [other for other, _ in node.next_functions if other is not None]
            is_leaf = not node.next_functions
            if is_leaf or not call.has_added(node) or (call, node) in self._hooked:
                continue
            self._hooked.add((call, node))
            node.register_prehook(lambda _: self._before_node(call))
            node.register_hook(lambda grad_inputs, _: self._follow_made(call, grad_inputs))
            pending += following

    def _follow_made(self, call: ForwardCall, grads: tuple[Any, ...]) -> None:
        for grad in grads:
            node = None if grad is None else grad.grad_fn
            if node is not None and (call, node) not in self._hooked:
                self._hooked.add((call, node))
                node.register_prehook(lambda _: self._before_made_node(call))

    def end(self) -> None:
        """The backward is over: let go of its nodes."""
        self._hooked.clear()
