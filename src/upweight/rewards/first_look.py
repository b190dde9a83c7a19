"""What can be said of a config's reward functions without running their files."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from upweight.config import Config
from upweight.errors import did_you_mean
from upweight.user_modules import is_path, local_file


def reward_problems(config: Config) -> Iterator[str]:
    """Yield an error for each entry of `trl.reward_funcs` whose file is here and does not define its name."""
    for stage in config.stages or (config,):
        for path in filter(is_path, stage.rollout.reward_funcs):
            file = local_file(path, stage.folder)
            module, _, name = path.rpartition(":" if ":" in path else ".")
            problem = _mistyped_file(module, stage.folder) if file is None else _problem(file, name)
            if problem is not None:
                yield f"trl.reward_funcs: {problem}"


def _mistyped_file(module: str, folder: Path) -> str | None:
    """Return the message about a module that is neither here nor installed, where a file here has a similar name."""
    if not module.isidentifier() or importlib.util.find_spec(module) is not None:
        return None
    near = did_you_mean(module, {file.stem for root in (Path.cwd(), folder) for file in root.glob("*.py")})
    return f"there is no {module}.py here, and no such package.{near}" if near else None


def _problem(file: Path, name: str) -> str | None:
    """Return why a file has no function of a name; None where it may have one."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except SyntaxError as error:
        return f"{file}, line {error.lineno}: {error.msg}."
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {error}."
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {alias.asname or alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names}  # fmt: skip
    if "*" in imported or "__getattr__" in defined or name in defined | names | imported:
        return None
    public = sorted(one for one in defined if not one.startswith("_"))
    hint = did_you_mean(name, public) or (f" It has {', '.join(public[:8])}." if public else "")
    return f"{file} has no function '{name}'.{hint}"
