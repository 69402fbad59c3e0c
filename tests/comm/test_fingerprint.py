"""Does one number per rank show whether fingerprints agree?"""

import pytest

from mics_strategy.comm.desync import CollectiveFingerprint, first_mismatch


def _fingerprints(*moved: str) -> list[dict[str, CollectiveFingerprint]]:
    """Fingerprints of one group, by rank. A letter of `moved` is one collective of a rank."""
    ranks = tuple(range(4, 4 + len(moved)))
    by_rank: list[dict[str, CollectiveFingerprint]] = [{} for _ in range(4)]
    for index, letters in enumerate(moved):
        fingerprint = CollectiveFingerprint(ranks=ranks, index=index)
        for letter in letters:
            fingerprint.update(letter)
        by_rank.append({"gathers": fingerprint})
    return by_rank


def _digest_sum(*moved: str) -> int:
    return sum(fingerprint.digest for fingerprints in _fingerprints(*moved) for fingerprint in fingerprints.values())


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("moved", ["", "a", "abcab", "a" * 1000])
def test_digests_of_equal_fingerprints_add_up_to_zero(size: int, moved: str) -> None:
    assert _digest_sum(*[moved] * size) == 0


@pytest.mark.parametrize("moved", [("ab", "ba"), ("ab", "ab", "a"), ("", "a"), ("abc", "abd", "abd"), ("aab", "abb")])
def test_digests_of_different_fingerprints_do_not(moved: tuple[str, ...]) -> None:
    assert _digest_sum(*moved) != 0


def test_digests_of_a_thousand_ranks_fit_into_32_bits() -> None:
    largest = max(
        abs(CollectiveFingerprint(ranks=tuple(range(1024)), index=0, _hash=hash_).digest)
        for hash_ in range(0, 2**20, 997)
    )
    assert 3 * largest < 2**31


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (("abc", "adc"), "in collective 1 of gathers, rank 4 sent `b`, rank 5 sent `d`"),
        (("abc", "abc", "ab"), "in collective 2 of gathers, rank 4 sent `c`, rank 6 sent nothing"),
        (("x" * 300 + "a", "x" * 300 + "b"), "in collective 300 of gathers, rank 4 sent `a`, rank 5 sent `b`"),
        (("a" + "x" * 300, "b" + "x" * 300), "they diverged before the oldest recorded collective"),
    ],
)
def test_first_mismatch_is_named(moved: tuple[str, ...], words: str) -> None:
    assert first_mismatch(dict(enumerate(_fingerprints(*moved)))) == words
