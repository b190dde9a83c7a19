"""`upweight new`: three questions (the file, the model, the method), and a config for the user's own rows."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from upweight.cli.arguments import gib
from upweight.cli.starter import feedback
from upweight.cli.starter.ending import write
from upweight.cli.starter.excel import refuse_export
from upweight.cli.starter.filters import is_complete, leave_out_empty, repeated_notes
from upweight.cli.starter.memory import choose_memory, choose_memory_unread
from upweight.cli.starter.plan import (
    KINDS,
    READ,
    Plan,
    content,
    mapped_columns,
    prompt_column,
)
from upweight.cli.starter.table import ALIASES, PREFERENCE, Preference, Table, read_columns
from upweight.cli.starter.unrecognised import UnknownColumns, unrecognised
from upweight.data.columns import ROLES, misses_columns
from upweight.data.raw_row import word_of
from upweight.errors import UserError, did_you_mean
from upweight.log import counted, fitted

if TYPE_CHECKING:
    from upweight.config import Config

CHAT_NAME = re.compile(r"(?:^|[-_.])(instruct|chat|it|zephyr|assistant)(?:[-_.\d]|$)", re.IGNORECASE)  # of models
LOOKED_AT = 200  # rows, for their columns and lengths
DATA_FILES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
CAUSES = 3  # that are named of rows that cannot be read
Answer = TypeVar("Answer")
SEQUENCE_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def new(
    file: Annotated[Path | None, typer.Argument(help=f"Your rows: {', '.join(DATA_FILES)}; asked otherwise.")] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Hub id or folder of a model; asked otherwise.")] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(KINDS)}; proposed and asked otherwise.")] = None,
    columns: Annotated[
        str | None, typer.Option(help="Your columns, where their names are not recognised: prompt=Question,label=Mark.")
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(help="What your marks stand for, with --columns: ok=true,no=false; or the lowest good rating: 4."),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(parser=gib, metavar="GIB", help="Of the GPU to train on; default: of this machine.")
    ] = None,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("config.yaml"),
    yes: Annotated[bool, typer.Option("--yes", help="Take what is proposed, without questions.")] = False,
) -> None:
    """Write a config for your own file of rows: columns mapped, method proposed, memory checked."""
    if output.exists():
        raise UserError(f"{output} would be written over. Name another file with --output.")
    ask = _accept if yes or not _is_terminal() else _ask
    table = _table_of(file) if file else ask("Which file holds your rows?", None, "FILE", _typed_table)
    table.named = read_columns(columns, table.columns) if columns else {}
    table = table.with_values(values) if values else table
    # Whoever names grpo or sft has chosen to read no preferences.
    winner = feedback.preference(table) if method not in ("grpo", "sft") else None
    planned = partial(_planned, table, winner, memory, ask)
    if method is None:
        try:
            proposed, why = propose(table, winner)
        except UnknownColumns as error:
            if ask is _accept or table.named:
                raise
            print(fitted(str(error)))
            read = partial(read_columns, columns=table.columns)
            table.named = ask("Which columns hold what?", table.likely(table.likely_kind()), "--columns", read)
            proposed, why = propose(table, winner)
        print(fitted(f"{table.file}: columns {', '.join(table.columns)}; {why}"))
        plan = ask(f"Which method? ({', '.join(KINDS)})", proposed, "--method", planned)
    else:
        plan = planned(method)
    from upweight.cli.starter.init import MODEL

    named = partial(_named_model, memory)
    plan.model = named(model) if model else ask("Which model? A hub id or a folder", MODEL, "--model", named)
    first = len(plan.notes)
    _fit_model(plan, output)
    leave_out_empty(plan, output)
    plan.notes[first:first] = _unread_notes(plan)  # which ask for the filter that was written
    plan.notes += repeated_notes(plan)
    write(plan, output)


def _typed_table(answer: str) -> Table:
    """Return the table of a file named as people type it, or as terminals write one dropped on them: in quotes."""
    path = Path(answer).expanduser()
    with suppress(ValueError):  # of a quote without its other half
        words = shlex.split(answer)
        if not path.exists() and len(words) == 1 and Path(words[0]).expanduser().exists():
            path = Path(words[0]).expanduser()
    return _table_of(path)


def _planned(
    table: Table, winner: Preference | None, memory: float | None, ask: Callable[..., Any], method: str
) -> Plan:
    """Return the plan of a method, whose model is still to be named, with the columns that it reads."""
    if method not in KINDS:
        from upweight.config.peers import method_advice

        hint = method_advice(method) or did_you_mean(method, KINDS)
        raise UserError(f"--method {method}: none of {', '.join(KINDS)}.{hint}")
    if ask is _ask and KINDS[method] == "labelled" and winner is None:
        table = _with_good_ratings(table)
    plan = Plan(table, method, "", gpu=memory)
    _map_columns(plan, winner)
    return plan


def _with_good_ratings(table: Table) -> Table:
    """Return the table with what its user says of a column of ratings, if it has one whose meaning is not known."""
    rated = feedback.ratings_without_meaning(table)
    if rated is None:
        return table
    name, proposed = rated
    table = replace(table, named={**table.named, "label": name})
    question = f"Which ratings in {name!r} are good (true) and which bad? Or the lowest good one alone"
    return _ask(question, proposed, "--values", table.with_values)


def _named_model(memory: float | None, name: str) -> str:
    """Return the model's name; a size, as `upweight fits` takes it, names none."""
    from upweight.cli.starter.init import MODEL

    if re.fullmatch(r"\d+(\.\d+)?B", name, re.IGNORECASE) and not Path(name).exists():
        problem = f"--model {name}: is a size, and a config needs a model: a hub id or a folder, such as {MODEL}"
        raise UserError(f"{problem}. `upweight fits {name} --memory {memory or 8:g}` says what fits for a size.")
    return name


def propose(table: Table, winner: Preference | None = None) -> tuple[str, str]:
    """Return the method that learns from rows with these columns, and why; `winner`: what prefers an answer."""
    if winner is not None:
        compared = " and ".join(map(repr, winner.answers))
        return "dpo", f"{winner.winner!r} says which of {compared} is better: dpo"
    columns, rows, named = table.columns, table.rows, table.named
    pairs, labelled = table.roles("pairs"), table.roles("labelled")
    if {"chosen", "rejected"} <= pairs.keys() and not {"completion", "label"} & named.keys():
        return "dpo", f"'{pairs['chosen']}' and '{pairs['rejected']}' look like a better and a worse answer: dpo"
    if {"completion", "label"} <= labelled.keys() and all(
        feedback.is_label(row.get(labelled["label"])) for row in rows
    ):
        return "kto", f"'{labelled['label']}' looks like a mark, good or bad, of '{labelled['completion']}': kto"
    reads_text = not misses_columns("text", columns) or len(table.roles("text")) == 2
    if (reads_text or "completion" in labelled) and (marked := feedback.labels_in_words(table)) is not None:
        if (problem := feedback.label_problem(table, *marked)) is not None:
            also = f"\n`--method sft` trains on all rows, whatever {marked[0]!r} holds." if reads_text else ""
            raise UserError(f"{problem}{also}")
        return "kto", f"{marked[0]!r} marks {labelled['completion']!r} as good or bad: kto"
    if "label" in named and "completion" in labelled:
        return "kto", f"'{labelled['label']}' is named as the mark of '{labelled['completion']}': kto"
    if (scored := feedback.scored_answers_advice(table)) is not None:
        raise UserError(f"{table.file}: {scored}\n`--method sft` trains on one of the answers, whatever its rating.")
    if reads_text:
        why = "these look like answers as they should be: sft (grpo, if answers can be scored)"
        return "sft", why + feedback.second_answer_advice(table)
    if "prompt" in table.roles("prompts"):
        texts = [name for name in table.varied_texts() if name != table.roles("prompts")["prompt"]]
        also = f"; if {texts[0]!r} holds answers to imitate: {table.ask_for('text')}" if texts else ""
        if len(texts) == 2:
            also += f"; if {texts[0]!r} and {texts[1]!r} are a better and a worse answer: {table.ask_for('pairs')}"
        return "grpo", f"there are prompts without answers: grpo, with a reward function of yours{also}"
    raise unrecognised(table)


def _table_of(file: Path) -> Table:
    """Return the first rows of a file."""
    if file.is_dir():
        inside = sorted(str(one) for one in file.iterdir() if one.suffix.lower() in DATA_FILES)
        named = f", such as {inside[0]}" if inside else ""
        raise UserError(f"{file}: is a folder. Name the file with the rows{named}.")
    if not file.is_file():
        beside = [one.name for one in file.parent.iterdir() if one.is_file()] if file.parent.is_dir() else []
        raise UserError(f"{file}: there is no such file.{did_you_mean(file.name, beside)}")
    refuse_export(file)
    from upweight.config.sections.data import DatasetSpec  # takes seconds, which a mistyped name need not
    from upweight.data.sources.open import open_entry

    rows = open_entry(DatasetSpec(path=str(file)), "datasets[0]", Path.cwd()).rows()
    return Table(file, rows.take(0, min(LOOKED_AT, len(rows))))


def _map_columns(plan: Plan, winner: Preference | None) -> None:
    """Add to the entry how its columns are read, and what words of labels or of a winner stand for."""
    kind, table = KINDS[plan.method], plan.table
    if kind == "labelled" and {"chosen", "rejected"} <= set(table.columns):
        kind = "pairs"  # of which kto makes two rows
    plan.answer = table.roles("text").get("output") if plan.method == "grpo" else None
    if winner is not None and kind in ("pairs", "labelled"):
        _refuse_unused(plan, PREFERENCE, reads_values=True)
        plan.entry["type"] = feedback.winner_mapping(table, winner)
        plan.notes += feedback.mark_notes(plan.entry["type"])
        return
    label_values = feedback.label_values(table) if kind == "labelled" else {}
    rated = {"label_from": table.good_from} if kind == "labelled" and table.good_from is not None else {}
    completion = ("completion",) if plan.answer else ()
    _refuse_unused(plan, [*ROLES[kind], *completion], reads_values=bool(label_values or rated))
    columns, column_of = table.columns, table.roles(kind)
    if kind == "text" and "text" in columns and misses_columns("text", [name for name in columns if name != "text"]):
        plan.entry["type"] = "completion"  # raw text
    if (
        table.named
        or label_values
        or rated
        or misses_columns(kind, columns)
        or (kind == "pairs" and "prompt" not in columns and "prompt" in column_of)
    ):
        if len(column_of) < len(ROLES[kind]):
            raise UserError(_missing_problem(plan, column_of))
        form: dict[str, Any] = {f"field_{role}": name for role, name in column_of.items()}
        plan.entry["type"] = {**form, **rated, **({"label_values": label_values} if label_values else {})}
        chosen = "" if table.named else f"; if others are meant: {table.ask_for(kind)}"
        plan.notes.append(f"columns: {', '.join(f'{role} is {name!r}' for role, name in column_of.items())}{chosen}")
        plan.notes += feedback.mark_notes(plan.entry["type"])


def _refuse_unused(plan: Plan, roles: Sequence[str], *, reads_values: bool) -> None:
    """Raise a UserError for roles and values that the method does not read."""
    read = {str(ALIASES.get(role, role)) for role in roles}
    if unused := [role for role in plan.table.named if role not in read]:
        raise UserError(f"--columns {unused[0]}=...: {plan.method} reads {', '.join(sorted(read))}. Leave it out.")
    if (plan.table.meanings or plan.table.good_from is not None) and not reads_values:
        raise UserError(f"--values: {plan.method} reads the values of this file as they are. Leave it out.")


def _missing_problem(plan: Plan, column_of: Mapping[str, str]) -> str:
    """Return which roles have no column, and what to do."""
    table, kind = plan.table, KINDS[plan.method]
    pairing = feedback.pairing_advice(table) if kind == "pairs" else None
    gone = [role for role in ROLES[kind] if role not in column_of]
    rename = f"Name the column that holds it {gone[0]!r}" if len(gone) == 1 else f"Name their columns {', '.join(gone)}"
    rated = feedback.ratings_to_name(table) if kind == "labelled" and gone == ["label"] else None
    if rated is not None:
        remedy = rated
    elif pairing:
        remedy = f"{pairing[0].upper()}{pairing[1:]}"
    else:
        remedy = f"{rename}, or say which: {table.ask_for(kind)}"
        if plan.method == "grpo":
            remedy += "; `answer=NAME` after it, with a comma between, names a column with the right answers"
    known = [f"{role} is {column_of[role]!r}" for role in ROLES[kind] if role in column_of]
    missing = ", ".join([*known, f"no {' and no '.join(gone)} is recognised"])
    needs = f"{plan.method} needs {', '.join(ROLES[kind])}"
    return f"{plan.file}: {needs}; {missing} among {', '.join(table.columns)}. {remedy}"


def _unread_notes(plan: Plan) -> list[str]:
    """Return which columns the method does not read, and what ratings are good for."""
    if plan.method == "grpo":  # whose rewards get every column
        if plan.answer is None:
            return _answer_advice(plan)
        rated = [name for name in plan.table.columns if feedback.is_rating(name, plan.table)]
        return [f"{name!r} holds ratings, and the reward takes every {plan.answer!r} for a right one" for name in rated]
    mapped = mapped_columns(plan.entry)
    read = {*mapped, "system", "input", "margin"} if mapped else READ
    unread = [name for name in plan.table.columns if name not in read]
    notes = [f"not read by {plan.method}: {', '.join(unread)}"] if unread else []
    if plan.method != "sft":
        return notes
    ratings, written = [name for name in unread if feedback.is_rating(name, plan.table)], plan.entry.get("filter")
    notes += [feedback.rating_advice(name, plan.table, written) for name in ratings[:1]]
    if (marked := feedback.labels_in_words(plan.table)) is not None:
        notes.append(feedback.label_advice(*marked, written))
    return notes


def _answer_advice(plan: Plan) -> list[str]:
    """Return which column of numbers may be the right answers; one that counts rows, or rates them, is none."""
    table, prompt = plan.table, plan.table.roles("prompts").get("prompt")
    for name in (one for one in table.columns if one != prompt and plan.has_numbers(one)):
        cells = [word_of(row.get(name)) for row in table.rows]
        counts_rows = all(cell.isdigit() for cell in cells) and sorted({*map(int, cells)}) == [*map(int, cells)]
        if not counts_rows and not feedback.is_rating(name, table):
            named = shlex.quote(f"prompt={prompt},answer={name}")
            command = f"upweight new {shlex.quote(str(plan.file))} --method grpo --columns {named}"
            return [f"{name!r} holds numbers: if these are the right answers, `{command}` compares with them"]
    return []


def _fit_model(plan: Plan, output: Path) -> None:
    """Read the tokenizer for the template and for lengths, and choose the keys with which training fits in memory."""
    from upweight.config import parse_config
    from upweight.log import quiet_transformers
    from upweight.models.hub import is_offline
    from upweight.models.load import load_model_config
    from upweight.models.tokenizer import load_tokenizer

    quiet_transformers()
    if not Path(plan.model).is_dir():
        is_offline(is_told=False)  # asked here, since the line about a missing model says why
    config: Config = parse_config(content(plan), folder=output.resolve().parent)
    try:
        tokenizer = load_tokenizer(config.model)
    except UserError as error:
        plan.missing = str(error)
        plan.notes.append("lengths are not checked: the model cannot be read (see below)")
        choose_memory_unread(plan, output)
        _guess_chat(plan)
        return
    if getattr(tokenizer, "chat_template", None) and _has_plain_prompts(plan):
        plan.entry["as_messages"] = True
    longest = _longest(plan, output, tokenizer)
    size = next((size for size in SEQUENCE_LENGTHS if size >= 1.2 * longest), SEQUENCE_LENGTHS[-1])
    positions = getattr(load_model_config(config.model).get_text_config(), "max_position_embeddings", None)
    plan.sequence_len = min(size, positions or size)
    what = f"up to {longest} tokens, turns and system text included, in {counted(len(plan.rows), 'row')}"
    kept = f"sequence_len {plan.sequence_len}" if plan.method != "grpo" else "prompts alone"
    if longest > plan.sequence_len and plan.method != "grpo":
        kept += ": longer rows are left out" + (f"; the model has {positions} positions" if positions else "")
    plan.notes.append(f"lengths: {what}; {kept}")
    choose_memory(plan, output)


def _has_plain_prompts(plan: Plan) -> bool:
    prompt = prompt_column(plan)
    return prompt is not None and isinstance(plan.rows[0].get(prompt), str)


def _guess_chat(plan: Plan) -> None:
    """Decide by the model's name whether plain texts become turns of a chat, since its tokenizer cannot be read."""
    if not _has_plain_prompts(plan):
        return
    if CHAT_NAME.search(Path(plan.model).name):
        plan.entry["as_messages"] = True
        why = "the model's name is that of a chat model, so texts are trained on as turns of a user and an assistant"
        plan.notes.append(f"as_messages: {why}; for a base model, remove `as_messages` from the entry")
    else:
        plan.notes.append("as_messages: is the model one for chats? Then add `as_messages: true` to the entry")


def _longest(plan: Plan, output: Path, tokenizer: Any) -> int:
    """Return the tokens of the longest row as training reads it; rows that it cannot read are noted by cause."""
    from upweight.config import parse_config
    from upweight.config.view import view
    from upweight.data.encode import build_encoder
    from upweight.data.raw_row import RowError
    from upweight.row_rules import lengths_of

    config = parse_config(content(plan), folder=output.resolve().parent)
    method = config.method
    encode = build_encoder(config.data, method, config.data.datasets[0], 0, tokenizer, view(config), config.folder)
    lengths: list[int] = [0]
    unread: dict[str, list[int]] = {}  # numbers of rows by cause
    has_text = any(is_complete(plan, row) for row in plan.rows)
    for number, row in enumerate(plan.rows):
        if has_text and not is_complete(plan, row):  # which a filter leaves out
            continue
        try:
            lengths += [lengths_of(record.columns, method)[2] for record in encode(row)]
        except RowError as error:
            unread.setdefault(str(error), []).append(number)
    if unread:
        causes = [f"{error} ({len(numbers)}, first row {numbers[0]})" for error, numbers in unread.items()]
        count = sum(map(len, unread.values()))
        more = f" and {len(causes) - CAUSES} other causes" if len(causes) > CAUSES else ""
        problem = f"{count} of {counted(len(plan.rows), 'row')} cannot be read: {'; '.join(causes[:CAUSES])}{more}"
        if count == len(plan.rows):
            remedy = f"If other columns are meant: {plan.table.ask_for(KINDS[plan.method])}"
            if any(kind in error for error in unread for kind in ("got the number", "got the whole number")):
                again = f"upweight new {shlex.quote(str(plan.file))} --method grpo"
                remedy = f"To learn by a reward for right numbers: `{again}`. To imitate them, write them as texts"
            raise UserError(f"{plan.file}: {problem}. {remedy}")
        plan.notes.append(f"rows: {problem}")
    return max(lengths)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask(question: str, proposed: str | None, flag: str, read: Callable[[str], Answer]) -> Answer:
    """Ask on the terminal until the answer can be read; an empty one takes what is proposed."""
    while True:
        answer = input(f"{question}{f' [{proposed}]' if proposed else ''}\n> ").strip() or proposed
        if answer:
            try:
                return read(answer)
            except UserError as error:
                print(fitted(str(error)))


def _accept(question: str, proposed: str | None, flag: str, read: Callable[[str], Answer]) -> Answer:
    """Take what is proposed; without a terminal there is nobody to ask."""
    if proposed is None:
        raise UserError(f"{question} Name it: {flag}")
    return read(proposed)
