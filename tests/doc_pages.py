"""The README and the docs as readers copy from them: their pages, their fenced blocks, the code in
their lines, and the shell commands in both.

Owns how a command is told from what stands around it:

- lines that end with a backslash go on, a quotation may span lines, comments end with their line;
- pipes, `&&`, redirections, here-documents and `$(…)` are taken apart, and of each command only
  `deltaserve …` and `python -m …` are kept, without variables and programs in front of them;
- where lines of a block begin with `$ `, the others are output;
- `NAME=value` on a line of its own is put where its block says `$NAME`.

A command is `whole` where it stands in a block without `…`: what it needs must be there. Options in
the comment after a command (`# the other GPU: --only vllm`) are a command of their own, with the
first four words of that one.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
)
ROOMS = ("doctor", "eval", "launch", "policy", "replay", "route")

_FENCED = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^ *```")
_SHELL = ("", "sh", "bash")
_REMARK = re.compile(r"(?:^|\s)#.*")
_OPTION = re.compile(r"--(?:only|set) (?:'[^']+'|[^\s,;:()]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block, or code inside a line (`language` is then "inline")."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """The words of one command, from `deltaserve` or `python` on."""

    where: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


@cache
def blocks() -> tuple[Block, ...]:
    """The fenced blocks of all pages."""
    return tuple(
        Block(page, _line(text, found.start()), found[2], found[3])
        for page in PAGES
        for text in [page.read_text()]
        for found in _FENCED.finditer(text)
    )


@cache
def inline() -> tuple[Block, ...]:
    """Code inside lines, of all pages."""
    return tuple(
        Block(page, _line(text, found.start()), "inline", " ".join(found[1].split()))
        for page in PAGES
        for text in [_FENCED.sub(lambda block: "\n" * block[0].count("\n"), page.read_text())]
        for found in re.finditer(r"`([^`]+)`", text)
    )


@cache
def commands() -> tuple[Command, ...]:
    """Every command of ours on any page, in the order of the pages."""
    found: list[Command] = []
    for block in sorted((*blocks(), *inline()), key=lambda block: (block.page, block.line)):
        if block.language == "inline":
            if command := _mentioned(block):
                found.append(command)
        elif block.language in _SHELL and re.search(r"deltaserve |python -m ", block.text):
            found += _copied(block)
    return tuple(found)


def _line(text: str, start: int) -> int:
    return text.count("\n", 0, start) + 1


def _mentioned(block: Block) -> Command | None:
    """A command in a line, which may stand for itself without all that it needs. Rooms are named
    without `deltaserve` too: `eval run`."""
    text = block.text
    if re.match(rf"({'|'.join(ROOMS)}) [a-z]", text):
        text = f"deltaserve {text}"
    if not re.match(r"(\w+=\S+ )*(deltaserve|python -m) ", text):
        return None
    for words in simple_commands(text):
        return Command(block.where, words, whole=False)
    return None


def _copied(block: Block) -> Iterator[Command]:
    last: Command | None = None
    for code, remark in _lines(block.text):
        for words in simple_commands(code):
            last = Command(block.where, words, whole=not {"…", "..."} & {*words})
            yield last
        options = shlex.split(" ".join(_OPTION.findall(remark)))
        if last and options:
            yield replace(last, words=(*last.words[:4], *options), whole=False)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Lines of a block, those joined that are one to a shell, each with its comment."""
    if re.search(r"(?m)^\$ ", text):
        text = "\n".join(re.findall(r"(?m)^\$ (.*)$", text))
    for name, value in re.findall(r"(?m)^(\w+)=(\S+)$", text):
        text = re.sub(rf"\${name}\b", lambda _, value=value: value, text)
    text = re.sub(r"(?ms)<<'?(\w+)'?$.*?^\1$", "", text)
    begun = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        remark = _REMARK.search(line)
        begun += _REMARK.sub("", line)
        if begun.count("'") % 2:
            continue
        yield begun, remark[0] if remark else ""
        begun = ""


def simple_commands(code: str) -> Iterator[tuple[str, ...]]:
    """The commands of ours in one line of shell, those inside `$(…)` first."""
    for inside in re.findall(r"\$\(([^()]*)\)", code):
        yield from simple_commands(inside)
    lexer = shlex.shlex(
        re.sub(r"\$\([^()]*\)", "SUBSTITUTED", code), posix=True, punctuation_chars="();<>|&"
    )
    lexer.commenters = ""
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in (*lexer, ";"):
        if word and set(word) <= set("<>"):
            redirected = True
        elif word and set(word) <= set("();|&"):
            yield from _ours(words)
            words = []
        elif redirected:
            redirected = False
        else:
            words.append(word)


def _ours(words: list[str]) -> Iterator[tuple[str, ...]]:
    """The words from our program on, where they have one."""
    for place, word in enumerate(words):
        if word == "deltaserve":
            yield tuple(words[place:])
            return
        if Path(word).name == "python" and words[place + 1 : place + 2] == ["-m"]:
            yield ("python", *words[place + 1 :])
            return
