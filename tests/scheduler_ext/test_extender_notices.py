"""Events that wait: the latest of each pod and reason, one in ten seconds, every namespace in turn, a bounded number."""

from __future__ import annotations

from scheduler_ext.state.notices import Notice, Notices


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def notice(namespace: str, name: str, message: str = "", kind: str = "Pod") -> Notice:
    return Notice(kind, namespace, name, f"{namespace}/{name}", "Why", message)


def test_the_latest_of_each_pod_is_taken_and_the_next_one_later() -> None:
    clock = Clock()
    waiting = Notices(clock)
    for number in range(100):
        waiting.put(notice("a", "x", str(number)))
    assert waiting.take(20) == [notice("a", "x", "99")._replace(times=100)]
    waiting.put(notice("a", "x", "again"))
    clock.now = 9.9
    assert waiting.take(20) == []
    clock.now = 10.0
    assert waiting.take(20) == [notice("a", "x", "again")]


def test_of_a_node_nothing_is_lost() -> None:
    waiting = Notices(Clock())
    said = [notice("", "n", text, "Node") for text in ("of one pod", "of another")]
    for one in said:
        waiting.put(one)
    assert waiting.take(20) == said


def test_namespaces_take_turns_and_the_loudest_one_loses_what_is_too_much() -> None:
    waiting = Notices(Clock())
    waiting.put(notice("quiet", "x"))
    for number in range(1500):
        waiting.put(notice("loud", str(number)))
    first = waiting.take(3)
    assert [one.namespace for one in first] == ["quiet", "loud", "loud"]
    assert first[1].name == "501", "the oldest ones are dropped"
