"""Rules about teachers: how they are given, and what can be compared with them."""

from collections.abc import Iterator

from upweight.config.config import Config, how_to_choose
from upweight.config.rules.keys import asked_keys, matching
from upweight.config.sections.model import LOGGED, SELF
from upweight.config.servers import is_url

CUTS = ("top_p", "top_k", "min_p", "repetition_penalty")


def teachers(config: Config) -> Iterator[str]:
    """Check that teachers can be loaded beside the student, and that a policy that teaches itself sees more."""
    method, section = config.method, config.teacher
    if not method.needs_teacher:
        return
    places, alone = section.places.values(), SELF in section.places.values()
    loaded = [place for place in places if not is_url(place) and place not in (LOGGED, SELF)]
    if loaded and config.sharding.deepspeed is not None:
        yield "distill.teacher: DeepSpeed does not shard a second model; use 'fsdp: true', or a vLLM server's URL."
    quantised = section.load_in_4bit or section.load_in_8bit
    if quantised and (config.sharding.fsdp or config.optim.reference_offloading):
        yield "distill.teacher_load_in_4bit, distill.teacher_load_in_8bit: need whole weights on the GPU; drop one key."
    if config.rollout.reward_funcs and method.evaluates_loss:
        yield f"trl.reward_funcs: {how_to_choose(method.name)} learns from the teacher alone; drop it, or use rl: grpo."
    if alone and method.teacher_sees is None:
        yield "distill.privileged_prompt: missing. A policy learns from itself where the teacher sees more than it."
    if not alone and config.set_keys.get("distill.self_weights") not in (None, "initial"):
        yield "distill.self_weights: is for a policy that teaches itself; set 'distill.teacher: self', or drop it."
    if method.evaluates_loss and _learns_nothing(config):
        remedy = "name a better model, or a 'distill.privileged_prompt' that it sees"
        yield f"distill.teacher: is the base_model itself, from which there is nothing to learn; {remedy}."
    if method.teacher_writes and (len(loaded) != 1 or len(places) > 1):
        yield "distill.seq_kd: only a single teacher in this process writes completions; drop it, or name such a one."


def alignments(config: Config) -> Iterator[str]:
    """Check that a teacher with another tokenizer is a model in this process that is asked for whole distributions."""
    method, section = config.method, config.teacher
    if section.align is None or not method.needs_teacher:
        return
    places = section.places.values()
    if any(map(is_url, places)):
        yield "distill.align: a server lists a few of its own tokens, not the shared ones; name a model or a folder."
    if LOGGED in places:
        yield "distill.align: logged log-probs are those of the student's tokens; drop it, or name a model."
    if SELF in places:
        yield "distill.align: a policy that teaches itself has its own tokenizer; drop it."
    lists = any(is_url(place) or place == LOGGED for place in places)
    if method.evaluates_loss and method.teacher_top_k is not None and not lists:
        yield "distill.top_k: with 'distill.align' all tokens of both vocabularies are compared; drop one of the two."
    if method.teacher_writes:
        remedy = "train by SFT on texts that the teacher wrote, or drop one of the two"
        yield f"distill.seq_kd: with 'distill.align' the teacher would write in tokens of its own; {remedy}."


def _learns_nothing(config: Config) -> bool:
    """Return whether the student starts as its only teacher, which sees the same and is loaded alike."""
    section, given = config.teacher, config.set_keys
    changed = section.load_in_4bit or section.load_in_8bit or section.revision or section.load_options
    other = (
        config.adapter.folder or config.model.gguf_file or given.get("distill.ce_coef") or config.method.teacher_sees
    )
    return set(section.places.values()) == {config.model.base_model} and not changed and not other


def comparisons(config: Config) -> Iterator[str]:
    """Check that log-probs of teachers and samplers are compared at one temperature, and on the tokens of both."""
    method, rollout = config.method, config.rollout
    listing = [place for place in config.teacher.places.values() if is_url(place) or place == LOGGED]
    cut = [name for name in CUTS if f"trl.{name}" in config.set_keys]
    truncates = rollout.top_p < 1 or rollout.top_k or rollout.min_p or rollout.repetition_penalty != 1
    if method.teacher_advantage and cut and truncates:
        yield f"trl.{cut[0]}: samples would not be the policy's, whose KL 'trl.teacher_kl_coef' estimates; drop it."
    if method.teacher_advantage and LOGGED in listing:
        yield "distill.teacher: nothing is logged of tokens that are sampled now; name a model or a server."
    if method.teacher_advantage and listing and rollout.temperature != 1:
        yield "trl.temperature: a server's log-probs are those at 1; set it to 1, or name a teacher in this process."
    if not listing or not method.evaluates_loss:
        return
    if method.teacher_top_k is None:
        yield "distill.top_k: missing. Servers and logs list the likeliest tokens only: set how many, such as 20."
    renormalised = config.set_keys.get("distill.tail") == "renormalise"
    if method.comparison.temperature != 1 and not renormalised:
        yield "distill.temperature: a listed teacher's tail is known at 1 only; set 1, or 'distill.tail: renormalise'."
    if LOGGED in listing and method.online:
        yield "distill.teacher: logged log-probs are those of the data's tokens; set 'distill.on_policy: 0'."


def without_effect(config: Config) -> Iterator[str]:
    """Warn about keys of teachers without a method that has one, and about keys that another key has to turn on."""
    given, method = config.set_keys, config.method
    if not method.needs_teacher and (stray := matching(asked_keys(config), "distill.*")):
        yield f"{', '.join(stray)}: no effect with {how_to_choose(method.name)}: nothing is distilled"
    if method.evaluates_loss and method.teacher_top_k is None and "distill.tail" in given:
        yield "distill.tail: no effect without 'distill.top_k': the whole vocabulary is compared"
    if given.get("distill.beta") is not None and given.get("distill.divergence") != "jsd":
        yield "distill.beta: no effect without 'distill.divergence: jsd'"
