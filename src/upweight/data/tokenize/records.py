"""Turns examples into records; texts are collected first, so that many rows are tokenized at once."""

from typing import Any

from upweight.data.examples import Example, Labelled, Pair, Prompt, Setup, Steps, Text, Tokens
from upweight.data.raw_row import Record, RowError, check_all_text, common_length
from upweight.data.tokenize.tokens import TextTokens
from upweight.errors import UserError

Ids = list[list[int]]


class RecordMaker:
    """Lists the texts of an example that need token ids, and builds its record from these ids."""

    def __init__(self, setup: Setup, tokens: TextTokens) -> None:
        self.entry = setup.entry
        self.tokens = tokens
        self.is_document = setup.method.data == "prompts"  # a text for a method of prompts is a document of EBFT
        self.takes_text = not self.is_document or setup.method.strided

    def texts(self, example: Example) -> list[str]:
        """Return the texts whose ids `record` takes, in its order."""
        match example:
            case Pair():
                return _prompt_and_whole(example.prompt, {"chosen": example.chosen, "rejected": example.rejected})
            case Labelled():
                return _prompt_and_whole(example.prompt, {"completion": example.completion})
            case Steps():
                separator = "\n" if self.entry.step_separator is None else self.entry.step_separator
                return [example.prompt, separator, *example.completions]
            case Prompt():
                check_all_text(example.columns, "row")
                return [example.text, *example.truth]
            case Text():
                return [example.text, *(example.text[:place] for place in _boundaries(example))]
            case Tokens():
                return []

    def record(self, example: Example, ids: Ids) -> Record:
        """Build the record of an example from the ids of its texts."""
        match example:
            case Pair():
                return self._pair(example, ids)
            case Labelled():
                return self._labelled(example, ids)
            case Steps():
                return self._steps(example, ids)
            case Prompt():
                return self._prompt(example, ids)
            case Text():
                return self._text(*self._scored(example, ids), example.shown)
            case Tokens(columns):
                if "scored" in columns:
                    return self._text(columns["ids"], columns["scored"], {})
                return Record({}, columns, self.tokens.pinned(columns.get("prompt_ids", columns.get("ids", []))))

    def _pair(self, pair: Pair, ids: Ids) -> Record:
        prompt, (chosen, rejected) = self._split(ids, ("chosen", "rejected"))
        text: dict[str, Any] = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
        columns: dict[str, Any] = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        if pair.margin is not None:
            text["margin"] = columns["margin"] = pair.margin
        return Record(text, columns, self.tokens.pinned(prompt))

    def _labelled(self, example: Labelled, ids: Ids) -> Record:
        prompt, (completion,) = self._split(ids, ("completion",))
        text = {"prompt": example.prompt, "completion": example.completion, "label": example.label}
        columns = {"prompt_ids": prompt, "completion_ids": completion, "label": example.label}
        return Record(text, columns, self.tokens.pinned(prompt))

    def _split(self, ids: Ids, keys: tuple[str, ...]) -> tuple[list[int], Ids]:
        """Return the ids of the prompt and of each completion; a token that spans both belongs to the completion."""
        prompt_only, *sequences = ids
        shared = min(common_length(prompt_only, sequence) for sequence in sequences)
        prompt = self.tokens.with_bos(prompt_only[:shared])
        if not prompt:
            raise RowError("prompt", "text of at least one token before the completion")
        for key, sequence in zip(keys, sequences, strict=True):
            if len(sequence) <= shared:
                raise RowError(key, "text of at least one token")
        return prompt, [self.tokens.with_eos(sequence[shared:]) for sequence in sequences]

    def _steps(self, example: Steps, ids: Ids) -> Record:
        prompt, separator, *steps = ids
        answer, labels = [], []
        for number, (step, label) in enumerate(zip(steps, example.labels, strict=True)):
            size = len(step) + len(separator)
            if not step:
                raise RowError(f"completions[{number}]", "text of at least one token")
            counts = not self.entry.train_on_last_step_only or number == len(steps) - 1
            answer += [*step, *separator]
            labels += [-100] * (size - 1) + [label if counts else -100]
        limit = self.entry.max_completion_length
        prompt = self.tokens.with_bos(prompt)
        if self.tokens.bos is not None and prompt[:1] != [self.tokens.bos]:
            prompt = [self.tokens.bos, *prompt]
        text = {"prompt": example.prompt, "completions": example.completions, "labels": example.labels}
        columns = {"ids": prompt + answer[:limit], "labels": [-100] * len(prompt) + labels[:limit]}
        return Record(text, columns, self.tokens.pinned(prompt))

    def _prompt(self, example: Prompt, ids: Ids) -> Record:
        prompt = self.tokens.with_bos(ids[0])
        if not prompt:
            raise RowError("prompt", "text of at least one token")
        columns = {**example.columns, "prompt": example.prompt, "prompt_ids": prompt}
        if example.truth:
            answers, replies = [self.tokens.with_eos(turn) for turn in ids[1::2]], ids[2::2]
            columns["truth_ids"] = [turn for pair in zip(answers, [*replies, []], strict=True) for turn in pair][:-1]
        return Record({**example.columns, "prompt": example.text}, columns, self.tokens.pinned(prompt))

    def _text(self, ids: list[int], scored: list[bool], shown: dict[str, Any]) -> Record:
        if not self.takes_text:
            source = f"'{self.entry.type}' makes" if self.entry.type else "these rows are"
            raise UserError(f"datasets.type: {source} documents, which only 'ebft.mode: strided' reads.")
        scored[0] = False  # no token precedes the first one to predict it from
        if not any(scored):
            raise RowError("row", "at least two tokens, of which one is trained on")
        columns: dict[str, Any] = {"ids": ids, "scored": scored}
        if self.is_document:
            columns["prompt_length"] = scored.index(True)
        return Record(shown, columns, self.tokens.pinned(ids))

    def _scored(self, example: Text, ids: Ids) -> tuple[list[int], list[bool]]:
        """Return the ids of a text, and the mask of those that lie wholly inside its spans."""
        whole, *before = ids
        if not whole:
            raise RowError("row", "text of at least one token")
        at = {place: common_length(whole, part) for place, part in zip(_boundaries(example), before, strict=True)}
        scored = [False] * len(whole)
        for span in example.spans:
            scored[at[span.start] : at[span.end]] = [True] * (at[span.end] - at[span.start])
            for start, end in span.holes:
                scored[at[start] : at[end]] = [False] * (at[end] - at[start])
        self._score_ends(whole, scored, [at[span.end] - 1 for span in example.spans])
        with_bos = self.tokens.with_bos(whole)
        added = len(with_bos) - len(whole)
        scored = [False] * added + scored[max(0, -added) :]
        # A document may continue after its end: only completions and single texts get an end token.
        ended = with_bos if self.is_document else self.tokens.with_eos(with_bos)
        is_scored = scored[-1] and self.entry.train_on_eos != "none"
        return ended, scored + [is_scored] * (len(ended) - len(with_bos))

    def _score_ends(self, ids: list[int], scored: list[bool], closing: list[int]) -> None:
        """Set in `scored` whether the tokens that end turns are trained on, by `train_on_eos` and `train_on_eot`."""
        on_eos = self.entry.train_on_eos or "turn"
        on_eot = self.entry.train_on_eot or on_eos
        if on_eos == on_eot == "turn":
            return
        ends = self.tokens.turn_ends | {self.tokens.eos} | ({ids[number] for number in closing} & self.tokens.ends)
        for number, token in enumerate(ids):
            if token in ends:
                policy = on_eos if token == self.tokens.eos else on_eot
                if policy == "all":
                    scored[number] = True
                elif number in closing:
                    scored[number] = policy == "turn" or (policy == "last" and number == max(closing))


def _prompt_and_whole(prompt: str, answers: dict[str, str]) -> list[str]:
    for key, answer in answers.items():
        if not answer:
            raise RowError(key, "text, got an empty text")
    return [prompt, *(prompt + answer for answer in answers.values())]


def _boundaries(example: Text) -> list[int]:
    """Return the positions in a text where a trained range begins or ends."""
    ends = {place for span in example.spans for place in (span.start, span.end)}
    holes = {place for span in example.spans for hole in span.holes for place in hole}
    return sorted(ends | holes)
