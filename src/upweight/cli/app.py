"""The command line: every command's arguments; heavy imports happen inside the commands."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from upweight.cli.arguments import (
    TAKES_OVERRIDES,
    AsJson,
    ConfigFile,
    Overrides,
    Processes,
    TrainedTarget,
    WholeSentences,
    gib,
)
from upweight.cli.distill import distill_log
from upweight.cli.docs import docs
from upweight.cli.export.commands import export, gguf, merge_lora, serve
from upweight.cli.report import report, watch
from upweight.cli.starter.new import new
from upweight.cli.sweep import sweep
from upweight.errors import UserError
from upweight.files import SIZE_LIMIT, storage_error
from upweight.heartbeat import heartbeat
from upweight.log import fitted, logger, set_up_logging, warn_once

app = typer.Typer(
    cls=WholeSentences,
    help="Train language models from feedback, driven by one YAML file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command(**TAKES_OVERRIDES)
def validate(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    fragment: Annotated[bool, typer.Option("--fragment", help="Do not ask for the keys a whole config needs.")] = False,
    data: Annotated[
        bool, typer.Option("--data/--no-data", help="Look for files of data and model, and at columns.")
    ] = True,
) -> None:
    """Check a config, its data files and their columns, without loading anything."""
    from upweight.cli.validate import run

    run(config, overrides or [], fragment=fragment, data=data)


@app.command(**TAKES_OVERRIDES)
def preprocess(
    config: ConfigFile,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, help="Print so many prepared rows as JSON lines.")] = 0,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids and loss masks too.")] = False,
) -> None:
    """Prepare the data of a config and fill its cache."""
    from upweight.cli.inputs import load_with_notices
    from upweight.data.prepare import preview, shown_rows
    from upweight.data.stream.build import mixture_lines
    from upweight.models.tokenizer import load_tokenizer

    loaded = load_with_notices(config, overrides)
    stages = loaded.stages or (loaded,)
    tokenizer = load_tokenizer(stages[0].model)  # later stages have it from the first
    for stage in stages:
        prepared = preview(stage, tokenizer)
        for line in (*prepared.report.lines(), *mixture_lines(stage, prepared.report)):
            logger.info("%s", line)
        for row in shown_rows(stage, prepared, show, tokens=tokens):
            print(json.dumps(row, ensure_ascii=False))
    if not show:
        logger.info("`--show 3` prints rows as the model reads them; with `--tokens`, also which tokens are trained on")


app.command(**TAKES_OVERRIDES)(distill_log)


@app.command(**TAKES_OVERRIDES)
def data(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write; default: data-CONFIG.html in dataset_prepared_path.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = True,
) -> None:
    """Write a page about the data of a config: lengths, sources, roles, duplicates, examples."""
    from upweight.cli.report import run_data

    run_data(config, overrides or [], output=output, open_it=open_it)


@app.command(**TAKES_OVERRIDES)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last complete checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in output_dir.")] = False,
    allow_changed_data: Annotated[bool, typer.Option("--allow-changed-data", help="Resume on changed data.")] = False,
    num_processes: Processes = None,
    launcher: Annotated[
        str | None, typer.Option(help="torchrun or accelerate (arguments after -- go to it), or none.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines; start the command on each of them.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this machine, counted from 0.")] = 0,
    master_address: Annotated[str | None, typer.Option(help="Address of machine 0.")] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of machine 0; default: 29500.")
    ] = None,
    launcher_arguments: Annotated[list[str] | None, typer.Option("--launcher-argument", hidden=True)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each log as a JSON object, nothing else.")] = False,
    stage: Annotated[int | None, typer.Option(hidden=True, help="Train this stage alone, counted from 0.")] = None,
) -> None:
    """Train what a config describes."""
    from upweight.cli.train import Start, run_train

    extra = tuple(launcher_arguments or ())
    start = Start(num_processes, launcher, nodes, node_rank, master_address, master_port, extra)
    overrides = [*(overrides or []), *(["allow_changed_data=true"] if allow_changed_data else [])]
    shown = {"quiet": quiet, "as_json": as_json}
    run_train(config, overrides, resume=resume, overwrite=overwrite, start=start, stage=stage, **shown)


@app.command(**TAKES_OVERRIDES)
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="Run folder, or a config (untrained).")],
    overrides: Overrides = None,
    checkpoint: Annotated[int | None, typer.Option(min=0, help="Step of a checkpoint of the run.")] = None,
    num_processes: Processes = None,
) -> None:
    """Print metrics on held-out data, of a trained run or of a config's model before training."""
    from upweight.cli.train import Start, run_evaluate

    run_evaluate(target, overrides or [], checkpoint=checkpoint, start=Start(num_processes))


@app.command(**TAKES_OVERRIDES)
def fits(
    target: Annotated[
        str,
        typer.Argument(metavar="CONFIG|MODEL", help="Config, run folder, hub id or folder of a model, or size: 7B."),
    ],
    overrides: Overrides = None,
    method: Annotated[str | None, typer.Option(help="Of a model alone: sft, dpo, grpo, ...; default: sft.")] = None,
    memory: Annotated[
        float | None, typer.Option(parser=gib, metavar="GIB", help="Of the GPU; default: of the one here.")
    ] = None,
) -> None:
    """Estimate which ways of training a model fit on a GPU, and what to change; exits with 1 if this one does not."""
    from upweight.cli.fits import run

    raise typer.Exit(run(target, overrides or [], memory=memory, method=method))


@app.command(**TAKES_OVERRIDES)
def rewards(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    completions: Annotated[Path | None, typer.Option(help="JSON lines to score: prompt, completion, columns.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to sample for.")] = 4,
    count: Annotated[int | None, typer.Option(min=1, help="Completions of each; default: as in training.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try the rewards of a config without training; exits with 1 if one fails, or if none separates completions."""
    from upweight.cli.rewards import run

    ways = {"completions": completions, "prompts": prompts, "count": count}
    raise typer.Exit(run(config, overrides or [], **ways, as_json=as_json))


@app.command("vllm-serve", **TAKES_OVERRIDES)
def vllm_serve(
    config: ConfigFile,
    overrides: Overrides = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that has vLLM; this one otherwise.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the command line instead of running it.")] = False,
) -> None:
    """Start the vLLM server that a config's training samples from."""
    from upweight.cli.inputs import load_with_notices
    from upweight.config.servers import local_url
    from upweight.serve.command import serve_command, warnings_of
    from upweight.serve.process import installed_version, run_server

    loaded = load_with_notices(config, overrides, fragment=True)
    command = serve_command(loaded, python=python or sys.executable)
    if show:
        print(shlex.join([*(f"{name}={value}" for name, value in command.env.items()), *command.argv]))
        return
    for warning in warnings_of(loaded, installed_version(command.argv[0])):
        warn_once(warning)
    url = local_url(loaded.vllm.host, loaded.vllm.port)
    ready = f"vLLM is ready at {url}: {loaded.model.base_model}"
    raise typer.Exit(run_server(command, url, lambda: print(ready, flush=True)))


app.command("merge-lora", **TAKES_OVERRIDES)(merge_lora)
for command in (export, gguf, serve, sweep):
    app.command(**TAKES_OVERRIDES)(command)


@app.command(**TAKES_OVERRIDES)
def score(
    trained: TrainedTarget,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines: prompt and completion, or messages.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="File to write instead of standard output.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put plain texts into the chat template.")] = False,
) -> None:
    """Score completions with a trained reward model."""
    from upweight.cli.inference import run_score

    run_score(trained, file, overrides or [], output=output, chat=chat)


@app.command(**TAKES_OVERRIDES)
def inference(
    trained: TrainedTarget,
    overrides: Overrides = None,
    *,
    prompt: Annotated[str | None, typer.Option(help="Text to answer; lines of standard input otherwise.")] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts: JSON lines with `prompt`, or plain lines.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="Image file of --prompt; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk; /reset forgets, Ctrl-D ends.")] = False,
    system: Annotated[str | None, typer.Option(help="System text of prompts that have none.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue texts as they are, without the chat template.")] = False,
    style: Annotated[
        bool, typer.Option(help="Write texts as the `type` of the training data did, such as `alpaca`.")
    ] = True,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most new tokens; default: up to 512.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy decoding.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Keep the likeliest tokens up to this share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**31, help="Makes sampling repeatable.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines for --prompt too.")] = False,
) -> None:
    """Let a trained model answer a prompt, a file of prompts, or you."""
    from upweight.cli.inference import run_inference

    sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
    generator = {"system": system, "raw": raw, "style": style, "new_tokens": max_new_tokens}
    request = {"prompt": prompt, "file": file, "chat": chat, "count": count, "as_json": as_json, "images": image}
    run_inference(trained, overrides or [], sampling=sampling, **request, **generator)


app.command()(new)


@app.command()
def init(
    method: Annotated[
        str | None,
        typer.Argument(metavar="METHOD", help="A value of `rl`, or sft, reward, prm, gym; none: list all."),
    ] = None,
    folder: Annotated[Path | None, typer.Argument(help="Folder to write; default: named after the method.")] = None,
    *,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="With a tiny model that is made here: every command runs without a download.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "--output-dir", "--folder", "-o", hidden=True)] = None,
) -> None:
    """Write a starter: a commented config, sample rows, rewards."""
    from upweight.cli.starter.init import run

    if output is not None:
        place = shlex.quote(str(output.with_suffix("") if output.suffix in (".yaml", ".yml") else output))
        command = f"upweight init {method or 'METHOD'} {place}"
        raise UserError(f"--output: init takes the folder to write after the method: `{command}`")
    run(method, folder, tiny=tiny)


@app.command()
def choose(
    file: Annotated[str | None, typer.Argument(hidden=True)] = None,
    *,
    have: Annotated[str | None, typer.Option(help="What you have; asked otherwise.")] = None,
    want: Annotated[str | None, typer.Option(help="What you want; asked otherwise.")] = None,
) -> None:
    """Find the method that learns from what you have."""
    from upweight.cli.starter.choose import run

    if file is not None:
        ask = f"`upweight new {file}` proposes a method for a file of rows and writes its config"
        raise UserError(f"{file}: choose takes no file; it asks what you have (--have, --want). Did you mean: {ask}?")
    run({"--have": have, "--want": want})


@app.command(**TAKES_OVERRIDES)
def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="[CONFIG|RUN]", help="Config or run folder; default: this machine.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong before or after a run; exits with 1 if something needs action."""
    from upweight.cli.doctor import run

    raise typer.Exit(run(target, overrides or [], as_json=as_json))


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="A method's name, or yours: mine.Method.")] = None) -> None:
    """List the training methods, or print the keys and needs of one."""
    from upweight.cli.methods import run

    run(name)


@app.command("check-method", **TAKES_OVERRIDES)
def check_method(
    target: Annotated[str, typer.Argument(help="mine.py, mine.py:name, mine.name, or a config.")],
    overrides: Overrides = None,
    place: Annotated[str | None, typer.Option("--as", help="Kind of the function: grpo, advantages, dpo...")] = None,
) -> None:
    """Try whether a method of yours has the properties that training relies on."""
    from upweight.cli.check_method import run

    run(target, overrides or [], place)


app.command()(report)
app.command()(watch)
app.command()(docs)


@app.command("agent-docs")
def agent_docs(topic: Annotated[str | None, typer.Argument(help="Topic; default: list the topics.")] = None) -> None:
    """Print a reference page for coding agents."""
    from upweight.cli.agent_docs import run

    run(topic)


@app.command()
def schema(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print it as Markdown.")] = False,
) -> None:
    """Print the JSON schema of the config."""
    from upweight.config.schema import json_schema, markdown

    print(markdown() if as_markdown else json.dumps(json_schema(), indent=2), end="" if as_markdown else "\n")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train language models from feedback, driven by one YAML file."""
    if version:
        from upweight.version import __version__

        print(__version__)
        raise typer.Exit


def _with_launcher_arguments(arguments: list[str]) -> list[str]:
    """What follows `--` after `train` is for the launcher; without this it would be taken for overrides."""
    cut = arguments.index("--") if arguments[:1] == ["train"] and "--" in arguments else len(arguments)
    return [*arguments[:cut], *(f"--launcher-argument={one}" for one in arguments[cut + 1 :])]


def _require_working_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UserError("the folder that this command was started in was removed. Change to another.") from error


def main() -> None:
    """Run a command; a UserError is printed without a traceback and exits with 2."""
    set_up_logging()
    try:
        _require_working_folder()
        with heartbeat():
            app(args=_with_launcher_arguments(sys.argv[1:]))
    except UserError as error:
        print(fitted(str(error)), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:  # a full disk surfaces as an error of whichever library wrote
        if (reason := storage_error(error)) is None:
            raise
        remedy = "" if SIZE_LIMIT in reason else " Make room, or name another folder."
        print(f"a file could not be written: {reason}.{remedy}", file=sys.stderr)
        sys.exit(2)
