"""Reference pages for coding agents, as `upweight agent-docs` prints them."""

from pathlib import Path

from upweight.errors import UserError, did_you_mean

FOLDER = Path(__file__).parent
TOPICS = sorted(path.stem for path in FOLDER.glob("*.md"))


def run(topic: str | None) -> None:
    """Print a page, or what pages there are."""
    if topic is None:
        for name in TOPICS:
            first = (FOLDER / f"{name}.md").read_text(encoding="utf-8").splitlines()[0]
            print(f"upweight agent-docs {name:<18}{first.removeprefix('# ').partition(':')[0]}")
        return
    if topic not in TOPICS:
        raise UserError(f"there is no page '{topic}'.{did_you_mean(topic, TOPICS)} There are: {', '.join(TOPICS)}.")
    print((FOLDER / f"{topic}.md").read_text(encoding="utf-8"), end="")
