import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen2Config, Qwen3MoeConfig
from typer.testing import CliRunner

from made_runs import write_config, write_model, write_online
from upweight.cli.app import app
from upweight.cli.fits import near_size, run, size_for
from upweight.config import load_config
from upweight.errors import UserError
from upweight.models.memory import GIB
from upweight.models.memory_plan import plan_memory

QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True, "memory": "fast"}
TEXTS = [{"path": "texts.jsonl", "type": "completion"}]


def printed(capsys):
    """The first lines, the rows of the table by what is trained and the mode, and the answer."""
    what, where, headings, *rows, answer = capsys.readouterr().out.splitlines()
    names = headings.split()
    cells = [dict(zip(names, row.replace("* ", "").split(), strict=True)) for row in rows]
    return f"{what}; {where}", {(row["trained"], row["memory"]): row for row in cells}, answer


def test_a_table_that_marks_the_configs_own_way(tmp_path, capsys):
    config = write_config(tmp_path, write_model(tmp_path / "model"), adapter="lora", memory="lean")
    run(config, [], memory=24)
    about, where, headings, *rows, answer = capsys.readouterr().out.splitlines()
    assert about.endswith("in bfloat16, dpo on sequences of 512 tokens, at least 2 in a forward")
    assert where == "GiB on one GPU of 24 GiB; longest: tokens that fit; * is this config"
    assert headings.split()[:2] == ["trained", "memory"]
    assert len(rows) == 9
    assert [row.split()[1:3] for row in rows if "*" in row] == [["lora", "lean"]]
    assert answer.startswith("this config fits ('memory: lean'): about ")


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    """A model of 7.6 billion weights, without any."""
    folder = tmp_path_factory.mktemp("seven")
    sizes = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    Qwen2Config(vocab_size=151_936, num_key_value_heads=4, architectures=["Qwen2ForCausalLM"], **sizes).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize(
    ("gib", "keys", "said"),
    [
        (80, {"adapter": "lora"}, "this config fits ('memory: balanced')"),
        (24, {"adapter": "lora", "sequence_len": 4096}, "Set 'memory: fast' (which sets gradient_checkpointing"),
        (24, {"adapter": "lora", "sequence_len": 22_000}, "Set 'memory: lean' (which sets gradient_checkpointing"),
        (24, {"adapter": "lora", "memory": "lean", "sequence_len": 4096}, "this config fits ('memory: lean')"),
        (15, {"adapter": "lora"}, "Set 'adapter: qlora' with 'load_in_4bit: true'"),
        (12, {"sequence_len": 16_000}, "Set 'adapter: qlora' with 'load_in_4bit: true' and 'memory: lean'"),
        (8, {"sequence_len": 65_536}, "' and 'adapter: qlora' with 'load_in_4bit: true' and 'memory: lean'"),
        (8, {**QLORA, "gradient_checkpointing": False}, "Set 'gradient_checkpointing: true': about "),
        (8, {**QLORA, "lora_r": 256}, "Set 'lora_r: 16': about "),
        (8, {**QLORA, "lora_r": 128, "sequence_len": 9000}, "' and 'lora_r: 16' and 'memory: lean' (which"),
        (8, {**QLORA, "lora_modules_to_save": ["lm_head"]}, "Set no 'lora_modules_to_save': about "),
        (
            8,
            {**QLORA, "lora_r": 256, "lora_modules_to_save": ["lm_head"]},
            "Set 'lora_r: 16' and no 'lora_modules_to_save': about ",
        ),
        (
            8,
            {"adapter": "lora", "load_in_8bit": True},
            "Set 'load_in_4bit: true' in place of 'load_in_8bit' and 'memory:",
        ),
        (4, {}, "Take a smaller model, or 'fsdp: true'"),
    ],
)
def test_the_answer_names_the_mode_and_the_keys(seven, tmp_path, capsys, gib, keys, said):  # noqa: PLR0917
    run(write_config(tmp_path, seven, rl=None, datasets=TEXTS, **keys), [], memory=gib)
    _, _, answer = printed(capsys)
    assert said in answer


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_the_length_that_is_named_fits(seven, capsys, method):
    long = ["sequence_len=30000"] if method == "sft" else ["trl.max_completion_length=30000"]
    keys = ["adapter=qlora", "load_in_4bit=true", "memory=lean"]
    assert run(str(seven), [*keys, *long], memory=8, method=method) == 1
    named = re.search(r"Set '(\S+): (\d+)'; or 'fsdp", printed(capsys)[2])
    assert named is not None
    assert run(str(seven), [*keys, f"{named[1]}={named[2]}"], memory=8, method=method) == 0


def test_the_exit_code_says_whether_the_config_fits(seven):
    ways = [CliRunner().invoke(app, ["fits", str(seven), "--memory", size]) for size in ("80", "15")]
    assert [way.exit_code for way in ways] == [0, 1]
    assert "this config does not fit" in ways[1].output


def test_a_key_that_one_mode_cannot_have_leaves_the_others_their_lines(seven, tmp_path, capsys):
    keys = {"memory": "lean", "tiled_mlp": True, "adapter": "qlora", "load_in_4bit": True, "sequence_len": 16_000}
    assert run(write_config(tmp_path, seven, rl=None, datasets=TEXTS, **keys), [], memory=16) == 0
    _, rows, answer = printed(capsys)
    assert {mode for _, mode in rows} == {"fast", "balanced", "lean"}
    assert "this config fits ('memory: lean')" in answer


def test_the_answer_names_all_keys_that_a_mode_sets(seven, capsys):
    assert run(str(seven), [], memory=18, method="grpo") == 1
    assert "'memory: fast' (which sets gradient_checkpointing, gradient_checkpointing_kwargs)" in printed(capsys)[2]


def test_what_a_sampler_holds_is_part_of_the_plan(seven, tmp_path, capsys):
    config = write_online(tmp_path, seven, adapter="lora", batch_size=None, micro_batch_size=64)
    overrides = ["trl.max_completion_length=4096", "trl.num_generations=8"]
    run(config, overrides, memory=80)
    about, rows, _ = printed(capsys)
    assert "4,608 tokens" in about
    balanced, lean = rows["lora", "balanced"], rows["lora", "lean"]
    # 64 completions and 8 prompts of 4,608 tokens, 28 layers of 4 heads of 128, keys and values of two bytes
    assert float(balanced["sampler"]) == pytest.approx(72 * 4608 * 28 * 4 * 128 * 4 / 2**30, abs=0.06)
    assert float(lean["sampler"]) == 0
    assert int(lean["longest"]) > 2 * int(balanced["longest"])
    run(config, [*overrides, "trl.sampler_quantization=int8"], memory=80)
    copies = float(printed(capsys)[1]["lora", "balanced"]["sampler"]) - float(balanced["sampler"])
    assert copies == pytest.approx(28 * 3 * 3584 * 18944 / 2**30, rel=0.05)
    run(config, [*overrides, "trl.use_vllm=true"], memory=80)
    assert float(printed(capsys)[1]["lora", "balanced"]["sampler"]) == 0


def test_doctor_and_run_plan_what_fits_prints(seven, tmp_path, capsys):
    config = write_config(tmp_path, seven, rl=None, datasets=TEXTS, adapter="lora", memory="lean")
    run(config, [], memory=24)
    shown = float(printed(capsys)[1]["lora", "lean"]["total"])
    assert plan_memory(load_config(config), 24 * GIB).need.total / GIB == pytest.approx(shown, abs=0.06)


def test_the_longest_sequence_is_no_longer_than_the_models_positions(seven, tmp_path, capsys):
    run(write_config(tmp_path, seven, rl=None, datasets=TEXTS, adapter="lora", memory="lean"), [], memory=1000)
    _, rows, answer = printed(capsys)
    assert {row["longest"] for row in rows.values()} == {"32768"}
    assert answer.endswith("sequences of up to 32,768 tokens")


def test_a_model_that_is_not_here_needs_only_its_config(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"`upweight fits FOLDER` reads a folder with the model's config\.json"):
        run("nobody/nothing", [], memory=8)


@pytest.mark.parametrize("size", ["8GB", "0", "inf"])
def test_memory_is_a_number_of_gib(size):
    answered = CliRunner().invoke(app, ["fits", "model", "--memory", size])
    assert answered.exit_code == 2
    assert "GiB as a number, e.g. 8" in answered.output


def beside_a_lora(capsys):
    """The first line, and the GiB that a LoRA's training takes beside weights and activations."""
    about, rows, _ = printed(capsys)
    return about, float(rows["lora", "balanced"]["training"])


def test_teachers_take_memory_as_they_are_loaded(tmp_path, capsys):
    student = write_model(tmp_path / "student")
    teacher = tmp_path / "teacher"
    AutoConfig.from_pretrained(student, hidden_size=8192, intermediate_size=8192).save_pretrained(teacher)
    config = write_online(tmp_path, student, rl="distill", trl=None, distill={"teacher": str(teacher)})
    run(config, [], memory=24)
    about, whole = beside_a_lora(capsys)
    assert "teachers of 0.8 GiB" in about
    run(config, ["distill.teacher_load_in_4bit=true"], memory=24)
    assert beside_a_lora(capsys)[1] < 0.4 * whole
    run(config, ["reference_offloading=true"], memory=24)
    assert beside_a_lora(capsys)[1] < 0.1
    run(config, ["distill.teacher=http://localhost:1", "distill.top_k=20"], memory=24)
    assert "teacher" not in beside_a_lora(capsys)[0]
    run(str(student), [], memory=24, method="distill")
    assert ", no teacher (distill.teacher=FOLDER counts one)" in beside_a_lora(capsys)[0]
    with pytest.raises(UserError, match=r"^distill\.teacher: could not load the config of 'nobody/nothing'"):
        run(str(student), ["distill.teacher=nobody/nothing"], memory=24, method="distill")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU says by itself how much memory it has")
@pytest.mark.parametrize(
    ("gib", "said"),
    [
        (12, "Set 'distill.teacher_load_in_4bit: true': about "),
        (5, "Take a smaller teacher or one on a server ('distill.teacher: URL'), a smaller model, or 'fsdp: true'"),
    ],
)
def test_a_teacher_that_is_too_large_is_answered_with_what_makes_it_fit(seven, tmp_path, capsys, gib, said):
    keys = {"adapter": "lora", "distill": {"teacher": str(seven)}}
    student = write_model(tmp_path / "student", max_position_embeddings=2048)
    config = write_online(tmp_path, student, rl="distill", trl=None, **keys)
    assert run(config, [], memory=gib) == 1
    _, rows, answer = printed(capsys)
    assert said in answer
    assert {row["longest"] for row in rows.values()} == {"0"}  # `lean` too, whose teacher has no room while it computes
    if gib == 12:
        assert answer.endswith("; 4 bits need bitsandbytes (pip install bitsandbytes)")
        assert run(config, ["distill.teacher_load_in_4bit=true"], memory=gib) == 0


def test_without_a_gpu_the_memory_has_to_be_said(tmp_path):
    with pytest.raises(UserError, match="--memory 24"):
        run(write_config(tmp_path, tmp_path), [], memory=None)


def test_a_model_alone_needs_no_config(seven, tmp_path, capsys):
    run(str(seven), ["trl.max_completion_length=300"], memory=80, method="grpo")
    about, _, answer = printed(capsys)
    assert "7.61 billion weights in bfloat16, grpo on sequences of 812 tokens" in about
    assert about.endswith("* is what is assumed of a model alone: LoRA, 'memory: balanced' unless it is set")
    assert answer.startswith("this config fits")
    run(str(seven), [], memory=15)
    about, _, answer = printed(capsys)
    assert ", sft on " in about
    assert "Set 'adapter: qlora' with 'load_in_4bit: true'" in answer
    with pytest.raises(UserError, match="--method: the config chooses the method"):
        run(write_config(tmp_path, seven), [], memory=24, method="dpo")
    with pytest.raises(UserError, match="PPO needs a value model"):
        run(str(seven), [], memory=24, method="ppo")
    with pytest.raises(
        UserError, match=r"^--method rewards: none of sft, reward, prm, dpo, .* Did you mean 'reward'\?"
    ):
        run(str(seven), [], memory=24, method="rewards")


def test_a_reward_model_is_called_so(seven, capsys):
    run(str(seven), [], memory=24, method="reward")
    assert ", reward model on sequences of" in capsys.readouterr().out


def test_sequences_beyond_the_positions_of_the_model_do_not_fit(seven, capsys):
    assert run(str(seven), ["sequence_len=40000", "memory=lean"], memory=180) == 1
    assert printed(capsys)[2].endswith(
        "; but the model has only 32,768 positions for the 40,000 tokens: set 'sequence_len: 32768' or less"
    )


def test_a_size_is_enough(capsys):
    assert run("7b", [], memory=8, method="dpo") == 1
    first, about, *_, answer = capsys.readouterr().out.splitlines()
    assert first == "7b is counted with the shape of Qwen2.5-7B"
    assert about.startswith("7.62 billion weights in bfloat16, dpo")
    assert answer.endswith("; 4 bits need bitsandbytes (pip install bitsandbytes)")
    with pytest.raises(UserError, match=r"9B: the sizes .* 7B, 8B"):
        run("9B", [], memory=8)


NAMES = {"all": "all weights", "lora": "LoRA", "qlora": "QLoRA"}


@pytest.mark.parametrize("size", ["0.5B", "1B", "1.5B", "3B", "7B", "8B", "14B", "32B"])
def test_what_the_table_of_sizes_in_the_docs_promises_fits(size, capsys):
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith(f"| {size} |"))
    for gib, cell in zip((8, 12, 16, 24), line.strip("| ").split(" | ")[1:], strict=True):
        run(size, ["sequence_len=1024"], memory=gib)
        rows = [row.replace("*", " ").split() for row in capsys.readouterr().out.splitlines()[4:-1]]
        fitting = {f"{NAMES[row[0]]}, `{row[1]}`" for row in rows if row[-2] == "yes"}
        assert cell in fitting if cell != "no" else not fitting


def test_the_size_in_a_models_name_is_the_one_to_ask_for():
    names = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-7B-Instruct", "Qwen3-30B-A3B", "mine", "google/gemma-2-9b-it")
    assert [near_size(name) for name in names] == ["1B", "7B", "32B", "7B", "8B"]
    assert near_size("SmolLM2-360M-Instruct") == "0.5B"
    assert [size_for(name) for name in (*names, "Qwen3-4B", "a-400B")] == ["1B", "7B", "32B", None, "14B", "7B", None]


def test_a_size_in_millions_is_a_size_too():
    with pytest.raises(UserError, match=r"135M: the sizes that are known without a model are 0\.5B"):
        run("135M", [], memory=8)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of 30 billion weights, nearly all of them in experts, without any."""
    folder = tmp_path_factory.mktemp("mixture")
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151_936}
    Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **experts, **heads, **sizes).save_pretrained(folder)
    return folder


def test_the_experts_of_a_mixture_are_quantised_where_that_makes_it_fit(mixture, tmp_path, capsys):
    assert run(str(mixture), [], memory=24) == 1
    _, rows, answer = printed(capsys)
    assert len(rows) == 12
    assert "Set 'adapter: qlora' with 'load_in_4bit: true' and 'quantize_moe_experts: true'" in answer
    assert "bitsandbytes" in answer
    four_bits = {"adapter": "qlora", "load_in_4bit": True}
    config = write_config(tmp_path, mixture, rl=None, datasets=TEXTS, **four_bits)
    assert run(config, [], memory=24) == 1
    _, rows, answer = printed(capsys)
    promised = rows["qlora+experts", "balanced"]
    assert "Set 'quantize_moe_experts: true': about" in answer
    assert run(config, ["quantize_moe_experts=true"], memory=24) == 0
    _, rows, _ = printed(capsys)
    assert len(rows) == 9
    assert rows["qlora", "balanced"]["total"] == promised["total"]
    run(config, ["fsdp=true"], memory=24)
    _, rows, answer = printed(capsys)
    assert len(rows) == 9
    assert "quantize_moe_experts" not in answer


def test_a_mixture_in_8_bits_is_answered_with_keys_that_can_be_set(mixture, tmp_path, capsys):
    config = write_config(tmp_path, mixture, rl=None, datasets=TEXTS, adapter="lora", load_in_8bit=True)
    assert run(config, [], memory=24) == 1
    said = "with 'load_in_4bit: true' in place of 'load_in_8bit' and 'quantize_moe_experts: true'"
    assert f"Set 'adapter: qlora' {said}: about" in printed(capsys)[2]
    keys = ["adapter=qlora", "load_in_4bit=true", "load_in_8bit=false", "quantize_moe_experts=true"]
    assert run(config, keys, memory=24) == 0


def test_rows_are_not_needed_nor_the_package_that_reads_them(tmp_path):
    config = write_config(tmp_path, write_model(tmp_path / "model"))
    (tmp_path / "pairs.jsonl").unlink(missing_ok=True)
    program = "import sys; sys.modules['datasets'] = None; from upweight.cli.app import app; app(sys.argv[1:])"
    command = [sys.executable, "-c", program, "fits", str(config), "--memory", "24"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "this config fits" in ended.stdout, ended.stderr


def test_a_run_folder_is_judged_by_its_config(seven, tmp_path, capsys):
    write_config(tmp_path, seven, rl=None, datasets=TEXTS, adapter="lora", memory="lean").rename(
        tmp_path / "config.yaml"
    )
    (tmp_path / "run.json").write_text("{}")
    run(tmp_path, [], memory=24)
    about, _, answer = printed(capsys)
    assert about.endswith("* is this config")
    assert "this config fits ('memory: lean')" in answer


@pytest.fixture(scope="module")
def stored_in_4_bits(seven, tmp_path_factory):
    """The same, as AWQ stores it."""
    config = AutoConfig.from_pretrained(seven)
    config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 128}
    config.save_pretrained(folder := tmp_path_factory.mktemp("awq"))
    return folder


def test_weights_that_are_stored_in_4_bits_are_counted_so_and_not_quantised_again(stored_in_4_bits, seven, capsys):
    run(seven, [], memory=80)
    _, plain, _ = printed(capsys)
    assert run(stored_in_4_bits, [], memory=7.5) == 1
    about, rows, answer = printed(capsys)
    assert "7.61 billion weights in 4 bits, as awq stores them" in about
    assert {kind for kind, _ in rows} == {"lora"}
    assert float(rows["lora", "fast"]["weights"]) == pytest.approx(float(plain["qlora", "fast"]["weights"]), rel=0.02)
    fused, unfused = (float(each["activations"]) for each in (plain["qlora", "balanced"], rows["lora", "balanced"]))
    assert unfused == pytest.approx(fused * 1.5, abs=0.15)  # blocks beside layers of AWQ keep two products more
    assert "Set 'memory: fast'" in answer
    assert "4bit" not in answer


def test_the_package_that_stored_weights_need_is_named_where_it_is_missing(stored_in_4_bits, capsys, monkeypatch):
    run(stored_in_4_bits, [], memory=24)
    needs = "loading weights that awq stores needs gptqmodel, which is not installed here: pip install gptqmodel"
    assert needs in capsys.readouterr().out
    monkeypatch.setattr("upweight.models.first_look.find_spec", lambda name: name)
    run(stored_in_4_bits, [], memory=24)
    assert "gptqmodel" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["adapter=qlora", "load_in_4bit=true"], "quantised already, by awq. Name the model"),
        (["adapter=null", "lora_target_linear=false"], "do not train. Set `adapter: lora`"),
    ],
)
def test_ways_that_stored_weights_do_not_allow_are_refused_as_by_train(keys, says, stored_in_4_bits):
    with pytest.raises(UserError, match=says):
        run(stored_in_4_bits, keys, memory=24)


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen/Qwen3-30B-A3B", "8x7b"])
def test_a_mixture_is_not_answered_with_a_dense_shape(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="of mixtures of experts no shape is known") as error:
        run(name, [], memory=8)
    assert "a shape of that size" not in str(error.value)


def test_shorter_sequences_are_named_beside_an_adapter_where_they_let_the_same_weights_train(capsys):
    keys = ["adapter=null", "memory=lean"]
    assert run("0.5B", [*keys, "sequence_len=32768"], memory=11.5) == 1
    answer = capsys.readouterr().out
    assert "Set 'adapter: lora': about " in answer
    named = re.search(r"; or train the same weights on shorter sequences: 'sequence_len: (\d+)'$", answer.strip())
    assert named is not None
    assert run("0.5B", [*keys, f"sequence_len={named[1]}"], memory=11.5) == 0
    capsys.readouterr()
    assert run("0.5B", keys, memory=8) == 1
    assert "shorter" not in capsys.readouterr().out
