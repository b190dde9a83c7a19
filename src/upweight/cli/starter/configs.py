"""The commented configs of starters: what a method needs of its own, between what all of them share."""

from dataclasses import dataclass

GYM_SERVER = "example_session_state_mgmt"  # comes with the Gym
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

TOP = """\
# {about}
# Every key: `upweight schema --markdown`. Check this file: `upweight validate config.yaml`.

base_model: {model}   # any causal language model on the hub, or a folder

"""

BOTTOM = """
adapter: lora                   # trains a few weights beside the model; drop these four lines to train all of them
lora_r: 16
lora_alpha: 32
lora_target_linear: true        # on every linear layer

learning_rate: {rate}             # the peak; ten times less where all weights train
micro_batch_size: {batch}             # {batch_of} in a step, for each GPU; `gradient_accumulation_steps` multiplies it
max_steps: {steps}                   # or num_epochs: 1
logging_steps: 1
output_dir: out
seed: 1
"""

PAIRS = """
datasets:
  - path: pairs.jsonl           # prompt, chosen, rejected: messages, or plain texts
val_set_size: 4                 # rows held out, on which the run evaluates
sequence_len: 512               # longer rows are left out; `upweight preprocess` suggests a value
"""

SAMPLED = """\
  num_generations: 8            # completions of each prompt, compared with each other: 4 to 16
  max_completion_length: 32     # tokens; longer ones are cut
  temperature: 1.0              # below 0.8 completions become alike, and nothing can be compared
"""

REWARDED = f"""\
trl:
{SAMPLED}\
  reward_funcs:
    - rewards.correct           # in rewards.py, beside this file
    - rewards.sentence
    - length(maximum=12, slack=6)   # built in: docs/rewards.md lists them
  reward_weights: [1.0, 0.5, 0.5]
  beta: 0.0                     # above 0 (0.01 to 0.1): a penalty on moving away from the base model

datasets:
  - path: prompts.jsonl         # prompt, and whatever columns your rewards read
val_set_size: 4                 # prompts held out, answered before the first step and after the last
"""


@dataclass(frozen=True)
class Starter:
    """A method's part of a starter."""

    about: str  # the first line of its config and README
    rows: str  # the kind of its sample rows, and the name of their file
    keys: str  # YAML of its own
    watch: str  # which metrics say that it works
    model: str = MODEL
    rate: str = "1e-4"
    batch: int = 4
    steps: int = 24

    @property
    def online(self) -> bool:
        """Whether it has rewards."""
        return "reward_funcs" in self.keys

    def config(self) -> str:
        """The whole config."""
        batch_of = "completions" if "num_generations" in self.keys else "rows"
        rest = BOTTOM.format(rate=self.rate, batch=self.batch, steps=self.steps, batch_of=batch_of)
        return TOP.format(about=self.about, model=self.model) + self.keys + rest


_MARGINS = "`rewards/margins` should rise above 0 and `rewards/accuracies` above 0.5"
_REWARD = "`reward` should rise and `group_reward_std` stay above 0; the loss says nothing"

STARTERS: dict[str, Starter] = {
    "dpo": Starter(
        "DPO: learns from pairs of a better and a worse answer.", "pairs",
        "rl: dpo\nrl_beta: 0.1                    # lower lets the model move further from where it began\n" + PAIRS,
        _MARGINS,
    ),
    "ipo": Starter(
        "IPO: DPO with a bounded margin, for few pairs or pairs without noise.", "pairs",
        "rl: ipo\nrl_beta: 0.1                    # the margin aimed at is 1 / (2 x rl_beta)\n" + PAIRS,
        _MARGINS,
    ),
    "orpo": Starter(
        "ORPO: imitation and preference in one stage, without a reference model.", "pairs",
        "rl: orpo\norpo_alpha: 0.1                 # weight of the preference beside the imitation\n" + PAIRS,
        "`loss` should fall, and `rewards/margins` rise",
    ),
    "simpo": Starter(
        "SimPO: preference by the mean log-probability, without a reference model.", "pairs",
        "rl: simpo\nrl_beta: 2.0                    # 2.0 to 2.5 is usual: much more than in DPO\n"
        "simpo_gamma: 0.5                # the margin by which the better answer should win\n" + PAIRS,
        _MARGINS,
    ),
    "kto": Starter(
        "KTO: learns from single answers marked as good or bad.", "labelled",
        "rl: kto\nrl_beta: 0.1                    # lower lets the model move further from where it began\n"
        "kto_desirable_weight: 1.0       # raise the weight of whichever kind is rarer\nkto_undesirable_weight: 1.0\n"
        "\ndatasets:\n  - path: labelled.jsonl        # prompt, completion: messages or texts; label: true or false\n"
        "val_set_size: 4\nsequence_len: 512\n",
        "`rewards/chosen` should rise above `rewards/rejected`",
        batch=8,
    ),
    "grpo": Starter(
        "GRPO: writes several answers to each prompt and learns from how rewards compare them.", "prompts",
        "rl: grpo\n" + REWARDED, _REWARD, batch=32, steps=12,
    ),
    "gdpo": Starter(
        "GDPO: GRPO that scales each reward by itself, for rewards of different sizes.", "prompts",
        "rl: gdpo\n" + REWARDED, _REWARD, batch=32, steps=12,
    ),
    "ebft": Starter(
        "EBFT: writes answers and learns from how close their features come to those of demonstrations.",
        "demonstrations",
        f"rl: ebft\nebft:\n  alignment_coef: 1.0           # weight of being close to the demonstration\n"
        "  diversity_coef: 1.0           # weight of being unlike the other answers to the same prompt\n"
        f"trl:\n{SAMPLED}"
        "\ndatasets:\n  - path: demonstrations.jsonl  # messages; the first assistant turn is asked for\n",
        "`ebft/alignment` should rise (0.3 to 0.9) and `ebft/cfm_loss` fall",
        batch=32, steps=12,
    ),
    "gym": Starter(
        "GRPO in an environment of NeMo Gym: the model calls tools over several turns, and the Gym verifies.", "tasks",
        f"rl: grpo\ntrl:\n{SAMPLED}".replace("32     # tokens; longer ones are cut", "512    # tokens of all turns")
        + f"""
nemo_gym_enabled: true
nemo_gym_dir: ~/Gym             # git clone https://github.com/NVIDIA-NeMo/Gym ~/Gym, installed as its README says
nemo_gym_config_paths: [gym.yaml]   # the servers, which `upweight train` starts; nemo_gym_auto_start: false: you do
nemo_gym_datasets:
  - path: tasks.jsonl           # beside this file, or in the Gym's folder
    server_name: {GYM_SERVER}
nemo_gym_max_turns: 6
# nemo_gym_multi_turn: true     # the agent in gym.yaml drives the turns; needs trl.use_vllm and `upweight vllm-serve`
""",
        _REWARD, model="Qwen/Qwen3-0.6B", rate="1e-5", batch=16, steps=60,
    ),
    "sft": Starter(
        "Supervised fine-tuning: imitates demonstrations.", "demonstrations",
        "datasets:\n  - path: demonstrations.jsonl\n"
        "    type: chat_template         # messages; the assistant's turns are trained on\n"
        "val_set_size: 4                 # rows held out, on which the run evaluates\n"
        "sequence_len: 512               # longer rows are left out; `upweight preprocess` suggests a value\n",
        "`loss` should fall, and `eval_loss` with it",
    ),
    "reward": Starter(
        "An outcome reward model: learns from pairs to score answers.", "pairs",
        "reward_model: true\ncenter_rewards_coefficient: 0.01  # keeps scores around 0\n" + PAIRS,
        "`accuracy` should rise above 0.5",
    ),
    "prm": Starter(
        "A process reward model: learns to tell right steps of an answer from wrong ones.", "steps",
        "process_reward_model: true\n"
        "\ndatasets:\n  - path: steps.jsonl           # prompt, completions (one text a step), labels (one a step)\n"
        "    type: stepwise_supervised\n    step_separator: \"\\n\"\nval_set_size: 4\nsequence_len: 512\n",
        "`accuracy` should rise above the share of the more frequent label",
    ),
}  # fmt: skip
