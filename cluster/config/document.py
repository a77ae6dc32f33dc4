"""YAML text as data, with the line of each field. A name that stands twice is an error, not a choice."""

from dataclasses import dataclass
from typing import Any

import yaml

from shoal.cluster.config.problems import Place


class NotYAML(Exception):
    """The text cannot be read; one line."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    data: Any
    lines: dict[Place, int]
    """Where each field begins, counted from 1."""


def read_document(text: str) -> Document:
    """Raises NotYAML."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(data={}, lines={(): 1})
        lines: dict[Place, int] = {(): 1}
        _note_lines(node, (), lines, seen=set())
        return Document(data=loader.construct_document(node), lines=lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise NotYAML(
            f"is not YAML: {error.problem or error.context}", mark.line + 1 if mark else 1
        ) from error
    except RecursionError:
        raise NotYAML("is nested too deeply: flatten it", 1) from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML forbids; a date that is none
        raise NotYAML(f"is not YAML: {str(error).splitlines()[0]}", 1) from error


def _note_lines(node: yaml.Node, place: Place, lines: dict[Place, int], seen: set[yaml.Node]) -> None:
    """Once for each node: what stands behind an alias may be large, and may be itself."""
    if node in seen:
        return
    seen.add(node)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, str(key.value))
            line = key.start_mark.line + 1
            if here in lines:
                raise NotYAML(f"says {key.value} twice, first in line {lines[here]}: drop one", line)
            lines[here] = line
            _note_lines(value, here, lines, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*place, index)] = item.start_mark.line + 1
            _note_lines(item, (*place, index), lines, seen)
