"""A script as guides to GRPO show it, from prompts to a pipeline, with only its import changed."""

import runpy

import torch
from transformers import AutoModelForCausalLM

from parity_script import TEMPLATE, made_tokenizer, write_model

SCRIPT = """
import re
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from upweight import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = "Think in <reasoning></reasoning>, then write <answer></answer>."
raw = Dataset.from_list([{"question": f"What is {n} + 1?", "raw_answer": f"so #### {n + 1}"} for n in range(2)])
dataset = raw.map(lambda x: {
    "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": x["question"]}],
    "answer": x["raw_answer"].split("#### ")[1],
})

def correctness_reward(prompts, completions, answer, **kwargs):
    responses = [comp[0]["content"] for comp in completions]
    return [2.0 if wanted in text else 0.0 for text, wanted in zip(responses, answer)]

def format_reward(completions, **kwargs):
    responses = [comp[0]["content"] for comp in completions]
    return [1.0 if re.search("<answer>.*?</answer>", r, re.DOTALL) else 0.0 for r in responses]

def incremental_format_reward(completions, **kwargs):
    responses = [comp[0]["content"] for comp in completions]
    return [sum(0.25 for mark in ("<", "/", "a", ">") if mark in r) - 0.001 * len(r) for r in responses]

training_args = GRPOConfig(
    output_dir="outputs/grpo-model",
    learning_rate=5e-3, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    per_device_train_batch_size=1, gradient_accumulation_steps=4,
    num_generations=8, max_prompt_length=48, max_completion_length=6,
    num_train_epochs=1, max_steps=None,
    bf16=True, optim="adamw_torch", max_grad_norm=0.1,
    logging_steps=1, save_steps=100, report_to="none",
)
model = AutoModelForCausalLM.from_pretrained("model", torch_dtype=torch.bfloat16, device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("model")
tokenizer.pad_token = tokenizer.eos_token
peft_config = LoraConfig(
    r=16, lora_alpha=32, task_type="CAUSAL_LM", lora_dropout=0.05,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)

def debug_reward(completions, **kwargs):
    responses = [comp[0]["content"] for comp in completions]
    for i, r in enumerate(responses[:2]):
        print(f"Response {i}: {r[:200]}...")
    return [1.0] * len(responses)

tried = GRPOTrainer(model="model", reward_funcs=[debug_reward], args=training_args, train_dataset=dataset)
shown = tried.generate_completions(dataset[:1])

trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[incremental_format_reward, format_reward, correctness_reward],
    args=training_args,
    train_dataset=dataset,
    peft_config=peft_config,
)
trainer.train()
trainer.save_model("final_model")

class AdaptiveReward:
    def __init__(self, base_reward_func, initial_weight=1.0):
        self.func = base_reward_func
        self.weight = initial_weight

    def __call__(self, *args, **kwargs):
        return [r * self.weight for r in self.func(*args, **kwargs)]

second = GRPOTrainer(
    model=trainer.model, processing_class=tokenizer, args=training_args, train_dataset=dataset,
    reward_funcs=[AdaptiveReward(incremental_format_reward, 0.5), correctness_reward],
)
second.train()

if hasattr(second.model, "merge_and_unload"):
    merged_model = second.model.merge_and_unload()
    merged_model.save_pretrained("production_model")
    tokenizer.save_pretrained("production_model")
question = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "What is 15 + 27?"}]
options = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
generator = pipeline("text-generation", model="production_model", tokenizer=tokenizer)
result = generator(question, **options)
again = pipeline("text-generation", model=merged_model, tokenizer=tokenizer)(question, **options)
"""


def test_the_guides_script_runs_from_prompts_to_pipeline(tmp_path, monkeypatch, capsys):
    folder = tmp_path
    write_model(folder / "model", made_tokenizer(TEMPLATE), trainer="GRPO")
    monkeypatch.chdir(folder)
    (folder / "script.py").write_text(SCRIPT)
    left = runpy.run_path(str(folder / "script.py"), run_name="__main__")
    first = left["trainer"].state.log_history[0]
    assert left["trainer"].state.global_step == 4  # 2 prompts of 8 completions, 4 in a step
    assert {"reward", "reward_std", "rewards/correctness_reward/mean", "frac_reward_zero_std"} <= first.keys()
    assert {"completions/clipped_ratio", "completions/mean_length", "num_tokens", "entropy", "loss"} <= first.keys()
    assert "rewards/AdaptiveReward/mean" in left["second"].state.log_history[0]
    assert len(left["shown"]) == 8
    assert left["shown"][0]["rewards"] == {"debug_reward": 1.0}
    assert "Response 0: " in "".join(capsys.readouterr())
    assert (folder / "final_model" / "adapter_model.safetensors").is_file()
    assert "upweight" not in (folder / "production_model" / "config.json").read_text()
    assert left["result"][0]["generated_text"][-1]["role"] == "assistant"
    assert left["again"][0]["generated_text"][-1]["role"] == "assistant"
    loaded = AutoModelForCausalLM.from_pretrained(folder / "production_model", dtype=torch.bfloat16)
    ids = torch.tensor([[40, 41, 42]])
    torch.testing.assert_close(loaded(ids).logits, left["merged_model"](ids).logits)
