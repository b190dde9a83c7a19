"""The page in a real browser, where there is one: its scripts run, and what they draw is there."""

import re
import subprocess

import pytest

from made_browser import BROWSER, QUIET, browser_page
from made_reports import as_lines, completion, metrics, with_pictures, write_run
from upweight.runs.report.page import PageReader, page, write_report

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")


def seen(file, tmp_path) -> str:
    """The elements of a page after its scripts have run."""
    assert BROWSER is not None
    command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.resolve().as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return re.sub(r"<script.*?</script>", "", shown.stdout, flags=re.DOTALL)


def test_a_run_is_drawn_and_its_text_stays_text(tmp_path):
    run = write_run(tmp_path / "run", record={"state": "failed", "message": "step 3: <b>loss</b> is nan"})
    nasty = "<img src=x onerror='document.title=1'>"
    (run / "completions" / "step_00010.jsonl").write_text(as_lines([completion(10, completion=nasty)]))
    shown = seen(write_report([run]), tmp_path)
    assert "KL explosion" in shown
    assert "kl 2.5 (&gt; 2) for 5 steps" in shown
    assert "step 3: &lt;b&gt;loss&lt;/b&gt; is nan" in shown
    assert "&lt;img src=x onerror='document.title=1'&gt;" in shown
    assert "<img" not in shown
    assert shown.count("<canvas") == len(re.findall(r'<figure class="chart"', shown)) > 5
    assert "Before and after" in shown


def test_a_rate_that_is_far_from_usual_is_on_the_page(tmp_path):
    run = write_run(tmp_path / "run", config={"base_model": "x", "rl": "grpo", "learning_rate": 0.1})
    shown = seen(write_report([run]), tmp_path)
    assert "<code>learning_rate</code>" in shown
    assert "0.1 is far above what is usual" in shown


def test_pass_rates_are_named_by_what_they_count(tmp_path):
    rates = [{"step": step, "eval_rewards/a/pass@1": step / 40, "eval_rewards/a/pass@4": 1.0} for step in (0, 10)]
    shown = seen(
        write_report([write_run(tmp_path / "run", rows=[rates[0], *map(metrics, range(1, 11)), rates[1]])]), tmp_path
    )
    assert "a: completions above 0 (pass@1)" in shown
    assert "a: prompts with any of 4 above 0 (pass@4)" in shown


def test_runs_are_compared(tmp_path):
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "other", config={"rl": "grpo", "seed": 7})]
    shown = seen(write_report(runs), tmp_path)
    assert "Comparison" in shown
    assert "<code>seed</code>" in shown
    assert "All runs" in shown


def test_compared_runs_show_what_each_wrote_last(tmp_path):
    runs = [write_run(tmp_path / "one", steps=10), write_run(tmp_path / "other", steps=40)]
    for run, step in zip(runs, (10, 40), strict=True):
        file = run / "completions" / f"step_{step:05d}.jsonl"
        file.write_text(as_lines([completion(step, completion=f"the end of {run.name}")]))
    shown = seen(write_report(runs), tmp_path)
    assert "the end of one" in shown
    assert "the end of other" in shown
    assert ">step 10<" in shown


def test_an_empty_folder_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    written = tmp_path / "page.html"
    written.write_text(page(PageReader([tmp_path / "run"]).read()), encoding="utf-8")
    shown = seen(written, tmp_path)
    assert "This folder holds no run." in shown
    assert "<canvas" not in shown


def test_identical_completions_are_folded_with_their_number(tmp_path):
    run = write_run(tmp_path / "run")
    rows = [completion(10, 0, completion="twice told") for _ in range(5)]
    (run / "completions" / "step_00010.jsonl").write_text(as_lines([*rows, completion(10, 1)]))
    shown = seen(write_report([run]), tmp_path)
    assert shown.count("twice told") == 1
    assert "\u00d7 5" in shown
    assert "answer 1" in shown


def test_images_of_the_prompt_and_of_tools_are_shown(tmp_path):
    pytest.importorskip("PIL.Image")
    run = write_run(tmp_path / "run")
    with_pictures(run, 10)
    shown = seen(write_report([run]), tmp_path)
    assert len(re.findall(r'<img src="data:image/jpeg;base64,[^"]+" alt="image that a tool', shown)) == 1
    assert shown.count('alt="image of the prompt"') >= 1


def test_rewards_and_lengths_are_drawn_over_steps(tmp_path):
    run = write_run(tmp_path / "run")
    rows = [completion(10, place, tokens=place + 1, rewards={"correct": place / 4}) for place in range(4)]
    (run / "completions" / "step_00010.jsonl").write_text(as_lines(rows))
    shown = seen(write_report([run]), tmp_path)
    assert "Rewards of completions" in shown
    assert "Lengths of completions" in shown
    assert shown.count("<rect") >= 4


def test_a_constant_value_of_all_completions_is_written(tmp_path):
    shown = seen(write_report([write_run(tmp_path / "run")]), tmp_path)
    cards = re.findall(r'<figure class="chart spread">.*?</figure>', shown)
    assert len(cards) == 2
    assert all("<b>2</b> for every completion, in all 2 steps" in card and "<svg" not in card for card in cards)


def test_compared_runs_name_each_measure_once(tmp_path):
    logged = {
        "pairs": {"rewards/accuracies": 0.5, "rewards/margins": 1.0, "entropy": 2.0},
        "scores": {"accuracy": 0.7, "margin": 0.1},
        "online": {"reward": 1.0, "sampling/entropy": 1.5},
    }
    runs = [
        write_run(tmp_path / name, rows=[{"step": step, **values} for step in (1, 2)], config={"rl": name})
        for name, values in logged.items()
    ]
    table, _, _ = seen(write_report(runs), tmp_path).partition("</table>")
    names = re.findall(r'<th scope="row">(.*?)</th>', table)
    assert {"Accuracy", "Margin", "Entropy", "Entropy of the sampler"} <= set(names)
    assert len(names) == len(set(names))
    (accuracies,) = re.findall(r'<tr><th scope="row">Accuracy</th>.*?</tr>', table)
    assert "0.5" in accuracies
    assert "0.7" in accuracies


def test_a_young_run_is_not_green(tmp_path):
    rows = [{"step": step, "loss": 0.1, "reward": 0.0, "frac_reward_zero_std": 1.0} for step in range(1, 6)]
    run = write_run(tmp_path / "run", rows=rows)
    (run / "health.jsonl").write_text("")
    shown = seen(write_report([run]), tmp_path)
    assert "Too early: " in shown
    assert "no signal (20)" in shown
    assert "well good" not in shown


def test_a_step_that_trained_on_nothing_is_not_the_speed_of_the_run(tmp_path):
    speeds = (50.0, 40.0, 0.0)
    rows = [{"step": step, "reward": 1.0, "tokens_per_second": speed} for step, speed in enumerate(speeds, 1)]
    shown = seen(write_report([write_run(tmp_path / "run", rows=rows)]), tmp_path)
    tile = re.search(r"<dt>Tokens per second</dt>(.*?)</dd>", shown)
    assert tile
    assert ">40<" in tile[1]


def test_a_metric_of_ones_own_has_words(tmp_path):
    rows = [{"step": step, "loss": 0.1, "my_own/metric": step} for step in range(1, 6)]
    shown = seen(write_report([write_run(tmp_path / "run", rows=rows)]), tmp_path)
    assert "my own, metric" in shown


def test_the_model_before_training_is_asked_for(tmp_path):
    rows = [{"step": 1, "loss": 0.1}, {"step": 2, "eval_loss": 0.5}, {"step": 4, "eval_loss": 0.4}]
    shown = seen(write_report([write_run(tmp_path / "run", rows=rows)]), tmp_path)
    assert "eval_on_start: true does that" in shown


@pytest.mark.parametrize(("width", "tallest"), [(1280, 9000), (390, 8000)])
def test_no_page_is_wider_than_its_screen_or_logs_an_error(width, tallest, tmp_path):
    run, other = write_run(tmp_path / "run", steps=40), write_run(tmp_path / "other", steps=40)
    pages = [write_report([run]), write_report([run, other])]
    with browser_page(tmp_path / "profile") as page:
        for file in pages:
            page.open(file.resolve().as_uri(), width)
            assert page.problems == []
            assert page.value("document.documentElement.scrollWidth") <= width
            assert page.value("document.documentElement.scrollHeight") < tallest
            legends = "[...document.querySelectorAll('.legend')]"
            assert page.value(f"{legends}.filter((one) => one.scrollWidth > one.clientWidth + 1).length") == 0


def test_links_to_sections_scroll_by_themselves_on_a_phone(tmp_path):
    with browser_page(tmp_path / "profile") as page:
        page.open(write_report([write_run(tmp_path / "run", steps=40)]).resolve().as_uri(), 390)
        nav = "document.getElementById('sections')"
        assert page.value(f"getComputedStyle({nav}).overflowX") == "auto"
        assert "local" in page.value(f"getComputedStyle({nav}).backgroundAttachment")  # the shadows beside more links
        assert page.value(f"{nav}.scrollLeft = 1000, {nav}.scrollLeft") > 0
        for name in page.value(f"[...{nav}.children].map((link) => link.hash.slice(1))"):
            page.value(f"{nav}.querySelector('[href=\"#{name}\"]').click()")
            top = f"document.getElementById('{name}').getBoundingClientRect().top"
            at_end = "innerHeight + scrollY >= document.documentElement.scrollHeight - 2"
            assert 0 <= page.value(f"{top} - {nav}.getBoundingClientRect().bottom") < 40 or page.value(at_end), name
        assert page.value("scrollX") == 0
        assert page.value("document.documentElement.scrollWidth") <= 390


def test_words_are_found_in_all_steps(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "completions" / "step_00001.jsonl").write_text(as_lines([completion(1, completion="a needle")]))
    with browser_page(tmp_path / "profile") as page:
        page.open(write_report([run]).resolve().as_uri(), 1280)
        shown = "document.getElementById('written').textContent.includes('a needle')"
        assert page.value(shown) is False  # the newest step is shown first
        page.value("reading.filter = 'needle'; reading.everywhere = true; renderWritten()")
        assert page.value(shown) is True
        assert "step 1" in page.value("document.getElementById('written').textContent")
        assert page.problems == []


@pytest.mark.parametrize(
    ("splits", "labels"),
    [([5.6776, 5.67765, 5.6777], ["5.67760", "5.67765", "5.67770"]), ([12345, 12346], ["12345", "12346"]),
     ([-0.00002, 0, 0.00002], None), ([0, 0.5, 1], ["0", "0.5", "1.0"])],
)  # fmt: skip
def test_ticks_of_a_curve_that_hardly_moves_differ(splits, labels, tmp_path):
    with browser_page(tmp_path / "profile") as page:
        page.open(write_report([write_run(tmp_path / "run")]).resolve().as_uri(), 1280)
        shown = page.value(f"tickLabels({splits})")
    assert shown == labels if labels else len(set(shown)) == len(splits)
