"""vLLM's side of sampling: random weights of a folder's shape; argv: that folder, completions of a prompt, prompts ...

Prints a JSON line for each number of prompts, with tokens a second. Run by a Python that has vLLM.
"""

import json
import random
import sys
import time

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

PROMPT, NEW, VOCABULARY = 256, 256, 151_936


def main(folder: str, count: int, sizes: list[int]) -> None:
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.5,
        max_model_len=1024, logprobs_mode="processed_logprobs", seed=0,
    )  # fmt: skip
    wanted = SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True, logprobs=0, detokenize=False)
    for prompts in sizes:
        rng = random.Random(0)
        drawn = [[rng.randrange(2, VOCABULARY) for _ in range(PROMPT)] for _ in range(prompts)]
        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in drawn for _ in range(count)]
        best = 0.0
        for _ in range(3):
            start = time.perf_counter()
            llm.generate(inputs, wanted, use_tqdm=False)
            best = max(best, len(inputs) * NEW / (time.perf_counter() - start))
        print(json.dumps({"sequences": len(inputs), "vllm_tokens_s": round(best)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]])
