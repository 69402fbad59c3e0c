"""How fast could a step be at best?

Pure arithmetic.
"""

from __future__ import annotations


def second_hop_bytes(gradient_bytes: float, nodes: int) -> float:
    """What one node must send when every node ends with the sum of all nodes' gradients.

    A ring all-reduce of the node's gradients, or a reduce-scatter and a gather of updated parameters of the same size;
    less goes only with a codec.

    Args:
        gradient_bytes: Of one copy of all gradients.
        nodes: That hold a copy.

    Source:
        AMSP (arXiv:2311.00257), cost of a ring all-reduce, ``2 (p - 1) v / p``, for nodes instead of ranks.
    """
    return 2 * (nodes - 1) / nodes * gradient_bytes


def hop_to_compute(*, compute_s: float, hop_bytes: float, link_bytes_per_s: float) -> float:
    """Time of the second hop by that of compute: how much of a step the link would be busy.

    Args:
        compute_s: Time of all micro-steps of an optimizer step.
        hop_bytes: Bytes that one node sends in the second hop.
        link_bytes_per_s: Rate of one node's link, in one direction.
    """
    return hop_bytes / link_bytes_per_s / compute_s


def floor_s(*, micro_step_s: float, num_micro_steps: int, hop_bytes: float, link_bytes_per_s: float) -> float:
    """The critical path of an optimizer step that hides whatever can be hidden.

    The micro-steps before the last run at compute speed, with the first hop behind them. The last one's gradients are
    the first that may leave the node, so the step ends with the longer of the last micro-step and the second hop. The
    update, the first hop and headers are free.

    Args:
        micro_step_s: A forward and a backward, with all ranks of the machine computing at once.
        num_micro_steps: Of an optimizer step.
        hop_bytes: That one node sends in the second hop.
        link_bytes_per_s: Of one node's link, in one direction.
    """
    return (num_micro_steps - 1) * micro_step_s + max(micro_step_s, hop_bytes / link_bytes_per_s)


def own_floor_s(
    *, micro_step_s: float, num_micro_steps: int, sent_bytes: float, last_bytes: float, link_bytes_per_s: float
) -> float:
    """The critical path of a step that sends what one engine has planned, encoded or not.

    Args:
        micro_step_s: See `floor_s`.
        num_micro_steps: See `floor_s`.
        sent_bytes: That one node sends in the whole step.
        last_bytes: Those of them that are ready with the last micro-step's gradients or later.
        link_bytes_per_s: See `floor_s`.
    """
    path_s = floor_s(
        micro_step_s=micro_step_s,
        num_micro_steps=num_micro_steps,
        hop_bytes=last_bytes,
        link_bytes_per_s=link_bytes_per_s,
    )
    return max(path_s, sent_bytes / link_bytes_per_s)
