"""What a server is and serves, as it says itself: dialect, model, vocabulary.

Must not know runs or requests.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from replay.engines import Api

GUESSED_VOCAB_SIZE = 32_000
"""Of a model that no one says the vocabulary of: fewer than those of most."""


Headers = tuple[tuple[str, str], ...]


def find_engine(url: str, headers: Headers = (), timeout_s: float = 10.0) -> tuple[Api, str]:
    """The dialect and the model's name that a server answers to, from its `/v1/models`."""
    model = _models(url, headers, timeout_s)[0]
    return ("sglang" if model.get("owned_by") == "sglang" else "openai"), model["id"]


def find_vocab_size(url: str, headers: Headers = (), timeout_s: float = 10.0) -> int | None:
    """The vocabulary of the model that a server serves, from the `config.json` of the folder that
    SGLang's `/model_info` or the `root` in `/v1/models` (vLLM) names; None where no such file can
    be read here."""
    try:
        folders = [_get(f"{url}/model_info", headers, timeout_s).get("model_path")]
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        folders = []  # not SGLang
    folders += [model.get("root") for model in _models(url, headers, timeout_s)]
    for folder in folders:
        if not isinstance(folder, str):
            continue
        try:
            config = orjson.loads((Path(folder) / "config.json").read_bytes())
            # A model of several kinds of input keeps its language model's facts apart.
            size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(size, int) and size > 1:
            return size
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
