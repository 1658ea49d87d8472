"""What a server is and serves, as it says itself: dialect, model, vocabulary, words.

Must not know runs or requests.
"""

from __future__ import annotations

import contextlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from replay.engines import Api

GUESSED_VOCAB_SIZE = 32_000
"""Of a model that no one says the vocabulary of: fewer than those of most."""


Headers = tuple[tuple[str, str], ...]


def find_engine(url: str, headers: Headers = (), timeout_s: float = 10.0) -> tuple[Api, str]:
    """The dialect and the model's name that a server answers to, from its `/v1/models`.

    Stock routers before SGLang name themselves there (sglang-router 0.3.2 "local"). That one takes
    no token ids as completions, and passes on what SGLang says of its model, which vLLM never does.
    """
    model = _models(url, headers, timeout_s)[0]
    if model.get("owned_by") == "sglang" or _sglang_folder(url, headers, timeout_s):
        return "sglang", model["id"]
    return "openai", model["id"]


def find_vocab_size(url: str, headers: Headers = (), timeout_s: float = 10.0) -> int | None:
    """The vocabulary of the model that a server serves, from the `config.json` of its folder; None
    where no such file can be read here."""
    for config in _of_model_folder("config.json", url, headers, timeout_s):
        # A model of several kinds of input keeps its language model's facts apart.
        with contextlib.suppress(AttributeError):
            size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
            if isinstance(size, int) and size > 1:
                return size
    return None


def find_words(
    url: str, count: int, headers: Headers = (), timeout_s: float = 10.0
) -> tuple[str, ...] | None:
    """`count` words that are one token each to the model that a server serves, from the
    `tokenizer.json` of its folder; None where no such file can be read here, or has too few."""
    for tokenizer in _of_model_folder("tokenizer.json", url, headers, timeout_s):
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            # Byte-pair vocabularies mark a token that begins a word by one of these.
            begun = [piece[1:] for piece in tokenizer["model"]["vocab"] if piece[:1] in ("Ġ", "▁")]
            words = [word for word in begun if word.isascii() and word.isalpha()]
            words = sorted(words, key=len, reverse=True)[:count]
            if len(words) == count:
                return tuple(words)
    return None


def _of_model_folder(name: str, url: str, headers: Headers, timeout_s: float) -> Iterator[Any]:
    """The JSON file `name` in each folder that the server says its model is in and that can be read
    here: SGLang's `/model_info`, the `root` in `/v1/models` (vLLM)."""
    roots = [model.get("root") for model in _models(url, headers, timeout_s)]
    for folder in (_sglang_folder(url, headers, timeout_s), *roots):
        if isinstance(folder, str):
            with contextlib.suppress(OSError, ValueError):
                yield orjson.loads((Path(folder) / name).read_bytes())


def _sglang_folder(url: str, headers: Headers, timeout_s: float) -> str | None:
    """The model's folder as SGLang says it, itself or through a stock router, which knows only the
    older name of the page; None of other servers."""
    for page in ("model_info", "get_model_info"):
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            folder = _get(f"{url}/{page}", headers, timeout_s).get("model_path")
            if isinstance(folder, str):
                return folder
    return None


def _models(url: str, headers: Headers, timeout_s: float) -> list[dict[str, Any]]:
    address = f"{url}/v1/models"
    try:
        models: list[dict[str, Any]] = _get(address, headers, timeout_s)["data"]
    except urllib.error.HTTPError as error:
        raise InputError(f"--url {url}: {address} answered {error.code}, expected 200") from None
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"--url {url}: no server answers there ({error})") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise InputError(
            f"--url {url}: {address}: expected a JSON object with a list `data`"
        ) from None
    if not models:
        raise InputError(f"--url {url}: {address} names no model")
    return models


def _get(address: str, headers: Headers, timeout_s: float) -> Any:
    request = urllib.request.Request(address, headers=dict(headers))
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return orjson.loads(response.read())
