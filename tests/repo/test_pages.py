"""Pages made from the code are current, and what they show is so."""

import re
from pathlib import Path

import pytest
from docs.format_rows import SHOWN
from docs.pages import MARK, PAGES, _sentence, arguments, renewed

from made_tokenizers import byte_tokenizer, encoder
from upweight.config.config import general_keys, method_keys
from upweight.data.formats import FORMATS

DOCS = Path(__file__).parents[2] / "docs"
KEYS = {
    "pairs": {"rl": "dpo"},
    "labelled": {"rl": "kto"},
    "steps": {"process_reward_model": True},
    "text": {},
    "prompts": {"rl": "grpo"},
    "ebft": {"rl": "ebft", "ebft": {"mode": "structured"}},
    "distill": {"rl": "distill", "distill": {"on_policy": 0, "teacher": "t"}},
}
EVERY = [(kind, name, one.row) for kind, shown in SHOWN.items() for one in shown for name in one.names()]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name):
    page = (DOCS / name).read_text(encoding="utf-8")
    assert (MARK in page) == (name != "config.md")
    assert page == renewed(page, PAGES[name]()), "run `make docs`"


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("look at distill/unread_share: where it is high", "Look at `distill/unread_share`: where it is high."),
        ("set max_grad_norm: 1.0 and ebft.mode", "Set `max_grad_norm: 1.0` and `ebft.mode`."),
        ("look for trl.scale_rewards: none.", "Look for `trl.scale_rewards: none`."),
    ],
)
def test_keys_and_metrics_of_a_remedy_are_code(text, page):
    assert _sentence(text) == page


@pytest.mark.parametrize(("kind", "name", "row"), EVERY, ids=[f"{kind} {name}" for kind, name, _ in EVERY])
def test_the_row_that_is_shown_of_a_format_can_be_read_by_it(kind, name, row):
    keys = {"chat_template": "chatml", "sequence_len": 512, **KEYS[kind]}
    if "strided" in name or (kind == "ebft" and name == "completion"):
        keys["ebft"] = {"mode": "strided"}
    records = encoder({"type": name}, byte_tokenizer(), **keys)(row)
    assert records


def test_every_format_is_shown():
    for kind, formats in FORMATS.items():
        shown = {name for one in SHOWN[kind] for name in one.names()}
        also = {name for one in SHOWN["pairs"] for name in one.names()} if kind == "labelled" else set()
        assert set(formats) <= shown | also
        assert shown <= set(formats)


def test_every_config_of_scripts_has_its_own_part():
    _, shared, *parts = arguments().split("### ")
    assert all("| argument | key |" in part or "nothing to do" in part or "every config" in part for part in parts)
    assert {"SFTConfig", "DPOConfig", "GRPOConfig", "GKDConfig"} <= {part.split("\n")[0] for part in parts}
    assert "| `router_aux_loss_coef` |" in shared  # which all configs have
    assert not any("| `router_aux_loss_coef` |" in part for part in parts)


def test_keys_that_arguments_become_exist():
    table = (DOCS / "peers.md").read_text(encoding="utf-8").partition(MARK)[0].partition("| argument | key |")[2]
    keys = re.findall(r"\| `(\w+)` \|$", table, re.MULTILINE)
    assert len(keys) > 10
    assert set(keys) <= {*general_keys(), *method_keys()}
