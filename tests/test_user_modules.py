"""Users' functions and classes are found by their path, their options are checked, and changed files are named."""

import hashlib
import linecache

import pytest
from pydantic import AliasChoices, BaseModel, Field

from upweight.errors import UserError
from upweight.user_modules import CODE, bind_options, changed_code, is_path, load_function, named_call, named_errors


def test_a_function_is_found_by_dotted_path_and_by_its_file(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "losses_a.py").write_text("def loss(x): return x\n")
    by_file = load_function("inner/losses_a.py:loss", tmp_path, "trl.loss_type")
    assert by_file(3) == 3
    assert load_function("inner.losses_a.loss", tmp_path, "trl.loss_type")(3) == 3
    assert CODE["losses_a.loss"] == {
        "file": str(tmp_path / "inner" / "losses_a.py"),
        "digest": hashlib.sha256(b"def loss(x): return x\n").hexdigest(),
    }


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("inner/losses_a.py:loss", "key: there is no file inner/losses_a.py in "),
        ("losses_b.lss", "losses_b.py has no function 'lss'. Did you mean 'loss'?"),
        ("losses_b.py:lss", "losses_b.py has no function 'lss'. Did you mean 'loss'?"),
        ("losses_bb.loss", "no losses_bb.py in "),
    ],
)
def test_what_cannot_be_found_is_named(tmp_path, path, message):
    (tmp_path / "losses_b.py").write_text("def loss(x): return x\n")
    with pytest.raises(UserError) as error:
        load_function(path, tmp_path, "key")
    assert message in str(error.value)


def test_the_form_of_a_path():
    assert all(map(is_path, ("mine.loss", "a.b.c", "mine.py:loss", "/x/y-z/mine.py:loss")))
    assert not any(map(is_path, ("dapo", "mine", "mine.", "1.5", ".loss", "mine.py:", None, 3)))


def loss(ratio, advantages, *, clip: float = 0.2, name="x"):
    return ratio, advantages, clip, name


def test_options_are_checked_by_the_signature():
    bound = bind_options(loss, {"clip": "1e-3"}, "method_args", "mine.loss", ("ratio", "advantages", "mask"))
    assert bound == {"clip": 1e-3}
    with pytest.raises(UserError) as error:
        bind_options(loss, {"clap": 1, "clip": "wide"}, "method_args", "mine.loss", ("ratios", "advantages"))
    assert str(error.value).splitlines() == [
        "method_args.clap: 'mine.loss' has no such setting. Did you mean 'clip'?",
        "'mine.loss' asks for 'ratio', which is neither passed to it nor set under 'method_args'. "
        "Did you mean 'ratios'?",
        "method_args.clip: input should be a valid number, unable to parse string as a number, got 'wide'.",
    ]


def test_a_pydantic_model_gets_all_options():
    class Settings(BaseModel):
        tau: float = 0.1
        steps: int

    def with_model(ratio, args: Settings):
        return ratio, args

    bound = bind_options(with_model, {"steps": 3}, "method_args", "mine.loss", ("ratio",))
    assert bound == {"args": Settings(tau=0.1, steps=3)}
    for options, message in (
        ({"tua": 1, "steps": 1}, "tua: no such setting. Did you mean 'tau'?"),
        ({}, "steps: field req"),
    ):
        with pytest.raises(UserError, match="method_args") as error:
            bind_options(with_model, options, "method_args", "mine.loss", ("ratio",))
        assert message in str(error.value)


def test_the_options_of_a_class_are_those_of_its_init():
    class Callback:
        def __init__(self, every: int = 10):
            self.every = every

    assert bind_options(Callback, {"every": 3}, "callbacks[0]", "mine.Callback") == {"every": 3}
    with pytest.raises(UserError, match="Did you mean 'every'"):
        bind_options(Callback, {"evry": 3}, "callbacks[0]", "mine.Callback")


def test_moved_and_changed_files_are_named(tmp_path):
    (tmp_path / "losses_c.py").write_text("def loss(x): return x\n")
    load_function("losses_c.loss", tmp_path, "key")
    now = CODE["losses_c.loss"]
    assert changed_code({"losses_c.loss": now, "never.loaded": {"file": "a", "digest": "b"}}) == []
    assert changed_code({"losses_c.loss": now | {"digest": "0"}}) == [
        f"'losses_c.loss': {tmp_path / 'losses_c.py'} was changed since"
    ]
    assert changed_code({"losses_c.loss": now | {"file": "/old/losses_c.py"}}) == [
        f"'losses_c.loss': now comes from {tmp_path / 'losses_c.py'}, then from /old/losses_c.py"
    ]


def test_errors_of_users_code_are_named_and_a_lack_of_memory_passes():
    class OutOfMemoryError(RuntimeError):
        pass

    with pytest.raises(UserError, match=r"trl\.loss_type: ZeroDivisionError"), named_errors("trl.loss_type"):
        1 / 0  # noqa: B018
    with pytest.raises(OutOfMemoryError), named_errors("trl.loss_type"):
        raise OutOfMemoryError


class Aliased(BaseModel):
    """Settings that have other names in a config than in Python."""

    lam: float = Field(5.0, alias="lambda", ge=0)
    size: int = Field(1, validation_alias=AliasChoices("width", "wide"))


def test_code_of_a_notebook_is_named_by_its_line(tmp_path):
    cell = tmp_path / "ipykernel_12" / "345.py"  # as the kernel names what it compiles
    cell.parent.mkdir()
    cell.write_text("def reward(texts):\n    return texts['no']\n")
    names = {}
    exec(compile(cell.read_text(), str(cell), "exec"), names)
    with pytest.raises(UserError, match=r"indices.* \(line 2 of its cell: return texts\['no'\]\)$"):
        named_call(names["reward"], "a reward")([1.0])
    in_terminal = "<ipython-input-3-0a1b>"
    linecache.cache[in_terminal] = (1, None, cell.read_text().splitlines(keepends=True), in_terminal)
    exec(compile(cell.read_text(), in_terminal, "exec"), names)
    with pytest.raises(UserError, match=r"indices.* \(line 2 of its cell: return texts\['no'\]\)$"):
        named_call(names["reward"], "a reward")([1.0])


def test_a_settings_model_takes_its_fields_by_their_aliases():
    def loss(chosen_logps, args: Aliased):
        return chosen_logps

    bound = bind_options(loss, {"lambda": 2, "wide": 3}, "method_args", "mine.loss", ("chosen_logps",))
    assert (bound["args"].lam, bound["args"].size) == (2.0, 3)
    with pytest.raises(UserError, match=r"method_args.lam: no such setting. Did you mean 'lambda'\?"):
        bind_options(loss, {"lam": 2}, "method_args", "mine.loss", ("chosen_logps",))
