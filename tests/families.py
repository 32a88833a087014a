"""What cosched says of the commands that SGLang's cookbook recommends, listed in families.toml.

``python -m tests.families`` asks and prints the table of docs/results/families.md; with ``--write``
it goes into that page.
"""

import datetime
import shlex
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from cosched.versions import versions
from tests.resolve_servers import resolve_servers

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/results/families.md"
DATA = tomllib.loads((HERE / "families.toml").read_text())

_PRETENDED = {"H100": "H100", "H200": "H100", "B200": "B200"}
"""SGLang's arguments tell an H200 from an H100 by its memory only."""

_KINDS = {"command": "", "advice": "cosched's advice: ", "old": "old name of a flag: "}
"""Of the file's commands: what the table adds to the strategy."""


class Command(NamedTuple):
    """kind: command, advice or old, as in the file; verdict: what cosched is to say; server: as
    `resolve_servers` takes it."""

    family: str
    strategy: str
    gpu: str
    flags: str
    verdict: str
    kind: str
    server: dict


class Answer(NamedTuple):
    """verdict: planned, planned without, refused, or SGLang refuses; reasons: one sentence each."""

    verdict: str
    reasons: tuple[str, ...]

    def is_as(self, expected: str) -> bool:
        """Whether the verdict is the same, and its words are those of the reasons."""
        verdict, _, text = expected.partition(": ")
        words = text.split("; ") if text else []
        return (
            verdict == self.verdict
            and all(any(word in reason for word in words) for reason in self.reasons)
            and all(any(word in reason for reason in self.reasons) for word in words)
        )


def commands() -> list[Command]:
    return [
        Command(
            family["name"],
            command["strategy"],
            command["gpu"],
            command["flags"],
            command["verdict"],
            kind,
            _server(family, command),
        )
        for family in DATA["family"]
        for kind in _KINDS
        for command in family.get(kind, ())
    ]


def ask(asked: list[Command]) -> list[Answer]:
    """In the order of the commands."""
    found: dict[int, Answer] = {}
    for gpu in sorted(set(_PRETENDED.values())):
        places = [n for n, one in enumerate(asked) if _PRETENDED[one.gpu] == gpu]
        said = resolve_servers([asked[n].server for n in places], gpu)
        found.update(zip(places, map(_answer, said), strict=True))
    return [found[n] for n in range(len(asked))]


def table(asked: list[Command], answers: list[Answer]) -> str:
    rows = ["| family | strategy | GPU | cosched | why |", "|---|---|---|---|---|"]
    last = None
    for one, said in zip(asked, answers, strict=True):
        name = one.family if one.family != last else ""
        last = one.family
        why = "; ".join(map(_short, said.reasons))
        strategy = f"{_KINDS[one.kind]}{one.strategy}"
        rows.append(f"| {name} | {strategy} | {one.gpu} | {said.verdict} | {why} |")
    return "\n".join(rows)


def summary(asked: list[Command], answers: list[Answer]) -> str:
    """How many commands and families are planned in full."""
    planned: dict[str, list[bool]] = {}
    for one, said in zip(asked, answers, strict=True):
        if one.kind == "command":
            planned.setdefault(one.family, []).append(said.verdict == "planned")
    num_commands = sum(len(of_family) for of_family in planned.values())
    num_planned = sum(sum(of_family) for of_family in planned.values())
    whole = [name for name, of_family in planned.items() if all(of_family)]
    num_some = sum(any(of_family) for of_family in planned.values())
    return (
        f"{num_planned} of the {num_commands} recommended commands are planned in full. Of the "
        f"{len(planned)} families, {len(whole)} have every command planned in full "
        f"({'; '.join(whole)}), and {num_some} at least one."
    )


def _server(family: dict, command: dict) -> dict:
    folder = family["model"].split("/")[-1]
    draft = f"{folder}-eagle"
    file = family.get("file", "config.json")
    config = _with_sizes(family["config"]) | command.get("config", {})
    files = {f"{folder}/{file}": config}
    files |= {f"{folder}/{name}": text for name, text in family.get("code", {}).items()}
    if "draft" in family:
        files[f"{draft}/{file}"] = _with_sizes(family["draft"])
    words = shlex.split(command["flags"].replace("{draft}", f"{{folder}}/{draft}"))
    start = next(n for n, word in enumerate(words) if word.startswith("-"))
    return {
        "files": files,
        "flags": ["--model-path", f"{{folder}}/{folder}", *words[start:]],
        "environment": dict(word.split("=", 1) for word in words[:start]),
    }


def _with_sizes(config: dict) -> dict:
    if "text_config" in config:
        return config | {"text_config": DATA["sizes"] | config["text_config"]}
    return DATA["sizes"] | config


def _answer(said: dict) -> Answer:
    if "error" in said:
        return Answer("SGLang refuses", (said["error"],))
    if said["refused"]:
        return Answer("refused", tuple(said["refused"]))
    if said["without"]:
        return Answer("planned without", tuple(said["without"]))
    return Answer("planned", ())


_IN_SHORT = ("sliding-window", "state-space", "prefill delayer")


def _short(reason: str) -> str:
    """A reason in a word, or without its subject and the way out."""
    for words in _IN_SHORT:
        if words in reason:
            return words
    return reason.split(": ", 1)[-1].split(";")[0].split(" (--help")[0]


def main(argv: list[str]) -> int:
    asked = commands()
    answers = ask(asked)
    made = f"{summary(asked, answers)}\n\n{table(asked, answers)}\n"
    if argv == ["--write"]:
        found = versions("transformers")
        with_what = f"SGLang {found['sglang']} and transformers {found['transformers']}"
        head = PAGE.read_text().split("\nOn ")[0]
        PAGE.write_text(f"{head}\nOn {datetime.date.today()}, with {with_what}: {made}")
    else:
        print(made, end="")
    wrong = [
        f"{one.family}, {one.strategy}, {one.gpu}: {one.verdict!r} expected, not {said}"
        for one, said in zip(asked, answers, strict=True)
        if not said.is_as(one.verdict)
    ]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
