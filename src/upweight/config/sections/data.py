"""Keys about data: sources of rows, formats and chat templates; those that select rows are in `row_rules`."""

from typing import Any, Literal

from pydantic import field_validator

from upweight.config.peers import TEMPLATE_ALIASES, TEMPLATE_NAMES
from upweight.row_rules import EntryRows, RowSection
from upweight.settings import PositiveInt, Strict, inner, setting

# `tokenizer_default` and `jinja` are accepted besides the templates that ship with the package.
KNOWN_TEMPLATES = (*TEMPLATE_NAMES, *TEMPLATE_ALIASES, "jinja", "tokenizer_default")
FALLBACK_PREFIX = "tokenizer_default_fallback_"
FileType = Literal["json", "jsonl", "csv", "parquet", "arrow", "text", "txt"]


class UserFormat(Strict):
    """A `type:` written as a mapping: the columns of the rows, and how their texts are formatted."""

    field_prompt: str = inner("prompt", "Column of the prompt.")
    field_system: str = inner("system", "Column of the system text; may be absent.")
    field_chosen: str = inner("chosen", "Column of the chosen answer.")
    field_rejected: str = inner("rejected", "Column of the rejected answer.")
    field_completion: str = inner("completion", "Column of the completion, for KTO.")
    field_label: str = inner("label", "Column of the label (desirable or not), for KTO.")
    label_values: dict[str, bool | None] = inner(
        {}, "Word in the label's column -> true or false; rows with the word of a `null` are left out. For KTO."
    )
    label_from: float | None = inner(
        None, "Rating in the label's column from which on a row is a good one; rows without one are left out. For KTO."
    )
    field_winner: str | None = inner(
        None, "Column that says which of two answers is better, in place of `field_chosen` and `field_rejected`."
    )
    winner_values: dict[str, str | None] = inner(
        {}, "Word in the winner's column -> column of the better answer; rows with the word of a `null` are left out."
    )
    prompt_format: str = inner("{prompt}", "Format of the prompt; `{system}` and `{prompt}` are filled in.")
    chosen_format: str = inner("{chosen}", "Format of the chosen answer.")
    rejected_format: str = inner("{rejected}", "Format of the rejected answer.")
    completion_format: str = inner("{completion}", "Format of the completion, for KTO.")
    field_instruction: str = inner("instruction", "Column of the instruction, for SFT.")
    field_input: str = inner("input", "Column of the instruction's input, for SFT.")
    field_output: str = inner("output", "Column of the answer, for SFT.")
    format: str | None = inner(None, "Format of the SFT prompt; `{instruction}` and `{input}` are filled in.")
    no_input_format: str | None = inner(None, "Format of the SFT prompt for rows without an input.")
    system_prompt: str = inner("", "System text for rows that have none.")
    system_format: str = inner(
        "{system}", "Format of the system text, which is put before the prompt if no format has `{system}`."
    )

    @property
    def has_marks(self) -> bool:
        """Whether words or ratings of a column are labels, or words name the better answer."""
        return bool(self.label_values or self.field_winner) or self.label_from is not None

    def leaving_out(self) -> list[str]:
        """Return the keys that leave out rows by the words or ratings in them."""
        marks = {"label_values": self.label_values, "winner_values": self.winner_values}
        by_word = [name for name, meanings in marks.items() if None in meanings.values()]
        return by_word + ["label_from"] * (self.label_from is not None)

    @field_validator("label_values", "winner_values", mode="before")
    @classmethod
    def _words_are_text(cls, values: Any) -> Any:
        """Read numbers as words; YAML reads `yes` and `no` as switches, of which the word cannot be told again."""
        if not isinstance(values, dict):
            return values
        if any(isinstance(word, bool) or word is None for word in values):
            raise ValueError("YAML reads yes, no, on, off, true, false and null as switches: put each word in quotes")
        return {str(word): value for word, value in values.items()}


class DatasetSpec(EntryRows):
    """One entry of `datasets`."""

    path: str | None = inner(None, "Hub id, file or folder.")
    name: str | list[str] | None = inner(None, "Configuration of the dataset on the hub, or a list of them.")
    split: str | None = inner(None, "Split, with slices such as `train[:1%]`.")
    type: str | UserFormat | None = inner(None, "Format of the rows, a transform, or a mapping of columns.")
    data_files: str | list[str] | None = inner(None, "Files to read.")
    ds_type: FileType | None = inner(None, "File type. When left out, the file name decides.")
    revision: str | None = inner(None, "Branch, tag or commit on the hub.")
    trust_remote_code: bool = inner(False, "Whether code from the dataset's repository may run.")
    streaming: bool | None = inner(
        None, "Read and tokenize these rows while training. When left out: the key `streaming` decides."
    )
    weight: float | None = inner(
        None, "Share of these rows in the mixture, relative to the weights of the other datasets.", gt=0
    )
    filter: str | None = inner(None, "Function of yours, `file.function`, that says which rows are kept.")
    as_messages: bool | None = inner(
        None, "Put plain prompts and answers into the chat template. When left out: plain text, with a warning."
    )
    chat_template: str | None = inner(None, "Chat template for these rows.")
    chat_template_jinja: str | None = inner(None, "Chat template as text or file name, for `chat_template: jinja`.")
    field_messages: str | None = inner(None, "Column of the messages; dots reach into nested columns.")
    field_chosen: str | None = inner(None, "Column of the chosen answer.")
    field_rejected: str | None = inner(None, "Column of the rejected answer.")
    field_system: str | None = inner(None, "Column of the system text, for conversations without a system message.")
    field_tools: str | None = inner(None, "Column of the tool definitions.")
    field_thinking: str | None = inner(None, "Message property that holds reasoning text.")
    template_thinking_key: str | None = inner(None, "Name of the reasoning text in the chat template.")
    field: str | None = inner(None, "Column of raw text, for `completion`.")
    text_column: str | None = inner(None, "Column of raw text, for `pretrain`.")
    message_property_mappings: dict[str, str] | None = inner(None, "Message property -> its name in the rows.")
    message_field_role: str | None = inner(None, "Older spelling of `message_property_mappings.role`.")
    message_field_content: str | None = inner(None, "Older spelling of `message_property_mappings.content`.")
    message_field_training: str | None = inner(None, "Message property that tells whether to train on the message.")
    message_field_training_detail: str | None = inner(None, "Message property with the character ranges to train on.")
    roles: dict[str, str | list[str]] | None = inner(None, "Role -> its names in the rows.")
    roles_to_train: list[str] | None = inner(None, "Roles whose messages are trained on. When left out: assistant.")
    train_on_eos: Literal["all", "turn", "last", "none"] | None = inner(
        None, "End-of-text tokens that are trained on. When left out: turn, those after trained turns."
    )
    train_on_eot: Literal["all", "turn", "last", "none"] | None = inner(
        None, "End-of-turn tokens that are trained on. When left out: `train_on_eos` decides."
    )
    drop_system_message: bool = inner(False, "Drop system messages.")
    split_thinking: bool = inner(False, "Move the text inside `<think>` tags to the reasoning property of the message.")
    step_separator: str | None = inner(None, "Text between reasoning steps, for process reward models.")
    logprobs_field: str | None = inner(None, "Column of a teacher's log-probs, for distillation.")
    server_name: str | None = inner(None, "NeMo Gym server that verifies these rows.")
    max_completion_length: PositiveInt | None = inner(None, "Longest completion, for process reward models.")
    train_on_last_step_only: bool = inner(False, "Train on the label of the last step only, for process reward models.")


class MixWeights(Strict):
    """One entry of `mix_schedule`."""

    step: int = inner(0, "Optimizer step from which these weights hold.", ge=0)
    weights: list[float] = inner([], "One for each dataset, in proportion; 0 leaves a dataset out.")


class DataSection(RowSection):
    """Training and evaluation data, and its preparation."""

    datasets: list[DatasetSpec] = setting("datasets", [], "Training data; required.")
    test_datasets: list[DatasetSpec] = setting("test_datasets", [], "Evaluation data.")
    prepared_path: str = setting("dataset_prepared_path", "last_run_prepared", "Folder of prepared data.")
    image_hosts: list[str] = setting(
        "image_hosts", [], "Hosts from which images of rows may be downloaded: `name`, `name:port` or `*.name`."
    )
    skip_prepare: bool = setting("skip_prepare_dataset", False, "Prepare the rows again instead of reading the cache.")
    processes: PositiveInt | None = setting("dataset_num_proc", None, "Processes that prepare data.")
    in_memory: bool = setting("dataset_keep_in_memory", False, "Keep data in memory instead of mapping it from disk.")
    deduplicate: bool = setting("dataset_exact_deduplication", False, "Drop rows that repeat an earlier one exactly.")
    near_duplicates: float | None = setting(
        "dataset_near_deduplication",
        None,
        "Drop training rows whose similarity to an earlier one is at least this, such as 0.8.",
        gt=0,
        le=1,
    )
    contamination: Literal["warn", "drop"] | None = setting(
        "dataset_contamination_check", None, "What happens to training rows that contain an evaluation row."
    )
    streaming: bool = setting(
        "streaming", False, "Read and tokenize the training data while training instead of before."
    )
    buffer_size: PositiveInt = setting(
        "streaming_buffer_size", 4096, "Rows of a stream that are shuffled together; 1: no shuffling."
    )
    mix: Literal["concatenate", "interleave_under", "interleave_over", "interleave_once"] = setting(
        "mix", "concatenate", "How several datasets are joined; interleaved ones keep the proportion of their weights."
    )
    mix_schedule: list[MixWeights] = setting("mix_schedule", [], "Weights of the datasets from given steps on.")
    curriculum_column: str | None = setting(
        "curriculum_column", None, "Column with numbers by which rows are ordered, lowest first."
    )
    train_on_inputs: bool = setting("train_on_inputs", False, "Also train on prompts, for SFT.")
    chat_template: str | None = setting(
        "chat_template", None, "Name of the chat template. When left out: the tokenizer's."
    )
    chat_template_jinja: str | None = setting(
        "chat_template_jinja", None, "Chat template as text or file name, for `chat_template: jinja`."
    )
    template_args: dict[str, Any] = setting(
        "chat_template_kwargs", {}, "Variables passed to the chat template.", also=("trl.chat_template_kwargs",)
    )
    template_timeout: float = setting(
        "chat_template_timeout", 60, "Longest time of the chat template for one conversation, in seconds.", gt=0
    )
    default_system_message: str | None = setting("default_system_message", None, "System text for rows that have none.")
    eot_tokens: list[str] = setting("eot_tokens", [], "Tokens that end a turn, if it is not the end-of-text token.")
    workers: int = setting("dataloader_num_workers", 0, "Processes that load batches.", ge=0)
    prefetch: PositiveInt | None = setting("dataloader_prefetch_factor", None, "Batches that each worker loads ahead.")
    drop_last: bool = setting("dataloader_drop_last", False, "Drop the last, incomplete batch.")
