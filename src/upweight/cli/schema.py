"""`upweight schema`: what a config may hold."""

import json

from upweight.config.schema import json_schema, markdown


def run(*, as_markdown: bool) -> None:
    """Print the JSON schema, or the reference page."""
    print(markdown() if as_markdown else json.dumps(json_schema(), indent=2), end="" if as_markdown else "\n")
