"""SGLang's own tests of a running server, which its wheel ships as kits, against one worker.

Runs in the engine's environment: `test_sglang_own_tests.py` starts workers with and without the
plugin and asks each with this file. ``WORKER_URL`` says where the worker listens, ``WORKER_MODEL``
what it serves. Each class takes a kit's tests as they are, with fewer and shorter answers; left out
is what a model with random weights cannot pass (it knows no capital of France) or the net is needed
for. What each test proves stands in SGLang's kit.
"""

from __future__ import annotations

import os
import random
import unittest

import requests
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.radix_cache_server_kit import gen_radix_tree
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin


class Worker:
    """What the kits take for the server's process."""

    def poll(self) -> int | None:
        """As of a process: None while it lives."""
        status = requests.get(f"{os.environ['WORKER_URL']}/health", timeout=30).status_code
        return None if status == 200 else status


class OfTheWorker(unittest.TestCase):
    base_url = os.environ["WORKER_URL"]
    model = os.environ["WORKER_MODEL"]
    process = Worker()

    def tearDown(self) -> None:
        """Whatever a test asked for has ended: SGLang refuses to flush while anything runs."""
        answer = requests.post(f"{self.base_url}/flush_cache", params={"timeout": 30}, timeout=60)
        assert answer.status_code == 200, answer.text


class TestApi(BasicAPIContractMixin, OfTheWorker):
    pass


class TestAborts(AbortAllMixin, OfTheWorker):
    abort_all_num_requests = 24
    abort_all_max_new_tokens = 3000


class TestPause(PauseResumeInPlaceMixin, OfTheWorker):
    pause_num_requests = 12
    pause_max_new_tokens = 200
    pause_duration = 2
    pause_ignore_eos = True


class TestDecode(BasicDecodeCorrectnessMixin, OfTheWorker):
    test_capital_france = None
    test_basic_math = None
    test_color_completion = None
    test_ascii_ratio = None
    test_no_repetition_blowup = None


class TestGrammar(RegexConstrainedMixin, OfTheWorker):
    # Their answers may have digits of other scripts, which then lie across the end of a token.
    test_regex_generate_number = None
    test_regex_generate_phone = None
    # Of no bounded length: a random model may use up its tokens inside.
    test_regex_generate_complex_json = None
    test_regex_generate_custom_log_format = None


class TestCache(UnifiedRadixTreeTestMixin, OfTheWorker):
    """Log probabilities of what was decoded after cache hits are those of the same prefilled."""

    test_gsm8k = None
    max_new_tokens = 24
    prefix_len = 300
    input_ids = tuple(random.Random(group).choices(range(3, 30_000), k=400) for group in range(4))

    def test_a_tree_of_prompts_that_share_prefixes(self) -> None:
        random.seed(5)
        nodes = gen_radix_tree(num_nodes=40, chunk_len=48)
        body = {
            "input_ids": [node["input_ids"] for node in nodes],
            "sampling_params": [
                {"max_new_tokens": node["decode_len"], "temperature": 0} for node in nodes
            ],
        }
        answer = requests.post(f"{self.base_url}/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()) == len(nodes)
