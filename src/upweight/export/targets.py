"""Where a trained model goes: a folder, a GGUF file, Ollama, vLLM, the hub; each returns what the command prints."""

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from upweight.errors import UserError
from upweight.export.card import exported_card
from upweight.export.folder import Trained, write_folder
from upweight.export.llama_cpp import Tools, find_tools, write_gguf
from upweight.export.modelfile import modelfile
from upweight.files import write_text
from upweight.heartbeat import activity
from upweight.log import logger
from upweight.models.adapters.merge import AdapterFolder
from upweight.models.hub import is_of_network

TARGETS = ("folder", "gguf", "ollama", "vllm", "hub")
KIND = {"gguf": "q8_0", "ollama": "q4_k_m"}  # types of weights that are written where none is named
GET = {  # for machines without the program
    "ollama": "curl -fsSL https://ollama.com/install.sh | sh (or https://ollama.com/download)",
    "vllm": "pip install vllm, in an environment of its own (upweight serve --backend vllm --python ITS_PYTHON)",
}
SINGLE_SCORES = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class Export:
    """What `upweight export` was asked for; None stands for the target's default."""

    target: str
    output: Path | None = None
    kind: str | None = None
    repository: str | None = None
    private: bool = True
    overwrite: bool = False


def run_export(trained: Trained, wanted: Export) -> list[str]:
    """Write a trained model for a target and return the lines to print: what was written, and how to use it."""
    for option, value, targets in (("--type", wanted.kind, KIND), ("--repository", wanted.repository, ("hub",))):
        if value is not None and wanted.target not in targets:
            raise UserError(
                f"{option}: `--to {wanted.target}` has no use for it; it goes with {' and '.join(targets)}."
            )
    if wanted.target in KIND:
        return _to_llama_cpp(trained, wanted, wanted.kind or KIND[wanted.target])
    if wanted.target == "hub":
        return _to_hub(trained, wanted)
    output = _free_output(wanted.output or trained.folder() / "export" / wanted.target, wanted.overwrite)
    write_folder(trained, output)
    lines = [str(output)]
    if wanted.target == "vllm":
        _require_answers(output, "vllm serve")
        lines.append(serve_line(output))
        _name_missing("vllm")
    return lines


def serve_line(folder: Path, name: str | None = None) -> str:
    """Return the command that serves a folder by vLLM on this machine."""
    named = name or name_of(folder)
    return shlex.join(["vllm", "serve", str(folder.resolve()), "--served-model-name", named, "--host", "127.0.0.1"])


def _to_llama_cpp(trained: Trained, wanted: Export, kind: str) -> list[str]:
    """Write a GGUF file, for Ollama with a Modelfile beside it."""
    tools = find_tools(kind)  # before anything is merged
    # In a separate folder: transformers would read a file beside an adapter as the adapter's.
    default = trained.folder() / ("gguf" if wanted.target == "gguf" else "export/ollama")
    if wanted.target == "gguf":
        file = _free_output(wanted.output or default / f"model-{kind}.gguf", wanted.overwrite)
        with _model_folder(trained, file.parent) as model:
            _require_answers(model, "llama.cpp")
            write_gguf(model, file, kind, tools)
        return [str(file)]
    folder = _free_output(wanted.output or default, wanted.overwrite)
    name = name_of(trained.folder())
    with tempfile.TemporaryDirectory(dir=_made(folder.parent), prefix=".ollama-") as scratch:
        part = Path(scratch) / folder.name
        part.mkdir()
        _write_ollama(trained, part, kind, tools)
        part.replace(folder)
    create = f"ollama create {name} -f {shlex.quote(str(folder / 'Modelfile'))}"
    _name_missing("ollama")
    return [str(folder), create, f"ollama run {name}"]


def _write_ollama(trained: Trained, folder: Path, kind: str, tools: Tools) -> None:
    with _model_folder(trained, folder.parent) as model:
        _require_answers(model, "Ollama")
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        config: Any = AutoConfig.from_pretrained(str(model)).get_text_config()
        weights = folder / f"model-{kind}.gguf"
        text = modelfile(weights, tokenizer, _ends(model, tokenizer), getattr(config, "max_position_embeddings", None))
        write_gguf(model, weights, kind, tools)
    (folder / "Modelfile").write_text(text, encoding="utf-8")


def _name_missing(program: str) -> None:
    """Name the command that gets the program of the printed lines, where it is not on this machine."""
    if shutil.which(program) is None:
        logger.info("%s, which the lines below need, is not on the path here; get it: %s", program, GET[program])


def _to_hub(trained: Trained, wanted: Export) -> list[str]:
    """Write the merged model and upload it; a folder that could not be uploaded stays."""
    from huggingface_hub import HfApi, constants

    if wanted.repository is None:
        raise UserError("--repository: missing. Name the repository on the hub, as in --repository owner/name.")
    output = _free_output(wanted.output or trained.folder() / "export" / "hub", wanted.overwrite)
    write_folder(trained, output)
    card = exported_card(trained.folder(), trained.section.base_model, wanted.repository)
    write_text(output / "README.md", card)
    with activity(f"uploading to {wanted.repository}"):
        try:
            api = HfApi()
            place = api.create_repo(wanted.repository, private=wanted.private, exist_ok=True)
            api.upload_folder(repo_id=place.repo_id, folder_path=output, commit_message="Upload the merged model")
        except Exception as error:  # errors of the hub and of its HTTP library have no common class
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            lost = constants.HF_HUB_OFFLINE or is_of_network(error)
            remedy = "Once the hub can be reached" if lost else "Log in with `hf auth login`, or upload it yourself"
            remedy += f": hf upload {wanted.repository} {output}"
            raise UserError(f"--repository {wanted.repository}: not uploaded: {reason}. {remedy}") from error
    return [str(output), str(place)]


@contextmanager
def _model_folder(trained: Trained, near: Path) -> Iterator[Path]:
    """Yield the folder of the whole model: the run's, or a temporary one with the adapter merged."""
    if trained.adapter is None:
        yield trained.folder()
        return
    AdapterFolder(trained.section, trained.adapter)  # refuses what is damaged before a folder is made
    with tempfile.TemporaryDirectory(dir=_made(near), prefix=".merged-") as scratch:
        folder = Path(scratch) / "merged"
        write_folder(trained, folder)
        yield folder


def _require_answers(model: Path, by: str) -> None:
    """Refuse reward models where text is to be written."""
    names = getattr(AutoConfig.from_pretrained(str(model)), "architectures", None) or [""]
    if names[0].endswith(SINGLE_SCORES):
        raise UserError(f"{by} is for models that write text, and this one gives scores; use `--to folder`.")


def _ends(model: Path, tokenizer: Any) -> list[str]:
    """Return the texts of the tokens that end an answer: of the tokenizer, the generation config, the template."""
    ends = [tokenizer.eos_token_id]
    if (model / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(str(model)).eos_token_id
        ends += eos if isinstance(eos, list) else [eos]
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    try:
        ends += tokenizer.encode(
            tokenizer.apply_chat_template(turn, tokenize=False).rstrip(), add_special_tokens=False
        )[-1:]
    except Exception:  # a template is foreign code; `modelfile` says what is wrong with it
        return []
    special = set(tokenizer.all_special_tokens)
    texts = dict.fromkeys(tokenizer.convert_ids_to_tokens(end) for end in ends if end is not None)
    return [text for text in texts if text in special or text in tokenizer.get_added_vocab()]


def _free_output(output: Path, overwrite: bool) -> Path:
    """Return the place to write to, emptied if that is wanted; raise where something is there already."""
    output = output.expanduser()
    if output.exists() and not overwrite:
        raise UserError(f"{output} is there already; add --overwrite, remove it, or name another with --output")
    if output.is_dir() and not output.is_symlink():
        _refuse_foreign(output)
        shutil.rmtree(output)
    else:
        output.unlink(missing_ok=True)
    return output


def _refuse_foreign(folder: Path) -> None:
    """Raise for a folder with anything that no export writes, which is not ours to remove."""
    known = (".safetensors", ".json", ".jinja", ".md", ".gguf", ".model", ".txt", ".py")
    foreign = [file for file in folder.iterdir() if file.name != "Modelfile" and file.suffix not in known]
    if foreign or any(file.name == "adapter_config.json" for file in folder.iterdir()):
        raise UserError(f"--overwrite: {folder} holds more than an export; remove it yourself, or name another folder")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def name_of(folder: Path) -> str:
    """Return a name for the served model: that of the folder of its run, in letters that every program takes."""
    parts = [part for part in folder.resolve().parts if part not in ("export", "vllm", "merged", "folder")]
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in parts[-1].lower())
    return plain.strip("-._") or "model"
