"""Published models by name, as their publishers' configurations; each becomes a `ModelSpec` on use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError, install
from jettison.core.files import read_table
from jettison.families.config import parse_config
from jettison.families.family import Named
from jettison.spec.model import ModelSpec

_FILE: Final = Path(__file__).with_name("presets.toml")
OWN_RUNS: Final[Mapping[str, Mapping[str, Any]]] = {"paper": {"kernels": "megatron", "attention": "eager", "seq": 2048}}
"""Defaults of a request that differ for a family: the GPTs of arXiv 2205.05198 were trained by Megatron."""


def _preset(table: Mapping[str, Any]) -> Mapping[str, Any]:
    own = dict(table)
    like, null = own.pop("like", None), own.pop("null", ())
    own = {key: value for key, value in own.items() if key not in ("family", "shown")}
    return {**(PRESETS[like] if like else {}), **own, **dict.fromkeys(null)}


_PRESETS: Final = Named(lambda: read_table(_FILE), _preset)
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = _PRESETS
"""Configurations by name, in the form of a ``config.json``: transformers' own classes accept them too."""


def unknown_preset(name: str, others: str) -> UsageError:
    """Error for an unknown model name. ``others``: alternatives, as the start of a sentence."""
    close = _nearest(name)[:4]
    hint = f"the closest are {', '.join(close)}" if close else "`jettison list models` has the presets"
    missing = ", which is no file or folder here" * ("/" in name)
    return UsageError(f"got the model {name!r}{missing}; {hint}. {others} will work as well")


@cache
def preset(name: str) -> ModelSpec:
    """Return a published model by name; a `UsageError` names similar ones."""
    if name not in PRESETS:
        raise unknown_preset(name, "A config.json or its folder")
    model = parse_config(PRESETS[name], name=name)
    return replace(model, family=_PRESETS.names[name].get("family", model.family))


def shown() -> list[str]:
    """Models of the explorer's matrix, in order."""
    places = {name: table["shown"] for name, table in _PRESETS.names.items() if "shown" in table}
    return sorted(places, key=places.__getitem__)


# Models by their Hugging Face id: `config.json` from the local cache, or from the Hub ---------------------------------


_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SECONDS: Final = 5.0
"""Timeout for the Hub, in seconds."""


def is_hub_id(model: str) -> bool:
    """Whether this is ``organisation/name``, and not an existing file or folder."""
    return bool(_ID.fullmatch(model)) and not model.endswith(".json") and not Path(model).exists()


def hub_config(model: str) -> Path:
    """Return the ``config.json`` of a Hugging Face id: from the cache, else the Hub. `UsageError` if neither has it."""
    cached = cached_config(model)
    return _fetched(model) if cached is None else cached


def hub_cache() -> Path:
    """Folder of Hugging Face's download cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name])
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def cached_config(model: str) -> Path | None:
    """File of the revision that ``main`` pointed to when it was fetched, else of the newest cached one."""
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    named = [folder / "snapshots" / main] if re.fullmatch(r"[0-9a-f]{40}", main) else []
    others = sorted((folder / "snapshots").glob("*"), key=lambda path: (-path.stat().st_mtime, path.name))
    return next((path / "config.json" for path in (*named, *others) if (path / "config.json").is_file()), None)


def _fetched(model: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.constants import ENDPOINT
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise _unknown(model, f"fetching from the Hub needs its library ({install('hf')})") from None
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off"):
        raise _unknown(model, "HF_HUB_OFFLINE forbids access to the Hub")
    if not _answers(f"{ENDPOINT}/{model}/resolve/main/config.json"):
        raise _unknown(model, "the Hub cannot be reached")
    try:
        return Path(hf_hub_download(model, "config.json", etag_timeout=_SECONDS))
    except LocalEntryNotFoundError:
        raise _unknown(model, "the Hub cannot be reached") from None
    except (HfHubHTTPError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _unknown(model, f"the Hub refuses it: {first}") from None


def _answers(url: str) -> bool:
    """Whether the Hub responds. Its own library retries six times, for half a minute, before it fails."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, method="HEAD"), timeout=_SECONDS):
            return True
    except HTTPError:
        return True
    except (OSError, ValueError):
        return False


def _nearest(model: str) -> list[str]:
    """Presets with names similar to the last part of this one, the most similar first."""
    from difflib import get_close_matches  # imported on use, to keep the command line's start fast

    asked = _letters(model.rpartition("/")[2])
    spelled = {_letters(name): name for name in reversed([*PRESETS])}
    within = sorted((name for name in spelled if name in asked), key=len, reverse=True)
    close = get_close_matches(asked, [*reversed(spelled)], n=4, cutoff=0.6)
    return [spelled[name] for name in dict.fromkeys([*within, *close])]


_TUNED: Final = ("instruct", "chat", "it", "pt", "thinking")
_SAME_SIZES: Final = frozenset({*_TUNED, "meta", "hf", "v0.1", "v1.0", "bf16", "fp16", "uncased", "4k", "1124", "2507"})
"""Parts of a repository's name that do not affect sizes."""


def preset_named(model: str) -> str | None:
    """The preset that a name or a Hugging Face id equals, ignoring parts that do not affect sizes."""
    words = re.split(r"[-_ ]", model.rpartition("/")[2].lower())
    for left_away in (_SAME_SIZES, _SAME_SIZES | {"base"}):
        asked = "".join(word for word in words if word not in left_away)
        found = next((name for name in PRESETS if name.replace("-", "") == asked), None)
        if found is not None:
            return found
    return None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unknown(model: str, why: str) -> UsageError:
    nearest = "".join(f"The nearest preset is {name}, which needs no file. " for name in _nearest(model)[:1])
    return UsageError(
        f"got the model {model!r}: no such file or folder exists, it is not in the Hugging Face cache "
        f"({hub_cache()}), and {why}. {nearest}Give a config.json, its folder, or a name that `jettison list "
        "models` has"
    )
