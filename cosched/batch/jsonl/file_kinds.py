"""Files that are not JSONL, recognised by their first bytes: one message, not one per line."""

from __future__ import annotations

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip FILE"),
    b"PK\x03\x04": ("zip", "unzip FILE"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d FILE"),
    b"BZh": ("bzip2", "bunzip2 FILE"),
    b"\xfd7zXZ\x00": ("xz", "unxz FILE"),
}
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BOM = b"\xef\xbb\xbf"


def fault_of_file(start: bytes) -> str | None:
    """Why a file that begins with `start` is not JSONL, and what to do; None: it may be JSONL."""
    for magic, (kind, command) in _COMPRESSED.items():
        if start.startswith(magic):
            return f"this is a {kind} file: decompress it first ({command})"
    if start.startswith(_UTF_16_MARKS) or b"\0" in start[:4]:
        return "this is UTF-16 or UTF-32: write the file as UTF-8 (iconv -f UTF-16 -t UTF-8 FILE)"
    text = start.removeprefix(_BOM).lstrip()
    if text.startswith(b"["):
        return "this is one JSON array: write one request per line (jq -c '.[]' FILE)"
    if text.partition(b"\n")[0].strip() == b"{":
        return "this is JSON over several lines: write each request on one line (jq -c . FILE)"
    if b"\n" not in start and b"\r{" in start:
        return "its lines end with CR alone: end each with a newline (tr '\\r' '\\n' < FILE)"
    return None
