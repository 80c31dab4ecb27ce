"""Log probabilities of a request, kept as flat arrays (twelve bytes per candidate) until an entry is read.

Entries are built each time they are read, so a list of them can be written in slices and is never in memory whole. Does
not know how tokens are spelled.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import eq
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

if TYPE_CHECKING:
    from hydra_engine.core.results import TokenLogprobs


class TopLogprob(NamedTuple):
    """A candidate token at one position. `token` and `raw` as in `TextLogprob`; `logprob` is a natural logarithm."""

    token_id: int
    token: str
    logprob: float
    raw: bytes


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token as the API shows it, with its natural log probability and its best alternatives.

    `token`: its text or its name; `bytes:\\xb1` for a part of a character. `raw`: the bytes that it adds to the text,
    empty for a token that is not shown, such as the end of the sequence; all `raw` together are the text. `rank`: 1 is
    the most likely. `top`: the best candidates, the most likely first.
    """

    token_id: int
    token: str
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...] = ()
    raw: bytes = b""


# Flags of a token's place in its text.
FIRST = 1  # no text before it
SILENT = 2  # ends the text without being part of it

Spell = Callable[[int, int], tuple[str, bytes]]  # (token id, flags) -> (its name, the bytes it adds to the text)
E = TypeVar("E", TextLogprob, TextLogprob | None)


class _Lazy(Sequence[E], Generic[E]):
    """A sequence that builds its entries at each access; a slice is a tuple. Equal to any sequence of equal entries,
    copied and pickled as a tuple of them, and not hashable."""

    def _entry(self, index: int, *, with_top: bool = True) -> E:
        """Builds the entry at an index within [0, len). Without `with_top` its `top` stays empty."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> E: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[E, ...]: ...

    def __getitem__(self, index: int | slice) -> E | tuple[E, ...]:
        if isinstance(index, slice):
            return tuple(self._entry(place) for place in range(*index.indices(len(self))))
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError("there is no such entry")
        return self._entry(place)

    def __iter__(self) -> Iterator[E]:
        return map(self._entry, range(len(self)))

    def without_candidates(self) -> Iterator[E]:
        """Yields the entries with an empty `top`, whose candidates are then not built."""
        return (self._entry(index, with_top=False) for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class Logprobs(_Lazy[TextLogprob]):
    """The log probabilities of consecutive tokens, in flat arrays. `spell` gives the name and the bytes of a token."""

    __slots__ = ("_ends", "_ids", "_places", "_ranks", "_spell", "_values")

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._ids = array("i")  # for each entry its token, then its candidates
        self._values = array("d")
        self._ends = array("q")  # end of each entry in both
        self._ranks = array("i")
        self._places = bytearray()

    def append(self, entry: TokenLogprobs, place: int = 0) -> None:
        """Appends the entry of one token. `place`: the sum of those of the flags FIRST and SILENT that apply to it."""
        self._ids.append(entry.token_id)
        self._values.append(entry.logprob)
        for token_id, logprob in entry.top:
            self._ids.append(token_id)
            self._values.append(logprob)
        self._ends.append(len(self._ids))
        self._ranks.append(entry.rank)
        self._places.append(place)

    def extend(self, other: Logprobs) -> None:
        """Appends the entries of another object with the same `spell`."""
        num_before = len(self._ids)
        self._ids.extend(other._ids)
        self._values.extend(other._values)
        self._ends.extend(num_before + end for end in other._ends)
        self._ranks.extend(other._ranks)
        self._places.extend(other._places)

    def __len__(self) -> int:
        return len(self._ends)

    def _entry(self, index: int, *, with_top: bool = True) -> TextLogprob:
        start, end, place = self._ends[index - 1] if index else 0, self._ends[index], self._places[index]
        ids, values, spell = self._ids, self._values, self._spell
        name, raw = spell(ids[start], place)
        top: list[TopLogprob] = []
        for at in range(start + 1, end if with_top else start + 1):
            other, other_raw = spell(ids[at], place & FIRST)
            top.append(TopLogprob(ids[at], other, values[at], other_raw))
        return TextLogprob(ids[start], name, values[start], self._ranks[index], tuple(top), raw)


class PromptLogprobs(_Lazy[TextLogprob | None]):
    """The log probabilities of a prompt's `num_prompt` tokens: None for the first token, and for tokens that `entries`,
    which begins with the second token, does not have yet. Shares `entries`, so later ones appear."""

    __slots__ = ("_entries", "_num_prompt")

    def __init__(self, entries: Logprobs, num_prompt: int) -> None:
        self._entries = entries
        self._num_prompt = num_prompt

    def __len__(self) -> int:
        return self._num_prompt

    def _entry(self, index: int, *, with_top: bool = True) -> TextLogprob | None:
        return self._entries._entry(index - 1, with_top=with_top) if 0 < index <= len(self._entries) else None


def without_candidates(entries: Sequence[E]) -> Iterator[E]:
    """The entries, for a caller that does not read `top`, which is left empty where it would have to be built."""
    return entries.without_candidates() if isinstance(entries, _Lazy) else iter(entries)


def concat_logprobs(first: Sequence[TextLogprob], second: Sequence[TextLogprob]) -> Sequence[TextLogprob]:
    """The entries of `first`, then of `second`; neither argument changes. `first` must be a Logprobs or empty if
    `second` is a Logprobs."""
    return extend_logprobs(extend_logprobs((), first), second)


def extend_logprobs(kept: Sequence[TextLogprob], more: Sequence[TextLogprob]) -> Sequence[TextLogprob]:
    """Returns `kept` followed by `more`. If both are Logprobs, extends `kept` in place and returns it, so it must
    belong to the caller. `kept` must be a Logprobs or empty if `more` is a Logprobs."""
    if not isinstance(more, Logprobs):
        return (*kept, *more) if more else kept
    if not isinstance(kept, Logprobs):
        assert not kept, "entries are of one kind"
        kept = Logprobs(more._spell)
    kept.extend(more)
    return kept
