"""The health rules of training: which metric is compared, when a rule holds, what it means, and the remedy."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

RunKind = Literal["online", "pairs", "offline"]
Relation = Literal["above", "below", "near"]  # near: no further from 0 than the threshold
SIGNS: dict[Relation, str] = {"above": ">", "below": "<", "near": "within"}
WORDS: dict[str, Relation] = {sign: relation for relation, sign in SIGNS.items()}


@dataclass(frozen=True)
class Sign:
    """A comparison with a metric of metrics.jsonl.

    `metric` may hold a `*` (each metric that fits counts by itself, and it stands for the same in the rule's other
    signs) and end in what it is measured against: `:growth` (times its value at the start), `:worse` (times its lowest
    value), `:lift` (distance from its start, in standard deviations of the rewards at the start or now, whichever is
    larger), `:earned` (the share of completions that earn a reward of one size, by its mean and standard deviation).
    """

    metric: str
    relation: Relation
    threshold: float

    def holds(self, value: float) -> bool:
        if self.relation == "near":
            return abs(value) <= self.threshold
        return value > self.threshold if self.relation == "above" else value < self.threshold


@dataclass(frozen=True)
class Rule:
    """A verdict and the signs that have to hold together for so many optimizer steps; the first is its evidence."""

    name: str
    level: Literal["warning", "alarm"]
    kind: RunKind  # of run
    when: str  # signs, as `metric > 0.5 and other within 0.1`
    steps: int
    meaning: str
    remedy: str
    after: int = 0  # first step that counts
    averaged: bool = False  # the mean over the steps counts, for metrics that jump about
    hidden_by: tuple[str, ...] = ()  # verdicts that are more specific

    @cached_property
    def signs(self) -> list[Sign]:
        """The comparisons of `when`."""
        parts = [sign.split() for sign in self.when.split(" and ")]
        return [Sign(metric, WORDS[relation], float(threshold)) for metric, relation, threshold in parts]


TRY_REWARDS = "try the rewards alone with `upweight rewards CONFIG`"
MORE_KINDS_OF_ANSWER = (
    "go back to an earlier checkpoint; lower learning_rate, set trl.beta above 0, trl.temperature 0.8 to 1.0, "
    "trl.num_generations 16 or more, or add the built-in reward `diversity`"
)

RULES: tuple[Rule, ...] = (
    Rule("solved", "warning", "online", "frac_reward_zero_std > 0.9 and reward:lift > 0.7", 10,
         "the reward has risen and almost every group now scores alike: the task is solved, or the policy has found "
         "one answer that the rewards like",
         "read the newest file in completions/; stop here, take harder prompts, or make the rewards stricter",
         averaged=True),
    Rule("no signal", "alarm", "online", "frac_reward_zero_std > 0.999", 20,
         "the completions of every group score alike, so all advantages are 0 and nothing is learned",
         f"{TRY_REWARDS}; check that rewards get the columns they read; give partial credit; easier prompts; raise "
         "trl.num_generations or trl.temperature", hidden_by=("solved", "mode collapse", "reward at zero")),
    Rule("little signal", "warning", "online", "frac_reward_zero_std > 0.8", 40,
         "the rewards separate the completions of few groups only; the rest of the sampling is wasted",
         "give partial credit, choose prompts that are neither hopeless nor solved, raise trl.num_generations, or set "
         "trl.dynamic_sampling_max_rounds", averaged=True,
         hidden_by=("no signal", "solved", "mode collapse", "reward at zero")),
    Rule("mode collapse", "alarm", "online", "sampling/entropy|entropy < 0.01", 10,
         "the policy is certain of every token: it writes one answer, and there is nothing left to compare",
         MORE_KINDS_OF_ANSWER, hidden_by=("solved",)),
    Rule("mode collapse", "alarm", "online", "completions/distinct_share < 0.3 and frac_reward_zero_std > 0.8", 10,
         "most completions of a prompt are word for word the same and score alike",
         MORE_KINDS_OF_ANSWER, hidden_by=("solved",)),
    Rule("low entropy", "warning", "online", "sampling/entropy|entropy < 0.05", 20,
         "the policy is nearly certain of every token (0.05 to 0.5 is usual): completions of a prompt become alike, "
         "and below 0.01 there is nothing left to compare",
         "raise trl.temperature (0.8 to 1.0), trl.beta or trl.entropy_coef; lower learning_rate; read completions/",
         hidden_by=("mode collapse", "solved")),
    Rule("rewards draw together", "warning", "online",
         "group_reward_std < 0.1 and group_reward_std:growth < 0.5 and frac_reward_zero_std < 0.8", 20,
         "completions of a prompt are rewarded ever more alike: their spread is below 0.1 and less than half of what "
         "it was",
         "read the newest file in completions/: where answers are good, stop or take harder prompts; where they are "
         "one answer over and over, lower learning_rate, set trl.beta above 0 or raise trl.temperature",
         hidden_by=("mode collapse", "low entropy")),
    Rule("reward at zero", "alarm", "online", "reward within 1e-6 and reward_std within 1e-6", 20,
         "no completion has earned anything",
         f"{TRY_REWARDS}; check that rewards get the columns they read; give partial credit (`incremental_format`); "
         "show an example of the wanted answer in the system prompt; train on demonstrations first",
         hidden_by=("mode collapse",)),
    Rule("rarely earned", "warning", "online",
         "rewards/*/mean:earned < 0.15 and rewards/*/mean > 0.0 and rewards/*/std < 0.4", 20,
         "few completions earn this reward (0.15 of them are to be expected within 20 steps)",
         f"{TRY_REWARDS}: does it know a right answer? Give partial credit, take easier prompts, or train on "
         "demonstrations first", averaged=True,
         hidden_by=("format ignored", "mode collapse", "reward at zero", "no signal", "constant reward")),
    Rule("constant reward", "warning", "online", "rewards/*/std within 1e-9", 30,
         "this reward gave every completion the same value and teaches nothing (a penalty that nothing incurs looks "
         "the same)",
         f"{TRY_REWARDS}; look for a test that always or never holds",
         hidden_by=("reward at zero", "no signal", "solved", "mode collapse")),
    Rule("format ignored", "warning", "online", "rewards/*format*/mean < 0.05 and frac_reward_zero_std < 0.8", 20,
         "the wanted format is hardly ever kept, while other rewards separate completions",
         "raise its weight in trl.reward_weights, add `incremental_format` for partial credit, show an example of the "
         "format in the system prompt, or train on the format first", averaged=True, hidden_by=("constant reward",)),
    Rule("reward fails", "warning", "online", "rewards/*/failed > 0.0", 10,
         "this reward raises, times out or returns what is no number in rollout after rollout",
         f"read the warning with the reason; {TRY_REWARDS}; return None where it does not apply; raise "
         "trl.reward_timeout if it is slow"),
    Rule("flat reward", "warning", "online", "reward:lift within 0.1 and frac_reward_zero_std < 0.8", 100,
         "completions are told apart, and yet the reward is where it began",
         "raise learning_rate (5e-6 to 1e-5 for all weights, ten times that for an adapter); raise "
         "trl.num_generations or the batch; read completions/: is what earns more within the model's reach?",
         after=150, averaged=True),
    Rule("reward falls", "warning", "online", "reward:lift < -0.5", 50,
         "the reward is well below where it began",
         "lower learning_rate, set trl.beta above 0, lower trl.num_iterations; look for a reward that works against "
         "the others", averaged=True),
    Rule("far from the reference", "warning", "online", "kl > 0.5", 10,
         "the policy has moved far from where it began",
         "lower learning_rate or raise trl.beta; read completions/ for answers that please the rewards alone",
         hidden_by=("kl explosion",)),
    Rule("kl explosion", "alarm", "online", "kl > 2.0", 5,
         "the policy has left the reference behind",
         "go back to an earlier checkpoint; lower learning_rate, raise trl.beta, lower max_grad_norm (0.1)"),
    Rule("entropy rises", "warning", "online",
         "sampling/entropy|entropy:growth > 1.5 and sampling/entropy|entropy > 1.0 and reward:lift < 0.1", 50,
         "the policy grows less certain while the reward does not rise: it drifts into noise",
         "lower learning_rate, trl.temperature or trl.entropy_coef; set trl.beta above 0", averaged=True),
    Rule("high entropy", "warning", "online", "sampling/entropy|entropy > 0.5 and reward:lift < 0.1", 100,
         "the policy is less certain than usual (0.05 to 0.5), and the reward does not rise",
         "lower trl.temperature (0.7 to 0.9) or trl.entropy_coef; raise learning_rate if the reward is flat; train on "
         "demonstrations first where the model does not know the task", averaged=True,
         hidden_by=("entropy rises", "no signal", "reward at zero")),
    Rule("gradients above 1", "warning", "online", "grad_norm > 1.0 and reward:lift < 0.1", 20,
         "gradients are above what is usual for online training (0.001 to 1) step after step, and the reward does not "
         "rise",
         "lower learning_rate, or max_grad_norm (0.1) to bound each step; enlarge the batch; look for a reward with "
         "huge values", hidden_by=("large gradients",)),
    Rule("large gradients", "alarm", "online", "grad_norm > 10.0", 10,
         "gradients are many times what is usual for online training (0.001 to 1)",
         "lower learning_rate and max_grad_norm (0.1); look for a reward with huge values, and for trl.scale_rewards: "
         "none"),
    Rule("large gradients", "alarm", "offline", "grad_norm > 100.0", 10,
         "gradients are many times what is usual (0.01 to 10)",
         "lower learning_rate, set max_grad_norm: 1.0, lengthen warmup_steps; look for odd rows with `upweight "
         "preprocess CONFIG --show 5`"),
    Rule("no gradient", "alarm", "online", "grad_norm within 0.0 and frac_reward_zero_std < 0.8", 10,
         "completions are told apart, and yet nothing moves the weights",
         "check lora_target_modules or unfrozen_parameters, and whether trl.mask_truncated_completions leaves out all"),
    Rule("no gradient", "alarm", "offline", "grad_norm within 0.0", 10,
         "nothing moves the weights",
         "check lora_target_modules or unfrozen_parameters, and that something is scored: `upweight preprocess CONFIG "
         "--show 2 --tokens`"),
    Rule("sampler disagrees", "alarm", "online", "sampling/sampling_logp_difference/mean > 1.0", 3,
         "the sampler and the trainer differ about the same tokens: the sampler's weights are old or another model's",
         "check that the server serves base_model; lower trl.vllm_sync_interval and trl.max_staleness; set "
         "trl.off_policy_mask_threshold: 0.5; leave trl.top_p and trl.top_k alone"),
    Rule("samples hardly count", "warning", "online", "sampling/importance_sampling_ratio/mean < 0.1", 5,
         "the correction for old samples takes nearly all weight from them",
         "sync more often (lower trl.vllm_sync_interval), lower trl.max_staleness or trl.prefetch_depth",
         hidden_by=("sampler disagrees",)),
    Rule("much is clipped", "warning", "online", "clip_ratio/region_mean > 0.3", 5,
         "updates within one rollout are so large that the clip throws away a third of the tokens",
         "lower learning_rate, trl.num_iterations or the number of steps that one rollout feeds", averaged=True),
    Rule("length hacking", "warning", "online",
         "completions/mean_length:growth > 1.5 and completions/clipped_ratio > 0.3 and reward:lift > 0.3", 20,
         "completions grow towards the length limit and the reward rises with them: length may be what pays",
         "read the highest-scoring completions; add `length` or `cosine_length`, or take trl.loss_type dr_grpo or dapo",
         averaged=True),
    Rule("truncated", "warning", "online", "completions/clipped_ratio > 0.8", 10,
         "nearly all completions are cut at the length limit; what comes last (often the answer) is never seen",
         "raise trl.max_completion_length, ask for shorter answers in the prompt, check that the chat template lets "
         "the model end its turn; trl.mask_truncated_completions keeps cut answers out of the loss", averaged=True,
         hidden_by=("length hacking",)),
    Rule("slow rewards", "warning", "online", "rewards/*/seconds > 10.0", 20,
         "this reward keeps the run waiting",
         "raise trl.reward_num_workers; do less in it, or less often; trl.async_prefetch with a vLLM server computes "
         "rewards while the trainer trains", averaged=True),
    Rule("slow sampling", "warning", "online", "rollout/share_of_seconds > 0.8 and rollout/wait_seconds > 5.0", 20,
         "nearly all of the time goes into writing completions",
         "sample from a vLLM server on a GPU of its own (trl.use_vllm, `upweight vllm-serve CONFIG`) and ahead of "
         "training (trl.async_prefetch); lower trl.max_completion_length; take a smaller model first", averaged=True,
         hidden_by=("slow rewards",)),
    Rule("features not aligned", "warning", "online", "ebft/alignment < 0.1", 20,
         "what the policy writes does not come closer to the demonstrations (0.3 to 0.9 is usual)",
         "check that prompts and demonstrations fit together; lower trl.temperature; raise ebft.alignment_coef",
         averaged=True),
    Rule("features coincide", "warning", "online", "ebft/diversity > 0.99", 20,
         "the completions of a prompt have nearly the same features, so hardly anything tells them apart",
         "raise trl.temperature or ebft.temperature; raise ebft.diversity_coef; take deeper ebft.feature_layers, or "
         "ebft.embed_method mean_pooling", averaged=True),
    Rule("features drift away", "alarm", "online", "ebft/cfm_loss:growth > 1.5", 20,
         "the distance between written and true features grows instead of falling",
         "lower learning_rate; set ebft.ce_coef to 0.03 or more; check that prompts and demonstrations fit together",
         averaged=True),
    Rule("wrong way round", "alarm", "pairs", "rewards/accuracies < 0.45", 50,
         "the rejected answer is preferred more often than the chosen one",
         "check which column is chosen and which rejected: `upweight preprocess CONFIG --show 3`; lower learning_rate",
         after=50, averaged=True),
    Rule("negative margins", "warning", "pairs", "rewards/margins < 0.0", 50,
         "the chosen answers do not gain on the rejected ones",
         "check that chosen and rejected are not swapped or alike; raise learning_rate if accuracies stay near 0.5",
         after=50, averaged=True, hidden_by=("wrong way round",)),
    Rule("nothing left to tell apart", "warning", "pairs", "rewards/accuracies > 0.995 and loss < 0.05", 100,
         "every pair is told apart and the loss is nearly 0: pairs are learned by heart, or differ in something "
         "trivial",
         "compare with held-out rows (val_set_size); fewer epochs, lower learning_rate, higher rl_beta; look at what "
         "separates the pairs, such as length", after=50, averaged=True),
    Rule("loss rises", "alarm", "offline", "loss:growth > 1.3", 50,
         "the loss is above where it began",
         "lower learning_rate, lengthen warmup_steps, set max_grad_norm: 1.0; check the rows with `upweight "
         "preprocess CONFIG --show 3`", after=50, averaged=True),
    Rule("overfitting", "warning", "offline", "eval_*loss:worse > 1.1", 1,
         "the loss on held-out rows is past its lowest and rises",
         "take the checkpoint with the lowest eval_loss (load_best_model_at_end, early_stopping_patience); fewer "
         "epochs, lower learning_rate, more data"),
)  # fmt: skip

# What looks wrong and is not.
EXPLAINED = {
    "The loss of an online run is near 0, and may rise": "Advantages of a group sum to 0, so the loss does as long as "
    "the policy is the one that sampled; with `trl.beta` it grows with the distance from the reference. It is no "
    "measure of progress: watch `reward`, `group_reward_std` and, with `trl.beta`, `kl`.",
    "`grad_norm` is 0 in some steps of an online run": "No group of those steps had completions that score apart, and "
    "`trl.skip_zero_advantage_batches` left them out.",
    "`entropy` is above 0.5": "How certain a policy can be depends on the task; it is a verdict only where the reward "
    "does not rise.",
}
