"""Keys about the model, its precision, tokenizer and adapter."""

from typing import Any, Literal

from upweight.settings import PositiveInt, Section, Strict, inner, setting


class SpecialTokens(Strict):
    """Tokens to set on the tokenizer."""

    bos_token: str | None = inner(None, "Beginning-of-text token.")
    eos_token: str | None = inner(None, "End-of-text token.")
    pad_token: str | None = inner(None, "Padding token.")
    unk_token: str | None = inner(None, "Unknown token.")
    additional_special_tokens: list[str] | None = inner(None, "Further tokens that are never split.")


class ModelSection(Section):
    """The model, its tokenizer and its precision."""

    base_model: str | None = setting("base_model", None, "Hub id or folder of the model to train; required.")
    config_source: str | None = setting("base_model_config", None, "Hub id or folder of a config; else `base_model`.")
    tokenizer: str | None = setting("tokenizer_config", None, "Hub id or folder of the tokenizer; else `base_model`.")
    tokenizer_class: str | None = setting("tokenizer_type", None, "Name of the tokenizer class in transformers.")
    tokenizer_use_fast: bool = setting("tokenizer_use_fast", True, "Whether the fast tokenizer is used.")
    mistral_tokens: bool = setting(
        "tokenizer_use_mistral_common", False, "Read Mistral's `tekken.json` with its tokens for BOS, EOS and padding."
    )
    tokenizer_legacy: bool | None = setting("tokenizer_legacy", None, "The tokenizer's `legacy` switch.")
    processor_class: str | None = setting(
        "processor_type", None, "Name of the processor class of a vision-language model; AutoProcessor when left out."
    )
    processor_options: dict[str, Any] = setting(
        "processor_kwargs", {}, "Further arguments of the processor's `from_pretrained`, such as `max_pixels`."
    )
    freeze_vision: bool | None = setting(
        "freeze_vision",
        None,
        "Do not train what only images go through (vision tower and projector); when left out, with an adapter.",
        also=("freeze_mm_modules",),
    )
    model_class: str | None = setting("model_type", None, "Model class; else by the method.", also=("type_of_model",))
    revision: str | None = setting("model_revision", None, "Hub branch, tag or commit.", also=("revision_of_model",))
    gguf_file: str | None = setting("gguf_file", None, "GGUF file inside `base_model`; its weights are dequantised.")
    ternary: bool = setting("use_onebitllms", False, "Round linear weights to -1, 0, 1 in each forward (BitNet).")
    config_overrides: dict[str, Any] = setting(
        "model_config", {}, "Values that replace those of the model's config.", also=("overrides_of_model_config",)
    )
    load_options: dict[str, Any] = setting(
        "model_kwargs", {}, "Further arguments of `from_pretrained`.", also=("overrides_of_model_kwargs",)
    )
    trust_remote_code: bool = setting("trust_remote_code", False, "Whether code from the model's repository may run.")
    num_labels: PositiveInt | None = setting(
        "num_labels", None, "Outputs of a score head; else 1 for outcome, 2 for process reward models."
    )
    special_tokens: SpecialTokens = setting("special_tokens", SpecialTokens(), "Tokens to set on the tokenizer.")
    new_tokens: list[str] = setting("tokens", [], "Tokens added to the vocabulary; embeddings are resized.")
    resize_to_32: bool = setting("resize_token_embeddings_to_32x", False, "Resize the vocabulary to a multiple of 32.")
    mean_resizing: bool = setting("mean_resizing_embeddings", False, "Start new embeddings at the mean of the old.")
    attention: Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"] | None = setting(
        "attn_implementation", None, "Attention kernel; chosen by device and row length when left out."
    )
    layout: Literal["auto", "tree", "padded"] = setting(
        "layout", "auto", "Sequences of a forward: trees with shared prefixes, or padded rows; auto: trees if possible."
    )
    disable_dropout: bool | None = setting(
        "disable_dropout", None, "Turn dropout off; when left out, dropout stays on for SFT and reward models only."
    )
    bf16: bool | Literal["auto"] = setting(
        "bf16", "auto", "Compute in bfloat16 with float32 masters of trained weights; auto: if the device can."
    )
    fp16: bool = setting("fp16", False, "Compute in float16 with loss scaling.")
    pure_bf16: bool = setting("bfloat16", False, "Train in bfloat16 without float32 masters: small updates vanish.")
    tf32: bool | Literal["auto"] = setting("tf32", "auto", "Whether float32 matrix products may use TF32 on the GPU.")


LOGGED = "logged"  # in place of a teacher: the rows hold its log-probs
SELF = "self"  # in place of a teacher: the policy itself


class TeacherSection(Section):
    """The models that are distilled."""

    teacher: str | None = setting(
        "distill.teacher",
        None,
        "Teacher: a folder, a hub id, an adapter's folder, a vLLM server's URL, `self`, `logged`.",
    )
    teachers: dict[str, str] = setting(
        "distill.teachers", {}, "Several teachers by name; the column `teacher_id` of a row names its teacher."
    )
    revision: str | None = setting("distill.teacher_revision", None, "Hub branch, tag or commit of the teacher.")
    load_options: dict[str, Any] = setting(
        "distill.teacher_kwargs", {}, "Further arguments of `from_pretrained` for the teacher."
    )
    load_in_4bit: bool = setting("distill.teacher_load_in_4bit", False, "Quantise the teacher to 4 bits.")
    load_in_8bit: bool = setting("distill.teacher_load_in_8bit", False, "Quantise the teacher to 8 bits.")

    server_timeout: float = setting("distill.server_timeout", 240, "Seconds to wait for a teacher's server.", gt=0)

    @property
    def places(self) -> dict[str | None, str]:
        """The teachers by their names; a single one has none."""
        return {None: self.teacher} if self.teacher is not None else {**self.teachers}


class LoftQ(Strict):
    """LoftQ initialisation."""

    loftq_bits: int = inner(4, "Bits of the quantisation that LoftQ assumes.", gt=0)


class PeftBlock(Strict):
    """Options that PEFT nests."""

    loftq_config: LoftQ | None = inner(None, "Initialise LoRA by LoftQ.")


class AdapterSection(Section):
    """Low-rank adapters and quantised base weights."""

    kind: Literal["lora", "qlora"] | None = setting(
        "adapter", None, "Train low-rank adapters instead of all weights; qlora needs `load_in_4bit`."
    )
    folder: str | None = setting("lora_model_dir", None, "Adapter to continue from.")
    rank: PositiveInt = setting("lora_r", 16, "Rank of the adapter.")
    alpha: PositiveInt = setting("lora_alpha", 32, "Scale of the adapter: alpha / r multiplies its output.")
    dropout: float = setting("lora_dropout", 0.0, "Dropout before the adapter.", ge=0, lt=1)
    targets: str | list[str] | None = setting("lora_target_modules", None, "Module names, or a pattern, to adapt.")
    target_linear: bool = setting("lora_target_linear", False, "Adapt every linear layer but the head.")
    target_parameters: str | list[str] | None = setting(
        "lora_target_parameters", None, "Parameters (such as expert weights) to adapt directly."
    )
    modules_to_save: list[str] | None = setting("lora_modules_to_save", None, "Modules trained in full and saved.")
    rank_pattern: dict[str, PositiveInt] = setting("lora_rank_pattern", {}, "Rank by module name pattern.")
    alpha_pattern: dict[str, PositiveInt] = setting("lora_alpha_pattern", {}, "Alpha by module name pattern.")
    fan_in_fan_out: bool = setting("lora_fan_in_fan_out", False, "For layers that store their weights transposed.")
    dora: bool = setting("peft_use_dora", False, "Decompose into magnitude and direction (DoRA).")
    rslora: bool = setting("peft_use_rslora", False, "Scale by alpha / sqrt(r) (rank-stabilised LoRA).")
    init: bool | str = setting("peft_init_lora_weights", True, "Initialisation of the adapter, named as in PEFT.")
    layers: list[int] | None = setting("peft_layers_to_transform", None, "Indices of the layers to adapt.")
    layers_pattern: list[str] | None = setting("peft_layers_pattern", None, "Name of the layer list, if unusual.")
    peft: PeftBlock = setting("peft", PeftBlock(), "Options that PEFT nests.")
    plus_ratio: float | None = setting("loraplus_lr_ratio", None, "LoRA+: how many times faster B learns than A.", gt=0)
    plus_embedding_rate: float = setting("loraplus_lr_embedding", 1e-6, "LoRA+: rate of adapted embeddings.", gt=0)
    load_in_8bit: bool = setting("load_in_8bit", False, "Quantise frozen base weights to 8 bits (bitsandbytes).")
    load_in_4bit: bool = setting("load_in_4bit", False, "Quantise frozen base weights to 4 bits (bitsandbytes).")
    quantisation: dict[str, Any] = setting("bnb_config_kwargs", {}, "Further options of bitsandbytes.")
    separate_reference: bool = setting("rl_adapter_ref_model", False, "Load a reference model beside an adapter.")
