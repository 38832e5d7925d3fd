"""Text of ours that a client stores unread and sends back: reasoning, and the summary of a compacted conversation.

Clients of OpenAI's know such text as `encrypted_content`, and many send nothing else of reasoning back. Here it is only
encoded: its sender may as well have sent the text.
"""

import base64
import binascii

_PREFIX = "parallm:"


def sealed(text: str) -> str:
    """The text in the form of `encrypted_content`."""
    return _PREFIX + base64.b64encode(text.encode(errors="replace")).decode()


def unsealed(content: str | None) -> str:
    """The text in it; "" for what another server has encrypted."""
    if content is None or not content.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
