"""vLLM's side of sampling with lengths that vary: random weights of a folder's shape; argv: that folder, then cases.

A case is "prompts,completions,mean,cap,shortest,longest,calls": an end is drawn with probability 1 / mean, and prompts
have shortest to longest tokens. Prints a JSON line for each, or one with an error where this vLLM cannot run the model.
Run by a Python that has vLLM.
"""

import json
import os
import random
import sys
import time
from importlib.util import find_spec
from pathlib import Path


def problem(folder: str) -> str | None:
    """Why this vLLM cannot run the folder's model."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return "vLLM is not installed"
    config = json.loads((Path(folder) / "config.json").read_text())
    package = Path(next(iter(found.submodule_search_locations)))
    if "moe" in config["model_type"] and not list(package.glob("*moe_C*")):
        return f"the vLLM in {package} has no kernels for mixtures of experts (_moe_C): it cannot run this model"
    return None


def main(folder: str, cases: list[str]) -> None:
    if (missing := problem(folder)) is not None:
        print(json.dumps({"case": "all", "error": missing}), flush=True)
        return
    if find_spec("flashinfer") is None:  # vLLM takes for granted that it is there
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    asked = {case: tuple(map(int, case.split(","))) for case in cases}
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.85,
        max_model_len=max(cap + longest for _, _, _, cap, _, longest, _ in asked.values()), seed=0, max_num_seqs=1024,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    for case, (prompts, count, mean, cap, shortest, longest, calls) in asked.items():
        ends = list(range(1000, 1000 + vocabulary // mean))
        wanted = SamplingParams(
            temperature=1.0, max_tokens=cap, ignore_eos=True, stop_token_ids=ends, logprobs=0, detokenize=False
        )
        best: dict[str, float] = {}
        for call in range(calls):
            rng = random.Random(call)
            drawn = [[rng.randrange(1000) for _ in range(rng.randint(shortest, longest))] for _ in range(prompts)]
            inputs = [TokensPrompt(prompt_token_ids=ids) for ids in drawn for _ in range(count)]
            start = time.perf_counter()
            lengths = [len(out.outputs[0].token_ids) for out in llm.generate(inputs, wanted, use_tqdm=False)]
            seconds = time.perf_counter() - start
            if sum(lengths) / seconds > best.get("vllm_tokens_s", 0):
                best = {"vllm_tokens_s": round(sum(lengths) / seconds), "vllm_s": round(seconds, 2)}
                best |= {"vllm_tokens": sum(lengths), "vllm_mean": round(sum(lengths) / len(lengths), 1)}
        print(json.dumps({"case": case} | best), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
