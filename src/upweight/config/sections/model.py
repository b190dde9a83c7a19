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
    config_source: str | None = setting(
        "base_model_config", None, "Hub id or folder of the model's config. When left out: `base_model`."
    )
    tokenizer: str | None = setting(
        "tokenizer_config", None, "Hub id or folder of the tokenizer. When left out: `base_model`."
    )
    tokenizer_class: str | None = setting("tokenizer_type", None, "Name of the tokenizer class in transformers.")
    tokenizer_use_fast: bool = setting("tokenizer_use_fast", True, "Whether the fast tokenizer is used.")
    mistral_tokens: bool = setting(
        "tokenizer_use_mistral_common", False, "Read the tokenizer from Mistral's `tekken.json`."
    )
    tokenizer_legacy: bool | None = setting("tokenizer_legacy", None, "Value of the tokenizer's argument `legacy`.")
    processor_class: str | None = setting(
        "processor_type", None, "Name of the processor class of a vision-language model; AutoProcessor when left out."
    )
    processor_options: dict[str, Any] = setting(
        "processor_kwargs", {}, "Further arguments of the processor's `from_pretrained`, such as `max_pixels`."
    )
    freeze_vision: bool | None = setting(
        "freeze_vision",
        None,
        "Freeze the vision tower and the projector. When left out: true with an adapter, else false.",
        also=("freeze_mm_modules",),
    )
    model_class: str | None = setting(
        "model_type",
        None,
        "Name of the model class in transformers. When left out, the method decides.",
        also=("type_of_model",),
    )
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
        "num_labels", None, "Outputs of the score head. When left out: 1 for outcome, 2 for process reward models."
    )
    special_tokens: SpecialTokens = setting("special_tokens", SpecialTokens(), "Tokens to set on the tokenizer.")
    new_tokens: list[str] = setting("tokens", [], "Tokens added to the vocabulary; embeddings are resized.")
    resize_to_32: bool = setting("resize_token_embeddings_to_32x", False, "Resize the vocabulary to a multiple of 32.")
    mean_resizing: bool = setting("mean_resizing_embeddings", False, "Start new embeddings at the mean of the old.")
    attention: Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"] | None = setting(
        "attn_implementation",
        None,
        "Attention of transformers, for padded rows and outside of training; packed rows have kernels of their own.",
    )
    layout: Literal["auto", "tree", "padded"] = setting(
        "layout",
        "auto",
        "tree: compute shared prefixes once; padded: every sequence in full; auto: tree if the model can.",
    )
    disable_dropout: bool | None = setting(
        "disable_dropout", None, "Turn dropout off; when left out, dropout stays on for SFT and reward models only."
    )
    bf16: bool | Literal["auto"] = setting(
        "bf16", "auto", "Compute in bfloat16 with float32 master weights; auto: if the device supports it."
    )
    fp16: bool = setting("fp16", False, "Compute in float16 with loss scaling.")
    pure_bf16: bool = setting(
        "bfloat16", False, "Train in bfloat16 without float32 master weights, so that very small updates are lost."
    )
    tf32: bool | Literal["auto"] = setting("tf32", "auto", "Whether float32 matrix products may use TF32 on the GPU.")


LOGGED = "logged"  # in place of a teacher: the rows hold its log-probs
SELF = "self"  # in place of a teacher: the policy itself


class TeacherSection(Section):
    """The models that are distilled."""

    teacher: str | None = setting(
        "distill.teacher",
        None,
        "Teacher: a folder, hub id, adapter folder or vLLM server URL; `self`; or `logged` (in the data).",
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
    align: Literal["text"] | None = setting(
        "distill.align",
        None,
        "text: a teacher may have another tokenizer; both are compared where tokens of both begin in the text.",
    )
    server_timeout: float = setting("distill.server_timeout", 240, "Seconds to wait for a teacher's server.", gt=0)

    @property
    def places(self) -> dict[str | None, str]:
        """The teachers by their names; a single one has none."""
        return {None: self.teacher} if self.teacher is not None else {**self.teachers}


class LoftQ(Strict):
    """LoftQ initialisation."""

    loftq_bits: int = inner(4, "Bits of the quantisation that LoftQ assumes.", gt=0)


class PeftBlock(Strict):
    """LoftQ initialisation: `{loftq_config: {loftq_bits: 4}}`."""

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
    targets: str | list[str] | None = setting(
        "lora_target_modules", None, "Names of the modules that get an adapter, or a pattern."
    )
    target_linear: bool = setting("lora_target_linear", False, "Put an adapter on every linear layer except the head.")
    target_parameters: str | list[str] | None = setting(
        "lora_target_parameters",
        None,
        "Parameters that get an adapter although they are no modules, such as expert weights.",
    )
    modules_to_save: list[str] | None = setting(
        "lora_modules_to_save", None, "Modules that are trained in full beside the adapter, and saved with it."
    )
    rank_pattern: dict[str, PositiveInt] = setting("lora_rank_pattern", {}, "Rank by module name pattern.")
    alpha_pattern: dict[str, PositiveInt] = setting("lora_alpha_pattern", {}, "Alpha by module name pattern.")
    fan_in_fan_out: bool = setting("lora_fan_in_fan_out", False, "For layers that store their weights transposed.")
    dora: bool = setting("peft_use_dora", False, "Decompose into magnitude and direction (DoRA).")
    rslora: bool = setting("peft_use_rslora", False, "Scale by alpha / sqrt(r) (rank-stabilised LoRA).")
    init: bool | str = setting("peft_init_lora_weights", True, "Initialisation of the adapter, named as in PEFT.")
    layers: list[int] | None = setting("peft_layers_to_transform", None, "Indices of the layers that get an adapter.")
    layers_pattern: list[str] | None = setting(
        "peft_layers_pattern", None, "Name of the model's list of layers, if PEFT does not know it."
    )
    peft: PeftBlock = setting("peft", PeftBlock(), "LoftQ initialisation: `{loftq_config: {loftq_bits: 4}}`.")
    plus_ratio: float | None = setting(
        "loraplus_lr_ratio", None, "LoRA+: learning rate of the B matrices divided by that of the A matrices.", gt=0
    )
    plus_embedding_rate: float = setting(
        "loraplus_lr_embedding", 1e-6, "LoRA+: learning rate of embeddings with an adapter.", gt=0
    )
    load_in_8bit: bool = setting("load_in_8bit", False, "Quantise frozen base weights to 8 bits (bitsandbytes).")
    load_in_4bit: bool = setting("load_in_4bit", False, "Quantise frozen base weights to 4 bits (bitsandbytes).")
    pack_experts: bool = setting(
        "quantize_moe_experts", False, "Quantise the routed experts of a mixture too; needs `load_in_4bit`."
    )
    quantisation: dict[str, Any] = setting("bnb_config_kwargs", {}, "Further options of bitsandbytes.")
    separate_reference: bool = setting(
        "rl_adapter_ref_model", False, "Load a second model as reference instead of switching the adapter off."
    )
