"""The Hugging Face hub, as lib/tokenizer.py, lib/sources.py and hub/convert.py read it."""

import re
import textwrap

# The id of a repository.
HUB_ID = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')


def hub_error(error):
    """(why, in one line; whether it may pass) of what the hub's client, or one below it, has raised."""
    if not hasattr(error, 'response') and error.__cause__:  # of a file that could not be looked for
        error = error.__cause__
    status = getattr(getattr(error, 'response', None), 'status_code', None)
    # Its first line may be a status and an id, with the reason below.
    reason = re.sub(r'^\d+ Client Error.*\n', '', str(error)) or type(error).__name__
    may_pass = status is None or status >= 500 or status in (408, 429)
    return textwrap.shorten(reason, 300, placeholder=' ...'), may_pass
