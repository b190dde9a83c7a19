"""The text of a student's tokens in those of a teacher with another tokenizer, and where tokens of both begin."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from upweight.train.distill.token_bytes import REPLACED, TokenBytes
from upweight.types import Sample, TeacherText

Ids = NDArray[np.int64]
NOWHERE = -1  # the place of a byte that is not in the student's text


class Spans(NamedTuple):
    """The stretches of a sequence that tokens of both bound: the first token of each and the one after it."""

    student_2M: Ids
    teacher_2M: Ids
    same_M: NDArray[np.bool_]  # whether both read the same text in it

    def after(self, ours: int, teacher: int) -> "Spans":
        """Return the spans behind so many tokens of either."""
        return Spans(self.student_2M + ours, self.teacher_2M + teacher, self.same_M)


class Alignment(NamedTuple):
    """A sequence in the teacher's tokens, and the spans that both bound."""

    ids: Ids
    spans: Spans


@dataclass(frozen=True, eq=False)
class Aligner:
    """Aligns the tokens of a student with those of a teacher, at the bytes where tokens of both begin."""

    student: TokenBytes
    teacher: TokenBytes

    def aligned(self, sample: Sample, *, keep: bool) -> Sample:
        """Return a sample with the teacher's tokens; tokens that are not compared are not scored, unless kept."""
        ids, spans = self.alignment(sample)
        ours, theirs = spans.student_2M[0], spans.teacher_2M[0]
        # a token is compared where both models have read something before it
        compared = sample.loss_mask[ours] & (ours > 0) & (theirs > 0)
        unread = ~spans.same_M & sample.loss_mask[ours]
        text = TeacherText(ids, theirs[compared], int((spans.student_2M[1] - ours)[unread].sum()))
        taught = np.zeros_like(sample.loss_mask)
        taught[ours[compared]] = True
        if keep:
            return replace(sample, taught=taught[sample.loss_mask], teacher_text=text)
        return replace(sample, loss_mask=taught, taught=np.ones(len(text.at), np.bool_), teacher_text=text)

    def alignment(self, sample: Sample) -> Alignment:
        """Return a sequence in the teacher's tokens with the spans that both bound, none over a change of the mask."""
        parts: list[Ids] = [np.zeros(0, np.int64)]
        spans = [_spans([], [], [])]
        length, read = 0, False  # tokens of the teacher so far, and whether a text has begun
        for start, end in self._pieces(sample):
            number = int(sample.ids[start])
            if self._is_mark(number):
                theirs = self._as_marks(number)
                bounded = _spans([0, 1], [0, len(theirs)], [True]) if len(theirs) else _spans([], [], [])
            else:
                theirs, bounded = self._text(sample.ids[start:end], first=not read)
                read = True
            if not length and self.teacher.begins and theirs[:1].tolist() != [self.teacher.roles.begin]:
                parts.append(np.array([self.teacher.roles.begin]))
                length = 1
            spans.append(bounded.after(start, length))
            parts.append(theirs)
            length += len(theirs)
        ours, teacher, same = (np.concatenate(column, -1) for column in zip(*spans, strict=True))
        ids = np.concatenate(parts) if length else np.array([self.teacher.roles.text_end or 0])
        return Alignment(ids, Spans(ours, teacher, same))

    def _pieces(self, sample: Sample) -> Iterator[tuple[int, int]]:
        """Yield the ranges of marks, each by itself, and of text between them and between changes of the mask."""
        mark = np.array([self._is_mark(number) for number in sample.ids.tolist()], np.bool_)
        cut = (sample.loss_mask[1:] != sample.loss_mask[:-1]) | mark[1:] | mark[:-1]
        bounds = [0, *(np.flatnonzero(cut) + 1).tolist(), len(sample.ids)]
        yield from ((start, end) for start, end in pairwise(bounds) if end > start)

    def _is_mark(self, number: int) -> bool:
        return number not in self.student.bytes_of

    def _text(self, ids: Ids, *, first: bool) -> tuple[Ids, Spans]:
        """Return the teacher's tokens of a text, and the spans that tokens of both bound."""
        data, starts = self.student.text(ids), np.append(0, self.student.length_V[ids].cumsum())
        if first and self.student.prefixes and data.startswith(b" "):
            data, starts = data[1:], starts - 1
        text, place, broken = readable(data)
        theirs = self.teacher.ids(text, first=first)
        if any(int(number) not in self.teacher.bytes_of for number in theirs):  # it does not know a character
            return theirs, _spans([0, len(ids)], [0, len(theirs)], [False])
        content, ends = self.teacher.text(theirs), np.append(0, self.teacher.length_V[theirs].cumsum())
        if first and content == b" " + text.encode():
            ends -= 1
        elif content != text.encode():  # it changes what it reads, by lower case for example
            return theirs, _spans([0, len(ids)], [0, len(theirs)], [False])
        placed = np.where(ends < 0, NOWHERE, place[ends.clip(0)])
        known = np.flatnonzero(placed != NOWHERE)
        # of tokens without a byte the last, which has read the most
        at = np.searchsorted(placed[known], starts, side="right") - 1
        ours = np.flatnonzero((at >= 0) & (placed[known][at] == starts))
        before = np.append(0, broken.cumsum())[starts[ours]]
        return theirs, _spans(ours, known[at[ours]], np.diff(before) == 0)

    def _as_marks(self, number: int) -> Ids:
        """Return the teacher's tokens for a mark of the student: its own by role or name, or the mark as text."""
        ours, theirs, name = self.student.roles, self.teacher.roles, self.student.marks.get(number)
        known = self.pairs.get(number, self._marks_by_name.get(name or ""))
        if known is None and number == ours.text_end:
            known = theirs.text_end
        if known is None and number == ours.begin and self.teacher.begins:
            known = theirs.begin
        if known is not None:
            return np.array([known], np.int64)
        is_text = name is not None and number not in (ours.begin, ours.padding, ours.text_end)
        return self.teacher.ids(name, first=False) if is_text else np.zeros(0, np.int64)

    @cached_property
    def _marks_by_name(self) -> dict[str, int]:
        return {name: number for number, name in self.teacher.marks.items()}

    @cached_property
    def pairs(self) -> dict[int, int]:
        """The marks that are one outcome for both: ends of turns, then marks of one name, then ends of texts."""
        ours, theirs = self.student.roles, self.teacher.roles
        named = [(number, self._marks_by_name.get(name)) for number, name in sorted(self.student.marks.items())]
        pairs: dict[int, int] = {}
        for one, other in ((ours.turn_end, theirs.turn_end), *named, (ours.text_end, theirs.text_end)):
            if one is not None and other is not None and one not in pairs and other not in pairs.values():
                pairs[one] = other
        return pairs

    @cached_property
    def shared(self) -> tuple[Ids, Ids]:
        """The ids of either for the same bytes, and for marks that are one outcome, in the order of the student's."""
        known = self.teacher.id_of
        both = {one: known[content] for content, one in self.student.id_of.items() if content in known} | self.pairs
        ours = sorted(both)
        return np.array(ours, np.int64), np.array([both[number] for number in ours], np.int64)


def _spans(ours: list[int] | Ids, teacher: list[int] | Ids, same: list[bool] | NDArray[np.bool_]) -> Spans:
    """Return the spans between bounds, one more than there are spans."""
    ours, teacher = np.asarray(ours, np.int64), np.asarray(teacher, np.int64)
    return Spans(np.stack([ours[:-1], ours[1:]]), np.stack([teacher[:-1], teacher[1:]]), np.asarray(same, np.bool_))


def readable(data: bytes) -> tuple[str, Ids, NDArray[np.bool_]]:
    """Return bytes as text, where each byte of the text is in `data`, and which bytes of `data` are no text.

    A sign stands in the text for bytes that are not UTF-8; no place is known inside of it.
    """
    parts: list[str] = []
    place: list[Ids] = []
    broken, start = np.zeros(len(data), np.bool_), 0
    while start < len(data):
        try:
            good, end = len(data), len(data)
            parts.append(data[start:].decode())
        except UnicodeDecodeError as error:
            good, end = start + error.start, start + error.end
            parts += [data[start:good].decode(), REPLACED]
        place.append(np.arange(start, good))
        if end > good:
            place.append(np.array([good, *[NOWHERE] * (len(REPLACED.encode()) - 1)]))
            broken[good:end] = True
        start = end
    return "".join(parts), np.concatenate([*place, np.array([len(data)])]).astype(np.int64), broken
