"""The decision as a library: who goes where, who waits, and what is given back."""

from __future__ import annotations

import threading
import time

import pytest

from router_policies.fleet import Fleet, NotAdmitted, Worker

CAPACITY = 10_000


def prompt(session: int, tokens: int = 8_000) -> list[int]:
    return [session * 100_000 + i for i in range(tokens)]


def fleet(*workers: str, **settings: object) -> Fleet:
    made = Fleet(admission={"rule": "rotate", **settings})
    for worker in workers:
        made.add_worker(f"http://{worker}:1", id=worker, kv_capacity_tokens=CAPACITY)
    return made


def test_a_session_stays_where_its_prefix_is() -> None:
    two = fleet("a", "b")
    first = two.admit(prompt(1), session="s1")
    assert first.wait(0)
    home = first.worker
    assert home in (Worker("a", "http://a:1"), Worker("b", "http://b:1"))
    assert first.prefill is None
    first.output()
    other = two.admit(prompt(2), session="s2")
    assert other.wait(0)
    assert other.worker != home
    first.finish(prompt_tokens=8_000, cached_tokens=0, output_tokens=1)
    other.finish()
    again = two.admit(prompt(1, 8_100), session="s1")
    assert again.wait(0)
    assert again.worker == home
    again.finish()
    assert two.is_idle


def test_a_turn_waits_for_room_in_another_thread_and_is_let_in_when_it_comes() -> None:
    one = fleet("a")
    first = one.admit(prompt(1), session="s1")
    assert first.wait(0)
    second = one.admit(prompt(2), session="s2")
    assert not second.wait(0)
    assert not second.wait(0.2)
    assert one.waiting == 1
    came: list[float] = []

    def wait() -> None:
        assert second.wait(60)
        came.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    assert not came
    first.output()
    first.finish(output_tokens=1)
    ended = time.monotonic()
    thread.join(60)
    assert came
    assert came[0] - ended < 30
    assert second.worker.id == "a"
    second.finish()
    assert one.is_idle


def test_what_is_left_without_an_end_is_given_back() -> None:
    one = fleet("a")
    with one.admit(prompt(1), session="s1") as turn:
        assert turn.wait(0)
        waiting = one.admit(prompt(2), session="s2")
        assert not waiting.wait(0)
        del waiting
        assert one.waiting == 0
        assert not one.is_idle
    assert one.is_idle
    with pytest.raises(RuntimeError, match="the turn has ended"):
        turn.finish()


def test_a_worker_that_fails_drains_or_goes_gets_nothing() -> None:
    two = fleet("a", "b")
    turn = two.admit(prompt(1), session="s1")
    assert turn.wait(0)
    failed = turn.worker.id
    turn.fail("it broke the connection")
    turn = two.admit(prompt(1), session="s1", exclude=[failed])
    assert turn.wait(0)
    left = turn.worker.id
    assert left != failed
    turn.finish()
    assert two.set_draining(left)
    assert two.set_up(failed, False)
    with pytest.raises(NotAdmitted) as refused:
        two.admit(prompt(3))
    assert refused.value.args == ("NoCandidates", None)
    assert two.set_draining(left, False)
    assert two.admit(prompt(3)).wait(0)
    assert two.remove_worker(left)
    assert not two.remove_worker(left)
    assert not two.set_up("none", True)


def test_a_policy_may_separate() -> None:
    pair = Fleet(policy="pd")
    pair.add_worker("http://p:1", id="p", role="prefill", bootstrap_port=8998)
    pair.add_worker("http://d:1", id="d", role="decode")
    with pair.admit(prompt(1)) as turn:
        assert turn.wait(0)
        assert (turn.prefill, turn.worker) == (Worker("p", "http://p:1"), Worker("d", "http://d:1"))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Fleet(policy="nothing"), "nothing"),
        (lambda: Fleet(policy_params={"factor": 1}), "policy_params: unknown field `factor`"),
        (lambda: Fleet(admission={"rule": "nothing"}), "admission: "),
        (lambda: Fleet().add_worker("ftp://a:1"), "url: expected http"),
        (lambda: Fleet().add_worker("http://a:1", role="cook"), "role: unknown variant `cook`"),
    ],
)
def test_what_cannot_be_is_named_in_one_line(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=why) as error:
        make()
    assert "\n" not in str(error.value)
