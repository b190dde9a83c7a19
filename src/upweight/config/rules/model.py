"""Rules about the model: loading, adapters, quantised weights and the head."""

import re
from collections.abc import Iterator
from typing import Literal

from upweight.config.config import Config
from upweight.errors import did_you_mean

# Arguments of `from_pretrained` -> the config key that sets them.
HAVE_KEYS = dict.fromkeys(("dtype", "torch_dtype"), "'bf16' or 'fp16'")
HAVE_KEYS |= {"num_labels": "'num_labels'", "config": "'model_config'"}
INITIALISATIONS = r"gaussian|olora|orthogonal|loftq|pissa(_niter_\d+)?"  # of PEFT, but for those that need data
BITSANDBYTES = (  # options of transformers' BitsAndBytesConfig, which ignores others
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage",
    "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
)  # fmt: skip
Head = Literal["tokens", "sequence_score", "step_score"]
ENDINGS: dict[Head, str] = {
    "tokens": "ForCausalLM",
    "sequence_score": "ForSequenceClassification",
    "step_score": "ForTokenClassification",
}
IMAGE_ENDINGS = ("ForImageTextToText", "ForConditionalGeneration")  # of vision-language models


def loading(config: Config) -> Iterator[str]:
    """Check the model class, the outputs of its head, the arguments of `from_pretrained`, and GGUF files."""
    model, adapter, head, labels = config.model, config.adapter, config.method.head, config.model.num_labels
    ending = ENDINGS[head]
    endings = (ending, *IMAGE_ENDINGS) if head == "tokens" else (ending,)
    if model.model_class is not None and not model.model_class.endswith(endings):
        yield f"model_type: this method needs a model {ending!r}, such as AutoModel{ending}, not {model.model_class}."
    if model.mistral_tokens and model.tokenizer_class:
        yield "tokenizer_use_mistral_common: cannot be used with 'tokenizer_type'. Keep one."
    if model.tokenizer_class is not None and "Token" not in model.tokenizer_class:
        yield f"tokenizer_type: {model.tokenizer_class} is no tokenizer, such as LlamaTokenizerFast. Leave it out."
    if head == "sequence_score" and labels != 1:
        yield f"num_labels: an outcome reward model has 1 output, not {labels}; set 'num_labels: 1'."
    if head == "step_score" and labels is not None and labels < 2:
        yield f"num_labels: a process reward model has at least 2 outputs, not {labels}; set 'num_labels: 2'."
    if head != "tokens" and config.optim.router_aux_loss_coef:
        yield "router_aux_loss_coef: reward models return no router logits to balance. Leave it out, or set it to 0."
    for name, key in HAVE_KEYS.items():
        if name in model.load_options:
            yield f"model_kwargs: {name!r} is set by {key}. Remove it here."
    unpacked = model.gguf_file is not None or (model.base_model or "").endswith(".gguf")
    if unpacked and (adapter.load_in_4bit or adapter.load_in_8bit):
        yield "load_in_4bit, load_in_8bit: the weights of a GGUF file are not quantised. Use safetensors, or drop it."
    if model.ternary and (adapter.kind or unpacked):
        yield "use_onebitllms: every weight is trained, from safetensors; drop it, or 'adapter' and 'gguf_file'."


def quantisation(config: Config) -> Iterator[str]:
    """Check the options of bitsandbytes, of which transformers ignores those that it does not know."""
    for option in config.adapter.quantisation:
        if option not in BITSANDBYTES:
            hint = did_you_mean(option, BITSANDBYTES) or f" It has {', '.join(BITSANDBYTES)}."
            yield f"bnb_config_kwargs: bitsandbytes has no option '{option}'.{hint}"


def adapters(config: Config) -> Iterator[str]:
    """Check adapters, quantised base weights and unfrozen parameters."""
    adapter = config.adapter
    if (adapter.load_in_4bit or adapter.load_in_8bit) and adapter.kind is None:
        key, kind = ("load_in_4bit", "qlora") if adapter.load_in_4bit else ("load_in_8bit", "lora")
        yield f"{key}: quantised weights cannot be trained. Add 'adapter: {kind}'."
    if adapter.kind == "qlora" and not adapter.load_in_4bit:
        yield "adapter: qlora needs 'load_in_4bit: true'; without quantisation it is 'adapter: lora'."
    if adapter.pack_experts and not adapter.load_in_4bit:
        yield "quantize_moe_experts: experts are quantised to 4 bits. Add 'load_in_4bit: true', or drop it."
    if adapter.pack_experts and (config.sharding.fsdp or config.sharding.deepspeed is not None):
        yield "quantize_moe_experts: experts in 4 bits are not sharded. Drop it, or 'fsdp' and 'deepspeed'."
    if adapter.kind and isinstance(adapter.init, str) and not re.fullmatch(INITIALISATIONS, adapter.init):
        yield f"peft_init_lora_weights: there is no '{adapter.init}'. Use gaussian, olora, orthogonal or pissa."
    if adapter.kind and adapter.layers_pattern and adapter.layers is None:
        yield "peft_layers_pattern: needs 'peft_layers_to_transform', the numbers of the layers."
    yield from _of_parameters(config)
    if adapter.folder and adapter.kind is None:
        yield "lora_model_dir: needs 'adapter: lora' (or qlora) to be continued."
    for pattern in config.optim.unfrozen or ():
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"unfrozen_parameters: {pattern!r} is no regular expression: {error}. Correct it."
    if config.optim.unfrozen and adapter.kind:
        yield "unfrozen_parameters: is for full fine-tuning, but 'adapter' is set; use 'lora_modules_to_save'."


def _of_parameters(config: Config) -> Iterator[str]:
    """Check the options that PEFT does not have for weights that are adapted directly."""
    adapter = config.adapter
    if adapter.kind is None or not adapter.target_parameters:
        return
    initialised = isinstance(adapter.init, str) and adapter.init != "gaussian"
    options = {
        "lora_dropout": adapter.dropout > 0,
        "peft_use_dora": adapter.dora,
        "lora_fan_in_fan_out": adapter.fan_in_fan_out,
        "peft_init_lora_weights": initialised,
        "peft.loftq_config": adapter.peft.loftq_config is not None,
    }
    for path, is_set in options.items():
        if is_set:
            yield f"{path}: PEFT has it for layers, not for 'lora_target_parameters'. Drop one of the two."


def references(config: Config) -> Iterator[str]:
    """Check the keys that concern the reference model."""
    method = config.method
    if config.adapter.separate_reference and config.adapter.kind and method.reference_sync is not None:
        yield "sync_ref_model: a separate reference cannot follow an adapter, a copy can; drop rl_adapter_ref_model."
    if config.optim.neftune_alpha and not method.takes_noise:
        yield "neftune_noise_alpha: noise on embeddings is for SFT: policy and reference would differ by it. Drop it."
    if config.optim.reference_offloading and config.adapter.separate_reference:
        yield "reference_offloading: is for a copy of weights whole on one device; drop it, or rl_adapter_ref_model."


def without_effect(config: Config) -> Iterator[str]:
    """Warn about keys without effect, and about training without float32 masters."""
    stray = [path for path in config.set_keys if path.startswith(("lora_", "peft")) and path != "lora_model_dir"]
    if stray and config.adapter.kind is None:
        yield f"{', '.join(stray)}: no effect without 'adapter: lora'"
    if config.model.pure_bf16:
        yield "bfloat16: weights are trained without float32 masters; at small learning rates most updates are lost"
