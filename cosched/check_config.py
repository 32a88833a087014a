"""Print the keys of the configuration, check one, or say what cosched can plan of a server.

Without an argument COSCHED_CONFIG is validated if it is set. With a model and flags, as `cosched
serve` takes them, nothing is loaded: the answer is whether the policy plans this server, what it
does not have there, or why it refuses. Exit code 1: it refuses.

    cosched config                    the keys, their defaults, what they do
    cosched config my.json            check a file
    cosched config '{"policy": "cosched", "kv": {"eviction": "lru"}}'
    cosched config --model-path MODEL --tp 8 --cosched-policy hygen
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as types
from rich import print as print_rich
from rich.table import Table

from cosched.batch.storage import without_secrets
from cosched.cli import JsonOption, Words, field_texts, new_app, parse, run
from cosched.config import ENV_VAR, Config, load_config, parse_config
from cosched.errors import ConfigError

PAGE = Path("docs/configuration.md")

_INTRO = f"""\
# Configuration

Made by `python -m cosched.check_config --write-page` from the structs in the code; do not edit.

A server takes its configuration from the environment variable `{ENV_VAR}`: JSON, or the path of
a JSON file. `cosched serve` makes it from `--cosched-*` flags ([operate](operate.md)) and that
variable. A simulation takes the same keys with `--cosched-config`. A key that is left out has its
default, shown after `=`; one without is null. An unknown key and a value out of range are errors
that name them.

```bash
cosched config                                  # the keys, as below
cosched config '{{"kv": {{"eviction": "lru"}}}}'    # is it right? what it says with all defaults
cosched config my.json
```
"""

_NAMES = {
    types.BoolType: "true or false",
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "text",
    types.NoneType: "null",
}


class Key(NamedTuple):
    """One key of the configuration. An empty default: an object whose keys have theirs."""

    name: str
    kind: str
    default: str
    text: str


def groups(
    struct: type[msgspec.Struct] = Config, path: str = ""
) -> Iterator[tuple[str, list[Key]]]:
    """Each object of the configuration: the names of the keys that lead to it, joined by dots, with
    ``<name>`` for any name, and its own keys."""
    texts = field_texts(struct)
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    yield (
        path,
        [
            Key(one.encode_name, _kind(one.type), _default(one), texts.get(one.name, ""))
            for one in info.fields
        ],
    )
    for one in info.fields:
        for inner, any_name in _structs(one.type):
            yield from groups(inner, ".".join(filter(None, (path, one.encode_name, any_name))))


def _kind(kind: types.Type) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(_kind(one) for one in kind.types)
    if isinstance(kind, types.LiteralType):
        return " or ".join(f"`{value}`" for value in sorted(kind.values, key=str))
    if isinstance(kind, types.VarTupleType | types.ListType):
        return f"list of {_kind(kind.item_type)}"
    if isinstance(kind, types.StructType | types.DictType):
        return "object"
    return _NAMES[type(kind)]


def _structs(kind: types.Type) -> Iterator[tuple[type[msgspec.Struct], str]]:
    """The structs within a type, each with "<name>" or "<number>" if it is in a mapping or list."""
    if isinstance(kind, types.UnionType):
        for one in kind.types:
            yield from _structs(one)
    elif isinstance(kind, types.StructType):
        yield kind.cls, ""
    elif isinstance(kind, types.DictType):
        for inner, _ in _structs(kind.value_type):
            yield inner, "<name>"
    elif isinstance(kind, types.VarTupleType):
        for inner, _ in _structs(kind.item_type):
            yield inner, "<number>"


def _default(field: types.Field) -> str:
    value: Any = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    if isinstance(value, msgspec.Struct):
        return ""  # its keys have theirs
    return msgspec.json.encode(value).decode()


def page() -> str:
    """``docs/configuration.md``."""
    parts = [_INTRO]
    shown: dict[tuple[Key, ...], str] = {}
    for path, keys in groups():
        parts.append(f"\n## {f'`{path}`' if path else 'The keys'}\n\n")
        if as_in := shown.get(tuple(keys)):
            parts.append(f"As in `{as_in}`.\n")
        else:
            shown[tuple(keys)] = path
            parts += [_item(key) for key in keys]
    return "".join(parts)


def _item(key: Key) -> str:
    """A key in one line. A default shows what kind of value it is, unless that is null."""
    value = f" = `{key.default}`" if key.default not in ("", "null", "required") else ""
    if not value or key.kind == "number or `off`":
        kind = key.kind.removesuffix(" or null") + (", required" * (key.default == "required"))
        value += f" ({kind})" if key.default else ""
    return f"* `{key.name}`{value}: {key.text.replace('``', '`')}\n"


app = new_app(
    "config", __doc__, usage="Usage: cosched config [JSON|FILE | --model-path MODEL [flags]]"
)
main = partial(run, "config")


@app.default
@dataclass(kw_only=True)
class CheckConfig(JsonOption):
    words: Words = field(default=(), kw_only=False)
    write_page: bool = False
    """write docs/configuration.md, from the root of the repository"""

    def __call__(self) -> int:
        if self.write_page:
            PAGE.write_text(page(), encoding="utf-8")
            return self.finish({"program": "config", "written": str(PAGE)})
        if any(word.startswith("-") for word in self.words):
            return self._check_server()
        if len(self.words) > 1:
            raise ConfigError(f"unexpected argument {self.words[1]!r}")
        config = _read(self.words[0]) if self.words else load_config()
        if config is None:
            _print_keys()
            return self.finish({"program": "config", "config": None})
        checked = msgspec.to_builtins(config)
        if config.batches.url is not None:
            from cosched.batch.database import url_without_password

            checked["batches"]["url"] = url_without_password(config.batches.url)
        if config.batches.folder is not None:
            checked["batches"]["folder"] = without_secrets(config.batches.folder)
        print(json.dumps(checked, indent=2))
        return self.finish({"program": "config", "config": checked})

    def _check_server(self) -> int:
        import cosched.bootstrap  # noqa: F401  # before anything of SGLang's
        from cosched.engine.options import ServerFlags, config_from
        from cosched.engine.support import support

        server = parse(ServerFlags, self.words)
        config = config_from(server.options)
        found = support(server.server_args(config), config)
        print(found.verdict())
        for reason in found.refused:
            print(f"  {reason}")
        code = self.finish({"program": "config", "verdict": found.verdict(), **found._asdict()})
        return code or (1 if found.refused else 0)


def _read(text: str) -> Config:
    """The argument: JSON, or the path of a JSON file. ConfigError."""
    if text.lstrip().startswith("{"):
        return parse_config(text, source="the argument")
    try:
        content = Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {text!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{text!r} is not a text file") from None
    return parse_config(content, source=text)


def _print_keys() -> None:
    for path, keys in groups():
        table = Table(title=path or ENV_VAR, title_justify="left", box=None, pad_edge=False)
        for column in ("key", "value", "default", "what it does"):
            table.add_column(column, overflow="fold")
        for key in keys:
            table.add_row(
                key.name, key.kind.replace("`", ""), key.default, key.text.replace("`", "")
            )
        print_rich(table)


if __name__ == "__main__":
    sys.exit(main())
