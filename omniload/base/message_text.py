"""What becomes of the text of every message, error or line of a log, before anybody reads it.

Messages quote names, keys, paths and answers that others wrote. ``message_text`` is the one place that
makes such a text fit for a terminal, whoever quoted it: no secret, no character that moves the cursor, colours what
follows or turns its direction, and no name without an end.
"""

import codecs
import re

from omniload.base.secrets import without_secrets

__all__ = ["SPELT_PLAINLY", "log_text", "message_text"]

SPELT_PLAINLY = "omniload.spelt_plainly"
"""What a stream does with characters that its encoding has none for: those we draw with become plain ones of the same
width, and all others are spelt out, as by ``backslashreplace``."""
_PLAIN = str.maketrans("█▉▊▋▌▍▎▏▓▇▆▅▄▃▂▁░·…±²◀▶", "#####|||%*+=-:._..~~2<>")

_LONGEST_WORD = 1024
"""Characters without white space: few paths and no key of settings have as many."""
_HEAD, _TAIL = 160, 80
"""Characters of a longer one that are shown, of its start and its end: both say what it is the path or the key of."""
_LONGEST_LINE = 16 << 10
"""Many names in one line are as long as one."""
_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


def message_text(text: str) -> str:
    """Return a text as messages show it; one that was made before stays as it is."""
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
    """Return a text as a log keeps it: all of it, for a line of a library or of a user's program is nobody's to cut."""
    # Spelt out first: what is spelt out may be a part of a URL's scheme.
    return without_secrets(_escaped(text))


def _escaped(text: str) -> str:
    """Return a text with what a terminal would not print spelt out; ends of lines and tabs stay."""
    # The usual case in one look: every message and every line of a log comes by here.
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
