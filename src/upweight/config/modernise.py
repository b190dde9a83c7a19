"""Renames deprecated keys and keys of other trainers to the current ones."""

from dataclasses import dataclass, field
from typing import Any

from upweight.config import peers
from upweight.config.yaml_file import copy_tree

OTHER_ATTENTION = ("xformers", "sage", "fp8", "varlen", "flash_attention_4")
AUTO, HALF, FULL = ("bf16", "auto"), ("fp16", True), ("bf16", False)
PRECISIONS = {"auto": AUTO, "bfloat16": ("bf16", True), "float16": HALF, "float32": FULL}
AXOLOTL_TEMPERATURE = 0.7  # of answers that are sampled without naming one
SHARDING_WORDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "NO_SHARD": False}


class Spelling(str):
    """A notice on a key that has another name here, or asks for what always happens: it changes nothing."""

    __slots__ = ()


@dataclass
class Findings:
    """The errors and notices about a config."""

    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def asks_for_something(value: Any) -> bool:
    """Whether a value turns something on; `null`, `false`, `none` and empty values do not."""
    return value not in (None, False, "", "none", "None", [], {})


def modernise(content: dict[Any, Any], findings: Findings) -> dict[Any, Any]:
    """Return the config with current key names; each rename adds a notice."""
    content = copy_tree(content)
    _rename_fsdp_keys(content, findings)
    for old, new in (peers.RENAMED | peers.OTHER_NAMES).items():
        if old != "lr" or not isinstance(content.get(old), str):  # `lr: dpo` is a slip for `rl: dpo`
            _rename_key(content, old, new, findings, deprecated=old in peers.RENAMED)
    for key, values in peers.VALUES_MEANING_OFF.items():
        if type(content.get(key)) in (int, float) and content[key] in values:
            del content[key]
    _pretraining(content, findings)
    _packs(content, findings)
    _lowest_rate(content, findings)
    _resume(content, findings)
    _sampled_answers(content, findings)
    _rename_precision(content, findings)
    _rename_attention(content, findings)
    _rename_checkpointing(content, findings)
    if isinstance(optimizer := content.get("optimizer"), str) and optimizer in peers.OPTIMIZERS:
        content["optimizer"] = peers.OPTIMIZERS[optimizer]
        findings.notices.append(Spelling(f"optimizer: {optimizer!r} is called '{content['optimizer']}' here"))
    if content.get("torch_compile") == "auto":  # leaves the choice to the trainer
        findings.notices.append("torch_compile: 'auto' compiles attention and head on a GPU; layers are not compiled")
        content["torch_compile"] = False
    _distillation(content, findings)
    _check_plugins(content, findings)
    _check_accelerator(content, findings)
    if content.get("tokens") == []:
        del content["tokens"]
    if isinstance(content.get("tokens"), dict):  # the deprecated form
        _rename_key(content, "tokens", "special_tokens", findings)
    if content.get("chat_template") in peers.IN_TOKENIZERS:
        findings.notices.append(Spelling(f"chat_template: {content['chat_template']} is taken from the tokenizer"))
        content["chat_template"] = "tokenizer_default"
    lists = [content[key] for key in ("datasets", "test_datasets") if isinstance(content.get(key), list)]
    for row in (row for rows in lists for row in rows if isinstance(row, dict)):
        for old, new in peers.ROW_RENAMED.items():
            _rename_key(row, old, new, findings)
        _texts_with_images(row, findings)
    return content


def _rename_fsdp_keys(content: dict[Any, Any], findings: Findings) -> None:
    """Rename the keys of FSDP1, with and without the prefix `fsdp_`, to those of FSDP2."""
    block = content.get("fsdp_config")
    if not isinstance(block, dict):
        return
    prefixed = [key for key in block if isinstance(key, str) and key.startswith("fsdp_")]
    for key in prefixed:
        plain = key.removeprefix("fsdp_")
        if block.get(plain) not in (None, block[key]):
            findings.errors.append(f"fsdp_config.{key}: contradicts 'fsdp_config.{plain}'. Keep one.")
        block[plain] = block.pop(key)
    if prefixed:
        findings.notices.append(Spelling("fsdp_config: the prefix 'fsdp_' of its keys is not needed"))
    for key in ("sharding_strategy", "reshard_after_forward"):
        word = str(block.get(key)).upper()
        if word in SHARDING_WORDS:
            block[key] = SHARDING_WORDS[word]
    _rename_key(content, "fsdp_config.sharding_strategy", "fsdp_config.reshard_after_forward", findings)


def _rename_key(content: dict[Any, Any], old: str, new: str, findings: Findings, *, deprecated: bool = True) -> None:
    holder, name = _parent_mapping(content, old)
    value = holder.pop(name, None)
    if value is None:
        return
    findings.notices.append(
        Spelling(f"{old}: is now called '{new}'" if deprecated else f"{old}: is called '{new}' here")
    )
    target, new_name = _parent_mapping(content, new, make=True)
    if target.get(new_name) not in (None, value):
        findings.errors.append(f"{old}: contradicts '{new}', which means the same. Keep only '{new}'.")
    target[new_name] = value


def _parent_mapping(content: dict[Any, Any], path: str, make: bool = False) -> tuple[dict[Any, Any], str]:
    """Return the mapping that contains the last part of a path, or an empty mapping, and that last part."""
    block, _, name = path.rpartition(".")
    if make and block and content.get(block) is None:
        content[block] = {}
    holder = content.get(block) if block else content
    return (holder if isinstance(holder, dict) else {}), name


def _pretraining(content: dict[Any, Any], findings: Findings) -> None:
    """`pretraining_dataset`, one entry or several, as entries of `datasets` with `type: pretrain`."""
    given = content.pop("pretraining_dataset", None)
    if not asks_for_something(given):
        return
    if asks_for_something(content.get("datasets")):
        findings.errors.append("pretraining_dataset: 'datasets' is set too. Keep one of them.")
        return
    rows = [{"path": row} if isinstance(row, str) else row for row in (given if isinstance(given, list) else [given])]
    findings.notices.append(
        Spelling("pretraining_dataset: is called 'datasets' with 'type: pretrain' and 'streaming' here")
    )
    content.setdefault("streaming", True)
    content["datasets"] = [{"type": "pretrain", **row} if isinstance(row, dict) else row for row in rows]


def _packs(content: dict[Any, Any], findings: Findings) -> None:
    """Say what a batch counts: with `sample_packing` Axolotl's is of packs, in SFT."""
    others = ("rl", "reward_model", "process_reward_model")
    if content.get("sample_packing") is True and not any(asks_for_something(content.get(key)) for key in others):
        del content["sample_packing"]
        counts = "rows are always packed, and 'micro_batch_size' counts rows, where Axolotl counts packs"
        advice = "raise it for steps of as many tokens (`upweight train` prints how many a step has)"
        findings.notices.append(f"sample_packing: {counts} of 'sequence_len' tokens: {advice}")


def _texts_with_images(row: dict[Any, Any], findings: Findings) -> None:
    """Axolotl's `multimodal_pretrain`, texts with placeholders and a column of images, as the format `completion`."""
    if row.get("type") != "multimodal_pretrain":
        return
    findings.notices.append(Spelling("datasets.type: 'multimodal_pretrain' is called 'completion' here"))
    row["type"] = "completion"
    if asks_for_something(column := row.pop("text_column", None)):
        row["field"] = column
    usual = {"image_column": ("images", "image"), "image_token": ("<image>",), "image_base_dir": ()}
    remedies = {
        "image_column": "images are read from the column 'images' or 'image': rename yours",
        "image_token": "write <image>, or the model's own image token, where an image is in a text",
        "image_base_dir": "files are looked up beside the data and the config: write their paths from there",
    }
    for key, values in usual.items():
        value = row.pop(key, None)
        if asks_for_something(value) and value not in values:
            findings.errors.append(f"datasets.{key}: {remedies[key]}.")


def _lowest_rate(content: dict[Any, Any], findings: Findings) -> None:
    """`eta_min`, the rate at which a cosine schedule ends, as the argument of transformers' schedule."""
    schedule = content.get("lr_scheduler") or "cosine"
    if content.get("eta_min") is None:
        return
    if schedule in ("cosine", "cosine_with_min_lr"):
        content["lr_scheduler"] = "cosine_with_min_lr"
    else:
        findings.errors.append(f"eta_min: is for 'lr_scheduler: cosine', not for {schedule!r}. Drop one of them.")
    _rename_key(content, "eta_min", "lr_scheduler_kwargs.min_lr", findings, deprecated=False)


def _resume(content: dict[Any, Any], findings: Findings) -> None:
    """`resume_from_checkpoint: true`, which transformers takes for the last checkpoint, as the key of that name."""
    if content.get("resume_from_checkpoint") is False:
        del content["resume_from_checkpoint"]
    elif content.get("resume_from_checkpoint") is True:
        _rename_key(content, "resume_from_checkpoint", "auto_resume_from_checkpoints", findings, deprecated=False)


def _sampled_answers(content: dict[Any, Any], findings: Findings) -> None:
    """Axolotl's options of sampled answers; it reads them only where `generate_samples` or a table of answers is on."""
    if content.get("generate_samples"):
        _rename_key(content, "num_generation_samples", "eval_samples", findings, deprecated=False)
        samples = content.pop("generation_do_sample", None)
        if samples is False:
            content["generation_temperature"] = 0
        elif samples and content.get("generation_temperature") is None:
            content["generation_temperature"] = AXOLOTL_TEMPERATURE
    for old in ("eval_max_new_tokens", "eval_table_max_new_tokens"):
        if content.get("generate_samples") or content.get("eval_samples"):
            _rename_key(content, old, "generation_max_new_tokens", findings, deprecated=False)
        elif content.pop(old, None) is not None:
            findings.notices.append(f"{old}: has no effect without 'eval_samples'")
    for name in ("num_generation_samples", "generation_do_sample"):
        if content.pop(name, None) is not None:
            findings.notices.append(f"{name}: has no effect without 'generate_samples: true'")


def _rename_precision(content: dict[Any, Any], findings: Findings) -> None:
    """`torch_dtype` and `float16`, as other trainers write the precision, as `bf16` and `fp16`."""
    dtype, half = content.pop("torch_dtype", None), content.pop("float16", None)
    if half not in (None, True, False):
        findings.errors.append(f"float16: expected true or false, got {half!r}")
    if dtype is None and half is not True:
        return
    named, word = ("float16", "float16") if half is True else ("torch_dtype", str(dtype).removeprefix("torch."))
    if word not in PRECISIONS:
        findings.errors.append(f"torch_dtype: expected one of {', '.join(PRECISIONS)}, got {dtype!r}")
        return
    key, value = PRECISIONS[word]
    findings.notices.append(Spelling(f"{named}: is called '{key}: {str(value).lower()}' here"))
    if half is True and content.get("fp16") is False:  # which in Axolotl says that weights are not cast again
        del content["fp16"]
    if content.get(key) not in (None, "auto", value):
        findings.errors.append(f"{named}: contradicts '{key}: {str(content[key]).lower()}'. Keep only '{key}'.")
    content[key] = value


def _rename_attention(content: dict[Any, Any], findings: Findings) -> None:
    on = [switch for switch in peers.ATTENTION_SWITCHES if content.get(switch) is True]
    for switch in peers.ATTENTION_SWITCHES:
        value = content.pop(switch, None)
        if value not in (None, True, False):
            findings.errors.append(f"{switch}: expected true or false, got {value!r}")
    chosen = content.get("attn_implementation")
    if len(on) > 1 or (on and chosen is not None):
        both = " and ".join(on if len(on) > 1 else [on[0], "attn_implementation"])
        findings.errors.append(f"{on[0]}: {both} are set. Keep one.")
    elif on:
        content["attn_implementation"] = peers.ATTENTION_SWITCHES[on[0]]
        findings.notices.append(
            Spelling(f"{on[0]}: is now called 'attn_implementation: {peers.ATTENTION_SWITCHES[on[0]]}'")
        )
    elif isinstance(chosen, str) and (chosen in OTHER_ATTENTION or "/" in chosen):
        del content["attn_implementation"]
        findings.notices.append(
            Spelling(f"attn_implementation: nothing to do for {chosen!r}: the tree attention serves")
        )


def _rename_checkpointing(content: dict[Any, Any], findings: Findings) -> None:
    """Rename the offloading values of other trainers to `activation_offloading: true`."""
    if (value := content.get("gradient_checkpointing")) in ("offload", "offload_disk", "unsloth"):
        findings.notices.append(
            Spelling(f"gradient_checkpointing: {value!r} is called 'activation_offloading: true' here")
        )
        content["gradient_checkpointing"] = content["activation_offloading"] = True
    if content.get("activation_offloading") in ("legacy", "disk", "hidden_states"):
        findings.notices.append(Spelling("activation_offloading: activations go to host memory: use 'true'"))
        content["activation_offloading"] = True


def _distillation(content: dict[Any, Any], findings: Findings) -> None:
    """`kd_*`, as Axolotl writes distillation from logged log-probs or from a server, as `rl: distill`."""
    if not any(asks_for_something(value) for key, value in content.items() if str(key).startswith("kd_")):
        return
    content.pop("kd_trainer", None)
    if content.pop("kd_online_server", "vllm") != "vllm":
        findings.errors.append("kd_online_server: only a vLLM server can be a teacher.")
    renormalises, beta = content.pop("kd_normalize_topk", None), content.pop("kd_beta", None)
    for old, new in peers.KD_KEYS.items():
        _rename_key(content, old, new, findings, deprecated=False)
    content.setdefault("rl", "distill")
    block = content.setdefault("distill", {})
    fixed = {"on_policy": 0, "divergence": "jsd", "beta": beta or 0.0, "temperature_squared": True}
    fixed |= {"teacher": "logged", "top_k": 128, "tail": "renormalise" if renormalises else "drop"}
    if isinstance(block, dict):
        content["distill"] = fixed | block


def _check_plugins(content: dict[Any, Any], findings: Findings) -> None:
    plugins = content.get("plugins")
    for plugin in (one for one in plugins if isinstance(one, str)) if isinstance(plugins, list) else ():
        if plugin in peers.PLUGINS:
            findings.notices.append(
                Spelling(f"{plugin.rpartition('.')[2]} in plugins: nothing to do: {peers.PLUGINS[plugin]}")
            )
        else:
            findings.errors.append(f"plugins: {plugin!r} is not supported. Plugins of other trainers cannot be loaded.")


def _check_accelerator(content: dict[Any, Any], findings: Findings) -> None:
    """Refuse options of accelerate that would change the size of a batch; the others change no number."""
    block = content.get("accelerator_config")
    if not asks_for_something(block):
        return
    block = dict(block) if isinstance(block, dict) else {str(block): True}
    inner = block.pop("gradient_accumulation_kwargs", None)
    options = block | (inner if isinstance(inner, dict) else {})
    for name in (str(name) for name, value in options.items() if asks_for_something(value)):
        if name not in peers.ACCELERATOR_OPTIONS:
            remedy = "'micro_batch_size' (of one rank) and 'gradient_accumulation_steps' set the size of a step"
            findings.errors.append(f"accelerator_config: {name!r} is not supported; {remedy}.")
