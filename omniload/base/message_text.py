"""Preparation of the text of every message, error and log line for display.

Messages quote names, keys, paths and answers that others wrote. ``message_text`` is the one place that makes such a
text safe for a terminal: without secrets, without characters that move the cursor, change colours or turn the
direction of the text, and without endless names.
"""

import codecs
import re

from omniload.base.secrets import without_secrets

__all__ = ["SPELT_PLAINLY", "log_text", "message_text"]

SPELT_PLAINLY = "omniload.spelt_plainly"
"""Error handler for characters that a stream's encoding lacks: the characters of our drawings become plain ones of
the same width, and all others are escaped, as by ``backslashreplace``."""
_PLAIN = str.maketrans("█▉▊▋▌▍▎▏▓▇▆▅▄▃▂▁░·…±²◀▶", "#####|||%*+=-:._..~~2<>")

_LONGEST_WORD = 1024
"""Longest shown run of characters without white space: few paths and no key of settings are as long."""
_HEAD, _TAIL = 160, 80
"""Number of characters shown of the start and the end of a longer one, which identify the path or the key."""
_LONGEST_LINE = 16 << 10
"""Largest length of a line: many names in one line are as long as one long name."""
_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


def message_text(text: str) -> str:
    """Return a text as messages show it; a text that was prepared before stays unchanged."""
    text = log_text(text)
    if len(text) <= _LONGEST_WORD:
        return text
    text = _WORD.sub(lambda found: _shortened(found[0], _HEAD, _TAIL), text)
    return "\n".join(
        _shortened(line, 3 * _LONGEST_LINE // 4, _LONGEST_LINE // 8)
        if len(line) > _LONGEST_LINE
        else line
        for line in text.split("\n")
    )


def log_text(text: str) -> str:
    """Return a text as a log keeps it: in full, because lines of libraries and users must not be shortened."""
    # Escaped first, because escaping may produce a part of a URL's scheme.
    return without_secrets(_escaped(text))


def _escaped(text: str) -> str:
    """Return a text with characters that a terminal would not print escaped; line ends and tabs stay."""
    # The usual case is decided by one check, because every message and every log line passes here.
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _shortened(text: str, head: int, tail: int) -> str:
    return f"{text[:head]}...({len(text) - head - tail:,} characters left out)...{text[-tail:]}"


def _spelt_plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(SPELT_PLAINLY, _spelt_plainly)
