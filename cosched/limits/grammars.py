"""Bounds of grammars: ``json_schema``, ``regex``, ``ebnf`` and ``structural_tag``.

Compile time and memory grow with the grammar, in part with its square, and deep nesting ends the
process. The bounds are OpenAI's for structured outputs (5,000 properties and enum entries) if it
has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MOST_DOCUMENT_BYTES = 256 * 1024  # of a JSON schema or a structural tag
MOST_RULE_BYTES = 32 * 1024  # of a regular expression or an EBNF grammar
MOST_DEPTH = 64  # levels of a document, and of parentheses
MOST_ENTRIES = 5_000  # properties, and enum entries, of a document
MOST_PROPERTIES_OF_OBJECT = 500
MOST_REPEATS = 100_000  # in a repetition {n,m}, maxLength or maxItems

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Possessive, for linear time: otherwise 400 spaces after a brace take 10 s.
_REPEAT = re.compile(r"\{\s*+(\d*+)\s*+,?+\s*+(\d*+)\s*+\}")


def grammar_fault(name: str, text: str) -> str | None:
    """The error of the grammar `text` of the field `name`; None: none before it is compiled."""
    is_document = name in ("json_schema", "structural_tag")
    limit = MOST_DOCUMENT_BYTES if is_document else MOST_RULE_BYTES
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > limit:
        return f"{num_bytes} bytes are above {limit}"
    if not is_document:
        return _rule_fault(text)
    if name == "json_schema" and text == "$$ANY$$":  # SGLang's name for any JSON
        return None
    if _depth(text, "[{", "]}", quote='"') > MOST_DEPTH:
        return f"nested more than {MOST_DEPTH} levels deep"
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    return document_fault(document)


def document_fault(document: Any) -> str | None:
    """The same for a JSON document with schemas."""
    num_entries = num_properties = 0
    resolved: set[int] = set()
    for depth, node in _nodes(document):
        if depth > MOST_DEPTH:
            return f"nested more than {MOST_DEPTH} levels deep"
        if not isinstance(node, dict):
            continue
        entries, properties = node.get("enum"), node.get("properties")
        num_entries += len(entries) if isinstance(entries, list) else 0
        num_own = len(properties) if isinstance(properties, dict) else 0
        num_properties += num_own
        if num_entries > MOST_ENTRIES:
            return f"more than {MOST_ENTRIES} enum entries"
        if num_properties > MOST_ENTRIES:
            return f"more than {MOST_ENTRIES} properties"
        if num_own > MOST_PROPERTIES_OF_OBJECT:
            return f"an object with more than {MOST_PROPERTIES_OF_OBJECT} properties"
        fault = _node_fault(document, node, resolved)
        if fault is not None:
            return fault
    return None


def _node_fault(document: Any, node: dict[str, Any], resolved: set[int]) -> str | None:
    for name in _COUNTS:
        count = node.get(name)
        if isinstance(count, int | float) and not -MOST_REPEATS <= count <= MOST_REPEATS:
            return f"{name}: {count} is above {MOST_REPEATS}"
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        fault = _rule_fault(pattern)
        if fault is not None:
            return f"pattern: {fault}"
    return "a $ref leads back to itself" if _refers_to_itself(document, node, resolved) else None


def _rule_fault(text: str) -> str | None:
    if _depth(text, "(", ")") > MOST_DEPTH:
        return f"nested more than {MOST_DEPTH} levels deep"
    for found in _REPEAT.finditer(text):
        for count in found.groups():
            if len(count) > 9 or int(count or 0) > MOST_REPEATS:
                return f"the repetition {found[0][:40]} is above {MOST_REPEATS}"
    return None


def _depth(text: str, opening: str, closing: str, *, quote: str = "") -> int:
    """Deepest nesting of brackets, without escaped and quoted ones."""
    depth = deepest = 0
    is_escaped = is_quoted = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif char == quote:
            is_quoted = not is_quoted
        elif is_quoted:
            continue
        elif char in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif char in closing:
            depth -= 1
    return deepest


def _nodes(document: Any) -> Iterator[tuple[int, Any]]:
    """All nodes of a document with their levels, up to one level beyond the bound."""
    waiting = [(1, document)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        if depth <= MOST_DEPTH:
            inner = node.values() if isinstance(node, dict) else node
            if isinstance(node, dict | list):
                waiting.extend((depth + 1, each) for each in inner)


def _refers_to_itself(document: Any, node: Any, resolved: set[int]) -> bool:
    """Whether a chain of references never reaches a schema, so that it matches no text. `resolved`
    has the nodes whose chains do, so that long chains are followed once."""
    seen: set[int] = set()
    while isinstance(node, dict) and isinstance(node.get("$ref"), str) and id(node) not in resolved:
        if id(node) in seen:
            return True
        seen.add(id(node))
        node = _resolve(document, node["$ref"])
    resolved |= seen
    return False


def _resolve(document: Any, reference: str) -> Any:
    """The target of a reference within the document; None: there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node = document
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        node = node.get(part) if isinstance(node, dict) else None
    return node
