"""User turns from a file."""

from __future__ import annotations

import json
from pathlib import Path

from bozza.errors import ConfigError


def read_prompts(path: Path) -> list[str]:
    """User turns of a file: a line each, plain or JSON with a "prompt" (or the string itself).

    Raises:
        ConfigError: the file is missing, empty, or a line of JSON has no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"cannot read {path}: it is no UTF-8 text") from problem
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line) if line[0] in '{"' else line
        except json.JSONDecodeError:
            value = line
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'{path}, line {number}: no "prompt"')
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts
