"""The hand-over of PROTOCOL.md, section 4, as a small model: every interleaving of a writer and a reader on a machine with store
buffers (x86-TSO; Owens, Sarkar, Sewell 2009) is explored. A state in which nobody can go on is a lost wake-up: sleeps have no
bound here.

The programs below follow ring.hpp and bell.hpp line by line. That the model can see anything is shown by breaking them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

Registers = dict[str, int]
Instruction = tuple[Any, ...]

# Instructions; a value is a function of the registers.
#   ("store", word, value)         into the store buffer
#   ("store_sc", word, value)      and wait until the buffer is empty
#   ("load", register, word)       the newest buffered value, else memory
#   ("add", word)                  locked: waits for an empty buffer
#   ("wait", word, register)       futex: waits for an empty buffer, sleeps if word == register
#   ("wake", word)                 futex
#   ("goto", label, condition)     if the condition holds
#   ("set", register, value)
#   ("label", name)


def one(_: Registers) -> int:
    return 1


def zero(_: Registers) -> int:
    return 0


def always(_: Registers) -> bool:
    return True


def ring(bell: str, tag: str) -> list[Instruction]:
    return [
        ("add", f"rings_{bell}"),  # B3
        ("load", "sleeping", f"sleeping_{bell}"),  # B4
        ("goto", f"{tag}_rung", lambda r: r["sleeping"] == 0),
        ("wake", f"rings_{bell}"),
        ("label", f"{tag}_rung"),
    ]


def sleep_until(bell: str, word: str, ready: Callable[[Registers], bool], broken: str) -> list[Instruction]:
    """BellWaiter::wait in a loop: on to the next instruction once `ready`, which looks at `word`."""
    look = ("load", "counter", word)
    seen = ("load", "seen", f"rings_{bell}")
    announce = ("store_sc", f"sleeping_{bell}", one)  # B1
    check = [look, ("goto", f"{bell}_awake", ready)]  # B2
    arm = {
        "seen is read after the check": [announce, *check, seen],
        "no check after announcing": [seen, announce],
        "never announced": [seen, *check],
    }.get(broken, [seen, announce, *check])
    return [
        ("label", f"{bell}_wait"),
        look,
        ("goto", f"{bell}_ready", ready),
        *arm,
        ("wait", f"rings_{bell}", "seen"),
        ("label", f"{bell}_awake"),
        ("store", f"sleeping_{bell}", zero),
        ("goto", f"{bell}_wait", always),
        ("label", f"{bell}_ready"),
    ]


def writer(messages: int, depth: int, broken: str) -> list[Instruction]:
    """RingWriter: wait for room [C2], publish [P1], ring the reader."""
    return [
        ("label", "next"),
        ("goto", "end", lambda r: r["n"] == messages),
        *sleep_until("control", "consumed", lambda r: r["n"] - r["counter"] < depth, broken),
        ("store_sc", "published", lambda r: r["n"] + 1),
        *([] if broken == "never rung for news" else ring("data", "published")),
        ("set", "n", lambda r: r["n"] + 1),
        ("goto", "next", always),
        ("label", "end"),
    ]


def reader(messages: int, depth: int, broken: str) -> list[Instruction]:
    """RingReader: wait for news [P2], consume [C1], ring the writer if the ring was full [P3]."""
    consume = ("store" if broken == "C1 is not sequentially consistent" else "store_sc", "consumed", lambda r: r["n"] + 1)
    full = ("load", "published", "published")
    return [
        ("label", "next"),
        ("goto", "end", lambda r: r["n"] == messages),
        *sleep_until("data", "published", lambda r: r["n"] < r["counter"], broken),
        *([full, consume] if broken == "P3 before C1" else [consume, full]),
        ("goto", "consumed", lambda r: r["published"] - r["n"] < depth),
        *ring("control", "consumed"),
        ("label", "consumed"),
        ("set", "n", lambda r: r["n"] + 1),
        ("goto", "next", always),
        ("label", "end"),
    ]


@dataclass(frozen=True)
class Thread:
    at: int = 0
    registers: tuple[tuple[str, int], ...] = (("n", 0),)
    buffer: tuple[tuple[str, int], ...] = ()
    asleep_on: str = ""


@dataclass(frozen=True)
class State:
    memory: tuple[tuple[str, int], ...]
    threads: tuple[Thread, ...]

    def write(self, word: str, value: int) -> State:
        return replace(self, memory=tuple((w, value if w == word else v) for w, v in self.memory))

    def put(self, index: int, thread: Thread) -> State:
        return replace(self, threads=(*self.threads[:index], thread, *self.threads[index + 1 :]))


def successors(state: State, programs: list[list[Instruction]]) -> Iterator[State]:
    for index, thread in enumerate(state.threads):
        if thread.buffer:  # the oldest buffered store reaches memory
            (word, value), *rest = thread.buffer
            yield state.write(word, value).put(index, replace(thread, buffer=tuple(rest)))
        if thread.asleep_on or thread.at == len(programs[index]):
            continue
        following = execute(state, index, thread, programs[index])
        if following is not None:
            yield run_local(following, index, programs[index])


def run_local(state: State, index: int, program: list[Instruction]) -> State:
    """On to the thread's next instruction that others can see: what is local needs no interleaving."""
    while (at := state.threads[index].at) < len(program) and program[at][0] in ("label", "goto", "set"):
        following = execute(state, index, state.threads[index], program)
        assert following is not None
        state = following
    return state


def execute(state: State, index: int, thread: Thread, program: list[Instruction]) -> State | None:
    """The state after the thread's next instruction; None while that must wait for the store buffer."""
    kind, *operands = program[thread.at]
    registers, memory = dict(thread.registers), dict(state.memory)
    done = replace(thread, at=thread.at + 1)
    if kind in ("add", "wait", "wake") and thread.buffer:
        return None
    match kind, operands:
        case "label", _:
            return state.put(index, done)
        case "goto", (label, condition):
            return state.put(index, replace(thread, at=program.index(("label", label))) if condition(registers) else done)
        case "set", (register, value):  # a new round: what the last one has loaded is dead
            return state.put(index, replace(done, registers=((register, value(registers)),)))
        case "load", (register, word):
            return state.put(index, with_register(done, register, {**memory, **dict(thread.buffer)}[word]))
        case "store", (word, value):
            return state.put(index, replace(done, buffer=(*thread.buffer, (word, value(registers)))))
        case "store_sc", (word, value):  # an exchange: locked, so behind an empty buffer and straight to memory
            return None if thread.buffer else state.write(word, value(registers)).put(index, done)
        case "add", (word,):
            return state.write(word, memory[word] + 1).put(index, done)
        case "wait", (word, register):
            return state.put(index, replace(done, asleep_on=word) if memory[word] == registers[register] else done)
        case "wake", (word,):
            threads = tuple(replace(t, asleep_on="") if t.asleep_on == word else t for t in state.threads)
            return replace(state, threads=threads).put(index, done)
    raise AssertionError(kind)


def with_register(thread: Thread, register: str, value: int) -> Thread:
    return replace(thread, registers=tuple(sorted({**dict(thread.registers), register: value}.items())))


def explore(messages: int, depth: int, broken: str = "") -> tuple[int, bool]:
    """(number of states seen, whether one of them was stuck: nobody can go on although work is left). Stops at the first."""
    programs = [writer(messages, depth, broken), reader(messages, depth, broken)]
    words = ("consumed", "published", "rings_control", "rings_data", "sleeping_control", "sleeping_data")
    start = State(tuple((word, 0) for word in words), (Thread(), Thread()))
    for index, program in enumerate(programs):
        start = run_local(start, index, program)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        following = list(successors(state, programs))
        if not following and any(t.at < len(p) for t, p in zip(state.threads, programs, strict=True)):
            return len(seen), True
        for other in following:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return len(seen), False


@pytest.mark.parametrize(("messages", "depth"), [(3, 1), (4, 2), (4, 3)])
def test_C13_no_interleaving_loses_a_wake_up(messages: int, depth: int) -> None:
    states, stuck = explore(messages, depth)
    assert not stuck and states > 1000


@pytest.mark.parametrize(
    "broken",
    [
        "seen is read after the check",
        "no check after announcing",
        "never announced",
        "never rung for news",
        "C1 is not sequentially consistent",
        "P3 before C1",
    ],
)
def test_the_model_sees_each_way_of_losing_one(broken: str) -> None:
    assert explore(3, 2, broken)[1]
