"""Credentials out of anything that is shown: messages, logs, reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

# user:password@ as FFmpeg cuts it: up to the last @ before the first slash. After the colon a quote may be
# part of the password; before it, it ends the address. udp://@group:port has no credentials.
_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)(?:[^\s/?#\"'<>:@][^\s/?#\"'<>:]*|[^\s/?#\"'<>:@]*:[^\s/?#]*)@")
# A bare slash in a password: what stands before it looks like host:port with a port that is no number.
_SLASHED = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)[^\s/?#\"'<>@:\[]+:(?!\d*[/?#])[^\s/?#@\"'<>]*[/?#][^\s\"'<>]*@")
# An address inside another one's query.
_ENCODED = re.compile(r"(%3A%2F%2F)[^\s&#\"'<>]*%40", re.IGNORECASE)

# What stands behind the application and the last slash of an RTMP address is the stream key, with its query.
_STREAM_KEY = re.compile(r"(\brtmp\w*://[^\s/?#\"'<>]+/(?:[^\s/?#\"'<>]+/)+)[^\s/\"'<>]*[^\s/\"'<>:,)]", re.IGNORECASE)
_STREAM_ID = re.compile(r"(\bsrt://[^\s\"'<>]*?[?&]streamid=)[^&\s\"'<>]*[^&\s\"'<>:,)]", re.IGNORECASE)

# In a query the short names count too; in running text only what can mean nothing else.
_LONG = r"passphrase|password|passwd|token|secret|signature|credentials?|(?:api|access|stream)[_\-]?key"
_SHORT = r"key|pass|pwd|pw|auth|authorization|sig|jwt|hmac|hdn\w+|user|username|login"
_PARAMETER = re.compile(r"([?&;#])([\w.\-%~]+)=([^&;#\s\"'<>]*[^&;#\s\"'<>:,)])")
_SECRET = re.compile(rf"[\w.\-]*(?:{_LONG})|(?:[\w.\-]*[_.\-])?(?:{_SHORT})", re.IGNORECASE)
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s&;,#\"'<>)}\]]*[^\s&;,#\"'<>)}\]:])"
_TEXT = re.compile(rf"((?:{_LONG})(?:\s*=\s*|['\"]\s*[:=]\s*)){_VALUE}", re.IGNORECASE)
_HEADER = re.compile(
    r"(\b(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)(?:(?:basic|bearer|digest)\s+)?[^\s\"',;]+",
    re.IGNORECASE,
)

# A folder begins behind a blank, a bracket or an equals sign, so that neither an address nor a fraction is one. Blanks
# are part of it between quotes, where it is known to end. What is below /proc/self is no machine's own.
_ROOT = r"(?:file://)?(?:[A-Za-z]:)?(?:\\\\|/|\\)(?!proc/self/)"
_FOLDERS = re.compile(
    rf"(?<=['\"]){_ROOT}(?=[^\s/\\])(?:[^'\"/\\]+[/\\])*"
    rf"|(?<![^\s=(\[{{,]){_ROOT}(?=[^\s/\\])(?:[^\s:'\",;(){{}}\[\]/\\]+[/\\])*"
)


def redact(text: object) -> str:
    """``text`` with every credential in it replaced by ``***``: in addresses, queries, headers and options.

    Host, path and the names of parameters stay, so that a message still says which input it is about.
    Applying it twice changes nothing more.
    """
    out = str(text)
    if "://" in out:
        out = _SLASHED.sub(rf"\1{HIDDEN}@", out)
        out = _USERINFO.sub(rf"\1{HIDDEN}@", out)
        out = _STREAM_KEY.sub(rf"\1{HIDDEN}", out)
        out = _STREAM_ID.sub(rf"\1{HIDDEN}", out)
    if "%" in out:
        out = _ENCODED.sub(rf"\1{HIDDEN}%40", out)
    if "=" in out or ":" in out:
        out = _PARAMETER.sub(_parameter, out)
        out = _HEADER.sub(rf"\1{HIDDEN}", out)
        out = _TEXT.sub(rf"\1{HIDDEN}", out)
    return out


def without_folders(value: Any) -> Any:
    """``value``, any JSON, with the folder of every absolute path in its texts as ``…``: what is passed on names no
    folder of a machine.
    """
    if isinstance(value, str):
        return _FOLDERS.sub("…/", value)
    if isinstance(value, Mapping):
        return {key: without_folders(each) for key, each in value.items()}
    return [without_folders(each) for each in value] if isinstance(value, list | tuple) else value


def _parameter(found: re.Match[str]) -> str:
    mark, name, value = found.groups()
    shown = HIDDEN if _SECRET.fullmatch(unquote(name)) else _PARAMETER.sub(_parameter, value)
    return f"{mark}{name}={shown}"
