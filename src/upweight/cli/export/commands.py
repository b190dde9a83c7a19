"""The arguments of the commands that export and serve a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from upweight.cli.arguments import Overrides, TrainedTarget

Kind = Annotated[
    str | None, typer.Option("--type", help="f32, f16, bf16, q8_0, q4_k_m, q4_0, q5_k_m, q6_k...; q8_0 otherwise.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")]


def merge_lora(
    trained: TrainedTarget,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write; `merged` beside the adapter otherwise.")] = None,
    check: Annotated[bool, typer.Option(help="Compare log-probs before and after, with the model in memory.")] = True,
) -> None:
    """Fold a trained adapter into its base model."""
    from upweight.cli.export.run import run_merge

    run_merge(trained, overrides or [], output=output, check=check)


def export(
    trained: TrainedTarget,
    overrides: Overrides = None,
    *,
    to: Annotated[str, typer.Option("--to", help="folder, gguf, ollama, vllm or hub.")],
    output: Annotated[Path | None, typer.Option(help="Folder or file to write; default: RUN/export/TARGET.")] = None,
    kind: Annotated[
        str | None, typer.Option("--type", help="Type of GGUF weights: q8_0, f16, q4_k_m (Ollama's default)...")
    ] = None,
    repository: Annotated[str | None, typer.Option(help="Repository on the hub: owner/name.")] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Whether a new repository is private.")] = True,
    overwrite: Overwrite = False,
) -> None:
    """Write a trained model, its adapter merged, for the program that will use it."""
    from upweight.cli.export.run import run_to_target
    from upweight.export.targets import Export

    run_to_target(trained, overrides or [], Export(to, output, kind, repository, private, overwrite))


def gguf(
    trained: TrainedTarget,
    overrides: Overrides = None,
    *,
    output: Annotated[Path | None, typer.Option(help="File to write; default: RUN/gguf/model-TYPE.gguf.")] = None,
    kind: Kind = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a trained model as one GGUF file, with llama.cpp's tools: short for `export --to gguf`."""
    from upweight.cli.export.run import run_to_target
    from upweight.export.targets import Export

    run_to_target(trained, overrides or [], Export("gguf", output, kind, overwrite=overwrite))


def serve(
    trained: TrainedTarget,
    overrides: Overrides = None,
    *,
    backend: Annotated[str, typer.Option(help="transformers, in this process, or vllm.")] = "transformers",
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="On 127.0.0.1; 8000, or a free one.")] = None,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Load the base model too, to compare.")] = True,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Value for requests that set none.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Value for requests that set none.")] = 0.7,
    python: Annotated[str | None, typer.Option(help="Interpreter that has vLLM; this one otherwise.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print vLLM's command line instead of running it.")] = False,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Show the chat page in the browser.")] = True,
) -> None:
    """Serve a trained model on this machine: an OpenAI-compatible endpoint and a chat page beside its base model."""
    from upweight.cli.export.serve import run_in_process, run_vllm

    if backend == "vllm":
        raise typer.Exit(run_vllm(trained, overrides or [], port=port, python=python, show=show))
    defaults = {"temperature": temperature, "max_tokens": max_new_tokens}
    asked = {"backend": backend, "python": python, "show": show}
    run_in_process(trained, overrides or [], port=port, base=base, defaults=defaults, open_it=open_it, asked=asked)
