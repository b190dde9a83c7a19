"""Rules across keys: each has a config that breaks it and one that does not."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.config.resolve import generation_batch
from upweight.config.rules import check, data, distill, ebft, feeds, keys, model, rollout, training
from upweight.errors import UserError

WHOLE = {"base_model": "m", "datasets": [{"path": "d"}]}
LORA = {"adapter": "lora", "lora_target_linear": True}
GRPO = {**WHOLE, "rl": "grpo", "trl": {"reward_funcs": ["r.f"]}}

GYM = {"nemo_gym_enabled": True, "nemo_gym_auto_start": False, "nemo_gym_datasets": [{"path": "x"}]}
AGENTS = {**GYM, "trl": {**GRPO["trl"], "use_vllm": True}, "nemo_gym_multi_turn": True}
IN_8_BITS = {**GRPO, "trl": {**GRPO["trl"], "sampler_quantization": "int8"}}
ROLLED = {**GRPO, "trl": {**GRPO["trl"], "rollout_func": "r.g"}}

HELD = {**WHOLE, "val_set_size": 2}
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True}
EIGHT = {"adapter": "lora", "load_in_8bit": True, "lora_target_linear": True}
DPO = {**WHOLE, "rl": "dpo"}

STREAM = {**WHOLE, "streaming": True, "max_steps": 5}
TWO = {"base_model": "m", "max_steps": 5, "datasets": [{"path": "d", "weight": 1}, {"path": "e", "weight": 2}]}
PLAIN_TWO = {**TWO, "datasets": [{"path": "d"}, {"path": "e"}], "mix": "interleave_over"}


def scheduled(name, **arguments):
    return {**WHOLE, "lr_scheduler": name, "lr_scheduler_kwargs": arguments}


def served(adapter=None, sharding=None, vllm=None, **trl):
    blocks = {"vllm": vllm} if vllm else {}
    return {**GRPO, **(adapter or {}), **(sharding or {}), **blocks, "trl": {**GRPO["trl"], "use_vllm": True, **trl}}


def distilled(block=None, **keys):
    return {**WHOLE, "rl": "distill", "distill": {"teacher": "t", **(block or {})}, **keys}


def guided(trl=None, **keys):
    return {**WHOLE, "rl": "grpo", "trl": {"teacher_kl_coef": 1.0, **(trl or {})}, "distill": {"teacher": "t"}, **keys}


BROKEN = {
    "dataset_exact_deduplication: compares all": {**STREAM, "dataset_exact_deduplication": True},
    "precompute_ref_log_probs: is not supported": {**STREAM, "rl": "dpo", "precompute_ref_log_probs": True},
    "datasets[0].shards: a stream": {**STREAM, "datasets": [{"path": "d", "shards": 2}]},
    "datasets[0].split: a stream": {**STREAM, "datasets": [{"path": "d", "split": "train[:5%]"}]},
    "val_set_size: a share of a stream": {**STREAM, "val_set_size": 0.1},
    "val_set_size: takes the first": {**STREAM, "val_set_size": 5, "datasets": [{"path": "d"}, {"path": "e"}]},
    "max_steps: needed to train on a stream": {**WHOLE, "streaming": True, "datasets": [{"path": "d/*.jsonl.gz"}]},
    "curriculum_column: a stream": {**STREAM, "curriculum_column": "c"},
    "dataset_shard_num: a stream": {**STREAM, "dataset_shard_num": 2},
    "max_prompt_length: missing. The longest prompt of a stream": {
        **STREAM, "rl": "grpo", "trl": {**GRPO["trl"], "use_vllm": True, "vllm_mode": "colocate"}
    },
    "datasets[0].weight: no effect": TWO,
    "datasets[1].weight: missing": {**PLAIN_TWO, "datasets": [{"path": "d", "weight": 1}, {"path": "e"}]},
    "mix_schedule: no effect": {**PLAIN_TWO, "mix": "concatenate", "mix_schedule": [{"step": 0, "weights": [1, 1]}]},
    "mix_schedule: cannot be used": {**TWO, "mix": "interleave_over", "mix_schedule": [{"weights": [1, 1]}]},
    "mix_schedule: needs 'max_steps'": {**PLAIN_TWO, "max_steps": None, "mix_schedule": [{"weights": [1, 1]}]},
    "mix_schedule: steps begin": {**PLAIN_TWO, "mix_schedule": [{"step": 3, "weights": [1, 1]}]},
    "mix_schedule[0].weights: 1 weight ": {**PLAIN_TWO, "mix_schedule": [{"weights": [1]}]},
    "mix_schedule[0].weights: numbers": {**PLAIN_TWO, "mix_schedule": [{"weights": [0, 0]}]},
    "precompute_ref_log_probs: not with streams": {**PLAIN_TWO, "rl": "dpo", "precompute_ref_log_probs": True},
    "ebft.mode: strided reads": {**STREAM, "rl": "ebft", "ebft": {"mode": "strided"}},
    "trl.replay_buffer_size: not with": {**GRPO, **STREAM, "trl": {**GRPO["trl"], "replay_buffer_size": 8}},
    "trl.reroll_start_fraction: not with": {**GRPO, **STREAM, "trl": {**GRPO["trl"], "reroll_start_fraction": 0.5}},
    "reward_model: cannot be used with 'rl'": {**WHOLE, "rl": "dpo", "reward_model": True},
    "base_model: missing": {"datasets": [{"path": "d"}]},
    "datasets: missing": {"base_model": "m"},
    "trl.reward_funcs: missing": {**WHOLE, "rl": "gdpo"},
    "ebft: missing": {**WHOLE, "rl": "ebft"},
    "distill.teacher: missing": {**WHOLE, "rl": "distill"},
    "distill.teacher: DeepSpeed does not": distilled(deepspeed="zero3.json"),
    "distill.teacher_load_in_4bit, distill.teacher": distilled({"teacher_load_in_4bit": True}, fsdp=True),
    "trl.reward_funcs: rl: distill learns": distilled(trl={"reward_funcs": ["r.f"]}),
    "trl.top_p: samples would not": guided({"top_p": 0.9}),
    "distill.teacher: nothing is logged": guided(distill={"teacher": "logged"}),
    "trl.temperature: a server's": guided({"temperature": 0.5}, distill={"teacher": "http://there"}),
    "trl.teacher_kl_coef: ebft": {**guided(), "rl": "ebft", "ebft": {"mode": "structured"}},
    "distill.temperature: a listed": distilled({"teacher": "logged", "on_policy": 0, "top_k": 4, "temperature": 2.0}),
    "distill.teacher: logged log-probs": distilled({"teacher": "logged", "top_k": 4}),
    "distill.teacher: is the base_model": distilled({"teacher": WHOLE["base_model"]}),
    "distill.privileged_prompt: missing": distilled({"teacher": "self"}),
    "distill.self_weights: is for": distilled({"self_weights": "ema"}),
    "distill.seq_kd: only a single": distilled({"teacher": "http://there", "top_k": 4, "seq_kd": True}),
    "distill.align: a server": distilled({"teacher": "http://there:8000", "top_k": 4, "align": "text"}),
    "distill.align: logged": distilled({"teacher": "logged", "top_k": 4, "on_policy": 0, "align": "text"}),
    "distill.align: a policy that": distilled({"teacher": "self", "privileged_prompt": "{x}", "align": "text"}),
    "distill.top_k: with": distilled({"top_k": 4, "align": "text"}),
    "distill.seq_kd: with": distilled({"seq_kd": True, "align": "text"}),
    "distill.top_k: missing": distilled({"teacher": "http://there:8000"}),
    "eval_samples: needs something": {**WHOLE, "eval_samples": 4},
    "generate_samples: needs something": {**WHOLE, "generate_samples": True},
    "generate_samples: is for offline methods": {**GRPO, "val_set_size": 2, "generate_samples": True},
    "generation_top_p: nothing is answered": {**HELD, "generation_top_p": 0.9},
    "eval_samples: is for offline methods": {**GRPO, "val_set_size": 2, "eval_samples": 4},
    "eval_samples: a reward model": {**HELD, "reward_model": True, "eval_samples": 4},
    "eval_samples: answers are not sampled": {**HELD, "fsdp": True, "eval_samples": 4},
    "datasets[0].as_messages: is for rows": {
        **DPO, "datasets": [{"path": "d", "type": "chatml.intel", "as_messages": True}]
    },
    "load_best_model_at_end: needs something": {**WHOLE, "load_best_model_at_end": True},
    "val_set_size: a share below 1": {**WHOLE, "val_set_size": 1.5},
    "fp16: cannot be used with 'bf16: true'": {**WHOLE, "bf16": True, "fp16": True},
    "load_in_8bit: quantised weights": {**WHOLE, "load_in_8bit": True},
    "tokenizer_type: x is no tokenizer": {**WHOLE, "tokenizer_type": "x"},
    "peft_init_lora_weights: there is no 'eva'": {**WHOLE, **LORA, "peft_init_lora_weights": "eva"},
    "peft_layers_pattern: needs": {**WHOLE, **LORA, "peft_layers_pattern": ["layers"]},
    "trl.rollout_func: there is no 'x'": {**GRPO, "trl": {**GRPO["trl"], "rollout_func": "x"}},
    "tools: there is no 'cpu'": {**GRPO, "tools": ["file.tool", "cpu"]},
    "use_onebitllms: every weight": {**WHOLE, **LORA, "use_onebitllms": True},
    "use_onebitllms: vLLM would": {**served(), "use_onebitllms": True},
    "callbacks[0]: expected 'mine.Name'": {**WHOLE, "callbacks": [{"mine.A": {}, "mine.B": {}}]},
    "optim_args: expected a mapping": {**WHOLE, "optimizer": "mine.Optimizer", "optim_args": "a=1"},
    "cosine_min_lr_ratio: is for 'lr_scheduler: cosine', not for 'mine.f'": {
        **scheduled("mine.f"), "cosine_min_lr_ratio": 0.1
    },
    "adapter: qlora needs": {**WHOLE, **LORA, "adapter": "qlora"},
    "lora_model_dir: needs": {**WHOLE, "lora_model_dir": "x"},
    "batch_size: 5 is not a multiple": {**WHOLE, "batch_size": 5, "micro_batch_size": 2},
    "trl.reward_weights: 2 weights for 1 r": {**GRPO, "trl": {"reward_funcs": ["r.f"], "reward_weights": [1.0, 2.0]}},
    "num_labels: an outcome": {**WHOLE, "reward_model": True, "num_labels": 2},
    "lora_dropout: PEFT has it": {
        **WHOLE, **LORA, "lora_target_parameters": "experts.down_proj", "lora_dropout": 0.1,
    },
    "router_aux_loss_coef: reward models": {**WHOLE, "reward_model": True, "router_aux_loss_coef": 0.1},
    "num_labels: a process": {**WHOLE, "process_reward_model": True, "num_labels": 1},
    "chat_template_jinja: missing": {**WHOLE, "chat_template": "jinja"},
    "datasets[0].roles_to_train: 'asistant' is no usual role. Did you mean 'assistant'?": {
        **WHOLE, "datasets": [{"path": "d", "type": "chat_template", "roles_to_train": ["asistant"]}],
    },
    "datasets[0].chat_template_jinja: missing": {**WHOLE, "datasets": [{"path": "d", "chat_template": "jinja"}]},
    "test_datasets[0].chat_template_jinja: missing": {
        **WHOLE,
        "test_datasets": [{"path": "d", "chat_template": "tokenizer_default_fallback_jinja"}],
    },
    "vllm.reasoning_parser: missing": {**WHOLE, "vllm": {"enable_reasoning": True}},
    "dataset_shard_idx: must be below": {**WHOLE, "dataset_shard_num": 2, "dataset_shard_idx": 2},
    "datasets[0].shards_idx: must be": {**WHOLE, "datasets": [{"path": "d", "shards": 2, "shards_idx": 2}]},
    "tokenizer_use_mistral_common: cannot be used": {
        **WHOLE, "tokenizer_use_mistral_common": True, "chat_template": "chatml", "tokenizer_type": "LlamaTokenizer",
    },
    "datasets[0].filter: there is no 'short'": {**WHOLE, "datasets": [{"path": "d", "filter": "short"}]},
    "dataset_contamination_check: there are no": {**WHOLE, "dataset_contamination_check": "warn"},
    "datasets[0]: names no data": {**WHOLE, "datasets": [{"type": "alpaca"}]},
    "datasets[0].type: there is no format": {**WHOLE, "rl": "dpo", "datasets": [{"path": "d", "type": "chat_templat"}]},
    "datasets[0].type: there is no format 'chatml.intell'. Did you mean 'chatml.intel'?": {
        **DPO, "datasets": [{"path": "d", "type": "chatml.intell"}],
    },
    "datasets[0].split: 'train[:50%' is no split": {**WHOLE, "datasets": [{"path": "d", "split": "train[:50%"}]},
    "chat_template: there is no": {**WHOLE, "chat_template": "chatlm"},
    "datasets[0].chat_template: there": {**WHOLE, "datasets": [{"path": "d", "chat_template": "chatlm"}]},
    "trl.rollout_backend: cannot be used with 'trl.use_vllm'": served(rollout_backend="b.C"),
    "trl.rollout_backend: cannot be used with 'trl.rollout_func'": {
        **ROLLED,
        "trl": {**ROLLED["trl"], "rollout_backend": "b.C"},
    },
    "trl.routing_replay: the agents of the Gym": {
        **GRPO,
        **AGENTS,
        "trl": {**AGENTS["trl"], "routing_replay": True},
    },
    "trl.routing_replay: code of yours": {**ROLLED, "trl": {**ROLLED["trl"], "routing_replay": "measure"}},
    "trl.routing_replay: routers are not tried on weights that DeepSpeed": {
        **GRPO,
        "deepspeed": "zero3.json",
        "trl": {**GRPO["trl"], "routing_replay": True},
    },
    "trl.routing_replay: experts of rows that ranks share": {
        **GRPO,
        "context_parallel_size": 2,
        "trl": {**GRPO["trl"], "routing_replay": True},
    },
    "trl.sampler_quantization: is for sampling in this process": served(sampler_quantization="int8"),
    "trl.sampler_quantization: code of yours": {**ROLLED, "trl": {**ROLLED["trl"], "sampler_quantization": "int8"}},
    "trl.sampler_quantization: needs all weights": {**IN_8_BITS, "fsdp": True},
    "trl.sampler_quantization: the weights are quantised already. Drop it, or 'load_in_4bit'": {
        **IN_8_BITS,
        "adapter": "qlora",
        "load_in_4bit": True,
    },
    "trl.sampler_quantization: without the importance correction training would drift. Drop it, or drop": {
        **IN_8_BITS,
        "trl": {**IN_8_BITS["trl"], "vllm_importance_sampling_correction": False},
    },
    "trl.sampler_quantization: without the importance correction training would drift. Drop it, or use rl": {
        **IN_8_BITS,
        "rl": "rloo",
    },
    "trl.rollout_backend: there is no 'mine'": {**GRPO, "trl": {**GRPO["trl"], "rollout_backend": "mine"}},
    "trl.rollout_backend: vLLM is chosen by": {**GRPO, "trl": {**GRPO["trl"], "rollout_backend": "vllm_server"}},
    "trl.rollout_backend: needs all weights": {
        **GRPO,
        "fsdp": True,
        "trl": {**GRPO["trl"], "rollout_backend": "b.C"},
    },
    "trl.rollout_backend: blocks are": {
        **WHOLE,
        "rl": "ebft",
        "ebft": {"mode": "strided"},
        "trl": {"rollout_backend": "b.C"},
    },
    "trl.use_vllm: blocks are": {**WHOLE, "rl": "ebft", "ebft": {"mode": "strided"}, "trl": {"use_vllm": True}},
    "trl.num_iterations: strided": {**WHOLE, "rl": "ebft", "ebft": {"mode": "strided"}, "trl": {"num_iterations": 2}},
    "environment.class: missing": {**GRPO, "environment": {"type": "python"}},
    "environment.url: missing": {**GRPO, "environment": {"type": "openenv"}},
    "environment.wait: needs 'environment.type: openenv'": {**GRPO, "environment": {"wait": 5}},
    "tools: an OpenEnv server": {**GRPO, "tools": ["t.f"], "environment": {"type": "openenv", "url": "u"}},
    "trl.rollout_func: cannot be used with 'tools'": {**ROLLED, "tools": ["t.f"]},
    "nemo_gym_enabled: cannot be used with 'tools'": {**GRPO, **GYM, "tools": ["t.f"]},
    "tools: needs rl: grpo": {**WHOLE, "rl": "ebft", "ebft": {"mode": "structured"}, "tools": ["t.f"]},
    "trl.reward_funcs: 'reward_env' is what": {**GRPO, "trl": {"reward_funcs": ["reward_env"]}},
    "nemo_gym_datasets: missing": {**GRPO, "nemo_gym_enabled": True},
    "nemo_gym_config_paths: missing": {**GRPO, **GYM, "nemo_gym_auto_start": True},
    "nemo_gym_multi_turn: needs 'trl.use_vllm: true'": {**GRPO, **GYM, "nemo_gym_multi_turn": True},
    "trl.rollout_func: cannot be used with 'nemo_gym_enabled'": {**ROLLED, **GYM},
    "unfrozen_parameters: is for full": {**WHOLE, **LORA, "unfrozen_parameters": ["a"]},
    "model_type: this method needs a model 'ForCausalLM'": {**WHOLE, "model_type": "BertForTokenClassification"},
    "model_kwargs: 'dtype' is set by": {**WHOLE, "model_kwargs": {"dtype": "float16"}},
    "quantize_moe_experts: experts are quantised to 4 bits": {
        **WHOLE, "adapter": "lora", "load_in_8bit": True, "lora_target_linear": True, "quantize_moe_experts": True,
    },
    "quantize_moe_experts: experts in 4 bits are not sharded": {
        **WHOLE, **QLORA, "fsdp": True, "quantize_moe_experts": True,
    },
    "load_in_4bit, load_in_8bit: the weights of a GGUF": {**WHOLE, **QLORA, "gguf_file": "x.gguf"},
    "sync_ref_model: a separate reference": {**DPO, **LORA, "sync_ref_model": True, "rl_adapter_ref_model": True},
    "neftune_noise_alpha: noise on embeddings": {**DPO, "neftune_noise_alpha": 5.0},
    "reference_offloading: is for a copy of weights whole on one device; drop it, or rl_adapter": {
        **DPO, **LORA, "reference_offloading": True, "rl_adapter_ref_model": True,
    },
    "rl: kto: precompute_ref_log_probs: KTO's KL": {**WHOLE, "rl": "kto", "precompute_ref_log_probs": True},
    "datasets[0].type: a mapping of columns does not": {
        **WHOLE, "process_reward_model": True, "datasets": [{"path": "d", "type": {"field_prompt": "p"}}],
    },
    "datasets[0].type.label_values: is for labels of kto": {
        **DPO, "datasets": [{"path": "d", "type": {"label_values": {"good": True}}}],
    },
    "datasets[0].type.label_from: is for labels of kto": {
        **DPO, "datasets": [{"path": "d", "type": {"label_from": 4}}],
    },
    "datasets[0].type.label_from: 'label_values' says": {
        **WHOLE, "rl": "kto", "datasets": [{"path": "d", "type": {"label_from": 4, "label_values": {"5": True}}}],
    },
    "datasets[0].type.field_winner: is for pairs, and": {
        **WHOLE, "datasets": [{"path": "d", "type": {"field_winner": "w", "winner_values": {"A": "a", "B": "b"}}}],
    },
    "datasets[0].type.field_winner: missing": {
        **DPO, "datasets": [{"path": "d", "type": {"winner_values": {"A": "a", "B": "b"}}}],
    },
    "datasets[0].type.winner_values: must name the columns of two answers, and names 'a'": {
        **DPO, "datasets": [{"path": "d", "type": {"field_winner": "w", "winner_values": {"A": "a", "tie": None}}}],
    },
    "datasets[0].type.field_chosen: 'winner_values' says which answer": {
        **DPO, "datasets": [{"path": "d", "type": {
            "field_winner": "w", "winner_values": {"A": "a", "B": "b"}, "field_chosen": "a",
        }}],
    },
    "datasets[0].type: 'zephyr.nectar' is for rl: dpo, rl: ipo": {
        **WHOLE, "datasets": [{"path": "d", "type": "zephyr.nectar"}],
    },
    "torch_compile: layers are not compiled": {**WHOLE, "torch_compile": True},
    "gradient_checkpointing_kwargs: only": {**WHOLE, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "gradient_checkpointing_kwargs: 'keep' is a share": {**WHOLE, "gradient_checkpointing_kwargs": {"keep": 1}},
    "gradient_checkpointing_kwargs: 'every_layer' keeps": {
        **WHOLE, "gradient_checkpointing_kwargs": {"keep": 0.5, "every_layer": True}
    },
    "optim_target_modules: galore_adamw needs": {**WHOLE, "optimizer": "galore_adamw"},
    "optimizer: apollo_adamw projects": {
        **WHOLE, **LORA, "optimizer": "apollo_adamw", "optim_target_modules": "all-linear",
    },
    "optim_target_modules: sgd does not read it": {**WHOLE, "optimizer": "sgd", "optim_target_modules": ["q_proj"]},
    "optim_args: Muon has keys": {**WHOLE, "optimizer": "muon", "optim_args": "momentum=0.9"},
    "muon_momentum: sgd does not read it": {**WHOLE, "optimizer": "sgd", "muon_momentum": 0.9},
    "optimizer: muon needs whole weights": {**WHOLE, "optimizer": "muon", "fsdp": True},
    "optim_args: expected 'name=value' pairs": {**WHOLE, "optim_args": "momentum"},
    "optim_args.momentum: expected a number": {**WHOLE, "optim_args": {"momentum": [0.9]}},
    "lr_scheduler_kwargs.num_cycle: is no argument of 'cosine'. Did": scheduled("cosine", num_cycle=2),
    "lr_scheduler_kwargs.power: is no argument of 'linear'. It takes none": scheduled("linear", power=2),
    "lr_scheduler_kwargs.power: expected a number": scheduled("polynomial", power="two"),
    "lr_scheduler_kwargs.decay_type: expected one of": scheduled(
        "warmup_stable_decay", num_decay_steps=1, decay_type="quick"
    ),
    "lr_scheduler_kwargs.num_decay_steps: missing": scheduled("warmup_stable_decay"),
    "lr_scheduler_kwargs: 'cosine_with_min_lr' needs 'min_lr'": scheduled("cosine_with_min_lr"),
    "lr_scheduler_kwargs.lr_end: 1 is not below": scheduled("polynomial", lr_end=1),
    "lr_scheduler_kwargs.factor: a share": {
        **HELD, "lr_scheduler": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"factor": 2},
    },
    "lr_scheduler_kwargs.timescale: at least 1": scheduled("inverse_sqrt", timescale=0),
    "cosine_min_lr_ratio: is for": {**WHOLE, "lr_scheduler": "linear", "cosine_min_lr_ratio": 0.1},
    "lr_scheduler: reduce_lr_on_plateau: needs something": {**WHOLE, "lr_scheduler": "reduce_lr_on_plateau"},
    "save_strategy: best: needs something to evaluate on. Set 'val_set_size' or 'test_datasets', and drop": {
        **HELD, "save_strategy": "best", "eval_strategy": "no",
    },
    "load_best_model_at_end: checkpoints are written by 'steps'": {
        **HELD, "load_best_model_at_end": True, "save_steps": 5,
    },
    "load_best_model_at_end: 'save_steps' (5) is not a multiple": {
        **HELD, "load_best_model_at_end": True, "save_steps": 5, "eval_steps": 2,
    },
    "save_steps: a share below 1, or": {**WHOLE, "save_steps": 2.5},
    "rl_adapter_ref_model: a second": {**DPO, **LORA, "fsdp": True, "rl_adapter_ref_model": True},
    "precompute_ref_log_probs: weights are sharded": {**DPO, "fsdp": True, "precompute_ref_log_probs": True},
    "bnb_config_kwargs: bitsandbytes has no option 'bnb_4bit_quant_typ'. Did you mean 'bnb_4bit_quant_type'": {
        **DPO, "adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_quant_typ": "nf4"},
    },
    "save_only_model: the best checkpoint": {
        **HELD, "deepspeed": "zero2.json", "save_only_model": True, "load_best_model_at_end": True,
    },
    "fp16: sharded weights": {**WHOLE, "deepspeed": "zero2.json", "fp16": True, "bf16": False},
    "activation_offloading: gathered": {**WHOLE, "fsdp": True, "activation_offloading": True},
    "reference_offloading: is for a copy of weights whole on one device; drop it, or fsdp": {
        **DPO, "fsdp": True, "reference_offloading": True,
    },
    "tiled_mlp: cannot be used with fsdp": {**WHOLE, "fsdp": True, "tiled_mlp": True, "gradient_checkpointing": True},
    "tiled_mlp: needs 'gradient_checkpointing": {**WHOLE, "tiled_mlp": True},
    "sync_ref_model: a reference that follows": {**DPO, "deepspeed": "zero2.json", "sync_ref_model": True},
    "deepspeed, context_parallel_size: DeepSpeed": {**WHOLE, "deepspeed": "zero2.json", "context_parallel_size": 2},
    "optimizer: bitsandbytes does not know": {**WHOLE, "fsdp": True, "optimizer": "paged_adamw_8bit"},
    "save_only_model: needs whole": {**WHOLE, "fsdp_config": {"version": 2}, "save_only_model": True},
    "fsdp_config.auto_wrap_policy: FSDP2": {
        **WHOLE, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 9},
    },
    "fsdp_config.final_state_dict_type: the result": {
        **WHOLE, "fsdp_config": {"final_state_dict_type": "SHARDED_STATE_DICT"},
    },
    "deepspeed: 'zero_optimization.stage' has to be": {**WHOLE, "deepspeed": {"bf16": {"enabled": True}}},
    "load_in_8bit: integers": {**WHOLE, **EIGHT, "deepspeed": "zero3_bf16.json"},
    "bnb_config_kwargs.bnb_4bit_quant_storage: shards": {
        **WHOLE, **QLORA, "fsdp": True, "bnb_config_kwargs": {"bnb_4bit_quant_storage": "uint8"},
    },
    "hub_model_id: 'me/my model' is no repository": {**WHOLE, "hub_model_id": "me/my model"},
    "unfrozen_parameters: '(' is no regular expression": {**WHOLE, "unfrozen_parameters": ["("]},
    "chat_template: there is no ''": {**WHOLE, "chat_template": ""},
    "chat_template_jinja: a name in it": {**WHOLE, "chat_template": "jinja", "chat_template_jinja": "x" * 300},
    "output_dir: is empty": {**WHOLE, "output_dir": ""},
    "output_dir: a name in it has over": {**WHOLE, "output_dir": "x" * 300},
    "datasets[0].path: a name in it": {**WHOLE, "datasets": [{"path": "x" * 300}]},
    "datasets[0].data_files: a name in it": {**WHOLE, "datasets": [{"data_files": ["x", "é" * 200]}]},
    "trl.generation_kwargs: 'beams' is not an option": {
        **GRPO, "trl": {**GRPO["trl"], "generation_kwargs": {"beams": 4}},
    },
    "trl.vllm_structured_outputs_regex: the sampler": {
        **GRPO, "trl": {**GRPO["trl"], "vllm_structured_outputs_regex": "a+"},
    },
    "vllm.device: 'tpu' is not known": served(vllm={"device": "tpu"}),
    "trl.vllm_mode: colocated vLLM needs": served(sharding={"fsdp": True}, vllm_mode="colocate"),
    "lora_modules_to_save: vLLM cannot load": served({**LORA, "lora_modules_to_save": ["x"]}, vllm_lora_sync=True),
    "peft_use_dora: neither the adapter nor": served({**LORA, "peft_use_dora": True}),
    "trl.vllm_lora_sync: an adapter cannot be merged": served(LORA, {"fsdp": True}, vllm_lora_sync=False),
    "trl.vllm_lora_sync: merged weights of a quantised": served(QLORA, vllm_lora_sync=False),
    "trl.vllm_weight_transfer: sharded weights": served(sharding={"fsdp": True}, vllm_weight_transfer="nccl"),
    "trl.vllm_weight_transfer: ipc shares": served(vllm={"host": "gpu3"}, vllm_weight_transfer="ipc"),
    "trl.vllm_weight_transfer: ipc has the server": served(vllm={"host": "0.0.0.0"}, vllm_weight_transfer="ipc"),
    "trl.vllm_weight_transfer: ipc is for": served(vllm={"tensor_parallel_size": 2}, vllm_weight_transfer="ipc"),
    "trl.async_prefetch: colocated vLLM sleeps": {
        **GRPO,
        "trl": {**GRPO["trl"], "use_vllm": True, "vllm_mode": "colocate", "async_prefetch": True},
    },
}  # fmt: skip
ODD = {
    "distill.teacher: no effect with rl: dpo": {**DPO, "distill": {"teacher": "t"}},
    "distill.tail: no effect": distilled({"tail": "drop"}),
    "distill.beta: no effect": distilled({"beta": 0.2}),
    "nemo_gym_verify_timeout: no effect": {
        **GRPO,
        **AGENTS,
        "nemo_gym_verify_timeout": 9,
        "nemo_gym_run_timeout": 9,
    },
    "warmup_steps: no effect with": {**WHOLE, "warmup_steps": 5, "lr_scheduler": "constant"},
    "max_prompt_length: no effect on whole texts": {**WHOLE, "max_prompt_length": 9},
    "eval_steps: nothing is evaluated": {**WHOLE, "eval_steps": 5},
    "trl.num_generations: a batch of 4": {**GRPO, "micro_batch_size": 4},
    "trl.generation_batch_size: 10 completions": {**GRPO, "trl": {**GRPO["trl"], "generation_batch_size": 10}},
    "sequence_len: no effect": {**GRPO, "sequence_len": 64},
    "lora_r: no effect without": {**WHOLE, "lora_r": 4},
    "trl.temperature: no effect with rl: dpo": {**WHOLE, "rl": "dpo", "trl": {"temperature": 0.5}},
    "vllm.port: no effect with rl: dpo: nothing is sampled": {**WHOLE, "rl": "dpo", "vllm": {"port": 8001}},
    "trl.async_prefetch: without": {**GRPO, "trl": {"reward_funcs": ["r.f"], "async_prefetch": True}},
    "trl.vllm_lora_sync: there is no": {
        **GRPO,
        "trl": {"reward_funcs": ["r.f"], "use_vllm": True, "vllm_lora_sync": True},
    },
    "trl.top_p, trl.top_k": {**GRPO, "trl": {"reward_funcs": ["r.f"], "use_vllm": True, "top_p": 0.9}},
    "bfloat16: weights are trained": {**WHOLE, "bfloat16": True},
    "trl.vllm_sync_interval: no effect on training": {**GRPO, "trl": {**GRPO["trl"], "vllm_sync_interval": 2}},
    "learning_rate: 0.1 is far above": {**WHOLE, "learning_rate": 0.1},
    "warmup_steps: warm-up takes 20 of 10 steps": {**WHOLE, "max_steps": 10, "warmup_steps": 20},
    "warmup_ratio: warm-up takes 60% of all steps": {**WHOLE, "warmup_ratio": 0.6},
    "micro_batch_size: a step of one answer": {**WHOLE, "rl": "kto", "micro_batch_size": 1},
    "ebft.stride: no effect": {**WHOLE, "rl": "ebft", "ebft": {"stride": 4}},
    "ebft.diversity_coef: whit": {**WHOLE, "rl": "ebft", "ebft": {"use_whitening": True, "diversity_coef": 1.0}},
}


def notices(content):
    return parse_config(content, folder=Path()).notices


def error(content):
    with pytest.raises(UserError) as caught:
        parse_config(content, folder=Path())
    return str(caught.value)


@pytest.mark.parametrize("message", BROKEN)
def test_each_error_rule_speaks_when_broken(message):
    (said,) = error(BROKEN[message]).splitlines()
    assert said.startswith(message)


@pytest.mark.parametrize("message", ODD)
def test_each_warning_rule_speaks_when_it_should(message):
    (said,) = notices(ODD[message])
    assert said.startswith(message)


def test_every_rule_has_a_config_that_breaks_it():
    said = "\n".join([*map(error, BROKEN.values()), *(one for content in ODD.values() for one in notices(content))])
    for module in (data, distill, ebft, feeds, keys, model, rollout, training):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Yield) and not isinstance(node.value, ast.Tuple):
                texts = [str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]
                words = max(texts, key=len, default="")  # of rules that pass another's message on
                assert words in said, "give this rule a config that breaks it"


@pytest.mark.parametrize(
    "content", [WHOLE, {**WHOLE, **LORA}, GRPO, {**WHOLE, "rl": "ebft", "ebft": {"mode": "strided"}}]
)
def test_plain_configs_have_nothing_to_say(content):
    assert notices(content) == ()


@pytest.mark.parametrize(("loss", "rows"), [("kto", 8), ("apo_zero_unpaired", 1)])
def test_a_step_of_kto_has_answers_to_estimate_the_kl_from(loss, rows):
    content = {**WHOLE, "rl": "kto", "kto_loss_type": loss}
    config = parse_config(content, folder=Path())
    assert (config.optim.micro_batch_size, config.notices) == (rows, ())
    assert notices({**content, "micro_batch_size": 1, "gradient_accumulation_steps": 2}) == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({**GRPO, "learning_rate": 0.1}, "1e-7 to 1e-5 is usual for grpo where all weights train; try"),
        (
            {**WHOLE, **LORA, "learning_rate": 0.1},
            "sft with 'adapter: lora'; try 'learning_rate: 2e-4'",
        ),
        ({**GRPO, **LORA, "learning_rate": 0.1}, "1e-6 to 1e-4 is usual for grpo with 'adapter: lora'; try"),
        ({**WHOLE, "learning_rate": 1e-2}, "far above what is usual and ruins a model"),
        ({**DPO, "learning_rate": 1e-3}, "far above what is usual and ruins a model"),  # 1,000 times as much exactly
        ({**DPO, "learning_rate": 9e-4}, None),
        ({**WHOLE, "learning_rate": 1e-10}, "far below what is usual and hardly moves a model"),
        ({**WHOLE, **LORA, "learning_rate": 1e-3}, None),
        ({**GRPO, **LORA, "learning_rate": 1e-4}, None),
        ({**WHOLE, "learning_rate": 0.1, "optimizer": "sgd"}, None),
    ],
)
def test_learning_rates_far_from_the_usual_are_named_with_the_range(content, said):
    found = notices(content)
    assert found == () if said is None else said in found[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"max_steps": 10, "warmup_steps": 10}, "10 of 10 steps: the learning rate rises from 0 and never reaches its"),
        ({"max_steps": 10, "warmup_ratio": 0.75}, "at step 9. Set 'warmup_ratio: 0', or train for more"),
        ({"max_steps": 10, "warmup_steps": 5}, None),
        ({"warmup_steps": 500}, None),  # of steps that only the data tell
        ({"max_steps": 10, "warmup_steps": 20, "lr_scheduler": "mine.schedule"}, None),
    ],
)
def test_a_warm_up_that_is_most_of_a_run_is_named_where_the_config_has_its_steps(content, said):
    found = notices({**WHOLE, **content})
    assert found == () if said is None else said in found[0]


@pytest.mark.parametrize("keys", keys.EXCLUSIVE, ids=" ".join)
def test_exclusive_keys(keys):
    values = {"rl": "dpo", "fsdp": ["full_shard"], "deepspeed": "x.json", "test_datasets": [{"path": "d"}]}
    flags = {"reward_model", "process_reward_model", "load_in_4bit", "load_in_8bit", "fp16", "bfloat16"}
    content: dict = dict(WHOLE)
    for key in keys[:2]:
        block, dot, name = key.partition(".")
        value = values.get(key, True if key in flags else 0.5 if "ratio" in key or key == "val_set_size" else 2)
        if dot:
            content.setdefault(block, {})[name] = value
        else:
            content[key] = value
    with pytest.raises(UserError, match=f"cannot be used with '{keys[0]}'"):
        parse_config(content, folder=Path())


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "d.jsonl"},
        {"path": "d", "ds_type": "json"},
        {"path": "https://host/d.parquet"},
        {"data_files": ["a.parquet", "b.csv"]},
        {"path": "d.arrow", "streaming": True},
    ],
)
def test_a_stream_whose_files_do_not_say_their_length_needs_steps(entry):
    content = {**WHOLE, "streaming": True, "datasets": [entry]}
    assert error(content) == feeds.UNKNOWN_LENGTH
    parse_config({**content, "max_steps": 3}, folder=Path())
    parse_config({**content, "datasets": [{**entry, "max_samples": 9}]}, folder=Path())
    parse_config(content, folder=Path(), fragment=True)


@pytest.mark.parametrize(
    ("keys", "entry"),
    [
        ({}, {"type": "completion"}),
        ({}, {"type": "pretrain", "max_samples": 9}),
        ({}, {"filter": "mine.good"}),
        ({}, {"type": "mine.transform"}),
        ({"rl": "kto"}, {}),
        ({"rl": "dpo"}, {"type": {"field_winner": "w", "winner_values": {"A": "a", "B": "b", "tie": None}}}),
    ],
)
def test_a_stream_whose_rows_become_more_or_fewer_needs_steps(keys, entry):
    content = {**WHOLE, "streaming": True, "datasets": [{"path": "d.parquet", **entry}], **keys}
    assert error(content) == feeds.UNKNOWN_LENGTH
    parse_config({**content, "max_steps": 3}, folder=Path())


@pytest.mark.parametrize(
    "entry", [{"path": "d.parquet"}, {"path": "d"}, {"path": "d", "ds_type": "parquet"}, {"data_files": "d/*.parquet"}]
)
def test_a_stream_whose_files_may_say_their_length_needs_none(entry):
    parse_config({**WHOLE, "streaming": True, "datasets": [entry]}, folder=Path())


def test_groups_that_do_not_fit_are_mended_with_a_word():
    config = parse_config({**GRPO, "micro_batch_size": 4}, folder=Path())
    assert generation_batch(config) == 8
    assert "'gradient_accumulation_steps: 2' would fit" in config.notices[0]
    assert generation_batch(config, ranks=2) == 8
    assert generation_batch(config, ranks=3) == 24
    content = {**GRPO, "micro_batch_size": 6, "gradient_accumulation_steps": 7}
    for group, steps in ((4, 8), (9, 9), (10**9, 500_000_000)):
        (notice,) = parse_config({**content, "trl": {**GRPO["trl"], "num_generations": group}}, folder=Path()).notices
        assert f"'gradient_accumulation_steps: {steps}' would fit" in notice


@pytest.mark.parametrize(
    ("sizes", "made", "says"),
    [
        ({"generation_batch_size": 10}, 40, "trl.generation_batch_size: 40"),
        ({"steps_per_generation": 3}, 24, "trl.steps_per_generation: 6"),
        ({"generation_batch_size": 16}, 16, None),
        ({"steps_per_generation": 1}, 8, None),  # within an accumulation, for all of it
    ],
)
def test_a_rollout_that_does_not_fit_names_the_key_that_would(sizes, made, says):
    content = {**GRPO, "micro_batch_size": 4, "gradient_accumulation_steps": 2}
    config = parse_config({**content, "trl": {**GRPO["trl"], "num_generations": 4, **sizes}}, folder=Path())
    assert generation_batch(config) == made
    notices = [notice for notice in config.notices if "whole groups" in notice]
    assert notices == [] if says is None else says in notices[0]


def test_an_online_batch_is_one_group_when_nothing_is_said():
    config = parse_config({**GRPO, "trl": {"reward_funcs": ["r.f"], "num_generations": 4}}, folder=Path())
    assert (config.optim.micro_batch_size, config.optim.accumulation, generation_batch(config)) == (4, 1, 4)


def test_batch_size_stands_for_accumulation():
    config = parse_config({**WHOLE, "batch_size": 8, "micro_batch_size": 2}, folder=Path())
    assert (config.optim.micro_batch_size, config.optim.accumulation) == (2, 4)


def test_rules_speak_of_a_config_that_was_made_otherwise():
    config = parse_config({**WHOLE, "fsdp": True}, folder=Path())
    config = dataclasses.replace(config, optim=config.optim.model_copy(update={"activation_offloading": True}))
    assert [message.split(":")[0] for message in check(config)[0]] == ["activation_offloading"]


@pytest.mark.parametrize(
    "content",
    [
        {**WHOLE, "fsdp": True, **QLORA},
        {**WHOLE, "deepspeed": "zero3.json", **QLORA},
        {**WHOLE, "deepspeed": "zero2.json", **EIGHT},
        {**WHOLE, "deepspeed": "of_another_machine.json"},
        {**WHOLE, "rl": "kto", "kto_loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True},
        scheduled("warmup_stable_decay", num_decay_steps=3, decay_type="1-sqrt"),
        scheduled("cosine_with_min_lr", min_lr_rate=0.1),
        {**WHOLE, "lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1},
        {**HELD, "load_best_model_at_end": True, "save_steps": 0.4, "eval_steps": 0.2},
        {**HELD, "load_best_model_at_end": True, "save_steps": 6, "eval_steps": 2},
        served(LORA, {"fsdp": True}),
        served(vllm_weight_transfer="ipc"),
    ],
)
def test_what_can_be_done_passes(content):
    parse_config(content, folder=Path())


def test_all_that_is_wrong_is_named_at_once():
    text = error({**BROKEN["save_only_model: needs whole"], "torch_compile": True})
    assert {line.split(":")[0] for line in text.splitlines()} == {"save_only_model", "torch_compile"}
