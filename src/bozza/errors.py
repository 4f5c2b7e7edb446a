"""Every error that Bozza raises for a user to act on. Each message is one line that says what to do.

BozzaError
├── ConfigError       an option is unknown, out of range, or would have no effect
├── PromptError       a prompt is empty, too long or not made of this model's tokens
├── ModelError        a model cannot be found, fetched or loaded
└── UnsupportedModel  a model loads, but cannot run exactly in one ragged pass
"""


def first_line(problem: BaseException) -> str:
    """Another library's error in a line: its type, and the beginning of what it says."""
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0][:200]}" if text else type(problem).__name__


class BozzaError(Exception):
    """Base of all errors below; its text is meant for a person."""


class ConfigError(BozzaError, ValueError):
    """An option is unknown, out of range, or would have no effect."""


class PromptError(BozzaError, ValueError):
    """A prompt is empty, too long for the context, or holds ids that the model does not have."""


class ModelError(BozzaError):
    """A model cannot be found, fetched or loaded."""


class UnsupportedModel(ModelError):  # noqa: N818 - it names the model's state, the base class says error
    """A model loads, but a ragged pass of it is not equal to a plain one, so nothing could be promised."""
