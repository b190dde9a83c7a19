"""Load the model to train from a folder, the hub or a GGUF file, with the head that the method needs."""

import copy
import importlib.util
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from upweight.config.rules.model import ENDINGS, Head
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.errors import UserError, did_you_mean, foreign_cause
from upweight.heartbeat import activity
from upweight.log import inform_once, logger, warn_once
from upweight.models.first_look import Stored, broken_weights, packed_remedy
from upweight.models.hub import is_offline, local_copy, models_to_name, why_offline
from upweight.models.modules import dropout_rates
from upweight.models.patches import keep_soft_cap
from upweight.models.precision import HALF_DTYPES
from upweight.models.score_heads import add_score_class
from upweight.models.vision import require_family, vision_family
from upweight.runs.files import read_json

AUTO_CLASSES: dict[Head, str] = {head: f"AutoModel{ending}" for head, ending in ENDINGS.items()}
DEFAULT_NUM_LABELS: dict[Head, int] = {"sequence_score": 1, "step_score": 2}
ATTENTION = "attn_implementation"
MOST_NAMED = 5  # tokens in a message
FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
# What transformers logs before the error of a package that is missing, which `load_failures` words with its remedy.
logging.getLogger("transformers.modeling_gguf_pytorch_utils").addFilter(
    lambda record: not record.getMessage().startswith("Loading a GGUF checkpoint in PyTorch, requires")
)


def resolve_source(base_model: str | None, gguf_file: str | None, key: str = "base_model") -> tuple[str, str | None]:
    """Return the folder or hub id that the user named, and the GGUF file in it."""
    if base_model is None:
        raise UserError("base_model: no model is named; give a folder, a GGUF file or a hub id")
    source = Path(base_model).expanduser()
    if gguf_file is None and source.suffix == ".gguf" and source.is_file():
        return str(source.parent), source.name
    if source.is_dir():
        if gguf_file is not None and not (source / gguf_file).is_file():
            raise UserError(f"gguf_file: {source / gguf_file} does not exist")
        return str(source), gguf_file
    looks_like_a_path = base_model.startswith((".", "~", os.sep)) or base_model.count("/") > 1
    if looks_like_a_path:
        raise UserError(f"{key}: {base_model} is no folder here (looked in {source.absolute()}). Correct the path")
    # Elsewhere than for the model itself, a GGUF file cannot be named.
    if is_offline() and key == "base_model" and gguf_file is None and (copy := local_copy(base_model)) is not None:
        return str(copy.parent), copy.name
    return base_model, gguf_file


def teacher_source(
    place: str, student: ModelSection, revision: str | None, key: str = "distill.teacher"
) -> ModelSection:
    """Return what to load for a teacher: its folder or hub id; of an adapter's folder the base, without the adapter."""
    source, _ = resolve_source(place, None, key)
    file = Path(source) / "adapter_config.json"
    if file.is_file():
        source = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path") or student.base_model
    return ModelSection(base_model=source, trust_remote_code=student.trust_remote_code, revision=revision)


def _remedy_of_folder(folder: Path, key: str, problem: str) -> str:
    """Return what a folder holds in place of a whole model, and what to do."""
    if (packed := packed_remedy(folder, key)) is not None:
        return f"the folder {packed}"
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not (folder / "config.json").is_file():
        base = read_json(adapter).get("base_model_name_or_path") or "another model"
        as_object = f"PeftModel.from_pretrained(base, '{folder}', is_trainable=True)"
        return (
            f"the folder holds an adapter of {base}: name that model, and the folder as lora_model_dir; a script loads "
            f"the base and passes {as_object}"
        )
    return f"the folder does not hold a whole one: {broken_weights(folder) or problem}"


@contextmanager
def load_failures(key: str, source: str, what: str) -> Iterator[None]:
    """Turn the failures of loading from `source` into user errors with a remedy."""
    try:
        with activity(f"loading the {what} of {source}{'' if Path(source).is_dir() else ' (hub_timeout)'}"):
            yield
    except UserError:
        raise
    except (OSError, ValueError, ImportError, EOFError, UnpicklingError, SafetensorError) as error:
        text = str(error)
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        if "trust_remote_code" in text:
            remedy = "it runs code from its own repository: read that code, then set `trust_remote_code: true`"
        elif "gguf" in text.lower() and isinstance(error, ImportError):
            remedy = "reading GGUF files needs the package gguf: pip install gguf"
        elif isinstance(error, ImportError):
            remedy = f"a package is missing: {first}"
        elif isinstance(error, UnpicklingError):
            remedy = "a file of it is a pickle that holds more than tensors, which is not opened: get it as safetensors"
        elif "Unrecognized configuration class" in text:
            remedy = "its type has no model with this head (encoder-decoders have none): name a decoder, such as a Qwen"
        elif "does not recognize this architecture" in text:
            remedy = f"transformers {transformers.__version__} does not know its type; a later version may"
        elif Path(source).is_dir():
            remedy = _remedy_of_folder(Path(source), key, first)
        elif is_offline():
            not_here = f"it is not on this machine{_looked_up(source)}"
            remedy = f"{not_here}, and the hub is not asked ({why_offline()}). {models_to_name(key, source)}"
        else:
            remedy = (
                f"no folder of that name is here{_looked_up(source)}, and the hub did not give it (misspelt, or "
                f"private: then log in with `hf auth login`): {first}"
            )
        failure = UserError(f"{key}: could not load the {what} of {source!r}: {remedy}")
        of_hub = isinstance(error, OSError) and not Path(source).is_dir()
        raise failure from None if of_hub else error  # its traces, five of a wrong name, say nothing more


@contextmanager
def named_by(key: str) -> Iterator[None]:
    """Put the key that names another model in place of `base_model` in the errors about loading it."""
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(r"\bbase_model\b", key, str(error))) from foreign_cause(error)


def _looked_up(source: str) -> str:
    """Return where a relative path was looked for; nothing for a name that only the hub has."""
    may_be_path = source.count("/") != 1 or Path(source).parent.is_dir()
    return f" (a relative path is looked up in {Path.cwd()})" if may_be_path and not Path(source).is_absolute() else ""


def compute_dtype(section: ModelSection, device: torch.device) -> torch.dtype:
    """Return the dtype of forwards: that of `bf16` and `fp16`, or the one that suits the device."""
    if section.fp16:
        return torch.float16
    if section.bf16 is True or section.pure_bf16:
        _explain_slow_bfloat16(device)
        return torch.bfloat16
    if section.bf16 is False or device.type in ("cpu", "mps"):
        return torch.float32
    return torch.bfloat16 if device.type != "cuda" or torch.cuda.is_bf16_supported() else torch.float16


def dtype_of_weights(model: nn.Module, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of forwards of a model whose dtype a script chose: that of its weights, if it is a half."""
    chosen = next((p.dtype for p in model.parameters() if p.dtype in HALF_DTYPES), dtype)
    if chosen == torch.bfloat16:
        _explain_slow_bfloat16(device)
    return chosen


def _explain_slow_bfloat16(device: torch.device) -> None:
    """Say in one line, in place of torch's trace, that a CPU has no instructions for bfloat16."""
    supports = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if device.type == "cpu" and supports is not None and not supports():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        in_script = "in a script bf16=False, and a model loaded with dtype=torch.float32"
        problem = "this CPU has no instructions for bfloat16 and is slow in it"
        warn_once(f"bf16: {problem}; 'bf16: false' trains in float32 ({in_script})")


def master_dtype(section: ModelSection, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to load fully trained weights in: float32 where the files hold it."""
    # A master rounded to half precision has to move half a step of that grid before any forward changes.
    _, gguf_file = resolve_source(section.base_model, section.gguf_file)
    return torch.float32 if gguf_file is not None or load_model_config(section).dtype == torch.float32 else dtype


def load_model(
    section: ModelSection,
    dtype: torch.dtype,
    *,
    head: Head = "tokens",
    tokenizer: PreTrainedTokenizerBase | None = None,
    adapter: AdapterSection | None = None,
    seed: int = 42,
    head_follows: bool = False,  # an adapter provides the head later: a fresh one is not logged
) -> PreTrainedModel:
    """Load the model in `dtype` on the CPU, with its vocabulary resized for `tokenizer`; fresh weights use `seed`."""
    source, gguf_file = resolve_source(section.base_model, section.gguf_file)
    config = config_with_head(section, head)
    ternary = getattr(config, "quantization_config", {}).get("quantization_mode") == "online"
    if tokenizer is not None:
        text, pad = config.get_text_config(), tokenizer.pad_token_id
        text.pad_token_id = pad if pad is None or pad < text.vocab_size else None  # a new one comes with its row
    options: dict[str, Any] = {**hub_options(section), **section.load_options, ATTENTION: _attention(section)}
    for name in [name for name in options if hasattr(config, name) and name != "quantization_config"]:
        setattr(config, name, options.pop(name))  # as `from_pretrained` does without a config
    if gguf_file is not None:  # dequantised, so that weights can be trained
        packed = getattr(transformers, "GgufConfig", None)  # without this class transformers always unpacks
        options |= {"gguf_file": gguf_file} | ({"quantization_config": packed(dequantize=True)} if packed else {})
    if adapter is not None and (adapter.load_in_4bit or adapter.load_in_8bit):
        if (problem := Stored.of(getattr(config, "quantization_config", None)).problem(adapter, source)) is not None:
            raise UserError(problem)
        options |= _quantization_args(adapter, dtype)
    set_seed(seed)
    try:
        with load_failures("base_model", source, "weights"), _expert_packing(adapter):
            model, report = model_class(section, head, config).from_pretrained(
                source, config=config, dtype=dtype, output_loading_info=True, **options
            )
    except TypeError as error:
        unknown = [name for name in section.load_options if f"unexpected keyword argument '{name}'" in str(error)]
        if not unknown:
            raise
        raise UserError(
            f"model_kwargs: {unknown[0]!r} is neither an argument of `from_pretrained` nor a field of the config."
        ) from error
    if gguf_file is not None and Path(source).is_dir():
        model.name_or_path = str(Path(source, gguf_file))  # an adapter saves it as its base; a folder would not load
    if ternary:
        del model.hf_quantizer  # the weights are plain ones, and with it `save_pretrained` takes no gathered ones
        model.is_quantized = False
    _check_missing(report, source, head, model.base_model_prefix, logs=not head_follows)
    if adapter is not None and (adapter.load_in_4bit or adapter.load_in_8bit) and not adapter.pack_experts:
        _log_plain_experts(model)
    keep_soft_cap(model)
    if tokenizer is not None:
        fit_vocabulary(model, tokenizer, section)
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model


def _attention(section: ModelSection) -> Any:
    """Return the attention that is asked for; None, which leaves it to transformers, where it is not available."""
    name, problem = section.load_options.get(ATTENTION, section.attention), None
    if name == "flex_attention" and not torch.cuda.is_available():
        problem = "needs a GPU, and none is visible"
    elif ((name in FLASH and not FLASH[name]()) or "/" in str(name)) and not is_kernels_available():
        problem = "is not installed"
    if problem is not None:
        warn_once(f"{ATTENTION}: {name} {problem}; packed rows have attention kernels of their own, else sdpa is used")
    return name if problem is None else None


def load_model_config(section: ModelSection) -> PreTrainedConfig:
    """Return the model's config with the settings' overrides; unknown kinds of vision and audio models are refused."""
    source, gguf_file = resolve_source(section.base_model, section.gguf_file)
    if section.config_source is not None:
        source, gguf_file = resolve_source(section.config_source, None, "base_model_config")
    with load_failures("base_model_config" if section.config_source else "base_model", source, "config"):
        if gguf_file is None:
            config = AutoConfig.from_pretrained(source, **hub_options(section))
        else:
            written = (Path(source) / gguf_file).stat().st_mtime_ns if Path(source).is_dir() else 0
            config = copy.deepcopy(_gguf_config(source, gguf_file, tuple(hub_options(section).items()), written))
    require_family(config, source)
    if section.ternary:  # the saved config has it too, so that the model loads as it was trained
        ternary = transformers.BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="online").to_dict()
        config.quantization_config = getattr(config, "quantization_config", ternary)
        if config.quantization_config.get("quantization_mode") != "online":
            raise UserError(f"use_onebitllms: weights of {source!r} are stored quantised; name the unquantised model")
    for name, value in section.config_overrides.items():
        if not hasattr(config, name):
            meant = did_you_mean(name, config.to_dict())
            raise UserError(f"model_config: {name!r} is no field of a {config.model_type} config.{meant}")
        setattr(config, name, value)
    return config


@cache
def _gguf_config(source: str, gguf_file: str, options: tuple[tuple[str, Any], ...], written: int) -> PreTrainedConfig:
    """Read the config in a GGUF file, once: transformers reads its whole vocabulary for it, which takes seconds."""
    return AutoConfig.from_pretrained(source, gguf_file=gguf_file, **dict(options))


def config_with_head(section: ModelSection, head: Head) -> PreTrainedConfig:
    """Return the model's config with the number of outputs of this head."""
    config = load_model_config(section)
    if head == "tokens":
        return config
    labels, saved = section.num_labels or DEFAULT_NUM_LABELS[head], config.num_labels
    if saved != labels and any(name.endswith(ENDINGS[head]) for name in config.architectures or ()):
        fits = head == "step_score" and (saved or 0) > 1
        remedy = f"set `num_labels: {saved}`" if fits else "name one that has as many"
        raise UserError(
            f"base_model: {section.base_model!r} is a classifier with {saved} outputs, and {labels} are to be trained; "
            f"{remedy}, or the language model it was made from"
        )
    config.num_labels = labels
    return config


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: ModelSection) -> None:
    """Grow the embeddings to the tokenizer's size where they are smaller."""
    embedding: Any = model.get_input_embeddings()
    before = embedding.num_embeddings
    if len(tokenizer) <= before:
        return
    multiple = 32 if section.resize_to_32 else None
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple, mean_resizing=section.mean_resizing)
    embedding = model.get_input_embeddings()
    rows = f"{embedding.num_embeddings} rows instead of {before}"
    added = [repr(token) for token in tokenizer.convert_ids_to_tokens(list(range(before, len(tokenizer))))]
    named = ", ".join(added[:MOST_NAMED]) + (", ..." if len(added) > MOST_NAMED else "")
    count = "the token" if len(added) == 1 else f"the {len(added)} tokens"
    inform_once(f"embeddings: {rows}, for {count} that the model does not know: {named}")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability in the model to zero; an adapter attached later keeps its dropout."""
    for module, name, _ in list(dropout_rates(model)):
        setattr(module, name, 0.0)


def hub_options(section: ModelSection) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that choose a version on the hub."""
    revision = {} if section.revision is None else {"revision": section.revision}
    return {"trust_remote_code": section.trust_remote_code, **revision}


def model_class(section: ModelSection, head: Head, config: PreTrainedConfig | None = None) -> Any:
    """Return the transformers class that loads the model with this head."""
    reads_images = config is not None and vision_family(config) is not None and head == "tokens"
    if config is not None and head != "tokens":
        add_score_class(config, head)
    name = section.model_class or ("AutoModelForImageTextToText" if reads_images else AUTO_CLASSES[head])
    chosen = getattr(transformers, name, None)
    if chosen is None:
        raise UserError(f"model_type: transformers has no class {name!r}; this method trains {AUTO_CLASSES[head]}")
    reads = getattr(chosen, "config_class", None)  # classes that choose by the config (AutoModel...) have none
    if config is not None and reads is not None and not isinstance(config, reads):
        raise UserError(
            f"model_type: {name} does not load {section.base_model!r}, which is a {config.model_type} model. Leave the "
            "key out: the class is then chosen by the model's config"
        )
    return chosen


def model_without_weights(section: ModelSection, head: Head, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model with weights that have a shape and no values."""
    chosen = model_class(section, head, config)  # AutoModel..., or one that `model_type` names: without `from_config`
    with load_failures("base_model", section.base_model or "", "shape"), torch.device("meta"):
        return chosen._from_config(config) if issubclass(chosen, PreTrainedModel) else chosen.from_config(config)


def _quantization_args(adapter: AdapterSection, dtype: torch.dtype) -> dict[str, Any]:
    """Return the `from_pretrained` arguments that quantise frozen weights as they are loaded."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("load_in_4bit, load_in_8bit: quantised weights need bitsandbytes: pip install bitsandbytes")
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        warn_once("load_in_4bit, load_in_8bit: no GPU is visible; quantised weights are slow on a CPU")
    if adapter.load_in_8bit:  # it logs at every layer of every forward that it casts to float16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    settings: dict[str, Any] = {"load_in_8bit": True}
    if adapter.load_in_4bit:  # stored as `dtype`: shards are cut, cast and gathered as weights of one dtype
        settings = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype}
        settings |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = transformers.BitsAndBytesConfig(**settings | adapter.quantisation)
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device() if on_gpu else "cpu"}}


def _expert_packing(adapter: AdapterSection | None) -> AbstractContextManager[None]:
    """Return a context in which the experts of a mixture are quantised as they are read, where the settings ask."""
    if adapter is None or not adapter.pack_experts:
        return nullcontext()
    from upweight.models.adapters.packed_experts import packing_experts  # which imports bitsandbytes

    return packing_experts()


def _log_plain_experts(model: PreTrainedModel) -> None:
    """Log that the experts of a mixture are not quantised, which are most of its weights."""
    experts = [weight for name, weight in model.named_parameters() if weight.dim() == 3 and "expert" in name]
    if experts:
        size, dtype = sum(weight.nbytes for weight in experts) / 2**30, str(experts[0].dtype).removeprefix("torch.")
        logger.info("the experts stay in %s, %.1f GiB; with quantize_moe_experts they are in 4 bits too", dtype, size)


def _check_missing(report: dict[str, Any], source: str, head: Head, body: str, *, logs: bool) -> None:
    """Log the weights of a score head that are randomly initialised; raise where others are missing."""
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    fresh = [key for key in missing if head != "tokens" and key.split(".")[0] != body]
    lacking = [key for key in missing if key not in fresh]
    if lacking:
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        raise UserError(
            f"base_model: the files of {source!r} lack weights that this model needs, or have them in another shape: "
            f"{shown}; name a whole checkpoint of a {AUTO_CLASSES[head].removeprefix('AutoModelFor')} model"
        )
    if fresh and logs:
        logger.info("fresh head: %s", ", ".join(fresh))
