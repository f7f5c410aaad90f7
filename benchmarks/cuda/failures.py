"""What a bundle of kernels and networks of tests found: which were wrong or failed, by class.

    python failures.py RESULTS.jsonl

Prints them, and writes them to RESULTS.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Lines = Sequence[dict[str, Any]]


def checked(lines: Lines) -> list[dict[str, Any]]:
    """Return what was said last of each kernel, network, and kernel of a network."""
    latest = {(line["part"], line["key"]): line for line in lines if "key" in line}
    kept = ("kernel", "network", "key", "label", "right", "error", "us", "spec", "point")
    return [{key: line[key] for key in kept if key in line} for line in latest.values()]


def said(results: Lines) -> str:
    """Return how many kernels of each class are right, and what the others did."""
    kinds = Counter(kind_of(result) for result in results)
    right = Counter(kind_of(result) for result in results if result["right"])
    lines = [f"{kind}: {right[kind]} of {count} right" for kind, count in kinds.items()]
    for result in results:
        if not result["right"]:
            about = (result.get(k) for k in ("kernel", "network", "label", "key"))
            name = " ".join(filter(None, about))
            lines.append(f"{name}: {result['error']}\n    {result.get('spec', '')}")
    return "\n".join(lines)


def kind_of(result: dict[str, Any]) -> str:
    """Return the class of a result."""
    engine = str(result.get("label", "")).partition(" ")[0]
    if "network" in result:
        return "networks" if result["key"] == "main" else "their kernels, without a check"
    kind = result["kernel"].rpartition("-")[0]
    return f"{kind} {engine}" if kind in ("binary", "bounds") else kind


def main() -> None:
    path = Path(sys.argv[1])
    head, *lines = map(json.loads, path.read_text().splitlines())
    results = checked(lines)
    sessions = [line for line in lines if "session" in line]
    content = {**head, "sessions": sessions, "results": results}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    print(said(results))


if __name__ == "__main__":
    main()
