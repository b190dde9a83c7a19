"""A trained model as one folder that transformers and vLLM load: weights, tokenizer with its template, model card."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.export.card import exported_card
from upweight.files import atomic_path
from upweight.models.adapters.merge import AdapterFolder, merge_adapter
from upweight.runs.checkpoints import MERGE_SOURCE

# The files of a model in a run folder, which also has completions, logs and checkpoints that stay where they are.
MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "*.model",
    "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*", "*processor_config.json",
    "modeling_*.py", "configuration_*.py", "tokenization_*.py",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A trained model: a whole one in the folder that `section` names, or an adapter and its base model."""

    section: ModelSection
    adapter: Path | None

    def folder(self) -> Path:
        """Return the folder that training wrote."""
        if self.adapter is not None:
            return self.adapter
        folder = Path(self.section.base_model or "").expanduser()
        if self.section.gguf_file is not None or not folder.is_dir():
            raise UserError(f"{self.section.base_model}: is no folder with a trained model in it")
        return folder


def write_folder(trained: Trained, target: Path) -> None:
    """Write the model, an adapter merged into it, with its tokenizer and a model card to a new folder."""
    if target.exists():
        raise UserError(f"{target} exists already; remove it, or name another folder with --output")
    if trained.adapter is not None:
        adapted = AdapterFolder(trained.section, trained.adapter)
        merge_adapter(adapted, target)
        (target / MERGE_SOURCE).unlink(missing_ok=True)  # names a folder of this machine
    else:
        source = trained.folder()
        files = sorted({file for pattern in MODEL_FILES for file in source.glob(pattern) if file.is_file()})
        if not any(file.name == "config.json" for file in files):
            raise UserError(f"{source}: holds no config.json; name a folder with a trained model in it")
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as part:
            part.mkdir()
            for file in files:
                shutil.copy2(file, part / file.name)
    (target / "README.md").write_text(exported_card(trained.folder(), trained.section.base_model), encoding="utf-8")
