"""Rules about teachers: how they are given, and what can be compared with them."""

from collections.abc import Iterator

from upweight.config.config import Config, how_to_choose
from upweight.config.rules.keys import matching
from upweight.config.servers import is_url


def teachers(config: Config) -> Iterator[str]:
    """Check that teachers can be loaded beside the student, and that a server's answers can be compared."""
    method, section = config.method, config.teacher
    if not method.needs_teacher:
        return
    served = [place for place in section.places.values() if is_url(place)]
    local = len(section.places) - len(served)
    if local and config.sharding.deepspeed is not None:
        yield "distill.teacher: DeepSpeed does not shard a second model; use 'fsdp: true', or a vLLM server's URL."
    quantised = section.load_in_4bit or section.load_in_8bit
    if quantised and (config.sharding.fsdp or config.optim.reference_offloading):
        yield "distill.teacher_load_in_4bit, distill.teacher_load_in_8bit: need whole weights on the GPU; drop one key."
    if config.rollout.reward_funcs and not method.compares_rewards:
        yield f"trl.reward_funcs: {how_to_choose(method.name)} learns from the teacher alone; drop it, or use rl: grpo."
    if served and method.evaluates_loss and method.teacher_top_k is None:
        yield "distill.top_k: missing. A server lists the likeliest tokens only: set how many, such as 20."


def without_effect(config: Config) -> Iterator[str]:
    """Warn about keys of teachers without a method that has one, and about keys that another key has to turn on."""
    given, method = config.set_keys, config.method
    if not method.needs_teacher and (stray := matching(given, "distill.*")):
        yield f"{', '.join(stray)}: no effect with {how_to_choose(method.name)}: nothing is distilled"
    if method.evaluates_loss and method.teacher_top_k is None and "distill.tail" in given:
        yield "distill.tail: no effect without 'distill.top_k': the whole vocabulary is compared"
    if given.get("distill.beta") is not None and given.get("distill.divergence") != "jsd":
        yield "distill.beta: no effect without 'distill.divergence: jsd'"
