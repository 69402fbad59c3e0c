"""What does a chain of collectives launch? From the log of a machine."""

from dataclasses import dataclass, field

Log = list[tuple[str, int, str]]  # what, stream of the launch, name or the stream waited for


@dataclass(slots=True)
class Chain:
    """What a side stream did between two waits for another one.

    If that was a side stream that has sent nothing, with what that one did.

    Attributes:
        roles: Roles of its collectives, in order.
        collectives: Calls of c10d.
        kernels: Other launches, copies included.
    """

    roles: list[str] = field(default_factory=list)
    collectives: int = 0
    kernels: int = 0

    @property
    def name(self) -> str:
        return "+".join(self.roles)


def chains(log: Log) -> list[Chain]:
    """All chains with a collective, in the order in which they began."""
    all_chains: list[Chain] = []
    running: dict[int, Chain] = {}
    for kind, stream, name in log:
        if kind == "wait":
            before = running.get(int(name), Chain())
            running[stream] = Chain(kernels=0 if before.collectives else before.kernels)
            all_chains.append(running[stream])
        elif stream in running:
            chain = running[stream]
            if kind == "kernel":
                chain.kernels += 1
            else:
                chain.collectives += 1
                role = name.split(".")[1] if name.startswith("mics.") else name
                chain.roles += [role] if role not in chain.roles else []
    return [chain for chain in all_chains if chain.collectives]


def table(log: Log) -> dict[str, tuple[int, int, int]]:
    """By roles: chains, and the collectives and kernels of the one that has the most."""
    rows: dict[str, tuple[int, int, int]] = {}
    for chain in chains(log):
        count, collectives, kernels = rows.get(chain.name, (0, 0, 0))
        rows[chain.name] = count + 1, max(collectives, chain.collectives), max(kernels, chain.kernels)
    return rows


def totals(log: Log) -> tuple[int, int]:
    """Collectives and kernels of all streams together."""
    names = [kind for kind, _, _ in log]
    return names.count("collective"), names.count("kernel")
